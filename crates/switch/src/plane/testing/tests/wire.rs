//! Wires between ports: everything passes as it is, to the other end and to nobody else, when and as often as the impairments say.

use std::sync::Arc;

use ringferry_packet::checksum;
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header, Offloads};

use crate::config::SwitchConfig;
use crate::counters::DropReason;
use crate::fdb::PortId;
use crate::impairments::{Impairments, Loss, Share, Wire as Config};
use crate::plane::Carried;
use crate::plane::forward::walk::{Imaginary, Target};
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use crate::plane::wire::BUCKETS;
use crate::rules::Rules;

const MS: u64 = 1_000_000;

/// The ends of the wire, and a port beside it.
const A: PortId = PortId(0);
const B: PortId = PortId(1);
const OTHER: PortId = PortId(2);

fn percent(percent: u32) -> Share {
    Share::of_billionths(percent * 10_000_000).unwrap()
}

fn config(impairments: [Impairments; 2]) -> Config {
    let ports = ["heap0", "heap1"].map(str::to_owned);
    Config { name: "w".to_owned(), ports, seed: Some(42), directions: impairments }
}

/// The rules of a port as an end of the wire.
fn end(port: PortId, wire: &Config) -> Rules {
    Rules { wire: wire.end(&format!("heap{}", port.0), 0), ..Rules::default() }
}

/// A wire between two ports, and one port more.
struct Lab {
    bed: Bed,
    ports: Vec<Arc<Wire>>,
}

impl Lab {
    fn new(impairments: [Impairments; 2], workers: usize, port: HeapPort) -> Lab {
        let mut bed = Bed::new(&SwitchConfig { mac_table_size: 64, ..SwitchConfig::default() }, workers);
        let wire = config(impairments);
        let ports = [A, B, OTHER].map(|id| {
            let rules = if id == OTHER { Rules::default() } else { end(id, &wire) };
            bed.add(&HeapPort { rules, first: usize::from(id.0) % workers, ..port.clone() }).1
        });
        Lab { bed, ports: ports.into() }
    }

    fn both(impairments: &Impairments) -> Lab {
        Lab::new([impairments.clone(), impairments.clone()], 1, HeapPort::default())
    }

    fn set(&mut self, impairments: [Impairments; 2]) {
        let wire = config(impairments);
        for id in [A, B] {
            self.bed.set_rules(id, &end(id, &wire));
        }
    }

    fn send(&self, port: PortId, frame: &[u8]) {
        self.send_with(port, Header::NONE, frame);
    }

    fn send_with(&self, port: PortId, header: Header, frame: &[u8]) {
        self.ports[usize::from(port.0)].send(0, HeapFrame::new(header, frame.to_vec()));
    }

    fn received(&self, port: PortId) -> Vec<HeapFrame> {
        let port = &self.ports[usize::from(port.0)];
        (0..port.queues()).flat_map(|queue| port.received(queue)).collect()
    }

    fn bytes(&self, port: PortId) -> Vec<Vec<u8>> {
        self.received(port).into_iter().map(|frame| frame.bytes).collect()
    }

    fn drops(&self, port: PortId, reason: DropReason) -> u64 {
        self.bed.totals(port).drops_by_name()[reason.name()]
    }

    fn counter(&self, port: PortId, name: &str) -> u64 {
        self.bed.totals(port).by_name()[name]
    }
}

/// A frame between these addresses, with this behind them, padded.
fn frame(destination: [u8; 6], source: [u8; 6], rest: &[u8], number: u32) -> Vec<u8> {
    let mut frame = [&destination[..], &source, rest, &number.to_be_bytes()].concat();
    frame.resize(60, 0x5a);
    frame
}

fn numbered(number: u32) -> Vec<u8> {
    frame([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 0], &[0x88, 0xb5], number)
}

