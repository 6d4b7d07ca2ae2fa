use proptest::collection::vec;
use proptest::prelude::*;
use ringferry_packet::gro::MAX_PACKETS;
use ringferry_packet::parse::Layers;

use super::*;
use crate::plane::offload::testing::{
    ACK, CWR, PSH, any_packet, burst, flat, on_the_wire, stream as stream_of,
};
use ringferry_packet::testing::{Packet, Sent};

fn all() -> Terms {
    Terms::new(Offloads::all() - Offloads::UFO, FrameCost::SystemCall).unwrap()
}

/// Delivers these frames and returns the result, each frame with the number of packets it is made of.
fn deliver(frames: &[Sent], lens: &[usize], terms: Terms) -> Vec<(Sent, usize)> {
    let burst = burst(frames, lens);
    let mut coalescer = Coalescer::default();
    let mut out = Vec::new();
    for _ in 0..2 {
        // The second run uses the storage again.
        out.clear();
        let mut units = coalescer.units(&burst, 0..frames.len(), terms);
        while let Some(unit) = units.next_unit() {
            out.push(match unit {
                Unit::Single(frame) => (flat(frame.header, frame.prefix(), burst.rest(frame)), 1),
                Unit::Merged(Merged { header, first, rest, packets }) => (flat(header, first, rest), packets),
            });
        }
    }
    out
}

fn counts(frames: &[Sent], terms: Terms) -> Vec<usize> {
    deliver(frames, &[], terms).into_iter().map(|(_, packets)| packets).collect()
}

fn stream(v6: bool, tcp: bool, count: usize) -> Vec<Packet> {
    stream_of(&Packet::plain(v6, tcp, (0..count * 1000).map(|n| (n / 3) as u8).collect()), 1000)
}

fn complete(packets: &[Packet]) -> Vec<Sent> {
    packets.iter().map(Packet::complete).collect()
}

#[test]
fn a_burst_of_one_flow_becomes_one_frame_whoever_finished_its_checksums() {
    for (v6, tcp) in [(false, false), (false, true), (true, false), (true, true)] {
        let packets = stream(v6, tcp, 32);
        let partial: Vec<Sent> = packets.iter().map(|packet| packet.sent(0)).collect();
        let valid = complete(&packets).into_iter();
        let valid: Vec<Sent> =
            valid.map(|(_, frame)| (Header { flags: 2, ..Header::default() }, frame)).collect();
        for frames in [complete(&packets), partial, valid] {
            let merged = deliver(&frames, &[70, 100], all());
            assert_eq!(merged.len(), 1);
            let ((header, frame), packets) = &merged[0];
            assert_eq!((header.gso_size, *packets), (1000, 32));
            assert!(all().accepts.accepts(header) && header.check(frame.len()).is_ok());
            let sent: Vec<Vec<u8>> = frames.iter().flat_map(on_the_wire).collect();
            assert!(on_the_wire(&merged[0].0) == sent, "v6 {v6}, tcp {tcp}");
        }
    }
}

#[test]
fn interleaved_flows_are_merged_each() {
    let mut frames = Vec::new();
    for number in 0..8 {
        for flow in 0..4 {
            let mut packet = stream(false, flow % 2 == 0, 8)[number].clone();
            packet.ports[0] = flow;
            frames.push(packet.complete());
        }
    }
    assert_eq!(counts(&frames, all()), [8; 4]);
}

#[test]
fn only_what_the_receiver_takes_is_merged() {
    let kinds = [
        (false, true, Offloads::TSO4),
        (true, true, Offloads::TSO6),
        (false, false, Offloads::USO),
        (true, false, Offloads::USO),
    ];
    for (v6, tcp, needed) in kinds {
        let frames = complete(&stream(v6, tcp, 3));
        for offload in [Offloads::TSO4, Offloads::TSO6, Offloads::USO] {
            let terms = Terms::new(Offloads::CSUM | offload, FrameCost::SystemCall).unwrap();
            assert_eq!(counts(&frames, terms).len(), if offload == needed { 1 } else { 3 });
        }
    }
    assert_eq!(Terms::new(Offloads::CSUM | Offloads::ECN, FrameCost::SystemCall), None);
    assert_eq!(Terms::new(Offloads::TSO4, FrameCost::Descriptor), None);
    assert_eq!(Terms::new(Offloads::CSUM | Offloads::USO, FrameCost::Descriptor), None);
}

