//! A token bucket that all workers share.
//!
//! The algorithm is the generic cell rate algorithm (GCRA, ITU-T I.371), which keeps two numbers fewer than a
//! leaky bucket: one number, the time that everything passed so far takes at the permitted rate. Something
//! may pass while that is at most a burst ahead of now. The number is one word, changed by compare and
//! exchange, so workers neither wait for each other nor lose count.
//!
//! **Unit.** The number is not kept as a time but as tokens granted since the start, in parts of a token. A
//! time would have to be rounded at every packet (one byte at 100 Gbit/s is 80 picoseconds, and picoseconds
//! since the start fill a word in 213 days); so only the reading of the clock is rounded, once, and no error
//! adds up. The size of a part is chosen for each rate: as small as possible, with decades before the word is
//! full.
//!
//! **Two ways to use it.** A *policer* calls [`TokenBucket::take`] and drops refused frames. Frames that can
//! wait are *paced*: [`TokenBucket::wait`] says how long nothing may pass, and every frame that then passes
//! is [charged](TokenBucket::charge), even if it is more than there is: one frame may borrow, and those after
//! it wait until that is paid back. A frame that is larger than the burst thus passes, too, and the rate is
//! exact over time whatever the frames are.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::rules::Rate;

/// Parts of tokens granted in a second, at most: the word is full after 34 years.
const PARTS: u64 = 1 << 34;

/// Upper bound on the rate, 550 Gbit/s if of bytes; a higher one is lowered to it. At this rate the word is
/// full after 8.5 years.
const FASTEST: u64 = 1 << 36;

/// Upper bound on the burst, in parts; a longer one is shortened to it.
const LONGEST: u64 = 1 << 62;

/// Binary digits behind the point in `TokenBucket::per_micro`: as many as fit at the highest rate.
const FRACTION: u32 = 44;

/// Extra tokens that a waiter waits for, as the time in microseconds in which they are granted, or an eighth
/// of a burst if that is less: it is not woken for each small frame then. Nothing is lost by it, as the
/// bucket goes on filling meanwhile.
const REST: u64 = 100;

/// A token bucket. It begins full.
#[derive(Debug)]
pub(crate) struct TokenBucket {
    /// The configured rate and burst.
    rate: Rate,
    /// Depth of the bucket: tokens that pass at once, at most.
    burst: u64,
    /// Binary logarithm of the number of parts in a token.
    shift: u32,
    /// Parts granted in a microsecond, rounded down so that no more than the rate ever passes.
    per_micro: u64,
    /// Parts used, counted as if nothing had ever been granted in vain.
    used: AtomicU64,
}

impl TokenBucket {
    /// Makes a full bucket.
    pub(crate) fn new(rate: Rate) -> Self {
        let per_second = rate.per_second.clamp(1, FASTEST);
        let burst = rate.burst.clamp(1, LONGEST);
        let room = |most: u64, number: u64| most.ilog2().saturating_sub(number.ilog2() + 1);
        let shift = room(PARTS, per_second).min(room(LONGEST, burst));
        let per_micro = (u128::from(per_second) << (shift + FRACTION)) / 1_000_000;
        Self { rate, burst, shift, per_micro: per_micro as u64, used: AtomicU64::new(0) }
    }

    /// Returns the configured rate and burst.
    pub(crate) fn rate(&self) -> Rate {
        self.rate
    }

