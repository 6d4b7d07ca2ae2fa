//! The queues of a virtual machine, as a worker owns them: those of every pair that is its own.
//!
//! Any worker may have a frame for the machine. Which pair it goes to says the [`Aim`], the same for all workers; a frame for
//! another worker's pair crosses to that worker. Whoever has a pair delivers to it, also while it is being moved.

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, ReadSlice};
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::vnet::{Header, Offloads};
use ringferry_ring::{Device, Fault};
use ringferry_sys::eventfd::EventFd;
use ringferry_virtio_net::device::{Receiveq, Refused, Rejected, Transmitq};

use super::aim::{Aim, Delivered};
use super::command::RingStart;
use super::crossing::Crossing;
use super::moment::Moment;
use super::shared::PortShared;
use crate::counters::{DropReason, PairCounters, PortCounters};
use crate::fdb::PortId;
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
    pub(super) fn ring_call(&mut self, port: &str, counters: &PortCounters, pair: &PairCounters) {
        let Some(call) = &self.call else { return };
        counters.calls.add(1);
        pair.calls.add(1);
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
    /// Frames that were delivered and that the guest has not been shown, and their bytes.
    unseen: (u64, u64),
    /// Frames that found no buffers meanwhile.
    dropped: u64,
}

/// A virtual machine's port. Index `i` of either vector is queue pair `i`; there are rings only of this worker's pairs.
pub(super) struct Guest {
    pub(super) tx: Vec<Option<TxQueue>>,
    pub(super) rx: Vec<Option<RxQueue>>,
    pub(super) shared: Arc<PortShared>,
    pub(super) aim: Aim,
    /// One line about a broken queue per interval: a guest may break, reset and break it again;
    /// `ring_errors` counts them all.
    pub(super) limit: Limit,
}

/// Both queues of a pair, as far as they run, on their way from one worker to another.
pub(super) struct Rings {
    pub(super) tx: Option<TxQueue>,
    rx: Option<RxQueue>,
}

impl Guest {
    /// A port without rings.
    pub(super) fn new(id: PortId, shared: Arc<PortShared>) -> Self {
        let aim = Aim::new(id, Arc::clone(&shared));
        Self { tx: Vec::new(), rx: Vec::new(), aim, limit: Limit::new(1), shared }
    }

    /// Serves one more ring.
    pub(super) fn start(&mut self, start: RingStart) {
        let RingStart { index, ring, memory, features, enabled, kick, call, err } = start;
        let common = Common { memory, enabled, kick, call, err, reported: false };
        let pair = index / 2;
        if index.is_multiple_of(2) {
            let queue = RxQueue { queue: Receiveq::new(ring, features), common, unseen: (0, 0), dropped: 0 };
            put(&mut self.rx, pair.into(), queue);
            self.say_ready(pair);
        } else {
            let queue = TxQueue { queue: Transmitq::new(ring, features), common, seen: Rejected::default() };
            put(&mut self.tx, pair.into(), queue);
        }
    }

    /// Lets go of a ring; returns where it stands.
    pub(super) fn stop(&mut self, index: u16) -> Option<u16> {
        let pair = index / 2;
        let at = usize::from(pair);
        if index.is_multiple_of(2) {
            let base = self.rx.get_mut(at)?.take()?.queue.ring().base();
            self.say_ready(pair);
            Some(base)
        } else {
            Some(self.tx.get_mut(at)?.take()?.queue.ring().base())
        }
    }

    /// Lets another worker have a pair. To those who send to it, it stays as it is.
    pub(super) fn take(&mut self, pair: u16) -> Rings {
        let at = usize::from(pair);
        Rings {
            tx: self.tx.get_mut(at).and_then(Option::take),
            rx: self.rx.get_mut(at).and_then(Option::take),
        }
    }

