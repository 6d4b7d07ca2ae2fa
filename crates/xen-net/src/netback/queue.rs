//! [`Queue`]: one queue of a virtual interface, as a port of a switch uses it.
//!
//! An owner creates it from the mapped rings of a connected interface, uses it from one thread in
//! the order that [`Queue`] describes, and drops it before the interface is reported as
//! disconnected.

use std::io;
use std::time::Instant;

use ringferry_memory::{Area, ReadSlice, Words};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_xen::grant::{Foreign, ForeignCounters};
use ringferry_xen::netif::control::{GrefEntry, Status};
use ringferry_xen::netif::{BackRing, Fault, LayoutError};

use super::backlog::Backlog;
use super::multicast::Multicast;
use super::pages::{Mode, PageCounters, Pages};
use super::rx::{Refused, Rx};
use super::tx::{Rejected, Tx, TxBurst};

/// Default for the most pages that a queue keeps mapped: both rings full of pages, and as many
/// again for a front end that holds received ones for a while. They take 4 MiB of addresses and 80
/// KiB of memory.
pub const DEFAULT_PAGES: usize = 1024;

/// The settings of a queue, as negotiated.
#[derive(Clone, Copy, Debug)]
pub struct QueueConfig {
    /// Access to pages that are not [static grants](super::Control).
    pub mode: Mode,
    /// Most pages that may be mapped at a time.
    pub pages: usize,
    /// True if the front end accepts frames of several pages (`feature-sg`).
    pub sg: bool,
}

impl QueueConfig {
    /// Creates settings with the default number of pages.
    pub const fn new(mode: Mode, sg: bool) -> Self {
        Self { mode, pages: DEFAULT_PAGES, sg }
    }
}

/// The reason why a queue cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The page of a ring is unusable.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The process has no addresses left for the pages.
    #[error("no addresses are left for a queue's pages: {0}")]
    Window(#[source] io::Error),
}

/// The pages, and the transmit burst that lies in them.
#[derive(Debug)]
struct PagesAndBurst {
    pages: Pages,
    sent: TxBurst,
}

/// A transmit burst with the pages that it lies in, moved out of the queue while its frames are
/// forwarded.
#[derive(Debug)]
pub struct Lent(Box<PagesAndBurst>);

impl Lent {
    /// Appends the frames of the burst to `burst`, in the order in which they were sent.
    #[inline]
    pub fn frames<'m>(&'m self, burst: &mut Burst<'m>) {
        self.0.sent.frames(&self.0.pages, burst);
    }
}

/// The result for a frame that was not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The frame was written to the front end's pages.
    Done,
    /// The frame waits until the front end has posted more pages.
    Waits,
}

/// The result of draining the backlog.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Number of frames that were delivered.
    pub frames: u64,
    /// Number of bytes in those frames.
    pub bytes: u64,
    /// Number of frames that were dropped, because they waited for too long.
    pub expired: u64,
}

/// A pair of rings with the pages behind them.
///
/// The owner handles transmit bursts with [`poll`](Self::poll); [`lend`](Self::lend), which moves
/// the burst out, so that other ports can be used while its frames are forwarded;
/// [`give_back`](Self::give_back); and [`complete`](Self::complete), which sends the responses. It
/// delivers frames with [`expect`](Self::expect), [`deliver`](Self::deliver) for each, and
/// [`flush`](Self::flush). With [`deliver_or_wait`](Self::deliver_or_wait) frames wait for pages,
/// up to a bound. The queue has no event channels: when `complete` or `flush` returns true, the
/// owner signals the front end.
///
/// Dropping the queue unmaps every page. It must happen before the front end is told that the back
/// end closed.
#[derive(Debug)]
pub struct Queue<A: Words = Area> {
    tx: Tx<A>,
    rx: Rx<A>,
    held: Option<Box<PagesAndBurst>>,
    backlog: Backlog,
}

impl<A: Words> Queue<A> {
    /// Attaches to the rings in two pages, at the positions where the last back end left them.
    ///
    /// # Errors
    /// Any [`QueueError`].
    pub fn new(tx: A, rx: A, foreign: Box<dyn Foreign>, config: QueueConfig) -> Result<Self, QueueError> {
        let pages = Pages::new(foreign, config.mode, config.pages).map_err(QueueError::Window)?;
        Ok(Self {
            tx: Tx::new(BackRing::attach(tx)?),
            rx: Rx::new(BackRing::attach(rx)?, config.sg),
            held: Some(Box::new(PagesAndBurst { pages, sent: TxBurst::default() })),
            backlog: Backlog::new(0),
        })
    }

