//! Cache lines that cross between the driver's processor and the device's, for each packet: counted on a model of two caches, and kept in lines.txt.
//!
//! Time on a floating machine says little; these counts are the same everywhere. Both halves of a ring run on a memory whose accesses go through two caches that keep each other
//! coherent as MESI has it, without limit in size: a line that only the other cache has is *fetched*, and one that both have must be *claimed* by whoever writes it. Either
//! makes its processor wait for the other. Payload goes through the same model: the writer of a frame stores its 12 bytes of virtual header and all its lines, the reader loads
//! them. The halves take turns, a burst each, both polling; what prefetches hide is not the model's business, and neither is a line that moves while nobody has come to its end.
//!
//! `least` is what no ring of that layout can save while it uses the next entries for each burst and begins its areas on a line: every line that one side writes and the other reads
//! is fetched once, and claimed once when it is written again; of a packed ring, whose lines both write, fetching for writing does both. Payload is at its least by itself, as each
//! side touches each line once and buffers come back in whole frames. A change of the table is a change of
//! what a packet costs: `UPDATE_EXPECT=1 cargo test -p ringferry-ring --test lines` writes the new one, and the commit says why.

mod common;

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::rc::Rc;

use common::{Heap, Memory, Places, fresh_base};
use expect_test::expect_file;
use ringferry_memory::testing::{Spied, Spy};
use ringferry_ring::{Buffer, Chains, Device, Driver, Parts, RingFeatures};

/// Bytes of a cache line.
const LINE: u64 = 64;
/// Entries of the ring.
const SIZE: u16 = 256;
/// Bytes of the virtual header.
const HEADER: usize = 12;
/// From one buffer to the next.
const STRIDE: u64 = 2048;
/// Packets until the caches know the ring, and packets that are counted: whole laps.
const WARM_UP: usize = 4 * SIZE as usize;
const COUNTED: usize = 8 * SIZE as usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Driver = 0,
    Device = 1,
}

/// What a cache has of a line. Exclusive is modified here: a store to either costs nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Owned,
    Shared,
    Invalid,
}

/// What each side waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Crossings {
    fetched: [usize; 2],
    claimed: [usize; 2],
}

impl Crossings {
    fn all(&self) -> usize {
        self.fetched.iter().chain(&self.claimed).sum()
    }
}

/// Two caches of the lines of one memory.
#[derive(Debug, Default)]
struct Caches {
    lines: HashMap<u64, [State; 2]>,
    crossings: Crossings,
}

impl Caches {
    fn access(&mut self, side: Side, addr: u64, store: bool) {
        let states = self.lines.entry(addr / LINE).or_insert([State::Invalid; 2]);
        let (own, other) = (side as usize, 1 - side as usize);
        match (states[own], states[other]) {
            (State::Invalid, State::Invalid) => states[own] = State::Owned,
            (State::Invalid, _) => {
                self.crossings.fetched[own] += 1;
                // For reading, or at once for writing.
                *states = [State::Shared; 2];
            }
            (State::Shared, State::Shared) if store => self.crossings.claimed[own] += 1,
            _ => {}
        }
        if store {
            states[own] = State::Owned;
            states[other] = State::Invalid;
        }
    }
}

type Bus = Rc<RefCell<Caches>>;

/// One side's accesses to a part of the ring that begins at an address.
#[derive(Clone)]
struct Cached {
    bus: Bus,
    side: Side,
    base: u64,
}

