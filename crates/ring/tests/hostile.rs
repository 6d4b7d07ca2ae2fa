//! Each half against a peer that breaks the rules: named violations first, then random memory, then
//! memory that changes between any two loads.

mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use common::{BASE, Heap, INDIRECT, Memory, NEXT, Places, Random, WRITE};
use proptest::prelude::*;
use ringferry_memory::{GuestMemory, SharedMem, Words};
use ringferry_ring::split::driver::AddError;
use ringferry_ring::split::{Device, Driver, Layout, avail_bytes, desc_bytes, used_bytes};
use ringferry_ring::{Buffer, Chain, Chains, Fault, RingFeatures, Tables};

const SIZE: u16 = 8;
const ALL: RingFeatures = RingFeatures { indirect: true, event_idx: true };
const NONE: RingFeatures = RingFeatures { indirect: false, event_idx: false };

/// Words that remember how often each offset was loaded.
#[derive(Clone)]
struct Watched {
    words: Heap,
    loads: Rc<RefCell<BTreeMap<usize, usize>>>,
}

impl Watched {
    fn new(words: Heap) -> Self {
        Watched { words, loads: Rc::default() }
    }

    fn note(&self, at: usize) -> &Heap {
        *self.loads.borrow_mut().entry(at).or_default() += 1;
        &self.words
    }

    /// The loads since the last time of asking, by offset.
    fn loads(&self) -> BTreeMap<usize, usize> {
        self.loads.take()
    }
}

impl Words for Watched {
    fn len(&self) -> usize {
        self.words.len()
    }
    fn load16(&self, at: usize) -> u16 {
        self.note(at).load16(at)
    }
    fn load16_acquire(&self, at: usize) -> u16 {
        self.note(at).load16_acquire(at)
    }
    fn store16(&self, at: usize, value: u16) {
        self.words.store16(at, value);
    }
    fn store16_release(&self, at: usize, value: u16) {
        self.words.store16_release(at, value);
    }
    fn load32(&self, at: usize) -> u32 {
        self.note(at).load32(at)
    }
    fn store32(&self, at: usize, value: u32) {
        self.words.store32(at, value);
    }
    fn load64(&self, at: usize) -> u64 {
        self.note(at).load64(at)
    }
    fn store64(&self, at: usize, value: u64) {
        self.words.store64(at, value);
    }
    fn full_fence() {
        Heap::full_fence();
    }
}

/// A device, and memory that the test writes as the driver would or should not.
struct Victim {
    memory: Heap,
    places: Places,
    desc: Watched,
    avail: Watched,
    device: Device<Watched>,
    chains: Chains,
}

impl Victim {
    fn new(features: RingFeatures) -> Self {
        Self::over(Heap::new(Places::new(SIZE).bytes(0x1000)), SIZE, features)
    }

    fn over(memory: Heap, size: u16, features: RingFeatures) -> Self {
        let places = Places::new(size);
        let desc = Watched::new(memory.area(places.desc, desc_bytes(size)));
        let avail = Watched::new(memory.area(places.avail, avail_bytes(size)));
        let used = Watched::new(memory.area(places.used, used_bytes(size)));
        let layout = Layout::new(size, desc.clone(), avail.clone(), used).unwrap();
        let device = Device::new(layout, features, 0);
        Victim { memory, places, desc, avail, device, chains: Chains::new() }
    }

    /// Where tests put indirect tables.
    fn table(&self) -> u64 {
        self.places.rest
    }

    /// Writes one descriptor at a guest address, which may be odd.
    fn put(&self, addr: u64, desc: (u64, u32, u16, u16)) {
        let mut bytes = desc.0.to_le_bytes().to_vec();
        bytes.extend(desc.1.to_le_bytes());
        bytes.extend(desc.2.to_le_bytes());
        bytes.extend(desc.3.to_le_bytes());
        for (i, byte) in bytes.into_iter().enumerate() {
            let at = (addr - BASE) as usize + i;
            let mut pair = self.memory.load16(at & !1).to_le_bytes();
            pair[at & 1] = byte;
            self.memory.store16(at & !1, u16::from_le_bytes(pair));
        }
    }

