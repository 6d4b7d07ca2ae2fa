//! Which grants have a slot of the window: the bounded map from grant reference to slot.
//!
//! Plain data structure: it maps nothing itself. A slot is *free*; or *cached*, holding a page that the
//! back end chose to keep, in order of last use; or *fixed*, holding a page that the front end asked to have kept; or *passing*, holding
//! a page for one burst and known to nobody else; or *lost*, when a page could not be mapped into it. Whoever is given a slot holds a reference to it until
//! [`Cache::release`], and a slot that is referred to is never given to another page. References are counted, as two packets may
//! lie in one page.
//!
//! Everything is O(1). Look-up is two multiplications and a probe or two in a table at most half full. The hash has
//! a secret, so that a front end cannot choose references that collide (and would only slow down its own queue).
//!
//! What gets a slot: a page that was used before, and if no slot is free, only one that was used twice since the page
//! that would lose its slot was used at all, and not more often than once in [`SPACING`] uses. Mapping costs several copies, so a page that is used once is better
//! copied; and a front end that goes round more pages than there are slots keeps half of them mapped, instead of mapping and
//! unmapping each, as plain eviction of the least recently used would. (Not evicting at all, as the first implementation of persistent
//! grants did, keeps the wrong pages for ever when the front end changes its set.)

use std::hash::{BuildHasher, RandomState};

use ringferry_xen::grant::{Access, GrantRef};

/// A slot of the window.
pub type Slot = u16;

/// Uses of pages, at least, from one eviction to the next. Where most of a set that is larger than the cache is used in no
/// order, pages seem to deserve slots all the time: at a bound of half the set, every second use then replaced a mapping,
/// and all was three times slower than copies alone. Unmapping and mapping cost five to ten copies, so this many uses make
/// them a quarter of a copy each. A new set of 1024 pages has moved in after 32768 uses, some milliseconds.
pub const SPACING: u64 = 32;

/// No slot, at the ends of lists.
const NONE: Slot = Slot::MAX;

/// Slots at most.
pub const MAX_SLOTS: usize = NONE as usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Cached,
    Fixed,
    Passing,
    Lost,
}

/// One slot. Less than half a cache line.
#[derive(Clone, Copy, Debug)]
struct Node {
    /// Time of last use.
    used: u64,
    gref: GrantRef,
    refs: u16,
    /// Neighbours in the order of use, while cached: `newer` towards the most recent.
    newer: Slot,
    older: Slot,
    state: State,
    writable: bool,
}

/// What to do with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// It is in this slot.
    Hit(Slot),
    /// It got this slot, into which it has yet to be mapped; what was there (`evicted`) is to be unmapped first.
    New {
        /// The slot.
        slot: Slot,
        /// Whether another page is in it.
        evicted: bool,
    },
    /// It has no slot.
    Miss,
}

/// Why a page cannot be fixed to a slot, or set loose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// It is fixed already; or it is not fixed.
    State,
    /// A burst uses it.
    InUse,
    /// No slot can be had.
    Full,
}

/// The map from grant to slot.
#[derive(Debug)]
pub struct Cache {
    nodes: Box<[Node]>,
    index: Index,
    seen: Seen,
    free: Vec<Slot>,
    newest: Slot,
    oldest: Slot,
    cached: usize,
    fixed: usize,
    clock: u64,
    /// When a page may lose its slot to another again.
    next_eviction: u64,
}

impl Cache {
    /// A cache of `slots` slots, all free; at least one, at most [`MAX_SLOTS`].
    pub fn new(slots: usize) -> Self {
        let slots = slots.clamp(1, MAX_SLOTS);
        let node = Node {
            used: 0,
            gref: GrantRef(0),
            refs: 0,
            newer: NONE,
            older: NONE,
            state: State::Free,
            writable: false,
        };
        let random = RandomState::new();
        Self {
            nodes: vec![node; slots].into(),
            index: Index::new(slots, Hash::new(&random)),
            seen: Seen::new(slots, Hash::new(&random)),
            free: (0..slots as Slot).rev().collect(),
            newest: NONE,
            oldest: NONE,
            cached: 0,
            fixed: 0,
            clock: 0,
            next_eviction: 0,
        }
    }

