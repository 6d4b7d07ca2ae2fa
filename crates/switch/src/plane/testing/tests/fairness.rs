//! What one port's work costs others, counted in work and not in time: the bounds hold on any machine.

use std::sync::Arc;
use std::time::Duration;

use ringferry_packet::ether::Mac;
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::{Header, Offloads};

use crate::config::SwitchConfig;
use crate::fdb::PortId;
use crate::plane::handoff::ring::PATIENCE;
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use crate::rules::{Limits, Rate, Rules, Vlans};

const BROADCAST: Mac = Mac([0xff; 6]);
/// A millisecond of work.
const MILLISECOND: u64 = 1_000_000;

fn mac(port: u16) -> Mac {
    Mac([2, 0, 0, 0, 0, port as u8])
}

/// A frame that asks for nothing.
fn small(from: u16, to: Mac) -> HeapFrame {
    let mut bytes = [&to.0[..], &mac(from).0, &[0x88, 0xb5]].concat();
    bytes.resize(60, 0);
    HeapFrame::new(Header::default(), bytes)
}

/// TCP, to be cut into packets of `gso_size` bytes.
fn large(from: u16, to: Mac, len: usize, gso_size: u16) -> HeapFrame {
    let (header, mut bytes) = Packet::plain(false, true, vec![7; len]).sent(gso_size);
    bytes[..6].copy_from_slice(&to.0);
    bytes[6..12].copy_from_slice(&mac(from).0);
    HeapFrame::new(header, bytes)
}

struct Ports {
    bed: Bed,
    wires: Vec<Arc<Wire>>,
}

impl Ports {
    fn new(workers: usize) -> Self {
        let bed = Bed::new(&SwitchConfig { mac_table_size: 64, ..SwitchConfig::default() }, workers);
        Self { bed, wires: Vec::new() }
    }

    /// A port whose address is known.
    fn add(&mut self, pairs: u16, offloads: Offloads, first: usize, weight: u16) -> u16 {
        let rules = Rules { weight, ..Rules::default() };
        self.plug(HeapPort { pairs: Some(pairs), offloads, rules, first, ..HeapPort::default() })
    }

    /// A port whose address is known, that takes no offloads, and to which no more is sent than this.
    fn add_limited(&mut self, rate_out: Limits) -> u16 {
        let rules = Rules { rate_out, ..Rules::default() };
        let offloads = Offloads::empty();
        self.plug(HeapPort { pairs: Some(1), offloads, rules, ..HeapPort::default() })
    }

    fn plug(&mut self, mut port: HeapPort) -> u16 {
        let id = self.wires.len() as u16;
        port.rules.static_macs = vec![(mac(id), 0)];
        self.wires.push(self.bed.add(&port).1);
        id
    }

    fn work(&self, port: u16) -> u64 {
        self.bed.totals(PortId(port)).by_name()["work_nanoseconds"]
    }

    /// Microseconds for which a port has waited for another worker.
    fn held(&self, port: u16) -> u64 {
        self.bed.totals(PortId(port)).by_name()["rx_held_microseconds"]
    }

    fn drops(&self, port: u16, reason: &str) -> u64 {
        self.bed.totals(PortId(port)).drops_by_name()[reason]
    }

    /// Keeps so many frames in every queue of a port.
    fn fill(&self, port: u16, frame: &HeapFrame, count: usize) {
        let wire = &self.wires[usize::from(port)];
        for queue in 0..wire.queues() {
            (wire.waiting(queue)..count).for_each(|_| wire.send(queue, frame.clone()));
        }
    }

    fn received(&self, port: u16) -> Vec<HeapFrame> {
        let wire = &self.wires[usize::from(port)];
        (0..wire.queues()).flat_map(|queue| wire.received(queue)).collect()
    }
}

