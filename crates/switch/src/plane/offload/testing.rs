//! TCP and UDP packets for this module's tests, as their sender's stack describes them, and the oracle: what their receiver's stack makes
//! of them.

use proptest::prelude::*;
use ringferry_memory::ReadSlice;
use ringferry_packet::checksum::{self, Sum, pseudo_header_v4, pseudo_header_v6};
use ringferry_packet::frame::Burst;
use ringferry_packet::parse::{IpVersion, Layers, PROTO_TCP};
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Header, Offloads};

pub(crate) const PSH: u8 = 0x08;
pub(crate) const ACK: u8 = 0x10;
pub(crate) const CWR: u8 = 0x80;

/// A frame with its virtual header.
pub(crate) type Sent = (Header, Vec<u8>);

/// A packet to be made.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) tags: usize,
    pub(crate) v6: bool,
    pub(crate) tcp: bool,
    /// Bytes of IPv6 extension headers, in units of 8, or of IPv4 options, in units of 4.
    pub(crate) options: usize,
    /// Bytes of TCP options, in units of 4.
    pub(crate) tcp_options: usize,
    pub(crate) ports: [u8; 4],
    pub(crate) identification: u16,
    pub(crate) sequence: u32,
    pub(crate) flags: u8,
    pub(crate) payload: Vec<u8>,
}

impl Packet {
    pub(crate) fn plain(v6: bool, tcp: bool, payload: Vec<u8>) -> Packet {
        Packet {
            tags: 0,
            v6,
            tcp,
            options: 0,
            tcp_options: 0,
            ports: [1, 2, 3, 4],
            identification: 7,
            sequence: 8,
            flags: ACK,
            payload,
        }
    }

    /// Any packet with up to `longest` bytes of payload.
    pub(crate) fn any(longest: usize) -> impl Strategy<Value = Packet> {
        let shape = (0..3usize, any::<bool>(), any::<bool>(), 0..3usize, 0..11usize);
        let fields = (any::<u16>(), any::<u32>(), any::<bool>(), any::<bool>());
        let payload = prop::collection::vec(any::<u8>(), 0..=longest);
        (shape, fields, payload).prop_map(|(shape, fields, payload)| {
            let (tags, v6, tcp, options, tcp_options) = shape;
            let (identification, sequence, push, reduced) = fields;
            let flags = ACK | if push { PSH } else { 0 } | if reduced { CWR } else { 0 };
            let ports = [1, 2, 3, 4];
            Packet { tags, v6, tcp, options, tcp_options, ports, identification, sequence, flags, payload }
        })
    }

    /// The frame with a partial checksum, to be cut every `gso_size` bytes, or not with 0.
    pub(crate) fn partial(&self, gso_size: u16) -> Sent {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        for tag in 0..self.tags {
            frame.extend(if tag == 0 && self.tags == 2 { [0x88, 0xa8] } else { [0x81, 0] });
            frame.extend([0x20, 0x05]);
        }
        let l4_len = self.payload.len() + if self.tcp { 20 + 4 * self.tcp_options } else { 8 };
        let proto = if self.tcp { 6 } else { 17 };
        let pseudo = if self.v6 {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(((l4_len + 8 * self.options) as u16).to_be_bytes());
            frame.extend([if self.options > 0 { 60 } else { proto }, 64]);
            let (source, destination) = ([0xfd; 16], [0xfe; 16]);
            frame.extend([source, destination].concat());
            if self.options > 0 {
                // Destination options: PadN.
                let len = 8 * self.options;
                frame.extend([proto, self.options as u8 - 1, 1, len as u8 - 4]);
                frame.extend(vec![0; len - 4]);
            }
            pseudo_header_v6(source, destination, proto, l4_len as u32)
        } else {
            frame.extend([8, 0]);
            let l3 = frame.len();
            let header = 20 + 4 * self.options;
            frame.extend([0x45 + self.options as u8, 0]);
            frame.extend(((header + l4_len) as u16).to_be_bytes());
            frame.extend(self.identification.to_be_bytes());
            frame.extend([0x40, 0, 64, proto, 0, 0]);
            let (source, destination) = ([10, 0, 0, 1], [10, 0, 0, 2]);
            frame.extend([source, destination].concat());
            frame.extend(vec![1; 4 * self.options]);
            let mut sum = Sum::new();
            sum.add(&frame[l3..]);
            frame[l3 + 10..l3 + 12].copy_from_slice(&sum.finish().to_be_bytes());
            pseudo_header_v4(source, destination, proto, l4_len as u16)
        };
        let l4 = frame.len();
        frame.extend(self.ports);
        if self.tcp {
            frame.extend(self.sequence.to_be_bytes());
            frame.extend([0, 0, 0, 1, 0x50 + 0x10 * self.tcp_options as u8, self.flags, 1, 0]);
            frame.extend(pseudo.partial().to_be_bytes());
            frame.extend([0, 0]);
            frame.extend(vec![1; 4 * self.tcp_options]);
        } else {
            frame.extend((l4_len as u16).to_be_bytes());
            frame.extend(pseudo.partial().to_be_bytes());
        }
        frame.extend(&self.payload);
        let ecn = if self.tcp && self.flags & CWR != 0 { GSO_ECN } else { 0 };
        let gso_type = match (gso_size, self.tcp, self.v6) {
            (0, ..) => 0,
            (_, true, false) => GSO_TCPV4 | ecn,
            (_, true, true) => GSO_TCPV6 | ecn,
            (_, false, _) => GSO_UDP_L4,
        };
        let header = Header {
            flags: F_NEEDS_CSUM,
            gso_type,
            gso_size,
            csum_start: l4 as u16,
            csum_offset: if self.tcp { 16 } else { 6 },
            ..Header::default()
        };
        (header, frame)
    }

