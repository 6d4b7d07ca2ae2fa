//! Runs the rows of a plan, interleaved.
//!
//! Every round runs each row once, so that whatever changes over minutes (temperature, neighbours, other
//! load) hits all rows alike. The order is shuffled anew in each round, from a recorded seed: with a
//! fixed order, and also with a rotated one, a row would always follow the same other one and inherit its
//! caches and its heat. Round 0 is a warm-up whose values are thrown away.
//!
//! The first row of each group that can be measured is run twice per round, the second time under
//! another name: its comparison with itself shows what the machine's noise looks like (A/A).

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;

use crate::experiment::{Plan, Row, RowError, Run, Sample, Source};
use crate::progress::Progress;
use crate::results::{RowResult, RunError};
use crate::stats::Summary;
use crate::stop::Stop;

/// The label that tells an A/A row from the row it repeats.
pub const AGAIN: (&str, &str) = ("again", "A/A");

/// Failures of a row in a row after which it is not run any more: a peer that does not start costs its
/// time-out each time.
const GIVE_UP: usize = 2;

/// The schedule of a session.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// Number of rounds that count.
    pub runs: usize,
    pub seconds: Duration,
    /// Start of all that is random.
    pub seed: u64,
    /// Processors for [`Run::cpus`].
    pub cpus: Vec<usize>,
}

/// One row and where its values go.
struct Slot {
    /// Index into the plan's rows.
    row: usize,
    result: usize,
    /// Failures since the last success.
    failures: usize,
}

/// Runs a plan's rows. When `stop` is requested, what was measured so far is returned; the second value says
/// whether all rounds were run.
pub fn run(
    rows: &mut [Row],
    schedule: &Schedule,
    progress: &mut Progress,
    stop: &Stop,
) -> (Vec<RowResult>, bool) {
    let (mut slots, mut results) = prepare(rows);
    let mut random = Rng::with_seed(schedule.seed);
    let counted = rows.iter().filter(|row| row.counts.is_some()).count();
    progress.begin(counted + slots.len() * (schedule.runs + 1));
    count(rows, &mut results, schedule, progress, stop);
    for round in 0..=schedule.runs {
        progress.round(round, schedule.runs);
        let seed = random.u64(..);
        if round > 0 {
            random.shuffle(&mut slots);
        }
        for slot in &mut slots {
            if stop.requested() {
                return (finish(results), false);
            }
            let result = &mut results[slot.result];
            progress.step(&result.name);
            if slot.failures >= GIVE_UP {
                continue;
            }
            let run = Run { seconds: schedule.seconds, seed, round, cpus: &schedule.cpus, stop };
            match measure(&mut rows[slot.row], &run) {
                Ok(sample) => {
                    slot.failures = 0;
                    if round > 0 {
                        record(result, sample);
                    }
                }
                Err(RowError::Stopped) if stop.requested() => return (finish(results), false),
                Err(error) => {
                    slot.failures += 1;
                    result.errors.push(RunError { round, message: error.to_string() });
                }
            }
        }
    }
    (finish(results), true)
}

/// Leaves those rows of a plan whose names match one of `filters`; all when there are none.
pub fn filter(plan: &mut Plan, filters: &[regex::Regex]) {
    plan.rows.retain(|row| {
        let name = row.name();
        filters.is_empty() || filters.iter().any(|filter| filter.is_match(&name))
    });
}

fn prepare(rows: &[Row]) -> (Vec<Slot>, Vec<RowResult>) {
    let (mut slots, mut results) = (Vec::new(), Vec::new());
    let mut groups = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        results.push(empty(row));
        if matches!(row.source, Source::Missing(_)) {
            continue;
        }
        slots.push(Slot { row: at, result: results.len() - 1, failures: 0 });
        if !groups.contains(&&row.group) {
            groups.push(&row.group);
            let labels = row.labels.clone().with(AGAIN.0, AGAIN.1);
            results.push(RowResult {
                name: labels.to_string(),
                labels,
                repeats: Some(row.name()),
                baseline: None,
                goal: None,
                published: Vec::new(),
                ..empty(row)
            });
            slots.push(Slot { row: at, result: results.len() - 1, failures: 0 });
        }
    }
    (slots, results)
}

fn empty(row: &Row) -> RowResult {
    RowResult {
        name: row.name(),
        labels: row.labels.clone(),
        group: row.group.clone(),
        unit: row.unit.clone(),
        better: row.better,
        baseline: row.baseline.clone(),
        goal: row.goal,
        bound: row.bound,
        repeats: None,
        values: Vec::new(),
        extra: BTreeMap::new(),
        counts: BTreeMap::new(),
        summary: None,
        errors: Vec::new(),
        missing: match &row.source {
            Source::Missing(missing) => Some(missing.clone()),
            Source::Measured(_) => None,
        },
        published: row.published.clone(),
    }
}

