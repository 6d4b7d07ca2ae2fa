//! Queue pairs in ethtool's words: how many are in use (`ethtool -l`), what spreads packets over them, and what each has counted
//! (`ethtool -S`).
//!
//! A switch answers for the guests behind its ports, `ringferry guest` for its own tap. Names of counters keep the point of view
//! of who answers: `rx` is what a guest received, and what a switch received from the port.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt::Write as _;

use ringferry_packet::flow::HashTypes;
use serde::{Deserialize, Serialize};

use crate::names;
use crate::rules::Kept;
use crate::text::Table;

/// How many queue pairs there are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Channels {
    /// The port.
    pub port: String,
    /// Most pairs that can be in use.
    pub max_combined: u16,
    /// Pairs in use: of a switch's port what `SET_VRING_ENABLE` enabled; of a guest what was asked for, of which
    /// [`Steering`] shows those that there is enough to do for.
    pub combined: u16,
    /// Pairs that are set up, in use or not.
    pub started: u16,
}

/// What decides which queue a packet takes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Steering {
    /// The port.
    pub port: String,
    /// What steers, for people.
    pub by: String,
    /// What is hashed of a packet where a hash decides, in the words of VIRTIO 1.4, 5.1.6.4.3.
    #[serde(with = "crate::names::hash_types")]
    #[cfg_attr(feature = "schema", schemars(with = "Vec<String>"))]
    pub hash_types: HashTypes,
    /// Each queue pair that there is.
    pub queues: Vec<QueueSteering>,
    /// Whether the assignment is kept that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Kept>,
}

/// Where a queue pair is served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QueueSteering {
    /// Number of the pair.
    pub queue: u16,
    /// Whether it is in use.
    pub enabled: bool,
    /// The processor that serves it, and handles its calls; `None`: any.
    pub cpu: Option<usize>,
    /// The worker that serves it, in a switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u16>,
}

/// What was counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Stats {
    /// The port.
    pub port: String,
    /// Counters by name, such as `rx_packets`, and of queues such as `rx_queue_0_packets`.
    pub counters: BTreeMap<String, u64>,
}

impl Channels {
    /// As `ethtool -l` has it.
    pub fn to_text(&self) -> String {
        let Channels { port, max_combined, combined, started } = self;
        format!(
            "Channel parameters for {port}:\nPre-set maximums:\nCombined: {max_combined}\n\
             Current hardware settings:\nCombined: {combined}\nSet up:   {started}\n"
        )
    }
}

impl Steering {
    /// For a terminal.
    pub fn to_text(&self) -> String {
        let mut text = format!("Steering of {}: {}\n", self.port, self.by);
        if !self.hash_types.is_empty() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "Hash types: {}", names::of(&self.hash_types, names::upper).join(" "));
        }
        let mut table = Table::new(&[">QUEUE", "<STATE", ">CPU", ">WORKER"]);
        for queue in &self.queues {
            let or = |number: Option<String>, none: &str| number.unwrap_or_else(|| none.to_owned());
            table.row([
                queue.queue.to_string(),
                if queue.enabled { "enabled" } else { "disabled" }.to_owned(),
                or(queue.cpu.map(|cpu| cpu.to_string()), "any"),
                or(queue.worker.map(|worker| worker.to_string()), "-"),
            ]);
        }
        let _ = write!(text, "{table}");
        if let Some(kept) = &self.kept {
            text += &kept.to_text();
        }
        text
    }
}

impl Stats {
    /// As `ethtool -S` has it: one counter a line, queues in the order of their numbers.
    pub fn to_text(&self) -> String {
        let mut text = format!("Statistics for {}:\n", self.port);
        let mut counters: Vec<_> = self.counters.iter().collect();
        counters.sort_unstable_by(|(one, _), (other, _)| natural(one, other));
        for (name, count) in counters {
            let _ = writeln!(text, "     {name}: {count}");
        }
        text
    }
}

/// Names with the numbers in them by their value: `queue_2` before `queue_10`.
fn natural(one: &str, other: &str) -> Ordering {
    let parts = |name: &str| -> Vec<(u64, String)> {
        name.split('_').map(|part| (part.parse().unwrap_or(0), part.to_owned())).collect()
    };
    parts(one).cmp(&parts(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_listed_by_number() {
        let mut names = ["rx_queue_10_bytes", "rx_queue_2_packets", "rx_packets", "rx_queue_2_bytes"];
        names.sort_by(|one, other| natural(one, other));
        assert_eq!(names, ["rx_packets", "rx_queue_2_bytes", "rx_queue_2_packets", "rx_queue_10_bytes"]);
    }
}
