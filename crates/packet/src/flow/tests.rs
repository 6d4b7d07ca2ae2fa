use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::testing::Packet;

/// The key of the vectors that Microsoft publishes for receive-side scaling.
const KEY: [u8; KEY_LEN] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0,
    0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42,
    0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

/// Destination, source, hash of the addresses, hash with ports.
const VECTORS_V4: [(&str, &str, u32, u32); 5] = [
    ("161.142.100.80:1766", "66.9.149.187:2794", 0x323e_8fc2, 0x51cc_c178),
    ("65.69.140.83:4739", "199.92.111.2:14230", 0xd718_262a, 0xc626_b0ea),
    ("12.22.207.184:38024", "24.19.198.95:12898", 0xd2d0_a5de, 0x5c2b_394a),
    ("209.142.163.6:2217", "38.27.205.30:48228", 0x8298_9176, 0xafc7_327f),
    ("202.188.127.2:1303", "153.39.163.191:44251", 0x5d18_09c5, 0x10e8_28a2),
];
const VECTORS_V6: [(&str, &str, u32, u32); 3] = [
    ("[3ffe:2501:200:3::1]:1766", "[3ffe:2501:200:1fff::7]:2794", 0x2cc1_8cd5, 0x4020_7d3d),
    ("[ff02::1]:4739", "[3ffe:501:8::260:97ff:fe40:efab]:14230", 0x0f0c_461c, 0xdde5_1bbf),
    (
        "[fe80::200:f8ff:fe21:67cf]:38024",
        "[3ffe:1900:4545:3:200:f8ff:fe21:67cf]:44251",
        0x4b61_e985,
        0x02d1_feef,
    ),
];

fn packet(destination: &str, source: &str, tcp: bool) -> Packet {
    let (destination, source): (std::net::SocketAddr, std::net::SocketAddr) =
        (destination.parse().unwrap(), source.parse().unwrap());
    let octets = |address: std::net::IpAddr| match address {
        std::net::IpAddr::V4(address) => address.octets().to_vec(),
        std::net::IpAddr::V6(address) => address.octets().to_vec(),
    };
    let mut packet = Packet::plain(source.is_ipv6(), tcp, vec![]);
    let addresses = [octets(source.ip()), octets(destination.ip())].concat();
    packet.addresses[..addresses.len()].copy_from_slice(&addresses);
    let ports = [source.port().to_be_bytes(), destination.port().to_be_bytes()].concat();
    packet.ports.copy_from_slice(&ports);
    packet
}

fn swapped(packet: &Packet) -> Packet {
    let mut other = packet.clone();
    let half = if packet.v6 { 16 } else { 4 };
    other.addresses[..2 * half].rotate_left(half);
    other.ports.rotate_left(2);
    other
}

/// The definition, bit by bit.
fn by_definition(key: &[u8], input: &[u8]) -> u32 {
    let bit = |bytes: &[u8], at: usize| bytes.get(at / 8).map_or(0, |byte| byte >> (7 - at % 8) & 1);
    (0..input.len() * 8).filter(|&at| bit(input, at) == 1).fold(0, |hash, at| {
        hash ^ (0..32).fold(0, |window, step| window << 1 | u32::from(bit(key, at + step)))
    })
}

#[test]
fn clause_5_1_6_4_3_published_vectors() {
    let (addresses, all) = (HashTypes::IPV4 | HashTypes::IPV6, HashTypes::all());
    for (version, vectors) in [(0, &VECTORS_V4[..]), (3, &VECTORS_V6[..])] {
        for &(destination, source, ip, ports) in vectors {
            for (tcp, transport) in [(true, 1), (false, 2)] {
                let frame = packet(destination, source, tcp).partial();
                let hash = RssHasher::new(addresses, &KEY).hash(&frame);
                assert_eq!(hash, PacketHash { value: ip, report: version + 1 }, "{source}");
                let hash = RssHasher::new(all, &KEY).hash(&frame[..frame.len().min(64)]);
                assert_eq!(hash, PacketHash { value: ports, report: version + transport + 1 }, "{source}");
            }
        }
    }
}

#[test]
fn clause_5_1_6_4_3_1_types_that_are_not_enabled_are_not_hashed() {
    for (v6, tcp) in [(false, false), (false, true), (true, false), (true, true)] {
        let frame = Packet::plain(v6, tcp, vec![]).partial();
        let [ip, with_ports] = match (v6, tcp) {
            (false, true) => [HashTypes::IPV4, HashTypes::TCPV4],
            (false, false) => [HashTypes::IPV4, HashTypes::UDPV4],
            (true, true) => [HashTypes::IPV6, HashTypes::TCPV6],
            (true, false) => [HashTypes::IPV6, HashTypes::UDPV6],
        };
        for bits in 0..1 << 9 {
            let types = HashTypes::from_bits_retain(bits);
            let expected = if types.contains(with_ports) { with_ports } else { types & ip };
            assert_eq!(RssHasher::new(types, &KEY).hash(&frame).report, expected.report(), "{types:?}");
        }
    }
    // ARP.
    let mut frame = Packet::plain(false, true, vec![]).partial();
    frame[13] = 6;
    assert_eq!(RssHasher::new(HashTypes::all(), &KEY).hash(&frame), PacketHash::NONE);
}

