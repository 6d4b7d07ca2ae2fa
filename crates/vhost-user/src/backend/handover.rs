//! Handing a session over to another process, in which it goes on: its state as data ([`SessionState`]), and a session made of
//! that.
//!
//! The front end notices nothing. Its connection, with what lies unread in it, the events of its rings and the files of its memory are open
//! files, which the successor gets as descriptors. The rest is said in numbers. The owner of a session that runs calls
//!
//! 1. [`Session::state`] while rings still run, as often as it likes, for the successor to [map the memory](Session::adopt) before
//!    anything is stopped;
//! 2. [`Session::suspend`], which stops the rings, and [`Session::positions`];
//! 3. [`Session::let_go`] once the successor has taken over, or [`Session::resume`] if it has not after all.
//!
//! The successor gives the positions to what it has adopted ([`Session::set_positions`]) and calls [`Session::resume`]. Until then the front end learns nothing of it: dropping
//! what was adopted leaves the connection to the other process. If the front end has
//! said anything in between, which [`Session::generation`] tells, what was adopted is out of date, and it adopts the state anew.
//!
//! The state is not trusted: all that a front end's messages would be refused for is refused here, too. A ring that is described so that it
//! cannot start is not started.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringferry_memory::{GuestMemory, MapError, Region, RegionSpec};
use ringferry_sys::closer::{Closer, Deferred};
use ringferry_sys::eventfd::{EventFd, EventId};
use ringferry_sys::lent::LentStream;
use ringferry_sys::socket::Stream;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::log::Log;
use super::{Counters, Device, Offer, Refusal, Resources, Session, Unanswered};
use crate::inflight::{self, InflightError};
use crate::message::{InflightDescription, LogBase, MAX_FDS, ProtocolFeatures, VringAddr};
use crate::vring::{Geometry, Kick, RingEvent, check_addr, check_num};
use crate::wire::Partial;

/// Takes a descriptor along, with the mark of an event, and returns the number by which the state refers to it.
pub type Put<'a> = dyn FnMut(BorrowedFd<'_>, Option<EventId>) -> io::Result<u32> + 'a;

/// Returns the descriptor of a number, the first time that it is asked for, with the mark that it had, if that is known.
pub type Take<'a> = dyn FnMut(u32) -> Option<(OwnedFd, Option<EventId>)> + 'a;

/// The state of a session. Descriptors are numbers that [`Put`] has given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionState {
    /// The connection.
    pub socket: u32,
    /// What has been received of the next message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub received: Vec<u8>,
    /// The descriptors that came with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub received_fds: Vec<u32>,
    /// Features and protocol features that it was offered.
    #[serde(default)]
    pub offered: Option<(u64, u64)>,
    /// Features of the last `SET_FEATURES`, as it came; absent: there was none.
    pub features: Option<u64>,
    /// Protocol features that were negotiated.
    pub protocol: u64,
    /// The memory map.
    pub memory: Vec<RegionState>,
    /// Regions that were added more than once: one entry for each repetition.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repeated: Vec<RegionState>,
    /// The rings that anything is known of.
    pub rings: Vec<RingDescription>,
    /// The in-flight region.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inflight: Option<InflightState>,
    /// The dirty log.
    #[serde(default)]
    pub log: LogState,
    /// The channel for the back end's own requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend_req: Option<u32>,
    /// The driver's device status.
    pub status: u8,
    /// What the session has counted, by stable name.
    pub counters: CountersState,
}

/// A region of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionState {
    /// See [`RegionSpec::guest_addr`].
    pub guest_addr: u64,
    /// See [`RegionSpec::size`].
    pub size: u64,
    /// See [`RegionSpec::user_addr`].
    pub user_addr: u64,
    /// See [`RegionSpec::mmap_offset`].
    pub mmap_offset: u64,
    /// Its file; absent for a repetition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<u32>,
}

/// A ring as the front end has described it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingDescription {
    /// Its index.
    pub index: u16,
    /// Its size in entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u16>,
    /// Its user addresses, as in `SET_VRING_ADDR`: flags, descriptors, used, available, log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addr: Option<(u32, u64, u64, u64, u64)>,
    /// The base at which it starts, as in `SET_VRING_BASE`. That of a running ring is where it last started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u32>,
    /// The position in the in-flight region takes precedence over `base`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recover: bool,
    /// It has a kick: a number, or none if the device polls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kick: Option<KickState>,
    /// The event that tells the driver of used buffers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<u32>,
    /// The event that tells the driver that the ring is broken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub err: Option<u32>,
    /// It is enabled.
    pub enabled: bool,
}