/// H3: broadcast frames with a `gso_size` of 32, to eight receivers that take no offloads. Others waited for 38 to 47 ms, with 16 pairs for seconds.
#[test]
fn h3_a_guest_whose_frames_become_many_packets_delays_others_by_less_than_a_millisecond() {
    for pairs in [1, 16] {
        let mut ports = Ports::new(1);
        let attacker = ports.add(pairs, Offloads::all(), 0, 1);
        let innocent = [ports.add(1, Offloads::all(), 0, 1), ports.add(1, Offloads::all(), 0, 1)];
        let others: Vec<_> = (0..8).map(|_| ports.add(1, Offloads::empty(), 0, 1)).collect();
        let flood = large(attacker, BROADCAST, 60_000, 32);
        let mut worst = 0;
        for _ in 0..200 {
            ports.fill(attacker, &flood, 32);
            ports.wires[usize::from(innocent[0])].send(0, small(innocent[0], mac(innocent[1])));
            let before = ports.work(attacker);
            let mut rounds = 0;
            let is_ours = |frame: &HeapFrame| frame.bytes[6..12] == mac(innocent[0]).0;
            while !ports.received(innocent[1]).iter().any(is_ours) {
                ports.bed.serve_events(0);
                ports.bed.round(0);
                rounds += 1;
                assert!(rounds < 1000, "the innocent frame is never forwarded");
            }
            worst = worst.max(ports.work(attacker) - before);
            for port in &others {
                ports.received(*port);
            }
            for _ in 0..10 {
                ports.bed.round(0);
            }
        }
        assert!(ports.work(attacker) > 5 * MILLISECOND, "the attacker is served, too");
        assert!(worst < MILLISECOND, "{pairs} pairs: an innocent frame waited for {worst} ns of work");
    }
}

/// H3: a burst may be dear in a way that the price list does not know. Pages that nobody had touched made others wait for 100 to 200 ms.
#[test]
fn h3_what_no_price_list_knows_is_measured() {
    let mut ports = Ports::new(1);
    let [dear, honest, receiver] = [(); 3].map(|()| ports.add(1, Offloads::all(), 0, 1));
    ports.wires[usize::from(dear)].burden(Duration::from_millis(2));
    // Whether the honest port is served in it.
    let round = |ports: &mut Ports| {
        for port in [dear, honest] {
            ports.fill(port, &small(port, mac(receiver)), 64);
        }
        ports.bed.serve_events(0);
        let before = ports.work(honest);
        ports.bed.round(0);
        ports.received(receiver);
        ports.work(honest) > before
    };
    let long = Duration::from_millis(20);
    assert!(!ports.bed.look_after(0, long, 0), "another thread may have had the processor");
    assert!(!ports.bed.look_after(0, long, MILLISECOND), "and it had");
    assert!(!ports.bed.look_after(0, long, 0), "again");
    round(&mut ports);
    assert!(ports.work(dear) < MILLISECOND, "the price list knows of nothing");
    assert!(ports.bed.look_after(0, long, 0), "the thread worked for much longer");

    while ports.work(dear) < 2 * MILLISECOND {
        round(&mut ports);
    }
    let (had, before) = (ports.work(dear), ports.work(honest));
    let mut rounds = 0;
    while ports.work(dear) == had {
        round(&mut ports);
        rounds += 1;
        assert!(rounds < 100_000, "it is served again at last");
    }
    let meanwhile = ports.work(honest) - before;
    assert!(meanwhile >= MILLISECOND, "the other one had {meanwhile} ns of work in {rounds} rounds");
}

