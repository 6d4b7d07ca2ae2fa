//! The device half of a packed ring against a driver that breaks the rules, named by clause or CVE.

mod common;
mod victim;

use std::collections::BTreeMap;

use common::{AVAIL, BASE, INDIRECT, Memory, NEXT, Places, USED, WRITE, bare, features};
use ringferry_memory::Words;
use ringferry_ring::{Buffer, Chain, Chains, Device, Done, Fault, LayoutError, RingFeatures};
use victim::{Raw, SIZE, Victim};

const ALL: RingFeatures = RingFeatures { indirect: true, event_idx: true, ..NONE };
const NONE: RingFeatures = bare(true);
/// The first position of a fresh ring.
const START: u16 = 0x8000;

/// A device-readable descriptor of one byte, without flags.
const PLAIN: Raw = (BASE, 1, 0, 0);

fn accepts(features: RingFeatures, descs: &[Raw]) -> Chain {
    let mut victim = Victim::new(features);
    victim.supply(START, descs);
    victim.take_one().expect("the chain was refused")
}

fn refuses(features: RingFeatures, descs: &[Raw]) -> Fault {
    let mut victim = Victim::new(features);
    victim.supply(START, descs);
    victim.take_one().expect_err("the chain was accepted")
}

/// A chain of `count` one-byte buffers.
fn chain(count: u16, id: u16) -> Vec<Raw> {
    (0..count).map(|i| (BASE, 1, id, if i + 1 < count { NEXT } else { 0 })).collect()
}

fn done(chains: &Chains) -> Vec<Done> {
    chains.iter().map(|chain| chain.done(0)).collect()
}

// ---- whose a descriptor is ----

#[test]
fn s2_8_1_available_is_avail_set_and_used_clear_in_the_first_lap_and_the_reverse_in_the_second() {
    for (wrap, owner) in [(START, AVAIL), (0, USED)] {
        for flags in [0, AVAIL, USED, AVAIL | USED] {
            let mut victim = Victim::new(NONE);
            victim.device = Device::new(victim.parts.clone(), NONE, wrap | 5, None).unwrap();
            victim.put(victim.places.desc + 16 * 5, (BASE, 1, 0, flags));
            assert_eq!(victim.device.has_chains(), flags == owner);
            assert_eq!(victim.take(), usize::from(flags == owner), "{wrap:#x} {flags:#x}");
            assert_eq!(victim.device.fault(), None);
        }
    }
}

#[test]
fn a_vring_base_outside_the_ring() {
    let victim = Victim::new(NONE);
    for base in [SIZE, 0x7fff, START | SIZE, 0xffff] {
        let refused = Device::new(victim.parts.clone(), NONE, base, None).err();
        assert_eq!(refused, Some(LayoutError::Base(base & 0x7fff)));
    }
    for base in [0, SIZE - 1, START | (SIZE - 1)] {
        assert_eq!(Device::new(victim.parts.clone(), NONE, base, None).unwrap().base(), base);
    }
}

/// As CVE-2016-5403: a driver that keeps marking slots available which the device has not given back.
#[test]
fn cve_2016_5403_available_flags_rewritten_for_slots_in_flight() {
    let mut victim = Victim::new(NONE);
    victim.supply(START, &[PLAIN; 8]);
    assert_eq!(victim.take(), 8);
    for lap in [0, START, 0, START] {
        victim.supply(lap, &[PLAIN; 8]);
        assert!(!victim.device.has_chains() && !victim.device.enable_kicks());
        assert_eq!((victim.take(), victim.device.fault()), (0, None));
    }
    // Room comes back with published completions, and no faster.
    let mut victim = Victim::new(NONE);
    victim.supply(START, &[PLAIN; 8]);
    assert_eq!(victim.take(), 8);
    victim.device.complete_all(done(&victim.chains).into_iter().take(3));
    victim.supply(0, &[PLAIN; 8]);
    assert_eq!((victim.take(), victim.device.fault()), (0, None));
    victim.device.publish();
    victim.supply(0, &[PLAIN; 8]);
    assert_eq!(victim.take(), 3);
    victim.supply(0, &[PLAIN; 8]);
    assert_eq!((victim.take(), victim.device.fault()), (0, None));
}

