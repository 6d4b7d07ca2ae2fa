//! A port on the heap: the engine's ports in tests, fuzz targets and models.
//!
//! A test makes a [`Wire`], gives its other end to a [`Bed`](super::Bed) as a port, sends frames on it and takes what was delivered. What a
//! real port can do to the engine, a wire can be told to do: run out of buffers, refuse frames, be disabled, hand frames over in pieces, or lie in
//! memory that the engine must not trust.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ringferry_memory::ReadSlice;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::usage::ThreadClock;
use ringferry_virtio_net::device::{Run, RunEnd};

use crate::counters::DropReason;
use crate::plane::queues::MOST_UNUSUAL;
use crate::plane::{Delivery, FrameCost, Lease, PortHandle, PortShared, Queues, Taken, Watch};

thread_local! {
    /// In how many looks of a watchdog this thread would have been found asleep, since that was last asked.
    static LOOKS: Cell<u32> = const { Cell::new(0) };
    /// In how many looks whoever reads a frame of the burst on loan in its place is found asleep.
    static PUNCHED: Cell<u32> = const { Cell::new(0) };
}

/// In how many looks this thread was found asleep in memory of [wires](Wire::punch), since this was last asked.
pub(super) fn looks_asleep() -> u32 {
    LOOKS.take()
}

fn sleep_for(looks: u32) {
    LOOKS.set(LOOKS.get() + looks);
}

/// How long, in looks of a watchdog, whoever touches a port's memory is put to sleep.
#[derive(Clone, Copy, Debug, Default)]
pub struct Punched {
    /// When a burst is taken from its ring.
    pub rings: u32,
    /// When what is behind the first bytes of a frame is read in its place. It must lie in several pieces, by which the receiver tells it from
    /// a copy.
    pub frames: u32,
    /// When a frame is written to it.
    pub buffers: u32,
}

/// A frame with its virtual header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeapFrame {
    /// What the sender asks for, or what the receiver is asked to do.
    pub header: Header,
    /// The frame, from its Ethernet header on.
    pub bytes: Vec<u8>,
    /// Where a frame that is sent is cut into pieces of the sender's memory; ascending.
    pub cuts: Vec<usize>,
}

impl HeapFrame {
    /// A frame in one piece.
    pub fn new(header: Header, bytes: Vec<u8>) -> Self {
        Self { header, bytes, cuts: Vec::new() }
    }

    fn pieces(&self) -> impl Iterator<Item = ReadSlice<'_>> {
        let ends = self.cuts.iter().copied().filter(|cut| *cut < self.bytes.len()).chain([self.bytes.len()]);
        let mut at = 0;
        ends.filter_map(move |end| {
            let from = at;
            at = end.max(at);
            (end > from).then(|| ReadSlice::from(&self.bytes[from..end]))
        })
    }
}

/// One queue of a wire.
#[derive(Debug)]
struct WireQueue {
    sent: VecDeque<HeapFrame>,
    /// A frame that is sent as the queue is armed, by a peer that has just seen that no kick is wanted.
    sent_at_arming: Option<HeapFrame>,
    /// Frames that were delivered and not yet shown.
    unseen: Vec<HeapFrame>,
    seen: Vec<HeapFrame>,
    /// Frames that the receiver has buffers for.
    room: usize,
    /// Deliveries that found none.
    refused: usize,
    /// Frames that were read in several pieces, so where they lay.
    in_place: usize,
    enabled: bool,
    kicks_wanted: bool,
    kick: EventFd,
}

/// The test's end of a port.
#[derive(Debug)]
pub struct Wire {
    queues: Vec<Mutex<WireQueue>>,
    cost: FrameCost,
    /// The engine may trust the memory that frames are sent from.
    private: bool,
    /// The receiver takes offloads of frames with a tag, too.
    offloads_tagged: AtomicBool,
    /// The port is like a tap: its descriptor tells of every frame, and it need not be armed.
    level: bool,
    /// Bytes of the largest frame that the receiver's buffers take.
    largest: AtomicU64,
    /// Processor time, in nanoseconds, that taking a burst from it costs for no good reason.
    burden: AtomicU64,
    /// Buffers that each frame takes beside the first.
    further: AtomicUsize,
    punched: Mutex<Punched>,
    /// Why it was taken out of service.
    out_of_service: Mutex<Option<String>>,
}

