//! How long things took, in nanoseconds: a histogram with a bounded relative error, in the manner of HdrHistogram. Each
//! power of two is cut into 64 cells, so any value is kept within 1.6 % in 30 KiB, and recording is a shift and an increment.

/// Cells of a power of two, as a power of two. 7 would halve the error and double the memory; the spread between runs is
/// far above either.
const CELL_BITS: u32 = 6;
const CELLS: usize = 1 << CELL_BITS;

/// Counts by length.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum: u128,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

impl Histogram {
    /// An empty one.
    pub fn new() -> Self {
        Self { counts: vec![0; (64 - CELL_BITS as usize + 1) * CELLS], total: 0, sum: 0, max: 0 }
    }

    /// Counts one.
    #[inline]
    pub fn record(&mut self, nanos: u64) {
        self.counts[cell(nanos)] += 1;
        self.total += 1;
        self.sum += u128::from(nanos);
        self.max = self.max.max(nanos);
    }

    /// Adds what another one counted.
    pub fn merge(&mut self, other: &Histogram) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        self.total += other.total;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// How many were counted.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The longest, exact.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The arithmetic mean, exact; 0 when none was counted.
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.total.max(1) as f64
    }

    /// The least time that so many per cent took no longer than, rounded up to its cell's end; 0 when none was counted.
    pub fn percentile(&self, percent: f64) -> u64 {
        let rank = ((percent / 100.0 * self.total as f64).ceil() as u64).clamp(1, self.total.max(1));
        let mut below = 0;
        for (at, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= rank {
                return last(at).min(self.max);
            }
        }
        self.max
    }
}

/// The cell of a value: exact below [`CELLS`].
#[inline]
fn cell(nanos: u64) -> usize {
    let shift = (u64::BITS - CELL_BITS).saturating_sub(nanos.leading_zeros() + 1) as usize;
    // The highest bit and the CELL_BITS behind it; 0 to 2 * CELLS - 1.
    shift * CELLS + (nanos >> shift) as usize
}

/// The largest value of a cell.
fn last(cell: usize) -> u64 {
    let shift = (cell / CELLS).saturating_sub(1);
    let top = (cell - shift * CELLS) as u128;
    (((top + 1) << shift) - 1).min(u128::from(u64::MAX)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_follow_each_other_and_are_narrow() {
        let mut before = None;
        for nanos in (0..5000).chain((13..63).flat_map(|bit| [(1 << bit) - 1, 1 << bit, 3 << (bit - 1)])) {
            let (at, end) = (cell(nanos), last(cell(nanos)));
            assert!(end >= nanos && (end - nanos) as f64 <= nanos as f64 / CELLS as f64, "{nanos} {end}");
            assert!(before.is_none_or(|before| at >= before), "{nanos}");
            before = (nanos < 5000).then_some(at);
        }
        for value in (14..64).flat_map(|bit| [1 << bit, (1 << bit) + (1 << (bit - 3)), (1 << bit) - 1]) {
            let top = last(cell(value));
            assert!(top >= value && (top - value) as f64 <= value as f64 / 64.0, "{value} -> {top}");
            assert!(top == u64::MAX || cell(top + 1) == cell(value) + 1, "{value}");
        }
        assert!(cell(u64::MAX) < Histogram::new().counts.len());
        assert_eq!(last(cell(u64::MAX)), u64::MAX);
    }

    #[test]
    fn percentiles_are_those_of_the_values_within_a_cell() {
        let mut histogram = Histogram::new();
        (1..=1000).for_each(|nanos| histogram.record(1000 * nanos));
        for (percent, exact) in [(50.0, 500_000), (99.0, 990_000), (99.9, 999_000), (100.0, 1_000_000)] {
            let found = histogram.percentile(percent);
            assert!(found >= exact && found as f64 <= exact as f64 * 1.016, "{percent}: {found}");
        }
        let mut other = Histogram::new();
        other.record(7_000_000);
        other.merge(&histogram);
        assert_eq!((other.total(), other.max(), other.percentile(100.0)), (1001, 7_000_000, 7_000_000));
        assert_eq!((Histogram::new().percentile(99.0), Histogram::new().mean()), (0, 0.0));
    }
}
