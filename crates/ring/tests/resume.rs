//! A driver half whose device died, and what the next device finds: the ring as private memory knows it, whatever the dead
//! one has written over it.

mod common;

use common::{BASE, Heap, Memory, Places, Random, all_features, fresh_base};
use ringferry_memory::Words;
use ringferry_ring::{Buffer, Chains, Device, Driver, RingFeatures};

const SIZE: u16 = 16;
/// Longest chain that goes into an indirect table.
const ENTRIES: u16 = 3;

/// A chain as it was added.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sent {
    token: u32,
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
}

struct Scene {
    memory: Heap,
    places: Places,
    features: RingFeatures,
    driver: Driver<Heap, u32>,
    random: Random,
    /// Outstanding chains in the order they were added.
    out: Vec<Sent>,
    added: u32,
}

impl Scene {
    fn new(features: RingFeatures, seed: u64) -> Scene {
        let places = Places::new(SIZE, features.packed);
        let memory = Heap::new(places.bytes(places.table_bytes(ENTRIES)));
        let tables = places.tables(&memory, ENTRIES);
        let driver = Driver::new(places.parts(&memory), features, Some(tables)).unwrap();
        let random = Random::new(seed);
        Scene { memory, places, features, driver, random, out: Vec::new(), added: 0 }
    }

    /// Adds chains until the ring is full, or chance ends it; some of them stay unpublished.
    fn add(&mut self) {
        loop {
            let (readable, writable) = match self.random.below(4) {
                0 => (1, 0),
                1 => (0, 1),
                2 => (1, 2),
                _ => (self.random.below(5), 1),
            };
            let token = self.added;
            let buffer = |i: usize| Buffer { addr: u64::from(token) << 8 | i as u64, len: 1 + token % 1000 };
            let readable: Vec<_> = (0..readable).map(buffer).collect();
            let writable: Vec<_> = (10..10 + writable).map(buffer).collect();
            if self.driver.add(&readable, &writable, token).is_err() {
                self.driver.publish();
                return;
            }
            self.added += 1;
            self.out.push(Sent { token, readable, writable });
            match self.random.below(8) {
                0 => return,
                1 | 2 => drop(self.driver.publish()),
                _ => {}
            }
        }
    }

    /// A device at `base` takes some chains, uses some of those in any order that it may, and is gone. What the driver
    /// collected is no longer out.
    fn serve(&mut self, base: u16) {
        let mut device = Device::new(self.places.parts(&self.memory), self.features, base, None).unwrap();
        let mut chains = Chains::new();
        let most = self.random.below(20);
        device.take(most, &mut self.memory.tables(), &mut chains);
        assert_eq!(device.fault(), None, "an honest device finds an honest ring");
        for (chain, sent) in chains.iter().zip(&self.out) {
            assert_eq!(chains.readable(chain), sent.readable, "{}", sent.token);
            assert_eq!(chains.writable(chain), sent.writable, "{}", sent.token);
        }
        let mut left: Vec<_> = chains.iter().map(|chain| chain.done(0)).collect();
        while !left.is_empty() && self.random.below(4) > 0 {
            let pick = if self.features.in_order { 0 } else { self.random.below(left.len()) };
            device.complete(left.remove(pick));
            if self.random.below(2) == 0 {
                device.publish();
            }
        }
        while let Some(used) = self.driver.collect() {
            let at = self.out.iter().position(|sent| sent.token == used.token).unwrap();
            self.out.remove(at);
        }
        assert_eq!(self.driver.fault(), None);
    }

    /// Writes noise over everything that is shared.
    fn scribble(&mut self) {
        let bytes = self.places.bytes(self.places.table_bytes(ENTRIES));
        let all = self.memory.area(BASE, bytes);
        for at in (0..bytes - 7).step_by(8) {
            let noise = self.random.bits();
            all.store64(at, noise);
        }
    }
}

/// Whatever the device that died left behind, the next one gets every chain that is out, once, as it was added.
#[test]
fn d3_what_a_dead_device_scribbled_over_is_written_anew() {
    for features in all_features() {
        for seed in 0..20 {
            let mut scene = Scene::new(features, seed);
            let mut base = fresh_base(features.packed);
            for _ in 0..60 {
                scene.add();
                scene.serve(base);
                scene.add();
                scene.scribble();
                base = scene.driver.resume().unwrap();
                let (used, visible) = (scene.driver.in_flight(), scene.out.len());
                assert_eq!(usize::from(used), visible);
                let mut device =
                    Device::new(scene.places.parts(&scene.memory), features, base, None).unwrap();
                let mut chains = Chains::new();
                device.take(100, &mut scene.memory.tables(), &mut chains);
                assert_eq!((device.fault(), chains.len()), (None, visible), "{features:?} {seed}");
            }
        }
    }
}

/// What was used and not collected is offered again; what the used index says is not believed.
#[test]
fn d3_a_used_index_in_shared_memory_decides_nothing() {
    let features = RingFeatures { indirect: false, event_idx: false, packed: false, in_order: false };
    let mut scene = Scene::new(features, 1);
    let buffer = Buffer { addr: BASE, len: 1 };
    for token in 0..3 {
        scene.driver.add(&[buffer], &[], token).unwrap();
    }
    scene.driver.publish();
    scene.places.parts(&scene.memory).device.store16(2, 2);
    assert_eq!(scene.driver.resume(), Some(0));
    assert!(!scene.driver.has_used());
    // A broken ring is not gone on with.
    scene.places.parts(&scene.memory).device.store16(2, 40);
    assert_eq!(scene.driver.collect(), None);
    assert!(scene.driver.fault().is_some());
    assert_eq!(scene.driver.resume(), None);
}
