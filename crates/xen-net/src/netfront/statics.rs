//! Grants handed over on the control ring, the standardised way of saying that they will stay ("static grants",
//! `XEN_NETIF_CTRL_TYPE_{GET,ADD}_GREF_MAPPING*` in Xen's `io/netif.h`).
//!
//! The back end says how many grants of a queue it keeps mapped, and is given as many, in lists. What does not fit it maps or
//! copies as it likes. It is asked again whenever it may be another that was started in its place: one that has the grants
//! already refuses them, and nothing changes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use ringferry_memory::Area;
use ringferry_xen::event::EventChannel;
use ringferry_xen::grant::{Access, GrantRef};
use ringferry_xen::netif::control::{
    ControlFront, GrefEntry, GrefList, MAX_GREFS, Message, Request, Response, Status,
};
use ringferry_xen::netif::{Fault, LayoutError};

/// What is asked next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// How many grants of a queue are kept.
    Ask { queue: usize },
    /// To keep those from `from` to `to`.
    Add { queue: usize, from: usize, to: usize, end: usize },
    /// Nothing.
    Done,
}

/// The front end's end of the control ring.
#[derive(Debug)]
pub struct Statics {
    ring: ControlFront<Area>,
    channel: Box<dyn EventChannel>,
    /// A page that lists are written to, which the back end reads, and its grant.
    list: (Area, GrantRef),
    /// The grants of each queue, the most useful first.
    grants: Vec<Vec<(GrantRef, Access)>>,
    step: Step,
    /// Number of the request that was sent and not answered.
    asked: Option<u16>,
    next_id: u16,
    /// How many of each queue the back end has said it keeps.
    kept: Vec<usize>,
    /// The back end has said that it knows nothing of this.
    refused: bool,
    again: bool,
}

impl Statics {
    /// A control ring in the page `ring`, to hand over `grants` of each queue.
    ///
    /// # Errors
    /// `ring` is no page.
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
            step: Step::Done,
            asked: None,
            next_id: 0,
            refused: false,
            again: false,
        })
    }

    /// Grants that the back end has said it keeps, of all queues.
    pub fn kept(&self) -> usize {
        self.kept.iter().sum()
    }

    /// The violation that broke the control ring, if any. Packets go on without it.
    pub fn fault(&self) -> Option<Fault> {
        self.ring.fault()
    }

    /// Hands the grants over, to this back end or one that may have taken its place.
    ///
    /// # Errors
    /// The channel is gone.
    pub fn announce(&mut self) -> io::Result<()> {
        if self.step != Step::Done {
            self.again = true;
            return Ok(());
        }
        self.step = Step::Ask { queue: 0 };
        self.ask()
    }

    /// Sees what was answered, and asks on.
    ///
    /// # Errors
    /// The channel is gone.
    pub fn step(&mut self) -> io::Result<()> {
        self.channel.drain()?;
        loop {
            self.ring.refresh();
            while let Some(slot) = self.ring.take() {
                let response = Response::from_slot(slot);
                if self.asked.take() != Some(response.id) {
                    self.ring.break_with(Fault::BadResponse);
                    break;
                }
                self.answered(&response);
                self.ask()?;
            }
            if !self.ring.final_check(1) {
                return Ok(());
            }
        }
    }

    /// What follows from an answer.
    fn answered(&mut self, response: &Response) {
        let success = response.status == Status::Success;
        self.refused = response.status == Status::NotSupported;
        self.step = match self.step {
            _ if self.refused => {
                self.kept.fill(0);
                Step::Done
            }
            Step::Ask { queue } => {
                let room = if success { response.data as usize } else { 0 };
                let end = self.grants[queue].len().min(room);
                self.kept[queue] = self.kept[queue].min(end);
                self.add(queue, 0, end)
            }
            Step::Add { queue, to, end, .. } if success => {
                self.kept[queue] = to;
                self.add(queue, to, end)
            }
            Step::Add { queue, from, .. } => {
                // One that has them already refuses them so. With any other word it has none but those it has just taken.
                if response.status != Status::InvalidParameter {
                    self.kept[queue] = from;
                }
                self.next_queue(queue)
            }
            Step::Done => Step::Done,
        };
        if self.step == Step::Done && std::mem::take(&mut self.again) && !self.refused {
            self.step = Step::Ask { queue: 0 };
        }
    }

    fn add(&self, queue: usize, from: usize, end: usize) -> Step {
        let to = end.min(from + MAX_GREFS);
        if from < to { Step::Add { queue, from, to, end } } else { self.next_queue(queue) }
    }

    fn next_queue(&self, queue: usize) -> Step {
        if queue + 1 < self.grants.len() { Step::Ask { queue: queue + 1 } } else { Step::Done }
    }

    /// Sends what is to be asked next.
    fn ask(&mut self) -> io::Result<()> {
        let message = match self.step {
            Step::Ask { queue } => Message::GetGrefMappingSize { queue: queue as u32 },
            Step::Add { queue, from, to, .. } => {
                for (at, &(gref, access)) in self.grants[queue][from..to].iter().enumerate() {
                    let entry = GrefEntry::new(gref, access == Access::Read).to_bytes();
                    if let Some(place) = self.list.0.write(GrefEntry::BYTES * at, GrefEntry::BYTES) {
                        place.copy_from(&entry);
                    }
                }
                let count = (to - from) as u32;
                Message::AddGrefMapping(GrefList { queue: queue as u32, page: self.list.1, count })
            }
            Step::Done => return Ok(()),
        };
        if self.ring.fault().is_some() || self.ring.free() == 0 {
            self.step = Step::Done;
            return Ok(());
        }
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        self.asked = Some(id);
        self.ring.push(Request::new(id, message).to_slot());
        if self.ring.publish() { self.channel.notify() } else { Ok(()) }
    }
}

impl AsFd for Statics {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}
