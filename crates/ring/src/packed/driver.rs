//! The driver half of a packed ring: adds chains, publishes once per burst, collects used chains.
//!
//! [`crate::Driver::new`] creates it for a packed queue, the thread that owns the queue calls `add` for
//! each chain, `publish` and `collect_each` once per burst; after the device has
//! stopped, `detach_unused` returns the remaining tokens. The methods are documented at
//! [`crate::Driver`]. The number of slots of a chain is kept in private memory by its buffer id: the
//! device can overwrite descriptors, so they are never read back.

use std::num::NonZeroU16;

use ringferry_memory::Words;

use super::side::{Role, Side};
use super::{Cursor, Desc};
use crate::chain::{Buffer, F_INDIRECT, F_NEXT, F_WRITE};
use crate::driver::{AddError, IndirectTables, Used, flagged};
use crate::outstanding::{Ids, Outstanding};
use crate::parts::{LayoutError, Parts};
use crate::{Fault, RingFeatures};

/// Free buffer ids, that is, those of no outstanding chain.
#[derive(Debug)]
enum FreeIds {
    /// Last in, first out: the entry of the id freed last is still in the cache.
    Stack(Vec<u16>),
    /// With IN_ORDER ids are freed in the order they were given out, so this counter is the next free one.
    Next(u16),
}

/// The packed variant of [`crate::Driver`].
#[derive(Debug)]
pub struct Driver<A: Words, T> {
    tables: Option<IndirectTables<A>>,
    /// Writes available descriptors at `write_cursor` and reads used ones at `read_cursor`.
    side: Side<A>,
    ids: FreeIds,
    outstanding: Outstanding<T>,
    /// Number of slots that no chain occupies.
    free: u16,
    /// Number of chains that were added, modulo 2^16.
    added: u16,
    /// The value of `added` at the last publish.
    shown: u16,
    /// Number of chains that were collected, modulo 2^16.
    collected: u16,
    fault: Option<Fault>,
}

