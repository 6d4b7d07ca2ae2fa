//! A worker's reaction to a front end that breaks the rules: [`FrontendFaults`], one for the rings that one
//! worker has of a port.
//!
//! A ring whose driver breaks the rules is the guest's to reset, and only logged. A front end that tries to
//! hold up the worker itself is worse, as every other port pays for it: its session is *out of service* from
//! then on, so the worker touches none of its events again, and the control plane, which is told by a
//! [`PortFault`], ends the session.
//!
//! **Long calls.** Whoever signals or reads an eventfd goes through all that wait for it, with a lock held and interrupts off, and a front end can have
//! millions wait for one of its own: poll(2) takes the same descriptor any number of times. Such a call does not block, it uses processor time, some
//! 15 ms for a million. So calls are [timed](FrontendFaults::timed): one that was long may have lost its processor, and is no more than a reason to look
//! at the next ones by the clock that counts only what the thread has used; if these are long, too, the session is out of service.
//!
//! **What is long** depends on the machine: where the processor is emulated, to wake a process takes longer than anything on a real one. So calls are compared with
//! what signalling an eventfd of our own takes there and then, for which nobody waits. In an emulated aarch64 machine each of our demo's front ends was
//! out of service within seconds before that was so.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_sys::eventfd::EventFd;
use rustix::time::{ClockId, clock_gettime};

use crate::log_limit::LogLimit;
use crate::plane::{FaultReporter, PortFault, PortHandle};

/// The faults of one port's front ends, as one worker sees them.
pub(super) struct FrontendFaults {
    /// One line about a broken queue per interval: a guest may break, reset and break it again; `ring_errors` counts them all.
    pub(super) limit: LogLimit,
    reporter: Arc<FaultReporter>,
    /// The session out of service, until the control plane has ended it. A later session has another number.
    out_of_service: Option<u32>,
    suspicion: Suspicion,
}

impl FrontendFaults {
    /// Makes the state of a port without sessions.
    pub(super) fn new(reporter: Arc<FaultReporter>) -> Self {
        Self { limit: LogLimit::new(1), reporter, out_of_service: None, suspicion: Suspicion::default() }
    }

    /// Returns true if the events of this session must not be touched.
    #[inline]
    pub(super) fn is_out_of_service(&self, session: u32) -> bool {
        self.out_of_service == Some(session)
    }

    /// Takes a session out of service and tells the control plane, once.
    #[cold]
    pub(super) fn take_out_of_service(&mut self, port: &PortHandle, session: u32, why: &str) {
        if self.out_of_service.replace(session) != Some(session) {
            self.reporter.report(PortFault { port: port.id, session: Some(session), why: why.to_owned() });
        }
    }

    /// Makes a call on an event of this session, and takes the session out of service if such calls keep taking long.
    #[inline]
    pub(super) fn timed<T>(&mut self, port: &PortHandle, session: u32, call: impl FnOnce() -> T) -> T {
        let used = if self.suspicion.looks() { Some(thread_time()) } else { None };
        let begun = Instant::now();
        let result = call();
        if begun.elapsed() >= LONG || used.is_some() {
            self.judge(port, session, used);
        }
        result
    }

    /// Looks at a call that was long, or at any while there is suspicion: `used` is what the thread had used before.
    #[cold]
    fn judge(&mut self, port: &PortHandle, session: u32, used: Option<Duration>) {
        let used = used.map(|used| thread_time().saturating_sub(used));
        if used.is_none() {
            self.suspicion = Suspicion::begin(harmless_call());
        } else if used.is_some_and(|used| self.suspicion.is_proven_by(used)) {
            self.suspicion = Suspicion::default();
            self.take_out_of_service(port, session, "it makes whoever uses its events wait in the kernel");
        }
    }
}

/// A call that takes so many times as long as one for which nobody waits is long, whatever the machine. To wake a process takes 3 to 30 times as long, a million of waiters 50 000 times.
const MANY_TIMES: u32 = 200;
/// A call that is longer is looked at. A common one takes a microsecond or two, and of a machine whose processors are far apart ten.
const LONG: Duration = Duration::from_micros(100);
/// Calls that are measured after one that was long.
const MEASURED: u8 = 16;
/// Long ones among them that are proof. Interrupts that a kernel puts down to the thread make one of thousands long.
const PROOF: u8 = 8;
/// What two of them have used in all, if that is so much, is proof, too: others cannot wait for the rest.
const MUCH: Duration = Duration::from_millis(50);

