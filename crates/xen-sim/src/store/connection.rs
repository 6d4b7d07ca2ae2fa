//! One connection to the store: its stream, its watches and its queued events. The
//! [`Server`](super::Server) creates it for each client, serves it on its thread, and removes it
//! once it is dead.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;

use ringferry_sys::socket::Stream;
use ringferry_xen::domain::DomId;
use ringferry_xen::store::wire::{Code, Decoder, HEADER, Kind, MAX_PAYLOAD, Message};

use super::transaction::Transaction;

/// Most events queued for a connection that does not read. Equal ones merge; a connection with more
/// is closed.
const MAX_EVENTS: usize = 8192;

/// A watch of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Watch {
    /// Absolute path, or the name of a special watch.
    pub(super) path: String,
    pub(super) token: Vec<u8>,
    /// Number of leading bytes of the path that events leave out, because the watch was set with a
    /// relative path.
    pub(super) prefix: usize,
}

impl Watch {
    /// Returns the payload of an event about a change at `path`.
    pub(super) fn event(&self, path: &str) -> Vec<u8> {
        let path = path.get(self.prefix..).unwrap_or(path);
        [path.as_bytes(), b"\0", &self.token, b"\0"].concat()
    }
}

/// A client's connection, which speaks for one domain.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: Stream,
    pub(super) domain: DomId,
    pub(super) watches: Vec<Watch>,
    pub(super) transactions: HashMap<u32, Transaction>,
    pub(super) last_transaction: u32,
    decoder: Decoder,
    /// Bytes to send, of replies and of one event at most.
    out: VecDeque<u8>,
    events: VecDeque<Vec<u8>>,
    queued: HashSet<Vec<u8>>,
    /// True once the connection is closed or its client broke the protocol.
    pub(super) dead: bool,
    /// True while the poller waits for room to write.
    pub(super) waits_for_room: bool,
}

impl Connection {
    pub(super) fn new(stream: Stream, domain: DomId) -> Connection {
        Connection {
            stream,
            domain,
            watches: Vec::new(),
            transactions: HashMap::new(),
            last_transaction: 0,
            decoder: Decoder::default(),
            out: VecDeque::new(),
            events: VecDeque::new(),
            queued: HashSet::new(),
            dead: false,
            waits_for_room: false,
        }
    }

    /// Takes the next request, if a complete one has arrived. None is taken while a reply waits for
    /// room, so a client that does not read cannot send requests. It receives at most once, and
    /// then sets `received`, so that other connections get their turn; received bytes are always
    /// processed, because the poller does not know of them.
    pub(super) fn next(&mut self, received: &mut bool) -> Option<Message> {
        while !self.dead && self.out.is_empty() {
            match self.decoder.take() {
                Ok(Some(message)) => return Some(message),
                Ok(None) if *received => return None,
                Ok(None) => {}
                Err(_) => {
                    self.dead = true;
                    return None;
                }
            }
            *received = true;
            let mut bytes = [0; HEADER + MAX_PAYLOAD];
            let mut fds = Vec::new(); // whatever is passed is closed
            match self.stream.recv(&mut bytes, &mut fds) {
                Ok(received) if received.bytes > 0 => self.decoder.push(&bytes[..received.bytes]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Ok(_) | Err(_) => self.dead = true,
            }
        }
        None
    }

    pub(super) fn reply(&mut self, request: &Message, result: Result<Vec<u8>, Code>) {
        let (kind, payload) = match result {
            Ok(payload) if payload.len() <= MAX_PAYLOAD => (request.kind, payload),
            Ok(_) => (Kind::Error as u32, format!("{}\0", Code::TooLong.name()).into_bytes()),
            Err(code) => (Kind::Error as u32, format!("{}\0", code.name()).into_bytes()),
        };
        let (request, transaction) = (request.request, request.transaction);
        self.send(&Message { kind, request, transaction, payload });
    }

    fn send(&mut self, message: &Message) {
        let mut bytes = Vec::with_capacity(HEADER + message.payload.len());
        message.encode(&mut bytes);
        self.out.extend(bytes);
    }

    /// Queues an event until there is room for it.
    pub(super) fn queue_event(&mut self, payload: Vec<u8>) {
        if self.queued.contains(&payload) {
            return;
        }
        self.dead |= self.events.len() >= MAX_EVENTS;
        self.queued.insert(payload.clone());
        self.events.push_back(payload);
    }

    /// Sends as much as there is room for.
    pub(super) fn flush(&mut self) {
        while !self.dead {
            if self.out.is_empty() {
                let Some(payload) = self.events.pop_front() else { return };
                self.queued.remove(&payload);
                self.send(&Message { kind: Kind::WatchEvent as u32, request: 0, transaction: 0, payload });
            }
            match self.stream.send(self.out.as_slices().0, &[]) {
                Ok(n) => drop(self.out.drain(..n)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.dead = true,
            }
        }
    }

    /// Returns true if bytes wait for room.
    pub(super) fn has_output(&self) -> bool {
        !self.out.is_empty()
    }
}
