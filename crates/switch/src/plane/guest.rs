//! The queues of a virtual machine, as the worker owns them.

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, ReadSlice};
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::parse::flow_hash;
use ringferry_packet::vnet::{Header, Offloads};
use ringferry_ring::{Device, Fault};
use ringferry_sys::eventfd::EventFd;
use ringferry_virtio_net::device::{Receiveq, Refused, Rejected, Transmitq};

use super::command::RingStart;
use crate::counters::{DropReason, PortCounters};
use crate::quiet::Limit;

/// What both kinds of queue have.
pub(super) struct Common {
    pub(super) memory: Arc<GuestMemory>,
    pub(super) enabled: bool,
    pub(super) kick: Option<EventFd>,
    pub(super) call: Option<EventFd>,
    err: Option<EventFd>,
    /// The fault was counted, and the front end told.
    reported: bool,
}

impl Common {
    /// Calls the guest. An event that does not work is used no more: the guest has to poll.
    pub(super) fn ring_call(&mut self, port: &str, counters: &PortCounters) {
        let Some(call) = &self.call else { return };
        counters.calls.add(1);
        if let Err(error) = call.signal() {
            tracing::warn!(port, "the call event does not work and is used no more: {error}");
            self.call = None;
        }
    }

    /// Says a fault once.
    #[cold]
    fn report(&mut self, fault: Fault, what: &str, limit: &mut Limit, port: &str, counters: &PortCounters) {
        if std::mem::replace(&mut self.reported, true) {
            return;
        }
        counters.ring_errors.add(1);
        if let Some(err) = &self.err {
            let _ = err.signal();
        }
        if limit.allows() {
            tracing::warn!(port, queue = what, "queue is broken until the guest resets it: {fault}");
        }
    }
}

/// A transmitq: what the guest sends.
pub(super) struct TxQueue {
    pub(super) queue: Transmitq<Area>,
    pub(super) common: Common,
    /// What was already taken over into the port's counters.
    seen: Rejected,
}

/// A receiveq: what the guest receives.
pub(super) struct RxQueue {
    pub(super) queue: Receiveq<Area>,
    pub(super) common: Common,
    /// Frames were delivered that the guest has not been shown.
    dirty: bool,
}

/// A virtual machine's port. Index `i` of either vector is queue pair `i`.
pub(super) struct Guest {
    pub(super) tx: Vec<Option<TxQueue>>,
    pub(super) rx: Vec<Option<RxQueue>>,
    /// Receiveqs that can be delivered to, by pair.
    ready: Vec<u16>,
    /// One line about a broken queue per interval: a guest may break, reset and break it again;
    /// `ring_errors` counts them all.
    pub(super) limit: Limit,
    /// What the driver takes.
    offloads: Offloads,
}

impl Guest {
    /// A port without rings.
    pub(super) fn new() -> Self {
        Self {
            tx: Vec::new(),
            rx: Vec::new(),
            ready: Vec::new(),
            limit: Limit::new(1),
            offloads: Offloads::empty(),
        }
    }

    /// Serves one more ring.
    pub(super) fn start(&mut self, start: RingStart) {
        let RingStart { index, ring, memory, features, enabled, kick, call, err } = start;
        let common = Common { memory, enabled, kick, call, err, reported: false };
        let pair = usize::from(index / 2);
        self.offloads = features.guest_offloads();
        if index.is_multiple_of(2) {
            let queue = RxQueue { queue: Receiveq::new(ring, features), common, dirty: false };
            put(&mut self.rx, pair, queue);
        } else {
            let queue = TxQueue { queue: Transmitq::new(ring, features), common, seen: Rejected::default() };
            put(&mut self.tx, pair, queue);
        }
        self.update_ready();
    }

    /// Lets go of a ring; returns where it stands.
    pub(super) fn stop(&mut self, index: u16) -> Option<u16> {
        let pair = usize::from(index / 2);
        let base = if index.is_multiple_of(2) {
            self.rx.get_mut(pair)?.take()?.queue.ring().base()
        } else {
            self.tx.get_mut(pair)?.take()?.queue.ring().base()
        };
        self.update_ready();
        Some(base)
    }

    /// The common part of a ring.
    pub(super) fn common(&mut self, index: u16) -> Option<&mut Common> {
        let pair = usize::from(index / 2);
        if index.is_multiple_of(2) {
            Some(&mut self.rx.get_mut(pair)?.as_mut()?.common)
        } else {
            Some(&mut self.tx.get_mut(pair)?.as_mut()?.common)
        }
    }

    /// Lets packets flow through a ring, or not.
    pub(super) fn enable(&mut self, index: u16, enabled: bool) {
        if let Some(common) = self.common(index) {
            common.enabled = enabled;
        }
        self.update_ready();
    }

