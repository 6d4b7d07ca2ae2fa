//! [`SegmentGranted`]: the granting domain's side of a segment. A provider creates it for each call
//! of `grant`; ending or dropping it ends the grants and tells the allocator of references.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use ringferry_memory::Region;
use rustix::fs::SealFlags;

use crate::domain::PAGE;
use crate::grant::{Access, GrantError, GrantRef, Granted};

use super::Segment;

/// Granted pages of this domain, in one segment.
pub struct SegmentGranted<E: FnMut(GrantRef) + Send> {
    segment: Arc<Segment>,
    refs: Vec<GrantRef>,
    region: Arc<Region>,
    /// Tells the allocator of references that they are free, once.
    on_end: Option<E>,
}

impl<E: FnMut(GrantRef) + Send> fmt::Debug for SegmentGranted<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Granted({} pages from {} to {})", self.refs.len(), self.segment.first, self.segment.to)
    }
}

impl<E: FnMut(GrantRef) + Send> SegmentGranted<E> {
    /// Maps the pages for their owner, who may write them whatever the grant allows the peer.
    pub fn new(segment: Arc<Segment>, on_end: E) -> Result<Self, GrantError> {
        let first = segment.first.0;
        let refs = (0..segment.count as u32).map(|page| GrantRef(first + page)).collect();
        let map = || -> io::Result<_> {
            let data = segment.files.data.as_fd();
            let region = Region::map_exact(data, 0, segment.count * PAGE).map_err(io::Error::other)?;
            if segment.access == Access::Read {
                // From here on the kernel refuses any other way to write the pages.
                rustix::fs::fcntl_add_seals(data, SealFlags::FUTURE_WRITE)?;
            }
            Ok(region)
        };
        match map() {
            Ok(region) => Ok(Self { segment, refs, region, on_end: Some(on_end) }),
            Err(error) => {
                segment.end();
                let mut on_end = on_end;
                on_end(segment.first);
                Err(GrantError::Exhausted(error))
            }
        }
    }
}

impl<E: FnMut(GrantRef) + Send> SegmentGranted<E> {
    fn finish(&mut self) -> usize {
        let mapped = self.segment.end();
        if let Some(mut on_end) = self.on_end.take() {
            on_end(self.segment.first);
        }
        mapped
    }
}

impl<E: FnMut(GrantRef) + Send> Granted for SegmentGranted<E> {
    fn refs(&self) -> &[GrantRef] {
        &self.refs
    }

    fn region(&self) -> &Arc<Region> {
        &self.region
    }

    fn end(mut self: Box<Self>) -> usize {
        self.finish()
    }
}

impl<E: FnMut(GrantRef) + Send> Drop for SegmentGranted<E> {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::tests::segment;
    use ringferry_memory::{ReadSlice, Window};

    #[test]
    fn the_kernel_keeps_read_only_pages_from_being_written_and_all_from_being_truncated() {
        let writable = segment(8, 2, Access::Write);
        let granted = SegmentGranted::new(segment(8, 2, Access::Read), |_| ()).unwrap();
        let (rw, ro) = (writable.files.data.as_fd(), granted.segment.files.data.as_fd());
        let bytes = [ReadSlice::from(&b"x"[..])];
        let mut window = Window::reserve(2).unwrap();
        window.map(0, 1, rw, 0, true).unwrap();
        assert!(window.map(1, 1, ro, 0, true).is_err());
        window.map(1, 1, ro, 0, false).unwrap();
        assert_eq!(ringferry_sys::copy::write_at(rw, &bytes, 0).unwrap(), 1);
        assert!(ringferry_sys::copy::write_at(ro, &bytes, 0).is_err());
        for fd in [rw, ro, granted.segment.files.words.as_fd()] {
            assert!(rustix::fs::ftruncate(fd, 0).is_err());
            assert!(rustix::fs::ftruncate(fd, 1 << 20).is_err());
        }
        // The owner can still write its page.
        granted.region.area(0, 1).unwrap().write(0, 1).unwrap().copy_from(b"y");
        assert_eq!(window.read(1, 0, 1).unwrap().array(), Some(*b"y"));
    }
}
