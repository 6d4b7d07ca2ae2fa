//! [`Fake`]: a hypervisor in one address space, for tests, with any number of domains, fault
//! injection, and an exact account of everything that is still granted, mapped and open.
//!
//! A test creates it, obtains domains with [`Fake::domain`], and calls
//! [`Fake::assert_nothing_left`] at the end. The fake owns the domains' tables under one lock; each
//! handle owns one entry in them and removes it when it is dropped. Pages are real mappings, so
//! that touching one that was unmapped is a fault here as well.

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

/// The simulated hypervisor. Clones denote the same one.
#[derive(Clone, Debug)]
pub struct Fake {
    state: Arc<Mutex<State>>,
}

/// The state of the hypervisor.
#[derive(Debug)]
struct State {
    domains: BTreeMap<DomId, Tables>,
    /// Most pages that each domain may have granted at once.
    limit: usize,
    faults: Faults,
    /// The highest port ever allocated. No port is reused.
    last_port: u32,
    /// Grants of destroyed domains, for the account of mappings.
    destroyed: Vec<Segments>,
}

/// The grants and ports of one domain.
#[derive(Debug, Default)]
struct Tables {
    grants: Segments,
    ports: BTreeMap<u32, Port>,
    /// Number of events that its channels will still raise by themselves.
    storm: u64,
}

impl Default for Fake {
    fn default() -> Self {
        Self::new()
    }
}

impl Fake {
    /// Creates a hypervisor without domains.
    pub fn new() -> Fake {
        Self::with_limit(MAX_PAGES)
    }

    /// Creates a hypervisor whose domains may each have `limit` pages granted at once.
    pub fn with_limit(limit: usize) -> Fake {
        let state = State {
            domains: BTreeMap::new(),
            limit,
            faults: Faults::default(),
            last_port: 0,
            destroyed: Vec::new(),
        };
        Fake { state: Arc::new(Mutex::new(state)) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A test that panicked elsewhere reports that itself.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the domain of this number, which is created if necessary.
    pub fn domain(&self, id: DomId) -> FakeDomain {
        self.lock().domains.entry(id).or_default();
        FakeDomain::new(self.clone(), id)
    }

    /// Destroys a domain: its grants end and its ports close. Pages of it that are mapped stay
    /// mapped.
    pub fn destroy(&self, id: DomId) {
        let mut state = self.lock();
        if let Some(mut tables) = state.domains.remove(&id) {
            tables.grants.end_all();
            state.destroyed.push(tables.grants);
        }
    }

    /// Makes one operation of `domain` fail, once, after `after` more of its kind have succeeded.
    /// Several faults may be pending.
    pub fn fail(&self, domain: DomId, op: Op, after: usize) {
        self.lock().faults.add(domain, op, after);
    }

    /// Makes all later uses of a reference of `domain` fail, as when a front end ends a grant too
    /// early; existing mappings stay. Returns false if there is no such grant.
    pub fn invalidate_grant(&self, domain: DomId, gref: GrantRef) -> bool {
        let state = self.lock();
        let Some((segment, page)) = state.domains.get(&domain).and_then(|tables| tables.grants.find(gref))
        else {
            return false;
        };
        segment.end_page(page);
        true
    }

    /// Raises an event on each channel of `domain` at once, and then `events` more, each as soon as
    /// one was drained.
    pub fn storm(&self, domain: DomId, events: u64) {
        let mut state = self.lock();
        let Some(tables) = state.domains.get_mut(&domain) else { return };
        tables.storm = events;
        drop(state);
        self.raise_all(domain);
    }

    /// Returns the number of pages whose grants have not ended.
    pub fn granted_pages(&self) -> usize {
        self.lock().domains.values().map(|tables| tables.grants.granted()).sum()
    }

    /// Returns the number of mappings of granted pages, including those whose grants have ended or
    /// whose domain was destroyed.
    pub fn mapped_pages(&self) -> usize {
        let state = self.lock();
        let living = state.domains.values().map(|tables| &tables.grants);
        living.chain(&state.destroyed).map(Segments::mapped).sum()
    }

    /// Returns the number of open ends of event channels.
    pub fn open_ports(&self) -> usize {
        self.lock().domains.values().flat_map(|tables| tables.ports.values()).map(Port::ends).sum()
    }

    /// Checks that nothing is left over, at the end of a test.
    ///
    /// # Panics
    /// Panics if anything is granted, mapped or open.
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

    /// Returns true if an event storm raises one more event, and counts it.
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
