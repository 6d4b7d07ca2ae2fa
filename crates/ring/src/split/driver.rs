//! The driver half of a split ring: adds chains, publishes once per burst, collects what came back.
//!
//! Descriptors are linked through private memory. What the device could have scribbled over the
//! descriptor table is never read back.

use ringferry_memory::{Table, Words};

use super::{DESC, Desc, F_INDIRECT, F_NEXT, F_NO_SIGNAL, F_WRITE, FLAGS, IDX, Layout, passed};
use crate::chain::Buffer;
use crate::{Fault, RingFeatures};

/// Why a chain was not added; its token comes back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddError<T> {
    /// Not enough free descriptors now; collect and try again.
    #[error("the ring has no room for the chain")]
    Full(T),
    /// The chain has no buffers or more than the ring could ever hold.
    #[error("a chain needs between 1 and queue-size buffers")]
    BadChain(T),
    /// The ring is broken.
    #[error("the ring is broken")]
    Broken(T),
}

/// A chain that the device has finished with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used<T> {
    /// What the chain was added with.
    pub token: T,
    /// Bytes the device says it wrote. Not to be trusted beyond what was posted.
    pub len: u32,
}

/// Memory for indirect tables: `entries` descriptors for every head of the ring.
#[derive(Debug)]
pub struct IndirectTables<A> {
    /// `size * entries * 16` bytes.
    pub area: A,
    /// Guest physical address of the first byte of `area`.
    pub addr: u64,
    /// Longest chain that goes into a table.
    pub entries: u16,
}

/// One side of one virtqueue, owned by one thread. `T` names a chain for its owner.
#[derive(Debug)]
pub struct Driver<A: Words, T> {
    layout: Layout<A>,
    features: RingFeatures,
    tables: Option<IndirectTables<A>>,
    /// Per descriptor: the next free one, or the next of its chain.
    link: Vec<u16>,
    /// Per head: descriptors in its chain and its token, while the device has it.
    outstanding: Vec<Option<(u16, T)>>,
    free_head: u16,
    free: u16,
    /// Shadow of `avail.idx`, ahead of it by what is unpublished.
    next_avail: u16,
    /// What `avail.idx` says.
    published: u16,
    /// Shadow of `avail.flags`.
    flags: u16,
    /// Shadow of `used_event`.
    event: u16,
    /// The next used element to collect.
    next_used: u16,
    /// The device's `used.idx` when it was last loaded.
    used_seen: u16,
    fault: Option<Fault>,
}

impl<A: Words, T> Driver<A, T> {
    /// Sets up a fresh ring (all indexes 0) over zeroed memory that the device does not use yet.
    /// Calls start off. `tables` serve INDIRECT_DESC when it was negotiated.
    ///
    /// # Panics
    /// When `tables` are too small for the ring: a bug of the caller.
    pub fn new(layout: Layout<A>, features: RingFeatures, tables: Option<IndirectTables<A>>) -> Self {
        let size = layout.size;
        if let Some(tables) = &tables {
            let need = usize::from(size) * usize::from(tables.entries) * DESC;
            assert!(tables.area.len() >= need, "indirect tables too small");
        }
        layout.avail.store16(FLAGS, 0);
        layout.avail.store16(layout.used_event(), 0);
        layout.avail.store16_release(IDX, 0);
        let mut driver = Self {
            features,
            tables: tables.filter(|_| features.indirect),
            link: (1..=size).collect(),
            outstanding: (0..size).map(|_| None).collect(),
            free_head: 0,
            free: size,
            next_avail: 0,
            published: 0,
            flags: 0,
            event: 0,
            next_used: 0,
            used_seen: 0,
            fault: None,
            layout,
        };
        driver.disable_calls();
        driver
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.layout.size
    }

    /// Free descriptors.
    #[inline]
    pub fn free(&self) -> u16 {
        self.free
    }

