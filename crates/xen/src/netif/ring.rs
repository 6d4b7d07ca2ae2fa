//! Both halves of a ring in one shared page: requests one way and responses back, through the same slots.
//!
//! Each half keeps private copies of all it has written and of how far it has read; of the page it only reads what the
//! other half owns: its producer index, its event index and its slots. A producer index that runs away breaks the
//! ring for good ([`Fault::Index`], XSA-39), as does whatever the owner finds in the slots
//! ([`BackRing::break_with`]); a broken ring is not touched any more.
//!
//! Indexes are free-running and 32 bits wide. Telling the other half: who publishes from `old` to `new` notifies if the
//! other's event index lies in `old + 1 ..= new`. Who wants to be told sets its event index one ahead and, behind a full fence,
//! looks again: the final check.

use std::fmt;

use ringferry_memory::{Entry, Table, Words};

use crate::domain::PAGE;

/// Where one direction's two words lie in the page.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// How far its producer has got.
    producer: usize,
    /// From where on its consumer wants to be told.
    event: usize,
}

const REQUESTS: Way = Way { producer: 0, event: 4 };
const RESPONSES: Way = Way { producer: 8, event: 12 };
const SLOTS: usize = 64;

/// Why a ring is used no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A producer index is further ahead than there are slots, or behind what it was.
    #[error("the peer's producer index runs away; disconnect it")]
    Index,
    /// A packet's slots are not all there.
    #[error("the peer published a packet without its last slots; disconnect it")]
    Incomplete,
    /// A piece does not end in its page.
    #[error("a slot of the peer crosses the end of its page; disconnect it")]
    CrossesPage,
    /// Far more slots than a packet can have.
    #[error("a packet of the peer has too many slots; disconnect it")]
    TooManySlots,
    /// An extra of a type that is not defined, or twice, or where none may be.
    #[error("the peer sent an extra that is not allowed there; disconnect it")]
    BadExtra,
    /// A response to nothing that was asked.
    #[error("the peer answered a request that is not outstanding; disconnect it")]
    BadResponse,
}

/// Why memory cannot hold a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Not an aligned page.
    #[error("a ring needs a page of {PAGE} bytes, aligned to 8")]
    Page,
    /// The page says that more is outstanding than there are slots.
    #[error("the ring has {0} slots outstanding, more than it holds; the front end must set it up again")]
    Outstanding(u32),
}

/// Number of slots of a ring whose slots are `E`: as many as fit, rounded down to a power of two.
#[must_use]
pub const fn slots<E>() -> u32 {
    1 << ((PAGE - SLOTS) / size_of::<E>()).ilog2()
}

fn table<A: Words, E: Entry>(words: &A) -> Result<A::Table<E>, LayoutError> {
    if words.len() < PAGE || !words.is_aligned(8) {
        return Err(LayoutError::Page);
    }
    words.table(SLOTS, slots::<E>() as u16).ok_or(LayoutError::Page)
}

/// Whether an event index lies in `old + 1 ..= new`.
#[inline]
const fn passes(event: u32, old: u32, new: u32) -> bool {
    new.wrapping_sub(event) < new.wrapping_sub(old)
}

/// Slots whose lines are fetched ahead when a burst is found: as many as are taken at a time.
const LOOKAHEAD: u32 = 32;

/// Fetches the lines of slots that the other half has just written, all at once rather than one miss after the other.
#[inline]
fn fetch<E: Entry>(table: &impl Table<E>, from: u32, to: u32) {
    const LINE: usize = 64;
    let count = to.wrapping_sub(from).min(LOOKAHEAD);
    for ahead in (0..count).step_by((LINE / size_of::<E>()).max(1)) {
        table.prefetch(from.wrapping_add(ahead) as u16);
    }
}

/// What both halves do alike: one way is ours, of which we publish what we have written, and the other is the peer's, of
/// which we take what it has published.
struct Side<A: Words, E: Entry> {
    words: A,
    table: A::Table<E>,
    ours: Way,
    theirs: Way,
    /// The peer's producer index, as last seen and found to be sane.
    seen: u32,
    /// What of it was taken.
    taken: u32,
    /// What of ours was published.
    published: u32,
    /// What of ours was written.
    written: u32,
    fault: Option<Fault>,
}

impl<A: Words, E: Entry> Side<A, E> {
    /// A side of which all indexes stand at `start`.
    fn new(words: A, ours: Way, theirs: Way, start: u32) -> Result<Self, LayoutError> {
        let table = table(&words)?;
        let (seen, taken, published, written) = (start, start, start, start);
        Ok(Self { words, table, ours, theirs, seen, taken, published, written, fault: None })
    }