/// The empty check looks at one word, whatever is in the ring.
#[test]
fn cve_2026_16457_a_check_for_emptiness_ends() {
    for fill in [0x00, 0xff, 0x80, 0x7f, 0x01] {
        for features in features(true) {
            for size in [1, 2, SIZE] {
                let mut victim = Victim::sized(size, features);
                victim.memory.fill(0, &vec![fill; 16 * usize::from(size)]);
                victim.parts.desc.loads();
                let (has, asked) = (victim.device.has_chains(), victim.device.enable_kicks());
                assert_eq!(has, asked);
                assert_eq!(victim.parts.desc.loads(), BTreeMap::from([(8, 2)]), "{fill:#x}");
            }
        }
    }
}

#[test]
fn a_queue_of_one_entry() {
    let mut victim = Victim::sized(1, NONE);
    for lap in 0..5u16 {
        let at = if lap.is_multiple_of(2) { START } else { 0 };
        assert_eq!(victim.device.base(), at);
        victim.supply(at, &[(BASE, 7, lap, WRITE)]);
        assert_eq!(victim.take(), 1);
        let chain = victim.chains.chain(0);
        // The flags of either lap: nothing more to take while it is out.
        victim.supply(at ^ START, &[PLAIN]);
        assert_eq!(victim.take(), 0);
        victim.supply(at, &[(BASE, 7, lap, WRITE)]);
        assert_eq!((victim.take(), victim.device.fault()), (0, None));
        victim.device.complete(chain.done(7));
        assert!(victim.device.publish());
        let owner = if lap.is_multiple_of(2) { AVAIL | USED } else { 0 };
        let second = 7 | u64::from(lap) << 32 | u64::from(owner | WRITE) << 48;
        assert_eq!(victim.parts.desc.load64(8), second);
    }
    for features in [NONE, ALL] {
        let mut victim = Victim::sized(1, features);
        victim.supply(START, &[(BASE, 0, 0, NEXT)]);
        assert_eq!(victim.take_one(), Err(Fault::ChainTooLong));
    }
}

// ---- direct chains ----

#[test]
fn s2_8_6_a_chain_longer_than_the_ring_is_a_loop() {
    // Zero lengths as in CVE-2016-6490.
    let mut victim = Victim::new(NONE);
    victim.supply(START, &[(BASE, 0, 0, NEXT); 8]);
    victim.parts.desc.loads();
    assert_eq!(victim.take(), 0);
    let loads: usize = victim.parts.desc.loads().values().sum();
    assert_eq!(loads, 2 * usize::from(SIZE), "a walk is bounded by the ring size");
    assert_eq!(victim.refused(), Fault::ChainTooLong);
    // One that fills the ring is fine.
    let whole = accepts(NONE, &chain(SIZE, 3));
    assert_eq!((whole.id, whole.slots, whole.readable), (3, SIZE, SIZE));
}

#[test]
fn chains_are_limited_to_1024_buffers() {
    for (count, good) in [(1024, true), (1025, false)] {
        let mut victim = Victim::sized(2048, NONE);
        victim.supply(START, &chain(count, 0));
        assert_eq!(victim.take_one().is_ok(), good);
    }
}

#[test]
fn a_chain_over_slots_still_in_flight() {
    for (count, good) in [(5, true), (6, false), (8, false)] {
        let mut victim = Victim::new(NONE);
        victim.supply(START, &[PLAIN; 3]);
        assert_eq!(victim.take(), 3);
        victim.supply(START | 3, &chain(count, 9));
        assert_eq!(victim.take(), usize::from(good));
        if good {
            assert_eq!(victim.chains.chain(0).slots, 5);
        } else {
            assert_eq!(victim.refused(), Fault::ChainTooLong);
        }
    }
}

