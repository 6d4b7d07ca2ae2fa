//! Every interleaving and every allowed reordering of one exchange, by model checking.
//!
//! The rings run over loom's atomics instead of memory. In each model one side publishes while the
//! other finds its ring empty, asks to be told, looks again and sleeps. Wrong is to sleep while
//! there is work and no notification (a lost wake-up), to see what shows an entry without what it
//! stands for, or to see half a burst. The same models over [`Words`] that lack one fence or one
//! order, or without the second look, must find that mistake: this shows that the models can, and
//! that nothing in the rings is there in vain.

use std::marker::PhantomData;
use std::sync::Arc;

use loom::sync::Notify;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;
use ringferry_memory::testing::{Order, TestWords, Width};
use ringferry_ring::{Buffer, Chain, Chains, Device, Driver, Parts, RingFeatures, Tables, Used, part_bytes};

const SIZE: u16 = 2;

/// Forced context switches in [`conversation`], the one model that is too large for all
/// interleavings: with three it takes a second, with five a quarter of a minute. One already finds
/// every mistake.
const PREEMPTIONS: usize = 3;

/// The memory-order guarantees that a side's [`Words`] keep; the mutants leave one out.
pub trait Promises: Send + 'static {
    const FULL_FENCE: bool = true;
    const ACQUIRE: Ordering = Ordering::Acquire;
    const RELEASE: Ordering = Ordering::Release;
    /// A 32-bit load is one load.
    const WHOLE: bool = true;
}

pub struct Sound;
impl Promises for Sound {}

pub struct NoFence;
impl Promises for NoFence {
    const FULL_FENCE: bool = false;
}

pub struct NoAcquire;
impl Promises for NoAcquire {
    const ACQUIRE: Ordering = Ordering::Relaxed;
}

pub struct NoRelease;
impl Promises for NoRelease {
    const RELEASE: Ordering = Ordering::Relaxed;
}

/// Only the packed ring has a 32-bit word that matters as a whole.
#[allow(dead_code, reason = "the split models do not tear words")]
pub struct Torn;
impl Promises for Torn {
    const WHOLE: bool = false;
}

/// One area of a ring. A cell holds the word that begins at its offset, whatever its width: a ring
/// reaches each word always with the same one.
pub struct Model<P> {
    cells: Arc<Vec<AtomicU64>>,
    promises: PhantomData<P>,
}

impl<P> Clone for Model<P> {
    fn clone(&self) -> Self {
        Model { cells: Arc::clone(&self.cells), promises: PhantomData }
    }
}

impl<P: Promises> TestWords for Model<P> {
    fn size(&self) -> usize {
        2 * self.cells.len()
    }
    fn load(&self, at: usize, width: Width, order: Order) -> u64 {
        let cell = &self.cells[at / 2];
        match (width, order) {
            (_, Order::Ordered) => cell.load(P::ACQUIRE),
            (Width::Four, Order::Relaxed) if !P::WHOLE => {
                let low = cell.load(Ordering::Relaxed) & 0xffff;
                low | cell.load(Ordering::Relaxed) & 0xffff_0000
            }
            (_, Order::Relaxed) => cell.load(Ordering::Relaxed),
        }
    }
    fn store(&self, at: usize, _: Width, order: Order, value: u64) {
        self.cells[at / 2].store(value, if order == Order::Ordered { P::RELEASE } else { Ordering::Relaxed });
    }
    fn fence() {
        if P::FULL_FENCE {
            fence(Ordering::SeqCst);
        }
    }
}

/// The models use no indirect descriptors.
struct NoTables;
impl Tables for NoTables {
    fn descriptor(&mut self, _: u64) -> Option<[u8; 16]> {
        None
    }
}

type Pair<D, V> = (Driver<Model<D>, u16>, Device<Model<V>>);

/// Both halves over the same cells, after one chain has made the whole round, asked for by both:
/// event words are stale, indexes are not zero, and notifications are off.
fn pair<D: Promises, V: Promises>(features: RingFeatures) -> Pair<D, V> {
    let areas = part_bytes(SIZE, features.packed)
        .map(|len| Arc::new((0..len.div_ceil(2)).map(|_| AtomicU64::new(0)).collect::<Vec<_>>()));
    let mut driver = Driver::new(parts(&areas), features, None).unwrap();
    let base = u16::from(features.packed) << 15;
    let mut device = Device::new(parts(&areas), features, base, None).unwrap();
    send(&mut driver, 0);
    driver.publish();
    let chain = receive(&mut device, 0).expect("the first chain");
    device.complete(chain.done(7));
    device.publish();
    assert!(reap(&mut driver, 0));
    (driver, device)
}

