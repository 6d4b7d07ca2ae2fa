//! A policy, compiled: what may be opened, in which direction, by which rule.
//!
//! Rules are tried in the order in which they were written, and the first that matches decides; if none does, the default of the direction. To look
//! up a remote address costs one binary search, whatever the number of sets and prefixes: the address space is cut into ranges whose addresses are
//! in the same sets, and each range has the list of the rules that could match there ([`Classes`]).

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use crate::address::{Member, number, ranges};
use crate::dns::{self, Pattern};
use crate::headers::{Ends, PROTO_ICMP, PROTO_ICMPV6};

/// Most rules of a policy: as many are tried for a packet that opens a flow.
pub const MAX_RULES: usize = 1000;
/// Most prefixes of all sets of a policy together.
pub const MAX_PREFIXES: usize = 1 << 20;

/// Most entries of all lists of rules and of sets by class together: some 40 MB. Sets that overlap in every way could else have a class for each of a million prefixes, with a thousand rules.
const MAX_LISTED: usize = 16 << 20;

/// Protocols that carry other packets within IP (IP in IP, IPv6, GRE, EtherIP, encapsulation, L2TP, MPLS, minimal encapsulation): rules and defaults
/// that name no protocol are not for them, as what is within goes wherever the other end takes it.
const TUNNELS: [u8; 9] = [4, 41, 47, 55, 94, 97, 98, 115, 137];

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It passes.
    Allow,
    /// It is dropped.
    Deny,
}

/// Who has opened a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The guest: egress.
    Out,
    /// Somebody else: ingress.
    In,
}

impl Direction {
    /// Returns the word of a policy file.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Direction::Out => "out",
            Direction::In => "in",
        }
    }
}

/// The protocols that a rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// All but those that carry other packets.
    Any,
    /// ICMP and ICMPv6.
    Icmp,
    /// The protocol of this number.
    Number(u8),
}

impl Protocol {
    #[inline]
    fn includes(self, protocol: u8) -> bool {
        match self {
            Protocol::Any => !TUNNELS.contains(&protocol),
            Protocol::Icmp => matches!(protocol, PROTO_ICMP | PROTO_ICMPV6),
            Protocol::Number(number) => number == protocol,
        }
    }
}

/// The other ends that a rule is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remote {
    /// All.
    Any,
    /// Those whose addresses are in one of these sets, by number.
    Sets(Vec<u16>),
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// What it decides.
    pub action: Action,
    /// The directions that it is for: out, in.
    pub directions: [bool; 2],
    /// The protocols.
    pub protocol: Protocol,
    /// Ports at which flows are opened; none: all.
    pub ports: Vec<RangeInclusive<u16>>,
    /// The other ends.
    pub remote: Remote,
    /// Names of further other ends, by number.
    pub names: Vec<u16>,
    /// The line of the file.
    pub line: usize,
    /// What is written there.
    pub text: String,
}

impl Rule {
    #[inline]
    fn matches(&self, protocol: u8, port: u16) -> bool {
        self.protocol.includes(protocol)
            && (self.ports.is_empty() || self.ports.iter().any(|ports| ports.contains(&port)))
    }
}

/// What a policy file says, before it is compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draft {
    /// What becomes of flows that no rule is about: out, in.
    pub defaults: [Action; 2],
    /// The rules, in order.
    pub rules: Vec<Rule>,
    /// The sets, by number.
    pub sets: Vec<Vec<Member>>,
    /// Names that rules are about, by number.
    pub names: Vec<Pattern>,
    /// The resolvers that may be asked for them.
    pub resolvers: Vec<IpAddr>,
    /// What would be dropped passes, and is told all the same.
    pub dry_run: bool,
    /// Hosts may ask for addresses, and be answered.
    pub dhcp: bool,
    /// Types of frames other than of IP and ARP that pass.
    pub ether_types: Vec<u16>,
    /// Room for flows.
    pub flows: u32,
}

impl Default for Draft {
    fn default() -> Self {
        Draft {
            defaults: [Action::Deny; 2],
            rules: Vec::new(),
            sets: Vec::new(),
            names: Vec::new(),
            resolvers: Vec::new(),
            dry_run: false,
            dhcp: true,
            ether_types: Vec::new(),
            flows: DEFAULT_FLOWS,
        }
    }
}

