//! The watchdog of the pairs' threads: it frees a thread that its back end holds in a kick.
//!
//! A back end shares the open file of each kick eventfd. It can make the file blocking again and fill its counter, and
//! the thread that kicks next then stays in `write` for as long as the back end likes: Linux has no write to an eventfd
//! that cannot wait. So each pair's thread kicks through a [`Watched`], which says for how long; the session's thread
//! looks at all of them with each tick ([`Watchdog::look`]) and interrupts the ones that are in the same kick as
//! at the tick before. A kick that was interrupted fails, and with it the session.
//!
//! The session's thread itself never kicks: a pair's thread does so as soon as it begins.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use ringferry_sys::eventfd::EventFd;
use ringferry_sys::interrupt::Target;

/// A pair's thread as the watchdog sees it.
#[derive(Debug, Default)]
pub(super) struct Watched {
    target: OnceLock<Target>,
    /// Grows by one before and after each kick, so that it is odd during one.
    kicks: AtomicU64,
}

impl Watched {
    /// The calling thread is the one to watch. It must not kick before.
    pub(super) fn begin(&self) {
        self.target.get_or_init(Target::current);
    }

    /// Kicks the back end.
    ///
    /// # Errors
    /// `Interrupted`, if the back end held the thread until the watchdog freed it. The event must not be used any more.
    pub(super) fn kick(&self, event: &EventFd) -> io::Result<()> {
        let before = self.kicks.load(Ordering::Relaxed);
        self.kicks.store(before.wrapping_add(1), Ordering::Relaxed);
        let result = event.signal();
        self.kicks.store(before.wrapping_add(2), Ordering::Relaxed);
        result
    }

    /// Interrupts the thread if it is in a kick now.
    fn free(&self) {
        if let Some(target) = self.target.get().filter(|_| self.kicks.load(Ordering::Relaxed) % 2 == 1) {
            target.interrupt();
        }
    }
}

/// What the session's thread knows of the threads it watches.
#[derive(Debug)]
pub(super) struct Watchdog<'a> {
    threads: &'a [Watched],
    /// The number of kicks of each thread at the last look.
    seen: Vec<u64>,
}

impl<'a> Watchdog<'a> {
    pub(super) fn new(threads: &'a [Watched]) -> Self {
        Self { threads, seen: vec![0; threads.len()] }
    }

    /// Frees each thread that is in the same kick as at the look before.
    pub(super) fn look(&mut self) {
        for (thread, seen) in self.threads.iter().zip(&mut self.seen) {
            let kicks = thread.kicks.load(Ordering::Relaxed);
            if kicks == *seen {
                thread.free();
            }
            *seen = kicks;
        }
    }

    /// Frees each thread that is in a kick, however new: they have been told to end.
    pub(super) fn free_all(&self) {
        self.threads.iter().for_each(Watched::free);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use rustix::fs::OFlags;

    use super::*;

    /// An event whose other owner makes its next signal wait for ever.
    fn trap() -> EventFd {
        let event = EventFd::new().unwrap();
        rustix::fs::fcntl_setfl(event.as_fd(), OFlags::empty()).unwrap();
        rustix::io::write(event.as_fd(), &(u64::MAX - 1).to_ne_bytes()).unwrap();
        event
    }

    #[test]
    fn d2_a_thread_that_is_held_in_a_kick_is_freed_and_told() {
        let (threads, event) = ([Watched::default(), Watched::default()], trap());
        let mut watchdog = Watchdog::new(&threads);
        std::thread::scope(|scope| {
            let held = scope.spawn(|| {
                threads[1].begin();
                threads[1].kick(&event)
            });
            let deadline = Instant::now() + Duration::from_secs(60);
            while !held.is_finished() {
                assert!(Instant::now() < deadline, "nobody frees the thread");
                watchdog.look();
                std::thread::sleep(Duration::from_millis(10));
            }
            assert_eq!(held.join().unwrap().unwrap_err().kind(), io::ErrorKind::Interrupted);
        });
        // It is in no kick any more.
        assert!(threads[1].kicks.load(Ordering::Relaxed).is_multiple_of(2));
        threads[1].kick(&EventFd::new().unwrap()).unwrap();
    }
}
