//! Frames of a burst on their way through a wire: each is let through, lost, or copied to wait until it is due.
//!
//! A frame with segmentation offload is many packets on a real wire, each of which may be lost or late by itself. So it is cut where it comes to an impaired wire,
//! whatever its receiver takes; a wire without impairments carries it whole, and it is cut only for a receiver that has to have it so. A
//! checksum that is to be filled in stays so, except in a frame of which a bit is inverted: its checksum is of the right bytes.

use ringferry_memory::ReadSlice;
use ringferry_packet::checksum;
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::segment::MAX_HEADERS;
use ringferry_packet::vnet::{Header, Offloads};

use super::model::Passage;
use super::{Admission, CompiledEnd, WireQueue};
use crate::counters::DropReason;
use crate::fdb::PortId;
use crate::plane::capture::Offered;
use crate::plane::cost;
use crate::plane::now::Now;
use crate::plane::offload::gso::{self, Sitting};
use crate::plane::policy::shaper::Delayed;
use crate::plane::port::Port;
use crate::plane::queues::Queues;

/// A packet that is about to pass.
#[derive(Clone, Copy)]
struct Packet<'p, 'm> {
    from: PortId,
    header: Header,
    first: &'p [u8],
    rest: &'p [ReadSlice<'m>],
}

impl Packet<'_, '_> {
    fn len(&self) -> usize {
        self.first.len() + self.rest.iter().map(ReadSlice::len).sum::<usize>()
    }

    fn copy(&self) -> Delayed {
        let mut frame = Vec::with_capacity(self.len());
        frame.extend_from_slice(self.first);
        for piece in self.rest {
            let at = frame.len();
            frame.resize(at + piece.len(), 0);
            piece.copy_to(&mut frame[at..]);
        }
        Delayed { from: self.from, header: self.header, frame }
    }
}

/// Inverts one bit of a frame, once its checksum is what it would have been.
fn corrupt(delayed: &mut Delayed, random: u64) {
    let Delayed { header, frame, .. } = delayed;
    // A field outside of the frame was refused where the frame came in.
    let _ = checksum::complete(header, frame);
    // Nobody is told that the checksum is right.
    *header = Header::NONE;
    let bits = frame.len() as u64 * 8;
    if bits > 0 {
        let bit = random % bits;
        frame[(bit / 8) as usize] ^= 1 << (bit % 8);
    }
}

impl<P: Queues> Port<P> {
    /// Returns true if a frame that has come to this end of a wire is to be delivered at once. If not, it waits, or was dropped.
    pub(crate) fn pass_wire(&mut self, from: PortId, burst: &Burst<'_>, frame: &Frame, now: &Now) -> bool {
        // It comes back below; nothing between looks for it.
        let Some(mut wire) = self.wire.take() else { return true };
        let passes = wire.is_open() || self.enter_wire(&mut wire, from, burst, frame, now);
        self.wire = Some(wire);
        passes
    }

    fn enter_wire(
        &self,
        wire: &mut WireQueue,
        from: PortId,
        burst: &Burst<'_>,
        frame: &Frame,
        now: &Now,
    ) -> bool {
        if !frame.header.is_gso() || wire.impairments().is_none() {
            let packet =
                Packet { from, header: frame.header, first: frame.prefix(), rest: burst.rest(frame) };
            return self.enter_packet(wire, packet, now);
        }
        wire.cost += cost::of_delivery(burst, frame, Offloads::empty(), self.queues.frame_cost());
        let mut head = [0; MAX_HEADERS];
        let mut segments = match gso::segments(burst, frame, self.offloads(), Sitting::WHOLE, &mut head) {
            Ok(segments) => segments,
            Err(reason) => {
                self.drop_frame(reason, now, Offered::of(burst, frame));
                return false;
            }
        };
        while let Some(gso::Packet { header, first, rest }) = segments.next_packet() {
            let packet = Packet { from, header, first, rest };
            if self.enter_packet(wire, packet, now) {
                // The frame as a whole does not go on, so each of its packets waits for as long as it takes to get to the queue.
                wire.push(now.micros() * 1000, packet.copy());
            }
        }
        false
    }

    /// Returns true if a packet is to be delivered at once.
    fn enter_packet(&self, wire: &mut WireQueue, packet: Packet<'_, '_>, now: &Now) -> bool {
        let Packet { header, first, rest, .. } = packet;
        let offered = || Offered { header, first, rest, len: packet.len() as u32 };
        let passages = match wire.admit(packet.len() as u64, now.micros() * 1000) {
            Admission::Passes => return true,
            Admission::Lost => {
                self.drop_frame(DropReason::WireLoss, now, offered());
                return false;
            }
            Admission::NoRoom => {
                self.drop_frame(DropReason::WireLimit, now, offered());
                return false;
            }
            Admission::Waits(passages) => passages,
        };
        let counters = &self.handle.counters;
        counters.tx_duplicated.add(passages.len() as u64 - 1);
        for Passage { due, reordered, flip } in passages {
            let mut delayed = packet.copy();
            if let Some(random) = flip {
                corrupt(&mut delayed, random);
                counters.tx_corrupted.add(1);
            }
            counters.tx_reordered.add(reordered.into());
            wire.push(due, delayed);
        }
        false
    }

    /// Takes frames whose time on the wire is over, stranded ones first, up to `max` and until they cost `most` in the unit of [`cost`]; returns them with what they
    /// cost.
    pub(crate) fn release_wire(&mut self, max: usize, most: u64, now: &Now) -> (Vec<Delayed>, u64) {
        let (accepts, kind) = (self.offloads(), self.queues.frame_cost());
        let (mut frames, mut work) = (Vec::new(), 0);
        let nanos = now.micros() * 1000;
        while frames.len() < max
            && work < most
            && let Some(delayed) =
                self.pop_stranded().or_else(|| self.wire.as_mut().and_then(|wire| wire.pop(nanos)))
        {
            work += cost::of_copy(&delayed.header, &delayed.frame, accepts, kind);
            frames.push(delayed);
        }
        (frames, work)
    }

    /// Returns the microseconds until a frame is due at this end of a wire; `None` if none waits.
    pub(crate) fn until_due(&self, micros: u64) -> Option<u64> {
        let due = self.wire.as_ref()?.next_due()?;
        Some(due.div_ceil(1000).saturating_sub(micros))
    }

    /// Makes the port an end of a wire, or of none. What was under way on the one before is [stranded](Self::pop_stranded).
    pub(crate) fn replace_wire(&mut self, end: Option<&CompiledEnd>) {
        let before = std::mem::replace(&mut self.wire, end.map(|end| Box::new(WireQueue::new(end.clone()))));
        self.stranded.extend(before.filter(|before| !before.is_empty()));
    }

    /// Takes the next frame that was under way on a wire that is no more, due or not.
    pub(crate) fn pop_stranded(&mut self) -> Option<Delayed> {
        let wire = self.stranded.front_mut()?;
        let delayed = wire.pop_stranded();
        if wire.is_empty() {
            self.stranded.pop_front();
        }
        delayed
    }
}
