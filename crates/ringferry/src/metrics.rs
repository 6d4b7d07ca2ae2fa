//! `ringferry metrics`: serves what a running switch counts to Prometheus and its like.
//!
//! **A process of its own**, which asks the switch on its control socket: HTTP is parsed where no guest's memory is mapped, the switch's sandbox allows
//! nothing more for it, and it goes on whatever becomes of the switch; a newer program that takes over keeps the control socket, so no scrape fails.
//!
//! **No scraper holds up another one, or the switch.** One thread serves all connections and never waits for any of them: at most [`MAX_CONNECTIONS`] are open, one more
//! replaces the oldest, and each ends after [`PATIENCE`]. A second thread asks the switch, at most once in [`FRESH`] however many scrapers there are; all that ask meanwhile
//! get the same text, which is in memory once for each format.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ringferry_control::channels::Stats;
use ringferry_control::metrics::{Format, of_switch};
use ringferry_control::snapshot::Snapshot;
use ringferry_control::{self as control, Answer, ControlError, Request};
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::signal::{Signal, Signals};
use ringferry_sys::socket::{BindError, Listener, SocketAccess};

/// Most connections at a time. Each has up to [`MAX_REQUEST`] bytes of memory and a share in one of the pages, of which there is a new one every [`FRESH`] at most.
const MAX_CONNECTIONS: usize = 256;
/// Longest request, in bytes, with its headers.
const MAX_REQUEST: usize = 8 * 1024;
/// How long a connection may take, from its beginning to the last byte of its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// For so long an answer of the switch is passed on to whoever asks.
const FRESH: Duration = Duration::from_millis(250);
/// Permissions of a Unix socket: who may read counters need not be who may change the switch.
const MODE: u32 = 0o660;

/// Shown below the options by `ringferry metrics --help`.
const EXAMPLES: &str = "\
The answer is in the text format of Prometheus, or in OpenMetrics for whoever prefers that (Accept). GET / and /metrics are the same. There is
neither encryption nor a password: leave an address at loopback, or behind a proxy that has them.

Examples:
  ringferry metrics                                              at /run/ringferry/metrics.sock
  ringferry metrics --listen 127.0.0.1:9482 --queues             for a Prometheus on this host, with each queue pair
  ringferry metrics --listen /run/ringferry/metrics.sock --listen [::1]:9482
  curl --unix-socket /run/ringferry/metrics.sock http://switch/metrics
  ringferry metrics --once                                       print them, for a textfile collector";

/// Serves what a running switch counts, for Prometheus.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct MetricsArgs {
    /// Where to listen: the path of a Unix socket, or an address and a port. May be given several times [default: metrics.sock beside the control
    /// socket].
    #[arg(long, value_name = "PATH|ADDRESS:PORT")]
    listen: Vec<Endpoint>,

    /// Allow addresses other than loopback, at which other hosts can read the counters.
    #[arg(long)]
    public: bool,

    /// Counters of each queue pair, too: some twenty series for each.
    #[arg(long)]
    queues: bool,

    /// Print the metrics once, and end.
    #[arg(long, conflicts_with_all = ["listen", "public", "ready_fd"])]
    once: bool,

    /// Control socket of the switch [default: as for `ringferry ctl`].
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,

    /// Write "READY" and a newline to this descriptor when all sockets listen, then close it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(3..))]
    ready_fd: Option<i32>,
}

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Endpoint {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Endpoint, String> {
        if text.starts_with('/') {
            return Ok(Endpoint::Unix(text.into()));
        }
        text.parse().map(Endpoint::Tcp).map_err(|_| {
            format!("{text:?} is neither an absolute path nor ADDRESS:PORT, such as 127.0.0.1:9482")
        })
    }
}

