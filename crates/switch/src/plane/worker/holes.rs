//! Whose memory a worker sleeps in: holes that front ends punch into memory that they share.
//!
//! A front end that punches a hole into its memory file (fallocate(2)) puts to sleep whoever touches a page of it, until all of the hole is punched: 40 ms
//! for 300 MiB, 270 ms for 2 GiB. A sleeping thread uses no processor time, so neither prices nor the CPU clock see it, while all ports of the worker
//! wait. No honest front end takes a page away that is in a ring, or in a buffer on offer.
//!
//! **Life cycle.** Each worker has one [`HoleAudit`], which its [forwarder](crate::plane::forward) keeps. Whoever is about to touch a port's memory says so
//! ([`HoleAudit::touch`]), always: so the control plane knows for whom a worker sleeps ([`Touched`]). That is a store. More is done only when
//! a round has taken [`SLOW`]:
//!
//! ```text
//!         a round took SLOW           a look found the worker in a hole
//!   off ───────────────────► watching ──────────────────────────────────► exact
//!    ▲                           │                                          │
//!    └── WATCH without a look ───┴──────────────────────────────────────────┘
//!        that found one
//! ```
//!
//! - *Watching*: the [watchdog](ringferry_sys::watchdog) looks at the worker every 5 ms, and the kernel says whether it waits for a hole.
//!   What it finds is put down to the port whose memory was touched.
//! - *Exact*: while frames are copied, memory of two ports is touched at once. So the worker first copies frames to private memory, which touches only the sender's,
//!   and delivers the copies, which touches only the receiver's.
//!
//! The control plane touches memory of a front end only where it takes over an in-flight region, and has itself looked at while it serves a message.
//!
//! A port in whose memory the worker has slept [often](OFTEN) or [long](LONG) is taken out of service ([`Queues::take_out_of_service`](crate::plane::Queues)).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ringferry_sys::watchdog::HoleWaits;

use crate::fdb::PortId;

/// What is said of a port in whose memory a worker has slept.
pub(crate) const HOLES: &str = "it punches holes into its memory while the switch uses it";

/// How long a round takes at least that is looked into: twice what a thread waits at most for its turn on a processor that two want, and more than fifty
/// times what a round of work takes.
pub(crate) const SLOW: Duration = Duration::from_millis(10);

/// For how long the watchdog looks after a slow round, or after it has found something.
const WATCH: Duration = Duration::from_secs(10);

/// Looks in one touch that make a sleep: at least one [interval](ringferry_sys::watchdog::INTERVAL) lies between them.
const SLEEP: u32 = 2;

/// So many sleeps in a port's memory are no accident.
const OFTEN: u32 = 3;

/// Nor are sleeps of so many looks together: 50 ms.
const LONG: u32 = 10;

/// The ports whose memory a worker touches, for other threads.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Touched(AtomicU32);

impl Default for Touched {
    fn default() -> Self {
        Touched(AtomicU32::new(Touch::NOTHING.0))
    }
}

impl Touched {
    /// Says what the worker touches.
    #[inline]
    pub(crate) fn set(&self, touch: Touch) {
        self.0.store(touch.0, Ordering::Relaxed);
    }

    /// What the worker touches now.
    pub(crate) fn now(&self) -> Touch {
        Touch(self.0.load(Ordering::Relaxed))
    }
}

/// The port whose memory is read, in the upper half, and the one whose memory is written: the same if it is only about one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Touch(u32);

impl Touch {
    /// No port has this number.
    const NOTHING: Touch = Touch(u32::MAX);

    /// Memory of one port.
    #[inline]
    pub(crate) fn of(port: PortId) -> Touch {
        Touch::between(port, port)
    }

    /// Memory of two ports, as frames of the first are copied to the second.
    #[inline]
    pub(crate) fn between(from: PortId, to: PortId) -> Touch {
        Touch(u32::from(from.0) << 16 | u32::from(to.0))
    }

    /// The port, if it is only one.
    pub(crate) fn sole(self) -> Option<PortId> {
        let (from, to) = ((self.0 >> 16) as u16, self.0 as u16);
        (from == to && self != Touch::NOTHING).then_some(PortId(to))
    }

    /// Returns true if memory of another port than this one is touched.
    pub(crate) fn concerns_another(self, port: PortId) -> bool {
        self != Touch::NOTHING && self != Touch::of(port)
    }
}

/// Where the audit learns of sleeps.
#[derive(Debug, Default)]
enum Source {
    /// The thread has not been asked yet.
    #[default]
    Unknown,
    /// Nowhere: the kernel does not say.
    Nowhere,
    /// From the watchdog.
    Watchdog(HoleWaits),
    /// A test tells, when asked, in how many looks the worker has slept since it was last asked.
    #[cfg(any(test, feature = "testing"))]
    Scripted(fn() -> u32),
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct HoleAudit {
    touched: Arc<Touched>,
    source: Source,
    /// Until when the watchdog looks, if it does.
    until: Option<Instant>,
    exact: bool,
    /// What is touched in this lap, the time from one touch to the next.
    lap: Option<Touch>,
    /// Ports in whose memory the worker has slept since the audit began.
    suspects: Vec<(PortId, Sleeps)>,
}

/// The sleeps in a port's memory of late.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sleeps {
    sleeps: u32,
    looks: u32,
}

