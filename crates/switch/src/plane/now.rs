//! The switch's clock, and the instant of one burst.
//!
//! All workers of a switch share one [`Clock`], as token buckets are filled by all of them. A worker makes a
//! [`Now`] for each burst from its coarse clock (whole seconds, read with every poll of epoll); the exact
//! time is read only if it is needed, and once.

use std::cell::OnceCell;
#[cfg(any(test, feature = "testing"))]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

/// The time since the switch was started.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Clock {
    /// The system's monotonic clock, since this instant.
    Monotonic(Instant),
    /// A clock of a test, in microseconds.
    #[cfg(any(test, feature = "testing"))]
    Scripted(&'static AtomicU64),
}

impl Clock {
    /// Returns the microseconds since the start.
    #[inline]
    pub(crate) fn micros(self) -> u64 {
        match self {
            Clock::Monotonic(started) => started.elapsed().as_micros() as u64,
            #[cfg(any(test, feature = "testing"))]
            Clock::Scripted(micros) => micros.load(Ordering::Relaxed),
        }
    }

    /// Whole seconds since the start: the clock of the forwarding database.
    pub(crate) fn seconds(self) -> u32 {
        (self.micros() / 1_000_000) as u32
    }
}

/// The instant at which a burst is forwarded.
#[derive(Debug)]
pub(crate) struct Now {
    clock: Clock,
    /// Whole seconds since the start, by the worker's coarse clock.
    pub(crate) seconds: u32,
    micros: OnceCell<u64>,
    wall: OnceCell<u64>,
}

impl Now {
    /// Makes the instant of a burst for a worker whose coarse clock shows `seconds`.
    #[inline]
    pub(crate) fn new(clock: Clock, seconds: u32) -> Self {
        Self { clock, seconds, micros: OnceCell::new(), wall: OnceCell::new() }
    }

    /// Microseconds since the start, the same at every call.
    #[inline]
    pub(crate) fn micros(&self) -> u64 {
        *self.micros.get_or_init(|| self.clock.micros())
    }

    /// Returns the instant so many microseconds later, for questions about what will be then.
    pub(crate) fn after(&self, micros: u64) -> Now {
        let seconds = self.seconds.saturating_add(u32::try_from(micros / 1_000_000).unwrap_or(u32::MAX));
        let micros = OnceCell::from(self.micros().saturating_add(micros));
        Now { clock: self.clock, seconds, micros, wall: OnceCell::new() }
    }

    /// Nanoseconds since 1970, the same at every call: the time stamp of captured frames.
    #[inline]
    pub(crate) fn wall_nanos(&self) -> u64 {
        let read = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        *self.wall.get_or_init(|| read().as_nanos() as u64)
    }
}