/// H3: frames that were put off, and then waited for tokens of their receivers, cost their sender next to nothing, and were all cut at once when the tokens came.
#[test]
fn h3_frames_that_wait_for_tokens_are_paid_for_and_cut_in_turns() {
    /// What cutting one packet costs at least.
    const PACKET: u64 = 100;
    let mut ports = Ports::new(1);
    let attacker = ports.add(1, Offloads::all(), 0, 1);
    let rate = Rate { per_second: 1_250_000_000, burst: 256 << 10 };
    let limits = Limits { packets: None, bytes: Some(rate) };
    let receivers: Vec<_> = (0..8).map(|_| ports.add_limited(limits)).collect();
    let flood = large(attacker, BROADCAST, 60_000, 32);
    let (mut packets, mut most) = (0, 0);
    for _ in 0..2000 {
        ports.fill(attacker, &flood, 4);
        ports.bed.advance(1_000);
        ports.bed.serve_events(0);
        ports.bed.round(0);
        let got: usize = receivers.iter().map(|port| ports.received(*port).len()).sum();
        packets += got as u64;
        most = most.max(got as u64);
    }
    assert!(packets > 100_000, "they are delivered all the same: {packets}");
    let work = ports.work(attacker);
    assert!(work > packets * PACKET, "{packets} packets for {work} ns of work");
    assert!(most * PACKET < MILLISECOND, "{most} packets in one round");
}

/// H3: what a frame costs was estimated by what its receivers took before, and then it was cut for what they take now.
#[test]
fn h3_a_receiver_that_takes_less_from_now_on_gets_what_was_paid_for() {
    let mut ports = Ports::new(1);
    let attacker = ports.add(1, Offloads::all(), 0, 1);
    let receivers: Vec<_> = (0..8).map(|_| ports.add(1, Offloads::all(), 0, 1)).collect();
    let flood = large(attacker, BROADCAST, 60_000, 32);
    ports.fill(attacker, &flood, 1);
    ports.bed.run();
    for port in &receivers {
        assert_eq!(ports.received(*port).len(), 1, "it takes large frames");
        ports.bed.set_offloads(PortId(*port), Offloads::empty());
    }
    ports.fill(attacker, &flood, 8);
    ports.bed.round(0);
    let packets: usize = receivers.iter().map(|port| ports.received(*port).len()).sum();
    assert!(packets < 10_000, "{packets} packets in one round");
    ports.bed.run();
    let packets = packets + receivers.iter().map(|port| ports.received(*port).len()).sum::<usize>();
    assert_eq!(packets, 8 * 8 * 60_000 / 32, "all of them arrive at last");
}

/// H3: a receiver that spreads each frame over dozens of buffers had its share of the worker paid by whoever sent to it.
#[test]
fn h3_a_receiver_whose_buffers_are_dear_takes_no_more_than_its_share() {
    for (attacker, honest) in [(0, 2), (2, 0)] {
        dear_buffers(attacker, honest);
    }
}

/// In every round the port of the lower number is served first.
fn dear_buffers(attacker: u16, honest: u16) {
    let mut ports = Ports::new(1);
    let [_, accomplice, _, receiver] = [(); 4].map(|()| ports.add(1, Offloads::all(), 0, 1));
    ports.wires[usize::from(accomplice)].spread(60);
    let frames = [small(attacker, mac(accomplice)), small(honest, mac(receiver))];
    let mut passed = [0; 2];
    while ports.work(honest) < 10 * MILLISECOND {
        ports.fill(attacker, &frames[0], 512);
        ports.fill(honest, &frames[1], 512);
        ports.bed.serve_events(0);
        ports.bed.round(0);
        passed[0] += ports.received(accomplice).len();
        passed[1] += ports.received(receiver).len();
    }
    let shares = [attacker, accomplice, honest].map(|port| ports.work(port));
    assert!(shares.iter().all(|share| *share < 13 * MILLISECOND), "each is a third: {shares:?}");
    assert!(passed[0] > 1000, "the accomplice has its share, too: {passed:?}");
    let dropped = ports.drops(accomplice, "dear-buffers");
    assert!(dropped > 1000, "{dropped} of its frames were dropped");
    assert_eq!(ports.drops(receiver, "dear-buffers"), 0);
}

