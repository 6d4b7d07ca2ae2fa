//! Checks the provider for real Xen where there is one. Runs inside a domain, started by `tests/interop/xen`.
//!
//!     xen-check self                   all properties of a provider, this domain granting to itself
//!     xen-check store BASE [SOCKET]    all properties of a store below a node, through the kernel or a socket
//!     xen-check limit                  the limit of grants, and runs longer than one mapping
//!     xen-check hold DOMAIN            maps what `front` in that domain grants, and keeps it until it is killed
//!     xen-check front DOMAIN           grants pages to that domain, and takes turns with its `back`
//!     xen-check each DOMAIN            maps what `front` in that domain grants page by page, again and again
//!     xen-check back DOMAIN            uses what `front` in that domain grants
//!     xen-check hostile CLASS ATTACK   is a network front end in this domain that breaks the rules, until its back end lets go

use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::Duration;

use ringferry_memory::{ReadSlice, Window, Words, WriteSlice};
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::xen::GrantDevice;
use ringferry_xen::domain::{DomId, Domain, EventPort, PAGE};
use ringferry_xen::event::EventChannel;
use ringferry_xen::grant::{Access, CopySegment, Foreign, GrantError, GrantRef, Granted, Local};
use ringferry_xen::real::RealDomain;
use ringferry_xen::store::{Client, Nodes, path};
use ringferry_xen_sim::conformance::provider::{self as conformance, Pair};
use ringferry_xen_sim::conformance::store as store_conformance;

/// Longest wait for the other end. An emulated CPU that two domains share is slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// Pages that the front end grants.
const PAGES: usize = 64;

