//! One port of a switch.

use std::collections::BTreeMap;

use bitflags::bitflags;
use ringferry_packet::ether::{Mac, MacError};
use ringferry_sys::tap::Offloads as TapOffloads;
use ringferry_virtio_net::Features;
use serde::{Deserialize, Serialize};

use super::{PairSnapshot, QueueRole, QueueSnapshot, Rates};
use crate::names;
use crate::rules::RulesByKey;

/// One port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(into = "Json", try_from = "Json")]
pub struct PortSnapshot {
    /// Its unique name.
    pub name: String,
    /// What kind of port it is, and what was negotiated: `kind` and `features` in JSON.
    pub negotiated: Negotiated,
    /// Whether it carries packets, and if not, why.
    pub state: PortState,
    /// Why no peer is served, or no further one: what a peer did for which the port is out of service, or that its socket was removed.
    pub fault: Option<String>,
    /// The peer of the port: socket path, tap name or inherited descriptor.
    pub peer: String,
    /// Largest frame payload in bytes.
    pub mtu: u16,
    /// MAC address the port advertises, if any.
    pub mac: Option<Mac>,
    /// The virtqueues; a tap has none.
    pub queues: Vec<QueueSnapshot>,
    /// Counters by name. A reader shows those that it does not know, too.
    pub counters: BTreeMap<String, u64>,
    /// Dropped packets by the name of the [reason](crate::DropReason). A reader shows those that it does not know, too: what a later
    /// version has a reason for is dropped all the same.
    pub drops: BTreeMap<String, u64>,
    /// What its frames must obey.
    pub rules: RulesByKey,
    /// The queue pairs that carry packets, or have.
    pub pairs: Vec<PairSnapshot>,
    /// Rates of its counters and drops over the last 1, 10 and 60 seconds.
    pub rates: Vec<Rates>,
    /// Another front end has connected, and waits until this one has disconnected.
    pub another_waits: bool,
    /// The end of the connection of its last front end, if the switch ended it and the port has not been up since.
    pub ended: Option<SessionEnd>,
    /// Seconds since the front end that is connected has stopped its rings. Absent if one of them runs, or none ever did.
    pub stopped_seconds: Option<u64>,
    /// The process that is connected to the socket of the port.
    pub front_end: Option<FrontEnd>,
}

/// The process at the other end of a port's socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FrontEnd {
    /// Number of the process that made the connection, as the switch sees it. Absent if it is in a PID namespace that is not visible to the switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The user id that it had then.
    pub user: u32,
    /// True if it has sent a message.
    pub heard: bool,
    /// Bytes of its memory that are mapped: what `port_memory_gib` bounds.
    pub mapped_bytes: u64,
}

impl FrontEnd {
    /// Says who it is, for people.
    pub fn to_text(&self) -> String {
        let pid = self.pid.map_or_else(|| "of another PID namespace".to_owned(), |pid| pid.to_string());
        format!("process {pid} of user {}", self.user)
    }
}

/// A connection that the switch has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SessionEnd {
    /// Why it did, for people.
    pub why: String,
    /// How many seconds ago.
    pub seconds: u64,
}

impl PortSnapshot {
    /// Makes the snapshot of a port of which nothing else is known: it is down, and has nothing.
    pub fn new(name: String, negotiated: Negotiated) -> PortSnapshot {
        PortSnapshot {
            name,
            negotiated,
            state: PortState::Down,
            fault: None,
            peer: String::new(),
            mtu: 0,
            mac: None,
            queues: Vec::new(),
            counters: BTreeMap::new(),
            drops: BTreeMap::new(),
            rules: RulesByKey::new(),
            pairs: Vec::new(),
            rates: Vec::new(),
            another_waits: false,
            ended: None,
            stopped_seconds: None,
            front_end: None,
        }
    }

    /// Returns the queues of one role that run.
    pub fn running(&self, role: QueueRole) -> impl Iterator<Item = &QueueSnapshot> {
        self.queues.iter().filter(move |queue| queue.role == role && queue.runs())
    }

