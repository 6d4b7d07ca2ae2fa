//! The features that each side publishes in the store. The drivers write their own and read the
//! other side's once per connection, on their control thread.
//!
//! A feature whose key is absent is off, except checksums of IPv4: a side accepts blank ones unless
//! it publishes that it does not. A value that is not the number 1 means off.

use ringferry_xen::store::{Nodes, StoreError, path};

use crate::offload::Accepts;

/// Most queues of an interface that are ever used, whatever the other side publishes.
pub const MAX_QUEUES: u16 = 64;

/// Keys of the features that both sides publish.
const SG: &str = "feature-sg";
const GSO4: &str = "feature-gso-tcpv4";
const GSO6: &str = "feature-gso-tcpv6";
const NO_CSUM4: &str = "feature-no-csum-offload";
const CSUM6: &str = "feature-ipv6-csum-offload";
/// Key of persistent grants, published by both sides.
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

/// Reads a number that the other side may have written wrongly: a value that is not a number counts
/// as absent.
fn number(nodes: &mut impl Nodes, device: &str, key: &str) -> Result<Option<u32>, StoreError> {
    match nodes.number(&path::join(device, key)) {
        Err(StoreError::Malformed { .. }) => Ok(None),
        result => result,
    }
}

impl Accepts {
    /// Reads the features of the side whose nodes are at path `device`.
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

/// The features that a back end publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackFeatures {
    /// The frames that the back end accepts.
    pub accepts: Accepts,
    /// The back end copies received packets into the pages that are posted. A front end cannot
    /// connect without this; page flipping, the alternative, has been gone from all back ends for
    /// years.
    pub rx_copy: bool,
    /// A queue may have one event channel per direction.
    pub split_events: bool,
    /// Most queues of an interface, from 1 to [`MAX_QUEUES`].
    pub max_queues: u16,
    /// A front end may have a control ring, which also carries static grants.
    pub ctrl_ring: bool,
    /// The back end keeps grants mapped after their first use (persistent grants).
    pub persistent: bool,
    /// The back end can filter multicast packets by address.
    pub multicast_control: bool,
}

impl BackFeatures {
    /// Reads the features of the back end whose nodes are at path `device`.
    ///
    /// # Errors
    /// The connection to the store failed.
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

    /// Writes the features to the nodes at path `device`.
    ///
    /// # Errors
    /// The store refused a write.
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

/// The features that a front end publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontFeatures {
    /// The frames that the front end accepts.
    pub accepts: Accepts,
    /// The front end wants received packets copied into the pages that it posts.
    pub rx_copy: bool,
    /// The front end signals when it has posted pages; the back end never queues frames for one
    /// that does not.
    pub rx_notify: bool,
    /// A grant stays with its page until the front end closes, so the back end may keep it mapped.
    pub persistent: bool,
    /// The front end wants only the multicast packets of addresses that it registers.
    pub multicast_filter: bool,
}

impl FrontFeatures {
    /// Reads the features of the front end whose nodes are at path `device`.
    ///
    /// # Errors
    /// The connection to the store failed.
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

    /// Writes the features to the nodes at path `device`.
    ///
    /// # Errors
    /// The store refused a write.
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
