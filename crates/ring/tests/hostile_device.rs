//! The driver half against a device that breaks the rules: named violations first, then random
//! memory. Last, both halves over memory that changes between any two loads.

mod common;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use common::{BASE, Heap, Memory, Places, Random, check_burst, likely};
use proptest::prelude::*;
use ringferry_memory::{Entry, WordTable, Words};
use ringferry_ring::split::driver::AddError;
use ringferry_ring::split::{Device, Driver, Layout, avail_bytes, desc_bytes, used_bytes};
use ringferry_ring::{Buffer, Chains, Fault, RingFeatures, Tables};

const SIZE: u16 = 8;
const ALL: RingFeatures = RingFeatures { indirect: true, event_idx: true };
const NONE: RingFeatures = RingFeatures { indirect: false, event_idx: false };

/// A driver, and memory that the test writes as the device would or should not.
struct Prey {
    memory: Heap,
    places: Places,
    driver: Driver<Heap, u32>,
}

impl Prey {
    /// With `chains` chains of two buffers each out, named from 0 on.
    fn new(chains: u32) -> Self {
        let places = Places::new(SIZE);
        let memory = Heap::new(places.bytes(0));
        let mut driver = Driver::new(places.layout(&memory), NONE, None);
        let buffer = [Buffer { addr: BASE, len: 64 }];
        for token in 0..chains {
            driver.add(&buffer, &buffer, token).unwrap();
        }
        driver.publish();
        Prey { memory, places, driver }
    }

    /// Puts used elements at ring entry `from` on and moves the index behind them.
    fn answer(&self, from: u16, elements: &[(u32, u32)]) {
        let used = self.memory.area(self.places.used, used_bytes(SIZE));
        for (i, (id, len)) in elements.iter().enumerate() {
            let at = 4 + 8 * ((usize::from(from) + i) % usize::from(SIZE));
            used.store32(at, *id);
            used.store32(at + 4, *len);
        }
        used.store16(2, from.wrapping_add(elements.len() as u16));
    }

    /// Checks that the ring is broken for good and gives back the `left` chains that are out.
    fn refused(mut self, mut left: Vec<u32>) -> Fault {
        assert_eq!(self.driver.collect(), None);
        let fault = self.driver.fault().expect("the driver noticed nothing");
        self.answer(0, &[(0, 0)]);
        assert_eq!((self.driver.completed(), self.driver.collect()), (0, None));
        assert!(!self.driver.enable_calls() && !self.driver.enable_calls_delayed());
        let buffer = [Buffer { addr: BASE, len: 1 }];
        assert_eq!(self.driver.add(&buffer, &[], 77), Err(AddError::Broken(77)));
        assert_eq!(self.driver.fault(), Some(fault));
        while let Some(token) = self.driver.detach_unused() {
            let at = left.iter().position(|other| *other == token);
            left.swap_remove(at.expect("a token came back twice"));
        }
        assert!(left.is_empty(), "tokens were lost: {left:?}");
        assert_eq!((self.driver.free(), self.driver.in_flight()), (SIZE, 0));
        fault
    }
}

#[test]
fn used_id_outside_the_ring() {
    // 0x1_0000 would be 0 if it were cut to 16 bits before the check (as in CVE-2020-10723).
    for id in [u32::from(SIZE), 0x1_0000, u32::MAX] {
        let prey = Prey::new(2);
        prey.answer(0, &[(id, 0)]);
        assert_eq!(prey.refused(vec![0, 1]), Fault::BadIndex(id));
    }
}

#[test]
fn used_id_that_is_not_outstanding() {
    // 1 is the second descriptor of chain 0 and no head; 6 is free.
    for id in [1, 6] {
        let prey = Prey::new(2);
        prey.answer(0, &[(id, 0)]);
        assert_eq!(prey.refused(vec![0, 1]), Fault::NotOutstanding(id));
    }
}

#[test]
fn the_same_used_id_twice() {
    let mut prey = Prey::new(3);
    prey.answer(0, &[(2, 5), (2, 5)]);
    let used = prey.driver.collect().unwrap();
    assert_eq!((used.token, used.len), (1, 5));
    assert_eq!(prey.refused(vec![0, 2]), Fault::NotOutstanding(2));
}

