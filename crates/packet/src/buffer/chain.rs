//! A packet: one or more buffers, its virtual header and its flow hash.
//!
//! A [`Chain`] is made of buffers from a pool ([`From<Buf>`](Chain), [`Chain::push_back`]), passes through queues by
//! value, and ends when its buffers are recycled ([`Chain::dissolve`]) or it is dropped. It may move between threads.

use std::ops::{Deref, DerefMut};

use ringferry_memory::{ReadSlice, WriteSlice};
use smallvec::SmallVec;

use super::Buf;
use crate::vnet::Header;

/// The buffers of a packet. Most packets have one, which is stored inline; the number is not limited.
pub type Bufs = SmallVec<[Buf; 1]>;

/// The metadata of a packet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Info {
    /// The virtual header: offloads that the frame needs, or that were verified.
    pub header: Header,
    /// The flow hash, if it was computed.
    pub hash: Option<u32>,
}

/// A packet, which dereferences to its metadata. None of its buffers is empty.
///
/// A packet of one buffer, as most are, is stored as that buffer: its descriptor also has the metadata of the packet, and
/// nothing else is touched or allocated.
#[derive(Debug, Default)]
pub struct Chain(Shape);

#[derive(Debug, Default)]
enum Shape {
    #[default]
    Empty,
    One(Buf),
    Many(Box<Packet>),
}

/// The descriptor of a [`Chain`] of several buffers. It stays with the first of them when the packet is dissolved.
#[derive(Debug, Default)]
pub(super) struct Packet {
    bufs: Bufs,
    len: usize,
    info: Info,
}

impl Deref for Chain {
    type Target = Info;

    #[inline(always)]
    fn deref(&self) -> &Info {
        const NOTHING: &Info = &Info { header: Header::NONE, hash: None };
        match &self.0 {
            Shape::Empty => NOTHING,
            Shape::One(buf) => &buf.info,
            Shape::Many(packet) => &packet.info,
        }
    }
}

impl DerefMut for Chain {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Info {
        match self.0 {
            Shape::One(ref mut buf) => &mut buf.info,
            _ => &mut self.many().info,
        }
    }
}

impl From<Buf> for Chain {
    #[inline(always)]
    fn from(buf: Buf) -> Self {
        Self::new(buf, Info::default())
    }
}

impl From<Bufs> for Chain {
    /// Makes a packet of `bufs`, in order; empty buffers are dropped.
    fn from(bufs: Bufs) -> Self {
        let mut chain = Self::default();
        bufs.into_iter().for_each(|buf| chain.push_back(buf));
        chain
    }
}

impl Chain {
    /// Makes a packet of one buffer.
    #[inline(always)]
    pub fn new(mut buf: Buf, info: Info) -> Self {
        if buf.is_empty() {
            return Self::default();
        }
        buf.info = info;
        Self(Shape::One(buf))
    }

    /// Converts the packet to the form that may have any number of buffers.
    #[cold]
    #[inline(never)]
    fn many(&mut self) -> &mut Packet {
        match std::mem::take(&mut self.0) {
            Shape::Empty => self.0 = Shape::Many(Box::default()),
            Shape::One(mut buf) => {
                let mut packet = buf.spare.take().unwrap_or_default();
                (packet.len, packet.info) = (buf.len(), buf.info);
                packet.bufs.push(buf);
                self.0 = Shape::Many(packet);
            }
            many => self.0 = many,
        }
        match &mut self.0 {
            Shape::Many(packet) => packet,
            _ => unreachable!("just made"),
        }
    }

    /// Returns the length of the packet in bytes.
    #[inline(always)]
    pub fn len(&self) -> usize {
        match &self.0 {
            Shape::Empty => 0,
            Shape::One(buf) => buf.len(),
            Shape::Many(packet) => packet.len,
        }
    }

    /// Returns true if the packet has no bytes.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the buffers of the packet, in order.
    #[inline(always)]
    pub fn bufs(&self) -> &[Buf] {
        match &self.0 {
            Shape::Empty => &[],
            Shape::One(buf) => std::slice::from_ref(buf),
            Shape::Many(packet) => &packet.bufs,
        }
    }