/// Why nothing is served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no switch to ask.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A Unix socket cannot be had.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// An address cannot be had.
    #[error("cannot listen at {0}: {1}")]
    Address(SocketAddr, io::Error),
    /// Others could read what is meant for this host.
    #[error("{0} is no address of loopback: other hosts could read the counters; --public allows it")]
    Public(SocketAddr),
    /// What answers is a guest.
    #[error("the control socket is no switch's")]
    NoSwitch,
    /// The descriptor of --ready-fd is none.
    #[error("--ready-fd {0}: {1}: pass the number of an open pipe or socket")]
    ReadyFd(i32, io::Error),
    /// The system has no descriptors or threads left.
    #[error(transparent)]
    Os(#[from] io::Error),
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// See [`enum@Error`].
pub fn run(args: &MetricsArgs) -> Result<(), Error> {
    let control = args.control.clone().unwrap_or_else(control::default_path);
    if args.once {
        let (snapshot, queues) = ask(&control, args.queues)?;
        // A reader that has gone needs no answer.
        let _ = io::stdout().write_all(of_switch(&snapshot, &queues, Format::Text).as_bytes());
        return Ok(());
    }
    let ready = args
        .ready_fd
        .map(|fd| ringferry_sys::inherited::take(fd).map_err(|error| Error::ReadyFd(fd, error)))
        .transpose()?;
    let signals = Signals::new(&[Signal::TERM, Signal::INT])?;
    let beside = [Endpoint::Unix(control.with_file_name("metrics.sock"))];
    let endpoints = if args.listen.is_empty() { &beside[..] } else { &args.listen };
    let mut server = Server::new(Asker::start(control, args.queues)?)?;
    for endpoint in endpoints {
        server.listen(Socket::bind(endpoint, args.public)?)?;
    }
    if let Some(ready) = ready {
        // Who waits for it may have gone.
        let _ = std::fs::File::from(ready).write_all(b"READY\n");
    }
    server.serve(&signals)
}

/// What a switch says now.
fn ask(control: &Path, queues: bool) -> Result<(Snapshot, Vec<Stats>), Error> {
    let Answer::Show(snapshot) = control::call(control, &Request::Show)? else { return Err(Error::NoSwitch) };
    let mut stats = Vec::new();
    for port in snapshot.ports.iter().filter(|_| queues) {
        match control::call(control, &Request::Stats { port: port.name.clone(), queues: true }) {
            Ok(Answer::Stats(of)) => stats.push(of),
            // It was removed meanwhile.
            Ok(_) | Err(ControlError::Refused(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok((*snapshot, stats))
}

/// What scrapers get: the texts, or why there are none.
type Page = Result<BTreeMap<Format, Arc<str>>, Arc<str>>;

/// The thread that asks the switch, which may take as long as a switch that is stopped.
struct Asker {
    questions: SyncSender<()>,
    page: Arc<Mutex<Option<(Instant, Page)>>>,
    answered: Arc<EventFd>,
}

impl Asker {
    fn start(control: PathBuf, queues: bool) -> io::Result<Asker> {
        // One question is enough for all that wait.
        let (questions, asked): (_, Receiver<()>) = sync_channel(1);
        let asker = Asker { questions, page: Arc::default(), answered: Arc::new(EventFd::new()?) };
        let (page, answered) = (Arc::clone(&asker.page), Arc::clone(&asker.answered));
        thread::Builder::new().name("ask".to_owned()).spawn(move || {
            while asked.recv().is_ok() {
                let made = ask(&control, queues).map_err(|error| error.to_string().into()).map(
                    |(snapshot, queues)| {
                        let formats = [Format::Text, Format::OpenMetrics];
                        formats.map(|format| (format, of_switch(&snapshot, &queues, format).into())).into()
                    },
                );
                if let Ok(mut page) = page.lock() {
                    *page = Some((Instant::now(), made));
                }
                // Its counter is far from full: it is emptied each time.
                let _ = answered.signal();
            }
        })?;
        Ok(asker)
    }

    /// What there is, if it is fresh; otherwise the switch is asked, and the eventfd says when it has answered.
    fn page(&self, since: Instant) -> Option<Page> {
        let known = self.page.lock().ok()?.clone();
        match known {
            // An answer to a question that was asked before this one came is as good.
            Some((when, page)) if when >= since || when.elapsed() < FRESH => Some(page),
            _ => {
                // If one waits already, that is this one's as well.
                let _ = self.questions.try_send(());
                None
            }
        }
    }
}

/// A socket that listens.
enum Socket {
    /// The same socket twice: the first removes its file at the end.
    Unix(Listener, UnixListener),
    Tcp(TcpListener),
}

impl Socket {
    fn bind(endpoint: &Endpoint, public: bool) -> Result<Socket, Error> {
        match endpoint {
            Endpoint::Unix(path) => {
                let file =
                    Listener::bind_for(path, SocketAccess { mode: Some(MODE), ..SocketAccess::default() })?;
                let socket = UnixListener::from(file.as_fd().try_clone_to_owned()?);
                socket.set_nonblocking(true)?;
                Ok(Socket::Unix(file, socket))
            }
            Endpoint::Tcp(address) if !public && !address.ip().is_loopback() => Err(Error::Public(*address)),
            Endpoint::Tcp(address) => {
                let bound = TcpListener::bind(address)
                    .and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
                Ok(Socket::Tcp(bound.map_err(|error| Error::Address(*address, error))?))
            }
        }
    }

    /// Where it listens, with the port that the kernel has chosen for port 0.
    fn name(&self) -> io::Result<String> {
        match self {
            Socket::Unix(file, _) => {
                Ok(file.path().map_or_else(String::new, |path| path.display().to_string()))
            }
            Socket::Tcp(socket) => Ok(socket.local_addr()?.to_string()),
        }
    }

    fn accept(&self) -> io::Result<Peer> {
        let peer = match self {
            Socket::Unix(_, socket) => Peer::Unix(socket.accept()?.0),
            Socket::Tcp(socket) => Peer::Tcp(socket.accept()?.0),
        };
        match &peer {
            Peer::Unix(stream) => stream.set_nonblocking(true)?,
            Peer::Tcp(stream) => stream.set_nonblocking(true)?,
        }
        Ok(peer)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Unix(file, _) => file.as_fd(),
            Socket::Tcp(socket) => socket.as_fd(),
        }
    }
}

enum Peer {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Peer {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Peer::Unix(stream) => stream.read(into),
            Peer::Tcp(stream) => stream.read(into),
        }
    }

    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match self {
            Peer::Unix(stream) => stream.write(data),
            Peer::Tcp(stream) => stream.write(data),
        }
    }
}

impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Peer::Unix(stream) => stream.as_fd(),
            Peer::Tcp(stream) => stream.as_fd(),
        }
    }
}

