//! What both halves of a split ring do alike: each publishes an index in an area of its own, reads
//! the peer's, and tells the other when it wants a signal (a kick or a call).

use ringferry_memory::Words;

use super::{F_NO_SIGNAL, FLAGS, IDX, Ring};
use crate::Fault;

/// One side's view of the two one-way rings.
#[derive(Debug)]
pub(super) struct Side<A: Words> {
    /// The ring this side writes.
    own: Ring<A>,
    /// The ring the peer writes.
    peer: Ring<A>,
    event_idx: bool,
    /// Where this side's next entry goes: the shadow of its index, ahead of it by what is unpublished.
    next: u16,
    /// What this side's index says.
    published: u16,
    /// Shadow of this side's flags.
    flags: u16,
    /// Shadow of this side's event word.
    event: u16,
    /// The peer's next entry to consume.
    peer_next: u16,
    /// The peer's index when it was last loaded.
    peer_seen: u16,
}

impl<A: Words> Side<A> {
    /// A side that goes on where the ring it writes stands, and took the peer's entries as far. Signals
    /// start off. It reads its own words this once.
    pub(super) fn new(own: Ring<A>, peer: Ring<A>, event_idx: bool) -> Self {
        let start = own.area.load16(IDX);
        let mut side = Self {
            event_idx,
            next: start,
            published: start,
            flags: 0,
            event: own.area.load16(own.event),
            peer_next: start,
            peer_seen: start,
            own,
            peer,
        };
        side.own.area.store16(FLAGS, 0);
        side.disable_signals();
        side
    }

    /// Where this side's next entry goes.
    #[inline(always)]
    pub(super) fn next(&self) -> u16 {
        if A::SHADOW {
            self.next
        } else {
            self.own.area.load16(IDX).wrapping_add(self.next.wrapping_sub(self.published))
        }
    }

    /// Where the next entry goes after `count` more.
    #[inline(always)]
    pub(super) fn advance(&mut self, count: u16) {
        self.next = self.next.wrapping_add(count);
    }

    /// What this side's index says.
    #[inline(always)]
    pub(super) fn published(&self) -> u16 {
        self.published
    }

    /// Takes back entries that were published or not: the index steps back, in the shadow and then
    /// in memory.
    pub(super) fn step_back(&mut self) {
        self.next = self.next.wrapping_sub(1);
        self.published = self.next;
        self.own.area.store16(IDX, self.next);
    }

    /// The peer's next entry to consume.
    #[inline(always)]
    pub(super) fn peer_next(&self) -> u16 {
        self.peer_next
    }

    /// Consumes `count` of the peer's entries; modulo 2^16, so that a negative count gives them back.
    #[inline(always)]
    pub(super) fn consume(&mut self, count: u16) {
        self.peer_next = self.peer_next.wrapping_add(count);
    }

    /// How many of the peer's entries can be consumed, by its index when it was last loaded.
    #[inline(always)]
    pub(super) fn known(&self) -> u16 {
        if A::SHADOW { self.peer_seen.wrapping_sub(self.peer_next) } else { 0 }
    }

    /// Loads the peer's index and says how many of its entries can be consumed. More than `limit` is
    /// against the rules.
    #[inline(always)]
    pub(super) fn refresh(&mut self, limit: u16) -> Result<u16, Fault> {
        // Acquire: entries, and what they stand for, are read after the index that shows them.
        let seen = self.peer.area.load16_acquire(IDX);
        let ahead = seen.wrapping_sub(self.peer_next);
        if ahead > limit {
            return Err(Fault::IndexJump(ahead));
        }
        self.peer_seen = seen;
        Ok(ahead)
    }

    /// Shows all entries to the peer with one store; says whether it wants a signal.
    #[inline(always)]
    pub(super) fn publish(&mut self) -> bool {
        if self.published == self.next {
            return false;
        }
        let new = self.next();
        let old = std::mem::replace(&mut self.published, self.next);
        // Release: entries, and what they stand for, before the index that shows them.
        self.own.area.store16_release(IDX, new);
        // Pairs with the fence in `enable_signals`: either we see the peer's wish, or it sees our index.
        A::full_fence();
        if self.event_idx {
            passed(self.peer.area.load16(self.peer.event), new, old)
        } else {
            self.peer.area.load16(FLAGS) & F_NO_SIGNAL == 0
        }
    }

    /// Tells the peer not to signal: this side polls.
    #[inline(always)]
    pub(super) fn disable_signals(&mut self) {
        // With EVENT_IDX the flag must stay 0 (2.7.7.1, 2.7.10.2); an event word that is not moved
        // forward asks for at most one signal per 65536 entries.
        if !self.event_idx && self.flags() != F_NO_SIGNAL {
            self.flags = F_NO_SIGNAL;
            self.own.area.store16(FLAGS, F_NO_SIGNAL);
        }
    }

    /// Asks for a signal when the peer has published its entry `at`. The peer's index must be looked
    /// at afterwards: for what is there already no signal may come.
    #[inline(always)]
    pub(super) fn enable_signals(&mut self, at: u16) {
        if self.event_idx {
            if !A::SHADOW || self.event != at {
                self.event = at;
                self.own.area.store16(self.own.event, at);
            }
        } else if self.flags() != 0 {
            self.flags = 0;
            self.own.area.store16(FLAGS, 0);
        }
        // Pairs with the fence in `publish`: either the peer sees our wish, or we see its index.
        A::full_fence();
    }

    #[inline(always)]
    fn flags(&self) -> u16 {
        if A::SHADOW { self.flags } else { self.own.area.load16(FLAGS) }
    }
}

/// Whether a peer that asked to be told when the index passes `event` must be told now that it went
/// from `old` to `new` (2.7.7.2 and 2.7.10.1). All three run freely through 16 bits.
#[inline(always)]
fn passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_is_true_exactly_when_event_lies_between() {
        for old in [0u16, 5, 65530, 65535] {
            for step in 0..20u16 {
                let new = old.wrapping_add(step);
                for ahead in 0..40u16 {
                    let event = old.wrapping_add(ahead).wrapping_sub(10);
                    // The event entry itself was among those just published.
                    let expect = (0..step).any(|i| old.wrapping_add(i) == event);
                    assert_eq!(passed(event, new, old), expect, "{event} {new} {old}");
                }
            }
        }
    }
}
