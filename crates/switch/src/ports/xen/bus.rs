//! [`Bus`]: the thread of one entry that runs its xenbus back-end driver, and the two queues between it and the control plane.
//!
//! The store answers when it likes, and all guests share it, so the control plane never waits for it. [`OpenBus::open`] finds out whether there is
//! Xen, before the sandbox; [`OpenBus::start`] begins the thread, which lives as long as the entry. The thread reaches the store, owns the
//! connection and the [`BackendDriver`], and turns what happens there into [`BusEvent`]s. The control plane watches the [`Bus`], takes the events
//! with [`Bus::take`], and reports what it has done.
//!
//! ```text
//!   thread                                              control plane
//!     Reached, Found, Connect ------------------------>   makes ports, serves
//!            <---------------------------- connected      front ends are told so
//!     Disconnect -------------------------------------->  stops serving
//!            <------------------------- disconnected      nothing of the front end is mapped
//!     Lost -------------------------------------------->  removes all ports
//!            <------------------------------ cleared      the store is reached anew
//! ```
//!
//! Both queues keep their order. Each Connect is answered by one `disconnected`, when nothing of it is mapped any more, and the next
//! Connect of the interface comes after that. So an answer that crosses an event on its way means the connection that it was given for.
//!
//! Dropping the [`Bus`] cancels the request that is under way, so a store that does not answer delays nobody. From then on the thread asks the
//! store nothing. It unmaps what it has mapped for connections that were not taken, and ends.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::time::{Duration, Instant};

use ringferry_sys::eventfd::EventFd;
use ringferry_xen::domain::DomId;
use ringferry_xen::provider::{OpenError as ProviderError, Provider};
use ringferry_xen::store::{Cancel, Client, StoreError};
use ringferry_xen_net::offload::Accepts;
use ringferry_xen_net::xenbus::{BackConfig, BackEvent, BackendDriver, Polled, VifId};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use crate::config::{XenProvider, XenVifConfig};
use crate::plane::PAIRS;

/// Time between attempts to reach the store.
const RETRY: Duration = Duration::from_millis(500);

/// Upper bound on the events that wait for the control plane, and on those that it takes at a time, so that signals and other ports have
/// their turns. Beyond it the thread waits.
const EVENTS: usize = 64;

/// Longest wait for the end of the thread. Nothing holds it up but a call of the hypervisor, and whoever opens the port anew, or takes
/// over, gets the interfaces when it has ended.
const PATIENCE: Duration = Duration::from_secs(1);

