//! The back end: one connection of one front end, as a state machine that never blocks.
//!
//! A [`Session`] owns what the front end said: features, memory map, rings. Its owner owns the
//! [`Device`] and an epoll loop; when the session's descriptor is readable it calls
//! [`Session::on_readable`], which serves messages and tells the device what they mean. The device
//! sees rings only started, checked and resolved, and never after [`Device::ring_stopped`].
//!
//! Messages may come in any order and any number of times. Three things keep that safe:
//! a ring is started when, and as soon as, everything it needs has been said; a change under a
//! running ring stops it, is applied, and starts it again where it was; a message that is refused
//! is counted, logged at a limited rate and reported where the front end asked for that, and the
//! session goes on. Only what leaves no way to go on (a broken stream, or a refused message whose
//! reply has no way to say so) ends the session, and never anything else.

mod requests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_memory::{GuestMemory, MapError, MemoryError, SharedMem};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use zerocopy::IntoBytes;

use crate::base;
use crate::inflight::{InflightError, Tracking};
use crate::message::{
    F_PROTOCOL_FEATURES, F_RING_PACKED, FLAG_REPLY, Header, MAX_FDS, MAX_MEM_SLOTS, MAX_VIRTQUEUES, Needs,
    ProtocolFeatures, Reply, Row, bit_numbers,
};
use crate::vring::{RingError, RingSetup, Vring};
use crate::wire::{Incoming, Wire, WireError};

/// Memory slots a network device offers. Every slot is a mapping, and a process has room for a few
/// thousand: at this number one front end takes little of what the others need, and QEMU with memory
/// hot-plug uses fewer than ten. DPDK has 8; libvhost-user offers all [`MAX_MEM_SLOTS`].
const NET_MEM_SLOTS: u16 = 32;

/// Messages served in one call of [`Session::on_readable`], so that one front end cannot keep the
/// owner's loop from the others. QEMU sends about 20 in a row per queue pair.
const BURST: usize = 64;

/// Warnings one session may log per [`WARN_INTERVAL`]; the rest is counted.
const WARN_BURST: u32 = 8;
/// See [`WARN_BURST`].
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// What a session's owner does with what the front end says.
///
/// Calls come from [`Session::on_readable`] and [`Session::disconnect`] only, on the thread that
/// called those. Features are virtio features; the bit that vhost-user borrowed for itself
/// ([`F_PROTOCOL_FEATURES`]) is not among them.
pub trait Device {
    /// `SET_FEATURES`, also when repeated. When features other than the log bit change under
    /// running rings, the rings are stopped before this call and started again after it.
    fn features_acked(&mut self, features: u64);

    /// A new memory map; `None` when there is none any more. No ring runs during this call:
    /// running ones were stopped, and start again afterwards, resolved in the new map.
    fn memory_changed(&mut self, memory: Option<Arc<GuestMemory>>);

    /// A ring starts. See [`RingSetup`] for what is guaranteed.
    fn ring_started(&mut self, index: u16, ring: RingSetup);

    /// Another event to signal used buffers of a running ring with; `None`: the front end polls.
    fn ring_call_changed(&mut self, index: u16, call: Option<EventFd>);

    /// A running ring is enabled or disabled. While a ring is disabled, a network device discards
    /// what the guest sends and delivers nothing (vhost-user, "Ring states").
    fn ring_enabled(&mut self, index: u16, enabled: bool);

    /// A running ring stops: for `GET_VRING_BASE`, for a change under it, for a reset, or because
    /// the front end went away. Buffers taken from the ring must be completed first. Returns where
    /// the ring stands, as [`RingSetup::base`] has it; from then on nobody touches the ring's memory,
    /// its events, or its part of the in-flight region.
    fn ring_stopped(&mut self, index: u16) -> u16;

    /// Reads configuration space at `offset`; false where there is none.
    fn config(&self, offset: usize, buf: &mut [u8]) -> bool {
        let _ = (offset, buf);
        false
    }

    /// Writes configuration space at `offset`; false where it cannot be written.
    fn set_config(&mut self, offset: usize, data: &[u8]) -> bool {
        let _ = (offset, data);
        false
    }

    /// The MTU the guest is told; false when the device cannot carry it.
    fn mtu_set(&mut self, mtu: u16) -> bool {
        let _ = mtu;
        false
    }

    /// A migrated guest, with this MAC address, is here now: tell the network.
    fn announce(&mut self, mac: [u8; 6]) {
        let _ = mac;
    }

    /// The driver's device status (VIRTIO 1.4, 2.1). No ring runs when it is 0.
    fn status(&mut self, status: u8) {
        let _ = status;
    }

