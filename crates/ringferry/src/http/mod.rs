//! Serves a few pages over HTTP/1.1 to whoever is at this host: what `metrics` and `page` have in common.
//!
//! **No client holds up another one.** One thread serves all connections and never waits for any of them: at most [`MAX_CONNECTIONS`] are open, one more replaces the oldest that has asked for nothing, each
//! has one request of at most [`MAX_REQUEST`](request::MAX_REQUEST) bytes, and ends after [`PATIENCE`], or later if its [`Service`] says so. A service that has to ask somebody else first answers
//! with what it waits for, and is asked again when its bell rings ([`Asker`] has one).

mod asker;
mod request;
mod socket;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::signal::Signals;

pub use asker::Asker;
pub use request::Request;
#[cfg(test)]
pub use request::tests::request;
use request::{Parsed, parse};
use socket::Peer;
pub use socket::{Endpoint, ServeError, Socket};

/// Most connections at a time. Each has up to [`request::MAX_REQUEST`] bytes of memory and a share in one of the answers.
const MAX_CONNECTIONS: usize = 256;
/// The longest time that a connection may take, from its beginning to the last byte of its answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A source of answers.
pub trait Service {
    /// An answer that has to be waited for. Dropped if its client has gone.
    type Pending;

    /// Fields of every answer, each with its line end.
    const FIELDS: &str = "";

    /// Begins to answer a request. `is_unix` says whether it came by a Unix socket.
    fn begin(&self, request: &Request, is_unix: bool) -> Begun<Self::Pending>;

    /// Returns the answer if there is one now.
    fn poll(&self, pending: &Self::Pending) -> Option<Response>;

    /// Becomes readable when an answer may have come.
    fn bell(&self) -> &EventFd;
}

/// The outcome of a request.
pub enum Begun<P> {
    Answered(Response),
    /// It is waited for, so much longer than others may take. If that is longer, it ends as soon as its client has closed its half of the connection; others may do that and read on.
    Pending(P, Duration),
}

/// An answer.
#[derive(Clone)]
pub struct Response {
    /// Number and words, as `200 OK`.
    pub status: &'static str,
    pub content_type: &'static str,
    /// Further fields, each with its line end.
    pub fields: String,
    pub body: Arc<[u8]>,
    /// Something that is kept until the answer is out.
    pub kept: Option<Arc<dyn Send + Sync>>,
}

impl Response {
    pub fn new(status: &'static str, content_type: &'static str, body: impl Into<Arc<[u8]>>) -> Response {
        Response { status, content_type, fields: String::new(), body: body.into(), kept: None }
    }

    /// A line of text.
    pub fn text(status: &'static str, text: &str) -> Response {
        Response::new(status, "text/plain; charset=utf-8", format!("{text}\n").into_bytes())
    }

    /// Nothing but the status.
    pub fn refused(status: &'static str) -> Response {
        Response::text(status, status)
    }

    /// A request with another method than those that are served (RFC 9110, 15.5.6).
    pub fn other_method(allowed: &str) -> Response {
        let fields = format!("Allow: {allowed}\r\n");
        Response { fields, ..Response::refused("405 Method Not Allowed") }
    }
}

/// The state of a connection. Each goes through the states in this order, and ends.
enum State<P> {
    /// The request has come as far as this.
    Reading(Vec<u8>),
    /// The service waits for something.
    Waiting { pending: P, is_head: bool, until: Interest },
    /// The head of the answer, its body, and how much of both is out.
    Writing { head: String, body: Arc<[u8]>, sent: usize, _kept: Option<Arc<dyn Send + Sync>> },
}

struct Connection<P> {
    peer: Peer,
    state: State<P>,
    /// When it ends at the latest.
    due: Instant,
}

/// The outcome of a step of a connection.
enum Step {
    /// It waits to be readable, writable, or for the service.
    Waits(Interest),
    /// It has had its answer, or has gone.
    Done,
}

impl<P> Connection<P> {
    fn new(peer: Peer) -> Connection<P> {
        Connection { peer, state: State::Reading(Vec::new()), due: Instant::now() + PATIENCE }
    }

    /// Goes as far as that is possible without waiting.
    fn step<S: Service<Pending = P>>(&mut self, service: &S) -> io::Result<Step> {
        loop {
            match &mut self.state {
                State::Reading(request) => {
                    let mut piece = [0; 2048];
                    let read = match self.peer.read(&mut piece) {
                        Ok(0) => return Ok(Step::Done),
                        Ok(read) => read,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            return Ok(Step::Waits(Interest::READABLE));
                        }
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                        Err(error) => return Err(error),
                    };
                    request.extend_from_slice(&piece[..read]);
                    self.state = match parse(request) {
                        Parsed::Partly => continue,
                        Parsed::OtherMethod => answer::<S>(Response::other_method("GET, HEAD"), false),
                        Parsed::Refused(status) => answer::<S>(Response::refused(status), false),
                        Parsed::Whole(request) => match service.begin(&request, self.peer.is_unix()) {
                            Begun::Answered(response) => answer::<S>(response, request.is_head),
                            Begun::Pending(pending, longer) => {
                                self.due += longer;
                                let until =
                                    if longer.is_zero() { Interest::empty() } else { Interest::HANGUP };
                                State::Waiting { pending, is_head: request.is_head, until }
                            }
                        },
                    };
                }
                State::Waiting { pending, is_head, until } => match service.poll(pending) {
                    // A peer that has said all it wants to say may still read, where that costs nothing; one whose connection has failed is reported anyway.
                    None => return Ok(Step::Waits(*until)),
                    Some(response) => self.state = answer::<S>(response, *is_head),
                },
                State::Writing { head, body, sent, .. } => {
                    let rest = match sent.checked_sub(head.len()) {
                        None => &head.as_bytes()[*sent..],
                        Some(of_body) => &body[of_body..],
                    };
                    if rest.is_empty() {
                        return Ok(Step::Done);
                    }
                    match self.peer.write(rest) {
                        Ok(written) => *sent += written,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            return Ok(Step::Waits(Interest::WRITABLE));
                        }
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        }
    }

    fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting { .. })
    }
}

