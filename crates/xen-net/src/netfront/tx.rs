//! The transmit ring: segments become slots, and responses complete packets.

use std::sync::Arc;

use ringferry_memory::Area;
use ringferry_nic::driver::{Refused, TxDriver, TxPacket};
use ringferry_nic::limits::{SegLimits, TxLimits};
use ringferry_xen::domain::PAGE;
use ringferry_xen::grant::GrantRef;
use ringferry_xen::netif::wire::{
    DROPPED, Extra, GSO_TCPV4, MAX_PACKET, MAX_SLOTS, NULL, OKAY, TxFlags, TxRequest, TxResponse, TxSlot,
};
use ringferry_xen::netif::{Fault, FrontRing, LayoutError};
use smallvec::SmallVec;

use super::arena::GrantMap;
use crate::offload::{Accepts, Gso, Marks};

/// Bytes that the first slot of a longer packet holds at least. Back ends of before XSA-423 look for headers there only.
const MIN_FIRST: u32 = 128;

/// An id that no slot has now.
const VACANT: u16 = u16::MAX;

/// What became of packets, beside what the framework counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxCounters {
    /// Slots that the back end could not read.
    pub errors: u64,
    /// Slots that the back end dropped.
    pub dropped: u64,
    /// Packets that were never given to it, as they ask for what was not negotiated, or lie in memory that is not shared.
    pub unfit: u64,
}

/// A transmit ring, from the front end.
#[derive(Debug)]
pub struct NetfrontTx {
    ring: FrontRing<Area, TxSlot>,
    grants: Arc<GrantMap>,
    /// Where the last look-up found its page.
    hint: usize,
    accepts: Accepts,
    /// Token of the packet that has this id, or [`VACANT`].
    tokens: Box<[u16]>,
    /// Ids that no slot has. Last in, first out, as its line is still in the cache.
    vacant: Vec<u16>,
    /// Slots of each packet, by token, that are not answered yet.
    left: Box<[u8]>,
    /// Slots that hold extras and are not answered yet.
    extras: u32,
    counters: TxCounters,
}

impl NetfrontTx {
    /// A ring in the page `page`, for a back end that takes what `accepts` says. Packets must lie in pages of `grants`.
    ///
    /// # Errors
    /// `page` is none.
    pub fn new(page: Area, grants: Arc<GrantMap>, accepts: Accepts) -> Result<Self, LayoutError> {
        let ring = FrontRing::new(page)?;
        // Slots are 256, and so are ids.
        let size = ring.size() as u16;
        Ok(Self {
            ring,
            grants,
            hint: 0,
            accepts: accepts.consistent(),
            tokens: vec![VACANT; size.into()].into(),
            vacant: (0..size).rev().collect(),
            left: vec![0; size.into()].into(),
            extras: 0,
            counters: TxCounters::default(),
        })
    }

    /// What was counted.
    pub fn counters(&self) -> TxCounters {
        self.counters
    }

    /// The violation that broke this ring, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.ring.fault()
    }

    /// Asks to be notified of the next completed slot; whether one is there already, and then nobody will notify.
    pub fn final_check(&mut self) -> bool {
        self.ring.final_check(1)
    }

    /// Slots that a packet may take beside those of its segments.
    fn reserve(&self) -> u16 {
        (self.accepts.gso4 || self.accepts.gso6).into()
    }

    /// Whether the back end takes packets with these marks. Which IP a blank checksum is of, whoever sends it has looked at.
    fn takes(&self, marks: &Marks) -> bool {
        let Accepts { csum4, csum6, gso4, gso6, .. } = self.accepts;
        let csum = !marks.csum_blank || csum4 || csum6;
        csum && marks.gso.is_none_or(|Gso { kind, .. }| if kind == GSO_TCPV4 { gso4 } else { gso6 })
    }

    #[cold]
    fn unfit(&mut self) -> Refused {
        self.counters.unfit += 1;
        Refused::Unfit
    }

    #[inline(always)]
    fn push(&mut self, (gref, offset): (GrantRef, u16), size: u16, flags: TxFlags, token: u16) {
        // As many ids as slots, and a slot without an id for each extra: there is one.
        let id = self.vacant.pop().unwrap_or_default();
        self.tokens[usize::from(id)] = token;
        self.ring.push(TxRequest { gref, offset, flags, id, size }.to_slot());
    }

    /// The response to a slot; the token of its packet if it was the last.
    #[inline(always)]
    fn response(&mut self, slot: TxSlot) -> Result<Option<u16>, Fault> {
        let TxResponse { id, status } = TxResponse::from_slot(slot);
        if status == NULL {
            self.extras = self.extras.checked_sub(1).ok_or(Fault::BadResponse)?;
            return Ok(None);
        }
        let entry = self.tokens.get_mut(usize::from(id)).ok_or(Fault::BadResponse)?;
        let token = std::mem::replace(entry, VACANT);
        let left = self.left.get_mut(usize::from(token)).ok_or(Fault::BadResponse)?;
        self.vacant.push(id);
        *left -= 1;
        let done = *left == 0;
        match status {
            OKAY => {}
            DROPPED => self.counters.dropped += 1,
            _ => self.counters.errors += 1,
        }
        Ok(done.then_some(token))
    }
}