/// A guest whose buffers are dear loses nothing on a worker that has only those to serve who send to it.
#[test]
fn h3_dear_buffers_cost_nothing_where_nobody_else_waits() {
    let mut ports = Ports::new(1);
    let [sender, receiver] = [(); 2].map(|()| ports.add(1, Offloads::all(), 0, 1));
    ports.wires[usize::from(receiver)].spread(18);
    for from in [sender, receiver] {
        let frame = small(from, mac(sender + receiver - from));
        for _ in 0..100 {
            ports.fill(from, &frame, 512);
            ports.bed.round(0);
        }
        ports.bed.run();
    }
    assert_eq!(ports.drops(receiver, "dear-buffers"), 0);
    assert!(ports.received(receiver).len() > 3000);
}

/// What is flooded was paid for as if all ports got it, also those of other VLANs: a guest whose VLAN has two ports fell behind others where there are many.
#[test]
fn h3_a_flood_costs_by_who_gets_it() {
    const FRAMES: usize = 1000;
    let mut ports = Ports::new(1);
    let add = |ports: &mut Ports, vlan| {
        ports.plug(HeapPort {
            rules: Rules { vlans: Vlans::Access(vlan), ..Rules::default() },
            ..HeapPort::default()
        })
    };
    let [alone, other] = [add(&mut ports, 10), add(&mut ports, 10)];
    let [among, ..] = [(); 40].map(|()| add(&mut ports, 20));
    for sender in [alone, among] {
        for _ in 0..FRAMES {
            ports.wires[usize::from(sender)].send(0, small(sender, BROADCAST));
        }
        ports.bed.run();
    }
    assert_eq!([other, among + 1].map(|port| ports.received(port).len()), [FRAMES; 2]);
    let [few, many] = [alone, among].map(|port| ports.work(port) / FRAMES as u64);
    // 40 ports that it does not leave by cost less than the 39 by which it does.
    assert!(few < many / 2 && few > 40 * 10, "{few} and {many} ns a frame");
}

/// H3: in an audit, whoever was first to have something for another worker that slept paid for waking it, which takes longer than a hundred frames: a guest that sent a little at a
/// time fell behind floods.
#[test]
fn h3_an_audit_charges_nobody_with_waking_another_worker() {
    const WAKES: usize = 20;
    let mut ports = Ports::new(2);
    let [sender, slow] = [ports.add(1, Offloads::all(), 0, 1), ports.add(1, Offloads::all(), 0, 1)];
    let receiver = ports.add(1, Offloads::all(), 1, 1);
    let long = Duration::from_millis(20);
    let burden = |ports: &mut Ports, burden| {
        ports.wires[usize::from(slow)].burden(burden);
        ports.fill(slow, &small(slow, mac(sender)), 8);
        ports.bed.serve_events(0);
        ports.bed.round(0);
    };
    ports.bed.look_after(0, long, 0);
    burden(&mut ports, 2 * Duration::from_millis(2));
    assert!(ports.bed.look_after(0, long, 0), "there is an audit");
    ports.bed.run();
    let _dear = ports.bed.burden_bell(1, 10_000);
    let frame = small(sender, mac(receiver));
    for _ in 0..WAKES {
        while !ports.bed.sleep(1) {}
        ports.wires[usize::from(sender)].send(0, frame.clone());
        ports.bed.serve_events(0);
        // It has its turn once it owes nothing.
        while ports.wires[usize::from(sender)].waiting(0) > 0 {
            ports.bed.round(0);
        }
        ports.bed.serve_events(1);
        ports.bed.round(1);
    }
    ports.bed.run();
    assert_eq!(ports.received(receiver).len(), WAKES);
    assert!(ports.work(sender) < 4 * MILLISECOND, "{} ns", ports.work(sender));
}

