//! Receive queues with a device that keeps the rules: every packet arrives as it was sent, in every mode and
//! under every policy, and no memory is used twice or lost.

mod rx_common;

use proptest::prelude::*;
use ringferry_nic::limits::RxMode;
use ringferry_nic::rx::policy::Average;
use ringferry_nic::rx::queue::{FEWEST, POSTED};
use ringferry_nic::rx::{AttachError, PolicyKind, RxConfig, RxQueue};
use ringferry_packet::buffer::{Chain, Fragments, PoolLayout};
use rx_common::{Fake, HEADER, MAX_FRAME, Setup, check_disjoint, check_nothing_leaked, frame, receive};

/// Mergeable; one buffer of several segments; one buffer of one.
fn modes() -> [Setup; 3] {
    let mergeable = Setup::mergeable(64, 256);
    let mut big = mergeable;
    big.limits.mode = RxMode::Whole;
    big.limits.max_segs = 19;
    let mut small = big;
    small.limits.max_frame = 1518;
    [mergeable, big, small]
}

fn with_policy(mut setup: Setup, policy: PolicyKind) -> Setup {
    setup.config = RxConfig { policy, ..setup.config };
    setup
}

#[test]
fn frames_of_every_length_arrive_in_every_mode_and_under_every_policy() {
    let lengths =
        [14, 15, 60, 64, 127, 128, 129, 1514, 1518, 1524, 1525, 4083, 4084, 4085, 8192, 32832, 32833, 40000];
    let lengths = lengths.into_iter().chain([65160, 65536, MAX_FRAME - 1, MAX_FRAME]);
    for setup in modes() {
        for policy in PolicyKind::ALL {
            let (mut queue, mut pools) = with_policy(setup, policy).attach();
            // More often than the policy takes to change its mind.
            for round in 0..8 {
                for len in lengths.clone().filter(|&len| len <= setup.limits.max_frame) {
                    queue.refill();
                    let sent = frame(len, round);
                    assert!(queue.driver().deliver(&sent), "{len} bytes do not fit: {:?}", queue.stats());
                    let mut got = receive(&mut queue, &mut pools);
                    assert_eq!(got.len(), 1, "{len}: {:?}", queue.stats());
                    assert_eq!(got[0].to_vec(), sent);
                    check_disjoint(&mut queue, &got);
                    queue.recycle_chain(got.remove(0), &mut pools);
                }
            }
            assert_eq!(queue.stats().rx_length_errors, 0);
            check_nothing_leaked(queue, &pools);
        }
    }
}

#[test]
fn the_header_comes_with_the_packet_and_not_in_it() {
    let (mut queue, mut pools) = Setup::mergeable(16, 64).attach();
    queue.refill();
    for len in [64, 1000, 20000] {
        queue.driver().deliver_with(&frame(len, 1), true, |header, _| {
            header.flags = 1;
            header.csum_start = 34;
            header.csum_offset = 16;
        });
    }
    let got = receive(&mut queue, &mut pools);
    assert_eq!(got.iter().map(Chain::len).collect::<Vec<_>>(), [64, 1000, 20000]);
    assert!(got.iter().all(|chain| chain.header.csum_start == 34 && chain.header.csum_offset == 16));
}

#[test]
fn frames_begin_cache_lines_wherever_their_buffers_lie() {
    for policy in PolicyKind::ALL {
        let (mut queue, mut pools) = with_policy(Setup::mergeable(64, 256), policy).attach();
        for round in 0..600u64 {
            queue.refill();
            for segment in queue.driver().segments() {
                assert_eq!((segment.addr + HEADER as u64) % 64, 0, "{segment:?}");
            }
            queue.driver().deliver(&frame(200 + (round as usize * 977) % 60000, round));
            queue.lend(usize::MAX, &mut pools, |chain, _| Some(chain));
        }
    }
}

