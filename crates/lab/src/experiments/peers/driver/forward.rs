//! Sends what it receives, as testpmd's `io` does, and is where the frames of a loop come from. Like testpmd it
//! copies nothing: a packet is sent from where it lies.

use ringferry_packet::vnet::Header;
use ringferry_rig::front::Front;
use ringferry_virtio_net::driver::Pair;

use crate::experiment::RowError;
use crate::experiments::peers::case::Case;
use crate::experiments::peers::engine::{Counts, Engine, Phase};
use crate::frames::numbered::{BURST, Checker, Format, Pool};

pub(in crate::experiments::peers) struct Forward {
    end: Front,
    case: Case,
    format: Format,
    checker: Checker,
    pool: Pool,
    whole: Vec<u8>,
    numbered: u64,
    /// Frames put into the loop.
    circulating: u64,
    counts: Counts,
}

impl Forward {
    /// Turns round what `case` says.
    pub(in crate::experiments::peers) fn new(end: Front, case: &Case) -> Forward {
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
        let Pair { receiveq, pools, .. } = &mut end.pair;
        let received = receiveq.lend(BURST, pools, |packet, _| {
            if good.is_ok() {
                super::flatten(&packet, whole);
                good = checker.check(whole).map_err(RowError::from);
                counts.bytes += packet.len() as u64;
            }
            Some(packet)
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
        let sent = self.end.pair.send_frame(&Header::default(), frame);
        self.counts.sent += u64::from(sent);
        sent
    }

    /// Sends what came, from where it lies.
    #[inline]
    fn turn(&mut self) {
        let Forward { end: Front { pair: Pair { receiveq, transmitq, pools, .. }, .. }, counts, .. } = self;
        let received = receiveq.lend(BURST, pools, |mut packet, pools| {
            counts.bytes += packet.len() as u64;
            packet.header = Header::default();
            let unsent = transmitq.send(packet, pools).err();
            counts.sent += u64::from(unsent.is_none());
            counts.dropped += u64::from(unsent.is_some());
            unsent.map(|unsent| unsent.chain)
        });
        if received > 0 {
            counts.received += received as u64;
            // In this order, as DPDK does: the device finds room for what it gets.
            self.end.top_up();
            self.end.publish();
        }
    }
}

impl Engine for Forward {
    #[inline]
    fn round(&mut self, phase: Phase) -> Result<(), RowError> {
        let Pair { receiveq, transmitq, pools, .. } = &mut self.end.pair;
        // What was forwarded goes back to where it was received.
        transmitq.reclaim_with(|chain| receiveq.recycle_chain(chain, pools));
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
        Ok(self.end.check()?)
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
