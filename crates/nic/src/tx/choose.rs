//! Which queue a packet goes to: packets of a flow stay in order, flows spread.

/// The queue, of `queues`, for a packet of this flow.
///
/// A flow has one queue for as long as there are as many queues. A packet whose flow nobody knows goes to the
/// queue of the worker that sends it: all of one worker's stay in order, and those of several workers do not
/// meet in queue 0.
///
/// 0 when there are no queues.
#[inline]
pub fn select_queue(hash: Option<u32>, queues: usize, worker: usize) -> usize {
    match hash {
        // Hashes of devices differ in which bits are good: the golden ratio carries all of them to the top, and
        // the product takes the queue from there without a division.
        Some(hash) => ((u64::from(hash.wrapping_mul(0x9e37_79b1)) * queues as u64) >> 32) as usize,
        None => worker.checked_rem(queues).unwrap_or(0),
    }
}

/// Where packets go whose flow nobody knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NoHash {
    /// To the queue of the worker: in order.
    #[default]
    Worker,
    /// To each queue in turn: spread, where one worker feeds many queues and order does not matter.
    RoundRobin,
}

/// Chooses queues for one worker, and counts.
#[derive(Clone, Debug)]
pub struct Chooser {
    queues: usize,
    worker: usize,
    no_hash: NoHash,
    unhashed: u64,
}

impl Chooser {
    /// For the worker of this number, with so many queues to send to.
    pub fn new(worker: usize, queues: usize, no_hash: NoHash) -> Self {
        Self { queues, worker, no_hash, unhashed: 0 }
    }

    /// The queue for a packet of this flow: see [`select_queue`].
    #[inline]
    pub fn choose(&mut self, hash: Option<u32>) -> usize {
        if hash.is_none() {
            self.unhashed += 1;
            if self.no_hash == NoHash::RoundRobin {
                self.worker = self.worker.wrapping_add(1);
            }
        }
        select_queue(hash, self.queues, self.worker)
    }

    /// Packets whose flow nobody knew.
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

    /// Hashes with their entropy in the low, the middle and the high bits.
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
        let mut chooser = Chooser::new(2, 4, NoHash::Worker);
        assert_eq!([(); 3].map(|()| chooser.choose(None)), [2, 2, 2]);
        let mut chooser = Chooser::new(2, 4, NoHash::RoundRobin);
        assert_eq!([(); 5].map(|()| chooser.choose(None)), [3, 0, 1, 2, 3]);
        chooser.choose(Some(7));
        assert_eq!(chooser.no_hash(), 5);
    }

    #[test]
    fn no_queues_is_not_a_panic() {
        assert_eq!((select_queue(None, 0, 3), select_queue(Some(3), 0, 3)), (0, 0));
    }
}
