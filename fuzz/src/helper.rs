//! The privileged helper of a switch in its sandbox, before a switch that has been taken over.
//!
//! The helper has read its charter, as it does before the first guest. From then on the other end sends any
//! bytes: requests of the right shape, bytes that are none, in pieces or together, without an end, and with
//! descriptors. Each request is answered once, or the helper ends. Meanwhile nothing outside the charter is
//! connected to, written or removed: sockets of others, files in the same folder, and every key of the
//! configuration file that is not a rule. No descriptor is leaked.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::Path;

use ringferry_switch::config::{Config, PortConfig};
use ringferry_switch::privileged::{Charter, Privileges, serve};
use ringferry_switch::rules::Rules;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::{Listener, Stream};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::ring::Reached;
use crate::script::{Bytes, Field};
use crate::session::open_files;

/// Upper bound on the messages of a script: each may change a file.
const MAX_MESSAGES: usize = 64;
/// Bytes after which the helper must have given up on a message that does not end.
const MAX_LINE: usize = (1 << 20) + 4096;
/// Bytes of a [`FLOOD`] for each unit of [`Message::name`].
const FLOOD_UNIT: usize = 1 << 14;

/// Names of ports in requests: ports of the configuration file, one that was given by a flag, and names of no
/// port.
pub const NAMES: [&str; 8] = ["vm0", "vm1", "rf0", "vm2", "", "../vm1", "HERE/other.sock", "precious"];

/// Lines that the rules of a port in [`KEEP`] are made of.
pub const RULES: [&str; 16] = [
    "vlan = 20",
    "vlan = 5000",
    "trunk = ['1-9', '20']",
    "native = 5",
    "isolated = true",
    "max_macs = 3",
    "static_macs = ['52:54:00:00:00:01']",
    "allowed_macs = ['52:54:00:00:00:01', '52:54:00:00:00:02']",
    "allowed_ips = ['10.0.0.0/8', 'fd00::1']",
    "rate_in = '1gbit'",
    "storm = '1kpps'",
    "storm_burst = 9",
    "socket = '/precious'",
    "control = '/precious'",
    "[[port]]\nkind = 'tap'\ntap = 'x'",
    "# \u{1f980} \\u0000",
];

/// Keys of rules that [`KEEP`] names.
pub const KEYS: [&str; 16] = [
    "vlan",
    "trunk",
    "native",
    "isolated",
    "max_macs",
    "static_macs",
    "allowed_macs",
    "allowed_ips",
    "rate_in",
    "storm",
    "storm_burst",
    "socket",
    "kind",
    "name",
    "port",
    "vlan = 1\nsocket",
];

/// Kinds of messages: connects the port [`Message::name`], to whose name the rest is appended.
pub const CONNECT: u8 = 0;
/// Keeps rules of the port [`Message::name`]. The bytes of the rest choose [`RULES`], and from 0x80 on [`KEYS`].
pub const KEEP: u8 = 1;
/// Keeps the key [`Message::name`] of the port that the rest describes.
pub const KEEP_TEXT: u8 = 2;
/// Keeps `vlan` of a port that the rest describes, which is repeated 16 times for each unit of [`Message::name`].
pub const KEEP_LONG: u8 = 3;
/// Kind of message: asks the helper to remove the files of sockets.
pub const TIDY: u8 = 4;
/// Kind of message: sends the rest unchanged.
pub const RAW: u8 = 5;
/// Sends the rest, and behind it 16 KiB of anything for each unit of [`Message::name`].
pub const FLOOD: u8 = 6;
const KINDS: u8 = 7;

/// A message, or some bytes that are none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Bits 0 and 1: number of descriptors that come with it. Bit 2: it is sent together with the next message. Bit 3: it does not end
    /// with a newline.
    pub flags: u8,
    /// The kind of the message, such as [`CONNECT`].
    pub kind: u8,
    /// A number whose meaning depends on the kind.
    pub name: u8,
    /// Bytes whose meaning depends on the kind.
    pub rest: Vec<u8>,
}

