//! How several threads send into one queue: three ways, behind one interface.
//!
//! | [`Entry`] | who maps and rings | good for |
//! |---|---|---|
//! | [`InlineLock`](Entry::InlineLock) | whoever sends, one after the other | few senders, least delay |
//! | [`SharedRing`](Entry::SharedRing) | one of the senders, for all that come meanwhile | many senders in bursts |
//! | [`HandOff`](Entry::HandOff) | the worker of the queue | senders that must not wait |
//!
//! Published measurements of forwarding have each of the three win somewhere, by tens of percents, depending on how
//! flows spread over queues: so it is a setting.
//!
//! Whatever the entry, packets of one sender stay in order, and every packet is sent, returned, or dropped and
//! counted. Packets that are accepted are the port's.

mod turn;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crossbeam_queue::ArrayQueue;
use ringferry_packet::buffer::{Chain, Pools};

use super::queue::{SendError, TxQueue, Unsent};
use crate::driver::TxDriver;
use crate::map::MapError;
use turn::{Left, Turn};

/// How several threads send into one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Entry {
    /// Each takes the lock, sends and rings.
    #[default]
    InlineLock,
    /// Each leaves its packets in a shared ring; who finds nobody serving it serves all that come.
    SharedRing,
    /// Each leaves its packets in a shared ring, which the worker of the queue [polls](TxPort::poll).
    HandOff,
}

/// What a call leaves to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Progress {
    /// The device wants its doorbell rung.
    pub doorbell: bool,
    /// Packets wait that nobody serves: the worker of the queue is to [poll](TxPort::poll) it. Where it was polling
    /// that says so, the ring is full, or its turn was long enough: again once the device has completed something, or
    /// later.
    pub wake: bool,
}

/// A transmit queue for several threads.
#[derive(Debug)]
pub struct TxPort<D> {
    entry: Entry,
    waiting: ArrayQueue<Chain>,
    turn: Turn,
    inner: Mutex<Inner<D>>,
    full: AtomicU64,
}

#[derive(Debug)]
struct Inner<D> {
    queue: TxQueue<D>,
    /// The first packet that waits, if the ring had no room for it.
    held: Option<Chain>,
}

impl<D: TxDriver> TxPort<D> {
    /// Lets several threads send into a queue, in the way it was [configured](super::TxConfig::entry) for.
    pub fn new(queue: TxQueue<D>) -> Self {
        let config = queue.config();
        Self {
            entry: config.entry,
            waiting: ArrayQueue::new(config.waiting.get().into()),
            turn: Turn::default(),
            inner: Mutex::new(Inner { queue, held: None }),
            full: AtomicU64::new(0),
        }
    }

    /// How packets enter.
    pub fn entry(&self) -> Entry {
        self.entry
    }

    /// Packets that came back because the waiting room was full. Those that came back because the ring was are in
    /// [`MapCounters::retries`](crate::map::MapCounters::retries).
    pub fn full(&self) -> u64 {
        self.full.load(Ordering::Relaxed)
    }

    /// Does something to the queue, which nobody else uses meanwhile.
    pub fn with<T>(&self, f: impl FnOnce(&mut TxQueue<D>) -> T) -> T {
        f(&mut self.lock().queue)
    }

    fn lock(&self) -> MutexGuard<'_, Inner<D>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a packet, with the caller's pools where it is the caller who maps. Returns what is left to be done, and
    /// the packet if it did not go: it may be [retried](SendError::is_retryable) after the worker of the queue was
    /// woken.
    pub fn send(&self, chain: Chain, pools: &mut Pools) -> (Progress, Option<Unsent>) {
        let mut one = Some(chain);
        self.offer(&mut || one.take(), pools)
    }

