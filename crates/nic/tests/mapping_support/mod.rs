//! Memory, pools and packets for the tests of transmit mapping, and an oracle that counts byte by byte.
#![allow(dead_code)] // no test file needs all of it

use std::sync::Arc;

use ringferry_memory::{GuestMemory, SharedMem};
use ringferry_nic::driver::Segment;
use ringferry_nic::limits::{SegLimits, TxLimits};
use ringferry_nic::map::{Mapper, SegList};
use ringferry_packet::buffer::{Buf, Chain, Pool, PoolLayout, Pools, PoolsLayout};

/// Guest address of the memory, a multiple of any boundary used here.
const BASE: u64 = 0x4000_0000;
/// Bytes from one source buffer to the next, two pages.
pub const STRIDE: usize = 8192;
/// Size in bytes of a page.
pub const PAGE: usize = 4096;

/// Memory with the pools of a worker and one for the packets that come from elsewhere.
pub struct Bench {
    memory: Arc<GuestMemory>,
    pub pools: Pools,
    pub source: Pool,
    source_at: u64,
    before: [u32; 4],
}

impl Bench {
    /// `count` buffers of each size, `large` bytes of room in the large ones, `source` others.
    pub fn new(count: u32, large: u32, source: u32) -> Self {
        let layout = PoolsLayout::new(count, large);
        let source_layout = PoolLayout::chunks(STRIDE as u32, source, 64);
        let source_at = BASE + (layout.bytes() as u64).next_multiple_of(1 << 16);
        let bytes = (source_at - BASE) as usize + source_layout.bytes();
        let region = SharedMem::new("mapping", bytes).unwrap().map_at(BASE).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
        let pools = Pools::new(&memory, BASE, layout).unwrap();
        let source = Pool::new(&memory, source_at, source_layout).unwrap();
        let mut bench = Self { memory, pools, source, source_at, before: [0; 4] };
        bench.before = bench.available();
        bench
    }

    fn available(&self) -> [u32; 4] {
        [&self.pools.small, &self.pools.frame, &self.pools.large, &self.source].map(Pool::available)
    }

    /// No buffer is in use, and none is free twice.
    pub fn assert_nothing_leaked(&self) {
        assert_eq!(self.available(), self.before, "buffers in the pools, before and after");
    }

    /// A buffer of the source with `len` bytes `at` bytes behind the start of its chunk, and its tail room or none.
    pub fn buf(&mut self, at: usize, len: usize, tail: bool, fill: &mut u8) -> Buf {
        let mut buf = self.source.alloc().expect("the source is large enough");
        let skip = at - buf.headroom();
        buf.grow(skip);
        buf.pull(skip);
        let bytes: Vec<u8> = (0..len)
            .map(|_| {
                *fill = fill.wrapping_mul(5).wrapping_add(29);
                *fill
            })
            .collect();
        assert_eq!(buf.append(&bytes), len);
        if !tail {
            drop(buf.split_off(len));
        }
        buf
    }

    /// Reads the bytes of `segs` as the device does.
    pub fn read(&self, segs: &[Segment]) -> Vec<u8> {
        let mut translator = self.memory.translator();
        let mut bytes = Vec::new();
        for seg in segs {
            let piece = translator.read(seg.addr, seg.len as usize).unwrap();
            assert_eq!(piece.len(), seg.len as usize);
            let at = bytes.len();
            bytes.resize(at + piece.len(), 0);
            piece.copy_to(&mut bytes[at..]);
        }
        bytes
    }

    /// All bytes of the source.
    pub fn snapshot(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.source.layout().bytes()];
        let len = bytes.len();
        self.memory.translator().read(self.source_at, len).unwrap().copy_to(&mut bytes);
        bytes
    }

    /// Bytes of the source that mapping a packet may write: rooms of buffers that nobody else has.
    pub fn writable(&self, chain: &Chain) -> Vec<bool> {
        let mut writable = vec![false; self.source.layout().bytes()];
        for buf in chain.bufs().iter().filter(|buf| buf.is_exclusive() && self.source.owns(buf)) {
            let at = (buf.addr() - self.source_at) as usize;
            writable[at - buf.headroom()..at].fill(true);
            writable[at + buf.len()..at + buf.len() + buf.tailroom()].fill(true);
        }
        writable
    }
}

