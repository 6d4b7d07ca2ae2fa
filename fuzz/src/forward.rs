//! The switch between its ports: frames and headers that guests write go through policy, look-up, offloads
//! and delivery to several receivers.
//!
//! The ports are on the heap ([`ringferry_switch::plane::testing`]), with VLANs, isolation, limits and every
//! set of offloads. The target checks each frame that leaves: its header is sound and asks for nothing that
//! its receiver does not take, and it does not return to its sender. Of a packet that was sound when it was
//! sent, a parser of another project (`etherparse`) reads each frame that was made of it: headers agree with
//! their lengths, checksums are right, and the payload is the sender's, in order, without a gap.
//!
//! Beside them are two ports that the script does not reach. For any behaviour of the others, a frame between
//! those two is forwarded within [`ROUNDS`] rounds of the worker and [`WORK`] of the others' work, by the
//! engine's own price list.

use std::collections::BTreeMap;
use std::sync::Arc;

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use ringferry_packet::ether::Mac;
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::{Header, Offloads, VALIDATED_HEAD};
use ringferry_switch::config::SwitchConfig;
use ringferry_switch::fdb::PortId;
use ringferry_switch::plane::queues::MOST_UNUSUAL;
use ringferry_switch::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use ringferry_switch::rules::{Limits, Rate, Rules, Vlans};

use crate::ring::Reached;
use crate::script::{Bytes, Field, operations};

/// Ports of the switch.
pub const PORTS: u8 = 4;

/// Numbers of the two bystanders, beyond the ports of the script.
const BYSTANDERS: [u8; 2] = [PORTS, PORTS + 1];

/// Rounds within which a bystander's frame is forwarded.
const ROUNDS: usize = 3;

/// Upper bound on the work for others that a bystander's frame waits for, in nanoseconds: a turn of each of
/// them, and the end of the one before; and what the buffers of each cost at most in a round, which is
/// what those of two bursts do.
const WORK: u64 = 2_000_000 + PORTS as u64 * 2 * BUFFERS;

/// What the buffers of a receiver cost at most that the frames of one burst are spread over, in nanoseconds.
const BUFFERS: u64 = 130 * MOST_UNUSUAL as u64;

/// Upper bound on the payload of a packet, in bytes.
const MOST: u16 = 16_000;

/// Upper bound on the packets of one flow that are sent at once.
const PARTS: u8 = 8;

operations! {
    /// One step of a script.
    Step {
        /// A port sends packets of a new flow, as a sound stack describes them. `shape`: bit 0 IPv6, bit 1 TCP, bit 2 a VLAN tag, bit 3 finished
        /// checksums, bits 4 to 7 options; `to`: the port that has the destination address, or 255 for broadcast; `gso`: bytes at which the
        /// packet is to be cut, 0 for not at all; `cut`: where it is in two pieces.
        Flow { from: u8, to: u8, shape: u8, parts: u8, len: u16, gso: u16, cut: u16 },
        /// A port sends one packet of that kind under a header that its guest writes: the 12 bytes of it.
        Forge { from: u8, to: u8, shape: u8, len: u16, cut: u16, first: u64, last: u32 },
        /// A receiver posts so many buffers and no more; 255: as many as it takes.
        Room { port: u8, buffers: u8 },
        /// The clock goes on by so many seconds.
        Wait { seconds: u8 },
        /// The clock goes on by so many microseconds.
        Pause { micros: u16 },
        /// A receiver takes so many buffers for each frame beside the first.
        Spread { port: u8, buffers: u8 },
        /// A receiver takes [other offloads](offloads) from now on.
        Renegotiate { port: u8, offloads: u8 },
        /// Other [limits](limit) hold for a port from now on.
        Limit { port: u8, limits: u8 },
    }
}

/// Makes a port from a byte of the input: bits 0 and 1 choose its VLANs or quarantine, bit 2 isolation, bit 3 that it has
/// no pairs (a tap), bit 4 limits, bits 5 to 7 its offloads.
fn port(number: u8, byte: u8) -> (HeapPort, Offloads) {
    let vlans = match byte & 3 {
        0 | 1 => Vlans::default(),
        2 => Vlans::Access(5),
        _ => Vlans::Trunk { allowed: Some(vec![5, 6]), native: None },
    };
    let offloads = offloads(byte >> 5);
    let limits = Limits { packets: Some(Rate { per_second: 10, burst: 20 }), bytes: None };
    let rules = Rules {
        vlans,
        isolated: byte & 4 != 0,
        // With the first port; for that itself nothing passes.
        quarantine: (byte & 3 == 1).then(|| "heap0".to_owned()),
        rate_in: if byte & 16 != 0 { limits } else { Limits::default() },
        max_macs: (byte & 16 != 0).then_some(1),
        ..Rules::default()
    };
    let pairs = (byte & 8 == 0).then_some(1 + u16::from(number % 2));
    (HeapPort { pairs, offloads, mtu: 1500, rules, first: 0 }, offloads)
}

