//! Where each frame of a burst goes: admit, learn, look up, group by output port, deliver.
//!
//! **Life cycle.** Every worker makes one [`Forwarder`] with itself and keeps it until its thread ends; only that thread calls it, and lends it the
//! worker's ports, forwarding database and hand-off rings ([`Tables`]) for each call. The forwarder keeps nothing from one burst to the next but
//! storage, except for what the worker collects after each call: frames that were put off ([`Forwarder::put_off`]) and ports whose shapers have
//! frames waiting ([`Forwarder::next_waiting`]).
//!
//! ```text
//!   forward:  decide ─► limit ─► deliver ─► (unstable frames: copied, then once more from decide on) ─► hand-off rings are flushed
//!   step:     one step of a frame that was put off                    in later turns of its port
//!   deliver_late:  frames that have waited in a shaper                when a timer of the worker is due
//! ```
//!
//! A burst is forwarded up to [`BURST_COST`], by an estimate made before anything is delivered; what comes after is [put off](slow).

pub(crate) mod effects;
pub(crate) mod slow;
pub(crate) mod walk;

use std::sync::Arc;

use ringferry_firewall::Direction;
use ringferry_memory::ReadSlice;
use ringferry_packet::ether::{self, Mac};
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::vnet::{Header, Offloads};
use smallvec::SmallVec;

use crate::counters::DropReason;
use crate::fdb::{Fdb, Hashed, Learned, PortId};
use crate::plane::capture::{Event, Offered, PortCapture};
use crate::plane::cost;
use crate::plane::handoff::ring::Handoff;
use crate::plane::now::Now;
use crate::plane::offload::gro::Coalescer;
use crate::plane::policy::shaper::Delayed;
use crate::plane::policy::vlan::{EVERYWHERE, Egress, Retag, Tagged};
use crate::plane::policy::{PortPolicy, Refusal};
use crate::plane::port::{Peers, Port, TxContext};
use crate::plane::queues::{FrameCost, Queues};
use crate::plane::worker::holes::{HoleAudit, Touch};
use crate::rules::Vid;
use effects::{Acting, Effects};
use slow::SlowFrame;

/// What the frames of a burst may cost at most, in the unit of [`cost`]; the rest is put off. That is how long others wait for a turn of a port at most, but
/// for what one more frame costs. 32 frames of 64 KiB to one receiver that takes them as they are stay below it.
pub(crate) const BURST_COST: u64 = 300_000;

/// Where one frame goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum To {
    /// Out of this port.
    Port(PortId),
    /// Out of every port but the one it came from.
    Flood,
    /// Nowhere, for this reason, which is still to be counted.
    Refused(DropReason),
    /// Nowhere.
    Nowhere,
}

/// What was decided about one frame.
#[derive(Clone, Copy, Debug)]
struct Decision {
    to: To,
    tagged: Tagged,
    /// Some port with rules was in its VLAN.
    reached: bool,
}

impl Decision {
    const NOWHERE: Decision = Decision::new(To::Nowhere, Tagged { vid: 0, wire: None });

    const fn new(to: To, tagged: Tagged) -> Self {
        Self { to, tagged, reached: false }
    }
}

/// What a burst comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    /// The port.
    pub(crate) port: PortId,
    /// Nobody but this process can write the memory that the burst lies in.
    pub(crate) private: bool,
    /// The queue of the port, if it came from one.
    pub(crate) queue: Option<u16>,
}

/// The port that frames come from, as far as it matters where they leave.
#[derive(Clone, Copy, Debug)]
struct Sender {
    port: PortId,
    isolated: bool,
    /// Nobody but this process can write the memory that the frames lie in.
    private: bool,
    /// The worker that delivers them.
    worker: usize,
}

/// What a worker forwards with.
pub(crate) struct Tables<'w, P> {
    pub(crate) ports: &'w mut [Option<Port<P>>],
    pub(crate) fdb: &'w mut Fdb,
    pub(crate) handoff: &'w mut Handoff,
}

impl<P: Queues> Tables<'_, P> {
    fn policy(&self, port: PortId) -> Option<&PortPolicy> {
        self.ports.get(usize::from(port.0))?.as_ref()?.policy.as_deref()
    }

    fn sender(&self, port: PortId, private: bool) -> Sender {
        let isolated = self.policy(port).is_some_and(PortPolicy::isolated);
        Sender { port, isolated, private, worker: self.handoff.me() }
    }
}