#[test]
fn used_index_ahead_of_what_is_out() {
    let prey = Prey::new(2);
    prey.answer(0, &[(0, 0), (2, 0), (0, 0)]);
    assert_eq!(prey.refused(vec![0, 1]), Fault::IndexJump(3));
}

#[test]
fn used_index_ahead_of_what_is_published() {
    let mut prey = Prey::new(1);
    prey.driver.add(&[Buffer { addr: BASE, len: 1 }], &[], 1).unwrap();
    prey.answer(0, &[(0, 0), (2, 0)]);
    assert_eq!(prey.refused(vec![0, 1]), Fault::IndexJump(2));
}

#[test]
fn used_index_stepping_back() {
    let mut prey = Prey::new(3);
    prey.answer(0, &[(0, 0), (2, 0)]);
    assert_eq!(prey.driver.collect().map(|used| used.token), Some(0));
    assert_eq!(prey.driver.collect().map(|used| used.token), Some(1));
    prey.answer(0, &[(0, 0)]);
    assert_eq!(prey.refused(vec![2]), Fault::IndexJump(u16::MAX));
}

#[test]
fn a_device_that_scribbles_over_descriptors_changes_nothing() {
    let mut prey = Prey::new(3);
    let all = prey.memory.area(prey.places.desc, desc_bytes(SIZE));
    let avail = prey.memory.area(prey.places.avail, avail_bytes(SIZE));
    for fill in [0x00, 0xff, 0x03] {
        all.fill(0, &vec![fill; all.len()]);
        avail.fill(0, &vec![fill; avail.len()]);
    }
    prey.answer(0, &[(2, 0), (0, 0), (4, 0)]);
    let tokens: Vec<_> = std::iter::from_fn(|| prey.driver.collect()).map(|used| used.token).collect();
    assert_eq!(tokens, [1, 0, 2]);
    assert_eq!((prey.driver.free(), prey.driver.fault()), (SIZE, None));
    // All descriptors are linked as before: the longest chain uses each of them once.
    prey.driver.add(&[Buffer { addr: BASE, len: 1 }; 8], &[], 9).unwrap();
    let nexts: BTreeSet<_> = (0..7)
        .scan(avail.load16(4 + 2 * 3), |index, _| {
            *index = all.load16(16 * usize::from(*index) + 14);
            Some(*index)
        })
        .collect();
    assert_eq!(nexts.len(), 7);
    assert!(nexts.iter().all(|index| *index < SIZE));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn a_driver_survives_any_device(seed in any::<u64>(), indirect in any::<bool>(), event_idx in any::<bool>()) {
        let mut random = Random::new(seed);
        let places = Places::new(SIZE);
        let memory = Heap::new(places.bytes(desc_bytes(SIZE) * 4));
        let tables = places.tables(&memory, 4);
        let features = RingFeatures { indirect, event_idx };
        let mut driver = Driver::new(places.layout(&memory), features, Some(tables));
        let used = memory.area(places.used, used_bytes(SIZE));
        let (mut next, mut out) = (0u32, BTreeSet::new());
        let mut index = 0u16;
        for _ in 0..60 {
            let buffers = [Buffer { addr: BASE, len: 1 }; 4];
            let count = random.below(5);
            if driver.add(&buffers[..count], &buffers[..random.below(2)], next).is_ok() {
                out.insert(next);
                next += 1;
            }
            driver.publish();
            for _ in 0..random.below(4) {
                let at = 4 + 8 * random.below(SIZE.into());
                used.store32(at, likely(&mut random, SIZE) as u32);
                memory.store16(2 * random.below(memory.len() / 2), random.bits() as u16);
            }
            // Mostly believable, so that many elements are collected before the ring breaks.
            index = match random.below(8) {
                0 => random.bits() as u16,
                _ => index.wrapping_add(random.below(1 + usize::from(driver.in_flight().min(2))) as u16),
            };
            used.store16(2, index);
            while let Some(back) = driver.collect() {
                assert!(out.remove(&back.token), "token {} came back twice", back.token);
            }
            assert_eq!(usize::from(driver.in_flight()), out.len());
            driver.enable_calls();
            driver.enable_calls_delayed();
            driver.disable_calls();
        }
        while let Some(token) = driver.detach_unused() {
            assert!(out.remove(&token), "token {token} came back twice");
        }
        assert!(out.is_empty());
        assert_eq!(driver.free(), SIZE);
    }
}

