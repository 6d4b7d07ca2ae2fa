//! Compares a row with its baseline by what they did in the same blocks: the effect, its interval, and what is proven.
//!
//! A block has both sides measured a moment apart, at one distance of the processors, in an order that runs backwards from the middle (ABBA), so that a steady drift
//! cancels. Its effect is the mean of ln(row) less the mean of ln(baseline), so whatever made both fourfold slower is gone; where a value is
//! not positive, it is the plain difference of the means. The effect of all blocks is their mean. Its interval is a *stratified bootstrap over blocks*: blocks
//! are drawn within their class of distance. Resampled residuals are widened by √(n/(n-1)) and the tails taken from Student's t, as a bootstrap of few
//! values is too narrow (the expanded percentile interval; Hesterberg, "What Teachers Should Know About the Bootstrap", 2015).
//!
//! A difference counts as *proven* when the interval excludes zero and *Wilcoxon's signed-rank test* rejects at the same level, whose level is exact for any
//! symmetric scatter: the verdict is never bolder than either. On simulated machines (tests/floating.rs) the bootstrap alone is wrong about a row and itself in 5 to 6 of
//! 100 sessions, both together in 2 to 4, and they find nearly as much. With fewer than [`fewest`] blocks all of them agree by chance too often.

use fastrand::Rng;
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal};

use super::compare::Verdict;
use super::distribution::Confidence;
use crate::experiment::Better;
use crate::probe::Distance;

/// Bootstrap samples for an interval.
const RESAMPLES: usize = 4000;
/// Where the bootstrap starts from: the same values have the same interval.
const SEED: u64 = 1;
/// A class of distance with fewer blocks than this has no spread of its own: its blocks are drawn together with those of the class that was met most.
const STRATUM: usize = 3;
/// The signed-rank test is exact up to so many blocks, and normally distributed above.
const EXACT: usize = 60;

/// The values of both sides in one block.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    pub distance: Distance,
    pub row: Vec<f64>,
    pub baseline: Vec<f64>,
}

/// What an effect is measured in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// Row over baseline, by logarithms.
    Ratio,
    /// Row less baseline, in their unit: some value was not positive.
    Difference,
}

impl Scale {
    /// The value where the row is as its baseline.
    pub fn none(self) -> f64 {
        match self {
            Self::Ratio => 1.0,
            Self::Difference => 0.0,
        }
    }
}

/// An effect with its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Effect {
    /// Number of blocks.
    pub blocks: usize,
    pub value: f64,
    pub low: f64,
    pub high: f64,
    /// Two-sided probability of Wilcoxon's signed-rank test that blocks without a difference are as one-sided as these.
    pub p: f64,
}

impl Effect {
    /// Returns true if the value is proven to be another than `none`.
    fn proven(&self, none: f64, confidence: Confidence) -> bool {
        (self.low > none || self.high < none) && self.p <= alpha(confidence)
    }

    fn on(self, scale: Scale) -> Self {
        let to = |value: f64| match scale {
            Scale::Ratio => value.exp(),
            Scale::Difference => value,
        };
        Self { value: to(self.value), low: to(self.low), high: to(self.high), ..self }
    }
}

/// The effect at one distance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct AtDistance {
    pub distance: Distance,
    #[serde(flatten)]
    pub effect: Effect,
}

/// A row against its baseline, block by block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Paired {
    pub scale: Scale,
    /// Over all blocks.
    pub effect: Effect,
    /// Of each distance that was met in two blocks or more, nearest first.
    pub distances: Vec<AtDistance>,
}

/// The fewest blocks that prove anything: if there is no difference, that all of so many fall on one side is as rare as the level allows.
pub fn fewest(confidence: Confidence) -> usize {
    (2..)
        .find(|blocks| 0.5f64.powi(blocks - 1) <= alpha(confidence))
        .map_or(usize::MAX, |blocks| blocks as usize)
}

/// The probability of a difference where there is none that is good enough.
fn alpha(confidence: Confidence) -> f64 {
    // Of five blocks all fall on one side in exactly one of 16 sessions: not lost to rounding.
    1.0 - confidence.percent() / 100.0 + 1e-12
}

