//! The device half of a packed ring: takes chains, completes them, publishes once per burst.

use ringferry_memory::Words;

use super::log::Log;
use super::side::{Role, Side};
use super::{Cursor, Desc};
use crate::chain::{Buffer, Chain, Chains, Done, F_INDIRECT, F_NEXT, F_WRITE, Tables};
use crate::chain::{chain_limit, table_entries, table_entry};
use crate::device::group_in_order;
use crate::parts::{LayoutError, Parts};
use crate::{Fault, RingFeatures};

/// How many descriptors are read before they are added to the burst, as in a split ring.
const LOOKAHEAD: usize = 32;

/// See [`crate::Device`].
#[derive(Debug)]
pub struct Device<A: Words> {
    features: RingFeatures,
    /// Hands over used descriptors and follows available ones.
    side: Side<A>,
    /// Slots taken and not given back by a publish. The driver may not touch them, whatever their flags
    /// say.
    in_flight: u16,
    /// What is kept for a successor, if there may be one.
    log: Option<Log<A>>,
    fault: Option<Fault>,
}

impl<A: Words> Device<A> {
    /// Takes over a ring at `base`, where the device before it stopped: the index of the next
    /// descriptor in bits 0 to 14, the wrap counter in bit 15. Kicks start off.
    ///
    /// Nothing in the ring itself says where it stands. A device that may die keeps its position, and
    /// the burst it is publishing, in `inflight`, the queue's part of a region that outlives it. The
    /// half only writes there; its owner found `base` in it.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn new(
        parts: Parts<A>,
        features: RingFeatures,
        base: u16,
        inflight: Option<A>,
    ) -> Result<Self, LayoutError> {
        let log = inflight.map(|region| Log::new(region, parts.size)).transpose()?;
        let side = Side::new(Role::Device, parts, features.event_idx, Cursor::from_bits(base))?;
        Ok(Self { features, side, in_flight: 0, log, fault: None })
    }

    /// See [`crate::Device::size`].
    pub fn size(&self) -> u16 {
        self.side.size
    }

    /// See [`crate::Device::base`].
    pub fn base(&self) -> u16 {
        self.side.peer_next.to_bits()
    }

    /// See [`crate::Device::used_index`].
    pub fn used_index(&self) -> u16 {
        self.side.next.to_bits()
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
        self.fault.is_none() && self.next_chain().is_some()
    }

    /// The first descriptor of the next chain. A slot that was taken and not given back is ours
    /// whatever a driver makes of its flags: unchecked, it could make the device go round for ever.
    #[inline(always)]
    fn next_chain(&self) -> Option<Desc> {
        let at = self.side.peer_next;
        self.side.look(at, at.available()).filter(|_| self.in_flight < self.side.size)
    }

    /// See [`crate::Device::take`].
    #[inline]
    pub fn take(&mut self, max: usize, tables: &mut impl Tables, out: &mut Chains) -> usize {
        if self.fault.is_some() {
            return 0;
        }
        let mut taken = 0;
        while taken < max {
            // Most chains are one descriptor. A run of them is found first and added at once: counters
            // that live in memory would otherwise be incremented, one after the other, per chain.
            let free = usize::from(self.side.size - self.in_flight);
            let limit = free.min(max - taken).min(LOOKAHEAD);
            let (start, size) = (self.side.peer_next, self.side.size);
            let mut at = start;
            let mut run = [Desc { len: 0, id: 0, flags: 0 }; LOOKAHEAD];
            let mut count = 0;
            let mut stopped_at = None;
            for found in &mut run[..limit] {
                let Some(desc) = self.side.look(at, at.available()) else { break };
                if desc.flags & (F_NEXT | F_INDIRECT) != 0 {
                    stopped_at = Some(desc);
                    break;
                }
                *found = desc;
                count += 1;
                at = at.forward(1, size);
            }
            out.extend((0..).zip(&run[..count]).map(|(i, desc)| {
                let buffer = desc.buffer(self.side.addr(start.forward(i, size)));
                Chain::single(desc.id, buffer, desc.flags)
            }));
            self.side.peer_next = at;
            self.in_flight += count as u16;
            taken += count;
            let Some(first) = stopped_at else {
                if count < LOOKAHEAD {
                    break;
                }
                continue;
            };
            let mut chain = out.open(first.id);
            let walked = self.walk(first, tables, out, &mut chain);
            if let Err(fault) = walked.and_then(|()| out.close(chain)) {
                self.break_with(fault);
                break;
            }
            self.side.peer_next = at.forward(chain.slots, self.side.size);
            self.in_flight += chain.slots;
            taken += 1;
        }
        taken
    }

    /// See [`crate::Device::untake`].
    pub fn untake(&mut self, chains: &[Chain]) {
        let slots = chains.iter().map(|chain| chain.slots).sum();
        self.side.peer_next = self.side.peer_next.back(slots, self.side.size);
        self.in_flight -= slots;
    }

    fn walk(
        &self,
        first: Desc,
        tables: &mut impl Tables,
        out: &mut Chains,
        chain: &mut Chain,
    ) -> Result<(), Fault> {
        // A chain of which some slots are not the driver's now is longer than it can be.
        let limit = chain_limit(self.side.size - self.in_flight);
        let mut at = self.side.peer_next;
        let mut desc = first;
        loop {
            let buffer = desc.buffer(self.side.addr(at));
            if desc.flags & F_INDIRECT != 0 {
                // Only with the feature, and a table is the whole chain (2.8.7).
                if !self.features.indirect || desc.flags & F_NEXT != 0 || chain.slots > 1 {
                    return Err(Fault::BadIndirect);
                }
                chain.id = desc.id;
                return self.walk_indirect(buffer, tables, out, chain);
            }
            out.push(chain, buffer, desc.flags)?;
            if desc.flags & F_NEXT == 0 {
                // The buffer id stands in the chain's last descriptor (2.8.6).
                chain.id = desc.id;
                return Ok(());
            }
            if chain.slots >= limit {
                return Err(Fault::ChainTooLong);
            }
            chain.slots += 1;
            at = at.forward(1, self.side.size);
            desc = self.side.member(at);
        }
    }

    fn walk_indirect(
        &self,
        table: Buffer,
        tables: &mut impl Tables,
        out: &mut Chains,
        chain: &mut Chain,
    ) -> Result<(), Fault> {
        let entries = table_entries(table.len)?;
        if entries > u32::from(chain_limit(self.side.size)) {
            return Err(Fault::ChainTooLong);
        }
        for index in 0..entries {
            // In a table only WRITE means anything, and entries follow each other (2.8.7).
            let [addr, second] = table_entry(tables, table.addr, index)?;
            let desc = Desc::from_word(second);
            out.push(chain, desc.buffer(addr), desc.flags)?;
        }
        Ok(())
    }

    /// See [`crate::Device::complete_all`].
    #[inline]
    pub fn complete_all(&mut self, chains: impl IntoIterator<Item = Done>) {
        let (start, size, in_order) = (self.side.next, self.side.size, self.features.in_order);
        let side = &mut self.side;
        let slots = match &mut self.log {
            None => used(chains, start, size, in_order, |at, desc| side.hand_over(at, desc)),
            Some(log) => used(chains, start, size, in_order, |at, desc| log.push(at, desc)),
        };
        self.side.next = start.forward(slots, size);
    }

    /// See [`crate::Device::publish`].
    #[inline]
    pub fn publish(&mut self) -> bool {
        let slots = self.side.published.distance(self.side.next, self.side.size);
        self.in_flight = self.in_flight.wrapping_sub(slots);
        match &mut self.log {
            None => self.side.publish(),
            Some(log) => log.publish(&mut self.side),
        }
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
        self.side.enable_signals(self.side.peer_next);
        self.has_chains()
    }
}

/// Makes the used descriptors of `chains`, from `start` on, and gives each to `hand_over`; returns the
/// slots passed over.
#[inline(always)]
fn used(
    chains: impl IntoIterator<Item = Done>,
    start: Cursor,
    size: u16,
    in_order: bool,
    mut hand_over: impl FnMut(Cursor, Desc),
) -> u16 {
    let used = |at: Cursor, id: u16, len: u32, wrote: bool| {
        // The length counts only when WRITE is set (2.8.4).
        Desc { len, id, flags: at.used() | if wrote { F_WRITE } else { 0 } }
    };
    if in_order {
        return group_in_order(chains, |begin, id, written, wrote| {
            let at = start.forward(begin, size);
            hand_over(at, used(at, id, written, wrote));
        });
    }
    let mut at = start;
    let mut passed = 0u16;
    for Done { id, slots, silent, written } in chains {
        hand_over(at, used(at, id, written, !silent));
        at = at.forward(slots, size);
        passed = passed.wrapping_add(slots);
    }
    passed
}
