//! Comparison of the four policies on five kinds of traffic, by the descriptors that a packet takes and the memory that is
//! charged for each of its bytes. Everything is counted and nothing is timed, so every run gives the same figures.

mod rx_common;

use std::collections::VecDeque;

use ringferry_nic::rx::{PolicyKind, RxConfig, RxQueue};
use ringferry_packet::buffer::Chain;
use rx_common::{Fake, Setup, check_nothing_leaked};

/// Ring of the simulated queue.
const RING: u16 = 256;

/// Number of packets before counting begins, so that the average has settled and old buffers are used up.
const WARM_UP: usize = 4096;

/// Number of packets that are counted.
const PACKETS: usize = 4096;

/// Number of packets that are in use before they are recycled.
const IN_FLIGHT: usize = 64;

/// A full TCP frame of 64 KiB at MTU 1500: 45 segments of 1448 bytes, and headers.
const GSO: usize = 45 * 1448 + 66;

/// One kind of traffic: frame lengths, repeated for ever.
struct Traffic {
    name: &'static str,
    lengths: Vec<usize>,
    /// All packets are much alike.
    pure: bool,
}

impl Traffic {
    fn new(name: &'static str, pure: bool, lengths: &[(usize, usize)]) -> Self {
        // Evenly mixed: whoever is furthest behind its share is next.
        let total: usize = lengths.iter().map(|&(count, _)| count).sum();
        let mut sent = vec![0; lengths.len()];
        let sequence = (1..=total).map(|now| {
            let behind = |&i: &usize| (now * lengths[i].0) as i64 - (sent[i] * total) as i64;
            let next = (0..lengths.len()).max_by_key(behind).unwrap();
            sent[next] += 1;
            lengths[next].1
        });
        Self { name, lengths: sequence.collect(), pure }
    }

    fn all() -> Vec<Self> {
        vec![
            Self::new("64 B", true, &[(1, 64)]),
            Self::new("IMIX", true, &[(28, 64), (16, 570), (4, 1518)]),
            Self::new("1500 B", true, &[(1, 1514)]),
            Self::new("64 KiB GSO", true, &[(1, GSO)]),
            Self::new("bimodal", false, &[(1, 64), (1, GSO)]),
        ]
    }
}

/// The counts of one run, per packet or per byte.
#[derive(Clone, Copy, Debug)]
struct Figures {
    descriptors: f64,
    truesize: f64,
    len: usize,
}

/// Counts under one policy; packets are recycled if they come back, or dropped.
fn run(policy: PolicyKind, lengths: &[usize], come_back: bool) -> Figures {
    let mut setup = Setup::mergeable(RING, 2 * u32::from(RING) + 256);
    setup.config = RxConfig { policy, ..RxConfig::default() };
    let (mut queue, mut pools) = setup.attach();
    let mut traffic = lengths.iter().cycle().copied();
    let mut held: VecDeque<Chain> = VecDeque::new();
    let bytes = vec![0; rx_common::MAX_FRAME];
    let mut drive = |queue: &mut RxQueue<Fake>, packets: u64| {
        let end = queue.stats().packets + packets;
        let mut next = None;
        while queue.stats().packets < end {
            queue.refill();
            for _ in 0..32 {
                let len = *next.get_or_insert_with(|| traffic.next().unwrap());
                if !queue.driver().deliver_with(&bytes[..len], false, |_, _| {}) {
                    break;
                }
                next = None;
            }
            let received = queue.receive(usize::MAX, &mut pools, |chain, _| held.push_back(chain));
            assert!(received > 0, "{policy:?} is stuck: {:?}", queue.stats());
            while held.len() > IN_FLIGHT {
                let chain = held.pop_front().unwrap();
                if come_back {
                    queue.recycle_chain(chain, &mut pools);
                }
            }
        }
    };
    drive(&mut queue, WARM_UP as u64);
    let before = queue.stats();
    drive(&mut queue, PACKETS as u64);
    let after = queue.stats();
    assert_eq!((after.no_replacement, after.rx_length_errors, after.refused), (0, 0, 0), "{policy:?}");
    let figures = Figures {
        descriptors: (after.descriptors - before.descriptors) as f64
            / (after.packets - before.packets) as f64,
        truesize: (after.truesize_bytes - before.truesize_bytes) as f64 / (after.bytes - before.bytes) as f64,
        len: queue.next_buffer_len(),
    };
    drop(held);
    check_nothing_leaked(queue, &pools);
    figures
}

/// All policies on one kind of traffic, printed.
fn compare(traffic: &Traffic) -> [Figures; 4] {
    let figures = PolicyKind::ALL.map(|policy| run(policy, &traffic.lengths, true));
    for (policy, Figures { descriptors, truesize, len }) in PolicyKind::ALL.iter().zip(figures) {
        let name = policy.name();
        println!("{:<12} {name:<5} {descriptors:>8.3} {truesize:>8.4} {len:>6}", traffic.name);
    }
    figures
}

#[test]
fn the_best_policy_is_no_worse_than_the_average_on_traffic_that_nobody_tuned_it_for() {
    let jumbo = Traffic::new("9000 B", true, &[(1, 9014)]);
    let longest = Traffic::new("longest", true, &[(1, rx_common::MAX_FRAME)]);
    let middle = Traffic::new("40000 B", true, &[(1, 40000)]);
    let acks = Traffic::new("30 ACK : 1", false, &[(30, 64), (1, GSO)]);
    let mtu = Traffic::new("19 MTU : 1", false, &[(19, 1514), (1, GSO)]);
    for traffic in [jumbo, longest, middle, acks, mtu] {
        let [_, _, ewma, best] = compare(&traffic);
        let name = traffic.name;
        assert!(best.descriptors <= ewma.descriptors * SLACK, "{name}: descriptors");
        assert!(best.truesize <= ewma.truesize * SLACK, "{name}: truesize");
    }
}

#[test]
fn packets_that_never_come_back_cost_neither_descriptors_nor_memory() {
    for traffic in Traffic::all() {
        for policy in PolicyKind::ALL {
            let (back, gone) = (run(policy, &traffic.lengths, true), run(policy, &traffic.lengths, false));
            assert!(gone.descriptors <= back.descriptors * SLACK, "{} {policy:?}: {gone:?}", traffic.name);
            assert!(gone.truesize <= back.truesize * SLACK, "{} {policy:?}: {gone:?}", traffic.name);
        }
    }
}

/// Tolerance of comparisons: one percent.
const SLACK: f64 = 1.01;

#[test]
fn the_best_policy_is_never_worse_than_the_average_and_much_better_where_packets_differ() {
    println!("traffic      policy   desc/p  true/pl    len");
    for traffic in Traffic::all() {
        let [mtu, page, ewma, best] = compare(&traffic);
        let name = traffic.name;
        assert!(best.descriptors <= ewma.descriptors * SLACK, "{name}: descriptors");
        assert!(best.truesize <= ewma.truesize * SLACK, "{name}: truesize");
        if traffic.pure {
            let better =
                if mtu.truesize * mtu.descriptors <= page.truesize * page.descriptors { mtu } else { page };
            assert!(ewma.truesize <= better.truesize * SLACK, "{name}: EWMA, truesize");
            assert!(ewma.truesize <= mtu.truesize.min(page.truesize) * SLACK, "{name}: EWMA, least truesize");
            assert!(ewma.descriptors <= better.descriptors * SLACK, "{name}: EWMA, descriptors");
        } else {
            assert!(best.descriptors <= 0.8 * ewma.descriptors, "{name}: 20 % fewer descriptors");
        }
    }
}
