//! A region: one contiguous range of shared memory, of a guest or of our own.
//!
//! [`Region::map`] maps a file that a front end sent, [`Region::existing`] takes memory that is mapped already,
//! [`Region::map_exact`] maps device files. The control plane creates regions; workers use them through
//! [`Area`]s and translators, on any thread. The last `Arc` unmaps the region.

use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::budget::{MapBudget, OverBudget};
use crate::sigbus::{self, Guard};
use crate::words::Area;

/// The page size from which on a file must have all its pages when it is mapped: the kernel takes 2.3 s to clear a page of 1 GiB, in whichever thread is the
/// first to touch it.
const GIGANTIC: u64 = 1 << 30;

/// Addresses and size of a region, as in vhost-user's "memory region description".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// Guest physical address of the first byte.
    pub guest_addr: u64,
    /// Size in bytes.
    pub size: u64,
    /// Address of the first byte in the front end's own address space, in which ring addresses are given.
    pub user_addr: u64,
    /// Offset of the region in its file, in bytes.
    pub mmap_offset: u64,
}

/// The reason for which a region could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The size is zero, or a range of addresses wraps around.
    #[error("memory region at guest address {0:#x} is empty or wraps around")]
    BadRange(u64),
    /// The file is shorter than the region claims; touching the rest would raise SIGBUS.
    #[error("memory region needs {needed} bytes of its file, which has only {size}")]
    FileTooShort {
        /// Offset plus size of the region in bytes.
        needed: u64,
        /// Size of the file in bytes.
        size: u64,
    },
    /// The descriptor is not memory: neither a memfd nor a file on tmpfs or hugetlbfs. The pages of any other file are
    /// served by a disk, or by another process or machine, which could block a thread that touches them for ever.
    #[error(
        "guest memory must be a memfd or a file on tmpfs or hugetlbfs, and this descriptor is none: use \
         memory-backend-memfd (QEMU), or a file under /dev/shm or on a hugetlbfs mount"
    )]
    NotMemory,
    /// The file has huge pages of 1 GiB or more, and not all of them are allocated. Whoever touches one of the others is held up by the kernel for
    /// seconds.
    #[error(
        "guest memory in huge pages of {page} bytes must be allocated before it is shared, and of {size} bytes only {allocated} are: \
         use prealloc=on (QEMU), or smaller pages"
    )]
    Unallocated {
        /// Size of a page in bytes.
        page: u64,
        /// Size of the file in bytes.
        size: u64,
        /// Bytes of it that have pages.
        allocated: u64,
    },
    /// An existing mapping that needs a guard does not begin at a page boundary.
    #[error("memory region at guest address {0:#x} does not begin a page, so it cannot be guarded")]
    Unaligned(u64),
    /// The peer, or all peers together, would have more mapped than is allowed.
    #[error(transparent)]
    Budget(#[from] OverBudget),
    /// The process holds as many mappings as [`sigbus::MAX_REGIONS`] allows.
    #[error("more than {} memory regions are mapped", sigbus::MAX_REGIONS)]
    TooMany,
    /// The kernel refused a system call.
    #[error("cannot map guest memory ({}); {}", .0, remedy(*.0))]
    Os(#[from] Errno),
}

/// What helps where the kernel has refused to map guest memory.
fn remedy(error: Errno) -> &'static str {
    match error {
        // The fault is not the guest's.
        Errno::NOMEM => {
            "this process may have no more address space or mappings: raise its limit (ulimit -v, or LimitAS= of its \
             systemd unit) or the system's vm.max_map_count"
        }
        // mmap(2) says this of F_SEAL_WRITE and F_SEAL_FUTURE_WRITE.
        Errno::PERM => {
            "the memory is sealed against writing, and packets have to be written into it: the VMM must share it without such a seal"
        }
        Errno::ACCESS => {
            "its descriptor is open for reading only, and packets have to be written into the memory: for QEMU leave readonly=on out of \
             memory-backend-file"
        }
        _ => "the VM's memory must be shared: for QEMU use -object memory-backend-memfd,share=on",
    }
}

/// An object that is dropped after the mapping that it belongs to.
pub(crate) struct Kept(pub(crate) Box<dyn Any + Send + Sync>);

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kept")
    }
}

