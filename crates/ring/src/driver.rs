//! The driver half of a virtqueue of either layout.
//!
//! [`Driver::new`] sets up a ring over zeroed memory before the device uses it. From then on one thread
//! owns the half and calls [`Driver::add`] for each chain, and once per burst [`Driver::publish`] and
//! [`Driver::collect_each`]. Before it sleeps it calls [`Driver::enable_calls`]. When the
//! device has stopped for good, [`Driver::detach_unused`] returns the tokens of the chains it never used,
//! and the half is dropped.
//!
//! ```text
//!      add            publish               (device)        collect
//! free ────► added ─────────────► outstanding ────────► used ───────► free, token and length returned
//!              └───────────────────────┴── detach_unused ───────────► free, token returned
//! ```

use ringferry_memory::Words;

use crate::chain::{Buffer, F_WRITE};
use crate::parts::{DESC, LayoutError, Parts};
use crate::{Fault, RingFeatures, packed, split};

/// The reason for which [`Driver::add`] added nothing. Each variant returns the chain's token.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddError<T> {
    /// There are too few free descriptors now. The caller may collect used chains and try again.
    #[error("the ring has no room for the chain")]
    Full(T),
    /// The chain has no buffers or more than the ring could ever hold.
    #[error("a chain needs between 1 and queue-size buffers")]
    BadChain(T),
    /// The device broke the rules of the ring earlier; see [`Driver::fault`].
    #[error("the ring is broken")]
    Broken(T),
}

/// A chain that the device has used and returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used<T> {
    /// The number that [`Driver::add`] returned for the chain.
    pub id: u16,
    /// The token that the chain was added with.
    pub token: T,
    /// Number of bytes that the device reports to have written. It is not checked here: the caller must
    /// clamp it to the length of the buffers it posted.
    pub len: u32,
}

/// Shared memory for indirect tables (2.7.5.3, 2.8.7): one table of `entries` descriptors for every chain
/// that the ring can hold.
#[derive(Debug)]
pub struct IndirectTables<A> {
    /// At least `size * entries * 16` bytes, where `size` is the queue size.
    pub area: A,
    /// Guest physical address of the first byte of `area`.
    pub addr: u64,
    /// Number of buffers of the longest chain that goes into a table; longer ones use the ring itself.
    pub entries: u16,
}

impl<A: Words> IndirectTables<A> {
    /// Returns these tables if INDIRECT_DESC was negotiated, after a check of their size.
    ///
    /// # Panics
    /// If they are too small for the ring, which is a bug of the caller.
    pub(crate) fn checked(tables: Option<Self>, size: u16, features: RingFeatures) -> Option<Self> {
        let tables = tables.filter(|_| features.indirect)?;
        let need = usize::from(size) * usize::from(tables.entries) * DESC;
        assert!(tables.area.len() >= need, "indirect tables too small");
        Some(tables)
    }

    /// Returns true if a chain of `count` buffers goes into a table.
    #[inline(always)]
    pub(crate) fn takes(&self, count: u16) -> bool {
        count > 1 && count <= self.entries
    }

    /// Writes the table of chain `id`: `words` makes the two words of each entry from its index, buffer
    /// and flags. Returns the table's address and length.
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

/// Iterates over the buffers of a chain with their descriptor flags, readable ones first.
#[inline(always)]
pub(crate) fn flagged<'a>(
    readable: &'a [Buffer],
    writable: &'a [Buffer],
) -> impl Iterator<Item = (Buffer, u16)> + 'a {
    let readable = readable.iter().map(|buffer| (*buffer, 0));
    readable.chain(writable.iter().map(|buffer| (*buffer, F_WRITE)))
}

/// The driver half of one virtqueue, owned by one thread. `T` is the token by which the owner knows a
/// chain. The layout is chosen at set-up; each call dispatches on it with one branch.
#[derive(Debug)]
pub enum Driver<A: Words, T> {
    /// A split ring (VIRTIO 1.4, 2.7).
    Split(split::Driver<A, T>),
    /// A packed ring (VIRTIO 1.4, 2.8).
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
    /// `tables` are used for chains of several buffers if INDIRECT_DESC was negotiated.
    ///
    /// # Errors
    /// See [`LayoutError`].
    ///
    /// # Panics
    /// If `tables` are too small for the ring, which is a bug of the caller.
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

