//! The queue side of a vhost-user port: the virtqueues of a guest, as one worker owns them.
//!
//! The control side starts and stops rings as the front end asks for it ([`RingStart`], [`VhostRequest`]); a pair of rings may migrate. Rings
//! have their [indexes in the device](queue_index). A ring whose driver breaks the rules is broken until it is started anew: it is counted, and
//! the front end told, once.

use std::io;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};

use ringferry_memory::{Area, DirtyLog, GuestMemory, ReadSlice, Translator};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_ring::{Device, Fault, RingAddresses, WriteLog};
use ringferry_sys::closer::Closer;
use ringferry_sys::eventfd::{EventFd, falls_silent};
use ringferry_vhost_user::RingSetup;
use ringferry_virtio_net::device::{Receiveq, Refused, Rejected, Run, Transmitq};
use ringferry_virtio_net::{Features, queue_index};

use super::faults::FrontendFaults;
use crate::counters::{DropReason, PairCounters};
use crate::plane::queues::{MOST_UNUSUAL, Room};
use crate::plane::{
    Delivery, FaultReporter, FrameCost, Lease, PAIRS, PortHandle, PortShared, Queues, Taken, Watch,
};
use crate::ports::queues::{QueueState, put};

/// A ring that a front end has started.
pub struct RingStart {
    /// The number of the session, as the control side counts them.
    pub session: u32,
    /// [Index](queue_index) of the ring in the device.
    pub index: u16,
    /// The ring and its events, as the session has checked and resolved them.
    pub setup: RingSetup,
}

/// A command for a ring that is started, by its index in the device.
pub enum VhostRequest {
    /// Enables or disables the ring, and sends a message when that is done.
    Enable(u16, bool, SyncSender<()>),
    /// Records all writes to the ring and its buffers in this dirty log from now on, or in none, and sends a message when that is done.
    SetLog(u16, Option<Arc<DirtyLog>>, SyncSender<()>),
    /// Takes the ring's new call event from [`NewCalls`].
    SetCall(u16),
}

/// The call events that the front end has set on running rings and that workers do not have yet, by index of the ring. Each takes the place of the one
/// before it, so however often a front end sets them, a worker has one of each ring to look at.
#[derive(Debug, Default)]
pub(super) struct NewCalls([Mutex<Option<NewCall>>; queue_index::count(PAIRS)]);

/// A call event, or none: the guest polls.
type NewCall = Option<EventFd>;

impl NewCalls {
    /// Leaves a call event for the worker that has the ring. Returns true if the worker has to be told. The
    /// event that it replaces is closed here.
    pub(super) fn put(&self, index: u16, call: NewCall) -> bool {
        let Some(place) = self.0.get(usize::from(index)) else { return false };
        let before = place.lock().unwrap_or_else(PoisonError::into_inner).replace(call);
        before.is_none()
    }

