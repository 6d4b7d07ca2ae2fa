//! The driver half against a hostile device.
//!
//! For anything that the device writes, at any time: there is no panic and no store to the device's areas, a
//! call makes a bounded number of loads, each token comes back at most once and all of them in the end, free
//! slots and chains in flight are always the whole ring, IN_ORDER keeps the order, a split ring never yields
//! more chains than were published, and a fault stays.

use std::collections::VecDeque;

use ringferry_ring::{AddError, Buffer, Driver, Fault, IndirectTables, RingFeatures};

use crate::guest::{BASE, Guest, Hostile, Memory, Places, Surprise};
use crate::ring::{Cursor, NEXT, Reached, Setup, WRITE};
use crate::script::{Bytes, Field, operations};

operations! {
    /// One step of a script for a driver half.
    Step {
        /// Adds a chain.
        Add { readable: u8, writable: u8, len: u32 },
        /// Publishes the chains that were added.
        Publish {},
        /// Collects up to `max` chains.
        Collect { max: u8 },
        /// Checks whether there are chains to collect.
        Look {},
        /// Asks the device for a call.
        Enable {},
        /// Asks the device for a delayed call.
        EnableDelayed {},
        /// Asks the device for no calls.
        Disable {},
        /// The device uses the chain that is `skip` behind the oldest it has not used; in a split ring
        /// not yet visible. With IN_ORDER the element stands for all before it, too.
        Answer { skip: u8, len: u32 },
        /// The device claims to have used `id`, which took `slots` slots; in a split ring not yet visible.
        Claim { id: u32, len: u32, slots: u16 },
        /// Split: the device shows what it used, and `jump` more. Packed: it writes its event suppression.
        Show { jump: u16 },
        /// The device writes eight bytes anywhere.
        Write { at: u32, value: u64 },
        /// The device will write one word between two loads of the driver.
        Surprise { after: u8, flip: u8, value: u64 },
    }
}

/// Bit of [`Setup::flags`]: the driver has memory for indirect tables.
pub const TABLES: u8 = 1 << 3;

/// Descriptors per indirect table.
const TABLE: u16 = 4;

/// Loads that a call may make: the index, the element, the event suppression.
const FEW_LOADS: u64 = 8;

/// Runs a script on the driver half of a split ring.
pub fn split(input: &[u8]) -> Reached {
    run(input, false).unwrap_or_default()
}

/// Runs a script on the driver half of a packed ring.
pub fn packed(input: &[u8]) -> Reached {
    run(input, true).unwrap_or_default()
}

/// A chain that the device has not given back.
#[derive(Clone, Copy, Debug)]
struct Out {
    token: u32,
    /// The ring's number of it.
    id: u16,
    slots: u16,
    buffers: usize,
}

/// A driver half with the expected state.
struct Subject {
    guest: Guest,
    places: Places,
    features: RingFeatures,
    driver: Driver<Hostile, u32>,
    out: VecDeque<Out>,
    next: u32,
    /// Number of chains that were ever published to the device.
    published: usize,
    fault: Option<Fault>,
    /// Positions at which the device takes chains (in a split ring an index of the available ring) and uses
    /// them.
    takes: Cursor,
    uses: Cursor,
    reached: Reached,
}

fn run(input: &[u8], packed: bool) -> Option<Reached> {
    let mut input = Bytes(input);
    let setup = Setup::get(&mut input)?;
    let (places, features) = setup.ring(packed);
    let guest = Guest::new();
    let bytes = 16 * usize::from(places.size) * usize::from(TABLE);
    let fits = places.rest + bytes as u64 <= BASE + crate::guest::REGIONS[0].1 as u64;
    let tables = (setup.flags & TABLES != 0 && fits).then(|| IndirectTables {
        area: guest.area(places.rest, bytes, true),
        addr: places.rest,
        entries: TABLE,
    });
    let driver = Driver::new(places.of_driver(&guest), features, tables).ok()?;
    let start = Cursor::new(&places, if packed { 1 << 15 } else { 0 });
    let mut subject = Subject {
        guest,
        places,
        features,
        driver,
        out: VecDeque::new(),
        next: 0,
        published: 0,
        fault: None,
        takes: start,
        uses: start,
        reached: Reached::default(),
    };
    while let Some(step) = Step::get(&mut input) {
        subject.apply(step);
    }
    subject.reached.broken = subject.fault.is_some();
    let reached = subject.reached;
    subject.finish();
    Some(reached)
}

