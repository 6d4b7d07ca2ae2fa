//! A transmit queue: owns a ring and the packets in flight on it.
//!
//! [`TxQueue::attach`] makes one from a driver's ring at set-up, after checking the limits; it belongs to one
//! thread at a time. For each burst that thread calls [`TxQueue::make_room`], [`TxQueue::send`] and
//! [`TxQueue::due`] per packet, and [`TxQueue::flush`] once; before it sleeps, [`TxQueue::before_idle`].
//! [`TxQueue::detach`] ends it. The driver gives each packet a token, which indexes the table of packets
//! in flight:
//!
//! ```text
//!            send                        device completes, reclaim
//! caller ───────────► in flight (token) ───────────────────────────► recycled to its pool
//!    ▲         │
//!    └─ Unsent ┘  the caller retries, or gives up (dropped and counted)
//! ```

use std::num::NonZeroU16;

use arrayvec::ArrayVec;
use ringferry_memory::WriteSlice;
use ringferry_packet::buffer::{Chain, Pools};
use ringferry_packet::vnet::Header;

use super::config::{AttachError, TxConfig};
use super::doorbell::Doorbell;
use super::reclaim::{reclaim_due, reclaim_threshold};
use super::stats::TxStats;
use crate::driver::{Refused, TxDriver, TxPacket};
use crate::map::{MapError, Mapper, SegList, Unmapped};

/// Number of completions that are collected before the first of their packets is recycled.
const AT_ONCE: usize = 32;

/// The reason for which a packet was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The packet could not be mapped to segments.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The device broke the rules of its ring, which accepts nothing until it is reset.
    #[error("the transmit ring is broken; reset the queue")]
    Broken,
    /// The driver can never send this packet: see [`Refused::Unfit`].
    #[error(transparent)]
    Unfit(Refused),
}

impl SendError {
    /// Returns true if the same packet may be sent later.
    #[inline]
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::Map(reason) if reason.is_retryable())
    }
}

/// A packet that was not sent, unchanged, with the reason.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct Unsent {
    /// The reason for which it was not sent.
    pub reason: SendError,
    /// The packet, unchanged and owned by the caller again.
    pub chain: Chain,
}

impl From<Unmapped> for Unsent {
    fn from(unmapped: Unmapped) -> Self {
        Self { reason: unmapped.reason.into(), chain: unmapped.chain }
    }
}

/// The transmit half of a driver. See [the guide](crate::guide::transmit) for the life of a packet.
///
/// Owns the ring, and each packet from the time it is sent until it is reclaimed. Belongs to one thread at a
/// time; several threads share it through a [`TxPort`](super::TxPort).
#[derive(Debug)]
pub struct TxQueue<D> {
    driver: D,
    mapper: Mapper,
    config: TxConfig,
    header_room: usize,
    /// Number of entries that the ring has.
    ring: usize,
    /// Number of entries that a packet of one segment takes.
    min_cost: usize,
    /// Number of entries that the largest plain packet takes.
    max_cost: usize,
    /// The packets in flight, by token.
    chains: Box<[Option<Chain>]>,
    in_flight: usize,
    doorbell: Doorbell,
    /// Number of entries used since the last reclaim.
    used_since_reclaim: usize,
    /// Number of used entries at which a reclaim is due.
    reclaim_after: usize,
    broken: bool,
    stats: TxStats,
}

impl<D: TxDriver> TxQueue<D> {
    /// Attaches a driver's ring. `pools` are those that packets will be mapped with, or others of the same
    /// layout.
    ///
    /// # Errors
    /// [`AttachError`], if some packet could never be sent.
    pub fn attach(driver: D, pools: &Pools, config: TxConfig) -> Result<Self, AttachError> {
        let limits = driver.limits();
        let ring = usize::from(limits.ring);
        if ring == 0 {
            return Err(AttachError::Empty);
        }
        let mapper = Mapper::new(&limits, pools)?;
        let segments = limits.plain.max_segs.max(limits.tso.max_segs);
        let cost = driver.cost(segments.into());
        if cost > ring {
            return Err(AttachError::Ring { segments, cost, ring: limits.ring });
        }
        Ok(Self {
            mapper,
            config,
            header_room: limits.header_room,
            ring,
            min_cost: driver.cost(1),
            max_cost: driver.cost(limits.plain.segs()),
            chains: std::iter::repeat_with(|| None).take(ring).collect(),
            in_flight: 0,
            doorbell: Doorbell::default(),
            used_since_reclaim: 0,
            reclaim_after: config
                .reclaim_after
                .map_or_else(|| reclaim_threshold(limits.ring), NonZeroU16::get)
                .into(),
            broken: false,
            stats: TxStats::default(),
            driver,
        })
    }

    /// Borrows the driver's ring, for its notifications and its state.
    #[inline]
    pub fn driver(&mut self) -> &mut D {
        &mut self.driver
    }

    /// Returns the settings that the queue was attached with.
    pub fn config(&self) -> &TxConfig {
        &self.config
    }

