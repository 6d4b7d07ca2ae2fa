//! Workers without threads: a test says which of them makes its next step, and what time it is.
//!
//! A [`Bed`] has the workers that a switch would have, with [heap ports](super::heap) plugged in, on a scripted clock. Nothing happens by itself: a worker
//! makes a [round](Bed::round), [begins one](Bed::begin_round) and ends it later, [looks at its events](Bed::serve_events), or [goes to sleep](Bed::sleep) when the test says so; one that sleeps only goes on
//! when epoll reports something, or when its time is over, as its thread would. So a test can try any order of steps, and try it again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, channel, sync_channel};
use std::time::Duration;

#[cfg(test)]
use ringferry_control::capture::{Direction, ring::RingWriter};
use ringferry_packet::vnet::Offloads;
use ringferry_sys::epoll::{Epoll, Interest};
use ringferry_sys::eventfd::EventFd;

use super::heap::{self, HeapQueues, Wire};
use crate::config::SwitchConfig;
use crate::counters::{PortTotals, WorkerCounters};
#[cfg(test)]
use crate::fdb::FdbPage;
use crate::fdb::PortId;
#[cfg(test)]
use crate::plane::capture::{CaptureId, MirrorCounts, Tap, Wanted};
#[cfg(test)]
use crate::plane::forward::walk::{Entry, Exit, Guide, Imaginary, Leaving, Walk, walk};
use crate::plane::handoff::migration::{MigrationSteps, QueueOwners, migrate};
use crate::plane::handoff::ring::{Doorbell, Handoff, HeldUp};
use crate::plane::now::Clock;
use crate::plane::worker::command::{Command, Inbox, NewPort};
use crate::plane::worker::handles::{Late, Policies};
#[cfg(test)]
use crate::plane::worker::handover::{Carried, Held};
use crate::plane::worker::{BELL, Worker};
use crate::plane::{FrameCost, MigrationError, PortHandle, PortShared, Steering};
use crate::rules::Rules;
#[cfg(test)]
use crate::rules::Vid;

/// Most rounds of all workers until nothing moves any more: more would be an endless loop.
const ROUNDS: usize = 100_000;

/// What a port of a bed is.
#[derive(Clone, Debug)]
pub struct HeapPort {
    /// Queue pairs, over which the engine spreads flows; `None` for a port that every worker writes to by itself, as a tap.
    pub pairs: Option<u16>,
    /// The offloads that its receiver takes.
    pub offloads: Offloads,
    /// Its MTU.
    pub mtu: u16,
    /// Its rules.
    pub rules: Rules,
    /// The worker of its first queue.
    pub first: usize,
}

impl Default for HeapPort {
    /// A guest with one pair, all offloads, MTU 65535 and no rules, with worker 0.
    fn default() -> Self {
        Self { pairs: Some(1), offloads: Offloads::all(), mtu: u16::MAX, rules: Rules::default(), first: 0 }
    }
}

/// See the head of this file.
pub struct Bed {
    workers: Vec<Worker<HeapQueues>>,
    /// Until when each worker sleeps, if it does.
    asleep: Vec<Option<u64>>,
    /// What each worker has on its way to others, if it is in the middle of a round.
    held_up: Vec<Option<HeldUp>>,
    clock: &'static AtomicU64,
    owners: QueueOwners,
    policies: Policies,
    /// Which worker goes on first.
    turn: usize,
    /// The counters of each port.
    ports: Vec<Option<PortTotals>>,
    /// What is known of those with pairs.
    shared: Vec<Option<Arc<PortShared>>>,
}

