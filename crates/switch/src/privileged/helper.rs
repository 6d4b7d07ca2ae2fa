//! The helper: a process that serves one switch within its [`Charter`], until that switch ends.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use ringferry_sys::netif;
use ringferry_sys::socket::{Listener, Stream, remove_if_stale};

use super::wire::{Connection, MAX_REPLY, MAX_REQUEST, Reply, Request};
use super::{Bytes, Charter, directory};
use crate::config::policies::read_policy_file;
use crate::config::{
    Config, Edit, KeepError, Kept, MAX_WORKERS, PortConfig, PortKind, TapConfig, TapSource, VhostUserConfig,
    VhostUserEndpoint, XenProvider, XenVifConfig, forget_port, forget_wire, keep, keep_port, keep_wire,
};
use crate::impairments::Wire;
use crate::ports;
use crate::switch::CONTROL_MODE;

/// Reads a charter from `stream`, gives up with `confine` all rights that it does not need, which returns true if it has no other files now, and answers
/// requests until the other end is closed.
///
/// # Errors
/// The stream breaks, or carries bytes that are no message.
pub fn serve(stream: Stream, confine: impl FnOnce(&Charter) -> bool) -> io::Result<()> {
    let mut connection = Connection::new(stream);
    let Some((mut charter, _)) = connection.receive::<Charter>(MAX_REPLY)? else { return Ok(()) };
    charter.is_confined = confine(&charter);
    connection.send(&Reply::Done, &[])?;
    while let Some((request, _)) = connection.receive::<Request>(MAX_REQUEST)? {
        let (reply, fds) = charter.answer(request);
        match connection.send(&reply, &fds) {
            // The other end of a socket that was connected to can bring that about, or other processes of the same user.
            Err(error) if error.kind() == io::ErrorKind::QuotaExceeded => {
                connection.send(&Reply::from(error), &[])?;
            }
            sent => sent?,
        }
    }
    Ok(())
}

impl Charter {
    /// Carries out a request. The switch may have been taken over, so the charter and the configuration file alone decide.
    pub(super) fn answer(&mut self, request: Request) -> (Reply, Vec<OwnedFd>) {
        let result = match request {
            Request::Connect { port } => {
                self.connected(&port).map(|fd| (Reply::Done, vec![fd])).map_err(Reply::from)
            }
            Request::Open { port, workers } => self.open(&port, workers).map(|fds| (Reply::Done, fds)),
            Request::CanOpen { port } => self.can_open(&port).map(|()| (Reply::Done, Vec::new())),
            Request::SetUp { port, before } => {
                self.set_up(&port, before.as_deref()).map(|()| (Reply::Done, Vec::new()))
            }
            Request::Astray { port } => self.astray(&port).map(|reply| (reply, Vec::new())),
            Request::Close { port } => {
                self.close(&port);
                Ok((Reply::Done, Vec::new()))
            }
            Request::Keep { port, set, unset } => {
                self.keep(&port, &set, &unset).map(|reply| (reply, Vec::new()))
            }
            Request::KeepPort { port } => self.keep_port(&port).map(|()| (Reply::Done, Vec::new())),
            Request::ForgetPort { port } => self.forget_port(&port).map(|reply| (reply, Vec::new())),
            Request::KeepWire { wire } => self.keep_wire(&wire).map(|reply| (reply, Vec::new())),
            Request::ForgetWire { wire } => self.forget_wire(&wire).map(|reply| (reply, Vec::new())),
            Request::Read => self.read().map(|reply| (reply, Vec::new())),
            Request::PolicyFile { file } => self.policy_file(&file).map(|reply| (reply, Vec::new())),
            Request::Listen => self.listen().map(|fd| (Reply::Done, vec![fd])),
            Request::Tidy => {
                self.tidy();
                Ok((Reply::Done, Vec::new()))
            }
        };
        result.unwrap_or_else(|refusal| (refusal, Vec::new()))
    }

    fn connected(&self, port: &str) -> io::Result<OwnedFd> {
        let none = || io::Error::new(io::ErrorKind::PermissionDenied, "the port connects to no socket");
        Stream::connect_nofollow(self.connect.get(port).ok_or_else(none)?.path()).map(OwnedFd::from)
    }

