//! A model of the workers: any order of their steps, of frames, of sleep and of migrations, under scripted time and with faults injected.
//!
//! What must hold whatever happens: a frame is delivered or counted as dropped, once, and no worker sleeps while it has work. As long as the set
//! of a receiver's queues does not change, frames of a flow also stay in order, through every migration.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;

use crate::config::SwitchConfig;
use crate::fdb::PortId;
use crate::plane::REST;
use crate::plane::handoff::ring::DEPTH;
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use crate::rules::{Limits, Rate, Rules};

const PORTS: usize = 3;
const PAIRS: u16 = 3;
const FLOWS: u8 = 4;

/// One thing that happens.
#[derive(Clone, Debug)]
enum Step {
    /// A port sends a frame of a flow to another port.
    Send {
        from: usize,
        to: usize,
        flow: u8,
    },
    Round(usize),
    /// Most of a round: what it hands over arrives with the worker's next step.
    Begin(usize),
    Events(usize),
    Sleep(usize),
    /// A queue migrates; the steps are what happens between the steps of the migration, in one of which a worker may be late.
    Migrate {
        port: usize,
        queue: u16,
        worker: usize,
        late: Option<usize>,
        between: Vec<Step>,
    },
    Kick {
        port: usize,
        queue: u16,
    },
    Wait(u64),
    /// A receiver posts so many buffers and no more.
    Room {
        port: usize,
        queue: u16,
        room: usize,
    },
    /// A queue is stopped, or started again.
    Restart {
        port: usize,
        queue: u16,
    },
}

fn mac(port: usize) -> Mac {
    Mac([2, 0, 0, 0, 0, port as u8])
}

/// A UDP packet of a flow with a sequence number. A flow is sent on one queue of its sender.
fn packet(from: usize, to: usize, flow: u8, sequence: u32) -> Vec<u8> {
    let mut packet = [mac(to).0, mac(from).0].concat();
    packet.extend([
        8, 0, 0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, from as u8, 10, 0, 0, to as u8,
    ]);
    packet.extend([0x10, flow, 0x20, flow, 0, 26, 0, 0]);
    packet.extend(sequence.to_be_bytes());
    packet.resize(60, 0);
    packet
}

/// A frame with such a packet of flow 0.
fn frame(from: usize, to: usize, sequence: u32) -> HeapFrame {
    HeapFrame::new(Header::default(), packet(from, to, 0, sequence))
}

/// What was received: sender, flow and sequence number.
fn read(bytes: &[u8]) -> (u8, u8, u32) {
    (bytes[11], bytes[35], u32::from_be_bytes(bytes[42..46].try_into().unwrap()))
}

/// What ports send, and who polls it: the part of the model that goes on while a queue migrates.
struct Traffic {
    wires: Vec<Arc<Wire>>,
    sent: BTreeMap<(usize, usize, u8), u32>,
    workers: usize,
}

impl Traffic {
    fn queue(&self, port: usize, queue: u16) -> u16 {
        queue % self.wires[port].queues()
    }

    /// Takes a step of a worker, or sends a frame. Other steps are the model's.
    fn take(&mut self, step: &Step, bed: &mut Bed) {
        match *step {
            Step::Send { from, to, flow } if from != to => {
                let sequence = self.sent.entry((from, to, flow)).or_insert(0);
                let frame = packet(from, to, flow, *sequence);
                *sequence += 1;
                let queue = self.queue(from, u16::from(flow));
                self.wires[from].send(queue, HeapFrame::new(Header::default(), frame));
            }
            Step::Round(worker) => {
                bed.round(worker % self.workers);
            }
            Step::Begin(worker) => bed.begin_round(worker % self.workers),
            Step::Events(worker) => {
                bed.serve_events(worker % self.workers);
            }
            Step::Sleep(worker) => {
                bed.sleep(worker % self.workers);
            }
            _ => {}
        }
    }
}

struct Model {
    bed: Bed,
    traffic: Traffic,
    stopped: BTreeMap<(usize, u16), bool>,
    received: Vec<Vec<Vec<(u8, u8, u32)>>>,
}

