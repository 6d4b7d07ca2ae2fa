//! The forwarding database: maps a VLAN and a MAC address to the port that the address was last seen on
//! (IEEE 802.1Q, 8.8), by bucketised cuckoo hashing.
//!
//! Every frame costs one [`learn`](Fdb::learn) (its source) and one [`lookup`](Fdb::lookup) (its
//! destination), and guests choose both addresses. So the table is built to stay small, fast and fair
//! whatever they send:
//!
//! - **Bounded.** All memory is allocated at the start and the table never grows.
//! - **Bounded work.** An address can only be in two places, two buckets of four slots, each bucket one cache
//!   line; it goes to the first if that has a free slot. Twice as many slots as addresses allowed makes a full pair of buckets
//!   rare, and then one of the eight addresses in it moves to its own other bucket. Putting an address into the
//!   emptier bucket was tried: half of them are then in the second, which takes a look-up 1.5 to 3 times as long.
//!   Linear probing was considered: its probe length depends on the other addresses, and removal needs
//!   tombstones.
//! - **Unpredictable.** The hash is keyed with a random seed, so a guest cannot choose addresses that
//!   collide.
//! - **Fair.** A port may add an address only while it holds fewer addresses than are free, and addresses that move to it count as well. One port alone
//!   can fill half of the table, and two that flood a third each (dynamic thresholds: Choudhury and Hahne 1998, as in shared-buffer switches). A
//!   port above that replaces its own oldest address in those two buckets, and when it has none there, is refused. Ports that fill the table one after
//!   the other would leave half as much each time, and a dozen of them nothing: so a port has a *share* of its own, below which
//!   it replaces the oldest address there of a port that holds more than that. No address of a port within its share is evicted: a guest that
//!   floods source addresses hurts only its own.
//!
//! Two rules of a port bear on the table. Its *static* addresses lie among the others but are never aged, moved, replaced
//! or evicted; a frame that comes from one behind another port is to be dropped. Its *limit* is exact: the port never
//! holds more learned addresses, and an address that has gone silent stops counting at once.
//!
//! The storage of a large table is in huge pages, if the kernel has some: of a million addresses one was then found in 13 % less time
//! (`ringferry lab fdb`), as nearly every look-up misses the processor's address translations.
//!
//! An address that is silent for longer than the age is no longer found; its slot is reused when needed and
//! freed by [`sweep`](Fdb::sweep). Time is a coarse tick in seconds that the caller reads once per burst. Each
//! worker has a table of its own, and tells the others what [`learn`](Fdb::learn) says is news.

mod restless;

use std::collections::HashSet;

use ringferry_memory::{ReadSlice, prefer_huge_pages};
use ringferry_packet::ether::Mac;
use zerocopy::{Immutable, IntoBytes};

use crate::rules::Vid;
use restless::{Mover, Movers};

/// Index of a port in its switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u16);

/// Set in the key of a used slot, so that no key is zero. The address is in bits 0 to 47, its VLAN in bits 48 to 59.
const USED: u64 = 1 << 63;

/// The tick that a static address has in [`Slot::seen`]. No clock gets there (it would take 136 years), so
/// the address is always young, and no other field is needed to tell it.
const FIXED: u32 = u32::MAX;

/// One address. A key of zero is a free slot.
#[derive(Clone, Copy, Default, IntoBytes, Immutable)]
#[repr(C)]
struct Slot {
    key: u64,
    /// Tick at which the address last sent, or [`FIXED`].
    seen: u32,
    port: u16,
    /// Tick at which the address was last announced to other workers, low 16 bits only.
    told: u16,
}

/// Addresses in the table from which on those of a burst are fetched before any is looked up: as many as fill half of a first-level cache, each
/// in a line of its own. A table in the second-level cache is looked up as fast as it is fetched where nothing else happens (`ringferry lab fdb`), but in a switch
/// frames go through that cache, too.
const LARGE: usize = 256;

/// Slots that share a cache line.
const WAYS: usize = 4;

#[derive(Clone, Copy, Default, IntoBytes, Immutable)]
#[repr(C, align(64))]
struct Bucket([Slot; WAYS]);

impl Bucket {
    /// Returns the slot that holds `key`. All four are compared before the one branch, because the processor
    /// cannot predict which one matches: a third less time than a loop that stops at the first match.
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

/// A VLAN and an address with their hash in one table, made by [`Fdb::hash`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Hashed {
    key: u64,
    hash: u64,
}

impl Hashed {
    /// The VLAN that it was made of.
    #[inline]
    pub(crate) fn vid(&self) -> Vid {
        vid(self.key)
    }

    /// The address that it was made of.
    #[inline]
    pub(crate) fn mac(&self) -> Mac {
        mac(self.key)
    }

