//! Log lines that a peer can cause, at a limited rate.

use std::fmt::Display;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::Location;
use std::time::{Duration, Instant};

/// The time after which a [`LogLimit`] allows its lines again.
const INTERVAL: Duration = Duration::from_secs(10);

/// Lines per [`INTERVAL`] about one port's front ends: four restarts of a machine. What a front end makes the switch say at once stays so below ten lines a second
/// in any two seconds; of 20 lines, an attack by connections had twelve.
pub(crate) const FRONT_END_LINES: u32 = 12;

/// Kinds of lines per interval of which the first is written although the limit is reached. A peer can make kinds, if not of every line one.
const KINDS: usize = 8;

/// A limit on lines per [`INTERVAL`]. Suppressed lines are counted, and the next line that is allowed is
/// preceded by their number. Lines of one kind do not keep the first of another from being written, up to [`KINDS`] in an interval.
#[derive(Debug)]
pub(crate) struct LogLimit {
    lines: u32,
    left: u32,
    left_out: u64,
    since: Option<Instant>,
    /// The kinds of which there was a line in this interval, up to so many as are told apart.
    kinds: Vec<u64>,
}

impl LogLimit {
    pub(crate) fn new(lines: u32) -> LogLimit {
        LogLimit { lines, left: lines, left_out: 0, since: None, kinds: Vec::new() }
    }

    /// Returns whether one more line about `port` may be written, whose kind is the place in the program that writes it. Logs how many were suppressed
    /// since the last one.
    #[track_caller]
    pub(crate) fn allows(&mut self, port: &str) -> bool {
        self.allows_kind(port, Location::caller())
    }

    /// Does the same for a line that gives a reason: lines with other reasons are of other kinds, but not those with other numbers, which a peer chooses.
    pub(crate) fn allows_reason(&mut self, port: &str, reason: impl Display) -> bool {
        self.allows_kind(port, reason.to_string().replace(|c: char| c.is_ascii_hexdigit(), ""))
    }

    /// Logs how many lines were suppressed, if that is over: nothing may follow that would say so. Called about once a second.
    pub(crate) fn settle(&mut self, port: &str) {
        let left_out = self.is_over(Instant::now());
        if left_out > 0 {
            tracing::info!(port, "{left_out} log lines about this port were left out");
        }
    }

    /// Returns how many lines were suppressed in an interval that is over, and were not told of.
    fn is_over(&mut self, now: Instant) -> u64 {
        match self.since {
            Some(since) if self.left_out > 0 && now.saturating_duration_since(since) >= INTERVAL => {
                std::mem::take(&mut self.left_out)
            }
            _ => 0,
        }
    }

    fn allows_kind(&mut self, port: &str, kind: impl Hash) -> bool {
        let (allowed, left_out) = self.take(Instant::now(), kind);
        if left_out > 0 {
            tracing::info!(port, "{left_out} log lines about this port were left out");
        }
        allowed
    }

    /// Returns whether one more line may be written, and if so how many were suppressed before it.
    fn take(&mut self, now: Instant, kind: impl Hash) -> (bool, u64) {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= INTERVAL) {
            self.since = Some(now);
            self.left = self.lines;
            self.kinds.clear();
        }
        let mut hasher = DefaultHasher::new();
        kind.hash(&mut hasher);
        let kind = hasher.finish();
        let is_new = !self.kinds.contains(&kind) && self.kinds.len() < KINDS;
        if is_new {
            self.kinds.push(kind);
        } else if self.left == 0 {
            self.left_out += 1;
            return (false, 0);
        }
        self.left = self.left.saturating_sub(1);
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
    fn other_numbers_are_no_other_reason() {
        let mut limit = LogLimit::new(1);
        assert!(limit.allows_reason("a", "5 file descriptors"));
        assert!((0..100).all(|number| !limit.allows_reason("a", format!("{number} file descriptors"))));
        assert!(limit.allows_reason("a", "a payload of 0xfe bytes"));
        assert!(!limit.allows_reason("a", "a payload of 0x12 bytes"));
    }

    #[test]
    fn the_lines_that_were_left_out_are_counted_until_the_next_one() {
        let mut limit = LogLimit::new(2);
        let start = Instant::now();
        let first: Vec<(bool, u64)> = (0..5).map(|_| limit.take(start, 0)).collect();
        assert_eq!(first, [(true, 0), (true, 0), (false, 0), (false, 0), (false, 0)]);
        assert_eq!(limit.is_over(start), 0, "more of them may follow");
        let later = start + INTERVAL;
        let mut silent = LogLimit { kinds: Vec::new(), ..limit };
        assert_eq!([silent.is_over(later), silent.is_over(later)], [3, 0], "nothing follows");
        let mut limit = LogLimit { left_out: 3, ..silent };
        assert_eq!(
            [limit.take(later, 0), limit.take(later, 0), limit.take(later, 0)],
            [(true, 3), (true, 0), (false, 0)]
        );
    }

    #[test]
    fn lines_of_one_kind_do_not_hide_the_first_of_another_and_kinds_are_limited() {
        let mut limit = LogLimit::new(2);
        let start = Instant::now();
        let mut written = 0;
        for _ in 0..100 {
            written += u32::from(limit.take(start, "noise").0);
        }
        assert_eq!(written, 2);
        assert_eq!(limit.take(start, "news"), (true, 98));
        assert_eq!(limit.take(start, "news"), (false, 0));
        // Whoever makes up kinds gains a few lines.
        let made_up = (0..1000).filter(|kind| limit.take(start, kind).0).count();
        assert_eq!(made_up, KINDS - 2);
        let mut limit = LogLimit::new(1);
        let places = (0..3).map(|_| [limit.allows("a"), limit.allows("a")]).collect::<Vec<_>>();
        assert_eq!(places, [[true; 2], [false; 2], [false; 2]]);
        assert!(limit.allows_reason("a", "one") && !limit.allows_reason("a", "one"));
        assert!(limit.allows_reason("a", "another"));
    }
}
