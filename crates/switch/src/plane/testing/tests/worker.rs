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

struct Model {
    bed: Bed,
    wires: Vec<Arc<Wire>>,
    sent: BTreeMap<(usize, usize, u8), u32>,
    stopped: BTreeMap<(usize, u16), bool>,
    received: Vec<Vec<Vec<(u8, u8, u32)>>>,
    workers: usize,
}

impl Model {
    fn new(workers: usize, tap: bool) -> Self {
        Self::with_limits(workers, tap, [(Limits::default(), Limits::default()); PORTS])
    }

    /// Ports with these `rate_in` and `rate_out`.
    fn with_limits(workers: usize, tap: bool, limits: [(Limits, Limits); PORTS]) -> Self {
        let mut bed = Bed::new(&SwitchConfig { mac_table_size: 64, ..SwitchConfig::default() }, workers);
        let wires: Vec<_> = (0..PORTS)
            .map(|port| {
                // Static addresses: every frame has one destination, whatever has been forgotten.
                let (rate_in, rate_out) = limits[port];
                let static_macs = vec![(mac(port), 0)];
                let rules = Rules { static_macs, rate_in, rate_out, ..Rules::default() };
                let pairs = if tap && port == 0 { None } else { Some(PAIRS) };
                bed.add(&HeapPort { pairs, rules, first: port, ..HeapPort::default() }).1
            })
            .collect();
        let received = wires.iter().map(|wire| vec![Vec::new(); wire.queues().into()]).collect();
        Self { bed, wires, sent: BTreeMap::new(), stopped: BTreeMap::new(), received, workers }
    }

    fn queue(&self, port: usize, queue: u16) -> u16 {
        queue % self.wires[port].queues()
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Send { from, to, flow } => {
                if from != to {
                    let sequence = self.sent.entry((*from, *to, *flow)).or_insert(0);
                    let frame = packet(*from, *to, *flow, *sequence);
                    *sequence += 1;
                    let queue = self.queue(*from, u16::from(*flow));
                    self.wires[*from].send(queue, HeapFrame::new(Header::default(), frame));
                }
            }
            Step::Round(worker) => {
                self.bed.round(worker % self.workers);
            }
            Step::Events(worker) => {
                self.bed.serve_events(worker % self.workers);
            }
            Step::Sleep(worker) => {
                self.bed.sleep(worker % self.workers);
            }
            Step::Migrate { port, queue, worker, between } => {
                let queue = self.queue(*port, *queue);
                if *self.stopped.get(&(*port, queue)).unwrap_or(&false) {
                    return;
                }
                let (worker, id) = (worker % self.workers, PortId(*port as u16));
                // The bed is lent to the migration, and the rest of the model to what happens between its steps.
                let (wires, sent) = (&self.wires, &mut self.sent);
                let workers = self.workers;
                let mut migration = |bed: &mut Bed, step: usize| {
                    for step in between.iter().skip(step).step_by(3) {
                        match step {
                            Step::Send { from, to, flow } if from != to => {
                                let sequence = sent.entry((*from, *to, *flow)).or_insert(0);
                                let frame = packet(*from, *to, *flow, *sequence);
                                *sequence += 1;
                                let queue = u16::from(*flow) % wires[*from].queues();
                                wires[*from].send(queue, HeapFrame::new(Header::default(), frame));
                            }
                            Step::Round(worker) => {
                                bed.round(worker % workers);
                            }
                            Step::Events(worker) => {
                                bed.serve_events(worker % workers);
                            }
                            Step::Sleep(worker) => {
                                bed.sleep(worker % workers);
                            }
                            _ => {}
                        }
                    }
                };
                self.bed.migrate(id, queue, worker, &mut migration).unwrap();
            }
            Step::Kick { port, queue } => self.wires[*port].kick(self.queue(*port, *queue)),
            Step::Wait(micros) => self.bed.advance(*micros),
            Step::Room { port, queue, room } => {
                self.wires[*port].set_room(self.queue(*port, *queue), *room);
            }
            Step::Restart { port, queue } => {
                let (queue, id) = (self.queue(*port, *queue), PortId(*port as u16));
                let stopped = self.stopped.entry((*port, queue)).or_insert(false);
                *stopped = !*stopped;
                if *stopped { self.bed.stop(id, queue) } else { self.bed.start(id, queue) }
            }
        }
        self.collect();
    }

    fn collect(&mut self) {
        for (wire, received) in self.wires.iter().zip(&mut self.received) {
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
        for wire in &self.wires {
            (0..wire.queues()).for_each(|queue| wire.set_room(queue, usize::MAX));
        }
        self.bed.run_out();
        self.collect();
        let mut dropped = 0;
        for (port, wire) in self.wires.iter().enumerate() {
            dropped += self.bed.totals(PortId(port as u16)).drops_by_name().values().sum::<u64>();
            for queue in 0..wire.queues() {
                prop_assert_eq!(wire.waiting(queue), 0, "a worker sleeps although there is work");
                prop_assert_eq!(wire.unseen(queue), 0, "frames were delivered and not shown");
            }
        }
        let arrived: u64 = self.received.iter().flatten().map(|queue| queue.len() as u64).sum();
        let sent: u64 = self.sent.values().map(|count| u64::from(*count)).sum();
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
        tap: bool,
        steps in vec(step(), 1..150),
    ) {
        let mut model = Model::new(workers, tap);
        steps.iter().for_each(|step| model.take(step));
        prop_assert_eq!(model.finish()?, 0, "nothing drops a packet here");
        prop_assert!(model.in_order());
    }

    #[test]
    fn whatever_goes_wrong_every_packet_is_delivered_or_counted(
        workers in 1..4usize,
        tap: bool,
        steps in vec(fault(), 1..150),
    ) {
        let mut model = Model::new(workers, tap);
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
        tap: bool,
        limits in [limits(), limits(), limits()],
        steps in vec(step(), 1..150),
    ) {
        let mut model = Model::with_limits(workers, tap, limits);
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
        tap: bool,
        limits in [limits(), limits(), limits()],
        steps in vec(fault(), 1..150),
    ) {
        let mut model = Model::with_limits(workers, tap, limits);
        steps.iter().for_each(|step| model.take(step));
        model.finish()?;
    }
}

#[test]
fn a_port_that_goes_takes_its_queues_out_of_every_worker() {
    let mut model = Model::new(2, false);
    for step in [Step::Send { from: 1, to: 2, flow: 0 }, Step::Send { from: 2, to: 1, flow: 1 }] {
        model.take(&step);
    }
    model.bed.run();
    model.bed.remove(PortId(2));
    // Its descriptors are watched no more: a peer that still kicks them wakes nobody.
    model.wires[2].send(0, HeapFrame::new(Header::default(), packet(2, 1, 0, 0)));
    model.wires[2].kick(0);
    model.bed.run();
    assert!((0..2).all(|worker| !model.bed.serve_events(worker)));
    assert_eq!(model.wires[2].waiting(0), 1);
    // Frames for it have nowhere to go but everywhere.
    model.collect();
    model.take(&Step::Send { from: 1, to: 2, flow: 3 });
    model.bed.run();
    model.collect();
    assert_eq!(model.received[0].iter().map(Vec::len).sum::<usize>(), 1);
}
