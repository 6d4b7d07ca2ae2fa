//! The control plane's handles of the workers: [`Workers`], all of them, and [`WorkerHandle`], one.
//!
//! [`Workers::start`] makes the threads; dropping the handles ends them. Ports are added and removed at any time
//! ([`Workers::add_port`], [`Workers::remove_port`]), and each method sends a [`Command`] to the worker that owns the queue concerned, or to all.
//! A method that takes something away returns when no worker touches it any more, or when a worker has not answered for [`ANSWER_DEADLINE`]:
//! the command is carried out all the same once the worker gets to it, before any later one. A worker that is [`Late`] is not waited for again
//! until it has caught up, so that it costs the control plane one deadline, however many ports it has. A worker that sleeps because the front end of
//! *another* port has [punched a hole](super::holes) is waited for longer ([`PATIENCE`]), and it is that port which is reported as faulty.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringferry_firewall::Firewall;
use ringferry_sys::epoll::{Epoll, Interest, set_timer_slack};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::interrupt::Target;
use ringferry_sys::usage::RunDelay;
use ringferry_sys::watchdog::{HoleWaits, Watchdog, Watcher};

use crate::config::SwitchConfig;
use crate::counters::{PortTotals, WorkerCounters};
use crate::fdb::{FdbPage, Flush, PortId};
use crate::plane::capture::{CaptureId, Tap};
use crate::plane::forward::walk::{Entry, Exit, Guide, Imaginary, Leaving, Walk, walk};
use crate::plane::handoff::migration::QueueOwners;
use crate::plane::handoff::ring::{Doorbell, Handoff};
use crate::plane::now::Clock;
use crate::plane::policy::{Here, PortPolicy};
use crate::plane::port::Steering;
use crate::plane::queues::{PortHandle, Queues};
use crate::plane::wire::WireState;
use crate::plane::worker::command::{Command, Full, Inbox, NewPort, PortQueue, Posted};
use crate::plane::worker::fault::{FaultReporter, Faults, PortFault};
use crate::plane::worker::handover::Standing;
use crate::plane::worker::holes::{self, Touched};
use crate::plane::worker::{BELL, Worker};
use crate::rules::Rules;

/// How long the worker may stand still before it is taken for caught in a call that a front end holds it
/// in. A round takes well below a millisecond.
const STANDSTILL: Duration = Duration::from_millis(500);

/// How long the control plane waits for a worker at most, which takes well below a millisecond to look at its commands.
pub const ANSWER_DEADLINE: Duration = Duration::from_secs(1);

/// How long it waits for one that sleeps in the memory of another port than the one that is concerned, in all. No other port is to lose its connection
/// for that. A hole of 60 GiB takes so long.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often it looks whether such a worker still sleeps.
const HELD: Duration = Duration::from_millis(50);

/// A worker has not answered within `ANSWER_DEADLINE` (a second), or is known not to have caught up since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("worker {worker} is too busy to answer")]
pub struct Late {
    /// Its number.
    pub worker: usize,
}
/// How much later than asked for a worker may be woken: a frame of 1500 bytes takes as long at 10 Gbit/s. The default is fifty times that.
const TIMER_SLACK: Duration = Duration::from_micros(1);

/// The control plane's handles of the running workers. Dropping them ends the threads.
pub struct Workers<P: Queues> {
    pub(crate) workers: Vec<WorkerHandle<P>>,
    pub(crate) owners: QueueOwners,
    pub(crate) clock: Clock,
    /// How many commands of each port wait.
    posted: Mutex<HashMap<PortId, Arc<PortQueue>>>,
    pub(crate) policies: Mutex<Policies>,
    faults: Faults,
    /// Watches the workers; ends after them.
    watchdog: Watchdog,
}

/// The control plane's handle of one worker.
pub(crate) struct WorkerHandle<P: Queues> {
    commands: Sender<Posted<P>>,
    bell: EventFd,
    counters: Arc<WorkerCounters>,
    /// The worker's thread, once it runs.
    target: Arc<OnceLock<Target>>,
    thread: Option<JoinHandle<()>>,
    number: usize,
    /// Where a late worker says that it has caught up.
    late: Mutex<Option<Receiver<()>>>,
    /// Whose memory the worker touches.
    touched: Arc<Touched>,
    /// Whether it sleeps in that, once it runs and where the kernel says so.
    waits: Arc<OnceLock<HoleWaits>>,
    /// How long it has waited for a processor, and what of that was counted; nothing where the kernel does not tell.
    run_delay: Arc<OnceLock<RunDelay>>,
    counted_delay: AtomicU64,
    reporter: Arc<FaultReporter>,
    /// Commands wait until the worker is woken for all of them.
    gathers: AtomicBool,
    #[cfg(test)]
    is_in_hole: AtomicBool,
}

/// The policies that the workers were last given.
#[derive(Debug, Default)]
pub(crate) struct Policies(BTreeMap<PortId, Arc<PortPolicy>>);