fn count(
    rows: &mut [Row],
    results: &mut [RowResult],
    schedule: &Schedule,
    progress: &mut Progress,
    stop: &Stop,
) {
    let run = Run { seconds: schedule.seconds, seed: schedule.seed, round: 0, cpus: &schedule.cpus, stop };
    for row in rows {
        let name = row.name();
        let Some(count) = &mut row.counts else { continue };
        if stop.requested() {
            return;
        }
        progress.step(&format!("counting {name}"));
        let counted = count(&run);
        for result in results.iter_mut().filter(|result| result.name == name) {
            match &counted {
                Ok(counts) => result.counts = counts.clone(),
                Err(RowError::Stopped) => {}
                Err(error) => {
                    result.errors.push(RunError { round: 0, message: format!("counting: {error}") });
                }
            }
        }
    }
}

fn measure(row: &mut Row, run: &Run<'_>) -> Result<Sample, RowError> {
    let Source::Measured(measure) = &mut row.source else {
        return Err(RowError::failed("a missing row cannot be measured"));
    };
    let sample = measure(run)?;
    // JSON has no other numbers, and statistics no use for them.
    match sample.extra.iter().find(|(_, value)| !value.is_finite()) {
        _ if !sample.value.is_finite() => {
            Err(RowError::failed(format!("the value is {}: nothing was measured", sample.value)))
        }
        Some((name, value)) => Err(RowError::failed(format!("{name} is {value}: nothing was measured"))),
        None => Ok(sample),
    }
}

fn record(result: &mut RowResult, sample: Sample) {
    result.values.push(sample.value);
    for (name, value) in sample.extra {
        result.extra.entry(name).or_default().push(value);
    }
}

