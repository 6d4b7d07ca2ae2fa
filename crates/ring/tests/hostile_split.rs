//! The device half of a split ring against a driver that breaks the rules, named by clause or CVE.

mod common;
mod victim;

use std::collections::BTreeMap;

use common::{BASE, INDIRECT, Memory, NEXT, Places, WRITE, bare};
use ringferry_memory::{GuestMemory, SharedMem, Words};
use ringferry_ring::{Buffer, Chains, Device, Fault, RingFeatures, Tables};
use victim::{Raw, SIZE, Victim};

const ALL: RingFeatures = RingFeatures { indirect: true, event_idx: true, ..NONE };
const NONE: RingFeatures = bare(false);

fn refuses(features: RingFeatures, descs: &[Raw]) -> Fault {
    let mut victim = Victim::new(features);
    victim.descriptors(descs);
    victim.take_one().expect_err("the chain was accepted")
}

// ---- the available ring ----

#[test]
fn s2_7_13_available_index_ahead_by_more_than_the_ring() {
    let mut victim = Victim::new(NONE);
    victim.parts.driver.store16(2, SIZE + 1);
    assert_eq!(victim.take(), 0);
    assert_eq!(victim.refused(), Fault::IndexJump(SIZE + 1));
}

#[test]
fn s2_7_6_1_available_index_stepping_back() {
    let mut victim = Victim::new(NONE);
    victim.descriptors(&[(BASE, 1, 0, 0); 2]);
    victim.offer(0, &[0, 1]);
    assert_eq!(victim.take(), 2);
    victim.parts.driver.store16(2, 1);
    assert_eq!(victim.take(), 0);
    assert_eq!(victim.refused(), Fault::IndexJump(u16::MAX));
}

