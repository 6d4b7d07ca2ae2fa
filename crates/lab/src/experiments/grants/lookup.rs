//! What a look-up costs, by how many grants are mapped: in the back end's cache, and in a tree as the original had it.

use std::collections::BTreeMap;
use std::fmt;
use std::hint::black_box;
use std::time::Instant;

use ringferry_xen::grant::{Access, GrantRef};
use ringferry_xen_net::netback::cache::{Cache, Found, MAX_SLOTS, Slot};

use crate::experiment::{RowError, Run, Sample};
use crate::experiments::txmap::clock::pin;
use crate::labels::Labels;

/// Grants that are mapped.
pub(super) const ENTRIES: [usize; 5] = [64, 1024, 8192, 32_768, MAX_SLOTS];

/// Looked up together, then released together, as a burst is.
const BURST: usize = 32;

/// Pages that a ring goes round: what is used at a time, however many are mapped.
const RING: usize = 256;

/// Bursts between two looks at the clock.
const BATCH: usize = 256;

/// What the grants are found in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Structure {
    /// The back end's cache: a hash table, counted references, and the order of use.
    Cache,
    /// A search tree with nothing but slots in it.
    Tree,
}

/// Which of the grants are looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Used {
    /// As many as a ring has.
    Ring,
    /// All of them.
    All,
}

/// A row.
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
        let mut state = seed | 1;
        for last in (1..all.len()).rev() {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            all.swap(last, (state >> 33) as usize % (last + 1));
        }
        if self.used == Used::Ring {
            all.truncate(RING);
        }
        all
    }
}

/// Measures one run, in nanoseconds of a look-up with the release that belongs to it.
pub(super) fn measure(row: &Lookup, run: &Run<'_>) -> Result<Sample, RowError> {
    pin(run.cpu(0))?;
    let order = row.order(run.seed);
    match row.structure {
        Structure::Cache => {
            let mut cache = Cache::new(row.entries);
            for gref in 8..8 + row.entries as u32 {
                cache
                    .fix(GrantRef(gref), Access::Write)
                    .map_err(|why| RowError::failed(format!("{why:?}")))?;
            }
            // Set loose and learnt, so that look-ups keep the order of use, too.
            for gref in 8..8 + row.entries as u32 {
                let slot = cache.unfix(GrantRef(gref)).map_err(|why| RowError::failed(format!("{why:?}")))?;
                cache.free(slot);
                while !matches!(cache.find(GrantRef(gref), Access::Write, true), Found::New { .. }) {}
                let slot = match cache.find(GrantRef(gref), Access::Write, true) {
                    Found::Hit(slot) => slot,
                    other => return Err(RowError::failed(format!("{gref} is {other:?}"))),
                };
                cache.release(slot);
                cache.release(slot);
            }
            time(run, &order, |burst, slots| {
                for gref in burst {
                    if let Found::Hit(slot) = cache.find(*gref, Access::Write, true) {
                        slots.push(slot);
                    }
                }
                for slot in slots.iter() {
                    black_box(cache.release(*slot));
                }
            })
        }
        Structure::Tree => {
            let tree: BTreeMap<GrantRef, Slot> =
                (0..row.entries as u32).map(|at| (GrantRef(8 + at), at as Slot)).collect();
            time(run, &order, |burst, slots| {
                for gref in burst {
                    slots.extend(tree.get(gref));
                }
                black_box(slots);
            })
        }
    }
}

/// Looks bursts up until the time is over.
fn time(
    run: &Run<'_>,
    order: &[GrantRef],
    mut look_up: impl FnMut(&[GrantRef], &mut Vec<Slot>),
) -> Result<Sample, RowError> {
    let mut slots = Vec::with_capacity(BURST);
    let mut bursts = order.chunks_exact(BURST).cycle();
    let mut round = || {
        for _ in 0..BATCH {
            let Some(burst) = bursts.next() else { return false };
            slots.clear();
            look_up(burst, &mut slots);
            if slots.len() != BURST {
                return false;
            }
        }
        true
    };
    // Once round everything first.
    let rounds = (order.len() / (BURST * BATCH)).max(4);
    let lost = || RowError::failed("a grant that is mapped was not found");
    (0..rounds).all(|_| round()).then_some(()).ok_or_else(lost)?;
    let (begin, mut count) = (Instant::now(), 0);
    while begin.elapsed() < run.seconds || count == 0 {
        if run.stopped() {
            return Err(RowError::Stopped);
        }
        if !round() {
            return Err(lost());
        }
        count += BURST * BATCH;
    }
    Ok(Sample::new(begin.elapsed().as_secs_f64() * 1e9 / count as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Stop;
    use std::time::Duration;

    #[test]
    fn every_grant_is_found_however_many_there_are() {
        let stop = Stop::new();
        let run = Run { seconds: Duration::ZERO, seed: 1, round: 1, cpus: &[], stop: &stop };
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
