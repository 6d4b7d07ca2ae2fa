//! Chunks of one size in shared memory, counted by reference.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use ringferry_memory::{Area, GuestMemory, Words};

use super::{Buf, Faults};

/// How the memory of a pool is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLayout {
    /// Bytes of a chunk.
    pub chunk: u32,
    /// Bytes from one chunk to the next: at least `chunk`, a multiple of the cache line.
    pub stride: u32,
    /// Chunks.
    pub count: u32,
    /// Bytes in front of the data of an empty buffer.
    pub headroom: u32,
}

impl PoolLayout {
    /// Bytes of a cache line.
    const LINE: u32 = 64;

    /// Bytes of a page.
    const PAGE: u32 = 4096;

    /// Chunks for one buffer each, of at least `len` bytes behind the head room. They are an odd number of
    /// cache lines apart: a multiple of the page would put the first lines of all of them into the same few
    /// sets of the first-level cache. And more than a page: within one, a processor that sees a few lines read one
    /// after the other fetches what comes next, which would be the buffer that the other side is writing.
    pub fn fixed(len: u32, count: u32, headroom: u32) -> Self {
        let lines = (headroom + len).div_ceil(Self::LINE);
        let stride = Self::LINE * (lines.max(Self::PAGE / Self::LINE) | 1);
        Self { chunk: Self::LINE * lines, stride, count, headroom }
    }

    /// Chunks of exactly `chunk` bytes, one behind the other, for [`Fragments`](super::Fragments).
    pub fn chunks(chunk: u32, count: u32, headroom: u32) -> Self {
        Self { chunk, stride: chunk.next_multiple_of(Self::LINE), count, headroom }
    }

    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> usize {
        self.stride as usize * self.count as usize
    }

    /// Bytes of data that an empty buffer has room for.
    pub fn room(&self) -> u32 {
        self.chunk - self.headroom
    }
}

/// Why there is no pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// Not all of it lies in memory.
    #[error("a pool of {len} bytes at {addr:#x} is not inside the memory; make the memory larger")]
    Outside {
        /// Where it was to begin, as the device sees it.
        addr: u64,
        /// Its length in bytes.
        len: usize,
    },
    /// The head room leaves no data, chunks overlap or are not on cache lines.
    #[error("chunks of {0:?} leave no room for data, overlap, or do not begin on cache lines")]
    Layout(PoolLayout),
}

/// What a pool and its buffers know in common.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) area: Area,
    pub(super) guest_addr: u64,
    pub(super) layout: PoolLayout,
    /// Ranges of each chunk that are in use, in buffers or in the pool's cache; 0 for the others.
    references: Box<[AtomicU32]>,
    /// Chunks whose last range was dropped, until the pool looks here.
    returned: Mutex<Vec<u32>>,
}

impl Core {
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
            // Whatever other owners did with the chunk happened before it is used again.
            fence(Ordering::Acquire);
            self.returned.lock().unwrap_or_else(PoisonError::into_inner).push(chunk);
        }
    }
}

/// A pool of chunks. Belongs to one worker, who takes buffers from it without a lock; dropping a buffer
/// is possible anywhere. Buffers outlive their pool.
#[derive(Debug)]
pub struct Pool {
    core: Arc<Core>,
    /// Whole chunks, empty, each with its reference: last in, first out, as that one's lines are still in
    /// the cache.
    cache: Vec<Buf>,
    /// Chunks from here on were never used.
    fresh: u32,
    faults: Option<Box<Faults>>,
}

impl Pool {
    /// A pool over the memory at `guest_addr`, which must be used for nothing else. Pages cost memory
    /// only once they are touched.
    ///
    /// # Errors
    /// See [`PoolError`].
    pub fn new(memory: &GuestMemory, guest_addr: u64, layout: PoolLayout) -> Result<Self, PoolError> {
        let outside = PoolError::Outside { addr: guest_addr, len: layout.bytes() };
        let area = memory.area(guest_addr, layout.bytes()).ok_or(outside)?;
        let lines =
            layout.stride.is_multiple_of(PoolLayout::LINE) && area.is_aligned(PoolLayout::LINE as usize);
        if layout.headroom >= layout.chunk || layout.stride < layout.chunk || !lines {
            return Err(PoolError::Layout(layout));
        }
        let references = (0..layout.count).map(|_| AtomicU32::new(0)).collect();
        let core = Core { area, guest_addr, layout, references, returned: Mutex::default() };
        Ok(Self { core: Arc::new(core), cache: Vec::new(), fresh: 0, faults: None })
    }

    /// How the memory is divided.
    pub fn layout(&self) -> PoolLayout {
        self.core.layout
    }

    /// An empty buffer, the whole of a chunk; `None` when all are in use, or when [faults](Pool::faults)
    /// say so.
    #[inline]
    pub fn alloc(&mut self) -> Option<Buf> {
        if self.faults.as_mut().is_some_and(|faults| faults.alloc_fails()) {
            return None;
        }
        self.cache.pop().or_else(|| self.refill())
    }

    /// Looks for a chunk that was dropped elsewhere, or never used.
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

    /// Takes a buffer that nobody needs any more. One of this pool that is all of its chunk and not shared
    /// is kept without an atomic operation; any other is dropped.
    #[inline]
    pub fn recycle(&mut self, mut buf: Buf) {
        let whole = buf.start == 0 && buf.end == self.core.layout.chunk;
        if whole && self.owns(&buf) && buf.is_exclusive() {
            buf.reset();
            self.cache.push(buf);
        }
    }

    /// Whether a buffer is a range of one of these chunks.
    #[inline(always)]
    pub fn owns(&self, buf: &Buf) -> bool {
        Arc::ptr_eq(&buf.core, &self.core)
    }

    /// Chunks that no buffer has a range of. Takes a lock: for tests and statistics.
    pub fn available(&self) -> u32 {
        let returned = self.core.returned.lock().unwrap_or_else(PoisonError::into_inner).len();
        self.core.layout.count - self.fresh + (self.cache.len() + returned) as u32
    }

    /// What is to go wrong, on purpose; nothing unless set here.
    pub fn faults(&mut self) -> &mut Faults {
        self.faults.get_or_insert_default()
    }

    /// Whether a full copy is to fail, on purpose.
    #[inline]
    pub fn defrag_fails(&mut self) -> bool {
        self.faults.as_mut().is_some_and(|faults| faults.defrag_fails())
    }

    /// Bytes of the pieces that packets are to be cut into, on purpose.
    #[inline]
    pub(super) fn split(&self) -> Option<usize> {
        self.faults.as_ref().and_then(|faults| faults.split).map(NonZeroUsize::get)
    }
}
