//! An eventfd as the doorbell of a queue (a kick or a call).
//!
//! One side makes an [`EventFd`] and passes its descriptor over the vhost-user socket; the other takes it over by
//! [`EventFd::from_fd`]. Each side closes its own descriptor when the queue stops. As both share the open file,
//! its state cannot be trusted: the peer may fill the counter, change flags, or pass a descriptor that is not an
//! eventfd at all.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags};

use crate::watchdog::guarded;

/// What `/proc/self/fd/N` links to if `N` is an eventfd. No other file has this name: those of files begin with a slash, and the kernel chooses
/// the names of what lies in no file system.
const NAME: &[u8] = b"anon_inode:[eventfd]";

/// Reads of a semaphore after which it is taken for one that never runs dry.
const MOST_READS: usize = 64;

/// `F_DUPFD_QUERY` of fcntl(2), since Linux 6.10: whether two descriptors are of the same open file. It is not in libc yet.
const F_DUPFD_QUERY: libc::c_int = 1027;

/// `KCMP_FILE` of kcmp(2), which tells the same on older systems, and of which seccomp profiles of containers may have none.
pub(crate) const KCMP_FILE: libc::c_int = 0;

/// The mark by which a program tells the open file of one doorbell from all others, also the program that goes on with it. It is drawn at random.
///
/// The kernel's own (`eventfd-id:` in `/proc/self/fdinfo`) cannot be asked for: that text has a line for each lock of the open file (`F_OFD_SETLK`), of which whoever
/// shares it sets as many as it likes, and takes a look at each lock of all eventfds of all processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(pub u64);

impl EventId {
    /// Draws one.
    pub fn draw() -> EventId {
        // Each has keys of its own, of a generator that the system has seeded.
        EventId(RandomState::new().hash_one(()))
    }
}

