use std::sync::Barrier;

use ringferry_packet::testing::Packet as Sent;
use ringferry_packet::vnet::{F_NEEDS_CSUM, Header};

use super::*;
use crate::flows::Key;
use crate::headers::HEAD;

const GUEST: [u8; 4] = [10, 0, 0, 2];
const FAR: [u8; 4] = [203, 0, 113, 7];
/// Like random ones, and always the same.
const SEED: [u64; 4] =
    [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344, 0xa409_3822_299f_31d0, 0x082e_fa98_ec4e_6c89];
const NEAR: [u8; 4] = [10, 0, 0, 53];

fn firewall(text: &str) -> Firewall {
    Firewall::new(policy(text), 1, SEED)
}

fn policy(text: &str) -> Arc<Policy> {
    Arc::new(crate::read("policy", text, &mut |_| Err(std::io::ErrorKind::NotFound.into())).unwrap())
}

/// A packet as the guest sends it.
fn packet(tcp: bool, to: [u8; 4], ports: [u16; 2], flags: u8) -> Vec<u8> {
    frame(tcp, [GUEST, to], ports, flags)
}

fn frame(tcp: bool, addresses: [[u8; 4]; 2], ports: [u16; 2], flags: u8) -> Vec<u8> {
    let mut packet = Sent::plain(false, tcp, vec![7; 10]);
    packet.addresses[..8].copy_from_slice(&addresses.concat());
    packet.ports = (u32::from(ports[0]) << 16 | u32::from(ports[1])).to_be_bytes();
    packet.flags = flags;
    packet.partial()
}

fn judge(firewall: &Firewall, direction: Direction, frame: &[u8], now: u32) -> Verdict {
    let view = View {
        header: &Header::NONE,
        bytes: &frame[..frame.len().min(HEAD)],
        len: frame.len(),
        peek: &|_| None,
    };
    let asked = firewall.would_judge(direction, view, now).0;
    let verdict = firewall.judge(direction, view, now, 0);
    assert_eq!(asked, verdict, "whoever only asks is told the same");
    verdict
}

fn out(firewall: &Firewall, frame: &[u8], now: u32) -> bool {
    judge(firewall, Direction::Out, frame, now) == Verdict::Pass
}

fn into(firewall: &Firewall, frame: &[u8], now: u32) -> bool {
    judge(firewall, Direction::In, frame, now) == Verdict::Pass
}

const SYN: u8 = 2;
const ACK: u8 = 16;
const FIN: u8 = 1;

#[test]
fn answers_pass_and_nothing_else_does() {
    let firewall = firewall("allow out tcp port 443\n");
    assert!(!into(&firewall, &frame(true, [FAR, GUEST], [443, 50_000], SYN | ACK), 0), "nobody has asked");
    assert!(out(&firewall, &packet(true, FAR, [50_000, 443], SYN), 0));
    assert!(into(&firewall, &frame(true, [FAR, GUEST], [443, 50_000], SYN | ACK), 0));
    assert!(!into(&firewall, &frame(true, [FAR, GUEST], [443, 50_001], SYN | ACK), 0), "another port");
    assert!(!into(&firewall, &frame(true, [NEAR, GUEST], [443, 50_000], SYN | ACK), 0), "another host");
    assert!(!into(&firewall, &frame(false, [FAR, GUEST], [443, 50_000], 0), 0), "another protocol");
    assert!(!out(&firewall, &packet(true, FAR, [50_000, 80], SYN), 0));
    assert!(!out(&firewall, &packet(false, FAR, [50_000, 443], 0), 0));
    let counts: Vec<_> = firewall.counts().collect();
    assert_eq!((counts[0].flows, counts[0].packets), (1, 2));
    assert_eq!(firewall.default_counts().map(|counts| counts.packets), [2, 4]);
}

#[test]
fn who_may_be_reached_may_answer() {
    let firewall = firewall("allow in tcp port 22 from 203.0.113.0/24\n");
    assert!(!out(&firewall, &packet(true, FAR, [22, 40_000], SYN | ACK), 0));
    assert!(into(&firewall, &frame(true, [FAR, GUEST], [40_000, 22], SYN), 0));
    assert!(out(&firewall, &packet(true, FAR, [22, 40_000], SYN | ACK), 0));
    assert!(!into(&firewall, &frame(true, [NEAR, GUEST], [40_000, 22], SYN), 0));
}

