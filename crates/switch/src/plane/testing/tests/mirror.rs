//! Mirrors, which copy what passes one port for another, and ports whose links were taken down.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringferry_control::capture::Direction;
use ringferry_packet::ether::Mac;
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::{Header, Offloads};

use crate::config::SwitchConfig;
use crate::fdb::PortId;
use crate::plane::capture::{CaptureId, MirrorCounts};
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use crate::rules::{Rules, Vlans};

const ID: CaptureId = CaptureId(1);

fn mac(port: usize) -> Mac {
    Mac([2, 0, 0, 0, 0, port as u8])
}

fn frame(to: Mac, from: Mac, len: usize) -> Vec<u8> {
    let mut frame = [&to.0[..], &from.0, &[0x88, 0xb5]].concat();
    frame.resize(len, 7);
    frame
}

fn tagged(mut frame: Vec<u8>, vid: u8) -> Vec<u8> {
    frame.splice(12..12, [0x81, 0, 0, vid]);
    frame
}

type Ports = Vec<(PortId, Arc<Wire>)>;

/// A bed with these ports, each of which knows where the others are.
fn bed(workers: usize, ports: &[HeapPort]) -> (Bed, Ports) {
    let mut bed = Bed::new(&SwitchConfig::default(), workers);
    let ports: Ports = ports.iter().map(|port| bed.add(port)).collect();
    for (number, (_, wire)) in ports.iter().enumerate() {
        wire.send(0, HeapFrame::new(Header::NONE, frame(Mac::BROADCAST, mac(number), 60)));
        bed.run();
    }
    ports.iter().for_each(|(_, wire)| drop(wire.received(0)));
    (bed, ports)
}

fn send(bed: &mut Bed, wire: &Wire, header: Header, bytes: Vec<u8>) {
    wire.send(0, HeapFrame::new(header, bytes));
    bed.run();
}

fn received(wire: &Wire) -> Vec<Vec<u8>> {
    wire.received(0).into_iter().map(|frame| frame.bytes).collect()
}

#[test]
fn a_port_gets_copies_of_what_passes_another_in_the_directions_that_were_asked_for() {
    for (direction, expected) in
        [(None, &[300, 400][..]), (Some(Direction::In), &[300]), (Some(Direction::Out), &[400])]
    {
        // On one worker, and handed over from one to another.
        for workers in [1, 3] {
            let ports = [0, 1, 2].map(|first| HeapPort { first: first % workers, ..HeapPort::default() });
            let (mut bed, ports) = bed(workers, &ports);
            let [(a, from), (_, b), (probe, copies)] = &ports[..] else { panic!() };
            let counts = Arc::new(MirrorCounts::default());
            bed.mirror(*a, ID, direction, *probe, None, &counts);
            send(&mut bed, from, Header::NONE, frame(mac(1), mac(0), 300));
            send(&mut bed, b, Header::NONE, frame(mac(0), mac(1), 400));
            let lengths: Vec<_> = received(copies).iter().map(Vec::len).collect();
            assert_eq!(lengths, expected, "{direction:?} {workers}");
            assert_eq!(counts.copied.load(Ordering::Relaxed), expected.len() as u64);
            // Each arrived where it was meant to, once.
            assert_eq!((received(b).len(), received(from).len()), (1, 1));
            bed.end_capture(ID);
            send(&mut bed, from, Header::NONE, frame(mac(1), mac(0), 300));
            assert_eq!(received(copies).len(), 0);
        }
    }
}

#[test]
fn copies_are_not_learned_from_and_are_finished_for_who_takes_no_offloads() {
    let plain = HeapPort { offloads: Offloads::empty(), ..HeapPort::default() };
    let (mut bed, ports) = bed(1, &[HeapPort::default(), HeapPort::default(), plain]);
    let [(a, from), (_, b), (probe, copies)] = &ports[..] else { panic!() };
    bed.mirror(*a, ID, None, *probe, None, &Arc::default());
    let packet = Packet { macs: [mac(1).0, mac(0).0], ..Packet::plain(false, true, vec![9; 3000]) };
    let (header, sent) = packet.sent(1000);
    send(&mut bed, from, header, sent);
    assert_eq!((received(b).len(), received(copies).len()), (1, 3));
    // Both are still where they were.
    send(&mut bed, b, Header::NONE, frame(mac(0), mac(1), 60));
    assert_eq!((received(from).len(), received(copies).len()), (1, 1));
}

