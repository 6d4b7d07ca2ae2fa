//! Several workers: queue pairs of one guest on different threads, and frames that cross between them.

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ringferry_control::channels::Steering;
use ringferry_control::{self as control, Answer, Request};
use ringferry_packet::ether::Mac;
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::Header;
use ringferry_rig::frames::pattern;
use ringferry_rig::front::ring;
use ringferry_rig::process::{PATIENCE, eventually, in_a_namespace};
use ringferry_rig::switch::{Place, Switch};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::netif;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::{Connection, RingPlan, Wanted, connect_device};
use ringferry_virtio_net::driver::{Arena, Pair, PairConfig};
use ringferry_virtio_net::{Features, queue_index};

use crate::replace::replaced;

/// A guest with several queue pairs, which it polls.
struct Wide {
    connection: Connection,
    pairs: Vec<Pair>,
    kicks: Vec<[EventFd; 2]>,
    mac: Mac,
    _arena: Arena,
}

impl Wide {
    /// Plugs in with `count` pairs, of which the first `enabled` carry packets.
    fn plug(stream: Stream, number: u8, count: usize, enabled: usize) -> Wide {
        let wanted = Wanted {
            features: (Features::DEVICE | Features::MQ).bits(),
            required: Features::VERSION_1.bits(),
            protocol: Wanted::NET_PROTOCOL,
        };
        let mut connection = connect_device(stream, &wanted).unwrap();
        connection.frontend().set_timeout(PATIENCE);
        let features = Features::from_bits_retain(connection.negotiated().features);
        let config = PairConfig { receive: 256, transmit: 256, ..PairConfig::default() };
        let mut arena = Arena::new(count * config.arena_bytes(features)).unwrap();
        let pairs = (0..count).map(|_| Pair::new(&mut arena, features, &config).unwrap());
        let mut pairs: Vec<_> = pairs.collect();
        let event = || EventFd::new().unwrap();
        let kicks: Vec<_> = pairs.iter().map(|_| [event(), event()]).collect();
        let plans: Vec<_> = pairs
            .iter()
            .zip(&kicks)
            .enumerate()
            .flat_map(|(number, (pair, kicks))| {
                let plan =
                    move |(queue, kick)| RingPlan { enabled: number < enabled, ..ring(queue, kick, None) };
                pair.queues.iter().zip(kicks).map(plan)
            })
            .collect();
        connection.start(&[(arena.region(), arena.fd())], &plans).unwrap();
        for (pair, kicks) in pairs.iter_mut().zip(&kicks) {
            if pair.refill() {
                kicks[0].signal().unwrap();
            }
        }
        Wide { connection, pairs, kicks, mac: ringferry_rig::frames::mac(number), _arena: arena }
    }

    /// Switches a pair on or off.
    fn enable(&mut self, pair: usize, on: bool) {
        for queue in queue_index::both(pair as u16) {
            self.connection.frontend().set_vring_enable(queue, on).unwrap();
        }
    }

    /// Sends a frame on a pair.
    #[track_caller]
    fn send(&mut self, pair: usize, frame: &[u8]) {
        self.put(pair, frame);
        self.flush(pair);
    }

    /// Puts a frame into a transmitq, where it is seen after a flush; waits for room.
    #[track_caller]
    fn put(&mut self, pair: usize, frame: &[u8]) {
        let deadline = Instant::now() + PATIENCE;
        while !self.pairs[pair].send_frame(&Header::default(), frame) {
            assert!(Instant::now() < deadline, "the device takes nothing");
            self.flush(pair);
            self.pairs[pair].reclaim();
        }
    }

    fn flush(&mut self, pair: usize) {
        if self.pairs[pair].transmitq.flush() {
            self.kicks[pair][1].signal().unwrap();
        }
    }

    /// Takes the frames that have arrived, with their pairs.
    fn received(&mut self) -> Vec<(usize, Vec<u8>)> {
        let mut all = Vec::new();
        for (number, (pair, kicks)) in self.pairs.iter_mut().zip(&self.kicks).enumerate() {
            let Pair { receiveq, pools, .. } = pair;
            receiveq.lend(usize::MAX, pools, |packet, _| {
                all.push((number, packet.to_vec()));
                Some(packet)
            });
            if pair.refill() {
                kicks[0].signal().unwrap();
            }
            assert_eq!(pair.fault(), None);
        }
        all
    }

    /// Waits for `count` frames, and for no more than that.
    #[track_caller]
    fn expect(&mut self, count: usize) -> Vec<(usize, Vec<u8>)> {
        let deadline = Instant::now() + PATIENCE;
        let mut all = self.received();
        while all.len() < count {
            assert!(Instant::now() < deadline, "{} of {count} frames have arrived", all.len());
            std::thread::yield_now();
            all.extend(self.received());
        }
        assert_eq!(all.len(), count, "more has arrived than was sent");
        all
    }
}

