//! The switch: a process on a processor of its own, or the kernel. Each is started for one run, with the ports that the
//! row wants, in a network namespace that goes with the run; what it says goes to files in the run's folder.
//!
//! | module | who |
//! |---|---|
//! | `ringferry` | `ringferry run`, which listens for its guests |
//! | `testpmd` | DPDK's testpmd with a `net_vhost` or `net_tap` port for each |
//! | `ovs` | Open vSwitch's own datapath, which connects to its guests |
//! | `bridge` | the kernel's bridge; taps stand for guests |

mod bridge;
mod ovs;
mod ringferry;
pub(super) mod testpmd;

use std::path::{Path, PathBuf};
use std::time::Duration;

use ringferry_rig::testpmd::last_words;
use ringferry_sys::tap::Offloads;
use ringferry_sys::{cpu, process};
use serde::{Deserialize, Serialize};

use super::case::{Case, Ring, Who};
use super::end::Place;
use crate::experiment::RowError;
use crate::experiments::network::Process;
use crate::experiments::taps;
use crate::frames::ways::Frames;

/// The order of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Order {
    pub case: Case,
    /// Where the run's files are.
    pub folder: PathBuf,
    /// The ends' processor, and the switch's.
    pub cpus: [usize; 2],
    pub ring: Ring,
    pub queue: u16,
    /// Microseconds that ringferry is to poll, if not as many as it does of its own accord.
    pub poll: Option<u32>,
    /// Seconds of a rate or a latency, and of a trial.
    pub seconds: f64,
    pub trial: f64,
    /// The second threshold of loss, and how well a rate is to be known, as shares.
    pub loss: f64,
    pub precision: f64,
    /// True if huge pages are reserved.
    pub huge_pages: bool,
    /// Path of testpmd, where it is installed.
    pub testpmd: Option<PathBuf>,
}

impl Order {
    /// Says of each port whether it is a tap, as those of the first and of the second end of each way may be.
    fn taps(&self) -> impl Iterator<Item = bool> {
        let taps = self.case.ends.taps();
        (0..self.case.ports).map(move |port| taps[port % 2])
    }

    /// The socket of a port that is no tap.
    fn socket(&self, port: usize) -> PathBuf {
        self.folder.join(format!("{port}.sock"))
    }

    /// Where each port of a switch is that listens at its sockets and makes its taps.
    fn places(&self) -> Result<Vec<Place>, RowError> {
        let place = |(port, tap)| {
            Ok(if tap {
                Place::Tap(taps::behind(&tap_name(port), self.offloads())?)
            } else {
                Place::Connect(self.socket(port))
            })
        };
        self.taps().enumerate().map(place).collect()
    }

    fn tso(&self) -> bool {
        self.case.frames == Frames::Tso
    }

    /// Returns the offloads of the lab's own taps, which take and give such frames uncut.
    fn offloads(&self) -> Offloads {
        if self.tso() { Offloads::all() } else { Offloads::empty() }
    }
}

/// The tap of a port.
fn tap_name(port: usize) -> String {
    format!("rf{port}")
}

/// A switch at work. Fields go in this order.
pub(super) struct Contest {
    /// Its processes; the first is the one whose time counts. None is the kernel.
    processes: Vec<Process>,
    /// Where the last words of the first process are.
    log: PathBuf,
    /// Where each port is; taken when the ends start.
    pub places: Vec<Place>,
}

impl Contest {
    /// Starts it on its processor.
    pub(super) fn start(order: &Order, program: &Path) -> Result<Self, RowError> {
        // What a thread starts runs where the thread does.
        let cpus = cpu::allowed()?;
        cpu::pin_current_thread(order.cpus[1])?;
        let started = match order.case.who {
            Who::Ringferry | Who::Firewall => ringferry::start(order, program),
            Who::TestpmdIo | Who::TestpmdMac => testpmd::start(order),
            Who::Ovs => ovs::start(order),
            Who::Bridge => bridge::start(order),
        };
        cpu::restrict_current_thread(&cpus)?;
        started
    }

    /// An error, with its last words, once it has ended.
    pub(super) fn check(&mut self) -> Result<(), RowError> {
        for process in &mut self.processes {
            if let Some(status) = process.ended()? {
                let text = format!("the switch ended by itself ({status}): {}", words(&self.log));
                return Err(RowError::failed(text));
            }
        }
        Ok(())
    }

    /// Adds to an error what the switch said last.
    pub(super) fn explain(&self, error: RowError) -> RowError {
        match error {
            RowError::Failed(text) if !self.processes.is_empty() => {
                RowError::failed(format!("{text}; the last the switch said: {}", words(&self.log)))
            }
            error => error,
        }
    }

    /// Processor time it has used; `None` for the kernel, which works in whoever calls it.
    pub(super) fn processor_time(&self) -> Result<Option<Duration>, RowError> {
        Ok(self.processes.first().map(|process| process::cpu_time(process.id())).transpose()?)
    }
}

/// Its last words, in one line: an error is the last line of what a process says.
fn words(log: &Path) -> String {
    last_words(&std::fs::read_to_string(log).unwrap_or_default()).replace('\n', " |")
}
