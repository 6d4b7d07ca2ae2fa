//! The answering end of a control socket.
//!
//! A program binds a [`ControlServer`] at its start and drops it at its end. The server never blocks and owns an epoll instance
//! of its own, which is readable whenever there is something to do: the owner adds that one descriptor to its event loop, calls
//! [`serve`](ControlServer::serve) when it is readable and [`tick`](ControlServer::tick) about once a second.
//!
//! Clients are limited in number ([`MAX_CLIENTS`]), in the length of a line ([`MAX_REQUEST`]) and in the time they may stay silent
//! ([`MAX_SILENCE`]); each call of `serve` handles one request per client. Who may connect is decided by the permissions of the
//! socket file and by nothing else. What a client has passed is closed on a thread of its own, where waiting harms nobody.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use ringferry_sys::closer::{Closer, Deferred, LeftBehind};
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::socket::{BindError, Listener, Stream};

use crate::path::{check_directory, make_directory};
use crate::protocol::{Answer, Request, Response};

/// Longest request, in bytes with the newline.
pub const MAX_REQUEST: usize = 128 * 1024;
/// Most clients at a time. One more replaces the one that has been silent for longest.
pub const MAX_CLIENTS: usize = 16;
/// Ticks (about seconds) after which a silent client is dropped. A person typing JSON into `socat` still gets
/// an answer.
pub const MAX_SILENCE: u32 = 60;

/// A response, with the descriptors that go with it.
#[derive(Debug)]
pub struct Reply {
    /// The response.
    pub response: Response,
    /// The descriptors, for the client to keep.
    pub fds: Vec<OwnedFd>,
}

impl From<Response> for Reply {
    fn from(response: Response) -> Self {
        Reply { response, fds: Vec::new() }
    }
}

/// The switch's end of the control socket. Dropping it closes all connections and removes the socket file.
#[derive(Debug)]
pub struct ControlServer {
    listener: Listener,
    /// False while the process has no descriptors left, so that a waiting connection does not keep the event
    /// loop spinning.
    listening: bool,
    /// It was logged that the socket's file was removed.
    is_file_missed: bool,
    epoll: Epoll,
    clients: BTreeMap<u64, Client>,
    next_token: u64,
    /// The connection of a client that was told to [take over](Answer::Replacing).
    successor: Option<Stream>,
    /// Closes connections, with what lies unread in them.
    closer: Closer,
    /// Those that are held up by what a client has passed.
    left_behind: LeftBehind,
}

/// Closers that are left behind at most.
const MOST_LEFT_BEHIND: usize = 8;

/// Token of the listener; clients count from there.
const LISTENER: u64 = 0;

impl ControlServer {
    /// Listens on `path` with permissions `mode`, such as `0o600` for the same user only.
    /// The directory is made if it is missing and `path` the [default](crate::default_path); no other is.
    ///
    /// # Errors
    /// The path cannot be bound; the message says why and what to do.
    pub fn bind(path: &Path, mode: u32) -> Result<ControlServer, BindError> {
        make_directory(path);
        check_directory(path).map_err(|source| BindError::Os { path: path.to_owned(), source })?;
        let listener = Listener::bind_with_mode(path, mode)?;
        Self::of(listener).map_err(|source| BindError::Os { path: path.to_owned(), source })
    }

