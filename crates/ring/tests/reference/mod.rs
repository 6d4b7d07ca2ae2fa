//! A reference implementation of both halves of a packed ring, slow and simple: positions count slots without wrapping,
//! each field is accessed separately, and every bit is checked. It was written from the text of VIRTIO 1.4, 2.8 alone,
//! independently of the crate's code.

use std::collections::VecDeque;

use ringferry_memory::Words;
use ringferry_ring::{Buffer, Parts};

use crate::common::{AVAIL, BASE, Heap, INDIRECT, NEXT, Random, USED, WRITE};

/// A descriptor, `struct pvirtq_desc` (2.8.13).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Desc {
    addr: u64,
    len: u32,
    id: u16,
    flags: u16,
}

/// The parts of a queue.
struct Queue {
    parts: Parts<Heap>,
    size: u64,
}

impl Queue {
    fn new(parts: Parts<Heap>) -> Self {
        Queue { size: parts.size.into(), parts }
    }

    /// 2.8.1: a wrap counter is 1 in the first lap and toggles at the end of each.
    fn wrap(&self, at: u64) -> bool {
        (at / self.size).is_multiple_of(2)
    }

    fn offset(&self, at: u64) -> usize {
        16 * (at % self.size) as usize
    }

    /// 2.8.14: a position as event suppression has it.
    fn off_wrap(&self, at: u64) -> u16 {
        (at % self.size) as u16 | u16::from(self.wrap(at)) << 15
    }

    fn flags(&self, at: u64) -> u16 {
        self.parts.desc.load16(self.offset(at) + 14)
    }

    fn read(&self, at: u64) -> Desc {
        let (desc, offset) = (&self.parts.desc, self.offset(at));
        Desc {
            addr: desc.load64(offset),
            len: desc.load32(offset + 8),
            id: desc.load16(offset + 12),
            flags: desc.load16(offset + 14),
        }
    }

    /// Writes all but the flags.
    fn write(&self, at: u64, Desc { addr, len, id, .. }: Desc) {
        let (desc, offset) = (&self.parts.desc, self.offset(at));
        desc.store64(offset, addr);
        desc.store32(offset + 8, len);
        desc.store16(offset + 12, id);
    }

    fn write_flags(&self, at: u64, flags: u16) {
        self.parts.desc.store16(self.offset(at) + 14, flags);
    }
}

/// The contents of an event suppression structure (2.8.14).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventSuppression {
    /// `RING_EVENT_FLAGS_ENABLE`: a signal is wanted for every descriptor.
    Enable,
    /// `RING_EVENT_FLAGS_DISABLE`: no signal is wanted.
    Disable,
    /// `RING_EVENT_FLAGS_DESC`: a signal is wanted when the slot at this position is made available or used.
    At(u64),
}

impl EventSuppression {
    /// Makes a random one; [`EventSuppression::At`], with a position that may be long past, only with EVENT_IDX.
    pub fn random(random: &mut Random, event_idx: bool, near: u64) -> EventSuppression {
        match random.below(if event_idx { 6 } else { 2 }) {
            0 => EventSuppression::Enable,
            1 => EventSuppression::Disable,
            _ => EventSuppression::At((near + random.below(12) as u64).saturating_sub(4)),
        }
    }

    fn write(self, queue: &Queue, area: &Heap) {
        let (off_wrap, flags) = match self {
            EventSuppression::Enable => (0x1234, 0),
            EventSuppression::Disable => (0x4321, 1),
            EventSuppression::At(at) => (queue.off_wrap(at), 2),
        };
        area.store16(0, off_wrap);
        area.store16(2, flags);
    }

    /// Returns true if the other side must signal after it has made available or used the slots from `old` to `new`.
    pub fn fires(self, old: u64, new: u64, size: u64) -> bool {
        match self {
            EventSuppression::Enable => old < new,
            EventSuppression::Disable => false,
            // Of a position only its slot and the wrap counter of its lap are stored.
            EventSuppression::At(at) => (old..new).any(|slot| slot % (2 * size) == at % (2 * size)),
        }
    }

    /// Checks that `area` contains this, with all reserved bits 0.
    fn check(self, queue: &Queue, area: &Heap) {
        let (off_wrap, flags) = (area.load16(0), area.load16(2));
        match self {
            EventSuppression::Enable => assert_eq!(flags, 0),
            EventSuppression::Disable => assert_eq!(flags, 1),
            EventSuppression::At(at) => assert_eq!((off_wrap, flags), (queue.off_wrap(at), 2)),
        }
    }
}

/// A chain in the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Buffer id of the chain.
    pub id: u16,
    /// Device-readable buffers, in order.
    pub readable: Vec<Buffer>,
    /// Device-writable buffers, in order.
    pub writable: Vec<Buffer>,
    /// Number of ring descriptors that it occupies.
    pub slots: u64,
}

