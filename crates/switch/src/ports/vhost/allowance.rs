//! Rate limit on the disturbance of workers and control plane by a port's front ends: a token bucket (GCRA,
//! as in ITU-T I.371).
//!
//! A message that stops, starts or enables running rings makes the control plane and a worker wait for each
//! other, and a few messages are much work for the control plane by themselves. The port has one
//! [`Allowance`] for all its front ends, one after the other, and reads nothing more while it is used up;
//! their messages wait in the socket meanwhile.

use std::time::{Duration, Instant};

/// Disturbances that may come in a row (the burst). A VMM sends one or two for each ring when its guest
/// starts or stops: 64 with 16 pairs.
const BURST: u32 = 200;

/// Time after which one more disturbance is allowed: 20 a second.
const INTERVAL: Duration = Duration::from_millis(50);

/// Time of the control plane, beyond the first millisecond of a turn, that costs one disturbance: a front end that makes a turn of 26 ms has one
/// such turn in five seconds. It is the processor time, and the time for which the kernel has it wait for a page or for a lock of the memory that is mapped.
/// Elapsed time is not used, as others can make it longer.
const WORK: Duration = Duration::from_micros(250);
/// Time of a usual turn, which costs nothing.
const USUAL: Duration = Duration::from_millis(1);

/// Most that a turn costs: as long as a front end is out of service, a minute. One for whose connection a million epoll entries wait makes each answer, and
/// the end of the connection, take half a second.
const MOST: u32 = 1200;

/// Returns the price, in disturbances, of a turn that took so much time and did or did not disturb
/// a worker.
pub(super) fn price(disturbed: bool, time: Duration) -> u32 {
    let work = time.saturating_sub(USUAL).as_nanos() / WORK.as_nanos();
    u32::from(disturbed) + u32::try_from(work).unwrap_or(MOST).min(MOST)
}

/// The allowance of one port, for all its front ends one after the other.
#[derive(Debug, Default)]
pub(super) struct Allowance {
    /// The time at which all of it is available again; `None`: it has never been used.
    whole_at: Option<Instant>,
}

impl Allowance {
    /// Takes `count` disturbances, if need be in advance.
    pub(super) fn take(&mut self, count: u32, now: Instant) {
        if count == 0 {
            return;
        }
        self.whole_at = Some(self.whole_at.map_or(now, |whole| whole.max(now)) + INTERVAL * count);
    }

    /// Returns the time at which a disturbance is allowed again, if none is now.
    pub(super) fn wait(&self, now: Instant) -> Option<Instant> {
        let next = self.whole_at?.checked_sub(INTERVAL * (BURST - 1))?;
        (next > now).then_some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h5_so_many_in_a_row_and_then_twenty_a_second() {
        // The test starts far enough from the beginning of the clock.
        let start = Instant::now() + Duration::from_secs(1000);
        let mut allowance = Allowance::default();
        for _ in 0..BURST {
            assert_eq!(allowance.wait(start), None);
            allowance.take(1, start);
        }
        let mut now = start;
        for _ in 0..20 {
            let next = allowance.wait(now).unwrap();
            assert_eq!(next - now, INTERVAL);
            now = next;
            assert_eq!(allowance.wait(now), None);
            allowance.take(1, now);
        }
        assert_eq!(now - start, Duration::from_secs(1));
        // Disturbances can be taken in advance, as when a connection ends.
        allowance.take(1, now);
        assert_eq!(allowance.wait(now).unwrap() - now, 2 * INTERVAL);
        // The allowance is whole again, and not more than that.
        let later = now + Duration::from_secs(3600);
        (0..BURST).for_each(|_| allowance.take(1, later));
        assert!(allowance.wait(later).is_some());
    }

    #[test]
    fn h5_much_work_is_paid_for_and_waiting_for_others_is_not() {
        assert_eq!(price(false, Duration::from_micros(900)), 0);
        assert_eq!(price(true, Duration::from_micros(900)), 1);
        assert_eq!(price(false, Duration::from_millis(26)), 100);
        assert_eq!(price(true, Duration::from_secs(1000)), MOST + 1);
    }
}
