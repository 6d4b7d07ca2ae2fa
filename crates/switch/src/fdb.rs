//! The forwarding database: which port a MAC address was last seen on (IEEE 802.1Q, 8.8).
//!
//! Every frame costs one [`learn`](Fdb::learn) (its source) and one [`lookup`](Fdb::lookup) (its
//! destination), and guests choose both addresses. So the table is built to stay small, fast and fair
//! whatever they send:
//!
//! - **Bounded.** All memory is allocated at the start and the table never grows.
//! - **Bounded work.** An address can only be in two places, two buckets of four slots, each bucket one cache
//!   line; it goes to the emptier one (two-choice hashing). Twice as many slots as addresses allowed makes a
//!   full pair of buckets rare. Linear probing was considered: its probe length depends on the other
//!   addresses, and removal needs tombstones.
//! - **Unpredictable.** The hash is keyed with a random seed, so a guest cannot choose addresses that
//!   collide.
//! - **Fair.** A port may add an address only while it holds fewer addresses than are free. One port alone
//!   can fill half of the table, two that flood a third each, and a port that holds nothing always finds room
//!   until nothing is free (dynamic thresholds: Choudhury and Hahne 1998, as in shared-buffer switches). A
//!   port above its share replaces its own oldest address in those two buckets, and when it has none there,
//!   is refused; it never evicts an address of another port. Whoever floods source addresses hurts only their
//!   own.
//!
//! An address that is silent for longer than the age is no longer found; its slot is reused when needed and
//! freed by [`sweep`](Fdb::sweep). Time is a coarse tick in seconds that the caller reads once per burst. Each
//! worker has a table of its own, and tells the others what [`learn`](Fdb::learn) says is news.

use ringferry_packet::ether::Mac;

/// Index of a port in its switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u16);

/// Set in the key of a used slot, so that no key is zero. Bits 48 to 59 stay free for a VLAN id: tables per
/// VLAN cost nothing more.
const USED: u64 = 1 << 63;

/// One address. A key of zero is a free slot.
#[derive(Clone, Copy, Default)]
struct Slot {
    key: u64,
    /// Tick at which the address last sent.
    seen: u32,
    port: u16,
    /// When other workers were last told, as the low bits of a tick.
    told: u16,
}

/// Slots that share a cache line.
const WAYS: usize = 4;

#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Bucket([Slot; WAYS]);

impl Bucket {
    /// Which slot has `key`. All four are compared before the one branch, because which slot it is cannot be
    /// predicted: a third less time than a loop that stops at the first match.
    #[inline]
    fn find(&self, key: u64) -> Option<usize> {
        let matches = self
            .0
            .iter()
            .enumerate()
            .fold(0_u32, |bits, (way, slot)| bits | u32::from(slot.key == key) << way);
        (matches != 0).then(|| matches.trailing_zeros() as usize % WAYS)
    }
}

/// What happened to the table since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FdbStats {
    /// Addresses added.
    pub learned: u64,
    /// Addresses that changed ports. Steady growth means a loop, or two machines with one address.
    pub moved: u64,
    /// Addresses that replaced an older one of the same port, because the port held its share or the slots
    /// were taken.
    pub replaced: u64,
    /// Addresses not remembered, because the port held its share or the slots were taken; frames to them are
    /// flooded.
    pub refused: u64,
    /// Addresses removed because they were silent for too long.
    pub aged: u64,
}

/// One address in the table, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdbItem {
    /// The address.
    pub mac: Mac,
    /// The port it was last seen on.
    pub port: PortId,
    /// Seconds since it last sent.
    pub age: u32,
}

/// The table. See the module's description.
pub struct Fdb {
    buckets: Box<[Bucket]>,
    seed: [u64; 2],
    max_age: u32,
    capacity: usize,
    len: usize,
    /// Addresses held by each port, aged ones included until their slot is freed.
    held: Vec<u32>,
    /// Next bucket to sweep.
    cursor: usize,
    stats: FdbStats,
}