    /// Makes the control socket anew. Where anybody listens, it stays.
    fn listen(&self) -> Result<OwnedFd, Reply> {
        let control = self.control.as_ref().ok_or_else(|| failed("there is no control socket"))?;
        let listener = Listener::bind_with_mode(control.path(), CONTROL_MODE);
        listener.map(Listener::into_fd).map_err(|error| failed(&error.to_string()))
    }

    /// Opens what a port needs, if the configuration file has it or the charter admits it.
    fn open(&mut self, port: &str, workers: usize) -> Result<Vec<OwnedFd>, Reply> {
        let port = one_port(port)?;
        if self.listen.contains_key(&port.name) || self.connect.contains_key(&port.name) {
            return Err(failed("a port of this name is open already"));
        }
        self.may_open(&port)?;
        if !self.knows(&port) {
            self.admit(&port)?;
        }
        if self.opened.len() >= MAX_OPENED {
            return Err(failed("the helper has opened as many ports as it may; restart the switch"));
        }
        let fds =
            ports::acquire(&port, workers.min(MAX_WORKERS.into())).map_err(|error| match &port.kind {
                PortKind::VhostUser(VhostUserConfig {
                    endpoint: VhostUserEndpoint::Listen(path), ..
                }) if !within(path, &self.listen_in) && !within(path, &self.connect_in) => {
                    failed(&format!("{error}; {}", kept_out(path)))
                }
                _ => failed(&error.to_string()),
            })?;
        if let PortKind::VhostUser(vhost) = &port.kind {
            self.add_socket(&port.name, &vhost.endpoint);
        }
        self.opened.insert(port.name.clone(), port);
        Ok(fds)
    }

    /// Says why an interface of the host cannot be opened, also if the file has it.
    fn may_open(&self, port: &PortConfig) -> Result<(), Reply> {
        if matches!(port.kind, PortKind::Xdp(_)) && self.is_confined && !self.has_xdp {
            return Err(failed(
                "the sandbox has the rights for interfaces of the host only if there was such a port at the start: stop the switch and start it anew with the port in its \
                 configuration file",
            ));
        }
        Ok(())
    }

    /// Says why a port cannot be opened, also if the file has it.
    fn can_open(&self, port: &str) -> Result<(), Reply> {
        let port = one_port(port)?;
        self.may_open(&port)?;
        match &port.kind {
            PortKind::VhostUser(VhostUserConfig { endpoint: VhostUserEndpoint::Listen(path), .. })
                if self.is_confined && !within(path, &self.listen_in) && !within(path, &self.connect_in) =>
            {
                Err(failed(&kept_out(path)))
            }
            _ => Ok(()),
        }
    }

    fn set_up(&mut self, port: &str, before: Option<&str>) -> Result<(), Reply> {
        let (port, before) = (one_port(port)?, before.map(one_port).transpose()?);
        if !self.knows(&port) || before.as_ref().is_some_and(|before| !self.knows(before)) {
            return Err(self.not_as_in_file());
        }
        ports::set_up(&port, before.as_ref()).map_err(|error| failed(&error.to_string()))?;
        // What is set up can be undone, whatever the file says by then.
        self.set_up.insert(port.name.clone(), port);
        Ok(())
    }

    /// Says what of the settings of an interface somebody has undone.
    fn astray(&self, port: &str) -> Result<Reply, Reply> {
        let port = one_port(port)?;
        if !self.knows(&port) {
            return Err(self.not_as_in_file());
        }
        Ok(Reply::Astray { settings: ports::astray(&port) })
    }

    /// Returns true if this very port, whatever of it can change while it is open but for the settings of an interface, was there at the start, was
    /// opened by the helper before, or is in the configuration file, as it was last read or as it is now.
    fn knows(&self, port: &PortConfig) -> bool {
        let same = |there: &PortConfig| is_as_trusted(there, port);
        let opened = self.opened.values().chain(self.closed.values());
        let mut before = opened.chain(self.set_up.values()).chain(&self.last_read);
        let in_file = || self.file().and_then(read);
        let start = || self.start.iter().filter_map(|text| one_port(text).ok()).collect();
        self.start_ports.get_or_init(start).iter().any(same)
            || before.any(same)
            || in_file().is_ok_and(|config| config.ports.iter().any(same))
    }

