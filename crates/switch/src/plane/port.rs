//! One port in one worker: its queues, its policy, and how frames get from a burst to them.
//!
//! The worker makes a [`Port`] when the control plane adds one ([`Workers::add_port`](super::Workers::add_port)) and drops it when it is removed.
//! For each burst that has frames for the port the [forwarder](super::forward) calls [`Port::expect`], then [`Port::deliver_all`] or
//! [`Port::deliver`] for each frame, then [`Port::flush`]; answers to frames that do not fit are collected until the burst is delivered.

use std::collections::VecDeque;
use std::sync::Arc;

use ringferry_memory::ReadSlice;
use ringferry_packet::ether;
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::segment::MAX_HEADERS;
use ringferry_packet::vnet::{GSO_NONE, Header, Offloads};
use ringferry_virtio_net::device::{Run, RunEnd};
use smallvec::SmallVec;

use crate::counters::{DropReason, STARVED_GAP};
use crate::fdb::PortId;
use crate::plane::capture::{Event, Offered, PortCapture};
use crate::plane::cost;
use crate::plane::forward::slow::SlowFrame;
use crate::plane::handoff::ring::{Handoff, HandoffFrame};
use crate::plane::handoff::selector::{Owner, TxQueueSelector};
use crate::plane::handoff::shared::PortShared;
use crate::plane::now::Now;
use crate::plane::offload::gro::{Coalescer, Terms, Unit};
use crate::plane::offload::gso::Sitting;
use crate::plane::offload::{gso, pmtu};
use crate::plane::policy::firewall::PortFirewall;
use crate::plane::policy::rate_limit::RateLimit;
use crate::plane::policy::shaper::{Delayed, Shaper, Signals};
use crate::plane::policy::token_bucket::TokenBucket;
use crate::plane::policy::vlan::{self, EVERYWHERE, Head, Membership, Retag};
use crate::plane::policy::{PortPolicy, WireCost};
use crate::plane::queues::{Delivery, PortHandle, Queues};
use crate::plane::wire::WireQueue;
use crate::rules::{Rate, Vid};

/// Most answers to frames that do not fit, of each port: as many as Linux gives one peer by default (`icmp_ratelimit`).
const ANSWERS: Rate = Rate { per_second: 1000, burst: 50 };

/// Limit on the announcements of a port's addresses to other workers. A machine has a few, a host with
/// containers some thousands, once; a guest that makes up addresses would else keep every worker busy with
/// learning. Frames to an address that was not announced are flooded by other workers until a later frame
/// announces it.
const NEWS: Rate = Rate { per_second: 10_000, burst: 1_000 };

/// Pieces that a frame whose tag changes may have without an allocation: the largest frame in pages of 4 KiB,
/// not aligned, and the rest of its prefix.
const PIECES: usize = 18;

/// The assumed cost of each frame of a port's first burst: that of the largest frame.
const UNKNOWN: WireCost = WireCost { packets: 1, bytes: 64 << 10 };

/// The context that a frame needs on its way to a port.
pub(crate) struct TxContext<'w> {
    /// The port that sent it, which pays for the work.
    pub(crate) from: PortId,
    pub(crate) handoff: &'w mut Handoff,
    pub(crate) now: &'w Now,
    /// Buffer for a frame that must be in one piece.
    pub(crate) scratch: &'w mut Vec<u8>,
}

/// The way of a frame to one of a port's queues, with the receiver's offloads.
#[derive(Clone, Debug)]
pub enum Steering {
    /// The port has queue pairs, each with one worker: the engine selects one for each frame and hands the frame to its worker.
    Pairs(Arc<PortShared>),
    /// Every worker delivers by itself, and the receiver (the kernel behind a tap) always takes these offloads.
    Local(Offloads),
}

/// [`Steering`] as one worker needs it.
enum Receiver {
    Pairs { selector: TxQueueSelector, shared: Arc<PortShared> },
    Local(Offloads),
}

/// The verdict of a port's egress limit on a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shaping {
    /// It is delivered at once.
    Passes,
    /// It waits in the shaper.
    Waits,
    /// It is dropped, as the shaper is full.
    NoRoom,
}

