//! One half's end of a split ring: the index it publishes, the peer's index that it follows, and the
//! suppression of signals (kicks and calls).
//!
//! The driver half and the device half are mirror images: the driver writes the available ring and reads
//! the used ring, the device the other way round. Both hold a [`Side`], made when the ring is set up and
//! dropped with it. The thread that owns the half calls, per burst: [`Side::advance`] for each entry it
//! has written and [`Side::publish`] once; [`Side::refresh`] when [`Side::known`] is 0, and
//! [`Side::consume`] for the entries it has read. Own words are shadowed (stored, never loaded) and the
//! peer's index is cached, unless [`Words::SHADOW`] is false.
//!
//! Sleep handshake (Dekker): the consumer writes its event index or flags, full fence, loads the peer's
//! index once more; the producer stores its index, full fence, reads the event index or flags. At least
//! one of them sees the other's store, so no signal is lost.

use ringferry_memory::Words;

use super::{F_NO_SIGNAL, FLAGS, IDX, Ring};
use crate::Fault;

/// One half's view of the two one-way rings; see the module's documentation.
#[derive(Debug)]
pub(super) struct Side<A: Words> {
    /// The ring that this half writes: available ring of a driver, used ring of a device.
    own: Ring<A>,
    /// The ring that the peer writes.
    peer: Ring<A>,
    event_idx: bool,
    /// Index of the next entry to write; ahead of `published` by the unpublished entries.
    next: u16,
    /// Shadow of the index in memory.
    published: u16,
    /// Shadow of the `flags` word that this half writes.
    flags: u16,
    /// Shadow of the `used_event` or `avail_event` word that this half writes.
    event: u16,
    /// Index of the peer's next entry to consume.
    peer_next: u16,
    /// Cached copy of the peer's index, as of the last load.
    peer_seen: u16,
}

impl<A: Words> Side<A> {
    /// Makes a side that continues at the index in `own`, with as many of the peer's entries consumed.
    /// Signals start off. This is the only time that it loads its own words.
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

    /// Returns the index of the next entry to write.
    #[inline(always)]
    pub(super) fn next(&self) -> u16 {
        if A::SHADOW {
            self.next
        } else {
            self.own.area.load16(IDX).wrapping_add(self.next.wrapping_sub(self.published))
        }
    }

    /// Advances the write index by `count` entries, which stay invisible until [`Side::publish`].
    #[inline(always)]
    pub(super) fn advance(&mut self, count: u16) {
        self.next = self.next.wrapping_add(count);
    }

    /// Returns the index as the peer can see it.
    #[inline(always)]
    pub(super) fn published(&self) -> u16 {
        self.published
    }

    /// Publishes all entries and writes the words around both rings anew, those of a peer that is gone, too: nothing is
    /// read. The next peer continues where this half has consumed entries to.
    pub(super) fn restart(&mut self) {
        self.published = self.next;
        self.peer_seen = self.peer_next;
        self.peer.area.store16(FLAGS, 0);
        self.peer.area.store16(self.peer.event, self.next);
        self.peer.area.store16(IDX, self.peer_next);
        self.own.area.store16(FLAGS, self.flags);
        self.own.area.store16(self.own.event, self.event);
        self.own.area.store16_release(IDX, self.next);
    }

    /// Takes back the last entry, published or not: decrements the index in the shadow, then in memory.
    pub(super) fn step_back(&mut self) {
        self.next = self.next.wrapping_sub(1);
        self.published = self.next;
        self.own.area.store16(IDX, self.next);
    }

    /// Returns the index of the peer's next entry to consume.
    #[inline(always)]
    pub(super) fn peer_next(&self) -> u16 {
        self.peer_next
    }

    /// Consumes `count` of the peer's entries. The count is modulo 2^16, so a negative one returns them.
    #[inline(always)]
    pub(super) fn consume(&mut self, count: u16) {
        self.peer_next = self.peer_next.wrapping_add(count);
    }

