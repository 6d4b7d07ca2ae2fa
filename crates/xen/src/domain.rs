//! [`Domain`]: what a Xen domain can do, as a trait. A program creates one provider of it at start,
//! shares it between threads, and obtains from it the handles for grants and event channels, each
//! of which lives until it is dropped.

use std::fmt::{self, Debug};
use std::io;

use crate::event::EventChannel;
use crate::grant::{Foreign, GrantTable};

/// Size of a page in bytes, the unit of grants, whatever the host's own page size is.
pub const PAGE: usize = 4096;

/// Number of a domain; 0 is the first domain, which usually runs the back ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DomId(pub u16);

impl fmt::Display for DomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Number of an event channel port within one domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventPort(pub u32);

/// A domain as seen by a program in it. All handles are independent: each may be moved to another
/// thread.
pub trait Domain: Send + Sync + Debug {
    /// Returns the number of this domain.
    fn id(&self) -> DomId;

    /// Opens a grant table, through which this domain grants pages of its own.
    ///
    /// # Errors
    /// The device is missing, or no descriptors are left.
    fn grants(&self) -> io::Result<Box<dyn GrantTable>>;

    /// Opens access to the pages that another domain has granted to this one.
    ///
    /// # Errors
    /// There is no such domain, or no descriptors are left.
    fn foreign(&self, domain: DomId) -> io::Result<Box<dyn Foreign>>;

    /// Allocates an event channel port to which `remote` may bind.
    ///
    /// # Errors
    /// No port or descriptor is left.
    fn alloc_unbound(&self, remote: DomId) -> io::Result<(EventPort, Box<dyn EventChannel>)>;

    /// Binds to a port that `remote` allocated for this domain.
    ///
    /// # Errors
    /// There is no such port, or it is bound already, or not for this domain.
    fn bind_interdomain(&self, remote: DomId, port: EventPort) -> io::Result<Box<dyn EventChannel>>;
}
