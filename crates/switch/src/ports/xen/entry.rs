//! The control side of one `[[port]]` of kind `xen-vif`: every interface of a class, each a port as the toolstack makes it; or one of them.
//!
//! It is watched under sub-token 0 for its [`Bus`], and under that of a port's id and one for the port's control ring.

use std::collections::BTreeMap;
use std::io;
use std::time::Instant;

use ringferry_control::snapshot::{
    Negotiated, PortSnapshot, PortState, QueueRole, QueueSnapshot, VifFeatures,
};
use ringferry_sys::epoll::Interest;
use ringferry_vhost_user::backend::Put;
use ringferry_virtio_net::queue_index;
use ringferry_xen::store::StoreError;
use ringferry_xen_net::netback::Mode;
use ringferry_xen_net::xenbus::{BackEvent, VifId};

use super::MappingBudget;
use super::bus::{Bus, BusEvent, OpenBus};
use super::vif::{Vif, add};
use crate::config::{DEFAULT_MTU, PortConfig, PortKind, XenProvider, XenVifConfig};
use crate::counters::PortTotals;
use crate::fdb::PortId;
use crate::log_limit::LogLimit;
use crate::plane::{Owners, PortFault};
use crate::ports::handed::HandedPort;
use crate::ports::queues::Workers;
use crate::ports::table::QueueStates;
use crate::ports::{Context, Interface, InterfaceQueues, OpenError, Plug, PortControl};
use crate::rules::Rules;
use crate::snapshot::{grants, rules_by_key};

/// Upper bound on log lines per interval about all front ends of an entry, which are of many machines.
const LOG_LINES: u32 = 20;

/// Slots of each ring of a queue: as many as fit in a page.
const SLOTS: u16 = 256;

/// Sub-token of the control ring of port 0; the others' follow.
pub(super) const FIRST_CONTROL_RING: u32 = 1;

/// Opens an entry: finds out whether there is Xen. Its bus begins when it is plugged in.
///
/// # Errors
/// See [`XenError`](super::XenError).
pub(in crate::ports) fn open(config: &XenVifConfig, workers: usize) -> Result<Plug, OpenError> {
    let bus = OpenBus::open(config, workers)?;
    let config = config.clone();
    Ok(Box::new(move |port, cx| {
        let entry = XenEntry::new(port, config, bus.start()?);
        cx.watch(&entry.bus, 0, Interest::READABLE)?;
        Ok(Box::new(entry))
    }))
}

/// The control side of one entry.
struct XenEntry {
    name: String,
    mtu: u16,
    /// The workers of the queues of every interface.
    owners: Owners,
    config: XenVifConfig,
    /// The rules of every interface.
    rules: Rules,
    bus: Bus,
    /// True while the bus has a connection to the store.
    reached: bool,
    vifs: BTreeMap<VifId, Vif>,
    /// True if the last step left requests in a control ring.
    busy: bool,
    limit: LogLimit,
}

impl XenEntry {
    fn new(port: &PortConfig, config: XenVifConfig, bus: Bus) -> XenEntry {
        XenEntry {
            name: port.name.clone(),
            mtu: port.mtu.unwrap_or(DEFAULT_MTU),
            owners: port.owners(),
            config,
            rules: port.rules.clone(),
            bus,
            reached: false,
            vifs: BTreeMap::new(),
            busy: false,
            limit: LogLimit::new(LOG_LINES),
        }
    }

    /// Makes one step: handles the events of the bus, and serves control rings that were left with requests.
    fn step(&mut self, cx: &mut Context<'_>) {
        let controls: Vec<_> = self.vifs.values().filter(|vif| vif.has_more()).map(|vif| vif.id).collect();
        for event in self.bus.take() {
            self.handle(event, cx);
        }
        for port in controls {
            self.serve_control(port, cx);
        }
        self.busy = self.vifs.values().any(Vif::has_more);
    }

    fn handle(&mut self, event: BusEvent, cx: &mut Context<'_>) {
        match event {
            BusEvent::Reached => {
                tracing::info!(port = self.name, "the store is there");
                self.reached = true;
            }
            BusEvent::Unreachable(error) => tracing::warn!(port = self.name, "{error}; trying again"),
            BusEvent::Found(id) => {
                self.vif(id, cx);
            }
            BusEvent::Vif(id, event) => self.turn(id, event, cx),
            BusEvent::Lost(error) => self.lose(&error, cx),
        }
    }

    /// Handles the loss of the store: nothing is known of interfaces any more.
    fn lose(&mut self, error: &StoreError, cx: &mut Context<'_>) {
        tracing::error!(
            port = self.name,
            "the store cannot be used any more: {error}; trying to reach it again"
        );
        self.reached = false;
        self.remove_vifs(cx);
        self.bus.cleared();
    }

