//! The driver half of a ring of either layout.

use ringferry_memory::Words;

use crate::chain::{Buffer, F_WRITE};
use crate::parts::{DESC, LayoutError, Parts};
use crate::{Fault, RingFeatures, packed, split};

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

/// Memory for indirect tables: `entries` descriptors for every chain the ring can hold.
#[derive(Debug)]
pub struct IndirectTables<A> {
    /// `size * entries * 16` bytes.
    pub area: A,
    /// Guest physical address of the first byte of `area`.
    pub addr: u64,
    /// Longest chain that goes into a table.
    pub entries: u16,
}

impl<A: Words> IndirectTables<A> {
    /// These tables, if they are of use: for chains of more than one buffer when the feature was
    /// negotiated.
    ///
    /// # Panics
    /// When they are too small for the ring: a bug of the caller.
    pub(crate) fn checked(tables: Option<Self>, size: u16, features: RingFeatures) -> Option<Self> {
        let tables = tables.filter(|_| features.indirect)?;
        let need = usize::from(size) * usize::from(tables.entries) * DESC;
        assert!(tables.area.len() >= need, "indirect tables too small");
        Some(tables)
    }

    /// Whether a chain of `count` buffers goes into a table.
    #[inline(always)]
    pub(crate) fn takes(&self, count: u16) -> bool {
        count > 1 && count <= self.entries
    }

    /// Writes the table of chain `id`, each entry's two words made by `words` from its place, buffer
    /// and flags; returns the buffer that is the table.
    #[inline(always)]
    pub(crate) fn fill(
        &self,
        id: u16,
        buffers: impl Iterator<Item = (Buffer, u16)>,
        words: impl Fn(u16, Buffer, u16) -> [u64; 2],
    ) -> Buffer {
        let table = DESC * usize::from(self.entries) * usize::from(id);
        let mut len = 0;
        for (i, (buffer, flags)) in buffers.enumerate() {
            let [first, second] = words(i as u16, buffer, flags);
            self.area.store64(table + len, first);
            self.area.store64(table + len + 8, second);
            len += DESC;
        }
        Buffer { addr: self.addr + table as u64, len: len as u32 }
    }
}

/// The buffers of a chain with their flags, readable ones first.
#[inline(always)]
pub(crate) fn flagged<'a>(
    readable: &'a [Buffer],
    writable: &'a [Buffer],
) -> impl Iterator<Item = (Buffer, u16)> + 'a {
    let readable = readable.iter().map(|buffer| (*buffer, 0));
    readable.chain(writable.iter().map(|buffer| (*buffer, F_WRITE)))
}

/// One side of one virtqueue, owned by one thread. `T` names a chain for its owner. Every call finds
/// its layout with one branch.
#[derive(Debug)]
pub enum Driver<A: Words, T> {
    /// VIRTIO 1.4, 2.7.
    Split(split::Driver<A, T>),
    /// VIRTIO 1.4, 2.8.
    Packed(packed::Driver<A, T>),
}

macro_rules! each {
    ($self:ident, $ring:ident => $call:expr) => {
        match $self {
            Driver::Split($ring) => $call,
            Driver::Packed($ring) => $call,
        }
    };
}

impl<A: Words, T> Driver<A, T> {
    /// Sets up a fresh ring over zeroed memory that the device does not use yet. Calls start off.
    /// `tables` serve INDIRECT_DESC when it was negotiated.
    ///
    /// # Errors
    /// See [`LayoutError`].
    ///
    /// # Panics
    /// When `tables` are too small for the ring: a bug of the caller.
    pub fn new(
        parts: Parts<A>,
        features: RingFeatures,
        tables: Option<IndirectTables<A>>,
    ) -> Result<Self, LayoutError> {
        Ok(if features.packed {
            Self::Packed(packed::Driver::new(parts, features, tables)?)
        } else {
            Self::Split(split::Driver::new(parts, features, tables)?)
        })
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        each!(self, ring => ring.size())
    }

    /// Free descriptors.
    #[inline]
    pub fn free(&self) -> u16 {
        each!(self, ring => ring.free())
    }

    /// Chains added and not yet collected.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        each!(self, ring => ring.in_flight())
    }

    /// The violation that broke this ring, if any.
    #[inline]
    pub fn fault(&self) -> Option<Fault> {
        each!(self, ring => ring.fault())
    }

    /// Adds a chain: first what the device reads, then what it writes. Not visible to the device
    /// until [`Driver::publish`].
    ///
    /// # Errors
    /// See [`AddError`]; nothing was added and the token is back with the caller.
    #[inline(always)]
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer], token: T) -> Result<(), AddError<T>> {
        each!(self, ring => ring.add(readable, writable, token))
    }

    /// Shows all added chains to the device with one store; says whether it wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        each!(self, ring => ring.publish())
    }

    /// Whether the device has finished with a chain that was not collected.
    #[inline]
    pub fn has_used(&mut self) -> bool {
        each!(self, ring => ring.has_used())
    }

    /// The next chain the device has finished with, in the device's order.
    #[inline(always)]
    pub fn collect(&mut self) -> Option<Used<T>> {
        each!(self, ring => ring.collect())
    }

    /// Takes back a chain that the device, which must have stopped for good, never used. `None` when
    /// there are no more. The ring is set up anew afterwards.
    pub fn detach_unused(&mut self) -> Option<T> {
        each!(self, ring => ring.detach_unused())
    }

    /// Tells the device not to call: the driver polls.
    #[inline]
    pub fn disable_calls(&mut self) {
        each!(self, ring => ring.disable_calls());
    }

    /// Asks the device to call at the next completion. True when there is one already, for which no
    /// call may come: the caller must not sleep.
    #[inline]
    pub fn enable_calls(&mut self) -> bool {
        each!(self, ring => ring.enable_calls())
    }

    /// Asks the device to call when three quarters of what is outstanding has come back: enough
    /// for a transmit queue, which only wants room. True when so much is there already, or in a
    /// packed ring, where that cannot be seen, when anything is.
    #[inline]
    pub fn enable_calls_delayed(&mut self) -> bool {
        each!(self, ring => ring.enable_calls_delayed())
    }
}
