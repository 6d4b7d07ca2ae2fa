//! Adaptive busy polling: decides how long a thread without work polls before it sleeps (spin, then block).
//!
//! A worker creates one [`Spin`] and keeps it for its lifetime. In its loop it calls [`Spin::found`] after a round
//! with work, [`Spin::idle`] after a round without, which says what to do next, and [`Spin::slept`] after a
//! sleep.
//!
//! Polling costs nothing if no other thread wants the processor, and it saves the peer a doorbell and this thread
//! a wake-up. It is expensive if another thread wants the processor, often the very peer that this one waits
//! for, and it wastes energy if no work arrives. Nor does it pay under high load: a thread that sleeps gathers
//! work, and each wake-up costs less per piece than polling. Therefore:
//!
//! - Only a thread whose load is low polls: it has work for at most a third of its time.
//! - Polling that finds no work within its limit is paused with exponential back-off: for twice as many sleeps as
//!   the last time, up to `MAX_PAUSE`. A sleep shorter than the limit, which polling would have avoided, halves
//!   the rest of the pause.
//! - Every few polls yield the processor. If another thread runs meanwhile, polling ends for `BACKOFF_FACTOR`
//!   times as long as it ran; the factor doubles until polling finds work.
//!
//! ```text
//!              no work                  limit reached, or contended
//!   working ─────────────► polling ─────────────────────────────────► sleeping
//!      ▲ ▲                    │           (pause, back-off)              │
//!      │ └── work found ──────┘                                          │
//!      └── woken ────────────────────────────────────────────────────────┘
//!
//!   working goes to sleeping directly in a pause or back-off; polling is slower while the load is high
//! ```

use std::time::{Duration, Instant};

/// Duration of a yield from which on another thread may have run. Without a waiting thread a yield returns within
/// half a microsecond; otherwise it takes two context switches and that thread's work. 1 to 5 microseconds were
/// measured to be alike. An interrupt takes as long, some hundred times a second in a virtual machine, so the
/// kernel is asked for the number of context switches.
const CONTENDED: Duration = Duration::from_micros(3);

/// Initial ratio of a back-off to the time for which another thread ran. It doubles each time, until polling finds
/// work. A constant back-off of 10 ms would let a thread that runs for microseconds some hundred times a second end
/// all polling.
const BACKOFF_FACTOR: u32 = 64;

/// Longest back-off on a processor that other threads always want. A trial costs some 10 microseconds.
const MAX_BACKOFF: Duration = Duration::from_millis(640);

/// Number of sleeps between two trials if polling never finds work. Polling then costs a thousandth of its limit per
/// sleep.
const MAX_PAUSE: u32 = 1023;

/// Window over which the load is measured: shorter than a person notices, and hundreds of bursts.
const WINDOW: Duration = Duration::from_millis(1);

/// The load is high if a thread has work for more than `1/MAX_LOAD_DIVISOR` of a window. With a divisor of 4, a load
/// that single frames of 64 bytes cause at a tenth of the highest rate, the median latency at that rate alternated
/// between 2 and 5 microseconds.
const MAX_LOAD_DIVISOR: u32 = 3;

/// Time for which a thread with a high load waits between two polls, and with it the longest that work waits for company. A switch between two polling guests whose
/// frames of 60 bytes it forwards faster than they send them took 0.9 and 0.8 of the time per frame (split, packed) with 1 microsecond, 0.83 and 0.96 with 4,
/// and no less with 0 than when it slept.
const GATHER: Duration = Duration::from_micros(2);

/// Number of empty polls between two yields while the load is high, which take as long as [`GATHER`] says.
const GATHERS_PER_YIELD: u32 = 4;

/// Number of empty polls between two yields. A poll of a few empty rings takes some ten nanoseconds, a yield with
/// its clock reads a microsecond. With a yield in every round work was found so late that a quarter of the
/// throughput at 1500 bytes was lost.
const POLLS_PER_YIELD: u32 = 32;

/// The action after a poll that found no work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// Poll the busy sources again at once.
    Again,
    /// Poll all sources again, those that are polled more rarely included.
    Around,
    /// Arm notifications and sleep until woken.
    Sleep,
}

/// The polling state of one thread; see the [module](self).
#[derive(Debug)]
pub struct Spin {
    limit: Duration,
    polls: u32,
    /// Time at which polling without work began, and the thread's count of involuntary switches then.
    polling_since: Option<(Instant, i64)>,
    /// Number of sleeps until polling is tried again, and the length of the last pause.
    pause: u32,
    last_pause: u32,
    /// End of the back-off for other threads, and the ratio for the next one.
    backoff_until: Option<Instant>,
    backoff_factor: u32,
    load: Load,
}

