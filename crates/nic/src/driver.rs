//! What a driver supplies: one small trait per direction.
//!
//! A driver knows its ring and nothing else: how a packet's segments become descriptors, how the device is shown
//! them, and what came back. Packets, buffers, mapping, doorbells, reclaim, refill and statistics are the
//! framework's ([`TxQueue`](crate::tx::TxQueue), [`RxQueue`](crate::rx::RxQueue)). The framework names packets
//! and buffers by *tokens*, which the driver hands back as it was given them; what a device writes never
//! becomes a token unchecked.

use ringferry_memory::{ReadSlice, WriteSlice};
use ringferry_packet::vnet::Header;

use crate::limits::{RxLimits, TxLimits};

/// A piece of a packet, as the device sees it.
pub use ringferry_memory::Buffer as Segment;

/// Why a ring does not take something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No descriptor is free: reclaim, and try again.
    #[error("the ring is full")]
    Full,
    /// The device broke the rules: nothing will be taken until the queue is reset.
    #[error("the ring is broken; reset the queue")]
    Broken,
    /// This packet can never be taken: its buffers are not shared with the device, or it asks for an offload that
    /// was not agreed on.
    #[error("the packet asks for what the device does not do, or lies where it cannot reach")]
    Unfit,
}

/// A packet on its way into the ring.
#[derive(Debug)]
pub struct TxPacket<'a> {
    /// What is left to be done with the frame.
    pub header: &'a Header,
    /// Bytes of the frame, the driver's header excluded.
    pub len: usize,
    /// Where the driver's header goes: [`TxLimits::header_room`] bytes in front of the frame, which the
    /// first segment begins with.
    pub room: WriteSlice<'a>,
    /// Header room and frame, in order.
    pub segments: &'a [Segment],
}

/// A transmit ring.
pub trait TxDriver {
    /// What the ring and its device take. Asked once, when the queue is attached, and checked then.
    fn limits(&self) -> TxLimits;

    /// Free entries of the ring.
    fn room(&self) -> usize;

    /// Entries that a packet of so many segments takes.
    fn cost(&self, segments: usize) -> usize {
        segments
    }

    /// Writes a packet's descriptors. The device need not see them before [`TxDriver::flush`].
    ///
    /// # Errors
    /// Nothing was written.
    fn encap(&mut self, packet: &TxPacket<'_>, token: u16) -> Result<(), Refused>;

    /// Shows the device what was written; true when it wants its doorbell rung.
    fn flush(&mut self) -> bool;

    /// Whether the device broke the rules of the ring, which then takes and gives nothing until it is reset.
    fn is_broken(&self) -> bool {
        false
    }

    /// The token of a packet that the device is done with, oldest first where the device keeps order.
    fn completed(&mut self) -> Option<u16>;
}

/// A buffer that the device has filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// What the buffer was posted with.
    pub token: u16,
    /// Bytes the device says it wrote. It may lie.
    pub len: u32,
}

/// What the front of a packet's first buffer says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// What is left to be done with the frame.
    pub header: Header,
    /// Buffers that the packet lies in, this one included. A device may say 0 or too many.
    pub buffers: u16,
    /// The hash of its flow, if the device computed one.
    pub hash: Option<u32>,
}

/// A receive ring.
pub trait RxDriver {
    /// What the ring and its device need. Asked once, when the queue is attached, and checked then.
    fn limits(&self) -> RxLimits;

    /// Free entries of the ring.
    fn room(&self) -> usize;

    /// Gives the device a buffer of one segment or, where [`RxLimits::mode`] says so, more. The device need not
    /// see it before [`RxDriver::flush`].
    ///
    /// # Errors
    /// The ring has not taken it.
    fn post(&mut self, segments: &[Segment], token: u16) -> Result<(), Refused>;

    /// Shows the device what was posted; true when it wants its doorbell rung.
    fn flush(&mut self) -> bool;

    /// The next buffer that the device has filled.
    fn completed(&mut self) -> Option<Completion>;

    /// Says how a packet begins. `front` is the driver's header, the first [`RxLimits::header_len`] bytes of the packet's
    /// first buffer. Called once per packet, in the order in which first buffers were
    /// [completed](RxDriver::completed), for rings that say it beside the buffers.
    fn start(&mut self, front: ReadSlice<'_>) -> Start;
}
