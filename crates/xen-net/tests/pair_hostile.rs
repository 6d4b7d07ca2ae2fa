//! A front end against back ends that write anything: its queue breaks or its packet is lost, and
//! every page and buffer comes back.

mod pair_support;

use std::sync::Arc;

use pair_support::wire::{raw, tcp};
use pair_support::*;
use proptest::prelude::*;
use ringferry_memory::{Region, Words};
use ringferry_nic::tx::SendError;
use ringferry_packet::vnet::Header;
use ringferry_xen::domain::PAGE;
use ringferry_xen::grant::{Foreign, GrantRef};
use ringferry_xen::netif::control::{ControlBack, Message, Request, Response, Status};
use ringferry_xen::netif::wire::{
    DROPPED, ERROR, Extra, GSO_TCPV4, MAX_SLOTS, NULL, OKAY, RxFlags, RxRequest, RxResponse, RxSlot, TxFlags,
    TxRequest, TxResponse, TxSlot,
};
use ringferry_xen::netif::{BackRing, Fault};
use ringferry_xen::store::path;
use ringferry_xen_net::netfront::Pair;
use ringferry_xen_net::xenbus::{BackConfig, Connection, FrontConfig, Session, State};

/// Offset of the producer index of responses in a ring page.
const RSP_PROD: usize = 8;

type Area = ringferry_memory::Area;

/// A front end whose rings a test answers by itself.
struct Victim {
    machine: Machine,
    both: Both,
    session: Session,
    connection: Box<Connection>,
    tx: BackRing<Area, TxSlot>,
    rx: BackRing<Area, RxSlot>,
    foreign: Box<dyn Foreign>,
}

fn area(region: &Arc<Region>) -> Area {
    region.area(0, PAGE).unwrap()
}

impl Victim {
    fn new() -> Self {
        let mut machine = Machine::new();
        machine.plug(ID);
        let front = machine.front(ID, FrontConfig { static_grants: false, ..front_config() });
        let mut both = Both::new(Some(front), Some(machine.plugs(BackConfig::default())));
        both.connect();
        let connection = both.connection.take().unwrap();
        let mut session = both.session.take().unwrap();
        session.pairs[0].refill();
        let queue = &connection.queues[0];
        let (tx, rx) = (area(&queue.tx_ring), area(&queue.rx_ring));
        let foreign = machine.domain(BACK).foreign(FRONT).unwrap();
        let (tx, rx) = (BackRing::attach(tx).unwrap(), BackRing::attach(rx).unwrap());
        Self { machine, both, session, connection, tx, rx, foreign }
    }

    fn pair(&mut self) -> &mut Pair {
        &mut self.session.pairs[0]
    }

    fn send(&mut self, header: &Header, frame: &[u8]) -> Vec<TxRequest> {
        assert!(self.pair().send_frame(header, frame));
        self.pair().transmit.flush();
        self.tx.refresh();
        std::iter::from_fn(|| self.tx.take().map(TxRequest::from_slot)).collect()
    }

    fn answer(&mut self, id: u16, status: i16) {
        self.tx.respond(TxResponse { id, status }.to_slot());
        let _ = self.tx.publish();
    }

    /// Fills posted pages as the responses say, each with its own number, and shows them.
    fn fill(&mut self, slots: &[Slot]) {
        self.rx.refresh();
        for (number, slot) in slots.iter().enumerate() {
            let RxRequest { id, gref } = RxRequest::from_slot(self.rx.take().unwrap());
            match *slot {
                Slot::Data { offset, status, flags } => {
                    let page = self.page(gref);
                    page.write(0, PAGE).unwrap().copy_from(&[number as u8 + 1; PAGE]);
                    self.rx.respond(RxResponse { id, offset, flags, status }.to_slot());
                }
                Slot::Extra(words) => self.rx.respond(words),
            }
        }
        let _ = self.rx.publish();
    }

    fn page(&mut self, gref: GrantRef) -> Area {
        area(&self.foreign.map_region(&[gref]).unwrap())
    }

    fn received(&mut self) -> Vec<(Header, Vec<u8>)> {
        let mut frames = Vec::new();
        let Pair { pools, receive, .. } = self.pair();
        receive.lend(64, pools, |chain, _| {
            frames.push((chain.header, chain.to_vec()));
            Some(chain)
        });
        frames
    }

    /// Ends it all; nothing may be left.
    #[track_caller]
    fn end(self) {
        let Self { machine, both, session, connection, tx, rx, foreign } = self;
        drop((connection, tx, rx, foreign));
        both.end(session, machine);
    }
}

