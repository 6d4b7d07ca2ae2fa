//! Offloads that a receiver lacks, done in software on the way to it.
//!
//! The slow path: the frame is copied once into private memory, where its checksum is finished and,
//! if it must be cut, its headers are rewritten per segment. Frames that the receiver takes as they
//! are never come here.

use ringferry_memory::ReadSlice;
use ringferry_packet::checksum;
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::segment::{Checksum, Segmenter};
use ringferry_packet::vnet::{Header, Offloads};

use crate::counters::DropReason;

/// Delivers a frame to a receiver that takes only `accepts`, through `deliver`; returns how many
/// packets and bytes that made. What could not be delivered is reported to `dropped`, packet by packet.
pub(super) fn deliver(
    burst: &Burst<'_>,
    frame: &Frame,
    accepts: Offloads,
    scratch: &mut Vec<u8>,
    mut deliver: impl FnMut(Header, &[u8], &[ReadSlice<'_>]) -> Result<(), DropReason>,
    mut dropped: impl FnMut(DropReason),
) -> (u64, u64) {
    let mut sent = (0, 0);
    let mut one = |header: Header, first: &[u8], rest: &[ReadSlice<'_>]| {
        let len = first.len() + rest.iter().map(ReadSlice::len).sum::<usize>();
        match deliver(header, first, rest) {
            Ok(()) => sent = (sent.0 + 1, sent.1 + len as u64),
            Err(reason) => dropped(reason),
        }
    };
    burst.flatten(frame, scratch);
    let header = frame.header;
    if !header.is_gso() {
        match checksum::complete(&header, scratch) {
            Ok(()) => one(Header::default(), scratch, &[]),
            Err(_) => dropped(DropReason::RxBadHeader),
        }
        return sent;
    }
    let mode = if accepts.contains(Offloads::CSUM) { Checksum::Partial } else { Checksum::Complete };
    match Segmenter::new(&header, scratch, mode) {
        Ok(mut segments) => {
            while let Some(segment) = segments.next_segment() {
                one(segment.header, segment.head, &[ReadSlice::from(segment.payload)]);
            }
        }
        Err(_) => dropped(DropReason::OffloadUnsupported),
    }
    sent
}
