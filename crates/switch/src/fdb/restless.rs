//! Addresses that move between ports again and again: two machines with one address, or a loop.
//!
//! One move is what a machine does that migrates. Who moves once more within a minute is remembered, a few addresses at a time, as a guest can make any
//! address move: the most restless stay, and of ports that move many the fewest. Nothing here decides on a frame.

use std::cmp::Reverse;

/// Most addresses that are remembered.
const MOST: usize = 16;

/// Seconds without a move after which an address has come to rest.
const REST: u32 = 60;

/// Moves, none of them long after the one before, from which on an address is restless. A machine that migrates makes one, and two if it is taken back.
const RESTLESS: u32 = 4;

/// An address that has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mover {
    /// The key of its slot.
    pub(super) key: u64,
    /// The ports that it has moved from and to.
    pub(super) ports: [u16; 2],
    pub(super) moves: u32,
    /// The ticks of its first and of its last move.
    pub(super) first: u32,
    pub(super) last: u32,
    is_told: bool,
}

/// The addresses that have moved lately.
#[derive(Debug, Default)]
pub(super) struct Movers(Vec<Mover>);

impl Movers {
    /// Takes note of a move.
    pub(super) fn note(&mut self, key: u64, ports: [u16; 2], now: u32) {
        let new = Mover { key, ports, moves: 1, first: now, last: now, is_told: false };
        match self.0.iter().position(|mover| mover.key == key) {
            Some(at) if now.saturating_sub(self.0[at].last) <= REST => {
                let mover = self.0[at];
                self.0[at] = Mover { ports, moves: mover.moves.saturating_add(1), last: now, ..mover };
            }
            Some(at) => self.0[at] = new,
            None if self.0.len() < MOST => self.0.push(new),
            None => {
                let rests = |mover: &Mover| now.saturating_sub(mover.last) > REST;
                // Two ports that move many addresses hide their own, and not those of others.
                let of_port = |port: u16| self.0.iter().filter(|mover| mover.ports.contains(&port)).count();
                // A port whose addresses are taken has few that move, however many the other one has.
                let of_ports = |mover: &Mover| mover.ports.into_iter().map(of_port).min();
                let rank = |mover: &Mover| (!rests(mover), Reverse(of_ports(mover)), mover.moves, mover.last);
                let quietest = (0..MOST).min_by_key(|at| rank(&self.0[*at]));
                quietest.into_iter().for_each(|at| self.0[at] = new);
            }
        }
    }

    /// The addresses that are restless now.
    pub(super) fn restless(&self, now: u32) -> impl Iterator<Item = &Mover> {
        let is_restless =
            move |mover: &&Mover| mover.moves >= RESTLESS && now.saturating_sub(mover.last) <= REST;
        self.0.iter().filter(is_restless)
    }

    /// Those of which that was not said yet. It is said of them now.
    pub(super) fn untold(&mut self, now: u32) -> Vec<Mover> {
        let untold: Vec<_> = self.restless(now).filter(|mover| !mover.is_told).copied().collect();
        for mover in &mut self.0 {
            mover.is_told |= untold.iter().any(|told| told.key == mover.key);
        }
        untold
    }

    pub(super) fn forget_port(&mut self, port: u16) {
        self.0.retain(|mover| !mover.ports.contains(&port));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_moves_to_and_fro_is_restless_until_it_rests() {
        let mut movers = Movers::default();
        for second in 0..3 {
            movers.note(7, [1, 2], second);
        }
        assert_eq!(movers.restless(3).count(), 0);
        movers.note(7, [2, 1], 5);
        let found: Vec<_> = movers.restless(6).map(|mover| (mover.key, mover.ports, mover.moves)).collect();
        assert_eq!(found, [(7, [2, 1], 4)]);
        assert_eq!((movers.untold(6).len(), movers.untold(6).len()), (1, 0), "it is told once");
        assert_eq!(movers.restless(5 + REST + 1).count(), 0);
        // Then it begins anew.
        movers.note(7, [1, 2], 5 + REST + 1);
        assert_eq!(movers.restless(5 + REST + 1).count(), 0);
        movers.forget_port(2);
        assert!(movers.0.is_empty());
    }

    #[test]
    fn who_moves_many_addresses_does_not_hide_the_restless() {
        let mut movers = Movers::default();
        (0..10).for_each(|second| movers.note(1, [1, 2], second));
        (100..10_000).for_each(|key| movers.note(key, [3, 4], 10));
        assert_eq!(movers.0.len(), MOST);
        assert_eq!(movers.restless(10).map(|mover| mover.key).collect::<Vec<_>>(), [1]);
        // Nor does who moves many to and fro.
        let mut movers = Movers::default();
        for second in 0..10 {
            movers.note(1, [1, 2], second);
            (100..140).for_each(|key| (0..10).for_each(|_| movers.note(key, [3, 4], second)));
        }
        assert!(movers.restless(10).any(|mover| mover.key == 1));
        assert!(movers.restless(10).any(|mover| mover.ports == [3, 4]));
        // Nor does who steals it, and moves others to and fro with a port of his own.
        let mut movers = Movers::default();
        for second in 0..10 {
            movers.note(1, [1, 3], second);
            (100..140).for_each(|key| (0..10).for_each(|_| movers.note(key, [3, 4], second)));
        }
        assert!(movers.restless(10).any(|mover| mover.key == 1));
        let mut movers = Movers::default();
        (0..10).for_each(|second| movers.note(1, [1, 2], second));
        (100..10_000).for_each(|key| movers.note(key, [3, 4], 10));
        // What has come to rest makes room first.
        movers.note(20_000, [3, 4], 10 + REST);
        assert!(movers.0.iter().all(|mover| mover.key != 1));
    }
}
