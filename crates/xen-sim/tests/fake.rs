//! The fake has the properties of every provider, and fails as it is told.

use proptest::prelude::*;
use ringferry_memory::{ReadSlice, Window, WriteSlice};
use ringferry_xen::domain::{DomId, Domain, PAGE};
use ringferry_xen::grant::{Access, CopySegment, GrantError, GrantRef, Granted, Local};
use ringferry_xen_sim::conformance::provider::{self as conformance, Pair};
use ringferry_xen_sim::fake::{Fake, Op};

fn both(limit: usize) -> (Fake, impl Domain, impl Domain) {
    let fake = Fake::with_limit(limit);
    let (front, back) = (fake.domain(DomId(3)), fake.domain(DomId(0)));
    (fake, front, back)
}

#[test]
fn the_fake_does_what_every_provider_must() {
    let (fake, front, back) = both(64);
    conformance::all(&Pair { front: &front, back: &back, counts_uses: true }, |name| {
        println!("{name}");
        fake.assert_nothing_left();
    });
    conformance::all(&Pair { front: &back, back: &back, counts_uses: true }, |_| fake.assert_nothing_left());
}

#[test]
fn faults_strike_the_call_they_are_for_and_no_other() {
    let (fake, front, back) = both(64);
    let mut grants = front.grants().unwrap();
    fake.fail(front.id(), Op::Grant, 1);
    let granted = grants.grant(back.id(), 4, Access::Write).unwrap();
    let error = grants.grant(back.id(), 1, Access::Write).unwrap_err();
    assert!(matches!(error, GrantError::Exhausted(_)), "{error}");
    grants.grant(back.id(), 1, Access::Write).unwrap();

    let (mut foreign, mut window) = (back.foreign(front.id()).unwrap(), Window::reserve(4).unwrap());
    let list: Vec<_> = granted.refs().iter().copied().enumerate().collect();
    let mut mapped = Vec::new();
    fake.fail(back.id(), Op::Map, 2);
    foreign.map(&mut window, &list, Access::Read, &mut mapped);
    assert_eq!(mapped, [true, true, false, true]);
    foreign.unmap(&mut window, &[0, 1, 3]);

    let copy = |at: usize| CopySegment {
        gref: granted.refs()[at],
        offset: 0,
        local: Local::From(ReadSlice::from(&b"x"[..])),
        done: false,
    };
    let mut batch = [copy(0), copy(1), copy(2)];
    fake.fail(back.id(), Op::Copy, 0);
    fake.fail(back.id(), Op::Copy, 1);
    foreign.copy(&mut batch).unwrap();
    assert_eq!(batch.each_ref().map(|segment| segment.done), [false, false, true]);
    fake.fail(back.id(), Op::Batch, 0);
    assert!(foreign.copy(&mut batch).is_err());
    assert!(batch.iter().all(|segment| !segment.done));
    foreign.copy(&mut batch).unwrap();
    assert!(batch.iter().all(|segment| segment.done));

    fake.fail(front.id(), Op::Channel, 0);
    assert!(front.alloc_unbound(back.id()).is_err());
    fake.fail(back.id(), Op::Channel, 0);
    let (port, _channel) = front.alloc_unbound(back.id()).unwrap();
    assert!(back.bind_interdomain(front.id(), port).is_err());
    back.bind_interdomain(front.id(), port).unwrap();
}

#[test]
fn a_slot_named_twice_is_mapped_once_and_its_neighbours_all_the_same() {
    let (fake, front, back) = both(64);
    let granted = front.grants().unwrap().grant(back.id(), 3, Access::Write).unwrap();
    let refs = granted.refs();
    let (mut foreign, mut window) = (back.foreign(front.id()).unwrap(), Window::reserve(4).unwrap());
    let mut mapped = Vec::new();
    foreign.map(&mut window, &[(2, refs[0]), (2, refs[1]), (3, refs[2])], Access::Read, &mut mapped);
    assert_eq!(mapped, [true, false, true]);
    drop((granted, window));
    fake.assert_nothing_left();
}

#[test]
fn xsa_396_a_spoiled_reference_fails_while_its_mapping_stays() {
    let (fake, front, back) = both(64);
    let granted = front.grants().unwrap().grant(back.id(), 2, Access::Write).unwrap();
    let refs = granted.refs();
    let (mut foreign, mut window) = (back.foreign(front.id()).unwrap(), Window::reserve(2).unwrap());
    let mut mapped = Vec::new();
    foreign.map(&mut window, &[(0, refs[0])], Access::Write, &mut mapped);
    assert!(fake.invalidate_grant(front.id(), refs[0]));
    assert!(!fake.invalidate_grant(front.id(), GrantRef(1)));
    assert_eq!(window.write(0, 0, 4).unwrap().copy_from(b"fine"), 4);
    foreign.map(&mut window, &[(1, refs[0])], Access::Write, &mut mapped);
    assert_eq!(mapped, [false]);
    foreign.map(&mut window, &[(1, refs[1])], Access::Write, &mut mapped);
    assert_eq!(mapped, [true]);
    assert_eq!((fake.granted_pages(), fake.mapped_pages()), (2, 2));
    assert_eq!(granted.end(), 2);
    assert_eq!((fake.granted_pages(), fake.mapped_pages()), (0, 2));
    drop(window);
    fake.assert_nothing_left();
}

