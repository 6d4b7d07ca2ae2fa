//! A queue pair with its memory: what most front ends start from.

use ringferry_nic::rx::{self, PolicyKind, RxConfig, RxQueue};
use ringferry_nic::tx::{self, TxConfig, TxQueue};
use ringferry_packet::buffer::{Chain, Fragments, Pool, PoolError, PoolLayout, Pools, PoolsLayout};
use ringferry_packet::vnet::Header;
use ringferry_xen::domain::PAGE;
use ringferry_xen::grant::Access;
use ringferry_xen::netif::{Fault, LayoutError};

use super::arena::{Arena, Pages};
use super::{NetfrontRx, NetfrontTx};
use crate::events::Events;
use crate::offload::Accepts;

/// The front end's side of the packets that it sends.
pub type Transmit = TxQueue<NetfrontTx>;
/// The front end's side of the packets that it receives.
pub type Receive = RxQueue<NetfrontRx>;

/// Bytes of a small buffer with its head room: sixteen to a page, none across two. Elsewhere buffers lie a page apart, for the
/// sake of the processor's caches; here each page is a grant, of which there are few.
const SMALL: u32 = 256;
/// Bytes of a buffer for a frame of the usual MTU: two to a page.
const FRAME: u32 = 2048;
/// Pages of a buffer for anything. Data begins with the second, so that 64 KiB are sixteen slots and not seventeen.
const LARGE: u32 = 17;

/// How the buffers of a pair are made. Every page of them is a grant; a stock guest has 1024 of those for everything
/// (`/sys/module/xen_gntalloc/parameters/limit`), and the defaults, with rings, take 980 for one pair.
#[derive(Clone, Copy, Debug)]
pub struct PairConfig {
    /// Pages to receive into: twice the ring, as half of them may be in packets.
    pub receive: u32,
    /// Buffers for packets of up to 192 bytes, and for small copies of received ones.
    pub small: u32,
    /// Buffers for frames of the usual MTU.
    pub frames: u32,
    /// Buffers for packets of up to 64 KiB: as many as the ring holds.
    pub large: u32,
    /// Settings of the receive queue; its policy is to receive into pages, whatever this says.
    pub rx: RxConfig,
    /// Settings of the transmit queue.
    pub tx: TxConfig,
}

impl Default for PairConfig {
    fn default() -> Self {
        Self {
            receive: 512,
            small: 512,
            frames: 320,
            large: 16,
            rx: RxConfig::default(),
            tx: TxConfig::default(),
        }
    }
}

impl PairConfig {
    /// Pages of the rings of a pair.
    pub const RINGS: Pages = Pages { count: 2, access: Access::Write };

    fn pools(&self) -> PoolsLayout {
        let page = PAGE as u32;
        // Each pool is a whole number of pages.
        let packed = |stride: u32, count: u32| PoolLayout {
            chunk: stride,
            stride,
            count: count.next_multiple_of(page / stride),
            headroom: PoolsLayout::HEADROOM,
        };
        let large = LARGE * page;
        PoolsLayout {
            small: packed(SMALL, self.small),
            frame: packed(FRAME, self.frames),
            large: PoolLayout { chunk: large, stride: large, count: self.large, headroom: page },
        }
    }

    /// Pages to send from, which the back end only reads.
    pub fn transmit_pages(&self) -> Pages {
        Pages { count: self.pools().bytes() / PAGE, access: Access::Read }
    }

    /// Pages to receive into.
    pub fn receive_pages(&self) -> Pages {
        Pages { count: self.receive as usize, access: Access::Write }
    }
}

/// Why there is no pair.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// No ring.
    #[error(transparent)]
    Ring(#[from] LayoutError),
    /// No buffers.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The transmit ring cannot carry every packet.
    #[error(transparent)]
    Transmit(#[from] tx::AttachError),
    /// The receive ring cannot take every packet.
    #[error(transparent)]
    Receive(#[from] rx::AttachError),
}

/// Where a pair lies in its arena: the beginnings of its [rings](PairConfig::RINGS), of the
/// [pages to send from](PairConfig::transmit_pages) and of those [to receive into](PairConfig::receive_pages).
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// The transmit ring, and a page behind it the receive ring.
    pub rings: u64,
    /// Buffers to send from.
    pub transmit: u64,
    /// Pages to receive into.
    pub receive: u64,
}

/// A queue pair, its buffers, and its events. Belongs to one thread.
#[derive(Debug)]
pub struct Pair {
    /// Buffers to send from, and for small copies.
    pub pools: Pools,
    /// What is received.
    pub receive: Receive,
    /// What is sent.
    pub transmit: Transmit,
    events: Events,
}

impl Pair {
    /// Makes a pair at `places` of `arena`, for a back end that takes what `accepts` says; nothing is posted yet.
    ///
    /// # Errors
    /// See [`PairError`].
    pub fn new(
        arena: &Arena,
        places: Places,
        accepts: Accepts,
        events: Events,
        config: &PairConfig,
    ) -> Result<Self, PairError> {
        let memory = arena.memory();
        let page = |addr| memory.area(addr, PAGE).ok_or(LayoutError::Page);
        let tx = NetfrontTx::new(page(places.rings)?, arena.map().clone(), accepts)?;
        let rx = NetfrontRx::new(page(places.rings + PAGE as u64)?, arena.map().clone(), memory.clone())?;
        let pools = Pools::new(memory, places.transmit, config.pools())?;
        let pages = PoolLayout::chunks(PAGE as u32, config.receive, 0);
        let pages = Fragments::new(Pool::new(memory, places.receive, pages)?);
        let transmit = TxQueue::attach(tx, &pools, config.tx)?;
        let receive = RxQueue::attach(rx, pages, RxConfig { policy: PolicyKind::FixedPage, ..config.rx })?;
        Ok(Self { pools, receive, transmit, events })
    }

    /// Its event channels.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Asks for an event when something was sent or has come; true when that is so already, and then there will be none. A
    /// pair that is not armed again is not told.
    pub fn arm(&mut self) -> bool {
        let sent = self.transmit.driver().final_check();
        self.receive.driver().final_check() || sent
    }

    /// The violation that broke one of the queues, if any.
    #[inline]
    pub fn fault(&mut self) -> Option<Fault> {
        self.receive.driver().fault().or_else(|| self.transmit.driver().fault())
    }

    /// Posts pages wherever the ring has room; true when the back end wants to be notified.
    #[inline]
    pub fn refill(&mut self) -> bool {
        self.receive.refill()
    }

    /// Takes back what the back end has sent; returns how many packets.
    #[inline]
    pub fn reclaim(&mut self) -> usize {
        self.transmit.reclaim(&mut self.pools)
    }

    /// Sends a copy of a frame; false when there is no room, or no buffer. Shown to the back end by [`TxQueue::flush`].
    #[inline]
    pub fn send_frame(&mut self, header: &Header, frame: &[u8]) -> bool {
        self.transmit.try_send_frame(header, frame, &mut self.pools)
    }

    /// Sends a packet, or recycles it: false when there is no room.
    #[inline]
    pub fn send(&mut self, chain: Chain) -> bool {
        self.transmit.try_send(chain, &mut self.pools)
    }
}
