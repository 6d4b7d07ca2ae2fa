//! The verdict on a frame: a packet passes if it belongs to a flow that was allowed, or may open one.
//!
//! ```text
//!   frame ─► headers ─┬─ odd ─────────────────────────────────────────────► denied
//!                     ├─ neighbours, lease ───────────────────────────────► passes
//!                     ├─ to or from a resolver ─► is the name allowed, or was it asked for? ─► passes, and its addresses are reached | denied
//!                     ├─ later fragment ─► was the first one allowed? ────► passes | denied
//!                     ├─ error ─► is the flow known that it is about? ────► passes | as a packet
//!                     └─ packet ─► is its flow known? ─┬─ yes, under this policy ─► passes
//!                                                      ├─ yes, under an older one ─► rules, as of its opener ─► passes | denied, and ended
//!                                                      └─ no ─► rules ─► passes, and is known from now on | denied
//! ```
//!
//! A packet of TCP may open a flow whatever its flags are: a switch that has lost its memory, or to which a guest has moved, would else cut every
//! connection. It does so in a direction that the rules allow, or not at all.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ringferry_packet::parse::PROTO_UDP;

use crate::address::METADATA;
use crate::counters::{ALWAYS, Counters, Counts, ODD};
use crate::denials::{Cursor, Denial, Denials};
use crate::dns::{self, Message};
use crate::flows::{Flags, Flow, FlowTable, Found, Key, NO_POLICY, Record, State};
use crate::headers::{ACK, Doubt, Ends, Odd, Part, RST, SYN, Subject, View};
use crate::policy::{Action, BY_DEFAULT, Decision, Direction, OTHER_NAME, Policy};

/// The verdict on a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It passes.
    Pass,
    /// It is to be dropped.
    Deny(Denied),
    /// The bytes that decide are behind those of the view: ask again about more of it, of which nobody can change anything.
    Beyond,
}

/// Why a frame is to be dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// A rule, or a default, denies it.
    Rule(u16),
    /// It is a fragment of a datagram whose first one did not pass.
    Fragment,
    /// It asks for a name that no rule has.
    Name,
    /// No conversation can be told of it.
    Odd(Odd),
}

/// Seconds within which a name server answers, if at all: stubs give up after 5, and ask anew.
const ASKED: u32 = 15;

/// Seconds for which an address is reached by its name: as long as the answer says, but not so short that whoever has asked cannot connect, nor for ever.
const TIMES: std::ops::RangeInclusive<u32> = 30..=86_400;

/// Returns true for an address of the set `metadata`.
fn is_metadata(address: IpAddr) -> bool {
    METADATA.iter().any(|known| known.parse() == Ok(address))
}

/// What is known until a time.
fn until(state: State, now: u32, lasts: u32) -> State {
    // What was answered is given up last where a table is full.
    State { seen: now.saturating_add(lasts), flags: state.flags.with(Flags::ANSWERED), ..state }
}

/// The rules and the flows of one port. See the head of this file.
#[derive(Debug)]
pub struct Firewall {
    policy: Arc<Policy>,
    /// Questions for names are looked at.
    has_resolvers: bool,
    /// The number of the policy, by its low bits: flows that were allowed under another one are judged anew.
    generation: u8,
    flows: Arc<FlowTable>,
    counters: Counters,
    denials: Denials,
}

/// What becomes of a packet, before anything is done about it.
struct Judged<'t> {
    verdict: Verdict,
    /// Who decided: a rule, or what is counted without one.
    by: u16,
    act: Act<'t>,
    /// The datagram of which this is the first fragment.
    datagram: Option<Key>,
}