    /// Returns how many of the peer's entries can be consumed according to the cached index.
    #[inline(always)]
    pub(super) fn known(&self) -> u16 {
        if A::SHADOW { self.peer_seen.wrapping_sub(self.peer_next) } else { 0 }
    }

    /// Loads the peer's index and returns how many entries it is ahead, unchecked. What is cached of it stays as it is.
    pub(super) fn look_ahead(&self) -> u16 {
        self.peer.area.load16_acquire(IDX).wrapping_sub(self.peer_next)
    }

    /// Loads the peer's index and returns how many of its entries can be consumed.
    ///
    /// # Errors
    /// [`Fault::IndexJump`] if there are more than `limit`.
    #[inline(always)]
    pub(super) fn refresh(&mut self, limit: u16) -> Result<u16, Fault> {
        // Acquire: entries, descriptors and buffers are read after the index that makes them visible.
        let seen = self.peer.area.load16_acquire(IDX);
        let ahead = seen.wrapping_sub(self.peer_next);
        if ahead > limit {
            return Err(Fault::IndexJump(ahead));
        }
        self.peer_seen = seen;
        Ok(ahead)
    }

    /// Makes all written entries visible to the peer with one store of the index. Returns true if the
    /// peer wants a signal for them, false also when there was nothing to publish.
    #[inline(always)]
    pub(super) fn publish(&mut self) -> bool {
        if self.published == self.next {
            return false;
        }
        let new = self.next();
        let old = std::mem::replace(&mut self.published, self.next);
        // Release: entries, descriptors and buffers become visible before the index that announces them.
        self.own.area.store16_release(IDX, new);
        // Pairs with the fence in `enable_signals`: either we see the peer's event index or flags, or it
        // sees our index.
        A::full_fence();
        if self.event_idx {
            need_event(self.peer.area.load16(self.peer.event), new, old)
        } else {
            self.peer.area.load16(FLAGS) & F_NO_SIGNAL == 0
        }
    }

    /// Returns the position of the entry of which the peer wants to be told; `None` if it does not say so by position. It may be an old one, of a peer that polls.
    pub(super) fn asked_at(&self) -> Option<u16> {
        self.event_idx.then(|| self.peer.area.load16(self.peer.event))
    }

    /// Turns the peer's signals off, because this half polls.
    #[inline(always)]
    pub(super) fn disable_signals(&mut self) {
        // With EVENT_IDX the flag must stay 0 (2.7.7.1, 2.7.10.2). An event index that is left behind
        // asks for at most one signal per 65536 entries.
        if !self.event_idx && self.flags() != F_NO_SIGNAL {
            self.flags = F_NO_SIGNAL;
            self.own.area.store16(FLAGS, F_NO_SIGNAL);
        }
    }

    /// Asks for a signal when the peer publishes its entry `at` or, without EVENT_IDX, any entry. The
    /// caller must [`Side::refresh`] afterwards, as no signal may come for entries published before.
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
        // Pairs with the fence in `publish`: either the peer sees our event index or flags, or we see its
        // index.
        A::full_fence();
    }

    #[inline(always)]
    fn flags(&self) -> u16 {
        if A::SHADOW { self.flags } else { self.own.area.load16(FLAGS) }
    }
}

/// Returns true if entry `event` is among those published when the index went from `old` to `new`:
/// `vring_need_event` (2.7.7.2, 2.7.10.1). All three are free-running 16-bit counters.
#[inline(always)]
fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn need_event_is_true_exactly_when_event_lies_between() {
        for old in [0u16, 5, 65530, 65535] {
            for step in 0..20u16 {
                let new = old.wrapping_add(step);
                for ahead in 0..40u16 {
                    let event = old.wrapping_add(ahead).wrapping_sub(10);
                    // The event entry itself was among those just published.
                    let expect = (0..step).any(|i| old.wrapping_add(i) == event);
                    assert_eq!(need_event(event, new, old), expect, "{event} {new} {old}");
                }
            }
        }
    }
}
