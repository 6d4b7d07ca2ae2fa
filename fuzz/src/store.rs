//! Xen's store as it goes over the wire, both sides: a server of ours whose clients send anything, and our client
//! before a store that answers anything.
//!
//! The server answers each request once, in its kind or as an error; domains read and change only what they may, within
//! their quotas; and a well-behaved client is served afterwards. The client gives its user nothing that it did not check, and
//! a connection that has failed stays so. Nothing stays open.

use std::io::Write;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ringferry_sys::socket::Stream;
use ringferry_xen::domain::DomId;
use ringferry_xen::store::path;
use ringferry_xen::store::{Client, Event, Nodes, StoreError};
use ringferry_xen_sim::store::{Limits, Server};

use crate::ring::Reached;
use crate::script::{Bytes, Field};

/// Limits of the domains of a script: so low that every limit is reached.
const LIMITS: Limits =
    Limits { nodes: 12, value_bytes: 64, permissions: 3, watches: 4, transactions: 2, transaction_nodes: 8 };

/// The domains of the senders: two connections of one domain, and one of another.
const DOMAINS: [DomId; 3] = [DomId(5), DomId(5), DomId(7)];

/// The paths that a script names by number, as beginnings.
pub const PATHS: [&str; 16] = [
    "",
    "/",
    "data",
    "data/a",
    "data/a/b/c",
    "/local/domain/5/data",
    "/local/domain/5/data/a",
    "/local/domain/7/data/a",
    "/local/domain/5",
    "/tool/secret",
    "/tool/shown",
    "/tool",
    "@releaseDomain",
    "device",
    "1",
    "T",
];
const SECRET: &str = "/tool/secret";
const SHOWN: &str = "/tool/shown";

/// Message types of the store's protocol.
pub const READ: u8 = 2;
const WRITE: u8 = 11;
const WATCH_EVENT: u32 = 15;
const ERROR: u32 = 16;
const DIRECTORY: u8 = 1;
const GET_PERMISSIONS: u8 = 3;
/// Length of a header, and upper bound on a payload, in bytes.
const HEADER: usize = 16;
const MAX_PAYLOAD: usize = 4096;
/// Bytes that the client reads at once.
const LOOK: usize = HEADER + MAX_PAYLOAD;
/// Upper bound on the nodes that are checked in the end.
const MAX_NODES: usize = 200;

/// A message, or some bytes that are none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Bits 0 and 1: the sender, to the server. Bit 2: the header promises far too much. Bit 3: nobody serves
    /// or reads before the next message. Bit 4: only the payload is sent. Bit 5: another byte is promised
    /// than follows. To the client, bit 3 says that the message is not seen together with the ones before,
    /// and bit 7 that the client is called, and [`Message::kind`] how.
    pub flags: u8,
    /// The message type.
    pub kind: u8,
    /// Number of the transaction, or of the request that is answered.
    pub number: u8,
    /// The beginning of the payload: one of [`PATHS`], with a zero byte if bit 4 is set.
    pub path: u8,
    /// The rest of the payload.
    pub rest: Vec<u8>,
}

impl Field for Message {
    fn get(bytes: &mut Bytes<'_>) -> Option<Self> {
        let [flags, kind, number, path] =
            [u8::get(bytes)?, u8::get(bytes)?, u8::get(bytes)?, u8::get(bytes)?];
        let len = usize::from(u8::get(bytes)?).min(bytes.0.len());
        let (rest, after) = bytes.0.split_at(len);
        bytes.0 = after;
        Some(Self { flags, kind, number, path, rest: rest.to_vec() })
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend([self.flags, self.kind, self.number, self.path, self.rest.len() as u8]);
        out.extend(&self.rest);
    }
}

impl Message {
    fn has(&self, bit: u8) -> bool {
        self.flags >> bit & 1 != 0
    }

    fn payload(&self) -> Vec<u8> {
        let mut payload = PATHS[usize::from(self.path) % PATHS.len()].as_bytes().to_vec();
        if self.path >> 4 & 1 != 0 {
            payload.push(0);
        }
        payload.extend(&self.rest);
        payload
    }

    /// Returns the bytes that are sent.
    fn bytes(&self, request: u32, transaction: u32) -> Vec<u8> {
        let payload = self.payload();
        let mut len = payload.len() as u32 + u32::from(self.has(5));
        if self.has(2) {
            len += 1 << 13;
        }
        let mut bytes = if self.has(4) { Vec::new() } else { header(self.kind, request, transaction, len) };
        bytes.extend(payload);
        bytes
    }
}

