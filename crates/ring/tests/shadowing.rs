//! Shadowing: a half never loads a shared word it owns, nor one that it has no reason to trust. With
//! it switched off, as only an experiment does, the same code reads them back and works all the same.

mod common;
mod world;

use common::{Heap, Memory, Places, Random, all_features, features, fresh_base, watched};
use ringferry_memory::Words;
use ringferry_memory::testing::{Spied, Spy};
use ringferry_ring::{Buffer, Chains, Device, Driver, Parts, RingFeatures, Tables};
use world::{Op, Setup, World};

const SIZE: u16 = 8;

/// Traffic between a driver and a device that see the same memory through `ours` and `theirs`: all
/// calls there are, two laps and more.
fn exchange<D: Words, V: Words>(
    features: RingFeatures,
    driver: &mut Driver<D, u32>,
    device: &mut Device<V>,
    tables: &mut impl Tables,
) {
    let buffer = [Buffer { addr: 0, len: 1 }];
    let mut chains = Chains::new();
    for round in 0..20 {
        driver.add(&buffer, &buffer, round).unwrap();
        driver.add(&buffer, &[], 100 + round).unwrap();
        driver.publish();
        assert!(device.has_chains());
        device.enable_kicks();
        device.disable_kicks();
        chains.clear();
        assert_eq!(device.take(9, tables, &mut chains), 2);
        device.untake(&[chains.chain(1)]);
        chains.truncate(1);
        assert_eq!(device.take(9, tables, &mut chains), 1);
        device.complete_all(chains.iter().map(|chain| chain.done(0)));
        device.publish();
        assert!(driver.has_used());
        driver.enable_calls();
        driver.enable_calls_delayed();
        assert_eq!(driver.collect().unwrap().token, round);
        assert_eq!(driver.collect().unwrap().token, 100 + round);
        driver.disable_calls();
        assert_eq!((driver.in_flight(), driver.free()), (0, SIZE));
        assert_eq!(device.base(), device.used_index());
    }
    assert_eq!((driver.fault(), device.fault()), (None, None));
    driver.add(&buffer, &[], 99).unwrap();
    assert_eq!(driver.detach_unused(), Some(99), "{features:?}");
}

#[test]
fn what_a_half_owns_it_never_loads() {
    for features in all_features() {
        let places = Places::new(SIZE, features.packed);
        let memory = Heap::new(places.bytes(places.table_bytes(2)));
        let tables = places.tables(&memory, 2);
        let (ours, theirs) = (watched(places.parts(&memory)), watched(places.parts(&memory)));
        let table_area = common::Watched::new(tables.area);
        let tables = ringferry_ring::IndirectTables {
            area: table_area.clone(),
            addr: tables.addr,
            entries: tables.entries,
        };
        let mut driver = Driver::new(ours.clone(), features, Some(tables)).unwrap();
        let base = fresh_base(features.packed);
        let mut device = Device::new(theirs.clone(), features, base, None).unwrap();
        // Reading its own words once, to take the ring over, is allowed.
        ours.driver.loads();
        theirs.device.loads();
        exchange(features, &mut driver, &mut device, &mut memory.tables());
        assert!(ours.driver.loads().is_empty(), "driver: {features:?}");
        assert!(theirs.device.loads().is_empty(), "device: {features:?}");
        assert!(table_area.loads().is_empty(), "tables: {features:?}");
        let read_back = ours.desc.loads();
        if features.packed {
            // Only the second words, which the device writes too; addresses never.
            assert!(read_back.keys().all(|at| at % 16 == 8), "driver: {features:?} {read_back:?}");
        } else {
            assert!(read_back.is_empty(), "driver: {features:?} {read_back:?}");
        }
    }
}

