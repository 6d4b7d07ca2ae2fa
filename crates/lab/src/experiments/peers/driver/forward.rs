//! Sends what it receives, as testpmd's `io` does, and is where the frames of a loop come from. Like testpmd it
//! copies nothing: a packet of one buffer is sent from where it lies.

use ringferry_packet::vnet::Header;
use ringferry_virtio_net::driver::{Packet, Transmitq};

use super::End;
use crate::experiment::RowError;
use crate::experiments::peers::case::{BURST, Case};
use crate::experiments::peers::engine::{Counts, Engine, Phase};
use crate::experiments::peers::frames::{Checker, Format, Pool};

/// The engine.
pub(in crate::experiments::peers) struct Forward {
    end: End,
    case: Case,
    format: Format,
    checker: Checker,
    pool: Pool,
    whole: Vec<u8>,
    /// Numbered frames sent.
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
            whole: Vec::new(),
            numbered: 0,
            circulating: 0,
            counts: Counts::default(),
        }
    }

    /// Keeps a window of numbered frames under way and checks what comes back.
    fn check(&mut self) -> Result<(), RowError> {
        let Forward { end, checker, whole, counts, .. } = self;
        let mut good = Ok(());
        let header_len = end.transmitq.header_len();
        let received = end.receiveq.receive(BURST, |packet| {
            if good.is_ok() {
                super::flatten(&packet, header_len, whole);
                good = checker.check(whole);
                counts.bytes += packet.len as u64;
            }
        });
        counts.received += received as u64;
        counts.checked = checker.checked();
        end.refill();
        good?;
        while self.numbered < self.case.checked()
            && self.numbered - self.counts.checked < self.case.window()
            && self.put(self.numbered)
        {
            self.numbered += 1;
        }
        self.end.publish();
        Ok(())
    }

    /// Puts the frames into the loop, as many as there are slots for.
    fn begin(&mut self) {
        while self.circulating < self.case.circulating() && self.put(self.circulating) {
            self.circulating += 1;
        }
        self.end.publish();
    }

    /// Sends a frame of its own; false when there is no slot.
    fn put(&mut self, number: u64) -> bool {
        let frame = &mut self.pool.frame(0)[..self.format.size()];
        self.format.write(number, frame);
        let sent = self.end.transmitq.send_frame(&Header::default(), frame);
        self.counts.sent += u64::from(sent);
        sent
    }

    /// Sends what came, from where it lies; what came in several buffers is copied together.
    #[inline]
    fn turn(&mut self) {
        let Forward { end: End { receiveq, transmitq, .. }, counts, .. } = self;
        let header_len = transmitq.header_len();
        let received = receiveq.receive(BURST, |packet| {
            counts.bytes += packet.len as u64;
            let sent = match packet.loan.take() {
                Some(loan) => {
                    *packet.loan = transmitq.forward(&Header::default(), loan).err();
                    packet.loan.is_none()
                }
                None => copy(&packet, header_len, transmitq),
            };
            counts.sent += u64::from(sent);
            counts.dropped += u64::from(!sent);
        });
        if received > 0 {
            counts.received += received as u64;
            // In this order, as DPDK does: the device finds room for what it gets.
            self.end.top_up();
            self.end.publish();
        }
    }
}

/// Sends a copy of a packet; false when there is no slot.
fn copy(packet: &Packet<'_>, header_len: usize, transmitq: &mut Transmitq) -> bool {
    let Some(slot) = transmitq.slot() else { return false };
    let bytes = transmitq.bytes(&slot);
    transmitq.put_header(&bytes, &Header::default());
    let mut at = header_len;
    let mut skip = header_len;
    for piece in packet.pieces {
        at += piece.skip(skip).copy_to_slice(&bytes.skip(at));
        skip = 0;
    }
    transmitq.send(slot, at);
    true
}

impl Engine for Forward {
    #[inline]
    fn round(&mut self, phase: Phase) -> Result<(), RowError> {
        self.end.transmitq.reclaim();
        self.end.receiveq.take_back(&mut self.end.transmitq);
        match phase {
            Phase::Check => self.check()?,
            Phase::Run => {
                if self.circulating < self.case.circulating() {
                    self.begin();
                }
                self.turn();
            }
            Phase::Hold | Phase::Stop => {}
        }
        self.end.check()
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
