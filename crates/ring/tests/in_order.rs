//! IN_ORDER (VIRTIO 1.4, 2.7.9 and 2.8.9): chains without writable buffers share used elements, and a driver completes
//! all chains that one element covers. The tests count elements in the ring's memory.

mod common;

use common::{AVAIL, BASE, Heap, Memory, Places, Random, USED, WRITE, bare, fresh_base};
use ringferry_memory::Words;
use ringferry_ring::{Buffer, Chains, Device, Driver, LayoutError, MAX_SIZE, Parts, RingFeatures, Used};

const SIZE: u16 = 16;

/// A used element or descriptor: entry of the ring, id, length, and whether something was written.
type Element = (usize, u32, u32, Option<bool>);

/// The used elements that are in the ring, from entry 0 on, each of which was `u64::MAX` or available.
fn elements(parts: &Parts<Heap>, packed: bool) -> Vec<Element> {
    let entry = |i: usize| {
        if packed {
            let second = parts.desc.load64(16 * i + 8);
            let flags = (second >> 48) as u16;
            let used = flags & (AVAIL | USED) == AVAIL | USED;
            used.then_some((i, (second >> 32) as u32 & 0xffff, second as u32, Some(flags & WRITE != 0)))
        } else {
            let [id, len] = [4, 8].map(|at| parts.device.load32(at + 8 * i));
            (id != u32::MAX).then_some((i, id, len, None))
        }
    };
    (0..SIZE.into()).filter_map(entry).collect()
}

/// IN_ORDER keeps what it knows of chains by their position in the ring, so any size beyond the largest that a queue may have is refused.
#[test]
fn cve_2026_50626_no_queue_is_larger_than_the_largest_with_in_order_either() {
    for packed in [false, true] {
        let features = RingFeatures { in_order: true, ..bare(packed) };
        let places = Places::new(u16::MAX, packed);
        let memory = <Heap as Memory>::new(places.bytes(0));
        for (size, good) in [(0, false), (MAX_SIZE, true), (MAX_SIZE + 1, false), (u16::MAX, false)] {
            let parts = Parts { size, ..places.parts(&memory) };
            let refused =
                (!good).then_some(LayoutError::Size(size.into(), if packed { "packed" } else { "split" }));
            assert_eq!(
                Device::new(parts.clone(), features, fresh_base(packed), None).err(),
                refused,
                "{size}"
            );
            assert_eq!(Driver::<_, ()>::new(parts, features, None).err(), refused, "{size}");
        }
    }
}

/// Random chains, completed by some calls: one element per group of chains with nothing to write and
/// the first behind them that has something, at the entry of the group's first chain.
#[test]
fn s2_7_9_s2_8_9_silent_chains_share_an_element() {
    for packed in [false, true] {
        for seed in 0..500 {
            grouped(packed, &mut Random::new(seed));
        }
    }
}

fn grouped(packed: bool, random: &mut Random) {
    let features = RingFeatures { in_order: true, ..bare(packed) };
    let places = Places::new(SIZE, packed);
    let memory = <Heap as Memory>::new(places.bytes(0));
    let parts = places.parts(&memory);
    let mut driver = Driver::new(parts.clone(), features, None).unwrap();
    let mut device = Device::new(parts.clone(), features, fresh_base(packed), None).unwrap();
    if !packed {
        parts.device.fill(4, &[0xff; 8 * SIZE as usize]);
    }
    let (mut silent, mut ids) = (Vec::new(), Vec::new());
    loop {
        let (readable, writable) = (1 + random.below(2), random.below(3) / 2);
        let buffer = [Buffer { addr: BASE, len: 10 }; 2];
        let Ok(id) = driver.add(&buffer[..readable], &buffer[..writable], silent.len()) else { break };
        ids.push(id);
        silent.push(writable == 0);
    }
    driver.publish();
    let mut chains = Chains::new();
    assert_eq!(device.take(99, &mut memory.tables(), &mut chains), silent.len());
    let (mut at, mut expected, mut call) = (0, Vec::new(), Vec::new());
    let mut open: Option<usize> = None;
    for (i, chain) in chains.iter().enumerate() {
        let begin = open.unwrap_or(at);
        at += usize::from(chain.slots);
        call.push(chain.done(if silent[i] { 0 } else { i as u32 }));
        let ends = random.below(4) == 0 || i + 1 == silent.len();
        open = (silent[i] && !ends).then_some(begin);
        if open.is_none() {
            let written = if silent[i] { 0 } else { i as u32 };
            expected.push((begin, chain.id.into(), written, packed.then_some(!silent[i])));
        }
        if ends {
            device.complete_all(call.drain(..));
        }
    }
    device.publish();
    assert_eq!(elements(&parts, packed), expected, "{packed} {silent:?}");
    for (token, silent) in silent.iter().enumerate() {
        let len = if *silent { 0 } else { token as u32 };
        assert_eq!(driver.collect(), Some(Used { id: ids[token], token, len }));
    }
    assert_eq!((driver.collect(), driver.fault(), driver.free()), (None, None, SIZE));
}