/// A doorbell: a counter that epoll can wait for.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Creates a doorbell that has not been rung. It is non-blocking and closed on exec.
    ///
    /// # Errors
    /// The errors of `eventfd2`, in practice `EMFILE` or `ENFILE` if too many files are open.
    pub fn new() -> io::Result<EventFd> {
        Ok(EventFd(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Takes over a doorbell that a peer passed, and makes its open file non-blocking. A count that is in it
    /// already is kept.
    ///
    /// Everything else is refused: a write to a pipe, file, socket or device can block whatever its flags, and other files of the kernel
    /// (timers, epoll instances, devices of KVM and VFIO) give a write a meaning of their own.
    ///
    /// # Errors
    /// `InvalidInput`, if it is not an eventfd; the errors of `fcntl`; `NotFound`, if `/proc` is not mounted, without which that cannot be told.
    /// The descriptor is closed then.
    pub fn from_fd(fd: OwnedFd) -> io::Result<EventFd> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        if rustix::fs::readlink(link, Vec::new())?.as_bytes() != NAME {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the descriptor is not an eventfd: the peer must pass one made by eventfd(2)",
            ));
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        Ok(EventFd(fd))
    }

    /// Returns true if another one is of the same open file. The peer has no say in how long that takes. Where the kernel does not tell (one before 6.10 without kcmp(2)),
    /// no two are.
    pub fn is_same(&self, other: &EventFd) -> bool {
        let [one, another] = [self, other].map(|event| event.0.as_raw_fd());
        // SAFETY: an operation on two numbers, both of descriptors that are open.
        match unsafe { libc::fcntl(one, F_DUPFD_QUERY, another) } {
            -1 => is_same_to_kcmp(one, another),
            answer => answer == 1,
        }
    }

    /// Rings the doorbell without blocking. A full counter counts as success, as the doorbell has been rung.
    ///
    /// A hostile peer can still block this call, if it shares the open file, clears `O_NONBLOCK` again and fills
    /// the counter to its last value: Linux has no non-blocking write to an eventfd (`RWF_NOWAIT` is for reads
    /// only). A thread that may meet such a peer should have itself [watched](crate::watchdog).
    ///
    /// # Errors
    /// `Interrupted`, if it blocked all the same; the errors of `write`, if this is not an eventfd. The peer is
    /// hostile in both cases, and the doorbell must not be used any more.
    #[inline]
    pub fn signal(&self) -> io::Result<()> {
        match guarded(|| rustix::io::write(&self.0, &1u64.to_ne_bytes())) {
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Resets the counter and returns true if it was not 0. Never blocks, whatever the peer did to the file's
    /// flags.
    ///
    /// # Errors
    /// The errors of `preadv2`, if this is not an eventfd. It may then stay readable for ever and must be removed
    /// from the epoll set, or the event loop spins.
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

    /// Waits until it rings, for so long at most; returns whether it does. The counter stays as it is. A signal may end the wait before its time.
    pub fn wait(&self, timeout: Duration) -> bool {
        // One that does not fit lasts for ever.
        let timeout = Timespec::try_from(timeout).ok();
        // The only other error is that the kernel has no memory, which passes.
        poll(&mut [PollFd::new(&self.0, PollFlags::IN)], timeout.as_ref()).is_ok_and(|ready| ready > 0)
    }

    /// Makes a second descriptor of the same doorbell, for a peer or another thread.
    ///
    /// # Errors
    /// `EMFILE`, if too many files are open.
    pub fn try_clone(&self) -> io::Result<EventFd> {
        Ok(EventFd(self.0.try_clone()?))
    }
}

fn is_same_to_kcmp(one: RawFd, another: RawFd) -> bool {
    let own = std::process::id();
    // SAFETY: a comparison of two of this process's own descriptors, given by their numbers.
    unsafe { libc::syscall(libc::SYS_kcmp, own, own, KCMP_FILE, one, another) == 0 }
}

/// [Drains](EventFd::drain) a doorbell that has rung until it is silent or there is work, and returns true, or false if neither comes: a peer that makes it
/// with `EFD_SEMAPHORE` and fills its counter has every read take 1 of 2^64. Such a doorbell keeps epoll awake for ever and must not be used any more.
///
/// A peer that offers work again and again, and rings each time, may ring as fast as it is heard. So work is looked for after every ring.
///
/// # Errors
/// The first error of `drain`, which reads the doorbell once.
#[inline]
pub fn falls_silent(
    mut drain: impl FnMut() -> io::Result<bool>,
    mut has_work: impl FnMut() -> bool,
) -> io::Result<bool> {
    for _ in 0..MOST_READS {
        if !drain()? || has_work() {
            return Ok(true);
        }
    }
    Ok(false)
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

    /// The kernel tells by `F_DUPFD_QUERY` or by kcmp, or by neither: then no two are the same, which is said here so that a run without either is not taken for one with.
    #[test]
    fn two_descriptors_of_an_open_file_are_told_from_those_of_two() {
        let (one, other) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        let copy = one.try_clone().unwrap();
        let passed = EventFd::from_fd(copy.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert!(one.is_same(&passed) && one.is_same(&copy), "this kernel has neither F_DUPFD_QUERY nor kcmp");
        assert!(!one.is_same(&other) && !other.is_same(&passed));
        assert_ne!(EventId::draw(), EventId::draw());
    }

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
    fn a_wait_ends_with_a_ring_which_it_does_not_take() {
        let bell = EventFd::new().unwrap();
        assert!(!bell.wait(Duration::ZERO));
        bell.signal().unwrap();
        assert!(bell.wait(Duration::MAX) && bell.wait(Duration::ZERO));
        assert!(bell.drain().unwrap());
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
    fn h1_other_anonymous_files_are_refused() {
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
        let timer = rustix::time::timerfd_create(
            rustix::time::TimerfdClockId::Monotonic,
            rustix::time::TimerfdFlags::CLOEXEC,
        )
        .unwrap();
        for fd in [epoll, timer] {
            assert_eq!(EventFd::from_fd(fd).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn m6_a_full_semaphore_never_falls_silent() {
        let semaphore = |count: u64| {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE;
            let fd = rustix::event::eventfd(0, flags).unwrap();
            rustix::io::write(&fd, &count.to_ne_bytes()).unwrap();
            EventFd::from_fd(fd).unwrap()
        };
        let full = semaphore(u64::MAX - 1);
        assert!(full.drain().unwrap());
        assert!(!falls_silent(|| full.drain(), || false).unwrap());
        let few = semaphore(5);
        assert!(few.drain().unwrap());
        assert!(falls_silent(|| few.drain(), || false).unwrap());
        assert!(!few.drain().unwrap());
    }

    #[test]
    fn a_doorbell_that_rings_as_fast_as_it_is_heard_may_do_so_if_there_is_work() {
        let mut heard = 0;
        let drain = || {
            heard += 1;
            Ok(true)
        };
        // The first ring came before its work could be seen.
        let mut looks = 0;
        let has_work = || {
            looks += 1;
            looks == 2
        };
        assert!(falls_silent(drain, has_work).unwrap());
        assert_eq!((heard, looks), (2, 2));
        assert!(!falls_silent(|| Ok(true), || false).unwrap());
    }
}