/// Home address and routing header in the order of RFC 8200, before TCP.
fn extended() -> (Vec<u8>, [u8; 16], [u8; 16]) {
    let (home, route) = ([0x11; 16], [0x22; 16]);
    let whole = Packet::plain(true, true, vec![]);
    let mut frame = whole.partial();
    let tcp = frame.split_off(54);
    frame[20] = 60;
    // Destination options: two bytes of padding (PadN), then the option; 24 bytes.
    frame.extend([&[43, 2, 1, 0, 0, 0, 201, 16][..], &home].concat());
    frame.extend([&[6, 2, 2, 1, 0, 0, 0, 0][..], &route].concat());
    frame.extend(tcp);
    (frame, home, route)
}

#[test]
fn clause_5_1_6_4_3_4_extension_headers_replace_addresses() {
    let (frame, home, route) = extended();
    let ports = [1, 2, 3, 4];
    let hash = |types| RssHasher::new(types, &KEY).hash(&frame);
    let tcp = by_definition(&KEY, &[&home[..], &route, &ports].concat());
    assert_eq!(hash(HashTypes::all()), PacketHash { value: tcp, report: 8 });
    let ip = by_definition(&KEY, &[home, route].concat());
    assert_eq!(hash(HashTypes::IP_EX | HashTypes::TCPV6), PacketHash { value: ip, report: 7 });
    // Otherwise extension headers are skipped.
    let tcp = by_definition(&KEY, &[&[9; 32][..], &ports].concat());
    assert_eq!(hash(HashTypes::SHORT), PacketHash { value: tcp, report: 5 });
    // As far as they can be seen.
    let short = RssHasher::new(HashTypes::SHORT, &KEY).hash(&frame[..64]);
    assert_eq!(short, PacketHash { value: by_definition(&KEY, &[9; 32]), report: 4 });
}

