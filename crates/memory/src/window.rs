//! A window: a reserved range of addresses into which single pages are mapped, such as the grants of a Xen back
//! end.
//!
//! A back end reserves one [`Window`] per connection; its thread maps and unmaps pages as grants come and go,
//! and reads and writes them through slices. The window owns the addresses and all mappings in them, and
//! unmaps them when it is dropped. The addresses stay reserved, so no other mapping can get in between:
//!
//! ```text
//!              map, map_populated
//!   empty ─────────────────────────► readable or writable (one page of a file)
//!  (faults)◄────────────────────────
//!                    unmap
//! ```
//!
//! No slice of an empty slot is ever given out. There is no [`sigbus`](crate::sigbus) guard, so the pages of a
//! mapped file must never vanish. Device files of Xen guarantee that; a memfd does if it is sealed against
//! shrinking and has ordinary pages, which [`is_steady`] checks for a descriptor from a peer.

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::region::{Kept, Region};
use crate::slice::{ReadSlice, WriteSlice};

/// Size of a slot in bytes: a page of Xen, independent of the machine's own page size.
pub const SLOT: usize = 4096;

/// `TMPFS_MAGIC` of `linux/magic.h`: the file system of memfds with ordinary pages.
const TMPFS: u32 = 0x0102_1994;

/// The state of a slot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slot {
    Empty,
    Readable,
    Writable,
}

/// A range of slots, each of them empty or one mapped page; see the [module](self).
pub struct Window {
    base: *mut u8,
    slots: Box<[Slot]>,
    kept: Vec<Kept>,
}

// SAFETY: what is mapped is shared memory, reached only through copies; only `&mut self` changes the mappings.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Window({} of {} slots)", self.mapped(), self.slots.len())
    }
}

