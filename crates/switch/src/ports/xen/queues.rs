//! The queue side of a Xen guest's virtual interface: its queues, as one worker owns them.
//!
//! The control side starts a queue when a front end has connected ([`VifStart`]), and stops it when that
//! goes. A queue is served as a pair of virtqueues is ([`vhost`](crate::ports::vhost)), with two differences.
//! The packets of a burst lie in pages that belong to the queue, which is therefore lent out while they are
//! forwarded. A front end that breaks a ring loses the whole interface, which only the control plane can take
//! down. The worker [reports](FaultReporter) it and serves the queue no more.
//!
//! A stock front end posts 256 pages, which fourteen frames of 64 KiB fill. Frames that find no page wait in
//! the queue, up to a bound, and are delivered when the front end has announced more pages.

use std::sync::Arc;

use ringferry_memory::{Area, ReadSlice};
use ringferry_packet::ether;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_virtio_net::queue_index;
use ringferry_xen_net::events::Events;
use ringferry_xen_net::netback::{self, Lent, Multicast, PageCounters, Queue, Refused, Rejected};

use crate::counters::{DropReason, PairCounters, PortCounters};
use crate::plane::{
    Delivery, FaultReporter, FrameCost, Lease, PortFault, PortHandle, PortShared, Queues, Taken, Watch,
};
use crate::ports::queues::{QueueState, put};

/// Slots of the ring that a Xen guest sends on.
const SLOTS: usize = 256;

/// A queue of an interface that a front end has connected.
pub struct VifStart {
    /// Index of the queue in its interface.
    pub number: u16,
    /// The back end's half of both rings.
    pub queue: Queue<Area>,
    /// Event channels of the queue.
    pub events: Events,
    /// The connection of the interface that it belongs to, for [`PortFault`].
    pub session: u32,
}

/// The state of a queue, for display.
#[derive(Clone, Copy, Debug)]
pub struct VifState {
    /// Requests made and answered, on the transmit and on the receive ring.
    pub positions: [(u32, u32); 2],
    /// Counters of copied, mapped and persistent pages.
    pub pages: PageCounters,
    /// Pages that are mapped now: persistent ones, and static grants.
    pub mapped: (usize, usize),
    /// Frames that had to wait for pages of the guest.
    pub waited: u64,
}

/// A command of the control side for an interface.
pub enum VifRequest {
    /// Clears the multicast filter of the last front end, and says whether the next one uses a filter.
    Filter(bool),
    /// Runs a task on one queue.
    With(u16, VifTask),
}

/// A task that the worker that owns a queue runs on it.
pub type VifTask = Box<dyn FnOnce(&mut Queue<Area>) + Send>;

/// A queue of an interface: a transmit and a receive ring.
pub struct VifQueue {
    queue: Queue<Area>,
    events: Events,
    session: u32,
    /// The port, for frames that wait: they are delivered, and counted, also when nothing is sent to the
    /// port.
    port: PortHandle,
    shared: Arc<PortShared>,
    number: u16,
    /// Counts of rejected packets that are already in the port's counters.
    seen: Rejected,
    /// Frames, and their bytes, that are delivered and not yet published to the guest.
    unseen: (u64, u64),
    /// Frames that found no pages since the last flush, nor room to wait for them.
    dropped: u64,
    /// True if the control plane was told that the queue is broken.
    reported: bool,
    reporter: Arc<FaultReporter>,
}

/// The queues of an interface that this worker has. Index `q` is queue `q`.
pub struct VifQueues {
    port: PortHandle,
    queues: Vec<Option<VifQueue>>,
    shared: Arc<PortShared>,
    /// The multicast filter. A port has one only if all its queues are with one worker, wherever they
    /// migrate.
    multicast: Multicast,
    reporter: Arc<FaultReporter>,
}

/// A queue on its way from one worker to another, with the multicast filter of its interface.
pub struct DetachedVif {
    queue: VifQueue,
    multicast: Multicast,
}

impl VifQueues {
    /// Makes a port without queues.
    pub(super) fn new(port: PortHandle, shared: Arc<PortShared>, reporter: Arc<FaultReporter>) -> Self {
        Self { port, queues: Vec::new(), shared, multicast: Multicast::new(false), reporter }
    }

    #[inline]
    fn queue(&mut self, number: u16) -> Option<&mut VifQueue> {
        self.queues.get_mut(usize::from(number))?.as_mut()
    }

