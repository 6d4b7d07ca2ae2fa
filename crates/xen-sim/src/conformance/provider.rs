//! The properties of every provider: one function per property, over two domains in one program.
//!
//! The providers' own tests run [`all`]; so does the test bed over the real one, where both may be
//! the same domain. Each function creates what it needs, leaves nothing behind, and panics when the
//! property does not hold.

use std::time::Duration;

use ringferry_memory::{Area, ReadSlice, Window, WriteSlice};
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_xen::domain::{DomId, Domain, EventPort, PAGE};
use ringferry_xen::event::EventChannel;
use ringferry_xen::grant::{Access, CopySegment, Foreign, GrantError, GrantRef, Granted, Local};

/// Number of a domain that does not exist, and is not one of the hypervisor's special numbers
/// either.
const NOBODY: DomId = DomId(0x6fff);

/// Longest wait for an event: far longer than one ever takes, so that only a lost one is too late.
const EVENT: Duration = Duration::from_secs(20);

/// Two domains, which may be one: the first grants and allocates ports, the other uses them.
#[derive(Debug)]
pub struct Pair<'a> {
    /// The domain that grants pages and allocates ports.
    pub front: &'a dyn Domain,
    /// The domain that maps and copies.
    pub back: &'a dyn Domain,
    /// True if ending a grant reports how many pages are still mapped, which Xen does not.
    pub counts_uses: bool,
}

/// A property of a provider, as a function that checks it.
type Property = fn(&Pair<'_>);

/// All properties with their names.
pub const PROPERTIES: &[(&str, Property)] = &[
    ("xsa_403: granted pages are zeroed and have references of their own", pages_are_zeroed),
    ("both sides see the same bytes of a mapped page", mapped_pages_are_shared),
    ("pages are mapped one by one in any order", pages_map_in_any_order),
    ("a bad reference does not spoil the others of a batch", bad_references_fail_alone),
    ("slots that are outside or in use are refused", slots_are_checked),
    ("a read-only grant cannot be written", read_only_is_kept),
    ("a grant to another domain cannot be used", grants_are_for_one_domain),
    ("a region is pages side by side", regions_are_contiguous),
    ("copies go both ways, at any offset and length", copies_go_both_ways),
    ("a failing segment leaves the others done", bad_copies_fail_alone),
    ("a copy past the end of a page is refused", copies_stay_inside),
    ("a batch of many copies is done in order", large_batches_are_done),
    ("an empty batch is nothing", empty_batches),
    ("an unmapped slot is empty and can be used again", slots_are_reused),
    ("two handles map the same page", handles_are_independent),
    ("handles work on other threads", handles_move),
    ("after its end a grant cannot be used", ended_grants_are_refused),
    ("xsa_396: a page whose grant ends while it is mapped stays what it is", pages_outlive_their_grants),
    ("memory that goes takes its mappings along", drops_unmap),
    ("what was done is counted", counters_count),
    ("an event wakes the other side, once", events_arrive),
    ("ports are for one domain, once", ports_are_checked),
    ("a port can be bound again when the other side is gone", ports_can_be_rebound),
];

/// Checks all properties, and calls `passed` after each.
///
/// # Panics
/// Panics if a property does not hold.
pub fn all(pair: &Pair<'_>, mut passed: impl FnMut(&str)) {
    for (name, property) in PROPERTIES {
        property(pair);
        passed(name);
    }
}

impl Pair<'_> {
    fn grant(&self, count: usize, access: Access) -> Box<dyn Granted> {
        self.front.grants().unwrap().grant(self.back.id(), count, access).unwrap()
    }

    fn foreign(&self) -> Box<dyn Foreign> {
        self.back.foreign(self.front.id()).unwrap()
    }
}

/// Granted pages, as their owner uses them.
fn pages(granted: &dyn Granted) -> Area {
    granted.region().area(0, granted.refs().len() * PAGE).unwrap()
}

fn fill(area: &Area, at: usize, bytes: &[u8]) {
    assert_eq!(area.write(at, bytes.len()).unwrap().copy_from(bytes), bytes.len());
}

