//! Ports for the host's network stack: a tap, in as many queues as there are workers to read them.
//!
//! The control side opens the tap, sets its interface up ([`link`]) and hands its descriptors to the workers. After that it tells its state,
//! says when the tap is gone, so that the switch opens it anew, and puts it back into a bridge that comes back.

pub(crate) mod config;
mod link;
pub(crate) mod queues;

pub(crate) use link::MACHINE;
pub(super) use link::{astray, set_up, undo};
pub(crate) use queues::offloads;

use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};

use ringferry_control::snapshot::{Negotiated, PortSnapshot, PortState};
use ringferry_control::text::printable;
use ringferry_packet::ether::Mac;
use ringferry_sys::netif;
use ringferry_sys::tap::{Existing, Offloads, Tap, TapConfig as OpenTap, TapError};
use ringferry_vhost_user::backend::Put;
use serde::{Deserialize, Serialize};

use super::handed::{Descriptors, HandedPort};
use super::passed::Passed;
use super::queues::{AnyQueues, AnyStart, Workers};
use super::table::QueueStates;
use super::xen::MappingBudget;
use super::{Context, Interface, InterfaceQueues, OpenError, Plug, PortControl, Positions};
use crate::config::{PortConfig, TapConfig, TapSource};
use crate::counters::PortTotals;
use crate::fdb::PortId;
use crate::log_limit::LogLimit;
use crate::plane::{Placement, Steering};
use crate::privileged::Privileges;
use crate::rules::Rules;
use crate::snapshot::rules_by_key;
use queues::{TapQueues, TapStart};

/// Log lines about the state of an interface per interval.
const LOG_LINES: u32 = 5;

/// Seconds between two looks at the settings of an interface: a question to the helper each.
const LOOK: u32 = 4;

/// The control side of a tap port.
struct TapPort {
    id: PortId,
    name: String,
    /// Name of the network interface.
    tap: String,
    /// Index of the interface when it was opened; `None`: it was in another network namespace.
    index: Option<u32>,
    /// Offloads that the kernel takes.
    offloads: Offloads,
    queues: u16,
    counters: PortTotals,
    /// Its queues, to ask whether the tap exists, and for a successor.
    descriptors: Vec<Tap>,
    /// Its queues are read.
    started: bool,
    /// Index of the bridge that the tap is to be in, when that was last seen.
    bridge: Option<u32>,
    /// Whether its interface was up when that was last seen.
    was_up: Option<bool>,
    /// Whoever has the interface can make it say so again and again.
    limit: LogLimit,
    /// What of its settings somebody has undone, and the ticks until that is looked for again.
    astray: Vec<String>,
    until_look: u32,
    /// Where the interface was when that was last logged.
    place: Now,
    privileges: Privileges,
}

/// Opens a tap that is added to a running switch, for [`open`] in another process.
///
/// # Errors
/// See [`OpenError`].
pub(super) fn acquire(
    port: &PortConfig,
    config: &TapConfig,
    workers: usize,
) -> Result<Vec<OwnedFd>, OpenError> {
    let queues = open_queues(port, config, workers, |_| Err(OpenError::OnlyAtStart))?;
    Ok(queues.into_iter().map(OwnedFd::from).collect())
}

/// Opens a tap: `workers` queues at most.
///
/// # Errors
/// See [`OpenError`].
pub(super) fn open(
    port: &PortConfig,
    config: &TapConfig,
    workers: usize,
    passed: &mut Passed,
) -> Result<Plug, OpenError> {
    let queues = match passed.take_opened() {
        Some(opened) if opened.is_empty() => return Err(OpenError::NoRoom),
        Some(opened) => {
            let queues = opened.into_iter().map(|fd| Tap::from_fd(fd, offloads_of(config)));
            queues.collect::<Result<_, _>>()?
        }
        None => open_queues(port, config, workers, |number| passed.number(number))?,
    };
    let privileges = passed.privileges().clone();
    Ok(Box::new(move |config, cx| {
        let mut port = plug(config, queues, privileges, cx)?;
        port.start(cx.workers);
        Ok(Box::new(port))
    }))
}

