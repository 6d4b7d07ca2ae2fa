//! Parts that all targets share: the choice of a ring by an input, positions in it, and the result of a run.

use ringferry_ring::RingFeatures;

use crate::guest::Places;
use crate::script::{Bytes, Field};

/// VIRTQ_DESC_F_NEXT: another descriptor of the chain follows.
pub const NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE: the device may write the buffer.
pub const WRITE: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT: the buffer is a table of descriptors.
pub const INDIRECT: u16 = 4;
/// VIRTQ_DESC_F_AVAIL of a packed ring.
const AVAIL: u16 = 1 << 7;
/// VIRTQ_DESC_F_USED of a packed ring.
const USED: u16 = 1 << 15;
/// Both bits, which together tell whether driver or device owns a descriptor of a packed ring.
pub const OWNER: u16 = AVAIL | USED;

/// Sizes an input can choose: the smallest, odd ones where they are allowed, and one beyond the 1024
/// descriptors a chain may have.
const SIZES: [[u16; 8]; 2] = [[1, 2, 4, 8, 16, 32, 256, 2048], [1, 2, 3, 5, 8, 33, 256, 2047]];

/// The head of an input, which chooses a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Index into the list of sizes.
    pub size: u8,
    /// Features: bit 0 indirect, bit 1 event index, bit 2 in order; the target defines the other bits.
    pub flags: u8,
    /// Position at which the ring begins, as a vring base.
    pub base: u16,
}

impl Setup {
    /// Returns the areas of the ring and its features.
    pub fn ring(&self, packed: bool) -> (Places, RingFeatures) {
        let has = |bit: u8| self.flags & (1 << bit) != 0;
        let features = RingFeatures { indirect: has(0), event_idx: has(1), packed, in_order: has(2) };
        let size = SIZES[usize::from(packed)][usize::from(self.size) % 8];
        (Places::new(size, packed), features)
    }
}

impl Field for Setup {
    fn get(bytes: &mut Bytes<'_>) -> Option<Self> {
        Some(Self { size: Field::get(bytes)?, flags: Field::get(bytes)?, base: Field::get(bytes)? })
    }

    fn put(&self, out: &mut Vec<u8>) {
        self.size.put(out);
        self.flags.put(out);
        self.base.put(out);
    }
}

/// A position in either kind of ring. In a split ring `index` runs freely and `wrap` means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Free-running index (split ring) or slot (packed ring).
    pub index: u16,
    /// The wrap counter of a packed ring.
    pub wrap: bool,
}

impl Cursor {
    /// Makes a cursor from a vring base; a slot outside the ring becomes one inside.
    pub fn new(places: &Places, base: u16) -> Self {
        if places.packed {
            Self { index: (base & 0x7fff) % places.size, wrap: base >> 15 != 0 }
        } else {
            Self { index: base, wrap: false }
        }
    }

    /// Returns the position as a vring base.
    pub fn base(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    /// Returns the position `slots` further on; in a packed ring by at most its size.
    pub fn forward(self, places: &Places, slots: u16) -> Self {
        let index = u32::from(self.index) + u32::from(slots);
        if places.packed && index >= u32::from(places.size) {
            Self { index: (index - u32::from(places.size)) as u16, wrap: !self.wrap }
        } else {
            Self { index: index as u16, wrap: self.wrap }
        }
    }

    /// Returns the owner bits of a descriptor that is available (or used) here.
    pub fn owner(self, used: bool) -> u16 {
        match (self.wrap, used) {
            (true, false) => AVAIL,
            (false, false) => USED,
            (true, true) => OWNER,
            (false, true) => 0,
        }
    }
}

/// The result of a run: how deep it got, which the tests of the seeds check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reached {
    /// Chains taken by a device half, or collected from a driver half; messages answered by a session.
    pub chains: usize,
    /// Number of buffers of the longest of them.
    pub longest: usize,
    /// Number of frames read or written.
    pub frames: usize,
    /// True if the ring was found broken.
    pub broken: bool,
}
