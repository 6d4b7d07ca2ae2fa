//! The loopback driver: what is sent comes back as it was, through both halves of the framework.

mod tx_common;

use proptest::prelude::*;
use ringferry_nic::driver::{RxDriver, Segment};
use ringferry_nic::drivers::loopback::{LoopbackConfig, LoopbackRx, LoopbackTx, MAX_FRAME, loopback};
use ringferry_nic::drivers::null::NullRx;
use ringferry_nic::limits::{RxLimits, RxMode};
use ringferry_nic::rx::{RxConfig, RxQueue};
use ringferry_nic::tx::{TxConfig, TxQueue};
use ringferry_packet::buffer::Pools;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header};
use tx_common::{World, available, pieces};

struct Pair {
    pools: Pools,
    tx: TxQueue<LoopbackTx>,
    rx: RxQueue<LoopbackRx>,
}

fn pair(ring: u16, mode: RxMode) -> Pair {
    let mut world = World::new();
    let (tx, rx) = loopback(&world.memory, LoopbackConfig { ring, max_segs: 8, mode });
    let pools = world.pools(256);
    let fragments = world.fragments(256);
    let tx = TxQueue::attach(tx, &pools, TxConfig::default()).unwrap();
    let rx = RxQueue::attach(rx, fragments, RxConfig::default()).unwrap();
    Pair { pools, tx, rx }
}

impl Pair {
    /// Receives all packets and returns their headers and frames.
    fn received(&mut self) -> Vec<(Header, Vec<u8>)> {
        let mut all = Vec::new();
        self.rx.lend(usize::MAX, &mut self.pools, |chain, _| {
            all.push((chain.header, chain.to_vec()));
            Some(chain)
        });
        all
    }
}

/// The guide for authors of drivers promises this length.
#[test]
fn a_driver_and_its_device_are_under_300_lines() {
    let lines = include_str!("../src/drivers/loopback.rs").lines().count();
    assert!((100..300).contains(&lines), "{lines}");
}

#[test]
fn frames_of_any_length_come_back_with_their_headers() {
    for mode in [RxMode::Mergeable, RxMode::Whole] {
        let mut pair = pair(64, mode);
        let all = available(&pair.pools);
        pair.rx.refill();
        let header = Header {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4,
            hdr_len: 54,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 16,
            num_buffers: 0,
        };
        for len in [14, 60, 128, 129, 1514, 4096, 9000, 65_000, MAX_FRAME] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 % 251) as u8).collect();
            let mut chain = pair.pools.chain_of(&bytes).unwrap();
            chain.header = header;
            pair.tx.send(chain, &mut pair.pools).unwrap();
            pair.tx.flush();
            let received = pair.received();
            assert_eq!(received.len(), 1, "{mode:?} {len}: {:?}", pair.rx.stats());
            assert!(received[0].1 == bytes, "{mode:?} {len}");
            assert_eq!(Header { num_buffers: 0, ..received[0].0 }, header, "{mode:?} {len}");
            pair.rx.refill();
            pair.tx.before_idle(&mut pair.pools);
        }
        assert_eq!((available(&pair.pools), pair.tx.driver().dropped()), (all, 0));
        let stats = pair.rx.stats();
        assert_eq!((stats.rx_length_errors, stats.unknown, stats.packets), (0, 0, 9));
    }
}

#[test]
fn packets_wait_for_buffers_and_are_not_lost() {
    let mut pair = pair(32, RxMode::Mergeable);
    for n in 0..10 {
        let chain = pair.pools.chain_of(&[n; 100]).unwrap();
        pair.tx.send(chain, &mut pair.pools).unwrap();
    }
    pair.tx.flush();
    assert_eq!((pair.received().len(), pair.tx.reclaim(&mut pair.pools)), (0, 0));
    pair.rx.refill();
    assert_eq!(pair.tx.reclaim(&mut pair.pools), 10);
    let first: Vec<_> = pair.received().iter().map(|(_, bytes)| bytes[0]).collect();
    assert_eq!(first, (0..10).collect::<Vec<_>>());
}

#[test]
fn both_halves_go_to_other_threads() {
    let Pair { mut pools, mut tx, mut rx } = pair(16, RxMode::Mergeable);
    let mut world = World::new();
    let mut others = world.pools(16);
    let receiver = std::thread::spawn(move || {
        let mut got = Vec::new();
        while got.len() < 500 {
            rx.refill();
            rx.lend(usize::MAX, &mut others, |chain, _| {
                got.push(u32::from_le_bytes(chain.to_vec()[..4].try_into().unwrap()));
                Some(chain)
            });
            std::thread::yield_now();
        }
        got
    });
    for n in 0..500u32 {
        let mut bytes = [0; 64];
        bytes[..4].copy_from_slice(&n.to_le_bytes());
        let mut chain = pools.chain_of(&bytes).unwrap();
        while let Err(unsent) = tx.send_or_reclaim(chain, &mut pools) {
            chain = unsent.chain;
            tx.flush();
            std::thread::yield_now();
        }
    }
    tx.flush();
    assert_eq!(receiver.join().unwrap(), (0..500).collect::<Vec<_>>());
}

#[test]
fn the_null_receiver_keeps_what_is_posted_and_has_nothing() {
    let limits = RxLimits { ring: 4, header_len: 12, mode: RxMode::Mergeable, max_frame: 1514, max_segs: 1 };
    let mut null = NullRx::new(limits);
    let buffer = [Segment { addr: 0, len: 2048 }];
    let mut tokens: Vec<u16> = (0..4).map(|_| null.post(&buffer).unwrap()).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1, 2, 3]);
    assert!(null.post(&buffer).is_err());
    assert_eq!((null.flush(), null.completed(9, |_| ()), null.room()), (false, 0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn chains_of_any_shape_come_back_in_order(
        packets in proptest::collection::vec(proptest::collection::vec(1usize..1600, 1..24), 1..40),
        mergeable: bool,
    ) {
        let mode = if mergeable { RxMode::Mergeable } else { RxMode::Whole };
        let mut pair = pair(32, mode);
        let all = available(&pair.pools);
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        for (n, mut lens) in packets.into_iter().enumerate() {
            lens[0] = lens[0].max(14);
            let mut chain = pieces(&mut pair.pools, &lens, n as u8);
            sent.push(chain.to_vec());
            while let Err(unsent) = pair.tx.send_or_reclaim(chain, &mut pair.pools) {
                prop_assert!(unsent.reason.is_retryable());
                chain = unsent.chain;
                pair.tx.flush();
                pair.rx.refill();
                got.extend(pair.received());
            }
        }
        pair.tx.flush();
        for _ in 0..100 {
            pair.rx.refill();
            got.extend(pair.received());
        }
        pair.tx.before_idle(&mut pair.pools);
        prop_assert!(got.into_iter().map(|(_, bytes)| bytes).eq(sent));
        prop_assert_eq!(available(&pair.pools), all);
    }
}
