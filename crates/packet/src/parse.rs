//! Parsing of a frame's layers: Ethernet, IPv4 with options or IPv6 with extension headers, TCP or UDP.
//!
//! Like those of [`ether`], the functions are pure and read a prefix of the frame that is private memory. Only the
//! fields that are needed to find the next layer are checked. The length fields of IP are not, as they are meaningless
//! in a frame that has not been segmented yet.

use thiserror::Error;

use crate::ether::{self, Link, be16};
use crate::extension::{Cut, Extension};
use crate::vnet;

pub use crate::extension::MAX_EXTENSIONS;

/// IP protocol number of TCP.
pub const PROTO_TCP: u8 = 6;
/// IP protocol number of UDP.
pub const PROTO_UDP: u8 = 17;
/// IP protocol number of SCTP, whose ports are at the same offsets as those of TCP and UDP.
pub const PROTO_SCTP: u8 = 132;

/// Length in bytes of an IPv6 header without extension headers.
pub(crate) const IPV6_LEN: usize = 40;
/// More-fragments flag and fragment offset, in the two bytes at 6 of an IPv4 header.
pub(crate) const IPV4_FRAGMENT: u16 = 0x3fff;
/// Offset of the checksum in a TCP header.
pub(crate) const TCP_CHECKSUM: usize = 16;
/// Offset of the checksum in a UDP header.
pub(crate) const UDP_CHECKSUM: usize = 6;
/// Length in bytes of a TCP header without options.
pub(crate) const TCP_MIN_LEN: usize = 20;
/// Length in bytes of a UDP header.
pub(crate) const UDP_LEN: usize = 8;

/// Version of the Internet Protocol.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum IpVersion {
    /// Internet Protocol version 4 (RFC 791).
    V4,
    /// Internet Protocol version 6 (RFC 8200).
    V6,
}

/// The reason for which the layers of a frame cannot be parsed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ParseError {
    /// The bytes end inside a header.
    #[error("the frame ends inside its headers; drop it if it needs software offload")]
    Truncated,
    /// The EtherType is neither IPv4 nor IPv6.
    #[error("EtherType {0:#06x} is neither IPv4 nor IPv6; forward the frame by its MAC addresses only")]
    NotIp(u16),
    /// The version or the header length contradicts the format.
    #[error("malformed {0} header; drop the frame if it needs software offload")]
    Malformed(&'static str),
    /// There are more than [`MAX_EXTENSIONS`] IPv6 extension headers.
    #[error("more than {MAX_EXTENSIONS} IPv6 extension headers; drop the frame if it needs software offload")]
    TooManyExtensions,
}

/// Offsets of the layers, in bytes from the start of the frame: `l3 < l4 <= payload`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layers {
    /// Start of the IP header.
    pub l3: usize,
    /// Start of the transport header, behind IPv4 options or IPv6 extension headers.
    pub l4: usize,
    /// Start of the transport payload; equal to `l4` if the transport is neither TCP nor UDP, or in
    /// a fragment.
    pub payload: usize,
    /// Version of the IP header.
    pub ip: IpVersion,
    /// Transport protocol number, such as [`PROTO_TCP`].
    pub proto: u8,
    /// True if this is an IP fragment, the first one included. Its transport header is not parsed.
    pub fragment: bool,
}

impl Layers {
    /// Parses the layers of the frame that starts with `prefix`.
    ///
    /// # Errors
    /// [`ParseError`]; all headers, TCP options included, must be completely in `prefix`.
    pub fn parse(prefix: &[u8]) -> Result<Layers, ParseError> {
        let mut layers = Layers::parse_network(prefix)?;
        let len = match layers.proto {
            _ if layers.fragment => 0,
            PROTO_TCP => {
                let words = byte(prefix, layers.l4 + 12)? >> 4;
                match usize::from(words) * 4 {
                    TCP_MIN_LEN.. => usize::from(words) * 4,
                    _ => return Err(ParseError::Malformed("TCP")),
                }
            }
            PROTO_UDP => UDP_LEN,
            _ => 0,
        };
        layers.payload = layers.l4 + len;
        if layers.payload > prefix.len() { Err(ParseError::Truncated) } else { Ok(layers) }
    }

