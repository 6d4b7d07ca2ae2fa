//! Packet capture on a worker: copies of frames, for whoever watches a port.
//!
//! **Life cycle.** A client's capture is kept by the control plane ([`crate::captures`]), which gives every worker a [`Tap`] for each port of it
//! ([`Workers::capture`](super::Workers::capture)). A port that is captured has a [`PortCapture`] with its taps; other ports have none, which is all that
//! they are asked. Frames are offered by the worker's thread: those that come in, by the worker before they are forwarded; those that go out, by the
//! [port](super::port) when its queue has taken them; those that are dropped, where they are counted. Taps end with the capture or with their port.
//!
//! **Mirrors** (`ringferry ctl mirror`) are taps that copy for another port in place of a client; the worker delivers the copies at the end of its round.
//!
//! **What is offered.** A frame that comes in is as it was sent: with its virtual header, before anything was done in software, and in the VLAN that its
//! tag says. One that goes out is as it was delivered: cut, merged, retagged. A tap's filter is run on the frame where it lies, before anything is copied.
//! The copy is one of its own, so a sender that changes its memory meanwhile can make it differ from what was delivered, behind the first bytes.
//!
//! **Shares.** Capturing is work of the port: its [price](cost::of_capture) is charged to whoever is charged for the frame. All captures of a worker
//! together may use 14 % of its time; what is beyond it is not looked at, and counted as lost. So a captured port is slower by that much at most,
//! and others are not slower at all. Half of it is [anybody's](SHARE), and half is [reserved](RESERVE) in equal parts for the ports that are captured, as one that sends without end
//! would otherwise leave the others nothing: what is captured of a victim would have holes where its attacker wants them. A ring that is full costs its records and nothing else.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ringferry_control::DropReason;
use ringferry_control::capture::Direction;
use ringferry_control::capture::ring::{Counts, Record, RingWriter};
use ringferry_memory::ReadSlice;
use ringferry_packet::filter::Filter;
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::vnet::Header;

use crate::fdb::PortId;
use crate::plane::cost;
use crate::plane::now::Now;
use crate::plane::policy::token_bucket::TokenBucket;
use crate::plane::policy::vlan;
use crate::rules::{Rate, Vid};

/// What all captures of a worker may cost beside what is reserved, in nanoseconds in a second of its time, and at once.
const SHARE: Rate = Rate { per_second: 70_000_000, burst: 10_000_000 };

/// What is reserved for the ports that are captured, in nanoseconds in each [window](WINDOW): as much again.
const RESERVE: u64 = 700_000;

/// Microseconds in which a port may use its part of the reserve.
const WINDOW: u64 = 10_000;

/// Nanoseconds after which it is looked again whether there is time left: a frame of many pieces, and a filter that looks through them, can take a millisecond.
const AT_ONCE: u64 = 100_000;

/// The number of a capture, never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureId(pub u32);

/// The part of a worker's time that captures may use.
#[derive(Debug)]
pub(crate) struct CaptureShare {
    bucket: TokenBucket,
    /// Ports that are captured.
    ports: AtomicU64,
}

impl Default for CaptureShare {
    fn default() -> Self {
        Self { bucket: TokenBucket::new(SHARE), ports: AtomicU64::new(0) }
    }
}

/// The part of it that one port may use.
#[derive(Debug)]
struct Budget {
    share: Arc<CaptureShare>,
    /// The window that was last used, and what of its reserve was.
    window: Cell<u64>,
    used: Cell<u64>,
}

impl Budget {
    fn new(share: Arc<CaptureShare>) -> Self {
        share.ports.fetch_add(1, Ordering::Relaxed);
        Self { share, window: Cell::new(0), used: Cell::new(0) }
    }

    /// What is reserved for this port in a window.
    fn part(&self) -> u64 {
        RESERVE / self.share.ports.load(Ordering::Relaxed).max(1)
    }

    /// Whether there is time to look at more.
    fn is_left(&self, now: &Now) -> bool {
        let window = now.micros() / WINDOW;
        if self.window.replace(window) != window {
            self.used.set(0);
        }
        self.used.get() < self.part() || self.share.bucket.wait(now.micros()) == 0
    }

