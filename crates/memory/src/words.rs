//! Atomic words of shared memory: the only way rings touch what a peer can write.
//!
//! Rings are generic over [`Words`], so the same ring code runs on guest memory ([`Area`]), on a
//! test's heap, and under a model checker that supplies its own atomics. Words are little endian
//! (VIRTIO 1.4, 1.4 "Structure Specifications").

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::region::Region;
use crate::slice::{ReadSlice, WriteSlice, prefetch_write};

/// A resolved range of shared memory, seen as naturally aligned little-endian words.
///
/// `at` is a byte offset. The owner of a ring has checked offsets against [`Words::len`] at set-up;
/// an implementation checks again and panics on a bug of ours, never because of a peer.
pub trait Words {
    /// Whether a ring in this memory keeps private copies of the words it owns and so never reads
    /// them back. Always, but in the experiment that measures what the copies are worth.
    const SHADOW: bool = true;
    /// Length in bytes.
    fn len(&self) -> usize;
    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Whether the first byte lies at a multiple of `align` (a power of two).
    fn is_aligned(&self, align: usize) -> bool;
    /// Relaxed load.
    fn load16(&self, at: usize) -> u16;
    /// Load that later accesses cannot move before.
    fn load16_acquire(&self, at: usize) -> u16;
    /// Relaxed store.
    fn store16(&self, at: usize, value: u16);
    /// Store that earlier accesses cannot move behind.
    fn store16_release(&self, at: usize, value: u16);
    /// Relaxed load.
    fn load32(&self, at: usize) -> u32;
    /// Relaxed store.
    fn store32(&self, at: usize, value: u32);
    /// Load that later accesses cannot move before.
    fn load32_acquire(&self, at: usize) -> u32;
    /// Store that earlier accesses cannot move behind.
    fn store32_release(&self, at: usize, value: u32);
    /// Relaxed load.
    fn load64(&self, at: usize) -> u64;
    /// Load that later accesses cannot move before.
    fn load64_acquire(&self, at: usize) -> u64;
    /// Relaxed store.
    fn store64(&self, at: usize, value: u64);
    /// Store that earlier accesses cannot move behind.
    fn store64_release(&self, at: usize, value: u64);
    /// A full fence: no earlier store may become visible after a later load. Needed between
    /// "publish" and "does the peer want to be told?" on one side, and between "tell me" and
    /// "is there work?" on the other; each pairs with the other.
    fn full_fence();
    /// How a table of entries in this memory is reached: [`WordTable`] unless there is a faster way.
    type Table<E: Entry>: Table<E> + Clone + std::fmt::Debug;
    /// The table of `count` entries (a power of two) at byte offset `at`; `None` when it is not
    /// inside, not aligned to its entries' words, or `count` is no power of two.
    fn table<E: Entry>(&self, at: usize, count: u16) -> Option<Self::Table<E>>;
    /// How the descriptors of a packed ring are reached: [`WordSlots`] unless there is a faster way.
    type Slots: Slots + Clone + std::fmt::Debug;
    /// The `count` slots from the first byte on; `None` when they are not inside, not aligned to 8
    /// bytes, or `count` is 0.
    fn slots(&self, count: u16) -> Option<Self::Slots>;
}

/// The descriptors of a packed ring: any number of slots of two 64-bit words each. The second word,
/// written and read as a whole, says who owns the slot; the first belongs to that owner.
///
/// An index outside is a bug of ours, never a peer's doing, and panics.
pub trait Slots {
    /// Reads the first word, relaxed.
    fn first(&self, index: u16) -> u64;
    /// Reads the second word, relaxed.
    fn second(&self, index: u16) -> u64;
    /// Reads the second word; later accesses cannot move before.
    fn second_acquire(&self, index: u16) -> u64;
    /// Writes the first word, relaxed.
    fn set_first(&self, index: u16, word: u64);
    /// Writes the second word, relaxed.
    fn set_second(&self, index: u16, word: u64);
    /// Writes the second word; earlier accesses cannot move behind.
    fn set_second_release(&self, index: u16, word: u64);
}