/// Memory that answers every load with another number: the peer that writes between any two of our
/// loads. What was checked must be what is used.
#[derive(Clone)]
struct Restless {
    random: Rc<RefCell<Random>>,
    /// What indexes are near to, so that some of them are believed.
    near: Rc<RefCell<u16>>,
    len: usize,
}

impl Restless {
    /// Mostly a valid index of a descriptor.
    fn any(&self) -> u64 {
        let mut random = self.random.borrow_mut();
        if random.below(32) == 0 { random.bits() } else { random.below(SIZE.into()) as u64 }
    }
}

impl Words for Restless {
    type Table<E: Entry> = WordTable<Self>;

    fn table<E: Entry>(&self, at: usize, count: u16) -> Option<WordTable<Self>> {
        WordTable::new::<E>(self.clone(), at, count)
    }

    fn len(&self) -> usize {
        self.len
    }
    fn load16(&self, at: usize) -> u16 {
        // The used index, which a device loads once, when it takes the ring over.
        if at == 2 { 0 } else { self.any() as u16 }
    }
    fn load16_acquire(&self, _: usize) -> u16 {
        self.near.borrow().wrapping_add(self.random.borrow_mut().below(3) as u16)
    }
    fn store16(&self, _: usize, _: u16) {}
    fn store16_release(&self, _: usize, _: u16) {}
    fn load32(&self, _: usize) -> u32 {
        self.any() as u32
    }
    fn store32(&self, _: usize, _: u32) {}
    fn load64(&self, _: usize) -> u64 {
        // As the second half of a descriptor: a length, flags and a next one that may be valid.
        let mut random = self.random.borrow_mut();
        let flags = if random.below(32) == 0 { random.bits() } else { [0, 0, 1, 2, 3, 4][random.below(6)] };
        let (len, next) = (16 * random.below(9) as u64, random.below(SIZE.into()) as u64);
        len | (flags & 0xffff) << 32 | next << 48
    }
    fn store64(&self, _: usize, _: u64) {}
    fn full_fence() {}
}

impl Tables for Restless {
    fn descriptor(&mut self, _: u64) -> Option<[u8; 16]> {
        let both = u128::from(self.load64(0)) | u128::from(self.load64(8)) << 64;
        (self.random.borrow_mut().below(50) > 0).then(|| both.to_le_bytes())
    }
}

#[test]
fn memory_that_changes_between_loads_breaks_nothing() {
    let (mut chains_taken, mut tokens_back, mut faults) = (0, 0, 0);
    for seed in 0..4000 {
        let random = Rc::new(RefCell::new(Random::new(seed)));
        let near = Rc::new(RefCell::new(0));
        let mut words = Restless { random, near: Rc::clone(&near), len: 4096 };
        let layout = || Layout::new(SIZE, words.clone(), words.clone(), words.clone()).unwrap();
        let mut driver = Driver::new(layout(), ALL, None);
        let mut device = Device::new(layout(), ALL);
        let mut chains = Chains::new();
        let mut out = BTreeSet::new();
        let mut next = 0u16;
        for _ in 0..40 {
            while driver.add(&[Buffer { addr: 0, len: 1 }], &[], next).is_ok() {
                out.insert(next);
                next += 1;
            }
            driver.publish();
            near.replace(next - driver.in_flight());
            while let Some(used) = driver.collect() {
                assert!(out.remove(&used.token));
                tokens_back += 1;
            }
            near.replace(device.base());
            chains.clear();
            device.take(4, &mut words, &mut chains);
            check_burst(&chains, SIZE);
            chains_taken += chains.len();
            for chain in chains.iter() {
                device.complete(chain.head, 0);
            }
            device.publish();
            assert_eq!(device.used_index(), device.base());
        }
        faults += usize::from(device.fault().is_some()) + usize::from(driver.fault().is_some());
        while let Some(token) = driver.detach_unused() {
            assert!(out.remove(&token));
        }
        assert!(out.is_empty());
    }
    // Each way was walked often, or this test would show nothing.
    assert!(
        chains_taken > 1000 && tokens_back > 1000 && faults > 1000,
        "{chains_taken} {tokens_back} {faults}"
    );
}
