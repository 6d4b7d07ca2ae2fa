//! [`Session`]: the back end of one connection, as a state machine that never blocks.
//!
//! Its owner creates it for each accepted connection and keeps it in its epoll loop beside a
//! [`Device`]. When the session's descriptor is readable the owner calls [`Session::on_readable`],
//! which serves messages and calls the device on the same thread. The session holds what the front
//! end has told it (features, memory map, rings); the device only sees rings that are started,
//! checked and resolved, and never touches one after [`Device::ring_stopped`]. The session ends
//! when `on_readable` returns an error or its owner calls [`Session::disconnect`]; then the owner
//! drops it.
//!
//! Messages may come in any order and any number of times. Three rules keep that safe: a ring
//! starts as soon as everything that it needs is known, and not before; a change to a running ring
//! stops it, is applied, and starts it again at the same position; a message that is refused is
//! counted, logged at a limited rate and reported where the front end asked for that, and the
//! session continues. The session ends only where it cannot continue: when the stream breaks, or
//! when a message is refused whose reply cannot express failure. No other session is affected.
//!
//! Whatever came from the front end (descriptors, mappings, the connection itself) is closed by a
//! [`Closer`], because the front end decides how long closing takes. While that is behind the
//! session reads nothing ([`Progress::behind`]).

mod handover;
mod log;
mod requests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ringferry_memory::words::Area;
use ringferry_memory::{DirtyLog, GuestMemory, MapBudget, MapError, MemoryError, RegionSpec, SharedMem};
use ringferry_ring::Parts;
use ringferry_sys::closer::{Closer, Deferred};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::lent::LentStream;
use ringferry_sys::socket::{PeerCredentials, Stream};
use zerocopy::IntoBytes;

pub use handover::{
    AdoptError, CountersState, InflightState, KickState, LogState, Put, RegionState, RingDescription,
    SessionState, Take,
};

use crate::base;
use crate::inflight::{InflightError, InflightTracking};
use crate::message::{
    BACKEND_CONFIG_CHANGE, F_LOG_ALL, F_PROTOCOL_FEATURES, F_RING_PACKED, FLAG_REPLY, Header,
    InflightDescription, MAX_FDS, MAX_MEM_SLOTS, MAX_VIRTQUEUES, MessageSpec, Needs, ProtocolFeatures, Reply,
    Request, VERSION, bit_numbers,
};
use crate::vring::{Kick, RingError, RingSetup, Vring};
use crate::wire::{Message, Wire, WireError};

/// Number of memory slots that a network device offers. Every slot is a mapping, and a process has
/// room for a few thousand: at this number one front end takes little of what the others need, and
/// QEMU with memory hot-plug uses fewer than ten. DPDK has 8; libvhost-user offers all
/// [`MAX_MEM_SLOTS`].
const NET_MEM_SLOTS: u16 = 32;

/// Most messages served in one call of [`Session::on_readable`]. QEMU sends about 20 in a row per
/// queue pair.
const BURST: usize = 64;

/// Time after which a call of [`Session::on_readable`] serves no further message, so that one front
/// end cannot keep the owner's loop from the others. A message takes microseconds, or a mapping of
/// guest memory some tens of them.
const TURN: Duration = Duration::from_millis(1);

/// Most descriptors that front ends of a port may leave unread in their sockets. An ordinary one reads each answer before it asks again.
const MAX_GIVEN: usize = 8;

/// Most descriptors that front ends of a port are given at once, and how often there may be one more: what they keep of them is this process's memory, some
/// kilobyte each, for as long as they keep it. A front end asks once for each start of its machine.
const GIVEN_BURST: u32 = 32;
const GIVEN_EVERY: Duration = Duration::from_secs(60);

/// Most warnings that the sessions of a port may log per [`WARN_INTERVAL`]; the rest is counted.
const WARN_BURST: u32 = 8;
/// Length of the interval in which they may log [`WARN_BURST`] warnings.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// The device behind a session, which is told what the front end's messages mean.
///
/// Calls come from [`Session::on_readable`] and [`Session::disconnect`] only, on the thread that
/// called those. Features are virtio features without [`F_PROTOCOL_FEATURES`], the bit that
/// vhost-user uses for itself.
pub trait Device {
    /// The driver acknowledged features, which a [`RingSetup`] has, too. The call comes for every
    /// `SET_FEATURES`, also a repeated one. When features other than the log bit change while rings
    /// run, the rings are stopped before this call and started again after it.
    fn features_acked(&mut self, features: u64) {
        let _ = features;
    }

    /// The memory map, which a [`RingSetup`] has, too, changed; `None` when there is none any more.
    /// No ring runs during this call: running rings were stopped (or the session ends, as one that
    /// could not be stopped was [`Unanswered`]), and start again afterwards,
    /// resolved in the new map.
    fn memory_changed(&mut self, memory: Option<Arc<GuestMemory>>) {
        let _ = memory;
    }