impl Model {
    /// Workers, and ports with so many pairs, of which the first is a tap if `tap` says so.
    fn new(workers: usize, pairs: u16, tap: bool) -> Self {
        Self::with_limits(workers, pairs, tap, [(Limits::default(), Limits::default()); PORTS])
    }

    /// Ports with these `rate_in` and `rate_out`.
    fn with_limits(workers: usize, pairs: u16, tap: bool, limits: [(Limits, Limits); PORTS]) -> Self {
        let mut bed = Bed::new(&SwitchConfig { mac_table_size: 64, ..SwitchConfig::default() }, workers);
        let wires: Vec<_> = (0..PORTS)
            .map(|port| {
                // Static addresses: every frame has one destination, whatever has been forgotten.
                let (rate_in, rate_out) = limits[port];
                let static_macs = vec![(mac(port), 0)];
                let rules = Rules { static_macs, rate_in, rate_out, ..Rules::default() };
                let pairs = if tap && port == 0 { None } else { Some(pairs) };
                bed.add(&HeapPort { pairs, rules, first: port, ..HeapPort::default() }).1
            })
            .collect();
        let received = wires.iter().map(|wire| vec![Vec::new(); wire.queues().into()]).collect();
        let traffic = Traffic { wires, sent: BTreeMap::new(), workers };
        Self { bed, traffic, stopped: BTreeMap::new(), received }
    }

    fn take(&mut self, step: &Step) {
        let Model { bed, traffic, .. } = self;
        match step {
            Step::Migrate { port, queue, worker, late, between } => {
                let queue = traffic.queue(*port, *queue);
                if *self.stopped.get(&(*port, queue)).unwrap_or(&false) {
                    return;
                }
                let (worker, id) = (worker % traffic.workers, PortId(*port as u16));
                let mut migration = |bed: &mut Bed, step: usize| {
                    between.iter().skip(step).step_by(3).for_each(|step| traffic.take(step, bed));
                };
                let migrated = bed.migrate_late(id, queue, worker, *late, &mut migration);
                assert!(migrated.is_ok() || late.is_some(), "{migrated:?}");
            }
            Step::Kick { port, queue } => traffic.wires[*port].kick(traffic.queue(*port, *queue)),
            Step::Wait(micros) => bed.advance(*micros),
            Step::Room { port, queue, room } => {
                traffic.wires[*port].set_room(traffic.queue(*port, *queue), *room);
            }
            Step::Restart { port, queue } => {
                let (queue, id) = (traffic.queue(*port, *queue), PortId(*port as u16));
                let stopped = self.stopped.entry((*port, queue)).or_insert(false);
                *stopped = !*stopped;
                if *stopped { bed.stop(id, queue) } else { bed.start(id, queue) }
            }
            step => traffic.take(step, bed),
        }
        self.collect();
    }

    fn collect(&mut self) {
        for (wire, received) in self.traffic.wires.iter().zip(&mut self.received) {
            for (queue, received) in (0..).zip(received) {
                received.extend(wire.received(queue).iter().map(|frame| read(&frame.bytes)));
            }
        }
    }

    /// Whether no packet of a flow was overtaken by a later one of it.
    fn in_order(&self) -> bool {
        self.received.iter().flatten().all(|queue| {
            let mut last = BTreeMap::new();
            let later = |(from, flow, sequence): &(u8, u8, u32)| {
                last.insert((*from, *flow), *sequence).is_none_or(|before| before < *sequence)
            };
            queue.iter().all(later)
        })
    }

