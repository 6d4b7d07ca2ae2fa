//! Crash tests of the in-flight log of a packed device half (vhost-user, "Inflight I/O tracking"). The half is killed after
//! any store; its successor must find the position to continue from, lose no chain and complete none twice. Like network
//! devices, it completes in ring order.

mod common;

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use common::{AVAIL, Heap, Memory, Places, Random, USED, features, fresh_base};
use ringferry_memory::Words;
use ringferry_memory::testing::{Spied, Spy};
use ringferry_ring::{Buffer, Chains, Device, Driver, LayoutError, Parts, RingFeatures};

/// Offset of the position in a queue's region: new and old index, 16 bits each, then new and old wrap
/// counter, 8 bits each, then how many entries hold notes.
const POSITION: usize = 16;
/// Offset of the first entry, and bytes of each.
const ENTRY: usize = 32;
/// Offset of the slot in an entry that holds a note of what goes to the ring.
const SLOT: usize = 4;
/// Offset of the descriptor's second word in it.
const WORD: usize = 16;

fn region_bytes(size: u16) -> usize {
    ENTRY * (1 + usize::from(size))
}

/// Panics at the store that a process killed at that moment would not have made.
#[derive(Clone)]
struct Mortal {
    left: Rc<Cell<usize>>,
}

struct Killed;

impl Spy for Mortal {
    fn store(&self, _: usize) {
        match self.left.get() {
            0 => std::panic::resume_unwind(Box::new(Killed)),
            left => self.left.set(left - 1),
        }
    }
}

/// A ring, its region, and a driver that knows nothing of the device's deaths.
struct World {
    memory: Heap,
    places: Places,
    region: Heap,
    features: RingFeatures,
    driver: Driver<Heap, u32>,
    random: Random,
    next: u32,
    /// True if the driver adds chains while a device lives.
    supplies: bool,
    /// Tokens of the chains that the device has, oldest first.
    out: VecDeque<u32>,
}

impl World {
    fn new(features: RingFeatures, size: u16, seed: u64) -> Self {
        let places = Places::new(size, true);
        let memory = <Heap as Memory>::new(places.bytes(0));
        let driver = Driver::new(places.parts(&memory), features, None).unwrap();
        let region = <Heap as Memory>::new(region_bytes(size));
        let (random, out) = (Random::new(seed), VecDeque::new());
        let world = World { memory, places, region, features, driver, random, next: 0, supplies: true, out };
        // The session begins a region with its first position as both.
        world.begin(fresh_base(true));
        world
    }

    fn begin(&self, base: u16) {
        let (index, wrap) = (u64::from(base & 0x7fff), u64::from(base >> 15));
        self.region.store64(POSITION, index | index << 16 | wrap << 32 | wrap << 40);
    }

    /// Adds what fits, and shows it.
    fn supply(&mut self) {
        for _ in 0..1 + self.random.below(4) {
            let buffers = [Buffer { addr: self.next.into(), len: 1 }; 3];
            let count = 1 + self.random.below(usize::from(self.places.size).min(3));
            let (readable, writable) = buffers[..count].split_at(self.random.below(count + 1));
            if self.driver.add(readable, writable, self.next).is_ok() {
                self.out.push_back(self.next);
                self.next += 1;
            }
        }
        self.driver.publish();
    }

    /// Collects everything: the oldest chains, each once.
    fn collect(&mut self) {
        while let Some(used) = self.driver.collect() {
            assert_eq!(Some(used.token), self.out.pop_front(), "a chain was lost or completed twice");
        }
        assert_eq!(self.driver.fault(), None);
    }

