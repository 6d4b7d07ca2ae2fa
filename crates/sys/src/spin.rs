//! How long a thread that finds no work goes on looking before it sleeps.
//!
//! Looking again costs nothing when the processor has nothing else to do, and saves the peer a
//! doorbell and us a wake-up. When someone else wants the processor it costs dearly: often that is the
//! very peer whose work we are looking for. And when no work comes it is heat.
//!
//! Nor does it pay where there is much to do: there sleeping gathers work, as each wake-up finds all that came meanwhile, and costs
//! less for each piece than looking would. So only a thread that has little to do looks.
//!
//! So looking is on trial. While it finds work within its limit it goes on. Each time it does not, it pauses for twice as
//! many sleeps as before, up to `MAX_PAUSE`; a sleep that ends within the limit, so that looking would have found
//! what it ended for, halves what is left of the pause. And each few looks yield the processor: if someone else runs
//! meanwhile, that ends the looking for `REST` times as long and, while that goes on, for ever longer.

use std::time::{Duration, Instant};

/// A yield with nobody waiting returns within half a microsecond; one that lets another thread run
/// takes two context switches and that thread's work. 1 to 5 microseconds were alike. An interrupt makes one as long, some hundred
/// times a second in a virtual machine: so from here on the kernel is asked.
const CONTENDED: Duration = Duration::from_micros(3);

/// How many times as long as someone else had the processor not to look again. It doubles each time, until looking finds
/// something. Ten milliseconds after each, however short, let a thread that runs for microseconds some hundred times a second end all
/// looking.
const REST: u32 = 64;

/// How long a processor that is always wanted is left alone. A trial costs some 10 microseconds.
const MAX_REST: Duration = Duration::from_millis(640);

/// Sleeps between two trials when looking never finds anything: it then costs a thousandth of its limit per sleep.
const MAX_PAUSE: u32 = 1023;

/// How long the share of time without work is taken over. Shorter than what a person notices, and hundreds of bursts.
const WINDOW: Duration = Duration::from_millis(1);

/// The share of its time that a thread may have work for and still look, as a divisor. With a quarter, which single frames of 64 bytes take
/// at a tenth of what can be carried, the median latency there went back and forth between 2 and 5 microseconds.
const MUCH: u32 = 3;

/// Empty looks between two yields. A look at a few empty rings takes some ten nanoseconds, a yield and
/// what goes with it a microsecond: with a yield in every round new work was found late enough to cost a
/// quarter of the throughput at 1500 bytes.
const LOOKS: u32 = 32;

/// What to do after a look that found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// Look again at once.
    Again,
    /// Look again, and at what is looked at more rarely, too.
    Around,
    /// Sleep until woken.
    Sleep,
}

/// One thread's patience.
#[derive(Debug)]
pub struct Spin {
    limit: Duration,
    looks: u32,
    /// When looking without finding began, and how often the thread had had to make room for others by then.
    since: Option<(Instant, i64)>,
    /// Sleeps until looking is tried again, and how many they were when the pause began.
    pause: u32,
    paused: u32,
    /// For others who want the processor: until when, and how many times as long as they have it the next time.
    rest_until: Option<Instant>,
    rest: u32,
    load: Load,
}

/// How much of its time a thread has work.
#[derive(Debug)]
struct Load {
    /// The window: since when, and how long there was nothing to do in it.
    window: Instant,
    idle: Duration,
    /// From when until when there was nothing to do, the last time it was looked.
    dry: Option<(Instant, Instant)>,
    /// There was much work in the last window.
    high: bool,
}

impl Load {
    fn new(now: Instant) -> Load {
        Load { window: now, idle: Duration::ZERO, dry: Some((now, now)), high: false }
    }

    /// There was work, and it has been done.
    #[inline]
    fn found(&mut self) {
        if let Some((since, until)) = self.dry.take() {
            self.idle += until.saturating_duration_since(since);
        }
    }

    /// There is none, perhaps since before; whether there has been much.
    #[inline]
    fn is_dry(&mut self, now: Instant) -> bool {
        if let Some((_, until)) = &mut self.dry {
            *until = now;
        } else {
            let whole = now.saturating_duration_since(self.window);
            if whole >= WINDOW {
                self.high = self.idle + whole / MUCH < whole;
                (self.window, self.idle) = (now, Duration::ZERO);
            }
            self.dry = Some((now, now));
        }
        self.high
    }
}

impl Spin {
    /// Looks for about `limit` before sleeping, as long as that pays; never with zero.
    pub fn new(limit: Duration) -> Spin {
        let load = Load::new(Instant::now());
        Spin { limit, looks: 0, since: None, pause: 0, paused: 0, rest_until: None, rest: REST, load }
    }

    /// Work was found.
    #[inline]
    pub fn found(&mut self) {
        self.looks = 0;
        if self.limit.is_zero() {
            return;
        }
        self.load.found();
        if self.since.is_some() {
            // Found by looking.
            self.since = None;
            (self.pause, self.paused) = (0, 0);
            self.rest = REST;
        }
    }

