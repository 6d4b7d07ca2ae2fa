//! The schedule and its statistics on simulated machines whose processors float: what an A/A row says, and whether a difference of 5 % is found.
//!
//! The machine is a Markov chain of distances (fourfold and more apart, changing about once a minute), with a drift, noise, samples that are disturbed
//! in ways nobody sees, and stolen time that the kernel tells of. Everything comes from seeds, so the outcome is the same every time.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use fastrand::Rng;
use ringferry_lab::experiment::{Better, Row, Sample};
use ringferry_lab::labels::Labels;
use ringferry_lab::probe::Watch;
use ringferry_lab::progress::Progress;
use ringferry_lab::results::{compare_rows, cost_line, pairs};
use ringferry_lab::schedule::{self, Measured, Schedule};
use ringferry_lab::stats::{Comparison, Confidence, Summary, Verdict};
use ringferry_lab::stop::Stop;

/// Nanoseconds of a cache line's round trip.
const DISTANCES: [f64; 3] = [105.0, 350.0, 1650.0];
/// Samples between two moves of a processor, on average: a minute of half seconds.
const DWELL: f64 = 120.0;

struct Floating {
    random: Rng,
    distance: usize,
    /// ln of what everything is slower by, beside the distance.
    drift: f64,
    stolen: f64,
}

impl Floating {
    fn new(seed: u64) -> Rc<RefCell<Self>> {
        let mut random = Rng::with_seed(seed);
        let distance = random.usize(..3);
        Rc::new(RefCell::new(Self { random, distance, drift: 0.0, stolen: 0.0 }))
    }

    /// Normally distributed, by the central limit theorem.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.random.f64()).sum::<f64>() - 6.0
    }

    fn round_trip(&mut self) -> f64 {
        DISTANCES[self.distance] * (0.02 * self.normal()).exp()
    }

    /// Half a second of something that waits for `lines` round trips and computes for `instructions` nanoseconds.
    fn sample(&mut self, instructions: f64, lines: f64) -> f64 {
        // The processor is moved before, or in the middle of it.
        let before = self.distance;
        if self.random.f64() < 1.0 / DWELL {
            self.distance = self.random.usize(..3);
        }
        let share = self.random.f64();
        let distance = DISTANCES[before] * share + DISTANCES[self.distance] * (1.0 - share);
        self.drift += 0.003 * self.normal();
        let mut disturbed = 0.03 * self.normal();
        if self.random.f64() < 0.02 {
            disturbed += 0.5 * self.random.f64();
        }
        if self.random.f64() < 0.02 {
            disturbed += self.random.f64();
            self.stolen += 0.1;
        }
        (instructions + lines * distance) * (self.drift + disturbed).exp()
    }
}

/// What the schedule sees of it.
struct Seen(Rc<RefCell<Floating>>);

impl Watch for Seen {
    fn round_trip(&mut self) -> Option<f64> {
        Some(self.0.borrow_mut().round_trip())
    }

    fn stolen(&mut self) -> (f64, f64) {
        (self.0.borrow().stolen, 0.01)
    }

    fn processors(&self) -> usize {
        2
    }
}

fn row(name: &str, machine: &Rc<RefCell<Floating>>, instructions: f64, lines: f64) -> Row {
    let machine = Rc::clone(machine);
    Row::measured(Labels::new().with("row", name), "ns/buffer", Better::Lower, move |_| {
        Ok(Sample::new(machine.borrow_mut().sample(instructions, lines)))
    })
}

/// A row `a` of 30 ns and a quarter of a round trip, and `b` that is so many times as slow, for so many rounds.
fn measure(seed: u64, rounds: usize, [instructions, lines]: [f64; 2]) -> Measured {
    let machine = Floating::new(seed);
    let a = row("a", &machine, 30.0, 0.25);
    let b = row("b", &machine, 30.0 * instructions, 0.25 * lines).against(Some(a.labels.clone()));
    let cpus = vec![0, 1];
    let schedule = Schedule { rounds, seconds: Duration::ZERO, seed, cpus, only_again: false, until: None };
    let mut seen = Seen(machine);
    schedule::run(&mut [a, b], &schedule, &mut seen, &mut Progress::silent(), &Stop::new())
}

