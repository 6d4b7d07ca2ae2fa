//! The forwarding database: which address is behind which port.

use std::collections::BTreeMap;

use ringferry_packet::ether::Mac;
use serde::{Deserialize, Serialize};

/// The forwarding database.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FdbSnapshot {
    /// Most addresses it can hold.
    pub capacity: usize,
    /// How many addresses are behind each port that has any, in the table of the worker that knows most. If not all are listed, those that nobody has seen lately
    /// count until their room is needed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub behind: BTreeMap<String, u64>,
    /// Addresses seen lately, ordered by port, VLAN and address: all of them, or as many as were asked for.
    pub entries: Vec<FdbEntry>,
    /// What happened to addresses: `learned`, `moved`, `replaced`, `refused`, `aged`, `limited`.
    pub counters: BTreeMap<String, u64>,
    /// Addresses that have moved between ports again and again within the last minute, if there are any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub restless: Vec<FdbRestless>,
    /// The address that each port has lost last to another one, if it is there still.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<FdbLost>,
}

impl FdbSnapshot {
    /// How many addresses there are, listed or not.
    pub fn addresses(&self) -> u64 {
        // A switch of before there were numbers lists all.
        if self.behind.is_empty() { self.entries.len() as u64 } else { self.behind.values().sum() }
    }
}

/// An address that has moved from one port to another: its machine has, or somebody else uses it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FdbLost {
    /// The VLAN in which it was seen.
    pub vlan: u16,
    /// The address.
    #[serde(with = "crate::names::mac")]
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub mac: Mac,
    /// Name of the port that it was behind.
    pub from: String,
    /// Name of the port that it is behind.
    pub to: String,
    /// Seconds since it has moved.
    pub seconds: u32,
}

/// An address that moves between ports again and again: two machines have it, or there is a loop. What is for it goes to whoever has sent last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FdbRestless {
    /// The VLAN in which it was seen.
    pub vlan: u16,
    /// The address.
    #[serde(with = "crate::names::mac")]
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub mac: Mac,
    /// Names of the two ports between which it has moved last.
    pub ports: Vec<String>,
    /// How often it has moved.
    pub moves: u32,
    /// Seconds in which it has done so.
    pub seconds: u32,
}

impl FdbRestless {
    /// For people, without a full stop.
    pub fn to_text(&self) -> String {
        let FdbRestless { vlan, mac, ports, moves, seconds } = self;
        let vlan = if *vlan == 0 { String::new() } else { format!(" in VLAN {vlan}") };
        let ports = ports.join(" and ");
        format!("{mac}{vlan} has moved between {ports} {moves} times in {seconds} s")
    }
}

impl FdbLost {
    /// For people, without a full stop.
    pub fn to_text(&self) -> String {
        let FdbLost { vlan, mac, from, to, seconds } = self;
        let vlan = if *vlan == 0 { String::new() } else { format!(" in VLAN {vlan}") };
        format!("{mac}{vlan} was behind {from} and has moved to {to}, {seconds} s ago")
    }
}

/// One address in the forwarding database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FdbEntry {
    /// The VLAN in which it was seen; 0 is that of frames that nobody has put into another.
    #[serde(default)]
    pub vlan: u16,
    /// The address.
    #[serde(with = "crate::names::mac")]
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub mac: Mac,
    /// Name of the port it was last seen on.
    pub port: String,
    /// Seconds since it last sent a frame.
    pub age_seconds: u32,
    /// Whether it was put there by the configuration, for ever.
    #[serde(default, rename = "static", skip_serializing_if = "std::ops::Not::not")]
    pub fixed: bool,
}
