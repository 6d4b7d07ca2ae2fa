//! [`BackendDriver`]: the xenbus driver of all interfaces of a back end. It finds them as the
//! toolstack creates them, and advances each when its nodes change, in first-come order.
//!
//! A control thread creates it, polls its descriptor, calls [`BackendDriver::poll`] until it
//! returns [`Polled::Idle`], acts on the events, and reports with [`BackendDriver::connected`] and
//! [`BackendDriver::disconnected`]. Dropping it leaves the store to the next back end.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ringferry_xen::domain::{DomId, Domain};
use ringferry_xen::store::{Client, Event, Nodes, StoreError, path};

use super::backend_device::{BackEvent, Vif};
use super::features::{BackFeatures, MAX_QUEUES};
use crate::offload::Accepts;

/// Most interfaces that one poll advances, and most events that it takes, before it returns to the
/// caller.
const BATCH: usize = 64;

/// Upper bound on the interfaces that a (possibly corrupt) store may list; a switch has fewer
/// ports.
const MAX_VIFS: usize = 4096;

/// The settings of a back end, for all its front ends.
#[derive(Clone, Debug)]
pub struct BackConfig {
    /// Class of the devices in the store, usually `vif`.
    pub class: String,
    /// The frames that this back end accepts.
    pub accepts: Accepts,
    /// Most queues that an interface may have.
    pub max_queues: u16,
    /// Allow one event channel per direction.
    pub split_events: bool,
    /// Keep grants mapped of front ends that publish `feature-persistent`.
    pub persistent: bool,
    /// Offer a control ring, on which front ends register static grants.
    pub static_grants: bool,
    /// Let front ends select the multicast packets that they get.
    pub multicast_control: bool,
    /// The only interface to serve; `None`: all of the class.
    pub only: Option<VifId>,
}

impl Default for BackConfig {
    fn default() -> Self {
        Self {
            class: "vif".into(),
            accepts: Accepts::ALL,
            max_queues: 8,
            split_events: true,
            persistent: true,
            static_grants: true,
            multicast_control: true,
            only: None,
        }
    }
}

impl BackConfig {
    pub(super) fn features(&self) -> BackFeatures {
        BackFeatures {
            accepts: self.accepts,
            rx_copy: true,
            split_events: self.split_events,
            max_queues: self.max_queues.clamp(1, MAX_QUEUES),
            ctrl_ring: self.static_grants,
            persistent: self.persistent,
            multicast_control: self.multicast_control,
        }
    }
}

/// Identifies an interface by its front end's domain and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VifId {
    /// Domain in which the front end runs.
    pub front: DomId,
    /// Number of the interface in that domain.
    pub device: u32,
}

impl fmt::Display for VifId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vif{}.{}", self.front, self.device)
    }
}

/// The result of one call of [`BackendDriver::poll`].
#[derive(Debug)]
pub enum Polled {
    /// An interface changed, and the caller may have to act.
    Vif(VifId, BackEvent),
    /// More events may wait: poll again before sleeping.
    Busy,
    /// Nothing is left to do: wait for the descriptor.
    Idle,
}

/// The xenbus driver of all interfaces of a class whose back end is in this domain.
///
/// Dropping it leaves the store as it is. A back end that is started later adopts the interfaces,
/// with the rings of front ends that are still connected; stock front ends do not even notice.
#[derive(Debug)]
pub struct BackendDriver {
    store: Client,
    domain: Arc<dyn Domain>,
    config: BackConfig,
    /// Path of the interfaces' nodes, relative to our domain's.
    base: String,
    vifs: BTreeMap<VifId, Entry>,
    /// The interface that each watch token belongs to.
    watches: BTreeMap<u64, VifId>,
    next_watch: u64,
    /// Interfaces to advance, in first-come order, each once: a guest that writes its nodes all the
    /// time waits like any other.
    queue: VecDeque<VifId>,
    queued: BTreeSet<VifId>,
    /// True if interfaces may have been created that are not known.
    rescan: bool,
}

/// An interface, and the token of its watch.
#[derive(Debug)]
struct Entry {
    vif: Vif,
    watch: u64,
    /// Its front end could not be told that it is served.
    failed: bool,
}

/// Token of the watch on all our nodes.
const ALL: u64 = 0;

impl BackendDriver {
    /// Creates the driver of all interfaces of the class in `config`.
    ///
    /// # Errors
    /// The connection to the store failed.
    pub fn new(mut store: Client, domain: Arc<dyn Domain>, config: BackConfig) -> Result<Self, StoreError> {
        let base = format!("backend/{}", config.class);
        store.watch(&base, ALL)?;
        Ok(Self {
            store,
            domain,
            config,
            base,
            vifs: BTreeMap::new(),
            watches: BTreeMap::new(),
            next_watch: ALL + 1,
            queue: VecDeque::new(),
            queued: BTreeSet::new(),
            rescan: true,
        })
    }

    /// Returns the interfaces that were adopted.
    pub fn vifs(&self) -> impl Iterator<Item = VifId> {
        self.vifs.keys().copied()
    }