/// RFC 3168, 6.1.2: the window reduction is reported once, and a receiver without ECN must not be given a frame that has it.
#[test]
fn rfc_3168_window_reduction_is_on_the_first_packet_only() {
    let mut packets = stream(false, true, 4);
    packets[0].flags |= CWR;
    let merged = deliver(&complete(&packets), &[], all());
    assert_eq!((merged.len(), merged[0].0.0.gso_type), (1, 0x81));
    let without = Terms::new(Offloads::CSUM | Offloads::TSO4, FrameCost::SystemCall).unwrap();
    assert_eq!(counts(&complete(&packets), without), [1, 3]);
    packets[2].flags |= CWR;
    assert_eq!(counts(&complete(&packets), all()), [2, 2]);
}

#[test]
fn what_ends_a_frame_ends_the_unit() {
    let mut packets = stream(false, true, 6);
    packets[2].flags |= PSH;
    assert_eq!(counts(&complete(&packets), all()), [3, 3]);
    packets[2].flags = ACK;
    packets[4].payload.truncate(999);
    assert_eq!(counts(&complete(&packets), all()), [5, 1]);
    let udp = stream(true, false, MAX_PACKETS + 2);
    let small: Vec<Packet> =
        udp.into_iter().map(|packet| Packet { payload: vec![7; 20], ..packet }).collect();
    assert_eq!(counts(&complete(&small), all()), [MAX_PACKETS, 2]);
}

#[test]
fn no_frame_is_longer_than_its_length_fields_hold() {
    for (v6, tcp) in [(false, true), (true, true), (false, false), (true, false)] {
        let frames = complete(&stream_of(&Packet::plain(v6, tcp, vec![9; 80_000]), 8900));
        let merged = deliver(&frames, &[], all());
        assert_eq!(merged.len(), 2);
        assert!(merged[0].0.1.len() <= usize::from(u16::MAX));
        assert_eq!(merged.iter().map(|(sent, _)| on_the_wire(sent).len()).sum::<usize>(), frames.len());
    }
}

#[test]
fn wrong_checksums_stay_with_their_packet() {
    for (v6, tcp) in [(false, true), (true, true), (false, false), (true, false)] {
        for bad in 0..4 {
            let mut frames = complete(&stream(v6, tcp, 4));
            let last = frames[bad].1.len() - 1;
            frames[bad].1[last] ^= 1;
            for (sent, packets) in deliver(&frames, &[], all()) {
                assert_eq!(packets > 1, sent.0.is_gso());
                // The packet with the wrong checksum is delivered unchanged.
                assert!(packets > 1 || frames.contains(&sent));
                assert!(packets == 1 || on_the_wire(&sent).len() == packets);
            }
            let mut partial: Vec<Sent> = stream(v6, tcp, 4).iter().map(|packet| packet.sent(0)).collect();
            let field = usize::from(partial[bad].0.csum_start + partial[bad].0.csum_offset);
            partial[bad].1[field] ^= 1;
            assert!(deliver(&partial, &[], all()).contains(&(partial[bad].clone(), 1)));
        }
    }
}

/// RFC 768: over IPv4, a checksum of zero says that there is none, which no header of a merged frame can say.
#[test]
fn rfc_768_udp_without_checksum_is_left_alone() {
    let mut frames = complete(&stream(false, false, 3));
    for (_, frame) in &mut frames {
        frame[40..42].fill(0);
    }
    assert_eq!(counts(&frames, all()), [1, 1, 1]);
}

/// A later packet never overtakes one of its flow that could not be merged, nor one that may be of its flow.
#[test]
fn packets_that_cannot_be_merged_keep_their_place_in_their_flow() {
    let packets = stream(false, true, 5);
    let frames = complete(&packets);
    let edited = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut frames = frames.clone();
        edit(&mut frames[2].1);
        deliver(&frames, &[], all()).into_iter().map(|(_, packets)| packets).collect::<Vec<_>>()
    };
    // The edits are: SYN, an IPv4 option's length, a fragment, headers that make no sense.
    assert_eq!(edited(&|frame| frame[47] |= 2), [2, 1, 2]);
    assert_eq!(edited(&|frame| frame[20] = 0x20), [2, 1, 2]);
    assert_eq!(edited(&|frame| frame[14] = 0x41), [2, 1, 2]);
    // A packet of another protocol belongs to no flow.
    assert_eq!(edited(&|frame| frame[12..14].copy_from_slice(&[8, 6])), [2, 1, 2]);
    let mut with_arp = frames.clone();
    with_arp[2].1[12..14].copy_from_slice(&[8, 6]);
    with_arp.insert(3, frames[2].clone());
    assert_eq!(counts(&with_arp, all()), [5, 1]);
    // An acknowledgement without data is not merged.
    let mut with_ack = frames.clone();
    let ack = Packet { payload: vec![], sequence: packets[2].sequence, ..packets[2].clone() };
    with_ack.insert(2, ack.complete());
    assert_eq!(counts(&with_ack, all()), [2, 1, 3]);
}

