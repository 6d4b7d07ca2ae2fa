//! Limits of rings and devices, and their check.
//!
//! A driver returns its limits once, when its queue is attached; the queue checks them against the pools and
//! refuses to attach with an error that names the setting to change. Afterwards no packet can be refused for
//! its shape.

use ringferry_packet::buffer::Pools;

use crate::map::{Full, MAX_SEGS};

/// Limits of a device on the segments of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegLimits {
    /// Largest number of segments, those that the driver adds included.
    pub max_segs: u16,
    /// Number of segments that the driver adds itself. Only [`SegLimits::segs`] subtracts it from
    /// The value of [`SegLimits::max_segs`].
    pub reserved: u16,
    /// Length of the longest segment in bytes.
    pub max_seg_len: u32,
    /// A power of two in bytes, no multiple of which a segment may cross; `None` if there is no such rule.
    pub boundary: Option<u64>,
    /// Least length in bytes of the first segment, header room included, unless the packet is shorter.
    pub min_first: u32,
    /// Largest length of a packet in bytes, header room included.
    pub max_bytes: u32,
}

impl SegLimits {
    /// Returns the largest number of segments that a packet may have, without those the driver adds.
    #[inline(always)]
    pub fn segs(&self) -> usize {
        self.max_segs.saturating_sub(self.reserved).into()
    }

    /// Returns true if a packet may have `count` segments. The limit itself is allowed. No other place
    /// compares a count with the limit.
    #[inline(always)]
    pub(crate) fn fits(&self, count: usize) -> bool {
        count <= self.segs()
    }

    /// Checks that no packet can ever be refused for its shape: the longest one, with `header_room` bytes
    /// in front and copied to the large buffers of `pools`, must fit at any buffer addresses; every shorter
    /// one fits then, too.
    ///
    /// # Errors
    /// The first rule that is broken. The queue must not be attached then.
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

/// The reason for which packets could get stuck under some [`SegLimits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegError {
    /// The driver reserves all segments for itself.
    #[error(
        "{reserved} of {max_segs} segments are reserved, which leaves none for the packet; raise max_segs"
    )]
    NoSegments {
        /// The value of [`SegLimits::max_segs`].
        max_segs: u16,
        /// The value of [`SegLimits::reserved`].
        reserved: u16,
    },
    /// There are more segments than a [`SegList`](crate::map::SegList) holds.
    #[error("{allowed} segments are more than the {MAX_SEGS} of a list; lower max_segs")]
    TooManySegments {
        /// The value of [`SegLimits::segs`].
        allowed: usize,
    },
    /// The longest segment has no bytes.
    #[error("max_seg_len is 0; set it to the longest segment that the device takes")]
    SegmentLength,
    /// The boundary is not a power of two.
    #[error("boundary {0} is not a power of two; set it to one, or to none")]
    Boundary(u64),
    /// The longest packet has no bytes behind its header.
    #[error(
        "max_bytes of {max_bytes} leaves nothing behind a header of {header_room} bytes; raise max_bytes"
    )]
    NoData {
        /// The value of [`SegLimits::max_bytes`].
        max_bytes: u32,
        /// The value of [`TxLimits::header_room`].
        header_room: usize,
    },
    /// Even a full copy may begin with too short a segment.
    #[error(
        "the first {min_first} bytes of a packet cannot be made one segment in buffers with room for {room} bytes; \
         lower min_first, or make the large buffers more than twice the boundary"
    )]
    First {
        /// Least length of the first segment in bytes: [`SegLimits::min_first`] or the header room.
        min_first: usize,
        /// Capacity of a large buffer in bytes.
        room: usize,
    },
    /// Even a full copy may take too many segments.
    #[error(
        "a packet of {bytes} bytes takes up to {segments} segments in buffers with room for {room} bytes, but only \
         {allowed} are allowed; make the large buffers larger, or max_bytes smaller"
    )]
    FullCopy {
        /// The value of [`SegLimits::max_bytes`].
        bytes: usize,
        /// Number of segments that it takes in the worst case.
        segments: usize,
        /// Capacity of a large buffer in bytes.
        room: usize,
        /// The value of [`SegLimits::segs`].
        allowed: usize,
    },
    /// A full copy takes more large buffers than the pool has.
    #[error(
        "a packet of {bytes} bytes takes {buffers} large buffers, but the pool has {count}; make the pool or its \
         buffers larger, or max_bytes smaller"
    )]
    FewBuffers {
        /// The value of [`SegLimits::max_bytes`].
        bytes: usize,
        /// Number of large buffers that it takes.
        buffers: usize,
        /// Number of large buffers in the pool.
        count: u32,
    },
}

/// Limits of a transmit ring and its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxLimits {
    /// Number of entries that the ring has.
    pub ring: u16,
    /// Length in bytes of the driver's header in front of each frame.
    pub header_room: usize,
    /// Limits for packets that are one frame.
    pub plain: SegLimits,
    /// Limits for packets that the device segments (TSO, USO).
    pub tso: SegLimits,
}

impl TxLimits {
    /// Checks the limits for both kinds of packets, and that the ring can hold the largest of either.
    ///
    /// # Errors
    /// The first rule that is broken. The queue must not be attached then.
    pub fn check(&self, pools: &Pools) -> Result<(), LimitError> {
        let max_segs = self.plain.max_segs.max(self.tso.max_segs);
        if max_segs > self.ring {
            return Err(LimitError::Ring { max_segs, ring: self.ring });
        }
        self.plain.check(self.header_room, pools).map_err(LimitError::Plain)?;
        self.tso.check(self.header_room, pools).map_err(LimitError::Tso)
    }
}

/// The reason for which the limits of a transmit ring are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// A packet could need more entries than the ring has, and would wait for ever.
    #[error(
        "max_segs of {max_segs} is more than the {ring} entries of the ring; lower max_segs or enlarge the ring"
    )]
    Ring {
        /// The larger [`SegLimits::max_segs`] of both kinds of packets.
        max_segs: u16,
        /// The value of [`TxLimits::ring`].
        ring: u16,
    },
    /// The limits for packets that are one frame are wrong.
    #[error("limits of plain packets: {0}")]
    Plain(SegError),
    /// The limits for packets that the device segments are wrong.
    #[error("limits of packets to be segmented: {0}")]
    Tso(SegError),
}

/// The placement of received packets in buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RxMode {
    /// A packet takes as many buffers as it needs (VIRTIO_NET_F_MRG_RXBUF).
    Mergeable,
    /// A packet takes one buffer, which has several segments if one chunk cannot hold it.
    Whole,
}

/// Requirements of a receive ring and its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxLimits {
    /// Number of entries that the ring has.
    pub ring: u16,
    /// Length in bytes of the driver's header in front of each packet.
    pub header_len: usize,
    /// The placement of packets in buffers.
    pub mode: RxMode,
    /// Length in bytes of the longest frame that may arrive.
    pub max_frame: usize,
    /// Largest number of segments of a posted buffer.
    pub max_segs: u16,
}
