//! The messages between switch and helper: one JSON object a line, and descriptors with some replies.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use ringferry_sys::socket::{MAX_FDS, Stream};
use rustix::event::{PollFd, PollFlags, Timespec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Upper bound on a request, in bytes. The longest requests carry one port with its rules.
pub(super) const MAX_REQUEST: usize = 1 << 20;

/// Upper bound on a reply, in bytes. The longest replies carry a whole configuration: some hundred bytes for each port, unless it has
/// long lists of addresses.
pub(super) const MAX_REPLY: usize = 32 << 20;

/// A request of the switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Request {
    /// Connect to the socket of this port; the reply carries the connection.
    Connect {
        /// Name of the port to connect, which must be in the charter.
        port: String,
    },
    /// Change settings of a port in the configuration file, those that can change while it is open.
    Keep {
        /// A configuration with one port.
        port: String,
        /// The keys that are to be in the file as they are in `port`.
        set: Vec<String>,
        /// The keys that are to be in the file only if `port` would not be as it is without them.
        unset: Vec<String>,
    },
    /// Open what a port needs, for which the switch has no rights any more; the reply carries the descriptors.
    Open {
        /// A configuration with one port.
        port: String,
        /// Number of workers, the most queues that a tap is opened with.
        workers: usize,
    },
    /// Say whether a port that the configuration file has could be opened, as far as that is known before it is tried.
    CanOpen {
        /// A configuration with one port.
        port: String,
    },
    /// Set up the interface of a tap that is open.
    SetUp {
        /// A configuration with one port.
        port: String,
        /// The port as it was: what it asked for, and `port` does not, is undone.
        before: Option<String>,
    },
    /// Say what of the settings of a tap's interface somebody has undone.
    Astray {
        /// A configuration with one port.
        port: String,
    },
    /// Remove the file of a port's socket, which is closed, and forget the port.
    Close {
        /// Name of the port.
        port: String,
    },
    /// Add a port to the configuration file.
    KeepPort {
        /// A configuration with one port, which is open.
        port: String,
    },
    /// Remove a port from the configuration file.
    ForgetPort {
        /// Name of the port.
        port: String,
    },
    /// Change a wire in the configuration file, or add it.
    KeepWire {
        /// The wire as a file has it.
        wire: String,
    },
    /// Remove a wire from the configuration file.
    ForgetWire {
        /// Name of the wire.
        wire: String,
    },
    /// Read the configuration file; the reply carries the configuration.
    Read,
    /// Read a file of the directory of policies; the reply carries its text.
    PolicyFile {
        /// Its name there.
        file: String,
    },
    /// Make the control socket anew, whose file was removed; the reply carries it.
    Listen,
    /// Remove the files of the switch's sockets that nobody listens on.
    Tidy,
}

/// A reply of the helper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The request was carried out.
    Done,
    /// The configuration file, or a drop-in file of it, was changed.
    Kept {
        /// The file, for people.
        file: String,
        /// True if the file makes this very port now.
        same: bool,
    },
    /// The text of a file.
    Text {
        /// All of it.
        text: String,
    },
    /// What was undone, for people.
    Astray {
        /// One for each setting.
        settings: Vec<String>,
    },
    /// The configuration in the file.
    Config {
        /// The configuration, as a file.
        text: String,
        /// The drop-in files of the ports that are in one.
        drop_ins: BTreeMap<String, PathBuf>,
        /// What may be half of something ([`ConfigFile`](crate::config::ConfigFile)).
        #[serde(default)]
        blank: BTreeSet<PathBuf>,
    },
    /// The configuration file makes no sense, or would make none after the change; it is as it was.
    Refused {
        /// The problems of the file.
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
    pub(super) fn send(&mut self, message: &impl Serialize, fds: &[OwnedFd]) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut sent = self.0.send(&line, &fds)?;
        while sent < line.len() {
            sent += self.0.send(&line[sent..], &[])?;
        }
        Ok(())
    }

    /// Returns true if something can be received, or the other end is gone, within this time.
    pub(super) fn is_readable(&self, within: Duration) -> bool {
        let within = Timespec { tv_sec: 0, tv_nsec: within.subsec_nanos().into() };
        let mut looked = [PollFd::new(&self.0, PollFlags::IN)];
        // Whatever is wrong with the connection is found by receiving.
        !matches!(rustix::event::poll(&mut looked, Some(&within)), Ok(0))
    }

    /// Sends bytes, and no more after that.
    #[cfg(test)]
    pub(super) fn send_bytes(self, bytes: &[u8]) -> io::Result<()> {
        if !bytes.is_empty() {
            self.0.send(bytes, &[])?;
        }
        Ok(())
    }

    /// Receives a message of at most `limit` bytes with its descriptors, or `None` at the end of the stream.
    ///
    /// # Errors
    /// The message is too long, is not valid JSON of this type, or takes too long.
    pub(super) fn receive<T: DeserializeOwned>(
        &mut self,
        limit: usize,
    ) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let mut line = Vec::new();
        let mut fds = Vec::new();
        let mut part = [0; 4096];
        while line.last() != Some(&b'\n') {
            let received = self.0.recv(&mut part, &mut fds)?;
            line.extend_from_slice(&part[..received.bytes]);
            if received.bytes == 0 {
                return if line.is_empty() { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
            if line.len() > limit || fds.len() > MAX_FDS {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        Ok(Some((serde_json::from_slice(&line)?, fds)))
    }
}
