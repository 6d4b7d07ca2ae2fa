//! Captures: what is captured, with what is known of it, and what capturing may cost.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use ringferry_control::DropReason;
use ringferry_control::capture::Direction;
use ringferry_control::capture::ring::{
    Counts, Layout, MIN_RING, Record, RingReader, RingWriter, SharedRings,
};
use ringferry_packet::ether::Mac;
use ringferry_packet::filter::{Filter, Instruction};
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header, Offloads};

use crate::config::SwitchConfig;
use crate::fdb::PortId;
use crate::plane::capture::{CaptureId, Wanted};
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use crate::rules::{Limits, Rate, Rules, Vlans};

/// A bed whose ports are captured.
struct Captured {
    bed: Bed,
    ports: Vec<(PortId, Arc<Wire>)>,
    reader: RingReader,
    writers: Vec<Arc<RingWriter>>,
    _rings: SharedRings,
}

const ALL: Wanted = Wanted { direction: None, passing: true, dropped: false, snaplen: 1 << 18, filter: None };
const DROPS: Wanted = Wanted { passing: false, dropped: true, ..ALL };
const ID: CaptureId = CaptureId(7);

impl Captured {
    /// So many workers and these ports, each the interface of its number.
    fn new(workers: usize, ring_bytes: usize, wanted: &Wanted, ports: &[HeapPort]) -> Captured {
        let mut bed = Bed::new(&SwitchConfig::default(), workers);
        let ports: Vec<_> = ports.iter().map(|port| bed.add(port)).collect();
        let layout = Layout { rings: workers, ring_bytes, interfaces: ports.len() };
        let rings = SharedRings::new(layout).unwrap();
        let [index, contents] = rings.fds().map(|fd| fd.try_clone_to_owned().unwrap());
        let reader = RingReader::new(layout, index, contents).unwrap();
        let writers: Vec<_> = (0..workers).map(|ring| Arc::new(rings.writer(ring).unwrap())).collect();
        for (interface, (id, _)) in (0u16..).zip(&ports) {
            bed.capture(*id, ID, interface, wanted, &writers);
        }
        Captured { bed, ports, reader, writers, _rings: rings }
    }

    fn send(&mut self, port: usize, queue: u16, header: Header, bytes: Vec<u8>) {
        self.ports[port].1.send(queue, HeapFrame::new(header, bytes));
    }

    /// Lets all happen, and returns what was captured: by workers, each in order.
    fn records(&mut self) -> Vec<(Record, Vec<u8>)> {
        self.bed.run();
        let mut all = Vec::new();
        for ring in 0..self.reader.rings() {
            let take = &mut |record, frame: &[u8]| all.push((record, frame.to_vec()));
            self.reader.read(ring, &mut Vec::new(), take).unwrap();
        }
        all
    }
}

fn mac(port: usize) -> Mac {
    Mac([2, 0, 0, 0, 0, port as u8])
}

fn frame(to: Mac, from: Mac, len: usize) -> Vec<u8> {
    let mut frame = [&to.0[..], &from.0, &[0x88, 0xb5]].concat();
    frame.extend((frame.len()..len).map(|at| at as u8));
    frame
}

fn guest() -> HeapPort {
    HeapPort::default()
}

/// Lets every port know where the others are, and forgets what was captured of that.
fn acquaint(captured: &mut Captured) {
    for port in 0..captured.ports.len() {
        captured.send(port, 0, Header::NONE, frame(Mac::BROADCAST, mac(port), 60));
        captured.records();
    }
}

