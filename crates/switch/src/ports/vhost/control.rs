//! The control side of a vhost-user port: the socket, the session on it, and the descriptor that epoll watches.
//!
//! The socket outlives sessions: a listener is bound once and never re-bound, and a port that connects
//! tries again for ever. One front end is served at a time; the next waits in the listener's backlog.
//!
//! The port's [`Closer`](ringferry_sys::closer::Closer) closes descriptors and memory that front ends have passed, and its
//! [`Allowance`] limits how often they may disturb the workers. While the closer is behind or the allowance is used up, the port is
//! paused: it reads and accepts nothing, and epoll does not watch it, as its sockets stay readable; it resumes after some time. A port whose worker does not answer loses its session and is out of service until that worker has caught up.
//!
//! ```text
//!   listening / connecting ── accept, connect ──► session ── end of stream, refused message, lost memory ──► ended
//!             ▲                                                                                               │
//!             └──────────────────────────── rings stopped, descriptor unwatched ─────────────────────────────┘
//! ```

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_control::snapshot::{
    FrontEnd, Negotiated, PortSnapshot, PortState, QueueRole, QueueSnapshot, SessionEnd,
};
use ringferry_packet::ether::Mac;
use ringferry_sys::accounts;
use ringferry_sys::closer::{Deferred, LeftBehind};
use ringferry_sys::epoll::Interest;
use ringferry_sys::socket::{Listener, Place, SocketAccess, Stream};
use ringferry_sys::usage::ThreadClock;
use ringferry_sys::watchdog::{HoleWaits, INTERVAL};
use ringferry_vhost_user::WireError;
use ringferry_vhost_user::backend::{Counters, Offer, Put, Resources, Session, SessionError};
use ringferry_vhost_user::message::ProtocolFeatures;
use ringferry_virtio_net::queue_index;
use rustix::io::Errno;

use super::ahead;
use super::allowance::{self, Allowance};
use super::device::{PortDevice, features};
use super::queues::{NewCalls, VhostQueues};
use crate::config::{AccessConfig, DEFAULT_MTU, PortConfig, PortKind, VhostUserConfig, VhostUserEndpoint};
use crate::counters::PortTotals;
use crate::log_limit::{FRONT_END_LINES, LogLimit};
use crate::plane::{HOLES, PAIRS, Placement, PortFault, PortShared, Sleeps, Steering};
use crate::ports::handed::HandedPort;
use crate::ports::passed::Passed;
use crate::ports::queues::{AnyQueues, Workers};
use crate::ports::table::QueueStates;
use crate::ports::xen::MappingBudget;
use crate::ports::{Context, Interface, InterfaceQueues, OpenError, Plug, PortControl, Positions, Task};
use crate::privileged::Privileges;
use crate::rules::Rules;
use crate::snapshot::rules_by_key;

/// Time between attempts to connect. The peer may be a VMM that is just starting: the time is short enough
/// not to be noticed, and long enough not to be a load.
const RETRY: Duration = Duration::from_millis(250);

/// Time between attempts while the helper, which connects, does something else.
const BUSY: Duration = Duration::from_millis(20);

/// How long a descriptor that a front end has passed may take to be closed. While one does, others may wait behind it, and one of those may be what keeps the
/// session open: the front end's own end of the connection, in another socket, say.
const HELD_UP: Duration = Duration::from_secs(30);
/// Closers that are left behind at most, each with what it cannot close. Then no front end is served until one of them can.
const MOST_LEFT_BEHIND: usize = 4;
/// The reason for that.
const UNCLOSED: &str =
    "descriptors that front ends have passed cannot be closed (a socket that lingers, a file of FUSE)";

/// Time after which a paused port checks whether its closer has caught up.
const CATCH_UP: Duration = Duration::from_millis(100);

/// Time for which a port serves no front end after one has tried to hold up a worker. Each attempt costs the
/// others up to one [interval of the watchdog](ringferry_sys::watchdog::INTERVAL).
pub(super) const OUT_OF_SERVICE: Duration = Duration::from_secs(60);

/// Connections behind a session's that are looked at in a second: as many as wait in a socket.
const LOOKS: usize = 16;

/// Most front ends that wait for the end of a session. Others are sent away: what nobody looks at could hold what keeps the session open, its own other end.
const WAITING: usize = 4;

/// So much of a front end that waits may lie unread: less than it says before it has an answer.
const UNREAD: usize = 256;

/// Rings that stopped so long ago were stopped for some time.
const STOPPED: Duration = Duration::from_secs(5);

/// What is said of a front end that has started the device without memory.
const UNSHARED: &str = "the front end has started the device without sharing the guest's memory. QEMU: -object memory-backend-memfd,id=mem,size=SIZE,share=on \
     -machine memory-backend=mem; libvirt: <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>; cloud-hypervisor: --memory \
     size=SIZE,shared=on";

/// How it begins what is said of a port whose socket has gone.
pub(crate) const SOCKET_REMOVED: &str = "the socket was removed";

/// How it begins what is said of one where another file lies now.
pub(crate) const SOCKET_REPLACED: &str = "another file lies in the place of the socket";

/// What is said of a front end whose memory cannot be used, before the reason.
pub(crate) const MEMORY_REFUSED: &str = "the memory that the front end shares cannot be used";

/// The source of front ends.
pub(super) enum Endpoint {
    /// The front end connects to us.
    Listen(Listener),
    /// We connect to the front end's socket.
    Connect(PathBuf, Privileges),
    /// One connection that existed when we started; there is no other.
    Once(Option<Stream>),
}

