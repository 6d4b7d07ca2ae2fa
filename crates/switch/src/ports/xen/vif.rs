//! One interface: a port of the switch for as long as the toolstack wants it, with queues while a front end
//! is connected.

use std::sync::Arc;

use ringferry_memory::{Area, Region};
use ringferry_packet::ether::Mac;
use ringferry_sys::epoll::Interest;
use ringferry_xen::domain::PAGE;
use ringferry_xen::event::EventChannel;
use ringferry_xen::netif::LayoutError;
use ringferry_xen::netif::control::{GrefEntry, Status};
use ringferry_xen_net::events::Events;
use ringferry_xen_net::netback::{Control, Mode, PageCounters, Queue, QueueConfig, QueueError, StaticGrants};
use ringferry_xen_net::xenbus::backend_device::MappedControl;
use ringferry_xen_net::xenbus::{Connection, FrontFeatures, MappedQueue};

use super::entry::FIRST_CONTROL_RING;
use super::queues::{VifQueues, VifRequest, VifStart};
use crate::config::{Transfer, XenVifConfig};
use crate::counters::PortTotals;
use crate::fdb::PortId;
use crate::plane::{Owners, PAIRS, Placement, PortShared, Steering};
use crate::ports::Context;
use crate::ports::queues::{AnyQueues, AnyRequest, AnyStart, AnyStopped, Workers};
use crate::rules::Rules;

/// Bytes of frames that may wait for the pages of a queue: those of a burst of the largest. Linux's netback
/// lets 512 KiB wait and then stops the sender, which a switch must not.
const BACKLOG: usize = 2 * 1024 * 1024;