/// States if the file under an existing mapping can become shorter than the mapping; see [`Region::existing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncation {
    /// Another process may truncate the file. The mapping is guarded like those of [`Region::map`]: when a page
    /// is missing, private zero pages replace the mapping and [`Region::is_lost`] returns true.
    Possible,
    /// There is no file (anonymous memory, the heap), or it is sealed against shrinking, or no other process
    /// has it, so touching a page never raises SIGBUS.
    Impossible,
}

/// A range of shared, writable memory. The last `Arc` unmaps a mapping that the region made itself; of an
/// [existing](Region::existing) one it drops the owner.
#[derive(Debug)]
pub struct Region {
    spec: RegionSpec,
    /// Start and length of the mapping to unmap, if any; it may begin before the region for page alignment.
    map: Option<(*mut u8, usize)>,
    /// Address of the region's first byte.
    base: *mut u8,
    guard: Option<Guard>,
    /// Objects that are dropped after the mapping has been unmapped.
    _kept: Vec<Kept>,
}

// SAFETY: the mapping is plain shared memory, reached only through atomics and copies.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `spec.size` bytes of `fd` from `spec.mmap_offset`, shared with the other holders of the file.
    ///
    /// The descriptor is not kept. Start and end of the mapping are aligned to the file's block size, as
    /// hugetlbfs demands.
    ///
    /// # Errors
    /// [`MapError`]; nothing stays mapped then.
    pub fn map(fd: BorrowedFd<'_>, spec: RegionSpec) -> Result<Arc<Region>, MapError> {
        Self::map_within(fd, spec, &MapBudget::unlimited())
    }

    /// Does the same as [`map`](Self::map), and takes the bytes from `budget` until they are unmapped.
    ///
    /// # Errors
    /// [`MapError`]; nothing stays mapped then.
    pub fn map_within(
        fd: BorrowedFd<'_>,
        spec: RegionSpec,
        budget: &Arc<MapBudget>,
    ) -> Result<Arc<Region>, MapError> {
        Self::map_allocated(fd, spec, budget, GIGANTIC)
    }

    /// Does the same; pages of `gigantic` bytes or more must be allocated.
    fn map_allocated(
        fd: BorrowedFd<'_>,
        spec: RegionSpec,
        budget: &Arc<MapBudget>,
        gigantic: u64,
    ) -> Result<Arc<Region>, MapError> {
        let bad = MapError::BadRange(spec.guest_addr);
        let (Some(end), Some(_), Some(_), true) = (
            spec.mmap_offset.checked_add(spec.size),
            spec.guest_addr.checked_add(spec.size),
            spec.user_addr.checked_add(spec.size),
            spec.size > 0,
        ) else {
            return Err(bad);
        };
        // Only memfds and files on tmpfs and hugetlbfs have seals, even if none is set. No other file is asked anything
        // before this: even `fstat` waits for the server of one on FUSE.
        match rustix::fs::fcntl_get_seals(fd) {
            Err(Errno::INVAL) => return Err(MapError::NotMemory),
            seals => seals?,
        };
        let stat = rustix::fs::fstat(fd)?;
        let size = stat.st_size as u64;
        if size < end {
            return Err(MapError::FileTooShort { needed: end, size });
        }
        let page = rustix::param::page_size() as u64;
        let block = (stat.st_blksize as u64).max(page);
        // In units of 512 bytes, whatever the size of a page.
        let allocated = 512 * stat.st_blocks as u64;
        if block >= gigantic && allocated < size {
            return Err(MapError::Unallocated { page: block, size, allocated });
        }
        let align = if block.is_power_of_two() && block <= 1 << 30 { block } else { page };
        let start = spec.mmap_offset & !(align - 1);
        let (Some(end), true) = (end.checked_next_multiple_of(align), end <= i64::MAX as u64) else {
            return Err(bad);
        };
        let map_len = usize::try_from(end - start).map_err(|_| MapError::BadRange(spec.guest_addr))?;
        let taken = budget.take(map_len as u64)?;
        // SAFETY: a fresh mapping at an address the kernel chooses touches nothing that exists.
        let map = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                map_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                start,
            )?
        };
        // Guest memory must not get into our core dumps.
        // SAFETY: the advice concerns the mapping made just now and does not change its contents.
        let _ = unsafe { rustix::mm::madvise(map, map_len, Advice::LinuxDontDump) };
        // On a tmpfs whose owner mounts it with huge=always, and he may do so at any time, whoever touches a page that is not there clears 2 MiB: a frame of two
        // hundred bytes, each on such a page, took 50 ms. Pages of hugetlbfs stay as they are.
        // SAFETY: as above.
        let _ = unsafe { rustix::mm::madvise(map, map_len, Advice::LinuxNoHugepage) };
        let map: *mut u8 = map.cast();
        // SAFETY: start <= mmap_offset and the region ends inside the mapping.
        let base = unsafe { map.add((spec.mmap_offset - start) as usize) };
        let kept = vec![Kept(Box::new(taken))];
        let mut region = Region { spec, map: Some((map, map_len)), base, guard: None, _kept: kept };
        region.guard = Some(Guard::new(map.addr(), map_len).ok_or(MapError::TooMany)?);
        Ok(Arc::new(region))
    }

    /// Makes a region of memory that is mapped already, for example by the VMM that this library is part of, or
    /// on the heap. `base` is its address in this process; `spec` has its addresses for the guest and for the
    /// front end (`mmap_offset` is ignored). `owner`, usually an `Arc` of the object that unmaps or frees the
    /// memory, is dropped after the last user of the region.
    ///
    /// Buffers need no alignment of `base`; a ring is refused if its parts are not aligned in this process.
    /// Regions may share bytes: two regions of one mapping are two views of the same memory.
    ///
    /// ```
    /// use std::ptr::NonNull;
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use std::sync::Arc;
    /// use ringferry_memory::{GuestMemory, Region, RegionSpec, Truncation, Words};
    ///
    /// // Atomics, because a Rust reference to them stays legal while others write.
    /// let heap: Arc<[AtomicU64]> = (0..512).map(AtomicU64::new).collect();
    /// let spec = RegionSpec { guest_addr: 0x8000_0000, size: 4096, user_addr: 0, mmap_offset: 0 };
    /// let base = NonNull::from(&heap[..]).cast();
    /// // SAFETY: the owner is the heap memory itself, 4096 bytes of it, and it is reached through atomics only.
    /// let region = unsafe { Region::existing(base, spec, Truncation::Impossible, Arc::clone(&heap)) }?;
    /// let memory = GuestMemory::new(vec![region])?;
    /// let area = memory.area(0x8000_0000 + 8 * 7, 8).ok_or("outside")?;
    /// area.store64(0, 9);
    /// assert_eq!(heap[7].load(Ordering::Relaxed), 9u64.to_le());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`MapError::BadRange`] for size zero or a range that wraps around, in any of the three address spaces;
    /// [`MapError::Unaligned`] and [`MapError::TooMany`] for [`Truncation::Possible`] only.
    ///
    /// # Safety
    /// From now until `owner` is dropped:
    /// - `spec.size` bytes at `base` stay mapped there, readable and writable. They are not unmapped, remapped,
    ///   protected, moved or freed.
    /// - Nobody has a Rust reference to any of them, except to atomics and to `UnsafeCell`s that are only reached as
    ///   described next.
    /// - Others in this process (and any number of other processes) may read and write them at any time, through
    ///   atomics, volatile accesses or raw copies, as they would memory that a device shares; what they read there
    ///   may be anything.
    /// - With [`Truncation::Impossible`], touching them never raises SIGBUS. With [`Truncation::Possible`], `base`
    ///   begins a page of the file (a huge page on hugetlbfs), nothing else lies in the region's last page, and its
    ///   owner does not mind that what is mapped there is replaced by private zero pages once the file is truncated.
    pub unsafe fn existing(
        base: NonNull<u8>,
        spec: RegionSpec,
        truncation: Truncation,
        owner: impl Any + Send + Sync,
    ) -> Result<Arc<Region>, MapError> {
        let base = base.as_ptr();
        let size = usize::try_from(spec.size).ok().filter(|size| (1..=isize::MAX as usize).contains(size));
        let (Some(size), Some(_), Some(_)) =
            (size, spec.guest_addr.checked_add(spec.size), spec.user_addr.checked_add(spec.size))
        else {
            return Err(MapError::BadRange(spec.guest_addr));
        };
        let page = rustix::param::page_size();
        let end = base.addr().checked_add(size).and_then(|end| end.checked_next_multiple_of(page));
        let Some(end) = end else { return Err(MapError::BadRange(spec.guest_addr)) };
        let guard = match truncation {
            Truncation::Impossible => None,
            Truncation::Possible if !base.addr().is_multiple_of(page) => {
                return Err(MapError::Unaligned(spec.guest_addr));
            }
            Truncation::Possible => {
                Some(Guard::new(base.addr(), end - base.addr()).ok_or(MapError::TooMany)?)
            }
        };
        Ok(Arc::new(Region { spec, map: None, base, guard, _kept: vec![Kept(Box::new(owner))] }))
    }

    /// Maps exactly `size` bytes of `fd` from `offset` on, readable and writable. There is no guard against
    /// truncation, so it is for files that pass [`is_steady`](crate::window::is_steady) and for device files
    /// that have neither a size nor a file system, and whose offsets have meanings of their own (Xen's `gntdev`
    /// and `gntalloc`).
    ///
    /// Both addresses in its [`spec`](Self::spec) are those of this process, so any number of such regions can
    /// form a [`GuestMemory`](crate::GuestMemory).
    ///
    /// # Errors
    /// [`MapError::BadRange`] for size zero, or [`MapError::Os`].
    pub fn map_exact(fd: BorrowedFd<'_>, offset: u64, size: usize) -> Result<Arc<Region>, MapError> {
        if size == 0 {
            return Err(MapError::BadRange(offset));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address the kernel chooses touches nothing that exists.
        let map = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, fd, offset)?
        };
        // SAFETY: the mapping was made just now, and nobody else knows of it.
        Ok(unsafe { Region::adopt(map.cast(), size, Vec::new()) })
    }

    /// Makes a region that takes over a mapping and will unmap it; `kept` is dropped after that.
    ///
    /// # Safety
    /// `size` bytes at `map` are mapped readable and writable, never fault, and belong to the region from now
    /// on.
    pub(crate) unsafe fn adopt(map: *mut u8, size: usize, kept: Vec<Kept>) -> Arc<Region> {
        let addr = map.addr() as u64;
        let spec = RegionSpec { guest_addr: addr, size: size as u64, user_addr: addr, mmap_offset: 0 };
        Arc::new(Region { spec, map: Some((map, size)), base: map, guard: None, _kept: kept })
    }

    /// Returns the range of `len` bytes at byte offset `at`, or `None` if it is not inside the region.
    pub fn area(self: &Arc<Self>, at: usize, len: usize) -> Option<Area> {
        let room = (self.spec.size as usize).checked_sub(at)?;
        // SAFETY: at + len <= size, checked just now.
        (len <= room).then(|| unsafe { Area::new(self.base.add(at), len, Arc::clone(self)) })
    }

    /// Returns the addresses and the size of the region.
    pub fn spec(&self) -> &RegionSpec {
        &self.spec
    }

    /// Returns true if the peer truncated the file. Private zero pages are mapped instead then, through which
    /// no packet can pass; the owner should close the connection.
    pub fn is_lost(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_lost)
    }

    /// Returns the address of the region's first byte in this process.
    #[inline]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // The guard must go before the mapping, whose addresses another thread may get at once.
        self.guard = None;
        if let Some((map, len)) = self.map {
            // SAFETY: this mapping is ours, and no Area or slice outlives the last Arc.
            let _ = unsafe { rustix::mm::munmap(map.cast(), len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// There are seldom pages of 1 GiB to be had in a test, so usual pages are taken for gigantic.
    #[test]
    fn pages_that_take_seconds_to_clear_must_be_there_when_they_are_mapped() {
        let page = rustix::param::page_size() as u64;
        let file = rustix::fs::memfd_create("gigantic", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4 * page).unwrap();
        let spec = RegionSpec { guest_addr: 0, size: 4 * page, user_addr: 0, mmap_offset: 0 };
        let map =
            |gigantic| Region::map_allocated(file.as_fd(), spec, &MapBudget::unlimited(), gigantic).err();
        for pages in 0..4 {
            let (size, allocated) = (4 * page, pages * page);
            let refused = map(page).unwrap();
            assert!(
                matches!(refused, MapError::Unallocated { page: p, size: s, allocated: a } if (p, s, a) == (page, size, allocated)),
                "{refused}"
            );
            assert!(map(2 * page).is_none(), "smaller pages need not be there");
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), allocated, page).unwrap();
        }
        assert!(map(page).is_none());
    }
}
