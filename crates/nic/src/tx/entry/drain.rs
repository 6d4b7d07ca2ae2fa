//! Drain lock of a multi-producer, single-consumer ring, after the `mp_ring` of FreeBSD's iflib.
//!
//! A [`TxPort`](super::TxPort) creates one beside its ring of packets and keeps it for its lifetime; all its
//! threads share it. One atomic word holds the number of queued packets and a bit that some thread is
//! draining them:
//!
//! ```text
//!            add_and_lock, try_lock                      add_and_lock, add
//!   idle ─────────────────────────────► busy (locked) ◄──────────────────── more packets
//!    ▲ │                                 │   ▲
//!    │ │ add                             │   │ add_and_lock, try_lock
//!    │ └──────────► stalled ◄────────────┘   │
//!    │              (packets, not locked) ───┘
//!    │                 release: abdication
//!    └─── release: the ring is empty
//! ```
//!
//! Each transition is one atomic read-modify-write, so no wake-up is lost: a producer learns with its own
//! addition whether it must drain (or wake the drainer), and a drainer learns with its own release whether
//! packets were added meanwhile.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Bit that is set while a thread drains the ring. The other bits of the word count queued packets.
const LOCKED: usize = 1;
/// The value of one packet in the word.
const PACKET: usize = 2;

/// An atomic word. It is a trait so that the model checker loom can replace the standard library's.
pub trait Word {
    /// Replaces the value atomically by the result of `next` and returns the old value. If `next` returns
    /// `None`, changes nothing and returns `None`.
    fn update(&self, next: impl FnMut(usize) -> Option<usize>) -> Option<usize>;
    /// Loads the value with acquire order.
    fn get(&self) -> usize;
}

impl Word for AtomicUsize {
    #[inline]
    fn update(&self, next: impl FnMut(usize) -> Option<usize>) -> Option<usize> {
        self.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).ok()
    }

    #[inline]
    fn get(&self) -> usize {
        self.load(Ordering::Acquire)
    }
}

/// The lock and the count of queued packets; see the module's documentation.
#[derive(Debug, Default)]
pub struct DrainLock<W = AtomicUsize>(pub W);

/// The state in which [`DrainLock::release`] leaves the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The ring is empty and not locked.
    Idle,
    /// Packets are queued and nobody drains them: the drainer has abdicated.
    Stalled,
    /// Packets were added meanwhile: the caller still holds the lock and must go on.
    Busy,
}

impl<W: Word> DrainLock<W> {
    /// Counts `packets` that the caller has pushed to the ring, and takes the lock if it is free. Returns
    /// true if the caller holds the lock now and must drain the ring.
    #[inline]
    pub fn add_and_lock(&self, packets: usize) -> bool {
        self.0.update(|old| Some((old + packets * PACKET) | LOCKED)).is_some_and(|old| old & LOCKED == 0)
    }

    /// Counts `packets` that the caller has pushed to the ring, for another thread to drain. Returns true if
    /// the ring was empty before, so that the draining thread may be asleep.
    #[inline]
    pub fn add(&self, packets: usize) -> bool {
        self.0.update(|old| Some(old + packets * PACKET)).is_some_and(|old| old < PACKET)
    }

    /// Takes the lock if packets are queued and nobody drains them. Returns true if it was taken.
    #[inline]
    pub fn try_lock(&self) -> bool {
        self.0.update(|old| (old >= PACKET && old & LOCKED == 0).then_some(old | LOCKED)).is_some()
    }

    /// Returns the number of queued packets; more may be added at any time.
    #[inline]
    pub fn queued(&self) -> usize {
        self.0.get() / PACKET
    }

    /// Subtracts the `drained` packets and releases the lock if the ring is empty. With `abdicate` the lock
    /// is released in any case.
    #[inline]
    pub fn release(&self, drained: usize, abdicate: bool) -> Release {
        let mut outcome = Release::Idle;
        self.0.update(|old| {
            let rest = old - drained * PACKET;
            outcome = match (rest >= PACKET, abdicate) {
                (false, _) => Release::Idle,
                (true, true) => Release::Stalled,
                (true, false) => Release::Busy,
            };
            Some(if outcome == Release::Busy { rest } else { rest & !LOCKED })
        });
        outcome
    }
}

