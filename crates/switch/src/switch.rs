//! The switch: opens what the configuration names, then runs the control plane until it is told to
//! stop. Packets are the workers' business ([`crate::plane`]); everything here happens in human time.
//!
//! The program opens an [`OpenSwitch`] with [`Switch::open`], starts it, and gives its main thread to [`Switch::run`]: one epoll loop over signals, the control
//! socket, faults that workers report, and whatever the ports wait for ([`PortTable`]). Dropping it stops the workers and closes the ports.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_control::ControlServer;
use ringferry_control::mirror::Mirror;
use ringferry_memory::sigbus;
use ringferry_sys::closer;
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::signal::{Signal, Signals};
use ringferry_sys::socket::{BindError, Listener, Stream};
use ringferry_sys::systemd::Notifier;

use crate::captures::{Captures, FIRST_CAPTURE};
use crate::config::{Config, PortConfig, SwitchConfig};
use crate::drains::Drains;
use crate::handover::kept::{self, Keeper, Known};
use crate::handover::{Handed, Outcome, Predecessor, SuccessionError, predecessor, successor};
use crate::links::Links;
use crate::manager::Manager;
use crate::mirrors::Mirrors;
use crate::ports::handed::HandedPort;
use crate::ports::passed::Passed;
use crate::ports::queues::Workers;
use crate::ports::table::{FIRST_TOKEN, PortTable};
use crate::ports::{self, Before, OpenError, Plug};
use crate::privileged::Privileges;
use crate::requests::{NotReloaded, Requests};
use crate::series::Series;
use crate::stalls::Stalls;
use crate::turns::Turns;

/// Interval of checks for changes that cause no event: silent control clients, truncated guest memory.
const TICK: Duration = Duration::from_secs(1);

/// The error of a switch that did not start. Nothing was left running.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A port cannot be opened; the error of its kind says why.
    #[error("port {port}: {source}")]
    Port {
        /// Name of the port in the configuration.
        port: String,
        /// The error, which says what is wrong and what to do.
        source: OpenError,
    },
    /// Several ports cannot be opened: the errors of all of them.
    #[error("{} ports cannot be opened:{}", .0.len(), lines(.0))]
    Ports(Vec<StartError>),
    /// The control socket cannot be bound.
    #[error("control socket: {0}{instead}", instead = instead(.0))]
    Control(BindError),
    /// The system has no descriptors or threads left.
    #[error("cannot start: {0}")]
    Os(#[from] io::Error),
}

/// The error that ended a running switch.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The worker thread is gone; its panic message is above.
    #[error("the worker thread has ended unexpectedly; please report this as a bug")]
    WorkerDied,
    /// The event loop cannot go on.
    #[error("event loop: {0}")]
    Os(#[from] io::Error),
}

/// Permissions of the control socket: a client may change the switch, so only the owner may connect.
pub(crate) const CONTROL_MODE: u32 = 0o600;

/// A switch whose ports are open and whose workers run.
pub struct Switch {
    config: Config,
    ports: PortTable,
    control: ControlServer,
    workers: Arc<Workers>,
    epoll: Epoll,
    started: Instant,
    /// When this process became the switch.
    began: Instant,
    privileges: Privileges,
    /// Names of ports that are gone and could not be opened anew.
    not_renewed: BTreeSet<String>,
    /// A process that is about to take over. It is dropped after everything else: what Xen guests have granted to this process is the successor's to map when the
    /// connection is closed.
    predecessor: Option<Predecessor>,
    /// What another process has handed over, until that has ended.
    handed: Option<Handed>,
    /// Keeps the state for the case that this process is killed.
    keeper: Option<Keeper>,
    captures: Captures,
    mirrors: Mirrors,
    links: Links,
    manager: Manager,
    drains: Drains,
    series: Series,
    stalls: Stalls,
    /// The part of the configuration file that was not carried out when it was last read again, and when that was.
    not_reloaded: Option<(Instant, NotReloaded)>,
}

