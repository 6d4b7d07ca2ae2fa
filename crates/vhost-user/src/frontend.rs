//! The front end: typed calls that wait for their answer.
//!
//! [`Frontend`] has one method per message and decides nothing. [`Connection`](crate::connection::Connection)
//! puts them in the order that QEMU uses. A call waits at most the [timeout](Frontend::set_timeout);
//! after an error the connection is of no use any more, except after [`FrontendError::Refused`] and
//! [`FrontendError::NotNegotiated`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use ringferry_memory::RegionSpec;
use ringferry_sys::socket::Stream;
use rustix::event::{PollFd, PollFlags, Timespec};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::inflight::InflightRegion;
use crate::message::{
    ConfigHeader, FLAG_NEED_REPLY, InflightDescription, MAX_CONFIG, MAX_FDS, MemoryRegion, MemoryTable,
    NO_FD, Needs, ProtocolFeatures, Reply, Request, SingleRegion, VringAddr, VringState, bit_numbers,
    inflight_description,
};
use crate::wire::{Incoming, Wire, WireError};

/// How long a call waits for its answer. A back end that maps (and touches) gigabytes of memory
/// before it answers needs seconds; who waits longer than this is dead.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// The connection is over or broken.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// No answer in time.
    #[error("the back end did not answer {message} within {after:?}")]
    Timeout {
        /// Name of the message.
        message: &'static str,
        /// How long we waited.
        after: Duration,
    },
    /// The back end says that it failed; the connection is intact.
    #[error("the back end refused {0}; its log says why")]
    Refused(&'static str),
    /// The call needs a protocol feature that was not agreed on; nothing was sent.
    #[error("{message} needs the protocol feature {needs}, which was not agreed on")]
    NotNegotiated {
        /// Name of the message.
        message: &'static str,
        /// What it needs.
        needs: ProtocolFeatures,
    },
    /// What came is not the answer.
    #[error("the back end's answer to {0} makes no sense")]
    BadReply(&'static str),
    /// Something came that nobody asked for.
    #[error("the back end sent a message that nobody asked for")]
    Unsolicited,
    /// The back end lacks features we cannot do without.
    #[error("the back end lacks required features: {}", bit_numbers(*.0))]
    MissingFeatures(u64),
    /// More rings than the protocol can address.
    #[error("{0} virtqueues, but the protocol can address only 256")]
    TooManyRings(usize),
    /// More regions than fit the message.
    #[error("{0} memory regions do not fit one memory table of at most {MAX_FDS}")]
    TooManyRegions(usize),
    /// A configuration access larger than any configuration space.
    #[error("configuration space has {MAX_CONFIG} bytes")]
    ConfigRange,
}

/// The front end's side of a connection.
#[derive(Debug)]
pub struct Frontend {
    wire: Wire,
    timeout: Duration,
    /// What the back end offers, as far as it was asked.
    offered: ProtocolFeatures,
    /// What was agreed on.
    protocol: ProtocolFeatures,
}

impl Frontend {
    /// A front end on a connected stream; either side may have listened.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking; none that a back end can cause.
    pub fn new(stream: Stream) -> io::Result<Frontend> {
        Ok(Frontend {
            wire: Wire::new(stream)?,
            timeout: DEFAULT_TIMEOUT,
            offered: ProtocolFeatures::empty(),
            protocol: ProtocolFeatures::empty(),
        })
    }

    /// Changes how long a call waits for its answer.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The protocol features agreed on.
    pub fn protocol(&self) -> ProtocolFeatures {
        self.protocol
    }

    /// Looks after the connection when its descriptor is readable though nothing was asked.
    ///
    /// # Errors
    /// [`WireError::Disconnected`] when the back end is gone; [`FrontendError::Unsolicited`].
    pub fn check(&mut self) -> Result<(), FrontendError> {
        match self.wire.read()? {
            None => Ok(()),
            Some(_) => Err(FrontendError::Unsolicited),
        }
    }

    /// The virtio features the back end offers, with [`F_PROTOCOL_FEATURES`](crate::message::F_PROTOCOL_FEATURES) among them.
    pub fn get_features(&mut self) -> Result<u64, FrontendError> {
        self.query(Request::GetFeatures, &[])
    }

    /// The protocol features the back end offers, those among them that this crate knows. Only
    /// for back ends that offer [`F_PROTOCOL_FEATURES`](crate::message::F_PROTOCOL_FEATURES).
    pub fn get_protocol_features(&mut self) -> Result<ProtocolFeatures, FrontendError> {
        let bits: u64 = self.query(Request::GetProtocolFeatures, &[])?;
        self.offered = ProtocolFeatures::from_bits_truncate(bits);
        Ok(self.offered)
    }

    /// Agrees on protocol features. Never acknowledged: the agreement on acknowledgements is part
    /// of it.
    pub fn set_protocol_features(&mut self, protocol: ProtocolFeatures) -> Result<(), FrontendError> {
        self.protocol = ProtocolFeatures::empty();
        self.command(Request::SetProtocolFeatures, protocol.bits().as_bytes(), &[])?;
        self.protocol = protocol;
        Ok(())
    }

    /// Agrees on virtio features.
    pub fn set_features(&mut self, features: u64) -> Result<(), FrontendError> {
        self.command(Request::SetFeatures, features.as_bytes(), &[])
    }

    /// Begins the session.
    pub fn set_owner(&mut self) -> Result<(), FrontendError> {
        self.command(Request::SetOwner, &[], &[])
    }

    /// How many queues the back end has; of a network device, how many queue pairs.
    pub fn get_queue_num(&mut self) -> Result<u64, FrontendError> {
        self.query(Request::GetQueueNum, &[])
    }

    /// Reads configuration space.
    pub fn get_config(&mut self, offset: u32, buf: &mut [u8]) -> Result<(), FrontendError> {
        if buf.len() > MAX_CONFIG {
            return Err(FrontendError::ConfigRange);
        }
        let header = ConfigHeader { offset, size: buf.len() as u32, flags: 0 };
        let mut payload = header.as_bytes().to_vec();
        let start = payload.len();
        payload.resize(start + buf.len(), 0);
        let reply = self.ask(Request::GetConfig, &payload)?;
        if reply.is_empty() {
            return Err(FrontendError::Refused(Request::GetConfig.row().name));
        }
        match reply.get(start..) {
            Some(data) if data.len() == buf.len() => buf.copy_from_slice(data),
            _ => return Err(FrontendError::BadReply(Request::GetConfig.row().name)),
        }
        Ok(())
    }

    /// Writes configuration space.
    pub fn set_config(&mut self, offset: u32, data: &[u8]) -> Result<(), FrontendError> {
        if data.len() > MAX_CONFIG {
            return Err(FrontendError::ConfigRange);
        }
        let header = ConfigHeader { offset, size: data.len() as u32, flags: 0 };
        let payload = [header.as_bytes(), data].concat();
        self.command(Request::SetConfig, &payload, &[])
    }

    /// Replaces the whole memory map. The files are mapped by the back end; the descriptors stay
    /// the caller's.
    pub fn set_mem_table(&mut self, regions: &[(RegionSpec, BorrowedFd<'_>)]) -> Result<(), FrontendError> {
        if regions.len() > MAX_FDS {
            return Err(FrontendError::TooManyRegions(regions.len()));
        }
        let mut payload = MemoryTable { count: regions.len() as u32, padding: 0 }.as_bytes().to_vec();
        let mut fds = Vec::with_capacity(regions.len());
        for (spec, fd) in regions {
            payload.extend_from_slice(MemoryRegion::from(*spec).as_bytes());
            fds.push(*fd);
        }
        self.command(Request::SetMemTable, &payload, &fds)
    }

    /// How many regions the back end takes one by one.
    pub fn get_max_mem_slots(&mut self) -> Result<u64, FrontendError> {
        self.query(Request::GetMaxMemSlots, &[])
    }

    /// Adds one region.
    pub fn add_mem_reg(&mut self, spec: RegionSpec, fd: BorrowedFd<'_>) -> Result<(), FrontendError> {
        self.command(Request::AddMemReg, SingleRegion { padding: 0, region: spec.into() }.as_bytes(), &[fd])
    }

    /// Removes one region, known by its addresses and size.
    pub fn rem_mem_reg(&mut self, spec: RegionSpec) -> Result<(), FrontendError> {
        self.command(Request::RemMemReg, SingleRegion { padding: 0, region: spec.into() }.as_bytes(), &[])
    }

    /// Entries of a ring.
    pub fn set_vring_num(&mut self, index: u16, size: u16) -> Result<(), FrontendError> {
        self.state(Request::SetVringNum, index, size.into())
    }

    /// User addresses of a ring's parts.
    pub fn set_vring_addr(
        &mut self,
        index: u16,
        desc: u64,
        avail: u64,
        used: u64,
    ) -> Result<(), FrontendError> {
        let addr = VringAddr { index: index.into(), flags: 0, desc, used, avail, log: 0 };
        self.command(Request::SetVringAddr, addr.as_bytes(), &[])
    }

    /// Where a ring resumes.
    pub fn set_vring_base(&mut self, index: u16, base: u32) -> Result<(), FrontendError> {
        self.state(Request::SetVringBase, index, base)
    }

    /// Stops a ring; returns where it can resume.
    pub fn get_vring_base(&mut self, index: u16) -> Result<u32, FrontendError> {
        let request = VringState { index: index.into(), num: 0 };
        let reply: VringState = self.query(Request::GetVringBase, request.as_bytes())?;
        if reply.index != u32::from(index) {
            return Err(FrontendError::BadReply(Request::GetVringBase.row().name));
        }
        Ok(reply.num)
    }

    /// The event we write when buffers are available; starts the ring. `None`: it is polled.
    pub fn set_vring_kick(&mut self, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<(), FrontendError> {
        self.event(Request::SetVringKick, index, fd)
    }

    /// The event the back end writes when buffers are used. `None`: we poll.
    pub fn set_vring_call(&mut self, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<(), FrontendError> {
        self.event(Request::SetVringCall, index, fd)
    }

    /// The event the back end writes when the ring is broken.
    pub fn set_vring_err(&mut self, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<(), FrontendError> {
        self.event(Request::SetVringErr, index, fd)
    }

    /// Enables or disables a ring. Only where
    /// [`F_PROTOCOL_FEATURES`](crate::message::F_PROTOCOL_FEATURES) was offered.
    pub fn set_vring_enable(&mut self, index: u16, enable: bool) -> Result<(), FrontendError> {
        self.state(Request::SetVringEnable, index, enable.into())
    }

    /// Has the back end announce a migrated guest.
    pub fn send_rarp(&mut self, mac: [u8; 6]) -> Result<(), FrontendError> {
        let [a, b, c, d, e, f] = mac;
        self.command(Request::SendRarp, &[a, b, c, d, e, f, 0, 0], &[])
    }

    /// The MTU the guest is told.
    pub fn net_set_mtu(&mut self, mtu: u16) -> Result<(), FrontendError> {
        self.command(Request::NetSetMtu, u64::from(mtu).as_bytes(), &[])
    }

    /// Writes the device status.
    pub fn set_status(&mut self, status: u8) -> Result<(), FrontendError> {
        self.command(Request::SetStatus, u64::from(status).as_bytes(), &[])
    }

    /// Reads the device status.
    pub fn get_status(&mut self) -> Result<u8, FrontendError> {
        let status: u64 = self.query(Request::GetStatus, &[])?;
        u8::try_from(status).map_err(|_| FrontendError::BadReply(Request::GetStatus.row().name))
    }

    /// Resets the device.
    pub fn reset_device(&mut self) -> Result<(), FrontendError> {
        self.command(Request::ResetDevice, &[], &[])
    }

    /// Gives the back end a socket for its own requests.
    pub fn set_backend_req_fd(&mut self, fd: BorrowedFd<'_>) -> Result<(), FrontendError> {
        self.command(Request::SetBackendReqFd, &[], &[fd])
    }

    /// Asks for a region in which the back end tracks `num_queues` rings of up to `queue_size`
    /// entries, to be given to the next back end with [`Frontend::set_inflight_fd`]; this one uses it
    /// once it was given it, too. Features must have been set. `None`: the back end tracks nothing.
    pub fn get_inflight_fd(
        &mut self,
        num_queues: u16,
        queue_size: u16,
    ) -> Result<Option<InflightRegion>, FrontendError> {
        let request = Request::GetInflightFd;
        let wanted = InflightDescription { num_queues, queue_size, ..InflightDescription::default() };
        let deadline = self.send(request, 0, wanted.as_bytes(), &[])?;
        let Incoming { payload, mut fds, .. } = self.receive_message(request, deadline)?;
        let description =
            inflight_description(&payload).ok_or_else(|| FrontendError::BadReply(request.row().name))?;
        match (description.mmap_size, fds.pop()) {
            (0, None) => Ok(None),
            (1.., Some(fd)) if fds.is_empty() => Ok(Some(InflightRegion { description, fd })),
            _ => Err(FrontendError::BadReply(request.row().name)),
        }
    }

    /// Gives the back end the region in which it, or the one before it, tracks the rings. To be
    /// sent before they start.
    pub fn set_inflight_fd(&mut self, region: &InflightRegion) -> Result<(), FrontendError> {
        self.command(Request::SetInflightFd, region.description.as_bytes(), &[region.fd()])
    }

    fn state(&mut self, request: Request, index: u16, num: u32) -> Result<(), FrontendError> {
        self.command(request, VringState { index: index.into(), num }.as_bytes(), &[])
    }

    fn event(
        &mut self,
        request: Request,
        index: u16,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), FrontendError> {
        let payload = u64::from(index) | if fd.is_none() { NO_FD } else { 0 };
        self.command(request, payload.as_bytes(), fd.as_slice())
    }

    /// Sends a message that has no reply of its own; waits for success where that was agreed on.
    fn command(
        &mut self,
        request: Request,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), FrontendError> {
        let acknowledged = self.protocol.contains(ProtocolFeatures::REPLY_ACK);
        let deadline = self.send(request, if acknowledged { FLAG_NEED_REPLY } else { 0 }, payload, fds)?;
        if !acknowledged {
            return Ok(());
        }
        match self.receive::<u64>(request, deadline)? {
            0 => Ok(()),
            _ => Err(FrontendError::Refused(request.row().name)),
        }
    }

    /// Sends a message that is answered with a value of fixed shape.
    fn query<T: FromBytes + KnownLayout + Immutable>(
        &mut self,
        request: Request,
        payload: &[u8],
    ) -> Result<T, FrontendError> {
        let deadline = self.send(request, 0, payload, &[])?;
        self.receive(request, deadline)
    }

    fn ask(&mut self, request: Request, payload: &[u8]) -> Result<Vec<u8>, FrontendError> {
        let deadline = self.send(request, 0, payload, &[])?;
        self.receive_bytes(request, deadline)
    }

    fn send(
        &mut self,
        request: Request,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Instant, FrontendError> {
        let row = request.row();
        debug_assert!(flags == 0 || row.reply == Reply::Ack, "{} has a reply of its own", row.name);
        let missing = match row.needs {
            Needs::Offered(feature) if !self.offered.contains(feature) => Some(feature),
            Needs::Negotiated(feature) if !self.protocol.contains(feature) => Some(feature),
            _ => None,
        };
        if let Some(needs) = missing {
            return Err(FrontendError::NotNegotiated { message: row.name, needs });
        }
        let deadline = Instant::now() + self.timeout;
        loop {
            match self.wire.write(request as u32, flags, payload, fds) {
                Ok(()) => return Ok(deadline),
                // The back end is behind with reading.
                Err(WireError::Stuck) => self.wait(request, PollFlags::OUT, deadline)?,
                Err(err) => return Err(err.into()),
            }
        }
    }

    fn receive<T: FromBytes + KnownLayout + Immutable>(
        &mut self,
        request: Request,
        deadline: Instant,
    ) -> Result<T, FrontendError> {
        let bytes = self.receive_bytes(request, deadline)?;
        T::read_from_bytes(&bytes).map_err(|_| FrontendError::BadReply(request.row().name))
    }

    fn receive_bytes(&mut self, request: Request, deadline: Instant) -> Result<Vec<u8>, FrontendError> {
        let reply = self.receive_message(request, deadline)?;
        if !reply.fds.is_empty() {
            return Err(FrontendError::BadReply(request.row().name));
        }
        Ok(reply.payload)
    }

    fn receive_message(&mut self, request: Request, deadline: Instant) -> Result<Incoming, FrontendError> {
        let reply = loop {
            match self.wire.read()? {
                Some(reply) => break reply,
                None => self.wait(request, PollFlags::IN, deadline)?,
            }
        };
        if !reply.header.is_reply() || reply.header.request != request as u32 {
            return Err(FrontendError::BadReply(request.row().name));
        }
        Ok(reply)
    }

    fn wait(&self, request: Request, flags: PollFlags, deadline: Instant) -> Result<(), FrontendError> {
        let timeout = || FrontendError::Timeout { message: request.row().name, after: self.timeout };
        let left = deadline.checked_duration_since(Instant::now()).ok_or_else(timeout)?;
        let left = Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos() as _ };
        match rustix::event::poll(&mut [PollFd::new(&self.wire, flags)], Some(&left)) {
            Ok(0) => Err(timeout()),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(err) => Err(WireError::from(io::Error::from(err)).into()),
        }
    }
}

impl AsFd for Frontend {
    /// The socket: readable, though nothing was asked, when the back end is gone; see
    /// [`Frontend::check`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}