#[test]
fn cve_2016_5403_more_requests_than_ring_entries() {
    let mut victim = Victim::new(NONE);
    victim.descriptors(&[(BASE, 1, 0, 0); 8]);
    victim.offer(0, &[0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(victim.take(), 8);
    // Room comes back with completions, and no faster.
    victim.device.complete(victim.chains.chain(3).done(0));
    victim.offer(8, &[3]);
    assert_eq!(victim.take(), 1);
    victim.offer(9, &[0]);
    assert_eq!(victim.take(), 0);
    assert_eq!(victim.refused(), Fault::IndexJump(1));
}

#[test]
fn a_device_that_died_with_chains_in_hand_is_followed_by_one_that_takes_them_again() {
    let mut victim = Victim::new(NONE);
    victim.descriptors(&[(BASE, 1, 0, 0); 8]);
    victim.offer(0, &[0, 1, 2, 3]);
    assert_eq!(victim.take(), 4);
    victim.device.complete(victim.chains.chain(0).done(0));
    victim.device.publish();
    // It dies here, having completed one of four.
    let mut next = Device::new(victim.places.parts(&victim.memory), NONE, 0, None).unwrap();
    assert_eq!(next.base(), 1);
    let mut chains = Chains::new();
    assert_eq!(next.take(8, &mut victim.memory.tables(), &mut chains), 3);
    assert_eq!(chains.iter().map(|chain| chain.id).collect::<Vec<_>>(), [1, 2, 3]);
}

#[test]
fn cve_2011_2512_head_outside_the_ring() {
    for head in [SIZE, 0x8000, u16::MAX] {
        let mut victim = Victim::new(NONE);
        victim.offer(0, &[head]);
        assert_eq!(victim.take(), 0);
        assert_eq!(victim.refused(), Fault::BadIndex(head.into()));
    }
}

#[test]
fn chains_in_front_of_a_bad_one_are_still_served() {
    let mut victim = Victim::new(NONE);
    victim.descriptors(&[(BASE, 1, 0, 0), (BASE, 2, WRITE | NEXT, 2), (BASE, 3, 0, 0)]);
    victim.offer(0, &[0, 1, 0]);
    assert_eq!(victim.take(), 1);
    assert_eq!((victim.chains.len(), victim.device.base()), (1, 1));
    let chain = victim.chains.chain(0);
    assert_eq!(victim.chains.readable(&chain), [Buffer { addr: BASE, len: 1 }]);
    victim.device.complete(chain.done(0));
    assert!(victim.device.publish());
    assert_eq!(victim.refused(), Fault::ReadableAfterWritable);
}

// ---- direct chains ----

#[test]
fn cve_2016_6490_zero_length_descriptors_in_a_loop() {
    let loops: [&[Raw]; 3] = [
        &[(BASE, 0, NEXT, 0)],
        &[(BASE, 0, NEXT, 1), (BASE, 0, NEXT, 0)],
        &[(0, 0, NEXT | WRITE, 1), (0, 0, NEXT | WRITE, 2), (0, 0, NEXT | WRITE, 1)],
    ];
    loops.into_iter().for_each(assert_walk_ends);
}

/// As in SPDK, with descriptors that have bytes.
#[test]
fn cve_2019_9547_a_circular_chain_ends_at_the_ring_size() {
    let circles: [&[Raw]; 3] = [
        &[(BASE, 1, NEXT, 0)],
        &[(BASE, 1, NEXT, 1), (BASE, 1, NEXT, 2), (BASE, 1, NEXT, 0)],
        &[(BASE, 1, NEXT, 1), (BASE, 1, NEXT | WRITE, 2), (BASE, 1, NEXT | WRITE, 1)],
    ];
    circles.into_iter().for_each(assert_walk_ends);
}

/// A chain that goes round in a circle is refused once as many of its descriptors were read as the ring has.
#[track_caller]
fn assert_walk_ends(descs: &[Raw]) {
    let mut victim = Victim::new(NONE);
    victim.descriptors(descs);
    victim.offer(0, &[0]);
    victim.parts.desc.loads();
    assert_eq!(victim.take(), 0);
    let loads: usize = victim.parts.desc.loads().values().sum();
    assert_eq!(loads, 2 * usize::from(SIZE), "a walk is bounded by the ring size");
    assert_eq!(victim.refused(), Fault::ChainTooLong);
}

#[test]
fn s2_7_5_next_outside_the_ring() {
    assert_eq!(refuses(NONE, &[(BASE, 1, NEXT, SIZE)]), Fault::BadIndex(SIZE.into()));
    assert_eq!(refuses(ALL, &[(BASE, 1, NEXT, u16::MAX)]), Fault::BadIndex(65535));
}

#[test]
fn s2_7_4_2_readable_behind_writable() {
    let descs = [(BASE, 1, WRITE | NEXT, 1), (BASE, 1, NEXT, 2), (BASE, 1, WRITE, 0)];
    assert_eq!(refuses(NONE, &descs), Fault::ReadableAfterWritable);
    // A writable buffer without bytes is one nevertheless.
    let descs = [(BASE, 0, WRITE | NEXT, 1), (BASE, 1, 0, 0)];
    assert_eq!(refuses(NONE, &descs), Fault::ReadableAfterWritable);
}

#[test]
fn s2_7_5_a_chain_of_four_gibibytes() {
    let half = 1 << 31;
    for (first, second) in [(0, 0), (WRITE, WRITE), (0, WRITE)] {
        let descs = [(BASE, half, first | NEXT, 1), (BASE, half, second, 0)];
        assert_eq!(refuses(NONE, &descs), Fault::ChainTooLarge);
        let mut victim = Victim::new(NONE);
        victim.descriptors(&[(BASE, half, first | NEXT, 1), (BASE, half - 1, second, 0)]);
        let chain = victim.take_one().unwrap();
        assert_eq!(u64::from(chain.readable_len) + u64::from(chain.writable_len), u64::from(u32::MAX));
    }
}

#[test]
fn a_chain_as_long_as_the_ring_is_accepted() {
    let mut victim = Victim::new(NONE);
    let descs: Vec<_> = (0..SIZE).map(|i| (BASE, 1, if i + 1 < SIZE { NEXT } else { 0 }, i + 1)).collect();
    victim.descriptors(&descs);
    assert_eq!(victim.take_one().unwrap().readable, SIZE);
}

/// 2.7.5: flag bits without meaning are no reason to refuse a chain.
#[test]
fn unknown_descriptor_flags_are_ignored() {
    let mut victim = Victim::new(NONE);
    victim.descriptors(&[(BASE, 5, 0xfff8, 99)]);
    assert_eq!(victim.take_one().unwrap().readable_len, 5);
}

// ---- indirect tables ----

#[test]
fn s2_7_5_3_1_indirect_without_the_feature() {
    let mut victim = Victim::new(NONE);
    let table = victim.table();
    victim.descriptors(&[(table, 16, INDIRECT, 0)]);
    victim.write(table, &[(BASE, 1, 0, 0)]);
    assert_eq!(victim.take_one(), Err(Fault::BadIndirect));
}

#[test]
fn s2_7_5_3_1_indirect_with_next() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    // Without NEXT this would be a good chain.
    victim.descriptors(&[(table, 16, INDIRECT | NEXT, 1), (BASE, 1, 0, 0)]);
    victim.write(table, &[(BASE, 1, 0, 0)]);
    assert_eq!(victim.take_one(), Err(Fault::BadIndirect));
}

#[test]
fn s2_7_5_3_1_indirect_inside_a_table() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.descriptors(&[(table, 32, INDIRECT, 0)]);
    // Into itself, which would be a loop.
    victim.write(table, &[(BASE, 1, NEXT, 1), (table, 32, INDIRECT, 0)]);
    assert_eq!(victim.take_one(), Err(Fault::BadIndirect));
}