/// What a switch drops, changes or learns from, and a wire does not.
fn strange() -> Vec<Vec<u8>> {
    let station = [2, 0, 0, 0, 0, 9];
    let reserved = |last: u8| [0x01, 0x80, 0xc2, 0, 0, last];
    vec![
        // LACP, spanning tree, PAUSE, LLDP, and PAUSE to a station.
        frame(reserved(2), station, &[0x88, 0x09, 1, 1], 1),
        frame(reserved(0), station, &[0, 38, 0x42, 0x42, 3], 2),
        frame(reserved(1), station, &[0x88, 0x08, 0, 1, 0xff, 0xff], 3),
        frame(reserved(14), station, &[0x88, 0xcc], 4),
        frame([2, 0, 0, 0, 0, 1], station, &[0x88, 0x08, 0, 1], 5),
        // A priority tag before another tag, the reserved VLAN, a tag behind a service tag, half a tag, one of each old type.
        frame(station, station, &[0x81, 0, 0, 0, 0x81, 0, 0, 7, 8, 0], 6),
        frame(station, station, &[0x81, 0, 0x0f, 0xff, 8, 0], 7),
        frame(station, station, &[0x88, 0xa8, 0x20, 100, 0x81, 0, 0, 5, 8, 0], 8),
        [&station[..], &station, &[0x81, 0, 1]].concat(),
        frame(station, station, &[0x91, 0, 0, 5, 8, 0], 9),
        // From a group, from nobody, to itself, of no known type, and the shortest.
        frame([0xff; 6], [3, 0, 0, 0, 0, 1], &[0x88, 0xb5], 10),
        frame([0xff; 6], [0; 6], &[0x88, 0xb5], 11),
        frame(station, station, &[0xfe, 0xfe], 12),
        [&station[..], &station, &[0xfe, 0xfe]].concat(),
    ]
}

#[test]
fn everything_passes_as_it_is_and_to_the_other_end_alone() {
    for delay in [0, 10 * MS] {
        let mut lab = Lab::both(&Impairments { delay, ..Impairments::default() });
        for (from, to) in [(A, B), (B, A)] {
            for frame in strange() {
                lab.send(from, &frame);
            }
            lab.bed.run_for(delay / 1000);
            assert_eq!(lab.bytes(to), strange());
        }
        // What the port beside it floods reaches neither, and what the wire carries does not reach that port, whomever it is for.
        lab.send(OTHER, &frame([0xff; 6], [2, 0, 0, 0, 0, 2], &[0x88, 0xb5], 1));
        lab.send(A, &frame([2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 0], &[0x88, 0xb5], 2));
        lab.bed.run_for(delay / 1000);
        assert_eq!((lab.bytes(A).len(), lab.bytes(B).len(), lab.bytes(OTHER).len()), (0, 1, 0));
        // Nothing was learned of all that.
        let known: Vec<_> = lab.bed.addresses(0).into_iter().flat_map(|page| page.items).collect();
        assert!(known.iter().all(|item| item.port == OTHER), "{known:?}");
        let dropped: u64 =
            [A, B].iter().map(|port| lab.bed.totals(*port).drops_by_name().values().sum::<u64>()).sum();
        assert_eq!(dropped, 0);
    }
}

/// Packets of a flow that a receiver would take as one are left alone.
#[test]
fn nothing_is_merged_on_a_wire() {
    for delay in [0, MS] {
        let mut lab = Lab::both(&Impairments { delay, ..Impairments::default() });
        let segment = |number: u32| {
            let packet = Packet { sequence: number * 1000, ..Packet::plain(false, true, vec![7; 1000]) };
            packet.complete().1
        };
        let all: Vec<_> = (0..20).map(segment).collect();
        all.iter().for_each(|frame| lab.send(A, frame));
        lab.bed.run_for(delay / 1000);
        assert_eq!(lab.bytes(B), all);
        assert_eq!(lab.counter(B, "tx_coalesced"), 0);
    }
}

#[test]
fn frames_leave_when_they_are_due_and_not_before() {
    let mut lab = Lab::both(&Impairments { delay: 10 * MS, ..Impairments::default() });
    for number in 0..100 {
        lab.send(A, &numbered(number));
        lab.bed.run();
        lab.bed.advance(10);
    }
    lab.bed.run_for(10_000 - 100 * 10 - 1);
    assert_eq!(lab.bytes(B).len(), 0);
    for number in 0..100 {
        lab.bed.run_for(if number == 0 { 1 } else { 10 });
        assert_eq!(lab.bytes(B), [numbered(number)]);
    }
    // All were on time.
    let state = lab.bed.held(0);
    assert!(state.wires.frames.is_empty());
    assert_eq!(lab.counter(B, "tx_packets"), 100);
}

#[test]
fn a_rate_spaces_frames_and_drops_what_its_queue_does_not_hold() {
    let impairments = Impairments { rate: Some(480_000), limit: 50, ..Impairments::default() };
    let mut lab = Lab::both(&impairments);
    // 60 bytes take a millisecond.
    (0..80).for_each(|number| lab.send(A, &numbered(number)));
    lab.bed.run();
    assert_eq!(lab.drops(B, DropReason::WireLimit), 30);
    for number in 0..50 {
        lab.bed.run_for(1_000);
        assert_eq!(lab.bytes(B), [numbered(number)]);
    }
    // The other direction is free all the time.
    lab.send(B, &numbered(99));
    lab.bed.run_for(1_000);
    assert_eq!(lab.bytes(A), [numbered(99)]);
}

