//! A transmit queue: which packets the device has, and what became of the others.

use std::num::NonZeroU16;

use ringferry_memory::WriteSlice;
use ringferry_packet::buffer::{Chain, Pools};
use ringferry_packet::vnet::Header;

use super::config::{AttachError, TxConfig};
use super::doorbell::Doorbell;
use super::reclaim::{reclaim_due, reclaim_threshold};
use super::stats::TxStats;
use crate::driver::{Refused, Segment, TxDriver, TxPacket};
use crate::map::{MapError, Mapper, SegList, Unmapped};

/// Why a packet was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// It was not mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The device broke the rules of its ring, which takes nothing any more.
    #[error("the transmit ring is broken; reset the queue")]
    Broken,
    /// The driver can never send it: see [`Refused::Unfit`].
    #[error(transparent)]
    Unfit(Refused),
}

impl SendError {
    /// Whether the same packet may be sent later.
    #[inline]
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::Map(reason) if reason.is_retryable())
    }
}

/// A packet that was not sent, as it was before, and why.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct Unsent {
    /// Why not.
    pub reason: SendError,
    /// The packet.
    pub chain: Chain,
}

impl From<Unmapped> for Unsent {
    fn from(unmapped: Unmapped) -> Self {
        Self { reason: unmapped.reason.into(), chain: unmapped.chain }
    }
}

/// The transmit half of a driver. See [the guide](crate::guide::transmit) for the life of a packet.
///
/// Owns the ring, and each packet from the time it is sent until the device is done with it. Belongs to one
/// thread at a time; several share it through a [`TxPort`](super::TxPort).
#[derive(Debug)]
pub struct TxQueue<D> {
    driver: D,
    mapper: Mapper,
    config: TxConfig,
    header_room: usize,
    /// Entries of the ring.
    ring: usize,
    /// Entries that a packet of one segment takes.
    one: usize,
    /// Entries that a packet may take.
    packet: usize,
    /// The packets that the device has, by token.
    chains: Box<[Option<Chain>]>,
    /// Tokens of no packet, last returned on top: the one whose slot is still in the cache.
    vacant: Vec<u16>,
    doorbell: Doorbell,
    /// Entries used since the last look at what the device is done with.
    used: usize,
    /// Entries that are worth a look.
    worth: usize,
    broken: bool,
    stats: TxStats,
}

