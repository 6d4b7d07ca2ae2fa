//! A range of a chunk: head room, data, tail room.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use ringferry_memory::{ReadSlice, WriteSlice};

use super::chain::{Info, Packet};
use super::pool::Core;

/// A buffer: a range of one chunk, and the data in it.
///
/// ```text
///   start        head             head + len         end
///     | head room  |  data            |  tail room    |
/// ```
///
/// [`Buf::truesize`] is what the range takes of the chunk, data or not.
///
/// A pointer to its description, which is one cache line; so is a [`Chain`](super::Chain) of one buffer. Both pass through many hands, and each
/// copy of fields that were just stored one by one waits for all of them to reach the cache. Taking a buffer,
/// making it a packet and giving it back took 60 ns when they were passed by value, and takes 13. The description stays with
/// the buffer in its pool, so nothing is allocated for it.
#[derive(Debug)]
pub struct Buf(Box<Extent>);

/// What a [`Buf`] is.
#[derive(Debug)]
#[repr(align(64))]
pub struct Extent {
    pub(super) core: Arc<Core>,
    pub(super) chunk: u32,
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) head: u32,
    pub(super) len: u32,
    /// Others may have the same range.
    shared: bool,
    /// What is known of the packet that this is the only buffer of.
    pub(super) info: Info,
    /// The packet of several buffers that this was the first of, empty: the next one needs no allocation.
    pub(super) spare: Option<Box<Packet>>,
}

const _: () = assert!(size_of::<Extent>() == 64, "one cache line");

impl Deref for Buf {
    type Target = Extent;

    #[inline(always)]
    fn deref(&self) -> &Extent {
        &self.0
    }
}

impl DerefMut for Buf {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Extent {
        &mut self.0
    }
}

impl Buf {
    /// The whole of a chunk that nobody else has a range of, its reference included.
    pub(super) fn whole(core: Arc<Core>, chunk: u32) -> Self {
        let (end, head) = (core.layout.chunk, core.layout.headroom);
        Self(Box::new(Extent {
            core,
            chunk,
            start: 0,
            end,
            head,
            len: 0,
            shared: false,
            info: Info::default(),
            spare: None,
        }))
    }

    /// Empties a buffer that is all of its chunk.
    #[inline(always)]
    pub(super) fn reset(&mut self) {
        self.head = self.core.layout.headroom;
        self.len = 0;
        self.shared = false;
    }

    /// Makes a range without data the whole of its chunk, if nobody else has a range of it.
    pub(super) fn become_whole(&mut self) -> bool {
        let last = self.core.references(self.chunk) == 1;
        if last {
            (self.start, self.end) = (0, self.core.layout.chunk);
            self.reset();
        }
        last
    }

    /// Empties an exclusive buffer, as it was carved: head room is only in front of the first of a chunk.
    pub(super) fn empty(&mut self) {
        self.head = if self.start == 0 { self.core.layout.headroom.min(self.end) } else { self.start };
        self.len = 0;
        self.shared = false;
    }

    /// Bytes of data.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there is no data.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes in front of the data.
    #[inline(always)]
    pub fn headroom(&self) -> usize {
        (self.head - self.start) as usize
    }

    /// Bytes behind the data.
    #[inline(always)]
    pub fn tailroom(&self) -> usize {
        (self.end - self.head - self.len) as usize
    }

    /// Bytes of the chunk that this buffer keeps from being used otherwise.
    #[inline(always)]
    pub fn truesize(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Where the data begins, as the device sees it.
    #[inline(always)]
    pub fn addr(&self) -> u64 {
        self.core.guest_addr + self.at() as u64
    }

    /// Where the data begins, in the memory of the pool.
    #[inline(always)]
    pub(super) fn at(&self) -> usize {
        self.chunk as usize * self.core.layout.stride as usize + self.head as usize
    }

    /// Whether nobody else has this range: it may be written.
    #[inline(always)]
    pub fn is_exclusive(&self) -> bool {
        // If ours is the only reference to the chunk, whoever had the range has dropped it.
        !self.shared || self.core.references(self.chunk) == 1
    }

    /// The data, for reading.
    #[inline(always)]
    pub fn read(&self) -> ReadSlice<'_> {
        self.core.area.read(self.at(), self.len()).unwrap_or(ReadSlice::EMPTY)
    }

