//! The control plane's handles of the workers: [`Workers`], all of them, and [`WorkerHandle`], one.
//!
//! [`Workers::start`] makes the threads; dropping the handles ends them. Ports are added and removed at any time
//! ([`Workers::add_port`], [`Workers::remove_port`]), and each method sends a [`Command`] to the worker that owns the queue concerned, or to all.
//! A method that takes something away returns when no worker touches it any more.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringferry_sys::epoll::{Epoll, Interest};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::interrupt::Target;

use crate::config::SwitchConfig;
use crate::counters::{PortTotals, WorkerCounters};
use crate::fdb::{FdbPage, PortId};
use crate::plane::handoff::migration::QueueOwners;
use crate::plane::handoff::ring::{Doorbell, Handoff};
use crate::plane::now::Clock;
use crate::plane::policy::PortPolicy;
use crate::plane::port::Steering;
use crate::plane::queues::{PortHandle, Queues};
use crate::plane::worker::command::{Command, Inbox, NewPort};
use crate::plane::worker::fault::{FaultReporter, Faults, PortFault};
use crate::plane::worker::{BELL, Worker};
use crate::rules::Rules;

/// How long the worker may stand still before it is taken for caught in a call that a front end holds it
/// in. A round takes well below a millisecond.
const STANDSTILL: Duration = Duration::from_millis(500);

/// The control plane's handles of the running workers. Dropping them ends the threads.
pub struct Workers<P: Queues> {
    pub(crate) workers: Vec<WorkerHandle<P>>,
    pub(crate) owners: QueueOwners,
    faults: Faults,
}

/// The control plane's handle of one worker.
pub(crate) struct WorkerHandle<P: Queues> {
    commands: Sender<Command<P>>,
    bell: EventFd,
    counters: Arc<WorkerCounters>,
    /// The worker's thread, once it runs.
    target: Arc<OnceLock<Target>>,
    thread: Option<JoinHandle<()>>,
}

/// Which workers serve a port's queues at first.
#[derive(Clone, Debug)]
pub struct Placement {
    /// How frames get to its queues.
    pub steering: Steering,
    /// The worker of queue 0; those after it are with the next workers in turn.
    pub first: usize,
    /// How many queues the port has; those of pairs are 16 in any case.
    pub queues: u16,
}

impl<P: Queues> Workers<P> {
    /// Starts the workers, without ports.
    ///
    /// # Errors
    /// No descriptors or no thread to be had.
    pub fn start(config: &SwitchConfig) -> io::Result<Self> {
        let bells = (0..config.workers()).map(|_| EventFd::new()).collect::<io::Result<Vec<_>>>()?;
        let doorbells = bells.iter().map(|bell| Ok(Arc::new(Doorbell::new(bell.try_clone()?))));
        let doorbells = doorbells.collect::<io::Result<Vec<_>>>()?;
        let clock = Clock::Monotonic(Instant::now());
        let workers = bells.into_iter().zip(Handoff::mesh(&doorbells));
        let workers = workers
            .enumerate()
            .map(|(number, (bell, handoff))| WorkerHandle::start(config, number, bell, handoff, clock));
        Ok(Self {
            workers: workers.collect::<io::Result<_>>()?,
            owners: QueueOwners::default(),
            faults: Faults::new()?,
        })
    }

