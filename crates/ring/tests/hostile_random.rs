//! Either half against random memory, written by a peer that breaks any rule at any time, or changing between any two
//! loads. The halves must not panic, loop or grow; they must use the values that they checked; they must not return a
//! chain twice; a fault must persist.

mod common;
mod victim;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use common::{AVAIL, BASE, Heap, Memory, Places, Random, USED, check_burst, features, fresh_base, likely};
use proptest::prelude::*;
use ringferry_memory::Words;
use ringferry_memory::testing::{Order, TestWords, Width};
use ringferry_ring::{Buffer, Chain, Chains, Device, Driver, Parts, RingFeatures, Tables, part_bytes};
use victim::{SIZE, Victim};

/// Descriptors and what shows them, as some driver might write them.
fn scribble(victim: &Victim, packed: bool, random: &mut Random) {
    let size = victim.places.size;
    let base = victim.device.base();
    let desc = |random: &mut Random| {
        let addr = match random.below(4) {
            0 => random.bits(),
            _ => victim.table() + 8 * random.below(64) as u64,
        };
        let len = if random.below(3) == 0 { random.bits() } else { likely(random, size) };
        let mut flags = if random.below(16) == 0 { random.bits() } else { random.below(8) as u64 } as u16;
        let other = likely(random, size) as u16;
        if packed {
            let lap = if random.below(6) == 0 { random.below(2) == 0 } else { base >> 15 != 0 };
            flags |= if lap { AVAIL } else { USED };
            (addr, len as u32, other, flags)
        } else {
            (addr, len as u32, flags, other)
        }
    };
    for _ in 0..random.below(2 * usize::from(size) + 2) {
        // A packed ring is read from its position on, so that is where to write.
        let near = usize::from(base & 0x7fff) + random.below(4);
        let index = if packed && random.below(2) == 0 { near } else { random.below(size.into()) };
        victim.put(victim.places.desc + 16 * (index % usize::from(size)) as u64, desc(random));
        victim.put(victim.table() + 16 * random.below(40) as u64, desc(random));
        if !packed {
            victim.parts.driver.store16(4 + 2 * random.below(size.into()), likely(random, size) as u16);
        }
    }
    if packed {
        victim.parts.driver.store32(0, random.bits() as u32);
    } else {
        let step = if random.below(16) == 0 { random.bits() as u16 } else { likely(random, size) as u16 };
        victim.parts.driver.store16(2, base.wrapping_add(step));
        victim.parts.driver.store16(0, random.bits() as u16);
        victim.parts.driver.store16(4 + 2 * usize::from(size), random.bits() as u16);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn a_device_survives_any_driver(
        seed in any::<u64>(), log in 0u32..=6, odd in 1u16..70, bits in 0usize..8, packed in any::<bool>(),
        raw in any::<bool>(),
    ) {
        let mut random = Random::new(seed);
        let features = features(packed).nth(bits).unwrap();
        let size = if packed { odd } else { 1 << log };
        let memory = Heap::new(Places::new(size, packed).bytes(0x400));
        if raw {
            let bytes: Vec<u8> = (0..memory.len()).map(|_| random.bits() as u8).collect();
            memory.fill(0, &bytes);
        }
        let mut victim = Victim::over(memory, size, features);
        if raw && !packed {
            // Random bytes everywhere, but an index that says there is something to look at.
            victim.parts.driver.store16(2, 1);
        }
        let mut out = 0;
        for _ in 0..20 {
            if !raw {
                scribble(&victim, packed, &mut random);
            }
            victim.parts.desc.loads();
            let taken = victim.take();
            check_burst(&victim.chains, size);
            assert_eq!(taken, victim.chains.len());
            let loads: usize = victim.parts.desc.loads().values().sum();
            // A split device first reads up to 32 chains as if each were one descriptor.
            assert!(loads <= 2 * 32 + (2 * usize::from(size) + 1) * (taken + 1));
            let slots: usize = victim.chains.iter().map(|chain| usize::from(chain.slots)).sum();
            out += slots;
            assert!(out <= size.into(), "more out than the ring holds");
            victim.device.enable_kicks();
            let keep = random.below(taken + 1);
            let chains: Vec<Chain> = victim.chains.iter().copied().collect();
            victim.device.untake(&chains[keep..]);
            victim.device.complete_all(chains[..keep].iter().map(|chain| chain.done(chain.writable_len)));
            out -= slots;
            victim.device.publish();
            if victim.device.fault().is_some() {
                victim.refused();
                return Ok(());
            }
        }
    }

    #[test]
    fn a_driver_survives_any_device(
        seed in any::<u64>(), bits in 0usize..8, packed in any::<bool>(), odd in 1u16..20,
    ) {
        let mut random = Random::new(seed);
        let features = features(packed).nth(bits).unwrap();
        let size = if packed { odd } else { SIZE };
        let places = Places::new(size, packed);
        let memory = Heap::new(places.bytes(places.table_bytes(4)));
        let tables = places.tables(&memory, 4);
        let parts = places.parts(&memory);
        let mut driver = Driver::new(parts.clone(), features, Some(tables)).unwrap();
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
                memory.store16(2 * random.below(memory.len() / 2), random.bits() as u16);
                let id = likely(&mut random, size);
                if packed {
                    let flags = [0, AVAIL | USED, AVAIL | USED, AVAIL, USED][random.below(5)];
                    let second = random.bits() >> 32 | (id & 0xffff) << 32 | u64::from(flags) << 48;
                    parts.desc.store64(16 * random.below(size.into()) + 8, second);
                } else {
                    parts.device.store32(4 + 8 * random.below(size.into()), id as u32);
                }
            }
            if !packed {
                // Mostly believable, so that many elements are collected before the ring breaks.
                index = match random.below(8) {
                    0 => random.bits() as u16,
                    _ => index.wrapping_add(random.below(1 + usize::from(driver.in_flight().min(2))) as u16),
                };
                parts.device.store16(2, index);
            }
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
        assert_eq!(driver.free(), size);
    }
}

