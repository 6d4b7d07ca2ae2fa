//! The side of a hand-over that takes: a process that is started beside a running switch.
//!
//! [`Successor::connect`] asks the running switch for its configuration, so that the program can start its helper; [`Successor::open`] makes ports of the
//! state that it sends, none of which touches anything; [`Switch::take_over`](crate::Switch::take_over) asks it to stand still, and takes what it had. Until the baton is
//! read everything can be dropped at any time, and nobody notices.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use ringferry_control::{Answer, ControlError, ControlServer, Request, call_and_keep};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::{BindError, Listener};
use ringferry_sys::systemd::Notifier;
use serde::de::DeserializeOwned;

use super::bulk::{Ports, Reader};
use super::channel::{Channel, Kind, Message};
use super::kept::Keeper;
use super::state::{Draft, FORMAT, FileId, Final, Hello, PortNumbers, Running, UNDERSTOOD};
use super::{PATIENCE, QUIET};
use crate::StartError;
use crate::config::{Config, ConfigError, PortConfig, PortKind};
use crate::fdb::FdbStats;
use crate::links::Links;
use crate::mirrors::Mirrors;
use crate::plane::{Carried, OnWires};
use crate::ports::handed::{Descriptors, HandedPort};
use crate::ports::queues::Workers;
use crate::ports::table::PortTable;
use crate::ports::{self, Before, InterfaceQueues, OpenError, Plug};
use crate::privileged::Privileges;
use crate::switch::OpenSwitch;

/// The reason why this process does not take over. The switch that runs goes on, and nobody has noticed anything.
#[derive(Debug, thiserror::Error)]
pub enum SuccessionError {
    /// No switch runs there, or it is of a version that cannot be replaced.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The running switch does not go on.
    #[error("the running switch says: {0}")]
    Refused(String),
    /// The running switch is of another version.
    #[error("the running switch ({program}) cannot be replaced by this program: {why}; restart it instead")]
    Version {
        /// Version of the running program.
        program: String,
        /// What this program does not understand.
        why: String,
    },
    /// It is in another network namespace, and has taps there.
    #[error(
        "the running switch is in another network namespace than this process, which could not look after its taps from here: \
         run it there (`nsenter --net=/proc/{pid}/ns/net ringferry run --replace --control {}`)",
        control.display()
    )]
    Elsewhere {
        /// The running switch.
        pid: u32,
        /// Its control socket.
        control: PathBuf,
    },
    /// Whoever has started this process would keep the switch, and somebody does so already.
    #[error(
        "the running switch is kept by another `ringferry keep` already, or by systemd, which would start another one beside this if it is killed: `ringferry run --replace` \
         takes over from the switch alone, and leaves it with whoever keeps it"
    )]
    Kept,
    /// Its configuration makes no sense to this program.
    #[error("this program refuses the configuration in force:\n{0}")]
    Config(#[from] ConfigError),
    /// A port cannot be made, or there are no threads.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Whoever keeps the switch could not be told that this process follows.
    #[error(
        "whoever keeps the running switch (`ringferry keep`, or systemd) does not read what it is told, and would start another one beside this: the running switch goes on; \
         see why that process stands still, and try again"
    )]
    ManagerBehind,
    /// The running switch has gone on by itself, as this process took too long.
    #[error("this took longer than {} ms, for which packets wait at most, so the running switch goes on: try again", PATIENCE.as_millis())]
    Late,
    /// Whoever has started this process has told it to end.
    #[error("interrupted: the running switch goes on")]
    Interrupted,
    /// The connection to the running switch is lost.
    #[error(
        "the running switch has broken off: it has ended, or another process has taken over from it; `ringferry ctl show` says which one runs"
    )]
    BrokenOff,
    /// The system has no descriptors left, or what the running switch says makes no sense.
    #[error("the hand-over has failed: {0}; `ringferry ctl show` says which process runs")]
    Os(io::Error),
}