#[test]
fn references_come_back_when_the_peer_has_let_go_and_not_before() {
    let (fake, front, back) = both(4);
    let mut grants = front.grants().unwrap();
    let granted = grants.grant(back.id(), 4, Access::Write).unwrap();
    let refs = granted.refs().to_vec();
    let (mut foreign, mut window) = (back.foreign(front.id()).unwrap(), Window::reserve(1).unwrap());
    foreign.map(&mut window, &[(0, refs[2])], Access::Write, &mut Vec::new());
    assert_eq!(granted.end(), 1);
    assert!(matches!(grants.grant(back.id(), 1, Access::Write), Err(GrantError::Exhausted(_))));
    foreign.unmap(&mut window, &[0]);
    let granted = grants.grant(back.id(), 4, Access::Write).unwrap();
    assert_eq!(granted.refs(), refs);
    assert!(matches!(grants.grant(back.id(), 1, Access::Write), Err(GrantError::Exhausted(_))));
    assert!(matches!(grants.grant(back.id(), 0, Access::Write), Err(GrantError::Exhausted(_))));
    drop(granted);
    fake.assert_nothing_left();
}

#[test]
fn xsa_391_a_storm_raises_as_many_events_as_it_was_told() {
    let (fake, front, back) = both(4);
    let (port, one) = front.alloc_unbound(back.id()).unwrap();
    let two = back.bind_interdomain(front.id(), port).unwrap();
    while two.drain().unwrap() {}
    fake.storm(back.id(), 5);
    assert_eq!((0..100).filter(|_| two.drain().unwrap()).count(), 6);
    assert!(!one.drain().unwrap());
    fake.storm(front.id(), 2);
    assert_eq!((0..100).filter(|_| one.drain().unwrap()).count(), 3);
    assert_eq!(fake.open_ports(), 2);
}

#[test]
fn a_destroyed_domain_takes_grants_and_ports_along_and_leaves_mappings() {
    let (fake, front, back) = both(4);
    let granted = front.grants().unwrap().grant(back.id(), 1, Access::Write).unwrap();
    granted.region().area(0, PAGE).unwrap().write(0, 4).unwrap().copy_from(b"last");
    let (port, channel) = front.alloc_unbound(back.id()).unwrap();
    let (mut foreign, mut window) = (back.foreign(front.id()).unwrap(), Window::reserve(1).unwrap());
    foreign.map(&mut window, &[(0, granted.refs()[0])], Access::Read, &mut Vec::new());
    fake.destroy(front.id());
    assert!(back.bind_interdomain(front.id(), port).is_err());
    assert!(back.foreign(front.id()).is_err());
    assert!(front.grants().is_err());
    let mut word = [0; 4];
    assert_eq!(window.read(0, 0, 4).unwrap().copy_to(&mut word), 4);
    assert_eq!(&word, b"last");
    let slice = ReadSlice::from(&b"x"[..]);
    let mut batch =
        [CopySegment { gref: granted.refs()[0], offset: 0, local: Local::From(slice), done: false }];
    assert!(foreign.copy(&mut batch).is_err());
    assert_eq!((fake.granted_pages(), fake.mapped_pages(), fake.open_ports()), (0, 1, 0));
    drop((granted, channel));
    foreign.unmap(&mut window, &[0]);
    fake.assert_nothing_left();
}

/// The model of a page that was granted once: its bytes are all the same.
#[derive(Clone, Copy)]
struct Page {
    value: u8,
    access: Access,
    granted: bool,
    /// The page that was the first of its call of `grant`: they are given back together.
    first: usize,
}

#[derive(Clone, Debug)]
enum Step {
    Grant { pages: usize, access: Access },
    End { grant: usize },
    Map { pages: Vec<(usize, u32)>, access: Access },
    Unmap { slots: Vec<usize> },
    Store { slot: usize, value: u8 },
    Copy { gref: u32, value: Option<u8> },
}

const SLOTS: usize = 6;