/// H3: an audit, in which others are much slower, went on for as long as there were queues that are polled and silent: to read the clock takes longer than to poll one.
#[test]
fn h3_silent_queues_prolong_no_audit() {
    let mut ports = Ports::new(1);
    let [silent, receiver] = [16, 1].map(|pairs| ports.add(pairs, Offloads::all(), 0, 1));
    let long = Duration::from_millis(20);
    // The worker has worked for that long itself.
    let work = |ports: &Ports| {
        ports.wires[usize::from(silent)].burden(Duration::from_millis(2));
        ports.fill(silent, &small(silent, mac(receiver)), 8);
    };
    ports.bed.look_after(0, long, 0);
    work(&ports);
    ports.bed.round(0);
    assert!(ports.bed.look_after(0, long, 0), "there is an audit");
    ports.bed.run();
    ports.wires[usize::from(silent)].burden(Duration::ZERO);
    ports.bed.look_after(0, 10 * long, 0);
    for queue in 0..16 {
        ports.wires[usize::from(silent)].kick(queue);
    }
    ports.bed.serve_events(0);
    for _ in 0..1000 {
        ports.bed.round(0);
    }
    assert!(!ports.bed.look_after(0, 20 * long, 0), "it has found nothing");
}

/// H3: what is put off is delivered, whole and in order, and what is sent after it does not overtake it.
#[test]
fn h3_frames_that_are_put_off_arrive_as_they_would_have() {
    let mut ports = Ports::new(1);
    let sender = ports.add(1, Offloads::all(), 0, 1);
    let receivers: Vec<_> = [Offloads::empty(), Offloads::CSUM, Offloads::all()]
        .into_iter()
        .cycle()
        .take(9)
        .map(|offloads| ports.add(1, offloads, 0, 1))
        .collect();
    let frame = large(sender, BROADCAST, 40_000, 50);
    let sends = 5;
    for _ in 0..sends {
        ports.wires[0].send(0, frame.clone());
        ports.wires[0].send(0, small(sender, BROADCAST));
    }
    ports.bed.run();
    let head = frame.bytes.len() - 40_000;
    for (receiver, offloads) in receivers.iter().zip([false, false, true].into_iter().cycle()) {
        let got = ports.received(*receiver);
        let packets = if offloads { 1 } else { 800 };
        assert_eq!(got.len(), sends * (packets + 1));
        for sent in got.chunks(packets + 1) {
            let (last, parts) = sent.split_last().unwrap();
            assert_eq!(last.bytes.len(), 60, "the small frame comes after all of the large one");
            assert_eq!(parts.iter().map(|part| part.bytes.len() - head).sum::<usize>(), 40_000);
            let sequences: Vec<u32> =
                parts.iter().map(|part| u32::from_be_bytes(part.bytes[38..42].try_into().unwrap())).collect();
            assert!(sequences.is_sorted());
        }
    }
    assert_eq!(ports.bed.totals(PortId(sender)).drops_by_name().values().sum::<u64>(), 0);
}

/// H3: cutting went on when the receiver had no buffers left.
#[test]
fn h3_a_receiver_without_buffers_costs_one_attempt_and_every_packet_is_counted() {
    let mut ports = Ports::new(1);
    let sender = ports.add(1, Offloads::all(), 0, 1);
    let receiver = ports.add(1, Offloads::empty(), 0, 1);
    ports.wires[usize::from(receiver)].set_room(0, 10);
    ports.wires[usize::from(sender)].send(0, large(sender, mac(receiver), 10_000, 100));
    ports.bed.run();
    assert_eq!(ports.received(receiver).len(), 10);
    assert_eq!(ports.drops(receiver, "no-receive-buffers"), 90);
    assert_eq!(ports.wires[usize::from(receiver)].refused(0), 1, "deliveries that were tried in vain");
}

