//! What a running switch tells about itself: the answer to `ringferry ctl show`, with a stable schema (docs/json.md).
//!
//! Within one [`VERSION`] fields are only added, and readers ignore fields they do not know. Counters take the switch's point of
//! view: `rx` is what the switch received from the port.

mod fdb;
mod page;
mod port;
mod queue;
mod rates;
mod text;
mod worker;

use serde::{Deserialize, Serialize};

use crate::mirror::Mirror;
use crate::text::duration;
use crate::wire::WireEnds;

pub use fdb::{FdbEntry, FdbLost, FdbRestless, FdbSnapshot};
pub use page::{COLUMNS, Column, ColumnError};
pub use port::{FrontEnd, Negotiated, PortSnapshot, PortState, SessionEnd, VifFeatures, XdpFeatures};
pub use queue::{GrantSnapshot, PairSnapshot, QueueRole, QueueSnapshot, StallSnapshot};
pub use rates::{Rates, WINDOWS, WorkerLoad};
pub use worker::WorkerSnapshot;

/// Version of the schemas in docs/schema/, of this answer and of everything else that `ringferry` prints as JSON. It is raised when a field changes its meaning or
/// goes away; docs/json.md has the rules.
pub const VERSION: u32 = 1;

/// The state of a switch at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Snapshot {
    /// Version of the schemas of all that is printed as JSON, docs/json.md.
    pub version: u32,
    /// Process id of the switch.
    pub pid: u32,
    /// Seconds since the switch started.
    pub uptime_seconds: u64,
    /// The switch's monotonic clock, in nanoseconds: whoever compares two snapshots divides by its difference, not by that of a clock of their own. It
    /// goes on when another process takes the switch over.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub clock_nanoseconds: u64,
    /// The ports in the order of the configuration.
    pub ports: Vec<PortSnapshot>,
    /// The forwarding database.
    pub fdb: FdbSnapshot,
    /// The worker threads.
    pub workers: Vec<WorkerSnapshot>,
    /// Version of the program that runs. Empty of a switch from before it was said.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub program: String,
    /// Seconds for which this process has been it: fewer than `uptime_seconds` if it has taken over from another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process_seconds: Option<u64>,
    /// Captures that run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub captures: Vec<CaptureSnapshot>,
    /// Ports that are mirrored to others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mirrors: Vec<Mirror>,
    /// The wires between ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wires: Vec<WireEnds>,
    /// What of the switch itself does not work any more, for people. Packets pass all the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub troubles: Vec<String>,
}

/// A capture that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CaptureSnapshot {
    /// Its number.
    pub number: u32,
    /// Names of its ports.
    pub ports: Vec<String>,
    /// The process that it is for, if that can be seen from the switch. The capture ends with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Seconds since it began.
    pub seconds: u64,
}

impl CaptureSnapshot {
    /// Describes whose it is and since when, for people.
    pub fn by_text(&self) -> String {
        let by = self.pid.map_or_else(String::new, |pid| format!(" by process {pid}"));
        format!("captured{by} for {}", duration(self.seconds))
    }

    /// Describes what ends it, for people.
    pub fn end_text(&self) -> String {
        self.pid
            .map_or_else(|| "the end of that `ringferry capture`".to_owned(), |pid| format!("`kill {pid}`"))
    }
}

/// Returns true if a number need not be told, as earlier versions do not tell it.
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests;
