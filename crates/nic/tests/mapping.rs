//! Transmit mapping, case by case: the published defects, the order of the ways, counters, errors, attaching.

mod mapping_support;

use std::cell::Cell;
use std::num::NonZeroU32;

use mapping_support::*;
use ringferry_nic::limits::{LimitError, SegError, SegLimits, TxLimits};
use ringferry_nic::map::{MapError, Mapper, SegList};
use ringferry_packet::buffer::{Chain, Pool};
use ringferry_packet::vnet::GSO_TCPV6;

const HEADER: usize = 12;

/// Buffers of these lengths, apart from each other, with tail room or without.
fn packet(bench: &mut Bench, lens: &[usize], tail: bool) -> Chain {
    let (mut chain, mut fill) = (Chain::default(), 5);
    for len in lens {
        chain.push_back(bench.buf(256, *len, tail, &mut fill));
    }
    chain
}

fn mapper(bench: &Bench, header: usize, limits: SegLimits) -> Mapper {
    Mapper::new(&both(header, limits), &bench.pools).unwrap()
}

/// Lengths and limits of a packet that only a full copy makes fit: any two neighbours are too long for a segment.
const STUBBORN: [usize; 12] = [1500; 12];

fn stubborn() -> SegLimits {
    SegLimits { max_seg_len: 2900, max_bytes: 18_012, ..limits(7) }
}

/// Maps a packet, checks it, and gives it back. Returns how many segments it had.
fn send(bench: &mut Bench, mapper: &mut Mapper, chain: Chain) -> usize {
    let bytes = chain.to_vec();
    let (mut chain, segs) = map(bench, mapper, chain);
    let (header, limits) = (mapper.limits().header_room, mapper.limits().plain);
    check_mapped(bench, &mut chain, &segs, header, &limits, &bytes);
    bench.pools.recycle_chain(chain);
    segs.len()
}

/// A packet that is refused now: it must come back as it was.
fn refused(bench: &mut Bench, mapper: &mut Mapper, chain: Chain, room: usize) -> (MapError, Chain) {
    let (before, bytes, memory) = (shape(&chain), chain.to_vec(), bench.snapshot());
    let unmapped = mapper.map(chain, &mut bench.pools, |n| n <= room, &mut SegList::new()).unwrap_err();
    assert_eq!(shape(&unmapped.chain), before);
    assert_eq!(unmapped.chain.to_vec(), bytes);
    assert_eq!(bench.snapshot(), memory);
    (unmapped.reason, unmapped.chain)
}

/// The index was incremented before it was compared, so a packet of exactly as many segments as the device takes
/// was refused: FreeBSD iflib before r323954.
#[test]
fn iflib_off_by_one_exactly_n_segments_pass() {
    let mut bench = Bench::new(16, 1 << 16, 40);
    for n in [1usize, 2, 8, 32] {
        let mut mapper = mapper(&bench, 0, limits(n as u16));
        let chain = packet(&mut bench, &vec![100; n], true);
        assert_eq!(send(&mut bench, &mut mapper, chain), n);
        assert_eq!((mapper.counters().direct, mapper.counters().copied_bytes), (1, 0));
        let chain = packet(&mut bench, &vec![100; n + 1], true);
        assert_eq!(send(&mut bench, &mut mapper, chain), n);
        assert_eq!((mapper.counters().collapsed, mapper.counters().packets()), (1, 2));
    }
    bench.assert_nothing_leaked();
}

/// A packet that could not be collapsed was dropped, and the full copy that would have helped never tried: FreeBSD
/// iflib, 388 Mbit/s where 3119 were possible.
#[test]
fn iflib_failed_collapse_is_rescued_by_a_full_copy() {
    let mut bench = Bench::new(16, 9000, 40);
    let mut mapper = mapper(&bench, HEADER, SegLimits { max_seg_len: 1000, max_bytes: 9000, ..limits(9) });
    // Two neighbours are too long for one segment wherever they are merged.
    let chain = packet(&mut bench, &[600; 14], false);
    assert_eq!(send(&mut bench, &mut mapper, chain), 9);
    let counters = mapper.counters();
    assert_eq!((counters.defragged, counters.collapse_failed, counters.defrag_failed), (1, 1, 0));
    assert_eq!((counters.packets(), counters.copied_bytes), (1, 14 * 600));
    bench.assert_nothing_leaked();
}

