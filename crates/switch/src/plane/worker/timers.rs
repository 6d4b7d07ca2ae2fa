//! What a worker has to do at a later time: sources that wait for tokens, and ports whose shaper waits for them.
//!
//! The worker sets a timer while it forwards, looks for [due](Timers::due) ones at the begin of each round, and sleeps no longer than until the
//! [next](Timers::next). Times are microseconds of the switch's clock, which a test may script. There is at most one timer of
//! each name: setting it again moves it, and what is gone has its timers cancelled, so there are never more of them than sources and ports.

use std::collections::BTreeMap;

use crate::fdb::PortId;
use crate::plane::cost;
use crate::plane::forward::BURST_COST;
use crate::plane::now::Now;
use crate::plane::policy::shaper::Delayed;
use crate::plane::queues::{FrameCost, Queues, Source, Watch};
use crate::plane::worker::{BURST, Worker};

/// Microseconds for which a source is paused at most. As a pause is counted when it begins, a longer one would be missed by whoever compares
/// counters of two moments.
const LONGEST_PAUSE: u64 = 1_000_000;

/// For how long nothing is taken from a port that has its share under way to another worker, in microseconds: that one does not empty its ring in
/// that time, so it has something to do meanwhile.
const HELD: u64 = 50;

/// What is done when the time has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// A source that had used up its port's `rate_in`, or its port's share of the ring to another worker, is polled again. As long as there is this timer it is *paused*: neither polled nor armed.
    Resume(Source),
    /// Frames that wait for tokens of their receiver's `rate_out`, or on a wire, are delivered.
    Release(PortId),
}

impl Timer {
    fn port(self) -> PortId {
        match self {
            Timer::Resume(source) => source.port,
            Timer::Release(port) => port,
        }
    }
}

/// The timers of one worker.
#[derive(Debug, Default)]
pub(super) struct Timers {
    /// By time and, as several may be due at once, by when they were set: so the queues of a port take turns.
    queue: BTreeMap<(u64, u64), Timer>,
    set: BTreeMap<Timer, (u64, u64)>,
    serial: u64,
}

impl Timers {
    /// Sets or moves a timer.
    pub(super) fn set(&mut self, timer: Timer, at: u64) {
        self.cancel(timer);
        self.serial += 1;
        self.queue.insert((at, self.serial), timer);
        self.set.insert(timer, (at, self.serial));
    }

    /// Sets a timer, or moves it; one that is set for that time already keeps its turn.
    pub(super) fn set_unless_set(&mut self, timer: Timer, at: u64) {
        if self.set.get(&timer).is_none_or(|(set, _)| *set != at) {
            self.set(timer, at);
        }
    }

    /// Cancels a timer; whether there was one.
    pub(super) fn cancel(&mut self, timer: Timer) -> bool {
        self.set.remove(&timer).is_some_and(|key| self.queue.remove(&key).is_some())
    }

    /// Cancels whatever has to do with a port.
    pub(super) fn cancel_port(&mut self, port: PortId) {
        self.set.retain(|timer, key| {
            let keep = timer.port() != port;
            if !keep {
                self.queue.remove(key);
            }
            keep
        });
    }

    /// Whether there is a timer of this name.
    #[inline]
    pub(super) fn is_set(&self, timer: Timer) -> bool {
        !self.set.is_empty() && self.set.contains_key(&timer)
    }

    /// Returns true if a source of a port has to wait for its rate.
    pub(super) fn has_paused(&self, port: PortId) -> bool {
        !self.paused(port).is_empty()
    }

    /// The sources of a port that are paused.
    fn paused(&self, port: PortId) -> Vec<Source> {
        let of = |timer: &Timer| match timer {
            Timer::Resume(source) if source.port == port => Some(*source),
            _ => None,
        };
        self.set.keys().filter_map(of).collect()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns the port whose frames the next one delivers, if it does that.
    pub(super) fn next_release(&self) -> Option<PortId> {
        match self.queue.first_key_value()?.1 {
            Timer::Release(port) => Some(*port),
            Timer::Resume(_) => None,
        }
    }

    /// When the next one is due.
    #[inline]
    pub(super) fn next(&self) -> Option<u64> {
        self.queue.first_key_value().map(|((at, _), _)| *at)
    }

    /// Takes a timer whose time has come, with that time.
    fn due(&mut self, now: u64) -> Option<(Timer, u64)> {
        let next = self.queue.first_entry().filter(|entry| entry.key().0 <= now)?;
        let ((at, _), timer) = next.remove_entry();
        self.set.remove(&timer);
        Some((timer, at))
    }
}

/// How many packets may be taken from a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quota {
    /// So many, at least one.
    Packets(usize),
    /// None for so many microseconds.
    Wait(u64),
}