    /// Runs a device from the position that `recover` returns, until it is killed after `stores` stores or has done `rounds`
    /// bursts. Returns true if it was killed.
    fn live(&mut self, stores: usize, rounds: usize) -> bool {
        let base = self.recover();
        self.begin(base);
        let spy = Mortal { left: Rc::new(Cell::new(stores)) };
        let mortal = |words: Heap| Spied { words, spy: spy.clone() };
        let Parts { size, desc, driver, device } = self.places.parts(&self.memory);
        let parts = Parts { size, desc: mortal(desc), driver: mortal(driver), device: mortal(device) };
        let features = self.features;
        let life = AssertUnwindSafe(|| {
            let mut device = Device::new(parts, features, base, Some(mortal(self.region.clone()))).unwrap();
            let mut chains = Chains::new();
            for _ in 0..rounds {
                chains.clear();
                device.take(1 + self.random.below(5), &mut self.memory.tables(), &mut chains);
                assert_eq!(device.fault(), None);
                let keep = self.random.below(chains.len() + 1);
                let all: Vec<_> = chains.iter().copied().collect();
                for part in all[..keep].chunks(2) {
                    device.complete_all(part.iter().map(|chain| chain.done(chain.writable_len)));
                }
                device.untake(&all[keep..]);
                device.publish();
                // Between bursts the region says where the device is, old and new alike.
                let word = self.region.load64(POSITION);
                assert_eq!(word & 0xffff, word >> 16 & 0xffff);
                assert_eq!((word & 0x7fff) as u16 | ((word >> 32 & 1) as u16) << 15, device.used_index());
                assert_eq!((word >> 40 & 1, word >> 48), (word >> 32 & 1, 0));
                if self.random.below(2) == 0 {
                    self.collect();
                    if self.supplies {
                        self.supply();
                    }
                }
            }
        });
        match catch_unwind(life) {
            Ok(()) => false,
            Err(cause) if cause.is::<Killed>() => true,
            Err(cause) => std::panic::resume_unwind(cause),
        }
    }

    /// Finds the position to continue from, as a successor does. If the descriptor at the old position is still available in
    /// its lap, the burst was not published: either nothing of it is in the ring, or the log has its entries, which are
    /// replayed here. Otherwise all of it was published. The successor may be killed during the replay, too.
    fn recover(&mut self) -> u16 {
        let word = self.region.load64(POSITION);
        let (new, old) = (word as u16, (word >> 16) as u16);
        let (new_wrap, old_wrap) = (word >> 32 & 1, word >> 40 & 1);
        let desc = self.places.parts(&self.memory).desc;
        let flags = desc.load16(16 * usize::from(old) + 14);
        let is_available = flags & (AVAIL | USED) == if old_wrap == 1 { AVAIL } else { USED };
        let noted = (word >> 48) as usize;
        if is_available && noted < 2 {
            return old | (old_wrap as u16) << 15;
        }
        if is_available {
            for first in [self.random.below(noted), 0] {
                for entry in (first..noted).rev().map(|k| ENTRY * (k + 1)) {
                    let slot = usize::from(self.region.load16(entry + SLOT));
                    desc.store64(16 * slot + 8, self.region.load64(entry + WORD));
                }
            }
        }
        new | (new_wrap as u16) << 15
    }
}

/// Killed before each store of a few bursts, the driver going on or not before the successor comes.
#[test]
fn killed_at_any_store_nothing_is_lost_and_nothing_completed_twice() {
    let mut kills = 0;
    for features in features(true).filter(|features| !features.indirect) {
        for size in [1, 2, 3, 8, 31] {
            for driver_goes_on in [false, true] {
                for stores in 0.. {
                    let mut world = World::new(features, size, stores as u64);
                    world.supply();
                    let killed = world.live(stores, 16);
                    kills += usize::from(killed);
                    if driver_goes_on {
                        // It may use what was shown, and make its slots available again.
                        world.collect();
                        world.supply();
                    }
                    finish(world);
                    if !killed {
                        break;
                    }
                }
            }
        }
    }
    assert!(kills > 500, "{kills}");
}

/// One death after the other, over many laps.
#[test]
fn a_long_line_of_successors() {
    for features in features(true).filter(|features| !features.indirect) {
        for size in [1, 2, 7, 16] {
            let mut world = World::new(features, size, size.into());
            for _ in 0..400 {
                let stores = world.random.below(40);
                world.live(stores, 20);
                if world.random.below(2) == 0 {
                    world.collect();
                }
                world.supply();
            }
            assert!(world.next > 400);
            finish(world);
        }
    }
}