    /// Writes descriptors of the ring, from index 0 on: address, length, flags, next.
    fn descriptors(&self, descs: &[(u64, u32, u16, u16)]) {
        for (i, desc) in descs.iter().enumerate() {
            self.put(self.places.desc + 16 * i as u64, *desc);
        }
    }

    /// Writes descriptors of an indirect table.
    fn indirect(&self, table: u64, descs: &[(u64, u32, u16, u16)]) {
        for (i, desc) in descs.iter().enumerate() {
            self.put(table + 16 * i as u64, *desc);
        }
    }

    /// Makes `heads` available from ring entry `from` on.
    fn offer(&self, from: u16, heads: &[u16]) {
        let mut index = from;
        for head in heads {
            self.avail.store16(4 + 2 * usize::from(index % self.places.size), *head);
            index = index.wrapping_add(1);
        }
        self.avail.store16(2, index);
    }

    fn take(&mut self) -> usize {
        self.chains.clear();
        self.device.take(usize::MAX, &mut self.memory.tables(), &mut self.chains)
    }

    /// Takes the one chain that starts at descriptor 0, or says why not.
    fn take_one(&mut self) -> Result<Chain, Fault> {
        self.offer(0, &[0]);
        match self.take() {
            0 => Err(self.refused()),
            _ => {
                assert_eq!((self.chains.len(), self.device.fault()), (1, None));
                Ok(self.chains.chain(0))
            }
        }
    }

    /// Checks that the ring is broken for good, and says for what.
    fn refused(&mut self) -> Fault {
        let fault = self.device.fault().expect("the device noticed nothing");
        let base = self.device.base();
        let before = self.chains.len();
        // Even a driver that now behaves, or offers something else, is not served.
        self.descriptors(&[(BASE, 1, 0, 0)]);
        self.offer(base, &[0]);
        assert_eq!((self.device.available(), self.device.refresh()), (0, 0));
        assert!(!self.device.enable_kicks());
        let taken = self.device.take(usize::MAX, &mut self.memory.tables(), &mut self.chains);
        assert_eq!((taken, self.chains.len()), (0, before));
        assert_eq!((self.device.fault(), self.device.base()), (Some(fault), base));
        self.device.break_with(Fault::BadTable);
        assert_eq!(self.device.fault(), Some(fault), "the first violation is the one remembered");
        fault
    }
}

fn refuses(features: RingFeatures, descs: &[(u64, u32, u16, u16)]) -> Fault {
    let mut victim = Victim::new(features);
    victim.descriptors(descs);
    victim.take_one().expect_err("the chain was accepted")
}

// ---- the available ring ----

#[test]
fn s2_6_6_available_index_ahead_by_more_than_the_ring() {
    let mut victim = Victim::new(NONE);
    victim.avail.store16(2, SIZE + 1);
    assert_eq!(victim.take(), 0);
    assert_eq!(victim.refused(), Fault::IndexJump(SIZE + 1));
}

#[test]
fn s2_6_13_available_index_stepping_back() {
    let mut victim = Victim::new(NONE);
    victim.descriptors(&[(BASE, 1, 0, 0); 2]);
    victim.offer(0, &[0, 1]);
    assert_eq!(victim.take(), 2);
    victim.avail.store16(2, 1);
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
    victim.device.complete(3, 0);
    victim.offer(8, &[3]);
    assert_eq!(victim.take(), 1);
    victim.offer(9, &[0]);
    assert_eq!(victim.take(), 0);
    assert_eq!(victim.refused(), Fault::IndexJump(1));
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
    victim.device.complete(chain.head, 0);
    assert!(victim.device.publish());
    assert_eq!(victim.refused(), Fault::ReadableAfterWritable);
}

// ---- direct chains ----

