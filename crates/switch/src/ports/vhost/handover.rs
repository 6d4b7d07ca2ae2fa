//! A vhost-user port on its way to another process: the socket on which it listens, and the session of its front end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use ringferry_packet::ether::Mac;
use ringferry_sys::socket::{Listener, Passage, Stream};
use ringferry_vhost_user::backend::{CountersState, Offer, Put, Session, SessionState};
use ringferry_vhost_user::message::ProtocolFeatures;
use ringferry_virtio_net::Features;
use serde::{Deserialize, Serialize};

use super::control::{Endpoint, OUT_OF_SERVICE, SessionSettings, VhostPort};
use super::device::{PortDevice, features};
use crate::config::{FeatureToggles, PortConfig, VhostUserConfig, VhostUserEndpoint};
use crate::plane::{PAIRS, monotonic};
use crate::ports::handed::Descriptors;
use crate::ports::{Before, Context, OpenError, Plug, PortControl};
use crate::privileged::Privileges;

/// The state of a vhost-user port. Descriptors are numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct VhostState {
    /// The socket on which it listens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    listener: Option<u32>,
    /// A connection that was inherited and has no session yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    inherited: Option<u32>,
    /// The session, if a front end is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    session: Option<Box<SessionState>>,
    /// Number of the session.
    sessions: u32,
    /// Its front end has said something.
    heard: bool,
    /// The MTU in force.
    mtu: u16,
    /// What earlier sessions have counted.
    past: CountersState,
    /// No front end is served, for this reason and so many milliseconds from when this was written, which programs read that do not know the next field. Both have the names that they had at first.
    #[serde(rename = "quarantine", default, skip_serializing_if = "Option::is_none")]
    out_of_service: Option<(String, u64)>,
    /// The end of that, in nanoseconds of the system's monotonic clock: it does not move while the state lies somewhere.
    #[serde(rename = "quarantine_until", default, skip_serializing_if = "Option::is_none")]
    out_of_service_until: Option<u64>,
    /// The settings that the session was begun with, if the configuration has others for the next one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    agreed: Option<Agreed>,
}

/// Settings that hold for a session until it ends, besides features.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Agreed {
    mac: Option<[u8; 6]>,
    mtu_limit: Option<u16>,
    queue_limit: Option<u16>,
}

/// Returns an instant to come as nanoseconds of the system's monotonic clock.
fn monotonic_of(instant: Instant) -> u64 {
    monotonic() + instant.saturating_duration_since(Instant::now()).as_nanos() as u64
}

impl VhostState {
    /// See [`HandedPort::forget_session`](crate::ports::handed::HandedPort).
    pub(crate) fn forget_session(&mut self) -> bool {
        self.session.take().is_some()
    }
}

impl VhostPort {
    /// Returns numbers that change whenever [`handed`](Self::handed) would return another state.
    pub(super) fn generation_of_state(&self) -> (u64, u64) {
        let session = self.session.as_ref().map_or(0, |session| session.generation() + 1);
        let flags = u64::from(self.next.is_some()) << 1 | u64::from(self.out_of_service.is_some());
        let made = u64::from(self.sockets) << 48 | u64::from(self.device.session) << 2;
        (made | flags, session)
    }

    /// Returns the port's state, whose descriptors go to `put`.
    pub(super) fn handed(&self, put: &mut Put<'_>) -> io::Result<VhostState> {
        let (mut listener, mut inherited) = (None, None);
        match &self.endpoint {
            Endpoint::Listen(socket) => listener = Some(put(socket.as_fd(), None)?),
            Endpoint::Once(Some(stream)) => inherited = Some(put(stream.as_fd(), None)?),
            Endpoint::Connect(..) | Endpoint::Once(None) => {}
        }
        let left = |why: &String| {
            let left = self.retry_at.saturating_duration_since(Instant::now());
            (why.clone(), left.as_millis() as u64)
        };
        let PortDevice { mac, mtu_limit, queue_limit, .. } = self.device;
        let agreed = Agreed { mac: mac.map(|mac| mac.0), mtu_limit, queue_limit };
        let passage = Passage::new()?;
        let session = match &self.session {
            Some(session) => state_of(session, put, &mut |fd| passage.takes(fd))?,
            None => None,
        };
        if session.is_none() && self.session.is_some() {
            let port = &self.device.name;
            self.resources.warnings.warn(Some(port), || {
                tracing::warn!(port, "its front end cannot be handed over, as it has made a socket that the kernel does not pass on");
            });
        }
        Ok(VhostState {
            listener,
            inherited,
            session,
            sessions: self.device.session,
            heard: self.heard,
            mtu: self.device.mtu,
            past: self.past.into(),
            out_of_service: self.out_of_service.as_ref().map(left),
            out_of_service_until: self.out_of_service.as_ref().map(|_| monotonic_of(self.retry_at)),
            agreed: self.next.is_some().then_some(agreed),
        })
    }

