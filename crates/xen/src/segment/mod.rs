//! Grants whose pages lie in memfds, for providers without a hypervisor: the process provider and
//! the fake of `ringferry-xen-sim`.
//!
//! Pages granted in one call are a [`Segment`]: a memfd of exactly these pages, so a peer that may
//! map one may map all and no other, and a second memfd with a word per page, shared by all who may
//! use them. It exists for as long as a handle of it does. The word is what an entry of a grant
//! table is to Xen: using the page and ending its grant are one atomic operation each, so an end
//! either sees a use or prevents it (XSA-396). The words need not be trusted: memory that was
//! granted is never used for anything else, and the kernel frees it when the last mapping and
//! descriptor are gone, whatever the words hold.

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

/// Bit of a page's word that marks an ended grant. The other bits count the uses: mappings, and
/// copies in progress.
const ENDED: u32 = 1 << 31;

/// Pages that were granted together to one domain.
#[derive(Debug)]
pub struct Segment {
    first: GrantRef,
    count: usize,
    to: DomId,
    access: Access,
    files: Files,
    words: Counters,
}

/// The two memfds of a segment.
#[derive(Debug)]
pub struct Files {
    /// The file that holds the pages.
    pub data: OwnedFd,
    /// The file that holds a word per page.
    pub words: OwnedFd,
}

impl Files {
    /// Creates files for `count` zeroed pages, whose size cannot be changed.
    ///
    /// # Errors
    /// No memory or descriptors are left.
    pub fn new(count: usize) -> io::Result<Files> {
        // The granting domain seals it against writing once it has mapped it, if the grant is for reading.
        let data = SharedMem::sealable("granted pages", count * PAGE)?;
        let words = SharedMem::new("grant table", count * size_of::<u32>())?;
        Ok(Files { data: data.fd().try_clone_to_owned()?, words: words.fd().try_clone_to_owned()? })
    }
}

impl Segment {
    /// Creates the view of a segment whose files the caller holds.
    ///
    /// # Errors
    /// The file of words cannot be mapped.
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

    /// Returns the reference of the first page.
    pub fn first(&self) -> GrantRef {
        self.first
    }

    /// Returns the number of pages.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the access that the grants allow.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the files of the segment.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Returns the domain to which the pages are granted.
    pub fn to(&self) -> DomId {
        self.to
    }

    /// Counts a use of a page with this access; returns false if its grant does not allow it, or
    /// has ended.
    fn begin_use(&self, page: usize, access: Access) -> bool {
        if access == Access::Write && self.access == Access::Read {
            return false;
        }
        let ended = self.words.add(page, 1) & ENDED != 0;
        if ended {
            self.words.sub(page, 1);
        }
        !ended
    }

    /// Ends a use of a page.
    fn end_use(&self, page: usize) {
        self.words.sub(page, 1);
    }

    /// Returns the number of uses of a page.
    fn uses(&self, page: usize) -> usize {
        (self.words.load(page) & !ENDED) as usize
    }

    /// Returns the number of uses of all pages.
    pub fn in_use(&self) -> usize {
        (0..self.count).map(|page| self.uses(page)).sum()
    }

    /// Ends the grant of one page; later uses are refused.
    pub fn end_page(&self, page: usize) {
        self.words.set(page, ENDED);
    }

    /// Ends all grants; returns how many pages are still in use.
    pub fn end(&self) -> usize {
        (0..self.count).for_each(|page| self.end_page(page));
        (0..self.count).filter(|page| self.uses(*page) > 0).count()
    }

    /// Returns true if the grant of this page has ended.
    pub fn has_ended(&self, page: usize) -> bool {
        self.words.load(page) & ENDED != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a segment that is granted to domain 1.
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
                    segment.begin_use(0, Access::Write)
                };
                let users = [scope.spawn(enter), scope.spawn(enter)];
                start.wait();
                let seen = segment.end();
                let uses = users.map(|user| user.join().unwrap()).iter().filter(|used| **used).count();
                assert_eq!(segment.uses(0), uses);
                // A use that failed may have been counted for a moment, never the other way round.
                assert!(seen >= usize::from(uses > 0), "{seen} {uses}");
            });
            assert!(!segment.begin_use(0, Access::Read));
        }
    }
}
