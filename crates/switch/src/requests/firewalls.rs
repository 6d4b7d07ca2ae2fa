//! What is asked about the firewalls of ports: `ringferry ctl firewall` and `denials`.

use std::net::IpAddr;

use ringferry_control::firewall::{
    DenialCursor, DenialReport, Denials, FirewallReport, FirewallSummary, Firewalls, FlowEnds, FlowReport,
    NameAddress, NameReport, PortDenials, RuleCounts, Way,
};
use ringferry_firewall::{Counts, Cursor, Denial, Direction, Ends, Firewall, Policy};

use super::Requests;
use crate::fdb::PortId;
use crate::ports::Interface;
use crate::rules::FirewallRule;

/// Conversations that are told at most: an answer is a line.
const MAX_CONVERSATIONS: usize = 10_000;

impl Requests<'_> {
    /// Tells of the firewall of a port, with up to `conversations` of those that it knows.
    ///
    /// # Errors
    /// There is no such port, or it has no firewall, for people.
    pub(super) fn firewall(
        &self,
        name: &str,
        conversations: Option<usize>,
    ) -> Result<FirewallReport, String> {
        let (rule, id) = self.firewall_of(name)?;
        let report =
            FirewallReport { port: name.to_owned(), policy: rule.name.clone(), ..FirewallReport::default() };
        Ok(match self.workers.firewall(id) {
            Some(firewall) => tell(&firewall, self.workers.seconds(), conversations, report),
            None => report,
        })
    }

    /// Tells of the firewalls of all ports.
    pub(super) fn firewalls(&self) -> Firewalls {
        let now = self.workers.seconds();
        let of_port = |interface: Interface<'_>| {
            let rule = self.ports.entry_of(interface.name)?.rules.firewall.as_ref()?;
            let named = FirewallSummary {
                port: interface.name.to_owned(),
                policy: rule.name.clone(),
                ..FirewallSummary::default()
            };
            let Some(firewall) = self.workers.firewall(interface.id) else { return Some(named) };
            let [passed, denied] = firewall.passed_and_denied();
            Some(FirewallSummary {
                dry_run: firewall.policy().draft().dry_run,
                rules: Some(firewall.policy().draft().rules.len() as u64),
                flows: firewall.flows(now).count() as u64,
                flows_max: firewall.room() as u64,
                passed,
                denied,
                ..named
            })
        };
        Firewalls { firewalls: self.ports.interfaces().filter_map(of_port).collect() }
    }

    /// Returns the rule by which a port has a firewall, and the interface that has it.
    ///
    /// # Errors
    /// There is no such port, or it has no firewall, for people.
    fn firewall_of(&self, name: &str) -> Result<(&FirewallRule, PortId), String> {
        let entry = self.ports.entry_of(name).ok_or_else(|| self.no_such_port(name))?;
        let Some(rule) = &entry.rules.firewall else {
            return Err(format!(
                "{name} has no firewall: `ringferry ctl set {name} firewall=POLICY` gives it one, with the policy POLICY.policy in the directory of policies"
            ));
        };
        let interface = self.ports.interface(name).ok_or_else(|| {
            format!(
                "{name} stands for several interfaces, each with a firewall of its own: ask for one of them"
            )
        })?;
        Ok((rule, interface.id))
    }

    /// Tells what firewalls have denied since a reader was told last.
    ///
    /// # Errors
    /// There is no such port, or it has no firewall, for people.
    pub(super) fn denials(&self, port: Option<&str>, since: &DenialCursor) -> Result<Denials, String> {
        if let Some(port) = port {
            self.firewall_of(port)?;
        }
        let now = self.workers.seconds();
        let mut told = Denials::default();
        for interface in
            self.ports.interfaces().filter(|interface| port.is_none_or(|port| port == interface.name))
        {
            let Some(firewall) = self.workers.firewall(interface.id) else { continue };
            let rule = self.ports.entry_of(interface.name).and_then(|entry| entry.rules.firewall.clone());
            let name = interface.name.to_owned();
            let mut cursor = Cursor::of(since.get(&name).cloned().unwrap_or_default());
            let (mut denials, missed) = firewall.denials(&mut cursor);
            denials.sort_by_key(|denial| denial.at);
            told.missed += missed;
            told.next.insert(name.clone(), cursor.into_inner());
            if !denials.is_empty() {
                let denials = denials.iter().map(|denial| report_of(denial, firewall.policy(), now));
                let policy = rule.map(|rule| rule.name).unwrap_or_default();
                told.ports.push(PortDenials { port: name, policy, denials: denials.collect() });
            }
        }
        Ok(told)
    }
}

