//! [`RealForeign`]: another domain's pages, mapped through `/dev/xen/gntdev` or copied by the
//! hypervisor. A queue opens one and uses it on its thread.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use ringferry_memory::{Region, Window};
use ringferry_sys::xen::{Copy, CopyBatch, CopyLocal, GrantDevice};

use crate::domain::{DomId, PAGE};
use crate::grant::{Access, CopySegment, Foreign, ForeignCounters, GrantError, GrantRef, Local};

use super::grants::os_error;

/// Most pages mapped by one call: the pages of a whole ring. When one reference is bad, all are
/// mapped one by one, so a longer run costs more with a hostile peer and gains nothing.
const MAX_RUN: usize = 256;

/// Access to another domain's pages. The kernel keeps the device open for as long as something of
/// it is mapped.
#[derive(Debug)]
pub struct RealForeign {
    device: GrantDevice,
    domain: DomId,
    /// Most pages that one mapping may have.
    run: usize,
    /// Hypercalls that the kernel makes to map or unmap one run of pages, however long.
    calls_per_run: u64,
    batch: CopyBatch,
    /// References of the run that is being mapped; kept to reuse its memory.
    refs: Vec<u32>,
    counters: ForeignCounters,
}

impl RealForeign {
    pub(super) fn open(domain: DomId, paravirtual: bool) -> io::Result<RealForeign> {
        Ok(RealForeign {
            device: GrantDevice::open()?,
            domain,
            // A part of a mapping can be unmapped only if the pages are in our own page tables;
            // otherwise the kernel waits until the whole mapping is gone, and evicted pages would
            // stay mapped.
            run: if paravirtual { MAX_RUN } else { 1 },
            // A PV kernel maps each page for itself, too.
            calls_per_run: if paravirtual { 2 } else { 1 },
            batch: CopyBatch::default(),
            refs: Vec::new(),
            counters: ForeignCounters::default(),
        })
    }

    /// Maps pages to slots from `slot` on; returns true if all of them are mapped now. Otherwise
    /// none is.
    fn map_run(
        &mut self,
        window: &mut Window,
        slot: usize,
        pages: &[(usize, GrantRef)],
        access: Access,
    ) -> bool {
        self.refs.clear();
        self.refs.extend(pages.iter().map(|(_, gref)| gref.0));
        let Ok(offset) = self.device.map_grant_refs(self.domain.0, &self.refs) else { return false };
        let result = window.map(slot, pages.len(), self.device.as_fd(), offset, access == Access::Write);
        self.device.unmap_grant_refs(offset, pages.len());
        self.counters.calls += self.calls_per_run;
        if result.is_ok() {
            self.counters.mapped += pages.len() as u64;
        }
        result.is_ok()
    }

    fn region(&mut self, refs: &[GrantRef]) -> io::Result<Arc<Region>> {
        self.refs.clear();
        self.refs.extend(refs.iter().map(|gref| gref.0));
        let offset = self.device.map_grant_refs(self.domain.0, &self.refs)?;
        let result = Region::map_exact(self.device.as_fd(), offset, refs.len() * PAGE);
        self.device.unmap_grant_refs(offset, refs.len());
        self.counters.calls += self.calls_per_run;
        result.map_err(os_error)
    }
}

/// Returns the length of the first run of consecutive slots, at most `most`.
fn run_len(mut slots: impl Iterator<Item = usize>, most: usize) -> usize {
    let Some(mut last) = slots.next() else { return 0 };
    let mut len = 1;
    for slot in slots.take(most - 1) {
        if last.checked_add(1) != Some(slot) {
            break;
        }
        (last, len) = (slot, len + 1);
    }
    len
}

impl Foreign for RealForeign {
    fn domain(&self) -> DomId {
        self.domain
    }

    fn map_region(&mut self, refs: &[GrantRef]) -> Result<Arc<Region>, GrantError> {
        let error = match self.region(refs) {
            Ok(region) => {
                self.counters.mapped += refs.len() as u64;
                return Ok(region);
            }
            // The kernel returns this for a bad reference, without saying which one it was.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => error,
            Err(error) => return Err(GrantError::Os(error)),
        };
        let bad = refs.iter().find(|gref| self.region(std::slice::from_ref(gref)).is_err());
        Err(bad.map_or(GrantError::Os(error), |gref| GrantError::BadRef(*gref)))
    }

    fn map(
        &mut self,
        window: &mut Window,
        pages: &[(usize, GrantRef)],
        access: Access,
        mapped: &mut Vec<bool>,
    ) {
        mapped.clear();
        while mapped.len() < pages.len() {
            let rest = &pages[mapped.len()..];
            let run = &rest[..run_len(rest.iter().map(|(slot, _)| *slot), self.run)];
            let whole = self.map_run(window, run[0].0, run, access);
            if whole || run.len() == 1 {
                mapped.extend(run.iter().map(|_| whole));
            } else {
                for page in run {
                    let done = self.map_run(window, page.0, std::slice::from_ref(page), access);
                    mapped.push(done);
                }
            }
        }
    }

    fn unmap(&mut self, window: &mut Window, slots: &[usize]) {
        let mut rest = slots;
        while let Some(first) = rest.first().copied() {
            let len = run_len(rest.iter().copied(), usize::MAX);
            let pages = rest[..len].iter().filter(|slot| window.is_mapped(**slot)).count();
            // A page that cannot be unmapped stays in the window and goes with it.
            if window.unmap(first, len).is_ok() {
                self.counters.unmapped += pages as u64;
                self.counters.calls += self.calls_per_run;
            }
            rest = &rest[len..];
        }
    }

    fn copy(&mut self, segments: &mut [CopySegment<'_>]) -> io::Result<()> {
        let copies = segments.iter().map(|segment| {
            let local = match &segment.local {
                Local::To(slice) => CopyLocal::To(*slice),
                Local::From(slice) => CopyLocal::From(*slice),
            };
            Copy { gref: segment.gref.0, offset: segment.offset, local }
        });
        let result = self.batch.run(&self.device, self.domain.0, copies);
        segments.iter_mut().for_each(|segment| segment.done = false);
        for (segment, done) in segments.iter_mut().zip(self.batch.done()) {
            segment.done = done;
            if done {
                let len = match &segment.local {
                    Local::To(slice) => slice.len(),
                    Local::From(slice) => slice.len(),
                };
                self.counters.copies += 1;
                self.counters.copied_bytes += len as u64;
            }
        }
        self.counters.calls += result?;
        Ok(())
    }

    fn counters(&self) -> ForeignCounters {
        self.counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_slots_side_by_side() {
        let len = |slots: &[usize], most| run_len(slots.iter().copied(), most);
        assert_eq!((len(&[], 4), len(&[7], 4), len(&[7, 8, 9, 11], 4)), (0, 1, 3));
        assert_eq!((len(&[7, 8, 9], 2), len(&[7, 8], 1), len(&[8, 7], 4), len(&[7, 7], 4)), (2, 1, 1, 1));
        assert_eq!(len(&[usize::MAX, 0], 4), 1);
    }
}
