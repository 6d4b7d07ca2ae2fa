//! Answers to the requests of the control socket's clients.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ringferry_control::channels::Steering;
use ringferry_control::snapshot::{
    FdbSnapshot, PairSnapshot, PortSnapshot, PortState, Snapshot, VERSION, WorkerSnapshot,
};
use ringferry_control::trace::{Trace, TraceRequest};
use ringferry_control::{
    Answer, Holds, Kept, PortRules, Reply, Request, Response, RulesByKey, SettingChange, SettingsChange,
    Ticket,
};
use ringferry_sys::epoll::{Epoll, EventBuf};
use ringferry_virtio_net::queue_index;

use crate::captures::Captures;
use crate::channels;
use crate::config::{self, Config, Edit, Effect, PortConfig, PortKind};
use crate::counters::{PAIR_COUNTERS, PAIR_NAMES};
use crate::drains::Drains;
use crate::explain::explain;
use crate::fdb::PortId;
use crate::handover::FORMAT;
use crate::handover::kept::Keeper;
use crate::links::Links;
use crate::mirrors::Mirrors;
use crate::plane::PAIRS;
use crate::ports::queues::Workers;
use crate::ports::table::{FIRST_TOKEN, PortTable};
use crate::ports::tap::{INTERFACE_LOST, undone};
use crate::ports::{Interface, InterfaceQueues};
use crate::privileged::{NotKept, Privileges};
use crate::rules::Rules;
use crate::series::{Sample, Series};
use crate::snapshot::{self, FdbMerge, rules_by_key};
use crate::stalls::Stalls;
use crate::switch::FAULTS;
use crate::trace;
use crate::why::{Known, why};

/// The longest time in seconds for which a port is drained: a client waits for 30.
const MAX_DRAIN: u16 = 25;

mod addresses;
mod firewalls;
mod ports;
mod wires;
pub(crate) use ports::NotReloaded;
use ports::describe;

/// Description of the algorithm that spreads frames over a guest's queue pairs.
const STEERING: &str = "automatic flow steering: a flow goes to the pair that the guest last sent it on, a new one to a \
                        pair of the worker that has it, by the hash of its addresses and ports";

/// Description of the algorithm that spreads frames over a tap's queues.
const TAP_STEERING: &str =
    "the kernel: a flow comes from the queue that it was last written to, a new one by its hash";

/// The parts of the switch that requests are about.
pub(crate) struct Requests<'s> {
    pub(crate) config: &'s mut Config,
    pub(crate) ports: &'s mut PortTable,
    pub(crate) workers: &'s Workers,
    pub(crate) started: Instant,
    pub(crate) privileges: &'s Privileges,
    /// What new ports are watched by.
    pub(crate) epoll: &'s Epoll,
    /// The process that is about to take over, if one is, as far as it can be seen from here.
    pub(crate) replacing: Option<Option<u32>>,
    /// The process that asks, as far as it can be seen from here.
    pub(crate) asker: Option<u32>,
    /// When this process became the switch.
    pub(crate) began: Instant,
    pub(crate) captures: &'s mut Captures,
    pub(crate) mirrors: &'s mut Mirrors,
    pub(crate) links: &'s mut Links,
    pub(crate) series: &'s Series,
    pub(crate) stalls: &'s Stalls,
    /// The part of the configuration file that was not carried out when it was last read again, and when that was.
    pub(crate) not_reloaded: &'s mut Option<(Instant, NotReloaded)>,
    pub(crate) keeper: Option<&'s mut Keeper>,
}