#[test]
fn a_steady_input_becomes_the_average_to_the_byte() {
    for len in (14..=MAX_FRAME).step_by(7).chain([MAX_FRAME]) {
        let mut average = Average::default();
        (0..2000).for_each(|_| average.add(len));
        assert_eq!(average.get(), len, "from below");
        (0..2000).for_each(|_| average.add(MAX_FRAME));
        (0..2000).for_each(|_| average.add(len));
        assert_eq!(average.get(), len, "from above");
    }
    let mut average = Average::default();
    average.add(6400);
    assert_eq!(average.get(), 100, "one sample weighs 1/64");
}

#[test]
fn the_average_is_clamped_and_rounded_to_a_cache_line_and_is_the_length_that_is_posted() {
    for (len, expect) in
        [(60, 1536), (1514, 1536), (1525, 1600), (3000, 3072), (4084, 4096), (4085, 4096), (60000, 4096)]
    {
        let (mut queue, mut pools) = with_policy(Setup::mergeable(64, 256), PolicyKind::Ewma).attach();
        assert_eq!(queue.next_buffer_len(), 1536, "before the first packet");
        for _ in 0..2000 {
            queue.refill();
            assert!(queue.driver().deliver_with(&vec![0; len], false, |_, _| {}));
            receive(&mut queue, &mut pools);
        }
        assert_eq!(queue.next_buffer_len(), expect, "{len}");
        // All of the ring is posted anew, the last of each chunk with the hole.
        let lens: Vec<usize> = queue.driver().segments().map(|segment| segment.len as usize).collect();
        assert!(lens.iter().all(|&l| (expect..2 * expect).contains(&l)), "{lens:?}");
        let per_chunk = Fragments::layout(1, HEADER as u32).room() as usize / expect;
        let exact = lens.iter().filter(|&&l| l == expect).count();
        assert!(exact >= lens.len() / per_chunk * (per_chunk - 1) - per_chunk, "{exact} of {}", lens.len());
    }
}

#[test]
fn samples_are_of_delivered_packets_only() {
    let (mut queue, mut pools) = with_policy(Setup::mergeable(64, 256), PolicyKind::Ewma).attach();
    for _ in 0..1000 {
        queue.refill();
        queue.driver().deliver_with(&frame(60000, 1), false, |header, _| header.num_buffers = 0);
        receive(&mut queue, &mut pools);
    }
    assert_eq!((queue.stats().packets, queue.next_buffer_len()), (0, 1536));
}

#[test]
fn truesizes_of_the_buffers_of_a_chunk_add_up_to_the_chunk() {
    for len in [1514, 3000, 4000] {
        let (mut queue, mut pools) = with_policy(Setup::mergeable(64, 256), PolicyKind::FixedPage).attach();
        queue.refill();
        (0..8).for_each(|_| assert!(queue.driver().deliver(&frame(len, 0))));
        let got = receive(&mut queue, &mut pools);
        let truesize: usize = got.iter().map(Chain::truesize).sum();
        assert_eq!(truesize, Fragments::layout(1, HEADER as u32).chunk as usize);
        assert_eq!(queue.stats().truesize_bytes, truesize as u64);
    }
}

#[test]
fn adjoining_buffers_are_one_segment() {
    let (mut queue, mut pools) = with_policy(Setup::mergeable(64, 256), PolicyKind::FixedPage).attach();
    for round in 0..20 {
        queue.refill();
        queue.driver().deliver(&frame(64000, round));
        let got = receive(&mut queue, &mut pools);
        // Two chunks of eight pages, the first of which may have begun with an earlier packet.
        assert!(got[0].bufs().len() <= 3, "round {round}: {} segments", got[0].bufs().len());
        got.into_iter().for_each(|chain| queue.recycle_chain(chain, &mut pools));
    }
    assert!(queue.stats().coalesced >= 20 * 13);
}

