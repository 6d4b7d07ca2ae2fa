//! The walk of an imaginary frame through the engine, for `ringferry ctl trace`.
//!
//! **Life cycle.** The control plane thinks up a frame and asks the worker of the queue that it would come from ([`Forwarder::walk_in`]); that worker
//! decides on it as on any other and says where it would go. For each port among those the same worker is asked what would happen there
//! ([`Forwarder::walk_out`]), and if it would hand the frame off, the worker that would get it is asked as well. Each question is a command
//! of its own, between two bursts, so no packet waits for more than one port's answer. [`walk`] puts the questions; it is the same for threads and for
//! the workers of tests.
//!
//! **Nothing remains.** The functions that decide are those of the data path, or the part of them that only asks: nothing is learned, counted, charged,
//! captured or delivered, no flow is remembered and no buffer consumed. An answer holds for one frame at one moment.

use std::sync::Arc;

use ringferry_control::capture::Direction;
use ringferry_firewall::Direction as Way;
use ringferry_memory::ReadSlice;
use ringferry_packet::ether::{self, Mac};
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::segment::MAX_HEADERS;
use ringferry_packet::vnet::{Header, Offloads};
use smallvec::SmallVec;

use super::effects::Effects;
use super::{Forwarder, Origin, Tables, To, burst_of, closed_to, way_back, way_out};
use crate::counters::DropReason;
use crate::fdb::{Fdb, Hashed, Learned, PortId};
use crate::plane::capture::{CaptureId, Event, Offered};
use crate::plane::handoff::ring::Handoff;
pub(crate) use crate::plane::handoff::selector::Owner;
use crate::plane::now::Now;
use crate::plane::offload::gso::{self, Sitting};
use crate::plane::policy::vlan::{Head, Retag, Tagged};
use crate::plane::policy::{PortPolicy, Refusal, WireCost};
use crate::plane::port::{Port, Shaping, ends_a_frame};
use crate::plane::queues::{Delivery, Queues};
use crate::plane::worker::handles::Late;
use crate::rules::Vid;

/// Workers that are asked, at most, where each would hand a frame off to the next.
const HOPS: usize = 8;

/// A frame that nobody has sent.
#[derive(Clone, Debug)]
pub(crate) struct Imaginary {
    /// The port that it would come from.
    pub(crate) from: PortId,
    /// The queue of that port.
    pub(crate) queue: u16,
    pub(crate) header: Header,
    pub(crate) bytes: Vec<u8>,
}

/// The kind of destination that a frame has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// To the one port behind which its destination is.
    Port,
    /// To all ports but the one that it came from, as it is for a group.
    Group,
    /// To all those ports, as nobody knows where its destination is.
    Unknown,
}

/// The fate of a frame at the port where it comes in.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// There is such a port in the worker.
    pub(crate) exists: bool,
    /// Its wait in the port's ring for the port's `rate_in`, in microseconds.
    pub(crate) wait: Option<u64>,
    /// The VLAN that it would belong to.
    pub(crate) tagged: Option<Tagged>,
    /// Its source addresses would be checked.
    pub(crate) is_guarded: bool,
    /// The rule of the port's firewall by which it passes or not, if it was asked.
    pub(crate) rule: Option<String>,
    /// The verdict of the forwarding database on its source, and the port that its source was known to be behind.
    pub(crate) learned: Option<Learned>,
    pub(crate) known_at: Option<PortId>,
    /// Storm control would be asked.
    pub(crate) storm: bool,
    pub(crate) target: Option<Target>,
    /// The ports to which it would go.
    pub(crate) outputs: Vec<PortId>,
    /// The reason for which it would be dropped here.
    pub(crate) dropped: Option<DropReason>,
    /// The captures and mirrors that would see it come in, or be dropped here.
    pub(crate) seen: Vec<CaptureId>,
}

/// The work that has to be done on a frame in software, as its receiver does not take it as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Software {
    /// Its checksum would be computed.
    Checksum,
    /// It would be cut into so many packets.
    Segments(usize),
}