    /// Returns true if it was made of this VLAN and this address.
    #[inline]
    pub(crate) fn is_of(&self, vid: Vid, mac: Mac) -> bool {
        self.key == key(vid, mac)
    }
}

/// The verdict of [`Fdb::learn`] on a frame's source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Learned {
    /// The address is known, and the tables of other workers lack nothing.
    Known,
    /// The address is to be announced to other workers: it is new or has moved.
    News,
    /// The address is known, and to be announced again: it was last announced a quarter of the age ago.
    Due,
    /// The frame is to be dropped: its port has as many addresses as its limit allows, or the address is a
    /// static one of another port.
    Limited,
    /// The table has no place for the address: it is not remembered, and not announced to other workers.
    Refused,
}

/// Counters of one table, all of them totals since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FdbStats {
    /// Addresses added to the table, each time they were new.
    pub learned: u64,
    /// Addresses that changed ports. Steady growth means a loop, or two machines with one address.
    pub moved: u64,
    /// Addresses that replaced an older one, of the same port or of one that held more than its share, because few addresses were free or the slots
    /// were taken.
    pub replaced: u64,
    /// Addresses not remembered, because the port held its share or the slots were taken; frames to them are
    /// flooded.
    pub refused: u64,
    /// Addresses removed because they were silent for too long.
    pub aged: u64,
    /// Frames whose source was answered with [`Learned::Limited`].
    pub limited: u64,
}

impl FdbStats {
    /// All of them, in the order of their fields.
    pub(crate) fn values(&self) -> [u64; 6] {
        let FdbStats { learned, moved, replaced, refused, aged, limited } = *self;
        [learned, moved, replaced, refused, aged, limited]
    }

    /// The counters of these values.
    pub(crate) fn of_values([learned, moved, replaced, refused, aged, limited]: [u64; 6]) -> FdbStats {
        FdbStats { learned, moved, replaced, refused, aged, limited }
    }
}

/// Buckets of a [`FdbPage`]: 256 KiB to read. A worker that read a table of a million addresses at once would keep its packets
/// waiting for as long as that takes. Other sizes were not tried.
const PAGE: usize = 4096;

/// Which learned addresses are to be forgotten: those for which all that is said is true.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flush {
    /// They are behind this port.
    pub port: Option<PortId>,
    /// They are in this VLAN.
    pub vid: Option<Vid>,
    /// This address.
    pub mac: Option<Mac>,
}

impl Flush {
    fn means(&self, slot: &Slot) -> bool {
        slot.seen != FIXED
            && self.port.is_none_or(|port| port.0 == slot.port)
            && self.vid.is_none_or(|wanted| wanted == vid(slot.key))
            && self.mac.is_none_or(|wanted| wanted == mac(slot.key))
    }
}

/// A part of the table, read for display.
#[derive(Clone, Debug)]
pub struct FdbPage {
    /// The addresses of this part that are not too old, in no particular order.
    pub items: Vec<FdbItem>,
    /// The bucket at which the next part begins, or `None` at the end. An address that moves meanwhile may be
    /// in two parts, or in none.
    pub next: Option<usize>,
    /// The state of the whole table, which comes with its last part.
    pub whole: Option<FdbWhole>,
}

impl FdbPage {
    /// The bucket from which on there are no addresses: a page from there is the state of the whole table alone.
    pub const END: usize = usize::MAX;
}

/// The state of a whole table, but for its addresses.
#[derive(Clone, Debug)]
pub struct FdbWhole {
    /// Upper bound on the addresses that the table learns.
    pub capacity: usize,
    /// Its counters.
    pub stats: FdbStats,
    /// Addresses that move again and again.
    pub restless: Vec<Restless>,
    /// The address that each port has lost last, where it is behind the other port still.
    pub lost: Vec<LostAddress>,
    /// How many addresses each port has that has any, aged ones included until their slot is freed.
    pub behind: Vec<(PortId, usize)>,
}

/// An address that has moved from one port to another, which may have stolen it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostAddress {
    /// Its VLAN.
    pub vid: Vid,
    /// The address.
    pub mac: Mac,
    /// The port that it was behind.
    pub from: PortId,
    /// The port that it is behind.
    pub to: PortId,
    /// Seconds since it has moved.
    pub age: u32,
}

/// An address that moves between ports again and again: two machines with one address, or a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restless {
    /// Its VLAN.
    pub vid: Vid,
    /// The address.
    pub mac: Mac,
    /// The ports between which it has moved last.
    pub ports: [PortId; 2],
    /// How often it has moved.
    pub moves: u32,
    /// Seconds in which it has done so.
    pub seconds: u32,
}