/// The state of a tap port. Descriptors are numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TapState {
    /// The queues of the tap, in their order.
    queues: Vec<u32>,
    /// Name of the interface, which may be deleted by the time that this is read. A program of an earlier version does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    interface: Option<String>,
    /// [Its index](TapPort::index), by which it is told from another one that has its name by then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
}

/// Makes a port of the state of another process's. It reads nothing until it [takes over](PortControl::take_over).
///
/// # Errors
/// A queue was not passed, or is none.
pub(super) fn adopt(
    config: &TapConfig,
    state: &TapState,
    mut fds: Descriptors,
    privileges: &Privileges,
) -> Result<Plug, OpenError> {
    let queues = state.queues.iter().map(|number| {
        let fd = fds
            .take(*number)
            .ok_or_else(|| OpenError::Handed("a queue of the tap was not passed".to_owned()))?;
        let offloads = offloads_of(config);
        Ok::<_, OpenError>(match &state.interface {
            Some(name) => Tap::from_predecessor(fd, name, offloads)?,
            None => Tap::from_fd(fd, offloads)?,
        })
    });
    let (queues, privileges) = (queues.collect::<Result<_, _>>()?, privileges.clone());
    let known = state.interface.is_some().then_some(state.index);
    Ok(Box::new(move |config, cx| {
        let mut port = plug(config, queues, privileges, cx)?;
        port.index = known.unwrap_or(port.index);
        Ok(Box::new(port))
    }))
}

fn plug(
    config: &PortConfig,
    queues: Vec<Tap>,
    privileges: Privileges,
    cx: &mut Context<'_>,
) -> Result<TapPort, OpenError> {
    let first = queues.first().ok_or(OpenError::NoId)?;
    let copies = queues.iter().map(Tap::try_clone).collect::<Result<_, _>>()?;
    let (tap, count, offloads) = (first.name().to_owned(), queues.len(), offloads(first.offloads()));
    let kernel = first.offloads();
    let workers = cx.workers.count();
    // A worker without a queue of its own writes to that of another worker.
    let further = (count..workers).map(|number| queues[number % count].try_clone());
    let further = further.collect::<Result<Vec<_>, _>>()?;
    let id = cx.allocate()?;
    cx.workers.set_rules(id, &config.rules);
    let counters = PortTotals::new(workers);
    let mut descriptors = queues.into_iter().chain(further);
    let placement =
        Placement { steering: Steering::Local(offloads), owners: config.owners(), queues: count as u16 };
    cx.workers.add_port(id, &config.name, &counters, placement, |_, handle| {
        AnyQueues::Tap(TapQueues::new(handle.clone(), descriptors.next().expect("one for each worker")))
    });
    let index = netif::index(&tap).ok().flatten();
    let bridge = link::bridge_of(config);
    if let (None, Some(name)) = (bridge, link::bridge_name(config)) {
        tracing::warn!(port = config.name, "there is no bridge {name} yet; the tap joins it when there is");
    }
    Ok(TapPort {
        id,
        name: config.name.clone(),
        tap,
        index,
        offloads: kernel,
        queues: count as u16,
        counters,
        descriptors: copies,
        started: false,
        bridge,
        was_up: None,
        limit: LogLimit::new(LOG_LINES),
        astray: Vec::new(),
        until_look: 0,
        place: Now::Here,
        privileges,
    })
}

/// How the fault of a tap begins that somebody has renamed or moved, and that is up.
pub(crate) const INTERFACE_AWAY: &str = "packets still pass, but ";

/// What is in the fault of a tap that somebody has renamed or moved.
pub(crate) const INTERFACE_MOVED: &str = "its interface is";

/// How the fault of a tap begins of whose settings somebody has undone some.
pub(crate) const INTERFACE_LOST: &str = "its interface has lost";

