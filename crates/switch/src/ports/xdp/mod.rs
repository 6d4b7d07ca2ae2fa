//! Ports for an Ethernet interface of the host, such as a physical network: AF_XDP sockets, one for each of its queues.
//!
//! The sockets and the program that gives them packets are made with privileges ([`acquire`]); the control side hands them to the workers, follows the interface, and
//! passes everything on to another process. Once all of them are closed the interface is as it was, and the host gets its packets.

pub(crate) mod config;
pub(crate) mod queues;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ringferry_control::snapshot::{
    Negotiated, PortSnapshot, PortState, QueueRole, QueueSnapshot, XdpFeatures,
};
use ringferry_control::text::printable;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Offloads;
use ringferry_sys::netif;
use ringferry_vhost_user::backend::Put;
use ringferry_virtio_net::queue_index;
use ringferry_xdp::{Queue, is_zero_copy, several_frames};
use serde::{Deserialize, Serialize};

use super::handed::{Descriptors, HandedPort};
use super::passed::Passed;
use super::queues::{AnyQueues, AnyStart, Workers};
use super::table::QueueStates;
use super::tap::{INTERFACE_AWAY, INTERFACE_MOVED};
use super::xen::MappingBudget;
use super::{Context, Interface, InterfaceQueues, OpenError, Plug, PortControl, Positions};
use crate::config::{Checksums, PortConfig, XdpConfig};
use crate::counters::{DropReason, PortTotals};
use crate::fdb::PortId;
use crate::log_limit::LogLimit;
use crate::plane::{PAIRS, Placement, PortShared, Steering};
use crate::privileged::Privileges;
use crate::rules::Rules;
use crate::snapshot::rules_by_key;
use queues::{XdpQueues, XdpStart};

/// Log lines about the state of an interface per interval.
const LOG_LINES: u32 = 5;

/// The descriptors that a port is made of.
struct Sockets {
    /// The attachment of the program.
    program: OwnedFd,
    /// The descriptor that holds the interface promiscuous.
    promiscuous: Option<OwnedFd>,
    /// Socket and memory of each queue.
    queues: Vec<(OwnedFd, OwnedFd)>,
}

impl Sockets {
    /// Opens them.
    ///
    /// # Errors
    /// See [`OpenError`].
    fn open(port: &PortConfig, config: &XdpConfig) -> Result<Sockets, OpenError> {
        let name = &config.interface;
        let index = netif::index(name)?.ok_or_else(|| OpenError::NoInterface(name.clone()))?;
        if let Some(mtu) = port.mtu {
            netif::set_mtu(name, mtu.into())?;
        }
        if !netif::is_up(name)? {
            netif::set_up(name, true)?;
        }
        let wanted = config.queues.map(u32::from);
        let opened = ringferry_xdp::open(index, wanted, PAIRS.into(), netif::mtu(name)?, config.mode);
        let opened = opened.map_err(|source| OpenError::Xdp { interface: name.clone(), source })?;
        let promiscuous = if config.promiscuous { Some(netif::hold_promiscuous(name, index)?) } else { None };
        Ok(Sockets { program: opened.program, promiscuous, queues: opened.queues })
    }

    /// All of them, in an order from which [`of_list`](Self::of_list) makes them again.
    fn into_list(self) -> Vec<OwnedFd> {
        let queues = self.queues.into_iter().flat_map(|(socket, memory)| [socket, memory]);
        [self.program].into_iter().chain(queues).chain(self.promiscuous).collect()
    }

    /// Those of a list that came from another process.
    fn of_list(list: Vec<OwnedFd>) -> Option<Sockets> {
        let mut list = list.into_iter();
        let program = list.next()?;
        let (mut queues, mut promiscuous) = (Vec::new(), None);
        while let Some(first) = list.next() {
            match list.next() {
                Some(memory) => queues.push((first, memory)),
                None => promiscuous = Some(first),
            }
        }
        (!queues.is_empty()).then_some(Sockets { program, promiscuous, queues })
    }

    /// Returns how many packets the kernel has dropped for want of room, in all queues.
    fn missed(&self) -> u64 {
        self.queues.iter().map(|(socket, _)| Queue::statistics(socket).rx_dropped).sum()
    }
}

