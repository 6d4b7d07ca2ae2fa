//! What a firewall has counted: for each rule, for each default, and for what no rule is asked about.
//!
//! Each worker has a copy of the counters, which it alone writes, with relaxed stores; whoever wants to know adds them up.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::policy::{BY_DEFAULT, OTHER_NAME};

/// The counts of one rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Flows that were opened by it or, if it denies, packets that would have opened one.
    pub flows: u64,
    /// Frames of these flows.
    pub packets: u64,
    /// Bytes of these frames.
    pub bytes: u64,
}

/// The counters of a firewall, for a policy with a fixed number of rules.
#[derive(Debug)]
pub(crate) struct Counters {
    workers: Box<[Box<[Cell]>]>,
}

/// Counts of one rule in one worker, which are in one cache line where the writer goes on to the next frame of a flow.
#[derive(Debug, Default)]
struct Cell {
    flows: AtomicU64,
    packets: AtomicU64,
    bytes: AtomicU64,
}

/// Counters beside those of rules: the two defaults, and what passes or not whatever the rules are.
const BESIDE: usize = 5;

/// What is counted though no rule was asked: frames that pass always, and odd ones.
pub(crate) const ALWAYS: u16 = u16::MAX - 2;
pub(crate) const ODD: u16 = u16::MAX - 3;

impl Counters {
    pub(crate) fn new(workers: usize, rules: usize) -> Counters {
        let cells = || (0..rules + BESIDE).map(|_| Cell::default()).collect();
        Counters { workers: (0..workers.max(1)).map(|_| cells()).collect() }
    }

    /// Counts a frame of a rule's. Only the thread of `worker` calls it.
    #[inline]
    pub(crate) fn count(&self, worker: usize, rule: u16, opened: bool, bytes: u64) {
        let Some(cells) = self.workers.get(worker) else { return };
        // Rules come first, and what has a number of its own behind them.
        let cell = match cells.get(usize::from(rule)) {
            Some(cell) if usize::from(rule) < cells.len() - BESIDE => Some(cell),
            _ => cells.get(index(rule, cells.len() - BESIDE)),
        };
        let Some(cell) = cell else { return };
        let add = |counter: &AtomicU64, number: u64| {
            counter.store(counter.load(Ordering::Relaxed).wrapping_add(number), Ordering::Relaxed);
        };
        if opened {
            add(&cell.flows, 1);
        }
        add(&cell.packets, 1);
        add(&cell.bytes, bytes);
    }

    /// Returns what all workers have counted of a rule.
    pub(crate) fn of(&self, rule: u16) -> Counts {
        let cells = self.workers.iter().filter_map(|cells| cells.get(index(rule, cells.len() - BESIDE)));
        cells.fold(Counts::default(), |sum, cell| Counts {
            flows: sum.flows + cell.flows.load(Ordering::Relaxed),
            packets: sum.packets + cell.packets.load(Ordering::Relaxed),
            bytes: sum.bytes + cell.bytes.load(Ordering::Relaxed),
        })
    }
}

/// Where a rule's counters are: behind those of all rules the ones that belong to none.
#[inline]
fn index(rule: u16, rules: usize) -> usize {
    match rule {
        rule if rule == BY_DEFAULT[0] => rules,
        rule if rule == BY_DEFAULT[1] => rules + 1,
        ALWAYS => rules + 2,
        ODD => rules + 3,
        OTHER_NAME => rules + 4,
        rule => rule.into(),
    }
}
