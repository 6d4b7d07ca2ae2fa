//! The device half of a packed ring: takes available chains, completes them, publishes once per burst.
//!
//! [`crate::Device::new`] creates it for a packed queue, the thread that owns the queue calls
//! `take` -> `complete_all` -> `publish` for each burst, and it is dropped when the queue stops; the
//! methods are documented at [`crate::Device`]. Chains are found by polling the flags of the slot at the
//! avail cursor; there is no index to read. Used descriptors go to the ring directly, or through the
//! [in-flight log](super::inflight) if the queue has one.

use ringferry_memory::Words;

use super::inflight::InflightLog;
use super::side::{Role, Side};
use super::{Cursor, Desc};
use crate::chain::{Buffer, Chain, Chains, Done, F_INDIRECT, F_NEXT, F_WRITE, Tables};
use crate::chain::{chain_limit, table_entries, table_entry};
use crate::device::{Unanswered, group_in_order};
use crate::parts::{LayoutError, Parts};
use crate::write_log::WriteLog;
use crate::{Fault, RingFeatures};

/// Descriptors that [`Device::waiting`] looks at one by one.
const COUNTED: u16 = 1024;

/// Largest number of descriptors that are read before they are added to the burst, as in a split ring.
const LOOKAHEAD: usize = 32;

/// The packed variant of [`crate::Device`].
#[derive(Debug)]
pub struct Device<A: Words> {
    features: RingFeatures,
    /// Writes used descriptors at `write_cursor` and reads available ones at `read_cursor`.
    side: Side<A>,
    /// Number of slots of chains that were taken and whose completion is not published. The driver may not
    /// touch them, whatever their flags are.
    in_flight: u16,
    /// In-flight log for a process that takes over after a crash, if the queue has one.
    inflight: Option<InflightLog<A>>,
    fault: Option<Fault>,
    /// Where writes are recorded, during a live migration.
    log: Option<Box<WriteLog>>,
}