impl Policies {
    /// Compiles new rules of a port. Token buckets of limits that do not change go on.
    pub(crate) fn set(&mut self, port: PortId, rules: &Rules, here: Here) -> CompiledRules {
        let before = self.0.remove(&port);
        let policy = PortPolicy::new(rules, before.as_deref(), here).map(Arc::new);
        self.0.extend(policy.clone().map(|policy| (port, policy)));
        CompiledRules { port, rules: Arc::new(rules.clone()), policy }
    }

    /// Returns the policy that a port was last given.
    pub(crate) fn of(&self, port: PortId) -> Option<&Arc<PortPolicy>> {
        self.0.get(&port)
    }

    /// Compiles rules of a port that no further frames are to leave by.
    pub(crate) fn retire(&mut self, port: PortId, rules: &Rules, here: Here) -> CompiledRules {
        let before = self.0.remove(&port);
        let policy = PortPolicy::retired(rules, before.as_deref(), here).map(Arc::new);
        self.0.extend(policy.clone().map(|policy| (port, policy)));
        CompiledRules { port, rules: Arc::new(rules.clone()), policy }
    }

    /// A port is no more.
    pub(crate) fn remove(&mut self, port: PortId) {
        self.0.remove(&port);
    }
}

/// The rules of a port, for all workers.
pub(crate) struct CompiledRules {
    port: PortId,
    rules: Arc<Rules>,
    policy: Option<Arc<PortPolicy>>,
}

impl CompiledRules {
    /// What each worker is told.
    pub(crate) fn command<P: Queues>(&self) -> Command<P> {
        Command::SetRules(self.port, Arc::clone(&self.rules), self.policy.clone())
    }
}

/// The workers of the first queues of a port, each another; those after the last of them have the further queues in turn. Empty: worker 0 has queue 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owners(pub Vec<usize>);

impl Owners {
    /// Returns the worker of a queue, of `count` workers.
    pub fn of(&self, queue: u16, count: usize) -> usize {
        let queue = usize::from(queue);
        let worker = match (self.0.get(queue), self.0.last()) {
            (Some(worker), _) => *worker,
            (None, Some(last)) => last + queue + 1 - self.0.len(),
            (None, None) => queue,
        };
        worker % count
    }
}

/// Which workers serve a port's queues at first.
#[derive(Clone, Debug)]
pub struct Placement {
    /// How frames get to its queues.
    pub steering: Steering,
    /// The workers of its queues.
    pub owners: Owners,
    /// How many queues the port has; those of pairs are 16 in any case.
    pub queues: u16,
}

impl<P: Queues> Workers<P> {
    /// Starts the workers, without ports.
    ///
    /// # Errors
    /// No descriptors or no thread to be had.
    pub fn start(config: &SwitchConfig) -> io::Result<Self> {
        Self::start_with(config, Instant::now(), false)
    }

