//! The device half over hostile memory.
//!
//! For anything that the driver writes, at any time: there is no panic and no store to the driver's areas, a
//! call makes a bounded number of loads, only chains that obey the rules are taken, never more of them than
//! the ring holds, and a fault stays. If nobody wrote during a call, its result is what [`crate::oracle`]
//! makes of the memory.

use std::collections::VecDeque;

use ringferry_ring::{Chain, Chains, Device, Fault, RingFeatures};

use crate::guest::{Guest, Hostile, Places, REGIONS};
use crate::oracle;
use crate::pen::{Pen, Stroke};
use crate::ring::{Cursor, Reached, Setup};
use crate::script::{Bytes, Field, operations};

operations! {
    /// One step of a script for a device half.
    Step {
        /// The driver changes its ring or memory.
        Driver { stroke: Stroke },
        /// Takes up to `max` chains.
        Take { max: u8 },
        /// Gives the last `count` chains back untaken.
        Untake { count: u8 },
        /// Completes one of the chains in hand; with IN_ORDER `which` more than the first.
        Complete { which: u8, written: u32 },
        /// Completes all chains in hand.
        CompleteAll {},
        /// Publishes the completed chains to the driver.
        Publish {},
        /// Asks the driver for kicks.
        Enable {},
        /// Asks the driver for no kicks.
        Disable {},
        /// Checks whether there are chains.
        Look {},
        /// The owner of the device half finds a violation.
        Break {},
    }
}

/// Bit of [`Setup::flags`]: keep the position of a packed ring in an in-flight region.
pub const INFLIGHT: u8 = 1 << 3;

/// Bytes of a packed queue's in-flight region: a header, and as much per entry (vhost-user, "Inflight I/O
/// tracking").
fn inflight_bytes(size: u16) -> usize {
    32 + 32 * usize::from(size)
}

/// Loads for 32 chains that were read ahead and not taken, as a chain before them broke a rule.
const READ_AHEAD: u64 = 3 * 32;

/// Loads that a call may make if it does not walk chains.
const FEW_LOADS: u64 = 8;

/// Runs a script on the device half of a split ring.
pub fn split(input: &[u8]) -> Reached {
    run(input, false).unwrap_or_default()
}

/// Runs a script on the device half of a packed ring.
pub fn packed(input: &[u8]) -> Reached {
    run(input, true).unwrap_or_default()
}

/// A device half with the expected state.
struct Subject {
    guest: Guest,
    places: Places,
    features: RingFeatures,
    device: Device<Hostile>,
    chains: Chains,
    /// Chains that were taken and not completed, each with its number.
    held: VecDeque<(u64, Chain)>,
    /// Number of the next chain.
    next: u64,
    /// Position of the next completion in the ring.
    used: Cursor,
    /// Slots of a packed ring that were completed and not published: the driver's only after that.
    unpublished: u32,
    fault: Option<Fault>,
    reached: Reached,
}

fn run(input: &[u8], packed: bool) -> Option<Reached> {
    let mut input = Bytes(input);
    let setup = Setup::get(&mut input)?;
    let (places, features) = setup.ring(packed);
    let guest = Guest::new();
    let start = Cursor::new(&places, setup.base);
    if !packed {
        // A split ring goes on at the used index; the driver begins there too.
        guest.write(places.at[1] + 2, &setup.base.to_le_bytes());
        guest.write(places.at[2] + 2, &setup.base.to_le_bytes());
    }
    let (region, room) = REGIONS[2];
    let bytes = inflight_bytes(places.size);
    let kept = packed && setup.flags & INFLIGHT != 0 && bytes <= room;
    let inflight = kept.then(|| guest.area(region, bytes, true));
    let device = Device::new(places.of_device(&guest), features, start.base(), inflight).ok()?;
    let mut pen = Pen::new(places, start);
    let mut subject = Subject {
        guest,
        places,
        features,
        device,
        chains: Chains::new(),
        held: VecDeque::new(),
        next: 0,
        used: start,
        unpublished: 0,
        fault: None,
        reached: Reached::default(),
    };
    while let Some(step) = Step::get(&mut input) {
        match step {
            Step::Driver { stroke } => pen.apply(stroke, &subject.guest),
            step => subject.apply(step),
        }
    }
    subject.reached.broken = subject.fault.is_some();
    Some(subject.reached)
}

impl Subject {
    fn apply(&mut self, step: Step) {
        match step {
            Step::Driver { .. } => {}
            Step::Take { max } => self.take(max.into()),
            Step::Untake { count } => self.untake(count.into()),
            Step::Complete { which, written } => {
                let which = if self.features.in_order { 0 } else { usize::from(which) };
                if let Some((_, chain)) = self.held.remove(which % self.held.len().max(1)) {
                    self.completed(&chain);
                    let done = chain.done(written.min(chain.writable_len));
                    self.quick(|device| device.complete(done));
                }
            }
            Step::CompleteAll {} => {
                let held = std::mem::take(&mut self.held);
                for (_, chain) in &held {
                    self.completed(chain);
                }
                self.quick(|device| {
                    device.complete_all(held.iter().map(|(_, chain)| chain.done(chain.writable_len)));
                });
            }
            Step::Publish {} => {
                self.quick(Device::publish);
                self.unpublished = 0;
            }
            Step::Enable {} => self.look(Device::enable_kicks),
            Step::Disable {} => self.quick(Device::disable_kicks),
            Step::Look {} => self.look(Device::has_chains),
            Step::Break {} => {
                self.device.break_with(Fault::Unusable);
                self.fault.get_or_insert(Fault::Unusable);
            }
        }
        assert_eq!(self.device.used_index(), self.used.base(), "the place of the next completion");
        self.remember_fault();
    }

