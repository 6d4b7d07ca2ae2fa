//! The device half of a split ring: takes chains, completes them, publishes once per burst.

use ringferry_memory::{Table, Words};

use super::side::Side;
use super::{Desc, Layout};
use crate::chain::{Buffer, Chain, Chains, Done, F_INDIRECT, F_NEXT, Tables};
use crate::chain::{chain_limit, table_entries, table_entry};
use crate::device::group_in_order;
use crate::parts::{LayoutError, Parts};
use crate::{Fault, RingFeatures};

/// How many ring entries are looked at (and their descriptors prefetched) before any is walked.
/// 16, 32 and 64 were alike within noise; 32 matches the usual burst.
const LOOKAHEAD: usize = 32;

/// See [`crate::Device`].
#[derive(Debug)]
pub struct Device<A: Words> {
    layout: Layout<A>,
    features: RingFeatures,
    /// Publishes used elements and consumes available heads.
    side: Side<A>,
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
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn new(parts: Parts<A>, features: RingFeatures) -> Result<Self, LayoutError> {
        let (layout, avail, used) = Layout::new(parts)?;
        let side = Side::new(used, avail, features.event_idx);
        Ok(Self { layout, features, side, fault: None })
    }

    /// See [`crate::Device::size`].
    pub fn size(&self) -> u16 {
        self.layout.size
    }

    /// See [`crate::Device::base`].
    pub fn base(&self) -> u16 {
        self.side.peer_next()
    }

    /// See [`crate::Device::used_index`].
    pub fn used_index(&self) -> u16 {
        self.side.next()
    }

    /// See [`crate::Device::fault`].
    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// See [`crate::Device::break_with`].
    #[cold]
    pub fn break_with(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }

    /// See [`crate::Device::has_chains`].
    #[inline]
    pub fn has_chains(&mut self) -> bool {
        self.available() > 0
    }

    /// How many chains can be taken now, looking at the driver's index only when the cached one
    /// has run dry.
    #[inline(always)]
    fn available(&mut self) -> u16 {
        let known = self.side.known();
        // A broken ring has nothing to take, whatever was seen before it broke.
        if known > 0 && self.fault.is_none() { known } else { self.refresh() }
    }

    #[inline]
    fn refresh(&mut self) -> u16 {
        if self.fault.is_some() {
            return 0;
        }
        // What was taken and not completed occupies descriptors too: a driver has never more than
        // `size` chains out. Unchecked, it could make the device hold any number of them.
        let in_flight = self.side.peer_next().wrapping_sub(self.side.next());
        match self.side.refresh(self.layout.size.saturating_sub(in_flight)) {
            Ok(ahead) => ahead,
            Err(fault) => {
                self.break_with(fault);
                0
            }
        }
    }

    /// See [`crate::Device::take`].
    #[inline]
    pub fn take(&mut self, max: usize, tables: &mut impl Tables, out: &mut Chains) -> usize {
        let mut taken = 0;
        while taken < max {
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
            let result = self.take_heads(heads, tables, out);
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

    /// Reads the chains that begin at `heads`, checks them and adds them to `out`; stops at the first
    /// that breaks a rule.
    #[inline(always)]
    fn take_heads(&self, heads: &[u16], tables: &mut impl Tables, out: &mut Chains) -> Result<(), Fault> {
        // Most chains are one descriptor. All are taken for such at once, without a branch for each; an
        // index outside is masked by the table. What was read is kept: nothing is read twice.
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

    /// See [`crate::Device::untake`].
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
        // Bounds the walk whatever the descriptors say.
        for left in (0..chain_limit(self.layout.size)).rev() {
            if desc.flags & F_INDIRECT != 0 {
                // 2.7.5.3.1: only with the feature, never with NEXT. Direct descriptors before it
                // are fine (2.7.5.3.2).
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

    /// See [`crate::Device::complete_all`].
    #[inline]
    pub fn complete_all(&mut self, chains: impl IntoIterator<Item = Done>) {
        // In a register: the index in memory would make each element wait for the one before.
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

    /// See [`crate::Device::publish`].
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.side.publish()
    }

    /// See [`crate::Device::disable_kicks`].
    #[inline]
    pub fn disable_kicks(&mut self) {
        self.side.disable_signals();
    }

    /// See [`crate::Device::enable_kicks`].
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        if self.fault.is_some() {
            return false;
        }
        self.side.enable_signals(self.side.peer_next());
        self.refresh() > 0
    }
}
