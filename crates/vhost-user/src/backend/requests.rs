//! The handlers of a [`Session`]'s messages, called by `Session::serve` once the message has passed
//! the checks of its row in the table.
//!
//! A handler checks everything before it changes anything, so a refused message leaves the session
//! as it was. There is one exception: a description with which a kicked ring cannot start is kept,
//! because the missing memory may still come.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ringferry_memory::{GuestMemory, Region, RegionSpec};
use ringferry_sys::closer::Deferred;
use ringferry_sys::eventfd::{EventFd, EventId};
use ringferry_sys::lent::LentStream;
use ringferry_sys::socket::Stream;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::log::Log;
use super::{Answer, Device, Refusal, Session, Tracking};
use crate::base;
use crate::inflight::{self, InflightError, InflightTracking};
use crate::message::{
    ConfigHeader, F_LOG_ALL, F_PROTOCOL_FEATURES, InflightDescription, MAX_CONFIG, MemoryRegion, MemoryTable,
    NO_FD, ProtocolFeatures, RING_INDEX_MASK, Request, SingleRegion, VringAddr, VringState,
    inflight_description,
};
use crate::vring::{Geometry, Kick, RingError, RingEvent, Vring, check_addr, check_num, duplicate};
use crate::wire::Message;

/// Smallest MTU of an Ethernet link that carries IPv4 (VIRTIO 1.4, 5.1.4.1).
const MIN_MTU: u64 = 68;

/// Most repeated regions that are remembered: a large guest's front end repeats each slot once for
/// every further queue pair.
pub(super) const MAX_REPEATS: usize = 4096;

/// Parses a payload of fixed layout, whose size the table has checked.
fn parse<T: FromBytes + KnownLayout + Immutable>(payload: &[u8]) -> Result<T, Refusal> {
    T::read_from_bytes(payload).map_err(|_| Refusal::Size(payload.len()))
}

/// Checks that a descriptor is an eventfd, without asking the file itself: what serves it might not
/// answer. Another file is closed where that may wait, and not by [`EventFd::from_fd`] here.
fn check_eventfd(fd: BorrowedFd<'_>) -> io::Result<()> {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    if name.as_os_str() == "anon_inode:[eventfd]" {
        return Ok(());
    }
    let text = "the descriptor is not an eventfd: the front end must pass one made by eventfd(2)";
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

fn reply_u64(number: u64) -> Result<Answer, Refusal> {
    Ok(Answer::Payload(number.as_bytes().to_vec()))
}

