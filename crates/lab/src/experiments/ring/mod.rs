//! `lab ring`: what a buffer costs that goes once round a ring, between two threads, and what shadowing
//! is worth.
//!
//! | module | idea |
//! |---|---|
//! | `variant` | what is measured against what, and its names |
//! | `sides` | the two sides of each ring, and of the null ring that measures the harness |
//! | `unshadowed` | ring memory that switches shadowing off, for this experiment only |
//! | `exchange` | the two threads, polling or sleeping |
//! | `cachegrind` | loads and stores per buffer |

mod cachegrind;
mod exchange;
mod sides;
mod unshadowed;
mod variant;

use std::path::Path;

use crate::experiment::{
    Better, Defaults, Experiment, OptionSpec, Plan, Published, Row, RowError, Run, Sample, Setup,
};
use crate::experiments::valgrind;
use exchange::{Alone, Exchanged, Goal, Threads};
use sides::with_sides;
use variant::{BATCHES, Kind, Variant};

/// Entries of a ring: twice the largest batch, so that the two sides overlap in every row.
const SIZE: u16 = 512;

/// Where the published figures of shadowing come from.
const SHADOWING: &str = "ring shadowing in Linux's virtio ring test, 10 000 000 buffers, AMD Piledriver";
/// Where the published figures of other layouts come from.
const RINGTEST: &str = "Linux tools/virtio/ringtest, batch 1, a shared virtual machine with two cores";

#[derive(Clone, Copy, Debug)]
pub struct Ring;

impl Experiment for Ring {
    fn name(&self) -> &'static str {
        "ring"
    }

    fn about(&self) -> &'static str {
        "a buffer's way round a ring between two threads: split, packed, in order, with and without shadowing"
    }

    fn options(&self) -> &'static [OptionSpec] {
        &[
            OptionSpec {
                name: "buffers",
                help: "buffers per run, in place of --seconds; 10000000 is what was published",
            },
            OptionSpec { name: "size", help: "entries of the ring, a power of two; default 512" },
            OptionSpec {
                name: "counts",
                help: "count loads and stores by cachegrind: on (rows of batch 32), all, or off; default on",
            },
        ]
    }

    fn defaults(&self) -> Defaults {
        // Some 150 rows, twice in each of seven rounds and a warm-up: seven minutes.
        Defaults { runs: 7, seconds: 0.1, set_up: 0.02 }
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let size: u16 = setup.option("size", SIZE)?;
        let largest = BATCHES.into_iter().max().unwrap_or(1);
        ringferry_ring::check_size(u32::from(size), false).map_err(RowError::failed)?;
        if usize::from(size) < largest {
            return Err(RowError::failed(format!("--option size={size}: a batch of {largest} must fit")));
        }
        let goal = match setup.option("buffers", 0usize)? {
            0 => Goal::Time(setup.seconds),
            buffers => Goal::Buffers(buffers),
        };
        let counts = Counts::parse(&setup.option("counts", "on".to_owned())?)?;
        let mut plan = Plan { published: published(), notes: notes(goal, size, setup), ..Plan::default() };
        let mut counting = counts != Counts::Off;
        if counting {
            match valgrind::find("loads/buffer and stores/buffer") {
                Ok(peer) => plan.peers.push(peer),
                Err(missing) => {
                    counting = false;
                    plan.missing.push(missing);
                }
            }
        }
        for variant in Variant::all() {
            let mut row =
                Row::measured(variant.labels(), "ns/buffer", Better::Lower, move |run: &Run<'_>| {
                    measure(&variant, size, goal, run)
                })
                .in_group(&variant.group())
                .against(variant.baseline().map(|baseline| baseline.labels()))
                .published(figures(&variant));
            if counting && counts.wanted(&variant) {
                let setup = setup.clone();
                row = row.counting(move |_| cachegrind::count(&setup, &variant, size));
            }
            plan.rows.push(row);
        }
        Ok(plan)
    }

    fn child(&self, _program: &Path, args: &[String]) -> Result<(), RowError> {
        let wrong = || RowError::failed("usage: lab child ring VARIANT SIZE BUFFERS");
        let [name, size, buffers] = args else { return Err(wrong()) };
        let variant = Variant::named(name).ok_or_else(wrong)?;
        let size = size.parse().map_err(|_| wrong())?;
        let buffers = buffers.parse().map_err(|_| wrong())?;
        with_sides(&variant, size, Alone { batch: variant.batch, buffers })?
    }
}