    /// Serves a pair that another worker had.
    pub(super) fn give(&mut self, pair: u16, rings: Rings) {
        let Rings { tx, rx } = rings;
        let at = usize::from(pair);
        if let Some(queue) = tx {
            put(&mut self.tx, at, queue);
        }
        if let Some(queue) = rx {
            put(&mut self.rx, at, queue);
        }
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
            if index.is_multiple_of(2) {
                self.say_ready(index / 2);
            }
        }
    }

    /// Tells all workers whether a pair of this one can be delivered to.
    fn say_ready(&self, pair: u16) {
        let queue = self.rx.get(usize::from(pair)).and_then(Option::as_ref);
        self.shared.set_ready(pair, queue.is_some_and(|queue| queue.common.enabled));
    }

    /// What the driver takes.
    #[inline]
    pub(super) fn offloads(&self) -> Offloads {
        self.aim.offloads()
    }

    /// Remembers where the guest sends the flows of a burst from, if it matters.
    #[inline]
    pub(super) fn learn(&mut self, pair: u16, burst: &Burst<'_>, crossing: &Crossing, now: &Moment) {
        self.aim.learn(pair, burst, crossing, now);
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
    pub(super) fn expect(&mut self, frames: usize, crossing: &Crossing) {
        self.aim.look(crossing);
        for queue in self.rx.iter_mut().flatten().filter(|queue| queue.common.enabled) {
            queue.queue.expect(frames);
        }
    }

    /// Copies a frame of `len` bytes into the guest's buffers, or hands it to the worker who does.
    #[inline]
    pub(super) fn deliver(
        &mut self,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        len: u64,
        crossing: &mut Crossing,
        now: &Moment,
    ) -> Result<Delivered, DropReason> {
        let pair = self.aim.choose(first, now)?;
        let Some(queue) = self.rx.get_mut(usize::from(pair)).and_then(Option::as_mut) else {
            return self.aim.elsewhere(pair, header, first, rest, crossing);
        };
        let mut translator = queue.common.memory.translator();
        match queue.queue.deliver(&mut translator, header, first, rest) {
            Ok(()) => {
                queue.unseen.0 += 1;
                queue.unseen.1 += len;
                Ok(Delivered::Here)
            }
            Err(Refused::NoBuffers) => {
                queue.dropped += 1;
                Err(DropReason::NoReceiveBuffers)
            }
            Err(Refused::TooBig) => Err(DropReason::TxTooBig),
            Err(Refused::Broken) => Err(DropReason::LinkDown),
        }
    }

    /// Shows the guest what was delivered, and calls it if it wants.
    #[inline]
    pub(super) fn flush(&mut self, port: &str, counters: &PortCounters) {
        for (pair, queue) in self.shared.pairs.iter().zip(&mut self.rx) {
            let Some(queue) = queue else { continue };
            // Also a queue that took nothing may hold chains it looked at.
            let call = queue.queue.flush();
            if queue.dropped > 0 {
                pair.tx_dropped.add(std::mem::take(&mut queue.dropped));
            }
            let (packets, bytes) = std::mem::take(&mut queue.unseen);
            if packets > 0 {
                pair.tx_packets.add(packets);
                pair.tx_bytes.add(bytes);
                if call {
                    queue.common.ring_call(port, counters, pair);
                }
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
        pair: &PairCounters,
    ) -> (usize, bool) {
        let taken = self.queue.poll(memory, max, burst);
        if taken > 0 {
            let bytes: u64 = burst.frames().iter().map(|frame: &Frame| u64::from(frame.len)).sum();
            counters.rx_packets.add(taken as u64);
            counters.rx_bytes.add(bytes);
            pair.rx_packets.add(taken as u64);
            pair.rx_bytes.add(bytes);
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
    pub(super) fn complete(
        &mut self,
        limit: &mut Limit,
        port: &str,
        counters: &PortCounters,
        pair: &PairCounters,
    ) {
        if self.queue.complete() {
            self.common.ring_call(port, counters, pair);
        }
        if let Some(fault) = self.queue.ring().fault() {
            self.common.report(fault, "transmitq", limit, port, counters);
        }
    }
}

/// Puts a queue in its place.
pub(super) fn put<T>(queues: &mut Vec<Option<T>>, at: usize, queue: T) -> &mut T {
    if queues.len() <= at {
        queues.resize_with(at + 1, || None);
    }
    queues[at].insert(queue)
}