    /// How full its rings of one role are: the entries that the guest has made available and their size, added up over all pairs that run or of one. `None` if that
    /// is not known of one of them, or there are none.
    pub fn ring_fill(&self, role: QueueRole, pair: Option<u16>) -> Option<(u64, u64)> {
        let queues = self.running(role).filter(|queue| {
            pair.is_none_or(|pair| ringferry_virtio_net::queue_index::pair(queue.index) == pair)
        });
        let all = queues.map(|queue| Some((u64::from(queue.available?), u64::from(queue.size))));
        all.reduce(|sum, queue| sum.zip(queue).map(|(sum, queue)| (sum.0 + queue.0, sum.1 + queue.1)))
            .flatten()
    }
}

/// The kind of a port, with what its two ends agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Negotiated {
    /// A guest, by vhost-user: the features of its driver.
    VhostUser(Features),
    /// The host's network stack: what it takes unfinished.
    Tap(TapOffloads),
    /// A Xen guest.
    XenVif(VifFeatures),
    /// An interface of the host, by AF_XDP: how its packets come and go.
    Xdp(XdpFeatures),
    /// A kind that only a later version has, as it was said.
    Later {
        /// Its name.
        kind: String,
        /// Names of its features.
        features: Vec<String>,
    },
}

bitflags! {
    /// What the front end of a Xen guest takes, and how its pages are reached.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct VifFeatures: u8 {
        /// A packet may lie in several slots.
        const SG = 1 << 0;
        /// Checksums may be blank, over IPv4 and IPv6.
        const CSUM = 1 << 1;
        /// TCP over IPv4 may come unsegmented.
        const GSO_TCPV4 = 1 << 2;
        /// TCP over IPv6 may come unsegmented.
        const GSO_TCPV6 = 1 << 3;
        /// Pages stay mapped: the front end uses the same ones again and again.
        const PERSISTENT = 1 << 4;
        /// The hypervisor copies each packet.
        const COPY = 1 << 5;
        /// Pages are mapped for one packet.
        const MAP = 1 << 6;
        /// There is a control ring.
        const CTRL_RING = 1 << 7;
    }
}

bitflags! {
    /// How packets get between an interface and the switch.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct XdpFeatures: u8 {
        /// The interface reads and writes the switch's memory itself; else the kernel copies.
        const ZERO_COPY = 1 << 0;
        /// A packet may lie in several frames.
        const SEVERAL_FRAMES = 1 << 1;
    }
}

impl Negotiated {
    const VHOST_USER: &str = "vhost-user";
    const TAP: &str = "tap";
    const XEN_VIF: &str = "xen-vif";
    const XDP: &str = "xdp";

    /// Returns true if an interface of the host is behind the port.
    pub fn is_interface(&self) -> bool {
        matches!(self, Negotiated::Tap(_) | Negotiated::Xdp(_))
    }

    /// The name of the kind.
    pub fn kind(&self) -> &str {
        match self {
            Negotiated::VhostUser(_) => Self::VHOST_USER,
            Negotiated::Tap(_) => Self::TAP,
            Negotiated::XenVif(_) => Self::XEN_VIF,
            Negotiated::Xdp(_) => Self::XDP,
            Negotiated::Later { kind, .. } => kind,
        }
    }

    /// The names of the features, as whoever negotiates them spells them.
    pub fn features(&self) -> Vec<String> {
        match self {
            Negotiated::VhostUser(features) => features.names(),
            Negotiated::Tap(offloads) => names::of(offloads, names::upper),
            Negotiated::XenVif(features) => names::of(features, names::kebab),
            Negotiated::Xdp(features) => names::of(features, names::kebab),
            Negotiated::Later { features, .. } => features.clone(),
        }
    }

    fn named(kind: String, features: Vec<String>) -> Negotiated {
        match kind.as_str() {
            Self::VHOST_USER => Negotiated::VhostUser(names::features(&features)),
            Self::TAP => Negotiated::Tap(names::set(&features, names::upper)),
            Self::XEN_VIF => Negotiated::XenVif(names::set(&features, names::kebab)),
            Self::XDP => Negotiated::Xdp(names::set(&features, names::kebab)),
            _ => Negotiated::Later { kind, features },
        }
    }
}

