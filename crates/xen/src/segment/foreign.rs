//! [`SegmentForeign`]: mapping and copying pages that a peer granted in segments. A provider
//! creates one per queue with a [`Lookup`] of the peer's references, and the queue uses it on its
//! thread.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ringferry_memory::{ReadSlice, Region, Window, WriteSlice};
use smallvec::SmallVec;

use crate::domain::{DomId, PAGE};
use crate::grant::{Access, CopySegment, Foreign, ForeignCounters, GrantError, GrantRef, Local};

use super::Segment;

/// A counted use of a page by a mapping or a copy, dropped after that has ended.
#[derive(Debug)]
struct PageUse {
    segment: Arc<Segment>,
    page: usize,
}

impl PageUse {
    fn new(segment: &Arc<Segment>, page: usize, access: Access) -> Option<PageUse> {
        segment.begin_use(page, access).then(|| PageUse { segment: Arc::clone(segment), page })
    }

    /// Returns true if `self` is the page after `other`, in the same file.
    fn follows(&self, other: &PageUse) -> bool {
        Arc::ptr_eq(&self.segment, &other.segment) && self.page == other.page + 1
    }
}

impl Drop for PageUse {
    fn drop(&mut self) {
        self.segment.end_use(self.page);
    }
}

fn same_segment(one: &Option<PageUse>, other: &Option<PageUse>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(&one.segment, &other.segment),
        _ => false,
    }
}

/// The uses of a window's slots, kept in the window.
#[derive(Debug, Default)]
struct SlotUses {
    slots: Vec<Option<PageUse>>,
}

impl SlotUses {
    fn slot(&mut self, slot: usize) -> &mut Option<PageUse> {
        if slot >= self.slots.len() {
            self.slots.resize_with(slot + 1, || None);
        }
        &mut self.slots[slot]
    }
}

/// The purpose of looking up a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The page is to be mapped.
    Map,
    /// The page is to be copied from or to.
    Copy,
}

/// Finds the segments of a peer's references.
pub trait Lookup: Send + fmt::Debug {
    /// Returns the segment and page of a reference that was granted to this domain; its grant may
    /// have ended.
    fn find(&mut self, gref: GrantRef, what: Use) -> Option<(&Arc<Segment>, usize)>;

    /// Checks before each batch of copies that the peer still exists.
    ///
    /// # Errors
    /// The peer's domain is gone.
    fn alive(&mut self) -> io::Result<()>;
}

/// Access to another domain's pages in segments.
#[derive(Debug)]
pub struct SegmentForeign<L> {
    domain: DomId,
    lookup: L,
    counters: ForeignCounters,
    /// Uses of pages by the copy in progress; empty between two copies, and kept to reuse its
    /// memory.
    pins: Vec<Option<PageUse>>,
}

impl<L: Lookup> SegmentForeign<L> {
    /// Creates the access to pages of `domain`, found by `lookup`.
    pub fn new(domain: DomId, lookup: L) -> Self {
        Self { domain, lookup, counters: ForeignCounters::default(), pins: Vec::new() }
    }

    fn pin(&mut self, gref: GrantRef, what: Use, access: Access) -> Option<PageUse> {
        let (segment, page) = self.lookup.find(gref, what)?;
        PageUse::new(segment, page, access)
    }

    /// Maps consecutive pages of a file to consecutive slots; returns true on success.
    fn map_run(&mut self, window: &mut Window, slot: usize, run: &mut Vec<PageUse>, access: Access) -> bool {
        let first = &run[0];
        let offset = (first.page * PAGE) as u64;
        let fd = first.segment.files.data.as_fd();
        self.counters.calls += 1;
        let done = window.map_populated(slot, run.len(), fd, offset, access == Access::Write);
        if done.is_ok() {
            self.counters.mapped += run.len() as u64;
            let uses: &mut SlotUses = window.keep();
            for (at, pin) in run.drain(..).enumerate() {
                *uses.slot(slot + at) = Some(pin);
            }
        }
        run.clear();
        done.is_ok()
    }

    /// Copies segments that are consecutive in a file, all in one direction, in one call. Segments
    /// that were copied completely are marked.
    fn copy_run(&mut self, run: &mut [CopySegment<'_>], fd: BorrowedFd<'_>, at: u64) {
        self.counters.calls += 1;
        let copied = match run[0].local {
            Local::To(_) => {
                let to: SmallVec<[_; USUAL_RUN]> =
                    run.iter().filter_map(|segment| segment.local.to()).collect();
                ringferry_sys::copy::read_at(fd, &to, at)
            }
            Local::From(_) => {
                let from: SmallVec<[_; USUAL_RUN]> =
                    run.iter().filter_map(|segment| segment.local.from()).collect();
                ringferry_sys::copy::write_at(fd, &from, at)
            }
        };
        let Ok(mut left) = copied else { return };
        for segment in run {
            let len = segment.local.len();
            if len > left {
                return;
            }
            left -= len;
            segment.done = true;
            self.counters.copies += 1;
            self.counters.copied_bytes += len as u64;
        }
    }
}

/// Most segments that one call copies.
const MAX_RUN: usize = 64;

/// Number of segments of a run that need no allocation: those of a packet of the greatest length.
const USUAL_RUN: usize = 18;

impl<'a> Local<'a> {
    fn len(&self) -> usize {
        match self {
            Local::To(bytes) => bytes.len(),
            Local::From(bytes) => bytes.len(),
        }
    }

