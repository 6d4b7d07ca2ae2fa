//! How long transactions took: a worker records each of its own in a [`Histogram`], the client merges those of all workers,
//! and the report tells the [`Latency`] of what came out.

use serde::{Deserialize, Serialize};

/// Significant digits that hdrhistogram keeps of a latency: it is told within 1 %, and one worker's counts take 40 KiB.
const DIGITS: u8 = 2;

/// The longest latency that is told apart from longer ones: an hour.
const LONGEST: u64 = 3_600_000_000_000;

/// Counts of latencies in nanoseconds (hdrhistogram), and beside them what is to be exact: the sum and the maximum.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: hdrhistogram::Histogram<u64>,
    sum: u128,
    max: u64,
}

impl Histogram {
    pub fn new() -> Self {
        let counts = hdrhistogram::Histogram::new_with_max(LONGEST, DIGITS);
        Self {
            counts: counts.expect("an hour and two digits are within hdrhistogram's limits"),
            sum: 0,
            max: 0,
        }
    }

    /// Counts one latency.
    #[inline]
    pub fn record(&mut self, nanos: u64) {
        self.counts.saturating_record(nanos);
        self.sum += u128::from(nanos);
        self.max = self.max.max(nanos);
    }

    /// Adds what another one counted.
    pub fn merge(&mut self, other: &Histogram) {
        self.counts.add(&other.counts).expect("all histograms have the same bounds");
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }
}

/// Percentiles of a set of latencies, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// The mean of all.
    pub mean: f64,
}

impl Latency {
    /// Summarizes what was counted; `None` when nothing was.
    pub fn of(histogram: &Histogram) -> Option<Latency> {
        let percentile =
            |percent| histogram.counts.value_at_percentile(percent).min(histogram.max) as f64 / 1e3;
        (!histogram.counts.is_empty()).then(|| Latency {
            p50: percentile(50.0),
            p90: percentile(90.0),
            p99: percentile(99.0),
            p999: percentile(99.9),
            max: histogram.max as f64 / 1e3,
            mean: histogram.sum as f64 / histogram.counts.len() as f64 / 1e3,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_a_uniform_spread() {
        let mut histogram = Histogram::new();
        (1..=100_000).rev().for_each(|micros| histogram.record(1000 * micros));
        let latency = Latency::of(&histogram).unwrap();
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
        (0..998).for_each(|_| histogram.record(50));
        (0..2).for_each(|_| histogram.record(7_000_000));
        let latency = Latency::of(&histogram).unwrap();
        assert_eq!((latency.p50, latency.p99, latency.p999, latency.max), (0.05, 0.05, 7000.0, 7000.0));
    }

    #[test]
    fn merged_histograms_are_one_of_everything() {
        let (mut one, mut two, mut all) = (Histogram::new(), Histogram::new(), Histogram::new());
        for nanos in 1..5000u64 {
            if nanos % 3 == 0 { &mut one } else { &mut two }.record(nanos * nanos);
            all.record(nanos * nanos);
        }
        one.merge(&two);
        assert_eq!(Latency::of(&one), Latency::of(&all));
    }

    #[test]
    fn nothing_recorded_gives_no_latency() {
        assert_eq!(Latency::of(&Histogram::new()), None);
    }
}
