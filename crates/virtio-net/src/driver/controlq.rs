//! The driver's side of the control queue: one command at a time.

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory};
use ringferry_ring::{Buffer, Driver, Fault};

use super::arena::{Arena, ArenaError, Queue};
use crate::Features;
use crate::control::{Coalesce, Command, ERR, MAX_COMMAND, OK};

/// Entries of the queue; a command takes two, or three with a result.
const SIZE: u16 = 4;

/// The driver's side of the control queue.
#[derive(Debug)]
pub struct Controlq {
    ring: Driver<Area, ()>,
    memory: Arc<GuestMemory>,
    /// Where the command lies; its acknowledgement is the byte behind [`MAX_COMMAND`], and its result follows.
    command: u64,
    /// Bytes of result that the command under way has.
    expects: usize,
    result: Option<Coalesce>,
}

/// Bytes of an acknowledgement and the longest result.
const ANSWER: usize = 1 + Coalesce::LEN;

impl Controlq {
    /// Bytes of arena that it takes.
    pub fn arena_bytes() -> usize {
        Arena::queue_bytes(SIZE, 0) + 2 * MAX_COMMAND
    }

    /// Makes the queue.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn new(arena: &mut Arena, features: Features) -> Result<(Queue, Self), ArenaError> {
        let (queue, ring) = arena.queue(SIZE, features.ring(), 0)?;
        let command = arena.alloc(MAX_COMMAND + ANSWER)?;
        Ok((queue, Self { ring, memory: Arc::clone(arena.memory()), command, expects: 0, result: None }))
    }

    /// The ring, for its notifications and its state.
    pub fn ring(&mut self) -> &mut Driver<Area, ()> {
        &mut self.ring
    }

    /// The violation that broke this queue, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.ring.fault()
    }

    /// Sends a command; `None` when one is under way, the command is too long, or the ring is
    /// broken. Otherwise whether the device wants a kick.
    pub fn submit(&mut self, command: &Command) -> Option<bool> {
        let bytes = command.encode();
        if self.ring.in_flight() > 0 || bytes.len() > MAX_COMMAND {
            return None;
        }
        let ack = self.command + MAX_COMMAND as u64;
        let mut translator = self.memory.translator();
        translator.write(self.command, bytes.len())?.copy_from(&bytes);
        // Not OK until the device says so.
        translator.write(ack, 1)?.copy_from(&[ERR]);
        let read = Buffer { addr: self.command, len: bytes.len() as u32 };
        let expects = command.result_len();
        let answer = [Buffer { addr: ack, len: 1 }, Buffer { addr: ack + 1, len: expects as u32 }];
        let answer = if expects > 0 { &answer[..] } else { &answer[..1] };
        self.ring.add(&[read], answer, ()).ok()?;
        (self.expects, self.result) = (expects, None);
        Some(self.ring.publish())
    }

    /// The answer to the command under way: whether the device carried it out. `None` while there
    /// is no answer.
    pub fn poll(&mut self) -> Option<bool> {
        let used = self.ring.collect()?;
        let mut answer = [ERR; ANSWER];
        self.memory.translator().read(self.command + MAX_COMMAND as u64, ANSWER)?.copy_to(&mut answer);
        let [ack, result @ ..] = answer;
        let done = used.len >= 1 && ack == OK;
        // A result comes with an acknowledgement, and whole (5.1.6.5.10.5).
        if done && self.expects > 0 && used.len as usize > self.expects {
            self.result = Some(Coalesce::from_bytes(&result));
        }
        Some(done && (self.expects == 0 || self.result.is_some()))
    }

    /// The result of the last command, if the device carried it out and it has one: how notifications of the queue that
    /// was asked about are coalesced.
    pub fn result(&self) -> Option<Coalesce> {
        self.result
    }
}