    /// Allows up to `bytes` bytes of frames to wait for pages. Use it only for a front end that
    /// signals when it has posted some (`feature-rx-notify`).
    #[must_use]
    pub fn with_backlog(self, bytes: usize) -> Self {
        Self { backlog: Backlog::new(bytes), ..self }
    }

    /// Returns the violation that broke one of the rings, if any. The whole interface is then to be
    /// disconnected, because the front end is faulty or hostile.
    #[inline]
    pub fn fault(&self) -> Option<Fault> {
        self.tx.ring.fault().or_else(|| self.rx.ring.fault())
    }

    /// Returns the counters of packets that were answered with errors.
    pub fn rejected(&self) -> Rejected {
        self.tx.rejected
    }

    /// Returns the counters of page accesses; all 0 while the pages are lent out.
    pub fn counters(&self) -> PageCounters {
        self.held.as_ref().map_or_else(PageCounters::default, |held| held.pages.counters())
    }

    /// Returns the counters of the grant provider; all 0 while the pages are lent out.
    pub fn foreign_counters(&self) -> ForeignCounters {
        self.held.as_ref().map_or_else(ForeignCounters::default, |held| held.pages.foreign_counters())
    }

    /// Returns the number of pages mapped for longer than a burst: those in the cache, and static
    /// grants.
    pub fn mapped(&self) -> (usize, usize) {
        self.held.as_ref().map_or((0, 0), |held| held.pages.held())
    }

    /// Returns true if the front end has sent packets.
    #[inline]
    pub fn has_packets(&mut self) -> bool {
        self.tx.ring.has_requests()
    }

    /// Asks for an event when the front end sends; returns true if it has sent already, and then no
    /// event comes.
    pub fn arm(&mut self) -> bool {
        self.tx.ring.final_check(1)
    }

    /// Asks for an event when the front end has posted pages for a frame of `len` bytes
    /// (`feature-rx-notify`); returns true if it has posted them already.
    pub fn arm_receive(&mut self, len: usize) -> bool {
        let pages = len.div_ceil(ringferry_xen::domain::PAGE).max(1) as u32 + 1;
        self.rx.ring.final_check(pages.min(self.rx.ring.size()))
    }

    /// Takes up to `max` packets that the front end sent; returns how many. `multicast` is the
    /// filter of the interface, which packets may change. [`complete`](Self::complete) answers each
    /// packet, valid or not.
    #[inline]
    pub fn poll(&mut self, max: usize, multicast: &mut Multicast) -> usize {
        let Some(PagesAndBurst { pages, sent }) = self.held.as_deref_mut() else { return 0 };
        self.tx.poll(max, pages, sent, multicast)
    }

    /// Moves the burst out, so that its frames can be borrowed; `None` when it is out already.
    /// Until [`give_back`](Self::give_back) the queue takes and delivers nothing.
    #[inline]
    pub fn lend(&mut self) -> Option<Lent> {
        self.held.take().map(Lent)
    }

    /// Puts a lent burst back into the queue.
    #[inline]
    pub fn give_back(&mut self, lent: Lent) {
        self.held = Some(lent.0);
    }

    /// Sends the responses to every packet of the last [`poll`](Self::poll); returns true if the
    /// front end wants an event.
    #[inline]
    pub fn complete(&mut self) -> bool {
        let Some(PagesAndBurst { pages, sent }) = self.held.as_deref_mut() else { return false };
        self.tx.complete(pages, sent)
    }

    /// Announces that about `frames` frames follow until [`flush`](Self::flush), so that this many
    /// pages are looked up at once.
    #[inline]
    pub fn expect(&mut self, frames: usize) {
        self.rx.expect(frames);
    }

