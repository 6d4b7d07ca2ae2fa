//! One queue of a virtual interface, as a port of a switch uses it.

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
use super::tx::{Rejected, Sent, Tx};

/// Pages that a queue keeps mapped at most, unless configured: both rings full of pages, and as many again for a front end
/// that holds received ones for a while. 4 MiB of addresses, 80 KiB of memory.
pub const DEFAULT_PAGES: usize = 1024;

/// How a queue serves its front end, as negotiated.
#[derive(Clone, Copy, Debug)]
pub struct QueueConfig {
    /// How pages are reached that are not [static grants](super::Control).
    pub mode: Mode,
    /// Most pages mapped at a time.
    pub pages: usize,
    /// Whether the front end takes frames that are larger than a page (`feature-sg`).
    pub sg: bool,
}

impl QueueConfig {
    /// With the default number of pages.
    pub const fn new(mode: Mode, sg: bool) -> Self {
        Self { mode, pages: DEFAULT_PAGES, sg }
    }
}

/// Why a queue cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// A ring page is unusable.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No addresses for the pages.
    #[error("no addresses are left for a queue's pages: {0}")]
    Window(#[source] io::Error),
}

/// The pages and the burst that lies in them.
#[derive(Debug)]
struct Held {
    pages: Pages,
    sent: Sent,
}

/// A burst with the pages it lies in, out of the queue while its frames are forwarded.
#[derive(Debug)]
pub struct Lent(Box<Held>);

impl Lent {
    /// Appends the frames of the burst, in the order they were sent, to `burst`.
    #[inline]
    pub fn frames<'m>(&'m self, burst: &mut Burst<'m>) {
        self.0.sent.frames(&self.0.pages, burst);
    }
}

/// What became of a frame that was not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// It is in the front end's pages.
    Done,
    /// It waits until the front end has posted more of them.
    Waits,
}

/// What became of frames that waited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Frames that were delivered.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Frames that waited for too long, and are lost.
    pub expired: u64,
}

/// A pair of rings and the pages behind them.
///
/// Sending: [`poll`](Self::poll) takes a burst; [`lend`](Self::lend) moves it out, so that other ports can be used while
/// its frames are forwarded; [`give_back`](Self::give_back) and [`complete`](Self::complete) answer it. Receiving:
/// [`expect`](Self::expect), [`deliver`](Self::deliver) each frame, [`flush`](Self::flush). With
/// [`deliver_or_wait`](Self::deliver_or_wait) frames wait for pages, up to a bound. The queue has no event channels:
/// `true` from `complete` and `flush` asks the owner to notify the front end.
///
/// Dropping the queue unmaps every page. That comes before telling the front end that we are closed.
#[derive(Debug)]
pub struct Queue<A: Words = Area> {
    tx: Tx<A>,
    rx: Rx<A>,
    held: Option<Box<Held>>,
    backlog: Backlog,
}

impl<A: Words> Queue<A> {
    /// Serves the rings in two pages, from where the last back end left them.
    ///
    /// # Errors
    /// See [`QueueError`].
    pub fn new(tx: A, rx: A, foreign: Box<dyn Foreign>, config: QueueConfig) -> Result<Self, QueueError> {
        let pages = Pages::new(foreign, config.mode, config.pages).map_err(QueueError::Window)?;
        Ok(Self {
            tx: Tx::new(BackRing::attach(tx)?),
            rx: Rx::new(BackRing::attach(rx)?, config.sg),
            held: Some(Box::new(Held { pages, sent: Sent::default() })),
            backlog: Backlog::new(0),
        })
    }

    /// Lets up to `bytes` of frames wait for pages. Only for a front end that tells when it has posted some
    /// (`feature-rx-notify`).
    #[must_use]
    pub fn with_backlog(self, bytes: usize) -> Self {
        Self { backlog: Backlog::new(bytes), ..self }
    }

    /// Why a ring is broken, if one is. The whole interface is then to be disconnected, as the front end is faulty
    /// or hostile.
    #[inline]
    pub fn fault(&self) -> Option<Fault> {
        self.tx.ring.fault().or_else(|| self.rx.ring.fault())
    }

    /// Packets that were answered with errors.
    pub fn rejected(&self) -> Rejected {
        self.tx.rejected
    }

    /// What was done with pages; nothing while they are lent out.
    pub fn counters(&self) -> PageCounters {
        self.held.as_ref().map_or_else(PageCounters::default, |held| held.pages.counters())
    }

    /// What the provider of the grants was asked to do; nothing while the pages are lent out.
    pub fn foreign_counters(&self) -> ForeignCounters {
        self.held.as_ref().map_or_else(ForeignCounters::default, |held| held.pages.foreign_counters())
    }

    /// Pages mapped for longer than a burst: learned ones, and static grants.
    pub fn mapped(&self) -> (usize, usize) {
        self.held.as_ref().map_or((0, 0), |held| held.pages.held())
    }

    /// Whether the front end has sent something.
    #[inline]
    pub fn has_packets(&mut self) -> bool {
        self.tx.ring.has_requests()
    }

    /// Asks to be told when the front end sends; whether it has already, and then nobody will tell.
    pub fn arm(&mut self) -> bool {
        self.tx.ring.final_check(1)
    }