/// How a switch that ran has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// A signal has asked for it.
    Stopped,
    /// Another process has taken over everything: its number, if it is of an earlier version, which does not tell the service manager itself.
    Replaced(Option<u32>),
    /// Another process has taken over everything, and ended before it said so. Nobody serves the ports any more.
    Orphaned,
}

/// Epoll tokens; the ports' begin with [`FIRST_TOKEN`].
const SIGNALS: u64 = 0;
const CONTROL: u64 = 1;
pub(crate) const FAULTS: u64 = 2;
const SUCCESSOR: u64 = 3;
const BEFORE: u64 = 4;

/// A switch whose sockets and taps are open, and that has no thread yet: the moment to give up the privileges
/// that this needed. Dropping it closes everything.
pub struct OpenSwitch {
    config: Config,
    control: ControlServer,
    plugs: Vec<(PortConfig, Plug)>,
    /// What another process hands over, if the ports are its.
    handed: Option<Handed>,
    /// Ports that another process has left behind that was killed.
    recovered: Vec<String>,
    /// What the service manager keeps of that.
    known: Known,
    /// Links that were down in that process, and its mirrors.
    links_and_mirrors: (Vec<String>, Vec<Mirror>),
    keeper: Option<Keeper>,
    /// Number of workers that the ports were opened for.
    count: usize,
    privileges: Privileges,
}

impl OpenSwitch {
    /// A switch of ports that another process has handed over and still serves.
    pub(crate) fn handed(
        config: Config,
        control: ControlServer,
        plugs: Vec<(PortConfig, Plug)>,
        count: usize,
        privileges: Privileges,
        handed: Handed,
    ) -> OpenSwitch {
        OpenSwitch {
            config,
            control,
            plugs,
            handed: Some(handed),
            recovered: Vec::new(),
            known: Known::default(),
            links_and_mirrors: Default::default(),
            keeper: None,
            count,
            privileges,
        }
    }

    /// Returns the service manager of the process before, if it goes on with that.
    pub fn manager(&self) -> Option<&Notifier> {
        self.handed.as_ref().and_then(Handed::notifier)
    }

    /// Has the service manager keep what the next process needs if this one is killed.
    #[must_use]
    pub fn keep_with(mut self, manager: Notifier) -> OpenSwitch {
        if let Some(control) = self.control.path() {
            self.keeper = Some(Keeper::new(manager, control, std::mem::take(&mut self.known)));
        }
        self
    }

    /// Starts the workers and plugs the ports in.
    ///
    /// # Errors
    /// No thread, descriptor or number is left.
    pub fn start(self) -> Result<Switch, StartError> {
        let OpenSwitch {
            config,
            control,
            plugs,
            mut handed,
            recovered,
            links_and_mirrors: (links_down, mirrored),
            keeper,
            count,
            privileges,
            ..
        } = self;
        // The number of workers is fixed here: counting the processors again might give another one in a
        // sandbox.
        let settings = SwitchConfig { workers: u16::try_from(count).ok(), ..config.switch };
        let workers = Arc::new(match &handed {
            Some(handed) => Workers::start_paused(&settings, handed.began)?,
            // Nothing is delivered to a port before all are there.
            None if !recovered.is_empty() => {
                Workers::start_paused(&settings, Workers::nanoseconds(Instant::now()))?
            }
            None => Workers::start(&settings)?,
        });
        let epoll = Epoll::new()?;
        epoll.add(&control, CONTROL, Interest::READABLE)?;
        epoll.add(workers.faults_fd(), FAULTS, Interest::READABLE)?;
        sigbus::tell(workers.faults_fd().try_clone_to_owned()?)?;
        let mut ports = PortTable::new(Arc::clone(&workers), &config.switch);
        if keeper.is_some() {
            ports.track();
        }
        ports.set_wires(&config.wires);
        for (port, plug) in plugs {
            let name = port.name.clone();
            ports.add(port, plug, &epoll).map_err(port_error(&name))?;
        }
        ports.keep_shares_of_memory();
        let (mut links, mut mirrors) = (Links::default(), Mirrors::default());
        links.take_over(&links_down);
        links.follow(&mut ports, &workers);
        mirrors.take_over(&mirrored, &ports, &workers);
        recovered.iter().for_each(|port| ports.recover(port));
        if let Some(keeper) = &keeper {
            ports.set_marks(keeper.marks(&ports)?);
        }
        if !recovered.is_empty() {
            workers.unpause();
            tracing::info!(ports = recovered.len(), "this goes on where a process was killed");
        }
        let started = match &mut handed {
            Some(handed) => {
                handed.prepare(&ports, &workers);
                handed.started
            }
            None => Instant::now(),
        };
        Ok(Switch {
            config,
            ports,
            control,
            workers,
            epoll,
            started,
            began: Instant::now(),
            privileges,
            not_renewed: BTreeSet::new(),
            predecessor: None,
            handed,
            keeper,
            captures: Captures::default(),
            mirrors,
            links,
            manager: Manager::default(),
            drains: Drains::default(),
            series: Series::default(),
            stalls: Stalls::default(),
            not_reloaded: None,
        })
    }
}

