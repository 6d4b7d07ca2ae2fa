//! A worker: one thread that moves packets between the queues it owns.
//!
//! A queue that packets come from is either *active* (polled each round, its notifications off) or
//! *armed* (notifications on, its descriptor watched, costing nothing). Whatever is found in an
//! active queue is forwarded at once; a queue that stays empty is armed, with a re-check, as the peer
//! may have added work before it saw that we want to be told. With no active queue left the worker
//! sleeps in epoll.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_ring::Fault;
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::spin::{Idle, Spin};
use ringferry_xen_net::netback::PageCounters;

use super::aim::Aim;
use super::command::{Command, Inbox, QueueState, RingStart};
use super::crossing::{Crossing, Message, Parcel};
use super::forward::{self, Forwarder, Origin, Tables};
use super::gate::Gate;
use super::guest::{Guest, TxQueue};
use super::moment::Moment;
use super::moving::Moving;
use super::port::{Kind, Port, Way};
use super::tap::{self, TapPort};
use super::vif::{Vif, VifQueue, VifStart};
use crate::config::SwitchConfig;
use crate::counters::{PairCounters, PortCounters, WorkerCounters};
use crate::fdb::{Fdb, PortId};

mod straight;

/// Packets taken from a queue at a time. DPDK, OVS and VPP settled on 32 (or 256 with vectors); 64
/// gained nothing here and keeps others waiting twice as long.
const BURST: usize = 32;

/// Rounds in which a queue may be found empty, while others are busy, before it is armed. Each costs
/// one load of a line that did not change; arming costs a fence and, later, the peer a kick.
const ROUNDS_TO_ARM: u32 = 256;

/// Busy rounds between looks at epoll: how long commands and idle ports wait while others are busy.
/// 16 rounds of 32 packets take well below a millisecond.
const BUSY_ROUNDS: u32 = 16;

/// How often rings without a kick descriptor are looked at while everything else is idle.
const KICKLESS: Duration = Duration::from_micros(100);

/// Events taken per look. More are reported by the next.
const EVENTS: usize = 64;

/// Commands carried out per look, so that no flood of them keeps packets waiting.
const COMMANDS: usize = 64;

/// Slots of the ring that a Xen guest sends on.
const VIF_SLOTS: usize = 256;

/// Buckets of the forwarding database swept per second of activity.
const SWEEP: usize = 1024;

/// Epoll token of the command bell. Others are a port number and a pair.
pub(super) const BELL: u64 = u64::MAX;

/// Something packets come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    /// The transmitq of this pair.
    Transmitq(PortId, u16),
    /// The tap of this port.
    Tap(PortId),
    /// This queue of a Xen guest.
    Vif(PortId, u16),
}

impl Source {
    const TAP: u64 = 1 << 32;
    const VIF: u64 = 1 << 33;

    fn token(self) -> u64 {
        match self {
            Source::Transmitq(port, pair) => u64::from(port.0) << 16 | u64::from(pair),
            Source::Tap(port) => Self::TAP | u64::from(port.0) << 16,
            Source::Vif(port, number) => Self::VIF | u64::from(port.0) << 16 | u64::from(number),
        }
    }

    fn of(token: u64) -> Source {
        let port = PortId((token >> 16) as u16);
        match token & (Self::TAP | Self::VIF) {
            Self::TAP => Source::Tap(port),
            Self::VIF => Source::Vif(port, token as u16),
            _ => Source::Transmitq(port, token as u16),
        }
    }
}

/// A source that is polled, and for how many rounds it was empty.
struct Active {
    source: Source,
    empty: u32,
}

/// What a poll of a source found.
struct Polled {
    moved: bool,
    /// Epoll will tell when there is more; polling again would only find that out.
    exhausted: bool,
}

impl Polled {
    const NOTHING: Polled = Polled { moved: false, exhausted: false };
}

