//! Buffers of any size carved from the chunks of a pool, one behind the other.

use super::{Buf, Pool, PoolLayout};

/// Bytes of a cache line.
const LINE: u32 = 64;

/// Carves buffers from chunks. The current chunk is a buffer itself: its rest. So is every range that came
/// back in one piece; these are carved before another chunk is taken, as a chunk is whole again only when all
/// of it has come back.
///
/// What is left of a chunk and can hold no other buffer of the same size, the *hole*, goes to the last
/// one: truesizes of the buffers of a chunk add up to the chunk.
#[derive(Debug)]
pub struct Fragments {
    pool: Pool,
    rest: Option<Buf>,
    /// Empty ranges that came back.
    returned: Vec<Buf>,
}

impl Fragments {
    /// Bytes of a chunk that buffers are carved from. Eight pages; two hold the longest packet.
    pub const CHUNK: u32 = 32 * 1024;

    /// The layout of a pool of `count` chunks for packets that begin with `header` bytes of a driver's header:
    /// what is behind that begins a cache line, in every buffer whose length is a whole number of lines.
    ///
    /// A chunk is two lines longer than [`Fragments::CHUNK`]: one that the head room is in, and one because
    /// the longest packet is a little longer than 64 KiB.
    pub fn layout(count: u32, header: u32) -> PoolLayout {
        PoolLayout::chunks(Self::CHUNK + 2 * LINE, count, LINE - header % LINE)
    }

    /// Carves from `pool`. Every buffer begins where the head room of a chunk ends, modulo the
    /// lengths asked for.
    pub fn new(pool: Pool) -> Self {
        Self { pool, rest: None, returned: Vec::new() }
    }

    /// The chunks.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// The chunks, for another use. What was not carved goes back to them.
    pub fn into_pool(mut self) -> Pool {
        while let Some(range) = self.rest.take().or_else(|| self.returned.pop()) {
            self.give_up(range);
        }
        self.pool
    }

    /// An empty buffer with at least `len` bytes of tail room; `None` when there is no chunk left, or none is
    /// so large.
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
        // A rest that is too small, as sizes have grown since it was left, begins its chunk again when it is all
        // that is left of it: the chunk may be the only one there is. Else it goes, once there is another.
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

    /// Takes back what was [carved](Fragments::carve) last, as if it had not been: the next buffer will be
    /// the same memory. What was carved earlier, elsewhere, or is shared is dropped.
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

    /// Makes a buffer empty again, as it was carved, whatever was done with its data meanwhile.
    ///
    /// # Errors
    /// The buffer, unchanged: it is not from here, others have the same range, or it was cut so that its
    /// data would not begin where a cache line is to begin.
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

    /// Takes a [renewed](Fragments::renew) buffer as a range to be carved again: for buffers that were joined,
    /// or carved when longer ones were wanted.
    #[inline]
    pub fn carve_again(&mut self, range: Buf) {
        self.returned.push(range);
    }

    /// Gives a buffer up that nobody needs any more. If it was the last of its chunk, the chunk can be carved
    /// again.
    #[inline]
    pub fn give_up(&mut self, mut buf: Buf) {
        if self.pool.owns(&buf) && buf.become_whole() {
            self.pool.recycle(buf);
        }
    }

    /// Whether a buffer is the last of its chunk, the one that has the hole.
    #[inline]
    pub fn is_last(&self, buf: &Buf) -> bool {
        buf.end == self.pool.layout().chunk
    }
}

impl Buf {
    /// Asks the CPU to fetch the line the data begins in, and so many less one behind it, of a buffer that a device
    /// has written since. Never faults.
    #[inline(always)]
    pub fn prefetch(&self, lines: usize) {
        if let Some(range) = self.core.area.read(self.at(), (self.end - self.head) as usize) {
            for line in 0..lines {
                range.skip(line * LINE as usize).prefetch();
            }
        }
    }
}