/// Returns the set of offloads of this number.
fn offloads(number: u8) -> Offloads {
    match number & 7 {
        0 => Offloads::empty(),
        1 => Offloads::CSUM,
        2 => Offloads::CSUM | Offloads::TSO4,
        3 => Offloads::CSUM | Offloads::TSO6,
        4 => Offloads::CSUM | Offloads::USO,
        5 => Offloads::CSUM | Offloads::TSO4 | Offloads::TSO6,
        6 => Offloads::CSUM | Offloads::TSO4 | Offloads::TSO6 | Offloads::ECN | Offloads::USO,
        _ => Offloads::all(),
    }
}

/// Changes the limits of a port: bit 0 an egress rate that TCP can have, bit 1 one of 50 packets a second, bit 2 storm control, bits 4 to 7 the weight.
fn limit(rules: &mut Rules, byte: u8) {
    let fast = Rate { per_second: 1_250_000_000, burst: 128 << 10 };
    let slow = Rate { per_second: 50, burst: 4 };
    rules.rate_out =
        Limits { bytes: (byte & 1 != 0).then_some(fast), packets: (byte & 2 != 0).then_some(slow) };
    rules.storm = (byte & 4 != 0).then_some(Rate { per_second: 1000, burst: 3000 });
    rules.weight = 1 + u16::from(byte >> 4);
}

fn mac(port: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, port]
}

/// Returns byte `at` of the payload of a flow.
fn payload(flow: u16, at: usize) -> u8 {
    (usize::from(flow).wrapping_mul(31) + at * 7 + (at >> 8)) as u8
}

fn packet(flow: u16, from: u8, to: u8, shape: u8, at: usize, len: u16) -> Packet {
    let bytes = (at..at + usize::from(len % MOST)).map(|at| payload(flow, at)).collect();
    let mut packet = Packet::plain(shape & 1 != 0, shape & 2 != 0, bytes);
    packet.macs = [if to == 255 { [0xff; 6] } else { mac(to % PORTS) }, mac(from)];
    packet.tags = usize::from(shape >> 2 & 1);
    packet.tcp_options = usize::from(shape >> 4 & 7);
    let [high, low] = flow.to_be_bytes();
    packet.ports = [0x80, from, high, low];
    packet.sequence = at as u32;
    packet
}

/// The switch and the frames that it was given.
struct Run {
    bed: Bed,
    wires: Vec<(Arc<Wire>, Offloads)>,
    bystanders: [Arc<Wire>; 2],
    rules: Vec<Rules>,
    flows: u16,
    /// Bytes of each flow that each port has received, and those of forged packets, which are not checked.
    received: BTreeMap<(u8, u16), usize>,
    forged: Vec<bool>,
    reached: Reached,
}

/// Runs an input: four bytes for the ports, then a script.
pub fn forward(input: &[u8]) -> Reached {
    let Some((ports, script)) = input.split_at_checked(PORTS.into()) else { return Reached::default() };
    let config = SwitchConfig { mac_table_size: 64, ..SwitchConfig::default() };
    let mut bed = Bed::new(&config, 2);
    let (mut wires, mut rules) = (Vec::new(), Vec::new());
    for (number, byte) in (0..).zip(ports) {
        let (port, offloads) = port(number, *byte);
        wires.push((bed.add(&port).1, offloads));
        rules.push(port.rules);
    }
    let bystander = |port: u8| HeapPort {
        rules: Rules { static_macs: vec![(Mac(mac(port)), 0)], ..Rules::default() },
        ..HeapPort::default()
    };
    let bystanders = BYSTANDERS.map(|port| bed.add(&bystander(port)).1);
    let mut run = Run {
        bed,
        wires,
        bystanders,
        rules,
        flows: 0,
        received: BTreeMap::new(),
        forged: Vec::new(),
        reached: Reached::default(),
    };
    let mut script = Bytes(script);
    while let Some(step) = Step::get(&mut script) {
        run.step(step);
    }
    run.reached
}

