//! What is said of an imaginary frame, against what becomes of a real one.
//!
//! Both go through the same switch: random rules, links, offloads, buffers, captures and workers. First the frame is imagined, twice, then it is sent; and what was
//! said is compared with what ports have received, bytes and virtual headers, and with the drops that were counted, by port and reason.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use ringferry_control::capture::Direction;
use ringferry_packet::ether::Mac as EtherMac;
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::{Header, Offloads};

use super::forwarder::{frame, rules};
use crate::config::SwitchConfig;
use crate::counters::DropReason;
use crate::fdb::{FdbItem, PortId};
use crate::plane::capture::{CaptureId, MirrorCounts};
use crate::plane::forward::walk::{Imaginary, Target, Walk};
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use crate::rules::{Limits, Rate, Rules};

/// A port, and what is wrong with it.
#[derive(Clone, Debug)]
struct Kind {
    rules: Rules,
    pairs: Option<u16>,
    offloads: Offloads,
    offloads_tagged: bool,
    mtu: u16,
    first: usize,
    room: usize,
    largest: u64,
    stopped: bool,
    link_down: bool,
    mirrored: Option<Direction>,
}

fn kind() -> impl Strategy<Value = Kind> {
    let rate = |burst: u64| Rate { per_second: 1000, burst };
    let limits = (
        option::weighted(0.2, 0..4u64),
        option::weighted(0.2, 1..3000u64),
        option::weighted(0.2, 1..3000u64),
    );
    let shape = (option::weighted(0.7, 1..4u16), 0..32u8, any::<bool>(), 576..1600u16, 0..3usize);
    let faults = (
        prop_oneof![4 => Just(usize::MAX), 1 => 0..4usize],
        prop_oneof![4 => Just(u64::MAX), 1 => 60..1500u64],
        [prop::bool::weighted(0.08), prop::bool::weighted(0.08)],
        prop_oneof![3 => Just(None), 1 => Just(Some(Direction::In)), 1 => Just(Some(Direction::Out))],
    );
    (rules(), limits, shape, faults).prop_map(move |(rules, limits, shape, faults)| {
        let (storm, bytes_in, bytes_out) = limits;
        let bytes = |most: Option<u64>| Limits { packets: None, bytes: most.map(rate) };
        // A bucket that is empty for as long as the test takes.
        let storm = storm.map(|burst| Rate { per_second: 1, burst: burst.max(1) });
        let rules = Rules { storm, rate_in: bytes(bytes_in), rate_out: bytes(bytes_out), ..rules };
        let (pairs, offloads, offloads_tagged, mtu, first) = shape;
        let offloads = Offloads::from_bits_truncate(offloads);
        let (room, largest, [stopped, link_down], mirrored) = faults;
        Kind {
            rules,
            pairs,
            offloads,
            offloads_tagged,
            mtu,
            first,
            room,
            largest,
            stopped,
            link_down,
            mirrored,
        }
    })
}

/// A frame that asks for what somebody may lack, between the addresses of a small one and with its first tag.
fn any_frame() -> impl Strategy<Value = (Header, Vec<u8>)> {
    let large = (Packet::any(4000), prop_oneof![Just(0u16), 200..1500u16]);
    (frame(), option::weighted(0.5, large)).prop_map(|(small, large)| {
        let Some((mut packet, size)) = large else { return (Header::default(), small.bytes()) };
        packet.macs = [small.destination, small.source];
        packet.tags = small.tags.len().min(1);
        let (header, mut bytes) = packet.sent(size);
        if let (1, [tci, ..]) = (packet.tags, &small.tags[..]) {
            bytes[14..16].copy_from_slice(&tci.to_be_bytes());
        }
        (header, bytes)
    })
}

struct Lab {
    bed: Bed,
    wires: Vec<Arc<Wire>>,
    kinds: Vec<Kind>,
    copies: Arc<MirrorCounts>,
}

