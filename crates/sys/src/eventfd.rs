//! An eventfd used as a doorbell between a queue's two sides.
//!
//! Owner: whoever holds the [`EventFd`]. A peer usually holds the same open file too, because
//! doorbells travel over the vhost-user socket, so nothing about it can be trusted to stay as it
//! was: the peer may fill the counter, or pass something that is no eventfd at all.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags};

/// `ANON_INODE_FS_MAGIC` of `linux/magic.h`: the file system eventfds live in.
const ANON_INODE_FS: i64 = 0x0904_1934;

/// A doorbell: a counter that can be waited for.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new doorbell that has not been rung. Non-blocking, closed on exec.
    ///
    /// # Errors
    /// What `eventfd2` says: in practice `EMFILE` or `ENFILE`, too many open files.
    pub fn new() -> io::Result<EventFd> {
        Ok(EventFd(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Takes over a doorbell a peer passed, and makes its open file non-blocking.
    ///
    /// Pipes, regular files, sockets and devices are refused: a write to them can block however
    /// they are opened. What remains (the kernel's anonymous files) either is an eventfd or answers
    /// [`signal`](Self::signal) and [`drain`](Self::drain) with an error at once.
    ///
    /// A ring already in the counter is kept.
    ///
    /// # Errors
    /// `InvalidInput` when it is not an eventfd, or what `fcntl` says. The descriptor is closed.
    pub fn from_fd(fd: OwnedFd) -> io::Result<EventFd> {
        // The type of this field differs between architectures; the value fits all of them.
        if rustix::fs::fstatfs(&fd)?.f_type as i64 != ANON_INODE_FS {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the descriptor is not an eventfd: the peer must pass one made by eventfd(2)",
            ));
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        Ok(EventFd(fd))
    }

    /// Rings. Never waits: a counter that is full has been rung already, which is success.
    ///
    /// One way to make it wait is left, and needs a process that shares the open file, works
    /// against us, and both clears `O_NONBLOCK` again and fills the counter to its last value: Linux has no
    /// non-waiting write to an eventfd (`RWF_NOWAIT` is for reads only). A thread that may meet such a
    /// peer lets itself be [interrupted](crate::interrupt).
    ///
    /// # Errors
    /// `Interrupted` when it waited all the same, or what `write` says when this is not an eventfd: the
    /// peer works against us; stop using it.
    #[inline]
    pub fn signal(&self) -> io::Result<()> {
        match rustix::io::write(&self.0, &1u64.to_ne_bytes()) {
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Takes back all rings; says whether there were any. Never waits, whatever the peer did to
    /// the file's flags.
    ///
    /// # Errors
    /// What `preadv2` says when this is not an eventfd. It may then stay readable for ever: remove
    /// it from the epoll set, or the loop spins.
    #[inline]
    pub fn drain(&self) -> io::Result<bool> {
        let mut count = [0u8; 8];
        let mut buffers = [IoSliceMut::new(&mut count)];
        match rustix::io::preadv2(&self.0, &mut buffers, u64::MAX, ReadWriteFlags::NOWAIT) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// A second descriptor of the same doorbell, to give to a peer or another thread.
    ///
    /// # Errors
    /// Too many open files.
    pub fn try_clone(&self) -> io::Result<EventFd> {
        Ok(EventFd(self.0.try_clone()?))
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<EventFd> for OwnedFd {
    fn from(event: EventFd) -> OwnedFd {
        event.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_counted_once() {
        let bell = EventFd::new().unwrap();
        assert!(!bell.drain().unwrap());
        bell.signal().unwrap();
        bell.signal().unwrap();
        assert!(bell.drain().unwrap());
        assert!(!bell.drain().unwrap());
    }

    #[test]
    fn a_ring_before_hand_over_is_kept() {
        let ours = EventFd::new().unwrap();
        let theirs = ours.try_clone().unwrap();
        theirs.signal().unwrap();
        let taken = EventFd::from_fd(ours.into()).unwrap();
        assert!(taken.drain().unwrap());
    }

    #[test]
    fn a_full_counter_counts_as_rung() {
        let bell = EventFd::new().unwrap();
        rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        bell.signal().unwrap();
        assert!(bell.drain().unwrap());
    }

    #[test]
    fn from_fd_makes_a_blocking_eventfd_safe() {
        let blocking = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let peer = blocking.try_clone().unwrap();
        let bell = EventFd::from_fd(blocking).unwrap();
        rustix::io::write(&peer, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        bell.signal().unwrap();
        assert!(bell.drain().unwrap());
        // A peer that turns blocking on again cannot make a read wait.
        rustix::fs::fcntl_setfl(&peer, OFlags::empty()).unwrap();
        assert!(!bell.drain().unwrap());
    }

    #[test]
    fn other_files_are_refused() {
        let (pipe_read, pipe_write) = rustix::pipe::pipe().unwrap();
        let file = tempfile::tempfile().unwrap();
        for fd in [pipe_read, pipe_write, file.into()] {
            let error = EventFd::from_fd(fd).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn other_anonymous_files_fail_without_waiting() {
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
        let timer = rustix::time::timerfd_create(
            rustix::time::TimerfdClockId::Monotonic,
            rustix::time::TimerfdFlags::CLOEXEC,
        )
        .unwrap();
        for fd in [epoll, timer] {
            let bell = EventFd::from_fd(fd).unwrap();
            assert!(bell.signal().is_err());
            assert!(!matches!(bell.drain(), Ok(true)));
        }
    }
}