    /// Back to the initial state, except for the memory map. All rings were stopped.
    fn reset(&mut self) {}
}

/// What a back end offers to front ends.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// Virtio features, without [`F_PROTOCOL_FEATURES`], which follows from `protocol`.
    pub features: u64,
    /// Protocol features; none: only the oldest messages are served.
    pub protocol: ProtocolFeatures,
    /// Virtqueues, at most [`MAX_VIRTQUEUES`].
    pub max_queues: u16,
    /// What `GET_QUEUE_NUM` says: for a network device the number of queue *pairs*.
    pub queue_num: u16,
    /// Regions of guest memory, at most [`MAX_MEM_SLOTS`].
    pub max_mem_slots: u16,
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

    /// A network device of `pairs` queue pairs (at most 128). Add [`ProtocolFeatures::CONFIG`] to
    /// `protocol` for front ends that want [`Device::config`] answered; QEMU's virtio-net does not,
    /// and warns.
    ///
    /// A device of one pair does not offer `MQ`: cloud-hypervisor compares `GET_QUEUE_NUM` with its
    /// number of virtqueues and would not start with two where one pair is there. Front ends that
    /// are not told the number use one pair.
    pub fn net(features: u64, pairs: u16) -> Offer {
        let pairs = pairs.min(MAX_VIRTQUEUES / 2);
        let mut protocol = Self::NET_PROTOCOL;
        protocol.set(ProtocolFeatures::MQ, pairs > 1);
        Offer { features, protocol, max_queues: pairs * 2, queue_num: pairs, max_mem_slots: NET_MEM_SLOTS }
    }
}

/// Why a session is over. Rings are stopped and memory is given back already.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The stream is at its end or broken.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A message that had to be answered with a value could not be.
    #[error("{message} cannot be answered: {reason}")]
    Unanswerable {
        /// Name of the message.
        message: &'static str,
        /// Why it was refused.
        reason: Refusal,
    },
    /// A reply came where requests are expected.
    #[error("a reply came where requests are expected: both ends are back ends")]
    Reply,
}

impl SessionError {
    /// Whether the front end simply went away.
    pub fn is_disconnect(&self) -> bool {
        matches!(self, SessionError::Wire(WireError::Disconnected))
    }
}

/// Why a message was refused.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// Not in the specification.
    #[error("no such message")]
    Unknown,
    /// In the specification, but not served here.
    #[error("not supported")]
    Unsupported,
    /// The feature that opens the message is missing.
    #[error("needs a feature that was not agreed on: {0:?}")]
    Closed(Needs),
    /// Wrong payload size.
    #[error("payload of {0} bytes does not fit the message")]
    Size(usize),
    /// Wrong number of descriptors.
    #[error("{0} file descriptors, which does not fit the message")]
    Descriptors(usize),
    /// There is no such ring.
    #[error("no ring {index}: the device has {rings}")]
    Index {
        /// The ring asked for.
        index: u64,
        /// Rings there are.
        rings: usize,
    },
    /// A field has a value without meaning.
    #[error("{field} cannot be {value:#x}")]
    Value {
        /// Name of the field.
        field: &'static str,
        /// What the front end wrote into it.
        value: u64,
    },
    /// Features that were not offered.
    #[error("features that were not offered: {}", bit_numbers(*.0))]
    Features(u64),
    /// Protocol features that were not offered.
    #[error("protocol features that were not offered: {0:#x}")]
    Protocol(u64),
    /// The ring cannot be as described.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The region cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The map is impossible.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The in-flight region cannot be used.
    #[error(transparent)]
    Inflight(#[from] InflightError),
    /// More regions than were offered.
    #[error("more than {0} memory regions")]
    Slots(usize),
    /// What came for a kick, call or error event is no event.
    #[error("not an eventfd: {0}")]
    Event(io::Error),
    /// What came for a channel is no socket.
    #[error("not a connected Unix stream socket")]
    Channel,
    /// The device said no.
    #[error("the device refused")]
    Device,
}

/// What one call of [`Session::on_readable`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Messages served.
    pub messages: usize,
    /// There may be more: call again before sleeping, unless the descriptor is polled
    /// level-triggered.
    pub more: bool,
}

/// What happened on a session so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages received.
    pub messages: u64,
    /// Messages refused.
    pub rejected: u64,
    /// Descriptors closed because their message takes none, or not so many.
    pub unexpected_fds_closed: u64,
    /// Times a ring could not be started (again) because its memory was not there.
    pub failed_starts: u64,
}

