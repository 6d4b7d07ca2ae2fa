//! Firewalls of ports: what they let out and in, wherever frames lie and whichever worker has them.

use std::sync::Arc;

use ringferry_packet::ether::Mac;
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::{Header, Offloads};

use crate::config::SwitchConfig;
use crate::counters::DropReason;
use crate::fdb::PortId;
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use crate::rules::{FirewallRule, Rules};

const GUEST: u8 = 1;
const FAR: u8 = 2;

fn rules(policy: &str) -> Rules {
    let policy =
        ringferry_firewall::read("policy", policy, &mut |_| Err(std::io::ErrorKind::NotFound.into()));
    let policy = Some(Arc::new(policy.unwrap()));
    Rules { firewall: Some(FirewallRule { name: "policy".to_owned(), policy }), ..Rules::default() }
}

fn mac(port: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, port]
}

fn address(v6: bool, host: u8) -> Vec<u8> {
    let mut address = if v6 { vec![0xfd; 16] } else { vec![10, 0, 0, 0] };
    *address.last_mut().unwrap() = host;
    address
}

/// A datagram from one host to another, with so many units of extension headers.
fn datagram(v6: bool, [from, to]: [u8; 2], ports: [u16; 2], options: usize) -> Vec<u8> {
    let mut packet = Packet::plain(v6, false, vec![7; 100]);
    packet.macs = [mac(to), mac(from)];
    let addresses = [address(v6, from), address(v6, to)].concat();
    packet.addresses[..addresses.len()].copy_from_slice(&addresses);
    packet.ports = (u32::from(ports[0]) << 16 | u32::from(ports[1])).to_be_bytes();
    packet.options = options;
    packet.partial()
}

/// A guest with this policy and a host without one, which know each other.
struct Net {
    bed: Bed,
    ports: [(PortId, Arc<Wire>); 2],
}

impl Net {
    fn new(policy: &str, workers: usize, guest: HeapPort, far: HeapPort) -> Net {
        let mut bed = Bed::new(&SwitchConfig::default(), workers);
        let guest = HeapPort { rules: rules(policy), ..guest };
        let ports = [guest, far].map(|port| bed.add(&port));
        let mut net = Net { bed, ports };
        for (from, to) in [(GUEST, FAR), (FAR, GUEST)] {
            let mut arp = [&Mac::BROADCAST.0[..], &mac(from), &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]].concat();
            arp.resize(60, 0);
            assert_eq!(net.send(from, to, arp).len(), 1, "address resolution passes");
        }
        net
    }

    fn wire(&self, host: u8) -> &Wire {
        &self.ports[usize::from(host) - 1].1
    }

    /// Sends a frame from one port; returns what arrives at the other.
    fn send(&mut self, from: u8, to: u8, frame: Vec<u8>) -> Vec<Vec<u8>> {
        self.wire(from).send(0, HeapFrame { cuts: vec![40, 70], ..HeapFrame::new(Header::NONE, frame) });
        self.bed.run();
        self.wire(to).received(0).into_iter().map(|frame| frame.bytes).collect()
    }

    fn passes(&mut self, [from, to]: [u8; 2], frame: &[u8]) -> bool {
        let received = self.send(from, to, frame.to_vec());
        assert!(received.is_empty() || received == [frame], "as it was sent");
        !received.is_empty()
    }

    fn drops(&self, host: u8, reason: DropReason) -> u64 {
        self.bed.totals(self.ports[usize::from(host) - 1].0).drops_by_name()[reason.name()]
    }

    fn denied(&self, host: u8) -> u64 {
        self.drops(host, DropReason::Firewall)
    }
}

fn plain() -> HeapPort {
    HeapPort { offloads: Offloads::empty(), ..HeapPort::default() }
}

#[test]
fn answers_come_in_whatever_worker_delivers_them() {
    for (workers, first) in [(1, 0), (2, 1)] {
        for v6 in [false, true] {
            let mut net =
                Net::new("allow out udp port 53\n", workers, plain(), HeapPort { first, ..plain() });
            let (ask, answer) =
                (datagram(v6, [GUEST, FAR], [5000, 53], 0), datagram(v6, [FAR, GUEST], [53, 5000], 0));
            assert!(!net.passes([FAR, GUEST], &answer), "nobody has asked");
            assert!(net.passes([GUEST, FAR], &ask) && net.passes([FAR, GUEST], &answer));
            assert!(!net.passes([GUEST, FAR], &datagram(v6, [GUEST, FAR], [5000, 54], 0)));
            assert_eq!(net.denied(GUEST), 2, "what is denied is counted where the firewall is, out or in");
            assert_eq!(net.denied(FAR), 0);
        }
    }
}

