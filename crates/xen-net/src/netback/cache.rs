//! [`Cache`]: the bounded map from grant reference to slot of the window, with LRU replacement and
//! ghost-list admission as in 2Q.
//!
//! `Pages` creates one per queue, uses it on the queue's thread, and maps
//! and unmaps pages as it says; the cache itself maps nothing. For each page of a burst it calls
//! [`Cache::lookup`], maps the slots that are new, and calls [`Cache::release`] when the burst is
//! done. A slot that is referred to is never given to another page. References are counted, because
//! two packets may lie in one page.
//!
//! ```text
//!            admitted                       pin
//!   free ---------------> cached     ---------------> pinned
//!    ^ |                  in LRU order                for the front end
//!    | | alloc_transient     |                           |
//!    | v                     | evicted                   | unpin
//!   transient <-------------+---------------------------+
//!    ^
//!    | released, then freed             poisoned: the page could not be mapped;
//!    +--------------------------------- freed like a transient slot
//! ```
//!
//! Every operation is O(1). A look-up is two multiplications and a probe or two in an
//! open-addressed table (linear probing, backward-shift deletion) that is at most half full. The
//! hash has a secret, so that a front end cannot choose references that collide (and would only
//! slow down its own queue).
//!
//! A page is admitted if it was used before, as the ghost list remembers. If no slot is free, it is
//! admitted only if it was used twice since the least recently used page was used at all, and not
//! more often than once in [`SPACING`] uses. Mapping costs several copies, so a page that is used
//! once is better copied; and a front end that cycles through more pages than there are slots keeps
//! half of them mapped, instead of mapping and unmapping each, as plain LRU would. (Not evicting at
//! all, as the first implementation of persistent grants did, keeps the wrong pages for ever when
//! the front end changes its set.)

use std::hash::{BuildHasher, RandomState};

use ringferry_xen::grant::{Access, GrantRef};

/// Index of a slot of the window.
pub type Slot = u16;

/// Fewest uses of pages from one eviction to the next. Where most of a set that is larger than the
/// cache is used in no order, pages qualify for slots all the time: at a bound of half the set,
/// every second use then replaced a mapping, and all was three times slower than copies alone.
/// Unmapping and mapping cost five to ten copies, so this many uses make them a quarter of a copy
/// each. A new set of 1024 pages has moved in after 32768 uses, some milliseconds.
pub const SPACING: u64 = 32;

/// NetifOffload the end of the LRU list.
const NONE: Slot = Slot::MAX;

/// Most slots that a cache may have.
pub const MAX_SLOTS: usize = NONE as usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Cached,
    Pinned,
    Transient,
    Poisoned,
}

/// The state of one slot, less than half a cache line.
#[derive(Clone, Copy, Debug)]
struct Node {
    /// Time of last use, in uses of pages.
    used: u64,
    gref: GrantRef,
    refs: u16,
    /// Neighbours in the LRU list, while cached: `newer` towards the most recently used.
    newer: Slot,
    older: Slot,
    state: State,
    writable: bool,
}

/// The result of looking up or pinning a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupResult {
    /// The page is mapped into this slot, or will be.
    Hit(Slot),
    /// The page was given this slot and must be mapped into it; if `evicted`, the previous page
    /// must be unmapped first.
    New {
        /// The slot that the page was given.
        slot: Slot,
        /// True if another page is still mapped into the slot.
        evicted: bool,
    },
    /// The page has no slot.
    Miss,
}

/// The reason why a page cannot be pinned or unpinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinError {
    /// The page is pinned already, or is not pinned.
    State,
    /// A burst uses the page.
    InUse,
    /// No slot is free or can be evicted.
    Full,
}

/// The map from grant reference to slot.
#[derive(Debug)]
pub struct Cache {
    nodes: Box<[Node]>,
    index: Index,
    ghosts: Ghosts,
    free: Vec<Slot>,
    newest: Slot,
    oldest: Slot,
    cached: usize,
    pinned: usize,
    clock: u64,
    /// Time from which a page may be evicted again.
    next_eviction: u64,
}

