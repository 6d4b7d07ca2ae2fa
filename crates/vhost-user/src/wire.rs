//! Framing: reads and writes whole messages (header, payload and descriptors) on a non-blocking
//! Unix stream, and assembles a message over as many partial reads as it takes.
//!
//! A [`Wire`] is created with the connection by a `Session` or a `Frontend`, which alone calls
//! `read` and `write`, and is dropped with it. After an error its place in the stream is lost and
//! the connection must be closed.
//!
//! Descriptors belong to the message whose first byte they travel with. A message is read in two
//! steps, header then payload, so that the kernel never hands us the descriptors of the next
//! message with the end of this one. Every descriptor is owned from the moment it arrives: dropping
//! a message at any point has the wire's [`Closer`] close its descriptors. The same closes the
//! connection, with the descriptors that lie unread in it; the peer is told at once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_sys::closer::{Closer, Deferred};
use ringferry_sys::lent::Emptied;
use ringferry_sys::socket::{Received, Stream};
use zerocopy::{FromBytes, IntoBytes};

use crate::message::{Header, MAX_FDS, MAX_PAYLOAD, VERSION};

/// How long the rest of a message may take. A front end writes a message at once; what comes later is of one that has died or stands still, and its
/// descriptors may be what keeps the connection open: the front end's own end among them.
const REST: Duration = Duration::from_secs(30);

/// A complete message with the descriptors that came with it.
#[derive(Debug)]
pub(crate) struct Message {
    pub header: Header,
    pub payload: Vec<u8>,
    pub fds: Vec<Deferred<OwnedFd>>,
}

/// The reason why a connection cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Disconnected,
    /// The header's version is not 1, so this is hardly a vhost-user message.
    #[error("the peer speaks vhost-user version {0}, not 1: is it a vhost-user peer?")]
    Version(u32),
    /// The header announces a payload larger than any message has.
    #[error("a payload of {0} bytes, more than the {MAX_PAYLOAD} any vhost-user message needs")]
    Oversize(u32),
    /// More descriptors came than any message carries.
    #[error("more than {MAX_FDS} descriptors with one message")]
    TooManyFds,
    /// The kernel dropped descriptors that came with a message, because this process may open no more.
    #[error(
        "no room for the descriptors that came with a message, as this process has as many files open as it \
         may: raise its limit (ulimit -n, or LimitNOFILE= of its systemd unit)"
    )]
    NoRoomForFds,
    /// The kernel dropped descriptors that came with a message for another reason.
    #[error(
        "the kernel withheld descriptors that came with a message: see whether a security module (SELinux, \
         AppArmor) forbids them"
    )]
    FdsWithheld,
    /// A descriptor came with a message that has none. It was not received.
    #[error("a descriptor with a message that has none")]
    UnwantedFds,
    /// The beginning of a message came and the rest did not.
    #[error("the beginning of a message came, and the rest did not within {} s", REST.as_secs())]
    RestMissing,
    /// The socket's buffer is full because the peer does not read; nothing of the message was sent.
    #[error("the peer does not read what it is sent")]
    WouldBlock,
    /// Reading from or writing to the socket failed.
    #[error("the socket failed: {0}")]
    Io(#[from] io::Error),
}

/// One end of a connection, with the message that is being assembled.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: Arc<Deferred<Stream>>,
    buffer: Box<[u8; Header::LEN + MAX_PAYLOAD]>,
    filled: usize,
    fds: Vec<Deferred<OwnedFd>>,
    /// Since when the rest of a message is awaited.
    awaits_since: Option<Instant>,
    closer: Closer,
    /// Another process has the connection, too, and it is that one's to end it.
    shared: bool,
}

/// What has been received of a message that is not complete.
pub(crate) struct Partial<'a> {
    pub bytes: &'a [u8],
    pub fds: Vec<Deferred<OwnedFd>>,
}

impl Wire {
    pub fn new(stream: Stream, closer: Closer) -> io::Result<Self> {
        let stream = Arc::new(closer.defer(stream));
        stream.set_nonblocking(true)?;
        let buffer = Box::new([0; Header::LEN + MAX_PAYLOAD]);
        Ok(Self { stream, buffer, filled: 0, fds: Vec::new(), awaits_since: None, closer, shared: false })
    }

    /// Returns the closer of everything that comes from the peer.
    pub fn closer(&self) -> &Closer {
        &self.closer
    }

    /// Returns the connection.
    pub fn stream(&self) -> &Arc<Deferred<Stream>> {
        &self.stream
    }

    /// Says whether another process has the connection, too: then this end is closed without a word to the peer.
    pub fn set_shared(&mut self, shared: bool) {
        self.shared = shared;
    }

    /// Returns what has been received of the next message, for another process that goes on reading.
    pub fn partial(&self) -> (&[u8], &[Deferred<OwnedFd>]) {
        (&self.buffer[..self.filled], &self.fds)
    }

    /// Goes on with a message of which another process has received this much; returns false, and does nothing, if no message is so long.
    pub fn restore(&mut self, partial: Partial<'_>) -> bool {
        let Partial { bytes, fds } = partial;
        // A complete message would have been served.
        if bytes.len() >= self.buffer.len() || fds.len() > MAX_FDS {
            return false;
        }
        self.buffer[..bytes.len()].copy_from_slice(bytes);
        (self.filled, self.fds) = (bytes.len(), fds);
        self.awaits_since = (self.filled > 0).then(Instant::now);
        true
    }