/// The fault of an interface without a carrier.
pub(crate) const NO_CARRIER: &str =
    "its interface has no carrier: nothing is plugged in, or the other end is down";

/// The state of an interface, as packets find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    /// It was deleted, or is in another network namespace.
    Gone,
    /// Its administrator has taken it down.
    Down,
    /// There is nobody at the other end.
    Unplugged,
    Up,
}

/// The control side of an xdp port.
struct XdpPort {
    id: PortId,
    name: String,
    interface: String,
    made: Made,
    counters: PortTotals,
    shared: Arc<PortShared>,
    sockets: Sockets,
    features: XdpFeatures,
    /// Its queues are read.
    started: bool,
    /// Its interface when that was last seen.
    was: Option<Link>,
    /// Packets that the kernel had dropped for want of room when it was last asked.
    dropped: u64,
    limit: LogLimit,
    privileges: Privileges,
}

/// The state of an xdp port. Descriptors are numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct XdpState {
    /// The descriptors that the port is made of, in the order of [`Sockets::into_list`].
    sockets: Vec<u32>,
    #[serde(flatten)]
    made: Made,
}

/// The facts that do not change as long as an interface has these sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Made {
    /// Index of the interface, by which it is known whatever its name is.
    index: u32,
    /// A packet may lie in several frames.
    several: bool,
}

/// Opens the sockets of a port that is added to a running switch, for [`open`] in another process.
///
/// # Errors
/// See [`OpenError`].
pub(super) fn acquire(port: &PortConfig, config: &XdpConfig) -> Result<Vec<OwnedFd>, OpenError> {
    Ok(Sockets::open(port, config)?.into_list())
}

/// Sets the MTU of a port's interface.
///
/// # Errors
/// No permission, or one with which packets lie in another number of frames than now, for which the sockets are made.
pub(super) fn set_up(port: &PortConfig, config: &XdpConfig) -> Result<(), OpenError> {
    let Some(mtu) = port.mtu.map(u32::from) else { return Ok(()) };
    if several_frames(mtu) != several_frames(netif::mtu(&config.interface)?) {
        return Err(OpenError::OtherFrames(port.name.clone()));
    }
    Ok(netif::set_mtu(&config.interface, mtu)?)
}

/// Opens the sockets of an interface.
///
/// # Errors
/// See [`OpenError`].
pub(super) fn open(port: &PortConfig, config: &XdpConfig, passed: &mut Passed) -> Result<Plug, OpenError> {
    let sockets = match passed.take_opened() {
        Some(opened) => Sockets::of_list(opened).ok_or(OpenError::NoRoom)?,
        None => Sockets::open(port, config)?,
    };
    let (xdp, privileges) = (config.clone(), passed.privileges().clone());
    let index = netif::index(&xdp.interface)?.ok_or_else(|| OpenError::NoInterface(xdp.interface.clone()))?;
    let made = Made { index, several: several_frames(netif::mtu(&xdp.interface)?) };
    Ok(Box::new(move |config, cx| {
        let mut port = plug(config, &xdp, sockets, made, privileges, cx)?;
        port.start(cx.workers)?;
        Ok(Box::new(port))
    }))
}

/// Makes a port of the state of another process's. It reads nothing until it [takes over](PortControl::take_over).
///
/// # Errors
/// A descriptor was not passed, or is none of a socket.
pub(super) fn adopt(
    config: &XdpConfig,
    state: &XdpState,
    mut fds: Descriptors,
    privileges: &Privileges,
) -> Result<Plug, OpenError> {
    let list: Option<Vec<_>> = state.sockets.iter().map(|number| fds.take(*number)).collect();
    let sockets = list.and_then(Sockets::of_list);
    let sockets =
        sockets.ok_or_else(|| OpenError::Handed("a socket of the interface was not passed".to_owned()))?;
    let (xdp, made, privileges) = (config.clone(), state.made, privileges.clone());
    Ok(Box::new(move |config, cx| Ok(Box::new(plug(config, &xdp, sockets, made, privileges, cx)?))))
}