/// The kick of a ring that may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KickState {
    /// The device polls the ring.
    Poll,
    /// The device waits for this event.
    Event(u32),
}

/// An in-flight region, as in `SET_INFLIGHT_FD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InflightState {
    /// Its file.
    pub file: u32,
    /// See [`InflightDescription::mmap_size`].
    pub mmap_size: u64,
    /// See [`InflightDescription::mmap_offset`].
    pub mmap_offset: u64,
    /// See [`InflightDescription::num_queues`].
    pub num_queues: u16,
    /// See [`InflightDescription::queue_size`].
    pub queue_size: u16,
}

/// What is known of the dirty log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogState {
    /// Nothing.
    #[default]
    Unset,
    /// It lies in this file.
    Mapped {
        /// The file.
        file: u32,
        /// Size in bytes.
        size: u64,
        /// Offset in the file.
        offset: u64,
    },
    /// It could not be mapped, for this reason.
    Unusable(String),
}

/// [`Counters`] as data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CountersState {
    /// See [`Counters::messages`].
    pub messages: u64,
    /// See [`Counters::rejected`].
    pub rejected: u64,
    /// See [`Counters::unexpected_fds_closed`].
    pub unexpected_fds_closed: u64,
    /// See [`Counters::failed_starts`].
    pub failed_starts: u64,
}

impl From<Counters> for CountersState {
    fn from(counters: Counters) -> Self {
        let Counters { messages, rejected, unexpected_fds_closed, failed_starts } = counters;
        Self { messages, rejected, unexpected_fds_closed, failed_starts }
    }
}

impl From<CountersState> for Counters {
    fn from(state: CountersState) -> Self {
        // Of numbers that nobody can have counted to, the largest is far enough from the end to go on counting.
        let [messages, rejected, unexpected_fds_closed, failed_starts] =
            [state.messages, state.rejected, state.unexpected_fds_closed, state.failed_starts]
                .map(|count| count.min(1 << 49));
        Self { messages, rejected, unexpected_fds_closed, failed_starts }
    }
}

