//! The rules of GRO: which packets may be merged to one frame, and the headers of that frame.
//!
//! The caller reads each packet to a [`Candidate`], starts a [`Run`] with the first one of a flow, calls [`Run::takes`]
//! and [`Run::append`] for each further one, and [`Run::finish`] at the end. This code does not know where packets are
//! stored: it reads headers from a copy, once, and payload only to verify a checksum.

use ringferry_memory::ReadSlice;

use crate::checksum::{self, Sum};
use crate::ether::be16;
use crate::parse::{
    IPV6_LEN, IpVersion, Layers, PROTO_TCP, PROTO_UDP, ParseError, TCP_CHECKSUM, UDP_CHECKSUM,
};
use crate::segment::{CWR, FIN, PSH, put16};
use crate::vnet::{F_DATA_VALID, F_NEEDS_CSUM, GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Header, Offloads};

/// Largest number of packets in one frame; 64 KiB at the usual MTU are 45. Without a limit, segments of one byte would
/// make a frame that software cannot [segment](crate::segment::MAX_SEGMENTS) again, and a chain that no device accepts.
/// (Linux has the same limit for UDP, and none for TCP.)
pub const MAX_PACKETS: usize = 64;

/// Length in bytes of the longest frame, link header included, so that it fits every length field.
pub const MAX_FRAME: usize = u16::MAX as usize;

/// Number of bytes at the beginning of a packet that are read: Ethernet with two tags, IPv6, and the longest TCP header
/// have 122.
pub const MAX_HEAD: usize = 128;

pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const URG: u8 = 0x20;
/// Offset of the flags in a TCP header.
const TCP_FLAGS: usize = 13;
/// Flags that may differ between the segments of a frame, as only the first or the last one has them.
const NOT_COMMON: u8 = FIN | PSH | CWR;
/// The "don't fragment" bit, in the first byte of the IPv4 fragment field.
pub(super) const DF: u8 = 0x40;

/// The reason for which a packet is not a [`Candidate`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unfit {
    /// The packet is neither TCP nor UDP over IP, so its order relative to flows does not matter.
    Foreign,
    /// The headers cannot be parsed, so the packet may belong to any flow.
    Unreadable,
}

/// A packet with TCP or UDP: a copy of its headers, and its length.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The first bytes of the packet, padded with zeros if it is shorter.
    head: [u8; MAX_HEAD],
    layers: Layers,
    /// Length of the packet in bytes, Ethernet header included.
    len: usize,
    header: Header,
}

impl Candidate {
    /// Parses the headers of a packet of `len` bytes. `head` has its first bytes, padded with zeros.
    ///
    /// # Errors
    /// [`Unfit`], if it is not TCP or UDP or cannot be parsed.
    #[inline]
    pub fn read(header: Header, head: [u8; MAX_HEAD], len: usize) -> Result<Candidate, Unfit> {
        match Layers::parse(&head[..len.min(MAX_HEAD)]) {
            Ok(layers) if matches!(layers.proto, PROTO_TCP | PROTO_UDP) => {
                Ok(Candidate { head, layers, len, header })
            }
            Ok(_) | Err(ParseError::NotIp(_)) => Err(Unfit::Foreign),
            Err(_) => Err(Unfit::Unreadable),
        }
    }

    /// Returns the flow of the packet; that of a fragment has no ports.
    pub fn flow(&self) -> Flow {
        let Layers { l3, l4, ip, proto, fragment, .. } = self.layers;
        let mut flow = Flow { ports: [0; 4], addresses: [0; 32], ip, proto };
        // The parser has found the layers in the head, so these fields are in it.
        match ip {
            IpVersion::V4 => flow.addresses[..8].copy_from_slice(&self.head[l3 + 12..l3 + 20]),
            IpVersion::V6 => flow.addresses.copy_from_slice(&self.head[l3 + 8..l3 + 40]),
        }
        if let (false, Some(ports)) = (fragment, self.head.get(l4..l4 + 4)) {
            flow.ports.copy_from_slice(ports);
        }
        flow
    }

    /// Returns true if the packet is an IP fragment, whose ports are not known.
    #[inline]
    pub fn is_fragment(&self) -> bool {
        self.layers.fragment
    }

    /// Returns the length of all headers in bytes, Ethernet to transport.
    #[inline]
    pub fn headers(&self) -> usize {
        self.layers.payload
    }

    /// Returns the length of the payload in bytes.
    #[inline]
    pub fn size(&self) -> usize {
        self.len - self.layers.payload
    }