    /// Decides whether a port that is not in the configuration file may be opened, because the switch asks for it.
    fn admit(&self, port: &PortConfig) -> Result<(), Reply> {
        match &port.kind {
            PortKind::VhostUser(vhost) => match &vhost.endpoint {
                VhostUserEndpoint::Listen(path) | VhostUserEndpoint::Connect(path)
                    if within(path, &self.connect_in) =>
                {
                    Ok(())
                }
                VhostUserEndpoint::Listen(path) if within(path, &self.listen_in) => Ok(()),
                VhostUserEndpoint::Listen(path) => Err(failed(&kept_out(path))),
                VhostUserEndpoint::Connect(path) => Err(failed(&format!(
                    "the sandbox lets added ports connect only to sockets in the socket_directories of the configuration file, of which {} is \
                     none: {}",
                    directory(path).display(),
                    self.write_into_file("the port")
                ))),
                VhostUserEndpoint::Fd(_) | VhostUserEndpoint::Activation(_) => Ok(()),
            },
            PortKind::Tap(TapConfig { link, .. })
                if link.bridge.is_some() || !link.addresses.is_empty() || link.mac.is_some() =>
            {
                Err(self.not_as_in_file())
            }
            PortKind::Tap(TapConfig { source: TapSource::Name { name, .. }, .. }) => {
                // A tap that exists may be another program's: with several queues it could be attached to beside that.
                match netif::index(name) {
                    Ok(None) => Ok(()),
                    _ => Err(failed(&format!(
                        "{}, and the sandbox lets the switch attach only to those in its configuration file: {}",
                        super::tap_exists(name),
                        self.write_into_file("the port")
                    ))),
                }
            }
            // If it were kept in the file, the next start would connect to whatever sockets it names, with all rights.
            PortKind::XenVif(XenVifConfig { provider: XenProvider::Process { .. }, .. }) => Err(failed(
                "the sandbox keeps the switch from the sockets of a broker: write the port into the configuration file and restart the switch",
            )),
            // The host would not get its packets any more.
            PortKind::Xdp(_) => Err(failed(&format!(
                "the sandbox lets the switch take only those interfaces that are in its configuration file: {}",
                self.write_into_file("the port")
            ))),
            PortKind::XenVif(_) if !self.has_xen => Err(failed(
                "the sandbox has Xen's devices only if there was a port for Xen guests at the start: write the port into the configuration file and \
                 restart the switch",
            )),
            PortKind::Tap(_) | PortKind::XenVif(_) => Ok(()),
        }
    }

    /// Forgets a port, and removes the file of its socket.
    fn close(&mut self, port: &str) {
        self.closed.extend(self.opened.remove_entry(port));
        self.set_up.remove(port);
        self.connect.remove(port);
        if let Some(socket) = self.listen.remove(port) {
            let _ = remove_if_stale(socket.path());
        }
    }

    fn tidy(&self) {
        for socket in self.listen.values().chain(&self.control) {
            let _ = remove_if_stale(socket.path());
        }
    }

    /// The refusal of settings of an interface that are not in the configuration file.
    fn not_as_in_file(&self) -> Reply {
        failed(&format!(
            "the sandbox lets the switch set up interfaces only as its configuration file has them: {}",
            self.write_into_file("bridge, address, mac and up of the port")
        ))
    }

    /// What to do if only the configuration file may say something.
    fn write_into_file(&self, what: &str) -> String {
        if self.file.is_some() {
            format!("write {what} into the file and use `ringferry ctl reload`")
        } else {
            format!(
                "this switch was started without one; `ringferry ctl dump` writes one, to which you add {what}, and from which you start it anew"
            )
        }
    }

    fn file(&self) -> Result<&Path, Reply> {
        self.file.as_ref().map(Bytes::path).ok_or_else(|| failed("there is no configuration file"))
    }

    fn keep(&self, port: &str, set: &[String], unset: &[String]) -> Result<Reply, Reply> {
        let port = one_port(port)?;
        let edit = Edit::of_keys(set, unset);
        let edit = edit.ok_or_else(|| failed("that is no setting that can change while a port is open"))?;
        let is_of_interface =
            matches!(port.kind, PortKind::Tap(_)) && set.iter().chain(unset).any(|key| is_of_interface(key));
        if is_of_interface && !self.knows(&port) {
            return Err(self.not_as_in_file());
        }
        let Kept { path, same } = keep(self.file()?, &edit, &port)?;
        Ok(Reply::Kept { file: path.to_string_lossy().into_owned(), same })
    }

