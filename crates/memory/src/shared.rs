//! A memfd of our own that a peer maps: the memory of a driver half's rings and buffers.
//!
//! A driver half creates one [`SharedMem`] at set-up, maps it by [`SharedMem::map_at`], and sends its descriptor
//! to the back end. The memory is freed when the descriptors and mappings of all processes are gone.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};

use crate::region::{MapError, Region, RegionSpec};

/// A memfd of fixed size. It is sealed against shrinking and growing, so that a peer that receives its
/// descriptor cannot truncate it under our mapping, and against further seals, so that it cannot keep the next peer
/// from writing.
#[derive(Debug)]
pub struct SharedMem {
    fd: OwnedFd,
    size: usize,
}

impl SharedMem {
    /// Creates `size` bytes (rounded up to a page) of zeroed memory, neither mapped nor allocated yet. `name`
    /// shows up in `/proc/PID/maps`.
    ///
    /// # Errors
    /// The errors of `memfd_create`, `ftruncate` and `fcntl`.
    pub fn new(name: &str, size: usize) -> io::Result<SharedMem> {
        Self::with_seals(name, size, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
    }

    /// Does the same as [`SharedMem::new`] for memory that its owner seals further once it has mapped it. It must do so
    /// before a peer receives the descriptor.
    ///
    /// # Errors
    /// As for [`SharedMem::new`].
    pub fn sealable(name: &str, size: usize) -> io::Result<SharedMem> {
        Self::with_seals(name, size, SealFlags::SHRINK | SealFlags::GROW)
    }

    fn with_seals(name: &str, size: usize, seals: SealFlags) -> io::Result<SharedMem> {
        let size = size.next_multiple_of(rustix::param::page_size());
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, size as u64)?;
        #[cfg(not(test))] // this crate's own tests play the peer that shrinks a file
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        #[cfg(test)]
        let _ = seals;
        Ok(SharedMem { fd, size })
    }

    /// Returns the size in bytes, a multiple of the page size.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Borrows the descriptor, to send it to the peer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Maps the whole memory as a region whose guest and user addresses both begin at `addr`.
    ///
    /// # Errors
    /// [`MapError`], as for [`Region::map`].
    pub fn map_at(&self, addr: u64) -> Result<Arc<Region>, MapError> {
        let spec = RegionSpec { guest_addr: addr, size: self.size as u64, user_addr: addr, mmap_offset: 0 };
        Region::map(self.fd(), spec)
    }
}