    /// Charges what was used: first to the reserve.
    fn charge(&self, price: u64, now: &Now) {
        let reserved = self.part().saturating_sub(self.used.get()).min(price);
        self.used.set(self.used.get() + reserved);
        if price > reserved {
            self.share.bucket.charge(price - reserved, now.micros());
        }
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.share.ports.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Which frames a capture is about.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// One direction only.
    pub direction: Option<Direction>,
    /// Frames that pass: those that come in, and those that go out.
    pub passing: bool,
    /// Frames that are dropped.
    pub dropped: bool,
    /// Bytes of each frame to keep.
    pub snaplen: u32,
    /// Frames for which this is true, if there is a filter.
    pub filter: Option<Arc<Filter>>,
}

/// One port of a capture, or of a mirror, in one worker.
#[derive(Debug)]
pub struct Tap {
    capture: CaptureId,
    wanted: Wanted,
    sink: Sink,
}

/// Where what is captured goes.
#[derive(Debug)]
enum Sink {
    /// To a client.
    Ring {
        /// The port's number in the capture.
        interface: u16,
        writer: Arc<RingWriter>,
        counts: Cell<Counts>,
    },
    /// To another port.
    Mirror {
        to: PortId,
        /// Frames of one VLAN only.
        vlan: Option<Vid>,
        counts: Arc<MirrorCounts>,
        /// What was copied since the worker last delivered it.
        copies: RefCell<Vec<Copied>>,
    },
}

/// Most copies of a port that wait until the worker has made its round: a burst of each of 32 queues.
const MOST_COPIES: usize = 1024;

/// A copy of a frame for another port.
#[derive(Debug)]
pub(crate) struct Copied {
    pub(crate) to: PortId,
    pub(crate) header: Header,
    pub(crate) frame: Vec<u8>,
}

/// What a mirror has done, in all workers.
#[derive(Debug, Default)]
pub struct MirrorCounts {
    /// Frames that were copied.
    pub copied: AtomicU64,
    /// Frames that were not: there was no time for it.
    pub lost: AtomicU64,
}

impl Tap {
    /// Makes a tap that writes to the ring of its worker. Counters go on where an earlier tap of the same port has left them.
    pub fn new(capture: CaptureId, interface: u16, wanted: Wanted, writer: Arc<RingWriter>) -> Self {
        let counts = Cell::new(writer.shown(interface));
        Self { capture, wanted, sink: Sink::Ring { interface, writer, counts } }
    }

    /// Makes a tap that copies what passes to another port.
    pub fn mirror(
        capture: CaptureId,
        direction: Option<Direction>,
        to: PortId,
        vlan: Option<Vid>,
        counts: Arc<MirrorCounts>,
    ) -> Self {
        let wanted = Wanted { direction, passing: true, dropped: false, snaplen: u32::MAX, filter: None };
        Self { capture, wanted, sink: Sink::Mirror { to, vlan, counts, copies: RefCell::default() } }
    }

    /// Whether it copies to another port.
    pub(crate) fn is_mirror(&self) -> bool {
        matches!(self.sink, Sink::Mirror { .. })
    }
}

/// What happens to frames that are offered to a capture.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    /// Which way they go. Of a frame that is dropped: where it was counted, at the port that it came from or the one it would have left by.
    pub(crate) direction: Direction,
    /// Why they are dropped, if they are.
    pub(crate) dropped: Option<DropReason>,
    /// The queue pair, if it is known.
    pub(crate) queue: Option<u16>,
}

impl Event {
    /// Frames that are dropped at the port that they came from.
    pub(crate) const fn refused(reason: DropReason, queue: Option<u16>) -> Event {
        Event { direction: Direction::In, dropped: Some(reason), queue }
    }

    /// Frames that are dropped at the port that they would have left by.
    pub(crate) const fn lost(reason: DropReason) -> Event {
        Event { direction: Direction::Out, dropped: Some(reason), queue: None }
    }

    /// Frames that a port's queue has taken.
    pub(crate) const fn delivered(queue: Option<u16>) -> Event {
        Event { direction: Direction::Out, dropped: None, queue }
    }
}