impl Requests<'_> {
    /// Answers a request, or says why it is refused; `None` if the answer comes when a port is drained.
    pub(crate) fn respond_later(
        &mut self,
        request: Request,
        ticket: Ticket,
        drains: &mut Drains,
    ) -> Option<Reply> {
        self.asker = ticket.pid();
        if matches!(request, Request::Replace { .. }) && drains.deadline().is_some() {
            return Some(
                Response::Error("a port is being drained: try again when it is gone".to_owned()).into(),
            );
        }
        if let Request::Remove { port, runtime, drain: Some(seconds), .. } = &request
            && self.check_no_end(port).is_ok()
            && let Some(entry) = self.ports.retire(port, self.epoll)
        {
            let seconds = (*seconds).min(MAX_DRAIN);
            tracing::info!(port, seconds, "the port is drained before it is removed");
            drains.begin(entry, port, *runtime, ticket, seconds);
            return None;
        }
        Some(self.respond(request))
    }

    /// Answers a request, or says why it is refused.
    pub(crate) fn respond(&mut self, request: Request) -> Reply {
        let mut fds = Vec::new();
        let response = match self.answer(request, &mut fds) {
            Ok(answer) => Response::Ok(answer),
            Err(refusal) => Response::Error(refusal),
        };
        Reply { response, fds }
    }

    /// Answers a request; descriptors that go with the answer are added to `fds`.
    fn answer(&mut self, request: Request, fds: &mut Vec<OwnedFd>) -> Result<Answer, String> {
        match &request {
            Request::Show { addresses } => {
                Ok(Answer::Show(Box::new(Snapshot { fdb: self.addresses(*addresses), ..self.snapshot() })))
            }
            Request::Dump => Ok(Answer::Dump(self.config.dump())),
            Request::Channels { port, .. } | Request::Steering { port } | Request::Stats { port, .. } => {
                let snapshot = self.snapshot();
                self.answer_for_port(&request, channels::find(&snapshot, port)?)
            }
            Request::Assign { port, queue, worker, runtime } => {
                let kept = self.assign(port, *queue, *worker, *runtime)?;
                let (snapshot, steering) = (self.snapshot(), Request::Steering { port: port.clone() });
                let answer = self.answer_for_port(&steering, channels::find(&snapshot, port)?)?;
                Ok(match answer {
                    Answer::Steering(steering) => Answer::Steering(Steering { kept: Some(kept), ..steering }),
                    other => other,
                })
            }
            Request::Explain { port } => {
                explain(&self.snapshot(), port, |name| self.rules_of(name)).map(Answer::Explain)
            }
            Request::Why { port, peer } => {
                let snapshot = self.snapshot();
                // Before all addresses are collected for it.
                channels::find(&snapshot, port)?;
                self.examine(snapshot, |name| name == port, |known| why(known, port, peer.as_deref()))
                    .map(Answer::Why)
            }
            Request::Diagnose => self
                .examine(
                    self.snapshot(),
                    |_| true,
                    |known| known.snapshot.ports.iter().map(|port| why(known, &port.name, None)).collect(),
                )
                .map(Answer::Diagnoses),
            Request::Trace(request) => {
                let snapshot = Snapshot { fdb: self.addresses(None), ..self.snapshot() };
                self.trace(&snapshot, request).map(|trace| Answer::Trace(Box::new(trace)))
            }
            Request::Capture(request) => {
                let (started, with) =
                    self.captures.begin(request, self.asker, self.ports, self.workers, self.epoll)?;
                fds.extend(with);
                Ok(Answer::Capture(started))
            }
            Request::Link { port, up } => {
                self.links.set(port, *up, self.ports, self.workers).map(Answer::LinkChanged)
            }
            Request::Mirrors => Ok(Answer::Mirrors(self.all_mirrors(&self.ports.snapshots()))),
            Request::AddMirror { from, to, direction, vlan } => {
                self.mirrors.add((from, to), *direction, *vlan, self.ports, self.workers)?;
                Ok(Answer::Mirrors(self.all_mirrors(&self.ports.snapshots())))
            }
            Request::RemoveMirror { from, to } => {
                self.mirrors.remove(from, to, self.workers)?;
                Ok(Answer::Mirrors(self.all_mirrors(&self.ports.snapshots())))
            }
            Request::Wires { wire } => self.wires(wire.as_deref()).map(Answer::Wires),
            Request::SetWire { wire, settings, from, runtime } => {
                self.set_wire(wire, settings, from.as_deref(), *runtime)
            }
            Request::ResetWire { wire, from, runtime } => self.reset_wire(wire, from.as_deref(), *runtime),
            Request::AddWire { ports, name, settings, runtime } => {
                self.add_wire(name.as_deref(), ports, settings, *runtime)
            }
            Request::RemoveWire { wire, runtime } => self.remove_wire(wire, *runtime),
            Request::FlushFdb { port, vlan, mac } => {
                self.flush(port.as_deref(), *vlan, mac.as_deref()).map(Answer::FdbFlushed)
            }
            Request::AddFdb { mac, port, vlan, runtime } => self.add_static(mac, port, *vlan, *runtime),
            Request::RemoveFdb { mac, vlan, runtime } => self.remove_static(mac, *vlan, *runtime),
            Request::Add { port, runtime } => self.add(port, *runtime).map(Answer::PortChanged),
            // A port that is to be drained, and that there is, has been taken care of before.
            Request::Remove { port, if_exists, runtime, drain: _ } => {
                self.remove(port, *if_exists, *runtime).map(Answer::PortChanged)
            }
            Request::Replace { format } => {
                if let Some(pid) = self.replacing {
                    let process = pid.map_or_else(String::new, |pid| format!(" {pid}"));
                    return Err(format!(
                        "another process{process} is taking over already: try again when it has, or has failed"
                    ));
                }
                Ok(Answer::Replacing { format: (*format).min(FORMAT), pid: std::process::id() })
            }
            Request::Reload { dry_run } => self.reload(*dry_run).map(Answer::Reloaded),
            Request::Rules { port } => self.rules(port).map(Answer::Rules),
            Request::Denials { port, since } => self.denials(port.as_deref(), since).map(Answer::Denials),
            Request::Firewalls => Ok(Answer::Firewalls(self.firewalls())),
            Request::Firewall { port, conversations } => {
                self.firewall(port, *conversations).map(|report| Answer::Firewall(Box::new(report)))
            }
            Request::Set { port, settings, runtime } => {
                let edit = Edit::set(settings).map_err(|error| error.to_string())?;
                self.change(port, &edit, *runtime)
            }
            Request::Unset { port, keys, runtime } => {
                let edit = Edit::unset(keys).map_err(|error| error.to_string())?;
                self.change(port, &edit, *runtime)
            }
        }
    }

    /// Returns all mirrors, with the states of ports that take no copies.
    fn all_mirrors(&self, ports: &[PortSnapshot]) -> ringferry_control::mirror::Mirrors {
        let mut all = self.mirrors.list();
        for mirror in &mut all.mirrors {
            let state = ports.iter().find(|port| port.name == mirror.to).map(|port| port.state);
            mirror.to_state = match state {
                _ if self.links.is_down(&mirror.to) => Some(PortState::AdminDown),
                Some(PortState::Up) => None,
                Some(state) => Some(state),
                // Its guest of Xen has gone.
                None => Some(PortState::Down),
            };
        }
        all
    }

    /// Finds out what would become of a frame, in a switch of this state.
    fn trace(&self, snapshot: &Snapshot, request: &TraceRequest) -> Result<Trace, String> {
        let rules =
            |name: &str| self.ports.entry_of(name).map(|entry| entry.rules.clone()).unwrap_or_default();
        let known = trace::Known {
            snapshot,
            rules: &rules,
            id: &|name| self.ports.interface(name).map(|interface| interface.id),
            capture: &|id| self.mirrors.name_of(id).unwrap_or_else(|| format!("capture {}", id.0)),
            walk: &|frame| self.workers.walk(frame),
        };
        trace::trace(&known, request)
    }

    /// Reads the policies that ports name.
    ///
    /// # Errors
    /// There is no directory of policies, or something is wrong with them, for people.
    fn load_policies(&mut self, ports: &mut [PortConfig]) -> Result<(), String> {
        if ports.iter().all(|port| port.rules.firewall.is_none()) {
            return Ok(());
        }
        let directory = self.config.policy_directory().ok_or(
            "the switch was started without a directory of policies: start it with --policies DIRECTORY, or with a configuration file, beside which they are in policies/",
        )?;
        let privileges = self.privileges;
        privileges.load_policies(ports, &directory, &mut || self.serve_ports())
    }

    /// Returns the rules of a port, or of an interface of a Xen guest, which has its entry's rules.
    fn rules(&self, name: &str) -> Result<PortRules, String> {
        let found = self.ports.entry_of(name).ok_or_else(|| self.no_such_port(name))?;
        Ok(PortRules { port: name.to_owned(), rules: rules_by_key(&found.rules) })
    }

    fn no_such_port(&self, name: &str) -> String {
        let names: Vec<_> = self.ports.configs().map(|port| port.name.as_str()).collect();
        format!("there is no port {name:?} in the configuration; the ports are: {}", names.join(", "))
    }

    /// Says why a name is not that of a port that can be changed.
    fn not_an_entry(&self, name: &str) -> String {
        if self.ports.entry_of(name).is_some() {
            return format!(
                "{name:?} is one interface of an entry, which all of them share: change the entry, or give each \
                 interface an entry of its own (vif = \"DOMAIN.DEVICE\")"
            );
        }
        self.no_such_port(name)
    }

    /// Changes settings of a port, now and in the configuration file. Either all of the edit is made, or nothing is changed.
    fn change(&mut self, name: &str, edit: &Edit, runtime: bool) -> Result<Answer, String> {
        let Some(at) = self.config.ports.iter().position(|port| port.name == name) else {
            return Err(self.not_an_entry(name));
        };
        let before = self.config.ports[at].clone();
        let mut port = before.edited(edit).map_err(|error| error.to_string())?;
        self.config.check_change(at, &port, self.workers.count())?;
        match (&before.rules.firewall, &mut port.rules.firewall) {
            // A change of something else is no reason to read the policy again.
            (Some(there), Some(firewall)) if there.name == firewall.name && !edit.sets("firewall") => {
                firewall.policy.clone_from(&there.policy);
            }
            _ => self.load_policies(std::slice::from_mut(&mut port))?,
        }
        // Who sets what the port has already wants it to be so at the host, too, where somebody may have undone it.
        let is_the_same = (&before.kind, before.mtu) == (&port.kind, port.mtu);
        if is_the_same && !self.privileges.astray(&port).is_empty() {
            self.privileges.set_up(&port, None).map_err(|error| error.to_string())?;
        }
        // Rules come last: they are all that frames notice, and cannot fail.
        self.ports.change(&port)?;
        let (persistent, note) = match self.keep_settings(edit, &port, runtime) {
            Ok(kept) => kept,
            Err(error) => {
                let undone = self.ports.change(&before).map_or_else(
                    |error| format!("; and the port could not be set back: {error}"),
                    |()| String::new(),
                );
                return Err(format!(
                    "the configuration file would be refused at the next start: {error}{undone}"
                ));
            }
        };
        if before.rules != port.rules {
            self.ports.set_rules(name, &port.rules);
        }
        tracing::info!(
            port = name,
            persistent,
            "settings have changed: {} ({note})",
            describe(&before, &port)
        );
        let settings = self.settings_of(edit, &port);
        let rules = rules_by_key(&port.rules);
        let before = self.oddities();
        self.config.ports[at] = port;
        Ok(Answer::SettingsChanged(SettingsChange {
            port: name.to_owned(),
            rules,
            settings,
            persistent,
            note,
            notes: self.remark(&before),
        }))
    }

    /// Has settings of a port kept in the configuration file, and returns whether they are, with the file or the reason.
    ///
    /// # Errors
    /// The file would be refused at the next start.
    fn keep_settings(
        &mut self,
        edit: &Edit,
        port: &PortConfig,
        runtime: bool,
    ) -> Result<(bool, String), String> {
        let file = match &self.config.file {
            _ if runtime => {
                return Ok((false, "a change of the running switch alone was asked for".to_owned()));
            }
            None => return Ok((false, "the switch was started without a configuration file".to_owned())),
            Some(file) if !file.ports.contains(&port.name) => {
                let path = file.path.display();
                let note = format!("the port was given by a flag and is not in {path}: change the flag, too");
                return Ok((false, note));
            }
            Some(file) => file,
        };
        let (privileges, path) = (self.privileges, file.path.clone());
        match privileges.keep(&path, edit, port, &mut || self.serve_ports()) {
            Ok(config::Kept { path, same: true }) => Ok((true, format!("in {}", path.display()))),
            Ok(config::Kept { path, same: false }) => Ok((
                true,
                format!("in {}, where other settings of the port are not those in force", path.display()),
            )),
            Err(NotKept::Because(why)) => {
                ports::warn_of_lost(&why);
                Ok((false, ports::until_reload(&why)))
            }
            Err(NotKept::Refused(error)) => Err(error),
        }
    }

    /// Serves the ports for a moment, while something else is waited for: no front end waits for a file system, or for the other 300 ports of a
    /// reload. Clients of the control socket and signals have to wait.
    fn serve_ports(&mut self) {
        let mut events = EventBuf::with_capacity(64);
        // An error will be met by the event loop itself.
        if self.epoll.wait(&mut events, Some(Duration::ZERO)).is_err() {
            return;
        }
        for event in events.iter() {
            match event.token {
                FAULTS => self.ports.serve_faults(self.epoll),
                token if token >= FIRST_TOKEN => self.ports.serve(token, self.epoll),
                _ => {}
            }
        }
        self.ports.serve_due(Instant::now(), self.epoll);
    }

    /// Returns the settings other than rules that an edit has asked for, as the port has them now.
    fn settings_of(&self, edit: &Edit, port: &PortConfig) -> Vec<SettingChange> {
        // Without a front end the settings of the next connection are those that the port has.
        let is_connected = self.ports.has_session(&port.name);
        let value = |value: toml::Value| serde_json::to_value(value).unwrap_or_default();
        let settings = edit.settings(port).into_iter().map(|(key, written)| SettingChange {
            key: key.to_owned(),
            holds: match port.effect(key) {
                Some(Effect::NextConnection) if is_connected => Holds::NextConnection,
                // There is no MTU that would be the interface's own.
                _ if key == "mtu" && written.is_none() && matches!(port.kind, PortKind::Tap(_)) => {
                    Holds::Kept
                }
                _ => Holds::AtOnce,
            },
            value: written.map(value),
        });
        settings.collect()
    }

    /// Has another worker serve a queue of a port, and says whether that is kept in the configuration file.
    fn assign(&mut self, name: &str, queue: u16, worker: u16, runtime: bool) -> Result<Kept, String> {
        let name = channels::find(&self.snapshot(), name)?.name.clone();
        let id = self.ports.interface(&name).map(|interface| interface.id);
        let id = id.ok_or_else(|| format!("{name:?} has no queues yet: no Xen guest is connected"))?;
        let before = self.workers.assign(id, queue, worker.into()).map_err(|error| error.to_string())?;
        let (persistent, note) = self.keep_assignment(&name, queue, worker, runtime);
        tracing::info!(port = name, queue, worker, before, persistent, "a queue is assigned ({note})");
        Ok(Kept { persistent, note })
    }

    /// Has the worker of a queue kept in the configuration, and returns whether it is in the file, with the file or the reason.
    fn keep_assignment(&mut self, name: &str, queue: u16, worker: u16, runtime: bool) -> (bool, String) {
        let Some(at) = self.config.ports.iter().position(|port| port.name == name) else {
            return (false, self.not_an_entry(name));
        };
        let before = &self.config.ports[at];
        let edit = Edit::worker(&before.assigned(queue, worker, self.workers.count()).workers);
        let port = match before.edited(&edit) {
            Ok(port) => port,
            Err(error) => return (false, format!("the configuration of the port cannot say so: {error}")),
        };
        let kept = self.keep_settings(&edit, &port, runtime).unwrap_or_else(|error| {
            (false, format!("the configuration file would be refused at the next start: {error}"))
        });
        // All queues are where the port says by now.
        if let Err(error) = self.ports.change(&port) {
            return (false, error);
        }
        self.config.ports[at] = port;
        kept
    }

    /// Answers a request about one port.
    fn answer_for_port(&self, request: &Request, found: &PortSnapshot) -> Result<Answer, String> {
        let interface = self.ports.interface(&found.name);
        let id = interface.as_ref().map(|interface| interface.id);
        let worker = |queue| id.map_or(0, |id| self.workers.owner(id, queue)) as u16;
        let (shared, kernel) = match interface.map(|interface| interface.queues) {
            Some(InterfaceQueues::Pairs(shared)) => (Some(shared), None),
            Some(InterfaceQueues::Kernel(queues)) => (None, Some(queues)),
            None => (None, None),
        };
        match (request, kernel) {
            (Request::Channels { port, combined: Some(_) }, Some(_)) => Err(channels::refuse_tap(port)),
            (Request::Channels { .. }, Some(queues)) => {
                Ok(Answer::Channels(channels::of_tap(&found.name, queues)))
            }
            (Request::Steering { .. }, Some(queues)) => {
                Ok(Answer::Steering(channels::steering_of_tap(&found.name, TAP_STEERING, queues, worker)))
            }
            (Request::Channels { port, combined: Some(_) }, None) => Err(channels::refuse(port)),
            (Request::Steering { .. }, None) => {
                Ok(Answer::Steering(channels::steering(found, STEERING, worker)))
            }
            (Request::Stats { queues, .. }, _) => {
                let pairs = shared.filter(|_| *queues).map_or(&[][..], |shared| &shared.pairs);
                let used = (0..)
                    .zip(pairs)
                    .filter(|(pair, _)| found.queues.iter().any(|q| queue_index::pair(q.index) == *pair));
                Ok(Answer::Stats(channels::stats(found, used)))
            }
            _ => Ok(Answer::Channels(channels::channels(found, PAIRS))),
        }
    }

    /// Returns the rules of a port.
    fn rules_of(&self, name: &str) -> Rules {
        self.ports.entry_of(name).map(|entry| entry.rules.clone()).unwrap_or_default()
    }

    /// Completes a snapshot with the addresses, and with what can only be seen from outside of the sandbox of these ports, and has it looked at.
    fn examine<T>(
        &self,
        snapshot: Snapshot,
        is_meant: impl Fn(&str) -> bool,
        look: impl FnOnce(&Known<'_>) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut snapshot = Snapshot { fdb: self.addresses(None), ..snapshot };
        for found in snapshot.ports.iter_mut().filter(|found| is_meant(&found.name)) {
            let is_other = found.fault.as_ref().is_some_and(|fault| !fault.starts_with(INTERFACE_LOST));
            if let (false, Some(config)) = (is_other, self.ports.entry_of(&found.name)) {
                found.fault = undone(&self.privileges.astray(config));
            }
        }
        look(&Known {
            snapshot: &snapshot,
            rules: &|name| self.rules_of(name),
            is_drained: &|name| self.ports.is_retired(name),
            renewed: &|name| self.ports.renewed(name),
            trace: &|request| self.trace(&snapshot, request),
        })
    }

    /// Returns the forwarding database of all workers: an address is where any worker saw it last.
    fn addresses(&self, most: Option<usize>) -> FdbSnapshot {
        let names: BTreeMap<PortId, String> =
            self.ports.interfaces().map(|port| (port.id, port.name.to_owned())).collect();
        let mut all = FdbMerge::default();
        let add = |page| all.add(page, |port| names.get(&port).cloned().unwrap_or_default());
        let are_all_listed = self.workers.addresses(most, add);
        all.settle(are_all_listed, most)
    }

    /// Returns the queue pairs of a port.
    fn pairs(&self, port: &PortSnapshot, interface: &Interface<'_>, sample: &Sample) -> Vec<PairSnapshot> {
        let pair = |pair| PairSnapshot {
            pair,
            worker: self.workers.owner(interface.id, pair) as u16,
            counters: match &interface.queues {
                InterfaceQueues::Kernel(_) => BTreeMap::new(),
                InterfaceQueues::Pairs(shared) => {
                    let values = shared.pairs[usize::from(pair)].values();
                    PAIR_NAMES.map(str::to_owned).into_iter().zip(values).collect()
                }
            },
            rates: self.series.pair(sample, interface.id, pair),
        };
        pairs_of(port, interface).into_iter().map(pair).collect()
    }

    /// Returns the whole state without the addresses, which few clients ask for.
    fn snapshot(&self) -> Snapshot {
        let now = Instant::now();
        let uptime = now - self.started;
        self.workers.count_run_delays();
        let (mut ports, sample) = (self.ports.snapshots(), Sample::take(now, self.ports, self.workers));
        for port in &mut ports {
            let Some(interface) = self.ports.interface(&port.name) else { continue };
            port.rates = self.series.port(&sample, interface.id);
            port.pairs = self.pairs(port, &interface, &sample);
            for queue in &mut port.queues {
                let stall = |available| self.stalls.of(now, interface.id, queue.index, available);
                queue.stalled = queue.available.and_then(stall);
            }
        }
        let names: BTreeMap<PortId, &str> =
            self.ports.interfaces().map(|port| (port.id, port.name)).collect();
        let workers = (0..).zip(self.workers.counters()).map(|(number, counters)| WorkerSnapshot {
            load: self.series.worker(&sample, number, |id| names.get(&id).copied()),
            ..snapshot::worker(counters, uptime)
        });
        let workers = workers.collect();
        self.mark_links(&mut ports);
        let mirrors = self.all_mirrors(&ports).mirrors;
        Snapshot {
            version: VERSION,
            pid: std::process::id(),
            uptime_seconds: uptime.as_secs(),
            ports,
            fdb: FdbSnapshot::default(),
            clock_nanoseconds: Workers::nanoseconds(now),
            workers,
            program: env!("CARGO_PKG_VERSION").to_owned(),
            process_seconds: Some((now - self.began).as_secs()),
            captures: self.captures.list(),
            mirrors,
            wires: self.config.wires.iter().map(wires::ends).collect(),
            troubles: self.troubles(),
        }
    }

    /// Returns what each port can do.
    fn port_states(&self) -> BTreeMap<String, PortState> {
        let mut ports = self.ports.snapshots();
        self.mark_links(&mut ports);
        ports.into_iter().map(|port| (port.name, port.state)).collect()
    }

    /// Has ports whose link the administrator has taken down say so.
    fn mark_links(&self, ports: &mut [PortSnapshot]) {
        for port in ports.iter_mut().filter(|port| self.links.is_down(&port.name)) {
            port.state = PortState::AdminDown;
        }
    }

    /// Returns what is wrong with the switch itself, for people.
    fn troubles(&self) -> Vec<String> {
        let unkept = self.keeper.as_deref().and_then(Keeper::trouble).map(str::to_owned);
        let left_out = self.keeper.as_deref().map(Keeper::left_out).filter(|ports| !ports.is_empty());
        let left_out = left_out.map(|ports| {
            format!(
                "what {} would need after a crash is not kept, so that their front ends would have to connect again; the log says why",
                ports.join(", ")
            )
        });
        let helper = self.privileges.trouble();
        let not_reloaded = self.not_reloaded.as_ref().zip(self.config.file.as_ref());
        // What the helper would have to read says nothing about the file.
        let not_reloaded = not_reloaded
            .filter(|((_, what), _)| helper.is_none() || *what != NotReloaded::File)
            .map(|((when, what), file)| what.describe(when.elapsed(), &file.path.display().to_string()));
        helper.into_iter().chain(unkept).chain(left_out).chain(not_reloaded).collect()
    }
}

/// Returns the queue pairs of a port that its guest has set up or that have carried packets, and the queues of a tap.
fn pairs_of(port: &PortSnapshot, interface: &Interface<'_>) -> Vec<u16> {
    match &interface.queues {
        InterfaceQueues::Kernel(queues) => (0..*queues).collect(),
        InterfaceQueues::Pairs(shared) => {
            let set_up = |pair| port.queues.iter().any(|queue| queue_index::pair(queue.index) == pair);
            let has_counted = |pair: u16| shared.pairs[usize::from(pair)].values() != [0; PAIR_COUNTERS];
            (0..PAIRS).filter(|pair| set_up(*pair) || has_counted(*pair)).collect()
        }
    }
}

/// Describes the rules that have another value than before.
fn changes(before: &RulesByKey, after: &RulesByKey) -> String {
    let set = after.iter().filter(|(key, value)| before.get(*key) != Some(*value));
    let unset = before.keys().filter(|key| !after.contains_key(*key));
    let all: Vec<String> = set
        .map(|(key, value)| format!("{key}={value}"))
        .chain(unset.map(|key| format!("{key} unset")))
        .collect();
    if all.is_empty() { "none has another value".to_owned() } else { all.join(", ") }
}
