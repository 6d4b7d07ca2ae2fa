//! The table of flows: which conversations were allowed, so that both directions of them pass.
//!
//! The table is shared by all workers, and none takes a lock. A flow is one cache line; four lines are a bucket, and a flow can be in two of them: in the
//! other one only as the first was full. With one bucket a table of 262 144 forgot flows at 100 000. The words of a line are atomic, and the first is a sequence lock:
//!
//! ```text
//!   insert:  head: even ──compare-exchange──► odd (taken) ─► key and state are written ─► head: tag and next even version, release
//!   find:    head, acquire: even, and of the right tag ─► key is compared ─► fence, acquire ─► head once more: the same
//! ```
//!
//! A find that meets an insert finds nothing, as does one whose line was replaced meanwhile; its packet is judged as one of a new flow. Two workers may
//! insert the same flow at once, which then has two lines until both expire: either is right.
//!
//! - **Bounded.** The table never grows. Of two full buckets the flow goes that is worth least: one that was never answered, else
//!   one that is half-open or closing, else the one that was silent for longest. So a flood of openings, answered or not, takes each other's places before
//!   those of conversations that go on; and what is opened from outside never takes the place of one that the guest has opened and that goes on: it is not
//!   remembered then, and its answers are judged by the rules. A table is of one port: no other port's flows are ever in danger.
//! - **Unpredictable.** The bucket is chosen by a hash with a random key; flows are told apart by their whole key, not by a hash.
//!
//! Time is the switch's coarse clock in seconds.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

use ringferry_packet::parse::{PROTO_TCP, PROTO_UDP};
use zerocopy::FromZeros;

use crate::address::number;
use crate::dns;
use crate::headers::{ACK, Ends, FIN, PROTO_ICMP, PROTO_ICMPV6, RST, SYN};

/// Flows that a table has room for, at least and at most.
pub const FLOWS: std::ops::RangeInclusive<u32> = 256..=4 << 20;

/// Lines of a bucket.
const WAYS: usize = 4;

/// Words of a key.
const KEY: usize = 5;

/// How long a flow that is silent is remembered, in seconds. Of TCP RFC 5382 (REQ-5) asks for 2 h 4 min, and 4 min while it is opened or closed; of UDP and of
/// echoes these are what Linux's connection tracking has.
const TCP_ESTABLISHED: u32 = 7440;
const TCP_TRANSITORY: u32 = 240;
const TCP_RESET: u32 = 10;
const UNANSWERED: u32 = 30;
const ANSWERED: u32 = 120;
const ECHO: u32 = 30;
const OTHER: u32 = 600;
/// A datagram is put together again within 60 s, if at all (RFC 8200, 4.5).
const FRAGMENTS: u32 = 60;

/// The kinds of entry, in a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// A conversation.
    Flow = 1,
    /// A datagram that comes in fragments, of which the first was allowed: the identification is in place of the ports.
    Fragments = 2,
    /// A host that has asked for an address, and may be answered.
    Lease = 3,
    /// An address that a name has, until the second in `seen`: the name's pattern is in place of the guest's address.
    Name = 4,
    /// A question for a name, until the second in `seen`: a hash of it is in place of the guest's address, and its number and the guest's port of the ports.
    Query = 5,
}

/// The name of a flow, the same in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key([u64; KEY]);

impl Key {
    /// The key of a conversation in a VLAN, whose `ends` are seen from the guest: it is the source.
    #[inline]
    pub(crate) fn flow(ends: &Ends, vlan: u16) -> Key {
        let [local, remote] = ends.ports;
        Key::of(Kind::Flow, ends, vlan, u32::from(local) << 16 | u32::from(remote))
    }

    /// The key of a datagram in fragments.
    pub(crate) fn fragments(ends: &Ends, vlan: u16, identification: u32) -> Key {
        // In IPv6 the next header of later fragments need not be that of the first (RFC 8200, 4.5).
        let protocol = if ends.source.is_ipv4() { ends.protocol } else { 0 };
        Key::of(Kind::Fragments, &Ends { protocol, ..*ends }, vlan, identification)
    }

    /// The key of a host that asks for an address.
    pub(crate) fn lease(is_v4: bool, vlan: u16) -> Key {
        Key([0, 0, 0, 0, tail(Kind::Lease, is_v4, 0, vlan, 0)])
    }

