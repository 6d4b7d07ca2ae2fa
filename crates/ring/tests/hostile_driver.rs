//! The driver half, of either layout, against a device that breaks the rules.

mod common;

use std::collections::BTreeSet;

use common::{AVAIL, BASE, Heap, Memory, Places, USED, WRITE, bare, features, watched};
use ringferry_memory::Words;
use ringferry_ring::{AddError, Buffer, Driver, Fault, Parts, RingFeatures, Used};

const SIZE: u16 = 8;
/// Number of descriptors in each chain.
const EACH: u16 = 2;
const WRITABLE: u32 = 64;

/// A driver half under attack: the test writes its memory in place of a device, by the rules or against them.
struct Prey {
    parts: Parts<Heap>,
    driver: Driver<Heap, u32>,
    features: RingFeatures,
}

impl Prey {
    /// With `chains` chains of two buffers each out, named from 0 on.
    fn new(features: RingFeatures, chains: u32) -> Self {
        let places = Places::new(SIZE, features.packed);
        let memory = Heap::new(places.bytes(0));
        let parts = places.parts(&memory);
        let driver = Driver::new(parts.clone(), features, None).unwrap();
        let mut prey = Prey { parts, driver, features };
        for token in 0..chains {
            prey.add(token);
        }
        prey.driver.publish();
        prey
    }

    fn add(&mut self, token: u32) {
        let buffer = |len| [Buffer { addr: BASE, len }];
        self.driver.add(&buffer(3), &buffer(WRITABLE), token).unwrap();
    }

    /// The id of the `i`-th chain of a fresh ring.
    fn id(&self, i: u32) -> u32 {
        if self.features.packed { i } else { i * u32::from(EACH) }
    }

    /// Answers with `elements` (id and length) after `from` chains were answered. In a packed ring
    /// each goes where a chain of [`EACH`] slots would have begun.
    fn answer(&self, from: u16, elements: &[(u32, u32)]) {
        for (i, (id, len)) in elements.iter().enumerate() {
            let nth = usize::from(from) + i;
            if self.features.packed {
                let slot = nth * usize::from(EACH);
                let first_lap = (slot / usize::from(SIZE)).is_multiple_of(2);
                let flags = WRITE | if first_lap { AVAIL | USED } else { 0 };
                let second = u64::from(*len) | u64::from(*id & 0xffff) << 32 | u64::from(flags) << 48;
                self.parts.desc.store64(16 * (slot % usize::from(SIZE)) + 8, second);
            } else {
                let at = 4 + 8 * (nth % usize::from(SIZE));
                self.parts.device.store32(at, *id);
                self.parts.device.store32(at + 4, *len);
            }
        }
        if !self.features.packed {
            self.parts.device.store16(2, from.wrapping_add(elements.len() as u16));
        }
    }

    fn collect(&mut self) -> Vec<(u32, u32)> {
        std::iter::from_fn(|| self.driver.collect()).map(|Used { token, len, .. }| (token, len)).collect()
    }

    /// Takes back what is out and says which tokens that were; the ring must be all free then.
    fn detach(&mut self) -> BTreeSet<u32> {
        let mut tokens = BTreeSet::new();
        while let Some(token) = self.driver.detach_unused() {
            assert!(tokens.insert(token), "token {token} came back twice");
        }
        assert_eq!((self.driver.free(), self.driver.in_flight()), (SIZE, 0));
        tokens
    }

    /// Checks that the ring is broken for good and gives back the `left` chains that are out.
    fn refused(mut self, left: &[u32]) -> Fault {
        assert_eq!(self.driver.collect(), None);
        let fault = self.driver.fault().expect("the driver noticed nothing");
        self.answer(0, &[(0, 0)]);
        assert!(!self.driver.has_used() && self.driver.collect().is_none());
        assert!(!self.driver.enable_calls() && !self.driver.enable_calls_delayed());
        let buffer = [Buffer { addr: BASE, len: 1 }];
        assert_eq!(self.driver.add(&buffer, &[], 77), Err(AddError::Broken(77)));
        assert_eq!(self.driver.fault(), Some(fault));
        assert_eq!(self.detach(), left.iter().copied().collect());
        fault
    }
}

/// Both layouts, without and with IN_ORDER.
fn rings() -> impl Iterator<Item = RingFeatures> {
    [(false, false), (false, true), (true, false), (true, true)]
        .into_iter()
        .map(|(packed, in_order)| RingFeatures { in_order, ..bare(packed) })
}