/// In Linux's vhost_net frames that a receiver's buffers were too small for were discarded beyond the limit of a turn, so that a flood of them kept the thread
/// for good. Here what is discarded is paid for as what is delivered, and ends the turn.
#[test]
fn cve_2019_3900_a_flood_of_frames_that_are_discarded_ends_its_turn() {
    const FLOOD: usize = 10_000;
    // The receiver has no buffers, or dozens for each frame, for which it has to pay in the end.
    for (room, further) in [(0, 0), (usize::MAX, 60)] {
        let mut ports = Ports::new(1);
        let [flooder, victim, honest, receiver] = [(); 4].map(|()| ports.add(1, Offloads::all(), 0, 1));
        let (from, to) = (&ports.wires[usize::from(flooder)], &ports.wires[usize::from(victim)]);
        let (from, to) = (Arc::clone(from), Arc::clone(to));
        to.set_room(0, room);
        to.spread(further);
        let mut discarded = 0;
        for _ in 0..50 {
            ports.fill(flooder, &small(flooder, mac(victim)), FLOOD);
            ports.fill(honest, &small(honest, mac(receiver)), 1);
            ports.bed.serve_events(0);
            ports.bed.round(0);
            let taken = FLOOD - from.waiting(0);
            assert!(taken <= 512, "{taken} frames of the flood were taken in one turn");
            discarded += taken - ports.received(victim).len();
            assert_eq!(
                ports.received(receiver).len(),
                1,
                "the honest frame of each round is forwarded in it"
            );
        }
        assert!(discarded > 500, "{discarded}");
    }
}

/// Two ports that always have work get the worker in proportion to their weights, whatever their frames cost.
#[test]
fn h3_ports_share_a_worker_by_weight_and_not_by_frames() {
    for (weights, least, most) in [([1, 1], 0.75, 1.33), ([4, 1], 3.0, 5.4), ([1, 4], 0.18, 0.34)] {
        let mut ports = Ports::new(1);
        let cheap = ports.add(1, Offloads::all(), 0, weights[0]);
        let dear = ports.add(16, Offloads::all(), 0, weights[1]);
        let receiver = ports.add(1, Offloads::empty(), 0, 1);
        let frames = [small(cheap, mac(receiver)), large(dear, mac(receiver), 60_000, 100)];
        while ports.work(cheap) + ports.work(dear) < 40 * MILLISECOND {
            ports.fill(cheap, &frames[0], 512);
            ports.fill(dear, &frames[1], 4);
            ports.bed.serve_events(0);
            ports.bed.round(0);
            ports.received(receiver);
        }
        let ratio = ports.work(cheap) as f64 / ports.work(dear) as f64;
        assert!(ratio > least && ratio < most, "weights {weights:?} gave {ratio}");
    }
}

/// H4: a front end that disables rings had all of them emptied at once, while everybody waited.
#[test]
fn h4_stopping_the_queues_of_a_port_costs_no_more_than_half_a_millisecond() {
    let mut ports = Ports::new(1);
    let guest = ports.add(16, Offloads::all(), 0, 1);
    let receiver = ports.add(1, Offloads::empty(), 0, 1);
    let frame = large(guest, mac(receiver), 60_000, 500);
    ports.fill(guest, &frame, 100);
    let before = ports.work(guest);
    (0..16).for_each(|queue| ports.bed.stop(PortId(guest), queue));
    let work = ports.work(guest) - before;
    assert!(work > 0 && work < MILLISECOND, "{work} ns");
    assert!(ports.wires[usize::from(guest)].waiting(15) > 0, "what was not accepted stays in the ring");
    // What was taken is delivered; and a ring with little in it is emptied as before.
    ports.bed.run();
    let cut = ports.received(receiver).len();
    assert!(cut > 0 && cut.is_multiple_of(120), "frames arrive whole: {cut}");
}

#[test]
fn h4_little_is_forwarded_before_a_queue_stops() {
    let mut ports = Ports::new(1);
    let guest = ports.add(1, Offloads::all(), 0, 1);
    let receiver = ports.add(1, Offloads::all(), 0, 1);
    ports.fill(guest, &small(guest, mac(receiver)), 256);
    ports.bed.stop(PortId(guest), 0);
    ports.bed.run();
    assert_eq!(ports.received(receiver).len(), 256);
}

