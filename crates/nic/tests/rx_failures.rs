//! Receive queues when things go wrong: no chunk left, a ring that refuses, a device that lies. Whatever
//! happens, no buffer is lost and none is used twice, and traffic goes on afterwards.

mod rx_common;

use std::num::NonZeroU32;

use proptest::prelude::*;
use ringferry_nic::driver::Completion;
use ringferry_nic::limits::RxMode;
use ringferry_nic::rx::{PolicyKind, RxConfig, RxQueue};
use ringferry_packet::buffer::{Chain, Pools};
use ringferry_packet::vnet::Header;
use rx_common::{Fake, MAX_FRAME, Setup, check_disjoint, check_nothing_leaked, frame, receive};

/// Mergeable, and one buffer of several segments; every policy.
fn setups() -> Vec<Setup> {
    let mergeable = Setup::mergeable(64, 256);
    let mut big = mergeable;
    big.limits.mode = RxMode::Whole;
    big.limits.max_segs = 19;
    let with = |setup: Setup, policy| Setup { config: RxConfig { policy, ..setup.config }, ..setup };
    [mergeable, big].into_iter().flat_map(|setup| PolicyKind::ALL.map(|policy| with(setup, policy))).collect()
}

const LENGTHS: [usize; 6] = [64, 1514, 60000, 128, 9000, 20000];

/// Everything works, with all of the ring.
fn check_recovered(queue: &mut RxQueue<Fake>, pools: &mut Pools) {
    queue.driver().complete_forgotten();
    receive(queue, pools);
    queue.refill();
    assert_eq!(queue.posted(), 64, "the ring shrank: {:?}", queue.stats());
    for (round, len) in LENGTHS.into_iter().enumerate() {
        let sent = frame(len, round as u64);
        assert!(queue.driver().deliver(&sent));
        let got = receive(queue, pools);
        assert_eq!(got.len(), 1);
        assert_eq!(got[0].to_vec(), sent);
        queue.refill();
    }
}

#[test]
fn every_kth_allocation_may_fail_of_chunks_and_of_small_buffers() {
    for setup in setups() {
        for k in 1..=12 {
            let (mut queue, mut pools) = setup.attach();
            queue.pool().faults().fail_alloc = NonZeroU32::new(k);
            pools.small.faults().fail_alloc = NonZeroU32::new(k);
            let mut held: Vec<Chain> = Vec::new();
            for round in 0..120u64 {
                queue.refill();
                let sent = frame(LENGTHS[round as usize % LENGTHS.len()], round);
                if queue.driver().deliver(&sent) {
                    let got = receive(&mut queue, &mut pools);
                    assert_eq!(got.len(), 1);
                    assert_eq!(got[0].to_vec(), sent);
                    held.extend(got);
                }
                check_disjoint(&mut queue, &held);
                if held.len() > 4 {
                    queue.recycle_chain(held.remove(0), &mut pools);
                }
            }
            if k == 1 {
                assert_eq!((queue.stats().carved, queue.posted()), (0, 0));
                assert!(queue.stats().no_replacement > 0);
            }
            drop(held);
            queue.pool().faults().fail_alloc = None;
            pools.small.faults().fail_alloc = None;
            check_recovered(&mut queue, &mut pools);
            check_nothing_leaked(queue, &pools);
        }
    }
}

#[test]
fn a_ring_without_chunks_is_filled_again_when_they_come_back() {
    for setup in setups() {
        // Hardly more than the ring takes: what packets hold is missing.
        let mut setup = setup;
        setup.chunks.count = 96;
        let (mut queue, mut pools) = setup.attach();
        let mut held = Vec::new();
        for round in 0..1000u64 {
            queue.refill();
            queue.driver().deliver_with(&frame(20000, round), false, |_, _| {});
            held.extend(receive(&mut queue, &mut pools));
        }
        check_disjoint(&mut queue, &held);
        assert!(queue.stats().no_replacement > 0, "{:?}", queue.stats());
        let few = queue.posted();
        for (at, chain) in held.into_iter().enumerate() {
            if at % 2 == 0 {
                queue.recycle_chain(chain, &mut pools);
            }
        }
        queue.refill();
        assert!(queue.posted() > few, "{:?}", queue.stats());
        let mut got = 0;
        for round in 0..100 {
            queue.driver().deliver(&frame(MAX_FRAME, round));
            queue.lend(usize::MAX, &mut pools, |chain, _| {
                got += u64::from(chain.to_vec() == frame(MAX_FRAME, round));
                Some(chain)
            });
            queue.refill();
        }
        assert_eq!(got, 100, "{:?}", queue.stats());
        check_nothing_leaked(queue, &pools);
    }
}

