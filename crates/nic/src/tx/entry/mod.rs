//! A transmit queue that several threads share, entered in one of three ways.
//!
//! The owner of a [`TxQueue`] wraps it in a [`TxPort`] when queues are set up, and takes it apart again with
//! [`TxPort::into_parts`] at the end. Between the two any thread calls [`TxPort::send`] or
//! [`TxPort::send_burst`], and the worker of the queue calls [`TxPort::poll`] when it is woken and before it
//! sleeps. [`Entry`] chooses the thread that maps packets and rings the doorbell:
//!
//! | [`Entry`] | thread that maps and rings | good for |
//! |---|---|---|
//! | [`InlineLock`](Entry::InlineLock) | each sender, under a mutex | few senders, least delay |
//! | [`SharedRing`](Entry::SharedRing) | one sender, for all packets that arrive meanwhile | many senders in bursts |
//! | [`HandOff`](Entry::HandOff) | the worker of the queue | senders that must not wait |
//!
//! The last two use a multi-producer ring with a drain lock, like the `mp_ring` of FreeBSD's iflib. In
//! published measurements of forwarding each of the three wins somewhere, by tens of percents, depending on
//! how flows spread over queues; therefore it is a setting.
//!
//! With every entry the packets of one sender stay in order, and each packet is either sent, returned to the
//! caller, or dropped and counted. The port owns the packets that it has accepted.

mod drain;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crossbeam_queue::ArrayQueue;
use ringferry_packet::buffer::{Chain, Pools};

use super::queue::{SendError, TxQueue, Unsent};
use crate::driver::TxDriver;
use crate::map::MapError;
use drain::{DrainLock, Release};

/// The way in which several threads send into one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Entry {
    /// Each thread takes a mutex, sends its packets and rings the doorbell.
    #[default]
    InlineLock,
    /// Each thread pushes its packets to a shared ring. The thread that takes the free drain lock sends
    /// them, and those that other threads push meanwhile.
    SharedRing,
    /// Each thread pushes its packets to a shared ring, which the worker of the queue
    /// [polls](TxPort::poll).
    HandOff,
}

/// Actions that a call leaves to its caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Progress {
    /// The device wants its doorbell rung.
    pub doorbell: bool,
    /// Packets are queued that no thread drains: the worker of the queue must [poll](TxPort::poll) it. If
    /// [`TxPort::poll`] itself returns this, the transmit ring is full or the poll has used up its budget;
    /// it must be called again when the device has completed packets, or later.
    pub wake: bool,
}

/// A transmit queue for several threads; see the [module](self).
#[derive(Debug)]
pub struct TxPort<D> {
    entry: Entry,
    waiting: ArrayQueue<Chain>,
    drain_lock: DrainLock,
    inner: Mutex<Inner<D>>,
    full: AtomicU64,
}

#[derive(Debug)]
struct Inner<D> {
    queue: TxQueue<D>,
    /// The packet at the front, if it was popped and the transmit ring had no room for it.
    held: Option<Chain>,
}

impl<D: TxDriver> TxPort<D> {
    /// Wraps `queue`, to be entered in the way that it was [configured](super::TxConfig::entry) for.
    pub fn new(queue: TxQueue<D>) -> Self {
        let config = queue.config();
        Self {
            entry: config.entry,
            waiting: ArrayQueue::new(config.waiting.get().into()),
            drain_lock: DrainLock::default(),
            inner: Mutex::new(Inner { queue, held: None }),
            full: AtomicU64::new(0),
        }
    }

    /// Returns the way in which packets enter the queue.
    pub fn entry(&self) -> Entry {
        self.entry
    }

    /// Returns how often a packet was returned because the shared ring in front of the queue was full.
    /// Packets returned because the transmit ring was full are in
    /// [`MapCounters::retries`](crate::map::MapCounters::retries).
    pub fn full(&self) -> u64 {
        self.full.load(Ordering::Relaxed)
    }

    /// Runs `f` on the queue under the mutex, so that no other thread uses it meanwhile.
    pub fn with<T>(&self, f: impl FnOnce(&mut TxQueue<D>) -> T) -> T {
        f(&mut self.lock().queue)
    }

    fn lock(&self) -> MutexGuard<'_, Inner<D>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends one packet. `pools` are the calling thread's; they are used if this call maps packets. Returns
    /// the actions left to the caller, and the packet if it was not accepted: it may be
    /// [retried](SendError::is_retryable) after the worker of the queue has been woken.
    pub fn send(&self, chain: Chain, pools: &mut Pools) -> (Progress, Option<Unsent>) {
        let mut one = Some(chain);
        self.offer(&mut || one.take(), pools)
    }

    /// Sends packets from the front of `burst` until all are sent or there is no room; the others stay in
    /// it. Packets that can never be sent are dropped and counted by the queue.
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

    /// Sends the packets that `next` yields, until one is not accepted; returns that one.
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
        let drained = match (self.entry, packets) {
            (Entry::HandOff, 0) => return (Progress::default(), unsent),
            (Entry::HandOff, _) => {
                let wake = self.drain_lock.add(packets);
                return (Progress { doorbell: false, wake }, unsent);
            }
            // The shared ring was full, but perhaps no thread drains it.
            (_, 0) => self.drain_lock.try_lock(),
            (..) => self.drain_lock.add_and_lock(packets),
        };
        (if drained { self.drain(pools) } else { Progress::default() }, unsent)
    }

    /// Reclaims completed packets and sends queued ones. The worker of the queue calls it when it is woken
    /// and before it sleeps.
    pub fn poll(&self, pools: &mut Pools) -> Progress {
        let doorbell = self.with(|queue| queue.before_idle(pools));
        let drained = if self.drain_lock.try_lock() { self.drain(pools) } else { Progress::default() };
        Progress { doorbell: doorbell | drained.doorbell, ..drained }
    }

    /// Sends queued packets, and those added meanwhile, until none is left or the transmit ring is full. The
    /// budget is the capacity of the shared ring; the drain lock is then abdicated, so that no sender drains
    /// for the others for ever. The caller holds the drain lock.
    fn drain(&self, pools: &mut Pools) -> Progress {
        let mut inner = self.lock();
        let Inner { queue, held } = &mut *inner;
        let mut doorbell = false;
        let mut budget = self.waiting.capacity();
        loop {
            let waiting = self.drain_lock.queued().min(budget);
            let mut drained = 0;
            while drained < waiting {
                let Some(chain) = held.take().or_else(|| self.waiting.pop()) else { break };
                queue.make_room(1, pools);
                match queue.send_or_reclaim(chain, pools) {
                    Ok(()) => doorbell |= queue.due(),
                    Err(Unsent { reason: SendError::Map(MapError::RingFull), chain }) => {
                        *held = Some(chain);
                        break;
                    }
                    // The sender has returned already, and waiting for buffers would delay all packets
                    // behind this one.
                    Err(unsent) => queue.give_up(unsent, pools),
                }
                drained += 1;
            }
            doorbell |= queue.flush();
            budget -= drained;
            match self.drain_lock.release(drained, drained < waiting || budget == 0) {
                Release::Busy => {}
                outcome => return Progress { doorbell, wake: outcome == Release::Stalled },
            }
        }
    }

    /// Takes the port apart and returns the queue and the packets that are queued in front of it, in order.
    pub fn into_parts(self) -> (TxQueue<D>, Vec<Chain>) {
        let Inner { queue, held } = self.inner.into_inner().unwrap_or_else(PoisonError::into_inner);
        (queue, held.into_iter().chain(self.waiting).collect())
    }
}