#[test]
fn a_collapse_without_buffers_is_rescued_by_a_full_copy() {
    let mut bench = Bench::new(4, 2048, 40);
    let mut mapper = mapper(&bench, HEADER, SegLimits { max_bytes: 4000, ..limits(4) });
    // Two groups, for which two large buffers would be needed, if the first allocation of each kind failed.
    for pool in [&mut bench.pools.small, &mut bench.pools.frame] {
        pool.faults().fail_alloc = NonZeroU32::new(1);
    }
    bench.pools.large.faults().fail_alloc = NonZeroU32::new(3);
    drop(bench.pools.large.alloc());
    drop(bench.pools.large.alloc());
    let chain = packet(&mut bench, &[100; 6], false);
    assert_eq!(send(&mut bench, &mut mapper, chain), 1);
    assert_eq!((mapper.counters().collapse_failed, mapper.counters().defragged), (1, 1));
    bench.assert_nothing_leaked();
}

/// A stream of small sends: only what must be is copied. Saving a segment costs one piece, and one more for the new
/// buffer; nothing more where tail room takes it.
#[test]
fn small_sends_are_merged_at_the_least_cost() {
    let mut bench = Bench::new(16, 1 << 16, 130);
    for (tail, pieces) in [(false, 65), (true, 64)] {
        let mut mapper = mapper(&bench, 0, SegLimits { max_bytes: 1 << 16, ..limits(64) });
        let chain = packet(&mut bench, &[512; 128], tail);
        assert_eq!(send(&mut bench, &mut mapper, chain), 64);
        assert_eq!((mapper.counters().collapsed, mapper.counters().copied_bytes), (1, pieces * 512));
        bench.assert_nothing_leaked();
    }
}

/// If less than half of a packet could stay where it is, all of it is copied, and the device gets a few long segments
/// instead of the largest number of short ones.
#[test]
fn what_would_be_copied_for_the_most_part_is_copied_all_at_once() {
    let mut bench = Bench::new(16, 1 << 16, 130);
    for tail in [false, true] {
        let mut mapper = mapper(&bench, 0, SegLimits { max_bytes: 1 << 16, ..limits(63) });
        let chain = packet(&mut bench, &[512; 128], tail);
        assert_eq!(send(&mut bench, &mut mapper, chain), 1);
        let counters = mapper.counters();
        assert_eq!((counters.defragged, counters.collapse_failed, counters.packets()), (1, 1, 1));
        assert_eq!(counters.copied_bytes, 128 * 512);
        // Not if most of it is in a few long pieces.
        let lens = [&[512; 64][..], &[4000; 8]].concat();
        let chain = packet(&mut bench, &lens, tail);
        assert_eq!(send(&mut bench, &mut mapper, chain), 63);
        assert!(mapper.counters().copied_bytes - 128 * 512 <= 10 * 512);
        bench.assert_nothing_leaked();
    }
}

#[test]
fn large_pieces_stay_where_they_are() {
    let mut bench = Bench::new(16, 1 << 16, 40);
    let mut mapper = mapper(&bench, HEADER, limits(6));
    let chain = packet(&mut bench, &[4000, 10, 20, 4000, 30, 40, 50, 4000, 14], false);
    assert_eq!(send(&mut bench, &mut mapper, chain), 6);
    assert_eq!((mapper.counters().collapsed, mapper.counters().copied_bytes), (1, 10 + 20 + 30 + 40 + 50));
    bench.assert_nothing_leaked();
}

