//! The state of a switch on its way to another process, as text (JSON) and [bulk](super::bulk) data.
//!
//! **Form.** The number of the form changes when a successor of an earlier form could not go on with what is sent. Fields may be added without that: a
//! reader passes over fields that it does not know, and has a default for those that it misses. What a successor must understand, or not take over, is named in
//! [`Hello::needs`].
//!
//! Everything is checked by the successor as a peer's words are, though it comes from a process of the same user.

use std::collections::BTreeMap;

use ringferry_control::mirror::Mirror;
use serde::{Deserialize, Serialize};

use super::bulk::Section;
use crate::ports::Positions;
use crate::ports::handed::HandedPort;

/// The form of the state that this program writes, and the newest that it reads.
pub(crate) const FORMAT: u32 = 1;

/// Names in [`Hello::needs`] that this program understands.
pub(crate) const UNDERSTOOD: &[&str] = &["vhost-user", "tap", "xen-vif"];

/// What a successor is told first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The form of this state.
    pub(crate) format: u32,
    /// What a successor must understand.
    pub(crate) needs: Vec<String>,
    /// Version of the program.
    pub(crate) program: String,
    /// The configuration in force, as a file.
    pub(crate) config: String,
    /// The file that it was read from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<FileState>,
    /// Number of workers.
    pub(crate) workers: usize,
    /// When the switch's clock began, in nanoseconds of the system's monotonic clock.
    pub(crate) began: u64,
    /// When the switch was started, likewise.
    pub(crate) started: u64,
    /// The service manager wants to hear within so many microseconds that the switch is alive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) watchdog: Option<u64>,
}

/// A configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileState {
    /// Its path.
    pub(crate) path: String,
    /// The ports in it.
    pub(crate) ports: Vec<String>,
    /// What it says that is not about a port.
    pub(crate) settings: String,
    /// The drop-in file of each port that is in one.
    #[serde(default)]
    pub(crate) drop_ins: BTreeMap<String, String>,
}

/// The state of a switch whose packets still flow.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Draft {
    /// The entries of the configuration, in their order.
    pub(crate) entries: Vec<EntryState>,
    /// The ports that there are, by name, with the number that each has in the process.
    pub(crate) numbers: BTreeMap<String, u16>,
    /// The forwarding database.
    pub(crate) addresses: Section,
    /// The third descriptor is the connection to the service manager.
    #[serde(default)]
    pub(crate) manager: bool,
    /// The service manager keeps what the next process needs if this one is killed.
    #[serde(default)]
    pub(crate) keeps: bool,
}

/// An entry of the configuration.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct EntryState {
    /// Its name.
    pub(crate) name: String,
    /// Its state, whose descriptors are the next [`descriptors`](Self::descriptors) of the message; absent: as in the draft.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) state: Option<HandedPort>,
    /// How many descriptors its state has.
    #[serde(default)]
    pub(crate) descriptors: usize,
    /// Where its rings go on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) positions: Positions,
}

/// The state of a switch that stands still.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Final {
    /// The entries of the configuration, in the order of the draft.
    pub(crate) entries: Vec<EntryState>,
    /// The ports that there are, by name.
    pub(crate) ports: BTreeMap<String, PortNumbers>,
    /// Addresses that were seen since the draft.
    pub(crate) addresses: Section,
    /// What each worker has.
    pub(crate) workers: Vec<WorkerState>,
    /// Ports whose links were taken down.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) links_down: Vec<String>,
    /// Mirrors of ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) mirrors: Vec<Mirror>,
}

/// What there is to say of one port, besides its entry.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PortNumbers {
    /// Its number in the process.
    pub(crate) number: u16,
    /// The worker of each of its queues.
    pub(crate) owners: Vec<usize>,
    /// Its counters.
    pub(crate) counters: BTreeMap<String, u64>,
    /// Its drops by reason.
    pub(crate) drops: BTreeMap<String, u64>,
    /// Counters of its queue pairs.
    pub(crate) pairs: Vec<[u64; 7]>,
    /// How much of its token buckets is used, by key of the rule.
    pub(crate) buckets: BTreeMap<String, u64>,
    /// The flows that its guest sends.
    pub(crate) flows: Section,
}

/// What one worker has.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct WorkerState {
    /// Its counters.
    pub(crate) counters: [u64; 5],
    /// Counters of its forwarding database: learned, moved, replaced, refused, aged, limited.
    pub(crate) fdb: [u64; 6],
    /// Frames that wait in its shapers.
    pub(crate) waiting: Section,
}
