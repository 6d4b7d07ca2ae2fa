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
//! a message at any point closes its descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringferry_sys::socket::Stream;
use zerocopy::{FromBytes, IntoBytes};

use crate::message::{Header, MAX_FDS, MAX_PAYLOAD, VERSION};

/// A complete message with the descriptors that came with it.
#[derive(Debug)]
pub(crate) struct Message {
    pub header: Header,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
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
    /// More descriptors came than any message carries, or the kernel dropped some.
    #[error("more than {MAX_FDS} descriptors with one message, or no room in our descriptor table")]
    TooManyFds,
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
    stream: Stream,
    buffer: Box<[u8; Header::LEN + MAX_PAYLOAD]>,
    filled: usize,
    fds: Vec<OwnedFd>,
}

impl Wire {
    pub fn new(stream: Stream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, buffer: Box::new([0; Header::LEN + MAX_PAYLOAD]), filled: 0, fds: Vec::new() })
    }

    /// Reads the next message; `None` when it is not yet complete. After an error the position in
    /// the stream is lost: close the connection.
    pub fn read(&mut self) -> Result<Option<Message>, WireError> {
        if !self.fill(Header::LEN)? {
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
        if !self.fill(Header::LEN + size)? {
            return Ok(None);
        }
        let payload = self.buffer[Header::LEN..Header::LEN + size].to_vec();
        self.filled = 0;
        Ok(Some(Message { header, payload, fds: std::mem::take(&mut self.fds) }))
    }

    /// Reads until `wanted` bytes of the current message are in the buffer; returns false when the
    /// socket has no more for now.
    fn fill(&mut self, wanted: usize) -> Result<bool, WireError> {
        while self.filled < wanted {
            match self.stream.recv(&mut self.buffer[self.filled..wanted], &mut self.fds) {
                Ok(got) if got.fds_lost || self.fds.len() > MAX_FDS => return Err(WireError::TooManyFds),
                Ok(got) if got.bytes == 0 => return Err(WireError::Disconnected),
                Ok(got) => self.filled += got.bytes,
                Err(err) => match err.kind() {
                    io::ErrorKind::WouldBlock => return Ok(false),
                    io::ErrorKind::ConnectionReset => return Err(WireError::Disconnected),
                    _ => return Err(err.into()),
                },
            }
        }
        Ok(true)
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

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
