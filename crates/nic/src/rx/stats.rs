//! Counters of a receive queue: owned and incremented by the queue, copied by
//! [`RxQueue::stats`](super::RxQueue::stats).

/// Counters of one receive queue since it was attached. Each is incremented in one place only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxStats {
    /// Valid packets that were delivered.
    pub packets: u64,
    /// Bytes of the frames of delivered packets, driver's headers excluded.
    pub bytes: u64,
    /// Segments of posted buffers that the delivered packets took.
    pub descriptors: u64,
    /// Bytes of memory charged to packets when they were delivered: [`truesize`] of their buffers.
    ///
    /// [`truesize`]: ringferry_packet::buffer::Buf::truesize
    pub truesize_bytes: u64,
    /// Packets copied into a small buffer, so that their own could be posted again at once.
    pub copied: u64,
    /// Buffers joined with the adjacent one in front of them.
    pub coalesced: u64,
    /// Buffers whose unused end was trimmed, to be posted again as a buffer of its own.
    pub trimmed: u64,
    /// Packets dropped because of the length or count that the device reported: beyond the buffer, shorter
    /// than an Ethernet header behind the driver's, longer than the longest frame, 0 buffers, or more buffers
    /// than were completed.
    pub rx_length_errors: u64,
    /// Completions with a token that was not posted. They are ignored.
    pub unknown: u64,
    /// Refills that ended early because no chunk was left. The next refill tries again.
    pub no_replacement: u64,
    /// Buffers that the ring refused, and that the supply took back.
    pub refused: u64,
    /// Posted buffers that were newly carved from chunks.
    pub carved: u64,
    /// Buffers taken back from delivered packets by [`RxQueue::recycle`](super::RxQueue::recycle).
    pub recycled: u64,
}