/// What follows from a verdict.
enum Act<'t> {
    Nothing,
    /// A packet of a flow that is known, and what is known of it now.
    Known(Found<'t>, State),
    /// A flow that is known, and is allowed no more.
    End(Found<'t>, Denial, State),
    /// A packet that opens a flow.
    Open(Key, State),
    /// A packet that would have opened one.
    Refuse(Denial, Option<(Key, State)>),
    /// A question for a name: its flow, and what is known of the question.
    Ask([(Key, State); 2]),
    /// The answer to one: its flow, and what is known of the addresses.
    Learn([Found<'t>; 2], State, Vec<(Key, State)>),
}

/// A packet of a conversation, as it is judged.
#[derive(Clone, Copy)]
struct Packet {
    direction: Direction,
    /// Its ends, as the guest sees them.
    ends: Ends,
    vlan: u16,
    /// Flags of TCP.
    tcp: Option<u8>,
    now: u32,
}

impl Packet {
    fn is_out(&self) -> bool {
        self.direction == Direction::Out
    }
}

impl Firewall {
    /// Makes a firewall without flows, for so many workers. `seed` is random.
    #[must_use]
    pub fn new(policy: Arc<Policy>, workers: usize, seed: [u64; 4]) -> Firewall {
        let flows = Arc::new(FlowTable::new(policy.draft().flows, seed));
        let counters = Counters::new(workers, policy.draft().rules.len());
        let has_resolvers = !policy.draft().resolvers.is_empty();
        Firewall {
            policy,
            has_resolvers,
            generation: NO_POLICY + 1,
            flows,
            counters,
            denials: Denials::new(workers, seed[0], has_resolvers),
        }
    }

    /// Makes the firewall that is in force after this one: it has another policy, or the same one anew, and all flows.
    #[must_use]
    pub fn following(&self, policy: Arc<Policy>, workers: usize, now: u32, seed: [u64; 4]) -> Firewall {
        let counters = Counters::new(workers, policy.draft().rules.len());
        let generation = match self.generation {
            u8::MAX => NO_POLICY + 1,
            before => before + 1,
        };
        // Numbers come again. A worker that was late may have allowed something under the last one meanwhile, which is seen to with the next change.
        match generation - NO_POLICY {
            1 => self.flows.forget_policies(NO_POLICY),
            2 => self.flows.forget_policies(generation),
            _ => {}
        }
        let mut flows = Arc::clone(&self.flows);
        if self.policy.draft().flows != policy.draft().flows {
            flows = Arc::new(FlowTable::new(policy.draft().flows, seed));
            self.flows.records(now).for_each(|record| flows.restore(record, now));
        }
        let has_resolvers = !policy.draft().resolvers.is_empty();
        let denials = Denials::new(workers, seed[0], has_resolvers);
        Firewall { policy, has_resolvers, generation, flows, counters, denials }
    }

    /// Returns its policy.
    #[must_use]
    pub fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    /// Judges a frame, which the guest has sent ([`Direction::Out`]) or which is for it, and does what follows from it: flows are remembered, and all is
    /// counted. Only the thread of `worker` calls it. `now` is the switch's clock in seconds.
    #[inline]
    pub fn judge(&self, direction: Direction, view: View<'_>, now: u32, worker: usize) -> Verdict {
        let out = direction == Direction::Out;
        // Most packets are plain, and of flows that are known.
        if let Some((key, tcp)) = view.plain(out)
            && !(self.has_resolvers && key.is_with_a_resolver())
            && let Some(found) = self.flows.find(&key, now)
            && found.state.generation == self.generation
        {
            let state = found.state.after(out, tcp, now);
            let bytes = view.len as u64;
            found.update(state, bytes);
            self.counters.count(worker, state.rule, false, bytes);
            return Verdict::Pass;
        }
        self.judge_any(direction, view, now, worker)
    }

    /// Returns true if it knows so many flows that [`fetch`](Self::fetch) is worth it.
    #[inline]
    #[must_use]
    pub fn is_large(&self) -> bool {
        self.flows.is_large()
    }

    /// Has the processor fetch what [`judge`](Self::judge) will read of the table of flows for a frame, if that is plain. It is worth it for all frames of a burst before the
    /// first is judged, where there are so many flows that their lines are in no near cache: all of them are under way at once.
    #[inline]
    pub fn fetch(&self, direction: Direction, view: View<'_>) {
        if let Some((key, _)) = view.plain(direction == Direction::Out) {
            self.flows.fetch(&key);
        }
    }

    #[inline(never)]
    fn judge_any(&self, direction: Direction, view: View<'_>, now: u32, worker: usize) -> Verdict {
        let Judged { verdict, by, act, datagram } = self.look(direction, view, now);
        if verdict == Verdict::Beyond {
            return verdict;
        }
        let bytes = view.len as u64;
        let tries = self.policy.draft().dry_run;
        let opens = matches!(act, Act::Open(..) | Act::Refuse(..) | Act::Ask(..));
        match act {
            Act::Nothing => {}
            Act::Known(found, state) => found.update(state, bytes),
            Act::Open(key, state) => self.flows.insert(&key, state, now, bytes),
            Act::Ask(known) => {
                known.iter().for_each(|(key, state)| self.flows.insert(key, *state, now, bytes));
            }
            Act::Learn([found, asked], state, addresses) => {
                found.update(state, bytes);
                // One question has one answer.
                asked.end();
                addresses.iter().for_each(|(key, state)| self.flows.insert(key, *state, now, 0));
            }
            Act::End(found, denial, state) => {
                self.denials.note(worker, &denial);
                if tries { found.update(state, bytes) } else { found.end() }
            }
            Act::Refuse(denial, flow) => {
                self.denials.note(worker, &denial);
                // A policy that is tried out tells of each flow once, and not of its answers.
                if let Some((key, state)) = flow.filter(|_| tries) {
                    self.flows.insert(&key, state, now, bytes);
                }
            }
        }
        if let Some(key) = datagram.filter(|_| verdict == Verdict::Pass || tries) {
            self.flows.insert(&key, self.opened(direction, by, now), now, 0);
        }
        self.counters.count(worker, by, opens, bytes);
        if tries { Verdict::Pass } else { verdict }
    }

    /// Returns the frame by which a resolver of the policy would refuse the question in this one; `None` if there is none.
    #[must_use]
    pub fn refusal(&self, view: View<'_>) -> Option<Vec<u8>> {
        view.refusal(&self.policy.draft().resolvers)
    }

    /// Returns true if it denies questions for names, to which there is [an answer](Self::refusal).
    #[must_use]
    pub fn refuses_names(&self) -> bool {
        self.has_resolvers
    }

    /// Says what [`judge`](Self::judge) would, and by which rule; nothing of it remains.
    #[must_use]
    pub fn would_judge(&self, direction: Direction, view: View<'_>, now: u32) -> (Verdict, Option<String>) {
        let Judged { verdict, by, act, .. } = self.look(direction, view, now);
        let told = (by != ODD && by != ALWAYS).then(|| match act {
            Act::Known(..) => format!("of a flow that is known, {}", self.policy.describe(by)),
            _ => self.policy.describe(by),
        });
        match (verdict, self.policy.draft().dry_run) {
            (Verdict::Deny(_), true) => {
                (Verdict::Pass, told.map(|told| format!("{told}, which is tried out only")))
            }
            _ => (verdict, told),
        }
    }

    #[inline]
    fn look(&self, direction: Direction, view: View<'_>, now: u32) -> Judged<'_> {
        let (subject, vlan) = match view.subject() {
            Ok(found) => found,
            Err(Doubt::Beyond) => return Judged::of(Verdict::Beyond, ODD, Act::Nothing),
            Err(Doubt::Odd(Odd::NotIp(kind))) if self.policy.draft().ether_types.contains(&kind) => {
                return Judged::passes();
            }
            Err(Doubt::Odd(odd)) => return Judged::denied(Denied::Odd(odd)),
        };
        let packet = |ends: Ends, tcp: Option<u8>| {
            let ends = if direction == Direction::Out { ends } else { ends.reversed() };
            Packet { direction, ends, vlan, tcp, now }
        };
        match subject {
            Subject::Packet { ends, part: Part::Whole, l4, end, .. }
                if self.is_with_a_resolver(direction, &ends) =>
            {
                match view.datagram(l4, end) {
                    Ok(message) => self.names(packet(ends, None), Message::read(message)),
                    Err(Doubt::Beyond) => Judged::of(Verdict::Beyond, ODD, Act::Nothing),
                    Err(Doubt::Odd(odd)) => Judged::denied(Denied::Odd(odd)),
                }
            }
            // Nobody could tell what is asked for in it.
            Subject::Packet { ends, part: Part::First(_), .. }
                if self.is_with_a_resolver(direction, &ends) =>
            {
                Judged::denied(Denied::Odd(Odd::Fragmented))
            }
            Subject::Packet { ends, part: Part::Whole, flags_at, .. } => {
                self.whole(packet(ends, flags_at.and_then(|at| view.byte(at))))
            }
            Subject::Packet { ends, part: Part::First(identification), .. } => {
                let packet = packet(ends, None);
                let datagram = Some(Key::fragments(&packet.ends, vlan, identification));
                Judged { datagram, ..self.whole(packet) }
            }
            Subject::Packet { ends, part: Part::Later(identification), .. } => {
                let key = Key::fragments(&packet(ends, None).ends, vlan, identification);
                // What was allowed under another policy cannot be judged anew, as it has no ports.
                match self.flows.find(&key, now).filter(|first| first.state.generation == self.generation) {
                    Some(first) => Judged::of(Verdict::Pass, first.state.rule, Act::Nothing),
                    None => Judged::denied(Denied::Fragment),
                }
            }
            Subject::Error { ends, about } => self.error(packet(ends, None), about),
            Subject::Message(ends) => self.asks(packet(ends, None), None),
            Subject::Neighbours => Judged::passes(),
            Subject::Router(_) if direction == Direction::In => Judged::passes(),
            Subject::Router(ends) => self.asks(packet(ends, None), None),
        }
    }

    /// Judges an error about a packet with the ends `about`, which its receiver has sent.
    fn error(&self, packet: Packet, about: Ends) -> Judged<'_> {
        // As the guest sees it: what it reports was sent to it, and what is reported to it was sent by it.
        let about = if packet.is_out() { about.reversed() } else { about };
        // Anybody on the way may report to the guest; the guest is the end of its own.
        let is_own = !packet.is_out() || packet.ends.source == about.source;
        let known = self.flows.find(&Key::flow(&about, packet.vlan), packet.now).filter(|_| is_own);
        let Some(known) = known else { return self.asks(packet, None) };
        let opener = if known.state.flags.has(Flags::OUT) { Direction::Out } else { Direction::In };
        let rule = match known.state.generation == self.generation {
            true => known.state.rule,
            false => match self.decide(opener, &as_opened(opener, about), packet.now) {
                Decision { action: Action::Allow, rule } => rule,
                Decision { action: Action::Deny, .. } => return self.asks(packet, None),
            },
        };
        Judged::of(Verdict::Pass, rule, Act::Nothing)
    }

    /// Judges a packet that has the ends of its flow.
    #[inline]
    fn whole(&self, packet: Packet) -> Judged<'_> {
        let key = Key::flow(&packet.ends, packet.vlan);
        let Some(found) = self.flows.find(&key, packet.now) else { return self.unknown(packet, key) };
        let mut state = found.state.after(packet.is_out(), packet.tcp, packet.now);
        if state.generation != self.generation {
            let opener = if state.flags.has(Flags::OUT) { Direction::Out } else { Direction::In };
            let decision = self.decide(opener, &as_opened(opener, packet.ends), packet.now);
            let by = decision.rule;
            state = State { generation: self.generation, rule: by, ..state };
            if decision.action == Action::Deny {
                let act = Act::End(found, self.denial(packet, by), state);
                return Judged::of(Verdict::Deny(Denied::Rule(by)), by, act);
            }
        }
        Judged::of(Verdict::Pass, state.rule, Act::Known(found, state))
    }

    /// Returns true for a packet between the guest and the UDP port of a name server that the policy names.
    fn is_with_a_resolver(&self, direction: Direction, ends: &Ends) -> bool {
        let (remote, port) = match direction {
            Direction::Out => (ends.destination, ends.ports[1]),
            Direction::In => (ends.source, ends.ports[0]),
        };
        self.has_resolvers
            && (port, ends.protocol) == (dns::PORT, PROTO_UDP)
            && self.policy.draft().resolvers.contains(&remote)
    }

    /// Judges a message to a name server, or from one. A question passes if it is for a name of a rule. An answer passes if it is the one to such a question,
    /// and the addresses in it are reached from then on.
    fn names(&self, packet: Packet, message: Option<Message>) -> Judged<'_> {
        let Packet { direction, ends, vlan, now, .. } = packet;
        let key = Key::flow(&ends, vlan);
        match (direction, message) {
            (Direction::Out, Some(Message::Query(question))) => {
                let Some((_, rule)) = self.policy.names_for(&question.name).next() else {
                    let name = Some(question.name.to_string());
                    let act = Act::Refuse(Denial { name, ..self.denial(packet, OTHER_NAME) }, None);
                    return Judged::of(Verdict::Deny(Denied::Name), OTHER_NAME, act);
                };
                let asked = Key::query(&ends, vlan, question.id, question.number());
                let state = self.opened(direction, rule, now);
                let known = [(key, state), (asked, until(state, now, ASKED))];
                Judged::of(Verdict::Pass, rule, Act::Ask(known))
            }
            (Direction::In, Some(Message::Response(question, addresses))) => {
                let asked = Key::query(&ends, vlan, question.id, question.number());
                let (Some(found), Some(asked)) = (self.flows.find(&key, now), self.flows.find(&asked, now))
                else {
                    return self.asks(packet, None);
                };
                let state = found.state.after(false, None, now);
                let names: Vec<_> = self.policy.names_for(&question.name).collect();
                // No name has an address under which a cloud tells a machine its credentials.
                let addresses = addresses.iter().filter(|(address, _)| !is_metadata(*address));
                let learned = addresses.flat_map(|(address, ttl)| {
                    let lasts = (*ttl).clamp(*TIMES.start(), *TIMES.end());
                    names.iter().map(move |(name, rule)| {
                        let state = State { rule: *rule, ..state };
                        (Key::name(*name, *address), until(state, now, lasts))
                    })
                });
                let learned = learned.collect();
                Judged::of(Verdict::Pass, state.rule, Act::Learn([found, asked], state, learned))
            }
            _ => Judged::denied(Denied::Odd(Odd::Malformed)),
        }
    }

    /// Asks the rules who may open a flow, with the names that addresses have now.
    fn decide(&self, opener: Direction, ends: &Ends, now: u32) -> Decision {
        let has_name = |name, address| self.flows.find(&Key::name(name, address), now).is_some();
        self.policy.decide(opener, ends, has_name)
    }

    #[cold]
    fn unknown(&self, packet: Packet, key: Key) -> Judged<'_> {
        let Packet { direction, ends, vlan, now, .. } = packet;
        if self.policy.draft().dhcp && ends.protocol == PROTO_UDP {
            let lease = Key::lease(ends.source.is_ipv4(), vlan);
            match direction {
                Direction::Out if asks_for_a_lease(&ends) => {
                    let act = Act::Open(lease, self.opened(direction, ALWAYS, now));
                    return Judged::of(Verdict::Pass, ALWAYS, act);
                }
                Direction::In if answers_with_a_lease(&ends) && self.flows.find(&lease, now).is_some() => {
                    return Judged::passes();
                }
                _ => {}
            }
        }
        self.asks(packet, Some(key))
    }

    /// Asks the rules about a packet of no known flow. If it passes, its flow is known from now on by `key`.
    fn asks(&self, packet: Packet, key: Option<Key>) -> Judged<'_> {
        let Packet { direction, ends, tcp, now, .. } = packet;
        let decision = self.decide(direction, &as_opened(direction, ends), now);
        let by = decision.rule;
        // A reset is the end of something that is not known, and the answer to a SYN its middle: neither is the beginning.
        let begins = |flags: u8| flags & RST == 0 && flags & (SYN | ACK) != SYN | ACK;
        let key = key.filter(|_| tcp.is_none_or(begins));
        let flow = key.map(|key| (key, self.opened(direction, by, now)));
        match (decision.action, flow) {
            (Action::Deny, flow) => {
                let act = Act::Refuse(self.denial(packet, by), flow);
                Judged::of(Verdict::Deny(Denied::Rule(by)), by, act)
            }
            (Action::Allow, Some((key, state))) => Judged::of(Verdict::Pass, by, Act::Open(key, state)),
            (Action::Allow, None) => Judged::of(Verdict::Pass, by, Act::Nothing),
        }
    }

    fn opened(&self, direction: Direction, rule: u16, now: u32) -> State {
        let flags = if direction == Direction::Out { Flags::OUT } else { Flags::default() };
        State { seen: now, rule, generation: self.generation, flags }
    }

    fn denial(&self, packet: Packet, rule: u16) -> Denial {
        let Packet { direction, ends, vlan, now, .. } = packet;
        Denial { at: now, direction, ends, vlan, rule, passed: self.policy.draft().dry_run, name: None }
    }

    /// Returns what was counted of each rule, in their order.
    pub fn counts(&self) -> impl Iterator<Item = Counts> {
        (0..self.policy.draft().rules.len() as u16).map(|rule| self.counters.of(rule))
    }

    /// Returns what was counted of the defaults: out, in.
    #[must_use]
    pub fn default_counts(&self) -> [Counts; 2] {
        BY_DEFAULT.map(|rule| self.counters.of(rule))
    }

    /// Returns what was counted of frames that pass whatever the rules are, and of those that never do.
    #[must_use]
    pub fn other_counts(&self) -> [Counts; 2] {
        [ALWAYS, ODD].map(|rule| self.counters.of(rule))
    }

    /// Returns what was counted of questions for names of no rule.
    #[must_use]
    pub fn name_counts(&self) -> Counts {
        self.counters.of(OTHER_NAME)
    }

    /// Returns the frames that have passed, and those that were denied or, where the policy is tried out, would have been.
    #[must_use]
    pub fn passed_and_denied(&self) -> [u64; 2] {
        let draft = self.policy.draft();
        let rules = draft.rules.iter().map(|rule| rule.action).zip(self.counts());
        let defaults = draft.defaults.into_iter().zip(self.default_counts());
        let [always, odd] = self.other_counts();
        let rest = [(Action::Allow, always), (Action::Deny, odd), (Action::Deny, self.name_counts())];
        let mut sums = [0; 2];
        for (action, counts) in rules.chain(defaults).chain(rest) {
            sums[usize::from(action == Action::Deny)] += counts.packets;
        }
        sums
    }

    /// Returns the flows that are known.
    pub fn flows(&self, now: u32) -> impl Iterator<Item = Flow> {
        self.flows.flows(now, self.generation)
    }

    /// Returns the addresses that a name of the policy has now, by what is written there, each with the seconds for which it has it.
    #[must_use]
    pub fn names_now(&self, now: u32) -> BTreeMap<String, Vec<(IpAddr, u32)>> {
        let mut names: BTreeMap<_, _> =
            self.policy.names().map(|(number, name)| (number, (name.to_string(), Vec::new()))).collect();
        for (number, address, left) in self.flows.names(now) {
            // One that an older policy had is none of this one.
            if let Some((_, addresses)) = names.get_mut(&number) {
                addresses.push((address, left));
            }
        }
        names.into_values().collect()
    }

    /// Returns the flows that there is room for.
    #[must_use]
    pub fn room(&self) -> usize {
        self.flows.room()
    }

    /// Returns the flows for another process that goes on with them.
    pub fn records(&self, now: u32) -> impl Iterator<Item = Record> {
        self.flows.records(now)
    }

    /// Takes over flows that another process had. They are judged anew, as that one's policy may have been another.
    pub fn restore(&self, records: impl Iterator<Item = Record>, now: u32) {
        for record in records {
            let [a, b, c, d, e, state, bytes] = record;
            let state = State { generation: NO_POLICY, ..State::from_word(state) };
            self.flows.restore([a, b, c, d, e, state.word(), bytes], now);
        }
    }

    /// Returns what was denied since `cursor`, and moves it on; also the denials since the start that were too many to be told.
    pub fn denials(&self, cursor: &mut Cursor) -> (Vec<Denial>, u64) {
        self.denials.since(cursor)
    }
}

