//! [`Connection`]: the front end's set-up of a whole device behind a back end, in the order that
//! QEMU uses.
//!
//! [`connect_device`] creates it on a connected socket, [`Connection::start`] and
//! [`Connection::stop`] alternate any number of times, and dropping it closes the socket, which is
//! the back end's order to stop. Every call blocks on the caller's thread for at most the
//! [`Frontend`]'s timeout per message.
//!
//! ```text
//! connect_device   GET_FEATURES, GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_OWNER
//! start            SET_FEATURES, SET_MEM_TABLE, GET_INFLIGHT_FD, SET_INFLIGHT_FD,
//!                  per ring ENABLE, then per ring NUM, BASE, ADDR, ERR, KICK, CALL, then SET_STATUS
//! stop             per ring GET_VRING_BASE, then SET_STATUS(0)
//! ```
//!
//! If the back end ends without stopping its rings, the [`InflightRegion`] holds the positions at
//! which the next one resumes packed rings: take it from the old connection, and give it to the new
//! one before it starts.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use ringferry_memory::RegionSpec;
use ringferry_sys::socket::Stream;

use crate::base;
use crate::frontend::{Frontend, FrontendError};
use crate::inflight::InflightRegion;
use crate::message::{F_PROTOCOL_FEATURES, F_RING_PACKED, MAX_VIRTQUEUES, ProtocolFeatures};
use crate::wire::WireError;

/// Device status bits (VIRTIO 1.4, 2.1) in the order a driver sets them.
mod status {
    pub const ACKNOWLEDGE: u8 = 1;
    pub const DRIVER: u8 = 2;
    pub const DRIVER_OK: u8 = 4;
    pub const FEATURES_OK: u8 = 8;
}

/// The features that a front end asks of a back end.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Virtio features that are negotiated where the back end offers them.
    pub features: u64,
    /// Virtio features without which [`connect_device`] fails; they are negotiated, too.
    pub required: u64,
    /// Protocol features that are negotiated where the back end offers them.
    pub protocol: ProtocolFeatures,
}

impl Wanted {
    /// The protocol features that this front end uses with a network device.
    pub const NET_PROTOCOL: ProtocolFeatures = ProtocolFeatures::MQ
        .union(ProtocolFeatures::REPLY_ACK)
        .union(ProtocolFeatures::RARP)
        .union(ProtocolFeatures::NET_MTU)
        .union(ProtocolFeatures::INFLIGHT_SHMFD)
        .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS)
        .union(ProtocolFeatures::STATUS);
}

/// The result of negotiation, fixed for the life of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Virtio features that both ends use.
    pub features: u64,
    /// Protocol features that both ends use.
    pub protocol: ProtocolFeatures,
    /// Number of queues that the back end has (queue pairs of a network device); 1 where it cannot
    /// be asked.
    pub queue_num: u16,
}

impl Negotiated {
    /// Returns true if packed rings were negotiated.
    pub fn packed(&self) -> bool {
        self.features & F_RING_PACKED != 0
    }
}

/// Describes one ring to [`Connection::start`]. Addresses are user addresses, in one of the memory
/// regions.
#[derive(Clone, Copy, Debug)]
pub struct RingPlan<'a> {
    /// Size of the ring in entries.
    pub size: u16,
    /// Base at which the ring resumes, as returned by [`Connection::stop`] or
    /// [`resume_base`](crate::resume_base); `None` for a new ring. See [`base`].
    pub base: Option<u32>,
    /// Address of the descriptor table, or of a packed ring's descriptors.
    pub desc: u64,
    /// Address of the available ring, or of a packed ring's driver event suppression.
    pub avail: u64,
    /// Address of the used ring, or of a packed ring's device event suppression.
    pub used: u64,
    /// Event with which the driver signals available buffers; `None`: the back end polls.
    pub kick: Option<BorrowedFd<'a>>,
    /// Event with which the back end signals used buffers; `None`: the driver polls.
    pub call: Option<BorrowedFd<'a>>,
    /// Event with which the back end signals that it found the ring broken.
    pub err: Option<BorrowedFd<'a>>,
    /// True if the ring is enabled before it starts.
    pub enabled: bool,
}

