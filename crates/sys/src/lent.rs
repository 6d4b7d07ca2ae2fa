//! A Unix stream socket that a peer has made, and still has: the channel of a vhost-user back end's own requests.
//!
//! Whoever has the same socket can hold its locks for as long as it likes, inside a system call of its own whose argument lies in memory of a file system that does not answer
//! (FUSE, or userfaultfd): `setsockopt` holds the lock of the socket, `recvmsg` that of its queue, also with `MSG_PEEK` and without waiting for data. A thread
//! that asks for either waits beyond the reach of any signal. So there is no way here to set an option, or to receive but from one that is [given up](Emptied), on a thread where that harms nobody. Sending and polling take spin locks
//! alone (net/unix/af_unix.c), as do the questions of [`Stream::is_of_a_pair`](crate::socket::Stream::is_of_a_pair).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, Shutdown, shutdown};

use crate::socket::receive;

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

    /// Gives the stream up.
    pub fn give_up(self) -> Emptied {
        Emptied(self.0)
    }
}

/// A connected Unix stream socket that is given up: when it is dropped, the peer can send nothing more, and what lies unread is received and closed, with all
/// descriptors, before the socket is. So whoever has copies of it, such as a service manager that keeps them, has nothing to wait for when it closes the last one. Drop it
/// where waiting harms nobody, on the thread of a [`Closer`](crate::closer::Closer).
#[derive(Debug)]
pub struct Emptied(OwnedFd);

impl Emptied {
    /// Takes a stream.
    pub fn of(fd: OwnedFd) -> Emptied {
        Emptied(fd)
    }
}

impl Drop for Emptied {
    fn drop(&mut self) {
        let _ = shutdown(&self.0, Shutdown::Both);
        let (mut bytes, mut fds) = ([0; 4096], Vec::new());
        while receive(self.0.as_fd(), &mut bytes, &mut fds, RecvFlags::DONTWAIT)
            .is_ok_and(|received| received.bytes > 0)
        {
            fds.clear();
        }
    }
}

impl AsFd for LentStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::socket::Stream;

    #[test]
    fn whoever_has_a_copy_of_what_was_given_up_has_nothing_to_close() {
        let (given, other) = UnixStream::pair().unwrap();
        let copy = OwnedFd::from(given.try_clone().unwrap());
        let other = Stream::from_fd(other.into()).unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        for _ in 0..3 {
            other.send(b"xy", &[writer.as_fd()]).unwrap();
        }
        drop((writer, LentStream::of(copy).give_up()));
        let mut fds = [PollFd::new(&reader, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())).unwrap(), 1, "nobody can write any more");
        assert!(other.send(b"x", &[]).is_err(), "nor can anything else be put there");
        drop(given);
    }
}