fn bytes(slice: ReadSlice<'_>) -> Vec<u8> {
    let mut bytes = vec![0xee; slice.len()];
    slice.copy_to(&mut bytes);
    bytes
}

/// Returns bytes that differ by seed and position.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(31) ^ (at >> 8) ^ seed.wrapping_mul(101)) as u8).collect()
}

fn map(
    foreign: &mut dyn Foreign,
    window: &mut Window,
    list: &[(usize, GrantRef)],
    access: Access,
) -> Vec<bool> {
    // The initial content of the vector must not matter.
    let mut mapped = vec![true; 3];
    foreign.map(window, list, access, &mut mapped);
    assert_eq!(mapped.len(), list.len());
    mapped
}

fn to(gref: GrantRef, offset: u16, bytes: &mut [u8]) -> CopySegment<'_> {
    CopySegment { gref, offset, local: Local::To(WriteSlice::from(bytes)), done: false }
}

fn from(gref: GrantRef, offset: u16, bytes: &[u8]) -> CopySegment<'_> {
    CopySegment { gref, offset, local: Local::From(ReadSlice::from(bytes)), done: false }
}

/// Copies one segment; returns whether it was done.
fn copy(foreign: &mut dyn Foreign, segment: CopySegment<'_>) -> bool {
    let mut batch = [segment];
    foreign.copy(&mut batch).unwrap();
    batch[0].done
}

fn pages_are_zeroed(pair: &Pair<'_>) {
    let mut seen = std::collections::HashSet::new();
    for _ in 0..2 {
        let (one, two) = (pair.grant(3, Access::Write), pair.grant(1, Access::Read));
        for granted in [&one, &two] {
            let area = pages(granted.as_ref());
            assert_eq!(granted.region().spec().size as usize, granted.refs().len() * PAGE);
            let all = bytes(area.read(0, granted.refs().len() * PAGE).unwrap());
            assert!(all.iter().all(|byte| *byte == 0));
            fill(&area, 0, &pattern(1, granted.refs().len() * PAGE));
        }
        let mut refs: Vec<_> = one.refs().iter().chain(two.refs()).copied().collect();
        seen.extend(refs.iter().copied());
        refs.sort();
        refs.dedup();
        assert_eq!(refs.len(), 4);
    }
    assert!(seen.len() >= 4);
}

fn mapped_pages_are_shared(pair: &Pair<'_>) {
    let granted = pair.grant(2, Access::Write);
    let area = pages(granted.as_ref());
    fill(&area, PAGE + 7, b"from the front end");
    let (mut foreign, mut window) = (pair.foreign(), Window::reserve(4).unwrap());
    assert_eq!(foreign.domain(), pair.front.id());
    let list = [(1, granted.refs()[0]), (2, granted.refs()[1])];
    assert_eq!(map(foreign.as_mut(), &mut window, &list, Access::Write), [true, true]);
    assert_eq!((0..4).map(|slot| window.is_mapped(slot)).collect::<Vec<_>>(), [false, true, true, false]);
    assert_eq!(bytes(window.read(2, 7, 18).unwrap()), b"from the front end");
    window.write(1, PAGE - 4, 4).unwrap().copy_from(b"back");
    assert_eq!(bytes(area.read(PAGE - 4, 4).unwrap()), b"back");
    assert!(window.read(1, PAGE - 4, 5).is_none());
    assert!(window.read(3, 0, 1).is_none());
    foreign.unmap(&mut window, &[1, 2]);
}

fn pages_map_in_any_order(pair: &Pair<'_>) {
    let (one, two) = (pair.grant(4, Access::Write), pair.grant(4, Access::Write));
    for (seed, granted) in [&one, &two].into_iter().enumerate() {
        (0..4)
            .for_each(|page| fill(&pages(granted.as_ref()), page * PAGE, &[seed as u8 * 4 + page as u8; 16]));
    }
    let (mut foreign, mut window) = (pair.foreign(), Window::reserve(16).unwrap());
    let order = [5, 0, 1, 2, 7, 6, 4, 3];
    let slots = [3, 4, 5, 6, 10, 9, 15, 0];
    let gref = |at: usize| if at < 4 { one.refs()[at] } else { two.refs()[at - 4] };
    let list: Vec<_> = slots.iter().zip(order).map(|(slot, at)| (*slot, gref(at))).collect();
    assert_eq!(map(foreign.as_mut(), &mut window, &list, Access::Read), [true; 8]);
    for (slot, at) in slots.iter().zip(order) {
        assert_eq!(bytes(window.read(*slot, 0, 16).unwrap()), [at as u8; 16]);
    }
    foreign.unmap(&mut window, &slots);
    assert_eq!(window.mapped(), 0);
}