/// A device behind a back end, stopped or started.
#[derive(Debug)]
pub struct Connection {
    frontend: Frontend,
    negotiated: Negotiated,
    /// True if the back end offers protocol features and so knows `SET_VRING_ENABLE`.
    enables: bool,
    /// Number of rings that run; they have the indices from 0.
    running: u16,
    /// In-flight region of the rings that run, or of those that start next.
    inflight: Option<InflightRegion>,
}

/// Negotiates features with the back end at the other end of `stream`, and starts the session.
///
/// # Errors
/// [`FrontendError::MissingFeatures`] when the back end lacks what is required; otherwise any other
/// [`FrontendError`] of the messages sent.
pub fn connect_device(stream: Stream, wanted: &Wanted) -> Result<Connection, FrontendError> {
    connect_device_until(stream, wanted, None)
}

/// Does the same as [`connect_device`], and is done by `deadline`, if there is one, which then also holds for everything that
/// is done with the connection until [another one](Frontend::set_deadline) is set.
///
/// # Errors
/// As for [`connect_device`], and [`FrontendError::Deadline`].
pub fn connect_device_until(
    stream: Stream,
    wanted: &Wanted,
    deadline: Option<Instant>,
) -> Result<Connection, FrontendError> {
    let mut frontend = Frontend::new(stream).map_err(WireError::Io)?;
    frontend.set_deadline(deadline);
    let offered = frontend.get_features()?;
    let missing = wanted.required & !offered;
    if missing != 0 {
        return Err(FrontendError::MissingFeatures(missing));
    }
    let enables = offered & F_PROTOCOL_FEATURES != 0;
    let mut protocol = ProtocolFeatures::empty();
    let mut queue_num = 1;
    if enables {
        protocol = frontend.get_protocol_features()? & wanted.protocol;
        frontend.set_protocol_features(protocol)?;
        if protocol.contains(ProtocolFeatures::MQ) {
            queue_num = u16::try_from(frontend.get_queue_num()?).unwrap_or(MAX_VIRTQUEUES);
        }
    }
    frontend.set_owner()?;
    let features = offered & (wanted.features | wanted.required) & !F_PROTOCOL_FEATURES;
    let negotiated = Negotiated { features, protocol, queue_num: queue_num.min(MAX_VIRTQUEUES) };
    Ok(Connection { frontend, negotiated, enables, running: 0, inflight: None })
}

impl Connection {
    /// Returns the features and the number of queues that were negotiated.
    pub fn negotiated(&self) -> Negotiated {
        self.negotiated
    }

