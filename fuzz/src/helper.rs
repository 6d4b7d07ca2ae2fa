//! The privileged helper of a switch in its sandbox, before a switch that has been taken over.
//!
//! The helper has read its charter, as it does before the first guest. From then on the other end sends any
//! bytes: requests of the right shape, bytes that are none, in pieces or together, without an end, and with
//! descriptors. Each request is answered once, or the helper ends. Meanwhile nothing outside the charter is
//! connected to, written or removed: sockets of others, files in the same folder, and of the configuration
//! everything but settings that can change while a port is open, ports that were opened so, and ports that were to be forgotten. Descriptors come only with answers that say so, and
//! none is leaked.
//!
//! | file | idea |
//! |---|---|
//! | `message` | what a script sends |
//! | `folder` | the files and sockets around the helper |
//! | `model` | what each request may have done |
//!
//! The helper has no sandbox here, so that its own checks are what is tested. It gives up one capability: without `CAP_NET_ADMIN` no request
//! can make an interface on the machine that runs the target.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use ringferry_switch::privileged::{Charter, Privileges, serve};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use rustix::thread::CapabilitySet;
use serde_json::Value;

use crate::ring::Reached;
use crate::script::{Bytes, Field};
use crate::session::open_files;

mod folder;
mod message;
mod model;

pub use folder::{CHANGED, DROP_IN, GONE, LINK, LISTENS, NO_SOCKET, NONSENSE, PEER};
use folder::{Entry, Folder, HEAD};
pub use message::{
    CAN_OPEN, CLOSE, CONNECT, FLOOD, FORGET, KEEP, KEEP_LONG, KEEP_PORT, KEEP_TEXT, KEYS, Message, NAMES,
    OPEN, OPTIONS, PORTS, RAW, READ, RULES, TIDY,
};
use model::{Model, Reply, Sent};

/// Upper bound on the messages of a script: each may change a file.
const MAX_MESSAGES: usize = 64;
/// Bytes after which the helper must have given up on a message that does not end.
const MAX_LINE: usize = (1 << 20) + 4096;

/// Takes `CAP_NET_ADMIN` from the calling thread, without which the kernel makes no tap.
fn give_up_interfaces(_: &Charter) -> bool {
    let mut sets = rustix::thread::capabilities(None).expect("capabilities");
    for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
        set.remove(CapabilitySet::NET_ADMIN);
    }
    rustix::thread::set_capabilities(None, sets).expect("fewer capabilities");
    // The files stay, as the runs of a process share it.
    false
}

/// The switch's end of the connection, after the switch was taken over.
struct Taken {
    stream: Stream,
    model: Model,
    /// Descriptors that the helper has sent.
    fds: Vec<OwnedFd>,
    /// Number of all descriptors that the helper has sent.
    received: usize,
    replies: usize,
    /// Bytes that were sent and not answered.
    unanswered: Vec<u8>,
    /// Bytes that were received behind the last reply.
    rest: Vec<u8>,
    /// The descriptor that came with the last line of `rest`.
    sent: Option<Sent>,
}

impl Taken {
    /// Sends all bytes; returns false if the helper has ended.
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        self.unanswered.extend(bytes);
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
                self.take(&line);
                return true;
            }
            let mut bytes = [0; 4096];
            let before = self.fds.len();
            match self.stream.recv(&mut bytes, &mut self.fds) {
                Ok(received) if received.bytes > 0 => self.rest.extend(&bytes[..received.bytes]),
                _ => return false,
            }
            let new = &self.fds[before..];
            assert!(new.len() <= 1, "a port has one socket");
            if let Some(fd) = new.first() {
                // A descriptor ends what one call receives, and all replies that have one are short.
                assert!(self.rest.ends_with(b"\n") && self.sent.is_none(), "a descriptor within a reply");
                self.sent = Some(Sent::of(fd).expect("a socket"));
                self.received += 1;
            }
        }
    }

    /// Takes a reply, which answers the first value that was not answered.
    fn take(&mut self, line: &[u8]) {
        let value: Value = serde_json::from_slice(line).expect("a reply is JSON");
        let fd = if self.rest.is_empty() { self.sent.take() } else { None };
        let mut values = serde_json::Deserializer::from_slice(&self.unanswered).into_iter::<Value>();
        let request = match values.next() {
            Some(Ok(request)) => request,
            other => panic!("{value} answers {other:?}"),
        };
        let end = values.byte_offset();
        self.unanswered.drain(..end);
        self.model.take(&request, &Reply { value, fd });
        self.replies += 1;
    }
}