    /// Takes the call event that was left for a ring, if any.
    pub(super) fn take(&self, index: u16) -> Option<NewCall> {
        self.0.get(usize::from(index))?.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The parts that receiveqs and transmitqs have in common.
struct Common {
    session: u32,
    memory: Arc<GuestMemory>,
    addresses: RingAddresses,
    enabled: bool,
    kick: Option<EventFd>,
    call: Option<EventFd>,
    err: Option<EventFd>,
    /// True if the ring's fault was counted, and the front end told.
    reported: bool,
}

impl Common {
    /// Signals the guest through the ring's call event.
    fn ring_call(&mut self, faults: &mut FrontendFaults, port: &PortHandle, pair: &PairCounters) {
        let Some(call) = &self.call else { return };
        if faults.is_out_of_service(self.session) {
            return;
        }
        port.counters.calls.add(1);
        pair.calls.add(1);
        if faults.timed(port, self.session, || call.signal()).is_err() {
            faults.take_out_of_service(port, self.session, "its call event blocks whoever signals it");
        }
    }

    /// Reports a fault of the ring, once.
    #[cold]
    fn report(&mut self, fault: Fault, what: &str, faults: &mut FrontendFaults, port: &PortHandle) {
        if std::mem::replace(&mut self.reported, true) {
            return;
        }
        port.counters.ring_errors.add(1);
        if let Some(err) = &self.err
            && !faults.is_out_of_service(self.session)
            && faults.timed(port, self.session, || err.signal()).is_err()
        {
            faults.take_out_of_service(port, self.session, "its error event blocks whoever signals it");
        }
        if faults.limit.allows_reason(&port.name, fault) {
            tracing::warn!(
                port = &*port.name,
                queue = what,
                "queue is broken until the guest resets it: {fault}"
            );
        }
    }
}

/// A transmitq: the ring on which the guest sends.
struct TxQueue {
    queue: Transmitq<Area>,
    common: Common,
    /// Counts of rejected packets that are already in the port's counters.
    seen: Rejected,
}

/// A receiveq: the ring on which the guest receives.
struct RxQueue {
    queue: Receiveq<Area>,
    common: Common,
    /// Frames, and their bytes, that are delivered and not yet published to the guest.
    unseen: (u64, u64),
    /// Frames that found no buffers since the last flush.
    dropped: u64,
    /// Unusual buffers of the present burst that are in the port's sum.
    unusual: usize,
}

/// The rings of a guest that this worker has. Index `q` of either vector is of pair `q`.
///
/// Whatever a front end has passed is let go of by the port's [`Closer`]. If the session has let go of it before, this is the last descriptor, or mapping:
/// to close an eventfd for which a million wait takes half a second, and so does giving up some gigabytes of memory.
pub struct VhostQueues {
    port: PortHandle,
    tx: Vec<Option<TxQueue>>,
    rx: Vec<Option<RxQueue>>,
    shared: Arc<PortShared>,
    calls: Arc<NewCalls>,
    faults: FrontendFaults,
    closer: Closer,
    /// Buffers of the guest's that the present burst has taken, or looked at, beyond what usual drivers have frames take.
    unusual: usize,
}

impl Drop for VhostQueues {
    fn drop(&mut self) {
        self.tx.drain(..).flatten().for_each(|queue| self.closer.close_soon(queue));
        self.rx.drain(..).flatten().for_each(|queue| self.closer.close_soon(queue));
    }
}

/// Both rings of a pair, as far as they run, on their way from one worker to another.
pub struct Pair {
    tx: Option<TxQueue>,
    rx: Option<RxQueue>,
}

impl VhostQueues {
    /// Makes a port without rings.
    pub(super) fn new(
        port: PortHandle,
        shared: Arc<PortShared>,
        calls: Arc<NewCalls>,
        reporter: Arc<FaultReporter>,
        closer: Closer,
    ) -> Self {
        let faults = FrontendFaults::new(reporter);
        Self { port, tx: Vec::new(), rx: Vec::new(), shared, calls, faults, closer, unusual: 0 }
    }

    fn tx(&mut self, pair: u16) -> Option<&mut TxQueue> {
        self.tx.get_mut(usize::from(pair))?.as_mut()
    }

    /// Returns the common part of a ring.
    fn common(&mut self, index: u16) -> Option<&mut Common> {
        let pair = usize::from(queue_index::pair(index));
        if queue_index::is_transmitq(index) {
            Some(&mut self.tx.get_mut(pair)?.as_mut()?.common)
        } else {
            Some(&mut self.rx.get_mut(pair)?.as_mut()?.common)
        }
    }

    /// Gives a ring a dirty log, or takes it away.
    fn set_log(&mut self, index: u16, log: Option<Arc<DirtyLog>>) {
        let at = usize::from(queue_index::pair(index));
        let (ring, common) = if queue_index::is_transmitq(index) {
            let Some(Some(TxQueue { queue, common, .. })) = self.tx.get_mut(at) else { return };
            (queue.ring(), common)
        } else {
            let Some(Some(RxQueue { queue, common, .. })) = self.rx.get_mut(at) else { return };
            (queue.ring(), common)
        };
        ring.set_log(log.map(|log| WriteLog::new(log, common.addresses)));
    }

    /// Signals the guest of a ring, even if it has suppressed notifications.
    fn call(&mut self, index: u16) {
        let at = usize::from(queue_index::pair(index));
        let Self { port, tx, rx, shared, faults, .. } = self;
        let common = if queue_index::is_transmitq(index) {
            tx.get_mut(at).and_then(Option::as_mut).map(|queue| &mut queue.common)
        } else {
            rx.get_mut(at).and_then(Option::as_mut).map(|queue| &mut queue.common)
        };
        if let (Some(common), Some(pair)) = (common, shared.pairs.get(at)) {
            common.ring_call(faults, port, pair);
        }
    }

    /// Tells all workers whether the receiveq of a pair runs, so that they can deliver to it.
    fn publish_ready(&self, pair: u16) {
        let queue = self.rx.get(usize::from(pair)).and_then(Option::as_ref);
        self.shared.set_ready(pair, queue.is_some_and(|queue| queue.common.enabled));
    }

    /// Iterates over all rings with their indexes.
    fn rings(&mut self) -> impl Iterator<Item = (u16, &Common, &mut Device<Area>)> {
        let rx = (0u16..).zip(&mut self.rx).filter_map(|(pair, queue)| {
            let queue = queue.as_mut()?;
            Some((queue_index::receiveq(pair), &queue.common, queue.queue.ring()))
        });
        let tx = (0u16..).zip(&mut self.tx).filter_map(|(pair, queue)| {
            let queue = queue.as_mut()?;
            Some((queue_index::transmitq(pair), &queue.common, queue.queue.ring()))
        });
        rx.chain(tx)
    }

    /// Watches the kick descriptor of a transmitq. If it cannot be watched the ring is polled.
    fn watch_kicks(&mut self, pair: u16, watch: Watch<'_>) {
        let Some(TxQueue { common, .. }) = self.tx(pair) else { return };
        if let Some(Err(error)) = common.kick.as_ref().map(|kick| watch.add(kick, pair)) {
            common.kick = None;
            if self.faults.limit.allows(&self.port.name) {
                tracing::error!(
                    port = &*self.port.name,
                    "cannot wait for kicks, so the queue is polled: {error}"
                );
            }
        }
    }
}

impl Queues for VhostQueues {
    /// Keeps the guest's memory mapped.
    type Loan = Arc<GuestMemory>;
    type Start = RingStart;
    /// The ring's position ([`Device::base`]), where the next start goes on.
    type Stopped = u16;
    type Request = VhostRequest;
    type Detached = Pair;
    type State = QueueState;

    #[inline]
    fn lease(&mut self, pair: u16, _: usize) -> Lease<Arc<GuestMemory>> {
        let Some(queue) = self.tx(pair) else { return Lease::Empty };
        let ring = queue.queue.ring();
        if !ring.has_chains() && ring.fault().is_none() {
            return Lease::Empty;
        }
        Lease::Frames(Arc::clone(&queue.common.memory))
    }

    #[inline]
    fn frames<'m>(
        &mut self,
        pair: u16,
        memory: &'m Arc<GuestMemory>,
        max: usize,
        burst: &mut Burst<'m>,
    ) -> Taken {
        let Self { port, tx, shared, .. } = self;
        let at = usize::from(pair);
        let mut further = 0;
        let (taken, forward) = match (tx.get_mut(at), shared.pairs.get(at)) {
            (Some(Some(queue)), Some(pair)) => {
                let (taken, forward) = queue.poll(memory, max, burst, port, pair);
                further = queue.queue.further_buffers();
                (taken, forward)
            }
            _ => (0, false),
        };
        Taken { any: taken > 0, forward, private: false, exhausted: false, further }
    }

    #[inline]
    fn complete(&mut self, pair: u16, _: Arc<GuestMemory>) {
        let Self { port, tx, shared, faults, .. } = self;
        let at = usize::from(pair);
        if let (Some(Some(queue)), Some(pair)) = (tx.get_mut(at), shared.pairs.get(at)) {
            queue.complete(faults, port, pair);
        }
    }

    /// Packets sent on a ring before it is disabled count as accepted; packets sent on a disabled ring are
    /// discarded.
    fn backlog(&mut self, pair: u16) -> usize {
        let queue = self.tx(pair).filter(|queue| queue.common.enabled);
        queue.map_or(0, |queue| queue.queue.ring().size().into())
    }

    fn arm(&mut self, pair: u16) -> bool {
        let Some(queue) = self.tx(pair) else { return true };
        let kick = queue.common.kick.is_some();
        let ring = queue.queue.ring();
        if ring.fault().is_some() {
            return true;
        }
        if !kick || ring.enable_kicks() {
            ring.disable_kicks();
            return false;
        }
        // The re-check may have found the ring broken: the next poll reports it.
        ring.fault().is_none()
    }

    fn is_kickless(&mut self, pair: u16) -> bool {
        self.tx(pair).is_some_and(|queue| queue.common.kick.is_none() && !queue.queue.ring().has_chains())
    }

    fn wake(&mut self, pair: u16, _: bool, watch: Watch<'_>) -> bool {
        let Self { port, tx, shared, faults, closer, .. } = self;
        let at = usize::from(pair);
        let (Some(Some(queue)), Some(pair)) = (tx.get_mut(at), shared.pairs.get(at)) else { return false };
        port.counters.kicks.add(1);
        pair.kicks.add(1);
        let ring = queue.queue.ring();
        ring.disable_kicks();
        let Some(kick) = &queue.common.kick else { return true };
        // A spurious kick is legal, but a descriptor that stays readable by itself would keep this thread
        // awake for ever.
        let session = queue.common.session;
        let drain = || {
            let drained = faults.timed(port, session, || kick.drain());
            if faults.is_out_of_service(session) { Err(io::ErrorKind::TimedOut.into()) } else { drained }
        };
        let works = falls_silent(drain, || ring.has_chains()).unwrap_or(false);
        if !works {
            unwatch(watch, queue.common.kick.take(), closer);
            // This keeps the ring from being served until its session is over. Its driver has broken no rule.
            ring.break_with(Fault::Unusable);
            queue.common.reported = true;
            faults.take_out_of_service(port, session, "its kick event never falls silent");
        }
        true
    }

    #[inline]
    fn frame_cost(&self) -> FrameCost {
        FrameCost::Descriptor
    }

    #[inline]
    fn expect(&mut self, frames: usize) {
        for queue in self.rx.iter_mut().flatten().filter(|queue| queue.common.enabled) {
            queue.queue.expect(frames);
        }
    }

    /// Copies a frame into the guest's buffers.
    #[inline]
    fn deliver(
        &mut self,
        pair: u16,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        len: u64,
    ) -> Result<Delivery, DropReason> {
        let Some(queue) = self.rx.get_mut(usize::from(pair)).and_then(Option::as_mut) else {
            return Ok(Delivery::NotHere);
        };
        if self.unusual > MOST_UNUSUAL {
            return Err(DropReason::DearBuffers);
        }
        let mut translator = queue.common.memory.translator();
        let delivered = queue.queue.deliver(&mut translator, header, first, rest);
        let unusual = queue.queue.unusual_buffers();
        if unusual > queue.unusual {
            self.unusual += unusual - queue.unusual;
            queue.unusual = unusual;
        }
        match delivered {
            Ok(()) => {
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

    #[inline]
    fn deliver_run(&mut self, pair: u16, burst: &Burst<'_>, picks: &[u32]) -> Run {
        let Some(Some(queue)) = self.rx.get_mut(usize::from(pair)) else { return Run::NONE };
        let run = queue.queue.deliver_run(&mut queue.common.memory.translator(), burst, picks);
        queue.unseen.0 += run.frames as u64;
        queue.unseen.1 += run.bytes;
        run
    }

    fn probe(&mut self, pair: u16, packets: &[(Header, Vec<u8>)]) -> Vec<Result<Delivery, DropReason>> {
        let Some(queue) = self.rx.get_mut(usize::from(pair)).and_then(Option::as_mut) else {
            return vec![Ok(Delivery::NotHere); packets.len()];
        };
        let lens = packets.iter().map(|(_, frame)| frame.len());
        let results = queue.queue.probe(&mut queue.common.memory.translator(), lens);
        // Gives back the chains that were read; nothing was delivered that the guest would have to be called for.
        queue.queue.flush();
        results.into_iter().map(|result| result.map(|()| Delivery::Done).map_err(reason)).collect()
    }

    /// Publishes the delivered frames to the guest and signals it if it wants to be.
    #[inline]
    fn flush(&mut self) -> usize {
        let Self { port, rx, shared, faults, .. } = self;
        self.unusual = 0;
        let mut unusual = 0;
        for (pair, queue) in shared.pairs.iter().zip(rx) {
            let Some(queue) = queue else { continue };
            unusual += queue.queue.unusual_buffers();
            queue.unusual = 0;
            // A queue that took no frame is flushed, too: it may hold chains that it has read ahead.
            let call = queue.queue.flush();
            if queue.dropped > 0 {
                pair.tx_dropped.add(std::mem::take(&mut queue.dropped));
            }
            let (packets, bytes) = std::mem::take(&mut queue.unseen);
            if packets > 0 {
                pair.tx_packets.add(packets);
                pair.tx_bytes.add(bytes);
                if call {
                    queue.common.ring_call(faults, port, pair);
                } else {
                    port.counters.calls_suppressed.add(1);
                    pair.calls_suppressed.add(1);
                }
            }
            if let Some(fault) = queue.queue.ring().fault() {
                queue.common.report(fault, "receiveq", faults, port);
            }
        }
        unusual
    }

    fn start(&mut self, start: RingStart, watch: Watch<'_>) -> Option<u16> {
        let RingStart { session, index, setup } = start;
        let ring = match setup.ring() {
            Ok(ring) => ring,
            Err(error) => {
                if self.faults.limit.allows(&self.port.name) {
                    tracing::error!(port = &*self.port.name, "queue {index} cannot be served: {error}");
                }
                return None;
            }
        };
        let (features, addresses) = (Features::from_bits_retain(setup.features), setup.addresses());
        let RingSetup { memory, enabled, kick, call, err, .. } = setup;
        let common = Common { session, memory, addresses, enabled, kick, call, err, reported: false };
        let pair = queue_index::pair(index);
        let sends = queue_index::is_transmitq(index);
        if sends {
            let queue = TxQueue { queue: Transmitq::new(ring, features), common, seen: Rejected::default() };
            put(&mut self.tx, pair.into(), queue);
            self.watch_kicks(pair, watch);
        } else {
            let queue = RxQueue {
                queue: Receiveq::new(ring, features),
                common,
                unseen: (0, 0),
                dropped: 0,
                unusual: 0,
            };
            put(&mut self.rx, pair.into(), queue);
            self.publish_ready(pair);
        }
        // The last device may have died between publishing buffers and signalling for them, and with
        // EVENT_IDX the guest would then never be signalled again. A spurious call is legal.
        self.call(index);
        sends.then_some(pair)
    }

    /// Stops a ring; `index` is its index in the device.
    fn stop(&mut self, index: u16, watch: Watch<'_>) -> Option<(u16, Option<u16>)> {
        let pair = queue_index::pair(index);
        let at = usize::from(pair);
        if queue_index::is_transmitq(index) {
            let mut queue = self.tx.get_mut(at)?.take()?;
            unwatch(watch, queue.common.kick.take(), &self.closer);
            let base = queue.queue.ring().base();
            self.closer.close_soon(queue);
            Some((base, Some(pair)))
        } else {
            let mut queue = self.rx.get_mut(at)?.take()?;
            let base = queue.queue.ring().base();
            self.closer.close_soon(queue);
            self.publish_ready(pair);
            Some((base, None))
        }
    }

    fn close(&mut self, watch: Watch<'_>) {
        for queue in self.tx.iter_mut().flatten() {
            unwatch(watch, queue.common.kick.take(), &self.closer);
        }
    }

    fn request(&mut self, request: VhostRequest, _: Watch<'_>) {
        match request {
            VhostRequest::Enable(index, enabled, reply) => {
                if let Some(common) = self.common(index) {
                    common.enabled = enabled;
                    if !queue_index::is_transmitq(index) {
                        self.publish_ready(queue_index::pair(index));
                    }
                }
                let _ = reply.send(());
            }
            VhostRequest::SetLog(index, log, reply) => {
                self.set_log(index, log);
                let _ = reply.send(());
            }
            VhostRequest::SetCall(index) => {
                if let Some(call) = self.calls.take(index)
                    && let Some(common) = self.common(index)
                {
                    let before = std::mem::replace(&mut common.call, call);
                    self.closer.close_soon(before);
                    // Signals for buffers that were published while there was no call event.
                    self.call(index);
                }
            }
        }
    }

    fn detach(&mut self, pair: u16, watch: Watch<'_>) -> Option<Pair> {
        let at = usize::from(pair);
        let tx = self.tx.get_mut(at).and_then(Option::take);
        if let Some(kick) = tx.as_ref().and_then(|queue| queue.common.kick.as_ref()) {
            watch.remove(kick);
        }
        Some(Pair { tx, rx: self.rx.get_mut(at).and_then(Option::take) })
    }

    fn attach(&mut self, pair: u16, Pair { tx, rx }: Pair, watch: Watch<'_>) -> bool {
        let at = usize::from(pair);
        if let Some(queue) = rx {
            put(&mut self.rx, at, queue);
        }
        let Some(queue) = tx else { return false };
        put(&mut self.tx, at, queue);
        self.watch_kicks(pair, watch);
        true
    }

    fn take_out_of_service(&mut self, why: &str, watch: Watch<'_>) {
        let Self { port, tx, rx, faults, closer, .. } = self;
        for queue in tx.iter_mut().flatten() {
            unwatch(watch, queue.common.kick.take(), closer);
            // This keeps the ring from being served until its session is over. Its driver has broken no rule.
            queue.queue.ring().break_with(Fault::Unusable);
            queue.common.reported = true;
            faults.take_out_of_service(port, queue.common.session, why);
        }
        for queue in rx.iter_mut().flatten() {
            queue.queue.ring().break_with(Fault::Unusable);
            queue.common.reported = true;
            faults.take_out_of_service(port, queue.common.session, why);
        }
    }

    fn inspect(&mut self, states: &mut Vec<QueueState>) {
        states.extend(self.rings().map(|(index, common, ring)| QueueState {
            index,
            last_avail: ring.base(),
            last_used: ring.used_index(),
            available: Some(ring.waiting()),
            // Nothing is put into a ring that is not enabled, and nothing is to be posted there.
            posted: common.enabled.then(|| ring.posted()),
            unanswered: ring.unanswered(),
            broken: ring.fault().map(|fault| fault.to_string()),
            pages: None,
        }));
    }

    fn direct_memory(&mut self, pair: u16) -> Option<Arc<GuestMemory>> {
        let queue = self.rx.get_mut(usize::from(pair))?.as_mut()?;
        // What is read directly and then not delivered would be missing in the dirty log.
        if queue.queue.ring().log().is_some() {
            return None;
        }
        Some(Arc::clone(&queue.common.memory))
    }

    fn room<'m>(
        &mut self,
        pair: u16,
        translator: &mut Translator<'m>,
        prefix: usize,
        most: usize,
        room: &mut Room<'m>,
    ) -> bool {
        let queue = self.rx.get_mut(usize::from(pair)).and_then(Option::as_mut);
        queue.is_some_and(|queue| queue.queue.room(translator, prefix, most, room))
    }
}

/// The reason for which a frame is dropped that the guest's buffers do not take.
#[inline]
fn reason(refused: Refused) -> DropReason {
    match refused {
        Refused::NoBuffers => DropReason::NoReceiveBuffers,
        Refused::TooBig => DropReason::TxTooBig,
        Refused::Dear => DropReason::DearBuffers,
        Refused::Broken => DropReason::LinkDown,
    }
}

/// Takes a descriptor out of epoll before it is closed.
fn unwatch(watch: Watch<'_>, kick: Option<EventFd>, closer: &Closer) {
    if let Some(kick) = kick {
        watch.remove(&kick);
        closer.close_soon(kick);
    }
}

impl TxQueue {
    /// Takes a burst of packets that the guest sent. Returns how many packets were taken, and whether they
    /// may be forwarded: the packets of a disabled ring are discarded.
    #[inline]
    fn poll<'m>(
        &mut self,
        memory: &'m GuestMemory,
        max: usize,
        burst: &mut Burst<'m>,
        port: &PortHandle,
        pair: &PairCounters,
    ) -> (usize, bool) {
        let before = burst.bytes();
        let taken = self.queue.poll(memory, max, burst);
        if taken > 0 {
            let bytes = burst.bytes() - before;
            let counters = &*port.counters;
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

    /// Gives the guest the buffers of a burst back.
    #[inline]
    fn complete(&mut self, faults: &mut FrontendFaults, port: &PortHandle, pair: &PairCounters) {
        if self.queue.complete() {
            self.common.ring_call(faults, port, pair);
        } else {
            port.counters.calls_suppressed.add(1);
            pair.calls_suppressed.add(1);
        }
        if let Some(fault) = self.queue.ring().fault() {
            self.common.report(fault, "transmitq", faults, port);
        }
    }
}
