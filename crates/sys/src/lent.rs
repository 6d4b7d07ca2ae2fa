//! A Unix stream socket that a peer has made, and still has: the channel of a vhost-user back end's own requests.
//!
//! Whoever has the same socket can hold its locks for as long as it likes, inside a system call of its own whose argument lies in memory of a file system that does not answer
//! (FUSE, or userfaultfd): `setsockopt` holds the lock of the socket, `recvmsg` that of its queue, also with `MSG_PEEK` and without waiting for data. A thread
//! that asks for either waits beyond the reach of any signal. So there is no way here to set an option or to receive. Sending and polling take spin locks
//! alone (net/unix/af_unix.c), as do the questions of [`Stream::is_of_a_pair`](crate::socket::Stream::is_of_a_pair).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;

/// A connected stream socket of a peer, for sending.
#[derive(Debug)]
pub struct LentStream(OwnedFd);

impl LentStream {
    /// Takes one end of a [pair](crate::socket::Stream::is_of_a_pair); of anything else only errors come. Whoever wraps it in a [`Deferred`](crate::closer::Deferred) does so before.
    pub fn of(fd: OwnedFd) -> LentStream {
        LentStream(fd)
    }

    /// Sends as much of `data` as there is room for, and returns the number of bytes. Never waits.
    ///
    /// # Errors
    /// `WouldBlock`, if there is no room; `BrokenPipe`, if the peer has closed the other end (no SIGPIPE is raised).
    pub fn send(&self, data: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| {
            rustix::net::send(&self.0, data, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
        })?)
    }

    /// Returns true if the peer has sent something, or has closed the other end.
    pub fn is_readable(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

impl AsFd for LentStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
