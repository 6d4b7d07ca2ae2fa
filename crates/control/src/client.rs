//! The asking end of a control socket.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringferry_sys::socket::Stream;

use crate::path::check_directory;
use crate::protocol::{Answer, Request, Response};

/// Longest answer [`call`] takes, in bytes: a full forwarding database of 2^20 addresses has 90 MB.
const MAX_ANSWER: usize = 256 * 1024 * 1024;
/// How long [`call`] waits for each piece of an answer. The switch answers between bursts, within milliseconds; but a
/// change of a tap's queues may wait for the kernel: on a machine with three programs too many it took more than five seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long [`call`] takes in all. A full forwarding database is here within seconds.
const LONGEST: Duration = Duration::from_secs(120);

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

/// Asks the switch whose control socket is `path`, and waits for the answer.
///
/// # Errors
/// See [`ControlError`].
pub fn call(path: &Path, request: &Request) -> Result<Answer, ControlError> {
    call_whole(path, request).map(|answered| answered.answer)
}

/// Does the same for an answer that comes with descriptors.
///
/// # Errors
/// See [`ControlError`].
pub fn call_with_fds(path: &Path, request: &Request) -> Result<(Answer, Vec<OwnedFd>), ControlError> {
    call_whole(path, request).map(|answered| (answered.answer, answered.fds))
}

/// Does the same, and returns the connection, for whatever follows on it.
///
/// # Errors
/// See [`ControlError`].
pub fn call_and_keep(path: &Path, request: &Request) -> Result<(Answer, Stream), ControlError> {
    call_whole(path, request).map(|answered| (answered.answer, answered.stream))
}

/// An answer with all that belongs to it.
struct Answered {
    answer: Answer,
    fds: Vec<OwnedFd>,
    stream: Stream,
}

fn call_whole(path: &Path, request: &Request) -> Result<Answered, ControlError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            ControlError::NotRunning(path.to_owned())
        }
        io::ErrorKind::PermissionDenied => ControlError::Permission(path.to_owned()),
        io::ErrorKind::WouldBlock => ControlError::Silent(path.to_owned()),
        _ => ControlError::Os { path: path.to_owned(), source },
    };
    let (line, fds, stream) = exchange(path, request, PATIENCE, LONGEST).map_err(failed)?;
    match serde_json::from_slice(&line) {
        Ok(Response::Ok(answer)) => Ok(Answered { answer, fds, stream }),
        Ok(Response::Error(message)) => Err(ControlError::Refused(message)),
        Err(error) => Err(ControlError::Garbled { path: path.to_owned(), reason: error.to_string() }),
    }
}

/// Sends one line and receives one, with whatever descriptors come with it. Fails with `WouldBlock` when nothing moves for `patience`, or when that takes
/// longer than `longest`.
fn exchange(
    path: &Path,
    request: &Request,
    patience: Duration,
    longest: Duration,
) -> io::Result<(Vec<u8>, Vec<OwnedFd>, Stream)> {
    check_directory(path)?;
    let end = Instant::now() + longest;
    let stream = Stream::connect(path)?;
    stream.set_timeout(Some(patience))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    let mut rest = line.as_slice();
    while !rest.is_empty() {
        rest = &rest[stream.send(rest, &[])?..];
    }
    let (mut answer, mut fds) = (Vec::new(), Vec::new());
    let mut piece = vec![0; 64 * 1024];
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

    fn listener() -> (tempfile::TempDir, PathBuf, Listener) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = Listener::bind(&path).unwrap();
        (folder, path, listener)
    }

    #[test]
    fn a_switch_that_is_stopped_is_not_waited_for() {
        let (_folder, path, _listener) = listener();
        // The kernel takes the connection and the request, and nobody answers.
        let error = exchange(&path, &Request::Show, SHORT, LONG).map(drop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
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
        let error = exchange(&path, &Request::Show, LONG, SHORT).map(drop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
        drops.join().unwrap();
    }
}
