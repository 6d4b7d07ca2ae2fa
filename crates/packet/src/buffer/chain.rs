//! A packet: one buffer or more, its virtual header, its flow.

use std::ops::{Deref, DerefMut};

use ringferry_memory::{ReadSlice, WriteSlice};
use smallvec::SmallVec;

use super::Buf;
use crate::vnet::Header;

/// The buffers of a packet. Most packets have one, which is stored in place; there is no limit to the
/// others.
pub type Bufs = SmallVec<[Buf; 1]>;

/// A packet. No buffer of it is empty. A pointer, as a [`Buf`] is.
#[derive(Debug, Default)]
pub struct Chain(Box<Packet>);

/// What a [`Chain`] is.
#[derive(Debug, Default)]
pub struct Packet {
    bufs: Bufs,
    len: usize,
    /// Offloads: what is left to be done with the frame.
    pub header: Header,
    /// The hash of its flow, where somebody computed one.
    pub hash: Option<u32>,
}

impl Deref for Chain {
    type Target = Packet;

    #[inline(always)]
    fn deref(&self) -> &Packet {
        &self.0
    }
}

impl DerefMut for Chain {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Packet {
        &mut self.0
    }
}

impl From<Buf> for Chain {
    #[inline(always)]
    fn from(mut buf: Buf) -> Self {
        let mut chain = Chain(buf.spare.take().unwrap_or_default());
        chain.push_back(buf);
        chain
    }
}

impl Chain {
    /// Bytes of the frame.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The buffers, in order.
    #[inline(always)]
    pub fn bufs(&self) -> &[Buf] {
        &self.bufs
    }

    /// The first buffer, if there is one. Whoever changes its length says so by [`Chain::recount`].
    #[inline(always)]
    pub fn first_mut(&mut self) -> Option<&mut Buf> {
        self.bufs.first_mut()
    }

    /// The buffers, without the packet.
    #[inline(always)]
    pub fn into_bufs(mut self) -> Bufs {
        std::mem::take(&mut self.bufs)
    }

    /// Takes the packet apart: `keep` gets the buffers, the last one first.
    #[inline(always)]
    pub fn dissolve(mut self, mut keep: impl FnMut(Buf)) {
        while let Some(mut buf) = self.bufs.pop() {
            if self.bufs.is_empty() {
                self.len = 0;
                (self.header, self.hash) = (Header::default(), None);
                buf.spare = Some(self.0);
                return keep(buf);
            }
            keep(buf);
        }
    }

