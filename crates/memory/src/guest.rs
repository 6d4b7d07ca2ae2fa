//! The memory map of one guest and the translation of guest addresses.
//!
//! The control plane makes a [`GuestMemory`] of all regions when a front end sends its memory table, and a new
//! one when the table changes; workers hold it by `Arc`. For each burst a worker makes a [`Translator`], which
//! tries the region of the last hit before it searches the sorted table (binary search).

use std::sync::Arc;

use crate::region::{Region, RegionSpec};
use crate::slice::{ReadSlice, WriteSlice};
use crate::words::Area;

/// The reason for which a set of regions is not a memory map.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum MemoryError {
    /// Two regions contain the same guest address.
    #[error("memory regions overlap at guest address {0:#x}")]
    Overlap(u64),
    /// The region to remove is not in the map.
    #[error("no memory region at guest address {0:#x} with that size")]
    Missing(u64),
}

/// An immutable, sorted set of regions. A change of the map makes a new `GuestMemory`; users of the old one hold
/// its `Arc`, and its mappings are unmapped when the last of them drops it.
#[derive(Debug, Default)]
pub struct GuestMemory {
    /// The regions, sorted by guest address and without overlap.
    regions: Vec<Arc<Region>>,
    /// Index of the largest region, which holds most buffers.
    largest: usize,
}

impl GuestMemory {
    /// Makes a map of `regions`, which may be in any order.
    ///
    /// # Errors
    /// [`MemoryError::Overlap`], if two regions contain the same guest address.
    pub fn new(mut regions: Vec<Arc<Region>>) -> Result<Self, MemoryError> {
        regions.sort_by_key(|region| region.spec().guest_addr);
        for pair in regions.windows(2) {
            let (low, high) = (pair[0].spec(), pair[1].spec());
            // The sum cannot overflow: Region::map refused such regions.
            if low.guest_addr + low.size > high.guest_addr {
                return Err(MemoryError::Overlap(high.guest_addr));
            }
        }
        let largest = (0..regions.len()).max_by_key(|at| regions[*at].spec().size).unwrap_or(0);
        Ok(Self { regions, largest })
    }

    /// Returns the regions in ascending order of guest addresses.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Returns true if a peer truncated the file under any region; see [`Region::is_lost`].
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.is_lost())
    }

    /// Returns a copy of this map with one more region (memory hot-plug).
    ///
    /// # Errors
    /// [`MemoryError::Overlap`], as for [`GuestMemory::new`].
    pub fn with(&self, region: Arc<Region>) -> Result<Self, MemoryError> {
        let mut regions = self.regions.clone();
        regions.push(region);
        Self::new(regions)
    }

    /// Returns a copy of this map without the region of exactly these addresses and size (memory hot-unplug).
    ///
    /// # Errors
    /// [`MemoryError::Missing`], if there is no such region.
    pub fn without(&self, guest_addr: u64, user_addr: u64, size: u64) -> Result<Self, MemoryError> {
        let is_it = |spec: &RegionSpec| {
            spec.guest_addr == guest_addr && spec.user_addr == user_addr && spec.size == size
        };
        let mut regions = self.regions.clone();
        match regions.iter().position(|region| is_it(region.spec())) {
            Some(at) => {
                regions.remove(at);
                Self::new(regions)
            }
            None => Err(MemoryError::Missing(guest_addr)),
        }
    }

    /// Returns the range of `len` bytes at a guest address, or `None` if it is not inside one region.
    pub fn area(&self, guest_addr: u64, len: usize) -> Option<Area> {
        self.resolve(guest_addr, len, |spec| spec.guest_addr)
    }

    /// Returns the range of `len` bytes at an address of the front end, or `None` if it is not inside one
    /// region. The ring addresses of vhost-user are of this kind.
    pub fn user_area(&self, user_addr: u64, len: usize) -> Option<Area> {
        self.resolve(user_addr, len, |spec| spec.user_addr)
    }

    fn resolve(&self, addr: u64, len: usize, start: impl Fn(&RegionSpec) -> u64) -> Option<Area> {
        self.regions.iter().find_map(|region| {
            let offset = addr.checked_sub(start(region.spec()))?;
            let room = region.spec().size.checked_sub(offset)?;
            (len as u64 <= room).then(|| {
                // SAFETY: offset + len <= size, checked just now.
                unsafe { Area::new(region.base().add(offset as usize), len, Arc::clone(region)) }
            })
        })
    }

    /// Makes a translator for one burst, which tries the largest region first.
    #[inline]
    pub fn translator(&self) -> Translator<'_> {
        let last = self.regions.get(self.largest).map_or(Window::NONE, |region| Window::of(region));
        Translator { memory: self, last }
    }
}