/// The ports that a port exchanges frames with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Peers {
    /// All that other rules allow.
    #[default]
    All,
    /// This one, which gets all that the port sends: the port is in quarantine.
    Only(PortId),
    /// None: it is in quarantine, and the port that it is left with is not there.
    None,
}

impl Peers {
    /// Returns true if frames from a port are for the one that this is of.
    #[inline]
    pub(crate) fn include(self, port: PortId) -> bool {
        match self {
            Peers::All => true,
            Peers::Only(only) => only == port,
            Peers::None => false,
        }
    }
}

/// A port, its queues that this worker serves, and its policy.
pub(crate) struct Port<P> {
    pub(crate) handle: PortHandle,
    pub(crate) queues: P,
    receiver: Receiver,
    /// The policy compiled from its rules, if it has any.
    pub(crate) policy: Option<Arc<PortPolicy>>,
    /// Whom it exchanges frames with, by its policy.
    pub(crate) peers: Peers,
    /// Cost of the largest frame of the port's last burst, if it has a `rate_in`.
    pub(crate) usual: WireCost,
    /// The queue of frames that wait for tokens of its `rate_out`.
    pub(crate) shaper: Shaper,
    /// The frames that wait at its end of a wire, if it is an end of one.
    pub(crate) wire: Option<Box<WireQueue>>,
    /// The queues of wires that it is no longer an end of, until they are empty.
    pub(crate) stranded: VecDeque<Box<WireQueue>>,
    /// The queue of the sole receiver that the next burst is read into directly: see `worker/direct.rs`.
    pub(crate) direct: Option<u16>,
    /// Answers, in its receiver's name, to frames that do not fit.
    answers: Vec<Vec<u8>>,
    answering: TokenBucket,
    /// Frames that the port has sent and that were too much for one turn.
    pub(crate) slow: VecDeque<SlowFrame>,
    /// Frames that the port has sent on queues of other workers, and which of them each came from.
    pub(crate) handed: VecDeque<(usize, HandoffFrame)>,
    /// Limit on the announcements of its addresses to other workers.
    pub(crate) news: TokenBucket,
    /// The last burst for the port that found no buffers, by the count of bursts, and when that was, in microseconds.
    starved: Option<(u64, u64)>,
    /// Its administrator has taken its link down: no frame passes.
    pub(crate) link_down: bool,
    /// Frames of the burst, by index, that its firewall can judge in private copies only.
    pub(crate) unstable: Vec<u32>,
    /// Cost of its buffers that it has not been charged with yet.
    pub(crate) dear: u64,
    /// It takes no frames, as its buffers have cost more than its share of the worker.
    pub(crate) owes: bool,
    /// Its captures, if there are any.
    pub(crate) capture: Option<Box<PortCapture>>,
}

impl<P: Queues> Port<P> {
    /// Makes a port without queues.
    pub(crate) fn new(
        handle: PortHandle,
        queues: P,
        steering: Steering,
        policy: Option<Arc<PortPolicy>>,
    ) -> Self {
        let receiver = match steering {
            Steering::Pairs(shared) => {
                let selector = TxQueueSelector::new(handle.id, Arc::clone(&shared));
                Receiver::Pairs { selector, shared }
            }
            Steering::Local(offloads) => Receiver::Local(offloads),
        };
        Self {
            handle,
            queues,
            receiver,
            policy,
            peers: Peers::default(),
            usual: UNKNOWN,
            shaper: Shaper::default(),
            wire: None,
            stranded: VecDeque::new(),
            direct: None,
            answers: Vec::new(),
            answering: TokenBucket::new(ANSWERS),
            slow: VecDeque::new(),
            handed: VecDeque::new(),
            news: TokenBucket::new(NEWS),
            starved: None,
            link_down: false,
            unstable: Vec::new(),
            dear: 0,
            owes: false,
            capture: None,
        }
    }

