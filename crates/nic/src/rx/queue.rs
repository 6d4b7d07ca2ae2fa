//! A receive queue: owns a ring, the buffers posted to it, and the supply of empty ones.
//!
//! [`RxQueue::attach`] makes one from a driver's ring at set-up; it belongs to one thread, and
//! [`RxQueue::detach`] ends it. A buffer goes round like this:
//!
//! ```text
//!            refill, top_up               device fills            receive, lend
//!   supply ─────────────────► posted (token) ─────────► completed ─────────────► packet (delivered)
//!      ▲                                                 │                          │
//!      ├── copied or invalid packet ─────────────────────┘                          │
//!      └── recycle ─────────────────────────────────────────────────────────────────┘
//! ```

use arrayvec::ArrayVec;
use ringferry_packet::buffer::{Buf, Chain, Fragments, Info, Pool, Pools};
use ringferry_packet::ether::MIN_FRAME;

use super::RxStats;
use super::policy::{Bounds, GOOD_FRAME, LINE, Policy, PolicyKind};
use super::supply::{Fresh, Supply};
use crate::driver::{Completion, Refused, RxDriver, Segment};
use crate::limits::{RxLimits, RxMode};

/// Largest number of completions that are collected, and their headers prefetched, before any is read, so
/// that the cache misses of a burst overlap.
const LOOKAHEAD: usize = 32;

/// Number of missing buffers at which [`RxQueue::top_up`] refills: a burst.
const REFILL: usize = 32;

/// Largest number of bytes in posted buffers, if those are more than [`FEWEST`] buffers. Buffers are used in
/// ring order, so all of these bytes pass through the caches and the TLB, which covers 8 MiB in current CPUs.
/// Measured with a kernel's TCP through the switch and buffers of 32 KiB: 0.20 s of the switch's time per GB
/// with 32 MiB in the ring, 0.18 with 16, 0.12 with 8, 0.11 with 4 and 0.10 with 2. With 4 MiB and less some
/// packets found no buffer, because a TCP window did not fit any more.
pub const POSTED: usize = 8 << 20;

/// Number of buffers that are posted in any case, if the ring has as many entries: each packet of a burst
/// takes at least one buffer, however short it is.
pub const FEWEST: usize = 256;

/// Settings of a receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxConfig {
    /// The policy for the length of buffers. It has no effect if a packet must fit one buffer.
    pub policy: PolicyKind,
    /// Length in bytes of the longest frame that is copied into a small buffer, so that its own is posted
    /// again at once; 0 turns copying off.
    pub copy_break: usize,
    /// Prefetches the first cache line of each frame together with the driver's header, for users that read
    /// frames at once. Users that only count or forward frames leave that line in the device's cache.
    pub fetch_frame: bool,
}

impl Default for RxConfig {
    /// Copies frames of up to 128 bytes: copying two cache lines takes less time than recycling a buffer.
    fn default() -> Self {
        Self { policy: PolicyKind::default(), copy_break: 128, fetch_frame: true }
    }
}

/// The reason for which a receive queue cannot be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// The ring has no entries.
    #[error("the receive ring has no entries; give it a size")]
    EmptyRing,
    /// Not even a ring full of the longest buffers holds one packet.
    #[error(
        "packets of {packet} bytes need buffers of {need}, but a chunk has {room}; make the ring or the chunks \
         larger, or allow more segments"
    )]
    Chunk {
        /// Length of the longest packet in bytes, header included.
        packet: usize,
        /// Length in bytes of a buffer that would be sufficient.
        need: usize,
        /// Capacity of a chunk in bytes.
        room: usize,
    },
    /// All chunks together do not hold one packet.
    #[error("packets of {packet} bytes do not fit {chunks} chunks of {room} bytes; make the pool larger")]
    Pool {
        /// Length of the longest packet in bytes, header included.
        packet: usize,
        /// Number of chunks in the pool.
        chunks: usize,
        /// Capacity of a chunk in bytes.
        room: usize,
    },
}

/// The placement of packets in buffers, derived from [`RxMode`] and the size of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// A packet takes as many buffers as it needs.
    Mergeable,
    /// A packet takes one buffer of one segment.
    Single,
    /// A packet takes one buffer of several segments, which have this many bytes together.
    Segmented(usize),
}

/// Completions of a burst. Their buffers are among the posted ones until they are looked at.
type Done = arrayvec::IntoIter<Completion, LOOKAHEAD>;