/// M5: the ring between two workers was first come, first served.
#[test]
fn m5_a_flood_between_workers_costs_others_no_frame_and_its_sender_the_time() {
    let mut ports = Ports::new(2);
    let hog = ports.add(1, Offloads::all(), 0, 1);
    let innocent = ports.add(1, Offloads::all(), 0, 1);
    // Both receivers are with the other worker.
    let [to_hog, to_innocent] = [ports.add(1, Offloads::all(), 1, 1), ports.add(1, Offloads::all(), 1, 1)];
    let mut sent = 0;
    for round in 0..2000 {
        ports.fill(hog, &small(hog, mac(to_hog)), 64);
        for _ in 0..4 {
            ports.wires[usize::from(innocent)].send(0, small(innocent, mac(to_innocent)));
            sent += 1;
        }
        ports.bed.serve_events(0);
        ports.bed.round(0);
        // The other worker is slower.
        if round % 4 == 0 {
            ports.bed.serve_events(1);
            ports.bed.round(1);
        }
        ports.bed.advance(20);
    }
    assert!(ports.held(hog) > 0, "the flood is too much");
    let dropped = [to_hog, to_innocent].map(|port| ports.drops(port, "worker-busy"));
    assert_eq!((dropped, ports.held(innocent)), ([0; 2], 0));
    ports.bed.run_for(1000);
    assert_eq!(ports.received(to_innocent).len(), sent);
    assert!(ports.received(to_hog).len() > sent, "the hog has what is left of the other worker's time");
}

/// M5: a worker that did not run for some milliseconds, as others had its processor, cost whoever sent to it thousands of frames.
#[test]
fn m5_who_sends_to_a_worker_that_does_not_run_waits_for_it_and_not_for_ever() {
    const MILLISECONDS: u64 = PATIENCE / 1000;
    let mut ports = Ports::new(2);
    let [sender, local] = [ports.add(1, Offloads::all(), 0, 1), ports.add(1, Offloads::all(), 0, 1)];
    let receiver = ports.add(1, Offloads::all(), 1, 1);
    let (far, near) = (small(sender, mac(receiver)), small(sender, mac(local)));
    let sent = 4000;
    ports.fill(sender, &far, sent);
    // So many milliseconds of a worker alone.
    let alone = |ports: &mut Ports, milliseconds: u64| {
        for _ in 0..milliseconds * 10 {
            ports.bed.serve_events(0);
            while ports.bed.round(0) {}
            ports.bed.advance(100);
        }
    };
    alone(&mut ports, MILLISECONDS - 1);
    let under_way = ports.bed.under_way(0, 1);
    assert!(under_way > 300, "{under_way}");
    assert_eq!(
        ports.wires[usize::from(sender)].waiting(0),
        sent - under_way,
        "the rest is in the sender's ring"
    );
    assert!(ports.held(sender) > 0);
    // It runs again, and nothing was lost.
    ports.bed.run_for(5000);
    assert_eq!((ports.received(receiver).len(), ports.drops(receiver, "worker-busy")), (sent, 0));
    // It does not, and others that the sender talks to do not wait for it.
    ports.fill(sender, &far, sent);
    ports.wires[usize::from(sender)].send(0, near);
    alone(&mut ports, MILLISECONDS - 1);
    assert_eq!(ports.received(local).len(), 0);
    alone(&mut ports, 3);
    assert_eq!(ports.received(local).len(), 1);
    assert_eq!(ports.drops(receiver, "worker-busy"), (sent - under_way) as u64);
    // Once something comes back, it is waited for again.
    ports.bed.run_for(1000);
    ports.fill(sender, &far, sent);
    alone(&mut ports, MILLISECONDS - 1);
    assert_eq!(ports.drops(receiver, "worker-busy"), (sent - under_way) as u64);
}

