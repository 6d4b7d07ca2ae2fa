//! [`BackRing`] and [`FrontRing`]: both halves of a ring in one shared page, in which requests go
//! one way and responses return through the same slots (Xen's `io/ring.h`).
//!
//! The front end creates its half in a page that it grants, and the back end attaches to the mapped
//! page; each uses its half from one thread and drops it when the interface closes. Each half keeps
//! private copies of everything that it has written and of how far it has read; of the page it only
//! reads what the other half owns: its producer index, its event index and its slots. A producer
//! index that is out of range breaks the ring for good ([`Fault::Index`], XSA-39), as does an
//! invalid slot that the owner reports ([`BackRing::break_with`]); a broken ring is not touched any
//! more.
//!
//! Indexes are free-running and 32 bits wide. Notifications are suppressed by event indexes: a half
//! that publishes from `old` to `new` notifies if the other's event index lies in `old + 1 ..=
//! new`. Before a half sleeps it sets its event index one ahead, executes a full fence and reads
//! the other's producer index again (the final check); this is a Dekker handshake with the fence in
//! publish.

use std::fmt;

use ringferry_memory::{Entry, Table, Words};

use crate::domain::PAGE;

/// The offsets of one direction's two words in the page.
#[derive(Clone, Copy, Debug)]
struct Direction {
    /// Offset of the producer index.
    producer: usize,
    /// Offset of the event index, at which the consumer wants to be notified.
    event: usize,
}

const REQUESTS: Direction = Direction { producer: 0, event: 4 };
const RESPONSES: Direction = Direction { producer: 8, event: 12 };
const SLOTS: usize = 64;

/// The violation that broke a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The producer index is further ahead than there are slots, or went back.
    #[error("the peer's producer index runs away; disconnect it")]
    Index,
    /// A packet was published without all of its slots.
    #[error("the peer published a packet without its last slots; disconnect it")]
    Incomplete,
    /// A piece of a packet does not end in its page.
    #[error("a slot of the peer crosses the end of its page; disconnect it")]
    CrossesPage,
    /// A packet has far more slots than are allowed.
    #[error("a packet of the peer has too many slots; disconnect it")]
    TooManySlots,
    /// An extra has an undefined type, comes twice, or stands where none may be.
    #[error("the peer sent an extra that is not allowed there; disconnect it")]
    BadExtra,
    /// A response does not belong to an outstanding request.
    #[error("the peer answered a request that is not outstanding; disconnect it")]
    BadResponse,
}

/// The reason why memory cannot hold a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The memory is not an aligned page.
    #[error("a ring needs a page of {PAGE} bytes, aligned to 8")]
    Page,
    /// The page's indexes claim more outstanding requests than there are slots.
    #[error("the ring has {0} slots outstanding, more than it holds; the front end must set it up again")]
    Outstanding(u32),
}

/// Returns the number of slots of a ring with slots of type `E`: as many as fit, rounded down to a
/// power of two.
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

/// Returns true if an event index lies in `old + 1 ..= new`, so that a notification is due.
#[inline]
const fn is_event_due(event: u32, old: u32, new: u32) -> bool {
    new.wrapping_sub(event) < new.wrapping_sub(old)
}

/// Most slots whose cache lines are prefetched when a burst is found: as many as are taken at a
/// time.
const LOOKAHEAD: u32 = 32;

/// Prefetches the cache lines of slots that the other half has just written, so that their misses
/// overlap.
#[inline]
fn prefetch<E: Entry>(table: &impl Table<E>, from: u32, to: u32) {
    const LINE: usize = 64;
    let count = to.wrapping_sub(from).min(LOOKAHEAD);
    for ahead in (0..count).step_by((LINE / size_of::<E>()).max(1)) {
        table.prefetch(from.wrapping_add(ahead) as u16);
    }
}

/// The common part of both halves: one direction is ours, of which we publish what we have written;
/// the other is the peer's, of which we take what it has published.
struct Side<A: Words, E: Entry> {
    words: A,
    table: A::Table<E>,
    ours: Direction,
    theirs: Direction,
    /// The peer's producer index when it was last read and valid.
    seen: u32,
    /// Index up to which the peer's slots were taken.
    taken: u32,
    /// Index up to which our slots were published.
    published: u32,
    /// Index up to which our slots were written.
    written: u32,
    fault: Option<Fault>,
}

