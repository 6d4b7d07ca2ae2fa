//! Descriptor chains as the device half sees them: buffers, chains, and bursts of chains.
//!
//! A worker keeps one [`Chains`] for its lifetime and clears it before each burst.
//! [`crate::Device::take`] fills it, the device type reads buffers by [`Chains::readable`] and
//! [`Chains::writable`], and [`Chain::done`] makes the [`Done`] by which a chain is completed. Chains of one
//! buffer, which most are, hold it themselves; the buffers of all others share one vector.

pub use ringferry_memory::Buffer;
use ringferry_memory::Translator;

use crate::Fault;
use crate::parts::DESC;

/// `VIRTQ_DESC_F_NEXT` (2.7.5, 2.8.6): the chain continues in another descriptor.
pub(crate) const F_NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`: the buffer is device-writable, otherwise it is device-readable.
pub(crate) const F_WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT`: the buffer is a table of descriptors.
pub(crate) const F_INDIRECT: u16 = 4;

/// Largest number of descriptors in a chain, however large the queue is. The specification allows as many
/// as the queue has entries, but a chain that long would only keep the device busy. No driver makes chains
/// of more than 1024 buffers, the limit of an `iovec` array.
const MAX_CHAIN: u16 = 1024;

/// Returns the length of the longest chain that a device takes from a queue of `size` entries.
pub(crate) fn chain_limit(size: u16) -> u16 {
    size.min(MAX_CHAIN)
}

/// A descriptor chain that a device took: its readable buffers first, then its writable ones. The buffers
/// are in the [`Chains`] that the chain was taken into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// The id by which the chain is completed: in a split ring the index of its first descriptor, in a
    /// packed ring its buffer id.
    pub id: u16,
    /// Number of ring entries that the chain occupies: 1 in a split ring (in its available ring), the
    /// number of its descriptors in a packed ring.
    pub slots: u16,
    /// Number of device-readable buffers, at most 1024 together with the writable ones.
    pub readable: u16,
    /// Number of device-writable buffers, at most 1024 together with the readable ones.
    pub writable: u16,
    /// Sum of the lengths of the readable buffers in bytes.
    pub readable_len: u32,
    /// Sum of the lengths of the writable buffers in bytes.
    pub writable_len: u32,
    /// Index of the first buffer in `Chains::buffers`, if the chain has several. While the chain is being
    /// read, the flags and next fields of its first descriptor instead.
    first: u32,
    /// The buffer, if the chain has only one, as most do; `Chains::buffers` is not read for these.
    only: Buffer,
}

impl Chain {
    /// Makes a chain of one descriptor with the given flags.
    #[inline(always)]
    pub(crate) fn single(id: u16, only: Buffer, flags: u16) -> Self {
        let writable = (flags & F_WRITE) / F_WRITE;
        let writable_len = only.len * u32::from(writable);
        Self {
            id,
            slots: 1,
            readable: 1 - writable,
            writable,
            readable_len: only.len - writable_len,
            writable_len,
            first: 0,
            only,
        }
    }

    /// Attaches the descriptor's flags and next fields, in case the chain turns out to be longer.
    #[inline(always)]
    pub(crate) fn with_rest(self, rest: u32) -> Self {
        Self { first: rest, ..self }
    }

    /// Returns the first descriptor's buffer and the fields that [`Chain::with_rest`] attached.
    pub(crate) fn rest(&self) -> (Buffer, u32) {
        (self.only, self.first)
    }

    /// Returns the buffer of a chain that has one only, which the device may read.
    #[inline(always)]
    pub fn sole_readable(&self) -> Option<Buffer> {
        (self.readable == 1 && self.writable == 0).then_some(self.only)
    }

    /// Returns the buffer of a chain that has one only, which the device may write.
    #[inline(always)]
    pub fn sole_writable(&self) -> Option<Buffer> {
        (self.readable == 0 && self.writable == 1).then_some(self.only)
    }

