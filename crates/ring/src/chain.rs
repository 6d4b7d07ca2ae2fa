//! What a ring carries: buffers, chains of buffers, bursts of chains.

use ringferry_memory::Translator;

/// One buffer: an address in guest physical memory and a length in bytes. Unchecked: translating
/// it is the business of whoever owns the memory map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Guest physical address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
}

/// One descriptor chain as a device took it: first the readable buffers, then the writable ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// Index of the first descriptor: the chain's name when it is completed.
    pub head: u16,
    /// Number of device-readable buffers.
    pub readable: u16,
    /// Number of device-writable buffers.
    pub writable: u16,
    /// Bytes in the readable buffers.
    pub readable_len: u32,
    /// Bytes in the writable buffers.
    pub writable_len: u32,
    first: u32,
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

    /// All chains in ring order.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = &Chain> {
        self.chains.iter()
    }

    /// The device-readable buffers of a chain of this burst.
    #[inline]
    pub fn readable(&self, chain: &Chain) -> &[Buffer] {
        &self.buffers[chain.first as usize..][..chain.readable as usize]
    }

    /// The device-writable buffers of a chain of this burst.
    #[inline]
    pub fn writable(&self, chain: &Chain) -> &[Buffer] {
        &self.buffers[chain.first as usize + chain.readable as usize..][..chain.writable as usize]
    }

    /// Adds chains of one buffer: head, whether the device writes it, and the buffer.
    #[inline(always)]
    pub(crate) fn extend(&mut self, singles: impl ExactSizeIterator<Item = (u16, bool, Buffer)> + Clone) {
        let first = self.buffers.len() as u32;
        self.buffers.extend(singles.clone().map(|(_, _, buffer)| buffer));
        self.chains.extend((first..).zip(singles).map(|(first, (head, writable, buffer))| {
            let (readable_len, writable_len) = if writable { (0, buffer.len) } else { (buffer.len, 0) };
            let writable = u16::from(writable);
            Chain { head, readable: 1 - writable, writable, readable_len, writable_len, first }
        }));
    }

    /// Starts a chain that is still open; [`Chains::close`] adds it, and one that is dropped leaves
    /// only buffers that no chain names.
    #[inline]
    pub(crate) fn open(&self, head: u16) -> Chain {
        Chain { head, first: self.buffers.len() as u32, ..Chain::default() }
    }

    #[inline]
    pub(crate) fn push(&mut self, buffer: Buffer) {
        self.buffers.push(buffer);
    }

    #[inline]
    pub(crate) fn close(&mut self, chain: Chain) {
        self.chains.push(chain);
    }
}

/// Where indirect descriptor tables are read from: the guest's memory.
pub trait Tables {
    /// Reads the 16 bytes of the descriptor at guest physical address `addr`; `None` when any of
    /// them lies outside guest memory.
    fn descriptor(&mut self, addr: u64) -> Option<[u8; 16]>;
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
