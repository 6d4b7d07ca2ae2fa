//! What goes wrong on purpose: a test under these sees the paths that are hardly ever taken.

use std::num::{NonZeroU32, NonZeroUsize};

/// Faults of a pool; none by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Packets are copied to buffers of this many bytes each before they are mapped; see
    /// [`Pools::shatter`](super::Pools::shatter). Only in the pool for frames.
    pub split: Option<NonZeroUsize>,
    /// Every n-th allocation fails.
    pub fail_alloc: Option<NonZeroU32>,
    /// Of 256 full copies, so many fail, at random.
    pub fail_defrag: u8,
    allocs: u32,
    /// Where chance stands; any value does to begin with.
    pub seed: u64,
}

impl Faults {
    pub(super) fn alloc_fails(&mut self) -> bool {
        let Some(every) = self.fail_alloc else { return false };
        self.allocs = self.allocs.wrapping_add(1);
        self.allocs.is_multiple_of(every.get())
    }

    pub(super) fn defrag_fails(&mut self) -> bool {
        // The generator of Knuth's MMIX; its upper bits are good enough for a coin.
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.seed >> 56) as u8) < self.fail_defrag
    }
}
