//! [`Controlq`]: the driver's side of the control queue, with one command in flight at a time.
//!
//! A driver creates it in its arena if CTRL_VQ was negotiated, and uses it from one thread:
//! [`Controlq::submit`], then [`Controlq::poll`] until the device has acknowledged, then
//! [`Controlq::result`]. It ends with the arena.

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory};
use ringferry_ring::{Buffer, Driver, Fault};

use super::arena::{Arena, ArenaError, Queue};
use crate::Features;
use crate::control::{Coalesce, Command, ERR, MAX_COMMAND, OK};

/// Number of entries; a command takes two, or three with a result.
const SIZE: u16 = 4;

/// The driver's side of the control queue, idle or with one command in flight.
#[derive(Debug)]
pub struct Controlq {
    ring: Driver<Area, ()>,
    memory: Arc<GuestMemory>,
    /// Address of the command; its acknowledgement is the byte after [`MAX_COMMAND`], and its
    /// result follows.
    command: u64,
    /// Size in bytes of the result of the command in flight.
    result_len: usize,
    result: Option<Coalesce>,
}

/// Size in bytes of an acknowledgement and the longest result.
const RESPONSE_LEN: usize = 1 + Coalesce::LEN;

impl Controlq {
    /// Returns the number of bytes that the queue takes of an arena.
    pub fn arena_bytes() -> usize {
        Arena::queue_bytes(SIZE, 0) + 2 * MAX_COMMAND
    }

    /// Creates the queue and its buffer in `arena`.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn new(arena: &mut Arena, features: Features) -> Result<(Queue, Self), ArenaError> {
        let (queue, ring) = arena.queue(SIZE, features.ring(), 0)?;
        let command = arena.alloc(MAX_COMMAND + RESPONSE_LEN)?;
        Ok((queue, Self { ring, memory: Arc::clone(arena.memory()), command, result_len: 0, result: None }))
    }

    /// Returns the ring, for its notifications and its state.
    pub fn ring(&mut self) -> &mut Driver<Area, ()> {
        &mut self.ring
    }

    /// Returns the violation that broke the queue, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.ring.fault()
    }

    /// Submits a command; returns whether the device wants a notification. `None` when a command is
    /// in flight, this one is too long, or the ring is broken.
    pub fn submit(&mut self, command: &Command) -> Option<bool> {
        let bytes = command.encode();
        if self.ring.in_flight() > 0 || bytes.len() > MAX_COMMAND {
            return None;
        }
        let ack = self.command + MAX_COMMAND as u64;
        let mut translator = self.memory.translator();
        translator.write(self.command, bytes.len())?.copy_from(&bytes);
        // The acknowledgement is an error until the device overwrites it.
        translator.write(ack, 1)?.copy_from(&[ERR]);
        let read = Buffer { addr: self.command, len: bytes.len() as u32 };
        let result_len = command.result_len();
        let response = [Buffer { addr: ack, len: 1 }, Buffer { addr: ack + 1, len: result_len as u32 }];
        let response = if result_len > 0 { &response[..] } else { &response[..1] };
        self.ring.add(&[read], response, ()).ok()?;
        (self.result_len, self.result) = (result_len, None);
        Some(self.ring.publish())
    }

    /// Returns true if the device carried out the command in flight, false if it refused; `None`
    /// while it has not acknowledged.
    pub fn poll(&mut self) -> Option<bool> {
        let used = self.ring.collect()?;
        let mut response = [ERR; RESPONSE_LEN];
        self.memory
            .translator()
            .read(self.command + MAX_COMMAND as u64, RESPONSE_LEN)?
            .copy_to(&mut response);
        let [ack, result @ ..] = response;
        let done = used.len >= 1 && ack == OK;
        // A result is valid only with an acknowledgement, and if it is complete (5.1.6.5.10.5).
        if done && self.result_len > 0 && used.len as usize > self.result_len {
            self.result = Some(Coalesce::from_bytes(&result));
        }
        Some(done && (self.result_len == 0 || self.result.is_some()))
    }

    /// Returns the result of the last command, if it has one and the device carried it out: the
    /// coalescing limits of the queue that was asked about.
    pub fn result(&self) -> Option<Coalesce> {
        self.result
    }
}
