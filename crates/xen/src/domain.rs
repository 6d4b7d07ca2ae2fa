//! What a domain can do.

use std::fmt::{self, Debug};
use std::io;

use crate::event::EventChannel;
use crate::grant::{Foreign, GrantTable};

/// Bytes of a page, the unit of grants, whatever the machine's own page is.
pub const PAGE: usize = 4096;

/// Number of a domain; 0 is the first, which usually runs the back ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DomId(pub u16);

impl fmt::Display for DomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Number of a port of an event channel, within one domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventPort(pub u32);

/// A domain as a program in it sees it. All handles are independent: each may go to another thread.
pub trait Domain: Send + Sync + Debug {
    /// Its number.
    fn id(&self) -> DomId;

    /// The table in which this domain grants pages of its own.
    ///
    /// # Errors
    /// The device is missing, or no descriptors are left.
    fn grants(&self) -> io::Result<Box<dyn GrantTable>>;

    /// Access to what another domain has granted to this one.
    ///
    /// # Errors
    /// There is no such domain, or no descriptors are left.
    fn foreign(&self, domain: DomId) -> io::Result<Box<dyn Foreign>>;

    /// Makes an event channel to which `remote` may bind.
    ///
    /// # Errors
    /// No port or descriptor is left.
    fn alloc_unbound(&self, remote: DomId) -> io::Result<(EventPort, Box<dyn EventChannel>)>;

    /// Binds to a port that `remote` has made for us.
    ///
    /// # Errors
    /// There is no such port, or it is not for us or bound already.
    fn bind_interdomain(&self, remote: DomId, port: EventPort) -> io::Result<Box<dyn EventChannel>>;
}
