//! What a ring carries: buffers, chains of buffers, bursts of chains.

pub use ringferry_memory::Buffer;
use ringferry_memory::Translator;

use crate::Fault;
use crate::parts::DESC;

/// VIRTQ_DESC_F_NEXT, of either layout.
pub(crate) const F_NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE.
pub(crate) const F_WRITE: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT.
pub(crate) const F_INDIRECT: u16 = 4;

/// Descriptors of a chain at most, however large the queue. The specification allows as many as the
/// queue has entries; a chain that long would only serve to keep the device busy. No driver makes
/// chains longer than the 1024 pieces an `iovec` array may have.
const MAX_CHAIN: u16 = 1024;

/// The longest chain a device takes from a queue of `size` entries.
pub(crate) fn chain_limit(size: u16) -> u16 {
    size.min(MAX_CHAIN)
}

/// One descriptor chain as a device took it: first the readable buffers, then the writable ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// The chain's name when it is completed: in a split ring the index of its first descriptor, in
    /// a packed one its buffer id.
    pub id: u16,
    /// Entries of the ring it occupies: 1 in the available ring of a split queue, its descriptors in
    /// a packed one.
    pub slots: u16,
    /// Number of device-readable buffers.
    pub readable: u16,
    /// Number of device-writable buffers.
    pub writable: u16,
    /// Bytes in the readable buffers.
    pub readable_len: u32,
    /// Bytes in the writable buffers.
    pub writable_len: u32,
    /// Where the buffers are, if there is more than one. Before that is known, what else the first
    /// descriptor said.
    first: u32,
    /// The buffer, if there is only one: most chains are, and then nothing else need be looked at.
    only: Buffer,
}

impl Chain {
    /// A chain of one descriptor.
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

    /// This chain, with what else its descriptor said, in case there is more to it.
    #[inline(always)]
    pub(crate) fn with_rest(self, rest: u32) -> Self {
        Self { first: rest, ..self }
    }

    /// The first buffer of a chain that there may be more to, and what [`Chain::with_rest`] noted.
    pub(crate) fn rest(&self) -> (Buffer, u32) {
        (self.only, self.first)
    }

    /// This chain, to be completed: the device wrote `written` bytes from the start of the writable
    /// buffers on.
    #[inline]
    pub fn done(&self, written: u32) -> Done {
        Done { id: self.id, slots: self.slots, silent: self.writable == 0, written }
    }
}

/// A chain the device has finished with; see [`Chain::done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    pub(crate) id: u16,
    pub(crate) slots: u16,
    /// Nothing could be written, so with IN_ORDER no used element need say how much was. One with
    /// writable buffers gets an element of its own even if it is full: DPDK's in-order receive path
    /// reads an element for each.
    pub(crate) silent: bool,
    /// Bytes written.
    pub(crate) written: u32,
}

/// A burst of chains in flat storage that is reused from burst to burst.
#[derive(Debug, Default)]
pub struct Chains {
    chains: Vec<Chain>,
    buffers: Vec<Buffer>,
}

impl Chains {
    /// An empty burst.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets all chains and keeps the storage.
    #[inline]
    pub fn clear(&mut self) {
        self.chains.clear();
        self.buffers.clear();
    }

    /// Forgets all chains but the first `n`.
    pub fn truncate(&mut self, n: usize) {
        self.chains.truncate(n);
    }

    /// Number of chains.
    #[inline]
    pub fn len(&self) -> usize {
        self.chains.len()
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    /// The `i`-th chain.
    ///
    /// # Panics
    /// When there is no such chain.
    #[inline]
    pub fn chain(&self, i: usize) -> Chain {
        self.chains[i]
    }

    /// The `i`-th chain, if there is one.
    #[inline]
    pub fn get(&self, i: usize) -> Option<Chain> {
        self.chains.get(i).copied()
    }

    /// All chains in ring order, to be given back by [`crate::Device::untake`].
    #[inline]
    pub fn all(&self) -> &[Chain] {
        &self.chains
    }

    /// All chains in ring order.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = &Chain> {
        self.chains.iter()
    }

    /// The device-readable buffers of a chain of this burst.
    #[inline]
    pub fn readable<'a>(&'a self, chain: &'a Chain) -> &'a [Buffer] {
        &self.buffers(chain)[..chain.readable as usize]
    }

    /// The device-writable buffers of a chain of this burst.
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

    /// Adds chains of one buffer.
    #[inline(always)]
    pub(crate) fn extend(&mut self, singles: impl Iterator<Item = Chain>) {
        self.chains.extend(singles);
    }

    /// Starts a chain that is still open; [`Chains::close`] adds it, and one that is dropped leaves
    /// only buffers that no chain names.
    #[inline]
    pub(crate) fn open(&self, id: u16) -> Chain {
        Chain { id, slots: 1, first: self.buffers.len() as u32, ..Chain::default() }
    }

    /// Checks a buffer and adds it to the open chain.
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

    /// Adds the open chain, with all its buffers.
    #[inline]
    pub(crate) fn close(&mut self, mut chain: Chain) -> Result<(), Fault> {
        // Either sum is below 2^32; so must be both together (2.7.5).
        chain.readable_len.checked_add(chain.writable_len).ok_or(Fault::ChainTooLarge)?;
        // One descriptor in an indirect table.
        if let [only] = self.buffers[chain.first as usize..] {
            chain.only = only;
        }
        self.chains.push(chain);
        Ok(())
    }
}

/// Where indirect descriptor tables are read from: the guest's memory.
pub trait Tables {
    /// Reads the 16 bytes of the descriptor at guest physical address `addr`; `None` when any of
    /// them lies outside guest memory.
    fn descriptor(&mut self, addr: u64) -> Option<[u8; 16]>;
}

/// The number of descriptors in an indirect table of `len` bytes.
pub(crate) fn table_entries(len: u32) -> Result<u32, Fault> {
    let entries = len / DESC as u32;
    if entries == 0 || !len.is_multiple_of(DESC as u32) { Err(Fault::BadTable) } else { Ok(entries) }
}

/// The two words of the `index`-th descriptor of the indirect table at `addr`.
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
            // A table needs no alignment (2.7.5.3), so a descriptor may cross two regions.
            done += self.read(at, bytes.len() - done)?.copy_to(&mut bytes[done..]);
        }
        Some(bytes)
    }
}