fn plug(
    config: &PortConfig,
    xdp: &XdpConfig,
    sockets: Sockets,
    Made { index, several }: Made,
    privileges: Privileges,
    cx: &mut Context<'_>,
) -> Result<XdpPort, OpenError> {
    // It may be gone, or have another name, by the time that another process goes on with its sockets.
    let name = netif::name(index).ok().flatten();
    let mtu = name.and_then(|name| netif::mtu(&name).ok());
    let zero_copy = sockets.queues.iter().all(|(socket, _)| is_zero_copy(socket));
    let mut features = XdpFeatures::empty();
    features.set(XdpFeatures::ZERO_COPY, zero_copy);
    features.set(XdpFeatures::SEVERAL_FRAMES, several);
    let id = cx.allocate()?;
    cx.workers.set_rules(id, &config.rules);
    let counters = PortTotals::new(cx.workers.count());
    let shared = Arc::new(PortShared::default());
    // What leaves is finished.
    shared.set_offloads(Offloads::empty());
    let finishes = xdp.checksums == Checksums::Finish;
    let steering = Steering::Pairs(Arc::clone(&shared));
    let placement = Placement { steering, owners: config.owners(), queues: PAIRS };
    cx.workers.add_port(id, &config.name, &counters, placement, |_, handle| {
        AnyQueues::Xdp(XdpQueues::new(handle.clone(), Arc::clone(&shared), finishes))
    });
    let dropped = sockets.missed();
    let port = XdpPort {
        id,
        name: config.name.clone(),
        interface: xdp.interface.clone(),
        made: Made { index, several },
        counters,
        shared,
        sockets,
        features,
        started: false,
        was: None,
        dropped,
        limit: LogLimit::new(LOG_LINES),
        privileges,
    };
    mtu.into_iter().for_each(|mtu| port.note_mtu(mtu));
    Ok(port)
}

impl XdpPort {
    /// Has the workers serve the queues.
    ///
    /// # Errors
    /// There is no room to map their rings.
    fn start(&mut self, workers: &Workers) -> io::Result<()> {
        if std::mem::replace(&mut self.started, true) {
            return Ok(());
        }
        let make = |(socket, memory): &(OwnedFd, OwnedFd)| {
            Queue::new(socket.try_clone()?, memory.as_fd(), self.made.several)
        };
        let queues = self.sockets.queues.iter().map(make).collect::<io::Result<Vec<_>>>()?;
        for (number, queue) in (0..).zip(queues) {
            workers.start_queue(self.id, number, AnyStart::Xdp(XdpStart { number, queue }));
        }
        Ok(())
    }

    /// Does the same where there is nobody to tell of a failure.
    fn go_on(&mut self, workers: &Workers) {
        if let Err(error) = self.start(workers) {
            tracing::error!(port = self.name, "the interface cannot be served: {error}");
        }
    }

    /// Takes note of the MTU of the interface, which senders are told whose packets do not fit.
    fn note_mtu(&self, mtu: u32) {
        self.shared.set_mtu(u16::try_from(mtu).unwrap_or(u16::MAX));
    }

    /// Returns the name that the interface has now, if it is there.
    fn name_now(&self) -> Option<String> {
        netif::name(self.made.index).ok().flatten()
    }

    /// Returns what packets find at the interface, which has this name.
    fn link(&self, name: Option<&str>) -> Link {
        let Some(name) = name else { return Link::Gone };
        match (netif::is_running(name), netif::is_up(name)) {
            (Ok(true), _) => Link::Up,
            (_, Ok(true)) => Link::Unplugged,
            _ => Link::Down,
        }
    }
}