/// The load of a thread: the share of its time in which it has work.
#[derive(Debug)]
struct Load {
    /// Start of the current window, and the idle time in it.
    window: Instant,
    idle: Duration,
    /// Start and latest known end of the current idle period.
    dry: Option<(Instant, Instant)>,
    /// True if the load was high in the last window.
    high: bool,
}

impl Load {
    fn new(now: Instant) -> Load {
        Load { window: now, idle: Duration::ZERO, dry: Some((now, now)), high: false }
    }

    /// Ends the current idle period, as there was work.
    #[inline]
    fn end_idle(&mut self) {
        if let Some((since, until)) = self.dry.take() {
            self.idle += until.saturating_duration_since(since);
        }
    }

    /// Starts or extends an idle period and returns true if the load was high in the last window.
    #[inline]
    fn is_high_after_idle(&mut self, now: Instant) -> bool {
        if let Some((_, until)) = &mut self.dry {
            *until = now;
        } else {
            let whole = now.saturating_duration_since(self.window);
            if whole >= WINDOW {
                self.high = self.idle + whole / MAX_LOAD_DIVISOR < whole;
                (self.window, self.idle) = (now, Duration::ZERO);
            }
            self.dry = Some((now, now));
        }
        self.high
    }
}

impl Spin {
    /// Creates the state for a thread that polls for about `limit` before it sleeps, as long as that pays. With
    /// a limit of zero it never polls.
    pub fn new(limit: Duration) -> Spin {
        let load = Load::new(Instant::now());
        Spin {
            limit,
            polls: 0,
            polling_since: None,
            pause: 0,
            last_pause: 0,
            backoff_until: None,
            backoff_factor: BACKOFF_FACTOR,
            load,
        }
    }

    /// Records that a round found work.
    #[inline]
    pub fn found(&mut self) {
        self.polls = 0;
        if self.limit.is_zero() {
            return;
        }
        self.load.end_idle();
        if self.polling_since.is_some() {
            // The work was found by polling, so polling pays.
            self.polling_since = None;
            (self.pause, self.last_pause) = (0, 0);
            self.backoff_factor = BACKOFF_FACTOR;
        }
    }

    /// Records that the thread has slept for `time`.
    pub fn slept(&mut self, time: Duration) {
        self.polls = 0;
        self.polling_since = None;
        if !self.limit.is_zero() {
            self.load.is_high_after_idle(Instant::now());
        }
        self.pause = if time < self.limit { self.pause / 2 } else { self.pause.saturating_sub(1) };
    }

    /// Records that a round found no work and returns the next action. It may have yielded the processor
    /// meanwhile.
    #[inline]
    pub fn idle(&mut self) -> Idle {
        if self.limit.is_zero() {
            return Idle::Sleep;
        }
        let now = Instant::now();
        let high = self.load.is_high_after_idle(now);
        if self.pause > 0 || self.is_backing_off(now) {
            return Idle::Sleep;
        }
        self.polls += if high { POLLS_PER_YIELD / GATHERS_PER_YIELD } else { 1 };
        if self.polls < POLLS_PER_YIELD {
            std::hint::spin_loop();
            while high && now.elapsed() < GATHER {
                std::hint::spin_loop();
            }
            return Idle::Again;
        }
        self.polls = 0;
        let offer = |displaced| {
            std::thread::yield_now();
            let time = now.elapsed();
            (time > CONTENDED && involuntary_switches() != displaced).then_some(time)
        };
        if self.ends_polling(now, offer) { Idle::Sleep } else { Idle::Around }
    }

    /// Returns true during a back-off for other threads.
    #[inline]
    fn is_backing_off(&mut self, now: Instant) -> bool {
        self.backoff_until = self.backoff_until.filter(|until| now < *until);
        self.backoff_until.is_some()
    }

    /// Returns true if polling must end now: the limit is reached, or another thread wants the processor. `offer`
    /// yields the processor and returns for how long another thread took it, given the count of involuntary
    /// switches when polling began.
    fn ends_polling(&mut self, now: Instant, offer: impl FnOnce(i64) -> Option<Duration>) -> bool {
        let (since, displaced) = *self.polling_since.get_or_insert_with(|| (now, involuntary_switches()));
        if now.duration_since(since) >= self.limit {
            self.last_pause = (2 * self.last_pause + 1).min(MAX_PAUSE);
            self.pause = self.last_pause;
            return true;
        }
        let Some(time) = offer(displaced) else { return false };
        self.polling_since = None;
        self.backoff_until = Some(now + (time * self.backoff_factor).min(MAX_BACKOFF));
        self.backoff_factor = (2 * self.backoff_factor).min(MAX_BACKOFF.as_micros() as u32);
        true
    }
}