    /// Counts a frame that would have left by this port as dropped.
    pub(crate) fn drop_frame(&self, reason: DropReason, now: &Now, frame: Offered<'_, '_>) {
        self.handle.counters.drops.add(reason, 1);
        if let Some(capture) = &self.capture {
            capture.offer_one(Event::lost(reason), now, frame);
        }
    }

    /// Returns the port's VLAN membership.
    #[inline]
    pub(crate) fn membership(&self) -> &Membership {
        self.policy.as_deref().map_or(&EVERYWHERE, PortPolicy::membership)
    }

    /// Returns the firewall between the port and all others, if there is one.
    #[inline]
    pub(crate) fn firewall(&self) -> Option<&PortFirewall> {
        self.policy.as_deref().and_then(PortPolicy::firewall)
    }

    /// Returns the VLAN of frames without a tag, if there is one.
    pub(crate) fn native(&self) -> Option<Vid> {
        self.membership().classify(&[0; ether::MIN_FRAME], &Header::NONE).map(|tagged| tagged.vid)
    }

    /// Returns the offloads that the receiver behind this port takes without our help.
    #[inline]
    pub(crate) fn offloads(&self) -> Offloads {
        match &self.receiver {
            Receiver::Pairs { selector, .. } => selector.offloads(),
            Receiver::Local(offloads) => *offloads,
        }
    }

    /// Returns the queue selector, if the port has several queue pairs.
    #[inline]
    pub(crate) fn selector(&mut self) -> Option<&mut TxQueueSelector> {
        match &mut self.receiver {
            Receiver::Pairs { selector, .. } => Some(selector),
            Receiver::Local(_) => None,
        }
    }

    /// Returns the terms on which packets are merged for the receiver; `None` if they never are.
    #[inline]
    fn terms(&self) -> Option<Terms> {
        Terms::new(self.offloads(), self.queues.frame_cost())
    }

    /// Remembers the largest frame of a burst that the port has sent, as an estimate for the next one.
    #[inline]
    pub(crate) fn note_usual(&mut self, burst: &Burst<'_>) {
        if self.policy.as_deref().is_some_and(|policy| policy.rate_in().is_some()) {
            let costs = burst.frames().iter().map(WireCost::of_frame);
            let larger = |a: WireCost, b: WireCost| WireCost {
                packets: a.packets.max(b.packets),
                bytes: a.bytes.max(b.bytes),
            };
            self.usual = costs.reduce(larger).unwrap_or(self.usual);
        }
    }

    /// Returns true if a frame may be delivered at once. If not, it waits in the shaper, or was dropped.
    #[inline]
    pub(crate) fn shape(
        &mut self,
        from: PortId,
        burst: &Burst<'_>,
        frame: &Frame,
        retag: Retag,
        now: &Now,
    ) -> bool {
        let Some(limit) = self.policy.as_deref().and_then(PortPolicy::rate_out) else { return true };
        let (cost, micros) = (WireCost::of_frame(frame), now.micros());
        match self.shaping(limit, cost, micros) {
            Shaping::Passes => {
                limit.charge(cost, micros);
                return true;
            }
            Shaping::NoRoom => {
                self.drop_frame(DropReason::RateOut, now, Offered::of(burst, frame));
                return false;
            }
            Shaping::Waits => {}
        }
        let (mut header, mut copy) = (frame.header, Vec::new());
        burst.flatten(frame, &mut copy);
        if retag != Retag::Keep {
            let mut head = Head::new();
            let Some(used) = retag.apply(&mut header, &copy, &mut head) else {
                self.drop_frame(DropReason::Vlan, now, Offered::of(burst, frame));
                return false;
            };
            copy.splice(..used, head);
        }
        self.shaper.push(Delayed { from, header, frame: copy }, cost, micros);
        false
    }

    /// Returns what becomes of a frame of this cost at the port's egress limit.
    #[inline]
    pub(super) fn shaping(&self, limit: &RateLimit, cost: WireCost, micros: u64) -> Shaping {
        if self.shaper.is_empty() && limit.wait(micros) == 0 {
            Shaping::Passes
        } else if self.shaper.has_room(cost, limit) {
            Shaping::Waits
        } else {
            Shaping::NoRoom
        }
    }

