//! [`Running`]: a store with a thread of its own, which [`Server::start`] creates and dropping
//! ends. The thread and the callers share the server under a lock.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use ringferry_sys::epoll::{EventBuf, Interest};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::{BindError, Stream};

use super::{Client, DomId, POLL_EVENTS, Server};

/// Poller token of the eventfd that ends the thread.
const STOP: u64 = u64::MAX;

/// A [`Server`] and its thread. Dropping it ends the thread and closes all connections.
#[derive(Debug)]
pub struct Running {
    server: Arc<Mutex<Server>>,
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a thread that serves the store.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub fn start(self) -> io::Result<Running> {
        let stop = EventFd::new()?;
        let poller = Arc::clone(&self.poller);
        poller.add(stop.as_fd(), STOP, Interest::READABLE)?;
        let server = Arc::new(Mutex::new(self));
        let shared = Arc::clone(&server);
        let body = move || {
            let mut events = EventBuf::with_capacity(POLL_EVENTS);
            // The lock is not held while waiting.
            while poller.wait(&mut events, None).is_ok() && events.iter().all(|event| event.token != STOP) {
                let mut server = lock(&shared);
                events.iter().for_each(|event| server.handle(event));
            }
        };
        let thread = std::thread::Builder::new().name("store".into()).spawn(body)?;
        Ok(Running { server, stop, thread: Some(thread) })
    }
}

/// A panic elsewhere leaves no half-done change, so the store can be served on.
fn lock(server: &Mutex<Server>) -> MutexGuard<'_, Server> {
    server.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Running {
    /// Does what [`Server::introduce`] does, under the lock.
    pub fn introduce(&self, domain: DomId) {
        lock(&self.server).introduce(domain);
    }

    /// Does what [`Server::release`] does, under the lock.
    pub fn release(&self, domain: DomId) {
        lock(&self.server).release(domain);
    }

    /// Does what [`Server::listen`] does.
    ///
    /// # Errors
    /// Any [`BindError`].
    pub fn listen(&self, path: impl AsRef<Path>, domain: DomId) -> Result<(), BindError> {
        lock(&self.server).listen(path, domain)
    }

    /// Does what [`Server::attach`] does.
    ///
    /// # Errors
    /// Any error of `epoll_ctl`.
    pub fn attach(&self, stream: Stream, domain: DomId) -> io::Result<()> {
        lock(&self.server).attach(stream, domain)
    }

    /// Does what [`Server::client`] does.
    ///
    /// # Errors
    /// Too many open files.
    pub fn client(&self, domain: DomId) -> io::Result<Client> {
        lock(&self.server).client(domain)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The counter of a new eventfd has room.
        let _ = self.stop.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