impl Bed {
    /// So many workers without ports, at time 0. Each bed leaks a word, its clock.
    ///
    /// # Panics
    /// No descriptors are left.
    pub fn new(config: &SwitchConfig, workers: usize) -> Bed {
        let clock: &'static AtomicU64 = Box::leak(Box::new(AtomicU64::new(0)));
        let bell = || EventFd::new().expect("a descriptor");
        let bells: Vec<_> = (0..workers).map(|_| bell()).collect();
        let doorbells: Vec<_> = bells
            .iter()
            .map(|bell| Arc::new(Doorbell::new(bell.try_clone().expect("a descriptor"))))
            .collect();
        let standing = Arc::default();
        let workers = bells.into_iter().zip(Handoff::mesh(&doorbells)).map(|(bell, handoff)| {
            let epoll = Epoll::new().expect("a descriptor");
            epoll.add(&bell, BELL, Interest::READABLE).expect("a descriptor can be watched");
            let inbox = Inbox { commands: channel().1, bell };
            let counters = Arc::new(WorkerCounters::default());
            let worker = Worker::new(config, inbox, handoff, epoll, [1, 2], counters, Clock::Scripted(clock));
            worker.stand_with(Arc::clone(&standing), false)
        });
        let workers: Vec<_> = workers.collect();
        let asleep = vec![None; workers.len()];
        let held_up = workers.iter().map(|_| None).collect();
        let (owners, policies) = (QueueOwners::default(), Policies::default());
        let (ports, shared) = (Vec::new(), Vec::new());
        Bed { workers, asleep, held_up, clock, owners, policies, turn: 0, ports, shared }
    }

    /// Plugs in a port, all of whose queues run, under a number that none has had.
    pub fn add(&mut self, port: &HeapPort) -> (PortId, Arc<Wire>) {
        let id = PortId(self.ports.len() as u16);
        self.ports.push(None);
        self.shared.push(None);
        (id, self.add_as(id, port))
    }

    /// The same under the number of a port that was removed.
    ///
    /// # Panics
    /// No port has had that number.
    pub fn add_as(&mut self, id: PortId, port: &HeapPort) -> Arc<Wire> {
        self.add_while(id, port, |_, _| ())
    }

    /// The same, and what happens when the first worker knows of the port, which has its queues, and no other one does.
    pub fn add_while(
        &mut self,
        id: PortId,
        port: &HeapPort,
        meanwhile: impl FnOnce(&mut Bed, &Wire),
    ) -> Arc<Wire> {
        let (cost, queues) = match port.pairs {
            Some(pairs) => (FrameCost::Descriptor, pairs),
            None => (FrameCost::SystemCall, 1),
        };
        let wire = Arc::new(Wire::new(queues, cost));
        let shared = port.pairs.map(|_| Arc::new(PortShared::default()));
        if let Some(shared) = &shared {
            shared.set_offloads(port.offloads);
            shared.set_mtu(port.mtu);
        }
        let steering = match &shared {
            Some(shared) => Steering::Pairs(Arc::clone(shared)),
            None => Steering::Local(port.offloads),
        };
        let totals = PortTotals::new(self.workers.len());
        let owners = crate::plane::Owners(vec![port.first]);
        self.owners.add(id, &steering, &owners, queues, self.workers.len());
        self.set_rules(id, &port.rules);
        let add = |worker| {
            let name = format!("heap{}", id.0).into();
            let handle = PortHandle { id, name, counters: totals.of(worker) };
            let queues = HeapQueues::new(handle.clone(), Arc::clone(&wire), shared.clone());
            Command::AddPort(Box::new(NewPort { handle, queues, steering: steering.clone() }))
        };
        let first = self.owners.of(id, 0);
        self.execute(first, add(first));
        self.execute(first, Command::Start(id, Box::new(0)));
        meanwhile(self, &wire);
        for worker in (0..self.workers.len()).filter(|worker| *worker != first) {
            self.execute(worker, add(worker));
        }
        for queue in 1..queues {
            self.execute(self.owners.of(id, queue), Command::Start(id, Box::new(queue)));
        }
        self.ports[usize::from(id.0)] = Some(totals);
        self.shared[usize::from(id.0)] = shared;
        wire
    }

    /// Unplugs a port.
    pub fn remove(&mut self, id: PortId) {
        self.owners.remove(id);
        self.policies.remove(id);
        for worker in 0..self.workers.len() {
            self.ask(worker, |reply| Command::RemovePort(id, reply));
        }
        self.ports[usize::from(id.0)] = None;
    }