    fn describe(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seen, taken, published, written, fault, .. } = self;
        write!(f, "{name}(seen {seen}, taken {taken}, published {published}, written {written}, {fault:?})")
    }

    #[cold]
    fn break_with(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
        self.seen = self.taken;
    }

    #[inline]
    fn available(&self) -> u32 {
        self.seen.wrapping_sub(self.taken)
    }

    /// Looks how far the peer is: between what was seen and `limit`, counted from `base`, which is behind both.
    #[inline]
    fn refresh(&mut self, base: u32, limit: u32) -> u32 {
        if self.fault.is_none() {
            let producer = self.words.load32_acquire(self.theirs.producer);
            if producer != self.seen {
                let ahead = producer.wrapping_sub(base);
                if ahead > limit || ahead < self.seen.wrapping_sub(base) {
                    self.break_with(Fault::Index);
                } else {
                    fetch(&self.table, self.seen, producer);
                    self.seen = producer;
                }
            }
        }
        self.available()
    }

    #[inline]
    fn take(&mut self) -> Option<E> {
        (self.available() > 0).then(|| {
            let slot = self.table.load(self.taken as u16);
            self.taken = self.taken.wrapping_add(1);
            slot
        })
    }

    #[inline]
    fn write(&mut self, slot: E) {
        if self.fault.is_none() {
            self.table.store(self.written as u16, slot);
        }
        self.written = self.written.wrapping_add(1);
    }

    #[inline]
    fn publish(&mut self) -> bool {
        if self.written == self.published || self.fault.is_some() {
            return false;
        }
        let old = std::mem::replace(&mut self.published, self.written);
        self.words.store32_release(self.ours.producer, self.written);
        // Pairs with the fence in the peer's final check.
        A::full_fence();
        passes(self.words.load32(self.ours.event), old, self.written)
    }

    /// Asks to be told when `count` are there; whether they are, by `refresh`, after that.
    #[inline]
    fn final_check(&mut self, count: u32, refresh: impl FnOnce(&mut Self) -> u32) -> bool {
        if self.fault.is_some() {
            return false;
        }
        if self.available() >= count {
            return true;
        }
        self.words.store32(self.theirs.event, self.taken.wrapping_add(count));
        // Pairs with the fence in the peer's publish.
        A::full_fence();
        refresh(self) >= count
    }
}

/// The back end's half: takes requests, writes responses into slots whose requests were taken.
pub struct BackRing<A: Words, E: Entry>(Side<A, E>);

impl<A: Words, E: Entry> fmt::Debug for BackRing<A, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe("BackRing", f)
    }
}

impl<A: Words, E: Entry> BackRing<A, E> {
    /// Takes over a ring that a front end has set up, where the last back end left it: requests that were not
    /// answered are still to be done.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn attach(words: A) -> Result<Self, LayoutError> {
        table::<A, E>(&words)?;
        let done = words.load32(RESPONSES.producer);
        let mut side = Side::new(words, RESPONSES, REQUESTS, done)?;
        side.seen = side.words.load32_acquire(REQUESTS.producer);
        let outstanding = side.available();
        if outstanding > slots::<E>() {
            return Err(LayoutError::Outstanding(outstanding));
        }
        Ok(Self(side))
    }

    /// Number of slots.
    pub fn size(&self) -> u32 {
        slots::<E>()
    }

    /// Why the ring is broken, if it is.
    #[inline]
    pub fn fault(&self) -> Option<Fault> {
        self.0.fault
    }

    /// Gives the ring up, for what was found in its slots. The first fault stays.
    #[cold]
    pub fn break_with(&mut self, fault: Fault) {
        self.0.break_with(fault);
    }

    /// Requests that were seen and not taken yet. Touches no shared memory.
    #[inline]
    pub fn available(&self) -> u32 {
        self.0.available()
    }

    /// Looks how far the front end is; returns what is available then.
    #[inline]
    pub fn refresh(&mut self) -> u32 {
        Self::look(&mut self.0)
    }

    /// Never so far ahead of what was answered that slots would be overwritten.
    #[inline]
    fn look(side: &mut Side<A, E>) -> u32 {
        side.refresh(side.written, slots::<E>())
    }

    /// Index of the next request to take.
    pub fn next_request(&self) -> u32 {
        self.0.taken
    }

    /// Index of the next response to write.
    pub fn next_response(&self) -> u32 {
        self.0.written
    }

    /// Whether there are requests, seen or not.
    #[inline]
    pub fn has_requests(&mut self) -> bool {
        self.available() > 0 || self.refresh() > 0
    }

    /// Takes the next request that was seen. Its slot is loaded once.
    #[inline]
    pub fn take(&mut self) -> Option<E> {
        self.0.take()
    }

    /// Puts the last `count` requests back, which must have been taken and not been answered. They will be loaded again:
    /// what was found in them must be forgotten.
    #[inline]
    pub fn untake(&mut self, count: u32) {
        assert!(count <= self.unanswered(), "only what was taken can be put back");
        if self.0.fault.is_none() {
            self.0.taken = self.0.taken.wrapping_sub(count);
        }
    }

    /// Requests taken and not answered yet.
    #[inline]
    pub fn unanswered(&self) -> u32 {
        self.0.taken.wrapping_sub(self.0.written)
    }

    /// Writes the next response, into the slot of the oldest request that has none. The front end does not see it before
    /// [`publish`](Self::publish). A receive ring has its responses in the order of its requests; a transmit
    /// ring may have them in any, as they name their request.
    ///
    /// # Panics
    /// When every request that was taken is answered, a bug of the caller's.
    #[inline]
    pub fn respond(&mut self, slot: E) {
        assert!(self.unanswered() > 0, "a response without a request");
        self.0.write(slot);
    }

    /// Shows the responses to the front end; true when it wants to be notified.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        self.0.publish()
    }

    /// Asks to be notified when there are `count` requests more than were taken; whether there are already, and then nobody
    /// will notify. There is nothing to switch notifications off with: whoever does not ask again is not told.
    #[inline]
    pub fn final_check(&mut self, count: u32) -> bool {
        self.0.final_check(count, Self::look)
    }
}