#[test]
fn tail_room_is_used_before_new_buffers_are_and_only_if_ours() {
    let mut bench = Bench::new(16, 1 << 16, 40);
    let mut mapper = mapper(&bench, 0, limits(2));
    let chain = packet(&mut bench, &[1000, 100, 200], true);
    let first = shape(&chain)[0].0;
    let (chain, segs) = map(&mut bench, &mut mapper, chain);
    assert_eq!((segs[0].addr, mapper.counters().copied_bytes), (first, 100), "behind the data of the first");
    bench.pools.recycle_chain(chain);

    let mut chain = packet(&mut bench, &[1000, 100, 200], true);
    let twin = chain.share();
    let (chain, segs) = map(&mut bench, &mut mapper, chain);
    assert_eq!((segs[0].addr, mapper.counters().copied_bytes), (shape(&twin)[0].0, 100 + 300));
    drop((chain, twin));
    bench.assert_nothing_leaked();
}

#[test]
fn a_shared_first_buffer_leaves_the_header_a_buffer_and_a_segment_of_its_own() {
    let mut bench = Bench::new(16, 1 << 16, 40);
    let mut mapper = mapper(&bench, HEADER, limits(3));
    for (pieces, direct) in [(1, 1), (2, 2), (3, 2)] {
        let mut chain = packet(&mut bench, &vec![80; pieces], false);
        let twin = chain.share();
        assert_eq!(send(&mut bench, &mut mapper, chain), (pieces + 1).min(3));
        assert_eq!(mapper.counters().direct, direct, "{pieces} pieces");
        drop(twin);
    }
    // The third was merged into the header's own buffer.
    assert_eq!((mapper.counters().collapsed, mapper.counters().copied_bytes), (1, 80));
    bench.assert_nothing_leaked();
}

#[test]
fn too_little_head_room_leaves_the_header_a_buffer_of_its_own() {
    let mut bench = Bench::new(16, 1 << 16, 40);
    let mut mapper = mapper(&bench, HEADER, limits(2));
    let (mut chain, mut fill) = (Chain::default(), 1);
    let mut buf = bench.buf(256, 100, true, &mut fill);
    chain.push_back(buf.split_off(40));
    assert_eq!(send(&mut bench, &mut mapper, chain), 2);
    assert_eq!(mapper.counters().direct, 1);
    drop(buf);
    bench.assert_nothing_leaked();
}

#[test]
fn the_first_segment_holds_min_first_bytes() {
    let mut bench = Bench::new(16, 1 << 16, 40);
    let mut mapper = mapper(&bench, HEADER, SegLimits { min_first: 66, ..limits(8) });
    let cases = [
        (&[54, 1000][..], 1, 0, 0),
        (&[53, 1000], 1, 1, 0),
        (&[20], 2, 1, 0),
        (&[14, 20, 20, 3000], 2, 2, 0),
    ];
    for (lens, direct, collapsed, defragged) in cases {
        let chain = packet(&mut bench, lens, false);
        send(&mut bench, &mut mapper, chain);
        let counters = mapper.counters();
        assert_eq!(
            (counters.direct, counters.collapsed, counters.defragged),
            (direct, collapsed, defragged),
            "{lens:?}"
        );
    }
    assert_eq!(mapper.counters().copied_bytes, 53 + 1000 + 14 + 20 + 20);
    bench.assert_nothing_leaked();
}

#[test]
fn a_header_that_crosses_a_boundary_is_copied_to_where_it_does_not() {
    let mut bench = Bench::new(16, 1 << 16, 40);
    let limits = SegLimits { boundary: Some(PAGE as u64), min_first: 64, ..limits(20) };
    let mut mapper = mapper(&bench, HEADER, limits);
    let mut fill = 1;
    let chain = Chain::from(bench.buf(PAGE - 30, 3000, false, &mut fill));
    assert_eq!(oracle(&chain, HEADER, &limits), (2, 42));
    assert_eq!(send(&mut bench, &mut mapper, chain), 1);
    assert_eq!(mapper.counters().defragged, 1);
    bench.assert_nothing_leaked();
}

