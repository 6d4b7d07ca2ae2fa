//! What the control plane asks of the workers, and how it reaches them.
//!
//! A command travels through a channel and is carried out between two bursts; an eventfd wakes a
//! worker that sleeps. Commands that take something away from the worker (a ring, a port) carry a
//! reply channel: when the reply is there, the worker does not touch it any more.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringferry_memory::{Area, GuestMemory};
use ringferry_ring::Device;
use ringferry_sys::epoll::{Epoll, Interest};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::interrupt::Target;
use ringferry_sys::tap::Tap;
use ringferry_virtio_net::Features;
use ringferry_xen_net::netback::{PageCounters, Queue};

use super::crossing::{Crossing, Doorbell};
use super::gate::Gate;
use super::moving::{Moving, Owners};
use super::shared::PortShared;
use super::vif::{Broken, Reporter, VifStart, VifState};
use super::worker::{BELL, Worker};
use crate::config::SwitchConfig;
use crate::counters::{PortCounters, PortTotals, WorkerCounters};
use crate::fdb::{FdbPage, PortId};
use crate::rules::Rules;
use crate::snapshot::FdbSnapshot;

/// A ring that a front end has started.
pub struct RingStart {
    /// Its index in the device: even ones are receiveqs, odd ones transmitqs.
    pub index: u16,
    /// The ring.
    pub ring: Device<Area>,
    /// What its buffers are translated with.
    pub memory: Arc<GuestMemory>,
    /// What was negotiated.
    pub features: Features,
    /// Whether packets may flow.
    pub enabled: bool,
    /// Signalled by the guest; without it the ring is polled all the time.
    pub kick: Option<EventFd>,
    /// Signals the guest; without it the guest polls.
    pub call: Option<EventFd>,
    /// Tells the front end that the ring is broken.
    pub err: Option<EventFd>,
}

/// The state of a ring, for people.
#[derive(Clone, Debug)]
pub struct QueueState {
    /// Port and index in the device.
    pub port: PortId,
    /// Index in the device.
    pub index: u16,
    /// The next available entry.
    pub last_avail: u16,
    /// The next used entry.
    pub last_used: u16,
    /// Why it broke.
    pub broken: Option<String>,
    /// What a Xen guest's queue did with pages; with its transmit ring.
    pub pages: Option<VifState>,
}

/// One thing to do between two bursts.
pub(super) enum Command {
    /// Serve a port of this name for virtual machines; its rings come with [`Command::StartRing`].
    AddGuest(PortId, String, Arc<PortCounters>, Arc<PortShared>),
    /// Serve a tap as the port of this name, and read it if so told.
    AddTap(PortId, String, Arc<PortCounters>, Tap, bool),
    /// Serve a ring of a port.
    StartRing(PortId, Box<RingStart>),
    /// Let go of a ring and say where it stands.
    StopRing(PortId, u16, SyncSender<u16>),
    /// Let packets flow through a ring, or not, and say when.
    EnableRing(PortId, u16, bool, SyncSender<()>),
    /// Serve a Xen guest's interface as the port of this name; its queues come with [`Command::StartVif`].
    AddVif(PortId, String, Arc<PortCounters>, Arc<PortShared>),
    /// Forget what the last front end of an interface wanted; the next one filters multicast frames, or not.
    FilterVif(PortId, bool),
    /// Serve a queue of an interface.
    StartVif(PortId, Box<VifStart>),
    /// Let go of a queue, with all that it has mapped, and say what it did.
    StopVif(PortId, u16, SyncSender<PageCounters>),
    /// Do this with a queue of an interface.
    WithVif(PortId, u16, VifTask),
    /// Deliver all that other workers have handed over, and say when.
    Settle(SyncSender<()>),
    /// Keep frames for this pair of a port, which will be given.
    Expect(PortId, u16, SyncSender<()>),
    /// Let go of a pair for another worker.
    Take(PortId, u16, SyncSender<Moving>),
    /// Serve a pair that another worker had.
    Give(PortId, u16, Box<Moving>),
    /// Serve a port no more, and forget it.
    Remove(PortId, SyncSender<()>),
    /// Signal the guest through this from now on.
    SetCall(PortId, u16, Option<EventFd>),
    /// See that a port's frames obey these from now on; the gate is what was made of them.
    SetRules(PortId, Arc<Rules>, Option<Arc<Gate>>),
    /// Forget the addresses learnt behind a port: its guest has gone.
    Forget(PortId),
    /// Forward a frame as if it had come from this port.
    Inject(PortId, Vec<u8>),
    /// Tell the state of every ring.
    Inspect(SyncSender<Vec<QueueState>>),
    /// Tell the part of the forwarding database that begins at this bucket.
    Addresses(usize, SyncSender<FdbPage>),
    /// End the thread.
    Stop,
}

