//! [`Frontend`]: one typed call for each message of a front end, which waits for its reply.
//!
//! It is created on a connected socket, is used by one thread at a time, and closes the socket when
//! it is dropped. It imposes no order on the calls: [`Connection`](crate::connection::Connection)
//! puts them in the order that QEMU uses. A call blocks for at most the
//! [timeout](Frontend::set_timeout), and all of them together no longer than until the
//! [deadline](Frontend::set_deadline), if there is one. No reply but that of `GET_INFLIGHT_FD` may have descriptors; others are
//! never received, as closing them may block for as long as the back end likes. For the same reason an owner that must not
//! wait drops a `Frontend` that has failed on another thread. After an error the connection is unusable, except after
//! [`FrontendError::Refused`] and the errors that say that nothing was sent.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use ringferry_memory::RegionSpec;
use ringferry_sys::closer::Closer;
use ringferry_sys::socket::Stream;
use rustix::event::{PollFd, PollFlags, Timespec};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::inflight::InflightRegion;
use crate::message::{
    ConfigHeader, FLAG_NEED_REPLY, InflightDescription, LogBase, MAX_CONFIG, MAX_FDS, MemoryRegion,
    MemoryTable, NO_FD, Needs, ProtocolFeatures, Reply, Request, SingleRegion, VringAddr, VringState,
    bit_numbers, inflight_description,
};
use crate::wire::{Message, Wire, WireError};