    fn update_ready(&mut self) {
        let usable = |queue: &Option<RxQueue>| queue.as_ref().is_some_and(|queue| queue.common.enabled);
        let pairs = (0u16..).zip(&self.rx).filter(|(_, queue)| usable(queue));
        self.ready = pairs.map(|(pair, _)| pair).collect();
    }

    /// What the driver takes. Without a driver anything, as no work should go into what is dropped.
    pub(super) fn offloads(&self) -> Offloads {
        if self.ready.is_empty() { Offloads::all() } else { self.offloads }
    }

    /// Every ring with its index.
    pub(super) fn rings(&mut self) -> impl Iterator<Item = (u16, &mut Device<Area>)> {
        let rx = (0u16..).zip(&mut self.rx);
        let tx = (0u16..).zip(&mut self.tx);
        let rx = rx.filter_map(|(pair, queue)| Some((2 * pair, queue.as_mut()?.queue.ring())));
        let tx = tx.filter_map(|(pair, queue)| Some((2 * pair + 1, queue.as_mut()?.queue.ring())));
        rx.chain(tx)
    }

    /// Announces about how many frames follow for this port.
    #[inline]
    pub(super) fn expect(&mut self, frames: usize) {
        for &pair in &self.ready {
            if let Some(queue) = &mut self.rx[usize::from(pair)] {
                queue.queue.expect(frames);
            }
        }
    }

    /// The receiveq for a frame that starts with `prefix`: stable for a flow.
    #[inline]
    fn pick(&mut self, prefix: &[u8]) -> Option<&mut RxQueue> {
        let pair = match self.ready[..] {
            [] => return None,
            [only] => only,
            ref many => many[flow_hash(prefix) as usize % many.len()],
        };
        self.rx[usize::from(pair)].as_mut()
    }

    /// Copies a frame into the guest's buffers.
    #[inline]
    pub(super) fn deliver(
        &mut self,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
    ) -> Result<(), DropReason> {
        let queue = self.pick(first).ok_or(DropReason::LinkDown)?;
        let mut translator = queue.common.memory.translator();
        match queue.queue.deliver(&mut translator, header, first, rest) {
            Ok(()) => {
                queue.dirty = true;
                Ok(())
            }
            Err(Refused::NoBuffers) => Err(DropReason::NoReceiveBuffers),
            Err(Refused::TooBig) => Err(DropReason::TxTooBig),
            Err(Refused::Broken) => Err(DropReason::LinkDown),
        }
    }

    /// Shows the guest what was delivered, and calls it if it wants.
    #[inline]
    pub(super) fn flush(&mut self, port: &str, counters: &PortCounters) {
        for queue in self.rx.iter_mut().flatten() {
            // Also a queue that took nothing may hold chains it looked at.
            let call = queue.queue.flush();
            if std::mem::take(&mut queue.dirty) && call {
                queue.common.ring_call(port, counters);
            }
            if let Some(fault) = queue.queue.ring().fault() {
                queue.common.report(fault, "receiveq", &mut self.limit, port, counters);
            }
        }
    }
}

impl TxQueue {
    /// Takes a burst of what the guest sent. Returns how many packets were taken, and whether they
    /// may be forwarded: a disabled ring is emptied for nothing.
    #[inline]
    pub(super) fn poll<'m>(
        &mut self,
        memory: &'m GuestMemory,
        max: usize,
        burst: &mut Burst<'m>,
        counters: &PortCounters,
    ) -> (usize, bool) {
        let taken = self.queue.poll(memory, max, burst);
        if taken > 0 {
            let bytes: u64 = burst.frames().iter().map(|frame: &Frame| u64::from(frame.len)).sum();
            counters.rx_packets.add(taken as u64);
            counters.rx_bytes.add(bytes);
            let now = self.queue.rejected();
            if now != self.seen {
                let drops = &counters.drops;
                drops.add(DropReason::RxTooShort, now.too_short - self.seen.too_short);
                drops.add(DropReason::RxTooBig, now.too_long - self.seen.too_long);
                drops.add(DropReason::RxBadHeader, now.bad_header - self.seen.bad_header);
                drops.add(DropReason::RxBadMemory, now.bad_memory - self.seen.bad_memory);
                self.seen = now;
            }
            if !self.common.enabled {
                counters.drops.add(DropReason::LinkDown, burst.len() as u64);
            }
        }
        (taken, self.common.enabled)
    }

    /// Gives the guest its buffers back.
    #[inline]
    pub(super) fn complete(&mut self, limit: &mut Limit, port: &str, counters: &PortCounters) {
        if self.queue.complete() {
            self.common.ring_call(port, counters);
        }
        if let Some(fault) = self.queue.ring().fault() {
            self.common.report(fault, "transmitq", limit, port, counters);
        }
    }
}

fn put<T>(queues: &mut Vec<Option<T>>, at: usize, queue: T) {
    if queues.len() <= at {
        queues.resize_with(at + 1, || None);
    }
    queues[at] = Some(queue);
}
