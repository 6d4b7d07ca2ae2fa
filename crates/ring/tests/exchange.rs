//! Driver half against device half: every chain comes back exactly once, and nobody sleeps through
//! work.
//!
//! A [`World`] holds both halves and a plain model of what the ring should carry. After every step
//! the halves are compared with the model, and a half that sleeps while it has work fails the test:
//! that is a lost wake-up.

mod common;

use std::collections::{BTreeSet, VecDeque};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use common::{FEATURES, Heap, Memory, Places, Random, Shared};
use proptest::prelude::*;
use ringferry_memory::Words;
use ringferry_ring::split::driver::{AddError, Used};
use ringferry_ring::split::{Device, Driver};
use ringferry_ring::{Buffer, Chains, RingFeatures};

/// How a queue is set up.
#[derive(Clone, Copy, Debug)]
struct Setup {
    features: RingFeatures,
    size: u16,
    /// Longest chain that goes into an indirect table; 0: the driver has no tables.
    entries: u16,
}

/// One step of one side.
#[derive(Clone, Copy, Debug)]
enum Op {
    Add { readable: usize, writable: usize },
    PublishChains,
    Collect(usize),
    Sleep { delayed: bool },
    StopCalls,
    Take(usize),
    Untake(usize),
    Complete { pick: usize, len: u32 },
    PublishUsed,
    Doze,
    StopKicks,
}

#[derive(Clone, Debug)]
struct Sent {
    token: u64,
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
}

struct Held {
    sent: Sent,
    head: u16,
    /// Position in the order of taking.
    order: u64,
}

/// Both halves, and what must be true of them.
struct World<M: Memory> {
    memory: M,
    setup: Setup,
    driver: Driver<M::Words, u64>,
    device: Device<M::Words>,
    chains: Chains,
    next_token: u64,
    /// Added, not published.
    added: VecDeque<Sent>,
    /// Published, not taken.
    visible: VecDeque<Sent>,
    /// Taken, not completed.
    held: Vec<Held>,
    takes: u64,
    /// Completed, not published.
    done: VecDeque<(u64, u32)>,
    /// Published by the device, not collected.
    used: VecDeque<(u64, u32)>,
    /// Tokens with the ring or the device, and the descriptors each occupies.
    out: Vec<(u64, u16)>,
    collected: u64,
    device_sleeps: bool,
    /// With the number of uncollected completions it may sleep through.
    driver_sleeps: Option<usize>,
}

impl<M: Memory> World<M> {
    fn new(setup: Setup) -> Self {
        let places = Places::new(setup.size);
        let memory = M::new(places.bytes(16 * usize::from(setup.size) * usize::from(setup.entries)));
        let tables = (setup.entries > 0).then(|| places.tables(&memory, setup.entries));
        World {
            driver: Driver::new(places.layout(&memory), setup.features, tables),
            device: Device::new(places.layout(&memory), setup.features),
            memory,
            setup,
            chains: Chains::new(),
            next_token: 0,
            added: VecDeque::new(),
            visible: VecDeque::new(),
            held: Vec::new(),
            takes: 0,
            done: VecDeque::new(),
            used: VecDeque::new(),
            out: Vec::new(),
            collected: 0,
            device_sleeps: false,
            driver_sleeps: None,
        }
    }

