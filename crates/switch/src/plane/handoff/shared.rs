//! The state of a port with queue pairs that all workers and the control plane share: [`PortShared`].
//!
//! **Life cycle.** The control side of a port makes one when the port is added, and gives it to the queue side and the [selector](super::selector) of
//! every worker, each of which keeps an `Arc` of it; it ends with the last of them, and outlives the front ends that connect to the port in turn.
//! Nothing is locked: each word has writers that are named at it, and is read by any thread.
//!
//! Whoever reads begins with [`ready`](PortShared::ready), once for each burst: it is one word, which changes whenever pairs, offloads or owners do.
//! Offloads and owners are stored before `ready` is published, so whoever sees the new `ready` sees them, too.

use std::array;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ringferry_packet::vnet::Offloads;
use ringferry_virtio_net::device::FlowTable;

use crate::config::DEFAULT_MTU;
use crate::counters::PairCounters;
use crate::plane::handoff::primitives::Word;

/// Queue pairs offered. A guest uses as many as it enables; the rest cost nothing.
pub(crate) const PAIRS: u16 = 16;

/// The shared state of one port. Each word has one writer, its owner, and is read without a lock.
#[derive(Debug)]
pub struct PortShared<W = AtomicU64> {
    /// The pairs whose receiveqs can be delivered to, one bit each: written by the worker that owns the pair. Above
    /// them a number that changes with the offloads and the owners.
    ready: W,
    /// The worker that owns each pair: written by the control plane.
    owners: [W; PAIRS as usize],
    /// Offloads that the driver takes: written by the control plane before any ring is started.
    offloads: W,
    /// Largest packet that the driver takes, in bytes behind the Ethernet header: written by the control
    /// plane.
    mtu: W,
    /// The queue pair of each flow that the guest sends.
    pub(crate) flows: Arc<FlowTable>,
    /// Counters of each pair; written by the worker that owns the pair.
    pub(crate) pairs: [PairCounters; PAIRS as usize],
}

/// The value of [`PortShared::ready`]: the pairs that can be delivered to, and a number that tells whether offloads or owners have changed since
/// another value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ready(u64);

impl Ready {
    const NUMBER: u32 = 32;

    /// Returns the pairs in ascending order.
    pub(crate) fn pairs(self) -> impl Iterator<Item = u16> {
        (0..PAIRS).filter(move |pair| self.0 & 1 << pair != 0)
    }
}

impl<W: Word> Default for PortShared<W> {
    fn default() -> Self {
        Self {
            ready: W::new(0),
            owners: array::from_fn(|_| W::new(0)),
            offloads: W::new(0),
            mtu: W::new(DEFAULT_MTU.into()),
            flows: Arc::default(),
            pairs: array::from_fn(|_| PairCounters::default()),
        }
    }
}

impl<W: Word> PortShared<W> {
    /// Sets the offloads that the driver takes, for the rings that are started next.
    pub(crate) fn set_offloads(&self, offloads: Offloads) {
        if self.offloads() != offloads {
            self.offloads.set(offloads.bits().into());
            self.changed();
        }
    }

    /// Increments the change count, so that every later [`PortShared::ready`] differs.
    fn changed(&self) {
        self.ready.publish(1 << Ready::NUMBER);
    }

    /// Sets the owner of a pair.
    pub(crate) fn set_owner(&self, pair: u16, worker: usize) {
        if let Some(owner) = self.owners.get(usize::from(pair)) {
            owner.set(worker as u64);
            self.changed();
        }
    }

    /// Returns the worker that owns a pair; the first, for a pair that does not exist.
    pub(crate) fn owner(&self, pair: u16) -> usize {
        self.owners.get(usize::from(pair)).map_or(0, |owner| owner.get() as usize)
    }

    /// Returns the offloads that the driver takes.
    pub(crate) fn offloads(&self) -> Offloads {
        Offloads::from_bits_retain(self.offloads.get() as u8)
    }

    /// Sets the MTU that senders are told when their packets do not fit.
    pub(crate) fn set_mtu(&self, mtu: u16) {
        self.mtu.set(mtu.into());
    }

    /// Returns the largest packet that the driver takes, in bytes.
    pub(crate) fn mtu(&self) -> u16 {
        self.mtu.get() as u16
    }

    /// Sets whether a pair's receiveq can be delivered to.
    pub(crate) fn set_ready(&self, pair: u16, ready: bool) {
        if pair < PAIRS {
            self.ready.set_bits(1 << pair, ready);
        }
    }

    /// Returns the pairs that can be delivered to. A thread that sees a change sees the offloads that belong
    /// to it.
    #[inline]
    pub(crate) fn ready(&self) -> Ready {
        Ready(self.ready.observe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_come_and_go_and_offloads_show() {
        let port = PortShared::<AtomicU64>::default();
        assert_eq!(port.ready().pairs().count(), 0);
        port.set_ready(0, true);
        port.set_ready(5, true);
        port.set_ready(200, true);
        assert_eq!(port.ready().pairs().collect::<Vec<_>>(), [0, 5]);
        let before = port.ready();
        port.set_offloads(Offloads::CSUM);
        assert_ne!(port.ready(), before);
        assert_eq!(port.ready().pairs().collect::<Vec<_>>(), [0, 5]);
        let before = port.ready();
        port.set_offloads(Offloads::CSUM);
        assert_eq!(port.ready(), before, "nothing has changed");
        port.set_ready(0, false);
        assert_eq!(port.ready().pairs().collect::<Vec<_>>(), [5]);
        let before = port.ready();
        port.set_owner(5, 3);
        assert_ne!(port.ready(), before);
        assert_eq!([4, 5, 200].map(|pair| port.owner(pair)), [0, 3, 0]);
    }
}
