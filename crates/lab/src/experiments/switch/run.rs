//! One run, in a process of its own: start the switch and the ends, look at frames whole, then measure all figures.

use std::path::Path;
use std::time::Duration;

use ringferry_sys::namespace;
use ringferry_sys::{cpu, process};
use serde::{Deserialize, Serialize};

use super::case::{Figure, LOADS, SINGLE, Who};
use super::contest::{Contest, Order};
use super::end::{End, Shape};
use super::load::{Bench, Load, Window};
use super::search::{Search, Trial};
use crate::experiment::{RowError, Sample};
use crate::experiments::network;
use crate::frames::ways::{Format, longest};

/// How long the switch is watched while nothing happens, and left alone before.
const IDLE: Duration = Duration::from_millis(300);
const SETTLE: Duration = Duration::from_millis(100);

/// Before a rate is read: caches are warm, and a switch that learns has learnt.
const WARM_UP: Duration = Duration::from_millis(30);

/// Frames that a latency is of, at least.
const LEAST: f64 = 200.0;

/// The search begins so far above what went in at full load, where the generator never waits for its time.
const HEADROOM: f64 = 1.02;

/// The figures that the process prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// Frames and bits a second that arrived at full load, and frames that went in.
    packets: f64,
    bits: f64,
    offered: f64,
    loss: f64,
    /// Shares of the frames that arrived.
    misordered: f64,
    late: f64,
    strays: f64,
    full_share: f64,
    /// Processors that the switch and the ends kept busy.
    switch_cpus: f64,
    ends_cpus: f64,
    cpu_per_gigabyte: f64,
    /// Per cent of a processor.
    idle_cpu: f64,
    ndr: f64,
    pdr: f64,
    trials: [usize; 2],
    latency: Vec<Latency>,
    wake_up: Latency,
    huge_pages: bool,
}

/// The latencies at a rate.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Latency {
    rate: f64,
    /// The figures of [`MICROS`].
    micros: [f64; 4],
    loss: f64,
    frames: u64,
}

/// The figures of a latency.
const MICROS: [&str; 4] = ["p50 µs", "p99 µs", "p99.9 µs", "max µs"];
const P50: usize = 0;
const P99: usize = 1;

impl Latency {
    /// One of [`MICROS`], and all else beside it.
    fn sample(&self, figure: usize) -> Sample {
        let others = (0..MICROS.len()).filter(|at| *at != figure);
        others
            .fold(Sample::new(self.micros[figure]), |sample, at| sample.with(MICROS[at], self.micros[at]))
            .with("Mpps", self.rate / 1e6)
            .with("lost share", self.loss)
            .with("frames", self.frames as f64)
    }
}

impl Outcome {
    /// The samples of the rows, as [`Figure::ALL`].
    pub(super) fn samples(&self, loss: f64) -> [Sample; Figure::ALL.len()] {
        let huge = |sample: Sample| sample.with("huge pages", f64::from(u8::from(self.huge_pages)));
        Figure::ALL.map(|figure| match figure {
            Figure::Rate => huge(
                Sample::new(self.packets / 1e6)
                    .with("Gbit/s", self.bits / 1e9)
                    .with("offered Mpps", self.offered / 1e6)
                    .with("lost share", self.loss)
                    .with("misordered share", self.misordered)
                    .with("late share", self.late)
                    .with("stray share", self.strays)
                    .with("input full share", self.full_share)
                    .with("CPUs, switch", self.switch_cpus)
                    .with("CPUs, ends", self.ends_cpus),
            ),
            Figure::Ndr => Sample::new(self.ndr / 1e6)
                .with("trials", self.trials[0] as f64)
                .with("trials again", self.trials[1] as f64),
            Figure::Pdr => Sample::new(self.pdr / 1e6).with("loss allowed, %", 100.0 * loss),
            Figure::Latency(load) => {
                let at = LOADS.iter().position(|&of| of == load).unwrap_or_default();
                self.latency[at].sample(P99)
            }
            Figure::WakeUp => self.wake_up.sample(P50),
            Figure::CpuPerGigabyte => Sample::new(self.cpu_per_gigabyte),
            Figure::IdleCpu => Sample::new(self.idle_cpu),
        })
    }
}

/// Measures what is ordered. For a process with one thread.
pub(super) fn run(order: &Order, program: &Path) -> Result<Outcome, RowError> {
    if isolated(order) {
        network::contain()?;
        namespace::unshare_net().map_err(RowError::failed)?;
    }
    let mut contest = Contest::start(order, program)?;
    cpu::pin_current_thread(order.cpus[0])?;
    let measured =
        Bench::start(order, &mut contest).and_then(|mut bench| measure(order, &mut bench, &mut contest));
    measured.map_err(|error| contest.explain(error))
}

/// Returns true if the run needs a network of its own: for taps, which Open vSwitch makes in any case.
pub(super) fn isolated(order: &Order) -> bool {
    let case = &order.case;
    case.ends.taps() != [false; 2] || matches!(case.who, Who::Ovs | Who::Bridge)
}