/// Default limit on the wait for a reply. A back end that maps (and touches) gigabytes of memory
/// before it answers needs seconds; one that takes longer than this is considered dead.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// The connection was closed or broke.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The reply did not come within the timeout.
    #[error("the back end did not answer {message} within {after:?}")]
    Timeout {
        /// Name of the message that was sent.
        message: &'static str,
        /// Length of the wait, which is the timeout.
        after: Duration,
    },
    /// The reply did not come before the deadline that was set for several calls together.
    #[error("the back end takes too long: no answer to {0} in time")]
    Deadline(&'static str),
    /// The back end reported failure; the connection is intact.
    #[error("the back end refused {0}; its log says why")]
    Refused(&'static str),
    /// The call needs a protocol feature that was not negotiated; nothing was sent.
    #[error("{message} needs the protocol feature {needs}, which was not agreed on")]
    NotNegotiated {
        /// Name of the message that was not sent.
        message: &'static str,
        /// The protocol feature that is missing.
        needs: ProtocolFeatures,
    },
    /// The message that came is not a valid reply to the one sent.
    #[error("the back end's answer to {0} makes no sense")]
    BadReply(&'static str),
    /// The back end sent a message although no call waited for one.
    #[error("the back end sent a message that nobody asked for")]
    Unsolicited,
    /// The back end does not offer these required virtio features.
    #[error("the back end lacks required features: {}", bit_numbers(*.0))]
    MissingFeatures(u64),
    /// There are more rings than the protocol can address; nothing was sent.
    #[error("{0} virtqueues, but the protocol can address only 256")]
    TooManyRings(usize),
    /// There are more regions than fit the message; nothing was sent.
    #[error("{0} memory regions do not fit one memory table of at most {MAX_FDS}")]
    TooManyRegions(usize),
    /// The access is larger than any configuration space; nothing was sent.
    #[error("configuration space has {MAX_CONFIG} bytes")]
    ConfigRange,
}

/// The front end's side of a connection, with the protocol features that were negotiated.
#[derive(Debug)]
pub struct Frontend {
    wire: Wire,
    timeout: Duration,
    deadline: Option<Instant>,
    /// The protocol features that the back end offers, empty until it was asked.
    offered: ProtocolFeatures,
    /// The protocol features that both ends use.
    protocol: ProtocolFeatures,
}

impl Frontend {
    /// Creates a front end on a connected stream; either side may have listened. The stream becomes
    /// non-blocking, and calls wait by polling it.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking; none that a back end can cause.
    pub fn new(stream: Stream) -> io::Result<Frontend> {
        Ok(Frontend {
            wire: Wire::new(stream, Closer::new())?,
            timeout: DEFAULT_TIMEOUT,
            deadline: None,
            offered: ProtocolFeatures::empty(),
            protocol: ProtocolFeatures::empty(),
        })
    }

    /// Sets how long each later call waits for its reply.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Sets the time by which all later calls together must be done; `None` removes the limit. A back end that answers each
    /// message just in time would otherwise keep the caller for minutes.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Returns the protocol features that both ends use; empty until they are set.
    pub fn protocol(&self) -> ProtocolFeatures {
        self.protocol
    }

    /// Finds out why the socket is readable although no call waits for a reply. Nothing is received.
    ///
    /// # Errors
    /// [`WireError::Disconnected`] when the back end closed the connection;
    /// [`FrontendError::Unsolicited`] when it sent a message.
    pub fn check(&mut self) -> Result<(), FrontendError> {
        if self.wire.has_data()? { Err(FrontendError::Unsolicited) } else { Ok(()) }
    }

    /// Asks for the virtio features that the back end offers,
    /// [`F_PROTOCOL_FEATURES`](crate::message::F_PROTOCOL_FEATURES) among them.
    pub fn get_features(&mut self) -> Result<u64, FrontendError> {
        self.query(Request::GetFeatures, &[])
    }

    /// Asks for the protocol features that the back end offers, and returns those that this crate
    /// knows. It is allowed only where the back end offers
    /// [`F_PROTOCOL_FEATURES`](crate::message::F_PROTOCOL_FEATURES).
    pub fn get_protocol_features(&mut self) -> Result<ProtocolFeatures, FrontendError> {
        let bits: u64 = self.query(Request::GetProtocolFeatures, &[])?;
        self.offered = ProtocolFeatures::from_bits_truncate(bits);
        Ok(self.offered)
    }

    /// Sets the protocol features that both ends use from now on. The message itself is never
    /// acknowledged, because `REPLY_ACK` is one of them.
    pub fn set_protocol_features(&mut self, protocol: ProtocolFeatures) -> Result<(), FrontendError> {
        self.protocol = ProtocolFeatures::empty();
        self.command(Request::SetProtocolFeatures, protocol.bits().as_bytes(), &[])?;
        self.protocol = protocol;
        Ok(())
    }

    /// Sets the virtio features that the driver acknowledged.
    pub fn set_features(&mut self, features: u64) -> Result<(), FrontendError> {
        self.command(Request::SetFeatures, features.as_bytes(), &[])
    }

    /// Marks the start of the session.
    pub fn set_owner(&mut self) -> Result<(), FrontendError> {
        self.command(Request::SetOwner, &[], &[])
    }

    /// Asks for the number of queues of the back end, which for a network device is queue pairs.
    pub fn get_queue_num(&mut self) -> Result<u64, FrontendError> {
        self.query(Request::GetQueueNum, &[])
    }

    /// Reads `buf.len()` bytes of configuration space, at most [`MAX_CONFIG`].
    pub fn get_config(&mut self, offset: u32, buf: &mut [u8]) -> Result<(), FrontendError> {
        if buf.len() > MAX_CONFIG {
            return Err(FrontendError::ConfigRange);
        }
        let header = ConfigHeader { offset, size: buf.len() as u32, flags: 0 };
        let mut payload = header.as_bytes().to_vec();
        let start = payload.len();
        payload.resize(start + buf.len(), 0);
        let reply = self.query_bytes(Request::GetConfig, &payload)?;
        if reply.is_empty() {
            return Err(FrontendError::Refused(Request::GetConfig.spec().name));
        }
        match reply.get(start..) {
            Some(data) if data.len() == buf.len() => buf.copy_from_slice(data),
            _ => return Err(FrontendError::BadReply(Request::GetConfig.spec().name)),
        }
        Ok(())
    }

    /// Writes `data` to configuration space, at most [`MAX_CONFIG`] bytes.
    pub fn set_config(&mut self, offset: u32, data: &[u8]) -> Result<(), FrontendError> {
        if data.len() > MAX_CONFIG {
            return Err(FrontendError::ConfigRange);
        }
        let header = ConfigHeader { offset, size: data.len() as u32, flags: 0 };
        let payload = [header.as_bytes(), data].concat();
        self.command(Request::SetConfig, &payload, &[])
    }

    /// Replaces the whole memory map with at most [`MAX_FDS`] regions. The back end maps the files;
    /// the descriptors remain the caller's.
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

    /// Asks how many regions can be added one by one.
    pub fn get_max_mem_slots(&mut self) -> Result<u64, FrontendError> {
        self.query(Request::GetMaxMemSlots, &[])
    }

    /// Adds one region to the back end's memory map; `fd` remains the caller's.
    pub fn add_mem_reg(&mut self, spec: RegionSpec, fd: BorrowedFd<'_>) -> Result<(), FrontendError> {
        self.command(Request::AddMemReg, SingleRegion { padding: 0, region: spec.into() }.as_bytes(), &[fd])
    }

    /// Removes the region with these addresses and this size.
    pub fn rem_mem_reg(&mut self, spec: RegionSpec) -> Result<(), FrontendError> {
        self.command(Request::RemMemReg, SingleRegion { padding: 0, region: spec.into() }.as_bytes(), &[])
    }

    /// Sets the size of a ring, in entries.
    pub fn set_vring_num(&mut self, index: u16, size: u16) -> Result<(), FrontendError> {
        self.set_vring_state(Request::SetVringNum, index, size.into())
    }

    /// Sets the user addresses of a ring's three parts.
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

    /// Passes the dirty log: `size` bytes of a file from `offset` on, a bit for each page of 4 KiB of guest memory. The back end
    /// records its writes there while the features have [`F_LOG_ALL`](crate::message::F_LOG_ALL); when this returns it writes to no
    /// earlier log any more. `fd` remains the caller's.
    pub fn set_log_base(&mut self, fd: BorrowedFd<'_>, size: u64, offset: u64) -> Result<(), FrontendError> {
        let request = Request::SetLogBase;
        let deadline = self.send(request, 0, LogBase { size, offset }.as_bytes(), &[fd])?;
        // Back ends answer with nothing, 8 or 16 bytes, which say nothing.
        self.receive_bytes(request, deadline).map(drop)
    }

    /// Sets the base at which a ring resumes; see [`crate::base`].
    pub fn set_vring_base(&mut self, index: u16, base: u32) -> Result<(), FrontendError> {
        self.set_vring_state(Request::SetVringBase, index, base)
    }

    /// Stops a ring and returns the base at which it can resume.
    pub fn get_vring_base(&mut self, index: u16) -> Result<u32, FrontendError> {
        let request = VringState { index: index.into(), num: 0 };
        let reply: VringState = self.query(Request::GetVringBase, request.as_bytes())?;
        if reply.index != u32::from(index) {
            return Err(FrontendError::BadReply(Request::GetVringBase.spec().name));
        }
        Ok(reply.num)
    }

    /// Sets the event that the driver signals when buffers are available, and starts the ring. With
    /// `None` the back end polls the ring.
    pub fn set_vring_kick(&mut self, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<(), FrontendError> {
        self.set_vring_event(Request::SetVringKick, index, fd)
    }

    /// Sets the event that the back end signals when buffers are used. With `None` the driver polls
    /// the ring.
    pub fn set_vring_call(&mut self, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<(), FrontendError> {
        self.set_vring_event(Request::SetVringCall, index, fd)
    }

    /// Sets the event that the back end signals when it finds the ring broken.
    pub fn set_vring_err(&mut self, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<(), FrontendError> {
        self.set_vring_event(Request::SetVringErr, index, fd)
    }

    /// Enables or disables a ring. It is allowed only where the back end offered
    /// [`F_PROTOCOL_FEATURES`](crate::message::F_PROTOCOL_FEATURES).
    pub fn set_vring_enable(&mut self, index: u16, enable: bool) -> Result<(), FrontendError> {
        self.set_vring_state(Request::SetVringEnable, index, enable.into())
    }

    /// Has the back end announce by RARP that the guest with this address has migrated to it.
    pub fn send_rarp(&mut self, mac: [u8; 6]) -> Result<(), FrontendError> {
        let [a, b, c, d, e, f] = mac;
        self.command(Request::SendRarp, &[a, b, c, d, e, f, 0, 0], &[])
    }

    /// Tells the back end the MTU that the guest is told, in bytes.
    pub fn net_set_mtu(&mut self, mtu: u16) -> Result<(), FrontendError> {
        self.command(Request::NetSetMtu, u64::from(mtu).as_bytes(), &[])
    }

    /// Sets the device status (VIRTIO 1.4, 2.1).
    pub fn set_status(&mut self, status: u8) -> Result<(), FrontendError> {
        self.command(Request::SetStatus, u64::from(status).as_bytes(), &[])
    }

    /// Asks for the device status (VIRTIO 1.4, 2.1).
    pub fn get_status(&mut self) -> Result<u8, FrontendError> {
        let status: u64 = self.query(Request::GetStatus, &[])?;
        u8::try_from(status).map_err(|_| FrontendError::BadReply(Request::GetStatus.spec().name))
    }

    /// Returns the device to its initial state; the memory map stays.
    pub fn reset_device(&mut self) -> Result<(), FrontendError> {
        self.command(Request::ResetDevice, &[], &[])
    }

    /// Gives the back end a socket for its own requests; `fd` remains the caller's.
    pub fn set_backend_req_fd(&mut self, fd: BorrowedFd<'_>) -> Result<(), FrontendError> {
        self.command(Request::SetBackendReqFd, &[], &[fd])
    }

    /// Asks for a region in which a back end tracks `num_queues` rings of up to `queue_size`
    /// entries. The caller passes it with [`Frontend::set_inflight_fd`] to this back end, which
    /// does not track before that, and keeps it for the next one. Virtio features must have been
    /// set. `None`: the back end does not track in-flight buffers.
    pub fn get_inflight_fd(
        &mut self,
        num_queues: u16,
        queue_size: u16,
    ) -> Result<Option<InflightRegion>, FrontendError> {
        let request = Request::GetInflightFd;
        let wanted = InflightDescription { num_queues, queue_size, ..InflightDescription::default() };
        let deadline = self.send(request, 0, wanted.as_bytes(), &[])?;
        let Message { payload, mut fds, .. } = self.receive_message(request, deadline, Wire::read)?;
        let description =
            inflight_description(&payload).ok_or_else(|| FrontendError::BadReply(request.spec().name))?;
        match (description.mmap_size, fds.pop()) {
            (0, None) => Ok(None),
            (1.., Some(fd)) if fds.is_empty() => {
                Ok(Some(InflightRegion { description, fd: fd.into_inner() }))
            }
            _ => Err(FrontendError::BadReply(request.spec().name)),
        }
    }

    /// Gives the back end the region in which it, or the back end before it, tracks the rings. It
    /// must be sent before the rings start.
    pub fn set_inflight_fd(&mut self, region: &InflightRegion) -> Result<(), FrontendError> {
        self.command(Request::SetInflightFd, region.description.as_bytes(), &[region.fd()])
    }

    fn set_vring_state(&mut self, request: Request, index: u16, num: u32) -> Result<(), FrontendError> {
        self.command(request, VringState { index: index.into(), num }.as_bytes(), &[])
    }

    fn set_vring_event(
        &mut self,
        request: Request,
        index: u16,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), FrontendError> {
        let payload = u64::from(index) | if fd.is_none() { NO_FD } else { 0 };
        self.command(request, payload.as_bytes(), fd.as_slice())
    }

    /// Sends a message that has no reply of its own; waits for its acknowledgement where
    /// `REPLY_ACK` is negotiated.
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
            _ => Err(FrontendError::Refused(request.spec().name)),
        }
    }

    /// Sends a message whose reply has a fixed layout, and returns the reply.
    fn query<T: FromBytes + KnownLayout + Immutable>(
        &mut self,
        request: Request,
        payload: &[u8],
    ) -> Result<T, FrontendError> {
        let deadline = self.send(request, 0, payload, &[])?;
        self.receive(request, deadline)
    }

    fn query_bytes(&mut self, request: Request, payload: &[u8]) -> Result<Vec<u8>, FrontendError> {
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
        let row = request.spec();
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
                // The back end has not yet read earlier messages.
                Err(WireError::WouldBlock) => self.wait(request, PollFlags::OUT, deadline)?,
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
        T::read_from_bytes(&bytes).map_err(|_| FrontendError::BadReply(request.spec().name))
    }

    fn receive_bytes(&mut self, request: Request, deadline: Instant) -> Result<Vec<u8>, FrontendError> {
        Ok(self.receive_message(request, deadline, Wire::read_plain)?.payload)
    }

    fn receive_message(
        &mut self,
        request: Request,
        deadline: Instant,
        read: impl Fn(&mut Wire) -> Result<Option<Message>, WireError>,
    ) -> Result<Message, FrontendError> {
        let reply = loop {
            match read(&mut self.wire)? {
                Some(reply) => break reply,
                None => self.wait(request, PollFlags::IN, deadline)?,
            }
        };
        if !reply.header.is_reply() || reply.header.request != request as u32 {
            return Err(FrontendError::BadReply(request.spec().name));
        }
        Ok(reply)
    }

    fn wait(&self, request: Request, flags: PollFlags, deadline: Instant) -> Result<(), FrontendError> {
        let message = request.spec().name;
        let (deadline, total) = match self.deadline {
            Some(total) if total < deadline => (total, true),
            _ => (deadline, false),
        };
        let timeout = || match total {
            true => FrontendError::Deadline(message),
            false => FrontendError::Timeout { message, after: self.timeout },
        };
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
    /// Returns the socket. When it is readable although no call waits, the back end has probably
    /// closed the connection; see [`Frontend::check`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}