    /// Returns a copy of the counters since the queue was attached.
    pub fn stats(&self) -> TxStats {
        TxStats { map: self.mapper.counters().clone(), flushes: self.doorbell.rings(), ..self.stats.clone() }
    }

    /// Returns the number of packets that were sent and not yet reclaimed.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Returns the number of packets of one segment that could be sent now.
    #[inline]
    pub fn free(&self) -> usize {
        self.driver.room()
    }

    /// Returns the number of ring entries that are not published to the device yet.
    #[inline]
    pub fn pending(&self) -> usize {
        self.doorbell.pending()
    }

    /// Sends a packet, which the queue owns until it is reclaimed. The device does not see it before
    /// [`TxQueue::flush`], or [`TxQueue::due`] if that flushes.
    ///
    /// # Errors
    /// The packet and the reason. The caller may [retry](SendError::is_retryable) it, or
    /// [give it up](TxQueue::give_up), which counts it as dropped.
    #[inline]
    pub fn send(&mut self, chain: Chain, pools: &mut Pools) -> Result<(), Unsent> {
        let mut chain = pools.shatter(chain);
        if self.driver.room() < self.min_cost || self.broken {
            return self.send_any(chain, pools);
        }
        let (header, len) = (chain.header, chain.len());
        let Some((segment, room)) = self.mapper.direct(&mut chain) else {
            return self.send_any(chain, pools);
        };
        match self.driver.encap(&TxPacket { header: &header, len, room, segments: &[segment] }) {
            Ok(token) => {
                self.record(chain, token, self.min_cost, len);
                Ok(())
            }
            Err(refused) => Err(self.refused(chain, refused)),
        }
    }

    /// Sends a packet of any shape; kept out of line, as most packets have one segment.
    #[inline(never)]
    fn send_any(&mut self, chain: Chain, pools: &mut Pools) -> Result<(), Unsent> {
        let (driver, usable) = (&self.driver, !self.broken);
        let room = |segments| usable && driver.cost(segments) <= driver.room();
        let mut segments = SegList::new();
        let mut chain =
            self.mapper.map(chain, pools, room, &mut segments).map_err(|unmapped| self.unmapped(unmapped))?;
        let (header, len) = (chain.header, chain.len() - self.header_room);
        let room = chain.first_mut().map_or(WriteSlice::EMPTY, |first| first.front(self.header_room));
        match self.driver.encap(&TxPacket { header: &header, len, room, segments: &segments }) {
            Ok(token) => {
                self.record(chain, token, self.driver.cost(segments.len()), len);
                Ok(())
            }
            Err(refused) => Err(self.refused(chain, refused)),
        }
    }

    /// Records a packet of `len` bytes as in flight, which the driver has accepted and which takes `cost` entries.
    #[inline(always)]
    fn record(&mut self, chain: Chain, token: u16, cost: usize, len: usize) {
        let place = &mut self.chains[usize::from(token)];
        assert!(place.is_none(), "the token of a packet in flight");
        *place = Some(chain);
        self.in_flight += 1;
        self.doorbell.written(cost);
        self.used_since_reclaim += cost;
        self.stats.bytes += len as u64;
    }

    /// Makes the error for a packet that was not mapped. A broken ring reports no room as well, but a retry
    /// is useless then, so the reason is [`SendError::Broken`].
    #[cold]
    fn unmapped(&mut self, unmapped: Unmapped) -> Unsent {
        let mut unsent = Unsent::from(unmapped);
        self.broken |= self.driver.is_broken();
        if self.broken && unsent.reason.is_retryable() {
            unsent.reason = SendError::Broken;
        }
        unsent
    }

    /// Makes the error for a packet that was mapped and that the driver refused.
    #[cold]
    fn refused(&mut self, mut chain: Chain, refused: Refused) -> Unsent {
        self.stats.refused += 1;
        chain.pull(self.header_room);
        let reason = match refused {
            Refused::Full => MapError::RingFull.into(),
            Refused::Broken => {
                self.broken = true;
                SendError::Broken
            }
            Refused::Unfit => SendError::Unfit(refused),
        };
        Unsent { reason, chain }
    }

    /// [Sends](TxQueue::send) a packet. If there is no room for it, or no buffer, reclaims and tries once
    /// more.
    ///
    /// # Errors
    /// The same as [`TxQueue::send`].
    #[inline]
    pub fn send_or_reclaim(&mut self, chain: Chain, pools: &mut Pools) -> Result<(), Unsent> {
        match self.send(chain, pools) {
            Err(unsent) if unsent.reason.is_retryable() => self.reclaim_and_resend(unsent, pools),
            result => result,
        }
    }

    #[cold]
    fn reclaim_and_resend(&mut self, unsent: Unsent, pools: &mut Pools) -> Result<(), Unsent> {
        if self.reclaim(pools) == 0 {
            return Err(unsent);
        }
        self.send(unsent.chain, pools)
    }

    /// [Sends](TxQueue::send) a packet, or recycles it and returns false. For callers that drop packets that
    /// cannot be sent.
    #[inline]
    pub fn try_send(&mut self, chain: Chain, pools: &mut Pools) -> bool {
        match self.send(chain, pools) {
            Ok(()) => true,
            Err(unsent) => {
                pools.recycle_chain(unsent.chain);
                false
            }
        }
    }

