//! The sleep handshake between workers (Dekker): no frame handed off to a worker waits while that worker sleeps.
//!
//! Each worker has one [`SleepFlag`], which all others read. The consumer announces its sleep, full fence, re-checks its rings; the producer
//! pushes, full fence, reads the flag:
//!
//! ```text
//!   consumer                            producer
//!   asleep = true                       push
//!   full fence                          full fence
//!   rings empty? sleep : stay awake     asleep? ring the bell
//! ```
//!
//! Of the two loads behind the fences at least one sees the other side's store. The models (`model`) leave out either fence, and find a worker that
//! sleeps while there is work.

use std::sync::atomic::{AtomicBool, Ordering, fence};

/// The flag and the fences of the handshake: a trait, so that the model checker can put its own in the place
/// of the standard library's.
pub(crate) trait Flag: Default {
    /// Stores the flag with relaxed order.
    fn set(&self, value: bool);
    /// Loads the flag with relaxed order.
    fn get(&self) -> bool;
    /// Full fence of the consumer, between its store and its look at the rings.
    fn consumer_fence();
    /// Full fence of the producer, between its push and its load.
    fn producer_fence();
}

impl Flag for AtomicBool {
    fn set(&self, value: bool) {
        self.store(value, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.load(Ordering::Relaxed)
    }

    fn consumer_fence() {
        fence(Ordering::SeqCst);
    }

    fn producer_fence() {
        fence(Ordering::SeqCst);
    }
}

/// Set while a worker sleeps, or is about to.
#[derive(Debug, Default)]
pub(crate) struct SleepFlag<F = AtomicBool>(F);

impl<F: Flag> SleepFlag<F> {
    /// Announces that the consumer is about to sleep; `nothing` checks that its rings are empty. Returns true
    /// if it may sleep; if not, it is marked awake again.
    pub(crate) fn about_to_sleep(&self, nothing: impl FnOnce() -> bool) -> bool {
        self.0.set(true);
        F::consumer_fence();
        let may = nothing();
        if !may {
            self.awake();
        }
        may
    }

    /// Clears the flag: the consumer does not sleep any more.
    pub(crate) fn awake(&self) {
        self.0.set(false);
    }

    /// Returns true if the consumer has to be woken for a push before this call.
    pub(crate) fn must_wake(&self) -> bool {
        F::producer_fence();
        self.0.get()
    }
}