/// A frame that is offered to a capture: the concatenation of `first` and `rest`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offered<'f, 'm> {
    pub(crate) header: Header,
    pub(crate) first: &'f [u8],
    pub(crate) rest: &'f [ReadSlice<'m>],
    pub(crate) len: u32,
}

impl<'f, 'm> Offered<'f, 'm> {
    /// A frame of a burst.
    pub(crate) fn of(burst: &'f Burst<'m>, frame: &'f Frame) -> Self {
        Self { header: frame.header, first: frame.prefix(), rest: burst.rest(frame), len: frame.len }
    }

    /// A frame in private memory.
    pub(crate) fn private(header: Header, frame: &'f [u8]) -> Self {
        Self { header, first: frame, rest: &[], len: frame.len() as u32 }
    }
}

/// The captures of a port, in one worker.
#[derive(Debug)]
pub(crate) struct PortCapture {
    taps: Vec<Tap>,
    budget: Budget,
    /// Cost of what was captured since it was last asked for.
    cost: Cell<u64>,
    /// The VLAN of frames without a tag.
    native: Cell<Option<Vid>>,
}

impl PortCapture {
    pub(crate) fn new(share: Arc<CaptureShare>) -> Self {
        Self { taps: Vec::new(), budget: Budget::new(share), cost: Cell::new(0), native: Cell::new(None) }
    }

    pub(crate) fn add(&mut self, tap: Tap) {
        self.taps.push(tap);
    }

    /// Ends a capture at the port; whether another one is left.
    pub(crate) fn end(&mut self, capture: CaptureId) -> bool {
        self.taps.retain(|tap| tap.capture != capture);
        !self.taps.is_empty()
    }

    /// Says in which VLAN frames without a tag are.
    pub(crate) fn set_native(&self, native: Option<Vid>) {
        self.native.set(native);
    }

    /// Whether some tap copies to another port.
    pub(crate) fn mirrors(&self) -> bool {
        self.taps.iter().any(Tap::is_mirror)
    }

    /// Takes what was copied for other ports.
    pub(crate) fn take_mirrored(&self) -> Vec<Copied> {
        let mut all = Vec::new();
        for tap in &self.taps {
            if let Sink::Mirror { copies, .. } = &tap.sink {
                all.append(&mut copies.borrow_mut());
            }
        }
        all
    }

    /// Takes the cost of what was captured since this was last called.
    pub(crate) fn take_cost(&self) -> u64 {
        self.cost.take()
    }

    /// Returns the captures and mirrors that would take a frame, whatever time and room they have.
    pub(crate) fn would_take(&self, event: Event, frame: Offered<'_, '_>) -> Vec<CaptureId> {
        let takes = |tap: &&Tap| {
            tap.wanted.is_meant(event)
                && match &tap.sink {
                    Sink::Ring { .. } => tap.wanted.passes(frame),
                    Sink::Mirror { vlan, .. } => self.is_in(*vlan, frame),
                }
        };
        self.taps.iter().filter(takes).map(|tap| tap.capture).collect()
    }

    /// Returns whether a frame is in this VLAN, if one is wanted.
    fn is_in(&self, vlan: Option<Vid>, frame: Offered<'_, '_>) -> bool {
        vlan.is_none_or(|vlan| vlan_of(frame.first, self.native.get()) == Some(vlan))
    }

    /// Offers frames to the taps that want them.
    #[inline(never)]
    pub(crate) fn offer<'f, 'm: 'f>(
        &self,
        event: Event,
        now: &Now,
        frames: impl Iterator<Item = Offered<'f, 'm>> + Clone,
    ) {
        for tap in &self.taps {
            if tap.wanted.is_meant(event) {
                let price = match &tap.sink {
                    Sink::Ring { interface, writer, counts } => {
                        let ring = (*interface, &**writer, counts);
                        tap.wanted.record(event, now, &self.budget, ring, frames.clone())
                    }
                    Sink::Mirror { to, vlan, counts, copies } => {
                        let frames = frames.clone().filter(|frame| self.is_in(*vlan, *frame));
                        mirror(now, &self.budget, *to, counts, &mut copies.borrow_mut(), frames)
                    }
                };
                self.cost.set(self.cost.get() + price);
            }
        }
    }

    /// Offers one frame.
    pub(crate) fn offer_one(&self, event: Event, now: &Now, frame: Offered<'_, '_>) {
        self.offer(event, now, std::iter::once(frame));
    }
}

