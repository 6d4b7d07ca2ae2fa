//! [`Arena`]: the memory that a front end shares, with rings and buffers, granted from the
//! beginning until the end.
//!
//! The xenbus front-end driver creates it when it connects, queues allocate nothing later, and the
//! control thread ends it after all queues in it were dropped. [`GrantMap`] is shared read-only
//! with the queues' threads.

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, MemoryError};
use ringferry_xen::domain::{DomId, PAGE};
use ringferry_xen::grant::{Access, GrantError, GrantRef, GrantTable, Granted};

/// The reason why an arena cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The pages could not be granted.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// The grant provider put two regions at the same address.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The grant provider returned other pages than were requested.
    #[error("the grant table gave {refs} grants for {bytes} bytes, where {pages} pages were asked for")]
    Provider {
        /// Number of pages that were requested.
        pages: usize,
        /// Number of references that were returned.
        refs: usize,
        /// Number of bytes that were returned.
        bytes: u64,
    },
}

/// Contiguous pages, with the grant of each.
#[derive(Debug)]
struct Run {
    start: u64,
    len: u64,
    refs: Box<[GrantRef]>,
    access: Access,
}

impl Run {
    /// Returns the grant of the page that an address lies in, and the offset in the page, if it is
    /// in this run.
    #[inline(always)]
    fn find(&self, addr: u64) -> Option<(GrantRef, u16)> {
        let at = addr.wrapping_sub(self.start);
        let gref = *self.refs.get((at / PAGE as u64) as usize)?;
        Some((gref, (at % PAGE as u64) as u16))
    }
}

/// The map from address to grant. It never changes while the interface is open, so all queues share
/// it: a packet that one has received another can send.
#[derive(Debug)]
pub struct GrantMap {
    runs: Box<[Run]>,
}

impl GrantMap {
    /// Returns the grant of the page that `addr` lies in, and the offset in the page; `None` if the
    /// address is not shared. `hint` is the run of the caller's last look-up, and is updated.
    #[inline]
    pub fn find(&self, addr: u64, hint: &mut usize) -> Option<(GrantRef, u16)> {
        if let Some(found) = self.runs.get(*hint).and_then(|run| run.find(addr)) {
            return Some(found);
        }
        self.search(addr, hint)
    }

    #[cold]
    fn search(&self, addr: u64, hint: &mut usize) -> Option<(GrantRef, u16)> {
        let (at, found) = self.runs.iter().enumerate().find_map(|(at, run)| Some((at, run.find(addr)?)))?;
        *hint = at;
        Some(found)
    }

    /// Returns the grants of the pages from `addr` on with their access, for registering them with
    /// the back end.
    pub fn grants(&self, addr: u64, pages: usize) -> impl Iterator<Item = (GrantRef, Access)> {
        let run = self.runs.iter().find(|run| run.find(addr).is_some());
        let first = run.map_or(0, |run| ((addr - run.start) / PAGE as u64) as usize);
        run.into_iter()
            .flat_map(move |run| run.refs.iter().skip(first).take(pages).map(|gref| (*gref, run.access)))
    }
}

/// A request for contiguous pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Number of pages to grant.
    pub count: usize,
    /// Access that the back end gets to the pages.
    pub access: Access,
}

/// The memory of an interface. Dropping it ends all grants; the queues in it must be dropped
/// before.
#[derive(Debug)]
pub struct Arena {
    granted: Vec<Box<dyn Granted>>,
    memory: Arc<GuestMemory>,
    map: Arc<GrantMap>,
    starts: Box<[u64]>,
}

impl Arena {
    /// Grants pages to the domain `to`, those of each item contiguously.
    ///
    /// # Errors
    /// Any [`ArenaError`]; nothing stays granted.
    pub fn new(table: &mut dyn GrantTable, to: DomId, pages: &[Pages]) -> Result<Self, ArenaError> {
        let mut granted = Vec::with_capacity(pages.len());
        let mut runs = Vec::with_capacity(pages.len());
        for &Pages { count, access } in pages {
            let new = table.grant(to, count, access)?;
            let spec = *new.region().spec();
            if new.refs().len() != count || spec.size != (count * PAGE) as u64 {
                return Err(ArenaError::Provider { pages: count, refs: new.refs().len(), bytes: spec.size });
            }
            runs.push(Run { start: spec.guest_addr, len: spec.size, refs: new.refs().into(), access });
            granted.push(new);
        }
        let regions = granted.iter().map(|granted| Arc::clone(granted.region())).collect();
        let memory = Arc::new(GuestMemory::new(regions)?);
        let starts = runs.iter().map(|run| run.start).collect();
        Ok(Self { granted, memory, map: Arc::new(GrantMap { runs: runs.into() }), starts })
    }

