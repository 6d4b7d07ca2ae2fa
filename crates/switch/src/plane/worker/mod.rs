//! A worker: one thread that moves packets between the queues it owns.
//!
//! **Life cycle.** [`Workers::start`] makes every worker, on a thread of its own, that calls [`Worker::run`] and nothing else; ports and queues
//! come and go by [command](command::Command), and the last command ends the thread.
//!
//! **The loop.** A queue that packets come from is either *active* (polled each round, its notifications off) or
//! *armed* (notifications on, its descriptor watched, costing nothing). Frames that are found in an
//! active queue are forwarded at once; a queue that stays empty is armed, with a re-check, as the peer
//! may have added work before it saw that we want to be told. With no active queue left the worker
//! sleeps in epoll.
//!
//! **Shares.** [`fair`] decides whose turn it is: what a port's frames cost is charged to it, and one that has cost more than its share waits while
//! others have work. Two kinds of source have no queue: frames of a port that were [put off](crate::plane::forward::slow), and frames of a
//! port that other workers have handed off to this one.
//!
//! ```text
//!            wake (epoll)                     empty for ROUNDS_TO_ARM rounds, or all are empty
//!   armed ───────────────► active ─────────────────────────────────────────────────────────► armed
//!     ▲                      │  ▲                     (re-check finds work: stays active)
//!     └── start, attach ─────┘  └──── polled each round: lease, frames, forward, complete
//! ```
//!
//! A source whose port has used up its `rate_in` is *paused*: neither of both, until a timer makes it active again.
//!
//! | file | idea |
//! |---|---|
//! | `mod` | the loop: poll what is active, arm what is idle, sleep when nothing is active |
//! | `fair` | deficit round robin: which port may be served |
//! | `debts` | receivers whose buffers cost more than their share |
//! | `departed` | ports that were removed a moment ago, of which others may still tell |
//! | `execute` | commands of the control plane, carried out between two bursts |
//! | `direct` | a port that is read directly into the sole receiver's buffers |
//! | `command` | the commands |
//! | `handles` | the control plane's handles of the threads |
//! | `fault` | faults that the control plane has to act on |
//! | `handover` | standing still, and going on in another process |
//! | `holes` | ports that punch holes into memory which the worker touches |
//! | `wires` | ports that become ends of wires |
//! | `timers` | what has to be done at a later time: ports that are paced, and queues of shapers |

use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_control::capture::Direction;
use ringferry_memory::ReadSlice;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_sys::epoll::{Epoll, EventBuf};
use ringferry_sys::spin::{Idle, Spin};

use crate::config::SwitchConfig;
use crate::counters::{DropReason, WorkerCounters};
use crate::fdb::{Fdb, PortId, Restless};
use crate::log_limit::LogLimit;
use crate::plane::capture::{CaptureShare, Copied, Event, Offered, PortCapture};
use crate::plane::cost;
use crate::plane::forward::{self, BURST_COST, Forwarder, Origin, Tables};
#[cfg(any(test, feature = "testing"))]
use crate::plane::handoff::ring::HeldUp;
use crate::plane::handoff::ring::{Handoff, HandoffFrame, News};
use crate::plane::now::{Clock, Now};
use crate::plane::policy::PortPolicy;
use crate::plane::policy::vlan::Retag;
use crate::plane::port::{Port, TxContext};
use crate::plane::queues::{Lease, Queues, Source};

mod audit;
pub(crate) mod command;
mod debts;
pub(crate) mod departed;
mod direct;
mod execute;
mod fair;
pub(crate) mod fault;
pub(crate) mod handles;
pub(crate) mod handover;
pub(crate) mod holes;
mod timers;
mod wires;

use audit::{Auditor, Look};
use command::{Inbox, Posted};
use debts::Debts;
use departed::Departed;
use fair::Accounts;
pub use handles::Workers;
use handover::Standing;
use holes::Touch;
use timers::{Quota, Timer, Timers};
use wires::WakeMargin;

/// Packets taken from a queue at a time. DPDK, OVS and VPP settled on 32 (or 256 with vectors); 64
/// gained nothing here and keeps others waiting twice as long.
pub(crate) const BURST: usize = 32;

/// Rounds in which a queue may be found empty, while others are busy, before it is armed. Each costs
/// one load of a line that did not change; arming costs a fence and, later, the peer a kick.
const ROUNDS_TO_ARM: u32 = 256;

