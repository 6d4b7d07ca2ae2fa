//! What becomes of packets between a port and each other one, in plain words: the answer to `ringferry ctl explain`.

use std::fmt::Write;

use ringferry_packet::vnet::Offloads;
use serde::{Deserialize, Serialize};

use crate::names;

/// Everything about one port: the answer to `ringferry ctl explain`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Explanation {
    /// The port.
    pub port: String,
    /// What it takes without software's help.
    #[serde(with = "crate::names::offloads")]
    #[cfg_attr(feature = "schema", schemars(with = "Vec<String>"))]
    pub takes: Offloads,
    /// What it may leave to others in what it sends.
    #[serde(with = "crate::names::offloads")]
    #[cfg_attr(feature = "schema", schemars(with = "Vec<String>"))]
    pub sends: Offloads,
    /// Its MTU in bytes.
    pub mtu: u16,
    /// What becomes of packets to and from each other port.
    pub ways: Vec<Way>,
}

/// One direction between two ports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Way {
    /// Who sends.
    pub from: String,
    /// Who receives.
    pub to: String,
    /// What becomes of each kind of traffic; empty while one of the two is down, or if their rules keep them apart.
    pub traffic: Vec<Traffic>,
    /// What is to be known besides: rules that keep frames apart or limit them, an MTU that differs, a port that is down.
    pub notes: Vec<String>,
    /// What would make it cheaper.
    pub hints: Vec<String>,
}

/// One kind of traffic on its way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Traffic {
    /// Which.
    pub kind: Protocol,
    /// What is done to large packets.
    pub segments: Segments,
    /// What is done about checksums.
    pub checksums: Checksums,
    /// What the worst of the two costs.
    pub cost: Cost,
    /// All of it in a sentence.
    pub text: String,
}

/// The kinds of traffic that are handled differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Protocol {
    /// TCP over IPv4.
    #[serde(rename = "TCP over IPv4")]
    Tcp4,
    /// TCP over IPv6.
    #[serde(rename = "TCP over IPv6")]
    Tcp6,
    /// UDP over either.
    #[serde(rename = "UDP")]
    Udp,
}

impl Protocol {
    /// The name it has in JSON and for people.
    pub const fn name(self) -> &'static str {
        match self {
            Protocol::Tcp4 => "TCP over IPv4",
            Protocol::Tcp6 => "TCP over IPv6",
            Protocol::Udp => "UDP",
        }
    }
}

/// What is done to large packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Segments {
    /// Packets of up to 64 KiB go through whole.
    Unsegmented,
    /// The sender sends them, the receiver does not take them: they are cut.
    Cut,
    /// The sender does not send them, the receiver takes them: packets of a burst are put together.
    Merged,
    /// Neither knows them: each packet is one of the link.
    Single,
}

/// What is done about checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Checksums {
    /// The sender leaves them out and the receiver knows: nobody computes them.
    LeftOut,
    /// The sender leaves them out and the receiver needs them: the switch computes them.
    Computed,
    /// The sender finishes them, and the switch looks whether they are right before it puts packets together.
    Verified,
    /// The sender finishes them, the receiver verifies them.
    Untouched,
}

/// What work costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Cost {
    /// The one copy that there always is.
    Nothing,
    /// Headers are looked at, packet by packet.
    Headers,
    /// Headers are written for each packet, and each goes to the receiver on its own.
    Packets,
    /// One more pass over every byte.
    Bytes,
}

impl Cost {
    /// For people.
    const fn words(self) -> &'static str {
        match self {
            Cost::Nothing => "nothing to do",
            Cost::Headers => "cheap: headers are read",
            Cost::Packets => "dear: every packet on its own",
            Cost::Bytes => "dear: every byte once more",
        }
    }
}

impl Explanation {
    /// For people.
    pub fn to_text(&self) -> String {
        let list = |offloads: &Offloads| match names::of(offloads, names::lower) {
            none if none.is_empty() => "nothing".to_owned(),
            some => some.join(", "),
        };
        let (takes, sends) = (list(&self.takes), list(&self.sends));
        let mut text =
            format!("{}: takes {takes}; may leave to others {sends}; MTU {}\n", self.port, self.mtu);
        for way in &self.ways {
            text += &way.to_text();
        }
        text
    }
}

impl Way {
    /// For people: an empty line, the two ports, and a line for each thing that is to be said.
    pub fn to_text(&self) -> String {
        let mut text = format!("\n{} -> {}\n", self.from, self.to);
        for Traffic { kind, text: what, cost, .. } in &self.traffic {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  {:<14} {what} [{}]", kind.name(), cost.words());
        }
        for note in &self.notes {
            let _ = writeln!(text, "  note: {note}");
        }
        for hint in &self.hints {
            let _ = writeln!(text, "  hint: {hint}");
        }
        text
    }
}
