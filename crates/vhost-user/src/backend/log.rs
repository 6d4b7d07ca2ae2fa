//! The dirty log of a [`Session`], with which a guest is migrated while it runs.
//!
//! The front end passes the log's file (`SET_LOG_BASE`), and turns logging on and off for all rings with a feature bit,
//! [`F_LOG_ALL`]. It may do either at any time, and again and again: QEMU sends both once for each queue pair, cloud-hypervisor a new
//! log in each iteration. What a ring has is always what was said last, and rings are told before the message is answered, as
//! the answer says that nothing is written without the log any more, or to the one before.
//!
//! While the bit is set all writes are logged, also those to rings that did not ask for it ([`VRING_F_LOG`]); that is allowed and
//! leaves nothing out. The guest address for it is not used, as a packed ring's used descriptors are not where it says; see
//! [`RingAddresses`](ringferry_ring::RingAddresses).
//!
//! A ring is *held*, which is to say stopped whatever else is known of it, where it would have to be logged and cannot be:
//!
//! - In a session that begins while the guest is migrated, until the log comes, which is after the rings were kicked. The same holds
//!   when all rings were stopped: QEMU may have freed the log then, and passes it again when it has started the rings.
//! - If the log cannot be mapped, until logging ends. No reply could say so: QEMU ignores a failure of `SET_LOG_BASE`, and pages
//!   would be lost in silence; up to version 10.0.2 it aborts if `SET_FEATURES` fails.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ringferry_memory::DirtyLog;
use ringferry_sys::closer::Deferred;
use zerocopy::IntoBytes;

use super::{Answer, Device, Kick, Refusal, Session};
use crate::message::{F_LOG_ALL, LogBase, VRING_F_LOG};

/// What the front end has said of the log.
#[derive(Debug, Default)]
pub(super) enum Log {
    /// Nothing.
    #[default]
    Unset,
    /// The log lies here. It is unmapped by the closer, once the device has let go of it.
    Mapped { log: Deferred<Arc<DirtyLog>>, file: Deferred<OwnedFd>, place: LogBase },
    /// The log cannot be mapped, for this reason.
    Unusable(String),
}

impl Session {
    /// Returns true if the front end has turned logging on.
    fn is_logged(&self) -> bool {
        self.features.is_some_and(|features| features & F_LOG_ALL != 0)
    }

    /// Returns the dirty log in which writes are recorded now, if they are.
    pub fn dirty_log(&self) -> Option<&Arc<DirtyLog>> {
        match &self.log {
            Log::Mapped { log, .. } if self.is_logged() => Some(log),
            _ => None,
        }
    }

    /// Returns the reason why rings are held until the guest's migration goes on or ends, if some are.
    pub fn unlogged(&self) -> Option<&str> {
        match &self.log {
            Log::Unusable(why) if self.is_logged() => Some(why),
            // A ring that has no kick, as those of a guest that has left, would not run with a log either.
            Log::Unset
                if (0u16..)
                    .zip(&self.rings)
                    .any(|(index, ring)| !matches!(ring.kick, Kick::Unset) && self.is_held(index)) =>
            {
                Some("the front end has asked for a dirty log of its rings and has passed none yet")
            }
            _ => None,
        }
    }

    /// Returns true if a ring must not run.
    pub(super) fn is_held(&self, index: u16) -> bool {
        let asked = || {
            let addr = self.rings[usize::from(index)].geometry.addr;
            addr.is_some_and(|addr| addr.flags & VRING_F_LOG != 0)
        };
        self.is_logged()
            && match &self.log {
                Log::Mapped { .. } => false,
                Log::Unset => asked(),
                Log::Unusable(_) => true,
            }
    }

    pub(super) fn set_log_base(
        &mut self,
        place: LogBase,
        mut fds: Vec<Deferred<OwnedFd>>,
        dev: &mut dyn Device,
    ) -> Result<Answer, Refusal> {
        let (Some(file), true) = (fds.pop(), fds.is_empty()) else {
            return Err(Refusal::Descriptors(fds.len() + 1));
        };
        let before = self.dirty_log().cloned();
        let log = self.map_log(file, place);
        let old = std::mem::replace(&mut self.log, log);
        self.log_changed(before, dev);
        drop(old); // the device has let go of it, so that it is unmapped here, by the closer
        self.start_all(dev);
        Ok(Answer::Payload(place.as_bytes().to_vec()))
    }

    /// Maps a dirty log. One that cannot be mapped holds the rings until logging ends.
    pub(super) fn map_log(&self, file: Deferred<OwnedFd>, place: LogBase) -> Log {
        match DirtyLog::map_within(file.as_fd(), place.size, place.offset, &self.budget) {
            Ok(log) => Log::Mapped { log: self.wire.closer().defer_soon(log), file, place },
            Err(error) => {
                let port = self.port.as_deref();
                self.warnings.warn(port, || {
                    tracing::warn!(port, "the dirty log of a migration cannot be mapped, so no ring runs until it ends: {error}");
                });
                Log::Unusable(format!("the dirty log of the migration cannot be mapped: {error}"))
            }
        }
    }

    /// Stops the rings that are held now, and tells the device of the log of the others if it is not the one `before`.
    pub(super) fn log_changed(&mut self, before: Option<Arc<DirtyLog>>, dev: &mut dyn Device) {
        let started = |session: &Self| {
            let rings = (0u16..).zip(&session.rings).filter(|(_, ring)| ring.started);
            rings.map(|(index, _)| index).collect::<Vec<_>>()
        };
        let held: Vec<u16> = started(self).into_iter().filter(|index| self.is_held(*index)).collect();
        if !held.is_empty() {
            self.stop_these(&held, dev);
        }
        let (now, running) = (self.dirty_log().cloned(), started(self));
        let same = before.as_ref().map(Arc::as_ptr) == now.as_ref().map(Arc::as_ptr);
        if same || running.is_empty() || self.unanswered.is_some() {
            return;
        }
        self.disturbed = true;
        match dev.rings_logged(&running, now.as_ref()) {
            Ok(true) => {}
            Ok(false) => self.stop_these(&running, dev),
            Err(unanswered) => self.unanswered = Some(unanswered),
        }
    }

    /// Forgets the log if no ring runs any more.
    pub(super) fn forget_idle_log(&mut self) {
        if matches!(self.log, Log::Mapped { .. }) && self.rings.iter().all(|ring| !ring.started) {
            self.log = Log::Unset;
        }
    }
}
