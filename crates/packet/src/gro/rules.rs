//! Which packets may become one frame, and the headers of that frame. Where the packets lie is not known here: their
//! headers are read from a copy, once, and their payload is only asked for when a checksum has to be verified.

use ringferry_memory::ReadSlice;

use crate::checksum::{self, Sum};
use crate::ether::be16;
use crate::parse::{
    IPV6_LEN, IpVersion, Layers, PROTO_TCP, PROTO_UDP, ParseError, TCP_CHECKSUM, UDP_CHECKSUM,
};
use crate::segment::{CWR, FIN, PSH, put16};
use crate::vnet::{F_DATA_VALID, F_NEEDS_CSUM, GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Header, Offloads};

/// Packets that one frame is made of at most: 64 KiB at the usual MTU take 45. Without a bound, segments of one
/// byte would make a frame that software may not [cut](crate::segment::MAX_SEGMENTS) again, and a chain
/// that no device takes. (Linux: the same number for UDP, none for TCP.)
pub const MAX_PACKETS: usize = 64;

/// Bytes of a frame at most, link header included, so that every length field holds it.
pub const MAX_FRAME: usize = u16::MAX as usize;

/// Bytes at the beginning of a packet that are looked at: Ethernet with two tags, IPv6, and the longest TCP header have
/// 122.
pub const MAX_HEAD: usize = 128;

pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const URG: u8 = 0x20;
/// Where TCP keeps its flags, in bytes from the start of its header.
const TCP_FLAGS: usize = 13;
/// Flags that may differ between the segments of a frame: only the first or the last has them.
const NOT_COMMON: u8 = FIN | PSH | CWR;
/// The "don't fragment" bit, in the first byte of the IPv4 fragment field.
pub(super) const DF: u8 = 0x40;

/// Why a packet is no [`Candidate`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unfit {
    /// It is neither TCP nor UDP over IP: no packet of a flow is early or late because of it.
    Foreign,
    /// It may belong to any flow: its headers could not be read.
    Unreadable,
}

/// A packet with TCP or UDP: its headers, copied, and its length.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The packet begins with these bytes; behind them are zeros if it is shorter.
    head: [u8; MAX_HEAD],
    layers: Layers,
    /// Bytes of the packet, from the Ethernet header on.
    len: usize,
    header: Header,
}

impl Candidate {
    /// Reads the headers of a packet of `len` bytes, of which the first are `head`, with zeros behind the end.
    ///
    /// # Errors
    /// [`Unfit`]
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

    /// Which flow it belongs to.
    pub fn flow(&self) -> Flow {
        let Layers { l3, l4, ip, proto, fragment, .. } = self.layers;
        let mut flow = Flow { ports: [0; 4], addresses: [0; 32], ip, proto };
        // Layers were found in the head, so all of this lies in it.
        match ip {
            IpVersion::V4 => flow.addresses[..8].copy_from_slice(&self.head[l3 + 12..l3 + 20]),
            IpVersion::V6 => flow.addresses.copy_from_slice(&self.head[l3 + 8..l3 + 40]),
        }
        if let (false, Some(ports)) = (fragment, self.head.get(l4..l4 + 4)) {
            flow.ports.copy_from_slice(ports);
        }
        flow
    }

    /// Whether it is part of a packet: which ports it belongs to is known to its receiver only.
    #[inline]
    pub fn is_fragment(&self) -> bool {
        self.layers.fragment
    }

    /// Bytes of headers.
    #[inline]
    pub fn headers(&self) -> usize {
        self.layers.payload
    }

    /// Bytes of payload.
    #[inline]
    pub fn size(&self) -> usize {
        self.len - self.layers.payload
    }