impl Session {
    pub(super) fn handle(
        &mut self,
        request: Request,
        message: Message,
        dev: &mut dyn Device,
    ) -> Result<Answer, Refusal> {
        let Message { payload, fds, .. } = message;
        match request {
            Request::GetFeatures => reply_u64(self.offered_features()),
            Request::SetFeatures => self.set_features(parse(&payload)?, dev),
            Request::GetProtocolFeatures => reply_u64(self.offer.protocol.bits()),
            Request::SetProtocolFeatures => self.set_protocol_features(parse(&payload)?),
            Request::GetQueueNum => reply_u64(self.offer.queue_num.into()),
            // SET_OWNER carries no information; resetting the owner is deprecated and best ignored
            // (vhost-user, "Front-end message types").
            Request::SetOwner | Request::ResetOwner => Ok(Answer::Done),

            Request::SetMemTable => self.set_mem_table(&payload, fds, dev),
            Request::GetMaxMemSlots => reply_u64(self.offer.max_mem_slots.into()),
            Request::AddMemReg => self.add_mem_reg(parse(&payload)?, fds, dev),
            Request::RemMemReg => self.rem_mem_reg(parse(&payload)?, dev),

            Request::SetVringNum => self.set_vring_num(parse(&payload)?, dev),
            Request::SetVringAddr => self.set_vring_addr(parse(&payload)?, dev),
            Request::SetVringBase => self.set_vring_base(parse(&payload)?, dev),
            Request::GetVringBase => self.get_vring_base(parse(&payload)?, dev),
            Request::SetVringEnable => self.set_vring_enable(parse(&payload)?, dev),
            Request::SetVringKick => {
                let (index, fd) = self.parse_event(parse(&payload)?, fds)?;
                let kick = fd.map_or(Kick::Poll, Kick::Event);
                self.reconfigure(index, dev, |ring| ring.kick = kick)
            }
            Request::SetVringCall => {
                let (index, fd) = self.parse_event(parse(&payload)?, fds)?;
                self.set_vring_call(index, fd, dev)
            }
            Request::SetVringErr => {
                let (index, fd) = self.parse_event(parse(&payload)?, fds)?;
                self.reconfigure(index, dev, |ring| ring.err = fd)
            }

            Request::GetInflightFd => self.get_inflight_fd(&payload),
            Request::SetInflightFd => self.set_inflight_fd(&payload, fds, dev),

            Request::GetConfig => Self::get_config(&payload, dev),
            Request::SetConfig => Self::set_config(&payload, dev),
            Request::NetSetMtu => Self::net_set_mtu(parse(&payload)?, dev),
            Request::SendRarp => {
                let [a, b, c, d, e, f, _, _]: [u8; 8] = parse(&payload)?;
                dev.announce([a, b, c, d, e, f]);
                Ok(Answer::Done)
            }
            Request::SetBackendReqFd => {
                let channel = fds.into_iter().next().filter(|fd| Stream::is_of_a_pair(&**fd));
                let channel = channel.ok_or(Refusal::Channel)?;
                self.give_channel_up();
                self.backend_req = Some(channel.map(LentStream::of));
                Ok(Answer::Done)
            }
            Request::SetStatus => self.set_status(parse(&payload)?, dev),
            Request::GetStatus => reply_u64(self.status.into()),
            Request::ResetDevice => Ok(self.reset_device(dev)),

            Request::SetLogBase => self.set_log_base(parse(&payload)?, fds, dev),
            // Nobody waits for this event, and signalling it would cost a system call for each write.
            Request::SetLogFd => Ok(Answer::Done),

            Request::IotlbMsg
            | Request::SetVringEndian
            | Request::CreateCryptoSession
            | Request::CloseCryptoSession
            | Request::PostcopyAdvise
            | Request::PostcopyListen
            | Request::PostcopyEnd
            | Request::GpuSetSocket
            | Request::VringKick
            | Request::GetSharedObject
            | Request::SetDeviceStateFd
            | Request::CheckDeviceState => {
                self.counters.unexpected_fds_closed += fds.len() as u64;
                Err(Refusal::Unsupported)
            }
        }
    }

    pub(super) fn offered_features(&self) -> u64 {
        let protocol = if self.offer.protocol.is_empty() { 0 } else { F_PROTOCOL_FEATURES };
        self.offer.features | protocol
    }

