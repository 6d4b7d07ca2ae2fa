//! The device half of a split ring: takes chains, completes them, publishes once per burst.

use arrayvec::ArrayVec;
use ringferry_memory::{Table, Words};

use super::{DESC, Desc, F_INDIRECT, F_NEXT, F_NO_SIGNAL, F_WRITE, FLAGS, IDX, Layout, passed};
use crate::chain::{Buffer, Chain, Chains, Tables};
use crate::{Fault, RingFeatures};

/// How many ring entries are looked at (and their descriptors prefetched) before any is walked.
/// 16, 32 and 64 were alike within noise; 32 matches the usual burst.
const LOOKAHEAD: usize = 32;

/// Descriptors of a chain at most, however large the queue. The specification allows as many as the
/// queue has entries; a chain that long would only serve to keep the device busy. No driver makes
/// chains longer than the 1024 pieces an `iovec` array may have.
const MAX_CHAIN: u16 = 1024;

/// One side of one virtqueue, owned by one thread.
#[derive(Debug)]
pub struct Device<A: Words> {
    layout: Layout<A>,
    features: RingFeatures,
    /// The next entry of the available ring to take.
    next_avail: u16,
    /// The driver's `avail.idx` when it was last loaded.
    avail_seen: u16,
    /// Where the next completion goes: the shadow of `used.idx`, ahead of it by what is unpublished.
    next_used: u16,
    /// What `used.idx` says.
    published: u16,
    /// Shadow of `used.flags`.
    flags: u16,
    /// Shadow of `avail_event`.
    event: u16,
    fault: Option<Fault>,
}

impl<A: Words> Device<A> {
    /// Takes over a ring where it stands: at the used index in its memory, 0 on a fresh ring. Kicks
    /// start off.
    ///
    /// A device that stops in order has completed what it took, so that index is also what it
    /// answered to GET_VRING_BASE and what SET_VRING_BASE brings back. After one that died with
    /// chains in hand it is the only place to go on from: those chains are taken again rather than
    /// lost to the ring for ever.
    pub fn new(layout: Layout<A>, features: RingFeatures) -> Self {
        // The only time the device reads what it publishes.
        let used = layout.used.load16(IDX);
        let event = layout.used.load16(layout.avail_event());
        let mut device = Self {
            features,
            next_avail: used,
            avail_seen: used,
            next_used: used,
            published: used,
            flags: 0,
            event,
            fault: None,
            layout,
        };
        device.layout.used.store16(FLAGS, 0);
        device.disable_kicks();
        device
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.layout.size
    }

    /// The next available entry to take: what vhost-user's GET_VRING_BASE returns.
    pub fn base(&self) -> u16 {
        self.next_avail
    }

    /// The used index, unpublished completions included.
    pub fn used_index(&self) -> u16 {
        self.next_used
    }

    /// The violation that broke this ring, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Breaks the ring for a violation found outside it (a buffer in no memory, say).
    #[cold]
    pub fn break_with(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }

    /// How many chains can be taken now, looking at the driver's index only when the cached one
    /// has run dry.
    #[inline]
    pub fn available(&mut self) -> u16 {
        let known = self.avail_seen.wrapping_sub(self.next_avail);
        // A broken ring has nothing to take, whatever was seen before it broke.
        if known > 0 && self.fault.is_none() { known } else { self.refresh() }
    }

    /// Loads the driver's index and says how many chains can be taken.
    #[inline]
    pub fn refresh(&mut self) -> u16 {
        if self.fault.is_some() {
            return 0;
        }
        // Acquire: the ring entries and descriptors behind the index are read after it.
        let seen = self.layout.avail.load16_acquire(IDX);
        let ahead = seen.wrapping_sub(self.next_avail);
        // What was taken and not completed occupies descriptors too: a driver has never more than
        // `size` chains out. Unchecked, it could make the device hold any number of them.
        let in_flight = self.next_avail.wrapping_sub(self.next_used);
        if ahead > self.layout.size.saturating_sub(in_flight) {
            self.break_with(Fault::IndexJump(ahead));
            return 0;
        }
        self.avail_seen = seen;
        ahead
    }

