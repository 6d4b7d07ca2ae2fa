//! The transmit queue: every packet is somewhere, once, whatever driver and device do.

mod tx_common;

use std::num::NonZeroUsize;

use proptest::prelude::*;
use ringferry_nic::driver::Refused;
use ringferry_nic::drivers::null::NullTx;
use ringferry_nic::map::MapError;
use ringferry_nic::tx::{AttachError, Rings, SendError, TxConfig, TxQueue};
use ringferry_packet::vnet::{F_NEEDS_CSUM, Header};
use tx_common::{HEADER, Ring, World, available, pieces};

fn attach(ring: Ring, pools: &ringferry_packet::buffer::Pools) -> TxQueue<Ring> {
    TxQueue::attach(ring, pools, TxConfig::default()).unwrap()
}

#[test]
fn a_packet_is_the_devices_until_completed_and_the_pools_afterwards() {
    let mut world = World::new();
    let mut pools = world.pools(8);
    let all = available(&pools);
    let mut queue = attach(Ring::new(16, 4), &pools);
    let mut chain = pools.chain_of(&[7; 100]).unwrap();
    chain.header = Header { flags: F_NEEDS_CSUM, csum_start: 14, csum_offset: 16, ..Header::default() };
    let header = chain.header;
    queue.send(chain, &mut pools).unwrap();
    assert_eq!((queue.in_flight(), queue.pending(), queue.free()), (1, 1, 15));
    assert!(queue.driver().shown.is_empty());
    assert!(queue.flush());
    assert_eq!(queue.reclaim(&mut pools), 0);
    let sent = queue.driver().complete(1).remove(0);
    assert_eq!(sent.len, 100);
    let bytes = world.read(&sent.segments);
    assert_eq!(bytes[..HEADER], header.to_bytes());
    assert_eq!(bytes[HEADER..], [7; 100]);
    assert_ne!(available(&pools), all);
    assert_eq!(queue.reclaim(&mut pools), 1);
    assert_eq!((available(&pools), queue.in_flight(), queue.free()), (all, 0, 16));
    let stats = queue.stats();
    assert_eq!((stats.packets(), stats.bytes, stats.reclaimed, stats.map.direct), (1, 100, 1, 1));
    assert_eq!((stats.kicks, stats.flushes), (1, Rings { end_of_poll: 1, ..Rings::default() }));
}

#[test]
fn limits_are_checked_when_the_queue_is_attached() {
    let mut world = World::new();
    let pools = world.pools(4);
    let error = |ring: Ring| TxQueue::attach(ring, &pools, TxConfig::default()).err();
    let mut ring = Ring::new(16, 4);
    ring.limits.ring = 0;
    assert_eq!(error(ring), Some(AttachError::Empty));
    let mut ring = Ring::new(16, 4);
    ring.limits.tso.max_seg_len = 0;
    assert!(matches!(error(ring), Some(AttachError::Limits(_))));
    assert!(error(Ring::new(16, 4)).is_none());

    struct Dear(Ring);
    impl ringferry_nic::driver::TxDriver for Dear {
        fn limits(&self) -> ringferry_nic::limits::TxLimits {
            self.0.limits
        }
        fn room(&self) -> usize {
            self.0.room
        }
        fn cost(&self, segments: usize) -> usize {
            segments + 2
        }
        fn encap(&mut self, packet: &ringferry_nic::driver::TxPacket<'_>) -> Result<u16, Refused> {
            self.0.encap(packet)
        }
        fn flush(&mut self) -> bool {
            false
        }
        fn completed(&mut self, _: usize, _: impl FnMut(u16)) -> usize {
            0
        }
    }
    let attach = |ring| TxQueue::attach(Dear(ring), &pools, TxConfig::default()).map(drop);
    assert_eq!(attach(Ring::new(16, 15)), Err(AttachError::Ring { segments: 15, cost: 17, ring: 16 }));
    assert_eq!(attach(Ring::new(16, 14)), Ok(()));
}