/// How the fault of a tap begins whose bridge there is not.
pub(crate) const NO_BRIDGE: &str = "there is no bridge";

/// How the fault of a tap begins whose bridge is down.
pub(crate) const BRIDGE_DOWN: &str = "its bridge is down";

/// What has become of a tap since it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Now {
    /// It has the name that it had, as far as can be told from this network namespace.
    Here,
    /// It has this name.
    Renamed(String),
    /// It is in another network namespace, with this name.
    Elsewhere(String),
    /// It was deleted, and another interface has its name, or none.
    Gone { another: bool },
}

impl TapPort {
    /// Has the workers read the queues.
    fn start(&mut self, workers: &Workers) {
        for queue in 0..if std::mem::replace(&mut self.started, true) { 0 } else { self.queues } {
            workers.start_queue(self.id, queue, AnyStart::Tap(TapStart(queue)));
        }
    }

    /// Finds out where the tap is.
    fn now(&self) -> Now {
        let index = |name: &str| netif::index(name).ok().flatten();
        match self.descriptors.first().and_then(Tap::name_now) {
            None => Now::Gone { another: index(&self.tap).is_some() },
            // It was in another network namespace from the beginning.
            Some(_) if self.index.is_none() => Now::Here,
            Some(name) if index(&name) != self.index => Now::Elsewhere(name),
            Some(name) if name != self.tap => Now::Renamed(name),
            Some(_) => Now::Here,
        }
    }

    /// Returns true if the interface is up, wherever it is.
    fn is_up(&self) -> bool {
        self.descriptors.first().is_some_and(Tap::is_up)
    }

    /// Logs that the interface is down, or up again.
    fn log_state(&mut self) {
        let is_up = (!self.is_gone()).then(|| self.is_up());
        let (port, tap) = (&self.name, &self.tap);
        let limit = &mut self.limit;
        match (self.was_up, is_up) {
            (None | Some(true), Some(false)) if limit.allows(port) => {
                tracing::warn!(port, "the interface {tap} is down: no packet passes it");
            }
            (Some(false), Some(true)) if limit.allows(port) => {
                tracing::info!(port, "the interface {tap} is up");
            }
            _ => {}
        }
        limit.settle(port);
        self.was_up = is_up.or(self.was_up);
    }

    /// Logs that somebody has renamed or moved the interface. One that was put back is set up again, as it has lost its bridge, its addresses and its state
    /// on the way.
    fn follow_place(&mut self, config: &PortConfig) {
        let now = self.now();
        if now == self.place {
            return;
        }
        self.place = now;
        let set_up = match self.place {
            Now::Here => self.privileges.set_up(config, None),
            _ => Ok(()),
        };
        let (port, tap) = (&self.name, &self.tap);
        if !self.limit.allows(port) {
            return;
        }
        match (&self.place, moved(&self.place), set_up) {
            (_, Some(moved), _) => tracing::warn!(port, "{moved}"),
            (Now::Here, None, Ok(())) => {
                tracing::info!(port, "the interface {tap} is where it was, and is set up as the port has it");
            }
            (Now::Here, None, Err(error)) => {
                tracing::warn!(port, "the interface {tap} is where it was, and cannot be set up: {error}");
            }
            // That a tap was deleted is logged when it is made anew, or cannot be.
            _ => {}
        }
    }

    /// Finds out what of its settings somebody has undone, which the helper sees, and logs it.
    fn look_for_astray(&mut self, config: &PortConfig) {
        if self.until_look > 0 {
            self.until_look -= 1;
            return;
        }
        self.until_look = LOOK;
        // A bridge that there is not is told of by itself.
        let is_here =
            matches!(self.now(), Now::Here) && (self.bridge.is_some() || link::bridge_name(config).is_none());
        let astray = if is_here { self.privileges.astray(config) } else { Vec::new() };
        if astray != self.astray && self.limit.allows(&self.name) {
            match undone(&astray) {
                Some(undone) => tracing::warn!(port = self.name, "{undone}"),
                None if is_here => {
                    tracing::info!(port = self.name, "its interface has all that it had lost again");
                }
                None => {}
            }
        }
        self.astray = astray;
    }
}