/// Storage for one burst's decisions, reused.
#[derive(Default)]
pub(crate) struct Forwarder {
    decisions: Vec<Decision>,
    /// Output ports of the burst, each once.
    outputs: Vec<PortId>,
    /// Destination and source of each frame, if the table is so large that they are fetched before they are looked up.
    hashed: Vec<[Hashed; 2]>,
    /// Indexes of the frames for one output port, and what is done to the tag of each if it has to change.
    picks: Vec<u32>,
    retags: Vec<Retag>,
    /// Some frame goes out of every port.
    flooded: bool,
    /// Some frame is in a VLAN that its tag, or its having none, does not say.
    foreign: bool,
    /// Frames that can be judged only where their senders cannot change them.
    unstable: Vec<(Header, Vec<u8>)>,
    /// What the sender is told of questions that its firewall has denied.
    refusals: Vec<Vec<u8>>,
    /// Frames that were too much for this turn.
    put_off: Vec<SlowFrame>,
    /// Ports in whose shapers frames wait now, each once, for the worker to set a timer.
    waiting: Vec<PortId>,
    /// Ports whose buffers have cost more than is usual, for the worker to charge them.
    dear: Vec<PortId>,
    /// Storage for a frame that must be in one piece.
    scratch: Vec<u8>,
    /// Whose memory is touched.
    pub(crate) holes: HoleAudit,
    coalescer: Coalescer,
}

/// Receivers of a flood that take the same offloads, and to which a frame costs the same.
struct Alike {
    accepts: Offloads,
    kind: FrameCost,
    ports: u64,
}

impl Forwarder {
    /// Storage for a frame that must be in one piece.
    pub(crate) fn scratch(&mut self) -> &mut Vec<u8> {
        &mut self.scratch
    }

    /// Storage for a frame that must be in one piece, and the audit that is told whose memory is touched.
    pub(crate) fn scratch_and_holes(&mut self) -> (&mut Vec<u8>, &mut HoleAudit) {
        (&mut self.scratch, &mut self.holes)
    }

    /// A port in whose shaper frames wait since this was last asked.
    #[inline]
    pub(crate) fn next_waiting(&mut self) -> Option<PortId> {
        self.waiting.pop()
    }

    /// A port whose buffers have cost more than is usual since this was last asked.
    #[inline]
    pub(crate) fn next_dear(&mut self) -> Option<PortId> {
        self.dear.pop()
    }

    /// Takes note of a port that was flushed.
    #[inline]
    pub(crate) fn note_flushed<P: Queues>(&mut self, port: &Port<P>) {
        if port.dear > 0 {
            self.dear.push(port.handle.id);
        }
    }

    /// Delivers frames of one sender that have waited to their port, several as one where that pays. What the receiver takes is looked at
    /// anew, as that may have changed since.
    pub(crate) fn deliver_late<P: Queues>(
        &mut self,
        port: &mut Port<P>,
        from: PortId,
        frames: &[Delayed],
        handoff: &mut Handoff,
        now: &Now,
    ) {
        let Self { picks, scratch, coalescer, holes, .. } = self;
        holes.touch(Touch::of(port.handle.id));
        let mut burst = Burst::new();
        for Delayed { header, frame, .. } in frames {
            burst.push(*header, ReadSlice::from(&frame[..]));
        }
        picks.clear();
        picks.extend(0..burst.len() as u32);
        port.expect(burst.len());
        let tx = &mut TxContext { from, handoff, now, scratch };
        if port.wire.is_some() {
            port.deliver_in_runs(&burst, picks, tx);
        } else {
            port.deliver_all(&burst, picks, coalescer, tx);
        }
    }

    /// Forwards the frames of `burst`. Returns what that cost; frames that would have cost too much are in
    /// [`put_off`](Self::put_off).
    ///
    /// All frames of a burst are decided on before any is copied; then each output port gets all its
    /// frames in the order they were sent, one publish and at most one call.
    pub(crate) fn forward<P: Queues>(
        &mut self,
        from: Origin,
        burst: &Burst<'_>,
        tables: &mut Tables<'_, P>,
        now: &Now,
    ) -> u64 {
        self.decide(from, burst, tables, now, &mut Acting);
        let mut cost = self.limit(from.port, burst, tables);
        cost += self.deliver(from, burst, tables, now);
        if !self.refusals.is_empty() {
            self.tell_refusals(from.port, tables, now);
        }
        if !self.unstable.is_empty() {
            let copies = std::mem::take(&mut self.unstable);
            cost += self.forward(Origin { private: true, ..from }, &burst_of(&copies), tables, now);
        }
        tables.handoff.flush();
        cost
    }

