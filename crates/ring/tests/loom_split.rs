//! Every interleaving and every allowed reordering of one exchange, by model checking.
//!
//! The rings run over loom's atomics instead of memory. In each model one side publishes while the
//! other finds its ring empty, asks to be told, looks again and sleeps. Wrong is to sleep while
//! there is work and no notification (a lost wake-up), or to see an index without what it stands
//! for. The same models over [`Words`] that lack one fence or one order must find that mistake:
//! this shows that the models can, and that nothing in the rings is there in vain.

use std::marker::PhantomData;
use std::sync::Arc;

use loom::sync::Notify;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;
use ringferry_memory::{Entry, WordTable, Words};
use ringferry_ring::split::driver::Used;
use ringferry_ring::split::{Device, Driver, Layout, avail_bytes, desc_bytes, used_bytes};
use ringferry_ring::{Buffer, Chains, RingFeatures, Tables};

const SIZE: u16 = 2;

/// Forced context switches in [`conversation`], the one model that is too large for all interleavings:
/// with three it takes a second, with five a quarter of a minute. One already finds every mistake below.
const PREEMPTIONS: usize = 3;

/// What a side's [`Words`] keep of their promises.
trait Promises: Send + 'static {
    const FULL_FENCE: bool = true;
    const ACQUIRE: Ordering = Ordering::Acquire;
    const RELEASE: Ordering = Ordering::Release;
}

struct Sound;
impl Promises for Sound {}

struct NoFence;
impl Promises for NoFence {
    const FULL_FENCE: bool = false;
}

struct NoAcquire;
impl Promises for NoAcquire {
    const ACQUIRE: Ordering = Ordering::Relaxed;
}

struct NoRelease;
impl Promises for NoRelease {
    const RELEASE: Ordering = Ordering::Relaxed;
}

/// One area of a ring. A cell holds the word that begins at its offset, whatever its width: a ring
/// reaches each word always with the same one.
struct Model<P> {
    cells: Arc<Vec<AtomicU64>>,
    promises: PhantomData<P>,
}

impl<P> Clone for Model<P> {
    fn clone(&self) -> Self {
        Model { cells: Arc::clone(&self.cells), promises: PhantomData }
    }
}

impl<P: Promises> Model<P> {
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.cells[at / 2].load(order)
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.cells[at / 2].store(value, order);
    }
}

impl<P: Promises> Words for Model<P> {
    type Table<E: Entry> = WordTable<Self>;

    fn table<E: Entry>(&self, at: usize, count: u16) -> Option<WordTable<Self>> {
        WordTable::new::<E>(self.clone(), at, count)
    }

