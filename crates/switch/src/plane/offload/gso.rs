//! Generic segmentation offload (GSO): offloads that a receiver lacks are done in software on the way to it.
//! Checksums are finished, and oversized frames are segmented.
//!
//! [`finish`] and [`segments`] return the packets to the port, which delivers them; each borrows from the frame and from
//! storage of the caller.
//!
//! This is the slow path, but not a second copy: only headers are copied and changed. The payload goes to the
//! receiver from where its sender put it, in slices, and for a checksum is summed up there first. A sender
//! that changes it meanwhile makes its own packet's checksum wrong.

use ringferry_memory::ReadSlice;
use ringferry_packet::checksum;
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::gro::behind;
use ringferry_packet::segment::{Checksum, MAX_HEADERS, PieceSegmenter};
use ringferry_packet::vnet::{Header, Offloads};
use smallvec::SmallVec;

use crate::counters::DropReason;

/// The part of a frame's segments that is delivered in one sitting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sitting {
    /// Number of segments that were delivered before.
    pub(crate) from: usize,
    /// Upper bound on the segments delivered now.
    pub(crate) most: usize,
}

impl Sitting {
    /// The whole frame in one sitting.
    pub(crate) const WHOLE: Sitting = Sitting { from: 0, most: usize::MAX };
}

/// One packet for the receiver: its bytes are `first`, then `rest`.
#[derive(Debug)]
pub(crate) struct Packet<'a> {
    pub(crate) header: Header,
    pub(crate) first: &'a [u8],
    pub(crate) rest: &'a [ReadSlice<'a>],
}

/// Finishes the checksum of a frame that need not be segmented, for a receiver that takes no unfinished ones. `scratch`
/// and `behind_head` are storage: for the bytes that are copied, and for the slices behind them where those bytes are more
/// than the prefix.
///
/// # Errors
/// The checksum field lies outside the frame.
#[inline(always)]
pub(crate) fn finish<'s, 'p: 's>(
    burst: &'p Burst<'_>,
    frame: &'p Frame,
    scratch: &'s mut Vec<u8>,
    behind_head: &'s mut SmallVec<[ReadSlice<'p>; 8]>,
) -> Result<Packet<'s>, DropReason> {
    let (header, rest) = (&frame.header, burst.rest(frame));
    if !header.needs_csum() {
        // The sender's checksum was verified, which this receiver has no flag for.
        return Ok(Packet { header: Header::default(), first: frame.prefix(), rest });
    }
    let bad = |_| DropReason::RxBadHeader;
    scratch.clear();
    // Every segment but those of TCP over IPv6 has its checksum field in the prefix.
    let field = usize::from(header.csum_start) + usize::from(header.csum_offset) + 2;
    let rest: &[_] = if field <= frame.prefix().len() {
        scratch.extend_from_slice(frame.prefix());
        checksum::complete_head(header, scratch, rest.iter().copied()).map_err(bad)?;
        rest
    } else if field <= MAX_HEADERS {
        scratch.resize(field, 0);
        let head = beginning(burst, frame, scratch);
        behind_head.extend(behind(whole(burst, frame), head.len()));
        checksum::complete_head(header, head, behind_head.iter().copied()).map_err(bad)?;
        behind_head
    } else {
        burst.flatten(frame, scratch);
        checksum::complete(header, scratch).map_err(bad)?;
        &[]
    };
    Ok(Packet { header: Header::default(), first: scratch, rest })
}

/// The segments of one frame that one sitting delivers, returned one by one.
#[derive(Debug)]
pub(crate) struct Segments<'p, I> {
    segments: PieceSegmenter<'p, 'p, I>,
    /// Upper bound on the segments that this sitting still delivers.
    most: usize,
    left: usize,
}

