//! Allocation of the numbers of ports, which come and go.
//!
//! The port table takes a [`PortId`] for every port of every kind and frees it when the port is removed. An
//! id is an index of the workers' tables, so ids are small; a freed one rests before it is another
//! port's.

use std::collections::VecDeque;
use std::time::Instant;

use crate::fdb::PortId;
use crate::plane::REST;

/// Allocates ids from 0 on.
#[derive(Debug, Default)]
pub(crate) struct PortIds {
    next: u16,
    /// Freed ids with the times at which they were freed, oldest first.
    freed: VecDeque<(Instant, PortId)>,
}

impl PortIds {
    /// An id that no port has: one that has rested, else a new one, else (better soon than never) the one that was freed first;
    /// `None` when all have one.
    pub(crate) fn allocate(&mut self, now: Instant) -> Option<PortId> {
        let due = self.freed.front().is_some_and(|(since, _)| now.duration_since(*since) >= REST);
        if !due && self.next < u16::MAX {
            self.next += 1;
            return Some(PortId(self.next - 1));
        }
        Some(self.freed.pop_front()?.1)
    }

    /// Frees an id, which rests from `now` on.
    pub(crate) fn free(&mut self, id: PortId, now: Instant) {
        self.freed.push_back((now, id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_rests_before_it_is_another_ports() {
        let mut ids = PortIds { next: 3, ..PortIds::default() };
        let start = Instant::now();
        let first = ids.allocate(start).unwrap();
        assert_eq!(first, PortId(3));
        ids.free(first, start);
        assert_eq!(ids.allocate(start), Some(PortId(4)));
        assert_eq!(ids.allocate(start + REST), Some(PortId(3)));
        assert_eq!(ids.allocate(start + REST), Some(PortId(5)));
    }

    #[test]
    fn ids_end() {
        let mut ids = PortIds { next: u16::MAX, ..PortIds::default() };
        let now = Instant::now();
        assert_eq!(ids.allocate(now), None);
        ids.free(PortId(7), now);
        assert_eq!(ids.allocate(now), Some(PortId(7)), "better soon than never");
    }
}
