//! One connection to the store: bytes in and out, its watches, and what they have to tell it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;

use ringferry_sys::socket::Stream;
use ringferry_xen::domain::DomId;
use ringferry_xen::store::wire::{Code, Decoder, HEADER, Kind, MAX_PAYLOAD, Message};

use super::transaction::Transaction;

/// Events kept for a connection that does not read. Equal ones merge; a connection with more is closed.
const MAX_EVENTS: usize = 8192;

/// Something a domain watches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Watch {
    /// Absolute, or the name of a special watch.
    pub(super) path: String,
    pub(super) token: Vec<u8>,
    /// How many bytes of the path are left out when it is told, as the watch was made with a relative path.
    pub(super) prefix: usize,
}

impl Watch {
    /// The event that tells of a change at `path`.
    pub(super) fn event(&self, path: &str) -> Vec<u8> {
        let path = path.get(self.prefix..).unwrap_or(path);
        [path.as_bytes(), b"\0", &self.token, b"\0"].concat()
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: Stream,
    pub(super) domain: DomId,
    pub(super) watches: Vec<Watch>,
    pub(super) transactions: HashMap<u32, Transaction>,
    pub(super) last_transaction: u32,
    decoder: Decoder,
    /// Bytes to send, of answers and of one event at most.
    out: VecDeque<u8>,
    events: VecDeque<Vec<u8>>,
    queued: HashSet<Vec<u8>>,
    /// Whether it has been found to be closed, or behaves as nobody does.
    pub(super) dead: bool,
    /// Whether the poller was told to wait for room to write.
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

    /// The next request, if a whole one is here. None is taken while an answer waits for room: who does not read
    /// cannot ask. Receives at most once, and then sets `received`, so that the others get their turn; what was
    /// received is always worked off, as the poller knows nothing of it.
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

    pub(super) fn answer(&mut self, request: &Message, result: Result<Vec<u8>, Code>) {
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

    /// Keeps an event until there is room for it.
    pub(super) fn tell(&mut self, payload: Vec<u8>) {
        if self.queued.contains(&payload) {
            return;
        }
        self.dead |= self.events.len() >= MAX_EVENTS;
        self.queued.insert(payload.clone());
        self.events.push_back(payload);
    }

    /// Sends what there is room for.
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

    /// Whether something waits for room.
    pub(super) fn has_output(&self) -> bool {
        !self.out.is_empty()
    }
}