/// Work between looks at epoll, in the unit of [`cost`]: how long commands and idle ports wait while others are busy. Twenty bursts of small
/// frames; a look costs less than a hundredth of it.
const EVENTS_COST: u64 = 100_000;

/// Time between looks at epoll while there is work, for when work takes longer than its price says: the worker looks after [`EVENTS_COST`] or after
/// this, whichever comes first.
const EVENTS_TIME: Duration = Duration::from_micros(500);

/// What a round costs besides its frames, in the unit of [`cost`]. Without it rounds that move few frames would hardly bring the next look at epoll
/// nearer.
const ROUND: u64 = 50;

/// What a burst may cost, in the unit of [`cost`], for the next one of its port to be taken as large: below the bound beyond which frames are put
/// off, and thereby copied.
const TURN_COST: u64 = BURST_COST * 3 / 4;

/// What the frames of a port that were put off may cost in one of its turns, but for what a step costs.
const SLOW_COST: u64 = 100_000;

/// How often rings without a kick descriptor are looked at while everything else is idle.
const KICKLESS: Duration = Duration::from_micros(100);

/// Events taken per look. More are reported by the next.
const EVENTS: usize = 64;

/// Commands carried out per look, so that no flood of them keeps packets waiting.
const COMMANDS: usize = 64;

/// Buckets of the forwarding database swept per second of activity.
const SWEEP: usize = 1024;

/// Buckets of the forwarding database in which a round looks for addresses to forget: 64 KiB, or some tens of microseconds.
const FORGET: usize = 1024;

/// Epoll token of the command bell. Others are a port number and a queue.
pub(crate) const BELL: u64 = u64::MAX;

/// A source that is polled, and for how many rounds it was empty.
struct Active {
    source: Source,
    empty: u32,
}

/// What a poll of a source found.
#[derive(Clone, Copy)]
struct Polled {
    moved: bool,
    /// Epoll will tell when there is more; polling again would only find that out.
    exhausted: bool,
}

impl Polled {
    const NOTHING: Polled = Polled { moved: false, exhausted: false };
}

/// The state of the thread.
pub(crate) struct Worker<P: Queues> {
    ports: Vec<Option<Port<P>>>,
    /// The policies of ports that have rules, by port number. They are kept apart from `ports` because the control plane sets the rules of a port
    /// before it adds the port.
    policies: Vec<Option<Arc<PortPolicy>>>,
    active: Vec<Active>,
    fdb: Fdb,
    /// Of lines about addresses that move again and again.
    restless_limit: LogLimit,
    forwarder: Forwarder,
    /// Storage of the last burst.
    storage: Burst<'static>,
    epoll: Epoll,
    /// Lent out while its events are served.
    events: Option<EventBuf>,
    inbox: Inbox<P>,
    handoff: Handoff,
    /// Ports that handed-off frames go to, in this turn.
    handed: Vec<PortId>,
    accounts: Accounts,
    debts: Debts,
    departed: Departed,
    /// Work done since the worker was started.
    worked: u64,
    /// A source that has work was left out of the last round.
    left_out: bool,
    /// What sources cost is measured, beside the price list.
    auditor: Auditor,
    counters: Arc<WorkerCounters>,
    spin: Spin,
    clock: Clock,
    timers: Timers,
    /// How much earlier than a frame on a wire is due it is awake.
    margin: WakeMargin,
    /// The part of its time that captures may use.
    captures: Arc<CaptureShare>,
    /// Ports that have mirrors.
    mirrored: Vec<PortId>,
    /// The coarse clock: seconds since the start.
    seconds: u32,
    /// Nothing is taken from any queue, as another process is to go on with them.
    paused: bool,
    /// The number of workers of the switch that are paused.
    standing: Arc<Standing>,
    /// The others that are paused are waited for no more.
    impatient: bool,
    stop: bool,
}