    /// Starts workers that go on where those of another process stood, whose clock [began](Workers::began) at this instant. They are paused: they carry out commands
    /// and take nothing from any queue.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub(crate) fn start_paused(config: &SwitchConfig, began: u64) -> io::Result<Self> {
        Self::start_with(config, Self::instant(began), true)
    }

    fn start_with(config: &SwitchConfig, began: Instant, paused: bool) -> io::Result<Self> {
        let bells = (0..config.workers()).map(|_| EventFd::new()).collect::<io::Result<Vec<_>>>()?;
        let doorbells = bells.iter().map(|bell| Ok(Arc::new(Doorbell::new(bell.try_clone()?))));
        let doorbells = doorbells.collect::<io::Result<Vec<_>>>()?;
        let clock = Clock::Monotonic(began);
        let watchdog = Watchdog::start("ringferry-watch")?;
        let faults = Faults::new()?;
        let standing = Arc::default();
        let workers = bells.into_iter().zip(Handoff::mesh(&doorbells));
        let workers = workers.enumerate().map(|(number, (bell, handoff))| {
            let begin = Begin { clock, paused, standing: Arc::clone(&standing) };
            WorkerHandle::start(config, number, bell, handoff, begin, watchdog.watcher(), faults.reporter())
        });
        Ok(Self {
            workers: workers.collect::<io::Result<_>>()?,
            owners: QueueOwners::default(),
            clock,
            posted: Mutex::default(),
            policies: Mutex::default(),
            faults,
            watchdog,
        })
    }

    /// Has the calling thread, the control plane's, watched as the workers are.
    pub fn watch_this_thread(&self) {
        self.watchdog.watcher().watch_this_thread();
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

    /// Counts the time for which workers have waited for a processor. Only the control plane's thread may call this.
    pub fn count_run_delays(&self) {
        self.workers.iter().for_each(WorkerHandle::count_run_delay);
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

    /// Sends a command that a port's peer causes and nobody waits for. One for which there is no place is dropped, and the port is reported as
    /// [faulty](Workers::faults): its peer sends faster than workers can follow, and its connection has to end.
    fn post(&self, worker: usize, port: PortId, command: Command<P>) {
        let mut posted = self.posted.lock().unwrap_or_else(PoisonError::into_inner);
        let place = posted.entry(port).or_default().place();
        drop(posted);
        match place {
            Ok(place) => self.workers[worker].submit(Posted { command, place: Some(place) }),
            Err(Full { news: true }) => {
                let why = "it asks for more than the workers can carry out".to_owned();
                self.faults.reporter().report(PortFault { port, session: None, why });
            }
            Err(Full { news: false }) => {}
        }
    }

    fn here(&self) -> Here {
        Here { workers: self.workers.len(), now: self.seconds() }
    }

    /// Returns the firewall of a port, if it has one whose policy was read.
    pub(crate) fn firewall(&self, port: PortId) -> Option<Arc<Firewall>> {
        let policies = self.policies.lock().unwrap_or_else(PoisonError::into_inner);
        policies.of(port)?.firewall()?.inner().cloned()
    }

    /// Sets the rules that a port's frames must obey from now on. Called before the port is added, so that no frame comes first, again when
    /// rules change, and for a number that had been another port's. Limits that do not change go on as they are.
    pub fn set_rules(&self, port: PortId, rules: &Rules) {
        let mut policies = self.policies.lock().unwrap_or_else(PoisonError::into_inner);
        let compiled = policies.set(port, rules, self.here());
        self.workers.iter().for_each(|worker| worker.send(compiled.command()));
    }

    /// Sends no further frames to a port, which is to be removed; what it sends is forwarded as before, and what is queued for it goes out.
    pub fn retire(&self, port: PortId, rules: &Rules) {
        let mut policies = self.policies.lock().unwrap_or_else(PoisonError::into_inner);
        let compiled = policies.retire(port, rules, self.here());
        self.workers.iter().for_each(|worker| worker.send(compiled.command()));
    }

    /// Asks every worker whether nothing of a port waits there, and waits for none; where each says so.
    pub fn ask_quiet(&self, port: PortId) -> Vec<Receiver<bool>> {
        let ask = |worker: &WorkerHandle<P>| {
            let (reply, answer) = sync_channel(1);
            worker.send(Command::IsQuiet(port, reply));
            answer
        };
        self.workers.iter().map(ask).collect()
    }

    /// Serves a port, at first without queues; `queues` makes each worker's part of it. The number may have been another port's, if it has rested since.
    pub fn add_port(
        &self,
        id: PortId,
        name: &str,
        totals: &PortTotals,
        placement: Placement,
        mut queues: impl FnMut(usize, &PortHandle) -> P,
    ) {
        let Placement { steering, owners, queues: count } = placement;
        self.owners.add(id, &steering, &owners, count, self.workers.len());
        let name: Arc<str> = name.into();
        for (number, worker) in self.workers.iter().enumerate() {
            let handle = PortHandle { id, name: Arc::clone(&name), counters: totals.of(number) };
            let queues = queues(number, &handle);
            let new = NewPort { handle, queues, steering: steering.clone() };
            worker.send(Command::AddPort(Box::new(new)));
        }
    }

    /// Serves a port no more. When this returns no worker knows of it, but for late ones, which forget it in time.
    pub fn remove_port(&self, port: PortId) {
        self.owners.remove(port);
        self.policies.lock().unwrap_or_else(PoisonError::into_inner).remove(port);
        self.posted.lock().unwrap_or_else(PoisonError::into_inner).remove(&port);
        self.ask_all(&self.workers, |reply| Command::RemovePort(port, reply));
    }

    /// Asks several workers at once; the answers of those that have one in time, with their handles.
    fn ask_all<'w, T>(
        &self,
        workers: impl IntoIterator<Item = &'w WorkerHandle<P>>,
        command: impl Fn(SyncSender<T>) -> Command<P>,
    ) -> Vec<T> {
        let asked = workers.into_iter().map(|worker| {
            let (reply, answer) = sync_channel(1);
            worker.send(command(reply));
            (worker, answer)
        });
        let asked: Vec<_> = asked.collect();
        let deadline = Instant::now() + ANSWER_DEADLINE;
        asked
            .iter()
            .filter_map(|(worker, answer)| worker.wait(answer, deadline, None).ok().flatten())
            .collect()
    }

    /// Splits what concerns queues of a port by the worker that has them.
    fn by_worker<T>(
        &self,
        port: PortId,
        queues: impl IntoIterator<Item = (u16, T)>,
    ) -> impl Iterator<Item = (&WorkerHandle<P>, Vec<T>)> {
        let mut parts: Vec<Vec<T>> = self.workers.iter().map(|_| Vec::new()).collect();
        for (queue, part) in queues {
            parts[self.owner(port, queue)].push(part);
        }
        self.workers.iter().zip(parts).filter(|(_, part)| !part.is_empty())
    }

    /// Serves a queue of a port.
    pub fn start_queue(&self, port: PortId, queue: u16, start: P::Start) {
        self.post(self.owner(port, queue), port, Command::Start(port, Box::new(start)));
    }

    /// Serves several queues of a port, each with the part of it that starts: one command for each worker.
    pub fn start_queues(&self, port: PortId, starts: impl IntoIterator<Item = (u16, P::Start)>) {
        for (worker, starts) in self.by_worker(port, starts) {
            self.post(worker.number, port, Command::StartAll(port, starts));
        }
    }

    /// Takes from its worker what was started as `index`, a part of `queue`. What remains of it, or `None` when the worker did not have it.
    ///
    /// # Errors
    /// [`Late`]: the worker may still touch it.
    pub fn stop_queue(&self, port: PortId, queue: u16, index: u16) -> Result<Option<P::Stopped>, Late> {
        self.server(port, queue).ask_for(Some(port), |reply| Command::Stop(port, index, reply))
    }

    /// Takes from their workers what was started as the second of each pair of numbers, a part of the queue that is the first: one command and
    /// one answer for each worker. What remains of those that the workers had, by the second.
    ///
    /// # Errors
    /// [`Late`]: a worker may still touch them.
    pub fn stop_queues(
        &self,
        port: PortId,
        queues: impl IntoIterator<Item = (u16, u16)>,
    ) -> Result<Vec<(u16, P::Stopped)>, Late> {
        self.stopped(self.begin_to_stop(port, queues))
    }

    /// Does the first half of [`stop_queues`](Self::stop_queues), which waits for nothing, so that those of many ports are stopped at once.
    pub(crate) fn begin_to_stop(
        &self,
        port: PortId,
        queues: impl IntoIterator<Item = (u16, u16)>,
    ) -> Stopping<P> {
        let asked = self.by_worker(port, queues).map(|(worker, indices)| {
            let (reply, answer) = sync_channel(1);
            worker.send(Command::StopAll(port, indices, reply));
            (worker.number, answer)
        });
        Stopping { port, asked: asked.collect() }
    }

    /// Waits for queues that [were asked](Self::begin_to_stop) to stop, and returns what [`stop_queues`](Self::stop_queues) does.
    ///
    /// # Errors
    /// As for [`stop_queues`](Self::stop_queues).
    pub(crate) fn stopped(&self, stopping: Stopping<P>) -> Result<Vec<(u16, P::Stopped)>, Late> {
        let deadline = Instant::now() + ANSWER_DEADLINE;
        let mut all = Vec::new();
        for (worker, answer) in stopping.asked {
            let worker = &self.workers[worker];
            all.extend(worker.wait(&answer, deadline, Some(stopping.port))?.into_iter().flatten());
        }
        Ok(all)
    }

    /// Has the owner of a queue forward what the port had sent on it before now.
    pub fn drain(&self, port: PortId, queue: u16) {
        self.post(self.owner(port, queue), port, Command::Drain(port, queue));
    }

    /// Has the owner of a queue do what only this kind of port can.
    pub fn request(&self, port: PortId, queue: u16, request: P::Request) {
        self.post(self.owner(port, queue), port, Command::Request(port, request));
    }

    /// Has the owner of a queue do what only this kind of port can, and waits for the answer that `request` sends when it has been done; `None` if
    /// there will be none.
    ///
    /// # Errors
    /// [`Late`]: it has not been done yet, and will be.
    pub fn ask<T>(
        &self,
        port: PortId,
        queue: u16,
        request: impl FnOnce(SyncSender<T>) -> P::Request,
    ) -> Result<Option<T>, Late> {
        self.server(port, queue).ask_for(Some(port), |reply| Command::Request(port, request(reply)))
    }

    /// [Asks](Self::ask) the owners of several queues, all of them before the first answer is waited for.
    ///
    /// # Errors
    /// As for [`ask`](Self::ask).
    pub fn ask_queues<T>(
        &self,
        port: PortId,
        requests: impl IntoIterator<Item = (u16, impl FnOnce(SyncSender<T>) -> P::Request)>,
    ) -> Result<(), Late> {
        let asked = requests.into_iter().map(|(queue, request)| {
            let (reply, answer) = sync_channel(1);
            let worker = self.server(port, queue);
            worker.send(Command::Request(port, request(reply)));
            (worker, answer)
        });
        let asked: Vec<_> = asked.collect();
        let deadline = Instant::now() + ANSWER_DEADLINE;
        asked.iter().try_for_each(|(worker, answer)| worker.wait(answer, deadline, Some(port)).map(drop))
    }

    /// Asks every worker to say that it has carried out its commands, and waits for none; where each says so, with its number.
    pub fn probe(&self) -> Vec<(usize, Receiver<()>)> {
        let ask = |worker: &WorkerHandle<P>| {
            let (reply, answer) = sync_channel(1);
            worker.send(Command::Probe(reply));
            (worker.number, answer)
        };
        self.workers.iter().map(ask).collect()
    }

    /// Whether a worker is known to be [`Late`], and has not caught up.
    pub fn is_late(&self) -> bool {
        self.workers.iter().any(WorkerHandle::is_late)
    }

    /// Has every worker do what only this kind of port can.
    pub fn request_all(&self, port: PortId, request: impl Fn() -> P::Request) {
        self.workers.iter().for_each(|worker| worker.send(Command::Request(port, request())));
    }

    /// Forgets the addresses learned behind a port: its guest has gone.
    pub fn forget(&self, port: PortId) {
        self.workers.iter().for_each(|worker| worker.send(Command::Forget(port)));
    }

    /// Captures frames of a port from now on. `tap` makes each worker's.
    pub fn capture(&self, port: PortId, tap: impl Fn(usize) -> Option<Tap>) {
        for worker in &self.workers {
            if let Some(tap) = tap(worker.number) {
                worker.send(Command::Capture(port, Box::new(tap)));
            }
        }
    }

    /// Lets frames pass a port from now on, or none.
    pub fn set_link(&self, port: PortId, up: bool) {
        self.workers.iter().for_each(|worker| worker.send(Command::SetLink(port, up)));
    }

    /// Captures nothing more for a client.
    pub fn end_capture(&self, capture: CaptureId) {
        self.workers.iter().for_each(|worker| worker.send(Command::EndCapture(capture)));
    }

    /// Returns when all workers but late ones have carried out what they were told.
    pub fn settled(&self) {
        self.ask_all(self.not_late(), Command::Probe);
    }

    /// Forwards a frame as if it had come from a port.
    pub fn inject(&self, port: PortId, frame: Vec<u8>) {
        self.post(0, port, Command::Inject(port, frame));
    }

    /// The workers that can be asked, without a queue of questions that they never answer.
    fn not_late(&self) -> impl Iterator<Item = &WorkerHandle<P>> {
        self.workers.iter().filter(|worker| !worker.is_late())
    }

    /// Finds out what would become of a frame; `None` if the workers do not have its port.
    ///
    /// # Errors
    /// A worker is too busy to answer.
    pub(crate) fn walk(&self, frame: Imaginary) -> Result<Option<Walk>, Late> {
        walk(&mut &*self, frame)
    }

    /// The state of every queue, but for those of late workers.
    pub fn inspect(&self) -> Vec<(PortId, P::State)> {
        self.ask_all(self.not_late(), |reply| Command::Inspect(None, reply)).into_iter().flatten().collect()
    }

    /// What waits at the ends of wires in each worker, but for late ones.
    pub(crate) fn wires(&self) -> Vec<(PortId, WireState)> {
        self.ask_all(self.not_late(), Command::Wires).into_iter().flatten().collect()
    }

    /// Asks for the state of the queues of these ports, and waits for none: where each worker says that of its own. Late workers are not asked.
    pub fn begin_to_inspect(&self, ports: Arc<[PortId]>) -> Vec<Receiver<States<P>>> {
        let ask = |worker: &WorkerHandle<P>| {
            let (reply, answer) = sync_channel(1);
            worker.send(Command::Inspect(Some(Arc::clone(&ports)), reply));
            answer
        };
        self.not_late().map(ask).collect()
    }

    /// Hands the forwarding databases of all workers, but for late ones, to `page`, part by part. Packets go on between the parts.
    ///
    /// Of each, no further part is asked for when it has given `most` addresses, but its counts. Returns true if all parts were.
    pub fn addresses(&self, most: Option<usize>, mut page: impl FnMut(FdbPage)) -> bool {
        let mut are_all_listed = true;
        for worker in self.not_late() {
            let (mut next, mut listed) = (Some(0), 0);
            while let Some(mut from) = next {
                if most.is_some_and(|most| listed >= most) {
                    (from, are_all_listed) = (FdbPage::END, false);
                }
                let Ok(Some(part)) = worker.ask(|reply| Command::Addresses(from, reply)) else { break };
                (next, listed) = (part.next, listed + part.items.len());
                page(part);
            }
        }
        are_all_listed
    }

    /// Has the workers forget learned addresses, part by part; returns how many, of the worker that knew most of them.
    pub fn flush(&self, flush: Flush) -> usize {
        let mut most = 0;
        for worker in self.not_late() {
            let (mut forgotten, mut next) = (0, Some(0));
            while let Some(from) = next {
                let Ok(Some(part)) = worker.ask(|reply| Command::Flush(from, flush, reply)) else { break };
                (forgotten, next) = (forgotten + part.0, part.1);
            }
            most = most.max(forgotten);
        }
        most
    }

    /// Keeps a worker busy until the sender that is returned is dropped.
    #[cfg(test)]
    pub(crate) fn hold(&self, worker: usize) -> Sender<()> {
        let (release, until) = channel();
        self.workers[worker].send(Command::Hold(until));
        release
    }

    /// Whether a worker has ended by itself, which it only does if it panicked.
    pub fn is_dead(&self) -> bool {
        self.workers.iter().any(|worker| worker.thread.as_ref().is_none_or(JoinHandle::is_finished))
    }
}