    /// Makes the completion of this chain. `written` is the number of bytes that the device wrote,
    /// counted from the start of the writable buffers.
    #[inline]
    pub fn done(&self, written: u32) -> Done {
        Done { id: self.id, slots: self.slots, readable_only: self.writable == 0, written }
    }
}

/// The completion of a chain, made by [`Chain::done`] and passed to [`crate::Device::complete_all`]; it
/// becomes a used element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    pub(crate) id: u16,
    pub(crate) slots: u16,
    /// The chain has no writable buffers, so with IN_ORDER it needs no used element of its own. A chain
    /// with writable buffers gets one even if they are full, because DPDK's in-order receive path reads
    /// an element for each chain.
    pub(crate) readable_only: bool,
    /// Number of bytes the device wrote to the writable buffers.
    pub(crate) written: u32,
}

impl Done {
    /// Returns the number of bytes that the device wrote to the writable buffers.
    pub fn written(&self) -> u32 {
        self.written
    }
}

/// A burst of chains, in vectors that are reused from burst to burst. Created once per worker or queue and
/// used by one thread.
#[derive(Debug, Default)]
pub struct Chains {
    chains: Vec<Chain>,
    buffers: Vec<Buffer>,
    /// Number of buffers of longer chains after which no further chain is taken at a time.
    most: Option<usize>,
}

impl Chains {
    /// Creates an empty burst without storage; the vectors grow to the largest burst seen.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty burst to which [`Device::take`](crate::Device::take) adds no further chain at a time after chains of several buffers that have `most` buffers
    /// together. A hostile driver makes chains as long as the ring, and each of their buffers takes tens of nanoseconds to read, of whatever
    /// use it is.
    pub fn bounded(most: usize) -> Self {
        Self { most: Some(most), ..Self::default() }
    }

    /// Removes all chains and keeps the storage. The chains themselves are neither completed nor returned
    /// to the ring.
    #[inline]
    pub fn clear(&mut self) {
        self.chains.clear();
        self.buffers.clear();
    }

    /// Removes all chains but the first `n`.
    pub fn truncate(&mut self, n: usize) {
        self.chains.truncate(n);
    }

    /// Returns the number of chains in the burst.
    #[inline]
    pub fn len(&self) -> usize {
        self.chains.len()
    }

    /// Returns the number of buffers that were read for the chains of several, those included that were given back since.
    #[inline]
    pub fn further_buffers(&self) -> usize {
        self.buffers.len()
    }

    /// Returns the number of buffers at which no further chain is to be added, given what is there now.
    #[inline]
    pub(crate) fn enough(&self) -> usize {
        self.most.map_or(usize::MAX, |most| self.buffers.len() + most)
    }

    /// Returns true if the burst holds no chain.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    /// Returns the chain at index `i`, counted from 0.
    ///
    /// # Panics
    /// If `i` is not less than [`Chains::len`].
    #[inline]
    pub fn chain(&self, i: usize) -> Chain {
        self.chains[i]
    }

    /// Returns the chain at index `i`, or `None` if `i` is not less than [`Chains::len`].
    #[inline]
    pub fn get(&self, i: usize) -> Option<Chain> {
        self.chains.get(i).copied()
    }

    /// Returns all chains in ring order, for example to return the last ones by
    /// [`crate::Device::untake`].
    #[inline]
    pub fn all(&self) -> &[Chain] {
        &self.chains
    }