    fn remove_vifs(&mut self, cx: &mut Context<'_>) {
        for vif in std::mem::take(&mut self.vifs).into_values() {
            vif.remove(cx);
        }
    }

    /// Returns the port of an interface, and makes it if need be.
    fn vif(&mut self, id: VifId, cx: &mut Context<'_>) -> Option<&mut Vif> {
        if !self.vifs.contains_key(&id) {
            let name = match self.config.only {
                Some(_) => self.name.clone(),
                None => format!("{}{}.{}", self.name, id.front, id.device),
            };
            self.vifs.insert(id, Vif::new(name, &self.rules, self.owners.clone(), cx)?);
        }
        self.vifs.get_mut(&id)
    }

    /// Handles a change of an interface.
    fn turn(&mut self, id: VifId, event: BackEvent, cx: &mut Context<'_>) {
        let loud = self.limit.allows(&self.name);
        match event {
            BackEvent::Connect(connection) => {
                let (config, mtu) = (self.config.clone(), self.mtu);
                let Some(vif) = self.vif(id, cx) else {
                    tracing::error!("{id}: no number is left for a port");
                    drop(connection);
                    return self.bus.disconnected(id);
                };
                vif.shared.set_mtu(mtu);
                match vif.serve(*connection, &config, cx) {
                    Ok(()) => {
                        if loud {
                            let queues = vif.served.as_ref().map_or(0, |served| served.queues);
                            tracing::info!(port = vif.name, queues, "a front end has connected");
                        }
                        self.bus.connected(id);
                    }
                    Err(error) => {
                        if loud {
                            tracing::warn!(port = vif.name, "the front end cannot be served: {error}");
                        }
                        self.bus.disconnected(id);
                    }
                }
            }
            BackEvent::Disconnect => {
                // One that was expelled while this was on its way has had its answer.
                let served = self.vifs.get_mut(&id).filter(|vif| vif.served.is_some());
                let Some(vif) = served else { return };
                vif.stop(cx);
                if loud {
                    tracing::info!(port = vif.name, "the front end has disconnected");
                }
                self.bus.disconnected(id);
            }
            BackEvent::Refused(refusal) => {
                if loud {
                    tracing::warn!("{id}: the front end cannot be served: {refusal}");
                }
            }
            BackEvent::Removed => {
                if let Some(vif) = self.vifs.remove(&id) {
                    if loud {
                        tracing::info!(port = vif.name, "the interface is gone");
                    }
                    vif.remove(cx);
                }
            }
        }
    }

    /// Returns the interface that has this port.
    fn find(&self, port: PortId) -> Option<VifId> {
        self.vifs.iter().find(|(_, vif)| vif.id == port).map(|(id, _)| *id)
    }

    /// Serves the control ring of a port.
    fn serve_control(&mut self, port: PortId, cx: &mut Context<'_>) {
        let Some(id) = self.find(port) else { return };
        let Some(vif) = self.vifs.get_mut(&id) else { return };
        match vif.serve_control(cx.workers) {
            Ok(()) => self.busy |= vif.has_more(),
            Err(why) => self.expel(id, &why, cx),
        }
    }

    /// Disconnects a front end that has broken the rules.
    fn expel(&mut self, id: VifId, why: &str, cx: &mut Context<'_>) {
        let Some(vif) = self.vifs.get_mut(&id) else { return };
        if self.limit.allows_reason(&vif.name, why) {
            tracing::warn!(port = vif.name, "the front end is disconnected: {why}");
        }
        vif.stop(cx);
        self.bus.disconnected(id);
    }
}

impl PortControl for XenEntry {
    fn serve(&mut self, sub: u32, cx: &mut Context<'_>) {
        match sub.checked_sub(FIRST_CONTROL_RING) {
            None => self.step(cx),
            Some(port) => self.serve_control(PortId(port as u16), cx),
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.busy.then(Instant::now)
    }

    fn fault(&mut self, fault: &PortFault, cx: &mut Context<'_>) -> bool {
        let Some(id) = self.find(fault.port) else { return false };
        let named = |vif: &Vif| fault.session.is_none_or(|session| session == vif.session);
        let current = self.vifs.get(&id).is_some_and(|vif| named(vif) && vif.served.is_some());
        if current {
            self.expel(id, &fault.why, cx);
        }
        true
    }

    fn count_up(&self) -> usize {
        self.vifs.values().filter(|vif| vif.served.is_some()).count()
    }

    fn has_session(&self) -> bool {
        self.vifs.values().any(|vif| vif.served.is_some())
    }

    fn change(&mut self, _: &PortConfig, now: &PortConfig) -> Result<(), OpenError> {
        if let PortKind::XenVif(config) = &now.kind {
            self.config = config.clone();
            self.mtu = now.mtu.unwrap_or(DEFAULT_MTU);
            self.owners = now.owners();
        }
        Ok(())
    }

    fn set_rules(&mut self, rules: &Rules, workers: &Workers) {
        self.rules.clone_from(rules);
        self.vifs.values().for_each(|vif| workers.set_rules(vif.id, rules));
    }

    fn interfaces(&self) -> Vec<Interface<'_>> {
        let ports = self.vifs.values();
        ports
            .map(|Vif { id, name, shared, counters, .. }| Interface {
                id: *id,
                name,
                queues: InterfaceQueues::Pairs(shared),
                counters,
            })
            .collect()
    }