/// Says where a tap is that somebody has renamed or moved.
fn moved(now: &Now) -> Option<String> {
    match now {
        Now::Renamed(name) => Some(format!(
            "{INTERFACE_MOVED} called {} now, so that settings of the port do not reach it",
            printable(name)
        )),
        Now::Elsewhere(name) => Some(format!(
            "{INTERFACE_MOVED} in another network namespace, as {}: what it is set to is not known here",
            printable(name)
        )),
        Now::Here | Now::Gone { .. } => None,
    }
}

/// Says what of a tap's settings somebody has undone, if anything.
pub(crate) fn undone(settings: &[String]) -> Option<String> {
    let settings = settings.join(", ");
    let text = || {
        format!(
            "{INTERFACE_LOST} {settings}; `ringferry ctl reload`, or `ringferry ctl set` with the value that it is to have, sets that again"
        )
    };
    (!settings.is_empty()).then(text)
}

impl PortControl for TapPort {
    fn serve(&mut self, _: u32, _: &mut Context<'_>) {}

    fn count_up(&self) -> usize {
        usize::from(self.is_up())
    }

    fn is_gone(&self) -> bool {
        self.descriptors.first().is_none_or(|queue| !queue.is_attached())
    }

    fn tick(&mut self, config: &PortConfig, _: &mut Context<'_>) {
        self.log_state();
        self.follow_place(config);
        self.look_for_astray(config);
        let bridge = link::bridge_of(config);
        if bridge == self.bridge || self.is_gone() {
            return;
        }
        self.bridge = bridge;
        let (port, name) = (&self.name, link::bridge_name(config).unwrap_or_default());
        if bridge.is_none() {
            tracing::warn!(port, "there is no bridge {name} any more; the tap joins it when it comes back");
        } else if let Err(error) = self.privileges.set_up(config, None) {
            tracing::warn!(port, "there is a bridge {name} now, and the tap cannot join it: {error}");
        } else {
            tracing::info!(port, "there is a bridge {name} now, and the tap has joined it");
        }
    }

    fn change(&mut self, before: &PortConfig, now: &PortConfig) -> Result<(), OpenError> {
        // Whoever changes nothing has set up what was undone.
        (self.astray, self.until_look) = (Vec::new(), 0);
        if (&before.kind, before.mtu) == (&now.kind, now.mtu) {
            return Ok(());
        }
        if let Err(error) = self.privileges.set_up(now, Some(before)) {
            // What was set before the one that cannot be had is set back.
            let _ = self.privileges.set_up(before, Some(now));
            return Err(error);
        }
        self.bridge = link::bridge_of(now);
        Ok(())
    }

    fn set_rules(&mut self, rules: &Rules, workers: &Workers) {
        workers.set_rules(self.id, rules);
    }

    fn interfaces(&self) -> Vec<Interface<'_>> {
        vec![Interface {
            id: self.id,
            name: &self.name,
            queues: InterfaceQueues::Kernel(self.queues),
            counters: &self.counters,
        }]
    }

