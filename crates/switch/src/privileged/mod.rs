//! Privilege separation: a helper process does the operations for which a running switch has given up the rights.
//!
//! `ringferry run` starts the helper (the same program) before it opens its ports, sends it the [`Charter`] made of the
//! configuration, and goes into its sandbox when the ports are open. From then on the switch can neither open, make or remove files, nor
//! connect sockets; [`Privileges`] asks the helper over a socketpair. The helper ([`serve`]) ends when the switch does, however that happens.
//!
//! ```text
//!   switch (hostile input, no rights) ── Request: Connect | Open | Close | Keep | Read ... ──► helper (no hostile input, rights of the start)
//!                                     ◄── Reply, with descriptors ──
//! ```
//!
//! The helper trusts the charter, which came before the first guest, and the configuration file, and no request. Requests name a *port*,
//! never a path alone. A switch that has been taken over can have
//! - sockets connected to and ports opened that are in the configuration file;
//! - further ports opened: sockets that listen in directories in which the configuration has some, or in `socket_directories`; connections to
//!   sockets in the latter; taps that do not exist yet, without a bridge or addresses; interfaces of Xen guests, if the switch has Xen's devices (an interface of the
//!   host only if it is in the file);
//! - settings of ports that can change while they are open, but for those of interfaces, changed in the file, ports opened so added to it, and ports
//!   removed from it; and wires between ports of the file, which it may add, change and remove there.
//!
//! That is no more than what the switch does for whoever may connect to its control socket. One request is under way at a time.
//!
//! Without a sandbox there is no helper, and [`Privileges::default`] does everything itself.

mod helper;
mod wire;

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use ringferry_sys::sandbox::Access;
use ringferry_sys::socket::{Listener, Stream};

pub use helper::serve;
use wire::{Connection, MAX_REPLY, Reply, Request};

use crate::config::policies::{self, read_policy_file};
use crate::config::{
    Config, ConfigBuilder, ConfigFile, Edit, KeepError, Kept, MAX_WORKERS, PortConfig, PortKind,
    SwitchConfig, VhostUserEndpoint,
};
use crate::impairments::Wire;
use crate::ports::passed::Passed;
use crate::ports::tap::MACHINE;
use crate::ports::{self, OpenError};
use crate::switch::CONTROL_MODE;