    /// Goes on with a front end that another process has served.
    fn adopt(&mut self, state: &VhostState, fds: &mut Descriptors, before: Before) -> Result<(), OpenError> {
        self.device.session = state.sessions;
        (self.heard, self.past) = (state.heard, state.past.into());
        if let Some((why, left)) = &state.out_of_service {
            self.out_of_service = Some(why.clone());
            let left = match state.out_of_service_until {
                Some(until) => Duration::from_nanos(until.saturating_sub(monotonic())),
                None => Duration::from_millis(*left),
            };
            // Whatever the state says.
            self.retry_at = Instant::now() + left.min(OUT_OF_SERVICE);
        }
        let Some(session) = &state.session else { return Ok(()) };
        // The settings may have changed since the front end has connected.
        let mut all = Offer::net(features(FeatureToggles::default()).bits(), PAIRS).with_dirty_log();
        all.protocol |= ProtocolFeatures::CONFIG;
        match Session::adopt(session, &mut |number| fds.take_marked(number), all, self.resources.clone()) {
            Ok(session) => {
                self.device.features = Features::from_bits_retain(session.features().unwrap_or(0));
                self.device.memory = session.memory().cloned();
                self.device.mtu = state.mtu;
                self.session = Some(session);
                if let Some(agreed) = &state.agreed {
                    self.keep_to(agreed);
                }
            }
            // Who has more of it goes on. What a front end has done holds up no successor.
            Err(error) if before == Before::GoesOn && error.is_lack() => {
                return Err(OpenError::Handed(format!("its front end would be disconnected: {error}")));
            }
            Err(error) => {
                let port = &self.device.name;
                tracing::warn!(port, "its front end cannot be taken over, and will be disconnected: {error}");
            }
        }
        // What a front end has passed may be slow to close.
        fds.rest().for_each(|fd| self.resources.closer.close(fd));
        Ok(())
    }

    /// Has the session go on with what it was begun with, and the next one begin with what the configuration says.
    fn keep_to(&mut self, agreed: &Agreed) {
        let device = &mut self.device;
        let next = SessionSettings {
            offer: self.offer,
            mac: device.mac,
            mtu_limit: device.mtu_limit,
            queue_limit: device.queue_limit,
        };
        device.mac = agreed.mac.map(Mac);
        (device.mtu_limit, device.queue_limit) = (agreed.mtu_limit, agreed.queue_limit);
        self.next = Some(next);
    }
}

