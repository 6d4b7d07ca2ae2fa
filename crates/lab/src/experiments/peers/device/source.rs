//! Delivers as testpmd's `txonly` does: writes the 42 bytes of Ethernet, IPv4 and UDP into each private buffer of
//! a burst, copies them whole into the driver's receive buffers, and publishes once.

use ringferry_packet::vnet::Header;
use ringferry_virtio_net::device::Refused;

use super::End;
use crate::experiment::RowError;
use crate::experiments::peers::case::Case;
use crate::experiments::peers::engine::{Counts, Engine, Phase};
use crate::frames::numbered::{BURST, Format, HEADERS, Pool};

pub(in crate::experiments::peers) struct Source {
    end: End,
    format: Format,
    pool: Pool,
    /// Numbered frames to deliver.
    limit: u64,
    counts: Counts,
}

impl Source {
    /// A source of the frames of `case`.
    pub(in crate::experiments::peers) fn new(end: End, case: &Case) -> Source {
        let format = Format::new(case.size);
        Source { end, format, pool: Pool::new(case.size), limit: case.checked(), counts: Counts::default() }
    }
}

impl Engine for Source {
    #[inline]
    fn round(&mut self, phase: Phase) -> Result<(), RowError> {
        let Source { end, format, pool, limit, counts } = self;
        let frames = match phase {
            Phase::Check => BURST.min((*limit - counts.sent) as usize),
            Phase::Run => BURST,
            Phase::Hold | Phase::Stop => 0,
        };
        for at in 0..frames {
            let frame = pool.frame(at);
            if phase == Phase::Check {
                format.write(counts.sent + at as u64, &mut frame[..format.size()]);
            } else {
                frame[..HEADERS].copy_from_slice(format.headers());
            }
        }
        let mut translator = end.memory.translator();
        end.receiveq.expect(frames);
        for at in 0..frames {
            let frame = &pool.frame(at)[..format.size()];
            match end.receiveq.deliver(&mut translator, Header::default(), frame, &[]) {
                Ok(()) => counts.sent += 1,
                // What is broken is told by the check below.
                Err(Refused::NoBuffers | Refused::Broken) => break,
                Err(refused @ (Refused::TooBig | Refused::Dear)) => return Err(RowError::failed(refused)),
            }
        }
        end.flush();
        end.check()
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