impl Wire {
    /// A wire whose `queues` queues all have buffers without end, and whose frames lie in memory that the engine must not trust.
    ///
    /// # Panics
    /// No descriptor is left.
    pub fn new(queues: u16, cost: FrameCost) -> Wire {
        let queue = || WireQueue {
            sent: VecDeque::new(),
            sent_at_arming: None,
            unseen: Vec::new(),
            seen: Vec::new(),
            room: usize::MAX,
            refused: 0,
            in_place: 0,
            enabled: true,
            kicks_wanted: false,
            kick: EventFd::new().expect("a descriptor"),
        };
        let queues = (0..queues.max(1)).map(|_| Mutex::new(queue())).collect();
        let tap = cost == FrameCost::SystemCall;
        let burden = AtomicU64::new(0);
        let (punched, out_of_service) = (Mutex::default(), Mutex::default());
        let offloads_tagged = AtomicBool::new(true);
        let (largest, further) = (AtomicU64::new(u64::MAX), AtomicUsize::new(0));
        Wire {
            queues,
            cost,
            private: tap,
            offloads_tagged,
            level: tap,
            largest,
            burden,
            further,
            punched,
            out_of_service,
        }
    }

    /// Lets the receiver's buffers take no larger frames than of so many bytes.
    pub fn take_at_most(&self, bytes: u64) {
        self.largest.store(bytes, Ordering::Relaxed);
    }

    /// Has each frame take so many buffers beside the first.
    pub fn spread(&self, further: usize) {
        self.further.store(further, Ordering::Relaxed);
    }

    /// Puts whoever touches its memory to sleep.
    pub fn punch(&self, punched: Punched) {
        *self.punched.lock().unwrap_or_else(PoisonError::into_inner) = punched;
    }

