//! The firewall of a port as it is shown: the answer to `ringferry ctl firewall`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::text::{Table, short_count};

/// The firewall of a port: its policy, what each rule has counted, and what was denied of late.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FirewallReport {
    /// The port.
    pub port: String,
    /// The policy. Nothing passes while there is none of that name.
    pub policy: String,
    /// The policy is tried out: what it would deny passes.
    pub dry_run: bool,
    /// The rules, in order: the first that matches decides.
    pub rules: Vec<RuleCounts>,
    /// What no rule is about, and the guest opens.
    pub egress: RuleCounts,
    /// What no rule is about, and others open.
    pub ingress: RuleCounts,
    /// Frames that pass whatever the rules are: address resolution, neighbour discovery, requests for an address and their answers.
    pub always: RuleCounts,
    /// Frames that never pass: neither IP nor ARP, malformed, led elsewhere by their headers, fragments of what did not pass.
    pub odd: RuleCounts,
    /// Questions to resolvers for names of no rule, which are refused.
    pub other_names: RuleCounts,
    /// Conversations that are known.
    pub flows: u64,
    /// Conversations that there is room for.
    pub flows_max: u64,
    /// The names of its rules, each with the addresses that it has now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<NameReport>,
    /// What was denied of late, the newest first.
    pub denials: Vec<DenialReport>,
    /// Denials since the switch was started that are in no such list, as there were too many.
    pub denials_missed: u64,
    /// The conversations, if they were asked for: those with the most bytes first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conversations: Vec<FlowReport>,
}

/// The firewalls of all ports that have one: the answer to `ringferry ctl firewall` without a port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Firewalls {
    /// In the order of the ports.
    pub firewalls: Vec<FirewallSummary>,
}

/// The firewall of a port, in a line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FirewallSummary {
    /// The port.
    pub port: String,
    /// The policy.
    pub policy: String,
    /// The policy is tried out: what it would deny passes.
    pub dry_run: bool,
    /// Its rules; absent: there is no such policy, and nothing passes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<u64>,
    /// Conversations that are known.
    pub flows: u64,
    /// Conversations that there is room for.
    pub flows_max: u64,
    /// Frames that have passed, since the policy was last changed.
    pub passed: u64,
    /// Frames that were denied since then or, where the policy is tried out, would have been.
    pub denied: u64,
}

/// What a rule has counted since the policy was last changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RuleCounts {
    /// Its line in the policy; 0 for what is no rule.
    pub line: u64,
    /// What is written there.
    pub text: String,
    /// Conversations that were opened by it or, if it denies, packets that would have opened one.
    pub flows: u64,
    /// Frames of these.
    pub packets: u64,
    /// Bytes of these frames.
    pub bytes: u64,
}

/// A name of a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NameReport {
    /// The name as the policy has it.
    pub name: String,
    /// The addresses that resolvers have told the guest, a thousand at most.
    pub addresses: Vec<NameAddress>,
}

/// An address of a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NameAddress {
    /// The address.
    pub address: IpAddr,
    /// Seconds after which the guest has to ask again.
    pub left_seconds: u64,
}

/// A direction as policies have it: seen from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// From the guest.
    Out,
    /// To the guest.
    In,
}

/// The ends of a packet, or of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FlowEnds {
    /// IP protocol number.
    pub protocol: u8,
    /// The guest's address.
    pub local: IpAddr,
    /// The guest's port, or the identifier of an echo; 0 where there is none.
    pub local_port: u16,
    /// The other end's address.
    pub remote: IpAddr,
    /// The other end's port.
    pub remote_port: u16,
    /// The VLAN of its tag, 0 without one.
    pub vlan: u16,
}

/// A packet that was denied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DenialReport {
    /// Seconds since then.
    pub seconds_ago: u64,
    /// The direction, as policies have it: out, if the guest had sent it.
    pub direction: Way,
    /// Its ends.
    #[serde(flatten)]
    pub ends: FlowEnds,
    /// The rule that denied it.
    pub rule: String,
    /// Whether it has passed all the same, as the policy is tried out.
    pub passed: bool,
    /// The name that the guest has asked a resolver for, if that was denied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Where a reader of denials is: entries that it has seen, by port and worker.
pub type DenialCursor = BTreeMap<String, Vec<u64>>;

/// What was denied since a reader has asked last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denials {
    /// By port, each with its policy, in the order of time.
    pub ports: Vec<PortDenials>,
    /// Denials since the switch was started that were too many to be told.
    pub missed: u64,
    /// Where the reader goes on.
    pub next: DenialCursor,
}

/// What was denied at one port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortDenials {
    /// The port.
    pub port: String,
    /// The policy of its firewall.
    pub policy: String,
    /// In the order of time.
    pub denials: Vec<DenialReport>,
}

/// A line of `ringferry ctl denials`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DenialLine {
    /// When it was, in seconds since 1970.
    pub time: u64,
    /// The port.
    pub port: String,
    /// The policy of its firewall.
    pub policy: String,
    /// What was denied.
    #[serde(flatten)]
    pub denial: DenialReport,
}

