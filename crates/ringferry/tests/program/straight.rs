//! Large frames of the host go straight into the buffers of the only guest they can be for, and of no other.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::num::NonZero;
use std::os::fd::OwnedFd;

use ringferry_control::snapshot::PortState;
use ringferry_packet::ether::Mac;
use ringferry_rig::frames::{arp, mac, pattern, tcp};
use ringferry_rig::guest::{Guest, Options};
use ringferry_rig::process::in_a_namespace;
use ringferry_rig::raw::{self, Raw};
use ringferry_rig::switch::{Place, Switch};
use ringferry_sys::netif;
use ringferry_sys::tap::{Tap, TapConfig};
use ringferry_virtio_net::Features;
use rustix::net::{AddressFamily, Protocol, SendFlags, SocketType, sendto, socket, sockopt};

const HOST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const EVERYBODY: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 255);
/// A protocol for experiments (RFC 3692), whose packets the kernel has no checksum for.
const EXPERIMENT: NonZero<u32> = NonZero::new(253).unwrap();
/// Bytes of a large payload: no multiple of any buffer.
const LARGE: usize = 30_001;
/// How many are on their way at a time; a guest's buffers take as many.
const FEW: u32 = 4;
/// Entries of a receiveq that has room for the largest frame at any time, however long the guest waits for its processor.
const ROOM: u16 = 1024;

/// Sockets that send packets which lie in one piece: with a checksum for others to finish, and with none.
pub struct Host {
    udp: UdpSocket,
    ip: OwnedFd,
}

impl Host {
    pub fn new() -> Host {
        netif::add_address("rf0", HOST.into(), 24).unwrap();
        let udp = UdpSocket::bind((HOST, 0)).unwrap();
        udp.set_broadcast(true).unwrap();
        let ip = socket(AddressFamily::INET, SocketType::RAW, Some(Protocol::from_raw(EXPERIMENT)));
        let ip = ip.unwrap();
        sockopt::set_socket_broadcast(&ip, true).unwrap();
        Host { udp, ip }
    }

    pub fn datagram(&self, payload: &[u8]) {
        self.udp.send_to(payload, (EVERYBODY, 9)).unwrap();
    }

    fn packet(&self, payload: &[u8]) {
        sendto(&self.ip, payload, SendFlags::empty(), &SocketAddrV4::new(EVERYBODY, 0)).unwrap();
    }
}

fn start<'a>(place: &'a Place, ports: &[&str]) -> (Switch<'a>, Host) {
    let mut command = place.run(ports);
    command.args(["--workers", "1", "--port", "tap:rf0,mtu=40000"]);
    (place.start(&mut command, Vec::new()), Host::new())
}

/// Frames that the kernel has written to where they are read.
fn in_place(switch: &Switch<'_>) -> u64 {
    switch.port("rf0").counters["rx_in_place"]
}

/// The guest receives `rounds` times what the host sends with `send`, whole and in order.
#[track_caller]
fn carry(a: &mut Guest, rounds: u32, send: impl Fn(u32) -> Vec<u8>) {
    for round in 0..rounds {
        let numbers = round * FEW..(round + 1) * FEW;
        let sent: Vec<_> = numbers.map(&send).collect();
        for (at, payload) in sent.iter().enumerate() {
            let frame = a.receive().frame;
            assert!(frame.ends_with(payload), "round {round}, frame {at}: {} bytes", frame.len());
        }
    }
}

#[track_caller]
fn carry_datagrams(host: &Host, a: &mut Guest, len: usize) {
    carry(a, 16, |number| {
        let payload = pattern(number, len);
        host.datagram(&payload);
        payload
    });
}

#[test]
fn large_frames_of_a_tap_are_not_copied_again() {
    in_a_namespace(|| {
        for ring in [Features::empty(), Features::RING_PACKED] {
            let place = Place::new();
            let (switch, host) = start(&place, &["a"]);
            let features = (Features::DEVICE - Features::RING_PACKED) | ring;
            let mut a = switch.plug("a", 1, Options { features, rx: ROOM, ..Options::default() });
            carry_datagrams(&host, &mut a, 100);
            assert_eq!(in_place(&switch), 0, "small frames cost less the other way");
            carry_datagrams(&host, &mut a, LARGE);
            let straight = in_place(&switch);
            assert!(straight > 32, "{straight} of 64, {ring:?}");
            // From now on a rule decides what the guest gets to see.
            switch.set("a", &["rate_out=1gbit"]);
            carry_datagrams(&host, &mut a, LARGE);
            assert_eq!(in_place(&switch), straight);
            place.ctl(&["unset", "a", "rate_out"]);
            switch.show();
            carry_datagrams(&host, &mut a, LARGE);
            assert!(in_place(&switch) > straight + 32);
            switch.assert_no_drops();
            switch.stop();
        }
    });
}

/// The second one could be who a frame is for, and nothing is known of a frame before it is in memory.
#[test]
fn nothing_goes_straight_where_there_are_two_guests() {
    in_a_namespace(|| {
        let place = Place::new();
        let (switch, host) = start(&place, &["a", "b"]);
        let mut a = switch.plug("a", 1, Options::default());
        carry_datagrams(&host, &mut a, LARGE);
        assert_eq!(in_place(&switch), 0);
        switch.stop();
    });
}