    /// Pages that are cached, and that are fixed.
    pub fn held(&self) -> (usize, usize) {
        (self.cached, self.fixed)
    }

    /// Whether no page has a slot that a look-up could find.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.cached + self.fixed == 0
    }

    /// Looks a page up and takes a reference to its slot. `learn` lets a page that has none get one.
    #[inline]
    pub fn find(&mut self, gref: GrantRef, access: Access, learn: bool) -> Found {
        self.clock += 1;
        let Some(slot) = self.index.get(gref) else {
            return if learn { self.learn(gref, access) } else { Found::Miss };
        };
        let node = &mut self.nodes[usize::from(slot)];
        if access == Access::Write && !node.writable {
            return if learn { self.widen(slot, gref) } else { Found::Miss };
        }
        node.refs += 1;
        node.used = self.clock;
        if node.state == State::Cached && self.newest != slot {
            self.unlink(slot);
            self.link(slot);
        }
        Found::Hit(slot)
    }

    /// A page that was sent from is now received into, as when received buffers are sent on: its mapping is replaced by one for
    /// both, unless it is in use or the front end has said that it is for reading.
    #[inline(never)]
    fn widen(&mut self, slot: Slot, gref: GrantRef) -> Found {
        let node = &self.nodes[usize::from(slot)];
        if node.refs > 0 || node.state != State::Cached {
            return Found::Miss;
        }
        self.forget(slot);
        self.put(slot, gref, Access::Write, State::Cached);
        Found::New { slot, evicted: true }
    }

    /// Gives a page a slot if it deserves one.
    #[inline(never)]
    fn learn(&mut self, gref: GrantRef, access: Access) -> Found {
        let Some(before) = self.seen.see(gref, self.clock) else { return Found::Miss };
        let (slot, evicted) = match self.free.pop() {
            Some(slot) => (slot, false),
            None if self.clock < self.next_eviction => return Found::Miss,
            None => match self.evict(before) {
                Some(slot) => {
                    self.next_eviction = self.clock + SPACING;
                    (slot, true)
                }
                None => return Found::Miss,
            },
        };
        self.seen.forget(gref);
        self.put(slot, gref, access, State::Cached);
        Found::New { slot, evicted }
    }

    /// Takes the slot of the page least recently used, if that was before `before`.
    fn evict(&mut self, before: u64) -> Option<Slot> {
        // Whatever is in use was used in this burst: if the oldest is, all are.
        let slot = self.oldest;
        let node = self.nodes.get(usize::from(slot))?;
        (node.refs == 0 && node.used < before).then(|| {
            self.forget(slot);
            slot
        })
    }

    /// A slot for a page that is mapped for one burst only.
    #[inline]
    pub fn pass(&mut self) -> Option<Slot> {
        let slot = self.free.pop()?;
        let node = &mut self.nodes[usize::from(slot)];
        node.state = State::Passing;
        node.refs = 1;
        Some(slot)
    }

    /// Gives a page a slot for good, whoever loses it; nothing refers to it yet.
    ///
    /// # Errors
    /// See [`Unfit`].
    pub fn fix(&mut self, gref: GrantRef, access: Access) -> Result<Found, Unfit> {
        self.clock += 1;
        let (slot, evicted) = match self.index.get(gref) {
            Some(slot) => {
                let node = &self.nodes[usize::from(slot)];
                if node.state == State::Fixed {
                    return Err(Unfit::State);
                }
                if node.refs > 0 {
                    return Err(Unfit::InUse);
                }
                self.forget(slot);
                (slot, true)
            }
            None => match self.free.pop() {
                Some(slot) => (slot, false),
                None => (self.evict(u64::MAX).ok_or(Unfit::Full)?, true),
            },
        };
        self.put(slot, gref, access, State::Fixed);
        self.nodes[usize::from(slot)].refs = 0;
        Ok(Found::New { slot, evicted })
    }

    /// Sets a fixed page loose. Its slot is the caller's to [free](Self::free).
    ///
    /// # Errors
    /// [`Unfit::State`] when it is not fixed, [`Unfit::InUse`].
    pub fn unfix(&mut self, gref: GrantRef) -> Result<Slot, Unfit> {
        let slot = self.index.get(gref).ok_or(Unfit::State)?;
        let node = &self.nodes[usize::from(slot)];
        if node.state != State::Fixed {
            return Err(Unfit::State);
        }
        if node.refs > 0 {
            return Err(Unfit::InUse);
        }
        self.forget(slot);
        self.seen.forget(gref);
        Ok(slot)
    }

    /// The page could not be mapped: nobody finds it any more. Those who refer to the slot must still release it.
    pub fn fail(&mut self, slot: Slot) {
        self.forget(slot);
        self.nodes[usize::from(slot)].state = State::Lost;
    }

    /// Whether a page could not be mapped into a slot that someone refers to.
    #[inline]
    pub fn is_lost(&self, slot: Slot) -> bool {
        self.nodes[usize::from(slot)].state == State::Lost
    }

    /// Gives a reference back. True if the slot now has nothing to hold: it is the caller's to unmap and
    /// [free](Self::free).
    #[inline]
    pub fn release(&mut self, slot: Slot) -> bool {
        let node = &mut self.nodes[usize::from(slot)];
        node.refs -= 1;
        node.refs == 0 && matches!(node.state, State::Passing | State::Lost)
    }

    /// The slot is empty and may be given to another page.
    pub fn free(&mut self, slot: Slot) {
        let node = &mut self.nodes[usize::from(slot)];
        debug_assert!(node.refs == 0 && matches!(node.state, State::Passing | State::Lost));
        node.state = State::Free;
        self.free.push(slot);
    }

    fn put(&mut self, slot: Slot, gref: GrantRef, access: Access, state: State) {
        let node = &mut self.nodes[usize::from(slot)];
        node.used = self.clock;
        node.gref = gref;
        node.refs = 1;
        node.state = state;
        node.writable = access == Access::Write;
        self.index.insert(gref, slot);
        if state == State::Cached {
            self.cached += 1;
            self.link(slot);
        } else {
            self.fixed += 1;
        }
    }

    /// Takes a page out of the map; its slot is left to whoever refers to it.
    fn forget(&mut self, slot: Slot) {
        let node = self.nodes[usize::from(slot)];
        match node.state {
            State::Cached => {
                self.unlink(slot);
                self.cached -= 1;
            }
            State::Fixed => self.fixed -= 1,
            State::Passing | State::Lost | State::Free => return,
        }
        self.index.remove(node.gref);
        self.nodes[usize::from(slot)].state = State::Passing;
    }

    #[inline]
    fn link(&mut self, slot: Slot) {
        let older = self.newest;
        let node = &mut self.nodes[usize::from(slot)];
        node.newer = NONE;
        node.older = older;
        match self.nodes.get_mut(usize::from(older)) {
            Some(node) => node.newer = slot,
            None => self.oldest = slot,
        }
        self.newest = slot;
    }

    #[inline]
    fn unlink(&mut self, slot: Slot) {
        let Node { newer, older, .. } = self.nodes[usize::from(slot)];
        match self.nodes.get_mut(usize::from(newer)) {
            Some(node) => node.older = older,
            None => self.newest = older,
        }
        match self.nodes.get_mut(usize::from(older)) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
    }
}

