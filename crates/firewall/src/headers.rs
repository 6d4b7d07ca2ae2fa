//! The headers of a frame, as far as a firewall has to know them: which conversation the frame belongs to.
//!
//! The parser is strict where a lenient one could be led past a rule. A header that two hosts may read differently, or in which the destination is not
//! the one that the packet ends at, has no conversation ([`Odd`]): IP behind more than two tags or in LLC, routing headers and source routes
//! with hops left, first fragments without ports, headers cut short. It reads only bytes in front of the end that the packet itself tells, and says so
//! if it would need more bytes than it was given ([`Doubt::Beyond`]).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ringferry_packet::ether::{Link, TYPE_ARP, TYPE_IPV4, TYPE_IPV6, TYPE_RARP};
use ringferry_packet::extension::{
    Cut, DESTINATION_OPTIONS, Extension, FRAGMENT, HOP_BY_HOP, MAX_EXTENSIONS, MOBILITY, ROUTING,
};
use ringferry_packet::parse::{PROTO_SCTP, PROTO_TCP, PROTO_UDP};
use ringferry_packet::vnet::Header;

/// IP protocol number of ICMP.
pub const PROTO_ICMP: u8 = 1;
/// IP protocol number of ICMPv6.
pub const PROTO_ICMPV6: u8 = 58;
/// DCCP and UDP-Lite, whose ports are at the same offsets as those of UDP.
const PROTO_DCCP: u8 = 33;
const PROTO_UDP_LITE: u8 = 136;

const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
/// An IPv4 header's don't-fragment bit leaves these: more fragments, and the offset.
const FRAGMENT_BITS: u16 = 0x3fff;
const OFFSET_BITS: u16 = 0x1fff;

/// Options of IPv4 that lead a packet elsewhere than to its destination: loose and strict source routes (RFC 791).
const SOURCE_ROUTES: [u8; 2] = [131, 137];
const END_OF_OPTIONS: u8 = 0;
const NO_OPERATION: u8 = 1;
/// Options of an IPv6 header for the destination: padding, and the home address (RFC 6275), which replaces the source.
const PAD_1: u8 = 0;
const HOME_ADDRESS: u8 = 0xc9;

/// Flags of a TCP header.
pub(crate) const FIN: u8 = 1;
pub(crate) const SYN: u8 = 2;
pub(crate) const RST: u8 = 4;
pub(crate) const ACK: u8 = 16;
/// Offset of the flags in a TCP header.
pub(crate) const TCP_FLAGS: usize = 13;
/// Offset of the checksum in a message of ICMP.
const ICMP_CHECKSUM: usize = 2;

/// Bytes of a frame with an error, at most: of the link, with two tags, and of the packet.
const MAX_ERROR_V4: usize = 22 + 576;
const MAX_ERROR_V6: usize = 22 + 1280;
/// Bytes of a frame with ARP, at most: the shortest of Ethernet, and two tags.
const MAX_ARP: usize = 68 + 4;
/// Bytes of a frame of neighbour discovery, at most: a solicitation has 72 bytes and an option or two.
const MAX_NEIGHBOURS: usize = 256;

/// Bytes of a frame that are looked at, at most: an answer of the domain name system, of which some 1400 bytes are usual. All headers take less than 300.
pub const HEAD: usize = 2048;

/// A frame, or the beginning of one.
#[derive(Clone, Copy)]
pub struct View<'f> {
    /// What the sender asks to be completed.
    pub header: &'f Header,
    /// The first bytes.
    pub bytes: &'f [u8],
    /// Length of the whole frame in bytes.
    pub len: usize,
    /// Reads a byte behind the first ones. Its sender may change it meanwhile, so nothing is decided by it.
    pub peek: &'f dyn Fn(usize) -> Option<u8>,
}

impl std::fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").field("bytes", &self.bytes).field("len", &self.len).finish_non_exhaustive()
    }
}

/// What makes a frame odd: it belongs to no conversation, and passes nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Odd {
    /// It is neither IP nor ARP.
    NotIp(u16),
    /// Its headers are malformed, or cut short.
    Malformed,
    /// It would be led elsewhere than to its destination, or comes from elsewhere than from its source.
    Routed,
    /// It is a fragment of a message that only whole ones may be.
    Fragmented,
}

/// Why a frame has no conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// The bytes that tell are behind those of the view.
    Beyond,
    /// It is odd.
    Odd(Odd),
}

