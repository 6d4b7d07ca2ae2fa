//! One half's end of a packed ring: write cursor, read cursor and event suppression.
//!
//! The driver half and the device half are mirror images, so both hold a [`Side`], made when the ring is
//! set up and dropped with it. The thread that owns the half calls, per burst: [`Side::write`] or
//! [`Side::write_desc`] for each descriptor it hands over, then [`Side::publish`] once; and
//! [`Side::peek`] to see what the peer has handed over. The two cursors are:
//!
//! | cursor | in the driver half | in the device half |
//! |---|---|---|
//! | `write_cursor` | avail cursor: next slot to make available | used cursor: next slot to mark used |
//! | `read_cursor` | used cursor: next slot that may be used | avail cursor: next slot that may be available |
//!
//! Sleep handshake (Dekker): the consumer writes its event suppression structure, full fence, peeks at
//! the ring once more; the producer publishes the head flags, full fence, reads that structure. At least
//! one of them sees the other's store, so no signal (kick or call) is lost.

use ringferry_memory::{Slots, Words};

use super::{Cursor, Desc};
use crate::parts::{LayoutError, Parts};

/// `RING_EVENT_FLAGS_ENABLE` (2.8.10): every descriptor handed over deserves a signal.
const ENABLE: u16 = 0;
/// `RING_EVENT_FLAGS_DISABLE`: no signal is wanted.
const DISABLE: u16 = 1;
/// `RING_EVENT_FLAGS_DESC`: a signal is wanted for the slot in `off_wrap`; needs EVENT_IDX.
const DESC: u16 = 2;

/// The half that owns a [`Side`]; it decides which event suppression structure the side writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Driver,
    Device,
}

/// One half's view of the ring; see the module's documentation.
#[derive(Debug)]
pub(super) struct Side<A: Words> {
    pub(super) size: u16,
    slots: A::Slots,
    /// The event suppression structure that this half writes and the peer reads before it signals.
    own_event: A,
    /// The event suppression structure that the peer writes.
    peer_event: A,
    event_idx: bool,
    /// Shadow of `own_event` as one word: `off_wrap` in bits 0 to 15, `flags` in bits 16 to 31.
    event_shadow: u32,
    /// Slot of the next descriptor to write; ahead of `published` by the unpublished slots.
    pub(super) write_cursor: Cursor,
    /// Slot of the head of the burst: everything before it has been published.
    pub(super) published: Cursor,
    /// Second word (length, id, flags) of the descriptor at `published`. It is stored last, because its
    /// flags make the whole burst visible.
    head_word: Option<u64>,
    /// Slot of the next descriptor to read.
    pub(super) read_cursor: Cursor,
}

