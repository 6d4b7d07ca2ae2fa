//! Generic segmentation offload in software (GSO): cuts an oversized frame into the packets that a network card would
//! have sent.
//!
//! A sender makes a segmenter for one frame and calls its `next_segment` until that returns `None`. There are three, by
//! the place of the frame: [`Segmenter`] for one slice of private memory, [`PieceSegmenter`] for pieces of another
//! process's memory, and the function [`segment_chain`] for a chain of buffers. None copies payload: each keeps one copy
//! of the headers and rewrites it for each segment, and a [`Segment`] borrows that copy and its part of the payload, so
//! that the caller writes both directly to the receiver's buffers.
//!
//! The lengths of the headers are parsed from the frame. The sender's statements about them must agree, and are not used
//! otherwise.

mod chain;
mod pieces;

pub use chain::{Reason, Unsegmented, segment_chain};
pub use pieces::{PieceSegment, PieceSegmenter};

use std::ops::Range;

use thiserror::Error;

use crate::checksum::{Sum, never_zero};
use crate::parse::{IPV6_LEN, IpVersion, Layers, PROTO_TCP, ParseError, TCP_CHECKSUM, UDP_CHECKSUM};
use crate::vnet::{F_NEEDS_CSUM, GSO_NONE, GSO_UDP, Header, HeaderError};

/// Largest length in bytes of the headers, Ethernet to transport, that are repeated in each segment. The longest with IPv4
/// have 142 bytes; the rest is for IPv6 extension headers.
pub const MAX_HEADERS: usize = 256;

/// Largest number of segments of one frame. Linux never sends TCP segments with less than 36 bytes of payload, 1821 of
/// which make the longest IP packet. Without a limit, 64 KiB with a `gso_size` of 1 would cost the switch 65536 packets.
pub const MAX_SEGMENTS: usize = 2048;

pub(crate) const FIN: u8 = 0x01;
pub(crate) const PSH: u8 = 0x08;
pub(crate) const CWR: u8 = 0x80;

/// The handling of the transport checksum of each segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Checksum {
    /// Leaves the checksum partial, for a receiver that accepts [`Offloads::CSUM`](crate::vnet::Offloads::CSUM).
    Partial,
    /// Completes the checksum, for a receiver without offloads.
    Complete,
}

/// The reason for which a frame cannot be segmented. Unless it is [`SegmentError::NotNeeded`], the frame must be dropped and
/// counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum SegmentError {
    /// The virtio-net header cannot belong to the frame.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The headers of the frame cannot be parsed.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// The header requests no segmentation.
    #[error("the frame needs no segmentation; deliver it as it is")]
    NotNeeded,
    /// The header requests UDP fragmentation (UFO), which Linux removed in 4.14.
    #[error("UDP fragmentation (UFO) is not done in software; do not offer the feature")]
    Fragmentation,
    /// `gso_type`, `csum_start` or `csum_offset` do not agree with the protocols and headers of the frame.
    #[error("the virtio-net header does not match the protocols of the frame; drop it")]
    Mismatch,
    /// The packet is a fragment already.
    #[error("an IP fragment cannot be segmented; drop it")]
    Fragment,
    /// The headers, with this length in bytes, are longer than [`MAX_HEADERS`].
    #[error("headers of {0} bytes are longer than {MAX_HEADERS}; drop the frame")]
    HeadersTooLong(usize),
    /// A segment, with this length in bytes, does not fit the length field of IP.
    #[error("segments of {0} bytes are longer than an IP packet; drop the frame")]
    SegmentTooLong(usize),
    /// There would be this many segments, more than [`MAX_SEGMENTS`].
    #[error("the frame would become {0} packets, more than {MAX_SEGMENTS}; drop it")]
    TooManySegments(usize),
}

/// One segment: the frame to deliver is `head` followed by `payload`, with `header` in front.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Ethernet, IP and transport header, borrowed from the segmenter.
    pub head: &'a [u8],
    /// The segment's part of the payload, borrowed from the original frame.
    pub payload: &'a [u8],
    /// Virtual header of the segment: no segmentation, the checksum as the caller chose, and `num_buffers` 0, to be set by
    /// the receive queue.
    pub header: Header,
}