    /// The guest behind a port has gone, and its addresses with it.
    pub fn forget(&mut self, id: PortId) {
        for worker in 0..self.workers.len() {
            self.execute(worker, Command::Forget(id));
        }
    }

    /// Stops a queue of a port, after what it had sent was forwarded.
    pub fn stop(&mut self, id: PortId, queue: u16) {
        let worker = self.owners.of(id, queue);
        self.execute(worker, Command::Drain(id, queue));
        self.ask(worker, |reply| Command::Stop(id, queue, reply));
    }

    /// Starts a queue that was stopped.
    pub fn start(&mut self, id: PortId, queue: u16) {
        self.execute(self.owners.of(id, queue), Command::Start(id, Box::new(queue)));
    }

    /// The receiver behind a port with pairs takes other offloads from now on. False if the port has no pairs.
    pub fn set_offloads(&mut self, id: PortId, offloads: Offloads) -> bool {
        let shared = self.shared.get(usize::from(id.0)).and_then(Option::as_ref);
        shared.map(|shared| shared.set_offloads(offloads)).is_some()
    }

    /// Changes the rules of a port.
    pub fn set_rules(&mut self, id: PortId, rules: &Rules) {
        let here = crate::plane::policy::Here { workers: self.workers.len(), now: 0 };
        let compiled = self.policies.set(id, rules, here);
        for worker in 0..self.workers.len() {
            self.execute(worker, compiled.command());
        }
    }

    /// Captures frames of a port; there is a writer for each worker.
    #[cfg(test)]
    pub(crate) fn capture(
        &mut self,
        id: PortId,
        capture: CaptureId,
        interface: u16,
        wanted: &Wanted,
        writers: &[Arc<RingWriter>],
    ) {
        for (worker, writer) in writers.iter().enumerate() {
            let tap = Tap::new(capture, interface, wanted.clone(), Arc::clone(writer));
            self.execute(worker, Command::Capture(id, Box::new(tap)));
        }
    }

    /// Copies what passes a port to another one.
    #[cfg(test)]
    pub(crate) fn mirror(
        &mut self,
        id: PortId,
        capture: CaptureId,
        direction: Option<Direction>,
        to: PortId,
        vlan: Option<Vid>,
        counts: &Arc<MirrorCounts>,
    ) {
        for worker in 0..self.workers.len() {
            let tap = Tap::mirror(capture, direction, to, vlan, Arc::clone(counts));
            self.execute(worker, Command::Capture(id, Box::new(tap)));
        }
    }

    /// Takes the link of a port up or down.
    #[cfg(test)]
    pub(crate) fn set_link(&mut self, id: PortId, up: bool) {
        for worker in 0..self.workers.len() {
            self.execute(worker, Command::SetLink(id, up));
        }
    }

    /// Ends a capture.
    #[cfg(test)]
    pub(crate) fn end_capture(&mut self, capture: CaptureId) {
        for worker in 0..self.workers.len() {
            self.execute(worker, Command::EndCapture(capture));
        }
    }

    /// The addresses that a worker knows, in parts.
    #[cfg(test)]
    pub(crate) fn addresses(&mut self, worker: usize) -> Vec<FdbPage> {
        let (mut all, mut next) = (Vec::new(), Some(0));
        while let Some(from) = next {
            let page = self.ask(worker, |reply| Command::Addresses(from, reply));
            let page = page.expect("a worker of a bed answers");
            next = page.next;
            all.push(page);
        }
        all
    }

    /// What would become of a frame.
    #[cfg(test)]
    pub(crate) fn walk(&mut self, frame: Imaginary) -> Walk {
        walk(self, frame).expect("a worker of a bed answers").expect("a port of this number")
    }

    /// The counters of each worker. Those of time stand still, as a bed's workers have no threads: a test counts it.
    #[cfg(test)]
    pub(crate) fn worker_counters(&self) -> impl Iterator<Item = &WorkerCounters> {
        self.workers.iter().map(Worker::counters)
    }

