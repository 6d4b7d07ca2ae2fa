//! The queues of a Xen guest's virtual interface, as a worker owns them: those whose number is its own.
//!
//! A queue is served as a virtual machine's pair of virtqueues is ([`guest`](super::guest)). What differs: the packets of a
//! burst lie in pages that belong to the queue, which is therefore lent out while they are forwarded; and a front end that
//! breaks a ring loses the whole interface, which only the control plane can take down. The worker [reports](Reporter) it
//! and serves the queue no more.
//!
//! A stock front end posts 256 pages, which fourteen frames of 64 KiB fill; what finds none waits in the queue, up to
//! a bound, and is delivered when the front end has told of more.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use ringferry_memory::{Area, ReadSlice};
use ringferry_packet::ether;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::{Header, Offloads};
use ringferry_sys::eventfd::EventFd;
use ringferry_xen_net::events::Events;
use ringferry_xen_net::netback::{Delivery, Multicast, PageCounters, Queue, Refused, Rejected};

use super::aim::{Aim, Delivered};
use super::crossing::Crossing;
use super::guest::put;
use super::moment::Moment;
use super::shared::PortShared;
use crate::counters::{DropReason, PairCounters, PortCounters};
use crate::fdb::PortId;

/// A queue of an interface that a front end has connected.
pub struct VifStart {
    /// Its number.
    pub number: u16,
    /// The queue.
    pub queue: Queue<Area>,
    /// Its events.
    pub events: Events,
    /// Which connection of the interface it belongs to, for [`Broken`].
    pub session: u32,
}

/// The state of a queue, for people.
#[derive(Clone, Copy, Debug)]
pub struct VifState {
    /// Requests made and answered, of the rings that the guest sends on and receives from.
    pub positions: [(u32, u32); 2],
    /// What was done with its pages.
    pub pages: PageCounters,
    /// Pages that are mapped now: learned ones, and static grants.
    pub mapped: (usize, usize),
    /// Frames that had to wait for pages.
    pub waited: u64,
}

/// An interface that can be served no more, and why.
#[derive(Clone, Debug)]
pub struct Broken {
    /// The port.
    pub port: PortId,
    /// Which connection.
    pub session: u32,
    /// What the front end did.
    pub why: String,
}

/// How workers tell the control plane of what they cannot serve.
#[derive(Debug)]
pub struct Reporter {
    pub(super) sender: Sender<Broken>,
    pub(super) bell: EventFd,
}

impl Reporter {
    #[cold]
    fn report(&self, broken: Broken) {
        // A control plane that is gone takes its workers along.
        let _ = self.sender.send(broken);
        let _ = self.bell.signal();
    }
}

/// A pair of rings.
pub(super) struct VifQueue {
    pub(super) queue: Queue<Area>,
    pub(super) events: Events,
    session: u32,
    /// For frames that are delivered when nothing is sent to the port.
    counters: Arc<PortCounters>,
    shared: Arc<PortShared>,
    number: usize,
    /// What was already taken over into the port's counters.
    seen: Rejected,
    /// Frames that were delivered and that the guest has not been shown, and their bytes.
    unseen: (u64, u64),
    /// Frames that found no pages meanwhile, nor room to wait for them.
    dropped: u64,
    /// The control plane was told that it is broken.
    reported: bool,
}

/// An interface's port. Index `i` is queue `i`; there are only those of this worker.
pub(super) struct Vif {
    id: PortId,
    pub(super) queues: Vec<Option<VifQueue>>,
    pub(super) shared: Arc<PortShared>,
    pub(super) aim: Aim,
    /// The multicast frames that are wanted. Only a port all of whose queues are with one worker, wherever they go, has a filter.
    multicast: Multicast,
    reporter: Arc<Reporter>,
}

impl Vif {
    /// A port without queues.
    pub(super) fn new(id: PortId, shared: Arc<PortShared>, reporter: Arc<Reporter>) -> Self {
        let aim = Aim::new(id, Arc::clone(&shared));
        Self { id, queues: Vec::new(), aim, shared, multicast: Multicast::new(false), reporter }
    }

    /// Serves one more queue. `counters` are those of this worker.
    pub(super) fn start(&mut self, start: VifStart, counters: &Arc<PortCounters>) {
        let VifStart { number, queue, events, session } = start;
        // The last back end may have died between answering and telling. One event too many is legal.
        let told = events.notify_transmit().and_then(|()| events.notify_receive());
        let queue = VifQueue {
            queue,
            events,
            session,
            counters: Arc::clone(counters),
            shared: Arc::clone(&self.shared),
            number: number.into(),
            seen: Rejected::default(),
            unseen: (0, 0),
            dropped: 0,
            reported: false,
        };
        let queue = put(&mut self.queues, number.into(), queue);
        if told.is_err() {
            queue.report(self.id, "its event channel is gone", &self.reporter);
        }
        self.shared.set_ready(number, true);
    }