const MALFORMED: Doubt = Doubt::Odd(Odd::Malformed);

/// Returns the ports of an echo, by its type and identifier; `None` of another message.
fn echo(kind: u8, identifier: [u8; 2]) -> Option<[u16; 2]> {
    let identifier = u16::from_be_bytes(identifier);
    match kind {
        8 | 128 => Some([identifier, 0]),
        0 | 129 => Some([0, identifier]),
        _ => None,
    }
}

/// Two ends, as the sender of a packet sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The source address.
    pub source: IpAddr,
    /// The destination address, of the same family.
    pub destination: IpAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// Source and destination port. A request for an echo has its identifier as source port, the reply as destination port; what has no ports has zeros.
    pub ports: [u16; 2],
}

impl Ends {
    /// Returns the ends as the other one sees them.
    #[must_use]
    pub(crate) fn reversed(self) -> Ends {
        let [source, destination] = self.ports;
        Ends { source: self.destination, destination: self.source, ports: [destination, source], ..self }
    }
}

/// The part of a datagram that a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// The first fragment, which has the ports, of the datagram with this identification.
    First(u32),
    /// A later fragment: `ports` are zeros.
    Later(u32),
}

/// What a frame is to a firewall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A packet of a conversation.
    Packet {
        /// Its ends.
        ends: Ends,
        /// Whether it is all of a datagram.
        part: Part,
        /// Where its transport header is.
        l4: usize,
        /// Where it ends, as it says itself.
        end: usize,
        /// Where the flags of its TCP header are, if it has one.
        flags_at: Option<usize>,
    },
    /// An error that somebody on the way reports about a packet with these ends.
    Error {
        /// The ends of the error itself.
        ends: Ends,
        /// The ends of the packet that it is about.
        about: Ends,
    },
    /// Address resolution and neighbour discovery, without which nobody is reached.
    Neighbours,
    /// A message of ICMP that is of no conversation.
    Message(Ends),
    /// A router's advertisement.
    Router(Ends),
}

