//! The time of a burst.

use std::cell::OnceCell;
use std::time::Instant;

/// When a burst is forwarded. The exact time is asked for only if somebody needs it, and once.
#[derive(Debug)]
pub(super) struct Moment {
    started: Instant,
    /// Seconds since the start: the clock of the forwarding database.
    pub(super) seconds: u32,
    micros: OnceCell<u64>,
}

impl Moment {
    /// Now, of a worker that was started at `started`, and by whose coarse clock it is `seconds`.
    #[inline]
    pub(super) fn new(started: Instant, seconds: u32) -> Self {
        Self { started, seconds, micros: OnceCell::new() }
    }

    /// Microseconds since the start.
    #[inline]
    pub(super) fn micros(&self) -> u64 {
        *self.micros.get_or_init(|| self.started.elapsed().as_micros() as u64)
    }
}
