//! Sends back what it takes, as testpmd's `io` does. DPDK's device copies each frame into a buffer of its own and
//! from there to the driver; this one does what ringferry's switch does and copies it once, from buffer to buffer.
//! With DPDK's driver it is where the frames of the loop come from.

use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_virtio_net::device::Refused;

use super::{End, call, copy_out};
use crate::experiment::RowError;
use crate::experiments::peers::case::{Case, Who};
use crate::experiments::peers::engine::{Counts, Engine, Phase};
use crate::frames::numbered::{BURST, Checker, EACH, Format, Pool};

pub(in crate::experiments::peers) struct Forward {
    end: End,
    case: Case,
    format: Format,
    checker: Checker,
    pool: Pool,
    /// Lengths of the frames in the pool.
    lengths: Vec<usize>,
    spare: Burst<'static>,
    /// True if the frames come from here.
    origin: bool,
    numbered: u64,
    /// Frames put into the loop.
    circulating: u64,
    counts: Counts,
}

impl Forward {
    /// Turns round what `case` says.
    pub(in crate::experiments::peers) fn new(end: End, case: &Case) -> Forward {
        let format = Format::new(case.size);
        Forward {
            end,
            case: *case,
            checker: Checker::numbered(format.clone(), case.checked()),
            format,
            pool: Pool::new(case.size),
            lengths: Vec::with_capacity(BURST),
            spare: Burst::new(),
            origin: case.driver == Who::Dpdk,
            numbered: 0,
            circulating: 0,
            counts: Counts::default(),
        }
    }

    /// Sends back a burst: each frame is copied once, from the driver's sending buffer to its receiving one.
    #[inline]
    fn turn(&mut self) -> Result<(), RowError> {
        let Forward { end: End { transmitq, receiveq, memory, calls }, spare, counts, case, .. } = self;
        let mut burst = Burst::reuse(std::mem::take(spare));
        let mut good = Ok(());
        if transmitq.poll(memory, BURST, &mut burst) > 0 {
            let mut translator = memory.translator();
            receiveq.expect(burst.len());
            if let Some(frame) = burst.frames().iter().find(|frame| frame.len as usize > case.size) {
                good = Err(RowError::failed(format!("a frame of {} bytes came", frame.len)));
            }
            let mut left = &EACH[..burst.len()];
            while good.is_ok() && !left.is_empty() {
                let run = receiveq.deliver_run(&mut translator, &burst, left);
                counts.sent += run.frames as u64;
                left = &left[run.frames..];
                // What the short way does not take.
                let Some((next, behind)) = left.split_first() else { break };
                let frame = &burst.frames()[*next as usize];
                match receiveq.deliver(&mut translator, frame.header, frame.prefix(), burst.rest(frame)) {
                    Ok(()) => counts.sent += 1,
                    Err(Refused::NoBuffers | Refused::Broken) => counts.dropped += 1,
                    Err(refused @ (Refused::TooBig | Refused::Dear)) => good = Err(RowError::failed(refused)),
                }
                left = behind;
            }
            counts.bytes += burst.bytes();
            counts.received += burst.len() as u64;
            if receiveq.flush() {
                call(&calls[0]);
            }
            if transmitq.complete() {
                call(&calls[1]);
            }
        }
        *spare = Burst::reuse(burst);
        good
    }

    /// Takes a burst into the pool, to be checked.
    #[inline]
    fn take(&mut self) -> Result<(), RowError> {
        let Forward { end: End { transmitq, memory, calls, .. }, pool, lengths, spare, counts, case, .. } =
            self;
        lengths.clear();
        let mut burst = Burst::reuse(std::mem::take(spare));
        let mut good = Ok(());
        if transmitq.poll(memory, BURST, &mut burst) > 0 {
            for (at, frame) in burst.frames().iter().enumerate() {
                let len = frame.len as usize;
                if len > case.size {
                    good = Err(RowError::failed(format!("a frame of {len} bytes came")));
                    break;
                }
                copy_out(&burst, frame, pool.frame(at));
                lengths.push(len);
                counts.bytes += len as u64;
            }
            counts.received += burst.len() as u64;
            if transmitq.complete() {
                call(&calls[1]);
            }
        }
        *spare = Burst::reuse(burst);
        good
    }

    /// Delivers what is in the pool.
    #[inline]
    fn deliver(&mut self) -> Result<(), RowError> {
        if self.lengths.is_empty() {
            return Ok(());
        }
        let Forward { end, pool, lengths, counts, .. } = self;
        let mut translator = end.memory.translator();
        end.receiveq.expect(lengths.len());
        for (at, &len) in lengths.iter().enumerate() {
            match end.receiveq.deliver(&mut translator, Header::default(), &pool.frame(at)[..len], &[]) {
                Ok(()) => counts.sent += 1,
                Err(Refused::NoBuffers | Refused::Broken) => {
                    counts.dropped += (lengths.len() - at) as u64;
                    break;
                }
                Err(refused @ (Refused::TooBig | Refused::Dear)) => return Err(RowError::failed(refused)),
            }
        }
        end.flush();
        Ok(())
    }

    /// Puts up to a burst of frames with these numbers into the loop, as many as fit; how many those were.
    fn put(&mut self, numbers: std::ops::Range<u64>) -> Result<u64, RowError> {
        self.lengths.clear();
        for number in numbers.take(BURST) {
            let frame = self.pool.frame(self.lengths.len());
            self.format.write(number, &mut frame[..self.case.size]);
            self.lengths.push(self.case.size);
        }
        let before = self.counts.sent;
        self.deliver()?;
        Ok(self.counts.sent - before)
    }

    /// Checks what came back and keeps a window of numbered frames under way.
    fn check(&mut self) -> Result<(), RowError> {
        for (at, &len) in self.lengths.iter().enumerate() {
            self.checker.check(&self.pool.frame(at)[..len])?;
        }
        self.counts.checked = self.checker.checked();
        let end = self.case.checked().min(self.counts.checked + self.case.window());
        self.numbered += self.put(self.numbered..end)?;
        Ok(())
    }
}

impl Engine for Forward {
    #[inline]
    fn round(&mut self, phase: Phase) -> Result<(), RowError> {
        if self.origin && phase == Phase::Run && self.circulating < self.case.circulating() {
            self.circulating += self.put(self.circulating..self.case.circulating())?;
        }
        if self.origin && phase == Phase::Check {
            self.take()?;
            self.check()?;
        } else {
            self.turn()?;
        }
        self.end.check()
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