    /// Buffers that depend on the token, so that mixed-up chains are noticed.
    fn buffers(token: u64, count: usize) -> Vec<Buffer> {
        let mut random = Random::new(token);
        (0..count).map(|_| Buffer { addr: random.bits(), len: (random.bits() >> 44) as u32 }).collect()
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Add { readable, writable } => self.add(readable, writable),
            Op::PublishChains => self.publish_chains(),
            Op::Collect(max) if self.driver_sleeps.is_none() => self.collect(max),
            Op::Sleep { delayed } => self.sleep(delayed),
            Op::StopCalls if self.driver_sleeps.is_none() => self.driver.disable_calls(),
            Op::Take(max) if !self.device_sleeps => self.take(max),
            Op::Untake(n) if !self.device_sleeps => self.untake(n),
            Op::Complete { pick, len } => self.complete(pick, len),
            Op::PublishUsed => self.publish_used(),
            Op::Doze => self.doze(),
            Op::StopKicks if !self.device_sleeps => self.device.disable_kicks(),
            // A side that sleeps does nothing that needs a wake-up first.
            Op::Collect(_) | Op::StopCalls | Op::Take(_) | Op::Untake(_) | Op::StopKicks => {}
        }
        self.check();
    }

    fn check(&self) {
        assert_eq!((self.device.fault(), self.driver.fault()), (None, None));
        let occupied: u16 = self.out.iter().map(|(_, count)| count).sum();
        assert_eq!(self.driver.free(), self.setup.size - occupied);
        assert_eq!(usize::from(self.driver.in_flight()), self.out.len());
        assert!(!self.device_sleeps || self.visible.is_empty(), "lost wake-up: the device sleeps");
        if let Some(unnoticed) = self.driver_sleeps {
            assert!(self.used.len() <= unnoticed, "lost wake-up: the driver sleeps");
        }
    }

    fn add(&mut self, readable: usize, writable: usize) {
        let token = self.next_token;
        let mut buffers = Self::buffers(token, readable + writable);
        let tail = buffers.split_off(readable);
        let sent = Sent { token, readable: buffers, writable: tail };
        let count = readable + writable;
        let tabled = self.setup.features.indirect && count > 1 && count <= self.setup.entries.into();
        let cost = if tabled { 1 } else { count };
        let result = self.driver.add(&sent.readable, &sent.writable, token);
        if count == 0 || count > self.setup.size.into() {
            assert_eq!(result, Err(AddError::BadChain(token)));
        } else if cost > usize::from(self.setup.size) - self.occupied() {
            assert_eq!(result, Err(AddError::Full(token)));
        } else {
            assert_eq!(result, Ok(()));
            self.next_token += 1;
            self.out.push((token, cost as u16));
            self.added.push_back(sent);
        }
    }

    fn occupied(&self) -> usize {
        self.out.iter().map(|(_, count)| usize::from(*count)).sum()
    }

    fn publish_chains(&mut self) {
        let kick = self.driver.publish();
        assert!(!kick || !self.added.is_empty(), "a kick for nothing");
        self.visible.append(&mut self.added);
        if kick && self.device_sleeps {
            self.device_sleeps = false;
            self.device.disable_kicks();
        }
    }

    fn collect(&mut self, max: usize) {
        for _ in 0..max {
            let expected = self.used.pop_front().map(|(token, len)| Used { token, len });
            let used = self.driver.collect();
            assert_eq!(used, expected);
            let Some(used) = used else { break };
            let at = self.out.iter().position(|(token, _)| *token == used.token);
            self.out.swap_remove(at.expect("a token that is not out"));
            self.collected += 1;
        }
    }

    fn sleep(&mut self, delayed: bool) {
        if self.driver_sleeps.is_some() {
            return;
        }
        let published = self.out.len() - self.added.len();
        let unnoticed = if delayed { published * 3 / 4 } else { 0 };
        let enough = if delayed { self.driver.enable_calls_delayed() } else { self.driver.enable_calls() };
        assert_eq!(enough, self.used.len() > unnoticed);
        self.driver_sleeps = (!enough).then_some(unnoticed);
    }

    fn take(&mut self, max: usize) {
        self.chains.clear();
        let taken = self.device.take(max, &mut self.memory.tables(), &mut self.chains);
        assert_eq!(taken, max.min(self.visible.len()));
        assert_eq!(taken, self.chains.len());
        for chain in self.chains.iter() {
            let sent = self.visible.pop_front().unwrap();
            assert_eq!(self.chains.readable(chain), sent.readable);
            assert_eq!(self.chains.writable(chain), sent.writable);
            let total = |buffers: &[Buffer]| buffers.iter().map(|buffer| buffer.len).sum::<u32>();
            assert_eq!(chain.readable_len, total(&sent.readable));
            assert_eq!(chain.writable_len, total(&sent.writable));
            self.held.push(Held { sent, head: chain.head, order: self.takes });
            self.takes += 1;
        }
    }

    fn untake(&mut self, n: usize) {
        let mut given_back = 0;
        while given_back < n && self.held.last().is_some_and(|held| held.order + 1 == self.takes) {
            self.visible.push_front(self.held.pop().unwrap().sent);
            self.takes -= 1;
            given_back += 1;
        }
        self.device.untake(given_back as u16);
    }

    fn complete(&mut self, pick: usize, len: u32) {
        if self.held.is_empty() {
            return;
        }
        let held = self.held.remove(pick % self.held.len());
        self.device.complete(held.head, len);
        self.done.push_back((held.sent.token, len));
    }

    fn publish_used(&mut self) {
        let call = self.device.publish();
        assert!(!call || !self.done.is_empty(), "a call for nothing");
        self.used.append(&mut self.done);
        if call && self.driver_sleeps.is_some() {
            self.driver_sleeps = None;
            self.driver.disable_calls();
        }
    }

    fn doze(&mut self) {
        if !self.device_sleeps {
            let work = self.device.enable_kicks();
            assert_eq!(work, !self.visible.is_empty());
            self.device_sleeps = !work;
        }
    }

    /// Lets both sides work as they would, sleeping whenever they may, until the ring is empty.
    fn drain(&mut self) {
        self.step(Op::PublishChains);
        for _ in 0..4 {
            self.step(Op::Take(usize::MAX));
            while !self.held.is_empty() {
                self.step(Op::Complete { pick: 0, len: 1 });
            }
            self.step(Op::PublishUsed);
            self.step(Op::Doze);
            self.step(Op::Collect(usize::MAX));
            self.step(Op::Sleep { delayed: false });
        }
        assert!(self.out.is_empty(), "the ring stands still with {} chains out", self.out.len());
        assert_eq!(self.collected, self.next_token);
        assert_eq!((self.driver.free(), self.driver.in_flight()), (self.setup.size, 0));
    }

    /// Stops the device where it stands and takes everything back.
    fn tear_down(mut self) {
        while let Some(used) = self.driver.collect() {
            self.out.retain(|(token, _)| *token != used.token);
            self.collected += 1;
        }
        let mut expected: BTreeSet<u64> = self.out.iter().map(|(token, _)| *token).collect();
        while let Some(token) = self.driver.detach_unused() {
            assert!(expected.remove(&token), "token {token} came back twice or never went out");
        }
        assert!(expected.is_empty(), "tokens never came back: {expected:?}");
        assert_eq!((self.driver.free(), self.driver.in_flight()), (self.setup.size, 0));
        assert_eq!(self.driver.detach_unused(), None);
        // The index has stepped back to what was really used, and nothing waits to be published.
        assert!(!self.driver.publish());
        let index = self.memory.area(Places::new(self.setup.size).avail, 4).load16(2);
        assert_eq!(index, self.collected as u16);
    }
}

