//! [`Pages`]: a queue's access to the front end's pages, which are mapped into a [`Window`] for one
//! burst or for longer, or copied.
//!
//! A queue creates one for both of its rings, so that neither direction's slots lie idle while the
//! other lacks some, uses it on its thread, and drops it with the queue, which unmaps everything.
//! Work is collected for a burst and then done at once: [`lookup`](Pages::lookup) every page, map
//! the new ones ([`map_pending`](Pages::map_pending)), copy the pieces that are not mapped
//! ([`copy`](Pages::copy)), and after the burst [`release`](Pages::release) each slot and unmap
//! what was mapped for it ([`sweep`](Pages::sweep)).

use std::io;

use ringferry_memory::{ReadSlice, Spare, Window, WriteSlice};
use ringferry_xen::domain::PAGE;
use ringferry_xen::grant::{Access, CopySegment, Foreign, ForeignCounters, GrantRef, Local};
use ringferry_xen::netif::control::{GrefEntry, Status};

use super::cache::{Cache, LookupResult, PinError, Slot};

/// The way in which a queue accesses pages that are not static grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The hypervisor copies every piece.
    Copy,
    /// Each page is mapped for one burst and then unmapped.
    Map,
    /// Pages stay mapped, because the front end promised that a reference means the same page until
    /// it disconnects.
    Persistent,
}

/// Counters of the accesses to the front end's pages since the queue was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounters {
    /// Uses of pages that were already mapped.
    pub hits: u64,
    /// Uses of pages that were not mapped.
    pub misses: u64,
    /// Pages that were mapped, for whatever time.
    pub mapped: u64,
    /// Mappings that were replaced by others.
    pub evicted: u64,
    /// Pages that could not be mapped.
    pub failed: u64,
    /// Pieces that the hypervisor copied.
    pub copies: u64,
    /// Bytes in the pieces that were copied.
    pub copied_bytes: u64,
}

/// The access to the pages of one queue's front end.
#[derive(Debug)]
pub struct Pages {
    foreign: Box<dyn Foreign>,
    window: Window,
    cache: Cache,
    mode: Mode,
    /// Slots whose pages were replaced and must be unmapped by the next
    /// [`map_pending`](Self::map_pending).
    stale: Vec<usize>,
    pending: Vec<(usize, GrantRef)>,
    mapped: Vec<bool>,
    /// Slots that are not needed any more and must be unmapped by the next [`sweep`](Self::sweep).
    released: Vec<usize>,
    /// Storage of the last batch of copies, for reuse.
    segments: Spare<CopySegment<'static>>,
    counters: PageCounters,
}

impl Pages {
    /// Creates the access through `foreign`, with at most `slots` pages mapped at a time.
    ///
    /// # Errors
    /// The process has no addresses left for the window.
    pub fn new(foreign: Box<dyn Foreign>, mode: Mode, slots: usize) -> io::Result<Self> {
        let slots = slots.clamp(1, super::cache::MAX_SLOTS);
        Ok(Self {
            foreign,
            window: Window::reserve(slots)?,
            cache: Cache::new(slots),
            mode,
            stale: Vec::new(),
            pending: Vec::new(),
            mapped: Vec::new(),
            released: Vec::new(),
            segments: Spare::default(),
            counters: PageCounters::default(),
        })
    }

    /// Returns the counters since the queue was created.
    pub fn counters(&self) -> PageCounters {
        self.counters
    }

    /// Returns the counters of the grant provider.
    pub fn foreign_counters(&self) -> ForeignCounters {
        self.foreign.counters()
    }

    /// Returns the number of pages kept mapped: those in the cache, and static grants.
    pub fn held(&self) -> (usize, usize) {
        self.cache.held()
    }

    /// Returns the most pages that can be mapped at a time.
    pub fn capacity(&self) -> usize {
        self.window.slots()
    }

    /// Returns the slot of a page, if it is mapped or will be by the next
    /// [`map_pending`](Self::map_pending); otherwise it must be copied. The caller holds the slot
    /// until it [releases](Self::release) it.
    #[inline]
    pub fn lookup(&mut self, gref: GrantRef, access: Access) -> Option<Slot> {
        if self.mode != Mode::Persistent && self.cache.is_empty() {
            return self.map_transient(gref);
        }
        match self.cache.lookup(gref, access, self.mode == Mode::Persistent) {
            LookupResult::Hit(slot) => {
                self.counters.hits += 1;
                Some(slot)
            }
            LookupResult::New { slot, evicted } => {
                self.counters.misses += 1;
                self.replace(slot, evicted, gref);
                Some(slot)
            }
            LookupResult::Miss => self.map_transient(gref),
        }
    }