impl Spy for Cached {
    fn load(&self, at: usize) {
        self.bus.borrow_mut().access(self.side, self.base + at as u64, false);
    }
    fn store(&self, at: usize) {
        self.bus.borrow_mut().access(self.side, self.base + at as u64, true);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Transmit,
    Receive,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    packed: bool,
    in_order: bool,
    direction: Direction,
    batch: usize,
    /// Bytes of a frame.
    size: usize,
}

/// Crossings of [`COUNTED`] packets: those of the ring and those of payload.
struct Counted {
    ring: Crossings,
    payload: Crossings,
}

struct Bed {
    bus: Bus,
    /// Payload has a bus of its own: no line of it is a ring's.
    payload: Bus,
    driver: Driver<Spied<Heap, Cached>, u64>,
    device: Device<Spied<Heap, Cached>>,
    memory: Heap,
    /// Addresses of buffers that nobody uses, the one that came back last on top, as the free lists of our drivers have it.
    free: Vec<u64>,
    case: Case,
}

impl Bed {
    fn new(case: Case) -> Self {
        let places = Places::new(SIZE, case.packed);
        let memory = Heap::new(places.bytes(0));
        let bus = Bus::default();
        let parts = |side| {
            let Parts { size, desc, driver, device } = places.parts(&memory);
            let cached = |words, base| Spied { words, spy: Cached { bus: Rc::clone(&bus), side, base } };
            Parts {
                size,
                desc: cached(desc, places.desc),
                driver: cached(driver, places.driver),
                device: cached(device, places.device),
            }
        };
        let features =
            RingFeatures { indirect: false, event_idx: false, packed: case.packed, in_order: case.in_order };
        let driver = Driver::new(parts(Side::Driver), features, None).unwrap();
        let device = Device::new(parts(Side::Device), features, fresh_base(case.packed), None).unwrap();
        let first = common::BASE + (1 << 24);
        let free = (0..u64::from(SIZE)).rev().map(|buffer| first + buffer * STRIDE).collect();
        Self { bus, payload: Bus::default(), driver, device, memory, free, case }
    }

    /// A side reads or writes a frame and its header.
    fn touch(&self, side: Side, buffer: u64, store: bool) {
        let end = buffer + (HEADER + self.case.size) as u64;
        for line in buffer / LINE..end.div_ceil(LINE) {
            self.payload.borrow_mut().access(side, line * LINE, store);
        }
    }

    /// Adds a free buffer: a frame to send, or room for one.
    fn add(&mut self) {
        let buffer = self.free.pop().expect("as many buffers as entries");
        let room = [Buffer { addr: buffer, len: STRIDE as u32 }];
        match self.case.direction {
            Direction::Transmit => {
                self.touch(Side::Driver, buffer, true);
                let frame = [Buffer { addr: buffer, len: (HEADER + self.case.size) as u32 }];
                self.driver.add(&frame, &[], buffer).unwrap();
            }
            Direction::Receive => {
                self.driver.add(&[], &room, buffer).unwrap();
            }
        }
    }

    /// The driver's turn, with a burst.
    fn drive(&mut self) {
        while let Some(used) = self.driver.collect() {
            if self.case.direction == Direction::Receive {
                self.touch(Side::Driver, used.token, false);
            }
            self.free.push(used.token);
        }
        (0..self.case.batch).for_each(|_| self.add());
        self.driver.publish();
    }

    /// The device's turn, with a burst.
    fn serve(&mut self) {
        let mut chains = Chains::new();
        let taken = self.device.take(self.case.batch, &mut self.memory.tables(), &mut chains);
        assert_eq!(taken, self.case.batch);
        let done: Vec<_> = chains
            .iter()
            .map(|chain| {
                let buffer = chains.readable(chain).iter().chain(chains.writable(chain)).next().unwrap().addr;
                self.touch(Side::Device, buffer, self.case.direction == Direction::Receive);
                match self.case.direction {
                    Direction::Transmit => chain.done(0),
                    Direction::Receive => chain.done((HEADER + self.case.size) as u32),
                }
            })
            .collect();
        self.device.complete_all(done);
        self.device.publish();
    }

    fn count(mut self) -> Counted {
        self.driver.disable_calls();
        self.device.disable_kicks();
        if self.case.direction == Direction::Receive {
            // All but a burst are posted from the beginning: the device always finds some.
            (0..usize::from(SIZE) - self.case.batch).for_each(|_| self.add());
            self.driver.publish();
            self.turns(WARM_UP);
        } else {
            self.turns(WARM_UP);
        }
        for bus in [&self.bus, &self.payload] {
            bus.borrow_mut().crossings = Crossings::default();
        }
        self.turns(COUNTED);
        assert_eq!((self.driver.fault(), self.device.fault()), (None, None));
        let crossings = |bus: &Bus| bus.borrow().crossings;
        Counted { ring: crossings(&self.bus), payload: crossings(&self.payload) }
    }

    /// So many packets.
    fn turns(&mut self, packets: usize) {
        for _ in 0..packets / self.case.batch {
            self.drive();
            self.serve();
        }
    }
}

impl Case {
    fn all() -> impl Iterator<Item = Self> {
        let layouts = [(false, false), (false, true), (true, false), (true, true)];
        layouts.into_iter().flat_map(|(packed, in_order)| {
            [Direction::Transmit, Direction::Receive].into_iter().flat_map(move |direction| {
                [1, 8, 32].into_iter().flat_map(move |batch| {
                    [64, 1518].map(move |size| Case { packed, in_order, direction, batch, size })
                })
            })
        })
    }