impl Paired {
    /// Compares what was measured in the same blocks; `None` without two blocks.
    pub fn new(pairs: &[Pair], confidence: Confidence) -> Option<Self> {
        let positive = |values: &[f64]| values.iter().all(|value| *value > 0.0);
        let ratio = pairs.iter().all(|pair| positive(&pair.row) && positive(&pair.baseline));
        let scale = if ratio { Scale::Ratio } else { Scale::Difference };
        let mut strata: Vec<(Distance, Vec<f64>)> = Vec::new();
        for pair in pairs {
            let effect = level(&pair.row, scale)? - level(&pair.baseline, scale)?;
            match strata.iter_mut().find(|(distance, _)| *distance == pair.distance) {
                Some((_, effects)) => effects.push(effect),
                None => strata.push((pair.distance, vec![effect])),
            }
        }
        strata.sort_by_key(|(distance, _)| *distance);
        let distances = strata
            .iter()
            .filter_map(|(distance, effects)| {
                let effect = bootstrap(&[effects], confidence)?.on(scale);
                Some(AtDistance { distance: *distance, effect })
            })
            .collect();
        let strata = drawn_together(strata.into_iter().map(|(_, effects)| effects).collect());
        let strata: Vec<&Vec<f64>> = strata.iter().collect();
        Some(Self { scale, effect: bootstrap(&strata, confidence)?.on(scale), distances })
    }

    /// The verdict at the level of the intervals.
    pub fn verdict(&self, better: Better, confidence: Confidence) -> Verdict {
        if self.effect.blocks < fewest(confidence) {
            return Verdict::TooFewRuns;
        }
        let none = self.scale.none();
        let proven = |effect: &Effect| {
            effect.proven(none, confidence).then_some((effect.value > none) == (better == Better::Higher))
        };
        let at: Vec<bool> = self.distances.iter().filter_map(|at| proven(&at.effect)).collect();
        if at.contains(&true) && at.contains(&false) {
            return Verdict::DiffersByDistance;
        }
        match proven(&self.effect) {
            None => Verdict::NoDifferenceProven,
            Some(true) => Verdict::Faster,
            Some(false) => Verdict::Slower,
        }
    }
}

/// The mean of one side of a block, on the scale of the comparison; `None` without values.
fn level(values: &[f64], scale: Scale) -> Option<f64> {
    let on = |value: f64| match scale {
        Scale::Ratio => value.ln(),
        Scale::Difference => value,
    };
    (!values.is_empty()).then(|| values.iter().map(|value| on(*value)).sum::<f64>() / values.len() as f64)
}

/// The strata, with those that are too small for a spread of their own put into the largest.
fn drawn_together(strata: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    let (mut large, small): (Vec<_>, Vec<_>) =
        strata.into_iter().partition(|effects| effects.len() >= STRATUM);
    match large.iter_mut().max_by_key(|effects| effects.len()) {
        Some(largest) => largest.extend(small.into_iter().flatten()),
        None => large.push(small.into_iter().flatten().collect()),
    }
    large
}

/// The mean of all and its interval; `None` if there are not two values to a stratum.
fn bootstrap(strata: &[&Vec<f64>], confidence: Confidence) -> Option<Effect> {
    if strata.is_empty() || strata.iter().any(|effects| effects.len() < 2) {
        return None;
    }
    let n: usize = strata.iter().map(|effects| effects.len()).sum();
    let value = strata.iter().flat_map(|effects| effects.iter()).sum::<f64>() / n as f64;
    let residuals: Vec<Vec<f64>> = strata
        .iter()
        .map(|effects| {
            let of = effects.len() as f64;
            let mean = effects.iter().sum::<f64>() / of;
            effects.iter().map(|effect| (effect - mean) * (of / (of - 1.0)).sqrt()).collect()
        })
        .collect();
    let tail = Normal::standard().cdf(-confidence.t((n - strata.len()) as f64));
    let mut random = Rng::with_seed(SEED);
    let mut means: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let drawn = |residuals: &Vec<f64>| -> f64 {
                residuals.iter().map(|_| residuals[random.usize(..residuals.len())]).sum()
            };
            residuals.iter().map(drawn).sum::<f64>() / n as f64
        })
        .collect();
    means.sort_by(f64::total_cmp);
    let at = ((tail * RESAMPLES as f64) as usize).min(RESAMPLES / 2);
    let p = signed_rank(strata.iter().flat_map(|effects| effects.iter().copied()).collect());
    Some(Effect { blocks: n, value, low: value + means[at], high: value + means[RESAMPLES - 1 - at], p })
}

