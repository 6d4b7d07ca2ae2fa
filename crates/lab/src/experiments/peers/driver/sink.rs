//! Receives as testpmd's `rxonly` does: takes the frames of a burst, counts them and their bytes, and posts the
//! buffers again. It reads no payload, but while frames are checked.

use ringferry_rig::front::Front;
use ringferry_virtio_net::driver::Pair;

use crate::experiment::RowError;
use crate::experiments::peers::case::Case;
use crate::experiments::peers::engine::{Counts, Engine, Phase};
use crate::frames::numbered::{BURST, Checker};

pub(in crate::experiments::peers) struct Sink {
    end: Front,
    checker: Checker,
    whole: Vec<u8>,
    counts: Counts,
}

impl Sink {
    /// A sink for the frames of `case`.
    pub(in crate::experiments::peers) fn new(end: Front, case: &Case) -> Sink {
        let checker = case.checker(case.device);
        Sink { end, checker, whole: Vec::new(), counts: Counts::default() }
    }
}

impl Engine for Sink {
    #[inline]
    fn round(&mut self, phase: Phase) -> Result<(), RowError> {
        let Sink { end, checker, whole, counts } = self;
        let mut bytes = 0;
        let mut good = Ok(());
        let Pair { receiveq, pools, .. } = &mut end.pair;
        let received = receiveq.lend(BURST, pools, |packet, _| {
            bytes += packet.len() as u64;
            // Also in Hold: the sender may have heard of the check first.
            if phase != Phase::Run && good.is_ok() {
                super::flatten(&packet, whole);
                good = checker.check(whole).map_err(RowError::from);
            }
            Some(packet)
        });
        if received > 0 {
            end.top_up();
            counts.received += received as u64;
            counts.bytes += bytes;
            counts.checked = checker.checked();
        }
        good.and_then(|()| Ok(end.check()?))
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
