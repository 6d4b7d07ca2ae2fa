//! Latency histogram with a bounded relative error, in the manner of HdrHistogram: each power of two is cut
//! into 64 equal cells, so any 64-bit value is kept within 1.6 % in 30 KiB, and recording is a shift and an
//! increment.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Cells per power of two, as a power of two. 7 would halve the error and double the memory; the spread
/// between runs is far above either.
const CELL_BITS: u32 = 6;
const CELLS: usize = 1 << CELL_BITS;

/// Percentiles of a set of latencies, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Half of the transactions were at most this slow.
    pub p50: f64,
    /// 90 % were at most this slow.
    pub p90: f64,
    /// 99 % were at most this slow.
    pub p99: f64,
    /// 99.9 % were at most this slow.
    pub p999: f64,
    /// The slowest, exact.
    pub max: f64,
    /// The arithmetic mean, exact.
    pub mean: f64,
}

/// Counts durations by their length in nanoseconds.
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum: u128,
    max: u64,
}

impl Histogram {
    /// An empty histogram.
    pub fn new() -> Self {
        Self { counts: vec![0; (64 - CELL_BITS as usize + 1) * CELLS], total: 0, sum: 0, max: 0 }
    }

    /// Counts one duration.
    pub fn record(&mut self, duration: Duration) {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.counts[cell(nanos)] += 1;
        self.total += 1;
        self.sum += u128::from(nanos);
        self.max = self.max.max(nanos);
    }

    /// Counts what another one counted.
    pub fn merge(&mut self, other: &Histogram) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        self.total += other.total;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// The smallest duration in nanoseconds that at least `part` (0 to 1) of the recorded ones do not
    /// exceed, rounded up to its cell; 0 when empty.
    fn quantile(&self, part: f64) -> u64 {
        let wanted = ((self.total as f64 * part).ceil() as u64).max(1);
        let mut passed = 0;
        for (cell, count) in self.counts.iter().enumerate() {
            passed += count;
            if passed >= wanted {
                return highest(cell).min(self.max);
            }
        }
        self.max
    }

    /// The percentiles, or nothing when nothing was recorded.
    pub fn latency(&self) -> Option<Latency> {
        let micros = |nanos: u64| nanos as f64 / 1e3;
        (self.total > 0).then(|| Latency {
            p50: micros(self.quantile(0.5)),
            p90: micros(self.quantile(0.9)),
            p99: micros(self.quantile(0.99)),
            p999: micros(self.quantile(0.999)),
            max: micros(self.max),
            mean: self.sum as f64 / self.total as f64 / 1e3,
        })
    }
}

/// The cell that counts `value`.
fn cell(value: u64) -> usize {
    if value < CELLS as u64 {
        return value as usize;
    }
    let shift = value.ilog2() - CELL_BITS;
    (shift as usize + 1) * CELLS + (value >> shift) as usize - CELLS
}

/// The highest value that `cell` counts.
fn highest(cell: usize) -> u64 {
    if cell < CELLS {
        return cell as u64;
    }
    let shift = cell / CELLS - 1;
    let first = ((cell % CELLS + CELLS) as u64) << shift;
    first + ((1 << shift) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_contiguous_and_within_the_promised_error() {
        for value in (0..10_000).chain(
            (14..64).flat_map(|bit| [1 << bit, (1 << bit) - 1, (1 << bit) + (1 << (bit - 3)), u64::MAX]),
        ) {
            let top = highest(cell(value));
            assert!(top >= value && (top - value) as f64 <= value as f64 / 64.0, "{value} -> {top}");
            assert!(top == u64::MAX || cell(top + 1) == cell(value) + 1, "{value}");
        }
        assert!(cell(u64::MAX) < Histogram::new().counts.len());
    }

    #[test]
    fn percentiles_of_a_uniform_spread() {
        let mut histogram = Histogram::new();
        (1..=100_000).rev().for_each(|micros| histogram.record(Duration::from_micros(micros)));
        let latency = histogram.latency().unwrap();
        for (got, expected) in [
            (latency.p50, 50_000.0),
            (latency.p90, 90_000.0),
            (latency.p99, 99_000.0),
            (latency.p999, 99_900.0),
        ] {
            assert!(got >= expected && got <= expected * 1.016, "{got} for {expected}");
        }
        assert_eq!((latency.max, latency.mean), (100_000.0, 50_000.5));
    }

    #[test]
    fn one_outlier_in_a_thousand_is_above_p99_and_within_the_maximum() {
        let mut histogram = Histogram::new();
        (0..998).for_each(|_| histogram.record(Duration::from_nanos(50)));
        (0..2).for_each(|_| histogram.record(Duration::from_millis(7)));
        let latency = histogram.latency().unwrap();
        assert_eq!((latency.p50, latency.p99, latency.p999, latency.max), (0.05, 0.05, 7000.0, 7000.0));
    }

    #[test]
    fn merged_histograms_are_one_of_everything() {
        let (mut one, mut two, mut all) = (Histogram::new(), Histogram::new(), Histogram::new());
        for nanos in 1..5000u64 {
            let duration = Duration::from_nanos(nanos * nanos);
            if nanos % 3 == 0 { &mut one } else { &mut two }.record(duration);
            all.record(duration);
        }
        one.merge(&two);
        assert_eq!(one.latency(), all.latency());
    }

    #[test]
    fn nothing_recorded_gives_no_latency() {
        assert_eq!(Histogram::new().latency(), None);
    }
}
