//! What one tenant must not be able to send to another, port by port: frames that leave their VLAN, frames that only neighbours exchange, and
//! more than a limit allows.

use std::collections::BTreeMap;
use std::sync::Arc;

use ringferry_packet::checksum;
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::{Header, Offloads};

use crate::config::SwitchConfig;
use crate::fdb::PortId;
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use crate::rules::{Rules, Vlans};

/// Ports with these rules, and what was dropped at the first of them.
struct Ports {
    bed: Bed,
    wires: Vec<Arc<Wire>>,
}

impl Ports {
    fn new(rules: impl IntoIterator<Item = Rules>) -> Self {
        let mut bed = Bed::new(&SwitchConfig::default(), 1);
        let wires = rules.into_iter().map(|rules| {
            let port = HeapPort { pairs: Some(1), rules, ..HeapPort::default() };
            bed.add(&port).1
        });
        let wires = wires.collect();
        Self { bed, wires }
    }

    /// What each of the other ports gets of a frame from the first.
    fn send(&mut self, header: Header, frame: Vec<u8>) -> Vec<Vec<Vec<u8>>> {
        self.wires[0].send(0, HeapFrame::new(header, frame));
        self.bed.run();
        let received = |wire: &Arc<Wire>| wire.received(0).into_iter().map(|frame| frame.bytes).collect();
        self.wires[1..].iter().map(received).collect()
    }

    /// The reasons for drops so far, of all ports, without those of which there are none.
    fn drops(&self) -> BTreeMap<String, u64> {
        let all = (0u16..).zip(&self.wires).flat_map(|(id, _)| self.bed.totals(PortId(id)).drops_by_name());
        let mut drops = BTreeMap::new();
        all.filter(|(_, count)| *count > 0)
            .for_each(|(name, count)| *drops.entry(name).or_insert(0) += count);
        drops
    }
}

/// A receiver that looks for IP right behind the addresses, as Linux's front end does for Xen, drops what it does not find there.
#[test]
fn l_tagged_frames_are_finished_for_who_cannot_find_their_checksum() {
    let mut ports = Ports::new([Rules::default(), Rules::default()]);
    ports.wires[1].refuse_tagged_offloads();
    for (tags, v6) in [(0, false), (1, false), (1, true), (2, false)] {
        let packet = Packet { tags, macs: [[0xff; 6], OWN], ..Packet::plain(v6, true, vec![3; 3000]) };
        for gso_size in [0, 1000] {
            let (header, bytes) = packet.sent(gso_size);
            // Several packets of a flow, which otherwise become one frame.
            for _ in 0..2 {
                ports.wires[0].send(0, HeapFrame::new(header, bytes.clone()));
            }
            ports.bed.run();
            let received = ports.wires[1].received(0);
            assert!(!received.is_empty());
            for frame in &received {
                assert_eq!(frame.header == Header::NONE, tags > 0, "{tags} {gso_size}");
                assert!(tags == 0 || checksum::verify(&frame.bytes).is_ok());
            }
        }
    }
    assert_eq!(ports.drops(), BTreeMap::new());
}

/// The receiver was asked when the frame was handed off, and has negotiated anew since.
#[test]
fn l_a_frame_on_its_way_to_another_worker_is_finished_for_what_its_receiver_takes_by_then() {
    let mut bed = Bed::new(&SwitchConfig::default(), 2);
    let (_, sender) = bed.add(&HeapPort::default());
    let (id, receiver) = bed.add(&HeapPort { first: 1, ..HeapPort::default() });
    let packet = Packet { macs: [[0xff; 6], OWN], ..Packet::plain(false, true, vec![3; 3000]) };
    let (header, bytes) = packet.sent(1000);
    sender.send(0, HeapFrame::new(header, bytes));
    bed.round(0);
    assert_eq!(bed.under_way(0, 1), 1);
    bed.set_offloads(id, Offloads::empty());
    bed.run();
    let received = receiver.received(0);
    assert_eq!(received.len(), 3);
    for frame in &received {
        assert!(frame.header == Header::NONE && checksum::verify(&frame.bytes).is_ok());
    }
}

fn frame(destination: [u8; 6], source: [u8; 6], behind: &[u8]) -> Vec<u8> {
    let mut frame = [destination, source].concat();
    frame.extend(behind);
    frame.resize(60, 0);
    frame
}

