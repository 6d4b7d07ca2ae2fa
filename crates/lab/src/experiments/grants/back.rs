//! The back end's side of a queue, on a thread: what it takes it copies to private memory, as a receiver would; what it
//! gives comes from there.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ringferry_memory::{Area, ReadSlice, Region};
use ringferry_packet::frame::{Burst, PREFIX};
use ringferry_xen::domain::PAGE;
use ringferry_xen::grant::ForeignCounters;
use ringferry_xen_net::events::Events;
use ringferry_xen_net::netback::{Multicast, PageCounters, Queue, QueueConfig, Refused};
use ringferry_xen_net::xenbus::MappedQueue;

use super::case::{Case, Direction};
use super::processors::Processor;
use crate::experiment::RowError;
use crate::experiments::txmap::clock::{Gauge, Over};
use crate::frames::segments::Frames;

/// The counters of a queue at some time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Snapshot {
    pub at: Instant,
    /// Frames that the back end was done with.
    pub frames: u64,
    pub pages: PageCounters,
    pub foreign: ForeignCounters,
    pub mapped: usize,
}

/// The words through which a queue's thread and the one that measures speak.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Frames that the queue has served so far.
    pub frames: Gauge,
    /// Number of the snapshot that is asked for.
    asked: AtomicU64,
    taken: Mutex<Option<(u64, Snapshot)>>,
}

impl Watch {
    pub(super) fn ask(&self, number: u64) {
        self.asked.store(number, Ordering::Release);
    }

    /// The snapshot of that number, once it is there.
    pub(super) fn taken(&self, number: u64) -> Option<Snapshot> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.filter(|(of, _)| *of == number).map(|(_, snapshot)| snapshot)
    }
}

/// A ring page that is mapped.
pub(super) fn page(region: &std::sync::Arc<Region>) -> Result<Area, RowError> {
    region.area(0, PAGE).ok_or_else(|| RowError::failed("a ring is no page"))
}

/// The back end's side of a queue.
#[derive(Debug)]
pub(super) struct Back {
    pub queue: Queue,
    events: Events,
    case: Case,
    frames: Frames,
    multicast: Multicast,
    seen: u64,
}

impl Back {
    pub(super) fn new(mapped: MappedQueue, case: &Case, sg: bool) -> Result<Self, RowError> {
        let MappedQueue { tx_ring, rx_ring, events, foreign } = mapped;
        let config = QueueConfig { mode: case.mode.netback(), pages: case.pages, sg };
        let queue =
            Queue::new(page(&tx_ring)?, page(&rx_ring)?, foreign, config).map_err(RowError::failed)?;
        let (frames, multicast) = (case.frames(), Multicast::new(false));
        Ok(Self { queue, events, case: *case, frames, multicast, seen: 0 })
    }

    /// Works until it is told to end, and returns the queue with the number of frames that went through it.
    pub(super) fn work(
        mut self,
        processor: Processor,
        watch: &Watch,
        over: &Over,
    ) -> Result<(Self, u64), RowError> {
        processor.pin()?;
        let mut spare = Burst::new();
        while !over.told() {
            let done = match self.case.direction {
                Direction::Transmit => self.take(&mut spare)?,
                Direction::Receive => self.give()?,
            };
            watch.frames.set(self.frames.count);
            let asked = watch.asked.load(Ordering::Acquire);
            if asked != self.seen {
                self.seen = asked;
                let snapshot = self.snapshot();
                *watch.taken.lock().unwrap_or_else(PoisonError::into_inner) = Some((asked, snapshot));
            }
            if done == 0 {
                if let Some(fault) = self.queue.fault() {
                    return Err(RowError::failed(format!("the front end broke a ring: {fault}")));
                }
                processor.idle();
            }
        }
        let count = self.frames.count;
        Ok((self, count))
    }

    fn snapshot(&self) -> Snapshot {
        let (learnt, fixed) = self.queue.mapped();
        Snapshot {
            at: Instant::now(),
            frames: self.frames.count,
            pages: self.queue.counters(),
            foreign: self.queue.foreign_counters(),
            mapped: learnt + fixed,
        }
    }

    /// Takes a burst, in the storage of the last; returns how many frames it had.
    #[inline]
    fn take(&mut self, spare: &mut Burst<'static>) -> Result<usize, RowError> {
        let Self { queue, frames, multicast, events, .. } = self;
        let taken = queue.poll(self.case.burst(), multicast);
        if taken == 0 {
            return Ok(0);
        }
        let Some(lent) = queue.lend() else { return Ok(0) };
        let mut burst = Burst::reuse(std::mem::take(spare));
        lent.frames(&mut burst);
        let mut good = Ok(());
        for frame in burst.frames() {
            let arrived = frames.arrived(frame.len as usize, |whole| {
                let prefix = frame.prefix();
                whole[..prefix.len()].copy_from_slice(prefix);
                let mut end = prefix.len();
                for piece in burst.rest(frame) {
                    end += piece.copy_to(&mut whole[end..]);
                }
                end
            });
            good = arrived.map_err(RowError::from);
            if good.is_err() {
                break;
            }
        }
        if burst.len() != taken && good.is_ok() {
            good = Err(RowError::failed(format!("{taken} packets were {} frames", burst.len())));
        }
        *spare = Burst::reuse(burst);
        queue.give_back(lent);
        if queue.complete() {
            events.notify_transmit()?;
        }
        good.map(|()| taken)
    }

    /// Gives a burst; returns how many frames it had.
    #[inline]
    fn give(&mut self) -> Result<usize, RowError> {
        let Self { queue, frames, events, .. } = self;
        let burst = self.case.burst();
        queue.expect(burst);
        let mut given = 0;
        while given < burst {
            let header = frames.header;
            let (first, rest) = frames.next().split_at(PREFIX);
            match queue.deliver(header, first, &[ReadSlice::from(rest)]) {
                Ok(()) => frames.count += 1,
                // What is broken is found when nothing goes any more.
                Err(Refused::NoBuffers | Refused::Broken) => break,
                Err(refused) => return Err(RowError::failed(refused)),
            }
            given += 1;
        }
        if given > 0 && queue.flush() {
            events.notify_receive()?;
        }
        Ok(given)
    }
}
