//! The clock through which two threads that work and one that measures speak.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ringferry_sys::cpu;

use crate::experiment::{RowError, Run};

/// How long a set-up, a check or an end may take. All are done in a fraction of a second on an idle machine.
pub(in crate::experiments) const PATIENCE: Duration = Duration::from_secs(15);

/// How often to look while waiting for something.
const LOOK: Duration = Duration::from_millis(2);

/// A number on cache lines of its own: two, as some processors fetch them in pairs. One thread writes it.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(in crate::experiments) struct Gauge(AtomicU64);

impl Gauge {
    #[inline]
    pub(in crate::experiments) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }

    #[inline]
    pub(in crate::experiments) fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// Tells a thread to end.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(in crate::experiments) struct Over(AtomicBool);

impl Over {
    pub(in crate::experiments) fn tell(&self) {
        self.0.store(true, Ordering::Release);
    }

    #[inline]
    pub(in crate::experiments) fn told(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Tells threads to end when it is dropped, so that an error that leaves a scope leaves no thread behind.
pub(in crate::experiments) struct Finally<'a, const N: usize>(pub [&'a Over; N]);

impl<const N: usize> Drop for Finally<'_, N> {
    fn drop(&mut self) {
        self.0.iter().for_each(|over| over.tell());
    }
}

/// Binds the calling thread to a processor, if one is given.
pub(in crate::experiments) fn pin(cpu: Option<usize>) -> Result<(), RowError> {
    Ok(cpu.map_or(Ok(()), cpu::pin_current_thread)?)
}

/// The result of a thread that was joined, or an error if it panicked.
pub(in crate::experiments) fn joined<T>(
    ended: std::thread::Result<Result<T, RowError>>,
) -> Result<T, RowError> {
    ended.unwrap_or_else(|_| Err(RowError::failed("a thread of the lab panicked; its message is above")))
}

/// Waits until `done`; ends early, without an error, once a thread is not `alive`, which then says why.
pub(in crate::experiments) fn wait(
    run: &Run<'_>,
    what: &str,
    alive: impl Fn() -> bool,
    mut done: impl FnMut() -> Result<bool, RowError>,
) -> Result<(), RowError> {
    let deadline = Instant::now() + PATIENCE;
    while alive() && !done()? {
        if run.stopped() {
            return Err(RowError::Stopped);
        }
        if Instant::now() >= deadline {
            return Err(RowError::failed(format!("waited {PATIENCE:?} for {what}")));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Sleeps for `time`; ends early once a thread is not `alive`. Returns the time that has gone by.
pub(in crate::experiments) fn sleep(
    run: &Run<'_>,
    time: Duration,
    alive: impl Fn() -> bool,
) -> Result<Duration, RowError> {
    let begin = Instant::now();
    loop {
        let left = time.saturating_sub(begin.elapsed());
        if left.is_zero() || !alive() {
            return Ok(begin.elapsed());
        }
        if run.stopped() {
            return Err(RowError::Stopped);
        }
        // Long sleeps: each wake-up takes time from a thread that works.
        std::thread::sleep(left.min(Duration::from_millis(100)));
    }
}