    /// Readable when there is something for [`Workers::faults`].
    pub fn faults_fd(&self) -> BorrowedFd<'_> {
        self.faults.as_fd()
    }

    /// The connections that workers can serve no more, since this was last called.
    pub fn faults(&self) -> Vec<PortFault> {
        self.faults.take()
    }

    /// For queues that have to report faults.
    pub fn reporter(&self) -> Arc<FaultReporter> {
        self.faults.reporter()
    }

    /// How many workers there are.
    pub fn count(&self) -> usize {
        self.workers.len()
    }

    /// The counters of each worker about itself.
    pub fn counters(&self) -> impl Iterator<Item = &WorkerCounters> {
        self.workers.iter().map(|worker| &*worker.counters)
    }

    /// The number of the worker that serves a queue of a port.
    pub fn owner(&self, port: PortId, queue: u16) -> usize {
        self.owners.of(port, queue)
    }

    fn server(&self, port: PortId, queue: u16) -> &WorkerHandle<P> {
        &self.workers[self.owner(port, queue)]
    }

    /// Sets the rules that a port's frames must obey from now on. Called before the port is added, so that no frame comes first, again when
    /// rules change, and for a number that had been another port's.
    pub fn set_rules(&self, port: PortId, rules: &Rules) {
        let (policy, rules) = (PortPolicy::new(rules).map(Arc::new), Arc::new(rules.clone()));
        for worker in &self.workers {
            worker.send(Command::SetRules(port, Arc::clone(&rules), policy.clone()));
        }
    }

    /// Serves a port, at first without queues; `queues` makes each worker's part of it. The number may have been another port's, whose
    /// addresses are forgotten.
    pub fn add_port(
        &self,
        id: PortId,
        name: &str,
        totals: &PortTotals,
        placement: Placement,
        mut queues: impl FnMut(usize, &PortHandle) -> P,
    ) {
        let Placement { steering, first, queues: count } = placement;
        self.owners.add(id, &steering, first, count, self.workers.len());
        let name: Arc<str> = name.into();
        for (number, worker) in self.workers.iter().enumerate() {
            let handle = PortHandle { id, name: Arc::clone(&name), counters: totals.of(number) };
            let queues = queues(number, &handle);
            worker.send(Command::Forget(id));
            worker.send(Command::AddPort(Box::new(NewPort { handle, queues, steering: steering.clone() })));
        }
    }

    /// Serves a port no more. When this returns no worker knows of it.
    pub fn remove_port(&self, port: PortId) {
        self.owners.remove(port);
        for worker in &self.workers {
            worker.ask(|reply| Command::RemovePort(port, reply));
        }
    }

    /// Serves a queue of a port.
    pub fn start_queue(&self, port: PortId, queue: u16, start: P::Start) {
        self.server(port, queue).send(Command::Start(port, Box::new(start)));
    }

    /// Takes from its worker what was started as `index`, a part of `queue`. What remains of it, or `None` when the worker did not have it.
    pub fn stop_queue(&self, port: PortId, queue: u16, index: u16) -> Option<P::Stopped> {
        self.server(port, queue).ask(|reply| Command::Stop(port, index, reply))
    }

    /// Has the owner of a queue forward what the port had sent on it before now.
    pub fn drain(&self, port: PortId, queue: u16) {
        self.server(port, queue).send(Command::Drain(port, queue));
    }

    /// Has the owner of a queue do what only this kind of port can.
    pub fn request(&self, port: PortId, queue: u16, request: P::Request) {
        self.server(port, queue).send(Command::Request(port, request));
    }

    /// The same, with an answer that `request` sends when it has been done; `None` if it never is.
    pub fn ask<T>(
        &self,
        port: PortId,
        queue: u16,
        request: impl FnOnce(SyncSender<T>) -> P::Request,
    ) -> Option<T> {
        self.server(port, queue).ask(|reply| Command::Request(port, request(reply)))
    }

    /// Has every worker do what only this kind of port can.
    pub fn request_all(&self, port: PortId, request: impl Fn() -> P::Request) {
        self.workers.iter().for_each(|worker| worker.send(Command::Request(port, request())));
    }

    /// Forgets the addresses learned behind a port: its guest has gone.
    pub fn forget(&self, port: PortId) {
        self.workers.iter().for_each(|worker| worker.send(Command::Forget(port)));
    }

    /// Forwards a frame as if it had come from a port.
    pub fn inject(&self, port: PortId, frame: Vec<u8>) {
        self.workers[0].send(Command::Inject(port, frame));
    }

    /// To be called about once a second: gets workers going that have made no round since, although they do not sleep.
    /// `rounds` is between the calls whatever this leaves in it; empty at first.
    pub fn watch(&self, rounds: &mut Vec<u64>) {
        rounds.resize(self.workers.len(), 0);
        for (worker, before) in self.workers.iter().zip(rounds) {
            *before = worker.watch(*before);
        }
    }

    /// The state of every queue.
    pub fn inspect(&self) -> Vec<(PortId, P::State)> {
        self.workers.iter().filter_map(|worker| worker.ask(Command::Inspect)).flatten().collect()
    }

    /// Hands the forwarding databases of all workers to `page`, part by part. Packets go on between the parts.
    pub fn addresses(&self, mut page: impl FnMut(FdbPage)) {
        for worker in &self.workers {
            let mut next = Some(0);
            while let Some(from) = next {
                let Some(part) = worker.ask(|reply| Command::Addresses(from, reply)) else { break };
                next = part.next;
                page(part);
            }
        }
    }

    /// Whether a worker has ended by itself, which it only does if it panicked.
    pub fn is_dead(&self) -> bool {
        self.workers.iter().any(|worker| worker.thread.as_ref().is_none_or(JoinHandle::is_finished))
    }
}

impl<P: Queues> WorkerHandle<P> {
    fn start(
        config: &SwitchConfig,
        number: usize,
        bell: EventFd,
        handoff: Handoff,
        clock: Clock,
    ) -> io::Result<Self> {
        let (commands, receiver) = channel();
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
                Worker::new(&config, inbox, handoff, epoll, seed, counters, clock).run();
            };
            std::thread::Builder::new().name(format!("ringferry-{number}")).spawn(run)?
        };
        Ok(Self { commands, bell, counters, target, thread: Some(thread) })
    }

    /// Asks for something that needs no answer.
    pub(crate) fn send(&self, command: Command<P>) {
        // A worker that is gone has let go of everything, which is all a command could want.
        let _ = self.commands.send(command);
        let _ = self.bell.signal();
    }

    /// Asks, and waits for the answer; `None` if the worker has none.
    pub(crate) fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command<P>) -> Option<T> {
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

    /// See [`Workers::watch`].
    fn watch(&self, rounds_before: u64) -> u64 {
        let rounds = self.counters.polls.get();
        if rounds == rounds_before && !self.counters.asleep.load(Ordering::Relaxed) {
            self.interrupt();
        }
        rounds
    }
}

impl<P: Queues> Drop for WorkerHandle<P> {
    fn drop(&mut self) {
        self.send(Command::End);
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