    /// The counters of a port that is plugged in.
    ///
    /// # Panics
    /// There is no such port.
    pub fn totals(&self, id: PortId) -> &PortTotals {
        self.ports[usize::from(id.0)].as_ref().expect("a port of this number")
    }

    /// The worker that a queue is with.
    pub fn owner(&self, id: PortId, queue: u16) -> usize {
        self.owners.of(id, queue)
    }

    /// Microseconds since the begin.
    pub fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// Lets time pass.
    pub fn advance(&self, micros: u64) {
        self.clock.fetch_add(micros, Ordering::Relaxed);
    }

    fn execute(&mut self, worker: usize, command: Command<HeapQueues>) {
        self.end_round(worker);
        // The command rings its bell.
        self.wake(worker);
        self.workers[worker].execute(command);
    }

    fn ask<T>(
        &mut self,
        worker: usize,
        command: impl FnOnce(SyncSender<T>) -> Command<HeapQueues>,
    ) -> Option<T> {
        let (reply, answer) = sync_channel(1);
        self.execute(worker, command(reply));
        answer.try_recv().ok()
    }

    /// Frames that are under way from one worker to another, or whose buffers are.
    pub fn under_way(&mut self, from: usize, to: usize) -> usize {
        self.workers[from].under_way(to)
    }

    /// A look of a worker at its events so long after the last one, with this price of the work since: whether sources are audited then.
    pub fn look_after(&mut self, worker: usize, passed: Duration, price: u64) -> bool {
        self.workers[worker].look_after(passed, price)
    }

    /// A round of a worker has been slow: it looks for holes in the memory of [wires](Wire::punch) from now on.
    pub fn slow_round(&mut self, worker: usize) {
        self.workers[worker].slow_round(heap::looks_asleep);
    }

    /// So much time passes for a worker that looks for holes, and it finds none.
    pub fn quiet_for(&mut self, worker: usize, passed: Duration) {
        self.workers[worker].quiet_for(passed);
    }

    /// One round of a worker, unless it sleeps; whether anything moved. One that has to stand still has a look at its commands and at what it was handed instead.
    pub fn round(&mut self, worker: usize) -> bool {
        self.end_round(worker);
        if self.is_asleep(worker) {
            return false;
        }
        let worker = &mut self.workers[worker];
        if worker.stands_still() {
            worker.look_standing(Duration::ZERO);
            return false;
        }
        worker.round()
    }

    /// A worker is told to stand still, the first of the steps of a hand-over to another process.
    #[cfg(test)]
    pub(crate) fn pause(&mut self, worker: usize) {
        self.ask(worker, Command::Pause);
    }

    /// A paused worker delivers what it was handed: the steps that follow when all are paused.
    #[cfg(test)]
    pub(crate) fn settle(&mut self, worker: usize) {
        self.ask(worker, Command::Settle);
    }

    /// What a worker holds that is nowhere else, for another process.
    #[cfg(test)]
    pub(crate) fn held(&mut self, worker: usize) -> Held {
        self.ask(worker, |reply| Command::HandOver(0, reply)).expect("a worker of a bed answers")
    }

    /// A worker goes on with what another one held.
    #[cfg(test)]
    pub(crate) fn carry(&mut self, worker: usize, carried: Carried) {
        self.execute(worker, Command::Carry(Box::new(carried)));
    }

    /// A worker is told to go on.
    #[cfg(test)]
    pub(crate) fn unpause(&mut self, worker: usize) {
        self.execute(worker, Command::Unpause);
    }

    /// Most of a round of a worker, unless it sleeps: it has decided whose the queues are that frames go to, and what it has handed over has not
    /// arrived. It does with the worker's next step, whatever that is.
    pub fn begin_round(&mut self, worker: usize) {
        self.end_round(worker);
        if !self.is_asleep(worker) {
            self.held_up[worker] = Some(self.workers[worker].round_held_up());
        }
    }

    /// The rest of a round that was begun, if one was.
    fn end_round(&mut self, worker: usize) {
        if let Some(held) = self.held_up[worker].take() {
            self.workers[worker].let_pass(held);
        }
    }