/// If there is little to save, headers are not even read.
#[test]
fn small_packets_are_merged_for_a_tap_and_not_for_a_guest() {
    let small: Vec<Sent> = complete(&stream_of(&Packet::plain(false, false, vec![5; 160]), 16));
    assert_eq!(counts(&small, all()), [10]);
    assert_eq!(counts(&small, Terms::new(all().accepts, FrameCost::Descriptor).unwrap()), [1; 10]);
    for v6 in [false, true] {
        let large = complete(&stream_of(&Packet::plain(v6, true, vec![5; 1600]), 512));
        assert_eq!(counts(&large, Terms::new(all().accepts, FrameCost::Descriptor).unwrap()), [4]);
        let datagrams = complete(&stream_of(&Packet::plain(v6, false, vec![5; 1600]), 512));
        assert_eq!(counts(&datagrams, Terms::new(all().accepts, FrameCost::Descriptor).unwrap()), [1; 4]);
    }
}

#[test]
fn more_flows_than_are_looked_at_lose_nothing() {
    let mut frames = Vec::new();
    for number in 0..3 {
        for flow in 0..2 * MAX_FLOWS as u8 {
            let mut packet = stream(true, true, 3)[number].clone();
            packet.ports[1] = flow;
            frames.push(packet.complete());
        }
    }
    let merged = deliver(&frames, &[], all());
    assert_eq!(merged.iter().map(|(_, packets)| packets).sum::<usize>(), frames.len());
}

/// Clears the identification if the packet may not be fragmented: it means nothing there (RFC 6864, 4.1).
fn without_identification(mut packet: Vec<u8>, v6: bool, l3: usize) -> Vec<u8> {
    if !v6 {
        packet[l3 + 4..l3 + 6].fill(0);
        packet[l3 + 10..l3 + 12].fill(0);
    }
    packet
}

proptest! {
    /// Segmented again, the delivered frames are the packets that were sent: every packet once, each flow in
    /// order, in frames that the receiver takes.
    #[test]
    fn what_is_delivered_is_what_was_sent(
        flows in vec((any_packet(6000), 1..2000usize, any::<bool>(), 0..3u16), 1..5),
        order in vec(0..5usize, 0..64),
        lens in vec(1..900usize, 0..4),
        accepts in crate::plane::offload::testing::receivers(),
        tap: bool,
    ) {
        let terms = if tap { Terms::new(accepts, FrameCost::SystemCall) } else { Terms::new(accepts, FrameCost::Descriptor) };
        let Some(terms) = terms else { return Ok(()) };
        let mut streams: Vec<_> = flows.iter().enumerate().map(|(flow, (packet, size, partial, step))| {
            let mut packet = packet.clone();
            packet.ports[3] = flow as u8;
            let size = *size.max(&(packet.payload.len() / 20 + 1));
            let mut packets = if packet.payload.is_empty() { vec![packet] } else { stream_of(&packet, size) };
            for (number, packet) in packets.iter_mut().enumerate() {
                // The identification of a stream counts up by one.
                let more = (number as u16).wrapping_mul(step.wrapping_sub(1));
                packet.identification = packet.identification.wrapping_add(more);
            }
            let frames = packets.iter().map(|p| if *partial { p.sent(0) } else { p.complete() });
            frames.collect::<Vec<_>>().into_iter()
        }).collect();
        let mut frames = Vec::new();
        for flow in order {
            frames.extend(streams.get_mut(flow).and_then(Iterator::next));
        }
        let delivered = deliver(&frames, &lens, terms);
        prop_assert_eq!(delivered.iter().map(|(_, packets)| packets).sum::<usize>(), frames.len());
        for (flow, (packet, ..)) in flows.iter().enumerate() {
            let l3 = 14 + 4 * packet.tags;
            let of_flow = |(_, frame): &&Sent| {
                let layers = Layers::parse(frame).unwrap();
                frame[layers.l4 + 3] == flow as u8
            };
            let wire = |sent: &Sent| {
                let packets = on_the_wire(sent).into_iter();
                packets.map(|bytes| without_identification(bytes, packet.v6, l3)).collect::<Vec<_>>()
            };
            let sent: Vec<_> = frames.iter().filter(of_flow).flat_map(wire).collect();
            let got: Vec<_> =
                delivered.iter().map(|(sent, _)| sent).filter(of_flow).flat_map(wire).collect();
            prop_assert!(got == sent);
        }
        for ((header, frame), packets) in &delivered {
            prop_assert!(*packets == 1 || (accepts.accepts(header) && header.check(frame.len()).is_ok()));
        }
    }
}
