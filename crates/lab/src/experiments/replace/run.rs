//! One run, in a process of its own: start the switch and the ends of its flows, replace or kill it again and again, and look at what the ends notice.
//!
//! ```text
//!   first processor                                                   second processor
//!   guest ------------------------------------------- vhost-user --   the switch, and whoever takes its place
//!   guest, in its pair ------------------------------ vhost-user --
//!     or its tap ------------------------------- bridge == tap ----
//!     or its tap -- bridge == tap -- ringferry guest, vhost-user --
//! ```

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ringferry_control::{self as control, Answer, Request};
use ringferry_sys::cpu;
use ringferry_sys::namespace;
use ringferry_sys::process::Spawn;
use ringferry_sys::tap::Offloads;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::case::{Case, Event, Figure, Layout, Partner};
use super::end::Place;
use super::flows::{Flows, Frames, Phase};
use crate::experiment::{RowError, Sample};
use crate::experiments::network::{self, Process, ready, words};
use crate::experiments::taps;

/// Between two events, and at least the length of a phase: what follows an event is still of its phase.
const PAUSE: Duration = Duration::from_millis(100);
/// How long the next process may take to have the ports.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often to look for it.
const LOOK: Duration = Duration::from_millis(2);

/// The order of the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Order {
    pub case: Case,
    /// Where the run's files are.
    pub folder: PathBuf,
    /// The processors of the guests and of the switch; `None` leaves all of it to the scheduler.
    pub cpus: Option<(usize, Vec<usize>)>,
    /// Number of ringferry's workers, and of its ports.
    pub workers: u16,
    pub ports: u16,
    /// Events of the run.
    pub events: u16,
}

impl Order {
    fn control(&self) -> PathBuf {
        self.folder.join("control.sock")
    }

    fn socket(&self, port: u16) -> PathBuf {
        self.folder.join(format!("{port}.sock"))
    }

    /// Returns who is at a port: the first of each pair is a guest.
    fn at(&self, port: u16) -> Partner {
        if port.is_multiple_of(2) { Partner::Guest } else { self.case.partner }
    }

    /// What follows `ringferry run`.
    fn arguments(&self) -> Vec<OsString> {
        let mut arguments = words(&["--workers", &self.workers.to_string(), "--control"]);
        arguments.push(self.control().into());
        for port in 0..self.ports {
            let mut place =
                OsString::from(if self.at(port) == Partner::Tap { "tap:" } else { "vhost-user:" });
            match self.at(port) {
                Partner::Tap => place.push(tap(port)),
                Partner::Guest | Partner::Program => place.push(self.socket(port)),
            }
            arguments.extend([OsString::from("--port"), place]);
        }
        arguments
    }

    /// Starts each `ringferry guest`. They end with their values.
    fn programs(&self, program: &Path) -> Result<Vec<Process>, RowError> {
        let start = |port| {
            let ring = if self.case.layout == Layout::Split { "split" } else { "packed" };
            let in_order = if self.case.layout == Layout::PackedInOrder { "on" } else { "off" };
            let mut arguments =
                words(&["guest", "--ring", ring, "--in-order", in_order, "--tap", &tap(port)]);
            arguments.extend([OsString::from("--socket"), self.socket(port).into()]);
            ready(program, &self.folder, "guest", arguments, Spawn::default())
        };
        (0..self.ports).filter(|&port| self.at(port) == Partner::Program).map(start).collect()
    }

    /// The ends of the flows, two for each pair. The switch and each `ringferry guest` have made their taps.
    fn places(&self) -> Result<Vec<Place>, RowError> {
        let place = |port| match self.at(port) {
            Partner::Guest => Ok(Place::Socket(self.socket(port))),
            Partner::Tap | Partner::Program => Ok(Place::Tap(taps::behind(&tap(port), Offloads::empty())?)),
        };
        (0..self.ports).map(place).collect()
    }
}

/// The tap at a port, of the switch or of a `ringferry guest`.
fn tap(port: u16) -> String {
    format!("rf{port}")
}

/// The figures that the process tells as [`Figure::ALL`], with others beside them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Outcome {
    values: Vec<f64>,
    extra: Vec<(String, f64)>,
}

impl Outcome {
    fn new(frames: Frames, mut phases: Vec<Phase>, elapsed: Duration) -> Self {
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        phases.sort_by_key(|phase| phase.gap);
        // In hundredths, rounded up: of few events the longest is that of 99 of 100.
        let gap = |hundredths: usize| {
            let at = (phases.len() * hundredths).div_ceil(100).saturating_sub(1);
            millis(phases.get(at).copied().unwrap_or_default().gap)
        };
        let values = Figure::ALL.map(|figure| match figure {
            Figure::GapMedian => gap(50),
            Figure::GapMax => gap(100),
            Figure::Lost => frames.lost as f64,
            Figure::Disordered => frames.disordered as f64,
        });
        let away = phases.iter().map(|phase| phase.away).max().unwrap_or_default();
        let extra = vec![
            ("gap p99 ms".to_owned(), gap(99)),
            ("ends away, max ms".to_owned(), millis(away)),
            ("Mpps".to_owned(), frames.received as f64 / elapsed.as_secs_f64() / 1e6),
            ("events".to_owned(), phases.len() as f64),
        ];
        Self { values: values.to_vec(), extra }
    }

