//! Any sequence of operations on packets against a plain model: a `Vec<u8>` for each packet, and a set of
//! byte ranges for the memory.
//!
//! After every operation all packets still read as the model says, so whoever wrote into memory of
//! somebody else is found out; ranges overlap only where they were shared; and in the end every chunk is back.

mod common;

use std::collections::HashMap;

use common::{fragments, pools, range};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use ringferry_packet::buffer::{Buf, Chain, Fragments, Pool, PoolLayout, Pools};

/// Buffers of each size of the pools: few, so that they run out.
const COUNT: u32 = 6;
/// Bytes of a chunk that fragments are carved from, and their number.
const CHUNK: u32 = 2048;
const CHUNKS: u32 = 3;
/// Head room of its first fragment.
const HEADROOM: u32 = 40;

/// An operation on packets. An index selects one of the packets that exist.
#[derive(Clone, Debug)]
enum Op {
    /// A packet from the pools.
    New(usize),
    /// A packet in a carved buffer; it takes `used` of the `len` bytes.
    Carve {
        len: usize,
        used: usize,
    },
    /// A carved buffer that is rolled back at once, and must come again.
    RollBack {
        len: usize,
        used: usize,
    },
    /// Bytes behind the last one, as many as the tail room takes.
    Extend(Index, usize),
    /// Bytes in front, out of the head room.
    Push(Index, usize),
    Pull(Index, usize),
    Truncate(Index, usize),
    /// Splits a packet into two.
    Split(Index, Index),
    /// Appends one packet to another.
    Append(Index, Index),
    /// The buffers of a packet change their places.
    Reverse(Index),
    Share(Index),
    Coalesce(Index),
    /// Cut into pieces of so many bytes.
    Shatter(Index, usize),
    /// New bytes in the first buffer, if it may be written.
    Overwrite(Index),
    Drop(Index),
    Recycle(Index),
    DropElsewhere(Index),
}

fn op() -> impl Strategy<Value = Op> {
    let at = any::<Index>;
    prop_oneof![
        3 => (1..4000usize).prop_map(Op::New),
        3 => (1..700usize, 0..700usize).prop_map(|(len, used)| Op::Carve { len, used }),
        1 => (1..700usize, 0..700usize).prop_map(|(len, used)| Op::RollBack { len, used }),
        2 => (at(), 1..300usize).prop_map(|(at, n)| Op::Extend(at, n)),
        1 => (at(), 0..80usize).prop_map(|(at, n)| Op::Push(at, n)),
        1 => (at(), 0..1000usize).prop_map(|(at, n)| Op::Pull(at, n)),
        1 => (at(), 0..4000usize).prop_map(|(at, n)| Op::Truncate(at, n)),
        3 => (at(), at()).prop_map(|(at, n)| Op::Split(at, n)),
        2 => (at(), at()).prop_map(|(at, other)| Op::Append(at, other)),
        1 => at().prop_map(Op::Reverse),
        2 => at().prop_map(Op::Share),
        1 => at().prop_map(Op::Coalesce),
        1 => (at(), 1..500usize).prop_map(|(at, n)| Op::Shatter(at, n)),
        2 => at().prop_map(Op::Overwrite),
        1 => at().prop_map(Op::Drop),
        1 => at().prop_map(Op::Recycle),
        1 => at().prop_map(Op::DropElsewhere),
    ]
}

/// A packet, and what it should read.
struct Held {
    chain: Chain,
    model: Vec<u8>,
}

struct World {
    pools: Pools,
    carved: Fragments,
    held: Vec<Held>,
    /// True once any packet was shared.
    shared: bool,
    /// Differs from write to write.
    pattern: u8,
}

impl World {
    fn new() -> Self {
        let carved = fragments(PoolLayout::chunks(CHUNK, CHUNKS, HEADROOM));
        Self { pools: pools(COUNT, 1024), carved, held: Vec::new(), shared: false, pattern: 0 }
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        self.pattern = self.pattern.wrapping_add(83);
        (0..n).map(|at| self.pattern.wrapping_add((at * 7) as u8)).collect()
    }

    fn hold(&mut self, chain: Chain, model: Vec<u8>) {
        self.held.push(Held { chain, model });
    }