/// A UDP packet of a flow, numbered.
fn packet(to: Mac, from: Mac, flow: u16, number: u32) -> Vec<u8> {
    // The lower port is the flow's, in either direction.
    let ports = if from.0[5] < to.0[5] { [flow, 9] } else { [9, flow] };
    let payload = [&number.to_be_bytes()[..], &[flow as u8 ^ number as u8; 54]].concat();
    let mut packet = Packet { macs: [to.0, from.0], ..Packet::plain(false, false, payload) };
    packet.addresses[..8].copy_from_slice(&[10, 0, 0, from.0[5], 10, 0, 0, to.0[5]]);
    packet.ports.copy_from_slice(ports.map(u16::to_be_bytes).as_flattened());
    packet.complete().1
}

/// Flow and number of a packet, its payload being what was sent.
#[track_caller]
fn opened(frame: &[u8]) -> (u16, u32) {
    let port = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let flow = if port(34) == 9 { port(36) } else { port(34) };
    let number = u32::from_be_bytes(frame[42..46].try_into().unwrap());
    assert!(frame[46..].iter().all(|byte| *byte == flow as u8 ^ number as u8), "payload of {flow}/{number}");
    (flow, number)
}

/// A switch with these ports and so many workers.
fn start<'a>(place: &'a Place, ports: &[&str], workers: &str) -> Switch<'a> {
    place.start(place.run(ports).args(["--workers", workers]), Vec::new())
}

/// Two guests on a switch with so many workers, which know each other's addresses.
fn two<'a>(place: &'a Place, workers: &str, pairs: [usize; 2]) -> (Switch<'a>, Wide, Wide) {
    let switch = start(place, &["a", "b"], workers);
    let mut a = Wide::plug(switch.connect("a"), 1, pairs[0], pairs[0]);
    let mut b = Wide::plug(switch.connect("b"), 2, pairs[1], pairs[1]);
    // Whatever comes too early for the other's rings is not there yet.
    eventually("the guests hear of each other", || {
        a.send(0, &packet(b.mac, a.mac, 1, 0));
        b.send(0, &packet(a.mac, b.mac, 1, 0));
        std::thread::sleep(std::time::Duration::from_millis(20));
        (!a.received().is_empty() & !b.received().is_empty()).then_some(())
    });
    // What is still on its way comes before what is sent after it.
    let last = |frame: &(usize, Vec<u8>)| opened(&frame.1) == (1, 1);
    a.send(0, &packet(b.mac, a.mac, 1, 1));
    b.send(0, &packet(a.mac, b.mac, 1, 1));
    eventually("b has the last of them", || b.received().iter().any(last).then_some(()));
    eventually("a has the last of them", || a.received().iter().any(last).then_some(()));
    (switch, a, b)
}

#[test]
fn frames_cross_between_workers_in_order_and_none_is_lost() {
    let place = Place::new();
    // The second guest has one pair: what the first sends on its other pairs crosses to worker 0.
    let (switch, mut a, mut b) = two(&place, "3", [6, 1]);
    const ROUNDS: u32 = 40;
    for round in 0..ROUNDS {
        for flow in 0..6u16 {
            for number in 4 * round..4 * round + 4 {
                a.send(usize::from(flow), &packet(b.mac, a.mac, 100 + flow, number));
            }
        }
        let mut last = BTreeMap::new();
        for (_, frame) in b.expect(24) {
            let (flow, number) = opened(&frame);
            let before = last.insert(flow, number);
            assert!(before.is_none_or(|before| before < number), "flow {flow} out of order");
        }
        assert_eq!(last.len(), 6);
    }
    let shown = switch.show();
    assert_eq!(shown.workers.len(), 3);
    let port = switch.port("b");
    assert!(port.counters["tx_packets"] >= u64::from(ROUNDS) * 24);
    assert_eq!(port.drops.values().sum::<u64>(), 0, "{:?}", port.drops);
    assert_eq!(switch.port("a").drops["worker-busy"], 0);
}