impl From<io::Error> for SuccessionError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => {
                SuccessionError::BrokenOff
            }
            _ => SuccessionError::Os(error),
        }
    }
}

/// How long it takes at most to do what has packets wait for less. A guest can hold that up.
const AHEAD: Duration = Duration::from_millis(300);

/// How long it is waited then for the end of what was begun: a hole of some gigabytes takes so long.
const SLEEP: Duration = Duration::from_secs(1);

/// A process that is to take over.
pub struct Successor {
    channel: Channel,
    hello: Hello,
    config: Config,
    control: PathBuf,
    pid: u32,
}

/// What a process has been handed over that has not taken over yet.
pub(crate) struct Handed {
    channel: Channel,
    baton: EventFd,
    draft: Draft,
    bulk: Vec<u8>,
    pub(crate) began: u64,
    pub(crate) started: Instant,
    /// The process before.
    pub(crate) pid: u32,
    pub(crate) program: String,
    /// Names of the ports that can only be opened when the process before has ended.
    pub(crate) late: Vec<String>,
    privileges: Privileges,
    /// The connection to the service manager, and the time within which that wants to hear that the switch is alive.
    manager: Option<(Notifier, Option<Duration>)>,
}

impl Successor {
    /// Asks the switch whose control socket is `control` to be replaced by this process.
    ///
    /// # Errors
    /// See [`SuccessionError`].
    pub fn connect(control: &Path) -> Result<Successor, SuccessionError> {
        let (answer, stream) = call_and_keep(control, &Request::Replace { format: FORMAT })?;
        let Answer::Replacing { pid, .. } = answer else {
            return Err(SuccessionError::Refused("it has not understood the question".to_owned()));
        };
        let channel = Channel::new(stream)?;
        channel.set_timeout(QUIET)?;
        let (hello, _) = ask::<Hello>(&channel, Kind::Hello)?;
        let strange: Vec<_> =
            hello.needs.iter().filter(|need| !UNDERSTOOD.contains(&need.as_str())).collect();
        let why = match hello.format {
            format if format > FORMAT => {
                Some(format!("it hands over in form {format}, and this program reads {FORMAT}"))
            }
            _ if !strange.is_empty() => Some(format!("it has what this program does not know: {strange:?}")),
            _ => None,
        };
        if let Some(why) = why {
            return Err(SuccessionError::Version { program: hello.program, why });
        }
        let config = hello.in_force.read()?;
        let is_elsewhere = hello.network.is_some_and(|network| Some(network) != FileId::of_network());
        if is_elsewhere && config.ports.iter().any(ports::has_interface) {
            return Err(SuccessionError::Elsewhere { pid, control: control.to_owned() });
        }
        Ok(Successor { channel, hello, config, control: control.to_owned(), pid })
    }

    /// Returns true if the switch that runs executes the same file as this process, so that there is nothing to be gained. One that does not say which file
    /// it executes is another program.
    pub fn is_of_this_program(&self) -> bool {
        self.hello.executable.is_some() && self.hello.executable == FileId::of_executable()
    }

    /// Returns true unless the switch that runs says that it has no sandbox. One of an earlier version does not say, and has one by default.
    pub fn may_be_in_sandbox(&self) -> bool {
        self.hello.sandboxed != Some(false)
    }

    /// Leaves the switch that runs as it is.
    pub fn decline(self) {
        // It would find out by itself.
        let _ = self.channel.send(Kind::Refused, &[], &[], &[]);
    }

