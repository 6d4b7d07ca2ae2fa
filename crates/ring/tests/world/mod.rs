//! Model-based testing of a ring: both halves, a reference model of its contents, and operations of either side.
//!
//! A test makes a [`World`] over a fresh ring and applies a sequence of [`Op`]s. After each one the halves are compared
//! with the model. A half that sleeps although it has work is a lost wake-up and fails the test.

use std::collections::{BTreeSet, VecDeque};

use ringferry_memory::Words;
use ringferry_ring::{AddError, Buffer, Chain, Chains, Device, Done, Driver, RingFeatures, Used};

use crate::common::{Memory, Places, Random, fresh_base};

/// The configuration of a queue.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The negotiated features, which include the layout.
    pub features: RingFeatures,
    /// Queue size in descriptors.
    pub size: u16,
    /// Length of the longest chain that goes into an indirect table; 0 if the driver has no tables.
    pub entries: u16,
}

impl Setup {
    /// Returns the addresses of the queue's areas.
    pub fn places(&self) -> Places {
        Places::new(self.size, self.features.packed)
    }
}

/// An operation of one side.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Op {
    Add {
        readable: usize,
        writable: usize,
    },
    PublishChains,
    Collect(usize),
    /// Not where the two sides are told apart: a driver that sleeps is woken, and writes, in a step of the device.
    #[allow(dead_code, reason = "not every test program does it")]
    Sleep {
        delayed: bool,
    },
    StopCalls,
    Take(usize),
    Untake(usize),
    /// Completes one chain; with IN_ORDER always the oldest.
    Complete {
        pick: usize,
        len: u32,
    },
    /// Completes the oldest chains in one call.
    CompleteAll {
        count: usize,
        len: u32,
    },
    PublishUsed,
    Doze,
    StopKicks,
}

#[derive(Clone, Debug)]
struct Sent {
    token: u64,
    /// The ring's number of the chain.
    id: u16,
    /// Number of ring descriptors that the chain occupies.
    cost: u16,
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
}

struct Held {
    sent: Sent,
    chain: Chain,
    /// Position in the order of taking.
    order: u64,
}

/// A chain that the device has completed.
#[derive(Clone, Copy, Debug)]
struct Back {
    used: Used<u64>,
    cost: u16,
}

/// Both halves and the reference model of the ring between them.
#[allow(missing_docs, reason = "the names say it")]
pub struct World<M: Memory> {
    pub memory: M,
    pub setup: Setup,
    pub driver: Driver<M::Words, u64>,
    pub device: Device<M::Words>,
    pub chains: Chains,
    pub next_token: u64,
    /// Chains that were added and are not published.
    added: VecDeque<Sent>,
    /// Chains that were published and are not taken.
    visible: VecDeque<Sent>,
    /// Chains that were taken and are not completed.
    held: VecDeque<Held>,
    takes: u64,
    /// Chains that were completed and are not published.
    done: VecDeque<Back>,
    /// Chains that the device published and the driver has not collected.
    used: VecDeque<Back>,
    /// Tokens of the chains that are in the ring or with the device.
    pub out: BTreeSet<u64>,
    /// The ring's numbers of them.
    ids: BTreeSet<u16>,
    /// Number of descriptors that these chains occupy.
    occupied: u16,
    collected: u64,
    device_sleeps: bool,
    /// Set while the driver sleeps: how many chains (split) or slots (packed) may be used without waking it.
    driver_sleeps: Option<usize>,
}

