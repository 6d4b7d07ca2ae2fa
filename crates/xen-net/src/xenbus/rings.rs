//! The nodes that describe a front end's rings and event channels: directly below the device for
//! one queue, in a node per queue for more, and those of the control ring. The front end's driver
//! writes them before it connects and removes them when it closes; the back end's driver reads them
//! once per connection.

use ringferry_xen::domain::EventPort;
use ringferry_xen::grant::GrantRef;
use ringferry_xen::store::{Nodes, StoreError, path};

use super::features::MAX_QUEUES;

const TX_RING: &str = "tx-ring-ref";
const RX_RING: &str = "rx-ring-ref";
const EVENT: &str = "event-channel";
const EVENT_TX: &str = "event-channel-tx";
const EVENT_RX: &str = "event-channel-rx";
const QUEUES: &str = "multi-queue-num-queues";
const CTRL_RING: &str = "ctrl-ring-ref";
const CTRL_EVENT: &str = "event-channel-ctrl";

/// The event channel ports of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ports {
    /// One port serves both directions.
    Shared(EventPort),
    /// Each direction has its own port.
    Split {
        /// Port of the ring on which the front end transmits.
        tx: EventPort,
        /// Port of the ring on which the front end receives.
        rx: EventPort,
    },
}

/// The published description of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueNodes {
    /// Grant of the ring on which the front end transmits.
    pub tx_ring: GrantRef,
    /// Grant of the ring on which the front end receives.
    pub rx_ring: GrantRef,
    /// The event channel ports of the queue.
    pub ports: Ports,
}

/// The published description of a control ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlNodes {
    /// Grant of the page that holds the ring.
    pub ring: GrantRef,
    /// Port of the control ring's event channel.
    pub port: EventPort,
}

/// The published description of all rings of a front end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingNodes {
    /// The queues of the interface, one or more.
    pub queues: Vec<QueueNodes>,
    /// The control ring, if the front end has one.
    pub control: Option<ControlNodes>,
}

/// The reason why a front end's description of its rings is invalid.
#[derive(Debug, thiserror::Error)]
pub enum RingsError {
    /// The number of queues was not offered.
    #[error("{0} queues are asked for, but 1 to {1} are possible")]
    Queues(u32, u16),
    /// A key is absent, or its value is not a number.
    #[error("{0} is absent, or no number")]
    Key(String),
    /// The connection to the store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Reads a mandatory number, which the other side may have written wrongly.
fn needed(nodes: &mut impl Nodes, path: String) -> Result<u32, RingsError> {
    match nodes.number(&path) {
        Ok(Some(number)) => Ok(number),
        Ok(None) | Err(StoreError::Malformed { .. }) => Err(RingsError::Key(path)),
        Err(error) => Err(error.into()),
    }
}

impl QueueNodes {
    fn read(nodes: &mut impl Nodes, at: &str) -> Result<Self, RingsError> {
        let tx_ring = GrantRef(needed(nodes, path::join(at, TX_RING))?);
        let rx_ring = GrantRef(needed(nodes, path::join(at, RX_RING))?);
        // Split channels need both keys: one alone is invalid.
        let split = nodes.read(&path::join(at, EVENT_TX))?.is_some();
        let ports = if split {
            let tx = EventPort(needed(nodes, path::join(at, EVENT_TX))?);
            Ports::Split { tx, rx: EventPort(needed(nodes, path::join(at, EVENT_RX))?) }
        } else {
            Ports::Shared(EventPort(needed(nodes, path::join(at, EVENT))?))
        };
        Ok(Self { tx_ring, rx_ring, ports })
    }

    fn write(&self, nodes: &mut impl Nodes, at: &str) -> Result<(), StoreError> {
        nodes.write(&path::join(at, TX_RING), self.tx_ring.to_string())?;
        nodes.write(&path::join(at, RX_RING), self.rx_ring.to_string())?;
        match self.ports {
            Ports::Shared(port) => nodes.write(&path::join(at, EVENT), port.0.to_string()),
            Ports::Split { tx, rx } => {
                nodes.write(&path::join(at, EVENT_TX), tx.0.to_string())?;
                nodes.write(&path::join(at, EVENT_RX), rx.0.to_string())
            }
        }
    }
}

/// All keys that [`RingNodes::write`] may write, except the nodes of queues.
const KEYS: [&str; 8] = [TX_RING, RX_RING, EVENT, EVENT_TX, EVENT_RX, QUEUES, CTRL_RING, CTRL_EVENT];

fn queue_node(device: &str, index: usize) -> String {
    path::join(device, &format!("queue-{index}"))
}

impl RingNodes {
    /// Reads the rings of the front end whose nodes are at path `device`, which may have up to
    /// `max_queues` queues.
    ///
    /// # Errors
    /// Any [`RingsError`].
    pub fn read(nodes: &mut impl Nodes, device: &str, max_queues: u16) -> Result<Self, RingsError> {
        let asked = path::join(device, QUEUES);
        let count = if nodes.read(&asked)?.is_some() { needed(nodes, asked)? } else { 1 };
        let max = max_queues.min(MAX_QUEUES);
        let queues = match count {
            1 => vec![QueueNodes::read(nodes, device)?],
            0 => return Err(RingsError::Queues(count, max)),
            _ if count > max.into() => return Err(RingsError::Queues(count, max)),
            _ => (0..count as usize)
                .map(|index| QueueNodes::read(nodes, &queue_node(device, index)))
                .collect::<Result<_, _>>()?,
        };
        let ring = path::join(device, CTRL_RING);
        let control = if nodes.read(&ring)?.is_some() {
            let ring = GrantRef(needed(nodes, ring)?);
            Some(ControlNodes { ring, port: EventPort(needed(nodes, path::join(device, CTRL_EVENT))?) })
        } else {
            None
        };
        Ok(Self { queues, control })
    }

    /// Writes the rings to the nodes at path `device`, and removes those of an earlier connection.
    /// `multi_queue` is true if the back end supports more than one queue.
    ///
    /// # Errors
    /// The store refused a write.
    pub fn write(&self, nodes: &mut impl Nodes, device: &str, multi_queue: bool) -> Result<(), StoreError> {
        Self::clear(nodes, device)?;
        if multi_queue {
            nodes.write(&path::join(device, QUEUES), self.queues.len().to_string())?;
        }
        match &self.queues[..] {
            [only] => only.write(nodes, device)?,
            queues => {
                for (index, queue) in queues.iter().enumerate() {
                    queue.write(nodes, &queue_node(device, index))?;
                }
            }
        }
        let Some(ControlNodes { ring, port }) = self.control else { return Ok(()) };
        nodes.write(&path::join(device, CTRL_RING), ring.to_string())?;
        nodes.write(&path::join(device, CTRL_EVENT), port.0.to_string())
    }

    /// Removes the nodes of all rings at path `device`.
    ///
    /// # Errors
    /// The store refused a write.
    pub fn clear(nodes: &mut impl Nodes, device: &str) -> Result<(), StoreError> {
        let queues = nodes.directory(device)?.into_iter().filter(|name| name.starts_with("queue-"));
        for key in queues.chain(KEYS.map(str::to_owned)) {
            nodes.remove(&path::join(device, &key))?;
        }
        Ok(())
    }
}