    /// Watches the event channels of a queue. Events for the receive ring tell that frames which wait for
    /// pages may go on.
    fn watch(&mut self, number: u16, watch: Watch<'_>) {
        let Some(queue) = self.queue(number) else { return };
        let watched = queue.events.fds().try_for_each(|fd| watch.add(fd, number));
        if let Err(error) = watched {
            queue.report(&format!("its events cannot be waited for: {error}"));
        }
    }
}

/// The reason for which a frame is dropped that the guest's pages do not take.
#[inline]
fn reason(refused: Refused) -> DropReason {
    match refused {
        Refused::NoBuffers => DropReason::NoReceiveBuffers,
        Refused::TooBig => DropReason::TxTooBig,
        Refused::Offload => DropReason::OffloadUnsupported,
        Refused::Broken | Refused::Lent => DropReason::LinkDown,
    }
}

impl Queues for VifQueues {
    type Loan = Lent;
    type Start = VifStart;
    /// Counters of the pages of the stopped queue.
    type Stopped = PageCounters;
    type Request = VifRequest;
    type Detached = DetachedVif;
    type State = QueueState;

    #[inline]
    fn lease(&mut self, number: u16, max: usize) -> Lease<Lent> {
        let Self { queues, multicast, .. } = self;
        let Some(Some(queue)) = queues.get_mut(usize::from(number)) else { return Lease::Empty };
        if queue.reported {
            return Lease::Exhausted;
        }
        if queue.poll(max, multicast) == 0 {
            if queue.queue.fault().is_some() {
                queue.complete();
            }
            return Lease::Empty;
        }
        // Its pages stay where they are while frames borrow them, whatever happens to the queue.
        queue.queue.lend().map_or(Lease::Empty, Lease::Frames)
    }

