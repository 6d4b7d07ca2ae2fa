//! Interrupting a thread that a peer has blocked in a system call.
//!
//! A peer that shares the open file of an eventfd can make it blocking again and fill its counter; the next thread
//! that rings it then blocks for as long as the peer likes, and no flag of `write` prevents that. A worker
//! therefore makes a [`Target`] of itself when it starts, and a watchdog thread that sees it make no progress
//! calls [`Target::interrupt`], which ends the system call with `EINTR`.

use std::sync::Once;

/// The signal that interrupts; its default action is to be ignored.
const SIGNAL: libc::c_int = libc::SIGURG;

/// A thread that can be interrupted.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    process: libc::pid_t,
    thread: libc::pid_t,
}

impl Target {
    /// Returns the calling thread as a target, and installs the signal handler the first time.
    pub fn current() -> Target {
        static INSTALL: Once = Once::new();
        INSTALL.call_once(install);
        // SAFETY: these calls take no arguments and cannot fail.
        unsafe { Target { process: libc::getpid(), thread: libc::gettid() } }
    }

    /// Ends the system call in which the thread is blocked, if any. It is harmless otherwise, and if the thread
    /// has ended.
    pub fn interrupt(self) {
        // SAFETY: tgkill takes numbers; a thread that is gone, or another process's, is refused.
        unsafe { libc::syscall(libc::SYS_tgkill, self.process, self.thread, SIGNAL) };
    }
}

fn install() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing. Without SA_RESTART, the interrupted call returns.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(_) as usize;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use rustix::fs::OFlags;

    use super::*;
    use crate::eventfd::EventFd;

    #[test]
    fn a_thread_caught_in_a_doorbell_gets_out() {
        let bell = EventFd::new().unwrap();
        let flags = rustix::fs::fcntl_getfl(&bell).unwrap();
        rustix::fs::fcntl_setfl(&bell, flags - OFlags::NONBLOCK).unwrap();
        rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let (sender, target) = channel();
        let (result, outcome) = channel();
        let thread = std::thread::spawn(move || {
            sender.send(Target::current()).unwrap();
            result.send(bell.signal()).unwrap();
        });
        let target = target.recv().unwrap();
        let caught = loop {
            if let Ok(outcome) = outcome.recv_timeout(Duration::from_millis(20)) {
                break outcome;
            }
            target.interrupt();
        };
        assert_eq!(caught.unwrap_err().kind(), std::io::ErrorKind::Interrupted);
        thread.join().unwrap();
    }
}