/// The fate of a frame at a port by which it may leave.
#[derive(Clone, Debug)]
pub(crate) struct Exit {
    pub(crate) port: PortId,
    /// The change to its tag, or the reason for which it would not leave there.
    pub(crate) way: Result<Retag, DropReason>,
    /// The rule of the port's firewall by which it passes or not, if it was asked.
    pub(crate) rule: Option<String>,
    /// Its wait for the port's `rate_out`, in microseconds.
    pub(crate) wait: Option<u64>,
    /// Offloads that the receiver takes.
    pub(crate) accepts: Offloads,
    pub(crate) software: Option<Software>,
    /// The queue that it would be put to, and the worker that has that queue, if each queue has one.
    pub(crate) queue: Option<u16>,
    pub(crate) owner: Option<Owner>,
    pub(crate) mtu: Option<u16>,
    /// The packets that it would become, each with what would become of it. [`Delivery::NotHere`] is what the next worker is to say.
    pub(crate) packets: Vec<(Header, Vec<u8>)>,
    /// Bytes at the beginning of each packet by which its queue would be selected: the first piece of it. Longer headers than that are not read.
    head: usize,
    pub(crate) fates: Vec<Result<Delivery, DropReason>>,
    /// Packets of it that would be lost before they are any.
    pub(crate) lost: Vec<DropReason>,
    pub(crate) seen: Vec<CaptureId>,
}

/// All that would become of a frame.
#[derive(Clone, Debug)]
pub(crate) struct Walk {
    pub(crate) worker: usize,
    pub(crate) entry: Entry,
    pub(crate) exits: Vec<Exit>,
}

/// A question to a worker about a port by which a frame may leave.
#[derive(Clone, Debug)]
pub(crate) struct Leaving {
    pub(crate) frame: Arc<Imaginary>,
    pub(crate) to: PortId,
    pub(crate) tagged: Tagged,
    /// For how many microseconds the frame waits where it comes in.
    pub(crate) wait: u64,
    /// What a worker has handed off: the packets that arrive at this one.
    pub(crate) arrived: Option<Vec<(Header, Vec<u8>)>>,
}

/// Whoever passes on questions to workers.
pub(crate) trait Guide {
    /// Returns the worker of a queue.
    fn owner(&self, port: PortId, queue: u16) -> usize;

    /// Asks a worker what would become of a frame where it comes in.
    fn enter(&mut self, worker: usize, frame: Arc<Imaginary>) -> Result<Option<Entry>, Late>;

    /// Asks a worker what would become of it where it leaves.
    fn leave(&mut self, worker: usize, leaving: Leaving) -> Result<Option<Exit>, Late>;
}

/// Finds out what would become of a frame; `None` if no worker has its port.
///
/// # Errors
/// A worker is too busy to answer.
pub(crate) fn walk(guide: &mut impl Guide, frame: Imaginary) -> Result<Option<Walk>, Late> {
    let worker = guide.owner(frame.from, frame.queue);
    let frame = Arc::new(frame);
    let entry = guide.enter(worker, Arc::clone(&frame))?.filter(|entry| entry.exists);
    let Some(mut entry) = entry else { return Ok(None) };
    let mut exits = Vec::new();
    if let (Some(tagged), None) = (entry.tagged, entry.dropped) {
        for &to in &entry.outputs {
            let wait = entry.wait.unwrap_or(0);
            let leaving = Leaving { frame: Arc::clone(&frame), to, tagged, wait, arrived: None };
            let Some(mut exit) = guide.leave(worker, leaving.clone())? else { continue };
            // A worker that has what another one has handed off selects the queue anew.
            let mut asked = exit.owner;
            for _ in 0..HOPS {
                let Some(Owner::Other(owner)) = asked.filter(|_| exit.fates.contains(&Ok(Delivery::NotHere)))
                else {
                    break;
                };
                let arrived = Some(exit.packets.clone());
                let Some(there) = guide.leave(owner, Leaving { arrived, ..leaving.clone() })? else {
                    exit.fates.fill(Err(DropReason::LinkDown));
                    break;
                };
                asked = there.owner;
                (exit.fates, exit.seen) = (there.fates, there.seen);
            }
            exits.push(exit);
        }
        if entry.target != Some(Target::Port) && exits.iter().all(|exit| exit.way.is_err()) {
            entry.dropped = Some(DropReason::NoDestination);
        }
    }
    Ok(Some(Walk { worker, entry, exits }))
}

