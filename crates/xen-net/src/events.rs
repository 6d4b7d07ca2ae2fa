//! The event channels of a queue, for both halves. A [`xenbus`](crate::xenbus) driver binds or
//! allocates them when the interface connects; the queue's thread polls, drains and signals them;
//! dropping them closes the channels.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use ringferry_xen::event::EventChannel;

/// The event channels of a queue. "Transmit" and "receive" are always from the front end's point of
/// view.
#[derive(Debug)]
pub enum Events {
    /// One channel serves both directions.
    Shared(Box<dyn EventChannel>),
    /// Each direction has its own channel (`feature-split-event-channels`).
    Split {
        /// Channel of the ring on which the front end transmits.
        tx: Box<dyn EventChannel>,
        /// Channel of the ring on which the front end receives.
        rx: Box<dyn EventChannel>,
    },
}

impl Events {
    /// Returns the descriptors to poll, which are readable while an event is pending.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let (first, second) = match self {
            Self::Shared(both) => (both, None),
            Self::Split { tx, rx } => (tx, Some(rx)),
        };
        std::iter::once(first).chain(second).map(|channel| channel.as_fd())
    }

    /// Clears the pending events.
    ///
    /// # Errors
    /// A channel was closed.
    pub fn drain(&self) -> io::Result<()> {
        match self {
            Self::Shared(both) => both.drain().map(drop),
            Self::Split { tx, rx } => tx.drain().and_then(|_| rx.drain()).map(drop),
        }
    }

    /// Signals an event on the transmit ring to the other half.
    ///
    /// # Errors
    /// The channel was closed.
    #[inline]
    pub fn notify_transmit(&self) -> io::Result<()> {
        match self {
            Self::Shared(both) => both.notify(),
            Self::Split { tx, .. } => tx.notify(),
        }
    }

    /// Signals an event on the receive ring to the other half.
    ///
    /// # Errors
    /// The channel was closed.
    #[inline]
    pub fn notify_receive(&self) -> io::Result<()> {
        match self {
            Self::Shared(both) => both.notify(),
            Self::Split { rx, .. } => rx.notify(),
        }
    }
}
