//! Fits a line through what a packet costs against the distance of the processors, by weighted least squares.
//!
//! The slope says how many round trips of a cache line a packet waits for, whatever the machine; the intercept is what is left at no distance: instructions. A change that
//! saves lines shows in the slope, one that saves instructions in the intercept. Scatter grows with the cost, so a point's weight is 1/cost², of the mean
//! of its class of distance.

use serde::{Deserialize, Serialize};

use super::distribution::Confidence;
use crate::experiment::Better;
use crate::probe::Distance;

/// Points at distances that lie closer together than this say nothing about the slope.
const SPREAD: f64 = 1.5;
/// The fewest points of a line.
const FEWEST: usize = 6;

/// Nanoseconds per packet = intercept + slope · round trip.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Line {
    /// Nanoseconds.
    pub intercept: f64,
    /// Half the width of its interval.
    pub intercept_error: f64,
    /// Round trips per packet.
    pub slope: f64,
    /// Half the width of its interval.
    pub slope_error: f64,
}

/// What a value in `unit` says a packet or buffer costs, in nanoseconds; `None` for units that say no such thing.
pub fn cost(value: f64, unit: &str, better: Better) -> Option<f64> {
    let ns = match (unit, better) {
        ("Mpps", Better::Higher) => 1000.0 / value,
        ("kpps", Better::Higher) => 1e6 / value,
        (unit, Better::Lower) if unit.starts_with("ns") => value,
        _ => return None,
    };
    (ns.is_finite() && ns > 0.0).then_some(ns)
}

impl Line {
    /// Through points of round trip and cost, one for each block; `None` where they are too few or all at about one distance.
    pub fn through(points: &[(f64, f64)], confidence: Confidence) -> Option<Self> {
        let most = points.iter().map(|point| point.0).fold(f64::MIN, f64::max);
        let least = points.iter().map(|point| point.0).fold(f64::MAX, f64::min);
        if points.len() < FEWEST || most < least * SPREAD {
            return None;
        }
        let weight = |x: f64| {
            let like: Vec<f64> = points
                .iter()
                .filter(|point| Distance::of(Some(point.0)) == Distance::of(Some(x)))
                .map(|point| point.1)
                .collect();
            (like.len() as f64 / like.iter().sum::<f64>()).powi(2)
        };
        let weights: Vec<f64> = points.iter().map(|point| weight(point.0)).collect();
        let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
            std::iter::zip(points, &weights).map(|(&(x, y), w)| w * of(x, y)).sum()
        };
        let (total, x, y) = (sum(&|_, _| 1.0), sum(&|x, _| x), sum(&|_, y| y));
        let (x, y) = (x / total, y / total);
        let spread = sum(&|at, _| (at - x) * (at - x));
        let slope = sum(&|at, cost| (at - x) * (cost - y)) / spread;
        let intercept = y - slope * x;
        let df = points.len() as f64 - 2.0;
        let variance = sum(&|at, cost| (cost - intercept - slope * at).powi(2)) / df;
        let t = confidence.t(df);
        Some(Self {
            intercept,
            intercept_error: t * (variance * (1.0 / total + x * x / spread)).sqrt(),
            slope,
            slope_error: t * (variance / spread).sqrt(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_on_a_line_are_that_line() {
        let points: Vec<(f64, f64)> =
            [105.0, 110.0, 350.0, 360.0, 1650.0, 1600.0].iter().map(|x| (*x, 30.0 + 0.25 * x)).collect();
        let line = Line::through(&points, Confidence::C95).unwrap();
        assert!((line.intercept - 30.0).abs() < 1e-9 && (line.slope - 0.25).abs() < 1e-12, "{line:?}");
        assert!(line.slope_error < 1e-9 && line.intercept_error < 1e-6);
    }

    #[test]
    fn scatter_widens_the_intervals_around_what_is_true() {
        let noise = [1.02, 0.98, 1.01, 0.99, 1.03, 0.97, 0.99, 1.01, 1.0, 1.0, 0.98, 1.02];
        let points: Vec<(f64, f64)> = std::iter::zip([100.0, 400.0, 1600.0].iter().cycle(), noise)
            .map(|(x, noise)| (*x, (30.0 + 0.25 * x) * noise))
            .collect();
        let line = Line::through(&points, Confidence::C95).unwrap();
        assert!(
            (line.intercept - 30.0).abs() < line.intercept_error && line.intercept_error < 5.0,
            "{line:?}"
        );
        assert!((line.slope - 0.25).abs() < line.slope_error && line.slope_error < 0.03, "{line:?}");
    }

    #[test]
    fn one_distance_makes_no_line() {
        let points: Vec<(f64, f64)> = (0..10).map(|at| (100.0 + f64::from(at), 50.0)).collect();
        assert_eq!(Line::through(&points, Confidence::C95), None);
        assert_eq!(Line::through(&[(100.0, 50.0), (400.0, 80.0)], Confidence::C95), None);
    }

    #[test]
    fn costs_are_known_of_rates_and_times_of_packets_only() {
        assert_eq!(cost(20.0, "Mpps", Better::Higher), Some(50.0));
        assert_eq!(cost(500.0, "kpps", Better::Higher), Some(2000.0));
        assert_eq!(cost(12.0, "ns/buffer", Better::Lower), Some(12.0));
        assert_eq!(cost(12.0, "Gbit/s", Better::Higher), None);
        assert_eq!(cost(0.0, "Mpps", Better::Higher), None);
    }
}
