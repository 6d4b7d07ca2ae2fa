//! What a front end has sent is closed where waiting harms nobody, whatever it is and whenever it
//! goes.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use ringferry_sys::closer::{Closer, ROOM};
use ringferry_sys::socket::{Listener, Stream};
use ringferry_sys::testing::{lingering, may};
use ringferry_vhost_user::message::{
    Header, InflightDescription, LogBase, MemoryRegion, Request, SingleRegion, VERSION,
};
use ringferry_vhost_user::{ProtocolFeatures, Resources, Session, SessionError, WireError};
use rustix::net::sockopt;
use zerocopy::IntoBytes;

use crate::rig::{Recorder, Rig, copies_of, mem_table, offer, packed_offer};

/// Longer than any machine needs for what is waited for here.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that is started has a copy of every descriptor until it runs its program. It would be the one that closes a socket [that lingers](lingering) last, and
/// wait: tests that have such sockets read this, and whoever starts a process writes it.
static STARTS: RwLock<()> = RwLock::new(());

/// Starts no process until the result is dropped.
fn no_process_starts() -> RwLockReadGuard<'static, ()> {
    STARTS.read().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a process and waits for its end.
fn status(command: &mut Command) -> io::Result<ExitStatus> {
    let _alone = STARTS.write().unwrap_or_else(PoisonError::into_inner);
    command.status()
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
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
    let _nobody = no_process_starts();
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

/// Whoever has the same socket holds its lock inside a `setsockopt` of its own whose argument is in a file of FUSE, and the same call of this process would wait.
#[test]
fn d1_no_option_of_a_socket_that_a_front_end_has_made_is_set() {
    let (channel, _other) = UnixStream::pair().unwrap();
    sockopt::set_socket_passcred(&channel, true).unwrap();
    let options =
        || [sockopt::socket_oobinline, sockopt::socket_passcred].map(|option| option(&channel).unwrap());
    let before = options();
    let mut rig = Rig::new();
    rig.tell(Request::SetProtocolFeatures, offer().protocol.bits().as_bytes(), &[]);
    assert!(rig.features(0));
    assert!(rig.ack(Request::SetBackendReqFd, &[], &[channel.as_fd()]));
    assert_eq!((copies_of(&channel), options()), (2, before));
    let mut fds = Vec::new();
    let state = rig.session.state(&mut |fd, id| {
        fds.push(Some((fd.try_clone_to_owned()?, id)));
        Ok(fds.len() as u32 - 1)
    });
    let mut take = |number: u32| fds[number as usize].take();
    let _adopted = Session::adopt(&state.unwrap(), &mut take, offer(), Resources::default()).unwrap();
    assert_eq!((copies_of(&channel), options()), (3, before));
}

#[test]
fn d1_a_connection_with_unread_descriptors_is_closed_elsewhere_and_its_peer_told() {
    let _nobody = no_process_starts();
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
    let _nobody = no_process_starts();
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
    assert!(matches!(error, SessionError::Wire(WireError::Disconnected)));
}

/// A file system of FUSE, served for long enough to open its root, and then never again.
struct Silent {
    place: tempfile::TempDir,
    device: Option<File>,
}

impl Silent {
    fn mount() -> Silent {
        let place = tempfile::tempdir().unwrap();
        let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = "fd=0,rootmode=40000,user_id=0,group_id=0";
        let mut mount = Command::new("mount");
        mount.args(["-i", "-t", "fuse", "-o", options, "silent"]).arg(place.path());
        assert!(status(mount.stdin(Stdio::from(device.try_clone().unwrap()))).unwrap().success());
        Silent { place, device: Some(device) }
    }

    /// The root, opened with the server's help.
    fn open(&self) -> OwnedFd {
        let path = self.place.path().to_owned();
        let opened = std::thread::spawn(move || File::open(path).unwrap());
        let mut device = self.device.as_ref().unwrap();
        loop {
            let mut request = [0; 1 << 17];
            let length = device.read(&mut request).unwrap();
            assert!(length >= 40);
            let operation = u32::from_ne_bytes(request[4..8].try_into().unwrap());
            let body = match operation {
                // INIT: version 7.31, and nothing else that matters.
                26 => [7u32, 31, 0, 0, 0, 4096, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0].as_bytes().to_vec(),
                // OPENDIR
                27 => vec![0; 16],
                operation => panic!("operation {operation}"),
            };
            let mut answer = (16 + body.len() as u32).to_ne_bytes().to_vec();
            answer.extend([0; 4]);
            answer.extend(&request[8..16]);
            answer.extend(body);
            device.write_all(&answer).unwrap();
            if operation == 27 {
                return opened.join().unwrap().into();
            }
        }
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        // Without a server nobody waits any more.
        self.device = None;
        let _ = status(Command::new("umount").arg("-l").arg(self.place.path()));
    }
}

/// What a file is must be found out without asking it: even its size is known to a server that a tenant may control.
#[test]
fn d1_a_file_whose_server_is_silent_is_asked_nothing() {
    let possible = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !may("needs root and /dev/fuse, to mount a file system", possible) {
        return;
    }
    let silent = Silent::mount();
    let open = silent.open();
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
    let path = rustix::fs::open(silent.place.path(), flags, rustix::fs::Mode::empty()).unwrap();
    let region = MemoryRegion { guest_addr: 0, size: 4096, user_addr: 0, mmap_offset: 0 };
    let inflight =
        InflightDescription { mmap_size: 1 << 20, num_queues: 1, queue_size: 1, ..Default::default() };
    let index = 0u64.as_bytes().to_vec();
    let cases = [
        (Request::AddMemReg, SingleRegion { padding: 0, region }.as_bytes().to_vec()),
        (Request::SetMemTable, mem_table([region].into_iter())),
        (Request::SetVringKick, index.clone()),
        (Request::SetVringCall, index.clone()),
        (Request::SetVringErr, index),
        (Request::SetInflightFd, inflight.as_bytes().to_vec()),
        (Request::SetLogBase, LogBase { size: 8, offset: 0 }.as_bytes().to_vec()),
        (Request::SetLogFd, Vec::new()),
        (Request::SetBackendReqFd, Vec::new()),
        (Request::GetFeatures, Vec::new()),
        // And one of which the rest does not come, on its way to another process.
        (Request::SetOwner, vec![0; 5]),
    ];
    for (request, payload) in cases {
        for fd in [&open, &path] {
            let (fd, payload) = (fd.try_clone().unwrap(), payload.clone());
            let (done, waits) = channel();
            let serves = std::thread::spawn(move || {
                let resources = || Resources { closer: Closer::new(), ..Resources::default() };
                let offer = packed_offer().with_dirty_log();
                let mut rig = Rig::with_resources(offer, resources());
                rig.tell(Request::SetProtocolFeatures, offer.protocol.bits().as_bytes(), &[]);
                assert!(rig.features(packed_offer().features));
                let mut bytes = message(request, &payload);
                if request == Request::SetOwner {
                    bytes.truncate(bytes.len() - payload.len() - 1);
                }
                rig.peer.send(&bytes, &[fd.as_fd()]).unwrap();
                if rig.serve().is_ok() {
                    let mut fds = Vec::new();
                    let state = rig.session.state(&mut |fd, id| {
                        fds.push(Some((fd.try_clone_to_owned()?, id)));
                        Ok(fds.len() as u32 - 1)
                    });
                    let mut take = |number: u32| fds[number as usize].take();
                    drop(Session::adopt(&state.unwrap(), &mut take, offer, resources()).unwrap());
                }
                drop((rig, fd));
                let _ = done.send(());
            });
            assert_eq!(waits.recv_timeout(PATIENCE), Ok(()), "{request}");
            serves.join().unwrap();
        }
    }
}

/// The front end's own end of the connection, left with the session, would keep the connection open after the front end's death: the session would wait for itself.
#[test]
fn the_front_ends_own_end_keeps_no_connection_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = Listener::bind(&path).unwrap();
    let closer = Closer::new();
    let begin = Instant::now();
    let accept = || {
        let front = Stream::connect(&path).unwrap();
        let resources = Resources { closer: closer.clone(), ..Resources::default() };
        (Session::with_resources(listener.accept().unwrap().unwrap(), offer(), resources).unwrap(), front)
    };
    let mut dev = Recorder::default();

    // In any message, whole or not: it is shut down as it comes, which ends the session.
    let whole = message(Request::SetVringCall, &[0; 8]);
    for part in [7, whole.len()] {
        let (mut session, front) = accept();
        front.send(&whole[..part], &[front.as_fd()]).unwrap();
        until("the end is seen", || session.on_readable(&mut Recorder::default()).is_err());
    }

    // That of another connection by way of the same socket is no channel either, and ends that one.
    let (mut session, front) = accept();
    let (mut another, kept) = accept();
    let negotiate = [
        message(Request::SetFeatures, &(1u64 << 30).to_ne_bytes()),
        message(Request::SetProtocolFeatures, &ProtocolFeatures::BACKEND_REQ.bits().to_ne_bytes()),
    ];
    front.send(&negotiate.concat(), &[]).unwrap();
    front.send(&message(Request::SetBackendReqFd, &[]), &[kept.as_fd()]).unwrap();
    session.on_readable(&mut dev).unwrap();
    assert_eq!(session.counters().rejected, 1);
    until("the end is seen", || another.on_readable(&mut Recorder::default()).is_err());
    drop(front);
    until("the end is seen", || session.on_readable(&mut Recorder::default()).is_err());

    // Unread in a channel that is good: given up by the next look, as nobody is asked for anything there.
    for text in [&b"x"[..], &b""[..]] {
        let (mut session, front) = accept();
        let (channel, other) = Stream::pair().unwrap();
        front.send(&negotiate.concat(), &[]).unwrap();
        front.send(&message(Request::SetBackendReqFd, &[]), &[channel.as_fd()]).unwrap();
        session.on_readable(&mut dev).unwrap();
        assert_eq!(session.counters().rejected, 0);
        session.tick(begin, &mut dev).unwrap();
        assert_eq!(copies_of(&channel), 2, "a quiet channel is kept");
        if !text.is_empty() {
            other.send(text, &[front.as_fd(), other.as_fd()]).unwrap();
        }
        drop((front, other, channel));
        session.tick(begin, &mut dev).unwrap();
        until("the end is seen", || session.on_readable(&mut Recorder::default()).is_err());
    }

    // The rest of half a message has its time, and no more.
    let (mut session, front) = accept();
    front.send(&whole[..7], &[]).unwrap();
    session.on_readable(&mut dev).unwrap();
    session.tick(begin + Duration::from_secs(20), &mut dev).unwrap();
    let end = session.tick(begin + Duration::from_secs(100), &mut dev).unwrap_err();
    assert!(matches!(end, SessionError::Wire(WireError::RestMissing)), "{end}");
}

#[test]
fn a_message_that_is_complete_or_lies_unread_is_not_overdue() {
    let closer = Closer::new();
    let (mut session, peer) = session(&closer);
    let mut dev = Recorder::default();
    let later = Instant::now() + Duration::from_secs(3600);
    let text = message(Request::GetFeatures, &[]);
    peer.send(&text[..5], &[]).unwrap();
    session.on_readable(&mut dev).unwrap();
    // The rest lies in the socket, and it is the switch that has not read it.
    peer.send(&text[5..], &[]).unwrap();
    session.tick(later, &mut dev).unwrap();
    session.on_readable(&mut dev).unwrap();
    session.tick(later, &mut dev).unwrap();
    assert_eq!(session.counters().messages, 1);
}