    fn wake(&mut self, worker: usize) {
        if self.asleep[worker].take().is_some() {
            self.workers[worker].wake_up();
        }
    }

    /// Whether a worker sleeps; one whose time is over wakes up.
    fn is_asleep(&mut self, worker: usize) -> bool {
        if self.asleep[worker].is_some_and(|until| until <= self.now()) {
            self.wake(worker);
        }
        self.asleep[worker].is_some()
    }

    /// A worker looks at its events, which is what one that sleeps does when it is woken; whether there were any.
    pub fn serve_events(&mut self, worker: usize) -> bool {
        self.end_round(worker);
        let any = self.workers[worker].serve_events(Some(Duration::ZERO));
        if any {
            self.wake(worker);
        }
        any
    }

    /// Makes it dear to wake a worker, for as long as what is returned is kept: so many look at its bell.
    ///
    /// # Panics
    /// No descriptors are left.
    pub fn burden_bell(&self, worker: usize, looks: usize) -> impl Sized + use<> {
        let bells: Vec<_> = (0..looks.isqrt())
            .map(|_| self.workers[worker].bell().try_clone().expect("a descriptor"))
            .collect();
        let epolls: Vec<_> = (0..looks.isqrt()).map(|_| Epoll::new().expect("a descriptor")).collect();
        for epoll in &epolls {
            bells.iter().for_each(|bell| {
                epoll.add(bell, BELL, Interest::READABLE).expect("a descriptor can be watched");
            });
        }
        (epolls, bells)
    }

    /// A worker goes to sleep, if it finds that it may; whether it sleeps.
    pub fn sleep(&mut self, worker: usize) -> bool {
        self.end_round(worker);
        if !self.is_asleep(worker) {
            let time = self.workers[worker].prepare_to_sleep();
            let until = |time: Option<Duration>| {
                time.map_or(u64::MAX, |time| self.now().saturating_add(time.as_micros() as u64))
            };
            self.asleep[worker] = time.map(until);
        }
        self.asleep[worker].is_some()
    }

    /// Lets all workers go on, as their threads would, until all of them sleep. Each time another of them is the first.
    ///
    /// # Panics
    /// They do not come to rest.
    pub fn run(&mut self) {
        let workers = self.workers.len();
        self.turn = (self.turn + 1) % workers;
        (0..workers).for_each(|worker| self.end_round(worker));
        for _ in 0..ROUNDS {
            let mut moved = false;
            for worker in (self.turn..workers).chain(0..self.turn) {
                moved |= self.serve_events(worker);
                moved |= self.round(worker);
                moved |= !self.sleep(worker);
            }
            if !moved {
                return;
            }
        }
        panic!("the workers do not come to rest");
    }

    /// When the first of the workers wakes up by itself, if all sleep and one of them does.
    pub fn next_wake(&self) -> Option<u64> {
        let next = self.asleep.iter().copied().collect::<Option<Vec<_>>>()?.into_iter().min()?;
        (next < u64::MAX).then_some(next)
    }

    /// Lets all workers go on, and time pass as they sleep, for at most so many microseconds.
    ///
    /// # Panics
    /// They do not come to rest.
    pub fn run_for(&mut self, micros: u64) {
        let end = self.now().saturating_add(micros);
        loop {
            self.run();
            let now = self.now();
            let next = self.next_wake().filter(|next| *next <= end);
            self.advance(next.unwrap_or(end) - now);
            if next.is_none() {
                return;
            }
        }
    }

    /// Lets all workers go on, and time pass, until none of them waits for a time.
    ///
    /// # Panics
    /// They do not come to rest.
    pub fn run_out(&mut self) {
        self.run();
        while let Some(next) = self.next_wake() {
            self.advance(next - self.now());
            self.run();
        }
    }