    /// The key of an address that a name of this pattern has.
    pub(crate) fn name(pattern: u64, address: IpAddr) -> Key {
        let remote = number(address);
        let tail = tail(Kind::Name, address.is_ipv4(), 0, 0, 0);
        Key([pattern, 0, remote as u64, (remote >> 64) as u64, tail])
    }

    /// The key of a question that the guest has asked a resolver: its `ends` are seen from the guest.
    pub(crate) fn query(ends: &Ends, vlan: u16, id: u16, question: u64) -> Key {
        let remote = number(ends.destination);
        let ports = u32::from(ends.ports[0]) << 16 | u32::from(id);
        let tail = tail(Kind::Query, ends.destination.is_ipv4(), ends.protocol, vlan, ports);
        Key([question, 0, remote as u64, (remote >> 64) as u64, tail])
    }

    /// Returns true for a conversation with the UDP port of name servers.
    #[inline]
    pub(crate) fn is_with_a_resolver(&self) -> bool {
        (self.0[4] >> 32) as u16 == dns::PORT && self.protocol() == PROTO_UDP
    }

    #[inline]
    fn of(kind: Kind, ends: &Ends, vlan: u16, ports: u32) -> Key {
        let [local, remote] = [number(ends.source), number(ends.destination)];
        let tail = tail(kind, ends.source.is_ipv4(), ends.protocol, vlan, ports);
        Key([local as u64, (local >> 64) as u64, remote as u64, (remote >> 64) as u64, tail])
    }

    /// Returns the ends of a conversation as its guest sees them, and its VLAN; `None` for what is none.
    pub(crate) fn ends(&self) -> Option<(Ends, u16)> {
        if !self.kind_is(Kind::Flow) {
            return None;
        }
        let Key([local, local_high, remote, remote_high, tail]) = *self;
        let ends = Ends {
            source: self.address(local, local_high),
            destination: self.address(remote, remote_high),
            protocol: (tail >> 8) as u8,
            ports: [(tail >> 48) as u16, (tail >> 32) as u16],
        };
        Some((ends, (tail >> 16) as u16))
    }

    /// Returns the pattern of a name, by its number, and an address that it has; `None` for what is none.
    fn named(&self) -> Option<(u64, IpAddr)> {
        let Key([pattern, _, remote, remote_high, _]) = *self;
        self.kind_is(Kind::Name).then(|| (pattern, self.address(remote, remote_high)))
    }

    fn address(&self, low: u64, high: u64) -> IpAddr {
        match self.0[4] as u8 & 0x80 != 0 {
            true => IpAddr::V4(Ipv4Addr::from_bits(low as u32)),
            false => IpAddr::V6(Ipv6Addr::from_bits(u128::from(high) << 64 | u128::from(low))),
        }
    }

    /// Returns true if this is the same key: in registers, where a comparison of arrays is a call.
    #[inline]
    fn is(&self, Key(other): &Key) -> bool {
        self.0.iter().zip(other).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
    }

    fn kind_is(&self, kind: Kind) -> bool {
        self.0[4] as u8 & 0x7f == kind as u8
    }

    #[inline]
    pub(crate) fn protocol(&self) -> u8 {
        (self.0[4] >> 8) as u8
    }

    pub(crate) const fn from_words(words: [u64; KEY]) -> Key {
        Key(words)
    }

    /// Returns the words, for another process or thread.
    pub(crate) fn words(&self) -> [u64; KEY] {
        self.0
    }
}

/// The last word of a key: kind and family, protocol, VLAN, ports, from the low bits on.
#[inline]
pub(crate) fn tail(kind: Kind, is_v4: bool, protocol: u8, vlan: u16, ports: u32) -> u64 {
    kind as u64
        | u64::from(is_v4) << 7
        | u64::from(protocol) << 8
        | u64::from(vlan) << 16
        | u64::from(ports) << 32
}

/// The number of no policy: a flow with it is judged anew.
pub(crate) const NO_POLICY: u8 = 0;

/// What is known of a flow, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State {
    /// Second of its last packet.
    pub(crate) seen: u32,
    /// The rule that allowed it.
    pub(crate) rule: u16,
    /// The policy under which it was allowed, by its low bits.
    pub(crate) generation: u8,
    pub(crate) flags: Flags,
}

/// Marks of a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flags(u8);

