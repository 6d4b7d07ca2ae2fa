//! The Xen network front end against a back end that says anything: responses, ids, offsets, lengths,
//! statuses, extras, indexes, on the rings of a queue pair and on the control ring.
//!
//! Packets are received exactly as the slots say, and every page comes back. Each packet that was sent is
//! reclaimed once at most. A ring that is broken stays so. Nothing stays granted.

use std::collections::BTreeSet;
use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory};
use ringferry_nic::rx::RxConfig;
use ringferry_packet::buffer::Chain;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header};
use ringferry_xen::domain::{DomId, Domain, PAGE};
use ringferry_xen::grant::{Access, GrantRef};
use ringferry_xen::netif::Fault;
use ringferry_xen::netif::wire::{RxResponse, TxResponse};
use ringferry_xen_net::events::Events;
use ringferry_xen_net::netfront::arena::{Arena, Pages};
use ringferry_xen_net::netfront::pair::{Pair, PairConfig, Places};
use ringferry_xen_net::netfront::static_grants::StaticGrants;
use ringferry_xen_net::offload::Accepts;
use ringferry_xen_sim::fake::Fake;

use crate::ring::Reached;
use crate::script::{Bytes, Field, operations};

const BACK: DomId = DomId(0);
const FRONT: DomId = DomId(7);

/// Number of pages to receive into.
const RECEIVE: u32 = 32;
/// Number of slots of a ring of packets, and of a control ring.
const SLOTS: u32 = 256;
const CONTROL_SLOTS: u32 = 128;
/// Length of a packet in bytes, least and most.
const PACKET: std::ops::RangeInclusive<usize> = 14..=65535;
/// Upper bound on the slots of a packet.
const MAX_SLOTS: usize = 18;
/// Offsets in a ring's page: the requests' producer index, that of responses, the first slot.
const REQ_PROD: usize = 0;
const RSP_PROD: usize = 8;
const FIRST_SLOT: usize = 64;
/// Flags of a response.
const CSUM_BLANK: u16 = 2;
const MORE: u16 = 4;
const EXTRA: u16 = 8;

operations! {
    /// One step of a script.
    Step {
        /// The front end sends a frame: plain, with a blank checksum, or to be cut.
        Send { len: u16, kind: u8 },
        /// The front end publishes the frames that it sent.
        FlushSent {},
        /// The back end writes the next response to something sent.
        Answer { id: u16, status: u16 },
        /// The back end answers so many requests correctly.
        AnswerAll { count: u8 },
        /// The back end fills the next posted page (with a frame of some kind, from `offset` on) and writes
        /// the response.
        Fill { offset: u16, status: u16, flags: u16, kind: u8 },
        /// The back end writes an extra info slot in place of a response.
        Extra { kind: u8, more: u8, low: u16, high: u32 },
        /// The back end publishes the responses of a ring (sending, receiving, control), and `more` entries
        /// beyond that.
        Show { ring: u8, more: u32 },
        /// The back end writes eight bytes anywhere in the rings.
        Write { at: u16, value: u64 },
        /// The back end answers on the control ring, with the right id plus `id`.
        Reply { id: u8, status: u8, data: u32 },
        /// The front end takes back the buffers of sent packets.
        Reclaim {},
        /// The front end receives packets, and keeps them if bit 7 is set.
        Receive { max: u8 },
        /// The front end frees the packets that it kept.
        Release {},
        /// The front end posts pages.
        Refill {},
        /// The front end asks for events.
        Arm {},
        /// The front end hands over its grants on the control ring.
        Announce {},
        /// The front end polls the control ring.
        Look {},
    }
}

/// A packet as a second reader finds it in the ring.
struct Expected {
    bytes: Vec<u8>,
    /// True if the packet may also be refused: it has headers that are parsed.
    open: bool,
    /// True if the slots cannot be a packet.
    bad: bool,
}

/// The front end, and the expected state of its rings.
struct Subject {
    pair: Pair,
    statics: StaticGrants,
    memory: Arc<GuestMemory>,
    /// Ring pages: sending, receiving, control.
    rings: [Area; 3],
    /// Pages to receive into: their grants, and the address of the first.
    grants: Vec<GrantRef>,
    receive: u64,
    /// Number of grants that may be handed over.
    handed: usize,
    /// The page in each slot of the receive ring, and the number of pages ever posted.
    posted: Vec<u64>,
    requests: u32,
    /// Index up to which the back end has written responses, and up to which the front end has taken those of
    /// the receive ring.
    next: [u32; 3],
    taken: u32,
    /// Index up to which the front end has seen responses of the receive ring. It looks again when it has taken those: in
    /// between the back end may have gone back, unseen.
    seen: u32,
    kept: Vec<Chain>,
    sent: usize,
    reclaimed: usize,
    faults: [Option<Fault>; 2],
    reached: Reached,
}

