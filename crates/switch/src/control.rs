//! The control socket: how `ringferry ctl` and other programs ask a running switch, or a running `ringferry guest`.
//!
//! **Protocol.** A Unix stream socket. A request is one line of JSON, `{"command":"show"}`; the answer is one
//! line, `{"ok":{"show":…}}` or `{"error":"…"}`. Any number of requests may follow on one connection, each
//! answered before the next is read.
//!
//! **Who may connect** is decided by the permissions of the socket file, nothing else.
//!
//! **Server.** [`ControlServer`] never blocks and owns an epoll instance of its own, which is readable
//! whenever there is something to do: the owner adds that one descriptor to its event loop and calls
//! [`serve`](ControlServer::serve). Clients are limited in number, in the length of a line and in the time
//! they may stay silent; each call of `serve` handles one request per client.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::socket::{BindError, Listener, Stream};
use serde::{Deserialize, Serialize};

use crate::channels::{Channels, GuestSnapshot, Stats, Steering};
use crate::explain::Explanation;
use crate::snapshot::{PortRules, RulesChange, Snapshot};

/// Longest request, in bytes with the newline.
pub const MAX_REQUEST: usize = 64 * 1024;
/// Most clients at a time. One more replaces the one that has been silent for longest.
pub const MAX_CLIENTS: usize = 16;
/// Ticks (about seconds) after which a silent client is dropped. A person typing JSON into `socat` still gets
/// an answer.
pub const MAX_SILENCE: u32 = 60;
/// Longest answer [`call`] takes, in bytes: a full forwarding database of 2^20 addresses has 90 MB.
const MAX_ANSWER: usize = 256 * 1024 * 1024;
/// How long [`call`] waits for each piece of an answer. The switch answers between bursts, within milliseconds; but a
/// change of a tap's queues may wait for the kernel: on a machine with three programs too many it took more than five seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// Where system-wide instances keep their sockets.
pub const SYSTEM_DIRECTORY: &str = "/run/ringferry";