#[test]
fn cve_2016_6490_zero_length_descriptors_in_a_loop() {
    let loops: [&[(u64, u32, u16, u16)]; 3] = [
        &[(BASE, 0, NEXT, 0)],
        &[(BASE, 0, NEXT, 1), (BASE, 0, NEXT, 0)],
        &[(0, 0, NEXT | WRITE, 1), (0, 0, NEXT | WRITE, 2), (0, 0, NEXT | WRITE, 1)],
    ];
    for descs in loops {
        let mut victim = Victim::new(NONE);
        victim.descriptors(descs);
        victim.offer(0, &[0]);
        victim.desc.loads();
        assert_eq!(victim.take(), 0);
        let loads: usize = victim.desc.loads().values().sum();
        assert_eq!(loads, 2 * usize::from(SIZE), "a walk is bounded by the ring size");
        assert_eq!(victim.refused(), Fault::ChainTooLong);
    }
}

#[test]
fn s2_6_5_next_outside_the_ring() {
    assert_eq!(refuses(NONE, &[(BASE, 1, NEXT, SIZE)]), Fault::BadIndex(SIZE.into()));
    assert_eq!(refuses(ALL, &[(BASE, 1, NEXT, u16::MAX)]), Fault::BadIndex(65535));
}

#[test]
fn s2_6_4_2_readable_behind_writable() {
    let descs = [(BASE, 1, WRITE | NEXT, 1), (BASE, 1, NEXT, 2), (BASE, 1, WRITE, 0)];
    assert_eq!(refuses(NONE, &descs), Fault::ReadableAfterWritable);
    // A writable buffer without bytes is one nevertheless.
    let descs = [(BASE, 0, WRITE | NEXT, 1), (BASE, 1, 0, 0)];
    assert_eq!(refuses(NONE, &descs), Fault::ReadableAfterWritable);
}

#[test]
fn s2_6_5_a_chain_of_four_gibibytes() {
    let half = 1 << 31;
    for (first, second) in [(0, 0), (WRITE, WRITE), (0, WRITE)] {
        let descs = [(BASE, half, first | NEXT, 1), (BASE, half, second, 0)];
        assert_eq!(refuses(NONE, &descs), Fault::ChainTooLarge);
        let mut victim = Victim::new(NONE);
        victim.descriptors(&[(BASE, half, first | NEXT, 1), (BASE, half - 1, second, 0)]);
        let chain = victim.take_one().unwrap();
        assert_eq!(u64::from(chain.readable_len) + u64::from(chain.writable_len), u32::MAX.into());
    }
}

#[test]
fn a_chain_as_long_as_the_ring_is_accepted() {
    let mut victim = Victim::new(NONE);
    let descs: Vec<_> = (0..SIZE).map(|i| (BASE, 1, if i + 1 < SIZE { NEXT } else { 0 }, i + 1)).collect();
    victim.descriptors(&descs);
    assert_eq!(victim.take_one().unwrap().readable, SIZE);
}

/// 2.6.5: flag bits without meaning are no reason to refuse a chain.
#[test]
fn unknown_descriptor_flags_are_ignored() {
    let mut victim = Victim::new(NONE);
    victim.descriptors(&[(BASE, 5, 0xfff8, 99)]);
    assert_eq!(victim.take_one().unwrap().readable_len, 5);
}

// ---- indirect tables ----

#[test]
fn s2_6_5_3_1_indirect_without_the_feature() {
    assert_eq!(refuses(NONE, &[(BASE, 16, INDIRECT, 0)]), Fault::BadIndirect);
}

#[test]
fn s2_6_5_3_1_indirect_with_next() {
    assert_eq!(refuses(ALL, &[(BASE, 16, INDIRECT | NEXT, 1)]), Fault::BadIndirect);
}

#[test]
fn s2_6_5_3_1_indirect_inside_a_table() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.descriptors(&[(table, 32, INDIRECT, 0)]);
    // Into itself, which would be a loop.
    victim.indirect(table, &[(BASE, 1, NEXT, 1), (table, 32, INDIRECT, 0)]);
    assert_eq!(victim.take_one(), Err(Fault::BadIndirect));
}