/// The rows that have their loads and stores counted.
#[derive(Clone, Copy, PartialEq)]
enum Counts {
    Off,
    Some,
    All,
}

impl Counts {
    fn parse(text: &str) -> Result<Self, RowError> {
        match text {
            "off" => Ok(Self::Off),
            "on" => Ok(Self::Some),
            "all" => Ok(Self::All),
            other => Err(RowError::failed(format!("--option counts={other}: on, all or off"))),
        }
    }

    /// One thread plays both sides when it is counted, so nobody is ever notified.
    fn wanted(self, variant: &Variant) -> bool {
        !variant.notified && (self == Self::All || variant.batch == 32)
    }
}

fn measure(variant: &Variant, size: u16, goal: Goal, run: &Run<'_>) -> Result<Sample, RowError> {
    let threads = Threads { variant: *variant, goal, run };
    let Exchanged { buffers, elapsed, signals: [kicks, calls] } = with_sides(variant, size, threads)??;
    let per_buffer = |count: f64| count / buffers.max(1) as f64;
    let sample = Sample::new(per_buffer(elapsed.as_nanos() as f64)).with("buffers", buffers as f64);
    Ok(if variant.notified {
        sample.with("kicks/buffer", per_buffer(kicks as f64)).with("calls/buffer", per_buffer(calls as f64))
    } else {
        sample
    })
}

fn notes(goal: Goal, size: u16, setup: &Setup) -> Vec<String> {
    let much = match goal {
        Goal::Time(time) => format!("as many buffers per run as {} s allow", time.as_secs_f64()),
        Goal::Buffers(buffers) => format!("{buffers} buffers per run"),
    };
    let placed = match setup.cpus.as_slice() {
        [driver, worker, ..] => {
            format!("the driving thread on processor {driver}, the worker on {worker}")
        }
        _ => "two threads on one processor: polling rows measure the scheduler".into(),
    };
    vec![
        format!("{much}; rings of {size} entries; {placed}"),
        "direct: one descriptor per buffer; indirect: a table of two, as a single one never goes into a table"
            .into(),
        "polling: no events; notified: EVENT_IDX, and a thread without work sleeps on an eventfd at once".into(),
        "loads and stores are those of both sides together, played in turn by one thread that polls".into(),
    ]
}

fn published() -> Vec<Published> {
    let shadowing = |what, value, unit| Published::new(what, value, unit, SHADOWING);
    vec![
        shadowing("10 000 000 buffers without shadowing", 2.221_477_739, "s"),
        shadowing("10 000 000 buffers with shadowing", 2.168_405_376, "s"),
        shadowing("L1 data cache loads without shadowing", 5_451_082_016.0, "loads"),
        shadowing("L1 data cache loads with shadowing", 5_405_701_361.0, "loads"),
        Published::new("its single-ring layout, per buffer", 75.0, "ns", RINGTEST),
        Published::new("the best of its split variants, per buffer", 302.0, "ns", RINGTEST),
        Published::new("the worst of its split variants, per buffer", 441.0, "ns", RINGTEST),
    ]
}

