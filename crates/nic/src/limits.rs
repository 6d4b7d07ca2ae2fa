//! What rings and devices take: checked once, loudly, when a queue is attached.

use ringferry_packet::buffer::Pools;

use crate::map::{Full, MAX_SEGS};

/// How many segments of what kind a device takes for one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegLimits {
    /// Most segments.
    pub max_segs: u16,
    /// Segments that the driver adds by itself. They come off [`SegLimits::max_segs`], here and nowhere
    /// else.
    pub reserved: u16,
    /// Longest segment in bytes.
    pub max_seg_len: u32,
    /// No segment crosses a multiple of this power of two, if there is one.
    pub boundary: Option<u64>,
    /// Bytes that the first segment holds at least, header room included, of a packet that has as many.
    pub min_first: u32,
    /// Most bytes of a packet, header room included.
    pub max_bytes: u32,
}

impl SegLimits {
    /// Most segments that a packet may have: what the driver adds comes off.
    #[inline(always)]
    pub fn segs(&self) -> usize {
        self.max_segs.saturating_sub(self.reserved).into()
    }

    /// Whether a packet of so many segments may go: the one place where a count meets its limit. Exactly
    /// as many as the limit are not too many.
    #[inline(always)]
    pub(crate) fn fits(&self, count: usize) -> bool {
        count <= self.segs()
    }

    /// Checks that no packet can ever be refused for its shape: the longest one, copied to the large
    /// buffers of `pools`, must fit whatever their addresses, and with it every shorter one. So must the
    /// `header_room` bytes in front of it.
    ///
    /// # Errors
    /// The first rule broken. The queue must not be attached.
    pub fn check(&self, header_room: usize, pools: &Pools) -> Result<(), SegError> {
        let allowed = self.segs();
        if allowed == 0 {
            return Err(SegError::NoSegments { max_segs: self.max_segs, reserved: self.reserved });
        }
        if allowed > MAX_SEGS {
            return Err(SegError::TooManySegments { allowed });
        }
        if self.max_seg_len == 0 {
            return Err(SegError::SegmentLength);
        }
        if let Some(boundary) = self.boundary.filter(|boundary| !boundary.is_power_of_two()) {
            return Err(SegError::Boundary(boundary));
        }
        let bytes = self.max_bytes as usize;
        if bytes <= header_room {
            return Err(SegError::NoData { max_bytes: self.max_bytes, header_room });
        }
        let layout = pools.large.layout();
        let room = layout.room() as usize;
        let Some(copy) = Full::of(self, header_room, bytes, room) else {
            return Err(SegError::First { min_first: header_room.max(self.min_first as usize), room });
        };
        if !self.fits(copy.segments) {
            return Err(SegError::FullCopy { bytes, segments: copy.segments, room, allowed });
        }
        if copy.buffers > layout.count as usize {
            return Err(SegError::FewBuffers { bytes, buffers: copy.buffers, count: layout.count });
        }
        Ok(())
    }
}