/// Room for flows where a policy says nothing: 2 MiB.
pub const DEFAULT_FLOWS: u32 = 32_768;

/// Numbers of what decides beside rules.
pub const BY_DEFAULT: [u16; 2] = [u16::MAX, u16::MAX - 1];

/// The text of a policy and of the files that it names, by which another process has the same policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// The policy.
    pub text: String,
    /// The files of its sets, by name.
    pub files: BTreeMap<String, String>,
}

/// What denies questions for names of no rule, beside rules.
pub(crate) const OTHER_NAME: u16 = u16::MAX - 4;

/// A compiled policy. It does not change, and may be of many ports.
#[derive(Debug)]
pub struct Policy {
    source: Source,
    draft: Draft,
    /// The numbers of names.
    numbers: Box<[u64]>,
    v4: Classes<u32>,
    v6: Classes<u128>,
}

impl PartialEq for Policy {
    fn eq(&self, other: &Policy) -> bool {
        self.source == other.source
    }
}

impl Eq for Policy {}

/// A decision, and by which rule: its number, or one of [`BY_DEFAULT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What becomes of the flow.
    pub action: Action,
    /// The rule.
    pub rule: u16,
}

impl Policy {
    /// Compiles what a file says, whose text is `source`; `None` if that takes more memory than any policy that makes sense.
    #[must_use]
    pub fn new(draft: Draft, source: Source) -> Option<Policy> {
        let family = |v4: bool| {
            let members = draft
                .sets
                .iter()
                .map(|set| set.iter().filter(move |member| member.prefix.is_v4() == v4).copied());
            Classes::<u128>::compile(members, &draft.rules)
        };
        let (v4, v6) = (family(true)?, family(false)?);
        // A range above the last address of IPv4 is looked up by nobody.
        let starts = v4.starts.iter().map_while(|start| u32::try_from(*start).ok()).collect();
        let v4 = Classes { starts, class_of: v4.class_of, lists: v4.lists };
        let numbers = draft.names.iter().map(|name| dns::number(name.to_string().as_bytes())).collect();
        Some(Policy { source, draft, numbers, v4, v6 })
    }

    /// Returns the names that are for this one, with the rule of each.
    pub(crate) fn names_for(&self, name: &dns::Name) -> impl Iterator<Item = (u64, u16)> {
        let rule_of = |number: u16| self.draft.rules.iter().position(|rule| rule.names.contains(&number));
        let matching = (0u16..).zip(&self.draft.names).filter(move |(_, pattern)| pattern.matches(name));
        matching.map(move |(number, _)| {
            (self.numbers[usize::from(number)], rule_of(number).map_or(BY_DEFAULT[0], |rule| rule as u16))
        })
    }

    /// Returns the names, each with its number.
    pub(crate) fn names(&self) -> impl Iterator<Item = (u64, &Pattern)> {
        self.numbers.iter().copied().zip(&self.draft.names)
    }

    /// Returns the text that it was made of.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Returns what the file says.
    #[must_use]
    pub fn draft(&self) -> &Draft {
        &self.draft
    }

    /// Decides whether somebody may open a flow with a packet of these ends, which are seen from who opens it. `has_name` says whether an address has a name, given by its
    /// [number](dns::number).
    pub(crate) fn decide(
        &self,
        direction: Direction,
        ends: &Ends,
        has_name: impl Fn(u64, IpAddr) -> bool,
    ) -> Decision {
        let which = direction as usize;
        let remote = match direction {
            Direction::Out => ends.destination,
            Direction::In => ends.source,
        };
        let candidates = match remote {
            IpAddr::V4(address) => self.v4.rules(address.to_bits(), which),
            IpAddr::V6(address) => self.v6.rules(address.to_bits(), which),
        };
        let port = ends.ports[1];
        for candidate in candidates {
            let number = candidate & !BY_NAME;
            let rule = &self.draft.rules[usize::from(number)];
            let is_there = |name: &u16| has_name(self.numbers[usize::from(*name)], remote);
            if rule.matches(ends.protocol, port)
                && (candidate & BY_NAME == 0 || rule.names.iter().any(is_there))
            {
                return Decision { action: rule.action, rule: number };
            }
        }
        // What is within a tunnel goes wherever its other end takes it.
        let action = if TUNNELS.contains(&ends.protocol) { Action::Deny } else { self.draft.defaults[which] };
        Decision { action, rule: BY_DEFAULT[which] }
    }

