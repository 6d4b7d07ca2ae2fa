//! What a transmit queue counts.

use super::doorbell::Rings;
use crate::map::MapCounters;

/// Counters of one transmit queue since it was attached. Every one is incremented at one place.
///
/// Every packet that was given to the queue and did not come back is counted once:
/// [`TxStats::packets`] were sent, [`MapCounters::dropped`] and [`TxStats::broken`] were not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TxStats {
    /// What mapping did with the packets: by [`TxQueue::send`](super::TxQueue::send).
    pub map: MapCounters,
    /// Bytes of the frames that were sent.
    pub bytes: u64,
    /// Packets that were mapped, and that the driver refused although it had said there is room. They went back to
    /// the caller: 0 but for a ring that has just broken.
    pub refused: u64,
    /// Packets dropped by [`TxQueue::give_up`](super::TxQueue::give_up) because the ring is broken.
    pub broken: u64,
    /// Packets dropped by [`TxQueue::give_up`](super::TxQueue::give_up) because the driver can never send them.
    pub unfit: u64,
    /// How often the device was shown what is new, and why.
    pub flushes: Rings,
    /// Flushes of which the device wanted to be told: what a kick costs is paid so often.
    pub kicks: u64,
    /// Packets the device was done with.
    pub reclaimed: u64,
    /// Looks at what the device is done with: [`TxStats::reclaimed`] per look is the batch.
    pub looks: u64,
    /// Completions of packets that were not under way. They are ignored.
    pub unknown: u64,
}

impl TxStats {
    /// Packets that the ring took.
    pub fn packets(&self) -> u64 {
        self.map.mapped() - self.refused
    }

    /// Packets dropped, whatever the reason.
    pub fn dropped(&self) -> u64 {
        self.map.dropped.total() + self.broken + self.unfit
    }
}
