//! What a driver half knows of the chains the device has: by id, and with IN_ORDER by age.

use std::num::NonZeroU16;

use crate::Fault;

/// A chain the device has.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    /// Descriptors of the ring it occupies.
    pub(crate) slots: NonZeroU16,
    /// Bytes of its writable buffers.
    pub(crate) writable_len: u32,
    /// The owner's name for it.
    pub(crate) token: T,
}

/// By how much ids grow from chain to chain when they are given out in ring order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ids {
    /// An id is the place of the first descriptor.
    Slots,
    /// An id is a number of its own.
    Count,
}

/// IN_ORDER: the device may answer a batch of chains with one used element.
#[derive(Debug)]
struct InOrder {
    ids: Ids,
    /// The chain that is completed next.
    oldest: u16,
    /// The last chain of the batch being collected, and the length its element gave.
    batch: Option<(u16, u32)>,
}

/// The chains the device has.
#[derive(Debug)]
pub(crate) struct Outstanding<T> {
    entries: Vec<Option<Entry<T>>>,
    in_order: Option<InOrder>,
}

impl<T> Outstanding<T> {
    pub(crate) fn new(size: u16, in_order: Option<Ids>) -> Self {
        Self {
            entries: (0..size).map(|_| None).collect(),
            in_order: in_order.map(|ids| InOrder { ids, oldest: 0, batch: None }),
        }
    }

    /// The id that follows `id` when ids are given out in ring order.
    #[inline(always)]
    pub(crate) fn following(&self, id: u16, step: u16) -> u16 {
        let size = self.entries.len() as u32;
        let next = u32::from(id) + u32::from(step);
        (if next >= size { next - size } else { next }) as u16
    }

    /// Notes a chain the device is given.
    #[inline(always)]
    pub(crate) fn insert(&mut self, id: u16, entry: Entry<T>) {
        self.entries[usize::from(id)] = Some(entry);
    }

    /// Takes out the chain `id`, which came from the device.
    #[inline(always)]
    fn remove(&mut self, id: u32) -> Result<Entry<T>, Fault> {
        let entry = self.entries.get_mut(id as usize).ok_or(Fault::BadIndex(id))?;
        entry.take().ok_or(Fault::NotOutstanding(id))
    }

    /// Whether the used element that was read last stands for more chains.
    #[inline(always)]
    pub(crate) fn in_batch(&self) -> bool {
        self.in_order.as_ref().is_some_and(|order| order.batch.is_some())
    }

    /// Takes out the chain the device has finished with: its id, what was known of it, and the bytes
    /// written. `element` reads the next used element (id and length) if one is needed.
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
                // One that the device does not have would let the batch run over all it has.
                entry.as_ref().ok_or(Fault::NotOutstanding(id))?;
                (id as u16, len)
            }
        };
        let entry = self.remove(oldest.into())?;
        let step = if ids == Ids::Slots { entry.slots.get() } else { 1 };
        let next = self.following(oldest, step);
        // Chains without an element of their own count as used completely (2.7.9).
        let (batch, len) = if oldest == last { (None, len) } else { (Some((last, len)), entry.writable_len) };
        self.in_order = Some(InOrder { ids, oldest: next, batch });
        Ok((oldest, entry, len))
    }

    /// Takes out any chain.
    pub(crate) fn take_any(&mut self) -> Option<(u16, Entry<T>)> {
        let id = self.entries.iter().position(Option::is_some)?;
        Some((id as u16, self.entries[id].take()?))
    }
}
