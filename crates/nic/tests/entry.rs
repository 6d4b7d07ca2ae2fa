//! Several threads, one queue: nothing lost, nothing twice, each sender's packets in order, by all three entries.

mod tx_common;

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use ringferry_nic::map::MapError;
use ringferry_nic::tx::{Entry, Progress, TxConfig, TxPort, TxQueue};
use ringferry_packet::buffer::{Chain, Pools};
use tx_common::{HEADER, Ring, Sent, World, available};

const ENTRIES: [Entry; 3] = [Entry::InlineLock, Entry::SharedRing, Entry::HandOff];

fn port(entry: Entry, ring: u16, waiting: u16, pools: &Pools) -> TxPort<Ring> {
    let config = TxConfig { entry, waiting: NonZeroU16::new(waiting).unwrap(), ..TxConfig::default() };
    TxPort::new(TxQueue::attach(Ring::new(ring, 4), pools, config).unwrap())
}

fn frame(pools: &mut Pools, sender: u32, number: u32) -> Option<Chain> {
    let mut bytes = [0; 64];
    bytes[..4].copy_from_slice(&sender.to_le_bytes());
    bytes[4..8].copy_from_slice(&number.to_le_bytes());
    pools.chain_of(&bytes)
}

fn read(world: &World, sent: &Sent) -> (u32, u32) {
    let bytes = world.read(&sent.segments);
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    (word(HEADER), word(HEADER + 4))
}

/// Senders with pools of their own; the worker polls, and its device completes what it was shown.
fn senders_and_a_worker(entry: Entry, bursts: bool) {
    const SENDERS: u32 = 3;
    const PACKETS: u32 = 1500;
    let mut world = World::new();
    let mut pools = world.pools(64);
    let all = available(&pools);
    let port = port(entry, 16, 32, &pools);
    let mut of_senders: Vec<_> = (0..SENDERS).map(|_| world.pools(64)).collect();
    let (running, accepted) = (AtomicUsize::new(SENDERS as usize), AtomicUsize::new(0));
    let woken = AtomicBool::new(false);
    let mut got = Vec::new();
    thread::scope(|scope| {
        for (sender, pools) in (0..).zip(&mut of_senders) {
            let (port, running, accepted, woken) = (&port, &running, &accepted, &woken);
            scope.spawn(move || {
                let mut number = 0;
                let mut waiting = VecDeque::new();
                while number < PACKETS || !waiting.is_empty() {
                    let burst = if bursts { 8 } else { 1 };
                    while waiting.len() < burst && number < PACKETS {
                        let Some(chain) = frame(pools, sender, number) else { break };
                        waiting.push_back(chain);
                        number += 1;
                    }
                    let before = waiting.len();
                    let wake = if bursts {
                        port.send_burst(&mut waiting, pools).wake
                    } else if let Some(chain) = waiting.pop_front() {
                        let (progress, unsent) = port.send(chain, pools);
                        if let Some(unsent) = unsent {
                            assert_eq!(unsent.reason, MapError::RingFull.into());
                            waiting.push_front(unsent.chain);
                        }
                        progress.wake
                    } else {
                        false
                    };
                    if wake {
                        woken.store(true, Ordering::SeqCst);
                    }
                    accepted.fetch_add(before - waiting.len(), Ordering::SeqCst);
                    if before == waiting.len() {
                        thread::yield_now();
                    }
                }
                running.fetch_sub(1, Ordering::SeqCst);
            });
        }
        // The worker polls when it was woken, or when the device has completed something: nothing else
        // reminds it.
        loop {
            let done = running.load(Ordering::SeqCst) == 0;
            // Read before anybody can reclaim.
            let completed = port.with(|queue| {
                let sent = queue.driver().complete(8);
                got.extend(sent.iter().map(|sent| read(&world, sent)));
                sent.len()
            });
            if woken.swap(false, Ordering::SeqCst) | (completed > 0) {
                // What this leaves behind waits for completions.
                let progress = port.poll(&mut pools);
                let stuck = port.with(|queue| queue.in_flight() == 0);
                assert!(!(progress.wake && stuck), "packets wait, and nothing will complete");
            } else if done {
                break;
            }
            thread::yield_now();
        }
    });
    assert_eq!(accepted.into_inner(), (SENDERS * PACKETS) as usize);
    let (queue, left) = port.into_parts();
    assert!(left.is_empty());
    let stats = queue.stats();
    assert_eq!((stats.packets(), stats.dropped()), (u64::from(SENDERS * PACKETS), 0), "{entry:?}");
    for sender in 0..SENDERS {
        let numbers = got.iter().filter(|(of, _)| *of == sender).map(|(_, number)| *number);
        assert!(
            numbers.eq(0..PACKETS),
            "{entry:?}: packets of sender {sender} lost, doubled or out of order"
        );
    }
    queue.detach(&mut pools);
    assert_eq!(available(&pools), all);
    for pools in &of_senders {
        assert_eq!(available(pools), all);
    }
}