    fn len(&self) -> usize {
        2 * self.cells.len()
    }
    fn load16(&self, at: usize) -> u16 {
        self.load(at, Ordering::Relaxed) as u16
    }
    fn load16_acquire(&self, at: usize) -> u16 {
        self.load(at, P::ACQUIRE) as u16
    }
    fn store16(&self, at: usize, value: u16) {
        self.store(at, value.into(), Ordering::Relaxed);
    }
    fn store16_release(&self, at: usize, value: u16) {
        self.store(at, value.into(), P::RELEASE);
    }
    fn load32(&self, at: usize) -> u32 {
        self.load(at, Ordering::Relaxed) as u32
    }
    fn store32(&self, at: usize, value: u32) {
        self.store(at, value.into(), Ordering::Relaxed);
    }
    fn load64(&self, at: usize) -> u64 {
        self.load(at, Ordering::Relaxed)
    }
    fn store64(&self, at: usize, value: u64) {
        self.store(at, value, Ordering::Relaxed);
    }
    fn full_fence() {
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

/// Both halves over the same cells, after one chain has made the whole round: event words are
/// stale, indexes are not zero, and notifications are off.
fn pair<D: Promises, V: Promises>(event_idx: bool) -> Pair<D, V> {
    let area = |len: usize| Arc::new((0..len / 2).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
    let areas = [area(desc_bytes(SIZE)), area(avail_bytes(SIZE)), area(used_bytes(SIZE))];
    let features = RingFeatures { indirect: false, event_idx };
    let mut driver = Driver::new(layout(&areas), features, None);
    let mut device = Device::new(layout(&areas), features);
    send(&mut driver, 0);
    driver.publish();
    let head = receive(&mut device, 0).expect("the first chain");
    device.complete(head, 0);
    device.publish();
    assert!(driver.collect().is_some());
    (driver, device)
}

fn layout<P: Promises>(areas: &[Arc<Vec<AtomicU64>>; 3]) -> Layout<Model<P>> {
    let [desc, avail, used] =
        areas.each_ref().map(|cells| Model { cells: Arc::clone(cells), promises: PhantomData });
    Layout::new(SIZE, desc, avail, used).unwrap()
}

fn buffer(token: u16) -> Buffer {
    Buffer { addr: 0x1000 + u64::from(token), len: 100 + u32::from(token) }
}

fn send<P: Promises>(driver: &mut Driver<Model<P>, u16>, token: u16) {
    driver.add(&[buffer(token)], &[], token).unwrap();
}

/// Takes the next chain, which must be the one of `token`, and returns its head.
fn receive<P: Promises>(device: &mut Device<Model<P>>, token: u16) -> Option<u16> {
    let mut chains = Chains::new();
    if device.take(1, &mut NoTables, &mut chains) == 0 {
        assert_eq!(device.fault(), None, "stale index or ring entry");
        return None;
    }
    let chain = chains.chain(0);
    assert_eq!(chains.readable(&chain), [buffer(token)], "stale descriptor");
    Some(chain.head)
}

/// Collects the next chain, which must be the one of `token`.
fn reap<P: Promises>(driver: &mut Driver<Model<P>, u16>, token: u16) -> bool {
    let used = driver.collect();
    assert_eq!(driver.fault(), None, "stale used element");
    assert!(used.is_none_or(|used| used == Used { token, len: 7 }), "stale used element");
    used.is_some()
}

fn check(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

/// The driver publishes a chain while the device goes to sleep.
fn kick<D: Promises, V: Promises>(event_idx: bool) {
    check(None, move || {
        let (mut driver, mut device) = pair::<D, V>(event_idx);
        let driver = thread::spawn(move || {
            send(&mut driver, 1);
            driver.publish()
        });
        let served = receive(&mut device, 1).is_some()
            || (device.enable_kicks() && {
                assert!(receive(&mut device, 1).is_some(), "told of work that is not there");
                true
            });
        let kicked = driver.join().unwrap();
        assert!(served || kicked, "lost wake-up: the device sleeps");
    });
}

/// The device completes a chain, having written one word of its buffer, while the driver goes to
/// sleep.
fn call<D: Promises, V: Promises>(event_idx: bool) {
    check(None, move || {
        let (mut driver, mut device) = pair::<D, V>(event_idx);
        let word = Arc::new(AtomicU64::new(0));
        send(&mut driver, 1);
        driver.publish();
        let head = receive(&mut device, 1).expect("the chain");
        let device = thread::spawn({
            let word = Arc::clone(&word);
            move || {
                word.store(1, Ordering::Relaxed);
                device.complete(head, 7);
                device.publish()
            }
        });
        let served = reap(&mut driver, 1)
            || (driver.enable_calls() && {
                assert!(reap(&mut driver, 1), "told of work that is not there");
                true
            });
        assert!(!served || word.load(Ordering::Relaxed) == 1, "stale buffer");
        let called = device.join().unwrap();
        assert!(served || called, "lost wake-up: the driver sleeps");
    });
}

/// The device completes two chains one by one while the driver goes to sleep until three quarters
/// of them are back, which of two is both.
fn delayed_call<D: Promises, V: Promises>(event_idx: bool) {
    check(None, move || {
        let (mut driver, mut device) = pair::<D, V>(event_idx);
        send(&mut driver, 1);
        send(&mut driver, 2);
        driver.publish();
        let heads = [receive(&mut device, 1).unwrap(), receive(&mut device, 2).unwrap()];
        let device = thread::spawn(move || {
            heads.map(|head| {
                device.complete(head, 7);
                device.publish()
            })
        });
        let enough = driver.enable_calls_delayed();
        if enough {
            assert!(reap(&mut driver, 1) && reap(&mut driver, 2), "told of work that is not there");
        }
        let [first, second] = device.join().unwrap();
        assert!(!(first && event_idx), "called before the event");
        assert!(enough || first || second, "lost wake-up: the driver sleeps");
    });
}

/// Both sides at once, with doorbells: the device serves two chains, the driver waits for both.
fn conversation(event_idx: bool) {
    check(Some(PREEMPTIONS), move || {
        let (mut driver, mut device) = pair::<Sound, Sound>(event_idx);
        let (kick, call) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let other = thread::spawn({
            let (kick, call) = (Arc::clone(&kick), Arc::clone(&call));
            move || {
                for token in 1..=2 {
                    let head = loop {
                        match receive(&mut device, token) {
                            Some(head) => break head,
                            None if device.enable_kicks() => {}
                            None => kick.wait(),
                        }
                    };
                    device.disable_kicks();
                    device.complete(head, 7);
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

#[test]
fn a_device_never_sleeps_through_a_chain() {
    kick::<Sound, Sound>(false);
    kick::<Sound, Sound>(true);
}

#[test]
fn a_driver_never_sleeps_through_a_completion() {
    call::<Sound, Sound>(false);
    call::<Sound, Sound>(true);
}

#[test]
fn a_driver_never_sleeps_through_the_completion_it_waits_for() {
    delayed_call::<Sound, Sound>(false);
    delayed_call::<Sound, Sound>(true);
}

#[test]
fn two_chains_and_two_doorbells() {
    conversation(false);
    conversation(true);
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

    mistake!(publish_loses_a_kick, "lost wake-up", kick::<NoFence, Sound>(false));
    mistake!(publish_loses_a_kick_by_event, "lost wake-up", kick::<NoFence, Sound>(true));
    mistake!(enable_kicks_loses_a_kick, "lost wake-up", kick::<Sound, NoFence>(false));
    mistake!(enable_kicks_loses_a_kick_by_event, "lost wake-up", kick::<Sound, NoFence>(true));
    mistake!(publish_loses_a_call, "lost wake-up", call::<Sound, NoFence>(false));
    mistake!(publish_loses_a_call_by_event, "lost wake-up", call::<Sound, NoFence>(true));
    mistake!(enable_calls_loses_a_call, "lost wake-up", call::<NoFence, Sound>(false));
    mistake!(enable_calls_loses_a_call_by_event, "lost wake-up", call::<NoFence, Sound>(true));
    mistake!(delayed_call_is_lost, "lost wake-up", delayed_call::<NoFence, Sound>(true));
}

mod without_an_order {
    use super::*;

    mistake!(driver_publishes_too_early, "stale", kick::<NoRelease, Sound>(true));
    mistake!(device_reads_too_early, "stale", kick::<Sound, NoAcquire>(true));
    mistake!(device_publishes_too_early, "stale", call::<Sound, NoRelease>(true));
    mistake!(driver_reads_too_early, "stale", call::<NoAcquire, Sound>(true));
}
