//! Driver half against device half: every chain comes back exactly once, and nobody sleeps through
//! work. Random steps of both sides over a [`World`], then long runs, then two real threads.

mod common;
mod world;

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use common::{Heap, Memory, Places, Random, Shared, all_features, features, fresh_base};
use proptest::prelude::*;
use ringferry_memory::Words;
use ringferry_ring::{Buffer, Chains, Device, Driver, RingFeatures, Unanswered};
use world::{Op, Setup, World};

fn setups() -> impl Strategy<Value = Setup> {
    let packed = prop_oneof![prop_oneof![Just(1u16), Just(2), Just(3), Just(255)], 1u16..300];
    (0usize..16, 0u32..=8, packed, 0u16..=16).prop_map(|(bits, log, packed, entries)| {
        let features = all_features().nth(bits).unwrap();
        Setup { features, size: if features.packed { packed } else { 1 << log }, entries }
    })
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0usize..6, 0usize..6).prop_map(|(readable, writable)| Op::Add { readable, writable }),
        1 => (0usize..260, 0usize..260).prop_map(|(readable, writable)| Op::Add { readable, writable }),
        3 => Just(Op::PublishChains),
        3 => (0usize..40).prop_map(Op::Collect),
        2 => any::<bool>().prop_map(|delayed| Op::Sleep { delayed }),
        1 => Just(Op::StopCalls),
        3 => (0usize..80).prop_map(Op::Take),
        1 => (0usize..8).prop_map(Op::Untake),
        6 => (any::<usize>(), any::<u32>()).prop_map(|(pick, len)| Op::Complete { pick, len }),
        3 => (0usize..40, any::<u32>()).prop_map(|(count, len)| Op::CompleteAll { count, len }),
        3 => Just(Op::PublishUsed),
        2 => Just(Op::Doze),
        1 => Just(Op::StopKicks),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_steps_on_the_heap(setup in setups(), ops in prop::collection::vec(ops(), 0..300)) {
        let mut world = World::<Heap>::new(setup);
        for op in ops {
            world.step(op);
        }
        world.drain();
    }

    #[test]
    fn any_order_of_steps_in_shared_memory(setup in setups(), ops in prop::collection::vec(ops(), 0..300)) {
        let mut world = World::<Shared>::new(setup);
        for op in ops {
            world.step(op);
        }
        world.drain();
    }

    #[test]
    fn detaching_returns_every_outstanding_token_once(
        setup in setups(),
        ops in prop::collection::vec(ops(), 0..200),
    ) {
        let mut world = World::<Heap>::new(setup);
        for op in ops {
            world.step(op);
        }
        world.tear_down();
    }
}

/// Random traffic of `chains` chains, both sides sleeping whenever they may.
fn traffic(setup: Setup, chains: u64, longest: usize, seed: u64) {
    let mut random = Random::new(seed);
    let mut world = World::<Heap>::new(setup);
    while world.next_token < chains {
        for _ in 0..random.below(2 * usize::from(setup.size)) + 1 {
            let readable = random.below(longest);
            let writable = random.below(longest) + usize::from(readable == 0);
            world.step(Op::Add { readable, writable });
        }
        world.step(Op::PublishChains);
        world.step(Op::Take(random.below(300)));
        if random.below(8) == 0 {
            world.step(Op::Untake(random.below(4)));
        }
        let leave = if random.below(4) == 0 { random.below(4) } else { 0 };
        while world.held() > leave {
            world.step(Op::Complete { pick: random.below(256), len: random.bits() as u32 });
            world.step(Op::CompleteAll { count: random.below(3), len: 5 });
        }
        if random.below(4) > 0 {
            world.step(Op::PublishUsed);
        }
        world.step(Op::Doze);
        world.step(Op::Collect(random.below(300)));
        world.step(Op::Sleep { delayed: random.below(2) == 0 });
        if world.out.len() == usize::from(setup.size) {
            world.drain();
        }
    }
    world.drain();
}

/// 2.7.13: until both indexes have wrapped around 65536.
#[test]
fn split_indexes_wrap_and_nothing_is_lost() {
    for (seed, features) in features(false).enumerate() {
        for size in [1, 2, 16, 256] {
            traffic(Setup { features, size, entries: 4 }, 70_000, 3, seed as u64);
        }
    }
}

/// 2.8.1: many laps, and chains that lie across the end of the ring.
#[test]
fn packed_wrap_counters_toggle_and_nothing_is_lost() {
    for (seed, features) in features(true).enumerate() {
        for size in [1, 2, 3, 5, 8, 31, 255, 300] {
            traffic(Setup { features, size, entries: 3 }, 30 * u64::from(size) + 500, 3, seed as u64);
        }
    }
}