impl<P: Queues> Worker<P> {
    /// How many packets may be taken from a port now. As what they are is not known before they are taken, it is assumed that each is as
    /// large as the largest of the last burst; that one borrows makes up for what this is wrong by.
    #[inline]
    pub(super) fn quota(&self, port: PortId, now: &Now) -> Quota {
        let port = self.ports.get(usize::from(port.0)).and_then(Option::as_ref);
        let limit = port.and_then(|port| Some((port, port.policy.as_deref()?.rate_in()?)));
        let Some((port, limit)) = limit else { return Quota::Packets(BURST) };
        match limit.wait(now.micros()) {
            0 => Quota::Packets(limit.frames(port.usual, now.micros()).min(BURST as u64) as usize),
            wait => Quota::Wait(wait),
        }
    }

    /// Leaves a source alone for `wait` microseconds from `now` on, or for [`LONGEST_PAUSE`], after which it is paused again.
    #[cold]
    pub(super) fn pause(&mut self, source: Source, now: u64, wait: u64) {
        let wait = wait.min(LONGEST_PAUSE);
        if let Some(port) = self.port(source.port) {
            port.handle.counters.rx_paused.add(1);
            port.handle.counters.rx_paused_microseconds.add(wait);
        }
        self.leave_alone(source, now.saturating_add(wait));
    }

    /// Leaves a source alone for a moment, as its port has its share under way to another worker.
    #[cold]
    pub(super) fn hold(&mut self, source: Source, now: u64) {
        if let Some(port) = self.port(source.port) {
            port.handle.counters.rx_held_microseconds.add(HELD);
        }
        self.leave_alone(source, now.saturating_add(HELD));
    }

    /// Neither polls nor arms a source until then.
    fn leave_alone(&mut self, source: Source, until: u64) {
        let Worker { ports, epoll, timers, .. } = self;
        let Some(Some(port)) = ports.get_mut(usize::from(source.port.0)) else { return };
        port.queues.pause(source.queue, Watch::new(epoll, source.port));
        timers.set(Timer::Resume(source), until);
    }

    /// Counts that a pause was so many microseconds longer than was known when it began, as the worker did not look before: of a port with a rate, where a wait
    /// for one token is often that of a worker for its processor, those of the rate.
    fn note_late(&mut self, id: PortId, late: u64) {
        let Some(port) = self.port(id) else { return };
        let counters = &port.handle.counters;
        let has_rate = port.policy.as_deref().is_some_and(|policy| policy.rate_in().is_some());
        let counter =
            if has_rate { &counters.rx_paused_microseconds } else { &counters.rx_held_microseconds };
        counter.add(late);
    }

    /// Polls a source again that was paused.
    fn resume(&mut self, source: Source) {
        let Worker { ports, epoll, .. } = self;
        let Some(Some(port)) = ports.get_mut(usize::from(source.port.0)) else { return };
        port.queues.resume(source.queue, Watch::new(epoll, source.port));
        self.activate(source);
    }

    /// Sets timers for frames that wait in shapers since the last burst.
    #[inline]
    pub(super) fn set_releases(&mut self, now: &Now) {
        while let Some(port) = self.forwarder.next_waiting() {
            // On a wire a frame may be due before all that wait already.
            let is_wire = self.port(port).is_some_and(|port| port.wire.is_some());
            if is_wire || !self.timers.is_set(Timer::Release(port)) {
                self.set_release(port, now.micros());
            }
        }
    }

    pub(super) fn set_release(&mut self, id: PortId, now: u64) {
        if let Some(wait) = self.port(id).and_then(|port| port.until_release(now)) {
            self.timers.set_unless_set(Timer::Release(id), now.saturating_add(wait));
        }
    }

    /// Delivers what has waited in the shaper of a port, or on its wire, and may go now, until that costs `most`. What it cost.
    fn release(&mut self, id: PortId, most: u64, micros: u64) -> u64 {
        let now = Now::new(self.clock, self.seconds);
        let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { return 0 };
        port.refresh(&self.handoff);
        let (frames, work) = port.release(BURST, most, &now);
        self.deliver_late(id, &frames);
        self.set_release(id, micros);
        work
    }

