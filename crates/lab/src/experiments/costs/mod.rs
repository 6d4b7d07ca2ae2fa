//! `lab costs`: instructions and branches that a frame costs in each stage of its way, counted and not timed.
//!
//! A child process under callgrind has both halves of a device in one thread and sends bursts round them, once N times and once 2 N
//! times; the difference is what N bursts cost. It is the same on every run and on every machine, so a table of it can be kept, and a
//! change has to justify what it adds.
//!
//! | module | idea |
//! |---|---|
//! | `stages` | the process that is counted |
//! | `callgrind` | the counts of its functions |

mod callgrind;
mod stages;

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use self::callgrind::Cost;
use self::stages::STAGES;
use super::shared::shared;
use super::valgrind;
use crate::experiment::{Better, Defaults, Experiment, Plan, Row, RowError, Sample, Setup};
use crate::frames::numbered::BURST;
use crate::labels::Labels;

#[derive(Clone, Copy, Debug)]
pub struct Costs;

const NAME: &str = "costs";

/// N: rounds of a burst. One hundred make what differs from burst to burst, the ring's wrapping around among it, a hundredth of an instruction.
const ROUNDS: usize = 128;

/// Bytes of the frames: the smallest, and the largest of a common Ethernet.
const SIZES: [usize; 2] = [64, 1518];

/// The subject of one process: all stages for rings of a kind and frames of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    packed: bool,
    in_order: bool,
    size: usize,
}

impl Case {
    fn all() -> impl Iterator<Item = Case> {
        let rings = [(false, false), (false, true), (true, false), (true, true)];
        SIZES
            .into_iter()
            .flat_map(move |size| rings.map(|(packed, in_order)| Case { packed, in_order, size }))
    }

    fn labels(&self) -> Labels {
        Labels::new()
            .with("ring", if self.packed { "packed" } else { "split" })
            .with("order", if self.in_order { "in" } else { "any" })
            .with("size", self.size)
    }
}

/// The names of the rows of [`STAGES`].
const STAGE_NAMES: [&str; STAGES.len()] =
    ["driver-sends", "device-takes", "device-delivers", "driver-receives", "driver-forwards"];

impl Experiment for Costs {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "instructions and branches of each stage of a frame's way, counted: the same on every machine"
    }

    fn defaults(&self) -> Defaults {
        // Every run would have the same values.
        Defaults { runs: 1, seconds: 0.001, set_up: 4.0 }
    }

    fn goes_with_distance(&self) -> bool {
        false
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let mut plan = Plan::default();
        let missing = match valgrind::find("instructions and branches") {
            Ok(peer) => {
                plan.peers.push(peer);
                None
            }
            Err(missing) => Some(missing),
        };
        plan.notes.push(format!(
            "one thread plays both sides, {BURST} frames at a time, after the caches of the first {ROUNDS} bursts: what is counted is code alone, \
             and no line that crosses between processors."
        ));
        for case in Case::all() {
            let (setup, counted) = (setup.clone(), Rc::new(RefCell::new(None)));
            let measures = shared(move |_| {
                let mut counted = counted.borrow_mut();
                if counted.is_none() {
                    *counted = Some(count(&setup, &case)?);
                }
                counted.clone().ok_or_else(|| RowError::failed("nothing was counted"))
            });
            for (stage, measure) in std::iter::zip(STAGE_NAMES, measures) {
                let labels = case.labels().with("stage", stage);
                let missing =
                    missing.as_ref().map(|missing| (missing.reason.clone(), missing.package.as_deref()));
                plan.rows.push(
                    Row::measured(labels, "instructions/frame", Better::Lower, measure)
                        .of_run(case.labels().to_string())
                        .in_group(&format!("{stage}, {} B", case.size))
                        .unless(missing),
                );
            }
        }
        Ok(plan)
    }

    fn child(&self, _program: &Path, args: &[String]) -> Result<(), RowError> {
        let wrong = || RowError::failed("usage: lab child costs CASE ROUNDS");
        let [name, rounds] = args else { return Err(wrong()) };
        let case = Case::all().find(|case| case.labels().to_string() == *name).ok_or_else(wrong)?;
        stages::run(&case, rounds.parse().map_err(|_| wrong())?)
    }
}

/// Counts what a frame costs in each of [`STAGES`].
fn count(setup: &Setup, case: &Case) -> Result<[Sample; STAGES.len()], RowError> {
    let totals = |rounds: usize| {
        let args = [case.labels().to_string(), rounds.to_string()];
        let text = valgrind::run(setup, NAME, &["--tool=callgrind", "--branch-sim=yes"], &args)?;
        callgrind::inclusive(&text, &STAGES).ok_or_else(|| {
            RowError::failed("callgrind's output has no instructions and branches: is its valgrind too new?")
        })
    };
    let (once, twice) = (totals(ROUNDS)?, totals(2 * ROUNDS)?);
    let mut samples = STAGES.map(|_| Sample::default());
    for (stage, sample) in std::iter::zip(STAGES, &mut samples) {
        let (Some(once), Some(twice)) = (once.get(stage), twice.get(stage)) else {
            return Err(RowError::failed(format!(
                "callgrind has seen no call of {stage}: is this build without names?"
            )));
        };
        let frames = (twice.calls - once.calls) * BURST as u64;
        let per_frame = |of: fn(&Cost) -> u64| (of(twice) - of(once)) as f64 / frames as f64;
        *sample = Sample::new(per_frame(|cost| cost.instructions))
            .with("branches", per_frame(|cost| cost.branches));
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_goes_round() {
        for case in Case::all() {
            stages::run(&case, 20).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
    }

    #[test]
    fn rows_have_names_of_their_own() {
        let plan = Costs.plan(&Setup::planning(1, &[])).unwrap();
        let names: std::collections::BTreeSet<String> = plan.rows.iter().map(Row::name).collect();
        assert_eq!(names.len(), SIZES.len() * 4 * STAGES.len());
        assert!(Costs.child(Path::new(""), &["ring=split".into(), "1".into()]).is_err());
    }
}
