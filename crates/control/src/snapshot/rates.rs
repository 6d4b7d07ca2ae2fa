//! Rates over the last 1, 10 and 60 seconds.
//!
//! The switch samples its counters and divides by its own clock, so a client that is slow, or asks seldom, gets the right numbers all the same. A window
//! begins at a sample, so it is somewhat longer than its name says ([`Rates::seconds`] is the true length), and shorter in a switch that was just started.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The windows over which rates are told, in seconds.
pub const WINDOWS: [u64; 3] = [1, 10, 60];

/// Rates of counters over one window.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Rates {
    /// The window in seconds: 1, 10 or 60 ([`WINDOWS`]).
    pub window: u64,
    /// Its true length in seconds.
    pub seconds: f64,
    /// Each counter that has grown, per second.
    pub counters: BTreeMap<String, f64>,
    /// Drops by reason, per second, if there were any.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub drops: BTreeMap<String, f64>,
}

impl Rates {
    /// The rate of a counter, 0 if it has not grown.
    pub fn counter(&self, name: &str) -> f64 {
        self.counters.get(name).copied().unwrap_or(0.0)
    }

    /// The rate of a counter of bytes, in bits.
    pub fn bits(&self, name: &str) -> f64 {
        8.0 * self.counter(name)
    }

    /// Drops per second, for whatever reason.
    pub fn dropped(&self) -> f64 {
        // A sum of nothing would be -0.
        self.drops.values().fold(0.0, |sum, rate| sum + rate)
    }

    /// The share of the time that a counter of microseconds has grown by, 0 to 100.
    pub fn percent_of_time(&self, name: &str) -> f64 {
        (self.counter(name) / 10_000.0).min(100.0)
    }
}

/// The load of a worker over one window. Its three shares of the time add up to 100.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WorkerLoad {
    /// The window in seconds: 1, 10 or 60 ([`WINDOWS`]).
    pub window: u64,
    /// Its true length in seconds.
    pub seconds: f64,
    /// Share of the time in which it moved packets.
    pub busy_percent: f64,
    /// Share of the time in which it was awake and found nothing.
    pub polling_percent: f64,
    /// Share of the time in which it slept.
    pub sleeping_percent: f64,
    /// Share of the time for which it could have run and had no processor: others used them, or a limit on CPU time held it back. It is part of the other
    /// three, mostly of the sleep that it woke up from too late.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub run_delay_percent: f64,
    /// Times per second it was woken by an event.
    pub wakeups: f64,
    /// Bursts per second.
    pub bursts: f64,
    /// Of the work that it did, the share of each port that sent what it worked on, 0 to 100, by the price list with which the switch shares its time.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ports: BTreeMap<String, f64>,
}

/// Returns true if a share need not be told, as earlier versions do not tell it.
fn is_nothing(share: &f64) -> bool {
    *share == 0.0
}

impl WorkerLoad {
    /// The ports that it works for, with their shares, the largest first.
    pub fn by_share(&self) -> Vec<(&str, f64)> {
        let mut ports: Vec<_> = self.ports.iter().map(|(name, share)| (name.as_str(), *share)).collect();
        ports.sort_unstable_by(|(one, a), (other, b)| b.total_cmp(a).then_with(|| one.cmp(other)));
        ports
    }
}