    fn hand_over(&self, _: &mut Put<'_>) -> io::Result<HandedPort> {
        Ok(HandedPort::XenVif)
    }

    fn remove(&mut self, cx: &mut Context<'_>) {
        let _ = cx.unwatch(&self.bus);
        self.remove_vifs(cx);
    }

    fn snapshots(
        &self,
        _: &PortConfig,
        budget: &MappingBudget,
        queues: &mut QueueStates,
    ) -> Vec<PortSnapshot> {
        let class = &self.config.class;
        let mut entry = PortSnapshot {
            state: if self.reached { PortState::Listening } else { PortState::Connecting },
            peer: match &self.config.provider {
                XenProvider::Xen => format!("xenstore backend/{class}"),
                XenProvider::Process { store, .. } => format!("{} backend/{class}", store.display()),
            },
            mtu: self.mtu,
            counters: PortTotals::new(1).by_name(),
            drops: PortTotals::new(1).drops_by_name(),
            rules: rules_by_key(&self.rules),
            ..PortSnapshot::new(self.name.clone(), Negotiated::XenVif(VifFeatures::empty()))
        };
        let mut ports: Vec<_> =
            self.vifs.iter().map(|(id, vif)| snapshot(*id, vif, self.mtu, queues)).collect();
        ports.iter_mut().for_each(|port| port.rules.clone_from(&entry.rules));
        if self.config.only.is_none() || ports.is_empty() {
            let gauge = |name: &str, value: usize| (name.to_owned(), value as u64);
            entry.counters.extend([
                gauge("interfaces", self.vifs.len()),
                gauge("grant_pages_limit", budget.limit()),
                gauge("grant_pages_reserved", budget.taken()),
            ]);
            ports.insert(0, entry);
        }
        ports
    }
}

/// Returns the state of one interface's port.
fn snapshot(id: VifId, vif: &Vif, mtu: u16, queues: &mut QueueStates) -> PortSnapshot {
    let mut port = PortSnapshot {
        state: PortState::Listening,
        peer: id.to_string(),
        mtu,
        mac: vif.mac,
        counters: vif.counters.by_name(),
        drops: vif.counters.drops_by_name(),
        // The rules are those of the entry, which are put there.
        ..PortSnapshot::new(vif.name.clone(), Negotiated::XenVif(VifFeatures::empty()))
    };
    let (mut done, mut waited) = (vif.past, 0);
    if let Some(served) = &vif.served {
        port.state = PortState::Up;
        let accepts = served.front.accepts;
        let mut features = VifFeatures::empty();
        features.set(VifFeatures::SG, accepts.sg);
        features.set(VifFeatures::CSUM, accepts.csum4 && accepts.csum6);
        features.set(VifFeatures::GSO_TCPV4, accepts.gso4);
        features.set(VifFeatures::GSO_TCPV6, accepts.gso6);
        features.insert(match served.mode {
            Mode::Persistent => VifFeatures::PERSISTENT,
            Mode::Copy => VifFeatures::COPY,
            Mode::Map => VifFeatures::MAP,
        });
        features.set(VifFeatures::CTRL_RING, served.control.is_some());
        port.negotiated = Negotiated::XenVif(features);
        for index in (0..served.queues).flat_map(queue_index::both) {
            let live = queues.remove(&(vif.id, index));
            let pages = live.as_ref().and_then(|live| live.pages).map(|state| {
                add(&mut done, &state.pages);
                waited += state.waited;
                grants(&state.pages, state.mapped, served.pages)
            });
            port.queues.push(QueueSnapshot {
                index,
                role: QueueRole::of(index),
                size: SLOTS,
                enabled: true,
                started: live.is_some(),
                last_avail: live.as_ref().map_or(0, |live| live.last_avail),
                last_used: live.as_ref().map_or(0, |live| live.last_used),
                available: None,
                stalled: None,
                broken: live.and_then(|live| live.broken),
                grants: pages,
            });
        }
    }
    // This count is of the present connection only.
    port.counters.insert("tx_waited".into(), waited);
    port.counters.extend(grants(&done, (0, 0), 0).by_name().map(|(name, n)| (format!("grant_{name}"), n)));
    port
}