#[test]
fn one_direction_may_be_worse_than_the_other() {
    let lossy = Impairments { loss: Loss::Random(Share::ALL), ..Impairments::default() };
    let mut lab = Lab::new([lossy, Impairments::default()], 1, HeapPort::default());
    lab.send(A, &numbered(1));
    lab.send(B, &numbered(2));
    lab.bed.run();
    assert_eq!((lab.bytes(B).len(), lab.bytes(A)), (0, vec![numbered(2)]));
    assert_eq!((lab.drops(B, DropReason::WireLoss), lab.drops(A, DropReason::WireLoss)), (1, 0));
}

#[test]
fn the_same_frames_are_lost_each_time() {
    let lossy = Impairments { loss: Loss::Random(percent(10)), delay: MS, ..Impairments::default() };
    let run = || {
        let mut lab = Lab::both(&lossy);
        (0..500).for_each(|number| lab.send(A, &numbered(number)));
        lab.bed.run_for(MS);
        lab.bytes(B)
    };
    let first = run();
    assert!((400..500).contains(&first.len()), "{}", first.len());
    assert_eq!(first, run());
}

/// A frame that is to be cut is many packets: each is lost by itself, takes its time on the line, and has a checksum of its own.
#[test]
fn a_large_frame_meets_impairments_packet_by_packet() {
    let packet = Packet::plain(false, true, (0..20_000u32).map(|byte| byte as u8).collect());
    let (header, bytes) = packet.sent(1000);
    assert_eq!((header.gso_type, header.flags), (GSO_TCPV4, F_NEEDS_CSUM));
    // As one, where nothing happens to it.
    let mut lab = Lab::both(&Impairments::default());
    lab.send_with(A, header, &bytes);
    lab.bed.run();
    assert_eq!(lab.bytes(B), std::slice::from_ref(&bytes));
    // Packet by packet, for a receiver that takes all offloads and for one that takes none.
    for offloads in [Offloads::all(), Offloads::empty()] {
        let impairments =
            Impairments { loss: Loss::Random(percent(20)), rate: Some(8_000_000), ..Impairments::default() };
        let port = HeapPort { offloads, ..HeapPort::default() };
        let mut lab = Lab::new([impairments.clone(), impairments], 1, port);
        lab.send_with(A, header, &bytes);
        lab.bed.run();
        let lost = lab.drops(B, DropReason::WireLoss);
        assert!((1..10).contains(&lost), "{lost}");
        let mut got = Vec::new();
        // Each of 1054 bytes takes 1.054 ms.
        for _ in lost..20 {
            lab.bed.run_for(1_054);
            let one = lab.received(B);
            assert_eq!(one.len(), 1, "{}", got.len());
            got.extend(one);
        }
        for HeapFrame { header, bytes, .. } in got {
            let mut whole = bytes;
            checksum::complete(&header, &mut whole).unwrap();
            checksum::verify(&whole).unwrap();
            assert!(!header.is_gso() && whole.len() <= 1054);
            assert!(offloads.accepts(&header));
        }
    }
}

/// One bit is wrong, in a frame whose checksum was finished before, and nobody is told that it is right.
#[test]
fn a_corrupt_frame_has_one_wrong_bit() {
    let packet = Packet::plain(false, true, vec![7; 500]);
    let (header, bytes) = packet.sent(0);
    assert_eq!(header.flags, F_NEEDS_CSUM);
    let mut right = bytes.clone();
    checksum::complete(&header, &mut right).unwrap();
    let mut lab = Lab::both(&Impairments { corrupt: Share::ALL, ..Impairments::default() });
    for _ in 0..50 {
        lab.send_with(A, header, &bytes);
    }
    lab.bed.run();
    let got = lab.received(B);
    assert_eq!((got.len(), lab.counter(B, "tx_corrupted")), (50, 50));
    let mut places = std::collections::BTreeSet::new();
    for HeapFrame { header, bytes, .. } in got {
        assert_eq!(header, Header::NONE);
        let wrong: Vec<_> = (0..).zip(bytes.iter().zip(&right)).filter(|(_, (is, was))| is != was).collect();
        let [(at, (is, was))] = wrong[..] else { panic!("{} bytes are wrong", wrong.len()) };
        assert_eq!((is ^ was).count_ones(), 1);
        places.insert(at);
    }
    assert!(places.len() > 30, "anywhere in the frame: {places:?}");
}