/// References that were never granted: next to one that was, and as far away as can be.
fn bad_refs(granted: &dyn Granted) -> [GrantRef; 3] {
    let highest = granted.refs().iter().max().unwrap().0;
    [GrantRef(highest + 100_000), GrantRef(u32::MAX), GrantRef(u32::MAX - 1)]
}

fn bad_references_fail_alone(pair: &Pair<'_>) {
    let granted = pair.grant(3, Access::Write);
    let (bad, refs) = (bad_refs(granted.as_ref()), granted.refs());
    let (mut foreign, mut window) = (pair.foreign(), Window::reserve(8).unwrap());
    let list = [(0, bad[0]), (1, refs[0]), (2, bad[1]), (3, refs[1]), (4, refs[2]), (5, bad[2])];
    let mapped = map(foreign.as_mut(), &mut window, &list, Access::Write);
    assert_eq!(mapped, [false, true, false, true, true, false]);
    for (slot, mapped) in mapped.iter().enumerate() {
        assert_eq!(window.is_mapped(slot), *mapped);
    }
    foreign.unmap(&mut window, &[1, 3, 4]);
    for bad in bad {
        let error = foreign.map_region(&[refs[0], bad]).unwrap_err();
        assert!(matches!(error, GrantError::BadRef(_) | GrantError::Os(_)), "{error}");
    }
}

fn slots_are_checked(pair: &Pair<'_>) {
    let granted = pair.grant(2, Access::Write);
    let refs = granted.refs();
    let (mut foreign, mut window) = (pair.foreign(), Window::reserve(2).unwrap());
    let list = [(0, refs[0]), (0, refs[1]), (2, refs[1]), (usize::MAX, refs[1])];
    assert_eq!(map(foreign.as_mut(), &mut window, &list, Access::Write), [true, false, false, false]);
    fill(&pages(granted.as_ref()), 0, b"first");
    assert_eq!(bytes(window.read(0, 0, 5).unwrap()), b"first");
    assert_eq!(
        map(foreign.as_mut(), &mut window, &[(0, refs[1]), (1, refs[1])], Access::Read),
        [false, true]
    );
    foreign.unmap(&mut window, &[0, 1]);
}

fn read_only_is_kept(pair: &Pair<'_>) {
    let granted = pair.grant(1, Access::Read);
    let gref = granted.refs()[0];
    fill(&pages(granted.as_ref()), 10, b"look, do not touch");
    let (mut foreign, mut window) = (pair.foreign(), Window::reserve(2).unwrap());
    assert_eq!(map(foreign.as_mut(), &mut window, &[(0, gref)], Access::Write), [false]);
    assert!(foreign.map_region(&[gref]).is_err());
    assert_eq!(map(foreign.as_mut(), &mut window, &[(0, gref)], Access::Read), [true]);
    assert_eq!(bytes(window.read(0, 10, 4).unwrap()), b"look");
    assert!(window.write(0, 0, 1).is_none());
    let mut read = [0; 4];
    assert!(copy(foreign.as_mut(), to(gref, 10, &mut read)));
    assert_eq!(&read, b"look");
    assert!(!copy(foreign.as_mut(), from(gref, 10, b"over")));
    assert_eq!(bytes(window.read(0, 10, 4).unwrap()), b"look");
    foreign.unmap(&mut window, &[0]);
}