/// Makes a port of what a process that was killed has left of it, if it has.
fn recover(port: &PortConfig, passed: &mut Passed) -> Option<Plug> {
    let (state, descriptors) = passed.kept().port(port)?;
    if matches!(state, HandedPort::XenVif) {
        return None;
    }
    let plug = ports::adopt(port, state, descriptors, passed.privileges(), Before::Died);
    plug.inspect_err(|error| tracing::warn!(port = port.name, "it is opened anew: {error}")).ok()
}

/// Puts each error on a line of its own.
fn lines(errors: &[StartError]) -> String {
    errors.iter().map(|error| format!("\n  {error}")).collect()
}

/// Says what else can be done where the control socket is another switch's.
fn instead(error: &BindError) -> &'static str {
    match error {
        BindError::InUse { .. } => {
            " with --control PATH, for a second switch; `ringferry run --replace` takes over from the one that runs"
        }
        _ => "",
    }
}

/// Logs that a signal changes nothing. A user may have sent it to have a file read again.
fn log_ignored(signal: Signal) {
    tracing::info!("nothing is re-read on {}; SIGHUP and `ringferry ctl reload` do so", name(signal));
}

/// Returns true if a signal tells a process to end.
fn is_end(signal: Signal) -> bool {
    matches!(signal, Signal::TERM | Signal::INT)
}

/// Returns the name of a signal that the program takes.
fn name(signal: Signal) -> &'static str {
    match signal {
        Signal::TERM => "SIGTERM",
        Signal::INT => "SIGINT",
        Signal::HUP => "SIGHUP",
        Signal::USR1 => "SIGUSR1",
        Signal::USR2 => "SIGUSR2",
        _ => "a signal",
    }
}

/// Adds the name of the port to the error of one that cannot be opened.
fn port_error(port: &str) -> impl FnOnce(OpenError) -> StartError {
    let port = port.to_owned();
    |source| StartError::Port { port, source }
}

impl Switch {
    /// Does all of a start at once: [`Switch::open`] and [`OpenSwitch::start`].
    ///
    /// # Errors
    /// A resource cannot be opened; everything opened before is closed again.
    pub fn start(config: Config, control: PathBuf, passed: Passed) -> Result<Switch, StartError> {
        Switch::open(config, control, passed)?.start()
    }

