//! The pools of a worker, with three sizes of buffers.
//!
//! A worker makes its [`Pools`] once and passes them to each call that needs buffers. [`Pools::recycle`] returns a buffer
//! to the pool that it came from.

use ringferry_memory::GuestMemory;

use super::{Buf, Chain, Pool, PoolError, PoolLayout};

/// The layouts of a worker's pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolsLayout {
    /// Layout of the pool for headers and copies of small packets.
    pub small: PoolLayout,
    /// Layout of the pool for frames of the usual MTU.
    pub frame: PoolLayout,
    /// Layout of the pool for full copies, which give a packet the fewest segments.
    pub large: PoolLayout,
}

impl PoolsLayout {
    /// Capacity of a small buffer in bytes: a packet of 128 bytes with headers in front.
    pub const SMALL: u32 = 192;
    /// Capacity of a frame buffer in bytes: Ethernet, two tags, MTU 1500, and a reserve.
    pub const FRAME: u32 = 1600;
    /// Head room in bytes: a cache line, so that data begins at a line and a header fits in front.
    pub const HEADROOM: u32 = 64;

    /// Makes layouts for `count` buffers of each size, with `large` bytes for the large ones.
    pub fn new(count: u32, large: u32) -> Self {
        let layout = |len| PoolLayout::fixed(len, count, Self::HEADROOM);
        Self { small: layout(Self::SMALL), frame: layout(Self::FRAME), large: layout(large) }
    }

    /// Returns the size in bytes of the memory for all three pools.
    pub fn bytes(&self) -> usize {
        self.small.bytes() + self.frame.bytes() + self.large.bytes()
    }
}

/// The three pools of a worker; they belong to its thread.
#[derive(Debug)]
pub struct Pools {
    /// The pool for headers and copies of small packets.
    pub small: Pool,
    /// The pool for frames of the usual MTU.
    pub frame: Pool,
    /// The pool for full copies.
    pub large: Pool,
}

impl Pools {
    /// Makes the pools over the memory at `guest_addr`, one after the other.
    ///
    /// # Errors
    /// [`PoolError`], if one of them cannot be made.
    pub fn new(memory: &GuestMemory, guest_addr: u64, layout: PoolsLayout) -> Result<Self, PoolError> {
        let frame = guest_addr + layout.small.bytes() as u64;
        let large = frame + layout.frame.bytes() as u64;
        Ok(Self {
            small: Pool::new(memory, guest_addr, layout.small)?,
            frame: Pool::new(memory, frame, layout.frame)?,
            large: Pool::new(memory, large, layout.large)?,
        })
    }

    /// Allocates an empty buffer of the smallest size that holds `len` bytes, or a large one if none does. Returns `None`
    /// if no buffer of that size is left.
    #[inline]
    pub fn alloc(&mut self, len: usize) -> Option<Buf> {
        if len <= self.small.layout().room() as usize {
            self.small.alloc()
        } else if len <= self.frame.layout().room() as usize {
            self.frame.alloc()
        } else {
            self.large.alloc()
        }
    }

    /// Makes a packet of `bytes` in as few buffers as possible. Returns `None`, with no buffer lost, if there are too few.
    #[inline]
    pub fn chain_of(&mut self, bytes: &[u8]) -> Option<Chain> {
        let mut chain = Chain::default();
        if self.append(&mut chain, bytes, bytes.len()) == bytes.len() {
            return Some(chain);
        }
        self.recycle_chain(chain);
        None
    }

    /// Appends `bytes` to a packet: in the tail room of its last buffer, if that has a single owner, then in new buffers.
    /// New buffers are allocated for `expected` bytes (these and those still to come), so that a packet made of many
    /// short pieces has as few buffers as one made at once. Returns the number of bytes appended, fewer if there are not
    /// enough buffers.
    ///
    /// A network stack should do this with small sends: it copies them anyway, and each buffer saved need not be described,
    /// mapped and recycled.
    #[inline(always)]
    pub fn append(&mut self, chain: &mut Chain, bytes: &[u8], expected: usize) -> usize {
        let at = chain.append_bytes(bytes);
        if at == bytes.len() { at } else { self.append_rest(chain, bytes, at, expected) }
    }

    /// Appends the bytes from `at` on in new buffers. Returns the total number of bytes appended.
    #[inline(never)]
    fn append_rest(&mut self, chain: &mut Chain, bytes: &[u8], mut at: usize, expected: usize) -> usize {
        while at < bytes.len() {
            let Some(mut buf) = self.alloc(expected.max(bytes.len()) - at) else { break };
            at += buf.append(&bytes[at..]);
            chain.push_back(buf);
        }
        at
    }

    /// Fault injection: if the [faults](Pool::faults) of the frame pool request it, copies a packet to buffers of a few
    /// bytes each, like a packet of many small sends.
    #[inline]
    pub fn shatter(&mut self, chain: Chain) -> Chain {
        match self.frame.split() {
            Some(piece) => self.shattered(chain, piece),
            None => chain,
        }
    }

    #[cold]
    fn shattered(&mut self, chain: Chain, piece: usize) -> Chain {
        let mut all = Chain::default();
        (all.header, all.hash) = (chain.header, chain.hash);
        for part in chain.bufs() {
            let mut rest = part.read();
            while !rest.is_empty() {
                let Some(mut buf) = self.alloc(piece) else {
                    self.recycle_chain(all);
                    return chain;
                };
                let n = buf.append_slice(&rest.first(piece));
                rest = rest.skip(n);
                all.push_back(buf);
            }
        }
        self.recycle_chain(chain);
        all
    }

    /// Recycles a buffer to the pool that it came from; see [`Pool::recycle`].
    #[inline]
    pub fn recycle(&mut self, buf: Buf) {
        // A pool drops buffers of other pools, so the owner must be found first.
        for pool in [&mut self.small, &mut self.frame, &mut self.large] {
            if pool.owns(&buf) {
                return pool.recycle(buf);
            }
        }
    }

    /// [Recycles](Pools::recycle) all buffers of a packet.
    #[inline]
    pub fn recycle_chain(&mut self, chain: Chain) {
        chain.dissolve(|buf| self.recycle(buf));
    }
}
