//! Each half of a packed ring against the plain one of [`reference`], for many laps: contents, ids,
//! lengths, order, every flag bit, and whether exactly the requested signals are sent.

mod common;
mod reference;

use std::collections::VecDeque;

use common::{Heap, Memory, Places, Random, features, fresh_base};
use reference::{EventSuppression, TABLE};
use ringferry_ring::{Buffer, Chains, Device, Driver, RingFeatures, Used};

/// Sizes with and without a power of two, and so small that everything is an edge.
const SIZES: [u16; 7] = [1, 2, 3, 5, 8, 17, 255];
const STEPS: usize = 20_000;

/// Up to `most` buffers, at least one.
fn shape(random: &mut Random, most: usize) -> (Vec<Buffer>, Vec<Buffer>) {
    let mut buffers = |count: usize| {
        (0..count).map(|_| Buffer { addr: random.bits(), len: (random.bits() >> 44) as u32 }).collect()
    };
    let all: Vec<Buffer> = buffers(1 + most.min(6));
    let count = 1 + random.below(most.min(6));
    let (readable, writable) = all[..count].split_at(random.below(count + 1));
    (readable.to_vec(), writable.to_vec())
}

#[test]
fn our_device_and_a_driver_by_the_letter() {
    for features in features(true) {
        for size in SIZES {
            device_by_the_letter(features, size);
        }
    }
}

fn device_by_the_letter(features: RingFeatures, size: u16) {
    let places = Places::new(size, true);
    let memory = <Heap as Memory>::new(places.bytes(TABLE * usize::from(size)));
    let parts = places.parts(&memory);
    let mut driver = reference::Driver::new(parts.clone(), memory.clone(), places.rest, features.in_order);
    let mut device = Device::new(parts, features, fresh_base(true), None).unwrap();
    let mut random = Random::new(size.into());
    let mut chains = Chains::new();
    // Added, taken, completed (with what was written), published.
    let (mut sent, mut held, mut done) = (VecDeque::new(), Vec::new(), VecDeque::new());
    let (mut unpublished, mut back) = (0, 0);
    let (mut taken, mut used, mut published) = (0u64, 0u64, 0u64);
    let mut event = EventSuppression::Enable;
    for _ in 0..STEPS {
        match random.below(8) {
            0..2 => {
                let (readable, writable) = shape(&mut random, size.into());
                let count = (readable.len() + writable.len()) as u64;
                let indirect = features.indirect && random.below(2) == 0;
                if if indirect { 1 } else { count } <= driver.free() {
                    driver.add(&readable, &writable, indirect, &mut random);
                    sent.push_back((readable, writable, if indirect { 1 } else { count }));
                }
            }
            2 => {
                event = EventSuppression::random(&mut random, features.event_idx, driver.next_used());
                driver.suppress(event);
            }
            3 => {
                chains.clear();
                let max = random.below(5);
                assert_eq!(device.take(max, &mut memory.tables(), &mut chains), max.min(sent.len()));
                for chain in chains.iter() {
                    let (readable, writable, slots) = sent.pop_front().unwrap();
                    assert_eq!(
                        (chains.readable(chain), chains.writable(chain)),
                        (&readable[..], &writable[..])
                    );
                    assert_eq!(u64::from(chain.slots), slots);
                    taken += slots;
                    held.push((*chain, readable, writable));
                }
            }
            4..6 => {
                let mut burst = Vec::new();
                for _ in 0..random.below(4).min(held.len()) {
                    let pick = if features.in_order { 0 } else { random.below(held.len()) };
                    let (chain, readable, writable) = held.remove(pick);
                    let room = writable.iter().map(|buffer| buffer.len).sum::<u32>();
                    let len = random.below(room as usize + 1) as u32;
                    burst.push(chain.done(len));
                    done.push_back((readable, writable, len));
                    used += u64::from(chain.slots);
                    unpublished += 1;
                }
                device.complete_all(burst);
            }
            6 => {
                // While it is not published, nothing of the burst is to be seen.
                for (chain, len) in
                    std::iter::from_fn(|| Some(driver.collect())).take_while(|all| !all.is_empty()).flatten()
                {
                    let (readable, writable, wrote) = done.pop_front().unwrap();
                    assert_eq!((chain.readable, chain.writable, len), (readable, writable, wrote));
                    back += 1;
                }
                assert_eq!(done.len(), unpublished);
                let call = device.publish();
                assert_eq!(call, event.fires(published, used, size.into()), "{event:?} {published} {used}");
                (published, unpublished) = (used, 0);
            }
            _ => {
                if random.below(2) == 0 {
                    assert_eq!(device.enable_kicks(), !sent.is_empty());
                    driver.check_suppression(if features.event_idx {
                        EventSuppression::At(taken)
                    } else {
                        EventSuppression::Enable
                    });
                } else {
                    device.disable_kicks();
                    driver.check_suppression(EventSuppression::Disable);
                }
            }
        }
        assert_eq!(device.fault(), None);
    }
    assert!(back > STEPS / 50 && published > 3 * u64::from(size).min(200), "{back} {published}");
}