    /// Takes frames that have waited and for which there are tokens, up to `max` and until they cost `most` in the unit of [`cost`]; returns
    /// them with what they cost. Counts those that are dropped instead.
    pub(crate) fn release(&mut self, max: usize, most: u64, now: &Now) -> (Vec<Delayed>, u64) {
        if self.wire.is_some() || !self.stranded.is_empty() {
            return self.release_wire(max, most, now);
        }
        let micros = now.micros();
        let (accepts, kind) = (self.offloads(), self.queues.frame_cost());
        let (mut frames, mut work) = (Vec::new(), 0);
        let Some(limit) = self.policy.as_deref().and_then(PortPolicy::rate_out) else {
            return (frames, work);
        };
        let mut signals = Signals::default();
        while frames.len() < max
            && work < most
            && limit.wait(micros) == 0
            && let Some((delayed, cost)) = self.shaper.pop(micros, &mut signals)
        {
            limit.charge(cost, micros);
            work += cost::of_copy(&delayed.header, &delayed.frame, accepts, kind);
            frames.push(delayed);
        }
        for Delayed { header, frame, .. } in &signals.dropped {
            self.drop_frame(DropReason::RateOut, now, Offered::private(*header, frame));
        }
        let counters = &self.handle.counters;
        counters.tx_marked.add(signals.marked);
        (frames, work)
    }

    /// Takes all frames that wait in the shaper, tokens or not.
    pub(crate) fn release_all(&mut self, now: u64) -> Vec<Delayed> {
        let limit = self.policy.as_deref().and_then(PortPolicy::rate_out);
        let frames = self.shaper.drain();
        let charge = |(delayed, cost): (Delayed, WireCost)| {
            if let Some(limit) = limit {
                limit.charge(cost, now);
            }
            delayed
        };
        frames.map(charge).collect()
    }

    /// Returns true if frames wait here for their time.
    #[inline]
    pub(crate) fn has_waiting(&self) -> bool {
        !self.shaper.is_empty()
            || self.wire.as_ref().is_some_and(|wire| !wire.is_empty())
            || !self.stranded.is_empty()
    }

    /// Returns the number of frames that wait here for their time.
    pub(crate) fn waiting(&self) -> usize {
        self.shaper.len() + self.wire.iter().chain(&self.stranded).map(|wire| wire.len()).sum::<usize>()
    }

    /// Microseconds until more frames may be [released](Self::release); `None` if none waits.
    pub(crate) fn until_release(&self, now: u64) -> Option<u64> {
        let limit = self.policy.as_deref().and_then(PortPolicy::rate_out);
        if !self.stranded.is_empty() {
            return Some(0);
        }
        if self.wire.is_some() {
            return self.until_due(now);
        }
        (!self.shaper.is_empty()).then_some(limit?.wait(now))
    }

