//! Rules obeyed by an end that knows nothing of them: the kernel's own network stack, behind a tap of the switch or in a guest.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use ringferry_control::snapshot::PortState;
use ringferry_packet::checksum::Sum;
use ringferry_packet::ether::Mac;
use ringferry_rig::frames::{arp, claimed_address, mac, pattern, solicitation, tagged};
use ringferry_rig::guest::{Guest, Options, Received};
use ringferry_rig::process::{PATIENCE, Process, eventually, in_a_namespace, may_network};
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_sys::process::Spawn;
use ringferry_sys::{namespace, netif};

/// Addresses of the kernel.
const OWN: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 3);

/// Starts a switch with these ports and a tap `rf0`, on one worker: frames of the kernel keep their order.
fn start<'a>(place: &'a Place, ports: &[&str], tap: &str) -> Switch<'a> {
    let mut command = place.run(ports);
    command.args(["--workers", "1", "--port", tap]);
    let switch = place.start(&mut command, Vec::new());
    netif::set_mac("rf0", mac(9).0).unwrap();
    netif::add_address("rf0", OWN.into(), 24).unwrap();
    switch
}

/// The address that question `number` comes from.
fn asker(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 9, 0, number)
}

fn question(from: Mac, number: u8, wanted: Ipv4Addr) -> Vec<u8> {
    arp(Mac::BROADCAST, from, 1, asker(number), Mac::default(), wanted)
}

/// The reply of a kernel with this address to the question.
fn answer(kernel: Mac, to: Mac, number: u8, wanted: Ipv4Addr) -> Vec<u8> {
    arp(to, kernel, 2, wanted, to, asker(number))
}

/// The kernel sends a datagram to everybody in its network.
fn announce(from: Ipv4Addr, payload: &[u8]) {
    let socket = UdpSocket::bind((from, 0)).unwrap();
    socket.set_broadcast(true).unwrap();
    socket.send_to(payload, "10.9.0.255:9").unwrap();
}

#[test]
fn a_tap_is_in_its_vlan_alone() {
    in_a_namespace(|| {
        let place = Place::new();
        let switch = start(&place, &["a"], "tap:rf0,vlan=10");
        let mut a = switch.plug("a", 1, Options::default());
        let mut number = 100;
        for (vid, setting, others) in [(10, "vlan=10", [20, 0]), (20, "vlan=20", [10, 30])] {
            switch.set("rf0", &[setting]);
            for other in others {
                number += 1;
                let frame = question(a.mac, number, OWN);
                a.send(&if other == 0 { frame } else { tagged(&frame, other) });
            }
            number += 1;
            a.send(&tagged(&question(a.mac, number, OWN), vid));
            let received = a.receive_plain();
            assert_eq!(received, tagged(&answer(mac(9), a.mac, number, OWN), vid), "nothing before it");
            announce(OWN, b"hello");
            let received = a.receive().frame;
            assert_eq!(received[12..16], tagged(&[0; 12], vid)[12..]);
            assert!(received.ends_with(b"hello"));
        }
        assert_eq!(switch.drops("a", "no-destination"), 4);
        switch.stop();
    });
}

