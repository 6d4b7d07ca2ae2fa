//! A receive ring and the device behind it, in one object: the device fills what was posted, honestly or
//! not, and no two buffers in use may ever overlap.
#![allow(dead_code, reason = "every test program uses a part of it")]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use ringferry_memory::{GuestMemory, ReadSlice, SharedMem};
use ringferry_nic::driver::{Completion, Refused, RxDriver, Segment, Start};
use ringferry_nic::limits::{RxLimits, RxMode};
use ringferry_nic::rx::{RxConfig, RxQueue};
use ringferry_packet::buffer::{Buf, Chain, Fragments, Pool, PoolLayout, Pools, PoolsLayout};
use ringferry_packet::vnet::Header;

/// Bytes of the driver's header.
pub const HEADER: usize = Header::LEN;

/// Longest frame: an IP packet of 65535 bytes.
pub const MAX_FRAME: usize = 65549;

const BASE: u64 = 1 << 32;

/// Ranges that may not overlap.
#[derive(Debug, Default)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    pub fn add(&mut self, start: u64, end: u64) {
        assert!(start < end, "an empty range at {start:#x}");
        let before = self.0.range(..end).next_back();
        assert!(before.is_none_or(|(_, &e)| e <= start), "{start:#x}..{end:#x} is in use: {before:x?}");
        self.0.insert(start, end);
    }

    pub fn remove(&mut self, start: u64) {
        assert!(self.0.remove(&start).is_some(), "{start:#x} was not in use");
    }

    pub fn add_all_of(&mut self, other: &Ranges) {
        other.0.iter().for_each(|(&start, &end)| self.add(start, end));
    }

    /// All that a buffer owns, room included.
    pub fn add_buf(&mut self, buf: &Buf) {
        let start = buf.addr() - buf.headroom() as u64;
        self.add(start, start + buf.truesize() as u64);
    }
}

/// A buffer that the device has.
#[derive(Clone, Debug)]
pub struct Posted {
    pub token: u16,
    pub segments: Vec<Segment>,
}

impl Posted {
    pub fn bytes(&self) -> usize {
        self.segments.iter().map(|segment| segment.len as usize).sum()
    }
}

/// A receive ring together with its device.
#[derive(Debug)]
pub struct Fake {
    memory: Arc<GuestMemory>,
    limits: RxLimits,
    /// Buffers that were posted and are not published yet.
    unseen: Vec<Posted>,
    /// Buffers that the device may fill, oldest first.
    pub avail: VecDeque<Posted>,
    /// Completions of filled buffers that were not collected yet.
    pub used: VecDeque<Completion>,
    /// Everything posted that the driver has not collected.
    outstanding: BTreeMap<u16, Vec<Segment>>,
    pub ranges: Ranges,
    /// Posts until one is refused.
    pub refuse_in: Option<usize>,
    pub posts: usize,
}

impl RxDriver for Fake {
    fn limits(&self) -> RxLimits {
        self.limits
    }

    fn room(&self) -> usize {
        usize::from(self.limits.ring) - self.outstanding.len()
    }

    fn post(&mut self, segments: &[Segment]) -> Result<u16, Refused> {
        assert!(!segments.is_empty() && segments.len() <= usize::from(self.limits.max_segs));
        if self.room() == 0 {
            return Err(Refused::Full);
        }
        if let Some(left) = &mut self.refuse_in {
            if *left == 0 {
                self.refuse_in = None;
                return Err(Refused::Full);
            }
            *left -= 1;
        }
        self.posts += 1;
        for segment in segments {
            let mut translator = self.memory.translator();
            assert!(translator.write(segment.addr, segment.len as usize).is_some(), "{segment:?} is outside");
            self.ranges.add(segment.addr, segment.addr + u64::from(segment.len));
        }
        let token = (0..).find(|token| !self.outstanding.contains_key(token)).unwrap();
        self.outstanding.insert(token, segments.to_vec());
        self.unseen.push(Posted { token, segments: segments.to_vec() });
        Ok(token)
    }

    fn flush(&mut self) -> bool {
        let any = !self.unseen.is_empty();
        self.avail.extend(self.unseen.drain(..));
        any
    }

    fn completed(&mut self, most: usize, mut each: impl FnMut(Completion)) -> usize {
        let count = most.min(self.used.len());
        for done in self.used.drain(..count) {
            // What a device has given back it no longer has, even if it lied when it did.
            self.avail.retain(|posted| posted.token != done.token);
            for segment in self.outstanding.remove(&done.token).unwrap_or_default() {
                self.ranges.remove(segment.addr);
            }
            each(done);
        }
        count
    }

    fn start(&mut self, front: ReadSlice<'_>) -> Start {
        let mut bytes = [0; HEADER];
        front.copy_to(&mut bytes);
        let header = Header::from_bytes(&bytes);
        Start { header, buffers: header.num_buffers, hash: None }
    }
}

impl Fake {
    /// Writes the part of a packet that lies in one buffer.
    fn write(&self, posted: &Posted, bytes: &[u8]) {
        let mut translator = self.memory.translator();
        let mut left = bytes;
        for segment in &posted.segments {
            let n = left.len().min(segment.len as usize);
            let slice = translator.write(segment.addr, n).expect("posted memory is mapped");
            assert_eq!(slice.copy_from(&left[..n]), n);
            left = &left[n..];
        }
    }