    /// Opens the control socket (at `control`) and every port, from what was `passed` where the configuration
    /// says so.
    ///
    /// # Errors
    /// A resource cannot be opened; everything opened before is closed again.
    pub fn open(config: Config, control: PathBuf, mut passed: Passed) -> Result<OpenSwitch, StartError> {
        let mut control = match passed.kept().control(&control) {
            Some(kept) => {
                let mut listener =
                    Listener::from_predecessor(kept, Some(&control)).map_err(StartError::Control)?;
                // The file may be that of a process between the two, whose state was never stored.
                let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
                if listener.path().is_some() && !Stream::connect(&control).is_err_and(refused) {
                    listener.keep(true);
                    ControlServer::of(listener)?
                } else {
                    tracing::warn!("somebody had removed the control socket, which is made anew");
                    ControlServer::bind(&control, CONTROL_MODE).map_err(StartError::Control)?
                }
            }
            None => ControlServer::bind(&control, CONTROL_MODE).map_err(StartError::Control)?,
        };
        if passed.privileges().are_elsewhere() {
            control.leave_file();
        }
        // All ports are opened before any is served: a configuration with a missing resource starts nothing.
        let count = passed.kept().workers().unwrap_or_else(|| config.switch.workers());
        let (mut plugs, mut failed, mut recovered) = (Vec::new(), Vec::new(), Vec::new());
        for port in &config.ports {
            let opened = match recover(port, &mut passed) {
                Some(plug) => {
                    recovered.push(port.name.clone());
                    Ok(plug)
                }
                None => ports::open(port, count, &mut passed),
            };
            match opened.map_err(port_error(&port.name)) {
                Ok(plug) => plugs.push((port.clone(), plug)),
                Err(error) => failed.push(error),
            }
        }
        if failed.len() > 1 {
            return Err(StartError::Ports(failed));
        }
        if let Some(error) = failed.pop() {
            return Err(error);
        }
        let privileges = passed.privileges().clone();
        let links_and_mirrors = passed.kept().links_and_mirrors();
        let known = passed.into_known();
        Ok(OpenSwitch {
            config,
            control,
            plugs,
            handed: None,
            count,
            privileges,
            recovered,
            known,
            links_and_mirrors,
            keeper: None,
        })
    }

    /// Tells a service manager from now on how the switch is.
    pub fn set_manager(&mut self, manager: Manager) {
        // That of the process before is the right one, whatever the environment of this one says.
        if self.manager.connection().is_none() {
            self.manager = manager;
        }
    }

    /// Serves until SIGTERM or SIGINT, which `signals` must carry. SIGHUP has the configuration file read again; any other signal is
    /// logged and ignored.
    ///
    /// # Errors
    /// See [`RunError`].
    pub fn run(mut self, signals: &Signals) -> Result<Ended, RunError> {
        let result = self.serve(signals);
        match result {
            Ok(Ended::Replaced(pid)) => self.manager.replaced_by(pid),
            // The successor has said that it is the main process. The end of this one is a failure of the service, after which that is started anew.
            Ok(Ended::Orphaned) => self.manager.main_again(),
            _ => self.manager.stopping(),
        }
        let predecessor = self.predecessor.take();
        drop(self);
        // The last look at signals: whoever has sent one to the process that had the ports means them.
        if let (Ok(Ended::Replaced(_)), Some(predecessor)) = (&result, predecessor)
            && std::iter::from_fn(|| signals.next().ok().flatten()).any(is_end)
        {
            tracing::info!(
                "this process was told to end meanwhile, and tells the one that has taken over to do so"
            );
            predecessor.tell_to_end();
        }
        result
    }