    /// Frames that were too much for this turn, in order.
    #[inline]
    pub(crate) fn put_off(&mut self) -> &mut Vec<SlowFrame> {
        &mut self.put_off
    }

    /// Delivers to a port what it is told of its own questions, as long as answers are left for this second.
    #[cold]
    fn tell_refusals<P: Queues>(&mut self, from: PortId, tables: &mut Tables<'_, P>, now: &Now) {
        let Self { refusals, scratch, holes, .. } = self;
        let Some(Some(port)) = tables.ports.get_mut(usize::from(from.0)) else { return refusals.clear() };
        holes.touch(Touch::of(from));
        port.refresh(tables.handoff);
        let tx = &mut TxContext { from, handoff: tables.handoff, now, scratch };
        for frame in refusals.drain(..) {
            if port.may_answer(now) {
                let mut burst = Burst::new();
                burst.push(Header::default(), ReadSlice::from(&frame[..]));
                port.expect(1);
                port.deliver(&burst, &burst.frames()[0], Retag::Keep, tx);
            }
        }
        port.flush();
        holes.touch_nothing();
    }

    /// Estimates what the frames of a burst cost, and puts off those beyond [`BURST_COST`]. Returns what the others cost.
    #[inline]
    fn limit<P: Queues>(&mut self, from: PortId, burst: &Burst<'_>, tables: &mut Tables<'_, P>) -> u64 {
        for output in &self.outputs {
            if let Some(Some(port)) = tables.ports.get_mut(usize::from(output.0)) {
                port.refresh(tables.handoff);
            }
        }
        let kind = |port: PortId| Some(tables.ports.get(usize::from(port.0))?.as_ref()?.queues.frame_cost());
        let filters =
            |port: &&PortId| tables.policy(**port).is_some_and(|policy| policy.firewall().is_some());
        let judged = self.outputs.iter().chain([&from]).filter(filters).count() * burst.len();
        let taking = kind(from).map_or(cost::FRAME_IN, cost::of_taking) * burst.len() as u64
            + self.outputs.len() as u64 * cost::of_output()
            + judged as u64 * cost::VERDICT;
        // Most bursts: frames that their receivers take as they are, to one port each.
        let ring = FrameCost::Descriptor;
        let takes = |port: &PortId| {
            let port = tables.ports.get(usize::from(port.0)).and_then(Option::as_ref);
            port.is_some_and(|port| {
                port.queues.frame_cost() == ring && port.offloads().contains(burst.needs())
            })
        };
        if !self.flooded && self.outputs.iter().all(takes) {
            let each = burst.len() as u64 * cost::of_plain(0, 0, ring);
            let rest = cost::of_bytes(burst.bytes())
                + cost::of_further_pieces(burst.pieces().saturating_sub(burst.len()));
            if each + rest <= BURST_COST {
                return taking + each + rest;
            }
        }
        taking + self.limit_each(from, burst, tables)
    }