    /// Serves on a socket that listens already.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn of(listener: Listener) -> io::Result<ControlServer> {
        let start = || {
            let epoll = Epoll::new()?;
            epoll.add(&listener, LISTENER, Interest::READABLE)?;
            Ok::<_, io::Error>(epoll)
        };
        let epoll = start()?;
        Ok(ControlServer {
            listener,
            listening: true,
            is_file_missed: false,
            epoll,
            clients: BTreeMap::new(),
            next_token: LISTENER + 1,
            successor: None,
            closer: Closer::new(),
            left_behind: LeftBehind::at_most(MOST_LEFT_BEHIND),
        })
    }

    /// Does whatever can be done without waiting: accepts clients, reads requests, answers them through
    /// `handle`, and drops clients that left or broke the protocol. Call it whenever the descriptor is
    /// readable.
    pub fn serve<R: Into<Reply>>(&mut self, handle: &mut dyn FnMut(Request) -> R) {
        self.serve_later(&mut |request, _| Some(handle(request).into()));
    }

    /// Does the same as [`serve`](Self::serve), for a `handle` that may answer a request later, by [`answer`](Self::answer): `None` says so. Until
    /// then the client is asked nothing more.
    pub fn serve_later(&mut self, handle: &mut dyn FnMut(Request, Ticket) -> Option<Reply>) {
        let mut events = EventBuf::with_capacity(MAX_CLIENTS + 1);
        if let Err(error) = self.epoll.wait(&mut events, Some(Duration::ZERO)) {
            tracing::warn!("control socket: {error}");
            return;
        }
        for event in events.iter() {
            if event.token == LISTENER {
                self.accept();
            } else if let Some(client) = self.clients.get_mut(&event.token) {
                let pid = client.stream.peer_credentials().ok().and_then(|peer| peer.pid);
                let ticket = Ticket { token: event.token, pid };
                let proceed = client.step(&mut |request| handle(request, ticket));
                let proceed = proceed.and_then(|()| client.rearm(&self.epoll, event.token));
                if proceed.is_err() {
                    self.drop_client(event.token);
                } else if client.is_successor && !client.has_output() {
                    self.part_with(event.token);
                }
            }
        }
    }

    /// Answers a request that was left for later. A client that has gone needs no answer.
    pub fn answer(&mut self, ticket: Ticket, response: &Response) {
        let Some(client) = self.clients.get_mut(&ticket.token).filter(|client| client.waiting) else {
            return;
        };
        client.waiting = false;
        let answered = client.answer(response).and_then(|()| client.flush());
        if answered.and_then(|()| client.rearm(&self.epoll, ticket.token)).is_err() {
            self.drop_client(ticket.token);
        }
    }

    /// Call it about once a second: drops clients that have been silent for [`MAX_SILENCE`] calls and tries
    /// again to accept clients after the process had run out of descriptors.
    pub fn tick(&mut self) {
        let silent = self.clients.values_mut().filter(|client| !client.waiting);
        silent.for_each(|client| client.silence += 1);
        let silent: Vec<_> = self
            .clients
            .iter()
            .filter(|(_, client)| client.silence > MAX_SILENCE)
            .map(|(token, _)| *token)
            .collect();
        silent.into_iter().for_each(|token| self.drop_client(token));
        if self.listener.is_file_gone() && !std::mem::replace(&mut self.is_file_missed, true) {
            tracing::error!(
                "somebody has removed the control socket: `ringferry ctl` finds no switch until this one gets SIGHUP (`systemctl reload`), which makes it anew; packets go on"
            );
        }
        if !self.listening {
            self.listening = self.epoll.add(&self.listener, LISTENER, Interest::READABLE).is_ok();
        }
    }

    /// Leaves the socket file where it is at the end ([`Listener::leave_file`]).
    pub fn leave_file(&mut self) {
        self.listener.leave_file();
    }

    /// The socket on which it listens, for a successor.
    pub fn listener(&mut self) -> &mut Listener {
        &mut self.listener
    }

    /// Listens on another socket from now on, as the file of the one before was removed. Clients that are connected stay.
    ///
    /// # Errors
    /// No descriptor is left; everything is as before.
    pub fn listen_on(&mut self, listener: Listener) -> io::Result<()> {
        self.epoll.add(&listener, LISTENER, Interest::READABLE)?;
        let mut before = std::mem::replace(&mut self.listener, listener);
        let _ = self.epoll.remove(&before);
        // In its place is the file of the new one.
        before.leave_file();
        (self.listening, self.is_file_missed) = (true, false);
        Ok(())
    }

    /// Returns the connection of a client that takes over, once it has its answer. It is not served any more.
    pub fn successor(&mut self) -> Option<Stream> {
        self.successor.take()
    }

    /// The socket file.
    pub fn path(&self) -> Option<&Path> {
        self.listener.path()
    }

    fn accept(&mut self) {
        // One that is held up all the same says that it is behind, sooner or later.
        self.left_behind.relieve(&mut self.closer);
        // As many as there is room for; more wait for the next turn.
        for _ in 0..MAX_CLIENTS {
            if self.closer.is_behind() {
                // Clients that pass what cannot be closed have nobody connect, and take no memory. The next tick looks again.
                self.listening = self.epoll.remove(&self.listener).is_err();
                return;
            }
            let stream = match self.listener.accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(
                        "control socket: cannot accept a client, trying again in a second: {error} (if descriptors are short, raise the \
                         limit: ulimit -n, or LimitNOFILE= of the systemd unit)"
                    );
                    self.listening = self.epoll.remove(&self.listener).is_err();
                    return;
                }
            };
            if self.clients.len() == MAX_CLIENTS
                && let Some(token) =
                    self.clients.iter().max_by_key(|(_, client)| client.silence).map(|(token, _)| *token)
            {
                self.drop_client(token);
            }
            let token = self.next_token;
            let stream = self.closer.defer(stream);
            let added = stream
                .set_nonblocking(true)
                .and_then(|()| self.epoll.add(&*stream, token, Interest::READABLE));
            if added.is_ok() {
                self.next_token += 1;
                self.clients.insert(token, Client::new(stream, self.closer.clone()));
            }
        }
    }

    fn part_with(&mut self, token: u64) {
        if let Some(client) = self.clients.remove(&token) {
            let _ = self.epoll.remove(&*client.stream);
            self.successor = Some(client.stream.into_inner());
        }
    }

    fn drop_client(&mut self, token: u64) {
        if let Some(client) = self.clients.remove(&token) {
            // Closing takes the stream out of the set; this is for a client that passed the stream on to
            // another process.
            let _ = self.epoll.remove(&*client.stream);
        }
    }
}

