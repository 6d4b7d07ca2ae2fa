//! The engine's forwarding decisions, frame by frame, against the [reference switch](super::reference).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::collection::{btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use ringferry_packet::ether::Mac as EtherMac;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header, Offloads};

use super::reference::{Frame, Mac, Reference};
use crate::config::SwitchConfig;
use crate::counters::{DropReason, STARVED_GAP};
use crate::fdb::PortId;
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use crate::rules::{Guard, Rules, Vid, Vlans};

/// Few addresses and VLANs, so that frames meet.
const MACS: u8 = 6;
const VIDS: [Vid; 4] = [0, 1, 2, 4094];
const MAX_AGE: u32 = 30;

fn mac(number: u8) -> Mac {
    [2, 0, 0, 0, 0, number]
}

/// One thing that a test does.
#[derive(Clone, Debug)]
enum Step {
    /// A port sends a burst.
    Send { port: usize, frames: Vec<Frame> },
    /// Seconds pass.
    Wait(u32),
    /// A port is unplugged.
    Remove(usize),
}

fn vid() -> impl Strategy<Value = Vid> {
    prop::sample::select(&VIDS[..])
}

fn tagged_vid() -> impl Strategy<Value = Vid> {
    prop::sample::select(&VIDS[1..])
}

fn vlans() -> impl Strategy<Value = Vlans> {
    let some = btree_set(tagged_vid(), 0..3).prop_map(|vids| vids.into_iter().collect::<Vec<_>>());
    let trunk = (option::of(some), option::of(vid()));
    prop_oneof![
        2 => Just(Vlans::default()),
        1 => vid().prop_map(Vlans::Access),
        2 => trunk.prop_map(|(allowed, native)| Vlans::Trunk { allowed, native }),
    ]
}

pub(super) fn rules() -> impl Strategy<Value = Rules> {
    let guard = btree_set(0..MACS, 0..4);
    let statics = vec((0..MACS, vid()), 0..2);
    let limits = (option::weighted(0.3, 0..4u32), statics, option::weighted(0.2, guard));
    let apart = (any::<bool>(), option::weighted(0.15, 0..5u8));
    (vlans(), any::<bool>(), apart, limits).prop_map(
        |(vlans, forward_reserved, (isolated, only), (max_macs, statics, guard))| {
            let macs =
                |numbers: BTreeSet<u8>| numbers.into_iter().map(|number| EtherMac(mac(number))).collect();
            Rules {
                vlans,
                isolated,
                quarantine: only.map(|port| format!("heap{port}")),
                forward_reserved,
                max_macs,
                static_macs: statics.into_iter().map(|(number, vid)| (EtherMac(mac(number)), vid)).collect(),
                guard: guard.map(|numbers| Guard { macs: macs(numbers), ips: None }),
                ..Rules::default()
            }
        },
    )
}

pub(super) fn frame() -> impl Strategy<Value = Frame> {
    let destination = prop_oneof![
        6 => (0..MACS).prop_map(mac),
        1 => Just([0xff; 6]),
        1 => Just([1, 0, 0x5e, 0, 0, 1]),
        1 => prop::sample::select(&[0, 2, 0x0f, 0x10][..]).prop_map(|last| [1, 0x80, 0xc2, 0, 0, last]),
    ];
    let source = prop_oneof![
        20 => (0..MACS).prop_map(mac),
        1 => prop::sample::select(&[[0; 6], [0xff; 6], [3, 0, 0, 0, 0, 1]][..]),
    ];
    // A priority tag in front of another tag is left out: what becomes of it is a matter of its own.
    let inner = option::weighted(0.1, tagged_vid());
    let tags = option::of((prop_oneof![3 => tagged_vid(), 1 => Just(0), 1 => Just(3)], 0..8u16, inner));
    (destination, source, tags, 46..120usize).prop_filter_map(
        "a station does not send to itself",
        |(destination, source, tags, len)| {
            let mut list = Vec::new();
            if let Some((vid, priority, inner)) = tags {
                list.push(priority << 13 | vid);
                list.extend(inner.filter(|_| vid != 0));
            }
            // An EtherType for experiments (IEEE 802, 9.2.3): nothing that offloads would look at.
            let mut payload = vec![0x88, 0xb5];
            payload.resize(len, 0);
            (destination != source).then_some(Frame { destination, source, tags: list, payload })
        },
    )
}

/// A burst as of conversations: many a frame has the addresses of the one before it, with the same tag or another.
fn burst() -> impl Strategy<Value = Vec<Frame>> {
    let follows = prop::sample::select(&[[false, false], [true, false], [true, true]][..]);
    vec((frame(), follows), 1..8).prop_map(|frames| {
        let mut burst: Vec<Frame> = Vec::new();
        for (mut frame, [addresses, tags]) in frames {
            if let Some(last) = burst.last().filter(|_| addresses) {
                (frame.destination, frame.source) = (last.destination, last.source);
                if tags {
                    frame.tags.clone_from(&last.tags);
                }
            }
            burst.push(frame);
        }
        burst
    })
}

