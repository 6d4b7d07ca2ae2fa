//! Memory that was mapped before it came to this library, and a program's own SIGBUS handler.
//!
//! The last test installs a SIGBUS handler for the whole process before the library installs its own, so no other
//! test here may make a region that is guarded.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ringferry_memory::{
    GuestMemory, MapError, MemoryError, Region, RegionSpec, SharedMem, Truncation, Words,
};
use rustix::mm::{MapFlags, ProtFlags};

const PAGE: usize = 4096;

/// A mapping as a VMM makes it; unmapped when it is dropped, which `gone` says.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    gone: Arc<AtomicBool>,
}

// SAFETY: the pointer is only given to `munmap`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &std::fs::File, len: usize) -> Self {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address the kernel chooses touches nothing that exists.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, both, MapFlags::SHARED, file, 0) };
        Self { base: NonNull::new(base.unwrap().cast()).unwrap(), len, gone: Arc::default() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and whoever used it is gone.
        unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) }.unwrap();
        self.gone.store(true, Ordering::Relaxed);
    }
}

fn spec(guest_addr: u64, size: usize) -> RegionSpec {
    RegionSpec { guest_addr, size: size as u64, user_addr: guest_addr, mmap_offset: 0 }
}

fn file(len: usize) -> std::fs::File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(len as u64).unwrap();
    file
}

/// A region over heap memory that lives as long as the region does.
fn heap(offset: usize, spec: RegionSpec) -> Result<Arc<Region>, MapError> {
    let words: Arc<[AtomicUsize]> = (0..2 * PAGE / 8).map(AtomicUsize::new).collect();
    let base = NonNull::from(&words[..]).cast::<u8>();
    // SAFETY: the tests ask for no more than two pages, or for what is refused before anything is touched.
    unsafe { Region::existing(base.add(offset), spec, Truncation::Impossible, words) }
}

#[test]
fn ranges_that_are_empty_or_wrap_around_are_refused() {
    for bad in [spec(0, 0), spec(u64::MAX, PAGE), spec(0, usize::MAX), spec(0, isize::MAX as usize + 1)] {
        assert!(matches!(heap(0, bad), Err(MapError::BadRange(_))), "{bad:?}");
    }
    let user = RegionSpec { user_addr: u64::MAX, ..spec(0, PAGE) };
    assert!(matches!(heap(0, user), Err(MapError::BadRange(0))));
    assert!(heap(0, spec(0, 1)).is_ok(), "one byte is memory");
}

#[test]
fn guest_addresses_may_not_overlap_and_bytes_may() {
    let (low, high) = (heap(0, spec(0, PAGE)).unwrap(), heap(0, spec(PAGE as u64 - 1, PAGE)).unwrap());
    assert_eq!(GuestMemory::new(vec![low, high]).unwrap_err(), MemoryError::Overlap(PAGE as u64 - 1));

    let mapping = Arc::new(Mapping::new(&file(PAGE), PAGE));
    let view = |guest_addr| {
        let (spec, owner) = (spec(guest_addr, PAGE), Arc::clone(&mapping));
        // SAFETY: the owner is the mapping, which is as long, and nobody truncates its file.
        unsafe { Region::existing(mapping.base, spec, Truncation::Impossible, owner) }.unwrap()
    };
    let memory = GuestMemory::new(vec![view(0), view(0x10_0000)]).unwrap();
    memory.area(8, 8).unwrap().store64(0, 77);
    assert_eq!(memory.area(0x10_0008, 8).unwrap().load64(0), 77);
}

#[test]
fn any_alignment_does_for_bytes_and_rings_see_that_it_does_not_for_words() {
    let memory = GuestMemory::new(vec![heap(3, spec(0, PAGE)).unwrap()]).unwrap();
    let mut bytes = [0; 4];
    let mut translator = memory.translator();
    translator.write(PAGE as u64 - 4, 4).unwrap().copy_from(b"last");
    translator.read(PAGE as u64 - 4, 9).unwrap().copy_to(&mut bytes);
    assert_eq!(&bytes, b"last");
    let area = memory.area(0, 64).unwrap();
    assert!(!area.is_aligned(2) && area.slots(1).is_none() && area.table::<u16>(0, 1).is_none());
}

