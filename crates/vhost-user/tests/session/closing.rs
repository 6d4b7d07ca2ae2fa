//! What a front end has sent is closed where waiting harms nobody, whatever it is and whenever it
//! goes.

use std::io::{ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ringferry_sys::closer::{Closer, ROOM};
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::message::{Header, Request, VERSION};
use ringferry_vhost_user::{Resources, Session, WireError};
use zerocopy::IntoBytes;

use crate::rig::{Recorder, offer};

/// Longer than any machine needs for what is waited for here.
const PATIENCE: Duration = Duration::from_secs(60);

/// A TCP socket whose last close waits for as long as its peer, which is returned, neither reads
/// nor ends.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    rustix::net::sockopt::set_socket_linger(&ours, Some(10 * PATIENCE)).unwrap();
    ours.set_nonblocking(true).unwrap();
    while !matches!(ours.write(&[0; 65536]), Err(error) if error.kind() == ErrorKind::WouldBlock) {}
    (ours.into(), peer)
}

fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn message(request: Request, payload: &[u8]) -> Vec<u8> {
    let header = Header { request: request as u32, flags: VERSION, size: payload.len() as u32 };
    [header.as_bytes(), payload].concat()
}

/// A session and the front end's end of its connection.
fn session(closer: &Closer) -> (Session, Stream) {
    let (peer, theirs) = Stream::pair().unwrap();
    peer.set_nonblocking(true).unwrap();
    (
        Session::with_resources(
            theirs,
            offer(),
            Resources { closer: closer.clone(), ..Resources::default() },
        )
        .unwrap(),
        peer,
    )
}

/// Sends the only descriptor of a socket that lingers in every way in which one can be left to the
/// session, and checks each time that it is the closer that waits.
#[test]
fn d1_a_descriptor_whose_close_waits_keeps_nobody() {
    let index = 0u64.as_bytes().to_vec();
    let cases = [
        ("one that no message takes", message(Request::GetFeatures, &[])),
        ("no eventfd", message(Request::SetVringCall, &index)),
        ("no memory", message(Request::AddMemReg, &[1; 40])),
        ("no channel", message(Request::SetBackendReqFd, &[])),
        ("with an unknown message", message(Request::SetOwner, &[]).into_iter().map(|_| 0).collect()),
        ("with the first bytes of a message", message(Request::SetOwner, &[])[..5].to_vec()),
    ];
    for (case, message) in cases {
        let closer = Closer::new();
        let (mut session, peer) = session(&closer);
        let (socket, _reader) = lingering();
        peer.send(&message, &[socket.as_fd()]).unwrap();
        drop(socket);
        let _ = session.on_readable(&mut Recorder::default());
        drop(peer);
        let error = session.on_readable(&mut Recorder::default()).unwrap_err();
        drop((error, session));
        // Whoever has come here has not waited.
        assert_ne!(closer.waiting(), 0, "{case}");
    }
}

#[test]
fn d1_a_connection_with_unread_descriptors_is_closed_elsewhere_and_its_peer_told() {
    let closer = Closer::new();
    let (mut session, peer) = session(&closer);
    let (socket, _reader) = lingering();
    peer.send(&[0; 12], &[socket.as_fd()]).unwrap();
    peer.send(&message(Request::GetFeatures, &[]), &[socket.as_fd()]).unwrap();
    drop(socket);
    session.disconnect(&mut Recorder::default());
    drop(session);
    assert_ne!(closer.waiting(), 0);
    // Also of a second connection, which waits behind the first.
    let (second, peer) = self::session(&closer);
    drop(second);
    assert_eq!(peer.recv(&mut [0; 1], &mut Vec::new()).unwrap().bytes, 0);
}

#[test]
fn d1_nothing_is_read_while_the_closer_is_behind() {
    let closer = Closer::new();
    let (mut session, peer) = session(&closer);
    let (socket, reader) = lingering();
    let set_owner = message(Request::SetOwner, &[]);
    peer.send(&set_owner, &[socket.as_fd()]).unwrap();
    drop(socket);
    let (pipe, _write) = rustix::pipe::pipe().unwrap();
    let mut dev = Recorder::default();
    let mut served = 0;
    let sent = loop {
        let progress = session.on_readable(&mut dev).unwrap();
        served += progress.messages;
        if progress.behind {
            assert!(progress.more);
            break served;
        }
        assert!(served <= ROOM + 2, "descriptors pile up without bound");
        peer.send(&set_owner, &[pipe.as_fd()]).unwrap();
    };
    assert!(sent > ROOM / 2);
    assert!(session.on_readable(&mut dev).unwrap().messages == 0);
    drop(reader);
    until("catching up", || !closer.is_behind());
    peer.send(&set_owner, &[]).unwrap();
    assert!(session.on_readable(&mut dev).unwrap().messages > 0);
    drop(peer);
    let error = loop {
        if let Err(error) = session.on_readable(&mut dev) {
            break error;
        }
    };
    assert!(matches!(error, ringferry_vhost_user::SessionError::Wire(WireError::Disconnected)));
}
