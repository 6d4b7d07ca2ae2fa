//! What became of the packets of a queue.

use super::{MAX_SEGS, MapError};

/// How a packet was mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As it was; the driver's header may have got a buffer of its own.
    Direct,
    /// Some neighbours were merged.
    Collapsed,
    /// All of it was copied.
    Defragged,
}

/// Counters of a [`Mapper`](super::Mapper). Every packet increments exactly one of `direct`, `collapsed`,
/// `defragged` and those in `dropped`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapCounters {
    /// Packets that went as they were.
    pub direct: u64,
    /// Packets of which some neighbours were merged.
    pub collapsed: u64,
    /// Packets that were copied to large buffers.
    pub defragged: u64,
    /// Packets that did not go.
    pub dropped: Drops,
    /// Packets handed back because ring or pools were empty, once for each time: they have no outcome yet.
    pub retries: u64,
    /// Times that merging neighbours did not do, would have copied most of the packet, or found no buffers. All of it was
    /// copied instead.
    pub collapse_failed: u64,
    /// Times that there were no buffers to copy a packet to. The packet was handed back.
    pub defrag_failed: u64,
    /// Bytes copied in order to map packets.
    pub copied_bytes: u64,
    /// Mapped packets by number of segments.
    pub segments: Histogram,
}

impl MapCounters {
    /// Packets that have an outcome.
    pub fn packets(&self) -> u64 {
        self.mapped() + self.dropped.total()
    }

    /// Packets that were mapped, one way or other.
    pub fn mapped(&self) -> u64 {
        self.direct + self.collapsed + self.defragged
    }

    #[inline(always)]
    pub(super) fn count(&mut self, outcome: Outcome, segments: usize) {
        match outcome {
            Outcome::Direct => self.direct += 1,
            Outcome::Collapsed => self.collapsed += 1,
            Outcome::Defragged => self.defragged += 1,
        }
        self.segments.0[segments] += 1;
    }
}

/// Packets that did not go, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// The caller gave up on a [full ring](MapError::RingFull).
    pub ring_full: u64,
    /// The caller gave up on [empty pools](MapError::NoBuffers).
    pub no_buffers: u64,
    /// [Longer](MapError::TooLong) than the device takes.
    pub too_long: u64,
    /// [Nothing](MapError::Empty) to send.
    pub empty: u64,
    /// More [segments](MapError::TooManySegments) than the device takes, even if copied: 0 as long as the pools
    /// are those that the limits were checked with.
    pub too_many_segments: u64,
}

impl Drops {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.ring_full + self.no_buffers + self.too_long + self.empty + self.too_many_segments
    }

    pub(super) fn count(&mut self, reason: MapError) {
        *match reason {
            MapError::RingFull => &mut self.ring_full,
            MapError::NoBuffers => &mut self.no_buffers,
            MapError::TooLong => &mut self.too_long,
            MapError::Empty => &mut self.empty,
            MapError::TooManySegments => &mut self.too_many_segments,
        } += 1;
    }
}

/// Packets by number of segments: the n-th entry counts those of n.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram(pub [u64; MAX_SEGS + 1]);

impl Default for Histogram {
    fn default() -> Self {
        Self([0; MAX_SEGS + 1])
    }
}

impl Histogram {
    /// The numbers of segments that occurred, and how often.
    pub fn iter(&self) -> impl Iterator<Item = (usize, u64)> {
        self.0.iter().copied().enumerate().filter(|(_, packets)| *packets > 0)
    }
}
