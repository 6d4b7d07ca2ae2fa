//! Faults to come: which call of which domain is to fail.

use std::io;

use ringferry_xen::domain::DomId;

/// What can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Granting: the pages are exhausted.
    Grant,
    /// Mapping a page: its reference is bad. Counted per page.
    Map,
    /// Copying a segment: its reference is bad. Counted per segment.
    Copy,
    /// A whole batch of copies: the domain is gone.
    Batch,
    /// Making or binding an event channel: no port is left.
    Channel,
}

/// The faults that wait.
#[derive(Debug, Default)]
pub(super) struct Faults(Vec<(DomId, Op, usize)>);

impl Faults {
    /// One more, after `after` calls that succeed.
    pub(super) fn add(&mut self, domain: DomId, op: Op, after: usize) {
        self.0.push((domain, op, after));
    }

    /// Counts a call; whether it is to fail. At most one fault comes due with it; others wait for the next.
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

    /// As [`strikes`](Self::strikes), as an error.
    pub(super) fn check(&mut self, domain: DomId, op: Op) -> io::Result<()> {
        if self.strikes(domain, op) {
            return Err(io::Error::other(format!("injected fault: {op:?} of domain {domain}")));
        }
        Ok(())
    }
}