impl Subject {
    fn apply(&mut self, step: Step) {
        match step {
            Step::Add { readable, writable, len } => self.add(readable.into(), writable.into(), len),
            Step::Publish {} => {
                self.call(Driver::publish);
                self.published = self.next as usize;
            }
            Step::Collect { max } => {
                let _ = (0..max).take_while(|_| self.collect()).count();
            }
            Step::Look {} => {
                let has = self.call(Driver::has_used);
                assert!(!has || self.fault.is_none(), "a broken ring has used chains");
            }
            Step::Enable {} => {
                self.call(Driver::enable_calls);
            }
            Step::EnableDelayed {} => {
                self.call(Driver::enable_calls_delayed);
            }
            Step::Disable {} => self.call(Driver::disable_calls),
            Step::Answer { skip, len } => self.answer(skip.into(), len),
            Step::Claim { id, len, slots } => self.claim(id, len, slots % (self.places.size + 1)),
            Step::Show { jump } if self.places.packed => {
                let wish = u32::from(jump) | u32::from(jump & 3) << 16;
                self.guest.write(self.places.at[2], &wish.to_le_bytes());
            }
            Step::Show { jump } => {
                let index = self.uses.index.wrapping_add(jump);
                self.guest.write(self.places.at[2] + 2, &index.to_le_bytes());
            }
            Step::Write { at, value } => self.guest.write(BASE + u64::from(at), &value.to_le_bytes()),
            Step::Surprise { after, flip, value } => {
                self.guest.plan(Surprise { after, flip: flip & 1 != 0, value });
            }
        }
        self.check();
    }

    /// Checks the invariants that hold after every call.
    fn check(&mut self) {
        let slots: u32 = self.out.iter().map(|out| u32::from(out.slots)).sum();
        assert_eq!(
            u32::from(self.driver.free()) + slots,
            u32::from(self.places.size),
            "slots were lost or made up"
        );
        assert_eq!(usize::from(self.driver.in_flight()), self.out.len());
        let now = self.driver.fault();
        assert!(self.fault.is_none() || now == self.fault, "{:?} became {now:?}", self.fault);
        self.fault = now;
    }

    fn call<R>(&mut self, call: impl FnOnce(&mut Driver<Hostile, u32>) -> R) -> R {
        let (result, loads, _) = self.guest.watch(|| call(&mut self.driver));
        assert!(loads <= FEW_LOADS, "{loads} loads");
        result
    }

    fn add(&mut self, readable: usize, writable: usize, len: u32) {
        let buffers = vec![Buffer { addr: self.places.rest, len }; readable + writable];
        let (token, before, broken) = (self.next, self.driver.free(), self.fault.is_some());
        let (first, second) = buffers.split_at(readable);
        let added = self.call(|driver| driver.add(first, second, token));
        let size = usize::from(self.places.size);
        match added {
            Ok(id) => {
                assert!(id < self.places.size && self.out.iter().all(|out| out.id != id), "{id} is taken");
                let slots = before - self.driver.free();
                let whole = usize::from(slots) == buffers.len();
                assert!(!broken && (whole || self.features.indirect && slots == 1), "{slots} slots");
                self.out.push_back(Out { token, id, slots, buffers: buffers.len() });
                self.next += 1;
            }
            Err(error) => {
                assert_eq!(before, self.driver.free());
                match error {
                    AddError::Full(back) => assert!(back == token && usize::from(before) < buffers.len()),
                    AddError::BadChain(back) => {
                        assert!(back == token && !(1..=size).contains(&buffers.len()));
                    }
                    AddError::Broken(back) => assert!(back == token && broken),
                }
            }
        }
    }

