//! Event channels: one bit from domain to domain.

use std::fmt::Debug;
use std::io;
use std::os::fd::AsFd;

/// One end of an event channel. Its descriptor is readable while an event is pending; dropping it closes
/// the port.
pub trait EventChannel: AsFd + Send + Debug {
    /// Sends an event to the other end. Events that were not yet seen merge into one.
    ///
    /// # Errors
    /// The port is gone.
    fn notify(&self) -> io::Result<()>;

    /// Takes note of a pending event and allows the next; whether there was one. Never blocks.
    ///
    /// # Errors
    /// The port is gone.
    fn drain(&self) -> io::Result<bool>;
}