    /// A ring starts. [`RingSetup`] says what was checked before.
    fn ring_started(&mut self, index: u16, ring: RingSetup);

    /// The event with which used buffers of a running ring are signalled changed; `None`: the
    /// driver polls.
    fn ring_call_changed(&mut self, index: u16, call: Option<EventFd>);

    /// Several rings start at once, as when the memory map changes.
    fn rings_started(&mut self, rings: Vec<(u16, RingSetup)>) {
        for (index, ring) in rings {
            self.ring_started(index, ring);
        }
    }

    /// A running ring is enabled or disabled. While a ring is disabled, a network device discards
    /// what the guest sends and delivers nothing (vhost-user, "Ring states").
    fn ring_enabled(&mut self, index: u16, enabled: bool);

    /// A running ring stops: for `GET_VRING_BASE`, for a change to it, for a reset, or because the
    /// connection ends. The device must first complete the buffers that it took from the ring. It
    /// returns the ring's position, in the form of [`RingSetup::base`]; from then on it must not
    /// touch the ring's memory, its events, or its part of the in-flight region.
    fn ring_stopped(&mut self, index: u16) -> u16;

    /// Several running rings stop at once. Returns their positions, in the order of `rings`; each is
    /// what [`ring_stopped`](Self::ring_stopped) says.
    ///
    /// # Errors
    /// Something that serves the rings does not answer, and may still touch them for a while. The
    /// session ends, without an answer to the message that stopped them.
    fn rings_stopped(&mut self, rings: &[u16]) -> Result<Vec<u16>, Unanswered> {
        Ok(rings.iter().map(|index| self.ring_stopped(*index)).collect())
    }

    /// Several running rings are enabled or disabled at once; each is what
    /// [`ring_enabled`](Self::ring_enabled) says.
    ///
    /// # Errors
    /// As for [`rings_stopped`](Self::rings_stopped).
    fn rings_enabled(&mut self, rings: &[u16], enabled: bool) -> Result<(), Unanswered> {
        rings.iter().for_each(|index| self.ring_enabled(*index, enabled));
        Ok(())
    }

    /// The dirty log of running rings changed, which a [`RingSetup`] has, too: from now on all writes to the ring and to its buffers
    /// are [marked](DirtyLog::mark) in `log`, and in no other. Returns true once that is so. If it returns false the session stops
    /// the rings, and starts them again with the log in their [`RingSetup::log`]; for a device that offers no
    /// [`ProtocolFeatures::LOG_SHMFD`] this is never called.
    ///
    /// # Errors
    /// As for [`rings_stopped`](Self::rings_stopped).
    fn rings_logged(&mut self, rings: &[u16], log: Option<&Arc<DirtyLog>>) -> Result<bool, Unanswered> {
        let _ = (rings, log);
        Ok(false)
    }

    /// Reads `buf.len()` bytes of configuration space from `offset`; returns false if the device
    /// has none there.
    fn config(&self, offset: usize, buf: &mut [u8]) -> bool {
        let _ = (offset, buf);
        false
    }

    /// Writes `data` to configuration space at `offset`; returns false if it cannot be written
    /// there.
    fn set_config(&mut self, offset: usize, data: &[u8]) -> bool {
        let _ = (offset, data);
        false
    }

    /// The front end set the MTU that the guest is told, in bytes; returns false if the device
    /// cannot carry it.
    fn mtu_set(&mut self, mtu: u16) -> bool {
        let _ = mtu;
        false
    }

    /// A migrated guest with this MAC address now runs behind this device, which should announce it
    /// to the network.
    fn announce(&mut self, mac: [u8; 6]) {
        let _ = mac;
    }

    /// The driver wrote its device status (VIRTIO 1.4, 2.1). No ring runs when it is 0.
    fn status(&mut self, status: u8) {
        let _ = status;
    }

    /// The front end reset the device to its initial state, except for the memory map. All rings
    /// were stopped before.
    fn reset(&mut self) {}
}

/// What serves a device's rings does not answer in time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unanswered(pub String);

/// The features and limits that a back end offers to every front end.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// Virtio features, without [`F_PROTOCOL_FEATURES`], which follows from `protocol`.
    pub features: u64,
    /// Protocol features. If empty, only the messages without [`Needs`] are served.
    pub protocol: ProtocolFeatures,
    /// Number of virtqueues, at most [`MAX_VIRTQUEUES`].
    pub max_queues: u16,
    /// Reply to `GET_QUEUE_NUM`, for a network device the number of queue *pairs*.
    pub queue_num: u16,
    /// Most regions of guest memory, at most [`MAX_MEM_SLOTS`].
    pub max_mem_slots: u16,
}

impl Offer {
    /// Offers what a guest needs to be migrated while it runs: a dirty log ([`Device::rings_logged`], [`RingSetup::log`]).
    #[must_use]
    pub fn with_dirty_log(mut self) -> Offer {
        self.features |= F_LOG_ALL;
        self.protocol |= ProtocolFeatures::LOG_SHMFD;
        self
    }
}

