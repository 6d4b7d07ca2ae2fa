//! The packed virtqueue (VIRTIO 1.4, 2.8): one ring of descriptors that both sides write.
//!
//! ```text
//! descriptor ring                     driver event suppression      device event suppression
//! 16 bytes x size: addr len id flags  off_wrap flags, 4 bytes       off_wrap flags, 4 bytes
//! written by both, in turns           written by the driver         written by the device
//! ```
//!
//! The flags of a descriptor say whose it is. Each side walks the ring from slot to slot and toggles a
//! wrap counter at its end, so that the flags of one lap cannot be taken for those of another:
//!
//! ```text
//! AVAIL USED      with a wrap counter w
//!   w    !w       available: the driver made it so in lap w
//!   w     w       used: the device has finished with the chain that began here in lap w
//! ```
//!
//! A chain lies in consecutive slots; its buffer id stands in the last. The device answers with one
//! descriptor in the chain's first slot and skips the others.

pub mod device;
pub mod driver;
pub mod log;
mod side;

pub use device::Device;
pub use driver::Driver;

use crate::chain::Buffer;

/// VIRTQ_DESC_F_AVAIL.
const F_AVAIL: u16 = 1 << 7;
/// VIRTQ_DESC_F_USED.
const F_USED: u16 = 1 << 15;

/// A place in the ring: a slot, and the wrap counter of the lap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cursor {
    index: u16,
    wrap: bool,
}

impl Cursor {
    /// Where both sides begin (2.8.1).
    const START: Cursor = Cursor { index: 0, wrap: true };

    /// As event suppression and vhost-user's vring base write it.
    #[inline(always)]
    fn to_bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    fn from_bits(bits: u16) -> Self {
        Self { index: bits & 0x7fff, wrap: bits >> 15 != 0 }
    }

    /// `slots` (at most `size`) further in a ring of `size`.
    #[inline(always)]
    #[must_use]
    fn forward(self, slots: u16, size: u16) -> Self {
        // Two sizes of at most 32768 would overflow 16 bits.
        let index = u32::from(self.index) + u32::from(slots);
        if index >= u32::from(size) {
            Self { index: (index - u32::from(size)) as u16, wrap: !self.wrap }
        } else {
            Self { index: index as u16, wrap: self.wrap }
        }
    }

    /// `slots` (at most `size`) back in a ring of `size`.
    #[must_use]
    fn back(self, slots: u16, size: u16) -> Self {
        if slots > self.index {
            Self { index: size - (slots - self.index), wrap: !self.wrap }
        } else {
            Self { index: self.index - slots, wrap: self.wrap }
        }
    }

    /// Slots from here to `to`, if that is at most `size` ahead; anything if not.
    #[inline(always)]
    fn distance(self, to: Self, size: u16) -> u16 {
        let lap = if self.wrap == to.wrap { 0 } else { size };
        to.index.wrapping_add(lap).wrapping_sub(self.index)
    }

    /// The flags of a descriptor made available here.
    #[inline(always)]
    fn available(self) -> u16 {
        if self.wrap { F_AVAIL } else { F_USED }
    }

    /// The flags of a descriptor used here.
    #[inline(always)]
    fn used(self) -> u16 {
        if self.wrap { F_AVAIL | F_USED } else { 0 }
    }
}

/// The second word of a descriptor, read and written as a whole; the first is the address.
#[derive(Clone, Copy, Debug)]
struct Desc {
    len: u32,
    id: u16,
    flags: u16,
}

impl Desc {
    #[inline(always)]
    fn from_word(word: u64) -> Self {
        Self { len: word as u32, id: (word >> 32) as u16, flags: (word >> 48) as u16 }
    }

    #[inline(always)]
    fn into_word(self) -> u64 {
        u64::from(self.len) | u64::from(self.id) << 32 | u64::from(self.flags) << 48
    }

    /// Whose the descriptor is.
    #[inline(always)]
    fn owner(self) -> u16 {
        self.flags & (F_AVAIL | F_USED)
    }

    #[inline(always)]
    fn buffer(self, addr: u64) -> Buffer {
        Buffer { addr, len: self.len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtio_2_8_1_wrap_counters_toggle_at_the_end() {
        for size in [1u16, 2, 3, 255, 32767, 32768] {
            for slots in [0, 1, size / 2, size - 1, size] {
                let mut at = Cursor::START;
                for _ in 0..5 {
                    let next = at.forward(slots, size);
                    assert!(next.index < size);
                    assert_eq!(next.back(slots, size), at, "{size} {slots}");
                    assert_eq!(at.distance(next, size), slots, "{size}");
                    assert_eq!(Cursor::from_bits(next.to_bits()), next);
                    at = next;
                }
            }
            assert_eq!(Cursor::START.forward(size, size), Cursor { index: 0, wrap: false });
        }
    }

    #[test]
    fn virtio_2_8_flags_of_one_lap_are_none_of_another() {
        let (one, two) = (Cursor::START, Cursor { index: 0, wrap: false });
        let all = [one.available(), one.used(), two.available(), two.used()];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b));
        }
        // Zeroed memory is not available in the first lap.
        assert_eq!(two.used(), 0);
    }

    #[test]
    fn descriptors_survive_the_way_through_a_word() {
        let word = Desc { len: 0x99aa_bbcc, id: 0xddee, flags: 0x8003 }.into_word();
        assert_eq!(word, 0x8003_ddee_99aa_bbcc);
        let back = Desc::from_word(word);
        assert_eq!((back.len, back.id, back.flags, back.owner()), (0x99aa_bbcc, 0xddee, 0x8003, F_USED));
    }
}
