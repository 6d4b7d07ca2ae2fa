//! A queue pair with its memory: what most drivers start from.

use ringferry_memory::GuestMemory;
use ringferry_nic::rx::{self, PolicyKind, RxConfig, RxQueue};
use ringferry_nic::tx::{self, TxConfig, TxQueue};
use ringferry_packet::buffer::{Chain, Fragments, Pool, PoolError, PoolLayout, Pools, PoolsLayout};
use ringferry_packet::vnet::Header;
use ringferry_ring::Fault;

use super::arena::{Arena, ArenaError, Queue};
use super::rings::{MAX_SEGS, RxRing, TxRing, max_frame};
use crate::{Features, MAX_FRAME};

/// The driver's side of a transmitq.
pub type Transmitq = TxQueue<TxRing>;
/// The driver's side of a receiveq.
pub type Receiveq = RxQueue<RxRing>;

/// Bytes of a chunk that receive buffers are carved from.
pub const CHUNK: u32 = Fragments::CHUNK;

/// Bytes of a mergeable buffer of all policies but the one that may go further.
const PAGE: usize = 4096;

/// Bytes of a cache line.
const LINE: usize = 64;

/// How a pair is made.
#[derive(Clone, Copy, Debug)]
pub struct PairConfig {
    /// Entries of the receiveq.
    pub receive: u16,
    /// Entries of the transmitq.
    pub transmit: u16,
    /// Largest packet behind the Ethernet header, where no feature lets larger ones come.
    pub mtu: u16,
    /// Most segments of a packet that is sent.
    pub max_segs: u16,
    /// Settings of the receive queue.
    pub rx: RxConfig,
    /// Settings of the transmit queue.
    pub tx: TxConfig,
}

impl Default for PairConfig {
    fn default() -> Self {
        Self {
            receive: 256,
            transmit: 256,
            mtu: 1500,
            max_segs: MAX_SEGS,
            rx: RxConfig::default(),
            tx: TxConfig::default(),
        }
    }
}

impl PairConfig {
    /// Pools that fill both rings twice: what is under way, and what is being made.
    fn pools(&self, features: Features) -> PoolsLayout {
        let count = 2 * (u32::from(self.transmit) + u32::from(self.receive));
        // The longest packet in one buffer.
        PoolsLayout::new(count, (MAX_FRAME + features.header_len().max(Header::LEN)) as u32)
    }

    /// Chunks for the buffers of the receiveq twice: a ring full, and as many that packets are in. Those that
    /// are never used cost addresses, not memory.
    fn chunks(&self, features: Features) -> PoolLayout {
        let mergeable = features.contains(Features::MRG_RXBUF);
        let header = features.header_len().max(Header::LEN);
        let whole = Fragments::layout(1, header as u32);
        let len = match self.rx.policy {
            PolicyKind::Best if mergeable => whole.room() as usize,
            _ if mergeable => PAGE,
            _ => (header + max_frame(features, self.mtu)).next_multiple_of(LINE),
        };
        let room = whole.room() as usize;
        let buffers = 2 * usize::from(self.receive);
        // A ring of a few entries still has chunks to go round.
        let count = |chunks: usize| chunks.max(8) as u32;
        match room / len {
            0 if RxRing::takes_segments(features) => {
                Fragments::layout(count(buffers * len.div_ceil(room)), header as u32)
            }
            // In one piece, each in a chunk of its own.
            0 => PoolLayout::chunks(whole.headroom + len as u32, count(buffers), whole.headroom),
            each => Fragments::layout(count(buffers.div_ceil(each)), header as u32),
        }
    }

    /// Bytes of arena that a pair takes.
    pub fn arena_bytes(&self, features: Features) -> usize {
        let rings = RxRing::arena_bytes(self.receive) + TxRing::arena_bytes(self.transmit, self.max_segs);
        // Each of both kinds of pool begins a page.
        rings + self.pools(features).bytes() + self.chunks(features).bytes() + 2 * 4096
    }
}

/// Why there is no pair.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// No memory.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// No buffers.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The transmitq cannot carry every packet.
    #[error(transparent)]
    Transmit(#[from] tx::AttachError),
    /// The receiveq cannot take every packet.
    #[error(transparent)]
    Receive(#[from] rx::AttachError),
}

/// A queue pair and the buffers of the worker that it belongs to.
#[derive(Debug)]
pub struct Pair {
    /// Buffers to send from, and for small copies.
    pub pools: Pools,
    /// What is received.
    pub receiveq: Receiveq,
    /// What is sent.
    pub transmitq: Transmitq,
    /// Where the rings lie: receiveq, transmitq.
    pub queues: [Queue; 2],
}

impl Pair {
    /// Makes a pair in `arena`; nothing is posted yet.
    ///
    /// # Errors
    /// See [`PairError`].
    pub fn new(arena: &mut Arena, features: Features, config: &PairConfig) -> Result<Self, PairError> {
        let (rx_queue, rx_ring) = RxRing::new(arena, config.receive, features, config.mtu)?;
        let (tx_queue, tx_ring) = TxRing::new(arena, config.transmit, features, config.max_segs)?;
        let (layout, chunks) = (config.pools(features), config.chunks(features));
        let buffers = arena.alloc(layout.bytes())?;
        let fragments = arena.alloc(chunks.bytes())?;
        let memory: &GuestMemory = arena.memory();
        let pools = Pools::new(memory, buffers, layout)?;
        let fragments = Fragments::new(Pool::new(memory, fragments, chunks)?);
        let receiveq = RxQueue::attach(rx_ring, fragments, config.rx)?;
        let transmitq = TxQueue::attach(tx_ring, &pools, config.tx)?;
        Ok(Self { pools, receiveq, transmitq, queues: [rx_queue, tx_queue] })
    }

    /// The violation that broke one of the queues, if any.
    #[inline]
    pub fn fault(&mut self) -> Option<Fault> {
        self.receiveq.driver().fault().or_else(|| self.transmitq.driver().fault())
    }

    /// Tells the device not to call: the driver polls.
    #[inline]
    pub fn disable_calls(&mut self) {
        self.receiveq.driver().ring().disable_calls();
        self.transmitq.driver().ring().disable_calls();
    }

    /// Posts buffers wherever the receiveq has room; true when the device wants a kick.
    #[inline]
    pub fn refill(&mut self) -> bool {
        self.receiveq.refill()
    }

    /// Takes back what the device has sent; returns how many packets.
    #[inline]
    pub fn reclaim(&mut self) -> usize {
        self.transmitq.reclaim(&mut self.pools)
    }

    /// Sends a copy of a frame; false when there is no room, or no buffer. Shown to the device by
    /// [`TxQueue::flush`].
    #[inline]
    pub fn send_frame(&mut self, header: &Header, frame: &[u8]) -> bool {
        self.transmitq.try_send_frame(header, frame, &mut self.pools)
    }

    /// Sends a packet, or recycles it: false when there is no room.
    #[inline]
    pub fn send(&mut self, chain: Chain) -> bool {
        self.transmitq.try_send(chain, &mut self.pools)
    }
}