#[test]
fn s2_8_6_next_in_the_last_slot_goes_on_in_the_first_and_the_id_is_the_last_descriptors() {
    for lap in [START, 0] {
        let mut victim = Victim::new(NONE);
        victim.device = Device::new(victim.parts.clone(), NONE, lap | 6, None).unwrap();
        let end = victim.supply(lap | 6, &[(1, 1, 7, NEXT), (2, 2, 8, NEXT), (3, 3, 9, WRITE)]);
        assert_eq!(victim.take(), 1);
        let chain = victim.chains.chain(0);
        assert_eq!((chain.id, chain.slots, victim.device.base()), (9, 3, end));
        let buffer = |i| Buffer { addr: i, len: i as u32 };
        assert_eq!(victim.chains.readable(&chain), [buffer(1), buffer(2)]);
        assert_eq!(victim.chains.writable(&chain), [buffer(3)]);
    }
}

/// 2.8.5: a buffer id is the driver's own affair; it comes back as it was.
#[test]
fn a_buffer_id_of_any_value() {
    for id in [0, SIZE, 0x7fff, u16::MAX] {
        let mut victim = Victim::new(NONE);
        victim.supply(START, &[(BASE, 4, id, WRITE)]);
        assert_eq!(victim.take_one().unwrap().id, id);
        victim.device.complete_all(done(&victim.chains));
        victim.device.publish();
        assert_eq!((victim.parts.desc.load64(8) >> 32) as u16, id);
    }
}

#[test]
fn s2_8_6_readable_behind_writable() {
    let descs = [(BASE, 1, 0, WRITE | NEXT), (BASE, 1, 0, NEXT), (BASE, 1, 0, WRITE)];
    assert_eq!(refuses(NONE, &descs), Fault::ReadableAfterWritable);
    // A writable buffer without bytes is one nevertheless.
    let descs = [(BASE, 0, 0, WRITE | NEXT), (BASE, 1, 0, 0)];
    assert_eq!(refuses(NONE, &descs), Fault::ReadableAfterWritable);
}

#[test]
fn a_chain_of_four_gibibytes() {
    let half = 1 << 31;
    for (first, second) in [(0, 0), (WRITE, WRITE), (0, WRITE)] {
        let long = [(BASE, half, 0, first | NEXT), (BASE, half, 0, second)];
        assert_eq!(refuses(NONE, &long), Fault::ChainTooLarge);
        let chain = accepts(NONE, &[long[0], (BASE, half - 1, 0, second)]);
        assert_eq!(u64::from(chain.readable_len) + u64::from(chain.writable_len), u64::from(u32::MAX));
    }
}

#[test]
fn chains_in_front_of_a_bad_one_are_still_served() {
    let mut victim = Victim::new(NONE);
    victim.supply(START, &[(BASE, 1, 4, 0), (BASE, 2, 0, WRITE | NEXT), (BASE, 3, 0, 0), PLAIN]);
    assert_eq!(victim.take(), 1);
    assert_eq!((victim.chains.len(), victim.device.base()), (1, START | 1));
    victim.device.complete_all(done(&victim.chains));
    assert!(victim.device.publish());
    assert_eq!(victim.parts.desc.load64(8) >> 32, u64::from(AVAIL | USED) << 16 | 4);
    assert_eq!(victim.refused(), Fault::ReadableAfterWritable);
}

// ---- indirect tables ----

#[test]
fn s2_8_7_indirect_without_the_feature() {
    assert_eq!(refuses(NONE, &[(BASE, 16, 0, INDIRECT)]), Fault::BadIndirect);
}