    /// Migrates a queue to another worker by the steps that the control plane takes. Before each step `between` may let workers go on and
    /// frames be sent; it is told the number of the step.
    ///
    /// # Errors
    /// See [`MigrationError`].
    pub fn migrate(
        &mut self,
        id: PortId,
        queue: u16,
        worker: usize,
        between: &mut dyn FnMut(&mut Bed, usize),
    ) -> Result<usize, MigrationError> {
        self.migrate_late(id, queue, worker, None, between)
    }

    /// The same, but whoever is asked in step `late` does not answer in time: it carries out that command, and those that follow, when the control
    /// plane has given up.
    ///
    /// # Errors
    /// See [`MigrationError`].
    pub fn migrate_late(
        &mut self,
        id: PortId,
        queue: u16,
        worker: usize,
        late: Option<usize>,
        between: &mut dyn FnMut(&mut Bed, usize),
    ) -> Result<usize, MigrationError> {
        let owners = std::mem::take(&mut self.owners);
        let workers = self.workers.len();
        let mut steps = Steps { bed: self, between, step: 0, late, waiting: Vec::new() };
        let migrated = migrate(&mut steps, &owners, id, queue, worker, workers);
        let waiting = steps.waiting;
        self.owners = owners;
        for (worker, command) in waiting {
            self.execute(worker, command);
        }
        migrated
    }
}

#[cfg(test)]
impl Guide for Bed {
    fn owner(&self, port: PortId, queue: u16) -> usize {
        Bed::owner(self, port, queue)
    }

    fn enter(&mut self, worker: usize, frame: Arc<Imaginary>) -> Result<Option<Entry>, Late> {
        Ok(self.ask(worker, |reply| Command::WalkIn(frame, reply)))
    }

    fn leave(&mut self, worker: usize, leaving: Leaving) -> Result<Option<Exit>, Late> {
        Ok(self.ask(worker, |reply| Command::WalkOut(Box::new(leaving), reply)).flatten())
    }
}

/// The steps of a migration on a bed.
struct Steps<'b> {
    bed: &'b mut Bed,
    between: &'b mut dyn FnMut(&mut Bed, usize),
    step: usize,
    /// The step in which a worker is late.
    late: Option<usize>,
    /// What it has not carried out yet.
    waiting: Vec<(usize, Command<HeapQueues>)>,
}

impl Steps<'_> {
    /// The next step, which is a command to a worker; false if that is late.
    fn next(&mut self, worker: usize) -> bool {
        (self.between)(self.bed, self.step);
        let late = self.late == Some(self.step) || self.waiting.iter().any(|(late, _)| *late == worker);
        self.step += 1;
        !late
    }

    fn ask<T>(
        &mut self,
        worker: usize,
        command: impl FnOnce(SyncSender<T>) -> Command<HeapQueues>,
    ) -> Result<Option<T>, Late> {
        if self.next(worker) {
            return Ok(self.bed.ask(worker, command));
        }
        // Nobody waits for the answer any more.
        self.waiting.push((worker, command(sync_channel(0).0)));
        Err(Late { worker })
    }

    fn send(&mut self, worker: usize, command: Command<HeapQueues>) {
        if self.next(worker) {
            self.bed.execute(worker, command);
        } else {
            self.waiting.push((worker, command));
        }
    }
}

impl MigrationSteps for Steps<'_> {
    type Detached = ();

    fn park(&mut self, worker: usize, id: PortId, queue: u16) -> Result<(), Late> {
        self.ask(worker, |reply| Command::Park(id, queue, reply)).map(drop)
    }

    fn unpark(&mut self, worker: usize, id: PortId) {
        self.send(worker, Command::Unpark(id));
    }

    fn settle(&mut self) -> Result<(), Late> {
        (0..self.bed.workers.len()).try_for_each(|worker| self.ask(worker, Command::Settle).map(drop))
    }

    fn detach(&mut self, worker: usize, id: PortId, queue: u16) -> Result<Option<()>, Late> {
        self.ask(worker, |reply| Command::Detach(id, queue, reply))
    }

    fn attach(&mut self, worker: usize, id: PortId, queue: u16, (): ()) {
        self.send(worker, Command::Attach(id, queue, Box::new(())));
    }
}
