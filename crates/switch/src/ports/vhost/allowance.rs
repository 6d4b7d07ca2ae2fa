//! How often a port's front ends may disturb the workers: a token bucket (GCRA, as in ITU-T I.371).
//!
//! A message that stops, starts or enables running rings makes the control plane and a worker wait for each other. The port has one
//! [`Allowance`] for all its front ends, one after the other, and reads nothing more while it is used up; what they send meanwhile waits in
//! the socket.

use std::time::{Duration, Instant};

/// Disturbances that may come in a row. A VMM sends one or two for each ring when its guest starts or stops: 64 with 16 pairs.
const BURST: u32 = 200;

/// One more is allowed after each of these: 20 a second.
const INTERVAL: Duration = Duration::from_millis(50);

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Allowance {
    /// When it is whole again; `None`: it has never been used.
    whole_at: Option<Instant>,
}

impl Allowance {
    /// Takes one, if need be in advance.
    pub(super) fn take(&mut self, now: Instant) {
        self.whole_at = Some(self.whole_at.map_or(now, |whole| whole.max(now)) + INTERVAL);
    }

    /// When there is one again, if there is none now.
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
        // Far enough from the beginning of the clock.
        let start = Instant::now() + Duration::from_secs(1000);
        let mut allowance = Allowance::default();
        for _ in 0..BURST {
            assert_eq!(allowance.wait(start), None);
            allowance.take(start);
        }
        let mut now = start;
        for _ in 0..20 {
            let next = allowance.wait(now).unwrap();
            assert_eq!(next - now, INTERVAL);
            now = next;
            assert_eq!(allowance.wait(now), None);
            allowance.take(now);
        }
        assert_eq!(now - start, Duration::from_secs(1));
        // Taken in advance, as when a connection ends.
        allowance.take(now);
        assert_eq!(allowance.wait(now).unwrap() - now, 2 * INTERVAL);
        // Whole again, and not more than that.
        let later = now + Duration::from_secs(3600);
        (0..BURST).for_each(|_| allowance.take(later));
        assert!(allowance.wait(later).is_some());
    }
}