    /// Asks to be told when the front end has posted pages for a frame of `len` bytes (`feature-rx-notify`); whether it
    /// has already.
    pub fn arm_receive(&mut self, len: usize) -> bool {
        let pages = len.div_ceil(ringferry_xen::domain::PAGE).max(1) as u32 + 1;
        self.rx.ring.final_check(pages.min(self.rx.ring.size()))
    }

    /// Takes up to `max` packets that the front end sent; returns how many. `multicast` is the filter of the interface, which
    /// packets may change. Each packet is answered by [`complete`](Self::complete), frame or not.
    #[inline]
    pub fn poll(&mut self, max: usize, multicast: &mut Multicast) -> usize {
        let Some(Held { pages, sent }) = self.held.as_deref_mut() else { return 0 };
        self.tx.poll(max, pages, sent, multicast)
    }

    /// Moves the burst out, so that its frames can be borrowed. `None` when it is out already. Without
    /// [`give_back`](Self::give_back) the queue takes and gives nothing any more.
    #[inline]
    pub fn lend(&mut self) -> Option<Lent> {
        self.held.take().map(Lent)
    }

    /// Takes the burst back.
    #[inline]
    pub fn give_back(&mut self, lent: Lent) {
        self.held = Some(lent.0);
    }

    /// Answers every packet of the last [`poll`](Self::poll); true when the front end wants to be notified.
    #[inline]
    pub fn complete(&mut self) -> bool {
        let Some(Held { pages, sent }) = self.held.as_deref_mut() else { return false };
        self.tx.complete(pages, sent)
    }

    /// Announces about how many frames follow until [`flush`](Self::flush), so that so many pages are looked up in one
    /// go.
    #[inline]
    pub fn expect(&mut self, frames: usize) {
        self.rx.expect(frames);
    }

    /// Writes one frame, `first` and then `rest`, into the front end's next pages. It does not see the frame before
    /// [`flush`](Self::flush).
    ///
    /// # Errors
    /// See [`Refused`].
    #[inline]
    pub fn deliver(&mut self, header: Header, first: &[u8], rest: &[ReadSlice<'_>]) -> Result<(), Refused> {
        let Some(Held { pages, .. }) = self.held.as_deref_mut() else { return Err(Refused::Lent) };
        self.rx.deliver(pages, header, first, rest)
    }

    /// As [`deliver`](Self::deliver), but a frame for which there are no pages waits for them, if there is room, and all that
    /// come after it wait behind it. Then call [`drain`](Self::drain) before each flush, and after the flush
    /// [`arm_backlog`](Self::arm_backlog).
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
            // Not behind others, only to be refused then.
            self.rx.shape(&header, first.len() + rest.iter().map(ReadSlice::len).sum::<usize>())?;
        }
        let waits = self.rx.ring.fault().is_none() && self.backlog.push(header, first, rest);
        if waits { Ok(Delivery::Waits) } else { Err(Refused::NoBuffers) }
    }

    /// Whether frames wait for pages.
    #[inline]
    pub fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Frames that ever had to wait.
    pub fn waited(&self) -> u64 {
        self.backlog.waited()
    }

    /// Delivers frames that waited, as far as there are pages now.
    #[cold]
    pub fn drain(&mut self) -> Drained {
        let mut drained = Drained { expired: self.backlog.expire(Instant::now()), ..Drained::default() };
        let Some(Held { pages, .. }) = self.held.as_deref_mut() else { return drained };
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

    /// Asks to be told when there are pages for the frame that waits longest; whether there are already, and then nobody will
    /// tell. Not while there is something to [flush](Self::flush).
    pub fn arm_backlog(&mut self) -> bool {
        let Some(frame) = self.backlog.front() else { return false };
        // Its shape was checked before it came to wait.
        let slots = self.rx.shape(&frame.header, frame.bytes.len()).map_or(1, |(_, slots)| slots);
        self.rx.ring.final_check(slots as u32)
    }

    /// Shows the front end what was delivered; true when it wants to be notified.
    #[inline]
    pub fn flush(&mut self) -> bool {
        let Some(Held { pages, .. }) = self.held.as_deref_mut() else { return false };
        self.rx.flush(pages)
    }

    /// How many requests the front end has made and how many were answered, modulo 2^32: of the ring it sends on, and of the
    /// one it receives from.
    pub fn positions(&self) -> [(u32, u32); 2] {
        let tx = (self.tx.ring.next_request(), self.tx.ring.next_response());
        [tx, (self.rx.ring.next_request(), self.rx.ring.next_response())]
    }

    /// How many static grants there is room for.
    ///
    /// # Errors
    /// The pages are lent out.
    pub fn static_capacity(&self) -> Result<u32, Status> {
        let held = self.held.as_ref().ok_or(Status::InvalidParameter)?;
        Ok(held.pages.capacity() as u32)
    }

    /// Maps grants for good: all or none.
    ///
    /// # Errors
    /// What the front end is answered.
    pub fn add_static(&mut self, entries: &[GrefEntry]) -> Result<(), Status> {
        self.held.as_mut().ok_or(Status::InvalidParameter)?.pages.add_static(entries)
    }

    /// Unmaps static grants, and says in each entry what became of it; how many are unmapped.
    ///
    /// # Errors
    /// The pages are lent out.
    pub fn remove_static(&mut self, entries: &mut [GrefEntry]) -> Result<u32, Status> {
        Ok(self.held.as_mut().ok_or(Status::InvalidParameter)?.pages.remove_static(entries))
    }
}
