//! A device behind a back end, set up and taken down in the order that QEMU uses.
//!
//! ```text
//! connect_device   GET_FEATURES, GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_OWNER
//! start            SET_FEATURES, SET_MEM_TABLE, GET_INFLIGHT_FD, SET_INFLIGHT_FD,
//!                  per ring ENABLE, then per ring NUM, BASE, ADDR, ERR, KICK, CALL, then SET_STATUS
//! stop             per ring GET_VRING_BASE, then SET_STATUS(0)
//! ```
//!
//! A device may be stopped and started any number of times on one connection. Where the back end
//! ended without a word, the [`InflightRegion`] says where the next one resumes packed rings: take it
//! from the old connection, and give it to the new one before it starts.

use std::os::fd::{AsFd, BorrowedFd};

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
        .union(ProtocolFeatures::INFLIGHT_SHMFD)
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

impl Negotiated {
    /// Whether rings are packed.
    pub fn packed(&self) -> bool {
        self.features & F_RING_PACKED != 0
    }
}

/// One ring to be started. Addresses are user addresses, in one of the memory regions.
#[derive(Clone, Copy, Debug)]
pub struct RingPlan<'a> {
    /// Entries.
    pub size: u16,
    /// Where to begin: what [`Connection::stop`] or [`resume_base`](crate::resume_base) returned; `None`: at
    /// the beginning of a new ring. See [`base`].
    pub base: Option<u32>,
    /// Descriptor table, or packed descriptor ring.
    pub desc: u64,
    /// Available ring, or a packed ring's driver event suppression.
    pub avail: u64,
    /// Used ring, or a packed ring's device event suppression.
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
    /// What the rings that run are tracked in, or those to come.
    inflight: Option<InflightRegion>,
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
    Ok(Connection { frontend, negotiated, enables, running: 0, inflight: None })
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

    /// Has rings go on that were tracked in `region` on an earlier connection, the next time the
    /// device starts: with as many rings of the same sizes, and in the memory in which they were.
    /// Without it, the next start takes a new region if the back end has one to give.
    pub fn set_inflight(&mut self, region: InflightRegion) {
        self.inflight = Some(region);
    }

    /// Takes the region in which the rings are tracked, to be kept for the next connection; `None`
    /// when the back end does not track them.
    pub fn take_inflight(&mut self) -> Option<InflightRegion> {
        self.inflight.take()
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
        self.share_inflight(rings)?;
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

    /// Gives the back end the region of an earlier connection, or one of its own.
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
    /// Whatever the connection meets.
    pub fn set_enabled(&mut self, index: u16, enabled: bool) -> Result<(), FrontendError> {
        if self.enables { self.frontend.set_vring_enable(index, enabled) } else { Ok(()) }
    }

    /// Stops the device: once this returns, the back end touches no ring any more. Returns where
    /// each ring can resume, and forgets the in-flight region, which is no longer needed for it.
    ///
    /// # Errors
    /// Whatever the connection meets; the rings are out of the back end's hands only when the
    /// connection is closed.
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
    /// The socket; see [`Frontend::check`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.frontend.as_fd()
    }
}
