//! How a queue pair goes from one worker to another while packets flow: nothing is lost, and no flow's packets change places.
//!
//! The control plane leads. Each step is a command that a worker carries out between two bursts, and answers:
//!
//! 1. The new owner is told to expect the pair: frames for it that come early are kept.
//! 2. The port's owners are changed. Whoever begins a burst from now on sends frames for the pair to the new owner.
//! 3. Every worker settles: it delivers what others have handed to it. After that nobody hands frames for the pair to the old owner.
//! 4. The old owner settles once more, so that what was handed to it is in the pair's receiveq, and lets the pair go.
//! 5. Every worker settles: what the old owner has forwarded of the pair's own packets is delivered before what the new one will.
//! 6. The new owner is given the pair. Frames that it has kept come first.
//!
//! A flow that the guest itself never sends has no pair of its own: it goes to one that is near its worker, which may be another one
//! after a move, as after a change of the number of pairs.
//!
//! Meanwhile the guest's packets wait in their ring, for as long as the workers take to wake up four times. A tap's queue, which
//! all write to and one reads, changes readers in the same way, without the first three steps.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringferry_xen_net::netback::Multicast;

use super::command::{Command, Plane};
use super::guest::Rings;
use super::shared::{PAIRS, PortShared};
use super::vif::VifQueue;
use crate::fdb::PortId;

/// What one worker lets go of and another is given.
pub(super) enum Moving {
    /// The rings of a virtual machine's pair, if they run.
    Rings(Rings),
    /// A queue of a Xen guest, if it runs, and the multicast filter of its interface.
    Vif(Option<(VifQueue, Multicast)>),
    /// The right to read a tap.
    Tap,
}

/// Who serves what, of every port.
#[derive(Debug, Default)]
pub(super) struct Owners(Mutex<BTreeMap<PortId, Served>>);

/// A port's.
#[derive(Clone, Debug)]
enum Served {
    /// The pairs of a machine.
    Pairs(Arc<PortShared>),
    /// The queues of a tap, and who reads the only one; several are read by one worker each.
    Tap { queues: u16, reader: usize },
}

/// Why a queue cannot be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotMoved {
    /// There are fewer workers.
    #[error("there is no worker {worker}: the switch has {workers}, from 0 on (--workers, [switch] workers)")]
    Worker {
        /// The one that was asked for.
        worker: usize,
        /// How many there are.
        workers: usize,
    },
    /// There are fewer queues.
    #[error("the port has no queue {queue}: there are {queues}, from 0 on")]
    Queue {
        /// The one that was asked for.
        queue: u16,
        /// How many there are.
        queues: u16,
    },
    /// Each queue of the tap is a worker's own.
    #[error("each of the tap's {0} queues is with a worker of its own, and stays there")]
    TapQueues(u16),
    /// No such port.
    #[error("no worker serves the port")]
    Port,
}

impl Owners {
    fn all(&self) -> MutexGuard<'_, BTreeMap<PortId, Served>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first pair of a machine is with worker `first` for a start, and those after it with the next in turn.
    pub(super) fn add_pairs(&self, port: PortId, shared: &Arc<PortShared>, first: usize, workers: usize) {
        (0..PAIRS).for_each(|pair| shared.set_owner(pair, (first + usize::from(pair)) % workers));
        self.all().insert(port, Served::Pairs(Arc::clone(shared)));
    }

    /// Queue `q` of a tap is with worker `q`, a single one with `reader`.
    pub(super) fn add_tap(&self, port: PortId, queues: usize, reader: usize) {
        let queues = queues as u16;
        self.all().insert(port, Served::Tap { queues, reader });
    }

    pub(super) fn remove(&self, port: PortId) {
        self.all().remove(&port);
    }

    /// Queues that a port has at most.
    fn queues(&self, port: PortId) -> u16 {
        match self.all().get(&port) {
            Some(Served::Pairs(_)) => PAIRS,
            Some(Served::Tap { queues, .. }) => *queues,
            None => 0,
        }
    }

    /// The worker that a queue is with; the first, if there is no such queue.
    pub(super) fn of(&self, port: PortId, queue: u16) -> usize {
        match self.all().get(&port) {
            Some(Served::Pairs(shared)) => shared.owner(queue),
            Some(Served::Tap { queues: 1, reader }) => *reader,
            Some(Served::Tap { .. }) => queue.into(),
            None => 0,
        }
    }
}

impl Plane {
    /// Moves queue pair `queue` of a port, or the queue of a tap, to another worker: see the head of `moving.rs`. Returns whose it was.
    ///
    /// # Errors
    /// See [`NotMoved`]; nothing has changed.
    pub fn assign(&self, port: PortId, queue: u16, worker: usize) -> Result<usize, NotMoved> {
        let workers = self.workers.len();
        let new = self.workers.get(worker).ok_or(NotMoved::Worker { worker, workers })?;
        let served = self.owners.all().get(&port).cloned().ok_or(NotMoved::Port)?;
        let queues = self.owners.queues(port);
        if queue >= queues {
            return Err(NotMoved::Queue { queue, queues });
        }
        let before = self.owners.of(port, queue);
        if before == worker {
            return Ok(before);
        }
        let settle = || {
            for worker in &self.workers {
                worker.ask(Command::Settle);
            }
        };
        match served {
            Served::Pairs(shared) => {
                new.ask(|reply| Command::Expect(port, queue, reply));
                shared.set_owner(queue, worker);
                settle();
            }
            Served::Tap { queues: 1, .. } => {
                self.owners.all().insert(port, Served::Tap { queues: 1, reader: worker });
            }
            Served::Tap { queues, .. } => return Err(NotMoved::TapQueues(queues)),
        }
        let moving = self.workers[before].ask(|reply| Command::Take(port, queue, reply));
        settle();
        if let Some(moving) = moving {
            new.send(Command::Give(port, queue, Box::new(moving)));
        }
        Ok(before)
    }
}
