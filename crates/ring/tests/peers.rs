//! Each half against an independent implementation of the other half, over memory that both sides map.
//!
//! The peers are rust-vmm's `virtio-queue` (a device, and a mock of a driver for tests) and rcore's
//! `virtio-drivers` (a driver). Every chain carries bytes: the device answers in the writable
//! buffers with bytes that depend on the readable ones, so contents, order and lengths are all
//! compared. Where a side may sleep, it sleeps, and sleeping through work is a failure.
//!
//! The `unsafe` here is the peer's: `virtio_drivers::Hal` is an unsafe trait and its queue takes
//! buffers by unsafe functions.

mod common;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::ptr::NonNull;

use common::{BASE, INDIRECT, Memory, NEXT, Places, Random, Shared, WRITE, features};
use ringferry_memory::{Area, GuestMemory, SharedMem};
use ringferry_ring::{AddError, Buffer, Chain, Chains, Device, Driver, Parts, RingFeatures, part_bytes};
use virtio_drivers::queue::VirtQueue;
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{BufferDirection, Hal, PhysAddr};
use virtio_queue::desc::{RawDescriptor, split};
use virtio_queue::mock::MockSplitQueue;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// Bytes of the largest buffer, and the distance of buffers in memory.
const SLOT: usize = 64;

/// Maps `file` as rust-vmm does.
fn peer_map(file: &SharedMem) -> GuestMemoryMmap {
    let offset = FileOffset::new(File::from(file.fd().try_clone_to_owned().unwrap()), 0);
    GuestMemoryMmap::from_ranges_with_files([(GuestAddress(BASE), file.size(), Some(offset))]).unwrap()
}

/// A split queue whose areas a peer chose.
fn parts(map: &GuestMemory, size: u16, [desc, driver, device]: [u64; 3]) -> Parts<Area> {
    let lengths = part_bytes(size, false);
    let area = |addr, i: usize| map.area(addr, lengths[i]).unwrap();
    Parts { size, desc: area(desc, 0), driver: area(driver, 1), device: area(device, 2) }
}

/// Makes a device's answer: `len` bytes that depend on all bytes that it read.
fn answer(question: &[u8], len: usize) -> Vec<u8> {
    let sum = question.iter().fold(7u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(*byte));
    (0..len).map(|i| sum.wrapping_add(i as u8)).collect()
}

fn question(random: &mut Random, len: usize) -> Vec<u8> {
    (0..len).map(|_| random.bits() as u8).collect()
}

/// Cuts 0 to 3 readable and 0 to 3 writable buffers (but not none at all) out of thin air.
fn shape(random: &mut Random) -> (Vec<usize>, Vec<usize>) {
    let lengths = |random: &mut Random, count| (0..count).map(|_| random.below(SLOT) + 1).collect::<Vec<_>>();
    let (readable, writable) = (random.below(4), random.below(4));
    let readable = lengths(random, readable.max(usize::from(writable == 0)));
    (readable, lengths(random, writable))
}

/// Our device half's part: reads a chain, writes the answer, returns how much.
fn serve(map: &GuestMemory, chains: &Chains, chain: &Chain) -> u32 {
    let mut translator = map.translator();
    let mut asked = Vec::new();
    for buffer in chains.readable(chain) {
        let mut bytes = vec![0; buffer.len as usize];
        assert_eq!(translator.read(buffer.addr, bytes.len()).unwrap().copy_to(&mut bytes), bytes.len());
        asked.extend(bytes);
    }
    assert_eq!(asked.len(), chain.readable_len as usize);
    let mut reply = &answer(&asked, chain.writable_len as usize)[..];
    for buffer in chains.writable(chain) {
        let (now, later) = reply.split_at(buffer.len as usize);
        assert_eq!(translator.write(buffer.addr, now.len()).unwrap().copy_from(now), now.len());
        reply = later;
    }
    chain.writable_len
}

/// A chain our driver half has sent.
struct Sent {
    slots: Vec<u64>,
    writable: Vec<Buffer>,
    asked: Vec<u8>,
}

/// More than 65536 chains, so that both indexes wrap.
const LAPS: usize = 70_000;

#[test]
fn our_driver_and_the_device_of_virtio_queue() {
    // The peer knows nothing of IN_ORDER, but a device may do without batches (2.7.9).
    for features in features(false) {
        driver_against_virtio_queue(features);
    }
}

