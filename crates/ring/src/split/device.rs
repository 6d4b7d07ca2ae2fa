//! The device half of a split ring: takes available chains, completes them, publishes once per burst.
//!
//! [`crate::Device::new`] creates it for a split queue, the thread that owns the queue calls
//! `take` -> `complete_all` -> `publish` for each burst, and it is dropped when the queue stops; the
//! methods are documented at [`crate::Device`]. A burst is read in two passes: the heads in the available
//! ring first, so that their descriptors are prefetched before any of them is read.

use ringferry_memory::{Table, Words};

use super::side::Side;
use super::{Desc, Layout};
use crate::chain::{Buffer, Chain, Chains, Done, F_INDIRECT, F_NEXT, Tables};
use crate::chain::{chain_limit, table_entries, table_entry};
use crate::device::{Unanswered, group_in_order};
use crate::parts::{LayoutError, Parts};
use crate::write_log::WriteLog;
use crate::{Fault, RingFeatures};

/// Largest number of heads that are read, and their descriptors prefetched, before any chain is walked.
/// 16, 32 and 64 were measured to be alike within noise; 32 matches the usual burst.
const LOOKAHEAD: usize = 32;

/// The split variant of [`crate::Device`].
#[derive(Debug)]
pub struct Device<A: Words> {
    layout: Layout<A>,
    features: RingFeatures,
    /// Publishes used elements and consumes the heads in the available ring.
    side: Side<A>,
    fault: Option<Fault>,
    /// Where writes are recorded, during a live migration.
    log: Option<Box<WriteLog>>,
}

