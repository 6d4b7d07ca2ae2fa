//! Runs the rows of a plan in blocks.
//!
//! A *block* is a row, some of those that are compared with it, and probes of the machine: `probe A probe B probe B probe A probe`. Each member is sampled twice, in an order that
//! is shuffled and then runs backwards, so that a steady drift hits both sides of each pair alike; what is compared was measured a moment apart. A block counts if all its probes agree and
//! little of its time was stolen ([`crate::probe`]), else it is measured again, a few times at most; what was measured in it is not looked at for that.
//!
//! Every round measures each block once, in an order shuffled anew from a recorded seed. Round 0 is a warm-up whose values are thrown away. The first row of each
//! group that can be measured is a member of its block twice, the second time under another name: its comparison with itself shows what the machine's noise
//! looks like (A/A).
//!
//! Rows that have their values from one run ([`Row::of_run`]) are one member: they are asked one after the other for the figures of the same sample.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fastrand::Rng;
use serde::{Deserialize, Serialize};

use crate::experiment::{Plan, Row, RowError, Run, Sample, Source};
use crate::probe::{Rejection, Vigil, Watch};
use crate::progress::Progress;
use crate::results::{RowResult, RunError};
use crate::stats::Summary;
use crate::stop::Stop;

/// The label that tells an A/A row from the row it repeats.
pub const AGAIN: (&str, &str) = ("again", "A/A");

/// Failures of a row in a row after which it is not run any more: a peer that does not start costs its
/// time-out each time.
const GIVE_UP: usize = 2;

/// Rows that are compared with one baseline in one block. More would make the block longer than a machine stays as it is.
const COMPARED: usize = 3;

/// The most attempts at a block until it counts.
const ATTEMPTS: usize = 3;

/// The schedule of a session.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// Number of rounds that count.
    pub rounds: usize,
    pub seconds: Duration,
    /// Start of all that is random.
    pub seed: u64,
    /// Processors for [`Run::cpus`].
    pub cpus: Vec<usize>,
    /// Compare every row with itself, and nothing with anything else.
    pub only_again: bool,
    /// When to begin no further block, whatever the number of rounds.
    pub until: Option<Instant>,
}

/// A block that counts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Block {
    pub round: usize,
    /// Nanoseconds that a cache line's round trip took between the two processors, the median of its probes; null without probes.
    pub round_trip: Option<f64>,
}

/// Attempts at blocks that did not count, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Rejected {
    /// A processor was moved meanwhile: the probes did not agree.
    pub moved: usize,
    /// The hypervisor took too much of the time.
    pub stolen: usize,
    /// Blocks of which no attempt counted.
    pub lost: usize,
}

impl Rejected {
    fn count(&mut self, why: Rejection) {
        match why {
            Rejection::Moved => self.moved += 1,
            Rejection::Stolen => self.stolen += 1,
        }
    }
}

/// The values and blocks that a schedule leaves behind.
#[derive(Debug, Default)]
pub struct Measured {
    pub rows: Vec<RowResult>,
    pub blocks: Vec<Block>,
    pub rejected: Rejected,
    /// Rounds that count and were begun.
    pub rounds: usize,
    /// False if the user stopped it.
    pub complete: bool,
}

/// One row and where its values go.
struct Slot {
    /// Index into the plan's rows.
    row: usize,
    result: usize,
    /// Failures since the last success.
    failures: usize,
}

/// The rows that have their values from one run.
#[derive(Default)]
struct Member {
    slots: Vec<Slot>,
}

impl Member {
    fn given_up(&self) -> bool {
        self.slots.iter().all(|slot| slot.failures >= GIVE_UP)
    }
}

/// The values of a sample, by the results that they are for.
type Values = Vec<(usize, Sample)>;

/// Everything that a session needs while it measures.
struct Session<'a> {
    rows: &'a mut [Row],
    schedule: &'a Schedule,
    watch: &'a mut dyn Watch,
    progress: &'a mut Progress,
    stop: &'a Stop,
    members: Vec<Member>,
    /// Members of each block, by index.
    blocks: Vec<Vec<usize>>,
    random: Rng,
    /// Samples so far.
    samples: u64,
    measured: Measured,
}

