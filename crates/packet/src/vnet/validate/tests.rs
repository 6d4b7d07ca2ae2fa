use proptest::collection::vec;
use proptest::prelude::*;
use ringferry_memory::ReadSlice;

use super::*;
use crate::checksum;
use crate::frame::Burst;
use crate::segment::{Checksum, Segmenter};
use crate::testing::{Packet, Sent};
use crate::vnet::{F_DATA_VALID, F_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6};

const ALL: Offloads = Offloads::all();

fn judge(sent: &Sent) -> Result<Header, Invalid> {
    sent.0.validated(&sent.1[..sent.1.len().min(VALIDATED_HEAD)], sent.1.len(), ALL)
}

fn tcp(v6: bool) -> Packet {
    Packet::plain(v6, true, vec![3; 3000])
}

/// A request for an address, padded so that any header passes [`Header::check`].
fn arp() -> Vec<u8> {
    let mut frame = [[0xff; 6], [2, 0, 0, 0, 0, 1]].concat();
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.resize(4000, 0);
    frame
}

#[test]
fn m2_arp_is_never_segmented() {
    let asks =
        |gso_type, gso_size| Header { gso_type, gso_size, ..Packet::plain(false, true, vec![]).header() };
    for (gso_type, gso_size) in [(GSO_TCPV4, 0xffff), (GSO_TCPV6, 1000), (GSO_UDP_L4, 1000), (GSO_UDP, 1000)]
    {
        assert_eq!(judge(&(asks(gso_type, gso_size), arp())), Err(Invalid::Protocol(gso_type)));
    }
    assert!(
        matches!(judge(&(asks(GSO_NONE, 0), arp())), Err(Invalid::Checksum { .. })),
        "nor has it a checksum"
    );
}

#[test]
fn m2_a_checksum_must_not_change_the_network_header() {
    for csum_start in 14..34 {
        let (_, frame) = tcp(false).sent(0);
        // 26 is where the source address is, 12 the distance to it from the beginning of the header.
        for field in [26, 28, 30, 34 + 16] {
            let header =
                Header { csum_start, csum_offset: field - csum_start.min(field), ..tcp(false).header() };
            let refused = Err(Invalid::Checksum { start: csum_start, offset: header.csum_offset });
            assert_eq!(judge(&(header, frame.clone())), refused);
            // Nor with segmentation, where it has to be that of TCP.
            let cut = Header { gso_type: GSO_TCPV4, gso_size: 1000, ..header };
            assert_eq!(judge(&(cut, frame.clone())), refused);
        }
    }
    let (header, frame) = tcp(false).sent(1000);
    let payload = Header { csum_start: header.csum_start + 20, ..header };
    assert!(matches!(judge(&(payload, frame)), Err(Invalid::Checksum { .. })), "of each segment");
}

/// The rest of a fragmented packet, over which its checksum is computed, is elsewhere.
#[test]
fn m2_the_checksum_of_a_fragment_is_left_to_software() {
    let (header, mut fragment) = tcp(false).sent(0);
    assert_eq!(judge(&(header, fragment.clone())), Ok(header));
    fragment[20] = 0x20;
    assert_eq!(judge(&(header, fragment)).map(|header| header.is_software_only()), Ok(true));
}

#[test]
fn m2_nothing_is_asked_for_that_was_not_negotiated() {
    let (header, frame) = tcp(false).sent(1000);
    let judge = |header: Header, negotiated| header.validated(&frame, frame.len(), negotiated);
    let tso = Offloads::CSUM | Offloads::TSO4;
    let missing = |offloads| Err(Invalid::NotNegotiated(offloads));
    assert_eq!(judge(header, Offloads::empty()), missing(tso));
    assert_eq!(judge(header, Offloads::CSUM), missing(Offloads::TSO4));
    assert_eq!(judge(header, Offloads::CSUM | Offloads::TSO6), missing(Offloads::TSO4));
    let ecn = Header { gso_type: header.gso_type | GSO_ECN, ..header };
    assert_eq!(judge(ecn, tso), missing(Offloads::ECN));
    assert_eq!(judge(ecn, tso | Offloads::ECN), Ok(Header { hdr_len: 54, ..ecn }));
    assert_eq!(judge(tcp(false).header(), Offloads::empty()), missing(Offloads::CSUM));
    let checked = Header { flags: F_DATA_VALID, ..Header::NONE };
    assert_eq!(judge(checked, Offloads::CSUM), Ok(checked));
    assert_eq!(judge(checked, Offloads::empty()), Ok(Header::NONE));
}

