//! The firewall against a reference that is as simple as can be: policies as lists that are searched, flows in a map, and packets as they were meant, not as
//! bytes. What one lets pass, the other does.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use ringferry_firewall::{Direction, Firewall, HEAD, Verdict, View, read};
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::Header;

/// Few addresses, so that prefixes, rules and packets meet. The guest is the last.
const HOSTS: u8 = 3;
const GUEST: u8 = 255;
const PORTS: [u16; 4] = [53, 80, 443, 50_000];

fn address(v6: bool, host: u8) -> IpAddr {
    match v6 {
        true => IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host.into())),
        false => IpAddr::V4(Ipv4Addr::new(10, 0, 0, host)),
    }
}

/// A network of the hosts: the last `host_bits` of the address are free.
#[derive(Clone, Copy, Debug)]
struct Net {
    v6: bool,
    host: u8,
    host_bits: u8,
    excepted: bool,
}

impl Net {
    fn text(self) -> String {
        let host = self.host >> self.host_bits << self.host_bits;
        let bits = if self.v6 { 128 } else { 32 } - self.host_bits;
        format!("{}{}/{bits}", if self.excepted { "!" } else { "" }, address(self.v6, host))
    }

    fn has(self, v6: bool, host: u8) -> bool {
        self.v6 == v6 && host >> self.host_bits == self.host >> self.host_bits
    }
}

#[derive(Clone, Debug)]
struct Rule {
    allow: bool,
    out: bool,
    into: bool,
    tcp: Option<bool>,
    port: Option<usize>,
    set: Option<usize>,
}

#[derive(Clone, Debug)]
struct Policy {
    allow: [bool; 2],
    sets: Vec<Vec<Net>>,
    rules: Vec<Rule>,
}

impl Policy {
    fn text(&self) -> String {
        let word = |allow: bool| if allow { "allow" } else { "deny" };
        let mut text =
            format!("egress {}\ningress {}\nflows 4096\n", word(self.allow[0]), word(self.allow[1]));
        for (set, nets) in self.sets.iter().enumerate() {
            let nets: Vec<_> = nets.iter().map(|net| net.text()).collect();
            let _ = writeln!(text, "set s{set} {}", nets.join(" "));
        }
        for Rule { allow, out, into, tcp, port, set } in &self.rules {
            let direction = match (out, into) {
                (true, true) => "both",
                (true, false) => "out",
                _ => "in",
            };
            let _ = write!(text, "{} {direction}", word(*allow));
            if let Some(tcp) = tcp {
                let _ = write!(text, " {}", if *tcp { "tcp" } else { "udp" });
                if let Some(port) = port {
                    let _ = write!(text, " port {}", PORTS[*port]);
                }
            }
            if let Some(set) = set {
                let end = if direction == "out" { "to" } else { "from" };
                let _ = write!(text, " {end} @s{set}");
            }
            text.push('\n');
        }
        text
    }

    /// Whether somebody may open a conversation with this host.
    fn allows(&self, out: bool, sent: &Sent) -> bool {
        let port = if out == sent.out { sent.ports[1] } else { sent.ports[0] };
        let in_set = |set: &Vec<Net>| {
            let matching = set.iter().filter(|net| net.has(sent.v6, sent.host));
            // Of prefixes of one length the exception counts.
            matching.min_by_key(|net| (net.host_bits, !net.excepted)).is_some_and(|net| !net.excepted)
        };
        let first = self.rules.iter().find(|rule| {
            (if out { rule.out } else { rule.into })
                && rule.tcp.is_none_or(|tcp| tcp == sent.tcp)
                && (rule.tcp.is_none() || rule.port.is_none_or(|rule| rule == port))
                && rule.set.is_none_or(|set| in_set(&self.sets[set]))
        });
        match first {
            Some(rule) => rule.allow,
            None => self.allow[usize::from(!out)],
        }
    }
}