impl<D: TxDriver> TxQueue<D> {
    /// Attaches a driver. `pools` are those that packets will be mapped with, or others of the same layout.
    ///
    /// # Errors
    /// Some packet could never be sent: see [`AttachError`].
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
            one: driver.cost(1),
            packet: driver.cost(limits.plain.segs()),
            chains: std::iter::repeat_with(|| None).take(ring).collect(),
            vacant: (0..limits.ring).rev().collect(),
            doorbell: Doorbell::default(),
            used: 0,
            worth: config
                .reclaim_after
                .map_or_else(|| reclaim_threshold(limits.ring), NonZeroU16::get)
                .into(),
            broken: false,
            stats: TxStats::default(),
            driver,
        })
    }

    /// The ring, for its notifications and its state.
    #[inline]
    pub fn driver(&mut self) -> &mut D {
        &mut self.driver
    }

    /// The settings it was attached with.
    pub fn config(&self) -> &TxConfig {
        &self.config
    }

    /// What was counted since the queue was attached.
    pub fn stats(&self) -> TxStats {
        TxStats { map: self.mapper.counters().clone(), flushes: self.doorbell.rings(), ..self.stats.clone() }
    }

    /// Packets that the device has.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.chains.len() - self.vacant.len()
    }

    /// Packets of one segment that could be sent now.
    #[inline]
    pub fn free(&self) -> usize {
        self.vacant.len().min(self.driver.room())
    }

    /// Entries that the device has not been shown.
    #[inline]
    pub fn pending(&self) -> usize {
        self.doorbell.pending()
    }

    /// Sends a packet, which the queue keeps until the device is done with it. The device does not see it before
    /// [`TxQueue::flush`], or [`TxQueue::due`] when that is worth it.
    ///
    /// # Errors
    /// The packet and the reason. It may be [retried](SendError::is_retryable), or
    /// [given up](TxQueue::give_up); nothing else counts it.
    #[inline]
    pub fn send(&mut self, chain: Chain, pools: &mut Pools) -> Result<(), Unsent> {
        let mut chain = pools.shatter(chain);
        if self.driver.room() >= self.one
            && let Some(&token) = self.vacant.last()
            && !self.broken
            && let Some(segment) = self.mapper.direct(&mut chain)
        {
            return self.encap(chain, token, &[segment]);
        }
        self.send_any(chain, pools)
    }

    /// Any packet, at any time.
    #[inline(never)]
    fn send_any(&mut self, chain: Chain, pools: &mut Pools) -> Result<(), Unsent> {
        let driver = &self.driver;
        let usable = !self.vacant.is_empty() && !self.broken;
        let room = |segments| usable && driver.cost(segments) <= driver.room();
        let mut segments = SegList::new();
        match self.mapper.map(chain, pools, room, &mut segments) {
            Ok(chain) => match self.vacant.last() {
                Some(&token) => self.encap(chain, token, &segments),
                None => Err(self.refused(chain, Refused::Full)),
            },
            Err(unmapped) => Err(self.unmapped(unmapped)),
        }
    }

    /// Writes a packet that is mapped.
    #[inline(always)]
    fn encap(&mut self, mut chain: Chain, token: u16, segments: &[Segment]) -> Result<(), Unsent> {
        let header = chain.header;
        let len = chain.len() - self.header_room;
        let room = chain.first_mut().map_or(WriteSlice::EMPTY, |first| first.front(self.header_room));
        if let Err(refused) = self.driver.encap(&TxPacket { header: &header, len, room, segments }, token) {
            return Err(self.refused(chain, refused));
        }
        self.vacant.pop();
        self.chains[usize::from(token)] = Some(chain);
        let cost = self.driver.cost(segments.len());
        self.doorbell.written(cost);
        self.used += cost;
        self.stats.bytes += len as u64;
        Ok(())
    }

    /// A broken ring has no room, but no reason to try again either.
    #[cold]
    fn unmapped(&mut self, unmapped: Unmapped) -> Unsent {
        let mut unsent = Unsent::from(unmapped);
        self.broken |= self.driver.is_broken();
        if self.broken && unsent.reason.is_retryable() {
            unsent.reason = SendError::Broken;
        }
        unsent
    }

    /// The packet was mapped, and the driver did not want it.
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

    /// [Sends](TxQueue::send) a packet; if there is no room for it, or no buffer, reclaims first and tries once more.
    ///
    /// # Errors
    /// As [`TxQueue::send`].
    #[inline]
    pub fn send_or_reclaim(&mut self, chain: Chain, pools: &mut Pools) -> Result<(), Unsent> {
        match self.send(chain, pools) {
            Err(unsent) if unsent.reason.is_retryable() => self.send_again(unsent, pools),
            result => result,
        }
    }

    #[cold]
    fn send_again(&mut self, unsent: Unsent, pools: &mut Pools) -> Result<(), Unsent> {
        if self.reclaim(pools) == 0 {
            return Err(unsent);
        }
        self.send(unsent.chain, pools)
    }

    /// [Sends](TxQueue::send) a packet, or recycles it: false when there is no room. For whoever has nothing better to do with one
    /// that does not go.
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

    /// [Sends](TxQueue::try_send) a copy of a frame; false when there is no room, or no buffer.
    #[inline]
    pub fn try_send_frame(&mut self, header: &Header, frame: &[u8], pools: &mut Pools) -> bool {
        let Some(mut chain) = pools.chain_of(frame) else { return false };
        chain.header = *header;
        self.try_send(chain, pools)
    }

    /// Drops a packet that was not sent, and counts it, by reason.
    #[cold]
    pub fn give_up(&mut self, unsent: Unsent, pools: &mut Pools) {
        match unsent.reason {
            SendError::Map(reason) => self.mapper.dropped(reason),
            SendError::Broken => self.stats.broken += 1,
            SendError::Unfit(_) => self.stats.unfit += 1,
        }
        pools.recycle_chain(unsent.chain);
    }

    /// [Flushes](TxQueue::flush) if that is worth it already: when the device is idle, a batch is complete, or space is
    /// short. For within a poll.
    #[inline]
    pub fn due(&mut self) -> bool {
        let in_use = self.ring.saturating_sub(self.driver.room());
        self.doorbell.due(in_use, self.ring, self.packet) && self.show()
    }

    /// Shows the device all that is pending: the end of a poll, after which nothing is. True when the device wants its
    /// doorbell rung.
    #[inline]
    pub fn flush(&mut self) -> bool {
        self.doorbell.end_of_poll() && self.show()
    }

    /// What has to happen before the thread that polls this queue goes to sleep: completed packets are
    /// [reclaimed](TxQueue::reclaim), so that a quiet queue pins no buffers, and pending ones
    /// [flushed](TxQueue::flush).
    pub fn before_idle(&mut self, pools: &mut Pools) -> bool {
        self.reclaim(pools);
        self.flush()
    }

    #[inline]
    fn show(&mut self) -> bool {
        let kick = self.driver.flush();
        self.stats.kicks += u64::from(kick);
        kick
    }

    /// [Reclaims](TxQueue::reclaim) if it is [due](super::reclaim::reclaim_due): when there is no room for so many
    /// packets of one segment, or a quarter of the ring was used since the last time.
    #[inline]
    pub fn make_room(&mut self, packets: usize, pools: &mut Pools) {
        let header = self.header_room;
        self.make_room_with(packets, |chain| put_back(chain, header, pools));
    }

    /// [`TxQueue::make_room`] for whoever knows better where the packets belong.
    #[inline]
    pub fn make_room_with(&mut self, packets: usize, recycle: impl FnMut(Chain)) {
        if reclaim_due(self.used, self.worth, self.free(), packets) {
            self.reclaim_with(recycle);
        }
    }

    /// Takes back the packets that the device is done with; returns how many.
    #[inline]
    pub fn reclaim(&mut self, pools: &mut Pools) -> usize {
        let header = self.header_room;
        self.reclaim_with(|chain| put_back(chain, header, pools))
    }

    /// [`TxQueue::reclaim`] for whoever knows better where the packets belong.
    #[inline]
    pub fn reclaim_with(&mut self, mut recycle: impl FnMut(Chain)) -> usize {
        self.used = 0;
        let before = self.vacant.len();
        // No more completions are true than there are packets: a device that lies ends, too.
        for _ in 0..self.chains.len() {
            let Some(token) = self.driver.completed() else { break };
            let Some(chain) = self.chains.get_mut(usize::from(token)).and_then(Option::take) else {
                self.stats.unknown += 1;
                continue;
            };
            self.vacant.push(token);
            recycle(chain);
        }
        let count = self.vacant.len() - before;
        self.stats.looks += 1;
        self.stats.reclaimed += count as u64;
        count
    }

    /// Takes the queue apart. Every packet that the device has is freed, once; the device must have stopped reading
    /// them.
    pub fn detach(self, pools: &mut Pools) -> D {
        for chain in self.chains.into_iter().flatten() {
            pools.recycle_chain(chain);
        }
        self.driver
    }
}

/// Recycles a packet that was sent. The device has read the frame's first line; whoever fills the buffer next wants it
/// back, all those of a burst at once. (A buffer that is to be received into belongs with the device, and goes
/// another way.)
#[inline(always)]
fn put_back(mut chain: Chain, header_room: usize, pools: &mut Pools) {
    if let Some(first) = chain.first_mut() {
        first.write().skip(header_room).prefetch();
    }
    pools.recycle_chain(chain);
}
