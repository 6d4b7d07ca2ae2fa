//! A queue's way to the front end's pages: mapped into a [`Window`], for one burst or for longer, or copied.
//!
//! One [`Pages`] serves both rings of a queue, so that neither direction's slots lie idle while the other lacks some.
//! Work is collected for a burst and then done at once: look every page up ([`find`](Pages::find)), map what is new
//! ([`settle`](Pages::settle)), copy what was not mapped ([`copy`](Pages::copy)).

use std::io;

use ringferry_memory::{ReadSlice, Spare, Window, WriteSlice};
use ringferry_xen::domain::PAGE;
use ringferry_xen::grant::{Access, CopySegment, Foreign, ForeignCounters, GrantRef, Local};
use ringferry_xen::netif::control::{GrefEntry, Status};

use super::cache::{Cache, Found, Slot, Unfit};

/// How a queue reaches pages that the front end did not ask to have kept mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The hypervisor copies.
    Copy,
    /// Each page is mapped for one burst.
    Map,
    /// Pages stay mapped: the front end has promised that a reference means the same page until it disconnects.
    Persistent,
}

/// What was done with the front end's pages since the queue was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounters {
    /// Uses of pages that were mapped already.
    pub hits: u64,
    /// Uses of pages that were not.
    pub misses: u64,
    /// Pages mapped.
    pub mapped: u64,
    /// Mappings replaced by others.
    pub evicted: u64,
    /// Pages that could not be mapped.
    pub failed: u64,
    /// Pieces that the hypervisor copied.
    pub copies: u64,
    /// Bytes in them.
    pub copied_bytes: u64,
}

/// The pages of a queue.
#[derive(Debug)]
pub struct Pages {
    foreign: Box<dyn Foreign>,
    window: Window,
    cache: Cache,
    mode: Mode,
    /// Slots whose pages were replaced, and by what: for the next [`settle`](Self::settle).
    stale: Vec<usize>,
    wanted: Vec<(usize, GrantRef)>,
    mapped: Vec<bool>,
    /// Slots that have nothing to hold any more: for the next [`sweep`](Self::sweep).
    released: Vec<usize>,
    /// Storage of the last batch.
    segments: Spare<CopySegment<'static>>,
    counters: PageCounters,
}

impl Pages {
    /// Reaches the pages behind `foreign`; at most `slots` of them are mapped at a time.
    ///
    /// # Errors
    /// No addresses are left for the window.
    pub fn new(foreign: Box<dyn Foreign>, mode: Mode, slots: usize) -> io::Result<Self> {
        let slots = slots.clamp(1, super::cache::MAX_SLOTS);
        Ok(Self {
            foreign,
            window: Window::reserve(slots)?,
            cache: Cache::new(slots),
            mode,
            stale: Vec::new(),
            wanted: Vec::new(),
            mapped: Vec::new(),
            released: Vec::new(),
            segments: Spare::default(),
            counters: PageCounters::default(),
        })
    }

    /// What was done so far.
    pub fn counters(&self) -> PageCounters {
        self.counters
    }

    /// What the provider of the grants was asked to do.
    pub fn foreign_counters(&self) -> ForeignCounters {
        self.foreign.counters()
    }

    /// Pages kept mapped: learned ones, and those the front end asked for.
    pub fn held(&self) -> (usize, usize) {
        self.cache.held()
    }

    /// Most pages that can be kept mapped.
    pub fn capacity(&self) -> usize {
        self.window.slots()
    }

    /// The slot of a page, if it is mapped or will be with the next [`settle`](Self::settle); otherwise it must be copied.
    /// The slot is the caller's until it is [released](Self::release).
    #[inline]
    pub fn find(&mut self, gref: GrantRef, access: Access) -> Option<Slot> {
        if self.mode != Mode::Persistent && self.cache.is_empty() {
            return self.pass(gref);
        }
        match self.cache.find(gref, access, self.mode == Mode::Persistent) {
            Found::Hit(slot) => {
                self.counters.hits += 1;
                Some(slot)
            }
            Found::New { slot, evicted } => {
                self.counters.misses += 1;
                self.replace(slot, evicted, gref);
                Some(slot)
            }
            Found::Miss => self.pass(gref),
        }
    }

    fn pass(&mut self, gref: GrantRef) -> Option<Slot> {
        self.counters.misses += 1;
        if self.mode != Mode::Map {
            return None;
        }
        let slot = self.cache.pass()?;
        self.wanted.push((usize::from(slot), gref));
        Some(slot)
    }

    fn replace(&mut self, slot: Slot, evicted: bool, gref: GrantRef) {
        if evicted {
            self.counters.evicted += 1;
            self.stale.push(usize::from(slot));
        }
        self.wanted.push((usize::from(slot), gref));
    }

    /// Maps what was found to be new; false when some could not be, which [`is_lost`](Self::is_lost) then tells.
    #[inline]
    pub fn settle(&mut self, access: Access) -> bool {
        self.wanted.is_empty() || self.map_wanted(access)
    }