#[test]
fn fragments_of_a_datagram_have_one_hash() {
    let hasher = RssHasher::new(HashTypes::all(), &KEY);
    let mut first = packet(VECTORS_V4[0].0, VECTORS_V4[0].1, false).partial();
    first.extend([0; 20]);
    let mut second = first.clone();
    first[20] = 0x20;
    second[21] = 1;
    second[34..42].copy_from_slice(b"the rest");
    assert_eq!(flow_hash(&first), flow_hash(&second));
    for frame in [&first, &second] {
        assert_eq!(hasher.hash(frame), PacketHash { value: VECTORS_V4[0].2, report: 1 });
    }
    // IPv6: the fragment header names the protocol in every fragment.
    let fragment = |offset_and_more: [u8; 2], behind: &[u8]| {
        let mut frame = Packet::plain(true, false, vec![]).partial();
        frame.truncate(54);
        frame[20] = 44;
        frame.extend([&[17, 0][..], &offset_and_more, &[0, 0, 0, 7], behind].concat());
        frame
    };
    let (first, second) = (fragment([0, 1], &[1, 2, 3, 4, 5, 6, 7, 8]), fragment([5, 0], b"the rest"));
    assert_eq!(flow_hash(&first), flow_hash(&second));
    assert_eq!(hasher.hash(&first), hasher.hash(&second));
    // One that is alone is a whole packet.
    let alone = fragment([0, 0], &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_ne!(flow_hash(&alone), flow_hash(&first));
    assert_eq!([&first, &second].map(|fragment| one_way_flow_hash(fragment)), [None; 2]);
    assert_eq!(hasher.hash(&alone).report, 9);
}

#[test]
fn frames_without_ip_are_told_apart_by_their_addresses() {
    let mut frame = [0x11; 60];
    let first = flow_hash(&frame);
    frame[59] = 0;
    assert_eq!(flow_hash(&frame), first);
    frame[11] = 0;
    let second = flow_hash(&frame);
    assert_ne!(second, first);
    frame[..12].rotate_left(6);
    assert_eq!(flow_hash(&frame), second, "both directions");
}

#[test]
fn flows_spread_over_queues_of_any_number() {
    let spread = |count: u16, queues: usize, make: &dyn Fn(u16) -> Packet| {
        let (mut low, mut high) = (vec![0; queues], vec![0; queues]);
        for flow in 0..count {
            let hash = flow_hash(&make(flow).partial());
            low[hash as usize % queues] += 1;
            high[((u64::from(hash) * queues as u64) >> 32) as usize] += 1;
        }
        let fair = usize::from(count) / queues;
        for count in low.into_iter().chain(high) {
            assert!(
                (fair * 3 / 4..fair * 5 / 4).contains(&count),
                "{count} of {queues} queues, {fair} expected"
            );
        }
    };
    for (queues, v6) in [2, 3, 4, 7, 8, 16].into_iter().flat_map(|queues| [(queues, false), (queues, true)]) {
        spread(8192, queues, &|flow| {
            let mut packet = Packet::plain(v6, true, vec![]);
            packet.ports[..2].copy_from_slice(&flow.to_be_bytes());
            packet
        });
        // Neighbours that talk to themselves over one port.
        spread(8192, queues, &|flow| {
            let mut packet = Packet::plain(v6, false, vec![]);
            let half = if v6 { 16 } else { 4 };
            for end in [half - 2, 2 * half - 2] {
                packet.addresses[end..end + 2].copy_from_slice(&flow.to_be_bytes());
            }
            packet
        });
    }
}

#[test]
fn different_flows_have_different_hashes() {
    for v6 in [false, true] {
        let (mut seen, mut one_way) = (BTreeSet::new(), BTreeSet::new());
        for flow in 0..10_000u16 {
            let mut packet = Packet::plain(v6, flow % 2 == 0, vec![]);
            packet.ports[..2].copy_from_slice(&(flow / 2).to_be_bytes());
            let frame = packet.partial();
            seen.insert(flow_hash(&frame));
            // The bits that a filter of 512 uses.
            one_way.extend(one_way_flow_hash(&frame).map(|hash| hash >> 23));
        }
        // Of 32 bits: by chance a hundredth of a collision.
        assert!(seen.len() > 9_995, "{}", seen.len());
        assert_eq!(one_way.len(), 512);
    }
}

proptest! {
    #[test]
    fn tables_agree_with_the_definition(key in vec(any::<u8>(), 0..48), input in vec(any::<u8>(), 0..=36)) {
        let key: Vec<u8> = key.into_iter().take(KEY_LEN).collect();
        prop_assert_eq!(Toeplitz::new(&key).hash(&input), by_definition(&key, &input));
    }

    #[test]
    fn the_symmetric_key_and_the_flow_hash_see_no_direction(packet in Packet::any(0)) {
        let (one, other) = (packet.partial(), swapped(&packet).partial());
        prop_assert_eq!(flow_hash(&one), flow_hash(&other));
        let hasher = RssHasher::new(HashTypes::all(), &SYMMETRIC_KEY);
        prop_assert_eq!(hasher.hash(&one), hasher.hash(&other));
        prop_assert!(hasher.hash(&one).get().is_some());
    }

    #[test]
    fn every_packet_of_a_flow_has_one_flow_hash(
        packet in Packet::any(40), identification: u16, sequence: u32, flags: u8, tcp_options in 0..=10usize,
    ) {
        let other =
            Packet { identification, sequence, flags, tcp_options, payload: vec![7; 9], ..packet.clone() };
        let (one, other) = (packet.partial(), other.partial());
        prop_assert_eq!(flow_hash(&one), flow_hash(&other));
        prop_assert_eq!(one_way_flow_hash(&one), one_way_flow_hash(&other));
    }

    #[test]
    fn the_short_way_agrees_with_the_general_one(packet in Packet::any(40)) {
        let frame = packet.partial();
        prop_assert_eq!(flow_hash(&frame), flow_hash_general(&frame));
        let plain = packet.tags == 0 && packet.options == 0;
        prop_assert_eq!(one_way_flow_hash(&frame).is_some(), plain);
    }

    #[test]
    fn any_bytes_do_no_harm(mut frame in vec(any::<u8>(), 0..200), kind in 0..3usize, next in 0..6usize) {
        let kind = [None, Some(ether::TYPE_IPV4), Some(ether::TYPE_IPV6)][kind];
        if let (Some(ether_type), Some(kind)) = (frame.get_mut(12..14), kind) {
            ether_type.copy_from_slice(&kind.to_be_bytes());
        }
        if let (Some([version, .., proto]), Some(ether::TYPE_IPV6)) = (frame.get_mut(14..21), kind) {
            (*version, *proto) = (0x60, [0, 43, 44, 51, 60, 6][next]);
        }
        prop_assert_eq!(flow_hash(&frame), flow_hash_general(&frame));
        let hash = RssHasher::new(HashTypes::all(), &KEY).hash(&frame);
        prop_assert!(hash.report <= PacketHash::LAST_REPORT);
    }
}
