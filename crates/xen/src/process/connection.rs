//! [`Connection`]: a domain's connection to the broker. It is opened when the process becomes a
//! domain, is shared by all handles of the domain under a lock, and ends the domain when the last
//! of them is dropped.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ringferry_sys::socket::Stream;

use super::wire::{MESSAGE, Reply, Request};

/// Longest wait for the broker. It never blocks itself, so this is only reached when the broker was
/// stopped or the machine stands still.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// The connection to the broker, which ends the domain when it is closed.
#[derive(Debug)]
pub(super) struct Connection {
    /// `None` after a reply was lost, because the next reply would belong to another request.
    stream: Mutex<Option<Stream>>,
}

impl Connection {
    pub(super) fn open(path: &Path) -> io::Result<Connection> {
        let stream = Stream::connect(path)?;
        stream.set_timeout(Some(MAX_WAIT))?;
        Ok(Connection { stream: Mutex::new(Some(stream)) })
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// The broker's error, or `NotConnected` once it is gone.
    pub(super) fn request(&self, request: Request) -> io::Result<([u32; 3], Vec<OwnedFd>)> {
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

    /// Sends a request whose reply carries two descriptors.
    ///
    /// # Errors
    /// The errors of [`request`](Self::request).
    pub(super) fn request_with_two_fds(&self, request: Request) -> io::Result<([u32; 3], [OwnedFd; 2])> {
        let (words, fds) = self.request(request)?;
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
