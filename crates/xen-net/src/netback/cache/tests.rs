use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

impl Cache {
    /// Uses a page for a moment; whether it had a slot, or got one.
    fn touch(&mut self, gref: u32) -> LookupResult {
        let found = self.lookup(GrantRef(gref), Access::Read, true);
        if let LookupResult::Hit(slot) | LookupResult::New { slot, .. } = found {
            assert!(!self.release(slot));
        }
        found
    }

    fn hits(&mut self, grefs: impl IntoIterator<Item = u32>) -> usize {
        grefs.into_iter().filter(|gref| matches!(self.touch(*gref), LookupResult::Hit(_))).count()
    }

    /// The cached pages, least recently used first, by walking the list in both directions.
    fn order(&self) -> Vec<u32> {
        let walk = |mut at: Slot, next: fn(&Node) -> Slot| {
            let mut order = Vec::new();
            while let Some(node) = self.nodes.get(usize::from(at)) {
                order.push(node.gref.0);
                at = next(node);
            }
            order
        };
        let mut order = walk(self.newest, |node| node.older);
        order.reverse();
        assert_eq!(order, walk(self.oldest, |node| node.newer));
        order
    }
}

#[test]
fn the_second_use_gets_a_slot_and_the_third_is_a_hit() {
    let mut cache = Cache::new(4);
    assert_eq!(cache.touch(7), LookupResult::Miss);
    assert_eq!(cache.touch(7), LookupResult::New { slot: 0, evicted: false });
    assert_eq!(cache.touch(7), LookupResult::Hit(0));
    assert_eq!(cache.held(), (1, 0));
}

#[test]
fn pages_used_once_never_get_a_slot() {
    let mut cache = Cache::new(4);
    for gref in 0..10_000 {
        assert_eq!(cache.touch(gref), LookupResult::Miss);
    }
    assert!(cache.is_empty());
}

#[test]
fn a_full_cache_follows_when_the_front_end_changes_its_set() {
    let mut cache = Cache::new(64);
    // Twice is enough for nearly all; a few share a crowded set of the memory of uses.
    for _ in 0..10 {
        cache.hits(0..64);
    }
    assert_eq!(cache.hits(0..64), 64);
    for _ in 0..40 {
        cache.hits(1000..1064);
    }
    assert_eq!(cache.hits(1000..1064), 64, "the old set is gone");
    assert_eq!(cache.hits(0..64), 0);
}

#[test]
fn more_pages_than_slots_in_turn_keep_what_fits() {
    let mut cache = Cache::new(64);
    for _ in 0..10 {
        cache.hits(0..128);
    }
    let mut evicted = 0;
    for _ in 0..10 {
        let found: Vec<_> = (0..128).map(|gref| cache.touch(gref)).collect();
        assert_eq!(found.iter().filter(|found| matches!(found, LookupResult::Hit(_))).count(), 64);
        evicted += found.iter().filter(|found| matches!(found, LookupResult::New { .. })).count();
    }
    assert_eq!(evicted, 0, "mapping and unmapping in turn costs more than it saves");
}

#[test]
fn more_pages_than_slots_in_no_order_are_not_mapped_and_unmapped_all_the_time() {
    let mut cache = Cache::new(64);
    let (mut state, mut evicted, uses) = (1u64, 0, 20_000);
    for _ in 0..uses {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        evicted +=
            u64::from(matches!(cache.touch((state >> 57) as u32), LookupResult::New { evicted: true, .. }));
    }
    assert!((1..=uses / SPACING + 1).contains(&evicted), "{evicted}");
}

#[test]
fn a_slot_in_use_is_never_given_away() {
    let mut cache = Cache::new(1);
    cache.touch(1);
    let LookupResult::New { slot, .. } = cache.lookup(GrantRef(1), Access::Read, true) else { panic!() };
    // Two packets in one page.
    assert_eq!(cache.lookup(GrantRef(1), Access::Read, true), LookupResult::Hit(slot));
    for _ in 0..5 {
        assert_eq!(cache.lookup(GrantRef(2), Access::Read, true), LookupResult::Miss);
    }
    assert!(!cache.release(slot));
    assert_eq!(cache.lookup(GrantRef(2), Access::Read, true), LookupResult::Miss, "one is left");
    assert!(!cache.release(slot));
    assert_eq!(cache.lookup(GrantRef(2), Access::Read, true), LookupResult::New { slot, evicted: true });
}

#[test]
fn a_page_that_was_sent_from_and_is_received_into_is_mapped_for_both() {
    let mut cache = Cache::new(4);
    cache.touch(1);
    let LookupResult::New { slot, .. } = cache.lookup(GrantRef(1), Access::Read, true) else { panic!() };
    assert_eq!(cache.lookup(GrantRef(1), Access::Write, true), LookupResult::Miss, "it is in use");
    cache.release(slot);
    assert_eq!(
        cache.lookup(GrantRef(1), Access::Write, false),
        LookupResult::Miss,
        "nothing is to be admitted"
    );
    assert_eq!(cache.lookup(GrantRef(1), Access::Write, true), LookupResult::New { slot, evicted: true });
    cache.release(slot);
    assert_eq!(cache.touch(1), LookupResult::Hit(slot));
    assert_eq!(
        (cache.lookup(GrantRef(1), Access::Write, true), cache.held()),
        (LookupResult::Hit(slot), (1, 0))
    );
    cache.pin(GrantRef(2), Access::Read).unwrap();
    assert_eq!(cache.lookup(GrantRef(2), Access::Write, true), LookupResult::Miss, "the front end said so");
}