    pub(super) fn samples(&self) -> [Sample; Figure::ALL.len()] {
        std::array::from_fn(|at| {
            let sample = Sample::new(self.values.get(at).copied().unwrap_or_default());
            // Beside the first figure only: they are of the whole run.
            let extra = if at == 0 { self.extra.as_slice() } else { &[] };
            extra.iter().fold(sample, |sample, (name, value)| sample.with(name, *value))
        })
    }
}

/// The switch of a run, whichever process it is.
struct Switch<'o> {
    order: &'o Order,
    program: &'o Path,
    /// The process that the lab has started: the switch, or whoever keeps it.
    process: Process,
}

impl<'o> Switch<'o> {
    fn start(order: &'o Order, program: &'o Path) -> Result<Self, RowError> {
        let (name, mut arguments) = match order.case.event {
            Event::Kill => ("keep", words(&["keep"])),
            Event::None | Event::Replace => ("switch", words(&["run"])),
        };
        arguments.extend(order.arguments());
        let process = ready(program, &order.folder, name, arguments, Spawn::default())?;
        Ok(Self { order, program, process })
    }

    /// Does what the case is about, and returns when another process is the switch.
    fn strike(&mut self) -> Result<(), RowError> {
        match self.order.case.event {
            Event::None => Ok(()),
            Event::Replace => {
                let mut arguments = words(&["run", "--replace", "--control"]);
                arguments.push(self.order.control().into());
                let next = ready(self.program, &self.order.folder, "successor", arguments, Spawn::default())?;
                let mut before = std::mem::replace(&mut self.process, next);
                wait_for("the switch that was replaced does not end", || Ok(before.ended()?.is_some()))
            }
            Event::Kill => {
                let before = self.pid()?.ok_or_else(|| RowError::failed("the switch does not answer"))?;
                let pid = i32::try_from(before).ok().and_then(Pid::from_raw);
                let pid = pid.ok_or_else(|| RowError::failed("the switch has no number"))?;
                kill_process(pid, Signal::KILL).map_err(std::io::Error::from)?;
                wait_for("the next switch does not answer", || {
                    Ok(self.pid()?.is_some_and(|now| now != before))
                })
            }
        }
    }

    /// The number of the switch's own process, while there is one.
    fn pid(&self) -> Result<Option<u32>, RowError> {
        match control::call(&self.order.control(), &Request::Show { addresses: Some(0) }) {
            Ok(Answer::Show(snapshot)) => Ok(Some(snapshot.pid)),
            _ => Ok(None),
        }
    }
}

fn wait_for(
    failure: &'static str,
    mut is_done: impl FnMut() -> Result<bool, RowError>,
) -> Result<(), RowError> {
    let begin = Instant::now();
    while !is_done()? {
        if begin.elapsed() >= PATIENCE {
            return Err(RowError::failed(failure));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Measures what is ordered. For a process with one thread.
pub(super) fn run(order: &Order, program: &Path) -> Result<Outcome, RowError> {
    if order.case.partner.needs_network() {
        network::contain()?;
        namespace::unshare_net().map_err(RowError::failed)?;
    }
    // What a thread starts runs where the thread does.
    let place = |cpus: fn(&(usize, Vec<usize>)) -> Vec<usize>| {
        order.cpus.as_ref().map_or(Ok(()), |both| cpu::restrict_current_thread(&cpus(both)))
    };
    place(|(_, switch)| switch.clone())?;
    let mut switch = Switch::start(order, program)?;
    place(|(ends, _)| vec![*ends])?;
    let _programs = order.programs(program)?;
    place(|(_, switch)| switch.clone())?;
    let mut flows = Flows::start(order.places()?, order.case.layout.features())?;
    let (phase, done, mut phases) = (AtomicUsize::new(0), AtomicBool::new(false), Vec::new());
    let begin = Instant::now();
    let mut elapsed = Duration::ZERO;
    let frames = std::thread::scope(|scope| {
        let all = scope.spawn(|| {
            if let Some((ends, _)) = order.cpus {
                cpu::pin_current_thread(ends)?;
            }
            flows.run(&phase, &done, &mut phases)
        });
        let struck = (0..order.events).try_for_each(|_| {
            std::thread::sleep(PAUSE);
            phase.fetch_add(1, Ordering::Release);
            switch.strike()?;
            std::thread::sleep(PAUSE);
            phase.fetch_add(1, Ordering::Release);
            Ok::<_, RowError>(())
        });
        elapsed = begin.elapsed();
        done.store(true, Ordering::Release);
        let frames = all.join().map_err(|_| RowError::failed("the thread of the ends has panicked"))?;
        struck.and(frames)
    })?;
    // Every other phase is that of an event; those between are quiet.
    let struck = phases.into_iter().skip(1).step_by(2).collect();
    Ok(Outcome::new(frames, struck, elapsed))
}
