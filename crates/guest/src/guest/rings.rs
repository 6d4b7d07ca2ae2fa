//! The queue pairs of `ringferry guest`, with their memory: what goes on when a back end comes back.
//!
//! A back end that ends without a word leaves rings that it may have worked on to the last moment, and that it may
//! have scribbled over. So nothing in shared memory is believed: what came back before is collected, and everything else is
//! written anew from private memory ([`Driver::resume`](ringferry_ring::Driver::resume)), and the next back end goes on
//! there; no packet is lost. A back end that says that it cannot (by the err event of a ring) gets new rings, and so does one
//! that comes when nothing at all has come back since the rings were last taken over: the one that scribbles may still have
//! them. When anything else about the device has changed the rings are made anew, too, and what was on its way through
//! the old ones is lost.
//!
//! [`Rings`] holds the memory of all pairs. Each [`PairRings`] is lent to the thread of its pair for as long as
//! packets pass.

use std::io;
use std::os::fd::AsFd;

use ringferry_packet::buffer::Chain;
use ringferry_sys::eventfd::EventFd;
use ringferry_vhost_user::{Connection, FrontendError, RingPlan};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Arena, Pair, PairConfig, Queue};

use super::GuestError;

/// The events of one queue.
pub(super) struct Events {
    pub(super) kick: EventFd,
    pub(super) call: EventFd,
    /// The back end signals it when it finds the ring broken.
    pub(super) err: EventFd,
}

impl Events {
    fn new() -> io::Result<Events> {
        Ok(Events { kick: EventFd::new()?, call: EventFd::new()?, err: EventFd::new()? })
    }

    fn plan(&self, queue: Queue, base: Option<u32>, enabled: bool) -> RingPlan<'_> {
        let Queue { size, desc, avail, used } = queue;
        let [kick, call, err] = [&self.kick, &self.call, &self.err].map(|event| Some(event.as_fd()));
        RingPlan { size, base, desc, avail, used, kick, call, err, enabled }
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

    /// How many buffers the back end has given back, of both rings.
    fn given_back(&self) -> u64 {
        let (rx, tx) = (self.pair.receiveq.stats(), self.pair.transmitq.stats());
        tx.reclaimed + rx.descriptors + rx.rx_length_errors
    }

    /// Writes both rings anew for the next back end; where it begins. `None` if one of them is broken.
    fn resume(&mut self) -> Option<[u32; 2]> {
        // What the back end before said of its own rings.
        let _ = self.rx.err.drain();
        let _ = self.tx.err.drain();
        self.pair.reclaim();
        let rx = self.pair.receiveq.driver().ring().resume()?;
        let tx = self.pair.transmitq.driver().ring().resume()?;
        Some([rx.into(), tx.into()])
    }
}

/// All pairs.
pub(super) struct Rings {
    features: Features,
    mtu: u16,
    /// One memory for all: a back end may take no more than eight.
    arena: Arena,
    pub(super) pairs: Vec<PairRings>,
    /// What had been given back when a back end last went on with these rings.
    resumed_at: Option<u64>,
}

impl Rings {
    /// New ones, for so many pairs.
    pub(super) fn new(features: Features, config: &PairConfig, pairs: u16) -> Result<Rings, GuestError> {
        let mut arena = Arena::new(config.arena_bytes(features).saturating_mul(pairs.into()))?;
        let pairs = (0..pairs).map(|_| PairRings::new(&mut arena, features, config));
        let pairs = pairs.collect::<Result<_, _>>()?;
        Ok(Rings { features, mtu: config.mtu, arena, pairs, resumed_at: None })
    }

    /// How many buffers back ends have given back.
    pub(super) fn given_back(&self) -> u64 {
        self.pairs.iter().map(PairRings::given_back).sum()
    }

    /// Writes the rings anew for a device with these features and as many pairs, and returns where it begins in each; `None`
    /// if it needs new rings.
    pub(super) fn resume(&mut self, features: Features, mtu: u16, pairs: u16) -> Option<Vec<u32>> {
        if features != self.features || mtu != self.mtu || self.pairs.len() != usize::from(pairs) {
            return None;
        }
        let bases: Vec<_> = self.pairs.iter_mut().map(PairRings::resume).collect::<Option<_>>()?;
        let given_back = self.given_back();
        // The last one may have been as lost with them as the next one will be.
        if self.resumed_at.replace(given_back) == Some(given_back) {
            return None;
        }
        Some(bases.into_flattened())
    }

    /// Starts the device with them, at `bases` or at the beginning, the first `enabled` pairs enabled.
    pub(super) fn start(
        &mut self,
        connection: &mut Connection,
        bases: Option<&[u32]>,
        enabled: u16,
    ) -> Result<(), FrontendError> {
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
        connection.start(&[(self.arena.region(), self.arena.fd())], &plans)
    }
}