/// The receive half of a driver. See [the module](super) for the life of a packet.
///
/// Owns the ring, the posted buffers and the supply of empty ones; delivered packets own theirs.
#[derive(Debug)]
pub struct RxQueue<D> {
    driver: D,
    shape: Shape,
    header_len: usize,
    /// Length of the longest packet in bytes, header included.
    max_packet: usize,
    max_segs: usize,
    ring: usize,
    /// Largest number of posted buffers, given their current length.
    max_posted: usize,
    copy_break: usize,
    /// Number of cache lines at the front of a completed buffer that are prefetched.
    lines: usize,
    /// Least number of unused bytes at the end of a buffer that are trimmed.
    trim: usize,
    supply: Supply,
    policy: Policy,
    /// The posted buffers by token; of [`Shape::Segmented`] buffers the first segment.
    posted: Box<[Option<Buf>]>,
    /// The other segments of posted buffers by token; empty unless [`Shape::Segmented`].
    further: Box<[Vec<Buf>]>,
    /// Number of posted buffers.
    outstanding: usize,
    /// Buffers of the packet that is being assembled, with the bytes in each.
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
        // The largest number of buffers that a packet may take must hold the longest packet.
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
            max_posted: ring,
            copy_break: config.copy_break,
            lines: if config.fetch_frame { 2 } else { 1 },
            trim: policy.trim(&bounds).unwrap_or(usize::MAX),
            supply: Supply::new(fragments, minimum),
            policy,
            posted: std::iter::repeat_with(|| None).take(ring).collect(),
            further: std::iter::repeat_with(Vec::new).take(further).collect(),
            outstanding: 0,
            parts: Vec::new(),
            stats: RxStats::default(),
        })
    }

    /// Borrows the driver's ring, for its notifications and its state.
    pub fn driver(&mut self) -> &mut D {
        &mut self.driver
    }

    /// Borrows the pool of chunks that buffers are carved from, for its statistics and fault injection.
    pub fn pool(&mut self) -> &mut Pool {
        self.supply.pool()
    }

    /// Returns a copy of the counters since the queue was attached.
    pub fn stats(&self) -> RxStats {
        self.stats
    }

    /// Returns the length in bytes of the next buffer, or of the next segment if buffers have several, the
    /// driver's header included. Linux calls it `mergeable_rx_buffer_size`.
    pub fn next_buffer_len(&self) -> usize {
        self.policy.len()
    }

    /// Returns the number of buffers that are posted and not completed.
    pub fn posted(&self) -> usize {
        self.outstanding
    }

    /// [Refills](RxQueue::refill) if at least a burst of buffers is missing. For polling loops: a device that
    /// gets its buffers one by one also works one by one. [`RxQueue::refill`] must be called before sleeping.
    /// Returns true if the device wants its doorbell rung.
    #[inline]
    pub fn top_up(&mut self) -> bool {
        self.missing() >= REFILL.min(self.max_posted / 4) && self.refill()
    }

    /// Returns the number of buffers that should be posted.
    #[inline]
    fn missing(&self) -> usize {
        self.max_posted.saturating_sub(self.posted())
    }

    /// Posts as many buffers as the ring has room for, the chunks provide, and [`POSTED`] bytes allow. Returns
    /// true if the device wants its doorbell rung.
    #[inline]
    pub fn refill(&mut self) -> bool {
        let len = self.policy.len();
        self.supply.set_len(len);
        let bytes = if let Shape::Segmented(bytes) = self.shape { bytes } else { len };
        self.max_posted = self.ring.min(FEWEST.max(POSTED / bytes));
        match self.shape {
            Shape::Segmented(bytes) => self.post_segmented(bytes),
            _ => self.post(),
        }
        self.driver.flush()
    }

    /// Posts the missing buffers, of one segment each.
    #[inline]
    fn post(&mut self) {
        for _ in 0..self.driver.room().min(self.missing()) {
            let Some(fresh) = self.supply.next() else {
                self.stats.no_replacement += 1;
                break;
            };
            let Ok(token) = self.driver.post(&[segment(&fresh.buf)]) else {
                self.stats.refused += 1;
                self.supply.undo(fresh);
                break;
            };
            self.stats.carved += u64::from(fresh.is_carved());
            self.record(token, fresh.buf);
        }
    }

    /// Records a buffer that was posted.
    #[inline(always)]
    fn record(&mut self, token: u16, buf: Buf) {
        let place = &mut self.posted[usize::from(token)];
        assert!(place.is_none(), "the token of a posted buffer");
        *place = Some(buf);
        self.outstanding += 1;
    }

    /// Posts the missing buffers, each of as many segments as hold `bytes`.
    #[inline(never)]
    fn post_segmented(&mut self, bytes: usize) {
        let mut fresh: Vec<Fresh> = Vec::new();
        let mut segments: Vec<Segment> = Vec::new();
        while self.driver.room() > 0 && self.missing() > 0 {
            let mut missing = bytes;
            while missing > 0 {
                let Some(next) = self.supply.next() else { break };
                missing = missing.saturating_sub(next.buf.tailroom());
                segments.push(segment(&next.buf));
                fresh.push(next);
            }
            let complete = missing == 0 && segments.len() <= self.max_segs;
            let posted = if complete { self.driver.post(&segments) } else { Err(Refused::Unfit) };
            let Ok(token) = posted else {
                *(if complete { &mut self.stats.refused } else { &mut self.stats.no_replacement }) += 1;
                // Carved buffers must be rolled back in reverse order.
                fresh.drain(..).rev().for_each(|fresh| self.supply.undo(fresh));
                break;
            };
            segments.clear();
            self.stats.carved += fresh.iter().filter(|fresh| fresh.is_carved()).count() as u64;
            let mut bufs = fresh.drain(..).map(|fresh| fresh.buf);
            let Some(first) = bufs.next() else { break };
            self.further[usize::from(token)].extend(bufs);
            self.record(token, first);
        }
    }

    /// Delivers up to `max` packets to `deliver` and returns how many there were, invalid ones included. The
    /// driver's header has been removed from their front and is in
    /// [`Info::header`](ringferry_packet::buffer::Info::header). Their buffers should be returned by
    /// [`RxQueue::recycle`].
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

    /// Does the same as [`RxQueue::receive`], for users that do not keep every packet: packets that `deliver`
    /// returns are recycled at once.
    #[inline]
    pub fn lend(
        &mut self,
        max: usize,
        pools: &mut Pools,
        mut deliver: impl FnMut(Chain, &mut Pools) -> Option<Chain>,
    ) -> usize {
        let mut count = 0;
        while count < max {
            // A packet has at least one buffer, so all completions collected here are used up below.
            let mut burst = self.completed(LOOKAHEAD.min(max - count)).into_iter();
            if burst.len() == 0 {
                break;
            }
            while let Some(done) = burst.next() {
                count += 1;
                if let Some(chain) = self.parse_packet(done, &mut burst, pools)
                    && let Some(chain) = deliver(chain, pools)
                {
                    self.recycle_chain(chain, pools);
                }
            }
        }
        count
    }

    /// Returns up to `most` completions, with the headers of their buffers on the way to the cache.
    #[inline(always)]
    fn completed(&mut self, most: usize) -> ArrayVec<Completion, LOOKAHEAD> {
        let mut burst = ArrayVec::new();
        let (posted, lines) = (&self.posted, self.lines);
        self.driver.completed(most, |done| {
            if let Some(Some(buf)) = posted.get(usize::from(done.token)) {
                buf.prefetch(lines);
            }
            burst.push(done);
        });
        burst
    }

    /// Takes a buffer that came back from the device; none if it named one that was not posted.
    #[inline(always)]
    fn take(&mut self, done: Completion) -> Option<Buf> {
        let buf = self.posted.get_mut(usize::from(done.token)).and_then(Option::take);
        match buf {
            Some(_) => self.outstanding -= 1,
            None => self.stats.unknown += 1,
        }
        buf
    }

    /// Makes the packet that begins in a buffer, or returns `None` if it is invalid. Takes its other buffers from `burst`.
    #[inline(always)]
    fn parse_packet(&mut self, done: Completion, burst: &mut Done, pools: &mut Pools) -> Option<Chain> {
        let mut buf = self.take(done)?;
        let len = done.len as usize;
        if matches!(self.shape, Shape::Segmented(_)) {
            return self.parse_segmented(buf, done, pools);
        }
        let room = buf.tailroom();
        let start = self.driver.start(buf.written(self.header_len.min(len)));
        // A header that the device has not written completely is a remnant of an earlier packet; its count of
        // buffers must not be used.
        if start.buffers != 1 && self.shape == Shape::Mergeable && len >= self.header_len {
            buf.grow(len);
            return self
                .parse_merged(buf, len <= room, start.buffers, burst, pools)
                .map(|chain| with_metadata(chain, &start));
        }
        if len > room || !self.is_packet(len) {
            self.stats.rx_length_errors += 1;
            self.supply.keep(buf);
            return None;
        }
        let frame = len - self.header_len;
        if frame <= self.copy_break {
            buf.grow(len);
            buf = self.copy_frame(buf, pools);
        } else if room - len >= self.trim {
            buf.grow(len);
            self.trim_tail(&mut buf);
            buf.pull(self.header_len);
        } else {
            buf.receive(len, self.header_len);
        }
        self.stats.descriptors += 1;
        self.stats.truesize_bytes += buf.truesize() as u64;
        self.count_delivered(frame);
        Some(Chain::new(buf, Info { header: start.header, hash: start.hash }))
    }

    /// Returns true if `len` bytes, header included, are a valid length of a packet.
    #[inline(always)]
    fn is_packet(&self, len: usize) -> bool {
        (self.header_len + MIN_FRAME..=self.max_packet).contains(&len)
    }

    #[inline(always)]
    fn count_delivered(&mut self, frame: usize) {
        self.stats.packets += 1;
        self.stats.bytes += frame as u64;
        self.policy.sample(frame);
    }

    /// Copies the frame in `buf` to a small buffer and keeps `buf`. Returns the frame in `buf` itself if there
    /// is no small buffer.
    #[inline(always)]
    fn copy_frame(&mut self, mut buf: Buf, pools: &mut Pools) -> Buf {
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

    /// Trims the unused end of a buffer, from the next cache line on, and keeps it to be posted again.
    #[inline(never)]
    fn trim_tail(&mut self, buf: &mut Buf) {
        let tail = buf.split_off(buf.len().next_multiple_of(LINE));
        self.supply.keep_tail(tail);
        self.stats.trimmed += 1;
    }

    /// Makes a packet whose header reports `count` buffers, of which `first` is the first. `good` is false if
    /// the length of the first one is invalid already.
    #[inline(never)]
    fn parse_merged(
        &mut self,
        first: Buf,
        mut good: bool,
        count: u16,
        burst: &mut Done,
        pools: &mut Pools,
    ) -> Option<Chain> {
        let mut total = first.len();
        let used = first.len();
        self.parts.push((first, used));
        // With a count of 0 the begin of the next packet is unknown; this buffer alone is dropped.
        good &= count > 0;
        for _ in 1..count {
            // All buffers of a packet become visible together (VIRTIO 1.4, 5.1.6.4.1), so a missing one is
            // an error of the device, not a reason to wait.
            let Some(done) = burst.next().or_else(|| self.completed(1).pop()) else {
                good = false;
                break;
            };
            let Some(mut buf) = self.take(done) else {
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

    /// Makes a packet from a buffer of several segments, of which `first` is the first.
    #[inline(never)]
    fn parse_segmented(&mut self, first: Buf, done: Completion, pools: &mut Pools) -> Option<Chain> {
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
        Some(with_metadata(chain, &header?))
    }

    /// Assembles the packet in [`parts`](Self::parts), of `total` bytes with its header. If it is not `good`,
    /// counts it and keeps all its buffers.
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
        // Unused buffers at the end go back, last first, so that they are posted in the same order again.
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
                    last = Some(self.copy_frame(buf, pools));
                    continue;
                }
                buf.pull(self.header_len);
            }
            if buf.is_empty() {
                self.supply.keep(buf);
                continue;
            }
            if at + 1 == count {
                buf = self.finish_last(buf, pools);
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
        self.count_delivered(frame);
        Some(chain)
    }

    /// Finishes the last buffer of a packet of several: short data is copied to a small buffer, as for a short
    /// packet; otherwise the unused end is trimmed if it is long enough.
    fn finish_last(&mut self, mut buf: Buf, pools: &mut Pools) -> Buf {
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
            self.trim_tail(&mut buf);
        }
        buf
    }

    /// Takes back a buffer that is not needed any more. If it came from this queue and has a single owner, it
    /// is kept for [`RxQueue::refill`]; otherwise it is recycled to `pools`.
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
        // The buffer recycled last is posted first, so that adjacent buffers are posted in memory order and
        // can be joined again.
        chain.dissolve(|buf| self.recycle(buf, pools));
    }

    /// Takes the queue apart and returns the driver's ring and the chunks. All buffers that are posted or kept
    /// return to their chunks; the device must have stopped writing to them. Delivered packets keep theirs.
    pub fn detach(self) -> (D, Fragments) {
        (self.driver, self.supply.into_fragments())
    }
}

/// Returns the segment of an empty buffer that a device may fill.
#[inline(always)]
fn segment(buf: &Buf) -> Segment {
    Segment { addr: buf.addr(), len: buf.tailroom() as u32 }
}

/// Attaches the offloads and the flow hash that the device reported to a packet.
#[inline(always)]
fn with_metadata(mut chain: Chain, start: &crate::driver::Start) -> Chain {
    chain.header = start.header;
    chain.hash = start.hash;
    chain
}
