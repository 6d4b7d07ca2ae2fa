//! Atomic words of shared memory, the only way in which rings access memory that a peer can write.
//!
//! The parts of a ring are resolved to an [`Area`] once, at set-up; the ring makes tables of it ([`Words::table`],
//! [`Words::slots`]), whose bounds are checked then, and owns them until it is dropped. One thread uses them on
//! this side, the peer on the other. Rings are generic over [`Words`], so the same ring code runs on guest
//! memory ([`Area`]), on the heap in tests, and under a model checker that supplies its own atomics. Words are
//! little endian (VIRTIO 1.4, 1.4 "Structure Specifications").

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::region::Region;
use crate::slice::{ReadSlice, WriteSlice, prefetch_read, prefetch_write};

/// A resolved range of shared memory, seen as naturally aligned little-endian words.
///
/// `at` is a byte offset. The ring has checked its offsets against [`Words::len`] at set-up; an implementation
/// checks again and panics, which only a bug of the ring can cause, never a peer.
pub trait Words {
    /// True if a ring in this memory shadows the words that it writes, that is, keeps private copies and never
    /// loads them. It is false only in the experiment that measures the gain.
    const SHADOW: bool = true;
    /// Returns the length in bytes.
    fn len(&self) -> usize;
    /// Returns true if the length is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Returns true if the first byte is at a multiple of `align` (a power of two).
    fn is_aligned(&self, align: usize) -> bool;
    /// Loads 16 bits with relaxed order.
    fn load16(&self, at: usize) -> u16;
    /// Loads 16 bits with acquire order: later accesses cannot move before it.
    fn load16_acquire(&self, at: usize) -> u16;
    /// Stores 16 bits with relaxed order.
    fn store16(&self, at: usize, value: u16);
    /// Stores 16 bits with release order: earlier accesses cannot move behind it.
    fn store16_release(&self, at: usize, value: u16);
    /// Loads 32 bits with relaxed order.
    fn load32(&self, at: usize) -> u32;
    /// Stores 32 bits with relaxed order.
    fn store32(&self, at: usize, value: u32);
    /// Loads 32 bits with acquire order: later accesses cannot move before it.
    fn load32_acquire(&self, at: usize) -> u32;
    /// Stores 32 bits with release order: earlier accesses cannot move behind it.
    fn store32_release(&self, at: usize, value: u32);
    /// Loads 64 bits with relaxed order.
    fn load64(&self, at: usize) -> u64;
    /// Loads 64 bits with acquire order: later accesses cannot move before it.
    fn load64_acquire(&self, at: usize) -> u64;
    /// Stores 64 bits with relaxed order.
    fn store64(&self, at: usize, value: u64);
    /// Stores 64 bits with release order: earlier accesses cannot move behind it.
    fn store64_release(&self, at: usize, value: u64);
    /// Executes a full fence: no later load may be performed before an earlier store is visible. The Dekker
    /// handshake of notifications needs it on both sides: between the store of an index and the load of the
    /// peer's event suppression, and between the store of the own event suppression and the load of the
    /// peer's index.
    fn full_fence();
    /// The type of a table of entries in this memory: [`WordTable`] unless there is a faster one.
    type Table<E: Entry>: Table<E> + Clone + std::fmt::Debug;
    /// Returns the table of `count` entries at byte offset `at`, or `None` if it is not inside the memory, is not
    /// aligned to the words of its entries, or `count` is not a power of two.
    fn table<E: Entry>(&self, at: usize, count: u16) -> Option<Self::Table<E>>;
    /// The type of the descriptors of a packed ring: [`WordSlots`] unless there is a faster one.
    type Slots: Slots + Clone + std::fmt::Debug;
    /// Returns the `count` slots from the first byte on, or `None` if they are not inside the memory, are not
    /// aligned to 8 bytes, or `count` is 0.
    fn slots(&self, count: u16) -> Option<Self::Slots>;
}

