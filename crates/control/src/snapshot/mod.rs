//! What a running switch tells about itself: the answer to `ringferry ctl show`, with a stable schema.
//!
//! Within one [`VERSION`] fields are only added, and readers ignore fields they do not know. Counters take the switch's point of
//! view: `rx` is what the switch received from the port.

mod fdb;
mod port;
mod queue;
mod text;
mod worker;

use serde::{Deserialize, Serialize};

pub use fdb::{FdbEntry, FdbSnapshot};
pub use port::{Negotiated, PortSnapshot, PortState, VifFeatures};
pub use queue::{GrantSnapshot, QueueRole, QueueSnapshot};
pub use worker::WorkerSnapshot;

/// Version of the schema. Raised when a field changes its meaning or goes away.
pub const VERSION: u32 = 1;

/// The state of a switch at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`VERSION`] of the schema.
    pub version: u32,
    /// Process id of the switch.
    pub pid: u32,
    /// Seconds since the switch started.
    pub uptime_seconds: u64,
    /// The ports in the order of the configuration.
    pub ports: Vec<PortSnapshot>,
    /// The forwarding database.
    pub fdb: FdbSnapshot,
    /// The worker threads.
    pub workers: Vec<WorkerSnapshot>,
}

#[cfg(test)]
mod tests;