impl Chain {
    /// Returns the sum of the lengths of the writable buffers.
    pub fn room(&self) -> u32 {
        self.writable.iter().map(|buffer| buffer.len).sum()
    }
}

/// The driver half (2.8.17 to 2.8.20).
pub struct Driver {
    queue: Queue,
    memory: Heap,
    in_order: bool,
    /// Guest address of the indirect tables, [`TABLE`] bytes for each id.
    tables: u64,
    free_ids: Vec<u16>,
    /// Outstanding chains, oldest first.
    out: VecDeque<Chain>,
    /// The descriptor that was written last to each slot.
    written: Vec<Desc>,
    next_avail: u64,
    next_used: u64,
}

/// Bytes of the indirect table of one chain.
pub const TABLE: usize = 16 * 8;

impl Driver {
    /// Makes a driver over a zeroed ring.
    pub fn new(parts: Parts<Heap>, memory: Heap, tables: u64, in_order: bool) -> Self {
        let size = parts.size;
        let zero = Desc { addr: 0, len: 0, id: 0, flags: 0 };
        let written = vec![zero; size.into()];
        let (out, free_ids) = (VecDeque::new(), (0..size).collect());
        let queue = Queue::new(parts);
        Driver { queue, memory, in_order, tables, free_ids, out, written, next_avail: 0, next_used: 0 }
    }

    /// Slots that may be written.
    pub fn free(&self) -> u64 {
        self.queue.size - (self.next_avail - self.next_used)
    }

    /// Makes a chain available at once, under an id picked at random.
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer], indirect: bool, random: &mut Random) {
        let id = self.free_ids.swap_remove(random.below(self.free_ids.len()));
        let direction = |buffers: &[Buffer], flags| {
            buffers.iter().map(move |b| Desc { addr: b.addr, len: b.len, id, flags }).collect::<Vec<_>>()
        };
        let mut descs = [direction(readable, 0), direction(writable, WRITE)].concat();
        if indirect {
            let addr = self.tables + (TABLE * usize::from(id)) as u64;
            for (i, desc) in descs.iter().enumerate() {
                let at = (addr - BASE) as usize + 16 * i;
                self.memory.store64(at, desc.addr);
                self.memory.store32(at + 8, desc.len);
                // Reserved, ignored by the device.
                self.memory.store16(at + 12, random.bits() as u16);
                self.memory.store16(at + 14, desc.flags);
            }
            // WRITE is reserved here, and ignored.
            let flags = INDIRECT | if random.below(2) == 0 { WRITE } else { 0 };
            descs = vec![Desc { addr, len: 16 * descs.len() as u32, id, flags }];
        }
        let slots = descs.len() as u64;
        assert!(slots <= self.free());
        let last = descs.len() - 1;
        for (i, desc) in descs.iter_mut().enumerate() {
            let at = self.next_avail + i as u64;
            // Only the last one's id counts.
            desc.id = if i == last { id } else { random.bits() as u16 };
            desc.flags |= if i == last { 0 } else { NEXT };
            desc.flags |= if self.queue.wrap(at) { AVAIL } else { USED };
            self.queue.write(at, *desc);
            if i > 0 {
                self.queue.write_flags(at, desc.flags);
            }
            self.written[(at % self.queue.size) as usize] = *desc;
        }
        self.queue.write_flags(self.next_avail, descs[0].flags);
        self.next_avail += slots;
        let (readable, writable) = (readable.to_vec(), writable.to_vec());
        self.out.push_back(Chain { id, readable, writable, slots });
    }

    /// The chains of the next used descriptor, if there is one, each with the bytes written.
    pub fn collect(&mut self) -> Vec<(Chain, u32)> {
        let at = self.next_used;
        let flags = self.queue.flags(at);
        let wrap = self.queue.wrap(at);
        if (flags & AVAIL != 0) != wrap || (flags & USED != 0) != wrap {
            return Vec::new();
        }
        let Desc { id, len, .. } = self.queue.read(at);
        assert_eq!(flags & !(AVAIL | USED | WRITE), 0, "reserved bits of a used descriptor are set");
        let age = self.out.iter().position(|chain| chain.id == id).expect("an id that is not out");
        // In order: all up to this one, the others as if used completely.
        let first = if self.in_order { 0 } else { age };
        let used: Vec<Chain> = self.out.drain(first..=age).collect();
        let slots: u64 = used.iter().map(|chain| chain.slots).sum();
        for skipped in at + 1..at + slots {
            let slot = (skipped % self.queue.size) as usize;
            assert_eq!(self.queue.read(skipped), self.written[slot], "a slot to skip was written");
        }
        self.next_used += slots;
        assert!(self.next_used <= self.next_avail, "more used than was available");
        self.free_ids.extend(used.iter().map(|chain| chain.id));
        let last = used.len() - 1;
        let len_of = |i: usize, chain: &Chain| match (i == last, flags & WRITE != 0) {
            (true, true) => len,
            (true, false) => 0,
            (false, _) => chain.room(),
        };
        used.into_iter().enumerate().map(|(i, chain)| (chain.clone(), len_of(i, &chain))).collect()
    }

    /// Writes the driver's event suppression structure.
    pub fn suppress(&self, event: EventSuppression) {
        event.write(&self.queue, &self.queue.parts.driver);
    }

    /// Checks the device's event suppression structure.
    pub fn check_suppression(&self, event: EventSuppression) {
        event.check(&self.queue, &self.queue.parts.device);
    }

    /// Returns the position of the next used descriptor.
    pub fn next_used(&self) -> u64 {
        self.next_used
    }
}