/// Returns the state of a session, whose descriptors go to `put`; `None`, and nothing goes there, if one of them is not among those that can be
/// passed: a front end must not keep the other ports from being handed over.
fn state_of(
    session: &Session,
    put: &mut Put<'_>,
    can_be_passed: &mut dyn FnMut(BorrowedFd<'_>) -> io::Result<bool>,
) -> io::Result<Option<Box<SessionState>>> {
    let mut all = true;
    session.state(&mut |fd, _| {
        all &= can_be_passed(fd)?;
        Ok(0)
    })?;
    if all { Ok(Some(Box::new(session.state(put)?))) } else { Ok(None) }
}

/// Makes the endpoint of a port that another process has had.
fn endpoint(
    config: &VhostUserConfig,
    state: &VhostState,
    fds: &mut Descriptors,
    privileges: &Privileges,
) -> Result<Endpoint, OpenError> {
    let missing = || OpenError::Handed("its socket was not passed".to_owned());
    let listener = |path, fds: &mut Descriptors| {
        let fd = state.listener.and_then(|number| fds.take(number)).ok_or_else(missing)?;
        Ok::<_, OpenError>(Endpoint::Listen(Listener::from_predecessor(fd, path)?))
    };
    match &config.endpoint {
        VhostUserEndpoint::Listen(path) => listener(Some(path.as_path()), fds),
        VhostUserEndpoint::Connect(path) => Ok(Endpoint::Connect(path.clone(), privileges.clone())),
        VhostUserEndpoint::Fd(_) | VhostUserEndpoint::Activation(_) if state.listener.is_some() => {
            listener(None, fds)
        }
        VhostUserEndpoint::Fd(_) | VhostUserEndpoint::Activation(_) => {
            let stream = state.inherited.map(|number| fds.take(number).ok_or_else(missing)).transpose()?;
            Ok(Endpoint::Once(stream.map(Stream::from_fd).transpose()?))
        }
    }
}

/// Makes a port of the state of another process's. It touches no ring, reads nothing and watches nothing until it
/// [takes over](PortControl::take_over).
///
/// # Errors
/// A socket was not passed; or this process lacks what a front end needs, and the other one goes on.
pub(in crate::ports) fn adopt(
    config: &VhostUserConfig,
    state: Box<VhostState>,
    mut fds: Descriptors,
    privileges: &Privileges,
    before: Before,
) -> Result<Plug, OpenError> {
    let endpoint = endpoint(config, &state, &mut fds, privileges)?;
    let (config, removes) = (config.clone(), !privileges.are_elsewhere());
    Ok(Box::new(move |port: &PortConfig, cx: &mut Context<'_>| {
        let mut port = VhostPort::new(port, &config, endpoint, cx)?;
        port.removes = removes;
        port.adopt(&state, &mut fds, before)?;
        Ok(Box::new(port) as Box<dyn PortControl>)
    }))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::Arc;

    use ringferry_sys::epoll::Epoll;
    use ringferry_sys::eventfd::EventId;

    use super::*;
    use crate::config::{Config, PortKind, SwitchConfig};
    use crate::ports::queues::Workers;
    use crate::ports::table::PortTable;

    /// The state of a port may be read long after it was stored, by the process that follows one that was killed.
    #[test]
    fn a_port_is_out_of_service_for_as_long_as_it_was_to_be_however_long_its_state_lies_somewhere() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("a");
        let config = Config::builder().port_flag(&format!("vhost-user:{}", socket.display()));
        let config = config.build().unwrap();
        let (epoll, switch) = (Epoll::new().unwrap(), SwitchConfig::default());
        let mut table = PortTable::new(Arc::new(Workers::start(&switch).unwrap()), &switch);
        let listener = Listener::bind(&socket).unwrap();
        let plug = move |port: &PortConfig, cx: &mut Context<'_>| {
            let PortKind::VhostUser(vhost) = port.kind.clone() else { unreachable!() };
            let mut port = VhostPort::new(port, &vhost, Endpoint::Listen(listener), cx)?;
            port.out_of_service = Some("it has held up a worker".to_owned());
            port.retry_at = Instant::now() + OUT_OF_SERVICE;
            let mut state = port.handed(&mut |_, _| Ok(0)).unwrap();
            let written = serde_json::to_value(&state).unwrap();
            assert!(
                written["quarantine"][0] == "it has held up a worker" && written["quarantine_until"].is_u64(),
                "{written}"
            );
            let now = monotonic();
            let left = state.out_of_service_until.unwrap() - now;
            assert!((1..=OUT_OF_SERVICE.as_nanos() as u64).contains(&left), "{left}");
            let mut adopted = |until| {
                state.out_of_service_until = until;
                port.adopt(&state, &mut Descriptors::default(), Before::Died).unwrap();
                assert_eq!(port.out_of_service.as_deref(), Some("it has held up a worker"));
                port.retry_at.saturating_duration_since(Instant::now())
            };
            assert_eq!(adopted(Some(now)), Duration::ZERO, "it is over");
            assert!(adopted(Some(now + 1_000_000_000)) <= Duration::from_secs(1), "most of it is over");
            assert!(adopted(None) > OUT_OF_SERVICE / 2, "as an earlier program says it");
            assert!(adopted(Some(u64::MAX)) <= OUT_OF_SERVICE, "nonsense");
            Ok(Box::new(port) as Box<dyn PortControl>)
        };
        table.add(config.ports[0].clone(), Box::new(plug), &epoll).unwrap();
    }

    #[test]
    fn l_a_socket_that_the_kernel_does_not_pass_on_costs_its_session_and_not_the_hand_over() {
        let (_front_end, socket) = Stream::pair().unwrap();
        let session = Session::new(socket, Offer::net(0, 1)).unwrap();
        let mut taken = Vec::new();
        let mut state = |refused: bool| {
            taken.clear();
            let mut put = |fd: BorrowedFd<'_>, _: Option<EventId>| {
                taken.push(fd.as_raw_fd());
                Ok(taken.len() as u32 - 1)
            };
            let state = state_of(&session, &mut put, &mut |_| Ok(!refused)).unwrap();
            (state, taken.clone())
        };
        assert_eq!(state(true), (None, Vec::new()));
        let (handed, fds) = state(false);
        assert_eq!((handed.unwrap().socket, fds), (0, vec![session.as_fd().as_raw_fd()]));
        let mut put = |_: BorrowedFd<'_>, _: Option<EventId>| Ok(0);
        let nothing_passes = io::ErrorKind::QuotaExceeded;
        let error = state_of(&session, &mut put, &mut |_| Err(nothing_passes.into())).unwrap_err();
        assert_eq!(error.kind(), nothing_passes, "then no session is given up");
    }
}