#[test]
fn s2_6_5_3_empty_and_ragged_tables() {
    for len in [0, 1, 15, 17, 24, u32::MAX] {
        assert_eq!(refuses(ALL, &[(BASE, len, INDIRECT, 0)]), Fault::BadTable, "{len} bytes");
    }
}

#[test]
fn tables_outside_memory() {
    let end = BASE + Places::new(SIZE).bytes(0x1000) as u64;
    for addr in [0, BASE - 16, end, end - 15, u64::MAX, u64::MAX - 15, 1 << 63] {
        assert_eq!(refuses(ALL, &[(addr, 16, INDIRECT, 0)]), Fault::BadTable, "at {addr:#x}");
    }
    // The first descriptor is inside, the second is not, or its address wraps around.
    let mut victim = Victim::new(ALL);
    victim.descriptors(&[(end - 16, 32, INDIRECT, 0)]);
    victim.indirect(end - 16, &[(BASE, 1, NEXT, 1)]);
    assert_eq!(victim.take_one(), Err(Fault::BadTable));
}

#[test]
fn s2_6_5_3_1_chain_in_a_table_longer_than_the_queue() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    let len = SIZE + 1;
    victim.descriptors(&[(table, 16 * u32::from(len), INDIRECT, 0)]);
    let descs: Vec<_> = (0..len).map(|i| (BASE, 1, if i + 1 < len { NEXT } else { 0 }, i + 1)).collect();
    victim.indirect(table, &descs);
    assert_eq!(victim.take_one(), Err(Fault::ChainTooLong));
    // It is the chain that counts, not the table.
    let mut victim = Victim::new(ALL);
    victim.descriptors(&[(table, 16 * u32::from(len), INDIRECT, 0)]);
    victim.indirect(table, &descs[1..]);
    victim.put(table, (BASE, 1, NEXT, SIZE - 1));
    victim.put(table + 16 * u64::from(SIZE - 1), (BASE, 2, WRITE, 0));
    assert_eq!(victim.take_one().unwrap().writable_len, 2);
}

#[test]
fn a_loop_in_a_table_ends_at_the_queue_size() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.descriptors(&[(table, 32, INDIRECT, 0)]);
    victim.indirect(table, &[(BASE, 0, NEXT, 1), (BASE, 0, NEXT, 0)]);
    assert_eq!(victim.take_one(), Err(Fault::ChainTooLong));
}

#[test]
fn next_outside_the_table() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.descriptors(&[(table, 16, INDIRECT, 0)]);
    victim.indirect(table, &[(BASE, 1, NEXT, 1), (BASE, 1, 0, 0)]);
    assert_eq!(victim.take_one(), Err(Fault::BadIndex(1)));
}

#[test]
fn s2_6_5_3_2_direct_descriptors_followed_by_one_indirect() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.descriptors(&[(BASE, 1, NEXT, 5), (0, 0, 0, 0)]);
    victim.put(victim.places.desc + 16 * 5, (table, 32, INDIRECT, 0));
    victim.indirect(table, &[(BASE, 2, NEXT, 1), (BASE, 3, WRITE, 0)]);
    let chain = victim.take_one().unwrap();
    assert_eq!((chain.readable, chain.writable), (2, 1));
    assert_eq!((chain.readable_len, chain.writable_len), (3, 3));
    // Direct and indirect ones together count against the queue size.
    let mut victim = Victim::new(ALL);
    victim.descriptors(&[(BASE, 1, NEXT, 1), (table, 16 * u32::from(SIZE), INDIRECT, 0)]);
    let descs: Vec<_> = (0..SIZE).map(|i| (BASE, 1, if i + 1 < SIZE { NEXT } else { 0 }, i + 1)).collect();
    victim.indirect(table, &descs);
    assert_eq!(victim.take_one(), Err(Fault::ChainTooLong));
    // And the order of readable and writable ones holds across the border.
    let mut victim = Victim::new(ALL);
    victim.descriptors(&[(BASE, 1, WRITE | NEXT, 1), (table, 16, INDIRECT, 0)]);
    victim.indirect(table, &[(BASE, 1, 0, 0)]);
    assert_eq!(victim.take_one(), Err(Fault::ReadableAfterWritable));
}