    fn apply(&mut self, op: Op) {
        let count = self.held.len();
        match op {
            Op::New(len) => {
                let before = self.available();
                let model = self.bytes(len);
                match self.pools.chain_of(&model) {
                    Some(chain) => self.hold(chain, model),
                    None => assert_eq!(self.available(), before),
                }
            }
            Op::Carve { len, used } => {
                if let Some(buf) = self.carve(len, used) {
                    let model = common::bytes(&buf);
                    self.hold(Chain::from(buf), model);
                }
            }
            Op::RollBack { len, used } => {
                if let Some(buf) = self.carve(len, used) {
                    let (place, headroom) = (range(&buf), buf.headroom());
                    self.carved.roll_back(buf);
                    let again = self.carved.carve(len).expect("what was rolled back is there");
                    assert_eq!((range(&again), again.headroom(), again.len()), (place, headroom, 0));
                    self.carved.roll_back(again);
                }
            }
            _ if count == 0 => (),
            Op::Extend(at, n) => {
                let bytes = self.bytes(n);
                let Held { chain, model } = &mut self.held[at.index(count)];
                // Only a packet of one buffer has its last one at hand.
                if let (1, Some(last)) = (chain.bufs().len(), chain.first_mut()) {
                    let expected = if last.is_exclusive() { n.min(last.tailroom()) } else { 0 };
                    assert_eq!(last.append(&bytes), expected);
                    chain.recount();
                    model.extend(&bytes[..expected]);
                }
            }
            Op::Push(at, n) => {
                let bytes = self.bytes(n);
                let Held { chain, model } = &mut self.held[at.index(count)];
                let expected =
                    chain.bufs().first().is_some_and(|buf| buf.is_exclusive() && buf.headroom() >= n);
                assert_eq!(chain.push(n), expected);
                if expected {
                    chain.first_mut().unwrap().write().copy_from(&bytes);
                    model.splice(..0, bytes);
                }
            }
            Op::Pull(at, n) => {
                let Held { chain, model } = &mut self.held[at.index(count)];
                chain.pull(n);
                model.drain(..n.min(model.len()));
            }
            Op::Truncate(at, n) => {
                let Held { chain, model } = &mut self.held[at.index(count)];
                chain.truncate(n);
                model.truncate(n);
            }
            Op::Split(at, n) => {
                let Held { chain, model } = &mut self.held[at.index(count)];
                let n = n.index(model.len() + 2);
                let behind = chain.split_off(n);
                let rest = model.split_off(n.min(model.len()));
                self.hold(behind, rest);
            }
            Op::Append(at, other) => {
                let Held { chain, model } = self.held.swap_remove(at.index(count));
                match count - 1 {
                    0 => self.hold(chain, model),
                    left => {
                        let first = &mut self.held[other.index(left)];
                        first.chain.append(chain);
                        first.model.extend(model);
                    }
                }
            }
            Op::Reverse(at) => {
                let Held { chain, model } = self.held.swap_remove(at.index(count));
                let (mut reversed, mut bytes) = (Chain::default(), Vec::new());
                let mut end = model.len();
                for buf in chain.into_bufs().into_iter().rev() {
                    bytes.extend(&model[end - buf.len()..end]);
                    end -= buf.len();
                    reversed.push_back(buf);
                }
                self.hold(reversed, bytes);
            }
            Op::Share(at) => {
                self.shared = true;
                let Held { chain, model } = &mut self.held[at.index(count)];
                let (chain, model) = (chain.share(), model.clone());
                self.hold(chain, model);
            }
            Op::Coalesce(at) => {
                let chain = &mut self.held[at.index(count)].chain;
                chain.coalesce();
                assert!(chain.bufs().windows(2).all(|pair| !pair[0].is_continued_by(&pair[1])));
            }
            Op::Shatter(at, piece) => {
                let Held { chain, model } = self.held.swap_remove(at.index(count));
                let chain = chain.cut(piece);
                assert!(chain.bufs().iter().all(|buf| buf.len() <= piece));
                self.hold(chain, model);
            }
            Op::Overwrite(at) => {
                let bytes = self.bytes(5000);
                let Held { chain, model } = &mut self.held[at.index(count)];
                if let Some(first) = chain.first_mut() {
                    let expected = if first.is_exclusive() { first.len() } else { 0 };
                    assert_eq!(first.write().copy_from(&bytes), expected);
                    model[..expected].copy_from_slice(&bytes[..expected]);
                    // All of the range is this buffer's, room included.
                    let room = if expected > 0 { first.tailroom() } else { 0 };
                    assert_eq!(first.room().copy_from(&bytes), room);
                }
            }
            Op::Drop(at) => drop(self.held.swap_remove(at.index(count))),
            Op::Recycle(at) => {
                let Held { chain, .. } = self.held.swap_remove(at.index(count));
                for buf in chain.into_bufs() {
                    // A driver gives its own back to where they are carved.
                    let pool = self.carved.pool();
                    if pool.owns(&buf) { pool.recycle(buf) } else { self.pools.recycle(buf) }
                }
            }
            Op::DropElsewhere(at) => {
                let held = self.held.swap_remove(at.index(count));
                std::thread::spawn(move || drop(held.chain)).join().unwrap();
            }
        }
    }

    fn carve(&mut self, len: usize, used: usize) -> Option<Buf> {
        let bytes = self.bytes(used);
        let mut buf = self.carved.carve(len)?;
        assert!(buf.is_exclusive() && buf.is_empty() && buf.tailroom() >= len);
        let room = buf.tailroom();
        assert_eq!(buf.append(&bytes), used.min(room));
        Some(buf)
    }