/// What a connection is about to do. Each goes through the states in this order, and ends.
enum State {
    /// The request has come as far as this.
    Reading(Vec<u8>),
    /// The switch is being asked, from that moment on.
    Waiting { format: Format, is_head: bool, since: Instant },
    /// The head of the answer, the page, and how much of both is out.
    Writing { head: String, page: Arc<str>, sent: usize },
}

struct Connection {
    peer: Peer,
    state: State,
    begun: Instant,
}

/// How a step of a connection went.
enum Step {
    /// It waits to be readable, writable, or for the switch.
    Waits(Interest),
    /// It has had its answer, or has gone.
    Done,
}

impl Connection {
    fn new(peer: Peer) -> Connection {
        Connection { peer, state: State::Reading(Vec::new()), begun: Instant::now() }
    }

    /// Goes as far as that is possible without waiting.
    fn step(&mut self, asker: &Asker) -> io::Result<Step> {
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
                        Parsed::Page { format, is_head } => {
                            State::Waiting { format, is_head, since: Instant::now() }
                        }
                        Parsed::Refused(status) => {
                            answer(status, "text/plain; charset=utf-8", &format!("{status}\n").into(), false)
                        }
                    };
                }
                State::Waiting { format, is_head, since } => match asker.page(*since) {
                    // A peer that has said all it wants to say may still read; one that has gone is reported anyway.
                    None => return Ok(Step::Waits(Interest::empty())),
                    Some(Ok(pages)) => {
                        self.state = answer("200 OK", format.content_type(), &pages[format], *is_head);
                    }
                    Some(Err(why)) => {
                        let why = format!("{why}\n").into();
                        self.state =
                            answer("503 Service Unavailable", "text/plain; charset=utf-8", &why, *is_head);
                    }
                },
                State::Writing { head, page, sent } => {
                    let rest = match sent.checked_sub(head.len()) {
                        None => &head.as_bytes()[*sent..],
                        Some(of_page) => &page.as_bytes()[of_page..],
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
}

fn answer(status: &str, kind: &str, page: &Arc<str>, is_head: bool) -> State {
    let length = page.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    let page = if is_head { "".into() } else { Arc::clone(page) };
    State::Writing { head, page, sent: 0 }
}

/// What there is of a request.
#[derive(Debug, PartialEq, Eq)]
enum Parsed {
    /// Its head has not come to its end.
    Partly,
    /// It asks for the metrics; HEAD wants to know about them only.
    Page { format: Format, is_head: bool },
    /// The status line that says why not.
    Refused(&'static str),
}

/// Reads the head of a request (RFC 9112), of which the method, the path and `Accept` matter.
fn parse(request: &[u8]) -> Parsed {
    let end = request
        .windows(4)
        .position(|bytes| bytes == b"\r\n\r\n")
        .or_else(|| request.windows(2).position(|bytes| bytes == b"\n\n"));
    let Some(end) = end else {
        return if request.len() < MAX_REQUEST {
            Parsed::Partly
        } else {
            Parsed::Refused("431 Request Header Fields Too Large")
        };
    };
    let Ok(head) = str::from_utf8(&request[..end]) else { return Parsed::Refused("400 Bad Request") };
    let mut lines = head.lines();
    let words: Vec<_> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else { return Parsed::Refused("400 Bad Request") };
    if !version.starts_with("HTTP/1.") {
        return Parsed::Refused("505 HTTP Version Not Supported");
    }
    if !matches!(method, "GET" | "HEAD") {
        return Parsed::Refused("405 Method Not Allowed");
    }
    if !matches!(target.split('?').next(), Some("/" | "/metrics")) {
        return Parsed::Refused("404 Not Found");
    }
    let fields = lines.filter_map(|line| line.split_once(':'));
    let accept: Vec<_> = fields
        .filter(|(name, _)| name.eq_ignore_ascii_case("accept"))
        .map(|(_, value)| value.trim())
        .collect();
    Parsed::Page { format: Format::accepted(&accept.join(",")), is_head: method == "HEAD" }
}

/// Epoll tokens: of signals, of the asker; sockets that listen count from [`FIRST_SOCKET`], and connections from [`FIRST_CONNECTION`].
const SIGNALS: u64 = 0;
const ANSWERED: u64 = 1;
const FIRST_SOCKET: u64 = 2;
const FIRST_CONNECTION: u64 = 1 << 32;

struct Server {
    epoll: Epoll,
    asker: Asker,
    sockets: Vec<Socket>,
    /// In the order in which they came.
    connections: BTreeMap<u64, Connection>,
    next: u64,
}

impl Server {
    fn new(asker: Asker) -> io::Result<Server> {
        let epoll = Epoll::new()?;
        epoll.add(&*asker.answered, ANSWERED, Interest::READABLE)?;
        Ok(Server { epoll, asker, sockets: Vec::new(), connections: BTreeMap::new(), next: FIRST_CONNECTION })
    }

    fn listen(&mut self, socket: Socket) -> io::Result<()> {
        self.epoll.add(&socket, FIRST_SOCKET + self.sockets.len() as u64, Interest::READABLE)?;
        tracing::info!(at = socket.name()?, "metrics are served");
        self.sockets.push(socket);
        Ok(())
    }

    fn serve(&mut self, signals: &Signals) -> Result<(), Error> {
        self.epoll.add(signals, SIGNALS, Interest::READABLE)?;
        let mut events = EventBuf::with_capacity(MAX_CONNECTIONS);
        loop {
            let oldest = self.connections.values().next().map(|connection| connection.begun + PATIENCE);
            let timeout = oldest.map(|due| due.saturating_duration_since(Instant::now()));
            self.epoll.wait(&mut events, timeout)?;
            for event in events.iter() {
                match event.token {
                    SIGNALS => {
                        if signals.next()?.is_some() {
                            return Ok(());
                        }
                    }
                    ANSWERED => {
                        self.asker.answered.drain()?;
                        let waiting = self
                            .connections
                            .iter()
                            .filter(|(_, one)| matches!(one.state, State::Waiting { .. }));
                        let waiting: Vec<_> = waiting.map(|(token, _)| *token).collect();
                        waiting.into_iter().for_each(|token| self.step(token));
                    }
                    FIRST_CONNECTION.. => {
                        // One that waits for the switch is only told that its peer has gone.
                        let waits = self
                            .connections
                            .get(&event.token)
                            .is_some_and(|one| matches!(one.state, State::Waiting { .. }));
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
            while let Some((token, _)) =
                self.connections.first_key_value().filter(|(_, one)| now >= one.begun + PATIENCE)
            {
                let token = *token;
                self.end(token);
            }
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
        let waits = match connection.step(&self.asker) {
            Ok(Step::Waits(interest)) => self.epoll.modify(&connection.peer, token, interest).is_ok(),
            Ok(Step::Done) | Err(_) => false,
        };
        if !waits {
            self.end(token);
        }
    }

    fn end_oldest(&mut self) {
        if let Some((token, _)) = self.connections.first_key_value() {
            let token = *token;
            self.end(token);
        }
    }

    fn end(&mut self, token: u64) {
        if let Some(connection) = self.connections.remove(&token) {
            let _ = self.epoll.remove(&connection.peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_its_method_its_path_and_what_it_accepts() {
        let page = |format, is_head| Parsed::Page { format, is_head };
        for (request, parsed) in [
            ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", page(Format::Text, false)),
            ("GET /metrics?x=y HTTP/1.0\n\n", page(Format::Text, false)),
            (
                "HEAD /metrics HTTP/1.1\r\naCCept: text/plain;q=0.1\r\nAccept:application/openmetrics-text\r\n\r\n",
                page(Format::OpenMetrics, true),
            ),
            ("GET / HTTP/1.1\r\nHost: a\r\n", Parsed::Partly),
            ("", Parsed::Partly),
            ("POST /metrics HTTP/1.1\r\n\r\n", Parsed::Refused("405 Method Not Allowed")),
            ("GET /etc/passwd HTTP/1.1\r\n\r\n", Parsed::Refused("404 Not Found")),
            ("GET /metrics HTTP/2\r\n\r\n", Parsed::Refused("505 HTTP Version Not Supported")),
            ("GET  / HTTP/1.1\r\n\r\n", Parsed::Refused("400 Bad Request")),
            ("\r\n\r\n", Parsed::Refused("400 Bad Request")),
        ] {
            assert_eq!(parse(request.as_bytes()), parsed, "{request}");
        }
        assert_eq!(parse(b"GET / HTTP/1.1\r\nx: \xff\r\n\r\n"), Parsed::Refused("400 Bad Request"));
        assert_eq!(parse(&[b'x'; MAX_REQUEST]), Parsed::Refused("431 Request Header Fields Too Large"));
    }

    #[test]
    fn an_endpoint_is_a_path_or_an_address_of_this_host() {
        assert_eq!("/run/m.sock".parse(), Ok(Endpoint::Unix("/run/m.sock".into())));
        assert_eq!("[::1]:9482".parse(), Ok(Endpoint::Tcp("[::1]:9482".parse().unwrap())));
        for wrong in ["9482", "m.sock", "127.0.0.1", ":9482", ""] {
            assert!(Endpoint::from_str(wrong).is_err(), "{wrong}");
        }
        let everybody = "0.0.0.0:0".parse().unwrap();
        assert!(matches!(Socket::bind(&everybody, false), Err(Error::Public(_))));
        assert!(matches!(Socket::bind(&everybody, true), Ok(Socket::Tcp(_))));
    }
}
