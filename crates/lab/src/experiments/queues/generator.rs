//! The packet generator's rows: as many threads as queues, each on a processor of its own, and on each the driver and the
//! device of one queue. One run.

use std::fmt;
use std::time::Duration;

use ringferry_sys::process;

use super::case::{Per, SOURCE, group};
use super::halves::{CHECKED, Halves};
use crate::experiment::{Published, RowError, Run, Sample};
use crate::experiments::txmap::clock::{Finally, Gauge, Over, joined, pin, sleep, wait};
use crate::labels::Labels;

/// Share of their processors that the threads must have had for a window to count, and how many are tried. Then the
/// one with the largest share stands.
const SHARE: f64 = 0.95;
const ATTEMPTS: usize = 3;

/// Most queues: what was published.
const QUEUES: usize = 4;

/// Rounds between two looks at whether it is over.
const ROUNDS: usize = 16;

/// The direction of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the driver to the device.
    Transmit,
    /// From the device to the driver.
    Receive,
}

impl Direction {
    pub(super) const ALL: [Direction; 2] = [Direction::Transmit, Direction::Receive];
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direction::Transmit => "transmit",
            Direction::Receive => "receive",
        })
    }
}

/// A case, which has two rows as [`Per::BOTH`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub direction: Direction,
    pub queues: usize,
}

impl Case {
    pub(super) fn all() -> impl Iterator<Item = Case> {
        let queues = |direction| (1..=QUEUES).map(move |queues| Case { direction, queues });
        Direction::ALL.into_iter().flat_map(queues)
    }

    pub(super) fn labels(&self, per: Per) -> Labels {
        Labels::new()
            .with("test", "generator")
            .with("direction", self.direction)
            .with("queues", self.queues)
            .with("per", per)
    }

    /// The same with one queue.
    pub(super) fn single(&self) -> Case {
        Case { queues: 1, ..*self }
    }

    pub(super) fn group(&self, per: Per) -> String {
        group(&format!("packet generator, {}", self.direction), per)
    }

    /// The packets that a guest's driver sent, in thousands.
    pub(super) fn published(&self, per: Per) -> Option<Published> {
        if (self.direction, per) != (Direction::Transmit, Per::Second) {
            return None;
        }
        let kpps = [589.0, 952.0, 1290.0, 1578.0].get(self.queues - 1)?;
        Some(Published::new(
            &format!("pktgen in a guest of 4 CPUs, {} queues", self.queues),
            *kpps,
            "kpps",
            SOURCE,
        ))
    }
}

/// The counters of one window.
#[derive(Clone, Debug)]
struct Window {
    /// Frames of each queue.
    frames: Vec<u64>,
    seconds: f64,
    cpu_seconds: f64,
}

impl Window {
    /// Of its processor, what each thread had.
    fn share(&self) -> f64 {
        (self.cpu_seconds / self.seconds / self.frames.len() as f64).min(1.0)
    }

    /// The rates in thousands of packets.
    fn samples(&self) -> [Sample; 2] {
        let frames: u64 = self.frames.iter().sum();
        let thousands = frames as f64 / 1e3;
        // What it would be without other work on the machine: this scales with queues if they cost each other nothing.
        let full = thousands / self.cpu_seconds * self.frames.len() as f64;
        let sample = Sample::new(thousands / self.seconds);
        let mut sample = sample.with("CPU share", self.share()).with("at full CPU share", full);
        if self.frames.len() > 1 {
            for (queue, &own) in self.frames.iter().enumerate() {
                sample = sample.with(&format!("queue {queue} share"), own as f64 / frames.max(1) as f64);
            }
        }
        [sample, Sample::new(thousands / self.cpu_seconds)]
    }
}