    fn serve(&mut self, signals: &Signals) -> Result<Ended, RunError> {
        self.workers.watch_this_thread();
        self.epoll.add(signals, SIGNALS, Interest::READABLE)?;
        let mut events = EventBuf::with_capacity(64);
        let mut turns = Turns::default();
        let mut tick = Instant::now() + TICK;
        self.ports.begin(&self.epoll);
        self.series.observe(Instant::now(), &self.ports, &self.workers);
        self.tell_status();
        loop {
            // Until the process before has ended, that keeps its own.
            if let (Some(keeper), None) = (&mut self.keeper, &self.handed) {
                let listener = self.control.listener();
                let mut parts = kept::Parts {
                    config: &self.config,
                    workers: self.workers.count(),
                    ports: &mut self.ports,
                    listener: listener.as_fd(),
                    links: &self.links,
                    mirrors: &self.mirrors,
                };
                keeper.look(&mut parts, Instant::now());
            }
            let deadlines = [
                self.ports.deadline(),
                self.keeper.as_ref().and_then(Keeper::deadline),
                self.manager.deadline(),
                self.drains.deadline(),
            ];
            let due = deadlines.into_iter().flatten().fold(tick, Instant::min);
            self.epoll.wait(&mut events, Some(due.saturating_duration_since(Instant::now())))?;
            let mut ready: Vec<u64> = events.iter().map(|event| event.token).collect();
            let mut ended = None;
            turns.serve(&mut ready, FIRST_TOKEN, Instant::now, |token| {
                if ended.is_some() {
                    // What is ready besides may be another process's by now: a message that is read here is lost to that.
                    return Ok(());
                }
                match token {
                    SIGNALS => {
                        if let Some(signal) = signals.next()? {
                            if is_end(signal) {
                                tracing::info!("the switch ends, as {} asks for", name(signal));
                                ended = Some(Ended::Stopped);
                            } else if signal == Signal::HUP {
                                self.reload();
                            } else {
                                log_ignored(signal);
                            }
                        }
                    }
                    CONTROL => self.serve_control(),
                    FAULTS => self.ports.serve_faults(&self.epoll),
                    SUCCESSOR => ended = self.serve_successor(),
                    BEFORE => ended = self.outlive(),
                    FIRST_CAPTURE..FIRST_TOKEN => self.captures.serve(token, &self.workers, &self.epoll),
                    port => self.ports.serve(port, &self.epoll),
                }
                Ok::<_, io::Error>(())
            })?;
            if let Some(ended) = ended {
                self.keeper.iter_mut().for_each(Keeper::clear);
                if matches!(ended, Ended::Stopped) {
                    // Whoever keeps a copy may close it later than whoever removes its file looks.
                    self.control.listener().shut();
                }
                return Ok(ended);
            }
            let now = Instant::now();
            self.ports.serve_due(now, &self.epoll);
            self.manager.watch(now, &self.workers);
            self.remove_drained(now);
            if now >= tick {
                tick = now + TICK;
                turns.forget();
                self.tick()?;
            }
        }
    }

    fn tick(&mut self) -> Result<(), RunError> {
        self.privileges.look();
        self.control.tick();
        if let Some(silent) = self.predecessor.take_if(|predecessor| predecessor.is_silent(Instant::now())) {
            let _ = self.epoll.remove(&silent);
            tracing::warn!(
                pid = silent.pid,
                "another process was about to take over and says nothing: it does not"
            );
        }
        self.keeper.iter_mut().for_each(|keeper| keeper.tick(Instant::now()));
        self.manager.catch_up();
        self.ports.tick(&self.epoll);
        self.renew();
        self.captures.tick(&self.ports, &self.workers);
        self.mirrors.tick(&self.ports, &self.workers);
        self.links.follow(&mut self.ports, &self.workers);
        self.series.observe(Instant::now(), &self.ports, &self.workers);
        self.stalls.tick(Instant::now(), &self.ports, &self.workers);
        self.tell_status();
        if self.workers.is_dead() { Err(RunError::WorkerDied) } else { Ok(()) }
    }

    fn tell_status(&mut self) {
        let (up, all) = self.ports.count_up();
        let workers = self.workers.count();
        let plural =
            |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        self.manager.tell_status(format!(
            "{up} of {} up, {}",
            plural(all, "port"),
            plural(workers, "worker")
        ));
    }

    /// Opens ports anew whose taps were deleted. A failure is logged once, and tried again with every tick.
    fn renew(&mut self) {
        let gone = self.ports.gone();
        self.not_renewed.retain(|name| gone.iter().any(|port| port.name == *name));
        for port in gone {
            match self.requests().0.renew(&port) {
                Ok(()) => tracing::info!(port = port.name, "what was deleted is opened anew"),
                Err(error) => {
                    if self.not_renewed.insert(port.name.clone()) {
                        tracing::warn!(port = port.name, "it cannot be opened anew yet: {error}");
                    }
                }
            }
        }
    }

