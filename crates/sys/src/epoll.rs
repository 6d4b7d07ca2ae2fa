//! Waiting for many descriptors at once.
//!
//! The [`Epoll`] owns only itself. A descriptor that is closed leaves the set by itself only when
//! no copy of it is open anywhere; a peer may hold one, so remove what you stop serving.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use bitflags::bitflags;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::time::Timespec;

bitflags! {
    /// What to wait for. All of it is level-triggered: it is reported as long as it is true, so a
    /// loop may leave work for its next turn. Errors and a full hang-up are always reported.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Interest: u32 {
        /// There is something to read, or to accept.
        const READABLE = epoll::EventFlags::IN.bits();
        /// There is room to write.
        const WRITABLE = epoll::EventFlags::OUT.bits();
        /// The peer closed its side, or its writing half, of a stream socket.
        const HANGUP = epoll::EventFlags::RDHUP.bits();
    }
}

/// One descriptor that became ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The number given to [`Epoll::add`].
    pub token: u64,
    /// A read will not wait. Also set on hang-up and error, so that a reader finds out.
    pub readable: bool,
    /// A write will not wait. Also set on error.
    pub writable: bool,
    /// The peer is gone, wholly or in its writing half, or the descriptor has failed.
    pub hangup: bool,
}

/// Room for the events of one [`Epoll::wait`], made once and used again.
pub struct EventBuf {
    events: Box<[epoll::Event]>,
    len: usize,
}

impl EventBuf {
    /// Room for `capacity` events (at least one). More ready descriptors than that are reported by
    /// the next wait; the kernel goes round, so none is starved.
    pub fn with_capacity(capacity: usize) -> EventBuf {
        let none = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        EventBuf { events: vec![none; capacity.max(1)].into(), len: 0 }
    }

    /// The events of the last wait.
    pub fn iter(&self) -> impl Iterator<Item = Event> + '_ {
        self.events[..self.len].iter().map(|event| {
            let (flags, data) = (event.flags, event.data);
            let failed = flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
            let hangup = failed || flags.contains(epoll::EventFlags::RDHUP);
            Event {
                token: data.u64(),
                readable: hangup || flags.contains(epoll::EventFlags::IN),
                writable: flags.intersects(epoll::EventFlags::OUT | epoll::EventFlags::ERR),
                hangup,
            }
        })
    }

    /// How many events the last wait gave.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the last wait gave none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl std::fmt::Debug for EventBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// A set of descriptors to wait for.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

impl Epoll {
    /// An empty set. Closed on exec.
    ///
    /// # Errors
    /// Too many open files.
    pub fn new() -> io::Result<Epoll> {
        Ok(Epoll(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Adds `fd`; its events carry `token`.
    ///
    /// # Errors
    /// `AlreadyExists` when it is in the set; `EPERM` for a file that cannot be waited for, such
    /// as a regular file; `ENOSPC` when the user's limit (`/proc/sys/fs/epoll/max_user_watches`)
    /// is reached.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(token), flags(interest))?)
    }

    /// Changes what to wait for on `fd`, and its token.
    ///
    /// # Errors
    /// `NotFound` when it is not in the set.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.0, fd, epoll::EventData::new_u64(token), flags(interest))?)
    }

    /// Takes `fd` out of the set.
    ///
    /// # Errors
    /// `NotFound` when it is not in the set.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, fd)?)
    }