/// The descriptors of a packed ring: any number of slots of two 64-bit words each. The second word is always
/// accessed as a whole, and its flags tell which side owns the slot; the first word belongs to that side.
///
/// An index outside the ring panics; only a bug of the ring can cause it, never a peer.
pub trait Slots {
    /// Loads the first word of a slot with relaxed order.
    fn first(&self, index: u16) -> u64;
    /// Loads the second word of a slot with relaxed order.
    fn second(&self, index: u16) -> u64;
    /// Loads the second word of a slot with acquire order.
    fn second_acquire(&self, index: u16) -> u64;
    /// Stores the first word of a slot with relaxed order.
    fn set_first(&self, index: u16, word: u64);
    /// Stores the second word of a slot with relaxed order.
    fn set_second(&self, index: u16, word: u64);
    /// Stores both words of a slot with relaxed order, the first one first.
    #[inline(always)]
    fn set(&self, index: u16, [first, second]: [u64; 2]) {
        self.set_first(index, first);
        self.set_second(index, second);
    }
    /// Stores the second word of a slot with release order.
    fn set_second_release(&self, index: u16, word: u64);
}

/// A table whose size is a power of two. Indexes are masked, so that any index is inside the table and no access
/// needs a check.
pub trait Table<E> {
    /// Loads an entry word by word, each with relaxed order.
    fn load(&self, index: u16) -> E;
    /// Stores an entry word by word, each with relaxed order.
    fn store(&self, index: u16, entry: E);
    /// Prefetches an entry that will soon be loaded; does nothing by default.
    fn prefetch(&self, index: u16) {
        let _ = index;
    }
    /// Prefetches an entry that will soon be stored; does nothing by default.
    fn prefetch_write(&self, index: u16) {
        let _ = index;
    }
}

/// An entry of a table: a ring index, a used element, a descriptor, or a slot of a Xen ring.
pub trait Entry: Copy + sealed::Raw {
    /// Loads an entry at byte offset `at`.
    fn load_from(words: &impl Words, at: usize) -> Self;
    /// Stores an entry at byte offset `at`.
    fn store_to(self, words: &impl Words, at: usize);
}

mod sealed {
    /// Raw access to entries in memory.
    pub trait Raw: Sized {
        /// Alignment in bytes of the words that an entry consists of.
        const ALIGN: usize;
        /// # Safety
        /// `at` is aligned to `ALIGN`, and the bytes of an entry there are mapped.
        unsafe fn load(at: *mut u8) -> Self;
        /// # Safety
        /// As for `load`, and they may be written.
        unsafe fn store(self, at: *mut u8);
    }
}

macro_rules! entry {
    ($entry:ty, $word:ty, $atomic:ty, $load:ident, $store:ident, [$($i:tt),*], $make:expr, $take:expr) => {
        impl Entry for $entry {
            fn load_from(words: &impl Words, at: usize) -> Self {
                $make([$(words.$load(at + $i * size_of::<$word>())),*])
            }
            fn store_to(self, words: &impl Words, at: usize) {
                let parts: [$word; [$($i),*].len()] = $take(self);
                $(words.$store(at + $i * size_of::<$word>(), parts[$i]);)*
            }
        }

        impl sealed::Raw for $entry {
            const ALIGN: usize = align_of::<$word>();
            #[inline(always)]
            unsafe fn load(at: *mut u8) -> Self {
                // SAFETY: the caller vouches for alignment and mapping of the whole entry.
                $make([$(unsafe {
                    <$word>::from_le(<$atomic>::from_ptr(at.cast::<$word>().add($i)).load(Ordering::Relaxed))
                }),*])
            }
            #[inline(always)]
            unsafe fn store(self, at: *mut u8) {
                let parts: [$word; [$($i),*].len()] = $take(self);
                // SAFETY: as for `load`.
                $(unsafe {
                    <$atomic>::from_ptr(at.cast::<$word>().add($i)).store(parts[$i].to_le(), Ordering::Relaxed)
                };)*
            }
        }
    };
}

