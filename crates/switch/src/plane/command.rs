//! What the control plane asks of a worker, and how it reaches it.
//!
//! A command travels through a channel and is carried out between two bursts; an eventfd wakes a
//! worker that sleeps. Commands that take something away from the worker (a ring, a port) carry a
//! reply channel: when the reply is there, the worker does not touch it any more.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringferry_memory::{Area, GuestMemory};
use ringferry_ring::Device;
use ringferry_sys::epoll::{Epoll, Interest};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::interrupt::Target;
use ringferry_sys::tap::Tap;
use ringferry_virtio_net::Features;

use super::worker::{BELL, Worker};
use crate::config::SwitchConfig;
use crate::counters::{PortCounters, WorkerCounters};
use crate::fdb::PortId;
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
}

/// What a worker tells about itself.
#[derive(Clone, Debug, Default)]
pub struct Inspection {
    /// Every ring it owns.
    pub queues: Vec<QueueState>,
    /// Its forwarding database.
    pub fdb: FdbSnapshot,
}

/// One thing to do between two bursts.
pub enum Command {
    /// Serve a port of this name for virtual machines; its rings come with [`Command::StartRing`].
    AddGuest(PortId, String, Arc<PortCounters>),
    /// Serve a tap as the port of this name.
    AddTap(PortId, String, Arc<PortCounters>, Tap),
    /// Serve a ring of a port.
    StartRing(PortId, Box<RingStart>),
    /// Let go of a ring and say where it stands.
    StopRing(PortId, u16, SyncSender<u16>),
    /// Let packets flow through a ring, or not.
    EnableRing(PortId, u16, bool),
    /// Signal the guest through this from now on.
    SetCall(PortId, u16, Option<EventFd>),
    /// Forget the addresses learnt behind a port: its guest has gone.
    Forget(PortId),
    /// Forward a frame as if it had come from this port.
    Inject(PortId, Vec<u8>),
    /// Tell the state of rings and forwarding database; the names are the ports', by number.
    Inspect(Vec<String>, SyncSender<Inspection>),
    /// End the thread.
    Stop,
}

/// The control plane's end of a running worker.
#[derive(Debug)]
pub struct Plane {
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
}

impl Plane {
    /// Starts a worker without ports.
    ///
    /// # Errors
    /// No descriptors or no thread to be had.
    pub fn start(config: &SwitchConfig) -> io::Result<Plane> {
        let (commands, receiver) = channel();
        let bell = EventFd::new()?;
        let inbox = Inbox { commands: receiver, bell: bell.try_clone()? };
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
                Worker::new(&config, inbox, epoll, seed, counters).run();
            };
            std::thread::Builder::new().name("ringferry-worker".into()).spawn(run)?
        };
        Ok(Plane { commands, bell, counters, target, thread: Some(thread) })
    }

    /// What the worker counts about itself.
    pub fn counters(&self) -> &WorkerCounters {
        &self.counters
    }

    /// Asks for something that needs no answer.
    pub fn send(&self, command: Command) {
        // A worker that is gone has let go of everything, which is all a command could want.
        let _ = self.commands.send(command);
        let _ = self.bell.signal();
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Option<T> {
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

    /// To be called about once a second, with how many rounds the worker had made by then: gets it going
    /// if it has made none since, although it does not sleep. Returns the number for the next time.
    pub fn watch(&self, rounds_before: u64) -> u64 {
        let rounds = self.counters.polls.get();
        if rounds == rounds_before && !self.counters.asleep.load(Ordering::Relaxed) {
            self.interrupt();
        }
        rounds
    }

    /// Takes a ring away from the worker; returns where it stands ([`Device::base`]), or `None` when the worker did not have that ring.
    pub fn stop_ring(&self, port: PortId, index: u16) -> Option<u16> {
        self.ask(|reply| Command::StopRing(port, index, reply))
    }

    /// The state of every ring and of the forwarding database.
    pub fn inspect(&self, names: Vec<String>) -> Inspection {
        self.ask(|reply| Command::Inspect(names, reply)).unwrap_or_default()
    }

    /// Whether the worker has ended by itself, which it only does if it panicked.
    pub fn is_dead(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Plane {
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