fn driver_against_virtio_queue(features: RingFeatures) {
    const SIZE: u16 = 32;
    let places = Places::new(SIZE, false);
    let slots = places.rest + 0x4000;
    let memory = Shared::new(places.bytes(0x4000 + 6 * SLOT * usize::from(SIZE)));
    let peer = peer_map(&memory.file);
    let mut queue = Queue::new(SIZE).unwrap();
    queue.set_size(SIZE);
    let halves = |addr: u64| (Some(addr as u32), Some((addr >> 32) as u32));
    queue.set_desc_table_address(halves(places.desc).0, halves(places.desc).1);
    queue.set_avail_ring_address(halves(places.driver).0, halves(places.driver).1);
    queue.set_used_ring_address(halves(places.device).0, halves(places.device).1);
    queue.set_event_idx(features.event_idx);
    queue.set_ready(true);
    assert!(queue.is_valid(&peer));

    let mut driver = Driver::new(places.parts(&memory), features, Some(places.tables(&memory, 4))).unwrap();
    let mut translator = memory.map.translator();
    let mut random = Random::new(1);
    let mut free: Vec<u64> = (0..6 * u64::from(SIZE)).map(|i| slots + i * SLOT as u64).collect();
    let (mut device_awake, mut driver_awake) = (true, true);
    let (mut sent, mut done, mut back) = (0, 0, 0);
    let mut held = Vec::new();
    while back < LAPS {
        for _ in 0..random.below(SIZE.into()) {
            let (readable, writable) = shape(&mut random);
            let mut taken = Vec::new();
            let mut buffers = |lengths: Vec<usize>| {
                let buffer = |len: usize| {
                    taken.push(free.pop().unwrap());
                    Buffer { addr: taken[taken.len() - 1], len: len as u32 }
                };
                lengths.into_iter().map(buffer).collect::<Vec<_>>()
            };
            let (readable, writable) = (buffers(readable), buffers(writable));
            let mut asked = Vec::new();
            for buffer in &readable {
                let bytes = question(&mut random, buffer.len as usize);
                translator.write(buffer.addr, bytes.len()).unwrap().copy_from(&bytes);
                asked.extend(bytes);
            }
            let token = Sent { slots: taken, writable: writable.clone(), asked };
            match driver.add(&readable, &writable, token) {
                Ok(_) => sent += 1,
                Err(AddError::Full(token)) => {
                    free.extend(token.slots);
                    break;
                }
                Err(_) => panic!("refused a good chain"),
            }
        }
        device_awake |= driver.publish();

        if device_awake {
            queue.disable_notification(&peer).unwrap();
            for _ in 0..random.below(usize::from(SIZE) + 1) {
                let Some(chain) = queue.pop_descriptor_chain(&peer) else { break };
                held.push(chain);
            }
            if random.below(2) == 0 && !queue.enable_notification(&peer).unwrap() {
                device_awake = false;
            }
        }
        assert!(device_awake || held.len() + done == sent, "lost wake-up: the device sleeps");
        while !held.is_empty() && random.below(24) > 0 {
            let pick = if features.in_order { 0 } else { random.below(held.len()) };
            let chain = held.remove(pick);
            let head = chain.head_index();
            let mut asked = Vec::new();
            for desc in chain.clone().readable() {
                let mut bytes = vec![0; desc.len() as usize];
                peer.read_slice(&mut bytes, desc.addr()).unwrap();
                asked.extend(bytes);
            }
            let room = chain.clone().writable().map(|desc| desc.len()).sum::<u32>();
            let mut reply = &answer(&asked, room as usize)[..];
            for desc in chain.writable() {
                let (now, later) = reply.split_at(desc.len() as usize);
                peer.write_slice(now, desc.addr()).unwrap();
                reply = later;
            }
            queue.add_used(&peer, head, room).unwrap();
            done += 1;
            driver_awake |= queue.needs_notification(&peer).unwrap();
        }

        assert!(driver_awake || done == back, "lost wake-up: the driver sleeps");
        while let Some(used) = driver_awake.then(|| driver.collect()).flatten() {
            let room = used.token.writable.iter().map(|buffer| buffer.len).sum::<u32>();
            assert_eq!(used.len, room);
            let mut reply = Vec::new();
            for buffer in &used.token.writable {
                let mut bytes = vec![0; buffer.len as usize];
                translator.read(buffer.addr, bytes.len()).unwrap().copy_to(&mut bytes);
                reply.extend(bytes);
            }
            assert_eq!(reply, answer(&used.token.asked, room as usize));
            free.extend(used.token.slots);
            back += 1;
        }
        driver_awake &= driver.enable_calls();
        assert_eq!(driver.fault(), None);
    }
}