    /// Waits until something is ready, or for `timeout` (`None`: for ever; zero: only looks).
    /// Returns how many events `events` now holds; none when the time is up, and also when a signal
    /// handler ran, so callers with a deadline look at their clock.
    ///
    /// The timeout is kept to the nanosecond by `epoll_pwait2`; where that is missing (Linux before
    /// 5.11, or a container that forbids it) it is rounded up to milliseconds.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn wait(&self, events: &mut EventBuf, timeout: Option<Duration>) -> io::Result<usize> {
        events.len = 0;
        let exact = timeout.map(timespec);
        let mut result = epoll::wait(&self.0, &mut *events.events, exact.as_ref());
        if let (Err(Errno::NOSYS | Errno::PERM), Some(timeout)) = (&result, timeout) {
            result = epoll::wait(&self.0, &mut *events.events, Some(&whole_milliseconds(timeout)));
        }
        events.len = match result {
            Ok(n) => n,
            Err(Errno::INTR) => 0,
            Err(e) => return Err(e.into()),
        };
        Ok(events.len)
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn flags(interest: Interest) -> epoll::EventFlags {
    epoll::EventFlags::from_bits_retain(interest.bits())
}

fn timespec(time: Duration) -> Timespec {
    // A time beyond the kernel's range is as good as for ever: 292 billion years.
    Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

/// Rounded up, so that a wait never ends early, and at most what plain `epoll_wait` takes.
fn whole_milliseconds(time: Duration) -> Timespec {
    let most = Duration::from_millis(i32::MAX as u64);
    let millis = time.min(most).as_nanos().div_ceil(1_000_000) as u64;
    timespec(Duration::from_millis(millis))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eventfd::EventFd;

    #[test]
    fn events_carry_their_token_until_drained() {
        let epoll = Epoll::new().unwrap();
        let (a, b) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        epoll.add(&a, 7, Interest::READABLE).unwrap();
        epoll.add(&b, u64::MAX, Interest::READABLE).unwrap();
        let mut events = EventBuf::with_capacity(4);
        assert_eq!(epoll.wait(&mut events, Some(Duration::ZERO)).unwrap(), 0);
        assert!(events.is_empty());

        b.signal().unwrap();
        for _ in 0..2 {
            assert_eq!(epoll.wait(&mut events, None).unwrap(), 1);
            let event = events.iter().next().unwrap();
            assert_eq!(event, Event { token: u64::MAX, readable: true, writable: false, hangup: false });
        }
        b.drain().unwrap();
        assert_eq!(epoll.wait(&mut events, Some(Duration::from_nanos(1))).unwrap(), 0);
    }

    #[test]
    fn modify_and_remove_take_effect() {
        let epoll = Epoll::new().unwrap();
        let bell = EventFd::new().unwrap();
        let mut events = EventBuf::with_capacity(1);
        epoll.add(&bell, 1, Interest::READABLE).unwrap();
        assert_eq!(epoll.add(&bell, 1, Interest::READABLE).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        epoll.modify(&bell, 2, Interest::WRITABLE).unwrap();
        assert_eq!(epoll.wait(&mut events, None).unwrap(), 1);
        let event = events.iter().next().unwrap();
        assert!(event.writable && !event.readable && event.token == 2);
        epoll.remove(&bell).unwrap();
        assert_eq!(epoll.wait(&mut events, Some(Duration::ZERO)).unwrap(), 0);
        assert_eq!(epoll.remove(&bell).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_closed_peer_is_a_hangup() {
        let epoll = Epoll::new().unwrap();
        let (ours, theirs) = crate::socket::Stream::pair().unwrap();
        epoll.add(&ours, 3, Interest::READABLE | Interest::HANGUP).unwrap();
        drop(theirs);
        let mut events = EventBuf::with_capacity(1);
        assert_eq!(epoll.wait(&mut events, None).unwrap(), 1);
        let event = events.iter().next().unwrap();
        assert!(event.hangup && event.readable);
    }

    #[test]
    fn a_regular_file_cannot_be_waited_for() {
        let epoll = Epoll::new().unwrap();
        let file = tempfile::tempfile().unwrap();
        let error = epoll.add(&file, 0, Interest::READABLE).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn the_fallback_timeout_rounds_up() {
        let millis = |d| whole_milliseconds(d).tv_nsec / 1_000_000 + whole_milliseconds(d).tv_sec * 1000;
        assert_eq!(millis(Duration::ZERO), 0);
        assert_eq!(millis(Duration::from_nanos(1)), 1);
        assert_eq!(millis(Duration::from_micros(1_000)), 1);
        assert_eq!(millis(Duration::from_micros(1_001)), 2);
        assert_eq!(millis(Duration::MAX), i64::from(i32::MAX));
    }
}