impl AsFd for ControlServer {
    /// Readable whenever [`serve`](ControlServer::serve) has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// A request that is answered later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    token: u64,
    pid: Option<u32>,
}

impl Ticket {
    /// The process that asks, as the kernel says, if it can be seen from here.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }
}

/// One connection: bytes of requests come in, bytes of at most one answer go out.
#[derive(Debug)]
struct Client {
    stream: Deferred<Stream>,
    closer: Closer,
    /// What was received and not yet handled: less than [`MAX_REQUEST`] and one read.
    input: Vec<u8>,
    /// The answer under way, from `sent` on still to be sent.
    output: Vec<u8>,
    sent: usize,
    /// Descriptors that go with the first byte of it.
    fds: Vec<OwnedFd>,
    /// What epoll watches: room to write, or something to read; nothing but its end while an answer is awaited.
    watched: Interest,
    /// The request is answered later.
    waiting: bool,
    /// Close once the answer is sent.
    closing: bool,
    /// It was told to take over: what it says from now on is not for us.
    is_successor: bool,
    /// Ticks since something was received or sent.
    silence: u32,
}

impl Client {
    fn new(stream: Deferred<Stream>, closer: Closer) -> Client {
        Client {
            stream,
            closer,
            input: Vec::new(),
            output: Vec::new(),
            sent: 0,
            fds: Vec::new(),
            watched: Interest::READABLE,
            waiting: false,
            closing: false,
            is_successor: false,
            silence: 0,
        }
    }

    /// Goes on until it would have to wait or one request is answered. An error means that the connection is
    /// over.
    fn step(&mut self, handle: &mut dyn FnMut(Request) -> Option<Reply>) -> io::Result<()> {
        if self.waiting {
            // Of a client that waits only its end is reported.
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        self.flush()?;
        if self.has_output() {
            return Ok(());
        }
        if !self.input.contains(&b'\n') {
            self.receive()?;
        }
        if let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.input.drain(..=end).collect();
            let reply = match serde_json::from_slice(&line) {
                Ok(request) => handle(request),
                Err(error) => {
                    let error = format!("this is not a request such as {{\"command\":\"show\"}}: {error}");
                    Some(Response::Error(error).into())
                }
            };
            let Some(Reply { response, fds }) = reply else {
                self.waiting = true;
                return Ok(());
            };
            self.is_successor = matches!(response, Response::Ok(Answer::Replacing { .. }));
            self.fds = fds;
            self.answer(&response)?;
        } else if self.input.len() >= MAX_REQUEST {
            self.input = Vec::new();
            self.closing = true;
            self.answer(&Response::Error(format!("the request is longer than {MAX_REQUEST} bytes")))?;
        }
        self.flush()
    }

    fn receive(&mut self) -> io::Result<()> {
        let (mut piece, mut passed) = ([0; 4096], Vec::new());
        let received = self.stream.recv(&mut piece, &mut passed);
        if !passed.is_empty() {
            // Nobody asks for any. Whoever passes one is not served, and passes no more.
            passed.into_iter().for_each(|fd| drop(self.closer.defer_passed(fd)));
            return Err(io::ErrorKind::InvalidData.into());
        }
        match received {
            Ok(received) if received.bytes == 0 => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => {
                self.silence = 0;
                self.input.extend_from_slice(&piece[..received.bytes]);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn answer(&mut self, response: &Response) -> io::Result<()> {
        self.output = serde_json::to_vec(response)?;
        self.output.push(b'\n');
        self.sent = 0;
        Ok(())
    }

    fn has_output(&self) -> bool {
        self.sent < self.output.len()
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.has_output() {
            let fds: Vec<_> = self.fds.iter().map(AsFd::as_fd).collect();
            match self.stream.send(&self.output[self.sent..], &fds) {
                Ok(sent) => {
                    self.fds.clear();
                    self.silence = 0;
                    self.sent += sent;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.output = Vec::new();
        self.sent = 0;
        if self.closing { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
    }

    /// Watches for room while an answer is under way, and also while another whole request has been received:
    /// there is room then, so the next turn comes at once, after the other clients'.
    fn rearm(&mut self, epoll: &Epoll, token: u64) -> io::Result<()> {
        let wanted = match self.waiting {
            true => Interest::empty(),
            false if self.has_output() || self.input.contains(&b'\n') => Interest::WRITABLE,
            false => Interest::READABLE,
        };
        if wanted != self.watched {
            epoll.modify(&*self.stream, token, wanted)?;
            self.watched = wanted;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
