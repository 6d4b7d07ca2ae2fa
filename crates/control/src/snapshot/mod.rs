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

pub use fdb::{FdbEntry, FdbRestless, FdbSnapshot};
pub use page::{COLUMNS, Column, ColumnError};
pub use port::{Negotiated, PortSnapshot, PortState, VifFeatures};
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
}

/// Returns true if a number need not be told, as earlier versions do not tell it.
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests;
