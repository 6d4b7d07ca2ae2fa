//! Guest memory that a peer may write at any moment, also between two loads of the half under test.
//!
//! It is mapped as production maps it and made once per thread; each run begins with zeroes.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use ringferry_memory::testing::{self, Order, TestWords, Width};
use ringferry_memory::{Area, GuestMemory, SharedMem, Words};
use ringferry_ring::{Parts, part_bytes};

/// First guest physical address.
pub const BASE: u64 = 0x10_0000;

/// Guest address and bytes of each region: a large one, one that follows it (so that a buffer can cross
/// the border of two), and one behind a hole.
pub const REGIONS: [(u64, usize); 3] =
    [(BASE, 0x2_0000), (BASE + 0x2_0000, 0x1000), (BASE + 0x4_0000, 0x3000)];

thread_local! {
    static MEMORY: Rc<GuestMemory> = {
        let map = |(addr, len)| SharedMem::new("fuzz", len).unwrap().map_at(addr).unwrap();
        Rc::new(GuestMemory::new(REGIONS.into_iter().map(map).collect()).unwrap())
    };
}

/// The guest memory of one run.
#[derive(Clone, Debug)]
pub struct Guest {
    map: Rc<GuestMemory>,
    peer: Rc<Peer>,
}

/// The writes that the peer will do while the half under test works.
#[derive(Debug, Default)]
struct Peer {
    surprises: RefCell<VecDeque<Surprise>>,
    loads: Cell<u64>,
    struck: Cell<bool>,
}

/// A write of the peer just before one of our loads.
#[derive(Clone, Copy, Debug)]
pub struct Surprise {
    /// Number of loads before the write, counted from the surprise before.
    pub after: u8,
    /// If true, the value is xored with the word in memory.
    pub flip: bool,
    /// The value that is written to the word that is about to be loaded.
    pub value: u64,
}

impl Guest {
    /// Makes zeroed memory and a peer without planned writes.
    pub fn new() -> Self {
        let guest = Self { map: MEMORY.with(Rc::clone), peer: Rc::default() };
        for (addr, len) in REGIONS {
            guest.write(addr, &vec![0; len]);
        }
        guest
    }

    /// Returns the memory map that the half under test uses.
    pub fn map(&self) -> &GuestMemory {
        &self.map
    }

    /// Writes as far as there is memory.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        let (mut translator, mut done) = (self.map.translator(), 0);
        while done < bytes.len() {
            let piece = translator.write(addr.wrapping_add(done as u64), bytes.len() - done);
            let Some(piece) = piece else { break };
            done += piece.copy_from(&bytes[done..]);
        }
    }

    /// Reads up to `len` bytes, as far as there is memory.
    pub fn read_some(&self, addr: u64, len: usize) -> Vec<u8> {
        let (mut translator, mut bytes) = (self.map.translator(), vec![0; len]);
        let mut done = 0;
        while done < len {
            let piece = addr.checked_add(done as u64).and_then(|addr| translator.read(addr, len - done));
            let Some(piece) = piece else { break };
            done += piece.copy_to(&mut bytes[done..]);
        }
        bytes.truncate(done);
        bytes
    }

    /// Copies all bytes of all regions.
    pub fn snapshot(&self) -> Vec<u8> {
        let read = |(addr, len)| self.read(addr, len).expect("a region");
        REGIONS.map(read).concat()
    }

    /// Copies all bytes into an image that can be read by address.
    pub fn image(&self) -> Image {
        Image(self.snapshot())
    }

    /// Adds a write of the peer to its plan.
    pub fn plan(&self, surprise: Surprise) {
        self.peer.surprises.borrow_mut().push_back(surprise);
    }

    /// Calls `work`; returns what it returned, the loads it made, and whether the peer wrote meanwhile.
    pub fn watch<R>(&self, work: impl FnOnce() -> R) -> (R, u64, bool) {
        self.peer.loads.set(0);
        self.peer.struck.set(false);
        let result = work();
        (result, self.peer.loads.get(), self.peer.struck.get())
    }

    /// Returns a range that the half under test may read, and may write if it is `own`.
    pub fn area(&self, addr: u64, len: usize, own: bool) -> Hostile {
        let area = self.map.area(addr, len).expect("an area in memory");
        Hostile { area, peer: Rc::clone(&self.peer), own }
    }
}

/// Memory that a reader of rings can read by guest address.
pub trait Memory {
    /// Reads `len` bytes; `None` when some of them are in no memory.
    fn read(&self, addr: u64, len: usize) -> Option<Vec<u8>>;

    /// Reads a number; its bytes must all be in memory.
    fn number<const N: usize>(&self, addr: u64) -> [u8; N] {
        self.read(addr, N).expect("a number in memory").try_into().expect("as long as asked for")
    }
}