    /// Iterates over all chains in ring order.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = &Chain> {
        self.chains.iter()
    }

    /// Returns the device-readable buffers of a chain of this burst.
    #[inline]
    pub fn readable<'a>(&'a self, chain: &'a Chain) -> &'a [Buffer] {
        &self.buffers(chain)[..chain.readable as usize]
    }

    /// Returns the device-writable buffers of a chain of this burst.
    #[inline]
    pub fn writable<'a>(&'a self, chain: &'a Chain) -> &'a [Buffer] {
        &self.buffers(chain)[chain.readable as usize..]
    }

    #[inline(always)]
    fn buffers<'a>(&'a self, chain: &'a Chain) -> &'a [Buffer] {
        match chain.readable + chain.writable {
            1 => std::slice::from_ref(&chain.only),
            count => &self.buffers[chain.first as usize..][..count as usize],
        }
    }

    /// Appends chains that have one buffer each.
    #[inline(always)]
    pub(crate) fn extend(&mut self, singles: impl Iterator<Item = Chain>) {
        self.chains.extend(singles);
    }

    /// Starts a chain, to be extended by [`Chains::push`] and added by [`Chains::close`]. A chain that is
    /// dropped instead only leaves buffers behind that no chain refers to.
    #[inline]
    pub(crate) fn open(&self, id: u16) -> Chain {
        Chain { id, slots: 1, first: self.buffers.len() as u32, ..Chain::default() }
    }

    /// Checks a buffer and adds it to `chain`.
    ///
    /// # Errors
    /// [`Fault::ReadableAfterWritable`] and [`Fault::ChainTooLarge`].
    #[inline(always)]
    pub(crate) fn push(&mut self, chain: &mut Chain, buffer: Buffer, flags: u16) -> Result<(), Fault> {
        let (count, total) = if flags & F_WRITE != 0 {
            (&mut chain.writable, &mut chain.writable_len)
        } else {
            if chain.writable > 0 {
                return Err(Fault::ReadableAfterWritable);
            }
            (&mut chain.readable, &mut chain.readable_len)
        };
        *count += 1;
        *total = total.checked_add(buffer.len).ok_or(Fault::ChainTooLarge)?;
        self.buffers.push(buffer);
        Ok(())
    }

    /// Adds `chain` with all its buffers to the burst.
    ///
    /// # Errors
    /// [`Fault::ChainTooLarge`], if the buffers have 2^32 bytes or more together.
    #[inline]
    pub(crate) fn close(&mut self, mut chain: Chain) -> Result<(), Fault> {
        // Each sum is below 2^32, and both together must be, too (2.7.5).
        chain.readable_len.checked_add(chain.writable_len).ok_or(Fault::ChainTooLarge)?;
        // The chain was one descriptor in an indirect table.
        if let [only] = self.buffers[chain.first as usize..] {
            chain.only = only;
        }
        self.chains.push(chain);
        Ok(())
    }
}

/// Reads indirect descriptor tables from guest memory. [`Translator`] implements it.
pub trait Tables {
    /// Reads the 16 bytes of the descriptor at guest physical address `addr`. Returns `None` if any of them
    /// lies outside guest memory.
    fn descriptor(&mut self, addr: u64) -> Option<[u8; 16]>;
}

/// Returns the number of descriptors in an indirect table of `len` bytes.
///
/// # Errors
/// [`Fault::BadTable`], if that is 0 or not a whole number.
pub(crate) fn table_entries(len: u32) -> Result<u32, Fault> {
    let entries = len / DESC as u32;
    if entries == 0 || !len.is_multiple_of(DESC as u32) { Err(Fault::BadTable) } else { Ok(entries) }
}

/// Reads the two words of descriptor `index` of the indirect table at `addr`.
///
/// # Errors
/// [`Fault::BadTable`], if the descriptor lies outside guest memory.
#[inline]
pub(crate) fn table_entry(tables: &mut impl Tables, addr: u64, index: u32) -> Result<[u64; 2], Fault> {
    let at = addr.checked_add(DESC as u64 * u64::from(index)).ok_or(Fault::BadTable)?;
    let both = u128::from_le_bytes(tables.descriptor(at).ok_or(Fault::BadTable)?);
    Ok([both as u64, (both >> 64) as u64])
}

impl Tables for Translator<'_> {
    #[inline]
    fn descriptor(&mut self, addr: u64) -> Option<[u8; 16]> {
        let mut bytes = [0; 16];
        let mut done = 0;
        while done < bytes.len() {
            let at = addr.checked_add(done as u64)?;
            // A table needs no alignment (2.7.5.3), so a descriptor may lie in two regions.
            done += self.read(at, bytes.len() - done)?.copy_to(&mut bytes[done..]);
        }
        Some(bytes)
    }
}
