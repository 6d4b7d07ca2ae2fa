//! Probes the machine around each sample: the distance of the two processors, and the time that the hypervisor took away.
//!
//! The processors of a virtual machine are threads of a host, which moves them. Where they run decides what a cache line costs on its way from one to
//! the other, and everything that the lab measures with two processors moves with it, fourfold on the machine that this was written on. The probe is a
//! ping-pong: two threads, pinned to the two processors that the samples use, hand one cache line to and fro for 20 windows of 100 µs. The distance is the
//! median window's time of a round trip. The session owns one [`Watch`]; the schedule asks it between samples, never during one.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ringferry_sys::cpu;
use serde::{Deserialize, Serialize};

use crate::stats::Summary;

/// Windows of a probe, and how long each lasts.
const WINDOWS: usize = 20;
const WINDOW: Duration = Duration::from_micros(100);
/// Round trips between two looks at the clock.
const TRIPS: u32 = 16;
/// The turn that ends a ping-pong.
const END: u64 = u64::MAX;
/// Probes of a block that are further apart than this say that a processor was moved.
const AGREE: f64 = 1.15;
/// The share of a block's processor time that may have been stolen.
const STOLEN: f64 = 0.01;

/// The distance of the two processors: the class of a cache line's round trip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Distance {
    /// Below 200 ns: one core complex.
    Near,
    /// Below 700 ns.
    Mid,
    /// Above that: other sockets, or a host that shares processors out.
    Far,
    /// There was no probe: one processor only, or the user did not want it.
    Unknown,
}

impl Distance {
    /// The class of a round trip of so many nanoseconds.
    pub fn of(round_trip: Option<f64>) -> Self {
        match round_trip {
            None => Self::Unknown,
            Some(ns) if ns < 200.0 => Self::Near,
            Some(ns) if ns < 700.0 => Self::Mid,
            Some(_) => Self::Far,
        }
    }
}

impl std::fmt::Display for Distance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Near => "near",
            Self::Mid => "mid",
            Self::Far => "far",
            Self::Unknown => "unknown",
        })
    }
}

/// Looks at the machine between samples.
pub trait Watch {
    /// Nanoseconds of a cache line's round trip between the two processors that samples use; `None` where nobody can tell.
    fn round_trip(&mut self) -> Option<f64>;

    /// Seconds that the hypervisor has kept the processors to itself so far, all of them together, and the resolution of that figure.
    fn stolen(&mut self) -> (f64, f64);

    /// How many processors [`Watch::stolen`] speaks of.
    fn processors(&self) -> usize;
}

/// Nobody looks: no block is rejected, and all of them are of one unknown distance.
#[derive(Clone, Copy, Debug, Default)]
pub struct Blind;

impl Watch for Blind {
    fn round_trip(&mut self) -> Option<f64> {
        None
    }

    fn stolen(&mut self) -> (f64, f64) {
        (0.0, 0.0)
    }

    fn processors(&self) -> usize {
        1
    }
}

/// This machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The processors that samples are pinned to, the most important first.
    cpus: Vec<usize>,
    /// The first two are probed.
    probed: bool,
}

impl Machine {
    /// Watches these processors, the first two of which are probed.
    pub fn new(cpus: &[usize]) -> Self {
        Self { cpus: cpus.to_vec(), probed: true }
    }

    /// Does not probe their distance, and watches for stolen time only.
    pub fn at_any_distance(self) -> Self {
        Self { probed: false, ..self }
    }
}

impl Watch for Machine {
    fn round_trip(&mut self) -> Option<f64> {
        let [here, there] = [*self.cpus.first()?, *self.cpus.get(1)?];
        self.probed.then(|| ping_pong([here, there])).flatten()
    }

    fn stolen(&mut self) -> (f64, f64) {
        let tick = 1.0 / rustix::param::clock_ticks_per_second() as f64;
        let text = fs::read_to_string("/proc/stat").unwrap_or_default();
        (stolen_ticks(&text, &self.cpus) as f64 * tick, tick)
    }

