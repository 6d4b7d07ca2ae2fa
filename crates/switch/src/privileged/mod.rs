//! Privilege separation: a helper process does the operations for which a running switch has given up the rights.
//!
//! `ringferry run` starts the helper (the same program) before it opens its ports, sends it the [`Charter`] made of the
//! configuration, and goes into its sandbox when the ports are open. From then on the switch can neither open, make or remove files, nor
//! connect sockets; [`Privileges`] asks the helper over a socketpair. The helper ([`serve`]) ends when the switch does, however that happens.
//!
//! ```text
//!   switch (hostile input, no rights) ── Request: Connect | Keep | Tidy ──► helper (no hostile input, rights of the start)
//!                                     ◄── Reply, one descriptor at most ──
//! ```
//!
//! The helper trusts the charter, which came before the first guest, and no request. Requests name a *port*, never a path: a switch that
//! has been taken over can have the sockets of the configuration connected, and rules of ports (no other key) changed in the
//! configuration file, which it may do through `ctl` in any case. One request is under way at a time.
//!
//! Without a sandbox there is no helper, and [`Privileges::default`] does everything itself.

mod helper;
mod wire;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use ringferry_sys::sandbox::Access;
use ringferry_sys::socket::Stream;

pub use helper::serve;
use wire::{Connection, Reply, Request};

use crate::config::{
    Config, Edit, KeepError, PortConfig, PortKind, SwitchConfig, VhostUserConfig, VhostUserEndpoint,
};
use crate::rules::Rules;

/// Time limit for the helper's answer, enough to write a file to a slow disk. After a timeout the helper is
/// used no more.
const PATIENCE: Duration = Duration::from_secs(30);

/// The operations that the helper may do, fixed by the configuration at the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Charter {
    /// The configuration file, and the names of the ports in it, whose rules may be changed.
    file: Option<(Bytes, Vec<String>)>,
    /// Sockets that ports connect to, by port.
    connect: BTreeMap<String, Bytes>,
    /// Sockets that the switch makes, and that are removed at its end.
    sockets: Vec<Bytes>,
}

/// A path, which need not be UTF-8.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Bytes(Vec<u8>);

impl From<&Path> for Bytes {
    fn from(path: &Path) -> Self {
        Bytes(path.as_os_str().as_bytes().to_owned())
    }
}

impl Bytes {
    fn path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }
}

impl Charter {
    /// Makes the charter of a configuration whose control socket is `control`.
    pub fn of(config: &Config, control: &Path) -> Charter {
        let file = config.file.as_ref().map(|file| (Bytes::from(file.path.as_path()), file.ports.clone()));
        let mut charter = Charter { file, sockets: vec![control.into()], ..Charter::default() };
        for port in &config.ports {
            let PortKind::VhostUser(VhostUserConfig { endpoint, .. }) = &port.kind else { continue };
            match endpoint {
                VhostUserEndpoint::Listen(path) => charter.sockets.push(path.as_path().into()),
                VhostUserEndpoint::Connect(path) => {
                    charter.connect.insert(port.name.clone(), path.as_path().into());
                }
                VhostUserEndpoint::Fd(_) | VhostUserEndpoint::Activation(_) => {}
            }
        }
        charter
    }

    /// Returns the directories in which the helper reads, makes and removes files.
    pub fn places(&self) -> Vec<(PathBuf, Access)> {
        let directory = |path: &Path| match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let mut places = Vec::new();
        if let Some((file, _)) = &self.file {
            // If the path is a link, the file that it leads to is replaced, not the link.
            let target = std::fs::canonicalize(file.path()).unwrap_or_else(|_| file.path().to_owned());
            places.push((directory(&target), Access::all()));
        }
        places.extend(self.sockets.iter().map(|socket| (directory(socket.path()), Access::REMOVE)));
        places
    }
}

/// The reason why a change of rules is not in the configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotKept {
    /// The file is as it was, for this reason.
    Because(String),
    /// The file would be refused at the next start.
    Refused(String),
}

impl From<KeepError> for NotKept {
    fn from(error: KeepError) -> Self {
        match error {
            KeepError::NotKept(why) => NotKept::Because(why),
            KeepError::Refused(error) => NotKept::Refused(error.to_string()),
        }
    }
}