/// Where the control socket is when nobody says: `/run/ringferry/control.sock` for root, else
/// `$XDG_RUNTIME_DIR/ringferry.sock`, else `/tmp/ringferry-UID.sock`.
pub fn default_path() -> PathBuf {
    let user = rustix::process::geteuid();
    if user.is_root() {
        return Path::new(SYSTEM_DIRECTORY).join("control.sock");
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|directory| !directory.is_empty()) {
        Some(directory) => Path::new(&directory).join("ringferry.sock"),
        None => PathBuf::from(format!("/tmp/ringferry-{}.sock", user.as_raw())),
    }
}

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// The state of everything.
    Show,
    /// The configuration in force, as TOML. Only a switch has one.
    Dump,
    /// How many queue pairs a port has.
    Channels {
        /// The port; of a guest, its tap.
        port: String,
        /// Change the number in use to so many. Only a guest can.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        combined: Option<u16>,
    },
    /// What decides which queue pair a packet takes, and who serves each.
    Steering {
        /// The port; of a guest, its tap.
        port: String,
    },
    /// Have a worker serve a queue pair of a port, or the queue of a tap, from now on. Only a switch has workers.
    Assign {
        /// The port.
        port: String,
        /// Number of the pair.
        queue: u16,
        /// Number of the worker.
        worker: u16,
    },
    /// Counters.
    Stats {
        /// The port; of a guest, its tap.
        port: String,
        /// Those of each queue, too.
        #[serde(default)]
        queues: bool,
    },
    /// What becomes of packets to and from a port. Only a switch knows.
    Explain {
        /// The port.
        port: String,
    },
    /// The rules of a port.
    Rules {
        /// The port.
        port: String,
    },
    /// Change rules of a port, all or none.
    Set {
        /// The port.
        port: String,
        /// Each `KEY=VALUE`, as in a `--port` flag.
        settings: Vec<String>,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
    /// Take rules of a port away, all or none.
    Unset {
        /// The port.
        port: String,
        /// Which.
        keys: Vec<String>,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Response {
    /// The answer.
    Ok(Answer),
    /// Why there is none, for people.
    Error(String),
}

/// The answer to each [`Request`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// To [`Request::Show`], from a switch.
    Show(Box<Snapshot>),
    /// To [`Request::Show`], from `ringferry guest`.
    Guest(Box<GuestSnapshot>),
    /// To [`Request::Dump`].
    Dump(String),
    /// To [`Request::Channels`].
    Channels(Channels),
    /// To [`Request::Steering`] and [`Request::Assign`].
    Steering(Steering),
    /// To [`Request::Stats`].
    Stats(Stats),
    /// To [`Request::Explain`].
    Explain(Explanation),
    /// To [`Request::Rules`].
    Rules(PortRules),
    /// To [`Request::Set`] and [`Request::Unset`].
    RulesChanged(RulesChange),
}

/// The switch's end of the control socket. Dropping it closes all connections and removes the socket file.
#[derive(Debug)]
pub struct ControlServer {
    listener: Listener,
    /// False while the process has no descriptors left, so that a waiting connection does not keep the event
    /// loop spinning.
    listening: bool,
    epoll: Epoll,
    clients: BTreeMap<u64, Client>,
    next_token: u64,
}

/// Token of the listener; clients count from there.
const LISTENER: u64 = 0;

impl ControlServer {
    /// Listens on `path` with permissions `mode`, such as `0o600` for the same user only.
    /// [`SYSTEM_DIRECTORY`] is made if it is missing; no other is.
    ///
    /// # Errors
    /// The path cannot be bound; the message says why and what to do.
    pub fn bind(path: &Path, mode: u32) -> Result<ControlServer, BindError> {
        if path.parent() == Some(Path::new(SYSTEM_DIRECTORY)) {
            // If this fails, bind says what is wrong.
            let _ = std::fs::create_dir(SYSTEM_DIRECTORY);
        }
        let listener = Listener::bind_with_mode(path, mode)?;
        let start = || {
            let epoll = Epoll::new()?;
            epoll.add(&listener, LISTENER, Interest::READABLE)?;
            Ok(epoll)
        };
        let epoll = start().map_err(|source| BindError::Os { path: path.to_owned(), source })?;
        Ok(ControlServer {
            listener,
            listening: true,
            epoll,
            clients: BTreeMap::new(),
            next_token: LISTENER + 1,
        })
    }

    /// Does whatever can be done without waiting: accepts clients, reads requests, answers them through
    /// `handle`, and drops clients that left or broke the protocol. Call it whenever the descriptor is
    /// readable.
    pub fn serve(&mut self, handle: &mut dyn FnMut(Request) -> Response) {
        let mut events = EventBuf::with_capacity(MAX_CLIENTS + 1);
        if let Err(error) = self.epoll.wait(&mut events, Some(Duration::ZERO)) {
            tracing::warn!("control socket: {error}");
            return;
        }
        for event in events.iter() {
            if event.token == LISTENER {
                self.accept();
            } else if let Some(client) = self.clients.get_mut(&event.token) {
                let proceed = client.step(handle).and_then(|()| client.rearm(&self.epoll, event.token));
                if proceed.is_err() {
                    self.drop_client(event.token);
                }
            }
        }
    }

    /// Call it about once a second: drops clients that have been silent for [`MAX_SILENCE`] calls and tries
    /// again to accept clients after the process had run out of descriptors.
    pub fn tick(&mut self) {
        self.clients.values_mut().for_each(|client| client.silence += 1);
        let silent: Vec<_> = self
            .clients
            .iter()
            .filter(|(_, client)| client.silence > MAX_SILENCE)
            .map(|(token, _)| *token)
            .collect();
        silent.into_iter().for_each(|token| self.drop_client(token));
        if !self.listening {
            self.listening = self.epoll.add(&self.listener, LISTENER, Interest::READABLE).is_ok();
        }
    }

    /// The socket file.
    pub fn path(&self) -> Option<&Path> {
        self.listener.path()
    }

    fn accept(&mut self) {
        // As many as there is room for; more wait for the next turn.
        for _ in 0..MAX_CLIENTS {
            let stream = match self.listener.accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(
                        "control socket: cannot accept a client, trying again in a second: {error}"
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
            let added = stream
                .set_nonblocking(true)
                .and_then(|()| self.epoll.add(&stream, token, Interest::READABLE));
            if added.is_ok() {
                self.next_token += 1;
                self.clients.insert(token, Client::new(stream));
            }
        }
    }

    fn drop_client(&mut self, token: u64) {
        if let Some(client) = self.clients.remove(&token) {
            // Closing takes the stream out of the set; this is for a client that passed the stream on to
            // another process.
            let _ = self.epoll.remove(&client.stream);
        }
    }
}

impl AsFd for ControlServer {
    /// Readable whenever [`serve`](ControlServer::serve) has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// One connection: bytes of requests come in, bytes of at most one answer go out.
#[derive(Debug)]
struct Client {
    stream: Stream,
    /// What was received and not yet handled: less than [`MAX_REQUEST`] and one read.
    input: Vec<u8>,
    /// The answer under way, from `sent` on still to be sent.
    output: Vec<u8>,
    sent: usize,
    /// What epoll watches: room to write, or something to read.
    writing: bool,
    /// Close once the answer is sent.
    closing: bool,
    /// Ticks since something was received or sent.
    silence: u32,
}

impl Client {
    fn new(stream: Stream) -> Client {
        Client {
            stream,
            input: Vec::new(),
            output: Vec::new(),
            sent: 0,
            writing: false,
            closing: false,
            silence: 0,
        }
    }

    /// Goes on until it would have to wait or one request is answered. An error means that the connection is
    /// over.
    fn step(&mut self, handle: &mut dyn FnMut(Request) -> Response) -> io::Result<()> {
        self.flush()?;
        if self.has_output() {
            return Ok(());
        }
        if !self.input.contains(&b'\n') {
            self.receive()?;
        }
        if let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.input.drain(..=end).collect();
            let response = match serde_json::from_slice(&line) {
                Ok(request) => handle(request),
                Err(error) => Response::Error(format!(
                    "this is not a request such as {{\"command\":\"show\"}}: {error}"
                )),
            };
            self.answer(&response)?;
        } else if self.input.len() >= MAX_REQUEST {
            self.input = Vec::new();
            self.closing = true;
            self.answer(&Response::Error(format!("the request is longer than {MAX_REQUEST} bytes")))?;
        }
        self.flush()
    }

    fn receive(&mut self) -> io::Result<()> {
        let mut piece = [0; 4096];
        // Descriptors sent along are closed here, unasked for as they are.
        match self.stream.recv(&mut piece, &mut Vec::new()) {
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
            match self.stream.send(&self.output[self.sent..], &[]) {
                Ok(sent) => {
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
        let writing = self.has_output() || self.input.contains(&b'\n');
        if writing != self.writing {
            epoll.modify(
                &self.stream,
                token,
                if writing { Interest::WRITABLE } else { Interest::READABLE },
            )?;
            self.writing = writing;
        }
        Ok(())
    }
}

/// Why a request got no answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Nobody listens.
    #[error(
        "no ringferry is running with control socket {0:?}: start one with `ringferry run`, \
         or say which one with --control PATH"
    )]
    NotRunning(PathBuf),
    /// The socket belongs to somebody else.
    #[error(
        "no permission to use control socket {0:?}: run this as the user that runs ringferry (sudo), \
         or choose another with --control PATH"
    )]
    Permission(PathBuf),
    /// No answer in time.
    #[error("ringferry does not answer on control socket {0:?}: is the process stopped or overloaded?")]
    Silent(PathBuf),
    /// The answer makes no sense.
    #[error(
        "control socket {path:?} does not answer like ringferry ({reason}): \
         is it the right path, and the same version?"
    )]
    Garbled {
        /// The path.
        path: PathBuf,
        /// What is wrong with the answer.
        reason: String,
    },
    /// The switch answered with an error.
    #[error("ringferry refuses: {0}")]
    Refused(String),
    /// Anything else.
    #[error("control socket {path:?}: {source}")]
    Os {
        /// The path.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Asks the switch whose control socket is `path`, and waits for the answer.
///
/// # Errors
/// See [`ControlError`].
pub fn call(path: &Path, request: &Request) -> Result<Answer, ControlError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            ControlError::NotRunning(path.to_owned())
        }
        io::ErrorKind::PermissionDenied => ControlError::Permission(path.to_owned()),
        io::ErrorKind::WouldBlock => ControlError::Silent(path.to_owned()),
        _ => ControlError::Os { path: path.to_owned(), source },
    };
    let line = exchange(path, request).map_err(failed)?;
    match serde_json::from_slice(&line) {
        Ok(Response::Ok(answer)) => Ok(answer),
        Ok(Response::Error(message)) => Err(ControlError::Refused(message)),
        Err(error) => Err(ControlError::Garbled { path: path.to_owned(), reason: error.to_string() }),
    }
}