#[test]
fn s2_7_5_3_empty_and_ragged_tables() {
    for len in [0, 1, 15, 17, 24, u32::MAX] {
        assert_eq!(refuses(ALL, &[(BASE, len, INDIRECT, 0)]), Fault::BadTable, "{len} bytes");
    }
}

#[test]
fn tables_outside_memory() {
    let end = BASE + Places::new(SIZE, false).bytes(0x1000) as u64;
    for addr in [0, BASE - 16, end, end - 15, u64::MAX, u64::MAX - 15, 1 << 63] {
        assert_eq!(refuses(ALL, &[(addr, 16, INDIRECT, 0)]), Fault::BadTable, "at {addr:#x}");
    }
    // The first descriptor is inside, the second is not, or its address wraps around.
    let mut victim = Victim::new(ALL);
    victim.descriptors(&[(end - 16, 32, INDIRECT, 0)]);
    victim.write(end - 16, &[(BASE, 1, NEXT, 1)]);
    assert_eq!(victim.take_one(), Err(Fault::BadTable));
}

#[test]
fn s2_7_5_3_1_chain_in_a_table_longer_than_the_queue() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    let len = SIZE + 1;
    victim.descriptors(&[(table, 16 * u32::from(len), INDIRECT, 0)]);
    let descs: Vec<_> = (0..len).map(|i| (BASE, 1, if i + 1 < len { NEXT } else { 0 }, i + 1)).collect();
    victim.write(table, &descs);
    assert_eq!(victim.take_one(), Err(Fault::ChainTooLong));
    // It is the chain that counts, not the table.
    let mut victim = Victim::new(ALL);
    victim.descriptors(&[(table, 16 * u32::from(len), INDIRECT, 0)]);
    victim.write(table, &descs[1..]);
    victim.put(table, (BASE, 1, NEXT, SIZE - 1));
    victim.put(table + 16 * u64::from(SIZE - 1), (BASE, 2, WRITE, 0));
    assert_eq!(victim.take_one().unwrap().writable_len, 2);
}

#[test]
fn a_loop_in_a_table_ends_at_the_queue_size() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.descriptors(&[(table, 32, INDIRECT, 0)]);
    victim.write(table, &[(BASE, 0, NEXT, 1), (BASE, 0, NEXT, 0)]);
    assert_eq!(victim.take_one(), Err(Fault::ChainTooLong));
}

#[test]
fn next_outside_the_table() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.descriptors(&[(table, 16, INDIRECT, 0)]);
    victim.write(table, &[(BASE, 1, NEXT, 1), (BASE, 1, 0, 0)]);
    assert_eq!(victim.take_one(), Err(Fault::BadIndex(1)));
}