impl Fdb {
    /// A table for `capacity` addresses (rounded up to a power of two, at least 4) that are forgotten after
    /// `max_age` seconds of silence. `seed` must be random and stay secret. Takes 32 bytes for each address
    /// allowed.
    pub fn new(capacity: usize, max_age: u32, seed: [u64; 2]) -> Fdb {
        let capacity = capacity.next_power_of_two().max(WAYS);
        let buckets = vec![Bucket::default(); 2 * capacity / WAYS].into_boxed_slice();
        Fdb {
            buckets,
            seed,
            max_age,
            capacity,
            len: 0,
            held: Vec::new(),
            cursor: 0,
            stats: FdbStats::default(),
        }
    }

    /// Most addresses the table holds.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Addresses in the table, silent ones included until their slot is freed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the table holds no address.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What happened so far.
    pub fn stats(&self) -> FdbStats {
        self.stats
    }

    /// Notes that `mac` sent a frame into `port` at `now`. Multicast, broadcast and zero addresses belong to
    /// no station and are ignored. True when the tables of other workers should hear of it: the address is new or has moved,
    /// or they were last told a quarter of the age ago.
    #[inline]
    pub fn learn(&mut self, mac: Mac, port: PortId, now: u32) -> bool {
        if mac.is_multicast() || mac == Mac::default() {
            return false;
        }
        let key = key(mac);
        let pair = self.pair(key);
        for bucket in pair {
            if let Some(way) = self.buckets[bucket].find(key) {
                let slot = &mut self.buckets[bucket].0[way];
                // Stored only when it changes, so that a busy table is only read.
                if slot.seen == now && slot.port == port.0 {
                    return false;
                }
                slot.seen = now;
                let mut news =
                    u32::from((now as u16).wrapping_sub(slot.told)) > (self.max_age / 4).min(0x7fff);
                if slot.port != port.0 {
                    let from = std::mem::replace(&mut slot.port, port.0);
                    self.moved(from, port.0);
                    news = true;
                }
                if news {
                    self.buckets[bucket].0[way].told = now as u16;
                }
                return news;
            }
        }
        self.insert(pair, Slot { key, seen: now, port: port.0, told: now as u16 });
        true
    }

    /// The port `mac` was last seen on, unless that was too long ago.
    #[inline]
    pub fn lookup(&self, mac: Mac, now: u32) -> Option<PortId> {
        let key = key(mac);
        let [first, second] = self.pair(key).map(|bucket| &self.buckets[bucket]);
        let slot = match first.find(key) {
            Some(way) => &first.0[way],
            None => &second.0[second.find(key)?],
        };
        (age(slot, now) <= self.max_age).then_some(PortId(slot.port))
    }

    /// Removes every address of `port`: it was unplugged.
    pub fn forget_port(&mut self, port: PortId) {
        for bucket in 0..self.buckets.len() {
            self.retain(bucket, |slot| slot.port != port.0);
        }
    }

    /// Frees the slots of silent addresses in the next `buckets` buckets of four slots and returns how many
    /// it freed. Called now and then with a small number; a whole round is `2 * capacity / 4` buckets.
    pub fn sweep(&mut self, buckets: usize, now: u32) -> usize {
        let max_age = self.max_age;
        let mut freed = 0;
        for _ in 0..buckets.min(self.buckets.len()) {
            freed += self.retain(self.cursor, |slot| age(slot, now) <= max_age);
            self.cursor = (self.cursor + 1) % self.buckets.len();
        }
        self.stats.aged += freed as u64;
        freed
    }

    /// Every address that is not too old, in no particular order.
    pub fn iter(&self, now: u32) -> impl Iterator<Item = FdbItem> {
        let used = self.buckets.iter().flat_map(|bucket| &bucket.0).filter(|slot| slot.key != 0);
        let items = used.map(move |slot| FdbItem {
            mac: mac(slot.key),
            port: PortId(slot.port),
            age: age(slot, now),
        });
        items.filter(|item| item.age <= self.max_age)
    }

    /// The two buckets `key` can be in (possibly the same).
    #[inline]
    fn pair(&self, key: u64) -> [usize; 2] {
        let mask = self.buckets.len() - 1;
        let hash = mix(mix(key ^ self.seed[0]) ^ self.seed[1]);
        [hash as usize & mask, (hash >> 32) as usize & mask]
    }

