//! Which flow a frame belongs to: the fields that name it, and a number made of them.
//!
//! Two numbers serve two ends. [`flow_hash`] is cheap and the same in both directions of a connection: what a
//! guest sends tells where its replies go. [`RssHasher`] computes what VIRTIO (5.1.6.4.3) and the receive-side
//! scaling of Windows prescribe, with the driver's key.
//!
//! Both read the prefix of a frame that is already private memory, in which nothing is believed: what does not
//! lie in the prefix is not hashed. Pass the same number of bytes for every frame of a port. 64 reach the ports of
//! IPv4, options or a VLAN tag included, and of IPv6 without extension headers.

use crate::ether::{self, Link, be16};
use crate::extension::{DESTINATION_OPTIONS, Extension, MAX_EXTENSIONS, ROUTING};
use crate::parse::{IPV6_LEN, IpVersion, PROTO_SCTP, PROTO_TCP, PROTO_UDP};

mod rss;
mod toeplitz;

pub use rss::{HashTypes, PacketHash, RssHasher};
pub use toeplitz::{KEY_LEN, SYMMETRIC_KEY, Toeplitz};

/// Length of an IPv4 header without options.
const IPV4_LEN: usize = 20;
/// More-fragments flag and fragment offset of IPv4.
const IPV4_FRAGMENT: u16 = 0x3fff;

/// What names the flow of an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fields<'a> {
    ip: IpVersion,
    /// Source and destination: 4 or 16 bytes each.
    addresses: [&'a [u8]; 2],
    /// Transport protocol; that of the last header in the prefix, where the transport header lies beyond it.
    proto: u8,
    /// Source and destination port, of a protocol that has them, in a packet that is whole.
    ports: Option<[u8; 4]>,
    /// IPv6 extension headers are there.
    extended: bool,
    /// Home address option (RFC 6275, 6.3).
    home: Option<&'a [u8]>,
    /// Address of a type 2 routing header (RFC 6275, 6.4).
    route: Option<&'a [u8]>,
}

impl<'a> Fields<'a> {
    /// Reads the prefix of a frame; `None` if it is not an IP packet whose addresses lie in it.
    fn parse(prefix: &'a [u8]) -> Option<Self> {
        let Link { ether_type, l3, .. } = Link::parse(prefix)?;
        match ether_type {
            ether::TYPE_IPV4 => Self::parse_ipv4(prefix, l3),
            ether::TYPE_IPV6 => Self::parse_ipv6(prefix, l3),
            _ => None,
        }
    }

    fn parse_ipv4(prefix: &'a [u8], l3: usize) -> Option<Self> {
        let header = prefix.get(l3..l3 + IPV4_LEN)?;
        let len = usize::from(header[0] & 0x0f) * 4;
        if header[0] >> 4 != 4 || len < IPV4_LEN {
            return None;
        }
        let whole = be16(header, 6)? & IPV4_FRAGMENT == 0;
        let proto = header[9];
        Some(Self {
            ip: IpVersion::V4,
            addresses: [&header[12..16], &header[16..20]],
            proto,
            ports: if whole { ports(prefix, l3 + len, proto) } else { None },
            extended: false,
            home: None,
            route: None,
        })
    }

    fn parse_ipv6(prefix: &'a [u8], l3: usize) -> Option<Self> {
        let header = prefix.get(l3..l3 + IPV6_LEN)?;
        if header[0] >> 4 != 6 {
            return None;
        }
        let mut fields = Self {
            ip: IpVersion::V6,
            addresses: [&header[8..24], &header[24..40]],
            proto: header[6],
            ports: None,
            extended: false,
            home: None,
            route: None,
        };
        let mut at = l3 + IPV6_LEN;
        // One turn more than headers may be skipped: the last sees the transport protocol.
        for _ in 0..=MAX_EXTENSIONS {
            let Some(extension) = Extension::read(fields.proto, prefix, at) else {
                fields.ports = ports(prefix, at, fields.proto);
                break;
            };
            let Ok(Extension { next, len, fragment }) = extension else { break };
            let bytes = prefix.get(at..at + len);
            match fields.proto {
                DESTINATION_OPTIONS => fields.home = fields.home.or_else(|| home_address(bytes?)),
                ROUTING => fields.route = fields.route.or_else(|| routing_address(bytes?)),
                _ => {}
            }
            (fields.proto, fields.extended) = (next, true);
            if fragment.unwrap_or(true) {
                break;
            }
            at += len;
        }
        Some(fields)
    }
}

/// The ports behind `at`, if the protocol has any there.
fn ports(prefix: &[u8], at: usize, proto: u8) -> Option<[u8; 4]> {
    let has_ports = matches!(proto, PROTO_TCP | PROTO_UDP | PROTO_SCTP);
    prefix.get(at..)?.first_chunk().copied().filter(|_| has_ports)
}