#[test]
fn a_chain_without_a_joint_is_linked_and_not_cut_short() {
    let (mut queue, mut pools) = with_policy(Setup::mergeable(128, 256), PolicyKind::FixedMtu).attach();
    queue.refill();
    // Every other buffer is posted again somewhere else.
    for at in 0..128 {
        queue.driver().deliver(&frame(1000, at));
    }
    let (keep, back): (Vec<_>, Vec<_>) =
        receive(&mut queue, &mut pools).into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
    back.into_iter().for_each(|(_, chain)| queue.recycle_chain(chain, &mut pools));
    queue.refill();
    let sent = frame(64000, 9);
    assert!(queue.driver().deliver(&sent));
    let got = receive(&mut queue, &mut pools);
    assert!(got[0].bufs().len() > 17, "{} segments", got[0].bufs().len());
    assert_eq!(got[0].to_vec(), sent);
    drop(keep);
}

#[test]
fn small_packets_are_copied_and_their_buffer_is_posted_again() {
    let (mut queue, mut pools) = Setup::mergeable(16, 64).attach();
    queue.refill();
    let before: Vec<u64> = queue.driver().segments().map(|segment| segment.addr).collect();
    let carved = queue.stats().carved;
    let mut got = Vec::new();
    for round in 0..100 {
        queue.driver().deliver(&frame(128, round));
        got.extend(receive(&mut queue, &mut pools));
        queue.refill();
    }
    let mut after: Vec<u64> = queue.driver().segments().map(|segment| segment.addr).collect();
    after.sort_unstable();
    assert!(before.iter().all(|addr| after.binary_search(addr).is_ok()), "other buffers");
    assert_eq!((queue.stats().copied, queue.stats().carved), (100, carved));
    assert!((0..100).all(|round| got[round].to_vec() == frame(128, round as u64)));
    queue.driver().deliver(&frame(129, 0));
    receive(&mut queue, &mut pools);
    assert_eq!(queue.stats().copied, 100);
}

#[test]
fn without_small_buffers_small_packets_stay_where_they_are() {
    let (mut queue, mut pools) = Setup::mergeable(16, 64).attach();
    let all: Vec<_> = std::iter::from_fn(|| pools.small.alloc()).collect();
    queue.refill();
    queue.driver().deliver(&frame(64, 3));
    let got = receive(&mut queue, &mut pools);
    assert_eq!(got[0].to_vec(), frame(64, 3));
    assert_eq!(queue.stats().copied, 0);
    assert!(all.len() == 1024 && got[0].truesize() >= 1536);
}

#[test]
fn buffers_that_come_back_are_posted_again_and_none_is_carved() {
    for policy in PolicyKind::ALL {
        let (mut queue, mut pools) = with_policy(Setup::mergeable(32, 128), policy).attach();
        queue.refill();
        let carved = queue.stats().carved;
        for round in 0..1000 {
            queue.driver().deliver(&frame(1000, round));
            queue.lend(usize::MAX, &mut pools, |chain, _| Some(chain));
            queue.refill();
        }
        assert_eq!((queue.stats().carved, queue.stats().recycled), (carved, 1000), "{policy:?}");
    }
}

#[test]
fn a_shared_buffer_is_not_posted_while_somebody_has_it() {
    let (mut queue, mut pools) = Setup::mergeable(16, 64).attach();
    queue.refill();
    queue.driver().deliver(&frame(1000, 5));
    let mut chain = receive(&mut queue, &mut pools).remove(0);
    let other = chain.share();
    queue.recycle_chain(chain, &mut pools);
    assert_eq!(queue.stats().recycled, 0);
    for round in 0..500 {
        queue.refill();
        queue.driver().deliver(&frame(1400, round));
        queue.lend(usize::MAX, &mut pools, |chain, _| Some(chain));
    }
    assert_eq!(other.to_vec(), frame(1000, 5));
}

