//! Receive coalescing in software (GRO): segments of one TCP stream, or datagrams of one UDP flow, that arrive
//! in one burst become a frame that asks for segmentation, as if its sender had left it unsegmented.
//!
//! The opposite of [`segment`](crate::segment): what comes out of here, cut again, is what went in, byte for
//! byte but for the checksums of frames that were trusted unseen. No payload is copied: the buffers of a
//! segment, its headers pulled off, are appended to the packet before it. Only the first packet's headers
//! are written.
//!
//! The rules are those of Linux (`inet_gro_receive`, `tcp_gro_receive`, `udp_gro_receive_segment`), where not
//! stricter: packets with IPv4 options or IPv6 extension headers are left alone, as are packets that ask
//! for segmentation already, and padded ones. Each flow stays in order: before a packet that cannot be merged, what
//! is held of its flow is delivered.
//!
//! A device may write to the packets' memory at any time. Headers are copied once, judged, and written
//! from that copy if they change; payload that changes after its checksum was verified is payload a
//! device could have sent in the first place.

use crate::buffer::Chain;
use crate::checksum::{self, Sum};
use crate::ether::be16;
use crate::parse::{
    IPV6_LEN, IpVersion, Layers, PROTO_TCP, PROTO_UDP, ParseError, TCP_CHECKSUM, UDP_CHECKSUM,
};
use crate::segment::{CWR, FIN, PSH, put16};
use crate::vnet::{F_DATA_VALID, F_NEEDS_CSUM, GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Header, Offloads};

/// Flows of which packets are held at a time. A burst has 64 packets at most: more flows than this in one
/// leave less than four packets to merge for each. (Linux: eight hash buckets of eight.)
pub const MAX_FLOWS: usize = 16;

/// Packets that one frame is made of at most: 64 KiB at the usual MTU take 45. Without a bound, segments of one
/// byte would make a frame that software may not [cut](crate::segment::MAX_SEGMENTS) again, and a chain
/// that no device takes. (Linux: the same number for UDP, none for TCP.)
pub const MAX_PACKETS: usize = 64;

/// Bytes of a frame at most, link header included, so that every length field holds it.
pub const MAX_FRAME: usize = u16::MAX as usize;

/// Ethernet with two tags, IPv6, and the longest TCP header have 122 bytes.
const MAX_HEAD: usize = 128;

const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const URG: u8 = 0x20;
/// Where TCP keeps its flags, in bytes from the start of its header.
const TCP_FLAGS: usize = 13;
/// The "don't fragment" bit, in the first byte of the IPv4 fragment field.
const DF: u8 = 0x40;

/// What became of the packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroCounters {
    /// Packets that came in.
    pub packets: u64,
    /// Of those, packets that were appended to another.
    pub merged: u64,
    /// Frames delivered that are made of more than one packet.
    pub frames: u64,
    /// Packets left alone because a checksum was wrong.
    pub bad_checksum: u64,
}

/// Merges the packets of a queue. [Push](Gro::push) the packets of a burst, then [flush](Gro::flush): what is held
/// when this is dropped is lost.
#[derive(Debug)]
pub struct Gro {
    accepted: Offloads,
    held: Vec<Held>,
    /// Who goes next when there are too many flows.
    turn: usize,
    counters: GroCounters,
}

impl Default for Gro {
    fn default() -> Self {
        Self::new()
    }
}

impl Gro {
    /// For a receiver that takes unsegmented TCP. UDP, where a datagram more or less is a matter of
    /// latency, is merged only [for receivers](Gro::for_receiver) that ask for it.
    #[must_use]
    pub fn new() -> Self {
        Self::for_receiver(Offloads::CSUM | Offloads::TSO4 | Offloads::TSO6 | Offloads::ECN)
    }

    /// Makes frames of the kinds that `accepted` has only; none without [`Offloads::CSUM`].
    #[must_use]
    pub fn for_receiver(accepted: Offloads) -> Self {
        let accepted = if accepted.contains(Offloads::CSUM) { accepted } else { Offloads::empty() };
        Self { accepted, held: Vec::with_capacity(MAX_FLOWS), turn: 0, counters: GroCounters::default() }
    }