fn setups() -> impl Strategy<Value = Setup> {
    (0..FEATURES.len(), 0u32..=8, 0u16..=16).prop_map(|(features, log, entries)| Setup {
        features: FEATURES[features],
        size: 1 << log,
        entries,
    })
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0usize..6, 0usize..6).prop_map(|(readable, writable)| Op::Add { readable, writable }),
        1 => (0usize..260, 0usize..260).prop_map(|(readable, writable)| Op::Add { readable, writable }),
        3 => Just(Op::PublishChains),
        3 => (0usize..40).prop_map(Op::Collect),
        2 => any::<bool>().prop_map(|delayed| Op::Sleep { delayed }),
        1 => Just(Op::StopCalls),
        3 => (0usize..80).prop_map(Op::Take),
        1 => (0usize..8).prop_map(Op::Untake),
        6 => (any::<usize>(), any::<u32>()).prop_map(|(pick, len)| Op::Complete { pick, len }),
        3 => Just(Op::PublishUsed),
        2 => Just(Op::Doze),
        1 => Just(Op::StopKicks),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_steps_on_the_heap(setup in setups(), ops in prop::collection::vec(ops(), 0..300)) {
        let mut world = World::<Heap>::new(setup);
        for op in ops {
            world.step(op);
        }
        world.drain();
    }

    #[test]
    fn any_order_of_steps_in_shared_memory(setup in setups(), ops in prop::collection::vec(ops(), 0..300)) {
        let mut world = World::<Shared>::new(setup);
        for op in ops {
            world.step(op);
        }
        world.drain();
    }

    #[test]
    fn detaching_returns_every_outstanding_token_once(
        setup in setups(),
        ops in prop::collection::vec(ops(), 0..200),
    ) {
        let mut world = World::<Heap>::new(setup);
        for op in ops {
            world.step(op);
        }
        world.tear_down();
    }
}

