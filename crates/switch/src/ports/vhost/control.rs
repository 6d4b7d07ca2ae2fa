//! The control side of a vhost-user port: the socket, the session on it, and what is watched of them.
//!
//! The socket outlives sessions: a listener is bound once and never re-bound, and a port that connects
//! tries again for ever. One front end is served at a time; the next waits in the listener's backlog.
//!
//! ```text
//!   listening / connecting ── accept, connect ──► session ── end of stream, refused message, lost memory ──► ended
//!             ▲                                                                                               │
//!             └──────────────────────────── rings stopped, descriptor unwatched ─────────────────────────────┘
//! ```

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_control::snapshot::{Negotiated, PortSnapshot, PortState, QueueRole, QueueSnapshot};
use ringferry_sys::epoll::Interest;
use ringferry_sys::socket::{Listener, Stream};
use ringferry_vhost_user::backend::{Counters, Offer, Session};
use ringferry_vhost_user::message::ProtocolFeatures;

use super::device::{PortDevice, features};
use super::queues::VhostQueues;
use crate::config::{DEFAULT_MTU, PortConfig, VhostUserConfig, VhostUserEndpoint};
use crate::counters::PortTotals;
use crate::log_limit::LogLimit;
use crate::plane::{PAIRS, Placement, PortShared, Steering};
use crate::ports::passed::Passed;
use crate::ports::queues::{AnyQueues, Workers};
use crate::ports::table::QueueStates;
use crate::ports::xen::MappingBudget;
use crate::ports::{Context, Interface, InterfaceQueues, OpenError, Plug, PortControl};
use crate::rules::Rules;
use crate::snapshot::rules_by_key;

/// Time between attempts to connect. The one who is connected to may be a VMM that is just starting:
/// short enough not to be noticed, long enough not to be a load.
const RETRY: Duration = Duration::from_millis(250);

/// Log lines about one port's front ends per interval: two or three restarts of a machine.
const LOG_LINES: u32 = 20;

/// Where front ends come from.
enum Endpoint {
    /// They connect to us.
    Listen(Listener),
    /// We connect to them.
    Connect(PathBuf),
    /// One that was connected when we started; there is no other.
    Once(Option<Stream>),
}

/// The control side.
struct VhostPort {
    endpoint: Endpoint,
    watched: Watched,
    counters: PortTotals,
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

/// What epoll watches for the port.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Watched {
    /// Nothing but the time.
    Nothing,
    /// New connections.
    Listener,
    /// Messages.
    Session,
}

/// Opens the socket of a port.
///
/// # Errors
/// See [`OpenError`].
pub(in crate::ports) fn open(config: &VhostUserConfig, passed: &mut Passed) -> Result<Plug, OpenError> {
    let endpoint = match &config.endpoint {
        VhostUserEndpoint::Listen(path) => Endpoint::Listen(Listener::bind(path)?),
        VhostUserEndpoint::Connect(path) => Endpoint::Connect(path.clone()),
        VhostUserEndpoint::Fd(fd) => {
            let inherited = |source| OpenError::Inherited { fd: *fd, source };
            inherited_endpoint(passed.number(*fd)?).map_err(inherited)?
        }
        VhostUserEndpoint::Activation(name) => Endpoint::Listen(Listener::from_fd(passed.socket(name)?)?),
    };
    let config = config.clone();
    Ok(Box::new(move |port, cx| Ok(Box::new(VhostPort::new(port, &config, endpoint, cx)?))))
}

/// An inherited socket listens, or is connected.
fn inherited_endpoint(fd: OwnedFd) -> io::Result<Endpoint> {
    if rustix::net::sockopt::socket_acceptconn(&fd)? {
        Ok(Endpoint::Listen(Listener::from_fd(fd).map_err(io::Error::other)?))
    } else {
        Ok(Endpoint::Once(Some(Stream::from_fd(fd)?)))
    }
}

impl VhostPort {
    fn new(
        port: &PortConfig,
        config: &VhostUserConfig,
        endpoint: Endpoint,
        cx: &mut Context<'_>,
    ) -> Result<Self, OpenError> {
        let id = cx.allocate()?;
        // Before there is a port, so that no frame comes first.
        cx.workers.set_rules(id, &port.rules);
        let counters = PortTotals::new(cx.workers.count());
        let shared = Arc::new(PortShared::default());
        let steering = Steering::Pairs(Arc::clone(&shared));
        let placement = Placement { steering, first: port.first_worker(), queues: PAIRS };
        cx.workers.add_port(id, &port.name, &counters, placement, |_, handle| {
            AnyQueues::Vhost(VhostQueues::new(handle.clone(), Arc::clone(&shared)))
        });
        let mut offer = Offer::net(features(config.features).bits(), PAIRS);
        if config.mac.is_some() {
            offer.protocol |= ProtocolFeatures::CONFIG;
        }
        let device = PortDevice {
            mac: config.mac,
            mtu_limit: port.mtu,
            mtu: port.mtu.unwrap_or(DEFAULT_MTU),
            queue_limit: config.queue_size,
            ..PortDevice::new(
                Arc::clone(cx.workers),
                id,
                port.name.clone(),
                LogLimit::new(LOG_LINES),
                counters.of(0),
                shared,
            )
        };
        Ok(Self {
            endpoint,
            watched: Watched::Nothing,
            counters,
            session: None,
            ended: None,
            past: Counters::default(),
            device,
            offer,
            retry_at: Instant::now(),
            accept_failed: false,
            failure_logged: false,
        })
    }

    /// Watches what the port waits for now. Where that cannot be had (the user's limit of watched descriptors,
    /// say) the port alone goes down, and the next tick tries again.
    fn settle(&mut self, cx: &Context<'_>) {
        if let Err(error) = self.rewatch(cx) {
            tracing::error!(
                port = self.device.name,
                "cannot wait for the port's socket: {error}; trying again"
            );
            self.close();
        }
    }

