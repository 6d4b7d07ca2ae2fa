//! The virtio-net header in front of each frame (VIRTIO 1.4, 5.1.6), which Linux taps use too, and the offloads that
//! it requests from the receiver.
//!
//! The header is plain data: a receiver copies it out of shared memory once ([`Header::from_bytes`]), reduces it to
//! the defined flags ([`Header::sanitised`]), checks it against the length of the frame ([`Header::check`], the only
//! place that does) and against its first bytes ([`Header::validated`]), and keeps it with the frame until the frame is
//! delivered.

mod validate;

use bitflags::bitflags;
use thiserror::Error;

use crate::ether;

pub use validate::{Invalid, MAX_UDP_SEGMENTS, MIN_TCP_GSO_SIZE, VALIDATED_HEAD};

/// `flags`: the checksum is partial; `csum_start` and `csum_offset` tell how to complete it.
pub const F_NEEDS_CSUM: u8 = 1;
/// `flags`: the device has checked the checksum. A driver must not set it (5.1.6.2).
pub const F_DATA_VALID: u8 = 2;
/// `flags`: `csum_start` and `csum_offset` contain coalescing counts. It is never valid here, as VIRTIO_NET_F_RSC_EXT is
/// not offered.
pub const F_RSC_INFO: u8 = 4;
/// A bit of `flags` that never is in a header outside this program: see [`Header::is_software_only`].
const F_SOFTWARE_ONLY: u8 = 0x80;

/// `gso_type`: the frame is one packet and needs no segmentation.
pub const GSO_NONE: u8 = 0;
/// `gso_type`: TCP over IPv4 that must be segmented.
pub const GSO_TCPV4: u8 = 1;
/// `gso_type`: a UDP datagram that must be cut into IP fragments (UFO).
pub const GSO_UDP: u8 = 3;
/// `gso_type`: TCP over IPv6 that must be segmented.
pub const GSO_TCPV6: u8 = 4;
/// `gso_type`: UDP payload that must be cut into separate datagrams (USO).
pub const GSO_UDP_L4: u8 = 5;
/// `gso_type`, a bit in addition to either TCP type: CWR is set, which only the first segment may have.
pub const GSO_ECN: u8 = 0x80;

/// `struct virtio_net_hdr` up to `num_buffers`, in native byte order.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Header {
    /// Flags: `F_NEEDS_CSUM`, `F_DATA_VALID`, `F_RSC_INFO`.
    pub flags: u8,
    /// Segmentation type: one of the `GSO_*` constants; a TCP type may be combined with `GSO_ECN`.
    pub gso_type: u8,
    /// Length of all headers including the transport header, in bytes. It is only a hint and must not be relied on
    /// (5.1.6.2).
    pub hdr_len: u16,
    /// Number of payload bytes in each segment except the last.
    pub gso_size: u16,
    /// Offset of the first byte covered by the checksum, from the start of the frame.
    pub csum_start: u16,
    /// Offset of the checksum field, from `csum_start`.
    pub csum_offset: u16,
    /// Number of receive buffers that the frame occupies; 0 on transmit. The queue that delivers the frame sets it.
    pub num_buffers: u16,
}

/// The reason for which a header cannot belong to its frame. The frame must be dropped and counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum HeaderError {
    /// The frame, with this length in bytes, is shorter than an Ethernet header.
    #[error("a frame of {0} bytes is shorter than an Ethernet header; drop it")]
    FrameTooShort(usize),
    /// The checksum would be beyond the frame or inside the Ethernet header.
    #[error("checksum at {start} + {offset} lies outside the packet of a {frame_len}-byte frame; drop it")]
    ChecksumPosition {
        /// The value of `csum_start` in the header.
        start: u16,
        /// The value of `csum_offset` in the header.
        offset: u16,
        /// Length of the frame in bytes.
        frame_len: usize,
    },
    /// VIRTIO 1.4 does not define this `gso_type`.
    #[error("gso_type {0:#04x} is not defined; drop the frame")]
    GsoType(u8),
    /// The header requests segmentation into packets without payload.
    #[error("gso_size is 0 in a frame that asks for segmentation; drop it")]
    GsoSize,
    /// The header requests segmentation without `F_NEEDS_CSUM` (5.1.6.2).
    #[error("segmentation asked for without NEEDS_CSUM (VIRTIO 1.4, 5.1.6.2); drop the frame")]
    GsoWithoutChecksum,
    /// `hdr_len` is larger than the frame, which Linux taps refuse.
    #[error("hdr_len {hdr_len} is beyond the {frame_len}-byte frame; drop it")]
    HeaderLength {
        /// The value of `hdr_len` in the header.
        hdr_len: u16,
        /// Length of the frame in bytes.
        frame_len: usize,
    },
}