fn grants_are_for_one_domain(pair: &Pair<'_>) {
    let granted = pair.front.grants().unwrap().grant(NOBODY, 1, Access::Write).unwrap();
    let gref = granted.refs()[0];
    let (mut foreign, mut window) = (pair.foreign(), Window::reserve(1).unwrap());
    assert_eq!(map(foreign.as_mut(), &mut window, &[(0, gref)], Access::Read), [false]);
    assert!(!copy(foreign.as_mut(), to(gref, 0, &mut [0; 8])));
    assert!(!copy(foreign.as_mut(), from(gref, 0, &[1; 8])));
    assert_eq!(bytes(pages(granted.as_ref()).read(0, 8).unwrap()), [0; 8]);
}

fn regions_are_contiguous(pair: &Pair<'_>) {
    let (one, two) = (pair.grant(2, Access::Write), pair.grant(2, Access::Write));
    let refs = [one.refs()[1], two.refs()[0], two.refs()[1], one.refs()[0]];
    let mut foreign = pair.foreign();
    let region = foreign.map_region(&refs).unwrap();
    let area = region.area(0, 4 * PAGE).unwrap();
    assert!(region.area(1, 4 * PAGE).is_none());
    let across = pattern(9, 2 * PAGE);
    fill(&area, PAGE / 2, &across);
    assert_eq!(bytes(pages(one.as_ref()).read(PAGE + PAGE / 2, PAGE / 2).unwrap()), across[..PAGE / 2]);
    assert_eq!(bytes(pages(two.as_ref()).read(0, PAGE + PAGE / 2).unwrap()), across[PAGE / 2..]);
    drop(foreign);
    fill(&pages(one.as_ref()), 0, b"still mapped");
    assert_eq!(bytes(area.read(3 * PAGE, 12).unwrap()), b"still mapped");
}

fn copies_go_both_ways(pair: &Pair<'_>) {
    let granted = pair.grant(2, Access::Write);
    let area = pages(granted.as_ref());
    let mut foreign = pair.foreign();
    for (offset, len) in [(0, PAGE), (0, 1), (PAGE - 1, 1), (13, 1500), (64, 64), (PAGE, 0), (100, 0)] {
        fill(&area, 0, &pattern(3, 2 * PAGE));
        for page in 0..2 {
            let mut read = vec![0; len];
            assert!(copy(foreign.as_mut(), to(granted.refs()[page], offset as u16, &mut read)));
            assert_eq!(read, pattern(3, 2 * PAGE)[page * PAGE + offset..][..len]);
        }
        let written = pattern(4, len);
        assert!(copy(foreign.as_mut(), from(granted.refs()[1], offset as u16, &written)));
        let mut expect = pattern(3, 2 * PAGE);
        expect[PAGE + offset..][..len].copy_from_slice(&written);
        assert_eq!(bytes(area.read(0, 2 * PAGE).unwrap()), expect, "{len} at {offset}");
    }
}

fn bad_copies_fail_alone(pair: &Pair<'_>) {
    let (granted, locked) = (pair.grant(1, Access::Write), pair.grant(1, Access::Read));
    let (area, gref, closed) = (pages(granted.as_ref()), granted.refs()[0], locked.refs()[0]);
    let bad = bad_refs(granted.as_ref())[0];
    fill(&area, 0, b"abcd");
    let (mut a, mut b, mut c) = ([0; 2], [0; 2], [0; 2]);
    let mut batch = [
        to(bad, 0, &mut a),
        to(gref, 0, &mut b),
        from(closed, 0, b"xx"),
        from(gref, 8, b"yy"),
        from(bad, 0, b"zz"),
        to(gref, 2, &mut c),
    ];
    foreign_copy(pair, &mut batch);
    assert_eq!(batch.map(|segment| segment.done), [false, true, false, true, false, true]);
    assert_eq!((&a, &b, &c), (&[0; 2], b"ab", b"cd"));
    assert_eq!(bytes(area.read(8, 2).unwrap()), b"yy");
    assert_eq!(bytes(pages(locked.as_ref()).read(0, 2).unwrap()), [0; 2]);
}

fn foreign_copy(pair: &Pair<'_>, batch: &mut [CopySegment<'_>]) {
    pair.foreign().copy(batch).unwrap();
}