/// Decides on a frame without doing anything, and takes note of what was found.
#[derive(Default)]
pub(super) struct Asking {
    tagged: Option<Tagged>,
    learned: Option<Learned>,
    known_at: Option<PortId>,
    storm: bool,
    dropped: Option<DropReason>,
    /// The source that would be known at the port from now on.
    source: Option<((Vid, Mac), PortId)>,
}

impl<P: Queues> Effects<P> for Asking {
    fn admit(
        &mut self,
        policy: &PortPolicy,
        burst: &Burst<'_>,
        frame: &Frame,
        private: bool,
        now: &Now,
        _: usize,
    ) -> Result<Tagged, Refusal> {
        self.tagged = policy.membership().classify(frame.prefix(), &frame.header);
        policy.check(burst, frame, private, now)
    }

    fn learn(
        &mut self,
        port: &Port<P>,
        fdb: &mut Fdb,
        _: &mut Handoff,
        source: Hashed,
        now: &Now,
    ) -> Learned {
        let (id, vid, mac) = (port.handle.id, source.vid(), source.mac());
        let learned = fdb.would_learn(vid, mac, id, now.seconds);
        self.learned = Some(learned);
        self.known_at = fdb.lookup(vid, mac, now.seconds);
        let is_kept = mac.is_station() && matches!(learned, Learned::Known | Learned::News);
        self.source = is_kept.then_some(((vid, mac), id));
        learned
    }

    fn lookup(&self, fdb: &Fdb, address: Hashed, now: &Now) -> Option<PortId> {
        match self.source {
            Some((source, port)) if source == (address.vid(), address.mac()) => Some(port),
            _ => fdb.lookup_hashed(address, now.seconds),
        }
    }

    fn may_flood(&mut self, policy: &PortPolicy, frame: &Frame, now: &Now) -> bool {
        self.storm = policy.has_storm();
        policy.could_flood(frame, now)
    }

    fn refusal(&mut self, _: &PortPolicy, _: &Burst<'_>, _: &Frame) -> Option<Vec<u8>> {
        None
    }

    fn flooded(&mut self, _: &Port<P>, _: u64) {}