impl PortControl for XdpPort {
    fn serve(&mut self, _: u32, _: &mut Context<'_>) {}

    fn count_up(&self) -> usize {
        usize::from(self.link(self.name_now().as_deref()) == Link::Up)
    }

    fn is_gone(&self) -> bool {
        netif::name(self.made.index).is_ok_and(|name| name.is_none())
    }

    fn tick(&mut self, _: &PortConfig, _: &mut Context<'_>) {
        let link = self.link(self.name_now().as_deref());
        let (port, interface) = (&self.name, &self.interface);
        // That it was deleted is logged when it is opened anew, or cannot be.
        let has_changed = self.was.replace(link).unwrap_or(Link::Up) != link;
        if has_changed && self.limit.allows(port) {
            match link {
                Link::Up => tracing::info!(port, "the interface {interface} is up"),
                Link::Down => tracing::warn!(port, "the interface {interface} is down: no packet passes it"),
                Link::Unplugged => tracing::warn!(port, "{NO_CARRIER}"),
                Link::Gone => {}
            }
        }
        self.limit.settle(port);
        let dropped = self.sockets.missed();
        let more = dropped.saturating_sub(std::mem::replace(&mut self.dropped, dropped));
        // Its sender is beyond the interface, and the switch has never had them.
        self.counters.of(0).drops.add(DropReason::RxMissed, more);
    }

    fn change(&mut self, before: &PortConfig, now: &PortConfig) -> Result<(), OpenError> {
        if before.mtu != now.mtu {
            self.privileges.set_up(now, Some(before))?;
            self.note_mtu(netif::mtu(&self.interface)?);
        }
        Ok(())
    }

    fn set_rules(&mut self, rules: &Rules, workers: &Workers) {
        workers.set_rules(self.id, rules);
    }

    fn interfaces(&self) -> Vec<Interface<'_>> {
        vec![Interface {
            id: self.id,
            name: &self.name,
            queues: InterfaceQueues::Pairs(&self.shared),
            counters: &self.counters,
        }]
    }

    fn snapshots(
        &self,
        config: &PortConfig,
        _: &MappingBudget,
        states: &mut QueueStates,
    ) -> Vec<PortSnapshot> {
        let name = self.name_now();
        let link = self.link(name.as_deref());
        let state = if link == Link::Up { PortState::Up } else { PortState::Down };
        let fault = match (link, &name) {
            (Link::Unplugged, _) => Some(NO_CARRIER.to_owned()),
            (_, Some(name)) if *name == self.interface => None,
            (_, Some(name)) => {
                let passes = if link == Link::Up { INTERFACE_AWAY } else { "" };
                Some(format!(
                    "{passes}{INTERFACE_MOVED} called {} now, and the next start does not find it",
                    printable(name)
                ))
            }
            (_, None) => Some(format!(
                "there is no interface {} any more: it is opened anew as soon as that is possible",
                self.interface
            )),
        };
        let name = name.as_deref();
        let mtu = name.and_then(|name| netif::mtu(name).ok());
        let rings = (0..self.sockets.queues.len() as u16).flat_map(queue_index::both).map(|index| {
            let live = states.remove(&(self.id, index));
            QueueSnapshot {
                index,
                role: QueueRole::of(index),
                size: Queue::ENTRIES,
                enabled: true,
                started: live.is_some(),
                last_avail: live.as_ref().map_or(0, |live| live.last_avail),
                last_used: live.as_ref().map_or(0, |live| live.last_used),
                available: None,
                stalled: None,
                broken: None,
                grants: None,
            }
        });
        vec![PortSnapshot {
            state,
            fault,
            peer: self.interface.clone(),
            mtu: mtu.map_or(0, |mtu| mtu.try_into().unwrap_or(u16::MAX)),
            mac: name.and_then(|name| netif::mac(name).ok()).map(Mac),
            queues: rings.collect(),
            counters: self.counters.by_name(),
            drops: self.counters.drops_by_name(),
            rules: rules_by_key(&config.rules),
            ..PortSnapshot::new(self.name.clone(), Negotiated::Xdp(self.features))
        }]
    }

    fn hand_over(&self, put: &mut Put<'_>) -> io::Result<HandedPort> {
        let Sockets { program, promiscuous, queues } = &self.sockets;
        let queues = queues.iter().flat_map(|(socket, memory)| [socket, memory]);
        let list = [program].into_iter().chain(queues).chain(promiscuous);
        let sockets = list.map(|fd| put(fd.as_fd(), None)).collect::<io::Result<_>>()?;
        Ok(HandedPort::Xdp(XdpState { sockets, made: self.made }))
    }

    fn take_over(&mut self, _: &Positions, workers: &Workers) {
        self.go_on(workers);
    }

    fn recover(&mut self, workers: &Workers) {
        self.go_on(workers);
    }

    fn remove(&mut self, cx: &mut Context<'_>) {
        if self.started {
            for number in 0..self.sockets.queues.len() as u16 {
                let _ = cx.workers.stop_queue(self.id, number, number);
            }
        }
        cx.release(self.id);
    }
}