/// Two more laps: both sides agree on where they are. Then a last device, not killed, serves all that
/// is out.
fn finish(mut world: World) {
    let before = world.next;
    for _ in 0..2 * world.places.size {
        world.supply();
        world.live(usize::MAX, 8);
        world.collect();
    }
    assert!(world.next > before, "the ring stands still");
    world.supplies = false;
    world.live(usize::MAX, 200);
    world.collect();
    assert!(world.out.is_empty(), "the ring stands still");
    assert_eq!(world.driver.free(), world.places.size);
}

#[test]
fn a_burst_is_noted_before_it_is_shown_and_confirmed_after() {
    /// Notes where stores go: offset, and whether in the region.
    #[derive(Clone)]
    struct Log(Rc<std::cell::RefCell<Vec<(bool, usize)>>>, bool);
    impl Spy for Log {
        fn store(&self, at: usize) {
            self.0.borrow_mut().push((self.1, at));
        }
    }
    let places = Places::new(8, true);
    let memory = <Heap as Memory>::new(places.bytes(0));
    let region = <Heap as Memory>::new(region_bytes(8));
    let mut driver = Driver::new(places.parts(&memory), common::bare(true), None).unwrap();
    let log = Log(Rc::default(), false);
    let spied = |words: Heap| Spied { words, spy: log.clone() };
    let Parts { size, desc, driver: d, device: v } = places.parts(&memory);
    let parts = Parts { size, desc: spied(desc), driver: spied(d), device: spied(v) };
    let noted = Spied { words: region.clone(), spy: Log(Rc::clone(&log.0), true) };
    let mut device = Device::new(parts, common::bare(true), fresh_base(true), Some(noted)).unwrap();
    let mut chains = Chains::new();
    for token in 0..3 {
        driver.add(&[Buffer { addr: 0, len: 1 }; 2], &[], token).unwrap();
    }
    driver.publish();
    assert_eq!(device.take(3, &mut memory.tables(), &mut chains), 3);
    log.0.take();
    device.complete_all(chains.iter().map(|chain| chain.done(0)));
    device.publish();
    let stores = log.0.take();
    let at = |store: (bool, usize)| stores.iter().position(|other| *other == store).expect("a store");
    // The notes of the burst, the new position beside the old, the ring with the first descriptor last,
    // the new position alone.
    let positions = || stores.iter().enumerate().filter(|(_, store)| **store == (true, POSITION));
    let [noted, confirmed] = positions().map(|(i, _)| i).collect::<Vec<_>>()[..] else {
        panic!("{stores:?}")
    };
    let (first, second, third) = (at((false, 8)), at((false, 16 * 2 + 8)), at((false, 16 * 4 + 8)));
    assert!(noted < second && noted < third && second < first && third < first && first < confirmed);
    for k in 0..3 {
        let entry = ENTRY * (k + 1);
        assert!(at((true, entry + SLOT)) < noted && at((true, entry + WORD)) < noted);
        assert_eq!(usize::from(region.load16(entry + SLOT)), 2 * k);
        assert_eq!(region.load64(entry + WORD), memory.load64(16 * 2 * k + 8));
    }
    assert_eq!(region.load64(POSITION), 6 | 6 << 16 | 1 << 32 | 1 << 40);
    // Nothing to publish, nothing to note.
    device.publish();
    assert!(log.0.take().is_empty());
}

#[test]
fn a_region_too_short_is_refused() {
    let places = Places::new(8, true);
    let memory = <Heap as Memory>::new(places.bytes(0));
    for (len, good) in [(0, false), (16, false), (region_bytes(8) - 8, false), (region_bytes(8), true)] {
        let region = <Heap as Memory>::new(len);
        let device = Device::new(places.parts(&memory), common::bare(true), fresh_base(true), Some(region));
        let refused = device.err();
        assert_eq!(refused.is_none(), good);
        assert!(good || refused == Some(LayoutError::Short("in-flight region")));
    }
}