/// The state of a ring, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingState {
    /// Entries; 0 while unknown.
    pub size: u16,
    /// Whether the device has it.
    pub started: bool,
    /// Whether the front end enabled it.
    pub enabled: bool,
    /// Where it was when it was last started or stopped, as `SET_VRING_BASE` has it.
    pub base: u32,
}

/// One connection. See the [module](self) for how it is driven.
#[derive(Debug)]
pub struct Session {
    wire: Wire,
    offer: Offer,
    /// `None` until the first `SET_FEATURES`: no ring starts before.
    features: Option<u64>,
    protocol: ProtocolFeatures,
    memory: Option<Arc<GuestMemory>>,
    /// Regions that were added more than once, once for each time more.
    repeated: Vec<ringferry_memory::RegionSpec>,
    rings: Vec<Vring>,
    /// Where packed rings keep their positions, if the front end gave us a region for it.
    tracking: Option<Tracking>,
    /// Kept open because the front end takes its closing for our end.
    backend_req: Option<Stream>,
    status: u8,
    closed: bool,
    counters: Counters,
    warnings: Warnings,
}

/// How a served message is answered.
enum Answer {
    /// With success, if the front end asked.
    Done,
    /// With this payload.
    Payload(Vec<u8>),
    /// With this payload and this file.
    File(Vec<u8>, SharedMem),
}

impl Session {
    /// A session on a fresh connection.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking; none that a front end can cause.
    pub fn new(stream: Stream, mut offer: Offer) -> io::Result<Session> {
        offer.max_queues = offer.max_queues.min(MAX_VIRTQUEUES);
        offer.max_mem_slots = offer.max_mem_slots.min(MAX_MEM_SLOTS as u16);
        offer.features &= !F_PROTOCOL_FEATURES;
        Ok(Session {
            wire: Wire::new(stream)?,
            offer,
            features: None,
            protocol: ProtocolFeatures::empty(),
            memory: None,
            repeated: Vec::new(),
            rings: std::iter::repeat_with(Vring::default).take(usize::from(offer.max_queues)).collect(),
            tracking: None,
            backend_req: None,
            status: 0,
            closed: false,
            counters: Counters::default(),
            warnings: Warnings::default(),
        })
    }

    /// Serves what the front end has sent, at most a bounded number of messages.
    ///
    /// # Errors
    /// The session is over: its rings are stopped (the device was told) and it can be dropped.
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

    /// Ends the session from this side: stops its rings, takes the memory from the device, closes
    /// every descriptor but the socket, which goes when the session is dropped. Call it before
    /// dropping a session that has not failed.
    pub fn disconnect(&mut self, dev: &mut dyn Device) {
        if self.closed {
            return;
        }
        self.closed = true;
        self.stop_all(dev);
        self.rings.clear();
        self.tracking = None;
        self.backend_req = None;
        if self.memory.take().is_some() {
            dev.memory_changed(None);
        }
    }

    /// The virtio features agreed on, once they are.
    pub fn features(&self) -> Option<u64> {
        self.features.map(|features| features & !F_PROTOCOL_FEATURES)
    }

    /// The protocol features agreed on.
    pub fn protocol(&self) -> ProtocolFeatures {
        self.protocol
    }

    /// The guest's memory, once it is known.
    pub fn memory(&self) -> Option<&Arc<GuestMemory>> {
        self.memory.as_ref()
    }

    /// The driver's device status, 0 where the front end does not tell.
    pub fn status(&self) -> u8 {
        self.status
    }

