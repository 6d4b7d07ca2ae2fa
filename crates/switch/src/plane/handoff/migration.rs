//! Migration of a queue from one worker to another while packets flow. No packet is lost, and no flow is reordered.
//!
//! The control plane leads ([`Workers::assign`]). Each step is a command that a worker carries out between two bursts, and answers:
//!
//! ```text
//!   control plane              old owner            new owner            every worker
//!   1  park            ──────────────────────────►  parks frames for it
//!   2  set owner        (bursts that begin from now on send frames for the queue to the new owner)
//!   3  settle          ─────────────────────────────────────────────────►  delivers what others have handed to it
//!   4  detach          ─────►  settles, lets go
//!   5  settle          ─────────────────────────────────────────────────►  delivers what the old owner has forwarded
//!   6  attach          ──────────────────────────►  delivers the parked frames, then serves it
//! ```
//!
//! If a worker does not answer one of the first four steps in time, the queue stays with its old owner: the owner is set back, the new one hands on
//! what it has parked, and an old owner that lets go too late takes the queue back, as nobody takes it over.
//!
//! After step 3 nobody hands frames for the queue to the old owner, so that step 4 leaves none behind; after step 5 what the old owner has
//! forwarded of the queue's own packets is delivered before what the new one will forward.
//!
//! A flow that the guest itself never sends has no pair of its own: it goes to one that is near its worker, which may be another one
//! after a migration, as after a change of the number of pairs.
//!
//! Meanwhile the guest's packets wait in their ring, for as long as the workers take to wake up four times. A tap's queue, which
//! all write to and one reads, changes readers in the same way, without the first three steps.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::fdb::PortId;
use crate::plane::handoff::primitives::Word;
use crate::plane::handoff::shared::{PAIRS, PortShared};
use crate::plane::port::Steering;
use crate::plane::queues::Queues;
use crate::plane::worker::Workers;
use crate::plane::worker::command::Command;
use crate::plane::worker::handles::{Late, Owners};

/// The worker of each queue of each port, as the control plane knows it.
#[derive(Debug, Default)]
pub(crate) struct QueueOwners(Mutex<BTreeMap<PortId, Owned>>);

/// The owners of one port's queues.
#[derive(Clone, Debug)]
enum Owned {
    /// The owners of queue pairs, in the words that all workers read.
    Pairs(Arc<PortShared>),
    /// Queues read without hand-off: one that the worker `reader` reads, or several that are read by one
    /// worker each.
    Local { queues: u16, reader: usize },
}

/// The error of a queue that cannot migrate; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MigrationError {
    /// The worker does not exist.
    #[error("there is no worker {worker}: the switch has {workers}, from 0 on (--workers, [switch] workers)")]
    Worker {
        /// The worker that was asked for.
        worker: usize,
        /// The number of workers.
        workers: usize,
    },
    /// The queue does not exist.
    #[error("the port has no queue {queue}: there are {queues}, from 0 on")]
    Queue {
        /// The queue that was asked for.
        queue: u16,
        /// The number of the port's queues.
        queues: u16,
    },
    /// Each of these queues of a tap belongs to one worker for good.
    #[error("each of the tap's {0} queues is with a worker of its own, and stays there")]
    TapQueues(u16),
    /// There is no port of this id.
    #[error("no worker serves the port")]
    Port,
    /// A worker did not answer in time.
    #[error("{0}: try again later")]
    Late(#[from] Late),
}

impl QueueOwners {
    fn all(&self) -> MutexGuard<'_, BTreeMap<PortId, Owned>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the owners of a new port.
    pub(crate) fn add(
        &self,
        port: PortId,
        steering: &Steering,
        owners: &Owners,
        queues: u16,
        workers: usize,
    ) {
        let owned = match steering {
            Steering::Pairs(shared) => {
                (0..PAIRS).for_each(|pair| shared.set_owner(pair, owners.of(pair, workers)));
                Owned::Pairs(Arc::clone(shared))
            }
            Steering::Local(_) => Owned::Local { queues, reader: owners.of(0, workers) },
        };
        self.all().insert(port, owned);
    }

    pub(crate) fn remove(&self, port: PortId) {
        self.all().remove(&port);
    }

    /// Returns the upper bound on the queues of a port.
    fn queues(&self, port: PortId) -> u16 {
        match self.all().get(&port) {
            Some(Owned::Pairs(_)) => PAIRS,
            Some(Owned::Local { queues, .. }) => *queues,
            None => 0,
        }
    }

    /// Returns the worker that has a queue; the first worker, if there is no such queue.
    pub(crate) fn of(&self, port: PortId, queue: u16) -> usize {
        match self.all().get(&port) {
            Some(Owned::Pairs(shared)) => shared.owner(queue),
            Some(Owned::Local { queues: 1, reader }) => *reader,
            Some(Owned::Local { .. }) => queue.into(),
            None => 0,
        }
    }
}

/// The commands to workers that a migration consists of. Every method but [`unpark`](Self::unpark) returns
/// when the command has been carried out.
pub(crate) trait MigrationSteps {
    /// A queue on its way from one worker to another.
    type Detached;