    fn available(&self) -> [u32; 3] {
        [&self.pools.small, &self.pools.frame, &self.pools.large].map(Pool::available)
    }

    /// Everything that must hold at any time.
    fn check(&self) {
        for Held { chain, model } in &self.held {
            assert_eq!(&chain.to_vec(), model);
            assert_eq!(chain.len(), model.len());
            assert_eq!(chain.truesize(), chain.bufs().iter().map(Buf::truesize).sum::<usize>());
            assert!(chain.bufs().iter().all(|buf| !buf.is_empty() && buf.len() <= buf.truesize()));
        }

        // The carved buffers and the pools have memories of their own that begin at the same address.
        let bufs = || self.held.iter().flat_map(|held| held.chain.bufs());
        let carved: Vec<&Buf> = bufs().filter(|buf| !self.owned_by_pools(buf)).collect();
        let pooled: Vec<&Buf> = bufs().filter(|buf| self.owned_by_pools(buf)).collect();
        for mut bufs in [carved, pooled] {
            bufs.sort_by_key(|buf| (range(buf).start, range(buf).end));
            let mut end = 0;
            for (at, buf) in bufs.iter().enumerate() {
                let overlaps = range(buf).start < end
                    || bufs.get(at + 1).is_some_and(|next| range(next).start < range(buf).end);
                assert!(!overlaps || !buf.is_exclusive(), "{buf:?}");
                assert!(self.shared || buf.is_exclusive(), "{buf:?}");
                end = end.max(range(buf).end);
            }
        }
        // What is carved from a chunk is never more than the chunk.
        if !self.shared {
            let mut per_chunk = HashMap::<u64, usize>::new();
            for buf in bufs().filter(|buf| !self.owned_by_pools(buf)) {
                *per_chunk.entry((range(buf).start - common::BASE) / u64::from(CHUNK)).or_default() +=
                    buf.truesize();
            }
            assert!(per_chunk.values().all(|truesize| *truesize <= CHUNK as usize));
        }
    }

    fn owned_by_pools(&self, buf: &Buf) -> bool {
        let Pools { small, frame, large } = &self.pools;
        [small, frame, large].iter().any(|pool| pool.owns(buf))
    }

    /// Everything comes back, and all of it can be used again.
    fn finish(mut self) {
        self.held.clear();
        assert_eq!(self.available(), [COUNT; 3]);
        let room = (CHUNK - HEADROOM) as usize;
        let all: Vec<Buf> = std::iter::from_fn(|| self.carved.carve(room)).collect();
        assert_eq!(all.len(), CHUNKS as usize);
        assert_eq!(all.iter().map(Buf::truesize).sum::<usize>(), (CHUNK * CHUNKS) as usize);
        drop(all);
        assert_eq!(self.carved.pool().available(), CHUNKS);
        for pool in [&mut self.pools.small, &mut self.pools.frame, &mut self.pools.large] {
            let all: Vec<Buf> = std::iter::from_fn(|| pool.alloc()).collect();
            assert_eq!(all.len(), COUNT as usize);
            assert!(
                all.iter().all(|buf| buf.is_exclusive() && buf.truesize() == pool.layout().chunk as usize)
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn packets_read_as_the_model_says_and_memory_comes_back(ops in vec(op(), 0..80)) {
        let mut world = World::new();
        for op in ops {
            world.apply(op);
            world.check();
        }
        world.finish();
    }

    #[test]
    fn without_sharing_every_buffer_stays_writable(ops in vec(op(), 0..80)) {
        let mut world = World::new();
        for op in ops.into_iter().filter(|op| !matches!(op, Op::Share(_))) {
            world.apply(op);
            world.check();
        }
        world.finish();
    }

    #[test]
    fn truesizes_of_a_chunk_add_up_to_the_chunk_at_any_mix_of_lengths(
        lens in vec(1..=1500usize, 1..40),
        headroom in 0..100u32,
    ) {
        let mut carved = fragments(PoolLayout::chunks(CHUNK, 40, headroom));
        let mut per_chunk = HashMap::<u64, (u64, Vec<Buf>)>::new();
        for len in lens {
            let buf = carved.carve(len).unwrap();
            prop_assert!(buf.tailroom() >= len);
            let chunk = (range(&buf).start - common::BASE) / u64::from(CHUNK);
            let start = common::BASE + chunk * u64::from(CHUNK);
            let (end, bufs) = per_chunk.entry(chunk).or_insert_with(|| (start, Vec::new()));
            // One behind the other, no byte between.
            prop_assert_eq!(range(&buf).start, *end);
            *end = range(&buf).end;
            // The hole goes to the last buffer: what is left could hold another of this length.
            let left = (chunk + 1) * u64::from(CHUNK) + common::BASE - *end;
            prop_assert!(left == 0 || left >= len as u64);
            bufs.push(buf);
        }
        for (_, bufs) in per_chunk.values() {
            prop_assert!(bufs.iter().map(Buf::truesize).sum::<usize>() <= CHUNK as usize);
        }
    }
}