fn copies_stay_inside(pair: &Pair<'_>) {
    let granted = pair.grant(2, Access::Write);
    let gref = granted.refs()[0];
    let mut foreign = pair.foreign();
    let long = [1; PAGE + 1];
    for (offset, len) in [(0, PAGE + 1), (PAGE - 1, 2), (1, PAGE), (u16::MAX as usize, 1)] {
        let mut batch = [from(gref, offset as u16, &long[..len])];
        assert!(foreign.copy(&mut batch).is_err(), "{len} at {offset}");
    }
    assert_eq!(bytes(pages(granted.as_ref()).read(0, 2 * PAGE).unwrap()), [0; 2 * PAGE]);
}

fn large_batches_are_done(pair: &Pair<'_>) {
    const SEGMENTS: usize = 300;
    let granted = pair.grant(8, Access::Write);
    let area = pages(granted.as_ref());
    let mut foreign = pair.foreign();
    let data: Vec<Vec<u8>> = (0..SEGMENTS).map(|at| pattern(at, 50 + at)).collect();
    let offset = |at: usize| (at / 8 * 100 % 3000) as u16;
    let mut batch: Vec<_> =
        data.iter().enumerate().map(|(at, data)| from(granted.refs()[at % 8], offset(at), data)).collect();
    foreign.copy(&mut batch).unwrap();
    assert!(batch.iter().all(|segment| segment.done));
    let mut expect = vec![0; 8 * PAGE];
    for (at, data) in data.iter().enumerate() {
        expect[at % 8 * PAGE + usize::from(offset(at))..][..data.len()].copy_from_slice(data);
    }
    assert_eq!(bytes(area.read(0, 8 * PAGE).unwrap()), expect);

    let mut back = vec![vec![0; 100]; SEGMENTS];
    let mut batch: Vec<_> =
        back.iter_mut().enumerate().map(|(at, data)| to(granted.refs()[at % 8], offset(at), data)).collect();
    foreign.copy(&mut batch).unwrap();
    assert!(batch.iter().all(|segment| segment.done));
    for (at, data) in back.iter().enumerate() {
        assert_eq!(data, &expect[at % 8 * PAGE + usize::from(offset(at))..][..100]);
    }
}

fn empty_batches(pair: &Pair<'_>) {
    let (mut foreign, mut window) = (pair.foreign(), Window::reserve(1).unwrap());
    assert!(map(foreign.as_mut(), &mut window, &[], Access::Read).is_empty());
    foreign.unmap(&mut window, &[]);
    foreign.copy(&mut []).unwrap();
    assert_eq!(foreign.counters(), Default::default());
}

fn slots_are_reused(pair: &Pair<'_>) {
    let granted = pair.grant(4, Access::Write);
    let refs = granted.refs();
    (0..4).for_each(|page| fill(&pages(granted.as_ref()), page * PAGE, &[page as u8 + 1; 4]));
    let (mut foreign, mut window) = (pair.foreign(), Window::reserve(4).unwrap());
    let list: Vec<_> = refs.iter().copied().enumerate().collect();
    assert_eq!(map(foreign.as_mut(), &mut window, &list, Access::Write), [true; 4]);
    foreign.unmap(&mut window, &[1, 2]);
    assert!(window.read(1, 0, 4).is_none() && window.read(2, 0, 4).is_none());
    assert_eq!(bytes(window.read(0, 0, 4).unwrap()), [1; 4]);
    assert_eq!(bytes(window.read(3, 0, 4).unwrap()), [4; 4]);
    assert_eq!(map(foreign.as_mut(), &mut window, &[(1, refs[3])], Access::Write), [true]);
    assert_eq!(bytes(window.read(1, 0, 4).unwrap()), [4; 4]);
    foreign.unmap(&mut window, &[3, 0, 1]);
    assert_eq!(window.mapped(), 0);
}

