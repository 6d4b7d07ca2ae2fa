//! The data path of `ringferry guest`: packets between a queue of the tap and a pair of virtqueues, on a thread of its
//! own, which shares nothing with those of other pairs.
//!
//! A tap's virtual header and virtio-net's are the same bytes, so the kernel reads and writes packets
//! right where the device sees them, and nothing is copied here.
//!
//! What the session wants of the thread comes as an [`Order`] and is carried out between two bursts. A pair that is not
//! in use has nothing to do: the kernel gives it no packets, as its tap queue is detached, and the device none either. Its
//! thread sleeps, and would still take what the device delivered before it knew.

use std::io;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel};
use std::time::{Duration, Instant};

use ringferry_packet::buffer::Chain;
use ringferry_packet::flow::flow_hash;
use ringferry_packet::frame::PREFIX;
use ringferry_packet::vnet::Offloads;
use ringferry_ring::Fault;
use ringferry_sys::cpu;
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::tap::Tap;
use ringferry_sys::watchdog::Watcher;
use ringferry_virtio_net::driver::Pair;

use super::counts::{Counts, QueuePair, Report};
use super::read;
use super::rings::PairRings;
use super::spread::Gauge;
use crate::tap::{self, Undelivered};

/// Packets moved in one direction before the other gets its turn.
const BURST: usize = 32;

/// Busy rounds between looks at the other descriptors; see the switch's worker.
const BUSY_ROUNDS: u32 = 16;

/// How long a pair shares its flows with others: many round trips, and longer than a kernel waits before it repeats a packet.
const SHARING: Duration = Duration::from_secs(1);

/// What the session asks of a thread. An answer says that it is done.
pub(super) enum Order {
    /// Post receive buffers: packets are about to come.
    Post(SyncSender<()>),
    /// Send what is in the tap's queue, and say so when the device has taken all of it.
    Drain(SyncSender<()>),
    /// Tell what was counted.
    Report(SyncSender<Report>),
    /// Run on these processors only.
    Place(Vec<usize>),
    /// For a while, write what is received to the first so many queues of the tap, each flow to one of them: what is sent
    /// follows it there. See [`spread`](super::spread).
    Share(u16),
    /// Return.
    Stop,
}

/// The session's end of a line to a thread.
pub(super) struct Line {
    orders: Sender<Order>,
    bell: EventFd,
}

/// The thread's end.
pub(super) struct Inbox {
    orders: Receiver<Order>,
    bell: EventFd,
}

impl Line {
    /// Both ends.
    pub(super) fn new() -> io::Result<(Line, Inbox)> {
        let (sender, receiver) = channel();
        let bell = EventFd::new()?;
        Ok((Line { orders: sender, bell: bell.try_clone()? }, Inbox { orders: receiver, bell }))
    }

    /// Gives an order. A thread that has ended does not hear it, and its answer does not come.
    pub(super) fn give(&self, order: Order) {
        let _ = self.orders.send(order);
        let _ = self.bell.signal();
    }
}

/// Why packets no longer pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The session is over: SIGTERM or SIGINT.
    Signal,
    /// The session is over: the back end closed the connection.
    Disconnected,
    /// The back end broke the rules of a ring.
    Broken(Fault),
    /// The back end says that a ring is broken.
    Refused,
    /// The back end held the thread in a kick.
    HeldInKick,
    /// The tap was deleted.
    TapGone,
}

/// Everything a thread needs.
pub(super) struct Bridge<'a> {
    /// All queues.
    taps: &'a [Tap],
    /// The pair's.
    tap: &'a Tap,
    rings: &'a mut PairRings,
    counts: &'a mut Counts,
    gauge: &'a Gauge,
    watcher: Watcher,
    /// What the device may leave unfinished in a packet.
    agreed: Offloads,
    /// A kick did not work: the rings cannot be used any more.
    held: bool,
    /// Bytes of the buffers that packets are read into; one buffer for all of a packet if not given.
    pieces: Option<usize>,
    inbox: Inbox,
    /// Since when nothing has come back of what was sent, as of the last time the thread went to sleep: what had come back
    /// until then, and when that was.
    stalled: Option<(u64, Instant)>,
    /// Whom to answer when the tap's queue and the transmitq are empty.
    draining: Option<SyncSender<()>>,
    /// The queues that flows are shared among, and until when.
    sharing: Option<(&'a [Tap], Instant)>,
}

const ORDERS: u64 = 0;
const TAP: u64 = 1;
const RX_CALL: u64 = 2;
const TX_CALL: u64 = 3;
const ERROR: u64 = 4;

