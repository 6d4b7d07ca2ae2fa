//! The rules of a port: its VLANs, isolation from other ports, the source addresses it may use, and rate
//! limits.
//!
//! People write rules in the configuration file or with `ringferry ctl set`; [`plane`](crate::plane) compiles
//! them into the policy that a worker applies. A port without rules costs the workers one comparison per
//! burst.
//!
//! **VLANs.** Every frame belongs to one VLAN, 0 to 4094, for as long as it is in the switch; 0 is that of
//! frames that nobody has put into another. A port is a [trunk](Vlans::Trunk) for all of them unless it says
//! otherwise, so a switch without rules carries tags as they are. Addresses are learned per VLAN (IEEE
//! 802.1Q, independent learning).

use std::net::IpAddr;
use std::sync::Arc;

use ringferry_firewall::Policy;
use ringferry_packet::ether::Mac;

use crate::impairments::WireEnd;

/// The number of a VLAN (VID), 0 to [`MAX_VID`]; 0 is that of frames that nobody has put into another.
pub type Vid = u16;

/// The highest VLAN number allowed (IEEE 802.1Q, table 9-2: 4095 is reserved).
pub const MAX_VID: Vid = 4094;

/// The rules of one port. The default forbids nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The VLANs that the port is a member of, and how they are tagged in its frames.
    pub vlans: Vlans,
    /// If true, the port exchanges no frames with other isolated ports (as `bridge link set dev … isolated
    /// on`).
    pub isolated: bool,
    /// The name of the only port that this one exchanges frames with. All that this one sends goes there, whatever it is for, and nobody else gets it. While there is
    /// no such port, nothing passes.
    pub quarantine: Option<String>,
    /// If true, frames that it sends to [reserved addresses](Mac::is_reserved), or from an address that is no
    /// [station](Mac::is_station), are forwarded, not dropped.
    pub forward_reserved: bool,
    /// Limit on the addresses that are learned behind it; frames from further ones are dropped. Static
    /// addresses do not count.
    pub max_macs: Option<u32>,
    /// Static addresses: they are behind this port and nowhere else, for ever, in the VLAN given.
    pub static_macs: Vec<(Mac, Vid)>,
    /// Source addresses that it may use, against spoofing; `None`: any.
    pub guard: Option<Guard>,
    /// What its guest may reach, and who may reach that; `None`: all.
    pub firewall: Option<FirewallRule>,
    /// Storm control: limit on the broadcast, multicast and unknown-destination packets that are taken from
    /// it.
    pub storm: Option<Rate>,
    /// Ingress limits. Frames above them stay in the port's ring.
    pub rate_in: Limits,
    /// Egress limits. Frames above them wait for a short time, or are dropped.
    pub rate_out: Limits,
    /// Its share of a worker that is fully used, as a multiple of that of a port without this rule: 1 to
    /// [`MAX_WEIGHT`].
    pub weight: u16,
    /// The end of a wire that the port is, if it is one. No key of the port says so, but a `[[wire]]` table.
    pub wire: Option<WireEnd>,
}

/// The largest weight of a port. A port of weight 100 may keep others waiting a hundred times as long as one of weight 1.
pub const MAX_WEIGHT: u16 = 100;

impl Default for Rules {
    fn default() -> Self {
        Self {
            vlans: Vlans::default(),
            isolated: false,
            quarantine: None,
            forward_reserved: false,
            max_macs: None,
            static_macs: Vec::new(),
            guard: None,
            firewall: None,
            storm: None,
            rate_in: Limits::default(),
            rate_out: Limits::default(),
            weight: 1,
            wire: None,
        }
    }
}

/// VLAN membership of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vlans {
    /// An access port in this VLAN. Its frames carry no tag, and a frame with a tag of another VLAN is
    /// dropped.
    Access(Vid),
    /// A trunk of several VLANs. Frames carry tags, except in the native VLAN.
    Trunk {
        /// VLANs whose tags are allowed, sorted and each once; `None`: all.
        allowed: Option<Vec<Vid>>,
        /// The VLAN of frames without a tag; `None`: such frames are dropped. It need not be among the
        /// allowed ones.
        native: Option<Vid>,
    },
}

impl Vlans {
    /// Returns the VLAN of frames without a tag, if such frames may pass.
    pub fn untagged(&self) -> Option<Vid> {
        match self {
            Vlans::Access(vid) => Some(*vid),
            Vlans::Trunk { native, .. } => *native,
        }
    }

    /// Returns the VLAN of an access port; `None` if it is a trunk.
    pub fn access(&self) -> Option<Vid> {
        match self {
            Vlans::Access(vid) => Some(*vid),
            Vlans::Trunk { .. } => None,
        }
    }
}

impl Default for Vlans {
    fn default() -> Self {
        Vlans::Trunk { allowed: None, native: Some(0) }
    }
}

/// Source addresses that a port may send from. An empty list allows none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guard {
    /// Ethernet source addresses, and sender addresses in ARP and neighbour discovery.
    pub macs: Vec<Mac>,
    /// IP source addresses, as networks; `None`: they are not checked. Messages that a host must send before
    /// it has an address are allowed then, too: DHCP from 0.0.0.0, duplicate address detection from `::`.
    pub ips: Option<Vec<Network>>,
}

/// The firewall between a port and all others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirewallRule {
    /// The name of its policy.
    pub name: String,
    /// The policy, once its file was read. Until then nothing passes.
    pub policy: Option<Arc<Policy>>,
}

/// An IP network: the addresses with a common prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// The first address of the network: all bits after the prefix are 0.
    pub address: IpAddr,
    /// Length of the prefix in bits, at most 32 for IPv4 or 128 for IPv6.
    pub bits: u8,
}

/// Limits in packets and in bytes, both of which hold. Frames above either wait: in the sender's ring, or at
/// the port they go to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Limit in packets: a frame that is to be segmented counts as its segments.
    pub packets: Option<Rate>,
    /// Limit in bytes of frames, as they would be on a wire without preamble and check sequence.
    pub bytes: Option<Rate>,
}

/// The parameters of a token bucket, in packets or bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Sustained rate per second, at least 1.
    pub per_second: u64,
    /// Depth of the bucket: packets or bytes that may pass at once after a pause, at least 1 (a frame that is
    /// longer passes, too, and those after it wait for as long as that takes).
    pub burst: u64,
}