impl TxDriver for NetfrontTx {
    fn limits(&self) -> TxLimits {
        let (slots, max_bytes) = if self.accepts.sg { (MAX_SLOTS, MAX_PACKET) } else { (1, PAGE) };
        let plain = SegLimits {
            max_segs: slots as u16,
            reserved: 0,
            max_seg_len: PAGE as u32,
            boundary: Some(PAGE as u64),
            min_first: MIN_FIRST,
            max_bytes: max_bytes as u32,
        };
        // Back ends do not agree whether an extra is one of the slots.
        let tso = SegLimits { reserved: self.reserve(), ..plain };
        TxLimits { ring: self.ring.size() as u16 - self.reserve(), header_room: 0, plain, tso }
    }

    #[inline(always)]
    fn room(&self) -> usize {
        self.ring.free().saturating_sub(self.reserve().into()) as usize
    }

    #[inline]
    fn encap(&mut self, packet: &TxPacket<'_>, token: u16) -> Result<(), Refused> {
        if self.ring.fault().is_some() {
            return Err(Refused::Broken);
        }
        let Some(marks) = Marks::of(packet.header).filter(|marks| self.takes(marks)) else {
            return Err(self.unfit());
        };
        let segments = packet.segments;
        let Ok(len) = u16::try_from(packet.len) else { return Err(self.unfit()) };
        if segments.len() > MAX_SLOTS || segments.is_empty() {
            return Err(self.unfit());
        }
        if segments.len() + usize::from(marks.gso.is_some()) > self.ring.free() as usize {
            return Err(Refused::Full);
        }
        let mut places = SmallVec::<[(GrantRef, u16); MAX_SLOTS]>::new();
        for segment in segments {
            let Some(place) = self.grants.find(segment.addr, &mut self.hint) else {
                return Err(self.unfit());
            };
            places.push(place);
        }
        let mut flags = TxFlags::empty();
        flags.set(TxFlags::CSUM_BLANK, marks.csum_blank);
        flags.set(TxFlags::DATA_VALIDATED, marks.data_validated);
        flags.set(TxFlags::EXTRA_INFO, marks.gso.is_some());
        let more = |at: usize| if at < places.len() { TxFlags::MORE_DATA } else { TxFlags::empty() };
        self.left[usize::from(token)] = places.len() as u8;
        self.push(places[0], len, flags | more(1), token);
        if let Some(Gso { size, kind }) = marks.gso {
            let [low, high] = Extra::Gso { size, kind }.encode(false);
            self.ring.push([low, high, 0]);
            self.extras += 1;
        }
        for (at, (&place, segment)) in places.iter().zip(segments).enumerate().skip(1) {
            // No longer than a page.
            self.push(place, segment.len as u16, more(at + 1), token);
        }
        Ok(())
    }

    #[inline]
    fn flush(&mut self) -> bool {
        self.ring.publish()
    }

    fn is_broken(&self) -> bool {
        self.ring.fault().is_some()
    }

    #[inline(always)]
    fn completed(&mut self) -> Option<u16> {
        if self.ring.available() == 0 {
            self.ring.refresh();
        }
        while let Some(slot) = self.ring.take() {
            match self.response(slot) {
                Ok(None) => {}
                Ok(token) => return token,
                Err(fault) => self.ring.break_with(fault),
            }
        }
        None
    }
}