/// A guest that takes nothing longer than its MTU allows. The switch knows that a frame is to be cut when it lies in the guest's buffers, to
/// which its segments go.
#[test]
fn a_frame_that_has_to_be_cut_is_taken_back() {
    const MSS: usize = 1001;
    in_a_namespace(|| {
        let place = Place::new();
        let (switch, host) = start(&place, &["a"]);
        let features = Features::VERSION_1 | Features::MRG_RXBUF | Features::CSUM | Features::GUEST_CSUM;
        let mut a = switch.plug("a", 1, Options { features, rx: ROOM, ..Options::default() });
        // What is written to another tap the kernel routes to the guest, uncut.
        let (gateway, own) = (Ipv4Addr::new(10, 0, 0, 9), Ipv4Addr::new(10, 0, 0, 2));
        netif::add_address("rf0", gateway.into(), 24).unwrap();
        let other = Tap::open(&TapConfig::new("rf1")).unwrap();
        netif::set_up("rf1", true).unwrap();
        for (setting, value) in
            [("ip_forward", "1"), ("conf/all/rp_filter", "0"), ("conf/rf1/rp_filter", "0")]
        {
            std::fs::write(format!("/proc/sys/net/ipv4/{setting}"), value).unwrap();
        }
        let router = Mac(netif::mac("rf1").unwrap());
        a.send(&arp(Mac::BROADCAST, a.mac, 1, own, Mac::default(), gateway));
        assert!(a.receive().frame.starts_with(&a.mac.0), "the answer");
        for round in 0..8 {
            carry_datagrams(&host, &mut a, LARGE);
            let payload = pattern(round, 20 * MSS + 1);
            let (header, frame) = tcp(router, mac(3), false, &payload, MSS as u16);
            other.writev(&[(&header.to_bytes()[..]).into(), (&frame[..]).into()]).unwrap();
            for part in payload.chunks(MSS) {
                let received = a.receive();
                assert_eq!(received.header.gso_type, 0);
                assert!(received.frame.ends_with(part), "round {round}");
            }
        }
        assert_eq!(switch.port("a").counters["tx_software"], 8);
        assert!(in_place(&switch) > 8 * 32);
        switch.assert_no_drops();
        switch.stop();
    });
}

/// The guest finishes no checksums.
#[test]
fn a_frame_that_has_to_be_changed_is_taken_back() {
    in_a_namespace(|| {
        let place = Place::new();
        let (switch, host) = start(&place, &["a"]);
        let features = Features::VERSION_1 | Features::MRG_RXBUF;
        let mut a = switch.plug("a", 1, Options { features, rx: ROOM, ..Options::default() });
        carry(&mut a, 32, |number| {
            let payload = pattern(number, LARGE);
            if number % 8 == 5 {
                host.datagram(&payload);
            } else {
                host.packet(&payload);
            }
            payload
        });
        let changed = switch.port("a").counters["tx_software"];
        let straight = in_place(&switch);
        assert_eq!(changed, 16);
        assert!(straight > 32 && straight < 128, "{straight}");
        switch.assert_no_drops();
        switch.stop();
    });
}

/// Buffers for these frames, but not for the largest that there could be.
#[test]
fn without_room_for_the_largest_frame_nothing_is_lost() {
    in_a_namespace(|| {
        let place = Place::new();
        let (switch, host) = start(&place, &["a"]);
        let features = Features::DEVICE - Features::RING_PACKED;
        let mut a = switch.plug("a", 1, Options { features, rx: 16, ..Options::default() });
        carry(&mut a, 64, |number| {
            let payload = pattern(number, LARGE / 4);
            host.datagram(&payload);
            payload
        });
        switch.assert_no_drops();
        switch.stop();
    });
}

/// The kernel does not say when it could not write there; the switch, which writes there next, notices as ever.
#[test]
fn a_guest_whose_memory_goes_loses_its_connection_and_nothing_else() {
    in_a_namespace(|| {
        let place = Place::new();
        let (mut switch, host) = start(&place, &["a"]);
        let mut raw = Raw::plug(switch.connect("a"));
        raw.post(raw::ENTRIES);
        switch.until_state("a", PortState::Up);
        let deliver = |number: u32| {
            host.packet(&pattern(number, LARGE));
            switch.until("a", "the frame", |port| port.counters["tx_packets"] == u64::from(number) + 1);
        };
        (0..2).for_each(deliver);
        assert_eq!(in_place(&switch), 1);
        // The rings stay, and the first of the buffers that are next.
        rustix::fs::ftruncate(&raw.file, raw::BUFFERS - raw::BASE + 2 * LARGE as u64 + 8192).unwrap();
        deliver(2);
        assert_eq!(in_place(&switch), 2);
        host.packet(&pattern(3, LARGE));
        switch.process.until_logged("guest memory was truncated");
        switch.until_state("a", PortState::Listening);
        assert!(switch.process.is_running());
        drop(raw);
        carry_datagrams(&host, &mut switch.plug("a", 1, Options::default()), LARGE);
        switch.stop();
    });
}