fn step() -> impl Strategy<Value = Step> {
    let access = prop_oneof![Just(Access::Read), Just(Access::Write)];
    let (gref, slot) = (0u32..24, 0..SLOTS + 1);
    let pages = proptest::collection::vec((slot.clone(), gref.clone()), 0..5);
    prop_oneof![
        (1usize..5, access.clone()).prop_map(|(pages, access)| Step::Grant { pages, access }),
        (0usize..4).prop_map(|grant| Step::End { grant }),
        (pages, access).prop_map(|(pages, access)| Step::Map { pages, access }),
        proptest::collection::vec(0..SLOTS, 0..4).prop_map(|slots| Step::Unmap { slots }),
        (slot, any::<u8>()).prop_map(|(slot, value)| Step::Store { slot, value }),
        (gref, any::<Option<u8>>()).prop_map(|(gref, value)| Step::Copy { gref, value }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    /// Any order of granting, ending, mapping, unmapping, writing and copying, against a model in which a page is a
    /// value and a slot is the number of a page.
    #[test]
    fn any_order_of_steps_does_what_the_model_does(steps in proptest::collection::vec(step(), 1..80)) {
        let (fake, front, back) = both(16);
        let mut grants = front.grants().unwrap();
        let (mut foreign, mut window) = (back.foreign(front.id()).unwrap(), Window::reserve(SLOTS).unwrap());
        let mut held: Vec<Box<dyn Granted>> = Vec::new();
        let mut pages: Vec<Page> = Vec::new();
        // Reference to page, for those granted last under it; slot to page and what may be done there.
        let mut refs = std::collections::HashMap::<u32, usize>::new();
        let mut slots = [None::<(usize, Access)>; SLOTS];
        for step in steps {
            match step {
                Step::Grant { pages: count, access } => {
                    let busy: std::collections::HashSet<_> = (0..pages.len())
                        .filter(|at| pages[*at].granted || slots.iter().flatten().any(|(page, _)| page == at))
                        .map(|at| pages[at].first)
                        .collect();
                    let taken = pages.iter().filter(|page| busy.contains(&page.first)).count();
                    let result = grants.grant(back.id(), count, access);
                    prop_assert_eq!(result.is_ok(), taken + count <= 16);
                    let Ok(granted) = result else { continue };
                    let first = pages.len();
                    for gref in granted.refs() {
                        refs.insert(gref.0, pages.len());
                        pages.push(Page { value: 0, access, granted: true, first });
                    }
                    held.push(granted);
                }
                Step::End { grant } if grant < held.len() => {
                    let granted = held.remove(grant);
                    let ours: Vec<_> = granted.refs().iter().map(|gref| refs[&gref.0]).collect();
                    ours.iter().for_each(|page| pages[*page].granted = false);
                    let mapped = |page: &&usize| slots.iter().flatten().any(|(at, _)| at == *page);
                    prop_assert_eq!(granted.end(), ours.iter().filter(mapped).count());
                }
                Step::End { .. } => {}
                Step::Map { pages: list, access } => {
                    let list: Vec<_> = list.iter().map(|(slot, gref)| (*slot, GrantRef(*gref))).collect();
                    let mut mapped = Vec::new();
                    foreign.map(&mut window, &list, access, &mut mapped);
                    for ((slot, gref), mapped) in list.iter().zip(mapped) {
                        let page = refs.get(&gref.0).copied().filter(|page| {
                            let page = &pages[*page];
                            page.granted && (access == Access::Read || page.access == Access::Write)
                        });
                        let free = *slot < SLOTS && slots[*slot].is_none();
                        prop_assert_eq!(mapped, free && page.is_some());
                        if let (true, Some(page)) = (mapped, page) {
                            slots[*slot] = Some((page, access));
                        }
                    }
                }
                Step::Unmap { slots: list } => {
                    foreign.unmap(&mut window, &list);
                    list.iter().for_each(|slot| slots[*slot] = None);
                }
                Step::Store { slot, value } => {
                    let there = slots.get(slot).copied().flatten().filter(|(_, access)| *access == Access::Write);
                    let slice = window.write(slot, 0, PAGE);
                    prop_assert_eq!(slice.is_some(), there.is_some());
                    if let (Some(slice), Some((page, _))) = (slice, there) {
                        slice.copy_from(&[value; PAGE]);
                        pages[page].value = value;
                    }
                }
                Step::Copy { gref, value } => {
                    let mut there = [0; PAGE];
                    let data = [value.unwrap_or_default(); PAGE];
                    let local = match value {
                        Some(_) => Local::From(ReadSlice::from(&data[..])),
                        None => Local::To(WriteSlice::from(&mut there[..])),
                    };
                    let mut batch = [CopySegment { gref: GrantRef(gref), offset: 0, local, done: false }];
                    foreign.copy(&mut batch).unwrap();
                    let done = batch[0].done;
                    let page = refs.get(&gref).map(|page| &mut pages[*page]);
                    let page = page.filter(|page| {
                        page.granted && (value.is_none() || page.access == Access::Write)
                    });
                    prop_assert_eq!(done, page.is_some());
                    match (page, value) {
                        (Some(page), Some(value)) => page.value = value,
                        (Some(page), None) => prop_assert!(there.iter().all(|byte| *byte == page.value)),
                        (None, _) => {}
                    }
                }
            }
            for (slot, page) in slots.iter().enumerate() {
                let mut bytes = [0; PAGE];
                let slice = window.read(slot, 0, PAGE);
                prop_assert_eq!(slice.is_some(), page.is_some());
                if let (Some(slice), Some((page, _))) = (slice, page) {
                    slice.copy_to(&mut bytes);
                    prop_assert!(bytes.iter().all(|byte| *byte == pages[*page].value));
                }
            }
            let granted = pages.iter().filter(|page| page.granted).count();
            prop_assert_eq!((fake.granted_pages(), fake.mapped_pages()), (granted, slots.iter().flatten().count()));
        }
        drop((held, window));
        fake.assert_nothing_left();
    }
}