    fn refuse(&mut self, _: &Port<P>, reason: DropReason, _: (&Burst<'_>, &Frame), _: Option<u16>, _: &Now) {
        self.dropped = Some(reason);
    }
}

impl Forwarder {
    /// Says what would become of a frame where it comes in.
    pub(crate) fn walk_in<P: Queues>(frame: &Imaginary, tables: &mut Tables<'_, P>, now: &Now) -> Entry {
        let copies = [(frame.header, frame.bytes.clone())];
        let burst = burst_of(&copies);
        let mut entry = Entry {
            exists: false,
            wait: None,
            tagged: None,
            is_guarded: false,
            rule: None,
            learned: None,
            known_at: None,
            storm: false,
            target: None,
            outputs: Vec::new(),
            dropped: None,
            seen: Vec::new(),
        };
        let (Some(Some(port)), Some(first)) =
            (tables.ports.get(usize::from(frame.from.0)), burst.frames().first())
        else {
            return entry;
        };
        entry.exists = true;
        let offered = Offered::of(&burst, first);
        let policy = port.policy.as_deref();
        entry.wait = policy.and_then(PortPolicy::rate_in).map(|limit| limit.wait(now.micros()));
        entry.is_guarded = policy.is_some_and(PortPolicy::has_guard);
        entry.rule = port.firewall().and_then(|firewall| firewall.would_pass(Way::Out, &burst, first, now).1);
        let arrives = Event { direction: Direction::In, dropped: None, queue: Some(frame.queue) };
        let capture = |port: &Port<P>, event| {
            port.capture.as_ref().map_or_else(Vec::new, |capture| capture.would_take(event, offered))
        };
        entry.seen = capture(port, arrives);
        if port.link_down {
            entry.dropped = Some(DropReason::LinkDown);
        } else {
            let mut asking = Asking { tagged: None, ..Asking::default() };
            let mut forwarder = Forwarder::default();
            let from = Origin { port: frame.from, private: true, queue: Some(frame.queue) };
            // Nobody looks at a frame before its wait is over, and buckets fill up meanwhile.
            forwarder.decide(from, &burst, tables, &now.after(entry.wait.unwrap_or(0)), &mut asking);
            let Asking { tagged, learned, known_at, storm, dropped, .. } = asking;
            let decided = forwarder.decisions.first();
            entry.tagged = match dropped {
                None => decided.map(|decision| decision.tagged),
                // It was dropped before, or after, it was in a VLAN.
                Some(DropReason::Vlan) => None,
                Some(_) => tagged.or_else(|| {
                    let port = tables.ports.get(usize::from(frame.from.0))?.as_ref()?;
                    port.membership().classify(first.prefix(), &first.header)
                }),
            };
            (entry.learned, entry.known_at, entry.storm) = (learned, known_at, storm);
            let is_group = ether::destination(&frame.bytes).is_some_and(Mac::is_multicast);
            entry.target = decided.and_then(|decision| match decision.to {
                To::Port(_) => Some(Target::Port),
                To::Flood if is_group => Some(Target::Group),
                To::Flood => Some(Target::Unknown),
                To::Nowhere | To::Refused(_) => None,
            });
            (entry.dropped, entry.outputs) = (dropped, forwarder.outputs);
        }
        if let (Some(reason), Some(Some(port))) = (entry.dropped, tables.ports.get(usize::from(frame.from.0)))
        {
            entry.seen.extend(capture(port, Event::refused(reason, Some(frame.queue))));
            entry.outputs.clear();
        }
        entry
    }

