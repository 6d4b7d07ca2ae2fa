//! Sends as testpmd's `txonly` does: for each frame a buffer that is free, a virtual header, and the 42 bytes
//! of Ethernet, IPv4 and UDP; the rest of the buffer is what it was. One publish per burst.
//!
//! Unlike `txonly` it does not prepare frames for which the ring has no room.

use ringferry_packet::buffer::Chain;
use ringferry_rig::front::Front;
use ringferry_virtio_net::driver::Pair;

use crate::experiment::RowError;
use crate::experiments::peers::case::Case;
use crate::experiments::peers::engine::{Counts, Engine, Phase};
use crate::frames::numbered::{BURST, Format, Pool};

pub(in crate::experiments::peers) struct Source {
    end: Front,
    format: Format,
    pool: Pool,
    /// Numbered frames to send.
    limit: u64,
    counts: Counts,
}

impl Source {
    /// A source of the frames of `case`.
    pub(in crate::experiments::peers) fn new(end: Front, case: &Case) -> Source {
        let format = Format::new(case.size);
        Source { end, format, pool: Pool::new(case.size), limit: case.checked(), counts: Counts::default() }
    }

    fn send(&mut self, phase: Phase) {
        let Pair { transmitq, pools, .. } = &mut self.end.pair;
        for _ in 0..BURST {
            if phase == Phase::Check && self.counts.sent == self.limit {
                break;
            }
            if transmitq.free() == 0 {
                break;
            }
            let size = self.format.size();
            let Some(mut buf) = pools.alloc(size) else { break };
            if phase == Phase::Check {
                let whole = &mut self.pool.frame(0)[..size];
                self.format.write(self.counts.sent, whole);
                buf.append(whole);
            } else {
                buf.room().copy_from(self.format.headers());
                buf.grow(size);
            }
            if !transmitq.try_send(Chain::from(buf), pools) {
                break;
            }
            self.counts.sent += 1;
        }
        self.end.publish();
    }
}

impl Engine for Source {
    #[inline]
    fn round(&mut self, phase: Phase) -> Result<(), RowError> {
        let Pair { transmitq, pools, .. } = &mut self.end.pair;
        transmitq.make_room(BURST, pools);
        if matches!(phase, Phase::Check | Phase::Run) {
            self.send(phase);
        }
        Ok(self.end.check()?)
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
