//! The oracle: what each request may have done, by the charter and the answers before it.
//!
//! Requests and replies alternate, and a request is one JSON value, so the n-th reply answers the n-th value that was sent. The model takes
//! them in that order, and says in the end which ports the configuration must have and which sockets may have come and gone.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use ringferry_switch::config::{Config, MAX_WORKERS, PortConfig, PortKind, VhostUserEndpoint};
use ringferry_sys::socket::{Listener, Stream};
use serde_json::Value;

use super::folder::{Folder, without_settings};

/// A descriptor that the helper has sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// A socket that listens at a path.
    Listens(PathBuf),
    /// A connection to the socket at a path.
    Connected(PathBuf),
}

impl Sent {
    /// Returns what a descriptor is.
    pub(super) fn of(fd: &OwnedFd) -> io::Result<Sent> {
        let path = |address: std::os::unix::net::SocketAddr| address.as_pathname().map(Path::to_owned);
        let sent = if Listener::from_fd(fd.try_clone()?).is_ok() {
            path(UnixListener::from(fd.try_clone()?).local_addr()?).map(Sent::Listens)
        } else {
            let _is_connected = Stream::from_fd(fd.try_clone()?)?;
            path(UnixStream::from(fd.try_clone()?).peer_addr()?).map(Sent::Connected)
        };
        sent.ok_or_else(|| io::Error::other("a socket without a path"))
    }
}

/// A reply, with the descriptor that came with it.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) value: Value,
    pub(super) fd: Option<Sent>,
}

impl Reply {
    /// Returns the kind of the reply.
    pub(super) fn kind(&self) -> &str {
        match &self.value {
            Value::String(word) => word.as_str(),
            Value::Object(object) if object.len() == 1 => object.keys().next().expect("one key"),
            _ => panic!("{self:?} is no reply"),
        }
    }
}

/// The state of the helper and of its files, as it follows from the answers.
pub(super) struct Model {
    folder: PathBuf,
    /// Ports of the configuration file and of its drop-in file, without settings, if these are valid.
    pub(super) files: [Option<Vec<PortConfig>>; 2],
    /// Sockets on which ports listen, by port.
    listens: BTreeMap<String, PathBuf>,
    /// Sockets that ports connect to, by port.
    connects: BTreeMap<String, PathBuf>,
    /// Ports that were opened and not closed since, without settings.
    opened: BTreeMap<String, PortConfig>,
    /// Ports of the start, and ports that were opened at any time, without settings.
    known: Vec<PortConfig>,
    /// Ports of the files when they were last read for the switch, which may be opened as they were then.
    last_read: Vec<PortConfig>,
    /// Sockets that the helper was asked to make, and has made, whether they are still there or not.
    made: Vec<PathBuf>,
    /// Number of times that the configuration was changed.
    pub(super) edits: usize,
    /// True if a port was to be opened, for which the helper may look whether somebody listens at its socket.
    pub(super) has_opened: bool,
}

impl Model {
    pub(super) fn new(folder: &Folder) -> Self {
        let here = |name: &str| folder.path().join(name);
        let sockets = [("vm0", "listen.sock"), ("vm4", "vm4.sock")];
        let files = folder.ports();
        let count = if here("rf.d").exists() { 2 } else { 1 };
        let listens = sockets[..count].iter().map(|(port, name)| ((*port).to_owned(), here(name)));
        Self {
            folder: folder.path().to_owned(),
            files,
            listens: listens.collect(),
            connects: BTreeMap::from([("vm1".to_owned(), here("vm1.sock"))]),
            opened: BTreeMap::new(),
            known: without_settings(folder.start.clone()),
            last_read: Vec::new(),
            made: Vec::new(),
            edits: 0,
            has_opened: false,
        }
    }