/// The control side of a vhost-user port.
pub(super) struct VhostPort {
    pub(super) endpoint: Endpoint,
    watched: Watched,
    counters: PortTotals,
    pub(super) session: Option<Session>,
    /// True if its front end has said something. Whoever binds a socket finds out by a connection whether somebody listens there, which is neither
    /// counted nor logged.
    pub(super) heard: bool,
    /// How this thread has slept in the memory of its front end.
    sleeps: Sleeps,
    /// A session that is over, until its descriptor is watched no more.
    ended: Option<Session>,
    /// Counters of all sessions that are over.
    pub(super) past: Counters,
    pub(super) device: PortDevice,
    pub(super) offer: Offer,
    /// Settings that hold from the next session on.
    pub(super) next: Option<SessionSettings>,
    /// Resources that its sessions share: the closer of passed descriptors, the mapping budget and the log
    /// limit.
    pub(super) resources: Resources,
    /// Rate limit on the disturbance of workers.
    allowance: Allowance,
    /// The time until which nothing is read or accepted.
    paused: Option<Instant>,
    /// The reason why no front end is served: the last one's offence, or a late worker. Checked again at
    /// [`retry_at`](Self::retry_at).
    pub(super) out_of_service: Option<String>,
    /// Time of the next attempt to connect or to listen.
    pub(super) retry_at: Instant,
    /// True if the listener could not accept: it is not watched for a while, as it stays readable.
    accept_failed: bool,
    /// True if the reason for the last failure to connect or accept was logged.
    failure_logged: bool,
    /// Other front ends, which have connected while there is a session and wait for its end, in their order. They are accepted so that one that goes is seen to go: whoever
    /// only looks whether somebody listens, as a second switch does, waits for nothing. When the switch is replaced they are left out, and connect again.
    waiting: VecDeque<Deferred<Stream>>,
    /// Closers that are held up by what earlier sessions have left.
    left_behind: LeftBehind,
    /// True if that was logged.
    waiting_logged: bool,
    /// Why the switch has ended the last connection, and when, if the port has not been up since.
    end: Option<(String, Instant)>,
    /// True if it was logged that the rings have stopped.
    stop_logged: bool,
    /// The place of the socket, as it was last seen, once its file is not there any more, which was logged.
    socket: Place,
    /// Sockets that were made in the place of such a one.
    pub(super) sockets: u16,
    /// True if the session lacked memory at the last check.
    memory_lacks: bool,
    /// True if the session lacks memory, which was logged.
    unshared: bool,
    /// Once it has taken over: it removes the file of its socket at its end.
    pub(super) removes: bool,
    /// True if the port is to be removed and takes no further front end.
    retired: bool,
}

/// The settings on which a front end agrees with the port when it connects.
pub(super) struct SessionSettings {
    pub(super) offer: Offer,
    pub(super) mac: Option<Mac>,
    pub(super) mtu_limit: Option<u16>,
    pub(super) queue_limit: Option<u16>,
}

impl SessionSettings {
    fn of(port: &PortConfig, config: &VhostUserConfig) -> Self {
        let mut offer = Offer::net(features(config.features).bits(), PAIRS).with_dirty_log();
        if config.mac.is_some() {
            offer.protocol |= ProtocolFeatures::CONFIG;
        }
        Self { offer, mac: config.mac, mtu_limit: port.mtu, queue_limit: config.queue_size }
    }
}

/// The descriptor that epoll watches for the port.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Watched {
    /// None: the port waits for a deadline only.
    Nothing,
    /// The listener, for new connections.
    Listener,
    /// The session's socket, for messages.
    Session,
}

/// Makes the socket of a port that is added to a running switch, for [`open`] in another process.
///
/// # Errors
/// See [`OpenError`].
pub(in crate::ports) fn acquire(config: &VhostUserConfig) -> Result<Vec<OwnedFd>, OpenError> {
    match &config.endpoint {
        VhostUserEndpoint::Listen(path) => Ok(vec![listen(path, &config.access)?.into_fd()]),
        VhostUserEndpoint::Connect(_) => Ok(Vec::new()),
        VhostUserEndpoint::Fd(_) | VhostUserEndpoint::Activation(_) => Err(OpenError::OnlyAtStart),
    }
}

/// Makes the socket of a port.
fn listen(path: &Path, access: &AccessConfig) -> Result<Listener, OpenError> {
    let number = |name: &Option<String>, find: fn(&str) -> Result<u32, String>| {
        name.as_deref().map(find).transpose().map_err(OpenError::Account)
    };
    let access = SocketAccess {
        owner: number(&access.owner, accounts::user)?,
        group: number(&access.group, accounts::group)?,
        mode: access.mode,
    };
    Ok(Listener::bind_for(path, access)?)
}

/// Opens the socket of a port.
///
/// # Errors
/// See [`OpenError`].
pub(in crate::ports) fn open(config: &VhostUserConfig, passed: &mut Passed) -> Result<Plug, OpenError> {
    let endpoint = match &config.endpoint {
        VhostUserEndpoint::Listen(path) => Endpoint::Listen(opened_listener(path, config, passed)?),
        VhostUserEndpoint::Connect(path) => Endpoint::Connect(path.clone(), passed.privileges().clone()),
        VhostUserEndpoint::Fd(fd) => {
            let inherited = |source| OpenError::Inherited { fd: *fd, source };
            inherited_endpoint(passed.number(*fd)?).map_err(inherited)?
        }
        VhostUserEndpoint::Activation(name) => Endpoint::Listen(Listener::from_fd(passed.socket(name)?)?),
    };
    let config = config.clone();
    Ok(Box::new(move |port, cx| Ok(Box::new(VhostPort::new(port, &config, endpoint, cx)?))))
}