    /// Processes events of the store and advances interfaces. Call it until it returns
    /// [`Polled::Idle`], then wait for the descriptor ([`AsFd`]). It blocks only for answers of the
    /// store.
    ///
    /// # Errors
    /// The connection to the store failed.
    pub fn poll(&mut self) -> Result<Polled, StoreError> {
        // Events that arrive while we wait for an answer of the store are buffered here, and the
        // descriptor does not show them.
        let mut told = !self.take_events()?;
        if std::mem::take(&mut self.rescan) {
            self.scan()?;
            told = true;
        }
        for _ in 0..BATCH {
            let Some(id) = self.queue.pop_front() else {
                return Ok(if told { Polled::Busy } else { Polled::Idle });
            };
            self.queued.remove(&id);
            told = true;
            if let Some(event) = self.advance(id)? {
                return Ok(Polled::Vif(id, event));
            }
        }
        Ok(Polled::Busy)
    }

    /// Takes events of the store; returns true if none is left.
    fn take_events(&mut self) -> Result<bool, StoreError> {
        for _ in 0..BATCH {
            match self.store.event()? {
                None => return Ok(true),
                Some(Event::Changed { token: ALL, path }) => match self.id_of(&path) {
                    Some(id) => self.enqueue(id),
                    None => self.rescan = true,
                },
                Some(Event::Changed { token, .. }) => {
                    if let Some(&id) = self.watches.get(&token) {
                        self.enqueue(id);
                    }
                }
                Some(Event::Flood) => self.rescan = true,
            }
        }
        Ok(false)
    }

    /// Returns the interface that one of our nodes belongs to.
    fn id_of(&self, node: &str) -> Option<VifId> {
        let mut names = node.strip_prefix(&self.base)?.strip_prefix('/')?.split('/');
        Some(VifId { front: DomId(names.next()?.parse().ok()?), device: names.next()?.parse().ok()? })
    }

    fn enqueue(&mut self, id: VifId) {
        if self.config.only.is_none_or(|only| only == id) && self.queued.insert(id) {
            self.queue.push_back(id);
        }
    }

    /// Enqueues every interface that is listed or known.
    fn scan(&mut self) -> Result<(), StoreError> {
        let known: Vec<_> = self.vifs().collect();
        known.into_iter().for_each(|id| self.enqueue(id));
        for front in self.store.directory(&self.base)? {
            for device in self.store.directory(&path::join(&self.base, &front))? {
                if let Some(id) = self.id_of(&format!("{}/{front}/{device}", self.base)) {
                    self.enqueue(id);
                }
            }
        }
        Ok(())
    }

    fn advance(&mut self, id: VifId) -> Result<Option<BackEvent>, StoreError> {
        if !self.vifs.contains_key(&id) && !self.adopt(id)? {
            return Ok(None);
        }
        let Some(entry) = self.vifs.get_mut(&id) else { return Ok(None) };
        if std::mem::take(&mut entry.failed)
            && let Some(event) = entry.vif.failed()
        {
            return Ok(Some(event));
        }
        let event = match entry.vif.advance(&mut self.store, &*self.domain, &self.config) {
            Err(error) if !error.is_fatal() => {
                tracing::debug!("{id}: {error}");
                entry.vif.failed()
            }
            result => result?,
        };
        if matches!(event, Some(BackEvent::Removed)) {
            self.forget(id)?;
        }
        Ok(event)
    }

    /// Adopts an interface; returns false if it is not to be served.
    fn adopt(&mut self, id: VifId) -> Result<bool, StoreError> {
        if self.vifs.len() >= MAX_VIFS {
            return Ok(false);
        }
        let back = format!("{}/{}/{}", self.base, id.front, id.device);
        let adopted = match Vif::adopt(&mut self.store, id, back, &self.config) {
            Err(error) if !error.is_fatal() => {
                tracing::debug!("{id}: {error}");
                None
            }
            result => result?,
        };
        let Some(vif) = adopted else { return Ok(false) };
        let watch = self.next_watch;
        self.next_watch += 1;
        self.store.watch(&vif.watch_path(), watch)?;
        self.watches.insert(watch, id);
        self.vifs.insert(id, Entry { vif, watch, failed: false });
        Ok(true)
    }

    fn forget(&mut self, id: VifId) -> Result<(), StoreError> {
        if let Some(Entry { vif, watch, .. }) = self.vifs.remove(&id) {
            self.watches.remove(&watch);
            self.store.unwatch(&vif.watch_path(), watch)?;
        }
        Ok(())
    }

    /// Reports that the front end of a [`BackEvent::Connect`] is served now.
    ///
    /// # Errors
    /// The connection to the store failed.
    pub fn connected(&mut self, id: VifId) -> Result<(), StoreError> {
        let Some(entry) = self.vifs.get_mut(&id) else { return Ok(()) };
        match entry.vif.connected(&mut self.store) {
            // A quota, or a store that is too busy, is that interface's affair: its front end, which was not told, is disconnected by the next poll.
            Err(error) if !error.is_fatal() => {
                tracing::debug!("{id}: {error}");
                entry.failed = true;
                self.enqueue(id);
                Ok(())
            }
            result => result,
        }
    }

    /// Reports that nothing of the front end's is mapped any more: after [`BackEvent::Disconnect`],
    /// or whenever the caller dropped the front end for a fault.
    pub fn disconnected(&mut self, id: VifId) {
        if let Some(entry) = self.vifs.get_mut(&id) {
            entry.vif.disconnected();
            self.enqueue(id);
        }
    }
}

impl AsFd for BackendDriver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.store.as_fd()
    }
}