impl Cache {
    /// Creates a cache of `slots` free slots, at least one and at most [`MAX_SLOTS`].
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
            ghosts: Ghosts::new(slots, Hash::new(&random)),
            free: (0..slots as Slot).rev().collect(),
            newest: NONE,
            oldest: NONE,
            cached: 0,
            pinned: 0,
            clock: 0,
            next_eviction: 0,
        }
    }

    /// Returns the number of pages that are cached, and of those that are pinned.
    pub fn held(&self) -> (usize, usize) {
        (self.cached, self.pinned)
    }

    /// Returns true if no page has a slot that a look-up could find.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.cached + self.pinned == 0
    }

    /// Looks a page up and takes a reference to its slot. `admit` allows a page that has no slot to
    /// get one.
    #[inline]
    pub fn lookup(&mut self, gref: GrantRef, access: Access, admit: bool) -> LookupResult {
        self.clock += 1;
        let Some(slot) = self.index.get(gref) else {
            return if admit { self.admit(gref, access) } else { LookupResult::Miss };
        };
        let node = &mut self.nodes[usize::from(slot)];
        if access == Access::Write && !node.writable {
            return if admit { self.widen(slot, gref) } else { LookupResult::Miss };
        }
        node.refs += 1;
        node.used = self.clock;
        if node.state == State::Cached && self.newest != slot {
            self.unlink(slot);
            self.link(slot);
        }
        LookupResult::Hit(slot)
    }

    /// Handles a page mapped for reading that is now to be written to, as when a front end receives
    /// into a buffer that it transmitted from: its mapping is replaced by one for both, unless it
    /// is in use or the front end pinned it for reading.
    #[inline(never)]
    fn widen(&mut self, slot: Slot, gref: GrantRef) -> LookupResult {
        let node = &self.nodes[usize::from(slot)];
        if node.refs > 0 || node.state != State::Cached {
            return LookupResult::Miss;
        }
        self.forget(slot);
        self.put(slot, gref, Access::Write, State::Cached);
        LookupResult::New { slot, evicted: true }
    }

    /// Gives a page a slot if it qualifies.
    #[inline(never)]
    fn admit(&mut self, gref: GrantRef, access: Access) -> LookupResult {
        let Some(before) = self.ghosts.touch(gref, self.clock) else { return LookupResult::Miss };
        let (slot, evicted) = match self.free.pop() {
            Some(slot) => (slot, false),
            None if self.clock < self.next_eviction => return LookupResult::Miss,
            None => match self.evict(before) {
                Some(slot) => {
                    self.next_eviction = self.clock + SPACING;
                    (slot, true)
                }
                None => return LookupResult::Miss,
            },
        };
        self.ghosts.remove(gref);
        self.put(slot, gref, access, State::Cached);
        LookupResult::New { slot, evicted }
    }

    /// Evicts the least recently used page, if its last use was before `before`, and returns its
    /// slot.
    fn evict(&mut self, before: u64) -> Option<Slot> {
        // Every page in use was used in this burst: if the oldest is in use, all are.
        let slot = self.oldest;
        let node = self.nodes.get(usize::from(slot))?;
        (node.refs == 0 && node.used < before).then(|| {
            self.forget(slot);
            slot
        })
    }

    /// Allocates a slot for a page that is mapped for one burst only; no look-up finds it.
    #[inline]
    pub fn alloc_transient(&mut self) -> Option<Slot> {
        let slot = self.free.pop()?;
        let node = &mut self.nodes[usize::from(slot)];
        node.state = State::Transient;
        node.refs = 1;
        Some(slot)
    }

    /// Gives a page a slot until it is unpinned, evicting another if necessary. The caller holds no
    /// reference to it.
    ///
    /// # Errors
    /// Any [`PinError`].
    pub fn pin(&mut self, gref: GrantRef, access: Access) -> Result<LookupResult, PinError> {
        self.clock += 1;
        let (slot, evicted) = match self.index.get(gref) {
            Some(slot) => {
                let node = &self.nodes[usize::from(slot)];
                if node.state == State::Pinned {
                    return Err(PinError::State);
                }
                if node.refs > 0 {
                    return Err(PinError::InUse);
                }
                self.forget(slot);
                (slot, true)
            }
            None => match self.free.pop() {
                Some(slot) => (slot, false),
                None => (self.evict(u64::MAX).ok_or(PinError::Full)?, true),
            },
        };
        self.put(slot, gref, access, State::Pinned);
        self.nodes[usize::from(slot)].refs = 0;
        Ok(LookupResult::New { slot, evicted })
    }

    /// Unpins a page. The caller must unmap its slot and [free](Self::free) it.
    ///
    /// # Errors
    /// [`PinError::State`] when the page is not pinned, [`PinError::InUse`] when a burst uses it.
    pub fn unpin(&mut self, gref: GrantRef) -> Result<Slot, PinError> {
        let slot = self.index.get(gref).ok_or(PinError::State)?;
        let node = &self.nodes[usize::from(slot)];
        if node.state != State::Pinned {
            return Err(PinError::State);
        }
        if node.refs > 0 {
            return Err(PinError::InUse);
        }
        self.forget(slot);
        self.ghosts.remove(gref);
        Ok(slot)
    }

    /// NetifOffload a slot into which its page could not be mapped: no look-up finds the page any more.
    /// Users that hold references to the slot must still release them.
    pub fn poison(&mut self, slot: Slot) {
        self.forget(slot);
        self.nodes[usize::from(slot)].state = State::Poisoned;
    }

    /// Returns true if the page of this slot could not be mapped.
    #[inline]
    pub fn is_poisoned(&self, slot: Slot) -> bool {
        self.nodes[usize::from(slot)].state == State::Poisoned
    }

    /// Drops a reference to a slot. Returns true if the slot holds nothing useful any more: the
    /// caller must then unmap and [free](Self::free) it.
    #[inline]
    pub fn release(&mut self, slot: Slot) -> bool {
        let node = &mut self.nodes[usize::from(slot)];
        node.refs -= 1;
        node.refs == 0 && matches!(node.state, State::Transient | State::Poisoned)
    }

    /// Frees an unmapped slot for other pages.
    pub fn free(&mut self, slot: Slot) {
        let node = &mut self.nodes[usize::from(slot)];
        debug_assert!(node.refs == 0 && matches!(node.state, State::Transient | State::Poisoned));
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
            self.pinned += 1;
        }
    }

    /// Removes a page from the map, which leaves its slot transient until the last user releases
    /// it.
    fn forget(&mut self, slot: Slot) {
        let node = self.nodes[usize::from(slot)];
        match node.state {
            State::Cached => {
                self.unlink(slot);
                self.cached -= 1;
            }
            State::Pinned => self.pinned -= 1,
            State::Transient | State::Poisoned | State::Free => return,
        }
        self.index.remove(node.gref);
        self.nodes[usize::from(slot)].state = State::Transient;
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

/// A keyed multiplicative hash of grant references, whose secrets front ends cannot know.
#[derive(Clone, Copy, Debug)]
struct Hash {
    secret: u64,
    multiplier: u64,
}

impl Hash {
    fn new(random: &RandomState) -> Self {
        Self { secret: random.hash_one(1), multiplier: random.hash_one(2) | 1 }
    }

    /// Returns a hash whose bits all depend on the whole reference, the high ones best. One
    /// multiplication, which would do against a guest that cannot know the multiplier, now and then
    /// puts references that count up, as most do, side by side.
    #[inline(always)]
    const fn of(self, gref: GrantRef) -> u64 {
        // The constant is 2^64 divided by the golden ratio.
        let mixed = (gref.0 as u64 ^ self.secret).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 32).wrapping_mul(self.multiplier)
    }
}

