//! Waiting for many descriptors at once (epoll(7), level-triggered).
//!
//! An event loop creates one [`Epoll`] and one [`EventBuf`] and uses them from its thread until it ends. The
//! set does not own the registered descriptors. A closed descriptor leaves the set only when no copy of it is
//! open anywhere; a peer may hold one, so a descriptor must be removed before it is closed.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use bitflags::bitflags;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::time::Timespec;

bitflags! {
    /// Conditions to wait for. All are level-triggered: they are reported as long as they hold, so a loop may
    /// leave work for its next round. Errors and a full hang-up are always reported.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Interest: u32 {
        /// Data can be read, or a connection can be accepted.
        const READABLE = epoll::EventFlags::IN.bits();
        /// Data can be written.
        const WRITABLE = epoll::EventFlags::OUT.bits();
        /// The peer of a stream socket closed it, or shut down its writing half.
        const HANGUP = epoll::EventFlags::RDHUP.bits();
    }
}

/// An event: a descriptor that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The number given to [`Epoll::add`].
    pub token: u64,
    /// A read will not block. It is also set on hang-up and error, so that a reader notices them.
    pub readable: bool,
    /// A write will not block. It is also set on error.
    pub writable: bool,
    /// The peer has closed the connection or its writing half, or the descriptor has failed.
    pub hangup: bool,
}

/// A buffer for the events of one [`Epoll::wait`], allocated once and reused.
pub struct EventBuf {
    events: Box<[epoll::Event]>,
    len: usize,
}

impl EventBuf {
    /// Allocates a buffer for `capacity` events (at least one). If more descriptors are ready, the next wait
    /// reports them; the kernel rotates through them, so none is starved.
    pub fn with_capacity(capacity: usize) -> EventBuf {
        let none = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        EventBuf { events: vec![none; capacity.max(1)].into(), len: 0 }
    }

    /// Iterates over the events of the last wait.
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

    /// Returns the number of events of the last wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the last wait returned no event.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl std::fmt::Debug for EventBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// An epoll instance: a set of descriptors to wait for.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

impl Epoll {
    /// Creates an empty set. It is closed on exec.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`, if too many files are open.
    pub fn new() -> io::Result<Epoll> {
        Ok(Epoll(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Adds `fd` to the set; its events carry `token`.
    ///
    /// # Errors
    /// `AlreadyExists`, if it is in the set; `EPERM` for a file that cannot be waited for, such as a regular
    /// file; `ENOSPC`, if the user's limit (`/proc/sys/fs/epoll/max_user_watches`) is reached.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(token), flags(interest))?)
    }

    /// Changes the conditions and the token of `fd`.
    ///
    /// # Errors
    /// `NotFound`, if it is not in the set.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.0, fd, epoll::EventData::new_u64(token), flags(interest))?)
    }

    /// Removes `fd` from the set.
    ///
    /// # Errors
    /// `NotFound`, if it is not in the set.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, fd)?)
    }

    /// Waits until a descriptor is ready or `timeout` has passed. `None` waits for ever; zero does not wait.
    /// Returns the number of events in `events`: 0 after the timeout and also after a signal handler ran, so
    /// callers with a deadline must check the time.
    ///
    /// The timeout has nanosecond resolution by `epoll_pwait2`; without that (Linux before 5.11, or a container
    /// that forbids it) it is rounded up to milliseconds.
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

/// Sets how much later than asked for the kernel may end timeouts of the calling thread, to wake up for several at once: by default 50
/// microseconds (`PR_SET_TIMERSLACK`). Zero sets the default.
///
/// # Errors
/// A container forbids it.
pub fn set_timer_slack(slack: Duration) -> io::Result<()> {
    let nanos = slack.as_nanos().try_into().unwrap_or(u64::MAX);
    Ok(rustix::thread::set_current_timer_slack(NonZeroU64::new(nanos))?)
}

fn timespec(time: Duration) -> Timespec {
    // A time beyond the kernel's range (292 billion years) is clamped.
    Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

/// Rounds up to milliseconds, so that a wait never ends early, and clamps to the range of `epoll_wait`.
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
    fn the_slack_of_timers_is_a_thread_s_own() {
        let slack = || rustix::thread::current_timer_slack().unwrap();
        let before = slack();
        std::thread::spawn(move || {
            set_timer_slack(Duration::from_micros(1)).unwrap();
            assert_eq!(slack(), 1000);
            set_timer_slack(Duration::ZERO).unwrap();
            assert_eq!(slack(), before);
        })
        .join()
        .unwrap();
        assert_eq!(slack(), before);
    }

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