    /// Everything that waits is served; what must hold then, holds. Returns how many frames were dropped.
    fn finish(&mut self) -> Result<u64, TestCaseError> {
        for ((port, queue), stopped) in std::mem::take(&mut self.stopped) {
            if stopped {
                self.bed.start(PortId(port as u16), queue);
            }
        }
        for wire in &self.traffic.wires {
            (0..wire.queues()).for_each(|queue| wire.set_room(queue, usize::MAX));
        }
        self.bed.run_out();
        self.collect();
        let mut dropped = 0;
        for (port, wire) in self.traffic.wires.iter().enumerate() {
            dropped += self.bed.totals(PortId(port as u16)).drops_by_name().values().sum::<u64>();
            for queue in 0..wire.queues() {
                prop_assert_eq!(wire.waiting(queue), 0, "a worker sleeps although there is work");
                prop_assert_eq!(wire.unseen(queue), 0, "frames were delivered and not shown");
            }
        }
        let arrived: u64 = self.received.iter().flatten().map(|queue| queue.len() as u64).sum();
        let sent: u64 = self.traffic.sent.values().map(|count| u64::from(*count)).sum();
        prop_assert_eq!(arrived + dropped, sent, "a packet vanished, or was delivered twice");
        Ok(dropped)
    }
}

fn send() -> impl Strategy<Value = Step> {
    (0..PORTS, 0..PORTS, 0..FLOWS).prop_map(|(from, to, flow)| Step::Send { from, to, flow })
}

/// Steps of workers, and frames: nothing that loses any.
fn work() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => send(),
        4 => (0..3usize).prop_map(Step::Round),
        2 => (0..3usize).prop_map(Step::Begin),
        2 => (0..3usize).prop_map(Step::Events),
        2 => (0..3usize).prop_map(Step::Sleep),
    ]
}

/// A migration in which a worker is late if there is a step in `late`.
fn migrate(late: impl Strategy<Value = Option<usize>>) -> impl Strategy<Value = Step> {
    (0..PORTS, 0..PAIRS, 0..3usize, late, vec(work(), 0..24))
        .prop_map(|(port, queue, worker, late, between)| Step::Migrate { port, queue, worker, late, between })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => work(),
        2 => migrate(Just(None)),
        1 => (0..PORTS, 0..PAIRS).prop_map(|(port, queue)| Step::Kick { port, queue }),
        1 => (0..3_000_000u64).prop_map(Step::Wait),
    ]
}

/// The same, and what does lose frames.
fn fault() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => step(),
        1 => (0..PORTS, 0..PAIRS, 0..8usize).prop_map(|(port, queue, room)| Step::Room { port, queue, room }),
        1 => (0..PORTS, 0..PAIRS).prop_map(|(port, queue)| Step::Restart { port, queue }),
        1 => migrate((0..9usize).prop_map(Some)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_steps_loses_or_overtakes_a_packet(
        workers in 1..4usize,
        pairs in 1..=PAIRS,
        tap: bool,
        steps in vec(step(), 1..150),
    ) {
        let mut model = Model::new(workers, pairs, tap);
        steps.iter().for_each(|step| model.take(step));
        prop_assert_eq!(model.finish()?, 0, "nothing drops a packet here");
        prop_assert!(model.in_order());
    }

    #[test]
    fn a_migration_that_a_worker_is_too_late_for_loses_no_packet(
        workers in 1..4usize,
        pairs in 1..=PAIRS,
        tap: bool,
        steps in vec(prop_oneof![6 => step(), 1 => migrate((0..9usize).prop_map(Some))], 1..150),
    ) {
        let mut model = Model::new(workers, pairs, tap);
        steps.iter().for_each(|step| model.take(step));
        prop_assert_eq!(model.finish()?, 0, "nothing drops a packet here");
    }

    #[test]
    fn whatever_goes_wrong_every_packet_is_delivered_or_counted(
        workers in 1..4usize,
        pairs in 1..=PAIRS,
        tap: bool,
        steps in vec(fault(), 1..150),
    ) {
        let mut model = Model::new(workers, pairs, tap);
        steps.iter().for_each(|step| model.take(step));
        model.finish()?;
    }
}