#[test]
fn an_address_is_learnt_by_every_worker() {
    let place = Place::new();
    let switch = start(&place, &["a", "b", "c"], "2");
    let mut a = Wide::plug(switch.connect("a"), 1, 2, 2);
    let mut b = Wide::plug(switch.connect("b"), 2, 1, 1);
    let mut c = Wide::plug(switch.connect("c"), 3, 1, 1);
    // Worker 0 learns where b is; pair 1 of a belongs to worker 1, which has never seen it.
    eventually("b is heard", || {
        b.send(0, &packet(a.mac, b.mac, 5, 0));
        std::thread::sleep(std::time::Duration::from_millis(20));
        (!a.received().is_empty()).then_some(())
    });
    std::thread::sleep(std::time::Duration::from_millis(50));
    c.received();
    for number in 0..50 {
        a.send(1, &packet(b.mac, a.mac, 6, number));
    }
    assert_eq!(b.expect(50).len(), 50);
    assert_eq!(c.received().len(), 0, "flooded");
    assert_eq!(switch.show().fdb.entries.iter().filter(|entry| entry.port == "b").count(), 1);
}

#[test]
fn a_flow_comes_back_on_the_pair_it_is_sent_on() {
    let place = Place::new();
    let (_switch, mut a, mut b) = two(&place, "2", [4, 4]);
    for flow in 0..16u16 {
        let pair = usize::from(flow) % 4;
        a.send(pair, &packet(b.mac, a.mac, 1000 + flow, 0));
        b.expect(1);
        for number in 1..20 {
            b.send((pair + usize::from(flow / 4)) % 4, &packet(a.mac, b.mac, 1000 + flow, number));
        }
        let pairs: Vec<_> = a.expect(19).into_iter().map(|(pair, _)| pair).collect();
        assert!(pairs.iter().all(|arrived| *arrived == pair), "flow {flow} of pair {pair}: {pairs:?}");
    }
}

/// Frames that may be under way to a guest: half of the buffers of one of its pairs.
const UNDER_WAY: usize = 128;

#[test]
fn pairs_come_and_go_under_traffic_and_accepted_frames_arrive() {
    let place = Place::new();
    let (switch, mut a, mut b) = two(&place, "2", [2, 2]);
    let mut sent = 0;
    let mut arrived = 0;
    for round in 0..200u32 {
        // Never more than b has buffers for, however late the workers run: what finds none is dropped, and rightly.
        eventually("most have arrived", || {
            arrived += b.received().len();
            (sent - arrived < UNDER_WAY).then_some(())
        });
        // Pair 1 is on in even rounds, and switched off behind what was put into its ring: that was accepted.
        let on = round % 2 == 1;
        for flow in 0..8u16 {
            let pair = if on { 0 } else { usize::from(flow % 2) };
            a.send(pair, &packet(b.mac, a.mac, 2000 + flow, round));
            sent += 1;
        }
        a.enable(1, on);
        b.enable(1, on);
    }
    eventually("everything arrives", || {
        arrived += b.received().len();
        (arrived >= sent).then_some(())
    });
    let drops: u64 = switch.port("b").drops.values().sum();
    assert_eq!((arrived, drops), (sent, 0));
    // Both are still of use.
    a.send(1, &packet(b.mac, a.mac, 1, 1));
    b.expect(1);
}

fn assign(control: &Path, port: &str, queue: u16, worker: u16) -> Result<Steering, String> {
    match control::call(control, &Request::Assign { port: port.into(), queue, worker, runtime: false }) {
        Ok(Answer::Steering(steering)) => Ok(steering),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.to_string()),
    }
}

/// The worker of each queue of a port.
fn served_by(place: &Place, port: &str) -> Vec<u16> {
    let steering: Steering = serde_json::from_str(&place.ctl(&["steering", port, "--json"])).unwrap();
    steering.queues.iter().filter_map(|queue| queue.worker).collect()
}