impl Lab {
    fn new(kinds: Vec<Kind>, workers: usize) -> Lab {
        let config =
            SwitchConfig { mac_age_seconds: 10_000, mac_table_size: 1024, ..SwitchConfig::default() };
        let mut bed = Bed::new(&config, workers);
        let mut seen = BTreeSet::new();
        let probe = format!("heap{}", kinds.len());
        let wires = kinds.iter().map(|kind| {
            let Kind { rules, pairs, offloads, mtu, first, .. } = kind.clone();
            let mut rules = rules;
            rules.static_macs.retain(|(mac, vid)| seen.insert((mac.0, *vid)));
            rules.quarantine.take_if(|name| *name == probe);
            let (_, wire) = bed.add(&HeapPort { pairs, offloads, mtu, rules, first: first % workers });
            if !kind.offloads_tagged {
                wire.refuse_tagged_offloads();
            }
            wire
        });
        let wires: Vec<_> = wires.collect();
        // The port that gets copies is one more, and gets nothing else.
        let alone = Rules { vlans: crate::rules::Vlans::Access(77), ..Rules::default() };
        let (probe, _) = bed.add(&HeapPort { rules: alone, ..HeapPort::default() });
        let copies = Arc::default();
        for (id, kind) in (0..).map(PortId).zip(&kinds) {
            if let Some(direction) = kind.mirrored {
                bed.mirror(id, CaptureId(id.0.into()), Some(direction), probe, None, &copies);
            }
        }
        Lab { bed, wires, kinds, copies }
    }

    /// Makes each port as faulty as it is meant to be.
    fn break_some(&mut self) {
        for (at, kind) in self.kinds.iter().enumerate() {
            let (id, wire) = (PortId(at as u16), &self.wires[at]);
            self.bed.set_link(id, !kind.link_down);
            wire.take_at_most(kind.largest);
            (0..wire.queues()).for_each(|queue| wire.set_room(queue, kind.room));
            if let (true, Some(pairs)) = (kind.stopped, kind.pairs) {
                (0..pairs).for_each(|queue| self.bed.stop(id, queue));
            }
        }
        // Nothing is left of what stopping them has done.
        self.bed.run_out();
    }

    fn drops(&self) -> BTreeMap<(usize, DropReason), u64> {
        let of_port = |at: usize| {
            let drops = self.bed.totals(PortId(at as u16)).drops_by_name();
            DropReason::ALL.map(|reason| ((at, reason), drops.get(reason.name()).copied().unwrap_or(0)))
        };
        (0..self.kinds.len()).flat_map(of_port).collect()
    }

    /// All that an imaginary frame must leave as it is.
    fn state(&mut self) -> (Vec<BTreeMap<String, u64>>, Vec<Vec<FdbItem>>, u64) {
        let counters = (0..self.kinds.len()).map(|at| self.bed.totals(PortId(at as u16)).by_name()).collect();
        let workers = self.bed.worker_counters().count();
        let fdb = (0..workers)
            .map(|worker| self.bed.addresses(worker).into_iter().flat_map(|page| page.items).collect());
        let fdb = fdb.collect();
        (counters, fdb, self.copies.copied.load(std::sync::atomic::Ordering::Relaxed))
    }

    fn received(&self, at: usize) -> Vec<(Header, Vec<u8>)> {
        let wire = &self.wires[at];
        let frames = (0..wire.queues()).flat_map(|queue| wire.received(queue));
        frames.map(|frame| (frame.header, frame.bytes)).collect()
    }