/// Limits so low that every few frames have to wait.
fn limits() -> impl Strategy<Value = (Limits, Limits)> {
    let some = || {
        let rate = |per_second: std::ops::Range<u64>, burst: std::ops::Range<u64>| {
            proptest::option::of(
                (per_second, burst).prop_map(|(per_second, burst)| Rate { per_second, burst }),
            )
        };
        (rate(1..5000, 1..10), rate(60..300_000, 1..1000))
            .prop_map(|(packets, bytes)| Limits { packets, bytes })
    };
    (some(), some())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn ports_that_are_paced_lose_nothing_that_their_receivers_take(
        workers in 1..4usize,
        pairs in 1..=PAIRS,
        tap: bool,
        limits in [limits(), limits(), limits()],
        steps in vec(step(), 1..150),
    ) {
        let mut model = Model::with_limits(workers, pairs, tap, limits);
        steps.iter().for_each(|step| model.take(step));
        let dropped = model.finish()?;
        let rate_out: u64 = (0..PORTS).map(|port| model.bed.totals(PortId(port as u16)).drops_by_name()["rate-out"]).sum();
        prop_assert_eq!(dropped, rate_out, "nothing else drops a packet here");
        prop_assert!(dropped == 0 || limits.iter().any(|(_, rate_out)| *rate_out != Limits::default()));
        prop_assert!(model.in_order());
    }

    #[test]
    fn whatever_goes_wrong_with_ports_that_are_paced_every_packet_is_delivered_or_counted(
        workers in 1..4usize,
        pairs in 1..=PAIRS,
        tap: bool,
        limits in [limits(), limits(), limits()],
        steps in vec(fault(), 1..150),
    ) {
        let mut model = Model::with_limits(workers, pairs, tap, limits);
        steps.iter().for_each(|step| model.take(step));
        model.finish()?;
    }
}

#[test]
fn a_port_that_goes_takes_its_queues_out_of_every_worker() {
    let mut model = Model::new(2, PAIRS, false);
    for step in [Step::Send { from: 1, to: 2, flow: 0 }, Step::Send { from: 2, to: 1, flow: 1 }] {
        model.take(&step);
    }
    model.bed.run();
    model.bed.remove(PortId(2));
    // Its descriptors are watched no more: a peer that still kicks them wakes nobody.
    model.traffic.wires[2].send(0, frame(2, 1, 0));
    model.traffic.wires[2].kick(0);
    model.bed.run();
    assert!((0..2).all(|worker| !model.bed.serve_events(worker)));
    assert_eq!(model.traffic.wires[2].waiting(0), 1);
    // Frames for it have nowhere to go but everywhere.
    model.collect();
    model.take(&Step::Send { from: 1, to: 2, flow: 3 });
    model.bed.run();
    model.collect();
    assert_eq!(model.received[0].iter().map(Vec::len).sum::<usize>(), 1);
}

/// Three workers: the first has the only pair of a receiver, which migrates to the second; the third has the port that sends to it.
struct Migration {
    bed: Bed,
    sender: Arc<Wire>,
    receiver: Arc<Wire>,
    sent: u32,
}

impl Migration {
    const OLD: usize = 0;
    const NEW: usize = 1;
    const SENDING: usize = 2;
    const RECEIVER: PortId = PortId(0);

    fn new() -> Self {
        let mut bed = Bed::new(&SwitchConfig { mac_table_size: 64, ..SwitchConfig::default() }, 3);
        let mut add = |port, first| {
            let rules = Rules { static_macs: vec![(mac(port), 0)], ..Rules::default() };
            bed.add(&HeapPort { rules, first, ..HeapPort::default() }).1
        };
        let (receiver, sender) = (add(0, Self::OLD), add(1, Self::SENDING));
        Self { bed, sender, receiver, sent: 0 }
    }

    /// The next frame for the receiver.
    fn frame(sent: &mut u32) -> HeapFrame {
        *sent += 1;
        frame(1, 0, *sent)
    }

    /// The receiver's pair migrates, and `between` happens between the steps: see [`Bed::migrate`].
    fn run(mut self, between: impl FnMut(&mut Bed, usize, &mut dyn FnMut())) -> Vec<u32> {
        self.migrate(None, between);
        assert_eq!(self.bed.owner(Self::RECEIVER, 0), Self::NEW);
        self.finish()
    }

