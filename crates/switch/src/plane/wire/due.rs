//! Frames in the order in which they are due, those of one time in the order in which they came.
//!
//! Without jitter each frame is due after the one before it, and a ring does; what is due before the last of the ring goes to a heap. So a
//! wire that only delays costs no more than a ring, however much is under way.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

use crate::plane::policy::shaper::Delayed;

/// A frame and its time.
#[derive(Debug)]
pub(super) struct Due {
    /// In nanoseconds of the switch's clock.
    pub(super) due: u64,
    /// Its number among all frames of the queue.
    serial: u64,
    pub(super) delayed: Delayed,
}

impl Due {
    fn key(&self) -> (u64, u64) {
        (self.due, self.serial)
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    /// The one that is due first is the greatest, as a heap gives that first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.key().cmp(&self.key())
    }
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct DueQueue {
    ring: VecDeque<Due>,
    heap: BinaryHeap<Due>,
    serial: u64,
}

impl DueQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.ring.is_empty() && self.heap.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.ring.len() + self.heap.len()
    }

    pub(super) fn push(&mut self, due: u64, delayed: Delayed) {
        let frame = Due { due, serial: self.serial, delayed };
        self.serial += 1;
        if self.ring.back().is_none_or(|last| last.due <= due) {
            self.ring.push_back(frame);
        } else {
            self.heap.push(frame);
        }
    }

    /// Returns true if the next frame is in the heap.
    fn is_in_heap(&self) -> bool {
        match (self.ring.front(), self.heap.peek()) {
            (Some(ring), Some(heap)) => heap.key() < ring.key(),
            (None, heap) => heap.is_some(),
            (Some(_), None) => false,
        }
    }

    /// Returns when the next frame is due.
    pub(super) fn next(&self) -> Option<u64> {
        let next = if self.is_in_heap() { self.heap.peek() } else { self.ring.front() };
        next.map(|next| next.due)
    }

    /// Takes the next frame, if it is due.
    pub(super) fn pop(&mut self, now: u64) -> Option<Due> {
        self.next().filter(|due| *due <= now)?;
        if self.is_in_heap() { self.heap.pop() } else { self.ring.pop_front() }
    }

    /// Returns all frames in their order.
    pub(super) fn in_order(&self) -> impl Iterator<Item = &Due> {
        let mut all: Vec<_> = self.ring.iter().chain(&self.heap).collect();
        all.sort_unstable_by_key(|due| due.key());
        all.into_iter()
    }
}
