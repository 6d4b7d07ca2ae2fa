//! The vring base: the encoding in which `SET_VRING_BASE` and `GET_VRING_BASE` carry the place at
//! which a ring resumes. These are pure functions without state.
//!
//! | bits | split ring | packed ring |
//! |---|---|---|
//! | 0 to 14 | next available index, with bit 15 | next available index |
//! | 15 | | driver's wrap counter |
//! | 16 to 30 | zero | next used index |
//! | 31 | zero | device's wrap counter |
//!
//! Inside this crate a *position* is one 16-bit half of a base: the value that a ring's device half
//! starts from and returns when it stops. A device half has by then completed every chain that it
//! has taken, so both halves of the base are equal.

use crate::vring::RingError;

/// Mask of a packed ring's index in either half.
pub(crate) const INDEX: u16 = 0x7fff;
/// Bit of the wrap counter in either half.
const WRAP: u16 = 0x8000;

/// Returns the position of a ring that has never been used: a packed ring's wrap counters begin at
/// 1 (VIRTIO 1.4, 2.8.1).
pub const fn first_position(packed: bool) -> u16 {
    if packed { WRAP } else { 0 }
}

/// Encodes `position` as a base. A packed base carries it in both halves, as QEMU expects.
pub const fn encode(position: u16, packed: bool) -> u32 {
    let low = position as u32;
    if packed { low << 16 | low } else { low }
}

/// Fills in the upper half of a packed base where it is zero, as DPDK leaves it; a split base is
/// returned unchanged.
pub const fn complete(base: u32, packed: bool) -> u32 {
    if base >> 16 == 0 { encode(base as u16, packed) } else { base }
}

/// Decodes a base into a position, which is not yet compared with the ring's size.
///
/// The halves of a packed base differ when the previous device had taken chains and not completed
/// them. The used index is returned then, so a device that resumes there takes those chains again.
pub(crate) fn decode(base: u32, packed: bool) -> Result<u16, RingError> {
    let complete = complete(base, packed);
    match (packed, (complete >> 16) as u16) {
        (true, used) => Ok(used),
        (false, 0) => Ok(base as u16),
        (false, _) => Err(RingError::Base(base)),
    }
}

/// Checks that a position lies within a ring of `size` entries. Every position is valid in a split
/// ring, whose index runs freely.
pub(crate) fn check_position(position: u16, size: u16, packed: bool) -> Result<(), RingError> {
    let index = position & INDEX;
    if packed && index >= size { Err(RingError::Position { index, size }) } else { Ok(()) }
}

/// Joins a packed ring's index and wrap counter to a position.
pub(crate) fn position(index: u16, wrap: bool) -> u16 {
    index & INDEX | if wrap { WRAP } else { 0 }
}

/// Splits a packed ring's position into its index and its wrap counter.
pub(crate) fn parts(position: u16) -> (u16, bool) {
    (position & INDEX, position & WRAP != 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_base_says_the_position_it_was_made_of(pos: u16, packed: bool) {
            prop_assert_eq!(decode(encode(pos, packed), packed).unwrap(), pos);
        }

        #[test]
        fn the_lower_half_alone_says_the_same(pos: u16, packed: bool) {
            prop_assert_eq!(decode(pos.into(), packed).unwrap(), pos);
            prop_assert_eq!(complete(pos.into(), packed), encode(pos, packed));
        }

        #[test]
        fn halves_are_index_and_wrap_counter(index in 0u16..0x8000, wrap: bool) {
            let pos = position(index, wrap);
            prop_assert_eq!(parts(pos), (index, wrap));
            let base = encode(pos, true);
            prop_assert_eq!(base & 0x7fff, u32::from(index));
            prop_assert_eq!(base >> 15 & 1, u32::from(wrap));
            prop_assert_eq!(base >> 16 & 0x7fff, u32::from(index));
            prop_assert_eq!(base >> 31, u32::from(wrap));
        }

        #[test]
        fn a_device_resumes_where_buffers_were_used(available: u16, used in 1u16..) {
            prop_assert_eq!(decode(u32::from(used) << 16 | u32::from(available), true).unwrap(), used);
        }

        #[test]
        fn a_split_base_has_16_bits(base in 0x1_0000u32..) {
            prop_assert!(decode(base, false).is_err());
        }

        #[test]
        fn a_packed_position_lies_in_its_ring(pos: u16, size in 1u16..=32768) {
            prop_assert_eq!(check_position(pos, size, true).is_ok(), pos & 0x7fff < size);
            prop_assert!(check_position(pos, size, false).is_ok());
        }
    }

    #[test]
    fn virtio_2_8_1_wrap_counters_begin_at_1() {
        assert_eq!(encode(first_position(true), true), 0x8000_8000);
        assert_eq!(encode(first_position(false), false), 0);
    }
}
