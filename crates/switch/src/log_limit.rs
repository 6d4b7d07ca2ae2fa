//! Log lines that a peer can cause, at a limited rate.

use std::time::{Duration, Instant};

/// The time after which a [`LogLimit`] allows its lines again.
const INTERVAL: Duration = Duration::from_secs(10);

/// A limit on lines per [`INTERVAL`]. Suppressed lines are counted, and the next line that is allowed is
/// preceded by their number.
#[derive(Debug)]
pub(crate) struct LogLimit {
    lines: u32,
    left: u32,
    left_out: u64,
    since: Option<Instant>,
}

impl LogLimit {
    pub(crate) fn new(lines: u32) -> LogLimit {
        LogLimit { lines, left: lines, left_out: 0, since: None }
    }

    /// Returns whether one more line about `port` may be written. Logs how many were suppressed since the
    /// last one.
    pub(crate) fn allows(&mut self, port: &str) -> bool {
        let (allowed, left_out) = self.take(Instant::now());
        if left_out > 0 {
            tracing::info!(port, "{left_out} log lines about this port were left out");
        }
        allowed
    }

    /// Returns whether one more line may be written, and if so how many were suppressed before it.
    fn take(&mut self, now: Instant) -> (bool, u64) {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= INTERVAL) {
            self.since = Some(now);
            self.left = self.lines;
        }
        if self.left == 0 {
            self.left_out += 1;
            return (false, 0);
        }
        self.left -= 1;
        (true, std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_lines_and_no_more() {
        let mut limit = LogLimit::new(3);
        let allowed = (0..100).filter(|_| limit.allows("a")).count();
        assert_eq!(allowed, 3);
    }

    #[test]
    fn the_lines_that_were_left_out_are_counted_until_the_next_one() {
        let mut limit = LogLimit::new(2);
        let start = Instant::now();
        let first: Vec<(bool, u64)> = (0..5).map(|_| limit.take(start)).collect();
        assert_eq!(first, [(true, 0), (true, 0), (false, 0), (false, 0), (false, 0)]);
        let later = start + INTERVAL;
        assert_eq!(
            [limit.take(later), limit.take(later), limit.take(later)],
            [(true, 3), (true, 0), (false, 0)]
        );
    }
}
