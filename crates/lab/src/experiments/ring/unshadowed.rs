//! Ring memory without shadows: what a ring costs whose halves read back the words they own.
//!
//! For measuring only. The type differs from [`Area`] in one constant, so the compiler makes the same
//! ring code twice, and no branch of it is decided at run time.

use ringferry_memory::{Area, AreaTable, Entry, Words};

/// An [`Area`] whose rings keep no private copies.
#[derive(Clone, Debug)]
pub struct Unshadowed(pub Area);

macro_rules! delegate {
    ($($load:ident $store:ident $word:ty),*) => {$(
        #[inline(always)]
        fn $load(&self, at: usize) -> $word {
            self.0.$load(at)
        }
        #[inline(always)]
        fn $store(&self, at: usize, value: $word) {
            self.0.$store(at, value);
        }
    )*};
}

impl Words for Unshadowed {
    const SHADOW: bool = false;

    fn len(&self) -> usize {
        self.0.len()
    }

    fn is_aligned(&self, align: usize) -> bool {
        self.0.is_aligned(align)
    }

    delegate!(
        load16 store16 u16, load16_acquire store16_release u16,
        load32 store32 u32, load32_acquire store32_release u32,
        load64 store64 u64, load64_acquire store64_release u64
    );

    #[inline(always)]
    fn full_fence() {
        Area::full_fence();
    }

    type Table<E: Entry> = AreaTable<E>;

    fn table<E: Entry>(&self, at: usize, count: u16) -> Option<AreaTable<E>> {
        self.0.table(at, count)
    }

    type Slots = <Area as Words>::Slots;

    fn slots(&self, count: u16) -> Option<Self::Slots> {
        self.0.slots(count)
    }
}