#[test]
fn a_page_that_could_not_be_mapped_is_not_found_and_its_slot_comes_back() {
    let mut cache = Cache::new(1);
    cache.touch(1);
    let LookupResult::New { slot, .. } = cache.lookup(GrantRef(1), Access::Read, true) else { panic!() };
    cache.poison(slot);
    assert!(cache.is_poisoned(slot) && cache.is_empty());
    assert_eq!(cache.lookup(GrantRef(1), Access::Read, false), LookupResult::Miss);
    assert!(cache.release(slot), "nothing is in it");
    cache.free(slot);
    assert_eq!(cache.alloc_transient(), Some(slot));
    assert_eq!(cache.alloc_transient(), None);
}

#[test]
fn static_grants_take_slots_of_cached_pages_and_stay() {
    let mut cache = Cache::new(2);
    for _ in 0..2 {
        cache.hits([1, 2]);
    }
    assert_eq!(
        cache.pin(GrantRef(3), Access::Write),
        Ok(LookupResult::New { slot: 0, evicted: true }),
        "1 is older"
    );
    assert_eq!(cache.pin(GrantRef(2), Access::Write), Ok(LookupResult::New { slot: 1, evicted: true }));
    assert_eq!(cache.pin(GrantRef(2), Access::Write), Err(PinError::State), "a duplicate");
    assert_eq!(cache.pin(GrantRef(4), Access::Read), Err(PinError::Full));
    for _ in 0..5 {
        assert_eq!(cache.touch(9), LookupResult::Miss);
    }
    assert_eq!(cache.lookup(GrantRef(3), Access::Write, false), LookupResult::Hit(0));
    assert_eq!(cache.unpin(GrantRef(3)), Err(PinError::InUse));
    cache.release(0);
    assert_eq!(cache.unpin(GrantRef(3)), Ok(0));
    assert_eq!(cache.unpin(GrantRef(3)), Err(PinError::State));
    assert_eq!(cache.held(), (0, 1));
}

