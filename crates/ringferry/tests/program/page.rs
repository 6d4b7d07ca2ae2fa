//! `ringferry page`: what a browser gets of a running switch, and who gets nothing. A real browser reads the page in tests/interop.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use ringferry_control::snapshot::Snapshot;
use ringferry_control::why::Diagnosis;
use ringferry_rig::guest::converse;
use ringferry_rig::process::{PATIENCE, Process, eventually};
use ringferry_rig::switch::{Place, ringferry};

use crate::lifecycle::bystanders;
use crate::metrics::{Response, address, ask, serve, stop};

/// Asks for a path at the address of loopback, as a browser does.
#[track_caller]
fn get(page: &Process, path: &str, fields: &str) -> Response {
    let address = address(page);
    let stream = TcpStream::connect(&address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    ask(stream, &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{fields}\r\n"))
}

#[test]
fn a_browser_gets_the_page_and_what_the_switch_does() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    converse(&mut a, &mut b, 0, 20);
    let page = serve("page", &place, &[]);
    for (path, kind, content) in [
        ("/", "text/html", "<svg id=\"topology\""),
        ("/page.js", "text/javascript", "\"use strict\""),
        ("/page.css", "text/css", "color-scheme"),
    ] {
        let answer = get(&page, path, "");
        for field in [
            &format!("Content-Type: {kind}"),
            "Content-Security-Policy: default-src 'none'; script-src 'self'",
            "frame-ancestors 'none'",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
        ] {
            assert!(answer.head.contains(field), "{field} of {path}: {}", answer.head);
        }
        assert!(answer.page().contains(content), "{path}");
    }
    let state = get(&page, "/state", "Sec-Fetch-Site: same-origin\r\n").page();
    let snapshot: Snapshot = serde_json::from_str(&state).unwrap();
    assert_eq!(snapshot.ports[0].counters["rx_packets"], switch.port("a").counters["rx_packets"]);
    let json: serde_json::Value = serde_json::from_str(&state).unwrap();
    assert_eq!((&json["addresses"], &json["may_capture"]), (&2.into(), &false.into()));
    let why: Diagnosis = serde_json::from_str(&get(&page, "/why?port=%61", "").page()).unwrap();
    assert_eq!(why.port, "a");
    let answer = get(&page, "/why?port=zz", "");
    assert!(
        answer.status.contains("404") && answer.body.contains("there is no port \"zz\""),
        "{}",
        answer.body
    );
    assert!(get(&page, "/why", "").status.contains("400"));
    // What is refused has the fields that protect a browser, too.
    let stream = TcpStream::connect(address(&page)).unwrap();
    let answer = ask(stream, "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    assert!(answer.status.contains("405"), "{}", answer.status);
    for field in ["Allow: GET, HEAD", "X-Content-Type-Options: nosniff", "X-Frame-Options: DENY"] {
        assert!(answer.head.contains(field), "{field}: {}", answer.head);
    }
    assert!(get(&page, "/../etc/passwd", "").status.contains("404"));

    switch.stop();
    let answer = eventually("it says that the switch has gone", || {
        Some(get(&page, "/state", "")).filter(|answer| answer.status.contains("503"))
    });
    assert!(answer.body.contains("no ringferry is running"), "{}", answer.body);
    let again = place.switch(&["a"]);
    eventually("the figures are back", || get(&page, "/state", "").status.contains("200").then_some(()));
    stop(page);
    again.stop();
}

#[test]
fn other_sites_and_foreign_names_get_nothing() {
    let place = Place::new();
    let switch = place.switch(&["a"]);
    let page = serve("page", &place, &[]);
    let of_host = |path: &str, host: &str| {
        let request = format!("GET {path} HTTP/1.1\r\n{host}\r\n");
        ask(TcpStream::connect(address(&page)).unwrap(), &request).status
    };
    for path in ["/", "/state", "/why?port=a", "/page.js"] {
        for host in ["Host: evil.example\r\n", "", "Host: localhost.evil.example:9483\r\n"] {
            assert_eq!(of_host(path, host), "HTTP/1.1 403 Forbidden", "{path} {host}");
        }
        assert_eq!(of_host(path, "Host: localhost:1\r\n"), "HTTP/1.1 200 OK", "{path}");
    }
    for site in ["cross-site", "same-site"] {
        assert!(get(&page, "/state", &format!("Sec-Fetch-Site: {site}\r\n")).status.contains("403"));
    }
    // Behind a proxy, which connects to the Unix socket, it has any name.
    let stream = UnixStream::connect(place.socket("page")).unwrap();
    assert!(ask(stream, "GET /state HTTP/1.1\r\nHost: switches.example\r\n\r\n").status.contains("200"));
    let answer = get(&page, "/capture?port=a", "");
    assert!(answer.status.contains("403") && answer.body.contains("--captures"), "{}", answer.body);
    stop(page);
    for wrong in [&["--listen", "0.0.0.0:0"][..], &["--public", "--captures"]] {
        let output =
            ringferry().arg("page").arg("--control").arg(place.control()).args(wrong).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("--public"), "{said}");
    }
    switch.stop();
}

/// The blocks of a pcapng file: their types, and the bytes of each.
fn blocks(file: &[u8]) -> Vec<(u32, &[u8])> {
    let mut blocks = Vec::new();
    let mut rest = file;
    let word = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().unwrap());
    while !rest.is_empty() {
        let length = word(&rest[4..]) as usize;
        blocks.push((word(rest), &rest[..length]));
        rest = &rest[length..];
    }
    blocks
}

