//! Ethernet frames whose every byte tells where it belongs, and those in which neighbours ask for each other's addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ringferry_packet::checksum::pseudo_header_v6;
use ringferry_packet::ether::Mac;
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::Header;

/// An EtherType for local experiments (IEEE 802): no kernel and no switch has an opinion on it.
const EXPERIMENT: [u8; 2] = [0x88, 0xb5];

/// The address of guest `number`.
pub const fn mac(number: u8) -> Mac {
    Mac([0x52, 0x54, 0, 0, 0, number])
}

/// `len` bytes that differ from those of any other `seed`, and from themselves shifted.
pub fn pattern(seed: u32, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

/// A frame of `len` bytes, at least 14. The number is in it where there is room.
pub fn frame(to: Mac, from: Mac, len: usize, number: u32) -> Vec<u8> {
    let mut frame = [&to.0[..], &from.0, &EXPERIMENT].concat();
    frame.extend(number.to_le_bytes());
    frame.extend(pattern(number, len.saturating_sub(frame.len())));
    frame.truncate(len);
    frame
}

/// The number in a frame made by [`frame`].
pub fn number(frame: &[u8]) -> u32 {
    u32::from_le_bytes(frame[14..18].try_into().unwrap())
}

/// Bytes of Ethernet, IP and TCP headers.
pub fn tcp_headers(v6: bool) -> usize {
    if v6 { 14 + 40 + 20 } else { 14 + 20 + 20 }
}

/// Sequence number of the first byte of payload in [`tcp`].
pub const SEQUENCE: u32 = 0xffff_f000;

/// A TCP frame as a sender's stack leaves it: checksum partial, to be cut every `mss` bytes (or not at
/// all with 0).
pub fn tcp(to: Mac, from: Mac, v6: bool, payload: &[u8], mss: u16) -> (Header, Vec<u8>) {
    let mut addresses = [0xfd; 32];
    addresses[16..].fill(0xfe);
    if !v6 {
        addresses[..8].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    }
    let packet = Packet {
        macs: [to.0, from.0],
        addresses,
        ports: [0x12, 0x34, 0x56, 0x78],
        sequence: SEQUENCE,
        flags: 0x18,
        ..Packet::plain(v6, true, payload.to_vec())
    };
    let (header, frame) = packet.sent(mss);
    let header = Header { hdr_len: if mss == 0 { 0 } else { packet.payload_at() as u16 }, ..header };
    (header, frame)
}

/// The same frame with an 802.1Q tag.
pub fn tagged(frame: &[u8], vid: u16) -> Vec<u8> {
    [&frame[..12], &[0x81, 0], &vid.to_be_bytes(), &frame[12..]].concat()
}

/// An ARP packet (RFC 826) whose sender is `from` with the address `sender`; `operation` 1 is a request, 2 a reply.
pub fn arp(to: Mac, from: Mac, operation: u8, sender: Ipv4Addr, target: Mac, wanted: Ipv4Addr) -> Vec<u8> {
    let header = [8, 6, 0, 1, 8, 0, 6, 4, 0, operation];
    [&to.0[..], &from.0, &header, &from.0, &sender.octets(), &target.0, &wanted.octets()].concat()
}

/// A neighbour solicitation (RFC 4861, 4.3) from `source`, to the solicited-node group of `wanted`.
pub fn solicitation(from: Mac, source: Ipv6Addr, wanted: Ipv6Addr) -> Vec<u8> {
    let (source, wanted) = (source.octets(), wanted.octets());
    let mut group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 0).octets();
    group[13..].copy_from_slice(&wanted[13..]);
    let mut icmp = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &wanted, &[1, 1], &from.0].concat();
    let mut sum = pseudo_header_v6(source, group, 58, icmp.len() as u32);
    sum.add(&icmp);
    icmp[2..4].copy_from_slice(&sum.finish().to_be_bytes());
    let ip = [0x86, 0xdd, 0x60, 0, 0, 0, 0, icmp.len() as u8, 58, 255];
    [&[0x33, 0x33][..], &group[12..], &from.0, &ip, &source, &group, &icmp].concat()
}

/// The address that a frame says its sender has: in ARP, as the source of IPv4, in a neighbour advertisement.
pub fn claimed_address(frame: &[u8]) -> Option<IpAddr> {
    let v4 = |at| frame[at..].first_chunk().map(|bytes: &[u8; 4]| Ipv4Addr::from(*bytes).into());
    match frame[12..14] {
        [8, 6] => v4(28),
        [8, 0] => v4(26),
        [0x86, 0xdd] if frame[20] == 58 && frame[54] == 136 => {
            frame[62..].first_chunk().map(|bytes: &[u8; 16]| Ipv6Addr::from(*bytes).into())
        }
        _ => None,
    }
}
