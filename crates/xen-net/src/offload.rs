//! Offloads of a frame: the translation between the network interface's flags and extras
//! ([`NetifOffload`]) and the virtual header of the other crates. Both halves translate each frame
//! here, on the queue's thread; all values are plain.
//!
//! The network interface expresses "the checksum is blank" and "segments of so many bytes, of this
//! kind", and leaves it to the receiver to find where the checksum lies. The virtual header
//! expresses both with offsets.

use ringferry_packet::parse::{Layers, PROTO_TCP, PROTO_UDP, ParseError};
use ringferry_packet::vnet::{
    F_DATA_VALID, F_NEEDS_CSUM, GSO_NONE, GSO_TCPV4, GSO_TCPV6, Header, HeaderError, Invalid, Offloads,
};
use ringferry_xen::netif::wire;

/// Number of bytes of a frame that are copied to find its headers: as many as Linux gathers, with
/// room for options after them. Longer headers exist only to be longer; such a frame cannot be
/// offloaded.
pub const HEADERS: usize = 256;

/// Offset of the checksum in a TCP header, in bytes.
const TCP_CHECKSUM: u16 = 16;
const UDP_CHECKSUM: u16 = 6;

/// The extra-info of a GSO frame, which is still to be segmented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gso {
    /// Payload bytes of each segment except the last.
    pub size: u16,
    /// Kind of segmentation: [`wire::GSO_TCPV4`] or [`wire::GSO_TCPV6`], or any other value from a
    /// hostile peer.
    pub kind: u8,
}

/// The offloads of a frame, as the slots of the network interface express them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetifOffload {
    /// True if the checksum is blank: its field holds the sum of the pseudo header, and is to be
    /// completed.
    pub csum_blank: bool,
    /// True if the data is known to be good: it came from a checked packet, or never left this
    /// host.
    pub data_validated: bool,
    /// Segmentation that is still to be done, if any.
    pub gso: Option<Gso>,
}

/// The reason why a frame contradicts its offloads. It is to be dropped and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OffloadError {
    /// The headers cannot be parsed.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// The blank checksum is of a protocol that is neither TCP nor UDP.
    #[error("protocol {0} has no checksum that could be finished; drop the frame")]
    Protocol(u8),
    /// The frame does not carry the protocol of its segmentation, or the kind is unknown.
    #[error("segments of kind {0} cannot be made of this frame; drop it")]
    Kind(u8),
    /// The headers contradict the length of the frame.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The headers contradict what is to be done with the frame.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

/// What a peer may ask for: there are no features to be negotiated for it.
const ALL: Offloads = Offloads::CSUM.union(Offloads::TSO4).union(Offloads::TSO6);

impl NetifOffload {
    /// Returns the virtual header of a frame of `len` bytes. `first` is a private copy of its first
    /// [`HEADERS`] bytes, or of all if it is shorter.
    ///
    /// # Errors
    /// Any [`OffloadError`]. A frame to be segmented must have a blank checksum, because a complete
    /// one would be wrong for its segments.
    #[inline]
    pub fn header(&self, first: &[u8], len: usize) -> Result<Header, OffloadError> {
        if !self.csum_blank && self.gso.is_none() {
            let header =
                Header { flags: if self.data_validated { F_DATA_VALID } else { 0 }, ..Header::default() };
            header.check(len)?;
            return Ok(header);
        }
        self.offloaded(first, len)
    }

    fn offloaded(&self, first: &[u8], len: usize) -> Result<Header, OffloadError> {
        let layers = Layers::parse(first)?;
        let csum_offset = match layers.proto {
            PROTO_TCP if !layers.fragment => TCP_CHECKSUM,
            PROTO_UDP if !layers.fragment => UDP_CHECKSUM,
            other => return Err(OffloadError::Protocol(other)),
        };
        let mut header = Header {
            flags: if self.csum_blank { F_NEEDS_CSUM } else { 0 },
            // The offset lies within `first`, and so within 16 bits.
            csum_start: layers.l4 as u16,
            csum_offset,
            ..Header::default()
        };
        if let Some(Gso { size, kind }) = self.gso {
            header.gso_type = match kind {
                wire::GSO_TCPV4 => GSO_TCPV4,
                wire::GSO_TCPV6 => GSO_TCPV6,
                other => return Err(OffloadError::Kind(other)),
            };
            header.gso_size = size;
            header.hdr_len = layers.payload as u16;
            if !layers.agree_with(&header) {
                return Err(OffloadError::Kind(kind));
            }
        }
        header.check(len)?;
        Ok(header.validated(first, len, ALL)?)
    }

