//! One run, in a process of its own: start the switch and the innocent guests, let a process of the attacker's loose on it, and
//! look at all of them.
//!
//! ```text
//!   first processor                                     second processor
//!   innocent guests a, b -- vhost-user --.
//!   probes                -- vhost-user, ctl --  the switch: ringferry, testpmd, Open vSwitch
//!   attacker (a process)  -- vhost-user --'
//! ```

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use ringferry_rig::testpmd::{CommandLine, Device, last_words};
use ringferry_sys::cpu;
use ringferry_sys::process::Spawn;
use serde::{Deserialize, Serialize};

use super::attacks::{self, Place, Report};
use super::case::{Case, Figure, Who};
use super::pair::Pair;
use super::probe::{self, Control, Log, Probe, Usage};
use crate::experiment::{RowError, Sample};
use crate::experiments::network::{self, Process, logged, ready, words};
use crate::experiments::ovs::{self, Bridge, Kind, Port};

/// testpmd's memory in megabytes.
pub(super) const MEGABYTES: u64 = 512;

/// How long the attacker may take to begin, and a switch to have its ports.
const BEGIN: Duration = Duration::from_secs(20);
/// Before anything is measured: caches are warm, addresses are learnt.
const WARM_UP: Duration = Duration::from_millis(50);

/// VLANs of the innocent guests and of the attacker, where they are apart.
const VLANS: [u16; 2] = [10, 20];

/// The processors of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Processors {
    pub ends: usize,
    /// Those of the switch: as many as it has workers, or all that there are beside the first.
    pub switch: Vec<usize>,
}

/// The order of the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Order {
    pub case: Case,
    /// Where the run's files are.
    pub folder: PathBuf,
    /// `None` leaves all of it to the scheduler.
    pub cpus: Option<Processors>,
    /// Number of ringferry's workers.
    pub workers: u16,
    /// Innocent guests and attacker are in one VLAN.
    pub one_segment: bool,
    pub seconds: f64,
    pub huge_pages: bool,
    /// Path of testpmd, where it is installed.
    pub testpmd: Option<PathBuf>,
}

impl Order {
    fn socket(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.sock"))
    }

    /// The control socket of the switch, if it has one.
    fn control(&self) -> Option<Control> {
        match self.case.who {
            Who::Ringferry => Some(Control::Ringferry(self.folder.join("control.sock"))),
            Who::Testpmd => None,
            Who::Ovs => Some(Control::Ovs(ovs::control(&self.folder))),
        }
    }

    /// The VLAN of a port, where the innocent and the attacker have their own.
    fn vlan(&self, port: &str) -> Option<u16> {
        (!self.one_segment).then(|| VLANS[usize::from(port.starts_with('x'))])
    }

    /// The processor of a switch that has to know it: any, where the scheduler decides about all others.
    fn cpu(&self, any: usize) -> usize {
        self.cpus.as_ref().and_then(|cpus| cpus.switch.first().copied()).unwrap_or(any)
    }

    /// Names of the ports: the innocent guests', the attacker's, the probe's.
    fn ports(&self) -> Vec<String> {
        let mut names = vec!["a".to_owned(), "b".to_owned()];
        names.extend((0..self.case.ports()).map(|port| format!("x{port}")));
        names.push(probe::PORT.to_owned());
        // testpmd forwards between the ports of each pair.
        if self.case.who == Who::Testpmd && names.len() % 2 == 1 {
            names.push("spare".to_owned());
        }
        names
    }

    fn attack(&self) -> Option<attacks::Order> {
        let sockets = (0..self.case.ports()).map(|port| self.socket(&format!("x{port}"))).collect();
        let place = Place { sockets, who: self.case.who };
        self.case.attack.map(|attack| attacks::Order { attack, place })
    }
}

impl Order {
    /// Says whether a switch whose attacker is gone still carries frames and answers its control socket.
    fn outlasted(&self, pair: &mut Pair, switch: &mut Switch) -> bool {
        let answers = self.control().is_none_or(|control| control.ask().is_ok_and(|good| good));
        answers && pair.reach(|| switch.check()).is_ok()
    }
}

