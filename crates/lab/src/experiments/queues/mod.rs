//! `lab queues`: what several queue pairs cost and win. The kernel's sockets between two guests over one queue pair and over
//! several; a packet generator on each queue; and a pair in use among many that are idle.
//!
//! | module | idea |
//! |---|---|
//! | `case` | the matrix of kernel traffic, and what was published about each of its rows |
//! | `kernel` | a run of kernel traffic between two guests on a switch |
//! | `generator` | a run of the packet generator: a thread per queue |
//! | `halves` | a queue pair of which one thread plays both halves |
//!
//! Every figure is there twice: over time, and over the processor time that all of it took. Each row of several queues
//! is compared with the one of one queue, a row of idle queues with the one that has none.

mod case;
mod generator;
mod halves;
mod kernel;

use std::path::Path;
use std::rc::Rc;

use self::case::{Case, Per};
use crate::experiment::{Better, Defaults, Experiment, Measure, OptionSpec, Plan, Row, RowError, Setup};
use crate::experiments::shared::shared;
use crate::labels::Labels;

#[derive(Clone, Copy, Debug)]
pub struct Queues;

const NAME: &str = "queues";

/// Most queue pairs of a guest here: as many as a switch has workers.
const MOST: usize = 16;

/// Numbers of queues that are measured where there are as many processors.
const USUAL: [u16; 3] = [1, 2, 4];

/// The guests' `--spread-at`, where it was given.
const SPREAD_AT: &str = "spread-at";

const OPTIONS: [OptionSpec; 3] = [
    OptionSpec {
        name: "matrix",
        help: "kernel rows: `default`, `all` of the published matrix (an hour; for use with --filter), `off`",
    },
    OptionSpec {
        name: "queues",
        help: "queue pairs of the kernel rows, as 1,2,4 (default: those that have a processor each); 1 is the baseline",
    },
    OptionSpec {
        name: SPREAD_AT,
        help: "load of a pair, in per cent, from which the guests use all of theirs; 0: always (default: the guest's)",
    },
];

impl Experiment for Queues {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "one queue pair against several: RR, CRR and streams of kernel sockets, packet generator, idle queues"
    }

    fn options(&self) -> &'static [OptionSpec] {
        &OPTIONS
    }

    fn defaults(&self) -> Defaults {
        // Some 50 runs of a second with their set-up, thirteen times and more for baselines: a quarter of an hour.
        Defaults { runs: 6, seconds: 0.5, set_up: 0.5 }
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let numbers = queues(setup)?;
        setup.option(SPREAD_AT, 0u8)?;
        let matrix: String = setup.option("matrix", "default".into())?;
        let (cases, idle) = match matrix.as_str() {
            "default" => (Case::matrix(false, &numbers), Case::idle()),
            "all" => (Case::matrix(true, &numbers), Case::idle()),
            "off" => (Vec::new(), Vec::new()),
            _ => {
                let text = format!("--option matrix={matrix}: `default`, `all` or `off`");
                return Err(RowError::failed(text));
            }
        };
        let missing = if cases.is_empty() { None } else { kernel::impossible(setup) };
        let mut plan = Plan { notes: notes(), ..Plan::default() };
        plan.rows.extend(cases.into_iter().flat_map(|case| matrix_rows(case, setup, missing.as_deref())));
        plan.rows.extend(idle.into_iter().flat_map(|case| idle_rows(case, setup, missing.as_deref())));
        plan.rows.extend(generator::Case::all().flat_map(|case| generator_rows(case, setup)));
        Ok(plan)
    }

    fn child(&self, program: &Path, args: &[String]) -> Result<(), RowError> {
        kernel::child(program, args)
    }
}

/// The numbers of queues to measure.
fn queues(setup: &Setup) -> Result<Vec<u16>, RowError> {
    match setup.numbers("queues", MOST)? {
        None => {
            Ok(USUAL.into_iter().filter(|&queues| usize::from(queues) <= setup.cpus.len().max(1)).collect())
        }
        // No more than MOST.
        Some(numbers) if numbers.first() == Some(&1) => {
            Ok(numbers.into_iter().map(|queues| queues as u16).collect())
        }
        Some(_) => Err(RowError::failed("--option queues: 1 must be among the numbers, as in 1,2")),
    }
}

fn notes() -> Vec<String> {
    vec![
        "per=second: transactions or Mbit of payload that arrived and was checked; per=CPU-second: the same over the processor \
         time of the switch, both guests and the processes with the sockets, of the same runs. The kernel's work in an \
         interrupt counts for whom it interrupts."
            .into(),
        "Both guests have `queues` queue pairs and the switch as many workers; a guest uses one of them until that is not enough and a \
         processor is free, so shares show what was used (--option spread-at=0: all, always). transmit and receive differ in \
         who connects; the published rows are between a guest and its host."
            .into(),
        format!(
            "idle queues: {} pairs set up and one in use, against one. generator: driver and device of a queue take turns on one \
             processor, with no kernel between them; from one queue to two, 1.9 times is what is expected.",
            case::OFFERED
        ),
    ]
}

/// The two rows of a case: what it is over, its labels and its unit are told for each.
fn rows(
    missing: Option<&str>,
    unit: impl Fn(Per) -> String,
    labels: impl Fn(Per) -> Labels,
    measures: [Measure; 2],
) -> [Row; 2] {
    let [first, second] = measures;
    let [one, other] = Per::BOTH;
    [(one, first), (other, second)].map(|(per, measure)| {
        Row::measured(labels(per), &unit(per), Better::Higher, measure)
            .of_run(labels(one).to_string())
            .unless(missing.map(|why| (why, None)))
    })
}

