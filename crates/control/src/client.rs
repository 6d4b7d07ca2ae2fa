//! The asking end of a control socket.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringferry_sys::socket::Stream;

use crate::path::{SYSTEM_DIRECTORY, check_directory, check_listener};
use crate::protocol::{Answer, Request, Response};

/// Longest answer [`call`] takes, in bytes: a full forwarding database of 2^20 addresses has 90 MB.
const MAX_ANSWER: usize = 256 * 1024 * 1024;
/// How long [`call`] waits for each piece of an answer. The switch answers between bursts, within milliseconds; but a
/// change of a tap's queues may wait for the kernel: on a machine with three programs too many it took more than five seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long [`call`] takes in all. A full forwarding database is here within seconds.
const LONGEST: Duration = Duration::from_secs(120);
/// The wait after which a caller is told whom it waits for.
const SOON: Duration = Duration::from_secs(2);

/// Why a request got no answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Nobody listens.
    #[error("{}", nobody(.0))]
    NotRunning(PathBuf),
    /// The socket belongs to somebody else.
    #[error(
        "no permission to use control socket {0:?}: run this as the user that runs ringferry (sudo), \
         or choose another with --control PATH"
    )]
    Permission(PathBuf),
    /// No answer in time.
    #[error(
        "ringferry does not answer on control socket {path:?}: {who} (a change that was asked for may be made when it goes on)"
    )]
    Silent {
        /// The path.
        path: PathBuf,
        /// The process, as far as it is known, and what it may be about.
        who: String,
    },
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
    #[error("the switch refuses: {0}")]
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

/// Says what somebody can do who has found no switch at `path`.
fn nobody(path: &Path) -> String {
    let is_other = || path.symlink_metadata().is_ok_and(|file| !file.file_type().is_socket());
    let lost = match path.exists() {
        false => Some("somebody has removed its file: nobody can ask it for anything until it gets SIGHUP"),
        true if is_other() => {
            Some("something that is no socket lies in its place: remove that, then send it SIGHUP")
        }
        true => None,
    };
    if let Some(lost) = lost.filter(|_| listens(path).unwrap_or(false)) {
        return format!(
            "a ringferry listens on control socket {path:?}, but {lost} \
             (`systemctl reload ringferry`, or `kill -HUP` of its process, which `ss -xlp` names), which makes the socket anew; packets go on"
        );
    }
    let hint = another(path);
    format!(
        "no ringferry is running with control socket {path:?}: start one with `ringferry run`, or say which one with --control PATH{hint}"
    )
}

/// Returns true if a process of this network namespace, or a switch of another one, listens on a socket that was bound to `path`, whether its file is there or not.
fn listens(path: &Path) -> io::Result<bool> {
    let path = std::path::absolute(path)?;
    // Address, references, protocol, flags, type, state, inode, and the path if there is one (proc_net(5)).
    let of_path = |line: &[u8]| {
        let mut fields = line.splitn(8, |byte| *byte == b' ');
        fields.nth(3) == Some(ACCEPTS) && line.ends_with(&[b" ", path.as_os_str().as_bytes()].concat())
    };
    let has = |sockets: &[u8]| sockets.split(|byte| *byte == b'\n').any(of_path);
    if has(&std::fs::read("/proc/net/unix")?) {
        return Ok(true);
    }
    // Of processes that end meanwhile, or that this user must not look at, nothing is known.
    let processes = std::fs::read_dir("/proc")?.map_while(Result::ok).map(|process| process.path());
    let mut switches = processes.filter(|process| is_ringferry(process));
    Ok(switches.any(|switch| std::fs::read(switch.join("net/unix")).is_ok_and(|sockets| has(&sockets))))
}

/// Returns true if a process, which is a folder of `/proc`, is this program's: by its name, which anybody may read.
pub fn is_ringferry(process: &Path) -> bool {
    std::fs::read_to_string(process.join("comm")).is_ok_and(|name| name.trim_end() == PROGRAM)
}

/// The name of every process of this program (comm of proc(5)).
const PROGRAM: &str = "ringferry";

/// The flags of a socket that listens, in `/proc/net/unix`: `__SO_ACCEPTCON`.
const ACCEPTS: &[u8] = b"00010000";

/// Says where another switch runs, for somebody who has found none at `path`.
fn another(path: &Path) -> String {
    let system = Path::new(SYSTEM_DIRECTORY).join("control.sock");
    if path != system && system.exists() {
        let root = if ringferry_sys::process::is_root() { "" } else { ", which may need root (sudo)" };
        format!(". There is {}, the socket of the system's switch{root}", system.display())
    } else {
        String::new()
    }
}