#[test]
fn a_full_ring_returns_the_packet_as_it_was() {
    let mut world = World::new();
    let mut pools = world.pools(32);
    let all = available(&pools);
    let mut queue = attach(Ring::new(4, 4), &pools);
    for _ in 0..2 {
        let chain = pieces(&mut pools, &[100, 50], 1);
        queue.send(chain, &mut pools).unwrap();
    }
    let chain = pieces(&mut pools, &[60, 30], 9);
    let bytes = chain.to_vec();
    let unsent = queue.send(chain, &mut pools).unwrap_err();
    assert_eq!((unsent.reason, unsent.chain.to_vec()), (MapError::RingFull.into(), bytes.clone()));
    assert!(unsent.reason.is_retryable());
    // With nothing completed there is no room; with something there is.
    let unsent = queue.send_or_reclaim(unsent.chain, &mut pools).unwrap_err();
    assert!(queue.flush());
    queue.driver().complete(1);
    queue.send_or_reclaim(unsent.chain, &mut pools).unwrap();
    queue.flush();
    let sent = queue.driver().complete(2);
    assert_eq!(world.read(&sent[1].segments)[HEADER..], bytes);
    queue.reclaim(&mut pools);
    assert_eq!(available(&pools), all);
    let stats = queue.stats();
    assert_eq!((stats.packets(), stats.dropped(), stats.map.retries), (3, 0, 3));
}

#[test]
fn packets_given_up_are_counted_by_reason_and_freed() {
    let mut world = World::new();
    let mut pools = world.pools(8);
    let all = available(&pools);
    let mut queue = attach(Ring::new(1, 1), &pools);
    for _ in 0..3 {
        let chain = pools.chain_of(&[1; 60]).unwrap();
        if let Err(unsent) = queue.send(chain, &mut pools) {
            queue.give_up(unsent, &mut pools);
        }
    }
    let unsent = queue.send(ringferry_packet::buffer::Chain::default(), &mut pools).unwrap_err();
    assert!(!unsent.reason.is_retryable());
    queue.give_up(unsent, &mut pools);
    let stats = queue.stats();
    assert_eq!((stats.packets(), stats.map.dropped.ring_full, stats.map.dropped.empty), (1, 2, 1));
    assert_eq!(stats.dropped(), 3);
    queue.detach(&mut pools);
    assert_eq!(available(&pools), all);
}

#[test]
fn a_driver_that_refuses_gives_the_packet_back_without_header() {
    let mut world = World::new();
    let mut pools = world.pools(8);
    let all = available(&pools);
    let mut queue = attach(Ring::new(8, 8), &pools);
    for (refused, reason) in [
        (Refused::Full, SendError::Map(MapError::RingFull)),
        (Refused::Unfit, SendError::Unfit(Refused::Unfit)),
        (Refused::Broken, SendError::Broken),
    ] {
        queue.driver().refuse = Some(refused);
        let unsent = queue.send(pools.chain_of(&[3; 70]).unwrap(), &mut pools).unwrap_err();
        assert_eq!((unsent.reason, unsent.chain.to_vec()), (reason, vec![3; 70]));
        queue.give_up(unsent, &mut pools);
    }
    // A broken ring stays broken: nothing is mapped for it any more.
    queue.driver().refuse = None;
    let unsent = queue.send(pools.chain_of(&[3; 70]).unwrap(), &mut pools).unwrap_err();
    assert_eq!(unsent.reason, SendError::Broken);
    queue.give_up(unsent, &mut pools);
    let stats = queue.stats();
    assert_eq!((stats.packets(), stats.refused, stats.dropped()), (0, 3, 4));
    assert_eq!((stats.map.dropped.ring_full, stats.unfit, stats.broken), (1, 1, 2));
    assert_eq!((available(&pools), queue.in_flight(), queue.pending()), (all, 0, 0));
}

#[test]
fn completions_of_nothing_free_nothing_and_end() {
    let mut world = World::new();
    let mut pools = world.pools(8);
    let all = available(&pools);
    let mut queue = attach(Ring::new(4, 4), &pools);
    queue.send(pools.chain_of(&[1; 60]).unwrap(), &mut pools).unwrap();
    queue.flush();
    let token = queue.driver().complete(1)[0].token;
    // Twice the same, one not sent, one that cannot be, and more than the ring has entries.
    queue.driver().done.extend([token, (token + 1) % 4, 4, u16::MAX, 9, 9, 9]);
    assert_eq!(queue.reclaim(&mut pools), 1);
    assert_eq!((queue.stats().unknown, queue.driver().done.len()), (3, 4));
    assert_eq!(queue.reclaim(&mut pools), 0);
    assert_eq!((queue.stats().unknown, queue.in_flight(), queue.free()), (7, 0, 4));
    assert_eq!(available(&pools), all);
}