    /// Says what would become of a frame at a port by which it may leave; `None` if there is no such port.
    pub(crate) fn walk_out<P: Queues>(
        leaving: &Leaving,
        tables: &mut Tables<'_, P>,
        now: &Now,
    ) -> Option<Exit> {
        let Leaving { frame, to, tagged, wait, arrived } = leaving;
        let now = &now.after(*wait);
        let sender = tables.sender(frame.from, true);
        let Tables { ports, fdb, handoff } = tables;
        let port = ports.get_mut(usize::from(to.0))?.as_mut()?;
        port.refresh(handoff);
        let copies = [(frame.header, frame.bytes.clone())];
        let burst = burst_of(&copies);
        let first = burst.frames().first()?;
        let verdict = port.firewall().map(|firewall| firewall.would_pass(Way::In, &burst, first, now));
        let is_allowed = verdict.as_ref().is_none_or(|(passes, _)| *passes);
        let mut exit = Exit {
            port: *to,
            way: way_out(port, closed_to(port, sender), *tagged, first.prefix())
                .and_then(|egress| if is_allowed { Ok(egress) } else { Err(DropReason::Firewall) })
                .map(|egress| tagged.retag(egress)),
            rule: verdict.and_then(|(_, rule)| rule),
            wait: None,
            accepts: port.offloads(),
            software: None,
            queue: None,
            owner: None,
            mtu: port.mtu(),
            packets: Vec::new(),
            head: usize::MAX,
            fates: Vec::new(),
            lost: Vec::new(),
            seen: Vec::new(),
        };
        match arrived {
            Some(packets) => exit.packets.clone_from(packets),
            None => {
                let Ok(retag) = exit.way else { return Some(exit) };
                shape(&mut exit, port, first, now);
                if exit.lost.is_empty() && exit.wait.is_some() {
                    exit.cut_later(port, frame, retag);
                } else if exit.lost.is_empty() {
                    exit.accepts = port.accepts(first, retag);
                    exit.cut(&burst, first, retag);
                }
            }
        }
        exit.queue_up(port, frame.from, handoff, now);
        // The answers that senders get need the database of the worker that gives them.
        let source = ether::source(&frame.bytes).filter(|mac| mac.is_station());
        let learned = source.map(|mac| fdb.would_learn(tagged.vid, mac, frame.from, now.seconds));
        let is_kept = matches!(learned, Some(Learned::Known | Learned::News));
        let whereabouts = |vid, mac| match source {
            Some(own) if is_kept && (vid, mac) == (tagged.vid, own) => Some(frame.from),
            _ => fdb.lookup(vid, mac, now.seconds),
        };
        exit.answer(*to, ports, whereabouts, now);
        exit.capture(ports.get(usize::from(to.0))?.as_ref()?, &burst);
        Some(exit)
    }
}

/// Says whether a frame would wait for the port's egress limit, or on its wire. Whether it would be lost there is left to chance.
fn shape<P: Queues>(exit: &mut Exit, port: &Port<P>, frame: &Frame, now: &Now) {
    if let Some(wire) = &port.wire {
        match wire.outlook(frame.len.into(), now.micros() * 1000) {
            Some(0) => {}
            Some(nanos) => exit.wait = Some(nanos.div_ceil(1000)),
            None => exit.lost.push(DropReason::WireLimit),
        }
        return;
    }
    let Some(limit) = port.policy.as_deref().and_then(PortPolicy::rate_out) else { return };
    let micros = now.micros();
    match port.shaping(limit, WireCost::of_frame(frame), micros) {
        Shaping::Passes => {}
        Shaping::Waits => exit.wait = Some(limit.wait(micros).max(1)),
        Shaping::NoRoom => exit.lost.push(DropReason::RateOut),
    }
}

impl Exit {
    /// Makes the packets of a frame that waits in the shaper first, where its tag is changed.
    fn cut_later<P: Queues>(&mut self, port: &Port<P>, frame: &Imaginary, retag: Retag) {
        let (mut header, mut copy) = (frame.header, frame.bytes.clone());
        if retag != Retag::Keep {
            let mut head = Head::new();
            let Some(used) = retag.apply(&mut header, &copy, &mut head) else {
                return self.lost.push(DropReason::Vlan);
            };
            copy.splice(..used, head);
        }
        let copies = [(header, copy)];
        let burst = burst_of(&copies);
        if let [later] = burst.frames() {
            self.accepts = port.accepts(later, Retag::Keep);
            // On an impaired wire each packet is one by itself.
            if port.wire.as_ref().is_some_and(|wire| !wire.is_open()) {
                self.accepts &= Offloads::CSUM;
            }
            self.cut(&burst, later, Retag::Keep);
        }
    }

    /// Makes the packets that the receiver would get of a frame, as [`Port::deliver`] does.
    fn cut(&mut self, burst: &Burst<'_>, frame: &Frame, retag: Retag) {
        if self.accepts.accepts(&frame.header) {
            return self.push(frame.header, frame.prefix(), burst.rest(frame), retag);
        }
        if !frame.header.is_gso() {
            self.software = Some(Software::Checksum);
            let (mut scratch, mut behind_head) = (Vec::new(), SmallVec::new());
            match gso::finish(burst, frame, &mut scratch, &mut behind_head) {
                Ok(packet) => self.push(packet.header, packet.first, packet.rest, retag),
                Err(reason) => self.lost.push(reason),
            }
            return;
        }
        let mut head = [0; MAX_HEADERS];
        match gso::segments(burst, frame, self.accepts, Sitting::WHOLE, &mut head) {
            Ok(mut segments) => {
                self.software = Some(Software::Segments(segments.left()));
                while let Some(packet) = segments.next_packet() {
                    self.push(packet.header, packet.first, packet.rest, retag);
                }
            }
            Err(reason) => {
                self.software = Some(Software::Segments(0));
                self.lost.push(reason);
            }
        }
    }