    #[inline(always)]
    fn bufs_mut(&mut self) -> &mut [Buf] {
        match &mut self.0 {
            Shape::Empty => &mut [],
            Shape::One(buf) => std::slice::from_mut(buf),
            Shape::Many(packet) => &mut packet.bufs,
        }
    }

    /// Returns the first buffer, if there is one. A caller that changes its length must call [`Chain::recount`].
    #[inline(always)]
    pub fn first_mut(&mut self) -> Option<&mut Buf> {
        self.bufs_mut().first_mut()
    }

    /// Returns the buffer of a packet that has only one and never had several.
    #[inline(always)]
    pub fn only_mut(&mut self) -> Option<&mut Buf> {
        match &mut self.0 {
            Shape::One(buf) => Some(buf),
            _ => None,
        }
    }

    /// Takes the packet apart and returns its buffers, in order.
    #[inline]
    pub fn into_bufs(self) -> Bufs {
        match self.0 {
            Shape::Empty => Bufs::new(),
            Shape::One(buf) => Bufs::from_buf([buf]),
            Shape::Many(mut packet) => std::mem::take(&mut packet.bufs),
        }
    }

    /// Takes the packet apart and passes its buffers to `keep`, the last one first.
    #[inline(always)]
    pub fn dissolve(self, mut keep: impl FnMut(Buf)) {
        // Most have one buffer: a branch that is foreseen, where all at once would be a jump by a table.
        if let Shape::One(buf) = self.0 {
            keep(buf);
        } else if let Shape::Many(packet) = self.0 {
            packet.dissolve(keep);
        }
    }