#[test]
fn a_frame_is_seen_where_it_comes_in_and_where_it_goes_out() {
    let mut captured = Captured::new(1, MIN_RING, &ALL, &[guest(), guest(), guest()]);
    acquaint(&mut captured);
    let sent = frame(mac(1), mac(0), 1000);
    captured.send(0, 0, Header::NONE, sent.clone());
    let records = captured.records();
    let [(from, one), (to, other)] = &records[..] else { panic!("{records:?}") };
    assert_eq!((from.interface, from.direction, from.queue, from.dropped), (0, Direction::In, Some(0), None));
    assert_eq!((to.interface, to.direction, to.queue, to.dropped), (1, Direction::Out, Some(0), None));
    assert_eq!((one, other, from.original), (&sent, &sent, 1000));
    // A flood goes out of each of the others.
    captured.send(1, 0, Header::NONE, frame(Mac::BROADCAST, mac(1), 60));
    let seen: Vec<_> = captured.records().iter().map(|(it, _)| (it.interface, it.direction)).collect();
    assert_eq!(seen, [(1, Direction::In), (0, Direction::Out), (2, Direction::Out)]);
}

#[test]
fn what_comes_in_is_as_it_was_sent_and_what_goes_out_as_it_is_delivered() {
    let plain = HeapPort { offloads: Offloads::empty(), ..guest() };
    let mut captured = Captured::new(1, 1 << 20, &ALL, &[guest(), plain]);
    acquaint(&mut captured);
    let packet = Packet { macs: [mac(1).0, mac(0).0], ..Packet::plain(false, true, vec![9; 4000]) };
    let (header, sent) = packet.sent(1000);
    captured.send(0, 0, header, sent.clone());
    let records = captured.records();
    let (first, segments) = records.split_first().unwrap();
    assert_eq!((first.0.header.gso_type, first.0.header.gso_size), (GSO_TCPV4, 1000));
    assert_eq!(first.0.header.flags, F_NEEDS_CSUM);
    assert_eq!(first.1, sent);
    let delivered: Vec<_> = captured.ports[1].1.received(0).into_iter().map(|frame| frame.bytes).collect();
    assert_eq!(segments.len(), 4);
    let seen: Vec<_> = segments.iter().map(|(_, bytes)| bytes.clone()).collect();
    assert_eq!(seen, delivered[delivered.len() - 4..]);
    assert!(segments.iter().all(|(it, _)| it.header == Header::NONE && it.direction == Direction::Out));
}

#[test]
fn a_filter_a_direction_and_a_length_are_obeyed() {
    // Frames of 200 bytes and more.
    let program = [(0x80, 0, 0, 0), (0x35, 0, 1, 200), (0x06, 0, 0, 1), (0x06, 0, 0, 0)];
    let program = program.map(|(code, jt, jf, k)| Instruction { code, jt, jf, k });
    let wanted = Wanted {
        direction: Some(Direction::Out),
        snaplen: 100,
        filter: Some(Arc::new(Filter::new(&program).unwrap())),
        ..ALL
    };
    let mut captured = Captured::new(1, MIN_RING, &wanted, &[guest(), guest()]);
    acquaint(&mut captured);
    for len in [60, 199, 200, 1000] {
        captured.send(0, 0, Header::NONE, frame(mac(1), mac(0), len));
    }
    let records = captured.records();
    let seen: Vec<_> = records.iter().map(|(it, frame)| (it.interface, it.original, frame.len())).collect();
    assert_eq!(seen, [(1, 200, 100), (1, 1000, 100)]);
    // Five of them with the one that made it known.
    assert_eq!(captured.reader.counts(1), Counts { seen: 5, accepted: 2, lost: 0 });
}

#[test]
fn a_frame_that_another_worker_delivers_is_captured_once_where_it_is() {
    let ports = [guest(), HeapPort { first: 1, ..guest() }];
    let mut captured = Captured::new(2, MIN_RING, &ALL, &ports);
    acquaint(&mut captured);
    for _ in 0..10 {
        captured.send(0, 0, Header::NONE, frame(mac(1), mac(0), 300));
    }
    let records = captured.records();
    let count = |interface, direction| {
        records.iter().filter(|(it, _)| (it.interface, it.direction) == (interface, direction)).count()
    };
    assert_eq!((count(0, Direction::In), count(1, Direction::Out), records.len()), (10, 10, 20));
}