/// The front end's half: writes requests, takes responses.
pub struct FrontRing<A: Words, E: Entry>(Side<A, E>);

impl<A: Words, E: Entry> fmt::Debug for FrontRing<A, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe("FrontRing", f)
    }
}

impl<A: Words, E: Entry> FrontRing<A, E> {
    /// Sets up an empty ring in a page of ours that no back end uses yet.
    ///
    /// # Errors
    /// [`LayoutError::Page`].
    pub fn new(words: A) -> Result<Self, LayoutError> {
        let side = Side::new(words, REQUESTS, RESPONSES, 0)?;
        for at in (0..PAGE).step_by(8) {
            side.words.store64(at, 0);
        }
        side.words.store32(REQUESTS.event, 1);
        side.words.store32(RESPONSES.event, 1);
        Ok(Self(side))
    }

    /// Number of slots.
    pub fn size(&self) -> u32 {
        slots::<E>()
    }

    /// Why the ring is broken, if it is.
    #[inline]
    pub fn fault(&self) -> Option<Fault> {
        self.0.fault
    }

    /// Gives the ring up, for what was found in its slots. The first fault stays.
    #[cold]
    pub fn break_with(&mut self, fault: Fault) {
        self.0.break_with(fault);
    }

    /// Slots that can be written.
    #[inline]
    pub fn free(&self) -> u32 {
        self.size() - self.in_flight()
    }

    /// Requests written, published or not, whose responses were not taken.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.0.written.wrapping_sub(self.0.taken)
    }

    /// Index that the next request will have: its slot is this modulo the size.
    #[inline]
    pub fn next_request(&self) -> u32 {
        self.0.written
    }

    /// Writes the next request. The back end does not see it before [`publish`](Self::publish).
    ///
    /// # Panics
    /// When no slot is free, a bug of the caller's.
    #[inline]
    pub fn push(&mut self, slot: E) {
        assert!(self.free() > 0, "a request without a free slot");
        self.0.write(slot);
    }

    /// Shows the requests to the back end; true when it wants to be notified.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        self.0.publish()
    }

    /// Responses that were seen and not taken yet. Touches no shared memory.
    #[inline]
    pub fn available(&self) -> u32 {
        self.0.available()
    }

    /// Looks how far the back end is; returns what is available then.
    #[inline]
    pub fn refresh(&mut self) -> u32 {
        Self::look(&mut self.0)
    }

    /// Never ahead of what was asked.
    #[inline]
    fn look(side: &mut Side<A, E>) -> u32 {
        side.refresh(side.taken, side.published.wrapping_sub(side.taken))
    }

    /// Index of the next response; on a receive ring also of the request that it answers.
    #[inline]
    pub fn next_response(&self) -> u32 {
        self.0.taken
    }

    /// Takes the next response that was seen. Its slot is loaded once.
    #[inline]
    pub fn take(&mut self) -> Option<E> {
        self.0.take()
    }

    /// Asks to be notified when there are `count` responses more than were taken; whether there are already, and then nobody
    /// will notify. There is nothing to switch notifications off with: whoever does not ask again is not told.
    #[inline]
    pub fn final_check(&mut self, count: u32) -> bool {
        self.0.final_check(count, Self::look)
    }
}
