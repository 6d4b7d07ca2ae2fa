//! A virtqueue over rust-vmm's memory, as a VMM that is built on `vm-memory` has it: one `GuestMemoryMmap`, mapped
//! once and used by both of us.
//!
//! Rings and buffers are in different regions, one of them anonymous and one of a file; buffers run across the border
//! of two regions.

use std::fs::File;

use ringferry_memory::{Area, GuestMemory, SharedMem};
use ringferry_ring::{Buffer, Chains, Device, Driver, Parts, RingFeatures, part_bytes};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

const SIZE: u16 = 16;
/// Guest addresses of the ring's three areas.
const RING: [u64; 3] = [0x1_0000, 0x1_1000, 0x1_2000];
/// The border of two regions, around which buffers are.
const BORDER: u64 = 0x8000_4000;
/// Bytes of a buffer, of which the first half is before the border.
const LEN: usize = 0x600;

fn memory() -> (GuestMemoryMmap, GuestMemory) {
    let file = SharedMem::new("vm-memory", 0x4000).unwrap();
    let offset = FileOffset::new(File::from(file.fd().try_clone_to_owned().unwrap()), 0);
    let theirs = GuestMemoryMmap::from_ranges_with_files([
        (GuestAddress(0), 0x2_0000, None),
        (GuestAddress(BORDER - 0x4000), 0x4000, Some(offset)),
        (GuestAddress(BORDER), 0x4000, None),
    ]);
    let theirs = theirs.unwrap();
    let ours = GuestMemory::from_vm_memory(&theirs).unwrap();
    (theirs, ours)
}

fn parts(memory: &GuestMemory, packed: bool) -> Parts<Area> {
    let lens = part_bytes(SIZE, packed);
    let [desc, driver, device] = std::array::from_fn(|i| memory.area(RING[i], lens[i]).unwrap());
    Parts { size: SIZE, desc, driver, device }
}

/// A question and an answer, one behind the other, both across the border in turns.
fn buffers(lap: u8) -> (Buffer, Buffer) {
    let across = Buffer { addr: BORDER - LEN as u64 / 2, len: LEN as u32 };
    let apart = Buffer { addr: BORDER + 0x2000, len: LEN as u32 };
    if lap.is_multiple_of(2) { (across, apart) } else { (apart, across) }
}

fn bytes(seed: u8) -> Vec<u8> {
    (0..LEN).map(|i| seed.wrapping_mul(31).wrapping_add((i * 7) as u8)).collect()
}

fn read(memory: &GuestMemoryMmap, at: Buffer) -> Vec<u8> {
    let mut bytes = vec![0; at.len as usize];
    memory.read_slice(&mut bytes, GuestAddress(at.addr)).unwrap();
    bytes
}

#[test]
fn our_driver_and_the_device_of_virtio_queue_in_one_mapping() {
    let (theirs, ours) = memory();
    let features = RingFeatures { event_idx: true, ..RingFeatures::default() };
    let mut driver = Driver::new(parts(&ours, false), features, None).unwrap();
    let mut queue = Queue::new(SIZE).unwrap();
    queue.set_desc_table_address(Some(RING[0] as u32), Some(0));
    queue.set_avail_ring_address(Some(RING[1] as u32), Some(0));
    queue.set_used_ring_address(Some(RING[2] as u32), Some(0));
    queue.set_event_idx(true);
    queue.set_ready(true);
    assert!(queue.is_valid(&theirs));
    for lap in 0..100 {
        let (question, answer) = buffers(lap);
        theirs.write_slice(&bytes(lap), GuestAddress(question.addr)).unwrap();
        driver.add(&[question], &[answer], lap).unwrap();
        driver.publish();
        let chain = queue.pop_descriptor_chain(&theirs).unwrap();
        let descriptors: Vec<_> = chain.clone().map(|desc| (desc.addr().0, desc.len())).collect();
        assert_eq!(descriptors, [(question.addr, question.len), (answer.addr, answer.len)]);
        theirs.write_slice(&read(&theirs, question), GuestAddress(answer.addr)).unwrap();
        queue.add_used(&theirs, chain.head_index(), answer.len).unwrap();
        let used = driver.collect().unwrap();
        assert_eq!((used.token, used.len), (lap, answer.len));
        assert_eq!(read(&theirs, answer), bytes(lap));
    }
}

#[test]
fn both_halves_of_either_layout() {
    for packed in [false, true] {
        let (theirs, ours) = memory();
        let features = RingFeatures { packed, ..RingFeatures::default() };
        let mut driver = Driver::new(parts(&ours, packed), features, None).unwrap();
        let base = if packed { 1 << 15 } else { 0 };
        let mut device = Device::new(parts(&ours, packed), features, base, None).unwrap();
        for lap in 0..100 {
            let (question, answer) = buffers(lap);
            theirs.write_slice(&bytes(lap), GuestAddress(question.addr)).unwrap();
            driver.add(&[question], &[answer], lap).unwrap();
            driver.publish();

            let (mut chains, mut translator) = (Chains::new(), ours.translator());
            assert_eq!(device.take(8, &mut translator, &mut chains), 1);
            let chain = chains.chain(0);
            let mut echoed = Vec::new();
            for buffer in chains.readable(&chain) {
                let mut done = 0;
                while done < buffer.len as usize {
                    let piece =
                        translator.read(buffer.addr + done as u64, buffer.len as usize - done).unwrap();
                    let at = echoed.len();
                    echoed.resize(at + piece.len(), 0);
                    done += piece.copy_to(&mut echoed[at..]);
                }
            }
            theirs.write_slice(&echoed, GuestAddress(chains.writable(&chain)[0].addr)).unwrap();
            device.complete(chain.done(answer.len));
            device.publish();

            assert_eq!(driver.collect().map(|used| (used.token, used.len)), Some((lap, answer.len)));
            assert_eq!(read(&theirs, answer), bytes(lap));
        }
    }
}
