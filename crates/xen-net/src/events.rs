//! The event channels of a queue, as both halves have them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use ringferry_xen::event::EventChannel;

/// The event channels of a queue. "Transmit" and "receive" are always the front end's.
#[derive(Debug)]
pub enum Events {
    /// One for both directions.
    Shared(Box<dyn EventChannel>),
    /// One for each (`feature-split-event-channels`).
    Split {
        /// For packets that the front end sends.
        tx: Box<dyn EventChannel>,
        /// For packets that it receives.
        rx: Box<dyn EventChannel>,
    },
}

impl Events {
    /// What to poll: readable while an event is pending.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let (first, second) = match self {
            Self::Shared(both) => (both, None),
            Self::Split { tx, rx } => (tx, Some(rx)),
        };
        std::iter::once(first).chain(second).map(|channel| channel.as_fd())
    }

    /// Takes note of the events that are pending.
    ///
    /// # Errors
    /// A channel is gone.
    pub fn drain(&self) -> io::Result<()> {
        match self {
            Self::Shared(both) => both.drain().map(drop),
            Self::Split { tx, rx } => tx.drain().and_then(|_| rx.drain()).map(drop),
        }
    }

    /// Tells the other side that something has happened on the transmit ring.
    ///
    /// # Errors
    /// The channel is gone.
    #[inline]
    pub fn notify_transmit(&self) -> io::Result<()> {
        match self {
            Self::Shared(both) => both.notify(),
            Self::Split { tx, .. } => tx.notify(),
        }
    }

    /// Tells the other side that something has happened on the receive ring.
    ///
    /// # Errors
    /// The channel is gone.
    #[inline]
    pub fn notify_receive(&self) -> io::Result<()> {
        match self {
            Self::Shared(both) => both.notify(),
            Self::Split { rx, .. } => rx.notify(),
        }
    }
}