impl From<&Mover> for Restless {
    fn from(mover: &Mover) -> Restless {
        let Mover { key, ports, moves, first, last, .. } = *mover;
        Restless { vid: vid(key), mac: mac(key), ports: ports.map(PortId), moves, seconds: last - first + 1 }
    }
}

/// One address in the table, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdbItem {
    /// The VLAN that the address was learned in.
    pub vid: Vid,
    /// The station's Ethernet address; never a group address.
    pub mac: Mac,
    /// The port that the address was last seen on.
    pub port: PortId,
    /// Seconds since it last sent; 0 for a static address.
    pub age: u32,
    /// True for a static address, which does not age.
    pub fixed: bool,
}

/// The table's account of one port.
#[derive(Debug, Default)]
struct Holder {
    /// Addresses learned behind it, aged ones included until their slot is freed.
    held: u32,
    limit: Option<Limit>,
    /// Keys of its static addresses that have a slot.
    fixed: Vec<u64>,
    /// The key of the address that has last moved from it to another port, and when. One for each port, so that nobody can hide what was taken from another.
    lost: Option<(u64, u32)>,
}

/// The limit on the addresses that may be learned behind a port.
#[derive(Debug)]
struct Limit {
    most: u32,
    /// Keys of the `held` learned addresses, so that they are found without a look at the whole table.
    keys: HashSet<u64>,
    /// Before this tick none of the addresses is too old. A guest that sends from ever new addresses thus
    /// makes us examine those it has at most once per tick.
    settled: u32,
}

/// A port whose addresses are being forgotten.
#[derive(Debug)]
struct Forgetting {
    port: u16,
    /// Addresses that were seen after this tick stay.
    until: u32,
    /// Buckets still to be examined.
    left: usize,
}

impl Forgetting {
    /// Returns true if the slot is to be forgotten. A static address is younger than any tick, so it never
    /// is.
    fn means(&self, slot: &Slot) -> bool {
        slot.port == self.port && slot.seen <= self.until
    }
}

/// A forwarding database. One worker owns it; the module's description says how it works.
pub struct Fdb {
    buckets: Box<[Bucket]>,
    seed: [u64; 2],
    max_age: u32,
    capacity: usize,
    /// Addresses learned; static ones do not count.
    len: usize,
    ports: Vec<Holder>,
    /// Next bucket that [`Fdb::sweep`] examines.
    cursor: usize,
    /// Ports whose addresses are being removed.
    forgetting: Vec<Forgetting>,
    /// Next bucket that [`Fdb::forget_some`] examines.
    forget_cursor: usize,
    stats: FdbStats,
    movers: Movers,
}

impl Fdb {
    /// Makes a table for `capacity` addresses (rounded up to a power of two, at least 4) that are forgotten
    /// after `max_age` seconds of silence. `seed` must be random and stay secret. The table takes 32 bytes
    /// for each address allowed.
    pub fn new(capacity: usize, max_age: u32, seed: [u64; 2]) -> Fdb {
        let capacity = capacity.next_power_of_two().max(WAYS);
        let count = 2 * capacity / WAYS;
        let mut buckets = Vec::with_capacity(count);
        prefer_huge_pages(buckets.spare_capacity_mut());
        buckets.resize(count, Bucket::default());
        Fdb {
            buckets: buckets.into_boxed_slice(),
            seed,
            max_age,
            capacity,
            len: 0,
            ports: Vec::new(),
            cursor: 0,
            forgetting: Vec::new(),
            forget_cursor: 0,
            stats: FdbStats::default(),
            movers: Movers::default(),
        }
    }

    /// Returns the upper bound on the addresses that the table learns.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Addresses learned, silent ones included until their slot is freed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if no address is learned; there may be static ones.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Static addresses in the table.
    pub fn static_len(&self) -> usize {
        self.ports.iter().map(|holder| holder.fixed.len()).sum()
    }

    /// Sets the counters, those of a table that this one goes on with.
    pub(crate) fn set_stats(&mut self, stats: FdbStats) {
        self.stats = stats;
    }

    /// Returns the counters since the table was made.
    pub fn stats(&self) -> FdbStats {
        self.stats
    }

    /// Notes that `mac` sent a frame into `port` in VLAN `vid` at `now`. Multicast, broadcast and zero addresses belong to
    /// no station and are ignored.
    #[inline]
    pub fn learn(&mut self, vid: Vid, mac: Mac, port: PortId, now: u32) -> Learned {
        self.learn_hashed(self.hash(vid, mac), port, now)
    }

