//! [`Provider`]: the choice of the hypervisor that a program uses. It is part of a configuration,
//! is checked when that is read, and is opened once at start, and again after the connection to the
//! store was lost.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::domain::{DomId, Domain};
use crate::real::RealDomain;
use crate::store::Client;

/// The hypervisor, or what simulates it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Provider {
    /// Xen; the program runs in one of its domains.
    Xen,
    /// A broker whose domains are Linux processes. It is for tests, and only a build with the feature `process` can reach it.
    Process {
        /// Path of the broker's socket.
        broker: PathBuf,
        /// Path of the store's socket that speaks for this domain.
        store: PathBuf,
        /// Number that this process asks for as a domain.
        domain: DomId,
    },
}

/// The reason why the hypervisor or the store cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The program cannot act as a domain of Xen.
    #[error(
        "cannot be a domain ({0}): is this Xen, with /dev/xen/xenbus, gntdev, gntalloc and evtchn, and may we use them?"
    )]
    Domain(io::Error),
    /// The broker cannot be reached, or refuses the domain.
    #[cfg(feature = "process")]
    #[error(transparent)]
    Broker(#[from] crate::process::ConnectError),
    /// The store cannot be reached.
    #[error("cannot reach the store: {0}")]
    Store(io::Error),
    /// This build has no process provider.
    #[cfg(not(feature = "process"))]
    #[error(
        "processes as domains are for tests: this program was built without the feature \"process\" of ringferry-xen"
    )]
    Unsupported,
}

impl Provider {
    /// Checks that this build can reach such a hypervisor at all.
    ///
    /// # Errors
    /// It cannot, and a retry does not help.
    pub fn check(&self) -> Result<(), OpenError> {
        match self {
            #[cfg(not(feature = "process"))]
            Provider::Process { .. } => Err(OpenError::Unsupported),
            _ => Ok(()),
        }
    }

    /// Opens the domain and connects to its store.
    ///
    /// # Errors
    /// Any [`OpenError`].
    pub fn open(&self) -> Result<(Arc<dyn Domain>, Client), OpenError> {
        let mut store = self.open_store()?;
        Ok((self.open_domain(&mut store)?, store))
    }

    /// Connects to the store and asks it nothing, so this waits for nobody. On a machine without Xen it fails.
    ///
    /// # Errors
    /// Any [`OpenError`].
    pub fn open_store(&self) -> Result<Client, OpenError> {
        match self {
            Provider::Xen => Client::open().map_err(OpenError::Domain),
            #[cfg(feature = "process")]
            Provider::Process { store, .. } => Client::connect(store).map_err(OpenError::Store),
            #[cfg(not(feature = "process"))]
            Provider::Process { .. } => Err(OpenError::Unsupported),
        }
    }

    /// Opens the domain to which a store belongs.
    ///
    /// # Errors
    /// Any [`OpenError`].
    pub fn open_domain(&self, store: &mut Client) -> Result<Arc<dyn Domain>, OpenError> {
        match self {
            Provider::Xen => Ok(Arc::new(RealDomain::of_store(store).map_err(OpenError::Domain)?)),
            #[cfg(feature = "process")]
            Provider::Process { broker, domain, .. } => {
                Ok(Arc::new(crate::process::ProcessDomain::connect(broker, Some(*domain))?))
            }
            #[cfg(not(feature = "process"))]
            Provider::Process { .. } => Err(OpenError::Unsupported),
        }
    }
}