/// Time limit for the helper's answer, enough to write a file to a slow disk. After a timeout the helper is
/// used no more.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the helper may do: at first as the configuration has it at the start, then with the ports that come and go.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Charter {
    /// The configuration file.
    file: Option<Bytes>,
    /// The directory of the policies of firewalls.
    #[serde(default)]
    policies: Option<Bytes>,
    /// The control socket, which is removed at the end of the switch.
    control: Option<Bytes>,
    /// Sockets on which ports listen, by port; the switch makes them, and they are removed at its end.
    listen: BTreeMap<String, Bytes>,
    /// Sockets that ports connect to, by port.
    connect: BTreeMap<String, Bytes>,
    /// Directories in which further ports may listen.
    listen_in: Vec<Bytes>,
    /// Directories in which further ports may listen, and to whose sockets they may connect.
    connect_in: Vec<Bytes>,
    /// The ports of the start, each as a configuration: they may be opened again.
    start: Vec<String>,
    /// True if a port was for Xen guests at the start, so that the sandbox has Xen's devices.
    has_xen: bool,
    /// True if a port was for an interface of the host at the start, so that the helper has the rights to open one.
    #[serde(default)]
    has_xdp: bool,
    /// The helper has no files but those of the charter.
    #[serde(skip)]
    is_confined: bool,
    /// The same ports, once they have been asked for.
    #[serde(skip)]
    start_ports: OnceCell<Vec<PortConfig>>,
    /// Ports that the helper has opened and not closed since, by name.
    #[serde(skip)]
    opened: BTreeMap<String, PortConfig>,
    /// Ports that the helper has closed, by name: they may be opened again, as when what replaces them cannot be opened.
    #[serde(skip)]
    closed: BTreeMap<String, PortConfig>,
    /// Ports whose interfaces the helper has set up, as it did so last, by name.
    #[serde(skip)]
    set_up: BTreeMap<String, PortConfig>,
    /// The ports of the configuration file as it was last read for the switch.
    #[serde(skip)]
    last_read: Vec<PortConfig>,
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
        let mut charter = Charter {
            file: config.file.as_ref().map(|file| Bytes::from(file.path.as_path())),
            policies: config.policy_directory().as_deref().map(Bytes::from),
            control: Some(control.into()),
            connect_in: config.socket_directories.iter().map(|path| path.as_path().into()).collect(),
            ..Charter::default()
        };
        for port in &config.ports {
            match &port.kind {
                PortKind::VhostUser(vhost) => charter.add_socket(&port.name, &vhost.endpoint),
                PortKind::XenVif(_) => charter.has_xen = true,
                PortKind::Xdp(_) => charter.has_xdp = true,
                PortKind::Tap(_) => {}
            }
            charter.start.push(written(port));
        }
        let sockets = charter.listen.values().chain(&charter.control);
        charter.listen_in = sockets.map(|socket| directory(socket.path()).as_path().into()).collect();
        charter
    }

    /// Adds the socket of a port.
    fn add_socket(&mut self, port: &str, endpoint: &VhostUserEndpoint) {
        let (sockets, path) = match endpoint {
            VhostUserEndpoint::Listen(path) => (&mut self.listen, path),
            VhostUserEndpoint::Connect(path) => (&mut self.connect, path),
            VhostUserEndpoint::Fd(_) | VhostUserEndpoint::Activation(_) => return,
        };
        sockets.insert(port.to_owned(), path.as_path().into());
    }

    /// Returns true if the helper may have to open an interface of the host again.
    pub fn opens_interfaces(&self) -> bool {
        self.has_xdp
    }

    /// Returns the directories in which the helper reads, makes and removes files, and the device of taps.
    pub fn places(&self) -> Vec<(PathBuf, Access)> {
        let mut places = vec![
            (PathBuf::from("/dev/net/tun"), Access::READ | Access::WRITE),
            (PathBuf::from(MACHINE), Access::READ),
        ];
        if let Some(file) = &self.file {
            places.push((directory(file.path()), Access::all()));
            // If the path is a link, the file that it leads to is replaced, not the link.
            let target = std::fs::canonicalize(file.path()).unwrap_or_else(|_| file.path().to_owned());
            places.push((directory(&target), Access::all()));
        }
        places.extend(self.policies.iter().map(|place| (place.path().to_owned(), Access::READ)));
        let sockets = self.listen_in.iter().chain(&self.connect_in);
        places.extend(sockets.map(|place| (place.path().to_owned(), Access::SOCKETS | Access::REMOVE)));
        places
    }
}