#[derive(Clone, Copy)]
enum Slot {
    Data { offset: u16, status: i16, flags: RxFlags },
    Extra(RxSlot),
}

fn data(status: i16, flags: RxFlags) -> Slot {
    Slot::Data { offset: 0, status, flags }
}

#[test]
fn netfront_hardening_answers_to_nothing_break_the_transmit_ring() {
    for case in 0..4 {
        let mut victim = Victim::new();
        let (header, frame) = raw(9000, 1);
        let slots = victim.send(&header, &frame);
        assert_eq!(slots.len(), 3);
        match case {
            // No slot has this id.
            0 => victim.answer(700, OKAY),
            // One that is not in flight.
            1 => victim.answer(slots.iter().map(|slot| slot.id).max().unwrap() + 1, OKAY),
            // The same twice.
            2 => {
                victim.answer(slots[0].id, OKAY);
                victim.answer(slots[0].id, OKAY);
            }
            // An extra that was not sent.
            _ => victim.answer(slots[0].id, NULL),
        }
        assert_eq!(victim.pair().reclaim(), 0);
        assert_eq!(victim.pair().fault(), Some(Fault::BadResponse), "case {case}");
        // The packet is still the queue's, and no other is taken.
        assert_eq!(victim.pair().transmit.in_flight(), 1);
        let pair = victim.pair();
        let chain = pair.pools.chain_of(&[1; 60]).unwrap();
        let unsent = pair.transmit.send(chain, &mut pair.pools).unwrap_err();
        assert_eq!(unsent.reason, SendError::Broken);
        pair.transmit.give_up(unsent, &mut pair.pools);
        victim.end();
    }
}

#[test]
fn netfront_hardening_a_producer_index_that_runs_away_breaks_the_ring() {
    for (ahead, posted) in [(2, 257), (257, 300), (u32::MAX, u32::MAX), (1 << 31, 1 << 31)] {
        let mut victim = Victim::new();
        victim.send(&Header::default(), &[7; 100]);
        let rings = [&victim.connection.queues[0].tx_ring, &victim.connection.queues[0].rx_ring].map(area);
        rings[0].store32(RSP_PROD, ahead);
        assert_eq!(victim.pair().reclaim(), 0);
        assert_eq!(victim.pair().transmit.driver().fault(), Some(Fault::Index));
        rings[1].store32(RSP_PROD, posted);
        assert!(victim.received().is_empty());
        assert_eq!(victim.pair().receive.driver().fault(), Some(Fault::Index));
        drop(rings);
        victim.end();
    }
}

#[test]
fn slots_that_the_back_end_could_not_read_are_counted_and_come_back() {
    let mut victim = Victim::new();
    for (status, errors, dropped) in [(ERROR, 3, 0), (DROPPED, 3, 3), (i16::MIN, 6, 3), (7, 9, 3)] {
        let slots = victim.send(&Header::default(), &[1; 9000]);
        // In any order.
        for slot in slots.iter().rev() {
            victim.answer(slot.id, status);
        }
        assert_eq!(victim.pair().reclaim(), 1);
        let counters = victim.pair().transmit.driver().counters();
        assert_eq!((counters.errors, counters.dropped), (errors, dropped));
    }
    assert_eq!(victim.pair().transmit.in_flight(), 0);
    victim.end();
}

#[test]
fn extras_on_transmit_take_a_slot_and_no_id() {
    let mut victim = Victim::new();
    let (header, frame) = tcp(false, 5000, 1448, 1);
    assert!(victim.pair().send_frame(&header, &frame));
    victim.pair().transmit.flush();
    victim.tx.refresh();
    let slots: Vec<TxSlot> = std::iter::from_fn(|| victim.tx.take()).collect();
    let first = TxRequest::from_slot(slots[0]);
    assert_eq!((slots.len(), first.size), (3, 5000));
    assert_eq!(
        first.flags,
        TxFlags::CSUM_BLANK | TxFlags::DATA_VALIDATED | TxFlags::EXTRA_INFO | TxFlags::MORE_DATA
    );
    let [low, high, zero] = slots[1];
    assert_eq!(Extra::decode([low, high]), Some((Extra::Gso { size: 1448, kind: GSO_TCPV4 }, false)));
    assert_eq!(zero, 0);
    let last = TxRequest::from_slot(slots[2]);
    assert_eq!((last.flags, last.size), (TxFlags::empty(), 904));
    for (id, status) in [(first.id, OKAY), (0xffff, NULL), (last.id, OKAY)] {
        victim.answer(id, status);
    }
    assert_eq!((victim.pair().reclaim(), victim.pair().fault()), (1, None));
    victim.end();
}

