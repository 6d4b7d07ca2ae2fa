//! Which hypervisor a program speaks to, and how it reaches it.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::domain::{DomId, Domain};
use crate::real::RealDomain;
use crate::store::Client;

/// What plays the hypervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Provider {
    /// Xen; the program runs in one of its domains.
    Xen,
    /// A broker whose domains are Linux processes. It is for tests, and only a build with the feature `process` can reach it.
    Process {
        /// Socket of the broker.
        broker: PathBuf,
        /// Socket of the store, for our domain.
        store: PathBuf,
        /// Number of our domain.
        domain: DomId,
    },
}

/// Why the hypervisor or the store cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// This program is no domain.
    #[error(
        "cannot be a domain ({0}): is this Xen, with /dev/xen/xenbus, gntdev, gntalloc and evtchn, and may we use them?"
    )]
    Domain(io::Error),
    /// The broker cannot be reached.
    #[cfg(feature = "process")]
    #[error(transparent)]
    Broker(#[from] crate::process::ConnectError),
    /// The store cannot be reached.
    #[error("cannot reach the store: {0}")]
    Store(io::Error),
    /// This build cannot reach a broker.
    #[cfg(not(feature = "process"))]
    #[error(
        "processes as domains are for tests: this program was built without the feature \"process\" of ringferry-xen"
    )]
    Unsupported,
}

impl Provider {
    /// Whether this build can reach such a hypervisor at all.
    ///
    /// # Errors
    /// It cannot, and trying again does not help.
    pub fn check(&self) -> Result<(), OpenError> {
        match self {
            #[cfg(not(feature = "process"))]
            Provider::Process { .. } => Err(OpenError::Unsupported),
            _ => Ok(()),
        }
    }

    /// Becomes a domain and connects to the store.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(&self) -> Result<(Arc<dyn Domain>, Client), OpenError> {
        match self {
            Provider::Xen => {
                let domain = RealDomain::open().map_err(OpenError::Domain)?;
                Ok((Arc::new(domain), Client::open().map_err(OpenError::Store)?))
            }
            #[cfg(feature = "process")]
            Provider::Process { broker, store, domain } => {
                let domain = crate::process::ProcessDomain::connect(broker, Some(*domain))?;
                Ok((Arc::new(domain), Client::connect(store).map_err(OpenError::Store)?))
            }
            #[cfg(not(feature = "process"))]
            Provider::Process { .. } => Err(OpenError::Unsupported),
        }
    }
}