    /// Returns the configuration in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Gets the state of all ports, and makes ports of it that touch nothing yet.
    ///
    /// # Errors
    /// See [`SuccessionError`].
    pub fn open(self, privileges: Privileges) -> Result<OpenSwitch, SuccessionError> {
        let Successor { channel, hello, config, control, pid } = self;
        let (draft, message) = ask::<Draft>(&channel, Kind::Draft)?;
        let mut fds = message.descriptors.into_iter();
        let (Some(baton), Some(listener)) = (fds.next(), fds.next()) else { return Err(missing()) };
        let baton = EventFd::from_fd(baton)?;
        let bound = |error: BindError| StartError::Control(error);
        let listener = Listener::from_predecessor(listener, Some(&control)).map_err(bound)?;
        let server = ControlServer::of(listener)?;
        let (mut plugs, mut late) = (Vec::new(), Vec::new());
        let mut draft = draft;
        let watchdog = hello.watchdog.map(Duration::from_micros);
        let manager =
            if draft.manager { fds.next().map(|fd| (Notifier::from_fd(fd), watchdog)) } else { None };
        let keeper =
            manager.as_ref().filter(|_| draft.keeps).map(|(notifier, _)| notifier.try_clone()).transpose()?;
        // Descriptors come in the order of these entries, which need not be that of the configuration.
        let mut entries = BTreeMap::new();
        for entry in &mut draft.entries {
            let descriptors = entry.descriptors(&mut fds);
            let state = entry.state.take();
            entries.insert(entry.name.clone(), state.map(|state| (state, descriptors)));
        }
        for port in &config.ports {
            match (&port.kind, entries.remove(&port.name).flatten()) {
                (PortKind::XenVif(_), _) => late.push(port.name.clone()),
                (_, Some((state, descriptors))) => {
                    plugs.push((port.clone(), adopt(port, state, descriptors, &privileges)?));
                }
                (_, None) => return Err(missing()),
            }
        }
        let handed = Handed {
            channel,
            baton,
            draft,
            bulk: message.bulk,
            began: hello.began,
            started: Workers::instant(hello.started),
            pid,
            program: hello.program,
            late,
            privileges: privileges.clone(),
            manager,
        };
        let switch = OpenSwitch::handed(config, server, plugs, hello.in_force.workers, privileges, handed);
        Ok(match keeper {
            Some(keeper) => switch.keep_with(keeper),
            None => switch,
        })
    }
}

fn missing() -> SuccessionError {
    io::Error::new(io::ErrorKind::InvalidData, "the state is incomplete").into()
}

fn adopt(
    port: &PortConfig,
    state: HandedPort,
    descriptors: Descriptors,
    privileges: &Privileges,
) -> Result<Plug, SuccessionError> {
    let failed = |source: OpenError| StartError::Port { port: port.name.clone(), source };
    Ok(ports::adopt(port, state, descriptors, privileges, Before::GoesOn).map_err(failed)?)
}

/// Asks for a message, and reads its text.
fn ask<T: DeserializeOwned>(channel: &Channel, kind: Kind) -> Result<(T, Message), SuccessionError> {
    channel.send(kind, &[], &[], &[])?;
    let message = channel.receive()?;
    if message.kind == Kind::Refused {
        return Err(SuccessionError::Refused(String::from_utf8_lossy(&message.text).into_owned()));
    }
    if message.kind != kind {
        return Err(missing());
    }
    let text = serde_json::from_slice(&message.text).map_err(io::Error::from)?;
    Ok((text, message))
}

/// The parts of the switch that take over.
pub(crate) struct Parts<'s> {
    pub(crate) config: &'s Config,
    pub(crate) ports: &'s mut PortTable,
    pub(crate) workers: &'s Workers,
    pub(crate) control: &'s mut ControlServer,
    pub(crate) epoll: &'s ringferry_sys::epoll::Epoll,
    pub(crate) links: &'s mut Links,
    pub(crate) mirrors: &'s mut Mirrors,
    pub(crate) keeper: Option<&'s mut Keeper>,
}

