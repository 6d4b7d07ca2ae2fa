//! When the innocent guests' own thread had no processor.
//!
//! Guests and attacker share a processor, so a request also waits for its own guest to run again; so it does when the host takes
//! the processor away. That is not the switch's doing, and no switch could mend it; it is taken off where a figure is of the switch alone.

use std::time::Duration;

use ringferry_sys::usage::RunDelay;

use crate::experiment::RowError;

/// Shorter times between two looks are not asked about: a look at the kernel's account takes a microsecond.
const SHORTEST: u64 = 50_000;

/// A time between two looks in which the thread cannot have worked all the time, nor waited for anybody: it was away for as much as exceeds it, whatever the
/// kernel's account says, which knows nothing of a host that takes a virtual processor away. A turn in which a whole ring is emptied takes a third.
const LONGEST_TURN: u64 = 1_000_000;

/// The absences of the calling thread in a window. All times are in nanoseconds since the same beginning.
#[derive(Debug)]
pub(super) struct Absences {
    delay: RunDelay,
    /// The kernel's account at the last look.
    so_far: Duration,
    /// When the last look was.
    last: u64,
    /// Begin and end of each, in order.
    spans: Vec<(u64, u64)>,
}

impl Absences {
    /// Those of the calling thread, from now on.
    pub(super) fn new(now: u64) -> Result<Self, RowError> {
        let delay = RunDelay::of_this_thread()?;
        let so_far = delay.so_far().unwrap_or_default();
        Ok(Self { delay, so_far, last: now, spans: Vec::new() })
    }

    /// Looks whether the thread was away since the last look.
    pub(super) fn look(&mut self, now: u64) {
        if now - self.last >= SHORTEST {
            let so_far = self.delay.so_far().unwrap_or(self.so_far);
            let away = so_far.saturating_sub(self.so_far).as_nanos() as u64;
            self.so_far = so_far;
            self.add(now, away.max((now - self.last).saturating_sub(LONGEST_TURN)));
        }
        self.last = now;
    }

    /// Adds an absence that was over now. A thread that is woken late was away just before it looks.
    fn add(&mut self, now: u64, away: u64) {
        // It is not away for longer than since the last look, whatever was left out of earlier, short ones.
        let away = away.min(now - self.last);
        if away > 0 {
            self.spans.push((now - away, now));
        }
    }

    /// For how long the thread was away between `from` and `to`.
    pub(super) fn between(&self, from: u64, to: u64) -> u64 {
        let spans = self.spans.iter().rev().take_while(|(_, end)| *end > from);
        spans.map(|(begin, end)| (*end).min(to).saturating_sub((*begin).max(from))).sum()
    }

    /// All absences together.
    pub(super) fn sum(&self) -> Duration {
        Duration::from_nanos(self.spans.iter().map(|(begin, end)| end - begin).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_within_is_taken_off() {
        let mut absences = Absences::new(0).unwrap();
        for (now, away) in [(1_000, 400), (2_000, 0), (3_000, 5_000)] {
            absences.add(now, away);
            absences.last = now;
        }
        // From 600 to 1000, and from 2000 to 3000: no absence is longer than the time between two looks.
        assert_eq!(absences.sum(), Duration::from_nanos(1_400));
        for (from, to, away) in [
            (0, 600, 0),
            (0, 4_000, 1_400),
            (700, 900, 200),
            (900, 2_500, 600),
            (1_000, 2_000, 0),
            (2_900, 2_950, 50),
        ] {
            assert_eq!(absences.between(from, to), away, "{from} to {to}");
        }
    }

    #[test]
    fn a_thread_that_had_to_share_its_processor_was_away() {
        let cpu = ringferry_sys::cpu::allowed().unwrap()[0];
        let spin = || {
            ringferry_sys::cpu::pin_current_thread(cpu).unwrap();
            let begin = std::time::Instant::now();
            let now = || begin.elapsed().as_nanos() as u64;
            let mut absences = Absences::new(now()).unwrap();
            while now() < 200_000_000 {
                absences.look(now());
            }
            let (all, whole) = (absences.sum(), absences.between(0, now()));
            assert_eq!(all.as_nanos() as u64, whole);
            all
        };
        let away = std::thread::scope(|scope| {
            [scope.spawn(spin), scope.spawn(spin)].map(|thread| thread.join().unwrap())
        });
        assert!(away.iter().sum::<Duration>() >= Duration::from_millis(50), "{away:?}");
    }
}
