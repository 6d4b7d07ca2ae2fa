//! Ethernet frames whose every byte tells where it belongs.

use ringferry_packet::checksum::{self, pseudo_header_v4, pseudo_header_v6};
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, Header};

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
    let len = 20 + payload.len();
    let mut frame = [&to.0[..], &from.0].concat();
    let pseudo = if v6 {
        let (source, destination) = ([0xfd; 16], [0xfe; 16]);
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend(u16::try_from(len).unwrap().to_be_bytes());
        frame.extend([6, 64]);
        frame.extend([source, destination].concat());
        pseudo_header_v6(source, destination, 6, len as u32)
    } else {
        let (source, destination) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        frame.extend([8, 0, 0x45, 0]);
        frame.extend(u16::try_from(20 + len).unwrap().to_be_bytes());
        frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0]);
        frame.extend([source, destination].concat());
        let mut sum = checksum::Sum::new();
        sum.add(&frame[14..34]);
        frame[24..26].copy_from_slice(&sum.finish().to_be_bytes());
        pseudo_header_v4(source, destination, 6, len as u16)
    };
    let csum_start = frame.len() as u16;
    frame.extend([0x12, 0x34, 0x56, 0x78]);
    frame.extend(SEQUENCE.to_be_bytes());
    frame.extend([0, 0, 0, 1, 0x50, 0x18, 1, 0]);
    frame.extend(pseudo.partial().to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(payload);
    let gso_type = match (mss, v6) {
        (0, _) => 0,
        (_, false) => GSO_TCPV4,
        (_, true) => GSO_TCPV6,
    };
    let header = Header {
        flags: F_NEEDS_CSUM,
        gso_type,
        hdr_len: if mss == 0 { 0 } else { tcp_headers(v6) as u16 },
        gso_size: mss,
        csum_start,
        csum_offset: 16,
        num_buffers: 0,
    };
    (header, frame)
}