/// Begins to segment a frame for a receiver that takes only `accepts`. `head` is storage for a copy of its headers.
///
/// # Errors
/// The frame cannot be segmented.
// Inlined, because the segmenter has half a KiB and would be moved once more.
#[inline(always)]
pub(crate) fn segments<'p>(
    burst: &'p Burst<'_>,
    frame: &'p Frame,
    accepts: Offloads,
    sitting: Sitting,
    head: &'p mut [u8; MAX_HEADERS],
) -> Result<Segments<'p, impl Iterator<Item = ReadSlice<'p>>>, DropReason> {
    let mode = if accepts.contains(Offloads::CSUM) { Checksum::Partial } else { Checksum::Complete };
    let (head, pieces) = (beginning(burst, frame, head), whole(burst, frame));
    let segments = PieceSegmenter::new(&frame.header, head, pieces, frame.len as usize, mode);
    let Ok(mut segments) = segments else { return Err(DropReason::OffloadUnsupported) };
    segments.skip(sitting.from);
    let left = segments.segments().saturating_sub(sitting.from);
    Ok(Segments { segments, most: sitting.most, left })
}

impl<'p, I: Iterator<Item = ReadSlice<'p>>> Segments<'p, I> {
    /// Returns the next segment of this sitting. It must be used before the next call.
    #[inline]
    pub(crate) fn next_packet(&mut self) -> Option<Packet<'_>> {
        self.most = self.most.checked_sub(1)?;
        let segment = self.segments.next_segment()?;
        self.left -= 1;
        Some(Packet { header: segment.header, first: segment.head, rest: segment.payload })
    }

    /// Returns how many segments of the frame are left, those of later sittings among them.
    #[inline]
    pub(crate) fn left(&self) -> usize {
        self.left
    }
}

/// Returns a frame as its pieces: the private copy of its first bytes, then slices.
pub(crate) fn whole<'b>(
    burst: &'b Burst<'_>,
    frame: &'b Frame,
) -> impl Iterator<Item = ReadSlice<'b>> + Clone {
    std::iter::once(ReadSlice::from(frame.prefix())).chain(burst.rest(frame).iter().copied())
}

