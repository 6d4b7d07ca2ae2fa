//! [`Client`]: a connection to a store. A request blocks until its reply has come, at most 30
//! seconds; watch events that arrive meanwhile are queued.
//!
//! Each thread that needs the store opens its own client. It calls [`Client::event`] until that
//! returns `None`, polls the descriptor, and after a fatal error ([`StoreError::is_fatal`]) drops
//! the client and opens another. Another thread ends its waits with a [`Cancel`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_sys::socket::Stream;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::io::Errno;
use smallvec::SmallVec;

use super::cancel::Cancel;
use super::events::{Event, Events};
use super::path::{self, PathError};
use super::wire::{self, Code, Decoder, HEADER, Kind, MAX_PAYLOAD, MAX_REQUEST, Message};

/// The kernel's device for access to Xen's store.
pub const DEVICE: &str = "/dev/xen/xenbus";

/// Longest wait for a reply. Xen's store takes less than a millisecond; under an emulated and busy
/// CPU, while the toolstack works, seconds have been seen.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// The reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store refused the request.
    #[error("the store refused {kind:?} of {path}: {name}", name = .code.name())]
    Refused {
        /// Type of the request that was refused.
        kind: Kind,
        /// Path that the request named.
        path: String,
        /// Error code of the store.
        code: Code,
    },
    /// The path is not valid; nothing was sent.
    #[error(transparent)]
    Path(#[from] PathError),
    /// The request does not fit into a message; nothing was sent.
    #[error("the value for {path} is too long for the store: {MAX_REQUEST} bytes with the path are possible")]
    TooLong {
        /// Path that the request named.
        path: String,
    },
    /// The node holds a value that is invalid there.
    #[error("{path} in the store does not hold {expected}")]
    Malformed {
        /// Path of the node that was read.
        path: String,
        /// The kind of value that was expected.
        expected: &'static str,
    },
    /// The peer sent a message that a store does not send.
    #[error("the store's answer makes no sense ({0}); is it a xenstored, and of this machine?")]
    Protocol(&'static str),
    /// The reply did not come in time.
    #[error("the store does not answer within {} s; is xenstored running?", MAX_WAIT.as_secs())]
    Timeout,
    /// The connection is closed, or was given up after an error, or its requests were [cancelled](Cancel).
    #[error("the connection to the store is closed: connect again")]
    Closed,
    /// The transaction, or a list read in parts, collided with changes of others too often.
    #[error("the store is too busy: transactions of others collide with ours again and again")]
    Busy,
    /// A system call on the connection failed.
    #[error("connection to the store: {0}")]
    Os(#[from] io::Error),
}

impl StoreError {
    /// Returns true if the store refused with this code.
    pub fn is(&self, code: Code) -> bool {
        matches!(self, StoreError::Refused { code: its, .. } if *its == code)
    }

    /// Returns true if the connection itself has failed, so that no later request can succeed.
    pub fn is_fatal(&self) -> bool {
        matches!(self, StoreError::Protocol(_) | StoreError::Timeout | StoreError::Closed | StoreError::Os(_))
    }
}

impl From<Errno> for StoreError {
    fn from(error: Errno) -> Self {
        StoreError::Os(error.into())
    }
}

/// A connection to a store. It may be moved to another thread; each thread that needs the store
/// opens its own.
///
/// Its descriptor ([`AsFd`]) is readable when events *may* have come. Requests may receive events,
/// too, so call [`event`](Client::event) until it returns `None` before waiting for the descriptor.
#[derive(Debug)]
pub struct Client {
    fd: OwnedFd,
    decoder: Decoder,
    events: Events,
    /// Identifier of the last request.
    request: u32,
    /// True after an error in the stream of messages; nothing is sent any more.
    closed: bool,
    cancel: Option<Arc<Cancel>>,
}

impl Client {
    /// Connects to Xen's store through the kernel ([`DEVICE`]).
    ///
    /// # Errors
    /// The device does not exist, because this is not a Xen domain or the module `xenfs` is
    /// missing; or permission is denied.
    pub fn open() -> io::Result<Client> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = rustix::fs::open(DEVICE, flags, rustix::fs::Mode::empty())?;
        Ok(Client::new(fd))
    }

    /// Connects to a store that listens on a Unix socket: Xen's in the domain it runs in
    /// (`/run/xenstored/socket`), or ours.
    ///
    /// # Errors
    /// Any error of [`Stream::connect`].
    pub fn connect(path: impl AsRef<Path>) -> io::Result<Client> {
        Client::from_stream(Stream::connect(path)?)
    }

    /// Creates a client on an existing connection to a store.
    ///
    /// # Errors
    /// The stream cannot be made non-blocking, which a caller cannot cause.
    pub fn from_stream(stream: Stream) -> io::Result<Client> {
        stream.set_nonblocking(true)?;
        Ok(Client::new(stream.as_fd().try_clone_to_owned()?))
    }

    fn new(fd: OwnedFd) -> Client {
        let (decoder, events) = (Decoder::default(), Events::default());
        Client { fd, decoder, events, request: 0, closed: false, cancel: None }
    }

    /// Lets `cancel` end the requests of this client. A cancelled client is closed.
    pub fn set_cancel(&mut self, cancel: Arc<Cancel>) {
        self.cancel = Some(cancel);
    }

    /// Watches a node and everything below it. The node need not exist. The first event comes at
    /// once. `token` is returned with each event, and must differ from those of the client's other
    /// watches.
    ///
    /// # Errors
    /// Any [`StoreError`].
    pub fn watch(&mut self, path: &str, token: u64) -> Result<(), StoreError> {
        self.call(Kind::Watch, 0, path, format!("{token}\0").as_bytes()).map(drop)
    }

    /// Ends a watch and removes its events that were not yet taken.
    ///
    /// # Errors
    /// Any [`StoreError`].
    pub fn unwatch(&mut self, path: &str, token: u64) -> Result<(), StoreError> {
        let result = self.call(Kind::Unwatch, 0, path, format!("{token}\0").as_bytes());
        self.events.forget(path, token);
        result.map(drop)
    }

    /// Takes the next event, if one has arrived. It never blocks.
    ///
    /// # Errors
    /// The connection failed ([`StoreError::is_fatal`]).
    pub fn event(&mut self) -> Result<Option<Event>, StoreError> {
        if let Some(event) = self.events.pop() {
            return Ok(Some(event));
        }
        self.check_open()?;
        // A reply received here is one to a request that was given up.
        while self.receive(|_| ())? {
            if let Some(event) = self.events.pop() {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    pub(super) fn transaction_start(&mut self) -> Result<u32, StoreError> {
        let payload = self.exchange(Kind::TransactionStart, 0, "", b"\0")?;
        let number = payload.strip_suffix(b"\0").and_then(wire::number_of);
        number.filter(|id| *id != 0).ok_or_else(|| self.broken("number of a transaction"))
    }

    pub(super) fn transaction_end(&mut self, id: u32, commit: bool) -> Result<(), StoreError> {
        let payload: &[u8] = if commit { b"T\0" } else { b"F\0" };
        self.exchange(Kind::TransactionEnd, id, "", payload).map(drop)
    }

    pub(super) fn call(
        &mut self,
        kind: Kind,
        transaction: u32,
        path: &str,
        rest: &[u8],
    ) -> Result<Vec<u8>, StoreError> {
        path::check(path)?;
        let mut payload = Vec::with_capacity(path.len() + 1 + rest.len());
        payload.extend_from_slice(path.as_bytes());
        payload.push(0);
        payload.extend_from_slice(rest);
        self.exchange(kind, transaction, path, &payload)
    }

    /// Sends a request and waits for its reply.
    fn exchange(
        &mut self,
        kind: Kind,
        transaction: u32,
        path: &str,
        payload: &[u8],
    ) -> Result<Vec<u8>, StoreError> {
        self.check_open()?;
        if payload.len() > MAX_REQUEST {
            return Err(StoreError::TooLong { path: path.to_owned() });
        }
        self.request = self.request.wrapping_add(1);
        let request = self.request;
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        Message { kind: kind as u32, request, transaction, payload: payload.to_vec() }.encode(&mut bytes);
        let reply = self.send_and_wait(&bytes, request).inspect_err(|_| self.closed = true)?;
        if reply.kind == Kind::Error as u32 {
            let name = reply.payload.strip_suffix(b"\0").unwrap_or(&reply.payload);
            return Err(StoreError::Refused { kind, path: path.to_owned(), code: Code::from_name(name) });
        }
        if reply.kind != kind as u32 {
            return Err(self.broken("an answer of another kind"));
        }
        Ok(reply.payload)
    }

    fn send_and_wait(&mut self, mut bytes: &[u8], request: u32) -> Result<Message, StoreError> {
        let deadline = Instant::now() + MAX_WAIT;
        let mut reply = None;
        loop {
            if !bytes.is_empty() {
                match rustix::io::write(&self.fd, bytes) {
                    Ok(n) => bytes = &bytes[n..],
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(Errno::PIPE | Errno::CONNRESET) => return Err(StoreError::Closed),
                    Err(error) => return Err(error.into()),
                }
            }
            // Read also while there is no room to write: a store that waits for us to read takes
            // nothing more.
            let more = self.receive(|message| {
                // Replies to requests that were given up may still come.
                if message.request == request {
                    reply = Some(message);
                }
            })?;
            if let Some(reply) = reply {
                return Ok(reply);
            }
            if !more {
                self.wait(!bytes.is_empty(), deadline)?;
            }
        }
    }

    /// Reads the bytes that have arrived, once: queues events, and passes replies to `on_reply`.
    /// Returns false when there was nothing.
    fn receive(&mut self, mut on_reply: impl FnMut(Message)) -> Result<bool, StoreError> {
        let mut bytes = [0; HEADER + MAX_PAYLOAD];
        let n = match rustix::io::read(&self.fd, &mut bytes[..]) {
            Ok(0) | Err(Errno::CONNRESET) => {
                self.closed = true;
                return Err(StoreError::Closed);
            }
            Ok(n) => n,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        self.decoder.push(&bytes[..n]);
        loop {
            match self.decoder.take() {
                Ok(Some(message)) if message.kind == Kind::WatchEvent as u32 => self.queue_event(&message),
                Ok(Some(message)) => on_reply(message),
                Ok(None) => return Ok(true),
                Err(_) => return Err(self.broken("a message too long")),
            }
        }
    }

    /// Queues an event. An invalid one is dropped.
    fn queue_event(&mut self, message: &Message) {
        let Some(&[path, token, ..]) = wire::strings(&message.payload).as_deref() else { return };
        let (Ok(path), Some(token)) = (std::str::from_utf8(path), wire::number_of(token)) else { return };
        if path::check(path).is_ok() {
            self.events.push(Event::Changed { path: path.to_owned(), token });
        }
    }

    fn wait(&self, to_write: bool, deadline: Instant) -> Result<(), StoreError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(StoreError::Timeout);
        }
        let flags = if to_write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        // The wait is at most MAX_WAIT, which fits the type.
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut fds: SmallVec<[PollFd<'_>; 2]> = SmallVec::new();
        fds.push(PollFd::new(&self.fd, flags));
        fds.extend(self.cancel.as_deref().map(|cancel| PollFd::new(cancel, PollFlags::IN)));
        match rustix::event::poll(&mut fds, Some(&time)) {
            Ok(_) | Err(Errno::INTR) => self.check_open(),
            Err(error) => Err(error.into()),
        }
    }

    fn check_open(&self) -> Result<(), StoreError> {
        let cancelled = self.cancel.as_ref().is_some_and(|cancel| cancel.is_cancelled());
        if self.closed || cancelled { Err(StoreError::Closed) } else { Ok(()) }
    }

    fn broken(&mut self, what: &'static str) -> StoreError {
        self.closed = true;
        StoreError::Protocol(what)
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Nodes;

    /// Creates a client whose store sends `answers`, whatever it is asked.
    fn told(answers: &[Message]) -> (Client, Stream) {
        let (ours, theirs) = Stream::pair().unwrap();
        let mut bytes = Vec::new();
        answers.iter().for_each(|message| assert!(message.encode(&mut bytes)));
        theirs.send(&bytes, &[]).unwrap();
        (Client::from_stream(ours).unwrap(), theirs)
    }

    fn message(kind: u32, request: u32, payload: &[u8]) -> Message {
        Message { kind, request, transaction: 0, payload: payload.to_vec() }
    }

    #[test]
    fn events_and_late_answers_between_are_told_apart_from_the_answer() {
        let (mut client, _store) = told(&[
            message(15, 0, b"/a\x007\0"),
            message(2, 99, b"late"),
            message(15, 0, b"/b\x008\0"),
            message(2, 1, b"value"),
            message(15, 0, b"/c\x009\0"),
        ]);
        assert_eq!(client.read("/x").unwrap().unwrap(), b"value");
        let mut told = Vec::new();
        while let Some(Event::Changed { path, token }) = client.event().unwrap() {
            told.push((path, token));
        }
        assert_eq!(told, [("/a".into(), 7), ("/b".into(), 8), ("/c".into(), 9)]);
    }

    #[test]
    fn events_that_make_no_sense_are_dropped() {
        let bad = [&b""[..], b"/a", b"/a\0", b"/a\0x\0", b"/a\0-1\0", b"\xff\x001\0", b"/a b\x001\0"];
        let mut all: Vec<Message> = bad.iter().map(|payload| message(15, 0, payload)).collect();
        all.push(message(15, 0, b"/good\x001\0"));
        let (mut client, _store) = told(&all);
        assert_eq!(client.event().unwrap(), Some(Event::Changed { path: "/good".into(), token: 1 }));
        assert_eq!(client.event().unwrap(), None);
    }

    #[test]
    fn what_is_no_store_is_given_up() {
        for (answer, what) in [(message(3, 1, b""), "another kind"), (message(2, 1, b""), "no error here")] {
            let (mut client, _store) = told(&[answer]);
            assert_eq!(client.read("/x").is_err(), what != "no error here", "{what}");
        }
        let (mut client, _store) = told(&[message(6, 1, b"zero\0")]);
        let result = client.transaction(|_| Ok(()));
        assert!(matches!(result, Err(StoreError::Protocol(_))), "{result:?}");
        assert!(matches!(client.read("/x"), Err(StoreError::Closed)));

        let (mut client, store) = told(&[]);
        store.send(&[0xff; 16], &[]).unwrap();
        assert!(client.event().unwrap_err().is_fatal());
        assert!(matches!(client.event(), Err(StoreError::Closed)));
    }

    #[test]
    fn a_store_that_goes_away_is_noticed() {
        let (mut client, store) = told(&[message(15, 0, b"/a\x007\0")]);
        drop(store);
        assert!(client.event().unwrap().is_some());
        assert!(matches!(client.event(), Err(StoreError::Closed)));
        assert!(matches!(client.read("/x"), Err(StoreError::Closed)));
    }

    #[test]
    fn a_request_that_is_not_answered_is_cancelled_by_another_thread() {
        let (mut client, _store) = told(&[message(15, 0, b"/a\x007\0")]);
        let cancel = Arc::new(Cancel::new().unwrap());
        client.set_cancel(Arc::clone(&cancel));
        let (began, other) = (Instant::now(), Arc::clone(&cancel));
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            other.cancel();
        });
        assert!(matches!(client.read("/x"), Err(StoreError::Closed)));
        assert!(began.elapsed() < MAX_WAIT);
        thread.join().unwrap();
        assert!(matches!(client.read("/x"), Err(StoreError::Closed)), "nothing is sent any more");
        assert!(client.event().unwrap().is_some(), "what has come is there");
        assert!(matches!(client.event(), Err(StoreError::Closed)));
    }

    #[test]
    fn names_that_can_be_none_do_not_come_out_of_a_list() {
        for list in [&b"a\0b/c\0"[..], b"a", b"..\0", b"\0", b"a\xff\0"] {
            let (mut client, _store) = told(&[message(1, 1, list)]);
            assert!(matches!(client.directory("/x"), Err(StoreError::Malformed { .. })), "{list:?}");
        }
    }

    /// Creates a client whose store answers each request with `answer`, until the client is
    /// dropped.
    fn served(answer: impl Fn(&Message) -> Message + Send + 'static) -> Client {
        let (ours, store) = Stream::pair().unwrap();
        std::thread::spawn(move || {
            let mut decoder = Decoder::default();
            let mut bytes = [0; 4096];
            while let Ok(received) = store.recv(&mut bytes, &mut Vec::new()) {
                if received.bytes == 0 {
                    return;
                }
                decoder.push(&bytes[..received.bytes]);
                while let Some(request) = decoder.take().unwrap() {
                    let mut out = Vec::new();
                    answer(&request).encode(&mut out);
                    store.send(&out, &[]).unwrap();
                }
            }
        });
        Client::from_stream(ours).unwrap()
    }

    #[test]
    fn a_list_in_parts_that_never_ends_is_given_up() {
        let part = |of: fn(u32) -> Vec<u8>| {
            move |asked: &Message| match asked.kind {
                22 => message(22, asked.request, &of(asked.request)),
                _ => message(16, asked.request, b"E2BIG\0"),
            }
        };
        let mut client = served(part(|_| [b"5\0", &b"abcdefg\0".repeat(500)[..]].concat()));
        assert!(matches!(client.directory("/x"), Err(StoreError::Malformed { .. })));
        let mut client = served(part(|request| format!("{request}\0abc\0").into_bytes()));
        assert!(matches!(client.directory("/x"), Err(StoreError::Busy)));
        let mut client = served(part(|_| b"5\0".to_vec()));
        assert!(matches!(client.directory("/x"), Err(StoreError::Malformed { .. })));
    }
}