    /// Writes one frame, `first` and then `rest`, into the front end's next pages. The front end
    /// does not see it before [`flush`](Self::flush).
    ///
    /// # Errors
    /// See [`Refused`].
    #[inline]
    pub fn deliver(&mut self, header: Header, first: &[u8], rest: &[ReadSlice<'_>]) -> Result<(), Refused> {
        let Some(PagesAndBurst { pages, .. }) = self.held.as_deref_mut() else { return Err(Refused::Lent) };
        self.rx.deliver(pages, header, first, rest)
    }

    /// Does the same as [`deliver`](Self::deliver), but a frame for which there are no pages waits
    /// for them, if there is room, and all frames after it wait behind it. The owner then calls
    /// [`drain`](Self::drain) before each flush, and [`arm_backlog`](Self::arm_backlog) after it.
    ///
    /// # Errors
    /// See [`Refused`].
    #[inline]
    pub fn deliver_or_wait(
        &mut self,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
    ) -> Result<Delivery, Refused> {
        if self.backlog.is_empty() {
            match self.deliver(header, first, rest) {
                Ok(()) => return Ok(Delivery::Done),
                Err(Refused::NoBuffers) => {}
                Err(refused) => return Err(refused),
            }
        } else {
            // A frame that would be refused in the end must not wait behind others.
            self.rx.shape(&header, first.len() + rest.iter().map(ReadSlice::len).sum::<usize>())?;
        }
        let waits = self.rx.ring.fault().is_none() && self.backlog.push(header, first, rest);
        if waits { Ok(Delivery::Waits) } else { Err(Refused::NoBuffers) }
    }

    /// Returns what [`deliver_or_wait`](Self::deliver_or_wait) would say now to frames with these
    /// headers and lengths, one after the other. Nothing is written and no page is taken. Called
    /// between two bursts.
    pub fn probe(
        &mut self,
        frames: impl IntoIterator<Item = (Header, usize)>,
    ) -> Vec<Result<Delivery, Refused>> {
        let Self { rx, backlog, .. } = self;
        let (mut pages, mut waiting) = (rx.ring.refresh() as usize, !backlog.is_empty());
        let mut room = backlog.room();
        let results = frames.into_iter().map(|(header, len)| {
            if rx.ring.fault().is_some() {
                return Err(Refused::Broken);
            }
            let (_, slots) = rx.shape(&header, len)?;
            if !waiting && slots <= pages {
                pages -= slots;
                return Ok(Delivery::Done);
            }
            if len > room {
                return Err(Refused::NoBuffers);
            }
            (room, waiting) = (room - len, true);
            Ok(Delivery::Waits)
        });
        results.collect()
    }

    /// Returns true if frames wait for pages.
    #[inline]
    pub fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Returns the number of frames that ever waited.
    pub fn waited(&self) -> u64 {
        self.backlog.waited()
    }

    /// Delivers waiting frames, as many as there are pages for, and drops those that waited too
    /// long.
    #[cold]
    pub fn drain(&mut self) -> Drained {
        let mut drained = Drained { expired: self.backlog.expire(Instant::now()), ..Drained::default() };
        let Some(PagesAndBurst { pages, .. }) = self.held.as_deref_mut() else { return drained };
        while let Some(frame) = self.backlog.front() {
            match self.rx.deliver(pages, frame.header, &frame.bytes, &[]) {
                Ok(()) => {
                    drained.frames += 1;
                    drained.bytes += frame.bytes.len() as u64;
                }
                Err(Refused::NoBuffers) => break,
                Err(_) => drained.expired += 1,
            }
            self.backlog.pop();
        }
        drained
    }

    /// Asks for an event when there are pages for the oldest waiting frame; returns true if there
    /// are already, and then no event comes. Call it only when nothing is left to
    /// [flush](Self::flush).
    pub fn arm_backlog(&mut self) -> bool {
        let Some(frame) = self.backlog.front() else { return false };
        // The frame's size and offloads were checked before it was queued.
        let slots = self.rx.shape(&frame.header, frame.bytes.len()).map_or(1, |(_, slots)| slots);
        self.rx.ring.final_check(slots as u32)
    }

    /// Publishes the delivered frames to the front end; returns true if it wants an event.
    #[inline]
    pub fn flush(&mut self) -> bool {
        let Some(PagesAndBurst { pages, .. }) = self.held.as_deref_mut() else { return false };
        self.rx.flush(pages)
    }

    /// Returns how many requests were taken and how many were answered, modulo 2^32: of the
    /// transmit ring first, then of the receive ring.
    pub fn positions(&self) -> [(u32, u32); 2] {
        let tx = (self.tx.ring.next_request(), self.tx.ring.next_response());
        [tx, (self.rx.ring.next_request(), self.rx.ring.next_response())]
    }

    /// Returns how many static grants the queue has room for.
    ///
    /// # Errors
    /// [`Status::InvalidParameter`] while the pages are lent out.
    pub fn static_capacity(&self) -> Result<u32, Status> {
        let held = self.held.as_ref().ok_or(Status::InvalidParameter)?;
        Ok(held.pages.capacity() as u32)
    }

    /// Maps static grants, all of them or none.
    ///
    /// # Errors
    /// The status for the response to the front end.
    pub fn add_static(&mut self, entries: &[GrefEntry]) -> Result<(), Status> {
        self.held.as_mut().ok_or(Status::InvalidParameter)?.pages.add_static(entries)
    }

    /// Unmaps static grants, sets the status of each entry, and returns how many were unmapped.
    ///
    /// # Errors
    /// [`Status::InvalidParameter`] while the pages are lent out.
    pub fn remove_static(&mut self, entries: &mut [GrefEntry]) -> Result<u32, Status> {
        Ok(self.held.as_mut().ok_or(Status::InvalidParameter)?.pages.remove_static(entries))
    }
}