    /// Gives access to the typed calls for everything beside set-up: MTU, announcements, memory
    /// hot-plug.
    pub fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }

    /// Sets the in-flight region of an earlier connection. The next [`start`](Connection::start)
    /// resumes the rings that it tracks, which must be as many and of the same sizes, in the same
    /// memory. Without it, the next start takes a new region if the back end provides one.
    pub fn set_inflight(&mut self, region: InflightRegion) {
        self.inflight = Some(region);
    }

    /// Takes the region in which the rings are tracked, to be kept for the next connection; `None`
    /// when the back end does not track them.
    pub fn take_inflight(&mut self) -> Option<InflightRegion> {
        self.inflight.take()
    }

    /// Starts the device with `rings`, the first of which has index 0. If the device is running it
    /// is stopped first, and its rings' bases are lost.
    ///
    /// # Errors
    /// A [refusal](FrontendError::Refused) can leave some rings started: call [`Connection::stop`].
    pub fn start(
        &mut self,
        memory: &[(RegionSpec, BorrowedFd<'_>)],
        rings: &[RingPlan<'_>],
    ) -> Result<(), FrontendError> {
        if rings.len() > usize::from(MAX_VIRTQUEUES) {
            return Err(FrontendError::TooManyRings(rings.len()));
        }
        self.stop()?;
        let protocol = if self.enables { F_PROTOCOL_FEATURES } else { 0 };
        self.set_status(status::ACKNOWLEDGE | status::DRIVER)?;
        self.frontend.set_features(self.negotiated.features | protocol)?;
        self.set_status(status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK)?;
        self.frontend.set_mem_table(memory)?;
        self.share_inflight(rings)?;
        // Rings are enabled before they run, as QEMU does: a ring that runs disabled discards the
        // frames that wait in it.
        for (index, ring) in (0u16..).zip(rings) {
            self.set_enabled(index, ring.enabled)?;
        }
        for (index, ring) in (0u16..).zip(rings) {
            self.running = index + 1;
            self.start_ring(index, ring)?;
        }
        // DPDK's back ends begin to work only at DRIVER_OK if status is negotiated.
        self.set_status(status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK)
    }

    /// Gives the back end the region of an earlier connection, or a new one that it made itself.
    fn share_inflight(&mut self, rings: &[RingPlan<'_>]) -> Result<(), FrontendError> {
        let protocol = self.negotiated.protocol;
        if rings.is_empty() || !protocol.contains(ProtocolFeatures::INFLIGHT_SHMFD) {
            self.inflight = None;
            return Ok(());
        }
        if self.inflight.is_none() {
            let largest = rings.iter().map(|ring| ring.size).max().unwrap_or(0);
            self.inflight = self.frontend.get_inflight_fd(rings.len() as u16, largest)?;
        }
        match &self.inflight {
            Some(region) => self.frontend.set_inflight_fd(region),
            None => Ok(()),
        }
    }

    fn start_ring(&mut self, index: u16, ring: &RingPlan<'_>) -> Result<(), FrontendError> {
        let packed = self.negotiated.packed();
        let first = base::encode(base::first_position(packed), packed);
        let base = ring.base.map_or(first, |base| base::complete(base, packed));
        self.frontend.set_vring_num(index, ring.size)?;
        self.frontend.set_vring_base(index, base)?;
        self.frontend.set_vring_addr(index, ring.desc, ring.avail, ring.used)?;
        if ring.err.is_some() {
            self.frontend.set_vring_err(index, ring.err)?;
        }
        self.frontend.set_vring_kick(index, ring.kick)?;
        self.frontend.set_vring_call(index, ring.call)
    }

    /// Enables or disables a ring. Without protocol features all rings are always enabled, and this
    /// does nothing.
    ///
    /// # Errors
    /// Any [`FrontendError`] of `SET_VRING_ENABLE`.
    pub fn set_enabled(&mut self, index: u16, enabled: bool) -> Result<(), FrontendError> {
        if self.enables { self.frontend.set_vring_enable(index, enabled) } else { Ok(()) }
    }

    /// Stops the device: once this returns, the back end no longer touches any ring. Returns the
    /// base at which each ring can resume, and drops the in-flight region, which is not needed for
    /// that.
    ///
    /// # Errors
    /// Any [`FrontendError`] of the messages sent; the back end lets go of the rings then only when
    /// the connection is closed.
    pub fn stop(&mut self) -> Result<Vec<u32>, FrontendError> {
        let running = std::mem::take(&mut self.running);
        if running == 0 {
            return Ok(Vec::new());
        }
        let packed = self.negotiated.packed();
        let stop = |index| Ok(base::complete(self.frontend.get_vring_base(index)?, packed));
        let bases = (0..running).map(stop).collect::<Result<Vec<_>, FrontendError>>()?;
        self.inflight = None;
        self.set_status(0)?;
        Ok(bases)
    }

    fn set_status(&mut self, status: u8) -> Result<(), FrontendError> {
        if self.negotiated.protocol.contains(ProtocolFeatures::STATUS) {
            self.frontend.set_status(status)?;
        }
        Ok(())
    }
}

impl AsFd for Connection {
    /// Returns the socket, to be polled for [`Frontend::check`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.frontend.as_fd()
    }
}