    fn set_features(&mut self, features: u64, dev: &mut dyn Device) -> Result<Answer, Refusal> {
        let unknown = features & !self.offered_features();
        if unknown != 0 {
            return Err(Refusal::Features(unknown));
        }
        // Migration switches the log bit while rings run; any other feature changes how rings are
        // interpreted.
        let matters = !(F_LOG_ALL | F_PROTOCOL_FEATURES);
        if self.features.is_some_and(|old| (old ^ features) & matters != 0) {
            self.stop_all(dev);
        }
        let (before, old) = (self.dirty_log().cloned(), self.features.replace(features));
        dev.features_acked(features & !(F_PROTOCOL_FEATURES | F_LOG_ALL));
        self.log_changed(before, dev);
        if old.is_some_and(|old| old & !features & F_LOG_ALL != 0) {
            // The next migration has a log of its own.
            self.log = Log::Unset;
        }
        // "upon receiving a SET_FEATURES message without F_PROTOCOL_FEATURES set, the back-end must
        // enable all rings immediately"; with it, rings stay as they are.
        if features & F_PROTOCOL_FEATURES == 0 {
            let all: Vec<u16> = (0..self.rings.len() as u16).collect();
            self.enable(&all, true, dev);
        }
        self.start_all(dev);
        Ok(Answer::Done)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<Answer, Refusal> {
        let unknown = features & !self.offer.protocol.bits();
        if unknown != 0 {
            return Err(Refusal::Protocol(unknown));
        }
        self.protocol = ProtocolFeatures::from_bits_truncate(features);
        Ok(Answer::Done)
    }

    // Memory

    fn set_mem_table(
        &mut self,
        payload: &[u8],
        fds: Vec<Deferred<OwnedFd>>,
        dev: &mut dyn Device,
    ) -> Result<Answer, Refusal> {
        let bad_size = || Refusal::Size(payload.len());
        let (table, rest) = MemoryTable::read_from_prefix(payload).map_err(|_| bad_size())?;
        let count = table.count as usize;
        if count > usize::from(self.offer.max_mem_slots) {
            return Err(Refusal::Slots(self.offer.max_mem_slots.into()));
        }
        if fds.len() != count {
            self.counters.unexpected_fds_closed += fds.len() as u64;
            return Err(Refusal::Descriptors(fds.len()));
        }
        // Some front ends send the array at its full length; entries beyond `count` are ignored.
        let specs = rest.chunks_exact(size_of::<MemoryRegion>());
        if specs.len() < count {
            return Err(bad_size());
        }
        let (mut regions, mut files) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (spec, fd) in specs.zip(fds) {
            let spec = RegionSpec::from(parse::<MemoryRegion>(spec)?);
            regions.push(Region::map_within(fd.as_fd(), spec, &self.budget)?);
            files.push((spec, fd));
        }
        let memory = GuestMemory::new(regions)?;
        self.repeated.clear();
        self.change_memory((count > 0).then_some(memory), dev);
        self.files = files;
        Ok(Answer::Done)
    }

    fn add_mem_reg(
        &mut self,
        single: SingleRegion,
        mut fds: Vec<Deferred<OwnedFd>>,
        dev: &mut dyn Device,
    ) -> Result<Answer, Refusal> {
        let (Some(fd), true) = (fds.pop(), fds.is_empty()) else {
            return Err(Refusal::Descriptors(fds.len() + 1));
        };
        if self.has_region(&single) {
            // QEMU before 8.0 adds, and later removes, each region once per queue pair.
            if self.repeated.len() >= MAX_REPEATS {
                return Err(Refusal::Slots(self.offer.max_mem_slots.into()));
            }
            self.repeated.push(single.region.into());
            return Ok(Answer::Done);
        }
        let held = self.memory.as_ref().map_or(0, |memory| memory.regions().len());
        if held >= usize::from(self.offer.max_mem_slots) {
            return Err(Refusal::Slots(self.offer.max_mem_slots.into()));
        }
        let region = Region::map_within(fd.as_fd(), single.region.into(), &self.budget)?;
        let memory = match &self.memory {
            Some(memory) => memory.with(region)?,
            None => GuestMemory::new(vec![region])?,
        };
        self.change_memory(Some(memory), dev);
        self.files.push((single.region.into(), fd));
        Ok(Answer::Done)
    }

    /// Returns true if exactly this region is mapped.
    fn has_region(&self, single: &SingleRegion) -> bool {
        let spec: RegionSpec = single.region.into();
        self.memory.iter().flat_map(|memory| memory.regions()).any(|region| *region.spec() == spec)
    }

    fn rem_mem_reg(&mut self, single: SingleRegion, dev: &mut dyn Device) -> Result<Answer, Refusal> {
        let MemoryRegion { guest_addr, user_addr, size, .. } = single.region;
        let is_it = |spec: &RegionSpec| {
            spec.guest_addr == guest_addr && spec.user_addr == user_addr && spec.size == size
        };
        if let Some(at) = self.repeated.iter().position(is_it) {
            self.repeated.swap_remove(at);
            return Ok(Answer::Done);
        }
        let nothing = GuestMemory::default();
        let memory = self
            .memory
            .as_deref()
            .map_or(&nothing, |memory| &**memory)
            .without(guest_addr, user_addr, size)?;
        let is_empty = memory.regions().is_empty();
        self.change_memory((!is_empty).then_some(memory), dev);
        self.files.retain(|(spec, _)| !is_it(spec));
        Ok(Answer::Done)
    }

    /// Replaces the memory map. Running rings whose memory is still mapped resume at the same
    /// position.
    fn change_memory(&mut self, memory: Option<GuestMemory>, dev: &mut dyn Device) {
        self.stop_all(dev);
        let memory = memory.map(Arc::new);
        // The device lets go of the old map before that goes to the closer, which unmaps it.
        dev.memory_changed(memory.clone());
        self.memory = memory.map(|memory| self.wire.closer().defer_soon(memory));
        self.start_all(dev);
    }

    // Rings

    pub(super) fn check_index(&self, index: impl Into<u64>) -> Result<u16, Refusal> {
        let index = index.into();
        let rings = self.rings.len();
        // The index is compared before it is narrowed (CVE-2020-10723).
        if index < rings as u64 { Ok(index as u16) } else { Err(Refusal::Index { index, rings }) }
    }

    /// Parses a kick, call or error message into the ring's index and the event, if one came.
    fn parse_event(
        &mut self,
        payload: u64,
        mut fds: Vec<Deferred<OwnedFd>>,
    ) -> Result<(u16, Option<Deferred<RingEvent>>), Refusal> {
        let reserved = payload & !(RING_INDEX_MASK | NO_FD);
        if reserved != 0 {
            return Err(Refusal::Value { field: "ring index", value: payload });
        }
        let index = self.check_index(payload & RING_INDEX_MASK)?;
        match (payload & NO_FD == 0, fds.pop()) {
            // A descriptor on which the device could block is refused here, before the data path
            // uses it.
            (true, Some(fd)) => {
                check_eventfd(fd.as_fd()).map_err(Refusal::Event)?;
                let event = EventFd::from_fd(fd.into_inner()).map_err(Refusal::Event)?;
                let event = self.recognise(event);
                Ok((index, Some(self.wire.closer().defer_soon(event))))
            }
            (false, None) => Ok((index, None)),
            (_, fd) => {
                let count = usize::from(fd.is_some());
                self.counters.unexpected_fds_closed += count as u64;
                Err(Refusal::Descriptors(count))
            }
        }
    }

    /// Marks an event, as one of the same open file that the session has already: a front end may have one for several rings.
    pub(super) fn recognise(&self, event: EventFd) -> RingEvent {
        let of_ring = |ring: &Vring| {
            let kick = match &ring.kick {
                Kick::Event(kick) => Some(kick),
                Kick::Unset | Kick::Poll => None,
            };
            let known = [kick, ring.call.as_ref(), ring.err.as_ref()];
            known.into_iter().flatten().find(|known| known.event.is_same(&event)).map(|known| known.id)
        };
        let id = self.rings.iter().find_map(of_ring).unwrap_or_else(EventId::draw);
        RingEvent { event, id }
    }

    fn set_vring_num(&mut self, state: VringState, dev: &mut dyn Device) -> Result<Answer, Refusal> {
        let index = self.check_index(state.index)?;
        let packed = self.packed();
        let size = check_num(state.num, packed)?;
        let ring = &self.rings[usize::from(index)];
        let geometry = ring.geometry;
        // A packed ring's position means nothing in a ring of another size.
        if ring.started && packed == Some(true) && geometry.size != Some(size) {
            return Err(RingError::Running("size").into());
        }
        self.set_geometry(index, Geometry { size: Some(size), ..geometry }, dev)
    }

    fn set_vring_addr(&mut self, addr: VringAddr, dev: &mut dyn Device) -> Result<Answer, Refusal> {
        let index = self.check_index(addr.index)?;
        check_addr(&addr, self.packed())?;
        let ring = &mut self.rings[usize::from(index)];
        let geometry = Geometry { addr: Some(addr), ..ring.geometry };
        // Migration repeats the addresses of running rings, with another flag.
        if ring.started && ring.geometry.addr.is_some_and(|old| old.is_same_place(&addr)) {
            ring.geometry = geometry;
            let log = self.dirty_log().cloned();
            self.log_changed(log, dev);
            return Ok(Answer::Done);
        }
        self.set_geometry(index, geometry, dev)
    }

    /// Changes a ring's size or addresses. A running ring continues unchanged if it could not run
    /// with the new ones.
    fn set_geometry(
        &mut self,
        index: u16,
        geometry: Geometry,
        dev: &mut dyn Device,
    ) -> Result<Answer, Refusal> {
        if self.rings[usize::from(index)].started
            && let Some(memory) = &self.memory
        {
            geometry.check(memory, self.packed() == Some(true))?;
        }
        self.reconfigure(index, dev, |ring| ring.geometry = geometry)
    }

    fn set_vring_base(&mut self, state: VringState, dev: &mut dyn Device) -> Result<Answer, Refusal> {
        let index = self.check_index(state.index)?;
        // Properties that cannot be checked yet are checked when the ring starts.
        let ring = &self.rings[usize::from(index)];
        if let Some(packed) = self.packed() {
            let position = base::decode(state.num, packed)?;
            if let Some(size) = ring.geometry.size {
                base::check_position(position, size, packed)?;
            }
        }
        if ring.started {
            return Err(RingError::Running("base").into());
        }
        self.reconfigure(index, dev, |ring| ring.base = Some(state.num))
    }

    fn get_vring_base(&mut self, state: VringState, dev: &mut dyn Device) -> Result<Answer, Refusal> {
        let index = self.check_index(state.index)?;
        self.stop(index, dev);
        let packed = self.packed() == Some(true);
        self.rings[usize::from(index)].kick = Kick::Unset;
        self.forget_idle_log();
        let ring = &self.rings[usize::from(index)];
        let first = base::encode(base::first_position(packed), packed);
        let state = VringState { index: index.into(), num: ring.base.unwrap_or(first) };
        Ok(Answer::Payload(state.as_bytes().to_vec()))
    }

    fn set_vring_call(
        &mut self,
        index: u16,
        call: Option<Deferred<RingEvent>>,
        dev: &mut dyn Device,
    ) -> Result<Answer, Refusal> {
        let ring = &mut self.rings[usize::from(index)];
        if ring.started {
            let copy = duplicate(call.as_deref())?;
            ring.call = call;
            dev.ring_call_changed(index, copy);
        } else {
            ring.call = call;
        }
        Ok(Answer::Done)
    }

    fn set_vring_enable(&mut self, state: VringState, dev: &mut dyn Device) -> Result<Answer, Refusal> {
        let index = self.check_index(state.index)?;
        if state.num > 1 {
            return Err(Refusal::Value { field: "enable", value: state.num.into() });
        }
        self.enable(&[index], state.num == 1, dev);
        Ok(Answer::Done)
    }

    fn enable(&mut self, rings: &[u16], enabled: bool, dev: &mut dyn Device) {
        let mut running = Vec::new();
        for index in rings {
            let ring = &mut self.rings[usize::from(*index)];
            if ring.enabled != enabled {
                ring.enabled = enabled;
                running.extend(ring.started.then_some(*index));
            }
        }
        if !running.is_empty() {
            self.disturbed = true;
            self.unanswered = dev.rings_enabled(&running, enabled).err();
        }
    }

    // In-flight tracking

    /// Parses an in-flight description, and checks it.
    fn inflight_description(&self, payload: &[u8]) -> Result<InflightDescription, Refusal> {
        let description = inflight_description(payload).ok_or(Refusal::Size(payload.len()))?;
        self.check_inflight(&description, self.packed())?;
        Ok(description)
    }

    /// Checks the numbers of an in-flight description against the device's limits (CVE-2021-3839). `packed` is `None` where either layout
    /// may be meant.
    pub(super) fn check_inflight(
        &self,
        description: &InflightDescription,
        packed: Option<bool>,
    ) -> Result<(), Refusal> {
        let InflightDescription { num_queues, queue_size, .. } = *description;
        if num_queues == 0 || usize::from(num_queues) > self.rings.len() {
            return Err(Refusal::Value { field: "number of queues", value: num_queues.into() });
        }
        check_num(queue_size.into(), packed)?;
        let entries = u32::from(num_queues) * u32::from(queue_size);
        if entries > inflight::MAX_ENTRIES {
            return Err(Refusal::Value { field: "entries of all queues", value: entries.into() });
        }
        Ok(())
    }

    /// Creates an in-flight region and hands it to the front end. The session keeps nothing of it (CVE-2020-10726), and few are made, since what the
    /// front end keeps is this process's memory all the same.
    fn get_inflight_fd(&mut self, payload: &[u8]) -> Result<Answer, Refusal> {
        let InflightDescription { num_queues, queue_size, .. } = self.inflight_description(payload)?;
        // Before features are negotiated the region is large enough for either layout.
        let admitted = self.given.admit(self.wire.stream(), Instant::now()).map_err(io::Error::other);
        let layout = self.packed().unwrap_or(true);
        let made = admitted.and_then(|()| inflight::create(num_queues, queue_size, layout));
        // The reply has the length of the request, with or without padding.
        let bytes = |description: &InflightDescription| description.as_bytes()[..payload.len()].to_vec();
        Ok(match made {
            Ok((description, file)) => Answer::File(bytes(&description), file),
            Err(error) => {
                // The front end continues without a region.
                let port = self.port.as_deref();
                self.warnings.warn(port, || tracing::warn!(port, "no in-flight region: {error}"));
                Answer::Payload(bytes(&InflightDescription::default()))
            }
        })
    }

    fn set_inflight_fd(
        &mut self,
        payload: &[u8],
        mut fds: Vec<Deferred<OwnedFd>>,
        dev: &mut dyn Device,
    ) -> Result<Answer, Refusal> {
        let (Some(fd), true) = (fds.pop(), fds.is_empty()) else {
            return Err(Refusal::Descriptors(fds.len() + 1));
        };
        let description = self.inflight_description(payload)?;
        let tracking = self.map_inflight(fd, &description, false)?;
        // A running ring keeps its position; rings that start later take theirs from the region.
        for ring in &mut self.rings {
            ring.recover = !ring.started;
        }
        self.stop_all(dev);
        self.tracking = Some(tracking);
        self.start_all(dev);
        Ok(Answer::Done)
    }

    /// Maps an in-flight region of a checked description, which another process may have had.
    pub(super) fn map_inflight(
        &self,
        file: Deferred<OwnedFd>,
        description: &InflightDescription,
        adopted: bool,
    ) -> Result<Tracking, InflightError> {
        let map = |packed| InflightTracking::map(file.as_fd(), description, packed, &self.budget);
        // One that came before the layout was known may have no room for packed rings, which it then does not track.
        let map = map(self.packed().unwrap_or(false))
            .or_else(|error| if adopted { map(false) } else { Err(error) })?;
        Ok(Tracking { map: self.wire.closer().defer_soon(map), file, description: *description })
    }

    // Device

    /// Parses the header of a configuration space message, and checks its size and range.
    fn config_header(payload: &[u8]) -> Result<(ConfigHeader, &[u8]), Refusal> {
        let (header, data) =
            ConfigHeader::read_from_prefix(payload).map_err(|_| Refusal::Size(payload.len()))?;
        if header.size as usize != data.len() {
            return Err(Refusal::Size(payload.len()));
        }
        if u64::from(header.offset) + u64::from(header.size) > MAX_CONFIG as u64 {
            return Err(Refusal::Value { field: "offset", value: header.offset.into() });
        }
        Ok((header, data))
    }

    fn get_config(payload: &[u8], dev: &mut dyn Device) -> Result<Answer, Refusal> {
        let (header, data) = Self::config_header(payload)?;
        let mut reply = header.as_bytes().to_vec();
        let start = reply.len();
        reply.resize(start + data.len(), 0);
        if dev.config(header.offset as usize, &mut reply[start..]) {
            Ok(Answer::Payload(reply))
        } else {
            Err(Refusal::Device)
        }
    }

    fn set_config(payload: &[u8], dev: &mut dyn Device) -> Result<Answer, Refusal> {
        let (header, data) = Self::config_header(payload)?;
        if dev.set_config(header.offset as usize, data) { Ok(Answer::Done) } else { Err(Refusal::Device) }
    }

    fn net_set_mtu(mtu: u64, dev: &mut dyn Device) -> Result<Answer, Refusal> {
        let out_of_range = Refusal::Value { field: "MTU", value: mtu };
        match u16::try_from(mtu) {
            Ok(small) if mtu >= MIN_MTU => {
                if dev.mtu_set(small) {
                    Ok(Answer::Done)
                } else {
                    Err(Refusal::Device)
                }
            }
            _ => Err(out_of_range),
        }
    }

    fn set_status(&mut self, status: u64, dev: &mut dyn Device) -> Result<Answer, Refusal> {
        let status = u8::try_from(status).map_err(|_| Refusal::Value { field: "status", value: status })?;
        if status == 0 {
            // The driver reset the device (VIRTIO 1.4, 2.4): a ring starts again only with a new
            // kick.
            self.stop_all(dev);
            for ring in &mut self.rings {
                ring.kick = Kick::Unset;
                ring.recover = false;
            }
            self.forget_idle_log();
        }
        self.status = status;
        dev.status(status);
        Ok(Answer::Done)
    }

    /// Serves `RESET_DEVICE`: "disable all rings and reset all internal device state". State of the
    /// connection stays: protocol features, events, and the memory map, since front ends that add
    /// regions one by one only send the differences afterwards.
    fn reset_device(&mut self, dev: &mut dyn Device) -> Answer {
        self.stop_all(dev);
        for ring in &mut self.rings {
            ring.geometry = Geometry::default();
            ring.base = None;
            ring.recover = false;
            ring.kick = Kick::Unset;
            ring.enabled = false;
        }
        self.features = None;
        self.log = Log::Unset;
        self.status = 0;
        dev.reset();
        Answer::Done
    }
}