    /// Parses link and network layer only and sets `payload` to `l4`, which may be beyond the prefix.
    pub(crate) fn parse_network(prefix: &[u8]) -> Result<Layers, ParseError> {
        let Link { ether_type, l3, .. } = Link::parse(prefix).ok_or(ParseError::Truncated)?;
        match ether_type {
            ether::TYPE_IPV4 => parse_ipv4(prefix, l3),
            ether::TYPE_IPV6 => parse_ipv6(prefix, l3),
            other => Err(ParseError::NotIp(other)),
        }
    }

    /// Returns true if the `gso_type` of `header` agrees with the protocols of this frame, or requests no segmentation.
    #[must_use]
    pub const fn agree_with(&self, header: &vnet::Header) -> bool {
        let transport = match header.gso_type & !vnet::GSO_ECN {
            vnet::GSO_NONE => return true,
            vnet::GSO_TCPV4 if matches!(self.ip, IpVersion::V4) => PROTO_TCP,
            vnet::GSO_TCPV6 if matches!(self.ip, IpVersion::V6) => PROTO_TCP,
            vnet::GSO_UDP | vnet::GSO_UDP_L4 => PROTO_UDP,
            _ => return false,
        };
        self.proto == transport
    }
}

fn parse_ipv4(prefix: &[u8], l3: usize) -> Result<Layers, ParseError> {
    let first = byte(prefix, l3)?;
    let len = usize::from(first & 0x0f) * 4;
    if first >> 4 != 4 || len < 20 {
        return Err(ParseError::Malformed("IPv4"));
    }
    if prefix.len() < l3 + len {
        return Err(ParseError::Truncated);
    }
    let fragment = be16(prefix, l3 + 6).ok_or(ParseError::Truncated)? & IPV4_FRAGMENT != 0;
    let proto = byte(prefix, l3 + 9)?;
    Ok(Layers { l3, l4: l3 + len, payload: l3 + len, ip: IpVersion::V4, proto, fragment })
}

fn parse_ipv6(prefix: &[u8], l3: usize) -> Result<Layers, ParseError> {
    if byte(prefix, l3)? >> 4 != 6 {
        return Err(ParseError::Malformed("IPv6"));
    }
    let mut proto = byte(prefix, l3 + 6)?;
    let mut l4 = l3 + IPV6_LEN;
    let layers = |l4, proto, fragment| Ok(Layers { l3, l4, payload: l4, ip: IpVersion::V6, proto, fragment });
    // There is one iteration more than headers may be skipped, so that the last one can find the transport protocol.
    for _ in 0..=MAX_EXTENSIONS {
        let Some(extension) = Extension::read(proto, prefix, l4) else {
            let whole = prefix.len() >= l3 + IPV6_LEN;
            return if whole { layers(l4, proto, false) } else { Err(ParseError::Truncated) };
        };
        let Extension { next, len, fragment } = extension?;
        (proto, l4) = (next, l4 + len);
        if fragment.ok_or(ParseError::Truncated)? {
            return layers(l4, proto, true);
        }
    }
    Err(ParseError::TooManyExtensions)
}

impl From<Cut> for ParseError {
    fn from(_: Cut) -> Self {
        Self::Truncated
    }
}