    fn processors(&self) -> usize {
        self.cpus.len()
    }
}

/// The `steal` column of these processors in the text of /proc/stat, added up.
fn stolen_ticks(stat: &str, cpus: &[usize]) -> u64 {
    let of = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let cpu: usize = words.next()?.strip_prefix("cpu")?.parse().ok()?;
        cpus.contains(&cpu).then(|| words.nth(7)?.parse::<u64>().ok()).flatten()
    };
    stat.lines().filter_map(of).sum()
}

/// The one thing on its cache line, and on the line that is fetched with it.
#[repr(align(128))]
struct Line(AtomicU64);

/// The median time of a round trip in nanoseconds; `None` if the threads cannot be pinned.
fn ping_pong([here, there]: [usize; 2]) -> Option<f64> {
    let line = Line(AtomicU64::new(0));
    let line = &line.0;
    std::thread::scope(|scope| {
        let answering = scope.spawn(move || {
            let pinned = cpu::pin_current_thread(there).is_ok();
            // Odd turns are this thread's. It goes on where it could not be pinned, so that the other is not left waiting.
            loop {
                match line.load(Ordering::Acquire) {
                    END => return pinned,
                    turn if turn % 2 == 1 => line.store(turn + 1, Ordering::Release),
                    _ => std::hint::spin_loop(),
                }
            }
        });
        let asking = scope.spawn(move || {
            let pinned = cpu::pin_current_thread(here).is_ok();
            let mut turn = 0;
            let mut window = || {
                let (begin, mut trips) = (Instant::now(), 0);
                loop {
                    for _ in 0..TRIPS {
                        line.store(turn + 1, Ordering::Release);
                        turn += 2;
                        while line.load(Ordering::Acquire) != turn {
                            std::hint::spin_loop();
                        }
                    }
                    trips += TRIPS;
                    let elapsed = begin.elapsed();
                    if elapsed >= WINDOW {
                        return elapsed.as_nanos() as f64 / f64::from(trips);
                    }
                }
            };
            // The first window waits for the other thread to begin.
            window();
            let windows: Vec<f64> = (0..WINDOWS).map(|_| window()).collect();
            line.store(END, Ordering::Release);
            pinned.then_some(windows)
        });
        let windows = asking.join().ok()??;
        answering.join().ok().filter(|pinned| *pinned)?;
        Some(Summary::of(&windows)?.median)
    })
}

/// The reason for which a block does not count. Its values are never one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// Its probes did not agree: a processor was moved.
    Moved,
    /// The hypervisor took too much of its time.
    Stolen,
}

/// The state of the machine during one block: begun before the first sample, probed after each.
pub struct Vigil {
    begin: Instant,
    stolen: f64,
    probes: Vec<f64>,
}

impl Vigil {
    /// Begins a block with a probe.
    pub fn begin(watch: &mut dyn Watch) -> Self {
        let (stolen, _) = watch.stolen();
        Self { begin: Instant::now(), stolen, probes: watch.round_trip().into_iter().collect() }
    }

    /// Probes after a sample. An error says that the rest of the block need not be measured.
    ///
    /// # Errors
    /// [`Rejection::Moved`].
    pub fn probe(&mut self, watch: &mut dyn Watch) -> Result<(), Rejection> {
        self.probes.extend(watch.round_trip());
        let most = self.probes.iter().copied().fold(f64::MIN, f64::max);
        let least = self.probes.iter().copied().fold(f64::MAX, f64::min);
        if most > least * AGREE { Err(Rejection::Moved) } else { Ok(()) }
    }