/// Random traffic until both indexes have wrapped around 65536, for every size and feature set.
#[test]
fn indexes_wrap_and_nothing_is_lost() {
    for (i, features) in FEATURES.into_iter().enumerate() {
        for log in 0..=8 {
            let setup = Setup { features, size: 1 << log, entries: 4 };
            let mut random = Random::new(i as u64 * 16 + log);
            let mut world = World::<Shared>::new(setup);
            while world.next_token < 70_000 {
                for _ in 0..random.below(2 * usize::from(setup.size)) + 1 {
                    let readable = random.below(3);
                    world.step(Op::Add { readable, writable: random.below(3) + usize::from(readable == 0) });
                }
                world.step(Op::PublishChains);
                world.step(Op::Take(random.below(300)));
                if random.below(8) == 0 {
                    world.step(Op::Untake(random.below(4)));
                }
                let leave = if random.below(4) == 0 { random.below(4) } else { 0 };
                while world.held.len() > leave {
                    world.step(Op::Complete { pick: random.below(256), len: random.bits() as u32 });
                }
                if random.below(4) > 0 {
                    world.step(Op::PublishUsed);
                }
                world.step(Op::Doze);
                world.step(Op::Collect(random.below(300)));
                world.step(Op::Sleep { delayed: random.below(2) == 0 });
                if world.out.len() == usize::from(setup.size) {
                    world.drain();
                }
            }
            world.drain();
        }
    }
}

/// 2.7.7 and 2.7.10: a side that polls is left alone, by the flag always and by the event index but
/// for one stale match in every turn of the index.
#[test]
fn polling_sides_are_not_notified() {
    for features in FEATURES {
        let mut world = World::<Heap>::new(Setup { features, size: 8, entries: 0 });
        let (mut kicks, mut calls) = (0, 0);
        for _ in 0..140_000 {
            world.driver.add(&[Buffer { addr: 0, len: 1 }], &[], 0).unwrap();
            kicks += usize::from(world.driver.publish());
            world.chains.clear();
            world.device.take(1, &mut world.memory.tables(), &mut world.chains);
            world.device.complete(world.chains.chain(0).head, 0);
            calls += usize::from(world.device.publish());
            world.driver.collect().unwrap();
        }
        let stale = if features.event_idx { 3 } else { 0 };
        assert_eq!((kicks, calls), (stale, stale), "{features:?}");
    }
}

/// 2.7.7.1, 2.7.10.2: with EVENT_IDX the flag words stay 0; without it they carry the wish.
#[test]
fn flags_are_zero_with_event_idx_and_the_wish_without() {
    for features in FEATURES {
        let places = Places::new(4);
        let mut world = World::<Heap>::new(Setup { features, size: 4, entries: 0 });
        let flags = |world: &World<Heap>| {
            let word = |addr| world.memory.area(addr, 2).load16(0);
            (word(places.avail), word(places.used))
        };
        let off = u16::from(!features.event_idx);
        assert_eq!(flags(&world), (off, off));
        assert!(!world.driver.enable_calls());
        assert!(!world.device.enable_kicks());
        assert_eq!(flags(&world), (0, 0));
        world.driver.disable_calls();
        world.device.disable_kicks();
        assert_eq!(flags(&world), (off, off));
    }
}

