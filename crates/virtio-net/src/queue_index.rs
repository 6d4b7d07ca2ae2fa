//! The indexes of a network device's virtqueues (VIRTIO 1.4, 5.1.2). Queue pairs are numbered from 0; each is a receiveq and
//! the transmitq behind it, and the control queue comes behind all pairs that the device has.

/// Returns the index of the receiveq of a pair.
#[inline]
#[must_use]
pub const fn receiveq(pair: u16) -> u16 {
    2 * pair
}

/// Returns the index of the transmitq of a pair.
#[inline]
#[must_use]
pub const fn transmitq(pair: u16) -> u16 {
    2 * pair + 1
}

/// Returns the indexes of both queues of a pair, the receiveq first.
#[inline]
#[must_use]
pub const fn both(pair: u16) -> [u16; 2] {
    [receiveq(pair), transmitq(pair)]
}

/// Returns the pair that the queue with this index belongs to.
#[inline]
#[must_use]
pub const fn pair(index: u16) -> u16 {
    index / 2
}

/// Returns true if the queue with this index is a transmitq, false if it is a receiveq.
#[inline]
#[must_use]
pub const fn is_transmitq(index: u16) -> bool {
    !index.is_multiple_of(2)
}

/// Returns the number of queues of so many pairs, which is the index of the control queue if the device has no more pairs.
#[inline]
#[must_use]
pub const fn count(pairs: u16) -> usize {
    2 * pairs as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// VIRTIO 1.4, 5.1.2: 0 is receiveq1, 1 is transmitq1, ... 2(N-1) is receiveqN, 2(N-1)+1 is transmitqN, 2N is controlq.
    #[test]
    fn clause_5_1_2_receiveqs_and_transmitqs_take_turns_before_the_control_queue() {
        for pairs in [1, 2, 5, 0x8000] {
            let indexes: Vec<u16> = (0..pairs).flat_map(both).collect();
            assert!(indexes.iter().copied().eq((0..=u16::MAX).take(count(pairs))));
            for (at, index) in indexes.into_iter().enumerate() {
                let (owner, sends) = (pair(index), is_transmitq(index));
                assert_eq!((usize::from(owner), sends), (at / 2, at % 2 == 1));
                assert_eq!(if sends { transmitq(owner) } else { receiveq(owner) }, index);
            }
        }
    }
}
