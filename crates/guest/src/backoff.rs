//! How long `ringferry guest` and `ringferry netfront` wait before they connect again.
//!
//! A back end that ends for an update is back at once, and so should we be. One that breaks each session costs new rings
//! each time, whose memory stays ours to pay for as long as it keeps the old files. So the time doubles with each session that
//! came to nothing, one after the other: in which no buffer was given back, or whose rings broke.

use std::time::Duration;

/// How often the first time is doubled at most: from a quarter of a second to half a minute.
const DOUBLINGS: u32 = 7;

/// The wait before the next connection; see the head of this file.
#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    /// Sessions that came to nothing, one after the other.
    failures: u32,
}

impl Backoff {
    /// Begins with this time.
    pub(crate) fn new(first: Duration) -> Self {
        Self { first, failures: 0 }
    }

    /// A session has ended, or did not begin. `well` if it was of use, and its rings were whole at the end.
    pub(crate) fn ended(&mut self, well: bool) {
        self.failures = if well { 0 } else { self.failures.saturating_add(1) };
    }

    /// The time to wait now.
    pub(crate) fn time(&self) -> Duration {
        self.first * (1 << self.failures.saturating_sub(1).min(DOUBLINGS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_that_come_to_nothing_are_tried_less_and_less_often() {
        let first = Duration::from_millis(250);
        let mut backoff = Backoff::new(first);
        assert_eq!(backoff.time(), first);
        let times: Vec<_> = (0..20)
            .map(|_| {
                backoff.ended(false);
                backoff.time()
            })
            .collect();
        assert_eq!(times[..3], [first, 2 * first, 4 * first]);
        assert_eq!(times[19], Duration::from_secs(32));
        backoff.ended(true);
        assert_eq!(backoff.time(), first);
    }
}
