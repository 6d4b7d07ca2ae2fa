//! Bookkeeping of outstanding chains in a driver half: a table by id and, with IN_ORDER, their order.
//!
//! The driver half of either layout creates an [`Outstanding`] at set-up and drops it with the ring. It
//! calls [`Outstanding::insert`] for each chain that it adds, and [`Outstanding::complete`] for each one
//! that it collects. Ids and lengths from the device are checked here. With IN_ORDER the device may use a
//! batch of chains with one used element that names the last of them (2.7.9, 2.8.8); the chains are then
//! completed one by one, oldest first, until the named one.
//!
//! The table also has a private copy of each chain's buffers ([`Outstanding::show`]), as descriptors in shared memory are
//! the device's to overwrite. From it a driver half writes a ring anew for the device that comes after one that
//! died ([`Outstanding::shown`]).

use std::num::NonZeroU16;

use crate::Fault;
use crate::chain::{Buffer, F_WRITE};

/// An outstanding chain: the device has it, or is about to get it.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    /// Number of ring descriptors that the chain occupies; an indirect chain occupies one.
    pub(crate) slots: NonZeroU16,
    /// Sum of the lengths of its writable buffers in bytes.
    pub(crate) writable_len: u32,
    /// The token by which the ring's owner knows the chain.
    pub(crate) token: T,
}

/// The step from one chain's id to the next one's when ids are given out in ring order (IN_ORDER).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ids {
    /// The id is the index of the chain's first descriptor (split ring), so the step is its length.
    Slots,
    /// The id is a counter (buffer id of a packed ring), so the step is 1.
    Count,
}

/// State of a ring with IN_ORDER, whose device may use a batch of chains with one used element.
#[derive(Debug)]
struct InOrder {
    ids: Ids,
    /// Id of the oldest outstanding chain, which is completed next.
    oldest: u16,
    /// Id of the last chain of the batch being collected, and the length in its used element.
    batch: Option<(u16, u32)>,
}

/// The private copy of what the device was shown of a chain: its only buffer.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    addr: u64,
    len: u32,
    /// The number of chains that were added before, modulo 2^30, above the bits [`WRITABLE`] and [`SEVERAL`].
    order: u32,
}

/// Set in [`Shown::order`] if the buffer is one for the device to write.
const WRITABLE: u32 = 1;
/// Set in [`Shown::order`] if the chain has several buffers, which are in [`Outstanding::several`] instead.
const SEVERAL: u32 = 2;
/// The step from one chain to the next in [`Shown::order`].
const STEP: u32 = 4;

/// A chain as it was added: its id, and its buffers with their flag [`F_WRITE`], readable ones first.
pub(crate) type ShownChain = (u16, Vec<(Buffer, u16)>);

/// The table of outstanding chains, by id; its size is the queue size.
#[derive(Debug)]
pub(crate) struct Outstanding<T> {
    entries: Vec<Option<Entry<T>>>,
    in_order: Option<InOrder>,
    /// By id, like the entries; what is there of other chains means nothing.
    shown: Vec<Shown>,
    /// By id, the buffers of chains that have several. A vector is kept for the next chain with its id.
    several: Vec<Vec<(Buffer, u16)>>,
    /// What [`Shown::order`] of the next chain is.
    order: u32,
}

impl<T> Outstanding<T> {
    pub(crate) fn new(size: u16, in_order: Option<Ids>) -> Self {
        Self {
            entries: (0..size).map(|_| None).collect(),
            in_order: in_order.map(|ids| InOrder { ids, oldest: 0, batch: None }),
            shown: vec![Shown::default(); size.into()],
            several: vec![Vec::new(); size.into()],
            order: 0,
        }
    }

    /// Keeps a copy of the only buffer of chain `id`, which is about to be made available.
    #[inline(always)]
    pub(crate) fn show(&mut self, id: u16, Buffer { addr, len }: Buffer, flags: u16) {
        let writable = if flags & F_WRITE == 0 { 0 } else { WRITABLE };
        let order = self.order | writable;
        self.shown[usize::from(id)] = Shown { addr, len, order };
        self.order = self.order.wrapping_add(STEP);
    }

    /// Keeps a copy of the buffers of chain `id`, of which there are several.
    pub(crate) fn show_several(&mut self, id: u16, buffers: impl Iterator<Item = (Buffer, u16)>) {
        let copies = &mut self.several[usize::from(id)];
        copies.clear();
        copies.extend(buffers);
        self.shown[usize::from(id)].order = self.order | SEVERAL;
        self.order = self.order.wrapping_add(STEP);
    }