/// `m_defrag` to buffers of 2 KiB made such packets longer.
#[test]
fn a_full_copy_of_64_kib_to_buffers_of_4_kib_has_17_segments() {
    let mut bench = Bench::new(20, PAGE as u32, 1100);
    let max_bytes = (HEADER + 65_536) as u32;
    let room = bench.pools.large.layout().room() as usize;
    let needed = (HEADER + 65_536_usize).div_ceil(room);
    let tx = |n: usize| both(HEADER, SegLimits { max_bytes, ..limits(n as u16) });
    let error = Mapper::new(&tx(needed - 1), &bench.pools).unwrap_err();
    let expect =
        SegError::FullCopy { bytes: max_bytes as usize, segments: needed, room, allowed: needed - 1 };
    assert_eq!(error, LimitError::Plain(expect));
    let mut mapper = Mapper::new(&tx(needed), &bench.pools).unwrap();
    // No two neighbours fit a new buffer.
    let lens: Vec<usize> = (0..25).map(|i| if i < 24 { 2622 } else { 65_536 - 24 * 2622 }).collect();
    let mut chain = packet(&mut bench, &lens, false);
    let twin = chain.share();
    assert_eq!(send(&mut bench, &mut mapper, chain), needed);
    assert_eq!(mapper.counters().defragged, 1);
    drop(twin);
    bench.assert_nothing_leaked();
}

#[test]
fn one_segment_is_enough() {
    let mut bench = Bench::new(4, 1 << 16, 100);
    let mut mapper = mapper(&bench, HEADER, limits(1));
    for pieces in [1usize, 2, 3, 100] {
        let mut chain = packet(&mut bench, &vec![300; pieces], false);
        let twin = (pieces != 2).then(|| chain.share());
        assert_eq!(send(&mut bench, &mut mapper, chain), 1, "{pieces}");
        drop(twin);
    }
    assert_eq!(mapper.counters().mapped(), 4);
    bench.assert_nothing_leaked();
}

#[test]
fn plain_packets_and_packets_to_be_segmented_have_limits_of_their_own() {
    let mut bench = Bench::new(16, 1 << 16, 40);
    let tx =
        TxLimits { ring: 256, header_room: 0, plain: limits(3), tso: SegLimits { reserved: 1, ..limits(5) } };
    let mut mapper = Mapper::new(&tx, &bench.pools).unwrap();
    for (gso_type, segments) in [(0, 3), (GSO_TCPV6, 4)] {
        let mut chain = packet(&mut bench, &[70; 6], false);
        chain.header.gso_type = gso_type;
        chain.hash = Some(7);
        let (chain, segs) = map(&mut bench, &mut mapper, chain);
        assert_eq!((segs.len(), chain.header.gso_type, chain.hash), (segments, gso_type, Some(7)));
        bench.pools.recycle_chain(chain);
    }
}

/// An allocation may fail at any step; each time the packet comes back as it was, and can be tried again.
#[test]
fn out_of_memory_at_any_allocation_is_retryable_and_changes_nothing() {
    // The header alone; merging; a full copy.
    let cases = [(&[100usize; 3][..], limits(64)), (&[100; 30], limits(20)), (&STUBBORN, stubborn())];
    for (lens, limits) in cases {
        let mut bench = Bench::new(8, 4000, 40);
        let mut mapper = mapper(&bench, HEADER, SegLimits { max_bytes: 18_012, ..limits });
        let mut chain = packet(&mut bench, lens, false);
        let twin = chain.share();
        let pools = &mut bench.pools;
        // Buffers that others have: the first tries find none, the later ones some.
        let mut taken: Vec<_> = [&mut pools.small, &mut pools.frame, &mut pools.large]
            .into_iter()
            .flat_map(|pool| std::iter::from_fn(|| pool.alloc()).collect::<Vec<_>>())
            .collect();
        let mut tries = 0;
        loop {
            let mut segs = SegList::new();
            let free = [&bench.pools.small, &bench.pools.frame, &bench.pools.large].map(Pool::available);
            match mapper.map(chain, &mut bench.pools, |_| true, &mut segs) {
                Ok(mut mapped) => {
                    let limits = mapper.limits().plain;
                    check_mapped(&bench, &mut mapped, &segs, HEADER, &limits, &twin.to_vec());
                    bench.pools.recycle_chain(mapped);
                    break;
                }
                Err(unmapped) => {
                    assert_eq!(unmapped.reason, MapError::NoBuffers);
                    assert!(unmapped.reason.is_retryable());
                    assert_eq!(shape(&unmapped.chain), shape(&twin));
                    let now =
                        [&bench.pools.small, &bench.pools.frame, &bench.pools.large].map(Pool::available);
                    assert_eq!(now, free, "what was allocated in vain is back");
                    chain = unmapped.chain;
                    tries += 1;
                    bench.pools.recycle(taken.pop().unwrap());
                }
            }
        }
        assert_eq!((mapper.counters().retries, mapper.counters().packets()), (tries, 1));
        assert!(tries > 0);
        drop((taken, twin));
        bench.assert_nothing_leaked();
    }
}