fn handles_are_independent(pair: &Pair<'_>) {
    let granted = pair.grant(1, Access::Write);
    let gref = granted.refs()[0];
    let (mut one, mut first) = (pair.foreign(), Window::reserve(1).unwrap());
    let (mut two, mut second) = (pair.foreign(), Window::reserve(1).unwrap());
    assert_eq!(map(one.as_mut(), &mut first, &[(0, gref)], Access::Write), [true]);
    assert_eq!(map(two.as_mut(), &mut second, &[(0, gref)], Access::Read), [true]);
    first.write(0, 0, 2).unwrap().copy_from(b"hi");
    one.unmap(&mut first, &[0]);
    drop(one);
    assert_eq!(bytes(second.read(0, 0, 2).unwrap()), b"hi");
    two.unmap(&mut second, &[0]);
}

fn handles_move(pair: &Pair<'_>) {
    let granted = pair.grant(1, Access::Write);
    let gref = granted.refs()[0];
    let (mut foreign, mut grants) = (pair.foreign(), pair.front.grants().unwrap());
    let to = pair.back.id();
    let (granted, other) = std::thread::spawn(move || {
        assert!(copy(foreign.as_mut(), from(gref, 0, b"thread")));
        (granted, grants.grant(to, 1, Access::Read).unwrap())
    })
    .join()
    .unwrap();
    assert_eq!(bytes(pages(granted.as_ref()).read(0, 6).unwrap()), b"thread");
    assert_ne!(other.refs()[0], gref);
}

fn ended_grants_are_refused(pair: &Pair<'_>) {
    let mut foreign = pair.foreign();
    for by_drop in [false, true] {
        let granted = pair.grant(2, Access::Write);
        let refs = granted.refs().to_vec();
        assert!(copy(foreign.as_mut(), from(refs[0], 0, b"before")));
        if by_drop {
            drop(granted);
        } else {
            assert_eq!(granted.end(), 0);
        }
        let mut window = Window::reserve(2).unwrap();
        let list: Vec<_> = refs.iter().copied().enumerate().collect();
        assert_eq!(map(foreign.as_mut(), &mut window, &list, Access::Read), [false; 2]);
        assert!(!copy(foreign.as_mut(), to(refs[1], 0, &mut [0; 4])));
        assert!(!copy(foreign.as_mut(), from(refs[0], 0, b"after")));
    }
}

fn pages_outlive_their_grants(pair: &Pair<'_>) {
    let granted = pair.grant(2, Access::Write);
    let refs = granted.refs().to_vec();
    fill(&pages(granted.as_ref()), PAGE, b"kept");
    let (mut foreign, mut window) = (pair.foreign(), Window::reserve(2).unwrap());
    assert_eq!(map(foreign.as_mut(), &mut window, &[(0, refs[1])], Access::Write), [true]);
    let mapped = granted.end();
    assert_eq!(mapped, usize::from(pair.counts_uses));
    // New pages must not be the one that is still mapped here.
    let others: Vec<_> = (0..4).map(|_| pair.grant(2, Access::Write)).collect();
    for other in &others {
        fill(&pages(other.as_ref()), 0, &[0xff; 2 * PAGE]);
    }
    assert_eq!(bytes(window.read(0, 0, 4).unwrap()), b"kept");
    window.write(0, 0, 4).unwrap().copy_from(b"gone");
    for other in &others {
        assert_eq!(bytes(pages(other.as_ref()).read(0, 2 * PAGE).unwrap()), [0xff; 2 * PAGE]);
    }
    foreign.unmap(&mut window, &[0]);
}

fn drops_unmap(pair: &Pair<'_>) {
    let granted = pair.grant(3, Access::Write);
    let refs = granted.refs().to_vec();
    let mut foreign = pair.foreign();
    let mut window = Window::reserve(2).unwrap();
    map(foreign.as_mut(), &mut window, &[(0, refs[0])], Access::Write);
    let region = foreign.map_region(&refs[1..]).unwrap();
    drop(window);
    drop(region);
    drop(foreign);
    let (mut foreign, mut window) = (pair.foreign(), Window::reserve(2).unwrap());
    map(foreign.as_mut(), &mut window, &[(1, refs[0])], Access::Write);
    drop(foreign);
    drop(window);
    assert_eq!(granted.end(), 0);
}

