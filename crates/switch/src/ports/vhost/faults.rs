//! A worker's reaction to a front end that breaks the rules: [`FrontendFaults`], one for the rings that one
//! worker has of a port.
//!
//! A ring whose driver breaks the rules is the guest's to reset, and only logged. A front end that tries to
//! hold up the worker itself is worse, as every other port pays for it: its session is in *quarantine* from
//! then on, so the worker touches none of its events again, and the control plane, which is told by a
//! [`PortFault`], ends the session.

use std::sync::Arc;

use crate::log_limit::LogLimit;
use crate::plane::{FaultReporter, PortFault, PortHandle};

/// The faults of one port's front ends, as one worker sees them.
pub(super) struct FrontendFaults {
    /// One line about a broken queue per interval: a guest may break, reset and break it again; `ring_errors` counts them all.
    pub(super) limit: LogLimit,
    reporter: Arc<FaultReporter>,
    /// The session in quarantine, until the control plane has ended it. A later session has another number.
    quarantined: Option<u32>,
}

impl FrontendFaults {
    /// Makes the state of a port without sessions.
    pub(super) fn new(reporter: Arc<FaultReporter>) -> Self {
        Self { limit: LogLimit::new(1), reporter, quarantined: None }
    }

    /// Returns true if the events of this session must not be touched.
    #[inline]
    pub(super) fn is_quarantined(&self, session: u32) -> bool {
        self.quarantined == Some(session)
    }

    /// Puts a session into quarantine and tells the control plane, once.
    #[cold]
    pub(super) fn quarantine(&mut self, port: &PortHandle, session: u32, why: &str) {
        if self.quarantined.replace(session) != Some(session) {
            self.reporter.report(PortFault { port: port.id, session: Some(session), why: why.to_owned() });
        }
    }
}