/// 2.8: the largest packed ring, four laps; positions need all 15 bits.
#[test]
fn packed_queue_of_32768() {
    for event_idx in [false, true] {
        let features = RingFeatures { indirect: false, event_idx, packed: true, in_order: event_idx };
        let mut world = World::<Heap>::new(Setup { features, size: 32768, entries: 0 });
        let mut random = Random::new(9);
        while world.next_token < 400 {
            // Up to the longest chain a device takes.
            let readable = random.below(512);
            world.step(Op::Add { readable, writable: 1 + random.below(512) });
            world.step(Op::PublishChains);
            world.step(Op::Take(random.below(8)));
            world.step(Op::CompleteAll { count: random.below(8), len: 3 });
            world.step(Op::PublishUsed);
            world.step(Op::Doze);
            world.step(Op::Collect(random.below(8)));
            world.step(Op::Sleep { delayed: random.below(2) == 0 });
            if world.driver.free() < 1024 {
                world.drain();
            }
        }
        world.drain();
    }
}

/// 2.7.7, 2.7.10 and 2.8.10: a side that polls is left alone; in a split ring by the flag always and
/// by the event index but for one stale match in every turn of the index.
#[test]
fn polling_sides_are_not_notified() {
    for features in all_features() {
        let mut world = World::<Heap>::new(Setup { features, size: 8, entries: 0 });
        let (mut kicks, mut calls) = (0, 0);
        for _ in 0..140_000 {
            world.driver.add(&[Buffer { addr: 0, len: 1 }], &[], 0).unwrap();
            kicks += usize::from(world.driver.publish());
            world.chains.clear();
            world.device.take(1, &mut world.memory.tables(), &mut world.chains);
            world.device.complete(world.chains.chain(0).done(0));
            calls += usize::from(world.device.publish());
            world.driver.collect().unwrap();
        }
        let stale = if features.event_idx && !features.packed { 3 } else { 0 };
        assert_eq!((kicks, calls), (stale, stale), "{features:?}");
    }
}

/// 2.7.10, 2.8.10: with EVENT_IDX the position at which a driver wants to be called says what it has not looked at.
#[test]
fn a_driver_that_is_called_by_position_shows_what_it_has_not_taken() {
    for features in all_features() {
        let mut world = World::<Heap>::new(Setup { features, size: 8, entries: 0 });
        for round in 0..30 {
            assert!(!world.driver.enable_calls());
            let asked = world.device.unanswered();
            assert_eq!(asked.map(|asked| asked.entries), features.event_idx.then_some(0));
            for count in 1..=3 {
                world.driver.add(&[Buffer { addr: 0, len: 1 }], &[], 0).unwrap();
                world.driver.publish();
                world.chains.clear();
                world.device.take(1, &mut world.memory.tables(), &mut world.chains);
                world.device.complete(world.chains.chain(0).done(0));
                assert_eq!(world.device.publish(), count == 1 || !features.event_idx, "{round}");
                let expected = asked.map(|asked| Unanswered { entries: count, ..asked });
                assert_eq!(world.device.unanswered(), expected, "{features:?}, {round}");
            }
            while world.driver.collect().is_some() {}
        }
    }
}

/// 2.7.7.1, 2.7.10.2: with EVENT_IDX the flag words stay 0; without it they suppress signals.
#[test]
fn split_flags_are_zero_with_event_idx_and_suppress_signals_without() {
    for features in features(false) {
        let setup = Setup { features, size: 4, entries: 0 };
        let places = setup.places();
        let mut world = World::<Heap>::new(setup);
        let flags = |world: &World<Heap>| {
            let word = |addr| world.memory.area(addr, 2).load16(0);
            (word(places.driver), word(places.device))
        };
        let off = u16::from(!features.event_idx);
        assert_eq!(flags(&world), (off, off));
        assert!(!world.driver.enable_calls());
        assert!(!world.device.enable_kicks());
        assert_eq!(flags(&world), (0, 0));
        world.driver.disable_calls();
        world.device.disable_kicks();
        assert_eq!(flags(&world), (off, off));
    }
}