#[test]
fn a_full_copy_that_fails_at_random_is_counted_and_retryable() {
    let mut bench = Bench::new(8, 4000, 40);
    let mut mapper = mapper(&bench, HEADER, stubborn());
    bench.pools.large.faults().fail_defrag = 128;
    let (mut retries, packets) = (0, 40);
    for _ in 0..packets {
        let mut chain = packet(&mut bench, &STUBBORN, false);
        let chain = loop {
            match mapper.map(chain, &mut bench.pools, |_| true, &mut SegList::new()) {
                Ok(chain) => break chain,
                Err(unmapped) => {
                    assert_eq!(unmapped.reason, MapError::NoBuffers);
                    chain = unmapped.chain;
                    retries += 1;
                }
            }
        };
        bench.pools.recycle_chain(chain);
    }
    let counters = mapper.counters();
    assert!(retries > 0);
    assert_eq!((counters.retries, counters.defrag_failed, counters.defragged), (retries, retries, packets));
    assert_eq!((counters.packets(), counters.collapse_failed), (packets, packets + retries));
    bench.assert_nothing_leaked();
}

#[test]
fn a_full_ring_is_found_out_before_anything_is_done() {
    let mut bench = Bench::new(8, 4000, 40);
    for lens in [&[100][..], &[100; 7], &[100; 8], &STUBBORN] {
        let mut mapper = mapper(&bench, HEADER, stubborn());
        let needs = Cell::new(0);
        let probe = |n| {
            needs.set(n);
            false
        };
        let chain = packet(&mut bench, lens, false);
        let chain = mapper.map(chain, &mut bench.pools, probe, &mut SegList::new()).unwrap_err().chain;
        let (reason, chain) = refused(&mut bench, &mut mapper, chain, needs.get() - 1);
        assert_eq!((reason, mapper.counters().packets()), (MapError::RingFull, 0));
        let mut segs = SegList::new();
        let chain = mapper.map(chain, &mut bench.pools, |n| n <= needs.get(), &mut segs).unwrap();
        assert!(segs.len() <= needs.get());
        assert_eq!((mapper.counters().retries, mapper.counters().packets()), (2, 1));
        mapper.dropped(reason);
        assert_eq!((mapper.counters().dropped.ring_full, mapper.counters().packets()), (1, 2));
        bench.pools.recycle_chain(chain);
    }
    bench.assert_nothing_leaked();
}

#[test]
fn packets_that_can_never_go_are_handed_back_and_counted_once() {
    let mut bench = Bench::new(8, 1 << 16, 40);
    let mut mapper = mapper(&bench, HEADER, SegLimits { max_bytes: 1000, ..limits(6) });
    let chain = packet(&mut bench, &[988], false);
    send(&mut bench, &mut mapper, chain);
    for lens in [&[989][..], &[900, 89]] {
        let chain = packet(&mut bench, lens, false);
        let (reason, _) = refused(&mut bench, &mut mapper, chain, 64);
        assert_eq!((reason, reason.is_retryable()), (MapError::TooLong, false));
        mapper.dropped(reason);
    }
    let (reason, _) = refused(&mut bench, &mut mapper, Chain::default(), 64);
    assert_eq!((reason, reason.is_retryable()), (MapError::Empty, false));
    let counters = mapper.counters();
    assert_eq!((counters.direct, counters.dropped.too_long, counters.dropped.empty), (1, 2, 1));
    assert_eq!((counters.packets(), counters.retries), (4, 0));
    bench.assert_nothing_leaked();
}

