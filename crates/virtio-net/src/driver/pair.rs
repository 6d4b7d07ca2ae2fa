//! [`Pair`]: a receiveq and a transmitq with their buffers, from which most drivers start.
//!
//! A driver creates one per queue pair in its arena, tells the device where [`Pair::queues`] lie,
//! calls [`Pair::refill`] once, and then sends, receives and reclaims from the one thread that owns
//! the pair. It ends by being dropped; its memory ends with the arena.

use ringferry_memory::GuestMemory;
use ringferry_nic::rx::{self, PolicyKind, RxConfig, RxQueue};
use ringferry_nic::tx::{self, TxConfig, TxQueue};
use ringferry_packet::buffer::{Chain, Fragments, Pool, PoolError, PoolLayout, Pools, PoolsLayout};
use ringferry_packet::vnet::Header;
use ringferry_ring::Fault;

use super::arena::{Arena, ArenaError, Queue};
use super::rings::{MAX_SEGS, RxRing, TxRing, max_frame};
use crate::{Features, MAX_FRAME};

/// The driver's side of a transmitq: the framework's transmit queue over a [`TxRing`].
pub type Transmitq = TxQueue<TxRing>;
/// The driver's side of a receiveq: the framework's receive queue over an [`RxRing`].
pub type Receiveq = RxQueue<RxRing>;

/// Size in bytes of a chunk from which receive buffers are carved.
pub const CHUNK: u32 = Fragments::CHUNK;

/// Size in bytes of a mergeable buffer under every policy except [`PolicyKind::Best`].
const PAGE: usize = 4096;

/// Size of a cache line in bytes.
const LINE: usize = 64;

/// The sizes and settings of a pair.
#[derive(Clone, Copy, Debug)]
pub struct PairConfig {
    /// Number of entries of the receiveq.
    pub receive: u16,
    /// Number of entries of the transmitq.
    pub transmit: u16,
    /// Largest packet after the Ethernet header in bytes, unless a negotiated feature admits larger
    /// ones.
    pub mtu: u16,
    /// Most segments of a packet that is sent.
    pub max_segs: u16,
    /// Settings of the framework's receive queue.
    pub rx: RxConfig,
    /// Settings of the framework's transmit queue.
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
    /// Returns the layout of pools that fill both rings twice: for the packets in flight, and for
    /// those being made.
    fn pools(&self, features: Features) -> PoolsLayout {
        let count = 2 * (u32::from(self.transmit) + u32::from(self.receive));
        // The longest packet in one buffer.
        PoolsLayout::new(count, (MAX_FRAME + features.header_len().max(Header::LEN)) as u32)
    }

    /// Returns the layout of the chunks for twice the receiveq's buffers: a full ring, and as many
    /// that hold packets. Chunks that are never used cost addresses, not memory.
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
        // A ring of few entries still gets enough chunks to rotate.
        let count = |chunks: usize| chunks.max(8) as u32;
        match room / len {
            0 if RxRing::takes_segments(features) => {
                Fragments::layout(count(buffers * len.div_ceil(room)), header as u32)
            }
            // Each buffer is one piece, in a chunk of its own.
            0 => PoolLayout::chunks(whole.headroom + len as u32, count(buffers), whole.headroom),
            each => Fragments::layout(count(buffers.div_ceil(each)), header as u32),
        }
    }

    /// Returns the number of bytes that a pair takes of an arena.
    pub fn arena_bytes(&self, features: Features) -> usize {
        let rings = RxRing::arena_bytes(self.receive) + TxRing::arena_bytes(self.transmit, self.max_segs);
        // Each of the two kinds of pool begins on a page.
        rings + self.pools(features).bytes() + self.chunks(features).bytes() + 2 * 4096
    }
}

/// The reason why a pair cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// The arena has no room, or the ring cannot have its size.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The buffer pools cannot be created.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The transmitq cannot carry every packet that the pools can hold.
    #[error(transparent)]
    Transmit(#[from] tx::AttachError),
    /// The receiveq's buffers cannot hold every packet that may come.
    #[error(transparent)]
    Receive(#[from] rx::AttachError),
}

/// A queue pair and the buffers of the worker that owns it.
#[derive(Debug)]
pub struct Pair {
    /// Buffers for packets to send, and for small copies.
    pub pools: Pools,
    /// The receive queue of the pair.
    pub receiveq: Receiveq,
    /// The transmit queue of the pair.
    pub transmitq: Transmitq,
    /// Addresses of the rings, receiveq first and transmitq second.
    pub queues: [Queue; 2],
}

impl Pair {
    /// Creates a pair in `arena`; no buffer is posted yet.
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

    /// Returns the violation that broke one of the queues, if any.
    #[inline]
    pub fn fault(&mut self) -> Option<Fault> {
        self.receiveq.driver().fault().or_else(|| self.transmitq.driver().fault())
    }

    /// Suppresses the device's notifications, for a driver that polls.
    #[inline]
    pub fn disable_calls(&mut self) {
        self.receiveq.driver().ring().disable_calls();
        self.transmitq.driver().ring().disable_calls();
    }

    /// Posts buffers wherever the receiveq has room; returns true if the device wants a
    /// notification.
    #[inline]
    pub fn refill(&mut self) -> bool {
        self.receiveq.refill()
    }

    /// Takes back packets that the device has sent; returns how many.
    #[inline]
    pub fn reclaim(&mut self) -> usize {
        self.transmitq.reclaim(&mut self.pools)
    }

    /// Queues a copy of a frame; returns false if there is no room or no buffer. [`TxQueue::flush`]
    /// publishes it to the device.
    #[inline]
    pub fn send_frame(&mut self, header: &Header, frame: &[u8]) -> bool {
        self.transmitq.try_send_frame(header, frame, &mut self.pools)
    }

    /// Queues a packet, or recycles it and returns false if there is no room.
    #[inline]
    pub fn send(&mut self, chain: Chain) -> bool {
        self.transmitq.try_send(chain, &mut self.pools)
    }
}
