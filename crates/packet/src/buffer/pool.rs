//! A pool of reference-counted chunks of one size in shared memory.
//!
//! A worker makes a [`Pool`] over memory that is used for nothing else, and allocates and recycles buffers on its own
//! thread without a lock. A buffer dropped on another thread puts its chunk on a list under a mutex, which the pool reads
//! only when its own stack is empty:
//!
//! ```text
//!   never used ──► allocated ──recycle (same worker)──► cache, a stack ──► allocated
//!                      └───── last range dropped ─────► returned, a mutex ──► cache
//! ```

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use ringferry_memory::{Area, GuestMemory, ReadSlice, Words, WriteSlice};

use super::{Buf, Faults};

/// The division of a pool's memory into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLayout {
    /// Size of a chunk in bytes.
    pub chunk: u32,
    /// Distance in bytes from one chunk to the next: at least `chunk`, and a multiple of the cache line.
    pub stride: u32,
    /// Number of chunks.
    pub count: u32,
    /// Number of bytes in front of the data of an empty buffer.
    pub headroom: u32,
}

impl PoolLayout {
    /// Size of a cache line in bytes.
    pub(super) const LINE: u32 = 64;

    /// Size of a page in bytes.
    const PAGE: u32 = 4096;

    /// Makes a layout for chunks of one buffer each, with at least `len` bytes behind the head room.
    ///
    /// Chunks are an odd number of cache lines apart, as at multiples of a page their first lines would compete for a few
    /// sets of the first-level cache. They are more than a page apart, as within a page the hardware prefetcher that sees
    /// a few consecutive lines read would fetch the next buffer, which the other side is writing.
    pub fn fixed(len: u32, count: u32, headroom: u32) -> Self {
        let lines = (headroom + len).div_ceil(Self::LINE);
        let stride = Self::LINE * (lines.max(Self::PAGE / Self::LINE) | 1);
        Self { chunk: Self::LINE * lines, stride, count, headroom }
    }

    /// Makes a layout for consecutive chunks of exactly `chunk` bytes, for [`Fragments`](super::Fragments).
    pub fn chunks(chunk: u32, count: u32, headroom: u32) -> Self {
        Self { chunk, stride: chunk.next_multiple_of(Self::LINE), count, headroom }
    }

    /// Returns the size in bytes of the memory that the pool needs.
    pub fn bytes(&self) -> usize {
        self.stride as usize * self.count as usize
    }

    /// Returns the first cache line of a chunk, counted from the begin of the memory.
    pub(super) fn first_line(&self, chunk: u32) -> u32 {
        chunk * (self.stride / Self::LINE)
    }

    /// Returns the number of bytes of data that an empty buffer holds.
    pub fn room(&self) -> u32 {
        self.chunk - self.headroom
    }
}

/// The reason for which a pool cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The pool would not be completely inside the memory.
    #[error("a pool of {len} bytes at {addr:#x} is not inside the memory; make the memory larger")]
    Outside {
        /// Guest physical address of the pool.
        addr: u64,
        /// Size of the pool in bytes.
        len: usize,
    },
    /// The head room leaves no room for data, chunks overlap, or they do not begin at cache lines.
    #[error("chunks of {0:?} leave no room for data, overlap, or do not begin on cache lines")]
    Layout(PoolLayout),
}

/// The state that a pool shares with its buffers.
#[derive(Debug)]
pub(super) struct PoolShared {
    pub(super) area: Area,
    pub(super) guest_addr: u64,
    pub(super) layout: PoolLayout,
    /// Reference count of each chunk: its ranges in buffers or in the pool's cache; 0 if the chunk is in `returned` or was
    /// never used.
    references: Box<[AtomicU32]>,
    /// Chunks whose last range was dropped, until the pool takes them.
    returned: Mutex<Vec<u32>>,
}