    /// Estimates the delivery of each frame on its own, for bursts of which [`limit`](Self::limit) cannot tell at once that all of it may be
    /// delivered. Puts off the frames beyond [`BURST_COST`], and returns what the others cost.
    fn limit_each<P: Queues>(&mut self, from: PortId, burst: &Burst<'_>, tables: &Tables<'_, P>) -> u64 {
        let receiver = |port: PortId| {
            let port = tables.ports.get(usize::from(port.0))?.as_ref()?;
            Some((port.offloads(), port.queues.frame_cost()))
        };
        // Who gets what is flooded in the VLAN of the last such frame: the next one is mostly in the same.
        let mut everybody: Option<(Vid, SmallVec<[Alike; 4]>, u64)> = None;
        let member = |port: PortId, vid: Vid| {
            let port = tables.ports.get(usize::from(port.0))?.as_ref()?;
            port.membership().leaves(vid).map(|_| (port.offloads(), port.queues.frame_cost()))
        };
        let in_vlan = |vid: Vid| {
            let (mut everybody, mut others) = (SmallVec::<[Alike; 4]>::new(), 0);
            for port in &self.outputs {
                let Some((accepts, kind)) = member(*port, vid) else {
                    others += cost::REFUSAL;
                    continue;
                };
                match everybody.iter_mut().find(|alike| alike.accepts == accepts && alike.kind == kind) {
                    Some(alike) => alike.ports += 1,
                    None => everybody.push(Alike { accepts, kind, ports: 1 }),
                }
            }
            (vid, everybody, others)
        };
        let mut total = 0;
        for (index, frame) in burst.frames().iter().enumerate() {
            let cost = match self.decisions[index].to {
                To::Nowhere | To::Refused(_) => 0,
                To::Port(port) => {
                    receiver(port).map_or(0, |(accepts, kind)| cost::of_delivery(burst, frame, accepts, kind))
                }
                To::Flood => {
                    let vid = self.decisions[index].tagged.vid;
                    let known = everybody.take().filter(|(known, ..)| *known == vid);
                    let (_, alike, others) = everybody.insert(known.unwrap_or_else(|| in_vlan(vid)));
                    let delivery = |alike: &Alike| {
                        alike.ports * cost::of_delivery(burst, frame, alike.accepts, alike.kind)
                    };
                    alike.iter().map(delivery).sum::<u64>() + *others
                }
            };
            if total + cost > BURST_COST && (total > 0 || is_divisible(frame, self.decisions[index].to)) {
                self.put_off_from(index, from, burst);
                break;
            }
            total += cost;
        }
        total
    }

    /// Puts off the frames of a burst from `index` on: from now on they go nowhere.
    #[cold]
    fn put_off_from(&mut self, index: usize, from: PortId, burst: &Burst<'_>) {
        for (frame, decision) in burst.frames().iter().zip(&mut self.decisions).skip(index) {
            let outputs = match decision.to {
                To::Nowhere | To::Refused(_) => continue,
                To::Port(port) => vec![port],
                To::Flood => self.outputs.iter().copied().filter(|port| *port != from).collect(),
            };
            self.put_off.push(SlowFrame::new(copy(burst, frame), *decision, outputs));
            *decision = Decision { to: To::Nowhere, ..*decision };
        }
    }

