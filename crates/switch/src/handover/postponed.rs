//! Ports that are left out of what is kept for a while, as their descriptors take long to be told apart: each time for twice as long as before, so that a
//! front end that makes them slow is asked of ever more seldom, and one that was slow once by chance is kept again soon.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a port is left out the first time, and at most.
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(60);

/// A port that is left out for so long again is not slow because the machine is busy: the third time.
const NO_CHANCE: Duration = Duration::from_millis(400);

/// The ports that are left out, or were lately.
#[derive(Debug, Default)]
pub(super) struct Postponed {
    ports: BTreeMap<String, Port>,
}

#[derive(Debug)]
struct Port {
    /// It is left out until then.
    until: Instant,
    /// For so long the next time.
    next: Duration,
}

impl Postponed {
    /// Leaves a port out from now on. Returns true if it is no chance any more.
    pub(super) fn postpone(&mut self, port: &str, now: Instant) -> bool {
        let rest = self.ports.get(port).map_or(FIRST, |port| port.next);
        self.ports.insert(port.to_owned(), Port { until: now + rest, next: (2 * rest).min(LONGEST) });
        rest == NO_CHANCE
    }

    /// Returns the ports that are left out, as `is_missing` says, and not by chance.
    pub(super) fn for_long(&self, is_missing: impl Fn(&str) -> bool) -> impl Iterator<Item = &str> {
        let long = self.ports.iter().filter(move |(name, port)| port.next > NO_CHANCE && is_missing(name));
        long.map(|(name, _)| name.as_str())
    }

    /// Returns true as long as a port is left out.
    pub(super) fn is_out(&self, port: &str, now: Instant) -> bool {
        self.ports.get(port).is_some_and(|port| now < port.until)
    }

    /// Returns the time at which the first of those ports is to be tried again of which nothing is kept, as `is_missing` says.
    pub(super) fn next_try(&self, is_missing: impl Fn(&str) -> bool) -> Option<Instant> {
        self.ports.iter().filter(|(name, _)| is_missing(name)).map(|(_, port)| port.until).min()
    }

    /// A port of this name begins afresh.
    pub(super) fn forget(&mut self, port: &str) {
        self.ports.remove(port);
    }

    /// Begins afresh with ports that are there no more, and with those that have been kept for as long as any may be left out.
    pub(super) fn tidy(&mut self, is_there: impl Fn(&str) -> bool, now: Instant) {
        self.ports.retain(|name, port| is_there(name) && now.saturating_duration_since(port.until) < LONGEST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_left_out_for_twice_as_long_each_time_and_for_a_minute_at_most() {
        let (mut postponed, mut now) = (Postponed::default(), Instant::now());
        let mut rests = Vec::new();
        for round in 0..12 {
            assert!(!postponed.is_out("a", now));
            assert_eq!(postponed.postpone("a", now), round == 2, "it is told once");
            assert_eq!(postponed.for_long(|_| true).count(), usize::from(round >= 2));
            let until = postponed.next_try(|_| true).expect("it is left out");
            assert!(postponed.is_out("a", until - Duration::from_millis(1)));
            assert!(!postponed.is_out("a", until));
            rests.push((until - now).as_millis());
            now = until;
        }
        assert_eq!(rests[..4], [100, 200, 400, 800]);
        assert_eq!(rests[10..], [60_000, 60_000]);
    }

    #[test]
    fn the_next_try_is_of_the_first_port_of_which_nothing_is_kept() {
        let (mut postponed, now) = (Postponed::default(), Instant::now());
        postponed.postpone("a", now);
        postponed.postpone("b", now + Duration::from_millis(50));
        assert_eq!(postponed.next_try(|_| true), Some(now + FIRST));
        assert_eq!(postponed.next_try(|name| name == "b"), Some(now + FIRST + Duration::from_millis(50)));
        assert_eq!(postponed.next_try(|_| false), None, "a port that is kept again has no try to come");
    }

    #[test]
    fn a_port_that_was_kept_for_a_minute_or_was_closed_begins_afresh() {
        let (mut postponed, now) = (Postponed::default(), Instant::now());
        for name in ["kept", "closed", "slow"] {
            postponed.postpone(name, now);
        }
        postponed.forget("closed");
        assert!(!postponed.is_out("closed", now), "a port of the same name is another one");
        let later = now + FIRST + LONGEST;
        postponed.tidy(|_| true, later - Duration::from_millis(1));
        let names = |postponed: &Postponed| postponed.ports.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&postponed), ["kept", "slow"]);
        postponed.postpone("slow", later);
        postponed.tidy(|_| true, later);
        assert_eq!(names(&postponed), ["slow"]);
        postponed.tidy(|name| name != "slow", later);
        assert_eq!(names(&postponed), [""; 0]);
    }
}
