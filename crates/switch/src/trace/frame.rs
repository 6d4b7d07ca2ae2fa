//! Makes the frame that nobody has sent: Ethernet, maybe a tag, and a packet of one of a few protocols with correct lengths and checksums.

use std::net::{Ipv4Addr, Ipv6Addr};

use ringferry_control::trace::TraceProtocol;
use ringferry_packet::checksum::{self, Sum, pseudo_header_v4, pseudo_header_v6};
use ringferry_packet::ether::{Mac, TYPE_ARP, TYPE_IPV4, TYPE_IPV6, TYPE_VLAN};
use ringferry_packet::parse::{PROTO_TCP, PROTO_UDP};
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Header};

use crate::rules::Vid;

/// An EtherType for experiments (IEEE 802, 9.2.3).
const TYPE_EXPERIMENT: u16 = 0x88b5;
const PROTO_ICMP: u8 = 1;
const PROTO_ICMPV6: u8 = 58;
/// Bytes of the shortest frame that a wire carries, without its check sequence.
const SHORTEST: usize = 60;
/// Bytes of the largest IP packet.
const LARGEST_PACKET: usize = 65_535;
/// Segments of a frame that is to be cut, if nobody says how long it is.
const SEGMENTS: usize = 10;

/// A frame to be made.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) source: Mac,
    pub(super) destination: Mac,
    /// The VLAN of its tag.
    pub(super) vlan: Option<Vid>,
    pub(super) protocol: TraceProtocol,
    /// Its length in bytes.
    pub(super) size: Option<u32>,
    /// Bytes of payload in each segment into which it is to be cut.
    pub(super) gso: Option<u16>,
    /// Its checksum is left out.
    pub(super) csum: bool,
    pub(super) v4: [Ipv4Addr; 2],
    pub(super) v6: [Ipv6Addr; 2],
    /// Source and destination port in TCP or UDP.
    pub(super) ports: [Option<u16>; 2],
}

/// Ports that nobody has, of a frame for which none is said.
const PORTS: [u16; 2] = [49_152, 4242];

impl Spec {
    fn is_v6(&self) -> bool {
        use TraceProtocol::{Nd, Ping6, Tcp6, Udp6};
        matches!(self.protocol, Tcp6 | Udp6 | Ping6 | Nd)
    }

    /// Protocol number and length of the transport header, for TCP and UDP.
    fn transport(&self) -> Option<(u8, usize, u16)> {
        use TraceProtocol::{Tcp4, Tcp6, Udp4, Udp6};
        match self.protocol {
            Tcp4 | Tcp6 => Some((PROTO_TCP, 20, 16)),
            Udp4 | Udp6 => Some((PROTO_UDP, 8, 6)),
            _ => None,
        }
    }