    /// Decides where each frame goes. What is done beside that, `effects` does.
    #[inline]
    fn decide<P: Queues>(
        &mut self,
        from: Origin,
        burst: &Burst<'_>,
        tables: &mut Tables<'_, P>,
        now: &Now,
        effects: &mut impl Effects<P>,
    ) {
        let Self { decisions, outputs, foreign, flooded, unstable, refusals, hashed, .. } = self;
        let Tables { ports, fdb, handoff } = tables;
        decisions.clear();
        outputs.clear();
        (*foreign, *flooded) = (false, false);
        let Some(Some(port)) = ports.get(usize::from(from.port.0)) else { return };
        let policy = port.policy.as_deref();
        if policy.is_some_and(|policy| policy.wire().is_some()) {
            return decide_wire(from, port, burst, now, effects, (decisions, outputs));
        }
        let reserved_pass = policy.is_some_and(PortPolicy::forwards_reserved);
        hashed.clear();
        if fdb.is_large() {
            let (mut last, mut addresses) = (None, [Hashed::default(); 2]);
            hashed.extend(burst.frames().iter().map(|frame| {
                let header = Some(frame.ethernet_header());
                if std::mem::replace(&mut last, header) != header
                    && let Some(tagged) = port.membership().classify(frame.prefix(), &frame.header)
                    && let Some((dst, src)) =
                        ether::destination(frame.prefix()).zip(ether::source(frame.prefix()))
                {
                    addresses = [fdb.hash(tagged.vid, dst), fdb.hash(tagged.vid, src)];
                    addresses.iter().for_each(|address| fdb.prefetch(*address));
                }
                addresses
            }));
        }
        if let Some(firewall) = policy.and_then(PortPolicy::firewall) {
            firewall.fetch(Direction::Out, burst.frames().iter());
        }
        // The hash of an address of a frame, which was made before if it was fetched.
        let hash = |fdb: &Fdb, index: usize, which: usize, vid: Vid, mac: Mac| match hashed.get(index) {
            Some(addresses) if addresses[which].is_of(vid, mac) => addresses[which],
            _ => fdb.hash(vid, mac),
        };
        // Most bursts are of few conversations: what was found for a frame holds for the next one of the same. Without rules, all of the decision
        // does if the next frame has the same Ethernet header and that is all that was looked at.
        let mut same: Option<(u128, Decision)> = None;
        let mut learned: Option<(u16, Mac)> = None;
        let mut found: Option<(u16, Mac, To)> = None;
        let mut floods = 0;
        for (index, frame) in burst.frames().iter().enumerate() {
            let header = frame.ethernet_header();
            if let Some((known, decision)) = same
                && known == header
            {
                decisions.push(decision);
                continue;
            }
            same = None;
            let prefix = frame.prefix();
            // A frame has at least an Ethernet header: its queue made sure.
            let (Some(dst), Some(src)) = (ether::destination(prefix), ether::source(prefix)) else {
                decisions.push(Decision::NOWHERE);
                continue;
            };
            let admitted = match policy {
                None => EVERYWHERE.classify(prefix, &frame.header).ok_or(Refusal::Drop(DropReason::Vlan)),
                Some(policy) => effects.admit(policy, burst, frame, from.private, now, handoff.me()),
            };
            let tagged = match admitted {
                Ok(tagged) => tagged,
                Err(refusal) => {
                    match refusal {
                        Refusal::Drop(reason) => {
                            effects.refuse(port, reason, (burst, frame), from.queue, now);
                            if let Some(policy) = policy.filter(|_| reason == DropReason::Firewall) {
                                refusals.extend(effects.refusal(policy, burst, frame));
                            }
                        }
                        Refusal::Unstable => unstable.push(copy(burst, frame)),
                    }
                    decisions.push(Decision::NOWHERE);
                    continue;
                }
            };
            *foreign |= tagged.is_foreign();
            let is_known = learned == Some((tagged.vid, src));
            if (frame.is_mac_control() || !is_known && !src.is_station()) && !reserved_pass {
                effects.refuse(port, DropReason::Reserved, (burst, frame), from.queue, now);
                decisions.push(Decision::NOWHERE);
                continue;
            }
            if !is_known {
                let source = hash(fdb, index, 1, tagged.vid, src);
                if effects.learn(port, fdb, handoff, source, now) == Learned::Limited {
                    effects.refuse(port, DropReason::MacLimit, (burst, frame), from.queue, now);
                    decisions.push(Decision::NOWHERE);
                    continue;
                }
                learned = Some((tagged.vid, src));
            }
            let to = match found {
                Some((vid, mac, to)) if (vid, mac) == (tagged.vid, dst) => to,
                _ => {
                    let whereabouts = || effects.lookup(fdb, hash(fdb, index, 0, tagged.vid, dst), now);
                    let to = match (destination(whereabouts, dst, from.port), port.peers) {
                        (To::Flood, _) if dst.is_reserved() && !reserved_pass => {
                            To::Refused(DropReason::Reserved)
                        }
                        (to, Peers::All) => to,
                        (_, Peers::Only(peer)) => To::Port(peer),
                        (_, Peers::None) => To::Refused(DropReason::Quarantine),
                    };
                    if let To::Port(port) = to
                        && !outputs.contains(&port)
                    {
                        outputs.push(port);
                    }
                    found = Some((tagged.vid, dst, to));
                    to
                }
            };
            let decision = Decision::new(to, tagged);
            match to {
                To::Port(_) => {
                    if policy.is_none() && tagged.wire.is_none() {
                        same = Some((header, decision));
                    }
                }
                To::Nowhere => {}
                To::Refused(reason) => {
                    effects.refuse(port, reason, (burst, frame), from.queue, now);
                }
                To::Flood if policy.is_none_or(|policy| effects.may_flood(policy, frame, now)) => {
                    floods += 1;
                }
                To::Flood => {
                    effects.refuse(port, DropReason::Storm, (burst, frame), from.queue, now);
                    decisions.push(Decision::NOWHERE);
                    continue;
                }
            }
            decisions.push(decision);
        }
        if floods > 0 {
            *flooded = true;
            effects.flooded(port, floods);
            outputs.clear();
            let others = (0u16..).zip(ports.iter()).filter(|(_, port)| port.is_some());
            outputs.extend(others.map(|(id, _)| PortId(id)).filter(|id| *id != from.port));
        }
    }