/// Runs a plan's rows. When `stop` is requested, what was measured so far is returned.
pub fn run(
    rows: &mut [Row],
    schedule: &Schedule,
    watch: &mut dyn Watch,
    progress: &mut Progress,
    stop: &Stop,
) -> Measured {
    let (members, results) = prepare(rows, schedule.only_again);
    let blocks = blocks(&members, &results);
    let random = Rng::with_seed(schedule.seed);
    let measured = Measured { rows: results, ..Measured::default() };
    let mut session =
        Session { rows, schedule, watch, progress, stop, members, blocks, random, samples: 0, measured };
    session.measured.complete = session.all().is_ok();
    let mut measured = session.measured;
    for row in &mut measured.rows {
        row.summary = Summary::of(&row.values);
    }
    measured
}

/// Leaves those rows of a plan whose names match one of `filters`; all when there are none.
pub fn filter(plan: &mut Plan, filters: &[regex::Regex]) {
    plan.rows.retain(|row| {
        let name = row.name();
        filters.is_empty() || filters.iter().any(|filter| filter.is_match(&name))
    });
}

/// The members that can be measured, and the results of all rows, empty.
fn prepare(rows: &[Row], only_again: bool) -> (Vec<Member>, Vec<RowResult>) {
    let (mut members, mut results) = (Vec::<Member>::new(), Vec::new());
    let mut keys: Vec<(String, bool)> = Vec::new();
    let mut groups = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        results.push(empty(row, only_again));
        if matches!(row.source, Source::Missing(_)) {
            continue;
        }
        let mut place = |again: bool, result: usize| {
            let key = (row.run.clone().unwrap_or_else(|| row.name()), again);
            let member = keys.iter().position(|known| *known == key).unwrap_or_else(|| {
                keys.push(key);
                members.push(Member::default());
                members.len() - 1
            });
            members[member].slots.push(Slot { row: at, result, failures: 0 });
        };
        place(false, results.len() - 1);
        let first = !groups.contains(&&row.group);
        if first {
            groups.push(&row.group);
        }
        if first || only_again {
            let labels = row.labels.clone().with(AGAIN.0, AGAIN.1);
            results.push(RowResult {
                name: labels.to_string(),
                labels,
                repeats: Some(row.name()),
                baseline: None,
                goal: None,
                published: Vec::new(),
                ..empty(row, only_again)
            });
            place(true, results.len() - 1);
        }
    }
    (members, results)
}

fn empty(row: &Row, only_again: bool) -> RowResult {
    RowResult {
        name: row.name(),
        labels: row.labels.clone(),
        group: row.group.clone(),
        unit: row.unit.clone(),
        better: row.better,
        baseline: row.baseline.clone().filter(|_| !only_again),
        goal: row.goal.filter(|_| !only_again),
        bound: row.bound,
        repeats: None,
        values: Vec::new(),
        blocks: Vec::new(),
        rejected: Rejected::default(),
        extra: BTreeMap::new(),
        counts: BTreeMap::new(),
        summary: None,
        line: None,
        errors: Vec::new(),
        missing: match &row.source {
            Source::Missing(missing) => Some(missing.clone()),
            Source::Measured(_) => None,
        },
        published: row.published.clone(),
    }
}

/// The blocks of a round: each baseline with those that are compared with it, a few at a time, and by itself whatever is compared with nothing.
fn blocks(members: &[Member], results: &[RowResult]) -> Vec<Vec<usize>> {
    let of_result = |name: &str| {
        members.iter().position(|member| member.slots.iter().any(|slot| results[slot.result].name == name))
    };
    let mut compared: Vec<Vec<usize>> = vec![Vec::new(); members.len()];
    for (at, member) in members.iter().enumerate() {
        for slot in &member.slots {
            let result = &results[slot.result];
            let with = result.repeats.as_deref().or(result.baseline.as_deref()).and_then(of_result);
            if let Some(with) = with.filter(|with| *with != at && !compared[*with].contains(&at)) {
                compared[with].push(at);
            }
        }
    }
    let mut blocks: Vec<Vec<usize>> = Vec::new();
    for (baseline, others) in compared.iter().enumerate() {
        blocks.extend(others.chunks(COMPARED).map(|chunk| [&[baseline], chunk].concat()));
    }
    let alone: Vec<Vec<usize>> = (0..members.len())
        .filter(|member| !blocks.iter().any(|block| block.contains(member)))
        .map(|member| vec![member])
        .collect();
    blocks.extend(alone);
    blocks
}