impl View<'_> {
    /// Returns what the frame is.
    ///
    /// # Errors
    /// [`Doubt`].
    #[inline]
    pub fn subject(self) -> Result<(Subject, u16), Doubt> {
        let is_cut = self.bytes.len() < self.len;
        let doubt = if is_cut { Doubt::Beyond } else { MALFORMED };
        let Link { ether_type, l3, vlan } = Link::parse(self.bytes).ok_or(doubt)?;
        let vlan = vlan.unwrap_or(0);
        let subject = match ether_type {
            TYPE_IPV4 => self.ipv4(l3)?,
            TYPE_IPV6 => self.ipv6(l3)?,
            TYPE_ARP | TYPE_RARP => {
                // Of Ethernet and IPv4, and nothing behind it but padding (RFC 826).
                let head: [u8; 6] = self.array(l3)?;
                if head != [0, 1, 8, 0, 6, 4] || self.len > MAX_ARP {
                    return Err(MALFORMED);
                }
                self.is_untouched(self.len)?;
                Subject::Neighbours
            }
            other => return Err(Doubt::Odd(Odd::NotIp(other))),
        };
        Ok((subject, vlan))
    }

    /// Returns the payload of the UDP datagram at `l4`, in a packet that ends at `packet_end`.
    ///
    /// # Errors
    /// [`Doubt`]: it is cut short, or has no length.
    pub(crate) fn datagram(&self, l4: usize, packet_end: usize) -> Result<&[u8], Doubt> {
        const UDP_LEN: usize = 8;
        const UDP_CHECKSUM: usize = 6;
        let [high, low] = self.array(l4 + 4)?;
        let end = l4 + usize::from(u16::from_be_bytes([high, low]));
        // What is behind it in the packet is nobody's.
        if end < l4 + UDP_LEN || end != packet_end {
            return Err(MALFORMED);
        }
        self.is_untouched_but(end, l4 + UDP_CHECKSUM)?;
        self.bytes.get(l4 + UDP_LEN..end).ok_or_else(|| self.cut(end))
    }

    /// Returns a byte that decides nothing.
    #[inline]
    pub(crate) fn byte(self, at: usize) -> Option<u8> {
        self.bytes.get(at).copied().or_else(|| (self.peek)(at))
    }

    #[inline]
    fn ipv4(self, l3: usize) -> Result<Subject, Doubt> {
        let head: [u8; IPV4_LEN] = self.array(l3)?;
        let len = usize::from(head[0] & 0x0f) * 4;
        let total = usize::from(u16::from_be_bytes([head[2], head[3]]));
        if head[0] >> 4 != 4 || len < IPV4_LEN {
            return Err(MALFORMED);
        }
        let view = self.until(l3, total, len)?;
        if len > IPV4_LEN {
            view.no_source_route(l3 + IPV4_LEN, l3 + len)?;
        }
        let bits = u16::from_be_bytes([head[6], head[7]]) & FRAGMENT_BITS;
        let identification = u16::from_be_bytes([head[4], head[5]]).into();
        let part = match bits {
            0 => Part::Whole,
            bits if bits & OFFSET_BITS == 0 => Part::First(identification),
            _ => Part::Later(identification),
        };
        let address =
            |at: usize| IpAddr::V4(Ipv4Addr::new(head[at], head[at + 1], head[at + 2], head[at + 3]));
        let ends = Ends { source: address(12), destination: address(16), protocol: head[9], ports: [0; 2] };
        view.transport(ends, part, l3 + len)
    }

    #[inline]
    fn ipv6(self, l3: usize) -> Result<Subject, Doubt> {
        let head: [u8; IPV6_LEN] = self.array(l3)?;
        if head[0] >> 4 != 6 {
            return Err(MALFORMED);
        }
        let payload = usize::from(u16::from_be_bytes([head[4], head[5]]));
        let view = self.until(l3, IPV6_LEN + payload, IPV6_LEN)?;
        let address = |at: usize| {
            let bytes: [u8; 16] = std::array::from_fn(|byte| head[at + byte]);
            IpAddr::V6(Ipv6Addr::from(bytes))
        };
        let (mut protocol, mut at, mut part) = (head[6], l3 + IPV6_LEN, Part::Whole);
        let (mut headers, mut is_fragment) = (0, false);
        while let Some(found) = Extension::read(protocol, view.bytes, at) {
            headers += 1;
            if headers > MAX_EXTENSIONS {
                return Err(MALFORMED);
            }
            let Extension { next, len, .. } = match found {
                Ok(found) => found,
                Err(Cut) => return Err(view.cut(at + 2)),
            };
            if at + len > view.len {
                return Err(MALFORMED);
            }
            match protocol {
                // Elsewhere than at the beginning it is passed over by some, and refused by others (RFC 8200, 4.1).
                HOP_BY_HOP if headers > 1 => return Err(MALFORMED),
                // With no segments left the packet is where it ends.
                ROUTING if view.array::<1>(at + 3)? != [0] => return Err(Doubt::Odd(Odd::Routed)),
                DESTINATION_OPTIONS => view.no_home_address(at + 2, at + len)?,
                MOBILITY => return Err(Doubt::Odd(Odd::Routed)),
                FRAGMENT => {
                    let [high, low, a, b, c, d] = view.array(at + 2)?;
                    let (bits, identification) =
                        (u16::from_be_bytes([high, low]), u32::from_be_bytes([a, b, c, d]));
                    // A fragment in a fragment is read by nobody alike, be the outer one atomic.
                    if std::mem::replace(&mut is_fragment, true) {
                        return Err(MALFORMED);
                    }
                    part = match (bits & 0xfff8, bits & 1) {
                        // An atomic fragment (RFC 6946) is a whole packet.
                        (0, 0) => part,
                        (0, _) => Part::First(identification),
                        _ => Part::Later(identification),
                    };
                }
                _ => {}
            }
            (protocol, at) = (next, at + len);
            if matches!(part, Part::Later(_)) {
                break;
            }
        }
        let ends = Ends { source: address(8), destination: address(24), protocol, ports: [0; 2] };
        if protocol == PROTO_ICMPV6 && part == Part::Whole {
            return view.icmpv6(ends, l3, at);
        }
        view.transport(ends, part, at)
    }

    /// Reads the transport header at `at`.
    #[inline]
    fn transport(self, ends: Ends, part: Part, at: usize) -> Result<Subject, Doubt> {
        let packet = |ends, flags_at| Ok(Subject::Packet { ends, part, l4: at, end: self.len, flags_at });
        if matches!(part, Part::Later(_)) {
            self.is_untouched(at)?;
            return packet(ends, None);
        }
        match ends.protocol {
            PROTO_TCP | PROTO_UDP | PROTO_SCTP | PROTO_DCCP | PROTO_UDP_LITE => {
                let [a, b, c, d] = self.array(at)?;
                self.is_untouched(at + 4)?;
                let ports = [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])];
                let flags_at =
                    (ends.protocol == PROTO_TCP && at + TCP_FLAGS < self.len).then_some(at + TCP_FLAGS);
                packet(Ends { ports, ..ends }, flags_at)
            }
            PROTO_ICMP if ends.source.is_ipv4() => self.icmp(ends, part, at),
            // In a fragment, as whole ones were read before: nothing that neighbours need.
            PROTO_ICMPV6 if ends.source.is_ipv6() => Err(Doubt::Odd(Odd::Fragmented)),
            _ => {
                self.is_untouched(at)?;
                packet(ends, None)
            }
        }
    }

    fn icmp(self, ends: Ends, part: Part, at: usize) -> Result<Subject, Doubt> {
        const ERRORS: [u8; 3] = [3, 11, 12];
        let [kind, _, _, _, high, low, _, _]: [u8; 8] = self.array(at)?;
        if ERRORS.contains(&kind) {
            if part != Part::Whole {
                return Err(Doubt::Odd(Odd::Fragmented));
            }
            return self.error(ends, at + 8);
        }
        self.is_untouched_but(at + 8, at + ICMP_CHECKSUM)?;
        self.query(ends, (part, at), echo(kind, [high, low]))
    }

    fn icmpv6(self, ends: Ends, l3: usize, at: usize) -> Result<Subject, Doubt> {
        const LISTENERS: [u8; 4] = [130, 131, 132, 143];
        const ROUTER_ADVERTISEMENT: u8 = 134;
        const NEIGHBOURS: [u8; 3] = [133, 135, 136];
        let [kind, _, _, _, high, low, _, _]: [u8; 8] = self.array(at)?;
        if (1..=4).contains(&kind) {
            return self.error(ends, at + 8);
        }
        self.is_untouched_but(at + 8, at + ICMP_CHECKSUM)?;
        // What is of this link has not been forwarded (RFC 4861, 7.1; RFC 3810, 5).
        let [hops] = self.array(l3 + 7)?;
        let is_group = ends.destination.is_multicast();
        match kind {
            ROUTER_ADVERTISEMENT if hops == 255 => Ok(Subject::Router(ends)),
            _ if NEIGHBOURS.contains(&kind) && hops == 255 && self.len <= MAX_NEIGHBOURS => {
                Ok(Subject::Neighbours)
            }
            _ if LISTENERS.contains(&kind) && hops == 1 && is_group => Ok(Subject::Neighbours),
            _ => self.query(ends, (Part::Whole, at), echo(kind, [high, low])),
        }
    }

    /// A message of ICMP that is no error. Echoes are of a conversation, other messages of none.
    fn query(self, ends: Ends, (part, l4): (Part, usize), ports: Option<[u16; 2]>) -> Result<Subject, Doubt> {
        match ports {
            Some(ports) => {
                let ends = Ends { ports, ..ends };
                Ok(Subject::Packet { ends, part, l4, end: self.len, flags_at: None })
            }
            None if part == Part::Whole => Ok(Subject::Message(ends)),
            None => Err(Doubt::Odd(Odd::Fragmented)),
        }
    }

    /// Reads the packet at `at` that an error is about. Its lengths are those that it had, and it is cut short.
    fn error(self, ends: Ends, at: usize) -> Result<Subject, Doubt> {
        let [first] = self.array(at)?;
        let (inner, protocol, l4) = match (first >> 4, ends.source) {
            (4, IpAddr::V4(_)) => {
                let head: [u8; IPV4_LEN] = self.array(at)?;
                let len = usize::from(head[0] & 0x0f) * 4;
                let later = u16::from_be_bytes([head[6], head[7]]) & OFFSET_BITS != 0;
                if len < IPV4_LEN || later {
                    return Err(MALFORMED);
                }
                let address =
                    |at: usize| IpAddr::V4(Ipv4Addr::new(head[at], head[at + 1], head[at + 2], head[at + 3]));
                ([address(12), address(16)], head[9], at + len)
            }
            (6, IpAddr::V6(_)) => {
                let head: [u8; IPV6_LEN] = self.array(at)?;
                let address = |at: usize| {
                    let bytes: [u8; 16] = std::array::from_fn(|byte| head[at + byte]);
                    IpAddr::V6(Ipv6Addr::from(bytes))
                };
                ([address(8), address(24)], head[6], at + IPV6_LEN)
            }
            _ => return Err(MALFORMED),
        };
        let ports = match protocol {
            PROTO_TCP | PROTO_UDP | PROTO_SCTP | PROTO_DCCP | PROTO_UDP_LITE => {
                let [a, b, c, d] = self.array(l4)?;
                [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])]
            }
            PROTO_ICMP | PROTO_ICMPV6 => {
                let [kind, _, _, _, high, low] = self.array(l4)?;
                echo(kind, [high, low]).ok_or(MALFORMED)?
            }
            _ => [0; 2],
        };
        self.is_untouched(l4 + 8)?;
        let [source, destination] = inner;
        // It goes to whoever has sent the packet, with no more of that than is told (RFC 1812, 4.3.2.3; RFC 4443, 2.4).
        let most = if source.is_ipv4() { MAX_ERROR_V4 } else { MAX_ERROR_V6 };
        if ends.destination != source || self.len > most {
            return Err(MALFORMED);
        }
        Ok(Subject::Error { ends, about: Ends { source, destination, protocol, ports } })
    }

    /// Returns the view of the packet at `l3` alone, which says that it is `total` bytes long, at least `least`. One that is still to be segmented says
    /// nothing of its length.
    #[inline]
    fn until(self, l3: usize, total: usize, least: usize) -> Result<Self, Doubt> {
        let end = if self.header.is_gso() { self.len } else { l3 + total };
        if total < least && !self.header.is_gso() || end > self.len || end < l3 + least {
            return Err(MALFORMED);
        }
        Ok(Self { bytes: &self.bytes[..self.bytes.len().min(end)], len: end, ..self })
    }

    fn no_source_route(self, mut at: usize, end: usize) -> Result<(), Doubt> {
        while at < end {
            let [kind] = self.array(at)?;
            at += match kind {
                END_OF_OPTIONS => return Ok(()),
                NO_OPERATION => 1,
                _ if SOURCE_ROUTES.contains(&kind) => return Err(Doubt::Odd(Odd::Routed)),
                _ => {
                    let [len] = self.array(at + 1)?;
                    if len < 2 {
                        return Err(MALFORMED);
                    }
                    len.into()
                }
            };
        }
        if at == end { Ok(()) } else { Err(MALFORMED) }
    }

    fn no_home_address(self, mut at: usize, end: usize) -> Result<(), Doubt> {
        while at < end {
            let [kind] = self.array(at)?;
            at += match kind {
                PAD_1 => 1,
                HOME_ADDRESS => return Err(Doubt::Odd(Odd::Routed)),
                _ => {
                    let [len] = self.array(at + 1)?;
                    2 + usize::from(len)
                }
            };
        }
        if at == end { Ok(()) } else { Err(MALFORMED) }
    }

    #[inline]
    fn array<const N: usize>(self, at: usize) -> Result<[u8; N], Doubt> {
        match self.bytes.get(at..).and_then(|bytes| bytes.first_chunk().copied()) {
            Some(array) => Ok(array),
            None => Err(self.cut(at + N)),
        }
    }

    /// The reason for which the bytes in front of `end` are not there.
    #[cold]
    fn cut(self, end: usize) -> Doubt {
        if end <= self.len { Doubt::Beyond } else { MALFORMED }
    }

    /// Fails if a checksum that is still to be filled in lies in front of `at`, in bytes that were looked at: it would change them.
    #[inline]
    fn is_untouched(self, at: usize) -> Result<(), Doubt> {
        let Header { csum_start, csum_offset, .. } = self.header;
        let lies = usize::from(*csum_start) + usize::from(*csum_offset);
        if self.header.needs_csum() && lies < at { Err(MALFORMED) } else { Ok(()) }
    }

    /// Fails as [`is_untouched`](Self::is_untouched) does, but for a checksum at `its_own`.
    fn is_untouched_but(self, at: usize, its_own: usize) -> Result<(), Doubt> {
        let Header { csum_start, csum_offset, .. } = self.header;
        if usize::from(*csum_start) + usize::from(*csum_offset) == its_own {
            Ok(())
        } else {
            self.is_untouched(at)
        }
    }
}