    fn punched(&self) -> Punched {
        *self.punched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the engine has taken it out of service, if it has.
    pub fn out_of_service(&self) -> Option<String> {
        self.out_of_service.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes each burst that is taken from it cost so much processor time.
    pub fn burden(&self, time: Duration) {
        self.burden.store(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// How many queues it has.
    pub fn queues(&self) -> u16 {
        self.queues.len() as u16
    }

    fn queue(&self, queue: u16) -> MutexGuard<'_, WireQueue> {
        let at = usize::from(queue).min(self.queues.len() - 1);
        self.queues[at].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the frames of the present burst have taken as many buffers of this queue as they may.
    fn is_dear(&self, queue: &WireQueue) -> bool {
        queue.unseen.len() * self.further.load(Ordering::Relaxed) > MOST_UNUSUAL
    }

    /// Sends a frame into the switch.
    pub fn send(&self, queue: u16, frame: HeapFrame) {
        let mut queue = self.queue(queue);
        queue.sent.push_back(frame);
        if queue.kicks_wanted || self.level {
            queue.kick.signal().expect("an eventfd");
        }
    }

    /// Sends a frame when the worker next arms the queue, after its last look and without a kick.
    pub fn send_at_arming(&self, queue: u16, frame: HeapFrame) {
        self.queue(queue).sent_at_arming = Some(frame);
    }

    /// Takes the frames that were delivered to a queue and shown to its receiver, in order.
    pub fn received(&self, queue: u16) -> Vec<HeapFrame> {
        std::mem::take(&mut self.queue(queue).seen)
    }

    /// Frames that were delivered to a queue and that its receiver was never shown.
    pub fn unseen(&self, queue: u16) -> usize {
        self.queue(queue).unseen.len()
    }

    /// Frames that wait to be taken by the switch.
    pub fn waiting(&self, queue: u16) -> usize {
        self.queue(queue).sent.len()
    }

    /// Gives the receiver of a queue so many buffers.
    pub fn set_room(&self, queue: u16, room: usize) {
        self.queue(queue).room = room;
    }

    /// Deliveries to a queue that found no buffers.
    pub fn refused(&self, queue: u16) -> usize {
        self.queue(queue).refused
    }

    /// Frames delivered to a queue that were read in several pieces, so where they lay and not from a copy.
    pub fn read_in_place(&self, queue: u16) -> usize {
        self.queue(queue).in_place
    }

    /// Lets frames be taken from a queue, or emptied for nothing, as a disabled transmitq is.
    pub fn enable(&self, queue: u16, enabled: bool) {
        self.queue(queue).enabled = enabled;
    }

    /// Lets the receiver take offloads of frames without a tag only, as a Xen guest's does.
    pub fn refuse_tagged_offloads(&self) {
        self.offloads_tagged.store(false, Ordering::Relaxed);
    }

    /// Kicks a queue although nothing was sent.
    pub fn kick(&self, queue: u16) {
        self.queue(queue).kick.signal().expect("an eventfd");
    }
}

/// The engine's end of a port: the queues of a wire that one worker has.
#[derive(Debug)]
pub struct HeapQueues {
    port: PortHandle,
    wire: Arc<Wire>,
    shared: Option<Arc<PortShared>>,
    here: Vec<bool>,
}

impl HeapQueues {
    /// The other end of `wire`, without queues. `shared` is that of a port with pairs.
    pub fn new(port: PortHandle, wire: Arc<Wire>, shared: Option<Arc<PortShared>>) -> Self {
        let here = vec![false; wire.queues.len()];
        Self { port, wire, shared, here }
    }

    fn has(&self, queue: u16) -> bool {
        self.here.get(usize::from(queue)).is_some_and(|here| *here)
    }

    fn serve(&mut self, queue: u16, watch: Watch<'_>) {
        self.here[usize::from(queue)] = true;
        watch.add(&self.wire.queue(queue).kick, queue).expect("a descriptor can be watched");
    }

    fn let_go(&mut self, queue: u16, watch: Watch<'_>) -> bool {
        let had = self.has(queue);
        if had {
            self.here[usize::from(queue)] = false;
            watch.remove(&self.wire.queue(queue).kick);
        }
        had
    }

    fn set_ready(&self, queue: u16, ready: bool) {
        if let Some(shared) = &self.shared {
            shared.set_ready(queue, ready);
        }
    }
}

impl Queues for HeapQueues {
    type Loan = Vec<HeapFrame>;
    type Start = u16;
    type Stopped = ();
    type Request = std::convert::Infallible;
    type Detached = ();
    type State = u16;

    fn lease(&mut self, queue: u16, max: usize) -> Lease<Vec<HeapFrame>> {
        if !self.has(queue) {
            return Lease::Empty;
        }
        let mut wire = self.wire.queue(queue);
        let count = wire.sent.len().min(max);
        match count {
            0 if self.wire.level => {
                // Readable as long as there are frames, as a tap is.
                let _ = wire.kick.drain();
                Lease::Exhausted
            }
            0 => Lease::Empty,
            _ => Lease::Frames(wire.sent.drain(..count).collect()),
        }
    }

    fn frames<'m>(&mut self, queue: u16, loan: &'m Vec<HeapFrame>, _: usize, burst: &mut Burst<'m>) -> Taken {
        let burden = Duration::from_nanos(self.wire.burden.load(Ordering::Relaxed));
        if !burden.is_zero() {
            let used =
                || ThreadClock::current().ok().and_then(ThreadClock::used).expect("a thread has a clock");
            let began = used();
            while used() - began < burden {}
        }
        let Punched { rings, frames, .. } = self.wire.punched();
        sleep_for(rings);
        PUNCHED.set(frames);
        for frame in loan {
            let mut building = burst.build(frame.header, frame.bytes.len() as u32);
            frame.pieces().for_each(|piece| building.piece(piece));
            building.finish();
        }
        let counters = &self.port.counters;
        counters.rx_packets.add(loan.len() as u64);
        counters.rx_bytes.add(loan.iter().map(|frame| frame.bytes.len() as u64).sum());
        let forward = self.wire.queue(queue).enabled;
        if !forward {
            counters.drops.add(DropReason::LinkDown, loan.len() as u64);
        }
        Taken { any: true, forward, private: self.wire.private, exhausted: false, further: 0 }
    }

    fn complete(&mut self, _: u16, _: Vec<HeapFrame>) {
        PUNCHED.set(0);
    }

    fn backlog(&mut self, queue: u16) -> usize {
        if self.has(queue) { self.wire.waiting(queue) } else { 0 }
    }

    fn arm(&mut self, queue: u16) -> bool {
        if !self.has(queue) || self.wire.level {
            return true;
        }
        let mut wire = self.wire.queue(queue);
        let late = wire.sent_at_arming.take();
        wire.sent.extend(late);
        wire.kicks_wanted = wire.sent.is_empty();
        wire.kicks_wanted
    }

    fn is_kickless(&mut self, _: u16) -> bool {
        false
    }

    fn wake(&mut self, queue: u16, _: bool, _: Watch<'_>) -> bool {
        let mut wire = self.wire.queue(queue);
        if !self.wire.level {
            let _ = wire.kick.drain();
        }
        wire.kicks_wanted = false;
        self.port.counters.kicks.add(1);
        true
    }

    fn pause(&mut self, queue: u16, watch: Watch<'_>) {
        if self.wire.level && self.has(queue) {
            watch.remove(&self.wire.queue(queue).kick);
        }
    }

    fn resume(&mut self, queue: u16, watch: Watch<'_>) {
        if self.wire.level && self.has(queue) {
            watch.add(&self.wire.queue(queue).kick, queue).expect("a descriptor can be watched");
        }
    }

    fn frame_cost(&self) -> FrameCost {
        self.wire.cost
    }

    fn offloads_tagged(&self) -> bool {
        self.wire.offloads_tagged.load(Ordering::Relaxed)
    }

    fn expect(&mut self, _: usize) {}

    fn deliver(
        &mut self,
        queue: u16,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        len: u64,
    ) -> Result<Delivery, DropReason> {
        if self.shared.is_some() && !self.has(queue) {
            return Ok(Delivery::NotHere);
        }
        if len > self.wire.largest.load(Ordering::Relaxed) {
            return Err(DropReason::TxTooBig);
        }
        let mut wire = self.wire.queue(queue);
        if wire.room == 0 {
            wire.refused += 1;
            return Err(DropReason::NoReceiveBuffers);
        }
        if self.wire.is_dear(&wire) {
            return Err(DropReason::DearBuffers);
        }
        if wire.room != usize::MAX {
            wire.room -= 1;
        }
        sleep_for(self.wire.punched().buffers);
        let mut bytes = first.to_vec();
        if rest.len() > 1 {
            wire.in_place += 1;
            sleep_for(PUNCHED.get());
        }
        for piece in rest {
            let at = bytes.len();
            bytes.resize(at + piece.len(), 0);
            piece.copy_to(&mut bytes[at..]);
        }
        assert_eq!(bytes.len() as u64, len, "the length that is announced is that of the pieces");
        wire.unseen.push(HeapFrame::new(header, bytes));
        Ok(Delivery::Done)
    }

    fn probe(&mut self, queue: u16, packets: &[(Header, Vec<u8>)]) -> Vec<Result<Delivery, DropReason>> {
        if self.shared.is_some() && !self.has(queue) {
            return vec![Ok(Delivery::NotHere); packets.len()];
        }
        let (largest, mut room) = (self.wire.largest.load(Ordering::Relaxed), self.wire.queue(queue).room);
        let results = packets.iter().map(|(_, frame)| {
            if frame.len() as u64 > largest {
                return Err(DropReason::TxTooBig);
            }
            room = room.checked_sub(1).ok_or(DropReason::NoReceiveBuffers)?;
            Ok(Delivery::Done)
        });
        results.collect()
    }

    /// Runs are short, so that bursts go both ways in turns.
    fn deliver_run(&mut self, queue: u16, burst: &Burst<'_>, picks: &[u32]) -> Run {
        const LONGEST: usize = 3;
        let mut run = Run { frames: 0, bytes: 0, end: RunEnd::Complete };
        for pick in picks {
            let (frame, here) = (&burst.frames()[*pick as usize], self.shared.is_some() && self.has(queue));
            let is_over = |wire: &WireQueue| wire.room == 0 || self.wire.is_dear(wire);
            if !here || is_over(&self.wire.queue(queue)) {
                return Run { end: RunEnd::Queue, ..run };
            }
            if run.frames == LONGEST || u64::from(frame.len) > self.wire.largest.load(Ordering::Relaxed) {
                return Run { end: RunEnd::Frame, ..run };
            }
            let (first, rest, len) = (frame.prefix(), burst.rest(frame), u64::from(frame.len));
            let done = self.deliver(queue, frame.header, first, rest, len);
            assert_eq!(done, Ok(Delivery::Done), "there is room");
            (run.frames, run.bytes) = (run.frames + 1, run.bytes + len);
        }
        run
    }

    fn flush(&mut self) -> usize {
        let mut frames = 0;
        // A port without pairs is written to by every worker.
        for queue in 0..self.wire.queues() {
            if self.shared.is_none() || self.has(queue) {
                let mut wire = self.wire.queue(queue);
                let mut unseen = std::mem::take(&mut wire.unseen);
                frames += unseen.len();
                wire.seen.append(&mut unseen);
            }
        }
        frames * self.wire.further.load(Ordering::Relaxed)
    }

    fn start(&mut self, queue: u16, watch: Watch<'_>) -> Option<u16> {
        self.serve(queue, watch);
        self.set_ready(queue, true);
        Some(queue)
    }

    fn stop(&mut self, queue: u16, watch: Watch<'_>) -> Option<((), Option<u16>)> {
        self.set_ready(queue, false);
        self.let_go(queue, watch).then_some(((), Some(queue)))
    }

    fn close(&mut self, watch: Watch<'_>) {
        for queue in 0..self.wire.queues() {
            if self.let_go(queue, watch) {
                self.set_ready(queue, false);
            }
        }
    }

    fn request(&mut self, request: std::convert::Infallible, _: Watch<'_>) {
        match request {}
    }

    fn detach(&mut self, queue: u16, watch: Watch<'_>) -> Option<()> {
        self.let_go(queue, watch).then_some(())
    }

    fn attach(&mut self, queue: u16, (): (), watch: Watch<'_>) -> bool {
        self.serve(queue, watch);
        true
    }

    fn take_out_of_service(&mut self, why: &str, watch: Watch<'_>) {
        *self.wire.out_of_service.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.to_owned());
        self.close(watch);
    }

    fn inspect(&mut self, states: &mut Vec<u16>) {
        states.extend((0..self.wire.queues()).filter(|queue| self.has(*queue)));
    }
}