    /// Delivers frames that have waited in the shaper of a port, or on its wire. Their senders have paid for that when they came, but for one more copy.
    pub(super) fn deliver_late(&mut self, id: PortId, frames: &[Delayed]) {
        let now = Now::new(self.clock, self.seconds);
        for run in frames.chunk_by(|one, next| one.from == next.from) {
            let from = run[0].from;
            let cost =
                |delayed: &Delayed| cost::of_plain(delayed.frame.len() as u64, 0, FrameCost::Descriptor);
            self.charge(from, run.iter().map(cost).sum());
            let Worker { ports, forwarder, handoff, .. } = self;
            if let Some(Some(port)) = ports.get_mut(usize::from(id.0)) {
                forwarder.deliver_late(port, from, run, handoff, &now);
            }
        }
        self.flush(id);
        self.handoff.flush();
    }

    /// Delivers all that waits in the shaper of a port, whatever its rate: from now on frames may go another way, and must not overtake it.
    pub(super) fn release_all(&mut self, id: PortId) {
        let now = self.clock.micros();
        let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { return };
        if port.shaper.is_empty() {
            return;
        }
        port.refresh(&self.handoff);
        let frames = port.release_all(now);
        self.timers.cancel(Timer::Release(id));
        self.deliver_late(id, &frames);
    }

    /// A port has another policy: whatever waits for tokens looks again for how long.
    pub(super) fn rules_changed(&mut self, port: PortId) {
        for source in self.timers.paused(port) {
            self.timers.cancel(Timer::Resume(source));
            self.resume(source);
        }
        self.set_release(port, self.clock.micros());
    }

    /// Does what is due; whether anything was.
    #[inline]
    pub(super) fn run_timers(&mut self) -> bool {
        !self.timers.is_empty() && self.run_due()
    }

    fn run_due(&mut self) -> bool {
        let now = self.clock.micros();
        let (mut any, mut work) = (false, 0);
        // Each timer once, and no more work than a turn has: one that is set again for now, or left, has its turn in the next round.
        for _ in 0..self.timers.queue.len() {
            if work >= BURST_COST {
                break;
            }
            let Some((timer, at)) = self.timers.due(now) else { break };
            any = true;
            match timer {
                Timer::Resume(source) => {
                    self.note_late(source.port, now - at);
                    self.resume(source);
                }
                Timer::Release(port) => work += self.release(port, BURST_COST - work, now),
            }
        }
        any
    }

    /// Microseconds until the next timer is due, or until the worker has to be awake for it; 0 if one is.
    pub(super) fn until_timer(&self) -> Option<u64> {
        let next = self.timers.next()?;
        Some(next.saturating_sub(self.clock.micros()).saturating_sub(self.margin_of_next().unwrap_or(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resume(port: u16, queue: u16) -> Timer {
        Timer::Resume(Source { port: PortId(port), queue })
    }

    #[test]
    fn timers_come_in_order_and_those_of_one_time_as_they_were_set() {
        let mut timers = Timers::default();
        for (at, queue) in [(7, 0), (5, 2), (5, 1), (9, 3), (5, 0)] {
            timers.set(resume(0, queue), at);
        }
        assert_eq!(timers.next(), Some(5));
        assert_eq!(timers.due(4), None);
        let due: Vec<_> = std::iter::from_fn(|| timers.due(8)).map(|(timer, _)| timer).collect();
        assert_eq!(due, [resume(0, 2), resume(0, 1), resume(0, 0)]);
        assert!(timers.is_set(resume(0, 3)) && !timers.is_set(resume(0, 0)) && !timers.is_empty());
        assert_eq!((timers.due(u64::MAX), timers.next()), (Some((resume(0, 3), 9)), None));
    }

    #[test]
    fn what_is_gone_has_no_timers() {
        let mut timers = Timers::default();
        for timer in [resume(1, 0), resume(1, 7), resume(2, 0), Timer::Release(PortId(1)), resume(3, 1)] {
            timers.set(timer, 1);
        }
        assert_eq!(timers.paused(PortId(1)).len(), 2);
        timers.cancel_port(PortId(1));
        assert!(timers.cancel(resume(3, 1)) && !timers.cancel(resume(3, 1)));
        assert_eq!((timers.due(1), timers.due(1)), (Some((resume(2, 0), 1)), None));
        assert!(timers.is_empty() && timers.set.is_empty());
    }
}