/// 2.8.14: RING_EVENT_FLAGS_DESC (2) only with EVENT_IDX, with the position and wrap counter of what
/// is waited for; else ENABLE (0) or DISABLE (1).
#[test]
fn packed_event_suppression_names_the_next_slot_with_event_idx() {
    for features in features(true) {
        let setup = Setup { features, size: 4, entries: 0 };
        let places = setup.places();
        let mut world = World::<Heap>::new(setup);
        let words = |world: &World<Heap>| {
            let word = |addr| world.memory.area(addr, 4).load32(0);
            (word(places.driver), word(places.device))
        };
        assert_eq!((words(&world).0 >> 16, words(&world).1 >> 16), (1, 1));
        // Slots 0 to 3 of the first lap, then of the second, each waited for by both sides.
        for slot in [0x8000, 0x8001, 0x8002, 0x8003, 0, 1, 2, 3, 0x8000] {
            assert!(!world.driver.enable_calls());
            assert!(!world.device.enable_kicks());
            let event = if features.event_idx { 2 << 16 | slot } else { 0 };
            assert_eq!(words(&world), (event, event));
            world.driver.add(&[Buffer { addr: 0, len: 1 }], &[], 0).unwrap();
            assert!(world.driver.publish(), "the kick that was asked for");
            world.chains.clear();
            assert_eq!(world.device.take(1, &mut world.memory.tables(), &mut world.chains), 1);
            world.device.complete(world.chains.chain(0).done(0));
            assert!(world.device.publish(), "the call that was asked for");
            world.driver.collect().unwrap();
            world.driver.disable_calls();
            world.device.disable_kicks();
            assert_eq!((words(&world).0 >> 16, words(&world).1 >> 16), (1, 1));
        }
    }
}

/// Sends a doorbell; like an eventfd, one that was not heard yet is not lost and not doubled.
fn ring(bell: &SyncSender<()>) {
    let _ = bell.try_send(());
}

fn wait(bell: &Receiver<()>, who: &str) {
    let heard = bell.recv_timeout(Duration::from_secs(30));
    assert!(heard.is_ok(), "lost wake-up: the {who} sleeps for ever");
}

/// Two threads, real memory order, real sleep: the device reads a number in each chain's first
/// buffer and writes its complement to the second.
#[test]
fn two_threads_sleep_and_wake_and_see_each_others_bytes() {
    const CHAINS: u64 = 30_000;
    const SIZE: u16 = 16;
    for features in all_features() {
        let places = Places::new(SIZE, features.packed);
        let memory = Shared::new(places.bytes(0x4000));
        let slots = places.rest + 0x2000;
        let tables = Some(places.tables(&memory, 2));
        let mut driver = Driver::new(places.parts(&memory), features, tables).unwrap();
        let base = fresh_base(features.packed);
        let mut device = Device::new(places.parts(&memory), features, base, None).unwrap();
        let (kick, kicked) = sync_channel(1);
        let (call, called) = sync_channel(1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (call, kicked) = (call, kicked);
                let mut translator = memory.map.translator();
                let mut tables = memory.map.translator();
                let mut chains = Chains::new();
                let mut done = 0;
                while done < CHAINS {
                    chains.clear();
                    if device.take(7, &mut tables, &mut chains) == 0 {
                        if !device.enable_kicks() {
                            wait(&kicked, "device");
                        }
                        device.disable_kicks();
                        continue;
                    }
                    for chain in chains.iter() {
                        let mut word = [0; 8];
                        translator.read(chains.readable(chain)[0].addr, 8).unwrap().copy_to(&mut word);
                        assert_eq!(u64::from_le_bytes(word), done);
                        let answer = (!done).to_le_bytes();
                        translator.write(chains.writable(chain)[0].addr, 8).unwrap().copy_from(&answer);
                        device.complete(chain.done(8));
                        done += 1;
                    }
                    if device.publish() {
                        ring(&call);
                    }
                }
            });
            let (kick, called) = (kick, called);
            let mut translator = memory.map.translator();
            let (mut sent, mut back) = (0, 0);
            while back < CHAINS {
                while sent < CHAINS && driver.in_flight() < SIZE && driver.free() > 1 {
                    let addr = slots + sent % 32 * 16;
                    translator.write(addr, 8).unwrap().copy_from(&u64::to_le_bytes(sent));
                    let buffer = |addr| [Buffer { addr, len: 8 }];
                    driver.add(&buffer(addr), &buffer(addr + 8), sent).unwrap();
                    sent += 1;
                    if sent.is_multiple_of(3) && driver.publish() {
                        ring(&kick);
                    }
                }
                if driver.publish() {
                    ring(&kick);
                }
                let before = back;
                while let Some(used) = driver.collect() {
                    let mut word = [0; 8];
                    translator.read(slots + used.token % 32 * 16 + 8, 8).unwrap().copy_to(&mut word);
                    assert_eq!((used.token, used.len, u64::from_le_bytes(word)), (back, 8, !back));
                    back += 1;
                }
                let delayed = back.is_multiple_of(2);
                if before == back {
                    let enough = if delayed { driver.enable_calls_delayed() } else { driver.enable_calls() };
                    if !enough {
                        wait(&called, "driver");
                    }
                    driver.disable_calls();
                }
            }
            assert_eq!((driver.fault(), driver.free()), (None, SIZE));
        });
    }
}