/// What is done with a queue of an interface, by the worker that owns it.
pub type VifTask = Box<dyn FnOnce(&mut Queue<Area>) + Send>;

/// The control plane's end of the running workers. Dropping it ends them.
#[derive(Debug)]
pub struct Plane {
    pub(super) workers: Vec<Hand>,
    pub(super) owners: Owners,
    /// What the workers report.
    broken: Mutex<Receiver<Broken>>,
    reported: EventFd,
}

/// The control plane's end of one of them.
#[derive(Debug)]
pub(super) struct Hand {
    commands: Sender<Command>,
    bell: EventFd,
    counters: Arc<WorkerCounters>,
    /// The worker's thread, once it runs.
    target: Arc<OnceLock<Target>>,
    thread: Option<JoinHandle<()>>,
}

/// How long the worker may stand still before it is taken for caught in a call that a front end holds it
/// in. A round takes well below a millisecond.
const STANDSTILL: Duration = Duration::from_millis(500);

/// The worker's end.
#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) commands: Receiver<Command>,
    pub(super) bell: EventFd,
    /// For what the control plane is to be told unasked.
    pub(super) reporter: Arc<Reporter>,
}

impl Plane {
    /// Starts the workers, without ports.
    ///
    /// # Errors
    /// No descriptors or no thread to be had.
    pub fn start(config: &SwitchConfig) -> io::Result<Plane> {
        let bells = (0..config.workers()).map(|_| EventFd::new()).collect::<io::Result<Vec<_>>>()?;
        let doorbells = bells.iter().map(|bell| Ok(Arc::new(Doorbell::new(bell.try_clone()?))));
        let doorbells = doorbells.collect::<io::Result<Vec<_>>>()?;
        let (sender, broken) = channel();
        let reported = EventFd::new()?;
        let reporter = Arc::new(Reporter { sender, bell: reported.try_clone()? });
        let started = Instant::now();
        let workers = bells.into_iter().zip(Crossing::mesh(&doorbells));
        let workers = workers.enumerate().map(|(number, (bell, crossing))| {
            Hand::start(config, number, bell, crossing, Arc::clone(&reporter), started)
        });
        Ok(Plane {
            workers: workers.collect::<io::Result<_>>()?,
            owners: Owners::default(),
            broken: Mutex::new(broken),
            reported,
        })
    }