impl<P: Queues> Guide for &Workers<P> {
    fn owner(&self, port: PortId, queue: u16) -> usize {
        Workers::owner(self, port, queue)
    }

    fn enter(&mut self, worker: usize, frame: Arc<Imaginary>) -> Result<Option<Entry>, Late> {
        self.workers[worker].ask(|reply| Command::WalkIn(frame, reply))
    }

    fn leave(&mut self, worker: usize, leaving: Leaving) -> Result<Option<Exit>, Late> {
        Ok(self.workers[worker].ask(|reply| Command::WalkOut(Box::new(leaving), reply))?.flatten())
    }
}

/// The states of queues, each with its port.
type States<P> = Vec<(PortId, <P as Queues>::State)>;

/// What remains of queues that were stopped, by their indices.
type Stopped<P> = Vec<(u16, <P as Queues>::Stopped)>;

/// Queues of a port that were asked to stop, with the numbers of their workers, which answer.
pub(crate) struct Stopping<P: Queues> {
    port: PortId,
    asked: Vec<(usize, Receiver<Stopped<P>>)>,
}

/// How a worker begins.
struct Begin {
    clock: Clock,
    paused: bool,
    standing: Arc<Standing>,
}

impl<P: Queues> WorkerHandle<P> {
    /// Returns the worker's number.
    pub(crate) fn number(&self) -> usize {
        self.number
    }