/// A packet between the guest and a host, and what is odd about it.
#[derive(Clone, Debug)]
struct Sent {
    out: bool,
    v6: bool,
    tcp: bool,
    host: u8,
    /// Of the sender and of the receiver, by number.
    ports: [usize; 2],
    /// VLAN tags and header options.
    tags: usize,
    options: usize,
    flags: u8,
    odd: Option<Odd>,
    /// Seconds since the packet before.
    after: u32,
}

#[derive(Clone, Copy, Debug)]
enum Odd {
    /// IPv4: a source route.
    SourceRoute,
    /// The packet says that it is longer than the frame.
    TooLong,
    /// It ends in front of its ports.
    NoPorts,
    /// MPLS.
    NotIp,
}

impl Sent {
    fn frame(&self) -> Vec<u8> {
        let mut packet = Packet::plain(self.v6, self.tcp, vec![1; 40]);
        let (guest, host) = (address(self.v6, GUEST), address(self.v6, self.host));
        let ends = if self.out { [guest, host] } else { [host, guest] };
        let bytes = ends.map(|end| match end {
            IpAddr::V4(end) => end.octets().to_vec(),
            IpAddr::V6(end) => end.octets().to_vec(),
        });
        let bytes = bytes.concat();
        packet.addresses[..bytes.len()].copy_from_slice(&bytes);
        let [from, to] = self.ports.map(|port| PORTS[port].to_be_bytes());
        packet.ports = [from[0], from[1], to[0], to[1]];
        (packet.tags, packet.options, packet.flags) = (self.tags, self.options, self.flags);
        let mut frame = packet.partial();
        let l3 = packet.l3();
        match self.odd {
            Some(Odd::SourceRoute) if !self.v6 && self.options > 0 => frame[l3 + 20] = 131,
            Some(Odd::TooLong) if self.v6 => frame[l3 + 4] = 0x20,
            Some(Odd::TooLong) => frame[l3 + 2] = 0x20,
            Some(Odd::NoPorts) => frame.truncate(packet.l4() + 2),
            Some(Odd::NotIp) => frame[l3 - 2..l3].copy_from_slice(&[0x88, 0x47]),
            Some(Odd::SourceRoute) | None => {}
        }
        frame
    }

    fn is_odd(&self) -> bool {
        match self.odd {
            Some(Odd::SourceRoute) => !self.v6 && self.options > 0,
            odd => odd.is_some(),
        }
    }
}

/// What is known of a conversation.
struct Known {
    out: bool,
    answered: bool,
    established: bool,
    fin: bool,
    reset: bool,
    seen: u32,
}

impl Known {
    fn lasts(&self, tcp: bool) -> u32 {
        match (tcp, self.answered) {
            (true, _) if self.reset => 10,
            (true, _) if self.fin => 240,
            (true, _) if self.established => 7440,
            (true, _) => 240,
            (false, false) => 30,
            (false, true) => 120,
        }
    }
}

/// By family, protocol, host, the guest's port and the host's, and VLAN.
type Key = (bool, bool, u8, usize, usize, usize);

fn reference(policy: &Policy, flows: &mut HashMap<Key, Known>, sent: &Sent, now: u32) -> bool {
    if sent.is_odd() {
        return false;
    }
    let [local, remote] = if sent.out { sent.ports } else { [sent.ports[1], sent.ports[0]] };
    let key = (sent.v6, sent.tcp, sent.host, local, remote, sent.tags.min(1));
    let flags = if sent.tcp { sent.flags } else { 0 };
    if let Some(known) = flows.get_mut(&key).filter(|known| now - known.seen <= known.lasts(sent.tcp)) {
        // The opener begins anew; data shows that a reset was none.
        if sent.tcp && flags & 18 == 2 && sent.out == known.out {
            (known.answered, known.established, known.fin, known.reset) = (false, false, false, false);
        } else if sent.tcp && flags & 4 == 0 {
            known.reset = false;
        }
        if sent.out != known.out {
            known.answered = true;
        } else if known.answered {
            known.established = true;
        }
        known.reset |= flags & 4 != 0;
        known.fin |= flags & 1 != 0;
        known.seen = now;
        return true;
    }
    let allowed = policy.allows(sent.out, sent);
    if allowed && flags & 4 == 0 && flags & 18 != 18 {
        let known =
            Known { out: sent.out, answered: false, established: false, fin: false, reset: false, seen: now };
        flows.insert(key, known);
    }
    allowed
}

