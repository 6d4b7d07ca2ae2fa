//! The device half against a driver that somebody else wrote: rcore's `virtio-drivers`, which finds a
//! transport whose queues and configuration space are ours.
//!
//! Its `Hal` is an unsafe trait, hence the `unsafe` here.

mod common;

use std::cell::RefCell;
use std::fs::File;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use common::{device_ring, payload};
use ringferry_memory::{Area, GuestMemory, SharedMem};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_virtio_net::Features;
use ringferry_virtio_net::config::{NetConfig, S_LINK_UP};
use ringferry_virtio_net::device::{Receiveq, Refused, Transmitq};
use ringferry_virtio_net::driver::Queue;
use virtio_drivers::device::net::{TxBuffer, VirtIONet};
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{BufferDirection, Hal, PhysAddr};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use zerocopy::{FromBytes, Immutable, IntoBytes};

const BASE: u64 = 0x10_0000;
/// Bytes for a buffer on its way.
const SLOT: u64 = 4096;
const SIZE: usize = 16;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];

/// The state behind the static functions of [`Ours`].
struct Pool {
    map: GuestMemoryMmap,
    /// Address of the next queue page.
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

/// The peer's memory is ours: its rings live there, its buffers are copied there and back.
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
        assert!(buffer.len() as u64 <= SLOT);
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

/// Our device, which serves a queue when it is kicked.
struct Host {
    memory: Arc<GuestMemory>,
    offered: Features,
    negotiated: Features,
    status: DeviceStatus,
    receiveq: Option<Receiveq<Area>>,
    transmitq: Option<Transmitq<Area>>,
    /// Frames that the guest sent.
    sent: Vec<(Header, Vec<u8>)>,
}

impl Host {
    fn serve_transmitq(&mut self) {
        let memory = Arc::clone(&self.memory);
        let queue = self.transmitq.as_mut().unwrap();
        let mut burst = Burst::new();
        loop {
            queue.poll(&memory, 8, &mut burst);
            queue.complete();
            if !queue.ring().enable_kicks() {
                break;
            }
        }
        for frame in burst.frames() {
            let mut bytes = Vec::new();
            burst.flatten(frame, &mut bytes);
            self.sent.push((frame.header, bytes));
        }
    }

