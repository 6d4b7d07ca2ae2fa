//! The packed virtqueue (VIRTIO 1.4, 2.8): one ring of descriptors that both sides write.
//!
//! [`crate::Device`] or [`crate::Driver`] creates a half of it at set-up if VIRTIO_F_RING_PACKED was
//! negotiated, passes every call on, and drops it when the queue stops.
//!
//! ```text
//! descriptor ring                     driver event suppression      device event suppression
//! 16 bytes x size: addr len id flags  off_wrap flags, 4 bytes       off_wrap flags, 4 bytes
//! written by both, alternately        written by the driver         written by the device
//! ```
//!
//! The AVAIL and USED flags of a descriptor tell which side owns it. Each side walks the ring from slot to
//! slot and toggles a wrap counter at its end, so that the flags of one lap differ from those of the next:
//!
//! ```text
//!                        driver publishes (AVAIL = w, USED = !w)
//!        ┌───────────────────────────────────────────────────────────────┐
//!        │                                                               ▼
//!   used or free                                                     available
//!   owned by the driver                                       owned by the device
//!        ▲                                                               │
//!        └───────────────────────────────────────────────────────────────┘
//!                  device publishes (AVAIL = w, USED = w), w of its own lap
//! ```
//!
//! A chain occupies consecutive slots and its buffer id is in the last of them. The device marks a chain
//! used with one descriptor in the chain's first slot and skips the others.

mod device;
mod driver;
pub mod inflight;
mod side;

pub use device::Device;
pub use driver::Driver;

use crate::chain::Buffer;

/// `VIRTQ_DESC_F_AVAIL` (2.8.1): equals the driver's wrap counter in an available descriptor.
const F_AVAIL: u16 = 1 << 7;
/// `VIRTQ_DESC_F_USED` (2.8.1): equals the device's wrap counter in a used descriptor.
const F_USED: u16 = 1 << 15;

/// A position in the ring: the index of a slot and the wrap counter of the lap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cursor {
    index: u16,
    wrap: bool,
}

impl Cursor {
    /// The initial position of both sides: slot 0 with a wrap counter of 1 (2.8.1).
    const START: Cursor = Cursor { index: 0, wrap: true };

    /// Encodes the position as event suppression and vhost-user's vring base do: the index in bits 0 to
    /// 14, the wrap counter in bit 15.
    #[inline(always)]
    fn to_bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    fn from_bits(bits: u16) -> Self {
        Self { index: bits & 0x7fff, wrap: bits >> 15 != 0 }
    }

    /// Returns the position `slots` (at most `size`) ahead in a ring of `size`.
    #[inline(always)]
    #[must_use]
    fn forward(self, slots: u16, size: u16) -> Self {
        // The sum of an index and a count, each up to 32768, does not fit into 16 bits.
        let index = u32::from(self.index) + u32::from(slots);
        if index >= u32::from(size) {
            Self { index: (index - u32::from(size)) as u16, wrap: !self.wrap }
        } else {
            Self { index: index as u16, wrap: self.wrap }
        }
    }

    /// Returns the next position in a ring of `size`.
    #[inline(always)]
    #[must_use]
    fn next(self, size: u16) -> Self {
        let index = self.index + 1;
        if index == size { Self { index: 0, wrap: !self.wrap } } else { Self { index, wrap: self.wrap } }
    }

    /// Returns the position `slots` (at most `size`) behind in a ring of `size`.
    #[must_use]
    fn back(self, slots: u16, size: u16) -> Self {
        if slots > self.index {
            Self { index: size - (slots - self.index), wrap: !self.wrap }
        } else {
            Self { index: self.index - slots, wrap: self.wrap }
        }
    }

    /// Returns the number of slots from here to `to`, which must be at most `size` ahead; otherwise the
    /// result is meaningless.
    #[inline(always)]
    fn distance(self, to: Self, size: u16) -> u16 {
        let lap = if self.wrap == to.wrap { 0 } else { size };
        to.index.wrapping_add(lap).wrapping_sub(self.index)
    }

    /// Returns the AVAIL and USED flags of a descriptor that is available at this position.
    #[inline(always)]
    fn available(self) -> u16 {
        if self.wrap { F_AVAIL } else { F_USED }
    }

    /// Returns the AVAIL and USED flags of a descriptor that is used at this position.
    #[inline(always)]
    fn used(self) -> u16 {
        if self.wrap { F_AVAIL | F_USED } else { 0 }
    }
}

/// The second 64-bit word of a descriptor, always read and written as a whole; the first is the address.
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

    /// Returns the AVAIL and USED flags, which tell who owns the descriptor.
    #[inline(always)]
    fn owner_flags(self) -> u16 {
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
                    assert_eq!(at.next(size), at.forward(1, size), "{size}");
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
        assert_eq!(
            (back.len, back.id, back.flags, back.owner_flags()),
            (0x99aa_bbcc, 0xddee, 0x8003, F_USED)
        );
    }
}
