//! The driver half of a split ring: adds chains, publishes once per burst, collects used chains.
//!
//! [`crate::Driver::new`] creates it for a split queue, the thread that owns the queue calls `add` for
//! each chain, `publish` and `collect_each` once per burst; after the device has
//! stopped, `detach_unused` returns the remaining tokens. The methods are documented at
//! [`crate::Driver`]. Free descriptors and chains are linked lists in private memory: the device can
//! overwrite the descriptor table, so it is never read back.

use std::num::NonZeroU16;

use ringferry_memory::{Table, Words};

use super::side::Side;
use super::{Desc, IDX, Layout};
use crate::chain::{Buffer, F_INDIRECT, F_NEXT, F_WRITE};
use crate::driver::{AddError, IndirectTables, Used, flagged};
use crate::outstanding::{Ids, Outstanding};
use crate::parts::{LayoutError, Parts};
use crate::{Fault, RingFeatures};

/// The split variant of [`crate::Driver`].
#[derive(Debug)]
pub struct Driver<A: Words, T> {
    layout: Layout<A>,
    tables: Option<IndirectTables<A>>,
    /// Publishes heads in the available ring and consumes used elements.
    side: Side<A>,
    free: FreeList,
    outstanding: Outstanding<T>,
    fault: Option<Fault>,
}

/// The descriptors that no chain occupies.
#[derive(Debug)]
struct FreeList {
    /// Successor of each descriptor in the free list or in its chain. With IN_ORDER it is always the
    /// following descriptor, as 2.7.9.1 demands.
    link: Box<[u16]>,
    head: u16,
    /// Number of descriptors in the list.
    count: u16,
}

impl FreeList {
    /// Returns the successor of a descriptor.
    #[inline(always)]
    fn after(&self, index: u16) -> u16 {
        self.link[usize::from(index)]
    }

    /// Puts the `slots` descriptors of the chain at `head` in front of the list (last in, first out), so that the ones in the
    /// cache are used next. `prefetch` fetches a descriptor for writing.
    #[inline(always)]
    fn release(&mut self, head: u16, slots: NonZeroU16, prefetch: impl FnOnce(u16)) {
        self.count += slots.get();
        // The device has read this cache line, and the next chain will write it. It is prefetched for
        // writing here, so that the misses of a burst overlap; a store that waits for its line delays all
        // stores behind it. (The same for available and used entries, and for the slots of a packed ring,
        // gained nothing.)
        if head.is_multiple_of(LINE) {
            prefetch(head);
        }
        let mut last = head;
        for _ in 1..slots.get() {
            last = self.after(last);
        }
        self.link[usize::from(last)] = self.head;
        self.head = head;
    }
}

/// Number of descriptors (16 bytes each) in a cache line of 64 bytes.
const LINE: u16 = 4;

