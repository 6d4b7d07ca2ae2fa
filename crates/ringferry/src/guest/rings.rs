//! The two queues of `ringferry guest`, with their memory: what goes on when a back end comes back.
//!
//! A back end that ends without a word leaves rings that it may have worked on to the last moment. A
//! split ring tells how far it came by its used index, a packed one by the in-flight region, if the
//! back end kept one; then the next back end goes on there and no packet is lost. Otherwise, and
//! when anything else about the device has changed, the rings are made anew, and what was on its way
//! through the old ones is lost.

use std::io;
use std::os::fd::AsFd;

use ringferry_packet::buffer::Chain;
use ringferry_ring::{Parts, part_bytes};
use ringferry_sys::eventfd::EventFd;
use ringferry_vhost_user::{Connection, FrontendError, InflightRegion, RingPlan, resume_base};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Arena, Pair, PairConfig, Queue};

use super::GuestError;

/// The events of one queue.
pub(super) struct Events {
    pub(super) kick: EventFd,
    pub(super) call: EventFd,
}

impl Events {
    fn new() -> io::Result<Events> {
        Ok(Events { kick: EventFd::new()?, call: EventFd::new()? })
    }

    fn plan(&self, queue: Queue, base: Option<u32>) -> RingPlan<'_> {
        let Queue { size, desc, avail, used } = queue;
        let (kick, call) = (Some(self.kick.as_fd()), Some(self.call.as_fd()));
        RingPlan { size, base, desc, avail, used, kick, call, err: None, enabled: true }
    }
}

/// Receiveq and transmitq.
pub(super) struct Rings {
    features: Features,
    mtu: u16,
    arena: Arena,
    pub(super) pair: Pair,
    /// A packet that the transmitq had no room for.
    pub(super) waiting: Option<Chain>,
    pub(super) rx: Events,
    pub(super) tx: Events,
    /// Length errors that were counted already.
    pub(super) length_errors: u64,
    /// Where the last back end kept the positions of packed rings.
    inflight: Option<InflightRegion>,
}

impl Rings {
    /// New ones.
    pub(super) fn new(features: Features, config: &PairConfig) -> Result<Rings, GuestError> {
        let mut arena = Arena::new(config.arena_bytes(features))?;
        let pair = Pair::new(&mut arena, features, config)?;
        Ok(Rings {
            features,
            mtu: config.mtu,
            arena,
            pair,
            waiting: None,
            rx: Events::new()?,
            tx: Events::new()?,
            length_errors: 0,
            inflight: None,
        })
    }

    /// Where these rings go on in a device with these features, if they can.
    pub(super) fn resume(&self, features: Features, mtu: u16) -> Option<[u32; 2]> {
        if features != self.features || mtu != self.mtu {
            return None;
        }
        let [rx, tx] = &self.pair.queues;
        Some([self.position(0, rx)?, self.position(1, tx)?])
    }

    fn position(&self, index: u16, queue: &Queue) -> Option<u32> {
        let packed = self.features.contains(Features::RING_PACKED);
        let [desc, driver, device] = part_bytes(queue.size, packed);
        let memory = self.arena.memory();
        let parts = Parts {
            size: queue.size,
            desc: memory.area(queue.desc, desc)?,
            driver: memory.area(queue.avail, driver)?,
            device: memory.area(queue.used, device)?,
        };
        resume_base(index, &parts, packed, self.inflight.as_ref())
    }

    /// Starts the device with them, at `bases` or at the beginning.
    pub(super) fn start(
        &mut self,
        connection: &mut Connection,
        bases: Option<[u32; 2]>,
    ) -> Result<(), FrontendError> {
        if let Some(region) = self.inflight.take() {
            connection.set_inflight(region);
        }
        let [rx_queue, tx_queue] = self.pair.queues;
        let [rx_base, tx_base] = bases.map_or([None; 2], |bases| bases.map(Some));
        let plans = [self.rx.plan(rx_queue, rx_base), self.tx.plan(tx_queue, tx_base)];
        connection.start(&[(self.arena.region(), self.arena.fd())], &plans)?;
        // The back end before may have taken kicks with it: one that waits for them would wait for ever.
        for events in [&self.rx, &self.tx] {
            let _ = events.kick.signal();
        }
        Ok(())
    }

    /// Keeps what is needed to go on with the back end that comes after `connection`'s.
    pub(super) fn keep(mut self, connection: &mut Connection) -> Rings {
        self.inflight = connection.take_inflight();
        self
    }

    /// Packets that were sent and not yet taken by the back end, as far as it said.
    pub(super) fn sent_and_open(&mut self) -> u64 {
        self.pair.reclaim();
        self.pair.transmitq.in_flight() as u64 + u64::from(self.waiting.is_some())
    }
}
