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

/// Delivers a frame to a receiver that takes only `accepts`, packet by packet, through `deliver`.
///
/// # Errors
/// Why it cannot be made something that the receiver takes. Nothing was delivered.
pub(super) fn deliver(
    burst: &Burst<'_>,
    frame: &Frame,
    accepts: Offloads,
    scratch: &mut Vec<u8>,
    mut deliver: impl FnMut(Header, &[u8], &[ReadSlice<'_>]),
) -> Result<(), DropReason> {
    burst.flatten(frame, scratch);
    let header = frame.header;
    if !header.is_gso() {
        checksum::complete(&header, scratch).map_err(|_| DropReason::RxBadHeader)?;
        deliver(Header::default(), scratch, &[]);
        return Ok(());
    }
    let mode = if accepts.contains(Offloads::CSUM) { Checksum::Partial } else { Checksum::Complete };
    let mut segments = Segmenter::new(&header, scratch, mode).map_err(|_| DropReason::OffloadUnsupported)?;
    while let Some(segment) = segments.next_segment() {
        deliver(segment.header, segment.head, &[ReadSlice::from(segment.payload)]);
    }
    Ok(())
}
