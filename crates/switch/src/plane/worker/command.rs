//! What the control plane asks a worker to do between two bursts.
//!
//! A command travels through a channel; an eventfd wakes a worker that sleeps. Commands that take something away from the worker (a
//! queue, a port) carry a reply channel: when the reply is there, the worker does not touch it any more.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use ringferry_sys::eventfd::EventFd;

use crate::fdb::{FdbPage, PortId};
use crate::plane::policy::PortPolicy;
use crate::plane::port::Steering;
use crate::plane::queues::{PortHandle, Queues};
use crate::rules::Rules;

/// One thing to do between two bursts.
pub(crate) enum Command<P: Queues> {
    /// Serve a port, whose queues come with [`Command::Start`].
    AddPort(Box<NewPort<P>>),
    /// Serve a port no more, and forget it.
    RemovePort(PortId, SyncSender<()>),
    /// Serve a queue of a port.
    Start(PortId, Box<P::Start>),
    /// Forward what the port had sent on a queue before now, as that counts as accepted.
    Drain(PortId, u16),
    /// Let go of a queue, and say what remains of it.
    Stop(PortId, u16, SyncSender<P::Stopped>),
    /// Do with a port what only its kind can do.
    Request(PortId, P::Request),
    /// Deliver all that other workers have handed over, and say when.
    Settle(SyncSender<()>),
    /// Park frames for this queue of a port, which is migrating here.
    Park(PortId, u16, SyncSender<()>),
    /// Let go of a queue for another worker.
    Detach(PortId, u16, SyncSender<P::Detached>),
    /// Serve a queue that another worker had.
    Attach(PortId, u16, Box<P::Detached>),
    /// See that a port's frames obey these rules from now on; the policy is compiled from them.
    SetRules(PortId, Arc<Rules>, Option<Arc<PortPolicy>>),
    /// Forget the addresses learned behind a port: its guest has gone.
    Forget(PortId),
    /// Forward a frame as if it had come from a port.
    Inject(PortId, Vec<u8>),
    /// Say the state of every queue.
    Inspect(SyncSender<Vec<(PortId, P::State)>>),
    /// Say the part of the forwarding database that begins at this bucket.
    Addresses(usize, SyncSender<FdbPage>),
    /// End the thread.
    End,
}

/// A port that a worker is to serve.
pub(crate) struct NewPort<P> {
    pub(crate) handle: PortHandle,
    pub(crate) queues: P,
    pub(crate) steering: Steering,
}

/// The worker's end of the channel.
pub(crate) struct Inbox<P: Queues> {
    pub(crate) commands: Receiver<Command<P>>,
    /// Readable when there are commands, or frames from other workers for one that sleeps.
    pub(crate) bell: EventFd,
}