    /// Makes the frame with its virtual header.
    ///
    /// # Errors
    /// There is no such frame; says why.
    pub(super) fn build(&self) -> Result<(Header, Vec<u8>), String> {
        let name = self.protocol.name();
        if (self.gso.is_some() || self.csum) && self.transport().is_none() {
            return Err(format!(
                "a frame of {name} has no offloads: --gso and --csum are for tcp4, tcp6, udp4 and udp6"
            ));
        }
        let mut frame = [self.destination.0, self.source.0].concat();
        if let Some(vlan) = self.vlan {
            frame.extend(TYPE_VLAN.to_be_bytes());
            frame.extend(vlan.to_be_bytes());
        }
        let l3 = frame.len() + 2;
        match self.protocol {
            TraceProtocol::Raw => {
                frame.extend(TYPE_EXPERIMENT.to_be_bytes());
                frame.resize(self.length(name, frame.len(), l3 + LARGEST_PACKET)?, 0);
                return Ok((Header::NONE, frame));
            }
            TraceProtocol::Arp => {
                self.arp(&mut frame);
                frame.resize(self.length(name, frame.len(), frame.len().max(SHORTEST))?, 0);
                return Ok((Header::NONE, frame));
            }
            _ => {}
        }
        let network = if self.is_v6() { 40 } else { 20 };
        let l4 = l3 + network;
        let body = self.body(l4)?;
        let [source, destination] = self.v4;
        let [source6, destination6] = self.v6();
        let len = network + body.bytes.len();
        if self.is_v6() {
            frame.extend(TYPE_IPV6.to_be_bytes());
            frame.extend([0x60, 0, 0, 0]);
            frame.extend((body.bytes.len() as u16).to_be_bytes());
            // Neighbour discovery is never routed (RFC 4861, 7.1.1).
            frame.extend([body.proto, 255]);
            frame.extend(source6.octets());
            frame.extend(destination6.octets());
        } else {
            let [source, destination] = match self.protocol {
                TraceProtocol::Dhcp => [Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST],
                _ => [source, destination],
            };
            frame.extend(TYPE_IPV4.to_be_bytes());
            frame.extend([0x45, 0]);
            frame.extend((len as u16).to_be_bytes());
            // May not be fragmented, as nearly all packets today.
            frame.extend([0, 0, 0x40, 0, 64, body.proto, 0, 0]);
            frame.extend(source.octets());
            frame.extend(destination.octets());
            let mut sum = Sum::new();
            sum.add(&frame[l3..]);
            let at = l3 + 10;
            frame[at..at + 2].copy_from_slice(&sum.finish().to_be_bytes());
        }
        let (proto, transport) = (body.proto, body.bytes.len());
        frame.extend(&body.bytes);
        let header = Header {
            flags: F_NEEDS_CSUM,
            csum_start: l4 as u16,
            csum_offset: body.checksum,
            ..Header::default()
        };
        let field = l4 + usize::from(body.checksum);
        let pseudo = if self.is_v6() {
            pseudo_header_v6(source6.octets(), destination6.octets(), proto, transport as u32)
        } else if proto == PROTO_ICMP {
            Sum::new()
        } else {
            let [from, to] = [l3 + 12, l3 + 16].map(|at| [0, 1, 2, 3].map(|byte| frame[at + byte]));
            pseudo_header_v4(from, to, proto, transport as u16)
        };
        frame[field..field + 2].copy_from_slice(&pseudo.partial().to_be_bytes());
        frame.resize(frame.len().max(SHORTEST), 0);
        if let Some(gso) = self.gso {
            let gso_type = match self.protocol {
                TraceProtocol::Tcp4 => GSO_TCPV4,
                TraceProtocol::Tcp6 => GSO_TCPV6,
                _ => GSO_UDP_L4,
            };
            let hdr_len = (l4 + self.transport().map_or(0, |(_, len, _)| len)) as u16;
            return Ok((Header { gso_type, gso_size: gso, hdr_len, ..header }, frame));
        }
        if self.csum {
            return Ok((header, frame));
        }
        // Padding behind the packet is no part of the sum.
        checksum::complete(&header, &mut frame[..l4 + transport]).map_err(|error| error.to_string())?;
        Ok((Header::NONE, frame))
    }

    /// Source and destination in IPv6: neighbour solicitation to everybody is for the group of the address that is looked for (RFC 4291, 2.7.1).
    fn v6(&self) -> [Ipv6Addr; 2] {
        let [source, destination] = self.v6;
        let is_group = self.protocol == TraceProtocol::Nd && self.destination.is_multicast();
        let group = (0xff02 << 112) | (1 << 32) | 0xff00_0000 | (destination.to_bits() & 0xff_ffff);
        [source, if is_group { Ipv6Addr::from_bits(group) } else { destination }]
    }

    /// Returns the length of a frame that has `least` bytes of headers, and may have `most`.
    fn length(&self, name: &str, least: usize, most: usize) -> Result<usize, String> {
        let asked = match (self.size, self.gso) {
            (Some(size), _) => size as usize,
            (None, Some(gso)) => (least + SEGMENTS * usize::from(gso)).min(most),
            (None, None) => least.max(SHORTEST),
        };
        if (least..=most).contains(&asked) {
            Ok(asked)
        } else {
            Err(format!("a frame of {name} like this has {least} to {most} bytes, not {asked}"))
        }
    }

    /// Makes what is behind the IP header, without its checksum.
    fn body(&self, l4: usize) -> Result<Body, String> {
        let name = self.protocol.name();
        let network = if self.is_v6() { 40 } else { 20 };
        let most = l4 - network + LARGEST_PACKET;
        let fixed = |proto, checksum, bytes: Vec<u8>| {
            self.length(name, l4 + bytes.len(), (l4 + bytes.len()).max(SHORTEST))?;
            Ok(Body { proto, checksum, bytes })
        };
        if let Some((proto, header, checksum)) = self.transport() {
            let len = self.length(name, l4 + header, most)? - l4;
            let mut bytes = vec![0; len];
            let [from, to] = [0, 1].map(|end| self.ports[end].unwrap_or(PORTS[end]).to_be_bytes());
            (bytes[0], bytes[1], bytes[2], bytes[3]) = (from[0], from[1], to[0], to[1]);
            if proto == PROTO_TCP {
                // A header of five words, with ACK, and a window.
                (bytes[12], bytes[13], bytes[14]) = (0x50, 0x10, 0x40);
            } else {
                bytes[4..6].copy_from_slice(&(len as u16).to_be_bytes());
            }
            return Ok(Body { proto, checksum, bytes });
        }
        match self.protocol {
            TraceProtocol::Ping4 | TraceProtocol::Ping6 => {
                let len = self.length(name, l4 + 8, most)? - l4;
                let mut bytes = vec![0; len];
                let (proto, kind) = if self.is_v6() { (PROTO_ICMPV6, 128) } else { (PROTO_ICMP, 8) };
                (bytes[0], bytes[7]) = (kind, 1);
                Ok(Body { proto, checksum: 2, bytes })
            }
            TraceProtocol::Nd => {
                let [_, target] = self.v6;
                let mut bytes = vec![135, 0, 0, 0, 0, 0, 0, 0];
                bytes.extend(target.octets());
                bytes.extend([1, 1]);
                bytes.extend(self.source.0);
                fixed(PROTO_ICMPV6, 2, bytes)
            }
            _ => {
                // BOOTP (RFC 951), and of DHCP the type of the message and the end (RFC 2132).
                let mut bytes = vec![0, 68, 0, 67, 0, 0, 0, 0];
                bytes.extend([1, 1, 6, 0, 0, 0, 0, 1]);
                bytes.resize(8 + 28, 0);
                bytes.extend(self.source.0);
                bytes.resize(8 + 236, 0);
                bytes.extend([99, 130, 83, 99, 53, 1, 1, 255]);
                let len = (bytes.len() as u16).to_be_bytes();
                bytes[4..6].copy_from_slice(&len);
                fixed(PROTO_UDP, 6, bytes)
            }
        }
    }