impl Offer {
    /// The protocol features that a network device can offer with this crate.
    pub const NET_PROTOCOL: ProtocolFeatures = ProtocolFeatures::MQ
        .union(ProtocolFeatures::RARP)
        .union(ProtocolFeatures::REPLY_ACK)
        .union(ProtocolFeatures::NET_MTU)
        .union(ProtocolFeatures::BACKEND_REQ)
        .union(ProtocolFeatures::INFLIGHT_SHMFD)
        .union(ProtocolFeatures::RESET_DEVICE)
        .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS)
        .union(ProtocolFeatures::STATUS);

    /// Returns the offer of a network device of `pairs` queue pairs (at most 128). Add
    /// [`ProtocolFeatures::CONFIG`] to `protocol` for front ends that want [`Device::config`]
    /// answered; QEMU's virtio-net does not want it, and warns.
    ///
    /// A device of one pair does not offer `MQ`: cloud-hypervisor compares `GET_QUEUE_NUM` with its
    /// number of virtqueues and would refuse to start with two virtqueues on one pair. Front ends
    /// that are not told the number use one pair.
    pub fn net(features: u64, pairs: u16) -> Offer {
        let pairs = pairs.min(MAX_VIRTQUEUES / 2);
        let mut protocol = Self::NET_PROTOCOL;
        protocol.set(ProtocolFeatures::MQ, pairs > 1);
        Offer { features, protocol, max_queues: pairs * 2, queue_num: pairs, max_mem_slots: NET_MEM_SLOTS }
    }
}

/// The reason why a session ended. By then its rings are stopped and the memory was taken from the
/// device.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The front end closed the connection, or the stream broke.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A message was refused whose reply cannot express failure.
    #[error("{message} cannot be answered: {reason}")]
    Unanswerable {
        /// Name of the message that was refused.
        message: &'static str,
        /// The reason for the refusal.
        reason: Refusal,
    },
    /// The device's rings are served by something that does not answer.
    #[error(transparent)]
    Unanswered(#[from] Unanswered),
    /// A reply came where only requests are expected.
    #[error("a reply came where requests are expected: both ends are back ends")]
    Reply,
}

impl SessionError {
    /// Returns true if the front end closed the connection, which is no fault.
    pub fn is_disconnect(&self) -> bool {
        matches!(self, SessionError::Wire(WireError::Disconnected))
    }
}

/// The reason why a message was refused.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The specification has no message of this number.
    #[error("no such message")]
    Unknown,
    /// The specification has the message, but this crate does not serve it.
    #[error("not supported")]
    Unsupported,
    /// The message needs a feature that was not negotiated.
    #[error("needs a feature that was not agreed on: {0:?}")]
    NotNegotiated(Needs),
    /// The payload's size in bytes does not fit the message.
    #[error("payload of {0} bytes does not fit the message")]
    Size(usize),
    /// The number of file descriptors does not fit the message.
    #[error("{0} file descriptors, which does not fit the message")]
    Descriptors(usize),
    /// The device has no ring of this index.
    #[error("no ring {index}: the device has {rings}")]
    Index {
        /// Index that the message carries.
        index: u64,
        /// Number of rings that the device has.
        rings: usize,
    },
    /// A field has a value that the specification gives no meaning.
    #[error("{field} cannot be {value:#x}")]
    Value {
        /// Name of the field in error messages.
        field: &'static str,
        /// The value that the front end wrote into it.
        value: u64,
    },
    /// The front end acknowledged virtio features that were not offered.
    #[error("features that were not offered: {}", bit_numbers(*.0))]
    Features(u64),
    /// The front end acknowledged protocol features that were not offered.
    #[error("protocol features that were not offered: {0:#x}")]
    Protocol(u64),
    /// The ring's description is invalid.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The memory region cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The memory map would be invalid.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The in-flight region is invalid or cannot be mapped.
    #[error(transparent)]
    Inflight(#[from] InflightError),
    /// The map would have more regions than were offered.
    #[error("more than {0} memory regions")]
    Slots(usize),
    /// The descriptor of a kick, call or error event is not an eventfd.
    #[error("not an eventfd: {0}")]
    Event(io::Error),
    /// The descriptor of a channel is not a connected Unix stream socket, or one of a connection to a socket that listens, such as that of
    /// the session: then the session would hold its own other end, and would not see the front end's death.
    #[error("not an end of a pair of Unix stream sockets")]
    Channel,
    /// The device's implementation refused the request.
    #[error("the device refused")]
    Device,
}

/// The result of one call of [`Session::on_readable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of messages served by the call.
    pub messages: usize,
    /// True if more messages may wait: call again before sleeping, unless the descriptor is polled
    /// level-triggered.
    pub more: bool,
    /// True if messages were left unread because what the front end has sent before is not closed
    /// yet. Poll the descriptor again only after a while, as it stays readable.
    pub behind: bool,
    /// True if the last message made the device wait for what serves its rings, as it stopped,
    /// enabled or disabled running ones. The call has ended with that message; who serves several
    /// sessions should not allow too many of these.
    pub disturbed: bool,
}

