//! The messages between switch and helper: one JSON object a line, and a descriptor with some replies.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use ringferry_sys::socket::Stream;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Upper bound on a message, in bytes. The longest messages carry the rules of one port.
pub(super) const MAX_MESSAGE: usize = 1 << 20;

/// A request of the switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Request {
    /// Connect to the socket of this port; the reply carries the connection.
    Connect {
        /// Name of the port to connect, which must be in the charter.
        port: String,
    },
    /// Change rules of a port in the configuration file.
    Keep {
        /// A configuration with one port: of it, name and rules are used.
        port: String,
        /// The keys of the rules that are to be in the file as they are in `port`.
        keys: Vec<String>,
    },
    /// Remove the files of the switch's sockets that nobody listens on.
    Tidy,
}

/// A reply of the helper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The request was carried out.
    Done,
    /// The configuration file was changed.
    Kept {
        /// True if the port has these very rules in the file now.
        same: bool,
    },
    /// The file is as it was: it would be refused at the next start.
    Refused {
        /// The problems that the file would have.
        text: String,
    },
    /// The request failed and nothing was changed.
    Failed {
        /// `errno`, if the system has refused it.
        code: Option<i32>,
        /// Description of the failure.
        text: String,
    },
}

impl From<io::Error> for Reply {
    fn from(error: io::Error) -> Self {
        Reply::Failed { code: error.raw_os_error(), text: error.to_string() }
    }
}

/// One end of the connection. Requests and replies alternate, so no message follows another one directly.
#[derive(Debug)]
pub(super) struct Connection(Stream);

impl Connection {
    pub(super) fn new(stream: Stream) -> Self {
        Self(stream)
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The other end is gone, or takes too long.
    pub(super) fn send(&mut self, message: &impl Serialize, fd: Option<OwnedFd>) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        let mut sent = self.0.send(&line, &fds)?;
        while sent < line.len() {
            sent += self.0.send(&line[sent..], &[])?;
        }
        Ok(())
    }

    /// Sends bytes, and no more after that.
    #[cfg(test)]
    pub(super) fn send_bytes(self, bytes: &[u8]) -> io::Result<()> {
        if !bytes.is_empty() {
            self.0.send(bytes, &[])?;
        }
        Ok(())
    }

    /// Receives a message, or `None` at the end of the stream. Descriptors but the first are closed.
    ///
    /// # Errors
    /// The message is too long, is not valid JSON of this type, or takes too long.
    pub(super) fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<(T, Option<OwnedFd>)>> {
        let mut line = Vec::new();
        let mut fd = None;
        let mut part = [0; 4096];
        while line.last() != Some(&b'\n') {
            let mut fds = Vec::new();
            let received = self.0.recv(&mut part, &mut fds)?;
            fd = fd.or_else(|| fds.into_iter().next());
            line.extend_from_slice(&part[..received.bytes]);
            if received.bytes == 0 {
                return if line.is_empty() { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
            if line.len() > MAX_MESSAGE {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        Ok(Some((serde_json::from_slice(&line)?, fd)))
    }
}