    /// Returns the access that the peer's grant must allow.
    fn access(&self) -> Access {
        match self {
            Local::To(_) => Access::Read,
            Local::From(_) => Access::Write,
        }
    }

    fn to(&self) -> Option<WriteSlice<'a>> {
        match self {
            Local::To(bytes) => Some(*bytes),
            Local::From(_) => None,
        }
    }

    fn from(&self) -> Option<ReadSlice<'a>> {
        match self {
            Local::To(_) => None,
            Local::From(bytes) => Some(*bytes),
        }
    }
}

impl<L: Lookup> Foreign for SegmentForeign<L> {
    fn domain(&self) -> DomId {
        self.domain
    }

    fn map_region(&mut self, refs: &[GrantRef]) -> Result<Arc<Region>, GrantError> {
        let mut window = Window::reserve(refs.len())?;
        let pages: Vec<_> = refs.iter().copied().enumerate().collect();
        let mut mapped = Vec::new();
        self.map(&mut window, &pages, Access::Write, &mut mapped);
        if let Some(bad) = mapped.iter().position(|mapped| !mapped) {
            return Err(GrantError::BadRef(refs[bad]));
        }
        window.into_region().map_err(|_| GrantError::BadRef(refs[0]))
    }

    fn map(
        &mut self,
        window: &mut Window,
        pages: &[(usize, GrantRef)],
        access: Access,
        mapped: &mut Vec<bool>,
    ) {
        mapped.clear();
        let mut run: Vec<PageUse> = Vec::new();
        let mut start = 0;
        for (at, (slot, gref)) in pages.iter().enumerate() {
            // A slot that the run is about to take is in use as well: such a page must not join the next run and
            // make all of it fail.
            let in_run = (start..start + run.len()).contains(slot);
            let free = *slot < window.slots() && !window.is_mapped(*slot) && !in_run;
            let pin = if free { self.pin(*gref, Use::Map, access) } else { None };
            let fits = match (run.last(), &pin) {
                (Some(last), Some(pin)) => *slot == start + run.len() && pin.follows(last),
                _ => false,
            };
            if !fits && !run.is_empty() {
                let len = run.len();
                let done = self.map_run(window, start, &mut run, access);
                mapped[at - len..].fill(done);
            }
            mapped.push(false);
            if let Some(pin) = pin {
                if run.is_empty() {
                    start = *slot;
                }
                run.push(pin);
            }
        }
        if !run.is_empty() {
            let len = run.len();
            let done = self.map_run(window, start, &mut run, access);
            mapped[pages.len() - len..].fill(done);
        }
    }

    fn unmap(&mut self, window: &mut Window, slots: &[usize]) {
        for run in slots.chunk_by(|slot, next| slot.checked_add(1) == Some(*next)) {
            let (first, len) = (run[0], run.len());
            self.counters.calls += 1;
            if let Err(error) = window.unmap(first, len) {
                tracing::warn!("pages of domain {} stay mapped: {error}", self.domain);
                continue;
            }
            let uses: &mut SlotUses = window.keep();
            let gone = run.iter().filter(|slot| uses.slot(**slot).take().is_some()).count();
            self.counters.unmapped += gone as u64;
        }
    }

    fn copy(&mut self, segments: &mut [CopySegment<'_>]) -> io::Result<()> {
        let outside = |segment: &CopySegment<'_>| usize::from(segment.offset) + segment.local.len() > PAGE;
        if segments.iter().any(outside) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a copy crosses the end of its page"));
        }
        segments.iter_mut().for_each(|segment| segment.done = false);
        self.lookup.alive()?;
        // Each page counts as in use until the batch is done, so that a peer that ends its grant
        // meanwhile learns of it.
        let mut pins = std::mem::take(&mut self.pins);
        pins.extend(segments.iter().map(|segment| self.pin(segment.gref, Use::Copy, segment.local.access())));
        let place = |at: usize, segment: &CopySegment<'_>, pins: &[Option<PageUse>]| {
            pins[at].as_ref().map(|pin| pin.page * PAGE + usize::from(segment.offset))
        };
        let mut first = 0;
        while first < segments.len() {
            let Some(start) = place(first, &segments[first], &pins) else {
                first += 1;
                continue;
            };
            let mut end = first + 1;
            let mut next = start + segments[first].local.len();
            while end < segments.len().min(first + MAX_RUN)
                && segments[end].local.access() == segments[first].local.access()
                && place(end, &segments[end], &pins) == Some(next)
                && same_segment(&pins[first], &pins[end])
            {
                next += segments[end].local.len();
                end += 1;
            }
            if let Some(pin) = &pins[first] {
                self.copy_run(&mut segments[first..end], pin.segment.files.data.as_fd(), start as u64);
            }
            first = end;
        }
        pins.clear();
        self.pins = pins;
        Ok(())
    }

    fn counters(&self) -> ForeignCounters {
        self.counters
    }
}
