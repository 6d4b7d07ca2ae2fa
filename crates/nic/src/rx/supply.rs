//! The supply of empty receive buffers of one queue.
//!
//! A receive queue creates one [`Supply`] from its chunks and takes it apart at the end. It owns all buffers of
//! the queue that are neither posted nor in a packet: spare ones that came back, trimmed tails, and the chunks
//! from which new ones are carved. Per refill the queue calls [`Supply::set_len`] once and [`Supply::next`]
//! for each buffer.

use ringferry_packet::buffer::{Buf, Fragments, Pool};

/// A buffer that is about to be posted.
#[derive(Debug)]
pub(super) struct Fresh {
    pub buf: Buf,
    /// True if it was newly carved and is rolled back into its chunk if the ring refuses it.
    carved: bool,
}

impl Fresh {
    /// Returns true if the buffer was newly carved.
    #[inline]
    pub fn is_carved(&self) -> bool {
        self.carved
    }
}

/// The buffers and chunks of one queue; see the module's documentation.
#[derive(Debug)]
pub(super) struct Supply {
    fragments: Fragments,
    /// Buffers that came back, as a stack: the one that came back last is still in the cache.
    spare: Vec<Buf>,
    /// Trimmed ends of buffers. They are posted as they are, before any other buffer.
    tails: Vec<Buf>,
    /// Length in bytes that the policy asks for.
    len: usize,
    /// Length in bytes of the longest buffer that is accepted instead.
    longest: usize,
    /// Length in bytes of the shortest buffer that may be posted.
    minimum: usize,
}

impl Supply {
    /// Creates a supply of buffers of at least `minimum` bytes, header included.
    pub fn new(fragments: Fragments, minimum: usize) -> Self {
        let mut supply =
            Self { fragments, spare: Vec::new(), tails: Vec::new(), len: 0, longest: 0, minimum };
        supply.set_len(minimum);
        supply
    }

    /// Sets the length of buffers to `len` bytes. Spare buffers are accepted if they are up to an eighth
    /// longer, so that a fluctuating average does not make all of them useless. Shorter ones are not accepted,
    /// since otherwise a rising length would never take effect.
    #[inline]
    pub fn set_len(&mut self, len: usize) {
        self.len = len;
        self.longest = len + len / 8;
    }

    /// Returns true if a spare buffer has an acceptable length. The last buffer of a chunk may be longer, as
    /// it includes the remainder of the chunk.
    #[inline]
    fn fits(&self, buf: &Buf) -> bool {
        let len = buf.tailroom();
        len >= self.len && (len <= self.longest || (len < 2 * self.len && self.fragments.is_last(buf)))
    }

    /// Returns a buffer to post, or `None` if there is none and no chunk to carve one from.
    #[inline(always)]
    pub fn next(&mut self) -> Option<Fresh> {
        if !self.tails.is_empty()
            && let Some(buf) = self.pop_tail()
        {
            return Some(Fresh { buf, carved: false });
        }
        match self.spare.pop() {
            Some(buf) if self.fits(&buf) => Some(Fresh { buf, carved: false }),
            Some(misfit) => self.exchange(misfit),
            None => self.carve(),
        }
    }

    /// Returns a trimmed tail of an acceptable length; puts away the others.
    #[cold]
    fn pop_tail(&mut self) -> Option<Buf> {
        while let Some(tail) = self.tails.pop() {
            if (self.minimum..=self.longest).contains(&tail.tailroom()) {
                return Some(tail);
            }
            self.put_away(tail);
        }
        None
    }

    #[inline(never)]
    fn carve(&mut self) -> Option<Fresh> {
        self.fragments.carve(self.len).map(|buf| Fresh { buf, carved: true })
    }

    /// Exchanges a spare buffer of the wrong length for a new one; returns the spare one itself if no chunk is
    /// left and it may be posted.
    #[cold]
    fn exchange(&mut self, misfit: Buf) -> Option<Fresh> {
        if self.is_divisible(&misfit) {
            self.fragments.carve_again(misfit);
            return self.carve();
        }
        let mut fresh = self.carve();
        if fresh.is_none() {
            // Other spare buffers of the wrong length may be all that keeps chunks in use.
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

    /// Returns true if a buffer of the wrong length is long enough to be divided into two of the right one.
    #[inline]
    fn is_divisible(&self, misfit: &Buf) -> bool {
        misfit.tailroom() >= 2 * self.len
    }

    /// Returns a buffer of the wrong length to the chunks: one that can be divided is carved again, any other
    /// is given up until its whole chunk is free.
    #[inline(never)]
    fn put_away(&mut self, misfit: Buf) {
        if self.is_divisible(&misfit) {
            self.fragments.carve_again(misfit);
        } else {
            self.fragments.give_up(misfit);
        }
    }

    /// Takes back a buffer that the ring refused.
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

    /// Keeps the trimmed end of a buffer.
    pub fn keep_tail(&mut self, tail: Buf) {
        self.tails.push(tail);
    }

    /// Keeps a buffer that was delivered with a packet and came back.
    ///
    /// # Errors
    /// The buffer itself, if it does not belong to this queue or is shared.
    #[inline(always)]
    pub fn take_back(&mut self, buf: Buf) -> Result<(), Buf> {
        match self.fragments.renew(buf) {
            Ok(buf) if self.fits(&buf) => self.spare.push(buf),
            Ok(misfit) => self.put_away(misfit),
            Err(other) => return Err(other),
        }
        Ok(())
    }

    /// Borrows the pool of chunks.
    pub fn pool(&mut self) -> &mut Pool {
        self.fragments.pool()
    }

    /// Returns all buffers to their chunks.
    pub fn into_fragments(self) -> Fragments {
        self.fragments
    }
}