#[inline]
fn byte(bytes: &[u8], at: usize) -> Result<u8, ParseError> {
    bytes.get(at).copied().ok_or(ParseError::Truncated)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Packet;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use crate::extension::{AUTHENTICATION, FRAGMENT, HOP_BY_HOP, ROUTING};

    /// An IPv6 frame whose payload starts with the given extension headers (type, bytes), then TCP.
    fn ipv6(extensions: &[(u8, Vec<u8>)]) -> Vec<u8> {
        let packet = Packet::plain(true, true, vec![]);
        let mut frame = packet.partial();
        let tcp = frame.split_off(packet.l4());
        let mut link = packet.l3() + 6;
        for (kind, bytes) in extensions {
            frame[link] = *kind;
            link = frame.len();
            frame.extend(bytes);
        }
        frame[link] = PROTO_TCP;
        frame.extend(tcp);
        frame
    }

    #[test]
    fn ipv6_extension_headers_have_lengths_of_their_own_kind() {
        let extensions = [
            (HOP_BY_HOP, vec![0; 8]),
            (ROUTING, [vec![0, 2], vec![0; 22]].concat()),
            (AUTHENTICATION, [vec![0, 4], vec![0; 22]].concat()),
            (FRAGMENT, vec![0, 0xff, 0, 0, 1, 2, 3, 4]),
        ];
        let layers = Layers::parse(&ipv6(&extensions)).unwrap();
        assert_eq!((layers.l4, layers.proto, layers.fragment), (14 + 40 + 8 + 24 + 24 + 8, PROTO_TCP, false));
    }

    #[test]
    fn number_of_ipv6_extension_headers_is_bounded() {
        let many = |count| ipv6(&vec![(HOP_BY_HOP, vec![0; 8]); count]);
        assert_eq!(Layers::parse(&many(MAX_EXTENSIONS)).unwrap().l4, 14 + 40 + 8 * MAX_EXTENSIONS);
        assert_eq!(Layers::parse(&many(MAX_EXTENSIONS + 1)), Err(ParseError::TooManyExtensions));
    }

    #[test]
    fn ipv6_fragments_are_recognised() {
        for offset_and_more in [[0, 1], [0, 8], [0x05, 0xa0]] {
            let fragment = (FRAGMENT, [&[0, 0], &offset_and_more[..], &[0; 4]].concat());
            let layers = Layers::parse(&ipv6(&[fragment])).unwrap();
            assert_eq!((layers.fragment, layers.payload), (true, layers.l4));
        }
    }

    #[test]
    fn ipv4_fragments_are_recognised() {
        for (bits, fragment) in [([0x40, 0], false), ([0x20, 0], true), ([0, 1], true), ([0x1f, 0xff], true)]
        {
            let mut frame = Packet::plain(false, true, vec![]).partial();
            frame[20..22].copy_from_slice(&bits);
            assert_eq!(Layers::parse(&frame).unwrap().fragment, fragment, "{bits:?}");
        }
    }

    #[test]
    fn header_lengths_below_the_minimum_are_refused() {
        let mut frame = Packet::plain(false, true, vec![]).partial();
        frame[34 + 12] = 0x40;
        assert_eq!(Layers::parse(&frame), Err(ParseError::Malformed("TCP")));
        frame[14] = 0x44;
        assert_eq!(Layers::parse(&frame), Err(ParseError::Malformed("IPv4")));
        frame[14] = 0x65;
        assert_eq!(Layers::parse(&frame), Err(ParseError::Malformed("IPv4")));
        let mut frame = Packet::plain(true, true, vec![]).partial();
        frame[14] = 0x45;
        assert_eq!(Layers::parse(&frame), Err(ParseError::Malformed("IPv6")));
    }

    #[test]
    fn other_ethertypes_are_not_ip() {
        let mut frame = Packet::plain(false, true, vec![]).partial();
        frame[12..14].copy_from_slice(&ether::TYPE_ARP.to_be_bytes());
        assert_eq!(Layers::parse(&frame), Err(ParseError::NotIp(ether::TYPE_ARP)));
    }

    proptest! {
        #[test]
        fn layers_of_any_packet_are_found(packet in Packet::any(40)) {
            let layers = Layers::parse(&packet.partial()).unwrap();
            let ip = if packet.v6 { IpVersion::V6 } else { IpVersion::V4 };
            let expected = Layers {
                l3: packet.l3(),
                l4: packet.l4(),
                payload: packet.payload_at(),
                ip,
                proto: packet.proto(),
                fragment: false,
            };
            prop_assert_eq!(layers, expected);
            prop_assert!(layers.agree_with(&packet.gso_header(1)));
        }

        #[test]
        fn headers_cut_short_are_refused(packet in Packet::any(0), cut: prop::sample::Index) {
            let frame = packet.partial();
            prop_assert_eq!(Layers::parse(&frame[..cut.index(frame.len())]), Err(ParseError::Truncated));
        }

        #[test]
        fn any_bytes_do_no_harm(mut frame in vec(any::<u8>(), 0..200), kind in 0..3usize) {
            let kind = [None, Some(ether::TYPE_IPV4), Some(ether::TYPE_IPV6)][kind];
            if let (Some(ether_type), Some(kind)) = (frame.get_mut(12..14), kind) {
                ether_type.copy_from_slice(&kind.to_be_bytes());
            }
            if let Ok(layers) = Layers::parse(&frame) {
                prop_assert!(layers.l3 < layers.l4 && layers.l4 <= layers.payload);
                prop_assert!(layers.payload <= frame.len());
            }
        }
    }
}