    /// Iterates over the data of the buffers, in order.
    #[inline]
    pub fn pieces(&self) -> impl Iterator<Item = ReadSlice<'_>> {
        self.bufs().iter().map(Buf::read)
    }

    /// Returns the number of bytes of pools that the packet occupies.
    pub fn truesize(&self) -> usize {
        self.bufs().iter().map(Buf::truesize).sum()
    }

    /// Recomputes the length, after the length of a buffer has changed.
    #[inline]
    pub fn recount(&mut self) {
        if let Shape::Many(packet) = &mut self.0 {
            packet.len = packet.bufs.iter().map(Buf::len).sum();
        }
    }

    /// Adds a buffer at the end; an empty one is dropped.
    #[inline(always)]
    pub fn push_back(&mut self, buf: Buf) {
        let packet = match &mut self.0 {
            _ if buf.is_empty() => return,
            Shape::Empty => return *self = Self::from(buf),
            Shape::One(_) => self.many(),
            Shape::Many(packet) => packet,
        };
        packet.len += buf.len();
        packet.bufs.push(buf);
    }

    /// Appends as many of `bytes` as fit the tail room of the last buffer, and returns their number: 0 if that buffer is
    /// shared, or if there is none.
    #[inline]
    pub fn append_bytes(&mut self, bytes: &[u8]) -> usize {
        match &mut self.0 {
            Shape::Empty => 0,
            Shape::One(buf) => buf.append(bytes),
            Shape::Many(packet) => {
                let n = packet.bufs.last_mut().map_or(0, |last| last.append(bytes));
                packet.len += n;
                n
            }
        }
    }

    /// Adds a buffer at the front; an empty one is dropped.
    pub fn push_front(&mut self, buf: Buf) {
        if !buf.is_empty() {
            let packet = self.many();
            packet.len += buf.len();
            packet.bufs.insert(0, buf);
        }
    }

    /// Adds the last `n` bytes of the first buffer's head room to the packet. Returns false, without a change, if it has
    /// fewer or is shared.
    #[inline(always)]
    pub fn push(&mut self, n: usize) -> bool {
        match &mut self.0 {
            Shape::Empty => false,
            Shape::One(buf) => buf.push(n),
            Shape::Many(packet) => {
                let done = packet.bufs.first_mut().is_some_and(|first| first.push(n));
                if done {
                    packet.len += n;
                }
                done
            }
        }
    }

    /// Removes up to `n` bytes from the front; buffers that become empty are dropped.
    pub fn pull(&mut self, n: usize) {
        match &mut self.0 {
            Shape::One(buf) if n < buf.len() => {
                buf.pull(n);
            }
            _ => self.many().pull(n),
        }
    }

    /// Shortens the packet to `n` bytes; buffers behind them are dropped.
    pub fn truncate(&mut self, n: usize) {
        match &mut self.0 {
            Shape::One(buf) if n > 0 => buf.truncate(n),
            _ => self.many().truncate(n),
        }
    }

    /// Splits the packet: this one keeps the first `n` bytes, and the rest is returned. Both get the metadata.
    pub fn split_off(&mut self, n: usize) -> Chain {
        let mut left = n;
        let mut behind = Chain::default();
        let info = **self;
        let mut kept = Chain::default();
        for mut buf in std::mem::take(self).into_bufs() {
            if left >= buf.len() {
                left -= buf.len();
                kept.push_back(buf);
                continue;
            }
            if left > 0 {
                behind.push_back(buf.split_off(left));
                left = 0;
                kept.push_back(buf);
            } else {
                behind.push_back(buf);
            }
        }
        *self = kept;
        (**self, *behind) = (info, info);
        behind
    }

    /// Appends the buffers of `next`, whose metadata is dropped.
    pub fn append(&mut self, next: Chain) {
        if self.is_empty() {
            let info = **self;
            *self = next;
            **self = info;
            return;
        }
        let packet = self.many();
        packet.len += next.len();
        packet.bufs.extend(next.into_bufs());
    }

    /// Joins buffers that lie one behind the other in memory, without room between.
    pub fn coalesce(&mut self) {
        let Shape::Many(packet) = &mut self.0 else { return };
        if packet.bufs.windows(2).any(|pair| pair[0].is_continued_by(&pair[1])) {
            let mut joined = Bufs::new();
            for buf in std::mem::take(&mut packet.bufs) {
                let left = match joined.last_mut() {
                    Some(last) => last.join(buf).err(),
                    None => Some(buf),
                };
                joined.extend(left);
            }
            packet.bufs = joined;
        }
    }

    /// Makes a second owner of the same bytes: see [`Buf::share`].
    pub fn share(&mut self) -> Chain {
        let info = **self;
        let bufs: Bufs = self.bufs_mut().iter_mut().map(Buf::share).collect();
        let mut chain = Chain::from(bufs);
        *chain = info;
        chain
    }

    /// Splits the buffers of the packet into buffers of at most `piece` bytes, which must not be 0. Those split from one
    /// buffer are adjacent.
    pub fn cut(self, piece: usize) -> Chain {
        let info = *self;
        let mut chain = Chain::default();
        for mut buf in self.into_bufs() {
            while buf.len() > piece {
                let rest = buf.split_off(piece);
                chain.push_back(std::mem::replace(&mut buf, rest));
            }
            chain.push_back(buf);
        }
        *chain = info;
        chain
    }

    /// Copies to `out` as many bytes from the start as both sides have, and returns their number.
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

    /// Copies to `out`, in shared memory, as many bytes from the start as both sides have, and returns their number.
    pub fn copy_to_slice(&self, out: &WriteSlice<'_>) -> usize {
        let mut at = 0;
        for piece in self.pieces() {
            at += piece.copy_to_slice(&out.skip(at));
        }
        at
    }

    /// Copies the first bytes to `out` and returns the copy: as many as fit, or the whole packet. It is for
    /// [`Layers::parse`](crate::parse::Layers::parse), [`flow_hash`](crate::flow::flow_hash) and
    /// [`ether`](crate::ether), which read private memory only.
    #[inline]
    pub fn prefix<'a>(&self, out: &'a mut [u8]) -> &'a [u8] {
        let n = self.copy_to(out);
        &out[..n]
    }

    /// Returns a copy of all bytes, for tests and slow paths.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(&mut bytes);
        bytes
    }
}

impl Packet {
    fn dissolve(mut self: Box<Self>, mut keep: impl FnMut(Buf)) {
        while let Some(mut buf) = self.bufs.pop() {
            if self.bufs.is_empty() {
                buf.spare = Some(self);
                return keep(buf);
            }
            keep(buf);
        }
    }

    fn pull(&mut self, n: usize) {
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

    fn truncate(&mut self, n: usize) {
        let mut left = n.min(self.len);
        self.len = left;
        self.bufs.retain(|buf| {
            buf.truncate(left);
            left -= buf.len();
            !buf.is_empty()
        });
    }
}
