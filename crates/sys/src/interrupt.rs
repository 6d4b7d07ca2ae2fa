//! Getting a thread out of a system call it waits in against all expectation.
//!
//! A peer that shares the open file of an eventfd can make it blocking again and fill its counter, and
//! whoever rings it next waits for as long as the peer likes. No flag of `write` prevents that. So the
//! thread that may be caught registers as a [`Target`], and a watchdog that sees it stand still
//! interrupts it: the call ends with `EINTR`.

use std::sync::Once;

/// The signal used: one that does nothing to a process that does not ask for it.
const SIGNAL: libc::c_int = libc::SIGURG;

/// A thread that can be interrupted.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    process: libc::pid_t,
    thread: libc::pid_t,
}

impl Target {
    /// The calling thread.
    pub fn current() -> Target {
        static INSTALL: Once = Once::new();
        INSTALL.call_once(install);
        // SAFETY: these calls take no arguments and cannot fail.
        unsafe { Target { process: libc::getpid(), thread: libc::gettid() } }
    }

    /// Ends the system call the thread waits in, if it does. Harmless otherwise, and when the thread has
    /// ended.
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
