//! Validation of a virtual header against the frame behind it, before anybody else sees either.
//!
//! A virtual header says where a checksum goes and into what a frame is cut. Its receiver trusts it: a guest trusts its
//! device, and the host's kernel trusts whoever may write to a tap. So whoever passes on a frame of somebody else calls
//! [`Header::validated`] once per frame that asks for an offload, after [`Header::check`], with a private copy of the
//! frame's first bytes. What contradicts the frame, or what its sender has not negotiated, is refused; what follows from
//! the frame is computed from it (`hdr_len`, and that a frame of one segment needs no segmentation).
//!
//! A checksum that is neither TCP's nor UDP's own, such as that of a packet in a tunnel that begins in the guest, is
//! legal where it lies behind the network header, but not every receiver can finish it. The header returned for it is
//! one that [no receiver accepts](Header::is_software_only), so that software finishes it on the way.

use thiserror::Error;

use super::{F_NEEDS_CSUM, GSO_ECN, GSO_NONE, GSO_UDP, GSO_UDP_L4, Header, HeaderError, Offloads};
use crate::ether::{self, Link};
use crate::frame::PREFIX;
use crate::parse::{
    IPV4_FRAGMENT, IPV6_LEN, Layers, PROTO_TCP, PROTO_UDP, ParseError, TCP_CHECKSUM, TCP_MIN_LEN,
    UDP_CHECKSUM, UDP_LEN,
};
use crate::segment::MAX_SEGMENTS;

/// Number of first bytes of a frame that suffice for [`Header::validated`]: longer headers are refused.
pub const VALIDATED_HEAD: usize = crate::segment::MAX_HEADERS;

/// Smallest `gso_size` of TCP in bytes. Linux clamps the size of a segment to 48 bytes with options
/// (`tcp_min_snd_mss`), of which 40 may be options.
pub const MIN_TCP_GSO_SIZE: u16 = 8;
/// Largest number of datagrams in one frame, as in Linux (`UDP_MAX_SEGMENTS`).
pub const MAX_UDP_SEGMENTS: usize = 128;
/// A `gso_size` that Linux uses as a mark within the kernel (`GSO_BY_FRAGS`), and that must not come from outside.
const GSO_BY_FRAGS: u16 = 0xffff;

/// Length in bytes of an LLC and a SNAP header, which take the place of an EtherType.
const SNAP_LEN: usize = 8;
/// Below this, an EtherType is a length (IEEE 802.3, 3.2.6).
const MIN_ETHER_TYPE: u16 = 0x0600;

/// The reason for which a virtual header must not be passed on with its frame. The frame must be dropped and counted,
/// except for [`Invalid::Beyond`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Invalid {
    /// The bytes at hand end before what decides; ask again with more, up to [`VALIDATED_HEAD`].
    #[error("the headers of the frame are longer than the bytes at hand; ask again with more")]
    Beyond,
    /// The header cannot belong to any frame of this length.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The headers of the frame end behind the frame, behind [`VALIDATED_HEAD`] bytes, or contradict themselves.
    #[error(transparent)]
    Parse(ParseError),
    /// The sender has not negotiated what the header asks for.
    #[error("the sender asks for {0:?}, which it has not negotiated; drop the frame")]
    NotNegotiated(Offloads),
    /// The segmentation type does not agree with the protocols of the frame, or the frame is an IP fragment.
    #[error("gso_type {0:#04x} does not match the protocols of the frame; drop it")]
    Protocol(u8),
    /// The checksum is not that of the transport header, and lies where a sender must not have anything written.
    #[error("checksum at {start} + {offset} is not that of the frame's transport header; drop the frame")]
    Checksum {
        /// The value of `csum_start` in the header.
        start: u16,
        /// The value of `csum_offset` in the header.
        offset: u16,
    },
    /// The segments would be too small or too many.
    #[error("gso_size {0} makes no sane packets of this frame; drop it")]
    GsoSize(u16),
}

impl From<ParseError> for Invalid {
    fn from(error: ParseError) -> Self {
        Self::Parse(error)
    }
}

