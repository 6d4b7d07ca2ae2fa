//! A port for a virtual machine, as the control plane sees it: the socket, the session on it, and the
//! translation of what the front end says into commands for the worker.
//!
//! The socket outlives sessions: a listener is bound once and never re-bound, and a port that connects
//! tries again for ever. One front end is served at a time; the next waits in the listener's backlog.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_control::snapshot::PortState;
use ringferry_memory::GuestMemory;
use ringferry_packet::ether::{Mac, rarp_announcement};
use ringferry_ring::{Device as RingDevice, LayoutError, RingFeatures};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::{Listener, Stream};
use ringferry_vhost_user::RingSetup;
use ringferry_vhost_user::backend::{Counters, Device, Offer, Session};
use ringferry_vhost_user::message::ProtocolFeatures;
use ringferry_virtio_net::Features;
use ringferry_virtio_net::config::{NetConfig, S_LINK_UP};

use crate::config::{DEFAULT_MTU, FeatureToggles, PortConfig, VhostUserConfig};
use crate::counters::{PortCounters, PortTotals};
use crate::fdb::PortId;
use crate::plane::{PAIRS, Plane, PortShared, RingStart};
use crate::quiet::Limit;

/// Time between attempts to connect. The one who is connected to may be a VMM that is just starting:
/// short enough not to be noticed, long enough not to be a load.
const RETRY: Duration = Duration::from_millis(250);

/// Announcements of a guest that has moved are this far apart at least.
const ANNOUNCE_INTERVAL: Duration = Duration::from_millis(20);

/// Log lines about one port's front ends per interval: two or three restarts of a machine.
const LOG_LINES: u32 = 20;

/// Where front ends come from.
pub(crate) enum Endpoint {
    /// They connect to us.
    Listen(Listener),
    /// We connect to them.
    Connect(PathBuf),
    /// One that was connected when we started; there is no other.
    Once(Option<Stream>),
}

/// The port.
pub(crate) struct VhostPort {
    pub(crate) endpoint: Endpoint,
    session: Option<Session>,
    /// One that is over, until its owner has stopped to watch it.
    ended: Option<Session>,
    /// What happened on sessions that are over.
    past: Counters,
    device: PortDevice,
    offer: Offer,
    /// When to connect next.
    retry_at: Instant,
    /// The listener could not accept: it is left alone for a while, as it stays readable.
    accept_failed: bool,
    /// The reason for the last failure to connect or accept was logged.
    failure_logged: bool,
}

