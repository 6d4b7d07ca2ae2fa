//! Budget of the pages of other domains that may be mapped: each is a mapping of its own, and the kernel
//! allows a process only so many of them (`vm.max_map_count`). Beyond that nothing could be mapped at all,
//! not even a new guest's memory.

/// The kernel's limit, where it cannot be read (`DEFAULT_MAX_MAP_COUNT`).
const DEFAULT: usize = 65530;

/// The part of the limit, as a divisor, that is left to everything else.
const RESERVE: usize = 4;

/// Mappings of a queue beside its window: two rings, and the edges of the window.
const RINGS: usize = 4;

/// A queue that may keep fewer pages than this mapped keeps none: most of its packets would be copied anyway.
const USEFUL: usize = 64;

/// Pages that may be mapped, in all and so far. Owned by the entry.
#[derive(Debug)]
pub(crate) struct MappingBudget {
    limit: usize,
    taken: usize,
}

impl MappingBudget {
    /// Makes the budget of this system, from `vm.max_map_count`.
    pub(crate) fn of_system() -> Self {
        let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count");
        Self::new(limit.ok().and_then(|text| text.trim_end().parse().ok()).unwrap_or(DEFAULT))
    }

    fn new(limit: usize) -> Self {
        Self { limit: limit - limit / RESERVE, taken: 0 }
    }

    /// Returns the upper bound on mapped pages.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the pages set aside for the queues that are served now.
    pub(crate) fn taken(&self) -> usize {
        self.taken
    }

    /// Sets aside pages for `queues` queues, and returns how many each may have: `wanted`, or an equal part
    /// of the rest; 0 if that is too few to be of use.
    pub(crate) fn take(&mut self, queues: usize, wanted: usize) -> usize {
        let left = (self.limit - self.taken) / queues.max(1);
        let pages = wanted.min(left.saturating_sub(RINGS));
        if pages < USEFUL.min(wanted) {
            return 0;
        }
        self.taken += Self::cost(queues, pages);
        pages
    }

    /// Returns pages that [`MappingBudget::take`] has set aside.
    pub(crate) fn give_back(&mut self, queues: usize, pages: usize) {
        if pages > 0 {
            self.taken -= Self::cost(queues, pages);
        }
    }

    fn cost(queues: usize, pages: usize) -> usize {
        queues * (pages + RINGS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_get_what_is_left_or_nothing() {
        let mut budget = MappingBudget::new(4000);
        assert_eq!(budget.limit(), 3000);
        assert_eq!(budget.take(2, 1024), 1024);
        assert_eq!(budget.take(1, 1024), 940);
        assert_eq!(budget.taken(), 3000);
        assert_eq!(budget.take(1, 1024), 0);
        assert_eq!(budget.take(1, 1), 0);
        budget.give_back(1, 940);
        assert_eq!(budget.take(8, 1024), 114);
        budget.give_back(8, 114);
        assert_eq!(budget.take(1, 10), 10);
        budget.give_back(1, 10);
        budget.give_back(2, 1024);
        budget.give_back(3, 0);
        assert_eq!(budget.taken(), 0);
    }
}
