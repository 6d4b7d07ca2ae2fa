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
//! ```text
//!            wake (epoll)                     empty for ROUNDS_TO_ARM rounds, or all are empty
//!   armed ───────────────► active ─────────────────────────────────────────────────────────► armed
//!     ▲                      │  ▲                     (re-check finds work: stays active)
//!     └── start, attach ─────┘  └──── polled each round: lease, frames, forward, complete
//! ```
//!
//! | file | idea |
//! |---|---|
//! | `mod` | the loop: poll what is active, arm what is idle, sleep when nothing is active |
//! | `execute` | commands of the control plane, carried out between two bursts |
//! | `direct` | a port that is read directly into the sole receiver's buffers |
//! | `command` | the commands |
//! | `handles` | the control plane's handles of the threads |
//! | `fault` | faults that the control plane has to act on |

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ringferry_packet::frame::Burst;
use ringferry_sys::epoll::{Epoll, EventBuf};
use ringferry_sys::spin::{Idle, Spin};

use crate::config::SwitchConfig;
use crate::counters::WorkerCounters;
use crate::fdb::{Fdb, PortId};
use crate::plane::forward::{self, Forwarder, Origin, Tables};
use crate::plane::handoff::ring::{Handoff, HandoffFrame, Message};
use crate::plane::now::{Clock, Now};
use crate::plane::policy::PortPolicy;
use crate::plane::port::{Port, TxContext};
use crate::plane::queues::{Lease, Queues, Source, Watch};

pub(crate) mod command;
mod direct;
mod execute;
pub(crate) mod fault;
pub(crate) mod handles;

use command::Inbox;
pub use handles::Workers;

/// Packets taken from a queue at a time. DPDK, OVS and VPP settled on 32 (or 256 with vectors); 64
/// gained nothing here and keeps others waiting twice as long.
pub(crate) const BURST: usize = 32;

/// Rounds in which a queue may be found empty, while others are busy, before it is armed. Each costs
/// one load of a line that did not change; arming costs a fence and, later, the peer a kick.
const ROUNDS_TO_ARM: u32 = 256;

/// Busy rounds between looks at epoll: how long commands and idle ports wait while others are busy.
/// 16 rounds of 32 packets take well below a millisecond.
const BUSY_ROUNDS: u32 = 16;

/// How often rings without a kick descriptor are looked at while everything else is idle.
const KICKLESS: Duration = Duration::from_micros(100);

/// Events taken per look. More are reported by the next.
const EVENTS: usize = 64;

/// Commands carried out per look, so that no flood of them keeps packets waiting.
const COMMANDS: usize = 64;