fn answer<S: Service>(response: Response, is_head: bool) -> State<S::Pending> {
    let Response { status, content_type, fields, body, kept } = response;
    let (length, of_all) = (body.len(), S::FIELDS);
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n{fields}{of_all}Connection: close\r\n\r\n"
    );
    let body = if is_head { [].into() } else { body };
    State::Writing { head, body, sent: 0, _kept: kept }
}

/// Epoll tokens: of signals, of the service's bell; sockets that listen count from [`FIRST_SOCKET`], and connections from [`FIRST_CONNECTION`].
const SIGNALS: u64 = 0;
const BELL: u64 = 1;
const FIRST_SOCKET: u64 = 2;
const FIRST_CONNECTION: u64 = 1 << 32;

/// See the head of this file.
pub struct Server<S: Service> {
    epoll: Epoll,
    service: S,
    sockets: Vec<Socket>,
    /// In the order in which they came.
    connections: BTreeMap<u64, Connection<S::Pending>>,
    next: u64,
}

impl<S: Service> Server<S> {
    /// # Errors
    /// The system has no descriptors left.
    pub fn new(service: S) -> io::Result<Server<S>> {
        let epoll = Epoll::new()?;
        epoll.add(service.bell(), BELL, Interest::READABLE)?;
        Ok(Server {
            epoll,
            service,
            sockets: Vec::new(),
            connections: BTreeMap::new(),
            next: FIRST_CONNECTION,
        })
    }

    /// Serves at this socket as well. The log says that `what` is served there.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn listen(&mut self, socket: Socket, what: &str) -> io::Result<()> {
        self.epoll.add(&socket, FIRST_SOCKET + self.sockets.len() as u64, Interest::READABLE)?;
        tracing::info!(at = socket.name()?, "{what}");
        self.sockets.push(socket);
        Ok(())
    }

    /// Serves until one of the signals comes.
    ///
    /// # Errors
    /// None that a client can cause.
    pub fn serve(&mut self, signals: &Signals) -> io::Result<()> {
        self.epoll.add(signals, SIGNALS, Interest::READABLE)?;
        let mut events = EventBuf::with_capacity(MAX_CONNECTIONS);
        loop {
            let first = self.connections.values().map(|connection| connection.due).min();
            let timeout = first.map(|due| due.saturating_duration_since(Instant::now()));
            self.epoll.wait(&mut events, timeout)?;
            for event in events.iter() {
                match event.token {
                    SIGNALS => {
                        if signals.next()?.is_some() {
                            return Ok(());
                        }
                    }
                    BELL => {
                        self.service.bell().drain()?;
                        let waiting = self.connections.iter().filter(|(_, one)| one.is_waiting());
                        let waiting: Vec<_> = waiting.map(|(token, _)| *token).collect();
                        waiting.into_iter().for_each(|token| self.step(token));
                    }
                    FIRST_CONNECTION.. => {
                        // One that waits for the service is only told that its peer has gone.
                        let waits = self.connections.get(&event.token).is_some_and(Connection::is_waiting);
                        if waits && event.hangup {
                            self.end(event.token);
                        } else {
                            self.step(event.token);
                        }
                    }
                    socket => self.accept((socket - FIRST_SOCKET) as usize),
                }
            }
            let now = Instant::now();
            let due = self.connections.iter().filter(|(_, one)| now >= one.due).map(|(token, _)| *token);
            due.collect::<Vec<_>>().into_iter().for_each(|token| self.end(token));
        }
    }

    /// Accepts one connection. Others are reported again.
    fn accept(&mut self, socket: usize) {
        let peer = match self.sockets[socket].accept() {
            Ok(peer) => peer,
            // Its peer has gone already, or another event has served it.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted
                ) =>
            {
                return;
            }
            Err(error) => {
                // Without a free descriptor the socket stays readable; one of ours makes room.
                tracing::debug!("a connection was not accepted: {error}");
                self.end_oldest();
                return;
            }
        };
        if self.connections.len() >= MAX_CONNECTIONS {
            self.end_oldest();
        }
        let token = self.next;
        if self.epoll.add(&peer, token, Interest::READABLE).is_ok() {
            self.next += 1;
            self.connections.insert(token, Connection::new(peer));
        }
    }

    fn step(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        let waits = match connection.step(&self.service) {
            Ok(Step::Waits(interest)) => self.epoll.modify(&connection.peer, token, interest).is_ok(),
            Ok(Step::Done) | Err(_) => false,
        };
        if !waits {
            self.end(token);
        }
    }

    /// Ends a connection that has asked for nothing yet, or does not read its answer, before one whose answer is on its way; the oldest of them.
    fn end_oldest(&mut self) {
        let rank = |(token, connection): (&u64, &Connection<_>)| match connection.state {
            State::Reading(_) => (0, *token),
            State::Writing { .. } => (1, *token),
            State::Waiting { .. } => (2, *token),
        };
        if let Some((_, token)) = self.connections.iter().map(rank).min() {
            self.end(token);
        }
    }

    fn end(&mut self, token: u64) {
        if let Some(connection) = self.connections.remove(&token) {
            let _ = self.epoll.remove(&connection.peer);
        }
    }
}