/// The figures that the process tells as [`Figure::ALL`], with others beside them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Outcome {
    values: Vec<f64>,
    extra: Vec<(String, f64)>,
}

impl Outcome {
    pub(super) fn samples(&self) -> [Sample; Figure::ALL.len()] {
        std::array::from_fn(|at| {
            let value = self.values.get(at).copied().unwrap_or_default();
            let sample = Sample::new(value);
            // Beside the first figure only: they are of the whole run.
            let extra = if at == 0 { self.extra.as_slice() } else { &[] };
            extra.iter().fold(sample, |sample, (name, value)| sample.with(name, *value))
        })
    }
}

/// The switch at work. Fields end in this order.
struct Switch {
    process: Process,
    /// The database of Open vSwitch.
    _database: Option<Process>,
    /// The file that has its log.
    log: PathBuf,
}

impl Switch {
    fn start(order: &Order, program: &Path) -> Result<Self, RowError> {
        let cpus = cpu::allowed()?;
        if let Some(Processors { switch, .. }) = &order.cpus {
            // What a thread starts runs where the thread does.
            cpu::restrict_current_thread(switch)?;
        }
        let any = cpus.last().copied().unwrap_or_default();
        let started = match order.case.who {
            Who::Ringferry => ringferry(order, program),
            Who::Testpmd => testpmd(order, any),
            Who::Ovs => open_vswitch(order, any),
        };
        cpu::restrict_current_thread(&cpus)?;
        started
    }

    /// An error, with its last words, once it has ended.
    fn check(&mut self) -> Result<(), RowError> {
        match self.process.ended()? {
            None => Ok(()),
            Some(status) => {
                let text = std::fs::read_to_string(&self.log).unwrap_or_default();
                let words = last_words(&text).replace('\n', " |");
                Err(RowError::failed(format!("the switch ended by itself ({status}): {words}")))
            }
        }
    }
}

fn ringferry(order: &Order, program: &Path) -> Result<Switch, RowError> {
    let mut arguments = words(&["run", "--workers", &order.workers.to_string(), "--control"]);
    arguments.push(order.folder.join("control.sock").into());
    for (at, name) in order.ports().into_iter().enumerate() {
        let mut port = OsString::from("vhost-user:");
        port.push(order.socket(&name));
        if let Some(vlan) = order.vlan(&name) {
            port.push(format!(",vlan={vlan}"));
        }
        if let Some(attack) = order.case.attack.filter(|_| name.starts_with('x')) {
            port.push(attack.keys());
        }
        // The two innocent guests have different workers, and so have the attacker's first two ports: all frames are handed off.
        if order.workers > 1 {
            port.push(format!(",worker={}", at % usize::from(order.workers)));
        }
        arguments.extend([OsString::from("--port"), port]);
    }
    let process = ready(program, &order.folder, "switch", arguments, Spawn::default())?;
    Ok(Switch { process, _database: None, log: order.folder.join("switch.log") })
}

fn testpmd(order: &Order, any: usize) -> Result<Switch, RowError> {
    let program = order.testpmd.as_deref().ok_or_else(|| RowError::failed("testpmd is not installed"))?;
    let mut line = CommandLine::new(order.cpu(any), MEGABYTES, order.huge_pages).mode("io");
    for name in order.ports() {
        line = line.port(Device::Vhost(&order.socket(&name)), ",tso=1,legacy-ol-flags=1");
    }
    // Frames of 64 KiB are in several of these.
    let line = line.option("--total-num-mbufs=32768").option("--mbuf-size=4096");
    // It would lock the memory of guests, too, which gives pages to all of it: to more than the machine has, where it is told of 16 TiB without any.
    let line = line.option("--no-mlockall");
    let arguments = line.words().map(Into::into).collect();
    let mut command = logged(program, &order.folder, "switch", arguments)?;
    // It ends when its input does.
    command.env("RUNTIME_DIRECTORY", &order.folder).stdin(Stdio::piped());
    let process = Process::spawn("testpmd", &mut command, Spawn::default())?;
    // DPDK's log is on standard error, with what testpmd says of its ports.
    Ok(Switch { process, _database: None, log: order.folder.join("switch.log") })
}