/// Buckets of the forwarding database swept per second of activity.
const SWEEP: usize = 1024;

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
    /// The policies of ports that have rules; a port's rules come before it does.
    policies: Vec<Option<Arc<PortPolicy>>>,
    active: Vec<Active>,
    fdb: Fdb,
    forwarder: Forwarder,
    /// Storage of the last burst.
    storage: Burst<'static>,
    epoll: Epoll,
    /// Lent out while its events are served.
    events: Option<EventBuf>,
    inbox: Inbox<P>,
    handoff: Handoff,
    /// Ports that frames from other workers go to, in this round.
    handed: Vec<PortId>,
    counters: Arc<WorkerCounters>,
    spin: Spin,
    clock: Clock,
    /// The coarse clock: seconds since the start.
    seconds: u32,
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
            forwarder: Forwarder::default(),
            storage: Burst::new(),
            epoll,
            events: None,
            inbox,
            handoff,
            handed: Vec::new(),
            counters,
            spin: Spin::new(Duration::from_micros(config.poll_microseconds.into())),
            clock,
            seconds: 0,
            stop: false,
        }
    }

    /// Serves until the control plane ends it.
    pub(crate) fn run(mut self) {
        // Busy rounds since epoll was looked at.
        let mut rounds = 0;
        while !self.stop {
            let moved = self.round();
            self.counters.polls.add(1);
            if moved {
                self.counters.busy_polls.add(1);
                self.spin.found();
                rounds += 1;
                if rounds >= BUSY_ROUNDS {
                    rounds = 0;
                    self.serve_events(Some(Duration::ZERO));
                }
                continue;
            }
            match self.spin.idle() {
                Idle::Again if !self.active.is_empty() => {}
                // A tap has no ring that could be looked at.
                Idle::Again | Idle::Around => {
                    self.serve_events(Some(Duration::ZERO));
                }
                Idle::Sleep => {
                    if let Some(timeout) = self.prepare_to_sleep() {
                        self.sleep(timeout);
                    }
                }
            }
        }
    }

    /// Polls every active source once; whether anything moved.
    pub(crate) fn round(&mut self) -> bool {
        let mut moved = self.poll_handoff();
        let mut at = 0;
        while let Some(&Active { source, empty }) = self.active.get(at) {
            let polled = self.poll(source);
            moved |= polled.moved;
            if polled.exhausted || !polled.moved && empty >= ROUNDS_TO_ARM && self.arm(source) {
                self.active.swap_remove(at);
                continue;
            }
            self.active[at].empty = if polled.moved { 0 } else { empty.saturating_add(1) };
            at += 1;
        }
        moved
    }

    /// Delivers what other workers have for queues of this one.
    #[inline]
    fn poll_handoff(&mut self) -> bool {
        let mut moved = false;
        for _ in 0..BURST {
            let Some((from, message)) = self.handoff.receive() else { break };
            moved = true;
            match message {
                Message::Frame(HandoffFrame { port, header, frame }) => {
                    let now = Now::new(self.clock, self.seconds);
                    if let Some(Some(to)) = self.ports.get_mut(usize::from(port.0)) {
                        if !self.handed.contains(&port) {
                            self.handed.push(port);
                            to.expect(1, &self.handoff);
                        }
                        let scratch = self.forwarder.scratch();
                        let mut tx = TxContext { handoff: &mut self.handoff, now: &now, scratch };
                        to.put(header, &frame, &[], &mut tx);
                    }
                    self.handoff.give_back(from, frame);
                }
                Message::Learn(vid, mac, port) => {
                    let _ = self.fdb.learn(vid, mac, port, self.seconds);
                }
            }
        }
        while let Some(id) = self.handed.pop() {
            self.flush(id);
        }
        if moved {
            // A queue may have gone to another worker meanwhile, and the frame after it.
            self.handoff.flush();
        }
        moved
    }

    /// Shows a port's receiver what was delivered, and senders what its answers are.
    fn flush(&mut self, id: PortId) {
        if let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) {
            port.flush();
            if port.has_answers() {
                let now = &Now::new(self.clock, self.seconds);
                let (handoff, scratch) = (&mut self.handoff, self.forwarder.scratch());
                forward::answer(id, &mut self.ports, &self.fdb, &mut TxContext { handoff, now, scratch });
            }
        }
    }

    fn port(&mut self, id: PortId) -> Option<&mut Port<P>> {
        self.ports.get_mut(usize::from(id.0))?.as_mut()
    }

    /// Forwards a burst of what a port has sent on one of its queues.
    #[inline]
    fn poll(&mut self, source: Source) -> Polled {
        let Source { port: id, queue } = source;
        let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { return Polled::NOTHING };
        if port.direct.is_some()
            && let Some(polled) = self.poll_direct(id)
        {
            return polled;
        }
        let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { return Polled::NOTHING };
        let loan = match port.queues.lease(queue, BURST) {
            Lease::Empty => return Polled::NOTHING,
            Lease::Exhausted => return Polled { moved: false, exhausted: true },
            Lease::Frames(loan) => loan,
        };
        let mut burst = Burst::reuse(std::mem::take(&mut self.storage));
        let taken = port.queues.frames(queue, &loan, BURST, &mut burst);
        if taken.forward && !burst.is_empty() {
            let now = Now::new(self.clock, self.seconds);
            if let Some(selector) = port.selector() {
                selector.learn(queue, &burst, &self.handoff, &now);
            }
            let reads_directly = port.queues.reads_directly();
            self.forward(Origin { port: id, private: taken.private }, &burst, &now);
            if reads_directly {
                self.consider_direct(id, &burst, &now);
            }
        }
        self.storage = Burst::reuse(burst);
        if let Some(port) = self.port(id) {
            port.queues.complete(queue, loan);
        }
        Polled { moved: taken.any, exhausted: taken.exhausted }
    }

    fn forward(&mut self, from: Origin, burst: &Burst<'_>, now: &Now) {
        let Worker { forwarder, ports, fdb, handoff, .. } = self;
        forwarder.forward(from, burst, &mut Tables { ports, fdb, handoff }, now);
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
        self.port(source.port).is_none_or(|port| port.queues.arm(source.queue))
    }

    /// Whether all that is active are empty rings that cannot wake us.
    fn only_kickless(&mut self) -> bool {
        let Worker { active, ports, .. } = self;
        active.iter().all(|Active { source, .. }| {
            let port = ports.get_mut(usize::from(source.port.0)).and_then(Option::as_mut);
            port.is_some_and(|port| port.queues.is_kickless(source.queue))
        })
    }

    fn activate(&mut self, source: Source) {
        if !self.active.iter().any(|active| active.source == source) {
            self.active.push(Active { source, empty: 0 });
        }
    }

    fn deactivate(&mut self, source: Source) {
        self.active.retain(|active| active.source != source);
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
        self.handoff.about_to_sleep().then_some(timeout)
    }

    /// The worker has slept.
    pub(crate) fn wake_up(&mut self) {
        self.handoff.awake();
    }

    fn sleep(&mut self, timeout: Option<Duration>) {
        self.counters.sleeps.add(1);
        let before = Instant::now();
        self.counters.asleep.store(true, Ordering::Relaxed);
        let woken = self.serve_events(timeout);
        self.counters.asleep.store(false, Ordering::Relaxed);
        self.wake_up();
        if woken {
            self.counters.wakeups.add(1);
        }
        let time = before.elapsed();
        self.counters.sleep_nanoseconds.add(time.as_nanos() as u64);
        self.spin.slept(time);
    }

    /// Takes note of what epoll reports; whether there was anything.
    pub(crate) fn serve_events(&mut self, timeout: Option<Duration>) -> bool {
        let mut events = self.events.take().unwrap_or_else(|| EventBuf::with_capacity(EVENTS));
        // The only errors are bugs of ours (a bad descriptor), which no retry mends.
        let count = self.epoll.wait(&mut events, timeout).expect("epoll on descriptors of our own");
        let seconds = self.clock.seconds();
        if seconds != self.seconds {
            self.seconds = seconds;
            self.fdb.sweep(SWEEP, seconds);
        }
        for event in events.iter() {
            if event.token == BELL {
                let _ = self.inbox.bell.drain();
                let commands = self.inbox.commands.try_iter().take(COMMANDS).collect::<Vec<_>>();
                if commands.len() == COMMANDS {
                    let _ = self.inbox.bell.signal();
                }
                commands.into_iter().for_each(|command| self.execute(command));
            } else {
                self.wake(Source::of(event.token), event.hangup);
            }
        }
        self.events = Some(events);
        count > 0
    }

    /// A source says it has work.
    fn wake(&mut self, source: Source, hangup: bool) {
        let Worker { ports, epoll, .. } = self;
        let Some(Some(port)) = ports.get_mut(usize::from(source.port.0)) else { return };
        if port.queues.wake(source.queue, hangup, Watch::new(epoll, source.port)) {
            self.activate(source);
        }
    }
}