impl Field for Message {
    fn get(bytes: &mut Bytes<'_>) -> Option<Self> {
        let (flags, kind, name) = (u8::get(bytes)?, u8::get(bytes)?, u8::get(bytes)?);
        let len = usize::from(u8::get(bytes)?).min(bytes.0.len());
        let (rest, left) = bytes.0.split_at(len);
        bytes.0 = left;
        Some(Self { flags, kind, name, rest: rest.to_vec() })
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend([self.flags, self.kind, self.name, self.rest.len() as u8]);
        out.extend(&self.rest);
    }
}

impl Message {
    /// Returns the bytes that are sent.
    fn line(&self, folder: &Path) -> Vec<u8> {
        let text = String::from_utf8_lossy(&self.rest);
        let name = NAMES[usize::from(self.name) % NAMES.len()].replace("HERE", &folder.to_string_lossy());
        let keep = |port: String, keys: Vec<&str>| json!({ "Keep": { "port": port, "keys": keys } });
        let request = match self.kind % KINDS {
            CONNECT => json!({ "Connect": { "port": name + &text } }),
            KEEP => {
                let (mut lines, mut keys) = (Vec::new(), Vec::new());
                for &byte in &self.rest {
                    let at = usize::from(byte) % 16;
                    if byte < 0x80 { lines.push(RULES[at]) } else { keys.push(KEYS[at]) }
                }
                let head = format!("[[port]]\nkind = 'vhost-user'\nsocket = '/precious'\nname = '{name}'\n");
                keep(head + &lines.join("\n"), keys)
            }
            KEEP_TEXT => keep(text.into_owned(), vec![KEYS[usize::from(self.name) % KEYS.len()]]),
            KEEP_LONG => keep(text.repeat(16 * usize::from(self.name)), vec!["vlan"]),
            TIDY => json!("Tidy"),
            _ => Value::Null,
        };
        let mut line = match self.kind % KINDS {
            RAW => self.rest.clone(),
            FLOOD => [&self.rest[..], &vec![b'x'; FLOOD_UNIT * usize::from(self.name)]].concat(),
            _ => request.to_string().into_bytes(),
        };
        if self.flags >> 3 & 1 == 0 {
            line.push(b'\n');
        }
        line
    }
}

/// Flag: a listener is at the socket of `vm1`, which the charter lets the helper connect to.
pub const PEER: u8 = 1;
/// Flag: a listener is at the socket of `vm0`. Otherwise its file is stale.
pub const LISTENS: u8 = 2;
/// Flag: in the place of the control socket is a file.
pub const NO_SOCKET: u8 = 4;
/// Flag: the configuration file has changed since, and has only `vm1`.
pub const CHANGED: u8 = 8;
/// Flag: the configuration file is not valid any more.
pub const NONSENSE: u8 = 16;
/// Flag: the configuration file was removed.
pub const GONE: u8 = 32;
/// Flag: the configuration file is a symbolic link.
pub const LINK: u8 = 64;

const VM0: &str = "\
# Rack 7.
[[port]]
kind = 'vhost-user'
socket = 'HERE/listen.sock'  # of vm0
name = 'vm0'
vlan = 10 # as agreed
max_macs = 8
";
const VM1: &str = "\
[[port]]
kind = 'vhost-user'
name = 'vm1'
socket = 'HERE/vm1.sock'
mode = 'connect'
";

/// The expected type and content of a name in the folder.
#[derive(Debug, PartialEq, Eq)]
enum Entry {
    Socket,
    File(Vec<u8>),
}

/// A folder with the configuration, sockets, and files that the helper must not touch.
struct Folder {
    folder: TempDir,
    charter: Charter,
    /// Listeners. The helper may connect to the first, and check whether the second has a listener.
    peer: Option<Listener>,
    listener: Option<Listener>,
    other: Listener,
}

