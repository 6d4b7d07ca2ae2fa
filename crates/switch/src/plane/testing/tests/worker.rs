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
    /// A queue migrates; the steps are what happens between the steps of the migration.
    Migrate {
        port: usize,
        queue: u16,
        worker: usize,
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
            Step::Migrate { port, queue, worker, between } => {
                let queue = traffic.queue(*port, *queue);
                if *self.stopped.get(&(*port, queue)).unwrap_or(&false) {
                    return;
                }
                let (worker, id) = (worker % traffic.workers, PortId(*port as u16));
                let mut migration = |bed: &mut Bed, step: usize| {
                    between.iter().skip(step).step_by(3).for_each(|step| traffic.take(step, bed));
                };
                bed.migrate(id, queue, worker, &mut migration).unwrap();
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

fn step() -> impl Strategy<Value = Step> {
    let migrate = (0..PORTS, 0..PAIRS, 0..3usize, vec(work(), 0..24));
    prop_oneof![
        12 => work(),
        2 => migrate.prop_map(|(port, queue, worker, between)| Step::Migrate { port, queue, worker, between }),
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
    model.traffic.wires[2].send(0, HeapFrame::new(Header::default(), packet(2, 1, 0, 0)));
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
        HeapFrame::new(Header::default(), packet(1, 0, 0, *sent))
    }

    /// The receiver's pair migrates, and `between` happens between the steps: see [`Bed::migrate`].
    fn run(mut self, mut between: impl FnMut(&mut Bed, usize, &mut dyn FnMut())) -> Vec<u32> {
        let Self { bed, sender, sent, .. } = &mut self;
        let mut between = |bed: &mut Bed, step: usize| {
            between(bed, step, &mut || sender.send(0, Self::frame(sent)));
        };
        bed.migrate(Self::RECEIVER, 0, Self::NEW, &mut between).unwrap();
        // The new owner is the first to go on, and what others still have for the queue comes late.
        sender.send(0, Self::frame(sent));
        bed.round(Self::SENDING);
        bed.round(Self::NEW);
        bed.run_out();
        assert_eq!(bed.owner(Self::RECEIVER, 0), Self::NEW);
        self.receiver.received(0).iter().map(|frame| read(&frame.bytes).2).collect()
    }
}

/// The steps of a migration among three workers, as [`Bed::migrate`] numbers them.
const PARK: usize = 0;
const DETACH: usize = 4;

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
    // Park, settle of three, detach, settle of three, attach.
    const STEPS: usize = 9;
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