    fn map_transient(&mut self, gref: GrantRef) -> Option<Slot> {
        self.counters.misses += 1;
        if self.mode != Mode::Map {
            return None;
        }
        let slot = self.cache.alloc_transient()?;
        self.pending.push((usize::from(slot), gref));
        Some(slot)
    }

    fn replace(&mut self, slot: Slot, evicted: bool, gref: GrantRef) {
        if evicted {
            self.counters.evicted += 1;
            self.stale.push(usize::from(slot));
        }
        self.pending.push((usize::from(slot), gref));
    }

    /// Maps the pages that look-ups gave new slots; returns false if some could not be mapped, for
    /// which [`is_poisoned`](Self::is_poisoned) is then true.
    #[inline]
    pub fn map_pending(&mut self, access: Access) -> bool {
        self.pending.is_empty() || self.map_pending_slow(access)
    }

    #[inline(never)]
    fn map_pending_slow(&mut self, access: Access) -> bool {
        self.unmap_stale();
        self.mapped.clear();
        // Sorted slots let one hypercall map neighbours; free slots come back in any order.
        self.pending.sort_unstable_by_key(|(slot, _)| *slot);
        self.foreign.map(&mut self.window, &self.pending, access, &mut self.mapped);
        let mut all = true;
        for (i, (slot, _)) in self.pending.iter().enumerate() {
            // A page without a result was not mapped.
            if self.mapped.get(i) == Some(&true) {
                self.counters.mapped += 1;
            } else {
                self.counters.failed += 1;
                self.cache.poison(*slot as Slot);
                all = false;
            }
        }
        self.pending.clear();
        all
    }

    /// Unmaps the pages whose slots were given to others.
    fn unmap_stale(&mut self) {
        if !self.stale.is_empty() {
            self.stale.sort_unstable();
            self.foreign.unmap(&mut self.window, &self.stale);
            self.stale.clear();
        }
    }

    /// Returns true if the page of a slot from a look-up could not be mapped.
    pub fn is_poisoned(&self, slot: Slot) -> bool {
        self.cache.is_poisoned(slot)
    }