/// The published figures that belong beside a row: where layout, chains and batch are the same.
fn figures(variant: &Variant) -> Vec<Published> {
    let Kind::Ring { packed: false, in_order: false, indirect: false, shadow } = variant.kind else {
        return Vec::new();
    };
    if variant.notified || variant.batch != 1 {
        return Vec::new();
    }
    let (what, seconds) = if shadow {
        ("split ring with shadowing", 2.168_405_376)
    } else {
        ("split ring without shadowing", 2.221_477_739)
    };
    // Seconds for 10^7 buffers are hundreds of nanoseconds per buffer.
    vec![Published::new(what, seconds * 100.0, "ns/buffer", SHADOWING)]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::stop::Stop;

    fn go(variant: &Variant, goal: Goal, cpus: &[usize]) -> Result<Exchanged, RowError> {
        let stop = Stop::new();
        let run = Run { seconds: Duration::ZERO, seed: 1, round: 1, sample: 1, cpus, stop: &stop };
        with_sides(variant, SIZE, Threads { variant: *variant, goal, run: &run })?
    }

    #[test]
    fn every_variant_carries_all_buffers_round() {
        let cpus = ringferry_sys::cpu::allowed().unwrap();
        for variant in Variant::all() {
            let name = variant.labels();
            let exchanged =
                go(&variant, Goal::Buffers(3000), &cpus).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(exchanged.buffers, 3000usize.next_multiple_of(variant.batch), "{name}");
            let [kicks, calls] = exchanged.signals;
            assert!(variant.notified || kicks + calls == 0, "{name}: polling needs no signals");
            assert!(kicks <= exchanged.buffers && calls <= exchanged.buffers, "{name}");
        }
    }

    #[test]
    fn sides_on_one_processor_come_to_an_end() {
        let cpu = ringferry_sys::cpu::allowed().unwrap()[0];
        for variant in Variant::all().into_iter().filter(|variant| variant.batch == 32) {
            assert!(go(&variant, Goal::Buffers(1000), &[cpu]).is_ok(), "{}", variant.labels());
        }
    }

    #[test]
    fn a_run_by_time_ends_and_counts() {
        let cpus = ringferry_sys::cpu::allowed().unwrap();
        let variant = Variant::all()[0];
        let limit = Duration::from_millis(5);
        let exchanged = go(&variant, Goal::Time(limit), &cpus).unwrap();
        assert!(exchanged.elapsed >= limit && exchanged.buffers > 0);
    }

    #[test]
    fn ctrl_c_ends_an_exchange() {
        let stop = Stop::new();
        stop.request();
        let cpus = ringferry_sys::cpu::allowed().unwrap();
        let run = Run { seconds: Duration::ZERO, seed: 1, round: 1, sample: 1, cpus: &cpus, stop: &stop };
        for variant in Variant::all().into_iter().filter(|variant| variant.batch == 8) {
            let threads = Threads { variant, goal: Goal::Buffers(usize::MAX / 2), run: &run };
            let result = with_sides(&variant, SIZE, threads).unwrap();
            assert_eq!(result.unwrap_err(), RowError::Stopped, "{}", variant.labels());
        }
    }

    #[test]
    fn one_thread_can_play_both_sides_of_every_variant() {
        for variant in Variant::all() {
            with_sides(&variant, SIZE, Alone { batch: variant.batch, buffers: 2048 }).unwrap().unwrap();
        }
    }

    #[test]
    fn the_plan_compares_shadowing_and_knows_the_published_figures() {
        let plan = Ring.plan(&Setup::planning(2, &[("counts", "off")])).unwrap();
        assert_eq!(plan.rows.len(), Variant::all().len());
        let names: Vec<_> = plan.rows.iter().map(Row::name).collect();
        for row in &plan.rows {
            assert!(row.baseline.as_ref().is_none_or(|baseline| names.contains(baseline)));
            assert_eq!(row.baseline.is_some(), row.labels.get("shadow") == Some("on"));
            assert!(row.counts.is_none());
        }
        let beside: Vec<f64> =
            plan.rows.iter().flat_map(|row| &row.published).map(|figure| figure.value.round()).collect();
        assert_eq!(beside, [222.0, 217.0]);
        assert_eq!(plan.published[2].value, 5_451_082_016.0);
    }

    #[test]
    fn bad_options_are_refused() {
        for options in [("size", "100"), ("size", "128"), ("size", "x"), ("buffers", "-1"), ("counts", "x")] {
            let error = Ring.plan(&Setup::planning(2, &[options])).err().unwrap();
            assert!(error.to_string().contains(options.1), "{error}");
        }
        assert!(Ring.child(Path::new("ringferry"), &["ring=split".into()]).is_err());
    }
}