    /// Sends packets from the front of `burst`, until all are sent or there is no room; the others stay. Those that
    /// can never be sent are dropped and counted by the queue.
    pub fn send_burst(&self, burst: &mut VecDeque<Chain>, pools: &mut Pools) -> Progress {
        let mut all = Progress::default();
        loop {
            let (progress, unsent) = self.offer(&mut || burst.pop_front(), pools);
            all.doorbell |= progress.doorbell;
            all.wake |= progress.wake;
            match unsent {
                Some(unsent) if unsent.reason.is_retryable() => burst.push_front(unsent.chain),
                Some(unsent) => {
                    self.with(|queue| queue.give_up(unsent, pools));
                    continue;
                }
                None => {}
            }
            return all;
        }
    }

    /// Sends what `next` yields, up to the first that does not go.
    fn offer(
        &self,
        next: &mut dyn FnMut() -> Option<Chain>,
        pools: &mut Pools,
    ) -> (Progress, Option<Unsent>) {
        if self.entry == Entry::InlineLock {
            let mut inner = self.lock();
            let (mut doorbell, mut unsent) = (false, None);
            while let Some(chain) = next() {
                inner.queue.make_room(1, pools);
                if let Err(error) = inner.queue.send_or_reclaim(chain, pools) {
                    unsent = Some(error);
                    break;
                }
                doorbell |= inner.queue.due();
            }
            doorbell |= inner.queue.flush();
            return (Progress { doorbell, wake: false }, unsent);
        }
        let (mut packets, mut unsent) = (0, None);
        while let Some(chain) = next() {
            if let Err(chain) = self.waiting.push(chain) {
                self.full.fetch_add(1, Ordering::Relaxed);
                unsent = Some(Unsent { reason: MapError::RingFull.into(), chain });
                break;
            }
            packets += 1;
        }
        let served = match (self.entry, packets) {
            (Entry::HandOff, 0) => return (Progress::default(), unsent),
            (Entry::HandOff, _) => {
                let wake = self.turn.announce(packets);
                return (Progress { doorbell: false, wake }, unsent);
            }
            // There was no room, but perhaps nobody serves.
            (_, 0) => self.turn.take(),
            (..) => self.turn.join(packets),
        };
        (if served { self.serve(pools) } else { Progress::default() }, unsent)
    }

    /// What the worker of the queue does: reclaims, and serves packets that wait.
    pub fn poll(&self, pools: &mut Pools) -> Progress {
        let doorbell = self.with(|queue| queue.before_idle(pools));
        let served = if self.turn.take() { self.serve(pools) } else { Progress::default() };
        Progress { doorbell: doorbell | served.doorbell, ..served }
    }

    /// Sends what waits and what comes meanwhile, until nothing is left, the ring is full, or as many were
    /// sent as can wait: nobody serves for the others for ever.
    fn serve(&self, pools: &mut Pools) -> Progress {
        let mut inner = self.lock();
        let Inner { queue, held } = &mut *inner;
        let mut doorbell = false;
        let mut budget = self.waiting.capacity();
        loop {
            let waiting = self.turn.waiting().min(budget);
            let mut served = 0;
            while served < waiting {
                let Some(chain) = held.take().or_else(|| self.waiting.pop()) else { break };
                queue.make_room(1, pools);
                match queue.send_or_reclaim(chain, pools) {
                    Ok(()) => doorbell |= queue.due(),
                    Err(Unsent { reason: SendError::Map(MapError::RingFull), chain }) => {
                        *held = Some(chain);
                        break;
                    }
                    // Whoever sent it has gone on; waiting for buffers would hold up all the others.
                    Err(unsent) => queue.give_up(unsent, pools),
                }
                served += 1;
            }
            doorbell |= queue.flush();
            budget -= served;
            match self.turn.leave(served, served < waiting || budget == 0) {
                Left::More => {}
                left => return Progress { doorbell, wake: left == Left::Behind },
            }
        }
    }

    /// Takes the port apart: the queue, and the packets that wait in front of it, in order.
    pub fn into_parts(self) -> (TxQueue<D>, Vec<Chain>) {
        let Inner { queue, held } = self.inner.into_inner().unwrap_or_else(PoisonError::into_inner);
        (queue, held.into_iter().chain(self.waiting).collect())
    }
}
