//! What the service manager is told while the switch runs: that it is alive, in what state its ports are, and that a reload begins and ends.
//!
//! The program makes a [`Manager`] of its connection, which it has since before its sandbox, and gives it to the switch. The control plane calls it with
//! every tick and when its [deadline](Manager::deadline) is over, on its own thread; nothing here waits. That the switch is alive is told only while
//! the control plane gets here *and* each worker has answered since the last time: one that hangs has the whole switch restarted, as guests that
//! it serves are cut off for good otherwise.

use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use ringferry_sys::systemd::Notifier;

use crate::ports::queues::Workers;

/// The connection to the service manager.
pub struct Manager {
    notifier: Notifier,
    watchdog: Option<Watchdog>,
    /// The state that was told last.
    status: String,
    /// It has to be told that this process is the service's main one, and had no room for it.
    owes_main: bool,
}

/// The duty to say again and again that the switch is alive.
struct Watchdog {
    /// Time between two times: half of what the manager allows.
    interval: Duration,
    next: Instant,
    /// Answers of workers that are awaited, with their numbers.
    awaited: Vec<(usize, Receiver<()>)>,
    /// True if it was logged that a worker does not answer.
    logged: bool,
}

impl Default for Manager {
    /// The manager of a switch that was started by nobody in particular.
    fn default() -> Self {
        Manager::new(Notifier::nobody(), None)
    }
}

impl Manager {
    /// Makes one that tells the manager at the other end of `notifier` within each `watchdog` that the switch is alive.
    pub fn new(notifier: Notifier, watchdog: Option<Duration>) -> Self {
        let watchdog = watchdog.map(|allowed| Watchdog {
            interval: allowed / 2,
            next: Instant::now(),
            awaited: Vec::new(),
            logged: false,
        });
        Manager { notifier, watchdog, status: String::new(), owes_main: false }
    }

    /// Returns the connection, for a process that goes on with it.
    pub(crate) fn connection(&self) -> Option<BorrowedFd<'_>> {
        self.notifier.connection()
    }

    /// Returns the time within which the manager wants to hear that the switch is alive.
    pub(crate) fn watchdog(&self) -> Option<Duration> {
        self.watchdog.as_ref().map(|watchdog| watchdog.interval * 2)
    }

    /// Returns the time at which [`Manager::watch`] has something to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.watchdog.as_ref().map(|watchdog| watchdog.next)
    }

    /// Tells the manager that the switch is alive, if it is time and every worker has answered, and asks the workers for the next time.
    pub(crate) fn watch(&mut self, now: Instant, workers: &Workers) {
        let Some(watchdog) = self.watchdog.as_mut().filter(|watchdog| watchdog.next <= now) else { return };
        // A worker that has ended is found by the control plane itself.
        watchdog.awaited.retain(|(_, answer)| answer.try_recv() == Err(TryRecvError::Empty));
        if let Some((worker, _)) = watchdog.awaited.first() {
            if !std::mem::replace(&mut watchdog.logged, true) {
                tracing::error!(
                    worker,
                    "a worker makes no progress: the service manager is not told that the switch is alive"
                );
            }
            watchdog.next = now + watchdog.interval / 4;
            return;
        }
        watchdog.logged = false;
        watchdog.next = now + watchdog.interval;
        watchdog.awaited = workers.probe();
        // A manager that has gone needs to hear nothing.
        let _ = self.notifier.alive();
    }

    /// Tells the manager the state of the switch in one line, if it is another than before.
    pub(crate) fn tell_status(&mut self, status: String) {
        if self.status != status {
            let _ = self.notifier.status(&status);
            self.status = status;
        }
    }

    /// Tells the manager that a reload has begun.
    pub(crate) fn reload_begins(&self) {
        let _ = self.notifier.reloading();
    }

    /// Tells the manager that a reload is over.
    pub(crate) fn reload_ends(&self) {
        let _ = self.notifier.ready();
    }

    /// Tells the manager that another process is the service's main one from now on, if its number is known.
    pub(crate) fn replaced_by(&self, pid: Option<u32>) {
        let _ = pid.map(|pid| self.notifier.main_pid(pid));
    }

    /// Tells the manager that this process is the service's main one, after another one has said that it is. One that is behind is told [later](Self::catch_up): it
    /// would take the end of the other one for this one's.
    pub(crate) fn main_again(&mut self) {
        self.owes_main = true;
        self.catch_up();
    }

    /// Tells the manager what it had no room for.
    pub(crate) fn catch_up(&mut self) {
        if self.owes_main {
            let told = self.notifier.main_pid(std::process::id());
            self.owes_main = told.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        }
    }

    /// Tells the manager that the switch begins to end.
    pub(crate) fn stopping(&self) {
        let _ = self.notifier.stopping();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;
    use crate::config::SwitchConfig;

    #[test]
    fn a_switch_is_alive_only_while_each_worker_answers() {
        let config = SwitchConfig { workers: Some(2), ..SwitchConfig::default() };
        let workers = Workers::start(&config).unwrap();
        let (theirs, ours) = UnixDatagram::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut manager = Manager::new(Notifier::of(ours), Some(Duration::from_secs(2)));
        let heard = || {
            let mut got = [0; 64];
            theirs.recv(&mut got).ok().map(|n| String::from_utf8_lossy(&got[..n]).into_owned())
        };
        let mut now = Instant::now();
        let mut watch = |manager: &mut Manager| {
            now += Duration::from_secs(1);
            manager.watch(now, &workers);
            heard()
        };
        let alive = Some("WATCHDOG=1".to_owned());
        assert_eq!(watch(&mut manager), alive);
        let held = workers.hold(1);
        // Whether it has answered before it was held or not, it does not answer twice.
        watch(&mut manager);
        for _ in 0..3 {
            assert_eq!(watch(&mut manager), None);
        }
        drop(held);
        let deadline = Instant::now() + Duration::from_secs(120);
        while watch(&mut manager) != alive {
            assert!(Instant::now() < deadline, "the worker does not answer");
            std::thread::sleep(Duration::from_millis(1));
        }
        // It is not time yet.
        let next = manager.deadline().unwrap();
        manager.watch(next - Duration::from_millis(1), &workers);
        assert_eq!(heard(), None);
        // The state is told when it changes.
        for status in ["one", "one", "two"] {
            manager.tell_status(status.to_owned());
        }
        assert_eq!(
            [heard(), heard(), heard()],
            [Some("STATUS=one".to_owned()), Some("STATUS=two".to_owned()), None]
        );
    }
}