    /// Adds a packet with its tag changed, as [`Port::put_tagged`] does.
    fn push(&mut self, mut header: Header, first: &[u8], rest: &[ReadSlice<'_>], retag: Retag) {
        let mut packet = first.to_vec();
        self.head = first.len();
        if retag != Retag::Keep {
            let mut head = Head::new();
            let Some(used) = retag.apply(&mut header, first, &mut head) else {
                return self.lost.push(DropReason::Vlan);
            };
            self.head = head.len();
            packet.splice(..used, head);
        }
        for piece in rest {
            let at = packet.len();
            packet.resize(at + piece.len(), 0);
            piece.copy_to(&mut packet[at..]);
        }
        self.packets.push((header, packet));
    }

    /// Asks the queue of the packets what it would say to them, as [`Port::put`] does.
    fn queue_up<P: Queues>(&mut self, port: &mut Port<P>, from: PortId, handoff: &Handoff, now: &Now) {
        let Some((_, first)) = self.packets.first() else { return };
        match port.peek_queue(&first[..self.head.min(first.len())], handoff, now) {
            Ok((queue, owner)) => {
                (self.queue, self.owner) = (owner.map(|_| queue), owner);
                self.fates = port.queues.probe(queue, &self.packets);
                for fate in &mut self.fates {
                    *fate = match (*fate, owner) {
                        (Ok(Delivery::NotHere), Some(Owner::Other(worker)))
                            if handoff.is_held_up(worker, from) =>
                        {
                            Err(DropReason::WorkerBusy)
                        }
                        (Ok(Delivery::NotHere), Some(Owner::Soon)) => Ok(Delivery::Queued),
                        (Ok(Delivery::NotHere), Some(Owner::This)) => Err(DropReason::LinkDown),
                        (fate, _) => fate,
                    };
                }
            }
            Err(reason) => self.fates = vec![Err(reason); self.packets.len()],
        }
        // What one packet of a frame finds no place for, later ones would find none for either.
        let ends = |fate: &Result<_, DropReason>| fate.is_err_and(ends_a_frame);
        if let Some(at) = self.fates.iter().position(ends) {
            let last = self.fates[at];
            self.fates[at..].fill(last);
        }
    }

    /// Finds out whether the sender of packets that do not fit would be told.
    fn answer<P: Queues>(
        &mut self,
        output: PortId,
        ports: &[Option<Port<P>>],
        whereabouts: impl Fn(Vid, Mac) -> Option<PortId>,
        now: &Now,
    ) {
        let Some(Some(port)) = ports.get(usize::from(output.0)) else { return };
        let mut left = port.answers_left(now);
        for (fate, (header, packet)) in self.fates.iter_mut().zip(&self.packets) {
            if *fate != Err(DropReason::TxTooBig) || left == 0 {
                continue;
            }
            if let Some(answer) = port.answer_to(header, packet.len() as u64, packet, &[]) {
                left -= 1;
                if way_back(output, &answer, ports, &whereabouts).is_some() {
                    *fate = Err(DropReason::TooBigAnswered);
                }
            }
        }
    }

    /// Finds the captures that would see what becomes of the frame at the port.
    fn capture<P: Queues>(&mut self, port: &Port<P>, burst: &Burst<'_>) {
        let Some(capture) = &port.capture else { return };
        let lost = self.lost.iter().flat_map(|reason| {
            let frames = burst.frames().iter();
            frames.flat_map(|frame| capture.would_take(Event::lost(*reason), Offered::of(burst, frame)))
        });
        let mut seen: Vec<_> = lost.collect();
        for (fate, (header, packet)) in self.fates.iter().zip(&self.packets) {
            let event = match fate {
                // The next worker says.
                Ok(Delivery::NotHere) => continue,
                Ok(_) => Event::delivered(self.queue),
                Err(reason) => Event { queue: self.queue, ..Event::lost(*reason) },
            };
            seen.extend(capture.would_take(event, Offered::private(*header, packet)));
        }
        seen.sort_unstable_by_key(|capture| capture.0);
        seen.dedup();
        self.seen = seen;
    }
}
