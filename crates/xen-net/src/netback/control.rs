//! The control ring: grants to keep mapped; and hashes, which we do not compute.
//!
//! Packets are steered to receive rings by a hash of our own choice, which is the default of the interface. So no algorithm
//! but "none" is supported, and what depends on one is refused.

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

/// Requests served per poll: a front end sends one at a time, so more is a flood.
const BURST: usize = 16;

/// `XEN_NETIF_CTRL_HASH_ALGORITHM_NONE`
const ALGORITHM_NONE: u32 = 0;

/// The queues of an interface, for the requests that are about their static grants.
pub trait StaticGrants {
    /// How many static grants there is room for in a queue.
    ///
    /// # Errors
    /// What the front end is answered: there is no such queue, or it is not to be had now.
    fn capacity(&mut self, queue: u32) -> Result<u32, Status>;

    /// Maps grants for good: all or none.
    ///
    /// # Errors
    /// What the front end is answered.
    fn add(&mut self, queue: u32, entries: &[GrefEntry]) -> Result<(), Status>;

    /// Unmaps grants, and says in each entry what became of it; how many are unmapped.
    ///
    /// # Errors
    /// What the front end is answered.
    fn remove(&mut self, queue: u32, entries: &mut [GrefEntry]) -> Result<u32, Status>;
}

/// Queues of this thread, in order, none of them lent out.
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

/// The back end's side of the control ring.
#[derive(Debug)]
pub struct Control<A: Words> {
    ring: ControlBack<A>,
    foreign: Box<dyn Foreign>,
}

impl<A: Words> Control<A> {
    /// Serves the ring in `page`; lists are fetched through `foreign`.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn new(page: A, foreign: Box<dyn Foreign>) -> Result<Self, LayoutError> {
        Ok(Self { ring: BackRing::attach(page)?, foreign })
    }

    /// Why the ring is broken, if it is.
    pub fn fault(&self) -> Option<Fault> {
        self.ring.fault()
    }

    /// Asks to be told of the next request; whether there is one already, and then call [`poll`](Self::poll).
    pub fn arm(&mut self) -> bool {
        self.ring.final_check(1)
    }

    /// Serves the requests that are there, up to a bound; true when the front end wants to be notified. `queues` are all
    /// queues in order, none of them lent out.
    pub fn poll(&mut self, mut queues: &mut [&mut Queue<A>]) -> bool {
        self.poll_for(&mut queues)
    }

    /// As [`poll`](Self::poll), for queues that are wherever they are.
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
        // Nothing is copied for a queue that is not there.
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
        // The pages are unmapped; a front end that does not let us tell it which has only the number.
        let _ = self.copy(segment(list.page, 0, Local::From((&bytes[..]).into())));
        Ok(removed)
    }

    /// The entries of a list, by one copy: what is checked cannot change any more.
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

/// The queue of that number.
fn pick<'q, A: Words>(queues: &'q mut [&mut Queue<A>], number: u32) -> Result<&'q mut Queue<A>, Status> {
    let at = usize::try_from(number).map_err(|_| Status::InvalidParameter)?;
    queues.get_mut(at).map(|queue| &mut **queue).ok_or(Status::InvalidParameter)
}
