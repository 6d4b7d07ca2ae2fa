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

pub use device::Device;
pub use driver::{AddError, Driver, IndirectTables, Used};

use ringferry_memory::Words;

/// VIRTQ_DESC_F_NEXT.
const F_NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE.
const F_WRITE: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT.
const F_INDIRECT: u16 = 4;
/// VIRTQ_AVAIL_F_NO_INTERRUPT and VIRTQ_USED_F_NO_NOTIFY: the same bit in either flags word.
const F_NO_SIGNAL: u16 = 1;

/// Bytes of one descriptor.
const DESC: usize = 16;
/// Offset of `flags` in the available and in the used ring.
const FLAGS: usize = 0;
/// Offset of `idx` in the available and in the used ring.
const IDX: usize = 2;
/// Offset of `ring` in the available and in the used ring.
const RING: usize = 4;

/// The largest split queue (2.7).
pub const MAX_SIZE: u16 = 32768;

/// Bytes of the descriptor table of a queue of `size` entries; aligned to 16.
pub const fn desc_bytes(size: u16) -> usize {
    DESC * size as usize
}

/// Bytes of the available ring, `used_event` included; aligned to 2.
pub const fn avail_bytes(size: u16) -> usize {
    6 + 2 * size as usize
}

/// Bytes of the used ring, `avail_event` included; aligned to 4.
pub const fn used_bytes(size: u16) -> usize {
    6 + 8 * size as usize
}

/// Why three areas do not make a split queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Not a power of two between 1 and [`MAX_SIZE`].
    #[error("queue size {0} is not a power of two between 1 and {MAX_SIZE}")]
    Size(u16),
    /// The named area is shorter than the queue size needs.
    #[error("the {0} is too short for the queue size")]
    Short(&'static str),
    /// The named area is not aligned (2.7): 16 bytes for descriptors, 2 for the available ring, 4 for
    /// the used ring. What is checked is what access needs, 8, 2 and 4.
    #[error("the {0} is not aligned")]
    Unaligned(&'static str),
}

/// The three areas of a queue, resolved and checked once.
#[derive(Clone, Debug)]
pub struct Layout<A: Words> {
    size: u16,
    /// Descriptors, as two words each; see [`Desc`].
    desc: A::Table<[u64; 2]>,
    /// Flags, index and event of the available ring.
    avail: A,
    /// Entries of the available ring: heads.
    heads: A::Table<u16>,
    /// Flags, index and event of the used ring.
    used: A,
    /// Entries of the used ring: head and length.
    elements: A::Table<[u32; 2]>,
}

impl<A: Words> Layout<A> {
    /// Checks that the areas can hold a queue of `size` entries.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn new(size: u16, desc: A, avail: A, used: A) -> Result<Self, LayoutError> {
        if !size.is_power_of_two() || size > MAX_SIZE {
            return Err(LayoutError::Size(size));
        }
        let areas = [
            ("descriptor table", desc.len(), desc_bytes(size)),
            ("available ring", avail.len(), avail_bytes(size)),
            ("used ring", used.len(), used_bytes(size)),
        ];
        if let Some((name, ..)) = areas.iter().find(|(_, have, need)| have < need) {
            return Err(LayoutError::Short(name));
        }
        Ok(Self {
            size,
            desc: desc.table(0, size).ok_or(LayoutError::Unaligned("descriptor table"))?,
            heads: avail.table(RING, size).ok_or(LayoutError::Unaligned("available ring"))?,
            avail,
            elements: used.table(RING, size).ok_or(LayoutError::Unaligned("used ring"))?,
            used,
        })
    }

    /// Number of entries, a power of two.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Offset of `used_event` in the available ring.
    #[inline(always)]
    fn used_event(&self) -> usize {
        RING + 2 * usize::from(self.size)
    }

    /// Offset of `avail_event` in the used ring.
    #[inline(always)]
    fn avail_event(&self) -> usize {
        RING + 8 * usize::from(self.size)
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
    fn into_words(self) -> [u64; 2] {
        [self.addr, u64::from(self.len) | u64::from(self.flags) << 32 | u64::from(self.next) << 48]
    }

    #[inline(always)]
    fn from_bytes(bytes: [u8; 16]) -> Self {
        let both = u128::from_le_bytes(bytes);
        Self::from_words([both as u64, (both >> 64) as u64])
    }
}

/// Whether a peer that asked to be told when the index passes `event` must be told now that it went
/// from `old` to `new` (VIRTIO 1.4, 2.7.7.2 and 2.7.10.1). All three run freely through 16 bits.
#[inline(always)]
fn passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_is_true_exactly_when_event_lies_between() {
        for old in [0u16, 5, 65530, 65535] {
            for step in 0..20u16 {
                let new = old.wrapping_add(step);
                for ahead in 0..40u16 {
                    let event = old.wrapping_add(ahead).wrapping_sub(10);
                    // The event entry itself was among those just published.
                    let expect = (0..step).any(|i| old.wrapping_add(i) == event);
                    assert_eq!(passed(event, new, old), expect, "{event} {new} {old}");
                }
            }
        }
    }

    #[test]
    fn descriptors_survive_the_way_through_words() {
        let desc =
            Desc { addr: 0x1122_3344_5566_7788, len: 0x99aa_bbcc, flags: F_NEXT | F_WRITE, next: 0xdd };
        let [a, b] = desc.into_words();
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&a.to_le_bytes());
        bytes[8..].copy_from_slice(&b.to_le_bytes());
        let back = Desc::from_bytes(bytes);
        assert_eq!((back.addr, back.len, back.flags, back.next), (desc.addr, desc.len, 3, 0xdd));
    }
}