pub(super) fn measure(case: &Case, run: &Run<'_>) -> Result<[Sample; Per::BOTH.len()], RowError> {
    let halves = Halves::new(case.queues)?;
    let gauges: Vec<Gauge> = halves.iter().map(|_| Gauge::default()).collect();
    let over = Over::default();
    std::thread::scope(|scope| {
        let _finally = Finally([&over]);
        let threads: Vec<_> = std::iter::zip(halves, &gauges)
            .enumerate()
            .map(|(queue, (halves, gauge))| {
                let over = &over;
                scope.spawn(move || -> Result<(), RowError> {
                    pin(run.cpu(queue))?;
                    let mut generator = halves.generator(case.direction);
                    while !over.told() {
                        let mut arrived = 0;
                        for _ in 0..ROUNDS {
                            arrived = generator.round()?;
                        }
                        gauge.set(arrived);
                    }
                    Ok(())
                })
            })
            .collect();
        let alive = || !threads.iter().any(std::thread::ScopedJoinHandle::is_finished);
        let checked = || Ok(gauges.iter().all(|gauge| gauge.get() >= CHECKED));
        let measured =
            wait(run, "frames to be checked", alive, checked).and_then(|()| best(run, &gauges, alive));
        over.tell();
        // What a thread says went wrong is why the measurement did.
        threads.into_iter().try_for_each(|thread| joined(thread.join()))?;
        Ok(measured?.samples())
    })
}

/// The window with the largest share of the processors.
fn best(run: &Run<'_>, gauges: &[Gauge], alive: impl Fn() -> bool + Copy) -> Result<Window, RowError> {
    let mut best: Option<Window> = None;
    for _ in 0..ATTEMPTS {
        let window = window(run, gauges, alive)?;
        if best.as_ref().is_none_or(|best| window.share() > best.share()) {
            best = Some(window);
        }
        if best.as_ref().is_some_and(|best| best.share() >= SHARE) {
            break;
        }
    }
    best.ok_or_else(|| RowError::failed("no window was measured"))
}

fn window(run: &Run<'_>, gauges: &[Gauge], alive: impl Fn() -> bool) -> Result<Window, RowError> {
    // The threads, and one that sleeps.
    let used = || process::cpu_time(std::process::id());
    let frames = || gauges.iter().map(Gauge::get);
    let (cpu, from) = (used()?, frames().collect::<Vec<_>>());
    let time: Duration = sleep(run, run.seconds, alive)?;
    let frames = frames().zip(from).map(|(to, from)| to - from).collect();
    let cpu_seconds = used()?.saturating_sub(cpu).as_secs_f64();
    Ok(Window { frames, seconds: time.as_secs_f64(), cpu_seconds })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Stop;

    #[test]
    fn as_many_threads_as_queues_carry_frames() {
        let cpus = ringferry_sys::cpu::allowed().unwrap();
        let stop = Stop::new();
        let run = Run {
            seconds: Duration::from_millis(20),
            seed: 1,
            round: 1,
            sample: 1,
            cpus: &cpus,
            stop: &stop,
        };
        for case in Case::all().filter(|case| case.queues <= 2) {
            let [second, cpu] = measure(&case, &run).unwrap();
            assert!(second.value > 0.0 && cpu.value > 0.0, "{case:?}");
            let shares: f64 =
                (0..case.queues).filter_map(|queue| second.extra.get(&format!("queue {queue} share"))).sum();
            assert!(case.queues == 1 || (shares - 1.0).abs() < 1e-9, "{second:?}");
        }
    }

    #[test]
    fn a_window_is_told_in_time_and_in_processor_time() {
        let window = Window { frames: vec![3_000_000, 1_000_000], seconds: 2.0, cpu_seconds: 3.2 };
        let [second, cpu] = window.samples();
        assert_eq!((second.value, cpu.value), (2000.0, 1250.0));
        assert_eq!(second.extra["queue 0 share"], 0.75);
        assert_eq!((second.extra["CPU share"], second.extra["at full CPU share"]), (0.8, 2500.0));
    }

    #[test]
    fn the_published_table_is_beside_the_rows_that_send() {
        let figures = Case::all().filter_map(|case| case.published(Per::Second));
        let figures: Vec<f64> = figures.map(|figure| figure.value).collect();
        assert_eq!(figures, [589.0, 952.0, 1290.0, 1578.0]);
        assert!(Case::all().all(|case| case.published(Per::CpuSecond).is_none()));
    }
}