/// What the port wants watched.
pub(crate) enum Watch<'a> {
    /// New connections.
    Listener(BorrowedFd<'a>),
    /// Messages.
    Session(BorrowedFd<'a>),
    /// Nothing but the time.
    Nothing,
}

impl VhostPort {
    pub(crate) fn new(
        id: PortId,
        port: &PortConfig,
        config: &VhostUserConfig,
        endpoint: Endpoint,
        plane: &Arc<Plane>,
        counters: &PortTotals,
    ) -> Self {
        let shared = Arc::new(PortShared::default());
        plane.add_guest(id, &port.name, counters, &shared, port.first_worker());
        let mut offer = Offer::net(features(config.features).bits(), PAIRS);
        if config.mac.is_some() {
            offer.protocol |= ProtocolFeatures::CONFIG;
        }
        let device = PortDevice {
            plane: Arc::clone(plane),
            id,
            name: port.name.clone(),
            features: Features::empty(),
            memory: None,
            mac: config.mac,
            mtu_limit: port.mtu,
            mtu: port.mtu.unwrap_or(DEFAULT_MTU),
            queue_limit: config.queue_size,
            bases: Vec::new(),
            announced: None,
            limit: Limit::new(LOG_LINES),
            counters: counters.of(0),
            shared,
        };
        Self {
            endpoint,
            session: None,
            ended: None,
            past: Counters::default(),
            device,
            offer,
            retry_at: Instant::now(),
            accept_failed: false,
            failure_logged: false,
        }
    }

    /// What to watch now.
    pub(crate) fn watch(&self) -> Watch<'_> {
        match (&self.session, &self.endpoint) {
            (Some(session), _) => Watch::Session(session.as_fd()),
            (None, Endpoint::Listen(listener)) if !self.accept_failed => Watch::Listener(listener.as_fd()),
            (None, _) => Watch::Nothing,
        }
    }

    /// When [`VhostPort::step`] has something to do although nothing is watched.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let tries = match self.endpoint {
            Endpoint::Listen(_) => self.accept_failed,
            Endpoint::Connect(_) => true,
            Endpoint::Once(ref stream) => stream.is_some(),
        };
        (self.session.is_none() && tries).then_some(self.retry_at)
    }

    /// Does what can be done now: accepts, connects, serves messages.
    pub(crate) fn step(&mut self) {
        if let Some(session) = &mut self.session {
            let served = session.on_readable(&mut self.device);
            if let Err(error) = served {
                if self.device.limit.allows() {
                    if error.is_disconnect() {
                        tracing::info!(port = self.device.name, "the front end has disconnected");
                    } else {
                        tracing::warn!(port = self.device.name, "the connection is closed: {error}");
                    }
                }
                self.close();
            }
            return;
        }
        let stream = match &mut self.endpoint {
            Endpoint::Listen(listener) => listener.accept(),
            Endpoint::Once(stream) => Ok(stream.take()),
            Endpoint::Connect(path) => {
                if Instant::now() < self.retry_at {
                    return;
                }
                Stream::connect(path).map(Some)
            }
        };
        self.accept_failed = false;
        match stream.and_then(|stream| stream.map(|stream| Session::new(stream, self.offer)).transpose()) {
            Ok(Some(session)) => {
                if self.device.limit.allows() {
                    tracing::info!(port = self.device.name, "a front end has connected");
                }
                self.device.counters.connections.add(1);
                self.session = Some(session);
                self.failure_logged = false;
            }
            Ok(None) => {}
            Err(error) => {
                self.retry_at = Instant::now() + RETRY;
                self.accept_failed = matches!(self.endpoint, Endpoint::Listen(_));
                if std::mem::replace(&mut self.failure_logged, true) {
                    return;
                }
                let peer = self.peer();
                if self.accept_failed {
                    tracing::warn!(
                        port = self.device.name,
                        "cannot accept a front end at {peer} ({error}); trying again"
                    );
                } else {
                    tracing::info!(
                        port = self.device.name,
                        "no front end at {peer} yet ({error}); trying again"
                    );
                }
            }
        }
    }

    /// Ends the session if the guest's memory is gone: the front end shrank its file.
    pub(crate) fn check_memory(&mut self) {
        if self.device.memory.as_ref().is_some_and(|memory| memory.is_lost()) {
            tracing::warn!(port = self.device.name, "the connection is closed: guest memory was truncated");
            self.close();
        }
    }

    /// Ends the session, if there is one.
    pub(crate) fn close(&mut self) {
        if let Some(mut session) = self.session.take() {
            session.disconnect(&mut self.device);
            self.past = sum(self.past, session.counters());
            self.ended = Some(session);
            // A front end that never started a ring left nothing to forget.
            if !self.device.bases.is_empty() {
                self.device.bases.clear();
                self.device.plane.forget(self.device.id);
            }
            self.device.features = Features::empty();
            self.device.mtu = self.device.mtu_limit.unwrap_or(DEFAULT_MTU);
            self.retry_at = Instant::now() + RETRY;
        }
    }

    /// The session that has ended since this was last asked, its socket still open.
    pub(crate) fn take_ended(&mut self) -> Option<Session> {
        self.ended.take()
    }

    /// Whether packets flow, as far as the control plane knows.
    pub(crate) fn state(&self) -> PortState {
        let Some(session) = &self.session else {
            return match self.endpoint {
                Endpoint::Listen(_) => PortState::Listening,
                Endpoint::Connect(_) | Endpoint::Once(Some(_)) => PortState::Connecting,
                Endpoint::Once(None) => PortState::Down,
            };
        };
        let mut runs = [false; 2];
        for (index, ring) in session.rings().enumerate() {
            runs[index % 2] |= ring.started && ring.enabled;
        }
        if runs == [true; 2] { PortState::Up } else { PortState::Down }
    }

    /// The session, for its rings.
    pub(crate) fn session(&self) -> Option<&Session> {
        self.session.as_ref()
    }

    /// What happened on all sessions so far, by stable name.
    pub(crate) fn protocol_counters(&self) -> [(&'static str, u64); 4] {
        let now = self.session.as_ref().map_or_else(Default::default, Session::counters);
        let Counters { messages, rejected, unexpected_fds_closed, failed_starts } = sum(self.past, now);
        [
            ("messages", messages),
            ("messages_rejected", rejected),
            ("unexpected_fds_closed", unexpected_fds_closed),
            ("failed_ring_starts", failed_starts),
        ]
    }

    /// The features agreed on.
    pub(crate) fn features(&self) -> Features {
        self.device.features
    }

    /// What its workers know and count.
    pub(crate) fn shared(&self) -> &PortShared {
        &self.device.shared
    }

    /// The MTU in force.
    pub(crate) fn mtu(&self) -> u16 {
        self.device.mtu
    }

    /// Where the peer is, for people.
    pub(crate) fn peer(&self) -> String {
        match &self.endpoint {
            Endpoint::Listen(listener) => listener
                .path()
                .map_or_else(|| "inherited socket".to_owned(), |path| path.display().to_string()),
            Endpoint::Connect(path) => path.display().to_string(),
            Endpoint::Once(_) => "inherited connection".to_owned(),
        }
    }
}

