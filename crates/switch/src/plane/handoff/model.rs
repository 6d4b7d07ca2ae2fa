//! The sleep handshake, the hand-off and the migration of a pair under the model checker loom, in every order that the memory
//! model allows.
//!
//! The model runs the engine's own [`SleepFlag`], [`Handoff`], [`TxQueueSelector`], [`PortShared`] and [`migrate_pair`], on
//! loom's atomics; the model adds what surrounds them: a ring that keeps rtrb's promises and nothing more,
//! the channels of commands, and two workers that do no more than they must. [`Promises`] lists the orders,
//! fences and barriers; for each of them a test leaves it out and expects a fault.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::{Mutex, PoisonError};

use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use loom::sync::mpsc::{Receiver, Sender, channel};
use loom::sync::{Arc, Notify};
use loom::thread;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::{Header, Offloads};

use super::migration::{MigrationSteps, migrate_pair};
use super::primitives::{Bell, Pop, Primitives, Push, Word};
use super::ring::{Doorbell, Handoff, News};
use super::selector::TxQueueSelector;
use super::shared::PortShared;
use super::sleep::{Flag, SleepFlag};
use crate::counters::DropReason;
use crate::fdb::PortId;
use crate::plane::worker::handles::Late;

/// Bound on forced context switches, for models with too many interleavings. One is enough to find every
/// mistake that the tests make.
const PREEMPTIONS: usize = 2;

/// The orders, fences and barriers that the engine relies on; a test turns one of them off.
trait Promises: Debug + Sized + Send + Sync + 'static {
    /// The fences of the sleep handshake.
    const CONSUMER_FENCE: bool = true;
    const PRODUCER_FENCE: bool = true;
    /// The orders with which a ring publishes and reads entries and free places.
    const RING_RELEASE: Ordering = Ordering::Release;
    const RING_ACQUIRE: Ordering = Ordering::Acquire;
    /// The orders with which changes of a port's shared words are published and read.
    const WORD_RELEASE: Ordering = Ordering::Release;
    const WORD_ACQUIRE: Ordering = Ordering::Acquire;
    /// Commands and answers make visible what was written before they were sent.
    const COMMANDS_IN_ORDER: bool = true;
    /// The steps of a migration, each of which can be left out.
    const PARK: bool = true;
    const SETTLE_BEFORE: bool = true;
    const SETTLE_IN_DETACH: bool = true;
    const SETTLE_AFTER: bool = true;
}