impl Segment<'_> {
    /// Returns the length of the segment in bytes, without the virtual header.
    #[must_use]
    pub const fn frame_len(&self) -> usize {
        self.head.len() + self.payload.len()
    }
}

/// Segments one frame in private memory, by calls of [`next_segment`](Self::next_segment) until it returns `None`.
#[derive(Clone, Debug)]
pub struct Segmenter<'f> {
    heads: SegmentHeaders<'f>,
    payload: &'f [u8],
    checksum: Checksum,
}

impl<'f> Segmenter<'f> {
    /// Prepares to segment `frame` as `header` requests.
    ///
    /// The payload extends to the end of the frame: the length fields of IP are ignored, as senders set them to 0 in
    /// packets over 64 KiB. The checksum field must contain the sum of the pseudo header of the whole packet (VIRTIO 1.4,
    /// 5.1.6.2); otherwise the segments have wrong checksums, as the packet would have had.
    ///
    /// # Errors
    /// [`SegmentError`], if the frame cannot or need not be segmented.
    pub fn new(header: &Header, frame: &'f [u8], checksum: Checksum) -> Result<Segmenter<'f>, SegmentError> {
        let heads = SegmentHeaders::new(header, frame, frame.len())?;
        Ok(Segmenter { payload: &frame[heads.front.len()..], heads, checksum })
    }

    /// Returns the total number of segments, between 1 and [`MAX_SEGMENTS`].
    #[must_use]
    pub const fn segments(&self) -> usize {
        self.heads.segments
    }

    /// Returns the next segment, in order. It borrows the headers from the segmenter, so it must be used before the next
    /// call.
    pub fn next_segment(&mut self) -> Option<Segment<'_>> {
        let payload = &self.payload[self.heads.advance()?];
        let header = match self.checksum {
            Checksum::Partial => self.heads.partial(),
            Checksum::Complete => {
                let mut sum = self.heads.sum();
                sum.add(payload);
                self.heads.complete(sum);
                Header::default()
            }
        };
        Some(Segment { head: self.heads.current(), payload, header })
    }
}

/// The headers of the segments of a frame, generated one after the other by [`SegmentHeaders::advance`].
#[derive(Clone, Debug)]
struct SegmentHeaders<'f> {
    /// The headers of the original frame.
    front: &'f [u8],
    /// Length in bytes of the payload behind them.
    payload: usize,
    /// The headers of the current segment, as long as `front`.
    head: [u8; MAX_HEADERS],
    layers: Layers,
    gso_size: usize,
    /// The sender's sum of the pseudo header, without the length of the packet.
    pseudo: Sum,
    /// Offset of the transport checksum from the start of the frame.
    field: usize,
    /// Number of segments generated so far, and in total.
    done: usize,
    segments: usize,
}