    /// Appends up to `max` chains to `out` and returns how many. A violation breaks the ring; the
    /// chains before it are still returned.
    #[inline]
    pub fn take(&mut self, max: usize, tables: &mut impl Tables, out: &mut Chains) -> usize {
        let mut taken = 0;
        while taken < max {
            let ready = usize::from(self.available()).min(max - taken).min(LOOKAHEAD);
            if ready == 0 {
                break;
            }
            let next = self.next_avail;
            let heads: ArrayVec<u16, LOOKAHEAD> = (0..ready as u16)
                .map(|i| {
                    let head = self.layout.heads.load(next.wrapping_add(i));
                    self.layout.desc.prefetch(head);
                    head
                })
                .collect();
            let before = out.len();
            let result = self.take_heads(&heads, tables, out);
            let done = out.len() - before;
            self.next_avail = self.next_avail.wrapping_add(done as u16);
            taken += done;
            if let Err(fault) = result {
                self.break_with(fault);
                break;
            }
        }
        taken
    }

    /// Reads the chains that begin at `heads`, checks them and adds them to `out`; stops at the first
    /// that breaks a rule.
    #[inline(always)]
    fn take_heads(&self, heads: &[u16], tables: &mut impl Tables, out: &mut Chains) -> Result<(), Fault> {
        let mut at = 0;
        loop {
            // Most chains are one descriptor. A run of them is read first and added at once: counters
            // that live in memory would otherwise be incremented, one after the other, per chain.
            let mut run = ArrayVec::<[u64; 2], LOOKAHEAD>::new();
            let mut last = [0; 2];
            for &head in heads[at..].iter().take_while(|head| **head < self.layout.size) {
                last = self.layout.desc.load(head);
                if Desc::from_words(last).flags & (F_NEXT | F_INDIRECT) != 0 {
                    break;
                }
                run.push(last);
            }
            out.extend(heads[at..].iter().zip(&run).map(|(&head, words)| {
                let desc = Desc::from_words(*words);
                (head, desc.flags & F_WRITE != 0, Buffer { addr: desc.addr, len: desc.len })
            }));
            at += run.len();
            // What ended the run: the end, a head outside the table, or a chain that starts with `last`.
            let Some(&head) = heads.get(at) else { return Ok(()) };
            self.check(head)?;
            let mut chain = out.open(head);
            self.walk(Desc::from_words(last), tables, out, &mut chain)?;
            // Either sum is below 2^32; so must be both together (2.7.5).
            chain.readable_len.checked_add(chain.writable_len).ok_or(Fault::ChainTooLarge)?;
            out.close(chain);
            at += 1;
        }
    }

    fn check(&self, index: u16) -> Result<u16, Fault> {
        if index < self.layout.size { Ok(index) } else { Err(Fault::BadIndex(u32::from(index))) }
    }

    /// Gives back the last `n` chains taken, none of which was completed.
    pub fn untake(&mut self, n: u16) {
        self.next_avail = self.next_avail.wrapping_sub(n);
    }

    fn walk(
        &self,
        first: Desc,
        tables: &mut impl Tables,
        out: &mut Chains,
        chain: &mut Chain,
    ) -> Result<(), Fault> {
        let mut desc = first;
        // Bounds the walk whatever the descriptors say: a chain has at most `size` descriptors.
        for left in (0..self.layout.size.min(MAX_CHAIN)).rev() {
            if desc.flags & F_INDIRECT != 0 {
                // 2.7.5.3.1: only with the feature, never with NEXT. Direct descriptors before it
                // are fine (2.7.5.3.2).
                if !self.features.indirect || desc.flags & F_NEXT != 0 {
                    return Err(Fault::BadIndirect);
                }
                return self.walk_indirect(&desc, tables, out, chain);
            }
            accept(&desc, out, chain)?;
            if desc.flags & F_NEXT == 0 {
                return Ok(());
            }
            if left == 0 {
                break;
            }
            desc = Desc::from_words(self.layout.desc.load(self.check(desc.next)?));
        }
        Err(Fault::ChainTooLong)
    }