#[test]
fn the_first_rule_decides_and_sets_are_matched_by_the_longest_prefix() {
    let firewall = firewall(
        "egress allow\nset net 10.0.0.0/8 !10.0.0.53\ndeny out to @net\ndeny out udp to 10.0.0.53\n",
    );
    assert!(out(&firewall, &packet(true, FAR, [1, 2], SYN), 0));
    assert!(!out(&firewall, &packet(true, [10, 9, 9, 9], [1, 2], SYN), 0));
    assert!(out(&firewall, &packet(true, NEAR, [1, 2], SYN), 0));
    assert!(!out(&firewall, &packet(false, NEAR, [1, 2], 0), 0));
}

#[test]
fn flows_end_after_their_time() {
    let firewall = firewall("allow out\n");
    let (ask, answer) = (packet(false, NEAR, [5000, 53], 0), frame(false, [NEAR, GUEST], [53, 5000], 0));
    assert!(out(&firewall, &ask, 0) && !into(&firewall, &answer, 31), "unanswered for 30 s");
    assert!(out(&firewall, &ask, 40) && into(&firewall, &answer, 60) && into(&firewall, &answer, 180));
    assert!(!into(&firewall, &answer, 301), "silent for 120 s");
    let (syn, reply) = (packet(true, FAR, [1, 2], SYN), frame(true, [FAR, GUEST], [2, 1], ACK));
    assert!(
        out(&firewall, &syn, 0)
            && into(&firewall, &reply, 240)
            && out(&firewall, &packet(true, FAR, [1, 2], ACK), 241)
    );
    assert!(into(&firewall, &reply, 7000), "established");
    assert!(into(&firewall, &frame(true, [FAR, GUEST], [2, 1], FIN | ACK), 7001));
    assert!(into(&firewall, &reply, 7241) && !into(&firewall, &reply, 7482), "closing for 240 s");
    assert!(
        out(&firewall, &syn, 8000) && into(&firewall, &frame(true, [FAR, GUEST], [2, 1], 4), 8000),
        "reset"
    );
    assert!(!into(&firewall, &reply, 8011));
}

#[test]
fn another_policy_judges_what_is_under_way_anew() {
    let first = firewall("allow out\nallow in tcp port 22\n");
    let (far, near) = (packet(true, FAR, [1, 443], ACK), packet(true, NEAR, [1, 443], ACK));
    assert!(out(&first, &far, 0) && out(&first, &near, 0));
    assert!(into(&first, &frame(true, [FAR, GUEST], [9, 22], SYN), 0));
    let second = first.following(policy("allow out to 10.0.0.0/8\nallow in tcp port 22\n"), 1, 0, SEED);
    assert!(
        into(&second, &frame(true, [NEAR, GUEST], [443, 1], ACK), 0),
        "no packet of what stays allowed is lost"
    );
    assert!(out(&second, &packet(true, FAR, [22, 9], ACK), 0), "judged as it was opened");
    assert!(!into(&second, &frame(true, [FAR, GUEST], [443, 1], ACK), 0) && !out(&second, &far, 0));
    let third = second.following(policy("flows 1000\nallow out to 10.0.0.0/8\n"), 1, 0, SEED);
    assert_eq!((second.room(), third.room()), (32_768, 1024));
    assert!(
        into(&third, &frame(true, [NEAR, GUEST], [443, 1], ACK), 0),
        "a table of another size has the flows"
    );
}

#[test]
fn another_process_goes_on_with_the_flows_and_asks_its_own_policy() {
    let first = firewall("allow out\n");
    assert!(
        out(&first, &packet(true, FAR, [1, 443], ACK), 5)
            && out(&first, &packet(true, NEAR, [1, 443], ACK), 5)
    );
    let second = firewall("allow out to 10.0.0.0/8\n");
    second.restore(first.records(5), 5);
    assert!(into(&second, &frame(true, [NEAR, GUEST], [443, 1], ACK), 5));
    assert!(!into(&second, &frame(true, [FAR, GUEST], [443, 1], ACK), 5));
}

#[test]
fn what_an_older_policy_has_denied_is_told_by_no_rule_of_the_new_one() {
    let first = firewall("allow out tcp port 443\n");
    let (mut cursor, denied) = (Cursor::default(), packet(true, FAR, [1, 80], SYN));
    assert!(out(&first, &packet(true, FAR, [1, 443], SYN), 0));
    (0..5).for_each(|_| assert!(!out(&first, &denied, 0)));
    assert_eq!(first.denials(&mut cursor).0.len(), 5);
    let second = first.following(policy("allow out tcp port 22\n"), 1, 0, [9; 4]);
    assert_eq!(
        second.flows(0).map(|flow| flow.rule).collect::<Vec<_>>(),
        [None],
        "it was not judged by this policy yet"
    );
    (0..6).for_each(|_| assert!(!out(&second, &denied, 0)));
    // More were written than the reader has seen of the others.
    assert_eq!(second.denials(&mut cursor).0.len(), 6);
    assert_eq!(second.denials(&mut Cursor::of(cursor.into_inner())).0.len(), 0);
}