/// Plays a switch that sends what the input says.
pub fn helper(input: &[u8]) -> Reached {
    let mut input = Bytes(input);
    let world = u8::get(&mut input).unwrap_or(PEER | LISTENS);
    let before_files = open_files();
    let event = EventFd::new().expect("an event");
    let folder = Folder::new(world).expect("a folder");
    let (before, was_valid) = (folder.entries(), folder.is_valid());
    let (ours, theirs) = Stream::pair().expect("a connection");
    let thread = std::thread::spawn(move || serve(theirs, give_up_interfaces));
    let stream = Stream::from_fd(ours.as_fd().try_clone_to_owned().expect("a descriptor")).expect("a stream");
    drop(Privileges::helper(ours, &folder.charter).expect("a helper"));
    stream.set_timeout(None).expect("a stream");
    let mut taken = Taken {
        stream,
        model: Model::new(&folder),
        fds: Vec::new(),
        received: 0,
        replies: 0,
        unanswered: Vec::new(),
        rest: Vec::new(),
        sent: None,
    };

    let (mut joined, mut fds, mut open_line) = (Vec::new(), Vec::new(), 0);
    for _ in 0..MAX_MESSAGES {
        let Some(message) = Message::get(&mut input) else { break };
        joined.extend(message.line(folder.path()));
        fds.resize(usize::from(message.flags & 3), event.as_fd());
        if message.flags >> 4 & 1 == 1 {
            taken.fds.clear();
        }
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

    // All connections have been made by now. Those that the switch has are still open, unless it has closed them.
    for (name, listener) in &folder.listeners {
        while let Some(stream) = listener.accept().expect("a listener") {
            stream.set_nonblocking(true).expect("a stream");
            let received = stream.recv(&mut [0; 8], &mut Vec::new());
            let is_closed = received.as_ref().is_ok_and(|received| received.bytes == 0);
            assert!(is_closed || received.is_err(), "the helper has sent something to {name}");
            // Whether somebody listens is looked at before a socket is made or removed, by a connection that is closed at once.
            match *name {
                "vm1.sock" | "machines/peer.sock" => {}
                "listen.sock" => assert!(is_closed, "the switch's own socket was connected to"),
                "other.sock" => assert!(is_closed && taken.model.has_opened, "{name} was connected to"),
                _ => panic!("{name} was connected to"),
            }
        }
    }
    assert_eq!(folder.is_valid(), was_valid, "the next start would be another");
    let (gone, new) = compare(&folder, &before, &taken.model);

    let reached = Reached {
        chains: taken.replies,
        longest: taken.received + gone + new,
        frames: taken.model.edits,
        broken: end.is_err(),
    };
    drop((taken, folder, event));
    assert_eq!(open_files(), before_files, "descriptors were leaked");
    reached
}

/// Compares the folder with what it was and with what the answers say. Returns the numbers of entries that are gone and that are new.
fn compare(folder: &Folder, before: &BTreeMap<PathBuf, Entry>, model: &Model) -> (usize, usize) {
    let after = folder.entries();
    let is_config = |name: &Path| {
        ["rf.toml", "linked.toml", "rf.d/more.toml"].iter().any(|other| name == Path::new(other))
    };
    let is_live = |name: &Path| folder.listeners.iter().any(|(other, _)| name == Path::new(other));
    for (name, entry) in before {
        match (entry, after.get(name)) {
            (entry, Some(now)) if entry == now => {}
            (Entry::Socket(_), None | Some(Entry::Socket(_))) => {
                assert!(!is_live(name) && model.may_change(name), "{name:?} was removed or replaced");
            }
            (Entry::File(text), Some(Entry::File(now))) if is_config(name) => {
                assert!(model.edits > 0, "the configuration has changed without an answer that says so");
                assert!(!text.starts_with(HEAD) || now.starts_with(HEAD), "the comment at the head is gone");
            }
            (entry, now) => panic!("{name:?} was {entry:?} and is {now:?}"),
        }
    }
    assert_eq!(folder.ports(), model.files, "the configuration is not what the answers say");
    let new: Vec<_> = after.iter().filter(|(name, _)| !before.contains_key(*name)).collect();
    for (name, entry) in &new {
        assert!(matches!(entry, Entry::Socket(_)) && model.has_made(name), "{name:?} was made");
    }
    let gone = before.keys().filter(|name| !after.contains_key(*name)).count();
    (gone, new.len())
}
