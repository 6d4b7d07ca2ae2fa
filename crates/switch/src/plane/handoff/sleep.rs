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
//! Of the two loads behind the fences at least one sees the other side's store. A model of it under loom, in which either fence can be left out, says
//! that both are needed.

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

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
    use loom::thread;

    use super::*;

    /// Selects the fences that a model has.
    trait Fences: Default + Send + Sync + 'static {
        const CONSUMER: bool = true;
        const PRODUCER: bool = true;
    }

    #[derive(Default)]
    struct Both;
    impl Fences for Both {}

    #[derive(Default)]
    struct NoConsumerFence;
    impl Fences for NoConsumerFence {
        const CONSUMER: bool = false;
    }

    #[derive(Default)]
    struct NoProducerFence;
    impl Fences for NoProducerFence {
        const PRODUCER: bool = false;
    }

    struct Model<M>(AtomicBool, PhantomData<M>);

    impl<M> Default for Model<M> {
        fn default() -> Self {
            Self(AtomicBool::new(false), PhantomData)
        }
    }

    impl<M: Fences> Flag for Model<M> {
        fn set(&self, value: bool) {
            self.0.store(value, Ordering::Relaxed);
        }

        fn get(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }

        fn consumer_fence() {
            if M::CONSUMER {
                fence(Ordering::SeqCst);
            }
        }

        fn producer_fence() {
            if M::PRODUCER {
                fence(Ordering::SeqCst);
            }
        }
    }

    /// Two workers push to a third, which sleeps as soon as it finds nothing. In every order that the memory
    /// model allows, an entry never waits for a consumer that sleeps and whose bell was not rung.
    fn nothing_waits_for_a_sleeper<M: Fences>() {
        loom::model(|| {
            // The model publishes as the rings do: pushed entries are counted with release order.
            let rings: [Arc<AtomicUsize>; 2] = [Arc::default(), Arc::default()];
            let (flag, rung) = (Arc::new(SleepFlag::<Model<M>>::default()), Arc::new(AtomicBool::new(false)));
            let producers = rings.clone().map(|ring| {
                let (flag, rung) = (Arc::clone(&flag), Arc::clone(&rung));
                thread::spawn(move || {
                    ring.store(1, Ordering::Release);
                    if flag.must_wake() {
                        rung.store(true, Ordering::Relaxed);
                    }
                })
            });
            let nothing = || rings.iter().all(|ring| ring.load(Ordering::Acquire) == 0);
            let asleep = flag.about_to_sleep(nothing);
            for producer in producers {
                producer.join().unwrap();
            }
            assert!(!asleep || rung.load(Ordering::Relaxed), "it sleeps, and there is work");
        });
    }

    #[test]
    fn nothing_that_is_handed_over_waits_while_its_worker_sleeps() {
        nothing_waits_for_a_sleeper::<Both>();
    }

    #[test]
    #[should_panic(expected = "it sleeps, and there is work")]
    fn without_the_consumers_fence_something_waits() {
        nothing_waits_for_a_sleeper::<NoConsumerFence>();
    }

    #[test]
    #[should_panic(expected = "it sleeps, and there is work")]
    fn without_the_producers_fence_something_waits() {
        nothing_waits_for_a_sleeper::<NoProducerFence>();
    }
}
