use super::rules::{DF, RST, SYN, URG};
use super::*;
use crate::buffer::Pools;
use crate::checksum::{self, Sum, complete, verify};
use crate::parse::{IpVersion, Layers, PROTO_TCP, TCP_CHECKSUM, UDP_CHECKSUM};
use crate::segment::{self, Checksum, FIN, PSH, Segmenter, put16};
use crate::testing::{Packet, available, chain_of, pools};
use crate::vnet::{F_NEEDS_CSUM, GSO_ECN, GSO_TCPV4, Header};
use proptest::collection::vec;
use proptest::prelude::*;

/// A frame with its header.
type Frame = (Header, Vec<u8>);

/// Segments an unsegmented frame into the packets that a network card would have received, with complete checksums.
fn cut(header: &Header, frame: &[u8]) -> Vec<Frame> {
    let mut segmenter = Segmenter::new(header, frame, Checksum::Complete).unwrap();
    let mut packets = Vec::new();
    while let Some(segment) = segmenter.next_segment() {
        packets.push((segment.header, [segment.head, segment.payload].concat()));
    }
    packets
}

/// The packets that `gso_size` bytes of payload each make.
fn stream(packet: &Packet, gso_size: u16) -> Vec<Frame> {
    cut(&packet.gso_header(gso_size), &packet.partial())
}

/// TCP over IPv4 or IPv6 without anything special, `count` segments of 100 bytes.
fn plain(v6: bool, count: usize) -> Vec<Frame> {
    stream(&Packet::plain(v6, true, (0..100 * count).map(|n| (n / 7) as u8).collect()), 100)
}

fn all() -> Gro {
    Gro::for_receiver(Offloads::all())
}

/// Everything that comes out when these go in, and the pools get every buffer back.
fn through(mut gro: Gro, frames: &[Frame]) -> Vec<Frame> {
    let mut pools = pools(300);
    let before = available(&pools);
    let mut out = Vec::new();
    let mut deliver = |chain: Chain| {
        assert_eq!(chain.header.check(chain.len()), Ok(()));
        out.push((chain.header, chain.to_vec()));
    };
    for (header, frame) in frames {
        let chain = chain_of(&mut pools, *header, frame, &[]);
        gro.push(chain, &mut deliver);
    }
    gro.flush(&mut deliver);
    assert!(gro.is_empty());
    assert_eq!(gro.counters().packets, frames.len() as u64);
    assert_eq!(gro.counters().merged, (frames.len() - out.len()) as u64);
    let unsegmented = |frames: &[Frame]| frames.iter().filter(|(header, _)| header.is_gso()).count();
    assert_eq!(gro.counters().frames, (unsegmented(&out) - unsegmented(frames)) as u64);
    assert_eq!(available(&pools), before);
    out
}

/// Payloads of what comes out, in packets.
fn shape(gro: Gro, frames: &[Frame]) -> Vec<usize> {
    through(gro, frames)
        .iter()
        .map(|(header, frame)| if header.is_gso() { cut(header, frame).len() } else { 1 })
        .collect()
}

/// The packets of frames, segmented again and checksums complete.
fn on_the_wire(frames: &[Frame]) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    for (header, frame) in frames {
        if header.is_gso() {
            packets.extend(cut(header, frame).into_iter().map(|(_, packet)| packet));
        } else {
            let mut frame = frame.clone();
            complete(header, &mut frame).unwrap();
            packets.push(frame);
        }
    }
    packets
}

/// Changes a byte of the headers, and puts the checksums right again.
fn edited(frame: &Frame, at: usize, byte: u8) -> Frame {
    let mut bytes = frame.1.clone();
    bytes[at] = byte;
    (frame.0, mended(bytes).unwrap())
}

/// A frame with its checksums put right, if its headers allow.
fn mended(mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    let layers = Layers::parse(&bytes).ok()?;
    if layers.ip == IpVersion::V4 {
        put16(&mut bytes, layers.l3 + 10, 0);
        let mut sum = Sum::new();
        sum.add(&bytes[layers.l3..layers.l4]);
        put16(&mut bytes, layers.l3 + 10, sum.finish());
    }
    if layers.payload > layers.l4 {
        let field = layers.l4 + if layers.proto == PROTO_TCP { TCP_CHECKSUM } else { UDP_CHECKSUM };
        let pseudo = checksum::pseudo_header(&bytes, &layers, bytes.len() - layers.l4)?;
        put16(&mut bytes, field, pseudo.partial());
        let header = Header {
            flags: F_NEEDS_CSUM,
            csum_start: layers.l4 as u16,
            csum_offset: (field - layers.l4) as u16,
            ..Header::default()
        };
        complete(&header, &mut bytes).ok()?;
    }
    verify(&bytes).is_ok().then_some(bytes)
}