/// A hash of grant references that front ends cannot foresee.
#[derive(Clone, Copy, Debug)]
struct Hash {
    secret: u64,
    multiplier: u64,
}

impl Hash {
    fn new(random: &RandomState) -> Self {
        Self { secret: random.hash_one(1), multiplier: random.hash_one(2) | 1 }
    }

    /// All bits depend on all of the reference, the high ones best. One multiplication, which would do against a guest
    /// that cannot know the multiplier, now and then puts references that count up, as most do, side by side.
    #[inline(always)]
    const fn of(self, gref: GrantRef) -> u64 {
        // 2^64 over the golden ratio.
        let mixed = (gref.0 as u64 ^ self.secret).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 32).wrapping_mul(self.multiplier)
    }
}

/// A hash table from grant reference to slot: linear probing, entries moved back on removal, at most half full.
#[derive(Debug)]
struct Index {
    /// The grant in the low half, the slot in the high.
    entries: Box<[u64]>,
    hash: Hash,
    shift: u32,
}

impl Index {
    const EMPTY: u64 = u64::MAX;

    fn new(slots: usize, hash: Hash) -> Self {
        let size = (2 * slots).next_power_of_two();
        Self { entries: vec![Self::EMPTY; size].into(), hash, shift: u64::BITS - size.ilog2() }
    }

