//! The driver interface: one small trait per direction, implemented by each ring.
//!
//! [`TxQueue`](crate::tx::TxQueue) and [`RxQueue`](crate::rx::RxQueue) own the driver from attach to detach
//! and call it from their one thread, per burst: [`TxDriver::encap`] for each packet, [`TxDriver::flush`] and
//! [`TxDriver::completed`] once; [`RxDriver::post`] for each buffer, [`RxDriver::flush`] and
//! [`RxDriver::completed`] once, [`RxDriver::start`] for each packet. A driver only translates segments to
//! descriptors and completions to tokens. A *token* is the driver's number of a packet or buffer that the device has: below the number of
//! entries of the ring, and that of no other until the driver returns it as completed. The number that its ring has for it anyway will do. A
//! driver must check numbers that a device writes before it returns them as tokens; the framework checks tokens against its own table, too.

use ringferry_memory::{ReadSlice, WriteSlice};
use ringferry_packet::vnet::Header;

use crate::limits::{RxLimits, TxLimits};

/// A contiguous piece of a packet or buffer at a device address.
pub use ringferry_memory::Buffer as Segment;

/// The reason for which a ring does not accept a packet or buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No descriptor is free; the caller may reclaim and try again.
    #[error("the ring is full")]
    Full,
    /// The device broke the rules of the ring, which accepts nothing until the queue is reset.
    #[error("the ring is broken; reset the queue")]
    Broken,
    /// The packet can never be accepted: its buffers are not shared with the device, or it requests an
    /// offload that was not negotiated.
    #[error("the packet asks for what the device does not do, or lies where it cannot reach")]
    Unfit,
}

/// A mapped packet, passed to [`TxDriver::encap`].
#[derive(Debug)]
pub struct TxPacket<'a> {
    /// The offloads that the frame needs: checksum, segmentation.
    pub header: &'a Header,
    /// Length of the frame in bytes, the driver's header excluded.
    pub len: usize,
    /// Memory for the driver's header: the first [`TxLimits::header_room`] bytes of the first segment, in
    /// front of the frame.
    pub room: WriteSlice<'a>,
    /// The segments of header room and frame, in order.
    pub segments: &'a [Segment],
}

/// A transmit ring of one device, owned by a [`TxQueue`](crate::tx::TxQueue).
pub trait TxDriver {
    /// Returns the limits of the ring and its device. Called once, when the queue is attached, which checks
    /// them.
    fn limits(&self) -> TxLimits;

    /// Returns the number of free entries of the ring.
    fn room(&self) -> usize;

    /// Returns the number of entries that a packet of `segments` segments takes.
    fn cost(&self, segments: usize) -> usize {
        segments
    }

    /// Writes the descriptors of a packet, which the device need not see before [`TxDriver::flush`], and returns the packet's token.
    ///
    /// # Errors
    /// [`Refused`]; nothing was written then.
    fn encap(&mut self, packet: &TxPacket<'_>) -> Result<u16, Refused>;

    /// Publishes the written descriptors to the device. Returns true if it wants its doorbell rung.
    fn flush(&mut self) -> bool;

    /// Returns true if the device broke the rules of the ring, which then neither accepts nor completes
    /// packets until it is reset.
    fn is_broken(&self) -> bool {
        false
    }

    /// Passes the tokens of up to `most` packets that the device has completed to `each`, in the device's order, and returns their number.
    fn completed(&mut self, most: usize, each: impl FnMut(u16)) -> usize;
}

/// The completion of a receive buffer: the device has filled it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The token that [`RxDriver::post`] returned for the buffer.
    pub token: u16,
    /// Number of bytes that the device reports to have written; not checked against the buffer yet.
    pub len: u32,
}

/// The contents of the driver's header in front of a received packet, as the device wrote them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// The offloads that the frame still needs or that the device has verified.
    pub header: Header,
    /// Number of buffers that the packet occupies, this one included; not checked: it may be 0 or too
    /// large.
    pub buffers: u16,
    /// The flow hash, if the device computed one.
    pub hash: Option<u32>,
}

/// A receive ring of one device, owned by an [`RxQueue`](crate::rx::RxQueue).
pub trait RxDriver {
    /// Returns the requirements of the ring and its device. Called once, when the queue is attached, which
    /// checks them.
    fn limits(&self) -> RxLimits;

    /// Returns the number of free entries of the ring.
    fn room(&self) -> usize;

    /// Writes the descriptors of an empty buffer: one segment or, in [`RxMode::Whole`](crate::limits::RxMode),
    /// several. The device need not see it before [`RxDriver::flush`]. Returns the buffer's token.
    ///
    /// # Errors
    /// [`Refused`]; the ring has not accepted the buffer then.
    fn post(&mut self, segments: &[Segment]) -> Result<u16, Refused>;

    /// Publishes the posted buffers to the device. Returns true if it wants its doorbell rung.
    fn flush(&mut self) -> bool;

    /// Passes up to `most` buffers that the device has filled to `each`, in the device's order, and returns their number.
    fn completed(&mut self, most: usize, each: impl FnMut(Completion)) -> usize;

    /// Parses the driver's header in `front`, the first [`RxLimits::header_len`] bytes of a packet's first
    /// buffer. Called once per packet, in the order in which the first buffers were
    /// [completed](RxDriver::completed), so that rings which keep this information beside the buffers can
    /// find it.
    fn start(&mut self, front: ReadSlice<'_>) -> Start;
}
