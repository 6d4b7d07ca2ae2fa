//! Generic segmentation offload (GSO): offloads that a receiver lacks are done in software on the way to it.
//! Checksums are finished, and oversized frames are segmented.
//!
//! This is the slow path, but not a second copy: only headers are copied and changed. The payload goes to the
//! receiver from where its sender put it, in slices, and for a checksum is summed up there first. A sender
//! that changes it meanwhile makes its own packet's checksum wrong.

use std::ops::ControlFlow;

use ringferry_memory::ReadSlice;
use ringferry_packet::checksum;
use ringferry_packet::frame::{Burst, Frame, PREFIX};
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

/// Delivers a frame to a receiver that takes only `accepts`, packet by packet, through `deliver`, until that
/// breaks off: if a packet found no place, later ones would find none either. Returns how many packets are
/// left, those that `sitting` excludes among them, and not the one at which it broke off.
///
/// # Errors
/// The frame cannot be turned into packets that the receiver takes; nothing was delivered.
pub(crate) fn deliver(
    burst: &Burst<'_>,
    frame: &Frame,
    accepts: Offloads,
    sitting: Sitting,
    scratch: &mut Vec<u8>,
    mut deliver: impl FnMut(Header, &[u8], &[ReadSlice<'_>]) -> ControlFlow<()>,
) -> Result<usize, DropReason> {
    let header = frame.header;
    if header.is_gso() {
        return cut(burst, frame, accepts, sitting, deliver);
    }
    if !header.needs_csum() {
        // The sender's checksum was verified, which this receiver has no flag for.
        let _ = deliver(Header::default(), frame.prefix(), burst.rest(frame));
        return Ok(0);
    }
    let rest = burst.rest(frame);
    let bad = |_| DropReason::RxBadHeader;
    // Every segment but those of TCP over IPv6 has its checksum field in the prefix.
    let field = usize::from(header.csum_start) + usize::from(header.csum_offset) + 2;
    if field <= frame.prefix().len() {
        let mut first = [0; PREFIX];
        let first = &mut first[..frame.prefix().len()];
        first.copy_from_slice(frame.prefix());
        checksum::complete_head(&header, first, rest.iter().copied()).map_err(bad)?;
        let _ = deliver(Header::default(), first, rest);
    } else if field <= MAX_HEADERS {
        let mut room = [0; MAX_HEADERS];
        let first = beginning(burst, frame, &mut room[..field]);
        let rest: SmallVec<[_; 8]> = behind(whole(burst, frame), first.len()).collect();
        checksum::complete_head(&header, first, rest.iter().copied()).map_err(bad)?;
        let _ = deliver(Header::default(), first, &rest);
    } else {
        burst.flatten(frame, scratch);
        checksum::complete(&header, scratch).map_err(bad)?;
        let _ = deliver(Header::default(), scratch, &[]);
    }
    Ok(0)
}

/// Segments a frame and delivers the segments.
fn cut(
    burst: &Burst<'_>,
    frame: &Frame,
    accepts: Offloads,
    sitting: Sitting,
    mut deliver: impl FnMut(Header, &[u8], &[ReadSlice<'_>]) -> ControlFlow<()>,
) -> Result<usize, DropReason> {
    let mode = if accepts.contains(Offloads::CSUM) { Checksum::Partial } else { Checksum::Complete };
    let mut head = [0; MAX_HEADERS];
    let head = beginning(burst, frame, &mut head);
    let pieces = whole(burst, frame);
    let mut segments = PieceSegmenter::new(&frame.header, head, pieces, frame.len as usize, mode)
        .map_err(|_| DropReason::OffloadUnsupported)?;
    segments.skip(sitting.from);
    let mut left = segments.segments().saturating_sub(sitting.from);
    for _ in 0..sitting.most {
        let Some(segment) = segments.next_segment() else { break };
        left -= 1;
        if deliver(segment.header, segment.head, segment.payload).is_break() {
            break;
        }
    }
    Ok(left)
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
        let mut out = Vec::new();
        let put = |header, first: &[u8], rest: &[ReadSlice<'_>]| {
            out.push(flat(header, first, rest));
            ControlFlow::Continue(())
        };
        let left = deliver(&burst, &burst.frames()[0], accepts, Sitting::WHOLE, &mut Vec::new(), put)?;
        assert_eq!(left, 0);
        Ok(out)
    }

    #[test]
    fn cutting_ends_where_it_is_told_to_and_goes_on_there() {
        let sent = Packet::plain(false, true, vec![3; 1000]).sent(100);
        let frames = [sent.clone()];
        let burst = burst(&frames, &[300]);
        let frame = &burst.frames()[0];
        let whole = delivered(&sent, &[300], Offloads::empty()).unwrap();
        let mut parts = Vec::new();
        for (from, most) in [(0, 4), (4, 4), (8, 4)] {
            let put = |header, first: &[u8], rest: &[ReadSlice<'_>]| {
                parts.push(flat(header, first, rest));
                ControlFlow::Continue(())
            };
            let sitting = Sitting { from, most };
            let left = deliver(&burst, frame, Offloads::empty(), sitting, &mut Vec::new(), put);
            assert_eq!(left, Ok(10_usize.saturating_sub(from + most)));
        }
        assert_eq!(parts, whole);
        let mut count = 0;
        let put = |_, _: &[u8], _: &[ReadSlice<'_>]| {
            count += 1;
            if count == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let left = deliver(&burst, frame, Offloads::empty(), Sitting::WHOLE, &mut Vec::new(), put);
        assert_eq!((left, count), (Ok(7), 3));
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