    /// The same, but in step `late` a worker does not answer.
    fn migrate(&mut self, late: Option<usize>, mut between: impl FnMut(&mut Bed, usize, &mut dyn FnMut())) {
        let Self { bed, sender, sent, .. } = self;
        let mut between = |bed: &mut Bed, step: usize| {
            between(bed, step, &mut || sender.send(0, Self::frame(sent)));
        };
        let migrated = bed.migrate_late(Self::RECEIVER, 0, Self::NEW, late, &mut between);
        assert_eq!(migrated.is_ok(), late.is_none_or(|late| late > DETACH));
    }

    /// One more frame is sent, and everything is delivered: what the receiver has had.
    fn finish(mut self) -> Vec<u32> {
        let Self { bed, sender, sent, .. } = &mut self;
        // The new owner is the first to go on, and what others still have for the queue comes late.
        sender.send(0, Self::frame(sent));
        bed.round(Self::SENDING);
        bed.round(Self::NEW);
        bed.run_out();
        self.receiver.received(0).iter().map(|frame| read(&frame.bytes).2).collect()
    }

    /// The old owner, which sleeps, has been rung for, and then delivers the one frame that was sent.
    fn old_owner_is_woken_for_a_frame(mut self) {
        assert!(self.bed.serve_events(Self::OLD), "nobody has rung");
        self.bed.run_out();
        assert_eq!(self.receiver.received(0).len(), 1);
    }
}

/// The steps of a migration among three workers, as [`Bed::migrate`] numbers them.
const PARK: usize = 0;
const SETTLE_SENDING: usize = 3;
const DETACH: usize = 4;
/// Park, settle of three, detach, settle of three, attach.
const STEPS: usize = 9;

/// A worker that has decided for the old owner hands the frame over only when it settles: the old owner must not let go before.
#[test]
fn a_frame_on_its_way_to_the_old_owner_is_waited_for_before_that_lets_go() {
    let received = Migration::new().run(|bed, step, send| {
        if step == PARK {
            send();
            bed.begin_round(Migration::SENDING);
        }
    });
    assert_eq!(received, [1, 2]);
}

/// Such a frame lies in the old owner's ring when that is told to let go, while a later one is parked already.
#[test]
fn the_old_owner_delivers_what_it_was_handed_before_it_lets_go() {
    let received = Migration::new().run(|bed, step, send| {
        if step == PARK {
            send();
            bed.begin_round(Migration::SENDING);
        }
        if step == DETACH {
            send();
            bed.round(Migration::SENDING);
            bed.round(Migration::NEW);
        }
    });
    assert_eq!(received, [1, 2, 3]);
}

/// Wherever in a migration a worker looks whose the queue is, and whoever goes on meanwhile, frames stay in order.
#[test]
fn frames_stay_in_order_wherever_a_round_is_interrupted_by_a_migration() {
    for (first, second) in (0..STEPS).flat_map(|first| (first..STEPS).map(move |second| (first, second))) {
        for others in 0..8 {
            let received = Migration::new().run(|bed, step, send| {
                if step == first || step == second {
                    send();
                    bed.begin_round(Migration::SENDING);
                }
                for worker in [Migration::OLD, Migration::NEW, Migration::SENDING] {
                    if step > first && others & 1 << worker != 0 {
                        bed.round(worker);
                    }
                }
            });
            let all = 2 + u32::from(second > first);
            assert_eq!(received, (1..=all).collect::<Vec<_>>(), "{first} {second} {others}");
        }
    }
}

