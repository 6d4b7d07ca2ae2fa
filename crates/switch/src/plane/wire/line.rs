//! The line of one direction of a wire with a rate: frames are on it one after the other, whichever worker sends them.

use std::sync::atomic::{AtomicU64, Ordering};

/// The time at which the line is free again, in nanoseconds of the switch's clock.
#[derive(Debug, Default)]
pub(crate) struct Line(AtomicU64);

impl Line {
    /// Puts a frame of `len` bytes on the line at `now`, behind those that wait; returns when its last bit has left.
    pub(crate) fn send(&self, len: u64, bits_per_second: u64, now: u64) -> u64 {
        let sent = |free: u64| sent(free, len, bits_per_second, now);
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| Some(sent(free)));
        sent(before.unwrap_or_else(|free| free))
    }

    /// Returns when the last bit of such a frame would have left.
    pub(crate) fn would_send(&self, len: u64, bits_per_second: u64, now: u64) -> u64 {
        sent(self.free_at(), len, bits_per_second, now)
    }

    /// Returns when the line is free.
    pub(crate) fn free_at(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Goes on where the line of another process stood.
    pub(crate) fn set_free_at(&self, free: u64) {
        self.0.store(free, Ordering::Relaxed);
    }
}

/// Returns when a frame has left a line that is free from `free` on.
fn sent(free: u64, len: u64, bits_per_second: u64, now: u64) -> u64 {
    let nanos = u128::from(len) * 8 * 1_000_000_000 / u128::from(bits_per_second.max(1));
    free.max(now).saturating_add(u64::try_from(nanos).unwrap_or(u64::MAX))
}