    /// Readable when there is something for [`Plane::broken`].
    pub fn reports(&self) -> BorrowedFd<'_> {
        self.reported.as_fd()
    }

    /// The interfaces that workers can serve no more, since it was last asked for.
    pub fn broken(&self) -> Vec<Broken> {
        let _ = self.reported.drain();
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).try_iter().collect()
    }

    /// How many workers there are.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// What each worker counts about itself.
    pub fn counters(&self) -> impl Iterator<Item = &WorkerCounters> {
        self.workers.iter().map(|worker| &*worker.counters)
    }

    /// The number of the worker that serves a queue of a tap, or a pair of another port.
    pub fn owner(&self, port: PortId, queue: u16) -> usize {
        self.owners.of(port, queue)
    }

    fn server(&self, port: PortId, queue: u16) -> &Hand {
        &self.workers[self.owner(port, queue)]
    }

    /// Says what a port's frames must obey from now on. Called before the port is added, so that no frame comes first, again when
    /// rules change, and for a number that had been another port's.
    pub fn set_rules(&self, port: PortId, rules: &Rules) {
        let (gate, rules) = (Gate::new(rules).map(Arc::new), Arc::new(rules.clone()));
        for worker in &self.workers {
            worker.send(Command::SetRules(port, Arc::clone(&rules), gate.clone()));
        }
    }

    /// Serves a port for virtual machines, whose pairs begin with worker `first`.
    pub fn add_guest(
        &self,
        id: PortId,
        name: &str,
        totals: &PortTotals,
        shared: &Arc<PortShared>,
        first: usize,
    ) {
        self.owners.add_pairs(id, shared, first, self.workers.len());
        for (number, worker) in self.workers.iter().enumerate() {
            let counters = totals.of(number);
            worker.send(Command::AddGuest(id, name.to_owned(), counters, Arc::clone(shared)));
        }
    }

    /// Serves a tap: its queues, at most one per worker, in order, or a single one that worker `reader` reads. A worker without one
    /// writes to another's.
    ///
    /// # Errors
    /// No descriptors are left, or there is no queue.
    pub fn add_tap(
        &self,
        id: PortId,
        name: &str,
        totals: &PortTotals,
        queues: Vec<Tap>,
        reader: usize,
    ) -> io::Result<()> {
        let count = queues.len();
        let further = (count..self.workers.len()).map(|number| {
            let shared = number.checked_rem(count).ok_or(io::ErrorKind::InvalidInput)?;
            queues[shared].try_clone()
        });
        let further = further.collect::<io::Result<Vec<_>>>()?;
        self.owners.add_tap(id, count, reader);
        let queues = queues.into_iter().chain(further);
        for ((number, worker), tap) in self.workers.iter().enumerate().zip(queues) {
            let read = if count == 1 { number == reader } else { number < count };
            worker.send(Command::AddTap(id, name.to_owned(), totals.of(number), tap, read));
        }
        Ok(())
    }

    /// Serves a Xen guest's interface. The number may have been another port's, whose addresses are forgotten.
    /// Its queues begin with worker `first`.
    pub fn add_vif(
        &self,
        id: PortId,
        name: &str,
        totals: &PortTotals,
        shared: &Arc<PortShared>,
        first: usize,
    ) {
        self.owners.add_pairs(id, shared, first, self.workers.len());
        for (number, worker) in self.workers.iter().enumerate() {
            worker.send(Command::Forget(id));
            worker.send(Command::AddVif(id, name.to_owned(), totals.of(number), Arc::clone(shared)));
        }
    }

    /// Prepares a port for a new front end, which filters multicast frames or not.
    pub fn filter_vif(&self, id: PortId, filter: bool) {
        self.workers.iter().for_each(|worker| worker.send(Command::FilterVif(id, filter)));
    }

    /// Serves a queue of an interface.
    pub fn start_vif(&self, port: PortId, start: VifStart) {
        self.server(port, start.number).send(Command::StartVif(port, Box::new(start)));
    }

    /// Takes a queue away from its worker. When this returns nothing of it is mapped; says what it did, or `None` when
    /// the worker did not have it.
    pub fn stop_vif(&self, port: PortId, number: u16) -> Option<PageCounters> {
        self.server(port, number).ask(|reply| Command::StopVif(port, number, reply))
    }

    /// Lets the owner of a queue do something with it; `None` when there is no such queue.
    pub fn with_vif<T: Send + 'static>(
        &self,
        port: PortId,
        number: u16,
        task: impl FnOnce(&mut Queue<Area>) -> T + Send + 'static,
    ) -> Option<T> {
        self.server(port, number).ask(|reply| {
            let task = move |queue: &mut Queue<Area>| {
                let _ = reply.send(task(queue));
            };
            Command::WithVif(port, number, Box::new(task))
        })
    }

    /// Serves a port no more. When this returns no worker knows of it.
    pub fn remove(&self, port: PortId) {
        self.owners.remove(port);
        for worker in &self.workers {
            worker.ask(|reply| Command::Remove(port, reply));
        }
    }

    /// Serves a ring of a port.
    pub fn start_ring(&self, port: PortId, start: RingStart) {
        self.server(port, start.index / 2).send(Command::StartRing(port, Box::new(start)));
    }

    /// Lets packets flow through a ring, or not; when this returns it is so. (Whoever is told earlier may send on a ring that its
    /// worker still empties for nothing.)
    pub fn enable_ring(&self, port: PortId, index: u16, enabled: bool) {
        self.server(port, index / 2).ask(|reply| Command::EnableRing(port, index, enabled, reply));
    }

    /// Signals the guest of a ring through this from now on.
    pub fn set_call(&self, port: PortId, index: u16, call: Option<EventFd>) {
        self.server(port, index / 2).send(Command::SetCall(port, index, call));
    }

    /// Forgets the addresses learnt behind a port: its guest has gone.
    pub fn forget(&self, port: PortId) {
        self.workers.iter().for_each(|worker| worker.send(Command::Forget(port)));
    }

    /// Forwards a frame as if it had come from a port.
    pub fn inject(&self, port: PortId, frame: Vec<u8>) {
        self.workers[0].send(Command::Inject(port, frame));
    }

    /// Takes a ring away from its worker; returns where it stands ([`Device::base`]), or `None` when the worker did not have
    /// that ring.
    pub fn stop_ring(&self, port: PortId, index: u16) -> Option<u16> {
        self.server(port, index / 2).ask(|reply| Command::StopRing(port, index, reply))
    }

    /// To be called about once a second: gets workers going that have made no round since, although they do not sleep.
    /// `rounds` is between the calls whatever this leaves in it; empty at first.
    pub fn watch(&self, rounds: &mut Vec<u64>) {
        rounds.resize(self.workers.len(), 0);
        for (worker, before) in self.workers.iter().zip(rounds) {
            *before = worker.watch(*before);
        }
    }

    /// The state of every ring.
    pub fn inspect(&self) -> Vec<QueueState> {
        self.workers.iter().filter_map(|worker| worker.ask(Command::Inspect)).flatten().collect()
    }

    /// The forwarding database, with ports named by `names`: an address is where it was seen last by any worker. Packets go
    /// on between its parts.
    pub fn addresses(&self, names: &[String]) -> FdbSnapshot {
        let name = |port: PortId| names.get(usize::from(port.0)).cloned().unwrap_or_default();
        let mut all = FdbSnapshot::default();
        for worker in &self.workers {
            let mut next = Some(0);
            while let Some(from) = next {
                let Some(page) = worker.ask(|reply| Command::Addresses(from, reply)) else { break };
                next = page.next;
                all.add(page, name);
            }
        }
        all.settle();
        all
    }

    /// Whether a worker has ended by itself, which it only does if it panicked.
    pub fn is_dead(&self) -> bool {
        self.workers.iter().any(|worker| worker.thread.as_ref().is_none_or(JoinHandle::is_finished))
    }
}