    /// Gives each output port its frames. Returns what it has cost to capture them.
    fn deliver<P: Queues>(
        &mut self,
        from: Origin,
        burst: &Burst<'_>,
        tables: &mut Tables<'_, P>,
        now: &Now,
    ) -> u64 {
        let Self {
            decisions,
            outputs,
            picks,
            retags,
            foreign,
            flooded,
            waiting,
            scratch,
            holes,
            coalescer,
            dear,
            ..
        } = self;
        let Origin { port: from, private, queue } = from;
        let sender = tables.sender(from, private);
        let Tables { ports, fdb, handoff } = tables;
        // Whether some port takes whatever is flooded.
        let mut open = false;
        let mut captures = 0;
        let tx = &mut TxContext { from, handoff, now, scratch };
        for &output in &*outputs {
            let Some(Some(port)) = ports.get_mut(usize::from(output.0)) else { continue };
            picks.clear();
            if is_whole(decisions, output) {
                picks.extend(0..decisions.len() as u32);
            } else {
                let mine = |to| to == To::Flood || to == To::Port(output);
                let frames = (0u32..).zip(&*decisions).filter(|(_, decision)| mine(decision.to));
                picks.extend(frames.map(|(index, _)| index));
            }
            if picks.is_empty() {
                continue;
            }
            holes.touch(if private { Touch::of(output) } else { Touch::between(from, output) });
            port.expect(picks.len());
            if port.policy.is_none() && !*foreign {
                open = true;
                port.deliver_all(burst, picks, coalescer, tx);
            } else {
                leave(port, sender, burst, decisions, picks, retags, now);
                if let Some(wire) = &mut port.wire {
                    captures += wire.take_cost();
                    // Nothing is merged on a wire.
                    port.deliver_in_runs(burst, picks, tx);
                } else {
                    port.deliver_picked(burst, picks, retags, coalescer, tx);
                    if !port.unstable.is_empty() {
                        leave_in_copies(port, sender, burst, decisions, coalescer, tx);
                    }
                }
                // Only a port with rules has frames that wait.
                if port.has_waiting() {
                    waiting.push(output);
                }
            }
            port.flush();
            if port.dear > 0 {
                dear.push(output);
            }
            captures += port.capture.as_deref().map_or(0, PortCapture::take_cost);
        }
        holes.touch_nothing();
        for &output in &*outputs {
            if let Some(Some(port)) = ports.get_mut(usize::from(output.0))
                && port.has_answers()
            {
                answer(output, ports, fdb, tx, holes);
            }
        }
        if *flooded && !open {
            let lost = |(_, decision): &(&Frame, &Decision)| decision.to == To::Flood && !decision.reached;
            let lost = burst.frames().iter().zip(&*decisions).filter(lost);
            if let Some(Some(port)) = ports.get(usize::from(from.0)) {
                port.handle.counters.drops.add(DropReason::NoDestination, lost.clone().count() as u64);
                if let Some(capture) = &port.capture {
                    let event = Event::refused(DropReason::NoDestination, queue);
                    capture.offer(event, now, lost.map(|(frame, _)| Offered::of(burst, frame)));
                }
            }
        }
        captures
    }
}

/// Returns true if every frame of a burst goes to this port alone, as in most bursts.
#[inline]
fn is_whole(decisions: &[Decision], output: PortId) -> bool {
    decisions.iter().all(|decision| decision.to == To::Port(output))
}

/// Whether a frame can be delivered in several steps.
fn is_divisible(frame: &Frame, to: To) -> bool {
    to == To::Flood || frame.header.is_gso()
}

/// A frame and its header, in memory of ours.
#[cold]
pub(crate) fn copy(burst: &Burst<'_>, frame: &Frame) -> (Header, Vec<u8>) {
    let mut copy = Vec::new();
    burst.flatten(frame, &mut copy);
    (frame.header, copy)
}

/// Copies of frames, to be forwarded as what is [private](Origin::private).
#[cold]
pub(crate) fn burst_of(copies: &[(Header, Vec<u8>)]) -> Burst<'_> {
    let mut burst = Burst::new();
    for (header, frame) in copies {
        burst.push(*header, ReadSlice::from(&frame[..]));
    }
    burst
}

/// Where frames to an address go that come from another port.
#[inline]
fn destination(whereabouts: impl FnOnce() -> Option<PortId>, dst: Mac, from: PortId) -> To {
    if dst.is_multicast() {
        return To::Flood;
    }
    match whereabouts() {
        Some(port) if port == from => To::Refused(DropReason::SamePort),
        Some(port) => To::Port(port),
        None => To::Flood,
    }
}