/// How a caller waits for an answer.
#[derive(Clone, Copy)]
pub struct Patience<'w> {
    /// Longest pause in which nothing of it comes.
    pub pause: Duration,
    /// Is told once, after two seconds, whom the caller waits for.
    pub waits: &'w dyn Fn(&str),
}

impl Patience<'_> {
    /// Of a program for which somebody waits in turn: libvirt gives `ovs-vsctl` five seconds, and Prometheus a scrape ten. It still hears why there is no answer.
    pub const SHORT: Patience<'static> = Patience { pause: Duration::from_secs(4), waits: &|_| () };
}

impl Default for Patience<'_> {
    fn default() -> Self {
        Patience { pause: PATIENCE, waits: &|_| () }
    }
}

/// Asks the switch whose control socket is `path`, and waits for the answer.
///
/// # Errors
/// See [`ControlError`].
pub fn call(path: &Path, request: &Request) -> Result<Answer, ControlError> {
    call_with(path, request, Patience::default())
}

/// Does the same with another patience.
///
/// # Errors
/// See [`ControlError`].
pub fn call_with(path: &Path, request: &Request, patience: Patience<'_>) -> Result<Answer, ControlError> {
    call_whole(path, request, patience).map(|answered| answered.answer)
}

/// Does the same for an answer that comes with descriptors.
///
/// # Errors
/// See [`ControlError`].
pub fn call_with_fds(
    path: &Path,
    request: &Request,
    patience: Patience<'_>,
) -> Result<(Answer, Vec<OwnedFd>), ControlError> {
    call_whole(path, request, patience).map(|answered| (answered.answer, answered.fds))
}

/// Does the same, and returns the connection, for whatever follows on it.
///
/// # Errors
/// See [`ControlError`].
pub fn call_and_keep(path: &Path, request: &Request) -> Result<(Answer, Stream), ControlError> {
    call_whole(path, request, Patience::default()).map(|answered| (answered.answer, answered.stream))
}

/// An answer with all that belongs to it.
struct Answered {
    answer: Answer,
    fds: Vec<OwnedFd>,
    stream: Stream,
}

fn call_whole(path: &Path, request: &Request, patience: Patience<'_>) -> Result<Answered, ControlError> {
    let mut who = None;
    let failed = |source: io::Error, who: Option<u32>| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            ControlError::NotRunning(path.to_owned())
        }
        io::ErrorKind::PermissionDenied => ControlError::Permission(path.to_owned()),
        io::ErrorKind::WouldBlock => ControlError::Silent { path: path.to_owned(), who: describe(who) },
        _ => ControlError::Os { path: path.to_owned(), source },
    };
    let exchanged = exchange(path, request, patience, LONGEST, &mut who);
    let (line, fds, stream) = exchanged.map_err(|error| failed(error, who))?;
    match serde_json::from_slice(&line) {
        Ok(Response::Ok(answer)) => Ok(Answered { answer, fds, stream }),
        Ok(Response::Error(message)) => Err(ControlError::Refused(message)),
        Err(error) => Err(ControlError::Garbled { path: path.to_owned(), reason: error.to_string() }),
    }
}

/// Says of a process that does not answer what it is about. The kernel names whoever has made the socket, which is another one if the switch was replaced since.
fn describe(who: Option<u32>) -> String {
    let unknown = "is the process stopped or overloaded?".to_owned();
    let Some(pid) = who else { return unknown };
    // The name is in brackets and may have anything in it; the state is the word behind it.
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return unknown };
    let Some((name, rest)) = stat.rsplit_once(')') else { return unknown };
    if !name.ends_with("(ringferry") {
        return unknown;
    }
    match rest.trim_start().chars().next() {
        Some('T' | 't') => {
            format!("its process {pid} is stopped (SIGSTOP, or a debugger): `kill -CONT {pid}` has it go on")
        }
        Some('Z' | 'X') => {
            format!(
                "its process {pid} has ended, and whoever started it has not noticed: is that one stopped?"
            )
        }
        Some(state) => format!("its process {pid} is in state {state}: is it overloaded?"),
        None => unknown,
    }
}

