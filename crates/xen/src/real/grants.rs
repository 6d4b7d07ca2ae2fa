//! [`RealGrantTable`]: pages that this domain grants, through `/dev/xen/gntalloc`. The kernel
//! allocates them, zeroed and for nothing else (XSA-403), and keeps those that the other domain
//! does not unmap (XSA-396).

use std::io;
use std::sync::Arc;

use ringferry_memory::{MapError, Region};
use ringferry_sys::xen::GrantAllocator;
use std::os::fd::AsFd;

use crate::domain::{DomId, PAGE};
use crate::grant::{Access, GrantError, GrantRef, GrantTable, Granted};

/// Grants pages of this domain.
#[derive(Debug)]
pub struct RealGrantTable(Arc<GrantAllocator>);

impl RealGrantTable {
    pub(super) fn open() -> io::Result<RealGrantTable> {
        Ok(RealGrantTable(Arc::new(GrantAllocator::open()?)))
    }
}

impl GrantTable for RealGrantTable {
    fn grant(&mut self, to: DomId, count: usize, access: Access) -> Result<Box<dyn Granted>, GrantError> {
        let result = self.0.allocate(to.0, count, access == Access::Write);
        let (offset, refs) = result.map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::OutOfMemory => GrantError::Exhausted(error),
            _ => GrantError::Os(error),
        })?;
        match Region::map_exact(self.0.as_fd(), offset, count * PAGE) {
            Ok(region) => {
                let refs = refs.into_iter().map(GrantRef).collect();
                Ok(Box::new(RealGranted { device: Arc::clone(&self.0), offset, refs, region }))
            }
            Err(error) => {
                self.0.free(offset, count);
                Err(GrantError::Os(os_error(error)))
            }
        }
    }
}

/// Returns the error of `mmap` inside a mapping error.
pub(super) fn os_error(error: MapError) -> io::Error {
    match error {
        MapError::Os(error) => error.into(),
        error => io::Error::other(error),
    }
}

/// Granted pages of this domain, until they are dropped.
#[derive(Debug)]
pub struct RealGranted {
    device: Arc<GrantAllocator>,
    offset: u64,
    refs: Vec<GrantRef>,
    region: Arc<Region>,
}

impl Granted for RealGranted {
    fn refs(&self) -> &[GrantRef] {
        &self.refs
    }

    fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Always returns 0, because the kernel does not report which pages the peer still has mapped.
    fn end(self: Box<Self>) -> usize {
        0
    }
}

impl Drop for RealGranted {
    /// Lets the grants end when the region is dropped, which is right after this, unless another
    /// handle of it exists.
    fn drop(&mut self) {
        self.device.free(self.offset, self.refs.len());
    }
}