/// Counters of a session, from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages that were received, whether served or refused.
    pub messages: u64,
    /// Messages that were refused with a [`Refusal`].
    pub rejected: u64,
    /// Descriptors that were closed because their message takes none, or not so many.
    pub unexpected_fds_closed: u64,
    /// Failed attempts to start a ring that was fully described, for example because its memory was
    /// not mapped.
    pub failed_starts: u64,
}

/// The state of a ring, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingState {
    /// Size of the ring in entries; 0 while unknown.
    pub size: u16,
    /// True while the device owns the ring.
    pub started: bool,
    /// True if the front end enabled the ring.
    pub enabled: bool,
    /// Base at which the ring was last started or stopped, encoded as in `SET_VRING_BASE`.
    pub base: u32,
}

/// The back end of one connection. The [module](self) describes how it is driven.
#[derive(Debug)]
pub struct Session {
    wire: Wire,
    offer: Offer,
    /// `None` until the first `SET_FEATURES`; no ring starts before that.
    features: Option<u64>,
    protocol: ProtocolFeatures,
    /// Unmapped by the closer, once the device has let go of it.
    memory: Option<Deferred<Arc<GuestMemory>>>,
    /// The files of the regions in it, for a [hand-over](SessionState).
    files: Vec<(RegionSpec, Deferred<OwnedFd>)>,
    /// Regions that were added more than once: one entry for each repetition.
    repeated: Vec<RegionSpec>,
    rings: Vec<Vring>,
    /// The in-flight region in which packed rings keep their positions, if the front end gave us
    /// one.
    tracking: Option<Tracking>,
    /// The dirty log.
    log: log::Log,
    /// Kept open because the front end takes its closing for the back end's death, and for [`notify_config_change`](Session::notify_config_change).
    backend_req: Option<Deferred<LentStream>>,
    status: u8,
    closed: bool,
    /// The message in hand has called the device for running rings.
    disturbed: bool,
    /// What that message has found not to answer.
    unanswered: Option<Unanswered>,
    /// Why the memory that the front end has shared last was refused.
    memory_refusal: Option<String>,
    counters: Counters,
    budget: Arc<MapBudget>,
    warnings: Warnings,
    given: Given,
    /// What the log lines have as `port`.
    port: Option<Arc<str>>,
    /// See [`Resources::tracks`].
    tracks: bool,
}

/// The in-flight region of a session, with what is needed to hand it over.
#[derive(Debug)]
struct Tracking {
    map: Deferred<InflightTracking>,
    file: Deferred<OwnedFd>,
    description: InflightDescription,
}

/// The answer to a message that was served.
enum Answer {
    /// Success, which is sent only if the front end asked for it.
    Done,
    /// A reply with this payload.
    Payload(Vec<u8>),
    /// A reply with this payload and the descriptor of this file.
    File(Vec<u8>, SharedMem),
}

impl Session {
    /// Creates a session on a fresh connection, with [`Resources`] of its own, and makes the stream
    /// non-blocking.
    ///
    /// # Errors
    /// Fails if the socket cannot be made non-blocking, which a front end cannot cause.
    pub fn new(stream: Stream, offer: Offer) -> io::Result<Session> {
        Self::with_resources(stream, offer, Resources::default())
    }