#[test]
fn s2_6_5_3_2_write_on_the_indirect_descriptor_is_ignored() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.descriptors(&[(table, 32, INDIRECT | WRITE, 0)]);
    victim.indirect(table, &[(BASE, 2, NEXT, 1), (BASE, 3, WRITE, 0)]);
    let chain = victim.take_one().unwrap();
    assert_eq!((chain.readable_len, chain.writable_len), (2, 3));
}

#[test]
fn s2_6_5_3_tables_need_no_alignment() {
    for shift in 1..16 {
        let mut victim = Victim::new(ALL);
        let table = victim.table() + shift;
        victim.descriptors(&[(table, 32, INDIRECT, 0)]);
        victim.indirect(table, &[(0x1234_5678_9abc, 2, NEXT, 1), (BASE, 3, WRITE, 0)]);
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
    victim.desc.loads();
    victim.avail.loads();
    assert_eq!(victim.take(), 2);
    let once = |offsets: &[usize]| offsets.iter().map(|at| (*at, 1)).collect::<BTreeMap<_, _>>();
    assert_eq!(victim.desc.loads(), once(&[0, 8, 16, 24, 32, 40, 48, 56]));
    let mut avail = victim.avail.loads();
    // The index: once to begin with, once more to find that there is nothing left.
    assert_eq!(avail.remove(&2), Some(2));
    assert_eq!(avail, once(&[4, 6]));
}

/// Shared words a half owns are stored and never loaded back.
#[test]
fn what_a_half_owns_it_never_loads() {
    let memory = Heap::new(Places::new(SIZE).bytes(0));
    let places = Places::new(SIZE);
    let areas =
        [(places.desc, desc_bytes(SIZE)), (places.avail, avail_bytes(SIZE)), (places.used, used_bytes(SIZE))];
    let watch = || areas.map(|(addr, len)| Watched::new(memory.area(addr, len)));
    let make = |[desc, avail, used]: [Watched; 3]| Layout::new(SIZE, desc, avail, used).unwrap();
    for features in common::FEATURES {
        let (ours, theirs) = (watch(), watch());
        let mut driver = Driver::new(make(ours.clone()), features, None);
        let mut device = Device::new(make(theirs.clone()), features, 0);
        theirs[2].loads();
        for round in 0..20 {
            driver.add(&[Buffer { addr: BASE, len: 1 }], &[], round).unwrap();
            driver.publish();
            let mut chains = Chains::new();
            device.take(1, &mut memory.tables(), &mut chains);
            device.enable_kicks();
            device.complete(chains.chain(0).head, 0);
            device.publish();
            device.disable_kicks();
            driver.enable_calls_delayed();
            assert_eq!(driver.collect().unwrap().token, round);
            driver.disable_calls();
        }
        driver.add(&[Buffer { addr: BASE, len: 1 }], &[], 99).unwrap();
        assert_eq!(driver.detach_unused(), Some(99));
        assert!(ours[0].loads().is_empty() && ours[1].loads().is_empty(), "driver: {features:?}");
        assert!(theirs[2].loads().is_empty(), "device: {features:?}");
        // The next round starts a fresh ring.
        memory.fill(0, &vec![0; memory.len()]);
    }
}

// ---- the driver half ----

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
    let nexts: std::collections::BTreeSet<_> = (0..7)
        .scan(avail.load16(4 + 2 * 3), |index, _| {
            *index = all.load16(16 * usize::from(*index) + 14);
            Some(*index)
        })
        .collect();
    assert_eq!(nexts.len(), 7);
    assert!(nexts.iter().all(|index| *index < SIZE));
}

// ---- random ----

/// What must be true of every chain a device hands out, whatever the driver wrote.
fn check_burst(chains: &Chains, size: u16) {
    for chain in chains.iter() {
        let (readable, writable) = (chains.readable(chain), chains.writable(chain));
        assert!(chain.head < size);
        assert!((1..=usize::from(size)).contains(&(readable.len() + writable.len())));
        let sum = |buffers: &[Buffer]| buffers.iter().map(|buffer| u64::from(buffer.len)).sum::<u64>();
        assert_eq!((sum(readable), sum(writable)), (chain.readable_len.into(), chain.writable_len.into()));
        assert!(sum(readable) + sum(writable) < 1 << 32);
    }
}

