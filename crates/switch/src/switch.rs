//! The switch: opens what the configuration names, then runs the control plane until it is told to
//! stop. Packets are the workers' business ([`crate::plane`]); everything here happens in human time.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_control::snapshot::{PortSnapshot, PortState, QueueRole, QueueSnapshot, Snapshot, VERSION};
use ringferry_control::{Answer, ControlServer, PortRules, Request, Response, RulesChange};
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::signal::{Signal, Signals};
use ringferry_sys::socket::{BindError, Listener, Stream};
use ringferry_sys::tap::{Existing, Offloads, Tap, TapConfig as OpenTap, TapError};
use ringferry_sys::{inherited, netif};

use crate::channels;
use crate::config::{
    Config, Edit, KeepError, PortConfig, PortKind, TapConfig, TapSource, VhostUserConfig, VhostUserEndpoint,
    keep,
};
use crate::counters::PortTotals;
use crate::explain::explain;
use crate::fdb::PortId;
use crate::plane::{PAIRS, Plane};
use crate::snapshot::{self, rules_by_key};
use crate::vhost_port::{Endpoint, VhostPort, Watch};
use crate::xen::{CONTROL_RINGS, Desk, Maps, Numbers, XenEntry, XenError};

/// What spreads frames over a guest's queue pairs.
const STEERING: &str = "automatic flow steering: a flow goes to the pair that the guest last sent it on, a new one to a \
                        pair of the worker that has it, by the hash of its addresses and ports";

/// What spreads frames over a tap's queues.
const TAP_STEERING: &str =
    "the kernel: a flow comes from the queue that it was last written to, a new one by its hash";

/// How often things that nobody announces are looked at: silent control clients, truncated guest
/// memory.
const TICK: Duration = Duration::from_secs(1);

/// Why the switch did not start. Nothing was left running.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A socket cannot be had.
    #[error("port {port}: {source}")]
    Socket {
        /// Name of the port.
        port: String,
        /// What is wrong and what to do.
        source: BindError,
    },
    /// A tap cannot be had.
    #[error("port {port}: {source}")]
    Tap {
        /// Name of the port.
        port: String,
        /// What is wrong and what to do.
        source: TapError,
    },
    /// A tap cannot be configured.
    #[error("port {port}: {source}")]
    Interface {
        /// Name of the port.
        port: String,
        /// What is wrong.
        source: netif::InterfaceError,
    },
    /// A descriptor that was to be inherited is not there or not what it should be.
    #[error("port {port}: descriptor {fd}: {source}")]
    Inherited {
        /// Name of the port.
        port: String,
        /// The number.
        fd: i32,
        /// What is wrong.
        source: io::Error,
    },
    /// systemd passed no socket of that name.
    #[error(
        "port {port}: no socket named {name} was passed: start ringferry from a socket unit with \
         FileDescriptorName={name}"
    )]
    NotActivated {
        /// Name of the port.
        port: String,
        /// The name asked for.
        name: String,
    },
    /// There is no Xen, or no store.
    #[error("port {port}: {source}")]
    Xen {
        /// Name of the port.
        port: String,
        /// What is wrong and what to do.
        source: XenError,
    },
    /// The control socket cannot be had.
    #[error("control socket: {0}")]
    Control(BindError),
    /// The system has no descriptors or threads left.
    #[error("cannot start: {0}")]
    Os(#[from] io::Error),
}

/// Why a running switch ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The worker thread is gone; its panic message is above.
    #[error("the worker thread has ended unexpectedly; please report this as a bug")]
    WorkerDied,
    /// The event loop cannot go on.
    #[error("event loop: {0}")]
    Os(#[from] io::Error),
}

/// Permissions of the control socket: who may connect may change the switch.
const CONTROL_MODE: u32 = 0o600;

/// A switch whose ports are open.
pub struct Switch {
    config: Config,
    ports: Vec<Port>,
    control: ControlServer,
    plane: Arc<Plane>,
    epoll: Epoll,
    started: Instant,
    /// See [`Plane::watch`].
    rounds: Vec<u64>,
    /// Numbers for ports of Xen guests.
    numbers: Numbers,
    /// Pages of Xen guests.
    maps: Maps,
}

