//! What both halves of a packed ring do alike: each writes descriptors from slot to slot, shows a
//! burst of them by the flags of the first, follows the peer's, and tells the other when it wants a
//! signal (a kick or a call).

use ringferry_memory::{Slots, Words};

use super::{Cursor, Desc};
use crate::parts::{LayoutError, Parts};

/// RING_EVENT_FLAGS_ENABLE.
const ENABLE: u16 = 0;
/// RING_EVENT_FLAGS_DISABLE.
const DISABLE: u16 = 1;
/// RING_EVENT_FLAGS_DESC.
const DESC: u16 = 2;

/// Which half of the ring this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Driver,
    Device,
}

/// One side's view of the ring.
#[derive(Debug)]
pub(super) struct Side<A: Words> {
    pub(super) size: u16,
    slots: A::Slots,
    /// This side's event suppression, which the peer looks at.
    own: A,
    /// The peer's.
    peer: A,
    event_idx: bool,
    /// Shadow of `own`, one word.
    wish: u32,
    /// Where this side's next descriptor goes, ahead of `published` by what is unpublished.
    pub(super) next: Cursor,
    /// Where the peer stands, or will when it has seen everything published.
    pub(super) published: Cursor,
    /// The second word of the descriptor at `published`: written last, as it shows all behind it.
    first: Option<u64>,
    /// The next descriptor of the peer.
    pub(super) peer_next: Cursor,
}

impl<A: Words> Side<A> {
    /// A side that stands, as does the peer, at `start`. Signals start off.
    pub(super) fn new(
        role: Role,
        parts: Parts<A>,
        event_idx: bool,
        start: Cursor,
    ) -> Result<Self, LayoutError> {
        parts.check(true)?;
        let Parts { size, desc, driver, device } = parts;
        if start.index >= size {
            return Err(LayoutError::Base(start.index));
        }
        let slots = desc.slots(size).ok_or(LayoutError::Unaligned("descriptor ring"))?;
        let (own, peer) = if role == Role::Driver { (driver, device) } else { (device, driver) };
        let wish = u32::from(DISABLE) << 16;
        own.store32(0, wish);
        Ok(Self {
            size,
            slots,
            own,
            peer,
            event_idx,
            wish,
            next: start,
            published: start,
            first: None,
            peer_next: start,
        })
    }

    /// Writes a descriptor's address.
    #[inline(always)]
    pub(super) fn set_addr(&self, at: Cursor, addr: u64) {
        self.slots.set_first(at.index, addr);
    }

    /// Writes what makes a descriptor the peer's. The first of a burst waits for
    /// [`Side::publish`]: until then the peer does not look past it.
    #[inline(always)]
    pub(super) fn hand_over(&mut self, at: Cursor, desc: Desc) {
        if at == self.published {
            self.first = Some(desc.into_word());
        } else {
            self.slots.set_second(at.index, desc.into_word());
        }
    }

    /// As `hand_over`, and nothing stored before is seen after it, not even by a successor of
    /// this process that was killed in between.
    pub(super) fn hand_over_in_order(&mut self, at: Cursor, desc: Desc) {
        if at == self.published {
            self.first = Some(desc.into_word());
        } else {
            self.slots.set_second_release(at.index, desc.into_word());
        }
    }

    /// The peer's descriptor at `at`, if it is one with the flags `owner`.
    #[inline(always)]
    pub(super) fn look(&self, at: Cursor, owner: u16) -> Option<Desc> {
        // Acquire: the rest of the chain, and what it stands for, is read after the flags that show it.
        let desc = Desc::from_word(self.slots.second_acquire(at.index));
        (desc.owner() == owner).then_some(desc)
    }

    /// The address of the descriptor at `at`, which was looked at.
    #[inline(always)]
    pub(super) fn addr(&self, at: Cursor) -> u64 {
        self.slots.first(at.index)
    }

    /// The descriptor at `at`, which belongs to a chain whose first was looked at.
    #[inline(always)]
    pub(super) fn member(&self, at: Cursor) -> Desc {
        Desc::from_word(self.slots.second(at.index))
    }

    /// Shows all descriptors to the peer with one store; says whether it wants a signal.
    #[inline(always)]
    pub(super) fn publish(&mut self) -> bool {
        let Some(first) = self.first.take() else { return false };
        // Release: the burst, and what it stands for, before the flags that show it.
        self.slots.set_second_release(self.published.index, first);
        // Pairs with the fence in `enable_signals`: either we see the peer's wish, or it sees our flags.
        A::full_fence();
        let old = std::mem::replace(&mut self.published, self.next);
        // One load for both halves: a position must not be taken for another kind of wish's (2.8.14).
        let wish = self.peer.load32(0);
        match (wish >> 16) as u16 & 3 {
            DISABLE => false,
            DESC if self.event_idx => passed(Cursor::from_bits(wish as u16), self.next, old, self.size),
            // ENABLE, and what means nothing: a signal too many does no harm.
            _ => true,
        }
    }

    /// Tells the peer not to signal: this side polls.
    #[inline(always)]
    pub(super) fn disable_signals(&mut self) {
        let wish = self.wish() & 0xffff | u32::from(DISABLE) << 16;
        self.set_wish(wish);
    }

    /// Asks for a signal when the peer has handed over the slot `at`, or without EVENT_IDX any. The
    /// ring must be looked at afterwards: for what is there already no signal may come.
    #[inline(always)]
    pub(super) fn enable_signals(&mut self, at: Cursor) {
        let wish = if self.event_idx {
            u32::from(DESC) << 16 | u32::from(at.to_bits())
        } else {
            u32::from(ENABLE) << 16
        };
        self.set_wish(wish);
        // Pairs with the fence in `publish`: either the peer sees our wish, or we see its flags.
        A::full_fence();
    }

    #[inline(always)]
    fn wish(&self) -> u32 {
        if A::SHADOW { self.wish } else { self.own.load32(0) }
    }

    #[inline(always)]
    fn set_wish(&mut self, wish: u32) {
        if self.wish() != wish {
            self.wish = wish;
            self.own.store32(0, wish);
        }
    }
}

/// Whether a peer that asked to be told when slot `event` is handed over must be told now that
/// everything from `old` up to, not including, `new` was (2.8.10).
#[inline(always)]
fn passed(event: Cursor, new: Cursor, old: Cursor, size: u16) -> bool {
    // Backwards from `new`, where everything handed over lies within one lap.
    let back = |at: Cursor| at.distance(new, size);
    let (event, added) = (back(event), back(old));
    0 < event && event <= added
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_is_true_exactly_when_the_slot_was_handed_over() {
        for size in [1u16, 2, 3, 7, 8] {
            for index in 0..size {
                for wrap in [false, true] {
                    let old = Cursor { index, wrap };
                    for step in 0..=size {
                        let new = old.forward(step, size);
                        // An event within one lap ahead of where the burst began.
                        for ahead in 0..size {
                            let event = old.forward(ahead, size);
                            assert_eq!(passed(event, new, old, size), ahead < step, "{old:?} {step} {ahead}");
                        }
                    }
                }
            }
        }
    }
}