#[test]
fn cve_2020_10723_used_id_outside_the_ring() {
    for features in rings() {
        // 0x1_0000 would be 0 if it were cut to 16 bits before the check. A packed id has 16.
        let wide = if features.packed { [0x8000, 0xffff] } else { [0x1_0000, u32::MAX] };
        for id in [u32::from(SIZE), wide[0], wide[1]] {
            let prey = Prey::new(features, 2);
            prey.answer(0, &[(id, 0)]);
            assert_eq!(prey.refused(&[0, 1]), Fault::BadIndex(id), "{features:?}");
        }
    }
}

#[test]
fn used_id_that_is_not_outstanding() {
    for features in rings() {
        // In a split ring 1 is the second descriptor of chain 0 and no head; 6 is free in both.
        for id in [if features.packed { 2 } else { 1 }, 6] {
            let prey = Prey::new(features, 2);
            prey.answer(0, &[(id, 0)]);
            assert_eq!(prey.refused(&[0, 1]), Fault::NotOutstanding(id), "{features:?}");
        }
    }
}

#[test]
fn the_same_used_id_twice() {
    for features in rings() {
        let mut prey = Prey::new(features, 3);
        let first = if features.in_order { 0 } else { 1 };
        let id = prey.id(first);
        prey.answer(0, &[(id, 5)]);
        assert_eq!(prey.driver.collect(), Some(Used { id: id as u16, token: first, len: 5 }));
        prey.answer(1, &[(id, 5)]);
        assert_eq!(prey.refused(&[1 - first, 2]), Fault::NotOutstanding(id), "{features:?}");
    }
}

/// A chain that was added and not published may be named; what counts is that each token comes back
/// once, that nothing is free twice, and that there is an end to it.
#[test]
fn used_id_of_a_chain_that_is_not_published() {
    for features in rings() {
        for named in [2, 3] {
            let mut prey = Prey::new(features, 2);
            prey.add(2);
            prey.add(3);
            let id = prey.id(named);
            prey.answer(0, &[(id, 9), (id, 9)]);
            let mut out = BTreeSet::from([0, 1, 2, 3]);
            let early = prey.collect();
            assert!(early.iter().all(|(token, _)| out.remove(token)), "a token came back twice");
            assert_eq!(usize::from(prey.driver.in_flight()), out.len());
            assert_eq!(usize::from(SIZE - prey.driver.free()), 2 * out.len());
            // Whatever the driver adds and the device answers from here on is bounded.
            for round in 0..100u32 {
                let buffer = [Buffer { addr: BASE, len: 1 }];
                if prey.driver.add(&buffer, &[], 100 + round).is_ok() {
                    out.insert(100 + round);
                }
                prey.driver.publish();
                prey.answer(round as u16, &[(round % 8, 0), (round % 5, 0)]);
                let back = prey.collect();
                assert!(back.iter().all(|(token, _)| out.remove(token)), "a token came back twice");
                assert_eq!(usize::from(prey.driver.in_flight()), out.len());
            }
            assert_eq!(prey.detach(), out);
        }
    }
}

#[test]
fn s2_8_2_what_was_not_published_is_not_looked_at() {
    for in_order in [false, true] {
        let mut prey = Prey::new(RingFeatures { in_order, ..bare(true) }, 1);
        prey.add(1);
        prey.answer(0, &[(0, 5), (1, 6), (2, 7), (3, 8)]);
        assert_eq!(prey.collect(), [(0, 5)]);
        assert!(!prey.driver.has_used() && !prey.driver.enable_calls());
        prey.driver.publish();
        assert_eq!(prey.collect(), []);
        prey.answer(1, &[(1, 6), (0, 7)]);
        assert_eq!(prey.collect(), [(1, 6)]);
        assert_eq!(prey.driver.fault(), None);
    }
}

/// 2.8.1: zeroed or foreign memory is not used in the lap it is looked at.
#[test]
fn s2_8_1_flags_of_another_lap_are_not_used() {
    for lap in 0..4 {
        let mut prey = Prey::new(bare(true), 4);
        for round in 0..lap {
            prey.answer(4 * round, &[0, 1, 2, 3].map(|id| (id, 1)));
            assert_eq!(prey.collect().len(), 4);
            // Ids are used again, the one that came back last first.
            for id in (0..4).rev() {
                prey.add(id);
            }
            prey.driver.publish();
        }
        let good = if lap % 2 == 0 { AVAIL | USED } else { 0 };
        for owner in [0, AVAIL, USED, AVAIL | USED].into_iter().filter(|owner| *owner != good) {
            prey.parts.desc.store64(8, u64::from(owner) << 48);
            assert!(!prey.driver.has_used(), "lap {lap}: {owner:#x}");
            assert_eq!((prey.collect(), prey.driver.fault()), (vec![], None));
        }
        prey.parts.desc.store64(8, u64::from(good) << 48);
        assert_eq!(prey.collect(), [(0, 0)]);
    }
}