/// Limits that a test changes what it cares for of.
pub fn limits(max_segs: u16) -> SegLimits {
    SegLimits {
        max_segs,
        reserved: 0,
        max_seg_len: 1 << 16,
        boundary: None,
        min_first: 0,
        max_bytes: 1 << 16,
    }
}

/// The same limits for both kinds of packet.
pub fn both(header_room: usize, limits: SegLimits) -> TxLimits {
    TxLimits { ring: 256, header_room, plain: limits, tso: limits }
}

/// Segments, and the length of the first, byte by byte: of the packet as it lies, header room in front.
pub fn oracle(chain: &Chain, header: usize, limits: &SegLimits) -> (usize, usize) {
    let in_place = chain.bufs().first().is_some_and(|buf| buf.headroom() >= header && buf.is_exclusive());
    let (mut lens, mut previous) = (Vec::<u32>::new(), None);
    if !in_place && header > 0 {
        lens.push(header as u32);
    }
    for (i, buf) in chain.bufs().iter().enumerate() {
        let lead = if i == 0 && in_place { header as u64 } else { 0 };
        for addr in buf.addr() - lead..buf.addr() + buf.len() as u64 {
            let continues = previous == addr.checked_sub(1) && previous.is_some();
            let crosses = limits.boundary.is_some_and(|boundary| addr % boundary == 0);
            match lens.last_mut() {
                Some(len) if continues && !crosses && *len < limits.max_seg_len => *len += 1,
                _ => lens.push(1),
            }
            previous = Some(addr);
        }
    }
    (lens.len(), lens.first().copied().unwrap_or(0) as usize)
}

/// Returns true if a packet must be mapped without copying.
pub fn goes_direct(chain: &Chain, header: usize, limits: &SegLimits) -> bool {
    let (count, first) = oracle(chain, header, limits);
    let must = header.max(limits.min_first as usize).min(header + chain.len());
    count <= usize::from(limits.max_segs - limits.reserved) && first >= must
}

/// Returns address, length, head room and tail room of each buffer of a packet.
pub fn shape(chain: &Chain) -> Vec<(u64, usize, usize, usize)> {
    chain.bufs().iter().map(|buf| (buf.addr(), buf.len(), buf.headroom(), buf.tailroom())).collect()
}

/// Checks a mapped packet: its segments obey the limits, and are the header written now and `bytes`.
pub fn check_mapped(
    bench: &Bench,
    chain: &mut Chain,
    segs: &SegList,
    header: usize,
    limits: &SegLimits,
    bytes: &[u8],
) {
    let (allowed, total) = (usize::from(limits.max_segs - limits.reserved), header + bytes.len());
    assert!(segs.len() <= allowed, "{} segments of {allowed}", segs.len());
    for seg in segs {
        assert!(seg.len > 0 && seg.len <= limits.max_seg_len);
        let last = seg.addr + u64::from(seg.len) - 1;
        assert!(limits.boundary.is_none_or(|boundary| seg.addr / boundary == last / boundary), "crosses");
    }
    let first = segs[0].len as usize;
    assert!(first >= header.max(limits.min_first as usize).min(total), "the first has {first} bytes");
    assert_eq!(chain.len(), total);
    let front: Vec<u8> = (0..header as u8).map(|i| 0xa0 ^ i).collect();
    if header > 0 {
        let written = chain.first_mut().unwrap().write().first(header).copy_from(&front);
        assert_eq!(written, header, "the header room is one piece of ours");
    }
    assert_eq!(bench.read(segs), [&front, bytes].concat());
    assert_eq!(chain.to_vec(), [&front, bytes].concat());
}

/// Maps where nothing can go wrong.
pub fn map(bench: &mut Bench, mapper: &mut Mapper, chain: Chain) -> (Chain, SegList) {
    let mut segs = SegList::new();
    let chain = mapper.map(chain, &mut bench.pools, |_| true, &mut segs).unwrap();
    (chain, segs)
}