#[test]
fn a_policy_that_is_tried_out_tells_of_each_flow_once_and_lets_all_pass() {
    let firewall = firewall("dry-run on\nallow out tcp port 443\n");
    let mut cursor = Cursor::default();
    for _ in 0..3 {
        assert!(out(&firewall, &packet(true, FAR, [1, 80], SYN), 0));
        assert!(into(&firewall, &frame(true, [FAR, GUEST], [80, 1], SYN | ACK), 0));
    }
    let (denials, missed) = firewall.denials(&mut cursor);
    assert_eq!((denials.len(), missed), (1, 0));
    let denial = &denials[0];
    assert!(denial.passed && denial.direction == Direction::Out && denial.ends.ports == [1, 80]);
    assert_eq!(firewall.policy().describe(denial.rule), "by default: egress deny");
    let strict = firewall.following(policy("allow out tcp port 443\n"), 1, 0, SEED);
    assert!(!into(&strict, &frame(true, [FAR, GUEST], [80, 1], ACK), 0), "in force");
}

#[test]
fn fragments_pass_behind_a_first_one_that_did() {
    let firewall = firewall("allow out udp port 53\nallow out tcp\n");
    let fragment = |port: u16, bits: u16, identification: u16| {
        let mut frame = packet(false, NEAR, [5000, port], 0);
        frame[20..22].copy_from_slice(&bits.to_be_bytes());
        frame[18..20].copy_from_slice(&identification.to_be_bytes());
        frame
    };
    const MORE: u16 = 0x2000;
    assert!(!out(&firewall, &fragment(53, 3, 1), 0), "the first one has not passed");
    assert!(out(&firewall, &fragment(53, MORE, 1), 0));
    assert!(out(&firewall, &fragment(9, MORE | 3, 1), 0), "what looks like ports is none");
    assert!(!out(&firewall, &fragment(53, 3, 2), 0), "another datagram");
    assert!(!out(&firewall, &fragment(54, MORE, 3), 0) && !out(&firewall, &fragment(54, 3, 3), 0));
    assert!(!out(&firewall, &fragment(53, 3, 1), 61), "it is forgotten");
    // A datagram whose first fragment ends in front of the ports.
    let mut tiny = fragment(53, MORE, 4);
    tiny[16..18].copy_from_slice(&22_u16.to_be_bytes());
    assert_eq!(judge(&firewall, Direction::Out, &tiny, 0), Verdict::Deny(Denied::Odd(Odd::Malformed)));
}

#[test]
fn errors_pass_that_are_about_a_known_flow() {
    let firewall = firewall("allow out udp port 53\n");
    let ask = packet(false, NEAR, [5000, 53], 0);
    let unreachable = |about: &[u8], from: [u8; 4]| {
        let mut frame = frame(false, [from, GUEST], [0, 0], 0)[..34].to_vec();
        frame[23] = PROTO_ICMP;
        frame.extend([3, 1, 0, 0, 0, 0, 0, 0]);
        frame.extend(&about[14..42]);
        frame[16..18].copy_from_slice(&(20 + 8 + 28_u16).to_be_bytes());
        frame
    };
    assert!(!into(&firewall, &unreachable(&ask, FAR), 0));
    assert!(out(&firewall, &ask, 0));
    assert!(into(&firewall, &unreachable(&ask, FAR), 0), "any router may report it");
    let mut elsewhere = unreachable(&ask, FAR);
    elsewhere[33] = 77;
    assert!(!into(&firewall, &elsewhere, 0), "it goes to whoever has sent what it is about");
    let mut long = unreachable(&ask, FAR);
    long[16..18].copy_from_slice(&1400_u16.to_be_bytes());
    long.resize(1414, 7);
    assert!(!into(&firewall, &long, 0), "and has no more than the beginning of that");
    assert!(!into(&firewall, &unreachable(&packet(false, NEAR, [5001, 53], 0), FAR), 0));
    assert!(!out(&firewall, &unreachable(&ask, GUEST), 0), "the guest has not received it");
    let answer = frame(false, [NEAR, GUEST], [53, 5000], 0);
    assert!(into(&firewall, &answer, 0));
    let mut told = unreachable(&answer, GUEST);
    told[30..34].copy_from_slice(&NEAR);
    assert!(out(&firewall, &told, 0), "the guest tells of what it has received");
    let mut other = told.clone();
    other[30..34].copy_from_slice(&[169, 254, 169, 254]);
    assert!(!out(&firewall, &other, 0), "and nobody else, whatever it quotes");
    let mut forged = told.clone();
    forged[26..30].copy_from_slice(&FAR);
    assert!(!out(&firewall, &forged, 0), "in its own name");
    let strict = firewall.following(policy("allow out tcp\n"), 1, 0, SEED);
    assert!(
        !out(&strict, &told, 0) && !into(&strict, &unreachable(&ask, FAR), 0),
        "of what is allowed no more nothing is told"
    );
}