    /// Does the same as [`new`](Self::new) with resources that earlier connections of the same peer
    /// have used, too.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_resources(stream: Stream, mut offer: Offer, resources: Resources) -> io::Result<Session> {
        let Resources { closer, memory, warnings, given, port, tracks } = resources;
        offer.max_queues = offer.max_queues.min(MAX_VIRTQUEUES);
        offer.max_mem_slots = offer.max_mem_slots.min(MAX_MEM_SLOTS as u16);
        offer.features &= !F_PROTOCOL_FEATURES;
        Ok(Session {
            wire: Wire::new(stream, closer)?,
            offer,
            features: None,
            protocol: ProtocolFeatures::empty(),
            memory: None,
            files: Vec::new(),
            repeated: Vec::new(),
            rings: std::iter::repeat_with(Vring::default).take(usize::from(offer.max_queues)).collect(),
            tracking: None,
            log: log::Log::default(),
            backend_req: None,
            status: 0,
            closed: false,
            disturbed: false,
            unanswered: None,
            memory_refusal: None,
            counters: Counters::default(),
            budget: memory,
            warnings,
            given,
            port,
            tracks,
        })
    }

    /// Serves the messages that the front end has sent, at least one: until 1 ms or 64 messages are
    /// over, or one has [disturbed](Progress::disturbed) running rings.
    ///
    /// # Errors
    /// The session has ended: its rings are stopped (the device was told) and it can be dropped.
    pub fn on_readable(&mut self, dev: &mut dyn Device) -> Result<Progress, SessionError> {
        if self.closed {
            return Err(WireError::Disconnected.into());
        }
        let result = self.serve_burst(dev);
        if result.is_err() {
            self.disconnect(dev);
        }
        result
    }

    /// Ends the session from this side: stops its rings, takes the memory from the device, and
    /// closes every descriptor but the socket, which ends when the session is dropped. Call it
    /// before dropping a session that has not failed.
    pub fn disconnect(&mut self, dev: &mut dyn Device) {
        if self.closed {
            return;
        }
        self.closed = true;
        self.stop_all(dev);
        self.rings.clear();
        self.files.clear();
        self.tracking = None;
        self.log = log::Log::default();
        self.give_channel_up();
        self.given.settle();
        if let Some(memory) = self.memory.take() {
            dev.memory_changed(None);
            drop(memory); // the device has let go of it, so that it is unmapped here, by the closer
        }
    }

    /// Returns who is at the other end.
    ///
    /// # Errors
    /// None that the front end can cause.
    pub fn peer_credentials(&self) -> io::Result<PeerCredentials> {
        self.wire.stream().peer_credentials()
    }

    /// Returns the virtio features that were negotiated; `None` before `SET_FEATURES`.
    pub fn features(&self) -> Option<u64> {
        self.features.map(|features| features & !F_PROTOCOL_FEATURES)
    }

    /// Returns the protocol features that were negotiated.
    pub fn protocol(&self) -> ProtocolFeatures {
        self.protocol
    }

    /// Returns true if the front end has described a ring and given it a kick, and has shared no memory. A ring without memory cannot start:
    /// the front end either shares some at once, or never will.
    pub fn lacks_memory(&self) -> bool {
        let described = |ring: &Vring| !matches!(ring.kick, Kick::Unset) && ring.geometry.addr.is_some();
        self.memory.is_none() && self.rings.iter().any(described)
    }

    /// Returns why the memory that the front end has shared last is not used; `None` if it is, or none was shared.
    pub fn memory_refusal(&self) -> Option<&str> {
        self.memory_refusal.as_deref()
    }

    /// Returns the guest's memory; `None` before the front end shared any.
    pub fn memory(&self) -> Option<&Arc<GuestMemory>> {
        self.memory.as_deref()
    }

    /// Returns the driver's device status, 0 if the front end does not forward it.
    pub fn status(&self) -> u8 {
        self.status
    }

    /// Returns the state of every ring, in the order of their indices.
    pub fn rings(&self) -> impl ExactSizeIterator<Item = RingState> {
        self.rings.iter().map(|ring| RingState {
            size: ring.geometry.size.unwrap_or(0),
            started: ring.started,
            enabled: ring.enabled,
            base: ring.base.unwrap_or(0),
        })
    }

    /// Returns where the rings lie that are described and lie in the guest's memory.
    pub fn parts(&self) -> impl Iterator<Item = Parts<Area>> {
        let (memory, packed) = (self.memory(), self.packed().unwrap_or(false));
        self.rings.iter().filter_map(move |ring| ring.geometry.resolve(memory?, packed).ok().flatten())
    }

    /// Tells the front end that the [configuration space](Device::config) has changed. Returns false if it takes no such messages (it has not
    /// negotiated `CONFIG`, or has passed no channel), or does not read them. Never waits.
    pub fn notify_config_change(&mut self) -> bool {
        let Some(channel) = &self.backend_req else { return false };
        if !self.protocol().contains(ProtocolFeatures::CONFIG) {
            return false;
        }
        let header = Header { request: BACKEND_CONFIG_CHANGE, flags: VERSION, size: 0 };
        channel.send(header.as_bytes()).is_ok_and(|sent| sent == size_of::<Header>())
    }

    /// Closes the channel with what lies unread in it, of which whoever keeps a copy would be the last to have one.
    fn give_channel_up(&mut self) {
        drop(self.backend_req.take().map(|channel| channel.map(LentStream::give_up)));
    }

    /// Returns true if the front end has closed the connection, whatever it has sent before and has not been read yet.
    pub fn has_hung_up(&self) -> bool {
        self.wire.stream().has_hung_up()
    }

    /// Looks at what no message tells; call it every second or so. A channel that the front end has closed or written to, though nothing is ever
    /// asked on it, is given up: what lies in it may be what keeps the connection open.
    ///
    /// # Errors
    /// The rest of a message has not come for 30 s ([`WireError::RestMissing`]). The session has ended then, as for [`Session::on_readable`].
    pub fn tick(&mut self, now: Instant, dev: &mut dyn Device) -> Result<(), SessionError> {
        if self.backend_req.as_ref().is_some_and(|channel| channel.is_readable()) {
            self.give_channel_up();
        }
        if let Err(error) = self.wire.check(now) {
            self.disconnect(dev);
            return Err(error.into());
        }
        Ok(())
    }

    /// Returns what the session has counted since its start.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    fn serve_burst(&mut self, dev: &mut dyn Device) -> Result<Progress, SessionError> {
        let began = Instant::now();
        let mut progress = Progress { messages: 0, more: true, behind: false, disturbed: false };
        loop {
            progress.behind = self.wire.closer().is_behind();
            if progress.behind {
                return Ok(progress);
            }
            let Some(message) = self.wire.read()? else {
                progress.more = false;
                return Ok(progress);
            };
            self.serve(message, dev)?;
            progress.messages += 1;
            progress.disturbed = std::mem::take(&mut self.disturbed);
            if progress.disturbed || progress.messages == BURST || began.elapsed() >= TURN {
                return Ok(progress);
            }
        }
    }

    fn serve(&mut self, message: Message, dev: &mut dyn Device) -> Result<(), SessionError> {
        let header = message.header;
        self.counters.messages += 1;
        if header.is_reply() {
            return Err(SessionError::Reply);
        }
        let row = MessageSpec::of(header.request);
        tracing::debug!(
            port = self.port.as_deref(),
            name = row.map_or("unknown", |row| row.name),
            number = header.request,
            size = header.size,
            fds = message.fds.len(),
            "request"
        );
        let outcome = match row {
            Some(row) => self.check(row, &message).and_then(|()| self.handle(row.request, message, dev)),
            None => {
                self.counters.unexpected_fds_closed += message.fds.len() as u64;
                Err(Refusal::Unknown)
            }
        };
        // Before the answer, which would say that rings have stopped.
        if let Some(unanswered) = self.unanswered.take() {
            return Err(unanswered.into());
        }
        if let Some(Request::SetMemTable | Request::AddMemReg) = row.map(|row| row.request) {
            self.memory_refusal = outcome.as_ref().err().map(Refusal::to_string);
        }
        match outcome {
            Ok(answer) => self.send_answer(&header, row.map(|row| row.reply), answer),
            Err(reason) => self.refuse(&header, row, reason),
        }
    }

    /// Checks what the table says of a message, before its content is parsed.
    fn check(&mut self, row: &'static MessageSpec, message: &Message) -> Result<(), Refusal> {
        let fds = message.fds.len();
        if !(row.fds.0..=row.fds.1).contains(&fds) {
            self.counters.unexpected_fds_closed += fds as u64;
            return Err(Refusal::Descriptors(fds));
        }
        if !(row.min..=row.max).contains(&message.payload.len()) {
            return Err(Refusal::Size(message.payload.len()));
        }
        if self.is_negotiated(row.needs) { Ok(()) } else { Err(Refusal::NotNegotiated(row.needs)) }
    }

    fn is_negotiated(&self, needs: Needs) -> bool {
        match needs {
            Needs::Nothing => true,
            Needs::ProtocolFeatures => !self.offer.protocol.is_empty(),
            Needs::Offered(feature) => self.offer.protocol.contains(feature),
            Needs::Negotiated(feature) => self.protocol.contains(feature),
            Needs::Virtio(feature) => self.features.is_some_and(|features| features & feature != 0),
        }
    }

    fn send_answer(
        &mut self,
        header: &Header,
        reply: Option<Reply>,
        answer: Answer,
    ) -> Result<(), SessionError> {
        match answer {
            Answer::Payload(payload) => self.reply(header, &payload, &[]),
            Answer::File(payload, file) => self.reply(header, &payload, &[file.fd()]),
            Answer::Done if reply == Some(Reply::Status) || self.wants_ack(header) => {
                self.reply(header, 0u64.as_bytes(), &[])
            }
            Answer::Done => Ok(()),
        }
    }

    fn refuse(
        &mut self,
        header: &Header,
        row: Option<&'static MessageSpec>,
        reason: Refusal,
    ) -> Result<(), SessionError> {
        self.counters.rejected += 1;
        let name = row.map_or("unknown", |row| row.name);
        let port = self.port.as_deref();
        self.warnings
            .warn(port, || tracing::warn!(port, name, number = header.request, %reason, "message refused"));
        match row.map(|row| (row.reply, row.needs)) {
            Some((Reply::Value, _)) => Err(SessionError::Unanswerable { message: name, reason }),
            Some((Reply::Config, _)) => self.reply(header, &[], &[]),
            Some((Reply::Echo, needs)) if self.is_negotiated(needs) => {
                Err(SessionError::Unanswerable { message: name, reason })
            }
            // A front end that may not send the message does not wait for its reply either.
            Some((Reply::Status, needs)) if self.is_negotiated(needs) => {
                self.reply(header, 1u64.as_bytes(), &[])
            }
            _ if self.wants_ack(header) => self.reply(header, 1u64.as_bytes(), &[]),
            _ => Ok(()),
        }
    }

    fn wants_ack(&self, header: &Header) -> bool {
        header.need_reply() && self.protocol.contains(ProtocolFeatures::REPLY_ACK)
    }

    fn reply(&mut self, header: &Header, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SessionError> {
        Ok(self.wire.write(header.request, FLAG_REPLY, payload, fds)?)
    }

    /// Returns whether rings are packed; `None` while features could still decide that.
    fn packed(&self) -> Option<bool> {
        match self.features {
            Some(features) => Some(features & F_RING_PACKED != 0),
            None => (self.offer.features & F_RING_PACKED == 0).then_some(false),
        }
    }

    /// Starts a ring if it is not running and everything that it needs is known.
    fn start(&mut self, index: u16, dev: &mut dyn Device) -> Result<(), Refusal> {
        if let Some(setup) = self.set_up(index)? {
            dev.ring_started(index, setup);
        }
        Ok(())
    }

    /// Resolves a ring that can start now, which counts as started from then on.
    fn set_up(&mut self, index: u16) -> Result<Option<RingSetup>, Refusal> {
        if self.memory.is_none() || self.features.is_none() {
            return Ok(None);
        }
        // A session that is about to end starts nothing.
        if self.rings[usize::from(index)].started || self.unanswered.is_some() || self.is_held(index) {
            return Ok(None);
        }
        if self.tracks && self.tracking.is_none() && self.packed() == Some(true) {
            self.track();
        }
        let (Some(memory), Some(features)) = (&self.memory, self.features) else { return Ok(None) };
        let log = self.dirty_log().cloned();
        let ring = &mut self.rings[usize::from(index)];
        let features = features & !(F_PROTOCOL_FEATURES | F_LOG_ALL);
        match ring.setup(index, memory, features, self.tracking.as_ref().map(|tracking| &*tracking.map), log)
        {
            Ok(Some(setup)) => {
                ring.started = true;
                ring.recover = false;
                ring.base = Some(base::encode(setup.base, setup.packed()));
                tracing::debug!(
                    port = self.port.as_deref(),
                    index,
                    size = setup.parts.size,
                    base = setup.base,
                    enabled = setup.enabled,
                    "ring starts"
                );
                Ok(Some(setup))
            }
            Ok(None) => Ok(None),
            Err(reason) => {
                self.counters.failed_starts += 1;
                Err(reason.into())
            }
        }
    }

    /// Starts every ring that can start; one that cannot stays stopped until its description or the
    /// memory map changes.
    fn start_all(&mut self, dev: &mut dyn Device) {
        let mut starting = Vec::new();
        for index in 0..self.rings.len() as u16 {
            match self.set_up(index) {
                Ok(setup) => starting.extend(setup.map(|setup| (index, setup))),
                Err(reason) => {
                    let port = self.port.as_deref();
                    self.warnings
                        .warn(port, || tracing::warn!(port, index, %reason, "ring cannot be started"));
                }
            }
        }
        if !starting.is_empty() {
            dev.rings_started(starting);
        }
    }

    fn stop(&mut self, index: u16, dev: &mut dyn Device) {
        if self.rings[usize::from(index)].started {
            self.stop_these(&[index], dev);
        }
    }

    fn stop_all(&mut self, dev: &mut dyn Device) {
        let running = (0u16..).zip(&self.rings).filter(|(_, ring)| ring.started);
        let running: Vec<u16> = running.map(|(index, _)| index).collect();
        if !running.is_empty() {
            self.stop_these(&running, dev);
        }
    }

    /// Stops running rings.
    fn stop_these(&mut self, running: &[u16], dev: &mut dyn Device) {
        let packed = self.packed() == Some(true);
        self.disturbed = true;
        let stopped = dev.rings_stopped(running);
        for index in running {
            self.rings[usize::from(*index)].started = false;
        }
        match stopped {
            Ok(positions) => {
                for (index, position) in running.iter().zip(positions) {
                    self.rings[usize::from(*index)].base = Some(base::encode(position, packed));
                    tracing::debug!(port = self.port.as_deref(), index, position, "ring stopped");
                }
            }
            Err(unanswered) => self.unanswered = Some(unanswered),
        }
    }

    /// Changes a ring's description; a running ring is stopped for it and resumes at the same
    /// position.
    fn reconfigure(
        &mut self,
        index: u16,
        dev: &mut dyn Device,
        change: impl FnOnce(&mut Vring),
    ) -> Result<Answer, Refusal> {
        self.stop(index, dev);
        change(&mut self.rings[usize::from(index)]);
        self.start(index, dev)?;
        Ok(Answer::Done)
    }
}