#[test]
fn detach_frees_what_the_device_still_has_once() {
    let mut world = World::new();
    let mut pools = world.pools(32);
    let all = available(&pools);
    let mut queue = attach(Ring::new(16, 4), &pools);
    for _ in 0..5 {
        let chain = pieces(&mut pools, &[80, 40], 5);
        queue.send(chain, &mut pools).unwrap();
    }
    queue.flush();
    queue.driver().complete(2);
    let ring = queue.detach(&mut pools);
    assert_eq!((available(&pools), ring.shown.len(), ring.done.len()), (all, 3, 2));
}

#[test]
fn doorbells_follow_the_occupancy() {
    let mut world = World::new();
    let mut pools = world.pools(300);
    let mut queue = attach(Ring::new(256, 4), &pools);
    let mut shown = Vec::new();
    for sent in 1..=256 {
        queue.send(pools.chain_of(&[1; 60]).unwrap(), &mut pools).unwrap();
        if queue.due() {
            shown.push(sent);
        }
    }
    let gaps: Vec<_> = shown.windows(2).map(|pair| pair[1] - pair[0]).collect();
    // At once up to an eighth, in batches from there, at once again when the ring is nearly full.
    assert_eq!(shown[..33], (1..=32).chain([34]).collect::<Vec<_>>());
    assert!(gaps[33..44].iter().all(|gap| (2..=8).contains(gap)), "{gaps:?}");
    assert!(gaps.iter().rev().take(2).all(|gap| *gap == 1) && gaps.contains(&16), "{gaps:?}");
    assert!(!queue.flush());
    let stats = queue.stats();
    assert_eq!((stats.flushes.total(), stats.flushes.end_of_poll), (shown.len() as u64, 0));
    assert!(stats.flushes.low_space > 0 && stats.kicks == shown.len() as u64);
}

#[test]
fn reclaim_looks_once_for_a_quarter_of_the_ring_when_short_and_before_idle() {
    let mut world = World::new();
    let mut pools = world.pools(80);
    let all = available(&pools);
    let mut queue = attach(Ring::new(64, 4), &pools);
    let mut looks = Vec::new();
    for sent in 0..64 {
        queue.make_room(1, &mut pools);
        if queue.stats().reclaim_passes > looks.len() as u64 {
            looks.push(sent);
        }
        queue.send(pools.chain_of(&[1; 60]).unwrap(), &mut pools).unwrap();
    }
    assert_eq!(looks, [16, 32, 48]);
    queue.make_room(1, &mut pools);
    queue.make_room(1, &mut pools);
    assert_eq!(queue.stats().reclaim_passes, 5, "short of space looks each time");
    assert!(queue.before_idle(&mut pools));
    queue.driver().complete(64);
    assert!(!queue.before_idle(&mut pools));
    assert_eq!((available(&pools), queue.pending(), queue.in_flight()), (all, 0, 0));
}

#[test]
fn the_setting_says_how_often_reclaim_looks() {
    let mut world = World::new();
    let mut pools = world.pools(80);
    let config = TxConfig { reclaim_after: std::num::NonZeroU16::new(4), ..TxConfig::default() };
    let mut queue = TxQueue::attach(Ring::new(64, 4), &pools, config).unwrap();
    for _ in 0..32 {
        queue.make_room(1, &mut pools);
        queue.send(pools.chain_of(&[1; 60]).unwrap(), &mut pools).unwrap();
    }
    assert_eq!(queue.stats().reclaim_passes, 7);
}

