//! Whose turn it is to serve a waiting room: one word that counts who waits and says whether somebody serves.
//!
//! Everything happens in one atomic step each, which is why nothing can be forgotten between two: whoever adds
//! packets learns in the same step whether to serve them, and whoever stops serving learns in the same step whether
//! more have come.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Somebody serves. The rest of the word counts packets.
const SERVED: usize = 1;
/// One packet.
const ONE: usize = 2;

/// The word; a trait, so that a model checker can stand in for memory.
pub trait Word {
    /// Replaces the value by what `next` makes of it, in one step if that is not `None`; returns what it was, or `None`.
    fn update(&self, next: impl FnMut(usize) -> Option<usize>) -> Option<usize>;
    /// The value.
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

/// Who serves the waiting room.
#[derive(Debug, Default)]
pub struct Turn<W = AtomicUsize>(pub W);

/// What a server learns when it wants to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nobody waits, and nobody serves.
    Empty,
    /// Packets wait, and nobody serves them.
    Behind,
    /// More have come meanwhile: the turn has not ended.
    More,
}

impl<W: Word> Turn<W> {
    /// Adds packets, which are in the room already. True: it is the caller's turn.
    #[inline]
    pub fn join(&self, packets: usize) -> bool {
        self.0.update(|old| Some((old + packets * ONE) | SERVED)).is_some_and(|old| old & SERVED == 0)
    }

    /// Adds packets that somebody else is to serve. True: nobody waited before, so whoever is to serve may be
    /// asleep.
    #[inline]
    pub fn announce(&self, packets: usize) -> bool {
        self.0.update(|old| Some(old + packets * ONE)).is_some_and(|old| old < ONE)
    }

    /// Takes the turn, if packets wait and nobody serves them.
    #[inline]
    pub fn take(&self) -> bool {
        self.0.update(|old| (old >= ONE && old & SERVED == 0).then_some(old | SERVED)).is_some()
    }

    /// Packets that wait, at least.
    #[inline]
    pub fn waiting(&self) -> usize {
        self.0.get() / ONE
    }

    /// So many packets were served. Ends the turn if nobody waits any more, or if the server cannot go on
    /// (`stop`).
    #[inline]
    pub fn leave(&self, served: usize, stop: bool) -> Left {
        let mut left = Left::Empty;
        self.0.update(|old| {
            let rest = old - served * ONE;
            left = match (rest >= ONE, stop) {
                (false, _) => Left::Empty,
                (true, true) => Left::Behind,
                (true, false) => Left::More,
            };
            Some(if left == Left::More { rest } else { rest & !SERVED })
        });
        left
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

    struct Room {
        turn: Turn<Checked>,
        waiting: Mutex<VecDeque<usize>>,
        /// Written by whoever has the turn, and never by two: a lock that is never waited for.
        served: Mutex<Vec<usize>>,
    }

    impl Room {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                turn: Turn(Checked::new(0)),
                waiting: Mutex::default(),
                served: Mutex::default(),
            })
        }

        fn serve(&self, budget: usize) -> Left {
            loop {
                let mut served = self.served.try_lock().expect("two serve at once");
                let n = self.turn.waiting().min(budget);
                for _ in 0..n {
                    served.push(self.waiting.lock().unwrap().pop_front().expect("counted, but not there"));
                }
                drop(served);
                let left = self.turn.leave(n, false);
                if left != Left::More {
                    return left;
                }
            }
        }
    }

    /// Two producers that serve inline: every packet is served once, by one at a time, and none is left when both
    /// have gone.
    #[test]
    fn loom_nothing_stays_behind_when_producers_serve() {
        loom::model(|| {
            let room = Room::new();
            let producer = |room: Arc<Room>, packet| {
                thread::spawn(move || {
                    room.waiting.lock().unwrap().push_back(packet);
                    if room.turn.join(1) {
                        room.serve(usize::MAX);
                    }
                })
            };
            let threads = [producer(Arc::clone(&room), 1), producer(Arc::clone(&room), 2)];
            for thread in threads {
                thread.join().unwrap();
            }
            let mut served = std::mem::take(&mut *room.served.lock().unwrap());
            served.sort_unstable();
            assert_eq!(served, [1, 2]);
            assert_eq!(room.turn.0.get(), 0);
        });
    }

    /// Producers that leave the work to a worker: whenever the worker finds nothing, the producer that comes next
    /// is told to wake it.
    #[test]
    fn loom_no_wake_up_is_lost_on_hand_off() {
        loom::model(|| {
            let room = Room::new();
            let other = Arc::clone(&room);
            let producer = thread::spawn(move || {
                let mut wakes = 0;
                for packet in [1, 2] {
                    other.waiting.lock().unwrap().push_back(packet);
                    wakes += usize::from(other.turn.announce(1));
                }
                wakes
            });
            // One poll at any time, and then one for all wake-ups, as an event counter has it.
            if room.turn.take() {
                room.serve(1);
            }
            let wakes = producer.join().unwrap();
            assert!(wakes >= 1);
            if room.turn.take() {
                room.serve(1);
            }
            assert_eq!(*room.served.lock().unwrap(), [1, 2]);
            assert_eq!(room.turn.0.get(), 0);
        });
    }

    #[test]
    fn whoever_cannot_go_on_leaves_packets_for_the_next() {
        let turn = Turn(AtomicUsize::new(0));
        assert!(turn.join(3) && !turn.join(1) && !turn.take());
        assert_eq!(turn.leave(1, false), Left::More);
        assert_eq!(turn.leave(1, true), Left::Behind);
        assert_eq!(turn.waiting(), 2);
        assert!(turn.take());
        assert_eq!(turn.leave(2, true), Left::Empty);
        assert!(!turn.take());
        assert!(turn.announce(1) && !turn.announce(1) && turn.join(1));
    }
}
