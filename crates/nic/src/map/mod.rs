//! Transmit mapping: any packet to at most so many segments.
//!
//! A packet is a chain of buffers, and a device takes at most N segments for it. A stream made of small sends yields
//! chains of many more. They are made to fit, by the cheapest way that does:
//!
//! 1. *direct*: it fits as it is, exactly N segments included;
//! 2. *collapse*: some neighbours are merged, in tail room or in new buffers, copying few bytes;
//! 3. *full copy* to large buffers, if merging does not do, would copy most of the packet, or finds no buffers.
//!
//! The rules, each in one place:
//! - [`TxLimits`] are checked once, by [`Mapper::new`]: a full copy of the longest packet fits, so no packet is ever
//!   refused for its shape.
//! - [`count()`] is pure, and what it says is compared with the limit by one function.
//! - The plan is made before anything is allocated, and everything is allocated before anything is changed: a packet
//!   is never half mapped. An error returns it as it was.
//! - Only buffers that nobody else has are written, and only into their head and tail room. Data that others share is
//!   copied.
//! - Every packet has one outcome: see [`MapCounters`].

mod commit;
mod count;
mod counters;
mod plan;

use arrayvec::ArrayVec;
use ringferry_packet::buffer::{Buf, Chain, Pools};

use crate::driver::Segment;
use crate::limits::{LimitError, TxLimits};
use count::fill;
use plan::{Group, Job, Unit};

pub use count::count;
pub use counters::{Drops, Histogram, MapCounters, Outcome};
pub(crate) use plan::Full;

/// Most segments of a packet, whatever the device says. A full copy of 64 KiB to buffers of 2 KiB has 33; lists of
/// 64 would refuse devices with larger limits for no reason.
pub const MAX_SEGS: usize = 128;

/// The segments of a packet.
pub type SegList = ArrayVec<Segment, MAX_SEGS>;

/// Why a packet was not mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// The ring has no room for its segments now.
    #[error("the ring is full; reclaim completed packets, and try again")]
    RingFull,
    /// The pools have no buffers for it now.
    #[error("no buffers are left to map the packet with; free some, and try again")]
    NoBuffers,
    /// It has more bytes than the device takes.
    #[error("the packet is longer than the device takes; segment it, or drop it")]
    TooLong,
    /// It has no bytes.
    #[error("the packet is empty; drop it")]
    Empty,
    /// Even a full copy has too many segments. Never so with pools like those that the limits were checked with.
    #[error(
        "the packet has too many segments even when copied; map with the pools that the queue was attached with"
    )]
    TooManySegments,
}

impl MapError {
    /// Whether the same packet may be mapped later.
    #[inline]
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::RingFull | Self::NoBuffers)
    }
}

/// A packet that was not mapped, as it was before, and why.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct Unmapped {
    /// Why not.
    pub reason: MapError,
    /// The packet: its data is where it was.
    pub chain: Chain,
}

/// Maps the packets of a transmit queue.
#[derive(Debug)]
pub struct Mapper {
    limits: TxLimits,
    counters: MapCounters,
    // What the planner writes on, kept so that it need not be allocated again.
    units: Vec<Unit>,
    groups: Vec<Group>,
    fresh: Vec<Buf>,
    spent: Vec<Buf>,
}

impl Mapper {
    /// A mapper for these limits, and for pools laid out like `pools`.
    ///
    /// # Errors
    /// The limits, with these pools, would make some packets impossible: see [`TxLimits::check`].
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

    /// The limits it was made with.
    #[inline]
    pub fn limits(&self) -> &TxLimits {
        &self.limits
    }

    /// What became of all packets so far.
    #[inline]
    pub fn counters(&self) -> &MapCounters {
        &self.counters
    }

    /// A packet that goes as it is, in one segment, as nearly all do. Afterwards it begins with
    /// [`TxLimits::header_room`] bytes to be written, owned by nobody else. `None`, and nothing has changed, for any
    /// other packet, which [`Mapper::map`] maps. The ring must have room for it: it is counted as mapped.
    #[inline(always)]
    pub fn direct(&mut self, chain: &mut Chain) -> Option<Segment> {
        let limits = if chain.header.is_gso() { &self.limits.tso } else { &self.limits.plain };
        let header = self.limits.header_room;
        let only = chain.only_mut()?;
        let len = header + only.len();
        let fits = len > header
            && len <= limits.max_bytes as usize
            && limits.is_one(only.addr().wrapping_sub(header as u64), len)
            && limits.fits(1);
        // Last, as it changes the packet.
        (fits && only.push(header)).then(|| {
            self.counters.count(Outcome::Direct, 1);
            Segment { addr: only.addr(), len: len as u32 }
        })
    }

    /// Makes a packet fit. `room` says whether the ring has room for so many segments: it is asked before anything
    /// is done. Afterwards `segs` describes the packet that is returned, which begins with
    /// [`TxLimits::header_room`] bytes to be written, in one piece and owned by nobody else.
    ///
    /// # Errors
    /// The packet, as it was, and the reason. Packets that may be [retried](MapError::is_retryable) have no outcome
    /// yet; the others are counted as dropped.
    #[inline]
    pub fn map(
        &mut self,
        mut chain: Chain,
        pools: &mut Pools,
        room: impl Fn(usize) -> bool,
        segs: &mut SegList,
    ) -> Result<Chain, Unmapped> {
        if room(1)
            && let Some(segment) = self.direct(&mut chain)
        {
            segs.clear();
            segs.push(segment);
            return Ok(chain);
        }
        self.map_any(chain, pools, &room, segs)
    }

    /// Counts a packet that the caller drops instead of trying again. Packets that cannot be retried have been
    /// counted already.
    #[cold]
    pub fn dropped(&mut self, reason: MapError) {
        if reason.is_retryable() {
            self.counters.dropped.count(reason);
        }
    }

    /// Any packet, the rare and the faulty ones too.
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
        // The header lies in one piece, however short the first segment may be otherwise.
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

    /// A packet that does not fit as it is.
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