/// Decides on the frames of a port that is an end of a wire: all of them go to the other end, whatever they are for, and in no VLAN.
#[inline(never)]
fn decide_wire<P: Queues>(
    from: Origin,
    port: &Port<P>,
    burst: &Burst<'_>,
    now: &Now,
    effects: &mut impl Effects<P>,
    (decisions, outputs): (&mut Vec<Decision>, &mut Vec<PortId>),
) {
    let to = match port.peers {
        Peers::Only(peer) => To::Port(peer),
        Peers::All | Peers::None => To::Refused(DropReason::WireDown),
    };
    decisions.extend(burst.frames().iter().map(|_| Decision::new(to, Decision::NOWHERE.tagged)));
    match to {
        To::Port(peer) => outputs.push(peer),
        _ => {
            for frame in burst.frames() {
                effects.refuse(port, DropReason::WireDown, (burst, frame), from.queue, now);
            }
        }
    }
}

/// Returns the reason for which no frame of a sender leaves by a port, if there is one.
#[inline]
fn closed_to<P: Queues>(port: &Port<P>, sender: Sender) -> Option<DropReason> {
    let policy = port.policy.as_deref()?;
    if policy.is_retired() {
        Some(DropReason::LinkDown)
    } else if !port.peers.include(sender.port) {
        Some(if policy.wire().is_some() { DropReason::WireDown } else { DropReason::Quarantine })
    } else {
        (sender.isolated && policy.isolated()).then_some(DropReason::Isolated)
    }
}

/// Returns the tagging with which a frame leaves by a port that is not [closed](closed_to) to its sender.
#[inline]
fn way_out<P: Queues>(
    port: &Port<P>,
    closed: Option<DropReason>,
    tagged: Tagged,
    prefix: &[u8],
) -> Result<Egress, DropReason> {
    match closed {
        Some(reason) => Err(reason),
        None => port.membership().egress(tagged, prefix).ok_or(DropReason::Vlan),
    }
}

/// For a port that has rules, or frames whose tags have to change: leaves in `picks` what goes out of it now, with what is done to each
/// one's tag in `retags`, and puts what has to wait into its shaper. What the port's firewall cannot judge where it lies is noted in [`Port::unstable`].
fn leave<P: Queues>(
    port: &mut Port<P>,
    sender: Sender,
    burst: &Burst<'_>,
    decisions: &mut [Decision],
    picks: &mut Vec<u32>,
    retags: &mut Vec<Retag>,
    now: &Now,
) {
    if port.wire.is_some() {
        return leave_by_wire(port, sender, burst, decisions, picks, retags, now);
    }
    let closed = closed_to(port, sender);
    retags.clear();
    if let Some(firewall) = port.firewall() {
        firewall.fetch(Direction::In, picks.iter().map(|index| &burst.frames()[*index as usize]));
    }
    picks.retain(|&index| {
        let (frame, decision) = (&burst.frames()[index as usize], &mut decisions[index as usize]);
        let way = way_out(port, closed, decision.tagged, frame.prefix());
        let way = way.map_err(Refusal::Drop).and_then(|egress| match port.firewall() {
            None => Ok(egress),
            Some(firewall) => firewall
                .judge(Direction::In, burst, frame, sender.private, now, sender.worker)
                .map(|()| egress),
        });
        match way {
            Err(Refusal::Unstable) => {
                port.unstable.push(index);
                false
            }
            // What is flooded goes where it may; that it does not go here is no loss.
            Err(Refusal::Drop(_)) if decision.to == To::Flood => false,
            Err(Refusal::Drop(reason)) => {
                port.drop_frame(reason, now, Offered::of(burst, frame));
                false
            }
            Ok(egress) => {
                decision.reached = true;
                let retag = decision.tagged.retag(egress);
                let leaves = port.shape(sender.port, burst, frame, retag, now);
                if leaves {
                    retags.push(retag);
                }
                leaves
            }
        }
    });
}

