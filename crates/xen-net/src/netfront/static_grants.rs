//! [`StaticGrants`]: the front end's side of the control ring, on which it registers the grants
//! that will stay ("static grants", `XEN_NETIF_CTRL_TYPE_{GET,ADD}_GREF_MAPPING*` in Xen's
//! `io/netif.h`).
//!
//! The xenbus front-end driver creates it with the interface, calls [`StaticGrants::announce`] when
//! the back end has connected, calls [`StaticGrants::poll`] when its event channel fires, and drops
//! it when the interface closes. For each queue it asks how many grants the back end keeps mapped,
//! and registers that many, in lists; the back end maps or copies the others as it likes. It asks
//! again whenever the back end may be another that was started in its place: one that has the
//! grants already refuses them, and nothing changes.
//!
//! ```text
//!   Done --announce()--> Size(queue 0) --room--> Add(list) --ok--> Add(next list) ...
//!    ^                        |                     |
//!    |                        | nothing to add      | last list, or refused
//!    +--- last queue ---------+---------------------+---> Size(next queue)
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use ringferry_memory::Area;
use ringferry_xen::event::EventChannel;
use ringferry_xen::grant::{Access, GrantRef};
use ringferry_xen::netif::control::{
    ControlFront, GrefEntry, GrefList, MAX_GREFS, Message, Request, Response, Status,
};
use ringferry_xen::netif::{Fault, LayoutError};

/// The next request to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextRequest {
    /// Ask how many grants of a queue are kept.
    Size { queue: usize },
    /// Register the grants from `from` to `to`.
    Add { queue: usize, from: usize, to: usize, end: usize },
    /// Send no request: every queue is done.
    Done,
}

/// The front end's side of the control ring, with at most one request in flight.
#[derive(Debug)]
pub struct StaticGrants {
    ring: ControlFront<Area>,
    channel: Box<dyn EventChannel>,
    /// The page that lists are written to, which the back end reads, and its grant.
    list: (Area, GrantRef),
    /// The grants of each queue, the most useful first.
    grants: Vec<Vec<(GrantRef, Access)>>,
    next: NextRequest,
    /// Identifier of the request in flight.
    in_flight: Option<u16>,
    next_id: u16,
    /// Number of each queue's grants that the back end has confirmed to keep.
    kept: Vec<usize>,
    /// True if the back end does not support static grants.
    refused: bool,
    restart: bool,
}

impl StaticGrants {
    /// Creates a control ring in the page `ring` that registers `grants` of each queue.
    ///
    /// # Errors
    /// `ring` is not a page.
    pub fn new(
        ring: Area,
        channel: Box<dyn EventChannel>,
        list: (Area, GrantRef),
        grants: Vec<Vec<(GrantRef, Access)>>,
    ) -> Result<Self, LayoutError> {
        Ok(Self {
            ring: ControlFront::new(ring)?,
            channel,
            list,
            kept: vec![0; grants.len()],
            grants,
            next: NextRequest::Done,
            in_flight: None,
            next_id: 0,
            refused: false,
            restart: false,
        })
    }

    /// Returns the number of grants that the back end has confirmed to keep, of all queues.
    pub fn kept(&self) -> usize {
        self.kept.iter().sum()
    }

    /// Returns the violation that broke the control ring, if any. Packets flow without it.
    pub fn fault(&self) -> Option<Fault> {
        self.ring.fault()
    }

    /// Begins to register the grants with this back end, or with one that took its place.
    ///
    /// # Errors
    /// The event channel was closed.
    pub fn announce(&mut self) -> io::Result<()> {
        if self.next != NextRequest::Done {
            self.restart = true;
            return Ok(());
        }
        self.next = NextRequest::Size { queue: 0 };
        self.send_next()
    }

    /// Takes responses and sends the requests that follow from them.
    ///
    /// # Errors
    /// The event channel was closed.
    pub fn poll(&mut self) -> io::Result<()> {
        self.channel.drain()?;
        loop {
            self.ring.refresh();
            while let Some(slot) = self.ring.take() {
                let response = Response::from_slot(slot);
                if self.in_flight.take() != Some(response.id) {
                    self.ring.break_with(Fault::BadResponse);
                    break;
                }
                self.handle_response(&response);
                self.send_next()?;
            }
            if !self.ring.final_check(1) {
                return Ok(());
            }
        }
    }

    /// Decides on the next request after a response.
    fn handle_response(&mut self, response: &Response) {
        let success = response.status == Status::Success;
        self.refused = response.status == Status::NotSupported;
        self.next = match self.next {
            _ if self.refused => {
                self.kept.fill(0);
                NextRequest::Done
            }
            NextRequest::Size { queue } => {
                let room = if success { response.data as usize } else { 0 };
                let end = self.grants[queue].len().min(room);
                self.kept[queue] = self.kept[queue].min(end);
                self.add(queue, 0, end)
            }
            NextRequest::Add { queue, to, end, .. } if success => {
                self.kept[queue] = to;
                self.add(queue, to, end)
            }
            NextRequest::Add { queue, from, .. } => {
                // A back end that has the grants already answers with this status. After any other
                // it has none but those that it took just now.
                if response.status != Status::InvalidParameter {
                    self.kept[queue] = from;
                }
                self.next_queue(queue)
            }
            NextRequest::Done => NextRequest::Done,
        };
        if self.next == NextRequest::Done && std::mem::take(&mut self.restart) && !self.refused {
            self.next = NextRequest::Size { queue: 0 };
        }
    }

    fn add(&self, queue: usize, from: usize, end: usize) -> NextRequest {
        let to = end.min(from + MAX_GREFS);
        if from < to { NextRequest::Add { queue, from, to, end } } else { self.next_queue(queue) }
    }

    fn next_queue(&self, queue: usize) -> NextRequest {
        if queue + 1 < self.grants.len() { NextRequest::Size { queue: queue + 1 } } else { NextRequest::Done }
    }

    /// Sends the next request, if there is one.
    fn send_next(&mut self) -> io::Result<()> {
        let message = match self.next {
            NextRequest::Size { queue } => Message::GetGrefMappingSize { queue: queue as u32 },
            NextRequest::Add { queue, from, to, .. } => {
                for (at, &(gref, access)) in self.grants[queue][from..to].iter().enumerate() {
                    let entry = GrefEntry::new(gref, access == Access::Read).to_bytes();
                    if let Some(place) = self.list.0.write(GrefEntry::BYTES * at, GrefEntry::BYTES) {
                        place.copy_from(&entry);
                    }
                }
                let count = (to - from) as u32;
                Message::AddGrefMapping(GrefList { queue: queue as u32, page: self.list.1, count })
            }
            NextRequest::Done => return Ok(()),
        };
        if self.ring.fault().is_some() || self.ring.free() == 0 {
            self.next = NextRequest::Done;
            return Ok(());
        }
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        self.in_flight = Some(id);
        self.ring.push(Request::new(id, message).to_slot());
        if self.ring.publish() { self.channel.notify() } else { Ok(()) }
    }
}

impl AsFd for StaticGrants {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}
