//! What the engine does when another process takes over: it stands still, says what it holds, and goes on; and what the other one's engine does to
//! begin where this one stood.
//!
//! [`Workers::pause`] has every worker finish what it has begun and take nothing more from any queue. Commands are carried out all the same, so
//! that queues are stopped and started meanwhile, and nothing is lost: what peers send waits in their rings and in the kernel.
//! [`Workers::unpause`] has all of them go on. Workers of a successor are paused from their [start](Workers::start_paused) on.
//!
//! They stand still, and go on, at different moments: each when it gets its command, which on a busy machine means a processor. One that took frames from its
//! queues meanwhile would hand them off to another one that delivers nothing yet, or no more, and what its rings do not hold would be dropped. So no worker takes
//! anything as long as any is paused ([`Standing`]), which all of them look at in each round, and those that stand still deliver what the others have begun.
//!
//! What workers hold that is nowhere else is [`Carried`] over: frames that wait in shapers and on wires, addresses, and the state of token buckets and flow tables,
//! whose times all are of the switch's clock, which goes on in the successor ([`Workers::began`]).

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use ringferry_packet::ether::Mac;
use rustix::time::{ClockId, clock_gettime};

use crate::fdb::{FdbItem, FdbStats, PortId};
use crate::plane::now::Clock;
use crate::plane::policy::shaper::Queued;
use crate::plane::queues::Queues;
use crate::plane::wire::ModelState;
use crate::plane::worker::command::Command;
use crate::plane::worker::handles::Late;
use crate::plane::worker::{Worker, Workers};
use crate::rules::Vid;

/// How often a worker that stands still looks at its commands by itself, which wake it; and for how long it waits for others that are paused when it is not. Either only
/// bounds the harm of what should not happen.
const PAUSED_LOOK: Duration = Duration::from_millis(10);

/// How long workers may take to stand still. All packets of everybody wait meanwhile; a worker that takes longer is held up by something.
const STANDING: Duration = Duration::from_millis(100);

/// The name among token buckets of the time at which the line of a wire's rate is free.
const LINE: &str = "wire";

/// Frames that wait in one worker for tokens of their receiver's `rate_out`, in their order.
pub(crate) type Waiting = Vec<(PortId, Queued)>;

/// An address behind a port, last seen at this second of the switch's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) vid: Vid,
    pub(crate) mac: Mac,
    pub(crate) port: PortId,
    pub(crate) seen: u32,
}

impl Address {
    /// The address of an item that was read at this second.
    pub(crate) fn of(item: &FdbItem, second: u32) -> Address {
        Address { vid: item.vid, mac: item.mac, port: item.port, seen: second.saturating_sub(item.age) }
    }
}

/// What is under way on wires in one worker.
#[derive(Debug, Default)]
pub(crate) struct OnWires {
    /// Frames that wait, each with the end that it is for.
    pub(crate) frames: Waiting,
    /// Where chance stands, by end.
    pub(crate) models: Vec<(PortId, ModelState)>,
}

/// What a paused worker holds that is nowhere else.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) waiting: Waiting,
    pub(crate) wires: OnWires,
    /// Learned addresses.
    pub(crate) addresses: Vec<Address>,
    /// Counters of its forwarding database.
    pub(crate) stats: FdbStats,
}

/// What a worker of the successor begins with.
#[derive(Debug, Default)]
pub(crate) struct Carried {
    pub(crate) addresses: Vec<Address>,
    pub(crate) stats: Option<FdbStats>,
    pub(crate) waiting: Waiting,
    pub(crate) wires: OnWires,
}

/// How many workers of a switch are paused. They share one; each counts itself.
#[derive(Debug, Default)]
pub(crate) struct Standing(AtomicUsize);

