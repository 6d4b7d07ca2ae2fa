//! What the driver sends: one contiguous slot per packet.

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, WriteSlice};
use ringferry_packet::vnet::Header;
use ringferry_ring::split::Driver;
use ringferry_ring::{Buffer, Fault};

use super::arena::{Arena, ArenaError, Queue};
use crate::{Features, MAX_FRAME};

/// Bytes of a slot: the largest frame and its header, to the next page.
const SLOT: usize = (MAX_FRAME + Header::LEN).next_multiple_of(4096);

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

/// The driver's side of a transmitq.
#[derive(Debug)]
pub struct Transmitq {
    ring: Driver<Area, u16>,
    memory: Arc<GuestMemory>,
    header_len: usize,
    slots: u64,
    /// Slots not in use, last returned on top: the one whose lines are still in the cache.
    free: Vec<u16>,
}

impl Transmitq {
    /// Bytes of arena for a queue of `size` entries.
    pub fn arena_bytes(size: u16) -> usize {
        Arena::queue_bytes(size, 0) + usize::from(size) * SLOT
    }

    /// Makes a queue of `size` entries and as many slots.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn new(arena: &mut Arena, size: u16, features: Features) -> Result<(Queue, Self), ArenaError> {
        let (queue, ring) = arena.queue(size, features.ring(), 0)?;
        let slots = arena.alloc(usize::from(size) * SLOT)?;
        let memory = Arc::clone(arena.memory());
        let free = (0..size).rev().collect();
        Ok((queue, Self { ring, memory, header_len: features.header_len(), slots, free }))
    }

    /// The ring, for its notifications and its state.
    pub fn ring(&mut self) -> &mut Driver<Area, u16> {
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

    /// The bytes of a slot: the virtual header, then the frame.
    ///
    /// # Panics
    /// Never: a slot lies inside the arena.
    #[inline]
    pub fn bytes(&self, slot: &Slot) -> WriteSlice<'_> {
        self.memory
            .translator()
            .write(self.slots + u64::from(slot.0) * SLOT as u64, SLOT)
            .expect("slots lie inside the arena")
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
        let addr = self.slots + u64::from(slot.0) * SLOT as u64;
        let buffer = Buffer { addr, len: len.min(SLOT) as u32 };
        if self.ring.add(&[buffer], &[], slot.0).is_err() {
            self.free.push(slot.0);
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
        // num_buffers is 0 on transmit (5.1.6.2).
        let header = Header { num_buffers: 0, ..*header };
        bytes.copy_from(&header.to_bytes()[..self.header_len]);
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

    /// Takes back the slots the device is done with; returns how many.
    #[inline]
    pub fn reclaim(&mut self) -> usize {
        let mut count = 0;
        while let Some(used) = self.ring.collect() {
            self.free.push(used.token);
            count += 1;
        }
        count
    }
}