    #[inline(never)]
    fn map_wanted(&mut self, access: Access) -> bool {
        self.unmap_stale();
        self.mapped.clear();
        // Neighbours side by side: one call of the hypervisor maps them all. Free slots come back in any order.
        self.wanted.sort_unstable_by_key(|(slot, _)| *slot);
        self.foreign.map(&mut self.window, &self.wanted, access, &mut self.mapped);
        let mut all = true;
        for (i, (slot, _)) in self.wanted.iter().enumerate() {
            // A provider that forgets an answer has not mapped the page.
            if self.mapped.get(i) == Some(&true) {
                self.counters.mapped += 1;
            } else {
                self.counters.failed += 1;
                self.cache.fail(*slot as Slot);
                all = false;
            }
        }
        self.wanted.clear();
        all
    }

    /// Unmaps what others take the place of.
    fn unmap_stale(&mut self) {
        if !self.stale.is_empty() {
            self.stale.sort_unstable();
            self.foreign.unmap(&mut self.window, &self.stale);
            self.stale.clear();
        }
    }

    /// Whether a slot that was found is one into which nothing could be mapped.
    pub fn is_lost(&self, slot: Slot) -> bool {
        self.cache.is_lost(slot)
    }

    /// Bytes of a page, for reading; `None` when it is not mapped (yet), or they are not all inside.
    #[inline(always)]
    pub fn read(&self, slot: Slot, offset: u16, len: usize) -> Option<ReadSlice<'_>> {
        self.window.read(usize::from(slot), usize::from(offset), len)
    }

    /// The first bytes of a page, for writing; `None` when it is not mapped for that.
    #[inline(always)]
    pub fn write(&self, slot: Slot, len: usize) -> Option<WriteSlice<'_>> {
        self.window.write(usize::from(slot), 0, len)
    }

    /// Gives a slot back. A page mapped for one burst is unmapped by the next [`sweep`](Self::sweep).
    #[inline]
    pub fn release(&mut self, slot: Slot) {
        if self.cache.release(slot) {
            self.released.push(usize::from(slot));
        }
    }

    /// Unmaps what was released.
    #[inline]
    pub fn sweep(&mut self) {
        if !self.released.is_empty() {
            self.unmap_released();
        }
    }

    #[inline(never)]
    fn unmap_released(&mut self) {
        let Self { released, window, cache, foreign, .. } = self;
        // Into some of them nothing could be mapped.
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
        // Neighbours side by side, for providers that unmap runs of slots at once.
        released.sort_unstable();
        foreign.unmap(window, released);
        for slot in released.drain(..) {
            // A page that the system did not let go keeps its slot.
            if !window.is_mapped(slot) {
                cache.free(slot as Slot);
            }
        }
    }

    /// Copies every segment in one batch; `done` hears of each, in order, whether it was.
    pub fn copy<'a>(
        &mut self,
        segments: impl Iterator<Item = CopySegment<'a>>,
        mut done: impl FnMut(usize, bool),
    ) {
        let mut batch = recycle(self.segments.take());
        batch.extend(segments);
        if !batch.is_empty() {
            // A call that fails as a whole may have done some: each says so.
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

    /// Keeps a list of pages mapped, or none of it.
    ///
    /// # Errors
    /// [`Status::InvalidParameter`] for a page that is kept already, is in use, is twice in the list or cannot be
    /// mapped; [`Status::BufferOverflow`] when there are not so many slots.
    pub fn add_static(&mut self, entries: &[GrefEntry]) -> Result<(), Status> {
        let mut added = Vec::with_capacity(entries.len());
        let mut result = Ok(());
        for entry in entries {
            let access = if entry.readonly { Access::Read } else { Access::Write };
            match self.cache.fix(entry.gref, access) {
                Ok(Found::New { slot, evicted }) => {
                    added.push((slot, entry.gref, access));
                    if evicted {
                        self.counters.evicted += 1;
                        self.stale.push(usize::from(slot));
                    }
                }
                Ok(Found::Hit(_) | Found::Miss) => {}
                Err(Unfit::Full) => result = Err(Status::BufferOverflow),
                Err(Unfit::State | Unfit::InUse) => result = Err(Status::InvalidParameter),
            }
            if result.is_err() {
                break;
            }
        }
        self.unmap_stale();
        if result.is_ok() {
            for access in [Access::Read, Access::Write] {
                let wanted = added.iter().filter(|(.., how)| *how == access);
                self.wanted.extend(wanted.map(|(slot, gref, _)| (usize::from(*slot), *gref)));
                if !self.settle(access) {
                    result = Err(Status::InvalidParameter);
                }
            }
        }
        if result.is_err() {
            for (slot, ..) in added {
                self.cache.fail(slot);
                self.released.push(usize::from(slot));
            }
            self.sweep();
        }
        result
    }

    /// Lets go of pages that the front end asked to be kept, and writes into each entry what became of it. Returns how many
    /// were unmapped. One that a burst uses stays.
    pub fn remove_static(&mut self, entries: &mut [GrefEntry]) -> u32 {
        let mut removed = 0;
        for entry in entries {
            entry.status = match self.cache.unfix(entry.gref) {
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
    /// Unmaps everything: the front end may reuse its pages as soon as it hears that we are gone.
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

/// The storage of a batch for the next one, whatever memory that one borrows. Collecting an emptied vector's
/// iterator in place keeps its allocation.
fn recycle<'a>(mut batch: Vec<CopySegment<'_>>) -> Vec<CopySegment<'a>> {
    batch.clear();
    let empty =
        |_| CopySegment { gref: GrantRef(0), offset: 0, local: Local::From(ReadSlice::EMPTY), done: false };
    batch.into_iter().map(empty).collect()
}

/// A segment of a batch.
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