const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// The attack as it was found: an access port in the native VLAN of a trunk, whose next hop strips a priority tag and delivers to VLAN 20.
#[test]
fn m1_a_double_tag_does_not_leave_a_trunk() {
    let trunk = Vlans::Trunk { allowed: Some(vec![20]), native: Some(10) };
    let access = Rules { vlans: Vlans::Access(10), ..Rules::default() };
    let mut ports = Ports::new([access, Rules { vlans: trunk, ..Rules::default() }]);
    let inner = [0x81, 0x00, 0, 20, 8, 0, 0x45];
    for outer in [[0x81, 0x00, 0, 0], [0x88, 0xa8, 0, 0], [0x91, 0x00, 0, 0], [0x88, 0xa8, 0, 20]] {
        let hop = frame(OTHER, OWN, &[&outer[..], &inner].concat());
        assert_eq!(ports.send(Header::NONE, hop), [Vec::<Vec<u8>>::new()], "{outer:x?}");
    }
    assert_eq!(ports.drops(), [("vlan".to_owned(), 4)].into());
    let honest = frame(OTHER, OWN, &[0x81, 0x00, 0xe0, 0, 8, 0, 0x45]);
    let mut plain = honest.clone();
    plain.drain(12..16);
    assert_eq!(ports.send(Header::NONE, honest), [[plain]], "a priority tag alone is taken off");
}

/// A port without rules may send any tag, but a trunk lets through only its own VLANs, whatever they are hidden behind.
#[test]
fn m1_a_trunk_sends_no_foreign_tag_for_payload() {
    let trunk = Vlans::Trunk { allowed: Some(vec![10]), native: Some(0) };
    let mut ports =
        Ports::new([Rules::default(), Rules { vlans: trunk, ..Rules::default() }, Rules::default()]);
    let hop = frame(OTHER, OWN, &[0x88, 0xa8, 0, 0, 0x81, 0, 0, 20, 8, 0]);
    assert_eq!(ports.send(Header::NONE, hop.clone()), [vec![], vec![hop]]);
}

fn reserved(last: u8) -> [u8; 6] {
    [0x01, 0x80, 0xc2, 0, 0, last]
}

#[test]
fn reserved_addresses_are_not_forwarded() {
    // With rules and without, and several frames of a conversation.
    for rules in [Rules::default(), Rules { isolated: true, ..Rules::default() }] {
        let mut ports = Ports::new([rules, Rules::default()]);
        for last in 0..0x10 {
            for _ in 0..2 {
                let bpdu = frame(reserved(last), OWN, &[0, 38, 0x42, 0x42, 3]);
                assert_eq!(ports.send(Header::NONE, bpdu), [Vec::<Vec<u8>>::new()], "{last:#x}");
            }
        }
        let mut expected = 2 * 16;
        for source in [[0xff; 6], [0; 6], [0x33, 0x33, 0, 0, 0, 1]] {
            let forged = frame(OTHER, source, &[8, 0]);
            assert_eq!(ports.send(Header::NONE, forged), [Vec::<Vec<u8>>::new()], "{source:x?}");
            expected += 1;
        }
        for pause in [&[0x88, 0x08, 0, 1][..], &[0x81, 0, 0, 0, 0x88, 0x08, 0, 1]] {
            assert_eq!(ports.send(Header::NONE, frame(OTHER, OWN, pause)), [Vec::<Vec<u8>>::new()]);
            expected += 1;
        }
        assert_eq!(ports.drops(), [("reserved".to_owned(), expected)].into());
        let next = frame(reserved(0x10), OWN, &[8, 0]);
        assert_eq!(
            ports.send(Header::NONE, next.clone()),
            [[next]],
            "the first address that is not reserved"
        );
    }
}

#[test]
fn reserved_addresses_are_forwarded_where_the_port_says_so() {
    let wire = Rules { forward_reserved: true, ..Rules::default() };
    let mut ports = Ports::new([wire, Rules::default(), Rules { isolated: true, ..Rules::default() }]);
    for (destination, source) in
        [(reserved(0), OWN), (reserved(0xe), OWN), (OTHER, [0xff; 6]), (OTHER, [0; 6])]
    {
        let frame = frame(destination, source, &[8, 0]);
        assert_eq!(ports.send(Header::NONE, frame.clone()), [[frame.clone()], [frame]]);
    }
    let pause = frame(OTHER, OWN, &[0x88, 0x08, 0, 1]);
    assert_eq!(ports.send(Header::NONE, pause.clone()), [[pause.clone()], [pause]]);
}

