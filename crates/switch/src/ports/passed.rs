//! Descriptors that the process got from its parent: inherited by number, or sockets passed by systemd under
//! a name.

use std::os::fd::{OwnedFd, RawFd};

use ringferry_sys::inherited;

use super::OpenError;
use crate::StartError;
use crate::config::{Config, PortKind, TapConfig, TapSource, VhostUserConfig, VhostUserEndpoint};
use crate::handover::kept::{Kept, Known};
use crate::privileged::Privileges;

/// The descriptors that no port has taken yet, and the helper for privileged operations of a running switch.
#[derive(Debug, Default)]
pub struct Passed {
    descriptors: Vec<(String, OwnedFd)>,
    /// What the helper has opened for one port; absent: ports are opened by this process.
    opened: Option<Vec<OwnedFd>>,
    privileges: Privileges,
    kept: Kept,
}

impl Passed {
    /// The descriptors that systemd passed, with their names: sockets of socket units, and what an earlier process had it keep.
    pub fn new(mut descriptors: Vec<(String, OwnedFd)>) -> Self {
        let kept = Kept::take(&mut descriptors);
        Self { descriptors, kept, ..Self::default() }
    }

    /// The descriptors of one port that the helper has opened ([`acquire`](super::acquire)).
    pub(crate) fn opened(descriptors: Vec<OwnedFd>, privileges: Privileges) -> Self {
        Self { opened: Some(descriptors), privileges, ..Self::default() }
    }

    /// Takes what the helper has opened. `None`: the port is to be opened by this process.
    pub(super) fn take_opened(&mut self) -> Option<Vec<OwnedFd>> {
        self.opened.take()
    }

    /// Adds the descriptors that a configuration names by number. Call it before the process opens
    /// descriptors of its own: a number that was not inherited may otherwise be one of those.
    ///
    /// # Errors
    /// [`StartError::Port`], with [`OpenError::Inherited`].
    pub fn inherit(&mut self, config: &Config) -> Result<(), StartError> {
        for port in &config.ports {
            let fd = match &port.kind {
                PortKind::VhostUser(VhostUserConfig { endpoint: VhostUserEndpoint::Fd(number), .. })
                | PortKind::Tap(TapConfig { source: TapSource::Fd(number), .. }) => *number,
                _ => continue,
            };
            let taken = inherited::take(fd);
            let taken = taken.map_err(|source| StartError::Port {
                port: port.name.clone(),
                source: OpenError::Inherited { fd, source },
            })?;
            self.descriptors.push((by_number(fd), taken));
        }
        Ok(())
    }

    /// Sets the helper that ports ask for privileged operations.
    pub fn set_privileges(&mut self, privileges: Privileges) {
        self.privileges = privileges;
    }

    /// Returns the configuration of a process that was killed, which holds instead of the file. `None`: there is none.
    pub fn config(&mut self) -> Option<Config> {
        self.kept.config()
    }

    /// Returns what a process that was killed has left behind.
    pub(crate) fn kept(&mut self) -> &mut Kept {
        &mut self.kept
    }

    /// Closes what of that nobody has taken, and returns what the manager keeps.
    pub(crate) fn into_known(self) -> Known {
        self.kept.into_known()
    }

    /// Returns the means by which privileged operations are done.
    pub(crate) fn privileges(&self) -> &Privileges {
        &self.privileges
    }

    /// Takes the socket that was passed under a name.
    ///
    /// # Errors
    /// [`OpenError::NotActivated`].
    pub(super) fn socket(&mut self, name: &str) -> Result<OwnedFd, OpenError> {
        let at = self.descriptors.iter().position(|(have, _)| have == name);
        Ok(self.descriptors.swap_remove(at.ok_or_else(|| OpenError::NotActivated(name.to_owned()))?).1)
    }

    /// Takes the descriptor that was inherited as a number.
    pub(super) fn number(&mut self, number: RawFd) -> Result<OwnedFd, OpenError> {
        self.socket(&by_number(number))
    }
}

/// Returns the name under which an inherited descriptor is kept; no `FileDescriptorName=` has a colon.
fn by_number(number: RawFd) -> String {
    format!("fd:{number}")
}
