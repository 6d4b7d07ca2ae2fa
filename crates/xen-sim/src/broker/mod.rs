//! [`Broker`]: a hypervisor whose domains are Linux processes, as a thread with an epoll loop that
//! serves their requests. [`Broker::bind`] starts it, domains connect to its socket, and dropping
//! it ends the thread and all domains.

mod state;

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::{BindError, Listener, Stream};
use ringferry_xen::domain::DomId;
use ringferry_xen::process::wire::{MESSAGE, Reply, Request};

use self::state::{ReplyWithFds, State};

/// Most connections at once, whether or not they are domains yet.
const MAX_CONNECTIONS: usize = 128;

const STOP: u64 = 0;
const LISTENER: u64 = 1;
const FIRST_CONNECTION: u64 = 2;

/// A broker that runs in a thread of its own until it is dropped. Its domains are processes, this
/// one included, that [connect](ringferry_xen::process::ProcessDomain::connect) to its socket. It
/// serves at most one request of each at a time and buffers nothing for those that do not read
/// their replies: they are disconnected.
#[derive(Debug)]
pub struct Broker {
    state: Arc<Mutex<State>>,
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Broker {
    /// Listens at `path`, a new Unix socket that only this user may use, and starts the thread.
    ///
    /// # Errors
    /// Any [`BindError`].
    pub fn bind(path: impl AsRef<Path>) -> Result<Broker, BindError> {
        let path = path.as_ref();
        let listener = Listener::bind_with_mode(path, 0o600)?;
        let start = || -> io::Result<Broker> {
            let (stop, epoll) = (EventFd::new()?, Epoll::new()?);
            epoll.add(&stop, STOP, Interest::READABLE)?;
            epoll.add(&listener, LISTENER, Interest::READABLE)?;
            let state = Arc::new(Mutex::new(State::default()));
            let event_loop = EventLoop {
                epoll,
                listener,
                state: Arc::clone(&state),
                connections: HashMap::new(),
                next: FIRST_CONNECTION,
            };
            let thread = std::thread::Builder::new().name("xen-broker".into()).spawn(|| event_loop.run())?;
            Ok(Broker { state, stop, thread: Some(thread) })
        };
        start().map_err(|source| BindError::Os { path: path.to_owned(), source })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Returns the number of connected domains.
    pub fn domains(&self) -> usize {
        self.state().domains()
    }

    /// Returns the number of pages whose grants have not ended.
    pub fn granted_pages(&self) -> usize {
        self.state().granted_pages()
    }

    /// Returns the number of mappings of granted pages, including those whose grants have ended or
    /// whose domain is gone, as far as domains report them. A process that was killed leaves its
    /// mappings counted.
    pub fn mapped_pages(&self) -> usize {
        self.state().mapped_pages()
    }

    /// Returns the number of open ends of event channels.
    pub fn open_ports(&self) -> usize {
        self.state().open_ports()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // No invariant spans a panic: each request leaves the tables whole or was refused.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.stop.signal(); // a doorbell of our own cannot fail
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// One connection, with an incomplete request, and with its domain once that is known.
#[derive(Debug)]
struct Client {
    stream: Stream,
    request: [u8; MESSAGE],
    filled: usize,
    domain: Option<DomId>,
}

/// The state of the broker's epoll loop.
struct EventLoop {
    epoll: Epoll,
    listener: Listener,
    state: Arc<Mutex<State>>,
    connections: HashMap<u64, Client>,
    next: u64,
}

impl EventLoop {
    fn run(mut self) {
        let mut events = EventBuf::with_capacity(64);
        loop {
            if let Err(error) = self.epoll.wait(&mut events, None) {
                tracing::error!("the broker stops: {error}");
                return;
            }
            for event in events.iter() {
                match event.token {
                    STOP => return,
                    LISTENER => self.accept(),
                    token => self.serve(token),
                }
            }
        }
    }

    fn accept(&mut self) {
        match self.listener.accept() {
            Ok(Some(stream)) if self.connections.len() < MAX_CONNECTIONS => {
                let token = self.next;
                self.next += 1;
                let ready = stream.set_nonblocking(true);
                if ready.and_then(|()| self.epoll.add(&stream, token, Interest::READABLE)).is_ok() {
                    let client = Client { stream, request: [0; MESSAGE], filled: 0, domain: None };
                    self.connections.insert(token, client);
                }
            }
            Ok(_) => {} // dropped: there are too many
            Err(error) => {
                // The listener stays readable: a pause lets others close something, instead of
                // spinning.
                tracing::warn!("a domain cannot connect: {error}");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }

    /// Reads the available bytes of one request, and serves it when it is complete.
    fn serve(&mut self, token: u64) {
        let Some(client) = self.connections.get_mut(&token) else { return };
        if client.on_readable(&self.state).is_err() {
            let _ = self.epoll.remove(&client.stream);
            if let Some(id) = client.domain {
                lock(&self.state).leave(id);
            }
            self.connections.remove(&token);
        }
    }
}

/// Pause of the loop after a connection could not be accepted for lack of descriptors.
const ACCEPT_PAUSE: std::time::Duration = std::time::Duration::from_millis(10);

impl Client {
    fn on_readable(&mut self, state: &Mutex<State>) -> io::Result<()> {
        let mut fds = Vec::new(); // a domain has none to give; they are dropped
        let received = match self.stream.recv(&mut self.request[self.filled..], &mut fds) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            received => received?.bytes,
        };
        if received == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.filled += received;
        if self.filled < MESSAGE {
            return Ok(());
        }
        self.filled = 0;
        let request = Request::decode(&self.request).ok_or(io::ErrorKind::InvalidData)?;
        let (reply, fds) = self.handle(request, &mut lock(state));
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        match self.stream.send(&reply.encode(), &fds)? {
            MESSAGE => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn handle(&mut self, request: Request, state: &mut State) -> ReplyWithFds {
        match (self.domain, request) {
            (Some(me), request) => state.handle(me, request),
            (None, Request::Hello(wanted)) => match state.enter(wanted) {
                Ok(id) => {
                    self.domain = Some(id);
                    (Reply::Done([id.0.into(), 0, 0]), Vec::new())
                }
                Err(errno) => (Reply::Refused(errno.raw_os_error()), Vec::new()),
            },
            (None, _) => (Reply::Refused(rustix::io::Errno::NOTCONN.raw_os_error()), Vec::new()),
        }
    }
}
