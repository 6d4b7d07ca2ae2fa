//! The device half against a driver that breaks the rules: named violations first, then random memory.
//! Last, how often either half loads a word of shared memory at all.

mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use common::{BASE, Heap, INDIRECT, Memory, NEXT, Places, Random, WRITE, check_burst, likely};
use proptest::prelude::*;
use ringferry_memory::{Entry, GuestMemory, SharedMem, WordTable, Words};
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
    type Table<E: Entry> = WordTable<Self>;

    fn table<E: Entry>(&self, at: usize, count: u16) -> Option<WordTable<Self>> {
        WordTable::new::<E>(self.clone(), at, count)
    }

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
        let device = Device::new(layout, features);
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
fn s2_7_13_available_index_ahead_by_more_than_the_ring() {
    let mut victim = Victim::new(NONE);
    victim.avail.store16(2, SIZE + 1);
    assert_eq!(victim.take(), 0);
    assert_eq!(victim.refused(), Fault::IndexJump(SIZE + 1));
}

#[test]
fn s2_7_6_1_available_index_stepping_back() {
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
fn a_device_that_died_with_chains_in_hand_is_followed_by_one_that_takes_them_again() {
    let mut victim = Victim::new(NONE);
    victim.descriptors(&[(BASE, 1, 0, 0); 8]);
    victim.offer(0, &[0, 1, 2, 3]);
    assert_eq!(victim.take(), 4);
    victim.device.complete(0, 0);
    victim.device.publish();
    // It dies here, having completed one of four.
    let areas = [
        (victim.places.desc, desc_bytes(SIZE)),
        (victim.places.avail, avail_bytes(SIZE)),
        (victim.places.used, used_bytes(SIZE)),
    ];
    let [desc, avail, used] = areas.map(|(addr, len)| victim.memory.area(addr, len));
    let mut next = Device::new(Layout::new(SIZE, desc, avail, used).unwrap(), NONE);
    assert_eq!(next.base(), 1);
    let mut chains = Chains::new();
    assert_eq!(next.take(8, &mut victim.memory.tables(), &mut chains), 3);
    assert_eq!(chains.iter().map(|chain| chain.head).collect::<Vec<_>>(), [1, 2, 3]);
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
    victim.indirect(table, &[(BASE, 1, 0, 0)]);
    assert_eq!(victim.take_one(), Err(Fault::BadIndirect));
}

#[test]
fn s2_7_5_3_1_indirect_with_next() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    // Without NEXT this would be a good chain.
    victim.descriptors(&[(table, 16, INDIRECT | NEXT, 1), (BASE, 1, 0, 0)]);
    victim.indirect(table, &[(BASE, 1, 0, 0)]);
    assert_eq!(victim.take_one(), Err(Fault::BadIndirect));
}

#[test]
fn s2_7_5_3_1_indirect_inside_a_table() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.descriptors(&[(table, 32, INDIRECT, 0)]);
    // Into itself, which would be a loop.
    victim.indirect(table, &[(BASE, 1, NEXT, 1), (table, 32, INDIRECT, 0)]);
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
fn s2_7_5_3_1_chain_in_a_table_longer_than_the_queue() {
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
fn s2_7_5_3_2_direct_descriptors_followed_by_one_indirect() {
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
fn s2_7_5_3_2_write_on_the_indirect_descriptor_is_ignored() {
    let mut victim = Victim::new(ALL);
    let table = victim.table();
    victim.descriptors(&[(table, 32, INDIRECT | WRITE, 0)]);
    victim.indirect(table, &[(BASE, 2, NEXT, 1), (BASE, 3, WRITE, 0)]);
    let chain = victim.take_one().unwrap();
    assert_eq!((chain.readable_len, chain.writable_len), (2, 3));
}

#[test]
fn s2_7_5_3_tables_need_no_alignment() {
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
        let mut device = Device::new(make(theirs.clone()), features);
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

// ---- random ----

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
}