fn verdicts(measured: &Measured) -> [Comparison; 2] {
    let found = compare_rows(&measured.rows, &measured.blocks, Confidence::C95);
    let of = |name: &str| found.iter().find(|found| found.row == name).unwrap().comparison.clone();
    [of("row=a again=A/A"), of("row=b")]
}

#[test]
fn a_row_is_no_different_from_itself_in_95_of_100_sessions() {
    // As many blocks as prove anything, as a quick look has, and as ten minutes have for ten comparisons.
    for rounds in [6, 12, 24] {
        let (mut alike, mut sessions) = (0, 0);
        for seed in 0..50 {
            let measured = measure(seed, rounds, [1.0; 2]);
            for found in verdicts(&measured) {
                alike +=
                    usize::from(matches!(found.verdict, Verdict::NoDifferenceProven | Verdict::TooFewRuns));
                sessions += 1;
            }
        }
        println!("{rounds} rounds: {alike} of {sessions}");
        assert!(alike * 100 >= sessions * 95, "{rounds} rounds: {alike} of {sessions}");
    }
}

#[test]
fn five_per_cent_are_found_in_the_blocks_of_ten_minutes_and_were_not_without_pairs() {
    let (mut found, mut unpaired, mut contained) = (0, 0, 0);
    for seed in 1000..1020 {
        // Six samples of 0.6 s to a block of a row, its baseline and A/A: ten minutes have 160. A third is enough here.
        let measured = measure(seed, 55, [1.05; 2]);
        let [_, b] = verdicts(&measured);
        found += usize::from(b.verdict == Verdict::Slower);
        let ratio = b.ratio.unwrap();
        contained += usize::from(ratio.low <= 1.05 && 1.05 <= ratio.high);
        let summary = |at: usize| measured.rows[at].summary.unwrap();
        let [row, baseline] = [summary(2), summary(0)];
        let without = Comparison::new(&row, &baseline, Better::Lower, Confidence::C95).verdict;
        unpaired += usize::from(without == Verdict::Slower);
    }
    println!("found {found}, contained {contained}, unpaired {unpaired} of 20");
    assert!(found >= 19 && contained >= 17, "found {found}, contained {contained} of 20");
    assert!(unpaired <= 5, "{unpaired} of 20: the machine is too quiet to tell");
}

#[test]
fn a_line_tells_what_is_saved_in_lines_from_what_is_saved_in_instructions() {
    let measured = measure(7, 160, [1.0, 1.3]);
    let line = |at: usize| cost_line(&measured.rows[at], &measured.blocks, Confidence::C95).unwrap();
    let [a, b] = [line(0), line(2)];
    // Within what the drift allows, which is neither.
    for (line, slope) in [(a, 0.25), (b, 0.325)] {
        assert!((line.slope / slope - 1.0).abs() < 0.2 && line.slope_error < 0.2 * slope, "{line:?}");
        assert!((line.intercept / 30.0 - 1.0).abs() < 0.3, "{line:?}");
    }
    assert!(b.slope > a.slope + a.slope_error);
}

#[test]
fn blocks_in_which_a_processor_moved_or_time_was_stolen_do_not_count() {
    let measured = measure(3, 60, [1.0; 2]);
    assert!(measured.rejected.moved > 0 && measured.rejected.stolen > 0, "{:?}", measured.rejected);
    assert_eq!(measured.blocks.len() + measured.rejected.lost, 60);
    // What counts was measured at one distance: its pairs are close, though the machine changes sixteenfold.
    let pairs = pairs(&measured.rows[2], &measured.rows[0], &measured.blocks);
    assert_eq!(pairs.len(), measured.blocks.len());
    for pair in &pairs {
        let mean = |values: &[f64]| Summary::of(values).unwrap().mean;
        let ratio = mean(&pair.row) / mean(&pair.baseline);
        assert!((0.6..1.7).contains(&ratio), "{pair:?}");
    }
    let all = measured.rows[0].summary.unwrap();
    assert!(all.max > 4.0 * all.min, "{all:?}");
}
