//! The boundary matrix: limits of 1 to 64 segments; packets of one segment less, exactly as many, and one more; inside
//! pages and across; alone and shared; plain and to be segmented. An oracle that walks bytes says what must happen.

mod mapping_support;

use mapping_support::*;
use ringferry_nic::limits::TxLimits;
use ringferry_nic::map::{Mapper, SegList};
use ringferry_packet::buffer::Chain;
use ringferry_packet::vnet::GSO_TCPV4;

const HEADER: usize = 12;

/// A packet of so many segments, in buffers of 50 bytes that are one segment each, or two where they cross a page.
fn packet(bench: &mut Bench, segments: usize, crossing: bool) -> Chain {
    let mut chain = Chain::default();
    let mut fill = segments as u8;
    let mut left = segments;
    while left > 0 {
        let (at, takes) = if crossing && left > 1 { (PAGE - 20, 2) } else { (256, 1) };
        chain.push_back(bench.buf(at, 50, left.is_multiple_of(3), &mut fill));
        left -= takes;
    }
    chain
}

#[test]
fn exactly_n_segments_go_direct_and_one_more_does_not() {
    let mut bench = Bench::new(80, 1 << 16, 80);
    let mut cases = 0;
    for n in 1..=64u16 {
        for (crossing, shared, tso) in (0..8).map(|bits| (bits & 1 > 0, bits & 2 > 0, bits & 4 > 0)) {
            let mut of_kind = limits(n + 2);
            of_kind.reserved = 2;
            of_kind.max_seg_len = PAGE as u32;
            of_kind.boundary = crossing.then_some(PAGE as u64);
            of_kind.max_bytes = PAGE as u32;
            // The other kind has other limits, so that taking the wrong ones shows.
            let other = limits(if n == 1 { 64 } else { n - 1 });
            let (plain, tso_limits) = if tso { (other, of_kind) } else { (of_kind, other) };
            let tx = TxLimits { ring: 256, header_room: HEADER, plain, tso: tso_limits };
            for target in usize::from(n) - 1..=usize::from(n) + 1 {
                // A shared first buffer leaves the header one of its own, which is a segment more.
                let Some(segments) = target.checked_sub(usize::from(shared)).filter(|n| *n > 0) else {
                    continue;
                };
                let mut chain = packet(&mut bench, segments, crossing);
                if tso {
                    chain.header.gso_type = GSO_TCPV4;
                }
                let twin = shared.then(|| chain.share());
                let bytes = chain.to_vec();
                let case =
                    format!("n {n}, {target} segments, crossing {crossing}, shared {shared}, tso {tso}");
                assert_eq!(oracle(&chain, HEADER, &of_kind).0, target, "{case}");

                let direct = goes_direct(&chain, HEADER, &of_kind);
                assert_eq!(direct, target <= usize::from(n), "{case}");
                let (memory, writable) = (bench.snapshot(), bench.writable(&chain));
                let mut mapper = Mapper::new(&tx, &bench.pools).expect(&case);
                let mut segs = SegList::new();
                let mut mapped = mapper.map(chain, &mut bench.pools, |_| true, &mut segs).expect(&case);
                let counters = mapper.counters();
                assert_eq!((counters.direct == 1, counters.packets()), (direct, 1), "{case}: {counters:?}");
                assert_eq!(counters.dropped.total() + counters.retries, 0, "{case}");
                if direct {
                    assert_eq!((segs.len(), counters.copied_bytes), (target, 0), "{case}");
                }
                check_mapped(&bench, &mut mapped, &segs, HEADER, &of_kind, &bytes);
                for (at, (now, then)) in bench.snapshot().iter().zip(&memory).enumerate() {
                    assert!(now == then || writable[at], "{case}: byte {at} was not ours to write");
                }
                assert!(twin.is_none_or(|twin| twin.to_vec() == bytes), "{case}");
                bench.pools.recycle_chain(mapped);
                bench.assert_nothing_leaked();
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 64 * 8 * 3 - 16, "all but the packets of nothing");
}