impl Handed {
    /// Gives paused workers the addresses of the draft.
    pub(crate) fn prepare(&mut self, ports: &PortTable, workers: &Workers) {
        let numbers = std::mem::take(&mut self.draft.numbers);
        let numbers = numbers.iter().filter_map(|(name, number)| Some((*number, ports.interface(name)?.id)));
        let numbers: Ports = numbers.collect();
        let addresses = Reader(&self.bulk).addresses(self.draft.addresses, &numbers);
        self.bulk = Vec::new();
        for worker in 0..workers.count() {
            workers.carry(worker, Carried { addresses: addresses.clone(), ..Carried::default() });
        }
    }

    /// The connection to the service manager.
    pub(crate) fn notifier(&self) -> Option<&Notifier> {
        self.manager.as_ref().map(|(notifier, _)| notifier)
    }

    /// Takes the connection to the service manager, with the time within which that wants to hear that the switch is alive.
    pub(crate) fn manager(&mut self) -> Option<(Notifier, Option<Duration>)> {
        self.manager.take()
    }

    /// Returns true if the process before, which [has something to say or has ended](AsFd), was told to end while this one took over.
    pub(crate) fn is_told_to_end(&self) -> bool {
        // Whatever it says is here.
        let _ = self.channel.set_timeout(Duration::ZERO);
        self.channel.receive().is_ok_and(|message| message.kind == Kind::End)
    }