#[test]
fn our_driver_and_a_device_by_the_letter() {
    for features in features(true) {
        for size in SIZES {
            driver_by_the_letter(features, size);
        }
    }
}

fn driver_by_the_letter(features: RingFeatures, size: u16) {
    let places = Places::new(size, true);
    let memory = <Heap as Memory>::new(places.bytes(places.table_bytes(4)));
    let parts = places.parts(&memory);
    let tables = features.indirect.then(|| places.tables(&memory, 4));
    let mut device = reference::Device::new(parts.clone(), memory.clone());
    let mut driver = Driver::new(parts, features, tables).unwrap();
    let mut random = Random::new(size.into());
    // Added, visible, taken, and what the driver must see.
    let (mut added, mut visible) = (VecDeque::new(), VecDeque::new());
    let (mut held, mut expected) = (VecDeque::new(), VecDeque::new());
    let (mut next, mut back, mut slots_added, mut slots_shown, mut slots_back) = (0u32, 0, 0u64, 0u64, 0u64);
    let mut event = EventSuppression::Enable;
    for _ in 0..STEPS {
        match random.below(8) {
            0..2 => {
                let (readable, writable) = shape(&mut random, size.into());
                let count = readable.len() + writable.len();
                let cost = if features.indirect && (2..=4).contains(&count) { 1 } else { count };
                let fits = cost <= driver.free().into();
                assert_eq!(driver.add(&readable, &writable, next).is_ok(), fits);
                if fits {
                    added.push_back((next, readable, writable, cost as u64));
                    next += 1;
                    slots_added += cost as u64;
                }
            }
            2 => {
                event = EventSuppression::random(&mut random, features.event_idx, device.next_avail());
                device.suppress(event);
            }
            3 => {
                let kick = driver.publish();
                assert_eq!(kick, event.fires(slots_shown, slots_added, size.into()), "{event:?}");
                slots_shown = slots_added;
                visible.append(&mut added);
            }
            4 => {
                for _ in 0..random.below(5) {
                    let chain = device.take();
                    assert_eq!(chain.is_some(), !visible.is_empty());
                    let Some(chain) = chain else { break };
                    let (token, readable, writable, slots) = visible.pop_front().unwrap();
                    assert_eq!((&chain.readable, &chain.writable), (&readable, &writable));
                    assert_eq!(chain.slots, slots);
                    assert!(held.iter().all(|(_, other): &(u32, reference::Chain)| other.id != chain.id));
                    held.push_back((token, chain));
                }
            }
            5 => {
                // A few used descriptors at once; with IN_ORDER each stands for a few chains.
                let mut batches = Vec::new();
                while random.below(3) > 0 && !held.is_empty() {
                    let count = if features.in_order { 1 + random.below(3).min(held.len() - 1) } else { 1 };
                    let mut batch = Vec::new();
                    for i in 0..count {
                        let pick = if features.in_order { 0 } else { random.below(held.len()) };
                        let (token, chain) = held.remove(pick).unwrap();
                        let len = if i + 1 < count { chain.room() } else { chain.room() / 2 };
                        expected.push_back((Used { id: chain.id, token, len }, chain.slots));
                        batch.push(chain);
                    }
                    batches.push(batch);
                }
                let batches: Vec<_> =
                    batches.iter().map(|all| (&all[..], all[all.len() - 1].room() / 2)).collect();
                device.complete(&batches);
            }
            6 => {
                for _ in 0..random.below(6) {
                    assert_eq!(driver.has_used(), !expected.is_empty());
                    let (used, slots) = expected.pop_front().unzip();
                    assert_eq!(driver.collect(), used);
                    back += usize::from(used.is_some());
                    slots_back += slots.unwrap_or(0);
                }
            }
            _ => match random.below(3) {
                0 => {
                    assert_eq!(driver.enable_calls(), !expected.is_empty());
                    device.check_suppression(if features.event_idx {
                        EventSuppression::At(slots_back)
                    } else {
                        EventSuppression::Enable
                    });
                }
                1 => {
                    assert_eq!(driver.enable_calls_delayed(), !expected.is_empty());
                    let at = slots_back + (slots_shown - slots_back) * 3 / 4;
                    device.check_suppression(if features.event_idx {
                        EventSuppression::At(at)
                    } else {
                        EventSuppression::Enable
                    });
                }
                _ => {
                    driver.disable_calls();
                    device.check_suppression(EventSuppression::Disable);
                }
            },
        }
        assert_eq!(driver.fault(), None);
        assert_eq!(u64::from(size - driver.free()), slots_added - slots_back);
    }
    assert!(back > STEPS / 50 && slots_back > 3 * u64::from(size).min(200), "{back} {slots_back}");
}
