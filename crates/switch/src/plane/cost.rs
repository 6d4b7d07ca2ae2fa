//! Estimated cost of the work that a port causes: a price list, in nanoseconds of a worker's time.
//!
//! Work is charged to the port that *sent* a frame, in whichever worker it is done, and by effort, not by
//! success: a frame that no receiver has buffers for is charged all the same. Workers share their time
//! between ports by it ([`fair`](super::worker)), end bursts by it, and put off frames that are too much at
//! once. Only what its buffers are is a receiver's own affair: those beyond what is usual are [its debt](super::worker).
//! Costs come from a price list and not from a clock: a clock cannot say beforehand what a frame will
//! cost, charges a port for time in which the worker was preempted, and would make the results of a test
//! depend on the machine. The prices are those of a 3 GHz core with the caches warm, rounded; their ratios
//! matter, and being wrong by half moves shares by less than that. If a guest makes them wrong by far more, a
//! worker [measures](super::worker) for a while.

use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::segment::MAX_SEGMENTS;
use ringferry_packet::vnet::{Header, Offloads};

use crate::plane::queues::FrameCost;

/// Taking a packet from a queue, and deciding where it goes.
pub(crate) const FRAME_IN: u64 = 40;
/// Delivering a frame to a queue.
pub(crate) const FRAME_OUT: u64 = 40;
/// Finding that a frame that is flooded does not leave by a port. With the price of a delivery, one in a VLAN of two among a hundred ports cost as much as fifty.
pub(crate) const REFUSAL: u64 = 15;
/// The verdict of a firewall on a frame of a flow that it knows. What the rules take for one that it does not is found by the audit where it is much.
pub(crate) const VERDICT: u64 = 30;
/// Learning an address that another worker has announced.
pub(crate) const LEARN: u64 = 40;
/// Publishing a burst's frames to an output port, and notifying its driver now and then.
const OUTPUT: u64 = 100;
/// Making the headers of one segment.
const SEGMENT: u64 = 80;
/// Each further piece of memory that a frame lies in.
const PIECE: u64 = 10;
/// Reading a descriptor of a chain of several.
const DESCRIPTOR: u64 = 30;
/// Each buffer that a receiver has a frame spread over beyond what is usual. Measured where each lies on a page of its own, at the other end of a large ring:
/// 130 ns.
const BUFFER: u64 = 130;
/// A system call for a frame, from a tap or to it.
const SYSTEM_CALL: u64 = 1_000;
/// Writing the record of a captured frame.
const RECORD: u64 = 50;
/// Bytes that are copied, or summed up, in a nanosecond.
const BYTES: u64 = 8;

/// The price of taking a frame from a port, besides that of delivering it.
#[inline]
pub(crate) fn of_taking(from: FrameCost) -> u64 {
    FRAME_IN + of_call(from)
}

#[inline]
fn of_call(kind: FrameCost) -> u64 {
    match kind {
        FrameCost::SystemCall => SYSTEM_CALL,
        FrameCost::Descriptor => 0,
    }
}

/// The price of capturing so many bytes of a frame. The memory of a capture's ring is seldom in the cache.
#[inline]
pub(crate) const fn of_capture(bytes: u64) -> u64 {
    RECORD + 2 * of_bytes(bytes)
}

/// The price of running a filter of so many instructions on a frame that has so many pieces behind its prefix, which `far_loads` of them look through. Measured
/// with 4095 loads of what lies behind 56 pieces: 5 ns for each piece of each load.
#[inline]
pub(crate) const fn of_filter(instructions: usize, far_loads: usize, pieces: usize) -> u64 {
    instructions as u64 + far_loads as u64 * (2 + 5 * pieces as u64)
}

/// The price of having an output port in a burst at all.
#[inline]
pub(crate) const fn of_output() -> u64 {
    OUTPUT
}

