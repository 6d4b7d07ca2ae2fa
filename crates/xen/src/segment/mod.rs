//! Grants whose pages lie in memfds: what the process provider and the fake have in common.
//!
//! Pages granted in one call are a [`Segment`]: a memfd of exactly these pages, so whoever may map one may map all and no
//! other, and a second one with a word per page, shared by all who may use them. The word is what an entry of a grant
//! table is to Xen: using the page and ending its grant are decided by one atomic operation each, so an end
//! either is seen or sees (XSA-396). Nothing in it has to be trusted: memory that was granted is never used for
//! anything else, and the kernel frees it when the last mapping and descriptor are gone, whatever the words say.

mod foreign;
mod granted;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ringferry_memory::{Counters, Region, SharedMem};

use crate::domain::{DomId, PAGE};
use crate::grant::{Access, GrantRef};

pub use foreign::{Lookup, SegmentForeign, Use};
pub use granted::SegmentGranted;

/// Of a page's word: the grant has ended. The other bits count the uses: mappings, and copies under way.
const ENDED: u32 = 1 << 31;

/// Pages that were granted together.
#[derive(Debug)]
pub struct Segment {
    first: GrantRef,
    count: usize,
    to: DomId,
    access: Access,
    files: Files,
    words: Counters,
}

/// The two files of a segment.
#[derive(Debug)]
pub struct Files {
    /// The pages.
    pub data: OwnedFd,
    /// A word per page.
    pub words: OwnedFd,
}

impl Files {
    /// Memory for `count` pages, zeroed, of a size that nobody can change.
    ///
    /// # Errors
    /// No memory or descriptors are left.
    pub fn new(count: usize) -> io::Result<Files> {
        let data = SharedMem::new("granted pages", count * PAGE)?;
        let words = SharedMem::new("grant table", count * size_of::<u32>())?;
        Ok(Files { data: data.fd().try_clone_to_owned()?, words: words.fd().try_clone_to_owned()? })
    }
}

impl Segment {
    /// A segment as seen by someone who holds its files.
    ///
    /// # Errors
    /// The table cannot be mapped.
    pub fn new(
        first: GrantRef,
        count: usize,
        to: DomId,
        access: Access,
        files: Files,
    ) -> io::Result<Arc<Segment>> {
        let size = (count * size_of::<u32>()).next_multiple_of(PAGE);
        let words = Region::map_exact(files.words.as_fd(), 0, size).map_err(io::Error::other)?;
        Ok(Arc::new(Segment { first, count, to, access, files, words: Counters::new(words) }))
    }

    /// Reference of the first page.
    pub fn first(&self) -> GrantRef {
        self.first
    }

    /// Pages.
    pub fn count(&self) -> usize {
        self.count
    }

    /// What they may be used for.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The files.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// To whom they are granted.
    pub fn to(&self) -> DomId {
        self.to
    }

    /// Counts a use of a page that allows `access`; false when its grant does not, or has ended.
    fn enter(&self, page: usize, access: Access) -> bool {
        if access == Access::Write && self.access == Access::Read {
            return false;
        }
        let ended = self.words.add(page, 1) & ENDED != 0;
        if ended {
            self.words.sub(page, 1);
        }
        !ended
    }

    /// Ends a use.
    fn leave(&self, page: usize) {
        self.words.sub(page, 1);
    }

    /// How often a page is in use.
    fn uses(&self, page: usize) -> usize {
        (self.words.load(page) & !ENDED) as usize
    }

    /// How often pages are in use, all in all.
    pub fn in_use(&self) -> usize {
        (0..self.count).map(|page| self.uses(page)).sum()
    }

    /// Ends the grant of one page.
    pub fn end_page(&self, page: usize) {
        self.words.set(page, ENDED);
    }

    /// Ends all grants; how many pages are in use still.
    pub fn end(&self) -> usize {
        (0..self.count).for_each(|page| self.end_page(page));
        (0..self.count).filter(|page| self.uses(*page) > 0).count()
    }

    /// Whether the grant of this page has ended.
    pub fn has_ended(&self, page: usize) -> bool {
        self.words.load(page) & ENDED != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A segment for domain 1.
    pub(super) fn segment(first: u32, count: usize, access: Access) -> Arc<Segment> {
        Segment::new(GrantRef(first), count, DomId(1), access, Files::new(count).unwrap()).unwrap()
    }

    #[test]
    fn xsa_396_an_end_either_sees_a_use_or_prevents_it() {
        use std::sync::Barrier;
        for _ in 0..300 {
            let (segment, start) = (segment(8, 1, Access::Write), Barrier::new(3));
            std::thread::scope(|scope| {
                let enter = || {
                    start.wait();
                    segment.enter(0, Access::Write)
                };
                let users = [scope.spawn(enter), scope.spawn(enter)];
                start.wait();
                let seen = segment.end();
                let uses = users.map(|user| user.join().unwrap()).iter().filter(|used| **used).count();
                assert_eq!(segment.uses(0), uses);
                // One that had failed may have been counted for a moment, never the other way round.
                assert!(seen >= usize::from(uses > 0), "{seen} {uses}");
            });
            assert!(!segment.enter(0, Access::Read));
        }
    }
}
