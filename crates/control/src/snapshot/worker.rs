//! One worker thread.

use serde::{Deserialize, Serialize};

/// One worker thread, counted since it started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerSnapshot {
    /// Rounds over all ports.
    pub polls: u64,
    /// Rounds that moved at least one packet.
    pub busy_polls: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Times it was woken by an event, not by a timer.
    pub wakeups: u64,
    /// Share of its life it was awake, 0 to 100.
    pub busy_percent: f64,
}