impl Flags {
    /// The guest has opened it, and not the other end.
    pub(crate) const OUT: Flags = Flags(1);
    /// There was a packet in the other direction than that of the first.
    pub(crate) const ANSWERED: Flags = Flags(2);
    /// TCP: this side of it has sent its last byte.
    const FIN_OUT: Flags = Flags(4);
    const FIN_IN: Flags = Flags(8);
    /// TCP: one side has reset it.
    const RESET: Flags = Flags(16);
    /// The guest or the other end has sent more than the packet that opened it after it was answered.
    const ESTABLISHED: Flags = Flags(32);

    pub(crate) const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    #[must_use]
    pub(crate) const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

impl State {
    #[inline]
    pub(crate) fn from_word(word: u64) -> State {
        State {
            seen: word as u32,
            rule: (word >> 32) as u16,
            generation: (word >> 48) as u8,
            flags: Flags((word >> 56) as u8),
        }
    }

    #[inline]
    pub(crate) fn word(self) -> u64 {
        let State { seen, rule, generation, flags: Flags(flags) } = self;
        u64::from(seen) | u64::from(rule) << 32 | u64::from(generation) << 48 | u64::from(flags) << 56
    }

    /// The state after a packet of the flow with these TCP flags, out from the guest or in.
    #[inline]
    #[must_use]
    pub(crate) fn after(self, out: bool, tcp: Option<u8>, now: u32) -> State {
        let mut flags = self.flags;
        if let Some(tcp) = tcp {
            // Whoever has opened it opens it anew, and data after a reset shows that that was none.
            if tcp & (SYN | ACK) == SYN && out == flags.has(Flags::OUT) {
                flags = Flags(flags.0 & Flags::OUT.0);
            } else if tcp & RST == 0 {
                flags = Flags(flags.0 & !Flags::RESET.0);
            }
        }
        if out != flags.has(Flags::OUT) {
            flags = flags.with(Flags::ANSWERED);
        } else if flags.has(Flags::ANSWERED) {
            flags = flags.with(Flags::ESTABLISHED);
        }
        if let Some(tcp) = tcp.filter(|tcp| tcp & (FIN | RST) != 0) {
            if tcp & RST != 0 {
                flags = flags.with(Flags::RESET);
            }
            if tcp & FIN != 0 {
                flags = flags.with(if out { Flags::FIN_OUT } else { Flags::FIN_IN });
            }
        }
        State { seen: now, flags, ..self }
    }

    /// Returns the seconds for which a flow in this state may be silent.
    #[cold]
    fn lasts(&self, key: &Key) -> u32 {
        let flags = self.flags;
        if key.kind_is(Kind::Fragments) || key.kind_is(Kind::Lease) {
            return FRAGMENTS;
        }
        if key.kind_is(Kind::Name) || key.kind_is(Kind::Query) {
            return 0;
        }
        match key.protocol() {
            PROTO_TCP if flags.has(Flags::RESET) => TCP_RESET,
            PROTO_TCP if flags.has(Flags::FIN_OUT) || flags.has(Flags::FIN_IN) => TCP_TRANSITORY,
            PROTO_TCP if flags.has(Flags::ESTABLISHED) => TCP_ESTABLISHED,
            PROTO_TCP => TCP_TRANSITORY,
            PROTO_ICMP | PROTO_ICMPV6 => ECHO,
            PROTO_UDP if !flags.has(Flags::ANSWERED) => UNANSWERED,
            PROTO_UDP => ANSWERED,
            _ => OTHER,
        }
    }

    /// Returns true for a conversation that both ends have gone on with, and not ended.
    fn is_established(&self, key: &Key) -> bool {
        let flags = self.flags;
        let is_open = !(flags.has(Flags::RESET) || flags.has(Flags::FIN_OUT) || flags.has(Flags::FIN_IN));
        let is_echo = matches!(key.protocol(), PROTO_ICMP | PROTO_ICMPV6);
        key.kind_is(Kind::Flow) && flags.has(Flags::ESTABLISHED) && is_open && !is_echo
    }