impl Judged<'_> {
    fn of(verdict: Verdict, by: u16, act: Act<'_>) -> Judged<'_> {
        Judged { verdict, by, act, datagram: None }
    }

    /// What passes whatever the rules are.
    fn passes() -> Self {
        Self { verdict: Verdict::Pass, by: ALWAYS, act: Act::Nothing, datagram: None }
    }

    /// What never passes.
    fn denied(why: Denied) -> Self {
        Self { verdict: Verdict::Deny(why), by: ODD, act: Act::Nothing, datagram: None }
    }
}

/// Returns ends that a guest sees as the opener of their flow sees them.
fn as_opened(opener: Direction, ends: Ends) -> Ends {
    match opener {
        Direction::Out => ends,
        Direction::In => ends.reversed(),
    }
}

/// A client of DHCP (RFC 2131, 4.1) or DHCPv6 (RFC 8415, 7) asks all servers of its link.
fn asks_for_a_lease(ends: &Ends) -> bool {
    match ends.destination {
        IpAddr::V4(Ipv4Addr::BROADCAST) => ends.ports == [68, 67],
        IpAddr::V6(address) => {
            ends.ports == [546, 547] && address == Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2)
        }
        IpAddr::V4(_) => false,
    }
}

/// A server answers. The ends are as the guest sees them.
fn answers_with_a_lease(ends: &Ends) -> bool {
    match ends.destination {
        IpAddr::V4(_) => ends.ports == [68, 67],
        IpAddr::V6(server) => ends.ports == [546, 547] && server.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests;
