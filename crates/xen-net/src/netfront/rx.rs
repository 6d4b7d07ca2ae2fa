//! [`NetfrontRx`]: the front end's receive ring as a driver of the framework, which turns slots
//! into packets.
//!
//! A [`Pair`](super::Pair) creates it in its arena and gives it to the framework's receive queue,
//! which calls it on the pair's thread. A page is posted as a whole, and a response holds the part
//! of it that was written. Offloads and the number of pages of a packet stand in the ring, so
//! packets are assembled here before the framework sees the first of their pages. A page whose slot
//! held an extra comes back as an empty end of its packet.

use std::collections::VecDeque;
use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, ReadSlice, WriteSlice};
use ringferry_nic::driver::{Completion, Refused, RxDriver, Segment, Start};
use ringferry_nic::limits::{RxLimits, RxMode};
use ringferry_packet::vnet::{F_DATA_VALID, Header};
use ringferry_xen::domain::PAGE;
use ringferry_xen::netif::wire::{Extra, MAX_PACKET, MAX_SLOTS, RxFlags, RxRequest, RxResponse, RxSlot};
use ringferry_xen::netif::{Fault, FrontRing, LayoutError};

use super::arena::GrantMap;
use crate::offload::{Gso, HEADERS, NetifOffload};

/// Counters beside those of the framework, which counts packets that are dropped here as of a wrong
/// length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxCounters {
    /// Packets dropped because the back end could not write a page of theirs, or claims to have written outside one.
    pub errors: u64,
    /// Packets dropped because they contradict their offloads.
    pub unfit: u64,
    /// Pages in which data had to be moved to the front.
    pub moved: u64,
}

/// A posted page, and the slot that it was posted in, which is its token.
#[derive(Clone, Copy, Debug)]
struct Posted {
    token: u16,
    addr: u64,
}

/// The part of a packet in one page.
#[derive(Clone, Copy, Debug)]
struct Part {
    page: Posted,
    offset: usize,
    len: usize,
}

/// The properties of a packet, collected from its slots.
#[derive(Clone, Copy, Debug, Default)]
struct PacketInfo {
    offload: NetifOffload,
    hash: Option<u32>,
    /// True if the back end could not fill a slot.
    error: bool,
}

/// The front end's side of a receive ring.
#[derive(Debug)]
pub struct NetfrontRx {
    ring: FrontRing<Area, RxSlot>,
    grants: Arc<GrantMap>,
    memory: Arc<GuestMemory>,
    /// The run in which the last look-up found its page.
    hint: usize,
    /// The addresses of posted pages by slot: the response to a request lies where the request did, whatever
    /// identifier it has.
    posted: Box<[u64]>,
    /// Pages of assembled packets that the framework has not yet taken.
    ready: VecDeque<Completion>,
    /// The headers of those packets, in the order of their pages.
    starts: VecDeque<Start>,
    /// The parts of the packet that is being assembled.
    parts: Vec<Part>,
    /// Pages of that packet whose slots held extras.
    unused: Vec<Posted>,
    counters: RxCounters,
}

impl NetfrontRx {
    /// Creates a ring in the page `page`. Buffers are whole pages of `grants`, mapped in `memory`.
    ///
    /// # Errors
    /// `page` is not a page.
    pub fn new(page: Area, grants: Arc<GrantMap>, memory: Arc<GuestMemory>) -> Result<Self, LayoutError> {
        let ring = FrontRing::new(page)?;
        let size = ring.size() as usize;
        Ok(Self {
            ring,
            grants,
            memory,
            hint: 0,
            posted: vec![0; size].into(),
            ready: VecDeque::with_capacity(size),
            starts: VecDeque::with_capacity(size),
            parts: Vec::with_capacity(MAX_SLOTS),
            unused: Vec::new(),
            counters: RxCounters::default(),
        })
    }

    /// Returns the counters since the ring was created.
    pub fn counters(&self) -> RxCounters {
        self.counters
    }