    fn start(
        config: &SwitchConfig,
        number: usize,
        bell: EventFd,
        handoff: Handoff,
        begin: Begin,
        watcher: Watcher,
        reporter: Arc<FaultReporter>,
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
        let (touched, waits) = (Arc::new(Touched::default()), Arc::new(OnceLock::new()));
        let run_delay = Arc::new(OnceLock::new());
        let thread = {
            let (counters, target) = (Arc::clone(&counters), Arc::clone(&target));
            let (touched, waits) = (Arc::clone(&touched), Arc::clone(&waits));
            let run_delay = Arc::clone(&run_delay);
            let run = move || {
                if let Ok(delay) = RunDelay::of_this_thread() {
                    run_delay.get_or_init(|| delay);
                }
                target.get_or_init(Target::current);
                watcher.watch_this_thread();
                if let Some(holes) = HoleWaits::of_this_thread() {
                    waits.get_or_init(|| holes);
                }
                // Without it frames that wait for tokens wait longer, and in larger bursts; no more.
                let _ = set_timer_slack(TIMER_SLACK);
                let worker = Worker::new(&config, inbox, handoff, epoll, seed, counters, begin.clock);
                worker.stand_with(begin.standing, begin.paused).tell(touched).run();
            };
            std::thread::Builder::new().name(format!("ringferry-{number}")).spawn(run)?
        };
        let late = Mutex::default();
        Ok(Self {
            commands,
            bell,
            counters,
            target,
            thread: Some(thread),
            number,
            late,
            touched,
            waits,
            run_delay,
            counted_delay: AtomicU64::new(0),
            reporter,
            gathers: AtomicBool::new(false),
            #[cfg(test)]
            is_in_hole: AtomicBool::new(false),
        })
    }