impl Header {
    /// Decides whether this header, which has been [sanitised](Header::sanitised), may be passed on with a frame of
    /// `len` bytes, and returns what is passed on. `first` is a private copy of the frame's first bytes: all of them,
    /// [`VALIDATED_HEAD`] of them, or fewer, at the price of [`Invalid::Beyond`] for long headers (64 suffice for nearly
    /// all frames that are not to be segmented). `negotiated` is what the sender may ask for: for a guest the `HOST_*`
    /// features ([`Offloads`] has the terms), for a tap the offloads that it was set up with.
    ///
    /// A header that asks for nothing is returned after a single comparison. Of others,
    ///
    /// - the checksum must be that of the frame's own TCP or UDP header, behind tags, IPv4 options or IPv6 extension
    ///   headers. Another one behind the network header is left to [software](Header::is_software_only);
    /// - the segmentation type must agree with the frame's protocols, `gso_size` must make sane packets, and the frame
    ///   must not be a fragment. A frame that is a single segment is passed on without segmentation;
    /// - `hdr_len` is that of the frame's headers.
    ///
    /// # Errors
    /// [`Invalid`], for the first rule that is broken.
    #[inline]
    pub fn validated(self, first: &[u8], len: usize, negotiated: Offloads) -> Result<Header, Invalid> {
        if self.flags == 0 && self.gso_type == GSO_NONE {
            return if len < ether::MIN_FRAME {
                Err(HeaderError::FrameTooShort(len).into())
            } else {
                Ok(self)
            };
        }
        self.validate_offloads(first, len, negotiated)
    }

    /// Returns true if [`validated`](Self::validated) returns this very header, as far as that takes few comparisons: for a
    /// header that asks for nothing, and for the checksum of TCP or UDP behind an IP header without tags, options or extension
    /// headers. `first` has the frame's first bytes, as many as there are.
    #[inline]
    pub(crate) fn is_evident(&self, first: &[u8; PREFIX], len: usize, negotiated: Offloads) -> bool {
        match (self.flags, self.gso_type) {
            (0, GSO_NONE) => len >= ether::MIN_FRAME,
            (F_NEEDS_CSUM, GSO_NONE) => {
                negotiated.contains(Offloads::CSUM) && self.is_simple_checksum(first, len)
            }
            _ => false,
        }
    }

    #[inline]
    fn is_simple_checksum(&self, first: &[u8; PREFIX], len: usize) -> bool {
        const L3: usize = ether::MIN_FRAME;
        let be16 = |at: usize| u16::from_be_bytes([first[at], first[at + 1]]);
        let (l4, proto) = match be16(L3 - 2) {
            ether::TYPE_IPV4 if first[L3] == 0x45 && be16(L3 + 6) & IPV4_FRAGMENT == 0 => {
                (L3 + 20, first[L3 + 9])
            }
            ether::TYPE_IPV6 if first[L3] >> 4 == 6 => (L3 + IPV6_LEN, first[L3 + 6]),
            _ => return false,
        };
        let (field, header) = match proto {
            PROTO_TCP => (TCP_CHECKSUM, TCP_MIN_LEN),
            PROTO_UDP => (UDP_CHECKSUM, UDP_LEN),
            _ => return false,
        };
        (usize::from(self.csum_start), usize::from(self.csum_offset)) == (l4, field) && l4 + header <= len
    }

    fn validate_offloads(self, first: &[u8], len: usize, negotiated: Offloads) -> Result<Header, Invalid> {
        self.check(len)?;
        if !self.needs_csum() {
            // Segmentation does not come without NEEDS_CSUM, so this says that a checksum has been checked: a hint, which
            // is left out if it must not be given.
            return Ok(if negotiated.contains(Offloads::CSUM) { self } else { Header::NONE });
        }
        if !negotiated.accepts(&self) {
            return Err(Invalid::NotNegotiated(self.needs() - negotiated));
        }
        let first = &first[..first.len().min(len)];
        let decided =
            if self.is_gso() { self.validate_gso(first, len) } else { self.validate_checksum(first, len) };
        match decided {
            Err(Invalid::Parse(ParseError::Truncated)) if first.len() < len.min(VALIDATED_HEAD) => {
                Err(Invalid::Beyond)
            }
            decided => decided,
        }
    }