use crate::headers::PROTO_ICMP;

#[test]
fn who_asks_for_an_address_is_answered() {
    let offer = frame(false, [[10, 0, 0, 1], GUEST], [67, 68], 0);
    let mut discover = frame(false, [[0; 4], [255; 4]], [68, 67], 0);
    let firewall = firewall("");
    assert!(!into(&firewall, &offer, 0) && out(&firewall, &discover, 0) && into(&firewall, &offer, 0));
    assert!(!into(&firewall, &offer, 61));
    discover[30..34].copy_from_slice(&FAR);
    assert!(!out(&firewall, &discover, 0), "no way out for others");
    let none = self::firewall("dhcp deny\n");
    assert!(!out(&none, &frame(false, [[0; 4], [255; 4]], [68, 67], 0), 0));
}

#[test]
fn tunnels_have_to_be_named() {
    let mut tunnel = packet(false, FAR, [0, 0], 0);
    for protocol in [4, 41, 47, 97] {
        tunnel[23] = protocol;
        assert!(!out(&firewall("egress allow\n"), &tunnel, 0), "{protocol}");
        assert!(!out(&firewall("allow out\n"), &tunnel, 0), "{protocol}");
        assert!(out(&firewall(&format!("allow out proto {protocol}\n")), &tunnel, 0), "{protocol}");
    }
    tunnel[23] = 50;
    assert!(out(&firewall("egress allow\n"), &tunnel, 0), "encrypted, and no router's business");
}

#[test]
fn what_is_odd_never_passes() {
    let firewall = firewall("egress allow\ningress allow\n");
    let odd = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = packet(false, NEAR, [1, 2], 0);
        change(&mut frame);
        judge(&firewall, Direction::Out, &frame, 0)
    };
    let of = |odd| Verdict::Deny(Denied::Odd(odd));
    assert_eq!(odd(&|frame| frame[12..14].copy_from_slice(&[0x88, 0x47])), of(Odd::NotIp(0x8847)));
    assert_eq!(odd(&|frame| frame[12..14].copy_from_slice(&[0, 40])), of(Odd::NotIp(40)));
    assert_eq!(odd(&|frame| frame[14] = 0x44), of(Odd::Malformed));
    assert_eq!(odd(&|frame| frame[16..18].copy_from_slice(&[0xff, 0])), of(Odd::Malformed));
    assert_eq!(odd(&|frame| frame.truncate(36)), of(Odd::Malformed));
    let tags =
        |frame: &mut Vec<u8>| drop(frame.splice(12..12, [0x81, 0, 0, 1, 0x81, 0, 0, 1, 0x81, 0, 0, 1]));
    assert_eq!(odd(&tags), of(Odd::NotIp(0x8100)));
    let routed = |kind: u8| {
        move |frame: &mut Vec<u8>| {
            frame[14] = 0x46;
            frame[16..18].copy_from_slice(&42_u16.to_be_bytes());
            frame.splice(34..34, [kind, 4, 4, 0]);
        }
    };
    assert_eq!(odd(&routed(131)), of(Odd::Routed));
    assert_eq!(odd(&routed(148)), Verdict::Pass, "a router's alert");
    assert_eq!(firewall.other_counts()[1].packets, 7);
    // A checksum that would change the ports.
    let frame = packet(false, NEAR, [1, 2], 0);
    let header = Header { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 2, ..Header::NONE };
    let view = View { header: &header, bytes: &frame, len: frame.len(), peek: &|_| None };
    assert_eq!(firewall.judge(Direction::Out, view, 0, 0), of(Odd::Malformed));
}

/// Found by the fuzz target: one host passes over it, and finds TCP behind it; another refuses it.
#[test]
fn options_for_every_router_come_first_or_not_at_all() {
    let mut packet = Sent::plain(true, true, vec![7; 10]);
    packet.options = 1;
    let mut frame = packet.partial();
    let firewall = firewall("egress allow\n");
    assert!(out(&firewall, &frame, 0));
    // The first of the two headers says that the second is of its own kind.
    (frame[20], frame[54]) = (0, 0);
    assert_eq!(judge(&firewall, Direction::Out, &frame, 0), Verdict::Deny(Denied::Odd(Odd::Malformed)));
}