    /// The thread has slept for `time`.
    pub fn slept(&mut self, time: Duration) {
        self.looks = 0;
        self.since = None;
        if !self.limit.is_zero() {
            self.load.is_dry(Instant::now());
        }
        self.pause = if time < self.limit { self.pause / 2 } else { self.pause.saturating_sub(1) };
    }

    /// No work was found. The processor may have been offered to others meanwhile.
    #[inline]
    pub fn idle(&mut self) -> Idle {
        if self.limit.is_zero() {
            return Idle::Sleep;
        }
        let now = Instant::now();
        if self.load.is_dry(now) || self.pause > 0 || self.is_resting(now) {
            return Idle::Sleep;
        }
        self.looks += 1;
        if self.looks < LOOKS {
            std::hint::spin_loop();
            return Idle::Again;
        }
        self.looks = 0;
        let offer = |displaced| {
            std::thread::yield_now();
            let time = now.elapsed();
            (time > CONTENDED && times_displaced() != displaced).then_some(time)
        };
        if self.is_spent(now, offer) { Idle::Sleep } else { Idle::Around }
    }

    /// Whether the processor is left to others.
    #[inline]
    fn is_resting(&mut self, now: Instant) -> bool {
        self.rest_until = self.rest_until.filter(|until| now < *until);
        self.rest_until.is_some()
    }

    /// Whether there was enough looking for now. `offer` yields the processor and says for how long someone took it, given how often that
    /// had happened before looking began.
    fn is_spent(&mut self, now: Instant, offer: impl FnOnce(i64) -> Option<Duration>) -> bool {
        let (since, displaced) = *self.since.get_or_insert_with(|| (now, times_displaced()));
        if now.duration_since(since) >= self.limit {
            self.paused = (2 * self.paused + 1).min(MAX_PAUSE);
            self.pause = self.paused;
            return true;
        }
        let Some(time) = offer(displaced) else { return false };
        self.since = None;
        self.rest_until = Some(now + (time * self.rest).min(MAX_REST));
        self.rest = (2 * self.rest).min(MAX_REST.as_micros() as u32);
        true
    }
}

/// How often another thread was given the processor while this one wanted to go on.
fn times_displaced() -> i64 {
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

    /// Nobody else wants the processor.
    fn alone(_: i64) -> Option<Duration> {
        None
    }

    #[test]
    fn looking_that_finds_nothing_becomes_rare() {
        let mut spin = Spin::new(LIMIT);
        let (mut now, mut trials) = (Instant::now(), 0);
        for _ in 0..4 * MAX_PAUSE {
            if spin.pause == 0 {
                assert!(!spin.is_spent(now, alone) && !spin.is_spent(now + SHORT, alone));
                now += LONG;
                assert!(spin.is_spent(now, alone));
                trials += 1;
            }
            assert_eq!(spin.idle(), Idle::Sleep);
            spin.slept(LONG);
        }
        // After 1, 3, 7 ... 511 sleeps, and then after 1023 each.
        assert_eq!(trials, 10 + 3);
        // Sleeps that looking would have saved bring the next trial on.
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
        (spin.pause, spin.paused) = (0, 511);
        spin.found();
        assert_eq!(spin.paused, 511);
        assert!(!spin.is_spent(now, alone));
        spin.found();
        assert_eq!((spin.pause, spin.paused), (0, 0));
    }

    #[test]
    fn a_thread_with_much_to_do_sleeps_and_one_with_little_looks() {
        let mut spin = Spin::new(LIMIT);
        assert_eq!(spin.idle(), Idle::Again);
        spin.load.high = true;
        assert_eq!(spin.idle(), Idle::Sleep);
        let start = Instant::now();
        let mut load = Load::new(start);
        // Work for so many of each hundred microseconds, as long as half a window, a window, and two.
        let mut time = start;
        for (busy, half, one, two) in [
            (25, false, false, false),
            (40, false, true, true),
            (90, true, true, true),
            (10, true, false, false),
        ] {
            let mut high = Vec::new();
            for _ in 0..2 * WINDOW.as_micros() / 100 {
                load.found();
                high.push(load.is_dry(time + Duration::from_micros(busy)));
                time += Duration::from_micros(100);
                assert_eq!(load.is_dry(time), high[high.len() - 1]);
            }
            assert_eq!([high[4], high[14], high[19]], [half, one, two], "{busy} per cent, {high:?}");
        }
    }

    #[test]
    fn a_processor_that_others_want_is_left_alone_for_longer_and_longer() {
        let mut spin = Spin::new(LIMIT);
        let mut now = Instant::now();
        for wait in [REST, 2 * REST, 4 * REST].map(|rest| rest * LONG) {
            assert!(spin.is_spent(now, |_| Some(LONG)), "wanted");
            assert!(spin.is_resting(now + wait - SHORT), "it rests");
            now += wait;
            assert!(!spin.is_resting(now), "it has rested");
        }
        assert!(!spin.is_spent(now, alone));
        spin.found();
        assert_eq!(spin.rest, REST);
        assert!(spin.is_spent(now, |_| Some(MAX_REST)));
        assert!(spin.is_resting(now + MAX_REST - SHORT) && !spin.is_resting(now + MAX_REST));
    }
}