impl Bench {
    /// Starts the ends of all ways.
    fn start(order: &Order, contest: &mut Contest) -> Result<Self, RowError> {
        let case = &order.case;
        let shape =
            Shape { features: case.features(order.ring), queue: order.queue, longest: longest(case.frames) };
        let mut ends = Vec::new();
        for place in std::mem::take(&mut contest.places) {
            ends.push(End::start(place, &shape, || contest.check())?);
        }
        let mut ends = ends.into_iter();
        let mut ways = Vec::new();
        while let (Some(from), Some(to)) = (ends.next(), ends.next()) {
            ways.push(([from, to], Format::new(case.frames, ways.len() as u8, case.flows)));
        }
        // The kernel's bridge works in whoever sends, so that one has the switch's processor.
        let apart = (case.who == Who::Bridge).then_some(order.cpus[1]);
        Ok(Bench::new(ways, case.who == Who::TestpmdMac, apart))
    }
}

fn measure(order: &Order, bench: &mut Bench, contest: &mut Contest) -> Result<Outcome, RowError> {
    bench.check(&mut || contest.check())?;
    let idle_cpu = idle(contest)?;
    let time = Duration::from_secs_f64(order.seconds);
    let trial = Duration::from_secs_f64(order.trial);

    bench.run(Load::Full, WARM_UP.min(time), false)?;
    let before = (contest.processor_time()?, process::cpu_time(std::process::id())?);
    let full = bench.run(Load::Full, time, false)?;
    contest.check()?;
    let after = (contest.processor_time()?, process::cpu_time(std::process::id())?);
    let ends = (after.1 - before.1).as_secs_f64();
    // What was under way when the time was over took a moment more, of a rate that says nothing: a share of a percent.
    let switch = match (before.0, after.0, full.generator_cpu) {
        (Some(before), Some(after), _) => (after - before).as_secs_f64(),
        (_, _, own) => own.unwrap_or_default().as_secs_f64(),
    };

    let offered = full.offered as f64 / full.seconds;
    let ring = order.queue;
    let mut search = Search::new(offered * HEADROOM, order.precision, |rate| {
        let window = bench.run(Load::Rate(rate), trial, false)?;
        contest.check()?;
        Ok(Trial { rate, loss: window.loss(), disturbed: disturbed(&window, rate, ring) })
    });
    let ndr = search.highest(0.0)?;
    let pdr = search.highest(order.loss)?;
    let trials = search.trials();
    // Where no rate is free of loss, the next best is what latency is told of.
    let reference = [ndr, pdr, full.in_time as f64 / full.seconds].into_iter().find(|&rate| rate > 0.0);
    let reference = reference.ok_or_else(|| RowError::failed("nothing arrived at full load"))?;
    let mut at = |rate: f64| {
        // Long enough for some frames, however slow.
        let time = time.max(Duration::from_secs_f64((LEAST / rate).min(1.0)));
        let window = bench.run(Load::Rate(rate), time, true)?;
        contest.check()?;
        let found = window.latency.as_ref().filter(|found| !found.is_empty());
        let found =
            found.ok_or_else(|| RowError::failed(format!("nothing arrived at {rate:.0} frames a second")))?;
        let micros = |percent| found.value_at_percentile(percent) as f64 / 1000.0;
        Ok(Latency {
            rate,
            micros: [micros(50.0), micros(99.0), micros(99.9), found.max() as f64 / 1000.0],
            loss: window.loss(),
            frames: found.len(),
        })
    };
    let loads = LOADS.iter().map(|&load| at(reference * f64::from(load) / 100.0));
    let latency = loads.collect::<Result<Vec<_>, RowError>>()?;
    let wake_up = at(SINGLE)?;
    let share = |frames: u64| frames as f64 / full.received.max(1) as f64;
    Ok(Outcome {
        packets: full.in_time as f64 / full.seconds,
        bits: 8.0 * full.bytes_in_time as f64 / full.seconds,
        offered,
        loss: full.loss(),
        misordered: share(full.misordered),
        late: share(full.late),
        strays: share(full.strays),
        full_share: full.full_share,
        switch_cpus: switch / full.seconds,
        ends_cpus: ends / full.seconds,
        cpu_per_gigabyte: switch * 1e9 / full.bytes_in_time.max(1) as f64,
        idle_cpu,
        ndr,
        pdr,
        trials,
        latency,
        wake_up,
        huge_pages: order.huge_pages,
    })
}

/// Per cent of a processor that the switch takes while nothing happens.
fn idle(contest: &Contest) -> Result<f64, RowError> {
    std::thread::sleep(SETTLE);
    let Some(before) = contest.processor_time()? else { return Ok(0.0) };
    let begin = std::time::Instant::now();
    std::thread::sleep(IDLE);
    let after = contest.processor_time()?.unwrap_or(before);
    Ok(100.0 * (after - before).as_secs_f64() / begin.elapsed().as_secs_f64())
}

/// Returns true if the ends were away for longer than half a ring lasts at this rate: what was lost then is not the switch's.
fn disturbed(window: &Window, rate: f64, ring: u16) -> bool {
    window.stall.as_secs_f64() * rate > f64::from(ring) / 2.0
}
