//! Transmit mapping: turns any packet into at most as many segments as its device allows.
//!
//! Each transmit queue owns a [`Mapper`] from attach to detach and calls [`Mapper::direct`] or
//! [`Mapper::map`] for each packet, on its own thread. A packet is a chain of buffers and may have more pieces
//! than the N segments of the device, for example a TCP stream made of small sends. The first of these ways
//! that is sufficient is used (as with `bus_dmamap_load_mbuf_sg`, `m_collapse` and `m_defrag` in FreeBSD):
//!
//! 1. *direct*: the packet has at most N segments as it is;
//! 2. *collapse*: some neighbours are merged, in tail room or in new buffers, which copies few bytes;
//! 3. *full copy* to large buffers, if collapsing is not sufficient, would copy most of the packet, or finds
//!    no buffers.
//!
//! ```text
//!   plan (pure) ──► allocate ──► change the packet ──► segments
//!        │             │
//!        └─────────────┴──► error: the packet is returned unchanged
//! ```
//!
//! Each rule is in one place:
//! - [`TxLimits`] are checked once, by [`Mapper::new`]: a full copy of the longest packet fits, so no packet
//!   is ever refused for its shape.
//! - [`count()`] is pure, and one function compares its result with the limit.
//! - The plan is made before anything is allocated, and everything is allocated before anything is changed.
//! - Only buffers with a single owner are written, and only in their head and tail room; shared data is
//!   copied.
//! - Each packet has one outcome: see [`MapCounters`].

mod commit;
mod count;
mod counters;
mod plan;

use arrayvec::ArrayVec;
use ringferry_memory::WriteSlice;
use ringferry_packet::buffer::{Buf, Chain, Pools};

use crate::driver::Segment;
use crate::limits::{LimitError, TxLimits};
use count::fill;
use plan::{Group, Job, Unit};

pub use count::count;
pub use counters::{Drops, Histogram, MapCounters, Outcome};
pub(crate) use plan::Full;

/// Largest number of segments of a packet for any device. A full copy of 64 KiB to buffers of 2 KiB has 33;
/// a list of 64 would refuse devices with larger limits without need.
pub const MAX_SEGS: usize = 128;

/// The segments of one packet, without allocation from the heap.
pub type SegList = ArrayVec<Segment, MAX_SEGS>;

/// The reason for which a packet was not mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// The ring has no room for the packet's segments now.
    #[error("the ring is full; reclaim completed packets, and try again")]
    RingFull,
    /// The pools have no buffers for the packet now.
    #[error("no buffers are left to map the packet with; free some, and try again")]
    NoBuffers,
    /// The packet has more bytes than the device allows.
    #[error("the packet is longer than the device takes; segment it, or drop it")]
    TooLong,
    /// The packet has no bytes.
    #[error("the packet is empty; drop it")]
    Empty,
    /// Even a full copy has too many segments. This cannot happen with pools of the layout that the limits
    /// were checked with.
    #[error(
        "the packet has too many segments even when copied; map with the pools that the queue was attached with"
    )]
    TooManySegments,
}

impl MapError {
    /// Returns true if the same packet may be mapped later.
    #[inline]
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::RingFull | Self::NoBuffers)
    }
}

/// A packet that was not mapped, unchanged, with the reason.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct Unmapped {
    /// The reason for which it was not mapped.
    pub reason: MapError,
    /// The packet, with its data where it was.
    pub chain: Chain,
}

/// Maps the packets of one transmit queue; see the [module](self).
#[derive(Debug)]
pub struct Mapper {
    limits: TxLimits,
    counters: MapCounters,
    // Scratch memory of the planner, kept so that it is not allocated for each packet.
    units: Vec<Unit>,
    groups: Vec<Group>,
    fresh: Vec<Buf>,
    spent: Vec<Buf>,
}

impl Mapper {
    /// Creates a mapper for these limits and for pools with the layout of `pools`.
    ///
    /// # Errors
    /// [`LimitError`], if some packet could not be mapped: see [`TxLimits::check`].
    pub fn new(limits: &TxLimits, pools: &Pools) -> Result<Self, LimitError> {
        limits.check(pools)?;
        Ok(Self {
            limits: *limits,
            counters: MapCounters::default(),
            units: Vec::new(),
            groups: Vec::new(),
            fresh: Vec::new(),
            spent: Vec::new(),
        })
    }

    /// Returns the limits that the mapper was created with.
    #[inline]
    pub fn limits(&self) -> &TxLimits {
        &self.limits
    }

    /// Returns the counters of all packets so far.
    #[inline]
    pub fn counters(&self) -> &MapCounters {
        &self.counters
    }