impl Header {
    /// The header that requests no offload, which is also the default.
    pub const NONE: Header = Header {
        flags: 0,
        gso_type: 0,
        hdr_len: 0,
        gso_size: 0,
        csum_start: 0,
        csum_offset: 0,
        num_buffers: 0,
    };

    /// Size in bytes with VIRTIO_F_VERSION_1, with or without mergeable receive buffers.
    pub const LEN: usize = 12;
    /// Size in bytes without `num_buffers`: in the legacy interface, and the default of a tap.
    pub const LEGACY_LEN: usize = 10;

    /// Decodes the little-endian wire form. Any bytes are accepted; [`check`](Self::check) finds invalid ones.
    #[inline]
    #[must_use]
    pub const fn from_bytes(bytes: &[u8; Self::LEN]) -> Header {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = *bytes;
        // By words, as in `to_words`: two loads instead of twelve.
        let (low, high) = (u64::from_le_bytes([a, b, c, d, e, f, g, h]), u32::from_le_bytes([i, j, k, l]));
        Header {
            flags: low as u8,
            gso_type: (low >> 8) as u8,
            hdr_len: (low >> 16) as u16,
            gso_size: (low >> 32) as u16,
            csum_start: (low >> 48) as u16,
            csum_offset: high as u16,
            num_buffers: (high >> 16) as u16,
        }
    }

    /// Returns true if the wire form requests nothing: no checksum, no segmentation, and zeros in unused fields. Most
    /// headers are like that and need no check. `num_buffers`, which a legacy header lacks, is ignored.
    #[inline]
    #[must_use]
    pub fn is_plain(bytes: &[u8; Self::LEN]) -> bool {
        bytes[..Self::LEGACY_LEN] == [0; Self::LEGACY_LEN]
    }

    /// Encodes the little-endian wire form.
    #[inline]
    #[must_use]
    pub const fn to_bytes(&self) -> [u8; Self::LEN] {
        let (low, high) = self.to_words();
        let ([a, b, c, d, e, f, g, h], [i, j, k, l]) = (low.to_le_bytes(), high.to_le_bytes());
        [a, b, c, d, e, f, g, h, i, j, k, l]
    }

    /// Encodes the wire form as two little-endian words in registers. If bytes were stored one by one and loaded as a
    /// word at once, the load would wait until all stores have reached the cache (no store forwarding).
    #[inline(always)]
    #[must_use]
    pub const fn to_words(&self) -> (u64, u32) {
        let low = self.flags as u64
            | (self.gso_type as u64) << 8
            | (self.hdr_len as u64) << 16
            | (self.gso_size as u64) << 32
            | (self.csum_start as u64) << 48;
        (low, self.csum_offset as u32 | (self.num_buffers as u32) << 16)
    }

    /// Returns true if the checksum is partial.
    #[inline]
    #[must_use]
    pub const fn needs_csum(&self) -> bool {
        self.flags & F_NEEDS_CSUM != 0
    }

    /// Returns true if the frame needs segmentation.
    #[inline]
    #[must_use]
    pub const fn is_gso(&self) -> bool {
        self.gso_type != GSO_NONE
    }

    /// Returns true if what the header asks for must be done in software before the frame is delivered, whatever its
    /// receiver accepts: [`validated`](Self::validated) has found that not every receiver could do it, or that the sender
    /// can still change on what it depends. [`needs`](Self::needs) then has an offload that no receiver accepts, so a
    /// caller that asks [`Offloads::accepts`] does the right thing.
    #[inline]
    #[must_use]
    pub const fn is_software_only(&self) -> bool {
        self.flags & F_SOFTWARE_ONLY != 0
    }

    const fn software_only(mut self) -> Header {
        self.flags |= F_SOFTWARE_ONLY;
        self
    }