    /// Returns true if the packet's headers allow it to be part of a larger frame for a receiver that accepts the
    /// offloads `accepted`. Checksums are not verified here.
    #[inline]
    pub fn fits(&self, accepted: Offloads) -> bool {
        let Layers { l3, l4, payload, ip, proto, fragment } = self.layers;
        let needed = match (proto, ip) {
            (PROTO_TCP, IpVersion::V4) => Offloads::TSO4,
            (PROTO_TCP, IpVersion::V6) => Offloads::TSO6,
            _ => Offloads::USO,
        };
        if !accepted.contains(needed) || fragment || self.header.is_gso() || self.len <= payload {
            return false;
        }
        // The length in the IP header must be that of the frame: neither padded nor truncated.
        let (ip_len, field, counted) = match ip {
            IpVersion::V4 => (20, l3 + 2, l3),
            IpVersion::V6 => (IPV6_LEN, l3 + 4, l3 + IPV6_LEN),
        };
        if l4 - l3 != ip_len || be16(&self.head, field).map(usize::from) != Some(self.len - counted) {
            return false;
        }
        if proto == PROTO_TCP {
            let flags = self.head[l4 + TCP_FLAGS];
            let ecn = flags & CWR == 0 || accepted.contains(Offloads::ECN);
            flags & (SYN | RST | URG) == 0 && ecn
        } else {
            // Segments of a datagram without a checksum must not have one either, which no header can express.
            be16(&self.head, l4 + 4).map(usize::from) == Some(self.len - l4)
                && be16(&self.head, l4 + UDP_CHECKSUM) != Some(0)
        }
    }

    /// Returns true if the checksums are valid. A partial transport checksum must be the sum of the pseudo header; one
    /// that the device has checked is trusted; any other is verified over `frame`, the whole packet in pieces.
    pub fn has_good_checksums<'a>(&self, frame: impl IntoIterator<Item = ReadSlice<'a>>) -> bool {
        let Layers { l3, l4, payload, ip, .. } = self.layers;
        if ip == IpVersion::V4 {
            let mut network = Sum::new();
            network.add(&self.head[l3..l4]);
            if network.finish() != 0 {
                return false;
            }
        }
        let field = self.checksum_field();
        if self.header.needs_csum() {
            // A sender on this host has stored the sum of the pseudo header.
            let position = (usize::from(self.header.csum_start), usize::from(self.header.csum_offset));
            let pseudo = self.pseudo().map(Sum::partial).map(checksum::never_zero);
            return position == (l4, field - l4)
                && be16(&self.head, field).map(checksum::never_zero) == pseudo;
        }
        if self.header.flags & F_DATA_VALID != 0 {
            return true;
        }
        let Some(mut sum) = self.pseudo() else { return false };
        sum.add(&self.head[l4..payload]);
        for piece in behind(frame, payload) {
            sum.add_slice(&piece);
        }
        sum.finish() == 0
    }

    /// Returns true if other packets may be appended: it has neither FIN nor PSH.
    #[inline]
    pub fn may_be_first(&self) -> bool {
        self.tcp_flags() & (FIN | PSH) == 0
    }

    /// Computes the sum of the pseudo header.
    fn pseudo(&self) -> Option<Sum> {
        checksum::pseudo_header(&self.head, &self.layers, self.len - self.layers.l4)
    }

    /// Returns the offset of the transport checksum from the start of the frame.
    fn checksum_field(&self) -> usize {
        self.layers.l4 + if self.is_tcp() { TCP_CHECKSUM } else { UDP_CHECKSUM }
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

    /// Returns the identification of an IPv4 packet, 0 for IPv6.
    fn identification(&self) -> u16 {
        let at = self.layers.l3 + 4;
        if self.layers.ip == IpVersion::V4 { be16(&self.head, at).unwrap_or(0) } else { 0 }
    }

    /// Returns a mask of the header bits that must be equal in all segments of a frame. It excludes lengths,
    /// identification, checksums, sequence number, and the flags that only the first or the last segment has. It includes
    /// window, time to live, traffic class with its ECN bits, TCP options and all other fields.
    fn common(&self) -> [u8; MAX_HEAD] {
        let Layers { l3, l4, payload, ip, .. } = self.layers;
        let mut mask = [0; MAX_HEAD];
        mask[..payload].fill(0xff);
        match ip {
            IpVersion::V4 => {
                mask[l3 + 2..l3 + 6].fill(0);
                mask[l3 + 10..l3 + 12].fill(0);
            }
            IpVersion::V6 => mask[l3 + 4..l3 + 6].fill(0),
        }
        mask[l4 + 4..l4 + 8].fill(0);
        if self.is_tcp() {
            mask[l4 + TCP_FLAGS] = !NOT_COMMON;
            mask[l4 + TCP_CHECKSUM..l4 + TCP_CHECKSUM + 2].fill(0);
        }
        mask
    }
}

/// The key of a flow: ports, addresses, IP version and protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    ports: [u8; 4],
    addresses: [u8; 32],
    ip: IpVersion,
    proto: u8,
}

impl Flow {
    /// Returns true if both flows are equal except for the ports.
    pub fn is_between(&self, other: &Flow) -> bool {
        (self.addresses, self.ip, self.proto) == (other.addresses, other.ip, other.proto)
    }
}