#[test]
fn pools_that_the_limits_were_not_checked_with_cost_the_packet_and_no_more() {
    let checked = Bench::new(8, 1 << 16, 1);
    let mut mapper = mapper(&checked, HEADER, limits(2));
    let mut bench = Bench::new(8, 1000, 40);
    let chain = packet(&mut bench, &[1500; 6], false);
    let (reason, _) = refused(&mut bench, &mut mapper, chain, 64);
    assert_eq!((reason, reason.is_retryable()), (MapError::TooManySegments, false));
    assert_eq!((mapper.counters().dropped.too_many_segments, mapper.counters().packets()), (1, 1));
    bench.assert_nothing_leaked();
}

#[test]
fn attaching_fails_loudly_where_a_packet_could_get_stuck() {
    let bench = Bench::new(4, 2048, 1);
    let room = bench.pools.large.layout().room() as usize;
    let good = SegLimits { max_bytes: 4000, ..limits(4) };
    assert_eq!(both(HEADER, good).check(&bench.pools), Ok(()));
    let bad = [
        (SegLimits { reserved: 4, ..good }, SegError::NoSegments { max_segs: 4, reserved: 4 }),
        (SegLimits { max_segs: 129, ..good }, SegError::TooManySegments { allowed: 129 }),
        (SegLimits { max_seg_len: 0, ..good }, SegError::SegmentLength),
        (SegLimits { boundary: Some(0), ..good }, SegError::Boundary(0)),
        (SegLimits { boundary: Some(4097), ..good }, SegError::Boundary(4097)),
        (SegLimits { max_bytes: 12, ..good }, SegError::NoData { max_bytes: 12, header_room: HEADER }),
        (SegLimits { min_first: 3000, ..good }, SegError::First { min_first: 3000, room }),
        (
            SegLimits { max_bytes: 40_000, max_segs: 128, ..good },
            SegError::FewBuffers { bytes: 40_000, buffers: 40_000_usize.div_ceil(room), count: 4 },
        ),
        (
            SegLimits { max_seg_len: 512, ..good },
            SegError::FullCopy { bytes: 4000, segments: 8, room, allowed: 4 },
        ),
    ];
    for (limits, error) in bad {
        assert_eq!(limits.check(HEADER, &bench.pools), Err(error));
        assert!(error.to_string().contains("; "), "says what to do: {error}");
        let tx = TxLimits { tso: limits, ..both(HEADER, good) };
        assert_eq!(Mapper::new(&tx, &bench.pools).unwrap_err(), LimitError::Tso(error));
        let tx = TxLimits { plain: limits, ..both(HEADER, good) };
        assert_eq!(Mapper::new(&tx, &bench.pools).unwrap_err(), LimitError::Plain(error));
    }
    let tx = TxLimits { ring: 3, ..both(HEADER, good) };
    assert_eq!(tx.check(&bench.pools), Err(LimitError::Ring { max_segs: 4, ring: 3 }));
}

/// Wherever a new buffer lies: also where as few segments would do with a boundary inside the header.
#[test]
fn the_header_is_one_piece_in_every_large_buffer() {
    let mut bench = Bench::new(70, 9000, 1);
    let limits = SegLimits { boundary: Some(PAGE as u64), max_bytes: PAGE as u32 + 5, ..limits(2) };
    let header = 100;
    let mut mapper = mapper(&bench, header, limits);
    let mut kept = Vec::new();
    for _ in 0..70 {
        // As it lies, the boundary is 80 bytes behind the start of its header.
        let chain = Chain::from(bench.buf(PAGE + 20, 4001, false, &mut 1));
        let bytes = chain.to_vec();
        let (mut chain, segs) = map(&mut bench, &mut mapper, chain);
        check_mapped(&bench, &mut chain, &segs, header, &limits, &bytes);
        kept.push(chain);
    }
    assert_eq!(mapper.counters().defragged, 70);
    drop(kept);
    bench.assert_nothing_leaked();
}