    #[inline]
    fn is_over(&self, key: &Key, now: u32) -> bool {
        // Another worker's clock may be ahead by a second. Most flows were seen in this one.
        let silent = now.saturating_sub(self.seen);
        silent > 0 && silent > self.lasts(key)
    }
}

/// What a line is worth that has no flow, or one that is over.
const NOTHING: (u8, u32) = (0, 0);

/// One flow.
#[derive(Debug, FromZeros)]
#[repr(C, align(64))]
struct Line {
    /// Bit 0: it is being written. Bits 1 to 31: a version, which each insert raises. Bits 32 to 63: bits of the hash. Zero: there was never a flow.
    head: AtomicU64,
    key: [AtomicU64; KEY],
    state: AtomicU64,
    /// Bytes of its frames. Workers that add at once may lose some: it is for people.
    bytes: AtomicU64,
}

/// A flow that was found.
#[derive(Debug)]
pub(crate) struct Found<'t> {
    line: &'t Line,
    head: u64,
    /// What was known of it.
    pub(crate) state: State,
}

impl Found<'_> {
    /// Stores what is known now, and counts the bytes of a frame. If the line is another flow's by now, that one's lifetime may become a little wrong, and nothing else.
    #[inline]
    pub(crate) fn update(&self, state: State, bytes: u64) {
        let before = self.state.word();
        if state.word() != before {
            // Whoever has changed it meanwhile has seen a packet of the same second.
            let _ =
                self.line.state.compare_exchange(before, state.word(), Ordering::Relaxed, Ordering::Relaxed);
        }
        let counted = self.line.bytes.load(Ordering::Relaxed);
        self.line.bytes.store(counted.wrapping_add(bytes), Ordering::Relaxed);
    }

    /// Ends the flow.
    pub(crate) fn end(self) {
        let taken = self.head | TAKEN;
        if self.line.head.compare_exchange(self.head, taken, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.line.head.store(next(self.head) & VERSION, Ordering::Release);
        }
    }
}

const TAKEN: u64 = 1;
const VERSION: u64 = 0xffff_fffe;

/// The next version of a head, without its tag.
const fn next(head: u64) -> u64 {
    (head & VERSION).wrapping_add(2) & VERSION
}

/// A flow, for whoever looks at all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Its ends, as the guest sees them.
    pub ends: Ends,
    /// Its VLAN, 0 without a tag.
    pub vlan: u16,
    /// The guest has opened it.
    pub is_out: bool,
    /// Both ends have sent.
    pub is_answered: bool,
    /// Seconds since its last packet.
    pub silent: u32,
    /// Seconds after which it is forgotten if there are no further packets.
    pub left: u32,
    /// Number of the rule that allowed it; `None`: one of another policy, as no packet of it has come since.
    pub rule: Option<u16>,
    /// Bytes of its frames, about.
    pub bytes: u64,
}

/// The words of a flow that another process goes on with: key, state, bytes.
pub type Record = [u64; 7];

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct FlowTable {
    lines: Box<[Line]>,
    seed: [u64; 4],
    /// Lines that have ever had a flow.
    used: AtomicUsize,
}

/// Lines in use from which on those of a burst are fetched before any is read: a quarter of a megabyte, as much as a near cache gives up for them.
const LARGE: usize = 4096;

impl FlowTable {
    /// Makes an empty table for so many flows, rounded up to a power of two. Its memory is used as flows come. `seed` is random.
    pub(crate) fn new(flows: u32, seed: [u64; 4]) -> FlowTable {
        let flows = flows.clamp(*FLOWS.start(), *FLOWS.end()).next_power_of_two() as usize;
        let made = <[Line]>::new_box_zeroed_with_elems(flows);
        // It fails where the address space is full; a table of one bucket then does what can be done. (Huge pages were tried: 7 % more frames with 100 000 flows, for a table that is all touched at once.)
        let made = made.or_else(|_| <[Line]>::new_box_zeroed_with_elems(WAYS));
        FlowTable { lines: made.unwrap_or_default(), seed, used: AtomicUsize::new(0) }
    }

    /// Returns true if the table is so large that its lines are in no near cache.
    #[inline]
    pub(crate) fn is_large(&self) -> bool {
        self.used.load(Ordering::Relaxed) > LARGE
    }

    /// Returns the flows that there is room for.
    pub(crate) fn room(&self) -> usize {
        self.lines.len()
    }