/// Makes the listener of a port of what the helper has opened, or of a socket made here.
fn opened_listener(
    path: &Path,
    config: &VhostUserConfig,
    passed: &mut Passed,
) -> Result<Listener, OpenError> {
    if let Some(opened) = passed.take_opened() {
        return Ok(Listener::from_fd_at(opened.into_iter().next().ok_or(OpenError::NoRoom)?, path)?);
    }
    let mut listener = listen(path, &config.access)?;
    if passed.privileges().are_elsewhere() {
        listener.leave_file();
    }
    Ok(listener)
}

/// Makes an endpoint of an inherited socket, which listens or is connected.
fn inherited_endpoint(fd: OwnedFd) -> io::Result<Endpoint> {
    if rustix::net::sockopt::socket_acceptconn(&fd)? {
        Ok(Endpoint::Listen(Listener::from_fd(fd).map_err(io::Error::other)?))
    } else {
        Ok(Endpoint::Once(Some(Stream::from_fd(fd)?)))
    }
}

impl VhostPort {
    pub(super) fn new(
        port: &PortConfig,
        config: &VhostUserConfig,
        endpoint: Endpoint,
        cx: &mut Context<'_>,
    ) -> Result<Self, OpenError> {
        let id = cx.allocate()?;
        // Rules are set before there is a port, so that no frame comes first.
        cx.workers.set_rules(id, &port.rules);
        let resources = Resources {
            memory: cx.memory.of_port(),
            port: Some(port.name.as_str().into()),
            tracks: cx.tracks,
            ..Resources::default()
        };
        // While there is memory for a thread.
        resources.closer.begin();
        let counters = PortTotals::new(cx.workers.count());
        let (shared, reporter) = (Arc::new(PortShared::default()), cx.workers.reporter());
        let calls = Arc::new(NewCalls::default());
        let steering = Steering::Pairs(Arc::clone(&shared));
        let placement = Placement { steering, owners: port.owners(), queues: PAIRS };
        cx.workers.add_port(id, &port.name, &counters, placement, |_, handle| {
            let (shared, calls, reporter) = (Arc::clone(&shared), Arc::clone(&calls), Arc::clone(&reporter));
            AnyQueues::Vhost(VhostQueues::new(
                handle.clone(),
                shared,
                calls,
                reporter,
                resources.closer.clone(),
            ))
        });
        let SessionSettings { offer, mac, mtu_limit, queue_limit } = SessionSettings::of(port, config);
        let device = PortDevice {
            mac,
            rules: port.rules.clone(),
            mtu_limit,
            mtu: mtu_limit.unwrap_or(DEFAULT_MTU),
            queue_limit,
            ..PortDevice::new(
                Arc::clone(cx.workers),
                id,
                port.name.clone(),
                LogLimit::new(FRONT_END_LINES),
                counters.of(0),
                shared,
                calls,
            )
        };
        Ok(Self {
            endpoint,
            watched: Watched::Nothing,
            counters,
            session: None,
            heard: false,
            sleeps: Sleeps::default(),
            ended: None,
            past: Counters::default(),
            device,
            offer,
            next: None,
            resources,
            allowance: Allowance::default(),
            paused: None,
            out_of_service: None,
            retry_at: Instant::now(),
            accept_failed: false,
            failure_logged: false,
            waiting: VecDeque::new(),
            left_behind: LeftBehind::at_most(MOST_LEFT_BEHIND),
            end: None,
            stop_logged: false,
            waiting_logged: false,
            socket: Place::Own,
            sockets: 0,
            memory_lacks: false,
            unshared: false,
            removes: false,
            retired: false,
        })
    }

    /// Watches the descriptor that the port waits for now. If it cannot be watched (the user's limit of
    /// watched descriptors, say) the port alone goes down, and the next tick tries again.
    fn settle(&mut self, cx: &Context<'_>) {
        if let Err(error) = self.rewatch(cx) {
            if self.device.limit.allows(&self.device.name) {
                tracing::error!(
                    port = self.device.name,
                    "cannot wait for the port's socket: {error}; trying again"
                );
            }
            self.close();
        }
    }

