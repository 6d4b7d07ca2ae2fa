//! A packet: one buffer or more, its virtual header, its flow.

use std::ops::{Deref, DerefMut};

use ringferry_memory::{ReadSlice, WriteSlice};
use smallvec::SmallVec;

use super::Buf;
use crate::vnet::Header;

/// The buffers of a packet. Most packets have one, which is stored in place; there is no limit to the
/// others.
pub type Bufs = SmallVec<[Buf; 1]>;

/// What is known of a packet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Info {
    /// Offloads: what is left to be done with the frame.
    pub header: Header,
    /// The hash of its flow, where somebody computed one.
    pub hash: Option<u32>,
}

/// A packet. No buffer of it is empty. Dereferences to what is known of it.
///
/// A packet of one buffer, as most are, is that buffer: the line that describes the buffer describes the packet too, and
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

/// What a [`Chain`] of several buffers is. Stays with the first of them when the packet is taken apart.
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
    fn from(mut buf: Buf) -> Self {
        if buf.is_empty() {
            return Self::default();
        }
        buf.info = Info::default();
        Self(Shape::One(buf))
    }
}

impl From<Bufs> for Chain {
    /// Empty buffers are dropped.
    fn from(bufs: Bufs) -> Self {
        let mut chain = Self::default();
        bufs.into_iter().for_each(|buf| chain.push_back(buf));
        chain
    }
}

impl Chain {
    /// The packet as one that may have any number of buffers.
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

    /// Bytes of the frame.
    #[inline(always)]
    pub fn len(&self) -> usize {
        match &self.0 {
            Shape::Empty => 0,
            Shape::One(buf) => buf.len(),
            Shape::Many(packet) => packet.len,
        }
    }

    /// Whether there are no bytes.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The buffers, in order.
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

    /// The first buffer, if there is one. Whoever changes its length says so by [`Chain::recount`].
    #[inline(always)]
    pub fn first_mut(&mut self) -> Option<&mut Buf> {
        self.bufs_mut().first_mut()
    }

    /// The buffer of a packet that has one, as long as the packet was not one of several.
    #[inline(always)]
    pub fn only_mut(&mut self) -> Option<&mut Buf> {
        match &mut self.0 {
            Shape::One(buf) => Some(buf),
            _ => None,
        }
    }

    /// The buffers, without the packet.
    #[inline]
    pub fn into_bufs(self) -> Bufs {
        match self.0 {
            Shape::Empty => Bufs::new(),
            Shape::One(buf) => Bufs::from_buf([buf]),
            Shape::Many(mut packet) => std::mem::take(&mut packet.bufs),
        }
    }

    /// Takes the packet apart: `keep` gets the buffers, the last one first.
    #[inline(always)]
    pub fn dissolve(self, mut keep: impl FnMut(Buf)) {
        match self.0 {
            Shape::Empty => {}
            Shape::One(buf) => keep(buf),
            Shape::Many(packet) => packet.dissolve(keep),
        }
    }

    /// The data, in order.
    #[inline]
    pub fn pieces(&self) -> impl Iterator<Item = ReadSlice<'_>> {
        self.bufs().iter().map(Buf::read)
    }

    /// Bytes of pools that the packet keeps from being used otherwise.
    pub fn truesize(&self) -> usize {
        self.bufs().iter().map(Buf::truesize).sum()
    }

    /// Counts the bytes again.
    #[inline]
    pub fn recount(&mut self) {
        if let Shape::Many(packet) = &mut self.0 {
            packet.len = packet.bufs.iter().map(Buf::len).sum();
        }
    }

    /// Adds a buffer behind the others; an empty one is dropped.
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

    /// Appends as many of the bytes as the room behind the last buffer's data takes; returns how many. None if others have
    /// that buffer, or there is none.
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

    /// Adds a buffer in front of the others; an empty one is dropped.
    pub fn push_front(&mut self, buf: Buf) {
        if !buf.is_empty() {
            let packet = self.many();
            packet.len += buf.len();
            packet.bufs.insert(0, buf);
        }
    }

    /// Makes the last `n` bytes of the first buffer's head room data; false when it has fewer, or is shared.
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

    /// Takes up to `n` bytes off the front; buffers that become empty are dropped.
    pub fn pull(&mut self, n: usize) {
        match &mut self.0 {
            Shape::One(buf) if n < buf.len() => {
                buf.pull(n);
            }
            _ => self.many().pull(n),
        }
    }

    /// Keeps the first `n` bytes; buffers behind them are dropped.
    pub fn truncate(&mut self, n: usize) {
        match &mut self.0 {
            Shape::One(buf) if n > 0 => buf.truncate(n),
            _ => self.many().truncate(n),
        }
    }

    /// Divides the packet: this one keeps the first `n` bytes. Header and flow stay with both.
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

    /// Puts the buffers of `next` behind these. Its header and flow are dropped.
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

    /// A second owner of the same bytes: see [`Buf::share`].
    pub fn share(&mut self) -> Chain {
        let info = **self;
        let bufs: Bufs = self.bufs_mut().iter_mut().map(Buf::share).collect();
        let mut chain = Chain::from(bufs);
        *chain = info;
        chain
    }

    /// The same packet in buffers of at most `piece` bytes, which is not 0. Those cut from one buffer adjoin.
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
    /// [`Layers::parse`](crate::parse::Layers::parse), [`flow_hash`](crate::flow::flow_hash) and
    /// [`ether`](crate::ether), which read private memory only.
    #[inline]
    pub fn prefix<'a>(&self, out: &'a mut [u8]) -> &'a [u8] {
        let n = self.copy_to(out);
        &out[..n]
    }

    /// A copy of all bytes, for tests and slow paths.
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