/// Runs a script on a front end, and panics if a check fails.
pub fn netfront(input: &[u8]) -> Reached {
    let fake = Fake::new();
    let arena = arena(&fake);
    let mut subject = Subject::new(&fake, &arena);
    let mut input = Bytes(input);
    while let Some(step) = Step::get(&mut input) {
        subject.step(step);
        subject.check();
    }
    let reached = subject.finish();
    assert_eq!(arena.end(), 0);
    fake.assert_nothing_left();
    reached
}

fn config() -> PairConfig {
    let rx = RxConfig { copy_break: 64, ..RxConfig::default() };
    PairConfig { receive: RECEIVE, small: 16, frames: 8, large: 2, rx, ..PairConfig::default() }
}

/// Makes the arena for rings and buffers, and two pages for the control ring and its list.
fn arena(fake: &Fake) -> Arena {
    fake.domain(BACK);
    let mut table = fake.domain(FRONT).grants().expect("a table");
    let config = config();
    let control = Pages { count: 2, access: Access::Write };
    let pages = [PairConfig::RINGS, config.transmit_pages(), config.receive_pages(), control];
    Arena::new(&mut *table, BACK, &pages).expect("pages")
}

impl Subject {
    fn new(fake: &Fake, arena: &Arena) -> Self {
        let front = fake.domain(FRONT);
        let channel = || front.alloc_unbound(BACK).expect("a port").1;
        let [rings, transmit, receive, control] = [0, 1, 2, 3].map(|at| arena.start(at));
        let places = Places { rings, transmit, receive };
        let pair = Pair::new(arena, places, Accepts::ALL, Events::Shared(channel()), &config());
        let page = |addr| arena.page(addr).expect("a page");
        let next = |addr| page(addr + PAGE as u64);
        let grants: Vec<_> = arena.map().grants(receive, RECEIVE as usize).collect();
        let more: Vec<_> = arena.map().grants(transmit, 700).collect();
        let handed = grants.len() + more.len();
        let lists = vec![more, grants.clone()];
        let statics = StaticGrants::new(page(control).0, channel(), next(control), lists);
        Self {
            pair: pair.expect("a pair"),
            statics: statics.expect("a control ring"),
            memory: Arc::clone(arena.memory()),
            rings: [page(rings).0, next(rings).0, page(control).0],
            grants: grants.into_iter().map(|(gref, _)| gref).collect(),
            receive,
            handed,
            posted: vec![0; SLOTS as usize],
            requests: 0,
            next: [0; 3],
            taken: 0,
            seen: 0,
            kept: Vec::new(),
            sent: 0,
            reclaimed: 0,
            faults: [None; 2],
            reached: Reached::default(),
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Send { len, kind } => self.send(len.into(), kind),
            Step::FlushSent {} => drop(self.pair.transmit.flush()),
            Step::Answer { id, status } => {
                self.respond(0, &TxResponse { id, status: status as i16 }.to_slot());
            }
            Step::AnswerAll { count } => self.answer_all(count),
            Step::Fill { offset, status, flags, kind } => {
                let at = self.next[1];
                let page = self.posted[(at % SLOTS) as usize];
                if page > 0 {
                    let len = PAGE.saturating_sub(offset.into());
                    let room = self.memory.area(page, PAGE).expect("a page");
                    let bytes = frame(len, kind, at as u8);
                    room.write(PAGE - len, len).expect("in a page").copy_from(&bytes);
                }
                self.respond(
                    1,
                    &[(u32::from(offset) << 16) | (at % SLOTS), (u32::from(status) << 16) | u32::from(flags)],
                );
            }
            Step::Extra { kind, more, low, high } => {
                let first = u32::from_le_bytes([kind, more & 1, low as u8, (low >> 8) as u8]);
                self.respond(1, &[first, high]);
            }
            Step::Show { ring, more } => {
                let ring = usize::from(ring % 3);
                self.write(ring, RSP_PROD, &self.next[ring].wrapping_add(more).to_le_bytes());
            }
            Step::Write { at, value } => {
                let at = usize::from(at) % (3 * PAGE) / 8 * 8;
                self.write(at / PAGE, at % PAGE, &value.to_le_bytes());
            }
            Step::Reply { id, status, data } => {
                let id = self.next[2].wrapping_add(id.into()) & 0xffff;
                self.respond(2, &[id, status.into(), data, 0]);
            }
            Step::Reclaim {} => self.reclaimed += self.pair.reclaim(),
            Step::Receive { max } => self.receive(usize::from(max & 0x7f), max >> 7 != 0),
            Step::Release {} => self.release(),
            Step::Refill {} => self.refill(),
            Step::Arm {} => {
                self.look();
                let _ = self.pair.arm();
            }
            Step::Announce {} => self.statics.announce().expect("a channel"),
            Step::Look {} => self.statics.poll().expect("a channel"),
        }
    }