    /// Returns bytes of a page for reading; `None` when it is not mapped (yet), or they are not all
    /// inside.
    #[inline(always)]
    pub fn read(&self, slot: Slot, offset: u16, len: usize) -> Option<ReadSlice<'_>> {
        self.window.read(usize::from(slot), usize::from(offset), len)
    }

    /// Returns the first bytes of a page for writing; `None` when it is not mapped for that.
    #[inline(always)]
    pub fn write(&self, slot: Slot, len: usize) -> Option<WriteSlice<'_>> {
        self.window.write(usize::from(slot), 0, len)
    }

    /// Releases a slot. A page mapped for one burst is unmapped by the next [`sweep`](Self::sweep).
    #[inline]
    pub fn release(&mut self, slot: Slot) {
        if self.cache.release(slot) {
            self.released.push(usize::from(slot));
        }
    }

    /// Unmaps the pages whose slots are not needed any more.
    #[inline]
    pub fn sweep(&mut self) {
        if !self.released.is_empty() {
            self.unmap_released();
        }
    }

    #[inline(never)]
    fn unmap_released(&mut self) {
        let Self { released, window, cache, foreign, .. } = self;
        // Slots whose page could not be mapped are freed at once.
        released.retain(|slot| {
            let mapped = window.is_mapped(*slot);
            if !mapped {
                cache.free(*slot as Slot);
            }
            mapped
        });
        if released.is_empty() {
            return;
        }
        // Sorted slots suit providers that unmap runs at once.
        released.sort_unstable();
        foreign.unmap(window, released);
        for slot in released.drain(..) {
            // A page that could not be unmapped keeps its slot.
            if !window.is_mapped(slot) {
                cache.free(slot as Slot);
            }
        }
    }

    /// Copies every segment in one batch, and calls `done` for each in order with its success.
    pub fn copy<'a>(
        &mut self,
        segments: impl Iterator<Item = CopySegment<'a>>,
        mut done: impl FnMut(usize, bool),
    ) {
        let mut batch = recycle(self.segments.take());
        batch.extend(segments);
        if !batch.is_empty() {
            // A call that fails as a whole may have copied some: each segment has its own result.
            let _ = self.foreign.copy(&mut batch);
        }
        self.counters.copies += batch.len() as u64;
        for (i, segment) in batch.iter().enumerate() {
            if segment.done {
                self.counters.copied_bytes += local_len(&segment.local) as u64;
            }
            done(i, segment.done);
        }
        self.segments.put(recycle(batch));
    }

    /// Maps a list of static grants, all of them or none.
    ///
    /// # Errors
    /// [`Status::InvalidParameter`] for a page that is static already, is in use, is twice in the
    /// list or cannot be mapped; [`Status::BufferOverflow`] when there are not enough slots.
    pub fn add_static(&mut self, entries: &[GrefEntry]) -> Result<(), Status> {
        let mut added = Vec::with_capacity(entries.len());
        let mut result = Ok(());
        for entry in entries {
            let access = if entry.readonly { Access::Read } else { Access::Write };
            match self.cache.pin(entry.gref, access) {
                Ok(LookupResult::New { slot, evicted }) => {
                    added.push((slot, entry.gref, access));
                    if evicted {
                        self.counters.evicted += 1;
                        self.stale.push(usize::from(slot));
                    }
                }
                Ok(LookupResult::Hit(_) | LookupResult::Miss) => {}
                Err(PinError::Full) => result = Err(Status::BufferOverflow),
                Err(PinError::State | PinError::InUse) => result = Err(Status::InvalidParameter),
            }
            if result.is_err() {
                break;
            }
        }
        self.unmap_stale();
        if result.is_ok() {
            for access in [Access::Read, Access::Write] {
                let batch = added.iter().filter(|(.., how)| *how == access);
                self.pending.extend(batch.map(|(slot, gref, _)| (usize::from(*slot), *gref)));
                if !self.map_pending(access) {
                    result = Err(Status::InvalidParameter);
                }
            }
        }
        if result.is_err() {
            for (slot, ..) in added {
                self.cache.poison(slot);
                self.released.push(usize::from(slot));
            }
            self.sweep();
        }
        result
    }

    /// Unmaps static grants and sets the status of each entry; returns how many were unmapped. A
    /// page that a burst uses stays mapped.
    pub fn remove_static(&mut self, entries: &mut [GrefEntry]) -> u32 {
        let mut removed = 0;
        for entry in entries {
            entry.status = match self.cache.unpin(entry.gref) {
                Ok(slot) => {
                    self.released.push(usize::from(slot));
                    removed += 1;
                    Status::Success
                }
                Err(_) => Status::InvalidParameter,
            };
        }
        self.sweep();
        removed
    }
}

impl Drop for Pages {
    /// Unmaps everything, because the front end may reuse its pages as soon as it learns that we
    /// closed.
    fn drop(&mut self) {
        let mapped: Vec<_> = (0..self.window.slots()).filter(|slot| self.window.is_mapped(*slot)).collect();
        if !mapped.is_empty() {
            self.foreign.unmap(&mut self.window, &mapped);
        }
    }
}

fn local_len(local: &Local<'_>) -> usize {
    match local {
        Local::To(slice) => slice.len(),
        Local::From(slice) => slice.len(),
    }
}

/// Returns an empty batch that reuses the storage of the last one, whatever memory that one
/// borrowed. Collecting an emptied vector's iterator in place keeps its allocation.
fn recycle<'a>(mut batch: Vec<CopySegment<'_>>) -> Vec<CopySegment<'a>> {
    batch.clear();
    let empty =
        |_| CopySegment { gref: GrantRef(0), offset: 0, local: Local::From(ReadSlice::EMPTY), done: false };
    batch.into_iter().map(empty).collect()
}

/// Creates a segment of a batch, which must lie within its page.
pub fn segment(gref: GrantRef, offset: u16, local: Local<'_>) -> CopySegment<'_> {
    debug_assert!(usize::from(offset) + local_len(&local) <= PAGE);
    CopySegment { gref, offset, local, done: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_reuses_the_storage_of_the_last_one() {
        let mut bytes = [0; 8];
        let mut batch: Vec<CopySegment<'_>> = Vec::with_capacity(64);
        let storage = batch.as_ptr().addr();
        batch.push(segment(GrantRef(1), 0, Local::To(WriteSlice::from(&mut bytes[..]))));
        let next: Vec<CopySegment<'static>> = recycle(batch);
        assert!(next.is_empty());
        assert_eq!((next.capacity(), next.as_ptr().addr()), (64, storage));
    }
}