#[test]
fn every_post_may_be_refused_and_the_next_one_is_of_the_same_memory() {
    for setup in setups() {
        // A refusal of several segments is the same wherever it comes.
        let step = if setup.limits.mode == RxMode::Mergeable { 1 } else { 9 };
        for k in (0..64).step_by(step) {
            let (mut queue, mut pools) = setup.attach();
            queue.driver().refuse_in = Some(k);
            queue.refill();
            assert_eq!((queue.posted(), queue.stats().refused), (k, 1));
            queue.refill();
            assert_eq!(queue.posted(), 64);
            // As if nothing had been refused; a buffer that began in one chunk and ended in another may begin
            // in the other now.
            let (mut never, _) = setup.attach();
            never.refill();
            assert_eq!(queue.pool().available(), never.pool().available());
            if setup.limits.mode == RxMode::Mergeable {
                let segments = |queue: &mut RxQueue<Fake>| -> Vec<_> { queue.driver().segments().collect() };
                assert_eq!(segments(&mut queue), segments(&mut never), "{k}");
            }
            // And of buffers that came back.
            for round in 0..20u64 {
                queue.driver().refuse_in = Some(round as usize % 3);
                queue.driver().deliver(&frame(LENGTHS[round as usize % LENGTHS.len()], round));
                queue.lend(usize::MAX, &mut pools, |chain, _| Some(chain));
                queue.refill();
                check_disjoint(&mut queue, &[]);
            }
            queue.driver().refuse_in = None;
            check_recovered(&mut queue, &mut pools);
            check_nothing_leaked(queue, &pools);
        }
    }
}

/// A false statement of a device about a packet.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Reports this `num_buffers`.
    Buffers(u16),
    /// Reports one buffer more, or one fewer, than there are.
    BuffersOff(i16),
    /// Reports a wrong length of the first, or of the last buffer.
    First(u32),
    Last(u32),
    /// Reports a length of 0 for all buffers.
    Nothing,
    /// The last buffer is not completed.
    Missing,
    /// The last is completed twice.
    Twice,
    /// Completes a token that was not posted.
    Unknown(u16),
    /// Completes the buffers in reverse order.
    Reversed,
}

impl Lie {
    fn tell(self, header: &mut Header, done: &mut Vec<Completion>) {
        match self {
            Lie::Buffers(n) => header.num_buffers = n,
            Lie::BuffersOff(n) => header.num_buffers = header.num_buffers.saturating_add_signed(n),
            Lie::First(len) => done[0].len = len,
            Lie::Last(len) => done.last_mut().unwrap().len = len,
            Lie::Nothing => done.iter_mut().for_each(|done| done.len = 0),
            Lie::Missing => drop(done.pop()),
            Lie::Twice => done.push(*done.last().unwrap()),
            Lie::Unknown(token) => done.push(Completion { token, len: 500 }),
            Lie::Reversed => done.reverse(),
        }
    }
}

fn lies() -> impl Strategy<Value = Lie> {
    let len = || {
        prop_oneof![0..30u32, 1500..1600u32, 4000..4200u32, 32700..33000u32, 65000..66000u32, any::<u32>()]
    };
    prop_oneof![
        prop_oneof![Just(0), Just(1), 0..80u16, any::<u16>()].prop_map(Lie::Buffers),
        (-2..3i16).prop_map(Lie::BuffersOff),
        len().prop_map(Lie::First),
        len().prop_map(Lie::Last),
        Just(Lie::Nothing),
        Just(Lie::Missing),
        Just(Lie::Twice),
        prop_oneof![0..70u16, any::<u16>()].prop_map(Lie::Unknown),
        Just(Lie::Reversed),
    ]
}