impl Window {
    /// Reserves addresses for `slots` pages, all empty. This takes no memory except one byte per slot.
    ///
    /// # Errors
    /// `InvalidInput`, if `slots` is 0 or exceeds the address space; `Unsupported`, if the machine's pages do
    /// not have [`SLOT`] bytes; `OutOfMemory`.
    pub fn reserve(slots: usize) -> io::Result<Window> {
        if rustix::param::page_size() != SLOT {
            let text = format!("pages can be mapped one by one only where a page is {SLOT} bytes");
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let bytes = slots.checked_mul(SLOT).filter(|bytes| *bytes > 0);
        let Some(bytes) = bytes else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a window needs 1 to 2^51 slots"));
        };
        // SAFETY: a fresh mapping at an address the kernel chooses touches nothing that exists.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), RESERVED)? };
        Ok(Window { base: base.cast(), slots: vec![Slot::Empty; slots].into(), kept: Vec::new() })
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Returns the number of slots that hold a page.
    pub fn mapped(&self) -> usize {
        self.slots.iter().filter(|slot| **slot != Slot::Empty).count()
    }

    /// Returns true if `slot` holds a page; false also for a slot outside the window.
    #[inline]
    pub fn is_mapped(&self, slot: usize) -> bool {
        self.slots.get(slot).is_some_and(|slot| *slot != Slot::Empty)
    }

    /// Maps `pages` pages of `fd` from byte `offset` on, shared, to the slots from `slot` on, by one system call.
    /// For device files whose mappings are complete when the call returns.
    ///
    /// # Errors
    /// `InvalidInput`, if a slot is outside the window or in use (nothing has changed then); the errors of
    /// `mmap` (the slots are empty then).
    pub fn map(
        &mut self,
        slot: usize,
        pages: usize,
        fd: BorrowedFd<'_>,
        offset: u64,
        writable: bool,
    ) -> io::Result<()> {
        self.map_with(slot, pages, fd, offset, writable, MapFlags::SHARED)
    }

    /// Does the same as [`map`](Self::map) for files in memory, and populates the page tables in the same
    /// call, so that the first access does not fault, as it would not after a hypervisor has mapped a page.
    ///
    /// # Errors
    /// The same as [`map`](Self::map).
    pub fn map_populated(
        &mut self,
        slot: usize,
        pages: usize,
        fd: BorrowedFd<'_>,
        offset: u64,
        writable: bool,
    ) -> io::Result<()> {
        self.map_with(slot, pages, fd, offset, writable, MapFlags::SHARED | MapFlags::POPULATE)
    }

    fn map_with(
        &mut self,
        slot: usize,
        pages: usize,
        fd: BorrowedFd<'_>,
        offset: u64,
        writable: bool,
        flags: MapFlags,
    ) -> io::Result<()> {
        let free = self.range(slot, pages).is_some_and(|range| range.iter().all(|slot| *slot == Slot::Empty));
        if !free {
            let text = format!("slots {slot} + {pages} of the window are in use or outside");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: the range is inside the window and empty, so no slice of it exists.
        let mapped = unsafe {
            let at = self.base.add(slot * SLOT);
            rustix::mm::mmap(at.cast(), pages * SLOT, protection, flags | MapFlags::FIXED, fd, offset)
        };
        if let Err(error) = mapped {
            // A driver may refuse after the kernel has removed the reservation. The hole must be closed, as the
            // kernel could place another mapping there. That cannot exceed the limit of mappings, since one was
            // just removed. At the limit the kernel refuses both calls before it removes anything.
            if let Err(unclosed) = self.clear(slot, pages) {
                assert!(self.is_reserved(slot, pages), "a hole in a window cannot be closed: {unclosed}");
            }
            return Err(error.into());
        }
        let state = if writable { Slot::Writable } else { Slot::Readable };
        self.slots[slot..slot + pages].fill(state);
        Ok(())
    }

    /// Unmaps the `pages` slots from `slot` on, by one system call. Empty slots among them stay empty.
    ///
    /// # Errors
    /// `InvalidInput`, if they are not all inside the window; the errors of `mmap`, such as `OutOfMemory` if the
    /// process is at its limit of mappings (`vm.max_map_count`), as splitting one needs two more. All slots
    /// stay mapped then.
    pub fn unmap(&mut self, slot: usize, pages: usize) -> io::Result<()> {
        if self.range(slot, pages).is_none() {
            let text = format!("slots {slot} + {pages} are outside the window");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        self.clear(slot, pages)?;
        self.slots[slot..slot + pages].fill(Slot::Empty);
        Ok(())
    }

    /// Returns the states of a range of slots, or `None` if it is empty or not completely inside the window.
    fn range(&self, slot: usize, pages: usize) -> Option<&[Slot]> {
        (pages > 0).then(|| self.slots.get(slot..slot.checked_add(pages)?)).flatten()
    }

    /// Replaces all mappings in a range, which must be inside the window, by the reservation.
    fn clear(&mut self, slot: usize, pages: usize) -> io::Result<()> {
        // SAFETY: the range is inside the window, and `&mut self` says that no slice of it exists.
        unsafe {
            let at = self.base.add(slot * SLOT);
            let flags = RESERVED.union(MapFlags::FIXED);
            rustix::mm::mmap_anonymous(at.cast(), pages * SLOT, ProtFlags::empty(), flags)?;
        }
        Ok(())
    }

    /// Returns true if something is mapped everywhere in a range, which must be inside the window.
    #[cold]
    fn is_reserved(&self, slot: usize, pages: usize) -> bool {
        // SAFETY: the range is inside the window, and this advice, which is that of any new mapping, changes nothing.
        unsafe {
            let at = self.base.add(slot * SLOT);
            rustix::mm::madvise(at.cast(), pages * SLOT, rustix::mm::Advice::Normal).is_ok()
        }
    }

    /// Returns `len` bytes of a slot from its byte `offset` on for reading, or `None` if the slot is empty or the
    /// bytes are not all in it.
    #[inline(always)]
    pub fn read(&self, slot: usize, offset: usize, len: usize) -> Option<ReadSlice<'_>> {
        let state = *self.slots.get(slot)?;
        let inside = offset <= SLOT && len <= SLOT - offset && state != Slot::Empty;
        // SAFETY: the slot is mapped, the bytes lie in it, and the mapping changes only under `&mut self`.
        inside.then(|| unsafe { ReadSlice::from_raw(self.base.add(slot * SLOT + offset), len) })
    }

    /// Returns `len` bytes of a slot from its byte `offset` on for writing, or `None` if the slot is empty or
    /// mapped read-only, or the bytes are not all in it.
    #[inline(always)]
    pub fn write(&self, slot: usize, offset: usize, len: usize) -> Option<WriteSlice<'_>> {
        let state = *self.slots.get(slot)?;
        let inside = offset <= SLOT && len <= SLOT - offset && state == Slot::Writable;
        // SAFETY: the slot is mapped writable; otherwise as above.
        inside.then(|| unsafe { WriteSlice::from_raw(self.base.add(slot * SLOT + offset), len) })
    }

    /// Returns the window's object of type `T`, made on first use, in which the user of the window keeps data
    /// about its mappings. It is dropped after the last page is unmapped, so its drop may signal the end of all
    /// mappings.
    pub fn keep<T: Any + Default + Send + Sync>(&mut self) -> &mut T {
        let at = self.kept.iter().position(|kept| kept.0.is::<T>());
        let at = at.unwrap_or_else(|| {
            self.kept.push(Kept(Box::<T>::default()));
            self.kept.len() - 1
        });
        self.kept[at].0.downcast_mut().expect("found by its type")
    }

    /// Turns the whole window, with its [kept](Self::keep) objects, into one region for rings.
    ///
    /// # Errors
    /// The window itself, if a slot does not hold a writable page.
    pub fn into_region(mut self) -> Result<Arc<Region>, Window> {
        if self.slots.iter().any(|slot| *slot != Slot::Writable) {
            return Err(self);
        }
        let bytes = self.slots.len() * SLOT;
        let kept = std::mem::take(&mut self.kept);
        let base = self.base;
        drop(std::mem::take(&mut self.slots));
        std::mem::forget(self); // owns nothing any more but the mapping
        // SAFETY: the whole range is mapped readable and writable, and from here on belongs to the region.
        Ok(unsafe { Region::adopt(base, bytes, kept) })
    }
}

/// Flags of the mapping of empty slots, which needs neither memory nor swap space.
const RESERVED: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the range is ours, and slices of it borrow the window. What is kept is dropped afterwards.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.slots.len() * SLOT) };
    }
}