/// 2047 packets for the price of one: what a frame becomes is what counts.
#[test]
fn m4_storm_control_counts_the_packets_of_a_frame() {
    let rate = crate::rules::Rate { per_second: 1, burst: 100 };
    let mut ports = Ports::new([Rules { storm: Some(rate), ..Rules::default() }, Rules::default()]);
    let large = Packet { macs: [[0xff; 6], OWN], ..Packet::plain(false, true, vec![3; 40 * 100]) };
    let (header, bytes) = large.sent(40);
    assert_eq!(ports.send(header, bytes.clone())[0].len(), 1, "a hundred packets");
    assert_eq!(ports.send(header, bytes)[0].len(), 0);
    assert_eq!(ports.drops(), [("storm".to_owned(), 1)].into());
    assert_eq!(ports.send(Header::NONE, frame([0xff; 6], OWN, &[8, 0]))[0].len(), 0, "nothing is left");
}

/// A guest that has all the addresses that it may have, and makes up more of them, still has the announcements for one that it may have later.
#[test]
fn m5_an_address_that_is_refused_is_not_announced() {
    let mut bed = Bed::new(&SwitchConfig::default(), 2);
    let limited = |max_macs| Rules { max_macs: Some(max_macs), ..Rules::default() };
    let (id, guest) = bed.add(&HeapPort { rules: limited(1), ..HeapPort::default() });
    let [other, bystander] = [1, 1].map(|first| bed.add(&HeapPort { first, ..HeapPort::default() }).1);
    let of = |number: u32| {
        let [.., a, b, c] = number.to_be_bytes();
        [2, 0, 0, a, b, c]
    };
    let hello =
        |from: u32, to: [u8; 6]| HeapFrame::new(Header::default(), frame(to, of(from), &[0x88, 0xb5]));
    let (first, late, others) = (1, 2, 3);
    guest.send(0, hello(first, [0xff; 6]));
    other.send(0, hello(others, [0xff; 6]));
    bed.run();
    // The clock stands still, so that nothing is granted meanwhile.
    for number in 1000..2500 {
        guest.send(0, hello(number, of(others)));
        bed.run();
    }
    assert_eq!(bed.totals(id).drops_by_name()["mac-limit"], 1500);
    bed.set_rules(id, &limited(2));
    guest.send(0, hello(late, of(others)));
    bed.run();
    [&guest, &other, &bystander].iter().for_each(|wire| drop(wire.received(0)));
    other.send(0, hello(others, of(late)));
    bed.run();
    let received = [&guest, &bystander].map(|wire| wire.received(0).len());
    assert_eq!(received, [1, 0], "the other worker knows where it is");
}

/// A guest that has used up its announcements takes an address on its own worker, and the worker of whoever uses that address hears nothing of it.
#[test]
fn an_address_that_cannot_be_announced_is_not_taken_from_another_worker() {
    let mut bed = Bed::new(&SwitchConfig { mac_table_size: 16_384, ..SwitchConfig::default() }, 2);
    let mut add = |first| bed.add(&HeapPort { first, ..HeapPort::default() }).1;
    let [victim, thief, other] = [0, 1, 1].map(&mut add);
    let of = |number: u32| {
        let [.., a, b, c] = number.to_be_bytes();
        [2, 0, 0, a, b, c]
    };
    let hello = |from: u32, to: [u8; 6]| {
        HeapFrame::new(Header::default(), [&to[..], &of(from), &[0x88, 0xb5], &[0; 46]].concat())
    };
    let (all, his, others) = ([0xff; 6], of(1), 2);
    victim.send(0, hello(1, all));
    other.send(0, hello(others, all));
    bed.run();
    for number in 1000..2500 {
        thief.send(0, hello(number, all));
        bed.run();
    }
    for _ in 0..3 {
        thief.send(0, hello(1, all));
        bed.run();
        victim.send(0, hello(1, all));
        bed.run();
        [&victim, &thief].iter().for_each(|wire| drop(wire.received(0)));
        other.send(0, hello(others, his));
        bed.run();
        assert_eq!(victim.received(0).len(), 1, "it is flooded, and so he gets it, too");
    }
    // When the thief may announce again the address moves back and forth, for all workers alike.
    bed.advance(1_000_000);
    thief.send(0, hello(1, all));
    bed.run();
    victim.send(0, hello(1, all));
    bed.run();
    [&victim, &thief].iter().for_each(|wire| drop(wire.received(0)));
    other.send(0, hello(others, his));
    bed.run();
    assert_eq!((victim.received(0).len(), thief.received(0).len()), (1, 0));
}
