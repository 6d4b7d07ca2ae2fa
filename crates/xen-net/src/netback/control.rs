//! [`Control`]: the back end's side of the control ring, which registers static grants; hash
//! configuration is refused, because packets are hashed by an algorithm of our own.
//!
//! An owner creates it from the mapped ring of a connected interface, calls [`Control::poll`] on
//! one thread when its event channel fires, then [`Control::arm`], and drops it when the interface
//! disconnects.
//!
//! Packets are steered to receive rings by a hash of our own choice, which is the default of the
//! interface. So the only supported algorithm is "none", and messages that depend on another are
//! refused.

use std::io;

use ringferry_memory::{Words, WriteSlice};
use ringferry_xen::domain::PAGE;
use ringferry_xen::grant::{CopySegment, Foreign, GrantRef, Local};
use ringferry_xen::netif::control::{
    ControlBack, ControlSlot, GrefEntry, GrefList, MAX_GREFS, Message, Request, Response, Status,
};
use ringferry_xen::netif::{BackRing, Fault, LayoutError};

use super::pages::segment;
use super::queue::Queue;

/// Most requests served per poll: a front end sends one at a time, so more is a flood.
const BURST: usize = 16;

/// Number of the hash algorithm "none" (`XEN_NETIF_CTRL_HASH_ALGORITHM_NONE`).
const ALGORITHM_NONE: u32 = 0;

/// The queues of an interface, to which requests about static grants are applied.
pub trait StaticGrants {
    /// Returns how many static grants a queue has room for.
    ///
    /// # Errors
    /// The status for the response: the queue does not exist, or is not available now.
    fn capacity(&mut self, queue: u32) -> Result<u32, Status>;

    /// Maps static grants, all of them or none.
    ///
    /// # Errors
    /// The status for the response.
    fn add(&mut self, queue: u32, entries: &[GrefEntry]) -> Result<(), Status>;

    /// Unmaps static grants, sets the status of each entry, and returns how many were unmapped.
    ///
    /// # Errors
    /// The status for the response.
    fn remove(&mut self, queue: u32, entries: &mut [GrefEntry]) -> Result<u32, Status>;
}

/// The queues of this thread, in order, none of them lent out.
impl<A: Words> StaticGrants for &mut [&mut Queue<A>] {
    fn capacity(&mut self, queue: u32) -> Result<u32, Status> {
        pick(self, queue)?.static_capacity()
    }

    fn add(&mut self, queue: u32, entries: &[GrefEntry]) -> Result<(), Status> {
        pick(self, queue)?.add_static(entries)
    }

    fn remove(&mut self, queue: u32, entries: &mut [GrefEntry]) -> Result<u32, Status> {
        pick(self, queue)?.remove_static(entries)
    }
}

/// The back end's side of the control ring of one interface.
#[derive(Debug)]
pub struct Control<A: Words> {
    ring: ControlBack<A>,
    foreign: Box<dyn Foreign>,
}

impl<A: Words> Control<A> {
    /// Attaches to the ring in `page`; lists of grants are copied through `foreign`.
    ///
    /// # Errors
    /// Any [`LayoutError`] of the page.
    pub fn new(page: A, foreign: Box<dyn Foreign>) -> Result<Self, LayoutError> {
        Ok(Self { ring: BackRing::attach(page)?, foreign })
    }

    /// Returns the violation that broke the ring, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.ring.fault()
    }

    /// Asks for an event with the next request; returns true if one is there already, and then
    /// [`poll`](Self::poll) must be called.
    pub fn arm(&mut self) -> bool {
        self.ring.final_check(1)
    }

    /// Serves up to 16 waiting requests; returns true if the front end wants an event. `queues` are
    /// all queues in order, none of them lent out.
    pub fn poll(&mut self, mut queues: &mut [&mut Queue<A>]) -> bool {
        self.poll_for(&mut queues)
    }

    /// Does the same as [`poll`](Self::poll) for queues that may be on other threads.
    pub fn poll_for(&mut self, queues: &mut dyn StaticGrants) -> bool {
        self.ring.refresh();
        for _ in 0..BURST {
            let Some(slot) = self.ring.take() else { break };
            let request = Request::from_slot(slot);
            let response = self.serve(&request, queues);
            self.ring.respond(response);
        }
        self.ring.publish()
    }

    fn serve(&mut self, request: &Request, queues: &mut dyn StaticGrants) -> ControlSlot {
        let result = match request.message() {
            Some(Message::SetHashAlgorithm(ALGORITHM_NONE)) => Ok(0),
            Some(Message::SetHashAlgorithm(_)) => Err(Status::InvalidParameter),
            Some(Message::GetGrefMappingSize { queue: number }) => queues.capacity(number),
            Some(Message::AddGrefMapping(list)) => self.add(queues, list),
            Some(Message::DelGrefMapping(list)) => self.remove(queues, list),
            Some(
                Message::GetHashFlags
                | Message::SetHashFlags(_)
                | Message::SetHashKey { .. }
                | Message::GetHashMappingSize
                | Message::SetHashMappingSize(_)
                | Message::SetHashMapping { .. },
            )
            | None => Err(Status::NotSupported),
        };
        let (status, data) = result.map_or_else(|status| (status, 0), |data| (Status::Success, data));
        Response::to(request, status, data).to_slot()
    }

    fn add(&mut self, queues: &mut dyn StaticGrants, list: GrefList) -> Result<u32, Status> {
        // The queue is checked first, so nothing is copied for one that does not exist.
        queues.capacity(list.queue)?;
        let entries = self.fetch(list)?;
        queues.add(list.queue, &entries)?;
        Ok(0)
    }

    fn remove(&mut self, queues: &mut dyn StaticGrants, list: GrefList) -> Result<u32, Status> {
        queues.capacity(list.queue)?;
        let mut entries = self.fetch(list)?;
        let removed = queues.remove(list.queue, &mut entries)?;
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_bytes()).collect();
        // The pages are unmapped already; a front end whose list cannot be written gets only the
        // number.
        let _ = self.copy(segment(list.page, 0, Local::From((&bytes[..]).into())));
        Ok(removed)
    }

    /// Copies the entries of a list at once, so that they cannot change after they were checked.
    fn fetch(&mut self, list: GrefList) -> Result<Vec<GrefEntry>, Status> {
        let count = usize::try_from(list.count).map_err(|_| Status::InvalidParameter)?;
        if count == 0 || count > MAX_GREFS {
            return Err(Status::InvalidParameter);
        }
        let mut bytes = [0; PAGE];
        let room = WriteSlice::from(&mut bytes[..count * GrefEntry::BYTES]);
        self.copy(segment(list.page, 0, Local::To(room))).map_err(|_| Status::InvalidParameter)?;
        let (entries, _) = bytes.as_chunks::<{ GrefEntry::BYTES }>();
        Ok(entries[..count].iter().map(|entry| GrefEntry::from_bytes(*entry)).collect())
    }

    fn copy(&mut self, segment: CopySegment<'_>) -> io::Result<()> {
        let GrantRef(gref) = segment.gref;
        let mut batch = [segment];
        self.foreign.copy(&mut batch)?;
        let failed = || io::Error::other(format!("page {gref} cannot be copied"));
        batch[0].done.then_some(()).ok_or_else(failed)
    }
}

/// Returns the queue of this number.
fn pick<'q, A: Words>(queues: &'q mut [&mut Queue<A>], number: u32) -> Result<&'q mut Queue<A>, Status> {
    let at = usize::try_from(number).map_err(|_| Status::InvalidParameter)?;
    queues.get_mut(at).map(|queue| &mut **queue).ok_or(Status::InvalidParameter)
}
