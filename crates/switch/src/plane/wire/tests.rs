use ringferry_packet::vnet::Header;

use super::*;
use crate::fdb::PortId;
use crate::impairments::{Distribution, Loss, Share};

const MS: u64 = 1_000_000;

fn queue(impairments: Impairments) -> WireQueue {
    seeded(impairments, 42, 0)
}

fn end(impairments: Impairments, seed: u64, direction: u8) -> WireEnd {
    WireEnd { wire: "w".to_owned(), peer: "b".to_owned(), seed, direction, impairments }
}

fn seeded(impairments: Impairments, seed: u64, direction: u8) -> WireQueue {
    WireQueue::new(CompiledEnd::new(&end(impairments, seed, direction), None))
}

fn percent(percent: u32) -> Share {
    Share::of_billionths(percent * 10_000_000).unwrap()
}

/// A frame that carries its number.
fn numbered(number: u64) -> Delayed {
    Delayed { from: PortId(0), header: Header::NONE, frame: number.to_be_bytes().repeat(8) }
}

/// Sends so many frames of 64 bytes, `gap` nanoseconds apart, and takes out what is due; when each has left, with its number, in their order.
fn run(queue: &mut WireQueue, frames: u64, gap: u64) -> Vec<(u64, u64)> {
    let mut left = Vec::new();
    let mut take = |queue: &mut WireQueue, until: u64| {
        while let Some(due) = queue.next_due().filter(|due| *due <= until) {
            let frame = queue.pop(due).unwrap().frame;
            left.push((due, u64::from_be_bytes(frame[..8].try_into().unwrap())));
        }
    };
    for number in 0..frames {
        let now = number * gap;
        take(queue, now);
        match queue.admit(64, now) {
            Admission::Passes => queue.push(now, numbered(number)),
            Admission::Waits(passages) => {
                passages.iter().for_each(|passage| queue.push(passage.due, numbered(number)));
            }
            Admission::Lost | Admission::NoRoom => {}
        }
    }
    take(queue, u64::MAX);
    assert_eq!((queue.is_empty(), queue.bytes), (true, 0));
    left
}

fn lost(queue: &mut WireQueue, frames: u64) -> Vec<u64> {
    (0..frames).filter(|_| queue.admit(64, 0) == Admission::Lost).collect()
}

#[test]
fn a_wire_without_impairments_lets_all_pass_and_keeps_nothing() {
    let mut queue = queue(Impairments::default());
    assert!(queue.is_open());
    for number in 0..1000 {
        assert_eq!(queue.admit(1514, number), Admission::Passes);
    }
    assert!(queue.is_empty());
}

#[test]
fn a_delay_is_the_same_for_all_and_keeps_their_order() {
    let mut queue = queue(Impairments { delay: 10 * MS, ..Impairments::default() });
    let left = run(&mut queue, 1000, 1000);
    let expected: Vec<_> = (0..1000).map(|number| (number * 1000 + 10 * MS, number)).collect();
    assert_eq!(left, expected);
}

/// The figures were counted once, and stay as they are: who repeats an experiment with the same seed, with a later program, loses the same frames.
#[test]
fn the_same_seed_loses_the_same_frames() {
    let impairments = Impairments { loss: Loss::Random(percent(1)), ..Impairments::default() };
    let first = lost(&mut seeded(impairments.clone(), 42, 0), 10_000);
    assert_eq!(first, lost(&mut seeded(impairments.clone(), 42, 0), 10_000));
    assert_eq!((first.len(), &first[..5]), (FIRST.0, &FIRST.1[..]));
    // The other direction, and another seed, lose others.
    assert_ne!(first, lost(&mut seeded(impairments.clone(), 42, 1), 10_000));
    assert_ne!(first, lost(&mut seeded(impairments.clone(), 43, 0), 10_000));
    // Whatever else the wire does.
    let more = Impairments {
        delay: MS,
        jitter: MS,
        duplicate: percent(10),
        corrupt: percent(10),
        reorder: percent(10),
        ..impairments
    };
    assert_eq!(first, lost(&mut seeded(more, 42, 0), 10_000));
}

/// How many of 10 000 frames seed 42 loses at 1 %, and the first of them.
const FIRST: (usize, [u64; 5]) = (122, [42, 44, 57, 93, 108]);