    /// Checks the invariants that hold at any time.
    fn check(&mut self) {
        assert!(self.reclaimed <= self.sent, "more was reclaimed than was sent");
        assert_eq!(self.pair.transmit.in_flight(), self.sent - self.reclaimed);
        assert!(self.pair.receive.posted() <= RECEIVE as usize);
        let faults = [self.pair.transmit.driver().fault(), self.pair.receive.driver().fault()];
        for (before, now) in self.faults.iter().zip(&faults) {
            assert!(before.is_none() || before == now, "a fault stays");
        }
        self.faults = faults;
        assert!(self.statics.kept() <= self.handed, "more grants are kept than there are");
    }

    fn send(&mut self, len: usize, kind: u8) {
        let mut header = Header::default();
        if !kind.is_multiple_of(3) {
            header = Header { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..header };
        }
        if kind % 3 == 2 {
            header = Header { gso_type: GSO_TCPV4, gso_size: 1448, hdr_len: 54, ..header };
        }
        let broken = self.faults[0].is_some();
        let sent = self.pair.send_frame(&header, &frame(len, 1, kind));
        assert!(!(sent && broken), "a broken ring takes packets");
        self.sent += usize::from(sent);
    }

    /// Answers requests by their ids, extras as extras.
    fn answer_all(&mut self, count: u8) {
        for _ in 0..count {
            let shown = self.word(0, REQ_PROD).wrapping_sub(self.next[0]);
            if shown == 0 || shown > SLOTS {
                break;
            }
            let slot = |at: u32| FIRST_SLOT + 12 * (at % SLOTS) as usize;
            let extra = self.word(0, slot(self.next[0].wrapping_sub(1)) + 8) == u32::MAX;
            let at = slot(self.next[0]);
            let (flags, id) = (self.word(0, at + 4) >> 16, self.word(0, at + 8) as u16);
            // A word that a response does not use tells whether the next slot is an extra.
            let mark = if !extra && flags & u32::from(EXTRA) != 0 { u32::MAX } else { 0 };
            let status = if extra { 1 } else { 0 };
            let [first, second, _] = TxResponse { id, status }.to_slot();
            self.respond(0, &[first, second, mark]);
        }
    }

    /// Receives packets, and compares them with the ring.
    fn receive(&mut self, max: usize, keep: bool) {
        let mut expected = Vec::new();
        while expected.len() < max && self.look() {
            let mut at = self.taken;
            let Some(packet) = self.packet(&mut at, self.seen) else { break };
            self.taken = at;
            expected.push(packet);
        }
        let Self { pair: Pair { pools, receive, .. }, kept, .. } = self;
        let mut frames = Vec::new();
        let count = receive.lend(max, pools, |chain, _| {
            frames.push((chain.header, chain.to_vec()));
            if keep {
                kept.push(chain);
                return None;
            }
            Some(chain)
        });
        self.reached.frames += frames.len();
        self.reached.chains += count;
        for (header, frame) in &frames {
            assert!(PACKET.contains(&frame.len()) && header.check(frame.len()).is_ok(), "{header:?}");
        }
        if self.pair.receive.driver().fault().is_some() {
            assert!(frames.len() <= SLOTS as usize);
            return;
        }
        assert_eq!(count, expected.len(), "packets");
        // Numbers of frames that may have been taken up to some packet: one that may be refused, and has the bytes of a later
        // one, is there or not.
        let mut taken = BTreeSet::from([0]);
        for Expected { bytes, open, bad } in expected {
            let is_there = |at: &usize| frames.get(*at).is_some_and(|(_, frame)| *frame == bytes);
            let with = taken.iter().filter(|at| !bad && is_there(at)).map(|at| at + 1);
            let without = taken.iter().filter(|_| open || bad).copied();
            taken = with.chain(without).collect();
            assert!(!taken.is_empty(), "a frame's bytes");
        }
        assert!(taken.contains(&frames.len()), "a frame that nobody wrote");
    }

    /// Looks for responses as the front end does; returns true if there are any.
    fn look(&mut self) -> bool {
        if self.seen == self.taken {
            self.seen = self.word(1, RSP_PROD);
        }
        self.seen != self.taken
    }