    fn deliver(&mut self, frame: &[u8]) -> Result<(), Refused> {
        let (first, rest) = frame.split_at(frame.len().min(64));
        let queue = self.receiveq.as_mut().unwrap();
        let answer = queue.deliver(&mut self.memory.translator(), Header::default(), first, &[rest.into()]);
        queue.flush();
        answer
    }
}

#[derive(Clone)]
struct HostTransport(Rc<RefCell<Host>>);

impl Transport for HostTransport {
    fn device_type(&self) -> DeviceType {
        DeviceType::Network
    }
    fn read_device_features(&mut self) -> u64 {
        self.0.borrow().offered.bits()
    }
    fn write_driver_features(&mut self, bits: u64) {
        self.0.borrow_mut().negotiated = Features::from_bits(bits).expect("only what was offered");
    }
    fn max_queue_size(&mut self, _: u16) -> u32 {
        256
    }
    fn notify(&mut self, queue: u16) {
        if queue == 1 {
            self.0.borrow_mut().serve_transmitq();
        }
    }
    fn get_status(&self) -> DeviceStatus {
        self.0.borrow().status
    }
    fn set_status(&mut self, status: DeviceStatus) {
        self.0.borrow_mut().status = status;
    }
    fn set_guest_page_size(&mut self, _: u32) {}
    fn requires_legacy_layout(&self) -> bool {
        false
    }
    fn queue_set(&mut self, queue: u16, size: u32, desc: PhysAddr, avail: PhysAddr, used: PhysAddr) {
        let mut host = self.0.borrow_mut();
        let features = host.negotiated;
        let place = Queue { size: size as u16, desc, avail, used };
        let mut ring = device_ring(&host.memory, &place, features);
        ring.enable_kicks();
        match queue {
            0 => host.receiveq = Some(Receiveq::new(ring, features)),
            1 => host.transmitq = Some(Transmitq::new(ring, features)),
            _ => panic!("queue {queue}"),
        }
    }
    fn queue_unset(&mut self, _: u16) {}
    fn queue_used(&mut self, _: u16) -> bool {
        false
    }
    fn ack_interrupt(&mut self) -> InterruptStatus {
        InterruptStatus::empty()
    }
    fn read_config_generation(&self) -> u32 {
        0
    }
    fn read_config_space<T: FromBytes + IntoBytes>(&self, offset: usize) -> virtio_drivers::Result<T> {
        let config = NetConfig { mac: MAC, status: S_LINK_UP, max_virtqueue_pairs: 1, mtu: 1500 };
        let mut value = T::new_zeroed();
        config.read(offset, value.as_mut_bytes());
        Ok(value)
    }
    fn write_config_space<T: IntoBytes + Immutable>(&mut self, _: usize, _: T) -> virtio_drivers::Result<()> {
        Err(virtio_drivers::Error::ConfigSpaceMissing)
    }
}

#[test]
fn our_device_and_the_network_driver_of_virtio_drivers() {
    for ring in [
        Features::empty(),
        Features::EVENT_IDX,
        Features::INDIRECT_DESC,
        Features::EVENT_IDX | Features::INDIRECT_DESC,
    ] {
        exchange(Features::VERSION_1 | Features::MAC | Features::STATUS | ring, ring);
    }
}

fn exchange(offered: Features, ring: Features) {
    let file = SharedMem::new("virtio-drivers", 0x10_0000).unwrap();
    let memory = Arc::new(GuestMemory::new(vec![file.map_at(BASE).unwrap()]).unwrap());
    let offset = FileOffset::new(File::from(file.fd().try_clone_to_owned().unwrap()), 0);
    let map = GuestMemoryMmap::from_ranges_with_files([(GuestAddress(BASE), file.size(), Some(offset))]);
    let slots = (0..128).map(|i| BASE + 0x4_0000 + SLOT * i).collect();
    POOL.set(Some(Pool { map: map.unwrap(), pages: BASE, slots }));

    let host = Host {
        memory,
        offered: offered | (Features::DEVICE - Features::EVENT_IDX - Features::INDIRECT_DESC),
        negotiated: Features::empty(),
        status: DeviceStatus::empty(),
        receiveq: None,
        transmitq: None,
        sent: Vec::new(),
    };
    let host = Rc::new(RefCell::new(host));
    let mut guest = VirtIONet::<Ours, _, SIZE>::new(HostTransport(Rc::clone(&host)), 2048).unwrap();
    assert_eq!(host.borrow().negotiated, offered, "a driver of small buffers");
    assert_eq!(host.borrow().negotiated & Features::DEVICE, Features::VERSION_1 | ring);
    assert_eq!(guest.mac_address(), MAC);

    // Its comparison with the event index does not wrap, so it can miss a kick at 65536.
    let packets = if ring.contains(Features::EVENT_IDX) { 30_000 } else { 70_000 };
    for number in 0..packets {
        let frame = payload(number, 14 + (number as usize * 61) % 1500);
        guest.send(TxBuffer::from(&frame)).unwrap();
        let sent = host.borrow_mut().sent.pop();
        assert!(sent == Some((Header::default(), frame.clone())), "{number}");

        assert!(!guest.can_recv());
        // Bursts of one to five, then all of them are received.
        for i in 0..number % 5 + 1 {
            host.borrow_mut().deliver(&payload(number + i, frame.len())).unwrap();
        }
        for i in 0..number % 5 + 1 {
            let buffer = guest.receive().unwrap();
            let header = Header::from_bytes(buffer.as_bytes().first_chunk().unwrap());
            assert_eq!(header, Header { num_buffers: 1, ..Header::default() });
            assert!(buffer.packet() == payload(number + i, frame.len()), "{number} {i}");
            guest.recycle_rx_buffer(buffer).unwrap();
        }
    }
    // Its buffers are small, and there are no more than the queue holds.
    assert_eq!(host.borrow_mut().deliver(&[0; 2048 - 11]), Err(Refused::TooBig));
    for number in 0..SIZE as u64 {
        assert_eq!(host.borrow_mut().deliver(&payload(number, 60)), Ok(()));
    }
    assert_eq!(host.borrow_mut().deliver(&[0; 60]), Err(Refused::NoBuffers));
    for number in 0..SIZE as u64 {
        assert!(guest.receive().unwrap().packet() == payload(number, 60));
    }
    let mut host = host.borrow_mut();
    assert_eq!(host.receiveq.as_mut().unwrap().ring().fault(), None);
    assert_eq!(host.transmitq.as_mut().unwrap().ring().fault(), None);
}