entry!(u16, u16, AtomicU16, load16, store16, [0], |[value]: [u16; 1]| value, |value| [value]);
entry!([u32; 2], u32, AtomicU32, load32, store32, [0, 1], |words| words, |words| words);
entry!([u32; 3], u32, AtomicU32, load32, store32, [0, 1, 2], |words| words, |words| words);
entry!([u32; 4], u32, AtomicU32, load32, store32, [0, 1, 2, 3], |words| words, |words| words);
entry!([u64; 2], u64, AtomicU64, load64, store64, [0, 1], |words| words, |words| words);

/// A table that accesses any [`Words`] word by word.
#[derive(Clone)]
pub struct WordTable<W> {
    words: W,
    at: usize,
    mask: u16,
}

impl<W> std::fmt::Debug for WordTable<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WordTable({} entries)", u32::from(self.mask) + 1)
    }
}

impl<W: Words> WordTable<W> {
    /// Makes the table of `count` entries at byte offset `at`, as [`Words::table`] does.
    pub fn new<E: Entry>(words: W, at: usize, count: u16) -> Option<Self> {
        let end = at.checked_add(usize::from(count) * size_of::<E>())?;
        let fits = count.is_power_of_two() && end <= words.len();
        fits.then(|| Self { words, at, mask: count - 1 })
    }
}

impl<W: Words, E: Entry> Table<E> for WordTable<W> {
    fn load(&self, index: u16) -> E {
        E::load_from(&self.words, self.at + size_of::<E>() * usize::from(index & self.mask))
    }

    fn store(&self, index: u16, entry: E) {
        entry.store_to(&self.words, self.at + size_of::<E>() * usize::from(index & self.mask));
    }
}

/// Slots that access any [`Words`] word by word.
#[derive(Clone)]
pub struct WordSlots<W> {
    words: W,
}

impl<W> std::fmt::Debug for WordSlots<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WordSlots")
    }
}

impl<W: Words> WordSlots<W> {
    /// Makes the slots from the first byte on, as [`Words::slots`] does.
    pub fn new(words: W, count: u16) -> Option<Self> {
        (count > 0 && SLOT * usize::from(count) <= words.len()).then_some(Self { words })
    }
}

impl<W: Words> Slots for WordSlots<W> {
    fn first(&self, index: u16) -> u64 {
        self.words.load64(SLOT * usize::from(index))
    }
    fn second(&self, index: u16) -> u64 {
        self.words.load64(SLOT * usize::from(index) + 8)
    }
    fn second_acquire(&self, index: u16) -> u64 {
        self.words.load64_acquire(SLOT * usize::from(index) + 8)
    }
    fn set_first(&self, index: u16, word: u64) {
        self.words.store64(SLOT * usize::from(index), word);
    }
    fn set_second(&self, index: u16, word: u64) {
        self.words.store64(SLOT * usize::from(index) + 8, word);
    }
    fn set_second_release(&self, index: u16, word: u64) {
        self.words.store64_release(SLOT * usize::from(index) + 8, word);
    }
}

/// A table in an [`Area`]. Its bounds and alignment were checked when it was made.
#[derive(Clone)]
pub struct AreaTable<E> {
    base: *mut u8,
    mask: u16,
    _region: Arc<Region>,
    entry: PhantomData<E>,
}

// SAFETY: only atomic accesses to memory that the Arc keeps mapped.
unsafe impl<E> Send for AreaTable<E> {}
// SAFETY: as above.
unsafe impl<E> Sync for AreaTable<E> {}

impl<E> std::fmt::Debug for AreaTable<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AreaTable({} entries)", u32::from(self.mask) + 1)
    }
}

impl<E: Entry> AreaTable<E> {
    #[inline(always)]
    fn at(&self, index: u16) -> *mut u8 {
        // SAFETY: a masked index is below the number of entries, all of which are inside.
        unsafe { self.base.add(size_of::<E>() * usize::from(index & self.mask)) }
    }
}

impl<E: Entry> Table<E> for AreaTable<E> {
    #[inline(always)]
    fn load(&self, index: u16) -> E {
        // SAFETY: inside, and aligned as the base is; the region is mapped as long as self lives.
        unsafe { E::load(self.at(index)) }
    }