    /// Crossings for each packet that no ring of this layout can save, and those of its payload.
    fn least(&self) -> [f64; 2] {
        let descriptors = self.batch.div_ceil(4) as f64;
        let ring = if self.packed {
            descriptors
        } else {
            // With IN_ORDER the device knows what is in the available ring, and of a burst that is sent one used element is written.
            let available = if self.in_order { 0 } else { self.batch };
            let one = self.in_order && self.direction == Direction::Transmit;
            let used = if one { 1 } else { self.batch };
            descriptors + index_and_entries(2, available, self.batch) + index_and_entries(8, used, self.batch)
        };
        [2.0 * ring / self.batch as f64, 2.0 * (HEADER + self.size).div_ceil(LINE as usize) as f64]
    }

    fn name(&self) -> String {
        let layout = if self.packed { "packed" } else { "split" };
        let order = if self.in_order { "-in-order" } else { "" };
        let direction = if self.direction == Direction::Transmit { "transmit" } else { "receive" };
        format!("{:<16} {direction:<9} {:>5} {:>5}", format!("{layout}{order}"), self.batch, self.size)
    }
}

/// Lines of an available or used ring in which a burst changes the index and so many entries, the mean of all places in the ring. The area begins on a
/// line, with two bytes of flags, two of index and the entries.
fn index_and_entries(entry: usize, entries: usize, batch: usize) -> f64 {
    let line = LINE as usize;
    let of_burst = |at: usize| {
        let touched: BTreeSet<usize> =
            (at..at + entries).map(|at| (4 + entry * at) / line).chain([0]).collect();
        touched.len()
    };
    let bursts = (0..SIZE as usize).step_by(batch);
    let count = bursts.len() as f64;
    bursts.map(of_burst).sum::<usize>() as f64 / count
}

#[test]
fn lines_that_cross_for_each_packet_are_those_of_the_table() {
    let mut table = String::from(
        "Cache lines that cross between driver and device for each packet; see lines.rs. Of the ring: fetched and claimed by each side, all, and the least that\n\
         the layout needs; of payload: all, and the least.\n\n\
         ring             direction batch  size | driver fetch claim  device fetch claim   all least | payload least\n",
    );
    for case in Case::all() {
        let Counted { ring, payload } = Bed::new(case).count();
        let [ring_least, payload_least] = case.least();
        let each = |count: usize| count as f64 / COUNTED as f64;
        assert!(each(ring.all()) >= ring_least, "{case:?}: less than the least");
        let _ = writeln!(
            table,
            "{} |       {:>6.3} {:>5.3}        {:>5.3} {:>5.3} {:>5.3} {:>5.3} |  {:>6.3} {:>5.1}",
            case.name(),
            each(ring.fetched[0]),
            each(ring.claimed[0]),
            each(ring.fetched[1]),
            each(ring.claimed[1]),
            each(ring.all()),
            ring_least,
            each(payload.all()),
            payload_least,
        );
    }
    expect_file!["lines.txt"].assert_eq(&table);
}

#[test]
fn the_model_counts_what_two_caches_do() {
    let mut caches = Caches::default();
    let mut step = |side, store| {
        let before = caches.crossings;
        caches.access(side, 0, store);
        let after = caches.crossings;
        (after.all() - before.all(), after)
    };
    // Nobody has it; the writer has it; the reader fetches it, and again for nothing.
    assert_eq!(step(Side::Driver, true).0, 0);
    assert_eq!(step(Side::Driver, false).0, 0);
    assert_eq!(step(Side::Device, false).0, 1);
    assert_eq!(step(Side::Device, false).0, 0);
    assert_eq!(step(Side::Driver, false).0, 0);
    // The writer claims it, which takes it away from the reader; then a write fetches it, once for both.
    assert_eq!(step(Side::Driver, true).0, 1);
    assert_eq!(step(Side::Device, true).0, 1);
    assert_eq!(step(Side::Device, true).0, 0);
    let (_, crossings) = step(Side::Driver, false);
    assert_eq!(crossings, Crossings { fetched: [1, 2], claimed: [1, 0] });
}