impl AsFd for Session {
    /// Returns the socket, to be polled for reading.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}

/// What a session uses that does not start anew with each connection: the owner of several sessions,
/// one after the other, makes it once and gives each a clone.
#[derive(Clone, Debug)]
pub struct Resources {
    /// Closes whatever comes from the front end.
    pub closer: Closer,
    /// The guest memory that may be mapped.
    pub memory: Arc<MapBudget>,
    /// The warnings that may be logged.
    pub warnings: Warnings,
    /// The descriptors that front ends were sent and have not received.
    pub given: Given,
    /// The name of the port that the front ends connect to, which all log lines of the sessions carry; `None`: they carry
    /// none.
    pub port: Option<Arc<str>>,
    /// Packed rings keep their positions in a region of the session's own where the front end has given none, for a process that goes on
    /// with the [state](SessionState) when this one was killed ([`Session::recover`]).
    pub tracks: bool,
}

impl Default for Resources {
    /// Resources without bounds but for warnings, for who trusts its front ends.
    fn default() -> Self {
        let (closer, warnings, given) = (Closer::new(), Warnings::default(), Given::default());
        Resources { closer, memory: MapBudget::unlimited(), warnings, given, port: None, tracks: false }
    }
}

/// The rate at which sessions log warnings. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Warnings(Arc<Mutex<LogRateLimit>>);

impl Warnings {
    /// Calls `log`, which logs a warning about `port`, unless there were too many of late; what was left out is counted.
    pub fn warn(&self, port: Option<&str>, log: impl FnOnce()) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).warn(port, log);
    }
}

