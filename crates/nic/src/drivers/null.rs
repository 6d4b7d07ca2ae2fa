//! The null driver: it completes each packet at once and receives none, so that a measurement shows the cost
//! of the framework alone. A test attaches a queue to it and drops both at the end.

use std::collections::VecDeque;

use ringferry_memory::ReadSlice;

use super::InTurn;
use crate::driver::{Completion, Refused, RxDriver, Segment, Start, TxDriver, TxPacket};
use crate::limits::{RxLimits, TxLimits};

/// The transmit half: discards packets.
#[derive(Debug)]
pub struct NullTx {
    limits: TxLimits,
    /// Tokens of the packets that were sent and not yet reclaimed.
    sent: VecDeque<u16>,
    tokens: InTurn,
}

impl NullTx {
    /// Creates a ring with these limits. A packet takes one entry, whatever its shape.
    pub fn new(limits: TxLimits) -> Self {
        Self { limits, sent: VecDeque::with_capacity(limits.ring.into()), tokens: InTurn::new(limits.ring) }
    }
}

impl TxDriver for NullTx {
    fn limits(&self) -> TxLimits {
        self.limits
    }

    #[inline]
    fn room(&self) -> usize {
        usize::from(self.limits.ring) - self.sent.len()
    }

    #[inline]
    fn cost(&self, _: usize) -> usize {
        1
    }

    #[inline]
    fn encap(&mut self, _: &TxPacket<'_>) -> Result<u16, Refused> {
        if self.room() == 0 {
            return Err(Refused::Full);
        }
        let token = self.tokens.take();
        self.sent.push_back(token);
        Ok(token)
    }

    #[inline]
    fn flush(&mut self) -> bool {
        false
    }

    #[inline]
    fn completed(&mut self, most: usize, each: impl FnMut(u16)) -> usize {
        let count = most.min(self.sent.len());
        self.sent.drain(..count).for_each(each);
        count
    }
}

/// The receive half: never fills a buffer.
#[derive(Debug)]
pub struct NullRx {
    limits: RxLimits,
    room: usize,
}

impl NullRx {
    /// Creates a ring with these limits. It keeps the buffers that are posted.
    pub fn new(limits: RxLimits) -> Self {
        Self { limits, room: limits.ring.into() }
    }
}

impl RxDriver for NullRx {
    fn limits(&self) -> RxLimits {
        self.limits
    }

    #[inline]
    fn room(&self) -> usize {
        self.room
    }

    #[inline]
    fn post(&mut self, _: &[Segment]) -> Result<u16, Refused> {
        self.room = self.room.checked_sub(1).ok_or(Refused::Full)?;
        Ok(self.room as u16)
    }

    #[inline]
    fn flush(&mut self) -> bool {
        false
    }

    #[inline]
    fn completed(&mut self, _: usize, _: impl FnMut(Completion)) -> usize {
        0
    }

    fn start(&mut self, _: ReadSlice<'_>) -> Start {
        Start::default()
    }
}