#[test]
fn what_lies_behind_the_bytes_given_is_asked_for_again() {
    let firewall = firewall("egress allow\n");
    let mut packet = Sent::plain(true, true, vec![7; 200]);
    packet.options = 2;
    let frame = packet.partial();
    let view = |have: usize| View {
        header: &Header::NONE,
        bytes: &frame[..have],
        len: frame.len(),
        peek: &|_| None,
    };
    assert_eq!(firewall.judge(Direction::Out, view(64), 0, 0), Verdict::Beyond);
    assert_eq!(firewall.judge(Direction::Out, view(frame.len()), 0, 0), Verdict::Pass);
    assert_eq!(firewall.other_counts()[1].packets, 0, "who is asked again has not counted");
}

/// Numbers of policies come again after 255 changes.
#[test]
fn a_flow_that_was_silent_through_any_number_of_changes_is_judged_anew() {
    for changes in [1, 2, 254, 255, 256, 257, 510] {
        let mut firewall = firewall("allow out tcp\n");
        assert!(out(&firewall, &packet(true, FAR, [1, 443], SYN), 0));
        for change in 1..=changes {
            let next = if change == changes { "egress deny\n" } else { "allow out tcp\nallow out udp\n" };
            firewall = firewall.following(policy(next), 1, 0, SEED);
        }
        assert!(!out(&firewall, &packet(true, FAR, [1, 443], ACK), 0), "{changes}");
    }
}

#[test]
fn a_flow_is_opened_anew_by_its_opener_and_outlives_a_reset_that_was_none() {
    let firewall = firewall("allow out\n");
    let (syn, data) = (packet(true, FAR, [1, 2], SYN), packet(true, FAR, [1, 2], ACK));
    let (reply, reset) = (frame(true, [FAR, GUEST], [2, 1], ACK), frame(true, [FAR, GUEST], [2, 1], 4));
    let left = |firewall: &Firewall| firewall.flows(0).next().unwrap().left;
    assert!(out(&firewall, &syn, 0) && into(&firewall, &reply, 0) && out(&firewall, &data, 0));
    assert_eq!(left(&firewall), 7440);
    assert!(into(&firewall, &reset, 0));
    assert_eq!(left(&firewall), 10);
    assert!(into(&firewall, &reply, 0));
    assert_eq!(left(&firewall), 7440, "whoever was reset says nothing more");
    assert!(out(&firewall, &packet(true, FAR, [1, 2], FIN | ACK), 0) && out(&firewall, &syn, 0));
    assert!(into(&firewall, &reply, 0) && out(&firewall, &data, 0));
    assert_eq!(left(&firewall), 7440, "the next one from the same port");
}

/// Whoever floods a guest from outside, and is answered, takes nothing of what it has opened.
#[test]
fn a_flood_from_outside_takes_no_place_of_what_the_guest_has_opened() {
    let firewall = firewall("flows 256\nallow out\nallow in tcp port 80\n");
    for port in 1..=500 {
        let reply = frame(true, [FAR, GUEST], [443, port], SYN | ACK);
        assert!(out(&firewall, &packet(true, FAR, [port, 443], SYN), 0) && into(&firewall, &reply, 0));
        assert!(out(&firewall, &packet(true, FAR, [port, 443], ACK), 0));
    }
    let established =
        |firewall: &Firewall| firewall.flows(1).filter(|flow| flow.left > 7000 && flow.is_out).count();
    let before = established(&firewall);
    for port in 0..5000 {
        assert!(into(&firewall, &frame(true, [NEAR, GUEST], [port, 80], SYN), 1));
        let answer = packet(true, NEAR, [80, port], SYN | ACK);
        let _ = out(&firewall, &answer, 1);
        assert!(into(&firewall, &frame(true, [NEAR, GUEST], [port, 80], ACK), 1));
    }
    assert_eq!((established(&firewall), before > 200), (before, true));
}

#[test]
fn echoes_are_of_who_asks_and_other_messages_of_nobody() {
    let firewall = firewall("allow out icmp\n");
    let message = |from: [u8; 4], to: [u8; 4], kind: u8| {
        let mut frame = frame(false, [from, to], [0, 0], 0)[..34].to_vec();
        frame[23] = PROTO_ICMP;
        frame[16..18].copy_from_slice(&28_u16.to_be_bytes());
        frame.extend([kind, 0, 0, 0, 0, 7, 0, 1]);
        frame
    };
    assert!(out(&firewall, &message(GUEST, FAR, 8), 0) && into(&firewall, &message(FAR, GUEST, 0), 0));
    assert!(!into(&firewall, &message(FAR, GUEST, 8), 0), "that is another's question");
    assert!(out(&firewall, &message(GUEST, FAR, 13), 0));
    for kind in [5, 9, 13, 14] {
        assert!(!into(&firewall, &message(FAR, GUEST, kind), 0), "{kind}");
    }
}