    /// Reads the next message; `None` when it is not yet complete. After an error the position in
    /// the stream is lost: close the connection.
    pub fn read(&mut self) -> Result<Option<Message>, WireError> {
        self.read_with(true)
    }

    /// As [`Wire::read`], for a message that comes without descriptors. If any come, the stream is broken and they are never
    /// received: to close one may take as long as the peer likes.
    pub fn read_plain(&mut self) -> Result<Option<Message>, WireError> {
        self.read_with(false)
    }

    /// Finds out why the socket is readable, and takes nothing from it: true when there is data.
    pub fn has_data(&self) -> Result<bool, WireError> {
        match self.stream.peek(&mut [0]) {
            Ok(0) => Err(WireError::Disconnected),
            Ok(_) => Ok(true),
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(err) => Err(broken(err)),
        }
    }

    /// Finds out whether the rest of a message is missing for so long that it will not come. What lies in the socket and was not read is not missing.
    pub fn check(&self, now: Instant) -> Result<(), WireError> {
        let overdue = self.awaits_since.is_some_and(|since| now.saturating_duration_since(since) >= REST);
        match overdue && !self.has_data()? {
            true => Err(WireError::RestMissing),
            false => Ok(()),
        }
    }

    fn read_with(&mut self, fds: bool) -> Result<Option<Message>, WireError> {
        if !self.fill(Header::LEN, fds)? {
            return Ok(None);
        }
        let (header, _) = Header::read_from_prefix(&self.buffer[..]).expect("a buffer holds a header");
        if header.version() != VERSION {
            return Err(WireError::Version(header.version()));
        }
        let size = header.size as usize;
        if size > MAX_PAYLOAD {
            return Err(WireError::Oversize(header.size));
        }
        if !self.fill(Header::LEN + size, fds)? {
            return Ok(None);
        }
        let payload = self.buffer[Header::LEN..Header::LEN + size].to_vec();
        (self.filled, self.awaits_since) = (0, None);
        Ok(Some(Message { header, payload, fds: std::mem::take(&mut self.fds) }))
    }

    /// Reads until `wanted` bytes of the current message are in the buffer, with descriptors if `fds`; returns false when
    /// the socket has no more for now.
    fn fill(&mut self, wanted: usize, fds: bool) -> Result<bool, WireError> {
        while self.filled < wanted {
            let room = &mut self.buffer[self.filled..wanted];
            let received = if fds {
                let mut passed = Vec::new();
                let received = self.stream.recv(room, &mut passed);
                for fd in passed.iter().filter(|fd| self.stream.has_other_end(fd)) {
                    // It would keep the connection open for as long as it is here, which may be until other descriptors are closed.
                    let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
                }
                self.fds.extend(passed.into_iter().map(|fd| self.closer.defer_passed(fd)));
                received
            } else {
                self.stream.recv_bytes(room).map(|bytes| Received { bytes, fds_lost: false })
            };
            match received {
                Ok(_) if self.fds.len() > MAX_FDS => return Err(WireError::TooManyFds),
                // There was room for all that a message can have, so the kernel could not or would not pass them on.
                Ok(got) if got.fds_lost => return Err(self.why_fds_were_lost()),
                Ok(got) if got.bytes == 0 => return Err(WireError::Disconnected),
                Ok(got) => self.filled += got.bytes,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
                    if self.filled > 0 {
                        self.awaits_since.get_or_insert_with(Instant::now);
                    }
                    return Ok(false);
                }
                Err(err) => return Err(broken(err)),
            }
        }
        Ok(true)
    }

    /// Finds out why the kernel dropped descriptors, which it does not say. Those that it did pass on are still open, so a
    /// table that was full still is.
    fn why_fds_were_lost(&self) -> WireError {
        match rustix::io::fcntl_dupfd_cloexec(&**self.stream, 0) {
            Err(rustix::io::Errno::MFILE) => WireError::NoRoomForFds,
            _ => WireError::FdsWithheld,
        }
    }

    /// Sends a whole message or fails. A Unix stream takes a message of this size whole or not at
    /// all; it takes none when the peer has left hundreds of replies unread.
    pub fn write(
        &mut self,
        request: u32,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), WireError> {
        let header = Header { request, flags: flags | VERSION, size: payload.len() as u32 };
        let mut message = Vec::with_capacity(Header::LEN + payload.len());
        message.extend_from_slice(header.as_bytes());
        message.extend_from_slice(payload);
        match self.stream.send(&message, fds) {
            Ok(count) if count == message.len() => Ok(()),
            Ok(_) => Err(io::Error::from(io::ErrorKind::WriteZero).into()),
            Err(err) => match err.kind() {
                io::ErrorKind::WouldBlock => Err(WireError::WouldBlock),
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Err(WireError::Disconnected),
                _ => Err(err.into()),
            },
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // Whoever closes the stream may be busy for long.
        if !self.shared {
            self.stream.shutdown();
            // What lies unread would be closed by whoever has the last copy, and keeps it for the next process.
            if let Ok(copy) = self.stream.as_fd().try_clone_to_owned() {
                self.closer.close(Emptied::of(copy));
            }
        }
    }
}

/// The error of a socket that is not merely empty.
fn broken(err: io::Error) -> WireError {
    match err.kind() {
        io::ErrorKind::ConnectionReset => WireError::Disconnected,
        io::ErrorKind::InvalidData => WireError::UnwantedFds,
        _ => err.into(),
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