    /// Takes `amount` tokens, all or none, at `now`, in microseconds of a clock that is the same for all workers. A clock that
    /// steps back only grants nothing until it is back. More than the burst is never granted, however long one waits: a
    /// burst has to be as large as the largest frame.
    #[inline]
    pub(crate) fn take(&self, amount: u64, now: u64) -> bool {
        let granted = self.granted(now);
        let take = |used: u64| self.taken(amount, used, granted);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    /// Returns whether [`take`](Self::take) would grant `amount` tokens now, and takes none.
    pub(crate) fn has(&self, amount: u64, now: u64) -> bool {
        self.taken(amount, self.used.load(Ordering::Relaxed), self.granted(now)).is_some()
    }

    /// Returns the parts used once `amount` tokens are taken; `None` if there are not so many.
    #[inline]
    fn taken(&self, amount: u64, used: u64, granted: u64) -> Option<u64> {
        if amount > self.burst {
            return None;
        }
        let most = granted.saturating_add(self.burst << self.shift);
        let used = used.max(granted).checked_add(amount << self.shift)?;
        (used <= most).then_some(used)
    }

    /// Returns the microseconds from `now` on for which nothing may pass; 0 if something may, as nothing is
    /// owed. That wait is enough for a few frames unless somebody else takes the tokens.
    #[inline]
    pub(crate) fn wait(&self, now: u64) -> u64 {
        let (granted, used) = (self.granted(now), self.used.load(Ordering::Relaxed));
        let due = used.saturating_sub(self.burst << self.shift);
        if due <= granted {
            return 0;
        }
        self.until(due - granted)
    }

    /// Returns the microseconds until `missing` parts, and those for a few frames more, are granted.
    #[cold]
    fn until(&self, missing: u64) -> u64 {
        let rest = (u128::from(REST) * u128::from(self.per_micro)) >> FRACTION;
        let rest = rest.min(u128::from((self.burst << self.shift) / 8));
        let parts = (u128::from(missing) + rest) << FRACTION;
        parts.div_ceil(u128::from(self.per_micro.max(1))).try_into().unwrap_or(u64::MAX)
    }

    /// Takes `amount` tokens for something that passes at `now`, including tokens that are not there yet.
    #[inline]
    pub(crate) fn charge(&self, amount: u64, now: u64) {
        let granted = self.granted(now);
        let parts = u64::try_from(u128::from(amount) << self.shift).unwrap_or(LONGEST).min(LONGEST);
        let take = |used: u64| Some(used.max(granted).saturating_add(parts));
        let _ = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
    }

    /// Returns the parts used, for another process whose clock is the same.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Sets the parts used, as they were in another process, whose bucket has the same rate.
    pub(crate) fn set_used(&self, used: u64) {
        self.used.store(used, Ordering::Relaxed);
    }

    /// Returns the tokens available at `now`.
    #[inline]
    pub(crate) fn left(&self, now: u64) -> u64 {
        let granted = self.granted(now);
        let used = self.used.load(Ordering::Relaxed).max(granted);
        granted.saturating_add(self.burst << self.shift).saturating_sub(used) >> self.shift
    }

    /// Returns the parts that the rate has granted by `now`.
    #[inline]
    fn granted(&self, now: u64) -> u64 {
        let parts = (u128::from(now) * u128::from(self.per_micro)) >> FRACTION;
        parts.try_into().unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000;

    fn bucket(per_second: u64, burst: u64) -> TokenBucket {
        TokenBucket::new(Rate { per_second, burst })
    }

    #[test]
    fn one_packet_a_second_is_one_packet_a_second() {
        let bucket = bucket(1, 1);
        let passed = (0..10 * SECOND).step_by(1000).filter(|now| bucket.take(1, *now)).count();
        assert_eq!(passed, 10);
    }

    /// ITU-T I.371 with today's numbers: a conforming stream at 100 Gbit/s passes to the last byte, after
    /// years too.
    #[test]
    fn a_hundred_gigabits_of_bytes_are_exact_after_years() {
        let bucket = bucket(12_500_000_000, 12_500);
        let start = 5 * 365 * 86_400 * SECOND;
        for micro in 0..1000 {
            assert!((0..100).all(|_| bucket.take(125, start + micro)), "{micro}");
            assert!(!bucket.take(2, start + micro), "{micro}");
        }
    }

    #[test]
    fn more_than_the_burst_never_passes() {
        let bucket = bucket(u64::MAX, 1000);
        for now in [0, SECOND, u64::MAX] {
            assert!(!bucket.take(1001, now));
        }
        assert!(bucket.take(1000, SECOND));
    }

    #[test]
    fn a_clock_that_steps_back_grants_nothing_and_takes_nothing() {
        let bucket = bucket(10, 10);
        assert!(bucket.take(10, 100 * SECOND));
        assert!((0..100).all(|second| !bucket.take(1, second * SECOND)));
        assert!(!bucket.take(2, 100 * SECOND + SECOND / 10));
        assert!(bucket.take(1, 100 * SECOND + SECOND / 10));
    }

    #[test]
    fn one_frame_may_borrow_and_those_after_it_wait_until_it_is_paid() {
        let bucket = bucket(1000, 500);
        bucket.charge(500, 0);
        assert_eq!((bucket.left(0), bucket.wait(0)), (0, 0), "nothing is owed");
        bucket.charge(1000, 0);
        let wait = bucket.wait(0);
        assert!((SECOND..SECOND + SECOND / 8).contains(&wait), "{wait}");
        assert_eq!((bucket.left(wait - 1), bucket.wait(wait)), (0, 0));
        assert!(bucket.wait(SECOND - 1) > 0);
        assert_eq!(bucket.left(2 * SECOND), 500, "a burst at most");
    }

    #[test]
    fn a_debt_without_bounds_overflows_nothing() {
        for bucket in [bucket(u64::MAX, u64::MAX), bucket(1, 1), bucket(1, u64::MAX), bucket(u64::MAX, 1)] {
            for now in [0, SECOND, u64::MAX] {
                bucket.charge(u64::MAX, now);
                let _ = (bucket.wait(now), bucket.left(now), bucket.wait(u64::MAX));
            }
        }
    }

    #[test]
    fn threads_together_get_no_more_than_the_burst_and_the_rate() {
        const THREADS: u64 = 4;
        let bucket = bucket(1000, 500);
        let passed = AtomicU64::new(0);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (bucket, passed) = (&bucket, &passed);
                // Every thread has a clock of its own, which may be arbitrarily late.
                scope.spawn(move || {
                    for now in (0..SECOND).step_by(50) {
                        if bucket.take(1 + thread % 2, now) {
                            passed.fetch_add(1 + thread % 2, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        let passed = passed.into_inner();
        assert!((1490..=1500).contains(&passed), "{passed}");
    }

    proptest! {
        /// In any interval at most the burst and the tokens granted in it pass.
        #[test]
        fn no_interval_has_more_than_the_rate_and_the_burst(
            per_second in prop_oneof![1..100u64, 1..1_000_000u64, 1..20_000_000_000u64],
            burst in prop_oneof![1..10u64, 1..100_000u64],
            steps in proptest::collection::vec((0..200_000u64, 1..2000u64), 1..60),
            start in 0..1u64 << 48,
        ) {
            let bucket = bucket(per_second, burst);
            let mut now = start;
            let mut passed: Vec<(u64, u64)> = Vec::new();
            for (wait, amount) in steps {
                now += wait;
                if bucket.take(amount, now) {
                    passed.push((now, amount));
                }
            }
            for (from, (first, _)) in passed.iter().enumerate() {
                let mut sum = 0;
                for (last, amount) in &passed[from..] {
                    sum += amount;
                    // Allow one part more, as the clock is read in whole parts.
                    let most = u128::from(last - first) * u128::from(per_second) / 1_000_000 + u128::from(burst) + 1;
                    prop_assert!(u128::from(sum) <= most, "{sum} of {most}");
                }
            }
        }

        /// A bucket of rational numbers (time in microseconds, tokens in millionths) lets pass the same, give or take the part of
        /// a token that was rounded down.
        #[test]
        fn what_conforms_is_never_refused(
            per_second in prop_oneof![1..100u64, 1..1_000_000u64, 1..20_000_000_000u64],
            burst in prop_oneof![1..10u64, 1..100_000u64],
            steps in proptest::collection::vec((0..200_000u64, 1..2000u64), 1..60),
        ) {
            let bucket = bucket(per_second, burst);
            let full = u128::from(burst) * 1_000_000;
            let (mut tokens, mut now) = (full, 0);
            for (wait, amount) in steps {
                now += wait;
                tokens = full.min(tokens + u128::from(wait) * u128::from(per_second));
                let spent = u128::from(amount) * 1_000_000;
                // The model has two tokens to spare, or its bucket is full.
                let conforms = tokens >= spent + 2_000_000 || tokens == full && spent <= full;
                let passes = bucket.take(amount, now);
                prop_assert!(passes || !conforms, "{amount} at {now} with {tokens}");
                prop_assert!(!passes || tokens + 2_000_000 >= spent);
                if passes {
                    tokens = tokens.saturating_sub(spent);
                }
            }
        }

        /// A sender that waits as it is told, and then sends one frame, sends at the rate, within one frame
        /// and the extra tokens of the wait.
        #[test]
        fn what_waits_as_it_is_told_passes_at_the_rate(
            per_second in prop_oneof![100..10_000u64, 10_000..20_000_000_000u64],
            burst in 1..1_000_000u64,
            frames in proptest::collection::vec(1..70_000u64, 100..200),
        ) {
            // A bucket that is full within a microsecond overflows while one is waited for.
            let burst = burst + per_second / 100_000;
            let bucket = bucket(per_second, burst);
            let (mut now, mut sum, mut last) = (0, 0u64, 0);
            for frame in frames {
                now += bucket.wait(now);
                prop_assert_eq!(bucket.wait(now), 0, "waiting is enough");
                bucket.charge(frame, now);
                (sum, last) = (sum + frame, frame);
            }
            let granted = u128::from(now) * u128::from(per_second) / 1_000_000;
            let passed = u128::from(sum - last);
            prop_assert!(passed <= granted + u128::from(burst) + 1, "{passed} of {granted}");
            // Tokens that it need not have waited for are in the bucket.
            let most = granted + u128::from(burst);
            prop_assert!(u128::from(sum) + u128::from(burst) + u128::from(per_second) / 500_000 + 2 >= most, "{sum} of {granted}");
        }

        #[test]
        fn no_numbers_overflow(rate: u64, burst: u64, steps: Vec<(u64, u64)>) {
            let bucket = bucket(rate, burst);
            for (amount, now) in steps {
                if bucket.take(amount, now) {
                    prop_assert!(amount <= burst.max(1));
                    bucket.charge(amount, amount);
                    let _ = (bucket.wait(amount), bucket.left(amount));
                }
            }
        }
    }
}
