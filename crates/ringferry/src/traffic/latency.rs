//! Latencies as they are told.

use ringferry_lab::histogram::Histogram;
use serde::{Deserialize, Serialize};

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

impl Latency {
    /// What was counted, or nothing when nothing was.
    pub fn of(histogram: &Histogram) -> Option<Latency> {
        let percentile = |percent| histogram.percentile(percent) as f64 / 1e3;
        (histogram.total() > 0).then(|| Latency {
            p50: percentile(50.0),
            p90: percentile(90.0),
            p99: percentile(99.0),
            p999: percentile(99.9),
            max: histogram.max() as f64 / 1e3,
            mean: histogram.mean() / 1e3,
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
