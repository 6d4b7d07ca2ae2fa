//! Counters of a transmit queue: owned and incremented by the queue, copied by
//! [`TxQueue::stats`](super::TxQueue::stats).

use super::doorbell::Rings;
use crate::map::MapCounters;

/// Counters of one transmit queue since it was attached. Each is incremented in one place only.
///
/// Each packet that the queue accepted or gave up is counted once: in [`TxStats::packets`] if it was sent, in
/// [`TxStats::dropped`] if not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TxStats {
    /// Counters of mapping, by [`TxQueue::send`](super::TxQueue::send).
    pub map: MapCounters,
    /// Bytes of the frames that were sent, driver's headers excluded.
    pub bytes: u64,
    /// Packets that were mapped and then refused by the driver although it had reported room. They went
    /// back to the caller. 0 unless a ring broke or a packet was [unfit](crate::driver::Refused::Unfit).
    pub refused: u64,
    /// Packets dropped by [`TxQueue::give_up`](super::TxQueue::give_up) because the ring is broken.
    pub broken: u64,
    /// Packets dropped by [`TxQueue::give_up`](super::TxQueue::give_up) because the driver can never send them.
    pub unfit: u64,
    /// Publications of new packets to the device, by reason.
    pub flushes: Rings,
    /// Flushes for which the device wanted a notification; each costs the sender a kick.
    pub kicks: u64,
    /// Packets reclaimed after the device completed them.
    pub reclaimed: u64,
    /// Reclaim passes; [`TxStats::reclaimed`] per pass is the batch size.
    pub reclaim_passes: u64,
    /// Completions with a token that was not in flight. They are ignored.
    pub unknown: u64,
}

impl TxStats {
    /// Returns the number of packets that the ring accepted.
    pub fn packets(&self) -> u64 {
        self.map.mapped() - self.refused
    }

    /// Returns the number of packets dropped for any reason.
    pub fn dropped(&self) -> u64 {
        self.map.dropped.total() + self.broken + self.unfit
    }
}
