//! Generators of packets, streams and bursts for this module's tests, and the oracle: the packets that a
//! receiver's stack makes of a frame.

use proptest::prelude::*;
use ringferry_memory::ReadSlice;
use ringferry_packet::checksum;
use ringferry_packet::frame::Burst;
use ringferry_packet::parse::{IpVersion, Layers, PROTO_TCP};
use ringferry_packet::testing::{Packet, Sent};
use ringferry_packet::vnet::{Header, Offloads};

pub(crate) const PSH: u8 = 0x08;
pub(crate) const ACK: u8 = 0x10;
pub(crate) const CWR: u8 = 0x80;

/// Any packet with up to `longest` bytes of payload, as far as its flags do not keep it from being merged.
pub(crate) fn any_packet(longest: usize) -> impl Strategy<Value = Packet> {
    let flags = (any::<bool>(), any::<bool>());
    (Packet::any(longest), flags, 0..3usize).prop_map(|(packet, (push, reduced), options)| {
        let flags = ACK | if push { PSH } else { 0 } | if reduced { CWR } else { 0 };
        let plain = Packet::plain(packet.v6, packet.tcp, Vec::new());
        Packet { flags, options, addresses: plain.addresses, ports: plain.ports, ..packet }
    })
}

/// Splits this packet's payload into a stream of packets of `size` bytes of it each.
pub(crate) fn stream(packet: &Packet, size: usize) -> Vec<Packet> {
    let last = packet.payload.len().div_ceil(size) - 1;
    let packets = packet.payload.chunks(size).enumerate().map(|(index, payload)| Packet {
        payload: payload.to_vec(),
        identification: packet.identification.wrapping_add(index as u16),
        sequence: packet.sequence.wrapping_add((index * size) as u32),
        flags: packet.flags & !if index < last { PSH } else { 0 } & !if index > 0 { CWR } else { 0 },
        ..packet.clone()
    });
    packets.collect()
}

/// Makes a burst of these frames, each in pieces of these lengths and one more.
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

/// Concatenates the pieces of a delivered frame.
pub(crate) fn flat(header: Header, first: &[u8], rest: &[ReadSlice<'_>]) -> Sent {
    let mut frame = first.to_vec();
    for piece in rest {
        let at = frame.len();
        frame.resize(at + piece.len(), 0);
        piece.copy_to(&mut frame[at..]);
    }
    (header, frame)
}

/// Oracle: makes of a frame the packets that a network card would send, byte by byte. It shares nothing with
/// the tested code but the parser and the verifier.
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

/// Computes the sum of RFC 1071, word by word.
fn words(bytes: &[u8], start: u32) -> u16 {
    let mut sum = start;
    for word in bytes.chunks(2) {
        sum += u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Generates every set of offloads that a receiver may have.
pub(crate) fn receivers() -> impl Strategy<Value = Offloads> {
    any::<u8>().prop_map(|bits| {
        let offloads = Offloads::from_bits_truncate(bits) - Offloads::UFO;
        if offloads.contains(Offloads::CSUM) { offloads } else { Offloads::empty() }
    })
}
