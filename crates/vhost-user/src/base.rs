//! Where a ring resumes, as `SET_VRING_BASE` and `GET_VRING_BASE` carry it.
//!
//! | bits | split ring | packed ring |
//! |---|---|---|
//! | 0 to 14 | next available index, with bit 15 | next available index |
//! | 15 | | driver's wrap counter |
//! | 16 to 30 | zero | next used index |
//! | 31 | zero | device's wrap counter |
//!
//! Inside, a *position* is one half: what a ring's device half is made with and tells when it stops.
//! It has completed everything it has taken by then, so that both halves are the same.

use crate::vring::RingError;

/// Bits of a packed ring's index in either half.
pub(crate) const INDEX: u16 = 0x7fff;
/// The wrap counter above it.
const WRAP: u16 = 0x8000;

/// The position in a ring that nobody has used yet: a packed ring's wrap counters begin at 1
/// (VIRTIO 1.4, 2.8.1).
pub const fn first_position(packed: bool) -> u16 {
    if packed { WRAP } else { 0 }
}

/// The base that says `position`: both halves of a packed ring, as QEMU expects them.
pub const fn encode(position: u16, packed: bool) -> u32 {
    let low = position as u32;
    if packed { low << 16 | low } else { low }
}

/// A packed base with both halves, of which DPDK leaves the upper one zero; a split one as it is.
pub const fn complete(base: u32, packed: bool) -> u32 {
    if base >> 16 == 0 { encode(base as u16, packed) } else { base }
}

/// The position that a base says, not yet compared with the ring's size.
///
/// Where the halves of a packed base differ, chains were taken and not completed by whoever stopped;
/// a device that resumes at the used index takes them again.
pub(crate) fn decode(base: u32, packed: bool) -> Result<u16, RingError> {
    let complete = complete(base, packed);
    match (packed, (complete >> 16) as u16) {
        (true, used) => Ok(used),
        (false, 0) => Ok(base as u16),
        (false, _) => Err(RingError::Base(base)),
    }
}

/// Whether a ring of `size` entries has this position. A split ring has every one: its index runs
/// freely.
pub(crate) fn check_position(position: u16, size: u16, packed: bool) -> Result<(), RingError> {
    let index = position & INDEX;
    if packed && index >= size { Err(RingError::Position { index, size }) } else { Ok(()) }
}

/// The position of an index and a wrap counter.
pub(crate) fn position(index: u16, wrap: bool) -> u16 {
    index & INDEX | if wrap { WRAP } else { 0 }
}

/// The index and the wrap counter of a packed ring's position.
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