impl<M: Memory> World<M> {
    /// Makes a world over a fresh ring.
    pub fn new(setup: Setup) -> Self {
        let places = setup.places();
        let memory = M::new(places.bytes(places.table_bytes(setup.entries)));
        let base = fresh_base(setup.features.packed);
        let tables = (setup.entries > 0).then(|| places.tables(&memory, setup.entries));
        World {
            driver: Driver::new(places.parts(&memory), setup.features, tables).unwrap(),
            device: Device::new(places.parts(&memory), setup.features, base, None).unwrap(),
            memory,
            setup,
            chains: Chains::new(),
            next_token: 0,
            added: VecDeque::new(),
            visible: VecDeque::new(),
            held: VecDeque::new(),
            takes: 0,
            done: VecDeque::new(),
            used: VecDeque::new(),
            out: BTreeSet::new(),
            ids: BTreeSet::new(),
            occupied: 0,
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

    /// Chains with the device, neither completed nor given back.
    #[allow(dead_code, reason = "not every test program asks")]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Takes one step and checks.
    pub fn step(&mut self, op: Op) {
        match op {
            Op::Add { readable, writable } => self.add(readable, writable),
            Op::PublishChains => self.publish_chains(),
            Op::Collect(max) if self.driver_sleeps.is_none() => self.collect(max),
            Op::Sleep { delayed } => self.sleep(delayed),
            Op::StopCalls if self.driver_sleeps.is_none() => self.driver.disable_calls(),
            Op::Take(max) if !self.device_sleeps => self.take(max),
            Op::Untake(n) if !self.device_sleeps => self.untake(n),
            Op::Complete { pick, len } => self.complete(pick, len),
            Op::CompleteAll { count, len } => self.complete_all(count, len),
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
        assert_eq!(self.driver.free(), self.setup.size - self.occupied);
        assert_eq!(usize::from(self.driver.in_flight()), self.out.len());
        let waiting = self.amount(self.visible.iter().map(|sent| sent.cost));
        // In a larger ring it is found by bisection, which a burst that is not published yet may mislead.
        if self.added.is_empty() || self.setup.size <= 1024 {
            assert_eq!(usize::from(self.device.waiting()), waiting);
            let size = self.setup.size;
            let behind = if self.setup.features.packed {
                // The wrap counter is the bit above the index, which `size` need not reach.
                let (wrap, index) = (self.device.base() >> 15, usize::from(self.device.base() & 0x7fff));
                let wraps = index + waiting >= usize::from(size);
                (wrap ^ u16::from(wraps)) << 15 | ((index + waiting) % usize::from(size)) as u16
            } else {
                self.device.base().wrapping_add(waiting as u16)
            };
            assert_eq!(self.device.posted(), behind);
        }
        assert!(!self.device_sleeps || self.visible.is_empty(), "lost wake-up: the device sleeps");
        if let Some(unnoticed) = self.driver_sleeps {
            assert!(
                self.amount(self.used.iter().map(|back| back.cost)) <= unnoticed,
                "lost wake-up: the driver sleeps"
            );
        }
    }

    /// Returns the amount in the unit of call suppression: chains in a split ring, slots in a packed one.
    fn amount(&self, costs: impl Iterator<Item = u16>) -> usize {
        if self.setup.features.packed { costs.map(usize::from).sum() } else { costs.count() }
    }

    fn add(&mut self, readable: usize, writable: usize) {
        let token = self.next_token;
        let mut buffers = Self::buffers(token, readable + writable);
        let tail = buffers.split_off(readable);
        let count = readable + writable;
        let tabled = self.setup.features.indirect && count > 1 && count <= self.setup.entries.into();
        let cost = if tabled { 1 } else { count };
        let mut sent = Sent { token, id: 0, cost: cost as u16, readable: buffers, writable: tail };
        let result = self.driver.add(&sent.readable, &sent.writable, token);
        if count == 0 || count > self.setup.size.into() {
            assert_eq!(result, Err(AddError::BadChain(token)));
        } else if cost > usize::from(self.setup.size - self.occupied) {
            assert_eq!(result, Err(AddError::Full(token)));
        } else {
            sent.id = result.unwrap();
            assert!(
                sent.id < self.setup.size && self.ids.insert(sent.id),
                "the number of an outstanding chain"
            );
            self.next_token += 1;
            self.out.insert(token);
            self.occupied += sent.cost;
            self.added.push_back(sent);
        }
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
        // One by one or all at once.
        let mut used = Vec::new();
        if self.collected.is_multiple_of(2) {
            let count = self.driver.collect_each(max, |back| used.push(back));
            assert_eq!(count, used.len());
        } else {
            used.extend(std::iter::from_fn(|| self.driver.collect()).take(max));
        }
        let expected: Vec<Back> = self.used.drain(..max.min(self.used.len())).collect();
        assert_eq!(used, expected.iter().map(|back| back.used).collect::<Vec<_>>());
        for back in expected {
            assert!(self.out.remove(&back.used.token), "a token that is not out");
            assert!(self.ids.remove(&back.used.id));
            self.occupied -= back.cost;
            self.collected += 1;
        }
    }

    fn sleep(&mut self, delayed: bool) {
        if self.driver_sleeps.is_some() {
            return;
        }
        let held = self.held.iter().map(|held| held.sent.cost);
        let back = self.done.iter().chain(&self.used).map(|back| back.cost);
        let published = self.amount(self.visible.iter().map(|sent| sent.cost).chain(held).chain(back));
        let unnoticed = if delayed { published * 3 / 4 } else { 0 };
        let enough = if delayed { self.driver.enable_calls_delayed() } else { self.driver.enable_calls() };
        // In a packed ring only the next used descriptor is looked at, however many there are.
        let used = self.used.len();
        assert_eq!(enough, used > if self.setup.features.packed { 0 } else { unnoticed });
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
            let slots = if self.setup.features.packed { sent.cost } else { 1 };
            assert_eq!(chain.slots, slots);
            self.held.push_back(Held { sent, chain: *chain, order: self.takes });
            self.takes += 1;
        }
    }

    fn untake(&mut self, n: usize) {
        let mut given_back = VecDeque::new();
        while given_back.len() < n && self.held.back().is_some_and(|held| held.order + 1 == self.takes) {
            let Held { sent, chain, .. } = self.held.pop_back().unwrap();
            given_back.push_front(chain);
            self.visible.push_front(sent);
            self.takes -= 1;
        }
        self.device.untake(given_back.make_contiguous());
    }

    fn complete(&mut self, pick: usize, len: u32) {
        if self.held.is_empty() {
            return;
        }
        let pick = if self.setup.features.in_order { 0 } else { pick % self.held.len() };
        let held = self.held.remove(pick).unwrap();
        let (done, back) = Self::finish(&held, len);
        self.device.complete(done);
        self.done.push_back(back);
    }

    fn complete_all(&mut self, count: usize, len: u32) {
        let count = count.min(self.held.len());
        let (done, back): (Vec<_>, Vec<_>) =
            self.held.drain(..count).map(|held| Self::finish(&held, len)).unzip();
        self.device.complete_all(done);
        self.done.extend(back);
    }

    /// Makes the completion of a chain; `len` is 0 if the chain has no writable buffers.
    fn finish(Held { sent, chain, .. }: &Held, len: u32) -> (Done, Back) {
        let len = if sent.writable.is_empty() { 0 } else { len };
        (chain.done(len), Back { used: Used { id: sent.id, token: sent.token, len }, cost: sent.cost })
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
    pub fn drain(&mut self) {
        self.step(Op::PublishChains);
        for _ in 0..4 {
            self.step(Op::Take(usize::MAX));
            self.step(Op::CompleteAll { count: usize::MAX, len: 1 });
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
    #[allow(dead_code, reason = "not every test program does it")]
    pub fn tear_down(mut self) {
        while let Some(used) = self.driver.collect() {
            assert!(self.out.remove(&used.token));
            self.collected += 1;
        }
        while let Some(token) = self.driver.detach_unused() {
            assert!(self.out.remove(&token), "token {token} came back twice or never went out");
        }
        assert!(self.out.is_empty(), "tokens never came back: {:?}", self.out);
        assert_eq!((self.driver.free(), self.driver.in_flight()), (self.setup.size, 0));
        assert_eq!(self.driver.detach_unused(), None);
        if !self.setup.features.packed {
            // The index has stepped back to what was really used, and nothing waits to be published.
            assert!(!self.driver.publish());
            let index = self.memory.area(self.setup.places().driver, 4).load16(2);
            assert_eq!(index, self.collected as u16);
        }
    }
}