    /// Returns the address at which the pages of the `index`-th item begin.
    pub fn start(&self, index: usize) -> u64 {
        self.starts[index]
    }

    /// Returns the memory map of the whole arena.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Returns the map from address to grant.
    pub fn map(&self) -> &Arc<GrantMap> {
        &self.map
    }

    /// Returns a whole page, for a ring or a list, with its grant; `None` if `addr` is not the
    /// beginning of one.
    pub fn page(&self, addr: u64) -> Option<(Area, GrantRef)> {
        let (gref, 0) = self.map.find(addr, &mut 0)? else { return None };
        Some((self.memory.area(addr, PAGE)?, gref))
    }

    /// Returns the number of pages that are granted.
    pub fn pages(&self) -> usize {
        self.map.runs.iter().map(|run| (run.len / PAGE as u64) as usize).sum()
    }

    /// Ends all grants. Returns how many pages the back end still has mapped, as far as that can be
    /// known; those are not reused before it unmaps them (XSA-396).
    pub fn end(self) -> usize {
        let Self { granted, memory, .. } = self;
        // Some providers can end a grant only once the page is not mapped here either.
        drop(memory);
        granted.into_iter().map(Granted::end).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringferry_xen::domain::Domain;
    use ringferry_xen_sim::fake::{Fake, Op};

    const PAGE64: u64 = PAGE as u64;

    fn arena(fake: &Fake, pages: &[Pages]) -> Result<Arena, ArenaError> {
        let mut table = fake.domain(DomId(1)).grants().unwrap();
        Arena::new(&mut *table, DomId(0), pages)
    }

    fn pages(count: usize, access: Access) -> Pages {
        Pages { count, access }
    }

    #[test]
    fn every_address_has_the_grant_of_its_page_and_no_other_has_any() {
        let fake = Fake::new();
        let items = [pages(2, Access::Write), pages(5, Access::Read), pages(1, Access::Write)];
        let arena = arena(&fake, &items).unwrap();
        assert_eq!((arena.pages(), fake.granted_pages()), (8, 8));
        let mut seen = Vec::new();
        for (index, item) in items.iter().enumerate() {
            let start = arena.start(index);
            for page in 0..item.count as u64 {
                for at in [0, 1, PAGE64 - 1] {
                    // The result does not depend on the hint.
                    for mut hint in 0..4 {
                        let (gref, offset) = arena.map().find(start + page * PAGE64 + at, &mut hint).unwrap();
                        assert_eq!((u64::from(offset), hint), (at, index));
                        seen.push(gref);
                    }
                }
            }
            // Behind its last page anything may be mapped, another item, too.
            let mut grants = arena.map().grants(start + (item.count as u64 - 1) * PAGE64, 100);
            assert!(grants.all(|(_, access)| access == item.access));
        }
        seen.dedup();
        assert_eq!(seen.len(), 8);
        let ends: Vec<_> =
            items.iter().enumerate().map(|(i, item)| arena.start(i) + item.count as u64 * PAGE64).collect();
        let starts: Vec<_> = (0..items.len()).map(|i| arena.start(i)).collect();
        let outside =
            |addr: &u64| !starts.iter().zip(&ends).any(|(start, end)| (*start..*end).contains(addr));
        let around = starts.iter().map(|start| start - 1).chain(ends.iter().copied()).chain([0, u64::MAX]);
        for addr in around.filter(outside) {
            assert_eq!(arena.map().find(addr, &mut 0), None, "{addr:#x}");
        }
        assert!(arena.page(arena.start(1)).is_some() && arena.page(arena.start(1) + 1).is_none());
        assert_eq!(arena.end(), 0);
        fake.assert_nothing_left();
    }

    #[test]
    fn an_arena_is_granted_as_a_whole_or_not_at_all() {
        let fake = Fake::new();
        fake.fail(DomId(1), Op::Grant, 2);
        let refused = arena(&fake, &[pages(3, Access::Read); 3]);
        assert!(matches!(refused, Err(ArenaError::Grant(_))));
        fake.assert_nothing_left();
    }

    #[test]
    fn xsa_396_pages_that_are_still_mapped_are_told() {
        let fake = Fake::new();
        let arena = arena(&fake, &[pages(4, Access::Write)]).unwrap();
        let refs: Vec<_> = arena.map().grants(arena.start(0), 4).map(|(gref, _)| gref).collect();
        let mut foreign = fake.domain(DomId(0)).foreign(DomId(1)).unwrap();
        let kept = foreign.map_region(&refs[1..3]).unwrap();
        assert_eq!(arena.end(), 2);
        drop(kept);
        fake.assert_nothing_left();
    }
}