/// Within five standard deviations of the binomial distribution, for each of some seeds.
#[test]
fn as_many_are_lost_as_the_share_says() {
    const FRAMES: u64 = 100_000;
    for (share, seed) in [(1, 1), (1, 2), (5, 3), (20, 4), (50, 5)] {
        let loss = Loss::Random(percent(share));
        let count =
            lost(&mut seeded(Impairments { loss, ..Impairments::default() }, seed, 0), FRAMES).len() as f64;
        let p = f64::from(share) / 100.0;
        let (mean, deviation) = (FRAMES as f64 * p, (FRAMES as f64 * p * (1.0 - p)).sqrt());
        assert!((count - mean).abs() < 5.0 * deviation, "{count} of {mean}");
    }
    let all = Impairments { loss: Loss::Random(Share::ALL), ..Impairments::default() };
    assert_eq!(lost(&mut queue(all), 100).len(), 100);
}

/// The chain is in its bad state for p / (p + r) of the frames, and stays there for 1 / r of them.
#[test]
fn bursts_of_gilbert_and_elliott_are_as_frequent_and_as_long_as_they_should_be() {
    let loss = Loss::GilbertElliott {
        to_bad: percent(1),
        to_good: percent(10),
        in_bad: Share::ALL,
        in_good: Share::NONE,
    };
    let losses = lost(&mut queue(Impairments { loss, ..Impairments::default() }), 200_000);
    let share = losses.len() as f64 / 200_000.0;
    assert!((share - 1.0 / 11.0).abs() < 0.01, "{share}");
    let bursts = losses.chunk_by(|one, next| one + 1 == *next).count();
    let length = losses.len() as f64 / bursts as f64;
    assert!((length - 10.0).abs() < 1.0, "{length}");
    // With a share in either state.
    let loss = Loss::GilbertElliott {
        to_bad: percent(1),
        to_good: percent(10),
        in_bad: percent(70),
        in_good: percent(1),
    };
    let losses = lost(&mut queue(Impairments { loss, ..Impairments::default() }), 200_000);
    let share = losses.len() as f64 / 200_000.0;
    let expected = 0.7 / 11.0 + 0.01 * 10.0 / 11.0;
    assert!((share - expected).abs() < 0.01, "{share} of {expected}");
}

#[test]
fn jitter_spreads_delays_and_sorts_frames_by_their_time() {
    for distribution in
        [Distribution::Uniform, Distribution::Normal, Distribution::Pareto, Distribution::ParetoNormal]
    {
        let impairments = Impairments { delay: 10 * MS, jitter: MS, distribution, ..Impairments::default() };
        let left = run(&mut queue(impairments.clone()), 20_000, 10_000);
        assert_eq!(left.len(), 20_000);
        assert!(left.is_sorted_by_key(|(at, _)| *at), "they leave by their times");
        assert!(!left.is_sorted_by_key(|(_, number)| *number), "some overtake others");
        let delays: Vec<_> =
            left.iter().map(|(at, number)| (at - number * 10_000) as f64 / MS as f64).collect();
        let mean = delays.iter().sum::<f64>() / delays.len() as f64;
        assert!((mean - 10.0).abs() < 0.05, "{distribution:?}: {mean}");
        if distribution == Distribution::Uniform {
            assert!(delays.iter().all(|delay| (9.0..=11.0).contains(delay)));
        }
        assert_eq!(left, run(&mut queue(impairments), 20_000, 10_000), "again");
    }
}

/// Nothing arrives before it was sent.
#[test]
fn a_jitter_above_the_delay_makes_no_frame_early() {
    let impairments = Impairments {
        delay: MS,
        jitter: 10 * MS,
        distribution: Distribution::Normal,
        ..Impairments::default()
    };
    let left = run(&mut queue(impairments), 1000, 1000);
    assert_eq!(left.len(), 1000);
    assert!(left.iter().all(|(at, number)| *at >= number * 1000));
}

#[test]
fn reordered_frames_are_not_delayed_and_come_in_gaps() {
    let impairments = Impairments { delay: 10 * MS, reorder: percent(25), ..Impairments::default() };
    let left = run(&mut queue(impairments.clone()), 10_000, 1000);
    let at_once = left.iter().filter(|(at, number)| *at == number * 1000).count();
    assert!((2_300..2_700).contains(&at_once), "{at_once}");
    assert_eq!(left.len(), 10_000);
    // Certain, and each fifth: so says the manual of tc-netem.
    let each_fifth = Impairments { reorder: Share::ALL, gap: 5, ..impairments };
    let left = run(&mut queue(each_fifth), 1000, 1000);
    let at_once: Vec<_> =
        left.iter().filter(|(at, number)| *at == number * 1000).map(|(_, number)| *number).collect();
    assert_eq!(at_once, (0..200).map(|nth| nth * 5 + 4).collect::<Vec<_>>());
}