/// Does privileged operations: in this process, or through the helper. Clones share the helper.
#[derive(Clone, Debug, Default)]
pub struct Privileges(Option<Rc<RefCell<Helper>>>);

/// The connection to the helper; none once it has failed.
#[derive(Debug)]
struct Helper(Option<Connection>);

impl Privileges {
    /// Gives the helper at the other end of `stream` its charter and waits until it is ready.
    ///
    /// # Errors
    /// The helper does not answer.
    pub fn helper(stream: Stream, charter: &Charter) -> io::Result<Privileges> {
        stream.set_timeout(Some(PATIENCE))?;
        let mut connection = Connection::new(stream);
        connection.send(charter, None)?;
        match connection.receive()? {
            Some((Reply::Done, _)) => Ok(Privileges(Some(Rc::new(RefCell::new(Helper(Some(connection))))))),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Returns true if there is a helper, which then also removes the files of sockets
    /// ([`Privileges::tidy`]).
    pub(crate) fn are_elsewhere(&self) -> bool {
        self.0.is_some()
    }

    /// Connects to the socket of a port with `mode=connect`.
    ///
    /// # Errors
    /// As [`Stream::connect`]; the helper has ended.
    pub(crate) fn connect(&self, port: &str, path: &Path) -> io::Result<Stream> {
        let Some(helper) = &self.0 else { return Stream::connect(path) };
        match helper.borrow_mut().ask(&Request::Connect { port: port.to_owned() })? {
            (Reply::Done, Some(fd)) => Stream::from_fd(fd),
            (Reply::Failed { code: Some(code), .. }, _) => Err(io::Error::from_raw_os_error(code)),
            (Reply::Failed { text, .. }, _) => Err(io::Error::other(text)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Changes the rules of a port in the configuration file, as [`keep`](crate::config::keep) does.
    ///
    /// # Errors
    /// The file is as it was.
    pub(crate) fn keep(
        &self,
        path: &Path,
        port: &PortConfig,
        edit: &Edit,
        rules: &Rules,
    ) -> Result<bool, NotKept> {
        let Some(helper) = &self.0 else {
            return Ok(crate::config::keep(path, &port.name, edit, rules)?);
        };
        let request =
            Request::Keep { port: written(port, rules), keys: edit.touched().map(str::to_owned).collect() };
        match helper.borrow_mut().ask(&request) {
            Ok((Reply::Kept { same }, _)) => Ok(same),
            Ok((Reply::Refused { text }, _)) => Err(NotKept::Refused(text)),
            Ok((Reply::Failed { text, .. }, _)) => Err(NotKept::Because(text)),
            Ok(_) => Err(NotKept::Because("the privileged helper answered something else".to_owned())),
            Err(error) => Err(NotKept::Because(error.to_string())),
        }
    }

    /// Removes the files of the switch's sockets, once they are closed. Failures leave a file behind that the next start replaces.
    pub fn tidy(&self) {
        if let Some(helper) = &self.0 {
            let _ = helper.borrow_mut().ask(&Request::Tidy);
        }
    }
}

impl Helper {
    fn ask(&mut self, request: &Request) -> io::Result<(Reply, Option<std::os::fd::OwnedFd>)> {
        let gone = || io::Error::other("the privileged helper has ended: restart the switch");
        let connection = self.0.as_mut().ok_or_else(gone)?;
        match connection.send(request, None).and_then(|()| connection.receive()) {
            Ok(Some(reply)) => Ok(reply),
            other => {
                let why = other.err().map_or_else(String::new, |error| format!(" ({error})"));
                tracing::error!(
                    "the privileged helper does not answer any more{why}: rules are not kept in the file and sockets are not connected to \
                     until ringferry is restarted"
                );
                self.0 = None;
                Err(gone())
            }
        }
    }
}

/// A port with these rules, as a configuration.
fn written(port: &PortConfig, rules: &Rules) -> String {
    // The worker may exist only in the configuration of the running switch.
    let port = PortConfig { rules: rules.clone(), worker: None, ..port.clone() };
    Config { control: None, switch: SwitchConfig::default(), ports: vec![port], file: None }.dump()
}

#[cfg(test)]
mod tests;