/// The state of the thread.
pub(super) struct Worker {
    ports: Vec<Option<Port>>,
    /// What the rules of ports say, of those that have any; a port's rules come before it does.
    gates: Vec<Option<Arc<Gate>>>,
    active: Vec<Active>,
    fdb: Fdb,
    forwarder: Forwarder,
    /// Storage of the last burst.
    storage: Burst<'static>,
    epoll: Epoll,
    /// Lent out while its events are served.
    events: Option<EventBuf>,
    inbox: Inbox,
    crossing: Crossing,
    /// Ports that frames which crossed go to, in this round.
    crossed: Vec<PortId>,
    counters: Arc<WorkerCounters>,
    spin: Spin,
    started: Instant,
    /// Seconds since the start: the clock of the forwarding database.
    now: u32,
    stop: bool,
}

impl Worker {
    /// A worker without ports. `epoll` watches nothing but the inbox's bell, under [`BELL`]; `seed`
    /// is random and secret; `started` is the same for all workers, as token buckets are filled by all of their clocks.
    pub(super) fn new(
        config: &SwitchConfig,
        inbox: Inbox,
        crossing: Crossing,
        epoll: Epoll,
        seed: [u64; 2],
        counters: Arc<WorkerCounters>,
        started: Instant,
    ) -> Self {
        Self {
            ports: Vec::new(),
            gates: Vec::new(),
            active: Vec::new(),
            fdb: Fdb::new(config.mac_table_size as usize, config.mac_age_seconds, seed),
            forwarder: Forwarder::default(),
            storage: Burst::new(),
            epoll,
            events: None,
            inbox,
            crossing,
            crossed: Vec::new(),
            counters,
            spin: Spin::new(Duration::from_micros(config.poll_microseconds.into())),
            started,
            now: 0,
            stop: false,
        }
    }

    pub(super) fn run(mut self) {
        // Busy rounds since epoll was looked at.
        let mut rounds = 0;
        while !self.stop {
            let moved = self.round();
            self.counters.polls.add(1);
            if moved {
                self.counters.busy_polls.add(1);
                self.spin.found();
                rounds += 1;
                if rounds >= BUSY_ROUNDS {
                    rounds = 0;
                    self.look(Some(Duration::ZERO));
                }
                continue;
            }
            match self.spin.idle() {
                Idle::Again if !self.active.is_empty() => {}
                // A tap has no ring that could be looked at.
                Idle::Again | Idle::Around => {
                    self.look(Some(Duration::ZERO));
                }
                Idle::Sleep => {
                    self.arm_all();
                    if self.active.is_empty() {
                        self.sleep(None);
                    } else if self.only_kickless() {
                        self.sleep(Some(KICKLESS));
                    }
                }
            }
        }
    }

    /// Polls every active source once; whether anything moved.
    fn round(&mut self) -> bool {
        let mut moved = self.poll_crossing();
        let mut at = 0;
        while let Some(&Active { source, empty }) = self.active.get(at) {
            let polled = match source {
                Source::Transmitq(port, pair) => self.poll_transmitq(port, pair),
                Source::Tap(port) => self.poll_tap(port),
                Source::Vif(port, number) => self.poll_vif(port, number),
            };
            moved |= polled.moved;
            if polled.exhausted || !polled.moved && empty >= ROUNDS_TO_ARM && self.arm(source) {
                self.active.swap_remove(at);
                continue;
            }
            self.active[at].empty = if polled.moved { 0 } else { empty.saturating_add(1) };
            at += 1;
        }
        moved
    }

    /// Delivers what other workers have for queues of this one.
    #[inline]
    fn poll_crossing(&mut self) -> bool {
        let mut moved = false;
        for _ in 0..BURST {
            let Some((from, message)) = self.crossing.receive() else { break };
            moved = true;
            match message {
                Message::Frame(Parcel { port, header, frame }) => {
                    let now = Moment::new(self.started, self.now);
                    if let Some(Some(to)) = self.ports.get_mut(usize::from(port.0)) {
                        if !self.crossed.contains(&port) {
                            self.crossed.push(port);
                            to.expect(1, &self.crossing);
                        }
                        let scratch = self.forwarder.scratch();
                        to.put(
                            header,
                            &frame,
                            &[],
                            &mut Way { crossing: &mut self.crossing, now: &now, scratch },
                        );
                    }
                    self.crossing.give_back(from, frame);
                }
                Message::Learn(vid, mac, port) => {
                    let _ = self.fdb.learn(vid, mac, port, self.now);
                }
            }
        }
        while let Some(id) = self.crossed.pop() {
            self.show(id);
        }
        if moved {
            // A pair may have gone to another worker meanwhile, and the frame after it.
            self.crossing.flush();
        }
        moved
    }

