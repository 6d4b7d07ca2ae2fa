//! The driver half of a packed ring: adds chains, publishes once per burst, collects what came back.
//!
//! What a chain occupies is remembered by its buffer id. What the device could have scribbled over the
//! descriptors is never read back.

use std::num::NonZeroU16;

use ringferry_memory::Words;

use super::side::{Role, Side};
use super::{Cursor, Desc};
use crate::chain::{Buffer, F_INDIRECT, F_NEXT, F_WRITE};
use crate::driver::{AddError, IndirectTables, Used, flagged};
use crate::outstanding::{Entry, Ids, Outstanding};
use crate::parts::{LayoutError, Parts};
use crate::{Fault, RingFeatures};

/// Buffer ids that no chain has.
#[derive(Debug)]
enum FreeIds {
    /// Last returned on top: its bookkeeping is still in the cache.
    Stack(Vec<u16>),
    /// With IN_ORDER they come back in the order they went: the next is the oldest.
    Next(u16),
}

/// See [`crate::Driver`].
#[derive(Debug)]
pub struct Driver<A: Words, T> {
    tables: Option<IndirectTables<A>>,
    /// Hands over available descriptors and follows used ones.
    side: Side<A>,
    ids: FreeIds,
    outstanding: Outstanding<T>,
    /// Free slots.
    free: u16,
    /// Chains the device has, or is about to.
    in_flight: u16,
    fault: Option<Fault>,
}

