//! What each side takes, as the store says it, and what comes of it.
//!
//! A feature that is not mentioned is not there, but for checksums of IPv4: every back end takes blank ones, unless it says
//! that it does not. What is no number, or no 1, is a no.

use ringferry_xen::store::{Nodes, StoreError, path};

use crate::offload::Accepts;

/// Most queues that are ever dealt with, whatever the other side says.
pub const MAX_QUEUES: u16 = 64;

/// Keys that both sides use for what they take.
const SG: &str = "feature-sg";
const GSO4: &str = "feature-gso-tcpv4";
const GSO6: &str = "feature-gso-tcpv6";
const NO_CSUM4: &str = "feature-no-csum-offload";
const CSUM6: &str = "feature-ipv6-csum-offload";
/// Key of the original persistent grants, on both sides.
const PERSISTENT: &str = "feature-persistent";

const RX_COPY: &str = "feature-rx-copy";
const SPLIT_EVENTS: &str = "feature-split-event-channels";
const MAX_QUEUES_KEY: &str = "multi-queue-max-queues";
const CTRL_RING: &str = "feature-ctrl-ring";
const MULTICAST: &str = "feature-multicast-control";

const REQUEST_RX_COPY: &str = "request-rx-copy";
const RX_NOTIFY: &str = "feature-rx-notify";
const REQUEST_MULTICAST: &str = "request-multicast-control";

fn flag(value: bool) -> &'static str {
    if value { "1" } else { "0" }
}

/// The value of a key of a side that may have written anything: what is no number is as good as absent.
fn number(nodes: &mut impl Nodes, device: &str, key: &str) -> Result<Option<u32>, StoreError> {
    match nodes.number(&path::join(device, key)) {
        Err(StoreError::Malformed { .. }) => Ok(None),
        result => result,
    }
}

impl Accepts {
    /// What the side says that has its nodes at `device`.
    fn read(nodes: &mut impl Nodes, device: &str) -> Result<Self, StoreError> {
        let mut yes = |key| nodes.flag(&path::join(device, key));
        let (sg, gso4, gso6) = (yes(SG)?, yes(GSO4)?, yes(GSO6)?);
        let (no_csum4, csum6) = (yes(NO_CSUM4)?, yes(CSUM6)?);
        Ok(Self { sg, csum4: !no_csum4, csum6, gso4, gso6 }.consistent())
    }

    fn write(self, nodes: &mut impl Nodes, device: &str) -> Result<(), StoreError> {
        let Self { sg, csum4, csum6, gso4, gso6 } = self.consistent();
        let keys = [(SG, sg), (GSO4, gso4), (GSO6, gso6), (NO_CSUM4, !csum4), (CSUM6, csum6)];
        keys.into_iter().try_for_each(|(key, value)| nodes.write(&path::join(device, key), flag(value)))
    }
}

/// What a back end offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackFeatures {
    /// What may be sent to it.
    pub accepts: Accepts,
    /// It writes received packets to the pages that are posted. Without it there is nothing to talk about; the other way
    /// has been gone from all back ends for years.
    pub rx_copy: bool,
    /// A queue may have one event channel for each direction.
    pub split_events: bool,
    /// Most queues, from 1 to [`MAX_QUEUES`].
    pub max_queues: u16,
    /// There may be a control ring, over which grants are handed over among others.
    pub ctrl_ring: bool,
    /// It keeps the grants that it has once mapped: the original persistent grants.
    pub persistent: bool,
    /// It can leave out multicast packets that were not asked for.
    pub multicast_control: bool,
}

impl BackFeatures {
    /// Reads what the back end says that has its nodes at `device`.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub fn read(nodes: &mut impl Nodes, device: &str) -> Result<Self, StoreError> {
        let accepts = Accepts::read(nodes, device)?;
        let max = number(nodes, device, MAX_QUEUES_KEY)?.unwrap_or(1);
        let mut yes = |key| nodes.flag(&path::join(device, key));
        Ok(Self {
            accepts,
            rx_copy: yes(RX_COPY)?,
            split_events: yes(SPLIT_EVENTS)?,
            max_queues: u16::try_from(max).unwrap_or(MAX_QUEUES).clamp(1, MAX_QUEUES),
            ctrl_ring: yes(CTRL_RING)?,
            persistent: yes(PERSISTENT)?,
            multicast_control: yes(MULTICAST)?,
        })
    }

    /// Writes them.
    ///
    /// # Errors
    /// The store refuses.
    pub fn write(&self, nodes: &mut impl Nodes, device: &str) -> Result<(), StoreError> {
        self.accepts.write(nodes, device)?;
        let keys = [
            (RX_COPY, self.rx_copy),
            (SPLIT_EVENTS, self.split_events),
            (CTRL_RING, self.ctrl_ring),
            (PERSISTENT, self.persistent),
            (MULTICAST, self.multicast_control),
        ];
        for (key, value) in keys {
            nodes.write(&path::join(device, key), flag(value))?;
        }
        nodes.write(&path::join(device, MAX_QUEUES_KEY), self.max_queues.to_string())
    }
}

/// What a front end asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontFeatures {
    /// What may be sent to it.
    pub accepts: Accepts,
    /// It wants received packets written to the pages that it posts.
    pub rx_copy: bool,
    /// It tells when it has posted pages: one that does not is never waited for.
    pub rx_notify: bool,
    /// Its grants stay with their pages until it closes: they may be kept mapped.
    pub persistent: bool,
    /// It wants no multicast packets but those it asks for.
    pub multicast_filter: bool,
}

impl FrontFeatures {
    /// Reads what the front end says that has its nodes at `device`.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub fn read(nodes: &mut impl Nodes, device: &str) -> Result<Self, StoreError> {
        let accepts = Accepts::read(nodes, device)?;
        let mut yes = |key| nodes.flag(&path::join(device, key));
        Ok(Self {
            accepts,
            rx_copy: yes(REQUEST_RX_COPY)?,
            rx_notify: yes(RX_NOTIFY)?,
            persistent: yes(PERSISTENT)?,
            multicast_filter: yes(REQUEST_MULTICAST)?,
        })
    }

    /// Writes them.
    ///
    /// # Errors
    /// The store refuses.
    pub fn write(&self, nodes: &mut impl Nodes, device: &str) -> Result<(), StoreError> {
        self.accepts.write(nodes, device)?;
        let keys = [
            (REQUEST_RX_COPY, self.rx_copy),
            (RX_NOTIFY, self.rx_notify),
            (PERSISTENT, self.persistent),
            (REQUEST_MULTICAST, self.multicast_filter),
        ];
        keys.into_iter().try_for_each(|(key, value)| nodes.write(&path::join(device, key), flag(value)))
    }
}