    /// [Sends](TxQueue::try_send) a copy of a frame. Returns false if there is no room, or no buffer.
    #[inline]
    pub fn try_send_frame(&mut self, header: &Header, frame: &[u8], pools: &mut Pools) -> bool {
        let Some(mut chain) = pools.chain_of(frame) else { return false };
        chain.header = *header;
        self.try_send(chain, pools)
    }

    /// Drops a packet that was not sent, and counts it by its reason.
    #[cold]
    pub fn give_up(&mut self, unsent: Unsent, pools: &mut Pools) {
        match unsent.reason {
            SendError::Map(reason) => self.mapper.dropped(reason),
            SendError::Broken => self.stats.broken += 1,
            SendError::Unfit(_) => self.stats.unfit += 1,
        }
        pools.recycle_chain(unsent.chain);
    }

    /// [Flushes](TxQueue::flush) if the device is idle, a batch is complete, or space is short; called after
    /// each packet of a burst. Returns true if the device wants its doorbell rung.
    #[inline]
    pub fn due(&mut self) -> bool {
        let in_use = self.ring.saturating_sub(self.driver.room());
        self.doorbell.due(in_use, self.ring, self.max_cost) && self.publish()
    }

    /// Publishes all pending packets to the device, at the end of a burst. Returns true if the device wants
    /// its doorbell rung.
    #[inline]
    pub fn flush(&mut self) -> bool {
        self.doorbell.end_of_poll() && self.publish()
    }

    /// Prepares for sleep: [reclaims](TxQueue::reclaim) completed packets, so that a quiet queue pins no
    /// buffers, and [flushes](TxQueue::flush) pending ones. Returns true if the device wants its doorbell
    /// rung.
    pub fn before_idle(&mut self, pools: &mut Pools) -> bool {
        self.reclaim(pools);
        self.flush()
    }

    #[inline]
    fn publish(&mut self) -> bool {
        let kick = self.driver.flush();
        self.stats.kicks += u64::from(kick);
        kick
    }

    /// [Reclaims](TxQueue::reclaim) if it is [due](super::reclaim::reclaim_due): if there is no room for
    /// `packets` packets of one segment, or if enough of the ring was used since the last time.
    #[inline]
    pub fn make_room(&mut self, packets: usize, pools: &mut Pools) {
        let header = self.header_room;
        self.make_room_with(packets, |chain| recycle_sent(chain, header, pools));
    }

    /// Does the same as [`TxQueue::make_room`], but passes completed packets to `recycle`.
    #[inline]
    pub fn make_room_with(&mut self, packets: usize, recycle: impl FnMut(Chain)) {
        if reclaim_due(self.used_since_reclaim, self.reclaim_after, self.free(), packets) {
            self.reclaim_with(recycle);
        }
    }

    /// Takes back the packets that the device has completed and recycles them. Returns their number.
    #[inline]
    pub fn reclaim(&mut self, pools: &mut Pools) -> usize {
        let header = self.header_room;
        self.reclaim_with(|chain| recycle_sent(chain, header, pools))
    }

    /// Does the same as [`TxQueue::reclaim`], but passes completed packets to `recycle`, for callers whose
    /// buffers belong to a receive queue, for example.
    #[inline]
    pub fn reclaim_with(&mut self, mut recycle: impl FnMut(Chain)) -> usize {
        self.used_since_reclaim = 0;
        let (mut count, mut left) = (0, self.chains.len());
        // There are at most as many true completions as packets, which bounds the loop for a device that
        // reports others without end.
        while left > 0 {
            let mut tokens = ArrayVec::<u16, AT_ONCE>::new();
            let most = left.min(AT_ONCE);
            let completed = self.driver.completed(most, |token| tokens.push(token));
            for token in tokens {
                match self.chains.get_mut(usize::from(token)).and_then(Option::take) {
                    Some(chain) => {
                        count += 1;
                        recycle(chain);
                    }
                    None => self.stats.unknown += 1,
                }
            }
            left = if completed < most { 0 } else { left - completed };
        }
        self.in_flight -= count;
        self.stats.reclaim_passes += 1;
        self.stats.reclaimed += count as u64;
        count
    }

    /// Takes the queue apart and returns the driver's ring. The packets in flight are recycled; the device
    /// must have stopped reading them.
    pub fn detach(self, pools: &mut Pools) -> D {
        for chain in self.chains.into_iter().flatten() {
            pools.recycle_chain(chain);
        }
        self.driver
    }
}

/// Recycles a packet that was sent. The device has read the frame's first cache line, and the next sender
/// will write it, so it is prefetched here: the misses of a burst overlap. (Buffers that will be received
/// into are not prefetched; they take another path.)
#[inline(always)]
fn recycle_sent(mut chain: Chain, header_room: usize, pools: &mut Pools) {
    if let Some(first) = chain.first_mut() {
        first.write().skip(header_room).prefetch();
    }
    pools.recycle_chain(chain);
}