    /// Returns the offloads of a frame with this header; `None` when the network interface cannot
    /// express them: UDP to be segmented or fragmented, or TCP with ECN, whose first segment alone
    /// has CWR set.
    #[inline]
    pub fn of(header: &Header) -> Option<Self> {
        let gso = match header.gso_type {
            GSO_NONE => None,
            GSO_TCPV4 => Some(Gso { size: header.gso_size, kind: wire::GSO_TCPV4 }),
            GSO_TCPV6 => Some(Gso { size: header.gso_size, kind: wire::GSO_TCPV6 }),
            _ => return None,
        };
        let csum_blank = header.needs_csum();
        // Linux sets both: data whose checksum is still blank has not been damaged either.
        let data_validated = csum_blank || header.flags & F_DATA_VALID != 0;
        Some(Self { csum_blank, data_validated, gso })
    }
}

/// The frames that a receiver accepts, as it publishes them in the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accepts {
    /// Frames of more than one slot (`feature-sg`).
    pub sg: bool,
    /// Blank checksums over IPv4 (the opposite of `feature-no-csum-offload`).
    pub csum4: bool,
    /// Blank checksums over IPv6 (`feature-ipv6-csum-offload`).
    pub csum6: bool,
    /// TCP segmentation over IPv4 (`feature-gso-tcpv4`).
    pub gso4: bool,
    /// TCP segmentation over IPv6 (`feature-gso-tcpv6`).
    pub gso6: bool,
}

impl Accepts {
    /// Every kind of frame is accepted.
    pub const ALL: Self = Self { sg: true, csum4: true, csum6: true, gso4: true, gso6: true };

    /// Returns the consistent subset: segmentation needs blank checksums and more than one slot.
    #[must_use]
    pub fn consistent(self) -> Self {
        let Self { sg, csum4, csum6, gso4, gso6 } = self;
        Self { sg, csum4, csum6, gso4: gso4 && sg && csum4, gso6: gso6 && sg && csum6 }
    }

    /// Returns the frames that both receivers accept.
    #[must_use]
    pub fn both(self, other: Self) -> Self {
        Self {
            sg: self.sg && other.sg,
            csum4: self.csum4 && other.csum4,
            csum6: self.csum6 && other.csum6,
            gso4: self.gso4 && other.gso4,
            gso6: self.gso6 && other.gso6,
        }
    }

    /// Returns the offloads in the terms of the other crates, which do not distinguish checksums
    /// over IPv4 from those over IPv6: a receiver that accepts only one of them accepts neither.
    #[must_use]
    pub fn offloads(self) -> Offloads {
        let Self { csum4, csum6, gso4, gso6, .. } = self.consistent();
        let csum = csum4 && csum6;
        let mut offloads = Offloads::empty();
        offloads.set(Offloads::CSUM, csum);
        offloads.set(Offloads::TSO4, csum && gso4);
        offloads.set(Offloads::TSO6, csum && gso6);
        offloads
    }
}

#[cfg(test)]
mod tests {
    use ringferry_packet::testing::Packet;

    use super::*;

    fn frame(v6: bool, proto: u8, payload: usize) -> Vec<u8> {
        Packet::plain(v6, proto == PROTO_TCP, vec![0; payload]).partial()
    }

    const BLANK: NetifOffload = NetifOffload { csum_blank: true, data_validated: true, gso: None };

    fn cut(kind: u8, size: u16) -> NetifOffload {
        NetifOffload { gso: Some(Gso { size, kind }), ..BLANK }
    }