    /// Puts an address that is not in the table into one of its two buckets.
    #[cold]
    fn insert(&mut self, pair: [usize; 2], new: Slot) {
        // A silent address gives way first, so that what follows counts only addresses in use.
        let max_age = self.max_age;
        for bucket in pair {
            self.stats.aged += self.retain(bucket, |slot| age(slot, new.seen) <= max_age) as u64;
        }
        let used = |bucket: usize| self.buckets[bucket].0.iter().filter(|slot| slot.key != 0).count();
        let bucket = if used(pair[1]) < used(pair[0]) { pair[1] } else { pair[0] };
        let held = *self.held_by(new.port) as usize;
        if held < self.capacity - self.len
            && let Some(free) = self.buckets[bucket].0.iter_mut().find(|slot| slot.key == 0)
        {
            *free = new;
            self.len += 1;
            *self.held_by(new.port) += 1;
            self.stats.learned += 1;
        } else if let Some((bucket, way)) = self.oldest_of_port(pair, new) {
            self.buckets[bucket].0[way] = new;
            self.stats.replaced += 1;
        } else {
            self.stats.refused += 1;
        }
    }

    /// Where in `pair` the oldest address of the same port as `new` is.
    fn oldest_of_port(&self, pair: [usize; 2], new: Slot) -> Option<(usize, usize)> {
        let places = pair.into_iter().flat_map(|bucket| (0..WAYS).map(move |way| (bucket, way)));
        let slot = |(bucket, way): (usize, usize)| &self.buckets[bucket].0[way];
        let own = places.filter(|place| slot(*place).key != 0 && slot(*place).port == new.port);
        own.max_by_key(|place| age(slot(*place), new.seen))
    }

    #[cold]
    fn moved(&mut self, from: u16, to: u16) {
        *self.held_by(from) -= 1;
        *self.held_by(to) += 1;
        self.stats.moved += 1;
    }

    /// Frees the slots of `bucket` that `keep` does not want and returns how many.
    fn retain(&mut self, bucket: usize, keep: impl Fn(&Slot) -> bool) -> usize {
        let mut freed = 0;
        for way in 0..WAYS {
            let slot = self.buckets[bucket].0[way];
            if slot.key != 0 && !keep(&slot) {
                self.buckets[bucket].0[way] = Slot::default();
                *self.held_by(slot.port) -= 1;
                freed += 1;
            }
        }
        self.len -= freed;
        freed
    }

    /// The number of addresses `port` holds. Grows with the number of ports, which guests do not choose.
    fn held_by(&mut self, port: u16) -> &mut u32 {
        let index = usize::from(port);
        if index >= self.held.len() {
            self.held.resize(index + 1, 0);
        }
        &mut self.held[index]
    }
}

/// Seconds since `slot` was seen. A clock that steps back makes nothing old.
#[inline]
fn age(slot: &Slot, now: u32) -> u32 {
    now.saturating_sub(slot.seen)
}

#[inline]
fn key(mac: Mac) -> u64 {
    let [a, b, c, d, e, f] = mac.0;
    u64::from_be_bytes([0, 0, a, b, c, d, e, f]) | USED
}

fn mac(key: u64) -> Mac {
    let [_, _, mac @ ..] = key.to_be_bytes();
    Mac(mac)
}