impl<A: Words> Device<A> {
    /// Takes over a ring at `base`, where the previous device stopped: the index of the next descriptor
    /// in bits 0 to 14, the wrap counter in bit 15. Kicks start off.
    ///
    /// The ring itself does not contain the position. If another process is to take over after a crash,
    /// position and burst are also logged to `inflight`, the queue's part of a region that outlives the
    /// process. This half only writes the log; its owner reads it and derives `base` from it.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn new(
        parts: Parts<A>,
        features: RingFeatures,
        base: u16,
        inflight: Option<A>,
    ) -> Result<Self, LayoutError> {
        let inflight = inflight.map(|region| InflightLog::new(region, parts.size)).transpose()?;
        let side = Side::new(Role::Device, parts, features.event_idx, Cursor::from_bits(base))?;
        Ok(Self { features, side, in_flight: 0, inflight, fault: None, log: None })
    }

    pub fn size(&self) -> u16 {
        self.side.size
    }

    pub fn base(&self) -> u16 {
        self.side.read_cursor.to_bits()
    }

    pub fn used_index(&self) -> u16 {
        self.side.write_cursor.to_bits()
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
        self.fault.is_none() && self.next_chain().is_some()
    }

    pub fn posted(&self) -> u16 {
        self.side.read_cursor.forward(self.waiting(), self.side.size).to_bits()
    }

    pub fn unanswered(&self) -> Option<Unanswered> {
        let since = self.side.asked_at()?;
        let entries = since.distance(self.side.published, self.side.size);
        (entries <= self.side.size).then_some(Unanswered { since: since.to_bits(), entries })
    }

    /// The descriptors that are available follow each other, from the next one to take on. The first [`COUNTED`] are looked at one by one, as a driver that is
    /// about to publish a burst has written the rest of it behind its first descriptor; beyond them the end is found by bisection, so that the largest
    /// ring does not hold up whoever asks.
    pub fn waiting(&self) -> u16 {
        if self.fault.is_some() {
            return 0;
        }
        let is_available = |offset| {
            let at = self.side.read_cursor.forward(offset, self.side.size);
            self.side.peek(at, at.available()).is_some()
        };
        let mut limit = self.side.size.saturating_sub(self.in_flight);
        let counted = limit.min(COUNTED);
        let mut available = (0..counted).find(|offset| !is_available(*offset)).unwrap_or(counted);
        if available < counted {
            return available;
        }
        while available < limit {
            let middle = available + (limit - available) / 2;
            if is_available(middle) {
                available = middle + 1;
            } else {
                limit = middle;
            }
        }
        available
    }

    /// Returns the first descriptor of the next chain, if one is available. Slots that were taken and not
    /// completed are excluded: a driver that marked them available again could otherwise make the device
    /// take chains without end.
    #[inline(always)]
    fn next_chain(&self) -> Option<Desc> {
        let at = self.side.read_cursor;
        self.side.peek(at, at.available()).filter(|_| self.in_flight < self.side.size)
    }

    #[inline]
    pub fn take(&mut self, max: usize, tables: &mut impl Tables, out: &mut Chains) -> usize {
        if self.fault.is_some() {
            return 0;
        }
        let (mut taken, enough) = (0, out.enough());
        while taken < max && out.further_buffers() < enough {
            // Most chains are one descriptor. A run of them is read first and added at once; otherwise
            // counters that live in memory would be incremented for each chain, one after the other.
            let free = usize::from(self.side.size - self.in_flight);
            let limit = free.min(max - taken).min(LOOKAHEAD);
            let (mut at, size) = (self.side.read_cursor, self.side.size);
            let mut run = [(Desc { len: 0, id: 0, flags: 0 }, 0); LOOKAHEAD];
            let mut count = 0;
            let mut stopped_at = None;
            for found in &mut run[..limit] {
                let Some(desc) = self.side.peek(at, at.available()) else { break };
                if desc.flags & (F_NEXT | F_INDIRECT) != 0 {
                    stopped_at = Some(desc);
                    break;
                }
                *found = (desc, self.side.read_addr(at));
                count += 1;
                at = at.next(size);
            }
            out.extend(
                run[..count]
                    .iter()
                    .map(|(desc, addr)| Chain::single(desc.id, desc.buffer(*addr), desc.flags)),
            );
            self.side.read_cursor = at;
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
            self.side.read_cursor = at.forward(chain.slots, self.side.size);
            self.in_flight += chain.slots;
            taken += 1;
        }
        taken
    }

    pub fn untake(&mut self, chains: &[Chain]) {
        let slots = chains.iter().map(|chain| chain.slots).sum();
        self.side.read_cursor = self.side.read_cursor.back(slots, self.side.size);
        self.in_flight -= slots;
    }

    fn walk(
        &self,
        first: Desc,
        tables: &mut impl Tables,
        out: &mut Chains,
        chain: &mut Chain,
    ) -> Result<(), Fault> {
        // A chain can only occupy slots that the driver owns, so those in flight shorten the limit.
        let limit = chain_limit(self.side.size - self.in_flight);
        let mut at = self.side.read_cursor;
        let mut desc = first;
        loop {
            let buffer = desc.buffer(self.side.read_addr(at));
            if desc.flags & F_INDIRECT != 0 {
                // INDIRECT needs the feature, and an indirect descriptor is the whole chain (2.8.7).
                if !self.features.indirect || desc.flags & F_NEXT != 0 || chain.slots > 1 {
                    return Err(Fault::BadIndirect);
                }
                chain.id = desc.id;
                return self.walk_indirect(buffer, tables, out, chain);
            }
            out.push(chain, buffer, desc.flags)?;
            if desc.flags & F_NEXT == 0 {
                // The buffer id is in the chain's last descriptor (2.8.6).
                chain.id = desc.id;
                return Ok(());
            }
            if chain.slots >= limit {
                return Err(Fault::ChainTooLong);
            }
            chain.slots += 1;
            at = at.next(self.side.size);
            desc = self.side.read_chained(at);
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
            // In a table all flags but WRITE are ignored, and the entries are consecutive (2.8.7).
            let [addr, second] = table_entry(tables, table.addr, index)?;
            let desc = Desc::from_word(second);
            out.push(chain, desc.buffer(addr), desc.flags)?;
        }
        Ok(())
    }

    #[inline]
    pub fn complete_all(&mut self, chains: impl IntoIterator<Item = Done>) {
        let (start, size, in_order) = (self.side.write_cursor, self.side.size, self.features.in_order);
        let side = &mut self.side;
        let slots = match &mut self.inflight {
            None => used(chains, start, size, in_order, |at, desc| side.write_desc(at, desc)),
            Some(log) => used(chains, start, size, in_order, |at, desc| log.push(at, desc)),
        };
        self.side.write_cursor = start.forward(slots, size);
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        let slots = self.side.published.distance(self.side.write_cursor, self.side.size);
        self.in_flight = self.in_flight.wrapping_sub(slots);
        let first = self.side.published.index;
        let wanted = match &mut self.inflight {
            None => self.side.publish(),
            Some(log) => log.publish(&mut self.side),
        };
        if let Some(log) = &self.log {
            log.published(first, slots);
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
        self.side.enable_signals(self.side.read_cursor);
        if let Some(log) = &self.log {
            log.kicks_changed();
        }
        self.has_chains()
    }
}

/// Makes the used descriptors of `chains`, from slot `start` on, and calls `write` with each. Returns the
/// number of slots that the used cursor advances.
#[inline(always)]
fn used(
    chains: impl IntoIterator<Item = Done>,
    start: Cursor,
    size: u16,
    in_order: bool,
    mut write: impl FnMut(Cursor, Desc),
) -> u16 {
    let used = |at: Cursor, id: u16, len: u32, wrote: bool| {
        // The driver uses the length only if WRITE is set (2.8.4).
        Desc { len, id, flags: at.used() | if wrote { F_WRITE } else { 0 } }
    };
    if in_order {
        return group_in_order(chains, |begin, id, written, wrote| {
            let at = start.forward(begin, size);
            write(at, used(at, id, written, wrote));
        });
    }
    let mut at = start;
    let mut passed = 0u16;
    for Done { id, slots, readable_only, written } in chains {
        write(at, used(at, id, written, !readable_only));
        at = at.forward(slots, size);
        passed = passed.wrapping_add(slots);
    }
    passed
}