/// 2.8.4 says the length is reserved without WRITE; devices (QEMU's) never set that flag and mean
/// the length all the same, which Linux's driver takes. So does ours.
#[test]
fn a_used_length_counts_with_and_without_write() {
    for flags in [AVAIL | USED, AVAIL | USED | WRITE, AVAIL | USED | 1 | 4 | 0x7f78] {
        let mut prey = Prey::new(bare(true), 1);
        prey.parts.desc.store64(8, 5 | u64::from(flags) << 48);
        assert_eq!(prey.collect(), [(0, 5)]);
    }
}

// ---- the used index of a split ring ----

#[test]
fn used_index_ahead_of_what_is_out_or_published() {
    for features in rings().filter(|features| !features.packed) {
        let prey = Prey::new(features, 2);
        prey.answer(0, &[(0, 0), (2, 0), (0, 0)]);
        assert_eq!(prey.refused(&[0, 1]), Fault::IndexJump(3));
        let mut prey = Prey::new(features, 1);
        prey.add(1);
        prey.answer(0, &[(0, 0), (2, 0)]);
        assert_eq!(prey.refused(&[0, 1]), Fault::IndexJump(2));
    }
}

#[test]
fn used_index_stepping_back() {
    for features in rings().filter(|features| !features.packed) {
        let mut prey = Prey::new(features, 3);
        prey.answer(0, &[(0, 0), (2, 0)]);
        assert_eq!(prey.collect(), [(0, 0), (1, 0)]);
        prey.answer(0, &[(0, 0)]);
        assert_eq!(prey.refused(&[2]), Fault::IndexJump(u16::MAX));
    }
}

// ---- IN_ORDER ----

/// 2.7.9, 2.8.9: one element for all; what has none of its own counts as used completely.
#[test]
fn s2_7_9_s2_8_9_a_batch_over_everything() {
    for packed in [false, true] {
        let mut prey = Prey::new(RingFeatures { in_order: true, ..bare(packed) }, 4);
        let last = prey.id(3);
        prey.answer(0, &[(last, 9)]);
        // The element stands where the first chain's would; in a split ring the index skips with it.
        prey.parts.device.store16(if packed { 0 } else { 2 }, 4);
        assert_eq!(prey.collect(), [(0, WRITABLE), (1, WRITABLE), (2, WRITABLE), (3, 9)]);
        assert_eq!((prey.driver.free(), prey.driver.fault()), (SIZE, None));
        assert!(prey.detach().is_empty());
    }
}

#[test]
fn a_batch_longer_than_the_used_index_says() {
    let mut prey = Prey::new(RingFeatures { in_order: true, ..bare(false) }, 4);
    prey.answer(0, &[(6, 9)]);
    assert_eq!(prey.collect(), [(0, WRITABLE)]);
    assert!(!prey.driver.has_used() && !prey.driver.enable_calls());
    prey.answer(1, &[(0, 0)]);
    assert_eq!(prey.collect(), [(1, WRITABLE)], "no element is read inside a batch");
    prey.answer(2, &[(0, 0), (0, 0)]);
    assert_eq!((prey.collect(), prey.driver.fault()), (vec![(2, WRITABLE), (3, 9)], None));
}

#[test]
fn a_device_that_stops_within_a_batch() {
    for packed in [false, true] {
        let mut prey = Prey::new(RingFeatures { in_order: true, ..bare(packed) }, 4);
        let last = prey.id(2);
        prey.answer(0, &[(last, 9)]);
        assert_eq!(prey.driver.collect(), Some(Used { id: 0, token: 0, len: WRITABLE }));
        assert_eq!(prey.detach(), BTreeSet::from([1, 2, 3]));
    }
}

/// A device that says IN_ORDER and names them out of order: a batch up to each name, none twice.
#[test]
fn used_out_of_order_with_in_order() {
    for packed in [false, true] {
        let mut prey = Prey::new(RingFeatures { in_order: true, ..bare(packed) }, 3);
        let id = prey.id(1);
        prey.answer(0, &[(id, 9)]);
        prey.parts.device.store16(if packed { 0 } else { 2 }, 2);
        assert_eq!(prey.collect(), [(0, WRITABLE), (1, 9)]);
        prey.answer(2, &[(0, 9)]);
        assert_eq!(prey.refused(&[2]), Fault::NotOutstanding(0));
    }
}

// ---- what the device has no business writing ----

#[test]
fn a_device_that_scribbles_over_descriptors_changes_nothing() {
    for features in [bare(false), bare(true)] {
        let mut prey = Prey::new(features, 3);
        let Parts { desc, driver, .. } = prey.parts.clone();
        for fill in [0x03, 0xff, 0x00] {
            desc.fill(0, &vec![fill; desc.len()]);
            driver.fill(0, &vec![fill; driver.len()]);
        }
        let answers = [1, 0, 2].map(|i| (prey.id(i), 0));
        prey.answer(0, &answers);
        assert_eq!(prey.collect().into_iter().map(|(token, _)| token).collect::<Vec<_>>(), [1, 0, 2]);
        assert_eq!((prey.driver.free(), prey.driver.fault()), (SIZE, None));
    }
}

