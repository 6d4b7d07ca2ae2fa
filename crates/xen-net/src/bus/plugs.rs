//! All interfaces of a back end: found as the toolstack makes them, looked at when their nodes change, one after the other.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ringferry_xen::domain::{DomId, Domain};
use ringferry_xen::store::{Client, Event, Nodes, StoreError, path};

use super::back::{BackEvent, Vif};
use super::features::{BackFeatures, MAX_QUEUES};
use crate::offload::Accepts;

/// Interfaces that are looked at, and events of the store that are taken, before the caller gets a word in.
const TURNS: usize = 64;

/// Most interfaces: more than a switch has ports. A store that names more has gone mad.
const MAX_VIFS: usize = 4096;

/// What a back end offers its front ends.
#[derive(Clone, Debug)]
pub struct BackConfig {
    /// Class of the devices, usually `vif`.
    pub class: String,
    /// What may be sent to us.
    pub accepts: Accepts,
    /// Most queues of an interface.
    pub max_queues: u16,
    /// One event channel for each direction, if the front end likes.
    pub split_events: bool,
    /// Keep the grants mapped of front ends that say they may be.
    pub persistent: bool,
    /// A control ring, over which front ends hand over grants.
    pub static_grants: bool,
    /// Front ends may choose the multicast packets that they get.
    pub multicast_control: bool,
    /// The only interface to serve; absent: all of the class.
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

/// Which interface of which domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VifId {
    /// The domain of the front end.
    pub front: DomId,
    /// Number of the interface in that domain.
    pub device: u32,
}

impl fmt::Display for VifId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vif{}.{}", self.front, self.device)
    }
}

/// What a step has found.
#[derive(Debug)]
pub enum Step {
    /// Something is to be done about an interface, or was.
    Vif(VifId, BackEvent),
    /// There is more to look at: step again before waiting.
    Busy,
    /// Nothing is left: wait for the descriptor.
    Idle,
}

/// All interfaces of a class that this domain is the back end of.
///
/// Dropping it leaves the store as it is. A back end that is started later takes the interfaces over, with the rings of front ends
/// that are still connected; stock front ends do not even notice.
#[derive(Debug)]
pub struct Plugs {
    store: Client,
    domain: Arc<dyn Domain>,
    config: BackConfig,
    /// Where the interfaces are, relative to our domain's nodes.
    base: String,
    vifs: BTreeMap<VifId, Entry>,
    /// Which interface a watch is of.
    watches: BTreeMap<u64, VifId>,
    next_watch: u64,
    /// Interfaces to look at, first come first served, each once: a guest that writes all the time waits like any other.
    queue: VecDeque<VifId>,
    queued: BTreeSet<VifId>,
    /// Interfaces may have come.
    rescan: bool,
}

/// An interface, and the number of its watch.
#[derive(Debug)]
struct Entry {
    vif: Vif,
    watch: u64,
}

/// Token of the watch of all our nodes.
const ALL: u64 = 0;

impl Plugs {
    /// All interfaces of the class of `config`.
    ///
    /// # Errors
    /// The store cannot be asked.
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

    /// Interfaces that are known.
    pub fn vifs(&self) -> impl Iterator<Item = VifId> {
        self.vifs.keys().copied()
    }

    /// Looks at the store. Call it until it says [`Step::Idle`], then wait for the descriptor ([`AsFd`]). Never waits,
    /// but for answers of the store.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub fn step(&mut self) -> Result<Step, StoreError> {
        // What comes while the store is asked waits with us, and the descriptor says nothing of it.
        let mut told = !self.take_events()?;
        if std::mem::take(&mut self.rescan) {
            self.scan()?;
            told = true;
        }
        for _ in 0..TURNS {
            let Some(id) = self.queue.pop_front() else {
                return Ok(if told { Step::Busy } else { Step::Idle });
            };
            self.queued.remove(&id);
            told = true;
            if let Some(event) = self.look(id)? {
                return Ok(Step::Vif(id, event));
            }
        }
        Ok(Step::Busy)
    }

    /// Notes what the store has told; whether that was all.
    fn take_events(&mut self) -> Result<bool, StoreError> {
        for _ in 0..TURNS {
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

    /// The interface that a node of ours belongs to.
    fn id_of(&self, node: &str) -> Option<VifId> {
        let mut names = node.strip_prefix(&self.base)?.strip_prefix('/')?.split('/');
        Some(VifId { front: DomId(names.next()?.parse().ok()?), device: names.next()?.parse().ok()? })
    }

    fn enqueue(&mut self, id: VifId) {
        if self.config.only.is_none_or(|only| only == id) && self.queued.insert(id) {
            self.queue.push_back(id);
        }
    }

    /// Looks for interfaces, and at all that are known.
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

    fn look(&mut self, id: VifId) -> Result<Option<BackEvent>, StoreError> {
        if !self.vifs.contains_key(&id) && !self.adopt(id)? {
            return Ok(None);
        }
        let Some(entry) = self.vifs.get_mut(&id) else { return Ok(None) };
        let event = match entry.vif.look(&mut self.store, &*self.domain, &self.config) {
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

    /// Takes up an interface; whether there is one.
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
        self.store.watch(&vif.watched(), watch)?;
        self.watches.insert(watch, id);
        self.vifs.insert(id, Entry { vif, watch });
        Ok(true)
    }

    fn forget(&mut self, id: VifId) -> Result<(), StoreError> {
        if let Some(Entry { vif, watch }) = self.vifs.remove(&id) {
            self.watches.remove(&watch);
            self.store.unwatch(&vif.watched(), watch)?;
        }
        Ok(())
    }

    /// The front end of a [`BackEvent::Connect`] is served.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub fn connected(&mut self, id: VifId) -> Result<(), StoreError> {
        let Some(entry) = self.vifs.get(&id) else { return Ok(()) };
        entry.vif.connected(&mut self.store)
    }

    /// Nothing of the front end's is mapped any more: after [`BackEvent::Disconnect`], or whenever it was dropped for what it
    /// did.
    pub fn disconnected(&mut self, id: VifId) {
        if let Some(entry) = self.vifs.get_mut(&id) {
            entry.vif.disconnected();
            self.enqueue(id);
        }
    }
}

impl AsFd for Plugs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.store.as_fd()
    }
}