impl Hand {
    fn start(
        config: &SwitchConfig,
        number: usize,
        bell: EventFd,
        crossing: Crossing,
        reporter: Arc<Reporter>,
        started: Instant,
    ) -> io::Result<Hand> {
        let (commands, receiver) = channel();
        let inbox = Inbox { commands: receiver, bell: bell.try_clone()?, reporter };
        let counters = Arc::new(WorkerCounters::default());
        let epoll = Epoll::new()?;
        epoll.add(&inbox.bell, BELL, Interest::READABLE)?;
        let mut random = [0; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let random = u128::from_ne_bytes(random);
        let seed = [random as u64, (random >> 64) as u64];
        let config = *config;
        let target = Arc::new(OnceLock::new());
        let thread = {
            let (counters, target) = (Arc::clone(&counters), Arc::clone(&target));
            let run = move || {
                target.get_or_init(Target::current);
                Worker::new(&config, inbox, crossing, epoll, seed, counters, started).run();
            };
            std::thread::Builder::new().name(format!("ringferry-{number}")).spawn(run)?
        };
        Ok(Hand { commands, bell, counters, target, thread: Some(thread) })
    }

    /// Asks for something that needs no answer.
    pub(super) fn send(&self, command: Command) {
        // A worker that is gone has let go of everything, which is all a command could want.
        let _ = self.commands.send(command);
        let _ = self.bell.signal();
    }

    /// Asks, and waits for the answer; `None` if the worker has none.
    pub(super) fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Option<T> {
        let (reply, answer) = sync_channel(1);
        self.send(command(reply));
        loop {
            match answer.recv_timeout(STANDSTILL) {
                Ok(answer) => return Some(answer),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => self.interrupt(),
            }
        }
    }

    /// Gets the worker out of a call in which a front end holds it, if it stands in one.
    fn interrupt(&self) {
        if let Some(target) = self.target.get() {
            target.interrupt();
        }
    }

    /// See [`Plane::watch`].
    fn watch(&self, rounds_before: u64) -> u64 {
        let rounds = self.counters.polls.get();
        if rounds == rounds_before && !self.counters.asleep.load(Ordering::Relaxed) {
            self.interrupt();
        }
        rounds
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        self.send(Command::Stop);
        let Some(thread) = self.thread.take() else { return };
        let mut asked = Instant::now();
        while !thread.is_finished() {
            if asked.elapsed() >= STANDSTILL {
                self.interrupt();
                asked = Instant::now();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = thread.join();
    }
}