/// Returns true if pages of this file can be mapped without a guard although a peer has it, too: if it is a memfd
/// of ordinary pages, sealed against shrinking, and at least `size` bytes long.
///
/// Huge pages are refused, because touching one raises SIGBUS when there are none left.
///
/// # Errors
/// The errors of `fcntl`, `fstatfs` and `fstat`.
pub fn is_steady(fd: BorrowedFd<'_>, size: u64) -> io::Result<bool> {
    // The seals are read first: facts found after them cannot change any more.
    let sealed = match rustix::fs::fcntl_get_seals(fd) {
        Err(rustix::io::Errno::INVAL) => return Ok(false), // not a memfd
        seals => seals?.contains(SealFlags::SHRINK),
    };
    let ordinary = rustix::fs::fstatfs(fd)?.f_type as u32 == TMPFS;
    Ok(sealed && ordinary && rustix::fs::fstat(fd)?.st_size as u64 >= size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::Mutex;

    use rustix::fs::MemfdFlags;

    fn memfd(pages: usize) -> OwnedFd {
        named("window", pages)
    }

    /// A memfd whose pages are filled with their number, from 1.
    fn named(name: &str, pages: usize) -> OwnedFd {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, (pages * SLOT) as u64).unwrap();
        for page in 0..pages {
            rustix::io::pwrite(&fd, &[page as u8 + 1; SLOT], (page * SLOT) as u64).unwrap();
        }
        fd
    }

    /// Reads from `/proc/self/maps` the permissions and the file of the mapping at an address.
    fn mapped_at(addr: usize) -> Option<(String, String)> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            let (start, end) = words.next()?.split_once('-')?;
            let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
            let permissions = words.next()?.to_owned();
            range.contains(&addr).then(|| (permissions, words.nth(3).unwrap_or_default().to_owned()))
        })
    }

    impl Window {
        fn at(&self, slot: usize) -> (String, String) {
            mapped_at(self.base.addr() + slot * SLOT).unwrap()
        }

        fn byte(&self, slot: usize) -> Option<u8> {
            self.read(slot, SLOT - 1, 1).and_then(|slice| slice.array::<1>()).map(|[byte]| byte)
        }
    }

    #[test]
    fn slots_hold_the_pages_they_were_given_and_nothing_else() {
        let (file, mut window) = (memfd(4), Window::reserve(6).unwrap());
        window.map(1, 2, file.as_fd(), SLOT as u64, true).unwrap();
        window.map_populated(4, 1, file.as_fd(), 0, false).unwrap();
        let bytes: Vec<_> = (0..7).map(|slot| window.byte(slot)).collect();
        assert_eq!(bytes, [None, Some(2), Some(3), None, Some(1), None, None]);
        assert_eq!((window.slots(), window.mapped()), (6, 3));
        assert!(window.at(1).0 == "rw-s" && window.at(4).0 == "r--s" && window.at(0).0 == "---p");
        assert!(window.write(4, 0, 1).is_none());
        assert_eq!(window.write(1, 0, 3).unwrap().copy_from(b"abc"), 3);
        let mut read = [0; 3];
        rustix::io::pread(&file, &mut read, SLOT as u64).unwrap();
        assert_eq!(&read, b"abc");
    }

    #[test]
    fn slices_never_leave_their_page() {
        let (file, mut window) = (memfd(2), Window::reserve(2).unwrap());
        window.map(0, 2, file.as_fd(), 0, true).unwrap();
        assert_eq!(window.read(0, 0, SLOT).unwrap().len(), SLOT);
        assert_eq!(window.write(0, SLOT, 0).unwrap().len(), 0);
        for (slot, offset, len) in
            [(0, 1, SLOT), (0, SLOT + 1, 0), (1, SLOT, 1), (0, usize::MAX, 2), (0, 2, usize::MAX), (2, 0, 0)]
        {
            assert!(window.read(slot, offset, len).is_none(), "{slot} {offset} {len}");
            assert!(window.write(slot, offset, len).is_none(), "{slot} {offset} {len}");
        }
    }

    #[test]
    fn what_cannot_be_mapped_leaves_the_window_as_it_was() {
        let (file, mut window) = (memfd(4), Window::reserve(4).unwrap());
        window.map(1, 1, file.as_fd(), 0, true).unwrap();
        for (slot, pages) in [(1, 1), (0, 2), (3, 2), (4, 1), (0, 0), (usize::MAX, 1), (1, usize::MAX)] {
            let error = window.map(slot, pages, file.as_fd(), 0, true).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{slot} {pages}");
        }
        let read_only = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(window.map(2, 1, read_only.as_fd(), 0, true).is_err());
        assert!(window.map(2, 1, file.as_fd(), 1, true).is_err());
        assert_eq!(window.mapped(), 1);
        assert_eq!(window.at(2).0, "---p");
        window.map(2, 1, file.as_fd(), 0, true).unwrap();
        assert_eq!((window.byte(1), window.byte(2)), (Some(1), Some(1)));
        assert!(Window::reserve(0).is_err() && Window::reserve(usize::MAX).is_err());
    }

    #[test]
    fn unmapped_slots_are_reserved_again() {
        let (file, mut window) = (memfd(4), Window::reserve(4).unwrap());
        window.map(0, 4, file.as_fd(), 0, true).unwrap();
        window.unmap(1, 2).unwrap();
        assert_eq!([0, 1, 2, 3].map(|slot| window.byte(slot)), [Some(1), None, None, Some(4)]);
        assert!(window.at(1).0 == "---p" && window.at(2).1.is_empty());
        window.unmap(0, 4).unwrap(); // empty ones stay so
        assert_eq!(window.mapped(), 0);
        for (slot, pages) in [(0, 0), (0, 5), (4, 1), (usize::MAX, 2)] {
            assert!(window.unmap(slot, pages).is_err(), "{slot} {pages}");
        }
    }

    /// The kept object in these tests: when it is dropped, it records the mapping at an address.
    #[derive(Default)]
    struct Witness {
        addr: usize,
        saw: Arc<Mutex<Option<bool>>>,
    }

    impl Drop for Witness {
        fn drop(&mut self) {
            let there = mapped_at(self.addr).is_some_and(|(_, file)| file.contains("memfd:witness"));
            *self.saw.lock().unwrap() = Some(there);
        }
    }

    #[test]
    fn what_is_kept_goes_after_the_mappings() {
        for as_region in [false, true] {
            // A name of its own: another test may get the same addresses at once.
            let name = if as_region { "witness region" } else { "witness window" };
            let (file, mut window) = (named(name, 2), Window::reserve(2).unwrap());
            let addr = window.base.addr();
            window.map(0, 2, file.as_fd(), 0, true).unwrap();
            let witness: &mut Witness = window.keep();
            witness.addr = addr;
            let saw = Arc::clone(&witness.saw);
            assert_eq!(window.keep::<Witness>().addr, addr, "one of a type");
            window.keep::<Vec<u8>>().push(1);
            if as_region {
                let region = window.into_region().unwrap();
                let area = region.area(SLOT, SLOT).unwrap();
                drop(region);
                assert_eq!(area.read(0, 1).unwrap().array(), Some([2]));
                assert_eq!(*saw.lock().unwrap(), None);
            } else {
                drop(window);
            }
            assert_eq!(*saw.lock().unwrap(), Some(false));
        }
    }

    #[test]
    fn only_a_window_full_of_writable_pages_is_a_region() {
        let (file, mut window) = (memfd(2), Window::reserve(2).unwrap());
        window.map(0, 1, file.as_fd(), 0, true).unwrap();
        let mut window = window.into_region().unwrap_err();
        window.map(1, 1, file.as_fd(), 0, false).unwrap();
        let mut window = window.into_region().unwrap_err();
        window.unmap(1, 1).unwrap();
        window.map(1, 1, file.as_fd(), 0, true).unwrap();
        let region = window.into_region().unwrap();
        assert_eq!(region.spec().guest_addr % SLOT as u64, 0);
        assert_eq!((region.spec().size, region.spec().user_addr), (8192, region.spec().guest_addr));
        assert!(region.area(1, 2 * SLOT).is_none() && region.area(usize::MAX, 2).is_none());
    }

    #[test]
    fn exact_regions_have_addresses_of_their_own() {
        let file = memfd(2);
        let one = Region::map_exact(file.as_fd(), 0, SLOT).unwrap();
        let two = Region::map_exact(file.as_fd(), SLOT as u64, SLOT).unwrap();
        let memory = crate::GuestMemory::new(vec![one, Arc::clone(&two)]).unwrap();
        let mut translator = memory.translator();
        assert_eq!(translator.read(two.spec().guest_addr, SLOT).unwrap().array(), Some([2]));
        assert!(Region::map_exact(file.as_fd(), 0, 0).is_err());
        assert!(Region::map_exact(file.as_fd(), 1, SLOT).is_err());
    }

    #[test]
    fn only_sealed_memory_of_ordinary_pages_is_steady() {
        let (sealed, open) = (memfd(2), memfd(2));
        rustix::fs::fcntl_add_seals(&sealed, SealFlags::SHRINK).unwrap();
        assert!(is_steady(sealed.as_fd(), 2 * SLOT as u64).unwrap());
        assert!(!is_steady(sealed.as_fd(), 2 * SLOT as u64 + 1).unwrap());
        assert!(!is_steady(open.as_fd(), SLOT as u64).unwrap());
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(!is_steady(pipe.as_fd(), 0).unwrap());
        assert!(!is_steady(std::fs::File::open("/proc/self/exe").unwrap().as_fd(), 0).unwrap());
        let huge = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        if let Ok(huge) = rustix::fs::memfd_create("huge", huge) {
            rustix::fs::fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
            assert!(!is_steady(huge.as_fd(), 0).unwrap());
        }
    }
}