#[test]
fn inline_lock_loses_and_doubles_nothing() {
    senders_and_a_worker(Entry::InlineLock, false);
    senders_and_a_worker(Entry::InlineLock, true);
}

#[test]
fn shared_ring_loses_and_doubles_nothing() {
    senders_and_a_worker(Entry::SharedRing, false);
    senders_and_a_worker(Entry::SharedRing, true);
}

#[test]
fn hand_off_loses_and_doubles_nothing() {
    senders_and_a_worker(Entry::HandOff, false);
    senders_and_a_worker(Entry::HandOff, true);
}

#[test]
fn a_full_port_returns_the_packet() {
    for entry in ENTRIES {
        let mut world = World::new();
        let mut pools = world.pools(32);
        let all = available(&pools);
        let port = port(entry, 2, 3, &pools);
        let (mut sent, mut burst) = (0, VecDeque::new());
        for number in 0..10 {
            burst.push_back(frame(&mut pools, 0, number).unwrap());
        }
        while sent + burst.len() == 10 && !burst.is_empty() {
            let (_, unsent) = port.send(burst.pop_front().unwrap(), &mut pools);
            match unsent {
                None => sent += 1,
                Some(unsent) => {
                    assert_eq!(unsent.reason, MapError::RingFull.into());
                    burst.push_front(unsent.chain);
                    break;
                }
            }
        }
        // Two in the ring, three wait; with a hand-off nothing is in the ring before the worker polls. A packet
        // that was taken from the waiting room because it did not fit the ring waits as well.
        let expected = [2, 6, 3][entry as usize];
        assert_eq!(sent, expected, "{entry:?}");
        assert_eq!(port.full(), u64::from(entry != Entry::InlineLock));
        let (queue, left) = port.into_parts();
        let ring = if entry == Entry::HandOff { 0 } else { 2 };
        assert_eq!((queue.in_flight(), left.len()), (ring, expected - ring));
        let mut numbers: Vec<_> = left.iter().chain(&burst).map(|chain| chain.to_vec()[4]).collect();
        numbers.dedup();
        assert_eq!(numbers, (ring as u8..10).collect::<Vec<_>>(), "{entry:?}: in order");
        left.into_iter().chain(burst).for_each(|chain| pools.recycle_chain(chain));
        queue.detach(&mut pools);
        assert_eq!(available(&pools), all);
    }
}

#[test]
fn packets_that_can_never_go_are_dropped_and_counted_and_hold_up_nobody() {
    for entry in ENTRIES {
        let mut world = World::new();
        let mut pools = world.pools(32);
        let port = port(entry, 16, 16, &pools);
        let mut burst = VecDeque::from([
            frame(&mut pools, 0, 0).unwrap(),
            Chain::default(),
            frame(&mut pools, 0, 1).unwrap(),
        ]);
        let progress = port.send_burst(&mut burst, &mut pools);
        assert_eq!(progress.wake, entry == Entry::HandOff);
        let polled = port.poll(&mut pools);
        assert!((progress.doorbell | polled.doorbell) && !polled.wake, "{entry:?}");
        let stats = port.with(|queue| queue.stats());
        assert_eq!((stats.packets(), stats.map.dropped.empty, stats.dropped()), (2, 1, 1), "{entry:?}");
    }
}

#[test]
fn nothing_is_pending_when_a_call_returns() {
    for entry in ENTRIES {
        let mut world = World::new();
        let mut pools = world.pools(300);
        let port = port(entry, 256, 256, &pools);
        for number in 0..200 {
            assert!(port.send(frame(&mut pools, 0, number).unwrap(), &mut pools).1.is_none());
            assert_eq!(port.with(|queue| queue.pending()), 0, "{entry:?}");
        }
        let _ = port.poll(&mut pools);
        assert_eq!(port.with(|queue| (queue.pending(), queue.in_flight())), (0, 200));
        assert_eq!(port.poll(&mut pools), Progress::default());
    }
}

/// One wake-up for any number of packets that wait.
#[test]
fn hand_off_wakes_once_until_polled() {
    let mut world = World::new();
    let mut pools = world.pools(32);
    let port = port(Entry::HandOff, 16, 16, &pools);
    let mut wakes = Vec::new();
    for number in 0..6 {
        if number == 4 {
            assert_eq!(port.poll(&mut pools), Progress { doorbell: true, wake: false });
        }
        wakes.push(port.send(frame(&mut pools, 0, number).unwrap(), &mut pools).0.wake);
    }
    assert_eq!(wakes, [true, false, false, false, true, false]);
}