#[test]
fn a_transmit_burst_is_one_element() {
    for packed in [false, true] {
        let features = RingFeatures { in_order: true, ..bare(packed) };
        let places = Places::new(SIZE, packed);
        let memory = <Heap as Memory>::new(places.bytes(0));
        let parts = places.parts(&memory);
        let mut driver = Driver::new(parts.clone(), features, None).unwrap();
        let mut device = Device::new(parts.clone(), features, fresh_base(packed), None).unwrap();
        parts.device.fill(4, &vec![0xff; parts.device.len() - 4]);
        for token in 0..SIZE {
            driver.add(&[Buffer { addr: BASE, len: 10 }], &[], token).unwrap();
        }
        driver.publish();
        let mut chains = Chains::new();
        device.take(99, &mut memory.tables(), &mut chains);
        device.complete_all(chains.iter().map(|chain| chain.done(0)));
        device.publish();
        let last = u32::from(SIZE - 1);
        assert_eq!(elements(&parts, packed), [(0, last, 0, packed.then_some(false))]);
        assert_eq!(std::iter::from_fn(|| driver.collect()).count(), SIZE.into());
    }
}

/// A chain without a used element of its own counts as completely written.
#[test]
fn s2_7_9_s2_8_9_skipped_chains_report_all_that_was_writable() {
    for packed in [false, true] {
        let features = RingFeatures { in_order: true, ..bare(packed) };
        let places = Places::new(SIZE, packed);
        let memory = <Heap as Memory>::new(places.bytes(0));
        let parts = places.parts(&memory);
        let mut driver = Driver::new(parts.clone(), features, None).unwrap();
        let buffer = |len| Buffer { addr: BASE, len };
        driver.add(&[buffer(1)], &[buffer(20), buffer(300)], 0).unwrap();
        driver.add(&[], &[buffer(4000)], 1).unwrap();
        driver.add(&[buffer(50_000)], &[], 2).unwrap();
        driver.add(&[], &[buffer(600_000)], 3).unwrap();
        driver.publish();
        // One element for all four, in the place of the first.
        if packed {
            let flags = AVAIL | USED | WRITE;
            parts.desc.store64(8, 77 | 3 << 32 | u64::from(flags) << 48);
        } else {
            parts.device.store32(4, 5);
            parts.device.store32(8, 77);
            parts.device.store16(2, 4);
        }
        let lengths: Vec<_> = std::iter::from_fn(|| driver.collect()).map(|used| used.len).collect();
        assert_eq!(lengths, [320, 4000, 0, 77]);
        assert_eq!((driver.fault(), driver.free()), (None, SIZE));
    }
}

/// 2.7.9.1: with IN_ORDER a driver uses descriptors in ring order, beginning with the first, and each
/// chain's follow each other, across the end too.
#[test]
fn s2_7_9_1_descriptors_are_used_in_ring_order() {
    let places = Places::new(SIZE, false);
    let memory = <Heap as Memory>::new(places.bytes(0));
    let parts = places.parts(&memory);
    let features = RingFeatures { in_order: true, ..bare(false) };
    let mut driver = Driver::new(parts.clone(), features, None).unwrap();
    let mut device = Device::new(parts.clone(), features, 0, None).unwrap();
    let mut random = Random::new(1);
    let mut at = 0;
    for round in 0..500u16 {
        let count = 1 + random.below(5) as u16;
        let buffers = [Buffer { addr: BASE, len: 1 }; 5];
        driver.add(&buffers[..usize::from(count)], &[], 0).unwrap();
        driver.publish();
        assert_eq!(parts.driver.load16(4 + 2 * usize::from(round % SIZE)), at % SIZE);
        for i in 0..count {
            let [flags, next] =
                [12, 14].map(|word| parts.desc.load16(16 * usize::from((at + i) % SIZE) + word));
            assert_eq!(flags, u16::from(i + 1 < count));
            assert!(flags == 0 || next == (at + i + 1) % SIZE);
        }
        at += count;
        let mut chains = Chains::new();
        device.take(1, &mut memory.tables(), &mut chains);
        device.complete(chains.chain(0).done(0));
        device.publish();
        driver.collect().unwrap();
    }
}