    #[inline]
    fn frames<'m>(&mut self, number: u16, lent: &'m Lent, _: usize, burst: &mut Burst<'m>) -> Taken {
        lent.frames(burst);
        if let Some(queue) = self.queue(number) {
            queue.count(burst);
        }
        Taken { any: true, forward: true, private: false, exhausted: false, further: 0 }
    }

    #[inline]
    fn complete(&mut self, number: u16, lent: Lent) {
        if let Some(queue) = self.queue(number) {
            queue.queue.give_back(lent);
            queue.complete();
        }
    }

    /// Packets sent before the queue is stopped count as accepted.
    fn backlog(&mut self, number: u16) -> usize {
        self.queue(number).map_or(0, |_| SLOTS)
    }

    fn arm(&mut self, number: u16) -> bool {
        self.queue(number).is_none_or(VifQueue::arm)
    }

    fn is_kickless(&mut self, _: u16) -> bool {
        false
    }

    fn wake(&mut self, number: u16, _: bool, watch: Watch<'_>) -> bool {
        let Self { port, queues, shared, .. } = self;
        let at = usize::from(number);
        let (Some(Some(queue)), Some(pair)) = (queues.get_mut(at), shared.pairs.get(at)) else {
            return false;
        };
        port.counters.kicks.add(1);
        pair.kicks.add(1);
        if queue.events.drain().is_err() {
            // A descriptor that stays readable would keep the worker awake for ever.
            queue.unwatch(watch);
            queue.report("its event channel is gone");
            return false;
        }
        true
    }

    #[inline]
    fn frame_cost(&self) -> FrameCost {
        FrameCost::Descriptor
    }

    /// netif leaves it to the front end to find the checksum, and Linux's looks for IP right behind the
    /// addresses.
    #[inline]
    fn offloads_tagged(&self) -> bool {
        false
    }

    #[inline]
    fn expect(&mut self, frames: usize) {
        for queue in self.queues.iter_mut().flatten() {
            queue.queue.expect(frames);
        }
    }

    /// Writes a frame into the guest's pages.
    #[inline]
    fn deliver(
        &mut self,
        number: u16,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        len: u64,
    ) -> Result<Delivery, DropReason> {
        let Self { queues, multicast, .. } = self;
        let Some(Some(queue)) = queues.get_mut(usize::from(number)) else { return Ok(Delivery::NotHere) };
        if let Some(destination) = ether::destination(first)
            && !multicast.accepts(&destination.0)
        {
            return Err(DropReason::Filtered);
        }
        match queue.queue.deliver_or_wait(header, first, rest) {
            // The frame is counted when it is delivered.
            Ok(netback::Delivery::Waits) => Ok(Delivery::Queued),
            Ok(netback::Delivery::Done) => {
                queue.unseen.0 += 1;
                queue.unseen.1 += len;
                Ok(Delivery::Done)
            }
            Err(refused) => {
                queue.dropped += u64::from(refused == Refused::NoBuffers);
                Err(reason(refused))
            }
        }
    }

    fn probe(&mut self, number: u16, packets: &[(Header, Vec<u8>)]) -> Vec<Result<Delivery, DropReason>> {
        let Self { queues, multicast, .. } = self;
        let Some(Some(queue)) = queues.get_mut(usize::from(number)) else {
            return vec![Ok(Delivery::NotHere); packets.len()];
        };
        let accepts = |frame: &[u8]| ether::destination(frame).is_none_or(|mac| multicast.accepts(&mac.0));
        let mut probed = queue.queue.probe(
            packets.iter().filter(|(_, frame)| accepts(frame)).map(|(header, frame)| (*header, frame.len())),
        );
        let mut probed = probed.drain(..);
        let results = packets.iter().map(|(_, frame)| {
            if !accepts(frame) {
                return Err(DropReason::Filtered);
            }
            match probed.next() {
                Some(Ok(netback::Delivery::Done)) => Ok(Delivery::Done),
                Some(Ok(netback::Delivery::Waits)) => Ok(Delivery::Queued),
                Some(Err(refused)) => Err(reason(refused)),
                None => Err(DropReason::LinkDown),
            }
        });
        results.collect()
    }

    /// Publishes the delivered frames to the guest and notifies it if it wants to be.
    #[inline]
    fn flush(&mut self) -> usize {
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
                self.port.counters.calls.add(1);
                pair.calls.add(1);
                if queue.events.notify_receive().is_err() {
                    queue.report("its event channel is gone");
                }
            } else if packets > 0 {
                self.port.counters.calls_suppressed.add(1);
                pair.calls_suppressed.add(1);
            }
            queue.check();
        }
        // Each slot is a page, and as much of a frame.
        0
    }

    fn start(&mut self, start: VifStart, watch: Watch<'_>) -> Option<u16> {
        let VifStart { number, queue, events, session } = start;
        // The last back end may have died between answering and notifying. A spurious event is legal.
        let told = events.notify_transmit().and_then(|()| events.notify_receive());
        let queue = VifQueue {
            queue,
            events,
            session,
            port: self.port.clone(),
            shared: Arc::clone(&self.shared),
            number,
            seen: Rejected::default(),
            unseen: (0, 0),
            dropped: 0,
            reported: false,
            reporter: Arc::clone(&self.reporter),
        };
        let queue = put(&mut self.queues, number.into(), queue);
        if told.is_err() {
            queue.report("its event channel is gone");
        }
        self.shared.set_ready(number, true);
        self.watch(number, watch);
        Some(number)
    }

    /// Stops a queue and unmaps everything that it had mapped.
    fn stop(&mut self, number: u16, watch: Watch<'_>) -> Option<(PageCounters, Option<u16>)> {
        let queue = self.queues.get_mut(usize::from(number))?.take()?;
        queue.unwatch(watch);
        self.shared.set_ready(number, false);
        Some((queue.queue.counters(), Some(number)))
    }

    fn close(&mut self, watch: Watch<'_>) {
        self.queues.iter().flatten().for_each(|queue| queue.unwatch(watch));
    }

    fn request(&mut self, request: VifRequest, _: Watch<'_>) {
        match request {
            VifRequest::Filter(filter) => self.multicast = Multicast::new(filter),
            VifRequest::With(number, task) => {
                if let Some(queue) = self.queue(number) {
                    task(&mut queue.queue);
                }
            }
        }
    }

    fn detach(&mut self, number: u16, watch: Watch<'_>) -> Option<DetachedVif> {
        let queue = self.queues.get_mut(usize::from(number))?.take()?;
        queue.unwatch(watch);
        Some(DetachedVif { queue, multicast: std::mem::replace(&mut self.multicast, Multicast::new(false)) })
    }

    fn attach(&mut self, number: u16, detached: DetachedVif, watch: Watch<'_>) -> bool {
        let DetachedVif { mut queue, multicast } = detached;
        queue.port = self.port.clone();
        self.multicast = multicast;
        put(&mut self.queues, number.into(), queue);
        self.watch(number, watch);
        true
    }

    fn inspect(&mut self, states: &mut Vec<QueueState>) {
        for (number, queue) in (0u16..).zip(&self.queues) {
            let Some(VifQueue { queue, .. }) = queue else { continue };
            let state = VifState {
                positions: queue.positions(),
                pages: queue.counters(),
                mapped: queue.mapped(),
                waited: queue.waited(),
            };
            let broken = queue.fault().map(|fault| fault.to_string());
            let [tx, rx] = state.positions;
            let ring = |index, (asked, answered): (u32, u32), pages| QueueState {
                index,
                last_avail: asked as u16,
                last_used: answered as u16,
                available: None,
                posted: None,
                unanswered: None,
                broken: broken.clone(),
                pages,
            };
            states.extend([
                ring(queue_index::receiveq(number), rx, None),
                ring(queue_index::transmitq(number), tx, Some(state)),
            ]);
        }
    }
}

