//! One mapping of one file: a piece of a virtual machine's memory, or of our own.

use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FileType;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::sigbus;
use crate::words::Area;

/// Where a region lies, in the terms of vhost-user's "memory region description".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// First guest physical address.
    pub guest_addr: u64,
    /// Bytes.
    pub size: u64,
    /// First address in the front end's own address space; ring addresses are given in these.
    pub user_addr: u64,
    /// Where in the file the region begins.
    pub mmap_offset: u64,
}

/// Why a region could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// Size zero, or an address range that wraps around.
    #[error("memory region at guest address {0:#x} is empty or wraps around")]
    BadRange(u64),
    /// The file is shorter than the region claims; touching the rest would raise SIGBUS.
    #[error("memory region needs {needed} bytes of its file, which has only {size}")]
    FileTooShort {
        /// Offset plus size of the region.
        needed: u64,
        /// Size of the file.
        size: u64,
    },
    /// Pages of the file come from another process or machine, which could make whoever touches them
    /// wait for ever.
    #[error(
        "guest memory lies in a file served by another process or machine (FUSE or a network file system): \
         use memory on tmpfs, hugetlbfs or a local disk, or memory-backend-memfd"
    )]
    Served,
    /// The process holds as many mappings as [`sigbus::MAX_REGIONS`] allows.
    #[error("more than {} memory regions are mapped", sigbus::MAX_REGIONS)]
    TooMany,
    /// The kernel refused.
    #[error(
        "cannot map guest memory ({0}); the VM's memory must be shared: for QEMU use -object memory-backend-memfd,share=on"
    )]
    Os(#[from] rustix::io::Errno),
}

/// Magic numbers (`linux/magic.h`) of file systems whose pages another process or machine provides: FUSE,
/// 9p, NFS, CIFS, SMB2, SMB, Ceph, AFS, Coda.
const SERVED: [u32; 9] = [
    0x6573_5546,
    0x0102_1997,
    0x6969,
    0xff53_4d42,
    0xfe53_4d42,
    0x517b,
    0x00c3_6400,
    0x5346_414f,
    0x7375_7245,
];

/// Something that is dropped after the mapping it belongs to.
pub(crate) struct Kept(pub(crate) Box<dyn Any + Send + Sync>);

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kept")
    }
}

/// A shared, writable, never executable mapping; unmapped when the last `Arc` goes.
#[derive(Debug)]
pub struct Region {
    spec: RegionSpec,
    /// Start of the whole mapping, which may begin before the region (page alignment).
    map: *mut u8,
    map_len: usize,
    /// Address of the region's first byte.
    base: *mut u8,
    lost: AtomicBool,
    /// Dropped after the mapping is gone.
    _kept: Vec<Kept>,
}

// SAFETY: the mapping is plain shared memory, reached only through atomics and copies.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `spec.size` bytes of `fd` from `spec.mmap_offset`, shared with whoever else holds it.
    ///
    /// The descriptor is not kept. The mapping is aligned to the file's block size, as hugetlbfs
    /// demands for both ends.
    ///
    /// # Errors
    /// See [`MapError`]; nothing stays mapped.
    pub fn map(fd: BorrowedFd<'_>, spec: RegionSpec) -> Result<Arc<Region>, MapError> {
        let bad = MapError::BadRange(spec.guest_addr);
        let (Some(end), Some(_), Some(_), true) = (
            spec.mmap_offset.checked_add(spec.size),
            spec.guest_addr.checked_add(spec.size),
            spec.user_addr.checked_add(spec.size),
            spec.size > 0,
        ) else {
            return Err(bad);
        };
        let stat = rustix::fs::fstat(fd)?;
        let size = stat.st_size as u64;
        if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && size < end {
            return Err(MapError::FileTooShort { needed: end, size });
        }
        if SERVED.contains(&(rustix::fs::fstatfs(fd)?.f_type as u32)) {
            return Err(MapError::Served);
        }
        let page = rustix::param::page_size() as u64;
        let block = (stat.st_blksize as u64).max(page);
        let align = if block.is_power_of_two() && block <= 1 << 30 { block } else { page };
        let start = spec.mmap_offset & !(align - 1);
        let (Some(end), true) = (end.checked_next_multiple_of(align), end <= i64::MAX as u64) else {
            return Err(bad);
        };
        let map_len = usize::try_from(end - start).map_err(|_| MapError::BadRange(spec.guest_addr))?;
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
        // Guest memory has no place in our core dumps.
        // SAFETY: the advice concerns the mapping made just now and does not change its contents.
        let _ = unsafe { rustix::mm::madvise(map, map_len, Advice::LinuxDontDump) };
        let map: *mut u8 = map.cast();
        // SAFETY: start <= mmap_offset and the region ends inside the mapping.
        let base = unsafe { map.add((spec.mmap_offset - start) as usize) };
        let region =
            Arc::new(Region { spec, map, map_len, base, lost: AtomicBool::new(false), _kept: Vec::new() });
        // The handler gets the flag's address; Drop takes it back before the memory goes.
        if !sigbus::guard(map.addr(), map_len, &region.lost) {
            return Err(MapError::TooMany);
        }
        Ok(region)
    }

    /// Maps exactly `size` bytes of `fd` from `offset` on, readable and writable. For device files, which know
    /// neither size nor file system and mean something by each offset (Xen's `gntdev` and `gntalloc`), and for files
    /// that [`is_steady`](crate::window::is_steady): there is no guard against a file that is truncated.
    ///
    /// Both addresses of its [`spec`](Self::spec) are those of this process, so any number of such regions make a
    /// [`GuestMemory`](crate::GuestMemory).
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

    /// A region of what is mapped already; `kept` is dropped after it is unmapped.
    ///
    /// # Safety
    /// `size` bytes at `map` are mapped readable and writable, never fault, and are handed over.
    pub(crate) unsafe fn adopt(map: *mut u8, size: usize, kept: Vec<Kept>) -> Arc<Region> {
        let addr = map.addr() as u64;
        let spec = RegionSpec { guest_addr: addr, size: size as u64, user_addr: addr, mmap_offset: 0 };
        let lost = AtomicBool::new(false);
        Arc::new(Region { spec, map, map_len: size, base: map, lost, _kept: kept })
    }

    /// The range of `len` bytes at byte offset `at`, when it lies inside the region.
    pub fn area(self: &Arc<Self>, at: usize, len: usize) -> Option<Area> {
        let room = (self.spec.size as usize).checked_sub(at)?;
        // SAFETY: at + len <= size, checked just now.
        (len <= room).then(|| unsafe { Area::new(self.base.add(at), len, Arc::clone(self)) })
    }

    /// Where the region lies.
    pub fn spec(&self) -> &RegionSpec {
        &self.spec
    }

    /// Whether the peer truncated the file: what is mapped now are private zero pages, and no
    /// packet can pass through them any more. The owner should drop the connection.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Address of the first byte of the region in this process.
    #[inline]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        sigbus::release(self.map.addr());
        // SAFETY: this mapping is ours, and no Area or slice outlives the last Arc.
        let _ = unsafe { rustix::mm::munmap(self.map.cast(), self.map_len) };
    }
}
