//! Memory for ring tests, and the addresses of the areas, indirect tables and buffers of a queue in it.
//!
//! [`Heap`] is plain private memory made of atomics; [`Shared`] is what production uses, a mapped
//! memfd. Both stand for the guest physical addresses from [`BASE`] on.
#![allow(dead_code, reason = "every test program uses its own part of this module")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use ringferry_memory::testing::{self, Order, TestWords, Width};
use ringferry_memory::{Area, GuestMemory, SharedMem, Words};
use ringferry_ring::{Buffer, Chains, IndirectTables, Parts, RingFeatures, Tables, part_bytes};

/// First guest physical address of any test memory.
pub const BASE: u64 = 0x10_0000;

/// `VIRTQ_DESC_F_NEXT` of either layout.
pub const NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE` of either layout.
pub const WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT` of either layout.
pub const INDIRECT: u16 = 4;

/// VIRTQ_DESC_F_AVAIL of a packed ring.
pub const AVAIL: u16 = 1 << 7;
/// VIRTQ_DESC_F_USED of a packed ring.
pub const USED: u16 = 1 << 15;

/// Returns features without any but the layout.
pub const fn bare(packed: bool) -> RingFeatures {
    RingFeatures { indirect: false, event_idx: false, packed, in_order: false }
}

/// Iterates over all combinations of ring features in one layout.
pub fn features(packed: bool) -> impl Iterator<Item = RingFeatures> {
    (0..8).map(move |bits| RingFeatures {
        indirect: bits & 1 != 0,
        event_idx: bits & 2 != 0,
        packed,
        in_order: bits & 4 != 0,
    })
}

/// Iterates over all combinations of ring features in both layouts.
pub fn all_features() -> impl Iterator<Item = RingFeatures> {
    features(false).chain(features(true))
}

/// Returns the vring base of a fresh ring; a packed one has a wrap counter of 1.
pub const fn fresh_base(packed: bool) -> u16 {
    if packed { 0x8000 } else { 0 }
}

/// Guest memory of a test.
pub trait Memory {
    /// The type of a range of this memory.
    type Words: Words + Clone;
    /// Makes at least `bytes` of zeroed memory at [`BASE`].
    fn new(bytes: usize) -> Self;
    /// Returns the range of `len` bytes at a guest address.
    fn area(&self, addr: u64, len: usize) -> Self::Words;
    /// Returns a reader for indirect tables.
    fn tables(&self) -> impl Tables + '_;
}

/// Private memory made of 16-bit atomics. Wider words are not atomic as a whole, so one thread only.
#[derive(Clone)]
pub struct Heap {
    cells: Arc<[AtomicU16]>,
    start: usize,
    len: usize,
}

impl Heap {
    /// Overwrites the memory from `at` on, a byte offset (even), as far as `bytes` go.
    pub fn fill(&self, at: usize, bytes: &[u8]) {
        for (i, pair) in bytes.chunks_exact(2).enumerate() {
            self.store16(at + 2 * i, u16::from_le_bytes([pair[0], pair[1]]));
        }
    }

    fn cell(&self, at: usize, width: usize) -> &[AtomicU16] {
        assert!(at + width <= self.len && at.is_multiple_of(width), "{width} bytes at {at} of {}", self.len);
        &self.cells[(self.start + at) / 2..][..width / 2]
    }
}

impl TestWords for Heap {
    fn size(&self) -> usize {
        self.len
    }
    fn aligned(&self, align: usize) -> bool {
        self.start.is_multiple_of(align)
    }
    fn load(&self, at: usize, width: Width, _: Order) -> u64 {
        let cells = self.cell(at, width as usize).iter().rev();
        cells.fold(0, |value, cell| value << 16 | u64::from(cell.load(Ordering::Relaxed)))
    }
    fn store(&self, at: usize, width: Width, _: Order, value: u64) {
        for (i, cell) in self.cell(at, width as usize).iter().enumerate() {
            cell.store((value >> (16 * i)) as u16, Ordering::Relaxed);
        }
    }
}

impl Memory for Heap {
    type Words = Heap;

    fn new(bytes: usize) -> Self {
        let len = bytes.next_multiple_of(8);
        Heap { cells: (0..len / 2).map(|_| AtomicU16::new(0)).collect(), start: 0, len }
    }

    fn area(&self, addr: u64, len: usize) -> Heap {
        let start = (addr - BASE) as usize;
        assert!(start + len <= self.len && start.is_multiple_of(2));
        Heap { cells: Arc::clone(&self.cells), start, len }
    }

    fn tables(&self) -> impl Tables + '_ {
        HeapTables(self)
    }
}

struct HeapTables<'a>(&'a Heap);