#[test]
fn a_tap_is_isolated_and_speaks_for_its_own_addresses_alone() {
    in_a_namespace(|| {
        let place = Place::new();
        let rules = "isolated=on,allowed_macs=52:54:00:00:00:09,allowed_ips=10.9.0.1";
        let switch = start(&place, &["a,isolated=on", "up"], &format!("tap:rf0,{rules}"));
        netif::add_address("rf0", OTHER.into(), 24).unwrap();
        let mut a = switch.plug("a", 1, Options::default());
        let mut up = switch.plug("up", 2, Options::default());

        // The first from a reaches up alone, the second, as the switch knows by then where the tap's kernel is, nobody.
        let lost = question(a.mac, 101, OWN);
        a.send(&lost);
        assert_eq!(up.receive_plain(), lost);
        let heard = question(up.mac, 102, OWN);
        up.send(&heard);
        assert_eq!(up.receive_plain(), answer(mac(9), up.mac, 102, OWN), "and none to a");
        a.send(&arp(mac(9), a.mac, 1, asker(103), Mac::default(), OWN));
        a.drain();
        assert_eq!((switch.drops("rf0", "isolated"), switch.drops("a", "isolated")), (1, 0));
        announce(OWN, b"to up");
        assert!(up.receive().frame.ends_with(b"to up"));

        // An IP address, a source of IPv4 and an Ethernet address that are not its own.
        up.send(&question(up.mac, 104, OTHER));
        announce(OTHER, b"to nobody");
        let last = question(up.mac, 105, OWN);
        up.send(&last);
        assert_eq!(up.receive_plain(), answer(mac(9), up.mac, 105, OWN), "nothing before it");
        assert_eq!(switch.drops("rf0", "spoofed"), 2);
        netif::set_mac("rf0", mac(8).0).unwrap();
        let unheard = question(up.mac, 106, OWN);
        up.send(&unheard);
        switch.until("rf0", "an answer from another address", |port| port.drops["spoofed"] == 3);

        switch.set("rf0", &["isolated=off", "allowed_macs=52:54:00:00:00:08"]);
        let first = question(a.mac, 107, OWN);
        a.send(&first);
        assert_eq!(up.receive_plain(), first);
        // All that a has got until then is what up asked.
        for heard in [heard, question(up.mac, 104, OTHER), last, unheard] {
            assert_eq!(a.receive_plain(), heard);
        }
        assert_eq!(a.receive_plain(), answer(mac(8), a.mac, 107, OWN));
        switch.stop();
    });
}

/// A UDP datagram over IPv4, without a checksum of its own.
fn datagram(to: Mac, from: Mac, port: u16, payload: &[u8]) -> Vec<u8> {
    let len = 8 + payload.len() as u16;
    let mut ip = [&[0x45, 0][..], &(20 + len).to_be_bytes(), &[0, 0, 0x40, 0, 64, 17, 0, 0]].concat();
    ip.extend([asker(2).octets(), OWN.octets()].concat());
    let mut sum = Sum::new();
    sum.add(&ip);
    ip[10..12].copy_from_slice(&sum.finish().to_be_bytes());
    let udp = [[0x12, 0x34], port.to_be_bytes(), len.to_be_bytes(), [0, 0]].concat();
    [&to.0[..], &from.0, &[8, 0], &ip, &udp, payload].concat()
}

/// A bucket whose burst is two frames, and that would grant another only after ten minutes: a third borrows, and the fourth waits.
#[test]
fn a_byte_rate_of_a_tap_lets_its_burst_through_both_ways() {
    in_a_namespace(|| {
        const HALF: usize = 36 << 10;
        let place = Place::new();
        let buckets = "rate_in=1kbit,rate_in_burst=72kib,rate_out=1kbit,rate_out_burst=72kib";
        let switch = start(&place, &["a"], &format!("tap:rf0,mtu=40000,{buckets}"));
        let mut a = switch.plug("a", 1, Options::default());
        let payload = |number: u32| pattern(number, HALF - 42);
        for number in 0..4 {
            announce(OWN, &payload(number));
        }
        switch.until("rf0", "the fourth waits", |port| port.counters["rx_paused"] > 0);
        for number in 0..3 {
            assert!(a.receive().frame.ends_with(&payload(number)));
        }
        let socket = UdpSocket::bind((OWN, 0)).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let port = socket.local_addr().unwrap().port();
        let mut received = vec![0; HALF];
        let mut expect = |number| {
            let len = socket.recv(&mut received).unwrap();
            assert!(received[..len] == payload(number), "not datagram {number}");
        };
        for number in 4..8 {
            a.send(&datagram(mac(9), a.mac, port, &payload(number)));
        }
        a.drain();
        (4..7).for_each(&mut expect);
        assert_eq!(switch.port("rf0").counters["rx_packets"], 3, "the fourth is still in the tap");
        assert_eq!(switch.drops("rf0", "rate-out"), 0);
        place.ctl(&["unset", "rf0", "rate_in", "rate_out"]);
        assert!(a.receive().frame.ends_with(&payload(3)), "what waited in the tap");
        expect(7);
        announce(OWN, &payload(8));
        assert!(a.receive().frame.ends_with(&payload(8)), "nothing before it");
        a.send(&datagram(mac(9), a.mac, port, &payload(9)));
        expect(9);
        switch.stop();
    });
}