impl<A: Words, T> Driver<A, T> {
    /// See [`crate::Driver::new`]. Both sides start at slot 0 with a wrap counter of 1.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn new(
        parts: Parts<A>,
        features: RingFeatures,
        tables: Option<IndirectTables<A>>,
    ) -> Result<Self, LayoutError> {
        let side = Side::new(Role::Driver, parts, features.event_idx, Cursor::START)?;
        let size = side.size;
        Ok(Self {
            tables: IndirectTables::checked(tables, size, features),
            side,
            ids: if features.in_order { FreeIds::Next(0) } else { FreeIds::Stack((0..size).rev().collect()) },
            outstanding: Outstanding::new(size, features.in_order.then_some(Ids::Count)),
            free: size,
            in_flight: 0,
            fault: None,
        })
    }

    /// See [`crate::Driver::size`].
    pub fn size(&self) -> u16 {
        self.side.size
    }

    /// See [`crate::Driver::free`].
    #[inline]
    pub fn free(&self) -> u16 {
        self.free
    }

    /// See [`crate::Driver::in_flight`].
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// See [`crate::Driver::fault`].
    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// See [`crate::Driver::add`].
    ///
    /// # Errors
    /// See [`AddError`].
    #[inline(always)]
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer], token: T) -> Result<(), AddError<T>> {
        let (buffer, flags, writable_len) = match (readable, writable) {
            ([buffer], []) => (buffer, 0, 0),
            ([], [buffer]) => (buffer, F_WRITE, buffer.len),
            _ => return self.add_many(readable, writable, token),
        };
        if self.fault.is_some() {
            return Err(AddError::Broken(token));
        }
        if self.free == 0 {
            return Err(AddError::Full(token));
        }
        let Some(id) = self.take_id() else { return Err(AddError::Full(token)) };
        let at = self.side.next;
        self.side.set_addr(at, buffer.addr);
        self.side.hand_over(at, Desc { len: buffer.len, id, flags: flags | at.available() });
        self.commit(id, Entry { slots: NonZeroU16::MIN, writable_len, token });
        Ok(())
    }

    /// Adds a chain of any length.
    #[inline(never)]
    fn add_many(&mut self, readable: &[Buffer], writable: &[Buffer], token: T) -> Result<(), AddError<T>> {
        let count = readable.len() + writable.len();
        if self.fault.is_some() {
            return Err(AddError::Broken(token));
        }
        if count == 0 || count > usize::from(self.side.size) {
            return Err(AddError::BadChain(token));
        }
        let count = count as u16;
        let indirect = self.tables.as_ref().is_some_and(|tables| tables.takes(count));
        let slots = if indirect { 1 } else { count };
        if slots > self.free {
            return Err(AddError::Full(token));
        }
        // There are as many ids as slots, and a chain occupies at least one.
        let Some(id) = self.take_id() else { return Err(AddError::Full(token)) };
        let mut at = self.side.next;
        let buffers = flagged(readable, writable);
        if let Some(tables) = self.tables.as_ref().filter(|_| indirect) {
            let table = tables.fill(id, buffers, |_, Buffer { addr, len }, flags| {
                [addr, Desc { len, id: 0, flags }.into_word()]
            });
            self.side.set_addr(at, table.addr);
            self.side.hand_over(at, Desc { len: table.len, id, flags: F_INDIRECT | at.available() });
        } else {
            for (i, (Buffer { addr, len }, flags)) in buffers.enumerate() {
                let more = if i + 1 < usize::from(count) { F_NEXT } else { 0 };
                self.side.set_addr(at, addr);
                self.side.hand_over(at, Desc { len, id, flags: flags | more | at.available() });
                at = at.forward(1, self.side.size);
            }
        }
        let slots = NonZeroU16::new(slots).unwrap_or(NonZeroU16::MIN);
        let writable_len = writable.iter().fold(0, |sum: u32, buffer| sum.wrapping_add(buffer.len));
        self.commit(id, Entry { slots, writable_len, token });
        Ok(())
    }

    /// Notes a chain whose descriptors are written.
    #[inline(always)]
    fn commit(&mut self, id: u16, entry: Entry<T>) {
        let slots = entry.slots.get();
        self.side.next = self.side.next.forward(slots, self.side.size);
        self.free -= slots;
        self.in_flight += 1;
        self.outstanding.insert(id, entry);
    }

    #[inline(always)]
    fn take_id(&mut self) -> Option<u16> {
        match &mut self.ids {
            FreeIds::Stack(ids) => ids.pop(),
            FreeIds::Next(next) => Some(std::mem::replace(next, self.outstanding.following(*next, 1))),
        }
    }

    /// See [`crate::Driver::publish`].
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.side.publish()
    }

    /// See [`crate::Driver::has_used`].
    #[inline]
    pub fn has_used(&mut self) -> bool {
        self.fault.is_none() && (self.outstanding.in_batch() || self.next_used().is_some())
    }

    #[inline(always)]
    fn next_used(&self) -> Option<Desc> {
        let at = self.side.peer_next;
        // What is not published the device cannot have used: a slot of an earlier lap may look so.
        if at == self.side.published { None } else { self.side.look(at, at.used()) }
    }

    /// See [`crate::Driver::collect`].
    #[inline(always)]
    pub fn collect(&mut self) -> Option<Used<T>> {
        if self.fault.is_some() {
            return None;
        }
        let used = if !self.outstanding.in_batch() {
            Some(self.next_used()?)
        } else if self.side.peer_next == self.side.published {
            // The batch's element names a chain that the device was not shown yet.
            self.fault = Some(Fault::IndexJump(1));
            return None;
        } else {
            None
        };
        // Inside a batch no element is read. The length is taken without WRITE too, where 2.8.4 has it
        // ignored: QEMU's devices never set that flag, and Linux's driver takes it as well.
        let element = || used.map_or((0, 0), |desc| (desc.id.into(), desc.len));
        match self.outstanding.complete(element) {
            Ok((id, Entry { slots, token, .. }, len)) => {
                self.side.peer_next = self.side.peer_next.forward(slots.get(), self.side.size);
                self.release(id, slots);
                Some(Used { token, len })
            }
            Err(fault) => {
                self.fault = Some(fault);
                None
            }
        }
    }

    #[inline(always)]
    fn release(&mut self, id: u16, slots: NonZeroU16) {
        self.free += slots.get();
        self.in_flight -= 1;
        if let FreeIds::Stack(ids) = &mut self.ids {
            ids.push(id);
        }
    }

    /// See [`crate::Driver::detach_unused`].
    pub fn detach_unused(&mut self) -> Option<T> {
        let (id, Entry { slots, token, .. }) = self.outstanding.take_any()?;
        self.release(id, slots);
        Some(token)
    }

    /// See [`crate::Driver::disable_calls`].
    #[inline]
    pub fn disable_calls(&mut self) {
        self.side.disable_signals();
    }

    /// See [`crate::Driver::enable_calls`].
    #[inline]
    pub fn enable_calls(&mut self) -> bool {
        self.enable_calls_after(0)
    }

    /// See [`crate::Driver::enable_calls_delayed`].
    #[inline]
    pub fn enable_calls_delayed(&mut self) -> bool {
        let outstanding = self.side.peer_next.distance(self.side.published, self.side.size);
        self.enable_calls_after((u32::from(outstanding) * 3 / 4) as u16)
    }

    #[inline]
    fn enable_calls_after(&mut self, slots: u16) -> bool {
        if self.fault.is_some() {
            return false;
        }
        self.side.enable_signals(self.side.peer_next.forward(slots, self.side.size));
        self.has_used()
    }
}