    fn snapshots(&self, config: &PortConfig, _: &MappingBudget, _: &mut QueueStates) -> Vec<PortSnapshot> {
        let up = self.is_up();
        let passes = if up { INTERFACE_AWAY } else { "" };
        let (named, fault) = match self.now() {
            Now::Here => {
                let fault = match link::bridge_name(config) {
                    Some(name) if self.bridge.is_none() => {
                        Some(format!("{NO_BRIDGE} {name}; the tap joins it when there is"))
                    }
                    Some(name) if netif::is_up(name).is_ok_and(|is_up| !is_up) => Some(format!(
                        "{BRIDGE_DOWN}, and passes nothing on to its other ports and to the host: `ip link set {name} up`"
                    )),
                    _ => undone(&self.astray),
                };
                (Some(self.tap.clone()), fault)
            }
            now @ (Now::Renamed(_) | Now::Elsewhere(_)) => {
                let fault = moved(&now).map(|moved| format!("{passes}{moved}"));
                let name = if let Now::Renamed(name) = now { Some(name) } else { None };
                (name, fault)
            }
            // The settings of another interface are not those of our tap.
            Now::Gone { another: true } => {
                let fault = "another interface has its name now; remove that, and the tap is made anew";
                (None, Some(fault.to_owned()))
            }
            Now::Gone { another: false } => {
                let fault = format!(
                    "there is no interface {} any more: it was deleted, and is opened anew as soon as that is possible",
                    self.tap
                );
                (None, Some(fault))
            }
        };
        let named = named.as_deref();
        let mtu = named.and_then(|tap| netif::mtu(tap).ok());
        vec![PortSnapshot {
            state: if up { PortState::Up } else { PortState::Down },
            fault,
            peer: self.tap.clone(),
            mtu: mtu.map_or(0, |mtu| mtu.try_into().unwrap_or(u16::MAX)),
            mac: named.and_then(|tap| netif::mac(tap).ok()).map(Mac),
            counters: self.counters.by_name(),
            drops: self.counters.drops_by_name(),
            rules: rules_by_key(&config.rules),
            ..PortSnapshot::new(self.name.clone(), Negotiated::Tap(self.offloads))
        }]
    }

    fn hand_over(&self, put: &mut Put<'_>) -> io::Result<HandedPort> {
        let queues = self.descriptors.iter().map(|queue| put(queue.as_fd(), None));
        let interface = Some(self.tap.clone());
        let queues = queues.collect::<io::Result<_>>()?;
        Ok(HandedPort::Tap(TapState { queues, interface, index: self.index }))
    }

    fn take_over(&mut self, _: &Positions, workers: &Workers) {
        self.start(workers);
    }

    fn recover(&mut self, workers: &Workers) {
        self.start(workers);
    }

    fn remove(&mut self, cx: &mut Context<'_>) {
        cx.release(self.id);
    }
}

/// Returns the offloads that a port asks the kernel for.
fn offloads_of(config: &TapConfig) -> Offloads {
    if config.offloads { Offloads::all() } else { Offloads::empty() }
}

fn open_queues(
    port: &PortConfig,
    config: &TapConfig,
    workers: usize,
    inherited: impl FnOnce(RawFd) -> Result<OwnedFd, OpenError>,
) -> Result<Vec<Tap>, OpenError> {
    let offloads = offloads_of(config);
    let (queues, created) = match &config.source {
        TapSource::Fd(number) => (vec![Tap::from_fd(inherited(*number)?, offloads)?], false),
        TapSource::Name { name, existing } => {
            let existed = netif::index(name).ok().flatten().is_some();
            // The kernel lets any number of programs attach to a tap with several queues, and divides its packets among all.
            if Tap::attached_queues(name) > 1 {
                return Err(TapError::in_use(name.clone()).into());
            }
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
                // The tap exists and was made with one queue.
                Err(TapError::OtherKind { .. }) if config.queues.is_none() && count > 1 => {
                    (open(existing, false), false)
                }
                result => (result, count > 1),
            };
            let mut queues = vec![first?];
            if several {
                for _ in 1..count.min(workers) {
                    queues.push(open(Existing::Require, true)?);
                }
            }
            (queues, !existed)
        }
    };
    if let (TapSource::Name { .. }, Some(tap)) = (&config.source, queues.first()) {
        link::begin(tap, config, created)?;
    }
    set_up(port, queues[0].name())?;
    // A tap that existed before is left up or down as it is.
    if created && config.link.up.is_none() {
        netif::set_up(queues[0].name(), true)?;
    }
    Ok(queues)
}