    /// Returns the queue of a frame that begins with `first`, and the worker that has it if it is one of a pair. Takes note of nothing;
    /// [`refresh`](Self::refresh) comes before.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn peek_queue(
        &self,
        first: &[u8],
        handoff: &Handoff,
        now: &Now,
    ) -> Result<(u16, Option<Owner>), DropReason> {
        match &self.receiver {
            _ if self.link_down => Err(DropReason::LinkDown),
            _ if self.owes => Err(DropReason::DearBuffers),
            Receiver::Local(_) => Ok((0, None)),
            Receiver::Pairs { selector, .. } => {
                let pair = selector.peek(first, now)?;
                Ok((pair, Some(selector.owner(pair, handoff))))
            }
        }
    }

    /// Finds out which pairs and offloads the receiver has now, before it is estimated what frames for it cost. What is found holds until the next call,
    /// so that they are not cut into more packets than their sender was charged for.
    #[inline]
    pub(super) fn refresh(&mut self, handoff: &Handoff) {
        if let Receiver::Pairs { selector, .. } = &mut self.receiver {
            selector.refresh(handoff);
        }
    }

    /// Announces about how many frames follow until [`Port::flush`]. [`refresh`](Self::refresh) comes before.
    #[inline]
    pub(crate) fn expect(&mut self, frames: usize) {
        self.handle.counters.tx_bursts.add(1);
        self.queues.expect(frames);
    }

    /// Sends these frames of a burst out of this port, as they are tagged, several as one where that pays.
    #[inline]
    pub(crate) fn deliver_all(
        &mut self,
        burst: &Burst<'_>,
        picks: &[u32],
        coalescer: &mut Coalescer,
        tx: &mut TxContext<'_>,
    ) {
        let frames = burst.frames();
        let untagged = |index: &u32| !vlan::is_tagged(frames[*index as usize].prefix());
        if let Some(terms) = self.terms()
            && picks.len() > 1
            && (self.queues.offloads_tagged() || picks.iter().all(untagged))
            && picks.iter().any(|index| terms.may_begin(&frames[*index as usize]))
        {
            let picks = picks.iter().map(|index| *index as usize);
            let mut units = coalescer.units(burst, picks, terms);
            while let Some(unit) = units.next_unit() {
                match unit {
                    Unit::Single(frame) => self.deliver(burst, frame, Retag::Keep, tx),
                    Unit::Merged(merged) => {
                        self.handle.counters.tx_coalesced.add(merged.packets as u64);
                        let _ = self.put(merged.header, merged.first, merged.rest, tx);
                    }
                }
            }
            return;
        }
        self.deliver_in_runs(burst, picks, tx);
    }

    /// Sends these frames of a burst out of this port, each with its own change of its tag.
    pub(crate) fn deliver_picked(
        &mut self,
        burst: &Burst<'_>,
        picks: &[u32],
        retags: &[Retag],
        coalescer: &mut Coalescer,
        tx: &mut TxContext<'_>,
    ) {
        if retags.iter().all(|retag| *retag == Retag::Keep) {
            return self.deliver_all(burst, picks, coalescer, tx);
        }
        for (index, retag) in picks.iter().zip(retags) {
            self.deliver(burst, &burst.frames()[*index as usize], *retag, tx);
        }
    }

    /// Sends these frames of a burst one by one, as they are tagged: in runs as far as the receiver has a short way.
    #[inline]
    pub(crate) fn deliver_in_runs(&mut self, burst: &Burst<'_>, picks: &[u32], tx: &mut TxContext<'_>) {
        let frames = burst.frames();
        let (mut left, mut pair) = (picks, self.run_pair());
        // Number of frames at the beginning of `left` that are known to be taken as they are.
        let mut accepted = 0;
        while let Some((next, rest)) = left.split_first() {
            if let Some(queue) = pair {
                if accepted == 0 {
                    accepted = self.count_accepted(burst, left);
                }
                if accepted == 0 {
                    // The receiver does not take the next frame as it is.
                    let (frame, accepts) = (&frames[*next as usize], self.offloads());
                    let _ = self.deliver_in_software(burst, frame, accepts, Retag::Keep, Sitting::WHOLE, tx);
                    left = rest;
                    continue;
                }
                let run = self.deliver_run(queue, burst, &left[..accepted], tx.now);
                left = &left[run.frames..];
                accepted -= run.frames;
                pair = pair.filter(|_| run.end != RunEnd::Queue);
            }
            // The frame that ended the run goes the general way, and the next run begins behind it.
            let Some((next, rest)) = left.split_first() else { return };
            self.deliver(burst, &frames[*next as usize], Retag::Keep, tx);
            left = rest;
            accepted = accepted.saturating_sub(1);
        }
    }

    /// Returns the queue pair of every frame, if there is only one and it may have a short way for frames
    /// ([`Queues::deliver_run`]).
    #[inline]
    fn run_pair(&self) -> Option<u16> {
        let Receiver::Pairs { selector, .. } = &self.receiver else { return None };
        selector.sole_pair().filter(|_| self.queues.offloads_tagged() && !self.link_down && !self.owes)
    }

    /// Returns how many of these frames, from the first on, the receiver takes as they are.
    #[inline]
    fn count_accepted(&self, burst: &Burst<'_>, picks: &[u32]) -> usize {
        let offloads = self.offloads();
        if offloads.contains(burst.needs()) {
            return picks.len();
        }
        let mut known = (0, GSO_NONE);
        let accepted = picks.iter().take_while(|index| {
            let header = &burst.frames()[**index as usize].header;
            let kind = (header.flags, header.gso_type);
            let accepts = kind == known || offloads.accepts(header);
            known = kind;
            accepts
        });
        accepted.count()
    }

    /// Sends frames that the receiver takes as they are by its short way, as far as that goes, and counts them.
    #[inline]
    fn deliver_run(&mut self, queue: u16, burst: &Burst<'_>, picks: &[u32], now: &Now) -> Run {
        let run = self.queues.deliver_run(queue, burst, picks);
        if run.frames > 0 {
            self.handle.counters.tx_packets.add(run.frames as u64);
            self.handle.counters.tx_bytes.add(run.bytes);
            if let Some(capture) = &self.capture {
                let frames = picks[..run.frames].iter().map(|index| &burst.frames()[*index as usize]);
                let event = Event::delivered(Some(queue));
                capture.offer(event, now, frames.map(|frame| Offered::of(burst, frame)));
            }
        }
        run
    }

    /// Sends a frame out of this port, with another tag, doing in software what its receiver cannot. Counts
    /// it as sent or dropped.
    #[inline]
    pub(crate) fn deliver(&mut self, burst: &Burst<'_>, frame: &Frame, retag: Retag, tx: &mut TxContext<'_>) {
        let accepts = self.accepts(frame, retag);
        if accepts.accepts(&frame.header) {
            let _ = self.put_tagged(frame.header, frame.prefix(), burst.rest(frame), retag, tx);
        } else {
            let _ = self.deliver_in_software(burst, frame, accepts, retag, Sitting::WHOLE, tx);
        }
    }

    /// Returns the offloads that the receiver takes for a frame with this tagging.
    #[inline]
    pub(super) fn accepts(&self, frame: &Frame, retag: Retag) -> Offloads {
        if self.queues.offloads_tagged() || !retag.leaves_tagged(frame.prefix()) {
            self.offloads()
        } else {
            Offloads::empty()
        }
    }

    /// Sends a part of a frame out of this port, as [`deliver`](Self::deliver) sends all of it: the packets of one [sitting](Sitting), if the frame
    /// has to be cut for the receiver. Returns how many packets of the frame are left for later sittings.
    pub(crate) fn deliver_part(
        &mut self,
        burst: &Burst<'_>,
        frame: &Frame,
        retag: Retag,
        sitting: Sitting,
        tx: &mut TxContext<'_>,
    ) -> usize {
        let accepts = self.accepts(frame, retag);
        if sitting.from == 0 && accepts.accepts(&frame.header) {
            let _ = self.put_tagged(frame.header, frame.prefix(), burst.rest(frame), retag, tx);
            return 0;
        }
        self.deliver_in_software(burst, frame, accepts, retag, sitting, tx)
    }

    /// Sends a part of a frame as [`deliver_part`](Self::deliver_part) does, for a receiver that takes only `accepts` and
    /// not the whole frame as it is.
    fn deliver_in_software(
        &mut self,
        burst: &Burst<'_>,
        frame: &Frame,
        accepts: Offloads,
        retag: Retag,
        sitting: Sitting,
        tx: &mut TxContext<'_>,
    ) -> usize {
        if sitting.from == 0 {
            let counters = &self.handle.counters;
            counters.tx_software.add(1);
            if frame.header.is_gso() {
                counters.tx_segmented.add(1);
                counters.tx_segmented_bytes.add(frame.len.into());
            } else {
                counters.tx_checksummed_bytes.add(frame.len.into());
            }
        }
        if !frame.header.is_gso() {
            let (mut scratch, mut behind_head) = (std::mem::take(tx.scratch), SmallVec::new());
            match gso::finish(burst, frame, &mut scratch, &mut behind_head) {
                Ok(packet) => {
                    let _ = self.put_tagged(packet.header, packet.first, packet.rest, retag, tx);
                }
                Err(reason) => self.drop_frame(reason, tx.now, Offered::of(burst, frame)),
            }
            *tx.scratch = scratch;
            return 0;
        }
        let mut head = [0; MAX_HEADERS];
        let mut segments = match gso::segments(burst, frame, accepts, sitting, &mut head) {
            Ok(segments) => segments,
            Err(reason) => {
                self.drop_frame(reason, tx.now, Offered::of(burst, frame));
                return 0;
            }
        };
        while let Some(packet) = segments.next_packet() {
            // What one finds no place for, later ones would find none for either.
            if let Err(reason) = self.put_tagged(packet.header, packet.first, packet.rest, retag, tx) {
                self.handle.counters.drops.add(reason, segments.left() as u64);
                return 0;
            }
        }
        segments.left()
    }

    /// Sends a frame with another tag, as [`put`](Self::put) does.
    #[inline]
    fn put_tagged(
        &mut self,
        mut header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        retag: Retag,
        tx: &mut TxContext<'_>,
    ) -> Result<(), DropReason> {
        if retag == Retag::Keep {
            return self.put(header, first, rest, tx);
        }
        let mut head = Head::new();
        let Some(used) = retag.apply(&mut header, first, &mut head) else {
            let len = (first.len() + rest.iter().map(ReadSlice::len).sum::<usize>()) as u32;
            self.drop_frame(DropReason::Vlan, tx.now, Offered { header, first, rest, len });
            return Ok(());
        };
        let mut pieces = SmallVec::<[ReadSlice<'_>; PIECES]>::new();
        pieces.extend((used < first.len()).then(|| ReadSlice::from(&first[used..])));
        pieces.extend_from_slice(rest);
        self.put(header, &head, &pieces, tx)
    }

    /// Sends a frame that the receiver takes as it is: to its queue here, or to the worker that has the
    /// queue. Counts it as sent or dropped.
    ///
    /// # Errors
    /// The frame was dropped, for this reason, and any other would be, too.
    #[inline]
    pub(crate) fn put(
        &mut self,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        tx: &mut TxContext<'_>,
    ) -> Result<(), DropReason> {
        let len = (first.len() + rest.iter().map(ReadSlice::len).sum::<usize>()) as u64;
        let TxContext { from, handoff, now, .. } = tx;
        let Port { queues, receiver, link_down, owes, .. } = self;
        // The queue that it went to in this worker.
        let mut queue = None;
        let delivered = match receiver {
            _ if *link_down => Err(DropReason::LinkDown),
            _ if *owes => Err(DropReason::DearBuffers),
            Receiver::Local(_) => queues.deliver(0, header, first, rest, len),
            Receiver::Pairs { selector, .. } => selector.select(first, now).and_then(|to| {
                match queues.deliver(to, header, first, rest, len) {
                    Ok(Delivery::NotHere) => selector.hand_off(*from, to, header, first, rest, handoff),
                    delivered => {
                        queue = Some(to);
                        delivered
                    }
                }
            }),
        };
        let delivered = match delivered {
            Err(DropReason::TxTooBig) if self.make_answer(&header, len, first, rest, now) => {
                Err(DropReason::TooBigAnswered)
            }
            delivered => delivered,
        };
        if let Some(capture) = &self.capture
            && let Some(event) = self.captured_as(queue, &delivered)
        {
            capture.offer_one(event, now, Offered { header, first, rest, len: len as u32 });
        }
        match delivered {
            Ok(Delivery::Done) => {
                self.handle.counters.tx_packets.add(1);
                self.handle.counters.tx_bytes.add(len);
            }
            Ok(Delivery::Queued | Delivery::NotHere) => {}
            // It is counted when it is known whether the sender could be told.
            Err(DropReason::TooBigAnswered) => {}
            Err(reason) => {
                self.handle.counters.drops.add(reason, 1);
                if reason == DropReason::NoReceiveBuffers {
                    self.note_starved(now);
                }
                if ends_a_frame(reason) {
                    return Err(reason);
                }
            }
        }
        Ok(())
    }

    /// Notes that a frame of the present burst has found no buffers. It counts the burst, once, and the time since the one before it, if that
    /// has found none either.
    #[cold]
    fn note_starved(&mut self, now: &Now) {
        let counters = &self.handle.counters;
        let burst = counters.tx_bursts.get();
        let before = self.starved.filter(|(last, _)| burst - last <= 1);
        if before.is_some_and(|(last, _)| last == burst) {
            return;
        }
        let micros = now.micros();
        counters.tx_starved.add(1);
        if let Some((_, since)) = before {
            counters.tx_starved_microseconds.add(micros.saturating_sub(since).min(STARVED_GAP));
        }
        self.starved = Some((burst, micros));
    }

    /// Returns what a capture is told of a frame that was put to a queue; `None` if another worker tells.
    fn captured_as(&self, queue: Option<u16>, delivered: &Result<Delivery, DropReason>) -> Option<Event> {
        match delivered {
            Ok(_) if queue.is_some() || matches!(self.receiver, Receiver::Local(_)) => {
                Some(Event::delivered(queue))
            }
            Ok(_) => None,
            Err(reason) => Some(Event { queue, ..Event::lost(*reason) }),
        }
    }

    /// Makes the answer to a frame that does not fit; false if there is none.
    #[cold]
    fn make_answer(
        &mut self,
        header: &Header,
        len: u64,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        now: &Now,
    ) -> bool {
        let answer = self.answer_to(header, len, first, rest).filter(|_| self.may_answer(now));
        let made = answer.is_some();
        self.answers.extend(answer);
        made
    }

    /// Returns the answer to a frame that does not fit, if there is one.
    pub(super) fn answer_to(
        &self,
        header: &Header,
        len: u64,
        first: &[u8],
        rest: &[ReadSlice<'_>],
    ) -> Option<Vec<u8>> {
        // A wire says nothing by itself.
        let mtu = self.mtu().filter(|_| self.wire.is_none())?;
        let mut frame = first[..first.len().min(pmtu::ENOUGH)].to_vec();
        for piece in rest {
            let at = frame.len();
            let piece = piece.first(pmtu::ENOUGH - at);
            frame.resize(at + piece.len(), 0);
            piece.copy_to(&mut frame[at..]);
        }
        let mut answer = Vec::new();
        // If the receiver posts buffers smaller than its MTU, smaller packets do not help.
        let made = !pmtu::fits(&frame, len as usize, header, mtu) && pmtu::answer(&frame, mtu, &mut answer);
        made.then_some(answer)
    }

    /// Takes one of the answers that are given in the name of the port's receiver, or to its guest, in a second.
    pub(crate) fn may_answer(&self, now: &Now) -> bool {
        self.answering.take(1, now.micros())
    }

    /// Returns how many more answers the port may give now.
    pub(super) fn answers_left(&self, now: &Now) -> u64 {
        self.answering.left(now.micros())
    }

    /// Returns the largest packet that the receiver takes, in bytes behind the Ethernet header, if that is known here.
    pub(super) fn mtu(&self) -> Option<u16> {
        match &self.receiver {
            Receiver::Pairs { shared, .. } => Some(shared.mtu()),
            Receiver::Local(_) => None,
        }
    }

    /// Returns true if there are answers to be delivered, and counted.
    #[inline]
    pub(crate) fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Takes the answers to frames that did not fit.
    pub(crate) fn take_answers(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.answers)
    }

    /// Publishes the delivered frames to the receiver and notifies it if it wants to be.
    #[inline]
    pub(crate) fn flush(&mut self) {
        let unusual = self.queues.flush();
        if unusual > 0 {
            self.dear += cost::of_unusual_buffers(unusual);
        }
    }
}

/// Returns true if what one packet of a frame was dropped for holds for later ones, too.
pub(super) fn ends_a_frame(reason: DropReason) -> bool {
    use DropReason::{DearBuffers, LinkDown, NoReceiveBuffers, WorkerBusy};
    matches!(reason, NoReceiveBuffers | DearBuffers | LinkDown | WorkerBusy)
}
