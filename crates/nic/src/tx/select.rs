//! Transmit queue selection by flow hash: the packets of a flow stay in order, and flows spread over queues.
//!
//! [`select_queue`] is a pure function (multiplicative hashing, then a multiply-shift range reduction). A
//! worker that wants to count packets without a hash, or to spread them, creates a [`QueueSelector`] for its
//! lifetime and calls it for each packet.

/// Selects the queue, from 0 to `queues - 1`, for a packet with this flow hash.
///
/// A flow keeps its queue as long as the number of queues does not change. A packet without a hash goes to
/// the queue of the worker that sends it: the packets of one worker stay in order, and those of several
/// workers do not all meet in queue 0. Returns 0 if there are no queues.
#[inline]
pub fn select_queue(hash: Option<u32>, queues: usize, worker: usize) -> usize {
    match hash {
        // Devices compute hashes whose entropy is in different bits. Multiplication by the golden ratio
        // (Fibonacci hashing) mixes all bits into the top ones, and the product with the number of queues
        // selects by those without a division.
        Some(hash) => ((u64::from(hash.wrapping_mul(0x9e37_79b1)) * queues as u64) >> 32) as usize,
        None => worker.checked_rem(queues).unwrap_or(0),
    }
}

/// The queue for packets that have no flow hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NoHash {
    /// The worker's own queue, which keeps them in order.
    #[default]
    Worker,
    /// Each queue in turn, which spreads them if one worker feeds many queues and order does not matter.
    RoundRobin,
}

/// Selects queues for the packets of one worker, and counts packets without a hash.
#[derive(Clone, Debug)]
pub struct QueueSelector {
    queues: usize,
    worker: usize,
    no_hash: NoHash,
    unhashed: u64,
}

impl QueueSelector {
    /// Creates a selector for worker number `worker`, which sends to `queues` queues.
    pub fn new(worker: usize, queues: usize, no_hash: NoHash) -> Self {
        Self { queues, worker, no_hash, unhashed: 0 }
    }

    /// Selects the queue for a packet with this flow hash: see [`select_queue`].
    #[inline]
    pub fn select(&mut self, hash: Option<u32>) -> usize {
        if hash.is_none() {
            self.unhashed += 1;
            if self.no_hash == NoHash::RoundRobin {
                self.worker = self.worker.wrapping_add(1);
            }
        }
        select_queue(hash, self.queues, self.worker)
    }

    /// Returns how many packets had no hash.
    pub fn no_hash(&self) -> u64 {
        self.unhashed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_queue_is_one_of_them_and_a_flow_keeps_it(
            hash: Option<u32>, queues in 1usize..=1024, worker: usize, other: usize,
        ) {
            let queue = select_queue(hash, queues, worker);
            prop_assert!(queue < queues);
            if hash.is_some() {
                prop_assert_eq!(select_queue(hash, queues, other), queue);
            }
        }
    }

    /// The hashes have their entropy in the low, the middle or the high bits.
    #[test]
    fn flows_spread_whichever_bits_of_the_hash_are_good() {
        for shift in [0, 8, 20] {
            for queues in [2, 3, 4, 8] {
                let mut spread = vec![0u32; queues];
                for flow in 0..2000u32 {
                    spread[select_queue(Some(flow << shift), queues, 0)] += 1;
                }
                let fair = 2000 / queues as u32;
                assert!(spread.iter().all(|n| n.abs_diff(fair) < fair / 4), "{shift} {spread:?}");
            }
        }
    }

    #[test]
    fn no_hash_never_means_queue_0_for_every_worker() {
        let of: Vec<_> = (0..6).map(|worker| select_queue(None, 4, worker)).collect();
        assert_eq!(of, [0, 1, 2, 3, 0, 1]);
        let mut selector = QueueSelector::new(2, 4, NoHash::Worker);
        assert_eq!([(); 3].map(|()| selector.select(None)), [2, 2, 2]);
        let mut selector = QueueSelector::new(2, 4, NoHash::RoundRobin);
        assert_eq!([(); 5].map(|()| selector.select(None)), [3, 0, 1, 2, 3]);
        selector.select(Some(7));
        assert_eq!(selector.no_hash(), 5);
    }

    #[test]
    fn no_queues_is_not_a_panic() {
        assert_eq!((select_queue(None, 0, 3), select_queue(Some(3), 0, 3)), (0, 0));
    }
}