    /// Ends the block: the round trip while it lasted, `None` without probes.
    ///
    /// # Errors
    /// [`Rejection::Stolen`].
    pub fn end(self, watch: &mut dyn Watch) -> Result<Option<f64>, Rejection> {
        let (stolen, resolution) = watch.stolen();
        let had = self.begin.elapsed().as_secs_f64() * watch.processors() as f64;
        // One step of the kernel's figure may stand for next to nothing.
        if stolen - self.stolen > STOLEN * had + 1.5 * resolution {
            return Err(Rejection::Stolen);
        }
        Ok(Summary::of(&self.probes).map(|summary| summary.median))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine that tells what it was told.
    struct Told {
        round_trips: Vec<f64>,
        stolen: Vec<f64>,
    }

    impl Watch for Told {
        fn round_trip(&mut self) -> Option<f64> {
            Some(self.round_trips.remove(0))
        }

        fn stolen(&mut self) -> (f64, f64) {
            (self.stolen.remove(0), 0.01)
        }

        fn processors(&self) -> usize {
            2
        }
    }

    fn block(round_trips: &[f64], stolen: [f64; 2]) -> Result<Option<f64>, Rejection> {
        let mut told = Told { round_trips: round_trips.to_vec(), stolen: stolen.to_vec() };
        let mut vigil = Vigil::begin(&mut told);
        (1..round_trips.len()).try_for_each(|_| vigil.probe(&mut told))?;
        vigil.end(&mut told)
    }

    #[test]
    fn a_block_counts_if_its_probes_agree_and_little_was_stolen() {
        assert_eq!(block(&[105.0, 110.0, 100.0], [7.0, 7.0]), Ok(Some(105.0)));
        assert_eq!(block(&[105.0, 125.0, 105.0], [7.0, 7.0]), Err(Rejection::Moved));
        // Slow moves, too: the first and the last are compared, not neighbours only.
        assert_eq!(block(&[100.0, 109.0, 118.0], [7.0, 7.0]), Err(Rejection::Moved));
        // One step of 10 ms means nothing; two in a block that took no time are too many.
        assert_eq!(block(&[105.0], [7.0, 7.01]), Ok(Some(105.0)));
        assert_eq!(block(&[105.0], [7.0, 7.02]), Err(Rejection::Stolen));
        let mut blind = Blind;
        let mut vigil = Vigil::begin(&mut blind);
        assert_eq!(vigil.probe(&mut blind), Ok(()));
        assert_eq!(vigil.end(&mut blind), Ok(None));
    }

    #[test]
    fn a_machine_is_not_probed_where_the_distance_does_not_matter() {
        let mut machine = Machine::new(&cpu::allowed().unwrap()).at_any_distance();
        let mut vigil = Vigil::begin(&mut machine);
        assert_eq!(vigil.probe(&mut machine), Ok(()));
        assert!(vigil.probes.is_empty());
        assert!(machine.stolen().1 > 0.0);
    }

    #[test]
    fn the_kernels_figure_of_stolen_time_is_that_of_the_processors_used() {
        let stat = "cpu  10 20 30 40 50 60 70 80 90 100\ncpu0 1 2 3 4 5 6 7 8 9 10\ncpu1 1 2 3 4 5 6 7 30 9 10\ncpu10 1 2 3 4 5 6 7 500\nintr 1 2 3\n";
        assert_eq!(stolen_ticks(stat, &[0]), 8);
        assert_eq!(stolen_ticks(stat, &[0, 1]), 38);
        assert_eq!(stolen_ticks(stat, &[1, 10, 11]), 530);
        assert_eq!(stolen_ticks("", &[0]), 0);
    }

    #[test]
    fn round_trips_are_of_three_classes() {
        let classes = [Some(105.0), Some(350.0), Some(1650.0), None].map(Distance::of);
        assert_eq!(classes, [Distance::Near, Distance::Mid, Distance::Far, Distance::Unknown]);
    }

    #[test]
    fn a_line_goes_to_and_fro_between_two_processors() {
        let cpus = cpu::allowed().unwrap();
        let found = Machine::new(&cpus).round_trip();
        match cpus.len() {
            1 => assert_eq!(found, None),
            // Faster than light it is not, whatever the machine.
            _ => assert!(found.is_some_and(|ns| ns > 1.0), "{found:?}"),
        }
        assert_eq!(ping_pong([cpus[0], 100_000]), None, "no such processor");
        assert_eq!(ping_pong([100_000, cpus[0]]), None, "no such processor");
    }
}
