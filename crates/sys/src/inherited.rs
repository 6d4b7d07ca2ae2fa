//! Descriptors that a parent or service manager passed to this process by number.
//!
//! [`take`] turns such a number into an owned descriptor, once per number and process, from any thread.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

/// Takes ownership of an inherited descriptor and has it closed on exec.
///
/// It must be called for numbers that the user gave (`--ready-fd`, `fd = 5`) or the environment announced, before the
/// process opens descriptors of its own; otherwise a number that was not inherited could be one of those.
///
/// # Errors
/// `InvalidInput` for standard input, output and error; `AlreadyExists`, if it was taken before; the errors of
/// `fcntl`, in practice `EBADF` if no such descriptor is open.
pub fn take(number: RawFd) -> io::Result<OwnedFd> {
    static TAKEN: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());
    if number < 3 {
        let what = "descriptors 0, 1 and 2 are standard input, output and error: pass another number";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    // SAFETY: plain numbers; a number that is not open is refused.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    if !TAKEN.lock().unwrap_or_else(PoisonError::into_inner).insert(number) {
        let what = format!("descriptor {number} is used twice");
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
    }
    // SAFETY: it is open, the caller says it is meant for this process, and it is taken only once, so
    // nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standard_streams_closed_numbers_and_second_takers_are_refused() {
        assert_eq!(take(1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(take(1_000_000).unwrap_err().raw_os_error(), Some(libc::EBADF));
        // A descriptor that nobody else in this process owns.
        // SAFETY: dup of standard error at a number far from all others.
        let number = unsafe { libc::fcntl(2, libc::F_DUPFD, 900) };
        let _owner = take(number).unwrap();
        assert_eq!(take(number).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }
}
