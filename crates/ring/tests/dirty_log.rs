//! The dirty log of a ring against an oracle: memory is compared before and after each step of the device half, and every page that
//! differs must be marked once the half has published, in all layouts, whatever the steps are.

mod common;
mod world;

use std::collections::BTreeSet;
use std::sync::Arc;

use common::{BASE, Memory, Shared, all_features};
use proptest::prelude::*;
use ringferry_memory::{DirtyLog, MapBudget, SharedMem};
use ringferry_ring::{RingAddresses, WriteLog, part_bytes};
use world::{Op, Setup, World};

const PAGE: usize = 4096;

/// Rings of several pages, of which the ends lie anywhere in a page, and tiny ones.
fn setups() -> impl Strategy<Value = Setup> {
    let packed = prop_oneof![Just(1u16), Just(255), Just(257), 900u16..1100];
    (0usize..16, 0u32..=11, packed).prop_map(|(bits, log, packed)| {
        let features = all_features().nth(bits).unwrap();
        Setup { features, size: if features.packed { packed } else { 1 << log }, entries: 0 }
    })
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0usize..3, 0usize..3).prop_map(|(readable, writable)| Op::Add { readable, writable }),
        1 => (1usize..200, 0usize..200).prop_map(|(readable, writable)| Op::Add { readable, writable }),
        3 => Just(Op::PublishChains),
        3 => (0usize..400).prop_map(Op::Collect),
        1 => Just(Op::StopCalls),
        4 => (0usize..400).prop_map(Op::Take),
        1 => (0usize..8).prop_map(Op::Untake),
        3 => (any::<usize>(), any::<u32>()).prop_map(|(pick, len)| Op::Complete { pick, len }),
        3 => (0usize..400, any::<u32>()).prop_map(|(count, len)| Op::CompleteAll { count, len }),
        4 => Just(Op::PublishUsed),
        2 => Just(Op::Doze),
        1 => Just(Op::StopKicks),
    ]
}

/// Compares memory around the steps of a world's device half with what its dirty log says.
struct Oracle {
    log: Arc<DirtyLog>,
    /// Pages that the device may write.
    allowed: BTreeSet<u64>,
    written: BTreeSet<u64>,
    marked: BTreeSet<u64>,
}

impl Oracle {
    fn new(world: &mut World<Shared>) -> Self {
        let places = world.setup.places();
        let pages = (BASE as usize + places.bytes(0)).div_ceil(PAGE);
        let file = SharedMem::new("dirty-log", pages.div_ceil(8)).unwrap();
        let log =
            DirtyLog::map_within(file.fd(), pages.div_ceil(8) as u64, 0, &MapBudget::unlimited()).unwrap();
        let packed = world.setup.features.packed;
        let addresses = RingAddresses::of(&places.parts(&world.memory), packed);
        world.device.set_log(Some(WriteLog::new(Arc::clone(&log), addresses)));
        let [desc, _, device] = part_bytes(world.setup.size, packed);
        let page_range = |addr: u64, len: usize| addr / 4096..=(addr + len as u64 - 1) / 4096;
        let mut allowed: BTreeSet<u64> = page_range(places.device, device).collect();
        if packed {
            allowed.extend(page_range(places.desc, desc));
        }
        Self { log, allowed, written: BTreeSet::new(), marked: BTreeSet::new() }
    }

    /// Makes a step, and returns the pages that were marked meanwhile.
    fn step(&mut self, world: &mut World<Shared>, op: Op) -> Vec<u64> {
        let before = snapshot(world);
        world.step(op);
        if matches!(op, Op::Add { .. } | Op::PublishChains | Op::Collect(_) | Op::StopCalls) {
            return Vec::new();
        }
        let after = snapshot(world);
        let pages = (BASE / 4096..).zip(before.chunks(PAGE).zip(after.chunks(PAGE)));
        self.written.extend(pages.filter(|(_, (before, after))| before != after).map(|(page, _)| page));
        let marked = self.log.take();
        self.marked.extend(&marked);
        assert!(self.marked.is_subset(&self.allowed), "{:?} of {:?}", self.marked, self.allowed);
        if matches!(op, Op::PublishUsed) {
            assert!(self.written.is_subset(&self.marked), "{:?} of {:?}", self.written, self.marked);
            self.written.clear();
            self.marked.clear();
        }
        marked
    }
}

fn snapshot(world: &World<Shared>) -> Vec<u8> {
    let len = world.setup.places().bytes(0);
    let mut bytes = vec![0; len];
    world.memory.area(BASE, len).read(0, len).unwrap().copy_to(&mut bytes);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_page_that_the_device_half_writes_is_marked(
        setup in setups(),
        ops in prop::collection::vec(ops(), 0..200),
    ) {
        let mut world = World::<Shared>::new(setup);
        let mut oracle = Oracle::new(&mut world);
        for op in ops {
            oracle.step(&mut world, op);
        }
        oracle.step(&mut world, Op::PublishUsed);
        world.drain();
    }
}

/// A lap, in which every used element or descriptor is written in turn, marks all pages that the device may write.
#[test]
fn every_page_of_a_ring_is_marked_in_a_lap() {
    for features in all_features() {
        let mut world = World::<Shared>::new(Setup { features, size: 1024, entries: 0 });
        let mut oracle = Oracle::new(&mut world);
        let mut seen = BTreeSet::new();
        for round in 0..128 {
            for _ in 0..8 {
                oracle.step(&mut world, Op::Add { readable: 1, writable: 0 });
            }
            oracle.step(&mut world, Op::PublishChains);
            oracle.step(&mut world, Op::Take(8));
            oracle.step(&mut world, Op::CompleteAll { count: 8, len: round });
            seen.extend(oracle.step(&mut world, Op::PublishUsed));
            seen.extend(oracle.step(&mut world, Op::Doze));
            oracle.step(&mut world, Op::Collect(8));
        }
        assert_eq!(seen, oracle.allowed, "{features:?}");
    }
}