impl<'f> SegmentHeaders<'f> {
    /// Prepares to segment a frame of `len` bytes that begins with `prefix`, which contains all headers.
    fn new(header: &Header, prefix: &'f [u8], len: usize) -> Result<SegmentHeaders<'f>, SegmentError> {
        header.check(len)?;
        match header.gso_type {
            GSO_NONE => return Err(SegmentError::NotNeeded),
            GSO_UDP => return Err(SegmentError::Fragmentation),
            _ => (),
        }
        let layers = Layers::parse(prefix)?;
        if layers.fragment {
            return Err(SegmentError::Fragment);
        }
        let csum_offset = if layers.proto == PROTO_TCP { TCP_CHECKSUM } else { UDP_CHECKSUM };
        let position = (usize::from(header.csum_start), usize::from(header.csum_offset));
        if !layers.agree_with(header) || position != (layers.l4, csum_offset) {
            return Err(SegmentError::Mismatch);
        }

        let front = &prefix[..layers.payload];
        let payload = len - front.len();
        let mut head = [0; MAX_HEADERS];
        head.get_mut(..front.len()).ok_or(SegmentError::HeadersTooLong(front.len()))?.copy_from_slice(front);
        let gso_size = usize::from(header.gso_size);
        // The length field of IPv6 does not count the first header, that of IPv4 does.
        let counted = layers.payload - layers.l3 - if layers.ip == IpVersion::V6 { IPV6_LEN } else { 0 };
        let longest = counted + gso_size.min(payload);
        if longest > usize::from(u16::MAX) {
            return Err(SegmentError::SegmentTooLong(longest));
        }
        let segments = payload.div_ceil(gso_size).max(1);
        if segments > MAX_SEGMENTS {
            return Err(SegmentError::TooManySegments(segments));
        }

        let field = layers.l4 + csum_offset;
        let mut pseudo = Sum::new();
        pseudo.add_u16(get16(front, field));
        // Adding the complement subtracts the length of the whole packet.
        pseudo.add(&(!((len - layers.l4) as u32)).to_be_bytes());
        Ok(SegmentHeaders { front, payload, head, layers, gso_size, pseudo, field, done: 0, segments })
    }

    /// Generates the headers of the next segment, with the sum of the pseudo header in the checksum field. Returns the range
    /// of the payload that belongs to the segment.
    fn advance(&mut self) -> Option<Range<usize>> {
        if self.done == self.segments {
            return None;
        }
        let index = self.done;
        self.done += 1;
        let start = index * self.gso_size;
        let part = start..self.payload.min(start + self.gso_size);

        self.write_network(index, part.len());
        let transport_len = fit(self.front.len() - self.layers.l4 + part.len());
        match self.layers.proto {
            PROTO_TCP => self.write_tcp(index),
            _ => put16(&mut self.head, self.layers.l4 + 4, transport_len),
        }
        let mut pseudo = self.pseudo;
        pseudo.add_u16(transport_len);
        put16(&mut self.head, self.field, pseudo.partial());
        Some(part)
    }

    /// Leaves out the next `count` segments, or as many as there are. Returns the length of their payload in bytes.
    fn skip(&mut self, count: usize) -> usize {
        let from = self.done * self.gso_size;
        self.done = self.segments.min(self.done.saturating_add(count));
        self.payload.min(self.done * self.gso_size).saturating_sub(from)
    }

    /// Returns the headers that were generated last.
    fn current(&self) -> &[u8] {
        &self.head[..self.front.len()]
    }

    /// Makes the virtual header of a segment with a partial checksum.
    fn partial(&self) -> Header {
        Header {
            flags: F_NEEDS_CSUM,
            csum_start: fit(self.layers.l4),
            csum_offset: fit(self.field - self.layers.l4),
            ..Header::default()
        }
    }

    /// Computes the sum of the bytes in front of the payload that the transport checksum covers.
    fn sum(&self) -> Sum {
        // The checksum field contains the sum of the pseudo header, so that is included.
        let mut sum = Sum::new();
        sum.add(&self.head[self.layers.l4..self.front.len()]);
        sum
    }

    /// Stores the transport checksum, given the sum of all bytes that it covers.
    fn complete(&mut self, sum: Sum) {
        put16(&mut self.head, self.field, never_zero(sum.finish()));
    }

    /// Writes length, identification and checksum of the IP header. Identifications are incremented, like those of
    /// separate packets (RFC 6864 demands different ones for packets that may be fragmented).
    fn write_network(&mut self, index: usize, payload: usize) {
        let Layers { l3, l4, ip, .. } = self.layers;
        match ip {
            IpVersion::V4 => {
                put16(&mut self.head, l3 + 2, fit(self.front.len() - l3 + payload));
                put16(&mut self.head, l3 + 4, get16(self.front, l3 + 4).wrapping_add(fit(index)));
                put16(&mut self.head, l3 + 10, 0);
                let mut sum = Sum::new();
                sum.add(&self.head[l3..l4]);
                put16(&mut self.head, l3 + 10, sum.finish());
            }
            IpVersion::V6 => {
                put16(&mut self.head, l3 + 4, fit(self.front.len() - l3 - IPV6_LEN + payload));
            }
        }
    }

    /// Writes sequence number and flags of TCP. Only the first segment has CWR (RFC 3168, 6.1.2), only the last one FIN and
    /// PSH.
    fn write_tcp(&mut self, index: usize) {
        let l4 = self.layers.l4;
        let sequence = u32::from(get16(self.front, l4 + 4)) << 16 | u32::from(get16(self.front, l4 + 6));
        let sequence = sequence.wrapping_add((index * self.gso_size) as u32);
        self.head[l4 + 4..l4 + 8].copy_from_slice(&sequence.to_be_bytes());
        let not_first = if index > 0 { CWR } else { 0 };
        let not_last = if index + 1 < self.segments { FIN | PSH } else { 0 };
        self.head[l4 + 13] = self.front[l4 + 13] & !(not_first | not_last);
    }
}

/// Reads a 16-bit number in network byte order. Offsets come from [`Layers`], so they are inside the headers.
fn get16(head: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([head[at], head[at + 1]])
}

/// Writes a 16-bit number in network byte order.
pub(crate) fn put16(head: &mut [u8], at: usize, number: u16) {
    head[at..at + 2].copy_from_slice(&number.to_be_bytes());
}

/// Converts a number that [`SegmentHeaders::new`] has limited: headers by [`MAX_HEADERS`], IP packets by 65535, segments
/// by [`MAX_SEGMENTS`].
fn fit(number: usize) -> u16 {
    debug_assert!(number <= usize::from(u16::MAX), "{number}");
    number as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::{complete, verify};
    use crate::parse::MAX_EXTENSIONS;
    use crate::testing::{Packet, hex, reference_sum};
    use crate::vnet::{GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4};
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// All packets of a frame, with the header of each.
    fn cut(
        header: &Header,
        frame: &[u8],
        checksum: Checksum,
    ) -> Result<Vec<(Header, Vec<u8>)>, SegmentError> {
        let mut segmenter = Segmenter::new(header, frame, checksum)?;
        let mut packets = Vec::new();
        while let Some(segment) = segmenter.next_segment() {
            let packet = [segment.head, segment.payload].concat();
            assert_eq!(packet.len(), segment.frame_len());
            packets.push((segment.header, packet));
        }
        assert_eq!(packets.len(), segmenter.segments());
        Ok(packets)
    }

    fn refusal(header: &Header, frame: &[u8]) -> SegmentError {
        cut(header, frame, Checksum::Complete).unwrap_err()
    }

    fn tcp_flags(packets: &[(Header, Vec<u8>)], l4: usize) -> Vec<u8> {
        packets.iter().map(|(_, packet)| packet[l4 + 13]).collect()
    }

    /// Frames as a Linux tap delivered them with all offloads on, virtio-net header first.
    const LINUX_USO4: &str = "
        01052a001400220006000000 020000000002020000000001 0800 4500004ea2694000401174210a0908010a090802
        9c400007003a2460 303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f
        505152535455565758595a5b5c5d5e5f6061";
    const LINUX_USO6: &str = "
        01053e001400360006000000 020000000002020000000001 86dd 60018296003a1140
        fd090000000000000000000000000001 fd090000000000000000000000000002
        9c400007003afa61 303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f
        505152535455565758595a5b5c5d5e5f6061";
    const LINUX_TSO4: &str = "
        010136005800220010000000 020000000002020000000001 0800 450000d2864e400040068fc30a0908010a090802
        9c410007ff7d7888000003e95018ffc024d90000 00070e151c232a31383f464d545b626970777e858c939aa1
        a8afb6bdc4cbd2d9e0e7eef5fc030a11181f262d343b424950575e656c737a81888f969da4abb2b9c0c7ced5dce3
        eaf1f8ff060d141b222930373e454c535a61686f767d848b9299a0a7aeb5bcc3cad1d8dfe6edf4fb020910171e25
        2c333a41484f565d646b727980878e959ca3aab1b8bfc6cdd4dbe2e9f0f7fe050c131a21282f363d444b52596067
        6e757c838a91989f";
    const LINUX_TSO6: &str = "
        01044a005800360010000000 020000000002020000000001 86dd 6008c74c00780640
        fd090000000000000000000000000001 fd090000000000000000000000000002
        9c420007a779b18a000003e95018ffc0fa940000 00070e151c232a31383f464d545b626970777e858c939aa1
        a8afb6bdc4cbd2d9e0e7eef5fc030a11181f262d343b424950575e656c737a81888f969da4abb2b9c0c7ced5dce3
        eaf1f8ff060d141b222930373e454c535a61686f767d848b9299a0a7aeb5";

    #[test]
    fn frames_of_a_linux_tap_become_valid_packets() {
        for (name, capture, sizes) in [
            ("USO4", LINUX_USO4, &[20, 20, 10][..]),
            ("USO6", LINUX_USO6, &[20, 20, 10]),
            ("TSO4", LINUX_TSO4, &[88, 82]),
            ("TSO6", LINUX_TSO6, &[88, 12]),
        ] {
            let capture = hex(capture);
            let (header, frame) = capture.split_first_chunk().unwrap();
            let header = Header::from_bytes(header).sanitised();
            let packets = cut(&header, frame, Checksum::Complete).unwrap();
            let mut payload: Vec<u8> = Vec::new();
            for ((header, packet), size) in packets.iter().zip(sizes) {
                let layers = verify(packet).unwrap_or_else(|error| panic!("{name}: {error}"));
                assert_eq!(packet.len() - layers.payload, *size, "{name}");
                assert_eq!(*header, Header::default());
                payload.extend(&packet[layers.payload..]);
            }
            assert_eq!(packets.len(), sizes.len(), "{name}");
            assert_eq!(payload, frame[frame.len() - payload.len()..], "{name}");
        }
    }

    #[test]
    fn tcp_flags_go_to_the_segment_they_belong_to() {
        let mut packet = Packet::plain(false, true, vec![5; 250]);
        packet.flags = FIN | PSH | CWR | 0x50;
        let packets = cut(&packet.gso_header(100), &packet.partial(), Checksum::Complete).unwrap();
        assert_eq!(tcp_flags(&packets, packet.l4()), [CWR | 0x50, 0x50, FIN | PSH | 0x50]);
        packet.payload.truncate(100);
        let packets = cut(&packet.gso_header(100), &packet.partial(), Checksum::Complete).unwrap();
        assert_eq!(tcp_flags(&packets, packet.l4()), [FIN | PSH | CWR | 0x50]);
    }

    #[test]
    fn sequence_and_identification_wrap_around() {
        let mut packet = Packet::plain(false, true, vec![5; 30]);
        (packet.sequence, packet.identification) = (u32::MAX - 4, u16::MAX);
        let packets = cut(&packet.gso_header(10), &packet.partial(), Checksum::Complete).unwrap();
        let numbers: Vec<_> = packets.iter().map(|(_, p)| (p[18..20].to_vec(), p[38..42].to_vec())).collect();
        let expected = [
            (vec![0xff, 0xff], vec![0xff, 0xff, 0xff, 0xfb]),
            (vec![0, 0], vec![0, 0, 0, 5]),
            (vec![0, 1], vec![0, 0, 0, 15]),
        ];
        assert_eq!(numbers, expected);
    }

    #[test]
    fn packet_without_payload_stays_one() {
        for (v6, tcp) in [(false, true), (true, true), (false, false), (true, false)] {
            let packet = Packet::plain(v6, tcp, vec![]);
            let packets = cut(&packet.gso_header(1448), &packet.partial(), Checksum::Complete).unwrap();
            assert_eq!(packets.len(), 1);
            verify(&packets[0].1).unwrap();
        }
    }

    #[test]
    fn packet_over_64_kib_is_cut_although_its_length_field_is_zero() {
        for v6 in [false, true] {
            let mut packet = Packet::plain(v6, true, vec![0x5a; 100_000]);
            packet.ports = [0; 4];
            let mut frame = packet.partial();
            let field = if v6 { 14 + 4 } else { 14 + 2 };
            frame[field..field + 2].fill(0);
            let packets = cut(&packet.gso_header(1448), &frame, Checksum::Complete).unwrap();
            assert_eq!(packets.len(), 70);
            for (_, packet) in packets {
                verify(&packet).unwrap();
            }
        }
    }

    #[test]
    fn udp_segments_with_a_checksum_of_zero_are_sent_as_ones() {
        let mut packet = Packet::plain(true, false, vec![0; 4]);
        let checksum = {
            let packets = cut(&packet.gso_header(2), &packet.partial(), Checksum::Complete).unwrap();
            packets[0].1[packet.l4() + 6..][..2].to_vec()
        };
        packet.payload[..2].copy_from_slice(&checksum);
        let packets = cut(&packet.gso_header(2), &packet.partial(), Checksum::Complete).unwrap();
        assert_eq!(packets[0].1[packet.l4() + 6..][..2], [0xff, 0xff]);
        verify(&packets[0].1).unwrap();
    }

    #[test]
    fn header_that_names_other_protocols_is_refused() {
        for (v6, tcp) in [(false, true), (true, true), (false, false), (true, false)] {
            let packet = Packet::plain(v6, tcp, vec![1; 100]);
            let own = packet.gso_header(10);
            for gso_type in [GSO_TCPV4, GSO_TCPV6, GSO_TCPV4 | GSO_ECN, GSO_TCPV6 | GSO_ECN, GSO_UDP_L4] {
                if gso_type & !GSO_ECN != own.gso_type {
                    let header = Header { gso_type, ..own };
                    assert_eq!(refusal(&header, &packet.partial()), SegmentError::Mismatch, "{header:?}");
                }
            }
            for (csum_start, csum_offset) in [(own.csum_start + 2, own.csum_offset), (own.csum_start, 4)] {
                let header = Header { csum_start, csum_offset, ..own };
                assert_eq!(refusal(&header, &packet.partial()), SegmentError::Mismatch, "{header:?}");
            }
        }
    }

    #[test]
    fn only_frames_that_ask_for_it_are_cut() {
        let packet = Packet::plain(false, false, vec![1; 100]);
        assert_eq!(refusal(&packet.header(), &packet.partial()), SegmentError::NotNeeded);
        let ufo = Header { gso_type: GSO_UDP, ..packet.gso_header(10) };
        assert_eq!(refusal(&ufo, &packet.partial()), SegmentError::Fragmentation);
    }

    #[test]
    fn gso_size_zero_is_refused() {
        let packet = Packet::plain(false, true, vec![1; 100]);
        assert_eq!(
            refusal(&packet.gso_header(0), &packet.partial()),
            SegmentError::Header(HeaderError::GsoSize)
        );
    }

    #[test]
    fn cve_2024_11614_csum_start_beyond_packet_is_refused() {
        let packet = Packet::plain(false, true, vec![1; 100]);
        let header = Header { csum_start: 5000, ..packet.gso_header(10) };
        assert!(matches!(refusal(&header, &packet.partial()), SegmentError::Header(_)));
    }

    #[test]
    fn ip_fragments_are_refused() {
        let packet = Packet::plain(false, true, vec![1; 100]);
        let mut frame = packet.partial();
        frame[14 + 6] = 0x20;
        assert_eq!(refusal(&packet.gso_header(10), &frame), SegmentError::Fragment);
    }

    #[test]
    fn headers_longer_than_the_room_for_them_are_refused() {
        let mut packet = Packet::plain(true, true, vec![1; 100]);
        packet.options = (MAX_HEADERS - 14 - 40 - 20) / 16;
        assert!(cut(&packet.gso_header(10), &packet.partial(), Checksum::Complete).is_ok());
        packet.options += 1;
        let refused = SegmentError::HeadersTooLong(packet.payload_at());
        assert_eq!(refusal(&packet.gso_header(10), &packet.partial()), refused);
        const { assert!(MAX_HEADERS > 14 + 4 + 40 + 60 + 8 * MAX_EXTENSIONS) }
    }

    #[test]
    fn segments_longer_than_an_ip_packet_are_refused() {
        let lengths = [(false, 65535 - 20 - 20), (true, 65535 - 20)];
        for (v6, most) in lengths {
            let packet = Packet::plain(v6, true, vec![1; 70_000]);
            let packets = cut(&packet.gso_header(most), &packet.partial(), Checksum::Complete).unwrap();
            for (_, packet) in packets {
                verify(&packet).unwrap();
            }
            let refused = refusal(&packet.gso_header(most + 1), &packet.partial());
            assert_eq!(refused, SegmentError::SegmentTooLong(65536));
        }
    }

    #[test]
    fn number_of_segments_is_bounded() {
        let mut packet = Packet::plain(false, true, vec![1; MAX_SEGMENTS]);
        assert!(cut(&packet.gso_header(1), &packet.partial(), Checksum::Complete).is_ok());
        packet.payload.push(1);
        let refused = SegmentError::TooManySegments(MAX_SEGMENTS + 1);
        assert_eq!(refusal(&packet.gso_header(1), &packet.partial()), refused);
    }

    proptest! {
        #[test]
        fn segments_put_together_are_the_original(packet in Packet::any(4000), gso_size in 2..2000u16) {
            prop_assume!(packet.payload_at() <= MAX_HEADERS);
            let frame = packet.partial();
            let packets = cut(&packet.gso_header(gso_size), &frame, Checksum::Complete).unwrap();
            let size = usize::from(gso_size);
            prop_assert_eq!(packets.len(), packet.payload.len().div_ceil(size).max(1));

            let (l3, l4, payload_at) = (packet.l3(), packet.l4(), packet.payload_at());
            let mut payload = Vec::new();
            for (index, (header, segment)) in packets.iter().enumerate() {
                prop_assert_eq!(*header, Header::default());
                let own = Packet {
                    identification: packet.identification.wrapping_add(index as u16),
                    sequence: packet.sequence.wrapping_add((index * size) as u32),
                    flags: if packet.tcp { segment[l4 + 13] } else { 0 },
                    payload: segment[payload_at..].to_vec(),
                    ..packet.clone()
                };
                // Any header but the transport checksum is what the sender would have built for
                // this part alone.
                let mut expected = own.partial();
                let field = l4 + if packet.tcp { 16 } else { 6 };
                expected[field..field + 2].copy_from_slice(&segment[field..field + 2]);
                prop_assert_eq!(&expected, segment);
                prop_assert_eq!(reference_sum(&[&own.pseudo(), &segment[l4..]].concat()), 0xffff);
                let found = verify(segment).unwrap();
                prop_assert_eq!((found.l3, found.l4), (l3, l4));

                prop_assert!(own.payload.len() == size || index + 1 == packets.len());
                payload.extend(own.payload);
            }
            prop_assert_eq!(&payload, &packet.payload);
            if packet.tcp {
                let flags = tcp_flags(&packets, l4);
                prop_assert_eq!(flags.iter().fold(0, |all, flags| all | flags), packet.flags);
            }
        }

        #[test]
        fn partial_checksums_are_complete_ones_once_completed(
            packet in Packet::any(3000),
            gso_size in 2..1500u16,
        ) {
            prop_assume!(packet.payload_at() <= MAX_HEADERS);
            let (header, frame) = (packet.gso_header(gso_size), packet.partial());
            let partial = cut(&header, &frame, Checksum::Partial).unwrap();
            let whole = cut(&header, &frame, Checksum::Complete).unwrap();
            prop_assert_eq!(partial.len(), whole.len());
            for ((header, mut packet), (_, whole)) in partial.into_iter().zip(whole) {
                prop_assert_eq!(header.check(packet.len()), Ok(()));
                prop_assert!(header.needs_csum() && !header.is_gso());
                complete(&header, &mut packet).unwrap();
                prop_assert_eq!(packet, whole);
            }
        }

        #[test]
        fn truncated_frames_are_refused_or_cut_short(packet in Packet::any(200), at: prop::sample::Index) {
            let frame = packet.partial();
            let frame = &frame[..at.index(frame.len())];
            let cut = cut(&packet.gso_header(100), frame, Checksum::Complete);
            prop_assert_eq!(cut.is_ok(), packet.payload_at() <= frame.len().min(MAX_HEADERS));
        }

        #[test]
        fn any_bytes_and_any_header_do_no_harm(
            frame in vec(any::<u8>(), 0..400),
            header: [u8; Header::LEN],
        ) {
            let _ = cut(&Header::from_bytes(&header), &frame, Checksum::Complete);
        }

        #[test]
        fn any_damage_to_a_frame_or_its_header_does_no_harm(
            packet in Packet::any(300),
            damage in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            gso_size: u16,
            header_damage in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
        ) {
            let mut frame = packet.partial();
            for (at, byte) in damage {
                let at = at.index(packet.payload_at());
                frame[at] = byte;
            }
            let mut header = packet.gso_header(gso_size).to_bytes();
            if let Some((at, byte)) = header_damage {
                header[at.index(Header::LEN)] = byte;
            }
            for checksum in [Checksum::Partial, Checksum::Complete] {
                if let Ok(packets) = cut(&Header::from_bytes(&header), &frame, checksum) {
                    prop_assert!(packets.len() <= MAX_SEGMENTS);
                }
            }
        }
    }
}