#[test]
fn xsa_155_lengths_outside_their_page_cost_the_packet() {
    let more = RxFlags::MORE_DATA;
    let outside = |offset, status| Slot::Data { offset, status, flags: RxFlags::empty() };
    for slots in [
        vec![outside(1, 4096)],
        vec![outside(u16::MAX, 1)],
        vec![outside(4096, 60)],
        vec![outside(0, i16::MAX)],
        vec![outside(0, ERROR)],
        vec![data(i16::MIN, more), data(100, RxFlags::empty())],
        vec![data(100, more), outside(4000, 97)],
        vec![data(0, RxFlags::empty())],
        vec![data(13, RxFlags::empty())],
        vec![data(0, more), data(0, RxFlags::empty())],
    ] {
        let mut victim = Victim::new();
        victim.fill(&slots);
        victim.fill(&[data(60, RxFlags::empty())]);
        // The next one is as good as ever.
        assert_eq!(victim.received(), [(Header::default(), vec![1; 60])]);
        assert_eq!(victim.pair().receive.stats().rx_length_errors, 1);
        victim.pair().refill();
        assert_eq!(victim.pair().receive.posted(), 256);
        victim.end();
    }
}

#[test]
fn chains_that_do_not_end_or_make_no_sense_break_the_receive_ring() {
    let more = RxFlags::MORE_DATA;
    let extra = RxFlags::EXTRA_INFO;
    let gso = |more| Slot::Extra(Extra::Gso { size: 1448, kind: GSO_TCPV4 }.encode(more));
    for (slots, fault) in [
        (vec![data(100, more); MAX_SLOTS + 1], Fault::TooManySlots),
        (vec![data(100, more); 250], Fault::TooManySlots),
        (vec![data(100, more)], Fault::Incomplete),
        (vec![data(100, extra)], Fault::Incomplete),
        (vec![data(100, extra), gso(true)], Fault::Incomplete),
        (vec![data(100, extra), gso(true), gso(false)], Fault::BadExtra),
        (vec![data(100, extra), Slot::Extra([5, 0])], Fault::BadExtra),
        (vec![data(100, extra), Slot::Extra([0, 0])], Fault::BadExtra),
        (vec![data(100, extra), Slot::Extra(Extra::MulticastAdd([1; 6]).encode(false))], Fault::BadExtra),
        (vec![data(100, more), data(100, extra), gso(false)], Fault::BadExtra),
    ] {
        let mut victim = Victim::new();
        victim.fill(&slots);
        assert!(victim.received().is_empty());
        assert_eq!(victim.pair().fault(), Some(fault));
        // Nothing more comes of it.
        assert_eq!((victim.received(), victim.pair().refill()), (vec![], false));
        victim.end();
    }
}

#[test]
fn exactly_as_many_slots_as_there_may_be_are_not_too_many() {
    let mut victim = Victim::new();
    let mut slots = vec![data(3000, RxFlags::MORE_DATA); MAX_SLOTS - 1];
    slots.push(data(5, RxFlags::empty()));
    victim.fill(&slots);
    let frames = victim.received();
    assert_eq!((frames.len(), frames[0].1.len()), (1, 3000 * (MAX_SLOTS - 1) + 5));
    assert!(
        frames[0].1.chunks(3000).enumerate().all(|(n, page)| page.iter().all(|byte| *byte == n as u8 + 1))
    );
    victim.end();
}

#[test]
fn data_that_does_not_begin_its_page_is_moved_there() {
    let mut victim = Victim::new();
    let at = |offset, status, flags| Slot::Data { offset, status, flags };
    victim.fill(&[
        at(2, 60, RxFlags::empty()),
        at(256, 3840, RxFlags::MORE_DATA),
        at(1, 4095, RxFlags::empty()),
    ]);
    let frames = victim.received();
    assert_eq!(frames[0].1, vec![1; 60]);
    assert_eq!(frames[1].1, [vec![2; 3840], vec![3; 4095]].concat());
    assert_eq!(victim.pair().receive.driver().counters().moved, 3);
    victim.end();
}

#[test]
fn offloads_that_the_packet_does_not_carry_cost_it() {
    let extra = RxFlags::EXTRA_INFO;
    for flags in [RxFlags::CSUM_BLANK, extra, extra | RxFlags::CSUM_BLANK] {
        let mut victim = Victim::new();
        let mut slots = vec![data(2000, flags)];
        if flags.contains(extra) {
            slots.push(Slot::Extra(Extra::Gso { size: 0, kind: GSO_TCPV4 }.encode(false)));
        }
        victim.fill(&slots);
        // Bytes that are no IP.
        assert!(victim.received().is_empty());
        assert_eq!(victim.pair().receive.driver().counters().unfit, 1);
        victim.pair().refill();
        assert_eq!((victim.pair().receive.posted(), victim.pair().fault()), (256, None));
        victim.end();
    }
}

