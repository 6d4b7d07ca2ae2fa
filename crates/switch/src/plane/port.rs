//! A port as the worker sees it.

use std::sync::Arc;

use ringferry_memory::ReadSlice;
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::vnet::{Header, Offloads};
use smallvec::SmallVec;

use super::aim::{Aim, Delivered};
use super::bucket::Bucket;
use super::coalesce::{Coalescer, Terms, Unit};
use super::crossing::Crossing;
use super::gate::Gate;
use super::guest::Guest;
use super::moment::Moment;
use super::software;
use super::tap::TapPort;
use super::too_big;
use super::vif::Vif;
use super::vlan::{EVERYWHERE, Head, Membership, Retag};
use crate::counters::{DropReason, PortCounters};
use crate::rules::Rate;

/// What is plugged in.
pub(super) enum Kind {
    Guest(Guest),
    Tap(TapPort),
    Vif(Vif),
}

/// Most answers to frames that do not fit, of each port: as many as Linux gives one peer by default (`icmp_ratelimit`).
const ANSWERS: Rate = Rate { per_second: 1000, burst: 50 };

/// Pieces of a frame whose tag changes that need no allocation: the largest frame in pages of 4 KiB, not aligned, and what is
/// left of its prefix.
const PIECES: usize = 18;

/// What a frame needs on its way to a port.
pub(super) struct Way<'w> {
    pub(super) crossing: &'w mut Crossing,
    pub(super) now: &'w Moment,
    /// For a frame that must be in one piece.
    pub(super) scratch: &'w mut Vec<u8>,
}

/// A port, what it counts, and its rules.
pub(super) struct Port {
    pub(super) kind: Kind,
    pub(super) name: String,
    pub(super) counters: Arc<PortCounters>,
    /// What its rules say, if it has any.
    pub(super) gate: Option<Arc<Gate>>,
    /// What its receiver would say of frames that do not fit.
    answers: Vec<Vec<u8>>,
    answering: Bucket,
}

impl Port {
    /// A port.
    pub(super) fn new(
        kind: Kind,
        name: String,
        counters: Arc<PortCounters>,
        gate: Option<Arc<Gate>>,
    ) -> Self {
        Self { kind, name, counters, gate, answers: Vec::new(), answering: Bucket::new(ANSWERS) }
    }

    /// Which VLANs it is in.
    #[inline]
    pub(super) fn membership(&self) -> &Membership {
        self.gate.as_deref().map_or(&EVERYWHERE, Gate::membership)
    }

    /// What the receiver behind this port takes without our help.
    #[inline]
    fn offloads(&self) -> Offloads {
        match &self.kind {
            Kind::Guest(guest) => guest.offloads(),
            Kind::Tap(tap) => tap.offloads,
            Kind::Vif(vif) => vif.offloads(),
        }
    }

    /// Which pair frames go to, where there are pairs.
    pub(super) fn aim(&mut self) -> Option<&mut Aim> {
        match &mut self.kind {
            Kind::Guest(guest) => Some(&mut guest.aim),
            Kind::Vif(vif) => Some(&mut vif.aim),
            Kind::Tap(_) => None,
        }
    }

    /// What several packets may become one for.
    #[inline]
    fn terms(&self) -> Option<Terms> {
        match &self.kind {
            Kind::Tap(tap) => Terms::for_tap(tap.offloads),
            Kind::Guest(_) | Kind::Vif(_) => Terms::for_guest(self.offloads()),
        }
    }

    /// Announces about how many frames follow until [`Port::flush`].
    #[inline]
    pub(super) fn expect(&mut self, frames: usize, crossing: &Crossing) {
        match &mut self.kind {
            Kind::Guest(guest) => guest.expect(frames, crossing),
            Kind::Vif(vif) => vif.expect(frames, crossing),
            Kind::Tap(_) => {}
        }
    }

    /// Sends these frames of a burst out of this port, as they are tagged, several as one where that pays.
    #[inline]
    pub(super) fn deliver_all(
        &mut self,
        burst: &Burst<'_>,
        picks: &[u32],
        coalescer: &mut Coalescer,
        way: &mut Way<'_>,
    ) {
        let frames = burst.frames();
        if let Some(terms) = self.terms()
            && picks.len() > 1
            && picks.iter().any(|index| terms.may_begin(&frames[*index as usize]))
        {
            let picks = picks.iter().map(|index| *index as usize);
            coalescer.each(burst, picks, terms, |unit| match unit {
                Unit::Single(frame) => self.deliver(burst, frame, Retag::Keep, way),
                Unit::Merged(merged) => {
                    self.counters.tx_coalesced.add(merged.packets as u64);
                    self.put(merged.header, merged.first, merged.rest, way);
                }
            });
            return;
        }
        for index in picks {
            self.deliver(burst, &frames[*index as usize], Retag::Keep, way);
        }
    }