    /// Returns the violation that broke the ring, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.ring.fault()
    }

    /// Asks for an event with the next packet; returns true if one is there already, and then no
    /// event comes.
    pub fn final_check(&mut self) -> bool {
        !self.ready.is_empty() || self.ring.final_check(1)
    }

    /// Takes the next response, with the page that it is about.
    #[inline(always)]
    fn take(&mut self) -> Option<(RxSlot, Posted)> {
        let at = self.ring.next_response() as usize & (self.posted.len() - 1);
        Some((self.ring.take()?, Posted { token: at as u16, addr: self.posted[at] }))
    }

    /// Assembles the next packet and returns its first page; `None` when there is no packet.
    #[inline(always)]
    fn next_packet(&mut self) -> Option<Completion> {
        if self.ring.available() == 0 {
            self.ring.refresh();
        }
        let (slot, page) = self.take()?;
        let response = RxResponse::from_slot(slot);
        if response.offset == 0
            && !response.flags.intersects(SPECIAL)
            && let Some(len) = response.len()
        {
            let valid = response.flags.contains(RxFlags::DATA_VALIDATED);
            let header = Header { flags: if valid { F_DATA_VALID } else { 0 }, ..Header::default() };
            self.starts.push_back(Start { header, buffers: 1, hash: None });
            return Some(Completion { token: page.token, len: len as u32 });
        }
        self.assemble(response, page)
    }

    /// Assembles a packet with several slots, extras, a blank checksum or an error.
    #[inline(never)]
    fn assemble(&mut self, response: RxResponse, page: Posted) -> Option<Completion> {
        self.parts.clear();
        self.unused.clear();
        match self.collect_parts(response, page) {
            Ok(info) => self.deliver(info),
            Err(fault) => self.ring.break_with(fault),
        }
        self.ready.pop_front()
    }

    /// Collects the parts and the extras of a packet. The back end publishes all of them together:
    /// one that is absent will not come.
    fn collect_parts(&mut self, mut response: RxResponse, mut page: Posted) -> Result<PacketInfo, Fault> {
        let mut info = PacketInfo::default();
        info.offload.csum_blank = response.flags.contains(RxFlags::CSUM_BLANK);
        info.offload.data_validated = response.flags.contains(RxFlags::DATA_VALIDATED);
        loop {
            let len = response.len();
            info.error |= len.is_none();
            self.parts.push(Part { page, offset: response.offset.into(), len: len.unwrap_or(0) });
            if response.flags.contains(RxFlags::EXTRA_INFO) {
                if self.parts.len() > 1 {
                    return Err(Fault::BadExtra);
                }
                self.extras(&mut info)?;
            }
            if !response.flags.contains(RxFlags::MORE_DATA) {
                return Ok(info);
            }
            if self.parts.len() == MAX_SLOTS {
                return Err(Fault::TooManySlots);
            }
            let (slot, next) = self.take().ok_or(Fault::Incomplete)?;
            (response, page) = (RxResponse::from_slot(slot), next);
        }
    }

    fn extras(&mut self, info: &mut PacketInfo) -> Result<(), Fault> {
        let mut seen = 0;
        loop {
            let (slot, page) = self.take().ok_or(Fault::Incomplete)?;
            self.unused.push(page);
            let (extra, more) = Extra::decode(slot).ok_or(Fault::BadExtra)?;
            if seen & extra.bit() != 0 {
                return Err(Fault::BadExtra);
            }
            seen |= extra.bit();
            match extra {
                Extra::Gso { size, kind } => info.offload.gso = Some(Gso { size, kind }),
                Extra::Hash { value, .. } => info.hash = Some(value),
                Extra::MulticastAdd(_) | Extra::MulticastDel(_) => return Err(Fault::BadExtra),
            }
            if !more {
                return Ok(());
            }
        }
    }

    /// Passes a packet to the framework; an invalid one as pages without a byte.
    fn deliver(&mut self, info: PacketInfo) {
        let header = if info.error {
            self.counters.errors += 1;
            None
        } else {
            self.header(&info.offload)
        };
        let bad = header.is_none();
        for at in 0..self.parts.len() {
            let part = if bad { Part { len: 0, ..self.parts[at] } } else { self.parts[at] };
            if part.offset > 0 && part.len > 0 {
                self.move_to_front(part);
            }
            self.ready.push_back(Completion { token: part.page.token, len: part.len as u32 });
        }
        self.ready.extend(self.unused.drain(..).map(|page| Completion { token: page.token, len: 0 }));
        self.starts.push_back(Start {
            header: header.unwrap_or_default(),
            // There are no more pages than slots.
            buffers: self.ready.len() as u16,
            hash: info.hash,
        });
    }

    /// Derives the packet's header from its offloads; `None` if they are invalid. It reads a copy,
    /// because the back end may still write to its pages.
    fn header(&mut self, offload: &NetifOffload) -> Option<Header> {
        let mut first = [0; HEADERS];
        let mut copied = 0;
        let total = self.parts.iter().map(|part| part.len).sum();
        let mut memory = self.memory.translator();
        if offload.csum_blank || offload.gso.is_some() {
            for part in &self.parts {
                let len = part.len.min(HEADERS - copied);
                if let Some(bytes) = memory.read(part.page.addr + part.offset as u64, len) {
                    copied += bytes.copy_to(&mut first[copied..copied + len]);
                }
            }
        }
        let header = offload.header(&first[..copied], total).ok();
        self.counters.unfit += u64::from(header.is_none());
        header
    }

    /// Moves data to the front of its page, where the framework expects it. Linux's back end and
    /// ours put it there themselves.
    #[cold]
    fn move_to_front(&mut self, part: Part) {
        let mut bytes = [0; PAGE];
        let mut memory = self.memory.translator();
        let from = memory.read(part.page.addr + part.offset as u64, part.len);
        let len = from.map_or(0, |from| from.copy_to(&mut bytes));
        let to = memory.write(part.page.addr, len).unwrap_or(WriteSlice::EMPTY);
        to.copy_from(&bytes[..len]);
        self.counters.moved += 1;
    }
}