    fn serve_control(&mut self) {
        let mut drains = std::mem::take(&mut self.drains);
        let (mut requests, control) = self.requests();
        control.serve_later(&mut |request, ticket| requests.respond_later(request, ticket, &mut drains));
        let successor = control.successor();
        self.drains = drains;
        // A port that was added may be one that is down.
        self.links.follow(&mut self.ports, &self.workers);
        if let Some(stream) = successor {
            let begun = Predecessor::begin(stream).and_then(|predecessor| {
                self.epoll.add(&predecessor, SUCCESSOR, Interest::READABLE)?;
                Ok(predecessor)
            });
            match begun {
                Ok(predecessor) => {
                    tracing::info!(pid = predecessor.pid, "another process is about to take over");
                    self.predecessor = Some(predecessor);
                }
                Err(error) => tracing::warn!("another process may not take over: {error}"),
            }
        }
    }

    /// Answers the process that is about to take over; whether this one has to end, as it has.
    fn serve_successor(&mut self) -> Option<Ended> {
        let mut predecessor = self.predecessor.take()?;
        let control = &*self.control.listener();
        let mut parts = predecessor::Parts {
            config: &self.config,
            ports: &mut self.ports,
            workers: &self.workers,
            control: control.as_fd(),
            started: self.started,
            sandboxed: self.privileges.are_elsewhere(),
            manager: &mut self.manager,
            keeper: self.keeper.as_ref(),
            links: &self.links,
            mirrors: &self.mirrors,
        };
        match predecessor.serve(&mut parts) {
            Ok(Outcome::Pending) => self.predecessor = Some(predecessor),
            Ok(Outcome::Declined) => {
                let _ = self.epoll.remove(&predecessor);
                tracing::info!(
                    pid = predecessor.pid,
                    "the other process is of this very program, and does not take over"
                );
            }
            Ok(Outcome::Orphaned) => {
                self.control.listener().let_go();
                // What is kept is for the next process.
                self.keeper = None;
                self.predecessor = Some(predecessor);
                return Some(Ended::Orphaned);
            }
            Ok(Outcome::Replaced { stood, said }) => {
                self.control.listener().let_go();
                // One of an earlier version begins anew with what is kept, and leaves it to this process to say who follows.
                if said.is_some_and(|said| said.keeps) {
                    self.keeper = None;
                }
                let (pid, microseconds) = (predecessor.pid, stood.as_micros() as u64);
                tracing::info!(
                    pid,
                    microseconds,
                    "the switch ends, as another process has taken over; packets have waited for"
                );
                // To unmap the guests' memory takes milliseconds of the processor on which the other process has packets to forward.
                closer::give_way();
                let ended = Ended::Replaced(if said.is_none() { pid } else { None });
                // Its connection tells the successor that nothing of this process is left, so it is closed after everything else.
                self.predecessor = Some(predecessor);
                return Some(ended);
            }
            Err(error) => {
                let _ = self.epoll.remove(&predecessor);
                tracing::warn!(
                    pid = predecessor.pid,
                    "another process does not take over after all: {error}"
                );
            }
        }
        None
    }

    /// Takes over from the process whose ports these are: it stands still, and this one goes on where it stood.
    ///
    /// # Errors
    /// See [`SuccessionError`]: that process goes on.
    pub fn take_over(&mut self, is_interrupted: impl FnOnce() -> bool) -> Result<(), SuccessionError> {
        let Switch { config, ports, workers, control, epoll, handed, links, mirrors, keeper, .. } = self;
        let Some(handed) = handed else { return Ok(()) };
        let keeper = keeper.as_mut();
        let mut parts = successor::Parts { config, ports, workers, control, epoll, links, mirrors, keeper };
        handed.take_over(&mut parts, is_interrupted)?;
        if let Some((notifier, watchdog)) = handed.manager() {
            self.manager = Manager::new(notifier, watchdog);
        }
        tracing::info!(pid = handed.pid, program = handed.program, "this process has taken over");
        if let Err(error) = epoll.add(&*handed, BEFORE, Interest::READABLE) {
            tracing::warn!("it is not known when the process before ends: {error}");
            self.outlive();
        }
        Ok(())
    }