impl<P: Queues> Worker<P> {
    /// A worker without ports. `epoll` watches nothing but the inbox's bell, under [`BELL`]; `seed`
    /// is random and secret; `clock` is the same for all workers, as token buckets are filled by all of them.
    pub(crate) fn new(
        config: &SwitchConfig,
        inbox: Inbox<P>,
        handoff: Handoff,
        epoll: Epoll,
        seed: [u64; 2],
        counters: Arc<WorkerCounters>,
        clock: Clock,
    ) -> Self {
        Self {
            ports: Vec::new(),
            policies: Vec::new(),
            active: Vec::new(),
            fdb: Fdb::new(config.mac_table_size as usize, config.mac_age_seconds, seed),
            restless_limit: LogLimit::new(4),
            forwarder: Forwarder::default(),
            storage: Burst::new(),
            epoll,
            events: None,
            inbox,
            handoff,
            handed: Vec::new(),
            accounts: Accounts::default(),
            debts: Debts::default(),
            departed: Departed::default(),
            worked: 0,
            left_out: false,
            auditor: Auditor::default(),
            counters,
            spin: Spin::new(Duration::from_micros(config.poll_microseconds.into())),
            clock,
            timers: Timers::default(),
            margin: WakeMargin::default(),
            captures: Arc::default(),
            mirrored: Vec::new(),
            seconds: clock.seconds(),
            paused: false,
            standing: Arc::default(),
            impatient: false,
            stop: false,
        }
    }

    /// Stands still together with all workers that have the same `standing`, and begins [paused](Workers::start_paused) or not.
    pub(crate) fn stand_with(mut self, standing: Arc<Standing>, paused: bool) -> Self {
        self.standing = standing;
        self.set_paused(paused);
        self
    }

    /// Says by `touched` from now on whose memory it touches.
    pub(crate) fn tell(mut self, touched: Arc<holes::Touched>) -> Self {
        self.forwarder.holes = holes::HoleAudit::new(touched);
        self
    }

    /// Serves until the control plane ends it.
    pub(crate) fn run(mut self) {
        let mut last = Look { at: Instant::now(), worked: 0 };
        let mut before = last.at;
        while !self.stop {
            if self.stands_still() {
                self.stand_still();
                last = Look { at: Instant::now(), worked: self.worked };
                before = last.at;
                continue;
            }
            let moved = self.round();
            self.counters.polls.add(1);
            if moved {
                self.counters.busy_polls.add(1);
                self.spin.found();
                let now = Instant::now();
                self.counters.count_round(now - before);
                self.note_round(before, now);
                before = now;
                if self.worked - last.worked >= EVENTS_COST || now - last.at >= EVENTS_TIME {
                    self.auditor.consider(&last, self.worked, now);
                    self.serve_events(Some(Duration::ZERO));
                    last = Look { at: now, worked: self.worked };
                }
                continue;
            }
            match self.idle_for_wire().unwrap_or_else(|| self.spin.idle()) {
                Idle::Again if !self.active.is_empty() => {}
                // A tap has no ring that could be looked at.
                Idle::Again | Idle::Around => {
                    self.serve_events(Some(Duration::ZERO));
                }
                Idle::Sleep => {
                    if let Some(timeout) = self.prepare_to_sleep() {
                        // What follows the sleep is work again: the events that ended it touch memory, too.
                        before = self.sleep(timeout, before);
                    }
                }
            }
            last = Look { at: Instant::now(), worked: self.worked };
            self.counters.count_polling(last.at - before);
            self.note_round(before, last.at);
            before = last.at;
        }
    }

    /// Takes note of how long a round took, with whatever was done after it but sleep in epoll: a slow one is [looked into](holes).
    #[inline]
    fn note_round(&mut self, before: Instant, now: Instant) {
        let holes = &mut self.forwarder.holes;
        if now - before >= holes::SLOW {
            holes.begin(now);
        } else if holes.is_on() {
            holes.end_if_over(now);
        }
    }

