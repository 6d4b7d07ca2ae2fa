//! Telling that a process does not run any more before the kernel has closed all that it had.
//!
//! A process that is killed has ended, for whoever waits for that, when all its files are closed. That takes seconds where somebody has many locks on eventfds
//! ([`EventId`](crate::eventfd::EventId)). A lifeline is a file in memory on which a process holds a lock (`F_SETLK`). The kernel takes that away when it closes the descriptor, which it
//! does when no thread of the process runs any more, in the order of the numbers, and before it releases any file: a pipe, say, is seen to be closed only after all
//! descriptors were.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use rustix::fs::{FlockOperation, MemfdFlags, fcntl_lock};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{Flock, FlockType, Pid, fcntl_getlk};

use crate::inherited;

/// The number under which a child inherits a lifeline: the first that is closed, but for those of its input and output.
pub const NUMBER: RawFd = 3;

/// The variable of a child's environment that has this number, if `LISTEN_PID` is the child's.
pub const VARIABLE: &str = "RINGFERRY_LIFELINE";

static HELD: OnceLock<OwnedFd> = OnceLock::new();

/// Makes a lifeline that nobody holds.
///
/// # Errors
/// `EMFILE`, if too many files are open.
pub fn make() -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create("ringferry-lifeline", MemfdFlags::CLOEXEC)?)
}

/// Holds the lifeline that this process has inherited, or else one of its own, until it ends. Call it when all descriptors that were
/// passed by their numbers [have been taken](inherited::take), as its own could be taken for one of those that is missing, and before many files are opened, as it is to have a low
/// number. Without a descriptor to be had there is none.
pub fn hold() {
    let [pid, number] = ["LISTEN_PID", VARIABLE].map(|name| std::env::var(name).ok());
    let is_for_us = pid.and_then(|pid| pid.parse().ok()) == Some(std::process::id());
    let number = number.and_then(|number| number.parse().ok()).filter(|_| is_for_us);
    let inherited = number.and_then(|number| inherited::take(number).ok());
    let Some(lifeline) = inherited.or_else(|| make().ok()) else { return };
    if fcntl_lock(&lifeline, FlockOperation::NonBlockingLockExclusive).is_ok() {
        // Any close of a descriptor of that file would let go of it.
        let _ = HELD.set(lifeline);
    }
}

/// Returns the lifeline that this process holds.
pub fn held() -> Option<BorrowedFd<'static>> {
    HELD.get().map(AsFd::as_fd)
}

/// Returns a pipe that ends when the process that holds a lifeline does; `None` if that one does not hold it, or no thread can be had to wait for it.
pub fn watch(lifeline: OwnedFd, process: Pid) -> Option<OwnedFd> {
    let holder = fcntl_getlk(&lifeline, &Flock::from(FlockType::WriteLock)).ok()??;
    if holder.pid != Some(process) {
        return None;
    }
    let (seen, end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).ok()?;
    let wait = move || {
        while fcntl_lock(&lifeline, FlockOperation::LockExclusive) == Err(Errno::INTR) {}
        drop(end);
    };
    std::thread::Builder::new().name("ringferry-life".to_owned()).spawn(wait).ok()?;
    Some(seen)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::process::{Spawn, spawn};

    fn ends_within(seen: &OwnedFd, time: Duration) -> bool {
        let time = Timespec::try_from(time).unwrap();
        poll(&mut [PollFd::new(seen, PollFlags::IN)], Some(&time)).unwrap() > 0
    }

    /// The child is one of perl's, which can take the lock (`F_SETLK` is 6, `F_WRLCK` 1).
    #[test]
    fn the_end_of_a_process_is_seen_by_the_lock_that_it_had() {
        let lifeline = make().unwrap();
        let own = Pid::from_raw(std::process::id() as i32).unwrap();
        assert!(watch(lifeline.try_clone().unwrap(), own).is_none(), "nobody holds it");
        let mut command = Command::new("perl");
        let script = "my $lock = pack('ssx4qqix4', 1, 0, 0, 0, 0); open(F, '+<&=3') or die; fcntl(F, 6, $lock) or die; syswrite(STDOUT, qq(held\n)); <STDIN>";
        command.args(["-e", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let keep_fds = vec![(lifeline.try_clone().unwrap(), NUMBER)];
        let mut child = spawn(&mut command, Spawn { keep_fds, ..Spawn::default() }).unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "held\n");
        assert!(watch(lifeline.try_clone().unwrap(), own).is_none(), "somebody else holds it");
        let seen = watch(lifeline, Pid::from_child(&child)).expect("the child holds it");
        assert!(!ends_within(&seen, Duration::ZERO));
        child.kill().unwrap();
        assert!(ends_within(&seen, Duration::from_secs(60)));
        child.wait().unwrap();
    }
}