#[test]
fn descriptors_stay_linked_when_they_were_scribbled_over() {
    let mut prey = Prey::new(bare(false), 3);
    let Parts { desc, driver, .. } = prey.parts.clone();
    desc.fill(0, &[0xff; 128]);
    prey.answer(0, &[(2, 0), (0, 0), (4, 0)]);
    assert_eq!(prey.collect().len(), 3);
    // The longest chain uses each of them once.
    prey.driver.add(&[Buffer { addr: BASE, len: 1 }; 8], &[], 9).unwrap();
    let nexts: BTreeSet<_> = (0..7)
        .scan(driver.load16(4 + 2 * 3), |index, _| {
            *index = desc.load16(16 * usize::from(*index) + 14);
            Some(*index)
        })
        .collect();
    assert_eq!(nexts.len(), 7);
    assert!(nexts.iter().all(|index| *index < SIZE));
}

/// 2.7.10, 2.8.14: any event word, sensible or not, costs at most a kick too many.
#[test]
fn event_words_that_make_no_sense() {
    for features in features(false).chain(features(true)).filter(|features| !features.indirect) {
        let mut prey = Prey::new(features, 0);
        for (answered, word) in (0u16..).zip((0..=u16::MAX).step_by(7)) {
            let flags = answered & 3;
            let at = if features.packed { 0 } else { 4 + 8 * usize::from(SIZE) };
            prey.parts.device.store16(at, word);
            prey.parts.device.store16(if features.packed { 2 } else { 0 }, flags);
            prey.add(1);
            let kick = prey.driver.publish();
            match (features.packed, features.event_idx) {
                (false, false) => assert_eq!(kick, flags & 1 == 0),
                (false, true) => {}
                (true, event_idx) => match flags {
                    1 => assert!(!kick),
                    2 if event_idx => {}
                    _ => assert!(kick),
                },
            }
            // Without IN_ORDER the one chain always has the same id; with it, the next.
            let next = if features.packed { answered % SIZE } else { answered % (SIZE / EACH) * EACH };
            let id = if features.in_order { u32::from(next) } else { 0 };
            prey.answer(answered % (if features.packed { 2 * SIZE / EACH } else { u16::MAX }), &[(id, 0)]);
            assert_eq!((prey.collect(), prey.driver.fault()), (vec![(1, 0)], None), "{features:?}");
        }
    }
}

/// The shape in which QEMU's device looked at a packed ring for ever, on this side: whatever a device leaves in a ring, a look whether there is anything reads
/// one word, and collecting ends with what is out.
#[test]
fn cve_2026_16457_a_look_for_used_chains_ends_and_collecting_does() {
    let most = u32::from(SIZE / EACH);
    for features in features(false).chain(features(true)).filter(|features| !features.indirect) {
        for (fill, out) in
            [0x00, 0xff, 0x80, 0x7f, 0x01].into_iter().flat_map(|fill| [(fill, 0), (fill, 1), (fill, most)])
        {
            let what = format!("{features:?} {fill:#x} {out}");
            let places = Places::new(SIZE, features.packed);
            let memory = Heap::new(places.bytes(0));
            let parts = watched(places.parts(&memory));
            let mut driver = Driver::new(parts.clone(), features, None).unwrap();
            let buffer = [Buffer { addr: BASE, len: 3 }];
            for token in 0..out {
                driver.add(&buffer, &buffer, token).unwrap();
            }
            driver.publish();
            memory.fill(0, &vec![fill; places.bytes(0)]);
            let looks = || {
                let areas = [&parts.desc, &parts.driver, &parts.device];
                areas.iter().flat_map(|area| area.loads().into_values()).sum::<usize>()
            };
            looks();
            let has = driver.has_used();
            assert!(looks() <= 1 && (out > 0 || !has), "{what}");
            driver.enable_calls();
            assert!(looks() <= 1, "{what}");
            // Nobody waits here for ever if it does not end.
            let collected = std::iter::from_fn(|| driver.collect()).take(100).count();
            assert!(looks() <= 3 * (collected + 1) && collected as u32 <= out, "{what}: {collected}");
            assert!(!driver.has_used(), "{what}");
            let left = std::iter::from_fn(|| driver.detach_unused()).take(100).count();
            assert_eq!((collected + left) as u32, out, "{what}");
            assert_eq!((driver.free(), driver.in_flight()), (SIZE, 0), "{what}");
        }
    }
}
