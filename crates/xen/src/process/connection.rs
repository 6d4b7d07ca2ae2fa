//! A domain's connection to the broker, shared by all its handles.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ringferry_sys::socket::Stream;

use super::wire::{MESSAGE, Reply, Request};

/// How long the broker may take to answer. It never waits for anything, so this is only ever reached when it was
/// stopped or the machine stands still.
const PATIENCE: Duration = Duration::from_secs(30);

/// The connection. It is the domain: closed, the domain is gone.
#[derive(Debug)]
pub(super) struct Connection {
    /// `None` after an answer was lost: what comes next would be the answer to something else.
    stream: Mutex<Option<Stream>>,
}

impl Connection {
    pub(super) fn open(path: &Path) -> io::Result<Connection> {
        let stream = Stream::connect(path)?;
        stream.set_timeout(Some(PATIENCE))?;
        Ok(Connection { stream: Mutex::new(Some(stream)) })
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// What the broker answered, or `NotConnected` once it is gone.
    pub(super) fn ask(&self, request: Request) -> io::Result<([u32; 3], Vec<OwnedFd>)> {
        let mut slot = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = slot.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        match exchange(stream, request) {
            Ok((Reply::Done(words), fds)) => Ok((words, fds)),
            Ok((Reply::Refused(errno), _)) => Err(io::Error::from_raw_os_error(errno)),
            Err(error) => {
                *slot = None;
                Err(io::Error::new(io::ErrorKind::NotConnected, format!("the broker is gone: {error}")))
            }
        }
    }

    /// Asks for something that comes with two descriptors.
    ///
    /// # Errors
    /// As for [`ask`](Self::ask).
    pub(super) fn ask_for_two(&self, request: Request) -> io::Result<([u32; 3], [OwnedFd; 2])> {
        let (words, fds) = self.ask(request)?;
        let lost = |_| io::Error::other("descriptors of the broker were lost: raise the limit of open files");
        Ok((words, fds.try_into().map_err(lost)?))
    }
}

fn exchange(stream: &Stream, request: Request) -> io::Result<(Reply, Vec<OwnedFd>)> {
    if stream.send(&request.encode(), &[])? != MESSAGE {
        return Err(io::ErrorKind::WriteZero.into());
    }
    let (mut reply, mut filled, mut fds) = ([0; MESSAGE], 0, Vec::new());
    while filled < MESSAGE {
        match stream.recv(&mut reply[filled..], &mut fds)?.bytes {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            received => filled += received,
        }
    }
    Ok((Reply::decode(&reply), fds))
}