impl<A: Words, T> Driver<A, T> {
    /// Sets up a fresh ring; both indexes start at 0.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn new(
        parts: Parts<A>,
        features: RingFeatures,
        tables: Option<IndirectTables<A>>,
    ) -> Result<Self, LayoutError> {
        let (layout, avail, used) = Layout::new(parts)?;
        let size = layout.size;
        avail.area.store16(avail.event, 0);
        avail.area.store16_release(IDX, 0);
        Ok(Self {
            tables: IndirectTables::checked(tables, size, features),
            side: Side::new(avail, used, features.event_idx),
            free: FreeList { link: (1..size).chain([0]).collect(), head: 0, count: size },
            outstanding: Outstanding::new(size, features.in_order.then_some(Ids::Slots)),
            fault: None,
            layout,
        })
    }

    pub fn size(&self) -> u16 {
        self.layout.size
    }

    #[inline]
    pub fn free(&self) -> u16 {
        self.free.count
    }

    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.side.next().wrapping_sub(self.side.peer_next())
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
        if self.free.count == 0 {
            return Err(AddError::Full(token));
        }
        let head = self.free.head;
        let next = self.free.after(head);
        let desc = Desc { addr: buffer.addr, len: buffer.len, flags, next };
        self.layout.desc.store(head, desc.into_words());
        self.outstanding.insert(head, *buffer, flags, self.side.next(), token);
        self.commit(head, next, 1);
        Ok(head)
    }

    /// Adds a chain of any length; kept out of line, as most chains have one buffer.
    #[inline(never)]
    fn add_many(&mut self, readable: &[Buffer], writable: &[Buffer], token: T) -> Result<u16, AddError<T>> {
        let count = readable.len() + writable.len();
        if self.fault.is_some() {
            return Err(AddError::Broken(token));
        }
        if count == 0 || count > usize::from(self.layout.size) {
            return Err(AddError::BadChain(token));
        }
        let count = count as u16;
        let indirect = self.tables.as_ref().is_some_and(|tables| tables.takes(count));
        let slots = NonZeroU16::new(if indirect { 1 } else { count }).unwrap_or(NonZeroU16::MIN);
        if slots.get() > self.free.count {
            return Err(AddError::Full(token));
        }
        let head = self.free.head;
        let next = self.describe(head, count, flagged(readable, writable));
        self.outstanding.insert_several(head, flagged(readable, writable), slots, self.side.next(), token);
        self.commit(head, next, slots.get());
        Ok(head)
    }

    /// Writes the descriptors of a chain of `count` buffers at `head`, into its indirect table if it goes there. Returns
    /// the descriptor that follows the last one in private memory.
    fn describe(&self, head: u16, count: u16, buffers: impl Iterator<Item = (Buffer, u16)>) -> u16 {
        if let Some(tables) = self.tables.as_ref().filter(|tables| tables.takes(count)) {
            let table = tables.fill(head, buffers, |i, Buffer { addr, len }, flags| {
                let next = if i + 1 < count { F_NEXT } else { 0 };
                Desc { addr, len, flags: flags | next, next: i + 1 }.into_words()
            });
            let desc = Desc { addr: table.addr, len: table.len, flags: F_INDIRECT, next: 0 };
            self.layout.desc.store(head, desc.into_words());
            return self.free.after(head);
        }
        let mut index = head;
        for (i, (Buffer { addr, len }, flags)) in buffers.enumerate() {
            let next = self.free.after(index);
            let more = if i + 1 < usize::from(count) { F_NEXT } else { 0 };
            let desc = Desc { addr, len, flags: flags | more, next };
            self.layout.desc.store(index, desc.into_words());
            index = next;
        }
        index
    }

    /// Enters the chain at `head`, whose `slots` descriptors have been written, into the available ring. `next`
    /// becomes the head of the free list.
    #[inline(always)]
    fn commit(&mut self, head: u16, next: u16, slots: u16) {
        self.free.head = next;
        self.free.count -= slots;
        self.layout.heads.store(self.side.next(), head);
        self.side.advance(1);
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        self.side.publish()
    }

    #[inline]
    pub fn has_used(&mut self) -> bool {
        self.ahead() > 0
    }

    /// Returns how many chains the device has used that are not collected yet, as far as that is known; looks anew only if none is.
    #[inline(always)]
    fn ahead(&mut self) -> u16 {
        // Nothing is collected from a broken ring, whatever the index cached before it broke.
        let known = self.side.known();
        if known > 0 && self.fault.is_none() { known } else { self.refresh() }
    }

    #[inline(never)]
    fn refresh(&mut self) -> u16 {
        if self.fault.is_some() {
            return 0;
        }
        match self.side.refresh(self.side.published().wrapping_sub(self.side.peer_next())) {
            Ok(ahead) => ahead,
            Err(fault) => {
                self.break_with(fault);
                0
            }
        }
    }

    #[cold]
    fn break_with(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }

    #[inline(always)]
    pub fn collect_each(&mut self, most: usize, mut each: impl FnMut(Used<T>)) -> usize {
        let mut count = 0;
        while count < most {
            let ahead = self.ahead();
            if ahead == 0 {
                break;
            }
            let Self { outstanding, free, layout, side, .. } = self;
            let element = |at| {
                let [id, len] = layout.elements.load(at);
                (id, len)
            };
            let (most, first) = (usize::from(ahead).min(most - count), side.peer_next());
            let (mut chains, mut fault) = (0u16, None);
            if outstanding.is_in_order() {
                let element = outstanding.batch().unwrap_or_else(|| element(first));
                let completed = outstanding.remove_batch(element, most, |id, entry, len| {
                    chains += 1;
                    // Nothing needs linking: the descriptors follow the free ones already.
                    free.count += entry.slots.get();
                    each(Used { id, token: entry.token, len });
                });
                fault = completed.err();
            } else {
                while usize::from(chains) < most {
                    let (id, len) = element(first.wrapping_add(chains));
                    match outstanding.remove(id) {
                        Ok(entry) => {
                            chains += 1;
                            free.release(id as u16, entry.slots, |head| layout.desc.prefetch_write(head));
                            each(Used { id: id as u16, token: entry.token, len });
                        }
                        Err(found) => {
                            fault = Some(found);
                            break;
                        }
                    }
                }
            }
            side.consume(chains);
            count += usize::from(chains);
            if let Some(fault) = fault {
                self.break_with(fault);
            }
        }
        count
    }

    /// Takes back one chain and decrements `avail.idx`, in the shadow and then in memory.
    pub fn detach_unused(&mut self) -> Option<T> {
        let (head, entry) = self.outstanding.take_any()?;
        if self.outstanding.is_in_order() {
            self.free.count += entry.slots.get();
        } else {
            self.free.release(head, entry.slots, |_| {});
        }
        self.side.step_back();
        Some(entry.token)
    }

    pub fn resume(&mut self) -> Option<u16> {
        if self.fault.is_some() {
            return None;
        }
        let base = self.side.peer_next();
        let mut at = base;
        for (head, buffers) in self.outstanding.shown(self.side.next()) {
            self.describe(head, buffers.len() as u16, buffers.into_iter());
            self.layout.heads.store(at, head);
            at = at.wrapping_add(1);
        }
        debug_assert_eq!(at, self.side.next(), "every outstanding chain has its entry");
        self.side.restart();
        Some(base)
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
        let outstanding = self.side.published().wrapping_sub(self.side.peer_next());
        self.enable_calls_after((u32::from(outstanding) * 3 / 4) as u16)
    }

    #[inline]
    fn enable_calls_after(&mut self, entries: u16) -> bool {
        if self.fault.is_some() {
            return false;
        }
        self.side.enable_signals(self.side.peer_next().wrapping_add(entries));
        self.refresh() > entries
    }
}
