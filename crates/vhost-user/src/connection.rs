//! A device behind a back end, set up and taken down in the order that QEMU uses.
//!
//! ```text
//! connect_device   GET_FEATURES, GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_OWNER
//! start            SET_FEATURES, SET_MEM_TABLE,
//!                  per ring NUM, BASE, ADDR, ERR, KICK, CALL, then per ring ENABLE, then SET_STATUS
//! stop             per ring GET_VRING_BASE, then SET_STATUS(0)
//! ```
//!
//! A device may be stopped and started any number of times on one connection.

use std::os::fd::{AsFd, BorrowedFd};

use ringferry_memory::RegionSpec;
use ringferry_sys::socket::Stream;

use crate::frontend::{Frontend, FrontendError};
use crate::message::{F_PROTOCOL_FEATURES, MAX_VIRTQUEUES, ProtocolFeatures};
use crate::wire::WireError;

/// Device status bits (VIRTIO 1.4, 2.1) in the order a driver sets them.
mod status {
    pub const ACKNOWLEDGE: u8 = 1;
    pub const DRIVER: u8 = 2;
    pub const DRIVER_OK: u8 = 4;
    pub const FEATURES_OK: u8 = 8;
}

/// What a front end would like of a back end.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Virtio features to take where they are offered.
    pub features: u64,
    /// Those among them without which nothing works.
    pub required: u64,
    /// Protocol features to take where they are offered.
    pub protocol: ProtocolFeatures,
}

impl Wanted {
    /// Protocol features this front end makes use of with a network device.
    pub const NET_PROTOCOL: ProtocolFeatures = ProtocolFeatures::MQ
        .union(ProtocolFeatures::REPLY_ACK)
        .union(ProtocolFeatures::RARP)
        .union(ProtocolFeatures::NET_MTU)
        .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS)
        .union(ProtocolFeatures::STATUS);
}

/// What both ends agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Virtio features.
    pub features: u64,
    /// Protocol features.
    pub protocol: ProtocolFeatures,
    /// What the back end says of its queues (queue pairs of a network device); 1 where it cannot
    /// be asked.
    pub queue_num: u16,
}

/// One ring to be started. Addresses are user addresses, in one of the memory regions.
#[derive(Clone, Copy, Debug)]
pub struct RingPlan<'a> {
    /// Entries.
    pub size: u16,
    /// Where to begin: 0, or what [`Connection::stop`] returned.
    pub base: u32,
    /// Descriptor table.
    pub desc: u64,
    /// Available ring.
    pub avail: u64,
    /// Used ring.
    pub used: u64,
    /// Event we write; `None`: the back end polls.
    pub kick: Option<BorrowedFd<'a>>,
    /// Event the back end writes; `None`: we poll.
    pub call: Option<BorrowedFd<'a>>,
    /// Event the back end writes when it finds the ring broken.
    pub err: Option<BorrowedFd<'a>>,
    /// Whether the ring begins enabled.
    pub enabled: bool,
}

/// A device behind a back end.
#[derive(Debug)]
pub struct Connection {
    frontend: Frontend,
    negotiated: Negotiated,
    /// Whether `SET_VRING_ENABLE` is spoken.
    enables: bool,
    /// Rings that run, counted from index 0.
    running: u16,
}

/// Agrees with a back end on features.
///
/// # Errors
/// [`FrontendError::MissingFeatures`] when the back end lacks what is required; else whatever the
/// connection meets.
pub fn connect_device(stream: Stream, wanted: &Wanted) -> Result<Connection, FrontendError> {
    let mut frontend = Frontend::new(stream).map_err(WireError::Io)?;
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
    Ok(Connection { frontend, negotiated, enables, running: 0 })
}

impl Connection {
    /// What was agreed on.
    pub fn negotiated(&self) -> Negotiated {
        self.negotiated
    }

    /// The typed calls, for all that is not set-up: MTU, announcements, memory hot-plug.
    pub fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }

    /// Starts the device with `rings`, the first of which has index 0. A device that runs is
    /// stopped first, and its rings' bases are lost.
    ///
    /// # Errors
    /// A [refusal](FrontendError::Refused) leaves some rings started: call [`Connection::stop`].
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
        // Before the rings run, as QEMU does: a ring that runs disabled discards what waits in it.
        for (index, ring) in (0u16..).zip(rings) {
            self.set_enabled(index, ring.enabled)?;
        }
        for (index, ring) in (0u16..).zip(rings) {
            self.running = index + 1;
            self.start_ring(index, ring)?;
        }
        // DPDK's back ends begin to work at this, where they were told of status at all.
        self.set_status(status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK)
    }

    fn start_ring(&mut self, index: u16, ring: &RingPlan<'_>) -> Result<(), FrontendError> {
        self.frontend.set_vring_num(index, ring.size)?;
        self.frontend.set_vring_base(index, ring.base)?;
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
    /// Whatever the connection meets.
    pub fn set_enabled(&mut self, index: u16, enabled: bool) -> Result<(), FrontendError> {
        if self.enables { self.frontend.set_vring_enable(index, enabled) } else { Ok(()) }
    }

    /// Stops the device: once this returns, the back end touches no ring any more. Returns where
    /// each ring can resume.
    ///
    /// # Errors
    /// Whatever the connection meets; the rings are out of the back end's hands only when the
    /// connection is closed.
    pub fn stop(&mut self) -> Result<Vec<u32>, FrontendError> {
        let running = std::mem::take(&mut self.running);
        if running == 0 {
            return Ok(Vec::new());
        }
        let bases =
            (0..running).map(|index| self.frontend.get_vring_base(index)).collect::<Result<Vec<_>, _>>()?;
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
    /// The socket; see [`Frontend::check`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.frontend.as_fd()
    }
}
