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

const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;
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

/// The back end's half: takes requests, writes responses into slots whose requests were taken.
pub struct BackRing<A: Words, E: Entry> {
    words: A,
    table: A::Table<E>,
    /// The front end's producer index, as last seen and found to be sane.
    req_prod: u32,
    req_cons: u32,
    /// Ours: what was published, and what was written.
    rsp_prod: u32,
    rsp_pvt: u32,
    fault: Option<Fault>,
}

impl<A: Words, E: Entry> fmt::Debug for BackRing<A, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { req_prod, req_cons, rsp_prod, rsp_pvt, fault, .. } = self;
        let indexes = [req_prod, req_cons, rsp_prod, rsp_pvt];
        write!(f, "BackRing({indexes:?}, {fault:?})")
    }
}

impl<A: Words, E: Entry> BackRing<A, E> {
    /// Takes over a ring that a front end has set up, where the last back end left it: requests that were not
    /// answered are still to be done.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn attach(words: A) -> Result<Self, LayoutError> {
        let table = table(&words)?;
        let done = words.load32(RSP_PROD);
        let req_prod = words.load32_acquire(REQ_PROD);
        let outstanding = req_prod.wrapping_sub(done);
        if outstanding > slots::<E>() {
            return Err(LayoutError::Outstanding(outstanding));
        }
        Ok(Self { words, table, req_prod, req_cons: done, rsp_prod: done, rsp_pvt: done, fault: None })
    }

    /// Number of slots.
    pub fn size(&self) -> u32 {
        slots::<E>()
    }

    /// Why the ring is broken, if it is.
    #[inline]
    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Gives the ring up, for what was found in its slots. The first fault stays.
    #[cold]
    pub fn break_with(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
        self.req_prod = self.req_cons;
    }

    /// Requests that were seen and not taken yet. Touches no shared memory.
    #[inline]
    pub fn available(&self) -> u32 {
        self.req_prod.wrapping_sub(self.req_cons)
    }

    /// Looks how far the front end is; returns what is available then.
    #[inline]
    pub fn refresh(&mut self) -> u32 {
        if self.fault.is_none() {
            let prod = self.words.load32_acquire(REQ_PROD);
            if prod != self.req_prod {
                // Never behind what was seen, never so far ahead that slots would be overwritten.
                let ahead = prod.wrapping_sub(self.rsp_pvt);
                if ahead > self.size() || ahead < self.req_prod.wrapping_sub(self.rsp_pvt) {
                    self.break_with(Fault::Index);
                } else {
                    fetch(&self.table, self.req_prod, prod);
                    self.req_prod = prod;
                }
            }
        }
        self.available()
    }

    /// Index of the next request to take.
    pub fn next_request(&self) -> u32 {
        self.req_cons
    }

    /// Index of the next response to write.
    pub fn next_response(&self) -> u32 {
        self.rsp_pvt
    }

    /// Whether there are requests, seen or not.
    #[inline]
    pub fn has_requests(&mut self) -> bool {
        self.available() > 0 || self.refresh() > 0
    }

    /// Takes the next request that was seen. Its slot is loaded once.
    #[inline]
    pub fn take(&mut self) -> Option<E> {
        (self.available() > 0).then(|| {
            let slot = self.table.load(self.req_cons as u16);
            self.req_cons = self.req_cons.wrapping_add(1);
            slot
        })
    }

    /// Puts the last `count` requests back, which must have been taken and not been answered. They will be loaded again:
    /// what was found in them must be forgotten.
    #[inline]
    pub fn untake(&mut self, count: u32) {
        assert!(count <= self.req_cons.wrapping_sub(self.rsp_pvt), "only what was taken can be put back");
        if self.fault.is_none() {
            self.req_cons = self.req_cons.wrapping_sub(count);
        }
    }

    /// Requests taken and not answered yet.
    #[inline]
    pub fn unanswered(&self) -> u32 {
        self.req_cons.wrapping_sub(self.rsp_pvt)
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
        if self.fault.is_none() {
            self.table.store(self.rsp_pvt as u16, slot);
        }
        self.rsp_pvt = self.rsp_pvt.wrapping_add(1);
    }

    /// Shows the responses to the front end; true when it wants to be notified.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        if self.rsp_pvt == self.rsp_prod || self.fault.is_some() {
            return false;
        }
        let old = std::mem::replace(&mut self.rsp_prod, self.rsp_pvt);
        self.words.store32_release(RSP_PROD, self.rsp_pvt);
        // Pairs with the fence in the front end's final check.
        A::full_fence();
        passes(self.words.load32(RSP_EVENT), old, self.rsp_pvt)
    }

    /// Asks to be notified when there are `count` requests more than were taken; whether there are already, and then nobody
    /// will notify. There is nothing to switch notifications off with: whoever does not ask again is not told.
    #[inline]
    pub fn final_check(&mut self, count: u32) -> bool {
        if self.fault.is_some() {
            return false;
        }
        if self.available() >= count {
            return true;
        }
        self.words.store32(REQ_EVENT, self.req_cons.wrapping_add(count));
        // Pairs with the fence in the front end's publish.
        A::full_fence();
        self.refresh() >= count
    }
}