/// An IPv6 address of the kernel, and of who asks for it.
fn v6(number: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, number)
}

#[test]
fn the_kernel_of_a_guest_speaks_for_its_own_ip_addresses_alone() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let switch = place.switch(&["kernel,allowed_macs=52:54:00:00:00:09,allowed_ips=10.9.0.1,fd00::1", "b"]);
    let mut command = ringferry();
    command.args(["guest", "--tap", "eth0", "--mac", "52:54:00:00:00:09", "--address", "10.9.0.1/24"]);
    command.arg("--socket").arg(place.socket("kernel"));
    let kernel = Process::start(&mut command, Spawn { new_net: true, ..Spawn::default() });
    switch.until_state("kernel", PortState::Up);
    let inside = |work: fn()| {
        let net = namespace::open_net(kernel.pid()).unwrap();
        let thread = std::thread::spawn(move || {
            namespace::join_net(net).unwrap();
            work();
        });
        thread.join().unwrap();
    };
    let mut b = switch.plug("b", 2, Options::default());
    // The guest's link is there a moment after the switch serves it. Answers to all that is asked until then come before the last.
    let is_answer = |received: Received, number| received.frame == answer(mac(9), mac(2), number, OWN);
    eventually("the kernel answers", || {
        b.send(&question(b.mac, 100, OWN));
        b.pump();
        std::iter::from_fn(|| b.take()).any(|received| is_answer(received, 100)).then_some(())
    });
    b.send(&question(b.mac, 101, OWN));
    while !is_answer(b.receive(), 101) {}
    inside(|| {
        for (address, prefix) in [(IpAddr::V4(OTHER), 24), (v6(1).into(), 64), (v6(3).into(), 64)] {
            netif::add_address("eth0", address, prefix).unwrap();
        }
        // Where it hears solicitations, which is later than it has the addresses.
        eventually("the kernel is in the groups of its addresses", || {
            let groups = std::fs::read_to_string("/proc/thread-self/net/igmp6").unwrap();
            [1, 3].iter().all(|end| groups.contains(&format!("01ff00000{end} "))).then_some(())
        });
    });
    // The kernel says other things as well, which claim nothing.
    let claim = |b: &mut Guest| loop {
        if let Some(address) = claimed_address(&b.receive().frame) {
            return address;
        }
    };
    let (own, other) = (IpAddr::V4(OWN), IpAddr::V4(OTHER));
    let ask = |b: &mut Guest, wanted| b.send(&question(b.mac, 2, wanted));
    let solicit = |b: &mut Guest, wanted| b.send(&solicitation(b.mac, v6(2), wanted));

    ask(&mut b, OTHER);
    ask(&mut b, OWN);
    assert_eq!(claim(&mut b), own, "ARP");
    inside(|| {
        announce(OTHER, b"");
        announce(OWN, b"");
    });
    assert_eq!(claim(&mut b), own, "IPv4");
    solicit(&mut b, v6(3));
    solicit(&mut b, v6(1));
    assert_eq!(claim(&mut b), v6(1), "neighbour discovery");
    assert!(switch.drops("kernel", "spoofed") >= 3);

    // The kernel has these addresses; it was the rules that kept them.
    switch.set("kernel", &["allowed_ips=10.9.0.0/24,fd00::/64"]);
    ask(&mut b, OTHER);
    assert_eq!(claim(&mut b), other);
    inside(|| announce(OTHER, b""));
    assert_eq!(claim(&mut b), other);
    solicit(&mut b, v6(3));
    assert_eq!(claim(&mut b), v6(3));
    switch.stop();
}