    /// Forgets what the last front end wanted of multicast frames; whether the next one filters them.
    pub(super) fn filter(&mut self, filter: bool) {
        self.multicast = Multicast::new(filter);
    }

    /// Lets go of a queue and of everything that it had mapped; returns what it did.
    pub(super) fn stop(&mut self, number: u16) -> Option<PageCounters> {
        let queue = self.queues.get_mut(usize::from(number))?.take()?;
        self.shared.set_ready(number, false);
        Some(queue.queue.counters())
    }

    /// Lets another worker have a queue, and the filter. To those who send to it, it stays as it is.
    pub(super) fn take(&mut self, number: u16) -> Option<(VifQueue, Multicast)> {
        let queue = self.queues.get_mut(usize::from(number))?.take()?;
        Some((queue, std::mem::replace(&mut self.multicast, Multicast::new(false))))
    }

    /// Serves a queue that another worker had. `counters` are those of this one.
    pub(super) fn give(
        &mut self,
        (mut queue, multicast): (VifQueue, Multicast),
        counters: &Arc<PortCounters>,
    ) {
        queue.counters = Arc::clone(counters);
        self.multicast = multicast;
        put(&mut self.queues, queue.number, queue);
    }

    /// A queue, with the filter, its counters, and who is told when it breaks.
    #[inline]
    pub(super) fn queue(
        &mut self,
        number: u16,
    ) -> Option<(&mut VifQueue, &mut Multicast, &PairCounters, &Reporter)> {
        let at = usize::from(number);
        let Self { queues, multicast, shared, reporter, .. } = self;
        Some((queues.get_mut(at)?.as_mut()?, multicast, shared.pairs.get(at)?, reporter))
    }

    /// What the front end takes.
    #[inline]
    pub(super) fn offloads(&self) -> Offloads {
        self.aim.offloads()
    }

    /// Remembers where the guest sends the flows of a burst from, if it matters.
    #[inline]
    pub(super) fn learn(&mut self, number: u16, burst: &Burst<'_>, crossing: &Crossing, now: &Moment) {
        self.aim.learn(number, burst, crossing, now);
    }

    /// Announces about how many frames follow for this port.
    #[inline]
    pub(super) fn expect(&mut self, frames: usize, crossing: &Crossing) {
        self.aim.look(crossing);
        for queue in self.queues.iter_mut().flatten() {
            queue.queue.expect(frames);
        }
    }

    /// Writes a frame of `len` bytes into the guest's pages, or hands it to the worker who does.
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
        let number = self.aim.choose(first, now)?;
        let Some(queue) = self.queues.get_mut(usize::from(number)).and_then(Option::as_mut) else {
            return self.aim.elsewhere(number, header, first, rest, crossing);
        };
        if let Some(destination) = ether::destination(first)
            && !self.multicast.accepts(&destination.0)
        {
            return Err(DropReason::Filtered);
        }
        match queue.queue.deliver_or_wait(header, first, rest) {
            // Counted when it is delivered.
            Ok(Delivery::Waits) => Ok(Delivered::Away),
            Ok(Delivery::Done) => {
                queue.unseen.0 += 1;
                queue.unseen.1 += len;
                Ok(Delivered::Here)
            }
            Err(Refused::NoBuffers) => {
                queue.dropped += 1;
                Err(DropReason::NoReceiveBuffers)
            }
            Err(Refused::TooBig) => Err(DropReason::TxTooBig),
            Err(Refused::Offload) => Err(DropReason::OffloadUnsupported),
            Err(Refused::Broken | Refused::Lent) => Err(DropReason::LinkDown),
        }
    }

    /// Shows the guest what was delivered, and tells it if it wants.
    #[inline]
    pub(super) fn flush(&mut self, counters: &PortCounters) {
        for (pair, queue) in self.shared.pairs.iter().zip(&mut self.queues) {
            let Some(queue) = queue else { continue };
            let notify = queue.show();
            if queue.dropped > 0 {
                pair.tx_dropped.add(std::mem::take(&mut queue.dropped));
            }
            let (packets, bytes) = std::mem::take(&mut queue.unseen);
            if packets > 0 {
                pair.tx_packets.add(packets);
                pair.tx_bytes.add(bytes);
            }
            if notify {
                counters.calls.add(1);
                pair.calls.add(1);
                if queue.events.notify_receive().is_err() {
                    queue.report(self.id, "its event channel is gone", &self.reporter);
                }
            }
            queue.check(self.id, counters, &self.reporter);
        }
    }

    /// Every queue with its number.
    pub(super) fn states(&self) -> impl Iterator<Item = (u16, VifState, Option<String>)> {
        (0u16..).zip(&self.queues).filter_map(|(number, queue)| {
            let queue = &queue.as_ref()?.queue;
            let state = VifState {
                positions: queue.positions(),
                pages: queue.counters(),
                mapped: queue.mapped(),
                waited: queue.waited(),
            };
            Some((number, state, queue.fault().map(|fault| fault.to_string())))
        })
    }
}