#[test]
fn m2_the_type_of_segmentation_is_that_of_the_frame() {
    for (v6, is_tcp, own) in [
        (false, true, GSO_TCPV4),
        (true, true, GSO_TCPV6),
        (false, false, GSO_UDP_L4),
        (true, false, GSO_UDP_L4),
    ] {
        let packet = Packet::plain(v6, is_tcp, vec![3; 3000]);
        let (header, frame) = packet.sent(1000);
        for gso_type in [GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4] {
            let verdict = judge(&(Header { gso_type, ..header }, frame.clone()));
            assert_eq!(verdict.is_ok(), gso_type == own, "{gso_type} {packet:?}");
        }
    }
    let (header, mut fragment) = tcp(false).sent(1000);
    fragment[20] = 0x20;
    assert_eq!(judge(&(header, fragment)), Err(Invalid::Protocol(GSO_TCPV4)));
}

/// Linux put TCP's checksum where a header that asked for segmentation told it to.
#[test]
fn cve_2024_43897_segmentation_takes_the_checksum_field_of_its_protocol_and_no_other() {
    for (v6, is_tcp, own) in [(false, true, 16), (true, true, 16), (false, false, 6), (true, false, 6)] {
        let (header, frame) = Packet::plain(v6, is_tcp, vec![3; 3000]).sent(1000);
        for csum_offset in (0..100).chain([0x7fff, u16::MAX - 36, u16::MAX]) {
            let verdict = judge(&(Header { csum_offset, ..header }, frame.clone()));
            assert_eq!(verdict.is_ok(), csum_offset == own, "{csum_offset} {verdict:?}");
        }
    }
}

#[test]
fn m2_segments_are_of_sane_size_and_number() {
    let size = |packet: &Packet, gso_size| judge(&packet.sent(gso_size)).map(|header| header.gso_size);
    let tcp = Packet::plain(false, true, vec![3; 16_000]);
    assert_eq!(size(&tcp, 7), Err(Invalid::GsoSize(7)));
    assert_eq!(size(&Packet::plain(false, true, vec![3; 70]), 7), Err(Invalid::GsoSize(7)), "however few");
    assert_eq!(size(&tcp, 8), Ok(8));
    assert_eq!(size(&Packet::plain(false, true, vec![3; 17_000]), 8), Err(Invalid::GsoSize(8)), "too many");
    assert_eq!(size(&tcp, 0xffff), Err(Invalid::GsoSize(0xffff)));
    let udp = Packet::plain(true, false, vec![3; 1280]);
    assert_eq!(size(&udp, 10), Ok(10));
    assert_eq!(size(&udp, 9), Err(Invalid::GsoSize(9)), "more than 128 datagrams");
}

#[test]
fn m2_a_frame_of_one_segment_is_not_segmented() {
    for gso_size in [3000, 3001, 0xfffe] {
        let packet = tcp(true);
        assert_eq!(judge(&packet.sent(gso_size)), Ok(packet.header()));
    }
}

#[test]
fn m2_the_length_of_the_headers_is_computed() {
    for hdr_len in [0, 1, 54, 2000] {
        let (header, frame) = tcp(false).sent(1000);
        assert_eq!(judge(&(Header { hdr_len, ..header }, frame)).unwrap().hdr_len, 54);
    }
}