/// Returns the VLAN of a frame that is as it passes a port.
fn vlan_of(first: &[u8], native: Option<Vid>) -> Option<Vid> {
    match vlan::tag(first) {
        Some(0) | None => native,
        tagged => tagged,
    }
}

/// Copies frames for another port; what that cost.
fn mirror<'f, 'm: 'f>(
    now: &Now,
    budget: &Budget,
    to: PortId,
    counts: &MirrorCounts,
    copies: &mut Vec<Copied>,
    frames: impl Iterator<Item = Offered<'f, 'm>>,
) -> u64 {
    let (mut copied, mut lost, mut price) = (0, 0, 0);
    let is_due = budget.is_left(now);
    for Offered { header, first, rest, len } in frames {
        if !is_due || copies.len() >= MOST_COPIES {
            lost += 1;
            continue;
        }
        let mut frame = Vec::with_capacity(len as usize);
        frame.extend_from_slice(first);
        for piece in rest {
            let at = frame.len();
            frame.resize(at + piece.len(), 0);
            piece.copy_to(&mut frame[at..]);
        }
        copies.push(Copied { to, header, frame });
        copied += 1;
        price += cost::of_capture(len.into());
    }
    budget.charge(price, now);
    counts.copied.fetch_add(copied, Ordering::Relaxed);
    counts.lost.fetch_add(lost, Ordering::Relaxed);
    price
}

impl Wanted {
    /// Returns whether frames to which this happens are wanted.
    fn is_meant(&self, event: Event) -> bool {
        let wanted = if event.dropped.is_some() { self.dropped } else { self.passing };
        wanted && self.direction.is_none_or(|only| only == event.direction)
    }

    /// Returns whether a frame passes the filter.
    fn passes(&self, Offered { first, rest, len, .. }: Offered<'_, '_>) -> bool {
        self.filter.as_ref().is_none_or(|filter| filter.matches(first, rest, len))
    }

    /// Records what is wanted of these frames in the ring of a client; what that cost.
    fn record<'f, 'm: 'f>(
        &self,
        event: Event,
        now: &Now,
        budget: &Budget,
        (interface, writer, shown): (u16, &RingWriter, &Cell<Counts>),
        frames: impl Iterator<Item = Offered<'f, 'm>>,
    ) -> u64 {
        let Wanted { snaplen, filter, .. } = self;
        let mut counts = shown.get();
        let (mut is_due, mut unpaid, mut price) = (budget.is_left(now), 0, 0);
        let (instructions, far_loads) =
            filter.as_ref().map_or((0, 0), |filter| (filter.instructions(), filter.far_loads()));
        for frame in frames {
            counts.seen = counts.seen.wrapping_add(1);
            if unpaid >= AT_ONCE {
                budget.charge(std::mem::take(&mut unpaid), now);
                is_due = budget.is_left(now);
            }
            if !is_due {
                counts.lost = counts.lost.wrapping_add(1);
                continue;
            }
            let passes = self.passes(frame);
            let Offered { header, first, rest, len } = frame;
            let captured = if passes { len.min(*snaplen) } else { 0 };
            let each =
                cost::of_capture(captured.into()) + cost::of_filter(instructions, far_loads, rest.len());
            (unpaid, price) = (unpaid + each, price + each);
            if !passes {
                continue;
            }
            let record = Record {
                stamp: now.wall_nanos(),
                interface,
                queue: event.queue,
                original: len,
                direction: event.direction,
                dropped: event.dropped,
                header,
            };
            if writer.push(&record, first, rest, *snaplen) {
                counts.accepted = counts.accepted.wrapping_add(1);
            } else {
                counts.lost = counts.lost.wrapping_add(1);
            }
        }
        budget.charge(unpaid, now);
        shown.set(counts);
        writer.show(interface, counts);
        price
    }
}