#[test]
fn a_ring_so_small_that_frames_would_not_fit_has_longer_buffers() {
    for ring in [3, 4, 8, 16, 32, 43, 44] {
        for policy in PolicyKind::ALL {
            let (mut queue, mut pools) = with_policy(Setup::mergeable(ring, 256), policy).attach();
            for round in 0..100 {
                queue.refill();
                let sent = frame(MAX_FRAME, round);
                assert!(queue.driver().deliver(&sent), "ring {ring}, {policy:?}");
                let got = receive(&mut queue, &mut pools);
                assert_eq!(got[0].to_vec(), sent);
            }
            check_nothing_leaked(queue, &pools);
        }
    }
}

#[test]
fn of_a_buffer_of_several_segments_only_what_is_used_leaves() {
    for policy in PolicyKind::ALL {
        let [_, big, _] = modes();
        let (mut queue, mut pools) = with_policy(big, policy).attach();
        queue.refill();
        let (carved, longest) =
            (queue.stats().carved, queue.driver().segments().map(|s| s.len).max().unwrap());
        queue.driver().deliver(&frame(1000, 1));
        let got = receive(&mut queue, &mut pools);
        assert!(got[0].truesize() <= longest as usize + 64, "{}", got[0].truesize());
        queue.refill();
        assert!(queue.stats().carved <= carved + 1, "the rest is posted again");
        check_disjoint(&mut queue, &got);
    }
}

#[test]
fn top_up_waits_for_a_burst_and_refill_does_not() {
    let (mut queue, mut pools) = with_policy(Setup::mergeable(256, 512), PolicyKind::FixedMtu).attach();
    assert!(queue.top_up());
    assert_eq!(queue.posted(), 256);
    (0..31).for_each(|round| assert!(queue.driver().deliver(&frame(500, round))));
    receive(&mut queue, &mut pools);
    assert!(!queue.top_up());
    assert_eq!(queue.posted(), 225);
    assert!(queue.refill());
    assert_eq!(queue.posted(), 256);
}

#[test]
fn a_large_ring_of_long_buffers_is_not_filled_further_than_the_budget_of_bytes() {
    let ring = 1024;
    let (mut queue, mut pools) = Setup::mergeable(ring, 2048).attach();
    let bytes = |queue: &mut RxQueue<Fake>| queue.driver().segments().map(|s| s.len as usize).sum::<usize>();
    queue.refill();
    assert_eq!(queue.posted(), ring.into(), "short buffers fill the ring");
    // Until every buffer is of the length that suits these.
    for round in 0..2000 {
        assert!(queue.driver().deliver_with(&frame(65_000, round), false, |_, _| {}), "{round}");
        receive(&mut queue, &mut pools).into_iter().for_each(|chain| queue.recycle_chain(chain, &mut pools));
        queue.top_up();
    }
    queue.refill();
    let longest = queue.next_buffer_len();
    assert!(longest > 16384 && queue.posted() >= FEWEST, "{longest}: {}", queue.posted());
    assert!(bytes(&mut queue) <= POSTED + POSTED / 100, "{}", bytes(&mut queue));
    // A burst of short packets finds a buffer each, and soon the ring is full again.
    for round in 0..FEWEST as u64 {
        assert!(queue.driver().deliver(&frame(500, round)), "{round}");
    }
    for round in 0..4000 {
        receive(&mut queue, &mut pools).into_iter().for_each(|chain| queue.recycle_chain(chain, &mut pools));
        queue.top_up();
        assert!(queue.driver().deliver(&frame(500, round)), "{round}");
    }
    receive(&mut queue, &mut pools);
    queue.refill();
    assert_eq!(queue.posted(), ring.into());
    assert!(bytes(&mut queue) <= POSTED);
    check_nothing_leaked(queue, &pools);
}