impl Folder {
    fn new(world: u8) -> io::Result<Self> {
        // The folder is in memory, if possible, as each change of the file is written through.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())?;
        let path = |name: &str| folder.path().join(name);
        let here = folder.path().to_string_lossy();
        fs::write(path("rf.toml"), [VM0, VM1].concat().replace("HERE", &here))?;
        let config = Config::builder().file(&path("rf.toml")).port_flag("tap:rf0").build();
        let charter = Charter::of(&config.expect("a configuration"), &path("control"));
        let has = |bit| world & bit != 0;
        if has(NONSENSE) {
            fs::write(path("rf.toml"), "[[port]\nname = ")?;
        } else if has(CHANGED) {
            fs::write(path("rf.toml"), VM1.replace("HERE", &here))?;
        }
        if has(LINK) {
            fs::rename(path("rf.toml"), path("linked.toml"))?;
            symlink("linked.toml", path("rf.toml"))?;
        }
        if has(GONE) {
            fs::remove_file(path("rf.toml"))?;
        }
        fs::write(path("precious"), "precious")?;
        let listen = |name: &str| Listener::bind(path(name)).map_err(io::Error::other);
        // This is another program's socket, whose listener is gone.
        listen("stranger.sock")?.leave_file();
        if has(NO_SOCKET) {
            fs::write(path("control"), "control")?;
        } else {
            listen("control")?.leave_file();
        }
        let mut listener = listen("listen.sock")?;
        listener.leave_file();
        let listener = has(LISTENS).then_some(listener);
        let mut peer = listen("vm1.sock")?;
        peer.leave_file();
        let peer = has(PEER).then_some(peer);
        let other = listen("other.sock")?;
        Ok(Self { charter, peer, listener, other, folder })
    }

    fn entries(&self) -> BTreeMap<String, Entry> {
        let entry = |entry: fs::DirEntry| {
            let socket = entry.file_type().is_ok_and(|kind| kind.is_socket());
            let what = if socket {
                Entry::Socket
            } else {
                Entry::File(fs::read(entry.path()).expect("a file that was there"))
            };
            (entry.file_name().to_string_lossy().into_owned(), what)
        };
        fs::read_dir(self.folder.path())
            .expect("the folder")
            .map(|each| entry(each.expect("an entry")))
            .collect()
    }
}

/// Returns the ports of a configuration file without their rules; `None` if it is not valid.
fn ports_but_rules(text: &[u8]) -> Option<Vec<PortConfig>> {
    let text = std::str::from_utf8(text).ok()?;
    let mut ports = Config::builder().toml("the file", text).build().ok()?.ports;
    ports.iter_mut().for_each(|port| port.rules = Rules::default());
    Some(ports)
}

/// The switch's end of the connection, after the switch was taken over.
struct Taken {
    stream: Stream,
    /// Descriptors that the helper has sent.
    fds: Vec<OwnedFd>,
    replies: usize,
    kept: usize,
    /// Bytes that were received behind the last reply.
    rest: Vec<u8>,
}

impl Taken {
    /// Sends all bytes; returns false if the helper has ended.
    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut sent = 0;
        while sent < bytes.len() {
            let fds = if sent == 0 { fds } else { &[] };
            match self.stream.send(&bytes[sent..], fds) {
                Ok(count) => sent += count,
                Err(_) => return false,
            }
        }
        true
    }

    /// Reads a reply; returns false if the helper has ended.
    fn read_reply(&mut self) -> bool {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<_> = self.rest.drain(..=end).collect();
                self.note(&line);
                return true;
            }
            let mut bytes = [0; 4096];
            match self.stream.recv(&mut bytes, &mut self.fds) {
                Ok(received) if received.bytes > 0 => self.rest.extend(&bytes[..received.bytes]),
                _ => return false,
            }
        }
    }

    fn note(&mut self, line: &[u8]) {
        let reply: Value = serde_json::from_slice(line).expect("a reply is JSON");
        let kind = match &reply {
            Value::String(word) => word.as_str(),
            Value::Object(object) if object.len() == 1 => object.keys().next().expect("one key"),
            _ => panic!("{reply} is no reply"),
        };
        assert!(["Done", "Kept", "Refused", "Failed"].contains(&kind), "{reply} is no reply");
        self.replies += 1;
        self.kept += usize::from(kind == "Kept");
    }
}