    /// Fills as many buffers as a frame takes. False, and nothing is done, when there are not as many.
    pub fn deliver(&mut self, frame: &[u8]) -> bool {
        self.deliver_with(frame, true, |_, _| {})
    }

    /// Like [`Fake::deliver`]; `lie` may change the header and the completions. Without `real`, only the
    /// header is written.
    pub fn deliver_with(
        &mut self,
        frame: &[u8],
        real: bool,
        lie: impl FnOnce(&mut Header, &mut Vec<Completion>),
    ) -> bool {
        let total = HEADER + frame.len();
        let mut room = 0;
        let mut count = 0;
        for posted in &self.avail {
            count += 1;
            room += posted.bytes();
            if room >= total || self.limits.mode == RxMode::Whole {
                break;
            }
        }
        if room < total {
            return false;
        }
        let taken: Vec<Posted> = self.avail.drain(..count).collect();
        let mut at = 0;
        let mut done = Vec::new();
        let mut pieces = Vec::new();
        for posted in &taken {
            let n = posted.bytes().min(total - at);
            pieces.push(at..at + n);
            done.push(Completion { token: posted.token, len: n as u32 });
            at += n;
        }
        let mut header = Header { num_buffers: count as u16, ..Header::default() };
        lie(&mut header, &mut done);
        let mut bytes = header.to_bytes().to_vec();
        if real {
            bytes.extend_from_slice(frame);
            for (posted, piece) in taken.iter().zip(pieces) {
                self.write(posted, &bytes[piece]);
            }
        } else {
            self.write(&taken[0], &bytes);
        }
        self.used.extend(done);
        true
    }

    /// Completes what a lie left out, so that the driver gets every buffer back.
    pub fn complete_forgotten(&mut self) {
        let known: Vec<u16> = self
            .avail
            .iter()
            .map(|posted| posted.token)
            .chain(self.used.iter().map(|done| done.token))
            .collect();
        for (&token, _) in self.outstanding.iter().filter(|(token, _)| !known.contains(token)) {
            self.used.push_back(Completion { token, len: 0 });
        }
    }

    /// Segments that the device has, for the size that was posted.
    pub fn segments(&self) -> impl Iterator<Item = Segment> + '_ {
        self.outstanding.values().flatten().copied()
    }
}

/// The limits, settings and chunks that a test makes a queue of.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub limits: RxLimits,
    pub config: RxConfig,
    pub chunks: PoolLayout,
}

impl Setup {
    pub fn mergeable(ring: u16, chunks: u32) -> Self {
        Self {
            limits: RxLimits {
                ring,
                header_len: HEADER,
                mode: RxMode::Mergeable,
                max_frame: MAX_FRAME,
                max_segs: 1,
            },
            config: RxConfig::default(),
            chunks: Fragments::layout(chunks, HEADER as u32),
        }
    }

    /// The driver, the chunks, and the pools of the worker.
    pub fn parts(&self) -> (Fake, Fragments, Pools) {
        let pools = PoolsLayout::new(1024, 4096);
        let shared = SharedMem::new("rx-test", pools.bytes() + self.chunks.bytes()).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![shared.map_at(BASE).unwrap()]).unwrap());
        let worker = Pools::new(&memory, BASE, pools).unwrap();
        let chunks = Pool::new(&memory, BASE + pools.bytes() as u64, self.chunks).unwrap();
        let fake = Fake {
            memory,
            limits: self.limits,
            unseen: Vec::new(),
            avail: VecDeque::new(),
            used: VecDeque::new(),
            outstanding: BTreeMap::new(),
            ranges: Ranges::default(),
            refuse_in: None,
            posts: 0,
        };
        (fake, Fragments::new(chunks), worker)
    }

    pub fn attach(&self) -> (RxQueue<Fake>, Pools) {
        let (fake, fragments, pools) = self.parts();
        (RxQueue::attach(fake, fragments, self.config).unwrap(), pools)
    }
}

/// Checks that nothing in `held` is posted, and no two of them overlap.
pub fn check_disjoint(queue: &mut RxQueue<Fake>, held: &[Chain]) {
    let mut all = Ranges::default();
    all.add_all_of(&queue.driver().ranges);
    held.iter().flat_map(Chain::bufs).for_each(|buf| all.add_buf(buf));
}

/// Takes the queue apart; every chunk must be back.
pub fn check_nothing_leaked(queue: RxQueue<Fake>, pools: &Pools) {
    let (_, fragments) = queue.detach();
    let pool = fragments.into_pool();
    assert_eq!(pool.available(), pool.layout().count, "chunks");
    assert_eq!(pools.small.available(), pools.small.layout().count, "small buffers");
    assert_eq!(pools.frame.available(), pools.frame.layout().count, "frame buffers");
}

/// Bytes that tell where they belong.
pub fn frame(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|at| (at.wrapping_mul(31).wrapping_add(at >> 8).wrapping_add(seed * 7)) as u8)
        .collect()
}

/// Receives all packets that have arrived.
pub fn receive(queue: &mut RxQueue<Fake>, pools: &mut Pools) -> Vec<Chain> {
    let mut chains = Vec::new();
    queue.receive(usize::MAX, pools, |chain, _| chains.push(chain));
    chains
}