    /// Counts the time for which the worker has waited for a processor since the last time. Only the control plane's thread may call this.
    fn count_run_delay(&self) {
        let Some(delay) = self.run_delay.get().and_then(RunDelay::so_far) else { return };
        let delay = delay.as_nanos() as u64;
        let counted = self.counted_delay.swap(delay, Ordering::Relaxed);
        self.counters.run_delay_nanoseconds.add(delay.saturating_sub(counted));
    }

    /// Asks for something that needs no answer.
    pub(crate) fn send(&self, command: Command<P>) {
        self.submit(Posted { command, place: None });
    }

    /// Has commands gather, or wakes the worker for those that have.
    pub(super) fn set_gathers(&self, gathers: bool) {
        self.gathers.store(gathers, Ordering::Relaxed);
        if !gathers {
            let _ = self.bell.signal();
        }
    }

    fn submit(&self, posted: Posted<P>) {
        // A worker that is gone has let go of everything, which is all a command could want.
        let _ = self.commands.send(posted);
        if !self.gathers.load(Ordering::Relaxed) {
            let _ = self.bell.signal();
        }
    }

    /// Asks, and waits for the answer; `None` if the worker has none.
    ///
    /// # Errors
    /// [`Late`]: it will be carried out, but has not been.
    pub(crate) fn ask<T>(
        &self,
        command: impl FnOnce(SyncSender<T>) -> Command<P>,
    ) -> Result<Option<T>, Late> {
        self.ask_for(None, command)
    }