impl<A: Words, E: Entry> Side<A, E> {
    /// Creates a side whose indexes all stand at `start`.
    fn new(words: A, ours: Direction, theirs: Direction, start: u32) -> Result<Self, LayoutError> {
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

    /// Reads the peer's producer index, which must lie between the last one and `limit`, counted
    /// from `base`, which is not after either. Returns the number of available slots.
    #[inline]
    fn refresh(&mut self, base: u32, limit: u32) -> u32 {
        if self.fault.is_none() {
            let producer = self.words.load32_acquire(self.theirs.producer);
            if producer != self.seen {
                let ahead = producer.wrapping_sub(base);
                if ahead > limit || ahead < self.seen.wrapping_sub(base) {
                    self.break_with(Fault::Index);
                } else {
                    prefetch(&self.table, self.seen, producer);
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
        is_event_due(self.words.load32(self.ours.event), old, self.written)
    }

    /// Asks for a notification when `count` slots are available; returns true if, after that,
    /// `refresh` finds that they are already.
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

/// The back end's half: it takes requests, and writes responses into the slots of taken requests.
pub struct BackRing<A: Words, E: Entry>(Side<A, E>);

impl<A: Words, E: Entry> fmt::Debug for BackRing<A, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe("BackRing", f)
    }
}

impl<A: Words, E: Entry> BackRing<A, E> {
    /// Attaches to a ring that a front end has set up, at the position where the last back end left
    /// it: requests without a response are still to be handled.
    ///
    /// # Errors
    /// Any [`LayoutError`].
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

    /// Returns the number of slots of the ring.
    pub fn size(&self) -> u32 {
        slots::<E>()
    }

    /// Returns the violation that broke the ring, if any.
    #[inline]
    pub fn fault(&self) -> Option<Fault> {
        self.0.fault
    }

    /// Breaks the ring because of an invalid slot. The first fault is kept.
    #[cold]
    pub fn break_with(&mut self, fault: Fault) {
        self.0.break_with(fault);
    }

    /// Returns the number of requests that were found and not yet taken. It reads no shared memory.
    #[inline]
    pub fn available(&self) -> u32 {
        self.0.available()
    }

    /// Reads the front end's producer index; returns the number of available requests.
    #[inline]
    pub fn refresh(&mut self) -> u32 {
        Self::refresh_side(&mut self.0)
    }

    /// The front end must not be so far ahead of our responses that slots would be overwritten.
    #[inline]
    fn refresh_side(side: &mut Side<A, E>) -> u32 {
        side.refresh(side.written, slots::<E>())
    }

    /// Returns the index of the next request to take.
    pub fn next_request(&self) -> u32 {
        self.0.taken
    }

    /// Returns the index of the next response to write.
    pub fn next_response(&self) -> u32 {
        self.0.written
    }

    /// Returns true if there are requests, found before or now.
    #[inline]
    pub fn has_requests(&mut self) -> bool {
        self.available() > 0 || self.refresh() > 0
    }

    /// Takes the next request that was found. Its slot is loaded once.
    #[inline]
    pub fn take(&mut self) -> Option<E> {
        self.0.take()
    }

    /// Returns the last `count` requests to the ring, which must have been taken and not answered.
    /// They will be loaded again, so nothing that was read from them may be relied on.
    #[inline]
    pub fn untake(&mut self, count: u32) {
        assert!(count <= self.unanswered(), "only what was taken can be put back");
        if self.0.fault.is_none() {
            self.0.taken = self.0.taken.wrapping_sub(count);
        }
    }

    /// Returns the number of requests that were taken and not yet answered.
    #[inline]
    pub fn unanswered(&self) -> u32 {
        self.0.taken.wrapping_sub(self.0.written)
    }

    /// Writes the next response, into the slot of the oldest request without one. The front end
    /// does not see it before [`publish`](Self::publish). A receive ring has its responses in the
    /// order of its requests; a transmit ring may have them in any order, because they repeat the
    /// identifiers of their requests.
    ///
    /// # Panics
    /// Panics if every taken request is answered, which is a caller's bug.
    #[inline]
    pub fn respond(&mut self, slot: E) {
        assert!(self.unanswered() > 0, "a response without a request");
        self.0.write(slot);
    }

    /// Publishes the responses to the front end; returns true if it wants a notification.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        self.0.publish()
    }

    /// Asks for a notification when `count` more requests than were taken are available; returns
    /// true if they are already, and then no notification comes. Notifications need not be switched
    /// off: each must be asked for.
    #[inline]
    pub fn final_check(&mut self, count: u32) -> bool {
        self.0.final_check(count, Self::refresh_side)
    }
}

/// The front end's half: it writes requests and takes responses.
pub struct FrontRing<A: Words, E: Entry>(Side<A, E>);

impl<A: Words, E: Entry> fmt::Debug for FrontRing<A, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe("FrontRing", f)
    }
}

