//! A worker's memory and pools, and a transmit ring that does as it is told.

#![allow(dead_code, reason = "each test uses some of it")]

use std::collections::VecDeque;
use std::sync::Arc;

use ringferry_memory::{GuestMemory, SharedMem};
use ringferry_nic::driver::{Refused, Segment, TxDriver, TxPacket};
use ringferry_nic::limits::{SegLimits, TxLimits};
use ringferry_packet::buffer::{Buf, Chain, Fragments, Pool, PoolLayout, Pools, PoolsLayout};

const BASE: u64 = 1 << 32;
/// Length in bytes of the driver's header.
pub const HEADER: usize = 12;

pub struct World {
    pub memory: Arc<GuestMemory>,
    next: u64,
}

impl World {
    pub fn new() -> Self {
        let shared = SharedMem::new("nic-tests", 256 << 20).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![shared.map_at(BASE).unwrap()]).unwrap());
        Self { memory, next: BASE }
    }

    fn take(&mut self, len: usize) -> u64 {
        let at = self.next;
        self.next += (len as u64).next_multiple_of(4096);
        at
    }

    /// Pools of `count` buffers of each size.
    pub fn pools(&mut self, count: u32) -> Pools {
        let layout = PoolsLayout::new(count, 66_000);
        let at = self.take(layout.bytes());
        Pools::new(&self.memory, at, layout).unwrap()
    }

    pub fn fragments(&mut self, chunks: u32) -> Fragments {
        let layout = PoolLayout::chunks(32 * 1024, chunks, 52);
        let at = self.take(layout.bytes());
        Fragments::new(Pool::new(&self.memory, at, layout).unwrap())
    }

    /// Reads the bytes of `segments`.
    pub fn read(&self, segments: &[Segment]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for segment in segments {
            let mut piece = vec![0; segment.len as usize];
            let read = self.memory.translator().read(segment.addr, piece.len()).unwrap();
            assert_eq!(read.copy_to(&mut piece), piece.len());
            bytes.extend(piece);
        }
        bytes
    }
}

/// Free buffers of all sizes.
pub fn available(pools: &Pools) -> [u32; 3] {
    [pools.small.available(), pools.frame.available(), pools.large.available()]
}

/// A packet of these pieces, a buffer each.
pub fn pieces(pools: &mut Pools, lens: &[usize], seed: u8) -> Chain {
    let mut chain = Chain::default();
    let mut byte = seed;
    for len in lens {
        let mut buf: Buf = pools.frame.alloc().unwrap();
        let bytes: Vec<u8> = (0..*len)
            .map(|_| {
                byte = byte.wrapping_mul(5).wrapping_add(3);
                byte
            })
            .collect();
        assert_eq!(buf.append(&bytes), *len);
        chain.push_back(buf);
    }
    chain
}

pub fn segs(max_segs: u16) -> SegLimits {
    SegLimits {
        max_segs,
        reserved: 0,
        max_seg_len: u32::MAX,
        boundary: None,
        min_first: HEADER as u32,
        max_bytes: 66_000,
    }
}

/// A packet that the device has.
#[derive(Debug, Clone)]
pub struct Sent {
    pub token: u16,
    pub segments: Vec<Segment>,
    pub len: usize,
}

/// A ring whose device completes the packets that the test selects, in the test's order.
#[derive(Debug)]
pub struct Ring {
    pub limits: TxLimits,
    pub room: usize,
    /// Refuses every packet with this error, if set.
    pub refuse: Option<Refused>,
    /// Packets that were written and are not published.
    pub written: Vec<Sent>,
    /// Packets that the device has.
    pub shown: Vec<Sent>,
    /// Tokens that the device reports as completed; true ones release their room.
    pub done: VecDeque<u16>,
    costs: Vec<(u16, usize)>,
    pub flushes: usize,
}

impl Ring {
    pub fn new(ring: u16, max_segs: u16) -> Self {
        let limits = TxLimits {
            ring,
            header_room: HEADER,
            plain: segs(max_segs.min(ring)),
            tso: segs(max_segs.min(ring)),
        };
        Self {
            limits,
            room: ring.into(),
            refuse: None,
            written: Vec::new(),
            shown: Vec::new(),
            done: VecDeque::new(),
            costs: Vec::new(),
            flushes: 0,
        }
    }

    /// The device is done with the `n` oldest packets; returns them.
    pub fn complete(&mut self, n: usize) -> Vec<Sent> {
        let n = n.min(self.shown.len());
        let sent: Vec<_> = self.shown.drain(..n).collect();
        self.done.extend(sent.iter().map(|sent| sent.token));
        sent
    }
}

impl TxDriver for Ring {
    fn limits(&self) -> TxLimits {
        self.limits
    }

    fn room(&self) -> usize {
        self.room
    }

    fn encap(&mut self, packet: &TxPacket<'_>) -> Result<u16, Refused> {
        if let Some(refused) = self.refuse {
            return Err(refused);
        }
        assert_eq!(packet.room.len(), HEADER);
        packet.room.copy_from(&packet.header.to_bytes());
        self.room = self.room.checked_sub(packet.segments.len()).ok_or(Refused::Full)?;
        let token = (0..).find(|token| self.costs.iter().all(|(of, _)| of != token)).unwrap();
        self.costs.push((token, packet.segments.len()));
        self.written.push(Sent { token, segments: packet.segments.to_vec(), len: packet.len });
        Ok(token)
    }

    fn flush(&mut self) -> bool {
        self.flushes += 1;
        self.shown.append(&mut self.written);
        true
    }

    fn completed(&mut self, most: usize, mut each: impl FnMut(u16)) -> usize {
        let count = most.min(self.done.len());
        for token in self.done.drain(..count) {
            if let Some(at) = self.costs.iter().position(|(of, _)| *of == token) {
                self.room += self.costs.swap_remove(at).1;
            }
            each(token);
        }
        count
    }
}
