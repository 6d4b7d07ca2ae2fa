//! What the frames of a port must obey: its VLANs, who it may talk to, who it may say it is, and how much.
//!
//! This is what people write, in the configuration file or with `ringferry ctl set`; [`plane`](crate::plane) compiles it into
//! what a worker looks at. A port without rules costs the workers one comparison per burst.
//!
//! **VLANs.** Every frame belongs to one VLAN, 0 to 4094, for as long as it is in the switch; 0 is that of frames that nobody
//! has put into another. A port is a [trunk](Vlans::Trunk) for all of them unless it says otherwise, so a
//! switch without rules carries tags as they are. Addresses are learned per VLAN (IEEE 802.1Q, independent learning).

use std::net::IpAddr;

use ringferry_packet::ether::Mac;

/// A VLAN: 0 to [`MAX_VID`].
pub type Vid = u16;

/// The last VLAN there may be (IEEE 802.1Q, table 9-2: 4095 is reserved).
pub const MAX_VID: Vid = 4094;

/// Everything a port's frames must obey. The default forbids nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Which VLANs it is in, and how that is written in its frames.
    pub vlans: Vlans,
    /// It exchanges no frames with other isolated ports (as `bridge link set dev … isolated on`).
    pub isolated: bool,
    /// What it sends to [reserved addresses](Mac::is_reserved), or from what is no [station](Mac::is_station), is forwarded,
    /// not dropped.
    pub forward_reserved: bool,
    /// Most addresses that are learned behind it; frames from others are dropped. Static ones do not count.
    pub max_macs: Option<u32>,
    /// Addresses that are behind it and nowhere else, for ever, and the VLAN they are in.
    pub static_macs: Vec<(Mac, Vid)>,
    /// Who it may say it is.
    pub guard: Option<Guard>,
    /// Most broadcast, multicast and unknown-destination packets that are taken from it.
    pub storm: Option<Rate>,
    /// Most that is taken from it. What is above stays in its ring.
    pub rate_in: Limits,
    /// Most that is sent to it. What is above waits for a short time, or is dropped.
    pub rate_out: Limits,
    /// Its share of a worker that is fully used, as a multiple of that of a port that says nothing: 1 to [`MAX_WEIGHT`].
    pub weight: u16,
}

/// The largest weight of a port. A port of weight 100 may keep others waiting a hundred times as long as one of weight 1.
pub const MAX_WEIGHT: u16 = 100;

impl Default for Rules {
    fn default() -> Self {
        Self {
            vlans: Vlans::default(),
            isolated: false,
            forward_reserved: false,
            max_macs: None,
            static_macs: Vec::new(),
            guard: None,
            storm: None,
            rate_in: Limits::default(),
            rate_out: Limits::default(),
            weight: 1,
        }
    }
}

/// Which VLANs a port is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vlans {
    /// One. Its frames carry no tag, and a frame with a tag of another VLAN is dropped.
    Access(Vid),
    /// Several. Their frames carry tags, but for those of the native one.
    Trunk {
        /// Which, sorted and each once; `None`: all.
        allowed: Option<Vec<Vid>>,
        /// That of frames without a tag; `None`: there may be none. It need not be among the allowed ones.
        native: Option<Vid>,
    },
}

impl Default for Vlans {
    fn default() -> Self {
        Vlans::Trunk { allowed: None, native: Some(0) }
    }
}

/// Addresses that a port may send from. Whatever is empty allows none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guard {
    /// Ethernet source addresses, and sender addresses in ARP and neighbour discovery.
    pub macs: Vec<Mac>,
    /// IP source addresses, as networks; `None`: they are not looked at. Also allowed then are what a host must say before it has an
    /// address: DHCP from 0.0.0.0, duplicate address detection from `::`.
    pub ips: Option<Vec<Network>>,
}

/// Addresses with a common prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Its first address: all other bits are 0.
    pub address: IpAddr,
    /// Bits in common, at most 32 or 128.
    pub bits: u8,
}

/// Limits of both kinds. What is above either waits: where it was sent from, or where it is to go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Of packets: a frame that is to be segmented counts as its segments.
    pub packets: Option<Rate>,
    /// Of bytes of frames, as they would be on a wire without preamble and check sequence.
    pub bytes: Option<Rate>,
}

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Per second, at least 1.
    pub per_second: u64,
    /// At once after a pause, at least 1 (a frame that is longer passes, too, and those after it wait for as long as that takes).
    pub burst: u64,
}