#[test]
fn captures_are_whole_files_and_end_with_their_client() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let page = serve("page", &place, &["--captures"]);
    let begin = |seconds: u32| {
        let address = address(&page);
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "GET /capture?port=a&seconds={seconds} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
        stream
    };
    let mut stream = begin(2);
    // More than there may be, none of which asks for anything.
    // Beside the packets, as the kernel may have some of them wait for a second or three.
    let to = address(&page);
    let idle = thread::spawn(move || (0..300).map(|_| TcpStream::connect(&to).unwrap()).collect::<Vec<_>>());
    let (mut answer, mut piece) = (Vec::new(), [0; 4096]);
    stream.set_nonblocking(true).unwrap();
    let mut next = 0;
    let ended = loop {
        converse(&mut a, &mut b, next, 20);
        next += 20;
        match stream.read(&mut piece) {
            Ok(0) => break true,
            Ok(count) => answer.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => panic!("{error}"),
        }
    };
    assert!(ended);
    drop(idle.join().unwrap());
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap() + 4;
    let (head, file) = answer.split_at(end);
    let head = String::from_utf8_lossy(head);
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("filename=\"a.pcapng\""), "{head}");
    let blocks = blocks(file);
    // A section, an interface, its statistics at the end, and packets in between.
    assert_eq!((blocks[0].0, blocks[1].0, blocks.last().unwrap().0), (0x0a0d_0d0a, 1, 5));
    let packets = blocks.iter().filter(|(kind, _)| *kind == 6).count();
    assert!(packets >= 20, "{packets} packets");

    // Two at a time; those whose clients have gone make room.
    let kept = [begin(60), begin(60)];
    let third = || {
        let mut answer = String::new();
        let mut stream = begin(1);
        stream.read_to_string(&mut answer).map(|_| answer)
    };
    let refused = eventually("there are too many", || third().ok().filter(|answer| answer.contains("503")));
    assert!(refused.contains("too many captures"), "{refused}");
    for stream in &kept {
        stream.shutdown(Shutdown::Both).unwrap();
    }
    eventually("there is room again", || {
        // Not text, if it is a capture.
        third().map_or(Some(()), |answer| answer.contains("200 OK").then_some(()))
    });
    assert!(get(&page, "/capture?port=a&seconds=61", "").status.contains("400"));
    assert!(get(&page, "/capture?port=zz&seconds=1", "").body.contains("zz"));
    stop(page);
    switch.stop();
}

#[test]
fn whoever_asks_about_ports_that_there_are_not_holds_up_nobody() {
    let place = Place::new();
    let switch = place.switch(&["a"]);
    let page = serve("page", &place, &[]);
    let to = address(&page);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0.. {
                let mut stream = TcpStream::connect(&to).unwrap();
                // It may have been closed for another one.
                let _ = write!(stream, "GET /why?port=x{number} HTTP/1.1\r\nHost: {to}\r\n\r\n");
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for _ in 0..20 {
            let state: Snapshot = serde_json::from_str(&get(&page, "/state", "").page()).unwrap();
            assert_eq!(state.ports.len(), 1);
            thread::sleep(Duration::from_millis(50));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    stop(page);
    switch.stop();
}
