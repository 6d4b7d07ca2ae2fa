//! The walk of an imaginary frame through the switch: the answer to `ringferry ctl trace`.

use std::fmt::Write as _;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A frame that nobody has sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceRequest {
    /// The port that it would come from.
    pub from: String,
    /// Its source address; one that is known behind that port, if none is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Its destination: a port, an address, or `broadcast`.
    pub to: String,
    /// The VLAN of its tag, as the port sends it; it has none, if none is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// Its protocol.
    #[serde(default)]
    pub protocol: TraceProtocol,
    /// Its length in bytes, from the Ethernet header on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u32>,
    /// It is to be cut into segments with so many bytes of payload (TSO, USO).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gso: Option<u16>,
    /// Its checksum is still to be computed.
    #[serde(default)]
    pub csum: bool,
    /// Its source in IP; one that the port may use, if none is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_ip: Option<IpAddr>,
    /// Its destination in IP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination_ip: Option<IpAddr>,
    /// Its source port in TCP or UDP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_port: Option<u16>,
    /// Its destination port in TCP or UDP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination_port: Option<u16>,
    /// The queue of the port that it would come from.
    #[serde(default)]
    pub queue: u16,
}

/// Makes [`TraceProtocol`] from one table: what it is, variant, name.
macro_rules! protocols {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// The protocol of an imaginary frame.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub enum TraceProtocol {
            $($(#[doc = $doc])+ #[serde(rename = $name)] $variant,)+
            /// Nothing that any stack knows: the EtherType for experiments.
            #[default]
            #[serde(rename = "raw")]
            Raw,
        }

        impl TraceProtocol {
            /// Every protocol.
            pub const ALL: [TraceProtocol; [$($name),+].len() + 1] = [$(TraceProtocol::$variant,)+ TraceProtocol::Raw];

            /// Its name on the command line and in JSON.
            pub const fn name(self) -> &'static str {
                match self { $(TraceProtocol::$variant => $name,)+ TraceProtocol::Raw => "raw" }
            }
        }
    };
}

protocols! {
    /// TCP over IPv4.
    Tcp4 = "tcp4",
    /// TCP over IPv6.
    Tcp6 = "tcp6",
    /// UDP over IPv4.
    Udp4 = "udp4",
    /// UDP over IPv6.
    Udp6 = "udp6",
    /// An ICMP echo request.
    Ping4 = "ping4",
    /// An ICMPv6 echo request.
    Ping6 = "ping6",
    /// ARP: who has an address.
    Arp = "arp",
    /// Neighbour solicitation of IPv6.
    Nd = "nd",
    /// A DHCP client's DISCOVER.
    Dhcp = "dhcp",
}

impl TraceProtocol {
    /// Returns true if its packets can have this address.
    pub fn has(self, address: IpAddr) -> bool {
        use TraceProtocol::{Arp, Dhcp, Nd, Ping4, Ping6, Raw, Tcp4, Tcp6, Udp4, Udp6};
        match self {
            Tcp4 | Udp4 | Ping4 | Arp | Dhcp => address.is_ipv4(),
            Tcp6 | Udp6 | Ping6 | Nd => address.is_ipv6(),
            Raw => false,
        }
    }
}

impl FromStr for TraceProtocol {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|protocol| protocol.name() == name).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|protocol| protocol.name()).collect();
            format!("there is no protocol {name:?}; the protocols are: {}", names.join(", "))
        })
    }
}

/// The walk of a frame, step by step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Trace {
    /// The frame.
    pub frame: TracedFrame,
    /// The steps of its walk, in order.
    pub steps: Vec<TraceStep>,
    /// The ports that would get it.
    pub delivered: Vec<TraceDelivery>,
    /// The places where it, or packets of it, would be dropped.
    pub dropped: Vec<TraceDrop>,
    /// The end of the walk in a sentence.
    pub verdict: String,
    /// The remedy, if anything is lost; empty otherwise.
    pub remedy: String,
}

/// The frame of a [`Trace`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TracedFrame {
    /// The port that it would come from.
    pub from: String,
    /// The queue of that port.
    pub queue: u16,
    /// Source address.
    pub source: String,
    /// Destination address.
    pub destination: String,
    /// The VLAN of its tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// Its protocol.
    pub protocol: TraceProtocol,
    /// Bytes, from the Ethernet header on.
    pub size: u32,
    /// Bytes of payload in each segment into which it is to be cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gso: Option<u16>,
    /// Its checksum is still to be computed.
    pub csum: bool,
}

/// The effect of a [`TraceStep`] on a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TraceVerdict {
    /// The frame goes on.
    Passes,
    /// It goes on later.
    Waits,
    /// It, or a part of it, is dropped.
    Drops,
    /// It does not go there, which is no loss.
    Skips,
    /// Something that one should know.
    Notes,
}

impl TraceVerdict {
    /// For people.
    const fn word(self) -> &'static str {
        match self {
            TraceVerdict::Passes => "passes",
            TraceVerdict::Waits => "waits",
            TraceVerdict::Drops => "DROPS",
            TraceVerdict::Skips => "skips",
            TraceVerdict::Notes => "notes",
        }
    }
}