/// Flags of a packet that is more than one page with bytes in it.
const SPECIAL: RxFlags = RxFlags::CSUM_BLANK.union(RxFlags::MORE_DATA).union(RxFlags::EXTRA_INFO);

impl RxDriver for NetfrontRx {
    fn limits(&self) -> RxLimits {
        RxLimits {
            ring: self.ring.size() as u16,
            header_len: 0,
            mode: RxMode::Mergeable,
            max_frame: MAX_PACKET,
            max_segs: 1,
        }
    }

    /// A page that waits in `ready` has its slot's number until the framework has taken it. Slots are used in turn, so the last ones that
    /// became free are not used again as long as so many are left.
    #[inline(always)]
    fn room(&self) -> usize {
        (self.ring.free() as usize).saturating_sub(self.ready.len())
    }

    #[inline(always)]
    fn post(&mut self, segments: &[Segment]) -> Result<u16, Refused> {
        if self.ring.fault().is_some() {
            return Err(Refused::Broken);
        }
        if self.room() == 0 {
            return Err(Refused::Full);
        }
        let &[Segment { addr, len }] = segments else { return Err(Refused::Unfit) };
        // The back end may write anywhere in the page, so it must belong to the buffer as a whole.
        let Some((gref, 0)) = self.grants.find(addr, &mut self.hint).filter(|_| len as usize >= PAGE) else {
            return Err(Refused::Unfit);
        };
        let at = self.ring.next_request() as usize & (self.posted.len() - 1);
        self.posted[at] = addr;
        self.ring.push(RxRequest { id: at as u16, gref }.to_slot());
        Ok(at as u16)
    }

    #[inline]
    fn flush(&mut self) -> bool {
        self.ring.publish()
    }

    #[inline(always)]
    fn completed(&mut self, most: usize, mut each: impl FnMut(Completion)) -> usize {
        let mut count = 0;
        while count < most
            && let Some(page) = self.ready.pop_front().or_else(|| self.next_packet())
        {
            count += 1;
            each(page);
        }
        count
    }

    #[inline(always)]
    fn start(&mut self, _: ReadSlice<'_>) -> Start {
        self.starts.pop_front().unwrap_or_default()
    }
}
