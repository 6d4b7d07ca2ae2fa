//! [`EventChannel`]: one end of an event channel, which carries one bit from domain to domain.
//! [`Domain`](crate::domain::Domain) allocates or binds it; the thread that owns it polls, drains
//! and notifies; dropping it closes the port.

use std::fmt::Debug;
use std::io;
use std::os::fd::AsFd;

/// One end of an event channel. Its descriptor is readable while an event is pending.
pub trait EventChannel: AsFd + Send + Debug {
    /// Sends an event to the other end. Events that were not yet drained merge into one.
    ///
    /// # Errors
    /// The port was closed.
    fn notify(&self) -> io::Result<()>;

    /// Clears a pending event, which allows the next; returns true if there was one. It never
    /// blocks.
    ///
    /// # Errors
    /// The port was closed.
    fn drain(&self) -> io::Result<bool>;
}