    /// Returns the packet at `at`, read once more and naively; `None` if it breaks a rule.
    fn packet(&self, at: &mut u32, end: u32) -> Option<Expected> {
        let mut next = || {
            let slot = FIRST_SLOT + 8 * (*at % SLOTS) as usize;
            let page = self.posted[(*at % SLOTS) as usize];
            (*at != end).then(|| *at = at.wrapping_add(1))?;
            Some(([self.word(1, slot), self.word(1, slot + 4)], page))
        };
        let mut packet = Expected { bytes: Vec::new(), open: false, bad: false };
        for number in 0..=MAX_SLOTS {
            if number == MAX_SLOTS {
                return None;
            }
            let (slot, page) = next()?;
            let response = RxResponse::from_slot(slot);
            let flags = response.flags.bits();
            match usize::try_from(response.status).map(|len| (usize::from(response.offset), len)) {
                Ok((offset, len)) if offset + len <= PAGE => {
                    let mut bytes = vec![0; len];
                    // No page was posted there: the index runs away.
                    let page = self.memory.area(page, PAGE)?;
                    page.read(offset, len).expect("in a page").copy_to(&mut bytes);
                    packet.bytes.extend(bytes);
                }
                _ => packet.bad = true,
            }
            packet.open |= number == 0 && flags & CSUM_BLANK != 0;
            if flags & EXTRA != 0 {
                let mut kinds = 0u32;
                while kinds == 0 || kinds & 1 != 0 {
                    let [kind, more, ..] = next()?.0[0].to_le_bytes();
                    if number > 0 || kind != 1 && kind != 4 || kinds >> kind & 1 != 0 {
                        return None;
                    }
                    packet.open |= kind == 1;
                    kinds = (kinds | 1 << kind) & !1 | u32::from(more & 1);
                }
            }
            if flags & MORE == 0 {
                break;
            }
        }
        packet.bad |= !PACKET.contains(&packet.bytes.len());
        Some(packet)
    }

    /// Posts pages, and records which.
    fn refill(&mut self) {
        let before = self.pair.receive.posted();
        self.pair.refill();
        for _ in before..self.pair.receive.posted() {
            let slot = (self.requests % SLOTS) as usize;
            let gref = GrantRef(self.word(1, FIRST_SLOT + 8 * slot + 4));
            let page = self.grants.iter().position(|known| *known == gref).expect("a page to receive into");
            self.posted[slot] = self.receive + (page * PAGE) as u64;
            self.requests = self.requests.wrapping_add(1);
        }
        self.reached.longest = self.reached.longest.max(self.pair.receive.posted());
    }

    fn release(&mut self) {
        let Self { pair: Pair { pools, receive, .. }, kept, .. } = self;
        kept.drain(..).for_each(|chain| receive.recycle_chain(chain, pools));
    }

    /// Ends the front end, and checks that nothing stays granted.
    fn finish(mut self) -> Reached {
        self.release();
        self.refill();
        let broken = self.faults.iter().any(Option::is_some) || self.statics.fault().is_some();
        if self.faults[1].is_none() {
            assert_eq!(self.pair.receive.posted(), RECEIVE as usize, "every page is posted again");
        }
        Reached { broken, ..self.reached }
    }

    /// Writes the next response of a ring, without publishing it.
    fn respond(&mut self, ring: usize, words: &[u32]) {
        let slots = if ring == 2 { CONTROL_SLOTS } else { SLOTS };
        let at = FIRST_SLOT + 4 * words.len() * (self.next[ring] % slots) as usize;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write(ring, at, &bytes);
        self.next[ring] = self.next[ring].wrapping_add(1);
    }

    fn write(&self, ring: usize, at: usize, bytes: &[u8]) {
        self.rings[ring].write(at, bytes.len()).expect("in a page").copy_from(bytes);
    }

    fn word(&self, ring: usize, at: usize) -> u32 {
        let mut bytes = [0; 4];
        self.rings[ring].read(at, 4).expect("in a page").copy_to(&mut bytes);
        u32::from_le_bytes(bytes)
    }
}

/// Makes a frame: TCP over IPv4 if the kind is odd, else no protocol.
fn frame(len: usize, kind: u8, seed: u8) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len.max(54)).map(|at| (at % 251) as u8 ^ seed).collect();
    bytes[12..14].copy_from_slice(&[0x88, 0xb5]);
    if kind & 1 != 0 {
        bytes[12..34]
            .copy_from_slice(&[8, 0, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        bytes[46] = 0x50;
    }
    bytes.truncate(len);
    bytes
}