    /// Validates a header that asks for a checksum only.
    fn validate_checksum(self, first: &[u8], len: usize) -> Result<Header, Invalid> {
        let Link { ether_type, l3, .. } = Link::parse(first).ok_or(ParseError::Truncated)?;
        let behind = match ether_type {
            ether::TYPE_IPV4 | ether::TYPE_IPV6 => match Layers::parse_network(first) {
                Ok(layers) if self.is_transport_checksum(&layers, len) => {
                    return Ok(if is_stable(first, &layers) { self } else { self.software_only() });
                }
                Ok(layers) => layers.l4,
                Err(ParseError::TooManyExtensions) => l3 + IPV6_LEN,
                Err(error) => return Err(error.into()),
            },
            // Neither has a checksum.
            ether::TYPE_ARP | ether::TYPE_RARP => len,
            ..MIN_ETHER_TYPE => l3 + SNAP_LEN,
            // More tags than are parsed, MPLS, PPPoE: at least one header, of which none has less than four bytes.
            _ => l3 + 4,
        };
        if usize::from(self.csum_start) < behind {
            return Err(self.bad_checksum());
        }
        Ok(self.software_only())
    }

    fn validate_gso(self, first: &[u8], len: usize) -> Result<Header, Invalid> {
        let layers = match Layers::parse_network(first) {
            Err(ParseError::NotIp(_)) => return Err(Invalid::Protocol(self.gso_type)),
            layers => layers?,
        };
        if layers.fragment || !layers.agree_with(&self) {
            return Err(Invalid::Protocol(self.gso_type));
        }
        if !self.is_transport_checksum(&layers, len) {
            return Err(self.bad_checksum());
        }
        let tcp = layers.proto == PROTO_TCP;
        let transport = if tcp {
            let words = first.get(layers.l4 + 12).ok_or(ParseError::Truncated)? >> 4;
            usize::from(words) * 4
        } else {
            UDP_LEN
        };
        let headers = layers.l4 + transport;
        if tcp && transport < TCP_MIN_LEN || headers > len {
            return Err(ParseError::Malformed("TCP").into());
        }
        let payload = len - headers;
        let (smallest, most) = match self.gso_type & !GSO_ECN {
            GSO_UDP_L4 => (1, MAX_UDP_SEGMENTS),
            // Fragments are of multiples of eight bytes.
            GSO_UDP => (8, MAX_SEGMENTS),
            _ => (MIN_TCP_GSO_SIZE, MAX_SEGMENTS),
        };
        if payload <= usize::from(self.gso_size) && self.gso_size != GSO_BY_FRAGS {
            let whole = Header { gso_type: GSO_NONE, gso_size: 0, hdr_len: 0, ..self };
            return Ok(if is_stable(first, &layers) { whole } else { whole.software_only() });
        }
        let size = self.gso_size;
        if size < smallest || size == GSO_BY_FRAGS || payload.div_ceil(size.into()) > most {
            return Err(Invalid::GsoSize(size));
        }
        // `headers` lies within the bytes at hand, or at most 60 bytes behind one of them.
        let header = Header { hdr_len: u16::try_from(headers).unwrap_or(u16::MAX), ..self };
        Ok(if is_stable(first, &layers) { header } else { header.software_only() })
    }

    /// Returns true if the checksum is that of the TCP or UDP header that the frame has.
    fn is_transport_checksum(&self, layers: &Layers, len: usize) -> bool {
        let (field, header) = match layers.proto {
            PROTO_TCP => (TCP_CHECKSUM, TCP_MIN_LEN),
            PROTO_UDP => (UDP_CHECKSUM, UDP_LEN),
            _ => return false,
        };
        !layers.fragment
            && (usize::from(self.csum_start), usize::from(self.csum_offset)) == (layers.l4, field)
            && layers.l4 + header <= len
    }

    fn bad_checksum(&self) -> Invalid {
        Invalid::Checksum { start: self.csum_start, offset: self.csum_offset }
    }
}

/// Returns true if the place of the transport header follows from the first [`PREFIX`] bytes alone, which are those that
/// a [`Burst`](crate::frame::Burst) keeps a private copy of: the sender may change others until they are delivered.
fn is_stable(first: &[u8], layers: &Layers) -> bool {
    layers.l4 - layers.l3 <= IPV6_LEN
        || matches!(layers.ip, crate::parse::IpVersion::V4)
        || first.len() <= PREFIX
        || Layers::parse_network(&first[..PREFIX]).is_ok()
}

#[cfg(test)]
mod tests;