    #[inline(always)]
    fn store(&self, index: u16, entry: E) {
        // SAFETY: as for the load; the mapping is writable.
        unsafe { entry.store(self.at(index)) }
    }

    #[inline(always)]
    fn prefetch(&self, index: u16) {
        prefetch_read(self.at(index));
    }

    #[inline(always)]
    fn prefetch_write(&self, index: u16) {
        prefetch_write(self.at(index));
    }
}

/// Size in bytes of a slot: two words.
const SLOT: usize = 16;

/// Slots in an [`Area`]. Their bounds and alignment were checked when they were made.
#[derive(Clone)]
pub struct AreaSlots {
    base: *mut u8,
    count: u16,
    _region: Arc<Region>,
}

// SAFETY: only atomic accesses to memory that the Arc keeps mapped.
unsafe impl Send for AreaSlots {}
// SAFETY: as above.
unsafe impl Sync for AreaSlots {}

impl std::fmt::Debug for AreaSlots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AreaSlots({})", self.count)
    }
}

impl AreaSlots {
    #[inline(always)]
    fn slot(&self, index: u16) -> &[AtomicU64; 2] {
        assert!(index < self.count, "slot outside the ring");
        // SAFETY: the slot is inside the area, which is mapped as long as self lives; the base was
        // found to be aligned to 8.
        unsafe { &*self.base.add(SLOT * usize::from(index)).cast() }
    }
}

impl Slots for AreaSlots {
    #[inline(always)]
    fn first(&self, index: u16) -> u64 {
        u64::from_le(self.slot(index)[0].load(Ordering::Relaxed))
    }
    #[inline(always)]
    fn second(&self, index: u16) -> u64 {
        u64::from_le(self.slot(index)[1].load(Ordering::Relaxed))
    }
    #[inline(always)]
    fn second_acquire(&self, index: u16) -> u64 {
        u64::from_le(self.slot(index)[1].load(Ordering::Acquire))
    }
    #[inline(always)]
    fn set_first(&self, index: u16, word: u64) {
        self.slot(index)[0].store(word.to_le(), Ordering::Relaxed);
    }
    #[inline(always)]
    fn set_second(&self, index: u16, word: u64) {
        self.slot(index)[1].store(word.to_le(), Ordering::Relaxed);
    }
    #[inline(always)]
    fn set(&self, index: u16, words: [u64; 2]) {
        let [first, second] = self.slot(index);
        first.store(words[0].to_le(), Ordering::Relaxed);
        second.store(words[1].to_le(), Ordering::Relaxed);
    }
    #[inline(always)]
    fn set_second_release(&self, index: u16, word: u64) {
        self.slot(index)[1].store(word.to_le(), Ordering::Release);
    }
}

/// A range of a [`Region`], checked to be inside it; it keeps the region mapped.
#[derive(Clone)]
pub struct Area {
    base: *mut u8,
    len: usize,
    region: Arc<Region>,
}

// SAFETY: an Area only offers atomic accesses to memory that the Arc keeps mapped; the pointer is
// never handed out.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl std::fmt::Debug for Area {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Area({} bytes)", self.len)
    }
}

impl Area {
    /// # Safety
    /// `base..base + len` lies inside the mapping of `region`.
    pub(crate) unsafe fn new(base: *mut u8, len: usize, region: Arc<Region>) -> Self {
        Self { base, len, region }
    }

    /// Returns the address of the first byte in this process.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    /// Returns the guest address of the first byte.
    pub fn guest_addr(&self) -> u64 {
        let offset = self.base.addr() - self.region.base().addr();
        self.region.spec().guest_addr + offset as u64
    }