    #[test]
    fn offloads_survive_the_way_there_and_back() {
        for (v6, kind) in [(false, wire::GSO_TCPV4), (true, wire::GSO_TCPV6)] {
            let frame = frame(v6, PROTO_TCP, 5000);
            for offload in [NetifOffload::default(), BLANK, cut(kind, 1448)] {
                let header = offload.header(&frame[..HEADERS], frame.len()).unwrap();
                assert_eq!(NetifOffload::of(&header), Some(offload), "{header:?}");
            }
        }
    }

    #[test]
    fn blank_checksums_are_found_in_tcp_and_udp() {
        for (v6, l4) in [(false, 34), (true, 54)] {
            for (proto, offset) in [(PROTO_TCP, TCP_CHECKSUM), (PROTO_UDP, UDP_CHECKSUM)] {
                let frame = frame(v6, proto, 10);
                let header = BLANK.header(&frame, frame.len()).unwrap();
                assert_eq!((header.csum_start, header.csum_offset), (l4, offset));
            }
        }
    }

    #[test]
    fn blank_checksums_of_other_protocols_are_refused() {
        let mut frame = frame(false, PROTO_UDP, 10);
        frame[23] = 1;
        assert_eq!(BLANK.header(&frame, frame.len()), Err(OffloadError::Protocol(1)));
        // A fragment has no transport header to put a checksum into.
        frame[23] = PROTO_UDP;
        frame[20] = 0x20;
        assert_eq!(BLANK.header(&frame, frame.len()), Err(OffloadError::Protocol(PROTO_UDP)));
    }

    #[test]
    fn gso_that_the_frame_does_not_carry_is_refused() {
        let tcp4 = frame(false, PROTO_TCP, 5000);
        for (offload, error) in [
            (cut(wire::GSO_TCPV6, 1448), OffloadError::Kind(wire::GSO_TCPV6)),
            (cut(0, 1448), OffloadError::Kind(0)),
            (cut(3, 1448), OffloadError::Kind(3)),
            (cut(wire::GSO_TCPV4, 0), OffloadError::Header(HeaderError::GsoSize)),
            (
                NetifOffload { csum_blank: false, ..cut(wire::GSO_TCPV4, 1448) },
                OffloadError::Header(HeaderError::GsoWithoutChecksum),
            ),
        ] {
            assert_eq!(offload.header(&tcp4, tcp4.len()), Err(error));
        }
        let udp = frame(false, PROTO_UDP, 5000);
        assert_eq!(
            cut(wire::GSO_TCPV4, 1448).header(&udp, udp.len()),
            Err(OffloadError::Kind(wire::GSO_TCPV4))
        );
    }

    #[test]
    fn xsa_423_headers_that_are_not_whole_are_refused() {
        let whole = frame(true, PROTO_TCP, 0);
        for len in 0..whole.len() {
            assert!(BLANK.header(&whole[..len], len).is_err(), "{len}");
        }
        assert!(BLANK.header(&whole, whole.len()).is_ok());
    }

    #[test]
    fn what_the_interface_cannot_say_is_not_said() {
        use ringferry_packet::vnet::{GSO_ECN, GSO_UDP, GSO_UDP_L4};
        for gso_type in [GSO_UDP, GSO_UDP_L4, GSO_TCPV4 | GSO_ECN, 9] {
            assert_eq!(NetifOffload::of(&Header { gso_type, ..Header::default() }), None);
        }
    }

    #[test]
    fn segmentation_needs_sg_and_checksums() {
        let all = Accepts::ALL;
        assert_eq!(all.offloads(), Offloads::CSUM | Offloads::TSO4 | Offloads::TSO6);
        assert_eq!(Accepts { sg: false, ..all }.offloads(), Offloads::CSUM);
        assert_eq!(Accepts { csum6: false, ..all }.offloads(), Offloads::empty());
        assert_eq!(Accepts { gso6: false, ..all }.offloads(), Offloads::CSUM | Offloads::TSO4);
        assert!(!Accepts { csum4: false, ..all }.consistent().gso4);
    }
}
