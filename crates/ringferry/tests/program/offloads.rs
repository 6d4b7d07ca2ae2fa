//! Every set of offloads that a guest may have negotiated, to every other, both ways: what arrives is what a network card would have
//! delivered, in headers that the receiver agreed to, and the counters say what the switch did for it.

use std::net::{Ipv4Addr, UdpSocket};

use ringferry_control::snapshot::{Negotiated, PortState};
use ringferry_packet::checksum;
use ringferry_packet::ether::Mac;
use ringferry_packet::segment::{Checksum, Segmenter};
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::Header;
use ringferry_rig::frames::pattern;
use ringferry_rig::guest::{Guest, Options, Received, acquaint, converse};
use ringferry_rig::process::{PATIENCE, may_network};
use ringferry_rig::switch::{Place, Switch};
use ringferry_sys::tap::Offloads as TapOffloads;
use ringferry_sys::{namespace, netif};
use ringferry_virtio_net::Features;

const CSUM: Features = Features::CSUM.union(Features::GUEST_CSUM);
const TSO4: Features = CSUM.union(Features::HOST_TSO4).union(Features::GUEST_TSO4);
const TSO: Features = TSO4.union(Features::HOST_TSO6).union(Features::GUEST_TSO6);
const ALL: Features = TSO
    .union(Features::HOST_ECN)
    .union(Features::GUEST_ECN)
    .union(Features::HOST_USO)
    .union(Features::GUEST_USO4)
    .union(Features::GUEST_USO6);

/// Sets of offloads that a guest can do itself, both ways.
const SETS: [(&str, Features); 5] =
    [("nothing", Features::empty()), ("csum", CSUM), ("tso4", TSO4), ("tso", TSO), ("all", ALL)];

/// A kind of traffic: one flow.
#[derive(Clone, Copy, Debug)]
struct Flow {
    tcp: bool,
    v6: bool,
    tagged: bool,
}

const FLOWS: [Flow; 6] = [
    Flow { tcp: true, v6: false, tagged: false },
    Flow { tcp: true, v6: true, tagged: false },
    Flow { tcp: false, v6: false, tagged: false },
    Flow { tcp: false, v6: true, tagged: false },
    Flow { tcp: true, v6: true, tagged: true },
    Flow { tcp: false, v6: false, tagged: true },
];

/// Odd, so that payload begins at every alignment and sums end in the middle of a word.
const SIZE: usize = 1001;
/// Five packets, and a short one.
const PAYLOAD: usize = 5 * SIZE + 333;

/// The address that datagrams go to.
const HOST: [u8; 4] = [10, 9, 0, 1];
const PORT: u16 = 9029;

/// A frame with its virtual header.
type Sent = (Header, Vec<u8>);

impl Flow {
    /// Bytes from `at` of a payload as one frame with a partial checksum, to be cut every `gso_size` bytes, or not with 0.
    fn frame(self, to: Mac, from: Mac, payload: &[u8], at: usize, gso_size: usize) -> Sent {
        let mut addresses = [0xfd; 32];
        addresses[16..].fill(0xfe);
        if !self.v6 {
            addresses[..4].copy_from_slice(&[10, 9, 0, 2]);
            addresses[4..8].copy_from_slice(&HOST);
        }
        let [high, low] = PORT.to_be_bytes();
        let packet = Packet {
            macs: [to.0, from.0],
            tags: self.tagged.into(),
            tcp_options: 3,
            addresses,
            ports: [0x12, 0x34, high, low],
            identification: (at / SIZE) as u16,
            sequence: 0xffff_ff00u32.wrapping_add(at as u32),
            ..Packet::plain(self.v6, self.tcp, payload[at..].to_vec())
        };
        let (header, frame) = packet.sent(gso_size as u16);
        let header = Header { hdr_len: if gso_size == 0 { 0 } else { packet.payload_at() as u16 }, ..header };
        (header, frame)
    }