#[cfg(test)]
mod tests {
    use loom::sync::atomic::AtomicUsize as Checked;
    use loom::sync::{Arc, Mutex};
    use loom::thread;
    use std::collections::VecDeque;

    use super::*;

    impl Word for Checked {
        fn update(&self, next: impl FnMut(usize) -> Option<usize>) -> Option<usize> {
            self.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).ok()
        }

        fn get(&self) -> usize {
            self.load(Ordering::Acquire)
        }
    }

    struct MpscRing {
        lock: DrainLock<Checked>,
        waiting: Mutex<VecDeque<usize>>,
        /// Written only by the thread that holds the drain lock, so this mutex is never contended.
        drained: Mutex<Vec<usize>>,
    }

    impl MpscRing {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                lock: DrainLock(Checked::new(0)),
                waiting: Mutex::default(),
                drained: Mutex::default(),
            })
        }

        fn drain(&self, budget: usize) -> Release {
            loop {
                let mut drained = self.drained.try_lock().expect("two drain at once");
                let n = self.lock.queued().min(budget);
                for _ in 0..n {
                    drained.push(self.waiting.lock().unwrap().pop_front().expect("counted, but not there"));
                }
                drop(drained);
                let outcome = self.lock.release(n, false);
                if outcome != Release::Busy {
                    return outcome;
                }
            }
        }
    }

    /// Two producers drain inline: every packet is drained once, by one thread at a time, and none is left
    /// when both have finished.
    #[test]
    fn loom_nothing_stays_behind_when_producers_drain() {
        loom::model(|| {
            let ring = MpscRing::new();
            let producer = |ring: Arc<MpscRing>, packet| {
                thread::spawn(move || {
                    ring.waiting.lock().unwrap().push_back(packet);
                    if ring.lock.add_and_lock(1) {
                        ring.drain(usize::MAX);
                    }
                })
            };
            let threads = [producer(Arc::clone(&ring), 1), producer(Arc::clone(&ring), 2)];
            for thread in threads {
                thread.join().unwrap();
            }
            let mut drained = std::mem::take(&mut *ring.drained.lock().unwrap());
            drained.sort_unstable();
            assert_eq!(drained, [1, 2]);
            assert_eq!(ring.lock.0.get(), 0);
        });
    }

    /// Producers leave draining to a worker: after the worker has found the ring empty, the next producer
    /// is told to wake it.
    #[test]
    fn loom_no_wake_up_is_lost_on_hand_off() {
        loom::model(|| {
            let ring = MpscRing::new();
            let other = Arc::clone(&ring);
            let producer = thread::spawn(move || {
                let mut wakes = 0;
                for packet in [1, 2] {
                    other.waiting.lock().unwrap().push_back(packet);
                    wakes += usize::from(other.lock.add(1));
                }
                wakes
            });
            // One poll at any time, and one more for all wake-ups together, as with an eventfd.
            if ring.lock.try_lock() {
                ring.drain(1);
            }
            let wakes = producer.join().unwrap();
            assert!(wakes >= 1);
            if ring.lock.try_lock() {
                ring.drain(1);
            }
            assert_eq!(*ring.drained.lock().unwrap(), [1, 2]);
            assert_eq!(ring.lock.0.get(), 0);
        });
    }

    #[test]
    fn whoever_cannot_go_on_leaves_packets_for_the_next() {
        let lock = DrainLock(AtomicUsize::new(0));
        assert!(lock.add_and_lock(3) && !lock.add_and_lock(1) && !lock.try_lock());
        assert_eq!(lock.release(1, false), Release::Busy);
        assert_eq!(lock.release(1, true), Release::Stalled);
        assert_eq!(lock.queued(), 2);
        assert!(lock.try_lock());
        assert_eq!(lock.release(2, true), Release::Idle);
        assert!(!lock.try_lock());
        assert!(lock.add(1) && !lock.add(1) && lock.add_and_lock(1));
    }
}