impl PoolShared {
    /// Returns a range of the memory for reading. That of a buffer is always inside.
    #[inline(always)]
    pub(super) fn readable(&self, at: usize, len: usize) -> ReadSlice<'_> {
        self.area.read(at, len).unwrap_or_else(|| outside())
    }

    /// Returns a range of the memory for writing. That of a buffer is always inside.
    #[inline(always)]
    pub(super) fn writable(&self, at: usize, len: usize) -> WriteSlice<'_> {
        self.area.write(at, len).unwrap_or_else(|| outside())
    }

    #[inline(always)]
    pub(super) fn references(&self, chunk: u32) -> u32 {
        self.references[chunk as usize].load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn refer(&self, chunk: u32) {
        self.references[chunk as usize].fetch_add(1, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn release(&self, chunk: u32) {
        if self.references[chunk as usize].fetch_sub(1, Ordering::Release) == 1 {
            // Accesses of other owners to the chunk must happen before it is used again.
            fence(Ordering::Acquire);
            self.returned.lock().unwrap_or_else(PoisonError::into_inner).push(chunk);
        }
    }
}

#[cold]
#[inline(never)]
fn outside() -> ! {
    panic!("a buffer outside its pool");
}

/// A pool of chunks. It belongs to one worker, which allocates buffers without a lock; buffers may be dropped on any
/// thread and may outlive the pool.
#[derive(Debug)]
pub struct Pool {
    core: Arc<PoolShared>,
    /// A stack of empty buffers of whole chunks, each with its reference. The buffer recycled last is still in the
    /// cache.
    cache: Vec<Buf>,
    /// Number of the first chunk that was never used.
    fresh: u32,
    faults: Option<Box<Faults>>,
}

impl Pool {
    /// Makes a pool over the memory at `guest_addr`, which must be used for nothing else. Pages are allocated by the kernel
    /// only when they are touched.
    ///
    /// # Errors
    /// [`PoolError`], if the memory or the layout does not allow it.
    pub fn new(memory: &GuestMemory, guest_addr: u64, layout: PoolLayout) -> Result<Self, PoolError> {
        let outside = PoolError::Outside { addr: guest_addr, len: layout.bytes() };
        let area = memory.area(guest_addr, layout.bytes()).ok_or(outside)?;
        let lines =
            layout.stride.is_multiple_of(PoolLayout::LINE) && area.is_aligned(PoolLayout::LINE as usize);
        // A buffer counts lines in 32 bits.
        let counted = layout.bytes() / (PoolLayout::LINE as usize) <= u32::MAX as usize;
        if layout.headroom >= layout.chunk || layout.stride < layout.chunk || !lines || !counted {
            return Err(PoolError::Layout(layout));
        }
        let references = (0..layout.count).map(|_| AtomicU32::new(0)).collect();
        let core = PoolShared { area, guest_addr, layout, references, returned: Mutex::default() };
        Ok(Self { core: Arc::new(core), cache: Vec::new(), fresh: 0, faults: None })
    }

    /// Returns the division of the memory.
    pub fn layout(&self) -> PoolLayout {
        self.core.layout
    }

    /// Allocates an empty buffer of a whole chunk. Returns `None` if all chunks are in use, or by [fault
    /// injection](Pool::faults).
    #[inline]
    pub fn alloc(&mut self) -> Option<Buf> {
        if self.faults.as_mut().is_some_and(|faults| faults.alloc_fails()) {
            return None;
        }
        self.cache.pop().or_else(|| self.refill())
    }

    /// Takes the chunks that were dropped on other threads, or one that was never used.
    #[cold]
    fn refill(&mut self) -> Option<Buf> {
        let mut returned = self.core.returned.lock().unwrap_or_else(PoisonError::into_inner);
        for chunk in returned.drain(..) {
            self.core.refer(chunk);
            self.cache.push(Buf::whole(Arc::clone(&self.core), chunk));
        }
        drop(returned);
        self.cache.pop().or_else(|| {
            let chunk = self.fresh;
            (chunk < self.core.layout.count).then(|| {
                self.fresh += 1;
                self.core.refer(chunk);
                Buf::whole(Arc::clone(&self.core), chunk)
            })
        })
    }

    /// Recycles a buffer. One of this pool that is a whole chunk and not shared is kept without an atomic operation; any
    /// other is dropped.
    #[inline]
    pub fn recycle(&mut self, mut buf: Buf) {
        let whole = buf.start == 0 && buf.end == self.core.layout.chunk;
        if whole && self.owns(&buf) && buf.is_exclusive() {
            buf.reset();
            self.cache.push(buf);
        }
    }

    /// Returns true if a buffer is a range of a chunk of this pool.
    #[inline(always)]
    pub fn owns(&self, buf: &Buf) -> bool {
        Arc::ptr_eq(&buf.core, &self.core)
    }

    /// Returns the number of chunks of which no buffer has a range. It takes a lock and is for tests and statistics.
    pub fn available(&self) -> u32 {
        let returned = self.core.returned.lock().unwrap_or_else(PoisonError::into_inner).len();
        self.core.layout.count - self.fresh + (self.cache.len() + returned) as u32
    }

    /// Borrows the fault injection of this pool; there are no faults unless they are set here.
    pub fn faults(&mut self) -> &mut Faults {
        self.faults.get_or_insert_default()
    }

    /// Returns true if a full copy must fail by fault injection.
    #[inline]
    pub fn defrag_fails(&mut self) -> bool {
        self.faults.as_mut().is_some_and(|faults| faults.defrag_fails())
    }

    /// Returns the size in bytes of the pieces that packets are split into by fault injection.
    #[inline]
    pub(super) fn split(&self) -> Option<usize> {
        self.faults.as_ref().and_then(|faults| faults.split).map(NonZeroUsize::get)
    }
}