/// Why packets under some [`SegLimits`] could get stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegError {
    /// The driver takes all segments itself.
    #[error(
        "{reserved} of {max_segs} segments are reserved, which leaves none for the packet; raise max_segs"
    )]
    NoSegments {
        /// [`SegLimits::max_segs`].
        max_segs: u16,
        /// [`SegLimits::reserved`].
        reserved: u16,
    },
    /// More than a list of segments holds.
    #[error("{allowed} segments are more than the {MAX_SEGS} of a list; lower max_segs")]
    TooManySegments {
        /// [`SegLimits::segs`].
        allowed: usize,
    },
    /// Segments of no bytes.
    #[error("max_seg_len is 0; set it to the longest segment that the device takes")]
    SegmentLength,
    /// Not a boundary that addresses can be compared with.
    #[error("boundary {0} is not a power of two; set it to one, or to none")]
    Boundary(u64),
    /// Packets of no bytes.
    #[error(
        "max_bytes of {max_bytes} leaves nothing behind a header of {header_room} bytes; raise max_bytes"
    )]
    NoData {
        /// [`SegLimits::max_bytes`].
        max_bytes: u32,
        /// [`TxLimits::header_room`].
        header_room: usize,
    },
    /// Even a full copy may begin with too short a segment.
    #[error(
        "the first {min_first} bytes of a packet cannot be made one segment in buffers with room for {room} bytes; \
         lower min_first, or make the large buffers more than twice the boundary"
    )]
    First {
        /// Bytes that the first segment must have: [`SegLimits::min_first`], or the header room.
        min_first: usize,
        /// Bytes that a large buffer has room for.
        room: usize,
    },
    /// Even a full copy may take too many segments.
    #[error(
        "a packet of {bytes} bytes takes up to {segments} segments in buffers with room for {room} bytes, but only \
         {allowed} are allowed; make the large buffers larger, or max_bytes smaller"
    )]
    FullCopy {
        /// [`SegLimits::max_bytes`].
        bytes: usize,
        /// Segments that it takes, in the worst case.
        segments: usize,
        /// Bytes that a large buffer has room for.
        room: usize,
        /// [`SegLimits::segs`].
        allowed: usize,
    },
    /// A full copy takes more buffers than there are.
    #[error(
        "a packet of {bytes} bytes takes {buffers} large buffers, but the pool has {count}; make the pool or its \
         buffers larger, or max_bytes smaller"
    )]
    FewBuffers {
        /// [`SegLimits::max_bytes`].
        bytes: usize,
        /// Large buffers that it takes.
        buffers: usize,
        /// Large buffers that there are.
        count: u32,
    },
}

/// What a transmit ring takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxLimits {
    /// Entries of the ring.
    pub ring: u16,
    /// Bytes of driver's header in front of every frame.
    pub header_room: usize,
    /// For packets that are one frame.
    pub plain: SegLimits,
    /// For packets that the device is to cut into frames.
    pub tso: SegLimits,
}

impl TxLimits {
    /// Checks the limits of both kinds of packets, and that the ring can hold the longest of either.
    ///
    /// # Errors
    /// The first rule broken. The queue must not be attached.
    pub fn check(&self, pools: &Pools) -> Result<(), LimitError> {
        let max_segs = self.plain.max_segs.max(self.tso.max_segs);
        if max_segs > self.ring {
            return Err(LimitError::Ring { max_segs, ring: self.ring });
        }
        self.plain.check(self.header_room, pools).map_err(LimitError::Plain)?;
        self.tso.check(self.header_room, pools).map_err(LimitError::Tso)
    }
}

/// Why a transmit queue is not attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// A packet could need more entries than there are, and would wait for ever.
    #[error(
        "max_segs of {max_segs} is more than the {ring} entries of the ring; lower max_segs or enlarge the ring"
    )]
    Ring {
        /// The larger [`SegLimits::max_segs`].
        max_segs: u16,
        /// [`TxLimits::ring`].
        ring: u16,
    },
    /// In the limits of packets that are one frame.
    #[error("limits of plain packets: {0}")]
    Plain(SegError),
    /// In the limits of packets that the device is to cut into frames.
    #[error("limits of packets to be segmented: {0}")]
    Tso(SegError),
}

/// How received packets lie in buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RxMode {
    /// A packet takes as many buffers as it needs.
    Mergeable,
    /// A packet takes one buffer, which is a chain of segments where one chunk cannot hold it.
    Whole,
}

/// What a receive ring needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxLimits {
    /// Entries of the ring.
    pub ring: u16,
    /// Bytes of driver's header in front of every packet.
    pub header_len: usize,
    /// How packets lie in buffers.
    pub mode: RxMode,
    /// Longest frame that may come.
    pub max_frame: usize,
    /// Most segments of a posted buffer.
    pub max_segs: u16,
}
