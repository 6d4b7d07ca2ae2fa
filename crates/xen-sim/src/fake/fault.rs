//! Fault injection: a list of faults, each of which makes one call of one domain fail. A test adds
//! them; the fake consults the list at each call.

use std::io;

use ringferry_xen::domain::DomId;

/// An operation that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Granting pages fails as exhausted.
    Grant,
    /// Mapping a page fails as of a bad reference. Calls are counted per page.
    Map,
    /// Copying a segment fails as of a bad reference. Calls are counted per segment.
    Copy,
    /// A whole batch of copies fails, as if the domain were gone.
    Batch,
    /// Allocating or binding an event channel fails for lack of ports.
    Channel,
}

/// The faults that have not yet struck.
#[derive(Debug, Default)]
pub(super) struct Faults(Vec<(DomId, Op, usize)>);

impl Faults {
    /// Adds a fault that strikes after `after` calls that succeed.
    pub(super) fn add(&mut self, domain: DomId, op: Op, after: usize) {
        self.0.push((domain, op, after));
    }

    /// Counts a call; returns true if it is to fail. At most one fault strikes a call; others wait
    /// for the next.
    pub(super) fn strikes(&mut self, domain: DomId, op: Op) -> bool {
        let mut due = None;
        for (at, fault) in self.0.iter_mut().enumerate() {
            if (fault.0, fault.1) == (domain, op) {
                match fault.2 {
                    0 => due = Some(at),
                    _ => fault.2 -= 1,
                }
            }
        }
        due.map(|at| self.0.remove(at)).is_some()
    }

    /// Does the same as [`strikes`](Self::strikes), but returns an error.
    pub(super) fn check(&mut self, domain: DomId, op: Op) -> io::Result<()> {
        if self.strikes(domain, op) {
            return Err(io::Error::other(format!("injected fault: {op:?} of domain {domain}")));
        }
        Ok(())
    }
}
