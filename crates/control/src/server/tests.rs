//! The server against clients of every kind, and [`call`](crate::call) against servers of every kind.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use ringferry_sys::testing::lingering;

use super::*;
use crate::client::{ControlError, call};
use crate::protocol::Answer;
use crate::snapshot::{Snapshot, VERSION};

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
        Request::Show { .. } => Response::Ok(Answer::Show(Box::new(snapshot()))),
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
    let answer = fixture.serve_while(|path| call(path, &Request::Show { addresses: None }));
    assert_eq!(answer.unwrap(), Answer::Show(Box::new(snapshot())));
    let error = fixture.serve_while(|path| call(path, &Request::Dump)).unwrap_err();
    assert_eq!(error.to_string(), "the switch refuses: line one\nline two");
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
    assert!(line(&client).contains(&format!("longer than {MAX_REQUEST} bytes")));
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
    assert!(matches!(ControlServer::bind(&fixture.path, 0o600), Err(BindError::InUse { .. })));
    drop(fixture.server);
    assert!(!fixture.path.exists());
}

#[test]
fn absent_switch_is_said_so() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("none.sock");
    let text = call(&path, &Request::Show { addresses: None }).unwrap_err().to_string();
    assert!(
        text.starts_with(&format!(
            "no ringferry is running with control socket {path:?}: start one with `ringferry run`"
        )),
        "{text}"
    );
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(matches!(call(&path, &Request::Show { addresses: None }), Err(ControlError::NotRunning(_))));
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
            call(&path, &Request::Show { addresses: None }).unwrap_err()
        });
        assert!(matches!(error, ControlError::Garbled { .. }), "{error}");
    }
}

#[test]
fn an_answer_may_come_later_and_others_are_answered_before() {
    let mut fixture = fixture();
    let [later, gone, other] = [0; 3].map(|_| fixture.connect());
    // The second request of a client that waits is not read yet.
    (&later).write_all(b"{\"command\":\"dump\"}\n{\"command\":\"show\"}\n").unwrap();
    (&gone).write_all(b"{\"command\":\"dump\"}\n").unwrap();
    (&other).write_all(b"{\"command\":\"show\"}\n").unwrap();
    let mut tickets = Vec::new();
    let mut serve = |server: &mut ControlServer| {
        server.serve_later(&mut |request, ticket| match request {
            Request::Dump => {
                tickets.push(ticket);
                None
            }
            request => Some(handle(request).into()),
        });
        tickets.clone()
    };
    for _ in 0..4 {
        serve(&mut fixture.server);
    }
    assert!(line(&other).contains("\"show\""));
    // Whoever waits makes nobody look again and again, and is not taken for silent.
    assert_eq!(fixture.settle(), 0);
    drop(gone);
    assert!(fixture.settle() <= 1);
    (0..=MAX_SILENCE).for_each(|_| fixture.server.tick());
    let tickets = serve(&mut fixture.server);
    assert_eq!(tickets.len(), 2);
    for ticket in &tickets {
        // Once is enough, and nobody is there for one of them.
        for text in ["first", "second"] {
            fixture.server.answer(*ticket, &Response::Error(text.to_owned()));
        }
    }
    let mut reader = BufReader::new(&later);
    let mut next = || {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        line
    };
    assert_eq!(next(), "{\"error\":\"first\"}\n");
    fixture.settle();
    assert!(next().contains("\"show\""));
}

#[test]
fn d1_what_a_client_passes_and_whose_close_waits_keeps_no_other_client() {
    let mut fixture = fixture();
    for unread in [false, true] {
        let (socket, _peer) = lingering();
        let hostile = Stream::connect(&fixture.path).unwrap();
        if unread {
            // What comes behind a request that is answered first is not received before the client goes.
            hostile.send(b"{\"command\":\"show\"}\n", &[]).unwrap();
            hostile.send(b"x", &[socket.as_fd()]).unwrap();
        } else {
            hostile.send(b"{", &[socket.as_fd()]).unwrap();
        }
        drop(socket);
        fixture.settle();
        drop(hostile);
        fixture.settle();
        let answer = fixture.serve_while(|path| call(path, &Request::Show { addresses: None }));
        assert!(answer.is_ok());
    }
}