/// Returns the directory of a file.
fn directory(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// The reason why a change is not in the configuration file.
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

/// The helper's end in the switch.
#[derive(Debug)]
struct Helper {
    /// The connection; none once it has failed.
    connection: Option<Connection>,
    /// True while a request is under way whose reply is awaited between other work.
    is_busy: bool,
    /// True if a reply is to come for which nobody waits any more.
    is_owed: bool,
}

/// What the control plane does while a reply is awaited: it serves the ports, so that no front end waits for a file system. It is called again and
/// again, and may sleep for a moment.
pub(crate) type Meanwhile<'m> = &'m mut dyn FnMut();

impl Privileges {
    /// Gives the helper at the other end of `stream` its charter and waits until it is ready.
    ///
    /// # Errors
    /// The helper does not answer.
    pub fn helper(stream: Stream, charter: &Charter) -> io::Result<Privileges> {
        stream.set_timeout(Some(PATIENCE))?;
        let mut connection = Connection::new(stream);
        connection.send(charter, &[])?;
        match connection.receive(MAX_REPLY)? {
            Some((Reply::Done, _)) => {
                let helper = Helper { connection: Some(connection), is_busy: false, is_owed: false };
                Ok(Privileges(Some(Rc::new(RefCell::new(helper)))))
            }
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Returns true if there is a helper, which then also removes the files of sockets
    /// ([`Privileges::tidy`]).
    pub(crate) fn are_elsewhere(&self) -> bool {
        self.0.is_some()
    }

    /// Finds out whether the helper is there. Called about once a second: else its end would be noticed only by whoever needs it next.
    pub(crate) fn look(&self) {
        let Some(helper) = &self.0 else { return };
        let Ok(mut helper) = helper.try_borrow_mut() else { return };
        // It says nothing that it was not asked for, so what there is to read is its end.
        let is_silent =
            helper.connection.as_ref().is_none_or(|connection| !connection.is_readable(Duration::ZERO));
        if !is_silent && !helper.is_busy && !helper.is_owed {
            let ended: io::Result<()> = Err(io::ErrorKind::UnexpectedEof.into());
            let _ = helper.or_end(ended);
        }
    }

    /// Returns what cannot be done any more, for people, if the helper has ended.
    pub(crate) fn trouble(&self) -> Option<String> {
        let helper = self.0.as_ref()?.borrow();
        helper.connection.is_none().then(|| gone().to_string())
    }

    /// Connects to the socket of a port with `mode=connect`. A symbolic link in its place is not followed: a front end that can write to the
    /// directory could otherwise lead the switch to any socket of the host.
    ///
    /// # Errors
    /// As [`Stream::connect_nofollow`]; the helper has ended.
    pub(crate) fn connect(&self, port: &str, path: &Path) -> io::Result<Stream> {
        let Some(helper) = &self.0 else { return Stream::connect_nofollow(path) };
        match helper.borrow_mut().ask(&Request::Connect { port: port.to_owned() })? {
            (Reply::Done, mut fds) if !fds.is_empty() => Stream::from_fd(fds.swap_remove(0)),
            (Reply::Failed { code: Some(code), .. }, _) => Err(io::Error::from_raw_os_error(code)),
            (Reply::Failed { text, .. }, _) => Err(io::Error::other(text)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Opens what a port needs that is added to a running switch with `workers` workers.
    ///
    /// # Errors
    /// [`OpenError::Helper`] with the helper's reason. Without a helper everything is left to [`ports::open`].
    pub(crate) fn open(
        &self,
        port: &PortConfig,
        workers: usize,
        meanwhile: Meanwhile<'_>,
    ) -> Result<Passed, OpenError> {
        let Some(helper) = &self.0 else { return Ok(Passed::default()) };
        let request = Request::Open { port: written(port), workers };
        match ask_well(helper, &request, meanwhile).map_err(OpenError::Helper)? {
            (Reply::Done, fds) => Ok(Passed::opened(fds, self.clone())),
            _ => Err(OpenError::Helper(MISUNDERSTOOD.to_owned())),
        }
    }

    /// Sets up the interface of a tap again: when its bridge has come back, or with other settings than `before`, which are undone.
    ///
    /// # Errors
    /// No permission, or a setting that the interface cannot have.
    pub(crate) fn set_up(&self, port: &PortConfig, before: Option<&PortConfig>) -> Result<(), OpenError> {
        let Some(helper) = &self.0 else { return ports::set_up(port, before) };
        let request = Request::SetUp { port: written(port), before: before.map(written) };
        match well(helper.borrow_mut().ask(&request)).map_err(OpenError::Helper)? {
            (Reply::Done, _) => Ok(()),
            _ => Err(OpenError::Helper(MISUNDERSTOOD.to_owned())),
        }
    }

    /// Returns what of the settings of a tap's interface somebody has undone, for people; nothing if nobody can tell at once.
    pub(crate) fn astray(&self, port: &PortConfig) -> Vec<String> {
        let Some(helper) = &self.0 else { return ports::astray(port) };
        // Whatever the helper would say of another port.
        if !ports::has_interface(port) {
            return Vec::new();
        }
        match helper.borrow_mut().ask_briefly(&Request::Astray { port: written(port) }) {
            Some(Reply::Astray { settings }) => settings,
            _ => Vec::new(),
        }
    }

    /// Makes the control socket at `path` anew, whose file was removed.
    ///
    /// # Errors
    /// It cannot be made, for people.
    pub(crate) fn control_socket(&self, path: &Path) -> Result<Listener, String> {
        let Some(helper) = &self.0 else {
            return Listener::bind_with_mode(path, CONTROL_MODE).map_err(|error| error.to_string());
        };
        match well(helper.borrow_mut().ask(&Request::Listen))? {
            (Reply::Done, mut fds) if !fds.is_empty() => {
                let mut listener =
                    Listener::from_fd_at(fds.swap_remove(0), path).map_err(|error| error.to_string())?;
                listener.leave_file();
                Ok(listener)
            }
            _ => Err(MISUNDERSTOOD.to_owned()),
        }
    }

    /// Says why a port that the configuration file has cannot be opened, as far as that is known before it is tried.
    ///
    /// # Errors
    /// It cannot be, for people.
    pub(crate) fn can_open(&self, port: &PortConfig, meanwhile: Meanwhile<'_>) -> Result<(), String> {
        let Some(helper) = &self.0 else { return Ok(()) };
        ask_well(helper, &Request::CanOpen { port: written(port) }, meanwhile).map(drop)
    }

    /// Has the file of a removed port's socket removed.
    ///
    /// # Errors
    /// There is nobody any more to do so, for people.
    pub(crate) fn close(&self, port: &str, meanwhile: Meanwhile<'_>) -> Result<(), String> {
        let Some(helper) = &self.0 else { return Ok(()) };
        ask_well(helper, &Request::Close { port: port.to_owned() }, meanwhile).map(drop)
    }

    /// Adds a port to the configuration file at `path`.
    ///
    /// # Errors
    /// The file is as it was.
    pub(crate) fn keep_port(
        &self,
        path: &Path,
        port: &PortConfig,
        meanwhile: Meanwhile<'_>,
    ) -> Result<(), NotKept> {
        let Some(helper) = &self.0 else { return Ok(crate::config::keep_port(path, port)?) };
        edit(helper, &Request::KeepPort { port: written(port) }, meanwhile).map(drop)
    }

    /// Removes a port from the configuration file at `path` or one of its drop-in files, and returns the file that had it.
    ///
    /// # Errors
    /// The file is as it was.
    pub(crate) fn forget_port(
        &self,
        path: &Path,
        port: &str,
        meanwhile: Meanwhile<'_>,
    ) -> Result<PathBuf, NotKept> {
        let Some(helper) = &self.0 else { return Ok(crate::config::forget_port(path, port)?) };
        kept_in(edit(helper, &Request::ForgetPort { port: port.to_owned() }, meanwhile)?)
    }

    /// Changes a wire in the configuration file at `path` or one of its drop-in files, or adds it; returns the file.
    ///
    /// # Errors
    /// The file is as it was.
    pub(crate) fn keep_wire(
        &self,
        path: &Path,
        wire: &Wire,
        meanwhile: Meanwhile<'_>,
    ) -> Result<PathBuf, NotKept> {
        let Some(helper) = &self.0 else { return Ok(crate::config::keep_wire(path, wire)?) };
        kept_in(edit(helper, &Request::KeepWire { wire: wire.to_text() }, meanwhile)?)
    }

    /// Removes a wire from the configuration file at `path` or one of its drop-in files, and returns the file that had it.
    ///
    /// # Errors
    /// The file is as it was.
    pub(crate) fn forget_wire(
        &self,
        path: &Path,
        wire: &str,
        meanwhile: Meanwhile<'_>,
    ) -> Result<PathBuf, NotKept> {
        let Some(helper) = &self.0 else { return Ok(crate::config::forget_wire(path, wire)?) };
        kept_in(edit(helper, &Request::ForgetWire { wire: wire.to_owned() }, meanwhile)?)
    }

    /// Reads the configuration file at `path`.
    ///
    /// # Errors
    /// All that is wrong with the file, for people.
    pub(crate) fn read(&self, path: &Path, meanwhile: Meanwhile<'_>) -> Result<Config, String> {
        let parse = |builder: ConfigBuilder| builder.build().map_err(|error| error.to_string());
        let Some(helper) = &self.0 else {
            return parse(Config::builder().part_of_a_configuration().regular_file(path))
                .and_then(Config::with_names);
        };
        match ask_well(helper, &Request::Read, meanwhile)? {
            (Reply::Config { text, drop_ins, blank }, _) => {
                let name = path.display().to_string();
                let config = parse(Config::builder().part_of_a_configuration().toml(&name, &text))?;
                Ok(Config { file: Some(ConfigFile::of(path, &config, drop_ins, blank)), ..config })
            }
            _ => Err(MISUNDERSTOOD.to_owned()),
        }
    }

    /// Reads the policies that ports name, from the directory of policies `directory`.
    ///
    /// # Errors
    /// All that is wrong with them, for people; the ports are as they were.
    pub(crate) fn load_policies(
        &self,
        ports: &mut [PortConfig],
        directory: &Path,
        meanwhile: Meanwhile<'_>,
    ) -> Result<(), String> {
        let mut open = |file: &str| match &self.0 {
            None => read_policy_file(directory, file),
            Some(helper) => match ask(helper, &Request::PolicyFile { file: file.to_owned() }, meanwhile)? {
                (Reply::Text { text }, _) => Ok(text),
                (Reply::Failed { text, .. } | Reply::Refused { text }, _) => Err(io::Error::other(text)),
                _ => Err(io::Error::other(MISUNDERSTOOD)),
            },
        };
        policies::load(ports, &mut open).map_err(|error| error.in_directory(directory).to_string())
    }

    /// Changes the settings of a port in the configuration file, as [`keep`](crate::config::keep) does.
    ///
    /// # Errors
    /// The file is as it was.
    pub(crate) fn keep(
        &self,
        path: &Path,
        change: &Edit,
        port: &PortConfig,
        meanwhile: Meanwhile<'_>,
    ) -> Result<Kept, NotKept> {
        let Some(helper) = &self.0 else {
            return Ok(crate::config::keep(path, change, port)?);
        };
        let set = change.keys_set().map(str::to_owned).collect();
        let unset = change.keys_removed().map(str::to_owned).collect();
        match edit(helper, &Request::Keep { port: written(port), set, unset }, meanwhile)? {
            Reply::Kept { file, same } => Ok(Kept { path: file.into(), same }),
            _ => Err(NotKept::Because(MISUNDERSTOOD.to_owned())),
        }
    }

    /// Removes the files of the switch's sockets, once they are closed. Failures leave a file behind that the next start replaces.
    pub fn tidy(&self) {
        if let Some(helper) = &self.0 {
            let _ = helper.borrow_mut().ask(&Request::Tidy);
        }
    }
}

/// Asks for what may be refused: the reason, for people, is the error.
fn ask_well(
    helper: &RefCell<Helper>,
    request: &Request,
    meanwhile: Meanwhile<'_>,
) -> Result<(Reply, Vec<OwnedFd>), String> {
    well(ask(helper, request, meanwhile))
}

/// Turns a refusal into an error.
fn well(reply: io::Result<(Reply, Vec<OwnedFd>)>) -> Result<(Reply, Vec<OwnedFd>), String> {
    match reply {
        Ok((Reply::Refused { text } | Reply::Failed { text, .. }, _)) => Err(text),
        reply => reply.map_err(|error| error.to_string()),
    }
}

/// Returns the file that was edited.
fn kept_in(reply: Reply) -> Result<PathBuf, NotKept> {
    match reply {
        Reply::Kept { file, .. } => Ok(file.into()),
        _ => Err(NotKept::Because(MISUNDERSTOOD.to_owned())),
    }
}

/// Has the configuration file edited.
fn edit(helper: &RefCell<Helper>, request: &Request, meanwhile: Meanwhile<'_>) -> Result<Reply, NotKept> {
    match ask(helper, request, meanwhile) {
        Ok((Reply::Refused { text }, _)) => Err(NotKept::Refused(text)),
        Ok((Reply::Failed { text, .. }, _)) => Err(NotKept::Because(text)),
        Ok((reply, _)) => Ok(reply),
        Err(error) => Err(NotKept::Because(error.to_string())),
    }
}

/// Asks the helper, which may hang in a file system for long, and does other work until it answers. What asks it `meanwhile` finds it busy.
fn ask(
    helper: &RefCell<Helper>,
    request: &Request,
    meanwhile: Meanwhile<'_>,
) -> io::Result<(Reply, Vec<OwnedFd>)> {
    let deadline = Instant::now() + PATIENCE;
    helper.borrow_mut().is_busy = true;
    let mut wait = || {
        while !helper.borrow().has_reply() {
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            meanwhile();
        }
        helper.borrow_mut().receive()
    };
    let owed = if helper.borrow().is_owed { wait().map(drop) } else { Ok(()) };
    let sent = owed.and_then(|()| helper.borrow_mut().send(request));
    let received = sent.and_then(|()| wait());
    let mut helper = helper.borrow_mut();
    helper.is_busy = false;
    helper.or_end(received)
}

impl Helper {
    /// Asks the helper for what it does at once, and waits for the reply.
    fn ask(&mut self, request: &Request) -> io::Result<(Reply, Vec<OwnedFd>)> {
        if self.is_busy {
            let text = "the privileged helper is busy with another request";
            return Err(io::Error::new(io::ErrorKind::WouldBlock, text));
        }
        let owed = if self.is_owed { self.receive().map(drop) } else { Ok(()) };
        let received = owed.and_then(|()| self.send(request)).and_then(|()| self.receive());
        self.or_end(received)
    }

    /// Asks the helper for what it answers at once; `None` if it does not. A question is no reason to wait for it, nor to give it up.
    fn ask_briefly(&mut self, request: &Request) -> Option<Reply> {
        if self.is_busy || self.is_owed && !(self.has_reply() && self.receive().is_ok()) {
            return None;
        }
        self.send(request).ok()?;
        if !self.connection.as_ref()?.is_readable(BRIEFLY) {
            self.is_owed = true;
            return None;
        }
        self.receive().ok().map(|(reply, _)| reply)
    }

    fn send(&mut self, request: &Request) -> io::Result<()> {
        self.connection.as_mut().ok_or_else(gone)?.send(request, &[])
    }

    fn receive(&mut self) -> io::Result<(Reply, Vec<OwnedFd>)> {
        let connection = self.connection.as_mut().ok_or_else(gone)?;
        self.is_owed = false;
        connection.receive(MAX_REPLY)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Returns true if a reply, or the end of the connection, has arrived, after a moment in which it may.
    fn has_reply(&self) -> bool {
        self.connection.as_ref().is_none_or(|connection| connection.is_readable(MOMENT))
    }

    /// Gives up a helper that has failed. What comes later would answer another request.
    fn or_end<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| {
            if self.connection.take().is_some() {
                tracing::error!(
                    "the privileged helper does not answer any more ({error}): until ringferry is replaced (`ringferry run --replace`) or restarted nothing is kept in the file, no \
                     socket is connected to and no port is added"
                );
            }
            gone()
        })
    }
}

/// Time for which the reply to a question is waited for; the ports are not served meanwhile. It takes a fraction of a millisecond.
const BRIEFLY: Duration = Duration::from_millis(100);

/// Time for which a reply is waited for between two looks at other work.
const MOMENT: Duration = Duration::from_micros(200);

/// How the helper's refusal begins to attach to an interface that it does not know.
pub(crate) fn tap_exists(name: &str) -> String {
    format!("the interface {name} exists")
}

fn gone() -> io::Error {
    io::Error::other(
        "the privileged helper has ended: have `ringferry run --replace` take over, which starts another, or restart the switch",
    )
}

/// A port as a configuration.
fn written(port: &PortConfig) -> String {
    // As many workers as there may be, so that the port may name any.
    let switch = SwitchConfig { workers: Some(MAX_WORKERS), ..SwitchConfig::default() };
    Config {
        control: None,
        socket_directories: Vec::new(),
        policies: None,
        switch,
        ports: vec![port.clone()],
        wires: Vec::new(),
        file: None,
    }
    .dump()
}

/// What is said of an answer that belongs to another request.
const MISUNDERSTOOD: &str = "the privileged helper answered something else";

#[cfg(test)]
mod tests;