    /// Does the same as [`learn`](Self::learn) with an address that was [hashed](Self::hash).
    #[inline]
    pub fn learn_hashed(&mut self, address: Hashed, port: PortId, now: u32) -> Learned {
        if !address.mac().is_station() {
            return Learned::Known;
        }
        let Hashed { key, hash } = address;
        let pair = self.buckets_of(hash);
        for bucket in pair {
            if let Some(way) = self.buckets[bucket].find(key) {
                let slot = &mut self.buckets[bucket].0[way];
                // Stored only when it changes, so that a busy table is only read.
                if slot.port == port.0 && (slot.seen == now || slot.seen == FIXED) {
                    return Learned::Known;
                }
                if slot.port != port.0 {
                    return self.moved((bucket, way), port.0, now);
                }
                slot.seen = now;
                if u32::from((now as u16).wrapping_sub(slot.told)) > (self.max_age / 4).min(0x7fff) {
                    slot.told = now as u16;
                    return Learned::Due;
                }
                return Learned::Known;
            }
        }
        self.insert(pair, Slot { key, seen: now, port: port.0, told: now as u16 })
    }

    /// Returns what [`learn`](Self::learn) would return now, and learns nothing. An address that is only due to be announced again counts as
    /// [`Learned::Known`].
    pub fn would_learn(&self, vid: Vid, mac: Mac, port: PortId, now: u32) -> Learned {
        if !mac.is_station() {
            return Learned::Known;
        }
        let key = key(vid, mac);
        let slot = self.find(key).map(|(bucket, way)| self.buckets[bucket].0[way]);
        match slot {
            Some(slot) if slot.port == port.0 => Learned::Known,
            Some(slot) if slot.seen == FIXED => Learned::Limited,
            _ if !self.could_hold_more(port.0, now) => Learned::Limited,
            Some(_) => Learned::News,
            None if self.has_place(key, port.0, now) => Learned::News,
            None => Learned::Refused,
        }
    }

    /// Returns whether an address that is not in the table finds a place in it.
    fn has_place(&self, key: u64, port: u16, now: u32) -> bool {
        let slots = || self.pair(key).into_iter().flat_map(|bucket| self.buckets[bucket].0);
        let is_full = |bucket: usize| self.buckets[bucket].0.iter().all(|slot| slot.key != 0);
        let gives_way = |slot: Slot| {
            slot.key == 0 || age(&slot, now) > self.max_age || !self.pair(slot.key).into_iter().all(is_full)
        };
        let evicted =
            |slot: Slot| slot.seen != FIXED && (slot.port == port || self.gives_way_to(port, &slot));
        self.has_room_for(port) && slots().any(gives_way) || slots().any(evicted)
    }

    /// Learned addresses that a port has room for whatever others hold: half of what would be its part if all had the same.
    fn share(&self) -> u32 {
        (self.capacity / (2 * self.ports.len().max(1))).max(1) as u32
    }

    fn held(&self, port: u16) -> u32 {
        self.ports.get(usize::from(port)).map_or(0, |holder| holder.held)
    }

    /// Returns true if one more address behind `port` may take a free place.
    fn has_room_for(&self, port: u16) -> bool {
        (self.held(port) as usize) < self.capacity.saturating_sub(self.len)
    }

    /// Returns true if `slot` is of a port above its share, and `port` is below its own.
    fn gives_way_to(&self, port: u16, slot: &Slot) -> bool {
        let share = self.share();
        self.held(port) < share && self.held(slot.port) > share
    }

    /// Returns the port that `mac` was last seen on in VLAN `vid`, unless that was longer ago than the age.
    #[inline]
    pub fn lookup(&self, vid: Vid, mac: Mac, now: u32) -> Option<PortId> {
        self.lookup_hashed(self.hash(vid, mac), now)
    }

    /// Does the same as [`lookup`](Self::lookup) with an address that was [hashed](Self::hash).
    #[inline]
    pub fn lookup_hashed(&self, Hashed { key, hash }: Hashed, now: u32) -> Option<PortId> {
        let [first, second] = self.buckets_of(hash);
        let first = &self.buckets[first];
        let slot = match first.find(key) {
            Some(way) => &first.0[way],
            None => {
                let second = &self.buckets[second];
                &second.0[second.find(key)?]
            }
        };
        (age(slot, now) <= self.max_age).then_some(PortId(slot.port))
    }

    /// Returns true if the table holds so many addresses that [`prefetch`](Self::prefetch) pays.
    #[inline]
    pub fn is_large(&self) -> bool {
        self.len >= LARGE
    }

    /// Hashes an address, for the calls that look it up.
    #[inline]
    pub fn hash(&self, vid: Vid, mac: Mac) -> Hashed {
        let key = key(vid, mac);
        Hashed { key, hash: self.hash_of(key) }
    }

