//! Flow hashes of frames: multiplicative hashes for our own purposes, and the Toeplitz hash of RSS.
//!
//! [`flow_hash`] is cheap and the same in both directions of a connection, so that the packets a guest sends determine
//! the queue of its replies. [`one_way_flow_hash`] is cheaper still and groups the packets of one burst. [`RssHasher`]
//! computes the hash that VIRTIO (5.1.6.4.3) and the receive-side scaling of Windows define, with the driver's key; a
//! device makes one when the driver configures RSS and uses it until the next configuration.
//!
//! All read the prefix of a frame that is private memory; fields beyond the prefix are not hashed. The caller must
//! pass the same number of bytes for all frames of a port. 64 bytes contain the ports of IPv4, with options or a VLAN
//! tag, and of IPv6 without extension headers.

use crate::ether::{self, Link, be16};
use crate::extension::{DESTINATION_OPTIONS, Extension, MAX_EXTENSIONS, ROUTING};
use crate::parse::{IPV6_LEN, IpVersion, PROTO_SCTP, PROTO_TCP, PROTO_UDP};

mod rss;
mod toeplitz;

pub use rss::{HashTypes, PacketHash, RssHasher};
pub use toeplitz::{KEY_LEN, SYMMETRIC_KEY, Toeplitz};

/// Length of an IPv4 header without options.
const IPV4_LEN: usize = 20;
/// Mask of the more-fragments flag and the fragment offset of IPv4.
const IPV4_FRAGMENT: u16 = 0x3fff;

/// The fields that identify the flow of an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fields<'a> {
    ip: IpVersion,
    /// Source and destination address, 4 or 16 bytes each.
    addresses: [&'a [u8]; 2],
    /// Transport protocol, or the type of the next header where the prefix ended.
    proto: u8,
    /// Source and destination port, if the protocol has them and the packet is not a fragment.
    ports: Option<[u8; 4]>,
    /// True if the packet has IPv6 extension headers.
    extended: bool,
    /// Home address option (RFC 6275, 6.3).
    home: Option<&'a [u8]>,
    /// Address of a type 2 routing header (RFC 6275, 6.4).
    route: Option<&'a [u8]>,
}

impl<'a> Fields<'a> {
    /// Parses the prefix of a frame; `None` if it is not an IP packet or its addresses are not in the prefix.
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
        // There is one iteration more than headers may be skipped, so that the last one can find the transport
        // protocol.
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

/// Returns the ports at offset `at`, if the protocol has ports.
fn ports(prefix: &[u8], at: usize, proto: u8) -> Option<[u8; 4]> {
    let has_ports = matches!(proto, PROTO_TCP | PROTO_UDP | PROTO_SCTP);
    prefix.get(at..)?.first_chunk().copied().filter(|_| has_ports)
}

/// Returns the home address option of a destination options header, if it has one.
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

/// Returns the address in a routing header, if that is of type 2.
fn routing_address(header: &[u8]) -> Option<&[u8]> {
    if *header.get(2)? == 2 { header.get(8..24) } else { None }
}

/// Computes a hash that is the same for all frames of a connection, in both directions; it selects queues and workers.
/// It covers addresses, protocol and ports of IP; no ports in fragments, so that all fragments of a datagram have the
/// same hash, or if the ports are beyond the prefix; MAC addresses and EtherType of other frames.
///
/// It has no key, so a sender can cause collisions; colliding flows share a queue. The value may change between
/// versions.
#[inline]
#[must_use]
pub fn flow_hash(prefix: &[u8]) -> u32 {
    match Plain::read(prefix) {
        Some(Plain::V4(head)) => {
            let side = |address: usize, port: usize| {
                let address = [head[address], head[address + 1], head[address + 2], head[address + 3]];
                endpoint_v4(u32::from_be_bytes(address), u16::from_be_bytes([head[port], head[port + 1]]))
            };
            combine(side(26, 34), side(30, 36), head[23].into())
        }
        Some(Plain::V6(head)) => {
            let word = |at: usize| u64::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
            let side = |address: usize, port: usize| {
                endpoint_v6(
                    word(address),
                    word(address + 8),
                    u16::from_be_bytes([head[port], head[port + 1]]),
                )
            };
            combine(side(22, 54), side(38, 56), head[20].into())
        }
        None => flow_hash_general(prefix),
    }
}

/// Computes a hash that is the same for all plain packets of one direction of a connection; it groups the packets of one
/// burst by flow. Returns `None` for a frame that is not a plain packet, whose headers have to be read to tell its flow.
/// The upper bits of the hash vary most.
///
/// [`flow_hash`] would do as well, but has to be symmetric and good in all bits, which costs 20 to 50 instructions more
/// for each frame that may be merged.
#[inline]
#[must_use]
pub fn one_way_flow_hash(prefix: &[u8]) -> Option<u32> {
    let words = match Plain::read(prefix)? {
        Plain::V4(head) => {
            let word = |at: usize| u32::from_ne_bytes(std::array::from_fn(|byte| head[at + byte]));
            word(26) ^ word(30).rotate_left(11) ^ word(34).rotate_left(22)
        }
        Plain::V6(head) => {
            let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| head[at + byte]));
            let address = |at: usize| {
                let halves = word(at) ^ word(at + 8);
                halves as u32 ^ (halves >> 32) as u32
            };
            let ports = u32::from_ne_bytes([head[54], head[55], head[56], head[57]]);
            address(22) ^ address(38).rotate_left(11) ^ ports.rotate_left(22)
        }
    };
    // Knuth's multiplier: the upper bits depend on all of them.
    Some(words.wrapping_mul(0x9e37_79b1))
}