fn finish(mut results: Vec<RowResult>) -> Vec<RowResult> {
    for result in &mut results {
        result.summary = Summary::of(&result.values);
    }
    results
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::experiment::{Better, Published};
    use crate::labels::Labels;

    type Log = Rc<RefCell<Vec<(usize, String, u64)>>>;

    fn row(name: &str, log: &Log) -> Row {
        let (seen, text) = (Rc::clone(log), name.to_owned());
        Row::measured(Labels::new().with("row", name), "ns", Better::Lower, move |run| {
            seen.borrow_mut().push((run.round, text.clone(), run.seed));
            Ok(Sample::new(run.round as f64).with("drops", 2.0))
        })
        .in_group("g")
    }

    fn schedule(runs: usize) -> Schedule {
        Schedule { runs, seconds: Duration::ZERO, seed: 1, cpus: vec![0] }
    }

    fn go(rows: &mut [Row], runs: usize, stop: &Stop) -> (Vec<RowResult>, bool) {
        run(rows, &schedule(runs), &mut Progress::silent(), stop)
    }

    fn in_round(log: &Log, round: usize) -> Vec<String> {
        log.borrow().iter().filter(|entry| entry.0 == round).map(|entry| entry.1.clone()).collect()
    }

    #[test]
    fn every_round_runs_every_row_once_and_the_first_of_a_group_twice() {
        let log = Log::default();
        let mut rows: Vec<Row> = ["a", "b", "c", "d"].iter().map(|name| row(name, &log)).collect();
        rows[3].group = "other".into();
        let (results, complete) = go(&mut rows, 6, &Stop::new());
        assert!(complete);
        for round in 0..=6 {
            let mut names = in_round(&log, round);
            names.sort();
            assert_eq!(names, ["a", "a", "b", "c", "d", "d"], "round {round}");
        }
        let names: Vec<_> = results.iter().map(|result| result.name.as_str()).collect();
        assert_eq!(names, ["row=a", "row=a again=A/A", "row=b", "row=c", "row=d", "row=d again=A/A"]);
        assert_eq!(results[1].repeats.as_deref(), Some("row=a"));
        // The warm-up round is thrown away, and values stay in the order of the rounds.
        for result in &results {
            assert_eq!(result.values, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
            assert_eq!(result.extra["drops"], [2.0; 6]);
            assert_eq!(result.summary.unwrap().median, 3.5);
        }
    }

    #[test]
    fn the_order_changes_from_round_to_round_and_is_repeatable() {
        let orders = || {
            let log = Log::default();
            let mut rows: Vec<Row> = ["a", "b", "c", "d", "e"].iter().map(|name| row(name, &log)).collect();
            go(&mut rows, 4, &Stop::new());
            log.take()
        };
        let (first, second) = (orders(), orders());
        assert_eq!(first, second);
        let order = |round| -> Vec<&str> {
            first.iter().filter(|entry| entry.0 == round).map(|entry| entry.1.as_str()).collect()
        };
        assert!((2..=4).any(|round| order(round) != order(1)));
        // One seed for all rows of a round, another one in the next.
        let seed = |round| -> Vec<u64> {
            first.iter().filter(|entry| entry.0 == round).map(|entry| entry.2).collect()
        };
        assert!(seed(1).iter().all(|value| *value == seed(1)[0]) && seed(1)[0] != seed(2)[0]);
    }

    #[test]
    fn a_row_that_fails_is_reported_and_the_others_go_on() {
        let log = Log::default();
        let mut calls = 0;
        let mut rows = vec![
            row("good", &log),
            Row::measured(Labels::new().with("row", "bad"), "ns", Better::Lower, |_| {
                Err(RowError::failed("no such port"))
            })
            .in_group("g"),
            Row::measured(Labels::new().with("row", "flaky"), "ns", Better::Lower, move |_| {
                calls += 1;
                if calls % 2 == 0 { Err(RowError::failed("busy")) } else { Ok(Sample::new(1.0)) }
            })
            .in_group("g"),
            Row::measured(Labels::new().with("row", "nothing"), "ns", Better::Lower, |_| {
                Ok(Sample::new(f64::NAN))
            })
            .in_group("g"),
        ];
        let (results, complete) = go(&mut rows, 4, &Stop::new());
        assert!(complete);
        let find = |name: &str| results.iter().find(|result| result.name == name).unwrap();
        assert_eq!(find("row=good").values.len(), 4);
        let bad = find("row=bad");
        assert_eq!((bad.values.len(), bad.summary), (0, None));
        // Given up after two failures in a row, the warm-up's included.
        assert_eq!(bad.errors.iter().map(|error| error.round).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(bad.errors[0].message, "no such port");
        // Calls 2 and 4, in rounds 1 and 3, failed: never twice in a row.
        let flaky = find("row=flaky");
        assert_eq!((flaky.values.len(), flaky.errors.len()), (2, 2));
        assert!(find("row=nothing").errors[0].message.contains("NaN"));
    }

    #[test]
    fn ctrl_c_keeps_what_was_measured() {
        let stop = Stop::new();
        let (log, request) = (Log::default(), stop.clone());
        let mut rows = vec![
            row("a", &log),
            Row::measured(Labels::new().with("row", "stopper"), "ns", Better::Lower, move |run| {
                if run.round == 3 {
                    request.request();
                    return Err(RowError::Stopped);
                }
                Ok(Sample::new(7.0))
            })
            .in_group("g"),
        ];
        let (results, complete) = go(&mut rows, 5, &stop);
        assert!(!complete);
        let stopper = results.iter().find(|result| result.name == "row=stopper").unwrap();
        assert_eq!((stopper.values.as_slice(), stopper.errors.len()), ([7.0, 7.0].as_slice(), 0));
        assert!(results[0].values.len() >= 2 && results[0].summary.is_some());
        assert_eq!(in_round(&log, 4), Vec::<String>::new());
    }

    #[test]
    fn a_missing_row_is_listed_and_never_measured() {
        let log = Log::default();
        let figure = Published::new("rate", 21.0, "Mpps", "elsewhere");
        let missing = Row::measured(Labels::new().with("row", "peer"), "ns", Better::Lower, |_| {
            unreachable!("it cannot be measured")
        });
        let missing = missing
            .unless(Some(("testpmd is not installed", Some("dpdk"))))
            .in_group("g")
            .published([figure.clone()]);
        let (results, _) = go(&mut [missing, row("a", &log)], 3, &Stop::new());
        // The A/A row is the first one that can be measured.
        let names: Vec<_> = results.iter().map(|result| result.name.as_str()).collect();
        assert_eq!(names, ["row=peer", "row=a", "row=a again=A/A"]);
        assert_eq!((results[0].values.len(), results[0].errors.len()), (0, 0));
        assert_eq!(results[0].missing.as_ref().unwrap().package.as_deref(), Some("dpdk"));
        assert_eq!(results[0].published, [figure]);
    }

    #[test]
    fn counts_are_taken_once() {
        let log = Log::default();
        let calls = Rc::new(RefCell::new(0));
        let seen = Rc::clone(&calls);
        let counted = row("a", &log).counting(move |_| {
            *seen.borrow_mut() += 1;
            Ok([("loads/buffer".to_owned(), 12.5)].into())
        });
        let failing = row("b", &log).counting(|_| Err(RowError::failed("valgrind crashed")));
        let (results, _) = go(&mut [counted, failing], 3, &Stop::new());
        assert_eq!((*calls.borrow(), results[0].counts["loads/buffer"]), (1, 12.5));
        let b = results.iter().find(|result| result.name == "row=b").unwrap();
        assert_eq!((b.values.len(), b.errors[0].message.as_str()), (3, "counting: valgrind crashed"));
    }

    #[test]
    fn filters_are_alternatives() {
        let log = Log::default();
        let rows = ["split", "packed", "null"].iter().map(|name| row(name, &log)).collect();
        let mut plan = Plan { rows, ..Plan::default() };
        filter(&mut plan, &[]);
        assert_eq!(plan.rows.len(), 3);
        filter(&mut plan, &["spl".parse().unwrap(), "row=(null|none)$".parse().unwrap()]);
        let names: Vec<_> = plan.rows.iter().map(Row::name).collect();
        assert_eq!(names, ["row=split", "row=null"]);
    }
}