const L3: usize = 14;
const TCP4: usize = 34;
const TCP6: usize = 54;

#[test]
fn a_burst_of_one_stream_becomes_one_frame() {
    for v6 in [false, true] {
        let packet = Packet::plain(v6, true, (0..1234u32).map(|n| n as u8).collect());
        let out = through(Gro::new(), &stream(&packet, 100));
        assert_eq!(out.len(), 1);
        let expected = Header { hdr_len: packet.payload_at() as u16, ..packet.gso_header(100) };
        assert_eq!(out[0], (expected, packet.partial()));
    }
}

#[test]
fn a_stream_longer_than_a_frame_becomes_several() {
    // 65535 bytes, headers included, hold 45 of 1448.
    let packets: Vec<Frame> = (0..60u32)
        .map(|n| {
            let mut packet = Packet::plain(false, true, vec![n as u8; 1448]);
            (packet.sequence, packet.identification) = ((u32::MAX - 20_000).wrapping_add(n * 1448), n as u16);
            let mut frame = packet.partial();
            complete(&packet.header(), &mut frame).unwrap();
            (Header::default(), frame)
        })
        .collect();
    assert_eq!(shape(Gro::new(), &packets), [45, 15]);
    let out = through(Gro::new(), &packets);
    assert!(out.iter().all(|(_, frame)| frame.len() <= MAX_FRAME));
    assert_eq!(on_the_wire(&out), packets.into_iter().map(|(_, frame)| frame).collect::<Vec<_>>());
}

#[test]
fn packets_of_a_frame_are_bounded() {
    assert_eq!(shape(Gro::new(), &plain(false, 2 * MAX_PACKETS + 5)), [MAX_PACKETS, MAX_PACKETS, 5]);
    const { assert!(MAX_PACKETS <= segment::MAX_SEGMENTS) }
}

#[test]
fn a_shorter_segment_is_the_last_and_a_longer_one_is_the_next() {
    let mut packet = Packet::plain(false, true, vec![1; 250]);
    let mut frames = stream(&packet, 100);
    packet.sequence += 250;
    packet.identification += 3;
    frames.extend(stream(&packet, 100));
    assert_eq!(shape(Gro::new(), &frames), [3, 3]);
    packet.sequence += 250;
    packet.identification += 3;
    frames.extend(stream(&packet, 125));
    assert_eq!(shape(Gro::new(), &frames), [3, 3, 2]);
    // Three of the new length follow two of the old.
    frames.remove(5);
    let lengths: Vec<usize> =
        through(Gro::new(), &frames[..2]).iter().map(|(_, frame)| frame.len()).collect();
    assert_eq!(lengths, [54 + 200]);
    let longer = Packet { sequence: 208, identification: 9, ..Packet::plain(false, true, vec![2; 101]) };
    let longer = stream(&longer, 200).remove(0);
    assert_eq!(shape(Gro::new(), &[frames[0].clone(), frames[1].clone(), longer]), [2, 1]);
}

#[test]
fn clause_rfc_9293_push_and_fin_end_a_frame() {
    for flag in [FIN, PSH] {
        let mut frames = plain(false, 5);
        frames[2] = edited(&frames[2], TCP4 + 13, 0x10 | flag);
        let out = through(Gro::new(), &frames);
        assert_eq!(out.iter().map(|(_, frame)| frame[TCP4 + 13]).collect::<Vec<_>>(), [0x10 | flag, 0x10]);
        assert_eq!(shape(Gro::new(), &frames), [3, 2]);
        // A frame is not begun by what ends it.
        frames[0] = edited(&frames[0], TCP4 + 13, 0x10 | flag);
        assert_eq!(shape(Gro::new(), &frames), [1, 2, 2]);
    }
}