fn header(kind: u8, request: u32, transaction: u32, len: u32) -> Vec<u8> {
    [u32::from(kind), request, transaction, len].iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Returns the number of open descriptors of this process. The listing has one of its own, in every count
/// alike.
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Plays clients of a server, or a store before a client, as the first byte says.
pub fn store(input: &[u8]) -> Reached {
    let Some((side, script)) = input.split_first() else { return Reached::default() };
    let before = open_files();
    let reached = if side & 1 == 0 { server(script) } else { client(script) };
    assert_eq!(open_files(), before, "descriptors were leaked");
    reached
}

/// One end of a connection to the server, which reads and writes without the help of the code under test.
struct Peer {
    stream: Stream,
    received: Vec<u8>,
    /// Numbers of requests sent completely, and of answers.
    requests: u32,
    answers: u32,
    /// True if the stream cannot be cut into messages any more.
    lost: bool,
    closed: bool,
}

impl Peer {
    fn new(server: &mut Server, domain: DomId) -> Self {
        let (stream, theirs) = Stream::pair().expect("a connection");
        stream.set_nonblocking(true).expect("a socket that does not block");
        server.attach(theirs, domain).expect("a connection");
        Self { stream, received: Vec::new(), requests: 0, answers: 0, lost: false, closed: false }
    }

    fn send(&mut self, message: &Message) {
        let bytes = message.bytes(self.requests + 1, message.number.into());
        let whole = !(message.has(2) || message.has(4) || message.has(5));
        match self.stream.send(&bytes, &[]) {
            Ok(sent) if sent == bytes.len() && whole => self.requests += 1,
            // The rest of a message that was cut off becomes the beginning of the next one.
            _ => self.lost = true,
        }
    }

    /// Reads the answers that have arrived, and returns their payloads.
    fn read(&mut self) -> Vec<(u32, Vec<u8>)> {
        let mut bytes = [0; HEADER + MAX_PAYLOAD];
        while !self.closed {
            match self.stream.recv(&mut bytes, &mut Vec::new()) {
                Ok(got) if got.bytes > 0 => self.received.extend(&bytes[..got.bytes]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                _ => self.closed = true,
            }
        }
        let mut answers = Vec::new();
        while self.received.len() >= HEADER {
            let word = |at| u32::from_le_bytes(std::array::from_fn(|i| self.received[at + i]));
            let (kind, request, len) = (word(0), word(4), word(12) as usize);
            assert!(len <= MAX_PAYLOAD, "an answer of {len} bytes");
            if self.received.len() < HEADER + len {
                break;
            }
            let payload: Vec<u8> = self.received.drain(..HEADER + len).skip(HEADER).collect();
            if kind == WATCH_EVENT {
                assert!(request == 0 && payload.ends_with(b"\0"), "an event");
                continue;
            }
            self.answers += 1;
            assert!(self.lost || request == self.answers, "answers in the order of requests");
            answers.push((kind, payload));
        }
        answers
    }
}

/// Serves until no work is left.
fn serve(server: &mut Server) {
    // Each round completes at least one message, or reads more bytes of it.
    for _ in 0..8 {
        server.poll(Some(Duration::ZERO)).expect("a server");
    }
}

fn server(script: &[u8]) -> Reached {
    let mut server = Server::new(LIMITS).expect("a server");
    let mut tool = Peer::new(&mut server, DomId(0));
    let ask = |server: &mut Server, tool: &mut Peer, kind, path: &str, rest: &[u8]| {
        let payload = [path.as_bytes(), b"\0", rest].concat();
        let message = Message { flags: 0, kind, number: 0, path: 0, rest: payload };
        tool.send(&message);
        let mut answers = Vec::new();
        for _ in 0..64 {
            serve(server);
            answers.extend(tool.read());
            if !answers.is_empty() {
                break;
            }
        }
        let (kind, payload) = answers.pop().expect("a well-behaved client is served");
        (kind != ERROR).then_some(payload)
    };
    for domain in &DOMAINS[1..] {
        server.introduce(*domain);
    }
    ask(&mut server, &mut tool, WRITE, SECRET, b"42").expect("domain 0 may write");
    ask(&mut server, &mut tool, 14, SECRET, b"n0\0").expect("and say who may read");
    ask(&mut server, &mut tool, WRITE, SHOWN, b"43").expect("domain 0 may write");
    let mut peers = DOMAINS.map(|domain| Peer::new(&mut server, domain));
    let (mut input, mut reached) = (Bytes(script), Reached::default());
    let mut taken = |peer: &mut Peer| {
        for (kind, payload) in peer.read() {
            reached.chains += 1;
            reached.frames += usize::from(kind != ERROR);
            assert!(payload != b"42", "what nobody may read was read");
        }
    };
    while let Some(message) = Message::get(&mut input) {
        let peer = &mut peers[usize::from(message.flags & 3) % DOMAINS.len()];
        peer.send(&message);
        if !message.has(3) {
            serve(&mut server);
            peers.iter_mut().for_each(&mut taken);
        }
    }
    for _ in 0..peers.iter().map(|peer| peer.requests as usize + 1).sum() {
        serve(&mut server);
        peers.iter_mut().for_each(&mut taken);
    }
    for peer in &peers {
        assert!(peer.lost || peer.answers == peer.requests && !peer.closed, "a request was not answered");
        reached.broken |= peer.closed;
    }
    drop(peers);
    serve(&mut server);
    assert_eq!(ask(&mut server, &mut tool, READ, SECRET, b"").as_deref(), Some(&b"42"[..]));
    assert_eq!(ask(&mut server, &mut tool, READ, SHOWN, b"").as_deref(), Some(&b"43"[..]));
    // Walk all nodes, and add up owners and lengths.
    let (mut paths, mut owned) = (vec!["/".to_owned()], [0; 8]);
    while let Some(path) = paths.pop() {
        let permissions = ask(&mut server, &mut tool, GET_PERMISSIONS, &path, b"").expect("a node");
        let owner = usize::from(permissions[1].wrapping_sub(b'0'));
        owned[owner] += 1;
        let value = ask(&mut server, &mut tool, READ, &path, b"").expect("a value");
        assert!(value.len() <= LIMITS.value_bytes, "{path} is {} bytes long", value.len());
        assert!(permissions.iter().filter(|byte| **byte == 0).count() <= LIMITS.permissions);
        let names = ask(&mut server, &mut tool, DIRECTORY, &path, b"").expect("a list");
        for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let name = std::str::from_utf8(name).expect("a name");
            assert!(path::is_name(name));
            paths.push(path::join(&path, name));
        }
        assert!(paths.len() < MAX_NODES);
    }
    reached.longest = owned.iter().skip(1).sum();
    assert!(owned.iter().skip(1).all(|count| *count <= LIMITS.nodes), "{owned:?} nodes");
    reached
}

fn client(script: &[u8]) -> Reached {
    let (ours, mut store) = UnixStream::pair().expect("a connection");
    store.set_nonblocking(true).expect("a socket that does not block");
    let (mut input, mut calls, mut told) = (Bytes(script), Vec::new(), Vec::new());
    while let Some(message) = Message::get(&mut input) {
        if message.has(7) {
            calls.push(message);
        } else {
            if message.has(3) {
                // The rest is filled up with an event without content.
                let used = told.len() % LOOK;
                let len = if used + HEADER > LOOK { 2 * LOOK } else { LOOK } - used - HEADER;
                told.extend(header(WATCH_EVENT as u8, 0, 0, len as u32));
                told.resize(told.len() + len, b'-');
            }
            told.extend(message.bytes(message.number.into(), 0));
        }
    }
    // The store writes as much as there is room for; then the stream ends, whatever the client waits for.
    let _ = store.write(&told);
    store.shutdown(Shutdown::Write).expect("the end");
    let stream = Stream::from_fd(OwnedFd::from(ours)).expect("a socket");
    let mut client = Client::from_stream(stream).expect("a client");
    let mut reached = Reached::default();
    for message in calls {
        let path = String::from_utf8_lossy(&message.payload()).into_owned();
        let result = call(&mut client, message.kind, &path, &mut reached);
        assert!(!(reached.broken && result.is_ok()), "a connection that has failed serves on");
        match result {
            Ok(()) => reached.chains += 1,
            Err(error) => reached.broken |= error.is_fatal(),
        }
    }
    reached
}

/// Makes one call, and checks its result.
fn call(client: &mut Client, kind: u8, path: &str, reached: &mut Reached) -> Result<(), StoreError> {
    match kind % 10 {
        0 => drop(client.read(path)?),
        1 => {
            let text = client.text(path)?.unwrap_or_default();
            assert!(!text.contains(char::is_control), "{text:?}");
        }
        2 => drop(client.number::<u16>(path)?),
        3 => {
            let names = client.directory(path)?;
            assert!(names.iter().all(|name| path::is_name(name)), "{names:?}");
            reached.longest = reached.longest.max(names.len());
        }
        4 => drop(client.permissions(path)?),
        5 => client.watch(path, 7)?,
        6 => client.unwatch(path, 7)?,
        7 => client.transaction(|t| {
            t.read(path)?;
            t.write(path, "value")
        })?,
        8 => client.write(path, "value")?,
        _ => {
            // The bound is far above what fits into a socket.
            for _ in 0..1 << 16 {
                match client.event()? {
                    Some(Event::Changed { path, .. }) => assert!(path::check(&path).is_ok(), "{path:?}"),
                    Some(Event::Flood) => {}
                    None => return Ok(()),
                }
                reached.frames += 1;
            }
            panic!("events without end");
        }
    }
    Ok(())
}