impl<A: Words> Side<A> {
    /// Makes the side with both cursors, and the peer's, at `start`. Signals start off.
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
        let (own_event, peer_event) = if role == Role::Driver { (driver, device) } else { (device, driver) };
        let event_shadow = u32::from(DISABLE) << 16;
        own_event.store32(0, event_shadow);
        Ok(Self {
            size,
            slots,
            own_event,
            peer_event,
            event_idx,
            event_shadow,
            write_cursor: start,
            published: start,
            head_word: None,
            read_cursor: start,
        })
    }

    /// Writes the descriptor at `at` of a buffer at `addr`, which hands it to the peer. The head of a burst is kept back
    /// until [`Side::publish`]; the peer does not read past a slot that is not its own.
    #[inline(always)]
    pub(super) fn write(&mut self, at: Cursor, addr: u64, desc: Desc) {
        if at == self.published {
            self.slots.set_first(at.index, addr);
            self.head_word = Some(desc.into_word());
        } else {
            self.slots.set(at.index, [addr, desc.into_word()]);
        }
    }

    /// Does the same as [`Side::write`] with a descriptor whose address means nothing, as in one that is used.
    #[inline(always)]
    pub(super) fn write_desc(&mut self, at: Cursor, desc: Desc) {
        if at == self.published {
            self.head_word = Some(desc.into_word());
        } else {
            self.slots.set_second(at.index, desc.into_word());
        }
    }

    /// Does the same as [`Side::write_desc`] with a release store, so that a process that takes over after
    /// a crash sees every earlier store (the in-flight log) if it sees this one.
    pub(super) fn write_desc_release(&mut self, at: Cursor, desc: Desc) {
        if at == self.published {
            self.head_word = Some(desc.into_word());
        } else {
            self.slots.set_second_release(at.index, desc.into_word());
        }
    }

    /// Reads the descriptor at `at` and returns it if its AVAIL and USED flags equal `owner_flags`, that
    /// is, if the peer has handed it over in the lap of `at`.
    #[inline(always)]
    pub(super) fn peek(&self, at: Cursor, owner_flags: u16) -> Option<Desc> {
        // Acquire: the rest of the chain and its buffers are read after the flags that make them visible.
        let desc = Desc::from_word(self.slots.second_acquire(at.index));
        (desc.owner_flags() == owner_flags).then_some(desc)
    }

    /// Reads the buffer address of the descriptor at `at`, after [`Side::peek`] has found it handed over.
    #[inline(always)]
    pub(super) fn read_addr(&self, at: Cursor) -> u64 {
        self.slots.first(at.index)
    }

    /// Reads a later descriptor of a chain whose head [`Side::peek`] has found handed over. Its own flags
    /// need no check: the head is published after all others.
    #[inline(always)]
    pub(super) fn read_chained(&self, at: Cursor) -> Desc {
        Desc::from_word(self.slots.second(at.index))
    }

    /// Makes all written descriptors visible to the peer with one store of the head flags. Returns true if
    /// the peer wants a signal for them, false also when there was nothing to publish.
    #[inline(always)]
    pub(super) fn publish(&mut self) -> bool {
        let Some(head_word) = self.head_word.take() else { return false };
        // Release: the burst and its buffers become visible before the flags that announce them.
        self.slots.set_second_release(self.published.index, head_word);
        // Pairs with the fence in `enable_signals`: either we see the peer's event suppression, or it sees
        // our head flags.
        A::full_fence();
        let old = std::mem::replace(&mut self.published, self.write_cursor);
        // One load reads both fields, so that `off_wrap` is never combined with `flags` of another time
        // (2.8.14).
        let event = self.peer_event.load32(0);
        match (event >> 16) as u16 & 3 {
            DISABLE => false,
            DESC if self.event_idx => {
                need_event(Cursor::from_bits(event as u16), self.write_cursor, old, self.size)
            }
            // ENABLE, or a reserved value, treated as ENABLE: a spurious notification is legal.
            _ => true,
        }
    }

    /// Returns the position of the slot of which the peer wants to be told; `None` if it does not say so by position.
    pub(super) fn asked_at(&self) -> Option<Cursor> {
        let event = self.peer_event.load32(0);
        (self.event_idx && (event >> 16) as u16 & 3 == DESC).then(|| Cursor::from_bits(event as u16))
    }

    /// Makes the ring one without chains at `start`, for the driver half to write anew after its peer has gone: every slot is
    /// one that is not available, and so are the event suppression structures as they must be. Nothing is read.
    pub(super) fn restart(&mut self, start: Cursor) {
        (self.write_cursor, self.published, self.head_word) = (start, start, None);
        let mut at = start;
        for _ in 0..self.size {
            // What a slot holds that was used in the lap before, which is the other one.
            let flags = Cursor { wrap: !at.wrap, ..at }.used();
            self.slots.set(at.index, [0, Desc { len: 0, id: 0, flags }.into_word()]);
            at = at.forward(1, self.size);
        }
        self.own_event.store32(0, self.event_shadow);
        self.peer_event.store32(0, u32::from(ENABLE) << 16);
    }

    /// Turns the peer's signals off, because this half polls.
    #[inline(always)]
    pub(super) fn disable_signals(&mut self) {
        let event = self.event_suppression() & 0xffff | u32::from(DISABLE) << 16;
        self.set_event_suppression(event);
    }

    /// Asks for a signal when the peer hands over slot `at` or, without EVENT_IDX, any slot. The caller
    /// must peek at the ring afterwards, as no signal may come for slots handed over before.
    #[inline(always)]
    pub(super) fn enable_signals(&mut self, at: Cursor) {
        let event = if self.event_idx {
            u32::from(DESC) << 16 | u32::from(at.to_bits())
        } else {
            u32::from(ENABLE) << 16
        };
        self.set_event_suppression(event);
        // Pairs with the fence in `publish`: either the peer sees our event suppression, or we see its
        // head flags.
        A::full_fence();
    }

    #[inline(always)]
    fn event_suppression(&self) -> u32 {
        if A::SHADOW { self.event_shadow } else { self.own_event.load32(0) }
    }

    #[inline(always)]
    fn set_event_suppression(&mut self, event: u32) {
        if self.event_suppression() != event {
            self.event_shadow = event;
            self.own_event.store32(0, event);
        }
    }
}

/// Returns true if slot `event` lies in the range from `old` (inclusive) to `new` (exclusive) that was
/// just handed over: the packed ring's `vring_need_event` (2.8.10).
#[inline(always)]
fn need_event(event: Cursor, new: Cursor, old: Cursor, size: u16) -> bool {
    // Distances are measured backwards from `new`, as everything handed over lies within one lap of it.
    let back = |at: Cursor| at.distance(new, size);
    let (event, added) = (back(event), back(old));
    0 < event && event <= added
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn need_event_is_true_exactly_when_the_slot_was_handed_over() {
        for size in [1u16, 2, 3, 7, 8] {
            for index in 0..size {
                for wrap in [false, true] {
                    let old = Cursor { index, wrap };
                    for step in 0..=size {
                        let new = old.forward(step, size);
                        // An event within one lap ahead of where the burst began.
                        for ahead in 0..size {
                            let event = old.forward(ahead, size);
                            assert_eq!(
                                need_event(event, new, old, size),
                                ahead < step,
                                "{old:?} {step} {ahead}"
                            );
                        }
                    }
                }
            }
        }
    }
}