#[test]
fn a_budget_is_kept() {
    let (mut queue, mut pools) = Setup::mergeable(256, 512).attach();
    queue.refill();
    (0..100).for_each(|round| assert!(queue.driver().deliver(&frame(500, round))));
    let mut seen = 0;
    for (budget, expect) in [(0, 0), (1, 1), (40, 40), (usize::MAX, 59), (5, 0)] {
        let n = queue.receive(budget, &mut pools, |chain, _| {
            assert_eq!(chain.to_vec(), frame(500, seen));
            seen += 1;
        });
        assert_eq!(n, expect);
    }
}

#[test]
fn limits_that_cannot_work_are_refused_when_the_queue_is_attached() {
    let attach = |setup: &Setup| {
        let (fake, fragments, _) = setup.parts();
        RxQueue::attach(fake, fragments, setup.config).map(|_| ())
    };
    let good = Setup::mergeable(16, 64);
    assert_eq!(attach(&good), Ok(()));
    let mut empty = good;
    empty.limits.ring = 0;
    assert_eq!(attach(&empty), Err(AttachError::EmptyRing));
    // Two buffers of a chunk would do, one does not.
    let mut short = good;
    short.limits.ring = 1;
    assert!(matches!(attach(&short), Err(AttachError::Chunk { .. })));
    let mut segments = good;
    segments.limits.mode = RxMode::Whole;
    assert!(matches!(attach(&segments), Err(AttachError::Chunk { .. })));
    segments.limits.max_segs = 2;
    assert_eq!(attach(&segments), Ok(()));
    let mut pool = good;
    pool.chunks.count = 1;
    assert!(matches!(attach(&pool), Err(AttachError::Pool { .. })));
}

/// The fate of a delivered packet.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Recycled,
    Dropped,
    Held,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn whatever_comes_and_wherever_it_goes_nothing_is_lost_or_used_twice(
        mode in 0..3usize,
        policy in 0..4usize,
        copy_break in prop_oneof![Just(0), Just(128), 0..300usize],
        plain_chunks in any::<bool>(),
        packets in proptest::collection::vec(
            (
                prop_oneof![14..200usize, 200..2000usize, 14..=MAX_FRAME, Just(MAX_FRAME)],
                prop_oneof![Just(Fate::Recycled), Just(Fate::Dropped), Just(Fate::Held)],
                any::<bool>(),
            ),
            1..160,
        ),
    ) {
        let mut setup = modes()[mode];
        setup.config = RxConfig { policy: PolicyKind::ALL[policy], copy_break, ..RxConfig::default() };
        if plain_chunks {
            setup.chunks = PoolLayout::chunks(32 * 1024, 256, 52);
        }
        let (mut queue, mut pools) = setup.attach();
        let mut held: Vec<Chain> = Vec::new();
        let mut contents = Vec::new();
        let mut waiting = std::collections::VecDeque::new();
        for (at, (len, fate, collect)) in packets.into_iter().enumerate() {
            queue.refill();
            let sent = frame(len.min(setup.limits.max_frame), at as u64);
            if queue.driver().deliver(&sent) {
                waiting.push_back((sent, fate));
            }
            if !collect {
                continue;
            }
            for chain in receive(&mut queue, &mut pools) {
                let (sent, fate) = waiting.pop_front().unwrap();
                prop_assert_eq!(chain.to_vec(), sent.clone());
                match fate {
                    Fate::Recycled => queue.recycle_chain(chain, &mut pools),
                    Fate::Dropped => drop(chain),
                    Fate::Held => {
                        held.push(chain);
                        contents.push(sent);
                    }
                }
            }
            if held.len() > 12 {
                queue.recycle_chain(held.remove(3), &mut pools);
                contents.remove(3);
            }
            check_disjoint(&mut queue, &held);
        }
        for (chain, sent) in held.iter().zip(&contents) {
            prop_assert_eq!(&chain.to_vec(), sent, "written while it was held");
        }
        prop_assert_eq!(queue.stats().rx_length_errors + queue.stats().unknown, 0);
        drop(held);
        check_nothing_leaked(queue, &pools);
    }
}
