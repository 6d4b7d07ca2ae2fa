//! The queue pairs of `ringferry guest`, with their memory: what goes on when a back end comes back.
//!
//! A back end that ends without a word leaves rings that it may have worked on to the last moment. A
//! split ring tells how far it came by its used index, a packed one by the in-flight region, if the
//! back end kept one; then the next back end goes on there and no packet is lost. Otherwise, and
//! when anything else about the device has changed, the rings are made anew, and what was on its way
//! through the old ones is lost.
//!
//! [`Rings`] holds the memory of all pairs. Each [`PairRings`] is lent to the thread of its pair for as long as
//! packets pass.

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

    fn plan(&self, queue: Queue, base: Option<u32>, enabled: bool) -> RingPlan<'_> {
        let Queue { size, desc, avail, used } = queue;
        let (kick, call) = (Some(self.kick.as_fd()), Some(self.call.as_fd()));
        RingPlan { size, base, desc, avail, used, kick, call, err: None, enabled }
    }
}

/// Receiveq and transmitq of one pair.
pub(super) struct PairRings {
    pub(super) pair: Pair,
    /// A packet that the transmitq had no room for.
    pub(super) waiting: Option<Chain>,
    pub(super) rx: Events,
    pub(super) tx: Events,
    /// Length errors that were counted already.
    pub(super) length_errors: u64,
}

impl PairRings {
    fn new(arena: &mut Arena, features: Features, config: &PairConfig) -> Result<PairRings, GuestError> {
        let pair = Pair::new(arena, features, config)?;
        let (rx, tx) = (Events::new()?, Events::new()?);
        Ok(PairRings { pair, waiting: None, rx, tx, length_errors: 0 })
    }

    /// Packets that were sent and not yet taken by the back end, as far as it said.
    pub(super) fn sent_and_open(&mut self) -> u64 {
        self.pair.reclaim();
        self.pair.transmitq.in_flight() as u64 + u64::from(self.waiting.is_some())
    }
}

/// All pairs.
pub(super) struct Rings {
    features: Features,
    mtu: u16,
    /// One memory for all: a back end may take no more than eight.
    arena: Arena,
    pub(super) pairs: Vec<PairRings>,
    /// Where the last back end kept the positions of packed rings.
    inflight: Option<InflightRegion>,
}

impl Rings {
    /// New ones, for so many pairs.
    pub(super) fn new(features: Features, config: &PairConfig, pairs: u16) -> Result<Rings, GuestError> {
        let mut arena = Arena::new(config.arena_bytes(features).saturating_mul(pairs.into()))?;
        let pairs = (0..pairs).map(|_| PairRings::new(&mut arena, features, config));
        let pairs = pairs.collect::<Result<_, _>>()?;
        Ok(Rings { features, mtu: config.mtu, arena, pairs, inflight: None })
    }

    /// Where these rings go on in a device with these features and as many pairs, if they can.
    pub(super) fn resume(&self, features: Features, mtu: u16, pairs: u16) -> Option<Vec<u32>> {
        if features != self.features || mtu != self.mtu || self.pairs.len() != usize::from(pairs) {
            return None;
        }
        let queues = self.pairs.iter().flat_map(|rings| &rings.pair.queues);
        (0..).zip(queues).map(|(index, queue)| self.position(index, queue)).collect()
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

    /// Starts the device with them, at `bases` or at the beginning, the first `enabled` pairs enabled.
    pub(super) fn start(
        &mut self,
        connection: &mut Connection,
        bases: Option<&[u32]>,
        enabled: u16,
    ) -> Result<(), FrontendError> {
        if let Some(region) = self.inflight.take() {
            connection.set_inflight(region);
        }
        // Their buffers are posted before the device hears of them.
        for rings in self.pairs.iter_mut().take(enabled.into()) {
            rings.pair.refill();
        }
        let mut plans = Vec::with_capacity(2 * self.pairs.len());
        for (number, rings) in self.pairs.iter().enumerate() {
            for (events, queue) in [&rings.rx, &rings.tx].into_iter().zip(rings.pair.queues) {
                let base = bases.and_then(|bases| bases.get(plans.len()).copied());
                plans.push(events.plan(queue, base, number < enabled.into()));
            }
        }
        connection.start(&[(self.arena.region(), self.arena.fd())], &plans)?;
        // The back end before may have taken kicks with it: one that waits for them would wait for ever.
        for rings in self.pairs.iter().take(enabled.into()) {
            let _ = rings.rx.kick.signal();
            let _ = rings.tx.kick.signal();
        }
        Ok(())
    }

    /// Keeps what is needed to go on with the back end that comes after `connection`'s.
    pub(super) fn keep(mut self, connection: &mut Connection) -> Rings {
        self.inflight = connection.take_inflight();
        self
    }
}