#[test]
fn segments_that_mean_more_than_their_payload_are_left_alone() {
    for flag in [SYN, RST, URG] {
        let mut frames = plain(true, 5);
        frames[2] = edited(&frames[2], TCP6 + 13, 0x10 | flag);
        assert_eq!(shape(Gro::new(), &frames), [2, 1, 2], "{flag:#x}");
        // Nor merged with their like.
        let frames: Vec<Frame> = frames.iter().map(|frame| edited(frame, TCP6 + 13, 0x10 | flag)).collect();
        assert_eq!(shape(Gro::new(), &frames), [1; 5], "{flag:#x}");
    }
}

#[test]
fn acknowledgements_without_data_are_left_alone_and_not_overtaken() {
    let mut frames = plain(false, 4);
    let bare = Packet { sequence: 208, identification: 9, ..Packet::plain(false, true, vec![]) };
    frames.insert(2, stream(&bare, 100).remove(0));
    assert_eq!(shape(Gro::new(), &frames), [2, 1, 2]);
}

#[test]
fn rfc_3168_congestion_marks_are_kept_apart() {
    // CE on one of five, in the traffic class of either protocol.
    for (v6, at, byte) in [(false, L3 + 1, 3), (true, L3 + 1, 0x30)] {
        let mut frames = plain(v6, 5);
        frames[2] = edited(&frames[2], at, byte);
        assert_eq!(shape(Gro::new(), &frames), [2, 1, 2]);
    }
    // ECE has to be equal; CWR comes with the first.
    let mut frames = plain(false, 5);
    frames[3] = edited(&frames[3], TCP4 + 13, 0x50);
    assert_eq!(shape(Gro::new(), &frames), [3, 1, 1]);
    let mut frames = plain(false, 5);
    frames[2] = edited(&frames[2], TCP4 + 13, 0x90);
    let out = through(Gro::new(), &frames);
    assert_eq!(
        out.iter().map(|(header, _)| header.gso_type).collect::<Vec<_>>(),
        [GSO_TCPV4, GSO_TCPV4 | GSO_ECN]
    );
    // For a receiver that cannot be told.
    let accepted = Offloads::all() - Offloads::ECN;
    assert_eq!(shape(Gro::for_receiver(accepted), &frames), [2, 1, 2]);
}

#[test]
fn segments_whose_headers_differ_are_kept_apart() {
    let options = |v6| Packet { tcp_options: 3, ..Packet::plain(v6, true, vec![3; 500]) };
    let v4 = [
        ("destination MAC", 0),
        ("source MAC", 11),
        ("time to live", L3 + 8),
        ("type of service", L3 + 1),
        ("acknowledgement", TCP4 + 11),
        ("window", TCP4 + 15),
        ("urgent pointer", TCP4 + 19),
        ("options", TCP4 + 31),
        ("reserved bit", L3 + 6),
        ("don't fragment", L3 + 6),
    ];
    let v6 = [
        ("flow label", L3 + 3),
        ("hop limit", L3 + 7),
        ("traffic class", L3),
        ("acknowledgement", TCP6 + 8),
        ("window", TCP6 + 14),
        ("options", TCP6 + 20),
    ];
    let cases = v4.into_iter().map(|case| (false, case)).chain(v6.into_iter().map(|case| (true, case)));
    for (v6, (name, at)) in cases {
        let mut frames = stream(&options(v6), 100);
        let bit = match name {
            "reserved bit" => 0x80,
            "don't fragment" => 0x40,
            _ => 1,
        };
        let byte = frames[2].1[at] ^ bit;
        frames[2] = edited(&frames[2], at, byte);
        assert_eq!(shape(Gro::new(), &frames), [2, 1, 2], "{name}");
    }
}

#[test]
fn a_gap_or_a_repetition_of_sequence_ends_the_frame() {
    let mut frames = plain(false, 6);
    frames.remove(2);
    assert_eq!(shape(Gro::new(), &frames), [2, 3]);
    let mut frames = plain(true, 4);
    frames.insert(2, frames[1].clone());
    assert_eq!(shape(Gro::new(), &frames), [2, 3]);
    let mut frames = plain(true, 4);
    frames.swap(1, 2);
    assert_eq!(shape(Gro::new(), &frames), [1, 1, 1, 1]);
}