/// Wilcoxon's signed-rank test, two-sided: the probability that of so many effects without a sign of their own as much rank falls on one side. Effects of zero are
/// left out; equal ones share their ranks.
fn signed_rank(mut effects: Vec<f64>) -> f64 {
    effects.retain(|effect| *effect != 0.0);
    effects.sort_by(|one, other| one.abs().total_cmp(&other.abs()));
    // Twice the rank is a whole number also where ranks are shared.
    let mut ranks = Vec::with_capacity(effects.len());
    for alike in effects.chunk_by(|one, other| one.abs() == other.abs()) {
        let shared = 2 * ranks.len() + alike.len() + 1;
        ranks.extend(alike.iter().map(|_| shared));
    }
    let all: usize = ranks.iter().sum();
    let above: usize =
        std::iter::zip(&effects, &ranks).filter(|(effect, _)| **effect > 0.0).map(|(_, rank)| rank).sum();
    let least = above.min(all - above);
    if ranks.len() > EXACT {
        let variance: f64 = ranks.iter().map(|rank| (*rank as f64 / 2.0).powi(2)).sum();
        let z = (least as f64 - all as f64 / 2.0) / variance.sqrt();
        return (2.0 * Normal::standard().cdf(z)).min(1.0);
    }
    // The probability of each sum, one rank after the other.
    let mut sums = vec![0.0; all + 1];
    sums[0] = 1.0;
    for rank in ranks {
        for sum in (0..=all).rev() {
            let with = if sum >= rank { sums[sum - rank] } else { 0.0 };
            sums[sum] = (sums[sum] + with) / 2.0;
        }
    }
    (2.0 * sums[..=least].iter().sum::<f64>()).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(distance: Distance, row: &[f64], baseline: &[f64]) -> Vec<Pair> {
        std::iter::zip(row, baseline)
            .map(|(row, baseline)| Pair { distance, row: vec![*row], baseline: vec![*baseline] })
            .collect()
    }

    #[test]
    fn the_fewest_blocks_are_those_that_seldom_agree_by_chance() {
        let fewest = Confidence::ALL.map(fewest);
        // Two sides: of so many blocks all are on one of them once in 8, 16, 32, 64, 128, 256 times.
        assert_eq!(fewest, [4, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn the_signed_rank_test_is_that_of_the_tables() {
        // Critical values of W for two sides, 0.05: n = 8: 3, n = 10: 8, n = 20: 52.
        for (n, critical) in [(8u32, 3), (10, 8), (20, 52)] {
            // Ranks on the other side that add up to a sum: greedily, the largest first.
            let p = |mut sum: u32| {
                let mut effects: Vec<f64> = Vec::new();
                for rank in (1..=n).rev() {
                    let other = rank <= sum;
                    sum -= if other { rank } else { 0 };
                    effects.push(if other { -f64::from(rank) } else { f64::from(rank) });
                }
                signed_rank(effects)
            };
            assert!(
                p(critical) <= 0.05 && p(critical + 1) > 0.05,
                "{n}: {} {}",
                p(critical),
                p(critical + 1)
            );
        }
        assert_eq!(signed_rank(vec![1.0; 6]), 2.0 / 64.0, "ties share their ranks");
        assert_eq!(signed_rank(vec![0.0; 6]), 1.0);
        // The normal distribution takes over where it is as good: one effect more, the smallest, makes no difference to speak of.
        let mut effects: Vec<f64> =
            (1..=EXACT).map(|rank| if rank % 3 == 0 { -1.0 } else { 1.0 } * rank as f64).collect();
        let exact = signed_rank(effects.clone());
        effects.push(0.5);
        let normal = signed_rank(effects);
        assert!((normal / exact - 1.0).abs() < 0.1 && exact < 0.05, "{exact} {normal}");
    }

    #[test]
    fn pairs_show_what_a_fourfold_change_of_the_machine_hides() {
        let places = [10.0, 40.0, 10.5, 41.0, 39.0, 10.0, 42.0, 9.8];
        let row: Vec<f64> =
            places.iter().enumerate().map(|(at, ns)| ns * [0.94, 0.95, 0.96][at % 3]).collect();
        let found = Paired::new(&pairs(Distance::Near, &row, &places), Confidence::C95).unwrap();
        assert_eq!(found.verdict(Better::Lower, Confidence::C95), Verdict::Faster);
        assert_eq!(found.verdict(Better::Higher, Confidence::C95), Verdict::Slower);
        assert!((found.effect.value - 0.95).abs() < 0.005 && found.effect.high < 0.97, "{found:?}");
        // Side by side they prove nothing.
        let summary = |values: &[f64]| super::super::Summary::of(values).unwrap();
        let unpaired =
            super::super::Comparison::new(&summary(&row), &summary(&places), Better::Lower, Confidence::C95);
        assert_eq!(unpaired.verdict, Verdict::NoDifferenceProven);
    }

    #[test]
    fn too_few_blocks_prove_nothing_however_clear_they_are() {
        let five = Paired::new(&pairs(Distance::Near, &[5.0; 5], &[1.0; 5]), Confidence::C95).unwrap();
        assert_eq!(five.verdict(Better::Lower, Confidence::C95), Verdict::TooFewRuns);
        assert_eq!(five.verdict(Better::Lower, Confidence::C90), Verdict::Slower);
        assert_eq!(Paired::new(&pairs(Distance::Near, &[5.0], &[1.0]), Confidence::C95), None);
        assert_eq!(Paired::new(&[], Confidence::C95), None);
    }

    #[test]
    fn values_that_are_not_positive_are_compared_by_their_difference() {
        let found = Paired::new(
            &pairs(Distance::Unknown, &[3.0, 4.0, 3.0, 4.0, 3.0, 4.0], &[0.0, 1.0, 0.0, 1.0, 0.0, 1.0]),
            Confidence::C95,
        )
        .unwrap();
        assert_eq!((found.scale, found.effect.value), (Scale::Difference, 3.0));
        assert_eq!(found.verdict(Better::Lower, Confidence::C95), Verdict::Slower);
    }

    #[test]
    fn a_row_that_wins_near_and_loses_far_is_neither_faster_nor_slower() {
        let mut both = pairs(Distance::Near, &[0.9, 0.91, 0.9, 0.89, 0.9, 0.9], &[1.0; 6]);
        both.extend(pairs(Distance::Far, &[4.8, 4.81, 4.8, 4.79, 4.8, 4.8], &[4.0; 6]));
        let found = Paired::new(&both, Confidence::C95).unwrap();
        assert_eq!(found.verdict(Better::Lower, Confidence::C95), Verdict::DiffersByDistance);
        let near = found.distances[0];
        assert_eq!((near.distance, near.effect.blocks), (Distance::Near, 6));
        assert!((near.effect.value - 0.9).abs() < 0.01 && near.effect.high < 1.0);
        assert!(found.distances[1].effect.low > 1.0);
    }

    #[test]
    fn a_distance_met_once_counts_without_a_spread_of_its_own() {
        let mut most = pairs(Distance::Near, &[0.9, 0.91, 0.9, 0.89, 0.9, 0.9], &[1.0; 6]);
        most.extend(pairs(Distance::Mid, &[2.6], &[3.0]));
        let found = Paired::new(&most, Confidence::C95).unwrap();
        assert_eq!((found.effect.blocks, found.distances.len()), (7, 1));
        assert_eq!(found.verdict(Better::Lower, Confidence::C95), Verdict::Faster);
    }
}