    fn walk_indirect(
        &self,
        table: &Desc,
        tables: &mut impl Tables,
        out: &mut Chains,
        chain: &mut Chain,
    ) -> Result<(), Fault> {
        let entries = table.len / DESC as u32;
        if entries == 0 || !table.len.is_multiple_of(DESC as u32) {
            return Err(Fault::BadTable);
        }
        let before = u32::from(chain.readable) + u32::from(chain.writable);
        let mut index = 0u32;
        for _ in before..u32::from(self.layout.size.min(MAX_CHAIN)) {
            if index >= entries {
                return Err(Fault::BadIndex(index));
            }
            let at = table.addr.checked_add(DESC as u64 * u64::from(index)).ok_or(Fault::BadTable)?;
            let desc = Desc::from_bytes(tables.descriptor(at).ok_or(Fault::BadTable)?);
            if desc.flags & F_INDIRECT != 0 {
                return Err(Fault::BadIndirect);
            }
            accept(&desc, out, chain)?;
            if desc.flags & F_NEXT == 0 {
                return Ok(());
            }
            index = u32::from(desc.next);
        }
        Err(Fault::ChainTooLong)
    }

    /// Puts a chain, of which `written` bytes were filled, into the used ring. Not visible to the
    /// driver until [`Device::publish`].
    #[inline]
    pub fn complete(&mut self, head: u16, written: u32) {
        self.complete_all([(head, written)]);
    }

    /// Puts chains into the used ring, in this order; see [`Device::complete`].
    #[inline]
    pub fn complete_all(&mut self, chains: impl IntoIterator<Item = (u16, u32)>) {
        // In a register: the index in memory would make each element wait for the one before.
        let mut next = self.next_used;
        for (head, written) in chains {
            self.layout.elements.store(next, [u32::from(head), written]);
            next = next.wrapping_add(1);
        }
        self.next_used = next;
    }

    /// Shows all completions to the driver with one store; says whether it wants a call (an
    /// interrupt). A call that is not wanted is legal, one that is left out is a hang.
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.published == self.next_used {
            return false;
        }
        let old = std::mem::replace(&mut self.published, self.next_used);
        // Release: used elements (and packet bytes) before the index that shows them.
        self.layout.used.store16_release(IDX, self.next_used);
        // Pairs with the fence in Driver::enable_calls: either we see its wish, or it sees our index.
        A::full_fence();
        if self.features.event_idx {
            let event = self.layout.avail.load16(self.layout.used_event());
            passed(event, self.next_used, old)
        } else {
            self.layout.avail.load16(FLAGS) & F_NO_SIGNAL == 0
        }
    }

    /// Tells the driver not to kick: the device polls.
    #[inline]
    pub fn disable_kicks(&mut self) {
        // With EVENT_IDX the flag must stay 0 (2.7.10.2); an event word that is not moved forward
        // asks for at most one kick per 65536 entries.
        if !self.features.event_idx && self.flags != F_NO_SIGNAL {
            self.flags = F_NO_SIGNAL;
            self.layout.used.store16(FLAGS, F_NO_SIGNAL);
        }
    }

    /// Asks the driver to kick at the next entry it makes available. True when there is work
    /// already, for which no kick may come: the caller must not sleep.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        if self.fault.is_some() {
            return false;
        }
        if self.features.event_idx {
            if self.event != self.next_avail {
                self.event = self.next_avail;
                self.layout.used.store16(self.layout.avail_event(), self.event);
            }
        } else if self.flags != 0 {
            self.flags = 0;
            self.layout.used.store16(FLAGS, 0);
        }
        // Pairs with the fence in Driver::publish: either it sees our wish, or we see its index.
        A::full_fence();
        self.refresh() > 0
    }
}

/// Checks one descriptor and adds its buffer to the chain.
#[inline(always)]
fn accept(desc: &Desc, out: &mut Chains, chain: &mut Chain) -> Result<(), Fault> {
    let (count, total) = if desc.flags & F_WRITE != 0 {
        (&mut chain.writable, &mut chain.writable_len)
    } else {
        if chain.writable > 0 {
            return Err(Fault::ReadableAfterWritable);
        }
        (&mut chain.readable, &mut chain.readable_len)
    };
    *count += 1;
    *total = total.checked_add(desc.len).ok_or(Fault::ChainTooLarge)?;
    out.push(Buffer { addr: desc.addr, len: desc.len });
    Ok(())
}