    /// Asks for the sake of a port.
    ///
    /// # Errors
    /// As for [`ask`](Self::ask).
    fn ask_for<T>(
        &self,
        port: Option<PortId>,
        command: impl FnOnce(SyncSender<T>) -> Command<P>,
    ) -> Result<Option<T>, Late> {
        let (reply, answer) = sync_channel(1);
        self.send(command(reply));
        self.wait(&answer, Instant::now() + ANSWER_DEADLINE, port)
    }

    /// Asks, and waits for an answer that must not be lost: the worker hands it over in person (a channel without storage), and has it back if nobody
    /// takes it in time.
    ///
    /// # Errors
    /// As for [`ask`](Self::ask).
    pub(crate) fn ask_in_person<T>(
        &self,
        command: impl FnOnce(SyncSender<T>) -> Command<P>,
    ) -> Result<Option<T>, Late> {
        let (reply, answer) = sync_channel(0);
        self.send(command(reply));
        self.wait(&answer, Instant::now() + ANSWER_DEADLINE, None)
    }

    /// Waits for an answer that was asked for, unless the worker is late already; if it was asked for the sake of a port, also while the worker sleeps
    /// in the memory of another one.
    pub(crate) fn wait<T>(
        &self,
        answer: &Receiver<T>,
        deadline: Instant,
        port: Option<PortId>,
    ) -> Result<Option<T>, Late> {
        let patience = Instant::now() + PATIENCE;
        let mut deadline = if self.is_late() { Instant::now() } else { deadline };
        let mut blamed = None;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match answer.recv_timeout(left.min(STANDSTILL)) {
                Ok(answer) => return Ok(Some(answer)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) if left > STANDSTILL => self.interrupt(),
                Err(RecvTimeoutError::Timeout)
                    if Instant::now() < patience && port.is_some_and(|port| self.is_held_by_other(port)) =>
                {
                    deadline = Instant::now() + HELD;
                    let culprit = self.touched.now().sole().filter(|culprit| Some(*culprit) != port);
                    if let Some(port) = culprit.filter(|_| blamed != culprit) {
                        blamed = culprit;
                        self.reporter.report(PortFault { port, session: None, why: holes::HOLES.to_owned() });
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.note_late();
                    return Err(Late { worker: self.number });
                }
            }
        }
    }

    /// Whether the worker sleeps in the memory of another port than this one.
    fn is_held_by_other(&self, port: PortId) -> bool {
        let waits = self.waits.get().is_some_and(HoleWaits::is_waiting);
        #[cfg(test)]
        let waits = waits || self.is_in_hole.load(Ordering::Relaxed);
        waits && self.touched.now().concerns_another(port)
    }

    fn lock_late(&self) -> MutexGuard<'_, Option<Receiver<()>>> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the worker has not answered, and has not caught up since.
    fn is_late(&self) -> bool {
        let mut late = self.lock_late();
        let is_late = late.as_ref().is_some_and(|caught_up| caught_up.try_recv() == Err(TryRecvError::Empty));
        if !is_late {
            *late = None;
        }
        is_late
    }

    /// Has the worker say when it has caught up with what it was asked for.
    fn note_late(&self) {
        let mut late = self.lock_late();
        if late.is_none() {
            let (reply, caught_up) = sync_channel(1);
            self.send(Command::Probe(reply));
            *late = Some(caught_up);
            self.interrupt();
            tracing::warn!(worker = self.number, "the worker is too busy to answer and is not waited for");
        }
    }

    /// Gets the worker out of a call in which a front end holds it, if it stands in one.
    fn interrupt(&self) {
        if let Some(target) = self.target.get() {
            target.interrupt();
        }
    }
}