/// The reason why a front end that has connected cannot be served.
#[derive(Debug, thiserror::Error)]
pub(super) enum ServeError {
    #[error(transparent)]
    Queue(#[from] QueueError),
    #[error("the control ring is unusable: {0}")]
    Control(#[from] LayoutError),
    #[error("the control ring's events cannot be waited for: {0}")]
    Events(#[from] std::io::Error),
}

/// The control side of one interface.
pub(super) struct Vif {
    pub(super) id: PortId,
    pub(super) name: String,
    pub(super) counters: PortTotals,
    pub(super) shared: Arc<PortShared>,
    pub(super) mac: Option<Mac>,
    /// Number of the present or last connection.
    pub(super) session: u32,
    pub(super) served: Option<Served>,
    /// Page counters of queues that were stopped.
    pub(super) past: PageCounters,
}

/// The connection of a front end, with its queues and control ring.
pub(super) struct Served {
    pub(super) queues: u16,
    /// Upper bound on the pages that each queue keeps mapped.
    pub(super) pages: usize,
    pub(super) mode: Mode,
    pub(super) front: FrontFeatures,
    pub(super) control: Option<ControlRing>,
}

/// The parts of a new connection, before workers get them.
struct Made {
    queues: Vec<(Queue<Area>, Events)>,
    control: Option<(Control<Area>, Box<dyn EventChannel>)>,
}

/// The control ring of a connection.
pub(super) struct ControlRing {
    control: Control<Area>,
    channel: Box<dyn EventChannel>,
    /// True if the last turn left requests in the ring.
    pub(super) more: bool,
}

fn page(region: &Arc<Region>) -> Result<Area, LayoutError> {
    region.area(0, PAGE).ok_or(LayoutError::Page)
}

impl Vif {
    /// Makes a port without queues, the first of which will be with worker `first`; `None` when all numbers
    /// are taken.
    pub(super) fn new(name: String, rules: &Rules, owners: Owners, cx: &mut Context<'_>) -> Option<Vif> {
        let id = cx.allocate().ok()?;
        // The number may have been another port's, with its own rules.
        cx.workers.set_rules(id, rules);
        let counters = PortTotals::new(cx.workers.count());
        let shared = Arc::new(PortShared::default());
        let placement = Placement { steering: Steering::Pairs(Arc::clone(&shared)), owners, queues: PAIRS };
        let reporter = cx.workers.reporter();
        cx.workers.add_port(id, &name, &counters, placement, |_, handle| {
            AnyQueues::Xen(VifQueues::new(handle.clone(), Arc::clone(&shared), Arc::clone(&reporter)))
        });
        let past = PageCounters::default();
        Some(Vif { id, name, counters, shared, mac: None, session: 0, served: None, past })
    }

    /// Hands the queues of a front end to the workers.
    ///
    /// # Errors
    /// A ring, an event channel or a setting of the front end is unusable; nothing of it is mapped any more.
    pub(super) fn serve(
        &mut self,
        connection: Connection,
        config: &XenVifConfig,
        cx: &mut Context<'_>,
    ) -> Result<(), ServeError> {
        let Connection { mut queues, control, front, mac, .. } = connection;
        queues.truncate(PAIRS.into());
        let mode = match config.transfer {
            _ if config.persistent && front.persistent => Mode::Persistent,
            Transfer::Copy => Mode::Copy,
            Transfer::Map => Mode::Map,
        };
        let maps = mode != Mode::Copy || control.is_some();
        let count = queues.len();
        let pages = if maps { cx.budget.take(count, config.pages) } else { 0 };
        let mode = if pages > 0 { mode } else { Mode::Copy };
        if maps && pages < config.pages {
            tracing::warn!(
                port = self.name,
                "the system allows {pages} mapped pages for each of its queues instead of {}, and others are copied: \
                 raise vm.max_map_count (sysctl), or lower pages",
                config.pages
            );
        }
        let made = Self::make(queues, control, mode, pages, &front);
        let made = made.and_then(|Made { queues, control }| {
            let control = control.map(|(control, channel)| self.watch(control, channel, cx));
            Ok((queues, control.transpose()?))
        });
        let (queues, control) = made.inspect_err(|_| cx.budget.give_back(count, pages))?;
        self.session = self.session.wrapping_add(1);
        self.mac = mac;
        self.shared.set_offloads(front.accepts.offloads());
        let filter = front.multicast_filter;
        cx.workers.request_all(self.id, || AnyRequest::Xen(VifRequest::Filter(filter)));
        for (number, (queue, events)) in (0u16..).zip(queues) {
            let start = VifStart { number, queue, events, session: self.session };
            cx.workers.start_queue(self.id, number, AnyStart::Xen(start));
        }
        self.counters.of(0).connections.add(1);
        self.served = Some(Served { queues: count as u16, pages, mode, front, control });
        Ok(())
    }

    fn make(
        queues: Vec<MappedQueue>,
        control: Option<MappedControl>,
        mode: Mode,
        pages: usize,
        front: &FrontFeatures,
    ) -> Result<Made, ServeError> {
        let queue = |MappedQueue { tx_ring, rx_ring, events, foreign }| {
            let [tx, rx] = [page(&tx_ring), page(&rx_ring)];
            let config = QueueConfig { mode, pages: pages.max(1), sg: front.accepts.sg };
            let queue =
                Queue::new(tx.map_err(QueueError::from)?, rx.map_err(QueueError::from)?, foreign, config)?;
            // Without feature-rx-notify there is no event when slots are added, so no backlog is kept.
            let backlog = if front.rx_notify { BACKLOG } else { 0 };
            Ok((queue.with_backlog(backlog), events))
        };
        let queues = queues.into_iter().map(queue).collect::<Result<_, ServeError>>()?;
        let control = match control {
            Some(MappedControl { ring, channel, foreign }) => {
                Some((Control::new(page(&ring)?, foreign)?, channel))
            }
            None => None,
        };
        Ok(Made { queues, control })
    }

    fn watch(
        &self,
        control: Control<Area>,
        channel: Box<dyn EventChannel>,
        cx: &Context<'_>,
    ) -> Result<ControlRing, ServeError> {
        cx.watch(&channel, FIRST_CONTROL_RING + u32::from(self.id.0), Interest::READABLE)?;
        // Requests may be in the ring already.
        Ok(ControlRing { control, channel, more: true })
    }

    /// Takes all queues back from the workers. When this returns nothing of the front end is mapped, unless a
    /// worker is late: it unmaps its part later, and until then the front end's kernel finds the grants in
    /// use.
    pub(super) fn stop(&mut self, cx: &mut Context<'_>) {
        let Some(served) = self.served.take() else { return };
        if let Some(control) = &served.control {
            let _ = cx.unwatch(&control.channel);
        }
        for number in 0..served.queues {
            cx.workers.drain(self.id, number);
            if let Ok(Some(AnyStopped::Xen(did))) = cx.workers.stop_queue(self.id, number, number) {
                add(&mut self.past, &did);
            }
        }
        cx.budget.give_back(served.queues.into(), served.pages);
        cx.workers.forget(self.id);
    }

    /// Removes the port from the switch.
    pub(super) fn remove(mut self, cx: &mut Context<'_>) {
        self.stop(cx);
        cx.release(self.id);
    }

    /// Serves the control ring: up to a number of requests, so that no front end keeps others waiting.
    ///
    /// # Errors
    /// The front end has broken a rule, which the text names; it is to be disconnected.
    pub(super) fn serve_control(&mut self, workers: &Workers) -> Result<(), String> {
        let port = self.id;
        let Some(Served { queues, control: Some(ring), .. }) = &mut self.served else { return Ok(()) };
        let gone = |error| format!("its control ring's event channel is gone: {error}");
        ring.channel.drain().map_err(gone)?;
        let mut grants = OnWorkers { workers, port, queues: *queues };
        if ring.control.poll_for(&mut grants) {
            ring.channel.notify().map_err(gone)?;
        }
        ring.more = ring.control.arm();
        match ring.control.fault() {
            Some(fault) => Err(format!("its control ring: {fault}")),
            None => Ok(()),
        }
    }

    /// Returns true if the control ring has requests that no event will announce.
    pub(super) fn has_more(&self) -> bool {
        let control = self.served.as_ref().and_then(|served| served.control.as_ref());
        control.is_some_and(|control| control.more)
    }
}

/// The queues of an interface, each reached through its worker.
struct OnWorkers<'a> {
    workers: &'a Workers,
    port: PortId,
    queues: u16,
}

impl OnWorkers<'_> {
    fn with<T: Send + 'static>(
        &self,
        queue: u32,
        task: impl FnOnce(&mut Queue<Area>) -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let number = u16::try_from(queue).ok().filter(|number| *number < self.queues);
        let number = number.ok_or(Status::InvalidParameter)?;
        let answer = self.workers.ask(self.port, number, |reply| {
            let task = move |queue: &mut Queue<Area>| {
                let _ = reply.send(task(queue));
            };
            AnyRequest::Xen(VifRequest::With(number, Box::new(task)))
        });
        answer.ok().flatten().unwrap_or(Err(Status::InvalidParameter))
    }
}

impl StaticGrants for OnWorkers<'_> {
    fn capacity(&mut self, queue: u32) -> Result<u32, Status> {
        self.with(queue, |queue| queue.static_capacity())
    }

    fn add(&mut self, queue: u32, entries: &[GrefEntry]) -> Result<(), Status> {
        let entries = entries.to_vec();
        self.with(queue, move |queue| queue.add_static(&entries))
    }

    fn remove(&mut self, queue: u32, entries: &mut [GrefEntry]) -> Result<u32, Status> {
        let mut list = entries.to_vec();
        let (removed, list) = self.with(queue, move |queue| {
            let removed = queue.remove_static(&mut list)?;
            Ok((removed, list))
        })?;
        entries.clone_from_slice(&list);
        Ok(removed)
    }
}

/// Adds the counters of one queue to a sum.
pub(super) fn add(sum: &mut PageCounters, more: &PageCounters) {
    let PageCounters { hits, misses, mapped, evicted, failed, copies, copied_bytes } = more;
    sum.hits += hits;
    sum.misses += misses;
    sum.mapped += mapped;
    sum.evicted += evicted;
    sum.failed += failed;
    sum.copies += copies;
    sum.copied_bytes += copied_bytes;
}
