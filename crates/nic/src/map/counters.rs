//! Counters of transmit mapping, owned and incremented by a [`Mapper`](super::Mapper).

use super::{MAX_SEGS, MapError};

/// The way in which a packet was mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The packet was unchanged, except that the driver's header may have a buffer of its own.
    Direct,
    /// Some neighbouring buffers were merged.
    Collapsed,
    /// The whole packet was copied to large buffers.
    Defragged,
}

/// Counters of a [`Mapper`](super::Mapper). Each packet increments exactly one of `direct`, `collapsed`,
/// `defragged` and the counters in `dropped`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapCounters {
    /// Packets mapped without copying.
    pub direct: u64,
    /// Packets of which some neighbouring buffers were merged.
    pub collapsed: u64,
    /// Packets that were copied completely to large buffers.
    pub defragged: u64,
    /// Packets that were not mapped, by reason.
    pub dropped: Drops,
    /// Times that a packet was returned because the ring was full or the pools were empty. Such a packet has
    /// no outcome yet.
    pub retries: u64,
    /// Times that merging neighbours was not sufficient, would have copied most of the packet, or found no
    /// buffers, so that a full copy was tried.
    pub collapse_failed: u64,
    /// Times that there were no buffers for a full copy, so that the packet was returned.
    pub defrag_failed: u64,
    /// Bytes copied to map packets.
    pub copied_bytes: u64,
    /// Mapped packets by number of segments.
    pub segments: Histogram,
}

impl MapCounters {
    /// Returns the number of packets that have an outcome: mapped or dropped.
    pub fn packets(&self) -> u64 {
        self.mapped() + self.dropped.total()
    }

    /// Returns the number of packets that were mapped in any way.
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

/// Numbers of packets that were not mapped, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// Packets that the caller gave up because of a [full ring](MapError::RingFull).
    pub ring_full: u64,
    /// Packets that the caller gave up because of [empty pools](MapError::NoBuffers).
    pub no_buffers: u64,
    /// Packets [longer](MapError::TooLong) than the device allows.
    pub too_long: u64,
    /// Packets [without bytes](MapError::Empty).
    pub empty: u64,
    /// Packets with more [segments](MapError::TooManySegments) than the device allows, even if copied. 0 if
    /// the pools have the layout that the limits were checked with.
    pub too_many_segments: u64,
}

impl Drops {
    /// Returns the number of packets dropped for any reason.
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

/// A histogram of packets by number of segments: entry n counts packets of n segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram(pub [u64; MAX_SEGS + 1]);

impl Default for Histogram {
    fn default() -> Self {
        Self([0; MAX_SEGS + 1])
    }
}

impl Histogram {
    /// Iterates over the numbers of segments that occurred, with the number of packets of each.
    pub fn iter(&self) -> impl Iterator<Item = (usize, u64)> {
        self.0.iter().copied().enumerate().filter(|(_, packets)| *packets > 0)
    }
}