/// IPv4 segments of one stream with these identifications.
fn identified(identifications: &[u16], df: bool) -> Vec<Frame> {
    let frames = plain(false, identifications.len());
    std::iter::zip(&frames, identifications)
        .map(|(frame, id)| {
            let frame = edited(frame, L3 + 4, (id >> 8) as u8);
            let frame = edited(&frame, L3 + 5, *id as u8);
            edited(&frame, L3 + 6, if df { DF } else { 0 })
        })
        .collect()
}

#[test]
fn rfc_6864_identifications_count_up_or_mean_nothing() {
    for (df, identifications, expected) in [
        (true, &[7, 8, 9, 10][..], &[4][..]),
        (true, &[0xffff, 0, 1], &[3]),
        (true, &[0, 0, 0], &[3]),
        (true, &[5, 5, 6, 7], &[2, 2]),
        (true, &[5, 6, 6, 6], &[2, 2]),
        (true, &[5, 7, 9], &[1, 1, 1]),
        (false, &[7, 8, 9], &[3]),
        (false, &[7, 7, 7], &[1, 1, 1]),
    ] {
        assert_eq!(shape(Gro::new(), &identified(identifications, df)), expected, "{df} {identifications:?}");
    }
}

#[test]
fn packets_with_wrong_checksums_are_left_alone_and_counted() {
    for (v6, at) in [(false, TCP4 + 40), (false, L3 + 5), (true, TCP6 + 40), (true, TCP6 + 17)] {
        let mut frames = plain(v6, 5);
        frames[2].1[at] ^= 0x10;
        let mut gro = Gro::new();
        let mut pools = pools(10);
        let mut out = Vec::new();
        for (header, frame) in &frames {
            let chain = chain_of(&mut pools, *header, frame, &[]);
            gro.push(chain, |chain| out.push((chain.header, chain.to_vec())));
        }
        gro.flush(|chain| out.push((chain.header, chain.to_vec())));
        assert_eq!((out.len(), gro.counters().bad_checksum), (3, 1));
        assert_eq!(out[1], frames[2]);
        // Those that were verified need not be verified again.
        assert_eq!(through(Gro::new(), &frames[..1])[0].0.flags, F_DATA_VALID);
    }
}

#[test]
fn clause_5_1_6_4_checksums_that_the_device_has_checked_are_not_checked_again() {
    let mut frames = plain(false, 3);
    frames.iter_mut().for_each(|frame| frame.0.flags = F_DATA_VALID);
    frames[1].1[TCP4 + 17] ^= 1;
    assert_eq!(shape(Gro::new(), &frames), [3]);
    // The IP header is not what it has checked.
    frames[1].1[L3 + 11] ^= 1;
    assert_eq!(shape(Gro::new(), &frames), [1, 1, 1]);
}

#[test]
fn clause_5_1_6_2_partial_checksums_of_a_local_sender_are_as_good() {
    let frames = |packet: &Packet| -> Vec<Frame> {
        let (frame, mut frames) = (packet.partial(), Vec::new());
        let mut segmenter = Segmenter::new(&packet.gso_header(100), &frame, Checksum::Partial).unwrap();
        while let Some(segment) = segmenter.next_segment() {
            frames.push((segment.header, [segment.head, segment.payload].concat()));
        }
        frames
    };
    for (v6, tcp) in [(false, true), (true, true), (false, false), (true, false)] {
        let packet = Packet::plain(v6, tcp, vec![5; 500]);
        let good = frames(&packet);
        assert_eq!(shape(all(), &good), [5]);
        assert_eq!(through(all(), &good)[0].1, packet.partial());
        // Where the sum or its place is another, finishing it would not make it the packet's checksum.
        let mut other = good.clone();
        other[2].0.csum_offset -= 2;
        assert_eq!(shape(all(), &other), [2, 1, 2]);
        let mut other = good.clone();
        let field = usize::from(other[2].0.csum_start + other[2].0.csum_offset);
        other[2].1[field] ^= 1;
        assert_eq!(shape(all(), &other), [2, 1, 2]);
    }
}