    /// Reduces a header written by a *driver* to the fields that a device must respect (5.1.6.2). Of the flags only
    /// `F_NEEDS_CSUM` stays, as a driver must set no other and unknown ones must be ignored. Unused fields become 0,
    /// so that their contents neither reach another guest nor make a tap refuse the frame.
    #[inline]
    #[must_use]
    pub const fn sanitised(self) -> Header {
        self.with_flags_of(F_NEEDS_CSUM)
    }

    /// Does the same for a header written by a *device* or by the kernel of this host, which may also set
    /// `F_DATA_VALID` (5.1.6.4).
    #[inline]
    #[must_use]
    pub const fn sanitised_from_device(self) -> Header {
        self.with_flags_of(F_NEEDS_CSUM | F_DATA_VALID)
    }

    const fn with_flags_of(mut self, known: u8) -> Header {
        self.flags &= known;
        if !self.needs_csum() {
            self.csum_start = 0;
            self.csum_offset = 0;
        }
        if !self.is_gso() {
            self.hdr_len = 0;
            self.gso_size = 0;
        }
        self.num_buffers = 0;
        self
    }

    /// Checks that the header can belong to a frame of `frame_len` bytes (header not counted): the checksum is inside
    /// the packet; the segmentation type is defined, has a size and comes with `F_NEEDS_CSUM`. Unused fields are
    /// ignored.
    ///
    /// # Errors
    /// The first rule that is broken; the frame must be dropped then.
    #[inline]
    pub const fn check(&self, frame_len: usize) -> Result<(), HeaderError> {
        if frame_len < ether::MIN_FRAME {
            return Err(HeaderError::FrameTooShort(frame_len));
        }
        if let Err(error) = self.checksum_position(frame_len) {
            return Err(error);
        }
        if !self.is_gso() {
            return Ok(());
        }
        if gso_offloads(self.gso_type).is_none() {
            return Err(HeaderError::GsoType(self.gso_type));
        }
        if self.gso_size == 0 {
            return Err(HeaderError::GsoSize);
        }
        if !self.needs_csum() {
            return Err(HeaderError::GsoWithoutChecksum);
        }
        if self.hdr_len as usize > frame_len {
            return Err(HeaderError::HeaderLength { hdr_len: self.hdr_len, frame_len });
        }
        Ok(())
    }

    /// Returns the offsets of the first byte covered by the checksum and of its field, from the start of the frame;
    /// `None` if the checksum is complete. Both bytes of the field are inside the packet.
    #[inline]
    pub(crate) const fn checksum_position(
        &self,
        frame_len: usize,
    ) -> Result<Option<(usize, usize)>, HeaderError> {
        if !self.needs_csum() {
            return Ok(None);
        }
        let start = self.csum_start as usize;
        let field = start + self.csum_offset as usize;
        // A checksum inside the Ethernet header would let a sender rewrite addresses after they
        // were looked up.
        if start < ether::MIN_FRAME || field + 2 > frame_len {
            return Err(HeaderError::ChecksumPosition {
                start: self.csum_start,
                offset: self.csum_offset,
                frame_len,
            });
        }
        Ok(Some((start, field)))
    }

    /// Returns the offloads that the receiver of a frame with this header must accept. For an undefined `gso_type`, and
    /// for a header that is [for software only](Self::is_software_only), they include bits that no receiver has.
    #[inline]
    #[must_use]
    pub const fn needs(&self) -> Offloads {
        // Without GUEST_CSUM a device must set flags to 0 (5.1.6.4), so F_DATA_VALID needs it as well.
        let checksum = if self.flags == 0 { Offloads::empty() } else { Offloads::CSUM };
        // No receiver has the offload of this bit.
        let checksum = checksum.union(Offloads::from_bits_retain(self.flags & F_SOFTWARE_ONLY));
        match gso_offloads(self.gso_type) {
            Some(segmentation) => checksum.union(segmentation),
            None => Offloads::from_bits_retain(u8::MAX),
        }
    }
}