/// Sends a doorbell; like an eventfd, one that was not heard yet is not lost and not doubled.
fn ring(bell: &SyncSender<()>) {
    let _ = bell.try_send(());
}

fn wait(bell: &Receiver<()>, who: &str) {
    let heard = bell.recv_timeout(Duration::from_secs(30));
    assert!(heard.is_ok(), "lost wake-up: the {who} sleeps for ever");
}

/// Two threads, real memory order, real sleep: the device reads a number in each chain's first
/// buffer and writes its complement to the second.
#[test]
fn two_threads_sleep_and_wake_and_see_each_others_bytes() {
    const CHAINS: u64 = 60_000;
    const SIZE: u16 = 16;
    for features in FEATURES {
        let places = Places::new(SIZE);
        let memory = Shared::new(places.bytes(0x4000));
        let slots = places.rest + 0x2000;
        let tables = Some(places.tables(&memory, 2));
        let mut driver = Driver::new(places.layout(&memory), features, tables);
        let mut device = Device::new(places.layout(&memory), features);
        let (kick, kicked) = sync_channel(1);
        let (call, called) = sync_channel(1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (call, kicked) = (call, kicked);
                let mut translator = memory.map.translator();
                let mut tables = memory.map.translator();
                let mut chains = Chains::new();
                let mut done = 0;
                while done < CHAINS {
                    chains.clear();
                    if device.take(7, &mut tables, &mut chains) == 0 {
                        if !device.enable_kicks() {
                            wait(&kicked, "device");
                        }
                        device.disable_kicks();
                        continue;
                    }
                    for chain in chains.iter() {
                        let mut word = [0; 8];
                        translator.read(chains.readable(chain)[0].addr, 8).unwrap().copy_to(&mut word);
                        assert_eq!(u64::from_le_bytes(word), done);
                        let answer = (!done).to_le_bytes();
                        translator.write(chains.writable(chain)[0].addr, 8).unwrap().copy_from(&answer);
                        device.complete(chain.head, 8);
                        done += 1;
                    }
                    if device.publish() {
                        ring(&call);
                    }
                }
            });
            let (kick, called) = (kick, called);
            let mut translator = memory.map.translator();
            let (mut sent, mut back) = (0, 0);
            while back < CHAINS {
                while sent < CHAINS && driver.in_flight() < SIZE && driver.free() > 1 {
                    let addr = slots + sent % 32 * 16;
                    translator.write(addr, 8).unwrap().copy_from(&u64::to_le_bytes(sent));
                    let buffer = |addr| [Buffer { addr, len: 8 }];
                    driver.add(&buffer(addr), &buffer(addr + 8), sent).unwrap();
                    sent += 1;
                    if sent.is_multiple_of(3) && driver.publish() {
                        ring(&kick);
                    }
                }
                if driver.publish() {
                    ring(&kick);
                }
                let before = back;
                while let Some(used) = driver.collect() {
                    let mut word = [0; 8];
                    translator.read(slots + used.token % 32 * 16 + 8, 8).unwrap().copy_to(&mut word);
                    assert_eq!((used.token, used.len, u64::from_le_bytes(word)), (back, 8, !back));
                    back += 1;
                }
                let delayed = back.is_multiple_of(2);
                if before == back {
                    let enough = if delayed { driver.enable_calls_delayed() } else { driver.enable_calls() };
                    if !enough {
                        wait(&called, "driver");
                    }
                    driver.disable_calls();
                }
            }
            assert_eq!((driver.fault(), driver.free()), (None, SIZE));
        });
    }
}
