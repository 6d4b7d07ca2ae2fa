//! What the driver sends: packets from slots of its own, one contiguous slot each, and received ones
//! from where they lie.

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, WriteSlice};
use ringferry_packet::vnet::Header;
use ringferry_ring::{Buffer, Driver, Fault};

use super::arena::{Arena, ArenaError, LEAD, Queue, line_stride};
use super::receiveq::Loan;
#[cfg(doc)]
use super::receiveq::Receiveq;
use crate::{Features, MAX_FRAME};

/// Bytes of a slot: the largest frame and its header, in whole cache lines.
const SLOT: usize = (MAX_FRAME + Header::LEN).next_multiple_of(64);

/// A slot that the caller may fill. Goes to [`Transmitq::send`] or back by [`Transmitq::cancel`]; one
/// that is forgotten is lost to the queue.
#[derive(Debug)]
#[must_use]
pub struct Slot(u16);

impl Slot {
    /// Which of the queue's slots this is: below the queue size, and the same memory each time.
    pub fn index(&self) -> usize {
        usize::from(self.0)
    }
}

/// Where a packet lies that the device has: what the ring's owner names chains by.
#[derive(Clone, Copy, Debug)]
pub enum Sent {
    /// In one of the queue's slots.
    Slot(u16),
    /// In a receive buffer.
    Loan(u16),
}

/// The driver's side of a transmitq.
#[derive(Debug)]
pub struct Transmitq {
    ring: Driver<Area, Sent>,
    memory: Arc<GuestMemory>,
    header_len: usize,
    slots: u64,
    /// Slots not in use, last returned on top: the one whose lines are still in the cache.
    free: Vec<u16>,
    /// Receive buffers that the device is done with, until [`Receiveq::take_back`].
    pub(super) returned: Vec<u16>,
}

impl Transmitq {
    /// Bytes of arena for a queue of `size` entries.
    pub fn arena_bytes(size: u16) -> usize {
        Arena::queue_bytes(size, 0) + usize::from(size) * line_stride(SLOT) + 4096
    }

    /// Makes a queue of `size` entries and as many slots.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn new(arena: &mut Arena, size: u16, features: Features) -> Result<(Queue, Self), ArenaError> {
        let (queue, ring) = arena.queue(size, features.ring(), 0)?;
        let slots = arena.alloc(usize::from(size) * line_stride(SLOT))?;
        let memory = Arc::clone(arena.memory());
        let free = (0..size).rev().collect();
        let header_len = features.header_len();
        Ok((queue, Self { ring, memory, header_len, slots, free, returned: Vec::new() }))
    }

    /// The ring, for its notifications and its state.
    pub fn ring(&mut self) -> &mut Driver<Area, Sent> {
        &mut self.ring
    }

    /// The violation that broke this queue, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.ring.fault()
    }

    /// Size of the virtual header in front of every frame.
    pub fn header_len(&self) -> usize {
        self.header_len
    }

    /// A slot to fill, if one is free.
    #[inline]
    pub fn slot(&mut self) -> Option<Slot> {
        self.free.pop().map(Slot)
    }

    #[inline(always)]
    fn addr(&self, slot: u16) -> u64 {
        self.slots + u64::from(slot) * line_stride(SLOT) as u64 + LEAD as u64
    }

    /// The bytes of a slot: the virtual header, then the frame.
    ///
    /// # Panics
    /// Never: a slot lies inside the arena.
    #[inline]
    pub fn bytes(&self, slot: &Slot) -> WriteSlice<'_> {
        self.memory.translator().write(self.addr(slot.0), SLOT).expect("slots lie inside the arena")
    }

    /// Writes a packet's virtual header to the front of its bytes, if another is there: slots that carry
    /// one kind of packet keep theirs.
    #[inline(always)]
    pub fn put_header(&self, bytes: &WriteSlice<'_>, header: &Header) {
        // num_buffers is 0 on transmit (5.1.6.2).
        let header = Header { num_buffers: 0, ..*header }.to_bytes();
        if self.header_len == Header::LEN {
            bytes.update_from(&header);
        } else {
            bytes.copy_from(&header[..self.header_len]);
        }
    }

    /// Gives a slot back unused.
    #[inline]
    pub fn cancel(&mut self, slot: Slot) {
        self.free.push(slot.0);
    }

    /// Sends the first `len` bytes of a slot, header included. The device does not see it before
    /// [`Transmitq::publish`]. On a broken ring the packet is lost with the ring.
    #[inline]
    pub fn send(&mut self, slot: Slot, len: usize) {
        let addr = self.addr(slot.0);
        let buffer = Buffer { addr, len: len.min(SLOT) as u32 };
        if self.ring.add(&[buffer], &[], Sent::Slot(slot.0)).is_err() {
            self.free.push(slot.0);
        }
    }

    /// Sends a received packet from where it lies, with this header instead of the one it came with.
    /// The buffer is the device's until [`Transmitq::reclaim`], and then goes back to its queue by
    /// [`Receiveq::take_back`]. The two queues are those of one driver.
    ///
    /// # Errors
    /// The packet, when the ring is full or broken.
    #[inline]
    pub fn forward(&mut self, header: &Header, loan: Loan) -> Result<(), Loan> {
        let mut translator = self.memory.translator();
        let Some(room) = translator.write(loan.addr, self.header_len) else { return Err(loan) };
        self.put_header(&room, header);
        let buffer = Buffer { addr: loan.addr, len: loan.len };
        match self.ring.add(&[buffer], &[], Sent::Loan(loan.index)) {
            Ok(()) => Ok(()),
            Err(_) => Err(loan),
        }
    }

    /// Copies a whole frame into a slot and sends it; false when no slot is free.
    ///
    /// # Panics
    /// When the frame is longer than a slot, which is longer than [`MAX_FRAME`]: a bug of the caller.
    pub fn send_frame(&mut self, header: &Header, frame: &[u8]) -> bool {
        assert!(
            self.header_len + frame.len() <= SLOT,
            "a frame of {} bytes is too long to send",
            frame.len()
        );
        let Some(slot) = self.slot() else { return false };
        let bytes = self.bytes(&slot);
        self.put_header(&bytes, header);
        bytes.skip(self.header_len).copy_from(frame);
        let len = self.header_len + frame.len();
        self.send(slot, len);
        true
    }

    /// Shows what was sent to the device; true when it wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    /// Reclaims unless `slots` slots are free already: whoever polls looks at the device's words no
    /// more often than it must, since each look takes their cache line away from the device. Loans do
    /// not count; whoever forwards reclaims when it is short of receive buffers.
    #[inline]
    pub fn make_room(&mut self, slots: usize) {
        if self.free.len() < slots {
            self.reclaim();
        }
    }

    /// Takes back the slots and receive buffers the device is done with; returns how many.
    #[inline]
    pub fn reclaim(&mut self) -> usize {
        let mut count = 0;
        while let Some(used) = self.ring.collect() {
            count += 1;
            let slot = match used.token {
                Sent::Slot(slot) => slot,
                Sent::Loan(index) => {
                    self.returned.push(index);
                    continue;
                }
            };
            // The device has read the frame's first line; whoever fills the slot next wants it back,
            // all those of a burst at once.
            let slot = Slot(slot);
            self.bytes(&slot).skip(self.header_len).prefetch();
            self.free.push(slot.0);
        }
        count
    }
}
