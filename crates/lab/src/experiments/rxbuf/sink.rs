//! The driver that is measured: the framework's receive queue on a virtqueue, over chunks that every policy has as many of,
//! and packets that are kept for a while before they come back.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use ringferry_memory::RegionSpec;
use ringferry_nic::rx::{PolicyKind, RxConfig, RxQueue, RxStats};
use ringferry_packet::buffer::{Chain, Fragments, Pool, Pools, PoolsLayout};
use ringferry_packet::vnet::Header;
use ringferry_sys::eventfd::EventFd;
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Arena, Queue, RxRing, TxRing};

use super::BURST;
use crate::experiment::RowError;

pub(super) const RING: u16 = 256;

/// Packets that are somewhere else before they come back: what a socket has not read yet.
pub(super) const HELD: usize = 64;

/// Chunks that buffers are carved from: a ring of the longest buffers, as many again that are on their way back, and all
/// that is held. Fewer would decide for the policy how long its buffers may be.
const CHUNKS: u32 = 2 * RING as u32 + 4 * HELD as u32;

/// Small buffers for copies: those of packets that are held, each with its end copied, and of a burst.
const COPIES: u32 = 4 * HELD as u32;

/// Segments of a packet to send; none is.
const SEGMENTS: u16 = 1;

/// The features that both ends agree on: those that DPDK has, too. No offload needs to be agreed on for packets that no kernel sees.
pub(super) fn features() -> Features {
    Features::VERSION_1
        | Features::INDIRECT_DESC
        | Features::MRG_RXBUF
        | Features::RING_PACKED
        | Features::IN_ORDER
}

/// The driver half, which receives.
#[derive(Debug)]
pub(super) struct Sink {
    arena: Arena,
    queue: RxQueue<RxRing>,
    pools: Pools,
    held: VecDeque<Chain>,
    /// Receive and transmit ring; nothing is ever sent.
    pub(super) rings: [Queue; 2],
    /// Rung when the device wants to hear of buffers.
    pub(super) kick: Option<EventFd>,
}

impl Sink {
    /// Memory, rings and buffers. Nothing is posted yet.
    pub(super) fn new(policy: PolicyKind) -> Result<Self, RowError> {
        let features = features();
        let small = PoolsLayout::new(COPIES, PoolsLayout::FRAME);
        let chunks = Fragments::layout(CHUNKS, Header::LEN as u32);
        let rings = RxRing::arena_bytes(RING) + TxRing::arena_bytes(RING, SEGMENTS);
        let arena = Arena::new(rings + small.bytes() + chunks.bytes() + 2 * 4096);
        let mut arena = arena.map_err(RowError::failed)?;
        let (rx, mut ring) = RxRing::new(&mut arena, RING, features, 1500).map_err(RowError::failed)?;
        ring.ring().disable_calls();
        let (tx, _) = TxRing::new(&mut arena, RING, features, SEGMENTS).map_err(RowError::failed)?;
        let at = arena.alloc(small.bytes()).map_err(RowError::failed)?;
        let pools = Pools::new(arena.memory(), at, small).map_err(RowError::failed)?;
        let at = arena.alloc(chunks.bytes()).map_err(RowError::failed)?;
        let pool = Pool::new(arena.memory(), at, chunks).map_err(RowError::failed)?;
        let config = RxConfig { policy, ..RxConfig::default() };
        let queue = RxQueue::attach(ring, Fragments::new(pool), config).map_err(RowError::failed)?;
        let held = VecDeque::with_capacity(HELD + BURST);
        Ok(Self { arena, queue, pools, held, rings: [rx, tx], kick: None })
    }

    /// Where its memory is, for the device.
    pub(super) fn region(&self) -> (RegionSpec, BorrowedFd<'_>) {
        (self.arena.region(), self.arena.fd())
    }

    /// Posts all buffers there is room for.
    pub(super) fn begin(&mut self) {
        let wanted = self.queue.refill();
        self.ring_bell(wanted);
    }

    /// Receives a burst, and lets go of what is held for long enough. `look` sees every packet; returns how many came.
    ///
    /// # Errors
    /// What `look` says, or the device broke the ring.
    #[inline]
    pub(super) fn round(
        &mut self,
        mut look: impl FnMut(&Chain) -> Result<(), RowError>,
    ) -> Result<usize, RowError> {
        let Self { queue, pools, held, .. } = self;
        let mut good = Ok(());
        let received = queue.receive(BURST, pools, |packet, _| {
            if good.is_ok() {
                good = look(&packet);
            }
            held.push_back(packet);
        });
        while held.len() > HELD
            && let Some(packet) = held.pop_front()
        {
            queue.recycle_chain(packet, pools);
        }
        if received > 0 {
            let wanted = queue.top_up();
            self.ring_bell(wanted);
        }
        good?;
        match self.queue.driver().fault() {
            Some(fault) => Err(RowError::failed(format!("the device broke the ring: {fault}"))),
            None => Ok(received),
        }
    }

    fn ring_bell(&self, wanted: bool) {
        if wanted && let Some(kick) = &self.kick {
            let _ = kick.signal();
        }
    }

    pub(super) fn stats(&self) -> RxStats {
        self.queue.stats()
    }

    /// Bytes of the next buffer.
    pub(super) fn next_buffer_len(&self) -> usize {
        self.queue.next_buffer_len()
    }
}
