//! Where receive buffers come from and where they go back to.
//!
//! Owns every buffer of a queue that is neither posted nor in a packet. All of them are empty.

use ringferry_packet::buffer::{Buf, Fragments, Pool};

/// A buffer on its way into the ring.
#[derive(Debug)]
pub(super) struct Fresh {
    pub buf: Buf,
    /// It was carved just now, and goes back to its chunk if the ring refuses it.
    carved: bool,
}

impl Fresh {
    /// Whether it was carved just now.
    #[inline]
    pub fn is_carved(&self) -> bool {
        self.carved
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Supply {
    fragments: Fragments,
    /// Buffers that came back. Last in, first out: its lines are still in the cache.
    spare: Vec<Buf>,
    /// Ends of buffers that no packet needed. They are posted as they are, before any other.
    ends: Vec<Buf>,
    /// Bytes of the next buffer.
    len: usize,
    /// Bytes of a buffer that is hardly longer than that.
    longest: usize,
    /// Bytes of the shortest buffer that may be posted.
    minimum: usize,
}

impl Supply {
    /// Buffers of at least `minimum` bytes, header included.
    pub fn new(fragments: Fragments, minimum: usize) -> Self {
        let mut supply = Self { fragments, spare: Vec::new(), ends: Vec::new(), len: 0, longest: 0, minimum };
        supply.want(minimum);
        supply
    }

    /// Buffers are to be of `len` bytes from now on. Those that came back are still good if they are an
    /// eighth longer: an average that trembles must not make all of them useless. None is good that is
    /// shorter, or a size that rises would never arrive.
    #[inline]
    pub fn want(&mut self, len: usize) {
        self.len = len;
        self.longest = len + len / 8;
    }

    /// Whether a buffer has the length that is wanted. The last of a chunk has the hole as well, whoever
    /// carves it.
    #[inline]
    fn fits(&self, buf: &Buf) -> bool {
        let len = buf.tailroom();
        len >= self.len && (len <= self.longest || (len < 2 * self.len && self.fragments.is_last(buf)))
    }

    /// A buffer to post; `None` when there is none and no chunk to carve one from.
    #[inline(always)]
    pub fn next(&mut self) -> Option<Fresh> {
        if !self.ends.is_empty()
            && let Some(buf) = self.end()
        {
            return Some(Fresh { buf, carved: false });
        }
        match self.spare.pop() {
            Some(buf) if self.fits(&buf) => Some(Fresh { buf, carved: false }),
            Some(misfit) => self.exchange(misfit),
            None => self.carve(),
        }
    }

    /// An end that is not longer than what is wanted.
    #[cold]
    fn end(&mut self) -> Option<Buf> {
        while let Some(end) = self.ends.pop() {
            if (self.minimum..=self.longest).contains(&end.tailroom()) {
                return Some(end);
            }
            self.put_away(end);
        }
        None
    }

    #[inline(never)]
    fn carve(&mut self) -> Option<Fresh> {
        self.fragments.carve(self.len).map(|buf| Fresh { buf, carved: true })
    }

    /// A new buffer for one of the wrong length, or that one if there is nothing better.
    #[cold]
    fn exchange(&mut self, misfit: Buf) -> Option<Fresh> {
        if self.is_divisible(&misfit) {
            self.fragments.carve_again(misfit);
            return self.carve();
        }
        let mut fresh = self.carve();
        if fresh.is_none() {
            // Chunks may be in use only for other misfits.
            let misfits: Vec<Buf>;
            (self.spare, misfits) =
                std::mem::take(&mut self.spare).into_iter().partition(|buf| self.fits(buf));
            misfits.into_iter().for_each(|buf| self.put_away(buf));
            fresh = self.carve();
        }
        if fresh.is_none() && misfit.tailroom() >= self.minimum {
            return Some(Fresh { buf: misfit, carved: false });
        }
        self.put_away(misfit);
        fresh
    }

    /// Whether a buffer of the wrong length makes two of the right one.
    #[inline]
    fn is_divisible(&self, misfit: &Buf) -> bool {
        misfit.tailroom() >= 2 * self.len
    }

    /// Makes a buffer of the wrong length useful: what can be divided is carved again, any other goes back to its
    /// chunk.
    #[inline(never)]
    fn put_away(&mut self, misfit: Buf) {
        if self.is_divisible(&misfit) {
            self.fragments.carve_again(misfit);
        } else {
            self.fragments.give_up(misfit);
        }
    }

    /// Takes back what the ring refused.
    #[cold]
    pub fn undo(&mut self, fresh: Fresh) {
        if fresh.carved {
            self.fragments.roll_back(fresh.buf);
        } else {
            self.spare.push(fresh.buf);
        }
    }

    /// Keeps a buffer that was posted and has not left the queue since.
    #[inline(always)]
    pub fn keep(&mut self, mut buf: Buf) {
        buf.truncate(0);
        self.spare.push(buf);
    }

    /// Keeps the end of a buffer.
    pub fn keep_end(&mut self, end: Buf) {
        self.ends.push(end);
    }

    /// Keeps a buffer that left the queue and came back.
    ///
    /// # Errors
    /// The buffer, if it is not from here.
    #[inline(always)]
    pub fn take_back(&mut self, buf: Buf) -> Result<(), Buf> {
        match self.fragments.renew(buf) {
            Ok(buf) if self.fits(&buf) => self.spare.push(buf),
            Ok(misfit) => self.put_away(misfit),
            Err(other) => return Err(other),
        }
        Ok(())
    }

    /// The chunks.
    pub fn pool(&mut self) -> &mut Pool {
        self.fragments.pool()
    }

    /// Returns all buffers to their chunks.
    pub fn into_fragments(self) -> Fragments {
        self.fragments
    }
}
