//! A receive queue: what is posted, what came back, what is a packet.

use arrayvec::ArrayVec;
use ringferry_packet::buffer::{Buf, Chain, Fragments, Pool, Pools};
use ringferry_packet::ether::MIN_FRAME;

use super::RxStats;
use super::policy::{Bounds, GOOD_FRAME, LINE, Policy, PolicyKind};
use super::supply::{Fresh, Supply};
use crate::driver::{Completion, RxDriver, Segment};
use crate::limits::{RxLimits, RxMode};

/// Completions that are collected, and their headers fetched, before any is looked at: all misses of a burst
/// overlap.
const LOOKAHEAD: usize = 32;

/// Free entries that are worth posting buffers for: a burst.
const REFILL: usize = 32;

/// Bytes of buffers that a ring is given at most, unless they are [`FEWEST`]. A ring is filled from one end to the other
/// whatever the packets need, so all of this passes through the caches again and again, and through the table of
/// recent pages, which reaches 8 MiB in today's CPUs. A kernel's TCP through the switch, buffers of 32 KiB: 0.20 s of the
/// switch's time per GB with 32 MiB in the ring, 0.18 with 16, 0.12 with 8, 0.11 with 4 and 0.10 with 2. With 4 and less some
/// packets found no buffer, since a window of TCP's did not fit any more.
pub const POSTED: usize = 8 << 20;

/// Buffers that a ring is given in any case, if it has as many entries: a burst of short packets takes one each, however
/// long they are.
pub const FEWEST: usize = 256;

/// What is chosen for a receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxConfig {
    /// How long buffers are. Has no say where a packet must fit one buffer.
    pub policy: PolicyKind,
    /// Frames of up to so many bytes are copied into a small buffer, and their own is posted again. 0:
    /// none are.
    pub copy_break: usize,
    /// Whether the first line of a frame is fetched together with the driver's header, for who looks at frames at
    /// once. Who only counts them, or hands them on as they are, leaves that line where the device has it.
    pub fetch_frame: bool,
}

impl Default for RxConfig {
    /// 128 bytes: two lines are copied in less time than a buffer takes to come back.
    fn default() -> Self {
        Self { policy: PolicyKind::default(), copy_break: 128, fetch_frame: true }
    }
}

/// Why a receive queue cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// Nothing can be posted.
    #[error("the receive ring has no entries; give it a size")]
    EmptyRing,
    /// Not even a ring full of the longest buffers holds one packet.
    #[error(
        "packets of {packet} bytes need buffers of {need}, but a chunk has {room}; make the ring or the chunks \
         larger, or allow more segments"
    )]
    Chunk {
        /// Bytes of the longest packet, header included.
        packet: usize,
        /// Bytes of a buffer that would do.
        need: usize,
        /// Bytes that a chunk has room for.
        room: usize,
    },
    /// All chunks together do not hold one packet.
    #[error("packets of {packet} bytes do not fit {chunks} chunks of {room} bytes; make the pool larger")]
    Pool {
        /// Bytes of the longest packet, header included.
        packet: usize,
        /// Chunks of the pool.
        chunks: usize,
        /// Bytes that a chunk has room for.
        room: usize,
    },
}

/// How packets lie in buffers, seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// A packet takes as many buffers as it needs.
    Mergeable,
    /// A packet takes one buffer of one segment.
    Single,
    /// A packet takes one buffer of several segments, so many bytes together.
    Segmented(usize),
}

/// The receive half of a driver. See [the module](super) for the life of a packet.
///
/// Owns the ring, the buffers that are posted and those that wait for it; packets own theirs.
#[derive(Debug)]
pub struct RxQueue<D> {
    driver: D,
    shape: Shape,
    header_len: usize,
    /// Longest packet, header included.
    max_packet: usize,
    max_segs: usize,
    ring: usize,
    /// Buffers that are posted at most, as long as they are now.
    most: usize,
    copy_break: usize,
    /// Lines at the front of a completed buffer that are fetched.
    lines: usize,
    /// Unused bytes at the end of a buffer from which on they are cut off.
    trim: usize,
    supply: Supply,
    policy: Policy,
    /// What is posted, by token.
    posted: Box<[Option<Buf>]>,
    /// The further segments of what is posted, by token; empty unless [`Shape::Segmented`].
    further: Box<[Vec<Buf>]>,
    /// Tokens of nothing.
    vacant: Vec<u16>,
    /// Buffers of the packet that is being put together, and bytes in each.
    parts: Vec<(Buf, usize)>,
    stats: RxStats,
}