    /// The data, for writing; nothing if the range is shared.
    #[inline(always)]
    pub fn write(&mut self) -> WriteSlice<'_> {
        let len = if self.is_exclusive() { self.len() } else { 0 };
        self.core.area.write(self.at(), len).unwrap_or(WriteSlice::EMPTY)
    }

    /// The first `n` bytes of the data, or fewer, for writing; nothing if the range is shared.
    #[inline(always)]
    pub fn front(&mut self, n: usize) -> WriteSlice<'_> {
        let n = if self.is_exclusive() { n.min(self.len()) } else { 0 };
        self.core.area.write(self.at(), n).unwrap_or(WriteSlice::EMPTY)
    }

    /// The tail room, for writing; nothing if the range is shared. What was written there becomes data by
    /// [`Buf::grow`].
    #[inline(always)]
    pub fn room(&mut self) -> WriteSlice<'_> {
        let len = if self.is_exclusive() { self.tailroom() } else { 0 };
        self.core.area.write(self.at() + self.len(), len).unwrap_or(WriteSlice::EMPTY)
    }

    /// Makes the first `n` bytes of the tail room data, at most all of it.
    #[inline(always)]
    pub fn grow(&mut self, n: usize) {
        self.len += n.min(self.tailroom()) as u32;
    }

    /// Makes the last `n` bytes of the head room data; false, and nothing changes, when there are fewer or
    /// the range is shared.
    #[inline(always)]
    pub fn push(&mut self, n: usize) -> bool {
        let fits = n <= self.headroom() && self.is_exclusive();
        if fits {
            self.head -= n as u32;
            self.len += n as u32;
        }
        fits
    }

    /// Lets an empty buffer begin `n` bytes earlier, for a header that comes with the data; less where there is
    /// less head room.
    #[inline(always)]
    pub fn reserve_front(&mut self, n: usize) {
        if self.is_empty() {
            self.head -= n.min(self.headroom()) as u32;
        }
    }

    /// Takes up to `n` bytes off the front of the data; they become head room. Returns how many.
    #[inline(always)]
    pub fn pull(&mut self, n: usize) -> usize {
        let n = n.min(self.len());
        self.head += n as u32;
        self.len -= n as u32;
        n
    }

    /// Keeps the first `n` bytes of the data; the others become tail room.
    #[inline(always)]
    pub fn truncate(&mut self, n: usize) {
        self.len = self.len.min(n.try_into().unwrap_or(u32::MAX));
    }

    /// Appends as much of `bytes` as the tail room takes; returns how much.
    #[inline]
    pub fn append(&mut self, bytes: &[u8]) -> usize {
        let n = self.room().copy_from(bytes);
        self.grow(n);
        n
    }

    /// Appends as much of the slice as the tail room takes; returns how much.
    #[inline]
    pub fn append_slice(&mut self, bytes: &ReadSlice<'_>) -> usize {
        let n = bytes.copy_to_slice(&self.room());
        self.grow(n);
        n
    }

    /// Divides the range `n` bytes behind the start of the data: this buffer keeps what is in front, and what is
    /// behind is returned, room included. A border behind the data leaves the second part empty. A
    /// reference to the chunk is added.
    pub fn split_off(&mut self, n: usize) -> Buf {
        let border = self.head + n.min((self.end - self.head) as usize) as u32;
        let data_end = self.head + self.len;
        let behind = Extent {
            core: Arc::clone(&self.core),
            chunk: self.chunk,
            start: border,
            end: self.end,
            head: border,
            len: data_end.saturating_sub(border),
            shared: self.shared,
            info: Info::default(),
            spare: None,
        };
        self.core.refer(self.chunk);
        self.end = border;
        self.len = self.len.min(border - self.head);
        Buf(Box::new(behind))
    }

    /// A second owner of the same range: neither may write it until the other is gone.
    pub fn share(&mut self) -> Buf {
        self.core.refer(self.chunk);
        self.shared = true;
        let Extent { chunk, start, end, head, len, shared, .. } = *self.0;
        Buf(Box::new(Extent {
            core: Arc::clone(&self.core),
            chunk,
            start,
            end,
            head,
            len,
            shared,
            info: Info::default(),
            spare: None,
        }))
    }

    /// Whether the data of `next` continues this buffer's in memory, with no room between.
    #[inline]
    pub fn is_continued_by(&self, next: &Buf) -> bool {
        self.chunk == next.chunk
            && self.end == next.start
            && self.tailroom() == 0
            && next.headroom() == 0
            && self.shared == next.shared
            && Arc::ptr_eq(&self.core, &next.core)
    }

    /// Takes over the range of `next`, if it [continues](Buf::is_continued_by) this one.
    ///
    /// # Errors
    /// `next`, unchanged.
    pub fn join(&mut self, next: Buf) -> Result<(), Buf> {
        if !self.is_continued_by(&next) {
            return Err(next);
        }
        self.end = next.end;
        self.len += next.len;
        // Its reference to the chunk goes; ours stays for both.
        drop(next);
        Ok(())
    }
}

impl Buf {
    /// Takes over the range of `next`, all room and no data, if it lies behind this one.
    pub(super) fn join_room(&mut self, next: Buf) -> Result<(), Buf> {
        let behind =
            self.chunk == next.chunk && self.end == next.start && Arc::ptr_eq(&self.core, &next.core);
        if !behind || self.shared || next.shared {
            return Err(next);
        }
        self.end = next.end;
        drop(next);
        Ok(())
    }
}

impl Drop for Extent {
    #[inline]
    fn drop(&mut self) {
        self.core.release(self.chunk);
    }
}
