//! A loom model of the ring's notifications: every interleaving and every allowed reordering of one
//! exchange.
//!
//! In each model one side publishes while the other finds nothing, makes its final check and
//! sleeps. It is an error to sleep while there is work and no notification (a lost wake-up), or to
//! see an index without the slots it stands for. The same models with one fence or one ordering
//! removed must find that error, so nothing in the ring is there in vain.

use std::marker::PhantomData;
use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;
use ringferry_memory::testing::{Order, TestWords, Width};
use ringferry_xen::netif::{BackRing, FrontRing};

/// The orderings that a side's [`Words`] keep.
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

/// The words in the model: the four indexes and the first two slots. The rest of the page is never
/// read.
const CELLS: usize = 4 + 2 * 4;

struct Model<P> {
    cells: Arc<Vec<AtomicU64>>,
    promises: PhantomData<P>,
}

impl<P> Clone for Model<P> {
    fn clone(&self) -> Self {
        Model { cells: Arc::clone(&self.cells), promises: PhantomData }
    }
}

impl<P> Model<P> {
    fn cell(&self, at: usize) -> Option<&AtomicU64> {
        let at = if at < 16 { at / 4 } else { 4 + at.checked_sub(64)? / 4 };
        self.cells.get(at)
    }
}

impl<P: Promises> TestWords for Model<P> {
    fn size(&self) -> usize {
        4096
    }
    fn load(&self, at: usize, width: Width, order: Order) -> u64 {
        assert_eq!(width, Width::Four, "a Xen ring has words of 32 bits");
        let order = if order == Order::Ordered { P::ACQUIRE } else { Ordering::Relaxed };
        self.cell(at).expect("a word of the model").load(order)
    }
    fn store(&self, at: usize, width: Width, order: Order, value: u64) {
        if width == Width::Eight {
            // A new ring is cleared; the model's cells begin at zero.
            return assert_eq!((at % 8, value), (0, 0));
        }
        assert_eq!(width, Width::Four, "a Xen ring has words of 32 bits");
        let order = if order == Order::Ordered { P::RELEASE } else { Ordering::Relaxed };
        self.cell(at).expect("a word of the model").store(value, order);
    }
    fn fence() {
        if P::FULL_FENCE {
            fence(Ordering::SeqCst);
        }
    }
}

type Pair<F, B> = (FrontRing<Model<F>, [u32; 4]>, BackRing<Model<B>, [u32; 4]>);

/// Creates both halves over the same cells. Each was notified of its first event and does not sleep
/// yet.
fn pair<F: Promises, B: Promises>() -> Pair<F, B> {
    let cells = Arc::new((0..CELLS).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
    let front = FrontRing::new(Model { cells: Arc::clone(&cells), promises: PhantomData }).unwrap();
    let back = BackRing::attach(Model { cells, promises: PhantomData }).unwrap();
    (front, back)
}

/// Passes one request and its response, so that event indexes are stale.
fn used_pair<F: Promises, B: Promises>() -> Pair<F, B> {
    let (mut front, mut back) = pair::<F, B>();
    front.push([1; 4]);
    assert!(front.publish());
    assert!(receive(&mut back, 1));
    back.respond([1; 4]);
    assert!(back.publish());
    assert!(collect(&mut front, 1));
    (front, back)
}

fn receive<P: Promises>(back: &mut BackRing<Model<P>, [u32; 4]>, number: u32) -> bool {
    back.refresh();
    back.take().inspect(|slot| assert_eq!(*slot, [number; 4], "stale slot")).is_some()
}

fn collect<P: Promises>(front: &mut FrontRing<Model<P>, [u32; 4]>, number: u32) -> bool {
    front.refresh();
    front.take().inspect(|slot| assert_eq!(*slot, [number; 4], "stale slot")).is_some()
}

/// The front end publishes a request while the back end goes to sleep.
fn request<F: Promises, B: Promises>(careless: bool) {
    loom::model(move || {
        let (mut front, mut back) = used_pair::<F, B>();
        let front = thread::spawn(move || {
            front.push([2; 4]);
            front.publish()
        });
        let served = receive(&mut back, 2)
            || (back.final_check(1) && !careless && {
                assert!(receive(&mut back, 2), "told of work that is not there");
                true
            });
        let notified = front.join().unwrap();
        assert!(served || notified, "lost wake-up: the back end sleeps");
    });
}

/// The back end publishes a response while the front end goes to sleep.
fn response<F: Promises, B: Promises>(careless: bool) {
    loom::model(move || {
        let (mut front, mut back) = used_pair::<F, B>();
        front.push([2; 4]);
        let _ = front.publish();
        assert!(receive(&mut back, 2));
        let back = thread::spawn(move || {
            back.respond([3; 4]);
            back.publish()
        });
        let served = collect(&mut front, 3)
            || (front.final_check(1) && !careless && {
                assert!(collect(&mut front, 3), "told of work that is not there");
                true
            });
        let notified = back.join().unwrap();
        assert!(served || notified, "lost wake-up: the front end sleeps");
    });
}

/// The front end publishes two requests at once: the back end sees both or none.
fn burst<F: Promises, B: Promises>() {
    loom::model(|| {
        let (mut front, mut back) = pair::<F, B>();
        let front = thread::spawn(move || {
            front.push([1; 4]);
            front.push([2; 4]);
            let _ = front.publish();
        });
        let seen = back.refresh();
        assert!(seen == 0 || seen == 2, "stale burst: half of it");
        for number in 1..=seen {
            assert_eq!(back.take(), Some([number; 4]), "stale slot");
        }
        front.join().unwrap();
    });
}

#[test]
fn a_back_end_never_sleeps_through_a_request() {
    request::<Sound, Sound>(false);
}

#[test]
fn a_front_end_never_sleeps_through_a_response() {
    response::<Sound, Sound>(false);
}

#[test]
fn a_packet_of_two_slots_is_seen_whole() {
    burst::<Sound, Sound>();
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

mistake!(publish_without_a_fence_loses_a_request, "lost wake-up", request::<NoFence, Sound>(false));
mistake!(final_check_without_a_fence_loses_a_request, "lost wake-up", request::<Sound, NoFence>(false));
mistake!(publish_without_a_fence_loses_a_response, "lost wake-up", response::<Sound, NoFence>(false));
mistake!(final_check_without_a_fence_loses_a_response, "lost wake-up", response::<NoFence, Sound>(false));
mistake!(no_second_look_loses_a_request, "lost wake-up", request::<Sound, Sound>(true));
mistake!(no_second_look_loses_a_response, "lost wake-up", response::<Sound, Sound>(true));
mistake!(request_published_too_early, "stale", burst::<NoRelease, Sound>());
mistake!(request_read_too_early, "stale", burst::<Sound, NoAcquire>());
mistake!(response_published_too_early, "stale", response::<Sound, NoRelease>(false));
mistake!(response_read_too_early, "stale", response::<NoAcquire, Sound>(false));