    /// Sends a frame from a port, after it was imagined; says what was found if that is not what happens.
    fn check(&mut self, from: usize, header: Header, bytes: Vec<u8>) -> Result<Walk, String> {
        let queue = 0;
        self.bed.run_out();
        let before = self.state();
        let imaginary = Imaginary { from: PortId(from as u16), queue, header, bytes: bytes.clone() };
        let walk = self.bed.walk(imaginary.clone());
        let again = self.bed.walk(imaginary);
        if format!("{walk:?}") != format!("{again:?}") {
            return Err(format!("the first walk has changed something: {walk:?} {again:?}"));
        }
        if self.state() != before {
            return Err(format!("something is left of {walk:?}"));
        }
        for at in 0..self.kinds.len() {
            self.received(at);
        }
        let drops = self.drops();
        self.wires[from].send(queue, HeapFrame::new(header, bytes));
        self.bed.run_out();
        let mut dropped = self.drops();
        dropped.iter_mut().for_each(|(key, number)| *number -= drops[key]);
        dropped.retain(|_, number| *number > 0);
        let (mut expected, mut answered) = (BTreeMap::<_, u64>::new(), false);
        let mut drop = |at: usize, reason| *expected.entry((at, reason)).or_default() += 1;
        if let Some(reason) = walk.entry.dropped {
            drop(from, reason);
        }
        for exit in &walk.exits {
            let at = usize::from(exit.port.0);
            if let Err(reason) = exit.way
                && walk.entry.target == Some(Target::Port)
            {
                drop(at, reason);
            }
            exit.lost.iter().for_each(|reason| drop(at, *reason));
            exit.fates.iter().filter_map(|fate| fate.err()).for_each(|reason| drop(at, reason));
            answered |= exit.fates.contains(&Err(DropReason::TooBigAnswered));
        }
        if answered {
            // What becomes of the answers is their own matter.
            let is_own = |(at, _): &(usize, DropReason), _: &mut u64| *at != from;
            expected.retain(is_own);
            dropped.retain(is_own);
        }
        if dropped != expected {
            return Err(format!("dropped {dropped:?}, said {expected:?}: {walk:?}"));
        }
        for at in (0..self.kinds.len()).filter(|at| !answered || *at != from) {
            let exit = walk.exits.iter().find(|exit| usize::from(exit.port.0) == at);
            let arrives = exit.into_iter().flat_map(|exit| exit.packets.iter().zip(&exit.fates));
            let said: Vec<_> =
                arrives.filter(|(_, fate)| fate.is_ok()).map(|(packet, _)| packet.clone()).collect();
            let received = self.received(at);
            if received != said {
                return Err(format!("port {at} has {received:?}, said {said:?}: {walk:?}"));
            }
        }
        Ok(walk)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn an_imaginary_frame_goes_where_a_real_one_goes(
        kinds in vec(kind(), 2..6),
        workers in 1..4usize,
        known in vec((0..6usize, frame()), 0..12),
        frames in vec((0..6usize, any_frame()), 1..8),
    ) {
        let ports = kinds.len();
        let mut lab = Lab::new(kinds, workers);
        for (port, frame) in known {
            lab.wires[port % ports].send(0, HeapFrame::new(Header::default(), frame.bytes()));
            lab.bed.run();
        }
        lab.break_some();
        for (port, (header, bytes)) in frames {
            let from = port % ports;
            // Nothing comes from a queue that was stopped.
            if !(lab.kinds[from].stopped && lab.kinds[from].pairs.is_some()) {
                prop_assert_eq!(lab.check(from, header, bytes).map(drop), Ok(()));
            }
        }
    }
}

/// What must have been reached for the property to say anything: each reason that rules and receivers have, and each kind of way.
#[test]
fn the_property_meets_all_that_can_become_of_a_frame() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let mut met: BTreeSet<String> = BTreeSet::new();
    for _ in 0..400 {
        let scene = (vec(kind(), 2..6), 1..4usize, vec((0..6usize, any_frame()), 8));
        let (kinds, workers, frames) = scene.new_tree(&mut runner).unwrap().current();
        let ports = kinds.len();
        let mut lab = Lab::new(kinds, workers);
        for (port, (header, bytes)) in &frames[..4] {
            lab.wires[port % ports].send(0, HeapFrame::new(*header, bytes.clone()));
            lab.bed.run();
        }
        lab.break_some();
        for (port, (header, bytes)) in &frames[4..] {
            let from = port % ports;
            if lab.kinds[from].stopped && lab.kinds[from].pairs.is_some() {
                continue;
            }
            let walk = lab.check(from, *header, bytes.clone()).unwrap();
            met.extend(walk.entry.dropped.map(|reason| reason.name().to_owned()));
            met.extend(walk.entry.target.map(|target| format!("{target:?}")));
            for exit in walk.exits {
                met.extend(exit.fates.iter().filter_map(|fate| Some(fate.err()?.name().to_owned())));
                met.extend(exit.lost.iter().map(|reason| reason.name().to_owned()));
                met.extend(exit.way.err().map(|reason| format!("out {}", reason.name())));
                met.extend(exit.software.map(|software| format!("{software:?}")));
                met.extend(exit.wait.map(|_| "waits".to_owned()));
                met.extend((!exit.seen.is_empty()).then(|| "seen".to_owned()));
                met.extend(exit.owner.map(|owner| format!("{owner:?}")));
                met.extend(
                    exit.way.ok().map(|retag| format!("{retag:?}").split('(').next().unwrap().to_owned()),
                );
            }
        }
    }
    let all = [
        "vlan",
        "spoofed",
        "reserved",
        "mac-limit",
        "storm",
        "same-port",
        "quarantine",
        "no-destination",
        "link-down",
        "Port",
        "Group",
        "Unknown",
        "out vlan",
        "out isolated",
        "out quarantine",
        "no-receive-buffers",
        "tx-too-big",
        "Checksum",
        "Segments(2)",
        "waits",
        "seen",
        "This",
        "Other(1)",
        "Keep",
        "Strip",
        "Insert",
        "Replace",
    ];
    let missing: Vec<_> = all.into_iter().filter(|name| !met.contains(*name)).collect();
    assert!(missing.is_empty(), "{missing:?} of {met:?}");
}

