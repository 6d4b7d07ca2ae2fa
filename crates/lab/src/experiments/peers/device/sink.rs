//! Takes as testpmd's `rxonly` does: copies each frame of a burst whole into private memory, counts it and its bytes,
//! and gives the driver its buffers back with one publish. It reads no payload again, but while frames are
//! checked.

use ringferry_packet::frame::Burst;

use super::{End, call, copy_out};
use crate::experiment::RowError;
use crate::experiments::peers::case::Case;
use crate::experiments::peers::engine::{Counts, Engine, Phase};
use crate::frames::numbered::{BURST, Checker, Pool};

pub(in crate::experiments::peers) struct Sink {
    end: End,
    checker: Checker,
    pool: Pool,
    size: usize,
    /// The storage of the last burst.
    spare: Burst<'static>,
    counts: Counts,
}

impl Sink {
    /// A sink for the frames of `case`.
    pub(in crate::experiments::peers) fn new(end: End, case: &Case) -> Sink {
        let checker = case.checker(case.driver);
        let pool = Pool::new(case.size);
        Sink { end, checker, pool, size: case.size, spare: Burst::new(), counts: Counts::default() }
    }
}

impl Engine for Sink {
    #[inline]
    fn round(&mut self, phase: Phase) -> Result<(), RowError> {
        let Sink { end: End { transmitq, memory, calls, .. }, checker, pool, size, spare, counts } = self;
        let mut burst = Burst::reuse(std::mem::take(spare));
        let mut good = Ok(());
        if transmitq.poll(memory, BURST, &mut burst) > 0 {
            for (at, frame) in burst.frames().iter().enumerate() {
                let len = frame.len as usize;
                if len > *size {
                    good = Err(RowError::failed(format!("a frame of {len} bytes came")));
                    break;
                }
                let whole = pool.frame(at);
                copy_out(&burst, frame, whole);
                counts.bytes += len as u64;
                // Also in Hold: the sender may have heard of the check first.
                if phase != Phase::Run && good.is_ok() {
                    good = checker.check(&whole[..len]).map_err(RowError::from);
                }
            }
            counts.received += burst.len() as u64;
            counts.checked = checker.checked();
            if transmitq.complete() {
                call(&calls[1]);
            }
        }
        *spare = Burst::reuse(burst);
        good.and_then(|()| self.end.check())
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