#[test]
fn one_vlan_may_be_mirrored_whether_it_is_tagged_or_the_port_s_own() {
    let access =
        HeapPort { rules: Rules { vlans: Vlans::Access(5), ..Rules::default() }, ..HeapPort::default() };
    let (mut bed, ports) = bed(1, &[HeapPort::default(), access, HeapPort::default()]);
    let [(trunk, from), (access, to), (probe, copies)] = &ports[..] else { panic!() };
    bed.mirror(*trunk, ID, None, *probe, Some(5), &Arc::default());
    for vid in [4, 5, 0] {
        send(&mut bed, from, Header::NONE, tagged(frame(mac(1), mac(0), 300), vid));
    }
    send(&mut bed, from, Header::NONE, frame(mac(1), mac(0), 200));
    let mirrored = |copies: &Wire| {
        let of_mirror = received(copies).into_iter().filter(|frame| frame.len() > 100 && frame[15] == 5);
        of_mirror.count()
    };
    // By the mirror alone: the address is known in that VLAN, and in no other.
    assert_eq!(mirrored(copies), 1);
    bed.end_capture(ID);
    bed.mirror(*access, ID, Some(Direction::In), *probe, Some(5), &Arc::default());
    drop(received(copies));
    send(&mut bed, to, Header::NONE, frame(mac(0), mac(1), 500));
    assert_eq!(received(copies).iter().filter(|frame| frame.len() == 500).count(), 1);
}

#[test]
fn what_a_mirror_may_cost_is_bounded() {
    let (mut bed, ports) = bed(1, &[HeapPort::default(), HeapPort::default(), HeapPort::default()]);
    let [(a, from), (_, b), (probe, _)] = &ports[..] else { panic!() };
    let counts = Arc::new(MirrorCounts::default());
    bed.mirror(*a, ID, None, *probe, None, &counts);
    for _ in 0..3000 {
        from.send(0, HeapFrame::new(Header::NONE, frame(mac(1), mac(0), 60_000)));
    }
    bed.run();
    assert_eq!(received(b).len(), 3000);
    let (copied, lost) = (counts.copied.load(Ordering::Relaxed), counts.lost.load(Ordering::Relaxed));
    assert!(copied + lost == 3000 && copied < 1000 && copied > 100, "{copied} {lost}");
}

#[test]
fn no_frame_passes_a_port_that_is_down_and_each_is_counted() {
    let (mut bed, ports) = bed(2, &[HeapPort::default(), HeapPort { first: 1, ..HeapPort::default() }]);
    let [(a, one), (b, other)] = &ports[..] else { panic!() };
    bed.set_link(*b, false);
    send(&mut bed, one, Header::NONE, frame(mac(1), mac(0), 60));
    send(&mut bed, one, Header::NONE, frame(Mac::BROADCAST, mac(0), 60));
    send(&mut bed, other, Header::NONE, frame(mac(0), mac(1), 60));
    assert_eq!((received(one).len(), received(other).len()), (0, 0));
    assert_eq!(bed.totals(*b).drops_by_name()["link-down"], 3);
    assert_eq!(bed.totals(*a).drops_by_name()["link-down"], 0);
    bed.set_link(*b, true);
    send(&mut bed, one, Header::NONE, frame(mac(1), mac(0), 60));
    send(&mut bed, other, Header::NONE, frame(mac(0), mac(1), 60));
    assert_eq!((received(one).len(), received(other).len()), (1, 1));
    assert_eq!(bed.totals(*b).drops_by_name()["link-down"], 3);
}
