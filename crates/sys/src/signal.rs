//! Signals as events in an epoll set, instead of handlers (signalfd(2)).
//!
//! The main thread creates one [`Signals`] before it starts other threads, adds it to its epoll set, and calls
//! [`Signals::next`] whenever it is readable.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
pub use rustix::process::Signal;

/// A signalfd: a queue of the signals that it was made for.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks `signals` in the calling thread and queues them here from now on.
    ///
    /// A signal sent to the process goes to any thread that does not block it, so this must be called before other
    /// threads start, which inherit the mask. Children inherit it, too;
    /// [`process::spawn`](crate::process::spawn) clears it for them. The signals stay blocked after the drop, so
    /// that one that arrives meanwhile does not end the process in the middle of its clean-up.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`, if too many files are open.
    pub fn new(signals: &[Signal]) -> io::Result<Signals> {
        let set = set_of(signals);
        // SAFETY: the set is initialised; the old mask is not asked for.
        let result = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        // SAFETY: the set is initialised; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: signalfd has just made it, and nobody else knows it.
        Ok(Signals(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Returns the next signal that arrived, or `None`. Never blocks. A signal that arrived several times may be
    /// reported once.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn next(&self) -> io::Result<Option<Signal>> {
        // The record's first member is `ssi_signo`, a u32; nothing else in it is needed.
        let mut record = [0u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.0, &mut record) {
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
        let [a, b, c, d, ..] = record;
        let number = u32::from_ne_bytes([a, b, c, d]) as i32;
        Ok(Signal::from_named_raw(number))
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn set_of(signals: &[Signal]) -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set it is given.
    let mut set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    };
    for signal in signals {
        // SAFETY: the set is initialised; an impossible number is refused.
        unsafe { libc::sigaddset(&mut set, signal.as_raw()) };
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocked_signals_are_queued_in_the_descriptor() {
        // Signals to one thread, so that the other tests' threads are left alone.
        std::thread::spawn(|| {
            let signals = Signals::new(&[Signal::USR1, Signal::TERM]).unwrap();
            assert_eq!(signals.next().unwrap(), None);
            for signal in [Signal::USR1, Signal::TERM, Signal::TERM] {
                // SAFETY: the signal is blocked in this thread.
                assert_eq!(unsafe { libc::pthread_kill(libc::pthread_self(), signal.as_raw()) }, 0);
            }
            let mut got = [signals.next().unwrap().unwrap(), signals.next().unwrap().unwrap()];
            got.sort_by_key(|s| s.as_raw());
            assert_eq!(got, [Signal::USR1, Signal::TERM]);
            assert_eq!(signals.next().unwrap(), None);
        })
        .join()
        .unwrap();
    }
}