fn net() -> impl Strategy<Value = Net> {
    let net = (any::<bool>(), prop_oneof![0..HOSTS, Just(GUEST)], 0..=8u8, prop::bool::weighted(0.3));
    net.prop_map(|(v6, host, host_bits, excepted)| Net {
        v6,
        // Shifts of eight bits are none of a byte.
        host: if host_bits == 8 { 0 } else { host },
        host_bits: host_bits.min(7),
        excepted,
    })
}

fn policy() -> impl Strategy<Value = Policy> {
    let directions = prop::sample::select(&[(true, false), (false, true), (true, true)][..]);
    let rule = (
        any::<bool>(),
        directions,
        option::of(any::<bool>()),
        option::of(0..PORTS.len()),
        option::of(0..3usize),
    );
    let rule =
        rule.prop_map(|(allow, (out, into), tcp, port, set)| Rule { allow, out, into, tcp, port, set });
    (any::<[bool; 2]>(), vec(vec(net(), 1..5), 3), vec(rule, 0..6)).prop_map(|(allow, sets, rules)| Policy {
        allow,
        sets,
        rules,
    })
}

/// Packets of one conversation, of which some are odd.
fn conversation() -> impl Strategy<Value = Vec<Sent>> {
    let odd = prop::sample::select(&[Odd::SourceRoute, Odd::TooLong, Odd::NoPorts, Odd::NotIp][..]);
    let flags = prop::sample::select(&[2u8, 16, 16, 16, 17, 4, 18][..]);
    let after = prop::sample::select(&[0u32, 0, 0, 0, 5, 10, 11, 30, 31, 120, 121, 240, 241, 7440, 7441][..]);
    // Mostly the same few, so that they go on.
    let port = || prop_oneof![6 => 0..2usize, 1 => 0..PORTS.len()];
    let tags = prop_oneof![8 => Just(0usize), 1 => 1..3usize];
    let packet = (
        any::<bool>(),
        prop_oneof![5 => Just(0usize), 1 => 1..4usize],
        flags,
        option::weighted(0.1, odd),
        after,
    );
    let ends = (any::<[bool; 2]>(), 0..HOSTS, [port(), port()], tags);
    (ends, vec(packet, 1..6)).prop_map(|(([v6, tcp], host, ports, tags), packets)| {
        let sent = packets.into_iter().map(|(out, options, flags, odd, after)| {
            let ports = if out { ports } else { [ports[1], ports[0]] };
            Sent { out, v6, tcp, host, ports, tags, options, flags, odd, after }
        });
        sent.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn nothing_goes_round_a_policy_and_nothing_is_denied_that_it_allows(policy in policy(), conversations in vec(conversation(), 1..60)) {
        let text = policy.text();
        let read = read("policy", &text, &mut |_| Err(std::io::ErrorKind::NotFound.into()));
        let seed = [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344, 0xa409_3822_299f_31d0, 0x082e_fa98_ec4e_6c89];
        let firewall = Firewall::new(Arc::new(read.unwrap()), 1, seed);
        let (mut flows, mut now) = (HashMap::new(), 0);
        for packet in conversations.iter().flatten() {
            now += packet.after;
            let frame = packet.frame();
            let direction = if packet.out { Direction::Out } else { Direction::In };
            let view = View { header: &Header::NONE, bytes: &frame[..frame.len().min(HEAD)], len: frame.len(), peek: &|_| None };
            let passes = firewall.judge(direction, view, now, 0) == Verdict::Pass;
            let expected = reference(&policy, &mut flows, packet, now);
            prop_assert_eq!(passes, expected, "{:?}\n{}", packet, text);
        }
    }
}