#[test]
fn s2_8_7_indirect_with_next_or_behind_direct_descriptors() {
    // Without the NEXT this would be a good chain.
    assert_eq!(refuses(ALL, &[(BASE, 16, 0, INDIRECT | NEXT), PLAIN]), Fault::BadIndirect);
    accepts(ALL, &[(BASE, 16, 0, INDIRECT)]);
    // A list is of one kind; this differs from split rings, where it must be taken (2.7.5.3.2).
    assert_eq!(refuses(ALL, &[(BASE, 1, 0, NEXT), (BASE, 16, 0, INDIRECT)]), Fault::BadIndirect);
}

/// 2.8.7: in a table only WRITE means anything; other flags and ids are ignored, nesting included.
#[test]
fn s2_8_7_flags_in_a_table_but_write_are_ignored() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.supply(START, &[(table, 48, 5, INDIRECT)]);
    // The last one would be a loop if it were followed.
    victim.write(table, &[(1, 1, 99, 0), (2, 2, 98, NEXT | WRITE), (table, 48, 97, !NEXT)]);
    let chain = victim.take_one().unwrap();
    assert_eq!((chain.id, chain.slots), (5, 1));
    assert_eq!(victim.chains.readable(&chain), [Buffer { addr: 1, len: 1 }]);
    assert_eq!(victim.chains.writable(&chain), [Buffer { addr: 2, len: 2 }, Buffer { addr: table, len: 48 }]);
}

#[test]
fn s2_8_7_write_on_the_indirect_descriptor_is_ignored() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.supply(START, &[(table, 32, 0, INDIRECT | WRITE)]);
    victim.write(table, &[(BASE, 2, 0, 0), (BASE, 3, 0, WRITE)]);
    let chain = victim.take_one().unwrap();
    assert_eq!((chain.readable_len, chain.writable_len), (2, 3));
}

#[test]
fn empty_and_ragged_tables() {
    for len in [0, 1, 15, 17, 24, u32::MAX] {
        assert_eq!(refuses(ALL, &[(BASE, len, 0, INDIRECT)]), Fault::BadTable, "{len} bytes");
    }
}

#[test]
fn tables_outside_memory() {
    let end = BASE + Places::new(SIZE, true).bytes(0x1000) as u64;
    for addr in [0, BASE - 16, end, end - 15, u64::MAX, u64::MAX - 15, 1 << 63] {
        assert_eq!(refuses(ALL, &[(addr, 16, 0, INDIRECT)]), Fault::BadTable, "at {addr:#x}");
    }
    // The first descriptor is inside, the second is not.
    assert_eq!(refuses(ALL, &[(end - 16, 32, 0, INDIRECT)]), Fault::BadTable);
}

#[test]
fn s2_8_7_tables_longer_than_the_queue() {
    for (entries, good) in [(u32::from(SIZE), true), (u32::from(SIZE) + 1, false), (u32::MAX / 16, false)] {
        let mut victim = Victim::new(ALL);
        victim.supply(START, &[(victim.table(), 16 * entries, 0, INDIRECT)]);
        let taken = victim.take_one().map(|chain| u32::from(chain.readable));
        assert_eq!(taken, if good { Ok(entries) } else { Err(Fault::ChainTooLong) });
    }
}

#[test]
fn order_and_sum_hold_in_a_table() {
    for (first, second, fault) in [
        ((BASE, 0, 0, WRITE), (BASE, 1, 0, 0), Fault::ReadableAfterWritable),
        ((BASE, 1 << 31, 0, 0), (BASE, 1 << 31, 0, WRITE), Fault::ChainTooLarge),
    ] {
        let mut victim = Victim::new(ALL);
        let table = victim.table();
        victim.supply(START, &[(table, 32, 0, INDIRECT)]);
        victim.write(table, &[first, second]);
        assert_eq!(victim.take_one(), Err(fault));
    }
}