impl VifQueue {
    /// Shows the guest what was delivered, and as much of what waits as there are pages for; whether it wants to be told.
    #[inline]
    fn show(&mut self) -> bool {
        if !self.queue.has_backlog() {
            return self.queue.flush();
        }
        let mut notify = false;
        loop {
            self.drain();
            notify |= self.queue.flush();
            // Each time that there are pages already, at least one frame less waits.
            if !self.queue.arm_backlog() {
                return notify;
            }
        }
    }

    #[cold]
    fn drain(&mut self) {
        let drained = self.queue.drain();
        let Some(pair) = self.shared.pairs.get(self.number) else { return };
        for (packets, bytes) in
            [(&self.counters.tx_packets, &self.counters.tx_bytes), (&pair.tx_packets, &pair.tx_bytes)]
        {
            packets.add(drained.frames);
            bytes.add(drained.bytes);
        }
        self.counters.drops.add(DropReason::NoReceiveBuffers, drained.expired);
        pair.tx_dropped.add(drained.expired);
    }

    /// Takes a burst of what the guest sent; returns how many packets. `lent` are then to be forwarded.
    #[inline]
    pub(super) fn poll(&mut self, max: usize, multicast: &mut Multicast) -> usize {
        if self.queue.has_backlog() && self.show() {
            // A channel that is gone is found by whoever sends next.
            let _ = self.events.notify_receive();
        }
        if self.queue.has_packets() { self.queue.poll(max, multicast) } else { 0 }
    }

    /// Counts a burst.
    #[inline]
    pub(super) fn count(&mut self, burst: &Burst<'_>, counters: &PortCounters, pair: &PairCounters) {
        let bytes: u64 = burst.frames().iter().map(|frame| u64::from(frame.len)).sum();
        counters.rx_packets.add(burst.len() as u64);
        counters.rx_bytes.add(bytes);
        pair.rx_packets.add(burst.len() as u64);
        pair.rx_bytes.add(bytes);
        let now = self.queue.rejected();
        if now != self.seen {
            self.rejected(now, counters, pair);
        }
    }

    /// A packet that was answered with an error was received, and dropped.
    #[cold]
    fn rejected(&mut self, now: Rejected, counters: &PortCounters, pair: &PairCounters) {
        let seen = std::mem::replace(&mut self.seen, now);
        let reasons = [
            (DropReason::RxTooShort, now.too_short - seen.too_short),
            (DropReason::RxBadSlots, now.bad_slots - seen.bad_slots),
            (DropReason::RxBadHeader, now.bad_header - seen.bad_header),
            (DropReason::RxBadMemory, now.bad_memory - seen.bad_memory),
        ];
        for (reason, count) in reasons {
            counters.drops.add(reason, count);
            counters.rx_packets.add(count);
            pair.rx_packets.add(count);
        }
    }

    /// Answers the guest, and tells it if it wants.
    #[inline]
    pub(super) fn complete(
        &mut self,
        port: PortId,
        counters: &PortCounters,
        pair: &PairCounters,
        reporter: &Reporter,
    ) {
        if self.queue.complete() {
            counters.calls.add(1);
            pair.calls.add(1);
            if self.events.notify_transmit().is_err() {
                self.report(port, "its event channel is gone", reporter);
            }
        }
        self.check(port, counters, reporter);
    }

    /// Reports a broken ring once.
    #[inline]
    fn check(&mut self, port: PortId, counters: &PortCounters, reporter: &Reporter) {
        if let Some(fault) = self.queue.fault()
            && !self.reported
        {
            counters.ring_errors.add(1);
            self.report(port, &fault.to_string(), reporter);
        }
    }

    /// Says once that the queue is served no more.
    #[cold]
    pub(super) fn report(&mut self, port: PortId, why: &str, reporter: &Reporter) {
        if !std::mem::replace(&mut self.reported, true) {
            reporter.report(Broken { port, session: self.session, why: why.to_owned() });
        }
    }

    /// Whether it is served no more.
    #[inline]
    pub(super) fn is_broken(&self) -> bool {
        self.reported
    }

    /// Asks to be told of what is sent; false when there is work already.
    pub(super) fn arm(&mut self) -> bool {
        // The re-check may have found the ring broken: the next poll reports it.
        self.reported || !self.queue.arm() && self.queue.fault().is_none()
    }
}