#[test]
fn doubled_frames_come_twice_and_corrupt_ones_say_which_bit() {
    let impairments = Impairments { duplicate: percent(10), corrupt: percent(5), ..Impairments::default() };
    let mut queue = queue(impairments);
    let (mut twice, mut flipped) = (0, 0);
    for _ in 0..10_000 {
        match queue.admit(64, 0) {
            Admission::Waits(passages) => {
                twice += usize::from(passages.len() == 2);
                flipped += passages.iter().filter(|passage| passage.flip.is_some()).count();
            }
            admission => assert_eq!(admission, Admission::Passes),
        }
    }
    assert!((880..1_120).contains(&twice), "{twice}");
    assert!((480..620).contains(&flipped), "{flipped}");
}

#[test]
fn a_rate_is_kept_to_the_bit_and_what_is_beyond_its_queue_is_dropped() {
    // A frame of 64 bytes takes 51.2 µs at 10 Mbit/s.
    let impairments = Impairments { rate: Some(10_000_000), limit: 100, ..Impairments::default() };
    let mut short = queue(impairments.clone());
    let admitted: Vec<_> = (0..150).map(|_| short.admit(64, 0)).collect();
    for (number, admission) in admitted.iter().enumerate() {
        let Admission::Waits(passages) = admission else {
            assert!(number >= 100 && *admission == Admission::NoRoom, "{number}");
            continue;
        };
        assert_eq!(passages[0].due, 51_200 * (number as u64 + 1));
    }
    // One has left: there is room for one.
    assert!(matches!(short.admit(64, 51_200), Admission::Waits(_)));
    assert_eq!(short.admit(64, 51_200), Admission::NoRoom);
    // What is delayed after it was sent does not count: a limit is no limit on rate times delay.
    let mut long = queue(Impairments { delay: 1000 * MS, ..impairments });
    for number in 0..10_000 {
        assert!(matches!(long.admit(64, number * 51_200), Admission::Waits(_)), "{number}");
    }
}

#[test]
fn what_waits_has_bounded_memory() {
    let impairments =
        Impairments { delay: 60_000 * MS, limit_bytes: 100 * (64 + OVERHEAD), ..Impairments::default() };
    let mut queue = queue(impairments);
    let mut dropped = 0;
    for number in 0..150 {
        match queue.admit(64, number) {
            Admission::Waits(passages) => queue.push(passages[0].due, numbered(number)),
            admission => {
                assert_eq!(admission, Admission::NoRoom);
                dropped += 1;
            }
        }
    }
    assert_eq!((dropped, queue.len()), (50, 100));
    let WireState { frames, bytes, .. } = queue.state();
    assert_eq!((frames, bytes), (100, 100 * (64 + OVERHEAD)));
}

#[test]
fn a_change_leaves_what_waits_as_it_is_and_chance_where_it_stands() {
    let loss = Loss::Random(percent(10));
    let before = Impairments { delay: 10 * MS, loss, ..Impairments::default() };
    let reference = lost(&mut seeded(before.clone(), 7, 0), 2_000);
    let mut changed = seeded(before.clone(), 7, 0);
    let mut numbers = lost(&mut changed, 1_000);
    changed.push(10 * MS, numbered(1));
    let compiled =
        CompiledEnd::new(&end(Impairments { delay: 20 * MS, ..before.clone() }, 7, 0), Some(&changed.end));
    assert!(Arc::ptr_eq(&compiled.line, &changed.end.line), "the line goes on");
    changed.become_another(compiled);
    numbers.extend(lost(&mut changed, 1_000).into_iter().map(|number| number + 1_000));
    assert_eq!(numbers, reference);
    assert_eq!((changed.next_due(), changed.len()), (Some(10 * MS), 1));
    // Another seed begins anew.
    changed.become_another(CompiledEnd::new(&end(before, 7, 1), None));
    let other = Impairments { loss, ..Impairments::default() };
    changed.become_another(CompiledEnd::new(&end(other, 7, 0), None));
    assert_eq!(
        lost(&mut changed, 1_000),
        reference.iter().copied().filter(|number| *number < 1_000).collect::<Vec<_>>()
    );
}