impl Memory for Guest {
    fn read(&self, addr: u64, len: usize) -> Option<Vec<u8>> {
        Some(self.read_some(addr, len)).filter(|bytes| bytes.len() == len)
    }
}

/// A copy of guest memory at some moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image(Vec<u8>);

impl Image {
    /// Returns the offset of an address in the copy, and the number of bytes of its region from there on.
    fn place(addr: u64) -> Option<(usize, usize)> {
        let mut before = 0;
        for (start, len) in REGIONS {
            let at = addr.wrapping_sub(start);
            if at < len as u64 {
                return Some((before + at as usize, len - at as usize));
            }
            before += len;
        }
        None
    }

    /// Writes as far as there is memory.
    pub fn write(&mut self, mut addr: u64, mut bytes: &[u8]) {
        while let Some((at, room)) = Self::place(addr)
            && !bytes.is_empty()
        {
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.0[at..at + now.len()].copy_from_slice(now);
            addr += now.len() as u64;
            bytes = later;
        }
    }
}

impl Memory for Image {
    fn read(&self, mut addr: u64, len: usize) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let (at, room) = Self::place(addr)?;
            let now = room.min(len - bytes.len());
            bytes.extend(&self.0[at..at + now]);
            addr += now as u64;
        }
        Some(bytes)
    }
}

impl Default for Guest {
    fn default() -> Self {
        Self::new()
    }
}

/// A range of guest memory as the half under test sees it.
#[derive(Clone, Debug)]
pub struct Hostile {
    area: Area,
    peer: Rc<Peer>,
    own: bool,
}

impl Hostile {
    /// Counts a load of the word at `at`; if a write of the peer is due, it happens before the load.
    fn strike(&self, at: usize, width: Width) {
        self.peer.loads.set(self.peer.loads.get() + 1);
        let mut surprises = self.peer.surprises.borrow_mut();
        match surprises.front_mut() {
            Some(Surprise { after: 0, flip, value }) => {
                let old = if *flip { testing::load(&self.area, at, width, Order::Relaxed) } else { 0 };
                testing::store(&self.area, at, width, Order::Relaxed, *value ^ old);
                self.peer.struck.set(true);
                surprises.pop_front();
            }
            Some(Surprise { after, .. }) => *after -= 1,
            None => {}
        }
    }
}

impl TestWords for Hostile {
    fn size(&self) -> usize {
        self.area.len()
    }
    fn aligned(&self, align: usize) -> bool {
        self.area.is_aligned(align)
    }
    fn load(&self, at: usize, width: Width, order: Order) -> u64 {
        self.strike(at, width);
        testing::load(&self.area, at, width, order)
    }
    fn store(&self, at: usize, width: Width, order: Order, value: u64) {
        assert!(self.own, "a store to what the peer owns");
        testing::store(&self.area, at, width, order, value);
    }
    fn fence() {}
}

/// The addresses of the areas of a queue, all in the first region.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// Number of entries of the ring.
    pub size: u16,
    /// True if the ring is packed.
    pub packed: bool,
    /// Addresses of the descriptor, driver and device area.
    pub at: [u64; 3],
    /// First address behind the areas, for indirect tables and buffers.
    pub rest: u64,
}

impl Places {
    /// Places the areas one behind the other.
    pub fn new(size: u16, packed: bool) -> Self {
        let mut next = BASE;
        let at = part_bytes(size, packed).map(|len| {
            let at = next;
            next = (at + len as u64).next_multiple_of(64);
            at
        });
        Places { size, packed, at, rest: next.next_multiple_of(256) }
    }

    /// Returns the areas, for a half that may write those that are its `own`.
    pub fn parts(&self, guest: &Guest, own: [bool; 3]) -> Parts<Hostile> {
        let lens = part_bytes(self.size, self.packed);
        let [desc, driver, device] = std::array::from_fn(|i| guest.area(self.at[i], lens[i], own[i]));
        Parts { size: self.size, desc, driver, device }
    }

    /// Returns the areas as a device half may access them.
    pub fn of_device(&self, guest: &Guest) -> Parts<Hostile> {
        self.parts(guest, [self.packed, false, true])
    }

    /// Returns the areas as a driver half may access them.
    pub fn of_driver(&self, guest: &Guest) -> Parts<Hostile> {
        self.parts(guest, [true, true, false])
    }

    /// Address of the `i`-th descriptor.
    pub fn desc(&self, i: u16) -> u64 {
        self.at[0] + 16 * u64::from(i % self.size)
    }

    /// Address of an entry of the available ring.
    pub fn head(&self, index: u16) -> u64 {
        self.at[1] + 4 + 2 * u64::from(index % self.size)
    }

    /// Address of an entry of the used ring.
    pub fn element(&self, index: u16) -> u64 {
        self.at[2] + 4 + 8 * u64::from(index % self.size)
    }
}