    /// A payload in packets that ask for nothing, or for their checksum only.
    fn packets(self, to: Mac, from: Mac, payload: &[u8], partial: bool) -> Vec<Sent> {
        let packets = (0..payload.len()).step_by(SIZE).map(|at| {
            let end = payload.len().min(at + SIZE);
            let (header, mut frame) = self.frame(to, from, &payload[..end], at, 0);
            if partial {
                return (header, frame);
            }
            checksum::complete(&header, &mut frame).unwrap();
            (Header::default(), frame)
        });
        packets.collect()
    }
}

/// Returns the packets that a network card would send for a frame.
fn on_the_wire((header, frame): &Sent) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    if header.is_gso() {
        let mut segments = Segmenter::new(header, frame, Checksum::Complete).unwrap();
        while let Some(segment) = segments.next_segment() {
            packets.push([segment.head, segment.payload].concat());
        }
    } else {
        let mut frame = frame.clone();
        checksum::complete(header, &mut frame).unwrap();
        packets.push(frame);
    }
    for packet in &packets {
        checksum::verify(packet).unwrap();
    }
    packets
}

/// Sends frames of one flow in one burst and checks what arrives. Returns how many frames that was.
#[track_caller]
fn exchange(case: &str, from: &mut Guest, to: &mut Guest, frames: &[Sent]) -> usize {
    for (header, frame) in frames {
        from.put(header, frame);
    }
    from.flush();
    let wanted: Vec<Vec<u8>> = frames.iter().flat_map(on_the_wire).collect();
    let takes = to.features.guest_offloads();
    let (mut got, mut arrived) = (Vec::new(), 0);
    while got.len() < wanted.len() {
        let Received { header, frame } = to.receive();
        let header = Header { num_buffers: 0, ..header };
        // VIRTIO 1.4, 5.1.6.4.1: nothing that was not negotiated.
        assert!(takes.accepts(&header), "{case}: {header:?}");
        header.check(frame.len()).unwrap();
        got.extend(on_the_wire(&(header, frame)));
        arrived += 1;
    }
    assert!(got == wanted, "{case}: what arrived is not what was sent");
    arrived
}

/// How many frames the switch has changed for a port, and put together.
fn done_for(switch: &Switch<'_>, port: &str) -> (u64, u64) {
    let counters = switch.port(port).counters;
    (counters["tx_software"], counters["tx_coalesced"])
}

/// All that one guest can send, to the other, which is plugged into `port`.
fn one_way(case: &str, switch: &Switch<'_>, from: &mut Guest, to: &mut Guest, port: &str) {
    let (sends, takes) = (from.features.host_offloads(), to.features.guest_offloads());
    for flow in FLOWS {
        let payload = pattern(flow.v6.into(), PAYLOAD);
        let whole = flow.frame(to.mac, from.mac, &payload, 0, SIZE);
        let merges = takes.accepts(&whole.0);
        for partial in [false, true] {
            let frames = flow.packets(to.mac, from.mac, &payload, partial);
            if !sends.accepts(&frames[0].0) {
                continue;
            }
            let case = format!("{case}, {flow:?}, partial {partial}");
            let before = done_for(switch, port);
            let arrived = exchange(&case, from, to, &frames);
            let after = done_for(switch, port);
            let changed = if takes.accepts(&frames[0].0) { 0 } else { frames.len() as u64 };
            // A guest would have to cut datagrams again.
            let joins = merges && flow.tcp;
            let merged = if joins { frames.len() as u64 } else { 0 };
            assert_eq!((after.0 - before.0, after.1 - before.1), (changed, merged), "{case}");
            assert_eq!(arrived, if joins { 1 } else { frames.len() }, "{case}");
        }
        if sends.accepts(&whole.0) {
            let before = done_for(switch, port);
            let arrived = exchange(&format!("{case}, {flow:?}, unsegmented"), from, to, &[whole]);
            let after = done_for(switch, port);
            assert_eq!((after.0 - before.0, after.1 - before.1), (u64::from(!merges), 0), "{case}");
            assert_eq!(arrived, if merges { 1 } else { PAYLOAD.div_ceil(SIZE) }, "{case}");
        }
    }
}