#[test]
fn a_hash_comes_with_its_packet() {
    let mut victim = Victim::new();
    let hash = Extra::Hash { kind: 1, algorithm: 1, value: 0xfeed };
    victim.fill(&[data(300, RxFlags::EXTRA_INFO), Slot::Extra(hash.encode(false))]);
    let mut seen = None;
    let Pair { pools, receive, .. } = victim.pair();
    receive.receive(8, pools, |chain, _| seen = Some((chain.hash, chain.to_vec())));
    assert_eq!(seen, Some((Some(0xfeed), vec![1; 300])));
    assert_eq!(victim.pair().receive.stats().rx_length_errors, 0);
    victim.pair().refill();
    assert_eq!(victim.pair().receive.posted(), 256);
    victim.end();
}

/// A front end with a control ring that a test answers.
fn with_control(queues: u16) -> (Machine, Both, Session, Box<Connection>, ControlBack<Area>) {
    let mut machine = Machine::new();
    machine.plug(ID);
    let front = machine.front(ID, FrontConfig { queues, ..front_config() });
    let mut both = Both::new(Some(front), Some(machine.plugs(BackConfig::default())));
    both.connect();
    let (connection, session) = (both.connection.take().unwrap(), both.session.take().unwrap());
    let ring = ControlBack::attach(area(&connection.control.as_ref().unwrap().ring)).unwrap();
    (machine, both, session, connection, ring)
}

/// Answers a request on the control ring.
fn answer(ring: &mut ControlBack<Area>, connection: &Connection, response: Response) {
    ring.respond(response.to_slot());
    if ring.publish() {
        connection.control.as_ref().unwrap().channel.notify().unwrap();
    }
}

#[test]
fn static_grants_are_handed_over_as_far_as_the_back_end_takes_them() {
    // Each case has the back end's responses to the size and to the lists, and the number of grants
    // that it is then given, per queue.
    let pages = 300 + 4 + 16 + 68;
    for (size, list, given) in [
        ((Status::Success, 0), Status::Success, 0),
        ((Status::Success, 100), Status::Success, 100),
        ((Status::Success, u32::MAX), Status::Success, pages),
        ((Status::Success, 1000), Status::BufferOverflow, 0),
        ((Status::InvalidParameter, 1000), Status::Success, 0),
        ((Status::NotSupported, 1000), Status::Success, 0),
    ] {
        let (machine, mut both, session, connection, mut ring) = with_control(2);
        let mut lists = Vec::new();
        let mut sizes = 0;
        for _ in 0..50 {
            both.step();
            ring.refresh();
            while let Some(slot) = ring.take() {
                let request = Request::from_slot(slot);
                let (status, data) = match request.message().unwrap() {
                    Message::GetGrefMappingSize { queue } => {
                        assert_eq!(queue, sizes);
                        sizes += 1;
                        size
                    }
                    Message::AddGrefMapping(entries) => {
                        lists.push(entries.count as usize);
                        (list, 0)
                    }
                    other => panic!("{other:?}"),
                };
                answer(&mut ring, &connection, Response::to(&request, status, data));
            }
        }
        assert_eq!(both.front.as_ref().unwrap().static_grants(), 2 * given);
        assert_eq!(sizes, if size.0 == Status::NotSupported { 1 } else { 2 });
        assert!(lists.iter().all(|count| (1..=512).contains(count)));
        drop((ring, connection));
        both.end(session, machine);
    }
}

/// After another back end has taken the first one's place, its answers count.
#[test]
fn static_grants_that_the_next_back_end_has_no_room_for_are_not_kept() {
    let (mut machine, mut both, session, connection, mut ring) = with_control(1);
    let pages = 300 + 4 + 16 + 68;
    let state = path::join(&nodes(ID).0, "state");
    for (list, kept) in
        [(Status::Success, pages), (Status::InvalidParameter, pages), (Status::BufferOverflow, 0)]
    {
        let mut lists = 0;
        both.until("the list", |_| {
            ring.refresh();
            while let Some(slot) = ring.take() {
                let request = Request::from_slot(slot);
                let asked = matches!(request.message().unwrap(), Message::GetGrefMappingSize { .. });
                lists += usize::from(!asked);
                let (status, data) = if asked { (Status::Success, 1000) } else { (list, 0) };
                answer(&mut ring, &connection, Response::to(&request, status, data));
            }
            lists == 1
        });
        both.step();
        assert_eq!(both.front.as_ref().unwrap().static_grants(), kept, "{list:?}");
        machine.write(&state, State::Connected.number().to_string());
    }
    drop((ring, connection));
    both.end(session, machine);
}