impl Drop for VhostPort {
    fn drop(&mut self) {
        self.close();
    }
}

/// What two sessions counted together.
fn sum(one: Counters, other: Counters) -> Counters {
    Counters {
        messages: one.messages + other.messages,
        rejected: one.rejected + other.rejected,
        unexpected_fds_closed: one.unexpected_fds_closed + other.unexpected_fds_closed,
        failed_starts: one.failed_starts + other.failed_starts,
    }
}

/// The features a port offers.
fn features(toggles: FeatureToggles) -> Features {
    let mut features = Features::DEVICE | Features::MTU | Features::MQ | Features::GUEST_ANNOUNCE;
    let groups = [
        (toggles.mergeable, Features::MRG_RXBUF),
        (toggles.csum, Features::CSUM | Features::GUEST_CSUM),
        (
            toggles.tso,
            Features::GUEST_TSO4
                | Features::GUEST_TSO6
                | Features::GUEST_ECN
                | Features::HOST_TSO4
                | Features::HOST_TSO6
                | Features::HOST_ECN,
        ),
        (toggles.uso, Features::GUEST_USO4 | Features::GUEST_USO6 | Features::HOST_USO),
        (toggles.event_idx, Features::EVENT_IDX),
        (toggles.indirect, Features::INDIRECT_DESC),
        (toggles.packed, Features::RING_PACKED),
        (toggles.in_order, Features::IN_ORDER),
    ];
    for (on, group) in groups {
        if !on {
            features.remove(group);
        }
    }
    // The control queue that MQ and GUEST_ANNOUNCE need is the front end's own, and not offered here.
    let served_by_front_end = Features::MQ | Features::GUEST_ANNOUNCE;
    features.difference(served_by_front_end).consistent() | features & served_by_front_end
}

/// What the session talks to.
struct PortDevice {
    plane: Arc<Plane>,
    id: PortId,
    name: String,
    features: Features,
    memory: Option<Arc<GuestMemory>>,
    mac: Option<Mac>,
    /// The MTU of the configuration, which a front end may not exceed.
    mtu_limit: Option<u16>,
    mtu: u16,
    queue_limit: Option<u16>,
    /// Where each ring was started, for one the worker never got.
    bases: Vec<u16>,
    /// When the front end last had its guest announced.
    announced: Option<Instant>,
    limit: Limit,
    /// Of which only connections are counted here.
    counters: Arc<PortCounters>,
    shared: Arc<PortShared>,
}