/// A run of packets that will be one frame: the state from which its headers are made.
#[derive(Clone, Debug)]
pub struct Run {
    first: Candidate,
    /// Mask of the header bits that must be equal in all packets.
    common: [u8; MAX_HEAD],
    packets: usize,
    /// Length of the frame so far in bytes.
    len: usize,
    /// Length in bytes of the payload of each packet except the last.
    size: usize,
    /// The next expected TCP sequence number.
    sequence: u32,
    /// Identification of the last packet, and its increment from packet to packet.
    identification: u16,
    step: Option<u16>,
}

impl Run {
    /// Starts a run with a packet that [may be first](Candidate::may_be_first).
    #[inline]
    pub fn new(first: Candidate) -> Run {
        Run {
            common: first.common(),
            packets: 1,
            len: first.len,
            size: first.size(),
            sequence: first.sequence().wrapping_add(first.size() as u32),
            identification: first.identification(),
            step: None,
            first,
        }
    }

    /// Returns the first packet of the run.
    #[inline]
    pub fn first(&self) -> &Candidate {
        &self.first
    }

    /// Returns the number of packets so far.
    #[inline]
    pub fn packets(&self) -> usize {
        self.packets
    }

    /// Returns the length of the frame so far in bytes.
    #[inline]
    pub fn frame_len(&self) -> usize {
        self.len
    }

    /// Returns true if a packet of the same flow, which [fits](Candidate::fits), is the next segment of this frame.
    #[inline]
    pub fn takes(&self, packet: &Candidate) -> bool {
        let differ = self.first.head.iter().zip(&packet.head).zip(&self.common);
        packet.size() <= self.size
            && self.len + packet.size() <= MAX_FRAME
            && (!packet.is_tcp() || packet.sequence() == self.sequence)
            && packet.tcp_flags() & CWR == 0
            // The comparison has no branch per byte, so that it becomes a few vector instructions.
            && differ.fold(0, |bits, ((a, b), mask)| bits | (a ^ b) & mask) == 0
            && self.continues_identification(packet)
    }

    /// Returns true if the identification continues as in the packets before: it increments by one, or it is constant in
    /// packets in which it has no meaning (RFC 6864, 4.1).
    fn continues_identification(&self, packet: &Candidate) -> bool {
        let step = packet.identification().wrapping_sub(self.identification);
        let known = match packet.layers.ip {
            IpVersion::V6 => true,
            IpVersion::V4 => step == 1 || (step == 0 && packet.head[packet.layers.l3 + 6] & DF != 0),
        };
        known && self.step.is_none_or(|before| before == step)
    }

    /// Appends a packet that the run [takes](Run::takes). Returns true if no other may follow it.
    #[inline]
    pub fn append(&mut self, packet: &Candidate) -> bool {
        let (size, flags) = (packet.size(), packet.tcp_flags());
        self.step = Some(packet.identification().wrapping_sub(self.identification));
        self.identification = packet.identification();
        self.sequence = self.sequence.wrapping_add(size as u32);
        self.packets += 1;
        self.len += size;
        if self.first.is_tcp() {
            self.first.head[self.first.layers.l4 + TCP_FLAGS] |= flags & (FIN | PSH);
        }
        size < self.size || flags & (FIN | PSH) != 0 || self.packets == MAX_PACKETS
    }

    /// Returns the virtual header of the frame and its first bytes: its headers, and as much of the first packet's payload
    /// as was read with them. For a run of one packet both are unchanged.
    pub fn finish(&mut self) -> (Header, &[u8]) {
        if self.packets == 1 {
            return (self.first.header, &self.first.head[..self.first.len.min(MAX_HEAD)]);
        }
        let begins = self.first.len.min(MAX_HEAD);
        let Layers { l3, l4, payload, ip, proto, .. } = self.first.layers;
        let field = self.first.checksum_field();
        let len = self.len;
        let pseudo = checksum::pseudo_header(&self.first.head, &self.first.layers, len - l4);
        let flags = self.first.tcp_flags();
        let head = &mut self.first.head;
        // No length exceeds MAX_FRAME, so all of them fit 16 bits.
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
        put16(head, field, pseudo.map_or(0, Sum::partial));
        let ecn = if flags & CWR == 0 { 0 } else { GSO_ECN };
        let gso_type = match (proto, ip) {
            (PROTO_TCP, IpVersion::V4) => GSO_TCPV4 | ecn,
            (PROTO_TCP, IpVersion::V6) => GSO_TCPV6 | ecn,
            _ => GSO_UDP_L4,
        };
        let header = Header {
            flags: F_NEEDS_CSUM,
            gso_type,
            hdr_len: payload as u16,
            gso_size: self.size as u16,
            csum_start: l4 as u16,
            csum_offset: (field - l4) as u16,
            num_buffers: 0,
        };
        (header, &head[..begins])
    }
}

/// Iterates over `pieces` without their first `skip` bytes in total.
pub fn behind<'a>(
    pieces: impl IntoIterator<Item = ReadSlice<'a>>,
    mut skip: usize,
) -> impl Iterator<Item = ReadSlice<'a>> {
    pieces.into_iter().filter_map(move |piece| {
        let rest = piece.skip(skip);
        skip -= skip.min(piece.len());
        (!rest.is_empty()).then_some(rest)
    })
}
