//! Which queue pair of a machine a frame goes to, and what may be in it: the same for all workers, as each looks at the
//! same [`PortShared`]. And what becomes of a frame whose pair is with another worker, or on its way from there.

use std::sync::Arc;

use ringferry_memory::ReadSlice;
use ringferry_packet::flow::flow_hash;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::{Header, Offloads};
use ringferry_virtio_net::device::Steering;

use super::crossing::{Crossing, DEPTH, gather};
use super::moment::Moment;
use super::shared::{PortShared, Ready};
use crate::counters::DropReason;
use crate::fdb::PortId;

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivered {
    /// The guest has it.
    Here,
    /// It is on its way: whoever has it counts it.
    Away,
}

/// Frames for a pair that is on its way from another worker to this one.
#[derive(Debug)]
struct Expected {
    pair: u16,
    held: Vec<(Header, Vec<u8>)>,
}

/// One worker's view of a port's pairs.
pub(super) struct Aim {
    id: PortId,
    shared: Arc<PortShared>,
    expected: Option<Expected>,
    /// What `steering` and `offloads` were made from.
    ready: Ready,
    steering: Steering,
    /// What the driver takes.
    offloads: Offloads,
}

impl Aim {
    /// For a port without pairs.
    pub(super) fn new(id: PortId, shared: Arc<PortShared>) -> Self {
        let mut steering = Steering::automatic(Arc::clone(&shared.flows));
        steering.set_ready([]);
        Self { id, shared, expected: None, ready: Ready::default(), steering, offloads: Offloads::all() }
    }

    /// Takes note of what the port's pairs and offloads are now; cheap when nothing has changed. Before each burst.
    #[inline]
    pub(super) fn look(&mut self, crossing: &Crossing) {
        let ready = self.shared.ready();
        if ready != self.ready {
            self.changed(ready, crossing);
        }
    }

    #[cold]
    fn changed(&mut self, ready: Ready, crossing: &Crossing) {
        self.ready = ready;
        self.steering.set_ready(ready.pairs());
        self.steering.prefer(|pair| self.shared.owner(pair) == crossing.me());
        let none = self.steering.ready().is_empty();
        // Without a driver anything, as no work should go into what is dropped.
        self.offloads = if none { Offloads::all() } else { self.shared.offloads() };
    }

    /// What the driver takes.
    #[inline]
    pub(super) fn offloads(&self) -> Offloads {
        self.offloads
    }

    /// Remembers where the machine sends the flows of a burst from, if it matters.
    #[inline]
    pub(super) fn learn(&mut self, pair: u16, burst: &Burst<'_>, crossing: &Crossing, now: &Moment) {
        self.look(crossing);
        if self.steering.learns() {
            for frame in burst.frames() {
                self.steering.learn(flow_hash(frame.prefix()), pair, now.micros());
            }
        }
    }

    /// The pair for a frame that begins with `first`.
    #[inline]
    pub(super) fn choose(&mut self, first: &[u8], now: &Moment) -> Result<u16, DropReason> {
        match self.steering.ready() {
            [] => Err(DropReason::LinkDown),
            [only] => Ok(*only),
            _ => self.steering.choose(first, now.micros()).0.ok_or(DropReason::LinkDown),
        }
    }

    /// Hands a frame to the worker that has its pair, which is not this one; or keeps it until the pair is here.
    pub(super) fn elsewhere(
        &mut self,
        pair: u16,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        crossing: &mut Crossing,
    ) -> Result<Delivered, DropReason> {
        let owner = self.shared.owner(pair);
        if owner != crossing.me() {
            crossing.send(owner, self.id, header, first, rest)?;
            return Ok(Delivered::Away);
        }
        let expected = self.expected.as_mut().filter(|expected| expected.pair == pair);
        let Expected { held, .. } = expected.ok_or(DropReason::LinkDown)?;
        if held.len() == DEPTH {
            return Err(DropReason::WorkerBusy);
        }
        let mut frame = Vec::new();
        gather(first, rest, &mut frame);
        held.push((header, frame));
        Ok(Delivered::Away)
    }

    /// From now on frames for a pair of this worker that is not there are kept, until [`Aim::arrived`].
    pub(super) fn expect(&mut self, pair: u16) {
        self.expected = Some(Expected { pair, held: Vec::new() });
    }

    /// The pair is there; the frames that were kept for it.
    pub(super) fn arrived(&mut self) -> Vec<(Header, Vec<u8>)> {
        self.expected.take().map_or_else(Vec::new, |expected| expected.held)
    }
}