    /// What became of the packets so far.
    pub fn counters(&self) -> GroCounters {
        self.counters
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Takes a packet: holds it, appends it to one that is held, or delivers it, after what is held of its
    /// flow. Packets whose checksum was verified for this are delivered with `F_DATA_VALID`.
    pub fn push(&mut self, chain: Chain, mut deliver: impl FnMut(Chain)) {
        self.counters.packets += 1;
        if self.accepted.is_empty() {
            return deliver(chain);
        }
        let mut head = [0; MAX_HEAD];
        let n = chain.copy_to(&mut head);
        let layers = match Layers::parse(&head[..n]) {
            Ok(layers) if matches!(layers.proto, PROTO_TCP | PROTO_UDP) => layers,
            Ok(_) | Err(ParseError::NotIp(_)) => return deliver(chain),
            Err(_) => {
                // Whatever it is, nothing that came before it is late.
                self.flush(&mut deliver);
                return deliver(chain);
            }
        };
        let flow = Flow::of(&head, &layers);
        if layers.fragment {
            // Which ports it belongs to is known to its receiver only.
            while let Some(at) = self.held.iter().position(|held| held.first.flow.is_between(&flow)) {
                self.release(at, &mut deliver);
            }
            return deliver(chain);
        }
        let found = self.held.iter().position(|held| held.first.flow == flow);
        head[layers.payload..].fill(0);
        let mut packet = Packet { flow, head, layers, chain };
        if !self.may_merge(&mut packet) {
            if let Some(at) = found {
                self.release(at, &mut deliver);
            }
            return deliver(packet.chain);
        }
        if let Some(at) = found {
            let held = &mut self.held[at];
            let takes = held.takes(&packet);
            if !takes || held.append(&mut packet) {
                self.release(at, &mut deliver);
            }
            if takes {
                self.counters.merged += 1;
                return;
            }
        }
        if !packet.may_be_first() {
            return deliver(packet.chain);
        }
        if self.held.len() == MAX_FLOWS {
            self.turn = (self.turn + 1) % MAX_FLOWS;
            self.release(self.turn, &mut deliver);
        }
        self.held.push(Held::new(packet));
    }

    /// Delivers all that is held.
    pub fn flush(&mut self, mut deliver: impl FnMut(Chain)) {
        for held in self.held.drain(..) {
            self.counters.frames += u64::from(held.packets > 1);
            deliver(held.finish());
        }
    }

    fn release(&mut self, at: usize, deliver: &mut impl FnMut(Chain)) {
        let held = self.held.swap_remove(at);
        self.counters.frames += u64::from(held.packets > 1);
        deliver(held.finish());
    }

    /// Whether a packet can be part of a larger frame: as its headers say, cheapest first, and with good
    /// checksums.
    fn may_merge(&mut self, packet: &mut Packet) -> bool {
        let Packet { head, layers, chain, .. } = packet;
        let &mut Layers { l3, l4, payload, ip, proto, .. } = layers;
        let needed = match (proto, ip) {
            (PROTO_TCP, IpVersion::V4) => Offloads::TSO4,
            (PROTO_TCP, IpVersion::V6) => Offloads::TSO6,
            _ => Offloads::USO,
        };
        if !self.accepted.contains(needed) || chain.header.is_gso() || chain.len() <= payload {
            return false;
        }
        // IP length, which has to be that of the frame: no padding, nothing cut off.
        let (ip_len, field, counted) = match ip {
            IpVersion::V4 => (20, l3 + 2, l3),
            IpVersion::V6 => (IPV6_LEN, l3 + 4, l3 + IPV6_LEN),
        };
        if l4 - l3 != ip_len || be16(head, field).map(usize::from) != Some(chain.len() - counted) {
            return false;
        }
        let fits = match proto {
            PROTO_TCP => {
                let flags = head[l4 + TCP_FLAGS];
                let ecn = flags & CWR == 0 || self.accepted.contains(Offloads::ECN);
                flags & (SYN | RST | URG) == 0 && ecn
            }
            // Without a checksum there would be none in the segments of the merged frame either, which
            // no header can say.
            _ => {
                be16(head, l4 + 4).map(usize::from) == Some(chain.len() - l4)
                    && be16(head, l4 + UDP_CHECKSUM) != Some(0)
            }
        };
        if !fits {
            return false;
        }
        let good = packet.has_good_checksums();
        self.counters.bad_checksum += u64::from(!good);
        good
    }
}

/// What packets of a flow have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Flow {
    ports: [u8; 4],
    addresses: [u8; 32],
    ip: IpVersion,
    proto: u8,
}

impl Flow {
    fn of(head: &[u8; MAX_HEAD], layers: &Layers) -> Flow {
        let mut flow = Flow { ports: [0; 4], addresses: [0; 32], ip: layers.ip, proto: layers.proto };
        let (at, len) = match layers.ip {
            IpVersion::V4 => (12, 8),
            IpVersion::V6 => (8, 32),
        };
        if let Some(addresses) = head.get(layers.l3 + at..layers.l3 + at + len) {
            flow.addresses[..len].copy_from_slice(addresses);
        }
        if let (false, Some(ports)) = (layers.fragment, head.get(layers.l4..layers.l4 + 4)) {
            flow.ports.copy_from_slice(ports);
        }
        flow
    }

