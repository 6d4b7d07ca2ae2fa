//! One virtqueue of a port, and the granted pages behind a Xen guest's.

use std::collections::BTreeMap;

use ringferry_virtio_net::queue_index;
use serde::{Deserialize, Serialize};

use super::Rates;

/// What a virtqueue is for, by its name in VIRTIO 1.4, 5.1.2, which takes the guest's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum QueueRole {
    /// The guest receives from it; what the switch sends (`tx`).
    Receiveq,
    /// The guest transmits on it; what the switch receives (`rx`).
    Transmitq,
}

impl QueueRole {
    /// What the queue of this index in the device is for.
    pub const fn of(index: u16) -> QueueRole {
        if queue_index::is_transmitq(index) { QueueRole::Transmitq } else { QueueRole::Receiveq }
    }

    /// The name it has in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            QueueRole::Receiveq => "receiveq",
            QueueRole::Transmitq => "transmitq",
        }
    }
}

/// One virtqueue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QueueSnapshot {
    /// Its index in the device.
    pub index: u16,
    /// What it is for.
    pub role: QueueRole,
    /// Number of descriptors; 0 before set-up.
    pub size: u16,
    /// Whether the front end enabled it.
    pub enabled: bool,
    /// Whether it is set up and running.
    pub started: bool,
    /// Why it broke, if it did.
    pub broken: Option<String>,
    /// Available-ring index up to which the device has looked.
    pub last_avail: u16,
    /// Used-ring index up to which the device has published.
    pub last_used: u16,
    /// Entries that the driver has made available and the switch has not taken: of a receiveq the buffers posted, of a transmitq the packets that wait.
    /// They are chains in a split ring and descriptors in a packed one. Absent where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available: Option<u16>,
    /// Of a receiveq that is filled and that its driver takes nothing back from. Absent while that is not so, or where it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalled: Option<StallSnapshot>,
    /// What was done with the pages of a Xen guest's pair of rings; shown with its transmitq.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grants: Option<GrantSnapshot>,
}

impl QueueSnapshot {
    /// Returns true if the queue is set up, enabled and whole.
    pub fn runs(&self) -> bool {
        self.started && self.enabled && self.broken.is_none()
    }
}

/// A receiveq whose driver has posted no buffer while the switch filled many of them, or all: its guest hangs, is paused, or gets no processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StallSnapshot {
    /// Entries that the switch has used and the driver has not posted again.
    pub entries: u16,
    /// Seconds for which the driver has posted nothing though it should have.
    pub seconds: u64,
}

/// A queue pair in one worker's hands: its worker and what it has counted. A tap has one for each of its queues, without counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PairSnapshot {
    /// Its number.
    pub pair: u16,
    /// The worker that serves it.
    pub worker: u16,
    /// Its counters by name, from the switch's point of view.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counters: BTreeMap<String, u64>,
    /// Their rates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rates: Vec<Rates>,
}

/// What was done with granted pages since the queue was connected, and how many are mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GrantSnapshot {
    /// Uses of pages that were mapped already.
    pub hits: u64,
    /// Uses of pages that were not.
    pub misses: u64,
    /// Pages mapped.
    pub mapped: u64,
    /// Mappings replaced by others.
    pub evicted: u64,
    /// Pages that could not be mapped.
    pub failed: u64,
    /// Pieces that the hypervisor copied.
    pub copies: u64,
    /// Bytes in them.
    pub copied_bytes: u64,
    /// Pages that are mapped now because they were used.
    pub learned_pages: u64,
    /// Pages that are mapped now because the front end asked for it.
    pub static_pages: u64,
    /// Most pages that may be mapped.
    pub max_pages: u64,
}

impl GrantSnapshot {
    /// What is counted, by name.
    pub fn by_name(&self) -> [(&'static str, u64); 7] {
        [
            ("hits", self.hits),
            ("misses", self.misses),
            ("mapped", self.mapped),
            ("evicted", self.evicted),
            ("failed", self.failed),
            ("copies", self.copies),
            ("copied_bytes", self.copied_bytes),
        ]
    }

    /// What there is now, by name.
    pub fn gauges_by_name(&self) -> [(&'static str, u64); 3] {
        [
            ("learned_pages", self.learned_pages),
            ("static_pages", self.static_pages),
            ("max_pages", self.max_pages),
        ]
    }
}