#[test]
fn a_capture_ends_and_costs_nothing_any_more() {
    let mut captured = Captured::new(1, MIN_RING, &ALL, &[guest(), guest()]);
    let other = Wanted { direction: Some(Direction::In), ..ALL };
    let (id, writers) = (captured.ports[0].0, captured.writers.clone());
    captured.bed.capture(id, CaptureId(8), 0, &other, &writers);
    captured.send(0, 0, Header::NONE, frame(Mac::BROADCAST, mac(0), 60));
    assert_eq!(captured.records().len(), 3, "twice in, and once out");
    captured.bed.end_capture(ID);
    captured.send(0, 0, Header::NONE, frame(Mac::BROADCAST, mac(0), 60));
    assert_eq!(captured.records().len(), 1);
    captured.bed.end_capture(CaptureId(8));
    captured.send(0, 0, Header::NONE, frame(Mac::BROADCAST, mac(0), 60));
    assert_eq!(captured.records(), []);
    assert_eq!(captured.ports[1].1.received(0).len(), 3);
}

#[test]
fn a_reader_that_stops_costs_frames_of_the_capture_and_none_of_the_ports() {
    let mut captured = Captured::new(1, MIN_RING, &ALL, &[guest(), guest()]);
    acquaint(&mut captured);
    for _ in 0..1000 {
        captured.send(0, 0, Header::NONE, frame(mac(1), mac(0), 1000));
    }
    captured.bed.run_for(10_000);
    assert_eq!(captured.ports[1].1.received(0).len(), 1001);
    let [from, to] = [0, 1].map(|interface| captured.reader.counts(interface));
    assert_eq!((from.seen, to.seen), (1002, 1002));
    assert_eq!((from.accepted + from.lost, to.accepted + to.lost), (1002, 1002));
    assert_eq!(from.accepted + to.accepted - 4, (MIN_RING / 1040) as u64);
    assert_eq!(captured.records().len(), MIN_RING / 1040);
    assert_eq!(captured.bed.totals(captured.ports[1].0).drops_by_name().values().sum::<u64>(), 0);
}

/// Time stands still, so what may be captured is what may be captured at once; each frame is delivered all the same.
#[test]
fn what_captures_may_cost_is_bounded_and_the_rest_is_lost_for_them() {
    let mut captured = Captured::new(1, 1 << 26, &ALL, &[guest(), guest()]);
    acquaint(&mut captured);
    let send = |captured: &mut Captured| {
        for _ in 0..1000 {
            captured.send(0, 0, Header::NONE, frame(mac(1), mac(0), 60_000));
        }
        captured.records().len()
    };
    let at_once = send(&mut captured);
    assert!((500..1000).contains(&at_once), "{at_once}");
    assert!(send(&mut captured) <= 64, "no more than what a burst may borrow");
    assert_eq!(captured.ports[1].1.received(0).len(), 2001);
    let counts = captured.reader.counts(0);
    assert_eq!(counts.seen, counts.accepted + counts.lost);
    captured.bed.advance(1_000_000);
    let later = send(&mut captured);
    assert!((500..1000).contains(&later), "{later}");
}

/// What is captured of a victim has no holes where its attacker wants them.
#[test]
fn a_flood_leaves_no_holes_in_what_is_captured_of_others() {
    let mut captured = Captured::new(1, 1 << 26, &ALL, &[guest(), guest(), guest(), guest()]);
    acquaint(&mut captured);
    let before = captured.reader.counts(2);
    for _ in 0..500 {
        for _ in 0..64 {
            captured.send(0, 0, Header::NONE, frame(mac(1), mac(0), 60_000));
        }
        captured.send(2, 0, Header::NONE, frame(mac(3), mac(2), 1000));
        captured.records();
        captured.bed.advance(1000);
    }
    let (flood, quiet) = (captured.reader.counts(0), captured.reader.counts(2));
    assert!(flood.lost > 500 * 32, "{flood:?}");
    assert_eq!((quiet.accepted - before.accepted, quiet.lost), (500, 0));
    assert_eq!(captured.reader.counts(3).lost, 0);
}