fn parts<P: Promises>(areas: &[Arc<Vec<AtomicU64>>; 3]) -> Parts<Model<P>> {
    let [desc, driver, device] =
        areas.each_ref().map(|cells| Model { cells: Arc::clone(cells), promises: PhantomData });
    Parts { size: SIZE, desc, driver, device }
}

fn buffer(token: u16) -> Buffer {
    Buffer { addr: 0x1000 + u64::from(token), len: 100 + u32::from(token) }
}

/// Adds a chain of one writable buffer.
fn send<P: Promises>(driver: &mut Driver<Model<P>, u16>, token: u16) {
    driver.add(&[], &[buffer(token)], token).unwrap();
}

/// Takes what there is, at most `max` chains.
fn take<P: Promises>(device: &mut Device<Model<P>>, max: usize) -> Chains {
    let mut chains = Chains::new();
    device.take(max, &mut NoTables, &mut chains);
    assert_eq!(device.fault(), None, "stale index, ring entry or descriptor");
    chains
}

/// Takes the next chain, which must be the one of `token`.
fn receive<P: Promises>(device: &mut Device<Model<P>>, token: u16) -> Option<Chain> {
    let chains = take(device, 1);
    let chain = chains.get(0)?;
    assert_eq!(chains.writable(&chain), [buffer(token)], "stale descriptor");
    Some(chain)
}

/// Collects the next chain, which must be the one of `token`.
fn reap<P: Promises>(driver: &mut Driver<Model<P>, u16>, token: u16) -> bool {
    let used = driver.collect();
    assert_eq!(driver.fault(), None, "stale used element");
    assert!(used.is_none_or(|Used { token: of, len, .. }| (of, len) == (token, 7)), "stale used element");
    used.is_some()
}