#[test]
fn udp_is_merged_for_those_who_ask_for_it() {
    for v6 in [false, true] {
        let packet = Packet::plain(v6, false, vec![5; 250]);
        let frames = stream(&packet, 100);
        assert_eq!(shape(Gro::new(), &frames), [1, 1, 1]);
        let out = through(all(), &frames);
        let expected = Header { hdr_len: packet.payload_at() as u16, ..packet.gso_header(100) };
        assert_eq!(out, [(expected, packet.partial())]);
    }
    // Without a checksum (RFC 768) there is none to restore.
    let mut frames = stream(&Packet::plain(false, false, vec![5; 300]), 100);
    let good = frames.clone();
    for (header, frame) in &mut frames {
        frame[TCP4 + 6..TCP4 + 8].fill(0);
        header.flags = F_DATA_VALID;
    }
    assert_eq!(shape(all(), &frames), [1, 1, 1]);
    // A datagram shorter than its packet.
    let mut frames = good;
    frames[1].1[TCP4 + 5] -= 1;
    frames[1].0.flags = F_DATA_VALID;
    assert_eq!(shape(all(), &frames), [1, 1, 1]);
}

#[test]
fn only_what_the_receiver_accepts_is_made() {
    let frames = [plain(false, 3), plain(true, 3), stream(&Packet::plain(true, false, vec![1; 300]), 100)];
    for (accepted, expected) in [
        (Offloads::TSO4, [1, 3, 3]),
        (Offloads::TSO6, [3, 1, 3]),
        (Offloads::USO, [3, 3, 1]),
        (Offloads::empty(), [3, 3, 3]),
    ] {
        let counts = frames
            .each_ref()
            .map(|frames| through(Gro::for_receiver(accepted | Offloads::CSUM), frames).len());
        assert_eq!(counts, expected, "{accepted:?}");
        let counts = frames.each_ref().map(|frames| through(Gro::for_receiver(accepted), frames).len());
        assert_eq!(counts, [3, 3, 3], "{accepted:?}");
    }
}

#[test]
fn padded_and_cut_packets_are_left_alone() {
    for change in [-1i32, 1, 20] {
        let mut frames = plain(false, 3);
        let len = frames[1].1.len();
        frames[1].1.resize((len as i32 + change) as usize, 0);
        frames[1].0.flags = F_DATA_VALID;
        assert_eq!(shape(Gro::new(), &frames), [1, 1, 1], "{change}");
    }
}

#[test]
fn packets_that_ask_for_segmentation_already_pass_behind_what_is_held() {
    let mut frames = plain(false, 2);
    let next = Packet { sequence: 208, identification: 9, ..Packet::plain(false, true, vec![4; 300]) };
    frames.push((next.gso_header(100), next.partial()));
    let out = through(Gro::new(), &frames);
    assert_eq!(out.len(), 2);
    assert_eq!(out[1], frames[2]);
    // Nor is anything appended to them.
    let last = Packet { sequence: 508, identification: 12, ..Packet::plain(false, true, vec![5; 100]) };
    frames.extend(stream(&last, 100));
    assert_eq!(through(Gro::new(), &frames)[1], frames[2]);
}

#[test]
fn ip_options_and_extension_headers_are_left_alone() {
    for v6 in [false, true] {
        let packet = Packet { options: 1, ..Packet::plain(v6, true, vec![5; 300]) };
        assert_eq!(shape(Gro::new(), &stream(&packet, 100)), [1, 1, 1]);
    }
}

#[test]
fn a_fragment_waits_for_all_between_its_addresses() {
    let mut frames = plain(false, 2);
    let other = Packet { ports: [9; 4], ..Packet::plain(false, true, vec![6; 200]) };
    frames.extend(stream(&other, 100));
    let elsewhere = Packet { addresses: [8; 32], ..Packet::plain(false, true, vec![7; 200]) };
    frames.extend(stream(&elsewhere, 100));
    let mut fragment = frames[0].clone();
    fragment.1[L3 + 7] = 1;
    frames.push(fragment.clone());
    let out = through(Gro::new(), &frames);
    assert_eq!(out.len(), 4);
    assert_eq!(out[2], fragment);
    assert_eq!(out[3].1[26..34], [8; 8]);
}

#[test]
fn what_has_no_flow_passes_and_what_cannot_be_read_waits_for_all() {
    let mut arp = vec![0; 60];
    arp[12..14].copy_from_slice(&[0x08, 0x06]);
    let mut frames = plain(false, 2);
    frames.insert(1, (Header::default(), arp.clone()));
    let out = through(Gro::new(), &frames);
    assert_eq!((out.len(), &out[0].1), (2, &arp));
    let mut broken = frames[0].clone();
    broken.1[TCP4 + 12] = 0x40;
    let frames = [frames[0].clone(), broken.clone(), frames[2].clone()];
    let out = through(Gro::new(), &frames);
    assert_eq!((out.len(), &out[1]), (3, &broken));
}

