//! Segmentation of a frame in pieces of another process's memory, without copying payload.

use ringferry_memory::ReadSlice;
use smallvec::SmallVec;

use super::{Checksum, SegmentError, SegmentHeaders};
use crate::gro::behind;
use crate::vnet::Header;

/// Number of pieces per segment that need no allocation. At the usual MTU and with pieces of at least a page, a segment has
/// two at most.
const PIECES: usize = 4;

/// One segment: the frame to deliver is `head` followed by `payload`, with `header` in front.
#[derive(Clone, Copy, Debug)]
pub struct PieceSegment<'a, 'm> {
    /// Ethernet, IP and transport header, borrowed from the segmenter.
    pub head: &'a [u8],
    /// The segment's part of the payload, as slices of the original frame.
    pub payload: &'a [ReadSlice<'m>],
    /// Virtual header of the segment, as in [`Segment`](super::Segment).
    pub header: Header,
}

/// Segments one frame in pieces, by calls of [`next_segment`](Self::next_segment) until it returns `None`.
#[derive(Clone, Debug)]
pub struct PieceSegmenter<'f, 'm, I> {
    heads: SegmentHeaders<'f>,
    rest: I,
    piece: ReadSlice<'m>,
    parts: SmallVec<[ReadSlice<'m>; PIECES]>,
    checksum: Checksum,
}

impl<'f, 'm> PieceSegmenter<'f, 'm, std::iter::Empty<ReadSlice<'m>>> {
    /// Prepares to segment a frame of `len` bytes in `pieces` as `header` requests. `prefix` is a private copy of its
    /// beginning that contains all headers; the headers in the pieces are not read.
    ///
    /// The notes at [`Segmenter::new`](super::Segmenter::new) apply here, too. If the owner of the pieces writes to them
    /// meanwhile, segments have wrong checksums.
    ///
    /// # Errors
    /// [`SegmentError`], if the frame cannot or need not be segmented.
    pub fn new<P>(
        header: &Header,
        prefix: &'f [u8],
        pieces: P,
        len: usize,
        checksum: Checksum,
    ) -> Result<PieceSegmenter<'f, 'm, impl Iterator<Item = ReadSlice<'m>>>, SegmentError>
    where
        P: IntoIterator<Item = ReadSlice<'m>>,
    {
        let heads = SegmentHeaders::new(header, prefix, len)?;
        let rest = behind(pieces, heads.front.len());
        Ok(PieceSegmenter { heads, rest, piece: ReadSlice::EMPTY, parts: SmallVec::new(), checksum })
    }
}

impl<'m, I: Iterator<Item = ReadSlice<'m>>> PieceSegmenter<'_, 'm, I> {
    /// Returns the total number of segments, between 1 and [`MAX_SEGMENTS`](super::MAX_SEGMENTS).
    #[must_use]
    pub const fn segments(&self) -> usize {
        self.heads.segments
    }

    /// Leaves out the next `count` segments, or as many as there are: a frame that is segmented in several sittings goes on
    /// where it was left. Costs a step for each piece of the frame, and nothing for a segment.
    pub fn skip(&mut self, count: usize) {
        let missing = self.heads.skip(count);
        self.consume(missing, |_| {});
    }

    /// Returns the next segment, in order. It borrows the headers from the segmenter, so it must be used before the next
    /// call.
    pub fn next_segment(&mut self) -> Option<PieceSegment<'_, 'm>> {
        let missing = self.heads.advance()?.len();
        let mut parts = std::mem::take(&mut self.parts);
        parts.clear();
        self.consume(missing, |part| parts.push(part));
        self.parts = parts;
        let header = match self.checksum {
            Checksum::Partial => self.heads.partial(),
            Checksum::Complete => {
                let mut sum = self.heads.sum();
                self.parts.iter().for_each(|part| sum.add_slice(part));
                self.heads.complete(sum);
                Header::default()
            }
        };
        Some(PieceSegment { head: self.heads.current(), payload: &self.parts, header })
    }

