//! One port of a switch.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::QueueSnapshot;
use crate::rules::RulesByKey;

/// One port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortSnapshot {
    /// Its unique name.
    pub name: String,
    /// `vhost-user`, `tap` or `xen-vif`.
    pub kind: String,
    /// Whether it carries packets, and if not, why.
    pub state: PortState,
    /// What is plugged in: socket path, tap name or inherited descriptor.
    pub peer: String,
    /// Largest frame payload in bytes.
    pub mtu: u16,
    /// MAC address the port advertises, if any.
    pub mac: Option<String>,
    /// Names of the negotiated features; for a tap, of its offloads.
    pub features: Vec<String>,
    /// The virtqueues; a tap has none.
    pub queues: Vec<QueueSnapshot>,
    /// Counters by name.
    pub counters: BTreeMap<String, u64>,
    /// Dropped packets by reason.
    pub drops: BTreeMap<String, u64>,
    /// What its frames must obey.
    #[serde(default)]
    pub rules: RulesByKey,
}

/// Whether a port carries packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// A queue is broken until the guest resets it.
    Broken,
}

impl PortState {
    /// The name it has in JSON.
    pub fn name(self) -> &'static str {
        match self {
            PortState::Up => "up",
            PortState::Listening => "listening",
            PortState::Connecting => "connecting",
            PortState::Down => "down",
            PortState::Broken => "broken",
        }
    }
}