impl Sleeps {
    /// Adds the looks of a touch that found a thread asleep.
    pub(crate) fn add(&mut self, looks: u32) {
        self.looks += looks;
        self.sleeps += u32::from(looks >= SLEEP);
    }

    /// Whether they are no accident.
    pub(crate) fn are_too_much(self) -> bool {
        self.sleeps >= OFTEN || self.sleeps > 0 && self.looks >= LONG
    }
}

impl HoleAudit {
    /// An audit that is off, and that says to others by `touched` what is touched.
    pub(crate) fn new(touched: Arc<Touched>) -> HoleAudit {
        HoleAudit { touched, ..HoleAudit::default() }
    }

    /// Says that memory is about to be touched.
    #[inline]
    pub(crate) fn touch(&mut self, touch: Touch) {
        self.touched.set(touch);
        if self.until.is_some() {
            self.next_lap(touch);
        }
    }

    /// Says that no port's memory is touched any more.
    #[inline]
    pub(crate) fn touch_nothing(&mut self) {
        self.touch(Touch::NOTHING);
    }

    /// Whether frames are to be copied to private memory before they are delivered.
    #[inline]
    pub(crate) fn is_exact(&self) -> bool {
        self.exact
    }

    /// Whether the audit is not off.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.until.is_some()
    }

    /// A round has taken [`SLOW`] or longer.
    #[cold]
    pub(crate) fn begin(&mut self, now: Instant) {
        if let Source::Unknown = self.source {
            self.source = HoleWaits::of_this_thread().map_or(Source::Nowhere, Source::Watchdog);
        }
        match &self.source {
            Source::Unknown | Source::Nowhere => return,
            Source::Watchdog(waits) if self.until.is_none() => waits.begin(),
            Source::Watchdog(_) => {}
            #[cfg(any(test, feature = "testing"))]
            Source::Scripted(_) => {}
        }
        self.until.get_or_insert(now + WATCH);
    }

    /// Ends the audit when nothing has been found for long. Called now and then while it is on.
    #[cold]
    pub(crate) fn end_if_over(&mut self, now: Instant) {
        if self.until.is_some_and(|until| until <= now) {
            if let Source::Watchdog(waits) = &self.source {
                waits.end();
            }
            (self.until, self.exact, self.lap) = (None, false, None);
            self.suspects.clear();
        }
    }

    /// Puts down what was found in the lap that ends now.
    #[cold]
    fn next_lap(&mut self, next: Touch) {
        let looks = match &self.source {
            Source::Unknown | Source::Nowhere => 0,
            Source::Watchdog(waits) => waits.lap().holes,
            #[cfg(any(test, feature = "testing"))]
            Source::Scripted(looks) => looks(),
        };
        let touch = self.lap.replace(next);
        if looks == 0 {
            return;
        }
        (self.until, self.exact) = (Some(Instant::now() + WATCH), true);
        let Some(port) = touch.and_then(Touch::sole) else { return };
        let at = self.suspects.iter().position(|(suspect, _)| *suspect == port);
        let at = at.unwrap_or_else(|| {
            self.suspects.push((port, Sleeps::default()));
            self.suspects.len() - 1
        });
        self.suspects[at].1.add(looks);
    }

    /// A port that is to be taken out of service, once.
    #[inline]
    pub(crate) fn next_convicted(&mut self) -> Option<PortId> {
        if self.suspects.is_empty() {
            return None;
        }
        let at = self.suspects.iter().position(|(_, sleeps)| sleeps.are_too_much())?;
        Some(self.suspects.swap_remove(at).0)
    }

    /// Forgets a port, whose number another may get.
    pub(crate) fn forget(&mut self, port: PortId) {
        self.suspects.retain(|(suspect, _)| *suspect != port);
    }

    /// Has a test tell of sleeps.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn script(&mut self, looks: fn() -> u32) {
        self.source = Source::Scripted(looks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(looks: &[u32]) -> bool {
        let mut sleeps = Sleeps::default();
        looks.iter().for_each(|looks| sleeps.add(*looks));
        sleeps.are_too_much()
    }

    #[test]
    fn three_sleeps_or_long_ones_are_too_much_and_glimpses_are_not() {
        assert!(!after(&[2, 2]) && after(&[2, 2, 2]) && after(&[LONG]) && !after(&[LONG - 1]));
        assert!(after(&[5, 5]) && !after(&[0; 100]));
        // A look that has happened upon a short wait says nothing of its length.
        assert!(!after(&[1; 100]) && after(&[&[1; 100][..], &[2]].concat()));
    }

    #[test]
    fn what_is_touched_is_one_port_or_two() {
        let (a, b) = (PortId(0), PortId(7));
        assert_eq!(Touch::of(b).sole(), Some(b));
        assert_eq!((Touch::between(a, b).sole(), Touch::NOTHING.sole()), (None, None));
        assert!(Touch::of(a).concerns_another(b) && !Touch::of(b).concerns_another(b));
        assert!(Touch::between(a, b).concerns_another(b) && !Touch::NOTHING.concerns_another(b));
        let touched = Arc::new(Touched::default());
        let mut audit = HoleAudit::new(Arc::clone(&touched));
        assert_eq!(touched.now(), Touch::NOTHING);
        audit.touch(Touch::of(b));
        assert_eq!(touched.now(), Touch::of(b));
        audit.touch_nothing();
        assert_eq!(touched.now(), Touch::NOTHING);
    }
}
