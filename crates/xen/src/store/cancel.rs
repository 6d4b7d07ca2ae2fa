//! [`Cancel`]: ends the waits of clients from another thread, which has no time for a store that does not answer.
//!
//! A thread that uses clients for another one shares a `Cancel` with it, and gives it to every [`Client`](super::Client) that it opens. When
//! the other thread calls [`Cancel::cancel`], the request that is under way fails at once, and so does every later one.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use ringferry_sys::eventfd::EventFd;

/// Cancels the requests of clients, once and for good.
#[derive(Debug)]
pub struct Cancel {
    cancelled: AtomicBool,
    /// Readable from the cancellation on. It is never drained.
    event: EventFd,
}

impl Cancel {
    /// Creates one that cancels nothing yet.
    ///
    /// # Errors
    /// Too many files are open.
    pub fn new() -> io::Result<Cancel> {
        Ok(Cancel { cancelled: AtomicBool::new(false), event: EventFd::new()? })
    }

    /// Makes all requests of the clients fail, the one under way included. It never blocks.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        // The counter of an eventfd of our own has room.
        let _ = self.event.signal();
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }
}

impl AsFd for Cancel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