    /// Has `worker` park frames for the queue.
    fn park(&mut self, worker: usize, port: PortId, queue: u16) -> Result<(), Late>;

    /// Has `worker` hand on the frames that it has parked, and park no more. Does not wait.
    fn unpark(&mut self, worker: usize, port: PortId);

    /// Has every worker deliver the frames that others have handed off to it.
    fn settle(&mut self) -> Result<(), Late>;

    /// Has `worker` settle and give up the queue; `None` if it does not have it. If it is late, it takes the
    /// queue back.
    fn detach(&mut self, worker: usize, port: PortId, queue: u16) -> Result<Option<Self::Detached>, Late>;

    /// Has `worker` serve the queue, and deliver the parked frames first.
    fn attach(&mut self, worker: usize, port: PortId, queue: u16, detached: Self::Detached);
}

/// Migrates a queue of a port to another of `workers` workers: see the head of this file. Returns its old
/// owner.
///
/// # Errors
/// See [`MigrationError`]; nothing has changed.
pub(crate) fn migrate<S: MigrationSteps>(
    steps: &mut S,
    owners: &QueueOwners,
    port: PortId,
    queue: u16,
    worker: usize,
    workers: usize,
) -> Result<usize, MigrationError> {
    if worker >= workers {
        return Err(MigrationError::Worker { worker, workers });
    }
    let owned = owners.all().get(&port).cloned().ok_or(MigrationError::Port)?;
    let queues = owners.queues(port);
    if queue >= queues {
        return Err(MigrationError::Queue { queue, queues });
    }
    let before = owners.of(port, queue);
    if before == worker {
        return Ok(before);
    }
    match &owned {
        Owned::Pairs(shared) => migrate_pair(steps, shared, port, queue, worker)?,
        Owned::Local { queues: 1, .. } => {
            owners.all().insert(port, Owned::Local { queues: 1, reader: worker });
            let detached = steps.detach(before, port, queue);
            if detached.is_err() {
                owners.all().insert(port, Owned::Local { queues: 1, reader: before });
            }
            hand_over(steps, port, queue, worker, detached?);
        }
        Owned::Local { queues, .. } => return Err(MigrationError::TapQueues(*queues)),
    }
    Ok(before)
}

/// Runs all steps for the queue of a pair. If a worker is late before the queue has been given up, nothing
/// has changed.
pub(crate) fn migrate_pair<S: MigrationSteps, W: Word>(
    steps: &mut S,
    shared: &PortShared<W>,
    port: PortId,
    queue: u16,
    worker: usize,
) -> Result<(), Late> {
    let before = shared.owner(queue);
    let detached = detach_pair(steps, shared, port, queue, before, worker);
    if detached.is_err() {
        shared.set_owner(queue, before);
        steps.unpark(worker, port);
    }
    hand_over(steps, port, queue, worker, detached?);
    Ok(())
}

/// Runs the steps after the old owner has given up the queue. If a worker is late from here on, packets may
/// overtake others, but none is lost.
fn hand_over<S: MigrationSteps>(
    steps: &mut S,
    port: PortId,
    queue: u16,
    worker: usize,
    detached: Option<S::Detached>,
) {
    let _ = steps.settle();
    if let Some(detached) = detached {
        steps.attach(worker, port, queue, detached);
    }
}

/// Runs the steps until the old owner gives up the queue, which is a pair's.
fn detach_pair<S: MigrationSteps, W: Word>(
    steps: &mut S,
    shared: &PortShared<W>,
    port: PortId,
    queue: u16,
    before: usize,
    worker: usize,
) -> Result<Option<S::Detached>, Late> {
    steps.park(worker, port, queue)?;
    shared.set_owner(queue, worker);
    steps.settle()?;
    steps.detach(before, port, queue)
}

impl<P: Queues> MigrationSteps for &Workers<P> {
    type Detached = P::Detached;

    fn park(&mut self, worker: usize, port: PortId, queue: u16) -> Result<(), Late> {
        self.workers[worker].ask(|reply| Command::Park(port, queue, reply)).map(drop)
    }

    fn unpark(&mut self, worker: usize, port: PortId) {
        self.workers[worker].send(Command::Unpark(port));
    }

    fn settle(&mut self) -> Result<(), Late> {
        self.workers.iter().try_for_each(|worker| worker.ask(Command::Settle).map(drop))
    }

    fn detach(&mut self, worker: usize, port: PortId, queue: u16) -> Result<Option<P::Detached>, Late> {
        self.workers[worker].ask_in_person(|reply| Command::Detach(port, queue, reply))
    }

    fn attach(&mut self, worker: usize, port: PortId, queue: u16, detached: P::Detached) {
        self.workers[worker].send(Command::Attach(port, queue, Box::new(detached)));
    }
}

impl<P: Queues> Workers<P> {
    /// Migrates a queue of a port to another worker: see the head of `migration.rs`. Returns its old owner.
    ///
    /// # Errors
    /// See [`MigrationError`]; nothing has changed.
    pub fn assign(&self, port: PortId, queue: u16, worker: usize) -> Result<usize, MigrationError> {
        let mut steps = self;
        migrate(&mut steps, &self.owners, port, queue, worker, self.workers.len())
    }
}