/// The fields of a region that translation needs, in one cache line.
#[derive(Clone, Copy)]
struct Window {
    start: u64,
    size: u64,
    base: *mut u8,
}

impl Window {
    const NONE: Window = Window { start: 0, size: 0, base: std::ptr::null_mut() };

    fn of(region: &Region) -> Window {
        Window { start: region.spec().guest_addr, size: region.spec().size, base: region.base() }
    }
}

/// Translates guest addresses of buffers and caches the region of the last hit, as nearly all buffers of a burst
/// are in one region.
pub struct Translator<'m> {
    memory: &'m GuestMemory,
    last: Window,
}

impl<'m> Translator<'m> {
    /// Returns address and length of the first contiguous piece of the `len` bytes at `addr`, or `None` if
    /// `addr` is in no region. The piece is never longer than `len`, and empty only if `len` is 0.
    #[inline]
    fn piece(&mut self, addr: u64, len: usize) -> Option<(*mut u8, usize)> {
        let mut offset = addr.wrapping_sub(self.last.start);
        if offset >= self.last.size {
            offset = self.find(addr)?;
        }
        let room = self.last.size - offset;
        let len = (len as u64).min(room) as usize;
        // SAFETY: offset < size, so the address is inside the mapping.
        Some((unsafe { self.last.base.add(offset as usize) }, len))
    }

    #[cold]
    fn find(&mut self, addr: u64) -> Option<u64> {
        let regions = &self.memory.regions;
        let after = regions.partition_point(|region| region.spec().guest_addr <= addr);
        let window = Window::of(regions.get(after.checked_sub(1)?)?);
        let offset = addr - window.start;
        (offset < window.size).then(|| {
            self.last = window;
            offset
        })
    }