    /// The rings in the order of their indices.
    pub fn rings(&self) -> impl ExactSizeIterator<Item = RingState> {
        self.rings.iter().map(|ring| RingState {
            size: ring.geometry.size.unwrap_or(0),
            started: ring.started,
            enabled: ring.enabled,
            base: ring.base.unwrap_or(0),
        })
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    fn serve_burst(&mut self, dev: &mut dyn Device) -> Result<Progress, SessionError> {
        for messages in 0..BURST {
            match self.wire.read()? {
                Some(message) => self.serve(message, dev)?,
                None => return Ok(Progress { messages, more: false }),
            }
        }
        Ok(Progress { messages: BURST, more: true })
    }

    fn serve(&mut self, message: Incoming, dev: &mut dyn Device) -> Result<(), SessionError> {
        let header = message.header;
        self.counters.messages += 1;
        if header.is_reply() {
            return Err(SessionError::Reply);
        }
        let row = Row::of(header.request);
        tracing::debug!(
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
        match outcome {
            Ok(answer) => self.answer(&header, row.map(|row| row.reply), answer),
            Err(reason) => self.refuse(&header, row, reason),
        }
    }

    /// Everything the table says of a message, before its content is looked at.
    fn check(&mut self, row: &'static Row, message: &Incoming) -> Result<(), Refusal> {
        let fds = message.fds.len();
        if !(row.fds.0..=row.fds.1).contains(&fds) {
            self.counters.unexpected_fds_closed += fds as u64;
            return Err(Refusal::Descriptors(fds));
        }
        if !(row.min..=row.max).contains(&message.payload.len()) {
            return Err(Refusal::Size(message.payload.len()));
        }
        if self.is_open(row.needs) { Ok(()) } else { Err(Refusal::Closed(row.needs)) }
    }

    fn is_open(&self, needs: Needs) -> bool {
        match needs {
            Needs::Nothing => true,
            Needs::ProtocolFeatures => !self.offer.protocol.is_empty(),
            Needs::Offered(feature) => self.offer.protocol.contains(feature),
            Needs::Negotiated(feature) => self.protocol.contains(feature),
            Needs::Virtio(feature) => self.features.is_some_and(|features| features & feature != 0),
        }
    }

    fn answer(&mut self, header: &Header, reply: Option<Reply>, answer: Answer) -> Result<(), SessionError> {
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
        row: Option<&'static Row>,
        reason: Refusal,
    ) -> Result<(), SessionError> {
        self.counters.rejected += 1;
        let name = row.map_or("unknown", |row| row.name);
        self.warnings.warn(|| tracing::warn!(name, number = header.request, %reason, "message refused"));
        match row.map(|row| (row.reply, row.needs)) {
            Some((Reply::Value, _)) => Err(SessionError::Unanswerable { message: name, reason }),
            Some((Reply::Config, _)) => self.reply(header, &[], &[]),
            // A front end that may not send the message does not wait for its reply either.
            Some((Reply::Status, needs)) if self.is_open(needs) => self.reply(header, 1u64.as_bytes(), &[]),
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

    /// Whether rings are packed; `None` while that is open.
    fn packed(&self) -> Option<bool> {
        match self.features {
            Some(features) => Some(features & F_RING_PACKED != 0),
            None => (self.offer.features & F_RING_PACKED == 0).then_some(false),
        }
    }

    /// Starts a ring if it is not running and all it needs has been said.
    fn start(&mut self, index: u16, dev: &mut dyn Device) -> Result<(), Refusal> {
        let (Some(memory), Some(features)) = (&self.memory, self.features) else { return Ok(()) };
        let ring = &mut self.rings[usize::from(index)];
        if ring.started {
            return Ok(());
        }
        match ring.setup(index, memory, features & !F_PROTOCOL_FEATURES, self.tracking.as_ref()) {
            Ok(Some(setup)) => {
                ring.started = true;
                ring.recover = false;
                ring.base = Some(base::encode(setup.base, setup.packed()));
                tracing::debug!(
                    index,
                    size = setup.parts.size,
                    base = setup.base,
                    enabled = setup.enabled,
                    "ring starts"
                );
                dev.ring_started(index, setup);
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(reason) => {
                self.counters.failed_starts += 1;
                Err(reason.into())
            }
        }
    }

    /// Starts every ring that can be; one that cannot stays stopped until its description or the
    /// memory map changes.
    fn start_all(&mut self, dev: &mut dyn Device) {
        for index in 0..self.rings.len() as u16 {
            if let Err(reason) = self.start(index, dev) {
                self.warnings.warn(|| tracing::warn!(index, %reason, "ring cannot be started"));
            }
        }
    }

    fn stop(&mut self, index: u16, dev: &mut dyn Device) {
        let packed = self.packed() == Some(true);
        let ring = &mut self.rings[usize::from(index)];
        if std::mem::take(&mut ring.started) {
            let position = dev.ring_stopped(index);
            ring.base = Some(base::encode(position, packed));
            tracing::debug!(index, position, "ring stopped");
        }
    }

    fn stop_all(&mut self, dev: &mut dyn Device) {
        for index in 0..self.rings.len() as u16 {
            self.stop(index, dev);
        }
    }

    /// Changes a ring's description; a running ring is stopped for it and resumes where it was.
    fn change(
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
    /// The socket, to be polled for reading.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}

/// Keeps a hostile front end from filling the log.
#[derive(Debug, Default)]
struct Warnings {
    since: Option<Instant>,
    count: u32,
}

impl Warnings {
    fn warn(&mut self, log: impl FnOnce()) {
        let now = Instant::now();
        if self.since.is_none_or(|since| now - since >= WARN_INTERVAL) {
            if self.count > WARN_BURST {
                tracing::warn!(suppressed = self.count - WARN_BURST, "more messages were refused");
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