/// Sends one line and receives one, with whatever descriptors come with it. Fails with `WouldBlock` when nothing moves for as long as `patience` says, or when that takes
/// longer than `longest`. `who` becomes the process at the other end.
fn exchange(
    path: &Path,
    request: &Request,
    patience: Patience<'_>,
    longest: Duration,
    who: &mut Option<u32>,
) -> io::Result<(Vec<u8>, Vec<OwnedFd>, Stream)> {
    check_directory(path)?;
    let end = Instant::now() + longest;
    let stream = Stream::connect(path)?;
    let peer = stream.peer_credentials()?;
    check_listener(path, peer.uid)?;
    *who = peer.pid;
    stream.set_timeout(Some(patience.pause))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    let mut rest = line.as_slice();
    while !rest.is_empty() {
        rest = &rest[stream.send(rest, &[])?..];
    }
    let (mut answer, mut fds) = (Vec::new(), Vec::new());
    let mut piece = vec![0; 64 * 1024];
    if patience.pause > SOON && !stream.is_readable_within(SOON)? {
        (patience.waits)(&describe(*who));
        stream.set_timeout(Some(patience.pause - SOON))?;
    }
    while answer.last() != Some(&b'\n') && answer.len() <= MAX_ANSWER {
        let bytes = stream.recv(&mut piece, &mut fds)?.bytes;
        if bytes == 0 {
            break; // half an answer is no JSON and will be reported as such
        }
        answer.extend_from_slice(&piece[..bytes]);
        if Instant::now() > end {
            return Err(io::ErrorKind::WouldBlock.into());
        }
    }
    Ok((answer, fds, stream))
}

#[cfg(test)]
mod tests {
    use ringferry_sys::socket::Listener;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);
    const SHORT: Duration = Duration::from_millis(50);

    fn patience(pause: Duration) -> Patience<'static> {
        Patience { pause, ..Patience::default() }
    }

    #[test]
    fn a_process_that_is_no_switch_is_not_described() {
        // This test's own process is none.
        assert_eq!(describe(Some(std::process::id())), describe(None));
        assert_eq!(describe(Some(u32::MAX)), describe(None));
    }

    fn listener() -> (tempfile::TempDir, PathBuf, Listener) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = Listener::bind(&path).unwrap();
        (folder, path, listener)
    }

    #[test]
    fn a_switch_whose_socket_was_removed_is_not_started_again() {
        let (folder, path, listener) = listener();
        let said = || ControlError::NotRunning(path.clone()).to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(said().contains("but somebody has removed its file"), "{}", said());
        std::fs::create_dir(&path).unwrap();
        assert!(said().contains("something that is no socket lies in its place"), "{}", said());
        std::fs::remove_dir(&path).unwrap();
        let other = folder.path().join("other");
        assert!(ControlError::NotRunning(other).to_string().contains("start one with `ringferry run`"));
        drop(listener);
        assert!(said().contains("start one with `ringferry run`"), "{}", said());
    }

    #[test]
    fn a_switch_that_is_stopped_is_not_waited_for() {
        let (_folder, path, _listener) = listener();
        // The kernel takes the connection and the request, and nobody answers.
        let error = exchange(&path, &Request::Show { addresses: None }, patience(SHORT), LONG, &mut None)
            .map(drop)
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
    }

    /// Only root can listen as another user.
    #[test]
    fn an_impostor_in_a_directory_of_everybodys_is_told_nothing() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o1777)).unwrap();
        let path = folder.path().join("control");
        // Linux has a user for each thread.
        let user = rustix::process::Uid::from_raw(1);
        let listens = || {
            rustix::thread::set_thread_res_uid(user, user, user).ok().map(|()| Listener::bind(&path).unwrap())
        };
        let Some(listener) = std::thread::scope(|scope| scope.spawn(listens).join().unwrap()) else {
            eprintln!("skipped: only root, of all users, can listen as another one");
            return;
        };
        let ask = || exchange(&path, &Request::Show { addresses: None }, patience(SHORT), LONG, &mut None);
        let error = ask().map(drop).unwrap_err().to_string();
        assert!(error.contains("user 1 listens there"), "{error}");
        let peer = listener.accept().unwrap().unwrap();
        assert_eq!(peer.recv(&mut [0; 8], &mut Vec::new()).unwrap().bytes, 0, "it was told something");
        // In a directory of root's it is the switch that root has started for user 1.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(ask().map(drop).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn an_answer_that_comes_in_drops_has_an_end() {
        let (_folder, path, listener) = listener();
        let drops = std::thread::spawn(move || {
            let peer = listener.wait().unwrap();
            // Until nobody reads any more.
            while peer.send(b" ", &[]).is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let error = exchange(&path, &Request::Show { addresses: None }, patience(LONG), SHORT, &mut None)
            .map(drop)
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
        drops.join().unwrap();
    }
}