impl VifQueue {
    /// Publishes the delivered frames, and as many of the waiting ones as there are pages for; returns true
    /// if the guest is to be notified.
    #[inline]
    fn show(&mut self) -> bool {
        if !self.queue.has_backlog() {
            return self.queue.flush();
        }
        let mut notify = false;
        loop {
            self.drain();
            notify |= self.queue.flush();
            // Each iteration that finds pages delivers at least one of the waiting frames.
            if !self.queue.arm_backlog() {
                return notify;
            }
        }
    }

    #[cold]
    fn drain(&mut self) {
        let drained = self.queue.drain();
        let Some(pair) = self.shared.pairs.get(usize::from(self.number)) else { return };
        let counters = &*self.port.counters;
        for (packets, bytes) in
            [(&counters.tx_packets, &counters.tx_bytes), (&pair.tx_packets, &pair.tx_bytes)]
        {
            packets.add(drained.frames);
            bytes.add(drained.bytes);
        }
        counters.drops.add(DropReason::NoReceiveBuffers, drained.expired);
        pair.tx_dropped.add(drained.expired);
    }

    /// Takes a burst of packets that the guest sent; returns how many. `lent` are then to be forwarded.
    #[inline]
    fn poll(&mut self, max: usize, multicast: &mut Multicast) -> usize {
        if self.queue.has_backlog() && self.show() {
            // A closed channel is found by the next sender, so the error is ignored here.
            let _ = self.events.notify_receive();
        }
        if self.queue.has_packets() { self.queue.poll(max, multicast) } else { 0 }
    }

    /// Counts a burst, and the packets that were answered with an error since the last burst.
    #[inline]
    fn count(&mut self, burst: &Burst<'_>) {
        let Some(pair) = self.shared.pairs.get(usize::from(self.number)) else { return };
        let counters = &*self.port.counters;
        counters.rx_packets.add(burst.len() as u64);
        counters.rx_bytes.add(burst.bytes());
        pair.rx_packets.add(burst.len() as u64);
        pair.rx_bytes.add(burst.bytes());
        let now = self.queue.rejected();
        if now != self.seen {
            count_rejected(now, std::mem::replace(&mut self.seen, now), counters, pair);
        }
    }

    /// Publishes responses to the guest and notifies it if it wants to be.
    #[inline]
    fn complete(&mut self) {
        if self.queue.complete() {
            self.port.counters.calls.add(1);
            if let Some(pair) = self.shared.pairs.get(usize::from(self.number)) {
                pair.calls.add(1);
            }
            if self.events.notify_transmit().is_err() {
                self.report("its event channel is gone");
            }
        } else {
            self.port.counters.calls_suppressed.add(1);
            if let Some(pair) = self.shared.pairs.get(usize::from(self.number)) {
                pair.calls_suppressed.add(1);
            }
        }
        self.check();
    }

    /// Reports a broken ring, once.
    #[inline]
    fn check(&mut self) {
        if let Some(fault) = self.queue.fault()
            && !self.reported
        {
            self.port.counters.ring_errors.add(1);
            self.report(&fault.to_string());
        }
    }

    /// Reports, once, that the queue is served no more.
    #[cold]
    fn report(&mut self, why: &str) {
        if !std::mem::replace(&mut self.reported, true) {
            let (port, session) = (self.port.id, self.session);
            self.reporter.report(PortFault { port, session: Some(session), why: why.to_owned() });
        }
    }

    /// Asks the guest to notify us of new packets; returns false if there are some already.
    fn arm(&mut self) -> bool {
        // The re-check may have found the ring broken: the next poll reports it.
        self.reported || !self.queue.arm() && self.queue.fault().is_none()
    }

    /// Stops watching the queue's event channels.
    fn unwatch(&self, watch: Watch<'_>) {
        self.events.fds().for_each(|fd| watch.remove(fd));
    }
}

/// Counts the packets that were answered with an error, as received and dropped.
#[cold]
fn count_rejected(now: Rejected, seen: Rejected, counters: &PortCounters, pair: &PairCounters) {
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