impl Run {
    fn step(&mut self, step: Step) {
        match step {
            Step::Flow { from, to, shape, parts, len, gso, cut } => {
                let (from, flow) = (from % PORTS, self.begin(false));
                let mut at = 0;
                for _ in 0..=parts % PARTS {
                    let packet = packet(flow, from, to, shape, at, len);
                    at += packet.payload.len();
                    let (header, bytes) = match gso {
                        0 if shape & 8 != 0 => packet.complete(),
                        // A network stack does not ask for segmentation of a packet that is no longer than a
                        // segment.
                        gso if usize::from(gso) < packet.payload.len() => packet.sent(gso),
                        _ => packet.sent(0),
                    };
                    self.send(from, header, bytes, cut);
                }
            }
            Step::Forge { from, to, shape, len, cut, first, last } => {
                let (from, flow) = (from % PORTS, self.begin(true));
                let packet = packet(flow, from, to, shape, 0, len);
                let mut header = [0; Header::LEN];
                header[..8].copy_from_slice(&first.to_le_bytes());
                header[8..].copy_from_slice(&last.to_le_bytes());
                self.send(from, Header::from_bytes(&header), packet.partial(), cut);
            }
            Step::Room { port, buffers } => {
                let room = if buffers == 255 { usize::MAX } else { buffers.into() };
                let wire = &self.wires[usize::from(port % PORTS)].0;
                (0..wire.queues()).for_each(|queue| wire.set_room(queue, room));
            }
            Step::Wait { seconds } => self.bed.advance(u64::from(seconds) * 1_000_000),
            Step::Pause { micros } => self.bed.advance(micros.into()),
            Step::Spread { port, buffers } => {
                self.wires[usize::from(port % PORTS)].0.spread(buffers.into());
            }
            Step::Renegotiate { port, offloads } => {
                let (port, offloads) = (port % PORTS, self::offloads(offloads));
                // The kernel behind a tap always takes the same.
                if self.bed.set_offloads(PortId(port.into()), offloads) {
                    self.wires[usize::from(port)].1 = offloads;
                }
            }
            Step::Limit { port, limits } => {
                let port = port % PORTS;
                let rules = &mut self.rules[usize::from(port)];
                limit(rules, limits);
                self.bed.set_rules(PortId(port.into()), rules);
            }
        }
        self.pass_by();
        self.bed.run();
        self.take();
    }

    /// Returns the cost of the frames of all ports of the script so far.
    fn work(&self) -> u64 {
        let of = |port: u8| self.bed.totals(PortId(port.into())).by_name()["work_nanoseconds"];
        (0..PORTS).map(of).sum()
    }

    /// One bystander sends a frame to the other.
    fn pass_by(&mut self) {
        let [from, to] = BYSTANDERS.map(mac);
        let mut frame = [&to[..], &from, &[0x88, 0xb5]].concat();
        frame.resize(60, 0);
        let is_ours = |got: &HeapFrame| got.bytes == frame;
        self.bystanders[0].send(0, HeapFrame::new(Header::default(), frame.clone()));
        let before = self.work();
        self.bed.serve_events(0);
        let rounds = (0..ROUNDS).take_while(|_| {
            self.bed.round(0);
            !self.bystanders[1].received(0).iter().any(is_ours)
        });
        let rounds = rounds.count();
        let waited = self.work() - before;
        assert!(rounds < ROUNDS, "a bystander's frame is not forwarded");
        assert!(waited <= WORK, "a bystander's frame waited for {waited} ns of others' work");
    }

    fn begin(&mut self, forged: bool) -> u16 {
        self.forged.push(forged);
        self.flows = (self.forged.len() - 1) as u16;
        self.flows
    }

    /// Admits a frame as a port's queue does: a header that contradicts its frame does not get further than
    /// this.
    fn send(&mut self, from: u8, header: Header, bytes: Vec<u8>, cut: u16) {
        let header = header.sanitised();
        let first = &bytes[..bytes.len().min(VALIDATED_HEAD)];
        let Ok(header) = header.validated(first, bytes.len(), Offloads::all()) else { return };
        self.reached.chains += 1;
        let frame = HeapFrame { cuts: vec![cut.into()], ..HeapFrame::new(header, bytes) };
        let wire = &self.wires[usize::from(from)].0;
        wire.send(u16::from(from) % wire.queues(), frame);
    }

