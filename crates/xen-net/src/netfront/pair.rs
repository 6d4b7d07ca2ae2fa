//! [`Pair`]: a transmit and a receive queue with their buffers and events, from which most front
//! ends start.
//!
//! The xenbus front-end driver creates it when it connects and hands it out. One thread then calls
//! [`Pair::refill`] once, sends, receives, reclaims and arms, and gives the pair back to be dropped
//! when the interface stops.

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

/// The front end's transmit queue: the framework's over a [`NetfrontTx`].
pub type Transmit = TxQueue<NetfrontTx>;
/// The front end's receive queue: the framework's over a [`NetfrontRx`].
pub type Receive = RxQueue<NetfrontRx>;

/// Size in bytes of a small buffer with its head room: sixteen to a page, none across two. Other
/// drivers place buffers a page apart for the sake of the processor's caches; here each page is a
/// grant, and grants are scarce.
const SMALL: u32 = 256;
/// Size in bytes of a buffer for a frame of the usual MTU: two to a page.
const FRAME: u32 = 2048;
/// Pages of a buffer for a packet of any size. Data begins with the second, so that 64 KiB are
/// sixteen slots and not seventeen.
const LARGE: u32 = 17;

/// The numbers of a pair's buffers, and the settings of its queues. Every page of buffers is a
/// grant; a stock guest has 1024 of those for everything
/// (`/sys/module/xen_gntalloc/parameters/limit`), and the defaults, with rings, take 980 for one
/// pair.
#[derive(Clone, Copy, Debug)]
pub struct PairConfig {
    /// Number of pages to receive into: twice the ring, as half of them may be in packets.
    pub receive: u32,
    /// Number of buffers for packets of up to 192 bytes, and for small copies of received ones.
    pub small: u32,
    /// Number of buffers for frames of the usual MTU.
    pub frames: u32,
    /// Number of buffers for packets of up to 64 KiB: as many as the ring holds.
    pub large: u32,
    /// Settings of the framework's receive queue; its policy is ignored, because packets are always
    /// received into pages.
    pub rx: RxConfig,
    /// Settings of the framework's transmit queue.
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
    /// The pages of a pair's two rings.
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

    /// Returns the pages to send from, which the back end only reads.
    pub fn transmit_pages(&self) -> Pages {
        Pages { count: self.pools().bytes() / PAGE, access: Access::Read }
    }

    /// Returns the pages to receive into, which the back end writes.
    pub fn receive_pages(&self) -> Pages {
        Pages { count: self.receive as usize, access: Access::Write }
    }
}

/// The reason why a pair cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// The page of a ring is unusable.
    #[error(transparent)]
    Ring(#[from] LayoutError),
    /// The buffer pools cannot be created.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The transmit ring cannot carry every packet that the pools can hold.
    #[error(transparent)]
    Transmit(#[from] tx::AttachError),
    /// The receive ring's pages cannot hold every packet that may come.
    #[error(transparent)]
    Receive(#[from] rx::AttachError),
}

/// The addresses of a pair in its arena: of its [rings](PairConfig::RINGS), of the [pages to send
/// from](PairConfig::transmit_pages) and of those [to receive into](PairConfig::receive_pages).
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// Address of the transmit ring, which the receive ring follows a page later.
    pub rings: u64,
    /// Address of the buffers to send from.
    pub transmit: u64,
    /// Address of the pages to receive into.
    pub receive: u64,
}

/// A queue pair, its buffers, and its events. It belongs to one thread.
#[derive(Debug)]
pub struct Pair {
    /// Buffers for packets to send, and for small copies.
    pub pools: Pools,
    /// The receive queue of the pair.
    pub receive: Receive,
    /// The transmit queue of the pair.
    pub transmit: Transmit,
    events: Events,
}

impl Pair {
    /// Creates a pair at `places` of `arena`, for a back end that accepts the frames of `accepts`;
    /// no page is posted yet.
    ///
    /// # Errors
    /// Any [`PairError`].
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

    /// Returns the pair's event channels.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Asks for an event when a packet was sent or has come; returns true if that is so already,
    /// and then no event comes. Each event needs a new call.
    pub fn arm(&mut self) -> bool {
        let sent = self.transmit.driver().final_check();
        self.receive.driver().final_check() || sent
    }

    /// Returns the violation that broke one of the queues, if any.
    #[inline]
    pub fn fault(&mut self) -> Option<Fault> {
        self.receive.driver().fault().or_else(|| self.transmit.driver().fault())
    }

    /// Posts pages wherever the ring has room; returns true if the back end wants an event.
    #[inline]
    pub fn refill(&mut self) -> bool {
        self.receive.refill()
    }

    /// Takes back packets that the back end has sent; returns how many.
    #[inline]
    pub fn reclaim(&mut self) -> usize {
        self.transmit.reclaim(&mut self.pools)
    }

    /// Queues a copy of a frame; returns false if there is no room or no buffer. [`TxQueue::flush`]
    /// publishes it to the back end.
    #[inline]
    pub fn send_frame(&mut self, header: &Header, frame: &[u8]) -> bool {
        self.transmit.try_send_frame(header, frame, &mut self.pools)
    }

    /// Queues a packet, or recycles it and returns false if there is no room.
    #[inline]
    pub fn send(&mut self, chain: Chain) -> bool {
        self.transmit.try_send(chain, &mut self.pools)
    }
}