/// Whoever is late in whichever step, every frame arrives, and a queue that could not migrate is where it was.
#[test]
fn a_worker_that_is_late_in_a_migration_leaves_the_queue_with_somebody() {
    for late in PARK..STEPS {
        let mut migration = Migration::new();
        migration.migrate(Some(late), |bed, step, send| {
            // One is parked from the second step on.
            if step <= DETACH {
                send();
                bed.round(Migration::SENDING);
                bed.round(Migration::NEW);
            }
        });
        let there = if late > DETACH { Migration::NEW } else { Migration::OLD };
        assert_eq!(migration.bed.owner(Migration::RECEIVER, 0), there, "{late}");
        let sent = migration.sent + 1;
        let mut received = migration.finish();
        received.sort_unstable();
        assert_eq!(received, (1..=sent).collect::<Vec<_>>(), "{late}");
    }
}

/// However long a migration takes, no more is parked than a worker could be handed.
#[test]
fn a_queue_that_migrates_parks_no_more_than_a_ring_holds() {
    let mut bed = Bed::new(&SwitchConfig::default(), 2);
    let mut add = |port, first| {
        let rules = Rules { static_macs: vec![(mac(port), 0)], ..Rules::default() };
        bed.add(&HeapPort { rules, first, ..HeapPort::default() })
    };
    let ((id, receiver), (_, sender)) = (add(0, 0), add(1, 1));
    let sent = DEPTH as u32 + 5;
    let mut between = |bed: &mut Bed, step: usize| {
        if step == 3 {
            for sequence in 0..sent {
                sender.send(0, frame(1, 0, sequence));
            }
            while bed.round(1) {}
        }
    };
    bed.migrate(id, 0, 1, &mut between).unwrap();
    bed.run_out();
    let received: Vec<_> = receiver.received(0).iter().map(|frame| read(&frame.bytes).2).collect();
    assert_eq!(received, (0..DEPTH as u32).collect::<Vec<_>>());
    assert_eq!(bed.totals(id).drops_by_name()["worker-busy"], 5);
}

/// Two workers: the first has ports 0 and 2, the second port 1.
fn three_ports() -> (Bed, [Arc<Wire>; 3]) {
    let mut bed = Bed::new(&SwitchConfig { mac_table_size: 64, ..SwitchConfig::default() }, 2);
    let wires = [0, 1, 0].map(|first| bed.add(&HeapPort { first, ..HeapPort::default() }).1);
    (bed, wires)
}

/// The same when the workers know the address behind port 1.
fn three_ports_and_an_address() -> (Bed, [Arc<Wire>; 3]) {
    let (mut bed, wires) = three_ports();
    assert!(is_flooded(&mut bed, &wires), "nothing is known yet");
    wires[1].send(0, frame(1, 0, 0));
    bed.run();
    assert!(!is_flooded(&mut bed, &wires), "it was learned");
    (bed, wires)
}

/// Whether a frame of port 0 for port 1 goes to port 2, too.
fn is_flooded(bed: &mut Bed, wires: &[Arc<Wire>; 3]) -> bool {
    wires[2].received(0);
    wires[0].send(0, frame(0, 1, 0));
    bed.run();
    !wires[2].received(0).is_empty()
}

#[test]
fn an_address_is_forgotten_by_every_worker_when_its_guest_has_gone() {
    let (mut bed, wires) = three_ports_and_an_address();
    bed.forget(PortId(1));
    bed.run();
    assert!(is_flooded(&mut bed, &wires));
}

#[test]
fn an_address_is_forgotten_by_every_worker_when_its_port_has_gone() {
    let (mut bed, wires) = three_ports_and_an_address();
    bed.remove(PortId(1));
    bed.run();
    assert!(is_flooded(&mut bed, &wires));
}

/// A worker hears of an address when it has forgotten the port already: the next port of that number does not inherit it.
#[test]
fn an_address_of_which_a_worker_hears_too_late_does_not_outlive_its_port() {
    let (mut bed, wires) = three_ports();
    wires[1].send(0, frame(1, 0, 0));
    bed.serve_events(1);
    bed.round(1);
    bed.remove(PortId(1));
    bed.run();
    bed.add_as(PortId(1), &HeapPort { first: 1, ..HeapPort::default() });
    bed.run();
    assert!(is_flooded(&mut bed, &wires));
}