    /// Writes an ARP request (RFC 826).
    fn arp(&self, frame: &mut Vec<u8>) {
        let [source, destination] = self.v4;
        frame.extend(TYPE_ARP.to_be_bytes());
        frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend(self.source.0);
        frame.extend(source.octets());
        frame.extend([0; 6]);
        frame.extend(destination.octets());
    }
}

/// What is behind an IP header.
struct Body {
    proto: u8,
    /// Where its checksum is.
    checksum: u16,
    bytes: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use ringferry_packet::checksum::verify;
    use ringferry_packet::vnet::Offloads;

    use super::*;

    fn spec(protocol: TraceProtocol) -> Spec {
        Spec {
            source: Mac([2, 0, 0, 0, 0, 1]),
            destination: Mac([2, 0, 0, 0, 0, 2]),
            vlan: None,
            protocol,
            size: None,
            gso: None,
            csum: false,
            v4: [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)],
            v6: [1, 2].map(|host| Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, host)),
            ports: [None; 2],
        }
    }

    /// Each frame is one that the data path takes from a guest, with and without a tag, and its checksums are right.
    #[test]
    fn every_frame_is_what_it_says() {
        for protocol in TraceProtocol::ALL {
            for vlan in [None, Some(10)] {
                let (header, frame) = Spec { vlan, ..spec(protocol) }.build().unwrap();
                assert_eq!(header, Header::NONE);
                assert!(frame.len() >= SHORTEST, "{protocol:?}");
                let is_long = matches!(protocol, TraceProtocol::Dhcp | TraceProtocol::Nd);
                assert_eq!(frame.len() > 80, is_long, "{protocol:?}: {}", frame.len());
                if spec(protocol).transport().is_some() || protocol == TraceProtocol::Dhcp {
                    verify(&frame).unwrap_or_else(|error| panic!("{protocol:?}: {error}"));
                }
                if spec(protocol).transport().is_none() {
                    continue;
                }
                for (gso, csum, size) in
                    [(Some(1000), true, None), (Some(1400), false, Some(9000)), (None, true, Some(1514))]
                {
                    let (header, frame) = Spec { vlan, gso, csum, size, ..spec(protocol) }.build().unwrap();
                    assert_eq!(header.is_gso(), gso.is_some());
                    let valid = header.validated(&frame, frame.len(), Offloads::all()).unwrap();
                    assert_eq!(valid, header, "{protocol:?}");
                    assert_eq!(frame.len(), size.map_or(frame.len(), |size| size as usize));
                }
            }
        }
    }

    #[test]
    fn frames_that_cannot_be_are_refused_in_a_line() {
        let error = |spec: Spec| spec.build().unwrap_err();
        let small = Spec { size: Some(20), ..spec(TraceProtocol::Tcp4) };
        assert_eq!(error(small), "a frame of tcp4 like this has 54 to 65549 bytes, not 20");
        let large = Spec { size: Some(65_554), vlan: Some(1), ..spec(TraceProtocol::Udp6) };
        assert_eq!(error(large), "a frame of udp6 like this has 66 to 65553 bytes, not 65554");
        let arp = Spec { size: Some(100), ..spec(TraceProtocol::Arp) };
        assert_eq!(error(arp), "a frame of arp like this has 42 to 60 bytes, not 100");
        let gso = Spec { gso: Some(1000), ..spec(TraceProtocol::Arp) };
        assert!(error(gso).starts_with("a frame of arp has no offloads"));
    }
}