/// One look at the peer's index, or flags, for a burst: as long as the cached one lasts it is not
/// loaded again.
#[test]
fn what_the_peer_owns_is_loaded_once_per_burst() {
    for features in features(false) {
        let places = Places::new(SIZE, false);
        let memory = Heap::new(places.bytes(0));
        let (ours, theirs) = (watched(places.parts(&memory)), watched(places.parts(&memory)));
        let mut driver = Driver::new(ours.clone(), features, None).unwrap();
        let mut device = Device::new(theirs.clone(), features, 0, None).unwrap();
        for token in 0..6 {
            driver.add(&[Buffer { addr: 0, len: 1 }], &[], token).unwrap();
        }
        driver.publish();
        let mut chains = Chains::new();
        theirs.driver.loads();
        for _ in 0..6 {
            assert_eq!(device.take(1, &mut memory.tables(), &mut chains), 1);
        }
        assert_eq!(theirs.driver.loads().get(&2), Some(&1), "available index: {features:?}");
        for chain in chains.iter() {
            device.complete(chain.done(0));
        }
        device.publish();
        ours.device.loads();
        for token in 0..6 {
            assert_eq!(driver.collect().unwrap().token, token);
        }
        assert_eq!(ours.device.loads().get(&2), Some(&1), "used index: {features:?}");
    }
}

/// A memory for which rings keep no shadows.
#[derive(Clone)]
struct Seen;
impl Spy for Seen {
    const SHADOW: bool = false;
}

struct Unshadowed(Heap);

impl Memory for Unshadowed {
    type Words = Spied<Heap, Seen>;

    fn new(bytes: usize) -> Self {
        Unshadowed(<Heap as Memory>::new(bytes))
    }

    fn area(&self, addr: u64, len: usize) -> Spied<Heap, Seen> {
        Spied { words: self.0.area(addr, len), spy: Seen }
    }

    fn tables(&self) -> impl Tables + '_ {
        self.0.tables()
    }
}

/// The exchange of `exchange.rs` over memory without shadows, with every feature.
#[test]
fn without_shadows_everything_works() {
    for (seed, features) in all_features().enumerate() {
        for size in [1, 2, 8, 64, 3, 31] {
            if !features.packed && size & (size - 1) != 0 {
                continue;
            }
            let mut random = Random::new(seed as u64);
            let mut world = World::<Unshadowed>::new(Setup { features, size, entries: 3 });
            for _ in 0..3000 {
                let some = random.below(2 * usize::from(size) + 1);
                world.step(match random.below(12) {
                    0..3 => Op::Add { readable: random.below(3), writable: random.below(3) },
                    3 => Op::PublishChains,
                    4 => Op::Take(some),
                    5 => Op::Untake(random.below(3)),
                    6 => Op::Complete { pick: some, len: random.bits() as u32 },
                    7 => Op::CompleteAll { count: some, len: random.bits() as u32 },
                    8 => Op::PublishUsed,
                    9 => [Op::Doze, Op::StopKicks][random.below(2)],
                    10 => Op::Collect(some),
                    _ => [Op::Sleep { delayed: some.is_multiple_of(2) }, Op::StopCalls][random.below(2)],
                });
            }
            world.drain();
            world.step(Op::Add { readable: 1, writable: 0 });
            world.tear_down();
        }
    }
}

/// The switch switches: without shadows the driver and the device load words they own.
#[test]
fn without_shadows_own_words_are_read_back() {
    #[derive(Clone, Default)]
    struct Count(std::rc::Rc<std::cell::Cell<usize>>);
    impl Spy for Count {
        const SHADOW: bool = false;
        fn load(&self, _: usize) {
            self.0.update(|n| n + 1);
        }
    }
    for features in all_features() {
        let places = Places::new(SIZE, features.packed);
        let memory = Heap::new(places.bytes(0));
        let [own_driver, own_device] = [Count::default(), Count::default()];
        let parts = |driver: &Count, device: &Count| {
            let Parts { size, desc, driver: d, device: v } = places.parts(&memory);
            let spied = |words: Heap, spy: &Count| Spied { words, spy: spy.clone() };
            Parts {
                size,
                desc: spied(desc, &Count::default()),
                driver: spied(d, driver),
                device: spied(v, device),
            }
        };
        let other = Count::default();
        let mut driver = Driver::new(parts(&own_driver, &other), features, None).unwrap();
        let base = fresh_base(features.packed);
        let mut device = Device::new(parts(&other, &own_device), features, base, None).unwrap();
        own_device.0.set(0);
        own_driver.0.set(0);
        exchange(features, &mut driver, &mut device, &mut memory.tables());
        assert!(own_driver.0.get() >= 20 && own_device.0.get() >= 20, "{features:?}");
    }
}