/// Pairs of both guests go from worker to worker all the time, those that a flow is sent on and those it is received on.
#[test]
fn pairs_change_workers_under_traffic_and_frames_stay_in_order() {
    const FLOWS: u16 = 12;
    const FRAMES: u32 = 50_000;
    let place = Place::new();
    let (switch, mut a, mut b) = two(&place, "3", [3, 2]);
    let flow = |number: u32| 3000 + (number % u32::from(FLOWS)) as u16;
    for number in 0..FLOWS.into() {
        // So that each flow has a pair of its own at b, whoever is near.
        b.send(number as usize % 2, &packet(a.mac, b.mac, flow(number), 0));
    }
    a.expect(FLOWS.into());
    let done = AtomicBool::new(false);
    let moves = std::thread::scope(|scope| {
        let (control, done) = (place.control(), &done);
        let mover = scope.spawn(move || {
            let mut moves = 0_u16;
            while !done.load(Ordering::Relaxed) {
                // Strides that have no common divisor: every pair is moved to every worker.
                let (port, queue) =
                    [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)][usize::from(moves % 5)];
                let worker = moves / 5 % 3;
                let steering = assign(&control, port, queue, worker).unwrap();
                assert_eq!(steering.queues[usize::from(queue)].worker, Some(worker));
                moves += 1;
            }
            moves
        });
        let (mut sent, mut arrived) = (0, 0);
        let mut last = BTreeMap::new();
        while sent < FRAMES {
            // Many at once, so that workers have some in hand when a pair goes.
            for _ in 0..UNDER_WAY {
                let frame = packet(b.mac, a.mac, flow(sent), sent);
                a.put(sent as usize % 3, &frame);
                sent += 1;
            }
            (0..3).for_each(|pair| a.flush(pair));
            eventually("most have arrived", || {
                for (pair, frame) in b.received() {
                    let (flow, number) = opened(&frame);
                    assert_eq!(pair, usize::from(flow) % 2, "flow {flow} has left its pair");
                    let before = last.insert(flow, number);
                    assert!(
                        before.is_none_or(|before| before < number),
                        "flow {flow}: {number} after {before:?}"
                    );
                    arrived += 1;
                }
                (sent - arrived < FLOWS.into() && (sent < FRAMES || sent == arrived)).then_some(())
            });
        }
        done.store(true, Ordering::Relaxed);
        mover.join().unwrap()
    });
    eprintln!("{moves} moves");
    assert!(moves >= 15, "every pair to every worker: {moves}");
    switch.assert_no_drops();
}

/// Pairs stay with the workers that they were assigned to, and flows on their pairs, when another process takes over.
#[test]
fn a_replacement_changes_neither_the_worker_of_a_pair_nor_the_pair_of_a_flow() {
    const FLOWS: u16 = 12;
    let place = Place::new();
    let (mut switch, mut a, mut b) = two(&place, "3", [3, 2]);
    let flow = |number: u32| 3000 + (number % u32::from(FLOWS)) as u16;
    for number in 0..FLOWS.into() {
        b.send(number as usize % 2, &packet(a.mac, b.mac, flow(number), 0));
    }
    a.expect(FLOWS.into());
    for (port, queue, worker) in [("a", 0, 2), ("a", 1, 2), ("b", 0, 1), ("b", 1, 0)] {
        assign(&place.control(), port, queue, worker).unwrap();
    }
    let served = ["a", "b"].map(|port| served_by(&place, port));
    assert_eq!(served, [vec![2, 2, 2], vec![1, 0]]);
    let (mut sent, mut arrived) = (0_u32, 0_u32);
    let mut last = BTreeMap::new();
    for _ in 0..5 {
        switch = replaced(&place, switch, |done| {
            while !done() || arrived < sent {
                while !done() && sent - arrived < UNDER_WAY as u32 {
                    // A flow is sent on one pair.
                    let pair = usize::from(flow(sent)) % 3;
                    a.send(pair, &packet(b.mac, a.mac, flow(sent), sent));
                    sent += 1;
                }
                for (pair, frame) in b.received() {
                    let (flow, number) = opened(&frame);
                    assert_eq!(pair, usize::from(flow) % 2, "flow {flow} has left its pair");
                    let before = last.insert(flow, number);
                    let next =
                        before.map_or_else(|| u32::from(flow) - 3000, |before| before + u32::from(FLOWS));
                    assert_eq!(number, next, "flow {flow}");
                    arrived += 1;
                }
            }
        });
        assert_eq!(["a", "b"].map(|port| served_by(&place, port)), served);
    }
    switch.assert_no_drops();
    switch.stop();
}

#[test]
fn an_assignment_that_cannot_be_is_refused() {
    let place = Place::new();
    let (_switch, mut a, mut b) = two(&place, "2", [1, 1]);
    let refused = |port, queue, worker| assign(&place.control(), port, queue, worker).unwrap_err();
    assert!(refused("a", 0, 2).contains("there is no worker 2: the switch has 2"), "{}", refused("a", 0, 2));
    assert!(refused("a", 16, 1).contains("the port has no queue 16"));
    assert!(refused("c", 0, 1).contains("there is no port \"c\""));
    // One that the guest has not set up yet may be given away before.
    assign(&place.control(), "a", 3, 0).unwrap();
    assign(&place.control(), "b", 0, 1).unwrap();
    a.send(0, &packet(b.mac, a.mac, 7, 7));
    assert_eq!(opened(&b.expect(1)[0].1), (7, 7));
}

