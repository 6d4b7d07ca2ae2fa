//! Pages that this domain grants. The kernel allocates them, zeroed and of nothing but what is put there (XSA-403), and
//! keeps those that the other domain does not let go of (XSA-396).

use std::io;
use std::sync::Arc;

use ringferry_memory::{MapError, Region};
use ringferry_sys::xen::GrantAllocator;
use std::os::fd::AsFd;

use crate::domain::{DomId, PAGE};
use crate::grant::{Access, GrantError, GrantRef, GrantTable, Granted};

/// Where this domain grants pages.
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

/// What `mmap` said.
pub(super) fn os_error(error: MapError) -> io::Error {
    match error {
        MapError::Os(error) => error.into(),
        error => io::Error::other(error),
    }
}

/// Pages that are granted.
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

    /// The kernel does not tell what the peer still has mapped, so this is always 0.
    fn end(self: Box<Self>) -> usize {
        0
    }
}

impl Drop for RealGranted {
    /// The grants end when the region goes, which is right after this, unless someone else holds it.
    fn drop(&mut self) {
        self.device.free(self.offset, self.refs.len());
    }
}
