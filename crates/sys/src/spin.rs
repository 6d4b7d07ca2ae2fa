//! How long a thread that finds no work goes on looking before it sleeps.
//!
//! Looking again costs nothing when the processor has nothing else to do, and saves the peer a
//! doorbell and us a wake-up. When someone else wants the processor it costs dearly: often that is the
//! very peer whose work we are looking for. So each look yields the processor, and a yield that takes
//! long, because someone else ran meanwhile, ends the looking for a while.

use std::time::{Duration, Instant};

/// A yield with nobody waiting returns within half a microsecond; one that lets another thread run
/// takes two context switches and that thread's work. 1 to 5 microseconds were alike.
const CONTENDED: Duration = Duration::from_micros(3);

/// How long not to look again after the processor was wanted by someone else. Long against a burst,
/// short against a change of load; 2 to 50 milliseconds were alike.
const REST: Duration = Duration::from_millis(10);

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
    since: Option<Instant>,
    rest_until: Option<Instant>,
}

impl Spin {
    /// Looks for about `limit` before sleeping; never with zero.
    pub fn new(limit: Duration) -> Spin {
        Spin { limit, looks: 0, since: None, rest_until: None }
    }

    /// Work was found, or the thread has slept: patience begins anew.
    #[inline]
    pub fn reset(&mut self) {
        self.looks = 0;
        self.since = None;
    }

    /// No work was found. The processor may have been offered to others meanwhile.
    #[inline]
    pub fn idle(&mut self) -> Idle {
        if self.limit.is_zero() {
            return Idle::Sleep;
        }
        self.looks += 1;
        if self.looks < LOOKS {
            std::hint::spin_loop();
            return Idle::Again;
        }
        self.looks = 0;
        if self.is_spent() { Idle::Sleep } else { Idle::Around }
    }

    fn is_spent(&mut self) -> bool {
        let now = Instant::now();
        if self.rest_until.is_some_and(|until| now < until) {
            return true;
        }
        self.rest_until = None;
        if now.duration_since(*self.since.get_or_insert(now)) >= self.limit {
            return true;
        }
        std::thread::yield_now();
        let wanted = now.elapsed() > CONTENDED;
        if wanted {
            self.rest_until = Some(now + REST);
        }
        wanted
    }
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
        spin.reset();
        assert_eq!(spin.idle(), Idle::Again);
    }
}