/// The front end's half: writes requests, takes responses.
pub struct FrontRing<A: Words, E: Entry> {
    words: A,
    table: A::Table<E>,
    /// The back end's producer index, as last seen and found to be sane.
    rsp_prod: u32,
    rsp_cons: u32,
    /// Ours: what was published, and what was written.
    req_prod: u32,
    req_pvt: u32,
    fault: Option<Fault>,
}

impl<A: Words, E: Entry> fmt::Debug for FrontRing<A, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rsp_prod, rsp_cons, req_prod, req_pvt, fault, .. } = self;
        let indexes = [req_prod, req_pvt, rsp_prod, rsp_cons];
        write!(f, "FrontRing({indexes:?}, {fault:?})")
    }
}

impl<A: Words, E: Entry> FrontRing<A, E> {
    /// Sets up an empty ring in a page of ours that no back end uses yet.
    ///
    /// # Errors
    /// [`LayoutError::Page`].
    pub fn new(words: A) -> Result<Self, LayoutError> {
        let table = table(&words)?;
        for at in (0..PAGE).step_by(8) {
            words.store64(at, 0);
        }
        words.store32(REQ_EVENT, 1);
        words.store32(RSP_EVENT, 1);
        Ok(Self { words, table, rsp_prod: 0, rsp_cons: 0, req_prod: 0, req_pvt: 0, fault: None })
    }

    /// Number of slots.
    pub fn size(&self) -> u32 {
        slots::<E>()
    }

    /// Why the ring is broken, if it is.
    #[inline]
    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Gives the ring up, for what was found in its slots. The first fault stays.
    #[cold]
    pub fn break_with(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
        self.rsp_prod = self.rsp_cons;
    }

    /// Slots that can be written.
    #[inline]
    pub fn free(&self) -> u32 {
        self.size() - self.in_flight()
    }

    /// Requests written, published or not, whose responses were not taken.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.req_pvt.wrapping_sub(self.rsp_cons)
    }

    /// Index that the next request will have: its slot is this modulo the size.
    #[inline]
    pub fn next_request(&self) -> u32 {
        self.req_pvt
    }

    /// Writes the next request. The back end does not see it before [`publish`](Self::publish).
    ///
    /// # Panics
    /// When no slot is free, a bug of the caller's.
    #[inline]
    pub fn push(&mut self, slot: E) {
        assert!(self.free() > 0, "a request without a free slot");
        if self.fault.is_none() {
            self.table.store(self.req_pvt as u16, slot);
        }
        self.req_pvt = self.req_pvt.wrapping_add(1);
    }

    /// Shows the requests to the back end; true when it wants to be notified.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        if self.req_pvt == self.req_prod || self.fault.is_some() {
            return false;
        }
        let old = std::mem::replace(&mut self.req_prod, self.req_pvt);
        self.words.store32_release(REQ_PROD, self.req_pvt);
        // Pairs with the fence in the back end's final check.
        A::full_fence();
        passes(self.words.load32(REQ_EVENT), old, self.req_pvt)
    }

    /// Responses that were seen and not taken yet. Touches no shared memory.
    #[inline]
    pub fn available(&self) -> u32 {
        self.rsp_prod.wrapping_sub(self.rsp_cons)
    }

    /// Looks how far the back end is; returns what is available then.
    #[inline]
    pub fn refresh(&mut self) -> u32 {
        if self.fault.is_none() {
            let prod = self.words.load32_acquire(RSP_PROD);
            if prod != self.rsp_prod {
                // Never behind what was seen, never ahead of what was asked.
                let ahead = prod.wrapping_sub(self.rsp_cons);
                let asked = self.req_prod.wrapping_sub(self.rsp_cons);
                if ahead > asked || ahead < self.available() {
                    self.break_with(Fault::Index);
                } else {
                    fetch(&self.table, self.rsp_prod, prod);
                    self.rsp_prod = prod;
                }
            }
        }
        self.available()
    }

    /// Index of the next response; on a receive ring also of the request that it answers.
    #[inline]
    pub fn next_response(&self) -> u32 {
        self.rsp_cons
    }

    /// Takes the next response that was seen. Its slot is loaded once.
    #[inline]
    pub fn take(&mut self) -> Option<E> {
        (self.available() > 0).then(|| {
            let slot = self.table.load(self.rsp_cons as u16);
            self.rsp_cons = self.rsp_cons.wrapping_add(1);
            slot
        })
    }

    /// Asks to be notified when there are `count` responses more than were taken; whether there are already, and then nobody
    /// will notify. There is nothing to switch notifications off with: whoever does not ask again is not told.
    #[inline]
    pub fn final_check(&mut self, count: u32) -> bool {
        if self.fault.is_some() {
            return false;
        }
        if self.available() >= count {
            return true;
        }
        self.words.store32(RSP_EVENT, self.rsp_cons.wrapping_add(count));
        // Pairs with the fence in the back end's publish.
        A::full_fence();
        self.refresh() >= count
    }
}
