//! The pools of a worker: three sizes of buffer, and what came back goes where it belongs.

use ringferry_memory::GuestMemory;

use super::{Buf, Chain, Pool, PoolError, PoolLayout};

/// How many buffers of each size a worker has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolsLayout {
    /// For headers and copies of small packets.
    pub small: PoolLayout,
    /// For frames of the usual MTU.
    pub frame: PoolLayout,
    /// For copies of anything: the fewest segments a packet can be made of.
    pub large: PoolLayout,
}

impl PoolsLayout {
    /// Room of a small buffer: a packet of 128 bytes, and what is pushed in front of it.
    pub const SMALL: u32 = 192;
    /// Room of a frame: Ethernet, two tags, MTU 1500, and some.
    pub const FRAME: u32 = 1600;
    /// Bytes in front of the data: a cache line, so that data begins a line and a header fits in front.
    pub const HEADROOM: u32 = 64;

    /// `count` buffers of each size; `large` bytes for the large ones.
    pub fn new(count: u32, large: u32) -> Self {
        let layout = |len| PoolLayout::fixed(len, count, Self::HEADROOM);
        Self { small: layout(Self::SMALL), frame: layout(Self::FRAME), large: layout(large) }
    }

    /// Bytes of memory that they take.
    pub fn bytes(&self) -> usize {
        self.small.bytes() + self.frame.bytes() + self.large.bytes()
    }
}

/// The pools of a worker.
#[derive(Debug)]
pub struct Pools {
    /// For headers and copies of small packets.
    pub small: Pool,
    /// For frames of the usual MTU.
    pub frame: Pool,
    /// For copies of anything.
    pub large: Pool,
}

impl Pools {
    /// Pools over the memory at `guest_addr`, one behind the other.
    ///
    /// # Errors
    /// See [`PoolError`].
    pub fn new(memory: &GuestMemory, guest_addr: u64, layout: PoolsLayout) -> Result<Self, PoolError> {
        let frame = guest_addr + layout.small.bytes() as u64;
        let large = frame + layout.frame.bytes() as u64;
        Ok(Self {
            small: Pool::new(memory, guest_addr, layout.small)?,
            frame: Pool::new(memory, frame, layout.frame)?,
            large: Pool::new(memory, large, layout.large)?,
        })
    }

    /// An empty buffer for `len` bytes, or the largest there is; `None` when none of its size is left.
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

    /// A packet of `bytes`, in as few buffers as it takes; `None`, and nothing is lost, when there are not
    /// as many.
    #[inline]
    pub fn chain_of(&mut self, bytes: &[u8]) -> Option<Chain> {
        let mut chain = Chain::default();
        if self.append(&mut chain, bytes, bytes.len()) == bytes.len() {
            return Some(chain);
        }
        self.recycle_chain(chain);
        None
    }

    /// Appends `bytes` to a packet that is being made: behind the data of its last buffer, as far as that has room and
    /// belongs to nobody else, then in new buffers. Those are for `expected` bytes, these and what is still to come, so that a
    /// packet made of many short pieces has as few buffers as one that was made at once. Returns how many bytes were
    /// appended: fewer when there are no buffers.
    ///
    /// This is what a network stack does with what it is sent, and the place to do it: a copy there is anyway, and each
    /// buffer that does not come into being need not be described to anybody, mapped and given back.
    #[inline(always)]
    pub fn append(&mut self, chain: &mut Chain, bytes: &[u8], expected: usize) -> usize {
        let at = chain.append_bytes(bytes);
        if at == bytes.len() { at } else { self.append_rest(chain, bytes, at, expected) }
    }

    /// Appends what is behind `at` in new buffers; returns how many bytes are appended then.
    #[inline(never)]
    fn append_rest(&mut self, chain: &mut Chain, bytes: &[u8], mut at: usize, expected: usize) -> usize {
        while at < bytes.len() {
            let Some(mut buf) = self.alloc(expected.max(bytes.len()) - at) else { break };
            at += buf.append(&bytes[at..]);
            chain.push_back(buf);
        }
        at
    }

    /// Copies a packet to buffers of a few bytes each, far apart, if the [faults](Pool::faults) of the pool for frames say
    /// so: what a network stack hands over that was fed in small pieces.
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

    /// Takes a buffer that nobody needs any more; see [`Pool::recycle`].
    #[inline]
    pub fn recycle(&mut self, buf: Buf) {
        // Each pool drops what is not its own, so the owner is found first.
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