/// The device half (2.8.17 to 2.8.20).
pub struct Device {
    queue: Queue,
    memory: Heap,
    next_avail: u64,
    next_used: u64,
}

impl Device {
    /// Makes a device over a zeroed ring.
    pub fn new(parts: Parts<Heap>, memory: Heap) -> Self {
        Device { queue: Queue::new(parts), memory, next_avail: 0, next_used: 0 }
    }

    /// Returns true if the descriptor at `at` is available in its lap.
    fn is_available(&self, at: u64) -> bool {
        let (flags, wrap) = (self.queue.flags(at), self.queue.wrap(at));
        (flags & AVAIL != 0) == wrap && (flags & USED != 0) != wrap
    }

    /// The next chain, if there is one.
    pub fn take(&mut self) -> Option<Chain> {
        let first = self.next_avail;
        if !self.is_available(first) {
            return None;
        }
        let mut chain = Chain { id: 0, readable: Vec::new(), writable: Vec::new(), slots: 0 };
        loop {
            let at = self.next_avail;
            assert!(self.is_available(at), "2.8.6: all flags of a list are set before the first one's");
            let desc = self.queue.read(at);
            assert_eq!(desc.flags & !(AVAIL | USED | NEXT | WRITE | INDIRECT), 0, "unknown flags");
            self.next_avail += 1;
            chain.slots += 1;
            assert!(chain.slots <= self.queue.size);
            if desc.flags & INDIRECT != 0 {
                assert_eq!((desc.flags & NEXT, chain.slots), (0, 1), "2.8.7: a list of one kind");
                self.table(desc, &mut chain);
            } else {
                let into = if desc.flags & WRITE != 0 { &mut chain.writable } else { &mut chain.readable };
                into.push(Buffer { addr: desc.addr, len: desc.len });
                assert!(desc.flags & WRITE != 0 || chain.writable.is_empty(), "readable behind writable");
            }
            if desc.flags & NEXT == 0 {
                assert!(u64::from(desc.id) < self.queue.size);
                chain.id = desc.id;
                return Some(chain);
            }
        }
    }

    fn table(&self, Desc { addr, len, .. }: Desc, chain: &mut Chain) {
        assert!(len > 0 && len.is_multiple_of(16) && u64::from(len) / 16 <= self.queue.size);
        for entry in 0..len as usize / 16 {
            let at = (addr - BASE) as usize + 16 * entry;
            let buffer = Buffer { addr: self.memory.load64(at), len: self.memory.load32(at + 8) };
            match self.memory.load16(at + 14) {
                0 => {
                    assert!(chain.writable.is_empty(), "readable behind writable");
                    chain.readable.push(buffer);
                }
                WRITE => chain.writable.push(buffer),
                flags => panic!("2.8.21: {flags:#x} in a table"),
            }
        }
    }

    /// Uses chains, the first one's flags last; each element of `batches` is one used descriptor for
    /// all chains in it, with the bytes written to the last. Returns the positions before and after.
    pub fn complete(&mut self, batches: &[(&[Chain], u32)]) -> (u64, u64) {
        let old = self.next_used;
        let mut first = None;
        for (chains, len) in batches {
            let at = self.next_used;
            let last = chains.last().expect("a batch of chains");
            let wrap = if self.queue.wrap(at) { AVAIL | USED } else { 0 };
            let flags = wrap | if last.writable.is_empty() { 0 } else { WRITE };
            // The address is unused.
            self.queue.write(at, Desc { addr: !0, len: *len, id: last.id, flags });
            if first.is_none() {
                first = Some((at, flags));
            } else {
                self.queue.write_flags(at, flags);
            }
            self.next_used += chains.iter().map(|chain| chain.slots).sum::<u64>();
        }
        if let Some((at, flags)) = first {
            self.queue.write_flags(at, flags);
        }
        assert!(self.next_used <= self.next_avail);
        (old, self.next_used)
    }

    /// Writes the device's event suppression structure.
    pub fn suppress(&self, event: EventSuppression) {
        event.write(&self.queue, &self.queue.parts.device);
    }

    /// Checks the driver's event suppression structure.
    pub fn check_suppression(&self, event: EventSuppression) {
        event.check(&self.queue, &self.queue.parts.driver);
    }

    /// Returns the position of the next available descriptor.
    pub fn next_avail(&self) -> u64 {
        self.next_avail
    }
}