    /// Tells the service manager that this process follows the one before, which may be killed from now on. A manager that has found that one dead already has
    /// another process follow, which is not to find this one there: it hears this first, or that one's death is known here.
    ///
    /// # Errors
    /// The manager does not hear it: it would take the end of the process before for that of the switch, and start another one beside this.
    fn follow(&self) -> Result<(), SuccessionError> {
        let Some((manager, _)) = &self.manager else { return Ok(()) };
        // A manager that has gone has nobody follow.
        let told = manager.main_pid(std::process::id());
        if told.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            return Err(SuccessionError::ManagerBehind);
        }
        if self.channel.is_over()? {
            return Err(SuccessionError::Os(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "that process was killed, and its manager starts another one",
            )));
        }
        Ok(())
    }

    /// Does what can be done before the switch that runs stands still, so that packets wait for less. What is not done in time has them wait a moment longer, and nothing else.
    fn prepare_ports(ports: &PortTable) {
        let tasks = ports.ahead();
        let (sender, done) = sync_channel(1);
        let enough = Arc::new(AtomicBool::new(false));
        let is_enough = Arc::clone(&enough);
        let run = move || {
            tasks.into_iter().for_each(|task| task(&is_enough));
            let _ = sender.send(());
        };
        if let Err(error) = std::thread::Builder::new().name("ringferry-ahead".to_owned()).spawn(run) {
            return tracing::debug!("memory is not mapped ahead: {error}");
        }
        if done.recv_timeout(AHEAD).is_err() {
            enough.store(true, Ordering::Relaxed);
            // Whoever sleeps in memory that is taken away may hold a lock of this process's mappings, which is needed while everybody stands still.
            let _ = done.recv_timeout(SLEEP);
        }
    }

    /// Has the switch that runs stand still, and takes over all that it had.
    ///
    /// # Errors
    /// See [`SuccessionError`].
    pub(crate) fn take_over(
        &self,
        parts: &mut Parts<'_>,
        is_interrupted: impl FnOnce() -> bool,
    ) -> Result<(), SuccessionError> {
        Self::prepare_ports(parts.ports);
        let (state, message) = ask::<Final>(&self.channel, Kind::Final)?;
        let mut fds = message.descriptors.into_iter();
        let mut positions = Vec::with_capacity(state.entries.len());
        for entry in state.entries {
            let descriptors = entry.descriptors(&mut fds);
            let port = parts.config.ports.iter().find(|port| port.name == entry.name);
            if let (Some(port), Some(HandedPort::VhostUser(_) | HandedPort::Tap(_) | HandedPort::Xdp(_))) =
                (port, &entry.state)
            {
                // What was said of it before does not hold any more.
                parts.ports.remove(&entry.name, parts.epoll);
                let state = entry.state.ok_or_else(missing)?;
                let plug = adopt(port, state, descriptors, &self.privileges)?;
                let failed = |source| StartError::Port { port: port.name.clone(), source };
                parts.ports.add(port.clone(), plug, parts.epoll).map_err(failed)?;
            }
            positions.push((entry.name, entry.positions));
        }
        let bulk = Reader(&message.bulk);
        let ids = state
            .ports
            .iter()
            .filter_map(|(name, port)| Some((port.number, parts.ports.interface(name)?.id)));
        let ids: Ports = ids.collect();
        // Chance begins anew with another seed, so the seeds come first.
        parts.ports.take_over_seeds(&state.seeds);
        for (name, numbers) in &state.ports {
            restore(parts, name, numbers, bulk);
        }
        let addresses = bulk.addresses(state.addresses, &ids);
        for (number, (counters, worker)) in parts.workers.counters().zip(&state.workers).enumerate() {
            counters.restore(worker.counters.0);
            let waiting = bulk.waiting(worker.waiting, &ids);
            let chance = worker.chance.iter();
            let chance = chance.filter_map(|(port, model)| Some((*ids.get(port)?, model.clone())));
            let wires = OnWires { frames: bulk.waiting(worker.on_wires, &ids), models: chance.collect() };
            let stats = Some(FdbStats::of_values(worker.fdb.0));
            parts.workers.carry(number, Carried { addresses: addresses.clone(), stats, waiting, wires });
        }
        parts.mirrors.take_over(&state.mirrors, parts.ports, parts.workers);
        if is_interrupted() {
            return Err(SuccessionError::Interrupted);
        }
        self.follow()?;
        if !self.baton.drain()? {
            return Err(SuccessionError::Late);
        }
        // From here on nothing may fail.
        parts.control.listener().keep(!self.privileges.are_elsewhere());
        parts.workers.at_once(|| {
            for (name, positions) in &positions {
                parts.ports.take_over(name, positions);
            }
        });
        parts.links.take_over(&state.links_down);
        parts.links.follow(parts.ports, parts.workers);
        parts.workers.unpause();
        // The process before finds out that it has lost the baton, if this does not reach it.
        let mut running = Running::default();
        if let (Some(keeper), Some(kept)) = (&mut parts.keeper, state.kept) {
            keeper.adopt(kept, fds.next());
            // Without marks a front end may wait in vain if this process is killed before it has stored its own state.
            parts.ports.set_marks(keeper.marks(parts.ports).unwrap_or_default());
            running.keeps = true;
        }
        let text = serde_json::to_vec(&running).unwrap_or_default();
        let _ = self.channel.send(Kind::Running, &text, &[], &[]);
        Ok(())
    }
}

/// Gives a port, which touches nothing yet, what it had counted, used up and learned.
fn restore(parts: &Parts<'_>, name: &str, numbers: &PortNumbers, bulk: Reader<'_>) {
    let Some(port) = parts.ports.interface(name) else { return };
    port.counters.restore(&numbers.counters, &numbers.drops);
    parts.workers.set_buckets(port.id, &numbers.buckets);
    if let Some(firewall) = parts.workers.firewall(port.id) {
        firewall.restore(bulk.firewall(numbers.firewall), parts.workers.seconds());
    }
    if let InterfaceQueues::Pairs(shared) = &port.queues {
        shared.pairs.iter().zip(&numbers.pairs).for_each(|(pair, values)| pair.restore(values.0));
        bulk.flows(numbers.flows).for_each(|flow| shared.flows.restore(flow));
    }
    for (queue, worker) in (0u16..).zip(&numbers.owners) {
        if parts.workers.owner(port.id, queue) != *worker {
            // A worker that does not exist here is not for this queue.
            let _ = parts.workers.assign(port.id, queue, *worker);
        }
    }
}

impl AsFd for Handed {
    /// Readable when the process before has ended, or has something to say before that.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}