#[test]
fn s2_7_5_3_2_direct_descriptors_followed_by_one_indirect() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.descriptors(&[(BASE, 1, NEXT, 5), (0, 0, 0, 0)]);
    victim.put(victim.places.desc + 16 * 5, (table, 32, INDIRECT, 0));
    victim.write(table, &[(BASE, 2, NEXT, 1), (BASE, 3, WRITE, 0)]);
    let chain = victim.take_one().unwrap();
    assert_eq!((chain.readable, chain.writable), (2, 1));
    assert_eq!((chain.readable_len, chain.writable_len), (3, 3));
    // Direct and indirect ones together count against the queue size.
    let mut victim = Victim::new(ALL);
    victim.descriptors(&[(BASE, 1, NEXT, 1), (table, 16 * u32::from(SIZE), INDIRECT, 0)]);
    let descs: Vec<_> = (0..SIZE).map(|i| (BASE, 1, if i + 1 < SIZE { NEXT } else { 0 }, i + 1)).collect();
    victim.write(table, &descs);
    assert_eq!(victim.take_one(), Err(Fault::ChainTooLong));
    // And the order of readable and writable ones holds across the border.
    let mut victim = Victim::new(ALL);
    victim.descriptors(&[(BASE, 1, WRITE | NEXT, 1), (table, 16, INDIRECT, 0)]);
    victim.write(table, &[(BASE, 1, 0, 0)]);
    assert_eq!(victim.take_one(), Err(Fault::ReadableAfterWritable));
}

#[test]
fn s2_7_5_3_2_write_on_the_indirect_descriptor_is_ignored() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.descriptors(&[(table, 32, INDIRECT | WRITE, 0)]);
    victim.write(table, &[(BASE, 2, NEXT, 1), (BASE, 3, WRITE, 0)]);
    let chain = victim.take_one().unwrap();
    assert_eq!((chain.readable_len, chain.writable_len), (2, 3));
}

#[test]
fn s2_7_5_3_tables_need_no_alignment() {
    for shift in 1..16 {
        let mut victim = Victim::new(ALL);
        let table = victim.table() + shift;
        victim.descriptors(&[(table, 32, INDIRECT, 0)]);
        victim.write(table, &[(0x1234_5678_9abc, 2, NEXT, 1), (BASE, 3, WRITE, 0)]);
        let chain = victim.take_one().unwrap();
        assert_eq!(victim.chains.readable(&chain), [Buffer { addr: 0x1234_5678_9abc, len: 2 }]);
        assert_eq!(victim.chains.writable(&chain), [Buffer { addr: BASE, len: 3 }]);
    }
}

#[test]
fn cve_2018_1059_a_table_across_two_regions_is_read_from_both() {
    let files = [SharedMem::new("low", 0x1000).unwrap(), SharedMem::new("high", 0x1000).unwrap()];
    let regions = [files[0].map_at(BASE).unwrap(), files[1].map_at(BASE + 0x1000).unwrap()];
    let map = GuestMemory::new(regions.to_vec()).unwrap();
    let bytes: [u8; 16] = std::array::from_fn(|i| i as u8 + 1);
    for first in 1..16 {
        let addr = BASE + 0x1000 - first;
        let (low, high) = bytes.split_at(first as usize);
        map.translator().write(addr, low.len()).unwrap().copy_from(low);
        map.translator().write(BASE + 0x1000, high.len()).unwrap().copy_from(high);
        assert_eq!(map.translator().descriptor(addr), Some(bytes));
    }
    assert_eq!(map.translator().descriptor(BASE + 0x2000 - 15), None);
    assert_eq!(map.translator().descriptor(BASE - 1), None);
}

// ---- reading once ----

#[test]
fn every_word_of_a_chain_is_loaded_once() {
    let mut victim = Victim::new(ALL);
    victim.descriptors(&[(BASE, 1, NEXT, 1), (BASE, 1, NEXT, 2), (BASE, 1, WRITE, 0), (BASE, 1, 0, 0)]);
    victim.offer(0, &[0, 3]);
    victim.parts.desc.loads();
    victim.parts.driver.loads();
    assert_eq!(victim.take(), 2);
    let once = |offsets: &[usize]| offsets.iter().map(|at| (*at, 1)).collect::<BTreeMap<_, _>>();
    assert_eq!(victim.parts.desc.loads(), once(&[0, 8, 16, 24, 32, 40, 48, 56]));
    let mut avail = victim.parts.driver.loads();
    // The index: once to begin with, once more to find that there is nothing left.
    assert_eq!(avail.remove(&2), Some(2));
    assert_eq!(avail, once(&[4, 6]));
}
