//! Words for tests: a memory that a ring runs on, written as one load and one store.
//!
//! [`Words`] names every width and order of an access, so that a ring in mapped memory costs no branch. A memory that counts accesses,
//! changes between two of them, or belongs to a model checker needs no such speed: it implements [`TestWords`], where width and order
//! are arguments, and is [`Words`] by that. The feature `testing` turns this module on, for integration tests and fuzz targets;
//! whoever implements it owns the bytes, and the threads that may use them are those its own type allows.

use std::collections::BTreeMap;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use crate::words::{Entry, WordSlots, WordTable, Words};

/// Bytes of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 16 bits.
    Two = 2,
    /// 32 bits.
    Four = 4,
    /// 64 bits.
    Eight = 8,
}

/// What is asked of the order of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Nothing.
    Relaxed,
    /// A load acquires, a store releases.
    Ordered,
}

/// Memory of a test. Words are little endian, and `at` is the byte offset of an aligned word.
pub trait TestWords: Clone {
    /// See [`Words::SHADOW`].
    const SHADOW: bool = true;

    /// Length in bytes.
    fn size(&self) -> usize;

    /// See [`Words::is_aligned`].
    fn aligned(&self, align: usize) -> bool {
        let _ = align;
        true
    }

    /// Loads a word; higher bits than it has are zero.
    fn load(&self, at: usize, width: Width, order: Order) -> u64;

    /// Stores the lowest bits of `value`, as many as the word has.
    fn store(&self, at: usize, width: Width, order: Order, value: u64);

    /// See [`Words::full_fence`].
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

macro_rules! access {
    ($($word:ty, $width:ident: $load:ident $store:ident $load_acquire:ident $store_release:ident;)*) => {$(
        fn $load(&self, at: usize) -> $word {
            self.load(at, Width::$width, Order::Relaxed) as $word
        }
        fn $store(&self, at: usize, value: $word) {
            self.store(at, Width::$width, Order::Relaxed, value.into());
        }
        fn $load_acquire(&self, at: usize) -> $word {
            self.load(at, Width::$width, Order::Ordered) as $word
        }
        fn $store_release(&self, at: usize, value: $word) {
            self.store(at, Width::$width, Order::Ordered, value.into());
        }
    )*};
}

impl<T: TestWords> Words for T {
    const SHADOW: bool = T::SHADOW;

    fn len(&self) -> usize {
        self.size()
    }
    fn is_aligned(&self, align: usize) -> bool {
        self.aligned(align)
    }
    access! {
        u16, Two: load16 store16 load16_acquire store16_release;
        u32, Four: load32 store32 load32_acquire store32_release;
        u64, Eight: load64 store64 load64_acquire store64_release;
    }
    fn full_fence() {
        T::fence();
    }

    type Table<E: Entry> = WordTable<Self>;
    fn table<E: Entry>(&self, at: usize, count: u16) -> Option<WordTable<Self>> {
        WordTable::new::<E>(self.clone(), at, count)
    }

    type Slots = WordSlots<Self>;
    fn slots(&self, count: u16) -> Option<WordSlots<Self>> {
        WordSlots::new(self.clone(), count)
    }
}

/// Loads a word of any memory, for a test memory that stands before another.
pub fn load(words: &impl Words, at: usize, width: Width, order: Order) -> u64 {
    match (width, order) {
        (Width::Two, Order::Relaxed) => words.load16(at).into(),
        (Width::Two, Order::Ordered) => words.load16_acquire(at).into(),
        (Width::Four, Order::Relaxed) => words.load32(at).into(),
        (Width::Four, Order::Ordered) => words.load32_acquire(at).into(),
        (Width::Eight, Order::Relaxed) => words.load64(at),
        (Width::Eight, Order::Ordered) => words.load64_acquire(at),
    }
}

/// Stores a word to any memory, for a test memory that stands before another.
pub fn store(words: &impl Words, at: usize, width: Width, order: Order, value: u64) {
    match (width, order) {
        (Width::Two, Order::Relaxed) => words.store16(at, value as u16),
        (Width::Two, Order::Ordered) => words.store16_release(at, value as u16),
        (Width::Four, Order::Relaxed) => words.store32(at, value as u32),
        (Width::Four, Order::Ordered) => words.store32_release(at, value as u32),
        (Width::Eight, Order::Relaxed) => words.store64(at, value),
        (Width::Eight, Order::Ordered) => words.store64_release(at, value),
    }
}

/// What a test sees of the accesses to a [`Spied`] memory, before they happen.
pub trait Spy: Clone {
    /// See [`Words::SHADOW`].
    const SHADOW: bool = true;
    /// The word at byte offset `at` is about to be loaded.
    fn load(&self, at: usize) {
        let _ = at;
    }
    /// The word at byte offset `at` is about to be stored.
    fn store(&self, at: usize) {
        let _ = at;
    }
}

/// Memory whose accesses a [`Spy`] sees.
#[derive(Clone, Debug)]
pub struct Spied<W, S> {
    /// The memory, for accesses that nobody sees.
    pub words: W,
    /// Who sees the others.
    pub spy: S,
}

impl<W: Words + Clone, S: Spy> TestWords for Spied<W, S> {
    const SHADOW: bool = S::SHADOW;

    fn size(&self) -> usize {
        self.words.len()
    }
    fn aligned(&self, align: usize) -> bool {
        self.words.is_aligned(align)
    }
    fn load(&self, at: usize, width: Width, order: Order) -> u64 {
        self.spy.load(at);
        load(&self.words, at, width, order)
    }
    fn store(&self, at: usize, width: Width, order: Order, value: u64) {
        self.spy.store(at);
        store(&self.words, at, width, order, value);
    }
    fn fence() {
        W::full_fence();
    }
}

/// Remembers how often the word at each offset was loaded.
#[derive(Clone, Debug, Default)]
pub struct LoadCounter(Arc<Mutex<BTreeMap<usize, usize>>>);

impl Spy for LoadCounter {
    fn load(&self, at: usize) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(at).or_default() += 1;
    }
}

/// Memory that remembers how often each of its words was loaded.
pub type Watched<W> = Spied<W, LoadCounter>;

impl<W: Words + Clone> Watched<W> {
    /// Watches `words`.
    pub fn new(words: W) -> Self {
        Spied { words, spy: LoadCounter::default() }
    }

    /// The loads since the last time of asking, by offset.
    pub fn loads(&self) -> BTreeMap<usize, usize> {
        std::mem::take(&mut self.spy.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