    /// Has the processor fetch the bucket that [`learn`](Self::learn) and [`lookup`](Self::lookup) of this
    /// address will read. It is worth it for all addresses of a burst before the first look-up, as a large
    /// table is not in the cache. Only the first bucket is fetched, which nearly all addresses are in:
    /// fetching both takes longer than it saves.
    #[inline]
    pub fn prefetch(&self, address: Hashed) {
        let [first, _] = self.buckets_of(address.hash);
        ReadSlice::from(self.buckets[first].as_bytes()).prefetch();
    }

    /// Lets at most `most` addresses be learned behind `port`, or as many as its share of the table. If there
    /// are more, those that were silent for longest are forgotten.
    pub fn set_limit(&mut self, port: PortId, most: Option<u32>) {
        let holder = self.holder(port.0);
        if holder.limit.as_ref().map(|limit| limit.most) == most {
            return;
        }
        holder.limit = None;
        let Some(most) = most else { return };
        let places = (0..self.buckets.len()).flat_map(|bucket| (0..WAYS).map(move |way| (bucket, way)));
        let mut own: Vec<_> = places
            .map(|(bucket, way)| ((bucket, way), self.buckets[bucket].0[way]))
            .filter(|(_, slot)| slot.key != 0 && slot.port == port.0 && slot.seen != FIXED)
            .collect();
        own.sort_unstable_by_key(|(_, slot)| std::cmp::Reverse(slot.seen));
        for (place, _) in own.drain((most as usize).min(own.len())..) {
            self.free(place);
        }
        let keys = own.iter().map(|(_, slot)| slot.key).collect();
        self.holder(port.0).limit = Some(Limit { most, keys, settled: 0 });
    }

    /// Puts addresses behind `port` for ever, instead of those that an earlier call put there. An address
    /// that two ports name belongs to the one that named it last. Returns how many found no place: group
    /// addresses and those for which the table is too full of static ones; they are learned like any other.
    pub fn set_static(&mut self, port: PortId, addresses: &[(Mac, Vid)]) -> usize {
        for key in std::mem::take(&mut self.holder(port.0).fixed) {
            if let Some((bucket, way)) = self.find(key) {
                self.buckets[bucket].0[way] = Slot::default();
            }
        }
        addresses.iter().filter(|(mac, vid)| !self.fix(*mac, *vid, port.0)).count()
    }

    /// Begins to remove every address learned behind `port` up to tick `now`, as the stations behind it have
    /// gone. Static ones stay. The work is done by [`forget_some`](Self::forget_some), as the table may be
    /// large and packets wait; until then addresses may still be found.
    pub fn forget_port(&mut self, port: PortId, now: u32) {
        if self.holder(port.0).held == 0 {
            return;
        }
        let new = Forgetting { port: port.0, until: now, left: self.buckets.len() };
        match self.forgetting.iter_mut().find(|forgetting| forgetting.port == port.0) {
            Some(same) => *same = new,
            None => self.forgetting.push(new),
        }
    }

    /// Looks for addresses to forget in up to `buckets` buckets; returns false if there was nothing to do.
    pub fn forget_some(&mut self, buckets: usize) -> bool {
        if self.forgetting.is_empty() {
            return false;
        }
        let mut forgetting = std::mem::take(&mut self.forgetting);
        let count = buckets.min(self.buckets.len());
        for _ in 0..count {
            self.retain(self.forget_cursor, |slot| !forgetting.iter().any(|gone| gone.means(slot)));
            self.forget_cursor = (self.forget_cursor + 1) % self.buckets.len();
        }
        forgetting.retain_mut(|gone| {
            gone.left = gone.left.saturating_sub(count);
            gone.left > 0 && self.holder(gone.port).held > 0
        });
        self.forgetting = forgetting;
        true
    }