/// The error of a store or hypervisor that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum XenError {
    /// The hypervisor or the store cannot be reached.
    #[error(transparent)]
    Open(#[from] ProviderError),
    /// The store has answered with an error.
    #[error("the store: {0}")]
    Store(#[from] StoreError),
}

/// News for the control plane.
#[derive(Debug)]
pub(super) enum BusEvent {
    /// The store was reached.
    Reached,
    /// The store cannot be reached, and is tried again. The first failure alone is an event.
    Unreachable(XenError),
    /// There is an interface to be served.
    Found(VifId),
    /// An interface has changed.
    Vif(VifId, BackEvent),
    /// The connection to the store has failed: nothing is known of interfaces any more. [`Bus::cleared`] answers it.
    Lost(StoreError),
}

/// What the control plane tells the thread.
enum Command {
    Connected(VifId),
    Disconnected(VifId),
    Cleared,
    Stop,
}

/// A bus that has no thread yet.
pub(super) struct OpenBus {
    provider: Provider,
    config: BackConfig,
    /// The connection to the store, which was asked nothing yet; `None` if there is none.
    store: Option<Client>,
}

impl OpenBus {
    /// Opens the device of Xen's store, and waits for nobody. A broker is reached by the thread, and tried again until it is there.
    ///
    /// # Errors
    /// The machine has no Xen, or this build cannot reach such a hypervisor.
    pub(super) fn open(config: &XenVifConfig, workers: usize) -> Result<OpenBus, XenError> {
        let provider = match &config.provider {
            XenProvider::Xen => Provider::Xen,
            XenProvider::Process { broker, store, domain } => {
                Provider::Process { broker: broker.clone(), store: store.clone(), domain: DomId(*domain) }
            }
        };
        provider.check()?;
        let store = if provider == Provider::Xen { Some(provider.open_store()?) } else { None };
        let XenVifConfig { sg, csum, gso, .. } = *config;
        let queues = config.queues.unwrap_or_else(|| workers.min(PAIRS.into()) as u16);
        let config = BackConfig {
            class: config.class.clone(),
            accepts: Accepts { sg, csum4: csum, csum6: csum, gso4: gso, gso6: gso },
            max_queues: queues,
            split_events: true,
            persistent: config.persistent,
            static_grants: config.static_grants,
            // Frames may be sent and received on any queue, and the worker that filters must know both.
            multicast_control: workers == 1 || queues == 1,
            only: config.only.map(|only| VifId { front: DomId(only.domain), device: only.device }),
        };
        Ok(OpenBus { provider, config, store })
    }

    /// Begins the thread. The process is in its sandbox by now, so the thread is, too.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub(super) fn start(self) -> io::Result<Bus> {
        let OpenBus { provider, config, store } = self;
        let (news, wake) = (Arc::new(EventFd::new()?), Arc::new(EventFd::new()?));
        let cancel = Arc::new(Cancel::new()?);
        let (sender, events) = mpsc::sync_channel(EVENTS);
        let (commands, receiver) = mpsc::channel();
        let thread = BusThread {
            provider,
            config,
            store,
            cancel: Arc::clone(&cancel),
            wake: Arc::clone(&wake),
            commands: receiver,
            news: Arc::clone(&news),
            events: sender,
        };
        std::thread::Builder::new().name("ringferry-xen".to_owned()).spawn(move || thread.run())?;
        Ok(Bus { news, events, wake, commands, cancel })
    }
}

/// The control plane's end of the bus. It is readable when there may be events.
pub(super) struct Bus {
    news: Arc<EventFd>,
    events: Receiver<BusEvent>,
    wake: Arc<EventFd>,
    /// It has no bound of its own: each Connect has two answers at most.
    commands: Sender<Command>,
    cancel: Arc<Cancel>,
}

impl Bus {
    /// Takes the events that there are, up to [`EVENTS`] of them. If there may be more, the bus stays readable.
    pub(super) fn take(&self) -> Vec<BusEvent> {
        // Nobody else has the eventfd, so nothing can be wrong with it.
        let _ = self.news.drain();
        let events: Vec<_> = self.events.try_iter().take(EVENTS).collect();
        if events.len() == EVENTS {
            let _ = self.news.signal();
        }
        events
    }

    /// Reports that the front end of a [`BackEvent::Connect`] is served now.
    pub(super) fn connected(&self, id: VifId) {
        self.tell(Command::Connected(id));
    }

    /// Reports that nothing of the front end of a [`BackEvent::Connect`] is mapped any more. It is said once for each of these events.
    pub(super) fn disconnected(&self, id: VifId) {
        self.tell(Command::Disconnected(id));
    }

    /// Reports, after [`BusEvent::Lost`], that there are no interfaces any more, and nothing of theirs is mapped.
    pub(super) fn cleared(&self) {
        self.tell(Command::Cleared);
    }

    fn tell(&self, command: Command) {
        // The thread ends only when it was told to stop.
        let _ = self.commands.send(command);
        let _ = self.wake.signal();
    }
}

impl AsFd for Bus {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        self.cancel.cancel();
        self.tell(Command::Stop);
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                // A front end that connects now is let go.
                Ok(event) => drop(event),
                // The thread drops its end of the queue last.
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    tracing::warn!(
                        "the hypervisor does not answer, and the thread that asks it is not waited for"
                    );
                    return;
                }
            }
        }
    }
}

/// The reason why the thread does not go on with a connection to the store.
enum Over {
    /// The control plane has told it to stop.
    Stopped,
    /// The connection has failed.
    Lost(StoreError),
}

impl From<StoreError> for Over {
    fn from(error: StoreError) -> Over {
        Over::Lost(error)
    }
}