/// Copies the beginning of a frame, as far as `head` has room. Bytes of which the burst has a private copy
/// come from that copy.
pub(crate) fn beginning<'h>(burst: &Burst<'_>, frame: &Frame, head: &'h mut [u8]) -> &'h mut [u8] {
    let mut done = 0;
    for piece in whole(burst, frame) {
        done += piece.copy_to(&mut head[done..]);
        if done == head.len() {
            break;
        }
    }
    &mut head[..done]
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::plane::offload::testing::{any_packet, burst, flat, on_the_wire, receivers};
    use ringferry_packet::testing::{Packet, Sent};

    fn delivered(sent: &Sent, lens: &[usize], accepts: Offloads) -> Result<Vec<Sent>, DropReason> {
        let frames = [sent.clone()];
        let burst = burst(&frames, lens);
        let (out, left) = sat(&burst, accepts, Sitting::WHOLE)?;
        assert_eq!(left, 0);
        Ok(out)
    }

    /// Returns the packets of the frame of a burst in one sitting, and how many are left.
    fn sat(burst: &Burst<'_>, accepts: Offloads, sitting: Sitting) -> Result<(Vec<Sent>, usize), DropReason> {
        let frame = &burst.frames()[0];
        let flat = |packet: super::Packet<'_>| flat(packet.header, packet.first, packet.rest);
        if !frame.header.is_gso() {
            let (mut scratch, mut behind_head) = (Vec::new(), SmallVec::new());
            let packet = finish(burst, frame, &mut scratch, &mut behind_head)?;
            return Ok((vec![flat(packet)], 0));
        }
        let (mut out, mut head) = (Vec::new(), [0; MAX_HEADERS]);
        let mut segments = segments(burst, frame, accepts, sitting, &mut head)?;
        while let Some(packet) = segments.next_packet() {
            out.push(flat(packet));
        }
        Ok((out, segments.left()))
    }

    #[test]
    fn cutting_ends_where_it_is_told_to_and_goes_on_there() {
        let sent = Packet::plain(false, true, vec![3; 1000]).sent(100);
        let frames = [sent.clone()];
        let burst = burst(&frames, &[300]);
        let whole = delivered(&sent, &[300], Offloads::empty()).unwrap();
        let mut parts = Vec::new();
        for (from, most) in [(0, 4), (4, 4), (8, 4)] {
            let (part, left) = sat(&burst, Offloads::empty(), Sitting { from, most }).unwrap();
            assert_eq!(left, 10_usize.saturating_sub(from + most));
            parts.extend(part);
        }
        assert_eq!(parts, whole);
        let (frame, mut head) = (&burst.frames()[0], [0; MAX_HEADERS]);
        let mut segments = segments(&burst, frame, Offloads::empty(), Sitting::WHOLE, &mut head).unwrap();
        for left in (7..10).rev() {
            assert!(segments.next_packet().is_some());
            assert_eq!(segments.left(), left);
        }
    }

    /// VIRTIO 1.4, 5.1.6.4.1: without GUEST_CSUM the flags are 0. Nothing else has to change.
    #[test]
    fn a_checksum_that_was_checked_is_only_said_no_more() {
        let (_, frame) = Packet::plain(false, true, vec![3; 500]).complete();
        let valid = (Header { flags: 2, ..Header::default() }, frame.clone());
        assert_eq!(delivered(&valid, &[100], Offloads::empty()), Ok(vec![(Header::default(), frame)]));
    }

    #[test]
    fn a_checksum_anywhere_in_the_frame_is_finished() {
        let packet = Packet::plain(false, false, vec![3; 900]);
        for csum_offset in [6, 50, 51, 200, 300, 905] {
            let (header, frame) = packet.sent(0);
            let sent = (Header { csum_offset, ..header }, frame.clone());
            let mut expected = frame;
            checksum::complete(&sent.0, &mut expected).unwrap();
            for lens in [&[][..], &[60], &[10, 60, 131]] {
                let got = delivered(&sent, lens, Offloads::empty());
                assert_eq!(got, Ok(vec![(Header::default(), expected.clone())]), "{csum_offset}");
            }
        }
        let (header, frame) = packet.sent(0);
        let beyond = (Header { csum_offset: frame.len() as u16 - header.csum_start - 1, ..header }, frame);
        assert_eq!(delivered(&beyond, &[], Offloads::empty()), Err(DropReason::RxBadHeader));
    }

    #[test]
    fn a_frame_whose_header_names_another_protocol_is_refused() {
        let (header, frame) = Packet::plain(false, true, vec![3; 500]).sent(100);
        let lie = (Header { gso_type: 5, ..header }, frame);
        assert_eq!(delivered(&lie, &[], Offloads::CSUM), Err(DropReason::OffloadUnsupported));
    }

    proptest! {
        /// Sends any frame to any receiver that does not take it: the packets that arrive are those that a
        /// network card would have sent, with headers that the receiver takes, no more packets than that, and
        /// only the work left to do that the receiver takes.
        #[test]
        fn a_receiver_gets_what_a_network_card_would_have_sent(
            packet in any_packet(5000),
            gso_size in prop_oneof![Just(0u16), 20..2000u16],
            lens in vec(1..900usize, 0..6),
            accepts in receivers(),
        ) {
            let sent = packet.sent(gso_size);
            if accepts.accepts(&sent.0) {
                return Ok(());
            }
            let got = delivered(&sent, &lens, accepts).unwrap();
            let wire: Vec<Vec<u8>> = got.iter().flat_map(on_the_wire).collect();
            prop_assert!(wire == on_the_wire(&sent));
            prop_assert_eq!(got.len(), wire.len());
            for (header, frame) in &got {
                prop_assert!(accepts.accepts(header) && header.check(frame.len()).is_ok());
                prop_assert_eq!(header.needs_csum(), accepts.contains(Offloads::CSUM));
            }
        }
    }
}