    fn rewatch(&mut self, cx: &Context<'_>) -> io::Result<()> {
        if let Some(session) = self.ended.take() {
            if self.watched == Watched::Session {
                self.watched = Watched::Nothing;
                cx.unwatch(&session)?;
            }
            self.part_with(session);
        }
        let now = match (&self.session, &self.endpoint) {
            _ if self.paused.is_some() => Watched::Nothing,
            (Some(_), _) => Watched::Session,
            (None, Endpoint::Listen(_))
                if !self.accept_failed && self.out_of_service.is_none() && !self.retired =>
            {
                Watched::Listener
            }
            (None, _) => Watched::Nothing,
        };
        if self.watched == now {
            return Ok(());
        }
        match (std::mem::replace(&mut self.watched, Watched::Nothing), &self.session, &self.endpoint) {
            (Watched::Listener, _, Endpoint::Listen(listener)) => cx.unwatch(listener)?,
            (Watched::Session, Some(session), _) => cx.unwatch(session)?,
            _ => {}
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

    /// Makes one step: accepts, connects, or serves messages.
    fn step(&mut self) {
        let now = Instant::now();
        if self.paused.is_some_and(|until| now < until) {
            return;
        }
        // The next session is not to wait for what an earlier one has left.
        let can_close = self.session.is_some() || self.left_behind.relieve(&mut self.resources.closer);
        self.paused =
            if self.resources.closer.is_behind() { Some(now + CATCH_UP) } else { self.allowance.wait(now) };
        if self.paused.is_some() {
            return;
        }
        if self.out_of_service.is_some() {
            if now < self.retry_at {
                return;
            }
            if self.device.workers.is_late() {
                self.retry_at = now + RETRY;
                return;
            }
            self.out_of_service = None;
        }
        if self.session.is_some() {
            self.serve_session();
        } else if !self.retired {
            if can_close {
                self.connect();
            } else {
                self.take_out_of_service(UNCLOSED);
            }
        }
    }

    /// Serves the messages that wait in the socket.
    fn serve_session(&mut self) {
        let Some(session) = &mut self.session else { return };
        let before = used();
        let waits = HoleWaits::of_this_thread();
        waits.iter().for_each(HoleWaits::begin);
        let served = session.on_readable(&mut self.device);
        let looks = waits.as_ref().map(HoleWaits::lap).unwrap_or_default();
        waits.iter().for_each(HoleWaits::end);
        self.sleeps.add(looks.holes);
        // Also the turn that ends it.
        let disturbed = served.as_ref().is_ok_and(|progress| progress.disturbed);
        let price = allowance::price(disturbed, used().saturating_sub(before) + looks.blocked * INTERVAL);
        self.allowance.take(price, Instant::now());
        let is_silent = session.counters().messages == 0
            && served.as_ref().map_or_else(SessionError::is_disconnect, |_| true);
        if !is_silent && !std::mem::replace(&mut self.heard, true) {
            if self.device.limit.allows(&self.device.name) {
                let pid = session.peer_credentials().ok().and_then(|peer| peer.pid);
                tracing::info!(port = self.device.name, pid, "a front end has connected");
            }
            self.device.counters.connections.add(1);
        }
        match served {
            Ok(progress) => {
                if progress.behind {
                    self.paused = Some(Instant::now() + CATCH_UP);
                }
            }
            Err(error) => return self.session_failed(&error),
        }
        if self.sleeps.are_too_much() {
            self.take_out_of_service(HOLES);
        }
    }

    /// Ends a session that has failed, and says so.
    fn session_failed(&mut self, error: &SessionError) {
        if !error.is_disconnect() {
            self.end = Some((error.to_string(), Instant::now()));
        } else if self.heard {
            // What ended an earlier one is not why nobody is connected now.
            self.end = None;
        }
        if self.heard && self.device.limit.allows_reason(&self.device.name, error) {
            if error.is_disconnect() {
                tracing::info!(port = self.device.name, "the front end has disconnected");
            } else {
                tracing::warn!(port = self.device.name, "the connection is closed: {error}");
            }
        }
        self.close();
    }

    /// Lets go of a session that is over, of which its front end is told. One that has a million wait for that makes it long, and pays for it.
    fn part_with(&mut self, session: Session) {
        let before = used();
        drop(session);
        self.allowance.take(allowance::price(false, used().saturating_sub(before)), Instant::now());
    }

    /// Ends the session of a front end that has tried to hold up others, and serves none for a while.
    fn take_out_of_service(&mut self, why: &str) {
        // Without a limit, which its front end may have used up for this: it comes once in that time.
        let (port, seconds) = (&self.device.name, OUT_OF_SERVICE.as_secs());
        tracing::warn!(port, "the front end is disconnected, and none is served for {seconds} s: {why}");
        self.close();
        self.end = Some((why.to_owned(), Instant::now()));
        self.retry_at = Instant::now() + OUT_OF_SERVICE;
        self.out_of_service = Some(why.to_owned());
    }

    /// Accepts a front end, or connects to it.
    fn connect(&mut self) {
        let stream = match &mut self.endpoint {
            Endpoint::Listen(listener) => match self.waiting.pop_front() {
                Some(waiting) => Ok(Some(waiting.into_inner())),
                None => listener.accept(),
            },
            Endpoint::Once(stream) => Ok(stream.take()),
            Endpoint::Connect(path, privileges) => {
                if Instant::now() < self.retry_at {
                    return;
                }
                privileges.connect(&self.device.name, path).map(Some)
            }
        };
        self.accept_failed = false;
        self.apply_next();
        match stream.and_then(|stream| {
            stream
                .map(|stream| Session::with_resources(stream, self.offer, self.resources.clone()))
                .transpose()
        }) {
            Ok(Some(session)) => {
                (self.heard, self.sleeps) = (false, Sleeps::default());
                self.device.session = self.device.session.wrapping_add(1);
                self.session = Some(session);
                self.failure_logged = false;
                self.waiting_logged = false;
            }
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // The privileged helper is busy: that says nothing of a front end.
                self.retry_at = Instant::now() + BUSY;
            }
            Err(error) => {
                self.retry_at = Instant::now() + RETRY;
                self.accept_failed = matches!(self.endpoint, Endpoint::Listen(_));
                let remedy = match Errno::from_io_error(&error) {
                    Some(Errno::MFILE) => {
                        ": raise the limit of open files (ulimit -n, or LimitNOFILE= of the systemd unit)"
                    }
                    _ => "",
                };
                if self.accept_failed {
                    self.end = Some((format!("it cannot be accepted ({error}){remedy}"), Instant::now()));
                }
                if std::mem::replace(&mut self.failure_logged, true) {
                    return;
                }
                let peer = self.peer();
                if self.accept_failed {
                    tracing::warn!(
                        port = self.device.name,
                        "cannot accept a front end at {peer} ({error}){remedy}; trying again"
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

    /// Puts settings into force that were to hold from the next session on, as there is none now.
    fn apply_next(&mut self) {
        let Some(SessionSettings { offer, mac, mtu_limit, queue_limit }) = self.next.take() else { return };
        self.offer = offer;
        let mtu = mtu_limit.unwrap_or(DEFAULT_MTU);
        let device = &mut self.device;
        (device.mac, device.mtu_limit, device.mtu, device.queue_limit) = (mac, mtu_limit, mtu, queue_limit);
    }

    /// Logs once for each session that its front end has started the device without memory, and what to do about it. It is the commonest
    /// mistake of all, and VMMs say nothing of it.
    fn check_shared(&mut self) {
        // Why memory was refused is in the log already.
        let lacks = self
            .session
            .as_ref()
            .is_some_and(|session| session.lacks_memory() && session.memory_refusal().is_none());
        // A front end that is in the middle of its messages has shared some by the next check.
        let lacked = std::mem::replace(&mut self.memory_lacks, lacks);
        if lacks && lacked && !std::mem::replace(&mut self.unshared, true) {
            tracing::warn!(port = self.device.name, "no packet can pass: {UNSHARED}");
        }
        self.unshared &= lacks;
    }

    /// Time since the front end has stopped its rings; `None` if one of them runs, or none ever did.
    fn stopped_for(&self) -> Option<Duration> {
        let session = self.session.as_ref()?;
        let runs = session.rings().into_iter().any(|ring| ring.started);
        self.device.stopped.filter(|_| !runs).map(|stopped| stopped.elapsed())
    }

    /// Logs that the front end has stopped its rings, and forgets how the last connection ended once this one carries packets.
    fn look_at_stopped(&mut self) {
        if self.state() == PortState::Up {
            self.end = None;
        }
        // A guest that boots stops them for a moment, as when its firmware hands the device over.
        let stopped = self.stopped_for().is_some_and(|time| time >= STOPPED);
        if stopped
            && !std::mem::replace(&mut self.stop_logged, true)
            && self.device.limit.allows(&self.device.name)
        {
            tracing::info!(
                port = self.device.name,
                "the front end has stopped its rings: the guest is paused or shut down, its link is off, or its driver has let go of the device"
            );
        }
        self.stop_logged &= stopped;
    }

    /// Ends a session of which something cannot be closed: nobody knows then what keeps it open.
    fn check_closer(&mut self) {
        if self.session.is_none() || self.resources.closer.held_up() < HELD_UP {
            return;
        }
        if self.device.limit.allows(&self.device.name) {
            tracing::warn!(port = self.device.name, "the connection is closed: {UNCLOSED}");
        }
        self.close();
        self.end = Some((UNCLOSED.to_owned(), Instant::now()));
    }

    /// Ends the session if the guest's memory is gone, or its dirty log: the front end shrank the file.
    fn check_memory(&mut self) {
        let memory = self.device.memory.as_ref().is_some_and(|memory| memory.is_lost());
        let log = self.session.as_ref().and_then(Session::dirty_log).is_some_and(|log| log.is_lost());
        if memory || log {
            if self.device.limit.allows(&self.device.name) {
                let what = if memory { "guest memory" } else { "the dirty log" };
                tracing::warn!(
                    port = self.device.name,
                    "the connection is closed: {what} was truncated, or no (huge) page was left for it"
                );
            }
            self.close();
        }
    }

    /// Logs once that the file of the socket was removed: connected front ends stay, and no other can come.
    fn check_socket(&mut self) {
        let Endpoint::Listen(listener) = &self.endpoint else { return };
        let place = match listener.place() {
            Place::Own => {
                if self.socket != Place::Own && listener.is_in_its_place() {
                    self.socket = Place::Own;
                    tracing::info!(
                        port = self.device.name,
                        socket = self.peer(),
                        "its socket is where it was"
                    );
                }
                return;
            }
            place => place,
        };
        if std::mem::replace(&mut self.socket, place) == Place::Own
            && let Some(fault) = self.socket_fault()
        {
            tracing::warn!(port = self.device.name, socket = self.peer(), "{fault}");
        }
    }

    /// Says why nobody can connect to the socket any more, if that is so.
    fn socket_fault(&self) -> Option<String> {
        match self.socket {
            Place::Own => None,
            Place::Empty => Some(format!(
                "{SOCKET_REMOVED}, so no front end can connect any more; `ringferry ctl reload` makes it anew"
            )),
            Place::Taken => Some(format!(
                "{SOCKET_REPLACED}, {}, so no front end can connect any more; once that is gone `ringferry ctl reload` makes the socket anew",
                self.peer()
            )),
        }
    }

    /// Finds out whether another front end waits for the end of this session, and logs that once for each session. That front end has connected, and
    /// nothing tells it why it gets no answer.
    fn look_for_waiting(&mut self) {
        self.waiting.retain(|waiting| may_wait(waiting));
        if let (Some(_), Endpoint::Listen(listener)) = (&self.session, &self.endpoint) {
            for _ in 0..LOOKS {
                if self.resources.closer.is_behind() {
                    break;
                }
                let Ok(Some(next)) = listener.accept() else { break };
                let next = self.resources.closer.defer(next);
                if self.waiting.len() < WAITING && next.set_nonblocking(true).is_ok() && may_wait(&next) {
                    self.waiting.push_back(next);
                }
            }
        }
        if self.waiting.is_empty() || std::mem::replace(&mut self.waiting_logged, true) {
            return;
        }
        if self.device.limit.allows(&self.device.name) {
            tracing::warn!(
                port = self.device.name,
                "another front end has connected to {} and waits until this one has disconnected",
                self.peer()
            );
        }
    }

    /// Ends the session, if there is one.
    fn close(&mut self) {
        if let Some(mut session) = self.session.take() {
            session.disconnect(&mut self.device);
            self.past = sum(self.past, session.counters());
            self.ended = Some(session);
            let now = Instant::now();
            if self.device.reset() {
                self.allowance.take(1, now);
            }
            // Who waits has waited.
            self.retry_at = if self.waiting.is_empty() { now + RETRY } else { now };
            (self.memory_lacks, self.unshared) = (false, false);
            self.out_of_service = self.device.unanswered.take().map(|why| why.to_string());
        }
    }

    /// Returns whether packets flow, as far as the control plane knows.
    fn state(&self) -> PortState {
        let Some(session) = &self.session else {
            if self.out_of_service.is_some() {
                return PortState::Down;
            }
            return match self.endpoint {
                Endpoint::Listen(_) => PortState::Listening,
                Endpoint::Connect(..) | Endpoint::Once(Some(_)) => PortState::Connecting,
                Endpoint::Once(None) => PortState::Down,
            };
        };
        if self.unshared {
            return PortState::NoMemory;
        }
        let mut runs = [false; 2];
        for (index, ring) in (0..).zip(session.rings()) {
            runs[usize::from(queue_index::is_transmitq(index))] |= ring.started && ring.enabled;
        }
        if runs == [true; 2] { PortState::Up } else { PortState::Down }
    }

    /// Returns the reason why no front end, or no other one, is served although one might be there.
    fn unserved(&self) -> Option<String> {
        if self.out_of_service.is_some() {
            return self.out_of_service.clone();
        }
        if self.unshared {
            return Some(UNSHARED.to_owned());
        }
        // A guest whose rings have run goes on without memory that is plugged in later; one that has only a part of its memory at its start does not get that far.
        let lacks = |session: &&Session| {
            session.memory().is_none() || !session.rings().into_iter().any(|ring| ring.started)
        };
        let unusable = self.session.as_ref().filter(lacks);
        if let Some(why) = unusable.and_then(Session::memory_refusal) {
            return Some(format!("{MEMORY_REFUSED}: {why}"));
        }
        if self.resources.closer.is_behind() {
            return Some(
                "what front ends have passed cannot be closed yet; reading goes on when it is".to_owned(),
            );
        }
        if let Some(why) = self.session.as_ref().and_then(Session::unlogged) {
            return Some(format!("no queue is served while the guest is migrated: {why}"));
        }
        self.socket_fault()
    }

    /// Returns who is connected.
    fn front_end(&self) -> Option<FrontEnd> {
        let peer = self.session.as_ref()?.peer_credentials().ok()?;
        let mapped_bytes = self.resources.memory.taken();
        Some(FrontEnd { pid: peer.pid, user: peer.uid, heard: self.heard, mapped_bytes })
    }

    /// Returns the counters of all sessions so far, by stable name.
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

    /// Describes the peer's socket, for display.
    fn peer(&self) -> String {
        match &self.endpoint {
            Endpoint::Listen(listener) => listener
                .path()
                .map_or_else(|| "inherited socket".to_owned(), |path| path.display().to_string()),
            Endpoint::Connect(path, _) => path.display().to_string(),
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
        if self.paused.is_some() {
            return self.paused;
        }
        let tries = match self.endpoint {
            Endpoint::Listen(_) => {
                self.accept_failed || self.out_of_service.is_some() || !self.waiting.is_empty()
            }
            Endpoint::Connect(..) => true,
            Endpoint::Once(ref stream) => stream.is_some(),
        };
        (self.session.is_none() && !self.retired && (tries || self.out_of_service.is_some()))
            .then_some(self.retry_at)
    }

    fn fault(&mut self, fault: &PortFault, cx: &mut Context<'_>) -> bool {
        if fault.port != self.device.id {
            return false;
        }
        if self.session.is_some() && fault.session.is_none_or(|session| session == self.device.session) {
            self.take_out_of_service(&fault.why);
            self.settle(cx);
        }
        true
    }

    fn tick(&mut self, _: &PortConfig, cx: &mut Context<'_>) {
        // What a front end that has gone has left unread is of no use, and may be read too rarely for another one to wait for that.
        let is_gone = |session: &Session| self.paused.is_some() && session.has_hung_up();
        if self.session.as_ref().is_some_and(is_gone) {
            self.session_failed(&WireError::Disconnected.into());
        }
        if let Some(Err(error)) =
            self.session.as_mut().map(|session| session.tick(Instant::now(), &mut self.device))
        {
            self.session_failed(&error);
        }
        self.check_memory();
        self.check_closer();
        self.check_shared();
        self.check_socket();
        self.look_for_waiting();
        self.look_at_stopped();
        self.device.limit.settle(&self.device.name);
        self.settle(cx);
    }

    fn retire(&mut self, cx: &mut Context<'_>) {
        self.retired = true;
        self.settle(cx);
    }

    fn count_up(&self) -> usize {
        usize::from(self.state() == PortState::Up)
    }

    fn has_session(&self) -> bool {
        self.session.is_some()
    }

    fn look_at_memory(&mut self, cx: &mut Context<'_>) {
        self.check_memory();
        self.settle(cx);
    }

    fn has_lost_socket(&self) -> bool {
        self.socket != Place::Own
    }

    fn listen_again(
        &mut self,
        port: &PortConfig,
        passed: &mut Passed,
        cx: &mut Context<'_>,
    ) -> Result<(), OpenError> {
        let PortKind::VhostUser(config) = &port.kind else { return Ok(()) };
        let VhostUserEndpoint::Listen(path) = &config.endpoint else { return Ok(()) };
        let listener = opened_listener(path, config, passed)?;
        if let (Watched::Listener, Endpoint::Listen(lost)) = (self.watched, &self.endpoint) {
            self.watched = Watched::Nothing;
            let _ = cx.unwatch(lost);
        }
        if let Endpoint::Listen(lost) = std::mem::replace(&mut self.endpoint, Endpoint::Listen(listener)) {
            lost.close_by(&self.resources.closer);
        }
        self.socket = Place::Own;
        self.sockets = self.sockets.wrapping_add(1);
        self.settle(cx);
        Ok(())
    }

    fn change(&mut self, _: &PortConfig, now: &PortConfig) -> Result<(), OpenError> {
        let PortKind::VhostUser(config) = &now.kind else { return Ok(()) };
        self.next = Some(SessionSettings::of(now, config));
        if self.session.is_none() {
            self.apply_next();
        }
        Ok(())
    }

    fn set_rules(&mut self, rules: &Rules, workers: &Workers) {
        workers.set_rules(self.device.id, rules);
        self.device.rules = rules.clone();
    }

    fn set_link(&mut self, _: crate::fdb::PortId, up: bool) -> bool {
        self.device.link_up = up;
        self.session.as_mut().is_some_and(Session::notify_config_change)
    }

    fn interfaces(&self) -> Vec<Interface<'_>> {
        let PortDevice { id, name, shared, .. } = &self.device;
        vec![Interface { id: *id, name, queues: InterfaceQueues::Pairs(shared), counters: &self.counters }]
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
            fault: self.unserved(),
            peer: self.peer(),
            mtu: self.device.mtu,
            mac: None,
            queues: Vec::new(),
            counters: self.counters.by_name(),
            drops: self.counters.drops_by_name(),
            rules: rules_by_key(&config.rules),
            pairs: Vec::new(),
            rates: Vec::new(),
            another_waits: self.session.is_some() && !self.waiting.is_empty(),
            ended: self
                .end
                .as_ref()
                .map(|(why, when)| SessionEnd { why: why.clone(), seconds: when.elapsed().as_secs() }),
            stopped_seconds: self.stopped_for().map(|time| time.as_secs()),
            front_end: self.front_end(),
        };
        snapshot.counters.extend(self.protocol_counters().map(|(name, count)| (name.to_owned(), count)));
        let rings = self.session.iter().flat_map(Session::rings);
        for (index, ring) in (0u16..).zip(rings).filter(|(_, ring)| ring.size > 0) {
            let live = states.remove(&(self.device.id, index));
            let broken = live.as_ref().and_then(|live| live.broken.as_deref());
            let broken = broken.or_else(|| self.device.refusal(index)).map(str::to_owned);
            if broken.is_some() {
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
                broken,
                available: live.as_ref().and_then(|live| live.available),
                stalled: None,
                grants: None,
            });
        }
        vec![snapshot]
    }

    fn generation(&self) -> (u64, u64) {
        self.generation_of_state()
    }

    fn can_be_kept(&self) -> bool {
        self.session.as_ref().is_none_or(|session| !session.has_unread_descriptors())
    }

    fn hand_over(&self, put: &mut Put<'_>) -> io::Result<HandedPort> {
        Ok(HandedPort::VhostUser(Box::new(self.handed(put)?)))
    }

    fn begin_to_suspend(&mut self) {
        if let Some(session) = &self.session {
            let running = (0..).zip(session.rings()).filter(|(_, ring)| ring.started);
            let running: Vec<u16> = running.map(|(index, _)| index).collect();
            if !running.is_empty() {
                self.device.begin_to_stop(&running);
            }
        }
    }

    fn suspend(&mut self) -> Result<Positions, String> {
        let Some(session) = &mut self.session else { return Ok(Positions::new()) };
        let suspended = session.suspend(&mut self.device).map(|()| session.positions());
        suspended.map_err(|unanswered| {
            self.close();
            unanswered.to_string()
        })
    }

    fn resume(&mut self) {
        // The guest has not moved.
        self.device.announced = Some(Instant::now());
        if let Some(session) = &mut self.session {
            session.resume(&mut self.device);
        }
    }

    fn ahead(&self) -> Option<Task> {
        let session = self.session.as_ref()?;
        let (memory, rings) = (Arc::clone(session.memory()?), session.parts().collect::<Vec<_>>());
        Some(Box::new(move |enough| ahead::map(&memory, &rings, enough)))
    }

    fn take_over(&mut self, positions: &Positions, _: &Workers) {
        if let Endpoint::Listen(listener) = &mut self.endpoint {
            listener.keep(self.removes);
        }
        if let Some(session) = &mut self.session {
            session.set_positions(positions);
        }
        self.resume();
    }

    fn recover(&mut self, _: &Workers) {
        if let Endpoint::Listen(listener) = &mut self.endpoint {
            listener.keep(self.removes);
        }
        let Some(session) = &mut self.session else { return };
        let recovered = session.recover();
        // Also of one that ends the front end is to be told.
        match recovered {
            Ok(()) => self.resume(),
            Err(error) => {
                let port = &self.device.name;
                tracing::warn!(
                    port,
                    "the front end has to connect again, as its rings cannot go on: {error}"
                );
                session.keep();
                self.close();
            }
        }
    }

    fn let_go(&mut self) {
        if let Endpoint::Listen(listener) = &mut self.endpoint {
            listener.let_go();
        }
        if let Some(session) = &mut self.session {
            session.let_go();
        }
    }

    fn remove(&mut self, cx: &mut Context<'_>) {
        self.close();
        // The ended session's descriptor is watched no more.
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
        // The closer closes the listener, with the connections that wait and the unread bytes in them.
        if let Endpoint::Listen(listener) = std::mem::replace(&mut self.endpoint, Endpoint::Once(None)) {
            listener.close_by(&self.resources.closer);
        }
    }
}

/// Returns true if a front end may wait for the end of a session: it is there, and has sent no more than the questions that all begin with. Descriptors that lay
/// unread with it could be what keeps the session open, or the front end itself.
fn may_wait(stream: &Stream) -> bool {
    if stream.has_hung_up() {
        return false;
    }
    let Ok(unread) = stream.unread() else { return false };
    match stream.peek(&mut [0; UNREAD]) {
        // A byte that was sent out of band hides what is behind it.
        Ok(seen) => (1..UNREAD).contains(&seen) && seen as u64 >= unread,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

/// The processor time that this thread has used.
fn used() -> Duration {
    ThreadClock::current().ok().and_then(ThreadClock::used).unwrap_or_default()
}

/// Adds the counters of two sessions.
fn sum(one: Counters, other: Counters) -> Counters {
    Counters {
        messages: one.messages + other.messages,
        rejected: one.rejected + other.rejected,
        unexpected_fds_closed: one.unexpected_fds_closed + other.unexpected_fds_closed,
        failed_starts: one.failed_starts + other.failed_starts,
    }
}

#[cfg(test)]
mod tests {
    use ringferry_sys::epoll::Epoll;

    use super::*;
    use crate::config::{Config, SwitchConfig};
    use crate::ports::table::PortTable;

    #[test]
    fn h5_a_port_that_has_used_up_its_allowance_waits_for_the_time() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("a");
        let config =
            Config::builder().port_flag(&format!("vhost-user:{}", socket.display())).build().unwrap();
        let epoll = Epoll::new().unwrap();
        let switch = SwitchConfig::default();
        let mut table = PortTable::new(Arc::new(Workers::start(&switch).unwrap()), &switch);
        let listener = Listener::bind(&socket).unwrap();
        let plug = move |port: &PortConfig, cx: &mut Context<'_>| {
            let PortKind::VhostUser(vhost) = port.kind.clone() else { unreachable!() };
            let mut port = VhostPort::new(port, &vhost, Endpoint::Listen(listener), cx)?;
            (0..100_000).for_each(|_| port.allowance.take(1, Instant::now()));
            Ok(Box::new(port) as Box<dyn PortControl>)
        };
        table.add(config.ports[0].clone(), Box::new(plug), &epoll).unwrap();
        let _peer = Stream::connect(&socket).unwrap();
        table.begin(&epoll);
        // The listener is not watched, so no thread spins, and it comes back by itself.
        let mut events = ringferry_sys::epoll::EventBuf::with_capacity(8);
        assert_eq!(epoll.wait(&mut events, Some(Duration::ZERO)).unwrap(), 0);
        assert!(table.deadline().is_some_and(|due| due > Instant::now() + Duration::from_secs(600)));
        assert_eq!(table.snapshots()[0].counters["connections"], 0);
    }
    #[test]
    fn a_socket_that_was_removed_is_said_for_as_long_as_it_is_missed() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("a");
        let config =
            Config::builder().port_flag(&format!("vhost-user:{}", socket.display())).build().unwrap();
        let (epoll, switch) = (Epoll::new().unwrap(), SwitchConfig::default());
        let mut table = PortTable::new(Arc::new(Workers::start(&switch).unwrap()), &switch);
        let PortKind::VhostUser(vhost) = &config.ports[0].kind else { unreachable!() };
        table.add(config.ports[0].clone(), open(vhost, &mut Passed::default()).unwrap(), &epoll).unwrap();
        table.begin(&epoll);
        let mut fault = || {
            table.tick(&epoll);
            table.snapshots()[0].fault.clone().unwrap_or_default()
        };
        assert_eq!(fault(), "");
        std::fs::remove_file(&socket).unwrap();
        for _ in 0..2 {
            assert!(fault().starts_with("the socket was removed"));
        }
        std::fs::write(&socket, "").unwrap();
        assert!(fault().starts_with("another file lies in the place of the socket"));
        std::fs::remove_file(&socket).unwrap();
        assert!(fault().starts_with("the socket was removed"));
    }
}