fn counters_count(pair: &Pair<'_>) {
    let granted = pair.grant(4, Access::Write);
    let refs = granted.refs();
    let (mut foreign, mut window) = (pair.foreign(), Window::reserve(4).unwrap());
    let bad = bad_refs(granted.as_ref())[0];
    map(foreign.as_mut(), &mut window, &[(0, refs[0]), (1, refs[1]), (2, bad)], Access::Write);
    let counters = foreign.counters();
    assert_eq!((counters.mapped, counters.unmapped, counters.copies), (2, 0, 0));
    assert!(counters.calls >= 1);
    assert!(copy(foreign.as_mut(), from(refs[3], 1, &[7; 70])));
    assert!(!copy(foreign.as_mut(), from(bad, 1, &[7; 70])));
    foreign.unmap(&mut window, &[1]);
    let after = foreign.counters();
    assert_eq!((after.mapped, after.unmapped, after.copies, after.copied_bytes), (2, 1, 1, 70));
    assert!(after.calls > counters.calls);
    foreign.unmap(&mut window, &[0]);
}

/// Waits until an event is pending; returns false if none came in time.
fn wait(channel: &dyn EventChannel) -> bool {
    let epoll = Epoll::new().unwrap();
    epoll.add(channel.as_fd(), 0, Interest::READABLE).unwrap();
    epoll.wait(&mut EventBuf::with_capacity(1), Some(EVENT)).unwrap() > 0
}

/// Returns true if an event is pending now.
fn pending(channel: &dyn EventChannel) -> bool {
    let epoll = Epoll::new().unwrap();
    epoll.add(channel.as_fd(), 0, Interest::READABLE).unwrap();
    epoll.wait(&mut EventBuf::with_capacity(1), Some(Duration::ZERO)).unwrap() > 0
}

fn events_arrive(pair: &Pair<'_>) {
    let (port, front) = pair.front.alloc_unbound(pair.back.id()).unwrap();
    front.notify().unwrap(); // before anybody listens: must do no harm
    let back = pair.back.bind_interdomain(pair.front.id(), port).unwrap();
    while back.drain().unwrap() {} // a new end may find one at once
    while front.drain().unwrap() {}
    for (from, to) in [(&front, &back), (&back, &front)] {
        assert!(!pending(to.as_ref()));
        from.notify().unwrap();
        from.notify().unwrap();
        assert!(wait(to.as_ref()));
        assert!(to.drain().unwrap());
        // Two may be one or two, and no more.
        let again = to.drain().unwrap();
        assert!(!to.drain().unwrap(), "{again}");
        assert!(!pending(to.as_ref()));
        assert!(!from.drain().unwrap());
        from.notify().unwrap();
        assert!(wait(to.as_ref()) && to.drain().unwrap());
    }
    drop(back);
    let _ = front.notify(); // to nobody: no harm
}

fn ports_are_checked(pair: &Pair<'_>) {
    let (front, back) = (pair.front, pair.back);
    let (port, channel) = front.alloc_unbound(back.id()).unwrap();
    let bound = back.bind_interdomain(front.id(), port).unwrap();
    assert!(back.bind_interdomain(front.id(), port).is_err(), "bound twice");
    drop((channel, bound));
    assert!(back.bind_interdomain(front.id(), port).is_err(), "closed");
    let (port, _channel) = front.alloc_unbound(NOBODY).unwrap();
    assert!(back.bind_interdomain(front.id(), port).is_err(), "for somebody else");
    for port in [0, u32::MAX, 1 << 20] {
        assert!(back.bind_interdomain(front.id(), EventPort(port)).is_err(), "{port}");
    }
    assert!(back.bind_interdomain(NOBODY, EventPort(1)).is_err());
}

fn ports_can_be_rebound(pair: &Pair<'_>) {
    let (port, front) = pair.front.alloc_unbound(pair.back.id()).unwrap();
    for _ in 0..3 {
        let back = pair.back.bind_interdomain(pair.front.id(), port).unwrap();
        while back.drain().unwrap() {}
        front.notify().unwrap();
        assert!(wait(back.as_ref()) && back.drain().unwrap());
    }
}
