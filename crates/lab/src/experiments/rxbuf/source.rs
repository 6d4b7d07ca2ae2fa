//! Our device half on a thread of its own: delivers frames from private memory as fast as there are buffers. The first ones
//! carry a number and a pattern, so that each can be checked whole.

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, Region};
use ringferry_packet::vnet::Header;
use ringferry_ring::{Device, Parts, part_bytes};
use ringferry_virtio_net::device::{Receiveq, Refused};

use super::BURST;
use super::sink::{Sink, features};
use super::workload::{HEADERS as GSO_HEADERS, SEGMENT, Sequence};
use crate::experiment::RowError;
use crate::frames::numbered::{Format, HEADERS, Pool};
use crate::frames::to_be_cut;

/// Where a device takes over a fresh packed ring: index 0 and a wrap counter of 1.
const FRESH: u16 = 1 << 15;

/// Frames longer than this are for the receiver to cut up.
const LONGEST: usize = 1518;

/// The device half, which sends.
pub(super) struct Source {
    queue: Receiveq<Area>,
    memory: Arc<GuestMemory>,
    sequence: Sequence,
    /// For each length of the sequence.
    formats: Vec<(Format, Header)>,
    pool: Pool,
    numbered: u64,
    sent: u64,
}

impl Source {
    /// Serves the ring of `sink` with frames as in `sequence`, the first `numbered` of them to be checked.
    pub(super) fn new(sink: &Sink, sequence: Sequence, numbered: u64) -> Result<Self, RowError> {
        // The device has a mapping of its own, as over vhost-user.
        let (spec, fd) = sink.region();
        let region = Region::map(fd, spec).map_err(RowError::failed)?;
        let memory = Arc::new(GuestMemory::new(vec![region]).map_err(RowError::failed)?);
        let [queue, _] = sink.rings;
        let area =
            |at, len| memory.area(at, len).ok_or_else(|| RowError::failed("a ring outside its memory"));
        let [desc, driver, used] = part_bytes(queue.size, features().ring().packed);
        let parts = Parts {
            size: queue.size,
            desc: area(queue.desc, desc)?,
            driver: area(queue.avail, driver)?,
            device: area(queue.used, used)?,
        };
        let device = Device::new(parts, features().ring(), FRESH, None);
        let mut device = device.map_err(RowError::failed)?;
        device.disable_kicks();
        let formats = sequence.lengths().iter().map(|&len| (Format::new(len), header(len))).collect();
        let pool = Pool::new(sequence.longest());
        let queue = Receiveq::new(device, features());
        Ok(Self { queue, memory, sequence, formats, pool, numbered, sent: 0 })
    }

    /// Delivers a burst, or as much of it as there are buffers for.
    #[inline]
    pub(super) fn round(&mut self) -> Result<(), RowError> {
        let Self { queue, memory, sequence, formats, pool, numbered, sent } = self;
        let mut translator = memory.translator();
        queue.expect(BURST);
        for at in 0..BURST {
            let (format, header) = &formats[sequence.at(*sent)];
            let frame = &mut pool.frame(at)[..format.size()];
            if *sent < *numbered {
                format.write(*sent, frame);
            } else {
                frame[..HEADERS].copy_from_slice(format.headers());
            }
            match queue.deliver(&mut translator, *header, frame, &[]) {
                Ok(()) => *sent += 1,
                Err(Refused::NoBuffers) => break,
                Err(refused) => return Err(RowError::failed(format!("the device stopped: {refused}"))),
            }
        }
        // Nobody sleeps.
        queue.flush();
        Ok(())
    }
}

/// The virtual header of a frame of so many bytes.
fn header(len: usize) -> Header {
    if len <= LONGEST {
        return Header::default();
    }
    to_be_cut(GSO_HEADERS, SEGMENT)
}