impl<P: Queues> Drop for WorkerHandle<P> {
    fn drop(&mut self) {
        self.send(Command::End);
        let Some(thread) = self.thread.take() else { return };
        let (began, mut asked) = (Instant::now(), Instant::now());
        while !thread.is_finished() {
            if began.elapsed() >= ANSWER_DEADLINE {
                // It ends when it gets to the command, unless the process ends first.
                tracing::warn!(worker = self.number, "the worker does not end and is not waited for");
                return;
            }
            if asked.elapsed() >= STANDSTILL {
                self.interrupt();
                asked = Instant::now();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::queues::FrameCost;
    use crate::plane::testing::{HeapQueues, Wire};
    use crate::plane::worker::command::MOST_POSTED;
    use crate::plane::worker::holes::Touch;

    #[test]
    fn h1_a_port_that_asks_for_more_than_workers_carry_out_is_reported_once_and_others_are_not() {
        let config = SwitchConfig { workers: Some(1), ..SwitchConfig::default() };
        let workers = Workers::<HeapQueues>::start(&config).unwrap();
        let ports = [PortId(0), PortId(1)];
        for id in ports {
            let wire = Arc::new(Wire::new(1, FrameCost::SystemCall));
            let steering = Steering::Local(ringferry_packet::vnet::Offloads::empty());
            let placement = Placement { steering, owners: Owners::default(), queues: 1 };
            workers.add_port(id, "heap", &PortTotals::new(1), placement, |_, handle| {
                HeapQueues::new(handle.clone(), Arc::clone(&wire), None)
            });
        }
        // The worker stands still until its answer is taken.
        let (reply, answer) = sync_channel(0);
        workers.workers[0].send(Command::Settle(reply));
        for _ in 0..2 * MOST_POSTED {
            workers.inject(ports[0], vec![0; 60]);
        }
        workers.inject(ports[1], vec![0; 60]);
        let faults: Vec<_> = workers.faults().into_iter().map(|fault| fault.port).collect();
        assert_eq!(faults, [ports[0]]);
        answer.recv().unwrap();
        // Commands are carried out in order: when this one is answered, the others have given back their places.
        assert!(workers.inspect().is_empty());
        for _ in 0..MOST_POSTED {
            workers.inject(ports[0], vec![0; 60]);
        }
        assert!(workers.faults().is_empty());
    }

    #[test]
    fn what_a_guest_was_known_by_is_forgotten_when_it_has_gone() {
        let config = SwitchConfig { workers: Some(2), ..SwitchConfig::default() };
        let workers = Workers::<HeapQueues>::start(&config).unwrap();
        let port = PortId(0);
        let wire = Arc::new(Wire::new(1, FrameCost::SystemCall));
        let steering = Steering::Local(ringferry_packet::vnet::Offloads::empty());
        let placement = Placement { steering, owners: Owners::default(), queues: 1 };
        workers.add_port(port, "heap", &PortTotals::new(2), placement, |_, handle| {
            HeapQueues::new(handle.clone(), Arc::clone(&wire), None)
        });
        let known = || {
            let mut known = 0;
            workers.addresses(None, |page| known += page.items.len());
            known
        };
        let until = |count: usize| {
            let deadline = Instant::now() + Duration::from_secs(120);
            while known() != count {
                assert!(Instant::now() < deadline, "{} addresses are known", known());
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        // Both have the port then, and have forgotten what its number stood for before.
        until(0);
        let mut frame = vec![0xff; 60];
        frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
        workers.inject(port, frame);
        // One learns it, and tells the other.
        until(2);
        let mut counts = Vec::new();
        let are_all_listed = workers.addresses(Some(0), |page| {
            assert!(page.items.is_empty(), "{page:?}");
            counts.extend(page.whole.map(|whole| whole.behind));
        });
        assert_eq!((are_all_listed, &counts[..]), (false, &[vec![(port, 1)], vec![(port, 1)]][..]));
        assert!(workers.addresses(Some(2), |_| {}));
        workers.forget(port);
        until(0);
    }

    /// The innocent port asks for its ring while the worker sleeps in the memory of the other one.
    #[test]
    fn a_port_does_not_pay_for_a_hole_that_another_has_punched_under_its_worker() {
        let config = SwitchConfig { workers: Some(1), ..SwitchConfig::default() };
        let workers = Workers::<HeapQueues>::start(&config).unwrap();
        let [innocent, culprit] = [PortId(0), PortId(1)];
        let worker = &workers.workers[0];
        worker.is_in_hole.store(true, Ordering::Relaxed);
        // Once alone, and once while frames are copied, when it may be either's.
        for (touch, blamed) in
            [(Touch::of(culprit), vec![culprit]), (Touch::between(culprit, innocent), vec![])]
        {
            let release = workers.hold(0);
            // The worker gets to that before it is asked, and touches nothing by itself.
            worker.touched.set(touch);
            let found = std::thread::scope(|scope| {
                let watching = scope.spawn(|| {
                    let since = Instant::now();
                    let mut found = Vec::new();
                    while found.len() < blamed.len().max(1) && since.elapsed() < ANSWER_DEADLINE * 3 / 2 {
                        found.extend(workers.faults().into_iter().map(|fault| fault.port));
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    drop(release);
                    found
                });
                assert_eq!(workers.stop_queue(innocent, 0, 0), Ok(None), "{touch:?}");
                watching.join().unwrap()
            });
            assert_eq!(found, blamed, "{touch:?}");
        }
        // The culprit itself has the usual deadline, and so has whoever asks when no hole is to blame.
        for (touch, port, is_in_hole) in
            [(Touch::of(culprit), culprit, true), (Touch::of(culprit), innocent, false)]
        {
            worker.is_in_hole.store(is_in_hole, Ordering::Relaxed);
            let release = workers.hold(0);
            worker.touched.set(touch);
            assert_eq!(workers.stop_queue(port, 0, 0), Err(Late { worker: 0 }));
            drop(release);
            while workers.is_late() {
                std::thread::yield_now();
            }
        }
        assert!(workers.faults().is_empty());
    }
}