fn open_vswitch(order: &Order, any: usize) -> Result<Switch, RowError> {
    let port =
        |name: &String| Port { name: format!("{name}.sock"), kind: Kind::Listens, vlan: order.vlan(name) };
    let ovs = ovs::start(&Bridge {
        folder: &order.folder,
        cpu: order.cpu(any),
        huge_pages: order.huge_pages,
        tso: false,
        addresses: None,
        ports: order.ports().iter().map(port).collect(),
        new_net: true,
    })?;
    let mut switch = Switch { process: ovs.switch, _database: Some(ovs.server), log: ovs.log };
    // It says nothing when it is ready, and makes its ports one by one.
    let begin = Instant::now();
    while !order.ports().iter().all(|name| order.socket(name).exists()) {
        switch.check()?;
        if begin.elapsed() >= BEGIN {
            return Err(RowError::failed("Open vSwitch has not made its ports"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(switch)
}

/// The attacker's process.
struct Attacker {
    _process: Process,
    reports: Receiver<Report>,
    log: PathBuf,
    last: Report,
}

impl Attacker {
    /// Starts it and waits until it has done something, or was thrown out.
    fn start(order: &attacks::Order, program: &Path, folder: &Path) -> Result<Self, RowError> {
        let order = serde_json::to_string(order).map_err(RowError::failed)?;
        let (reader, writer) = std::io::pipe()?;
        let mut arguments = words(&["child", "--program"]);
        arguments.push(program.into());
        arguments.extend(words(&[super::NAME, "attack", &order]));
        let mut command = logged(&std::env::current_exe()?, folder, "attacker", arguments)?;
        let process = Process::spawn("the attacker", command.stdout(writer), Spawn::default())?;
        // It holds the writing end, and the reader would never see the end.
        drop(command);
        let (sender, reports) = channel();
        std::thread::Builder::new().name("lab-attacker".into()).spawn(move || {
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                let Ok(report) = serde_json::from_str(&line) else { continue };
                if sender.send(report).is_err() {
                    break;
                }
            }
        })?;
        let mut attacker =
            Self { _process: process, reports, log: folder.join("attacker.log"), last: Report::default() };
        let deadline = Instant::now() + BEGIN;
        while attacker.last.operations + attacker.last.refused == 0 {
            match attacker.reports.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(report) => attacker.last = report,
                Err(RecvTimeoutError::Disconnected) => return Err(attacker.failure("could not begin")),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(attacker.failure(&format!("has not begun within {BEGIN:?}")));
                }
            }
        }
        Ok(attacker)
    }

    /// The newest that it has told; an error once it has ended.
    fn report(&mut self) -> Result<Report, RowError> {
        loop {
            match self.reports.try_recv() {
                Ok(report) => self.last = report,
                Err(TryRecvError::Empty) => return Ok(self.last),
                Err(TryRecvError::Disconnected) => return Err(self.failure("ended by itself")),
            }
        }
    }

    fn failure(&self, what: &str) -> RowError {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        RowError::failed(format!("the attacker {what}: {}", last_words(&text).replace('\n', " |")))
    }
}

/// Measures what is ordered.
pub(super) fn run(order: &Order, program: &Path) -> Result<Outcome, RowError> {
    if order.case.who == Who::Ovs {
        network::contain()?;
    }
    let mut switch = Switch::start(order, program)?;
    if let Some(Processors { ends, .. }) = order.cpus {
        cpu::pin_current_thread(ends)?;
    }
    let measured = measure(order, program, &mut switch);
    // That it has ended is why nothing came of it.
    measured.map_err(|error| switch.check().err().unwrap_or(error))
}

fn measure(order: &Order, program: &Path, switch: &mut Switch) -> Result<Outcome, RowError> {
    let [a, b] = ["a", "b"].map(|name| order.socket(name));
    let mut pair = Pair::start([&a, &b], || switch.check())?;
    let connections = Probe::connections(order.socket(probe::PORT))?;
    let control = order.control().map(Probe::control).transpose()?;
    pair.run(WARM_UP, || switch.check(), || Ok(()))?;
    let pid = switch.process.id();
    let before = Usage::of(pid)?;
    let mut log = Log::new(&switch.log)?;
    let attack = order.attack();
    let mut attacker = attack.map(|attack| Attacker::start(&attack, program, &order.folder)).transpose()?;
    connections.reset();
    control.iter().for_each(Probe::reset);
    // What is said of connections that are made once is not the attack.
    log.lines()?;
    let mut most = Usage::of(pid)?;
    let first = attacker.as_mut().map(Attacker::report).transpose()?.unwrap_or_default();
    let (mut last, mut found, mut lines) = (first, None, 0);
    let began = Instant::now();
    let time = Duration::from_secs_f64(order.seconds);
    let window = {
        let most = &mut most;
        let last = &mut last;
        let (switch, shared) = (&mut *switch, std::cell::RefCell::new(&mut attacker));
        pair.run(
            time,
            || {
                *most = most.max(Usage::of(pid)?);
                if let Some(attacker) = shared.borrow_mut().as_mut() {
                    *last = attacker.report()?;
                }
                switch.check()
            },
            || {
                found = Some((connections.finish(), control.as_ref().map(Probe::finish), began.elapsed()));
                lines = log.lines()?;
                // Ends the attack.
                **shared.borrow_mut() = None;
                Ok(())
            },
        )?
    };
    switch.check()?;
    let answers = order.outlasted(&mut pair, switch);
    let (connected, controlled, elapsed) = found.ok_or_else(|| RowError::failed("nothing was measured"))?;
    let micros = |nanos: u64| nanos as f64 / 1000.0;
    let values = Figure::ALL.map(|figure| match figure {
        Figure::WaitP99 => micros(window.wait.value_at_percentile(99.0)),
        Figure::ServiceP99 => micros(window.service.value_at_percentile(99.0)),
        Figure::WaitMax => micros(window.wait.max()),
        Figure::Share => 100.0 * window.arrived as f64 / window.due.max(1) as f64,
        Figure::Lost => window.lost as f64,
        Figure::Connect => connected.p99,
        Figure::Control => controlled.as_ref().map_or(0.0, |found| found.p99),
        Figure::Resident => (most.resident - before.resident).max(0.0),
        Figure::Mapped => (most.mapped - before.mapped).max(0.0),
        Figure::Descriptors => (most.descriptors - before.descriptors).max(0.0),
        Figure::Log => lines as f64 / elapsed.as_secs_f64(),
    });
    let mut extra = vec![
        ("answers afterwards".to_owned(), f64::from(u8::from(answers))),
        ("wait p50 µs".to_owned(), micros(window.wait.value_at_percentile(50.0))),
        ("unanswered".to_owned(), window.unanswered as f64),
        ("guests away, max µs".to_owned(), window.away.as_secs_f64() * 1e6),
        ("guests without a processor, ms".to_owned(), window.delayed.as_secs_f64() * 1e3),
        ("connect max µs".to_owned(), connected.max),
        ("connects".to_owned(), connected.answers as f64),
        ("connects failed".to_owned(), connected.failed as f64),
    ];
    if let Some(found) = controlled {
        extra.push(("ctl max µs".to_owned(), found.max));
        extra.push(("ctl answers".to_owned(), found.answers as f64));
        extra.push(("ctl failed".to_owned(), found.failed as f64));
    }
    if order.case.attack.is_some() {
        let rate = (last.operations - first.operations) as f64 / elapsed.as_secs_f64();
        extra.push(("attack operations/s".to_owned(), rate));
        // Since it began, which is before anything was measured: a switch may see to it that one is all, or throw it out before that.
        extra.push(("attack refused".to_owned(), last.refused as f64));
        extra.push(("attack operations".to_owned(), last.operations as f64));
    }
    Ok(Outcome { values: values.to_vec(), extra })
}