/// The ports of such a datagram lie behind the copy that a burst has of its frames, so the sender could change them after the verdict.
#[test]
fn frames_that_are_judged_by_bytes_behind_the_prefix_are_judged_and_delivered_in_copies() {
    let mut net = Net::new("allow out udp port 53\nallow in udp port 80\n", 1, plain(), plain());
    for (from, port, passes) in [(GUEST, 53, true), (GUEST, 54, false), (FAR, 80, true), (FAR, 81, false)] {
        let ends = if from == GUEST { [GUEST, FAR] } else { [FAR, GUEST] };
        let deep = datagram(true, ends, [6000 + port, port], 2);
        assert!(deep.len() > 62 + 32);
        assert_eq!(net.passes(ends, &deep), passes, "{from} {port}");
        assert_eq!(net.wire(ends[1]).read_in_place(0), 0, "nothing is delivered from where it lay");
    }
    assert_eq!(net.denied(GUEST), 2);
}

#[test]
fn what_is_flooded_passes_by_a_port_that_denies_it_and_is_no_loss() {
    let mut net = Net::new("allow out\n", 1, plain(), plain());
    let mut announcement = datagram(false, [FAR, GUEST], [5353, 5353], 0);
    announcement[..6].copy_from_slice(&Mac::BROADCAST.0);
    assert!(!net.passes([FAR, GUEST], &announcement));
    assert_eq!((net.denied(GUEST), net.denied(FAR)), (0, 0));
    assert_eq!(net.drops(FAR, DropReason::NoDestination), 1, "nobody was there to take it");
}

#[test]
fn a_change_of_the_policy_holds_for_what_is_under_way_and_loses_nothing_else() {
    let mut net = Net::new("allow out udp\n", 1, plain(), plain());
    let pair = |port| {
        (datagram(false, [GUEST, FAR], [5000, port], 0), datagram(false, [FAR, GUEST], [port, 5000], 0))
    };
    let ((ask, answer), (other, its_answer)) = (pair(53), pair(123));
    assert!(net.passes([GUEST, FAR], &ask) && net.passes([GUEST, FAR], &other));
    let guest = net.ports[0].0;
    net.bed.set_rules(guest, &rules("allow out udp port 53\n"));
    assert!(net.passes([FAR, GUEST], &answer), "it was asked for, and still may be");
    assert!(!net.passes([FAR, GUEST], &its_answer) && !net.passes([GUEST, FAR], &other));
    net.bed.set_rules(guest, &Rules { isolated: true, ..rules("allow out udp port 53\n") });
    assert!(net.passes([FAR, GUEST], &answer), "the same policy goes on");
    net.bed.set_rules(guest, &Rules::default());
    assert!(net.passes([GUEST, FAR], &other));
}

#[test]
fn without_its_policy_a_firewall_lets_nothing_pass() {
    let mut net = Net::new("allow out\n", 1, plain(), plain());
    let firewall = Some(FirewallRule { name: "lost".to_owned(), policy: None });
    net.bed.set_rules(net.ports[0].0, &Rules { firewall, ..Rules::default() });
    assert!(!net.passes([GUEST, FAR], &datagram(false, [GUEST, FAR], [1, 2], 0)));
    assert!(!net.passes([FAR, GUEST], &datagram(false, [FAR, GUEST], [2, 1], 0)));
}

#[test]
fn a_question_for_a_name_that_is_not_allowed_is_refused_and_no_more_than_some_are_told() {
    let mut net = Net::new("resolver 10.0.0.2\nallow out to example.com\n", 1, plain(), plain());
    let question = |name: &[u8]| {
        let message = [b"\x07\x09\x01\0\0\x01\0\0\0\0\0\0", name, b"\0\0\x01\0\x01"].concat();
        let mut packet = Packet::plain(false, false, message);
        packet.macs = [mac(FAR), mac(GUEST)];
        packet.addresses[..8].copy_from_slice(&[address(false, GUEST), address(false, FAR)].concat());
        packet.ports = [0x13, 0x88, 0, 53];
        packet.partial()
    };
    assert!(net.passes([GUEST, FAR], &question(b"\x07example\x03com")));
    assert_eq!(net.send(GUEST, FAR, question(b"\x04evil\x03org")), [[0; 0]; 0]);
    let [told] = &net.wire(GUEST).received(0)[..] else { panic!("the guest is told") };
    assert_eq!((&told.bytes[..6], told.bytes[42..46].to_vec()), (&mac(GUEST)[..], vec![7, 9, 0x81, 0x85]));
    ringferry_packet::checksum::verify(&told.bytes).unwrap();
    for _ in 0..200 {
        net.send(GUEST, FAR, question(b"\x04evil\x03org"));
    }
    let told = net.wire(GUEST).received(0).len();
    assert!((10..100).contains(&told), "{told}");
    assert_eq!(net.denied(GUEST), 201);
}