/// Returns the ends of what a guest sends, and of its answers.
fn ends_of(ends: &Ends, vlan: u16) -> FlowEnds {
    FlowEnds {
        protocol: ends.protocol,
        local: ends.source,
        local_port: ends.ports[0],
        remote: ends.destination,
        remote_port: ends.ports[1],
        vlan,
    }
}

fn report_of(denial: &Denial, policy: &Policy, now: u32) -> DenialReport {
    DenialReport {
        seconds_ago: now.saturating_sub(denial.at).into(),
        direction: if denial.direction == Direction::Out { Way::Out } else { Way::In },
        ends: ends_of(&denial.ends, denial.vlan),
        rule: policy.describe(denial.rule),
        passed: denial.passed,
        name: denial.name.clone(),
    }
}

/// Addresses of a name that are told at most.
const MAX_ADDRESSES: usize = 1000;

fn name_report(name: String, addresses: &[(IpAddr, u32)]) -> NameReport {
    let addresses = addresses.iter().take(MAX_ADDRESSES);
    let addresses =
        addresses.map(|(address, left)| NameAddress { address: *address, left_seconds: (*left).into() });
    NameReport { name, addresses: addresses.collect() }
}

fn tell(
    firewall: &Firewall,
    now: u32,
    conversations: Option<usize>,
    report: FirewallReport,
) -> FirewallReport {
    let policy = firewall.policy();
    let counts = |line: usize, text: String, Counts { flows, packets, bytes }: Counts| RuleCounts {
        line: line as u64,
        text,
        flows,
        packets,
        bytes,
    };
    let rules = policy.draft().rules.iter().zip(firewall.counts());
    let [out, into] = firewall.default_counts();
    let [always, odd] = firewall.other_counts();
    let [egress, ingress] = ringferry_firewall::BY_DEFAULT.map(|rule| policy.describe(rule));
    let (mut denials, denials_missed) = firewall.denials(&mut Cursor::default());
    denials.sort_by_key(|denial| std::cmp::Reverse(denial.at));
    let denials = denials.iter().map(|denial| report_of(denial, policy, now));
    let mut flows: Vec<_> = firewall.flows(now).collect();
    let known = flows.len() as u64;
    flows.sort_by_key(|flow| std::cmp::Reverse(flow.bytes));
    flows.truncate(conversations.unwrap_or(0).min(MAX_CONVERSATIONS));
    let conversations = flows.into_iter().map(|flow| FlowReport {
        ends: ends_of(&flow.ends, flow.vlan),
        opened_by_guest: flow.is_out,
        answered: flow.is_answered,
        silent_seconds: flow.silent.into(),
        left_seconds: flow.left.into(),
        bytes: flow.bytes,
        rule: match flow.rule {
            Some(rule) => policy.describe(rule),
            None => "an older policy; this one is asked with the next packet".to_owned(),
        },
    });
    FirewallReport {
        dry_run: policy.draft().dry_run,
        rules: rules.map(|(rule, counted)| counts(rule.line, rule.text.clone(), counted)).collect(),
        egress: counts(0, egress, out),
        ingress: counts(0, ingress, into),
        always: counts(0, "always: ARP, neighbour discovery, DHCP".to_owned(), always),
        odd: counts(0, "never: not IP, malformed, source-routed".to_owned(), odd),
        other_names: counts(0, "names of no rule, refused".to_owned(), firewall.name_counts()),
        flows: known,
        flows_max: firewall.room() as u64,
        names: firewall
            .names_now(now)
            .into_iter()
            .map(|(name, addresses)| name_report(name, &addresses))
            .collect(),
        denials: denials.collect(),
        denials_missed,
        conversations: conversations.collect(),
        ..report
    }
}