impl Standing {
    #[inline]
    fn is_any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

/// Returns the time of the system's monotonic clock, in nanoseconds: the same for all processes of the machine.
pub(crate) fn monotonic() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl<P: Queues> Workers<P> {
    /// Returns the instant at which the switch's clock began, as nanoseconds of the system's monotonic clock.
    pub(crate) fn began(&self) -> u64 {
        match self.clock {
            Clock::Monotonic(began) => Self::nanoseconds(began),
            #[cfg(any(test, feature = "testing"))]
            Clock::Scripted(_) => 0,
        }
    }

    /// Returns an instant as nanoseconds of the system's monotonic clock.
    pub(crate) fn nanoseconds(instant: Instant) -> u64 {
        monotonic().saturating_sub(instant.elapsed().as_nanos() as u64)
    }

    /// Returns the instant that is so many nanoseconds after the system's clock began.
    pub(crate) fn instant(nanoseconds: u64) -> Instant {
        let (now, past) = (Instant::now(), monotonic().saturating_sub(nanoseconds));
        now.checked_sub(Duration::from_nanos(past)).unwrap_or(now)
    }

    /// Returns the seconds of the switch's clock.
    pub(crate) fn seconds(&self) -> u32 {
        self.clock.seconds()
    }

    /// Has every worker finish what it has begun, and take nothing more from any queue.
    ///
    /// # Errors
    /// A worker does not answer; all go on.
    pub(crate) fn pause(&self) -> Result<(), Late> {
        // What one has put off or handed over is delivered by another, and may be handed over once more by that.
        let steps: [fn(SyncSender<()>) -> Command<P>; 3] = [Command::Pause, Command::Settle, Command::Settle];
        let paused = steps.into_iter().try_for_each(|step| self.ask_each(step).map(drop));
        if paused.is_err() {
            self.unpause();
        }
        paused
    }

    /// Has every worker go on, all of them once each has carried out the commands before this one.
    pub(crate) fn unpause(&self) {
        // Queues that one has started are known to all before any frame moves. A late worker goes on when it gets there.
        let _ = self.ask_each(Command::Probe);
        self.workers.iter().for_each(|worker| worker.send(Command::Unpause));
    }

    /// Has the commands of a task, which waits for none of them, gather, and wakes the workers once for all. A worker that is woken may take the
    /// processor from this thread each time, for longer than all of this takes.
    pub(crate) fn at_once<T>(&self, task: impl FnOnce() -> T) -> T {
        let gather = |gathers| {
            self.workers.iter().for_each(|worker| worker.set_gathers(gathers));
        };
        gather(true);
        let done = task();
        gather(false);
        done
    }

    /// Returns what each worker holds, of the addresses those that were seen in the last `age` seconds. Call it on paused workers. It is one question
    /// for all of that, as packets wait for the answer, and on a busy machine a worker may have to wait for a processor.
    ///
    /// # Errors
    /// A worker does not answer.
    pub(crate) fn held(&self, age: u32) -> Result<Vec<Held>, Late> {
        self.ask_each(|reply| Command::HandOver(age, reply))
    }

    /// Gives a worker what another one of its number had.
    pub(crate) fn carry(&self, worker: usize, carried: Carried) {
        if let Some(worker) = self.workers.get(worker) {
            worker.send(Command::Carry(Box::new(carried)));
        }
    }

    /// Returns how much of each token bucket of a port is used, by the key of its rule.
    pub(crate) fn buckets(&self, port: PortId) -> BTreeMap<String, u64> {
        let policies = self.policies.lock().unwrap_or_else(PoisonError::into_inner);
        let buckets = policies.of(port).into_iter().flat_map(|policy| policy.buckets());
        let line =
            policies.of(port).and_then(|policy| Some((LINE.to_owned(), policy.wire()?.line.free_at())));
        buckets.map(|(key, bucket)| (key.to_owned(), bucket.used())).chain(line).collect()
    }

    /// Sets how much of each token bucket of a port is used, as it was in the process before.
    pub(crate) fn set_buckets(&self, port: PortId, used: &BTreeMap<String, u64>) {
        let policies = self.policies.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, bucket) in policies.of(port).into_iter().flat_map(|policy| policy.buckets()) {
            if let Some(used) = used.get(key) {
                bucket.set_used(*used);
            }
        }
        if let (Some(wire), Some(free)) = (policies.of(port).and_then(|policy| policy.wire()), used.get(LINE))
        {
            wire.line.set_free_at(*free);
        }
    }