    /// Whether the two are the same but for the ports.
    fn is_between(&self, other: &Flow) -> bool {
        (self.addresses, self.ip, self.proto) == (other.addresses, other.ip, other.proto)
    }
}

/// A packet with TCP or UDP.
#[derive(Debug)]
struct Packet {
    flow: Flow,
    /// Its headers, and zeros.
    head: [u8; MAX_HEAD],
    layers: Layers,
    chain: Chain,
}

impl Packet {
    /// Where the transport checksum is stored.
    fn checksum_field(&self) -> usize {
        self.layers.l4 + if self.layers.proto == PROTO_TCP { TCP_CHECKSUM } else { UDP_CHECKSUM }
    }

    /// The sum of the pseudo header, of the length that the packet has now.
    fn pseudo(&self) -> Option<Sum> {
        checksum::pseudo_header(&self.head, &self.layers, self.chain.len() - self.layers.l4)
    }

    /// Whether the checksums hold: the device says so, the sender is to be trusted, or they are verified here,
    /// which the header says from then on.
    fn has_good_checksums(&mut self) -> bool {
        let Layers { l3, l4, payload, ip, .. } = self.layers;
        let mut network = Sum::new();
        network.add(&self.head[l3..l4]);
        if ip == IpVersion::V4 && network.finish() != 0 {
            return false;
        }
        let header = self.chain.header;
        let field = self.checksum_field();
        if header.needs_csum() {
            // A sender on this host, who left the sum of the pseudo header for whoever finishes it.
            let position = (usize::from(header.csum_start), usize::from(header.csum_offset));
            let pseudo = self.pseudo().map(Sum::partial).map(checksum::never_zero);
            return position == (l4, field - l4)
                && be16(&self.head, field).map(checksum::never_zero) == pseudo;
        }
        if header.flags & F_DATA_VALID != 0 {
            return true;
        }
        let Some(mut sum) = self.pseudo() else { return false };
        sum.add(&self.head[l4..payload]);
        let mut headers = payload;
        for piece in self.chain.pieces() {
            sum.add_slice(&piece.skip(headers));
            headers -= headers.min(piece.len());
        }
        let good = sum.finish() == 0;
        if good {
            self.chain.header.flags |= F_DATA_VALID;
        }
        good
    }

    /// The headers without what may differ between segments of one frame: lengths, identification,
    /// checksums, sequence number, and the flags that only the first or the last segment has. Window, time to live,
    /// traffic class with its ECN bits, TCP options and all the others have to be equal.
    fn constant(&self) -> [u8; MAX_HEAD] {
        let mut head = self.head;
        let Layers { l3, l4, ip, proto, .. } = self.layers;
        match ip {
            IpVersion::V4 => {
                head[l3 + 2..l3 + 6].fill(0);
                head[l3 + 10..l3 + 12].fill(0);
            }
            IpVersion::V6 => head[l3 + 4..l3 + 6].fill(0),
        }
        if proto == PROTO_TCP {
            head[l4 + 4..l4 + 8].fill(0);
            head[l4 + TCP_FLAGS] &= !(FIN | PSH | CWR);
            head[l4 + TCP_CHECKSUM..l4 + TCP_CHECKSUM + 2].fill(0);
        } else {
            head[l4 + 4..l4 + 8].fill(0);
        }
        head
    }

    /// Whether others may be appended: it does not end a frame, and its headers can be written, in one place.
    fn may_be_first(&self) -> bool {
        let first = self.chain.bufs().first();
        self.tcp_flags() & (FIN | PSH) == 0
            && first.is_some_and(|buf| buf.len() >= self.layers.payload && buf.is_exclusive())
    }

    fn is_tcp(&self) -> bool {
        self.layers.proto == PROTO_TCP
    }

    fn tcp_flags(&self) -> u8 {
        if self.is_tcp() { self.head[self.layers.l4 + TCP_FLAGS] } else { 0 }
    }

    fn sequence(&self) -> u32 {
        let at = self.layers.l4 + 4;
        if self.is_tcp() {
            self.head[at..].first_chunk().map_or(0, |number| u32::from_be_bytes(*number))
        } else {
            0
        }
    }

    /// Identification of an IPv4 packet.
    fn identification(&self) -> u16 {
        let at = self.layers.l3 + 4;
        if self.layers.ip == IpVersion::V4 { be16(&self.head, at).unwrap_or(0) } else { 0 }
    }

