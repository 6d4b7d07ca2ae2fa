//! The split virtqueue (VIRTIO 1.4, 2.7): a descriptor table and two one-way rings.
//!
//! [`crate::Device`] or [`crate::Driver`] creates a half of it at set-up if VIRTIO_F_RING_PACKED was not
//! negotiated, passes every call on, and drops it when the queue stops.
//!
//! ```text
//! descriptor table          available ring (driver area)      used ring (device area)
//! 16 bytes x size           flags idx ring[size] used_event   flags idx ring[size] avail_event
//! written by the driver     written by the driver             written by the device
//! ```
//!
//! Both indexes are free-running 16-bit counters; the slot of an entry is the index masked by `size - 1`.
//! A descriptor moves around this circle:
//!
//! ```text
//!   free list of the driver ──add, publish──► available ring ──take──► device works on it
//!            ▲                                                              │
//!            └──────────collect────────── used ring ◄──complete, publish────┘
//! ```

mod device;
mod driver;
mod side;

pub use device::Device;
pub use driver::Driver;

use ringferry_memory::Words;

use crate::chain::Buffer;
use crate::parts::{LayoutError, Parts};

/// `VIRTQ_AVAIL_F_NO_INTERRUPT` and `VIRTQ_USED_F_NO_NOTIFY`: the same bit in either `flags` word.
const F_NO_SIGNAL: u16 = 1;

/// Offset of `flags` in the available and in the used ring.
const FLAGS: usize = 0;
/// Offset of `idx` in the available and in the used ring.
const IDX: usize = 2;
/// Offset of `ring` in the available and in the used ring.
pub(crate) const RING: usize = 4;
/// Size in bytes of a used element.
pub(crate) const ELEMENT: usize = 8;

/// The tables of a queue, resolved to host memory and checked once, at set-up.
#[derive(Clone, Debug)]
struct Layout<A: Words> {
    size: u16,
    /// Descriptor table, each entry as two words; see [`Desc`].
    desc: A::Table<[u64; 2]>,
    /// Entries of the available ring: the index of each chain's first descriptor.
    heads: A::Table<u16>,
    /// Entries of the used ring: the index of the chain's first descriptor, and the bytes written.
    elements: A::Table<[u32; 2]>,
}

/// The words around the entries of an available or used ring: `flags` and `idx` in front, and behind, at
/// offset `event`, the `used_event` or `avail_event` by which the ring's writer asks for a signal.
#[derive(Debug)]
struct Ring<A> {
    area: A,
    event: usize,
}

impl<A: Words> Layout<A> {
    /// Checks `parts` and returns the tables, the available ring and the used ring.
    fn new(parts: Parts<A>) -> Result<(Self, Ring<A>, Ring<A>), LayoutError> {
        parts.check(false)?;
        let Parts { size, desc, driver: avail, device: used } = parts;
        let entries = usize::from(size);
        let layout = Self {
            size,
            desc: desc.table(0, size).ok_or(LayoutError::Unaligned("descriptor table"))?,
            heads: avail.table(RING, size).ok_or(LayoutError::Unaligned("available ring"))?,
            elements: used.table(RING, size).ok_or(LayoutError::Unaligned("used ring"))?,
        };
        let avail = Ring { area: avail, event: RING + 2 * entries };
        Ok((layout, avail, Ring { area: used, event: RING + ELEMENT * entries }))
    }
}

/// A private copy of one descriptor, so that the peer cannot change it after a check.
#[derive(Clone, Copy, Default)]
struct Desc {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Desc {
    #[inline(always)]
    fn from_words([addr, rest]: [u64; 2]) -> Self {
        Self { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }

    #[inline(always)]
    fn buffer(self) -> Buffer {
        Buffer { addr: self.addr, len: self.len }
    }

    #[inline(always)]
    fn into_words(self) -> [u64; 2] {
        [self.addr, u64::from(self.len) | u64::from(self.flags) << 32 | u64::from(self.next) << 48]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_survive_the_way_through_words() {
        let desc = Desc { addr: 0x1122_3344_5566_7788, len: 0x99aa_bbcc, flags: 3, next: 0xdd };
        let back = Desc::from_words(desc.into_words());
        assert_eq!((back.addr, back.len, back.flags, back.next), (desc.addr, desc.len, 3, 0xdd));
    }
}
