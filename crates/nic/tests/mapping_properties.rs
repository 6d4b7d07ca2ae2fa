//! Any packet, any limits, any faults: what comes out is what went in, or it is handed back as it was; nothing leaks.

mod mapping_support;

use std::num::NonZeroU32;

use mapping_support::*;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use ringferry_nic::limits::SegLimits;
use ringferry_nic::map::{MapError, Mapper, SegList, count};
use ringferry_packet::buffer::Chain;

/// A buffer of a packet, or several that continue each other.
#[derive(Clone, Debug)]
struct Piece {
    at: usize,
    len: usize,
    tail: bool,
    /// Offset at which the piece is split into adjacent buffers, if it is.
    cut: Option<usize>,
    sharing: Sharing,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Sharing {
    Alone,
    Shared,
    /// The other owner is gone.
    Was,
}

fn piece() -> impl Strategy<Value = Piece> {
    let len = prop_oneof![4 => 1..100usize, 2 => 100..1600usize, 1 => 1600..4000usize];
    let sharing = select(vec![Sharing::Alone, Sharing::Alone, Sharing::Shared, Sharing::Was]);
    (64..4100usize, len, any::<bool>(), option::weighted(0.2, 1..2000usize), sharing)
        .prop_map(|(at, len, tail, cut, sharing)| Piece { at, len, tail, cut, sharing })
}

fn build(bench: &mut Bench, pieces: &[Piece]) -> (Chain, Vec<Chain>) {
    let (mut chain, mut twins, mut fill) = (Chain::default(), Vec::new(), 1);
    for piece in pieces {
        let mut buf = bench.buf(piece.at, piece.len, piece.tail, &mut fill);
        if piece.sharing != Sharing::Alone {
            let twin = buf.share();
            if piece.sharing == Sharing::Shared {
                twins.push(twin.into());
            }
        }
        let behind = piece.cut.filter(|cut| *cut < piece.len).map(|cut| buf.split_off(cut));
        chain.push_back(buf);
        behind.into_iter().for_each(|buf| chain.push_back(buf));
    }
    (chain, twins)
}

fn any_limits() -> impl Strategy<Value = SegLimits> {
    let lens = select(vec![64u32, 100, 512, 1500, 4096, 65_536, u32::MAX]);
    let boundary = option::of(select(vec![128u64, 2048, 4096, 65_536, 1 << 32]));
    (1..=64u16, 0..3u16, lens, boundary, select(vec![0u32, 0, 14, 54, 128])).prop_map(
        |(segs, reserved, max_seg_len, boundary, min_first)| SegLimits {
            max_segs: segs + reserved,
            reserved,
            max_seg_len,
            boundary,
            min_first,
            max_bytes: 0,
        },
    )
}

/// The nearest limits that a queue can be attached with, and a packet of so many bytes sent.
fn attachable(bench: &Bench, header: usize, bytes: usize, mut limits: SegLimits) -> (SegLimits, Mapper) {
    limits.max_bytes = (header + bytes) as u32;
    loop {
        match Mapper::new(&both(header, limits), &bench.pools) {
            Ok(mapper) => return (limits, mapper),
            Err(_) if limits.max_segs < limits.reserved + 64 => limits.max_segs += 1,
            Err(_) if limits.boundary.is_some() => limits.boundary = None,
            Err(error) => {
                assert!(limits.max_seg_len < PAGE as u32, "{error}");
                limits.max_seg_len = PAGE as u32;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn every_packet_is_mapped_or_handed_back(
        pieces in vec(piece(), 1..40),
        limits in any_limits(),
        header in select(vec![0usize, 10, 12, 40]),
        large in select(vec![2048u32, 9000, 65_536]),
        fail_alloc in option::of(1..4u32),
        fail_defrag in select(vec![0u8, 128, 255]),
        free in 0..64usize,
        seed: u64,
    ) {
        let mut bench = Bench::new(64, large, 40);
        let (chain, twins) = build(&mut bench, &pieces);
        let (before, bytes, twin_bytes) = (shape(&chain), chain.to_vec(), twins.iter().map(Chain::to_vec).collect::<Vec<_>>());
        let (limits, mut mapper) = attachable(&bench, header, bytes.len(), limits);
        let direct = goes_direct(&chain, header, &limits);
        let (memory, writable) = (bench.snapshot(), bench.writable(&chain));

        for pool in [&mut bench.pools.small, &mut bench.pools.frame, &mut bench.pools.large] {
            pool.faults().fail_alloc = fail_alloc.and_then(NonZeroU32::new);
            pool.faults().fail_defrag = fail_defrag;
            pool.faults().seed = seed;
        }
        let (mut segs, mut tries, mut chain) = (SegList::new(), 0, chain);
        let mut mapped = loop {
            if tries == 4 {
                for pool in [&mut bench.pools.small, &mut bench.pools.frame, &mut bench.pools.large] {
                    *pool.faults() = Default::default();
                }
            }
            match mapper.map(chain, &mut bench.pools, |n| tries >= 4 || n <= free, &mut segs) {
                Ok(chain) => break chain,
                Err(unmapped) => {
                    tries += 1;
                    prop_assert!(unmapped.reason.is_retryable(), "dropped for its shape: {:?}", unmapped.reason);
                    prop_assert!(tries <= 4, "{:?} without a fault", unmapped.reason);
                    prop_assert_eq!(shape(&unmapped.chain), before.clone());
                    prop_assert_eq!(unmapped.chain.to_vec(), bytes.clone());
                    prop_assert_eq!(&bench.snapshot(), &memory);
                    chain = unmapped.chain;
                }
            }
        };
        let counters = mapper.counters().clone();
        prop_assert_eq!((counters.packets(), counters.retries), (1, tries));
        prop_assert_eq!(counters.direct == 1, direct);
        prop_assert_eq!(counters.segments.iter().collect::<Vec<_>>(), vec![(segs.len(), 1)]);
        prop_assert_eq!(counters.copied_bytes == 0, direct);
        prop_assert!(counters.copied_bytes <= bytes.len() as u64);
        prop_assert_eq!(count(&mapped, &limits), segs.len());
        check_mapped(&bench, &mut mapped, &segs, header, &limits, &bytes);
        let written = bench.snapshot();
        prop_assert!((0..memory.len()).all(|at| written[at] == memory[at] || writable[at]), "data was written");
        prop_assert_eq!(twins.iter().map(Chain::to_vec).collect::<Vec<_>>(), twin_bytes);

        bench.pools.recycle_chain(mapped);
        drop(twins);
        bench.assert_nothing_leaked();
    }

    #[test]
    fn the_count_is_the_oracles(pieces in vec(piece(), 1..12), limits in any_limits(), empty: bool) {
        let mut bench = Bench::new(1, 2048, 12);
        let (mut chain, _twins) = build(&mut bench, &pieces);
        if empty {
            // No chain is built with one, but a buffer can be emptied.
            chain.first_mut().unwrap().truncate(0);
            chain.recount();
        }
        prop_assert_eq!(count(&chain, &limits), oracle(&chain, 0, &limits).0);
    }

    /// The promise of attaching, for packets as long as may be, wherever the pools lie.
    #[test]
    fn what_attaches_takes_every_packet_in_any_pieces(
        limits in any_limits(),
        bytes in 1..60_000usize,
        header in select(vec![0usize, 12]),
        large in select(vec![1000u32, 2048, 5000, 9000, 70_000]),
        shorter in 0..2000usize,
        piece in 60..2000usize,
    ) {
        let mut bench = Bench::new(64, large, 1000);
        let mut limits = limits;
        limits.max_bytes = (header + bytes) as u32;
        let Ok(mut mapper) = Mapper::new(&both(header, limits), &bench.pools) else { return Ok(()) };
        let (mut chain, mut fill, mut left) = (Chain::default(), 3, bytes.saturating_sub(shorter).max(1));
        while left > 0 {
            let len = left.min(piece);
            // Shared or not makes no difference to what follows but that all of it must be copied.
            chain.push_back(bench.buf(64 + left % 3000, len, false, &mut fill));
            left -= len;
        }
        let content = chain.to_vec();
        let twin = chain.share();
        let (mut mapped, segs) = map(&mut bench, &mut mapper, chain);
        check_mapped(&bench, &mut mapped, &segs, header, &limits, &content);
        drop(twin);
        bench.pools.recycle_chain(mapped);
        bench.assert_nothing_leaked();
    }
}

#[test]
fn errors_name_what_to_do() {
    for error in [
        MapError::RingFull,
        MapError::NoBuffers,
        MapError::TooLong,
        MapError::Empty,
        MapError::TooManySegments,
    ] {
        assert!(error.to_string().contains("; "), "{error}");
    }
}