    /// Writes a port into the configuration file. The next start opens it, so it must be one that was admitted.
    fn keep_port(&self, port: &str) -> Result<(), Reply> {
        let port = one_port(port)?;
        match self.opened.get(&port.name) {
            Some(opened) if is_as_trusted(opened, &port) => Ok(keep_port(self.file()?, &port)?),
            _ => Err(failed("that port was not opened while the switch ran")),
        }
    }

    fn forget_port(&self, port: &str) -> Result<Reply, Reply> {
        let path = forget_port(self.file()?, port)?;
        Ok(Reply::Kept { file: path.to_string_lossy().into_owned(), same: true })
    }

    fn policy_file(&self, file: &str) -> Result<Reply, Reply> {
        let directory = self.policies.as_ref().ok_or_else(|| failed("there is no directory of policies"))?;
        // Nothing else is read for the switch, whatever it asks for.
        Ok(Reply::Text { text: read_policy_file(directory.path(), file)? })
    }

    /// Writes a wire into the configuration file. It says nothing that the switch could not do by itself, between ports that the file has.
    fn keep_wire(&self, wire: &str) -> Result<Reply, Reply> {
        let wire = Wire::of_text(wire).map_err(|text| Reply::Refused { text })?;
        let path = keep_wire(self.file()?, &wire)?;
        Ok(Reply::Kept { file: path.to_string_lossy().into_owned(), same: true })
    }

    fn forget_wire(&self, wire: &str) -> Result<Reply, Reply> {
        let path = forget_wire(self.file()?, wire)?;
        Ok(Reply::Kept { file: path.to_string_lossy().into_owned(), same: true })
    }

    fn read(&mut self) -> Result<Reply, Reply> {
        let config = read(self.file()?)?.with_names().map_err(|text| Reply::Refused { text })?;
        let text = config.dump();
        let (drop_ins, blank) = config.file.map(|file| (file.drop_ins, file.blank)).unwrap_or_default();
        // A reload asks for each of its ports.
        self.last_read = config.ports;
        Ok(Reply::Config { text, drop_ins, blank })
    }
}

/// Upper bound on the ports that are open at a time through the helper, so that a switch that was taken over cannot make sockets and taps
/// without end. A switch has descriptors for some thousand ports.
const MAX_OPENED: usize = 4096;

/// Returns true if a key of a tap is about its interface.
fn is_of_interface(key: &str) -> bool {
    ["mac", "bridge", "address", "up"].contains(&key)
}

/// Returns true if a port may be had because this one may: it differs in nothing for which it would have to be opened anew, nor in its
/// interface. The MTU of a tap is not a matter of trust, as a guest behind the switch cannot reach further with it.
fn is_as_trusted(trusted: &PortConfig, port: &PortConfig) -> bool {
    let is_tap = matches!(port.kind, PortKind::Tap(_));
    trusted.can_become(port) && !(is_tap && trusted.differing(port).into_iter().any(is_of_interface))
}

fn within(path: &Path, directories: &[Bytes]) -> bool {
    directories.iter().any(|allowed| allowed.path() == directory(path))
}

/// What is said of a socket in a directory that the sandbox leaves out.
fn kept_out(path: &Path) -> String {
    format!(
        "the sandbox keeps the switch out of {}: name it in socket_directories of the configuration file and restart the switch",
        directory(path).display()
    )
}

fn failed(text: &str) -> Reply {
    Reply::Failed { code: None, text: text.to_owned() }
}

impl From<KeepError> for Reply {
    fn from(error: KeepError) -> Self {
        match error {
            KeepError::NotKept(text) => Reply::Failed { code: None, text },
            KeepError::Refused(error) => Reply::Refused { text: error.to_string() },
        }
    }
}

/// Reads the configuration file.
fn read(file: &Path) -> Result<Config, Reply> {
    // Ports that wires join may have been given by flags.
    let config = Config::builder().part_of_a_configuration().regular_file(file).build();
    config.map_err(|error| Reply::Refused { text: error.to_string() })
}

/// Reads a configuration that must have one port.
fn one_port(text: &str) -> Result<PortConfig, Reply> {
    let config = Config::builder().toml("the port", text).build();
    let mut config = config.map_err(|error| Reply::Refused { text: error.to_string() })?;
    match (config.ports.pop(), config.ports.is_empty()) {
        (Some(port), true) => Ok(port),
        _ => Err(failed("that is not one port")),
    }
}