#[test]
fn answers_that_nobody_asked_for_break_the_control_ring_and_not_the_packets() {
    for lie in 0..2 {
        let (machine, mut both, mut session, connection, mut ring) = with_control(1);
        both.step();
        ring.refresh();
        let request = Request::from_slot(ring.take().unwrap());
        if lie == 0 {
            let other = Request { id: request.id.wrapping_add(1), ..request };
            ring.respond(Response::to(&other, Status::Success, 10).to_slot());
            let _ = ring.publish();
        } else {
            area(&connection.control.as_ref().unwrap().ring).store32(RSP_PROD, 77);
        }
        both.step();
        ring.refresh();
        assert_eq!((ring.available(), both.front.as_ref().unwrap().static_grants()), (0, 0));
        assert!(session.pairs[0].send_frame(&Header::default(), &[1; 60]));
        drop((ring, connection));
        both.end(session, machine);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, max_shrink_iters: 32, ..ProptestConfig::default() })]

    /// For every content of the ring pages: no panic, no endless loop, no buffer lost or given out
    /// twice.
    #[test]
    fn any_bytes_in_the_rings_are_survived(
        rounds in prop::collection::vec(
            (prop::collection::vec(any::<[u32; 3]>(), 0..40), prop::collection::vec((any::<[u32; 2]>(), 0..4u8), 0..60), 0..70u32),
            1..8,
        )
    ) {
        let mut victim = Victim::new();
        let rings = [&victim.connection.queues[0].tx_ring, &victim.connection.queues[0].rx_ring].map(area);
        let (mut tx_prod, mut rx_prod) = (0u32, 0u32);
        for (tx, rx, ahead) in rounds {
            for _ in 0..10 {
                victim.pair().send_frame(&Header::default(), &[1; 5000]);
            }
            victim.pair().transmit.flush();
            for (i, words) in tx.iter().enumerate() {
                let at = 64 + 12 * (tx_prod.wrapping_add(i as u32) as usize % 256);
                // Ids that may well be in flight.
                let words = [words[0] & 0x0001_003f, words[1], words[2]];
                words.iter().enumerate().for_each(|(word, value)| rings[0].store32(at + 4 * word, *value));
            }
            for (i, (words, kind)) in rx.iter().enumerate() {
                let at = 64 + 8 * (rx_prod.wrapping_add(i as u32) as usize % 256);
                // Sane lengths and few flags, more often than not.
                let high = if *kind > 0 { words[1] & 0x07ff_0000 | u32::from(kind & 1) << 2 } else { words[1] };
                rings[1].store32(at, if *kind > 1 { words[0] & 0xffff } else { words[0] });
                rings[1].store32(at + 4, high);
            }
            tx_prod = tx_prod.wrapping_add(ahead.min(tx.len() as u32));
            rx_prod = rx_prod.wrapping_add(ahead.min(rx.len() as u32));
            rings[0].store32(RSP_PROD, tx_prod);
            rings[1].store32(RSP_PROD, rx_prod);
            victim.pair().reclaim();
            let lens: usize = victim.received().iter().map(|(_, frame)| frame.len()).sum();
            prop_assert!(lens <= 60 * PAGE);
            victim.pair().refill();
            let stats = victim.pair().receive.stats();
            prop_assert_eq!((stats.unknown, victim.pair().transmit.stats().unknown), (0, 0));
        }
        let Victim { machine, both, mut session, connection, tx, rx, foreign } = victim;
        let Pair { pools, transmit, receive, .. } = session.pairs.pop().unwrap();
        let mut pools = pools;
        drop(transmit.detach(&mut pools));
        let counts = [pools.small.layout().count, pools.frame.layout().count, pools.large.layout().count];
        prop_assert_eq!([pools.small.available(), pools.frame.available(), pools.large.available()], counts);
        let (driver, fragments) = receive.detach();
        let mut pages = fragments.into_pool();
        prop_assert_eq!(pages.available(), pages.layout().count);
        prop_assert!(pages.alloc().is_some());
        drop((driver, pages, pools, rings, connection, tx, rx, foreign));
        both.end(session, machine);
    }
}