bitflags! {
    /// Offloads that a *receiver* of frames accepts: the guest's `VIRTIO_NET_F_GUEST_*` features
    /// for a virtio device, `TUNSETOFFLOAD` for a tap, `VIRTIO_NET_F_CSUM` and
    /// `VIRTIO_NET_F_HOST_*` for a device that a driver half transmits to.
    #[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
    pub struct Offloads: u8 {
        /// Checksums may be partial, or declared valid.
        const CSUM = 1 << 0;
        /// TCP over IPv4 may arrive unsegmented.
        const TSO4 = 1 << 1;
        /// TCP over IPv6 may arrive unsegmented.
        const TSO6 = 1 << 2;
        /// Unsegmented TCP may have CWR set.
        const ECN = 1 << 3;
        /// UDP over IPv4 and over IPv6 may arrive unsegmented (several datagrams in a frame). It must only be set if
        /// the receiver negotiated both, as the header does not contain the IP version.
        const USO = 1 << 4;
        /// UDP datagrams may arrive unfragmented.
        const UFO = 1 << 5;
    }
}

impl Offloads {
    /// Returns true if a frame with this header can be delivered unchanged. If not, software must segment it
    /// ([`Segmenter`](crate::segment::Segmenter)) or complete its checksum ([`complete`](crate::checksum::complete))
    /// first.
    #[inline]
    #[must_use]
    pub const fn accepts(self, header: &Header) -> bool {
        self.contains(header.needs())
    }
}

