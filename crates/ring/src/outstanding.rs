//! Bookkeeping of outstanding chains in a driver half: a table by id and, with IN_ORDER, their order.
//!
//! The driver half of either layout creates an [`Outstanding`] at set-up and drops it with the ring. It
//! calls [`Outstanding::insert`] for each chain that it adds, and [`Outstanding::remove`] or, with IN_ORDER,
//! [`Outstanding::remove_batch`] for each used element that it collects. Ids and lengths from the device are checked here. With IN_ORDER the device may use a
//! batch of chains with one used element that names the last of them (2.7.9, 2.8.8); the chains are then
//! completed one by one, oldest first, until the named one.
//!
//! The table also has a private copy of each chain's buffers, as descriptors in shared memory are
//! the device's to overwrite. From it a driver half writes a ring anew for the device that comes after one that
//! died ([`Outstanding::shown`]).

use std::num::NonZeroU16;

use crate::Fault;
use crate::chain::{Buffer, F_WRITE};

/// An outstanding chain: the device has it, or is about to get it.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    /// Guest physical address of its only buffer, as the device was shown it; means nothing if there are several.
    addr: u64,
    /// The length of its only buffer, else the sum of the lengths of its writable ones, in bytes.
    len: u32,
    /// The number of chains that were added before, modulo 2^16: more than can be outstanding.
    order: u16,
    /// [`F_WRITE`] if there are buffers for the device to write, and [`SEVERAL`].
    flags: u16,
    /// Number of ring descriptors that the chain occupies; an indirect chain occupies one.
    pub(crate) slots: NonZeroU16,
    /// The token by which the ring's owner knows the chain.
    pub(crate) token: T,
}

/// Set in [`Entry::flags`] if the chain has several buffers, which are in [`Outstanding::several`].
const SEVERAL: u16 = 1 << 15;

impl<T> Entry<T> {
    /// Returns the sum of the lengths of its writable buffers in bytes.
    #[inline(always)]
    fn writable_len(&self) -> u32 {
        if self.flags & F_WRITE == 0 { 0 } else { self.len }
    }
}

/// The step from one chain's id to the next one's when ids are given out in ring order (IN_ORDER).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ids {
    /// The id is the index of the chain's first descriptor (split ring), so the step is its length.
    Slots,
    /// The id is a counter (buffer id of a packed ring), so the step is 1.
    Count,
}

/// The id of a chain and a length in bytes, as the device wrote them.
pub(crate) type Element = (u32, u32);

/// State of a ring with IN_ORDER, whose device may use a batch of chains with one used element.
#[derive(Debug)]
struct InOrder {
    ids: Ids,
    /// Id of the oldest outstanding chain, which is completed next.
    oldest: u16,
    /// The used element of the batch that is being collected: its last chain, and the length.
    batch: Option<Element>,
}

/// A chain as it was added: its id, and its buffers with their flag [`F_WRITE`], readable ones first.
pub(crate) type ShownChain = (u16, Vec<(Buffer, u16)>);

/// The table of outstanding chains, by id; its size is the queue size.
#[derive(Debug)]
pub(crate) struct Outstanding<T> {
    entries: Box<[Option<Entry<T>>]>,
    in_order: Option<InOrder>,
    /// By id, the buffers of chains that have several. A vector is kept for the next chain with its id.
    several: Vec<Vec<(Buffer, u16)>>,
}

impl<T> Outstanding<T> {
    pub(crate) fn new(size: u16, in_order: Option<Ids>) -> Self {
        Self {
            entries: (0..size).map(|_| None).collect(),
            in_order: in_order.map(|ids| InOrder { ids, oldest: 0, batch: None }),
            several: vec![Vec::new(); size.into()],
        }
    }

    /// Records chain `id`, of one buffer with its flag [`F_WRITE`], which is about to be made available after `order` others.
    #[inline(always)]
    pub(crate) fn insert(&mut self, id: u16, Buffer { addr, len }: Buffer, flags: u16, order: u16, token: T) {
        let entry = Entry { addr, len, order, flags, slots: NonZeroU16::MIN, token };
        self.entries[usize::from(id)] = Some(entry);
    }

    /// Records chain `id`, of several buffers, which occupies `slots` descriptors.
    pub(crate) fn insert_several(
        &mut self,
        id: u16,
        buffers: impl Iterator<Item = (Buffer, u16)>,
        slots: NonZeroU16,
        order: u16,
        token: T,
    ) {
        let copies = &mut self.several[usize::from(id)];
        copies.clear();
        copies.extend(buffers);
        let (mut len, mut flags) = (0u32, SEVERAL);
        for (buffer, of) in copies.iter().filter(|(_, of)| of & F_WRITE != 0) {
            (len, flags) = (len.wrapping_add(buffer.len), flags | of);
        }
        self.entries[usize::from(id)] = Some(Entry { addr: 0, len, order, flags, slots, token });
    }