impl PortDevice {
    fn try_start(&mut self, index: u16, setup: RingSetup) -> Result<(), NoRing> {
        let RingSetup { parts, base, inflight, kick, call, err, enabled, memory, features } = setup;
        if let Some(limit) = self.queue_limit.filter(|limit| parts.size > *limit) {
            return Err(NoRing::Limit { size: parts.size, limit });
        }
        let features = Features::from_bits_retain(features);
        self.shared.set_offloads(features.guest_offloads());
        self.shared.set_mtu(self.mtu);
        let start = RingStart {
            index,
            ring: RingDevice::new(parts, RingFeatures::from_bits(features.bits()), base, inflight)?,
            memory,
            features,
            enabled,
            kick,
            call,
            err,
        };
        self.plane.start_ring(self.id, start);
        Ok(())
    }
}

/// Why a ring that a front end has started is not served.
#[derive(Debug, thiserror::Error)]
enum NoRing {
    #[error("it has {size} entries, and the port allows {limit}")]
    Limit { size: u16, limit: u16 },
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl Device for PortDevice {
    fn features_acked(&mut self, features: u64) {
        let features = Features::from_bits_retain(features);
        if self.features != features && self.limit.allows() {
            tracing::info!(port = self.name, features = features.names().join(" "), "features agreed on");
        }
        self.features = features;
    }

    fn memory_changed(&mut self, memory: Option<Arc<GuestMemory>>) {
        self.memory = memory;
    }

    fn ring_started(&mut self, index: u16, setup: RingSetup) {
        let at = usize::from(index);
        if self.bases.len() <= at {
            self.bases.resize(at + 1, 0);
        }
        self.bases[at] = setup.base;
        tracing::debug!(port = self.name, index, size = setup.parts.size, base = setup.base, "ring starts");
        if let Err(why) = self.try_start(index, setup)
            && self.limit.allows()
        {
            tracing::warn!(port = self.name, "queue {index} cannot be served: {why}");
        }
    }

    fn ring_call_changed(&mut self, index: u16, call: Option<EventFd>) {
        self.plane.set_call(self.id, index, call);
    }

    fn ring_enabled(&mut self, index: u16, enabled: bool) {
        self.plane.enable_ring(self.id, index, enabled);
    }

    fn ring_stopped(&mut self, index: u16) -> u16 {
        let started = self.bases.get(usize::from(index)).copied().unwrap_or(0);
        let base = self.plane.stop_ring(self.id, index).unwrap_or(started);
        tracing::debug!(port = self.name, index, base, "ring stops");
        base
    }

    fn config(&self, offset: usize, buf: &mut [u8]) -> bool {
        let config = NetConfig {
            mac: self.mac.unwrap_or_default().0,
            status: S_LINK_UP,
            max_virtqueue_pairs: PAIRS,
            mtu: self.mtu,
        };
        config.read(offset, buf);
        true
    }

    fn mtu_set(&mut self, mtu: u16) -> bool {
        // A frame of any MTU passes through the switch; only the configuration sets a limit.
        if let Some(limit) = self.mtu_limit.filter(|limit| mtu > *limit) {
            if self.limit.allows() {
                tracing::warn!(
                    port = self.name,
                    "the front end wants MTU {mtu}, and the port allows {limit}"
                );
            }
            return false;
        }
        self.mtu = mtu;
        true
    }

    fn announce(&mut self, mac: [u8; 6]) {
        // Each is flooded to every port. A front end sends a few per migration; what comes faster would
        // only keep the worker busy.
        let now = Instant::now();
        if self.announced.is_some_and(|last| now.duration_since(last) < ANNOUNCE_INTERVAL) {
            return;
        }
        self.announced = Some(now);
        self.plane.inject(self.id, rarp_announcement(Mac(mac)).to_vec());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn toggles_take_their_dependants_along() {
        let toggles = FeatureToggles { csum: false, ..FeatureToggles::default() };
        let offered = features(toggles);
        assert!(
            !offered
                .intersects(Features::CSUM | Features::HOST_TSO4 | Features::GUEST_USO6 | Features::HOST_ECN)
        );
        assert!(offered.contains(Features::MQ | Features::MRG_RXBUF | Features::VERSION_1));
    }
}