struct Port {
    config: PortConfig,
    counters: PortTotals,
    kind: Kind,
    /// What epoll watches for this port.
    watched: Watched,
}

enum Kind {
    VhostUser(Box<VhostPort>),
    Tap { name: String, offloads: Vec<String>, queues: u16 },
    Xen(Box<XenEntry>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Watched {
    Nothing,
    Listener,
    Session,
}

/// Epoll tokens; the ports' follow.
const SIGNALS: u64 = 0;
const CONTROL: u64 = 1;
const REPORTS: u64 = 2;
const PORTS: u64 = 3;

/// A port's peer before the worker knows of it.
enum Opened {
    VhostUser(Endpoint),
    /// Its queues, at least one.
    Tap(Vec<Tap>),
    Xen(Box<XenEntry>),
}

impl Switch {
    /// Takes the descriptors that the configuration names. Call it before the process opens
    /// descriptors of its own: a number that was not inherited may otherwise be one of those. They join
    /// the sockets that systemd passed.
    ///
    /// # Errors
    /// [`StartError::Inherited`].
    pub fn inherit(config: &Config, passed: &mut Vec<(String, OwnedFd)>) -> Result<(), StartError> {
        for port in &config.ports {
            let number = match &port.kind {
                PortKind::VhostUser(VhostUserConfig { endpoint: VhostUserEndpoint::Fd(number), .. })
                | PortKind::Tap(TapConfig { source: TapSource::Fd(number), .. }) => *number,
                _ => continue,
            };
            let failed = |source| StartError::Inherited { port: port.name.clone(), fd: number, source };
            passed.push((inherited_name(number), inherited::take(number).map_err(failed)?));
        }
        Ok(())
    }

    /// Opens the control socket (at `control`) and every port. `passed` are the sockets systemd
    /// passed, with their names, and what [`Switch::inherit`] took.
    ///
    /// # Errors
    /// The first thing that cannot be had; everything opened before is closed again.
    pub fn start(
        config: Config,
        control: PathBuf,
        mut passed: Vec<(String, OwnedFd)>,
    ) -> Result<Switch, StartError> {
        let control = ControlServer::bind(&control, CONTROL_MODE).map_err(StartError::Control)?;
        // All ports before any is served: a configuration that cannot be had starts nothing.
        let workers = config.switch.workers();
        let opened =
            (PORTS..).zip(&config.ports).map(|(token, port)| open(port, token, workers, &mut passed));
        let opened = opened.collect::<Result<Vec<_>, _>>()?;
        let plane = Arc::new(Plane::start(&config.switch)?);
        let epoll = Epoll::new()?;
        epoll.add(&control, CONTROL, Interest::READABLE)?;
        epoll.add(plane.reports(), REPORTS, Interest::READABLE)?;
        let (mut numbers, mut maps) = (Numbers::from(config.ports.len() as u16), Maps::of_system());
        let mut ports = Vec::new();
        for ((number, config), opened) in (0u16..).zip(&config.ports).zip(opened) {
            let id = PortId(number);
            // Before there is a port, so that no frame comes first.
            plane.set_rules(id, &config.rules);
            let counters = PortTotals::new(workers);
            let kind = match (opened, &config.kind) {
                (Opened::VhostUser(endpoint), PortKind::VhostUser(vhost_user)) => Kind::VhostUser(Box::new(
                    VhostPort::new(id, config, vhost_user, endpoint, &plane, &counters),
                )),
                (Opened::Tap(queues), _) => {
                    let Some(tap) = queues.first() else { continue };
                    let name = tap.name().to_owned();
                    let offloads = tap.offloads().iter_names().map(|(name, _)| name.to_owned()).collect();
                    let count = queues.len() as u16;
                    plane.add_tap(id, &config.name, &counters, queues, config.first_worker())?;
                    Kind::Tap { name, offloads, queues: count }
                }
                (Opened::Xen(entry), _) => {
                    let (numbers, maps) = (&mut numbers, &mut maps);
                    entry.watch(&Desk { plane: &plane, epoll: &epoll, numbers, maps })?;
                    Kind::Xen(entry)
                }
                // `open` opens what the kind says.
                (Opened::VhostUser(_), PortKind::Tap(_) | PortKind::XenVif(_)) => continue,
            };
            ports.push(Port { config: config.clone(), counters, kind, watched: Watched::Nothing });
        }
        let (started, rounds) = (Instant::now(), Vec::new());
        Ok(Switch { config, ports, control, plane, epoll, started, rounds, numbers, maps })
    }

    /// Serves until SIGTERM or SIGINT, which `signals` must carry.
    ///
    /// # Errors
    /// See [`RunError`].
    pub fn run(mut self, signals: &Signals) -> Result<(), RunError> {
        self.epoll.add(signals, SIGNALS, Interest::READABLE)?;
        let mut events = EventBuf::with_capacity(64);
        let mut tick = Instant::now() + TICK;
        for at in 0..self.ports.len() {
            self.step(at);
        }
        loop {
            let due = self.ports.iter().filter_map(Port::deadline).chain([tick]).min().unwrap_or(tick);
            self.epoll.wait(&mut events, Some(due.saturating_duration_since(Instant::now())))?;
            let ready: Vec<u64> = events.iter().map(|event| event.token).collect();
            for token in ready {
                match token {
                    SIGNALS => {
                        if let Some(signal) = signals.next()?
                            && matches!(signal, Signal::TERM | Signal::INT)
                        {
                            return Ok(());
                        }
                    }
                    CONTROL => self.serve_control(),
                    REPORTS => self.serve_reports(),
                    ring if ring & CONTROL_RINGS != 0 => {
                        self.with_xen(|entry, desk| entry.serve_control(PortId(ring as u16), desk));
                    }
                    port => self.step((port - PORTS) as usize),
                }
            }
            let now = Instant::now();
            for at in 0..self.ports.len() {
                if self.ports[at].deadline().is_some_and(|due| due <= now) {
                    self.step(at);
                }
            }
            if now >= tick {
                tick = now + TICK;
                self.tick()?;
            }
        }
    }

    /// Lets a port do what it can and watches what it waits for afterwards.
    fn step(&mut self, at: usize) {
        let Switch { ports, plane, epoll, numbers, maps, .. } = self;
        match ports.get_mut(at) {
            Some(Port { kind: Kind::VhostUser(port), watched, .. }) => {
                port.step();
                settle(epoll, port, watched, at);
            }
            Some(Port { kind: Kind::Xen(entry), .. }) => {
                entry.step(&mut Desk { plane, epoll, numbers, maps });
            }
            _ => {}
        }
    }

    /// Does something with the entry whose it is: `task` says whether it was.
    fn with_xen(&mut self, mut task: impl FnMut(&mut XenEntry, &mut Desk<'_>) -> bool) {
        let Switch { ports, plane, epoll, numbers, maps, .. } = self;
        let mut desk = Desk { plane, epoll, numbers, maps };
        ports.iter_mut().any(|port| match &mut port.kind {
            Kind::Xen(entry) => task(entry, &mut desk),
            _ => false,
        });
    }

    /// Disconnects the front ends that workers cannot serve any more.
    fn serve_reports(&mut self) {
        for broken in self.plane.broken() {
            self.with_xen(|entry, desk| entry.broken(&broken, desk));
        }
    }

    fn tick(&mut self) -> Result<(), RunError> {
        self.control.tick();
        self.plane.watch(&mut self.rounds);
        for (at, port) in self.ports.iter_mut().enumerate() {
            if let Port { kind: Kind::VhostUser(port), watched, .. } = port {
                port.check_memory();
                settle(&self.epoll, port, watched, at);
            }
        }
        if self.plane.is_dead() { Err(RunError::WorkerDied) } else { Ok(()) }
    }

    fn serve_control(&mut self) {
        let Switch { config, ports, control, plane, started, maps, .. } = self;
        control.serve(&mut |request| {
            let answer = match &request {
                Request::Show => {
                    let fdb = plane.addresses(&names(ports)).into_inner();
                    Ok(Answer::Show(Box::new(Snapshot { fdb, ..snapshot(ports, plane, maps, *started) })))
                }
                Request::Dump => Ok(Answer::Dump(config.dump())),
                Request::Channels { port, .. }
                | Request::Steering { port }
                | Request::Assign { port, .. }
                | Request::Stats { port, .. } => {
                    let snapshot = snapshot(ports, plane, maps, *started);
                    channels::find(&snapshot, port).and_then(|found| answer(&request, found, ports, plane))
                }
                Request::Explain { port } => {
                    explain(&snapshot(ports, plane, maps, *started), port).map(Answer::Explain)
                }
                Request::Rules { port } => rules_of(ports, port).map(Answer::Rules),
                Request::Set { port, settings, runtime } => Edit::set(settings)
                    .map_err(|error| error.to_string())
                    .and_then(|edit| change_rules(config, ports, plane, port, &edit, *runtime)),
                Request::Unset { port, keys, runtime } => Edit::unset(keys)
                    .map_err(|error| error.to_string())
                    .and_then(|edit| change_rules(config, ports, plane, port, &edit, *runtime)),
            };
            match answer {
                Ok(answer) => Response::Ok(answer),
                Err(refusal) => Response::Error(refusal),
            }
        });
    }
}

/// The rules of a port, or of an interface of a Xen guest, which has its entry's.
fn rules_of(ports: &[Port], name: &str) -> Result<PortRules, String> {
    let interface = |port: &Port| match &port.kind {
        Kind::Xen(entry) => entry.ports().any(|(_, interface)| interface == name),
        _ => false,
    };
    let found = ports.iter().find(|port| port.config.name == name || interface(port));
    let found = found.ok_or_else(|| no_such_port(ports, name))?;
    Ok(PortRules { port: name.to_owned(), rules: rules_by_key(&found.config.rules) })
}

fn no_such_port(ports: &[Port], name: &str) -> String {
    let names: Vec<_> = ports.iter().map(|port| port.config.name.as_str()).collect();
    format!("there is no port {name:?} in the configuration; the ports are: {}", names.join(", "))
}

/// Changes rules of a port, now and in the configuration file. Either all of the edit can be had, or nothing is changed.
fn change_rules(
    config: &mut Config,
    ports: &mut [Port],
    plane: &Plane,
    name: &str,
    edit: &Edit,
    runtime: bool,
) -> Result<Answer, String> {
    let Some(at) = ports.iter().position(|port| port.config.name == name) else {
        return Err(match rules_of(ports, name) {
            Ok(_) => format!(
                "{name:?} is one interface of an entry, whose rules hold for all of them: change the entry's, or give each \
                 interface an entry of its own (vif = \"DOMAIN.DEVICE\")"
            ),
            Err(missing) => missing,
        });
    };
    let rules = config.ports[at].edited(edit).map_err(|error| error.to_string())?;
    config.check_rules(at, &rules).map_err(|error| error.to_string())?;
    let (persistent, note) = match &config.file {
        _ if runtime => (false, "a change of the running switch alone was asked for".to_owned()),
        None => (false, "the switch was started without a configuration file".to_owned()),
        Some(file) if !file.ports.iter().any(|port| port == name) => {
            let path = file.path.display();
            (false, format!("the port was given by a flag and is not in {path}: change the flag, too"))
        }
        Some(file) => match keep(&file.path, name, edit, &rules) {
            Ok(true) => (true, format!("in {}", file.path.display())),
            Ok(false) => (
                true,
                format!("in {}, where other rules of the port are not those in force", file.path.display()),
            ),
            Err(KeepError::NotKept(why)) => (false, why),
            Err(KeepError::Refused(error)) => {
                return Err(format!("the configuration file would be refused at the next start: {error}"));
            }
        },
    };
    tracing::info!(port = name, persistent, "rules have changed");
    match &mut ports[at].kind {
        Kind::Xen(entry) => entry.set_rules(&rules, plane),
        Kind::VhostUser(_) | Kind::Tap { .. } => plane.set_rules(PortId(at as u16), &rules),
    }
    let answer = RulesChange { port: name.to_owned(), rules: rules_by_key(&rules), persistent, note };
    ports[at].config.rules.clone_from(&rules);
    config.ports[at].rules = rules;
    Ok(Answer::RulesChanged(answer))
}

/// The answer to a request about one port.
fn answer(request: &Request, found: &PortSnapshot, ports: &[Port], plane: &Plane) -> Result<Answer, String> {
    let id = id_of(ports, &found.name);
    if let Request::Assign { queue, worker, .. } = request {
        let id =
            id.ok_or_else(|| format!("{:?} has no queues yet: no Xen guest is connected", found.name))?;
        let before = plane.assign(id, *queue, (*worker).into()).map_err(|error| error.to_string())?;
        tracing::info!(port = found.name, queue, worker, before, "a queue is assigned");
    }
    let worker = |queue| id.map_or(0, |id| plane.owner(id, queue)) as u16;
    let shared = ports.iter().find_map(|port| match &port.kind {
        Kind::VhostUser(vhost) => (port.config.name == found.name).then(|| vhost.shared()),
        Kind::Xen(entry) => entry.shared(&found.name),
        Kind::Tap { .. } => None,
    });
    let tap = ports.iter().find_map(|port| match &port.kind {
        Kind::Tap { queues, .. } => (port.config.name == found.name).then_some(*queues),
        _ => None,
    });
    match (request, tap) {
        (Request::Channels { port, combined: Some(_) }, Some(_)) => Err(channels::refuse_tap(port)),
        (Request::Channels { .. }, Some(queues)) => {
            Ok(Answer::Channels(channels::of_tap(&found.name, queues)))
        }
        (Request::Steering { .. } | Request::Assign { .. }, Some(queues)) => {
            Ok(Answer::Steering(channels::steering_of_tap(&found.name, TAP_STEERING, queues, worker)))
        }
        (Request::Channels { port, combined: Some(_) }, None) => Err(channels::refuse(port)),
        (Request::Steering { .. } | Request::Assign { .. }, None) => {
            Ok(Answer::Steering(channels::steering(found, STEERING, worker)))
        }
        (Request::Stats { queues, .. }, _) => {
            let pairs = shared.filter(|_| *queues).map_or(&[][..], |shared| &shared.pairs);
            let used = (0..).zip(pairs).filter(|(pair, _)| found.queues.iter().any(|q| q.index / 2 == *pair));
            Ok(Answer::Stats(channels::stats(found, used)))
        }
        _ => Ok(Answer::Channels(channels::channels(found, PAIRS))),
    }
}

/// The number of the port, or of the interface of a Xen guest, of this name.
fn id_of(ports: &[Port], name: &str) -> Option<PortId> {
    ports.iter().enumerate().find_map(|(at, port)| match &port.kind {
        Kind::Xen(entry) => entry.ports().find(|(_, interface)| *interface == name).map(|(id, _)| id),
        Kind::VhostUser(_) | Kind::Tap { .. } => (port.config.name == name).then_some(PortId(at as u16)),
    })
}

/// Watches what a port waits for now. Where that cannot be had (the user's limit of watched descriptors,
/// say) the port alone goes down, and the next tick tries again.
fn settle(epoll: &Epoll, port: &mut VhostPort, watched: &mut Watched, at: usize) {
    if let Err(error) = rewatch(epoll, port, watched, at) {
        tracing::error!(port = at, "cannot wait for the port's socket: {error}; trying again");
        port.close();
    }
}

fn rewatch(epoll: &Epoll, port: &mut VhostPort, watched: &mut Watched, at: usize) -> io::Result<()> {
    let token = PORTS + at as u64;
    if let Some(session) = port.take_ended() {
        // Closing its socket is not enough: who passed it to us may hold the same open file.
        epoll.remove(&session)?;
        *watched = Watched::Nothing;
    }
    let (now, fd) = match port.watch() {
        Watch::Listener(fd) => (Watched::Listener, Some(fd)),
        Watch::Session(fd) => (Watched::Session, Some(fd)),
        Watch::Nothing => (Watched::Nothing, None),
    };
    if *watched == now {
        return Ok(());
    }
    if let (Watched::Listener, Endpoint::Listen(listener)) = (*watched, &port.endpoint) {
        epoll.remove(listener)?;
    }
    if let Some(fd) = fd {
        epoll.add(fd, token, Interest::READABLE | Interest::HANGUP)?;
    }
    *watched = now;
    Ok(())
}

impl Port {
    fn deadline(&self) -> Option<Instant> {
        match &self.kind {
            Kind::VhostUser(port) => port.deadline(),
            Kind::Xen(entry) => entry.deadline(),
            Kind::Tap { .. } => None,
        }
    }
}

/// Opens what a port needs.
fn open(
    port: &PortConfig,
    token: u64,
    workers: usize,
    passed: &mut Vec<(String, OwnedFd)>,
) -> Result<Opened, StartError> {
    let name = || port.name.clone();
    let socket = |source| StartError::Socket { port: name(), source };
    match &port.kind {
        PortKind::VhostUser(config) => Ok(Opened::VhostUser(match &config.endpoint {
            VhostUserEndpoint::Listen(path) => Endpoint::Listen(Listener::bind(path).map_err(socket)?),
            VhostUserEndpoint::Connect(path) => Endpoint::Connect(path.clone()),
            VhostUserEndpoint::Fd(number) => {
                let inherited = |source| StartError::Inherited { port: name(), fd: *number, source };
                inherited_endpoint(take(passed, &inherited_name(*number), port)?).map_err(inherited)?
            }
            VhostUserEndpoint::Activation(wanted) => {
                Endpoint::Listen(Listener::from_fd(take(passed, wanted, port)?).map_err(socket)?)
            }
        })),
        PortKind::Tap(config) => open_tap(port, config, workers, passed).map(Opened::Tap),
        PortKind::XenVif(config) => match XenEntry::new(port, config, token, workers) {
            Ok(entry) => Ok(Opened::Xen(Box::new(entry))),
            Err(source) => Err(StartError::Xen { port: name(), source }),
        },
    }
}

/// The name under which a descriptor named by number is passed on; no `FileDescriptorName=` has a colon.
fn inherited_name(number: RawFd) -> String {
    format!("fd:{number}")
}

/// Takes what was passed under a name.
fn take(passed: &mut Vec<(String, OwnedFd)>, name: &str, port: &PortConfig) -> Result<OwnedFd, StartError> {
    let at = passed.iter().position(|(have, _)| have == name);
    let missing = || StartError::NotActivated { port: port.name.clone(), name: name.to_owned() };
    Ok(passed.swap_remove(at.ok_or_else(missing)?).1)
}

/// An inherited socket listens, or is connected.
fn inherited_endpoint(fd: OwnedFd) -> io::Result<Endpoint> {
    if rustix::net::sockopt::socket_acceptconn(&fd)? {
        Ok(Endpoint::Listen(Listener::from_fd(fd).map_err(io::Error::other)?))
    } else {
        Ok(Endpoint::Once(Some(Stream::from_fd(fd)?)))
    }
}

fn open_tap(
    port: &PortConfig,
    config: &TapConfig,
    workers: usize,
    passed: &mut Vec<(String, OwnedFd)>,
) -> Result<Vec<Tap>, StartError> {
    let failed = |source| StartError::Tap { port: port.name.clone(), source };
    let offloads = if config.offloads { Offloads::all() } else { Offloads::empty() };
    let (queues, created) = match &config.source {
        TapSource::Fd(number) => {
            let fd = take(passed, &inherited_name(*number), port)?;
            (vec![Tap::from_fd(fd, offloads).map_err(failed)?], false)
        }
        TapSource::Name { name, existing } => {
            let existed = netif::index(name).ok().flatten().is_some();
            let existing = match existing {
                None => Existing::Either,
                Some(true) => Existing::Require,
                Some(false) => Existing::Refuse,
            };
            let count = config.queues.map_or(workers, usize::from);
            let open = |existing, multi_queue| {
                Tap::open(&OpenTap { existing, offloads, multi_queue, ..OpenTap::new(name.clone()) })
            };
            let (first, several) = match open(existing, count > 1) {
                // Somebody made it with one queue.
                Err(TapError::OtherKind { .. }) if config.queues.is_none() && count > 1 => {
                    (open(existing, false), false)
                }
                result => (result, count > 1),
            };
            let mut queues = vec![first.map_err(failed)?];
            if several {
                for _ in 1..count.min(workers) {
                    queues.push(open(Existing::Require, true).map_err(failed)?);
                }
            }
            (queues, !existed)
        }
    };
    let failed = |source| StartError::Interface { port: port.name.clone(), source };
    if let Some(mtu) = port.mtu {
        netif::set_mtu(queues[0].name(), mtu.into()).map_err(failed)?;
    }
    // A tap that someone else made is up or down as they wish.
    if created {
        netif::set_up(queues[0].name(), true).map_err(failed)?;
    }
    Ok(queues)
}

/// The names of all ports, in the order of their numbers.
fn names(ports: &[Port]) -> Vec<String> {
    let mut names: Vec<_> = ports.iter().map(|port| port.config.name.clone()).collect();
    for port in ports {
        let Kind::Xen(entry) = &port.kind else { continue };
        for (PortId(number), name) in entry.ports() {
            let at = usize::from(number);
            if names.len() <= at {
                names.resize(at + 1, String::new());
            }
            names[at] = name.to_owned();
        }
    }
    names
}

/// Everything there is to know but the addresses, which few ask for.
fn snapshot(ports: &[Port], plane: &Plane, maps: &Maps, started: Instant) -> Snapshot {
    let mut queues: BTreeMap<(PortId, u16), _> =
        plane.inspect().into_iter().map(|queue| ((queue.port, queue.index), queue)).collect();
    let ports = (0u16..).zip(ports).flat_map(|(number, port)| {
        let id = PortId(number);
        if let Kind::Xen(entry) = &port.kind {
            return entry.snapshots(maps, &mut queues);
        }
        let mut snapshot = PortSnapshot {
            name: port.config.name.clone(),
            kind: port.config.kind.name().to_owned(),
            state: PortState::Up,
            peer: String::new(),
            mtu: 0,
            mac: None,
            features: Vec::new(),
            queues: Vec::new(),
            counters: port.counters.by_name(),
            drops: port.counters.drops_by_name(),
            rules: rules_by_key(&port.config.rules),
        };
        match &port.kind {
            Kind::Tap { name, offloads, .. } => {
                snapshot.peer.clone_from(name);
                snapshot.features.clone_from(offloads);
                snapshot.mtu = netif::mtu(name).map_or(0, |mtu| mtu.try_into().unwrap_or(u16::MAX));
                snapshot.mac = netif::mac(name).ok().map(|mac| ringferry_packet::ether::Mac(mac).to_string());
                if !netif::is_up(name).unwrap_or(false) {
                    snapshot.state = PortState::Down;
                }
            }
            Kind::VhostUser(vhost) => {
                snapshot.state = vhost.state();
                snapshot.peer = vhost.peer();
                snapshot.mtu = vhost.mtu();
                snapshot.features = vhost.features().names();
                let protocol = vhost.protocol_counters();
                snapshot.counters.extend(protocol.map(|(name, count)| (name.to_owned(), count)));
                let rings = vhost.session().into_iter().flat_map(ringferry_vhost_user::Session::rings);
                for (index, ring) in (0u16..).zip(rings).filter(|(_, ring)| ring.size > 0) {
                    let live = queues.remove(&(id, index));
                    if live.as_ref().is_some_and(|live| live.broken.is_some()) {
                        snapshot.state = PortState::Broken;
                    }
                    snapshot.queues.push(QueueSnapshot {
                        index,
                        role: if index % 2 == 0 { QueueRole::Receiveq } else { QueueRole::Transmitq },
                        size: ring.size,
                        enabled: ring.enabled,
                        started: ring.started,
                        last_avail: live.as_ref().map_or(ring.base as u16, |live| live.last_avail),
                        last_used: live.as_ref().map_or(0, |live| live.last_used),
                        broken: live.and_then(|live| live.broken),
                        grants: None,
                    });
                }
            }
            // Answered above.
            Kind::Xen(_) => {}
        }
        vec![snapshot]
    });
    Snapshot {
        version: VERSION,
        pid: std::process::id(),
        uptime_seconds: started.elapsed().as_secs(),
        ports: ports.collect(),
        fdb: Default::default(),
        workers: plane.counters().map(|counters| snapshot::worker(counters, started.elapsed())).collect(),
    }
}