/// The home address option of a destination options header.
fn home_address(header: &[u8]) -> Option<&[u8]> {
    const PAD1: u8 = 0;
    const HOME_ADDRESS: u8 = 201;
    let mut options = header.get(2..)?;
    loop {
        options = match *options {
            [PAD1, ref rest @ ..] => rest,
            [HOME_ADDRESS, 16, ref rest @ ..] => return rest.get(..16),
            [_, len, ref rest @ ..] => rest.get(usize::from(len)..)?,
            _ => return None,
        };
    }
}

/// The address in a routing header of type 2.
fn routing_address(header: &[u8]) -> Option<&[u8]> {
    if *header.get(2)? == 2 { header.get(8..24) } else { None }
}

/// A number that is the same for all frames of a connection, in both directions: what stands for the flow where
/// queues and workers are chosen. Addresses, protocol and ports for IP; addresses without ports for fragments, of
/// which all of a datagram agree, and where ports lie beyond the prefix; MAC addresses and EtherType for
/// anything else.
///
/// It is no protection against a sender who wants collisions: those share a queue. The value may change
/// between versions.
#[inline]
#[must_use]
pub fn flow_hash(prefix: &[u8]) -> u32 {
    // Most packets: no VLAN tag, no options or extension headers, no fragment.
    if let Some(head) = prefix.first_chunk::<38>()
        && let [0x08, 0x00, 0x45] = [head[12], head[13], head[14]]
        && u16::from_be_bytes([head[20], head[21]]) & IPV4_FRAGMENT == 0
        && let proto @ (PROTO_TCP | PROTO_UDP) = head[23]
    {
        let side = |address: usize, port: usize| {
            let address = [head[address], head[address + 1], head[address + 2], head[address + 3]];
            side_v4(u32::from_be_bytes(address), u16::from_be_bytes([head[port], head[port + 1]]))
        };
        return finish(side(26, 34), side(30, 36), proto.into());
    }
    if let Some(head) = prefix.first_chunk::<58>()
        && let [0x86, 0xdd, 6] = [head[12], head[13], head[14] >> 4]
        && let proto @ (PROTO_TCP | PROTO_UDP) = head[20]
    {
        let word = |at: usize| u64::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
        let side = |address: usize, port: usize| {
            side_v6(word(address), word(address + 8), u16::from_be_bytes([head[port], head[port + 1]]))
        };
        return finish(side(22, 54), side(38, 56), proto.into());
    }
    flow_hash_general(prefix)
}

/// [`flow_hash`] of any frame.
fn flow_hash_general(prefix: &[u8]) -> u32 {
    let Some(Fields { ip, addresses: [source, destination], proto, ports, .. }) = Fields::parse(prefix)
    else {
        let ether_type = be16(prefix, 12).unwrap_or(0);
        let address = |at: usize| be(prefix.get(at..at + 6).unwrap_or(&[]));
        return finish(stir(address(0)), stir(address(6)), ether_type.into());
    };
    let [s0, s1, d0, d1] = ports.unwrap_or_default();
    let side = |address: &[u8], port| match ip {
        // Four bytes, by the parser.
        IpVersion::V4 => side_v4(be(address) as u32, port),
        IpVersion::V6 => {
            let (high, low) = address.split_at(8);
            side_v6(be(high), be(low), port)
        }
    };
    let source = side(source, u16::from_be_bytes([s0, s1]));
    let destination = side(destination, u16::from_be_bytes([d0, d1]));
    finish(source, destination, proto.into())
}

/// Up to eight bytes as a number.
fn be(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// One end of a connection over IPv4.
#[inline]
const fn side_v4(address: u32, port: u16) -> u64 {
    stir((address as u64) << 16 | port as u64)
}

/// One end of a connection over IPv6.
#[inline]
const fn side_v6(high: u64, low: u64, port: u16) -> u64 {
    stir(stir(stir(high) ^ low) ^ port as u64)
}

/// Mixes every bit of `word` into every bit of the result: both halves of the product with an odd constant
/// (2^64 over the golden ratio).
#[inline]
const fn stir(word: u64) -> u64 {
    let product = (word ^ 0xd6e8_feb8_6659_fd93) as u128 * 0x9e37_79b9_7f4a_7c15;
    product as u64 ^ (product >> 64) as u64
}

/// Puts both ends together, in any order. A sum: ends that are equal do not cancel out, as they would in an
/// exclusive or. Callers reduce the result by modulo or by multiplication, so both ends of it vary.
#[inline]
const fn finish(one: u64, other: u64, kind: u64) -> u32 {
    stir(one.wrapping_add(other) ^ kind) as u32
}

#[cfg(test)]
mod tests;