#[test]
fn lengths_that_cannot_be_are_counted_dropped_and_their_buffers_posted_again() {
    let cases = [
        (1514, Lie::First(u32::MAX)),
        (1514, Lie::First(2_000_000)),
        (1514, Lie::First(0)),
        (1514, Lie::First(11)),
        (1514, Lie::First(12)),
        (1514, Lie::First(25)),
        (20000, Lie::Nothing),
        (20000, Lie::Last(u32::MAX)),
        (20000, Lie::First(u32::MAX)),
        (1514, Lie::Buffers(0)),
        (1514, Lie::Buffers(2)),
        (1514, Lie::Buffers(u16::MAX)),
        (20000, Lie::BuffersOff(1)),
        (20000, Lie::Missing),
    ];
    for setup in setups() {
        for (len, lie) in cases {
            let mergeable = setup.limits.mode == RxMode::Mergeable;
            // Without merging, nobody looks at the count, and every packet has one completion.
            if !mergeable && matches!(lie, Lie::Buffers(_) | Lie::BuffersOff(_) | Lie::Missing) {
                continue;
            }
            let (mut queue, mut pools) = setup.attach();
            queue.refill();
            assert!(queue.driver().deliver_with(&frame(len, 1), true, |header, done| lie.tell(header, done)));
            let got = receive(&mut queue, &mut pools);
            assert!(got.is_empty(), "{lie:?}");
            let stats = queue.stats();
            assert!(stats.rx_length_errors >= 1, "{lie:?}: {stats:?}");
            assert_eq!((stats.packets, stats.truesize_bytes), (0, 0));
            let carved = stats.carved;
            queue.driver().complete_forgotten();
            receive(&mut queue, &mut pools);
            queue.refill();
            assert_eq!((queue.posted(), queue.stats().carved), (64, carved), "{lie:?}");
            check_recovered(&mut queue, &mut pools);
            check_nothing_leaked(queue, &pools);
        }
    }
}

#[test]
fn a_count_that_swallows_the_next_packet_loses_no_more_than_it_claims() {
    let (mut queue, mut pools) = Setup::mergeable(64, 256).attach();
    queue.refill();
    queue.driver().deliver_with(&frame(1514, 1), true, |header, _| header.num_buffers = 3);
    for round in 2..6 {
        queue.driver().deliver(&frame(200, round));
    }
    // The first three are one strange packet, which nobody can tell from a good one; the others are whole.
    let got = receive(&mut queue, &mut pools);
    assert_eq!(got.len(), 3);
    assert_eq!((got[1].to_vec(), got[2].to_vec()), (frame(200, 4), frame(200, 5)));
    check_disjoint(&mut queue, &got);
}

#[test]
fn a_header_that_was_not_written_does_not_swallow_good_packets() {
    let (mut queue, mut pools) = Setup::mergeable(64, 256).attach();
    queue.refill();
    queue.driver().deliver_with(&frame(1514, 1), true, |header, done| {
        header.num_buffers = 9;
        done[0].len = 11;
    });
    queue.driver().deliver(&frame(1514, 2));
    let got = receive(&mut queue, &mut pools);
    assert_eq!(got.len(), 1);
    assert_eq!(got[0].to_vec(), frame(1514, 2));
    assert_eq!(queue.stats().rx_length_errors, 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 160, ..ProptestConfig::default() })]

    #[test]
    fn no_lie_at_any_step_loses_a_buffer_or_makes_one_be_used_twice(
        setup in 0..8usize,
        steps in proptest::collection::vec(
            (0..LENGTHS.len(), proptest::option::weighted(0.3, lies()), 0..4u8, proptest::option::weighted(0.1, 0..8usize)),
            1..100,
        ),
        fail in 0..6u32,
    ) {
        let (mut queue, mut pools) = setups()[setup].attach();
        queue.refill();
        queue.pool().faults().fail_alloc = NonZeroU32::new(fail);
        let mut held: Vec<Chain> = Vec::new();
        for (at, (len, lie, after, refuse)) in steps.into_iter().enumerate() {
            queue.driver().refuse_in = refuse;
            let sent = frame(LENGTHS[len], at as u64);
            queue.driver().deliver_with(&sent, true, |header, done| {
                if let Some(lie) = lie {
                    lie.tell(header, done);
                }
            });
            if after > 0 {
                held.extend(receive(&mut queue, &mut pools));
                prop_assert!(held.iter().all(|chain| chain.len() >= 14 && chain.len() <= MAX_FRAME));
                prop_assert!(held.iter().all(|chain| chain.len() == chain.to_vec().len()));
            }
            check_disjoint(&mut queue, &held);
            if after > 1 {
                queue.refill();
            }
            if after > 2 && !held.is_empty() {
                queue.recycle_chain(held.remove(0), &mut pools);
            }
            check_disjoint(&mut queue, &held);
        }
        queue.driver().refuse_in = None;
        queue.pool().faults().fail_alloc = None;
        drop(held);
        check_recovered(&mut queue, &mut pools);
        check_nothing_leaked(queue, &pools);
    }
}
