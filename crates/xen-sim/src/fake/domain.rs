//! [`FakeDomain`]: a domain of the fake with its handles, which any thread of a test may use.

use std::fmt;
use std::io;
use std::sync::Arc;

use ringferry_xen::domain::{DomId, Domain, EventPort};
use ringferry_xen::event::EventChannel;
use ringferry_xen::grant::{Access, Foreign, GrantError, GrantRef, GrantTable, Granted};
use ringferry_xen::segment::{Files, Lookup, Segment, SegmentForeign, SegmentGranted, Use};

use super::{Fake, fault::Op};

/// A domain of a [`Fake`]. Clones denote the same domain.
#[derive(Clone)]
pub struct FakeDomain {
    fake: Fake,
    id: DomId,
}

impl fmt::Debug for FakeDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FakeDomain({})", self.id)
    }
}

impl FakeDomain {
    pub(super) fn new(fake: Fake, id: DomId) -> FakeDomain {
        FakeDomain { fake, id }
    }
}

impl Domain for FakeDomain {
    fn id(&self) -> DomId {
        self.id
    }

    fn grants(&self) -> io::Result<Box<dyn GrantTable>> {
        self.fake.lock().tables(self.id)?;
        Ok(Box::new(self.clone()))
    }

    fn foreign(&self, domain: DomId) -> io::Result<Box<dyn Foreign>> {
        self.fake.lock().tables(domain)?;
        let lookup = FakeLookup { fake: self.fake.clone(), me: self.id, domain, found: None };
        Ok(Box::new(SegmentForeign::new(domain, lookup)))
    }

    fn alloc_unbound(&self, remote: DomId) -> io::Result<(EventPort, Box<dyn EventChannel>)> {
        let (port, channel) = self.fake.alloc(self.id, remote)?;
        Ok((port, Box::new(channel)))
    }

    fn bind_interdomain(&self, remote: DomId, port: EventPort) -> io::Result<Box<dyn EventChannel>> {
        Ok(Box::new(self.fake.bind(self.id, remote, port)?))
    }
}

impl GrantTable for FakeDomain {
    fn grant(&mut self, to: DomId, count: usize, access: Access) -> Result<Box<dyn Granted>, GrantError> {
        let files = Files::new(count)?;
        let mut state = self.fake.lock();
        state.faults.check(self.id, Op::Grant).map_err(GrantError::Exhausted)?;
        let limit = state.limit;
        let grants = &mut state.tables(self.id)?.grants;
        let segment = Segment::new(grants.place(count, limit)?, count, to, access, files)?;
        grants.insert(Arc::clone(&segment));
        drop(state);
        let (fake, id) = (self.fake.clone(), self.id);
        let on_end = move |first: GrantRef| {
            if let Ok(tables) = fake.lock().tables(id) {
                tables.grants.end(first);
            }
        };
        Ok(Box::new(SegmentGranted::new(segment, on_end)?))
    }
}

/// References of a domain, as seen by the domain to which they were granted.
#[derive(Debug)]
struct FakeLookup {
    fake: Fake,
    me: DomId,
    domain: DomId,
    found: Option<Arc<Segment>>,
}

impl Lookup for FakeLookup {
    fn find(&mut self, gref: GrantRef, what: Use) -> Option<(&Arc<Segment>, usize)> {
        let mut state = self.fake.lock();
        let op = match what {
            Use::Map => Op::Map,
            Use::Copy => Op::Copy,
        };
        if state.faults.strikes(self.me, op) {
            return None;
        }
        let (segment, page) = state.tables(self.domain).ok()?.grants.find(gref)?;
        if segment.to() != self.me {
            return None;
        }
        Some((self.found.insert(Arc::clone(segment)), page))
    }

    fn alive(&mut self) -> io::Result<()> {
        let mut state = self.fake.lock();
        state.faults.check(self.me, Op::Batch)?;
        state.tables(self.domain).map(|_| ())
    }
}
