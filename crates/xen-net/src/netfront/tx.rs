//! [`NetfrontTx`]: the front end's transmit ring as a driver of the framework, which turns segments
//! into slots and responses into completed packets.
//!
//! A [`Pair`](super::Pair) creates it in its arena and gives it to the framework's transmit queue,
//! which calls it on the pair's thread and owns all packets.

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
use crate::offload::{Accepts, Gso, NetifOffload};

/// Fewest bytes in the first slot of a longer packet. Back ends from before XSA-423 look for
/// headers there only.
const MIN_FIRST: u32 = 128;

/// Token of an id that no slot has now.
const VACANT: u16 = u16::MAX;

/// Counters beside those of the framework.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxCounters {
    /// Slots that the back end could not read.
    pub errors: u64,
    /// Slots that the back end dropped.
    pub dropped: u64,
    /// Packets that were not sent, because they need an offload that was not negotiated, or lie in
    /// memory that is not shared.
    pub unfit: u64,
}

/// The front end's side of a transmit ring.
#[derive(Debug)]
pub struct NetfrontTx {
    ring: FrontRing<Area, TxSlot>,
    grants: Arc<GrantMap>,
    /// The run in which the last look-up found its page.
    hint: usize,
    accepts: Accepts,
    /// Token of the packet whose slot has this id, or [`VACANT`].
    tokens: Box<[u16]>,
    /// Unused ids, as a stack, so that the next one's cache line is probably still in the cache.
    vacant: Vec<u16>,
    /// Number of unanswered slots of each packet, by token.
    left: Box<[u8]>,
    /// Unused tokens, as a stack like the ids: a packet has one until all its slots are answered.
    free_tokens: Vec<u16>,
    /// Number of unanswered slots that hold extras.
    extras: u32,
    counters: TxCounters,
}

impl NetfrontTx {
    /// Creates a ring in the page `page`, for a back end that accepts the frames of `accepts`.
    /// Packets must lie in pages of `grants`.
    ///
    /// # Errors
    /// `page` is not a page.
    pub fn new(page: Area, grants: Arc<GrantMap>, accepts: Accepts) -> Result<Self, LayoutError> {
        let ring = FrontRing::new(page)?;
        // There are 256 slots, and as many ids.
        let size = ring.size() as u16;
        Ok(Self {
            ring,
            grants,
            hint: 0,
            accepts: accepts.consistent(),
            tokens: vec![VACANT; size.into()].into(),
            vacant: (0..size).rev().collect(),
            left: vec![0; size.into()].into(),
            free_tokens: (0..size).rev().collect(),
            extras: 0,
            counters: TxCounters::default(),
        })
    }

    /// Returns the counters since the ring was created.
    pub fn counters(&self) -> TxCounters {
        self.counters
    }

    /// Returns the violation that broke the ring, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.ring.fault()
    }

    /// Asks for an event with the next completed slot; returns true if one is there already, and
    /// then no event comes.
    pub fn final_check(&mut self) -> bool {
        self.ring.final_check(1)
    }

    /// Returns the number of slots that a packet may take beside those of its segments.
    fn reserve(&self) -> u16 {
        (self.accepts.gso4 || self.accepts.gso6).into()
    }

    /// Returns true if the back end accepts packets with these offloads. The sender has checked
    /// which IP version a blank checksum belongs to.
    fn takes(&self, offload: &NetifOffload) -> bool {
        let Accepts { csum4, csum6, gso4, gso6, .. } = self.accepts;
        let csum = !offload.csum_blank || csum4 || csum6;
        csum && offload.gso.is_none_or(|Gso { kind, .. }| if kind == GSO_TCPV4 { gso4 } else { gso6 })
    }

    #[cold]
    fn unfit(&mut self) -> Refused {
        self.counters.unfit += 1;
        Refused::Unfit
    }

    #[inline(always)]
    fn push(&mut self, (gref, offset): (GrantRef, u16), size: u16, flags: TxFlags, token: u16) {
        // An id is always left: there are as many ids as slots, and extras take a slot without an
        // id.
        let id = self.vacant.pop().unwrap_or_default();
        self.tokens[usize::from(id)] = token;
        self.ring.push(TxRequest { gref, offset, flags, id, size }.to_slot());
    }

    /// Handles the response to a slot; returns the token of its packet if it was the last.
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
        if done {
            self.free_tokens.push(token);
        }
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
        // Back ends disagree about whether an extra counts as one of the slots.
        let tso = SegLimits { reserved: self.reserve(), ..plain };
        TxLimits { ring: self.ring.size() as u16 - self.reserve(), header_room: 0, plain, tso }
    }

    #[inline(always)]
    fn room(&self) -> usize {
        self.ring.free().saturating_sub(self.reserve().into()) as usize
    }

    #[inline]
    fn encap(&mut self, packet: &TxPacket<'_>) -> Result<u16, Refused> {
        if self.ring.fault().is_some() {
            return Err(Refused::Broken);
        }
        let Some(offload) = NetifOffload::of(packet.header).filter(|offload| self.takes(offload)) else {
            return Err(self.unfit());
        };
        let segments = packet.segments;
        let Ok(len) = u16::try_from(packet.len) else { return Err(self.unfit()) };
        if segments.len() > MAX_SLOTS || segments.is_empty() {
            return Err(self.unfit());
        }
        if segments.len() + usize::from(offload.gso.is_some()) > self.ring.free() as usize {
            return Err(Refused::Full);
        }
        let mut places = SmallVec::<[(GrantRef, u16); MAX_SLOTS]>::new();
        for segment in segments {
            let Some(place) = self.grants.find(segment.addr, &mut self.hint) else {
                return Err(self.unfit());
            };
            places.push(place);
        }
        // A packet has a slot at least, so there is a token for each.
        let Some(token) = self.free_tokens.pop() else { return Err(Refused::Full) };
        let mut flags = TxFlags::empty();
        flags.set(TxFlags::CSUM_BLANK, offload.csum_blank);
        flags.set(TxFlags::DATA_VALIDATED, offload.data_validated);
        flags.set(TxFlags::EXTRA_INFO, offload.gso.is_some());
        let more = |at: usize| if at < places.len() { TxFlags::MORE_DATA } else { TxFlags::empty() };
        self.left[usize::from(token)] = places.len() as u8;
        self.push(places[0], len, flags | more(1), token);
        if let Some(Gso { size, kind }) = offload.gso {
            let [low, high] = Extra::Gso { size, kind }.encode(false);
            self.ring.push([low, high, 0]);
            self.extras += 1;
        }
        for (at, (&place, segment)) in places.iter().zip(segments).enumerate().skip(1) {
            // A segment is no longer than a page.
            self.push(place, segment.len as u16, more(at + 1), token);
        }
        Ok(token)
    }

    #[inline]
    fn flush(&mut self) -> bool {
        self.ring.publish()
    }

    fn is_broken(&self) -> bool {
        self.ring.fault().is_some()
    }

    #[inline(always)]
    fn completed(&mut self, most: usize, mut each: impl FnMut(u16)) -> usize {
        let mut count = 0;
        while count < most {
            if self.ring.available() == 0 {
                self.ring.refresh();
            }
            let Some(slot) = self.ring.take() else { break };
            match self.response(slot) {
                Ok(None) => {}
                Ok(Some(token)) => {
                    count += 1;
                    each(token);
                }
                Err(fault) => self.ring.break_with(fault),
            }
        }
        count
    }
}
