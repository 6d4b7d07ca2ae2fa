//! Measures the cost of a chain in a device half: one thread, everything in cache, no buffer accessed.
//!
//! A burst of one-descriptor chains is taken, its buffers are translated to host addresses, and it is
//! completed and published, by our device half in either
//! layout and by rust-vmm's `virtio-queue`. Only the device's part is timed; between two laps the
//! driver makes the same chains available again: by one store in a split ring, by one per descriptor
//! in a packed one. Run with `cargo run --release -p ringferry-ring --example chain_cost`.

use std::fs::File;
use std::hint::black_box;
use std::time::{Duration, Instant};

use ringferry_memory::{Area, GuestMemory, SharedMem, Words};
use ringferry_ring::{Chains, Device, Parts, RingFeatures, part_bytes};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const SIZE: u16 = 256;
const DESC_AREA: u64 = 0x10_0000;
const DRIVER_AREA: u64 = 0x10_2000;
const DEVICE_AREA: u64 = 0x10_3000;
/// Times the clock is read, after each `SIZE` chains: often, so that the best and the median of them
/// are told, and what disturbed the others is not; not oftener, because it costs more than a burst.
const LAPS: usize = 20_000;

/// The flag bits with which a packed ring's descriptor is available in even laps and in odd ones.
const AVAILABLE: [u64; 2] = [1 << 7, 1 << 15];

fn main() {
    println!("burst  ring                        best  median   (ns per chain)");
    let print = |burst: usize, name: &str, event_idx: bool, (best, median): (f64, f64)| {
        let event_idx = if event_idx { "EVENT_IDX" } else { "" };
        println!("{burst:5}  {name:15} {event_idx:9} {best:7.2} {median:7.2}");
    };
    for burst in [1, 32, 256] {
        for event_idx in [false, true] {
            for (packed, in_order, name) in [
                (false, false, "split"),
                (false, true, "split in-order"),
                (true, false, "packed"),
                (true, true, "packed in-order"),
            ] {
                let features = RingFeatures { indirect: true, event_idx, packed, in_order };
                print(burst, name, event_idx, measure(|| ours(burst, features)));
            }
            print(burst, "virtio-queue", event_idx, measure(|| theirs(burst, event_idx)));
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

/// Memory for a ring and its buffers.
fn memory() -> (SharedMem, GuestMemory) {
    let file = SharedMem::new("chain-cost", 0x1_0000).expect("memfd");
    let map = GuestMemory::new(vec![file.map_at(DESC_AREA).expect("map")]).expect("one region");
    (file, map)
}

fn parts(map: &GuestMemory, packed: bool) -> Parts<Area> {
    let [desc, driver, device] = part_bytes(SIZE, packed);
    let area = |addr, len| map.area(addr, len).expect("inside");
    Parts {
        size: SIZE,
        desc: area(DESC_AREA, desc),
        driver: area(DRIVER_AREA, driver),
        device: area(DEVICE_AREA, device),
    }
}

/// One-descriptor chains in every entry of a split ring, not shown yet.
fn fill_split(parts: &Parts<Area>) {
    for i in 0..SIZE {
        parts.desc.store64(16 * usize::from(i), DESC_AREA + 0x8000);
        parts.desc.store64(16 * usize::from(i) + 8, 64);
        parts.driver.store16(4 + 2 * usize::from(i), i);
    }
}

/// The same in a packed ring, available in `lap`.
fn fill_packed(parts: &Parts<Area>, lap: usize) {
    for i in 0..SIZE {
        parts.desc.store64(16 * usize::from(i), DESC_AREA + 0x8000);
        let second = 64 | u64::from(i) << 32 | AVAILABLE[lap % 2] << 48;
        parts.desc.store64_release(16 * usize::from(i) + 8, second);
    }
}

fn ours(burst: usize, features: RingFeatures) -> Vec<Duration> {
    let (_file, map) = memory();
    let parts = parts(&map, features.packed);
    if !features.packed {
        fill_split(&parts);
    }
    let base = u16::from(features.packed) << 15;
    let mut device = Device::new(parts.clone(), features, base, None).expect("a good queue");
    let mut chains = Chains::new();
    let mut tables = map.translator();
    let mut laps = Vec::with_capacity(LAPS);
    let bursts = usize::from(SIZE) / burst;
    let mut taken = 0;
    for lap in 0..LAPS {
        if features.packed {
            fill_packed(&parts, lap);
        } else {
            parts.driver.store16_release(2, (lap as u16 + 1).wrapping_mul(SIZE));
        }
        let start = Instant::now();
        for _ in 0..bursts {
            chains.clear();
            taken += device.take(burst, &mut tables, &mut chains);
            for chain in chains.iter() {
                let [buffer] = chains.readable(chain) else { panic!("chains of one buffer") };
                black_box(tables.read(buffer.addr, buffer.len as usize).expect("inside"));
            }
            device.complete_all(chains.iter().map(|chain| chain.done(0)));
            black_box(device.publish());
        }
        laps.push(start.elapsed());
    }
    assert_eq!((taken, device.fault()), (LAPS * usize::from(SIZE), None));
    laps
}

fn theirs(burst: usize, event_idx: bool) -> Vec<Duration> {
    let (file, map) = memory();
    let offset = FileOffset::new(File::from(file.fd().try_clone_to_owned().expect("dup")), 0);
    let mem =
        GuestMemoryMmap::<()>::from_ranges_with_files([(GuestAddress(DESC_AREA), file.size(), Some(offset))])
            .expect("map");
    let parts = parts(&map, false);
    fill_split(&parts);
    let mut queue = Queue::new(SIZE).expect("a good size");
    queue.set_size(SIZE);
    queue.set_desc_table_address(Some(DESC_AREA as u32), None);
    queue.set_avail_ring_address(Some(DRIVER_AREA as u32), None);
    queue.set_used_ring_address(Some(DEVICE_AREA as u32), None);
    queue.set_event_idx(event_idx);
    queue.set_ready(true);
    assert!(queue.is_valid(&mem));
    let mut heads = Vec::with_capacity(burst);
    let mut laps = Vec::with_capacity(LAPS);
    let bursts = usize::from(SIZE) / burst;
    let mut index = 0u16;
    for _ in 0..LAPS {
        index = index.wrapping_add(SIZE);
        parts.driver.store16_release(2, index);
        let start = Instant::now();
        for _ in 0..bursts {
            heads.clear();
            for chain in queue.iter(&mem).expect("a good queue").take(burst) {
                heads.push(chain.head_index());
                for desc in chain {
                    let slice = mem.get_slice(desc.addr(), desc.len() as usize);
                    black_box(slice.expect("inside"));
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