#[test]
fn a_frame_may_come_twice() {
    let mut lab = Lab::both(&Impairments { duplicate: Share::ALL, ..Impairments::default() });
    (0..10).for_each(|number| lab.send(A, &numbered(number)));
    lab.bed.run();
    let expected: Vec<_> = (0..10).flat_map(|number| [numbered(number), numbered(number)]).collect();
    assert_eq!((lab.bytes(B), lab.counter(B, "tx_duplicated")), (expected, 10));
}

/// The queue of a wire may hold as much as its `limit-bytes` allow, so taking it out in one go would stall all ports of the worker.
#[test]
fn a_full_wire_that_is_taken_out_is_emptied_turn_by_turn() {
    const FRAMES: u32 = 2000;
    let slow = Impairments { delay: 1000 * MS, ..Impairments::default() };
    let mut lab = Lab::both(&slow);
    lab.ports[1].set_room(0, usize::MAX);
    for number in 0..FRAMES {
        lab.send(A, &numbered(number));
        lab.bed.run();
    }
    // Another wire in its place; its own frames wait for as long as they do there.
    let other = Config { name: "x".to_owned(), ..config([slow.clone(), slow]) };
    for id in [A, B] {
        lab.bed.set_rules(id, &end(id, &other));
    }
    lab.send(A, &numbered(FRAMES));
    let (mut turns, mut got) = (0, Vec::new());
    while lab.bed.round(0) {
        let part = lab.bytes(B);
        assert!(part.len() <= 256, "{} at once", part.len());
        got.extend(part);
        turns += 1;
    }
    assert!(turns >= 8, "{turns} turns");
    assert_eq!(got, (0..FRAMES).map(numbered).collect::<Vec<_>>());
    lab.bed.run_for(1_000_000);
    assert_eq!(lab.bytes(B), [numbered(FRAMES)]);
    assert_eq!(lab.drops(B, DropReason::WireLimit), 0);
}

/// A change concerns what comes from then on. What is under way arrives when it would have, also when the wire is taken out: then at once.
#[test]
fn a_change_loses_nothing_that_is_under_way() {
    let slow = Impairments { delay: 20 * MS, ..Impairments::default() };
    let fast = Impairments { delay: 10 * MS, ..Impairments::default() };
    let mut lab = Lab::both(&slow);
    lab.send(A, &numbered(1));
    lab.bed.run_for(5_000);
    lab.set([fast.clone(), fast]);
    lab.send(A, &numbered(2));
    lab.bed.run_for(9_999);
    assert_eq!(lab.bytes(B).len(), 0);
    // The second is due at 15 ms, before the first.
    lab.bed.run_for(1);
    assert_eq!(lab.bytes(B), [numbered(2)]);
    lab.bed.run_for(4_999);
    assert_eq!(lab.bytes(B).len(), 0);
    lab.bed.run_for(1);
    assert_eq!(lab.bytes(B), [numbered(1)]);
    // Without impairments what comes later waits for nothing, and not behind what is under way.
    lab.send(A, &numbered(3));
    lab.bed.run();
    lab.set(Default::default());
    lab.send(A, &numbered(4));
    lab.bed.run();
    assert_eq!(lab.bytes(B), [numbered(4)]);
    for id in [A, B] {
        lab.bed.set_rules(id, &Rules::default());
    }
    lab.bed.run();
    assert_eq!(lab.bytes(B), [numbered(3)], "the wire was taken out");
    // And now they are ports as all others.
    lab.send(A, &frame([0xff; 6], [2, 0, 0, 0, 0, 0], &[0x88, 0xb5], 5));
    lab.bed.run();
    assert_eq!((lab.bytes(B).len(), lab.bytes(OTHER).len()), (1, 1));
}