#[test]
fn our_device_and_the_mock_driver_of_virtio_queue() {
    // The mock places its used ring `size` bytes behind the start of the available one, which is
    // 2 * size bytes long: only the first half of the entries can be used, once.
    const SIZE: u16 = 256;
    const CHAINS: u16 = 100;
    for features in features(false).filter(|features| !features.in_order) {
        let file = SharedMem::new("mock", 0x4_0000).unwrap();
        let map = GuestMemory::new(vec![file.map_at(BASE).unwrap()]).unwrap();
        let peer = peer_map(&file);
        let mock = MockSplitQueue::create(&peer, GuestAddress(BASE), SIZE);
        let addresses = [mock.desc_table_addr(), mock.avail_addr(), mock.used_addr()].map(|addr| addr.0);
        let mut device = Device::new(parts(&map, SIZE, addresses), features, 0, None).unwrap();
        let mut random = Random::new(2);
        let mut chains = Chains::new();
        let (mut next_slot, mut next_table) = (BASE + 0x1_0000, BASE + 0x8000);
        let mut offset = 0;
        let mut asked = Vec::new();
        for i in 0..CHAINS {
            if offset + 6 > SIZE {
                // All earlier chains are done, so their descriptors are free.
                offset = 0;
            }
            let (readable, writable) = shape(&mut random);
            let count = readable.len() + writable.len();
            let mut question_bytes = Vec::new();
            let indirect = features.indirect && random.below(2) == 0;
            let first = if indirect { 0 } else { offset };
            let mut descs = Vec::new();
            for (j, len) in readable.iter().chain(&writable).enumerate() {
                let addr = next_slot;
                next_slot += SLOT as u64;
                let mut flags = if j + 1 < count { NEXT } else { 0 };
                if j < readable.len() {
                    let bytes = question(&mut random, *len);
                    peer.write_slice(&bytes, GuestAddress(addr)).unwrap();
                    question_bytes.extend(bytes);
                } else {
                    flags |= WRITE;
                }
                let next = first + j as u16 + 1;
                descs.push(RawDescriptor::from(split::Descriptor::new(addr, *len as u32, flags, next)));
            }
            if indirect {
                for desc in &descs {
                    peer.write_obj(*desc, GuestAddress(next_table)).unwrap();
                    next_table += 16;
                }
                let bytes = 16 * count as u32;
                let table = split::Descriptor::new(next_table - u64::from(bytes), bytes, INDIRECT, 0);
                descs = vec![RawDescriptor::from(table)];
            }
            mock.add_desc_chains(&descs, offset).unwrap();
            asked.push((offset, question_bytes, writable, next_slot));
            offset += descs.len() as u16;
            // The device comes by now and then, and always before descriptors are used again.
            if random.below(3) > 0 && offset + 6 <= SIZE && i + 1 < CHAINS {
                continue;
            }
            chains.clear();
            assert_eq!(device.take(usize::MAX, &mut map.translator(), &mut chains), asked.len());
            let base = device.used_index();
            for chain in chains.iter() {
                device.complete(chain.done(serve(&map, &chains, chain)));
            }
            device.publish();
            assert_eq!(mock.used().idx().load(), device.used_index());
            for (j, (head, question, writable, end)) in asked.drain(..).enumerate() {
                // The element, read past the mock, whose ring reference has the same address.
                let element = mock.used().ring().ref_at(usize::from(base) + j).unwrap().load();
                let room: usize = writable.iter().sum();
                assert_eq!((element.id(), element.len()), (head.into(), room as u32));
                let mut addr = end - (SLOT * writable.len()) as u64;
                let mut reply = Vec::new();
                for len in writable {
                    let mut bytes = vec![0; len];
                    peer.read_slice(&mut bytes, GuestAddress(addr)).unwrap();
                    reply.extend(bytes);
                    addr += SLOT as u64;
                }
                assert_eq!(reply, answer(&question, room));
            }
        }
        assert_eq!((device.fault(), device.used_index()), (None, CHAINS));
    }
}