    /// Returns the `len` bytes at byte offset `at` for reading packets, or `None` if they are not all inside.
    #[inline(always)]
    pub fn read(&self, at: usize, len: usize) -> Option<ReadSlice<'_>> {
        self.write(at, len).map(|slice| slice.as_read())
    }

    /// Returns the `len` bytes at byte offset `at` for writing packets, or `None` if they are not all inside.
    #[inline(always)]
    pub fn write(&self, at: usize, len: usize) -> Option<WriteSlice<'_>> {
        let (end, overflows) = at.overflowing_add(len);
        // SAFETY: the range is inside the area, which stays mapped as long as it is borrowed.
        (!overflows && end <= self.len).then(|| unsafe { WriteSlice::from_raw(self.base.add(at), len) })
    }

    /// Returns the address of the `T` at byte offset `at`.
    ///
    /// # Panics
    /// If it is not inside the area or not aligned.
    #[inline(always)]
    fn word<T>(&self, at: usize) -> *mut T {
        let size = size_of::<T>();
        let word = self.base.wrapping_add(at);
        let (end, overflows) = at.overflowing_add(size);
        // A ring checks its whole layout at set-up, so this is never true; it makes the crate sound without
        // trust in that. All three conditions are one branch, as it precedes every access.
        if overflows | (end > self.len) | (word.addr() & (align_of::<T>() - 1) != 0) {
            bad_word(at, self.len);
        }
        word.cast()
    }
}

#[cold]
#[inline(never)]
fn bad_word(at: usize, len: usize) -> ! {
    panic!("ring word at {at} is not aligned inside its area of {len} bytes");
}

macro_rules! access {
    ($load:ident, $store:ident, $t:ty, $atomic:ty, $load_order:ident, $store_order:ident) => {
        #[inline(always)]
        fn $load(&self, at: usize) -> $t {
            // SAFETY: `word` checked bounds and alignment; the region is mapped as long as self lives.
            let word = unsafe { <$atomic>::from_ptr(self.word(at)) };
            <$t>::from_le(word.load(Ordering::$load_order))
        }
        #[inline(always)]
        fn $store(&self, at: usize, value: $t) {
            // SAFETY: as for the load; the mapping is writable.
            let word = unsafe { <$atomic>::from_ptr(self.word(at)) };
            word.store(value.to_le(), Ordering::$store_order);
        }
    };
}

impl Words for Area {
    fn len(&self) -> usize {
        self.len
    }
    fn is_aligned(&self, align: usize) -> bool {
        self.base.addr() & (align - 1) == 0
    }
    access!(load16, store16, u16, AtomicU16, Relaxed, Relaxed);
    access!(load16_acquire, store16_release, u16, AtomicU16, Acquire, Release);
    access!(load32, store32, u32, AtomicU32, Relaxed, Relaxed);
    access!(load32_acquire, store32_release, u32, AtomicU32, Acquire, Release);
    access!(load64, store64, u64, AtomicU64, Relaxed, Relaxed);
    access!(load64_acquire, store64_release, u64, AtomicU64, Acquire, Release);

    #[inline(always)]
    fn full_fence() {
        // Any locked operation is a full fence between ordinary loads and stores; unlike MFENCE it does not
        // delay the prefetches and loads behind it.
        #[cfg(target_arch = "x86_64")]
        // SAFETY: adds nothing to the top of the stack. Not marked `nomem`: the compiler too must not
        // move memory accesses across.
        unsafe {
            std::arch::asm!("lock or dword ptr [rsp], 0");
        }
        #[cfg(not(target_arch = "x86_64"))]
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    type Table<E: Entry> = AreaTable<E>;

    fn table<E: Entry>(&self, at: usize, count: u16) -> Option<AreaTable<E>> {
        let end = at.checked_add(usize::from(count) * size_of::<E>())?;
        let base = self.base.wrapping_add(at);
        let fits = count.is_power_of_two() && end <= self.len && base.addr().is_multiple_of(E::ALIGN);
        fits.then(|| AreaTable {
            base,
            mask: count - 1,
            _region: Arc::clone(&self.region),
            entry: PhantomData,
        })
    }

    type Slots = AreaSlots;

    fn slots(&self, count: u16) -> Option<AreaSlots> {
        let fits = count > 0 && SLOT * usize::from(count) <= self.len;
        let aligned = self.base.addr().is_multiple_of(align_of::<u64>());
        (fits && aligned).then(|| AreaSlots { base: self.base, count, _region: Arc::clone(&self.region) })
    }
}