impl Denials {
    /// Returns a line of JSON for each, at this second since 1970.
    ///
    /// # Errors
    /// None, as all of it can be written.
    pub fn to_lines(&self, now: u64) -> serde_json::Result<String> {
        let mut text = String::new();
        for PortDenials { port, policy, denials } in &self.ports {
            for denial in denials {
                let time = now.saturating_sub(denial.seconds_ago);
                let (port, policy) = (port.clone(), policy.clone());
                let line = DenialLine { time, port, policy, denial: denial.clone() };
                text += &serde_json::to_string(&line)?;
                text.push('\n');
            }
        }
        Ok(text)
    }
}

/// A conversation that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FlowReport {
    /// Its ends.
    #[serde(flatten)]
    pub ends: FlowEnds,
    /// Whether the guest has opened it.
    pub opened_by_guest: bool,
    /// Whether both ends have sent.
    pub answered: bool,
    /// Seconds since its last packet.
    pub silent_seconds: u64,
    /// Seconds after which it is forgotten if there are no further packets.
    pub left_seconds: u64,
    /// Bytes of its frames, about.
    pub bytes: u64,
    /// The rule that allowed it, or that it was allowed under an older policy and not judged by this one yet.
    pub rule: String,
}

/// Denials that are shown to people, at most.
const SHOWN: usize = 20;

/// Addresses of a name that are shown to people, at most.
const ADDRESSES: usize = 4;

impl FirewallReport {
    /// The rules with their counts, then what was denied, then conversations.
    pub fn to_text(&self) -> String {
        let mut text = format!("firewall of {}: policy {}", self.port, self.policy);
        if self.dry_run {
            text += ", tried out only: what it would deny passes";
        }
        let _ = writeln!(text, "\n{} of {} conversations known", self.flows, self.flows_max);
        let mut table = Table::new(&[">LINE", "<RULE", ">FLOWS", ">PACKETS", ">BYTES"]);
        let rest = [&self.egress, &self.ingress, &self.always, &self.odd];
        // Most policies have no names.
        let names = Some(&self.other_names).filter(|names| names.packets > 0);
        for rule in self.rules.iter().chain(rest).chain(names) {
            let line = if rule.line == 0 { "-".to_owned() } else { rule.line.to_string() };
            let counts = [rule.flows, rule.packets, rule.bytes].map(short_count);
            let [flows, packets, bytes] = counts;
            table.row([line, rule.text.clone(), flows, packets, bytes]);
        }
        let _ = write!(text, "{table}");
        if !self.names.is_empty() {
            text += "\nnames:\n";
            let mut table = Table::new(&["<NAME", ">ADDRESSES", ">LEFT", "<"]);
            for NameReport { name, addresses } in &self.names {
                let left = addresses.iter().map(|address| address.left_seconds).max();
                let left = left.map_or_else(|| "-".to_owned(), |left| format!("{left} s"));
                let first: Vec<_> =
                    addresses.iter().take(ADDRESSES).map(|address| address.address.to_string()).collect();
                table.row([name.clone(), addresses.len().to_string(), left, first.join(" ")]);
            }
            let _ = write!(text, "{table}");
        }
        if !self.denials.is_empty() {
            text += "\ndenied of late:\n";
            let mut table = Table::new(&[">AGO", "<", "<PROTOCOL", "<GUEST", "<OTHER END", "<BY"]);
            for denial in self.denials.iter().take(SHOWN) {
                table.row([
                    format!("{} s", denial.seconds_ago),
                    if denial.direction == Way::Out { "out" } else { "in" }.to_owned(),
                    denial.ends.protocol(),
                    denial.ends.local(),
                    denial.ends.remote(),
                    match &denial.name {
                        Some(name) => format!("{}: {name}", denial.rule),
                        None => denial.rule.clone(),
                    },
                ]);
            }
            let _ = write!(text, "{table}");
        }
        if self.denials_missed > 0 {
            let _ = writeln!(text, "{} more were too many to be listed", self.denials_missed);
        }
        if !self.conversations.is_empty() {
            text += "\nconversations:\n";
            let headings = ["<PROTOCOL", "<GUEST", "<", "<OTHER END", ">BYTES", ">SILENT", ">LEFT", "<BY"];
            let mut table = Table::new(&headings);
            for flow in &self.conversations {
                table.row([
                    flow.ends.protocol(),
                    flow.ends.local(),
                    match (flow.opened_by_guest, flow.answered) {
                        (true, true) => "=>",
                        (true, false) => "->",
                        (false, true) => "<=",
                        (false, false) => "<-",
                    }
                    .to_owned(),
                    flow.ends.remote(),
                    short_count(flow.bytes),
                    format!("{} s", flow.silent_seconds),
                    format!("{} s", flow.left_seconds),
                    flow.rule.clone(),
                ]);
            }
            let _ = write!(text, "{table}");
        }
        text
    }
}