impl<'a> Bridge<'a> {
    /// Between queue `number` of the tap and a pair; packets are read into buffers of `pieces` bytes, or in one piece. What was
    /// `agreed` is what the device may leave unfinished.
    pub(super) fn new(
        (number, taps): (usize, &'a [Tap]),
        rings: &'a mut PairRings,
        (counts, gauge, watcher): (&'a mut Counts, &'a Gauge, Watcher),
        (pieces, agreed): (Option<usize>, Offloads),
        inbox: Inbox,
    ) -> Self {
        let tap = &taps[number];
        let (stalled, draining, sharing) = (None, None, None);
        Self {
            taps,
            tap,
            rings,
            counts,
            gauge,
            watcher,
            agreed,
            held: false,
            pieces,
            inbox,
            stalled,
            draining,
            sharing,
        }
    }

    /// Carries packets until something ends it; `None` when told to stop.
    pub(super) fn run(mut self) -> io::Result<Option<End>> {
        self.gauge.begin();
        self.watcher.watch_this_thread();
        // The back end before may have taken kicks with it: one that waits for them would wait for ever.
        for event in [&self.rings.rx.kick, &self.rings.tx.kick] {
            self.held = self.held || event.signal().is_err();
        }
        let epoll = Epoll::new()?;
        epoll.add(&self.inbox.bell, ORDERS, Interest::READABLE)?;
        epoll.add(self.tap, TAP, Interest::READABLE)?;
        epoll.add(&self.rings.rx.call, RX_CALL, Interest::READABLE)?;
        epoll.add(&self.rings.tx.call, TX_CALL, Interest::READABLE)?;
        epoll.add(&self.rings.rx.err, ERROR, Interest::READABLE)?;
        epoll.add(&self.rings.tx.err, ERROR, Interest::READABLE)?;
        let mut events = EventBuf::with_capacity(8);
        let mut tap_ready = true;
        let mut tap_watched = true;
        // Rounds since the descriptors were looked at.
        let mut rounds = 0;
        loop {
            let sent = tap_ready && self.transmit(&mut tap_ready);
            let received = self.receive();
            if received {
                self.refill();
            }
            if let Some(fault) = self.rings.pair.fault() {
                return Ok(Some(End::Broken(fault)));
            }
            if self.held {
                return Ok(Some(End::HeldInKick));
            }
            if !tap_ready && self.draining.is_some() {
                self.try_answer();
            }
            rounds += 1;
            // While packets pass, the other descriptors are looked at now and then; a tap that was empty
            // can only be looked at there.
            let timeout = if sent || received {
                if tap_ready && rounds < BUSY_ROUNDS {
                    continue;
                }
                Some(Duration::ZERO)
            } else if self.arm(tap_ready) {
                self.rings.pair.disable_calls();
                continue;
            } else {
                None
            };
            rounds = 0;
            // A tap that has packets we have no slots for would wake us all the time.
            let watch = !tap_ready;
            if watch != tap_watched {
                epoll.modify(self.tap, TAP, if watch { Interest::READABLE } else { Interest::empty() })?;
                tap_watched = watch;
            }
            if timeout.is_none() {
                self.note_stall();
            }
            let stall = (timeout.is_none() && tap_ready).then(Instant::now);
            epoll.wait(&mut events, timeout)?;
            if let Some(since) = stall {
                self.gauge.stalled(since.elapsed());
            }
            if timeout.is_none() {
                self.counts.wakeups += 1;
                self.rings.pair.disable_calls();
            }
            for event in events.iter() {
                match event.token {
                    ORDERS if !self.obey(&mut tap_ready) => {
                        self.collect();
                        return Ok(None);
                    }
                    ERROR => return Ok(Some(End::Refused)),
                    TAP if event.hangup => return Ok(Some(End::TapGone)),
                    TAP => tap_ready = true,
                    RX_CALL => drop(self.rings.rx.call.drain()),
                    TX_CALL => drop(self.rings.tx.call.drain()),
                    _ => {}
                }
            }
        }
    }

    /// Carries out what was ordered; false when that is to end.
    fn obey(&mut self, tap_ready: &mut bool) -> bool {
        let _ = self.inbox.bell.drain();
        while let Ok(order) = self.inbox.orders.try_recv() {
            // Whoever does not wait for an answer any more does not get one.
            match order {
                Order::Post(done) => {
                    self.refill();
                    let _ = done.try_send(());
                }
                Order::Drain(done) => {
                    *tap_ready = true;
                    self.draining = Some(done);
                }
                Order::Report(answer) => {
                    self.rings.pair.reclaim();
                    self.note_stall();
                    let queues = Some(QueuePair::of(&self.rings.pair));
                    let in_flight = self.rings.pair.transmitq.in_flight() as u64;
                    let stalled = self.stalled.map_or(Duration::ZERO, |(_, since)| since.elapsed());
                    let _ = answer.try_send(Report { counts: *self.counts, queues, in_flight, stalled });
                }
                Order::Place(cpus) => place(&cpus),
                Order::Share(queues) => {
                    let queues = self.taps.get(..usize::from(queues)).unwrap_or(self.taps);
                    self.sharing = Some((queues, Instant::now() + SHARING));
                }
                Order::Stop => return false,
            }
        }
        true
    }

    /// Notes whether anything has come back of what was sent.
    fn note_stall(&mut self) {
        let transmitq = &self.rings.pair.transmitq;
        let came_back = transmitq.stats().reclaimed;
        self.stalled = match self.stalled {
            _ if transmitq.in_flight() == 0 => None,
            Some((before, since)) if before == came_back => Some((before, since)),
            _ => Some((came_back, Instant::now())),
        };
    }

    /// Answers whoever waits for the queue to be empty, if it is. The tap's was a moment ago.
    #[cold]
    fn try_answer(&mut self) {
        if self.rings.sent_and_open() == 0
            && let Some(done) = self.draining.take()
        {
            let _ = done.try_send(());
        }
    }

    /// Asks to be woken; true when there is work already.
    fn arm(&mut self, tap_ready: bool) -> bool {
        // Packets wait in the tap, but no slot is free: wait for a good part of them.
        let Pair { receiveq, transmitq, .. } = &mut self.rings.pair;
        let full = tap_ready && transmitq.driver().ring().enable_calls_delayed();
        let last = self.draining.is_some() && transmitq.driver().ring().enable_calls();
        receiveq.driver().ring().enable_calls() || full || last
    }

    /// From the tap to the device; whether anything moved. Clears `tap_ready` when the tap is empty.
    fn transmit(&mut self, tap_ready: &mut bool) -> bool {
        let Bridge { rings: PairRings { pair, tx, waiting, .. }, tap, counts, pieces, held, .. } = self;
        let Pair { transmitq, pools, .. } = pair;
        transmitq.reclaim(pools);
        let mut count = 0;
        while count < BURST && transmitq.free() > 0 {
            let packet = match waiting
                .take()
                .map_or_else(|| read::packet(tap, pools, *pieces), |packet| Ok(Some(packet)))
            {
                Ok(Some(packet)) => packet,
                Ok(None) => break,
                Err(_) => {
                    *tap_ready = false;
                    break;
                }
            };
            let len = packet.len();
            if let Err(unsent) = transmitq.send(packet, pools) {
                if unsent.reason.is_retryable() {
                    // A packet of many pieces needs more room than is left.
                    *waiting = Some(unsent.chain);
                    break;
                }
                counts.tx_dropped += 1;
                transmitq.give_up(unsent, pools);
                continue;
            }
            counts.tx_packets += 1;
            counts.tx_bytes += len as u64;
            count += 1;
        }
        if transmitq.flush() {
            counts.kicks += 1;
            counts.tx_kicks += 1;
            *held |= tx.kick.signal().is_err();
        }
        count > 0
    }

    /// From the device to the tap; whether anything moved.
    fn receive(&mut self) -> bool {
        let Bridge { rings: PairRings { pair, length_errors, .. }, tap, counts, sharing, agreed, .. } = self;
        let Pair { receiveq, pools, .. } = pair;
        if sharing.is_some_and(|(_, end)| Instant::now() >= end) {
            *sharing = None;
        }
        let received = receiveq.lend(BURST, pools, |packet, _| {
            let tap = sharing.map_or(*tap, |(queues, _)| of_flow(&packet, queues));
            let delivered = tap::deliver(tap, &packet, *agreed);
            if delivered == Err(Undelivered::BadHeader) {
                counts.rx_bad_headers += 1;
                return Some(packet);
            }
            counts.rx_packets += 1;
            counts.rx_bytes += packet.len() as u64;
            counts.rx_tap_errors += u64::from(delivered.is_err());
            Some(packet)
        });
        if received > 0 {
            let errors = receiveq.stats().rx_length_errors;
            counts.rx_length_errors += errors - std::mem::replace(length_errors, errors);
        }
        received > 0
    }

    /// Takes what the device has delivered when it is about to be no more. As no buffers are posted, this ends.
    fn collect(&mut self) {
        while self.receive() {}
    }

    fn refill(&mut self) {
        if self.rings.pair.refill() {
            self.counts.kicks += 1;
            self.counts.rx_kicks += 1;
            self.held |= self.rings.rx.kick.signal().is_err();
        }
    }
}

/// The queue that a packet's flow shall have.
#[cold]
fn of_flow<'a>(packet: &Chain, queues: &'a [Tap]) -> &'a Tap {
    let mut prefix = [0; PREFIX];
    &queues[flow_hash(packet.prefix(&mut prefix)) as usize % queues.len()]
}

/// Moves the calling thread to these processors. One that has just gone offline is no reason to stop: the session
/// notices, and chooses anew.
fn place(cpus: &[usize]) {
    if let Err(error) = cpu::restrict_current_thread(cpus) {
        tracing::debug!(?cpus, "cannot run there: {error}");
    }
}
