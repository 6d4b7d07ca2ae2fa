//! The split virtqueue (VIRTIO 1.4, 2.7): three areas, two one-way rings.
//!
//! ```text
//! descriptor table          available ring (driver area)      used ring (device area)
//! 16 bytes x size           flags idx ring[size] used_event   flags idx ring[size] avail_event
//! written by the driver     written by the driver             written by the device
//! ```
//!
//! Both indexes run freely through 16 bits; a ring slot is the index masked by `size - 1`.

pub mod device;
pub mod driver;
mod side;

pub use device::Device;
pub use driver::Driver;

use ringferry_memory::Words;

use crate::chain::Buffer;
use crate::parts::{LayoutError, Parts};

/// VIRTQ_AVAIL_F_NO_INTERRUPT and VIRTQ_USED_F_NO_NOTIFY: the same bit in either flags word.
const F_NO_SIGNAL: u16 = 1;

/// Offset of `flags` in the available and in the used ring.
const FLAGS: usize = 0;
/// Offset of `idx` in the available and in the used ring.
const IDX: usize = 2;
/// Offset of `ring` in the available and in the used ring.
const RING: usize = 4;

/// The tables of a queue, resolved and checked once.
#[derive(Clone, Debug)]
struct Layout<A: Words> {
    size: u16,
    /// Descriptors, as two words each; see [`Desc`].
    desc: A::Table<[u64; 2]>,
    /// Entries of the available ring: heads.
    heads: A::Table<u16>,
    /// Entries of the used ring: head and length.
    elements: A::Table<[u32; 2]>,
}

/// The words around a ring's entries: flags and index in front, and behind, at `event`, the one with
/// which its writer says when it wants a signal.
#[derive(Debug)]
struct Ring<A> {
    area: A,
    event: usize,
}

impl<A: Words> Layout<A> {
    /// The tables, the available ring and the used ring.
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
        Ok((layout, avail, Ring { area: used, event: RING + 8 * entries }))
    }
}

/// One descriptor, read once.
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
