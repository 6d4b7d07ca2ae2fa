//! Memory for the pools of a test.
#![allow(dead_code)] // each test program uses its own part

use ringferry_memory::{GuestMemory, SharedMem};
use ringferry_packet::buffer::{Buf, Fragments, Pool, PoolLayout, Pools, PoolsLayout};

/// Guest physical address of the memory.
pub const BASE: u64 = 0x4000_0000;

/// Memory of at least `bytes` at [`BASE`].
pub fn memory(bytes: usize) -> GuestMemory {
    let file = SharedMem::new("buffers", bytes).unwrap();
    GuestMemory::new(vec![file.map_at(BASE).unwrap()]).unwrap()
}

/// A pool at [`BASE`] in memory of its own.
pub fn pool(layout: PoolLayout) -> Pool {
    Pool::new(&memory(layout.bytes()), BASE, layout).unwrap()
}

/// Buffers carved from such a pool.
pub fn fragments(layout: PoolLayout) -> Fragments {
    Fragments::new(pool(layout))
}

/// Pools at [`BASE`], `count` buffers of each size.
pub fn pools(count: u32, large: u32) -> Pools {
    let layout = PoolsLayout::new(count, large);
    Pools::new(&memory(layout.bytes()), BASE, layout).unwrap()
}

/// The bytes of memory that a buffer is responsible for, as the device sees them.
pub fn range(buf: &Buf) -> std::ops::Range<u64> {
    let start = buf.addr() - buf.headroom() as u64;
    start..start + buf.truesize() as u64
}

/// The data of a buffer.
pub fn bytes(buf: &Buf) -> Vec<u8> {
    let mut bytes = vec![0; buf.len()];
    buf.read().copy_to(&mut bytes);
    bytes
}
