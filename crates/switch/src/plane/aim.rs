//! Which queue pair of a machine a frame goes to, and what may be in it: the same for all workers, as each looks at the
//! same [`PortShared`].

use std::sync::Arc;

use ringferry_packet::flow::flow_hash;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Offloads;
use ringferry_virtio_net::device::Steering;

use super::crossing::Crossing;
use super::moment::Moment;
use super::shared::{PortShared, Ready};
use crate::counters::DropReason;

/// One worker's view of a port's pairs.
pub(super) struct Aim {
    shared: Arc<PortShared>,
    /// What `steering` and `offloads` were made from.
    ready: Ready,
    steering: Steering,
    /// What the driver takes.
    offloads: Offloads,
}

impl Aim {
    /// For a port without pairs.
    pub(super) fn new(shared: Arc<PortShared>) -> Self {
        let mut steering = Steering::automatic(Arc::clone(&shared.flows));
        steering.set_ready([]);
        Self { shared, ready: Ready::default(), steering, offloads: Offloads::all() }
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
        self.steering.prefer(|pair| crossing.owner(pair) == crossing.me());
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
}