    /// Removes the limit, the static addresses and, as [`forget_port`](Self::forget_port) does, the learned
    /// addresses of `port`: it was unplugged, and another port may get its number.
    pub fn remove_port(&mut self, port: PortId, now: u32) {
        self.forget_port(port, now);
        self.movers.forget_port(port.0);
        self.holder(port.0).lost = None;
        self.set_static(port, &[]);
        self.set_limit(port, None);
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

    /// Returns the part of the table that begins at bucket `from`: 0, or [`FdbPage::next`] of the last part.
    pub fn page(&self, from: usize, now: u32) -> FdbPage {
        let from = from.min(self.buckets.len());
        let end = (from + PAGE).min(self.buckets.len());
        let next = (end < self.buckets.len()).then_some(end);
        let whole = || FdbWhole {
            capacity: self.capacity,
            stats: self.stats,
            restless: self.movers.restless(now).map(Restless::from).collect(),
            lost: self.lost(now).collect(),
            behind: self.behind().collect(),
        };
        FdbPage {
            items: self.items(&self.buckets[from..end], now).collect(),
            next,
            whole: next.is_none().then(whole),
        }
    }

    /// How many addresses are behind each port that has any.
    fn behind(&self) -> impl Iterator<Item = (PortId, usize)> {
        let count = |holder: &Holder| holder.held as usize + holder.fixed.len();
        (0u16..).map(PortId).zip(self.ports.iter().map(count)).filter(|(_, count)| *count > 0)
    }

    /// The address that each port has lost last, if it is behind another one still.
    fn lost(&self, now: u32) -> impl Iterator<Item = LostAddress> {
        (0u16..).zip(&self.ports).filter_map(move |(from, holder)| {
            let (key, at) = holder.lost?;
            let (bucket, way) = self.find(key)?;
            let slot = &self.buckets[bucket].0[way];
            let age = now.saturating_sub(at);
            (slot.port != from && age <= self.max_age).then(|| LostAddress {
                vid: vid(key),
                mac: mac(key),
                from: PortId(from),
                to: PortId(slot.port),
                age,
            })
        })
    }

    /// Returns the addresses that have become restless since this was asked last.
    pub fn newly_restless(&mut self, now: u32) -> Vec<Restless> {
        self.movers.untold(now).iter().map(Restless::from).collect()
    }

    /// Removes learned addresses from the part of the table that begins at bucket `from`. Returns how many, and where the next part begins.
    pub fn flush(&mut self, from: usize, flush: &Flush) -> (usize, Option<usize>) {
        let from = from.min(self.buckets.len());
        let end = (from + PAGE).min(self.buckets.len());
        let removed = (from..end).map(|bucket| self.retain(bucket, |slot| !flush.means(slot))).sum();
        (removed, (end < self.buckets.len()).then_some(end))
    }

    fn items(&self, buckets: &[Bucket], now: u32) -> impl Iterator<Item = FdbItem> {
        let used = buckets.iter().flat_map(|bucket| &bucket.0).filter(|slot| slot.key != 0);
        let items = used.map(move |slot| FdbItem {
            vid: vid(slot.key),
            mac: mac(slot.key),
            port: PortId(slot.port),
            age: age(slot, now),
            fixed: slot.seen == FIXED,
        });
        items.filter(|item| item.age <= self.max_age)
    }

    #[inline]
    fn hash_of(&self, key: u64) -> u64 {
        mix(mix(key ^ self.seed[0]) ^ self.seed[1])
    }

    /// The two buckets that a key with this hash can be in (possibly the same).
    #[inline]
    fn buckets_of(&self, hash: u64) -> [usize; 2] {
        let mask = self.buckets.len() - 1;
        [hash as usize & mask, (hash >> 32) as usize & mask]
    }

    /// The two buckets `key` can be in.
    fn pair(&self, key: u64) -> [usize; 2] {
        self.buckets_of(self.hash_of(key))
    }

    /// Returns bucket and slot of `key`, however old the address is.
    fn find(&self, key: u64) -> Option<(usize, usize)> {
        self.pair(key).into_iter().find_map(|bucket| Some((bucket, self.buckets[bucket].find(key)?)))
    }

    /// Puts an address that is not in the table into one of its two buckets.
    #[cold]
    fn insert(&mut self, pair: [usize; 2], new: Slot) -> Learned {
        if !self.may_hold_more(new.port, new.seen) {
            self.stats.limited += 1;
            return Learned::Limited;
        }
        // A silent address is replaced first, so that the rest of this function counts only addresses in use.
        let max_age = self.max_age;
        for bucket in pair {
            self.stats.aged += self.retain(bucket, |slot| age(slot, new.seen) <= max_age) as u64;
        }
        // Every port has an account, so that all of them count in the share.
        self.holder(new.port);
        let oldest = |fdb: &Fdb| {
            let others = fdb.oldest(pair, new.seen, |slot| fdb.gives_way_to(new.port, slot));
            others.or_else(|| fdb.oldest(pair, new.seen, |slot| slot.port == new.port))
        };
        if self.has_room_for(new.port)
            && let Some((bucket, way)) = self.free_slot(pair)
        {
            self.buckets[bucket].0[way] = new;
            self.len += 1;
            self.hold(new);
            self.stats.learned += 1;
        } else if let Some((bucket, way)) = oldest(self) {
            self.release(self.buckets[bucket].0[way]);
            self.buckets[bucket].0[way] = new;
            self.hold(new);
            self.stats.replaced += 1;
        } else {
            self.stats.refused += 1;
            return Learned::Refused;
        }
        Learned::News
    }

    /// Forgets an address that was just [learned](Learned::News), because it cannot be announced.
    #[cold]
    pub fn take_back(&mut self, vid: Vid, mac: Mac) {
        if let Some((bucket, way)) = self.find(key(vid, mac))
            && self.buckets[bucket].0[way].seen != FIXED
        {
            self.free((bucket, way));
        }
    }

    /// Makes the next frame from `mac` in a later second [`Learned::Due`] once more, because the
    /// announcement did not reach some worker.
    #[cold]
    pub fn tell_again(&mut self, vid: Vid, mac: Mac, now: u32) {
        if let Some((bucket, way)) = self.find(key(vid, mac)) {
            let overdue = (self.max_age / 4).min(0x7fff) as u16;
            self.buckets[bucket].0[way].told = (now as u16).wrapping_sub(overdue);
        }
    }

    /// Records that an address was seen behind another port than the table says, unless the rules of either
    /// forbid it.
    #[cold]
    fn moved(&mut self, (bucket, way): (usize, usize), to: u16, now: u32) -> Learned {
        // Making room frees only slots of the port that it moves to, so it stays where it is.
        if self.buckets[bucket].0[way].seen == FIXED || !self.may_hold_more(to, now) {
            self.stats.limited += 1;
            return Learned::Limited;
        }
        let old = self.buckets[bucket].0[way];
        let new = Slot { seen: now, port: to, told: now as u16, ..old };
        self.stats.moved += 1;
        self.movers.note(old.key, [old.port, to], now);
        // Whoever has it now has not lost it. Whose it is nobody here can say: also the thief may have been the first to use it.
        let _ = self.holder(to).lost.take_if(|(key, _)| *key == old.key);
        self.holder(old.port).lost = Some((old.key, now));
        if self.has_room_for(to) {
            self.release(old);
            self.buckets[bucket].0[way] = new;
            self.hold(new);
        } else {
            // It takes the place of another one of this port's, as if it were new. If it finds none it is unknown: whatever is sent to it is flooded, and
            // not sent to where it was.
            self.free((bucket, way));
            let _ = self.insert(self.pair(old.key), new);
        }
        Learned::News
    }

    /// Makes `mac` a static address of `port` and returns whether there is a place for it.
    fn fix(&mut self, mac: Mac, vid: Vid, port: u16) -> bool {
        if !mac.is_station() {
            return false;
        }
        let key = key(vid, mac);
        if let Some((bucket, way)) = self.find(key) {
            let old = self.buckets[bucket].0[way];
            if old.seen == FIXED {
                self.holder(old.port).fixed.retain(|fixed| *fixed != key);
                self.buckets[bucket].0[way] = Slot::default();
            } else {
                self.free((bucket, way));
            }
        }
        let pair = self.pair(key);
        let place = self.free_slot(pair).or_else(|| {
            // The slots' ages compare whatever the time is now.
            let evicted = self.oldest(pair, FIXED, |_| true)?;
            self.free(evicted);
            Some(evicted)
        });
        let Some((bucket, way)) = place else { return false };
        self.buckets[bucket].0[way] = Slot { key, seen: FIXED, port, told: 0 };
        self.holder(port).fixed.push(key);
        true
    }

    /// A free slot in one of the buckets of `pair`, if need be made free by moving an address to its other bucket.
    fn free_slot(&mut self, pair: [usize; 2]) -> Option<(usize, usize)> {
        // A slot that is to be forgotten must not move to a bucket that was already examined.
        if !self.forgetting.is_empty() {
            let forgetting = std::mem::take(&mut self.forgetting);
            for bucket in pair {
                self.retain(bucket, |slot| !forgetting.iter().any(|gone| gone.means(slot)));
            }
            self.forgetting = forgetting;
        }
        let free = |buckets: &[Bucket], bucket: usize| {
            Some((bucket, buckets[bucket].0.iter().position(|slot| slot.key == 0)?))
        };
        if let Some(place) = pair.into_iter().find_map(|bucket| free(&self.buckets, bucket)) {
            return Some(place);
        }
        let places = pair.into_iter().flat_map(|bucket| (0..WAYS).map(move |way| (bucket, way)));
        let moves = places.map(|(bucket, way)| {
            let [first, second] = self.pair(self.buckets[bucket].0[way].key);
            ((bucket, way), if first == bucket { second } else { first })
        });
        let mut possible = moves.filter_map(|(from, to)| Some((from, free(&self.buckets, to)?)));
        let ((bucket, way), (to, there)) = possible.next()?;
        self.buckets[to].0[there] = std::mem::take(&mut self.buckets[bucket].0[way]);
        Some((bucket, way))
    }

    /// Returns bucket and slot of the oldest learned address in `pair` for which `among` is true.
    fn oldest(&self, pair: [usize; 2], now: u32, among: impl Fn(&Slot) -> bool) -> Option<(usize, usize)> {
        let places = pair.into_iter().flat_map(|bucket| (0..WAYS).map(move |way| (bucket, way)));
        let slot = |(bucket, way): (usize, usize)| &self.buckets[bucket].0[way];
        let learned =
            places.filter(|place| slot(*place).key != 0 && slot(*place).seen != FIXED && among(slot(*place)));
        learned.max_by_key(|place| age(slot(*place), now))
    }

    /// Returns true if the limit of `port` allows one more address. Addresses that are too old by now do not
    /// count; they are freed if that matters.
    fn may_hold_more(&mut self, port: u16, now: u32) -> bool {
        let holder = self.holder(port);
        let held = holder.held;
        let Some(limit) = &mut holder.limit else { return true };
        let most = limit.most;
        if held < most || now < limit.settled {
            return held < most;
        }
        let mut keys = std::mem::take(&mut limit.keys);
        let mut oldest = now;
        keys.retain(|key| {
            let Some((bucket, way)) = self.find(*key) else { return false };
            let slot = &mut self.buckets[bucket].0[way];
            let young = age(slot, now) <= self.max_age;
            if young {
                oldest = oldest.min(slot.seen);
            } else {
                *slot = Slot::default();
            }
            young
        });
        let settled = oldest.saturating_add(self.max_age).saturating_add(1);
        let left = keys.len() as u32;
        let freed = held - left;
        self.len -= freed as usize;
        self.stats.aged += u64::from(freed);
        let holder = self.holder(port);
        holder.held = left;
        holder.limit = Some(Limit { most, keys, settled });
        left < most
    }

    /// Returns what [`may_hold_more`](Self::may_hold_more) does, and frees nothing.
    fn could_hold_more(&self, port: u16, now: u32) -> bool {
        let Some(holder) = self.ports.get(usize::from(port)) else { return true };
        let Some(Limit { most, keys, settled }) = &holder.limit else { return true };
        let is_young = |key: &u64| {
            self.find(*key)
                .is_some_and(|(bucket, way)| age(&self.buckets[bucket].0[way], now) <= self.max_age)
        };
        let young = || keys.iter().filter(|key| is_young(key)).count();
        holder.held < *most || now >= *settled && young() < *most as usize
    }

    /// Adds a learned address to the account of its port.
    fn hold(&mut self, slot: Slot) {
        let settled = slot.seen.saturating_add(self.max_age).saturating_add(1);
        let holder = self.holder(slot.port);
        holder.held += 1;
        if let Some(limit) = &mut holder.limit {
            limit.keys.insert(slot.key);
            limit.settled = limit.settled.min(settled);
        }
    }

    /// Takes a learned address off the account of its port.
    fn release(&mut self, slot: Slot) {
        let holder = self.holder(slot.port);
        holder.held -= 1;
        if let Some(limit) = &mut holder.limit {
            limit.keys.remove(&slot.key);
        }
    }

    /// Frees the slot of a learned address.
    fn free(&mut self, (bucket, way): (usize, usize)) {
        let slot = std::mem::take(&mut self.buckets[bucket].0[way]);
        self.release(slot);
        self.len -= 1;
    }

    /// Frees the slots of `bucket` that `keep` does not want and returns how many. None may be static.
    fn retain(&mut self, bucket: usize, keep: impl Fn(&Slot) -> bool) -> usize {
        let mut freed = 0;
        for way in 0..WAYS {
            let slot = self.buckets[bucket].0[way];
            if slot.key != 0 && !keep(&slot) {
                self.free((bucket, way));
                freed += 1;
            }
        }
        freed
    }

    /// Returns the account of `port`, made if need be. The number of accounts grows with that of ports, which
    /// guests do not choose.
    fn holder(&mut self, port: u16) -> &mut Holder {
        let index = usize::from(port);
        if index >= self.ports.len() {
            self.ports.resize_with(index + 1, Holder::default);
        }
        &mut self.ports[index]
    }
}

/// Seconds since `slot` was seen. A clock that steps back makes nothing old.
#[inline]
fn age(slot: &Slot, now: u32) -> u32 {
    now.saturating_sub(slot.seen)
}

#[inline]
fn key(vid: Vid, mac: Mac) -> u64 {
    let [a, b, c, d, e, f] = mac.0;
    u64::from_be_bytes([0, 0, a, b, c, d, e, f]) | u64::from(vid & 0xfff) << 48 | USED
}

fn vid(key: u64) -> Vid {
    (key >> 48) as u16 & 0xfff
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
mod tests;