/// A table whose size is a power of two. Indexes are masked, so that any index is inside and no
/// access needs a check.
pub trait Table<E> {
    /// Reads an entry, word by word, relaxed.
    fn load(&self, index: u16) -> E;
    /// Writes an entry, word by word, relaxed.
    fn store(&self, index: u16, entry: E);
    /// A hint that an entry will soon be read.
    fn prefetch(&self, index: u16) {
        let _ = index;
    }
    /// A hint that an entry will soon be written.
    fn prefetch_write(&self, index: u16) {
        let _ = index;
    }
}

/// What a table of a ring holds: a ring index, a used element, a descriptor, or a slot of a Xen ring.
pub trait Entry: Copy + sealed::Raw {
    /// Reads an entry at a byte offset.
    fn load_from(words: &impl Words, at: usize) -> Self;
    /// Writes an entry at a byte offset.
    fn store_to(self, words: &impl Words, at: usize);
}

mod sealed {
    /// Entries as they lie in memory.
    pub trait Raw: Sized {
        /// Alignment of the words an entry is made of.
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

/// A table reached word by word, for any [`Words`].
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
    /// See [`Words::table`].
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

/// Slots reached word by word, for any [`Words`].
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
    /// See [`Words::slots`].
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

/// A table in an [`Area`], which was checked once.
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
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch is a hint without architectural effect.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(self.at(index).cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = index;
    }

    #[inline(always)]
    fn prefetch_write(&self, index: u16) {
        prefetch_write(self.at(index));
    }
}

/// Bytes of a slot.
const SLOT: usize = 16;

/// Slots in an [`Area`], which was checked once.
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
    fn word(&self, index: u16, offset: usize) -> &AtomicU64 {
        assert!(index < self.count, "slot outside the ring");
        // SAFETY: the slot is inside the area, which is mapped as long as self lives; the base was
        // found to be aligned to 8.
        unsafe { AtomicU64::from_ptr(self.base.add(SLOT * usize::from(index) + offset).cast()) }
    }
}

impl Slots for AreaSlots {
    #[inline(always)]
    fn first(&self, index: u16) -> u64 {
        u64::from_le(self.word(index, 0).load(Ordering::Relaxed))
    }
    #[inline(always)]
    fn second(&self, index: u16) -> u64 {
        u64::from_le(self.word(index, 8).load(Ordering::Relaxed))
    }
    #[inline(always)]
    fn second_acquire(&self, index: u16) -> u64 {
        u64::from_le(self.word(index, 8).load(Ordering::Acquire))
    }
    #[inline(always)]
    fn set_first(&self, index: u16, word: u64) {
        self.word(index, 0).store(word.to_le(), Ordering::Relaxed);
    }
    #[inline(always)]
    fn set_second(&self, index: u16, word: u64) {
        self.word(index, 8).store(word.to_le(), Ordering::Relaxed);
    }
    #[inline(always)]
    fn set_second_release(&self, index: u16, word: u64) {
        self.word(index, 8).store(word.to_le(), Ordering::Release);
    }
}

/// A bounds-checked range of a [`Region`], which it keeps mapped.
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

    /// The `len` bytes at byte offset `at`, for reading packets; `None` when they are not all inside.
    #[inline(always)]
    pub fn read(&self, at: usize, len: usize) -> Option<ReadSlice<'_>> {
        self.write(at, len).map(|slice| slice.as_read())
    }

    /// The `len` bytes at byte offset `at`, for writing packets; `None` when they are not all inside.
    #[inline(always)]
    pub fn write(&self, at: usize, len: usize) -> Option<WriteSlice<'_>> {
        let inside = at <= self.len && len <= self.len - at;
        // SAFETY: the range is inside the area, which stays mapped as long as it is borrowed.
        inside.then(|| unsafe { WriteSlice::from_raw(self.base.add(at), len) })
    }

    /// The address of the `T` at byte offset `at`, checked for bounds and alignment.
    #[inline(always)]
    fn word<T>(&self, at: usize) -> *mut T {
        let size = size_of::<T>();
        let word = self.base.wrapping_add(at);
        let (end, overflows) = at.overflowing_add(size);
        // A ring checks its whole layout at set-up; this is never true and keeps the crate sound
        // without trust. One branch for all three, as it stands in front of every access.
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
        // Any locked operation is a full fence between ordinary loads and stores, and unlike MFENCE it
        // does not hold up the prefetches and loads behind it.
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
