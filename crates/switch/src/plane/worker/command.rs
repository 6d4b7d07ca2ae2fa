//! What the control plane asks a worker to do between two bursts.
//!
//! A command travels through a channel; an eventfd wakes a worker that sleeps. Commands that take something away from the worker (a
//! queue, a port) carry a reply channel: when the reply is there, the worker does not touch it any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender};

use ringferry_sys::eventfd::EventFd;

use crate::fdb::{FdbPage, Flush, PortId};
use crate::plane::capture::{CaptureId, Tap};
use crate::plane::forward::walk::{Entry, Exit, Imaginary, Leaving};
use crate::plane::policy::PortPolicy;
use crate::plane::port::Steering;
use crate::plane::queues::{PortHandle, Queues};
use crate::plane::wire::WireState;
use crate::plane::worker::handover::{Carried, Held};
use crate::rules::Rules;

/// One thing to do between two bursts.
pub(crate) enum Command<P: Queues> {
    /// Serve a port, whose queues come with [`Command::Start`].
    AddPort(Box<NewPort<P>>),
    /// Serve a port no more, and forget it.
    RemovePort(PortId, SyncSender<()>),
    /// Serve a queue of a port.
    Start(PortId, Box<P::Start>),
    /// Serve several queues of a port.
    StartAll(PortId, Vec<P::Start>),
    /// Forward what the port had sent on a queue before now, as that counts as accepted.
    Drain(PortId, u16),
    /// Let go of a queue, and say what remains of it.
    Stop(PortId, u16, SyncSender<P::Stopped>),
    /// Let go of several queues, and say what remains of those that were there.
    StopAll(PortId, Vec<u16>, SyncSender<Vec<(u16, P::Stopped)>>),
    /// Do with a port what only its kind can do.
    Request(PortId, P::Request),
    /// Deliver all that other workers have handed over, and say when.
    Settle(SyncSender<()>),
    /// Park frames for this queue of a port, which is migrating here.
    Park(PortId, u16, SyncSender<()>),
    /// Hand on the frames that were parked for a port, and park no more: its queue does not migrate after all.
    Unpark(PortId),
    /// Let go of a queue for another worker; keep it if nobody takes the reply.
    Detach(PortId, u16, SyncSender<P::Detached>),
    /// Serve a queue that another worker had.
    Attach(PortId, u16, Box<P::Detached>),
    /// See that a port's frames obey these rules from now on; the policy is compiled from them.
    SetRules(PortId, Arc<Rules>, Option<Arc<PortPolicy>>),
    /// Forget the addresses learned behind a port: its guest has gone.
    Forget(PortId),
    /// Capture frames of a port.
    Capture(PortId, Box<Tap>),
    /// Capture nothing more for this client.
    EndCapture(CaptureId),
    /// Let frames pass a port, or none.
    SetLink(PortId, bool),
    /// Forward a frame as if it had come from a port.
    Inject(PortId, Vec<u8>),
    /// Say what would become of a frame where it comes in.
    WalkIn(Arc<Imaginary>, SyncSender<Entry>),
    /// Say what would become of it where it leaves.
    WalkOut(Box<Leaving>, SyncSender<Option<Exit>>),
    /// Say the state of every queue, or of those of some ports.
    Inspect(Option<Arc<[PortId]>>, SyncSender<Vec<(PortId, P::State)>>),
    /// Say the part of the forwarding database that begins at this bucket.
    Addresses(usize, SyncSender<FdbPage>),
    /// Forget learned addresses in the part of the forwarding database that begins at this bucket; say how many, and where the next part begins.
    Flush(usize, Flush, SyncSender<(usize, Option<usize>)>),
    /// Say what waits at the ends of wires.
    Wires(SyncSender<Vec<(PortId, WireState)>>),
    /// Say whether nothing of a port waits here: neither what it has sent nor what is queued for it.
    IsQuiet(PortId, SyncSender<bool>),
    /// Say that the commands before this one have been carried out.
    Probe(SyncSender<()>),
    /// Finish what was taken from queues, take nothing more, and say when.
    Pause(SyncSender<()>),
    /// Take from queues again.
    Unpause,
    /// Say what is nowhere else, of the addresses those of the last seconds.
    HandOver(u32, SyncSender<Held>),
    /// Begin where the worker of another process stood.
    Carry(Box<Carried>),
    /// Be busy until the test says otherwise.
    #[cfg(test)]
    Hold(Receiver<()>),
    /// End the thread.
    End,
}

/// A port that a worker is to serve.
pub(crate) struct NewPort<P> {
    pub(crate) handle: PortHandle,
    pub(crate) queues: P,
    pub(crate) steering: Steering,
}

/// A command on its way to a worker.
pub(crate) struct Posted<P: Queues> {
    pub(crate) command: Command<P>,
    /// Counts it until the worker has carried it out.
    pub(crate) place: Option<Place>,
}

/// Most commands of a port that no worker has carried out yet, other than those that the control plane waits for. A front end that
/// starts all rings of a port causes half as many, and more than that only by not waiting for anybody.
pub(crate) const MOST_POSTED: usize = 64;

/// How many commands of a port wait.
#[derive(Debug, Default)]
pub(crate) struct PortQueue {
    waiting: AtomicUsize,
    /// The last command that asked for a place was refused. It is reset when one gets a place, so that each time the queue fills is reported once.
    full: AtomicBool,
}

/// The place of one command among those of its port that wait; given back when dropped.
pub(crate) struct Place(Arc<PortQueue>);

/// A port has [`MOST_POSTED`] commands waiting.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full {
    /// Whether this is the first refusal since a command got a place.
    pub(crate) news: bool,
}

impl PortQueue {
    /// A place for one more command.
    ///
    /// # Errors
    /// See [`Full`].
    pub(crate) fn place(self: &Arc<Self>) -> Result<Place, Full> {
        if self.waiting.load(Ordering::Relaxed) >= MOST_POSTED {
            return Err(Full { news: !self.full.swap(true, Ordering::Relaxed) });
        }
        // Only the control plane's thread adds.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.full.store(false, Ordering::Relaxed);
        Ok(Place(Arc::clone(self)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The worker's end of the channel.
pub(crate) struct Inbox<P: Queues> {
    pub(crate) commands: Receiver<Posted<P>>,
    /// Readable when there are commands, or frames from other workers for one that sleeps.
    pub(crate) bell: EventFd,
}