#[test]
fn a_port_begins_with_the_worker_that_its_configuration_names() {
    let place = Place::new();
    let switch = start(&place, &["a,worker=1", "b,worker=1"], "3");
    let mut a = Wide::plug(switch.connect("a"), 1, 3, 3);
    let mut b = Wide::plug(switch.connect("b"), 2, 1, 1);
    let workers = |port: &str| served_by(&place, port);
    eventually("the pairs are there", || (workers("a").len() == 3 && workers("b").len() == 1).then_some(()));
    assert_eq!((workers("a"), workers("b")), (vec![1, 2, 0], vec![1]));
    a.send(0, &packet(b.mac, a.mac, 7, 7));
    assert_eq!(opened(&b.expect(1)[0].1), (7, 7));
}

/// Frames that the kernel sends keep their order while one worker after another reads the tap.
#[test]
fn a_tap_is_read_by_the_worker_it_is_assigned_to() {
    const FRAMES: u32 = 3000;
    in_a_namespace(|| {
        let place = Place::new();
        let mut command = place.run(&["a"]);
        command.args(["--workers", "3", "--port", "tap:rf0,queues=1,worker=2", "--port", "tap:rf1,queues=2"]);
        let switch = place.start(&mut command, Vec::new());
        let mut a = Wide::plug(switch.connect("a"), 1, 1, 1);
        assert_eq!(served_by(&place, "rf0"), [2]);
        let assign = |port, queue, worker| assign(&place.control(), port, queue, worker);
        assert!(assign("rf1", 1, 0).unwrap_err().contains("tap's 2 queues"));
        assert!(assign("rf0", 1, 0).unwrap_err().contains("the port has no queue 1"));
        netif::add_address("rf0", [10, 9, 0, 9].into(), 24).unwrap();
        let socket = UdpSocket::bind("10.9.0.9:0").unwrap();
        socket.set_broadcast(true).unwrap();
        let mut next = 0;
        for number in 0..FRAMES {
            if number % 50 == 0 {
                let worker = (number / 50 % 3) as u16;
                assert_eq!(assign("rf0", 0, worker).unwrap().queues[0].worker, Some(worker));
            }
            socket.send_to(&number.to_be_bytes(), "10.9.0.255:9").unwrap();
            eventually("most have arrived", || {
                for (_, frame) in a.received() {
                    let number =
                        frame.get(42..46).map(|number| u32::from_be_bytes(number.try_into().unwrap()));
                    assert_eq!(number, Some(next));
                    next += 1;
                }
                (number < next + UNDER_WAY as u32).then_some(())
            });
        }
        eventually("all have arrived", || {
            next += a.received().len() as u32;
            (next == FRAMES).then_some(())
        });
        switch.stop();
    });
}

/// A large frame is read to where one pair would have it before it is known which pair its flow goes to.
#[test]
fn large_frames_of_a_tap_find_their_pairs() {
    // So many that flows come to every pair, whatever their ports: only those of the pairs that the tap's own worker serves are read to where they go.
    const FLOWS: usize = 32;
    const ROUNDS: u32 = 6 * FLOWS as u32;
    in_a_namespace(|| {
        let place = Place::new();
        let mut command = place.run(&["a"]);
        command.args(["--workers", "2", "--port", "tap:rf0,queues=1,mtu=40000"]);
        let switch = place.start(&mut command, Vec::new());
        let mut a = Wide::plug(switch.connect("a"), 1, 3, 3);
        netif::add_address("rf0", [10, 9, 0, 9].into(), 24).unwrap();
        let sockets = [(); FLOWS].map(|()| UdpSocket::bind("10.9.0.9:0").unwrap());
        let mut pairs = BTreeMap::new();
        for number in 0..ROUNDS {
            // Some of each flow, so that the next is expected where the last was.
            let flow = number as usize / 6 % FLOWS;
            let payload = pattern(number, 20_001);
            sockets[flow].set_broadcast(true).unwrap();
            sockets[flow].send_to(&payload, "10.9.0.255:9").unwrap();
            let [(pair, frame)] = &a.expect(1)[..] else { unreachable!() };
            assert!(frame.ends_with(&payload), "frame {number}");
            assert_eq!(*pairs.entry(flow).or_insert(*pair), *pair, "flow {flow}");
        }
        let straight = switch.port("rf0").counters["rx_in_place"];
        assert!(straight > 0 && straight < u64::from(ROUNDS), "{straight} of {ROUNDS}, pairs {pairs:?}");
        switch.assert_no_drops();
        switch.stop();
    });
}

#[test]
fn more_workers_than_pairs_do_no_harm() {
    let place = Place::new();
    let (switch, mut a, mut b) = two(&place, "16", [1, 1]);
    a.send(0, &packet(b.mac, a.mac, 7, 7));
    assert_eq!(opened(&b.expect(1)[0].1), (7, 7));
    assert_eq!(switch.show().workers.len(), 16);
}