#[test]
fn tables_need_no_alignment() {
    for shift in 1..16 {
        let mut victim = Victim::new(ALL);
        let table = victim.table() + shift;
        victim.supply(START, &[(table, 32, 0, INDIRECT)]);
        victim.write(table, &[(0x1234_5678_9abc, 2, 0, 0), (BASE, 3, 0, WRITE)]);
        let chain = victim.take_one().unwrap();
        assert_eq!(victim.chains.readable(&chain), [Buffer { addr: 0x1234_5678_9abc, len: 2 }]);
        assert_eq!(victim.chains.writable(&chain), [Buffer { addr: BASE, len: 3 }]);
    }
}

// ---- event words ----

/// 2.8.14: flags 3 are reserved, positions may be outside the ring: a call too many is legal, a panic
/// is not.
#[test]
fn event_suppression_that_makes_no_sense() {
    for features in [NONE, ALL] {
        let mut victim = Victim::new(features);
        let mut at = START;
        for word in (0..=u16::MAX).step_by(3).flat_map(|off| [0, 1, 2, 3].map(|flags| (off, flags))) {
            let (off, flags): (u16, u32) = word;
            // Bits that are reserved must change nothing.
            victim.parts.driver.store32(0, u32::from(off) | (flags | u32::from(off) << 2 & 0xfffc) << 16);
            at = victim.supply(at, &[(BASE, 1, 0, 0); 3]);
            assert_eq!(victim.take(), 3);
            victim.device.complete_all(done(&victim.chains));
            let call = victim.device.publish();
            match flags {
                1 => assert!(!call),
                2 if features.event_idx => {}
                _ => assert!(call),
            }
        }
        assert_eq!(victim.device.fault(), None);
    }
}

// ---- reading once ----

#[test]
fn every_word_of_a_chain_is_loaded_once() {
    let mut victim = Victim::new(ALL);
    let next = (BASE, 1, 0, NEXT);
    victim.supply(START, &[next, next, (BASE, 1, 0, WRITE), PLAIN]);
    victim.parts.desc.loads();
    victim.parts.driver.loads();
    assert_eq!(victim.take(), 2);
    let once = [0, 8, 16, 24, 32, 40, 48, 56].map(|at| (at, 1));
    let mut loads = victim.parts.desc.loads();
    // The next slot, to find that there is nothing left.
    assert_eq!(loads.remove(&72), Some(1));
    assert_eq!(loads, BTreeMap::from(once));
    // Completing loads nothing, and publishing the peer's event word once.
    victim.device.complete_all(done(&victim.chains));
    assert!(victim.parts.driver.loads().is_empty());
    victim.device.publish();
    assert!(victim.parts.desc.loads().is_empty());
    assert_eq!(victim.parts.driver.loads(), BTreeMap::from([(0, 1)]));
}

/// 2.8.10: whoever stops and whoever starts agree by index and wrap counter; what was taken and not
/// used is there again.
#[test]
fn a_device_that_stopped_is_followed_by_one_that_goes_on() {
    let mut victim = Victim::new(NONE);
    victim.supply(START, &chain(3, 1));
    victim.supply(START | 3, &chain(3, 2));
    victim.supply(START | 6, &chain(2, 3));
    assert_eq!(victim.take(), 3);
    assert_eq!(victim.device.base(), 0);
    let first = victim.chains.chain(0);
    victim.device.untake(&[victim.chains.chain(1), victim.chains.chain(2)]);
    victim.device.complete(first.done(0));
    victim.device.publish();
    assert_eq!((victim.device.base(), victim.device.used_index()), (START | 3, START | 3));
    let mut next = Device::new(victim.parts.clone(), NONE, victim.device.base(), None).unwrap();
    let mut chains = Chains::new();
    assert_eq!(next.take(9, &mut victim.memory.tables(), &mut chains), 2);
    assert_eq!(chains.iter().map(|chain| chain.id).collect::<Vec<_>>(), [2, 3]);
}