impl<A: Words, T> Driver<A, T> {
    /// Sets up a fresh ring; both cursors start at slot 0 with a wrap counter of 1.
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
            added: 0,
            shown: 0,
            collected: 0,
            fault: None,
        })
    }

    pub fn size(&self) -> u16 {
        self.side.size
    }

    #[inline]
    pub fn free(&self) -> u16 {
        self.free
    }

    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.added.wrapping_sub(self.collected)
    }

    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    #[inline(always)]
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer], token: T) -> Result<u16, AddError<T>> {
        let (buffer, flags) = match (readable, writable) {
            ([buffer], []) => (buffer, 0),
            ([], [buffer]) => (buffer, F_WRITE),
            _ => return self.add_many(readable, writable, token),
        };
        if self.fault.is_some() {
            return Err(AddError::Broken(token));
        }
        if self.free == 0 {
            return Err(AddError::Full(token));
        }
        let Some(id) = self.take_id() else { return Err(AddError::Full(token)) };
        let at = self.side.write_cursor;
        self.side.write(at, buffer.addr, Desc { len: buffer.len, id, flags: flags | at.available() });
        self.outstanding.insert(id, *buffer, flags, self.added, token);
        self.side.write_cursor = at.next(self.side.size);
        self.free -= 1;
        self.added = self.added.wrapping_add(1);
        Ok(id)
    }

    /// Adds a chain of any length; kept out of line, as most chains have one buffer.
    #[inline(never)]
    fn add_many(&mut self, readable: &[Buffer], writable: &[Buffer], token: T) -> Result<u16, AddError<T>> {
        let count = readable.len() + writable.len();
        if self.fault.is_some() {
            return Err(AddError::Broken(token));
        }
        if count == 0 || count > usize::from(self.side.size) {
            return Err(AddError::BadChain(token));
        }
        let count = count as u16;
        let indirect = self.tables.as_ref().is_some_and(|tables| tables.takes(count));
        let slots = NonZeroU16::new(if indirect { 1 } else { count }).unwrap_or(NonZeroU16::MIN);
        if slots.get() > self.free {
            return Err(AddError::Full(token));
        }
        // There are as many ids as slots and a chain occupies at least one slot, so an id is free here.
        let Some(id) = self.take_id() else { return Err(AddError::Full(token)) };
        self.describe(id, count, flagged(readable, writable));
        self.outstanding.insert_several(id, flagged(readable, writable), slots, self.added, token);
        self.side.write_cursor = self.side.write_cursor.forward(slots.get(), self.side.size);
        self.free -= slots.get();
        self.added = self.added.wrapping_add(1);
        Ok(id)
    }

    /// Writes the descriptors of a chain of `count` buffers at the avail cursor, or into its indirect table and one
    /// descriptor if it goes there.
    fn describe(&mut self, id: u16, count: u16, buffers: impl Iterator<Item = (Buffer, u16)>) {
        let mut at = self.side.write_cursor;
        if let Some(tables) = self.tables.as_ref().filter(|tables| tables.takes(count)) {
            let table = tables.fill(id, buffers, |_, Buffer { addr, len }, flags| {
                [addr, Desc { len, id: 0, flags }.into_word()]
            });
            let desc = Desc { len: table.len, id, flags: F_INDIRECT | at.available() };
            return self.side.write(at, table.addr, desc);
        }
        for (i, (Buffer { addr, len }, flags)) in buffers.enumerate() {
            let more = if i + 1 < usize::from(count) { F_NEXT } else { 0 };
            self.side.write(at, addr, Desc { len, id, flags: flags | more | at.available() });
            at = at.next(self.side.size);
        }
    }

    #[inline(always)]
    fn take_id(&mut self) -> Option<u16> {
        match &mut self.ids {
            FreeIds::Stack(ids) => ids.pop(),
            FreeIds::Next(next) => Some(std::mem::replace(next, self.outstanding.following(*next, 1))),
        }
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        self.shown = self.added;
        self.side.publish()
    }

    #[inline]
    pub fn has_used(&mut self) -> bool {
        self.fault.is_none() && (self.outstanding.batch().is_some() || self.next_used().is_some())
    }

    #[inline(always)]
    fn next_used(&self) -> Option<Desc> {
        let at = self.side.read_cursor;
        // The device cannot have used a chain that is not published, though the flags left in its slots
        // by an earlier lap may look like it.
        if at == self.side.published { None } else { self.side.peek(at, at.used()) }
    }

    #[inline(always)]
    pub fn collect_each(&mut self, most: usize, mut each: impl FnMut(Used<T>)) -> usize {
        // The device cannot have used a chain that is not published, though the flags left in its slots by an earlier lap may look
        // like it.
        let published = usize::from(self.shown.wrapping_sub(self.collected));
        if self.fault.is_some() {
            return 0;
        }
        let Self { outstanding, ids, side, .. } = self;
        let (mut count, mut freed, mut at, mut fault) = (0, 0u16, side.read_cursor, None);
        if outstanding.is_in_order() {
            while count < most.min(published) {
                let read = || side.peek(at, at.used()).map(|desc| (desc.id.into(), desc.len));
                let Some(element) = outstanding.batch().or_else(read) else { break };
                let mut slots = 0u16;
                let completed =
                    outstanding.remove_batch(element, most.min(published) - count, |id, entry, len| {
                        count += 1;
                        slots += entry.slots.get();
                        each(Used { id, token: entry.token, len });
                    });
                at = at.forward(slots, side.size);
                freed += slots;
                if let Err(found) = completed {
                    fault = Some(found);
                    break;
                }
            }
            if count == published && count < most && outstanding.batch().is_some() {
                // The used descriptor of the batch names a chain that was not published yet.
                fault = Some(Fault::IndexJump(1));
            }
        } else {
            while count < most.min(published) {
                // The length is used even without WRITE, which 2.8.4 says to ignore: QEMU's devices never set that flag, and
                // Linux's driver uses the length as well.
                let Some(Desc { id, len, .. }) = side.peek(at, at.used()) else { break };
                match outstanding.remove(id.into()) {
                    Ok(entry) => {
                        count += 1;
                        at = at.forward(entry.slots.get(), side.size);
                        freed += entry.slots.get();
                        if let FreeIds::Stack(ids) = ids {
                            ids.push(id);
                        }
                        each(Used { id, token: entry.token, len });
                    }
                    Err(found) => {
                        fault = Some(found);
                        break;
                    }
                }
            }
        }
        side.read_cursor = at;
        self.free += freed;
        self.collected = self.collected.wrapping_add(count as u16);
        self.fault = fault;
        count
    }

    pub fn detach_unused(&mut self) -> Option<T> {
        let (id, entry) = self.outstanding.take_any()?;
        self.free += entry.slots.get();
        self.collected = self.collected.wrapping_add(1);
        if let FreeIds::Stack(ids) = &mut self.ids {
            ids.push(id);
        }
        Some(entry.token)
    }

    pub fn resume(&mut self) -> Option<u16> {
        if self.fault.is_some() {
            return None;
        }
        let (base, end) = (self.side.read_cursor, self.side.write_cursor);
        // The chains are added once more, from the place of the oldest on: their slots are as many, whatever their order.
        self.side.restart(base);
        for (id, buffers) in self.outstanding.shown(self.added) {
            let count = buffers.len() as u16;
            self.describe(id, count, buffers.into_iter());
            let indirect = self.tables.as_ref().is_some_and(|tables| tables.takes(count));
            let slots = if indirect { 1 } else { count };
            self.side.write_cursor = self.side.write_cursor.forward(slots, self.side.size);
        }
        debug_assert_eq!(self.side.write_cursor, end, "every outstanding chain has its slots");
        self.publish();
        Some(base.to_bits())
    }

    #[inline]
    pub fn disable_calls(&mut self) {
        self.side.disable_signals();
    }

    #[inline]
    pub fn enable_calls(&mut self) -> bool {
        self.enable_calls_after(0)
    }

    #[inline]
    pub fn enable_calls_delayed(&mut self) -> bool {
        let outstanding = self.side.read_cursor.distance(self.side.published, self.side.size);
        self.enable_calls_after((u32::from(outstanding) * 3 / 4) as u16)
    }

    #[inline]
    fn enable_calls_after(&mut self, slots: u16) -> bool {
        if self.fault.is_some() {
            return false;
        }
        self.side.enable_signals(self.side.read_cursor.forward(slots, self.side.size));
        self.has_used()
    }
}
