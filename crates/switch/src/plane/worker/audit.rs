//! Audits: times in which what a source costs is measured, and not only looked up in the [price list](crate::plane::cost).
//!
//! A guest can make packets that touch memory which nobody has touched, or that are dear in a way of which no list knows. When the thread works for much longer
//! than is charged, a [suspicion](Suspicion) arises; if its CPU clock confirms it at the next look, each poll is [measured](Worker::poll_audited) for a while,
//! and what it took beyond its price is charged to the port that it was for. Not the time that passes, as whoever is preempted would pay for it.

use std::time::{Duration, Instant};

use ringferry_sys::usage::ThreadClock;

use super::{EVENTS_TIME, Polled, ROUND, TURN_COST, Worker};
use crate::plane::queues::{Queues, Source};

/// When the thread works for so many times longer than is charged, what sources cost is measured for a while. Cores that are far from each other make work
/// take up to five times its price, for everybody alike.
const SUSPICIOUS: u32 = 10;

/// Length of an audit. It is prolonged by as much for as long as it finds something. It has an end because measuring costs half a
/// microsecond a burst.
const LENGTH: Duration = Duration::from_millis(100);

/// When the events were last looked at.
pub(super) struct Look {
    pub(super) at: Instant,
    /// Work done until then.
    pub(super) worked: u64,
}

/// An audit that goes on.
#[derive(Debug)]
struct Audit {
    clock: ThreadClock,
    until: Instant,
    /// What reading the clock takes, which is more than most polls: a system call.
    overhead: Duration,
    /// Something took so much longer than its price that the audit is to go on.
    found: bool,
}

impl Audit {
    fn begin(clock: ThreadClock, now: Instant) -> Self {
        let used = || clock.used().unwrap_or_default();
        // The longest of a few, so that nothing is found where nothing was done.
        let overhead = (0..8).map(|_| {
            let before = used();
            used().saturating_sub(before)
        });
        Audit { clock, until: now + LENGTH, overhead: overhead.max().unwrap_or_default(), found: false }
    }
}

/// A suspicion that work takes longer than its price, as time has passed much faster than work was charged. The thread may only have been preempted:
/// its CPU clock tells at the next look.
#[derive(Debug)]
struct Suspicion {
    clock: ThreadClock,
    /// The thread's time, and the work done, when it arose.
    used: Duration,
    worked: u64,
}

/// Begins and ends the audits of one worker.
#[derive(Debug, Default)]
pub(super) struct Auditor {
    audit: Option<Audit>,
    suspicion: Option<Suspicion>,
}

impl Auditor {
    /// Returns true if there is an audit.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.audit.is_some()
    }

    /// Begins or ends an audit, now that so much work was `worked` and there was some ever since a look.
    pub(super) fn consider(&mut self, last: &Look, worked: u64, now: Instant) {
        let price = |since: u64| SUSPICIOUS * Duration::from_nanos(worked - since);
        match (&mut self.audit, self.suspicion.take()) {
            (Some(audit), _) if audit.until > now => {}
            (Some(audit), _) if audit.found => (audit.until, audit.found) = (now + LENGTH, false),
            (audit @ Some(_), _) => *audit = None,
            (audit @ None, Some(suspicion)) => {
                let took = suspicion.clock.used().unwrap_or_default().saturating_sub(suspicion.used);
                if took > EVENTS_TIME / 2 + price(suspicion.worked) {
                    *audit = Some(Audit::begin(suspicion.clock, now));
                }
            }
            (None, None) if now - last.at > EVENTS_TIME + price(last.worked) => {
                let suspect = |clock: ThreadClock| Some(Suspicion { clock, used: clock.used()?, worked });
                self.suspicion = ThreadClock::current().ok().and_then(suspect);
            }
            (None, None) => {}
        }
    }
}

impl<P: Queues> Worker<P> {
    /// What a test does to look at the events so long after the last time, with this price of the work since: whether there is an audit then.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn look_after(&mut self, passed: Duration, price: u64) -> bool {
        let at = Instant::now();
        let last = Look { at, worked: self.worked.saturating_sub(price) };
        self.auditor.consider(&last, self.worked, at + passed);
        self.auditor.is_on()
    }

    /// [Polls](Worker::poll_charged) a source in an audit: what that took beyond its price is charged, too.
    #[cold]
    pub(super) fn poll_audited(&mut self, source: Source) -> Polled {
        let audit = self.auditor.audit.as_ref();
        let Some((clock, overhead)) = audit.map(|audit| (audit.clock, audit.overhead)) else {
            return self.poll_charged(source);
        };
        let used = || clock.used().unwrap_or_default();
        self.handoff.let_wakes_wait(true);
        let (before, worked, burst) = (used(), self.worked, self.accounts.burst(source.port));
        let polled = self.poll_charged(source);
        let took = used().saturating_sub(before + overhead).as_nanos() as u64;
        // To wake a processor takes a virtual machine microseconds, and falls to whoever is first to have something for a worker that sleeps: who sends a little at a
        // time would pay more for it than a flood for its frames, and be held to its share of them.
        self.handoff.let_wakes_wait(false);
        let price = self.worked - worked;
        if polled.moved && took > price {
            self.charge(source.port, took - price);
            self.accounts.note_burst(source.port, burst, took, TURN_COST);
        }
        if let Some(audit) = self.auditor.audit.as_mut().filter(|_| polled.moved) {
            audit.found |= took > u64::from(SUSPICIOUS) * price.max(ROUND);
        }
        polled
    }
}