/// Puts each of both rows where it belongs.
fn placed(
    rows: [Row; 2],
    group: impl Fn(Per) -> String,
    baseline: Option<impl Fn(Per) -> Labels>,
) -> Vec<Row> {
    let placed = std::iter::zip(rows, Per::BOTH)
        .map(|(row, per)| row.in_group(&group(per)).against(baseline.as_ref().map(|labels| labels(per))));
    placed.collect()
}

fn kernel_measures(case: Case, setup: &Setup) -> [Measure; 2] {
    let setup = Rc::new(setup.clone());
    shared(move |run| kernel::measure(&case, &setup, run))
}

fn matrix_rows(case: Case, setup: &Setup, missing: Option<&str>) -> Vec<Row> {
    let rows = rows(missing, |per| case.unit(per), |per| case.labels(per), kernel_measures(case, setup));
    let single = case.single();
    let baseline = (single != case).then_some(|per| single.labels(per));
    let rows = placed(rows, |per| case.group(per), baseline);
    std::iter::zip(rows, Per::BOTH).map(|(row, per)| row.published(case.published(per))).collect()
}

fn idle_rows(case: Case, setup: &Setup, missing: Option<&str>) -> Vec<Row> {
    let rows = rows(missing, |per| case.unit(per), |per| case.idle_labels(per), kernel_measures(case, setup));
    let single = case.single();
    let baseline = (single != case).then_some(|per| single.idle_labels(per));
    placed(rows, |per| case.idle_group(per), baseline)
}

fn generator_rows(case: generator::Case, setup: &Setup) -> Vec<Row> {
    let too_few = (setup.cpus.len() < case.queues)
        .then(|| format!("needs {} processors, one for each queue", case.queues));
    let measures = shared(move |run| generator::measure(&case, run));
    let rows = rows(too_few.as_deref(), |per| per.unit("kpackets"), |per| case.labels(per), measures);
    let single = case.single();
    let baseline = (single != case).then_some(|per| single.labels(per));
    let rows = placed(rows, |per| case.group(per), baseline);
    std::iter::zip(rows, Per::BOTH).map(|(row, per)| row.published(case.published(per))).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::experiment::Source;

    #[test]
    fn rows_have_names_of_their_own_and_baselines_of_their_group_and_unit() {
        for (cpus, options) in
            [(1, vec![]), (2, vec![]), (4, vec![("matrix", "all")]), (2, vec![("queues", "1,2,4,16")])]
        {
            let plan = Queues.plan(&Setup::planning(cpus, &options)).unwrap();
            let names: BTreeSet<String> = plan.rows.iter().map(Row::name).collect();
            assert_eq!(names.len(), plan.rows.len());
            for row in &plan.rows {
                let Some(baseline) = &row.baseline else { continue };
                let found = plan.rows.iter().find(|other| other.name() == *baseline).unwrap();
                assert_eq!((&found.group, &found.unit), (&row.group, &row.unit));
                assert!(found.baseline.is_none() && *baseline != row.name());
            }
            // Rows of a group share their unit.
            let groups: BTreeSet<(&str, &str)> =
                plan.rows.iter().map(|row| (row.group.as_str(), row.unit.as_str())).collect();
            let titles: BTreeSet<&str> = groups.iter().map(|(title, _)| *title).collect();
            assert_eq!(groups.len(), titles.len());
        }
        let count = |cpus| Queues.plan(&Setup::planning(cpus, &[("matrix", "all")])).unwrap().rows.len();
        // Both kinds of figure of 168 cases for each number of queues; 4 idle cases, and 8 of the generator.
        assert_eq!((count(1), count(2), count(4)), (2 * 180, 2 * 348, 2 * 516));
    }

    #[test]
    fn what_cannot_be_measured_says_why_and_options_are_checked() {
        let plan = Queues.plan(&Setup::planning(2, &[])).unwrap();
        let reason = |name: &str| {
            let row = plan.rows.iter().find(|row| row.name() == name).unwrap();
            match &row.source {
                Source::Missing(missing) => missing.reason.clone(),
                Source::Measured(_) => String::new(),
            }
        };
        assert!(
            reason("test=rr size=256 sessions=100 queues=2 per=second")
                .contains("/nonexistent/ringferry-lab")
        );
        assert!(
            reason("test=rr size=1 sessions=1 queues=1 offered=16 per=second")
                .contains("/nonexistent/ringferry-lab")
        );
        assert_eq!(reason("test=generator direction=transmit queues=2 per=second"), "");
        assert!(reason("test=generator direction=receive queues=3 per=CPU-second").contains("3 processors"));
        for wrong in [
            ("matrix", "some"),
            ("queues", "2"),
            ("queues", "1,17"),
            ("queues", "1,x"),
            ("queues", ""),
            (SPREAD_AT, "x"),
        ] {
            assert!(Queues.plan(&Setup::planning(2, &[wrong])).is_err(), "{wrong:?}");
        }
        let off = Queues.plan(&Setup::planning(2, &[("matrix", "off")])).unwrap();
        assert!(off.rows.iter().all(|row| row.name().starts_with("test=generator")));
    }
}