/// The state behind the static functions of [`Ours`].
struct Pool {
    map: GuestMemoryMmap,
    /// Address of the next page for a queue.
    pages: u64,
    /// Free places for buffers on their way.
    slots: Vec<u64>,
}

thread_local! {
    static POOL: RefCell<Option<Pool>> = const { RefCell::new(None) };
}

fn pool<R>(use_it: impl FnOnce(&mut Pool) -> R) -> R {
    POOL.with_borrow_mut(|pool| use_it(pool.as_mut().expect("no pool on this thread")))
}

/// `virtio-drivers` on our memory: its rings live there, its buffers are copied there and back.
struct Ours;

// SAFETY: pages come from a mapping that the pool keeps until the thread ends, each handed out once,
// zeroed (a fresh memfd) and aligned; no Rust reference to them is made here.
unsafe impl Hal for Ours {
    fn dma_alloc(pages: usize, _: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        pool(|pool| {
            let addr = pool.pages;
            pool.pages += 4096 * pages as u64;
            (addr, NonNull::new(pool.map.get_host_address(GuestAddress(addr)).unwrap()).unwrap())
        })
    }

    // SAFETY: the trait's contract; pages live as long as the pool, so nothing is done.
    unsafe fn dma_dealloc(_: PhysAddr, _: NonNull<u8>, _: usize) -> i32 {
        0
    }

    // SAFETY: the trait's contract; only its PCI transport calls this.
    unsafe fn mmio_phys_to_virt(_: PhysAddr, _: usize) -> NonNull<u8> {
        unreachable!("no PCI here")
    }

    // SAFETY: the trait's contract: `buffer` is valid and nobody else's for the time of the call.
    unsafe fn share(buffer: NonNull<[u8]>, _: BufferDirection) -> PhysAddr {
        pool(|pool| {
            let addr = pool.slots.pop().expect("a slot");
            // SAFETY: see above.
            pool.map.write_slice(unsafe { buffer.as_ref() }, GuestAddress(addr)).unwrap();
            addr
        })
    }

    // SAFETY: the trait's contract: `buffer` is valid and nobody else's for the time of the call.
    unsafe fn unshare(addr: PhysAddr, mut buffer: NonNull<[u8]>, direction: BufferDirection) {
        pool(|pool| {
            if direction != BufferDirection::DriverToDevice {
                // SAFETY: see above.
                pool.map.read_slice(unsafe { buffer.as_mut() }, GuestAddress(addr)).unwrap();
            }
            pool.slots.push(addr);
        });
    }
}

/// Tells where a queue was put; all a driver's queue asks of its transport.
#[derive(Default)]
struct QueueAddresses(Option<[u64; 3]>);

impl Transport for QueueAddresses {
    fn queue_set(&mut self, _: u16, _: u32, desc: PhysAddr, avail: PhysAddr, used: PhysAddr) {
        self.0 = Some([desc, avail, used]);
    }
    fn queue_used(&mut self, _: u16) -> bool {
        self.0.is_some()
    }
    fn max_queue_size(&mut self, _: u16) -> u32 {
        32768
    }
    fn requires_legacy_layout(&self) -> bool {
        false
    }
    fn device_type(&self) -> DeviceType {
        DeviceType::Network
    }
    fn read_device_features(&mut self) -> u64 {
        0
    }
    fn write_driver_features(&mut self, _: u64) {}
    fn notify(&mut self, _: u16) {}
    fn get_status(&self) -> DeviceStatus {
        DeviceStatus::DRIVER_OK
    }
    fn set_status(&mut self, _: DeviceStatus) {}
    fn set_guest_page_size(&mut self, _: u32) {}
    fn queue_unset(&mut self, _: u16) {}
    fn ack_interrupt(&mut self) -> InterruptStatus {
        InterruptStatus::empty()
    }
    fn read_config_generation(&self) -> u32 {
        0
    }
    fn read_config_space<T>(&self, _: usize) -> virtio_drivers::Result<T> {
        Err(virtio_drivers::Error::ConfigSpaceMissing)
    }
    fn write_config_space<T>(&mut self, _: usize, _: T) -> virtio_drivers::Result<()> {
        Err(virtio_drivers::Error::ConfigSpaceMissing)
    }
}

