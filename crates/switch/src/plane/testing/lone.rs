//! One worker without a thread, for queues of any kind.
//!
//! A test of a kind of port makes a [`Lone`] worker, plugs its queues in, and lets the worker make [rounds](Lone::round); time stands still.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{channel, sync_channel};

use ringferry_sys::epoll::{Epoll, Interest};
use ringferry_sys::eventfd::EventFd;

use crate::config::SwitchConfig;
use crate::counters::{PortTotals, WorkerCounters};
use crate::fdb::PortId;
use crate::plane::handoff::ring::{Doorbell, Handoff};
use crate::plane::now::Clock;
use crate::plane::worker::command::{Command, Inbox, NewPort};
use crate::plane::worker::fault::{FaultReporter, Faults};
use crate::plane::worker::{BELL, Worker};
use crate::plane::{PortHandle, PortShared, Queues, Steering};

/// A worker that nobody shares the switch with.
pub(crate) struct Lone<P: Queues> {
    worker: Worker<P>,
    ports: u16,
    faults: Faults,
}

impl<P: Queues> Lone<P> {
    /// A worker without ports.
    ///
    /// # Panics
    /// No descriptors are left.
    pub(crate) fn new(config: &SwitchConfig) -> Self {
        let clock: &'static AtomicU64 = Box::leak(Box::new(AtomicU64::new(0)));
        let bell = EventFd::new().expect("a descriptor");
        let doorbell = Arc::new(Doorbell::new(bell.try_clone().expect("a descriptor")));
        let handoff = Handoff::mesh(&[doorbell]).pop().expect("one for each worker");
        let epoll = Epoll::new().expect("a descriptor");
        epoll.add(&bell, BELL, Interest::READABLE).expect("a descriptor can be watched");
        let inbox = Inbox { commands: channel().1, bell };
        let counters = Arc::new(WorkerCounters::default());
        let worker = Worker::new(config, inbox, handoff, epoll, [1, 2], counters, Clock::Scripted(clock));
        Self { worker, ports: 0, faults: Faults::new().expect("a descriptor") }
    }

    /// Plugs in a port whose queues `make` makes, and starts these of them. Returns its number and its counters.
    pub(crate) fn add(
        &mut self,
        shared: &Arc<PortShared>,
        make: impl FnOnce(PortHandle, Arc<FaultReporter>) -> P,
        starts: impl IntoIterator<Item = P::Start>,
    ) -> (PortId, PortTotals) {
        let id = PortId(self.ports);
        self.ports += 1;
        let totals = PortTotals::new(1);
        let handle = PortHandle { id, name: "lone".into(), counters: totals.of(0) };
        let queues = make(handle.clone(), self.faults.reporter());
        let steering = Steering::Pairs(Arc::clone(shared));
        self.worker.execute(Command::AddPort(Box::new(NewPort { handle, queues, steering })));
        for start in starts {
            self.worker.execute(Command::Start(id, Box::new(start)));
        }
        (id, totals)
    }

    /// Has a port carry out a command of its kind.
    pub(crate) fn request(&mut self, id: PortId, request: P::Request) {
        self.worker.execute(Command::Request(id, request));
    }

    /// Stops one of a port's queues.
    pub(crate) fn stop(&mut self, id: PortId, index: u16) -> Option<P::Stopped> {
        let (stopped, answer) = sync_channel(1);
        self.worker.execute(Command::Stop(id, index, stopped));
        answer.try_recv().ok()
    }

    /// Unplugs a port.
    pub(crate) fn remove(&mut self, id: PortId) {
        self.worker.execute(Command::RemovePort(id, sync_channel(1).0));
    }

    /// Lets the worker poll every active source once; whether anything moved.
    pub(crate) fn round(&mut self) -> bool {
        self.worker.round()
    }
}