    /// Returns all outstanding chains in the order in which they were added, which were `added` with all before. A batch that is being collected
    /// ends here: the chains that are left of it are outstanding again.
    pub(crate) fn shown(&mut self, added: u16) -> Vec<ShownChain> {
        if let Some(order) = &mut self.in_order {
            order.batch = None;
        }
        let mut chains: Vec<(u16, &Entry<T>)> =
            (0..).zip(&self.entries).filter_map(|(id, entry)| Some((id, entry.as_ref()?))).collect();
        // The oldest first: the one that is most steps behind.
        chains.sort_by_key(|(_, entry)| std::cmp::Reverse(added.wrapping_sub(entry.order)));
        let buffers = |(id, entry): (u16, &Entry<T>)| match entry.flags & SEVERAL {
            0 => (id, vec![(Buffer { addr: entry.addr, len: entry.len }, entry.flags)]),
            _ => (id, self.several[usize::from(id)].clone()),
        };
        chains.into_iter().map(buffers).collect()
    }

    /// Returns `id + step` modulo the queue size: the next id when they are given out in ring order.
    #[inline(always)]
    pub(crate) fn following(&self, id: u16, step: u16) -> u16 {
        let size = self.entries.len() as u32;
        let next = u32::from(id) + u32::from(step);
        (if next >= size { next - size } else { next }) as u16
    }

    /// Returns the used element that was read last if it covers more chains, which are collected before another is read.
    #[inline(always)]
    pub(crate) fn batch(&self) -> Option<Element> {
        self.in_order.as_ref().and_then(|order| order.batch)
    }

    /// Returns true if chains are used in the order in which they were added.
    #[inline(always)]
    pub(crate) fn is_in_order(&self) -> bool {
        self.in_order.is_some()
    }

    /// Removes chain `id`, a number that the device wrote.
    ///
    /// # Errors
    /// [`Fault::BadIndex`] and [`Fault::NotOutstanding`].
    #[inline(always)]
    pub(crate) fn remove(&mut self, id: u32) -> Result<Entry<T>, Fault> {
        let entry = self.entries.get_mut(id as usize).ok_or(Fault::BadIndex(id))?;
        entry.take().ok_or(Fault::NotOutstanding(id))
    }

    /// With IN_ORDER removes the chains that a used element covers, `most` at most (and one at least), and passes the id of each, its entry and
    /// the number of bytes written to `each`: all before the chain that it names, and this last. What is left is a [`batch`](Self::batch).
    ///
    /// # Errors
    /// [`Fault::BadIndex`] and [`Fault::NotOutstanding`], if the device named a chain it does not have. None is removed then.
    #[inline(always)]
    pub(crate) fn remove_batch(
        &mut self,
        (last, len): Element,
        most: usize,
        mut each: impl FnMut(u16, Entry<T>, u32),
    ) -> Result<(), Fault> {
        // Without this check a batch that ends at a chain the device does not have would complete
        // every outstanding chain.
        self.entries
            .get(last as usize)
            .ok_or(Fault::BadIndex(last))?
            .as_ref()
            .ok_or(Fault::NotOutstanding(last))?;
        let Some(InOrder { ids, oldest, batch }) = &mut self.in_order else { return Ok(()) };
        let (size, by_slots) = (self.entries.len() as u32, *ids == Ids::Slots);
        let after = |id: u32, slots: NonZeroU16| {
            let next = id + if by_slots { u32::from(slots.get()) } else { 1 };
            if next >= size { next - size } else { next }
        };
        let (mut at, mut left) = (u32::from(*oldest), most);
        while at != last && left > 0 {
            let Some(entry) = self.entries[at as usize].take() else { break };
            let (id, written) = (at as u16, entry.writable_len());
            at = after(at, entry.slots);
            left -= 1;
            // A chain without a used element of its own counts as completely written (2.7.9).
            each(id, entry, written);
        }
        *batch = Some((last, len));
        if left > 0
            && let Some(entry) = self.entries[at as usize].take()
        {
            *batch = None;
            at = after(at, entry.slots);
            each(last as u16, entry, len);
        }
        *oldest = at as u16;
        Ok(())
    }

    /// Removes any one chain, for a device that has stopped; `None` if there is none.
    pub(crate) fn take_any(&mut self) -> Option<(u16, Entry<T>)> {
        let id = self.entries.iter().position(Option::is_some)?;
        Some((id as u16, self.entries[id].take()?))
    }
}