/// What long calls have led to.
#[derive(Debug, Default)]
struct Suspicion {
    /// Calls that are still to be measured.
    left: u8,
    /// Long ones among those that were, and what they have used.
    long: u8,
    used: Duration,
    /// What is long.
    bound: Duration,
}

impl Suspicion {
    /// Returns true if the next call is to be measured.
    #[inline]
    fn looks(&self) -> bool {
        self.left > 0
    }

    /// Begins after a call that was long, on a machine where one for which nobody waits takes so long.
    fn begin(harmless: Duration) -> Suspicion {
        Suspicion { left: MEASURED, bound: LONG.max(harmless * MANY_TIMES), ..Suspicion::default() }
    }

    /// Takes note of what a call has used. Returns true if that, with those before it, is proof of intent.
    fn is_proven_by(&mut self, used: Duration) -> bool {
        self.left = self.left.saturating_sub(1);
        if used >= self.bound {
            self.long += 1;
            self.used += used;
        }
        self.long >= PROOF || (self.long >= 2 && self.used >= MUCH.max(self.bound * u32::from(PROOF)))
    }
}

/// What signalling an eventfd takes for which nobody waits, in processor time; nothing if there is no descriptor left to try it with.
fn harmless_call() -> Duration {
    let Ok(event) = EventFd::new() else { return Duration::ZERO };
    // The least of a few, as an interrupt may come in between.
    let once = || {
        let before = thread_time();
        let _ = event.signal();
        thread_time().saturating_sub(before)
    };
    (0..4).map(|_| once()).min().unwrap_or_default()
}

/// The processor time that the calling thread has used.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which of these calls, by what they have used in microseconds, is the proof, after one that was long.
    fn proof(calls: &[u64]) -> Option<usize> {
        proof_where(Duration::from_nanos(400), calls)
    }

    /// The same on a machine where a call for which nobody waits takes so long.
    fn proof_where(harmless: Duration, calls: &[u64]) -> Option<usize> {
        assert!(!Suspicion::default().looks());
        let mut suspicion = Suspicion::begin(harmless);
        calls.iter().position(|used| {
            assert!(suspicion.looks());
            suspicion.is_proven_by(Duration::from_micros(*used))
        })
    }

    #[test]
    fn calls_that_use_much_time_are_proof_and_those_that_wait_for_a_processor_are_not() {
        assert_eq!(proof(&[45_000, 45_000]), Some(1));
        assert_eq!(proof(&[200; 16]), Some(7));
        assert_eq!(proof(&[0, 200, 0, 200, 0, 200, 0, 200, 0, 200, 0, 200, 0, 200, 0, 200]), Some(15));
        assert_eq!(proof(&[2; 16]), None, "the long one had lost its processor");
        assert_eq!(proof(&[2, 2000, 2, 2, 2, 2, 2, 2, 2000, 2, 2, 2, 2, 2, 2, 2]), None, "interrupts");
        assert_eq!(proof(&[90_000, 2, 2, 2]), None, "one is chance");
    }

    #[test]
    fn where_every_call_is_slow_a_slow_one_is_no_proof() {
        let slow = Duration::from_micros(10);
        assert_eq!(proof_where(slow, &[300; 16]), None);
        assert_eq!(proof_where(slow, &[1999; 16]), None);
        assert_eq!(proof_where(slow, &[2500; 16]), Some(7));
        assert_eq!(proof_where(slow, &[45_000, 45_000]), Some(1));
        // Of this machine it is known that it is not slow.
        assert!(harmless_call() < Duration::from_millis(1));
    }

    #[test]
    fn suspicion_ends_and_begins_anew() {
        for _ in 0..3 {
            let mut suspicion = Suspicion::begin(Duration::ZERO);
            for call in 0..MEASURED {
                assert!(suspicion.looks());
                let used = if call < PROOF - 1 { LONG } else { Duration::ZERO };
                assert!(!suspicion.is_proven_by(used));
            }
            assert!(!suspicion.looks());
        }
    }
}