#[test]
fn address_resolution_is_no_tunnel() {
    let firewall = firewall("");
    let arp = |len: usize| {
        let mut frame = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1], &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]].concat();
        frame.resize(len, 0);
        frame
    };
    assert!(out(&firewall, &arp(42), 0) && out(&firewall, &arp(60), 0));
    assert!(!out(&firewall, &arp(1400), 0));
    let mut other = arp(60);
    other[16] = 9;
    assert!(!out(&firewall, &other, 0));
}

#[test]
fn fragments_of_ipv6_are_of_one_datagram_whatever_is_in_them() {
    let firewall = firewall("allow out udp\n");
    let mut packet = Sent::plain(true, false, vec![7; 40]);
    packet.options = 1;
    let mut first = packet.partial();
    // The first header becomes that of a fragment, the second is for the destination.
    first[20] = 44;
    first.splice(54..62, [60, 0, 0, 1, 0, 0, 0, 9]);
    let mut later = first.clone();
    later[57] = 0x10;
    assert!(!out(&firewall, &later, 0) && out(&firewall, &first, 0) && out(&firewall, &later, 0));
}

#[test]
fn a_flood_of_openings_leaves_answered_flows_alone() {
    let firewall = firewall("flows 256\nallow out\nallow in tcp port 80\n");
    let answered: Vec<u16> = (1..=64).collect();
    for port in &answered {
        assert!(out(&firewall, &packet(true, FAR, [*port, 443], SYN), 0));
        assert!(into(&firewall, &frame(true, [FAR, GUEST], [443, *port], SYN | ACK), 0));
    }
    let known = |firewall: &Firewall| firewall.flows(1).filter(|flow| flow.is_answered).count();
    let before = known(&firewall);
    for port in 0..5000 {
        assert!(into(&firewall, &frame(true, [FAR, GUEST], [port, 80], SYN), 1), "a flood from outside");
        assert!(out(&firewall, &packet(false, NEAR, [port, 53], 0), 1), "and from within");
    }
    assert_eq!(known(&firewall), before);
    assert!(before > 55, "{before} of 64: buckets of four");
    assert!(firewall.flows(1).count() <= 256);
}

/// Several threads open, use and evict flows of a small table. Whoever finds a flow finds the one that it has asked for.
#[test]
fn flows_are_never_taken_for_each_other() {
    let table = FlowTable::new(256, SEED);
    let barrier = Barrier::new(3);
    let ends = |number: u32| Ends {
        source: Ipv4Addr::from_bits(number).into(),
        destination: Ipv4Addr::from_bits(!number).into(),
        protocol: 17,
        ports: [number as u16; 2],
    };
    std::thread::scope(|scope| {
        for thread in 0..3u32 {
            let (table, barrier) = (&table, &barrier);
            scope.spawn(move || {
                barrier.wait();
                for step in 0..60_000u32 {
                    let number = (step * 7 + thread) % 1500;
                    let key = Key::flow(&ends(number), 0);
                    match table.find(&key, 1) {
                        // The rule is made of the number, so that one of another flow shows.
                        Some(found) => assert_eq!(u32::from(found.state.rule), number),
                        None => {
                            let state =
                                State { seen: 1, rule: number as u16, generation: 0, flags: Flags::OUT };
                            table.insert(&key, state, 1, 0);
                        }
                    }
                }
            });
        }
    });
    for flow in table.flows(1, 0) {
        assert_eq!(flow.ends, ends(flow.rule.unwrap().into()));
    }
}

/// Buckets fill unevenly: a flow whose bucket is full finds another. With one bucket for each flow 75 of these were forgotten.
#[test]
fn next_to_nothing_is_forgotten_while_a_table_is_half_full() {
    let seed = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb, 0xd6e8_feb8_6659_fd93];
    let table = FlowTable::new(4096, seed);
    let ends = |number: u32| Ends {
        source: Ipv4Addr::from_bits(number).into(),
        destination: FAR.into(),
        protocol: PROTO_UDP,
        ports: [7, 53],
    };
    let state = State { seen: 1, rule: 0, generation: 0, flags: Flags::OUT };
    (0..2048).for_each(|number| table.insert(&Key::flow(&ends(number), 0), state, 1, 0));
    let forgotten = (0..2048).filter(|number| table.find(&Key::flow(&ends(*number), 0), 1).is_none());
    assert!(forgotten.count() < 10);
}