/// Every set of features to every other, both ways, with and without mergeable receive buffers, split and packed.
#[test]
fn every_set_of_offloads_reaches_every_other() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let base = Features::DEVICE.difference(ALL);
    let mut number = 0;
    for (index, (a_has, a_set)) in SETS.into_iter().enumerate() {
        for (b_has, b_set) in SETS.into_iter().skip(index) {
            for (a_merges, b_merges) in [(true, true), (true, false), (false, true), (false, false)] {
                // Both layouts of rings, without another factor of two.
                number += 1;
                let layout = if number % 3 == 0 { Features::empty() } else { Features::RING_PACKED };
                let features = |set: Features, mergeable: bool| {
                    let buffers = if mergeable { Features::empty() } else { Features::MRG_RXBUF };
                    let features = set.union(base).difference(buffers).difference(layout);
                    Options { features, ..Options::default() }
                };
                let mut a = switch.plug("a", 1, features(a_set, a_merges));
                let mut b = switch.plug("b", 2, features(b_set, b_merges));
                acquaint(&mut [&mut a, &mut b]);
                let case = format!("{a_has} (mergeable {a_merges}) and {b_has} (mergeable {b_merges})");
                one_way(&format!("{case}, there"), &switch, &mut a, &mut b, "b");
                one_way(&format!("{case}, back"), &switch, &mut b, &mut a, "a");
                converse(&mut a, &mut b, 1, 3);
                drop((a, b));
                switch.until_state("a", PortState::Listening);
                switch.until_state("b", PortState::Listening);
            }
        }
    }
    switch.assert_no_drops();
    switch.stop();
}

/// The kernel behind a tap gets each datagram, in whatever shape the guest sent it, and plain ones of a burst in one write.
#[test]
fn datagrams_of_every_shape_reach_a_socket_behind_a_tap() {
    if !may_network() {
        return;
    }
    // The switch starts in this thread's namespace.
    let in_namespace = || {
        namespace::unshare_net().unwrap();
        for port in ["tap:rf0", "tap:rf0,offloads=off"] {
            to_the_tap(port);
        }
    };
    std::thread::spawn(in_namespace).join().unwrap();
}

fn to_the_tap(port: &str) {
    let place = Place::new();
    let mut command = place.run(&["a"]);
    command.args(["--port", port]);
    let switch = place.start(&mut command, Vec::new());
    netif::add_address("rf0", Ipv4Addr::from(HOST).into(), 24).unwrap();
    let socket = UdpSocket::bind((Ipv4Addr::from(HOST), PORT)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut a = switch.plug("a", 1, Options::default());
    // A kernel before 6.2 takes no unsegmented UDP.
    let Negotiated::Tap(kernel) = switch.port("rf0").negotiated else { panic!("rf0 is no tap") };
    let whole_ones = kernel.contains(TapOffloads::USO4);
    let flow = Flow { tcp: false, v6: false, tagged: false };
    let host = Mac(netif::mac("rf0").unwrap());
    let payload = pattern(3, PAYLOAD);
    let shapes = [
        flow.packets(host, a.mac, &payload, false),
        flow.packets(host, a.mac, &payload, true),
        vec![flow.frame(host, a.mac, &payload, 0, SIZE)],
    ];
    // A port's first turn is one frame, whatever follows it.
    let (header, frame) = &shapes[0][0];
    a.put(header, frame);
    a.flush();
    socket.recv(&mut [0; 2 * SIZE]).unwrap();
    let mut coalesced = 0;
    for frames in shapes {
        for (header, frame) in &frames {
            a.put(header, frame);
        }
        a.flush();
        let mut datagram = [0; 2 * SIZE];
        for part in payload.chunks(SIZE) {
            let len = socket.recv(&mut datagram).unwrap();
            assert!(datagram[..len] == *part, "{port}: {} frames", frames.len());
        }
        coalesced += if whole_ones && frames.len() > 1 { frames.len() as u64 } else { 0 };
        assert_eq!(done_for(&switch, "rf0").1, coalesced, "{port}");
    }
    drop(a);
    switch.stop();
}