/// Sends one line and receives one.
fn exchange(path: &Path, request: &Request) -> io::Result<Vec<u8>> {
    let stream = Stream::connect(path)?;
    stream.set_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    let mut rest = line.as_slice();
    while !rest.is_empty() {
        rest = &rest[stream.send(rest, &[])?..];
    }
    let mut answer = Vec::new();
    let mut piece = vec![0; 64 * 1024];
    while answer.last() != Some(&b'\n') && answer.len() <= MAX_ANSWER {
        let bytes = stream.recv(&mut piece, &mut Vec::new())?.bytes;
        if bytes == 0 {
            break; // half an answer is no JSON and will be reported as such
        }
        answer.extend_from_slice(&piece[..bytes]);
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::snapshot::VERSION;

    struct Fixture {
        server: ControlServer,
        path: PathBuf,
        _directory: tempfile::TempDir,
    }

    fn fixture() -> Fixture {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        Fixture { server: ControlServer::bind(&path, 0o600).unwrap(), path, _directory: directory }
    }

    fn snapshot() -> Snapshot {
        Snapshot { version: VERSION, pid: 7, ..Snapshot::default() }
    }

    fn handle(request: Request) -> Response {
        match request {
            Request::Show => Response::Ok(Answer::Show(Box::new(snapshot()))),
            Request::Dump => Response::Error("line one\nline two".into()),
            other => Response::Error(format!("{other:?}")),
        }
    }

    impl Fixture {
        /// Serves until there is nothing left to do, and returns how many turns that took.
        fn settle(&mut self) -> usize {
            let outer = Epoll::new().unwrap();
            outer.add(&self.server, 1, Interest::READABLE).unwrap();
            let mut events = EventBuf::with_capacity(1);
            let mut turns = 0;
            while outer.wait(&mut events, Some(Duration::ZERO)).unwrap() > 0 {
                self.server.serve(&mut handle);
                turns += 1;
                assert!(turns < 10_000, "the descriptor stays readable without anything to do");
            }
            turns
        }

        fn connect(&self) -> UnixStream {
            let stream = UnixStream::connect(&self.path).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            stream
        }

        /// Serves in this thread while `client` runs in another.
        fn serve_while<T: Send>(&mut self, client: impl FnOnce(&Path) -> T + Send) -> T {
            let path = self.path.clone();
            std::thread::scope(|scope| {
                let client = scope.spawn(move || client(&path));
                while !client.is_finished() {
                    self.server.serve(&mut handle);
                    std::thread::sleep(Duration::from_millis(1));
                }
                client.join().unwrap()
            })
        }
    }

    fn line(stream: &UnixStream) -> String {
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    }

    #[test]
    fn call_gets_answers_and_errors() {
        let mut fixture = fixture();
        let answer = fixture.serve_while(|path| call(path, &Request::Show));
        assert_eq!(answer.unwrap(), Answer::Show(Box::new(snapshot())));
        let error = fixture.serve_while(|path| call(path, &Request::Dump)).unwrap_err();
        assert_eq!(error.to_string(), "ringferry refuses: line one\nline two");
        fixture.settle();
        assert!(fixture.server.clients.is_empty(), "the clients have left");
    }

    #[test]
    fn protocol_is_one_line_of_json_each() {
        let mut fixture = fixture();
        let mut client = fixture.connect();
        client.write_all(b"{\"command\":\"show\"}\n").unwrap();
        fixture.settle();
        assert!(line(&client).starts_with("{\"ok\":{\"show\":{\"version\":1,\"pid\":7,"));
        for (request, meaning) in [
            (
                r#"{"command":"channels","port":"a","combined":2}"#,
                r#"Channels { port: \"a\", combined: Some(2) }"#,
            ),
            (r#"{"command":"channels","port":"a"}"#, r#"Channels { port: \"a\", combined: None }"#),
            (r#"{"command":"steering","port":"a"}"#, r#"Steering { port: \"a\" }"#),
            (r#"{"command":"stats","port":"a","queues":true}"#, r#"Stats { port: \"a\", queues: true }"#),
            (r#"{"command":"rules","port":"a"}"#, r#"Rules { port: \"a\" }"#),
            (
                r#"{"command":"set","port":"a","settings":["vlan=1","isolated=on"]}"#,
                r#"Set { port: \"a\", settings: [\"vlan=1\", \"isolated=on\"], runtime: false }"#,
            ),
            (
                r#"{"command":"unset","port":"a","keys":["vlan"],"runtime":true}"#,
                r#"Unset { port: \"a\", keys: [\"vlan\"], runtime: true }"#,
            ),
            (r#"{"command":"explain","port":"a"}"#, r#"Explain { port: \"a\" }"#),
        ] {
            client.write_all(format!("{request}\n").as_bytes()).unwrap();
            fixture.settle();
            assert_eq!(line(&client), format!("{{\"error\":\"{meaning}\"}}\n"));
        }
        for (request, part) in [
            ("{\"command\":\"channels\",\"port\":\"a\",\"combined\":65536}\n", "65536"),
            ("{\"command\":\"channels\"}\n", "missing field `port`"),
            ("{\"command\":\"stats\",\"port\":\"a\",\"queue\":true}\n", "unknown field `queue`"),
            ("{\"command\":\"set\",\"port\":\"a\",\"settings\":{\"vlan\":1}}\n", "expected a sequence"),
            ("{\"command\":\"unset\",\"port\":\"a\"}\n", "missing field `keys`"),
            ("{\"command\":\"fly\"}\n", "unknown variant `fly`"),
            ("\n", "EOF"),
            ("\u{fffd}{}\n", "expected value"),
        ] {
            client.write_all(request.as_bytes()).unwrap();
            fixture.settle();
            let answer = line(&client);
            assert!(
                answer.starts_with("{\"error\":\"this is not a request") && answer.contains(part),
                "{answer}"
            );
        }
    }

    #[test]
    fn requests_may_come_in_pieces_or_together() {
        let mut fixture = fixture();
        let mut client = fixture.connect();
        for byte in b"{\"command\":\"show\"}" {
            client.write_all(&[*byte]).unwrap();
            fixture.settle();
        }
        client.write_all(b"\n{\"command\":\"dump\"}\n{\"command\":\"show\"}\n").unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(fixture.settle() >= 3, "one request a turn, so that others get theirs");
        let mut answers = String::new();
        client.read_to_string(&mut answers).unwrap();
        let starts: Vec<_> = answers.lines().map(|line| &line[..5]).collect();
        assert_eq!(starts, ["{\"ok\"", "{\"err", "{\"ok\""]);
        assert!(fixture.server.clients.is_empty());
    }

    #[test]
    fn endless_line_is_refused_with_bounded_memory() {
        let mut fixture = fixture();
        let mut client = fixture.connect();
        client.set_nonblocking(true).unwrap();
        let mut written = 0;
        let outcome = loop {
            match client.write(&[b'x'; 4096]) {
                Ok(n) => written += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => break error.kind(),
            }
            fixture.server.serve(&mut handle);
            assert!(fixture.server.clients.values().all(|client| client.input.len() < MAX_REQUEST + 4096));
            assert!(written < 4 * 1024 * 1024, "never refused");
        };
        assert_eq!(outcome, io::ErrorKind::BrokenPipe);
        assert!(line(&client).contains("longer than 65536 bytes"));
    }

    /// A client that asks and never reads costs one answer, does not keep the loop busy, and is dropped in
    /// the end.
    #[test]
    fn client_that_does_not_read_is_dropped() {
        let mut fixture = fixture();
        let mut client = fixture.connect();
        let requests = b"{\"command\":\"dump\"}\n".repeat(400);
        client.write_all(&requests).unwrap();
        let long = |_: Request| Response::Error("x".repeat(1_000_000));
        for _ in 0..100 {
            fixture.server.serve(&mut { long });
        }
        assert_eq!(fixture.settle(), 0);
        let held: usize =
            fixture.server.clients.values().map(|client| client.output.len() + client.input.len()).sum();
        assert!((1_000_000..1_100_000).contains(&held), "{held}");
        for _ in 0..=MAX_SILENCE {
            assert_eq!(fixture.server.clients.len(), 1);
            fixture.server.tick();
        }
        assert!(fixture.server.clients.is_empty());
    }

    #[test]
    fn too_many_clients_replace_the_most_silent() {
        let mut fixture = fixture();
        let clients: Vec<_> = (0..MAX_CLIENTS).map(|_| fixture.connect()).collect();
        fixture.settle();
        fixture.server.tick();
        for mut client in clients.iter().filter(|client| !std::ptr::eq(*client, &clients[5])) {
            client.write_all(b"{\"command\":\"show\"}\n").unwrap();
        }
        fixture.settle();
        let mut newcomer = fixture.connect();
        newcomer.write_all(b"{\"command\":\"show\"}\n").unwrap();
        fixture.settle();
        assert_eq!(fixture.server.clients.len(), MAX_CLIENTS);
        assert!(line(&newcomer).starts_with("{\"ok\""));
        assert_eq!((&clients[5]).read(&mut [0]).unwrap(), 0, "closed");
    }

    #[test]
    fn socket_has_the_mode_asked_for_and_goes_away() {
        let fixture = fixture();
        assert_eq!(std::fs::metadata(&fixture.path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fixture.server.path(), Some(fixture.path.as_path()));
        assert!(matches!(ControlServer::bind(&fixture.path, 0o600), Err(BindError::InUse(_))));
        drop(fixture.server);
        assert!(!fixture.path.exists());
    }

    #[test]
    fn absent_switch_is_said_so() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("none.sock");
        let text = call(&path, &Request::Show).unwrap_err().to_string();
        assert!(
            text.starts_with(&format!(
                "no ringferry is running with control socket {path:?}: start one with `ringferry run`"
            )),
            "{text}"
        );
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(matches!(call(&path, &Request::Show), Err(ControlError::NotRunning(_))));
    }

    #[test]
    fn other_programs_on_the_socket_are_told_apart() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("other.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        for answer in ["SSH-2.0\n", "", "{\"ok\":{\"show\":{"] {
            let error = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut stream, _) = listener.accept().unwrap();
                    let _ = BufReader::new(stream.try_clone().unwrap()).read_line(&mut String::new());
                    stream.write_all(answer.as_bytes()).unwrap();
                });
                call(&path, &Request::Show).unwrap_err()
            });
            assert!(matches!(error, ControlError::Garbled { .. }), "{error}");
        }
    }
}