/// The user wants to stop.
struct Stopped;

impl Session<'_> {
    fn all(&mut self) -> Result<(), Stopped> {
        let counted = self.rows.iter().filter(|row| row.counts.is_some()).count();
        let samples: usize = self.blocks.iter().map(|block| 2 * block.len()).sum();
        self.progress.begin(counted + self.members.len() + samples * self.schedule.rounds);
        self.count()?;
        self.progress.round(0, self.schedule.rounds);
        let seed = self.random.u64(..);
        for member in 0..self.members.len() {
            if self.over() {
                break;
            }
            // For the caches and the clock: what it says does not count, what fails does.
            let _ = self.sample(member, 0, seed)?;
        }
        for round in 1..=self.schedule.rounds {
            if self.over() {
                break;
            }
            self.progress.round(round, self.schedule.rounds);
            self.measured.rounds = round;
            let seed = self.random.u64(..);
            let mut blocks = self.blocks.clone();
            self.random.shuffle(&mut blocks);
            for block in blocks {
                if self.over() {
                    break;
                }
                self.block(block, round, seed)?;
            }
        }
        Ok(())
    }

    fn over(&self) -> bool {
        self.schedule.until.is_some_and(|until| Instant::now() >= until)
    }

    /// Measures a block until it counts.
    fn block(&mut self, mut members: Vec<usize>, round: usize, seed: u64) -> Result<(), Stopped> {
        for attempt in 0..ATTEMPTS {
            members.retain(|member| !self.members[*member].given_up());
            if members.is_empty() {
                return Ok(());
            }
            if attempt > 0 {
                self.progress.more(2 * members.len());
            }
            self.random.shuffle(&mut members);
            match self.attempt(&members, round, seed)? {
                // A block in which every row failed is none.
                Ok((_, values)) if values.is_empty() => return Ok(()),
                Ok((round_trip, values)) => {
                    self.keep(Block { round, round_trip }, values);
                    return Ok(());
                }
                Err(why) => {
                    self.measured.rejected.count(why);
                    self.rejected(&members, |rejected| rejected.count(why));
                }
            }
        }
        self.measured.rejected.lost += 1;
        self.rejected(&members, |rejected| rejected.lost += 1);
        Ok(())
    }

    /// Tells the rows of these members of a rejection.
    fn rejected(&mut self, members: &[usize], tell: impl Fn(&mut Rejected)) {
        for member in members {
            for slot in &self.members[*member].slots {
                tell(&mut self.measured.rows[slot.result].rejected);
            }
        }
    }

    /// Measures a block once. The values are those of rows that were measured twice.
    #[allow(clippy::type_complexity, reason = "the outer result is the user's, the inner the machine's")]
    fn attempt(
        &mut self,
        members: &[usize],
        round: usize,
        seed: u64,
    ) -> Result<Result<(Option<f64>, Values), Rejection>, Stopped> {
        let mut vigil = Vigil::begin(self.watch);
        let mut values = Values::new();
        let mut failed: Vec<usize> = Vec::new();
        for member in members.iter().chain(members.iter().rev()) {
            if failed.contains(member) {
                continue;
            }
            let sampled = self.sample(*member, round, seed)?;
            if sampled.is_empty() {
                failed.push(*member);
            }
            values.extend(sampled);
            if let Err(why) = vigil.probe(self.watch) {
                return Ok(Err(why));
            }
        }
        let twice = |result: usize| values.iter().filter(|(of, _)| *of == result).count() == 2;
        let whole: Vec<bool> = values.iter().map(|(result, _)| twice(*result)).collect();
        let mut whole = whole.into_iter();
        values.retain(|_| whole.next() == Some(true));
        Ok(vigil.end(self.watch).map(|round_trip| (round_trip, values)))
    }

    /// Runs a member once: the values of its rows, without those that failed, which are recorded.
    fn sample(&mut self, member: usize, round: usize, seed: u64) -> Result<Values, Stopped> {
        let mut values = Values::new();
        self.samples += 1;
        for (at, slot) in self.members[member].slots.iter_mut().enumerate() {
            if self.stop.requested() {
                return Err(Stopped);
            }
            let result = &mut self.measured.rows[slot.result];
            if at == 0 {
                self.progress.step(&result.name);
            }
            if slot.failures >= GIVE_UP {
                continue;
            }
            let run = Run {
                seconds: self.schedule.seconds,
                seed,
                round,
                sample: self.samples,
                cpus: &self.schedule.cpus,
                stop: self.stop,
            };
            match measure(&mut self.rows[slot.row], &run) {
                Ok(sample) => {
                    slot.failures = 0;
                    values.push((slot.result, sample));
                }
                Err(RowError::Stopped) if self.stop.requested() => return Err(Stopped),
                Err(error) => {
                    slot.failures += 1;
                    result.errors.push(RunError { round, message: error.to_string() });
                }
            }
        }
        Ok(values)
    }

    fn keep(&mut self, block: Block, values: Values) {
        let number = self.measured.blocks.len();
        self.measured.blocks.push(block);
        for (result, sample) in values {
            let result = &mut self.measured.rows[result];
            result.values.push(sample.value);
            result.blocks.push(number);
            for (name, value) in sample.extra {
                result.extra.entry(name).or_default().push(value);
            }
        }
    }

    fn count(&mut self) -> Result<(), Stopped> {
        let run = Run {
            seconds: self.schedule.seconds,
            seed: self.schedule.seed,
            round: 0,
            sample: 0,
            cpus: &self.schedule.cpus,
            stop: self.stop,
        };
        for row in self.rows.iter_mut() {
            let name = row.name();
            let Some(count) = &mut row.counts else { continue };
            if self.stop.requested() {
                return Err(Stopped);
            }
            self.progress.step(&format!("counting {name}"));
            let counted = count(&run);
            for result in self.measured.rows.iter_mut().filter(|result| result.name == name) {
                match &counted {
                    Ok(counts) => result.counts = counts.clone(),
                    Err(RowError::Stopped) => {}
                    Err(error) => {
                        result.errors.push(RunError { round: 0, message: format!("counting: {error}") });
                    }
                }
            }
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::experiment::{Better, Published};
    use crate::labels::Labels;
    use crate::probe::Blind;

    /// Round, row and seed of each run.
    type Log = Rc<RefCell<Vec<(usize, String, u64)>>>;

    fn row(name: &str, log: &Log) -> Row {
        let (seen, text) = (Rc::clone(log), name.to_owned());
        Row::measured(Labels::new().with("row", name), "ns", Better::Lower, move |run| {
            seen.borrow_mut().push((run.round, text.clone(), run.seed));
            Ok(Sample::new(run.round as f64).with("drops", 2.0))
        })
        .in_group("g")
    }

    fn against(row: Row, baseline: &str) -> Row {
        row.against(Some(Labels::new().with("row", baseline)))
    }

    fn schedule(rounds: usize) -> Schedule {
        let cpus = vec![0];
        Schedule { rounds, seconds: Duration::ZERO, seed: 1, cpus, only_again: false, until: None }
    }

    fn go(rows: &mut [Row], rounds: usize, stop: &Stop) -> Measured {
        run(rows, &schedule(rounds), &mut Blind, &mut Progress::silent(), stop)
    }

    fn in_round(log: &Log, round: usize) -> Vec<String> {
        log.borrow().iter().filter(|entry| entry.0 == round).map(|entry| entry.1.clone()).collect()
    }

    #[test]
    fn a_block_is_a_baseline_and_what_is_compared_with_it_and_runs_backwards_from_its_middle() {
        let log = Log::default();
        let mut rows: Vec<Row> = ["a", "b", "c", "alone"].iter().map(|name| row(name, &log)).collect();
        rows[1] = against(row("b", &log), "a");
        rows[2] = against(row("c", &log), "a");
        rows[3].group = "other".into();
        let measured = go(&mut rows, 6, &Stop::new());
        assert!(measured.complete && measured.rounds == 6);
        for round in 1..=6 {
            // a, a again, b and c, and alone with itself: two blocks, in either order.
            let runs = in_round(&log, round);
            assert_eq!(runs.len(), 8 + 4, "{runs:?}");
            let first = if runs[0] == "alone" { 4 } else { 8 };
            for block in [&runs[..first], &runs[first..]] {
                assert!(block.iter().eq(block.iter().rev()), "{block:?}");
                assert!(block.len() == 8 || block.iter().all(|name| name == "alone"), "{block:?}");
            }
        }
        let names: Vec<_> = measured.rows.iter().map(|result| result.name.as_str()).collect();
        assert_eq!(names, ["row=a", "row=a again=A/A", "row=b", "row=c", "row=alone", "row=alone again=A/A"]);
        assert_eq!(measured.rows[1].repeats.as_deref(), Some("row=a"));
        // The warm-up round is thrown away, and values stay in the order of the rounds.
        for result in &measured.rows {
            assert_eq!(result.values, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0, 6.0]);
            assert_eq!(result.extra["drops"], [2.0; 12]);
            assert_eq!(result.summary.unwrap().median, 3.5);
            let rounds: Vec<usize> =
                result.blocks.iter().map(|block| measured.blocks[*block].round).collect();
            assert_eq!(rounds, [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]);
        }
        assert_eq!(measured.rows[0].blocks, measured.rows[2].blocks);
        assert_eq!(in_round(&log, 0).len(), 6, "each once to warm up");
    }

    #[test]
    fn a_baseline_of_many_is_in_several_blocks() {
        let log = Log::default();
        let mut rows = vec![row("a", &log)];
        rows.extend(["b", "c", "d", "e"].map(|name| against(row(name, &log), "a")));
        let measured = go(&mut rows, 1, &Stop::new());
        // The A/A row and four: three and two of them with the baseline.
        assert_eq!(measured.blocks.len(), 2);
        let lengths: Vec<usize> = measured.rows.iter().map(|row| row.values.len()).collect();
        assert_eq!(lengths, [4, 2, 2, 2, 2, 2]);
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

    /// Tells these round trips, one after the other, and then the last one for ever.
    struct Moving(Vec<f64>);

    impl Watch for Moving {
        fn round_trip(&mut self) -> Option<f64> {
            Some(if self.0.len() > 1 { self.0.remove(0) } else { self.0[0] })
        }

        fn stolen(&mut self) -> (f64, f64) {
            (0.0, 0.01)
        }

        fn processors(&self) -> usize {
            2
        }
    }

    #[test]
    fn a_block_in_which_a_processor_moved_is_measured_again_and_given_up_in_the_end() {
        let measure = |round_trips: &[f64]| {
            let log = Log::default();
            let mut rows = [row("a", &log)];
            let mut watch = Moving(round_trips.to_vec());
            let measured = run(&mut rows, &schedule(1), &mut watch, &mut Progress::silent(), &Stop::new());
            (measured, in_round(&log, 1).len())
        };
        // The row and A/A: five probes. Moved before the second sample, then not: two samples for nothing.
        let (measured, runs) = measure(&[100.0, 101.0, 400.0, 401.0]);
        assert_eq!((measured.rejected, runs), (Rejected { moved: 1, ..Rejected::default() }, 2 + 4));
        assert_eq!(measured.blocks, [Block { round: 1, round_trip: Some(401.0) }]);
        assert_eq!(measured.rows[0].values.len(), 2);
        assert_eq!(measured.rows[0].rejected, measured.rejected);
        let (measured, runs) = measure(&[100.0, 400.0, 100.0, 400.0, 100.0, 400.0]);
        assert_eq!((measured.rejected, runs), (Rejected { moved: 3, stolen: 0, lost: 1 }, 3));
        assert!(measured.blocks.is_empty() && measured.rows[0].values.is_empty());
    }

    #[test]
    fn rows_of_one_run_are_asked_for_the_same_sample() {
        let samples = Rc::new(RefCell::new(Vec::new()));
        let figure = |name: &str| {
            let (seen, text) = (Rc::clone(&samples), name.to_owned());
            Row::measured(Labels::new().with("figure", name), "ns", Better::Lower, move |run| {
                seen.borrow_mut().push((run.sample, text.clone()));
                Ok(Sample::new(1.0))
            })
            .in_group(name)
            .of_run("run")
        };
        let measured = go(&mut [figure("rate"), figure("loss")], 1, &Stop::new());
        // Once and once more (A/A), each once to warm up and twice in the block.
        let samples = samples.take();
        assert_eq!(samples.len(), 2 * 6);
        for (at, pair) in samples.chunks(2).enumerate() {
            let sample = at as u64 + 1;
            assert_eq!(pair, [(sample, "rate".to_owned()), (sample, "loss".to_owned())]);
        }
        assert_eq!(measured.blocks.len(), 1);
    }

    #[test]
    fn every_row_is_compared_with_itself_when_that_is_asked_for() {
        let log = Log::default();
        let mut rows = [row("a", &log), against(row("b", &log), "a").goal(Some(1.2))];
        let schedule = Schedule { only_again: true, ..schedule(1) };
        let measured = run(&mut rows, &schedule, &mut Blind, &mut Progress::silent(), &Stop::new());
        let names: Vec<_> = measured.rows.iter().map(|result| result.name.as_str()).collect();
        assert_eq!(names, ["row=a", "row=a again=A/A", "row=b", "row=b again=A/A"]);
        assert!(measured.rows.iter().all(|row| row.baseline.is_none() && row.goal.is_none()));
        assert_eq!(measured.blocks.len(), 2);
    }

    #[test]
    fn no_block_is_begun_after_the_time_is_over() {
        let log = Log::default();
        let schedule = Schedule { until: Some(Instant::now()), ..schedule(5) };
        let measured =
            run(&mut [row("a", &log)], &schedule, &mut Blind, &mut Progress::silent(), &Stop::new());
        assert_eq!((measured.rounds, measured.blocks.len(), measured.complete), (0, 0, true));
    }

    #[test]
    fn a_row_that_fails_is_reported_and_the_others_go_on() {
        let log = Log::default();
        let mut calls = 0;
        let bad = |name: &str, error: fn() -> Result<Sample, RowError>| {
            Row::measured(Labels::new().with("row", name), "ns", Better::Lower, move |_| error())
                .in_group("g")
        };
        let mut rows = vec![
            row("good", &log),
            against(bad("bad", || Err(RowError::failed("no such port"))), "good"),
            Row::measured(Labels::new().with("row", "flaky"), "ns", Better::Lower, move |_| {
                calls += 1;
                if calls % 3 == 0 { Err(RowError::failed("busy")) } else { Ok(Sample::new(1.0)) }
            })
            .in_group("g"),
            bad("nothing", || Ok(Sample::new(f64::NAN))),
        ];
        let measured = go(&mut rows, 4, &Stop::new());
        assert!(measured.complete);
        let find = |name: &str| measured.rows.iter().find(|result| result.name == name).unwrap();
        assert_eq!(find("row=good").values.len(), 8);
        let bad = find("row=bad");
        assert_eq!((bad.values.len(), bad.summary), (0, None));
        // Given up after two failures in a row, the warm-up's included.
        assert_eq!(bad.errors.iter().map(|error| error.round).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(bad.errors[0].message, "no such port");
        // Every third run fails, the first of all being the warm-up: the other run of such a block does not count either, or is not made.
        let flaky = find("row=flaky");
        assert_eq!(flaky.errors.iter().map(|error| error.round).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(flaky.values.len(), 4);
        let counted = measured.blocks.iter().filter(|block| block.round == 3).count();
        assert_eq!(counted, 1, "the block of the flaky row is none");
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
        let measured = go(&mut rows, 5, &stop);
        assert!(!measured.complete);
        let stopper = measured.rows.iter().find(|result| result.name == "row=stopper").unwrap();
        assert_eq!((stopper.values.as_slice(), stopper.errors.len()), ([7.0; 4].as_slice(), 0));
        assert!(measured.rows[0].values.len() >= 4 && measured.rows[0].summary.is_some());
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
        let results = go(&mut [missing, row("a", &log)], 3, &Stop::new()).rows;
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
        let results = go(&mut [counted, failing], 3, &Stop::new()).rows;
        assert_eq!((*calls.borrow(), results[0].counts["loads/buffer"]), (1, 12.5));
        let b = results.iter().find(|result| result.name == "row=b").unwrap();
        assert_eq!((b.values.len(), b.errors[0].message.as_str()), (6, "counting: valgrind crashed"));
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