/// The reason why a session cannot be taken over. Its connection is closed then, as are all its descriptors.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// A descriptor was not passed, or is another thing than it should be.
    #[error("the descriptor of {0} is missing or of another kind")]
    Descriptor(&'static str),
    /// No front end could have brought a session into this state.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The system has no memory or descriptors left.
    #[error(transparent)]
    Os(#[from] io::Error),
}

impl AdoptError {
    /// Returns true if this process lacks address space, memory or descriptors: with more of them the session could be taken over.
    pub fn is_lack(&self) -> bool {
        let lacks = |error: Errno| matches!(error, Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::AGAIN);
        match self {
            AdoptError::Os(error) => Errno::from_io_error(error).is_some_and(lacks),
            AdoptError::Refused(Refusal::Map(error) | Refusal::Inflight(InflightError::Map(error))) => {
                matches!(error, MapError::Os(error) if lacks(*error))
            }
            AdoptError::Descriptor(_) | AdoptError::Refused(_) => false,
        }
    }
}

impl RegionState {
    fn of(spec: &RegionSpec, file: Option<u32>) -> RegionState {
        let RegionSpec { guest_addr, size, user_addr, mmap_offset } = *spec;
        RegionState { guest_addr, size, user_addr, mmap_offset, file }
    }

    fn spec(&self) -> RegionSpec {
        let RegionState { guest_addr, size, user_addr, mmap_offset, .. } = *self;
        RegionSpec { guest_addr, size, user_addr, mmap_offset }
    }
}

impl RingDescription {
    fn addresses(&self) -> Option<VringAddr> {
        let (flags, desc, used, avail, log) = self.addr?;
        Some(VringAddr { index: self.index.into(), flags, desc, used, avail, log })
    }
}

impl Session {
    /// Returns a number that changes whenever the front end has said anything, and when its channel is [given up](Self::tick): what [`state`](Self::state) has
    /// returned holds as long as it is the same, but for the positions of rings.
    pub fn generation(&self) -> u64 {
        // A message is at most 2^13 bytes long, and there are never 2^50 of them.
        let said = self.counters.messages << 1 | u64::from(self.backend_req.is_some());
        said << 13 | self.wire.partial().0.len() as u64
    }

    /// Returns true if descriptors have come with half a message: what they are of is not known before it is complete.
    pub fn has_unread_descriptors(&self) -> bool {
        !self.wire.partial().1.is_empty()
    }

    /// Returns the session's state, whose descriptors go to `put`. Nothing changes.
    ///
    /// # Errors
    /// Those of `put`.
    pub fn state(&self, put: &mut Put<'_>) -> io::Result<SessionState> {
        let (received, fds) = self.wire.partial();
        let mut rings = Vec::new();
        for (index, ring) in (0u16..).zip(&self.rings) {
            let kick = match &ring.kick {
                Kick::Unset => None,
                Kick::Poll => Some(KickState::Poll),
                Kick::Event(event) => Some(KickState::Event(put(event.event.as_fd(), Some(event.id))?)),
            };
            let mut event = |event: &Option<Deferred<RingEvent>>| {
                event.as_ref().map(|event| put(event.event.as_fd(), Some(event.id))).transpose()
            };
            let addr =
                ring.geometry.addr.map(|addr| (addr.flags, addr.desc, addr.used, addr.avail, addr.log));
            let description = RingDescription {
                index,
                size: ring.geometry.size,
                addr,
                base: ring.base,
                recover: ring.recover,
                kick,
                call: event(&ring.call)?,
                err: event(&ring.err)?,
                enabled: ring.enabled,
            };
            if description != (RingDescription { index, ..RingDescription::default() }) {
                rings.push(description);
            }
        }
        let mut memory = Vec::new();
        for (spec, file) in &self.files {
            memory.push(RegionState::of(spec, Some(put(file.as_fd(), None)?)));
        }
        let inflight = match &self.tracking {
            Some(tracking) => {
                let InflightDescription { mmap_size, mmap_offset, num_queues, queue_size, .. } =
                    tracking.description;
                let file = put(tracking.file.as_fd(), None)?;
                Some(InflightState { file, mmap_size, mmap_offset, num_queues, queue_size })
            }
            None => None,
        };
        Ok(SessionState {
            socket: put(self.as_fd(), None)?,
            received: received.to_vec(),
            received_fds: fds.iter().map(|fd| put(fd.as_fd(), None)).collect::<io::Result<_>>()?,
            offered: Some((self.offer.features, self.offer.protocol.bits())),
            features: self.features,
            protocol: self.protocol.bits(),
            memory,
            repeated: self.repeated.iter().map(|spec| RegionState::of(spec, None)).collect(),
            rings,
            inflight,
            log: match &self.log {
                Log::Unset => LogState::Unset,
                Log::Mapped { file, place, .. } => LogState::Mapped {
                    file: put(file.as_fd(), None)?,
                    size: place.size,
                    offset: place.offset,
                },
                Log::Unusable(why) => LogState::Unusable(why.clone()),
            },
            backend_req: self.backend_req.as_ref().map(|channel| put(channel.as_fd(), None)).transpose()?,
            status: self.status,
            counters: self.counters.into(),
        })
    }

    /// Stops all running rings, so that their [positions](Self::positions) can be handed over. Nothing is read from the connection until
    /// [`resume`](Self::resume), which the caller sees to.
    ///
    /// # Errors
    /// What serves the rings does not answer: the session can only be [ended](Self::disconnect).
    pub fn suspend(&mut self, dev: &mut dyn Device) -> Result<(), Unanswered> {
        self.stop_all(dev);
        self.disturbed = false;
        self.unanswered.take().map_or(Ok(()), Err)
    }

    /// Returns the base at which each ring resumes, in the order of their indices. Call it on a [suspended](Self::suspend) session.
    pub fn positions(&self) -> Vec<Option<u32>> {
        self.rings.iter().map(|ring| ring.base).collect()
    }

    /// Sets the bases at which rings that have not started begin, those of [`positions`](Self::positions).
    pub fn set_positions(&mut self, positions: &[Option<u32>]) {
        for (ring, base) in self.rings.iter_mut().zip(positions).filter(|(ring, _)| !ring.started) {
            ring.base = *base;
        }
    }

    /// Makes the connection this process's own, as [`resume`](Self::resume) does.
    pub fn keep(&mut self) {
        self.wire.set_shared(false);
    }

    /// Leaves the front end to the process that has taken over. The session is to be dropped, which says nothing to the front end.
    pub fn let_go(&mut self) {
        self.wire.set_shared(true);
    }

    /// Starts all rings that can start: of a [suspended](Self::suspend) session, or of one that was [adopted](Self::adopt).
    pub fn resume(&mut self, dev: &mut dyn Device) {
        self.keep();
        self.start_all(dev);
        self.disturbed = false;
    }

    /// Goes on where a process was killed that had the session: rings resume where they were in their memory or in the in-flight region. Call it on what was
    /// [adopted](Self::adopt) of a state that process had left behind, and then [`resume`](Self::resume).
    ///
    /// Packets that it had in its hands are lost, or arrive twice.
    ///
    /// # Errors
    /// The position of a ring is not known, or the log would have gaps: the session can only be [ended](Self::disconnect).
    pub fn recover(&mut self) -> Result<(), Refusal> {
        let Some(memory) = &self.memory else { return Ok(()) };
        let packed = self.packed() == Some(true);
        let region = self.tracking.as_ref().map(|tracking| &*tracking.map);
        for (index, ring) in
            (0u16..).zip(&mut self.rings).filter(|(_, ring)| !matches!(ring.kick, Kick::Unset))
        {
            let Some(parts) = ring.geometry.resolve(memory, packed)? else { continue };
            let base = inflight::resume_within(index, &parts, packed, region);
            ring.base =
                Some(base.ok_or_else(|| Refusal::Value {
                    field: "position of a packed ring",
                    value: index.into(),
                })?);
        }
        if let Some(log) = self.dirty_log() {
            // What it has written last may not be in the log.
            log.mark_all(memory);
        }
        Ok(())
    }

    /// Makes a region in which packed rings keep their positions. Without one they cannot be recovered, and all else goes on.
    pub(super) fn track(&mut self) {
        // As many entries as there may be, in parts that are touched only as far as rings use them.
        let rings = self.rings.len() as u16;
        let size =
            u16::try_from(inflight::MAX_ENTRIES / u32::from(rings.max(1))).unwrap_or(u16::MAX).min(1 << 15);
        let made =
            inflight::create(rings, size, true).map_err(Refusal::Event).and_then(|(description, file)| {
                let file = file.fd().try_clone_to_owned().map_err(Refusal::Event)?;
                Ok(self.map_inflight(self.wire.closer().defer(file), &description, false)?)
            });
        match made {
            Ok(tracking) => self.tracking = Some(tracking),
            Err(error) => {
                self.tracks = false;
                let port = self.port.as_deref();
                self.warnings
                    .warn(port, || tracing::warn!(port, "positions of packed rings are not kept: {error}"));
            }
        }
    }

    /// Makes the session that another process had, whose descriptors come from `take`. Of what that had offered the session goes on to offer what is in
    /// `offer`, which is all that this program can. It maps the memory, starts no ring, and tells no device
    /// anything: the device is to begin with the session's [features](Self::features) and [memory](Self::memory).
    ///
    /// # Errors
    /// [`AdoptError`]; everything is closed.
    pub fn adopt(
        state: &SessionState,
        take: &mut Take<'_>,
        mut offer: Offer,
        resources: Resources,
    ) -> Result<Session, AdoptError> {
        if let Some((features, protocol)) = state.offered {
            offer.features &= features;
            offer.protocol &= ProtocolFeatures::from_bits_truncate(protocol);
        }
        let mut taken = Taken { take, closer: resources.closer.clone() };
        let socket = taken.file(state.socket, "the connection")?;
        if !Stream::is_one(&*socket) {
            return Err(AdoptError::Descriptor("the connection"));
        }
        let stream = Stream::from_fd(socket.into_inner())?;
        let mut session = Session::with_resources(stream, offer, resources)?;
        session.wire.set_shared(true);
        let fds = state.received_fds.iter().take(MAX_FDS).map(|number| taken.file(*number, "a message"));
        let partial = Partial { bytes: &state.received, fds: fds.collect::<Result<_, _>>()? };
        if !session.wire.restore(partial) {
            return Err(Refusal::Size(state.received.len()).into());
        }
        let unknown = state.features.unwrap_or(0) & !session.offered_features();
        if unknown != 0 {
            return Err(Refusal::Features(unknown).into());
        }
        let unknown = state.protocol & !session.offer.protocol.bits();
        if unknown != 0 {
            return Err(Refusal::Protocol(unknown).into());
        }
        session.features = state.features;
        session.protocol = ProtocolFeatures::from_bits_truncate(state.protocol);
        session.status = state.status;
        session.counters = state.counters.into();
        if let Some(number) = state.backend_req {
            let channel = taken.file(number, "the channel of the back end's requests")?;
            let channel = Some(channel).filter(|fd| Stream::is_one(&**fd)).ok_or(Refusal::Channel)?;
            session.backend_req = Some(channel.map(LentStream::of));
        }
        session.adopt_memory(state, &mut taken)?;
        for ring in &state.rings {
            session.adopt_ring(ring, &mut taken)?;
        }
        if let Some(InflightState { file, mmap_size, mmap_offset, num_queues, queue_size }) = state.inflight {
            let file = taken.file(file, "the in-flight region")?;
            let description =
                InflightDescription { mmap_size, mmap_offset, num_queues, queue_size, padding: 0 };
            // It may have come before the front end has agreed on another layout.
            session.check_inflight(&description, None)?;
            session.tracking = Some(session.map_inflight(file, &description, true).map_err(Refusal::from)?);
        }
        session.log = match &state.log {
            LogState::Unset => Log::Unset,
            LogState::Mapped { file, size, offset } => {
                let file = taken.file(*file, "the dirty log")?;
                session.map_log(file, LogBase { size: *size, offset: *offset })
            }
            LogState::Unusable(why) => Log::Unusable(why.clone()),
        };
        Ok(session)
    }

    fn adopt_memory(&mut self, state: &SessionState, taken: &mut Taken<'_, '_>) -> Result<(), AdoptError> {
        let most = usize::from(self.offer.max_mem_slots);
        if state.memory.len() > most || state.repeated.len() > super::requests::MAX_REPEATS {
            return Err(Refusal::Slots(most).into());
        }
        let mut regions = Vec::with_capacity(state.memory.len());
        for region in &state.memory {
            let file = region.file.ok_or(AdoptError::Descriptor("guest memory"))?;
            let (file, spec) = (taken.file(file, "guest memory")?, region.spec());
            regions.push(Region::map_within(file.as_fd(), spec, &self.budget).map_err(Refusal::from)?);
            self.files.push((spec, file));
        }
        if !regions.is_empty() {
            let memory = Arc::new(GuestMemory::new(regions).map_err(Refusal::from)?);
            self.memory = Some(self.wire.closer().defer_soon(memory));
        }
        self.repeated = state.repeated.iter().map(RegionState::spec).collect();
        Ok(())
    }

    fn adopt_ring(&mut self, state: &RingDescription, taken: &mut Taken<'_, '_>) -> Result<(), AdoptError> {
        let at = usize::from(self.check_index(state.index)?);
        // A description that came before the layout was known may not fit it, and is found out when the ring starts.
        if let Some(size) = state.size {
            check_num(size.into(), None).map_err(Refusal::from)?;
        }
        let addr = state.addresses();
        if let Some(addr) = &addr {
            check_addr(addr, None).map_err(Refusal::from)?;
        }
        let mut event = |number: u32, what| {
            let (fd, id) = taken.any(number, what)?;
            let event = EventFd::from_fd(fd.into_inner()).map_err(Refusal::Event)?;
            let event = match id {
                Some(id) => RingEvent { event, id },
                None => self.recognise(event),
            };
            Ok::<_, AdoptError>(taken.closer.defer_soon(event))
        };
        let kick = match state.kick {
            None => Kick::Unset,
            Some(KickState::Poll) => Kick::Poll,
            Some(KickState::Event(number)) => Kick::Event(event(number, "a kick")?),
        };
        let call = state.call.map(|number| event(number, "a call")).transpose()?;
        let err = state.err.map(|number| event(number, "an error event")).transpose()?;
        let ring = &mut self.rings[at];
        ring.geometry = Geometry { size: state.size, addr };
        (ring.base, ring.recover, ring.enabled) = (state.base, state.recover, state.enabled);
        (ring.kick, ring.call, ring.err) = (kick, call, err);
        Ok(())
    }
}

/// The descriptors of a state, of which each is taken once.
struct Taken<'t, 'a> {
    take: &'t mut Take<'a>,
    closer: Closer,
}

impl Taken<'_, '_> {
    fn any(
        &mut self,
        number: u32,
        what: &'static str,
    ) -> Result<(Deferred<OwnedFd>, Option<EventId>), AdoptError> {
        let (fd, id) = (self.take)(number).ok_or(AdoptError::Descriptor(what))?;
        Ok((self.closer.defer_passed(fd), id))
    }

    fn file(&mut self, number: u32, what: &'static str) -> Result<Deferred<OwnedFd>, AdoptError> {
        Ok(self.any(number, what)?.0)
    }
}