/// One port of a switch.
// As it is written: the kind says what the names of the features mean.
#[derive(Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "PortSnapshot"))]
struct Json {
    /// Its unique name.
    name: String,
    /// The kind of the port: `vhost-user`, `tap`, `xen-vif` or `xdp`.
    kind: String,
    /// Whether it carries packets, and if not, why.
    state: PortState,
    /// Why no peer is served, or no further one: what a peer did for which the port is out of service, or that its socket was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fault: Option<String>,
    /// The peer of the port: socket path, tap name or inherited descriptor.
    peer: String,
    /// Largest frame payload in bytes.
    mtu: u16,
    /// MAC address the port advertises, if any.
    mac: Option<String>,
    /// Names of the features that were negotiated, as the specification of the kind spells them.
    features: Vec<String>,
    /// The virtqueues; a tap has none.
    queues: Vec<QueueSnapshot>,
    /// Counters by name: packets, or bytes where the name says so, since the port was opened.
    counters: BTreeMap<String, u64>,
    /// Dropped packets by the name of the reason.
    drops: BTreeMap<String, u64>,
    /// The rules that its frames must obey, with the keys and values of the configuration file.
    #[serde(default)]
    rules: RulesByKey,
    /// The queue pairs that carry packets, or have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pairs: Vec<PairSnapshot>,
    /// Rates of its counters and drops over the last 1, 10 and 60 seconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    rates: Vec<Rates>,
    /// Whether another front end has connected, and waits until this one has disconnected.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    another_waits: bool,
    /// The end of the connection of its last front end, if the switch ended it and the port has not been up since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ended: Option<SessionEnd>,
    /// Seconds since the front end that is connected has stopped its rings. Absent if one of them runs, or none ever did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stopped_seconds: Option<u64>,
    /// The process that is connected to the socket of the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    front_end: Option<FrontEnd>,
}

impl From<PortSnapshot> for Json {
    fn from(port: PortSnapshot) -> Json {
        let PortSnapshot { name, negotiated, state, fault, peer, mtu, mac, queues, counters, drops, .. } =
            port;
        let PortSnapshot { rules, pairs, rates, another_waits, ended, stopped_seconds, front_end, .. } = port;
        Json {
            name,
            kind: negotiated.kind().to_owned(),
            state,
            fault,
            peer,
            mtu,
            mac: mac.map(|mac| mac.to_string()),
            features: negotiated.features(),
            queues,
            counters,
            drops,
            rules,
            pairs,
            rates,
            another_waits,
            ended,
            stopped_seconds,
            front_end,
        }
    }
}

impl TryFrom<Json> for PortSnapshot {
    type Error = MacError;

    fn try_from(json: Json) -> Result<PortSnapshot, MacError> {
        let Json { name, kind, state, fault, peer, mtu, mac, features, queues, counters, drops, .. } = json;
        let Json { rules, pairs, rates, another_waits, ended, stopped_seconds, front_end, .. } = json;
        Ok(PortSnapshot {
            name,
            negotiated: Negotiated::named(kind, features),
            state,
            fault,
            peer,
            mtu,
            mac: mac.map(|mac| mac.parse()).transpose()?,
            queues,
            counters,
            drops,
            rules,
            pairs,
            rates,
            another_waits,
            ended,
            stopped_seconds,
            front_end,
        })
    }
}

/// Whether a port carries packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PortState {
    /// It carries packets.
    Up,
    /// It waits for a front end to connect.
    Listening,
    /// It tries to connect to a front end.
    Connecting,
    /// Its peer is there, but has not started the device or has taken the link down.
    Down,
    /// Its front end has started the device without sharing the guest's memory.
    NoMemory,
    /// A queue is broken until the guest resets it.
    Broken,
    /// It was taken down with `ringferry ctl link`.
    AdminDown,
}

impl PortState {
    /// Every state.
    pub const ALL: [PortState; 7] = [
        PortState::Up,
        PortState::Listening,
        PortState::Connecting,
        PortState::Down,
        PortState::NoMemory,
        PortState::Broken,
        PortState::AdminDown,
    ];

    /// The name it has in JSON.
    pub fn name(self) -> &'static str {
        match self {
            PortState::Up => "up",
            PortState::Listening => "listening",
            PortState::Connecting => "connecting",
            PortState::Down => "down",
            PortState::NoMemory => "no-memory",
            PortState::Broken => "broken",
            PortState::AdminDown => "admin-down",
        }
    }
}