    /// Collects one chain, or a few together; returns false if there is none.
    fn collect(&mut self) -> bool {
        let broken = self.fault.is_some();
        let most = if self.reached.chains.is_multiple_of(2) { 1 } else { 3 };
        let mut back = Vec::new();
        let (count, loads, _) = self.guest.watch(|| self.driver.collect_each(most, |used| back.push(used)));
        assert!(
            loads <= most as u64 * FEW_LOADS && count == back.len() && count <= most,
            "{loads} loads, {count} chains"
        );
        for used in &back {
            assert!(!broken, "a broken ring gave a chain back");
            let at = self.out.iter().position(|out| out.token == used.token);
            let at = at.unwrap_or_else(|| panic!("token {} is not out", used.token));
            assert!(!self.features.in_order || at == 0, "token {} overtook {at} others", used.token);
            if let Some(out) = self.out.remove(at) {
                assert_eq!(out.id, used.id, "the number of another chain");
                self.reached.chains += 1;
                self.reached.longest = self.reached.longest.max(out.buffers);
                // The device of a split ring tells by an index how many chains it has used.
                assert!(self.places.packed || self.reached.chains <= self.published, "more back than shown");
            }
        }
        self.check();
        !back.is_empty()
    }

    /// Returns id and slots of the chain that the driver wrote at `at`.
    fn written(&self, at: Cursor) -> (u32, u16) {
        if !self.places.packed {
            return (u16::from_le_bytes(self.guest.number(self.places.head(at.index))).into(), 1);
        }
        let mut slots = 0;
        loop {
            let desc: [u8; 16] = self.guest.number(self.places.desc((at.index + slots) % self.places.size));
            slots += 1;
            if desc[14] & NEXT as u8 == 0 || slots == self.places.size {
                return (u16::from_le_bytes([desc[12], desc[13]]).into(), slots);
            }
        }
    }

    fn answer(&mut self, skip: u16, len: u32) {
        let mut passed = 0;
        let (mut at, mut chain) = (self.takes, self.written(self.takes));
        for _ in 0..skip.min(self.places.size) {
            passed = (passed + chain.1).min(self.places.size);
            at = at.forward(&self.places, chain.1);
            chain = self.written(at);
        }
        let batch = if self.features.in_order { (passed + chain.1).min(self.places.size) } else { chain.1 };
        self.takes = if self.features.in_order { at } else { self.takes }.forward(&self.places, chain.1);
        self.claim(chain.0, len, batch);
    }

    fn claim(&mut self, id: u32, len: u32, slots: u16) {
        if self.places.packed {
            let flags = self.uses.owner(true) | WRITE;
            let second = u64::from(len) | u64::from(id as u16) << 32 | u64::from(flags) << 48;
            self.guest.write(self.places.desc(self.uses.index) + 8, &second.to_le_bytes());
        } else {
            let element = u64::from(id) | u64::from(len) << 32;
            self.guest.write(self.places.element(self.uses.index), &element.to_le_bytes());
        }
        self.uses = self.uses.forward(&self.places, slots);
    }

    /// Ends the run: the device is gone, and all chains come back.
    fn finish(mut self) {
        while let Some(token) = self.driver.detach_unused() {
            let at = self.out.iter().position(|out| out.token == token);
            self.out.remove(at.unwrap_or_else(|| panic!("token {token} is not out")));
        }
        assert!(self.out.is_empty(), "tokens were lost: {:?}", self.out);
        assert_eq!((self.driver.free(), self.driver.in_flight()), (self.places.size, 0));
    }
}