    /// Chains added and not yet collected.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.next_avail.wrapping_sub(self.next_used)
    }

    /// The violation that broke this ring, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Adds a chain: first what the device reads, then what it writes. Not visible to the device
    /// until [`Driver::publish`].
    ///
    /// # Errors
    /// See [`AddError`]; nothing was added and the token is back with the caller.
    #[inline]
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer], token: T) -> Result<(), AddError<T>> {
        let count = readable.len() + writable.len();
        if self.fault.is_some() {
            return Err(AddError::Broken(token));
        }
        if count == 0 || count > usize::from(self.layout.size) {
            return Err(AddError::BadChain(token));
        }
        let count = count as u16;
        let buffers = readable
            .iter()
            .map(|buffer| (*buffer, 0))
            .chain(writable.iter().map(|buffer| (*buffer, F_WRITE)));
        let head = self.free_head;
        let used = match &self.tables {
            Some(tables) if count > 1 && count <= tables.entries && self.free > 0 => {
                let table = DESC * usize::from(tables.entries) * usize::from(head);
                for (i, (buffer, flags)) in buffers.enumerate() {
                    let i = i as u16;
                    let next = if i + 1 < count { F_NEXT } else { 0 };
                    let desc = Desc { addr: buffer.addr, len: buffer.len, flags: flags | next, next: i + 1 };
                    put(&tables.area, table + DESC * usize::from(i), desc);
                }
                let desc = Desc {
                    addr: tables.addr + table as u64,
                    len: u32::from(count) * DESC as u32,
                    flags: F_INDIRECT,
                    next: 0,
                };
                self.layout.desc.store(head, desc.into_words());
                self.free_head = self.link[usize::from(head)];
                1
            }
            _ if count <= self.free => {
                let mut index = head;
                for (i, (buffer, flags)) in buffers.enumerate() {
                    let next = self.link[usize::from(index)];
                    let more = if i + 1 < usize::from(count) { F_NEXT } else { 0 };
                    let desc = Desc { addr: buffer.addr, len: buffer.len, flags: flags | more, next };
                    self.layout.desc.store(index, desc.into_words());
                    index = next;
                }
                self.free_head = index;
                count
            }
            _ => return Err(AddError::Full(token)),
        };
        self.free -= used;
        self.outstanding[usize::from(head)] = Some((used, token));
        self.layout.heads.store(self.next_avail, head);
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(())
    }

    /// Shows all added chains to the device with one store; says whether it wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.published == self.next_avail {
            return false;
        }
        let old = std::mem::replace(&mut self.published, self.next_avail);
        // Release: descriptors and ring entries before the index that shows them.
        self.layout.avail.store16_release(IDX, self.next_avail);
        // Pairs with the fence in Device::enable_kicks.
        A::full_fence();
        if self.features.event_idx {
            let event = self.layout.used.load16(self.layout.avail_event());
            passed(event, self.next_avail, old)
        } else {
            self.layout.used.load16(FLAGS) & F_NO_SIGNAL == 0
        }
    }

    /// How many chains can be collected now, loading the device's index only when the cached one
    /// has run dry.
    #[inline]
    pub fn completed(&mut self) -> u16 {
        let known = self.used_seen.wrapping_sub(self.next_used);
        // A broken ring has nothing to collect, whatever was seen before it broke.
        if known > 0 && self.fault.is_none() { known } else { self.refresh() }
    }

    #[inline]
    fn refresh(&mut self) -> u16 {
        if self.fault.is_some() {
            return 0;
        }
        // Acquire: used elements and packet bytes are read after the index that shows them.
        let seen = self.layout.used.load16_acquire(IDX);
        let ahead = seen.wrapping_sub(self.next_used);
        if ahead > self.published.wrapping_sub(self.next_used) {
            self.break_with(Fault::IndexJump(ahead));
            return 0;
        }
        self.used_seen = seen;
        ahead
    }

    #[cold]
    fn break_with(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }

    /// The next chain the device has finished with, in the device's order.
    #[inline]
    pub fn collect(&mut self) -> Option<Used<T>> {
        if self.completed() == 0 {
            return None;
        }
        let [id, len] = self.layout.elements.load(self.next_used);
        if id >= u32::from(self.layout.size) {
            self.break_with(Fault::BadIndex(id));
            return None;
        }
        let Some((count, token)) = self.outstanding[id as usize].take() else {
            self.break_with(Fault::NotOutstanding(id));
            return None;
        };
        self.release(id as u16, count);
        self.next_used = self.next_used.wrapping_add(1);
        Some(Used { token, len })
    }

    /// Puts the chain's descriptors back in front of the free list, so the ones touched last are
    /// used next.
    #[inline]
    fn release(&mut self, head: u16, count: u16) {
        let mut last = head;
        for _ in 1..count {
            last = self.link[usize::from(last)];
        }
        self.link[usize::from(last)] = self.free_head;
        self.free_head = head;
        self.free += count;
    }

    /// Takes back a chain that the device, which must have stopped, never used. `None` when there
    /// are no more. `avail.idx` steps back, in the shadow and then in memory.
    pub fn detach_unused(&mut self) -> Option<T> {
        let head = self.outstanding.iter().position(Option::is_some)?;
        let (count, token) = self.outstanding[head].take()?;
        self.release(head as u16, count);
        self.next_avail = self.next_avail.wrapping_sub(1);
        self.published = self.next_avail;
        self.layout.avail.store16(IDX, self.next_avail);
        Some(token)
    }

    /// Tells the device not to call: the driver polls.
    #[inline]
    pub fn disable_calls(&mut self) {
        // With EVENT_IDX the flag must stay 0 (2.7.7.1); see Device::disable_kicks.
        if !self.features.event_idx && self.flags != F_NO_SIGNAL {
            self.flags = F_NO_SIGNAL;
            self.layout.avail.store16(FLAGS, F_NO_SIGNAL);
        }
    }

    /// Asks the device to call at the next completion. True when there is one already, for which no
    /// call may come: the caller must not sleep.
    #[inline]
    pub fn enable_calls(&mut self) -> bool {
        self.enable_calls_at(self.next_used)
    }

    /// Asks the device to call when three quarters of what is outstanding has come back: enough
    /// for a transmit queue, which only wants room. True when so much is there already.
    #[inline]
    pub fn enable_calls_delayed(&mut self) -> bool {
        let outstanding = self.published.wrapping_sub(self.next_used);
        self.enable_calls_at(self.next_used.wrapping_add((u32::from(outstanding) * 3 / 4) as u16))
    }

    #[inline]
    fn enable_calls_at(&mut self, event: u16) -> bool {
        if self.fault.is_some() {
            return false;
        }
        if self.features.event_idx {
            if self.event != event {
                self.event = event;
                self.layout.avail.store16(self.layout.used_event(), event);
            }
        } else if self.flags != 0 {
            self.flags = 0;
            self.layout.avail.store16(FLAGS, 0);
        }
        // Pairs with the fence in Device::publish: either it sees our wish, or we see its index.
        A::full_fence();
        self.refresh() > event.wrapping_sub(self.next_used)
    }
}

#[inline(always)]
fn put<A: Words>(area: &A, at: usize, desc: Desc) {
    let [addr, rest] = desc.into_words();
    area.store64(at, addr);
    area.store64(at + 8, rest);
}