#[test]
fn flows_are_merged_side_by_side_and_bounded() {
    let flows = |count: u8| -> Vec<Frame> {
        let streams: Vec<Vec<Frame>> = (0..count)
            .map(|flow| {
                stream(&Packet { ports: [flow; 4], ..Packet::plain(false, true, vec![flow; 400]) }, 100)
            })
            .collect();
        (0..4).flat_map(|at| streams.iter().map(move |stream| stream[at].clone())).collect()
    };
    assert_eq!(shape(Gro::new(), &flows(MAX_FLOWS as u8)), [4; MAX_FLOWS]);
    let mut gro = Gro::new();
    let mut pools = pools(400);
    for (header, frame) in flows(64) {
        let chain = chain_of(&mut pools, header, &frame, &[]);
        gro.push(chain, drop);
        assert!(gro.held.len() <= MAX_FLOWS);
    }
}

#[test]
fn headers_are_written_only_where_they_lie_in_one_place_of_our_own() {
    for (first, second, expected) in
        [(vec![], vec![], 1), (vec![54, 3], vec![20, 30, 40], 1), (vec![53], vec![], 2)]
    {
        let mut pools = pools(20);
        let frames = plain(false, 2);
        let (mut gro, mut out) = (Gro::new(), Vec::new());
        for ((header, frame), lens) in frames.iter().zip([&first, &second]) {
            let chain = chain_of(&mut pools, *header, frame, lens);
            gro.push(chain, |chain| out.push((chain.header, chain.to_vec())));
        }
        gro.flush(|chain| out.push((chain.header, chain.to_vec())));
        assert_eq!(out.len(), expected);
        assert_eq!(on_the_wire(&out), [frames[0].1.clone(), frames[1].1.clone()]);
    }
    // Somebody else reads the first one.
    let mut pools = pools(20);
    let frames = plain(false, 3);
    let (mut gro, mut out) = (Gro::new(), Vec::new());
    let mut first = chain_of(&mut pools, frames[0].0, &frames[0].1, &[]);
    let reader = first.share();
    gro.push(first, |chain| out.push(chain));
    for (header, frame) in &frames[1..] {
        let chain = chain_of(&mut pools, *header, frame, &[]);
        gro.push(chain, |chain| out.push(chain));
    }
    gro.flush(|chain| out.push(chain));
    assert_eq!((out.len(), out[0].to_vec()), (2, reader.to_vec()));
}

/// Streams, datagrams, pieces, and the order in which they come.
fn traffic() -> impl Strategy<Value = Vec<Frame>> {
    let flow = (Packet::any(3000), 40..1500u16, 0..3u8);
    (vec(flow, 1..6), vec(any::<prop::sample::Index>(), 200), any::<bool>()).prop_map(
        |(flows, order, shuffle)| {
            let mut streams: Vec<Vec<Frame>> = Vec::new();
            for (index, (mut packet, gso_size, kind)) in flows.into_iter().enumerate() {
                packet.ports[0] = index as u8;
                packet.flags &= if kind == 0 { 0xff } else { 0xd9 };
                packet.options = if kind == 2 { packet.options.min(3) } else { 0 };
                streams.push(stream(&packet, gso_size));
            }
            let mut frames = Vec::new();
            for at in order {
                streams.retain(|stream| !stream.is_empty());
                if streams.is_empty() {
                    break;
                }
                let from = at.index(streams.len());
                let stream = &mut streams[from];
                let taken = if shuffle { at.index(stream.len()) } else { 0 };
                frames.push(stream.remove(taken));
            }
            frames
        },
    )
}

/// The port that tells the flows of [`traffic`] apart.
fn flow_of(frame: &[u8]) -> Option<u8> {
    let layers = Layers::parse(frame).ok()?;
    frame.get(layers.l4).copied()
}

fn of_flow(packets: &[Vec<u8>], flow: Option<u8>) -> Vec<&Vec<u8>> {
    packets.iter().filter(|packet| flow_of(packet) == flow).collect()
}