/// Returns the calling thread's number of involuntary context switches.
fn involuntary_switches() -> i64 {
    // SAFETY: a structure of integers, for which zeroes are values.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills in the structure it is given; on failure it stays as it is.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nivcsw
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_limit_nobody_waits() {
        assert_eq!(Spin::new(Duration::ZERO).idle(), Idle::Sleep);
    }

    #[test]
    fn patience_looks_around_and_ends() {
        let mut spin = Spin::new(Duration::from_millis(1));
        assert_eq!(spin.idle(), Idle::Again);
        let deadline = Instant::now() + Duration::from_secs(10);
        while spin.idle() != Idle::Sleep {
            assert!(Instant::now() < deadline, "looks for ever");
        }
    }

    const LIMIT: Duration = Duration::from_micros(100);
    const SHORT: Duration = Duration::from_micros(50);
    const LONG: Duration = Duration::from_micros(200);

    /// Yields to no other thread, as none wants the processor.
    fn alone(_: i64) -> Option<Duration> {
        None
    }

    #[test]
    fn looking_that_finds_nothing_becomes_rare() {
        let mut spin = Spin::new(LIMIT);
        let (mut now, mut trials) = (Instant::now(), 0);
        for _ in 0..4 * MAX_PAUSE {
            if spin.pause == 0 {
                assert!(!spin.ends_polling(now, alone) && !spin.ends_polling(now + SHORT, alone));
                now += LONG;
                assert!(spin.ends_polling(now, alone));
                trials += 1;
            }
            assert_eq!(spin.idle(), Idle::Sleep);
            spin.slept(LONG);
        }
        // After 1, 3, 7 ... 511 sleeps, and then after 1023 each.
        assert_eq!(trials, 10 + 3);
        // Sleeps that polling would have avoided bring the next trial forward.
        spin.pause = MAX_PAUSE;
        (0..9).for_each(|_| spin.slept(SHORT));
        assert_eq!(spin.pause, 1);
        spin.slept(SHORT);
        assert_eq!(spin.pause, 0);
    }

    #[test]
    fn what_is_found_by_looking_ends_pauses_and_what_is_found_at_once_does_not() {
        let mut spin = Spin::new(LIMIT);
        let now = Instant::now();
        (spin.pause, spin.last_pause) = (0, 511);
        spin.found();
        assert_eq!(spin.last_pause, 511);
        assert!(!spin.ends_polling(now, alone));
        spin.found();
        assert_eq!((spin.pause, spin.last_pause), (0, 0));
    }

    #[test]
    fn a_thread_with_much_to_do_lets_work_gather_between_looks() {
        let mut spin = Spin::new(Duration::from_secs(100));
        assert_eq!(spin.idle(), Idle::Again);
        spin.found();
        spin.load.high = true;
        let begin = Instant::now();
        for _ in 1..GATHERS_PER_YIELD {
            assert_eq!(spin.idle(), Idle::Again);
        }
        assert!(begin.elapsed() >= (GATHERS_PER_YIELD - 1) * GATHER, "no look was earlier");
        assert_ne!(spin.idle(), Idle::Again, "others may want the processor");
        spin.backoff_until = Some(Instant::now() + Duration::from_secs(100));
        assert_eq!(spin.idle(), Idle::Sleep);
    }

    #[test]
    fn the_load_is_what_a_window_was_used_for() {
        let start = Instant::now();
        let mut load = Load::new(start);
        // Work for so many of each hundred microseconds, for half a window, one window, and two.
        let mut time = start;
        for (busy, half, one, two) in [
            (25, false, false, false),
            (40, false, true, true),
            (90, true, true, true),
            (10, true, false, false),
        ] {
            let mut high = Vec::new();
            for _ in 0..2 * WINDOW.as_micros() / 100 {
                load.end_idle();
                high.push(load.is_high_after_idle(time + Duration::from_micros(busy)));
                time += Duration::from_micros(100);
                assert_eq!(load.is_high_after_idle(time), high[high.len() - 1]);
            }
            assert_eq!([high[4], high[14], high[19]], [half, one, two], "{busy} per cent, {high:?}");
        }
    }

    #[test]
    fn a_processor_that_others_want_is_left_alone_for_longer_and_longer() {
        let mut spin = Spin::new(LIMIT);
        let mut now = Instant::now();
        for wait in [BACKOFF_FACTOR, 2 * BACKOFF_FACTOR, 4 * BACKOFF_FACTOR].map(|rest| rest * LONG) {
            assert!(spin.ends_polling(now, |_| Some(LONG)), "wanted");
            assert!(spin.is_backing_off(now + wait - SHORT), "it rests");
            now += wait;
            assert!(!spin.is_backing_off(now), "it has rested");
        }
        assert!(!spin.ends_polling(now, alone));
        spin.found();
        assert_eq!(spin.backoff_factor, BACKOFF_FACTOR);
        assert!(spin.ends_polling(now, |_| Some(MAX_BACKOFF)));
        assert!(spin.is_backing_off(now + MAX_BACKOFF - SHORT) && !spin.is_backing_off(now + MAX_BACKOFF));
    }
}