impl Tables for HeapTables<'_> {
    fn descriptor(&mut self, addr: u64) -> Option<[u8; 16]> {
        let at = usize::try_from(addr.checked_sub(BASE)?).ok()?;
        if at.checked_add(16)? > self.0.len {
            return None;
        }
        // Byte by byte: a table needs no alignment.
        let byte = |i: usize| self.0.load16((at + i) & !1).to_le_bytes()[(at + i) & 1];
        Some(std::array::from_fn(byte))
    }
}

/// A memfd, mapped as a VM's memory is.
pub struct Shared {
    /// The file, for peers that map it too.
    pub file: SharedMem,
    /// The memory map over the file.
    pub map: GuestMemory,
}

impl Memory for Shared {
    type Words = Area;

    fn new(bytes: usize) -> Self {
        let file = SharedMem::new("ring-test", bytes).unwrap();
        let map = GuestMemory::new(vec![file.map_at(BASE).unwrap()]).unwrap();
        Shared { file, map }
    }

    fn area(&self, addr: u64, len: usize) -> Area {
        self.map.area(addr, len).unwrap()
    }

    fn tables(&self) -> impl Tables + '_ {
        self.map.translator()
    }
}

/// Memory that remembers how often each offset was loaded.
pub type Watched = testing::Watched<Heap>;

/// The addresses of the areas of one queue.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// Queue size in descriptors.
    pub size: u16,
    packed: bool,
    /// Guest address of the descriptor area.
    pub desc: u64,
    /// Guest address of the driver area.
    pub driver: u64,
    /// Guest address of the device area.
    pub device: u64,
    /// Guest address, aligned to a page, of the memory behind the areas, for indirect tables and buffers.
    pub rest: u64,
}

impl Places {
    /// Places the areas one after the other from [`BASE`] on, each on separate cache lines.
    pub fn new(size: u16, packed: bool) -> Self {
        let after = |addr: u64, len: usize| (addr + len as u64).next_multiple_of(64);
        let [desc, avail, used] = part_bytes(size, packed);
        let driver = after(BASE, desc);
        let device = after(driver, avail);
        let rest = after(device, used).next_multiple_of(4096);
        Places { size, packed, desc: BASE, driver, device, rest }
    }

    /// Returns the size in bytes of the memory for the queue and `rest` bytes behind it.
    pub fn bytes(&self, rest: usize) -> usize {
        (self.rest - BASE) as usize + rest
    }

    /// Resolves the queue's areas in `memory`.
    pub fn parts<M: Memory>(&self, memory: &M) -> Parts<M::Words> {
        let [desc, driver, device] = part_bytes(self.size, self.packed);
        Parts {
            size: self.size,
            desc: memory.area(self.desc, desc),
            driver: memory.area(self.driver, driver),
            device: memory.area(self.device, device),
        }
    }

    /// Returns the size in bytes of indirect tables of `entries` descriptors for every chain.
    pub fn table_bytes(&self, entries: u16) -> usize {
        16 * usize::from(self.size) * usize::from(entries)
    }

    /// Makes indirect tables in the memory at `rest`.
    pub fn tables<M: Memory>(&self, memory: &M, entries: u16) -> IndirectTables<M::Words> {
        let area = memory.area(self.rest, self.table_bytes(entries));
        IndirectTables { area, addr: self.rest, entries }
    }
}

/// Wraps each area so that its loads are counted.
pub fn watched(parts: Parts<Heap>) -> Parts<Watched> {
    let Parts { size, desc, driver, device } = parts;
    Parts { size, desc: Watched::new(desc), driver: Watched::new(driver), device: Watched::new(device) }
}

/// A deterministic pseudo-random number generator (xorshift64*).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Makes a generator with the sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a random number less than `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 16) as usize % n
    }
}

/// Checks the invariants of chains that a device took, which hold for anything that the driver wrote.
pub fn check_burst(chains: &Chains, size: u16) {
    for chain in chains.iter() {
        let (readable, writable) = (chains.readable(chain), chains.writable(chain));
        assert!((1..=usize::from(size)).contains(&(readable.len() + writable.len())));
        assert!((1..=size).contains(&chain.slots));
        let sum = |buffers: &[Buffer]| buffers.iter().map(|buffer| u64::from(buffer.len)).sum::<u64>();
        assert_eq!((sum(readable), sum(writable)), (chain.readable_len.into(), chain.writable_len.into()));
        assert!(sum(readable) + sum(writable) < 1 << 32);
    }
}

/// Values of which some lead deep into the code and some are nonsense.
pub fn likely(random: &mut Random, size: u16) -> u64 {
    match random.below(6) {
        0 => random.bits(),
        1 => random.bits() >> 48,
        2 => 16 * random.below(20) as u64,
        _ => random.below(usize::from(size) + 1) as u64,
    }
}