    /// Returns the first contiguous piece of the `len` bytes at `addr` for reading; see [`Translator::write`].
    #[inline]
    pub fn read(&mut self, addr: u64, len: usize) -> Option<ReadSlice<'m>> {
        let (base, len) = self.piece(addr, len)?;
        // SAFETY: `piece` checked the range, and the borrow of the map keeps it mapped for 'm.
        Some(unsafe { ReadSlice::from_raw(base, len) })
    }

    /// Returns the first contiguous piece of the `len` bytes at `addr` for writing, or `None` if `addr` is in
    /// no region. It is shorter than `len` if the buffer crosses the border of two regions; the caller then
    /// translates the rest.
    #[inline]
    pub fn write(&mut self, addr: u64, len: usize) -> Option<WriteSlice<'m>> {
        let (base, len) = self.piece(addr, len)?;
        // SAFETY: `piece` checked the range, and the borrow of the map keeps it mapped for 'm.
        Some(unsafe { WriteSlice::from_raw(base, len) })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd};

    use rustix::fs::{MemfdFlags, SealFlags};

    use super::*;
    use crate::shared::SharedMem;
    use crate::words::Words;

    fn region(guest_addr: u64, user_addr: u64, size: u64) -> Arc<Region> {
        let mem = SharedMem::new("test", size as usize).unwrap();
        Region::map(mem.fd(), RegionSpec { guest_addr, size, user_addr, mmap_offset: 0 }).unwrap()
    }

    #[test]
    fn areas_stay_inside_one_region() {
        let map = GuestMemory::new(vec![region(0x1000, 0x7000_0000, 0x2000)]).unwrap();
        assert!(map.area(0x1000, 0x2000).is_some());
        assert!(map.area(0x1000, 0x2001).is_none());
        assert!(map.area(0xfff, 1).is_none());
        assert!(map.area(0x3000, 1).is_none());
        assert!(map.user_area(0x7000_1fff, 1).is_some());
        assert!(map.user_area(0x1000, 1).is_none());
        assert!(map.area(u64::MAX, usize::MAX).is_none());
        assert_eq!(map.area(0x1234, 8).unwrap().guest_addr(), 0x1234);
        assert_eq!(map.user_area(0x7000_0ffe, 2).unwrap().guest_addr(), 0x1ffe);
    }

    #[test]
    fn cve_2018_1059_translation_never_runs_past_a_region() {
        let map = GuestMemory::new(vec![region(0, 0, 0x1000), region(0x1000, 0x9000, 0x1000)]).unwrap();
        let mut t = map.translator();
        // Across the border of two adjacent regions: two pieces.
        assert_eq!(t.read(0xf00, 0x200).unwrap().len(), 0x100);
        assert_eq!(t.read(0x1000, 0x100).unwrap().len(), 0x100);
        // Past the end of the last: a short piece, then nothing.
        assert_eq!(t.write(0x1ff0, 0x100).unwrap().len(), 0x10);
        assert!(t.write(0x2000, 1).is_none());
        assert!(t.read(u64::MAX, 2).is_none());
    }

    #[test]
    fn overlapping_regions_are_refused() {
        let err = GuestMemory::new(vec![region(0, 0, 0x2000), region(0x1000, 0x9000, 0x1000)]).unwrap_err();
        assert_eq!(err, MemoryError::Overlap(0x1000));
    }

    #[test]
    fn hot_plug_and_unplug() {
        let map = GuestMemory::new(vec![region(0, 0, 0x1000)]).unwrap();
        let more = map.with(region(0x8000, 0x1000, 0x1000)).unwrap();
        assert!(more.area(0x8000, 8).is_some());
        assert!(map.area(0x8000, 8).is_none());
        let area = more.area(0x8000, 8).unwrap();
        let less = more.without(0x8000, 0x1000, 0x1000).unwrap();
        drop(more);
        assert!(less.area(0x8000, 8).is_none());
        area.store16(0, 7); // still mapped: the area keeps its region
        assert_eq!(area.load16_acquire(0), 7);
        assert_eq!(less.without(0x8000, 0x1000, 0x1000).unwrap_err(), MemoryError::Missing(0x8000));
    }

    #[test]
    fn a_truncated_file_loses_the_region_and_nothing_else() {
        let mem = SharedMem::new("shrinks", 0x4000).unwrap();
        let spec = RegionSpec { guest_addr: 0, size: 0x4000, user_addr: 0, mmap_offset: 0 };
        let map = GuestMemory::new(vec![Region::map(mem.fd(), spec).unwrap()]).unwrap();
        let other = GuestMemory::new(vec![region(0, 0, 0x1000)]).unwrap();
        let area = map.area(0, 0x4000).unwrap();
        area.store64(0x3000, 42);
        rustix::fs::ftruncate(mem.fd(), 0).unwrap();
        assert_eq!(area.load64(0x3000), 0);
        assert!(map.is_lost());
        assert!(!other.is_lost());
        let mut buf = [1u8; 16];
        map.translator().read(0, 16).unwrap().copy_to(&mut buf);
        assert_eq!(buf, [0; 16]);
    }

    #[test]
    fn a_file_shorter_than_its_region_is_refused() {
        let mem = SharedMem::new("short", 0x1000).unwrap();
        let spec = RegionSpec { guest_addr: 0, size: 0x2000, user_addr: 0, mmap_offset: 0 };
        assert!(matches!(Region::map(mem.fd(), spec), Err(crate::MapError::FileTooShort { .. })));
        let spec = RegionSpec { guest_addr: u64::MAX, size: 0x1000, user_addr: 0, mmap_offset: 0 };
        assert!(matches!(Region::map(mem.fd(), spec), Err(crate::MapError::BadRange(_))));
        let spec = RegionSpec { guest_addr: 0, size: 0, user_addr: 0, mmap_offset: 0 };
        assert!(matches!(Region::map(mem.fd(), spec), Err(crate::MapError::BadRange(_))));
    }

    #[test]
    fn d1_only_memory_is_mapped_and_the_error_says_what_to_use() {
        let spec = RegionSpec { guest_addr: 0, size: 0x1000, user_addr: 0, mmap_offset: 0 };
        // Beside the test's program, as temporary files may lie in memory.
        let program = std::env::current_exe().unwrap();
        let disk = tempfile::tempfile_in(program.parent().unwrap()).unwrap();
        disk.set_len(0x1000).unwrap();
        let shm = tempfile::tempfile_in("/dev/shm").unwrap();
        shm.set_len(0x1000).unwrap();
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        for fd in [disk.into(), pipe, std::fs::File::open("/dev/zero").unwrap().into()] {
            let fd: std::os::fd::OwnedFd = fd;
            let error = Region::map(fd.as_fd(), spec).unwrap_err();
            assert!(matches!(error, crate::MapError::NotMemory), "{error}");
            assert!(error.to_string().contains("memory-backend-memfd"));
        }
        Region::map(shm.as_fd(), spec).unwrap();
    }

    #[test]
    fn memory_that_cannot_be_written_is_refused_with_advice_of_its_own() {
        let spec = RegionSpec { guest_addr: 0, size: 0x1000, user_addr: 0, mmap_offset: 0 };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = || {
            let fd = rustix::fs::memfd_create("sealed", flags).unwrap();
            rustix::fs::ftruncate(&fd, 0x1000).unwrap();
            fd
        };
        let refused = |fd: BorrowedFd<'_>| Region::map(fd, spec).unwrap_err().to_string();
        for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE] {
            let sealed = memory();
            rustix::fs::fcntl_add_seals(&sealed, seal).unwrap();
            let error = refused(sealed.as_fd());
            assert!(error.contains("sealed against writing") && !error.contains("must be shared"), "{error}");
        }
        let shm = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        shm.as_file().set_len(0x1000).unwrap();
        let error = refused(std::fs::File::open(shm.path()).unwrap().as_fd());
        assert!(error.contains("readonly=on") && !error.contains("must be shared"), "{error}");
        // The seals that VMMs set do no harm.
        let usual = memory();
        rustix::fs::fcntl_add_seals(&usual, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
        Region::map(usual.as_fd(), spec).unwrap();
    }

    #[test]
    fn an_offset_inside_a_page_is_mapped_from_its_page() {
        let mem = SharedMem::new("offset", 0x3000).unwrap();
        let whole = RegionSpec { guest_addr: 0, size: 0x3000, user_addr: 0, mmap_offset: 0 };
        let part = RegionSpec { guest_addr: 0, size: 0x1000, user_addr: 0, mmap_offset: 0x1100 };
        let whole = GuestMemory::new(vec![Region::map(mem.fd(), whole).unwrap()]).unwrap();
        let part = GuestMemory::new(vec![Region::map(mem.fd(), part).unwrap()]).unwrap();
        part.area(0, 8).unwrap().store64(0, 0x1234);
        assert_eq!(whole.area(0x1100, 8).unwrap().load64(0), 0x1234);
    }
}