    /// Sends a frame out of this port, with another tag, doing in software what its receiver cannot. Counts what
    /// becomes of it.
    #[inline]
    pub(super) fn deliver(&mut self, burst: &Burst<'_>, frame: &Frame, retag: Retag, way: &mut Way<'_>) {
        let accepts = self.offloads();
        if accepts.accepts(&frame.header) {
            self.put_tagged(frame.header, frame.prefix(), burst.rest(frame), retag, way);
            return;
        }
        self.counters.tx_software.add(1);
        let mut scratch = std::mem::take(way.scratch);
        let result = software::deliver(burst, frame, accepts, &mut scratch, |header, first, rest| {
            self.put_tagged(header, first, rest, retag, way);
        });
        *way.scratch = scratch;
        if let Err(reason) = result {
            self.counters.drops.add(reason, 1);
        }
    }

    /// Sends a frame with another tag.
    #[inline]
    fn put_tagged(
        &mut self,
        mut header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        retag: Retag,
        way: &mut Way<'_>,
    ) {
        if retag == Retag::Keep {
            self.put(header, first, rest, way);
            return;
        }
        let mut head = Head::new();
        let Some(used) = retag.apply(&mut header, first, &mut head) else {
            self.counters.drops.add(DropReason::RxBadHeader, 1);
            return;
        };
        let mut pieces = SmallVec::<[ReadSlice<'_>; PIECES]>::new();
        pieces.extend((used < first.len()).then(|| ReadSlice::from(&first[used..])));
        pieces.extend_from_slice(rest);
        self.put(header, &head, &pieces, way);
    }

    /// Sends a frame that the receiver takes as it is.
    #[inline]
    pub(super) fn put(&mut self, header: Header, first: &[u8], rest: &[ReadSlice<'_>], way: &mut Way<'_>) {
        let Port { kind, counters, .. } = self;
        let len = (first.len() + rest.iter().map(ReadSlice::len).sum::<usize>()) as u64;
        let Way { crossing, now, .. } = way;
        let delivered = match kind {
            Kind::Guest(guest) => guest.deliver(header, first, rest, len, crossing, now),
            Kind::Tap(tap) => tap.deliver(header, first, rest).map(|()| Delivered::Here),
            Kind::Vif(vif) => vif.deliver(header, first, rest, len, crossing, now),
        };
        match delivered {
            Ok(Delivered::Here) => {
                counters.tx_packets.add(1);
                counters.tx_bytes.add(len);
            }
            Ok(Delivered::Away) => {}
            Err(DropReason::TxTooBig) if self.make_answer(&header, len, first, rest, now) => {}
            Err(reason) => self.counters.drops.add(reason, 1),
        }
    }

    /// Makes the answer to a frame that does not fit; false if there is none.
    #[cold]
    fn make_answer(
        &mut self,
        header: &Header,
        len: u64,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        now: &Moment,
    ) -> bool {
        let mtu = match &self.kind {
            Kind::Guest(Guest { shared, .. }) | Kind::Vif(Vif { shared, .. }) => shared.mtu(),
            Kind::Tap(_) => return false,
        };
        let mut frame = first[..first.len().min(too_big::ENOUGH)].to_vec();
        for piece in rest {
            let at = frame.len();
            let piece = piece.first(too_big::ENOUGH - at);
            frame.resize(at + piece.len(), 0);
            piece.copy_to(&mut frame[at..]);
        }
        let mut answer = Vec::new();
        // Who posts buffers smaller than its MTU is not helped by smaller packets.
        let made = !too_big::fits(&frame, len as usize, header, mtu)
            && too_big::answer(&frame, mtu, &mut answer)
            && self.answering.take(1, now.micros());
        if made {
            self.answers.push(answer);
        }
        made
    }

    /// Whether there are answers to be delivered, and counted.
    #[inline]
    pub(super) fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Those answers.
    pub(super) fn take_answers(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.answers)
    }

    /// Shows the receiver what was delivered.
    #[inline]
    pub(super) fn flush(&mut self) {
        match &mut self.kind {
            Kind::Guest(guest) => guest.flush(&self.name, &self.counters),
            Kind::Vif(vif) => vif.flush(&self.counters),
            Kind::Tap(_) => {}
        }
    }
}