#[test]
fn shattered_packets_arrive_whole() {
    let mut world = World::new();
    let mut pools = world.pools(64);
    pools.frame.faults().split = NonZeroUsize::new(13);
    let all = available(&pools);
    let mut queue = attach(Ring::new(64, 8), &pools);
    for len in [1, 13, 14, 200, 1500] {
        let chain = pieces(&mut pools, &[len], len as u8);
        let bytes = chain.to_vec();
        queue.send(chain, &mut pools).unwrap();
        queue.flush();
        let sent = queue.driver().complete(1).remove(0);
        assert!(sent.segments.len() <= 8);
        assert_eq!(world.read(&sent.segments)[HEADER..], bytes);
    }
    queue.reclaim(&mut pools);
    let stats = queue.stats();
    assert_eq!((stats.packets(), stats.dropped(), available(&pools)), (5, 0, all));
    // 200 and 1500 bytes are more than eight pieces.
    assert!(stats.map.copied_bytes > 0 && stats.map.packets() == 5);
}

#[test]
fn the_null_driver_never_runs_out_of_room() {
    let mut world = World::new();
    let mut pools = world.pools(64);
    let all = available(&pools);
    let driver = NullTx::new(Ring::new(32, 8).limits);
    let mut queue = TxQueue::attach(driver, &pools, TxConfig::default()).unwrap();
    for _ in 0..1000 {
        queue.make_room(1, &mut pools);
        queue.send(pools.chain_of(&[1; 60]).unwrap(), &mut pools).unwrap();
        assert!(!queue.due());
    }
    queue.before_idle(&mut pools);
    assert_eq!((queue.stats().packets(), queue.in_flight(), available(&pools)), (1000, 0, all));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Against a model: sends, completions in any order, lies and faults. Each packet is read by the device as it
    /// was given, and each buffer comes back.
    #[test]
    fn every_packet_has_one_outcome_and_every_buffer_comes_back(
        steps in proptest::collection::vec((0u8..10, 1usize..6, 1usize..400, any::<u16>()), 1..150),
        fail in 0u32..5,
        split in 0usize..60,
    ) {
        let mut world = World::new();
        let mut pools = world.pools(40);
        let all = available(&pools);
        let mut queue = attach(Ring::new(16, 3), &pools);
        pools.frame.faults().split = NonZeroUsize::new(split * 7);
        pools.large.faults().fail_alloc = std::num::NonZeroU32::new(fail);
        let (mut given, mut gone, mut in_device) = (0u64, 0u64, std::collections::HashMap::new());
        for (what, count, len, random) in steps {
            match what {
                0..6 if pools.frame.available() > 20 => {
                    let chain = pieces(&mut pools, &vec![len; count], random as u8);
                    let bytes = chain.to_vec();
                    given += 1;
                    match queue.send_or_reclaim(chain, &mut pools) {
                        Ok(()) => {
                            let sent = queue.driver().written.last().unwrap().clone();
                            prop_assert!(sent.segments.len() <= 3);
                            prop_assert_eq!(sent.len, bytes.len());
                            in_device.insert(sent.token, bytes);
                        }
                        Err(unsent) => {
                            prop_assert_eq!(unsent.chain.to_vec(), bytes);
                            queue.give_up(unsent, &mut pools);
                            gone += 1;
                        }
                    }
                }
                6 => { queue.due(); }
                7 => {
                    queue.flush();
                    prop_assert_eq!(queue.pending(), 0);
                }
                8 => queue.driver().done.push_back(random | 0x8000),
                _ => {
                    // Any packet, not the oldest.
                    let shown = queue.driver().shown.len();
                    if shown > 0 {
                        let sent = queue.driver().shown.remove(usize::from(random) % shown);
                        let bytes = in_device.remove(&sent.token).unwrap();
                        prop_assert_eq!(&world.read(&sent.segments)[HEADER..], &bytes[..]);
                        queue.driver().done.push_back(sent.token);
                    }
                    queue.make_room(count, &mut pools);
                }
            }
        }
        let stats = queue.stats();
        prop_assert_eq!((stats.packets() + stats.dropped(), stats.dropped()), (given, gone));
        prop_assert_eq!(stats.packets(), stats.reclaimed + queue.in_flight() as u64);
        queue.detach(&mut pools);
        prop_assert_eq!(available(&pools), all);
    }
}