#[test]
fn references_that_lie_close_or_far_probe_little_whatever_the_secret() {
    for stride in [1, 2, 3, 8, 512, 4096, 1 << 20] {
        for _ in 0..200 {
            let mut index = Index::new(1024, Hash::new(&RandomState::new()));
            let grefs: Vec<_> = (0..1024u32).map(|i| GrantRef(i.wrapping_mul(stride))).collect();
            for (slot, gref) in grefs.iter().enumerate() {
                index.insert(*gref, slot as Slot);
            }
            let far = |gref: &GrantRef| {
                let (at, _) = index.locate(*gref);
                at.wrapping_sub(index.home(*gref)) & (index.entries.len() - 1)
            };
            let probes: usize = grefs.iter().map(|gref| 1 + far(gref)).sum();
            // A table half full needs 1.5 when the hash is as good as random.
            assert!(probes < 2 * grefs.len(), "{probes} probes for {} grants, {stride} apart", grefs.len());
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Find(u32, bool),
    Release(usize),
    Fix(u32),
    Unfix(u32),
    Pass,
    Fail(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0u32..24, any::<bool>()).prop_map(|(gref, write)| Step::Find(gref, write)),
        6 => (0usize..64).prop_map(Step::Release),
        1 => (0u32..24).prop_map(Step::Fix),
        1 => (0u32..24).prop_map(Step::Unfix),
        1 => Just(Step::Pass),
        1 => (0usize..64).prop_map(Step::Fail),
    ]
}

/// A page with a slot, in the model.
#[derive(Debug)]
struct Held {
    slot: Slot,
    used: u64,
    pinned: bool,
    writable: bool,
}

/// A reference model of the cache: maps that are searched from end to end.
#[derive(Default, Debug)]
struct Model {
    held: BTreeMap<u32, Held>,
    seen: BTreeMap<u32, u64>,
    /// References to slots, one entry each.
    taken: Vec<Slot>,
    now: u64,
    /// No page is replaced before.
    next_eviction: u64,
}

impl Model {
    fn in_use(&self, slot: Slot) -> bool {
        self.taken.contains(&slot)
    }

    /// The least recently used of the pages that are not pinned.
    fn oldest(&self) -> Option<(u32, Slot, u64)> {
        let cached = self.held.iter().filter(|(_, held)| !held.pinned);
        cached.min_by_key(|(_, held)| held.used).map(|(gref, held)| (*gref, held.slot, held.used))
    }

    fn put(&mut self, gref: u32, slot: Slot, pinned: bool, writable: bool) {
        assert!(!self.in_use(slot), "a slot in use was given away");
        self.held.retain(|_, held| held.slot != slot);
        self.held.insert(gref, Held { slot, used: self.now, pinned, writable });
    }
}

proptest! {
    /// With few enough pages that nothing seen is forgotten, the cache does exactly what the model does.
    #[test]
    fn the_cache_agrees_with_a_model(slots in 1usize..16, steps in prop::collection::vec(step(), 1..300)) {
        let mut cache = Cache::new(slots);
        // Enough memory of uses that nothing is pushed out: the model forgets nothing.
        cache.ghosts = Ghosts::new(4096, Hash { secret: 0, multiplier: 0xd6e8_feb8_6659_fd93 });
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Find(gref, write) => {
                    model.now += 1;
                    let access = if write { Access::Write } else { Access::Read };
                    let full = cache.free.is_empty();
                    let found = cache.lookup(GrantRef(gref), access, true);
                    match model.held.get_mut(&gref) {
                        Some(held) if write && !held.writable => {
                            let slot = held.slot;
                            if model.taken.contains(&slot) || held.pinned {
                                prop_assert_eq!(found, LookupResult::Miss);
                            } else {
                                prop_assert_eq!(found, LookupResult::New { slot, evicted: true });
                                model.put(gref, slot, false, true);
                                model.taken.push(slot);
                            }
                        }
                        Some(held) => {
                            held.used = model.now;
                            prop_assert_eq!(found, LookupResult::Hit(held.slot));
                            model.taken.push(held.slot);
                        }
                        None => {
                            let before = model.seen.insert(gref, model.now);
                            let victim = model.oldest().filter(|(_, slot, used)| {
                                !model.in_use(*slot)
                                    && before.is_some_and(|before| *used < before)
                                    && model.now >= model.next_eviction
                            });
                            match found {
                                LookupResult::New { slot, evicted } => {
                                    prop_assert!(before.is_some(), "first use");
                                    prop_assert_eq!(evicted, full);
                                    if full {
                                        prop_assert_eq!(Some(slot), victim.map(|(_, slot, _)| slot));
                                        model.next_eviction = model.now + SPACING;
                                    }
                                    model.put(gref, slot, false, write);
                                    model.seen.remove(&gref);
                                    model.taken.push(slot);
                                }
                                LookupResult::Miss => prop_assert!(before.is_none() || full && victim.is_none()),
                                LookupResult::Hit(_) => prop_assert!(false, "a hit of what is not there"),
                            }
                        }
                    }
                }
                Step::Release(at) if !model.taken.is_empty() => {
                    let slot = model.taken.swap_remove(at % model.taken.len());
                    let known = model.held.values().any(|held| held.slot == slot);
                    let done = cache.release(slot);
                    prop_assert_eq!(done, !known && !model.in_use(slot));
                    if done {
                        cache.free(slot);
                    }
                }
                Step::Fix(gref) => {
                    model.now += 1;
                    let full = cache.free.is_empty();
                    let oldest = model.oldest().filter(|(_, slot, _)| !model.in_use(*slot));
                    match (cache.pin(GrantRef(gref), Access::Write), model.held.get(&gref)) {
                        (Err(PinError::State), Some(held)) => prop_assert!(held.pinned),
                        (Err(PinError::InUse), Some(held)) => prop_assert!(model.in_use(held.slot)),
                        (Err(PinError::Full), None) => prop_assert!(full && oldest.is_none()),
                        (Ok(LookupResult::New { slot, .. }), known) => {
                            prop_assert!(known.is_none_or(|held| !held.pinned && held.slot == slot));
                            model.put(gref, slot, true, true);
                        }
                        other => prop_assert!(false, "{:?}", other),
                    }
                }
                Step::Unfix(gref) => match (cache.unpin(GrantRef(gref)), model.held.get(&gref)) {
                    (Ok(slot), Some(held)) => {
                        prop_assert!(held.pinned && held.slot == slot && !model.in_use(slot));
                        model.held.remove(&gref);
                        model.seen.remove(&gref);
                        cache.free(slot);
                    }
                    (Err(PinError::InUse), Some(held)) => prop_assert!(held.pinned && model.in_use(held.slot)),
                    (Err(PinError::State), held) => prop_assert!(held.is_none_or(|held| !held.pinned)),
                    other => prop_assert!(false, "{:?}", other),
                },
                Step::Pass => {
                    let full = cache.free.is_empty();
                    let slot = cache.alloc_transient();
                    prop_assert_eq!(slot.is_none(), full);
                    if let Some(slot) = slot {
                        prop_assert!(!model.in_use(slot));
                        model.taken.push(slot);
                    }
                }
                Step::Fail(at) if !model.taken.is_empty() => {
                    let slot = model.taken[at % model.taken.len()];
                    cache.poison(slot);
                    model.held.retain(|_, held| held.slot != slot);
                }
                Step::Release(_) | Step::Fail(_) => {}
            }
            let mut cached: Vec<_> = model.held.iter().filter(|(_, held)| !held.pinned).collect();
            cached.sort_by_key(|(_, held)| held.used);
            prop_assert_eq!(cache.order(), cached.iter().map(|(gref, _)| **gref).collect::<Vec<_>>());
            prop_assert_eq!(cache.held(), (cached.len(), model.held.len() - cached.len()));
        }
    }
}