#[test]
fn another_process_goes_on_with_chance_and_with_what_waits() {
    let impairments = Impairments {
        delay: 10 * MS,
        jitter: 5 * MS,
        loss: Loss::GilbertElliott {
            to_bad: percent(5),
            to_good: percent(20),
            in_bad: percent(80),
            in_good: percent(1),
        },
        reorder: percent(5),
        gap: 3,
        ..Impairments::default()
    };
    let go = |queue: &mut WireQueue, numbers: std::ops::Range<u64>| {
        for number in numbers {
            if let Admission::Waits(passages) = queue.admit(64, number * 1000) {
                passages.iter().for_each(|passage| queue.push(passage.due, numbered(number)));
            }
        }
    };
    let all = |queue: &mut WireQueue| {
        std::iter::from_fn(|| queue.pop_stranded()).map(|delayed| delayed.frame).collect::<Vec<_>>()
    };
    let mut one = seeded(impairments.clone(), 3, 1);
    go(&mut one, 0..500);
    let mut other = seeded(impairments, 99, 1);
    // As JSON, as it travels.
    let state: ModelState = serde_json::from_str(&serde_json::to_string(&one.model()).unwrap()).unwrap();
    other.set_model(&state);
    one.queued().for_each(|queued| other.requeue(queued));
    assert_eq!((other.len(), other.bytes), (one.len(), one.bytes));
    go(&mut one, 500..1000);
    go(&mut other, 500..1000);
    assert_eq!(all(&mut one), all(&mut other));
}

/// The queue is a ring and a heap; a sorted list is what both are together.
mod order {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_leave_by_time_and_those_of_one_time_as_they_came(times in proptest::collection::vec(0..50u64, 0..200)) {
            let mut queue = DueQueue::default();
            for (number, due) in (0..).zip(&times) {
                queue.push(*due, numbered(number));
            }
            let mut expected: Vec<_> = (0..).zip(&times).map(|(number, due): (u64, _)| (*due, number)).collect();
            expected.sort_unstable();
            let number = |due: &Due| (due.due, u64::from_be_bytes(due.delayed.frame[..8].try_into().unwrap()));
            prop_assert_eq!(queue.in_order().map(number).collect::<Vec<_>>(), expected.clone());
            let mut left = Vec::new();
            while let Some(due) = queue.pop(u64::MAX) {
                left.push(number(&due));
            }
            prop_assert_eq!(left, expected);
        }

        /// Whatever is asked of a wire, its memory stays within its bound, each frame leaves or is counted as lost, and nothing leaves early.
        #[test]
        fn no_impairments_lose_a_frame_unseen(
            (delay, jitter, rate) in (0..5_000_000u64, 0..5_000_000u64, proptest::option::of(1_000_000..1_000_000_000u64)),
            shares in proptest::array::uniform4(0..500_000_000u32),
            (gap, limit, limit_bytes) in (1..6u32, 1..200u32, 1_000..100_000u64),
            seed in any::<u64>(),
        ) {
            let [loss, duplicate, reorder, corrupt] = shares.map(|share| Share::of_billionths(share).unwrap());
            let impairments = Impairments {
                delay, jitter, rate, duplicate, reorder, corrupt, gap, limit, limit_bytes,
                loss: Loss::Random(loss),
                distribution: Distribution::Normal,
            };
            let mut queue = seeded(impairments, seed, 1);
            let (mut sent, mut twice, mut lost, mut left) = (0, 0, 0, 0);
            for number in 0..500u64 {
                let now = number * 10_000;
                while queue.pop(now).is_some() {
                    left += 1;
                }
                sent += 1;
                match queue.admit(64, now) {
                    Admission::Passes => left += 1,
                    Admission::Lost | Admission::NoRoom => lost += 1,
                    Admission::Waits(passages) => {
                        twice += passages.len() - 1;
                        for passage in passages {
                            prop_assert!(passage.due >= now);
                            queue.push(passage.due, numbered(number));
                        }
                    }
                }
                prop_assert!(queue.bytes <= limit_bytes);
                prop_assert_eq!(queue.bytes, queue.len() as u64 * (64 + OVERHEAD));
            }
            prop_assert_eq!(sent + twice, lost + left + queue.len());
        }
    }
}
