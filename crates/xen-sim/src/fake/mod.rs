//! A hypervisor in one address space, for tests: any number of domains, with every way to go wrong at command and an
//! exact account of what is still granted, mapped and open.
//!
//! The [`Fake`] owns the domains' tables; each handle it gives out owns one thing in them and takes it back
//! when dropped. Pages are real mappings, so that touching one that was unmapped is a fault here as well.

mod channel;
mod domain;
mod fault;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use channel::Port;
use fault::Faults;
use ringferry_xen::domain::{DomId, EventPort};
use ringferry_xen::grant::GrantRef;

use crate::segments::{MAX_PAGES, Segments};

pub use domain::FakeDomain;
pub use fault::Op;

/// The hypervisor. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Fake {
    state: Arc<Mutex<State>>,
}

/// Everything there is.
#[derive(Debug)]
struct State {
    domains: BTreeMap<DomId, Tables>,
    /// Most pages that each domain may have granted at once.
    limit: usize,
    faults: Faults,
    /// The highest port ever given out. None is used twice.
    last_port: u32,
    /// What domains that are gone had granted, for the account.
    graves: Vec<Segments>,
}

/// What one domain has.
#[derive(Debug, Default)]
struct Tables {
    grants: Segments,
    ports: BTreeMap<u32, Port>,
    /// How many events each of its channels still raises by itself.
    storm: u64,
}

impl Default for Fake {
    fn default() -> Self {
        Self::new()
    }
}

impl Fake {
    /// A hypervisor without domains.
    pub fn new() -> Fake {
        Self::with_limit(MAX_PAGES)
    }

    /// One whose domains may have `limit` pages granted at once each.
    pub fn with_limit(limit: usize) -> Fake {
        let state = State {
            domains: BTreeMap::new(),
            limit,
            faults: Faults::default(),
            last_port: 0,
            graves: Vec::new(),
        };
        Fake { state: Arc::new(Mutex::new(state)) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A test that panics elsewhere has its own report.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The domain of that number, made if there is none.
    pub fn domain(&self, id: DomId) -> FakeDomain {
        self.lock().domains.entry(id).or_default();
        FakeDomain::new(self.clone(), id)
    }

    /// Ends a domain: its grants end, its ports close. What is mapped of it stays mapped.
    pub fn destroy(&self, id: DomId) {
        let mut state = self.lock();
        if let Some(mut tables) = state.domains.remove(&id) {
            tables.grants.end_all();
            state.graves.push(tables.grants);
        }
    }

    /// Lets one operation of `domain` fail, once: `after` more of the kind succeed before. Several may be
    /// waiting.
    pub fn fail(&self, domain: DomId, op: Op, after: usize) {
        self.lock().faults.add(domain, op, after);
    }

    /// Makes all later uses of a reference of `domain` fail, as when a front end ends a grant too early: what
    /// is mapped stays mapped. Whether there was such a grant.
    pub fn spoil(&self, domain: DomId, gref: GrantRef) -> bool {
        let state = self.lock();
        let Some((segment, page)) = state.domains.get(&domain).and_then(|tables| tables.grants.find(gref))
        else {
            return false;
        };
        segment.end_page(page);
        true
    }

    /// An event for each channel of `domain` at once, and then `events` more, each as soon as one was taken note of.
    pub fn storm(&self, domain: DomId, events: u64) {
        let mut state = self.lock();
        let Some(tables) = state.domains.get_mut(&domain) else { return };
        tables.storm = events;
        drop(state);
        self.raise_all(domain);
    }

    /// Pages that are granted and whose grants have not ended.
    pub fn granted_pages(&self) -> usize {
        self.lock().domains.values().map(|tables| tables.grants.granted()).sum()
    }

    /// Mappings of granted pages, whether or not their grants have ended and their domain is gone.
    pub fn mapped_pages(&self) -> usize {
        let state = self.lock();
        let living = state.domains.values().map(|tables| &tables.grants);
        living.chain(&state.graves).map(Segments::mapped).sum()
    }

    /// Ends of event channels that are open.
    pub fn open_ports(&self) -> usize {
        self.lock().domains.values().flat_map(|tables| tables.ports.values()).map(Port::ends).sum()
    }

    /// A check that nothing is left over, for the end of a test.
    ///
    /// # Panics
    /// If anything is granted, mapped or open.
    pub fn assert_nothing_left(&self) {
        let left = (self.granted_pages(), self.mapped_pages(), self.open_ports());
        assert_eq!(left, (0, 0, 0), "granted pages, mapped pages, open ports");
    }
}

impl State {
    fn tables(&mut self, id: DomId) -> io::Result<&mut Tables> {
        let none = || io::Error::new(io::ErrorKind::NotFound, format!("there is no domain {id}"));
        self.domains.get_mut(&id).ok_or_else(none)
    }

    /// Whether a storm raises one more event.
    fn storms(&mut self, id: DomId) -> bool {
        let Ok(tables) = self.tables(id) else { return false };
        let storms = tables.storm > 0;
        tables.storm = tables.storm.saturating_sub(1);
        storms
    }

    fn port(&mut self, id: DomId, port: EventPort) -> Option<&mut Port> {
        self.domains.get_mut(&id)?.ports.get_mut(&port.0)
    }
}
