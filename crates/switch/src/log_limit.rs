//! Log lines that a peer can cause, at a limited rate.

use std::time::{Duration, Instant};

/// The time after which a [`LogLimit`] allows its lines again.
const INTERVAL: Duration = Duration::from_secs(10);

/// A number of lines per [`INTERVAL`]. What is left out is counted elsewhere, or repeats what was said.
#[derive(Debug)]
pub(crate) struct LogLimit {
    lines: u32,
    left: u32,
    since: Option<Instant>,
}

impl LogLimit {
    pub(crate) fn new(lines: u32) -> LogLimit {
        LogLimit { lines, left: lines, since: None }
    }

    /// Whether one more line may be written.
    pub(crate) fn allows(&mut self) -> bool {
        if self.since.is_none_or(|since| since.elapsed() >= INTERVAL) {
            self.since = Some(Instant::now());
            self.left = self.lines;
        }
        let allowed = self.left > 0;
        self.left = self.left.saturating_sub(1);
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_lines_and_no_more() {
        let mut limit = LogLimit::new(3);
        let allowed = (0..100).filter(|_| limit.allows()).count();
        assert_eq!(allowed, 3);
    }
}