/// Returns the offloads that a `gso_type` needs besides the checksum, or `None` if the type is not defined.
#[inline]
const fn gso_offloads(gso_type: u8) -> Option<Offloads> {
    const TCPV4_ECN: u8 = GSO_TCPV4 | GSO_ECN;
    const TCPV6_ECN: u8 = GSO_TCPV6 | GSO_ECN;
    Some(match gso_type {
        GSO_NONE => Offloads::empty(),
        GSO_TCPV4 => Offloads::TSO4,
        TCPV4_ECN => Offloads::TSO4.union(Offloads::ECN),
        GSO_TCPV6 => Offloads::TSO6,
        TCPV6_ECN => Offloads::TSO6.union(Offloads::ECN),
        GSO_UDP => Offloads::UFO,
        GSO_UDP_L4 => Offloads::USO,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PARTIAL: Header = Header {
        flags: F_NEEDS_CSUM,
        gso_type: 0,
        hdr_len: 0,
        gso_size: 0,
        csum_start: 34,
        csum_offset: 16,
        num_buffers: 0,
    };
    const TSO4: Header = Header { gso_type: GSO_TCPV4, hdr_len: 54, gso_size: 1448, ..PARTIAL };

    #[test]
    fn clause_5_1_6_header_is_little_endian_in_field_order() {
        let bytes = [1, 0x84, 0x36, 0x01, 0xa8, 0x05, 0x22, 0x00, 0x10, 0x02, 0x03, 0x00];
        let header = Header::from_bytes(&bytes);
        let expected = Header {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV6 | GSO_ECN,
            hdr_len: 0x136,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 0x210,
            num_buffers: 3,
        };
        assert_eq!(header, expected);
        assert_eq!(header.to_bytes(), bytes);
    }

    #[test]
    fn cve_2024_11614_csum_start_beyond_packet() {
        let header = Header { csum_start: 1500, csum_offset: 16, ..PARTIAL };
        let refused = HeaderError::ChecksumPosition { start: 1500, offset: 16, frame_len: 60 };
        assert_eq!(header.check(60), Err(refused));
    }

    #[test]
    fn clause_5_1_6_2_checksum_field_must_end_inside_the_packet() {
        assert_eq!(PARTIAL.check(34 + 16 + 2), Ok(()));
        assert!(PARTIAL.check(34 + 16 + 1).is_err());
    }

    #[test]
    fn checksum_position_does_not_wrap_around() {
        for (csum_start, csum_offset) in [(u16::MAX, 1), (u16::MAX, u16::MAX), (14, u16::MAX)] {
            let header = Header { csum_start, csum_offset, ..PARTIAL };
            assert!(header.check(1514).is_err(), "{header:?}");
        }
    }

    #[test]
    fn checksum_cannot_be_put_into_the_ethernet_header() {
        assert!(Header { csum_start: 0, csum_offset: 0, ..PARTIAL }.check(60).is_err());
        assert!(Header { csum_start: 13, csum_offset: 6, ..PARTIAL }.check(60).is_err());
        assert!(Header { csum_start: 14, csum_offset: 6, ..PARTIAL }.check(60).is_ok());
    }

    #[test]
    fn frame_shorter_than_an_ethernet_header_is_refused() {
        assert_eq!(Header::default().check(13), Err(HeaderError::FrameTooShort(13)));
        assert_eq!(Header::default().check(14), Ok(()));
    }

    #[test]
    fn gso_size_zero_is_refused() {
        assert_eq!(TSO4.check(9000), Ok(()));
        assert_eq!(Header { gso_size: 0, ..TSO4 }.check(9000), Err(HeaderError::GsoSize));
    }

    #[test]
    fn clause_5_1_6_2_gso_requires_needs_csum() {
        assert_eq!(Header { flags: 0, ..TSO4 }.check(9000), Err(HeaderError::GsoWithoutChecksum));
        assert_eq!(Header { flags: F_DATA_VALID, ..TSO4 }.check(9000), Err(HeaderError::GsoWithoutChecksum));
    }

    #[test]
    fn gso_header_longer_than_the_frame_is_refused() {
        assert!(Header { hdr_len: 61, ..TSO4 }.check(61).is_ok());
        assert!(Header { hdr_len: 62, ..TSO4 }.check(61).is_err());
    }

    #[test]
    fn gso_types_outside_the_table_are_refused() {
        let defined = [0, 1, 3, 4, 5, 0x81, 0x84];
        for gso_type in 0..=u8::MAX {
            let header = Header { gso_type, ..TSO4 };
            assert_eq!(header.check(9000).is_ok(), defined.contains(&gso_type), "{gso_type:#x}");
            assert!(header.check(9000).is_ok() || !Offloads::all().accepts(&header), "{gso_type:#x}");
        }
    }

    #[test]
    fn clause_5_1_6_2_device_ignores_flags_it_does_not_know() {
        let header = Header { flags: 0xff, num_buffers: 7, ..TSO4 };
        assert_eq!(header.sanitised(), TSO4);
        assert_eq!(header.sanitised_from_device(), Header { flags: F_NEEDS_CSUM | F_DATA_VALID, ..TSO4 });
    }

    #[test]
    fn clause_5_1_6_2_fields_without_their_flag_are_not_used() {
        let header = Header { flags: F_RSC_INFO | 0x40, gso_type: GSO_NONE, ..TSO4 };
        assert_eq!(header.check(60), Ok(()));
        assert_eq!(header.sanitised(), Header::default());
    }

    #[test]
    fn clause_5_1_6_4_offloads_not_negotiated_are_not_delivered() {
        let types = [
            (GSO_TCPV4, Offloads::TSO4),
            (GSO_TCPV6, Offloads::TSO6),
            (GSO_TCPV4 | GSO_ECN, Offloads::TSO4 | Offloads::ECN),
            (GSO_TCPV6 | GSO_ECN, Offloads::TSO6 | Offloads::ECN),
            (GSO_UDP, Offloads::UFO),
            (GSO_UDP_L4, Offloads::USO),
        ];
        for (gso_type, segmentation) in types {
            let header = Header { gso_type, ..TSO4 };
            let needed = segmentation | Offloads::CSUM;
            assert_eq!(header.needs(), needed);
            assert!(needed.accepts(&header));
            for missing in needed.iter() {
                assert!(!(Offloads::all() - missing).accepts(&header), "{gso_type:#x} without {missing:?}");
            }
        }
        let valid = Header { flags: F_DATA_VALID, ..Header::default() };
        assert!(!Offloads::empty().accepts(&valid) && Offloads::CSUM.accepts(&valid));
        assert!(Offloads::empty().accepts(&Header::default()));
    }

    proptest! {
        #[test]
        fn every_header_survives_the_wire(bytes: [u8; Header::LEN]) {
            prop_assert_eq!(Header::from_bytes(&bytes).to_bytes(), bytes);
        }

        #[test]
        fn what_passes_the_check_still_passes_when_sanitised(
            bytes: [u8; Header::LEN],
            frame_len in 0usize..140_000,
        ) {
            let header = Header::from_bytes(&bytes);
            if header.check(frame_len).is_ok() {
                prop_assert_eq!(header.sanitised().check(frame_len), Ok(()));
                prop_assert_eq!(header.sanitised().sanitised(), header.sanitised());
            }
        }
    }
}