/// Packets that a frame becomes for a receiver that takes no segmentation, at least 1. One that would become too many is refused,
/// which costs nothing more.
#[inline]
pub(crate) fn packets(frame: &Frame) -> u64 {
    packets_of(&frame.header, frame.len.into())
}

#[inline]
fn packets_of(header: &Header, len: u64) -> u64 {
    let packets = match u64::from(header.gso_size) {
        size if header.is_gso() && size > 0 => len.div_ceil(size),
        _ => 1,
    };
    if packets > MAX_SEGMENTS as u64 { 1 } else { packets }
}

/// Returns the price of copying so many bytes, or of summing them up.
#[inline]
pub(crate) const fn of_bytes(bytes: u64) -> u64 {
    bytes / BYTES
}

/// The price of so many descriptors of packets in several, frames or not.
#[inline]
pub(crate) const fn of_further_descriptors(descriptors: usize) -> u64 {
    descriptors as u64 * DESCRIPTOR
}

/// The price of so many buffers of a receiver beyond what is usual, which is the receiver's.
#[inline]
pub(crate) const fn of_unusual_buffers(buffers: usize) -> u64 {
    buffers as u64 * BUFFER
}

/// The price of so many pieces of memory beside one for each frame.
#[inline]
pub(crate) const fn of_further_pieces(pieces: usize) -> u64 {
    pieces as u64 * PIECE
}

/// The price of delivering a frame of `len` bytes, in `pieces` beside its first bytes, to one receiver that takes it as it is.
#[inline]
pub(crate) fn of_plain(len: u64, pieces: usize, to: FrameCost) -> u64 {
    FRAME_OUT + of_call(to) + of_bytes(len) + of_further_pieces(pieces.saturating_sub(1))
}

/// The price of delivering a frame to one receiver that takes only `accepts`.
#[inline]
pub(crate) fn of_delivery(burst: &Burst<'_>, frame: &Frame, accepts: Offloads, to: FrameCost) -> u64 {
    of_pieces(&frame.header, frame.len.into(), burst.rest(frame).len(), accepts, to)
}

/// The price of delivering a frame that lies in one piece, as [`of_delivery`].
#[inline]
pub(crate) fn of_copy(header: &Header, frame: &[u8], accepts: Offloads, to: FrameCost) -> u64 {
    of_pieces(header, frame.len() as u64, 0, accepts, to)
}

#[inline]
fn of_pieces(header: &Header, len: u64, pieces: usize, accepts: Offloads, to: FrameCost) -> u64 {
    let whole = of_plain(len, pieces, to);
    if accepts.accepts(header) {
        return whole;
    }
    let sum = if header.needs_csum() { of_bytes(len) } else { 0 };
    if header.is_gso() { whole + sum + of_segments(packets_of(header, len), to) } else { whole + sum }
}

/// The price of `segments` of a frame besides that of their bytes.
#[inline]
pub(crate) fn of_segments(segments: u64, to: FrameCost) -> u64 {
    segments * (FRAME_OUT + SEGMENT + of_call(to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringferry_memory::ReadSlice;
    use ringferry_packet::vnet::GSO_TCPV4;

    #[test]
    fn a_frame_that_is_cut_costs_as_much_as_its_segments() {
        let bytes = [0; 60_000];
        let mut burst = Burst::new();
        let header = Header { gso_type: GSO_TCPV4, gso_size: 32, flags: 1, ..Header::default() };
        burst.push(header, ReadSlice::from(&bytes[..]));
        let frame = &burst.frames()[0];
        let ring = FrameCost::Descriptor;
        let whole = of_delivery(&burst, frame, Offloads::all(), ring);
        let cut = of_delivery(&burst, frame, Offloads::empty(), ring);
        assert_eq!(packets(frame), 1875);
        assert!(cut > 20 * whole, "{cut} {whole}");
        assert!(of_delivery(&burst, frame, Offloads::all(), FrameCost::SystemCall) >= whole + SYSTEM_CALL);
    }
}
