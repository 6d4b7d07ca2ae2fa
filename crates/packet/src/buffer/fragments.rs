//! Buffers of any size, carved one after the other from the chunks of a pool (a bump allocator per chunk).
//!
//! A receive queue makes one [`Fragments`] and calls [`Fragments::carve`] for each new buffer;
//! [`Fragments::into_pool`] ends it. Buffers may be dropped on any thread.

use super::{Buf, Pool, PoolLayout};

/// Size of a cache line in bytes.
const LINE: u32 = 64;

/// Carves buffers from chunks. The rest of the current chunk is kept as a buffer. So are ranges that came back; they are
/// carved before a new chunk is allocated, as a chunk is whole again only when all of it has come back.
///
/// The remainder of a chunk that cannot hold another buffer of the same size, the *hole*, is added to the last buffer, so
/// that the truesizes of the buffers of a chunk add up to the chunk.
#[derive(Debug)]
pub struct Fragments {
    pool: Pool,
    rest: Option<Buf>,
    /// Empty ranges that came back and can be carved again.
    returned: Vec<Buf>,
}

impl Fragments {
    /// Size in bytes of a chunk that buffers are carved from: eight pages. Two chunks hold the longest packet.
    pub const CHUNK: u32 = 32 * 1024;

    /// Makes the layout of a pool of `count` chunks for packets that begin with a driver's header of `header` bytes. The
    /// frame behind the header begins at a cache line in every buffer whose length is a whole number of lines.
    ///
    /// A chunk is two lines longer than [`Fragments::CHUNK`]: one for the head room, and one because the longest packet is
    /// slightly longer than 64 KiB.
    pub fn layout(count: u32, header: u32) -> PoolLayout {
        PoolLayout::chunks(Self::CHUNK + 2 * LINE, count, LINE - header % LINE)
    }

    /// Makes a carver for the chunks of `pool`. The first buffer of a chunk begins at the end of its head room.
    pub fn new(pool: Pool) -> Self {
        Self { pool, rest: None, returned: Vec::new() }
    }

    /// Borrows the pool of chunks.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// Returns the pool for another use. Ranges that were not carved return to their chunks.
    pub fn into_pool(mut self) -> Pool {
        while let Some(range) = self.rest.take().or_else(|| self.returned.pop()) {
            self.give_up(range);
        }
        self.pool
    }

    /// Carves an empty buffer with at least `len` bytes of tail room. Returns `None` if no chunk is left, or if chunks are
    /// too small.
    #[inline]
    pub fn carve(&mut self, len: usize) -> Option<Buf> {
        if self.rest.as_ref().is_none_or(|rest| rest.tailroom() < len) {
            self.next_chunk(len)?;
        }
        let mut buf = self.rest.take()?;
        if buf.tailroom() >= len.saturating_mul(2) {
            self.rest = Some(buf.split_off(len));
        }
        Some(buf)
    }

    #[cold]
    fn next_chunk(&mut self, len: usize) -> Option<()> {
        if (self.pool.layout().room() as usize) < len {
            return None;
        }
        // A rest may be too small because lengths have grown. If all other ranges of its chunk have come back, the chunk
        // is carved from its beginning, as it may be the only one. Otherwise the rest is replaced below.
        if self.rest.as_mut().is_some_and(Buf::become_whole) {
            return Some(());
        }
        while let Some(range) = self.returned.pop() {
            if range.tailroom() >= len {
                self.rest = Some(range);
                return Some(());
            }
            self.give_up(range);
        }
        self.rest = Some(self.pool.alloc()?);
        Some(())
    }

    /// Undoes the last [carve](Fragments::carve): the next buffer will have the same memory. A buffer that was carved
    /// earlier or elsewhere, or is shared, is dropped.
    pub fn roll_back(&mut self, mut buf: Buf) {
        if !self.pool.owns(&buf) || !buf.is_exclusive() {
            return;
        }
        buf.empty();
        self.rest = match self.rest.take() {
            None => Some(buf),
            Some(rest) => Some(match buf.join_room(rest) {
                Ok(()) => buf,
                Err(rest) => rest,
            }),
        };
    }

    /// Makes a buffer empty again, as if newly carved.
    ///
    /// # Errors
    /// The buffer, unchanged, if it does not belong to this pool, is shared, or was split so that its data would not begin
    /// at the required alignment.
    #[inline(always)]
    pub fn renew(&self, mut buf: Buf) -> Result<Buf, Buf> {
        let headroom = self.pool.layout().headroom;
        let aligned = buf.start == 0 || buf.start.wrapping_sub(headroom).is_multiple_of(LINE);
        if aligned && self.pool.owns(&buf) && buf.is_exclusive() {
            buf.empty();
            Ok(buf)
        } else {
            Err(buf)
        }
    }

    /// Takes a [renewed](Fragments::renew) buffer as a range to be carved again, for buffers that were joined, or that are
    /// longer than the lengths that are needed now.
    #[inline]
    pub fn carve_again(&mut self, range: Buf) {
        self.returned.push(range);
    }

    /// Gives a buffer up. If it was the last range of its chunk, the chunk can be carved again.
    #[inline]
    pub fn give_up(&mut self, mut buf: Buf) {
        if self.pool.owns(&buf) && buf.become_whole() {
            self.pool.recycle(buf);
        }
    }

    /// Returns true if a buffer is at the end of its chunk, so that it includes the hole.
    #[inline]
    pub fn is_last(&self, buf: &Buf) -> bool {
        buf.end == self.pool.layout().chunk
    }
}

impl Buf {
    /// Prefetches the first `lines` cache lines from the start of the data, of a buffer that a device has written. Never
    /// faults.
    #[inline(always)]
    pub fn prefetch(&self, lines: usize) {
        let range = self.core.readable(self.at(), (self.end - self.head) as usize);
        for line in 0..lines {
            range.skip(line * LINE as usize).prefetch();
        }
    }
}