    /// Makes a call that says whether there is work.
    fn look(&mut self, call: impl FnOnce(&mut Device<Hostile>) -> bool) {
        let broken = self.fault.is_some();
        let work = self.quick(call);
        // A call must not report work that cannot be taken: the device's owner would stay awake for ever.
        let full = self.in_flight() >= self.places.size.into();
        assert!(!work || !broken && !full, "work in a ring that is broken or all in hand");
    }

    /// Makes a call that walks no chains, and checks its loads.
    fn quick<R>(&mut self, call: impl FnOnce(&mut Device<Hostile>) -> R) -> R {
        let (result, loads, _) = self.guest.watch(|| call(&mut self.device));
        assert!(loads <= FEW_LOADS, "{loads} loads");
        result
    }

    /// Checks that a fault stays as it was.
    fn remember_fault(&mut self) {
        let now = self.device.fault();
        assert!(self.fault.is_none() || now == self.fault, "{:?} became {now:?}", self.fault);
        self.fault = now;
    }

    fn completed(&mut self, chain: &Chain) {
        self.used = self.used.forward(&self.places, chain.slots);
        self.unpublished += if self.places.packed { u32::from(chain.slots) } else { 0 };
    }

    /// Returns the slots that are not the driver's.
    fn in_flight(&self) -> u32 {
        self.held.iter().map(|(_, chain)| u32::from(chain.slots)).sum::<u32>() + self.unpublished
    }

    fn untake(&mut self, count: usize) {
        let mut back = Vec::new();
        while let Some((number, chain)) = self.held.back()
            && back.len() < count
            && *number + 1 == self.next
        {
            back.push(*chain);
            self.next -= 1;
            self.held.pop_back();
        }
        back.reverse();
        self.quick(|device| device.untake(&back));
    }

    fn take(&mut self, max: usize) {
        let before = self.fault;
        let mut at = Cursor::new(&self.places, self.device.base());
        self.chains.clear();
        let map = self.guest.clone();
        let mut tables = map.map().translator();
        let (taken, loads, struck) =
            self.guest.watch(|| self.device.take(max, &mut tables, &mut self.chains));
        assert_eq!(taken, self.chains.len());
        assert!(taken <= max && (taken == 0 || before.is_none()), "{taken} of {max} chains, {before:?}");
        // The heads of a burst and their descriptors are read ahead, three loads each; then two words for each
        // descriptor, and one chain more may be looked at.
        let longest = 2 * u64::from(self.places.size.min(1024)) + 4;
        assert!(loads <= READ_AHEAD + (taken as u64 + 1) * longest, "{loads} loads for {taken} chains");

        let free = u32::from(self.places.size) - self.in_flight();
        let mut free = u16::try_from(free).expect("no more in flight than the ring holds");
        for chain in self.chains.iter() {
            self.reached.chains += 1;
            check(chain, &self.chains, &self.places);
            let (readable, writable) = (self.chains.readable(chain), self.chains.writable(chain));
            self.reached.longest = self.reached.longest.max(readable.len() + writable.len());
            free = free.checked_sub(chain.slots).expect("no more in flight than the ring holds");
            if !struck {
                let free_before = free + chain.slots;
                let model = oracle::chain(&self.guest, &self.places, self.features, at, free_before);
                let model = model.expect("a chain that breaks a rule was taken");
                assert_eq!((model.id, model.slots), (chain.id, chain.slots));
                assert_eq!((&model.readable[..], &model.writable[..]), (readable, writable));
            }
            at = at.forward(&self.places, chain.slots);
            self.held.push_back((self.next, *chain));
            self.next += 1;
        }
        assert_eq!(self.device.base(), at.base(), "the place of the next chain");
        if !struck && before.is_none() && taken < max {
            self.check_stop(at, free);
        }
    }

    /// Checks that the device was right to stop at `at`, where it saw memory as it is now.
    fn check_stop(&self, at: Cursor, free: u16) {
        let available = oracle::available(&self.guest, &self.places, at);
        let there = available > 0 && (free > 0 || !self.places.packed);
        match self.device.fault() {
            None => assert!(!there, "a chain was left"),
            Some(Fault::IndexJump(jump)) if !self.places.packed => {
                assert!(jump > free, "a jump of {jump} with {free} free");
            }
            Some(fault) => {
                let model = oracle::chain(&self.guest, &self.places, self.features, at, free);
                assert_eq!(model, None, "refused with {fault:?}");
            }
        }
    }
}

/// Checks the rules for every chain, also for one that changed while it was read.
fn check(chain: &Chain, chains: &Chains, places: &Places) {
    let (readable, writable) = (chains.readable(chain), chains.writable(chain));
    assert_eq!((readable.len(), writable.len()), (chain.readable.into(), chain.writable.into()));
    assert!((1..=usize::from(places.size).min(1024)).contains(&(readable.len() + writable.len())));
    assert!((1..=places.size).contains(&chain.slots));
    assert!(places.packed || chain.id < places.size && chain.slots == 1);
    let sum =
        |buffers: &[ringferry_ring::Buffer]| buffers.iter().map(|buffer| u64::from(buffer.len)).sum::<u64>();
    assert_eq!((sum(readable), sum(writable)), (chain.readable_len.into(), chain.writable_len.into()));
    assert!(sum(readable) + sum(writable) < 1 << 32, "a chain of 2^32 bytes");
}
