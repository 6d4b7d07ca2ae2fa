//! What a receive queue counts.

/// Counters of one receive queue since it was attached. Every one is where its event is, and nowhere
/// else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxStats {
    /// Packets delivered.
    pub packets: u64,
    /// Bytes of their frames.
    pub bytes: u64,
    /// Segments of posted buffers that their packets took, for [`RxStats::packets`].
    pub descriptors: u64,
    /// Bytes of memory charged to them when they were delivered: [`truesize`] of their buffers.
    ///
    /// [`truesize`]: ringferry_packet::buffer::Buf::truesize
    pub truesize_bytes: u64,
    /// Packets copied into a small buffer, so that their own could be posted again at once.
    pub copied: u64,
    /// Buffers joined with the one in front of them.
    pub coalesced: u64,
    /// Buffers of which the end was not needed and was posted again by itself.
    pub trimmed: u64,
    /// Packets dropped for what the device said about them: a length beyond the buffer, shorter than an Ethernet
    /// header behind the driver's, longer than the longest frame, 0 buffers, or more than there were.
    pub rx_length_errors: u64,
    /// Completions of buffers that were not posted.
    pub unknown: u64,
    /// Refills that ended early because no chunk was left. The next refill tries again.
    pub no_replacement: u64,
    /// Buffers that the ring refused, and that were taken back.
    pub refused: u64,
    /// Buffers carved from chunks.
    pub carved: u64,
    /// Buffers posted again that had left the queue and came back.
    pub recycled: u64,
}