mod names {
    use super::*;

    const POLICY: &str =
        "resolver 10.0.0.53\nallow out tcp port 443 to example.com *.cdn.net\nallow out udp port 123\n";

    fn labels(name: &str) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            name.split('.').flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat()).collect();
        bytes.push(0);
        bytes
    }

    fn message(id: u8, flags: u8, name: &str, answers: &[([u8; 4], u8)]) -> Vec<u8> {
        let mut message = vec![0, id, flags, 0, 0, 1, 0, answers.len() as u8, 0, 0, 0, 0];
        message.extend([labels(name), vec![0, 1, 0, 1]].concat());
        for (address, ttl) in answers {
            message.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, *ttl, 0, 4]);
            message.extend(address);
        }
        message
    }

    fn datagram(addresses: [[u8; 4]; 2], ports: [u16; 2], payload: Vec<u8>) -> Vec<u8> {
        let mut packet = Sent::plain(false, false, payload);
        packet.addresses[..8].copy_from_slice(&addresses.concat());
        packet.ports = (u32::from(ports[0]) << 16 | u32::from(ports[1])).to_be_bytes();
        packet.partial()
    }

    fn query(id: u8, name: &str) -> Vec<u8> {
        datagram([GUEST, NEAR], [5000, 53], message(id, 1, name, &[]))
    }

    fn response(id: u8, name: &str, answers: &[([u8; 4], u8)]) -> Vec<u8> {
        datagram([NEAR, GUEST], [53, 5000], message(id, 0x81, name, answers))
    }

    fn connects(firewall: &Firewall, to: [u8; 4], now: u32) -> bool {
        out(firewall, &packet(true, to, [(now % 60_000) as u16 + 1, 443], SYN), now)
    }

    #[test]
    fn an_answer_opens_its_addresses_for_as_long_as_it_holds() {
        let firewall = firewall(POLICY);
        assert!(!connects(&firewall, FAR, 0));
        assert!(
            out(&firewall, &query(1, "Example.com"), 1)
                && into(&firewall, &response(1, "example.COM", &[(FAR, 60)]), 1)
        );
        let has = [("*.cdn.net".to_owned(), vec![]), ("example.com".to_owned(), vec![(FAR.into(), 59)])];
        assert_eq!(firewall.names_now(2), has.into());
        assert!(connects(&firewall, FAR, 2) && connects(&firewall, FAR, 61) && !connects(&firewall, FAR, 62));
        assert!(!out(&firewall, &packet(true, FAR, [9, 80], SYN), 2), "another port");
        assert!(
            into(&firewall, &frame(true, [FAR, GUEST], [443, 3], ACK), 100),
            "a connection outlives the name"
        );
        // Asked again, on the same flow, and below the other name.
        assert!(
            out(&firewall, &query(2, "a.b.cdn.net"), 100)
                && into(&firewall, &response(2, "a.b.cdn.net", &[(FAR, 0)]), 100)
        );
        assert!(connects(&firewall, FAR, 130) && !connects(&firewall, FAR, 131), "30 s at least");
    }

    #[test]
    fn names_of_no_rule_are_not_asked_for_even_in_a_conversation_that_is_known() {
        let firewall = firewall(POLICY);
        for name in ["evil.org", "example.com.evil.org", "notexample.com", "www.example.com", "cdn.net"] {
            assert_eq!(
                judge(&firewall, Direction::Out, &query(1, name), 0),
                Verdict::Deny(Denied::Name),
                "{name}"
            );
        }
        assert!(
            out(&firewall, &query(2, "example.com"), 0)
                && into(&firewall, &response(2, "example.com", &[]), 0)
        );
        assert_eq!(
            judge(&firewall, Direction::Out, &query(3, "secret.evil.org"), 0),
            Verdict::Deny(Denied::Name)
        );
        let nonsense = datagram([GUEST, NEAR], [5000, 53], vec![7; 40]);
        assert_eq!(
            judge(&firewall, Direction::Out, &nonsense, 0),
            Verdict::Deny(Denied::Odd(Odd::Malformed))
        );
        let answer = datagram([GUEST, NEAR], [5000, 53], message(2, 0x81, "example.com", &[(FAR, 60)]));
        assert!(!out(&firewall, &answer, 0), "the guest answers nobody");
        assert!(!connects(&firewall, FAR, 1));
    }

    #[test]
    fn a_question_that_is_refused_is_told_with_its_name() {
        let firewall = firewall(POLICY);
        let long = [63, 63, 63, 61].map(|len| "x".repeat(len)).join(".");
        for name in ["Evil.org", "a b\n.evil.org", &long] {
            assert!(!out(&firewall, &query(1, name), 0));
        }
        assert!(!connects(&firewall, FAR, 0));
        let told = |denials: Vec<Denial>| denials.into_iter().map(|denial| denial.name).collect::<Vec<_>>();
        let expected = ["evil.org", "a\\032b\\010.evil.org", &long].map(|name| Some(name.to_owned()));
        let (denials, _) = firewall.denials(&mut Cursor::default());
        assert_eq!(told(denials), [&expected[..], &[None]].concat());
        // A name with much to escape is cut.
        let strange = ["\u{7f}".repeat(63), "\u{7f}".repeat(63)].join(".");
        assert!(!out(&firewall, &query(1, &strange), 0));
        let (denials, _) = firewall.denials(&mut Cursor::default());
        let last = told(denials).pop().flatten().unwrap();
        assert!(last.len() == 255 && last.starts_with("\\127\\127"), "{last}");
    }

    #[test]
    fn only_the_answer_to_what_was_asked_is_believed() {
        let firewall = firewall(POLICY);
        let good = |id, name| response(id, name, &[(FAR, 60)]);
        assert!(!into(&firewall, &good(1, "example.com"), 0), "nobody has asked");
        assert!(out(&firewall, &query(1, "example.com"), 0));
        assert!(!into(&firewall, &good(2, "example.com"), 0), "another number");
        assert!(!into(&firewall, &good(1, "a.cdn.net"), 0), "another name");
        let elsewhere = datagram([FAR, GUEST], [53, 5000], message(1, 0x81, "example.com", &[(FAR, 60)]));
        assert!(!into(&firewall, &elsewhere, 0), "another server");
        let other_port = datagram([NEAR, GUEST], [53, 5001], message(1, 0x81, "example.com", &[(FAR, 60)]));
        assert!(!into(&firewall, &other_port, 0));
        assert!(!connects(&firewall, FAR, 1));
        assert!(!into(&firewall, &good(1, "example.com"), 16), "too late");
        assert!(out(&firewall, &query(1, "example.com"), 20) && into(&firewall, &good(1, "example.com"), 21));
        assert!(connects(&firewall, FAR, 22));
    }

    #[test]
    fn a_question_in_fragments_passes_nowhere() {
        let firewall = firewall(POLICY);
        let mut first = query(1, "example.com");
        first[20] = 0x20;
        assert_eq!(judge(&firewall, Direction::Out, &first, 0), Verdict::Deny(Denied::Odd(Odd::Fragmented)));
    }

    /// Where the tags do not end in the bytes that are there, the rest is asked for.
    #[test]
    fn tags_may_be_behind_the_bytes_that_are_there() {
        let firewall = firewall(POLICY);
        let mut tagged = query(1, "example.com");
        tagged.splice(12..12, [0x81, 0, 0, 5]);
        let view = |have: usize| View {
            header: &Header::NONE,
            bytes: &tagged[..have],
            len: tagged.len(),
            peek: &|_| None,
        };
        assert_eq!(firewall.would_judge(Direction::Out, view(14), 0).0, Verdict::Beyond);
        assert_eq!(firewall.would_judge(Direction::Out, view(tagged.len()), 0).0, Verdict::Pass);
    }

    /// A frame may be longer than its packet. What is behind that is padding, and no part of a question.
    #[test]
    fn a_question_ends_where_its_packet_ends() {
        let firewall = firewall(POLICY);
        let mut padded = query(1, "example.com");
        padded.extend([0; 9]);
        assert!(out(&firewall, &padded, 0));
        let mut longer = query(1, "example.com");
        let total = u16::from_be_bytes([longer[16], longer[17]]) - 5;
        longer[16..18].copy_from_slice(&total.to_be_bytes());
        assert_eq!(judge(&firewall, Direction::Out, &longer, 0), Verdict::Deny(Denied::Odd(Odd::Malformed)));
    }

    #[test]
    fn another_policy_knows_the_names_that_it_has_too() {
        let first = firewall(POLICY);
        assert!(
            out(&first, &query(1, "example.com"), 1)
                && into(&first, &response(1, "example.com", &[(FAR, 200)]), 1)
        );
        let second = first.following(
            policy("resolver 10.0.0.53\nallow out to a.org\nallow out tcp to example.com\n"),
            1,
            2,
            SEED,
        );
        assert!(connects(&second, FAR, 3));
        let third = second.following(policy("resolver 10.0.0.53\nallow out tcp to a.org\n"), 1, 2, SEED);
        assert!(!connects(&third, FAR, 4));
    }
}
