//! Work that a back end may hold up, on threads of its own: the set-up of a connection, and the close of one.
//!
//! The main thread obeys signals and answers on the control socket, so it must wait for no back end. It gives the set-up
//! to a thread ([`Aside::start`]) and waits for the [`Job`] together with everything else; a job that takes too long is left
//! behind, and ends by itself at its deadline. A connection is closed by a thread, too ([`Aside::let_go`]), because the kernel
//! closes the descriptors that lie unread in a socket with it, and the close of a descriptor can take as long as the one
//! who sent it likes (a TCP socket that lingers, a file of FUSE).
//!
//! Their number is bounded: when a back end holds [`MOST`] of them up, there is no other connection before one has ended.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::Builder;

use ringferry_sys::eventfd::EventFd;

/// Most threads that may be held up at once. Each keeps one connection's descriptors and no more.
const MOST: usize = 16;

/// Starts the threads, and counts them. See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Aside {
    /// A reference for each thread that has not ended, and our own.
    alive: Arc<()>,
}

/// Something that a thread does, and its result.
#[derive(Debug)]
pub(super) struct Job<T> {
    result: Receiver<T>,
    /// Readable once the thread has ended, one way or another.
    pub(super) done: EventFd,
}

impl<T> Job<T> {
    /// The result of a job that is done; `None` if it panicked.
    pub(super) fn result(self) -> Option<T> {
        self.result.try_recv().ok()
    }
}

/// Rings when it is dropped.
struct Bell(EventFd);

impl Drop for Bell {
    fn drop(&mut self) {
        let _ = self.0.signal();
    }
}

impl Aside {
    /// Whether so many threads are held up that there must not be another.
    pub(super) fn is_full(&self) -> bool {
        Arc::strong_count(&self.alive) > MOST
    }

    /// Does something on a thread of its own. If the job is dropped before it is done, so is its result, on that thread.
    ///
    /// # Errors
    /// The system has no more threads or descriptors.
    pub(super) fn start<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Job<T>> {
        let (sender, result) = sync_channel(1);
        let done = EventFd::new()?;
        let (bell, alive) = (Bell(done.try_clone()?), Arc::clone(&self.alive));
        Builder::new().name(name.to_owned()).spawn(move || {
            // In this order: the result is there when the bell rings, or has been dropped before the thread counts as ended.
            let _alive = alive;
            let _bell = bell;
            let _ = sender.send(work());
        })?;
        Ok(Job { result, done })
    }

    /// Drops something whose end may take its time.
    pub(super) fn let_go(&self, thing: impl Send + 'static) {
        // Without a thread it is dropped here, by the closure that could not be given away.
        let _ = self.start("close", move || drop(thing));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    /// Its end waits until it is allowed.
    struct Lingering(Receiver<()>);

    impl Drop for Lingering {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn d1_what_lingers_holds_up_nobody_and_is_counted() {
        let aside = Aside::default();
        let mut held = Vec::new();
        while !aside.is_full() {
            let (end, allowed) = channel();
            aside.let_go(Lingering(allowed));
            held.push(end);
        }
        assert_eq!(held.len(), MOST);
        held.pop();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while aside.is_full() {
            assert!(std::time::Instant::now() < deadline, "a thread that has ended counts");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_result_is_there_when_the_bell_has_rung_and_a_panic_has_none() {
        let aside = Aside::default();
        for (work, expected) in [(true, Some(7)), (false, None)] {
            let job = aside.start("job", move || if work { 7 } else { panic!("as it should") }).unwrap();
            let deadline = std::time::Instant::now() + Duration::from_secs(60);
            while !job.done.drain().unwrap() {
                assert!(std::time::Instant::now() < deadline);
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(job.result(), expected);
        }
    }
}
