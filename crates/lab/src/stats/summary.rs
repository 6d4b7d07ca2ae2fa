//! Statistics of one set of values.

use serde::{Deserialize, Serialize};

/// N, extremes, median, mean and standard deviation of some values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Summary {
    pub n: usize,
    pub min: f64,
    pub max: f64,
    /// The middle one, or the mean of the two in the middle.
    pub median: f64,
    pub mean: f64,
    /// Standard deviation of the sample (n - 1); 0 for a single value.
    pub stddev: f64,
}

impl Summary {
    /// Of all finite `values`; `None` when there are none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let sorted = sorted(values);
        let n = sorted.len();
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let mean = sorted.iter().sum::<f64>() / n as f64;
        // Two passes: the difference of two large sums would lose what matters.
        let squares: f64 = sorted.iter().map(|value| (value - mean) * (value - mean)).sum();
        let stddev = if n > 1 { (squares / (n - 1) as f64).sqrt() } else { 0.0 };
        Some(Self { n, min, max, median: quantile(&sorted, 0.5), mean, stddev })
    }

    /// The variance of the sample.
    pub fn variance(&self) -> f64 {
        self.stddev * self.stddev
    }
}

/// First quartile, median and third quartile, interpolated (R's type 7); `None` without values.
pub fn quartiles(values: &[f64]) -> Option<[f64; 3]> {
    let sorted = sorted(values);
    (!sorted.is_empty()).then(|| [0.25, 0.5, 0.75].map(|p| quantile(&sorted, p)))
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

fn quantile(sorted: &[f64], p: f64) -> f64 {
    let at = p * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    // Half of the sum for a median, to the last bit as everybody computes it.
    if at.fract() == 0.5 { (low + high) / 2.0 } else { low + (high - low) * at.fract() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_what_ministat_prints() {
        let summary = Summary::of(&[50.0, 200.0, 150.0, 400.0, 750.0, 400.0, 150.0]).unwrap();
        assert_eq!((summary.n, summary.min, summary.max), (7, 50.0, 750.0));
        assert_eq!((summary.median, summary.mean), (200.0, 300.0));
        assert!((summary.stddev - 238.047_61).abs() < 1e-5);
        let even = Summary::of(&[350.0, 40.0, 220.0, 500.0]).unwrap();
        assert_eq!(even.median, 285.0);
    }

    #[test]
    fn few_or_useless_values_are_no_problem() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[f64::NAN]), None);
        let one = Summary::of(&[4.0, f64::INFINITY]).unwrap();
        assert_eq!((one.n, one.median, one.stddev), (1, 4.0, 0.0));
    }

    #[test]
    fn large_numbers_keep_their_small_deviation() {
        let summary = Summary::of(&[1e9, 1e9 + 1.0, 1e9 + 2.0]).unwrap();
        assert_eq!(summary.stddev, 1.0);
    }

    #[test]
    fn quartiles_are_interpolated() {
        assert_eq!(quartiles(&[4.0, 1.0, 3.0, 2.0]), Some([1.75, 2.5, 3.25]));
        assert_eq!(quartiles(&[7.0]), Some([7.0; 3]));
        assert_eq!(quartiles(&[]), None);
    }
}
