//! Fault injection for pools, so that tests reach rarely used paths. A test sets faults by
//! [`Pool::faults`](super::Pool::faults); they stay until the pool is dropped.

use std::num::{NonZeroU32, NonZeroUsize};

/// The faults to inject into a pool; none by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Copies packets to buffers of this many bytes each before they are mapped; see
    /// [`Pools::shatter`](super::Pools::shatter). It has an effect only in the frame pool.
    pub split: Option<NonZeroUsize>,
    /// Makes every n-th allocation fail.
    pub fail_alloc: Option<NonZeroU32>,
    /// Number of full copies out of 256 that fail, at random.
    pub fail_defrag: u8,
    allocs: u32,
    /// State of the random number generator; any initial value is allowed.
    pub seed: u64,
}

impl Faults {
    pub(super) fn alloc_fails(&mut self) -> bool {
        let Some(every) = self.fail_alloc else { return false };
        self.allocs = self.allocs.wrapping_add(1);
        self.allocs.is_multiple_of(every.get())
    }

    pub(super) fn defrag_fails(&mut self) -> bool {
        // The linear congruential generator of Knuth's MMIX; its upper bits are sufficiently random here.
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.seed >> 56) as u8) < self.fail_defrag
    }
}