/// A hash table from grant reference to slot: linear probing, backward-shift deletion, at most half
/// full.
#[derive(Debug)]
struct Index {
    /// Each entry has the grant in its low half and the slot in its high half.
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

    /// Finds the entry of a grant, or the empty one where it would be put.
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
            // An entry may move back to the hole unless its home lies after the hole.
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

/// The ghost list: an 8-way set-associative table of the last uses of pages that have no slot. It
/// remembers four times as many pages as there are slots, so that hardly any of a set of pages as
/// large as the cache is replaced before it is used again.
#[derive(Debug)]
struct Ghosts {
    /// Sets of one cache line each: the low half of the time, 0 for none, and the page.
    sets: Box<[[(u32, GrantRef); Self::WAYS]]>,
    hash: Hash,
}

impl Ghosts {
    const WAYS: usize = 8;

    fn new(slots: usize, hash: Hash) -> Self {
        let sets = (4 * slots).div_ceil(Self::WAYS).next_power_of_two();
        Self { sets: vec![[(0, GrantRef(0)); Self::WAYS]; sets].into(), hash }
    }

    fn set(&mut self, gref: GrantRef) -> &mut [(u32, GrantRef); Self::WAYS] {
        let hash = self.hash.of(gref) >> 32;
        &mut self.sets[hash as usize & (self.sets.len() - 1)]
    }

    /// Records a use and returns the time of the previous one. A use that was 2^32 uses of other
    /// pages ago counts as recent, which does no harm.
    fn touch(&mut self, gref: GrantRef, now: u64) -> Option<u64> {
        // The victim is chosen at random, because a victim in order of use would let more pages
        // than ways that are used in turn replace each other for ever.
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

    fn remove(&mut self, gref: GrantRef) {
        if let Some(way) = self.set(gref).iter_mut().find(|(_, known)| *known == gref) {
            *way = (0, GrantRef(0));
        }
    }
}

#[cfg(test)]
mod tests;