/// M5: what is handed off is work of the port that sent it, in the worker that delivers it, too.
#[test]
fn m5_a_port_pays_for_its_frames_in_the_worker_that_delivers_them() {
    let mut ports = Ports::new(2);
    let hog = ports.add(1, Offloads::all(), 0, 1);
    let receiver = ports.add(1, Offloads::all(), 1, 1);
    let local = ports.add(1, Offloads::all(), 1, 1);
    let large = large(hog, mac(receiver), 60_000, 1000);
    let small = small(local, mac(receiver));
    let mut turns = [0; 2];
    for _ in 0..4000 {
        ports.fill(hog, &large, 32);
        ports.fill(local, &small, 64);
        ports.bed.serve_events(0);
        ports.bed.round(0);
        ports.bed.serve_events(1);
        ports.bed.round(1);
        for frame in ports.received(receiver) {
            turns[usize::from(frame.bytes.len() < 1000)] += frame.bytes.len();
        }
    }
    // By bytes the large frames are far ahead; by work the two are even.
    let work = [turns[0] as u64 / 8, turns[1] as u64 / 60 * 87];
    assert!(work[0] < 2 * work[1], "the worker's time went to {work:?}");
}

/// Frames that are far too much for a turn, and that nine receivers get in so many packets each.
const PUT_OFF: (usize, usize) = (5, 5 * 1875);

/// A port of worker 0 has sent [those](PUT_OFF) to receivers of another one, and some of them have been put off.
fn put_off(workers: usize, prepare: impl FnOnce(&mut Ports, u16, &[u16])) -> (Ports, u16, Vec<u16>) {
    let mut ports = Ports::new(workers);
    let sender = ports.add(1, Offloads::all(), 0, 1);
    let receivers: Vec<_> = (0..9).map(|_| ports.add(1, Offloads::empty(), workers - 1, 1)).collect();
    prepare(&mut ports, sender, &receivers);
    for _ in 0..PUT_OFF.0 {
        ports.wires[0].send(0, large(sender, BROADCAST, 60_000, 32));
    }
    ports.bed.serve_events(0);
    ports.bed.round(0);
    (ports, sender, receivers)
}

#[test]
fn h3_nobody_sleeps_while_frames_are_put_off() {
    let (mut ports, _, receivers) = put_off(1, |_, _, _| {});
    assert!(!ports.bed.sleep(0));
    ports.bed.run();
    assert_eq!(ports.received(receivers[8]).len(), PUT_OFF.1);
}

#[test]
fn h3_frames_that_are_put_off_do_not_pass_between_isolated_ports() {
    let (mut ports, _, receivers) = put_off(1, |ports, sender, receivers| {
        for port in [sender, receivers[8]] {
            let rules = Rules { static_macs: vec![(mac(port), 0)], isolated: true, ..Rules::default() };
            ports.bed.set_rules(PortId(port), &rules);
        }
    });
    ports.bed.run();
    assert_eq!(ports.received(receivers[7]).len(), PUT_OFF.1);
    assert!(ports.received(receivers[8]).is_empty());
}

/// What follows on a queue that migrates comes from another worker, and does not overtake what was put off.
#[test]
fn h3_frames_that_are_put_off_are_not_overtaken_when_their_queue_migrates() {
    let (mut ports, sender, receivers) = put_off(2, |_, _, _| {});
    ports.wires[0].send(0, small(sender, BROADCAST));
    ports.bed.migrate(PortId(sender), 0, 1, &mut |_, _| {}).unwrap();
    ports.bed.round(1);
    ports.bed.run();
    for receiver in receivers {
        let lengths: Vec<_> = ports.received(receiver).iter().map(|frame| frame.bytes.len()).collect();
        assert_eq!(lengths.iter().position(|len| *len == 60), Some(lengths.len() - 1), "{receiver}");
    }
}

#[test]
fn a_port_does_not_inherit_the_debt_of_its_number() {
    let (mut ports, sender, receivers) = put_off(1, |_, _, _| {});
    ports.bed.remove(PortId(sender));
    let wire = ports.bed.add_as(PortId(sender), &HeapPort::default());
    ports.received(receivers[0]);
    wire.send(0, small(sender, mac(receivers[0])));
    ports.bed.serve_events(0);
    ports.bed.round(0);
    assert_eq!(ports.received(receivers[0]).len(), 1);
}