    /// Returns the text of a rule, or the words for a default.
    #[must_use]
    pub fn describe(&self, rule: u16) -> String {
        match self.draft.rules.get(usize::from(rule)) {
            Some(rule) => format!("line {}: {}", rule.line, rule.text),
            None if rule == OTHER_NAME => "a question for a name of no rule (resolver)".to_owned(),
            None => {
                let which = usize::from(rule == BY_DEFAULT[1]);
                let action = match self.draft.defaults[which] {
                    Action::Allow => "allow",
                    Action::Deny => "deny",
                };
                format!("by default: {} {action}", ["egress", "ingress"][which])
            }
        }
    }
}

/// Marks a rule in a list that is for the addresses of the class only if they have its names.
const BY_NAME: u16 = 1 << 15;

/// The addresses of one family, cut into ranges of the same class, and for each class the rules that may match there.
#[derive(Debug)]
struct Classes<T> {
    /// First address of each range, from 0 on.
    starts: Box<[T]>,
    /// The class of each range.
    class_of: Box<[u32]>,
    /// The rules for each class: out, in.
    lists: Box<[[Box<[u16]>; 2]]>,
}

impl Classes<u128> {
    /// Compiles sets and rules; `None` if the lists would have more than [`MAX_LISTED`] entries.
    fn compile<M: Iterator<Item = Member>>(
        sets: impl Iterator<Item = M>,
        rules: &[Rule],
    ) -> Option<Classes<u128>> {
        // At which address a set begins or ends.
        let mut edges: Vec<(u128, u16)> = Vec::new();
        for (set, members) in (0..).zip(sets) {
            for (first, last) in ranges(members) {
                edges.push((first, set));
                edges.extend(last.checked_add(1).map(|after| (after, set)));
            }
        }
        edges.sort_unstable();
        let (mut within, mut known) = (Vec::<u16>::new(), HashMap::<Vec<u16>, u32>::new());
        let (mut starts, mut class_of, mut lists) = (Vec::new(), Vec::new(), Vec::new());
        let mut listed = 0;
        let mut add = |start: u128, within: &Vec<u16>| {
            let class = *known.entry(within.clone()).or_insert_with(|| {
                let list = |direction: usize| {
                    let candidate = |(number, rule): (u16, &Rule)| {
                        let here = match &rule.remote {
                            Remote::Any => true,
                            Remote::Sets(sets) => sets.iter().any(|set| within.binary_search(set).is_ok()),
                        };
                        let by_name = !here && !rule.names.is_empty();
                        let is_one = rule.directions[direction] && (here || by_name);
                        is_one.then_some(if by_name { number | BY_NAME } else { number })
                    };
                    (0u16..).zip(rules).filter_map(candidate).collect::<Box<[u16]>>()
                };
                let both = [list(0), list(1)];
                listed += within.len() + both[0].len() + both[1].len();
                lists.push(both);
                lists.len() as u32 - 1
            });
            if class_of.last() != Some(&class) {
                starts.push(start);
                class_of.push(class);
            }
            (listed <= MAX_LISTED).then_some(())
        };
        if edges.first().is_none_or(|(first, _)| *first > 0) {
            add(0, &within)?;
        }
        for edges in edges.chunk_by(|(one, _), (other, _)| one == other) {
            for (_, set) in edges {
                match within.binary_search(set) {
                    Ok(at) => drop(within.remove(at)),
                    Err(at) => within.insert(at, *set),
                }
            }
            add(edges[0].0, &within)?;
        }
        Some(Classes { starts: starts.into(), class_of: class_of.into(), lists: lists.into() })
    }
}

impl<T: Ord> Classes<T> {
    /// Returns the rules that may match where the remote end has this address.
    #[inline]
    fn rules(&self, address: T, direction: usize) -> &[u16] {
        let range = self.starts.partition_point(|start| *start <= address) - 1;
        &self.lists[self.class_of[range] as usize][direction]
    }
}

/// Returns true if an address is in a set, for tests and for people.
#[must_use]
pub fn is_in(set: &[Member], address: IpAddr) -> bool {
    let family = set.iter().filter(|member| member.prefix.is_v4() == address.is_ipv4()).copied();
    ranges(family).iter().any(|(first, last)| (first..=last).contains(&&number(address)))
}