/// A packet that does not fit is answered, and that is said.
#[test]
fn an_answer_to_a_packet_that_does_not_fit_is_foreseen() {
    let mut bed = Bed::new(&SwitchConfig::default(), 1);
    let (from, sender) = bed.add(&HeapPort::default());
    let (_, receiver) = bed.add(&HeapPort { mtu: 600, ..HeapPort::default() });
    let mut packet = Packet::plain(false, true, vec![1; 900]);
    packet.addresses[..8].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    let (header, bytes) = packet.sent(0);
    let hello = |to: [u8; 6], from: [u8; 6]| {
        HeapFrame::new(Header::default(), [&to[..], &from, &[0x88, 0xb5], &[0; 46]].concat())
    };
    receiver.send(0, hello([0xff; 6], packet.macs[0]));
    bed.run();
    receiver.take_at_most(614);
    let walk = bed.walk(Imaginary { from, queue: 0, header, bytes: bytes.clone() });
    assert_eq!(walk.exits[0].fates, [Err(DropReason::TooBigAnswered)]);
    sender.received(0);
    sender.send(0, HeapFrame::new(header, bytes));
    bed.run();
    assert_eq!(sender.received(0).len(), 1, "the answer");
    assert_eq!(EtherMac(packet.macs[0]).to_string(), "02:00:00:00:00:01");
}

/// A frame that waits in its ring for `rate_in` meets storm control's bucket as it is after the wait, and not as it is now.
#[test]
fn a_frame_that_waits_is_imagined_as_it_will_be_looked_at() {
    let mut bed = Bed::new(&SwitchConfig::default(), 1);
    let bytes = Some(Rate { per_second: 1000, burst: 1 });
    let rules = Rules {
        storm: Some(Rate { per_second: 1, burst: 1 }),
        rate_in: Limits { packets: None, bytes },
        ..Rules::default()
    };
    let (from, sender) = bed.add(&HeapPort { rules, ..HeapPort::default() });
    let (_, receiver) = bed.add(&HeapPort::default());
    let hello = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1], &[0x88, 0xb5], &[0; 2000]].concat();
    sender.send(0, HeapFrame::new(Header::default(), hello.clone()));
    bed.run();
    assert_eq!(receiver.received(0).len(), 1, "the one of the burst");
    let walk = bed.walk(Imaginary { from, queue: 0, header: Header::default(), bytes: hello.clone() });
    assert!(walk.entry.wait.is_some_and(|wait| wait > 1_000_000), "{walk:?}");
    assert_eq!(walk.entry.dropped, None);
    sender.send(0, HeapFrame::new(Header::default(), hello));
    bed.run_out();
    assert_eq!(receiver.received(0).len(), 1, "the one that has waited");
}