    /// Hands the next `missing` bytes of the payload to `take`, part by part.
    #[inline]
    fn consume(&mut self, mut missing: usize, mut take: impl FnMut(ReadSlice<'m>)) {
        while missing > 0 {
            if self.piece.is_empty() {
                let Some(piece) = self.rest.next() else { break };
                self.piece = piece;
            }
            let part = self.piece.first(missing);
            self.piece = self.piece.skip(part.len());
            missing -= part.len();
            take(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::{MAX_HEADERS, Segmenter};
    use crate::testing::Packet;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// The frame in pieces of these lengths, and one more.
    fn pieces<'f>(mut frame: &'f [u8], lens: &[usize]) -> Vec<ReadSlice<'f>> {
        let mut pieces = Vec::new();
        for len in lens {
            let (piece, rest) = frame.split_at((*len).min(frame.len()));
            pieces.push(ReadSlice::from(piece));
            frame = rest;
        }
        pieces.push(ReadSlice::from(frame));
        pieces
    }

    #[test]
    fn payload_is_not_copied() {
        let packet = Packet::plain(false, true, vec![1; 3000]);
        let (header, frame) = (packet.gso_header(1000), packet.partial());
        let lens = [packet.payload_at() + 500, 1000];
        let mut segments = PieceSegmenter::new(
            &header,
            &frame[..60],
            pieces(&frame, &lens),
            frame.len(),
            Checksum::Complete,
        )
        .unwrap();
        let mut parts = Vec::new();
        while let Some(segment) = segments.next_segment() {
            parts.push(segment.payload.iter().map(ReadSlice::len).collect::<Vec<_>>());
        }
        assert_eq!(
            parts,
            [[500, 500], [500, 500], [1000, 0]]
                .map(|part| { part.into_iter().filter(|len| *len > 0).collect::<Vec<_>>() })
        );
    }

    proptest! {
        #[test]
        fn segments_that_are_left_out_change_nothing_about_the_others(
            packet in Packet::any(4000),
            gso_size in 20..2000u16,
            lens in vec(0..900usize, 0..6),
            left_out in 0..80usize,
        ) {
            let (header, frame) = (packet.gso_header(gso_size), packet.partial());
            let prefix = &frame[..frame.len().min(MAX_HEADERS)];
            let new = || {
                PieceSegmenter::new(&header, prefix, pieces(&frame, &lens), frame.len(), Checksum::Complete)
            };
            let (Ok(mut all), Ok(mut some)) = (new(), new()) else { return Ok(()) };
            for _ in 0..left_out {
                all.next_segment();
            }
            some.skip(left_out);
            loop {
                let (all, some) = (all.next_segment(), some.next_segment());
                prop_assert_eq!(all.is_some(), some.is_some());
                let (Some(all), Some(some)) = (all, some) else { break };
                prop_assert_eq!((all.header, all.head), (some.header, some.head));
                let payload = |segment: &PieceSegment<'_, '_>| {
                    let mut bytes = Vec::new();
                    for piece in segment.payload {
                        let at = bytes.len();
                        bytes.resize(at + piece.len(), 0);
                        piece.copy_to(&mut bytes[at..]);
                    }
                    bytes
                };
                prop_assert_eq!(payload(&all), payload(&some));
            }
        }

        #[test]
        fn segments_equal_those_of_a_frame_in_one_slice(
            packet in Packet::any(4000),
            gso_size in 20..2000u16,
            lens in vec(0..900usize, 0..6),
            partial: bool,
        ) {
            let (header, frame) = (packet.gso_header(gso_size), packet.partial());
            let checksum = if partial { Checksum::Partial } else { Checksum::Complete };
            let prefix = &frame[..frame.len().min(MAX_HEADERS)];
            let scattered =
                PieceSegmenter::new(&header, prefix, pieces(&frame, &lens), frame.len(), checksum);
            match (scattered, Segmenter::new(&header, &frame, checksum)) {
                (Ok(mut scattered), Ok(mut whole)) => {
                    prop_assert_eq!(scattered.segments(), whole.segments());
                    while let Some(segment) = whole.next_segment() {
                        let other = scattered.next_segment().unwrap();
                        let mut payload = vec![0; other.payload.iter().map(ReadSlice::len).sum()];
                        let mut at = 0;
                        for piece in other.payload {
                            at += piece.copy_to(&mut payload[at..]);
                        }
                        prop_assert_eq!((other.header, other.head), (segment.header, segment.head));
                        prop_assert!(payload == segment.payload);
                    }
                    prop_assert!(scattered.next_segment().is_none());
                }
                // Of headers that are too long, the prefix does not have all.
                (Err(_), Err(SegmentError::HeadersTooLong(_))) => {}
                (Err(error), Err(expected)) => prop_assert_eq!(error, expected),
                (scattered, whole) => {
                    prop_assert!(false, "{:?} {:?}", scattered.err(), whole.err());
                }
            }
        }
    }
}