    /// Bytes of payload.
    fn size(&self) -> usize {
        self.chain.len() - self.layers.payload
    }
}

/// A packet that waits for more of its flow.
#[derive(Debug)]
struct Held {
    /// The first packet, and the payload of the others behind it.
    first: Packet,
    /// What the headers of all have in common.
    constant: [u8; MAX_HEAD],
    packets: usize,
    /// Payload of each packet but the last.
    size: usize,
    /// The sequence number that comes next.
    sequence: u32,
    /// Identification of the last packet, and how it has changed from packet to packet.
    identification: u16,
    step: Option<u16>,
}

impl Held {
    fn new(first: Packet) -> Held {
        Held {
            constant: first.constant(),
            packets: 1,
            size: first.size(),
            sequence: first.sequence().wrapping_add(first.size() as u32),
            identification: first.identification(),
            step: None,
            first,
        }
    }

    /// Whether a packet of the same flow is the next segment of the same frame.
    fn takes(&self, packet: &Packet) -> bool {
        packet.size() <= self.size
            && self.first.chain.len() + packet.size() <= MAX_FRAME
            && (!packet.is_tcp() || packet.sequence() == self.sequence)
            && packet.tcp_flags() & CWR == 0
            && packet.constant() == self.constant
            && self.continues_identification(packet)
    }

    /// Whether the identification counts up, or stays where it means nothing (RFC 6864, 4.1), and goes on as it has
    /// begun.
    fn continues_identification(&self, packet: &Packet) -> bool {
        let step = packet.identification().wrapping_sub(self.identification);
        let known = match packet.layers.ip {
            IpVersion::V6 => true,
            IpVersion::V4 => step == 1 || (step == 0 && packet.head[packet.layers.l3 + 6] & DF != 0),
        };
        known && self.step.is_none_or(|before| before == step)
    }

    /// Takes a packet's payload; true when it is the last.
    fn append(&mut self, packet: &mut Packet) -> bool {
        let (size, flags) = (packet.size(), packet.tcp_flags());
        self.step = Some(packet.identification().wrapping_sub(self.identification));
        self.identification = packet.identification();
        self.sequence = self.sequence.wrapping_add(size as u32);
        self.packets += 1;
        let mut payload = std::mem::take(&mut packet.chain);
        payload.pull(packet.layers.payload);
        self.first.chain.append(payload);
        if self.first.is_tcp() {
            self.first.head[self.first.layers.l4 + TCP_FLAGS] |= flags & (FIN | PSH);
        }
        size < self.size || flags & (FIN | PSH) != 0 || self.packets == MAX_PACKETS
    }

    /// The packet, with the headers of the frame it has become.
    fn finish(self) -> Chain {
        let Held { first: mut packet, packets, size, .. } = self;
        if packets == 1 {
            return packet.chain;
        }
        let Layers { l3, l4, payload, ip, proto, .. } = packet.layers;
        let (len, field) = (packet.chain.len(), packet.checksum_field());
        let pseudo = packet.pseudo().map_or(0, Sum::partial);
        let head = &mut packet.head;
        // No length is beyond MAX_FRAME.
        match ip {
            IpVersion::V4 => {
                put16(head, l3 + 2, (len - l3) as u16);
                put16(head, l3 + 10, 0);
                let mut sum = Sum::new();
                sum.add(&head[l3..l4]);
                put16(head, l3 + 10, sum.finish());
            }
            IpVersion::V6 => put16(head, l3 + 4, (len - l3 - IPV6_LEN) as u16),
        }
        if proto == PROTO_UDP {
            put16(head, l4 + 4, (len - l4) as u16);
        }
        put16(head, field, pseudo);
        let flags = packet.tcp_flags();
        let mut chain = packet.chain;
        if let Some(first) = chain.first_mut() {
            first.write().copy_from(&packet.head[..payload]);
        }
        let ecn = if flags & CWR == 0 { 0 } else { GSO_ECN };
        let gso_type = match (proto, ip) {
            (PROTO_TCP, IpVersion::V4) => GSO_TCPV4 | ecn,
            (PROTO_TCP, IpVersion::V6) => GSO_TCPV6 | ecn,
            _ => GSO_UDP_L4,
        };
        chain.header = Header {
            flags: F_NEEDS_CSUM,
            gso_type,
            hdr_len: payload as u16,
            gso_size: size as u16,
            csum_start: l4 as u16,
            csum_offset: (field - l4) as u16,
            num_buffers: 0,
        };
        chain
    }
}

#[cfg(test)]
mod tests;