    /// What a test does to have a round taken for [slow](holes::SLOW). The worker is told by `looks` in how many looks it has slept since it last asked.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn slow_round(&mut self, looks: fn() -> u32) {
        self.forwarder.holes.script(looks);
        let now = Instant::now();
        self.note_round(now, now + holes::SLOW);
    }

    /// What a test does to let so much time pass in which nothing is found.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn quiet_for(&mut self, passed: Duration) {
        let now = Instant::now() + passed;
        self.note_round(now, now);
    }

    /// A [round](Self::round) whose frames for other workers are held up on their way until [`let_pass`](Self::let_pass), as those of a thread are that
    /// has looked whose a queue is and not yet pushed.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn round_held_up(&mut self) -> HeldUp {
        let held = self.handoff.hold_up();
        self.round();
        held
    }

    /// What it counts.
    #[cfg(test)]
    pub(crate) fn counters(&self) -> &WorkerCounters {
        &self.counters
    }

    /// The event that wakes it.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn bell(&self) -> &ringferry_sys::eventfd::EventFd {
        &self.inbox.bell
    }

    /// See [`Handoff::under_way`].
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn under_way(&mut self, worker: usize) -> usize {
        self.handoff.under_way(worker)
    }

    /// What a round has handed over and was held up arrives.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn let_pass(&mut self, held: HeldUp) {
        self.handoff.let_pass(held);
    }

    /// Polls every active source once whose port may be served; whether anything moved, or was left out.
    pub(crate) fn round(&mut self) -> bool {
        let mut moved = self.run_timers();
        // What timers, commands and mirrors have delivered is nobody's poll.
        self.note_debts(None);
        moved |= self.fdb.forget_some(FORGET);
        moved |= self.poll_handoff();
        self.accounts.next_round();
        self.worked += ROUND;
        // A port that may be served in every round, but not all of its queues, begins with another one each time.
        if std::mem::take(&mut self.left_out) && !self.active.is_empty() {
            self.active.rotate_left(1);
        }
        let mut at = 0;
        while let Some(&Active { source, empty }) = self.active.get(at) {
            if !self.may_be_polled(source) {
                self.left_out = true;
                at += 1;
                continue;
            }
            // What has been silent for long is not measured: it would cost more than the poll.
            let polled = if !self.auditor.is_on() || empty >= ROUNDS_TO_ARM {
                self.poll_charged(source)
            } else {
                self.poll_audited(source)
            };
            moved |= polled.moved;
            if polled.exhausted || !polled.moved && empty >= ROUNDS_TO_ARM && self.arm(source) {
                // In order: the queues of a port that is paced take turns.
                self.active.remove(at);
                continue;
            }
            self.active[at].empty = if polled.moved { 0 } else { empty.saturating_add(1) };
            // A turn lasts until the port has had what it was paid, or has nothing more.
            if !polled.moved || !self.accounts.may_be_served(source.port) {
                at += 1;
            }
        }
        if !self.mirrored.is_empty() {
            moved |= self.deliver_mirrored();
        }
        self.convict();
        self.debts.pay(&mut self.ports, &mut self.accounts);
        if self.left_out && !moved {
            let Worker { accounts, active, .. } = self;
            accounts.skip_rounds(active.iter().map(|active| active.source.port));
        }
        moved || self.left_out
    }

    /// Charges receivers for their buffers, after something was forwarded: of this port, or of a shaper's.
    #[inline]
    fn note_debts(&mut self, from: Option<PortId>) {
        let mut any = false;
        while let Some(id) = self.forwarder.next_dear() {
            any = true;
            let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { continue };
            let cost = std::mem::take(&mut port.dear);
            port.handle.counters.work_nanoseconds.add(cost);
            self.worked += cost;
            port.owes |= self.debts.charge(id, cost);
        }
        if let Some(from) = from.filter(|_| !any) {
            self.debts.note_other(from);
        }
    }

    /// Takes ports out of service that the worker has slept for, now that no burst is on loan.
    #[inline]
    fn convict(&mut self) {
        while let Some(id) = self.forwarder.holes.next_convicted() {
            self.with_port(id, |port, watch| port.queues.take_out_of_service(holes::HOLES, watch));
        }
    }

    /// Whether a source's port may be served, and the source is the one it is served from: a port of which frames were put off is
    /// served from those.
    #[inline]
    fn may_be_polled(&mut self, source: Source) -> bool {
        self.accounts.may_be_served(source.port)
            && (source.queue >= Source::HANDED || self.slow_frames(source.port) == 0)
    }

    /// Frames of a port that were put off.
    #[inline]
    fn slow_frames(&self, id: PortId) -> usize {
        self.ports.get(usize::from(id.0)).and_then(Option::as_ref).map_or(0, |port| port.slow.len())
    }

    /// Charges a port for work.
    #[inline]
    fn charge(&mut self, id: PortId, cost: u64) {
        self.accounts.charge(id, cost);
        self.worked += cost;
        if let Some(port) = self.port(id) {
            port.handle.counters.work_nanoseconds.add(cost);
        }
    }

    /// Takes over what other workers have for this one: frames become work of the ports that sent them.
    #[inline]
    fn poll_handoff(&mut self) -> bool {
        let mut moved = false;
        for _ in 0..BURST {
            let Some(News(vid, mac, port)) = self.handoff.hear() else { break };
            moved = true;
            if self.departed.contains(port, self.clock) {
                continue;
            }
            let _ = self.fdb.learn(vid, mac, port, self.seconds);
            self.charge(port, cost::LEARN);
        }
        while let Some((worker, handed)) = self.handoff.receive() {
            moved = true;
            let from = handed.from;
            let Some(Some(port)) = self.ports.get_mut(usize::from(from.0)) else {
                // Its sender was unplugged.
                self.handoff.give_back(worker, from, handed.frame);
                continue;
            };
            port.handed.push_back((worker, handed));
            if port.handed.len() == 1 {
                self.activate(Source { port: from, queue: Source::HANDED });
            }
        }
        moved
    }

    /// Delivers a burst of what a port has sent on queues of other workers.
    fn poll_handed(&mut self, id: PortId) -> Polled {
        let mut cost = 0;
        let mut exhausted = false;
        for _ in 0..BURST {
            let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { return Polled::NOTHING };
            let Some((worker, HandoffFrame { port: to, header, frame, .. })) = port.handed.pop_front() else {
                exhausted = true;
                break;
            };
            cost += self.deliver_one(id, to, header, &frame);
            self.handoff.give_back(worker, id, frame);
            if cost >= TURN_COST {
                break;
            }
        }
        while let Some(id) = self.handed.pop() {
            self.flush(id);
        }
        self.forwarder.holes.touch_nothing();
        // A queue may have gone to another worker meanwhile, and the frame after it.
        self.handoff.flush();
        self.charge(id, cost);
        Polled { moved: cost > 0, exhausted }
    }

    /// Delivers a frame that waited in private memory; whatever its receiver took then, it is asked again. [`flush`](Self::flush) follows for the ports in
    /// `handed`. What it cost.
    fn deliver_one(&mut self, from: PortId, to: PortId, header: Header, frame: &[u8]) -> u64 {
        let now = Now::new(self.clock, self.seconds);
        let Some(Some(port)) = self.ports.get_mut(usize::from(to.0)) else { return cost::FRAME_OUT };
        if !self.handed.contains(&to) {
            self.handed.push(to);
            port.refresh(&self.handoff);
            port.expect(1);
        }
        self.forwarder.holes.touch(Touch::of(to));
        let scratch = self.forwarder.scratch();
        let mut tx = TxContext { from, handoff: &mut self.handoff, now: &now, scratch };
        let kind = port.queues.frame_cost();
        if port.offloads().accepts(&header) {
            let _ = port.put(header, frame, &[], &mut tx);
            return cost::of_plain(frame.len() as u64, 0, kind);
        }
        let mut burst = Burst::new();
        burst.push(header, ReadSlice::from(frame));
        let frame = &burst.frames()[0];
        let cost = cost::of_delivery(&burst, frame, port.offloads(), kind);
        port.deliver(&burst, frame, Retag::Keep, &mut tx);
        cost
    }

    /// Goes on with frames of a port that were put off.
    fn poll_slow(&mut self, id: PortId) -> Polled {
        let Some(port) = self.port(id) else { return Polled::NOTHING };
        let mut slow = std::mem::take(&mut port.slow);
        let now = Now::new(self.clock, self.seconds);
        let mut cost = 0;
        while cost < SLOW_COST {
            let Some(frame) = slow.front_mut() else { break };
            let Worker { forwarder, ports, fdb, handoff, .. } = self;
            match forwarder.step(id, frame, &mut Tables { ports, fdb, handoff }, &now) {
                Some(step) => cost += step,
                None => drop(slow.pop_front()),
            }
        }
        self.forwarder.holes.touch_nothing();
        self.handoff.flush();
        self.set_releases(&now);
        self.charge(id, cost);
        let exhausted = slow.is_empty();
        if let Some(port) = self.port(id) {
            port.slow = slow;
        }
        Polled { moved: true, exhausted }
    }

    /// Shows a port's receiver what was delivered, and senders what its answers are.
    fn flush(&mut self, id: PortId) {
        self.forwarder.holes.touch(Touch::of(id));
        if let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) {
            port.flush();
            self.forwarder.note_flushed(port);
            if port.has_answers() {
                let now = &Now::new(self.clock, self.seconds);
                let (scratch, holes) = self.forwarder.scratch_and_holes();
                let mut tx = TxContext { from: id, handoff: &mut self.handoff, now, scratch };
                forward::answer(id, &mut self.ports, &self.fdb, &mut tx, holes);
            }
        }
    }

    fn port(&mut self, id: PortId) -> Option<&mut Port<P>> {
        self.ports.get_mut(usize::from(id.0))?.as_mut()
    }

    /// [Polls](Self::poll), and charges receivers for their buffers.
    #[inline]
    fn poll_charged(&mut self, source: Source) -> Polled {
        let polled = self.poll(source);
        if polled.moved {
            self.note_debts(Some(source.port));
        }
        polled
    }

    /// Forwards a burst of what a port has sent on one of its queues.
    #[inline]
    fn poll(&mut self, source: Source) -> Polled {
        let Source { port: id, queue } = source;
        match queue {
            Source::SLOW => return self.poll_slow(id),
            Source::HANDED => return self.poll_handed(id),
            _ => {}
        }
        let most = self.accounts.burst(id);
        let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { return Polled::NOTHING };
        // What is read directly is written to a receiver's memory before anything else is known of it.
        if port.direct.is_some()
            && !self.forwarder.holes.is_exact()
            && let Some(polled) = self.poll_direct(id)
        {
            return polled;
        }
        let now = Now::new(self.clock, self.seconds);
        let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { return Polled::NOTHING };
        let quota = if port.policy.is_some() { self.quota(id, &now) } else { Quota::Packets(BURST) };
        let max = match quota {
            Quota::Packets(max) => max.min(most),
            Quota::Wait(wait) => {
                self.pause(source, now.micros(), wait);
                return Polled { moved: false, exhausted: true };
            }
        };
        let max = self.handoff.room(id, max, &now);
        if max == 0 {
            self.hold(source, now.micros());
            return Polled { moved: false, exhausted: true };
        }
        let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { return Polled::NOTHING };
        self.forwarder.holes.touch(Touch::of(id));
        let loan = match port.queues.lease(queue, max) {
            Lease::Empty => return Polled::NOTHING,
            Lease::Exhausted => return Polled { moved: false, exhausted: true },
            Lease::Frames(loan) => loan,
        };
        let mut burst = Burst::reuse(std::mem::take(&mut self.storage));
        let taken = port.queues.frames(queue, &loan, max, &mut burst);
        if taken.forward && !burst.is_empty() {
            port.handle.counters.rx_bursts.add(1);
            self.counters.count_burst(burst.len());
            port.note_usual(&burst);
            if let Some(selector) = port.selector() {
                selector.learn(queue, &burst, &self.handoff, &now);
            }
            let reads_directly = port.queues.reads_directly();
            let cost =
                self.forward(Origin { port: id, private: taken.private, queue: Some(queue) }, &burst, &now);
            self.accounts.note_burst(id, burst.len(), cost, TURN_COST);
            if reads_directly {
                self.consider_direct(id, &burst, &now);
            }
        } else if taken.any {
            // What was dropped has been looked at all the same.
            self.charge(id, cost::FRAME_IN * most as u64);
        }
        self.storage = Burst::reuse(burst);
        if taken.further > 0 {
            self.charge(id, cost::of_further_descriptors(taken.further));
        }
        self.forwarder.holes.touch(Touch::of(id));
        if let Some(port) = self.port(id) {
            port.queues.complete(queue, loan);
        }
        self.forwarder.holes.touch_nothing();
        Polled { moved: taken.any, exhausted: taken.exhausted }
    }

    /// Forwards a burst, and charges the port that it is from. What all of it costs, that which was put off included.
    fn forward(&mut self, from: Origin, burst: &Burst<'_>, now: &Now) -> u64 {
        self.capture_incoming(from, burst, now);
        if self
            .ports
            .get(usize::from(from.port.0))
            .and_then(Option::as_ref)
            .is_some_and(|port| port.link_down)
        {
            return self.drop_incoming(from, burst, now);
        }
        let Worker { forwarder, ports, fdb, handoff, .. } = self;
        let mut tables = Tables { ports, fdb, handoff };
        let cost = if forwarder.holes.is_exact() && !from.private {
            let copies: Vec<_> = burst.frames().iter().map(|frame| forward::copy(burst, frame)).collect();
            forwarder.forward(Origin { private: true, ..from }, &forward::burst_of(&copies), &mut tables, now)
        } else {
            forwarder.forward(from, burst, &mut tables, now)
        };
        self.set_releases(now);
        let cost = cost
            + self.port(from.port).and_then(|port| port.capture.as_deref()).map_or(0, PortCapture::take_cost);
        self.charge(from.port, cost);
        if !self.forwarder.put_off().is_empty() {
            self.put_off(from.port);
            // The next bursts are to be so small that nothing is put off, if a frame is not too much by itself.
            return cost + BURST_COST * burst.len() as u64;
        }
        cost
    }

    /// Drops a burst of a port whose link was taken down. What it cost to look at it.
    #[cold]
    fn drop_incoming(&mut self, from: Origin, burst: &Burst<'_>, now: &Now) -> u64 {
        if let Some(port) = self.port(from.port) {
            port.handle.counters.drops.add(DropReason::LinkDown, burst.len() as u64);
            if let Some(capture) = &port.capture {
                let event = Event::refused(DropReason::LinkDown, from.queue);
                capture.offer(event, now, burst.frames().iter().map(|frame| Offered::of(burst, frame)));
            }
        }
        let cost = cost::FRAME_IN * burst.len() as u64;
        self.charge(from.port, cost);
        cost
    }

    /// Captures a burst that a port has sent, before anything else is done with it.
    #[inline]
    fn capture_incoming(&self, from: Origin, burst: &Burst<'_>, now: &Now) {
        if let Some(Some(port)) = self.ports.get(usize::from(from.port.0))
            && let Some(capture) = &port.capture
        {
            let event = Event { direction: Direction::In, dropped: None, queue: from.queue };
            capture.offer(event, now, burst.frames().iter().map(|frame| Offered::of(burst, frame)));
        }
    }

    /// Delivers copies of what has passed ports with mirrors. They are neither learned from nor mirrored again, and no rules apply to them.
    #[cold]
    fn deliver_mirrored(&mut self) -> bool {
        let mut any = false;
        for at in 0..self.mirrored.len() {
            let from = self.mirrored[at];
            let Some(capture) = self.port(from).and_then(|port| port.capture.as_deref()) else { continue };
            let copies = capture.take_mirrored();
            any |= !copies.is_empty();
            let mut cost = 0;
            for Copied { to, header, frame } in &copies {
                cost += self.deliver_one(from, *to, *header, frame);
            }
            self.charge(from, cost);
        }
        while let Some(id) = self.handed.pop() {
            self.flush(id);
        }
        self.forwarder.holes.touch_nothing();
        self.handoff.flush();
        any
    }

    /// Keeps what was put off with the port that it is from.
    #[cold]
    fn put_off(&mut self, id: PortId) {
        let Worker { forwarder, ports, .. } = self;
        if let Some(Some(port)) = ports.get_mut(usize::from(id.0)) {
            port.slow.extend(forwarder.put_off().drain(..));
        }
        self.activate(Source { port: id, queue: Source::SLOW });
    }

    /// Arms every active source that has a way to wake us.
    fn arm_all(&mut self) {
        let mut at = 0;
        while let Some(&Active { source, .. }) = self.active.get(at) {
            if self.arm(source) {
                self.active.swap_remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// Asks a source to wake us; false when it has work already, or cannot.
    fn arm(&mut self, source: Source) -> bool {
        self.forwarder.holes.touch(Touch::of(source.port));
        let armed = self.port(source.port).is_none_or(|port| match source.queue {
            Source::SLOW => port.slow.is_empty(),
            Source::HANDED => port.handed.is_empty(),
            queue => port.queues.arm(queue),
        });
        self.forwarder.holes.touch_nothing();
        armed
    }

    /// Whether all that is active are empty rings that cannot wake us.
    fn only_kickless(&mut self) -> bool {
        let Worker { active, ports, .. } = self;
        active.iter().all(|Active { source, .. }| {
            let port = ports.get_mut(usize::from(source.port.0)).and_then(Option::as_mut);
            source.queue < Source::HANDED && port.is_some_and(|port| port.queues.is_kickless(source.queue))
        })
    }

    fn activate(&mut self, source: Source) {
        // A peer that kicks all the same is not heard.
        if self.timers.is_set(Timer::Resume(source)) {
            return;
        }
        if !self.active.iter().any(|active| active.source == source) {
            self.active.push(Active { source, empty: 0 });
        }
    }

    fn deactivate(&mut self, source: Source) {
        self.active.retain(|active| active.source != source);
        self.timers.cancel(Timer::Resume(source));
    }

    /// Arms all sources and tells the other workers that this one sleeps: returns for how long it may, or `None` if there is work. If it
    /// may, [`wake_up`](Self::wake_up) follows.
    pub(crate) fn prepare_to_sleep(&mut self) -> Option<Option<Duration>> {
        self.arm_all();
        let timeout = if self.active.is_empty() {
            None
        } else if self.only_kickless() {
            Some(KICKLESS)
        } else {
            return None;
        };
        let timeout = match self.until_timer() {
            Some(0) => return None,
            Some(micros) => Some(timeout.unwrap_or(Duration::MAX).min(Duration::from_micros(micros))),
            None => timeout,
        };
        self.handoff.about_to_sleep().then_some(timeout)
    }

    /// The worker has slept.
    pub(crate) fn wake_up(&mut self) {
        self.handoff.awake();
    }

    /// Sleeps in epoll; the round before that began at `began`.
    fn sleep(&mut self, timeout: Option<Duration>, began: Instant) -> Instant {
        self.counters.sleeps.add(1);
        let before = Instant::now();
        self.counters.count_polling(before - began);
        self.note_round(began, before);
        let events = self.wait(timeout);
        let awake = Instant::now();
        let woken = self.serve(events);
        self.wake_up();
        if woken {
            self.counters.wakeups.add(1);
        } else if let Some(timeout) = timeout {
            self.margin.note(awake.duration_since(before).saturating_sub(timeout));
        }
        let time = before.elapsed();
        self.counters.sleep_nanoseconds.add(time.as_nanos() as u64);
        self.spin.slept(time);
        awake
    }

    /// Takes note of what epoll reports; whether there was anything.
    pub(crate) fn serve_events(&mut self, timeout: Option<Duration>) -> bool {
        let events = self.wait(timeout);
        self.serve(events)
    }

    /// Waits for events; they and their storage go to [`serve`](Self::serve).
    fn wait(&mut self, timeout: Option<Duration>) -> EventBuf {
        let mut events = self.events.take().unwrap_or_else(|| EventBuf::with_capacity(EVENTS));
        // The only errors are bugs of ours (a bad descriptor), which no retry mends.
        self.epoll.wait(&mut events, timeout).expect("epoll on descriptors of our own");
        events
    }

    /// Logs which addresses move again and again.
    fn tell_restless(&mut self) {
        for Restless { vid, mac, ports, moves, seconds } in self.fdb.newly_restless(self.seconds) {
            let [one, other] = ports.map(|id| self.port(id).map_or("", |port| &*port.handle.name).to_owned());
            // What two ports do to each other hides nothing of others.
            let pair = format!("{} {}", (&one).min(&other), (&one).max(&other));
            if self.restless_limit.allows_reason(&other, pair) {
                tracing::warn!(
                    vlan = vid,
                    "{mac} has moved between {one} and {other} {moves} times in {seconds} s: two machines have it, or there is a loop"
                );
            }
        }
    }

    /// Takes note of these events; whether there was any.
    fn serve(&mut self, events: EventBuf) -> bool {
        let mut count = 0;
        let seconds = self.clock.seconds();
        if seconds != self.seconds {
            self.seconds = seconds;
            self.fdb.sweep(SWEEP, seconds);
            self.tell_restless();
        }
        for event in events.iter() {
            count += 1;
            if event.token == BELL {
                self.serve_bell();
            } else {
                self.wake(Source::of(event.token), event.hangup);
            }
        }
        self.events = Some(events);
        self.convict();
        count > 0
    }

    /// Carries out commands, after the bell has rung.
    fn serve_bell(&mut self) {
        let _ = self.inbox.bell.drain();
        let commands = self.inbox.commands.try_iter().take(COMMANDS).collect::<Vec<_>>();
        if commands.len() == COMMANDS {
            let _ = self.inbox.bell.signal();
        }
        for Posted { command, place } in commands {
            self.execute(command);
            drop(place);
        }
    }

    /// A source says it has work.
    fn wake(&mut self, source: Source, hangup: bool) {
        let wakes = self.with_port(source.port, |port, watch| port.queues.wake(source.queue, hangup, watch));
        if wakes == Some(true) {
            self.activate(source);
        }
    }
}
