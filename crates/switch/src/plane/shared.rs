//! What all workers, and the control plane, know of a virtual machine's port.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ringferry_virtio_net::Features;
use ringferry_virtio_net::device::FlowTable;

use crate::counters::PairCounters;

/// Queue pairs offered. A guest uses as many as it enables; the rest cost nothing.
pub(crate) const PAIRS: u16 = 16;

/// See the head of this file. Words are written by the one who owns what they say, and read without a lock.
#[derive(Debug)]
pub struct PortShared {
    /// The pairs whose receiveqs can be delivered to, one bit each: written by the worker that owns the pair. Above
    /// them a number that changes with the features.
    ready: AtomicU64,
    /// The features agreed on: written by the control plane before any ring is started.
    features: AtomicU64,
    /// Where the guest sends its flows from.
    pub(super) flows: Arc<FlowTable>,
    /// By pair; written by the worker that owns the pair.
    pub(crate) pairs: [PairCounters; PAIRS as usize],
}

/// What says whether anything has changed: see [`PortShared::ready`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ready(u64);

impl Ready {
    const NUMBER: u32 = 32;

    /// The pairs, in ascending order.
    pub(super) fn pairs(self) -> impl Iterator<Item = u16> {
        (0..PAIRS).filter(move |pair| self.0 & 1 << pair != 0)
    }
}

impl Default for PortShared {
    fn default() -> Self {
        Self {
            ready: AtomicU64::new(0),
            features: AtomicU64::new(0),
            flows: Arc::default(),
            pairs: std::array::from_fn(|_| PairCounters::default()),
        }
    }
}

impl PortShared {
    /// What has been agreed on, for the rings that are started next.
    pub(crate) fn set_features(&self, features: Features) {
        if self.features.swap(features.bits(), Ordering::Relaxed) != features.bits() {
            self.ready.fetch_add(1 << Ready::NUMBER, Ordering::Release);
        }
    }

    /// The features agreed on.
    pub(super) fn features(&self) -> Features {
        Features::from_bits_retain(self.features.load(Ordering::Relaxed))
    }

    /// Says whether a pair's receiveq can be delivered to.
    pub(super) fn set_ready(&self, pair: u16, ready: bool) {
        if pair >= PAIRS {
            return;
        }
        let bit = 1 << pair;
        if ready {
            self.ready.fetch_or(bit, Ordering::AcqRel);
        } else {
            self.ready.fetch_and(!bit, Ordering::AcqRel);
        }
    }

    /// What can be delivered to. Whoever sees a change sees the features that belong to it.
    #[inline]
    pub(super) fn ready(&self) -> Ready {
        Ready(self.ready.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_come_and_go_and_features_show() {
        let port = PortShared::default();
        assert_eq!(port.ready().pairs().count(), 0);
        port.set_ready(0, true);
        port.set_ready(5, true);
        port.set_ready(200, true);
        assert_eq!(port.ready().pairs().collect::<Vec<_>>(), [0, 5]);
        let before = port.ready();
        port.set_features(Features::MQ);
        assert_ne!(port.ready(), before);
        assert_eq!(port.ready().pairs().collect::<Vec<_>>(), [0, 5]);
        let before = port.ready();
        port.set_features(Features::MQ);
        assert_eq!(port.ready(), before, "nothing has changed");
        port.set_ready(0, false);
        assert_eq!(port.ready().pairs().collect::<Vec<_>>(), [5]);
    }
}