    /// Folded multiplications with a key, as in wyhash: good enough to spread what cannot be foreseen, as flows are told apart by their whole keys.
    #[inline]
    fn hash(&self, Key([a, b, c, d, e]): &Key) -> u64 {
        let fold = |one: u64, two: u64| {
            let product = u128::from(one) * u128::from(two);
            product as u64 ^ (product >> 64) as u64
        };
        let [first, second, third, last] = self.seed;
        let halves = fold(a ^ first, c ^ second) ^ fold(b ^ third, d ^ first);
        fold(halves ^ e ^ third, last | 1)
    }

    /// Returns the lines of a flow's bucket in the order in which they are looked at, which begins with the one that its hash chooses: as long as buckets
    /// have room most flows are in that one, and one line is all that is read.
    #[inline]
    fn bucket(&self, hash: u64) -> impl Iterator<Item = &Line> {
        self.lines_of(self.number(hash), hash)
    }

    /// Returns those of the other bucket in which it may be.
    fn other_bucket(&self, hash: u64) -> impl Iterator<Item = &Line> {
        // By an odd number, so that it is another one.
        let distance = (hash >> 34) as usize | 1;
        self.lines_of(self.number(hash) ^ (distance & (self.lines.len() / WAYS - 1)), hash)
    }

    #[inline]
    fn number(&self, hash: u64) -> usize {
        let buckets = self.lines.len() / WAYS;
        // The upper bits of a product are the best.
        ((u128::from(hash) * buckets as u128) >> 64) as usize
    }

    #[inline]
    fn lines_of(&self, bucket: usize, hash: u64) -> impl Iterator<Item = &Line> {
        let lines = self.lines.as_chunks::<WAYS>().0.get(bucket);
        let first = (hash >> 32) as usize;
        (0..WAYS).filter_map(move |way| Some(&lines?[(first + way) % WAYS]))
    }

    /// Returns the tag of a hash, in its place in a head. It is never zero, as free lines have.
    #[inline]
    const fn tag(hash: u64) -> u64 {
        (hash << 32) | 1 << 63
    }