/// One step on the way of a frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceStep {
    /// The port at which it is; several, with commas, that a flooded frame is kept from for one reason.
    pub port: String,
    /// A stable name of the step, in kebab case.
    pub step: String,
    /// The effect of the step on the frame.
    pub verdict: TraceVerdict,
    /// The reason, by its stable name, if it drops the frame or keeps it from a port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// A description for people.
    pub text: String,
}

/// A port that would get a frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceDelivery {
    /// The port.
    pub port: String,
    /// The packets that it would get.
    pub packets: u64,
    /// Bytes of the longest of them.
    pub longest: u32,
    /// The VLAN of their tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// They would wait first, for pages of the guest, for a queue that migrates or for the port's `rate_out`.
    pub waits: bool,
}

/// A place where packets would be dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceDrop {
    /// The port at which it would be counted.
    pub port: String,
    /// The reason, by its stable name.
    pub reason: String,
    /// The number of packets.
    pub packets: u64,
}

impl Trace {
    /// For people.
    pub fn to_text(&self) -> String {
        let TracedFrame { from, queue, source, destination, vlan, protocol, size, gso, csum } = &self.frame;
        let tag =
            vlan.map_or_else(|| "without a tag".to_owned(), |vlan| format!("with a tag of VLAN {vlan}"));
        let offload = match gso {
            Some(gso) => format!(", to be cut every {gso} bytes"),
            None if *csum => ", without its checksum".to_owned(),
            None => String::new(),
        };
        // Writing to a string cannot fail.
        let mut text = format!(
            "an imaginary frame from {from} (queue {queue}): {source} to {destination}, {tag}, {}, {size} bytes{offload}\n",
            protocol.name()
        );
        let widest = self.steps.iter().map(|step| step.step.len()).max().unwrap_or(0);
        // A frame for everybody takes the same steps at most of the ports: those are told once.
        let mut paragraphs = Vec::<(Vec<&str>, String)>::new();
        for steps in self.steps.chunk_by(|one, next| one.port == next.port) {
            let mut lines = String::new();
            for TraceStep { step, verdict, text: what, .. } in steps {
                let _ = writeln!(lines, "  {step:<widest$}  {:<6}  {what}", verdict.word());
            }
            match paragraphs.iter_mut().skip(1).find(|(_, told)| *told == lines) {
                Some((ports, _)) => ports.push(&steps[0].port),
                None => paragraphs.push((vec![&steps[0].port], lines)),
            }
        }
        for (ports, lines) in paragraphs {
            let _ = write!(text, "\n{}\n{lines}", ports.join(", "));
        }
        let _ = writeln!(text, "\n{}", self.verdict);
        if !self.remedy.is_empty() {
            let _ = writeln!(text, "What to do: {}", self.remedy);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocols_have_one_name_each_everywhere() {
        for protocol in TraceProtocol::ALL {
            assert_eq!(protocol.name().parse(), Ok(protocol));
            assert_eq!(serde_json::to_value(protocol).unwrap(), protocol.name());
        }
        let error = "tcp".parse::<TraceProtocol>().unwrap_err();
        assert!(error.starts_with("there is no protocol \"tcp\"; the protocols are: tcp4, tcp6,"), "{error}");
    }

    #[test]
    fn the_text_has_a_paragraph_for_each_port_and_ends_with_the_verdict() {
        let step = |port: &str, step: &str, verdict, text: &str| TraceStep {
            port: port.to_owned(),
            step: step.to_owned(),
            verdict,
            reason: None,
            text: text.to_owned(),
        };
        let frame = TracedFrame {
            from: "vm1".to_owned(),
            queue: 0,
            source: "52:54:00:00:00:01".to_owned(),
            destination: "52:54:00:00:00:02".to_owned(),
            vlan: Some(10),
            protocol: TraceProtocol::Tcp4,
            size: 60,
            gso: None,
            csum: true,
        };
        let steps = vec![
            step("vm1", "vlan", TraceVerdict::Passes, "It is in VLAN 10."),
            step("vm2", "rules", TraceVerdict::Drops, "Both are isolated."),
            step("vm3", "rules", TraceVerdict::Passes, "Nothing forbids it."),
            step("vm4", "rules", TraceVerdict::Drops, "Both are isolated."),
        ];
        let verdict = "Dropped at vm2 as `isolated`.".to_owned();
        let (delivered, dropped) = (Vec::new(), Vec::new());
        let trace = Trace { frame, steps, delivered, dropped, verdict, remedy: "Do it.".to_owned() };
        let expected = "\
an imaginary frame from vm1 (queue 0): 52:54:00:00:00:01 to 52:54:00:00:00:02, with a tag of VLAN 10, tcp4, 60 bytes, without its checksum

vm1
  vlan   passes  It is in VLAN 10.

vm2, vm4
  rules  DROPS   Both are isolated.

vm3
  rules  passes  Nothing forbids it.

Dropped at vm2 as `isolated`.
What to do: Do it.
";
        assert_eq!(trace.to_text(), expected);
        let json = serde_json::to_string(&trace).unwrap();
        assert_eq!(serde_json::from_str::<Trace>(&json).unwrap(), trace);
    }
}