/// Counts the descriptors that front ends were sent, and those that they may not have received. Clones share it.
///
/// The kernel counts what was not received for the user of the sender, and passes none of any process of that user when there are too many. A front end that
/// reads no answers leaves them in its socket, also when it has connected again. What was received stays this process's memory.
#[derive(Clone, Debug, Default)]
pub struct Given(Arc<Mutex<GivenState>>);

#[derive(Debug, Default)]
struct GivenState {
    unread: Vec<Arc<Deferred<Stream>>>,
    /// How many more than [`GIVEN_EVERY`] allows, as of `since`.
    ahead: u32,
    since: Option<Instant>,
}

impl Given {
    /// Counts one more, which is about to be sent on `stream`.
    ///
    /// # Errors
    /// It may not be sent, for this reason.
    fn admit(&self, stream: &Arc<Deferred<Stream>>, now: Instant) -> Result<(), &'static str> {
        self.settle();
        let mut state = self.lock();
        if state.unread.len() >= MAX_GIVEN {
            return Err("the front end leaves those that it was given unread");
        }
        let since = *state.since.get_or_insert(now);
        let whole = now.saturating_duration_since(since).as_secs() / GIVEN_EVERY.as_secs();
        state.ahead = state.ahead.saturating_sub(u32::try_from(whole).unwrap_or(u32::MAX));
        state.since = since.checked_add(GIVEN_EVERY.saturating_mul(u32::try_from(whole).unwrap_or(u32::MAX)));
        if state.ahead >= GIVEN_BURST {
            return Err("the front end was given too many of late");
        }
        state.ahead += 1;
        state.unread.push(Arc::clone(stream));
        Ok(())
    }

    /// Forgets what has been received.
    fn settle(&self) {
        self.lock().unread.retain(|stream| !stream.is_drained());
    }

    fn lock(&self) -> MutexGuard<'_, GivenState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Limits the rate at which sessions log, so that a hostile front end cannot fill the log: a fixed