#[test]
fn without_its_other_end_nothing_passes_and_what_was_under_way_is_counted() {
    let mut lab = Lab::both(&Impairments { delay: 10 * MS, ..Impairments::default() });
    lab.send(A, &numbered(1));
    lab.bed.run();
    lab.bed.set_link(B, false);
    lab.bed.run_for(10_000);
    assert_eq!((lab.drops(B, DropReason::LinkDown), lab.bytes(B).len()), (1, 0), "the cable is pulled");
    lab.bed.set_link(B, true);
    lab.bed.remove(B);
    lab.send(A, &numbered(2));
    lab.bed.run();
    assert_eq!(lab.drops(A, DropReason::WireDown), 1);
    assert_eq!((lab.bytes(OTHER).len(), lab.bytes(A).len()), (0, 0));
    // It comes back.
    let wire = config([Impairments::default(), Impairments::default()]);
    lab.ports[1] = lab.bed.add_as(B, &HeapPort { rules: end(B, &wire), ..HeapPort::default() });
    lab.send(A, &numbered(3));
    lab.bed.run();
    assert_eq!(lab.bytes(B), [numbered(3)]);
}

/// Two ports whose queues are with different workers, and queues that move while frames are under way.
#[test]
fn queues_may_be_with_any_worker_and_go_to_another() {
    let impairments = Impairments { delay: 5 * MS, ..Impairments::default() };
    let mut lab = Lab::new([impairments.clone(), impairments], 2, HeapPort::default());
    assert_ne!(lab.bed.owner(A, 0), lab.bed.owner(B, 0));
    let mut expected = Vec::new();
    for number in 0..200 {
        lab.send(A, &numbered(number));
        expected.push(numbered(number));
        lab.bed.run_for(100);
        if number == 100 {
            for (port, worker) in [(B, 0), (A, 1)] {
                lab.bed.migrate(port, 0, worker, &mut |_, _| {}).unwrap();
            }
        }
    }
    lab.bed.run_for(5_000);
    assert_eq!(lab.bytes(B), expected);
    let drops: u64 =
        [A, B].iter().map(|port| lab.bed.totals(*port).drops_by_name().values().sum::<u64>()).sum();
    assert_eq!(drops, 0);
}

/// Another process goes on with the frames that are under way, with chance, and with the line.
#[test]
fn another_process_goes_on_with_a_wire() {
    let impairments =
        Impairments { delay: 10 * MS, loss: Loss::Random(percent(20)), ..Impairments::default() };
    let whole = || {
        let mut lab = Lab::both(&impairments);
        (0..100).for_each(|number| lab.send(A, &numbered(number)));
        lab.bed.run_for(10_000);
        lab.bytes(B)
    };
    let mut one = Lab::both(&impairments);
    (0..50).for_each(|number| one.send(A, &numbered(number)));
    one.bed.run_for(4_000);
    one.bed.pause(0);
    let held = one.bed.held(0);
    assert!(held.wires.frames.len() > 20);
    let mut other = Lab::both(&impairments);
    other.bed.advance(4_000);
    other.bed.carry(0, Carried { wires: held.wires, ..Carried::default() });
    (50..100).for_each(|number| other.send(A, &numbered(number)));
    other.bed.run_for(5_999);
    assert_eq!(other.bytes(B).len(), 0);
    other.bed.run_for(4_001);
    assert_eq!(other.bytes(B), whole());
}

/// `ctl trace` tells what a wire does to a frame.
#[test]
fn an_imaginary_frame_goes_by_the_wire() {
    let mut lab = Lab::both(&Impairments { delay: 10 * MS, rate: Some(480_000), ..Impairments::default() });
    let imaginary = || Imaginary { from: A, queue: 0, header: Header::NONE, bytes: strange().swap_remove(0) };
    let walk = lab.bed.walk(imaginary());
    assert_eq!((walk.entry.dropped, walk.entry.target), (None, Some(Target::Port)));
    let [exit] = &walk.exits[..] else { panic!("{:?}", walk.exits) };
    assert_eq!((exit.port, exit.wait, exit.fates.len()), (B, Some(11_000), 1));
    lab.bed.remove(B);
    assert_eq!(lab.bed.walk(imaginary()).entry.dropped, Some(DropReason::WireDown));
}

/// A port that takes too little is not answered for: what does not fit is lost, as on a wire.
#[test]
fn what_does_not_fit_is_dropped_without_an_answer() {
    let mut lab = Lab::new(Default::default(), 1, HeapPort { mtu: 600, ..HeapPort::default() });
    lab.ports[1].take_at_most(600);
    let packet = Packet::plain(false, true, vec![7; 1000]);
    lab.send(A, &packet.complete().1);
    lab.bed.run();
    assert_eq!((lab.drops(B, DropReason::TxTooBig), lab.bytes(A).len()), (1, 0));
}

/// Buckets of lateness are in order, and the promised bound is one of them.
#[test]
fn lateness_is_counted_around_what_is_promised() {
    assert!(BUCKETS.is_sorted() && BUCKETS.contains(&50_000));
}