impl<A: Words, E: Entry> FrontRing<A, E> {
    /// Sets up an empty ring in a page that no back end uses yet.
    ///
    /// # Errors
    /// [`LayoutError::Page`] when the memory is not an aligned page.
    pub fn new(words: A) -> Result<Self, LayoutError> {
        let side = Side::new(words, REQUESTS, RESPONSES, 0)?;
        for at in (0..PAGE).step_by(8) {
            side.words.store64(at, 0);
        }
        side.words.store32(REQUESTS.event, 1);
        side.words.store32(RESPONSES.event, 1);
        Ok(Self(side))
    }

    /// Returns the number of slots of the ring.
    pub fn size(&self) -> u32 {
        slots::<E>()
    }

    /// Returns the violation that broke the ring, if any.
    #[inline]
    pub fn fault(&self) -> Option<Fault> {
        self.0.fault
    }

    /// Breaks the ring because of an invalid slot. The first fault is kept.
    #[cold]
    pub fn break_with(&mut self, fault: Fault) {
        self.0.break_with(fault);
    }

    /// Returns the number of slots that can be written.
    #[inline]
    pub fn free(&self) -> u32 {
        self.size() - self.in_flight()
    }

    /// Returns the number of requests that were written, published or not, whose responses were not
    /// yet taken.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.0.written.wrapping_sub(self.0.taken)
    }

    /// Returns the index of the next request, whose slot is this modulo the size.
    #[inline]
    pub fn next_request(&self) -> u32 {
        self.0.written
    }

    /// Writes the next request. The back end does not see it before [`publish`](Self::publish).
    ///
    /// # Panics
    /// Panics if no slot is free, which is a caller's bug.
    #[inline]
    pub fn push(&mut self, slot: E) {
        assert!(self.free() > 0, "a request without a free slot");
        self.0.write(slot);
    }

    /// Publishes the requests to the back end; returns true if it wants a notification.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        self.0.publish()
    }

    /// Returns the number of responses that were found and not yet taken. It reads no shared
    /// memory.
    #[inline]
    pub fn available(&self) -> u32 {
        self.0.available()
    }

    /// Reads the back end's producer index; returns the number of available responses.
    #[inline]
    pub fn refresh(&mut self) -> u32 {
        Self::refresh_side(&mut self.0)
    }

    /// The back end must not be ahead of the published requests.
    #[inline]
    fn refresh_side(side: &mut Side<A, E>) -> u32 {
        side.refresh(side.taken, side.published.wrapping_sub(side.taken))
    }

    /// Returns the index of the next response; on a receive ring, also of the request that it
    /// answers.
    #[inline]
    pub fn next_response(&self) -> u32 {
        self.0.taken
    }

    /// Takes the next response that was found. Its slot is loaded once.
    #[inline]
    pub fn take(&mut self) -> Option<E> {
        self.0.take()
    }

    /// Asks for a notification when `count` more responses than were taken are available; returns
    /// true if they are already, and then no notification comes. Notifications need not be switched
    /// off: each must be asked for.
    #[inline]
    pub fn final_check(&mut self, count: u32) -> bool {
        self.0.final_check(count, Self::refresh_side)
    }
}