impl<D: RxDriver> RxQueue<D> {
    /// Attaches a driver and the chunks that buffers are carved from. Nothing is posted yet.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn attach(driver: D, mut fragments: Fragments, config: RxConfig) -> Result<Self, AttachError> {
        let RxLimits { ring, header_len, mode, max_frame, max_segs } = driver.limits();
        let ring = usize::from(ring);
        if ring == 0 {
            return Err(AttachError::EmptyRing);
        }
        let layout = fragments.pool().layout();
        let (room, chunks) = (layout.room() as usize, layout.count as usize);
        let packet = header_len + max_frame;
        let max_segs = usize::from(max_segs).clamp(1, ring);
        let one = packet.next_multiple_of(LINE);
        // As many buffers as a packet may take must hold the longest.
        let at_most = |buffers: usize| (header_len + GOOD_FRAME).max(packet.div_ceil(buffers));
        let (shape, minimum) = match mode {
            RxMode::Mergeable => (Shape::Mergeable, at_most(ring).next_multiple_of(LINE)),
            RxMode::Whole if one <= room => (Shape::Single, one),
            RxMode::Whole => (Shape::Segmented(packet), at_most(max_segs).next_multiple_of(LINE)),
        };
        if minimum > room {
            return Err(AttachError::Chunk { packet, need: minimum, room });
        }
        if (room / minimum * chunks).saturating_mul(minimum) < packet {
            return Err(AttachError::Pool { packet, chunks, room });
        }
        let bounds = Bounds {
            header: header_len,
            minimum,
            room: room / LINE * LINE,
            per_chunk: (2 * ring).div_ceil(chunks),
            copy_break: config.copy_break,
            trims: shape == Shape::Mergeable,
        };
        let policy = match shape {
            Shape::Single => Policy::fixed(minimum),
            _ => Policy::new(config.policy, &bounds),
        };
        let further = if matches!(shape, Shape::Segmented(_)) { ring } else { 0 };
        Ok(Self {
            driver,
            shape,
            header_len,
            max_packet: packet,
            max_segs,
            ring,
            most: ring,
            copy_break: config.copy_break,
            lines: if config.fetch_frame { 2 } else { 1 },
            trim: policy.trim(&bounds).unwrap_or(usize::MAX),
            supply: Supply::new(fragments, minimum),
            policy,
            posted: std::iter::repeat_with(|| None).take(ring).collect(),
            further: std::iter::repeat_with(Vec::new).take(further).collect(),
            vacant: (0..ring).rev().map(|token| token as u16).collect(),
            parts: Vec::new(),
            stats: RxStats::default(),
        })
    }

    /// The ring, for its notifications and its state.
    pub fn driver(&mut self) -> &mut D {
        &mut self.driver
    }

    /// The chunks that buffers are carved from, for their statistics and faults.
    pub fn pool(&mut self) -> &mut Pool {
        self.supply.pool()
    }

    /// What was counted since the queue was attached.
    pub fn stats(&self) -> RxStats {
        self.stats
    }

    /// Bytes of the next buffer, the driver's header included; where a buffer is of several segments, of
    /// the next segment. What Linux calls `mergeable_rx_buffer_size`.
    pub fn next_buffer_len(&self) -> usize {
        self.policy.len()
    }

    /// Buffers that the device has.
    pub fn posted(&self) -> usize {
        self.ring - self.vacant.len()
    }

    /// [Refills](RxQueue::refill) once there are enough entries free to be worth showing. For whoever
    /// polls: a device that is given its buffers one by one also works one by one. [`RxQueue::refill`]
    /// is due before sleeping.
    #[inline]
    pub fn top_up(&mut self) -> bool {
        self.missing() >= REFILL.min(self.most / 4) && self.refill()
    }

    /// Buffers that are to be posted.
    #[inline]
    fn missing(&self) -> usize {
        self.most.saturating_sub(self.posted())
    }

    /// Posts as many buffers as the ring takes, memory allows, and [`POSTED`] bytes are; true when the device wants its
    /// doorbell rung.
    #[inline]
    pub fn refill(&mut self) -> bool {
        let len = self.policy.len();
        self.supply.want(len);
        let bytes = if let Shape::Segmented(bytes) = self.shape { bytes } else { len };
        self.most = self.ring.min(FEWEST.max(POSTED / bytes));
        match self.shape {
            Shape::Segmented(bytes) => self.post_segmented(bytes),
            _ => self.post(),
        }
        self.driver.flush()
    }

    /// Posts buffers of one segment.
    #[inline]
    fn post(&mut self) {
        for _ in 0..self.driver.room().min(self.missing()) {
            let Some(&token) = self.vacant.last() else { break };
            let Some(fresh) = self.supply.next() else {
                self.stats.no_replacement += 1;
                break;
            };
            if self.driver.post(&[segment(&fresh.buf)], token).is_err() {
                self.stats.refused += 1;
                self.supply.undo(fresh);
                break;
            }
            self.vacant.pop();
            self.stats.carved += u64::from(fresh.is_carved());
            self.posted[usize::from(token)] = Some(fresh.buf);
        }
    }

    /// Posts buffers of as many segments as hold `bytes`.
    #[inline(never)]
    fn post_segmented(&mut self, bytes: usize) {
        let mut fresh: Vec<Fresh> = Vec::new();
        let mut segments: Vec<Segment> = Vec::new();
        while self.driver.room() > 0 && self.missing() > 0 {
            let Some(&token) = self.vacant.last() else { break };
            let mut missing = bytes;
            while missing > 0 {
                let Some(next) = self.supply.next() else { break };
                missing = missing.saturating_sub(next.buf.tailroom());
                segments.push(segment(&next.buf));
                fresh.push(next);
            }
            let complete = missing == 0 && segments.len() <= self.max_segs;
            if !complete || self.driver.post(&segments, token).is_err() {
                *(if complete { &mut self.stats.refused } else { &mut self.stats.no_replacement }) += 1;
                // The last that was carved is the first to go back.
                fresh.drain(..).rev().for_each(|fresh| self.supply.undo(fresh));
                break;
            }
            self.vacant.pop();
            segments.clear();
            self.stats.carved += fresh.iter().filter(|fresh| fresh.is_carved()).count() as u64;
            let mut bufs = fresh.drain(..).map(|fresh| fresh.buf);
            self.posted[usize::from(token)] = bufs.next();
            self.further[usize::from(token)].extend(bufs);
        }
    }

    /// Delivers up to `max` packets; returns how many there were, good and bad. The driver's header is taken off
    /// their front and is in [`Info::header`](ringferry_packet::buffer::Info::header). Buffers that come back by [`RxQueue::recycle`] are posted
    /// again.
    #[inline]
    pub fn receive(
        &mut self,
        max: usize,
        pools: &mut Pools,
        mut deliver: impl FnMut(Chain, &mut Pools),
    ) -> usize {
        self.lend(max, pools, |chain, pools| {
            deliver(chain, pools);
            None
        })
    }

    /// Like [`RxQueue::receive`], for who does not keep every packet: those that `deliver` returns are
    /// recycled at once.
    #[inline]
    pub fn lend(
        &mut self,
        max: usize,
        pools: &mut Pools,
        mut deliver: impl FnMut(Chain, &mut Pools) -> Option<Chain>,
    ) -> usize {
        let mut count = 0;
        while count < max {
            // A packet has at least one buffer: no more of them are collected than are used up below.
            let mut burst = ArrayVec::<Completion, LOOKAHEAD>::new();
            while burst.len() < LOOKAHEAD.min(max - count) {
                let Some(done) = self.driver.completed() else { break };
                if let Some(Some(buf)) = self.posted.get(usize::from(done.token)) {
                    buf.prefetch(self.lines);
                }
                burst.push(done);
            }
            if burst.is_empty() {
                break;
            }
            let mut burst = burst.into_iter();
            while let Some(done) = burst.next() {
                count += 1;
                if let Some(chain) = self.packet(done, &mut burst, pools)
                    && let Some(chain) = deliver(chain, pools)
                {
                    self.recycle_chain(chain, pools);
                }
            }
        }
        count
    }

    /// Takes the buffer of a token out of the queue.
    #[inline(always)]
    fn take(&mut self, token: u16) -> Option<Buf> {
        let buf = self.posted.get_mut(usize::from(token)).and_then(Option::take);
        match buf {
            Some(_) => self.vacant.push(token),
            None => self.stats.unknown += 1,
        }
        buf
    }

    /// The packet that begins with a completion, if it can be one.
    #[inline(always)]
    fn packet(
        &mut self,
        done: Completion,
        burst: &mut impl Iterator<Item = Completion>,
        pools: &mut Pools,
    ) -> Option<Chain> {
        let mut buf = self.take(done.token)?;
        let len = done.len as usize;
        if matches!(self.shape, Shape::Segmented(_)) {
            return self.segmented(buf, done, pools);
        }
        let room = buf.tailroom();
        buf.grow(len);
        let start = self.driver.start(buf.read().first(self.header_len));
        // A header that was not written is an earlier packet's: its count would swallow good packets.
        if start.buffers != 1 && self.shape == Shape::Mergeable && len >= self.header_len {
            return self
                .merged(buf, len <= room, start.buffers, burst, pools)
                .map(|chain| with(chain, &start));
        }
        if len > room || !self.is_packet(len) {
            self.stats.rx_length_errors += 1;
            self.supply.keep(buf);
            return None;
        }
        let frame = len - self.header_len;
        let buf = if frame <= self.copy_break {
            self.copied(buf, pools)
        } else {
            if room - len >= self.trim {
                self.cut(&mut buf);
            }
            buf.pull(self.header_len);
            buf
        };
        self.stats.descriptors += 1;
        self.stats.truesize_bytes += buf.truesize() as u64;
        self.delivered(frame);
        Some(with(Chain::from(buf), &start))
    }

    /// Whether so many bytes, header included, can be a packet.
    #[inline(always)]
    fn is_packet(&self, len: usize) -> bool {
        (self.header_len + MIN_FRAME..=self.max_packet).contains(&len)
    }

    #[inline(always)]
    fn delivered(&mut self, frame: usize) {
        self.stats.packets += 1;
        self.stats.bytes += frame as u64;
        self.policy.delivered(frame);
    }

    /// A copy of the frame in a buffer, which is kept; the frame where it is, when there is no buffer to copy
    /// to.
    #[inline(always)]
    fn copied(&mut self, mut buf: Buf, pools: &mut Pools) -> Buf {
        let frame = buf.len() - self.header_len;
        if let Some(mut small) = pools.alloc(frame) {
            if small.append_slice(&buf.read().skip(self.header_len)) == frame {
                self.stats.copied += 1;
                self.supply.keep(buf);
                return small;
            }
            pools.recycle(small);
        }
        buf.pull(self.header_len);
        buf
    }

    /// Cuts off the end of a buffer behind its data, to be posted again. It begins where a cache line would.
    #[inline(never)]
    fn cut(&mut self, buf: &mut Buf) {
        let end = buf.split_off(buf.len().next_multiple_of(LINE));
        self.supply.keep_end(end);
        self.stats.trimmed += 1;
    }

    /// A packet that says it lies in `count` buffers, the first of which is `first`, `good` unless its length is
    /// wrong.
    #[inline(never)]
    fn merged(
        &mut self,
        first: Buf,
        mut good: bool,
        count: u16,
        burst: &mut impl Iterator<Item = Completion>,
        pools: &mut Pools,
    ) -> Option<Chain> {
        let mut total = first.len();
        let used = first.len();
        self.parts.push((first, used));
        // Without a sane count there is no telling where the next packet begins: take one buffer.
        good &= count > 0;
        for _ in 1..count {
            // All buffers of a packet become visible together (VIRTIO 1.4, 5.1.6.4.1): one that is missing
            // is the device's error, not a reason to wait.
            let Some(done) = burst.next().or_else(|| self.driver.completed()) else {
                good = false;
                break;
            };
            let Some(mut buf) = self.take(done.token) else {
                good = false;
                continue;
            };
            let len = done.len as usize;
            good &= len <= buf.tailroom();
            total = total.saturating_add(len);
            buf.grow(len);
            let used = buf.len();
            self.parts.push((buf, used));
        }
        self.assemble(good, total, pools)
    }

    /// A packet in a buffer of several segments.
    #[inline(never)]
    fn segmented(&mut self, first: Buf, done: Completion, pools: &mut Pools) -> Option<Chain> {
        let mut left = done.len as usize;
        let further = std::mem::take(&mut self.further[usize::from(done.token)]);
        let mut header = None;
        for mut buf in std::iter::once(first).chain(further) {
            let used = left.min(buf.tailroom());
            left -= used;
            buf.grow(used);
            if header.is_none() {
                header = Some(self.driver.start(buf.read().first(self.header_len)));
            }
            self.parts.push((buf, used));
        }
        let chain = self.assemble(left == 0, done.len as usize, pools)?;
        Some(with(chain, &header?))
    }

    /// The packet in [`parts`](Self::parts), of `total` bytes with its header; if it is not `good`, every
    /// one of them is kept.
    fn assemble(&mut self, good: bool, total: usize, pools: &mut Pools) -> Option<Chain> {
        let mut parts = std::mem::take(&mut self.parts);
        if !good || !self.is_packet(total) {
            self.stats.rx_length_errors += 1;
            parts.drain(..).rev().for_each(|(buf, _)| self.supply.keep(buf));
            self.parts = parts;
            return None;
        }
        let frame = total - self.header_len;
        self.stats.descriptors += parts.len() as u64;
        // What no byte of the packet is in goes back, so that the next packet finds it in the same order.
        while parts.last().is_some_and(|&(_, used)| used == 0)
            && let Some((buf, _)) = parts.pop()
        {
            self.supply.keep(buf);
        }
        let mut chain = Chain::default();
        let mut last: Option<Buf> = None;
        let count = parts.len();
        for (at, (mut buf, _)) in parts.drain(..).enumerate() {
            if at == 0 {
                if count == 1 && frame <= self.copy_break {
                    last = Some(self.copied(buf, pools));
                    continue;
                }
                buf.pull(self.header_len);
            }
            if buf.is_empty() {
                self.supply.keep(buf);
                continue;
            }
            if at + 1 == count {
                buf = self.end(buf, pools);
            }
            last = Some(match last.take() {
                None => buf,
                Some(mut front) => match front.join(buf) {
                    Ok(()) => {
                        self.stats.coalesced += 1;
                        front
                    }
                    Err(buf) => {
                        chain.push_back(front);
                        buf
                    }
                },
            });
        }
        self.parts = parts;
        if let Some(last) = last {
            chain.push_back(last);
        }
        self.stats.truesize_bytes += chain.truesize() as u64;
        self.delivered(frame);
        Some(chain)
    }

    /// The end of a packet of several buffers: copied if it is short, as a short packet would be. Of any other,
    /// what it does not use is cut off, if that is worth while.
    fn end(&mut self, mut buf: Buf, pools: &mut Pools) -> Buf {
        if buf.len() <= self.copy_break
            && let Some(mut small) = pools.alloc(buf.len())
        {
            if small.append_slice(&buf.read()) == buf.len() {
                self.supply.keep(buf);
                return small;
            }
            pools.recycle(small);
        }
        if buf.tailroom() >= self.trim {
            self.cut(&mut buf);
        }
        buf
    }

    /// Takes a buffer that nobody needs any more. One of this queue that nobody shares waits for
    /// [`RxQueue::refill`]; any other goes to `pools`.
    #[inline(always)]
    pub fn recycle(&mut self, buf: Buf, pools: &mut Pools) {
        match self.supply.take_back(buf) {
            Ok(()) => self.stats.recycled += 1,
            Err(other) => pools.recycle(other),
        }
    }

    /// [Recycles](RxQueue::recycle) all buffers of a packet.
    #[inline(always)]
    pub fn recycle_chain(&mut self, chain: Chain, pools: &mut Pools) {
        // The last that came back is posted first: as they lie in memory, so that they can be joined again.
        chain.dissolve(|buf| self.recycle(buf, pools));
    }

    /// Takes the queue apart. Every buffer that is posted or waits goes back to its chunk, once; the device must
    /// have stopped writing to them. Packets keep theirs.
    pub fn detach(self) -> (D, Fragments) {
        (self.driver, self.supply.into_fragments())
    }
}

/// What a device may fill of an empty buffer.
#[inline(always)]
fn segment(buf: &Buf) -> Segment {
    Segment { addr: buf.addr(), len: buf.tailroom() as u32 }
}

/// A packet with what the device said about it.
#[inline(always)]
fn with(mut chain: Chain, start: &crate::driver::Start) -> Chain {
    chain.header = start.header;
    chain.hash = start.hash;
    chain
}
