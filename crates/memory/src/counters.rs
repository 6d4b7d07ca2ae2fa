//! A table of atomic counters in shared memory that several processes change.
//!
//! Each process makes a [`Counters`] over its own mapping of the same file and drops it with the table. Rings do
//! not need this, as each of their words has one writer. A simulated grant table does: a process that maps a
//! page counts itself there, and the process that ends the grant learns from the same word, atomically, if
//! the page is mapped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::region::Region;

/// A region as a table of 32-bit words in native byte order with atomic read-modify-write operations, all
/// sequentially consistent. A peer may have written anything to them; sums wrap around.
#[derive(Clone, Debug)]
pub struct Counters {
    region: Arc<Region>,
    count: usize,
}

impl Counters {
    /// Makes a table of as many words as `region` holds.
    ///
    /// # Panics
    /// If the region is not aligned to a word.
    pub fn new(region: Arc<Region>) -> Counters {
        assert!(region.base().addr().is_multiple_of(align_of::<AtomicU32>()), "a table of words is aligned");
        let count = region.spec().size as usize / size_of::<AtomicU32>();
        Counters { region, count }
    }

    /// Returns the number of words.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns true if the region is too small for a word.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.count, "word {index} of {}", self.count);
        // SAFETY: the word is inside the region, which is mapped as long as self lives, and aligned as its base is.
        unsafe { AtomicU32::from_ptr(self.region.base().cast::<u32>().add(index)) }
    }

    /// Loads word `index`.
    ///
    /// # Panics
    /// If `index` is not less than [`Counters::len`]; the same holds for the methods below.
    pub fn load(&self, index: usize) -> u32 {
        self.word(index).load(Ordering::SeqCst)
    }

    /// Adds `value` to word `index` and returns the old value.
    pub fn add(&self, index: usize, value: u32) -> u32 {
        self.word(index).fetch_add(value, Ordering::SeqCst)
    }

    /// Subtracts `value` from word `index` and returns the old value.
    pub fn sub(&self, index: usize, value: u32) -> u32 {
        self.word(index).fetch_sub(value, Ordering::SeqCst)
    }

    /// Sets `bits` in word `index` and returns the old value.
    pub fn set(&self, index: usize, bits: u32) -> u32 {
        self.word(index).fetch_or(bits, Ordering::SeqCst)
    }

    /// Clears `bits` in word `index` and returns the old value.
    pub fn clear(&self, index: usize, bits: u32) -> u32 {
        self.word(index).fetch_and(!bits, Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::SharedMem;

    #[test]
    fn counts_of_two_mappings_are_one() {
        let memory = SharedMem::new("counters", 4096).unwrap();
        let map = || Counters::new(Region::map_exact(memory.fd(), 0, 4096).unwrap());
        let (one, two) = (map(), map());
        assert_eq!((one.len(), one.is_empty()), (1024, false));
        std::thread::scope(|scope| {
            for counters in [&one, &two] {
                scope.spawn(|| (0..10_000).for_each(|_| _ = counters.add(7, 3)));
                scope.spawn(|| (0..10_000).for_each(|_| _ = counters.sub(7, 1)));
            }
        });
        assert_eq!(one.load(7), 40_000);
        assert_eq!(one.set(7, 1 << 31), 40_000);
        assert_eq!(two.load(7), 40_000 | 1 << 31);
        assert_eq!(two.sub(8, 1), 0);
        assert_eq!(one.add(8, 2), u32::MAX, "sums wrap");
        assert_eq!((one.load(8), one.load(6)), (1, 0));
    }
}