/// The thread's end of the bus. Its functions return `None`, or [`Over::Stopped`], when it was told to stop.
struct BusThread {
    provider: Provider,
    config: BackConfig,
    /// The connection that was opened before the sandbox, until it is used.
    store: Option<Client>,
    cancel: Arc<Cancel>,
    wake: Arc<EventFd>,
    commands: Receiver<Command>,
    news: Arc<EventFd>,
    /// The last field: whoever has dropped the [`Bus`] learns by its end that all else has ended.
    events: SyncSender<BusEvent>,
}

impl BusThread {
    fn run(mut self) {
        while self.serve_connection().is_some() {}
    }

    /// Reaches the store, and serves it until the connection fails and the control plane has forgotten all that it was told.
    fn serve_connection(&mut self) -> Option<()> {
        let mut driver = self.reach()?;
        let mut found = BTreeSet::new();
        let over = loop {
            if let Err(over) = self.turn(&mut driver, &mut found) {
                break over;
            }
        };
        drop(driver);
        let Over::Lost(error) = over else { return None };
        self.send(BusEvent::Lost(error))?;
        // Answers that were on their way are about interfaces of the connection that has failed.
        loop {
            match self.commands.recv().ok()? {
                Command::Connected(_) | Command::Disconnected(_) => {}
                Command::Cleared => break,
                Command::Stop => return None,
            }
        }
        self.pause()
    }

    /// Connects to the store, however often that takes.
    fn reach(&mut self) -> Option<BackendDriver> {
        let mut failed = false;
        loop {
            match self.connect() {
                Ok(driver) => {
                    self.send(BusEvent::Reached)?;
                    return Some(driver);
                }
                Err(error) if !failed => self.send(BusEvent::Unreachable(error))?,
                Err(_) => {}
            }
            failed = true;
            self.pause()?;
        }
    }

    fn connect(&mut self) -> Result<BackendDriver, XenError> {
        let mut store = match self.store.take() {
            Some(store) => store,
            None => self.provider.open_store()?,
        };
        store.set_cancel(Arc::clone(&self.cancel));
        let domain = self.provider.open_domain(&mut store)?;
        Ok(BackendDriver::new(store, domain, self.config.clone())?)
    }

    /// Waits until the store may be tried again.
    fn pause(&self) -> Option<()> {
        // There are no interfaces, so the only command that may come is to stop.
        matches!(self.commands.recv_timeout(RETRY), Err(RecvTimeoutError::Timeout)).then_some(())
    }

    /// Carries out commands, lets the driver do one step, and waits if there is nothing to do.
    fn turn(&self, driver: &mut BackendDriver, found: &mut BTreeSet<VifId>) -> Result<(), Over> {
        // First, so that a command that comes from here on ends the wait below.
        let _ = self.wake.drain();
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Connected(id) => driver.connected(id)?,
                Command::Disconnected(id) => driver.disconnected(id),
                // It answers an event that this connection has not caused yet.
                Command::Cleared => {}
                Command::Stop => return Err(Over::Stopped),
            }
        }
        let polled = driver.poll()?;
        for id in driver.vifs() {
            if found.insert(id) {
                self.send(BusEvent::Found(id)).ok_or(Over::Stopped)?;
            }
        }
        match polled {
            Polled::Vif(id, event) => {
                if matches!(event, BackEvent::Removed) {
                    found.remove(&id);
                }
                self.send(BusEvent::Vif(id, event)).ok_or(Over::Stopped)
            }
            Polled::Busy => Ok(()),
            Polled::Idle => Ok(self.wait(driver)?),
        }
    }

    /// Waits for the store or a command.
    fn wait(&self, driver: &BackendDriver) -> Result<(), StoreError> {
        let mut fds = [PollFd::new(driver, PollFlags::IN), PollFd::new(&*self.wake, PollFlags::IN)];
        match rustix::event::poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Tells the control plane something, and waits while it has [too much](EVENTS) to take.
    fn send(&self, event: BusEvent) -> Option<()> {
        self.events.send(event).ok()?;
        let _ = self.news.signal();
        Some(())
    }
}
