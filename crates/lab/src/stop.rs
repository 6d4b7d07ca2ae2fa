//! Ctrl-C: the first one asks the lab to keep what it has and finish, the second one ends it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::signal::{Signal, Signals};

/// A flag that is set once the user wants to stop. It is cheap to ask from any thread.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

/// The exit status of a program that Ctrl-C ended: 128 and the signal's number.
const INTERRUPTED: i32 = 130;

impl Stop {
    /// Never asked for until [`Stop::request`].
    pub fn new() -> Self {
        Self::default()
    }

    /// Watches for SIGINT and SIGTERM from a thread of its own, for the rest of the program's life. Call it
    /// before other threads start; see [`Signals::new`].
    ///
    /// # Errors
    /// Too many open files or threads.
    pub fn watch() -> io::Result<Self> {
        let stop = Self::new();
        let seen = stop.clone();
        let signals = Signals::new(&[Signal::INT, Signal::TERM])?;
        let epoll = Epoll::new()?;
        epoll.add(&signals, 0, Interest::READABLE)?;
        std::thread::Builder::new().name("lab-signals".into()).spawn(move || {
            let mut events = EventBuf::with_capacity(1);
            while epoll.wait(&mut events, None).is_ok() {
                while let Ok(Some(_)) = signals.next() {
                    if seen.requested() {
                        std::process::exit(INTERRUPTED);
                    }
                    seen.request();
                    eprintln!("\nstopping; what was measured is kept (once more to give up at once)");
                }
            }
        })?;
        Ok(stop)
    }

    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