    fn take(&mut self) {
        for number in 0..PORTS {
            let (wire, offloads) = self.wires[usize::from(number)].clone();
            for queue in 0..wire.queues() {
                for frame in wire.received(queue) {
                    self.reached.frames += 1;
                    self.reached.longest = self.reached.longest.max(frame.bytes.len());
                    self.check(number, offloads, &frame);
                }
            }
        }
    }

    fn check(&mut self, to: u8, offloads: Offloads, frame: &HeapFrame) {
        let HeapFrame { header, bytes, .. } = frame;
        assert_eq!(header.check(bytes.len()), Ok(()), "{header:?} for {} bytes", bytes.len());
        assert!(offloads.accepts(header), "{header:?} to a receiver of {offloads:?}");
        let parsed = SlicedPacket::from_ethernet(bytes);
        let Ok(SlicedPacket { net: Some(net), transport: Some(transport), .. }) = parsed else {
            return self.unreadable(bytes);
        };
        let (ports, sequence, payload, sum) = match &transport {
            TransportSlice::Tcp(tcp) => {
                let ports = [tcp.source_port(), tcp.destination_port()];
                let sum = match &net {
                    NetSlice::Ipv4(ip) => {
                        tcp.to_header().calc_checksum_ipv4(&ip.header().to_header(), tcp.payload()).ok()
                    }
                    NetSlice::Ipv6(ip) => {
                        tcp.to_header().calc_checksum_ipv6(&ip.header().to_header(), tcp.payload()).ok()
                    }
                    _ => None,
                };
                (
                    ports,
                    Some(tcp.sequence_number() as usize),
                    tcp.payload(),
                    sum.map(|sum| (sum, tcp.checksum())),
                )
            }
            TransportSlice::Udp(udp) => {
                let ports = [udp.source_port(), udp.destination_port()];
                let header = udp.to_header();
                let sum = match &net {
                    NetSlice::Ipv4(ip) => {
                        header.calc_checksum_ipv4(&ip.header().to_header(), udp.payload()).ok()
                    }
                    NetSlice::Ipv6(ip) => {
                        header.calc_checksum_ipv6(&ip.header().to_header(), udp.payload()).ok()
                    }
                    _ => None,
                };
                (ports, None, udp.payload(), sum.map(|sum| (sum, udp.checksum())))
            }
            _ => return self.unreadable(bytes),
        };
        let flow = ports[1];
        if self.forged.get(usize::from(flow)).is_none_or(|forged| *forged) {
            return;
        }
        let from = ports[0] as u8;
        assert_ne!(from, to, "a frame returns to its sender");
        if !header.needs_csum() {
            let (right, is) = sum.expect("a sound packet is not too long");
            // A sum of zero has two forms; with UDP the one with all bits clear means that there is none (RFC 768).
            let udp = sequence.is_none();
            assert!(is % 0xffff == right % 0xffff && !(udp && is == 0), "checksum {is:04x}, not {right:04x}");
        }
        let next = self.received.entry((to, flow)).or_default();
        if let Some(sequence) = sequence {
            // Packets that found no room may be missing; those that are there are in order.
            assert!(sequence >= *next || payload.is_empty(), "a packet is overtaken, or there twice");
            *next = sequence;
        }
        for (at, byte) in (*next..).zip(payload) {
            if sequence.is_some() {
                assert_eq!(*byte, crate::forward::payload(flow, at), "byte {at} of flow {flow}");
            }
        }
        *next += payload.len();
    }

    /// A frame that the other parser does not read, or that is no TCP nor UDP, comes from a forged header, or is an answer in a receiver's
    /// name (ICMP), whose checksum is right.
    fn unreadable(&self, bytes: &[u8]) {
        let Ok(SlicedPacket { net: Some(net), transport: Some(transport), .. }) =
            SlicedPacket::from_ethernet(bytes)
        else {
            assert!(self.forged.contains(&true), "a frame that cannot be read: {bytes:02x?}");
            return;
        };
        match (net, transport) {
            (NetSlice::Ipv4(_), TransportSlice::Icmpv4(icmp)) => {
                let right = icmp.icmp_type().calc_checksum(icmp.payload());
                assert_eq!(icmp.checksum(), right, "the checksum of an answer");
            }
            (NetSlice::Ipv6(ip), TransportSlice::Icmpv6(icmp)) => {
                let ip = ip.header();
                let addresses = (ip.source(), ip.destination());
                assert!(icmp.is_checksum_valid(addresses.0, addresses.1), "the checksum of an answer");
            }
            _ => assert!(self.forged.contains(&true), "a frame of a kind that nobody sent: {bytes:02x?}"),
        }
    }
}