    /// Whether it may be part of a larger frame for a receiver that takes `accepted`, as far as its headers tell:
    /// checksums are another matter.
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
        // IP length, which has to be that of the frame: no padding, nothing cut off.
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
            // Without a checksum there would be none in the segments of the merged frame either, which
            // no header can say.
            be16(&self.head, l4 + 4).map(usize::from) == Some(self.len - l4)
                && be16(&self.head, l4 + UDP_CHECKSUM) != Some(0)
        }
    }

    /// Whether its checksums hold: whoever finished them has checked them, nobody has because the sender left that to
    /// the receiver, or they are verified here. `frame` is all of the packet, in pieces.
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
            // A sender on this host, who left the sum of the pseudo header for whoever finishes it.
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

    /// Whether others may be appended: it does not end a frame.
    #[inline]
    pub fn may_be_first(&self) -> bool {
        self.tcp_flags() & (FIN | PSH) == 0
    }

    /// The sum of the pseudo header.
    fn pseudo(&self) -> Option<Sum> {
        checksum::pseudo_header(&self.head, &self.layers, self.len - self.layers.l4)
    }

    /// Where the transport checksum is stored.
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

    /// Identification of an IPv4 packet.
    fn identification(&self) -> u16 {
        let at = self.layers.l3 + 4;
        if self.layers.ip == IpVersion::V4 { be16(&self.head, at).unwrap_or(0) } else { 0 }
    }

    /// A mask of the headers without what may differ between segments of one frame: lengths, identification,
    /// checksums, sequence number, and the flags that only the first or the last segment has. Window, time to live,
    /// traffic class with its ECN bits, TCP options and all the others have to be equal.
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

/// What packets of a flow have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    ports: [u8; 4],
    addresses: [u8; 32],
    ip: IpVersion,
    proto: u8,
}

impl Flow {
    /// Whether the two are the same but for the ports.
    pub fn is_between(&self, other: &Flow) -> bool {
        (self.addresses, self.ip, self.proto) == (other.addresses, other.ip, other.proto)
    }
}

/// Packets that are one frame: what its headers will be, and what comes next.
#[derive(Clone, Debug)]
pub struct Run {
    first: Candidate,
    /// What the headers of all have in common.
    common: [u8; MAX_HEAD],
    packets: usize,
    /// Bytes of the frame so far.
    len: usize,
    /// Payload of each packet but the last.
    size: usize,
    /// The sequence number that comes next.
    sequence: u32,
    /// Identification of the last packet, and how it has changed from packet to packet.
    identification: u16,
    step: Option<u16>,
}

impl Run {
    /// A run of one packet, which [may be first](Candidate::may_be_first).
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

    /// The first packet.
    #[inline]
    pub fn first(&self) -> &Candidate {
        &self.first
    }

    /// Packets so far.
    #[inline]
    pub fn packets(&self) -> usize {
        self.packets
    }

    /// Bytes of the frame so far.
    #[inline]
    pub fn frame_len(&self) -> usize {
        self.len
    }

    /// Whether a packet of the same flow, which [fits](Candidate::fits), is the next segment of the same frame.
    #[inline]
    pub fn takes(&self, packet: &Candidate) -> bool {
        let differ = self.first.head.iter().zip(&packet.head).zip(&self.common);
        packet.size() <= self.size
            && self.len + packet.size() <= MAX_FRAME
            && (!packet.is_tcp() || packet.sequence() == self.sequence)
            && packet.tcp_flags() & CWR == 0
            // Without a branch for each byte, this is a few vector instructions.
            && differ.fold(0, |bits, ((a, b), mask)| bits | (a ^ b) & mask) == 0
            && self.continues_identification(packet)
    }

    /// Whether the identification counts up, or stays where it means nothing (RFC 6864, 4.1), and goes on as it has
    /// begun.
    fn continues_identification(&self, packet: &Candidate) -> bool {
        let step = packet.identification().wrapping_sub(self.identification);
        let known = match packet.layers.ip {
            IpVersion::V6 => true,
            IpVersion::V4 => step == 1 || (step == 0 && packet.head[packet.layers.l3 + 6] & DF != 0),
        };
        known && self.step.is_none_or(|before| before == step)
    }

    /// Counts a packet in that the run [takes](Run::takes); true when it is the last.
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

    /// The header of the frame, and what it begins with: its headers, and as much of the first packet's payload as was
    /// read with them. A run of one packet has the header and the bytes that the packet had.
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

/// Pieces without the first `skip` bytes of them all.
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
