//! The control side of one `[[port]]` of kind `xen-vif`: every interface of a class, each a port as the toolstack makes it; or one of them.
//!
//! It is watched under sub-token 0 for the store, and under that of a port's id and one for the port's control ring.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::{Duration, Instant};

use ringferry_control::snapshot::{
    Negotiated, PortSnapshot, PortState, QueueRole, QueueSnapshot, VifFeatures,
};
use ringferry_sys::epoll::Interest;
use ringferry_vhost_user::backend::Put;
use ringferry_virtio_net::queue_index;
use ringferry_xen::domain::DomId;
use ringferry_xen::provider::{OpenError as ProviderError, Provider};
use ringferry_xen::store::StoreError;
use ringferry_xen_net::netback::Mode;
use ringferry_xen_net::offload::Accepts;
use ringferry_xen_net::xenbus::{BackConfig, BackEvent, BackendDriver, Polled, VifId};

use super::MappingBudget;
use super::vif::{Vif, add};
use crate::config::{DEFAULT_MTU, PortConfig, PortKind, XenProvider, XenVifConfig};
use crate::counters::PortTotals;
use crate::fdb::PortId;
use crate::log_limit::LogLimit;
use crate::plane::{Owners, PAIRS, PortFault};
use crate::ports::handed::HandedPort;
use crate::ports::queues::Workers;
use crate::ports::table::QueueStates;
use crate::ports::{Context, Interface, InterfaceQueues, OpenError, Plug, PortControl};
use crate::rules::Rules;
use crate::snapshot::{grants, rules_by_key};

/// Upper bound on the turns of the bus in one step: signals and other ports wait no longer than so many
/// look-ups in the store.
const TURNS: usize = 64;

/// Time between attempts to reach the store.
const RETRY: Duration = Duration::from_millis(500);

/// Upper bound on log lines about front ends per interval.
const LOG_LINES: u32 = 20;

/// Slots of each ring of a queue: as many as fit in a page.
const SLOTS: u16 = 256;