/// The beginning of a plain packet, as most are, whose addresses and ports lie at fixed places: TCP or UDP over IP,
/// without VLAN tag, IPv4 options or IPv6 extension headers, and not a fragment.
enum Plain<'a> {
    V4(&'a [u8; 38]),
    V6(&'a [u8; 58]),
}

impl<'a> Plain<'a> {
    #[inline]
    fn read(prefix: &'a [u8]) -> Option<Self> {
        let head: &[u8; 38] = prefix.first_chunk()?;
        let (ether_type, version) = (u16::from_be_bytes([head[12], head[13]]), head[14]);
        let whole = || u16::from_be_bytes([head[20], head[21]]) & IPV4_FRAGMENT == 0;
        match ether_type {
            ether::TYPE_IPV4 if version == 0x45 && matches!(head[23], PROTO_TCP | PROTO_UDP) && whole() => {
                Some(Self::V4(head))
            }
            ether::TYPE_IPV6 if version >> 4 == 6 && matches!(head[20], PROTO_TCP | PROTO_UDP) => {
                prefix.first_chunk().map(Self::V6)
            }
            _ => None,
        }
    }
}

/// Computes [`flow_hash`] of a frame of any shape.
fn flow_hash_general(prefix: &[u8]) -> u32 {
    let Some(Fields { ip, addresses: [source, destination], proto, ports, .. }) = Fields::parse(prefix)
    else {
        let ether_type = be16(prefix, 12).unwrap_or(0);
        let address = |at: usize| be(prefix.get(at..at + 6).unwrap_or(&[]));
        return combine(mix(address(0)), mix(address(6)), ether_type.into());
    };
    let [s0, s1, d0, d1] = ports.unwrap_or_default();
    let side = |address: &[u8], port| match ip {
        // The parser returns four bytes for IPv4.
        IpVersion::V4 => endpoint_v4(be(address) as u32, port),
        IpVersion::V6 => {
            let (high, low) = address.split_at(8);
            endpoint_v6(be(high), be(low), port)
        }
    };
    let source = side(source, u16::from_be_bytes([s0, s1]));
    let destination = side(destination, u16::from_be_bytes([d0, d1]));
    combine(source, destination, proto.into())
}

/// Reads up to eight bytes as a big-endian number.
fn be(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Hashes one endpoint of a connection over IPv4.
#[inline]
const fn endpoint_v4(address: u32, port: u16) -> u64 {
    mix((address as u64) << 16 | port as u64)
}

/// Hashes one endpoint of a connection over IPv6.
#[inline]
const fn endpoint_v6(high: u64, low: u64, port: u16) -> u64 {
    mix(mix(mix(high) ^ low) ^ port as u64)
}

/// Mixes every bit of `word` into every bit of the result (folded multiplication): the exclusive or of both halves of
/// the product with an odd constant, 2^64 over the golden ratio.
#[inline]
const fn mix(word: u64) -> u64 {
    let product = (word ^ 0xd6e8_feb8_6659_fd93) as u128 * 0x9e37_79b9_7f4a_7c15;
    product as u64 ^ (product >> 64) as u64
}

/// Combines the hashes of both endpoints independently of their order. It uses a sum, as equal endpoints would cancel
/// each other out in an exclusive or. Callers reduce the result by modulo or by multiplication, so its low and its high
/// bits both vary.
#[inline]
const fn combine(one: u64, other: u64, kind: u64) -> u32 {
    mix(one.wrapping_add(other) ^ kind) as u32
}

#[cfg(test)]
mod tests;