    /// The process before has ended, and what it could not hand over is free now; or it was told to end, and so has this one to.
    fn outlive(&mut self) -> Option<Ended> {
        let handed = self.handed.take()?;
        let _ = self.epoll.remove(&handed);
        if handed.is_told_to_end() {
            tracing::info!("the switch ends, as the process before was told to end while this one took over");
            return Some(Ended::Stopped);
        }
        // What was removed or changed meanwhile is the configuration's business.
        let is_open = |name: &str| self.ports.configs().any(|open| open.name == name);
        let late = |port: &&PortConfig| handed.late.contains(&port.name) && !is_open(&port.name);
        for port in self.config.ports.iter().filter(late).cloned().collect::<Vec<_>>() {
            if let Err(error) = self.requests().0.plug(&port) {
                tracing::error!(port = port.name, "it cannot be opened: {error}");
            }
        }
        None
    }

    /// Removes the ports that are drained, and answers those who have asked for it.
    fn remove_drained(&mut self, now: Instant) {
        for drained in self.drains.due(now, &self.ports) {
            let (mut requests, control) = self.requests();
            control.answer(drained.ticket, &requests.remove_drained(&drained));
        }
    }

    /// Makes the control socket anew if somebody has removed its file.
    fn listen_again(&mut self) {
        let listener = self.control.listener();
        let Some(path) = listener.path().filter(|_| listener.is_file_gone()).map(Path::to_owned) else {
            return;
        };
        let made = self.privileges.control_socket(&path);
        let done = made.and_then(|made| self.control.listen_on(made).map_err(|error| error.to_string()));
        match done {
            Ok(()) => {
                tracing::info!("the control socket {} is made anew", path.display());
                self.keeper.iter_mut().for_each(Keeper::listens_anew);
            }
            Err(error) => tracing::error!("the control socket cannot be made anew: {error}"),
        }
    }

    /// Does what SIGHUP asks for: makes a lost control socket anew, and goes on as `ringferry ctl reload` does, with the result in the log.
    fn reload(&mut self) {
        self.manager.reload_begins();
        self.listen_again();
        match self.requests().0.reload(false) {
            Ok(reload) => {
                for setting in &reload.restart {
                    tracing::warn!("reload: {setting} in the file; this needs a stop and a start");
                }
                let failed = reload.steps.iter().filter(|step| step.error.is_some()).count();
                let (changed, file) = (reload.steps.len() - failed, &reload.file);
                tracing::info!(changed, failed, file, "the configuration was read again");
            }
            // Nothing was asked for but the control socket.
            Err(error) if self.config.file.is_none() => tracing::info!("{error}"),
            // It is in the log.
            Err(_) => {}
        }
        self.tell_status();
        self.manager.reload_ends();
    }

    fn requests(&mut self) -> (Requests<'_>, &mut ControlServer) {
        let Switch {
            config,
            ports,
            control,
            workers,
            started,
            began,
            privileges,
            epoll,
            captures,
            mirrors,
            links,
            series,
            stalls,
            not_reloaded,
            predecessor,
            keeper,
            ..
        } = self;
        let replacing = predecessor.as_ref().map(|predecessor| predecessor.pid);
        // Whoever asks may change anything.
        keeper.iter_mut().for_each(Keeper::doubt);
        (
            Requests {
                config,
                ports,
                workers,
                started: *started,
                began: *began,
                asker: None,
                privileges,
                epoll,
                captures,
                mirrors,
                links,
                series,
                stalls,
                not_reloaded,
                keeper: keeper.as_mut(),
                replacing,
            },
            control,
        )
    }
}