/// The captured port pays for it, and not whoever shares its worker.
#[test]
fn capturing_is_charged_to_the_port() {
    let work = |wanted: &Wanted| {
        let mut captured = Captured::new(1, 1 << 20, wanted, &[guest(), guest()]);
        for _ in 0..100 {
            captured.send(0, 0, Header::NONE, frame(mac(1), mac(0), 1500));
        }
        captured.bed.run();
        captured.bed.totals(captured.ports[0].0).by_name()["work_nanoseconds"]
    };
    let [none, out, all] =
        [DROPS, Wanted { direction: Some(Direction::Out), ..ALL }, ALL].map(|wanted| work(&wanted));
    assert!(none + 100 * 1500 / 8 <= out && out + 100 * 1500 / 8 <= all, "{none} {out} {all}");
}

#[derive(Clone, Debug)]
enum Step {
    Send { from: usize, to: usize, vid: Option<u16>, len: usize, foreign: bool },
    Room(usize, usize),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let send = (
        0..4usize,
        0..6usize,
        prop_oneof![Just(None), Just(Some(5)), Just(Some(6))],
        60..3000usize,
        any::<bool>(),
    );
    prop_oneof![
        8 => send.prop_map(|(from, to, vid, len, foreign)| Step::Send { from, to, vid, len, foreign }),
        1 => (0..4usize, 0..5usize).prop_map(|(port, room)| Step::Room(port, room)),
        1 => (0..100_000u64).prop_map(Step::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the rules, each frame that is counted as dropped is captured once, at the port and with the reason that it is counted by.
    #[test]
    fn every_drop_that_is_counted_is_captured_with_its_reason(steps in prop::collection::vec(step(), 1..200)) {
        let limit = |per_second, burst| Some(Rate { per_second, burst });
        let rules = [
            Rules { isolated: true, vlans: Vlans::Access(5), ..Rules::default() },
            Rules { isolated: true, vlans: Vlans::Access(5), max_macs: Some(1), ..Rules::default() },
            Rules { storm: limit(100, 3), ..Rules::default() },
            Rules { rate_out: Limits { bytes: limit(100_000, 3000), ..Limits::default() }, ..Rules::default() },
        ];
        let ports: Vec<_> = rules
            .into_iter()
            .enumerate()
            .map(|(port, rules)| HeapPort { rules, mtu: 1500, first: port % 2, ..guest() })
            .collect();
        let mut captured = Captured::new(2, 1 << 20, &DROPS, &ports);
        let mut seen = BTreeMap::new();
        let mut note = |captured: &mut Captured| {
            for (record, _) in captured.records() {
                *seen.entry((record.interface, record.dropped.map_or("none", DropReason::name))).or_insert(0u64) += 1;
            }
        };
        for step in steps {
            match step {
                Step::Send { from, to, vid, len, foreign } => {
                    let to = if to == 5 { Mac([1, 0x80, 0xc2, 0, 0, 0]) } else if to == 4 { Mac::BROADCAST } else { mac(to) };
                    let from_mac = if foreign { mac(from + 10) } else { mac(from) };
                    let mut bytes = frame(to, from_mac, len);
                    if let Some(vid) = vid {
                        bytes.splice(12..12, [0x81, 0, 0, vid as u8]);
                    }
                    captured.send(from, 0, Header::NONE, bytes);
                }
                Step::Room(port, room) => captured.ports[port].1.set_room(0, room),
                Step::Wait(micros) => {
                    captured.bed.run_for(micros);
                    note(&mut captured);
                }
            }
        }
        captured.bed.run_for(10_000_000);
        note(&mut captured);
        for (interface, (id, _)) in (0u16..).zip(&captured.ports) {
            for (reason, count) in captured.bed.totals(*id).drops_by_name() {
                let found = seen.get(&(interface, &*reason)).copied().unwrap_or(0);
                prop_assert_eq!(found, count, "{} at {}", reason, interface);
            }
        }
    }
}