    /// Returns the queue size: the number of descriptors the ring holds.
    pub fn size(&self) -> u16 {
        each!(self, ring => ring.size())
    }

    /// Returns the number of free descriptors. A chain needs one per buffer, or one if it goes into an
    /// indirect table.
    #[inline]
    pub fn free(&self) -> u16 {
        each!(self, ring => ring.free())
    }

    /// Returns the number of chains that were added and not yet collected.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        each!(self, ring => ring.in_flight())
    }

    /// Returns the violation that broke this ring, or `None` while the ring works.
    #[inline]
    pub fn fault(&self) -> Option<Fault> {
        each!(self, ring => ring.fault())
    }

    /// Adds a chain of `readable` buffers for the device to read and `writable` buffers for it to write,
    /// which must stay untouched until the chain is collected. The device does not see the chain until
    /// [`Driver::publish`]. Returns the number by which the ring knows the chain: below the queue size, and that of no other
    /// chain until this one is collected or detached.
    ///
    /// # Errors
    /// [`AddError`]: nothing was added, and the error holds the token.
    #[inline(always)]
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer], token: T) -> Result<u16, AddError<T>> {
        each!(self, ring => ring.add(readable, writable, token))
    }

    /// Makes all added chains visible to the device with one store. Returns true if the device wants a
    /// kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        each!(self, ring => ring.publish())
    }

    /// Returns true if the device has used a chain that is not collected yet. Always false once the ring
    /// is broken.
    #[inline]
    pub fn has_used(&mut self) -> bool {
        each!(self, ring => ring.has_used())
    }

    /// Returns the next used chain, in the order in which the device used them, or `None` if there is none
    /// or the ring is broken.
    #[inline(always)]
    pub fn collect(&mut self) -> Option<Used<T>> {
        let mut next = None;
        self.collect_each(1, |used| next = Some(used));
        next
    }

    /// Passes up to `most` used chains to `each`, in the order in which the device used them, and returns how many there were.
    /// It costs less than as many calls of [`Driver::collect`], as what holds for all of them is looked at once.
    #[inline(always)]
    pub fn collect_each(&mut self, most: usize, each: impl FnMut(Used<T>)) -> usize {
        each!(self, ring => ring.collect_each(most, each))
    }

    /// Takes back a chain that the device never used, and returns its token; `None` when there are no more.
    /// The device must have stopped for good, and the ring must be set up anew afterwards.
    pub fn detach_unused(&mut self) -> Option<T> {
        each!(self, ring => ring.detach_unused())
    }

    /// Writes the whole ring anew for the device that comes after one that died, and returns the position at which it
    /// begins, in the encoding of [`Device::new`](crate::Device::new) and of the low half of a vhost-user base. `None` if
    /// the ring is broken.
    ///
    /// Nothing is read from shared memory: the outstanding chains are made available in the order in which they were added,
    /// published or not, whatever the dead device left in the ring. What it used and the driver has not collected, and
    /// what it took and did not use, goes to the next device, so collect first. The device that died must be gone, and the
    /// next one must not have been shown the ring. A kick is due afterwards.
    pub fn resume(&mut self) -> Option<u16> {
        each!(self, ring => ring.resume())
    }

    /// Turns the device's calls off, because the driver polls.
    #[inline]
    pub fn disable_calls(&mut self) {
        each!(self, ring => ring.disable_calls());
    }

    /// Asks the device to call at the next completion. Returns true if a used chain is there already: no
    /// call may come for it, so the caller must not sleep.
    #[inline]
    pub fn enable_calls(&mut self) -> bool {
        each!(self, ring => ring.enable_calls())
    }

    /// Asks the device to call once three quarters of the outstanding chains (in a packed ring, of their
    /// slots) are used. A transmit queue only waits for room, so this saves it interrupts. Returns true if
    /// as many are used already or, in a packed ring, where they cannot be counted, if any is; the caller
    /// must not sleep then.
    #[inline]
    pub fn enable_calls_delayed(&mut self) -> bool {
        each!(self, ring => ring.enable_calls_delayed())
    }
}