    fn rewatch(&mut self, cx: &Context<'_>) -> io::Result<()> {
        if let Some(session) = self.ended.take() {
            cx.unwatch(&session)?;
            self.watched = Watched::Nothing;
        }
        let now = match (&self.session, &self.endpoint) {
            (Some(_), _) => Watched::Session,
            (None, Endpoint::Listen(_)) if !self.accept_failed => Watched::Listener,
            (None, _) => Watched::Nothing,
        };
        if self.watched == now {
            return Ok(());
        }
        if let (Watched::Listener, Endpoint::Listen(listener)) = (self.watched, &self.endpoint) {
            cx.unwatch(listener)?;
        }
        let interest = Interest::READABLE | Interest::HANGUP;
        match (now, &self.session, &self.endpoint) {
            (Watched::Session, Some(session), _) => cx.watch(session, 0, interest)?,
            (Watched::Listener, _, Endpoint::Listen(listener)) => cx.watch(listener, 0, interest)?,
            _ => {}
        }
        self.watched = now;
        Ok(())
    }

    /// Does what can be done now: accepts, connects, serves messages.
    fn step(&mut self) {
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
    fn check_memory(&mut self) {
        if self.device.memory.as_ref().is_some_and(|memory| memory.is_lost()) {
            tracing::warn!(port = self.device.name, "the connection is closed: guest memory was truncated");
            self.close();
        }
    }

    /// Ends the session, if there is one.
    fn close(&mut self) {
        if let Some(mut session) = self.session.take() {
            session.disconnect(&mut self.device);
            self.past = sum(self.past, session.counters());
            self.ended = Some(session);
            self.device.reset();
            self.retry_at = Instant::now() + RETRY;
        }
    }

    /// Whether packets flow, as far as the control plane knows.
    fn state(&self) -> PortState {
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

    /// What happened on all sessions so far, by stable name.
    fn protocol_counters(&self) -> [(&'static str, u64); 4] {
        let now = self.session.as_ref().map_or_else(Default::default, Session::counters);
        let Counters { messages, rejected, unexpected_fds_closed, failed_starts } = sum(self.past, now);
        [
            ("messages", messages),
            ("messages_rejected", rejected),
            ("unexpected_fds_closed", unexpected_fds_closed),
            ("failed_ring_starts", failed_starts),
        ]
    }

    /// Where the peer is, for people.
    fn peer(&self) -> String {
        match &self.endpoint {
            Endpoint::Listen(listener) => listener
                .path()
                .map_or_else(|| "inherited socket".to_owned(), |path| path.display().to_string()),
            Endpoint::Connect(path) => path.display().to_string(),
            Endpoint::Once(_) => "inherited connection".to_owned(),
        }
    }
}

impl PortControl for VhostPort {
    fn serve(&mut self, _: u32, cx: &mut Context<'_>) {
        self.step();
        self.settle(cx);
    }

    fn deadline(&self) -> Option<Instant> {
        let tries = match self.endpoint {
            Endpoint::Listen(_) => self.accept_failed,
            Endpoint::Connect(_) => true,
            Endpoint::Once(ref stream) => stream.is_some(),
        };
        (self.session.is_none() && tries).then_some(self.retry_at)
    }

    fn tick(&mut self, cx: &mut Context<'_>) {
        self.check_memory();
        self.settle(cx);
    }

    fn set_rules(&mut self, rules: &Rules, workers: &Workers) {
        workers.set_rules(self.device.id, rules);
    }

    fn interfaces(&self) -> Vec<Interface<'_>> {
        let PortDevice { id, name, shared, .. } = &self.device;
        vec![Interface { id: *id, name, queues: InterfaceQueues::Pairs(shared) }]
    }

    fn snapshots(
        &self,
        config: &PortConfig,
        _: &MappingBudget,
        states: &mut QueueStates,
    ) -> Vec<PortSnapshot> {
        let mut snapshot = PortSnapshot {
            name: self.device.name.clone(),
            negotiated: Negotiated::VhostUser(self.device.features),
            state: self.state(),
            peer: self.peer(),
            mtu: self.device.mtu,
            mac: None,
            queues: Vec::new(),
            counters: self.counters.by_name(),
            drops: self.counters.drops_by_name(),
            rules: rules_by_key(&config.rules),
        };
        snapshot.counters.extend(self.protocol_counters().map(|(name, count)| (name.to_owned(), count)));
        let rings = self.session.iter().flat_map(Session::rings);
        for (index, ring) in (0u16..).zip(rings).filter(|(_, ring)| ring.size > 0) {
            let live = states.remove(&(self.device.id, index));
            if live.as_ref().is_some_and(|live| live.broken.is_some()) {
                snapshot.state = PortState::Broken;
            }
            snapshot.queues.push(QueueSnapshot {
                index,
                role: QueueRole::of(index),
                size: ring.size,
                enabled: ring.enabled,
                started: ring.started,
                last_avail: live.as_ref().map_or(ring.base as u16, |live| live.last_avail),
                last_used: live.as_ref().map_or(0, |live| live.last_used),
                broken: live.and_then(|live| live.broken),
                grants: None,
            });
        }
        vec![snapshot]
    }

    fn remove(&mut self, cx: &mut Context<'_>) {
        self.close();
        // Watches nothing any more.
        if let Some(session) = self.ended.take() {
            let _ = cx.unwatch(&session);
        }
        if let (Watched::Listener, Endpoint::Listen(listener)) = (self.watched, &self.endpoint) {
            let _ = cx.unwatch(listener);
        }
        cx.release(self.device.id);
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