/// One round of a folded multiply: every bit of the product depends on the bits of `word`.
#[inline]
fn mix(word: u64) -> u64 {
    // An odd constant without structure: the fractional part of the golden ratio.
    let product = u128::from(word) * 0x9e37_79b9_7f4a_7c15;
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const SEED: [u64; 2] = [0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210];
    const A: PortId = PortId(0);
    const B: PortId = PortId(1);

    /// The `n`th address of a station.
    fn station(n: u64) -> Mac {
        let [_, _, _, a, b, c, d, e] = (n + 1).to_be_bytes();
        Mac([0x52, a, b, c, d, e])
    }

    fn held(fdb: &Fdb, port: PortId) -> usize {
        fdb.iter(0).filter(|item| item.port == port).count()
    }

    #[test]
    fn learned_address_is_found_until_it_ages() {
        let mut fdb = Fdb::new(64, 300, SEED);
        fdb.learn(station(1), B, 1000);
        assert_eq!(fdb.lookup(station(1), 1300), Some(B));
        assert_eq!(fdb.lookup(station(1), 1301), None);
        assert_eq!(fdb.lookup(station(2), 1000), None);
        fdb.learn(station(1), B, 1200);
        assert_eq!(fdb.lookup(station(1), 1500), Some(B), "a frame makes the address young again");
    }

    /// IEEE 802.1Q, 8.7: a group address is never learned.
    #[test]
    fn group_and_zero_addresses_are_not_learned() {
        let mut fdb = Fdb::new(64, 300, SEED);
        for mac in
            [Mac::BROADCAST, Mac([0x01, 0, 0x5e, 0, 0, 1]), Mac([0x33, 0x33, 0, 0, 0, 1]), Mac::default()]
        {
            fdb.learn(mac, A, 0);
            assert_eq!(fdb.lookup(mac, 0), None);
        }
        assert!(fdb.is_empty());
    }

    #[test]
    fn address_that_changes_ports_is_counted_and_followed() {
        let mut fdb = Fdb::new(64, 300, SEED);
        fdb.learn(station(1), A, 0);
        fdb.learn(station(1), B, 0);
        assert_eq!(fdb.lookup(station(1), 0), Some(B));
        assert_eq!((fdb.stats().moved, fdb.len()), (1, 1));
        fdb.forget_port(A);
        assert_eq!(fdb.lookup(station(1), 0), Some(B));
    }

    #[test]
    fn unplugged_port_is_forgotten() {
        let mut fdb = Fdb::new(256, 300, SEED);
        for n in 0..100 {
            fdb.learn(station(n), PortId((n % 2) as u16), 0);
        }
        fdb.forget_port(A);
        assert_eq!((held(&fdb, A), held(&fdb, B), fdb.len()), (0, 50, 50));
        assert!((0..100).all(|n| fdb.lookup(station(n), 0) == (n % 2 == 1).then_some(B)));
    }

    #[test]
    fn sweep_frees_silent_addresses_and_no_others() {
        let mut fdb = Fdb::new(256, 300, SEED);
        for n in 0..100 {
            fdb.learn(station(n), A, if n < 60 { 0 } else { 200 });
        }
        let freed: usize = (0..128).map(|_| fdb.sweep(1, 301)).sum();
        assert_eq!((freed, fdb.len(), fdb.stats().aged), (60, 40, 60));
        assert!((60..100).all(|n| fdb.lookup(station(n), 301) == Some(A)));
        assert_eq!(fdb.sweep(usize::MAX, 301), 0, "a budget larger than the table is one round");
    }

    /// A guest that sends from ever new addresses (macof) neither evicts the others nor keeps them from being
    /// learned.
    #[test]
    fn flooding_guest_hurts_only_itself() {
        let mut fdb = Fdb::new(1024, 300, SEED);
        for n in 0..100 {
            fdb.learn(station(n), A, 0);
        }
        for n in 1000..101_000 {
            fdb.learn(station(n), B, 0);
        }
        assert!((0..100).all(|n| fdb.lookup(station(n), 0) == Some(A)), "evicted by the flood");
        assert!(fdb.len() <= fdb.capacity());
        assert_eq!(held(&fdb, B), (1024 - 100) / 2);
        let newcomer = PortId(2);
        for n in 100..300 {
            fdb.learn(station(n), newcomer, 0);
        }
        assert!(
            (100..300).filter(|n| fdb.lookup(station(*n), 0) == Some(newcomer)).count() >= 190,
            "no room left by the flood"
        );
        let stats = fdb.stats();
        assert_eq!(stats.learned + stats.replaced + stats.refused, 100 + 100_000 + 200);
    }

    #[test]
    fn flooding_guests_together_leave_a_share() {
        let mut fdb = Fdb::new(1024, 300, SEED);
        for n in 0..100_000 {
            fdb.learn(station(n), PortId((n % 7) as u16), 0);
        }
        assert!(fdb.capacity() - fdb.len() >= 1024 / 8);
        assert!((0..7).all(|port| held(&fdb, PortId(port)) >= 1024 / 8 - 7));
    }

    #[test]
    fn half_of_the_capacity_fits_without_loss_from_one_port() {
        let mut fdb = Fdb::new(16384, 300, SEED);
        for n in 0..8192 {
            fdb.learn(station(n), A, 0);
        }
        assert!((0..8192).filter(|n| fdb.lookup(station(*n), 0) == Some(A)).count() >= 8190);
    }

    #[test]
    fn silent_addresses_make_room_without_a_sweep() {
        let mut fdb = Fdb::new(64, 300, SEED);
        for n in 0..10_000 {
            fdb.learn(station(n), A, 0);
        }
        for n in 20_000..30_000 {
            fdb.learn(station(n), B, 301);
        }
        assert!(fdb.iter(301).filter(|item| item.port == B).count() >= 16);
    }

    #[test]
    fn placement_depends_on_the_seed() {
        let fdb = Fdb::new(16384, 300, SEED);
        let other = Fdb::new(16384, 300, [SEED[0] ^ 1, SEED[1]]);
        let same = (0..1000).filter(|n| fdb.pair(key(station(*n))) == other.pair(key(station(*n)))).count();
        assert!(same < 5, "{same} of 1000 addresses are where they were");
    }

    #[test]
    fn bucket_is_one_cache_line() {
        assert_eq!(size_of::<Bucket>(), 64);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Learn(u64, u16),
        Lookup(u64),
        Forget(u16),
        Sweep(usize),
        Wait(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0..40u64, 0..4u16).prop_map(|(n, port)| Step::Learn(n, port)),
            3 => (0..40u64).prop_map(Step::Lookup),
            1 => (0..4u16).prop_map(Step::Forget),
            1 => (0..20usize).prop_map(Step::Sweep),
            2 => (0..15u32).prop_map(Step::Wait),
        ]
    }

    proptest! {
        /// With far more room than addresses, the table is a map with ageing.
        #[test]
        fn agrees_with_a_map(steps in proptest::collection::vec(step(), 0..300), seed: [u64; 2]) {
            let mut fdb = Fdb::new(1024, 30, seed);
            let mut model: HashMap<u64, (u16, u32)> = HashMap::new();
            let mut now = 0;
            for step in steps {
                match step {
                    Step::Learn(n, port) => {
                        fdb.learn(station(n), PortId(port), now);
                        model.insert(n, (port, now));
                    }
                    Step::Lookup(n) => {
                        let expected = model.get(&n).filter(|(_, seen)| now - seen <= 30);
                        let expected = expected.map(|(port, _)| PortId(*port));
                        prop_assert_eq!(fdb.lookup(station(n), now), expected);
                    }
                    Step::Forget(port) => {
                        fdb.forget_port(PortId(port));
                        model.retain(|_, (at, _)| *at != port);
                    }
                    Step::Sweep(buckets) => {
                        fdb.sweep(buckets, now);
                    }
                    Step::Wait(seconds) => now += seconds,
                }
            }
            let mut listed: Vec<_> = fdb.iter(now).map(|item| (item.mac, item.port.0, item.age)).collect();
            let live = model.iter().filter(|(_, (_, seen))| now - seen <= 30);
            let mut expected: Vec<_> =
                live.map(|(n, (port, seen))| (station(*n), *port, now - seen)).collect();
            listed.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(listed, expected);
        }

        /// However full: never over capacity, never a wrong port, and the count per port is true.
        #[test]
        fn stays_consistent_when_full(
            steps in proptest::collection::vec((0..400u64, 0..4u16, 0..3u32), 0..2000),
            seed: [u64; 2],
        ) {
            let mut fdb = Fdb::new(64, 10, seed);
            let mut last = HashMap::new();
            let mut now = 0;
            for (n, port, seconds) in steps {
                now += seconds / 2;
                fdb.learn(station(n), PortId(port), now);
                last.insert(n, PortId(port));
                prop_assert!(fdb.len() <= fdb.capacity());
                if let Some(found) = fdb.lookup(station(n), now) {
                    prop_assert_eq!(found, last[&n]);
                }
            }
            let used = fdb.buckets.iter().flat_map(|bucket| bucket.0).filter(|slot| slot.key != 0);
            let mut held = vec![0; fdb.held.len()];
            used.for_each(|slot| held[usize::from(slot.port)] += 1);
            prop_assert_eq!(held.iter().sum::<u32>() as usize, fdb.len());
            prop_assert_eq!(held, fdb.held);
        }
    }
}