impl Firewalls {
    /// A line for each.
    pub fn to_text(&self) -> String {
        if self.firewalls.is_empty() {
            return "no port has a firewall\n".to_owned();
        }
        let headings = ["<PORT", "<POLICY", "<", ">RULES", ">FLOWS", ">ROOM", ">PASSED", ">DENIED"];
        let mut table = Table::new(&headings);
        for one in &self.firewalls {
            let state = match one.rules {
                None => "no such policy",
                Some(_) if one.dry_run => "tried out",
                Some(_) => "in force",
            };
            let rules = one.rules.map_or_else(|| "-".to_owned(), |rules| rules.to_string());
            let [flows, room, passed, denied] =
                [one.flows, one.flows_max, one.passed, one.denied].map(short_count);
            let names = [&one.port, &one.policy, state].map(str::to_owned);
            table.row(names.into_iter().chain([rules, flows, room, passed, denied]).collect::<Vec<_>>());
        }
        table.to_string()
    }
}

impl FlowEnds {
    /// The name of the protocol, or its number.
    fn protocol(&self) -> String {
        match self.protocol {
            1 => "icmp".to_owned(),
            6 => "tcp".to_owned(),
            17 => "udp".to_owned(),
            58 => "icmpv6".to_owned(),
            132 => "sctp".to_owned(),
            other => format!("proto {other}"),
        }
    }

    fn local(&self) -> String {
        end(self.local, self.local_port)
    }

    fn remote(&self) -> String {
        end(self.remote, self.remote_port)
    }
}

fn end(address: IpAddr, port: u16) -> String {
    match (address, port) {
        (address, 0) => address.to_string(),
        (IpAddr::V4(address), port) => format!("{address}:{port}"),
        (IpAddr::V6(address), port) => format!("[{address}]:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_a_table_of_rules_and_of_what_was_denied() {
        let rule = |line, text: &str, flows| RuleCounts {
            line,
            text: text.to_owned(),
            flows,
            packets: 7,
            bytes: 2500,
        };
        let report = FirewallReport {
            port: "vm0".to_owned(),
            policy: "web".to_owned(),
            rules: vec![rule(3, "allow in tcp port 80", 2)],
            egress: rule(0, "egress deny", 1),
            ingress: rule(0, "ingress deny", 0),
            always: rule(0, "always", 0),
            odd: rule(0, "odd", 0),
            flows: 2,
            flows_max: 32768,
            names: vec![
                NameReport {
                    name: "*.cdn.net".to_owned(),
                    addresses: [(1, 7), (2, 60)]
                        .map(|(last, left_seconds)| NameAddress {
                            address: [10, 0, 0, last].into(),
                            left_seconds,
                        })
                        .to_vec(),
                },
                NameReport { name: "example.com".to_owned(), addresses: Vec::new() },
            ],
            denials: vec![DenialReport {
                seconds_ago: 4,
                direction: Way::Out,
                ends: FlowEnds {
                    protocol: 17,
                    local: "fd00::1".parse().unwrap(),
                    local_port: 5000,
                    remote: "2001:db8::1".parse().unwrap(),
                    remote_port: 53,
                    vlan: 0,
                },
                rule: "by default: egress deny".to_owned(),
                passed: false,
                name: Some("tracker.example".to_owned()),
            }],
            ..FirewallReport::default()
        };
        let text = report.to_text();
        assert!(text.starts_with("firewall of vm0: policy web\n2 of 32768 conversations known\n"), "{text}");
        assert!(text.contains("allow in tcp port 80"), "{text}");
        let denied = text.lines().find(|line| line.contains("5000")).unwrap();
        let words: Vec<_> = denied.split_whitespace().collect();
        assert_eq!(words[..6], ["4", "s", "out", "udp", "[fd00::1]:5000", "[2001:db8::1]:53"]);
        assert!(denied.ends_with("by default: egress deny: tracker.example"), "{denied}");
        let names = text.lines().skip_while(|line| *line != "names:").skip(2).take(2);
        let names: Vec<_> = names.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(names, ["*.cdn.net 2 60 s 10.0.0.1 10.0.0.2", "example.com 0 -"]);
        let tried = FirewallReport { dry_run: true, ..report };
        assert!(tried.to_text().contains("tried out only"));
    }

    #[test]
    fn all_firewalls_are_a_table() {
        assert_eq!(Firewalls::default().to_text(), "no port has a firewall\n");
        let one = FirewallSummary {
            port: "vm0".to_owned(),
            policy: "web".to_owned(),
            ..FirewallSummary::default()
        };
        let tried = FirewallSummary {
            dry_run: true,
            rules: Some(3),
            flows: 2,
            flows_max: 32_768,
            passed: 70,
            denied: 1,
            ..one.clone()
        };
        let text = Firewalls { firewalls: vec![one, tried] }.to_text();
        let rows: Vec<_> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(rows[1], "vm0 web no such policy - 0 0 0 0");
        assert_eq!(rows[2], "vm0 web tried out 3 2 32.8k 70 1");
    }
}