    /// Shows a port's receiver what was delivered, and senders what its answers are.
    fn show(&mut self, id: PortId) {
        if let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) {
            port.flush();
            if port.has_answers() {
                let now = &Moment::new(self.started, self.now);
                let (crossing, scratch) = (&mut self.crossing, self.forwarder.scratch());
                forward::answer(id, &mut self.ports, &self.fdb, &mut Way { crossing, now, scratch });
            }
        }
    }

    /// Forwards a burst of what a guest sent.
    fn poll_transmitq(&mut self, port: PortId, pair: u16) -> Polled {
        let Some((queue, counters, pairs)) = transmitq(&mut self.ports, port, pair) else {
            return Polled::NOTHING;
        };
        if !queue.queue.ring().has_chains() && queue.queue.ring().fault().is_none() {
            return Polled::NOTHING;
        }
        // Keeps the memory mapped while frames borrow it, whatever happens to the queue.
        let memory = Arc::clone(&queue.common.memory);
        let mut burst = Burst::reuse(std::mem::take(&mut self.storage));
        let (taken, forward) = queue.poll(&memory, BURST, &mut burst, counters, pairs);
        if forward && !burst.is_empty() {
            let now = Moment::new(self.started, self.now);
            if let Some(guest) = guest(&mut self.ports, port) {
                guest.learn(pair, &burst, &self.crossing, &now);
            }
            self.forward(Origin { port, private: false }, &burst, &now);
        }
        self.storage = Burst::reuse(burst);
        if let Some(Some(Port { kind: Kind::Guest(guest), counters, name, .. })) =
            self.ports.get_mut(usize::from(port.0))
            && let Guest { tx, limit, shared, .. } = guest
            && let Some(Some(queue)) = tx.get_mut(usize::from(pair))
            && let Some(pair) = shared.pairs.get(usize::from(pair))
        {
            queue.complete(limit, name, counters, pair);
        }
        Polled { moved: taken > 0, exhausted: false }
    }

    /// Forwards a burst of what the host sent.
    fn poll_tap(&mut self, port: PortId) -> Polled {
        if let Some(polled) = self.poll_straight(port) {
            return polled;
        }
        let Some((tap, counters)) = tap_port(&mut self.ports, port) else { return Polled::NOTHING };
        let (count, more) = tap.read();
        if count > 0 {
            let lent = tap.lend();
            let mut burst = Burst::reuse(std::mem::take(&mut self.storage));
            tap::frames(&lent.0, &lent.1, &mut burst, counters);
            let now = Moment::new(self.started, self.now);
            self.forward(Origin { port, private: true }, &burst, &now);
            self.consider_straight(port, &burst, &now);
            self.storage = Burst::reuse(burst);
            if let Some((tap, _)) = tap_port(&mut self.ports, port) {
                tap.give_back(lent);
            }
        }
        Polled { moved: count > 0, exhausted: !more }
    }

    /// Forwards a burst of what a Xen guest sent.
    fn poll_vif(&mut self, port: PortId, number: u16) -> Polled {
        let Some((vif, counters)) = vif_port(&mut self.ports, port) else { return Polled::NOTHING };
        let Some((queue, multicast, pair, reporter)) = vif.queue(number) else { return Polled::NOTHING };
        if queue.is_broken() {
            return Polled { moved: false, exhausted: true };
        }
        let taken = queue.poll(BURST, multicast);
        if taken == 0 {
            if queue.queue.fault().is_some() {
                queue.complete(port, counters, pair, reporter);
            }
            return Polled::NOTHING;
        }
        // Its pages stay where they are while frames borrow them, whatever happens to the queue.
        if let Some(lent) = queue.queue.lend() {
            let mut burst = Burst::reuse(std::mem::take(&mut self.storage));
            lent.frames(&mut burst);
            queue.count(&burst, counters, pair);
            if !burst.is_empty() {
                let now = Moment::new(self.started, self.now);
                vif.learn(number, &burst, &self.crossing, &now);
                self.forward(Origin { port, private: false }, &burst, &now);
            }
            self.storage = Burst::reuse(burst);
            if let Some((vif, counters)) = vif_port(&mut self.ports, port)
                && let Some((queue, _, pair, reporter)) = vif.queue(number)
            {
                queue.queue.give_back(lent);
                queue.complete(port, counters, pair, reporter);
            }
        }
        Polled { moved: true, exhausted: false }
    }

    /// Arms every active source that has a way to wake us.
    fn arm_all(&mut self) {
        let mut at = 0;
        while let Some(&Active { source, .. }) = self.active.get(at) {
            if self.arm(source) {
                self.active.swap_remove(at);
            } else {
                at += 1;
            }
        }
    }

    fn forward(&mut self, from: Origin, burst: &Burst<'_>, now: &Moment) {
        let Worker { forwarder, ports, fdb, crossing, .. } = self;
        forwarder.forward(from, burst, &mut Tables { ports, fdb, crossing }, now);
    }

    /// Asks a source to wake us; false when it has work already, or cannot.
    fn arm(&mut self, source: Source) -> bool {
        match source {
            Source::Tap(_) => true,
            Source::Vif(port, number) => vif_queue(&mut self.ports, port, number).is_none_or(VifQueue::arm),
            Source::Transmitq(port, pair) => {
                let Some((queue, ..)) = transmitq(&mut self.ports, port, pair) else { return true };
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
        }
    }

    /// Whether all that is active are empty rings that cannot wake us.
    fn only_kickless(&mut self) -> bool {
        let ports = &mut self.ports;
        self.active.iter().all(|active| match active.source {
            Source::Tap(_) | Source::Vif(..) => false,
            Source::Transmitq(port, pair) => transmitq(ports, port, pair)
                .is_some_and(|(queue, ..)| queue.common.kick.is_none() && !queue.queue.ring().has_chains()),
        })
    }

    fn activate(&mut self, source: Source) {
        if !self.active.iter().any(|active| active.source == source) {
            self.active.push(Active { source, empty: 0 });
        }
    }

    fn sleep(&mut self, timeout: Option<Duration>) {
        if !self.crossing.about_to_sleep() {
            return;
        }
        self.counters.sleeps.add(1);
        let before = Instant::now();
        self.counters.asleep.store(true, Ordering::Relaxed);
        let woken = self.look(timeout);
        self.counters.asleep.store(false, Ordering::Relaxed);
        self.crossing.awake();
        if woken {
            self.counters.wakeups.add(1);
        }
        let time = before.elapsed();
        self.counters.sleep_nanoseconds.add(time.as_nanos() as u64);
        self.spin.slept(time);
    }

    /// Takes note of what epoll reports; whether there was anything.
    fn look(&mut self, timeout: Option<Duration>) -> bool {
        let mut events = self.events.take().unwrap_or_else(|| EventBuf::with_capacity(EVENTS));
        // The only errors are bugs of ours (a bad descriptor), which no retry mends.
        let count = self.epoll.wait(&mut events, timeout).expect("epoll on descriptors of our own");
        let now = self.started.elapsed().as_secs() as u32;
        if now != self.now {
            self.now = now;
            self.fdb.sweep(SWEEP, now);
        }
        for event in events.iter() {
            if event.token == BELL {
                let _ = self.inbox.bell.drain();
                let commands = self.inbox.commands.try_iter().take(COMMANDS).collect::<Vec<_>>();
                if commands.len() == COMMANDS {
                    let _ = self.inbox.bell.signal();
                }
                commands.into_iter().for_each(|command| self.execute(command));
            } else {
                self.wake(Source::of(event.token), event.hangup);
            }
        }
        self.events = Some(events);
        count > 0
    }

    /// A source says it has work.
    fn wake(&mut self, source: Source, hangup: bool) {
        match source {
            Source::Transmitq(port, pair) => {
                let Some((queue, counters, pairs)) = transmitq(&mut self.ports, port, pair) else { return };
                counters.kicks.add(1);
                pairs.kicks.add(1);
                queue.queue.ring().disable_kicks();
                let drained = queue.common.kick.as_ref().is_none_or(|kick| kick.drain().is_ok());
                if !drained {
                    // Not an eventfd after all: it would keep us awake for ever.
                    unwatch(&self.epoll, queue.common.kick.take());
                    queue.queue.ring().break_with(Fault::Unusable);
                }
            }
            Source::Tap(port) if hangup => {
                let Some((tap, _)) = tap_port(&mut self.ports, port) else { return };
                // The device was deleted under us: nothing will ever come again.
                tracing::warn!(tap = tap.tap.name(), "the tap is gone; restart ringferry to attach it again");
                let _ = self.epoll.remove(&tap.tap);
                return;
            }
            Source::Tap(_) => {}
            Source::Vif(port, number) => {
                let Some((vif, counters)) = vif_port(&mut self.ports, port) else { return };
                let Some((queue, _, pair, reporter)) = vif.queue(number) else { return };
                counters.kicks.add(1);
                pair.kicks.add(1);
                if queue.events.drain().is_err() {
                    // It would keep us awake for ever.
                    unwatch_vif(&self.epoll, queue);
                    queue.report(port, "its event channel is gone", reporter);
                    return;
                }
            }
        }
        self.activate(source);
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::AddGuest(id, name, counters, shared) => {
                self.add(id, name, counters, Kind::Guest(Guest::new(id, shared)));
            }
            Command::AddTap(id, name, counters, tap, read) => {
                self.add(id, name, counters, Kind::Tap(TapPort::new(tap)));
                if read {
                    self.read_tap(id);
                }
            }
            Command::AddVif(id, name, counters, shared) => {
                let reporter = Arc::clone(&self.inbox.reporter);
                self.add(id, name, counters, Kind::Vif(Vif::new(id, shared, reporter)));
            }
            Command::FilterVif(id, filter) => {
                if let Some((vif, _)) = vif_port(&mut self.ports, id) {
                    vif.filter(filter);
                }
            }
            Command::StartVif(id, start) => self.start_vif(id, *start),
            Command::StopVif(id, number, reply) => {
                if let Some(counters) = self.stop_vif(id, number) {
                    let _ = reply.send(counters);
                }
            }
            Command::WithVif(id, number, task) => {
                if let Some(queue) = vif_queue(&mut self.ports, id, number) {
                    task(&mut queue.queue);
                }
            }
            Command::Settle(reply) => {
                self.settle();
                let _ = reply.send(());
            }
            Command::Expect(id, pair, reply) => {
                if let Some(Some(port)) = self.ports.get_mut(usize::from(id.0))
                    && let Some(aim) = port.aim()
                {
                    aim.expect(pair);
                }
                let _ = reply.send(());
            }
            Command::Take(id, pair, reply) => {
                self.settle();
                if let Some(moving) = self.take(id, pair) {
                    let _ = reply.send(moving);
                }
            }
            Command::Give(id, pair, moving) => self.give(id, pair, *moving),
            Command::Remove(id, reply) => {
                if let Some(port) = self.ports.get_mut(usize::from(id.0)) {
                    *port = None;
                }
                self.fdb.remove_port(id);
                self.set_gate(id, None);
                let _ = reply.send(());
            }
            Command::StartRing(id, start) => self.start_ring(id, *start),
            Command::StopRing(id, index, reply) => {
                if let Some(base) = self.stop_ring(id, index) {
                    let _ = reply.send(base);
                }
            }
            Command::EnableRing(id, index, enabled, reply) => {
                if !enabled {
                    self.drain(id, index);
                }
                if let Some(guest) = guest(&mut self.ports, id) {
                    guest.enable(index, enabled);
                }
                let _ = reply.send(());
            }
            Command::SetCall(id, index, call) => {
                if let Some(common) = guest(&mut self.ports, id).and_then(|guest| guest.common(index)) {
                    common.call = call;
                    // For what was shown while there was nobody to call.
                    self.call(id, index);
                }
            }
            Command::Forget(id) => self.fdb.forget_port(id),
            Command::SetRules(id, rules, gate) => {
                self.fdb.set_limit(id, rules.max_macs);
                if self.fdb.set_static(id, &rules.static_macs) > 0 {
                    tracing::warn!(port = id.0, "no place for all static addresses: raise mac_table_size");
                }
                self.set_gate(id, gate);
            }
            Command::Inject(id, frame) => {
                let now = Moment::new(self.started, self.now);
                let frame = [(Header::default(), frame)];
                self.forward(Origin { port: id, private: true }, &forward::burst_of(&frame), &now);
            }
            Command::Inspect(reply) => {
                let _ = reply.send(self.inspect());
            }
            Command::Addresses(from, reply) => {
                let _ = reply.send(self.fdb.page(from, self.now));
            }
            Command::Stop => self.stop = true,
        }
    }

    /// Forwards what a guest had sent on a transmitq before it was disabled: it counts as accepted.
    fn drain(&mut self, id: PortId, index: u16) {
        let pair = index / 2;
        let size = match transmitq(&mut self.ports, id, pair) {
            Some((queue, ..)) if index % 2 == 1 && queue.common.enabled => queue.queue.ring().size(),
            _ => return,
        };
        for _ in 0..usize::from(size).div_ceil(BURST) {
            if !self.poll_transmitq(id, pair).moved {
                break;
            }
        }
    }

    fn add(&mut self, id: PortId, name: String, counters: Arc<PortCounters>, kind: Kind) {
        let at = usize::from(id.0);
        if self.ports.len() <= at {
            self.ports.resize_with(at + 1, || None);
        }
        let gate = self.gates.get(at).cloned().flatten();
        self.ports[at] = Some(Port::new(kind, name, counters, gate));
    }

    fn set_gate(&mut self, id: PortId, gate: Option<Arc<Gate>>) {
        let at = usize::from(id.0);
        if let Some(Some(port)) = self.ports.get_mut(at) {
            port.gate.clone_from(&gate);
        }
        if self.gates.len() <= at {
            self.gates.resize_with(at + 1, || None);
        }
        self.gates[at] = gate;
    }

    fn start_ring(&mut self, id: PortId, mut start: RingStart) {
        let Some(guest) = guest(&mut self.ports, id) else { return };
        let index = start.index;
        let sends = index % 2 == 1;
        if sends {
            watch_kicks(&self.epoll, id, index / 2, &mut start.kick);
        }
        guest.start(start);
        // The last device may have died between showing buffers and calling for them, and with
        // EVENT_IDX the guest would then never be called again. One call too many is legal.
        self.call(id, index);
        if sends {
            self.activate(Source::Transmitq(id, index / 2));
        }
    }

    /// Delivers all that other workers have had for this one.
    fn settle(&mut self) {
        for _ in 0..self.crossing.most().div_ceil(BURST) {
            if !self.poll_crossing() {
                break;
            }
        }
    }

    /// Lets another worker have a pair of a port, or what a tap has received.
    fn take(&mut self, id: PortId, pair: u16) -> Option<Moving> {
        let port = self.ports.get_mut(usize::from(id.0))?.as_mut()?;
        let (moving, source) = match &mut port.kind {
            Kind::Guest(guest) => {
                let rings = guest.take(pair);
                if let Some(kick) = rings.tx.as_ref().and_then(|queue| queue.common.kick.as_ref()) {
                    let _ = self.epoll.remove(kick);
                }
                (Moving::Rings(rings), Source::Transmitq(id, pair))
            }
            Kind::Vif(vif) => {
                let queue = vif.take(pair);
                queue.iter().for_each(|(queue, _)| unwatch_vif(&self.epoll, queue));
                (Moving::Vif(queue), Source::Vif(id, pair))
            }
            Kind::Tap(tap) => {
                let _ = self.epoll.remove(&tap.tap);
                tap.set_burst(0);
                (Moving::Tap, Source::Tap(id))
            }
        };
        self.active.retain(|active| active.source != source);
        Some(moving)
    }

    /// Serves what another worker had, beginning with the frames that have come for it meanwhile.
    fn give(&mut self, id: PortId, pair: u16, moving: Moving) {
        let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { return };
        match (&mut port.kind, moving) {
            (Kind::Guest(guest), Moving::Rings(rings)) => {
                guest.give(pair, rings);
                if let Some(Some(queue)) = guest.tx.get_mut(usize::from(pair)) {
                    watch_kicks(&self.epoll, id, pair, &mut queue.common.kick);
                    self.activate(Source::Transmitq(id, pair));
                }
            }
            (Kind::Vif(vif), Moving::Vif(Some(queue))) => {
                vif.give(queue, &port.counters);
                self.serve_vif(id, pair);
            }
            (Kind::Tap(_), Moving::Tap) => self.read_tap(id),
            _ => {}
        }
        let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { return };
        let held = port.aim().map(Aim::arrived).unwrap_or_default();
        let now = Moment::new(self.started, self.now);
        port.expect(held.len(), &self.crossing);
        for (header, frame) in held {
            let (crossing, scratch) = (&mut self.crossing, self.forwarder.scratch());
            port.put(header, &frame, &[], &mut Way { crossing, now: &now, scratch });
        }
        self.show(id);
        self.crossing.flush();
    }

    /// Reads what a tap receives.
    fn read_tap(&mut self, id: PortId) {
        let Some((tap, _)) = tap_port(&mut self.ports, id) else { return };
        tap.set_burst(BURST);
        if let Err(error) = self.epoll.add(&tap.tap, Source::Tap(id).token(), Interest::READABLE) {
            tracing::error!(tap = tap.tap.name(), "cannot wait for the tap: {error}");
        }
        self.activate(Source::Tap(id));
    }

    fn start_vif(&mut self, id: PortId, start: VifStart) {
        if let Some(Some(Port { kind: Kind::Vif(vif), counters, .. })) = self.ports.get_mut(usize::from(id.0))
        {
            let number = start.number;
            vif.start(start, counters);
            self.serve_vif(id, number);
        }
    }

    fn serve_vif(&mut self, id: PortId, number: u16) {
        let Some((vif, _)) = vif_port(&mut self.ports, id) else { return };
        let Some((queue, _, _, reporter)) = vif.queue(number) else { return };
        let source = Source::Vif(id, number);
        // Those for what the guest receives tell that frames which wait for pages may go on.
        let watched =
            queue.events.fds().try_for_each(|fd| self.epoll.add(fd, source.token(), Interest::READABLE));
        if let Err(error) = watched {
            queue.report(id, &format!("its events cannot be waited for: {error}"), reporter);
        }
        self.activate(source);
    }

    fn stop_vif(&mut self, id: PortId, number: u16) -> Option<PageCounters> {
        // What the guest had sent before counts as accepted; a ring holds no more than this.
        for _ in 0..VIF_SLOTS.div_ceil(BURST) {
            if !self.poll_vif(id, number).moved {
                break;
            }
        }
        unwatch_vif(&self.epoll, vif_queue(&mut self.ports, id, number)?);
        let source = Source::Vif(id, number);
        self.active.retain(|active| active.source != source);
        vif_port(&mut self.ports, id)?.0.stop(number)
    }

    /// Calls the guest of a ring, whatever it said of wanting to be called.
    fn call(&mut self, id: PortId, index: u16) {
        if let Some(Some(Port { kind: Kind::Guest(guest), name, counters, .. })) =
            self.ports.get_mut(usize::from(id.0))
            && let Some(pair) = Arc::clone(&guest.shared).pairs.get(usize::from(index / 2))
            && let Some(common) = guest.common(index)
        {
            common.ring_call(name, counters, pair);
        }
    }

    fn stop_ring(&mut self, id: PortId, index: u16) -> Option<u16> {
        let guest = guest(&mut self.ports, id)?;
        if index % 2 == 1 {
            unwatch(&self.epoll, guest.common(index).and_then(|common| common.kick.take()));
            let source = Source::Transmitq(id, index / 2);
            self.active.retain(|active| active.source != source);
        }
        guest.stop(index)
    }

    fn inspect(&mut self) -> Vec<QueueState> {
        let mut queues = Vec::new();
        for (port, kind) in (0u16..).zip(&mut self.ports) {
            let port = PortId(port);
            match kind.as_mut().map(|port| &mut port.kind) {
                Some(Kind::Guest(guest)) => queues.extend(guest.rings().map(|(index, ring)| QueueState {
                    port,
                    index,
                    last_avail: ring.base(),
                    last_used: ring.used_index(),
                    broken: ring.fault().map(|fault| fault.to_string()),
                    pages: None,
                })),
                Some(Kind::Vif(vif)) => {
                    for (number, state, broken) in vif.states() {
                        let [tx, rx] = state.positions;
                        let ring = |index, (asked, answered): (u32, u32), pages| QueueState {
                            port,
                            index,
                            last_avail: asked as u16,
                            last_used: answered as u16,
                            broken: broken.clone(),
                            pages,
                        };
                        queues.extend([ring(2 * number, rx, None), ring(2 * number + 1, tx, Some(state))]);
                    }
                }
                Some(Kind::Tap(_)) | None => {}
            }
        }
        queues
    }
}