    /// The frame with a finished checksum.
    pub(crate) fn complete(&self) -> Sent {
        let (header, mut frame) = self.partial(0);
        checksum::complete(&header, &mut frame).unwrap();
        (Header::default(), frame)
    }

    /// The packets of a stream that has this one's payload, each of `size` bytes of it.
    pub(crate) fn stream(&self, size: usize) -> Vec<Packet> {
        let last = self.payload.len().div_ceil(size) - 1;
        let packets = self.payload.chunks(size).enumerate().map(|(index, payload)| Packet {
            payload: payload.to_vec(),
            identification: self.identification.wrapping_add(index as u16),
            sequence: self.sequence.wrapping_add((index * size) as u32),
            flags: self.flags & !if index < last { PSH } else { 0 } & !if index > 0 { CWR } else { 0 },
            ..self.clone()
        });
        packets.collect()
    }
}

/// A burst of these frames, each in pieces of these lengths and one more.
pub(crate) fn burst<'m>(frames: &'m [Sent], lens: &[usize]) -> Burst<'m> {
    let mut burst = Burst::new();
    for (header, frame) in frames {
        let mut building = burst.build(*header, frame.len() as u32);
        let mut rest = &frame[..];
        for len in lens {
            let (piece, behind) = rest.split_at((*len).min(rest.len()));
            building.piece(ReadSlice::from(piece));
            rest = behind;
        }
        building.piece(ReadSlice::from(rest));
        building.finish();
    }
    burst
}

/// One frame of what was delivered.
pub(crate) fn flat(header: Header, first: &[u8], rest: &[ReadSlice<'_>]) -> Sent {
    let mut frame = first.to_vec();
    for piece in rest {
        let at = frame.len();
        frame.resize(at + piece.len(), 0);
        piece.copy_to(&mut frame[at..]);
    }
    (header, frame)
}

/// What a network card makes of a frame that asks for anything, byte by byte: the oracle. It shares nothing with what is tested but
/// the parser and the verifier.
pub(crate) fn on_the_wire((header, frame): &Sent) -> Vec<Vec<u8>> {
    let layers = Layers::parse(frame).unwrap();
    let Layers { l3, l4, payload, ip, proto, .. } = layers;
    let size = if header.is_gso() { usize::from(header.gso_size) } else { usize::MAX };
    let data = &frame[payload..];
    let mut parts: Vec<&[u8]> = data.chunks(size.min(data.len()).max(1)).collect();
    if parts.is_empty() {
        parts.push(&[]);
    }
    let count = parts.len();
    let cut = parts.iter().enumerate().map(|(index, part)| {
        let mut packet = [&frame[..payload], part].concat();
        if header.is_gso() {
            let len = packet.len();
            let counted = len - l3 - if ip == IpVersion::V6 { 40 } else { 0 };
            let field = l3 + if ip == IpVersion::V6 { 4 } else { 2 };
            packet[field..field + 2].copy_from_slice(&(counted as u16).to_be_bytes());
            if ip == IpVersion::V4 {
                let id = u16::from_be_bytes([packet[l3 + 4], packet[l3 + 5]]).wrapping_add(index as u16);
                packet[l3 + 4..l3 + 6].copy_from_slice(&id.to_be_bytes());
                packet[l3 + 10..l3 + 12].fill(0);
                let sum = words(&packet[l3..l4], 0);
                packet[l3 + 10..l3 + 12].copy_from_slice(&(!sum).to_be_bytes());
            }
            if proto == PROTO_TCP {
                let at = l4 + 4;
                let sequence = u32::from_be_bytes(packet[at..at + 4].try_into().unwrap());
                let sequence = sequence.wrapping_add((index * size) as u32);
                packet[at..at + 4].copy_from_slice(&sequence.to_be_bytes());
                packet[l4 + 13] &= if index > 0 { !CWR } else { 0xff };
                packet[l4 + 13] &= if index + 1 < count { !(PSH | 1) } else { 0xff };
            } else {
                packet[l4 + 4..l4 + 6].copy_from_slice(&((len - l4) as u16).to_be_bytes());
            }
        }
        if header.needs_csum() {
            let field = l4 + usize::from(header.csum_offset);
            packet[field..field + 2].fill(0);
            let addresses = if ip == IpVersion::V6 { l3 + 8..l3 + 40 } else { l3 + 12..l3 + 20 };
            let pseudo = words(&packet[addresses], u32::from(proto) + (packet.len() - l4) as u32);
            let sum = !words(&packet[l4..], pseudo.into());
            let sum = if sum == 0 { 0xffff } else { sum };
            packet[field..field + 2].copy_from_slice(&sum.to_be_bytes());
        }
        checksum::verify(&packet).unwrap();
        packet
    });
    cut.collect()
}

/// RFC 1071, word by word.
fn words(bytes: &[u8], start: u32) -> u16 {
    let mut sum = start;
    for word in bytes.chunks(2) {
        sum += u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Every set of offloads that a receiver may have.
pub(crate) fn receivers() -> impl Strategy<Value = Offloads> {
    any::<u8>().prop_map(|bits| {
        let offloads = Offloads::from_bits_truncate(bits) - Offloads::UFO;
        if offloads.contains(Offloads::CSUM) { offloads } else { Offloads::empty() }
    })
}