/// A worker hears of an address before it has been told of the port, whose number was another port's: it knows it when it is told.
#[test]
fn an_address_of_which_a_worker_hears_before_it_knows_the_port_is_not_forgotten() {
    let (mut bed, mut wires) = three_ports();
    bed.remove(PortId(1));
    bed.run();
    bed.advance(REST.as_micros() as u64);
    let port = HeapPort { first: 1, ..HeapPort::default() };
    wires[1] = bed.add_while(PortId(1), &port, |bed, wire| {
        wire.send(0, frame(1, 0, 0));
        bed.run();
    });
    assert!(!is_flooded(&mut bed, &wires));
}

/// A queue is armed when it has been empty for long while others are busy, or when nothing moves at all: a frame that comes just then, and without a
/// kick, is found by the second look.
#[test]
fn a_frame_that_comes_as_its_queue_is_armed_is_found() {
    for busy in [false, true] {
        let (mut bed, wires) = three_ports();
        wires[0].send_at_arming(0, frame(0, 2, 0));
        for sequence in 0..if busy { 1000 } else { 0 } {
            wires[2].send(0, frame(2, 0, sequence));
            bed.serve_events(0);
            bed.round(0);
        }
        if !busy {
            bed.run();
        }
        assert_eq!(wires[2].received(0).len(), 1, "busy: {busy}");
    }
}

/// A frame comes to the new owner when the queue has stayed with the old one, which sleeps: it is handed on, and the old owner woken.
#[test]
fn who_hands_a_frame_on_wakes_the_worker_that_it_goes_to() {
    let mut migration = Migration::new();
    migration.migrate(Some(DETACH), |bed, step, send| {
        if step == DETACH {
            send();
            bed.round(Migration::SENDING);
        }
    });
    assert!(migration.bed.sleep(Migration::OLD));
    while migration.bed.round(Migration::NEW) {}
    migration.old_owner_is_woken_for_a_frame();
}

/// The same with a frame that was parked when another worker was late.
#[test]
fn who_hands_on_what_it_has_parked_wakes_the_worker_that_it_goes_to() {
    let mut migration = Migration::new();
    migration.migrate(Some(SETTLE_SENDING), |bed, step, send| {
        if step == SETTLE_SENDING {
            send();
            bed.round(Migration::SENDING);
            bed.round(Migration::NEW);
        }
        if step == SETTLE_SENDING + 1 {
            assert!(bed.sleep(Migration::OLD));
        }
    });
    migration.old_owner_is_woken_for_a_frame();
}

#[test]
fn a_tap_whose_reader_is_late_keeps_it() {
    let mut bed = Bed::new(&SwitchConfig::default(), 2);
    let (id, wire) = bed.add(&HeapPort { pairs: None, ..HeapPort::default() });
    let (_, other) = bed.add(&HeapPort::default());
    assert!(bed.migrate_late(id, 0, 1, Some(0), &mut |_, _| {}).is_err());
    assert_eq!(bed.owner(id, 0), 0);
    wire.send(0, frame(0, 1, 0));
    bed.run_out();
    assert_eq!(other.received(0).len(), 1);
}

/// A worker hands frames off to another, and their sender goes before they are delivered: their buffers come back all the same, or their places in the ring
/// would be lost for ever.
#[test]
fn buffers_of_a_port_that_has_gone_come_back() {
    // From the ring, and from what waits for the port's turn.
    for (frames, received) in [(1, false), (300, true)] {
        let (mut bed, wires) = three_ports_and_an_address();
        for sequence in 0..frames {
            wires[0].send(0, frame(0, 1, sequence));
        }
        bed.serve_events(0);
        while bed.round(0) {}
        assert_eq!(bed.under_way(0, 1), frames as usize);
        if received {
            bed.serve_events(1);
            bed.round(1);
            assert!((1..frames as usize).contains(&bed.under_way(0, 1)), "some wait for their turn");
        }
        bed.remove(PortId(0));
        bed.run();
        assert_eq!(bed.under_way(0, 1), 0, "of {frames}");
    }
}
