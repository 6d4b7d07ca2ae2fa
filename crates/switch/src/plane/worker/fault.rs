//! Faults that a worker finds and only the control plane can act on.
//!
//! A vhost-user queue that breaks is the guest's to reset; but a Xen front end that breaks a ring loses the whole interface,
//! which only the control plane can take down. The queue side reports it here once, and serves the queue no more.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, io};

use ringferry_sys::eventfd::EventFd;

use crate::fdb::PortId;

/// A connection of a port that can be served no more.
#[derive(Clone, Debug)]
pub struct PortFault {
    /// The port.
    pub port: PortId,
    /// The number of the connection, as the control plane counts them; `None` for the one that there is.
    pub session: Option<u32>,
    /// What its peer did.
    pub why: String,
}

/// The workers' end: any queue side may have one.
pub struct FaultReporter {
    sender: Sender<PortFault>,
    bell: EventFd,
}

/// The control plane's end.
pub(crate) struct Faults {
    faults: Mutex<Receiver<PortFault>>,
    bell: EventFd,
    reporter: Arc<FaultReporter>,
}

impl FaultReporter {
    /// Reports a fault. Never blocks.
    #[cold]
    pub fn report(&self, fault: PortFault) {
        // A control plane that is gone takes its workers along.
        let _ = self.sender.send(fault);
        let _ = self.bell.signal();
    }
}

impl Faults {
    /// A channel without faults.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new() -> io::Result<Faults> {
        let (sender, faults) = channel();
        let bell = EventFd::new()?;
        let reporter = Arc::new(FaultReporter { sender, bell: bell.try_clone()? });
        Ok(Faults { faults: Mutex::new(faults), bell, reporter })
    }

    /// The workers' end.
    pub(crate) fn reporter(&self) -> Arc<FaultReporter> {
        Arc::clone(&self.reporter)
    }

    /// The faults that were reported since this was last called.
    pub(crate) fn take(&self) -> Vec<PortFault> {
        let _ = self.bell.drain();
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).try_iter().collect()
    }
}

impl AsFd for Faults {
    /// Readable when there is something to [`take`](Faults::take).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl fmt::Debug for FaultReporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaultReporter")
    }
}