/// Buffers lent to the peer's queue until it gives its token back.
struct Lent {
    readable: Vec<Vec<u8>>,
    writable: Vec<Vec<u8>>,
}

#[test]
fn our_device_and_the_driver_of_virtio_drivers() {
    for features in features(false).filter(|features| !features.in_order) {
        device_against_virtio_drivers(features);
    }
}

fn device_against_virtio_drivers(features: RingFeatures) {
    const SIZE: usize = 16;
    // Its comparison with the event index does not wrap, so it can miss a kick at 65536.
    let laps = if features.event_idx { 65_000 } else { LAPS };
    let file = SharedMem::new("virtio-drivers", 0x4_0000).unwrap();
    let map = GuestMemory::new(vec![file.map_at(BASE).unwrap()]).unwrap();
    // A slot holds a buffer or an indirect table of at most 6 descriptors.
    let slots = (0..8 * SIZE as u64).map(|i| BASE + 0x2_0000 + 128 * i).collect();
    POOL.set(Some(Pool { map: peer_map(&file), pages: BASE, slots }));

    let mut addresses = QueueAddresses::default();
    let mut queue =
        VirtQueue::<Ours, SIZE>::new(&mut addresses, 0, features.indirect, features.event_idx).unwrap();
    let parts = parts(&map, SIZE as u16, addresses.0.unwrap());
    let mut device = Device::new(parts, features, 0, None).unwrap();
    let mut chains = Chains::new();
    let mut random = Random::new(3);
    let mut lent = HashMap::new();
    let mut held = Vec::new();
    let (mut awake, mut driver_awake) = (true, true);
    let (mut sent, mut taken, mut done, mut back) = (0, 0, 0, 0);
    while back < laps {
        for _ in 0..random.below(8) {
            let (readable, writable) = shape(&mut random);
            let readable: Vec<_> = readable.into_iter().map(|len| question(&mut random, len)).collect();
            let mut lend =
                Lent { readable, writable: writable.into_iter().map(|len| vec![0; len]).collect() };
            let inputs: Vec<&[u8]> = lend.readable.iter().map(Vec::as_slice).collect();
            let mut outputs: Vec<&mut [u8]> = lend.writable.iter_mut().map(Vec::as_mut_slice).collect();
            // SAFETY: the buffers move into `lent`, their bytes stay where they are and untouched
            // until pop_used below.
            match unsafe { queue.add(&inputs, &mut outputs) } {
                Ok(token) => assert!(lent.insert(token, lend).is_none()),
                Err(virtio_drivers::Error::QueueFull) => break,
                Err(error) => panic!("{error}"),
            }
            sent += 1;
            awake |= queue.should_notify();
        }

        if awake {
            device.disable_kicks();
            chains.clear();
            taken += device.take(random.below(SIZE), &mut map.translator(), &mut chains);
            for chain in chains.iter() {
                held.push(chain.done(serve(&map, &chains, chain)));
            }
            awake = random.below(2) == 0 || device.enable_kicks();
        }
        assert!(awake || taken == sent, "lost wake-up: the device sleeps");
        while !held.is_empty() && random.below(12) > 0 {
            device.complete(held.swap_remove(random.below(held.len())));
            done += 1;
        }
        driver_awake |= device.publish();
        assert!(driver_awake || done == back, "lost wake-up: the driver sleeps");

        while let Some(token) = driver_awake.then(|| queue.peek_used()).flatten() {
            let mut lend = lent.remove(&token).unwrap();
            let inputs: Vec<&[u8]> = lend.readable.iter().map(Vec::as_slice).collect();
            let mut outputs: Vec<&mut [u8]> = lend.writable.iter_mut().map(Vec::as_mut_slice).collect();
            // SAFETY: the buffers that `add` returned this token for.
            let len = unsafe { queue.pop_used(token, &inputs, &mut outputs) }.unwrap();
            let (asked, reply) = (lend.readable.concat(), lend.writable.concat());
            assert_eq!(len as usize, reply.len());
            assert_eq!(reply, answer(&asked, reply.len()));
            back += 1;
        }
        // Popping the last element asked for a call at the next one, by flag or by event index.
        driver_awake = false;
        assert_eq!(device.fault(), None);
    }
}