fn steps(ports: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (0..ports, burst()).prop_map(|(port, frames)| Step::Send { port, frames }),
        2 => prop_oneof![Just(1), Just(MAX_AGE), 1..2 * MAX_AGE].prop_map(Step::Wait),
        1 => (0..ports).prop_map(Step::Remove),
    ];
    vec(step, 1..40)
}

/// Gives each frame a payload of its own.
fn number(steps: &mut [Step]) {
    let mut next = 0u32;
    for step in steps {
        if let Step::Send { frames, .. } = step {
            for frame in frames {
                frame.payload[4..8].copy_from_slice(&next.to_be_bytes());
                next += 1;
            }
        }
    }
}

/// Rules of several ports, with pairs or without. No two have the same static address, as the configuration sees to.
fn ports() -> impl Strategy<Value = Vec<(Rules, bool)>> {
    vec((rules(), any::<bool>()), 2..6).prop_map(|mut ports| {
        let mut seen = BTreeSet::new();
        for (rules, _) in &mut ports {
            rules.static_macs.retain(|(mac, vid)| seen.insert((mac.0, *vid)));
        }
        ports
    })
}

/// Ports with pairs and without, by their rules.
fn bed(kinds: &[(Rules, bool)], workers: usize) -> (Bed, Vec<Arc<Wire>>) {
    let config = SwitchConfig { mac_age_seconds: MAX_AGE, mac_table_size: 1024, ..SwitchConfig::default() };
    let mut bed = Bed::new(&config, workers);
    let wires = kinds.iter().map(|(rules, pairs)| {
        let port = HeapPort { pairs: pairs.then_some(1), rules: rules.clone(), ..HeapPort::default() };
        bed.add(&port).1
    });
    let wires = wires.collect();
    (bed, wires)
}

/// A guest without buffers: bursts count, once each, and the time between those that follow each other.
#[test]
fn the_time_without_buffers_is_counted() {
    let mut bed = Bed::new(&SwitchConfig::default(), 1);
    let (_, from) = bed.add(&HeapPort::default());
    let (id, to) = bed.add(&HeapPort::default());
    let burst = |bed: &mut Bed, room, micros| {
        to.set_room(0, room);
        for number in 0..4 {
            let payload = vec![0x88, 0xb5, number, 0];
            let frame = Frame { destination: mac(2), source: mac(1), tags: Vec::new(), payload };
            from.send(0, HeapFrame::new(Header::default(), frame.bytes()));
        }
        bed.run();
        bed.advance(micros);
        let counters = bed.totals(id).by_name();
        ["tx_bursts", "tx_starved", "tx_starved_microseconds"].map(|name| counters[name])
    };
    // A port's first turn is one frame.
    assert_eq!(burst(&mut bed, 9, 100), [2, 0, 0]);
    assert_eq!(burst(&mut bed, 2, 100), [3, 1, 0], "some of the burst were delivered");
    assert_eq!(burst(&mut bed, 0, 100), [4, 2, 100]);
    assert_eq!(burst(&mut bed, 0, 5_000_000), [5, 3, 200]);
    assert_eq!(burst(&mut bed, 0, 100), [6, 4, 200 + STARVED_GAP], "a long pause proves little");
    assert_eq!(burst(&mut bed, 9, 100), [7, 4, 200 + STARVED_GAP]);
    assert_eq!(burst(&mut bed, 0, 100), [8, 5, 200 + STARVED_GAP], "it had buffers meanwhile");
    assert_eq!(bed.totals(id).drops_by_name()["no-receive-buffers"], 2 + 4 * 4);
}

/// In Firecracker a guest received nothing any more once its ring and the tap's queue had been full together. Here a sender, be it a tap or a guest, never
/// waits for its receiver: what finds no buffers is dropped, and what comes later is delivered, though the receiver sends no kick.
#[test]
fn cve_2020_16843_a_receiver_that_was_full_goes_on_as_soon_as_it_posts_buffers() {
    for (pairs, workers) in [(None, 1), (Some(1), 1), (None, 2), (Some(1), 2)] {
        let mut bed = Bed::new(&SwitchConfig::default(), workers);
        let (_, from) = bed.add(&HeapPort { pairs, ..HeapPort::default() });
        let (_, to) = bed.add(&HeapPort { first: workers - 1, ..HeapPort::default() });
        let send = |numbers: std::ops::Range<u8>| {
            for number in numbers {
                let payload = vec![0x88, 0xb5, number, 0];
                let frame = Frame { destination: mac(2), source: mac(1), tags: Vec::new(), payload };
                from.send(0, HeapFrame::new(Header::default(), frame.bytes()));
            }
        };
        let numbers = || to.received(0).iter().map(|frame| frame.bytes[14]).collect::<Vec<_>>();
        for _ in 0..3 {
            to.set_room(0, 3);
            send(0..200);
            bed.run();
            assert_eq!((numbers(), from.waiting(0)), (vec![0, 1, 2], 0));
            to.set_room(0, usize::MAX);
            send(200..205);
            bed.run();
            assert_eq!(numbers(), [200, 201, 202, 203, 204], "{pairs:?} {workers}");
        }
    }
}