/// window of [`WARN_INTERVAL`], whose suppressed warnings are counted in the next.
#[derive(Debug, Default)]
struct LogRateLimit {
    since: Option<Instant>,
    count: u32,
}

impl LogRateLimit {
    fn warn(&mut self, port: Option<&str>, log: impl FnOnce()) {
        let now = Instant::now();
        if self.since.is_none_or(|since| now - since >= WARN_INTERVAL) {
            if self.count > WARN_BURST {
                tracing::warn!(port, suppressed = self.count - WARN_BURST, "more messages were refused");
            }
            self.since = Some(now);
            self.count = 0;
        }
        self.count = self.count.saturating_add(1);
        if self.count <= WARN_BURST {
            log();
        }
    }
}

const _: () = assert!(MAX_FDS <= MAX_MEM_SLOTS);

#[cfg(test)]
mod tests {
    use super::*;

    /// Each is memory of this process's for as long as a front end keeps it, also one that has long gone.
    #[test]
    fn cve_2020_10726_a_port_gives_few_in_flight_regions_however_often_it_is_asked() {
        let (given, begin) = (Given::default(), Instant::now());
        let admitted = |minutes: u64| {
            (0..10_000)
                .filter(|_| {
                    // All are received at once.
                    let (_peer, socket) = Stream::pair().unwrap();
                    let stream = Arc::new(Closer::inline().defer(socket));
                    given.admit(&stream, begin + Duration::from_secs(minutes * 60)).is_ok()
                })
                .count()
        };
        assert_eq!(admitted(0), GIVEN_BURST as usize);
        assert_eq!([admitted(1), admitted(1), admitted(3)], [1, 0, 2]);
        assert_eq!(admitted(1000), GIVEN_BURST as usize);
    }

    #[test]
    fn h5_warnings_do_not_start_anew_with_each_connection() {
        let resources = Resources::default();
        let mut lines = 0;
        for _ in 0..1000 {
            let connection = resources.clone();
            connection.warnings.warn(None, || lines += 1);
            let mut limit = resources.warnings.0.lock().unwrap();
            // Whatever time the test takes, it is one interval.
            limit.since = Some(Instant::now());
        }
        assert_eq!(lines, WARN_BURST);
    }
}
