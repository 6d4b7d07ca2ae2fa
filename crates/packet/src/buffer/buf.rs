//! A buffer: a range of a chunk with head room, data and tail room, like an mbuf or a socket buffer.
//!
//! A pool or [`Fragments`](super::Fragments) makes it, its owner fills and trims it, and recycling or dropping it returns
//! the range. It may move between threads.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use ringferry_memory::{ReadSlice, WriteSlice};

use super::chain::{Info, Packet};
use super::pool::{PoolLayout, PoolShared};

/// A buffer: a range of one chunk, and the data in it.
///
/// ```text
///   start        head             head + len         end
///     | head room  |  data            |  tail room    |
/// ```
///
/// [`Buf::truesize`] is the size of the whole range.
///
/// A `Buf` is a pointer to its descriptor, which is one cache line; so is a [`Chain`](super::Chain) of one buffer. Both
/// are moved often, and each copy of fields that were just stored one by one waits until all of them have reached the
/// cache. Allocating a buffer, making it a packet and recycling it took 60 ns when they were passed by value, and takes
/// 13 now. The descriptor stays with the buffer in its pool, so it is not allocated each time.
#[derive(Debug)]
pub struct Buf(Box<Extent>);

/// The descriptor of a [`Buf`].
#[derive(Debug)]
#[repr(align(64))]
pub struct Extent {
    pub(super) core: Arc<PoolShared>,
    pub(super) chunk: u32,
    /// The first cache line of the chunk, counted from the begin of the pool's memory.
    line: u32,
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) head: u32,
    pub(super) len: u32,
    /// True if another buffer may have the same range.
    shared: bool,
    /// Metadata of the packet, if this is its only buffer.
    pub(super) info: Info,
    /// An empty descriptor of a packet of several buffers, kept so that the next such packet needs no allocation.
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
    /// Makes a buffer of a whole chunk of which no other range exists. The caller has counted its reference.
    pub(super) fn whole(core: Arc<PoolShared>, chunk: u32) -> Self {
        let (end, head) = (core.layout.chunk, core.layout.headroom);
        let line = core.layout.first_line(chunk);
        Self(Box::new(Extent {
            core,
            chunk,
            line,
            start: 0,
            end,
            head,
            len: 0,
            shared: false,
            info: Info::default(),
            spare: None,
        }))
    }

    /// Empties a buffer that is a whole chunk.
    #[inline(always)]
    pub(super) fn reset(&mut self) {
        self.head = self.core.layout.headroom;
        self.len = 0;
        self.shared = false;
    }

    /// Extends an empty range to its whole chunk, if no other range of the chunk exists. Returns true if it did.
    pub(super) fn become_whole(&mut self) -> bool {
        let last = self.core.references(self.chunk) == 1;
        if last {
            (self.start, self.end) = (0, self.core.layout.chunk);
            self.reset();
        }
        last
    }

    /// Empties an exclusive buffer, as if newly carved: only the first buffer of a chunk has head room.
    pub(super) fn empty(&mut self) {
        self.head = if self.start == 0 { self.core.layout.headroom.min(self.end) } else { self.start };
        self.len = 0;
        self.shared = false;
    }

    /// Returns the length of the data in bytes.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns true if there is no data.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of free bytes in front of the data.
    #[inline(always)]
    pub fn headroom(&self) -> usize {
        (self.head - self.start) as usize
    }

    /// Returns the number of free bytes behind the data.
    #[inline(always)]
    pub fn tailroom(&self) -> usize {
        (self.end - self.head - self.len) as usize
    }

    /// Returns the number of bytes of the chunk that this buffer occupies, room included.
    #[inline(always)]
    pub fn truesize(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Returns the device address of the first byte of data.
    #[inline(always)]
    pub fn addr(&self) -> u64 {
        self.core.guest_addr + self.at() as u64
    }

    /// Returns the offset of the first byte of data in the memory of the pool.
    #[inline(always)]
    pub(super) fn at(&self) -> usize {
        self.line as usize * PoolLayout::LINE as usize + self.head as usize
    }

    /// Returns true if no other buffer has this range, so that it may be written.
    #[inline(always)]
    pub fn is_exclusive(&self) -> bool {
        // If this is the only reference to the chunk, the other owners of the range have dropped it.
        !self.shared || self.core.references(self.chunk) == 1
    }

    /// Returns the data for reading.
    #[inline(always)]
    pub fn read(&self) -> ReadSlice<'_> {
        self.core.readable(self.at(), self.len())
    }

    /// Returns the data for writing; an empty slice if the range is shared.
    #[inline(always)]
    pub fn write(&mut self) -> WriteSlice<'_> {
        let len = if self.is_exclusive() { self.len() } else { 0 };
        self.core.writable(self.at(), len)
    }

    /// Returns the first `n` bytes of the data, or fewer, for writing; an empty slice if the range is shared.
    #[inline(always)]
    pub fn front(&mut self, n: usize) -> WriteSlice<'_> {
        let n = if self.is_exclusive() { n.min(self.len()) } else { 0 };
        self.core.writable(self.at(), n)
    }

    /// Returns the tail room for writing; an empty slice if the range is shared. [`Buf::grow`] turns bytes written there
    /// into data.
    #[inline(always)]
    pub fn room(&mut self) -> WriteSlice<'_> {
        let len = if self.is_exclusive() { self.tailroom() } else { 0 };
        self.core.writable(self.at() + self.len(), len)
    }

    /// Adds the first `n` bytes of the tail room, or all of it, to the data.
    #[inline(always)]
    pub fn grow(&mut self, n: usize) {
        self.len += n.min(self.tailroom()) as u32;
    }

    /// Returns the first `n` bytes of the tail room, or all of it, for reading what a device has written there.
    #[inline(always)]
    pub fn written(&self, n: usize) -> ReadSlice<'_> {
        self.core.readable(self.at() + self.len(), n.min(self.tailroom()))
    }

    /// Makes the first `n` bytes of the tail room of an empty buffer, or all of it, its data, but for the first `skip` of these.
    #[inline(always)]
    pub fn receive(&mut self, n: usize, skip: usize) {
        let n = n.min(self.tailroom());
        let skip = skip.min(n);
        self.head += skip as u32;
        self.len = (n - skip) as u32;
    }

    /// Adds the last `n` bytes of the head room to the data. Returns false, without a change, if there are fewer or the
    /// range is shared.
    #[inline(always)]
    pub fn push(&mut self, n: usize) -> bool {
        let fits = n <= self.headroom() && self.is_exclusive();
        if fits {
            self.head -= n as u32;
            self.len += n as u32;
        }
        fits
    }

    /// [Adds](Buf::push) the last `n` bytes of the head room to the data, and returns their device address, and themselves for
    /// writing; `None`, without a change, if there are fewer or the range is shared.
    #[inline(always)]
    pub fn prepend(&mut self, n: usize) -> Option<(u64, WriteSlice<'_>)> {
        if !self.push(n) {
            return None;
        }
        let at = self.at();
        Some((self.core.guest_addr + at as u64, self.core.writable(at, n)))
    }

    /// Moves the start of an empty buffer `n` bytes into its head room, for a header that precedes the data; fewer if there is less
    /// head room.
    #[inline(always)]
    pub fn reserve_front(&mut self, n: usize) {
        if self.is_empty() {
            self.head -= n.min(self.headroom()) as u32;
        }
    }

    /// Removes up to `n` bytes from the front of the data, which become head room. Returns their number.
    #[inline(always)]
    pub fn pull(&mut self, n: usize) -> usize {
        let n = n.min(self.len());
        self.head += n as u32;
        self.len -= n as u32;
        n
    }

    /// Shortens the data to `n` bytes; the others become tail room.
    #[inline(always)]
    pub fn truncate(&mut self, n: usize) {
        self.len = self.len.min(n.try_into().unwrap_or(u32::MAX));
    }

    /// Appends as much of `bytes` as fits the tail room, and returns the number of bytes.
    #[inline]
    pub fn append(&mut self, bytes: &[u8]) -> usize {
        let n = self.room().copy_from(bytes);
        self.grow(n);
        n
    }

    /// Appends as much of a slice of shared memory as fits the tail room, and returns the number of bytes.
    #[inline]
    pub fn append_slice(&mut self, bytes: &ReadSlice<'_>) -> usize {
        let n = bytes.copy_to_slice(&self.room());
        self.grow(n);
        n
    }

    /// Divides the range `n` bytes behind the start of the data: this buffer keeps the front part, and the part behind,
    /// room included, is returned. It is empty if all data is in front. It adds a reference to the chunk.
    pub fn split_off(&mut self, n: usize) -> Buf {
        let border = self.head + n.min((self.end - self.head) as usize) as u32;
        let data_end = self.head + self.len;
        let behind = Extent {
            core: Arc::clone(&self.core),
            chunk: self.chunk,
            line: self.line,
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

    /// Makes a second owner of the same range. Neither may write it until the other is dropped.
    pub fn share(&mut self) -> Buf {
        self.core.refer(self.chunk);
        self.shared = true;
        let Extent { chunk, line, start, end, head, len, shared, .. } = *self.0;
        Buf(Box::new(Extent {
            core: Arc::clone(&self.core),
            chunk,
            line,
            start,
            end,
            head,
            len,
            shared,
            info: Info::default(),
            spare: None,
        }))
    }

    /// Returns true if the data of `next` is adjacent to the end of this buffer's data in memory, without room between.
    #[inline]
    pub fn is_continued_by(&self, next: &Buf) -> bool {
        self.chunk == next.chunk
            && self.end == next.start
            && self.tailroom() == 0
            && next.headroom() == 0
            && self.shared == next.shared
            && Arc::ptr_eq(&self.core, &next.core)
    }

    /// Joins `next` to this buffer, if it [continues](Buf::is_continued_by) this one.
    ///
    /// # Errors
    /// `next`, unchanged, if it does not.
    pub fn join(&mut self, next: Buf) -> Result<(), Buf> {
        if !self.is_continued_by(&next) {
            return Err(next);
        }
        self.end = next.end;
        self.len += next.len;
        // Dropping `next` releases its reference to the chunk; ours now covers both ranges.
        drop(next);
        Ok(())
    }
}

impl Buf {
    /// Joins the range of `next`, which has no data, if it is adjacent behind this one. Otherwise returns it.
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