/// A packet without an identification that means nothing: those that were all the same count up again.
fn without_meaning(mut frame: Vec<u8>) -> Vec<u8> {
    match Layers::parse(&frame) {
        Ok(Layers { l3, ip: IpVersion::V4, .. }) if frame[l3 + 6] & DF != 0 => {
            put16(&mut frame, l3 + 4, 0);
            put16(&mut frame, l3 + 10, 0);
        }
        _ => (),
    }
    frame
}

fn sum_of(pools: &mut Pools) -> u32 {
    available(pools).iter().sum()
}

proptest! {
    #[test]
    fn a_frame_cut_and_merged_is_the_frame(mut packet in Packet::any(6000), gso_size in 100..2000u16) {
        packet.options = 0;
        packet.flags &= !(SYN | RST | URG);
        let out = through(all(), &stream(&packet, gso_size));
        prop_assert_eq!(out.len(), 1);
        let (header, frame) = &out[0];
        if packet.payload.len() <= usize::from(gso_size) {
            let mut whole = packet.partial();
            complete(&packet.header(), &mut whole).unwrap();
            prop_assert_eq!(frame, &whole);
        } else {
            let expected = Header { hdr_len: packet.payload_at() as u16, ..packet.gso_header(gso_size) };
            prop_assert_eq!(*header, expected);
            let mut whole = packet.partial();
            // Zero has two forms in a sum.
            let field = usize::from(header.csum_start + header.csum_offset);
            if whole[field..field + 2] == [0xff; 2] {
                whole[field..field + 2].copy_from_slice(&frame[field..field + 2]);
            }
            prop_assert_eq!(frame, &whole);
        }
    }

    #[test]
    fn every_flow_stays_in_order_and_is_cut_again_into_what_it_was(frames in traffic()) {
        let out = on_the_wire(&through(all(), &frames));
        let packets: Vec<Vec<u8>> = frames.into_iter().map(|(_, frame)| frame).collect();
        prop_assert_eq!(out.len(), packets.len());
        for flow in packets.iter().map(|packet| flow_of(packet)) {
            prop_assert_eq!(of_flow(&out, flow), of_flow(&packets, flow));
        }
    }

    #[test]
    fn damaged_packets_come_out_as_they_went_in(
        mut frames in traffic(),
        damage in vec((any::<prop::sample::Index>(), 0..100usize, 0..8u32), 0..8),
        mend: bool,
    ) {
        for (which, at, bit) in damage {
            let which = which.index(frames.len());
            let frame = &mut frames[which];
            let at = at % frame.1.len();
            frame.1[at] ^= 1 << bit;
            // With its checksums put right, a change of the headers is a packet of its own.
            if let (true, Some(bytes)) = (mend, mended(frame.1.clone())) {
                frame.1 = bytes;
            }
        }
        let mut out: Vec<_> = on_the_wire(&through(all(), &frames)).into_iter().map(without_meaning).collect();
        let mut packets: Vec<_> = frames.into_iter().map(|(_, frame)| without_meaning(frame)).collect();
        out.sort();
        packets.sort();
        prop_assert_eq!(out, packets);
    }

    #[test]
    fn any_bytes_and_any_header_do_no_harm(
        frames in vec((any::<[u8; Header::LEN]>(), vec(any::<u8>(), 0..300), vec(0..100usize, 0..4)), 0..20),
        mut like in Packet::any(200),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
    ) {
        let mut pools = pools(200);
        let before = sum_of(&mut pools);
        like.options = like.options.saturating_sub(7);
        let mut gro = all();
        let (mut came, mut went) = (0, 0);
        for (header, bytes, lens) in &frames {
            // Half of them begin as real packets do.
            let mut frame = bytes.clone();
            if let (true, Some((_, start))) = (bytes.len() % 2 == 0, stream(&like, 50).first()) {
                frame = [&start[..], bytes].concat();
                for (at, byte) in &damage {
                    frame[at.index(start.len())] = *byte;
                }
            }
            let chain = chain_of(&mut pools, Header::from_bytes(header), &frame, lens);
            came += frame.len();
            gro.push(chain, |chain| went += chain.len());
        }
        gro.flush(|chain| went += chain.len());
        prop_assert!(went <= came);
        prop_assert_eq!(sum_of(&mut pools), before);
    }
}