    /// The data, in order.
    #[inline]
    pub fn pieces(&self) -> impl Iterator<Item = ReadSlice<'_>> {
        self.bufs.iter().map(Buf::read)
    }

    /// Bytes of pools that the packet keeps from being used otherwise.
    pub fn truesize(&self) -> usize {
        self.bufs.iter().map(Buf::truesize).sum()
    }

    /// Counts the bytes again.
    #[inline]
    pub fn recount(&mut self) {
        self.len = self.bufs.iter().map(Buf::len).sum();
    }

    /// Adds a buffer behind the others; an empty one is dropped.
    #[inline(always)]
    pub fn push_back(&mut self, buf: Buf) {
        if !buf.is_empty() {
            self.len += buf.len();
            self.bufs.push(buf);
        }
    }

    /// Adds a buffer in front of the others; an empty one is dropped.
    #[inline]
    pub fn push_front(&mut self, buf: Buf) {
        if !buf.is_empty() {
            self.len += buf.len();
            self.bufs.insert(0, buf);
        }
    }

    /// Makes the last `n` bytes of the first buffer's head room data; false when it has fewer, or is shared.
    #[inline(always)]
    pub fn push(&mut self, n: usize) -> bool {
        let done = self.bufs.first_mut().is_some_and(|first| first.push(n));
        if done {
            self.len += n;
        }
        done
    }

    /// Takes up to `n` bytes off the front; buffers that become empty are dropped.
    pub fn pull(&mut self, n: usize) {
        let mut left = n.min(self.len);
        self.len -= left;
        while let Some(first) = self.bufs.first_mut() {
            left -= first.pull(left);
            if !first.is_empty() {
                break;
            }
            self.bufs.remove(0);
        }
    }

    /// Keeps the first `n` bytes; buffers behind them are dropped.
    pub fn truncate(&mut self, n: usize) {
        let mut left = n.min(self.len);
        self.len = left;
        self.bufs.retain(|buf| {
            buf.truncate(left);
            left -= buf.len();
            !buf.is_empty()
        });
    }

    /// Divides the packet: this one keeps the first `n` bytes. Header and flow stay with both.
    pub fn split_off(&mut self, n: usize) -> Chain {
        let mut left = n;
        let mut behind = Chain::default();
        (behind.header, behind.hash) = (self.header, self.hash);
        let mut kept = Bufs::new();
        for mut buf in std::mem::take(&mut self.bufs) {
            if left >= buf.len() {
                left -= buf.len();
                kept.push(buf);
                continue;
            }
            if left > 0 {
                behind.push_back(buf.split_off(left));
                left = 0;
                kept.push(buf);
            } else {
                behind.push_back(buf);
            }
        }
        self.bufs = kept;
        self.len -= behind.len;
        behind
    }

    /// Puts the buffers of `next` behind these. Its header and flow are dropped.
    pub fn append(&mut self, next: Chain) {
        self.len += next.len;
        self.bufs.extend(next.into_bufs());
    }

    /// Joins buffers that lie one behind the other in memory, without room between.
    pub fn coalesce(&mut self) {
        if self.bufs.windows(2).any(|pair| pair[0].is_continued_by(&pair[1])) {
            let mut joined = Bufs::new();
            for buf in std::mem::take(&mut self.bufs) {
                let left = match joined.last_mut() {
                    Some(last) => last.join(buf).err(),
                    None => Some(buf),
                };
                joined.extend(left);
            }
            self.bufs = joined;
        }
    }

    /// A second owner of the same bytes: see [`Buf::share`].
    pub fn share(&mut self) -> Chain {
        let bufs = self.bufs.iter_mut().map(Buf::share).collect();
        Chain(Box::new(Packet { bufs, len: self.len, header: self.header, hash: self.hash }))
    }

    /// The same packet in buffers of at most `piece` bytes, which is not 0. Those cut from one buffer adjoin.
    pub fn cut(mut self, piece: usize) -> Chain {
        let mut bufs = Bufs::new();
        for mut buf in std::mem::take(&mut self.bufs) {
            while buf.len() > piece {
                let rest = buf.split_off(piece);
                bufs.push(std::mem::replace(&mut buf, rest));
            }
            bufs.push(buf);
        }
        self.bufs = bufs;
        self
    }

    /// Copies the first bytes, as many as both sides have; returns how many.
    #[inline]
    pub fn copy_to(&self, out: &mut [u8]) -> usize {
        let mut at = 0;
        for piece in self.pieces() {
            at += piece.copy_to(&mut out[at..]);
            if at == out.len() {
                break;
            }
        }
        at
    }

    /// Copies the first bytes, as many as both sides have; returns how many.
    pub fn copy_to_slice(&self, out: &WriteSlice<'_>) -> usize {
        let mut at = 0;
        for piece in self.pieces() {
            at += piece.copy_to_slice(&out.skip(at));
        }
        at
    }

    /// The first bytes as a slice: what fits in `out`, or the whole packet. For
    /// [`Layers::parse`](crate::parse::Layers::parse), [`flow_hash`](crate::parse::flow_hash) and
    /// [`ether`](crate::ether), which read private memory only.
    #[inline]
    pub fn prefix<'a>(&self, out: &'a mut [u8]) -> &'a [u8] {
        let n = self.copy_to(out);
        &out[..n]
    }

    /// A copy of all bytes, for tests and slow paths.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(&mut bytes);
        bytes
    }
}