    /// Finds a flow that is not over.
    #[inline]
    pub(crate) fn find(&self, key: &Key, now: u32) -> Option<Found<'_>> {
        let hash = self.hash(key);
        let tag = FlowTable::tag(hash);
        self.bucket(hash)
            .find_map(|line| line.find(tag, key, now))
            .or_else(|| self.find_in_other(hash, tag, key, now))
    }

    #[cold]
    fn find_in_other(&self, hash: u64, tag: u64, key: &Key, now: u32) -> Option<Found<'_>> {
        self.other_bucket(hash).find_map(|line| line.find(tag, key, now))
    }

    /// Has the processor fetch the line in which a flow mostly is.
    #[inline]
    pub(crate) fn fetch(&self, key: &Key) {
        self.bucket(self.hash(key)).take(1).for_each(ringferry_memory::prefetch);
    }

    /// Puts a flow into the table that is not there, or replaces the state of one that is.
    #[cold]
    pub(crate) fn insert(&self, key: &Key, state: State, now: u32, bytes: u64) {
        if let Some(found) = self.find(key, now) {
            return found.update(state, bytes);
        }
        let hash = self.hash(key);
        let lines = || self.bucket(hash).chain(self.other_bucket(hash));
        let worths = || lines().filter_map(|line| line.worth(now, state.flags.has(Flags::OUT)));
        // A line that somebody else takes first is not fought for: after a few it is left.
        for _ in 0..WAYS {
            let free = worths().find(|(worth, ..)| *worth == NOTHING);
            let Some((_, line, head)) = free.or_else(|| worths().min_by_key(|(worth, ..)| *worth)) else {
                return;
            };
            if line.write(head, FlowTable::tag(hash), key, state, bytes) {
                self.used.fetch_add(usize::from(head == 0), Ordering::Relaxed);
                return;
            }
        }
    }

    /// Returns all flows that are not over. Rules are of the policy with the number `generation`.
    pub(crate) fn flows(&self, now: u32, generation: u8) -> impl Iterator<Item = Flow> {
        self.entries(now).filter_map(move |(key, state, bytes)| {
            let (ends, vlan) = key.ends()?;
            let silent = now.saturating_sub(state.seen);
            Some(Flow {
                ends,
                vlan,
                is_out: state.flags.has(Flags::OUT),
                is_answered: state.flags.has(Flags::ANSWERED),
                silent,
                left: state.lasts(&key).saturating_sub(silent),
                rule: (state.generation == generation).then_some(state.rule),
                bytes,
            })
        })
    }

    /// Returns the addresses that names have, each with the number of the name's pattern and the seconds for which it has it.
    pub(crate) fn names(&self, now: u32) -> impl Iterator<Item = (u64, IpAddr, u32)> {
        self.entries(now).filter_map(move |(key, state, _)| {
            let (pattern, address) = key.named()?;
            Some((pattern, address, state.seen.saturating_sub(now)))
        })
    }

    fn entries(&self, now: u32) -> impl Iterator<Item = (Key, State, u64)> {
        self.lines.iter().filter_map(move |line| {
            let head = line.head.load(Ordering::Acquire);
            if head & !VERSION == 0 || head & TAKEN != 0 {
                return None;
            }
            let (key, state) = line.read();
            let bytes = line.bytes.load(Ordering::Relaxed);
            fence(Ordering::Acquire);
            let is_one = line.head.load(Ordering::Relaxed) == head && !state.is_over(&key, now);
            is_one.then_some((key, state, bytes))
        })
    }

    /// Marks the flows that were allowed under a policy with a number above this one as judged by none of those to come, whose numbers begin anew.
    pub(crate) fn forget_policies(&self, above: u8) {
        for line in &self.lines {
            let word = line.state.load(Ordering::Relaxed);
            let state = State::from_word(word);
            if state.generation > above {
                let forgotten = State { generation: NO_POLICY, ..state }.word();
                // Whoever has changed it meanwhile has judged it.
                let _ = line.state.compare_exchange(word, forgotten, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    /// Returns all flows for another process.
    pub(crate) fn records(&self, now: u32) -> impl Iterator<Item = Record> {
        self.entries(now).map(|(key, state, bytes)| {
            let [a, b, c, d, e] = key.words();
            [a, b, c, d, e, state.word(), bytes]
        })
    }

    /// Puts a flow into the table that another process had.
    pub(crate) fn restore(&self, [a, b, c, d, e, state, bytes]: Record, now: u32) {
        let (key, state) = (Key::from_words([a, b, c, d, e]), State::from_word(state));
        if !state.is_over(&key, now) {
            self.insert(&key, state, now, bytes);
        }
    }
}

impl Line {
    /// Returns the flow of this key, if it is in the line and not over.
    #[inline]
    fn find(&self, tag: u64, key: &Key, now: u32) -> Option<Found<'_>> {
        let head = self.head.load(Ordering::Acquire);
        if head & !VERSION != tag {
            return None;
        }
        let (known, state) = self.read();
        fence(Ordering::Acquire);
        let found = self.head.load(Ordering::Relaxed) == head && known.is(key) && !state.is_over(key, now);
        found.then_some(Found { line: self, head, state })
    }

    #[inline]
    fn read(&self) -> (Key, State) {
        let key = self.key.each_ref().map(|word| word.load(Ordering::Relaxed));
        (Key(key), State::from_word(self.state.load(Ordering::Relaxed)))
    }

    /// Returns what the flow in the line is worth, the least first, with the line and its head; `None` while it is being written, and of what a flow that is
    /// opened from outside must not replace.
    fn worth(&self, now: u32, for_out: bool) -> Option<((u8, u32), &Line, u64)> {
        let head = self.head.load(Ordering::Acquire);
        if head & TAKEN != 0 {
            return None;
        }
        let (key, state) = self.read();
        if head & !VERSION == 0 || state.is_over(&key, now) {
            return Some((NOTHING, self, head));
        }
        let class = if !state.flags.has(Flags::ANSWERED) || key.kind_is(Kind::Query) {
            2
        } else if !state.is_established(&key) {
            3
        } else if state.flags.has(Flags::OUT) && !for_out {
            return None;
        } else {
            4
        };
        Some(((class, state.seen), self, head))
    }

    /// Takes the line, if its head is this one still, and writes a flow into it.
    fn write(&self, head: u64, tag: u64, key: &Key, state: State, bytes: u64) -> bool {
        if self.head.compare_exchange(head, head | TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        // Whoever reads one of these words sees, behind its fence, that the line is taken.
        fence(Ordering::Release);
        for (word, value) in self.key.iter().zip(key.0) {
            word.store(value, Ordering::Relaxed);
        }
        self.state.store(state.word(), Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.head.store(tag | next(head), Ordering::Release);
        true
    }
}
