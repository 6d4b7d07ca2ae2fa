//! What a chain costs a device half: one thread, everything in cache, no bytes touched.
//!
//! A burst of one-descriptor chains is taken, completed and published, by our device half and by
//! rust-vmm's `virtio-queue`. Only the device's part is timed; the driver between two bursts is two
//! stores (the chains are the same ones every time). Run with
//! `cargo run --release -p ringferry-ring --example chain_cost`.

use std::fs::File;
use std::hint::black_box;
use std::time::{Duration, Instant};

use ringferry_memory::{GuestMemory, SharedMem, Words};
use ringferry_ring::split::{Device, Layout, avail_bytes, desc_bytes, used_bytes};
use ringferry_ring::{Chains, RingFeatures};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

const SIZE: u16 = 256;
const DESC: u64 = 0x10_0000;
const AVAIL: u64 = 0x10_2000;
const USED: u64 = 0x10_3000;
/// Times the clock is read, after each `SIZE` chains: often, so that the best and the median of them
/// are told, and what disturbed the others is not; not oftener, because it costs more than a burst.
const LAPS: usize = 20_000;

fn main() {
    println!("burst  features   ours best  median   virtio-queue best  median   (ns per chain)");
    for burst in [1, 32, 256] {
        for event_idx in [false, true] {
            let ours = measure(|| ours(burst, event_idx));
            let theirs = measure(|| theirs(burst, event_idx));
            let name = if event_idx { "EVENT_IDX" } else { "none" };
            println!("{burst:5}  {name:9} {:10.2} {:7.2} {:19.2} {:7.2}", ours.0, ours.1, theirs.0, theirs.1);
        }
    }
}

/// Best and median of what `run` measured, per chain.
fn measure(run: impl Fn() -> Vec<Duration>) -> (f64, f64) {
    let mut laps = run();
    laps.sort();
    let cost = |lap: Duration| lap.as_nanos() as f64 / f64::from(SIZE);
    (cost(laps[0]), cost(laps[LAPS / 2]))
}

/// Memory with one-descriptor chains in every entry of the ring.
fn memory() -> (SharedMem, GuestMemory) {
    let file = SharedMem::new("chain-cost", 0x1_0000).expect("memfd");
    let map = GuestMemory::new(vec![file.map_at(DESC).expect("map")]).expect("one region");
    let desc = map.area(DESC, desc_bytes(SIZE)).expect("inside");
    let avail = map.area(AVAIL, avail_bytes(SIZE)).expect("inside");
    for i in 0..SIZE {
        desc.store64(16 * usize::from(i), DESC + 0x8000);
        desc.store64(16 * usize::from(i) + 8, 64);
        avail.store16(4 + 2 * usize::from(i), i);
    }
    (file, map)
}

fn ours(burst: usize, event_idx: bool) -> Vec<Duration> {
    let (_file, map) = memory();
    let area = |addr, len| map.area(addr, len).expect("inside");
    let avail = area(AVAIL, avail_bytes(SIZE));
    let layout = Layout::new(SIZE, area(DESC, desc_bytes(SIZE)), avail.clone(), area(USED, used_bytes(SIZE)));
    let features = RingFeatures { indirect: true, event_idx };
    let mut device = Device::new(layout.expect("a good layout"), features);
    let mut chains = Chains::new();
    let mut tables = map.translator();
    let mut laps = Vec::with_capacity(LAPS);
    let bursts = usize::from(SIZE) / burst;
    let mut index = 0u16;
    for _ in 0..LAPS {
        index = index.wrapping_add(SIZE);
        avail.store16_release(2, index);
        let start = Instant::now();
        for _ in 0..bursts {
            chains.clear();
            device.take(burst, &mut tables, &mut chains);
            device.complete_all(chains.iter().map(|chain| (chain.head, 0)));
            black_box(device.publish());
        }
        laps.push(start.elapsed());
    }
    assert_eq!((device.used_index(), device.fault()), (index, None));
    laps
}

fn theirs(burst: usize, event_idx: bool) -> Vec<Duration> {
    let (file, map) = memory();
    let offset = FileOffset::new(File::from(file.fd().try_clone_to_owned().expect("dup")), 0);
    let mem =
        GuestMemoryMmap::<()>::from_ranges_with_files([(GuestAddress(DESC), file.size(), Some(offset))])
            .expect("map");
    let avail = map.area(AVAIL, avail_bytes(SIZE)).expect("inside");
    let mut queue = Queue::new(SIZE).expect("a good size");
    queue.set_size(SIZE);
    queue.set_desc_table_address(Some(DESC as u32), None);
    queue.set_avail_ring_address(Some(AVAIL as u32), None);
    queue.set_used_ring_address(Some(USED as u32), None);
    queue.set_event_idx(event_idx);
    queue.set_ready(true);
    assert!(queue.is_valid(&mem));
    let mut heads = Vec::with_capacity(burst);
    let mut laps = Vec::with_capacity(LAPS);
    let bursts = usize::from(SIZE) / burst;
    let mut index = 0u16;
    for _ in 0..LAPS {
        index = index.wrapping_add(SIZE);
        avail.store16_release(2, index);
        let start = Instant::now();
        for _ in 0..bursts {
            heads.clear();
            for chain in queue.iter(&mem).expect("a good queue").take(burst) {
                heads.push(chain.head_index());
                for desc in chain {
                    black_box((desc.addr(), desc.len()));
                }
            }
            for head in &heads {
                queue.add_used(&mem, *head, 0).expect("a good head");
            }
            black_box(queue.needs_notification(&mem).expect("a good queue"));
        }
        laps.push(start.elapsed());
    }
    assert_eq!(queue.next_used(), index);
    laps
}