fn check(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

/// The driver publishes a chain while the device goes to sleep, after a second look unless
/// `careless`.
pub fn kick<D: Promises, V: Promises>(features: RingFeatures, careless: bool) {
    check(None, move || {
        let (mut driver, mut device) = pair::<D, V>(features);
        let driver = thread::spawn(move || {
            send(&mut driver, 1);
            driver.publish()
        });
        let served = receive(&mut device, 1).is_some()
            || (device.enable_kicks() && !careless && {
                assert!(receive(&mut device, 1).is_some(), "told of work that is not there");
                true
            });
        let kicked = driver.join().unwrap();
        assert!(served || kicked, "lost wake-up: the device sleeps");
    });
}

/// The device completes a chain, having written one word of its buffer, while the driver goes to
/// sleep, after a second look unless `careless`.
pub fn call<D: Promises, V: Promises>(features: RingFeatures, careless: bool) {
    check(None, move || {
        let (mut driver, mut device) = pair::<D, V>(features);
        let word = Arc::new(AtomicU64::new(0));
        send(&mut driver, 1);
        driver.publish();
        let chain = receive(&mut device, 1).expect("the chain");
        let device = thread::spawn({
            let word = Arc::clone(&word);
            move || {
                word.store(1, Ordering::Relaxed);
                device.complete(chain.done(7));
                device.publish()
            }
        });
        let served = reap(&mut driver, 1)
            || (driver.enable_calls() && !careless && {
                assert!(reap(&mut driver, 1), "told of work that is not there");
                true
            });
        assert!(!served || word.load(Ordering::Relaxed) == 1, "stale buffer");
        let called = device.join().unwrap();
        assert!(served || called, "lost wake-up: the driver sleeps");
    });
}

/// The device completes two chains one by one while the driver goes to sleep until three quarters
/// of them are back, which of two is both. In a packed ring it must look again at the first.
pub fn delayed_call<D: Promises, V: Promises>(features: RingFeatures, careless: bool) {
    check(None, move || {
        let (mut driver, mut device) = pair::<D, V>(features);
        if features.packed {
            // The event word is left at the first of the two; in a split ring it would count.
            assert!(!driver.enable_calls());
            driver.disable_calls();
        }
        send(&mut driver, 1);
        send(&mut driver, 2);
        driver.publish();
        let chains = [receive(&mut device, 1).unwrap(), receive(&mut device, 2).unwrap()];
        let device = thread::spawn(move || {
            chains.map(|chain| {
                device.complete(chain.done(7));
                device.publish()
            })
        });
        let enough = driver.enable_calls_delayed() && !careless;
        if enough {
            assert!(reap(&mut driver, 1), "told of work that is not there");
            assert!(features.packed || reap(&mut driver, 2), "told of work that is not there");
        }
        let [first, second] = device.join().unwrap();
        // Without EVENT_IDX, and for what was there before it asked, nobody can wait for the second.
        assert!(!(first && features.event_idx), "called before the event");
        assert!(enough || first || second, "lost wake-up: the driver sleeps");
    });
}

/// The driver publishes a chain of two buffers: the device sees both or none.
pub fn whole_chain<D: Promises, V: Promises>(features: RingFeatures) {
    check(None, move || {
        let (mut driver, mut device) = pair::<D, V>(features);
        let driver = thread::spawn(move || {
            driver.add(&[buffer(1)], &[buffer(2)], 1).unwrap();
            driver.publish();
        });
        let chains = take(&mut device, 1);
        if let Some(chain) = chains.get(0) {
            assert_eq!(chains.readable(&chain), [buffer(1)], "stale descriptor");
            assert_eq!(chains.writable(&chain), [buffer(2)], "stale descriptor");
        }
        driver.join().unwrap();
    });
}

/// The driver publishes two chains at once: the device sees both or none.
pub fn chain_burst<D: Promises, V: Promises>(features: RingFeatures) {
    check(None, move || {
        let (mut driver, mut device) = pair::<D, V>(features);
        let driver = thread::spawn(move || {
            send(&mut driver, 1);
            send(&mut driver, 2);
            driver.publish();
        });
        let chains = take(&mut device, 2);
        assert_ne!(chains.len(), 1, "stale burst: half of it");
        for (i, chain) in chains.iter().enumerate() {
            assert_eq!(chains.writable(chain), [buffer(i as u16 + 1)], "stale descriptor");
        }
        driver.join().unwrap();
    });
}

/// The device publishes two completions at once, as for one packet in two receive buffers: the
/// driver sees both or none. With IN_ORDER and nothing written, one used element stands for both.
pub fn used_burst<D: Promises, V: Promises>(features: RingFeatures) {
    check(None, move || {
        let (mut driver, mut device) = pair::<D, V>(features);
        let writes = !features.in_order;
        for token in 1..=2 {
            let sent = [buffer(token)];
            let (readable, writable) = if writes { (&[][..], &sent[..]) } else { (&sent[..], &[][..]) };
            driver.add(readable, writable, token).unwrap();
        }
        driver.publish();
        let chains = take(&mut device, 2);
        let device = thread::spawn(move || {
            device.complete_all(chains.iter().map(|chain| chain.done(if writes { 7 } else { 0 })));
            device.publish();
        });
        let mut back = Vec::new();
        driver.collect_each(2, |Used { token, len, .. }| back.push((token, len)));
        assert_eq!(driver.fault(), None, "stale used element");
        assert_ne!(back.len(), 1, "stale burst: half of it");
        let len = if writes { 7 } else { 0 };
        let expected = [(1, len), (2, len)];
        assert!(back.is_empty() || back == expected, "stale used element");
        device.join().unwrap();
    });
}

/// Both sides at once, with doorbells: the device serves two chains, the driver waits for both.
pub fn conversation(features: RingFeatures) {
    check(Some(PREEMPTIONS), move || {
        let (mut driver, mut device) = pair::<Sound, Sound>(features);
        let (kick, call) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let other = thread::spawn({
            let (kick, call) = (Arc::clone(&kick), Arc::clone(&call));
            move || {
                for token in 1..=2 {
                    let chain = loop {
                        match receive(&mut device, token) {
                            Some(chain) => break chain,
                            None if device.enable_kicks() => {}
                            None => kick.wait(),
                        }
                    };
                    device.disable_kicks();
                    device.complete(chain.done(7));
                    if device.publish() {
                        call.notify();
                    }
                }
            }
        });
        for token in 1..=2 {
            send(&mut driver, token);
            if driver.publish() {
                kick.notify();
            }
        }
        for token in 1..=2 {
            while !reap(&mut driver, token) {
                if !driver.enable_calls() {
                    call.wait();
                }
            }
            driver.disable_calls();
        }
        other.join().unwrap();
    });
}

/// The models that must hold for a layout, and the mistakes they must find in it.
#[macro_export]
macro_rules! models {
    ($packed:expr) => {
        const fn features(event_idx: bool, in_order: bool) -> RingFeatures {
            RingFeatures { indirect: false, event_idx, packed: $packed, in_order }
        }

        /// Without and with EVENT_IDX, and with IN_ORDER besides.
        fn each(model: impl Fn(RingFeatures)) {
            for (event_idx, in_order) in [(false, false), (true, false), (true, true)] {
                model(features(event_idx, in_order));
            }
        }

        const FLAGS: RingFeatures = features(false, false);
        const EVENT: RingFeatures = features(true, false);
        const BATCH: RingFeatures = features(true, true);

        #[test]
        fn a_device_never_sleeps_through_a_chain() {
            each(|features| kick::<Sound, Sound>(features, false));
        }

        #[test]
        fn a_driver_never_sleeps_through_a_completion() {
            each(|features| call::<Sound, Sound>(features, false));
        }

        #[test]
        fn a_driver_never_sleeps_through_the_completion_it_waits_for() {
            each(|features| delayed_call::<Sound, Sound>(features, false));
        }

        #[test]
        fn a_device_sees_a_whole_burst_or_nothing() {
            each(|features| {
                whole_chain::<Sound, Sound>(features);
                chain_burst::<Sound, Sound>(features);
            });
        }

        #[test]
        fn a_driver_sees_a_whole_burst_or_nothing() {
            each(used_burst::<Sound, Sound>);
        }

        #[test]
        fn two_chains_and_two_doorbells() {
            conversation(FLAGS);
            conversation(EVENT);
        }

        macro_rules! mistake {
            ($name:ident, $expected:literal, $model:expr) => {
                #[test]
                #[should_panic(expected = $expected)]
                fn $name() {
                    $model;
                }
            };
        }

        mod without_a_fence {
            use super::*;

            mistake!(publish_loses_a_kick, "lost wake-up", kick::<NoFence, Sound>(FLAGS, false));
            mistake!(publish_loses_a_kick_by_event, "lost wake-up", kick::<NoFence, Sound>(EVENT, false));
            mistake!(enable_kicks_loses_a_kick, "lost wake-up", kick::<Sound, NoFence>(FLAGS, false));
            mistake!(
                enable_kicks_loses_a_kick_by_event,
                "lost wake-up",
                kick::<Sound, NoFence>(EVENT, false)
            );
            mistake!(publish_loses_a_call, "lost wake-up", call::<Sound, NoFence>(FLAGS, false));
            mistake!(publish_loses_a_call_by_event, "lost wake-up", call::<Sound, NoFence>(EVENT, false));
            mistake!(publish_loses_a_call_in_order, "lost wake-up", call::<Sound, NoFence>(BATCH, false));
            mistake!(enable_calls_loses_a_call, "lost wake-up", call::<NoFence, Sound>(FLAGS, false));
            mistake!(
                enable_calls_loses_a_call_by_event,
                "lost wake-up",
                call::<NoFence, Sound>(EVENT, false)
            );
            mistake!(delayed_call_is_lost, "lost wake-up", delayed_call::<NoFence, Sound>(EVENT, false));
        }

        mod without_a_second_look {
            use super::*;

            mistake!(a_kick_is_lost, "lost wake-up", kick::<Sound, Sound>(FLAGS, true));
            mistake!(a_kick_is_lost_by_event, "lost wake-up", kick::<Sound, Sound>(EVENT, true));
            mistake!(a_call_is_lost, "lost wake-up", call::<Sound, Sound>(FLAGS, true));
            mistake!(a_call_is_lost_by_event, "lost wake-up", call::<Sound, Sound>(EVENT, true));
            mistake!(a_delayed_call_is_lost, "lost wake-up", delayed_call::<Sound, Sound>(EVENT, true));
        }

        mod without_an_order {
            use super::*;

            mistake!(driver_publishes_a_chain_too_early, "stale", kick::<NoRelease, Sound>(EVENT, false));
            mistake!(device_reads_a_chain_too_early, "stale", kick::<Sound, NoAcquire>(EVENT, false));
            mistake!(driver_publishes_half_a_chain, "stale", whole_chain::<NoRelease, Sound>(EVENT));
            mistake!(device_reads_half_a_chain, "stale", whole_chain::<Sound, NoAcquire>(EVENT));
            mistake!(driver_publishes_half_a_burst, "stale", chain_burst::<NoRelease, Sound>(EVENT));
            mistake!(device_reads_half_a_burst, "stale", chain_burst::<Sound, NoAcquire>(EVENT));
            mistake!(device_publishes_too_early, "stale", call::<Sound, NoRelease>(EVENT, false));
            mistake!(driver_reads_too_early, "stale", call::<NoAcquire, Sound>(EVENT, false));
            mistake!(device_publishes_half_a_burst, "stale", used_burst::<Sound, NoRelease>(EVENT));
            mistake!(driver_reads_half_a_burst, "stale", used_burst::<NoAcquire, Sound>(EVENT));
        }
    };
}
