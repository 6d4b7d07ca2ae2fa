//! Packet capture on a worker: copies of frames, for whoever watches a port.
//!
//! **Life cycle.** A client's capture is kept by the control plane ([`crate::captures`]), which gives every worker a [`Tap`] for each port of it
//! ([`Workers::capture`](super::Workers::capture)). A port that is captured has a [`PortCapture`] with its taps; other ports have none, which is all that
//! they are asked. Frames are offered by the worker's thread: those that come in, by the worker before they are forwarded; those that go out, by the
//! [port](super::port) when its queue has taken them; those that are dropped, where they are counted. Taps end with the capture or with their port.
//!
//! **What is offered.** A frame that comes in is as it was sent: with its virtual header, before anything was done in software, and in the VLAN that its
//! tag says. One that goes out is as it was delivered: cut, merged, retagged. A tap's filter is run on the frame where it lies, before anything is copied.
//! The copy is one of its own, so a sender that changes its memory meanwhile can make it differ from what was delivered, behind the first bytes.
//!
//! **Shares.** Capturing is work of the port: its [price](cost::of_capture) is charged to whoever is charged for the frame. All captures of a worker
//! together may use [`SHARE`] of its time; what is beyond it is not looked at, and counted as lost. So a captured port is slower by that much at most,
//! and others are not slower at all. A ring that is full costs its records and nothing else.

use std::cell::Cell;
use std::sync::Arc;

use ringferry_control::DropReason;
use ringferry_control::capture::Direction;
use ringferry_control::capture::ring::{Counts, Record, RingWriter};
use ringferry_memory::ReadSlice;
use ringferry_packet::filter::Filter;
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::vnet::Header;

use crate::plane::cost;
use crate::plane::now::Now;
use crate::plane::policy::token_bucket::TokenBucket;
use crate::rules::Rate;

/// What all captures of a worker may cost, in nanoseconds in a second of its time, and at once.
const SHARE: Rate = Rate { per_second: 140_000_000, burst: 10_000_000 };

/// The number of a capture, never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureId(pub u32);

/// The part of a worker's time that captures may use.
#[derive(Debug)]
pub(crate) struct CaptureShare(TokenBucket);

impl Default for CaptureShare {
    fn default() -> Self {
        Self(TokenBucket::new(SHARE))
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

/// One port of a capture, in one worker.
#[derive(Debug)]
pub struct Tap {
    capture: CaptureId,
    /// The port's number in the capture.
    interface: u16,
    wanted: Wanted,
    writer: Arc<RingWriter>,
    counts: Cell<Counts>,
}

impl Tap {
    /// Makes a tap that writes to the ring of its worker. Counters go on where an earlier tap of the same port has left them.
    pub fn new(capture: CaptureId, interface: u16, wanted: Wanted, writer: Arc<RingWriter>) -> Self {
        let counts = Cell::new(writer.shown(interface));
        Self { capture, interface, wanted, writer, counts }
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
    share: Arc<CaptureShare>,
    /// Cost of what was captured since it was last asked for.
    cost: Cell<u64>,
}

impl PortCapture {
    pub(crate) fn new(share: Arc<CaptureShare>) -> Self {
        Self { taps: Vec::new(), share, cost: Cell::new(0) }
    }

    pub(crate) fn add(&mut self, tap: Tap) {
        self.taps.push(tap);
    }

    /// Ends a capture at the port; whether another one is left.
    pub(crate) fn end(&mut self, capture: CaptureId) -> bool {
        self.taps.retain(|tap| tap.capture != capture);
        !self.taps.is_empty()
    }

    /// Takes the cost of what was captured since this was last called.
    pub(crate) fn take_cost(&self) -> u64 {
        self.cost.take()
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
            let Wanted { direction, passing, dropped, .. } = tap.wanted;
            let wanted = if event.dropped.is_some() { dropped } else { passing };
            if wanted && direction.is_none_or(|only| only == event.direction) {
                let price = tap.offer(event, now, &self.share, frames.clone());
                self.cost.set(self.cost.get() + price);
            }
        }
    }

    /// Offers one frame.
    pub(crate) fn offer_one(&self, event: Event, now: &Now, frame: Offered<'_, '_>) {
        self.offer(event, now, std::iter::once(frame));
    }
}

impl Tap {
    /// Takes what it wants of these frames; what that cost.
    fn offer<'f, 'm: 'f>(
        &self,
        event: Event,
        now: &Now,
        CaptureShare(share): &CaptureShare,
        frames: impl Iterator<Item = Offered<'f, 'm>>,
    ) -> u64 {
        let Wanted { snaplen, filter, .. } = &self.wanted;
        let mut counts = self.counts.get();
        let mut price = 0;
        if share.wait(now.micros()) > 0 {
            let count = frames.count() as u64;
            counts.seen = counts.seen.wrapping_add(count);
            counts.lost = counts.lost.wrapping_add(count);
        } else {
            let instructions = filter.as_ref().map_or(0, |filter| filter.instructions());
            for Offered { header, first, rest, len } in frames {
                counts.seen = counts.seen.wrapping_add(1);
                let passes = filter.as_ref().is_none_or(|filter| filter.matches(first, rest, len));
                let captured = if passes { len.min(*snaplen) } else { 0 };
                price += cost::of_capture(captured.into(), instructions);
                if !passes {
                    continue;
                }
                let record = Record {
                    stamp: now.wall_nanos(),
                    interface: self.interface,
                    queue: event.queue,
                    original: len,
                    direction: event.direction,
                    dropped: event.dropped,
                    header,
                };
                if self.writer.push(&record, first, rest, *snaplen) {
                    counts.accepted = counts.accepted.wrapping_add(1);
                } else {
                    counts.lost = counts.lost.wrapping_add(1);
                }
            }
            share.charge(price, now.micros());
        }
        self.counts.set(counts);
        self.writer.show(self.interface, counts);
        price
    }
}