macro_rules! promises {
    ($($(#[$doc:meta])* $name:ident { $($constant:ident: $kind:ty = $value:expr)? })*) => {
        $($(#[$doc])* #[derive(Debug)]
        struct $name;
        impl Promises for $name { $(const $constant: $kind = $value;)? })*
    };
}

promises! {
    All {}
    NoConsumerFence { CONSUMER_FENCE: bool = false }
    NoProducerFence { PRODUCER_FENCE: bool = false }
    NoRingRelease { RING_RELEASE: Ordering = Ordering::Relaxed }
    NoRingAcquire { RING_ACQUIRE: Ordering = Ordering::Relaxed }
    NoWordRelease { WORD_RELEASE: Ordering = Ordering::Relaxed }
    NoWordAcquire { WORD_ACQUIRE: Ordering = Ordering::Relaxed }
    NoOrderOfCommands { COMMANDS_IN_ORDER: bool = false }
    NoPark { PARK: bool = false }
    NoSettleBefore { SETTLE_BEFORE: bool = false }
    NoSettleInDetach { SETTLE_IN_DETACH: bool = false }
    NoSettleAfter { SETTLE_AFTER: bool = false }
}

/// Loom's primitives, weakened where `P` breaks a promise.
#[derive(Debug)]
struct Model<P>(PhantomData<P>);

impl<P: Promises> Primitives for Model<P> {
    /// Frames under way: so few that a worker soon has to wait for buffers to come back.
    const DEPTH: usize = 2;

    type Flag = ModelFlag<P>;
    type Bell = Notify;
    type Word = ModelWord<P>;
    type Producer<T: Debug> = End<T, P>;
    type Consumer<T: Debug> = End<T, P>;

    fn ring<T: Debug>(places: usize) -> (End<T, P>, End<T, P>) {
        // A ring in a model has at most four places.
        let places = places.min(4);
        let slots = (0..places).map(|_| Slot { entry: Mutex::default(), written: AtomicUsize::new(0) });
        let ring =
            Arc::new(Ring { slots: slots.collect(), head: AtomicUsize::new(0), tail: AtomicUsize::new(0) });
        let end = || End { ring: Arc::clone(&ring), own: 0, promises: PhantomData };
        (end(), end())
    }
}

impl Bell for Notify {
    fn ring(&self) {
        self.notify();
    }
}

#[derive(Debug)]
struct ModelFlag<P>(AtomicBool, PhantomData<P>);

impl<P> Default for ModelFlag<P> {
    fn default() -> Self {
        Self(AtomicBool::new(false), PhantomData)
    }
}

impl<P: Promises> Flag for ModelFlag<P> {
    fn set(&self, value: bool) {
        self.0.store(value, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn consumer_fence() {
        if P::CONSUMER_FENCE {
            fence(Ordering::SeqCst);
        }
    }

    fn producer_fence() {
        if P::PRODUCER_FENCE {
            fence(Ordering::SeqCst);
        }
    }
}

#[derive(Debug)]
struct ModelWord<P>(AtomicU64, PhantomData<P>);

impl<P: Promises> Word for ModelWord<P> {
    fn new(value: u64) -> Self {
        Self(AtomicU64::new(value), PhantomData)
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    fn observe(&self) -> u64 {
        self.0.load(P::WORD_ACQUIRE)
    }

    fn publish(&self, add: u64) {
        self.0.fetch_add(add, P::WORD_RELEASE);
    }

    fn set_bits(&self, mask: u64, value: bool) {
        if value {
            self.0.fetch_or(mask, Ordering::Relaxed);
        } else {
            self.0.fetch_and(!mask, Ordering::Relaxed);
        }
    }
}

/// One place of a ring.
#[derive(Debug)]
struct Slot<T> {
    /// The entry. Only one side has it at a time, so the lock orders nothing: it is the standard library's,
    /// which loom does not see.
    entry: Mutex<Option<T>>,
    /// Number of the entry, written with it and before it is published.
    written: AtomicUsize,
}

/// A ring with the orders of rtrb's.
#[derive(Debug)]
struct Ring<T> {
    slots: Vec<Slot<T>>,
    /// Numbers of entries taken and put in so far.
    head: AtomicUsize,
    tail: AtomicUsize,
}

/// The producer's or the consumer's end of a ring.
#[derive(Debug)]
struct End<T, P> {
    ring: Arc<Ring<T>>,
    /// Number of entries that this end has put in, or taken.
    own: usize,
    promises: PhantomData<P>,
}

impl<T: Debug, P: Promises> Push<T> for End<T, P> {
    fn push(&mut self, entry: T) -> Result<(), T> {
        let Ring { slots, head, tail } = &*self.ring;
        // The engine counts the frames under way, and never finds a ring full.
        assert!(self.own - head.load(P::RING_ACQUIRE) < slots.len(), "no place for {entry:?}");
        let slot = &slots[self.own % slots.len()];
        *slot.entry.lock().unwrap_or_else(PoisonError::into_inner) = Some(entry);
        self.own += 1;
        slot.written.store(self.own, Ordering::Relaxed);
        tail.store(self.own, P::RING_RELEASE);
        Ok(())
    }

    fn is_full(&self) -> bool {
        let Ring { slots, head, .. } = &*self.ring;
        self.own - head.load(P::RING_ACQUIRE) >= slots.len()
    }
}

impl<T: Debug, P: Promises> Pop<T> for End<T, P> {
    fn pop(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        let Ring { slots, head, .. } = &*self.ring;
        let slot = &slots[self.own % slots.len()];
        self.own += 1;
        assert_eq!(slot.written.load(Ordering::Relaxed), self.own, "an entry shows before what it holds");
        let entry = slot.entry.lock().unwrap_or_else(PoisonError::into_inner).take();
        head.store(self.own, P::RING_RELEASE);
        entry
    }

    fn is_empty(&self) -> bool {
        self.ring.tail.load(P::RING_ACQUIRE) == self.own
    }
}

/// The doorbells of two workers.
type Bells<P> = [std::sync::Arc<Doorbell<Model<P>>>; 2];

/// Makes the hand-off ends of two workers.
fn two<P: Promises>() -> ([Handoff<Model<P>>; 2], Bells<P>) {
    let bells = [(); 2].map(|()| std::sync::Arc::new(Doorbell::new(Notify::new())));
    (Handoff::mesh(&bells).try_into().expect("two workers"), bells)
}

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// The port of the models that frames are sent to.
const PORT: PortId = PortId(0);
const FROM: PortId = PortId(1);
const LAST: Mac = Mac([2, 0, 0, 0, 0, 1]);

/// Two workers push to a third, which sleeps as soon as it finds nothing. An entry never waits for a consumer that sleeps
/// and whose bell was not rung.
fn nothing_waits_for_a_sleeper<P: Promises>() {
    loom::model(|| {
        // The model publishes as the rings do: pushed entries are counted with release order.
        let rings: [Arc<AtomicUsize>; 2] = [Arc::default(), Arc::default()];
        let (flag, rung) = (Arc::new(SleepFlag::<ModelFlag<P>>::default()), Arc::new(AtomicBool::new(false)));
        let producers = rings.clone().map(|ring| {
            let (flag, rung) = (Arc::clone(&flag), Arc::clone(&rung));
            thread::spawn(move || {
                ring.store(1, Ordering::Release);
                if flag.must_wake() {
                    rung.store(true, Ordering::Relaxed);
                }
            })
        });
        let nothing = || rings.iter().all(|ring| ring.load(Ordering::Acquire) == 0);
        let asleep = flag.about_to_sleep(nothing);
        for producer in producers {
            producer.join().unwrap();
        }
        assert!(!asleep || rung.load(Ordering::Relaxed), "it sleeps, and there is work");
    });
}

#[test]
fn nothing_that_is_handed_over_waits_while_its_worker_sleeps() {
    nothing_waits_for_a_sleeper::<All>();
}

#[test]
#[should_panic(expected = "it sleeps, and there is work")]
fn without_the_consumers_fence_something_waits() {
    nothing_waits_for_a_sleeper::<NoConsumerFence>();
}

#[test]
#[should_panic(expected = "it sleeps, and there is work")]
fn without_the_producers_fence_something_waits() {
    nothing_waits_for_a_sleeper::<NoProducerFence>();
}

/// One worker hands frames off to another, which sleeps whenever it finds nothing, and gives their buffers
/// back. Every frame that found a place arrives, once and in order; a worker that sleeps is woken; in the end
/// no buffer is missing.
fn frames_arrive_and_buffers_come_back<P: Promises>() {
    check(PREEMPTIONS, || {
        let ([mut producer, mut consumer], bells) = two::<P>();
        let thread = thread::spawn(move || {
            let mut sent = Vec::new();
            for frame in 1..=3 {
                match producer.send(1, FROM, PORT, Header::NONE, &[frame], &[]) {
                    Ok(()) => sent.push(frame),
                    Err(reason) => assert_eq!((reason, frame), (DropReason::WorkerBusy, 3)),
                }
                producer.flush();
            }
            assert!(producer.announce(0, LAST, PORT));
            producer.flush();
            (producer, sent)
        });
        let (mut received, mut told) = (Vec::new(), false);
        while !told {
            // News are read first, as a worker does it: frames sent before them are visible then.
            told = consumer.hear() == Some(News(0, LAST, PORT));
            while let Some((from, handed)) = consumer.receive() {
                received.extend_from_slice(&handed.frame);
                consumer.give_back(from, handed.from, handed.frame);
            }
            if !told && consumer.about_to_sleep() {
                bells[1].bell().wait();
                consumer.awake();
            }
        }
        let (mut producer, sent) = thread.join().unwrap();
        assert_eq!(received, sent, "a frame is lost, or overtaken");
        assert_eq!(producer.under_way(1), 0, "a buffer is lost");
    });
}

#[test]
fn what_is_handed_off_arrives_and_buffers_come_back() {
    frames_arrive_and_buffers_come_back::<All>();
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_consumers_fence_a_worker_sleeps_for_ever() {
    frames_arrive_and_buffers_come_back::<NoConsumerFence>();
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_producers_fence_a_worker_sleeps_for_ever() {
    frames_arrive_and_buffers_come_back::<NoProducerFence>();
}

#[test]
#[should_panic(expected = "an entry shows before what it holds")]
fn without_the_release_of_a_ring_a_frame_shows_too_early() {
    frames_arrive_and_buffers_come_back::<NoRingRelease>();
}

#[test]
#[should_panic(expected = "an entry shows before what it holds")]
fn without_the_acquire_of_a_ring_a_frame_shows_too_early() {
    frames_arrive_and_buffers_come_back::<NoRingAcquire>();
}

/// The control plane sets a port's offloads and has its owner start a pair; a third thread, which was told
/// nothing, sees the pair. It then also sees the offloads that were set before.
fn who_sees_a_change_sees_what_belongs_to_it<P: Promises>() {
    check(PREEMPTIONS, || {
        let shared = std::sync::Arc::new(PortShared::<ModelWord<P>>::default());
        let ([handoff, _], _) = two::<P>();
        let mut selector = TxQueueSelector::<Model<P>>::new(PORT, std::sync::Arc::clone(&shared));
        let seen = std::sync::Arc::clone(&shared);
        let reader = thread::spawn(move || {
            selector.refresh(&handoff);
            if seen.ready().pairs().next() == Some(3) {
                selector.refresh(&handoff);
                assert_eq!(selector.offloads(), Offloads::CSUM, "the offloads of before");
                assert_eq!(seen.owner(3), 1, "the owner of before");
            }
        });
        shared.set_offloads(Offloads::CSUM);
        shared.set_owner(3, 1);
        let owner = thread::spawn(move || shared.set_ready(3, true));
        owner.join().unwrap();
        reader.join().unwrap();
    });
}

#[test]
fn a_change_shows_with_what_belongs_to_it() {
    who_sees_a_change_sees_what_belongs_to_it::<All>();
}

#[test]
#[should_panic(expected = "of before")]
fn without_the_release_of_a_change_it_shows_too_early() {
    who_sees_a_change_sees_what_belongs_to_it::<NoWordRelease>();
}

#[test]
#[should_panic(expected = "of before")]
fn without_the_acquire_of_a_change_it_shows_too_early() {
    who_sees_a_change_sees_what_belongs_to_it::<NoWordAcquire>();
}

/// The receiver behind the pair that migrates, in memory that belongs to the pair's owner: its words have no
/// order of their own.
#[derive(Debug, Default)]
struct Guest {
    count: AtomicUsize,
    frames: [AtomicUsize; 4],
}

impl Guest {
    fn put(&self, frame: u8) {
        let count = self.count.load(Ordering::Relaxed);
        self.frames[count].store(frame.into(), Ordering::Relaxed);
        self.count.store(count + 1, Ordering::Relaxed);
    }

    fn all(&self) -> Vec<usize> {
        let count = self.count.load(Ordering::Relaxed);
        self.frames[..count].iter().map(|frame| frame.load(Ordering::Relaxed)).collect()
    }
}

/// The pair that migrates: the frames that its guest has sent and no worker has read. Its owner may deliver
/// to its [`Guest`], too.
#[derive(Debug)]
struct Pair(VecDeque<u8>);

/// A command of the control plane to a worker.
#[derive(Debug)]
enum Command {
    Park,
    Settle,
    Detach,
    Attach(Option<Pair>),
    End,
}

/// A channel between the control plane and a worker.
struct Channel<T, P> {
    sender: Sender<T>,
    receiver: Mutex<Receiver<T>>,
    /// Number of messages sent, where these are not [in order](Promises::COMMANDS_IN_ORDER).
    sent: AtomicUsize,
    message: Mutex<Option<T>>,
    promises: PhantomData<P>,
}

impl<T, P: Promises> Channel<T, P> {
    fn new() -> Self {
        let (sender, receiver) = channel();
        let (sent, message) = (AtomicUsize::new(0), Mutex::default());
        Self { sender, receiver: Mutex::new(receiver), sent, message, promises: PhantomData }
    }

    /// Sends message `number`, from 1 on.
    fn send(&self, number: usize, message: T) {
        if P::COMMANDS_IN_ORDER {
            assert!(self.sender.send(message).is_ok());
        } else {
            *self.message.lock().unwrap() = Some(message);
            self.sent.store(number, Ordering::Relaxed);
        }
    }

    /// Waits for message `number`.
    fn receive(&self, number: usize) -> T {
        if P::COMMANDS_IN_ORDER {
            return self.receiver.lock().unwrap().recv().unwrap();
        }
        while self.sent.load(Ordering::Relaxed) != number {
            thread::yield_now();
        }
        self.message.lock().unwrap().take().unwrap()
    }
}

/// The channels to one worker: commands, and its answers.
struct Mailbox<P> {
    commands: Channel<Command, P>,
    answers: Channel<Option<Pair>, P>,
}

impl<P: Promises> Mailbox<P> {
    fn new() -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self { commands: Channel::new(), answers: Channel::new() })
    }
}

/// The control plane, which runs the engine's migration.
struct Control<P> {
    workers: [std::sync::Arc<Mailbox<P>>; 2],
    asked: [usize; 2],
    settled: bool,
}

impl<P: Promises> Control<P> {
    fn ask(&mut self, worker: usize, command: Command) -> Option<Pair> {
        self.asked[worker] += 1;
        let (mailbox, number) = (&self.workers[worker], self.asked[worker]);
        mailbox.commands.send(number, command);
        mailbox.answers.receive(number)
    }
}

impl<P: Promises> MigrationSteps for Control<P> {
    type Detached = Pair;

    fn park(&mut self, worker: usize, _: PortId, _: u16) -> Result<(), Late> {
        if P::PARK {
            self.ask(worker, Command::Park);
        }
        Ok(())
    }

    fn unpark(&mut self, _: usize, _: PortId) {
        unreachable!("nobody is late");
    }

    fn settle(&mut self) -> Result<(), Late> {
        let before = !std::mem::replace(&mut self.settled, true);
        if if before { P::SETTLE_BEFORE } else { P::SETTLE_AFTER } {
            (0..2).for_each(|worker| drop(self.ask(worker, Command::Settle)));
        }
        Ok(())
    }

    fn detach(&mut self, worker: usize, _: PortId, _: u16) -> Result<Option<Pair>, Late> {
        Ok(self.ask(worker, Command::Detach))
    }

    fn attach(&mut self, worker: usize, _: PortId, _: u16, pair: Pair) {
        self.ask(worker, Command::Attach(Some(pair)));
    }
}

/// One of the two workers. Neither sleeps, so neither is woken.
struct Worker<P: Promises> {
    handoff: Handoff<Model<P>>,
    selector: TxQueueSelector<Model<P>>,
    /// The pair that migrates, if it is here.
    pair: Option<Pair>,
    /// The guest behind the pair that migrates.
    receiver: std::sync::Arc<Guest>,
    /// The guest behind a pair of another port, which the new owner has.
    other: std::sync::Arc<Guest>,
    mailbox: std::sync::Arc<Mailbox<P>>,
    done: usize,
}

/// The port whose pair is with the new owner all the time.
const OTHER: PortId = PortId(2);
const OLD: usize = 0;
const NEW: usize = 1;

impl<P: Promises> Worker<P> {
    /// Delivers a frame to the pair that migrates, or hands it off.
    fn deliver(&mut self, frame: u8) {
        if self.pair.is_some() {
            self.receiver.put(frame);
        } else {
            let Worker { selector, handoff, .. } = self;
            let delivery = selector.hand_off(FROM, 0, Header::NONE, &[frame], &[], handoff);
            assert!(delivery.is_ok(), "a frame is lost: {delivery:?}");
        }
    }

    /// Runs a burst of another port that sends to the pair that migrates.
    fn burst(&mut self, frame: u8) {
        self.selector.refresh(&self.handoff);
        self.deliver(frame);
    }

    /// Runs a burst of the pair that migrates, sent to the other port: one frame, if there is one and the
    /// pair is here.
    fn poll(&mut self) {
        if let Some(frame) = self.pair.as_mut().and_then(|Pair(sent)| sent.pop_front()) {
            if self.handoff.me() == NEW {
                self.other.put(frame);
            } else {
                self.handoff.send(NEW, PORT, OTHER, Header::NONE, &[frame], &[]).unwrap();
            }
        }
    }

    fn settle(&mut self) {
        while let Some((from, handed)) = self.handoff.receive() {
            match handed.port {
                OTHER => self.other.put(handed.frame[0]),
                _ => self.deliver(handed.frame[0]),
            }
            self.handoff.give_back(from, handed.from, handed.frame);
        }
    }

    /// Carries out this many commands.
    fn serve_some(&mut self, commands: usize) {
        for _ in 0..commands {
            assert!(self.serve(), "another one follows");
        }
    }

    /// Carries out the next command. Returns true if another one follows.
    fn serve(&mut self) -> bool {
        self.done += 1;
        let command = self.mailbox.commands.receive(self.done);
        let goes_on = !matches!(command, Command::End);
        let answer = match command {
            Command::Park => {
                self.selector.park(0);
                None
            }
            Command::Settle => {
                self.settle();
                None
            }
            Command::Detach => {
                if P::SETTLE_IN_DETACH {
                    self.settle();
                }
                self.pair.take()
            }
            Command::Attach(pair) => {
                self.pair = pair;
                for (_, _, frame) in self.selector.unpark() {
                    self.deliver(frame[0]);
                }
                None
            }
            Command::End => None,
        };
        self.mailbox.answers.send(self.done, answer);
        goes_on
    }
}

/// Runs a migration with everything that takes part in it. `old` and `new` are the actions of the two workers
/// until the last command.
fn migration<P: Promises>(
    sent: impl IntoIterator<Item = u8>,
    old: impl FnOnce(&mut Worker<P>) + 'static,
    new: impl FnOnce(&mut Worker<P>) + 'static,
) -> [Vec<usize>; 2] {
    let shared = std::sync::Arc::new(PortShared::<ModelWord<P>>::default());
    let (receiver, other) = Default::default();
    let ([first, second], _) = two::<P>();
    let mailboxes = [Mailbox::<P>::new(), Mailbox::new()];
    let worker = |handoff: Handoff<Model<P>>, pair| Worker {
        selector: TxQueueSelector::new(PORT, std::sync::Arc::clone(&shared)),
        pair,
        receiver: std::sync::Arc::clone(&receiver),
        other: std::sync::Arc::clone(&other),
        mailbox: std::sync::Arc::clone(&mailboxes[handoff.me()]),
        handoff,
        done: 0,
    };
    let mut owner = worker(first, Some(Pair(sent.into_iter().collect())));
    let mut next = worker(second, None);
    let owner = thread::spawn(move || {
        old(&mut owner);
        while owner.serve() {}
    });
    let next = thread::spawn(move || {
        new(&mut next);
        while next.serve() {}
    });
    let mut control = Control { workers: mailboxes, asked: [0; 2], settled: false };
    migrate_pair(&mut control, &shared, PORT, 0, NEW).unwrap();
    // Frames that either still has for the other are delivered.
    for worker in [OLD, NEW] {
        control.ask(worker, Command::Settle);
    }
    for worker in [OLD, NEW] {
        control.ask(worker, Command::End);
    }
    owner.join().unwrap();
    next.join().unwrap();
    [receiver.all(), other.all()]
}

/// The new owner sends frames to the queue all the while: two bursts, each after so many of the commands that
/// it gets, and one when it has the queue.
fn frames_for_a_queue_that_migrates<P: Promises>() {
    // The commands are park, settle, settle, attach: the first is answered before the owner changes.
    let commands = if P::PARK { 3 } else { 2 };
    for (first, second) in (0..=commands).flat_map(|first| (first..=commands).map(move |then| (first, then)))
    {
        check(PREEMPTIONS, move || {
            let new = move |worker: &mut Worker<P>| {
                worker.serve_some(first);
                worker.burst(1);
                worker.serve_some(second - first);
                worker.burst(2);
                while worker.pair.is_none() {
                    worker.serve();
                }
                worker.burst(3);
            };
            let [received, _] = migration::<P>([], |_| {}, new);
            assert_eq!(received, [1, 2, 3], "a frame is lost, or overtaken");
        });
    }
}

/// The guest behind the queue sends two frames to a port of the new owner: the old owner polls one, before it settles or before it lets go, and the new
/// owner the rest.
fn frames_from_a_queue_that_migrates<P: Promises>() {
    for commands in 0..=1 {
        check(PREEMPTIONS, move || {
            let old = move |worker: &mut Worker<P>| {
                worker.serve_some(commands);
                worker.poll();
            };
            let new = |worker: &mut Worker<P>| {
                while worker.pair.is_none() {
                    worker.serve();
                }
                worker.poll();
                worker.poll();
            };
            let [_, received] = migration::<P>([1, 2], old, new);
            assert_eq!(received, [1, 2], "a frame is lost, or overtaken");
        });
    }
}

#[test]
fn frames_for_a_queue_arrive_in_order_while_it_migrates() {
    frames_for_a_queue_that_migrates::<All>();
}

#[test]
fn frames_from_a_queue_arrive_in_order_while_it_migrates() {
    frames_from_a_queue_that_migrates::<All>();
}

#[test]
#[should_panic(expected = "a frame is lost")]
fn without_parking_a_frame_is_lost() {
    frames_for_a_queue_that_migrates::<NoPark>();
}

#[test]
#[should_panic(expected = "a frame is lost, or overtaken")]
fn without_the_first_settle_a_frame_is_overtaken() {
    frames_for_a_queue_that_migrates::<NoSettleBefore>();
}

#[test]
#[should_panic(expected = "a frame is lost, or overtaken")]
fn without_the_settle_before_the_old_owner_lets_go_a_frame_is_overtaken() {
    frames_for_a_queue_that_migrates::<NoSettleInDetach>();
}

#[test]
#[should_panic(expected = "a frame is lost, or overtaken")]
fn without_the_last_settle_a_frame_is_overtaken() {
    frames_from_a_queue_that_migrates::<NoSettleAfter>();
}

#[test]
#[should_panic(expected = "a frame is lost")]
fn without_the_order_of_commands_a_migration_loses_a_frame() {
    frames_for_a_queue_that_migrates::<NoOrderOfCommands>();
}