impl<A: Words> Device<A> {
    /// Takes over a ring at the used index in its memory, which is 0 in a fresh ring. Kicks start off.
    ///
    /// A device that stops in an orderly way has completed every chain it took, so the used index equals
    /// its answer to GET_VRING_BASE and the value that SET_VRING_BASE brings back. A device that crashed
    /// may have taken chains without completing them; continuing at the used index takes those chains
    /// again instead of losing them.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn new(parts: Parts<A>, features: RingFeatures) -> Result<Self, LayoutError> {
        let (layout, avail, used) = Layout::new(parts)?;
        let side = Side::new(used, avail, features.event_idx);
        Ok(Self { layout, features, side, fault: None, log: None })
    }

    pub fn size(&self) -> u16 {
        self.layout.size
    }

    pub fn base(&self) -> u16 {
        self.side.peer_next()
    }

    pub fn used_index(&self) -> u16 {
        self.side.next()
    }

    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    #[cold]
    pub fn break_with(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }

    pub fn set_log(&mut self, log: Option<WriteLog>) {
        self.log = log.map(Box::new);
    }

    #[inline]
    pub fn log(&self) -> Option<&WriteLog> {
        self.log.as_deref()
    }

    #[inline]
    pub fn has_chains(&mut self) -> bool {
        self.available() > 0
    }

    pub fn waiting(&self) -> u16 {
        let in_flight = self.side.peer_next().wrapping_sub(self.side.next());
        let limit = self.layout.size.saturating_sub(in_flight);
        if self.fault.is_some() { 0 } else { self.side.look_ahead().min(limit) }
    }

    pub fn posted(&self) -> u16 {
        self.base().wrapping_add(self.waiting())
    }

    pub fn unanswered(&self) -> Option<Unanswered> {
        let since = self.side.asked_at()?;
        let entries = self.side.published().wrapping_sub(since);
        (entries <= self.layout.size).then_some(Unanswered { since, entries })
    }

    /// Returns how many chains can be taken now. Loads the driver's index only if the cached one shows
    /// none.
    #[inline(always)]
    fn available(&mut self) -> u16 {
        let known = self.side.known();
        // Nothing is taken from a broken ring, whatever the index cached before it broke.
        if known > 0 && self.fault.is_none() { known } else { self.refresh() }
    }

    #[inline]
    fn refresh(&mut self) -> u16 {
        if self.fault.is_some() {
            return 0;
        }
        // Chains that were taken and not completed occupy descriptors too, so a driver that keeps the
        // rules has at most `size` chains outstanding. Without this limit it could make the device hold
        // any number of chains.
        let in_flight = self.side.peer_next().wrapping_sub(self.side.next());
        match self.side.refresh(self.layout.size.saturating_sub(in_flight)) {
            Ok(ahead) => ahead,
            Err(fault) => {
                self.break_with(fault);
                0
            }
        }
    }

    #[inline]
    pub fn take(&mut self, max: usize, tables: &mut impl Tables, out: &mut Chains) -> usize {
        let (mut taken, enough) = (0, out.enough());
        while taken < max && out.further_buffers() < enough {
            let ready = usize::from(self.available()).min(max - taken).min(LOOKAHEAD);
            if ready == 0 {
                break;
            }
            let next = self.side.peer_next();
            let mut heads = [0; LOOKAHEAD];
            let heads = &mut heads[..ready];
            for (i, head) in (0..).zip(&mut *heads) {
                *head = self.layout.heads.load(next.wrapping_add(i));
                self.layout.desc.prefetch(*head);
            }
            let before = out.len();
            let result = self.take_heads(heads, enough, tables, out);
            let done = out.len() - before;
            self.side.consume(done as u16);
            taken += done;
            if let Err(fault) = result {
                self.break_with(fault);
                break;
            }
        }
        taken
    }

    /// Reads the chains that begin at `heads`, checks them and adds them to `out`, until that has `enough` buffers.
    ///
    /// # Errors
    /// The fault of the first chain that breaks a rule; the chains before it have been added.
    #[inline(always)]
    fn take_heads(
        &self,
        heads: &[u16],
        enough: usize,
        tables: &mut impl Tables,
        out: &mut Chains,
    ) -> Result<(), Fault> {
        // Most chains are one descriptor. All heads are first treated as such chains, without a branch
        // for each; the table masks an index outside it. If any was something else, the descriptors are
        // taken from the copies made here, as nothing may be read from shared memory twice.
        let before = out.len();
        let mut others = 0;
        out.extend(heads.iter().map(|&head| {
            let desc = Desc::from_words(self.layout.desc.load(head));
            others |= desc.flags & (F_NEXT | F_INDIRECT) | u16::from(head >= self.layout.size);
            let rest = u32::from(desc.flags) | u32::from(desc.next) << 16;
            Chain::single(head, desc.buffer(), desc.flags).with_rest(rest)
        }));
        if others == 0 {
            return Ok(());
        }
        let mut read = [Chain::default(); LOOKAHEAD];
        let read = &mut read[..heads.len()];
        read.copy_from_slice(&out.all()[before..]);
        out.truncate(before);
        for first in read {
            if out.further_buffers() >= enough {
                break;
            }
            let (Buffer { addr, len }, rest) = first.rest();
            let desc = Desc { addr, len, flags: rest as u16, next: (rest >> 16) as u16 };
            let mut chain = out.open(self.check(first.id)?);
            self.walk(desc, tables, out, &mut chain)?;
            out.close(chain)?;
        }
        Ok(())
    }

    fn check(&self, index: u16) -> Result<u16, Fault> {
        if index < self.layout.size { Ok(index) } else { Err(Fault::BadIndex(u32::from(index))) }
    }

    pub fn untake(&mut self, chains: &[Chain]) {
        self.side.consume((chains.len() as u16).wrapping_neg());
    }

    fn walk(
        &self,
        first: Desc,
        tables: &mut impl Tables,
        out: &mut Chains,
        chain: &mut Chain,
    ) -> Result<(), Fault> {
        let mut desc = first;
        // The walk is bounded by the chain limit, whatever the descriptors contain.
        for left in (0..chain_limit(self.layout.size)).rev() {
            if desc.flags & F_INDIRECT != 0 {
                // INDIRECT needs the feature and excludes NEXT (2.7.5.3.1). Direct descriptors may
                // precede it (2.7.5.3.2).
                if !self.features.indirect || desc.flags & F_NEXT != 0 {
                    return Err(Fault::BadIndirect);
                }
                return self.walk_indirect(desc.buffer(), tables, out, chain);
            }
            out.push(chain, desc.buffer(), desc.flags)?;
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
        table: Buffer,
        tables: &mut impl Tables,
        out: &mut Chains,
        chain: &mut Chain,
    ) -> Result<(), Fault> {
        let entries = table_entries(table.len)?;
        let before = chain.readable + chain.writable;
        let mut index = 0u32;
        for _ in before..chain_limit(self.layout.size) {
            if index >= entries {
                return Err(Fault::BadIndex(index));
            }
            let desc = Desc::from_words(table_entry(tables, table.addr, index)?);
            if desc.flags & F_INDIRECT != 0 {
                return Err(Fault::BadIndirect);
            }
            out.push(chain, desc.buffer(), desc.flags)?;
            if desc.flags & F_NEXT == 0 {
                return Ok(());
            }
            index = u32::from(desc.next);
        }
        Err(Fault::ChainTooLong)
    }

    #[inline]
    pub fn complete_all(&mut self, chains: impl IntoIterator<Item = Done>) {
        // The index is kept in a register; read from memory, each store would wait for the one before.
        let next = self.side.next();
        let elements = &self.layout.elements;
        let count = if self.features.in_order {
            group_in_order(chains, |begin, id, written, _| {
                elements.store(next.wrapping_add(begin), [u32::from(id), written]);
            })
        } else {
            let mut count = 0u16;
            for Done { id, written, .. } in chains {
                elements.store(next.wrapping_add(count), [u32::from(id), written]);
                count = count.wrapping_add(1);
            }
            count
        };
        self.side.advance(count);
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        let first = self.side.published();
        let wanted = self.side.publish();
        if let Some(log) = &self.log {
            log.published(first & (self.layout.size - 1), self.side.published().wrapping_sub(first));
        }
        wanted
    }

    #[inline]
    pub fn disable_kicks(&mut self) {
        self.side.disable_signals();
        if let Some(log) = &self.log {
            log.kicks_changed();
        }
    }

    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        if self.fault.is_some() {
            return false;
        }
        self.side.enable_signals(self.side.peer_next());
        if let Some(log) = &self.log {
            log.kicks_changed();
        }
        self.refresh() > 0
    }
}