/// Runs of frames that the receiver takes as they are end and begin at frames that need software.
#[test]
fn frames_that_need_software_keep_their_place_among_those_that_do_not() {
    let mut bed = Bed::new(&SwitchConfig::default(), 1);
    let (_, from) = bed.add(&HeapPort::default());
    let (id, to) = bed.add(&HeapPort { offloads: Offloads::empty(), ..HeapPort::default() });
    let send = |wire: &Wire, header, [destination, source]: [u8; 2], number| {
        let mut payload = vec![0x88, 0xb5, number];
        payload.resize(100, 0);
        let frame = Frame { destination: mac(destination), source: mac(source), tags: Vec::new(), payload };
        wire.send(0, HeapFrame::new(header, frame.bytes()));
    };
    send(&to, Header::default(), [1, 2], 0);
    bed.run();
    let unfinished = Header { flags: F_NEEDS_CSUM, csum_start: 20, csum_offset: 10, ..Header::default() };
    for pattern in [0u32, u32::MAX, 1, 2, 0x8000_0000, 0x0ff0_1248, 0xaaaa_aaaa] {
        for number in 0..32 {
            let header = if pattern >> number & 1 == 1 { unfinished } else { Header::default() };
            send(&from, header, [2, 1], number);
        }
        let before = bed.totals(id).by_name()["tx_software"];
        bed.run();
        let received = to.received(0);
        assert!(received.iter().all(|frame| frame.header == Header::default()));
        assert!(received.iter().map(|frame| frame.bytes[14]).eq(0..32), "{pattern:x}");
        assert_eq!(bed.totals(id).by_name()["tx_software"] - before, u64::from(pattern.count_ones()));
    }
    let counters = bed.totals(id).by_name();
    let finished = counters["tx_software"];
    assert_eq!((counters["tx_segmented"], counters["tx_checksummed_bytes"]), (0, 112 * finished));
    let mut packet = vec![0; 54 + 3000];
    packet[..12].copy_from_slice(&[mac(2), mac(1)].concat());
    packet[12..20].copy_from_slice(&[8, 0, 0x45, 0, 0x0b, 0xe0, 0, 0]);
    (packet[23], packet[46]) = (6, 0x50);
    let header = Header {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1000,
        csum_start: 34,
        csum_offset: 16,
        ..Header::default()
    };
    from.send(0, HeapFrame::new(header, packet));
    bed.run();
    let counters = bed.totals(id).by_name();
    assert_eq!(
        ["tx_software", "tx_segmented", "tx_segmented_bytes", "tx_checksummed_bytes"]
            .map(|name| counters[name]),
        [finished + 1, 1, 3054, 112 * finished]
    );
    assert_eq!(to.received(0).len(), 3);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_frame_goes_where_the_reference_says(
        (kinds, mut steps) in ports().prop_flat_map(|kinds| { let ports = kinds.len(); (Just(kinds), steps(ports)) }),
    ) {
        number(&mut steps);
        let (mut bed, wires) = bed(&kinds, 1);
        let mut reference = Reference::new(kinds.iter().map(|(rules, _)| rules.clone()).collect(), MAX_AGE);
        let mut drops: BTreeMap<(usize, DropReason), u64> = BTreeMap::new();
        let mut now = 0;
        for step in steps {
            match step {
                Step::Wait(seconds) => {
                    now += seconds;
                    bed.advance(u64::from(seconds) * 1_000_000);
                }
                Step::Remove(port) => {
                    if reference.ports[port].is_some() {
                        reference.remove(port);
                        bed.remove(PortId(port as u16));
                    }
                }
                Step::Send { port, frames } => {
                    if reference.ports[port].is_none() {
                        continue;
                    }
                    let mut expected: BTreeMap<usize, Vec<Vec<u8>>> = BTreeMap::new();
                    for frame in &frames {
                        let outcome = reference.forward(port, frame, now);
                        for (to, bytes) in outcome.delivered {
                            expected.entry(to).or_default().push(bytes);
                        }
                        for place in outcome.dropped {
                            *drops.entry(place).or_default() += 1;
                        }
                        // In one piece, and with the cut inside the part that decisions rest on.
                        let cuts = vec![15, 70];
                        wires[port].send(0, HeapFrame { cuts, ..HeapFrame::new(Header::default(), frame.bytes()) });
                    }
                    bed.run();
                    for (to, wire) in wires.iter().enumerate() {
                        let received: Vec<_> = wire.received(0).into_iter().map(|frame| frame.bytes).collect();
                        prop_assert_eq!(received, expected.remove(&to).unwrap_or_default(), "port {}", to);
                    }
                }
            }
            for (port, _) in reference.ports.iter().enumerate().filter(|(_, rules)| rules.is_some()) {
                let counted = bed.totals(PortId(port as u16)).drops_by_name();
                for reason in DropReason::ALL {
                    let expected = drops.get(&(port, reason)).copied().unwrap_or(0);
                    prop_assert_eq!(counted[reason.name()], expected, "port {} {:?}", port, reason);
                }
            }
        }
    }
}