/// Memory that returns another number for every load, like a peer that writes between any two loads. A half must use
/// the value that it checked.
#[derive(Clone)]
struct Restless {
    random: Rc<RefCell<Random>>,
    /// A value near which indexes are chosen, so that some of them are plausible.
    near: Rc<RefCell<u16>>,
    packed: bool,
    len: usize,
}

impl Restless {
    /// Mostly a valid index of a descriptor.
    fn any(&self) -> u64 {
        let mut random = self.random.borrow_mut();
        if random.below(32) == 0 { random.bits() } else { random.below(SIZE.into()) as u64 }
    }

    /// As the second half of a descriptor: a length, flags and a next one that may be valid.
    fn half(&self) -> u64 {
        let mut random = self.random.borrow_mut();
        let flags = if random.below(32) == 0 { random.bits() } else { [0, 0, 1, 2, 3, 4][random.below(6)] };
        let (len, next) = (16 * random.below(9) as u64, random.below(SIZE.into()) as u64);
        if !self.packed {
            return len | (flags & 0xffff) << 32 | next << 48;
        }
        let owner = [AVAIL, USED, AVAIL | USED, 0][random.below(4)];
        len | next << 32 | (flags & 0xffff | u64::from(owner)) << 48
    }
}

impl TestWords for Restless {
    fn size(&self) -> usize {
        self.len
    }
    fn load(&self, at: usize, width: Width, order: Order) -> u64 {
        match (width, order) {
            // The used index, which a device loads once, when it takes the ring over.
            (Width::Two, Order::Relaxed) if at == 2 => 0,
            (Width::Two, Order::Ordered) => {
                self.near.borrow().wrapping_add(self.random.borrow_mut().below(3) as u16).into()
            }
            (Width::Two | Width::Four, _) => self.any(),
            (Width::Eight, _) => self.half(),
        }
    }
    fn store(&self, _: usize, _: Width, _: Order, _: u64) {}
    fn fence() {}
}

impl Tables for Restless {
    fn descriptor(&mut self, _: u64) -> Option<[u8; 16]> {
        let both = u128::from(self.half()) | u128::from(self.half()) << 64;
        (self.random.borrow_mut().below(50) > 0).then(|| both.to_le_bytes())
    }
}

#[test]
fn memory_that_changes_between_loads_breaks_nothing() {
    for (packed, in_order) in [(false, false), (false, true), (true, false), (true, true)] {
        restless(RingFeatures { indirect: true, event_idx: true, packed, in_order });
    }
}

fn restless(features: RingFeatures) {
    let (mut chains_taken, mut tokens_back, mut faults) = (0, 0, 0);
    for seed in 0..2000 {
        let random = Rc::new(RefCell::new(Random::new(seed)));
        let near = Rc::new(RefCell::new(0));
        let mut words = Restless { random, near: Rc::clone(&near), packed: features.packed, len: 4096 };
        assert!(part_bytes(SIZE, features.packed).iter().all(|len| *len <= words.len));
        let (desc, driver, device) = (words.clone(), words.clone(), words.clone());
        let parts = Parts { size: SIZE, desc, driver, device };
        let mut driver = Driver::new(parts.clone(), features, None).unwrap();
        let mut device = Device::new(parts, features, fresh_base(features.packed), None).unwrap();
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
            assert_eq!(usize::from(driver.in_flight()), out.len());
            near.replace(device.base());
            chains.clear();
            device.take(4, &mut words, &mut chains);
            check_burst(&chains, SIZE);
            chains_taken += chains.len();
            device.complete_all(chains.iter().map(|chain| chain.done(0)));
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
        "{features:?}: {chains_taken} {tokens_back} {faults}"
    );
}
