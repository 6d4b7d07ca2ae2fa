//! Atomic words of shared memory: the only way rings touch what a peer can write.
//!
//! Rings are generic over [`Words`], so the same ring code runs on guest memory ([`Area`]), on a
//! test's heap, and under a model checker that supplies its own atomics. Words are little endian
//! (VIRTIO 1.4, 1.4 "Structure Specifications").

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use crate::region::Region;

/// A resolved range of shared memory, seen as naturally aligned little-endian words.
///
/// `at` is a byte offset. The owner of a ring has checked offsets against [`Words::len`] at set-up;
/// an implementation checks again and panics on a bug of ours, never because of a peer.
pub trait Words {
    /// Length in bytes.
    fn len(&self) -> usize;
    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
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
    /// Relaxed load.
    fn load64(&self, at: usize) -> u64;
    /// Relaxed store.
    fn store64(&self, at: usize, value: u64);
    /// A full fence: no earlier store may become visible after a later load. Needed between
    /// "publish" and "does the peer want to be told?" on one side, and between "tell me" and
    /// "is there work?" on the other; each pairs with the other.
    fn full_fence();
    /// A hint that `at` will soon be read.
    fn prefetch(&self, at: usize) {
        let _ = at;
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

    /// Whether the first byte's address is a multiple of `align` (a power of two).
    pub fn is_aligned(&self, align: usize) -> bool {
        self.base.addr() & (align - 1) == 0
    }

    /// The region this range lies in.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The address of the `T` at byte offset `at`, checked for bounds and alignment.
    #[inline(always)]
    fn word<T>(&self, at: usize) -> *mut T {
        let size = size_of::<T>();
        // `at + size <= len`, written so that it cannot overflow. A ring checks its whole layout at
        // set-up; these two comparisons are never true and keep the crate sound without trust.
        assert!(at < self.len && self.len - at >= size, "ring word outside its area");
        // SAFETY: checked just now.
        let word = unsafe { self.base.add(at) };
        assert!(word.addr().is_multiple_of(align_of::<T>()), "ring word not aligned");
        word.cast()
    }
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
    access!(load16, store16, u16, AtomicU16, Relaxed, Relaxed);
    access!(load16_acquire, store16_release, u16, AtomicU16, Acquire, Release);
    access!(load32, store32, u32, AtomicU32, Relaxed, Relaxed);
    access!(load64, store64, u64, AtomicU64, Relaxed, Relaxed);

    #[inline(always)]
    fn full_fence() {
        fence(Ordering::SeqCst);
    }

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch is a hint without architectural effect, whatever the address.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                self.base.wrapping_add(at).cast(),
            );
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }
}
