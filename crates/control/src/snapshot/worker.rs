//! One worker thread.

use serde::{Deserialize, Serialize};

use super::{WorkerLoad, is_zero};

/// One worker thread, counted since it started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WorkerSnapshot {
    /// Rounds over all ports.
    pub polls: u64,
    /// Rounds that moved at least one packet.
    pub busy_polls: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Times it was woken by an event, not by a timer.
    pub wakeups: u64,
    /// Time asleep, as far as it has woken up again, in nanoseconds. None of a switch from before it was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sleep_nanoseconds: Option<u64>,
    /// Share of its life it was awake, 0 to 100. For its load now see [`load`](Self::load).
    pub busy_percent: f64,
    /// Time of rounds that moved at least one packet, in nanoseconds.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub busy_nanoseconds: u64,
    /// Time awake in which nothing was found, in nanoseconds.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub polling_nanoseconds: u64,
    /// Time for which it could have run and had no processor, in nanoseconds.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub run_delay_nanoseconds: u64,
    /// Bursts by the number of packets in them, in buckets of 1, 2, 3-4, 5-8, 9-16 and 17-32 ([`BURSTS`](Self::BURSTS)).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bursts: Vec<u64>,
    /// Busy rounds by the time they took, in buckets that end at 4, 16, 64 and 256 µs, 1, 4 and 16 ms, and one for more ([`ROUNDS`](Self::ROUNDS)): so long a frame waits at most until its port is looked at.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rounds: Vec<u64>,
    /// Its load over the last 1, 10 and 60 seconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub load: Vec<WorkerLoad>,
}

impl WorkerSnapshot {
    /// Packets in the bursts of each bucket of [`bursts`](Self::bursts).
    pub const BURSTS: [&str; 6] = ["1", "2", "3-4", "5-8", "9-16", "17-32"];
    /// Duration of the rounds of each bucket of [`rounds`](Self::rounds).
    pub const ROUNDS: [&str; 8] =
        ["<4us", "4-16us", "16-64us", "64-256us", "256us-1ms", "1-4ms", "4-16ms", ">16ms"];

    /// Its load over this window.
    pub fn load_over(&self, window: u64) -> Option<&WorkerLoad> {
        self.load.iter().find(|load| load.window == window)
    }
}
