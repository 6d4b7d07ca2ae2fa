//! Measures a look-up by how many grants are mapped: in the back end's cache, and in a tree as the original had it.

use std::collections::BTreeMap;
use std::fmt;
use std::hint::black_box;

use fastrand::Rng;
use ringferry_xen::grant::{Access, GrantRef};
use ringferry_xen_net::netback::cache::{Cache, LookupResult, MAX_SLOTS, Slot};

use crate::experiment::{RowError, Run, Sample};
use crate::experiments::lookups::{BURST, time};
use crate::experiments::txmap::clock::pin;
use crate::labels::Labels;

/// Numbers of grants that are mapped.
pub(super) const ENTRIES: [usize; 5] = [64, 1024, 8192, 32_768, MAX_SLOTS];

/// Pages that a ring goes round: what is used at a time, however many are mapped.
const RING: usize = 256;

/// The structure in which the grants are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Structure {
    /// The back end's cache: a hash table, counted references, and the order of use.
    Cache,
    /// A search tree with nothing but slots in it.
    Tree,
}

/// The grants that are looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Used {
    /// As many as a ring has.
    Ring,
    /// All grants, at random.
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lookup {
    structure: Structure,
    used: Used,
    entries: usize,
}

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Structure::Cache => "cache",
            Structure::Tree => "tree",
        })
    }
}

impl Lookup {
    pub(super) fn all() -> impl Iterator<Item = Lookup> {
        [Used::Ring, Used::All].into_iter().flat_map(|used| {
            [Structure::Cache, Structure::Tree].into_iter().flat_map(move |structure| {
                ENTRIES.into_iter().map(move |entries| Lookup { structure, used, entries })
            })
        })
    }

    pub(super) fn labels(&self) -> Labels {
        let used = match self.used {
            Used::Ring => "a-ring",
            Used::All => "all",
        };
        let labels = Labels::new().with("test", "look-up").with("used", used);
        labels.with("structure", self.structure).with("mapped", self.entries)
    }

    pub(super) fn group(&self) -> &'static str {
        match self.used {
            Used::Ring => "look-ups, a ring of pages in use",
            Used::All => "look-ups, all pages in use",
        }
    }

    /// The same with the fewest entries; of trees, the cache with as many.
    pub(super) fn baseline(&self) -> Option<Lookup> {
        let first = match self.structure {
            Structure::Cache => Lookup { entries: ENTRIES[0], ..*self },
            Structure::Tree => Lookup { structure: Structure::Cache, ..*self },
        };
        (first != *self).then_some(first)
    }

    /// References in the order they are looked up: as they are, of pages that were granted together, mixed.
    fn order(&self, seed: u64) -> Vec<GrantRef> {
        let mut all: Vec<_> = (8..8 + self.entries as u32).map(GrantRef).collect();
        Rng::with_seed(seed).shuffle(&mut all);
        if self.used == Used::Ring {
            all.truncate(RING);
        }
        all
    }
}

/// Measures one run, in nanoseconds of a look-up with the release that belongs to it: a burst is looked up together, then released
/// together.
pub(super) fn measure(row: &Lookup, run: &Run<'_>) -> Result<Sample, RowError> {
    pin(run.cpu(0))?;
    let order = row.order(run.seed);
    let lost = "a grant that is mapped was not found";
    let mut slots = Vec::with_capacity(BURST);
    match row.structure {
        Structure::Cache => {
            let mut cache = Cache::new(row.entries);
            for gref in 8..8 + row.entries as u32 {
                cache
                    .pin(GrantRef(gref), Access::Write)
                    .map_err(|why| RowError::failed(format!("{why:?}")))?;
            }
            // Set loose and learnt, so that look-ups keep the order of use, too.
            for gref in 8..8 + row.entries as u32 {
                let slot = cache.unpin(GrantRef(gref)).map_err(|why| RowError::failed(format!("{why:?}")))?;
                cache.free(slot);
                while !matches!(cache.lookup(GrantRef(gref), Access::Write, true), LookupResult::New { .. }) {
                }
                let slot = match cache.lookup(GrantRef(gref), Access::Write, true) {
                    LookupResult::Hit(slot) => slot,
                    other => return Err(RowError::failed(format!("{gref} is {other:?}"))),
                };
                cache.release(slot);
                cache.release(slot);
            }
            time(run, &order, lost, |burst| {
                slots.clear();
                for gref in burst {
                    if let LookupResult::Hit(slot) = cache.lookup(*gref, Access::Write, true) {
                        slots.push(slot);
                    }
                }
                for slot in &slots {
                    black_box(cache.release(*slot));
                }
                slots.len() == BURST
            })
        }
        Structure::Tree => {
            let tree: BTreeMap<GrantRef, Slot> =
                (0..row.entries as u32).map(|at| (GrantRef(8 + at), at as Slot)).collect();
            time(run, &order, lost, |burst| {
                slots.clear();
                for gref in burst {
                    slots.extend(tree.get(gref));
                }
                black_box(&mut slots).len() == BURST
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Stop;
    use std::time::Duration;

    #[test]
    fn every_grant_is_found_however_many_there_are() {
        let stop = Stop::new();
        let run = Run { seconds: Duration::ZERO, seed: 1, round: 1, sample: 1, cpus: &[], stop: &stop };
        for row in Lookup::all() {
            assert!(measure(&row, &run).unwrap().value > 0.0, "{row:?}");
            assert!(row.baseline().is_none_or(|first| Lookup::all().any(|other| other == first)));
            let mut order = row.order(7);
            order.sort();
            order.dedup();
            assert_eq!(order.len(), if row.used == Used::Ring { RING.min(row.entries) } else { row.entries });
        }
    }
}