/// The error of a store or hypervisor that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum XenError {
    /// The hypervisor or the store cannot be reached.
    #[error(transparent)]
    Open(#[from] ProviderError),
    /// The store cannot be watched.
    #[error("cannot watch the store: {0}")]
    Watch(io::Error),
    /// The store has answered with an error.
    #[error("the store: {0}")]
    Store(#[from] StoreError),
}

/// Sub-token of the control ring of port 0; the others' follow.
pub(super) const FIRST_CONTROL_RING: u32 = 1;

/// Opens an entry: reaches the hypervisor and the store, if there is Xen.
///
/// # Errors
/// See [`XenError`].
pub(in crate::ports) fn open(
    port: &PortConfig,
    config: &XenVifConfig,
    workers: usize,
) -> Result<Plug, OpenError> {
    let entry = XenEntry::new(port, config, workers)?;
    Ok(Box::new(move |_, cx| {
        entry.watch(cx)?;
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
    /// The back-end driver with all interfaces, while the store can be reached.
    backend: Option<BackendDriver>,
    /// Time of the next attempt to reach the store.
    retry_at: Instant,
    failure_logged: bool,
    vifs: BTreeMap<VifId, Vif>,
    /// True if the last step left work to do.
    busy: bool,
    limit: LogLimit,
}

/// Returns the provider that a configuration names.
fn provider(config: &XenProvider) -> Provider {
    match config {
        XenProvider::Xen => Provider::Xen,
        XenProvider::Process { broker, store, domain } => {
            Provider::Process { broker: broker.clone(), store: store.clone(), domain: DomId(*domain) }
        }
    }
}

/// Connects to the hypervisor and the store.
fn connect(config: &XenVifConfig, workers: usize) -> Result<BackendDriver, XenError> {
    let (domain, store) = provider(&config.provider).open()?;
    let XenVifConfig { sg, csum, gso, .. } = *config;
    let queues = config.queues.unwrap_or_else(|| workers.min(PAIRS.into()) as u16);
    let back = BackConfig {
        class: config.class.clone(),
        accepts: Accepts { sg, csum4: csum, csum6: csum, gso4: gso, gso6: gso },
        max_queues: queues,
        split_events: true,
        persistent: config.persistent,
        static_grants: config.static_grants,
        // Frames may be sent and received on any queue, and the worker that filters must know both.
        multicast_control: workers == 1 || queues == 1,
        only: config.only.map(|only| VifId { front: DomId(only.domain), device: only.device }),
    };
    Ok(BackendDriver::new(store, domain, back)?)
}

impl XenEntry {
    /// Makes an entry. If a broker cannot be reached yet, it is tried again later; a machine without Xen is
    /// an error.
    ///
    /// # Errors
    /// See [`XenError`].
    fn new(port: &PortConfig, config: &XenVifConfig, workers: usize) -> Result<XenEntry, XenError> {
        let mut entry = XenEntry {
            name: port.name.clone(),
            mtu: port.mtu.unwrap_or(DEFAULT_MTU),
            owners: port.owners(),
            config: config.clone(),
            rules: port.rules.clone(),
            backend: None,
            retry_at: Instant::now(),
            failure_logged: false,
            vifs: BTreeMap::new(),
            busy: true,
            limit: LogLimit::new(LOG_LINES),
        };
        provider(&config.provider).check()?;
        if config.provider == XenProvider::Xen {
            entry.backend = Some(connect(config, workers)?);
        }
        Ok(entry)
    }

    /// Starts watching a store that was reached at the start.
    fn watch(&self, cx: &Context<'_>) -> io::Result<()> {
        let Some(backend) = &self.backend else { return Ok(()) };
        cx.watch(backend, 0, Interest::READABLE)
    }

    /// Makes one step: reaches the store, or serves its events.
    fn step(&mut self, cx: &mut Context<'_>) {
        if self.backend.is_none() && !self.reach(cx) {
            return;
        }
        let controls: Vec<_> = self.vifs.values().filter(|vif| vif.has_more()).map(|vif| vif.id).collect();
        self.busy = true;
        for _ in 0..TURNS {
            let Some(backend) = &mut self.backend else { return };
            match backend.poll() {
                Ok(Polled::Busy) => {}
                Ok(Polled::Idle) => {
                    self.busy = false;
                    break;
                }
                Ok(Polled::Vif(id, event)) => {
                    if let Err(error) = self.turn(id, event, cx) {
                        return self.lose(&error, cx);
                    }
                }
                Err(error) => return self.lose(&error, cx),
            }
        }
        self.settle(cx);
        for port in controls {
            self.serve_control(port, cx);
        }
        self.busy |= self.vifs.values().any(Vif::has_more);
    }

    /// Tries to reach the store; returns true if it was reached.
    fn reach(&mut self, cx: &mut Context<'_>) -> bool {
        let now = Instant::now();
        if now < self.retry_at {
            return false;
        }
        let reached = connect(&self.config, cx.workers.count()).and_then(|backend| {
            cx.watch(&backend, 0, Interest::READABLE).map_err(XenError::Watch)?;
            Ok(backend)
        });
        match reached {
            Ok(backend) => {
                tracing::info!(port = self.name, "the store is there");
                self.backend = Some(backend);
                self.failure_logged = false;
                true
            }
            Err(error) => {
                self.retry_at = now + RETRY;
                if !std::mem::replace(&mut self.failure_logged, true) {
                    tracing::warn!(port = self.name, "{error}; trying again");
                }
                false
            }
        }
    }

    /// Handles the loss of the store: nothing is known of interfaces any more.
    fn lose(&mut self, error: &StoreError, cx: &mut Context<'_>) {
        tracing::error!(
            port = self.name,
            "the store cannot be used any more: {error}; trying to reach it again"
        );
        if let Some(backend) = self.backend.take() {
            let _ = cx.unwatch(&backend);
        }
        for vif in std::mem::take(&mut self.vifs).into_values() {
            vif.remove(cx);
        }
        self.retry_at = Instant::now() + RETRY;
    }

    /// Makes ports for new interfaces.
    fn settle(&mut self, cx: &mut Context<'_>) {
        let Some(backend) = &self.backend else { return };
        let known: BTreeSet<VifId> = backend.vifs().collect();
        for id in known {
            self.vif(id, cx);
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

    fn turn(&mut self, id: VifId, event: BackEvent, cx: &mut Context<'_>) -> Result<(), StoreError> {
        let loud = self.limit.allows(&self.name);
        match event {
            BackEvent::Connect(connection) => {
                let (config, mtu) = (self.config.clone(), self.mtu);
                let Some(vif) = self.vif(id, cx) else {
                    tracing::error!("{id}: no number is left for a port");
                    self.let_go(id);
                    return Ok(());
                };
                vif.shared.set_mtu(mtu);
                match vif.serve(*connection, &config, cx) {
                    Ok(()) => {
                        if loud {
                            let queues = vif.served.as_ref().map_or(0, |served| served.queues);
                            tracing::info!(port = vif.name, queues, "a front end has connected");
                        }
                        if let Some(backend) = &mut self.backend {
                            backend.connected(id)?;
                        }
                    }
                    Err(error) => {
                        if loud {
                            tracing::warn!(port = vif.name, "the front end cannot be served: {error}");
                        }
                        self.let_go(id);
                    }
                }
            }
            BackEvent::Disconnect => {
                if let Some(vif) = self.vifs.get_mut(&id) {
                    vif.stop(cx);
                    if loud {
                        tracing::info!(port = vif.name, "the front end has disconnected");
                    }
                }
                self.let_go(id);
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
        Ok(())
    }

    /// Tells the back-end driver that nothing of the front end is mapped any more.
    fn let_go(&mut self, id: VifId) {
        if let Some(backend) = &mut self.backend {
            backend.disconnected(id);
            self.busy = true;
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
        self.let_go(id);
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
        (self.busy || self.backend.is_none()).then_some(self.retry_at)
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
        if let Some(backend) = self.backend.take() {
            let _ = cx.unwatch(&backend);
        }
        for vif in std::mem::take(&mut self.vifs).into_values() {
            vif.remove(cx);
        }
    }

    fn snapshots(
        &self,
        _: &PortConfig,
        budget: &MappingBudget,
        queues: &mut QueueStates,
    ) -> Vec<PortSnapshot> {
        let class = &self.config.class;
        let mut entry = PortSnapshot {
            name: self.name.clone(),
            negotiated: Negotiated::XenVif(VifFeatures::empty()),
            state: if self.backend.is_some() { PortState::Listening } else { PortState::Connecting },
            fault: None,
            peer: match &self.config.provider {
                XenProvider::Xen => format!("xenstore backend/{class}"),
                XenProvider::Process { store, .. } => format!("{} backend/{class}", store.display()),
            },
            mtu: self.mtu,
            mac: None,
            queues: Vec::new(),
            counters: PortTotals::new(1).by_name(),
            drops: PortTotals::new(1).drops_by_name(),
            rules: rules_by_key(&self.rules),
            pairs: Vec::new(),
            rates: Vec::new(),
            another_waits: false,
            ended: None,
            stopped_seconds: None,
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
        name: vif.name.clone(),
        negotiated: Negotiated::XenVif(VifFeatures::empty()),
        state: PortState::Listening,
        fault: None,
        peer: id.to_string(),
        mtu,
        mac: vif.mac,
        queues: Vec::new(),
        counters: vif.counters.by_name(),
        drops: vif.counters.drops_by_name(),
        // The rules are those of the entry.
        rules: BTreeMap::new(),
        pairs: Vec::new(),
        rates: Vec::new(),
        another_waits: false,
        ended: None,
        stopped_seconds: None,
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
