use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use ringferry_memory::ReadSlice;
use ringferry_packet::ether::rarp_announcement;
use ringferry_packet::extension::{
    AUTHENTICATION, DESTINATION_OPTIONS, HOP_BY_HOP, HOST_IDENTITY, MOBILITY, ROUTING, SHIM6,
};
use ringferry_packet::vnet::F_NEEDS_CSUM;

use super::*;
use crate::rules::Network;

const OWN: Mac = Mac([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
const SECOND: Mac = Mac([0x52, 0x54, 0, 0, 0, 2]);
const OTHER: Mac = Mac([0x52, 0x54, 0, 0, 0, 9]);
const MACS: [Mac; 3] = [OWN, SECOND, OTHER];

const V4_OWN: [u8; 4] = [10, 0, 0, 1];
const V4_NET: [u8; 4] = [10, 1, 77, 5];
const V4_OTHER: [u8; 4] = [10, 2, 0, 1];
const V4S: [[u8; 4]; 4] = [[0; 4], V4_OWN, V4_NET, V4_OTHER];

const V6_OWN: &str = "2001:db8::1";
/// The link-local address made of `OWN` (RFC 4291, appendix A).
const V6_LOCAL: &str = "fe80::5054:ff:fe12:3456";
const V6_OTHER: &str = "2001:db8::9";
const V6_LOCAL_OTHER: &str = "fe80::5054:ff:fe00:9";
const V6S: [&str; 5] = ["::", V6_OWN, V6_LOCAL, V6_OTHER, V6_LOCAL_OTHER];
const ALL_NODES: &str = "ff02::1";

fn rules(ips: bool) -> rules::Guard {
    let network = |text: &str, bits| Network { address: text.parse().unwrap(), bits };
    let networks = vec![network("10.0.0.1", 32), network("10.1.0.0", 16), network(V6_OWN, 128)];
    rules::Guard { macs: vec![OWN, SECOND], ips: ips.then_some(networks) }
}

fn guard() -> SourceGuard {
    SourceGuard::new(&rules(true))
}

fn judge_with(guard: &SourceGuard, header: Header, frame: &[u8]) -> Judgement {
    let mut burst = Burst::new();
    burst.push(header, ReadSlice::from(frame));
    guard.judge(&burst, &burst.frames()[0])
}

fn judge(frame: &[u8]) -> Judgement {
    judge_with(&guard(), Header::NONE, frame)
}

fn passes(frame: &[u8]) -> bool {
    judge(frame) != Judgement::Spoofed
}

fn v6(text: &str) -> [u8; 16] {
    text.parse::<std::net::Ipv6Addr>().unwrap().octets()
}

/// The parameters of a generated frame.
#[derive(Clone, Debug)]
struct Sample {
    source: Mac,
    tags: Vec<u16>,
    body: Body,
}

#[derive(Clone, Debug)]
enum Body {
    Arp {
        ether_type: u16,
        operation: u16,
        mac: Mac,
        sender: [u8; 4],
        target: [u8; 4],
    },
    V4 {
        source: [u8; 4],
        options: u8,
        fragment: u16,
        proto: u8,
        ports: [u16; 2],
    },
    V6 {
        source: &'static str,
        to: &'static str,
        extensions: Vec<(u8, u8)>,
        fragment: Option<u16>,
        carries: Carries,
    },
    Raw {
        ether_type: u16,
        bytes: Vec<u8>,
    },
}

#[derive(Clone, Debug)]
enum Carries {
    Tcp,
    Icmp { kind: u8, target: &'static str, options: Vec<(u8, Mac)> },
}

impl Sample {
    fn new(body: Body) -> Self {
        Self { source: OWN, tags: vec![], body }
    }

    fn frame(&self) -> Vec<u8> {
        let mut frame = [&[0xff; 6][..], &self.source.0].concat();
        for tag in &self.tags {
            frame.extend(tag.to_be_bytes());
            frame.extend(5_u16.to_be_bytes());
        }
        let ether_type = match self.body {
            Body::Arp { ether_type, .. } | Body::Raw { ether_type, .. } => ether_type,
            Body::V4 { .. } => TYPE_IPV4,
            Body::V6 { .. } => TYPE_IPV6,
        };
        frame.extend(ether_type.to_be_bytes());
        match &self.body {
            Body::Arp { operation, mac, sender, target, .. } => {
                frame.extend([0, 1, 8, 0, 6, 4]);
                frame.extend(operation.to_be_bytes());
                frame.extend([&mac.0[..], sender, &[0; 6], target, &[0; 18]].concat());
            }
            Body::V4 { source, options, fragment, proto, ports } => {
                let mut header = vec![0; 20 + 4 * usize::from(*options)];
                header[0] = 0x45 + options;
                header[6..8].copy_from_slice(&fragment.to_be_bytes());
                header[9] = *proto;
                header[12..16].copy_from_slice(source);
                header[16..20].copy_from_slice(&[255; 4]);
                frame.extend(header);
                frame.extend(ports.iter().flat_map(|port| port.to_be_bytes()));
                frame.extend([0; 40]);
            }
            Body::V6 { source, to, extensions, fragment, carries } => {
                let mut chain: Vec<(u8, Vec<u8>)> = extensions
                    .iter()
                    .map(|(kind, units)| {
                        let unit = if *kind == AUTHENTICATION { 4 } else { 8 };
                        (*kind, [&[0, *units][..], &vec![0; 6 + unit * usize::from(*units)]].concat())
                    })
                    .collect();
                if let Some(position) = fragment {
                    let [high, low] = position.to_be_bytes();
                    chain.push((FRAGMENT, vec![0, 0, high, low, 1, 2, 3, 4]));
                }
                chain.push(match carries {
                    Carries::Tcp => (6, vec![0x50; 20]),
                    Carries::Icmp { kind, target, options } => {
                        let mut message = vec![0; 24];
                        message[0] = *kind;
                        message[8..24].copy_from_slice(&v6(target));
                        if *kind == ROUTER_SOLICITATION {
                            message.truncate(8);
                        }
                        for (kind, mac) in options {
                            message.extend([&[*kind, 1][..], &mac.0].concat());
                        }
                        (ICMPV6, message)
                    }
                });
                let len: usize = chain.iter().map(|(_, bytes)| bytes.len()).sum();
                frame.extend([0x60, 0, 0, 0]);
                frame.extend((len as u16).to_be_bytes());
                frame.extend([chain[0].0, 255]);
                frame.extend([v6(source), v6(to)].concat());
                for at in 0..chain.len() {
                    if let Some((next, _)) = chain.get(at + 1) {
                        let next = *next;
                        chain[at].1[0] = next;
                    }
                    frame.extend(&chain[at].1);
                }
            }
            Body::Raw { bytes, .. } => frame.extend(bytes),
        }
        frame
    }

    /// Oracle: returns true if everything that the frame says of its sender is true, or if a host without an
    /// address may say it. Does not read bytes.
    fn honest(&self, ips: bool) -> bool {
        let mac = |mac: &Mac| [OWN, SECOND].contains(mac);
        let v4 = |address: &[u8; 4]| !ips || *address == V4_OWN || address[..2] == [10, 1];
        let v6 = |address: &str| !ips || [V6_OWN, V6_LOCAL].contains(&address);
        let body = match &self.body {
            Body::Arp { ether_type, operation, mac: sha, sender, target } => {
                let probe = *ether_type == TYPE_RARP || *operation == REQUEST && v4(target);
                mac(sha) && (v4(sender) || *sender == [0; 4] && probe)
            }
            Body::V4 { source, fragment, proto, ports, .. } => {
                let dhcp = *source == [0; 4] && *proto == PROTO_UDP && *ports == [68, 67] && *fragment == 0;
                v4(source) || dhcp
            }
            Body::V6 { source, to, fragment, carries, .. } => {
                let later = fragment.is_some_and(|position| position > 7);
                let whole = fragment.is_none();
                let anonymous = *source == "::" && *to == ALL_NODES && whole;
                match carries {
                    Carries::Icmp { kind: 133..=137, .. } if fragment.is_some() && !later => false,
                    Carries::Icmp { kind: kind @ 133..=137, target, options } if whole => {
                        let names = options.iter().filter(|(kind, _)| *kind == 1 || *kind == 2);
                        let named = names.clone().all(|(_, named)| mac(named));
                        let unnamed = names.count() == 0;
                        let claims = *kind == 136 || *kind == 135 && *source == "::";
                        let from = v6(source) || anonymous && unnamed && [133, 135].contains(kind);
                        from && named && (!claims || v6(target))
                    }
                    Carries::Icmp { kind: 131 | 132 | 143, .. } if !later => v6(source) || anonymous,
                    _ => v6(source),
                }
            }
            Body::Raw { .. } => true,
        };
        // Tags from before 802.1ad hide what is behind them.
        let plain = self.tags.iter().all(|tag| [TYPE_VLAN, TYPE_SERVICE_VLAN].contains(tag));
        mac(&self.source) && self.tags.len() <= 2 && plain && body
    }
}

fn sample() -> impl Strategy<Value = Sample> {
    let v4 = || select(&V4S[..]);
    let v6 = || select(&V6S[..]);
    let mac = || select(&MACS[..]);
    let arp = (select(&[TYPE_ARP, TYPE_ARP, TYPE_RARP][..]), 1..4u16, mac(), v4(), v4()).prop_map(
        |(ether_type, operation, mac, sender, target)| Body::Arp {
            ether_type,
            operation,
            mac,
            sender,
            target,
        },
    );
    let ports = select(&[[68, 67], [68, 67], [67, 68], [1000, 53]][..]);
    let ipv4 = (v4(), 0..11u8, select(&[0, 0, 0x2000, 5][..]), select(&[6, PROTO_UDP][..]), ports).prop_map(
        |(source, options, fragment, proto, ports)| Body::V4 { source, options, fragment, proto, ports },
    );
    let kinds = [HOP_BY_HOP, ROUTING, AUTHENTICATION, DESTINATION_OPTIONS, MOBILITY, HOST_IDENTITY, SHIM6];
    let extensions = prop_oneof![2 => Just(vec![]), 1 => vec((select(kinds.to_vec()), 0..3u8), 0..4)];
    let fragment = select(&[None, None, None, Some(0), Some(1), Some(8), Some(0xfff9)][..]);
    let options = vec((select(&[1, 2, 14][..]), mac()), 0..3);
    let icmp = (select(&[128, 131, 132, 133, 135, 135, 136, 136, 143][..]), v6(), options)
        .prop_map(|(kind, target, options)| Carries::Icmp { kind, target, options });
    let carries = prop_oneof![1 => Just(Carries::Tcp), 4 => icmp];
    let ipv6 = (v6(), select(&[ALL_NODES, ALL_NODES, V6_OTHER][..]), extensions, fragment, carries).prop_map(
        |(source, to, extensions, fragment, carries)| Body::V6 { source, to, extensions, fragment, carries },
    );
    let raw = (select(&[0x0800, 0x86dd, 0x88cc, 0x8847, 100][..]), vec(any::<u8>(), 0..90))
        .prop_map(|(ether_type, bytes)| Body::Raw { ether_type, bytes });
    let body = prop_oneof![2 => arp, 2 => ipv4, 6 => ipv6, 1 => raw];
    let tags = prop_oneof![3 => Just(vec![]), 1 => vec(select(&[TYPE_VLAN, TYPE_SERVICE_VLAN, 0x9100, 0x9300][..]), 0..4)];
    let source = prop_oneof![9 => Just(OWN), 1 => mac()];
    (source, tags, body).prop_map(|(source, tags, body)| Sample { source, tags, body })
}

/// Builds a neighbour discovery message from `source`.
fn neighbour(kind: u8, source: &'static str, target: &'static str, options: Vec<(u8, Mac)>) -> Sample {
    let carries = Carries::Icmp { kind, target, options };
    Sample::new(Body::V6 { source, to: ALL_NODES, extensions: vec![], fragment: None, carries })
}

#[test]
fn only_own_ethernet_addresses_may_send() {
    for (source, fine) in [(OWN, true), (SECOND, true), (OTHER, false), (Mac::BROADCAST, false)] {
        let body = Body::Raw { ether_type: 0x88cc, bytes: vec![1; 46] };
        assert_eq!(passes(&Sample { source, tags: vec![], body }.frame()), fine, "{source}");
    }
    let nobody = SourceGuard::new(&rules::Guard::default());
    let body = Body::Raw { ether_type: 0x88cc, bytes: vec![1; 46] };
    assert_eq!(judge_with(&nobody, Header::NONE, &Sample::new(body).frame()), Judgement::Spoofed);
}

#[test]
fn own_announcements_pass() {
    assert!(passes(&rarp_announcement(OWN)));
    assert!(!passes(&rarp_announcement(OTHER)));
}

/// Covers probe and announcement (RFC 5227, 2.1.1 and 2.3), and the messages of ARP spoofing.
/// A next hop may go by a tag of old whose payload nobody here looks at: an address of another guest passed behind one.
#[test]
fn tags_of_old_hide_nothing() {
    let body = neighbour(135, "fe80::1", "fe80::2", vec![]).body;
    for tag in [0x9100, 0x9200, 0x9300] {
        for tags in [vec![tag], vec![TYPE_VLAN, tag], vec![TYPE_SERVICE_VLAN, TYPE_VLAN, tag]] {
            let frame = Sample { source: OWN, tags, body: body.clone() }.frame();
            assert_eq!(judge(&frame), Judgement::Spoofed, "{tag:#x}");
        }
    }
}

#[test]
fn arp_claims_only_own_addresses() {
    let arp = |operation, mac, sender, target| {
        passes(&Sample::new(Body::Arp { ether_type: TYPE_ARP, operation, mac, sender, target }).frame())
    };
    assert!(arp(1, OWN, [0; 4], V4_OWN), "a probe");
    assert!(arp(1, OWN, V4_OWN, V4_OWN), "an announcement");
    assert!(arp(2, OWN, V4_OWN, V4_OTHER), "an answer");
    assert!(!arp(2, OWN, V4_OTHER, V4_OWN), "an answer for another");
    assert!(!arp(2, OTHER, V4_OWN, V4_OTHER), "an answer with another's MAC");
    assert!(!arp(2, OWN, [0; 4], V4_OWN), "an answer of nobody");
    assert!(!arp(1, OWN, [0; 4], V4_OTHER), "a probe that keeps another from its address");
    let mut frame = Sample::new(Body::Arp {
        ether_type: TYPE_ARP,
        operation: 1,
        mac: OWN,
        sender: V4_OWN,
        target: V4_OWN,
    })
    .frame();
    frame[15] = 6;
    assert!(!passes(&frame), "hardware type 6, which Linux takes for Ethernet");
}

/// Covers RFC 4861, 7, and the messages of neighbour discovery spoofing.
#[test]
fn neighbour_discovery_claims_only_own_addresses() {
    let cases = [
        (neighbour(136, V6_LOCAL, V6_OWN, vec![(2, OWN)]), true),
        (neighbour(136, V6_LOCAL, V6_OTHER, vec![(2, OWN)]), false),
        (neighbour(136, V6_LOCAL, V6_OWN, vec![(2, OTHER)]), false),
        (neighbour(136, V6_OTHER, V6_OWN, vec![(2, OWN)]), false),
        (neighbour(136, V6_LOCAL, V6_OWN, vec![(14, OTHER), (2, OTHER)]), false),
        (neighbour(135, V6_OWN, V6_OTHER, vec![(1, OWN)]), true),
        (neighbour(135, V6_OWN, V6_OTHER, vec![(1, OTHER)]), false),
        (neighbour(135, "::", V6_OWN, vec![(14, OTHER)]), true),
        (neighbour(135, "::", V6_OWN, vec![(1, OWN)]), false),
        (neighbour(135, "::", V6_OTHER, vec![]), false),
        (neighbour(133, "::", "::", vec![]), true),
        (neighbour(136, "::", V6_OWN, vec![]), false),
        (neighbour(134, "::", "::", vec![]), false),
        (neighbour(143, "::", "::", vec![]), true),
        (neighbour(128, "::", "::", vec![]), false),
    ];
    for (sample, fine) in cases {
        assert_eq!(passes(&sample.frame()), fine, "{sample:?}");
    }
}

/// RFC 6980 and RFC 7113, 2: how filters for neighbour discovery were evaded.
#[test]
fn neighbour_discovery_cannot_hide() {
    let hidden = |extensions: Vec<(u8, u8)>, fragment| {
        let carries = Carries::Icmp { kind: 136, target: V6_OWN, options: vec![(2, OWN)] };
        Sample::new(Body::V6 { source: V6_LOCAL, to: ALL_NODES, extensions, fragment, carries }).frame()
    };
    assert!(passes(&hidden(vec![(HOP_BY_HOP, 0), (DESTINATION_OPTIONS, 2)], None)));
    assert!(!passes(&hidden(vec![(DESTINATION_OPTIONS, 0)], Some(0))), "an atomic fragment");
    assert!(!passes(&hidden(vec![], Some(1))), "the first of several fragments");
    assert!(!passes(&hidden(vec![(DESTINATION_OPTIONS, 200)], None)), "too deep to be looked at");
    assert!(!passes(&hidden(vec![(HOP_BY_HOP, 0); 40], None)), "behind too many headers");
    let long = neighbour(136, V6_LOCAL, V6_OWN, vec![(14, OWN); 40]).frame();
    assert!(!passes(&long), "options too far away to be looked at");
    let mut endless = neighbour(136, V6_LOCAL, V6_OWN, vec![(14, OWN)]).frame();
    endless[14 + 40 + 24 + 1] = 0;
    assert!(!passes(&endless), "an option of no length");
    let whole = hidden(vec![(DESTINATION_OPTIONS, 0)], None);
    for len in 14..whole.len() {
        assert!(!passes(&whole[..len]), "cut to {len} bytes");
    }
}

/// RFC 6105: a port of hosts has no router behind it, whatever addresses it may use.
#[test]
fn l_routers_do_not_speak_from_guarded_ports() {
    // Well formed, as an option of neighbour discovery begins in the middle of the target, and another two behind it.
    let target = "2001:db8:0:0:e01::1";
    let advertisement = neighbour(134, V6_LOCAL, target, vec![]).frame();
    let redirect = neighbour(137, V6_LOCAL, target, vec![(14, OWN), (14, OWN)]).frame();
    for guard in [guard(), SourceGuard::new(&rules(false))] {
        assert_eq!(judge_with(&guard, Header::NONE, &advertisement), Judgement::Spoofed);
        assert_eq!(judge_with(&guard, Header::NONE, &redirect), Judgement::Spoofed);
    }
}

/// RFC 7112: the padding of the first fragment must not be taken for the beginning of the second.
#[test]
fn l1_nothing_counts_behind_the_end_of_a_packet() {
    let carries = Carries::Icmp { kind: 128, target: V6_OWN, options: vec![] };
    let packet = |fragment| Body::V6 {
        source: V6_LOCAL,
        to: ALL_NODES,
        extensions: vec![],
        fragment,
        carries: carries.clone(),
    };
    let mut first = Sample::new(packet(Some(1))).frame();
    assert!(passes(&first));
    first[18..20].copy_from_slice(&[0, 8]);
    assert!(!passes(&first), "the packet ends with its fragment header");
    let mut whole = Sample::new(packet(None)).frame();
    whole.extend([0; 20]);
    assert!(passes(&whole), "padding does no harm");
    whole[18..20].copy_from_slice(&[0, 0]);
    assert!(!passes(&whole), "nothing but padding");
}

/// RFC 6275, 6.3 and 9.3.1: a correspondent goes on as if the home address were the source.
#[test]
fn l_no_home_address_replaces_the_source() {
    let carries = Carries::Tcp;
    let body = Body::V6 {
        source: V6_OWN,
        to: V6_OTHER,
        extensions: vec![(DESTINATION_OPTIONS, 2)],
        fragment: None,
        carries,
    };
    let mut frame = Sample::new(body).frame();
    assert!(passes(&frame));
    let options = 14 + 40 + 2;
    frame[options..options + 6].copy_from_slice(&[1, 2, 0, 0, 0xc9, 16]);
    assert!(!passes(&frame));
    let only_macs = SourceGuard::new(&rules(false));
    assert_ne!(judge_with(&only_macs, Header::NONE, &frame), Judgement::Spoofed, "no address is guarded");
    frame[options + 4] = 0x1e;
    assert!(passes(&frame), "another option");
    frame[options + 5] = 17;
    assert!(!passes(&frame), "options that do not end with their header");
}

/// RFC 2131, 4.1: a host without an address knows no server either.
#[test]
fn l_without_an_address_only_a_broadcast_passes() {
    let discover = Body::V4 { source: [0; 4], options: 0, fragment: 0, proto: 17, ports: [68, 67] };
    let mut frame = Sample::new(discover).frame();
    assert!(passes(&frame));
    frame[30..34].copy_from_slice(&V4_OTHER);
    assert!(!passes(&frame));
}

/// RFC 1042: some hosts read IP behind LLC and SNAP.
#[test]
fn ip_behind_snap_does_not_pass() {
    let snap = |ether_type: u16| {
        let bytes = [&[0xaa, 0xaa, 3, 0, 0, 0][..], &ether_type.to_be_bytes(), &[0x45; 60]].concat();
        passes(&Sample::new(Body::Raw { ether_type: bytes.len() as u16, bytes }).frame())
    };
    assert!(!snap(TYPE_IPV4) && !snap(TYPE_IPV6) && !snap(TYPE_ARP) && !snap(TYPE_VLAN));
    assert!(snap(0x809b), "AppleTalk");
}

#[test]
fn without_ip_rules_only_link_layer_addresses_count() {
    let guard = SourceGuard::new(&rules(false));
    let ip = Body::V4 { source: V4_OTHER, options: 0, fragment: 0, proto: 6, ports: [1, 2] };
    assert_eq!(judge_with(&guard, Header::NONE, &Sample::new(ip).frame()), Judgement::Fine);
    let advertisement = |mac| neighbour(136, V6_OTHER, V6_OTHER, vec![(2, mac)]).frame();
    assert_eq!(judge_with(&guard, Header::NONE, &advertisement(OWN)), Judgement::FineIfStable);
    assert_eq!(judge_with(&guard, Header::NONE, &advertisement(OTHER)), Judgement::Spoofed);
}

/// Common traffic needs no private copy.
#[test]
fn what_is_sent_most_is_judged_by_its_first_bytes() {
    let tcp = |tags, source| {
        let v4 = Body::V4 { source, options: 0, fragment: 0, proto: 6, ports: [1, 2] };
        judge(&Sample { source: OWN, tags, body: v4 }.frame())
    };
    assert_eq!(tcp(vec![], V4_OWN), Judgement::Fine);
    assert_eq!(tcp(vec![TYPE_SERVICE_VLAN, TYPE_VLAN], V4_NET), Judgement::Fine);
    assert_eq!(tcp(vec![], V4_OTHER), Judgement::Spoofed);
    for carries in [Carries::Tcp, Carries::Icmp { kind: 128, target: "::", options: vec![(0, OWN); 9] }] {
        let v6 = Body::V6 { source: V6_OWN, to: V6_OTHER, extensions: vec![], fragment: None, carries };
        let sample = Sample { source: OWN, tags: vec![TYPE_SERVICE_VLAN, TYPE_VLAN], body: v6 };
        assert_eq!(judge(&sample.frame()), Judgement::Fine);
    }
    let discover = Body::V4 { source: [0; 4], options: 0, fragment: 0, proto: 17, ports: [68, 67] };
    assert_eq!(judge(&Sample::new(discover).frame()), Judgement::Fine);
}

/// `allowed_ips=none`: neither the address that a host makes of its MAC address, nor what one without an address may ask for.
#[test]
fn where_no_address_is_allowed_there_is_no_ip() {
    let none = SourceGuard::new(&rules::Guard { ips: Some(Vec::new()), ..rules(true) });
    let discover = Body::V4 { source: [0; 4], options: 0, fragment: 0, proto: 17, ports: [68, 67] };
    let probe =
        Body::Arp { ether_type: 0x0806, operation: REQUEST, mac: OWN, sender: [0; 4], target: V4_OWN };
    let solicitation = neighbour(133, V6_LOCAL, V6_OWN, vec![]);
    for sample in [Sample::new(discover), Sample::new(probe), solicitation] {
        assert_eq!(judge(&sample.frame()), Judgement::Fine);
        assert_eq!(judge_with(&none, Header::NONE, &sample.frame()), Judgement::Spoofed);
    }
    let other = Body::Raw { ether_type: 0x88b5, bytes: vec![1; 46] };
    assert_eq!(judge_with(&none, Header::NONE, &Sample::new(other).frame()), Judgement::Fine);
    assert_ne!(judge_with(&none, Header::NONE, &rarp_announcement(OWN)), Judgement::Spoofed);
}

#[test]
fn networks_are_ranges() {
    assert_eq!(range(0x0a01_0203, 32, 16), (0x0a01_0000, 0x0a01_ffff));
    assert_eq!(range(0, 32, 0), (0, u32::MAX.into()));
    assert_eq!(range(5, 32, 32), (5, 5));
    assert_eq!(range(5, 128, 0), (0, u128::MAX));
    assert_eq!(range(5, 128, 128), (5, 5));
    assert_eq!(link_local(OWN).to_be_bytes(), v6(V6_LOCAL));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Exactly the frames that tell the truth pass, however the frame lies in memory.
    #[test]
    fn honest_frames_pass_and_no_others(sample in sample(), ips: bool, cuts in vec(1..300usize, 0..4)) {
        prop_assume!(!matches!(sample.body, Body::Raw { ether_type: 0x0800 | 0x86dd | 100, .. }));
        let frame = sample.frame();
        let guard = SourceGuard::new(&rules(ips));
        let judgement = judge_with(&guard, Header::NONE, &frame);
        prop_assert_eq!(judgement != Judgement::Spoofed, sample.honest(ips));
        let mut burst = Burst::new();
        let mut builder = burst.build(Header::NONE, frame.len() as u32);
        let mut rest = &frame[..];
        for cut in cuts {
            let (piece, after) = rest.split_at(cut.min(rest.len()));
            builder.piece(ReadSlice::from(piece));
            rest = after;
        }
        builder.piece(ReadSlice::from(rest));
        builder.finish();
        prop_assert_eq!(guard.judge(&burst, &burst.frames()[0]), judgement);
    }

    /// A frame that was judged fine without reservation stays fine whatever its sender writes behind the
    /// private copy.
    #[test]
    fn later_changes_do_not_matter(sample in sample(), ips: bool, byte: u8, noise in vec(any::<u8>(), 300)) {
        let guard = SourceGuard::new(&rules(ips));
        let mut frame = sample.frame();
        if judge_with(&guard, Header::NONE, &frame) == Judgement::Fine && frame.len() > PREFIX {
            for (at, noise) in frame[PREFIX..].iter_mut().zip(noise) {
                *at = noise ^ byte;
            }
            prop_assert_eq!(judge_with(&guard, Header::NONE, &frame), Judgement::Fine);
        }
    }

    /// Software or a NIC later writes two bytes that the sender chose, where the header says.
    #[test]
    fn checksum_that_is_filled_in_later_changes_no_verdict(
        sample in sample(),
        ips: bool,
        start in 14..120u16,
        offset in 0..20u16,
        written in prop_oneof![any::<[u8; 2]>(), select(&[[8, 0], [0x86, 0xdd], [0xaa, 0xaa], [136, 0], [10, 2], [58, 0]][..])],
    ) {
        let guard = SourceGuard::new(&rules(ips));
        let mut frame = sample.frame();
        let header = Header { flags: F_NEEDS_CSUM, csum_start: start, csum_offset: offset, ..Header::NONE };
        if header.check(frame.len()).is_ok() && judge_with(&guard, header, &frame) != Judgement::Spoofed {
            frame[usize::from(start + offset)..][..2].copy_from_slice(&written);
            prop_assert_ne!(judge_with(&guard, Header::NONE, &frame), Judgement::Spoofed);
        }
    }

    #[test]
    fn ranges_are_the_union_of_what_they_are_made_of(
        networks in vec((any::<u8>(), 0..=8u8), 0..12),
        address: u8,
    ) {
        let ranges: Vec<_> = networks.iter().map(|(at, bits)| range(u128::from(*at), 8, *bits)).collect();
        let expected = ranges.iter().any(|(first, last)| (*first..=*last).contains(&address.into()));
        let union: Ranges<u128> = ranges.into_iter().collect();
        prop_assert_eq!(union.contains(address.into()), expected);
    }

    #[test]
    fn any_bytes_do_no_harm(mut frame in vec(any::<u8>(), 14..400), bytes: [u8; 12], kind in select(&[0x0800, 0x0806, 0x86dd, 0x8100][..])) {
        frame[6..12].copy_from_slice(&OWN.0);
        frame[12..14].copy_from_slice(&u16::to_be_bytes(kind));
        let header = Header::from_bytes(&bytes);
        for guard in [guard(), SourceGuard::new(&rules(false))] {
            judge_with(&guard, header, &frame);
        }
    }
}
