//! Memory of our own that a peer may map: what a driver half keeps its rings and buffers in.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};

use crate::region::{MapError, Region, RegionSpec};

/// A memfd of fixed size. Sealed against shrinking and growing, so that a peer who receives its
/// descriptor cannot truncate it under us.
#[derive(Debug)]
pub struct SharedMem {
    fd: OwnedFd,
    size: usize,
}

impl SharedMem {
    /// Makes `size` bytes (rounded up to a page) of zeroed memory, not yet mapped or allocated.
    ///
    /// # Errors
    /// What `memfd_create` and `ftruncate` say.
    pub fn new(name: &str, size: usize) -> io::Result<SharedMem> {
        let size = size.next_multiple_of(rustix::param::page_size());
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, size as u64)?;
        #[cfg(not(test))] // this crate's own tests play the peer that shrinks a file
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        #[cfg(test)]
        let _ = SealFlags::SHRINK;
        Ok(SharedMem { fd, size })
    }

    /// Size in bytes, a multiple of the page size.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The descriptor to hand to the peer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Maps all of it, with guest and user addresses that both begin at `addr`.
    ///
    /// # Errors
    /// See [`MapError`].
    pub fn map_at(&self, addr: u64) -> Result<Arc<Region>, MapError> {
        let spec = RegionSpec { guest_addr: addr, size: self.size as u64, user_addr: addr, mmap_offset: 0 };
        Region::map(self.fd(), spec)
    }
}