/// Judges frames once more, in private copies, that the firewall of their receiver cannot judge where they lie, and delivers those that pass.
#[cold]
fn leave_in_copies<P: Queues>(
    port: &mut Port<P>,
    sender: Sender,
    burst: &Burst<'_>,
    decisions: &mut [Decision],
    coalescer: &mut Coalescer,
    tx: &mut TxContext<'_>,
) {
    let unstable = std::mem::take(&mut port.unstable);
    let index = |at: &u32| *at as usize;
    let copies: Vec<_> = unstable.iter().map(|at| copy(burst, &burst.frames()[index(at)])).collect();
    let mut own: Vec<_> = unstable.iter().map(|at| decisions[index(at)]).collect();
    let (mut picks, mut retags) = ((0..copies.len() as u32).collect(), Vec::new());
    let burst = burst_of(&copies);
    let sender = Sender { private: true, ..sender };
    leave(port, sender, &burst, &mut own, &mut picks, &mut retags, tx.now);
    port.deliver_picked(&burst, &picks, &retags, coalescer, tx);
    for (at, decision) in unstable.iter().zip(own) {
        decisions[index(at)].reached |= decision.reached;
    }
}

/// Does the same for a port that is an end of a wire, where frames go in no VLAN and keep their tags.
#[inline(never)]
fn leave_by_wire<P: Queues>(
    port: &mut Port<P>,
    sender: Sender,
    burst: &Burst<'_>,
    decisions: &mut [Decision],
    picks: &mut Vec<u32>,
    retags: &mut Vec<Retag>,
    now: &Now,
) {
    let closed = closed_to(port, sender);
    picks.retain(|&index| {
        let (frame, decision) = (&burst.frames()[index as usize], &mut decisions[index as usize]);
        match closed {
            // What others flood does not come here, which is no loss.
            Some(_) if decision.to == To::Flood => false,
            Some(reason) => {
                port.drop_frame(reason, now, Offered::of(burst, frame));
                false
            }
            None => {
                decision.reached = true;
                port.pass_wire(sender.port, burst, frame, now)
            }
        }
    });
    retags.clear();
    retags.resize(picks.len(), Retag::Keep);
}

/// Tells senders that their frames do not fit the receiver behind a port. It is that receiver's words that they get, so they must
/// come from where it is: a frame that was flooded to other ports, too, is only counted.
#[cold]
pub(crate) fn answer<P: Queues>(
    output: PortId,
    ports: &mut [Option<Port<P>>],
    fdb: &Fdb,
    tx: &mut TxContext<'_>,
    holes: &mut HoleAudit,
) {
    let Some(Some(port)) = ports.get_mut(usize::from(output.0)) else { return };
    let (answers, counters) = (port.take_answers(), Arc::clone(&port.handle.counters));
    for frame in answers {
        let told = send_answer(output, &frame, ports, fdb, tx, holes).is_some();
        let reason = if told { DropReason::TooBigAnswered } else { DropReason::TxTooBig };
        counters.drops.add(reason, 1);
    }
    holes.touch_nothing();
}

/// Delivers what the receiver behind a port would say; `None` if there is nobody to be told.
fn send_answer<P: Queues>(
    output: PortId,
    frame: &[u8],
    ports: &mut [Option<Port<P>>],
    fdb: &Fdb,
    tx: &mut TxContext<'_>,
    holes: &mut HoleAudit,
) -> Option<()> {
    let whereabouts = |vid, mac| fdb.lookup(vid, mac, tx.now.seconds);
    let (back, retag) = way_back(output, frame, ports, whereabouts)?;
    let port = ports.get_mut(usize::from(back.0))?.as_mut()?;
    let mut burst = Burst::new();
    burst.push(Header::default(), ReadSlice::from(frame));
    // What is written now is memory of the frame's sender, not of the port in whose name it is answered.
    holes.touch(Touch::of(back));
    port.refresh(tx.handoff);
    port.expect(1);
    port.deliver(&burst, &burst.frames()[0], retag, tx);
    port.flush();
    Some(())
}

/// Returns the port to which an answer goes that is given in the name of the receiver behind `output`, and with which tag; `None` if there is nobody
/// to be told.
fn way_back<P: Queues>(
    output: PortId,
    answer: &[u8],
    ports: &[Option<Port<P>>],
    whereabouts: impl Fn(Vid, Mac) -> Option<PortId>,
) -> Option<(PortId, Retag)> {
    let membership = ports.get(usize::from(output.0))?.as_ref()?.membership();
    let tagged = membership.classify(answer, &Header::default())?;
    let back = whereabouts(tagged.vid, ether::destination(answer)?)?;
    let from = whereabouts(tagged.vid, ether::source(answer)?)?;
    if from != output || back == output {
        return None;
    }
    let port = ports.get(usize::from(back.0))?.as_ref()?;
    Some((back, tagged.retag(port.membership().leaves(tagged.vid)?)))
}