    /// Maps a packet of one buffer to one segment without copying, as nearly all packets allow. It begins with
    /// [`TxLimits::header_room`] writable bytes of its own afterwards. Returns `None`, with the packet
    /// unchanged, for any other packet; [`Mapper::map`] maps those. The ring must have room, as the packet is
    /// counted as mapped. Returns these bytes, too.
    #[inline(always)]
    pub fn direct<'a>(&mut self, chain: &'a mut Chain) -> Option<(Segment, WriteSlice<'a>)> {
        let limits = if chain.header.is_gso() { &self.limits.tso } else { &self.limits.plain };
        let header = self.limits.header_room;
        let only = chain.only_mut()?;
        let len = header + only.len();
        let fits = len > header
            && len <= limits.max_bytes as usize
            && limits.is_one(only.addr().wrapping_sub(header as u64), len)
            && limits.fits(1);
        if !fits {
            return None;
        }
        // This changes the packet, so it must be the last condition.
        let (addr, room) = only.prepend(header)?;
        self.counters.count(Outcome::Direct, 1);
        Some((Segment { addr, len: len as u32 }, room))
    }

    /// Maps a packet of any shape. `room` returns true if the ring has room for a number of segments; it is
    /// called before anything is changed. Afterwards `segs` holds the segments of the returned packet, which
    /// begins with [`TxLimits::header_room`] writable bytes of its own, in one piece.
    ///
    /// # Errors
    /// The unchanged packet and the reason. Packets that may be [retried](MapError::is_retryable) have no
    /// outcome yet; the others are counted as dropped.
    #[inline]
    pub fn map(
        &mut self,
        mut chain: Chain,
        pools: &mut Pools,
        room: impl Fn(usize) -> bool,
        segs: &mut SegList,
    ) -> Result<Chain, Unmapped> {
        if room(1)
            && let Some((segment, _)) = self.direct(&mut chain)
        {
            segs.clear();
            segs.push(segment);
            return Ok(chain);
        }
        self.map_any(chain, pools, &room, segs)
    }

    /// Counts a packet that the caller drops instead of retrying it. Packets that cannot be retried have
    /// been counted already.
    #[cold]
    pub fn dropped(&mut self, reason: MapError) {
        if reason.is_retryable() {
            self.counters.dropped.count(reason);
        }
    }

    /// Maps a packet that [`Mapper::direct`] does not: it has several buffers, no room for the header, or is
    /// faulty.
    #[inline(never)]
    fn map_any(
        &mut self,
        chain: Chain,
        pools: &mut Pools,
        room: &dyn Fn(usize) -> bool,
        segs: &mut SegList,
    ) -> Result<Chain, Unmapped> {
        let mut limits = if chain.header.is_gso() { self.limits.tso } else { self.limits.plain };
        let header = self.limits.header_room;
        // The first segment must hold the whole header, even if the device allows a shorter one.
        limits.min_first = limits.min_first.max(u32::try_from(header).unwrap_or(u32::MAX));
        let total = header.saturating_add(chain.len());
        if chain.is_empty() {
            return self.refuse(MapError::Empty, chain);
        }
        if total > limits.max_bytes as usize {
            return self.refuse(MapError::TooLong, chain);
        }
        let own = !chain.bufs().first().is_some_and(|buf| header <= buf.headroom() && buf.is_exclusive());
        let own = own && header > 0;
        let job = Job { limits, header, own, total, room: pools.large.layout().room() as usize };
        let Some((segments, need)) = job.direct(&chain) else {
            return self.map_copied(&job, chain, pools, room, segs);
        };
        if !room(segments) {
            return self.refuse(MapError::RingFull, chain);
        }
        let mut chain = chain;
        if own {
            let Some(buf) = plan::alloc(pools, need) else {
                return self.refuse(MapError::NoBuffers, chain);
            };
            chain = commit::prepend(&job, chain, buf);
        } else {
            chain.push(header);
        }
        fill(chain.bufs(), &limits, segs);
        self.counters.count(Outcome::Direct, segs.len());
        Ok(chain)
    }

    /// Maps a packet that has too many segments without copying.
    #[cold]
    #[inline(never)]
    fn map_copied(
        &mut self,
        job: &Job,
        chain: Chain,
        pools: &mut Pools,
        room: &dyn Fn(usize) -> bool,
        segs: &mut SegList,
    ) -> Result<Chain, Unmapped> {
        let lead = if job.own { 0 } else { job.header };
        Unit::list(chain.bufs(), lead, &job.limits, &mut self.units);
        if let Some(segments) = job.collapse(&self.units, &mut self.groups) {
            if !room(segments) {
                return self.refuse(MapError::RingFull, chain);
            }
            if commit::alloc_groups(&self.groups, pools, &mut self.fresh) {
                let (fresh, spent) = (&mut self.fresh, &mut self.spent);
                let (chain, copied) = commit::collapse(job, chain, &self.groups, fresh, spent, pools);
                return Ok(self.mapped(Outcome::Collapsed, job, chain, copied, segs));
            }
        }
        self.counters.collapse_failed += 1;
        let Some(full) = job.full() else {
            return self.refuse(MapError::TooManySegments, chain);
        };
        if !room(full.segments) {
            return self.refuse(MapError::RingFull, chain);
        }
        if pools.large.defrag_fails() || !commit::alloc_large(full.buffers, pools, &mut self.fresh) {
            self.counters.defrag_failed += 1;
            return self.refuse(MapError::NoBuffers, chain);
        }
        let copied = chain.len();
        let chain = commit::defrag(job, chain, &full, &mut self.fresh, pools);
        Ok(self.mapped(Outcome::Defragged, job, chain, copied, segs))
    }

    fn mapped(
        &mut self,
        outcome: Outcome,
        job: &Job,
        chain: Chain,
        copied: usize,
        segs: &mut SegList,
    ) -> Chain {
        fill(chain.bufs(), &job.limits, segs);
        self.counters.count(outcome, segs.len());
        self.counters.copied_bytes += copied as u64;
        chain
    }

    #[cold]
    fn refuse(&mut self, reason: MapError, chain: Chain) -> Result<Chain, Unmapped> {
        if reason.is_retryable() {
            self.counters.retries += 1;
        } else {
            self.counters.dropped.count(reason);
        }
        Err(Unmapped { reason, chain })
    }
}