fn guest(ports: &mut [Option<Port>], id: PortId) -> Option<&mut Guest> {
    match ports.get_mut(usize::from(id.0)) {
        Some(Some(Port { kind: Kind::Guest(guest), .. })) => Some(guest),
        _ => None,
    }
}

fn transmitq(
    ports: &mut [Option<Port>],
    id: PortId,
    pair: u16,
) -> Option<(&mut TxQueue, &PortCounters, &PairCounters)> {
    match ports.get_mut(usize::from(id.0)) {
        Some(Some(Port { kind: Kind::Guest(Guest { tx, shared, .. }), counters, .. })) => {
            let pair = usize::from(pair);
            Some((tx.get_mut(pair)?.as_mut()?, counters, shared.pairs.get(pair)?))
        }
        _ => None,
    }
}

fn tap_port(ports: &mut [Option<Port>], id: PortId) -> Option<(&mut TapPort, &PortCounters)> {
    match ports.get_mut(usize::from(id.0)) {
        Some(Some(Port { kind: Kind::Tap(tap), counters, .. })) => Some((tap, counters)),
        _ => None,
    }
}

fn vif_port(ports: &mut [Option<Port>], id: PortId) -> Option<(&mut Vif, &PortCounters)> {
    match ports.get_mut(usize::from(id.0)) {
        Some(Some(Port { kind: Kind::Vif(vif), counters, .. })) => Some((vif, counters)),
        _ => None,
    }
}

fn vif_queue(ports: &mut [Option<Port>], id: PortId, number: u16) -> Option<&mut VifQueue> {
    vif_port(ports, id)?.0.queues.get_mut(usize::from(number))?.as_mut()
}

/// Waits for the kicks of a transmitq. One that cannot be waited for is polled.
fn watch_kicks(epoll: &Epoll, id: PortId, pair: u16, kick: &mut Option<EventFd>) {
    let token = Source::Transmitq(id, pair).token();
    if let Some(Err(error)) = kick.as_ref().map(|kick| epoll.add(kick, token, Interest::READABLE)) {
        tracing::error!(port = id.0, "cannot wait for kicks, so the queue is polled: {error}");
        *kick = None;
    }
}

/// As [`unwatch`], for the events of a Xen guest's queue.
fn unwatch_vif(epoll: &Epoll, queue: &VifQueue) {
    for events in queue.events.fds() {
        let _ = epoll.remove(events);
    }
}

/// Takes a descriptor out of epoll before it is closed: a peer may hold the same open file.
fn unwatch(epoll: &Epoll, kick: Option<EventFd>) {
    if let Some(kick) = kick {
        let _ = epoll.remove(&kick);
    }
}
