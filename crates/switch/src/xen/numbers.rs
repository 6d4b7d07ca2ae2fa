//! Numbers of ports that come and go.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::fdb::PortId;

/// How long a number stays unused. No frame for its last port is under way between two workers then, nor an address that
/// was learnt behind it.
const QUARANTINE: Duration = Duration::from_secs(10);

/// Numbers above those of the ports that are always there.
#[derive(Debug)]
pub(crate) struct Numbers {
    next: u16,
    /// Numbers that were given back, oldest first.
    freed: VecDeque<(Instant, PortId)>,
}

impl Numbers {
    /// All numbers from `first` on.
    pub(crate) fn from(first: u16) -> Self {
        Self { next: first, freed: VecDeque::new() }
    }

    /// A number that no port has; `None` when all have one.
    pub(crate) fn take(&mut self, now: Instant) -> Option<PortId> {
        let rested = self.freed.front().is_some_and(|(since, _)| now.duration_since(*since) >= QUARANTINE);
        if !rested && self.next < u16::MAX {
            self.next += 1;
            return Some(PortId(self.next - 1));
        }
        Some(self.freed.pop_front()?.1)
    }

    /// Gives a number back.
    pub(crate) fn free(&mut self, number: PortId, now: Instant) {
        self.freed.push_back((now, number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_rests_before_it_is_another_ports() {
        let mut numbers = Numbers::from(3);
        let start = Instant::now();
        let first = numbers.take(start).unwrap();
        assert_eq!(first, PortId(3));
        numbers.free(first, start);
        assert_eq!(numbers.take(start), Some(PortId(4)));
        assert_eq!(numbers.take(start + QUARANTINE), Some(PortId(3)));
        assert_eq!(numbers.take(start + QUARANTINE), Some(PortId(5)));
    }

    #[test]
    fn numbers_end() {
        let mut numbers = Numbers::from(u16::MAX);
        let now = Instant::now();
        assert_eq!(numbers.take(now), None);
        numbers.free(PortId(7), now);
        assert_eq!(numbers.take(now), Some(PortId(7)), "better soon than never");
    }
}