/// Values of which some lead deep into the code and some are nonsense.
fn likely(random: &mut Random, size: u16) -> u64 {
    match random.below(6) {
        0 => random.bits(),
        1 => random.bits() >> 48,
        2 => 16 * random.below(20) as u64,
        _ => random.below(usize::from(size) + 1) as u64,
    }
}

fn scribble(victim: &Victim, random: &mut Random) {
    let size = victim.places.size;
    let desc = |random: &mut Random| {
        let addr = match random.below(4) {
            0 => random.bits(),
            _ => victim.table() + 8 * random.below(64) as u64,
        };
        let len = if random.below(3) == 0 { random.bits() } else { likely(random, size) };
        let flags = if random.below(16) == 0 { random.bits() } else { random.below(8) as u64 };
        (addr, len as u32, flags as u16, likely(random, size) as u16)
    };
    for _ in 0..random.below(2 * usize::from(size) + 2) {
        victim.put(victim.places.desc + 16 * random.below(size.into()) as u64, desc(random));
        victim.put(victim.table() + 16 * random.below(40) as u64, desc(random));
        victim.avail.store16(4 + 2 * random.below(size.into()), likely(random, size) as u16);
    }
    let step = if random.below(16) == 0 { random.bits() as u16 } else { likely(random, size) as u16 };
    victim.avail.store16(2, victim.device.base().wrapping_add(step));
    victim.avail.store16(0, random.bits() as u16);
    victim.avail.store16(4 + 2 * usize::from(size), random.bits() as u16);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn a_device_survives_any_driver(
        seed in any::<u64>(), log in 0u32..=6, features in 0..common::FEATURES.len(), raw in any::<bool>(),
    ) {
        let mut random = Random::new(seed);
        let (size, features) = (1 << log, common::FEATURES[features]);
        let memory = Heap::new(Places::new(size).bytes(0x400));
        if raw {
            let bytes: Vec<u8> = (0..memory.len()).map(|_| random.bits() as u8).collect();
            memory.fill(0, &bytes);
        }
        let mut victim = Victim::over(memory, size, features);
        if raw {
            // Random bytes everywhere, but an index that says there is something to look at.
            victim.avail.store16(2, 1);
        }
        for _ in 0..20 {
            if !raw {
                scribble(&victim, &mut random);
            }
            victim.desc.loads();
            let taken = victim.take();
            check_burst(&victim.chains, size);
            assert_eq!(taken, victim.chains.len());
            let loads: usize = victim.desc.loads().values().sum();
            assert!(loads <= 2 * usize::from(size) * (taken + 1));
            victim.device.enable_kicks();
            let untaken = random.below(taken + 1);
            victim.device.untake(untaken as u16);
            for chain in victim.chains.iter().take(taken - untaken) {
                victim.device.complete(chain.head, chain.writable_len);
            }
            victim.device.publish();
            if victim.device.fault().is_some() {
                victim.refused();
                return Ok(());
            }
        }
    }

    #[test]
    fn a_driver_survives_any_device(seed in any::<u64>(), indirect in any::<bool>(), event_idx in any::<bool>()) {
        let mut random = Random::new(seed);
        let places = Places::new(SIZE);
        let memory = Heap::new(places.bytes(desc_bytes(SIZE) * 4));
        let tables = places.tables(&memory, 4);
        let features = RingFeatures { indirect, event_idx };
        let mut driver = Driver::new(places.layout(&memory), features, Some(tables));
        let used = memory.area(places.used, used_bytes(SIZE));
        let (mut next, mut out) = (0u32, std::collections::BTreeSet::new());
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
        let mut device = Device::new(layout(), ALL, 0);
        let mut chains = Chains::new();
        let mut out = std::collections::BTreeSet::new();
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
