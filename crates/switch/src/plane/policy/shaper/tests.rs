use proptest::prelude::*;
use ringferry_packet::checksum::Sum;

use super::*;
use crate::rules::{Limits, Rate};

const MILLI: u64 = 1000;

fn checksum(bytes: &[u8]) -> u16 {
    let mut sum = Sum::default();
    sum.add(bytes);
    sum.finish()
}

fn limit(bytes: u64) -> RateLimit {
    let limits = Limits { packets: None, bytes: Some(Rate { per_second: bytes, burst: 10_000 }) };
    RateLimit::new(&limits, None).unwrap()
}

/// An IPv4 packet of `len` bytes with these tags and this type of service.
fn ipv4(tags: usize, tos: u8, len: usize) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend([0x81, 0, 0, 5].repeat(tags));
    frame.extend([8, 0]);
    let ip = frame.len();
    frame.extend([0x45, tos, 0, 0, 0xab, 0xcd, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let sum = checksum(&frame[ip..]);
    frame[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
    frame.resize(len.max(frame.len()), 0);
    frame
}

fn ipv6(class: u8) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend([0x86, 0xdd, 0x60 | class >> 4, class << 4 | 7]);
    frame.resize(14 + 40, 9);
    frame
}

fn is_marked(frame: &[u8], ip: usize) -> bool {
    frame[ip + 1] & 3 == 3
}

fn push(shaper: &mut Shaper, frame: Vec<u8>, now: u64) {
    let cost = WireCost { packets: 1, bytes: frame.len() as u64 };
    shaper.push(Delayed { from: PortId(0), header: Header::NONE, frame }, cost, now);
}

#[test]
fn marks_leave_the_checksum_right() {
    for tags in 0..=2 {
        for tos in 0..=255 {
            let (before, mut frame) = (ipv4(tags, tos, 100), ipv4(tags, tos, 100));
            let ip = 14 + 4 * tags;
            assert_eq!(mark(&mut frame), tos & 3 != 0);
            assert_eq!(frame[ip + 1], if tos & 3 == 0 { tos } else { tos | 3 });
            assert_eq!(checksum(&frame[ip..ip + 20]), 0, "{tos}");
            let touched = |at: &usize| [ip + 1, ip + 10, ip + 11].contains(at);
            assert!((0..100).all(|at| before[at] == frame[at] || touched(&at)));
        }
    }
    assert!(!mark(&mut ipv4(3, 2, 100)), "too deep");
}

#[test]
fn marks_of_ipv6_touch_two_bits() {
    for class in 0..=255 {
        let mut frame = ipv6(class);
        assert_eq!(mark(&mut frame), class & 3 != 0);
        assert_eq!(frame, ipv6(if class & 3 == 0 { class } else { class | 3 }));
    }
}

proptest! {
    #[test]
    fn no_frame_is_too_short_or_too_strange_to_be_looked_at(mut frame: Vec<u8>, ipv4: bool) {
        if frame.len() > 14 {
            frame[12..14].copy_from_slice(if ipv4 { &[8, 0] } else { &[0x86, 0xdd] });
        }
        let before = frame.clone();
        prop_assert!(mark(&mut frame) || frame == before);
    }

    #[test]
    fn frames_leave_in_order_and_all_are_counted(steps in proptest::collection::vec((0..60u64, 0..4u8), 1..300)) {
        let mut shaper = Shaper::default();
        let (mut now, mut pushed, mut popped, mut last) = (0, 0u32, 0, None);
        let mut signals = Signals::default();
        for (wait, step) in steps {
            now += wait * MILLI;
            if step > 0 {
                let mut frame = ipv4(0, 0, 100);
                frame[30..34].copy_from_slice(&pushed.to_be_bytes());
                push(&mut shaper, frame, now);
                pushed += 1;
            } else if let Some((Delayed { frame, .. }, _)) = shaper.pop(now, &mut signals) {
                popped += 1;
                let number = u32::from_be_bytes(frame[30..34].try_into().unwrap());
                prop_assert!(last.is_none_or(|last| last < number));
                last = Some(number);
            }
        }
        prop_assert_eq!(popped + (signals.dropped.len() + shaper.len()) as u64, u64::from(pushed));
        prop_assert_eq!(shaper.cost.packets, shaper.len() as u64);
    }
}

#[test]
fn the_queue_is_bounded_in_time_bytes_and_frames() {
    let bytes = |rate| {
        let (limit, mut full) = (limit(rate), Shaper::default());
        while full.has_room(WireCost { packets: 1, bytes: 1500 }, &limit) {
            push(&mut full, vec![0; 1500], 0);
        }
        full.cost.bytes
    };
    assert_eq!(bytes(1_250_000_000), (4 << 20) / 1500 * 1500, "10 Gbit/s");
    assert_eq!(bytes(12_500_000), 12_500_000 / 20 / 1500 * 1500, "50 ms at 100 Mbit/s");
    assert_eq!(bytes(1000), (64 << 10) / 1500 * 1500, "the largest frame");
    let mut small = Shaper::default();
    while small.has_room(WireCost { packets: 1, bytes: 60 }, &limit(1 << 40)) {
        push(&mut small, vec![0; 60], 0);
    }
    assert_eq!(small.len(), MAX_FRAMES);
    let packets = Limits { packets: Some(Rate { per_second: 100, burst: 1 }), bytes: None };
    let packets = RateLimit::new(&packets, None).unwrap();
    let huge = WireCost { packets: 2000, bytes: 65_000 };
    let mut shaper = Shaper::default();
    assert!(shaper.has_room(huge, &packets), "one always finds room");
    push(&mut shaper, vec![0; 60], 0);
    assert!(!shaper.has_room(huge, &packets));
    (0..4).for_each(|_| push(&mut shaper, vec![0; 60], 0));
    assert!(!shaper.has_room(WireCost { packets: 1, bytes: 60 }, &packets), "50 ms are five packets");
}

/// Sends a queue of `tos` at a millisecond a frame for so many seconds, always with `depth` frames in it.
fn standing(tos: u8, depth: usize, seconds: u64) -> (Signals, u64) {
    let mut shaper = Shaper::default();
    let (mut signals, mut marks) = (Signals::default(), 0);
    for now in (0..seconds * 1000).map(|milli| milli * MILLI) {
        while shaper.len() < depth {
            push(&mut shaper, ipv4(0, tos, 1000), now);
        }
        let (Delayed { frame, .. }, _) = shaper.pop(now, &mut signals).unwrap();
        marks += u64::from(is_marked(&frame, 14));
    }
    (signals, marks)
}

#[test]
fn a_queue_that_stands_is_told_of_more_and_more() {
    let (signals, marks) = standing(2, 20, 1);
    assert!(signals.dropped.is_empty() && signals.marked == marks && marks >= 10, "{signals:?}");
    assert!(standing(2, 20, 4).1 > 4 * marks, "more of them");
    let (signals, marks) = standing(0, 20, 1);
    assert!(signals.dropped.len() >= 10 && signals.marked == 0 && marks == 0, "{signals:?}");
}

#[test]
fn a_short_queue_and_a_burst_are_let_be() {
    assert_eq!(standing(0, 4, 10).0, Signals::default(), "4 ms");
    let mut shaper = Shaper::default();
    let mut signals = Signals::default();
    (0..90).for_each(|_| push(&mut shaper, ipv4(0, 0, 1000), 0));
    for milli in 0..90 {
        assert!(shaper.pop(milli * MILLI, &mut signals).is_some());
    }
    assert_eq!((shaper.pop(90 * MILLI, &mut signals), signals), (None, Signals::default()));
}

#[test]
fn a_queue_of_one_frame_however_long_it_takes_is_let_be() {
    let mut shaper = Shaper::default();
    let mut signals = Signals::default();
    for now in (0..100).map(|frame| frame * 52 * MILLI) {
        while shaper.len() < 2 {
            push(&mut shaper, ipv4(0, 0, 65_000), now);
        }
        assert!(shaper.pop(now, &mut signals).is_some());
    }
    assert_eq!(signals, Signals::default());
}

#[test]
fn whoever_is_limited_no_more_waits_no_more() {
    let mut shaper = Shaper::default();
    (0..3).for_each(|frame| push(&mut shaper, vec![frame; 60], 0));
    assert_eq!(shaper.drain().map(|(delayed, _)| delayed.frame[0]).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(shaper.is_empty() && shaper.cost == WireCost::default());
}