    /// Returns all outstanding chains in the order in which they were added. A batch that is being collected ends here:
    /// the chains that are left of it are outstanding again.
    pub(crate) fn shown(&mut self) -> Vec<ShownChain> {
        if let Some(order) = &mut self.in_order {
            order.batch = None;
        }
        let (now, mut ids) = (self.order, Vec::new());
        ids.extend((0..).zip(&self.entries).filter(|(_, entry)| entry.is_some()).map(|(id, _): (u16, _)| id));
        // The oldest first: the one that is most steps behind.
        ids.sort_by_key(|id| {
            std::cmp::Reverse(now.wrapping_sub(self.shown[usize::from(*id)].order & !(STEP - 1)))
        });
        let buffers = |id: u16| {
            let Shown { addr, len, order } = self.shown[usize::from(id)];
            match order & SEVERAL {
                0 => vec![(Buffer { addr, len }, if order & WRITABLE == 0 { 0 } else { F_WRITE })],
                _ => self.several[usize::from(id)].clone(),
            }
        };
        ids.into_iter().map(|id| (id, buffers(id))).collect()
    }

    /// Returns `id + step` modulo the queue size: the next id when they are given out in ring order.
    #[inline(always)]
    pub(crate) fn following(&self, id: u16, step: u16) -> u16 {
        let size = self.entries.len() as u32;
        let next = u32::from(id) + u32::from(step);
        (if next >= size { next - size } else { next }) as u16
    }

    /// Records a chain that is about to be made available.
    #[inline(always)]
    pub(crate) fn insert(&mut self, id: u16, entry: Entry<T>) {
        self.entries[usize::from(id)] = Some(entry);
    }

    /// Removes chain `id`, a number that the device wrote.
    ///
    /// # Errors
    /// [`Fault::BadIndex`] and [`Fault::NotOutstanding`].
    #[inline(always)]
    fn remove(&mut self, id: u32) -> Result<Entry<T>, Fault> {
        let entry = self.entries.get_mut(id as usize).ok_or(Fault::BadIndex(id))?;
        entry.take().ok_or(Fault::NotOutstanding(id))
    }

    /// Returns true if the used element that was read last covers more chains.
    #[inline(always)]
    pub(crate) fn in_batch(&self) -> bool {
        self.in_order.as_ref().is_some_and(|order| order.batch.is_some())
    }

    /// Removes the next used chain and returns its id, its entry, and the number of bytes written.
    /// `element` reads the next used element (id and length); it is only called outside a batch.
    ///
    /// # Errors
    /// [`Fault::BadIndex`] and [`Fault::NotOutstanding`], if the device named a chain it does not have.
    #[inline(always)]
    pub(crate) fn complete(
        &mut self,
        element: impl FnOnce() -> (u32, u32),
    ) -> Result<(u16, Entry<T>, u32), Fault> {
        let Some(order) = &self.in_order else {
            let (id, len) = element();
            return Ok((id as u16, self.remove(id)?, len));
        };
        let (ids, oldest) = (order.ids, order.oldest);
        let (last, len) = match order.batch {
            Some(batch) => batch,
            None => {
                let (id, len) = element();
                let entry = self.entries.get(id as usize).ok_or(Fault::BadIndex(id))?;
                // Without this check a batch that ends at a chain the device does not have would complete
                // every outstanding chain.
                entry.as_ref().ok_or(Fault::NotOutstanding(id))?;
                (id as u16, len)
            }
        };
        let entry = self.remove(oldest.into())?;
        let step = if ids == Ids::Slots { entry.slots.get() } else { 1 };
        let next = self.following(oldest, step);
        // A chain without a used element of its own counts as completely written (2.7.9).
        let (batch, len) = if oldest == last { (None, len) } else { (Some((last, len)), entry.writable_len) };
        self.in_order = Some(InOrder { ids, oldest: next, batch });
        Ok((oldest, entry, len))
    }

    /// Removes any one chain, for a device that has stopped; `None` if there is none.
    pub(crate) fn take_any(&mut self) -> Option<(u16, Entry<T>)> {
        let id = self.entries.iter().position(Option::is_some)?;
        Some((id as u16, self.entries[id].take()?))
    }
}