#[test]
fn the_owner_goes_with_the_last_user_and_not_before() {
    let mapping = Mapping::new(&file(PAGE), PAGE);
    let (base, gone) = (mapping.base, Arc::clone(&mapping.gone));
    // SAFETY: the owner is the mapping, which is as long, and nobody truncates its file.
    let region = unsafe { Region::existing(base, spec(0, PAGE), Truncation::Impossible, mapping) }.unwrap();
    let area = region.area(0, 8).unwrap();
    drop(region);
    area.store64(0, 1);
    assert!(!gone.load(Ordering::Relaxed));
    drop(area);
    assert!(gone.load(Ordering::Relaxed));
}

/// Number of times that the program's own handler ran.
static OWN: AtomicUsize = AtomicUsize::new(0);

/// A program's own handler, which survives too: it puts a page where there is none.
extern "C" fn own_handler(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    OWN.fetch_add(1, Ordering::Relaxed);
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the fault is in a mapping of the test below, whose page is replaced.
    unsafe {
        let page = (*info).si_addr().map_addr(|addr| addr & !(PAGE - 1));
        libc::mmap(page, PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
    }
}

#[test]
fn a_truncated_file_is_survived_where_it_is_guarded_and_left_to_the_program_elsewhere() {
    // SAFETY: a zeroed action is valid; the handler is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = own_handler as extern "C" fn(_, _, _) as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()), 0);
    }
    let file = file(4 * PAGE);
    let guarded = Arc::new(Mapping::new(&file, 4 * PAGE));
    let other = Arc::new(Mapping::new(&file, 4 * PAGE));
    let region = |mapping: &Arc<Mapping>, offset: usize, pages: usize, truncation| {
        assert!(offset + pages * PAGE <= 4 * PAGE);
        // SAFETY: the owner is the mapping, of which this is a part; where it is not guarded, the program's own
        // handler sees to it.
        unsafe {
            let base = mapping.base.add(offset);
            Region::existing(base, spec(0, pages * PAGE), truncation, Arc::clone(mapping))
        }
    };
    let unaligned = region(&guarded, 8, 1, Truncation::Possible);
    assert!(matches!(unaligned, Err(MapError::Unaligned(0))), "{unaligned:?}");

    let whole = region(&guarded, 0, 4, Truncation::Possible).unwrap();
    let part = region(&guarded, PAGE, 2, Truncation::Possible).unwrap();
    let unguarded = region(&other, 0, 4, Truncation::Impossible).unwrap();
    let sealed = SharedMem::new("sealed", PAGE).unwrap().map_at(0).unwrap();
    file.set_len(0).unwrap();

    assert_eq!(unguarded.area(0, 8).unwrap().load64(0), 0);
    assert_eq!(OWN.load(Ordering::Relaxed), 1, "the program's handler is asked");
    assert!(![&whole, &part, &unguarded].iter().any(|region| region.is_lost()));

    // Where both are, what they have in common is replaced; then the rest of the larger one, page after page.
    assert_eq!(part.area(0, 8).unwrap().load64(0), 0);
    assert!(part.is_lost() && whole.is_lost() && !sealed.is_lost());
    for at in [0, 3 * PAGE] {
        assert_eq!(whole.area(at, 8).unwrap().load64(0), 0);
    }
    assert_eq!(OWN.load(Ordering::Relaxed), 1);
    // Each registration goes by itself, and the next one in its place begins anew.
    drop(whole);
    assert!(part.is_lost());
    assert!(!region(&guarded, PAGE, 1, Truncation::Possible).unwrap().is_lost());
}