/// Events that go there and back.
const EVENTS: usize = 100;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let domain = RealDomain::open().expect("this is a domain of Xen");
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["self"] => {
            let pair = Pair { front: &domain, back: &domain, counts_uses: false };
            conformance::all(&pair, |name| println!("ok: {name}"));
        }
        ["store", base, rest @ ..] => store(&domain, base, rest.first().copied()),
        ["limit"] => limit(&domain),
        ["each", number] => each(DomId(number.parse().expect("the number of a domain"))),
        ["hold", number] => hold(&domain, DomId(number.parse().expect("the number of a domain"))),
        ["front", number] => front(&domain, DomId(number.parse().expect("the number of a domain"))),
        ["back", number] => back(&domain, DomId(number.parse().expect("the number of a domain"))),
        ["hostile", class, attack] => hostile(&domain, class, attack),
        _ => {
            eprintln!(
                "usage: xen-check self | store BASE [SOCKET] | limit | front DOMAIN | back DOMAIN | each DOMAIN | hold DOMAIN | \
                 hostile CLASS ATTACK"
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

fn store(domain: &RealDomain, base: &str, socket: Option<&str>) {
    let connect = || match socket {
        Some(path) => Client::connect(path).expect("the socket"),
        None => Client::open().expect("the kernel's store"),
    };
    let subject = store_conformance::Subject { connect: &connect, domain: domain.id(), base };
    store_conformance::all(&subject, |name| println!("ok: {name}"));
}

/// More grants than there can be are refused as such and leave nothing behind; more pages than one mapping takes are
/// mapped all the same, and one that is bad costs only itself.
fn limit(domain: &RealDomain) {
    const MANY: usize = 700;
    let mut table = domain.grants().expect("gntalloc");
    for _ in 0..3 {
        let error = table.grant(domain.id(), 1 << 16, Access::Write).expect_err("more than there are");
        assert!(matches!(error, GrantError::Exhausted(_)), "{error}");
    }
    println!("ok: more grants than there can be are refused");
    for round in 0..3 {
        let granted =
            table.grant(domain.id(), MANY, Access::Write).expect("what the refused ones did not take");
        let mut foreign = domain.foreign(domain.id()).expect("gntdev");
        let mut window = Window::reserve(MANY).expect("addresses");
        let mut list: Vec<_> = granted.refs().iter().copied().enumerate().collect();
        list[MANY / 2].1 = GrantRef(u32::MAX);
        let mut mapped = Vec::new();
        foreign.map(&mut window, &list, Access::Write, &mut mapped);
        let bad: Vec<usize> = (0..MANY).filter(|page| !mapped[*page]).collect();
        assert_eq!(bad, [MANY / 2], "round {round}");
        for page in [0, MANY / 2 - 1, MANY - 1] {
            window.write(page, 0, 4).expect("mapped").copy_from(b"page");
            let mut bytes = [0; 4];
            let area = granted.region().area(page * PAGE, 4).expect("a page");
            area.read(0, 4).expect("a page").copy_to(&mut bytes);
            assert_eq!(&bytes, b"page");
        }
        println!("note: {:?}", foreign.counters());
    }
    println!("ok: {MANY} pages are mapped around a bad one, again and again");
}

fn hold(domain: &RealDomain, peer: DomId) {
    let mut turns = Turns::new(peer);
    turns.wait("done", 1);
    let refs = turns.list("writable");
    let mut foreign = domain.foreign(peer).expect("gntdev");
    let region = foreign.map_region(&refs).expect("a region");
    println!("ok: {} pages are mapped", region.spec().size as usize / PAGE);
    loop {
        std::thread::park();
    }
}

/// Maps the pages of another domain one after the other, through one handle, and lets go of them in another order, again and
/// again. A kernel that is not PV refuses one now and then; says which, and that the same one can be mapped the next time.
fn each(peer: DomId) {
    const ROUNDS: usize = 20;
    const ATTEMPTS: usize = 3;
    let mut turns = Turns::new(peer);
    turns.wait("done", 1);
    let refs = turns.list("writable");
    let device = GrantDevice::open().expect("gntdev");
    let mut window = Window::reserve(refs.len()).expect("addresses");
    let mut refused = 0;
    for round in 0..ROUNDS {
        for (slot, gref) in refs.iter().enumerate() {
            let mut attempt = || {
                let offset = device.map_grant_refs(peer.0, &[gref.0])?;
                let result = window.map(slot, 1, device.as_fd(), offset, true);
                device.unmap_grant_refs(offset, 1);
                result
            };
            let mut attempts = 1;
            while let Err(error) = attempt() {
                println!("round {round}, page {slot}, attempt {attempts}: {error}");
                assert!(attempts < ATTEMPTS, "page {slot} cannot be mapped");
                attempts += 1;
                refused += 1;
            }
        }
        for page in 0..refs.len() {
            let mut bytes = vec![0; PAGE];
            window.read(page, 0, PAGE).expect("mapped").copy_to(&mut bytes);
            assert_eq!(bytes, page_of(page, 0), "round {round}, page {page}");
        }
        let (even, odd): (Vec<usize>, Vec<usize>) = (0..refs.len()).partition(|page| page % 2 == 0);
        for slot in even.into_iter().chain(odd.into_iter().rev()) {
            window.unmap(slot, 1).expect("mapped");
        }
    }
    println!("ok: {} pages mapped one by one, {ROUNDS} times; refused at first: {refused}", refs.len());
}

/// The two ends take turns: `back` writes the number of a step, `front` does it and answers with the same number.
struct Turns {
    store: Client,
    base: String,
}

impl Turns {
    fn new(front: DomId) -> Turns {
        let store = Client::open().expect("the store");
        Turns { store, base: path::join(&path::domain(front), "data/check") }
    }

    fn node(&self, name: &str) -> String {
        path::join(&self.base, name)
    }

    /// Waits until the number in a node is at least `least`.
    fn wait(&mut self, name: &str, least: u32) {
        let node = self.node(name);
        until(&mut self.store, &node, |number| number.is_some_and(|number| number >= least));
    }

    fn set(&mut self, name: &str, value: impl ToString) {
        let node = self.node(name);
        self.store.write(&node, value.to_string()).expect("write");
    }

    fn list(&mut self, name: &str) -> Vec<GrantRef> {
        let node = self.node(name);
        let text = self.store.text(&node).expect("text").expect("a list");
        text.split('-').map(|gref| GrantRef(gref.parse().expect("a reference"))).collect()
    }
}

/// Waits until the number in a node is a wanted one.
fn until(store: &mut Client, node: &str, wanted: impl Fn(Option<u32>) -> bool) {
    store.watch(node, 1).expect("watch");
    while !wanted(store.number(node).expect("a number")) {
        // The question may have brought an event with it, of which the descriptor then says nothing: look before waiting.
        while store.event().expect("event").is_none() {
            assert!(wait_for(store.as_fd()), "{node} does not change within {PATIENCE:?}");
        }
    }
    store.unwatch(node, 1).expect("unwatch");
}

fn wait_for(fd: impl AsFd) -> bool {
    let epoll = Epoll::new().expect("epoll");
    epoll.add(fd, 0, Interest::READABLE).expect("epoll");
    epoll.wait(&mut EventBuf::with_capacity(1), Some(PATIENCE)).expect("epoll") > 0
}

fn wait_event(channel: &dyn EventChannel) {
    while !channel.drain().expect("drain") {
        assert!(wait_for(channel.as_fd()), "no event within {PATIENCE:?}");
    }
}

fn byte(page: usize, at: usize, seed: usize) -> u8 {
    (page * 7 + at * 13 + seed) as u8
}

fn page_of(page: usize, seed: usize) -> Vec<u8> {
    (0..PAGE).map(|at| byte(page, at, seed)).collect()
}

fn list(granted: &dyn Granted) -> String {
    granted.refs().iter().map(ToString::to_string).collect::<Vec<_>>().join("-")
}

fn front(domain: &RealDomain, peer: DomId) {
    let mut turns = Turns::new(domain.id());
    let mut table = domain.grants().expect("gntalloc");
    let writable = table.grant(peer, PAGES, Access::Write).expect("grants");
    let readable = table.grant(peer, 4, Access::Read).expect("grants");
    for (granted, count) in [(&writable, PAGES), (&readable, 4)] {
        for page in 0..count {
            let area = granted.region().area(page * PAGE, PAGE).expect("a page");
            area.write(0, PAGE).expect("a page").copy_from(&page_of(page, 0));
        }
    }
    let (port, channel) = domain.alloc_unbound(peer).expect("a port");
    let (base, lists) = (turns.base.clone(), [list(writable.as_ref()), list(readable.as_ref())]);
    turns
        .store
        .transaction(|t| {
            t.write(&path::join(&base, "port"), port.0.to_string())?;
            t.write(&path::join(&base, "writable"), &lists[0])?;
            t.write(&path::join(&base, "readable"), &lists[1])?;
            t.write(&path::join(&base, "done"), "1")
        })
        .expect("a transaction");

    turns.wait("step", 2);
    for page in 0..PAGES {
        let area = writable.region().area(page * PAGE, PAGE).expect("a page");
        let mut bytes = vec![0; PAGE];
        area.read(0, PAGE).expect("a page").copy_to(&mut bytes);
        assert_eq!(bytes, page_of(page, 1), "page {page} as the other end wrote it");
    }
    turns.set("done", 2);

    turns.wait("step", 3);
    for _ in 0..EVENTS {
        wait_event(channel.as_ref());
        channel.notify().expect("notify");
    }
    turns.set("done", 3);

    turns.wait("step", 4);
    assert_eq!(writable.end(), 0);
    turns.set("done", 4);
    turns.wait("step", 5);
    drop((readable, channel));
    turns.set("done", 5);
    println!("ok: the front end is done");
}

fn back(domain: &RealDomain, peer: DomId) {
    let mut turns = Turns::new(peer);
    turns.wait("done", 1);
    let (writable, readable) = (turns.list("writable"), turns.list("readable"));
    let node = turns.node("port");
    let port = turns.store.number(&node).expect("a number").expect("a port");
    let mut foreign = domain.foreign(peer).expect("gntdev");
    let mut window = Window::reserve(2 * PAGES).expect("addresses");

    let half = PAGES / 2;
    let mut mapped = Vec::new();
    let pages: Vec<_> = writable.iter().copied().enumerate().take(half).collect();
    foreign.map(&mut window, &pages, Access::Write, &mut mapped);
    assert!(mapped.iter().all(|mapped| *mapped), "{mapped:?}");
    for page in 0..half {
        let mut bytes = vec![0; PAGE];
        window.read(page, 0, PAGE).expect("mapped").copy_to(&mut bytes);
        assert_eq!(bytes, page_of(page, 0));
        window.write(page, 0, PAGE).expect("mapped").copy_from(&page_of(page, 1));
    }
    println!("ok: {half} pages of another domain are mapped, read and written");

    copy_pages(foreign.as_mut(), &writable, half);
    println!("ok: {half} pages of another domain are copied both ways");

    foreign.map(&mut window, &[(PAGES, readable[0])], Access::Write, &mut mapped);
    assert_eq!(mapped, [false]);
    foreign.map(&mut window, &[(PAGES, readable[0])], Access::Read, &mut mapped);
    assert_eq!(mapped, [true]);
    let mut batch = [CopySegment {
        gref: readable[1],
        offset: 0,
        local: Local::From(ReadSlice::from(&b"no"[..])),
        done: true,
    }];
    foreign.copy(&mut batch).expect("the call itself is good");
    assert!(!batch[0].done);
    println!("ok: a read-only grant cannot be mapped or copied to for writing");

    turns.set("step", 2);
    turns.wait("done", 2);
    println!("ok: the other domain has seen all that was written");

    let channel = domain.bind_interdomain(peer, EventPort(port)).expect("the port");
    while channel.drain().expect("drain") {} // a new end finds one at once
    turns.set("step", 3);
    for _ in 0..EVENTS {
        channel.notify().expect("notify");
        wait_event(channel.as_ref());
    }
    turns.wait("done", 3);
    println!("ok: {EVENTS} events went there and back");

    turns.set("step", 4);
    turns.wait("done", 4);
    let mut kept = vec![0; PAGE];
    window.read(3, 0, PAGE).expect("still mapped").copy_to(&mut kept);
    assert_eq!(kept, page_of(3, 1));
    println!("ok: xsa_396: a page whose grant ends while it is mapped stays what it is");
    let slots: Vec<usize> = (0..half).collect();
    let (last, others) = slots.split_last().expect("pages");
    foreign.unmap(&mut window, others);
    foreign.unmap(&mut window, &[*last, PAGES]);
    assert_eq!(window.mapped(), 0);
    foreign.map(&mut window, &[(0, writable[PAGES - 1])], Access::Read, &mut mapped);
    assert_eq!(mapped, [false]);
    println!("ok: an ended grant cannot be mapped");

    turns.set("step", 5);
    turns.wait("done", 5);
    let _ = channel.notify(); // to nobody: no harm
    let counters = foreign.counters();
    assert_eq!((counters.mapped, counters.unmapped), (half as u64 + 1, half as u64 + 1));
    println!("note: {counters:?}");
}

/// Reads the second half of the pages by copies, and overwrites them, in pieces of uneven length.
fn copy_pages(foreign: &mut dyn Foreign, refs: &[GrantRef], half: usize) {
    const PIECE: usize = 1500;
    let pieces = || {
        (0..half).flat_map(|page| (0..PAGE).step_by(PIECE).map(move |at| (page, at, PIECE.min(PAGE - at))))
    };
    let mut read = vec![0; half * PAGE];
    let mut rest = &mut read[..];
    let mut batch = Vec::new();
    for (page, at, len) in pieces() {
        let (piece, after) = rest.split_at_mut(len);
        rest = after;
        let local = Local::To(WriteSlice::from(piece));
        batch.push(CopySegment { gref: refs[half + page], offset: at as u16, local, done: false });
    }
    foreign.copy(&mut batch).expect("copies");
    assert!(batch.iter().all(|segment| segment.done));
    drop(batch);
    let written: Vec<u8> = (0..half).flat_map(|page| page_of(half + page, 1)).collect();
    assert_eq!(read, (0..half).flat_map(|page| page_of(half + page, 0)).collect::<Vec<_>>());
    let mut batch: Vec<_> = pieces()
        .map(|(page, at, len)| {
            let local = Local::From(ReadSlice::from(&written[page * PAGE + at..][..len]));
            CopySegment { gref: refs[half + page], offset: at as u16, local, done: false }
        })
        .collect();
    foreign.copy(&mut batch).expect("copies");
    assert!(batch.iter().all(|segment| segment.done));
}

/// A transmit request (netif.h, `netif_tx_request`).
#[derive(Clone, Copy)]
struct Request {
    gref: u32,
    offset: u16,
    flags: u16,
    id: u16,
    size: u16,
}

/// Flag `NETTXF_more_data`: the packet continues in the next slot.
const MORE_DATA: u16 = 1 << 2;
/// Flag `NETTXF_extra_info`: the next slot holds an extra.
const EXTRA_INFO: u16 = 1 << 3;
/// Bytes of an entry of the transmit ring, and where the first is (ring.h).
const ENTRY: usize = 12;
const ENTRIES_AT: usize = 64;

/// Connects to a back end of this domain as its own front end, attacks it, and waits until it has let go or, after a reference
/// that is merely bad, has answered with an error.
fn hostile(domain: &RealDomain, class: &str, attack: &str) {
    let mut store = Client::open().expect("the store");
    let front = path::join(&path::domain(domain.id()), &format!("device/{class}/0"));
    let back = store.text(&path::join(&front, "backend")).expect("text").expect("a back end");
    let state = path::join(&back, "state");
    until(&mut store, &state, |state| state == Some(2));

    let mut table = domain.grants().expect("gntalloc");
    let rings = table.grant(domain.id(), 2, Access::Write).expect("grants");
    let page = table.grant(domain.id(), 1, Access::Write).expect("a grant");
    let (port, channel) = domain.alloc_unbound(domain.id()).expect("a port");
    let [tx, rx] = [0, 1].map(|ring| rings.region().area(ring * PAGE, PAGE).expect("a page"));
    for ring in [&tx, &rx] {
        // req_event and rsp_event: the first.
        ring.store32_release(4, 1);
        ring.store32_release(12, 1);
    }
    let refs: Vec<String> = rings.refs().iter().map(ToString::to_string).collect();
    let nodes = [
        ("tx-ring-ref", refs[0].as_str()),
        ("rx-ring-ref", &refs[1]),
        ("event-channel", &port.0.to_string()),
        ("request-rx-copy", "1"),
        ("feature-rx-notify", "1"),
        ("feature-sg", "1"),
        ("state", "4"),
    ];
    for (node, value) in nodes {
        store.write(&path::join(&front, node), value).expect("write");
    }
    until(&mut store, &state, |state| state == Some(4));

    let gref = page.refs()[0].0;
    let good = Request { gref, offset: 0, flags: 0, id: 0, size: 100 };
    let more = Request { flags: MORE_DATA, size: 10, ..good };
    let extra = Request { flags: EXTRA_INFO, ..good };
    let put = |at: usize, bytes: &[u8]| {
        let slot = tx.write(ENTRIES_AT + ENTRY * at, ENTRY).expect("an entry");
        assert_eq!(slot.copy_from(bytes), ENTRY);
    };
    let request = |at: usize, request: Request| {
        let Request { gref, offset, flags, id, size } = request;
        let (gref, halves) = (gref.to_le_bytes(), [offset, flags, id, size].map(u16::to_le_bytes));
        put(at, &[&gref[..], halves.as_flattened()].concat());
    };
    let entries = match attack {
        // XSA-39.
        "producer" => 100_000,
        // XSA-39.
        "slots" => (0..40).inspect(|at| request(*at, Request { id: *at as u16, ..more })).count(),
        "endless" => (0..1).inspect(|at| request(*at, more)).count(),
        // XSA-39.
        "beyond" => (0..1).inspect(|at| request(*at, Request { offset: 4000, size: 1000, ..good })).count(),
        "extras" => {
            request(0, extra);
            // GSO, and more of the same.
            (1..51).inspect(|at| put(*at, &[1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])).count() + 1
        }
        "kind" => {
            request(0, extra);
            put(1, &[0xee, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            2
        }
        "grants" => {
            let bad = [u32::MAX, 0, 1 << 20, refs[0].parse::<u32>().expect("a number") + 4000];
            bad.iter()
                .enumerate()
                .for_each(|(at, gref)| request(at, Request { gref: *gref, id: at as u16, ..good }));
            bad.len()
        }
        other => panic!("no attack {other}"),
    };
    tx.store32_release(0, entries as u32);
    channel.notify().expect("notify");
    if attack == "grants" {
        // Each is answered, and the next good one is taken.
        while tx.load32_acquire(8) < 4 {
            wait_event(channel.as_ref());
        }
        for at in 0..4 {
            let mut answer = [0; 4];
            tx.read(ENTRIES_AT + ENTRY * at, 4).expect("an answer").copy_to(&mut answer);
            let status = i16::from_le_bytes([answer[2], answer[3]]);
            assert!(status < 0, "reference {at} was taken: {status}");
        }
        println!("ok: bad references are answered with an error");
        // So that it lets go all the same.
        tx.store32_release(0, 100_000);
        channel.notify().expect("notify");
    }
    until(&mut store, &state, |state| state != Some(4));
    println!("ok: {attack}: the back end has let go");
}