#[test]
fn m2_headers_end_inside_the_frame() {
    let (header, mut frame) = Packet::plain(false, true, vec![3; 30]).sent(10);
    assert!(judge(&(header, frame.clone())).is_ok());
    frame[34 + 12] = 0xf0;
    assert!(matches!(judge(&(header, frame.clone())), Err(Invalid::Parse(_))));
    frame[34 + 12] = 0x40;
    assert!(matches!(judge(&(header, frame.clone())), Err(Invalid::Parse(_))));
    let (header, frame) = Packet::plain(false, true, vec![]).sent(0);
    let cut = (header, frame[..53].to_vec());
    assert_eq!(judge(&cut).map(|header| header.is_software_only()), Ok(true), "not a whole TCP header");
}

/// A guest that encapsulates leaves the inner packet's checksum to its device (Linux: `NETIF_F_HW_CSUM`).
#[test]
fn m2_a_checksum_inside_a_tunnel_is_left_to_software() {
    let inner = tcp(false);
    let outer = Packet::plain(true, false, inner.partial());
    let (_, frame) = outer.complete();
    let start = outer.payload_at() + inner.l4();
    let header = Header { csum_start: start as u16, ..inner.header() };
    let passed = judge(&(header, frame.clone())).unwrap();
    assert!(passed.is_software_only() && !ALL.accepts(&passed));
    let mut finished = frame;
    checksum::complete(&passed, &mut finished).unwrap();
    assert!(checksum::verify(&finished[outer.payload_at()..]).is_ok(), "the inner packet is whole");
    // What a peer writes into the header is not taken for that.
    assert!(!Header { flags: 0xff, ..header }.sanitised().is_software_only());
    assert!(!Header { flags: 0xff, ..header }.sanitised_from_device().is_software_only());
}

/// Where the prefix that a burst keeps does not tell where TCP begins, its sender could still move it.
#[test]
fn m2_what_can_still_be_moved_is_left_to_software() {
    let verdict = |options, gso_size| {
        let sent = Packet { options, ..tcp(true) }.sent(gso_size);
        let mut burst = Burst::new();
        burst.push(sent.0, ReadSlice::from(&sent.1[..]));
        burst.validate_last(ALL).unwrap();
        burst.frames()[0].header
    };
    for gso_size in [0, 1000, 5000] {
        assert!(!verdict(0, gso_size).is_software_only(), "{gso_size}");
        assert!(!verdict(1, gso_size).is_software_only(), "both extension headers begin in the prefix");
        assert!(verdict(2, gso_size).is_software_only(), "the second begins behind it");
    }
}

#[test]
fn m2_what_is_refused_leaves_no_trace_in_a_burst() {
    let good = tcp(true).sent(1000);
    let bad = (Header { gso_type: GSO_TCPV4, ..good.0 }, good.1.clone());
    let mut burst = Burst::new();
    for (header, frame) in [&good, &bad, &good] {
        burst.push(*header, ReadSlice::from(&frame[..]));
        assert_eq!(burst.validate_last(ALL).is_ok(), header.gso_type == GSO_TCPV6);
    }
    assert_eq!((burst.len(), burst.pieces()), (2, 2));
    for frame in burst.frames() {
        let mut flat = Vec::new();
        burst.flatten(frame, &mut flat);
        assert_eq!(flat, good.1);
        assert_eq!(frame.header.hdr_len, 74);
    }
}