    /// Takes a request and its reply.
    pub(super) fn take(&mut self, request: &Value, reply: &Reply) {
        let (kind, fields) = match request {
            Value::String(kind) => (kind.as_str(), &Value::Null),
            Value::Object(object) if object.len() == 1 => {
                let (kind, fields) = object.iter().next().expect("one key");
                (kind.as_str(), fields)
            }
            _ => panic!("{request} is no request, and was answered with {reply:?}"),
        };
        // Fields may be written as an array; `port` is the first of all that have it.
        let port = fields.get("port").or_else(|| fields.get(0)).and_then(Value::as_str).unwrap_or_default();
        let may_send = ["Open", "Connect"].contains(&kind) && reply.kind() == "Done";
        assert!(may_send || reply.fd.is_none(), "{reply:?} to {request}");
        self.has_opened |= kind == "Open";
        let good = match kind {
            "Read" => "Config",
            "Keep" | "ForgetPort" => "Kept",
            "Connect" | "Open" | "CanOpen" | "SetUp" | "Close" | "KeepPort" | "Tidy" => "Done",
            _ => panic!("{request} is no request, and was answered with {reply:?}"),
        };
        if reply.kind() != good {
            assert!(["Refused", "Failed"].contains(&reply.kind()), "{reply:?} to {request}");
            assert!(!["Close", "Tidy"].contains(&kind), "{reply:?} to {request}");
            return;
        }
        match kind {
            "Connect" => {
                let path = self.connects.get(port).cloned().map(Sent::Connected);
                assert!(path.is_some() && reply.fd == path, "{reply:?} to {request}, not {path:?}");
            }
            "Open" => self.open(one_port(port), reply),
            "Close" => {
                self.opened.remove(port);
                self.listens.remove(port);
                self.connects.remove(port);
            }
            "Keep" => self.edits += 1,
            "KeepPort" => {
                let port = one_port(port);
                let opened = self.opened.get(&port.name).expect("only ports that are open are kept");
                assert_eq!(opened.kind, port.kind, "another port was opened");
                self.files[0].as_mut().expect("a valid file").push(port);
                self.edits += 1;
            }
            "ForgetPort" => {
                let mut files = self.files.iter_mut().flatten();
                let file = files.find(|file| file.iter().any(|there| there.name == port));
                file.expect("a file with the port").retain(|there| there.name != port);
                self.edits += 1;
            }
            "Read" => {
                let text = reply.value["Config"]["text"].as_str().expect("a text");
                let config = Config::builder().may_be_empty().toml("the answer", text).workers(MAX_WORKERS);
                let ports = without_settings(config.build().expect("a valid configuration").ports);
                assert!(
                    ports.iter().eq(self.files.iter().flatten().flatten()),
                    "{ports:?} is not in the files"
                );
                self.last_read = ports;
            }
            _ => {}
        }
    }

    /// Takes the answer that a port is open.
    fn open(&mut self, port: PortConfig, reply: &Reply) {
        let taken = self.listens.contains_key(&port.name) || self.connects.contains_key(&port.name);
        assert!(!taken, "{port:?} is open already");
        let same = |there: &PortConfig| there.name == port.name && there.kind == port.kind;
        let before = self.known.iter().chain(&self.last_read);
        let is_in_file = self.files.iter().flatten().flatten().chain(before).any(same);
        match &port.kind {
            PortKind::VhostUser(vhost) => match &vhost.endpoint {
                VhostUserEndpoint::Listen(path) => {
                    assert!(
                        is_in_file || self.is_in(path, &["", "machines", "named"]),
                        "{port:?} was opened"
                    );
                    assert_eq!(reply.fd, Some(Sent::Listens(path.clone())), "of {port:?}");
                    self.listens.insert(port.name.clone(), path.clone());
                    self.made.push(path.clone());
                }
                VhostUserEndpoint::Connect(path) => {
                    assert!(is_in_file || self.is_in(path, &["machines", "named"]), "{port:?} was opened");
                    assert_eq!(reply.fd, None, "of {port:?}");
                    self.connects.insert(port.name.clone(), path.clone());
                }
                VhostUserEndpoint::Fd(_) | VhostUserEndpoint::Activation(_) => panic!("{port:?} was opened"),
            },
            PortKind::XenVif(xen) => {
                assert!(is_in_file, "{xen:?} was opened, although no port of the start was for Xen");
                assert_eq!(reply.fd, None, "of {port:?}");
            }
            PortKind::Tap(_) | PortKind::Xdp(_) => panic!("{port:?} was opened"),
        }
        self.known.push(port.clone());
        self.opened.insert(port.name.clone(), port);
    }

    /// Returns true if a path is directly in one of these directories, by the name that the configuration has for it.
    fn is_in(&self, path: &Path, directories: &[&str]) -> bool {
        directories.iter().any(|name| path.parent() == Some(self.folder.join(name).as_path()))
    }

    /// Returns true if the socket at a path below the folder may be gone, or another than it was, although it had a file before.
    pub(super) fn may_change(&self, name: &Path) -> bool {
        // Of the sockets without a listener the helper removes those of the configuration, and replaces others when it makes one.
        ["control", "listen.sock"].iter().any(|stale| name == Path::new(stale)) || self.has_made(name)
    }

    /// Returns true if the helper was asked to make a socket at this path below the folder.
    pub(super) fn has_made(&self, name: &Path) -> bool {
        let real = |path: &Path| Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
        let made = real(&self.folder.join(name));
        made.is_some() && self.made.iter().any(|path| real(path) == made)
    }
}

/// Reads the port of a request that was carried out, without its settings.
fn one_port(text: &str) -> PortConfig {
    let config = Config::builder().toml("the port", text).workers(MAX_WORKERS).build();
    let mut ports = without_settings(config.expect("only valid ports are opened and kept").ports);
    assert_eq!(ports.len(), 1, "{ports:?}");
    ports.remove(0)
}
