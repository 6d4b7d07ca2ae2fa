//! The primitives that the hand-off is built on: rings, flags and words that several threads write or read.
//!
//! [`Std`] is the choice of the switch: the standard library's atomics and rtrb's rings. The traits are there
//! so that the models (`model`) can run the same code on loom's, with one order or fence left out.

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ringferry_sys::eventfd::EventFd;
use rtrb::{Consumer, Producer, RingBuffer};

use super::ring::DEPTH;
use super::sleep::Flag;

/// One choice of all primitives.
pub(crate) trait Primitives: Debug + Sized {
    /// Upper bound on the frames under way from one worker to another: see [`DEPTH`].
    const DEPTH: usize = DEPTH;

    type Flag: Flag + Debug;
    type Bell: Bell + Debug;
    type Word: Word + Debug;
    type Producer<T: Debug>: Push<T> + Debug;
    type Consumer<T: Debug>: Pop<T> + Debug;

    /// Makes the ends of a ring with so many places, for one producer and one consumer.
    fn ring<T: Debug>(places: usize) -> (Self::Producer<T>, Self::Consumer<T>);
}

/// Wakes a worker that sleeps.
pub(crate) trait Bell {
    fn ring(&self);
}

/// The producer's end of a ring.
pub(crate) trait Push<T> {
    /// Publishes an entry; gives it back if no place is free.
    fn push(&mut self, entry: T) -> Result<(), T>;
    /// Returns true if no place is free.
    fn is_full(&self) -> bool;
}

/// The consumer's end of a ring.
pub(crate) trait Pop<T> {
    /// Takes the oldest entry and frees its place.
    fn pop(&mut self) -> Option<T>;
    fn is_empty(&self) -> bool;
}

/// A word that several threads change, or that one changes and others read.
pub trait Word {
    /// Makes a word with this value.
    fn new(value: u64) -> Self;
    /// Loads the word with relaxed order.
    fn get(&self) -> u64;
    /// Stores the word with relaxed order.
    fn set(&self, value: u64);
    /// Loads the word with acquire order.
    fn observe(&self) -> u64;
    /// Adds with release order: a thread that [observes](Self::observe) the result sees all writes before it.
    fn publish(&self, add: u64);
    /// Sets the bits of a mask, or clears them, with relaxed order. As it is a read-modify-write, a thread
    /// that observes its result also sees the writes before an earlier [`publish`](Self::publish).
    fn set_bits(&self, mask: u64, value: bool);
}

/// The primitives of the switch: those of the standard library, of Linux, and of rtrb.
#[derive(Debug)]
pub(crate) struct Std;

impl Primitives for Std {
    type Flag = AtomicBool;
    type Bell = EventFd;
    type Word = AtomicU64;
    type Producer<T: Debug> = Producer<T>;
    type Consumer<T: Debug> = Consumer<T>;

    fn ring<T: Debug>(places: usize) -> (Producer<T>, Consumer<T>) {
        RingBuffer::new(places)
    }
}

impl Bell for EventFd {
    #[inline]
    fn ring(&self) {
        let _ = self.signal();
    }
}

impl<T> Push<T> for Producer<T> {
    #[inline]
    fn push(&mut self, entry: T) -> Result<(), T> {
        Producer::push(self, entry).map_err(|rtrb::PushError::Full(entry)| entry)
    }

    #[inline]
    fn is_full(&self) -> bool {
        Producer::is_full(self)
    }
}

impl<T> Pop<T> for Consumer<T> {
    #[inline]
    fn pop(&mut self) -> Option<T> {
        Consumer::pop(self).ok()
    }

    #[inline]
    fn is_empty(&self) -> bool {
        Consumer::is_empty(self)
    }
}

impl Word for AtomicU64 {
    fn new(value: u64) -> Self {
        Self::new(value)
    }

    #[inline]
    fn get(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }

    fn set(&self, value: u64) {
        self.store(value, Ordering::Relaxed);
    }

    #[inline]
    fn observe(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn publish(&self, add: u64) {
        self.fetch_add(add, Ordering::Release);
    }

    fn set_bits(&self, mask: u64, value: bool) {
        if value {
            self.fetch_or(mask, Ordering::Relaxed);
        } else {
            self.fetch_and(!mask, Ordering::Relaxed);
        }
    }
}