    #[inline]
    fn home(&self, gref: GrantRef) -> usize {
        (self.hash.of(gref) >> self.shift) as usize
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.entries.len() - 1)
    }

    /// Where a grant is, or where it would be put.
    #[inline]
    fn locate(&self, gref: GrantRef) -> (usize, u64) {
        let mut at = self.home(gref);
        loop {
            let entry = self.entries[at];
            if entry == Self::EMPTY || entry as u32 == gref.0 {
                return (at, entry);
            }
            at = self.next(at);
        }
    }

    #[inline]
    fn get(&self, gref: GrantRef) -> Option<Slot> {
        let (_, entry) = self.locate(gref);
        (entry != Self::EMPTY).then_some((entry >> 32) as Slot)
    }

    fn insert(&mut self, gref: GrantRef, slot: Slot) {
        let (at, _) = self.locate(gref);
        self.entries[at] = u64::from(gref.0) | u64::from(slot) << 32;
    }

    fn remove(&mut self, gref: GrantRef) {
        let (mut hole, entry) = self.locate(gref);
        if entry == Self::EMPTY {
            return;
        }
        let mut at = hole;
        loop {
            at = self.next(at);
            let entry = self.entries[at];
            if entry == Self::EMPTY {
                break;
            }
            // An entry may move back to the hole unless its home lies behind it.
            let home = self.home(GrantRef(entry as u32));
            let mask = self.entries.len() - 1;
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.entries[hole] = entry;
                hole = at;
            }
        }
        self.entries[hole] = Self::EMPTY;
    }
}

/// When pages that have no slot were last used, as far as remembered: for four times as many as there are slots, so that
/// hardly any of a set of pages as large as the cache is pushed out before it comes round again.
#[derive(Debug)]
struct Seen {
    /// Sets of one cache line each: the low half of the time, 0 for none, and the page.
    sets: Box<[[(u32, GrantRef); Self::WAYS]]>,
    hash: Hash,
}

impl Seen {
    const WAYS: usize = 8;

    fn new(slots: usize, hash: Hash) -> Self {
        let sets = (4 * slots).div_ceil(Self::WAYS).next_power_of_two();
        Self { sets: vec![[(0, GrantRef(0)); Self::WAYS]; sets].into(), hash }
    }

    fn set(&mut self, gref: GrantRef) -> &mut [(u32, GrantRef); Self::WAYS] {
        let hash = self.hash.of(gref) >> 32;
        &mut self.sets[hash as usize & (self.sets.len() - 1)]
    }

    /// Remembers a use; returns when the one before was. One that was 2^32 uses of other pages ago counts as recent, which
    /// does no harm.
    fn see(&mut self, gref: GrantRef, now: u64) -> Option<u64> {
        // Which way is given up must not follow the order of use: more pages than ways that come round in turn
        // would push each other out for ever.
        let victim = (self.hash.of(GrantRef(now as u32)) >> 61) as usize;
        let stamp = (now as u32).max(1);
        let set = self.set(gref);
        if let Some((at, _)) = set.iter_mut().find(|(at, known)| *at != 0 && *known == gref) {
            let age = stamp.wrapping_sub(std::mem::replace(at, stamp));
            return Some(now.saturating_sub(age.into()));
        }
        let way = set.iter().position(|(at, _)| *at == 0).unwrap_or(victim);
        set[way] = (stamp, gref);
        None
    }

    fn forget(&mut self, gref: GrantRef) {
        if let Some(way) = self.set(gref).iter_mut().find(|(_, known)| *known == gref) {
            *way = (0, GrantRef(0));
        }
    }
}

#[cfg(test)]
mod tests;
