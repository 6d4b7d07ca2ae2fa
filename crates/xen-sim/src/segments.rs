//! [`Segments`]: the table of a domain's granted segments, as the allocator of its references. The
//! fake and the broker keep one per domain; a grant allocates the lowest free references, and ended
//! segments stay in it until nobody uses them.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use ringferry_xen::grant::{GrantError, GrantRef};
use ringferry_xen::segment::Segment;

/// First reference that is allocated: Xen reserves those below for console, store and the like.
const FIRST_REF: u32 = 8;

/// Default for the most pages that a domain can have granted at once, 256 MiB. The kernel's
/// `gntalloc` allows 1024.
pub(crate) const MAX_PAGES: usize = 65_536;

/// All segments of a domain, by their references.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    /// Segments by their first reference. An ended one stays until nobody uses it, so that its
    /// references are not reused before.
    all: BTreeMap<u32, (Arc<Segment>, Ended)>,
}

type Ended = bool;

impl Segments {
    /// Returns the lowest reference from which `count` are free.
    ///
    /// # Errors
    /// More than `limit` pages would be granted in all, or `count` is 0.
    pub fn place(&mut self, count: usize, limit: usize) -> Result<GrantRef, GrantError> {
        self.all.retain(|_, (segment, ended)| !*ended || segment.in_use() > 0);
        let taken: usize = self.all.values().map(|(segment, _)| segment.count()).sum();
        if count == 0 || count > limit.saturating_sub(taken) {
            let text = format!("{count} pages, with {taken} of {limit} taken");
            return Err(GrantError::Exhausted(io::Error::new(io::ErrorKind::OutOfMemory, text)));
        }
        let mut at = FIRST_REF;
        for (first, (segment, _)) in &self.all {
            if (first - at) as usize >= count {
                break;
            }
            at = first + segment.count() as u32;
        }
        Ok(GrantRef(at))
    }

    /// Adds a segment at references that [`place`](Self::place) returned.
    pub fn insert(&mut self, segment: Arc<Segment>) {
        self.all.insert(segment.first().0, (segment, false));
    }

    /// Finds the segment of a reference, whose grant may have ended, and the page in it.
    pub fn find(&self, gref: GrantRef) -> Option<(&Arc<Segment>, usize)> {
        let (first, (segment, _)) = self.all.range(..=gref.0).next_back()?;
        let page = (gref.0 - first) as usize;
        (page < segment.count()).then_some((segment, page))
    }

    /// Ends all grants of the segment that begins at `first`; returns false if there was none.
    pub fn end(&mut self, first: GrantRef) -> bool {
        match self.all.get_mut(&first.0) {
            Some((segment, ended)) if !*ended => {
                segment.end();
                *ended = true;
                true
            }
            _ => false,
        }
    }

    /// Ends all grants of the domain.
    pub fn end_all(&mut self) {
        for (segment, ended) in self.all.values_mut() {
            segment.end();
            *ended = true;
        }
    }

    /// Returns the number of segments, including ended ones that were in use at the last
    /// [`place`](Self::place).
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns the number of pages whose grants have not ended.
    pub fn granted(&self) -> usize {
        self.all.values().filter(|(_, ended)| !ended).map(|(segment, _)| segment.count()).sum()
    }

    /// Returns the number of uses of pages, including those whose grants have ended.
    pub fn mapped(&self) -> usize {
        self.all.values().map(|(segment, _)| segment.in_use()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringferry_xen::domain::DomId;
    use ringferry_xen::grant::Access;
    use ringferry_xen::segment::Files;

    fn segment(first: u32, count: usize, access: Access) -> Arc<Segment> {
        Segment::new(GrantRef(first), count, DomId(1), access, Files::new(count).unwrap()).unwrap()
    }

    #[test]
    fn references_are_the_lowest_that_are_free() {
        let mut all = Segments::default();
        let place = |all: &mut Segments, count| {
            let first = all.place(count, 20).ok()?;
            all.insert(segment(first.0, count, Access::Write));
            Some(first.0)
        };
        assert_eq!([3, 2, 4].map(|count| place(&mut all, count)), [Some(8), Some(11), Some(13)]);
        assert!(all.end(GrantRef(11)) && !all.end(GrantRef(11)) && !all.end(GrantRef(12)));
        assert_eq!([3, 2, 1].map(|count| place(&mut all, count)), [Some(17), Some(11), Some(20)]);
        assert_eq!((place(&mut all, 8), place(&mut all, 7)), (None, Some(21)));
        assert_eq!((all.granted(), all.mapped(), all.len()), (20, 0, 6));
        let find = |gref| all.find(GrantRef(gref)).map(|(segment, page)| (segment.first().0, page));
        assert_eq!(
            [7, 8, 10, 12, 27, 28].map(find),
            [None, Some((8, 0)), Some((8, 2)), Some((11, 1)), Some((21, 6)), None]
        );
        assert_eq!(find(u32::MAX), None);
    }
}