/// Plays a switch that sends what the input says.
pub fn helper(input: &[u8]) -> Reached {
    let mut input = Bytes(input);
    let world = u8::get(&mut input).unwrap_or(PEER | LISTENS);
    let before_files = open_files();
    let event = EventFd::new().expect("an event");
    let folder = Folder::new(world).expect("a folder");
    let before = folder.entries();
    let (ours, theirs) = Stream::pair().expect("a connection");
    let thread = std::thread::spawn(move || serve(theirs, |_| ()));
    let stream = Stream::from_fd(ours.as_fd().try_clone_to_owned().expect("a descriptor")).expect("a stream");
    drop(Privileges::helper(ours, &folder.charter).expect("a helper"));
    stream.set_timeout(None).expect("a stream");
    let mut taken = Taken { stream, fds: Vec::new(), replies: 0, kept: 0, rest: Vec::new() };

    let (mut joined, mut fds, mut open_line) = (Vec::new(), Vec::new(), 0);
    for _ in 0..MAX_MESSAGES {
        let Some(message) = Message::get(&mut input) else { break };
        joined.extend(message.line(folder.folder.path()));
        fds.resize(usize::from(message.flags & 3), event.as_fd());
        if joined.is_empty() || message.flags >> 2 & 1 == 1 {
            continue;
        }
        let bytes = std::mem::take(&mut joined);
        // The helper must not read without limit as long as no newline comes.
        open_line = if bytes.contains(&b'\n') { 0 } else { open_line + bytes.len() };
        let runs = taken.send(&bytes, &fds);
        if !runs || (open_line > MAX_LINE || bytes.ends_with(b"\n")) && !taken.read_reply() {
            break;
        }
        assert!(open_line <= MAX_LINE, "a message that does not end was answered");
    }
    taken.stream.shutdown();
    while taken.read_reply() {}
    let end = thread.join().expect("the helper does not panic");

    // All connections have been made by now, so they can be counted.
    let connections = |listener: &Option<Listener>| {
        let mut count = 0;
        while let Some(stream) = listener.as_ref().and_then(|listener| listener.accept().expect("a listener"))
        {
            stream.set_nonblocking(true).expect("a stream");
            // Bytes received there could only come from the helper itself.
            let received = stream.recv(&mut [0; 8], &mut Vec::new());
            assert!(received.map_or(0, |received| received.bytes) == 0, "the helper has sent something");
            count += 1;
        }
        count
    };
    assert!(folder.other.accept().expect("a listener").is_none(), "somebody else's socket was connected to");
    let connected = connections(&folder.peer);
    assert!(taken.fds.len() <= connected, "a descriptor is no connection to the port");
    connections(&folder.listener);
    let after = folder.entries();
    for (name, entry) in &before {
        let stale = match name.as_str() {
            "control" => *entry == Entry::Socket,
            "listen.sock" => folder.listener.is_none(),
            _ => false,
        };
        let is_config = name == "rf.toml" || name == "linked.toml";
        match (entry, after.get(name)) {
            (_, None) => assert!(stale, "{name} was removed"),
            (Entry::File(text), Some(Entry::File(now))) if is_config && text != now => {
                assert!(taken.kept > 0, "the configuration has changed without an answer that says so");
                assert!(ports_but_rules(now).is_some(), "the configuration makes no sense any more");
                assert_eq!(ports_but_rules(now), ports_but_rules(text), "more than rules has changed");
                assert!(!text.starts_with(b"# Rack 7.\n") || now.starts_with(b"# Rack 7.\n"));
            }
            (entry, Some(now)) => assert_eq!(now, entry, "{name} has changed"),
        }
    }
    assert!(after.keys().all(|name| before.contains_key(name)), "a file was made: {after:?}");
    let removed = before.len() - after.len();

    let reached = Reached {
        chains: taken.replies,
        longest: taken.fds.len() + removed,
        frames: taken.kept,
        broken: end.is_err(),
    };
    drop((taken, folder, event));
    assert_eq!(open_files(), before_files, "descriptors were leaked");
    reached
}