proptest! {
    /// Whatever a stack sends passes, behind tags, options and extension headers, and says the same.
    #[test]
    fn m2_true_headers_pass(packet in Packet::any(3000), gso_size in prop_oneof![Just(0u16), 36..2000u16]) {
        let sent = packet.sent(gso_size);
        if packet.payload_at() > VALIDATED_HEAD {
            return Ok(());
        }
        let got = judge(&sent).unwrap();
        prop_assert_eq!((got.csum_start, got.csum_offset), (sent.0.csum_start, sent.0.csum_offset));
        let cut = gso_size > 0 && packet.payload.len() > gso_size.into();
        prop_assert_eq!(got.is_gso(), cut);
        if cut {
            let expected = (sent.0.gso_type, gso_size, packet.payload_at() as u16);
            prop_assert_eq!((got.gso_type, got.gso_size, got.hdr_len), expected);
        }
        prop_assert_eq!(got.check(sent.1.len()), Ok(()));
        prop_assert_eq!(got.validated(&sent.1, sent.1.len(), ALL | got.needs()), Ok(got));
    }

    /// How much of the frame is at hand decides only whether there is a verdict.
    #[test]
    fn m2_fewer_bytes_make_no_other_verdict(packet in Packet::any(500), gso_size in 0..100u16, at_hand in 0..200usize) {
        let sent = packet.sent(gso_size);
        let some = sent.0.validated(&sent.1[..at_hand.min(sent.1.len())], sent.1.len(), ALL);
        // With no more than the prefix at hand, nothing behind it was relied on.
        let all = judge(&sent);
        prop_assert!(some == Err(Invalid::Beyond) || some == all, "{:?} {:?}", some, all);
    }

    /// What passes can be done: by software, and so by a receiver.
    #[test]
    fn m2_what_passes_can_be_cut(
        bytes: [u8; 12],
        packet in Packet::any(2000),
        true_type: bool,
        noise in vec((0..80usize, any::<u8>()), 0..3),
    ) {
        let (own, mut frame) = packet.sent(100);
        for (at, byte) in noise {
            frame.get_mut(at).into_iter().for_each(|place| *place = byte);
        }
        let mut header = Header::from_bytes(&bytes).sanitised();
        if true_type {
            header = Header { gso_size: header.gso_size, hdr_len: header.hdr_len, ..own };
        }
        let Ok(passed) = judge(&(header, frame.clone())) else { return Ok(()) };
        prop_assert!(passed.check(frame.len()).is_ok());
        prop_assert_eq!(passed.flags & F_NEEDS_CSUM, header.flags & F_NEEDS_CSUM);
        if passed.is_gso() {
            let cut = Segmenter::new(&passed, &frame, Checksum::Complete);
            prop_assert!(cut.is_ok(), "{:?} {:?}", cut, passed);
        } else if passed.needs_csum() {
            prop_assert!(usize::from(passed.csum_start) >= 14 + 4);
        }
    }
}

proptest! {
    /// What is evident is what the whole validation says; and the frames for which that is there are evident.
    #[test]
    fn what_is_evident_is_valid(
        v6: bool,
        tcp: bool,
        payload in vec(any::<u8>(), 0..100),
        bytes in vec((0..60usize, any::<u8>()), 0..3),
        fields in vec((0..5usize, any::<u16>()), 0..2),
        cut in 0..200usize,
        offloads: u8,
    ) {
        let packet = Packet::plain(v6, tcp, payload);
        let (_, mut frame) = packet.sent(0);
        let mut header = packet.header();
        let negotiated = Offloads::from_bits_truncate(offloads);
        let evident = |header: Header, frame: &[u8]| {
            let mut first = [0; PREFIX];
            let have = frame.len().min(PREFIX);
            first[..have].copy_from_slice(&frame[..have]);
            header.is_evident(&first, frame.len(), negotiated)
        };
        prop_assert_eq!(evident(header, &frame), negotiated.contains(Offloads::CSUM));
        for (at, byte) in &bytes {
            if let Some(place) = frame.get_mut(*at) {
                *place = *byte;
            }
        }
        for (field, value) in &fields {
            match field {
                0 => header.flags = *value as u8 & (F_NEEDS_CSUM | F_DATA_VALID),
                1 => header.gso_type = *value as u8,
                2 => header.gso_size = *value,
                3 => header.csum_start = *value % 100,
                _ => header.csum_offset = *value % 40,
            }
        }
        frame.truncate(frame.len().saturating_sub(cut % 7 * cut / 7));
        if evident(header, &frame) {
            prop_assert_eq!(header.validated(&frame[..frame.len().min(PREFIX)], frame.len(), negotiated), Ok(header));
        }
    }
}
