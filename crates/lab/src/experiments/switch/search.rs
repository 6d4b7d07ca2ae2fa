//! The highest rate that passes: a binary search over trials, as RFC 2544 (26.1) has it, for two thresholds of loss from one
//! set of trials (the NDR and PDR of RFC 8204 and of CSIT).
//!
//! A trial that fails because the generator itself was held up is made again: on a virtual machine it is the neighbours that
//! lose those frames.

use crate::experiment::RowError;

/// How often a trial that was disturbed is made again. With one, every third search on a machine with other work ended far
/// too low.
const AGAIN: usize = 3;

/// Most trials of a search: enough to come from the whole range to a thousandth of it.
const MOST: usize = 12;

/// The outcome of a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Trial {
    pub rate: f64,
    /// Of the frames that were due, the share that did not arrive.
    pub loss: f64,
    /// The generator was held up for longer than the rings hold.
    pub disturbed: bool,
}

/// Trials so far, and how to make more.
pub(super) struct Search<F> {
    trial: F,
    trials: Vec<Trial>,
    most: f64,
    /// The search ends when it is known so well, as a share of the highest rate.
    precision: f64,
    repeated: usize,
}

impl<F: FnMut(f64) -> Result<Trial, RowError>> Search<F> {
    /// Searches from nothing to `most` frames a second.
    pub(super) fn new(most: f64, precision: f64, trial: F) -> Self {
        Self { trial, trials: Vec::new(), most, precision, repeated: 0 }
    }

    /// The highest rate found at which no more than `threshold` was lost; 0 if there is none.
    ///
    /// # Errors
    /// That of a trial.
    pub(super) fn highest(&mut self, threshold: f64) -> Result<f64, RowError> {
        for _ in 0..MOST {
            let (passed, failed) = self.bounds(threshold);
            let rate = match failed {
                // The highest first: it may pass.
                None if passed >= self.most => return Ok(passed),
                None => self.most,
                Some(failed) if failed - passed <= self.precision * self.most => return Ok(passed),
                Some(failed) => f64::midpoint(passed, failed),
            };
            let mut trial = (self.trial)(rate)?;
            for _ in 0..AGAIN {
                if trial.loss <= threshold || !trial.disturbed {
                    break;
                }
                self.repeated += 1;
                trial = (self.trial)(rate)?;
            }
            self.trials.push(trial);
        }
        Ok(self.bounds(threshold).0)
    }

    /// The lowest rate that failed, and the highest below it that passed. Loss that comes and goes with the rate counts
    /// against the switch: nothing above a failure passes.
    fn bounds(&self, threshold: f64) -> (f64, Option<f64>) {
        let failed = self.trials.iter().filter(|trial| trial.loss > threshold).map(|trial| trial.rate);
        let failed = failed.min_by(f64::total_cmp);
        let passed = self
            .trials
            .iter()
            .filter(|trial| trial.loss <= threshold && failed.is_none_or(|failed| trial.rate < failed));
        (passed.map(|trial| trial.rate).max_by(f64::total_cmp).unwrap_or(0.0), failed)
    }

    /// Trials that counted, and those that were made again.
    pub(super) fn trials(&self) -> [usize; 2] {
        [self.trials.len(), self.repeated]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A switch that takes so much and loses the rest.
    fn capacity(capacity: f64) -> impl Fn(f64) -> Result<Trial, RowError> {
        move |rate| Ok(Trial { rate, loss: (1.0 - capacity / rate).max(0.0), disturbed: false })
    }

    #[test]
    fn the_rate_without_loss_is_found_within_the_precision() {
        for true_rate in [0.4e6, 3.0e6, 7.5e6, 9.99e6] {
            let mut search = Search::new(10e6, 0.01, capacity(true_rate));
            let found = search.highest(0.0).unwrap();
            assert!(found <= true_rate && found > true_rate - 0.1e6, "{true_rate}: {found}");
            assert!(search.trials()[0] <= 9);
        }
        let mut search = Search::new(10e6, 0.01, capacity(20e6));
        assert_eq!((search.highest(0.0).unwrap(), search.trials()), (10e6, [1, 0]));
    }

    #[test]
    fn a_threshold_lets_more_pass_and_uses_what_is_known() {
        // A loss that begins at 5 million and reaches the threshold a tenth later.
        let curve =
            |rate: f64| Ok(Trial { rate, loss: ((rate - 5e6) / 0.5e6 * 0.001).max(0.0), disturbed: false });
        let mut search = Search::new(10e6, 0.005, curve);
        let ndr = search.highest(0.0).unwrap();
        let first = search.trials()[0];
        let pdr = search.highest(0.001).unwrap();
        assert!((4.95e6..=5.0e6).contains(&ndr) && (5.45e6..=5.5e6).contains(&pdr), "{ndr} {pdr}");
        assert!(search.trials()[0] - first < first);
        assert!(search.highest(0.0).unwrap() == ndr, "known");
    }

    #[test]
    fn where_every_trial_loses_there_is_no_rate() {
        let lossy = |rate| Ok(Trial { rate, loss: 0.3, disturbed: false });
        let mut search = Search::new(1e6, 0.01, lossy);
        assert_eq!(search.highest(0.0).unwrap(), 0.0);
        assert!(search.trials()[0] <= MOST);
    }

    #[test]
    fn a_trial_that_was_disturbed_is_made_again_and_one_that_was_not_counts() {
        let mut number = 0;
        let mut search = Search::new(8e6, 0.01, |rate| {
            number += 1;
            let good = capacity(6e6)(rate)?;
            // Every other one is spoilt.
            Ok(if number % 2 == 1 { Trial { loss: 0.5, disturbed: true, ..good } } else { good })
        });
        let found = search.highest(0.0).unwrap();
        assert!((5.9e6..=6e6).contains(&found), "{found}");
        assert!(search.trials()[1] > 0);
    }

    #[test]
    fn an_error_of_a_trial_ends_the_search() {
        let mut search = Search::new(1e6, 0.01, |_| Err(RowError::failed("the switch ended")));
        assert!(search.highest(0.0).is_err());
    }
}
