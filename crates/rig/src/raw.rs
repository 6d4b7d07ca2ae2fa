//! A guest that breaks the rules: it writes its rings word by word, in a memory file that is what the
//! test wants it to be.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ringferry_memory::{GuestMemory, Region, RegionSpec, Words};
use ringferry_packet::vnet::Header;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::{Connection, RingPlan, Wanted, connect_device};
use ringferry_virtio_net::Features;
use rustix::fs::MemfdFlags;

use crate::process::{PATIENCE, eventually};

/// Where the guest's memory lies in its own address space.
pub const BASE: u64 = 1 << 32;
/// Bytes of the guest's memory.
pub const SIZE: u64 = 1 << 20;
/// Entries of either ring.
pub const ENTRIES: u16 = 256;
/// Where buffers may be put.
pub const BUFFERS: u64 = BASE + 0x4_0000;
/// The receiveq.
pub const RX: u16 = 0;
/// The transmitq.
pub const TX: u16 = 1;

/// VIRTQ_DESC_F_NEXT.
pub const NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE.
pub const WRITE: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT.
pub const INDIRECT: u16 = 4;

/// Features with which nothing is left to the receiver's software.
pub const FEATURES: Features = Features::VERSION_1.union(Features::INDIRECT_DESC).union(Features::MRG_RXBUF);

/// A memory file that its owner may shrink.
pub fn memory_file() -> OwnedFd {
    let file = rustix::fs::memfd_create("raw-guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, SIZE).unwrap();
    file
}

/// The region that such a file is.
pub fn region() -> RegionSpec {
    RegionSpec { guest_addr: BASE, size: SIZE, user_addr: BASE, mmap_offset: 0 }
}

/// A guest that breaks the rules.
pub struct Raw {
    pub connection: Connection,
    pub file: OwnedFd,
    memory: Arc<GuestMemory>,
    kicks: [EventFd; 2],
    pub errors: [EventFd; 2],
    /// Index of the next available entry, by queue.
    next: [u16; 2],
}

fn desc_table(queue: u16) -> u64 {
    BASE + u64::from(queue) * 0x1_0000
}

fn avail(queue: u16) -> u64 {
    desc_table(queue) + 0x4000
}

fn used(queue: u16) -> u64 {
    desc_table(queue) + 0x8000
}

impl Raw {
    /// Plugs in, with empty rings.
    pub fn plug(stream: Stream) -> Raw {
        let required = Features::VERSION_1.bits();
        // With the means to start anew.
        let protocol = Wanted::NET_PROTOCOL | ringferry_vhost_user::ProtocolFeatures::RESET_DEVICE;
        let wanted = Wanted { features: FEATURES.bits(), required, protocol };
        let mut connection = connect_device(stream, &wanted).unwrap();
        connection.frontend().set_timeout(PATIENCE);
        let file = memory_file();
        let region = Region::map(file.as_fd(), region()).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
        let event = || EventFd::new().unwrap();
        let mut raw = Raw {
            connection,
            file,
            memory,
            kicks: [event(), event()],
            errors: [event(), event()],
            next: [0, 0],
        };
        raw.start();
        raw
    }

    /// Empties the rings and starts the device.
    pub fn start(&mut self) {
        self.next = [0, 0];
        for queue in [RX, TX] {
            self.write(desc_table(queue), &[0; 0xc000]);
        }
        self.start_as_is();
    }

    /// Starts the device with rings that are what they are.
    pub fn start_as_is(&mut self) {
        let plan = |queue: u16| RingPlan {
            size: ENTRIES,
            base: None,
            desc: desc_table(queue),
            avail: avail(queue),
            used: used(queue),
            kick: Some(self.kicks[usize::from(queue)].as_fd()),
            call: None,
            err: Some(self.errors[usize::from(queue)].as_fd()),
            enabled: true,
        };
        let rings = [plan(RX), plan(TX)];
        self.connection.start(&[(region(), self.file.as_fd())], &rings).unwrap();
    }

    /// Writes bytes of guest memory.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        let mut translator = self.memory.translator();
        assert_eq!(translator.write(addr, bytes.len()).unwrap().copy_from(bytes), bytes.len());
    }

    /// Reads bytes of guest memory.
    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.translator().read(addr, len).unwrap().copy_to(&mut bytes);
        bytes
    }

    /// Writes descriptor `index` of the table at `table`.
    pub fn table_entry(&self, table: u64, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let desc = [&addr.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
        self.write(table + 16 * u64::from(index), &desc.concat());
    }

    /// Writes a descriptor of a queue.
    pub fn desc(&self, queue: u16, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.table_entry(desc_table(queue), index, addr, len, flags, next);
    }

    /// Makes a head available, whatever it is.
    pub fn offer(&mut self, queue: u16, head: u16) {
        let next = &mut self.next[usize::from(queue)];
        let slot = u64::from(*next % ENTRIES);
        *next = next.wrapping_add(1);
        let next = *next;
        self.write(avail(queue) + 4 + 2 * slot, &head.to_le_bytes());
        self.set_index(queue, next);
    }

    /// Sets the available index and rings the bell.
    pub fn set_index(&self, queue: u16, index: u16) {
        self.memory.area(avail(queue), 4).unwrap().store16_release(2, index);
        self.kick(queue);
    }

    pub fn kick(&self, queue: u16) {
        self.kicks[usize::from(queue)].signal().unwrap();
    }

    /// How far the device has come with a queue.
    pub fn used_index(&self, queue: u16) -> u16 {
        self.memory.area(used(queue), 4).unwrap().load16_acquire(2)
    }

    /// Makes `count` receive buffers of 2 KiB available.
    pub fn post(&mut self, count: u16) {
        for index in 0..count {
            self.desc(RX, index, BUFFERS + 2048 * u64::from(index), 2048, WRITE, 0);
            self.offer(RX, index);
        }
    }

    /// Sends a frame in one buffer, by descriptor 0, and waits until it is taken.
    #[track_caller]
    pub fn send(&mut self, frame: &[u8]) {
        let addr = BASE + SIZE / 2 + SIZE / 4;
        self.write(addr, &[&Header::default().to_bytes()[..], frame].concat());
        self.desc(TX, 0, addr, (Header::LEN + frame.len()) as u32, 0, 0);
        let before = self.used_index(TX);
        self.offer(TX, 0);
        eventually("the device takes the frame", || (self.used_index(TX) != before).then_some(()));
    }

    /// Waits for the first frame that is received; `len` bytes of it.
    #[track_caller]
    pub fn receive_first(&self, len: usize) -> Vec<u8> {
        eventually("a frame arrives", || (self.used_index(RX) > 0).then_some(()));
        self.read(BUFFERS + Header::LEN as u64, len)
    }
}