    /// Asks all workers, each of which has to answer.
    fn ask_each<T>(&self, command: impl Fn(SyncSender<T>) -> Command<P>) -> Result<Vec<T>, Late> {
        let asked = self.workers.iter().map(|worker| {
            let (reply, answer) = sync_channel(1);
            worker.send(command(reply));
            (worker, answer)
        });
        let asked: Vec<_> = asked.collect();
        let deadline = Instant::now() + STANDING;
        let answers = asked.iter().map(|(worker, answer)| {
            worker.wait(answer, deadline, None)?.ok_or_else(|| Late { worker: worker.number() })
        });
        answers.collect()
    }
}

impl<P: Queues> Worker<P> {
    /// Returns true if nothing may be taken from any queue: this worker is paused, or another one is.
    #[inline]
    pub(crate) fn stands_still(&self) -> bool {
        self.paused || self.standing.is_any() && !self.impatient
    }

    /// Begins or ends the pause of this worker. If it is the last one that ends it, the others are woken.
    pub(super) fn set_paused(&mut self, paused: bool) {
        self.impatient = false;
        if std::mem::replace(&mut self.paused, paused) == paused {
            return;
        }
        if paused {
            self.standing.0.fetch_add(1, Ordering::Relaxed);
        } else if self.standing.0.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.handoff.wake_all();
        }
    }

    /// Stands still for as long as it has to.
    pub(super) fn stand_still(&mut self) {
        let mut since = Instant::now();
        while self.stands_still() && !self.stop {
            if self.paused {
                since = Instant::now();
            } else {
                self.impatient = since.elapsed() > PAUSED_LOOK;
            }
            self.look_standing(PAUSED_LOOK);
        }
    }

    /// A look of a worker that stands still, which may sleep for `timeout`: at what others have handed off to it, and at its commands. Sources tell their news when it
    /// goes on. In epoll a tap that is not read would have it look again and again, and on a processor that both share keep the process from it that everybody waits for.
    pub(crate) fn look_standing(&mut self, timeout: Duration) {
        self.settle();
        // Whoever hands off more, or is the last to end its pause, rings from here on.
        let sleeps = self.handoff.about_to_sleep() && self.stands_still();
        if self.inbox.bell.wait(if sleeps { timeout } else { Duration::ZERO }) {
            self.serve_bell();
        }
        self.handoff.awake();
    }

    /// Delivers whatever this worker has taken from queues, so that nothing of it is left but in shapers.
    pub(super) fn pause_all(&mut self) {
        self.set_paused(true);
        let slow: Vec<_> = (0..self.ports.len() as u16).map(PortId).collect();
        for id in slow {
            while self.slow_frames(id) > 0 {
                self.poll_slow(id);
            }
        }
        self.settle();
    }

    /// Returns what is nowhere else, which stays here as well.
    pub(super) fn held(&self, age: u32) -> Held {
        let (mut addresses, mut next) = (Vec::new(), Some(0));
        while let Some(from) = next {
            let page = self.fdb.page(from, self.seconds);
            let recent = page.items.into_iter().filter(|item| !item.fixed && item.age <= age);
            addresses.extend(recent.map(|item| Address::of(&item, self.seconds)));
            next = page.next;
        }
        Held { waiting: self.waiting(), wires: self.on_wires(), addresses, stats: self.fdb.stats() }
    }

    /// Returns the frames that wait in shapers, which stay there.
    fn waiting(&self) -> Waiting {
        let ports = (0u16..).zip(&self.ports).filter_map(|(id, port)| Some((PortId(id), port.as_ref()?)));
        ports.flat_map(|(id, port)| port.shaper.queued().map(move |queued| (id, queued))).collect()
    }

    /// Begins where a worker of another process stood.
    pub(super) fn carry(&mut self, carried: Carried) {
        let Carried { addresses, stats, waiting, wires } = carried;
        for Address { vid, mac, port, seen } in addresses {
            // Every worker is given all addresses.
            let _ = self.fdb.learn(vid, mac, port, seen);
        }
        if let Some(stats) = stats {
            self.fdb.set_stats(stats);
        }
        let now = self.clock.micros();
        for (id, queued) in waiting {
            if let Some(port) = self.port(id) {
                port.shaper.requeue(queued);
            }
            self.set_release(id, now);
        }
        self.carry_wires(wires);
    }
}
