//! A port as the worker sees it.

use std::sync::Arc;

use ringferry_memory::ReadSlice;
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::vnet::{Header, Offloads};

use super::crossing::Crossing;
use super::guest::{Delivered, Guest};
use super::moment::Moment;
use super::software;
use super::tap::TapPort;
use super::vif::Vif;
use crate::counters::PortCounters;

/// What is plugged in.
pub(super) enum Kind {
    Guest(Guest),
    Tap(TapPort),
    Vif(Vif),
}

/// A port and what it counts.
pub(super) struct Port {
    pub(super) kind: Kind,
    pub(super) name: String,
    pub(super) counters: Arc<PortCounters>,
}

impl Port {
    /// What the receiver behind this port takes without our help.
    #[inline]
    fn offloads(&self) -> Offloads {
        match &self.kind {
            Kind::Guest(guest) => guest.offloads(),
            Kind::Tap(tap) => tap.offloads,
            Kind::Vif(vif) => vif.offloads(),
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

    /// Sends a frame out of this port, doing in software what its receiver cannot. Counts what
    /// becomes of it.
    #[inline]
    pub(super) fn deliver(
        &mut self,
        burst: &Burst<'_>,
        frame: &Frame,
        scratch: &mut Vec<u8>,
        crossing: &mut Crossing,
        now: &Moment,
    ) {
        let accepts = self.offloads();
        if accepts.accepts(&frame.header) {
            self.put(frame.header, frame.prefix(), burst.rest(frame), crossing, now);
            return;
        }
        let result = software::deliver(burst, frame, accepts, scratch, |header, first, rest| {
            self.put(header, first, rest, crossing, now);
        });
        if let Err(reason) = result {
            self.counters.drops.add(reason, 1);
        }
    }

    /// Sends a frame that the receiver takes as it is.
    #[inline]
    pub(super) fn put(
        &mut self,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        crossing: &mut Crossing,
        now: &Moment,
    ) {
        let Port { kind, counters, .. } = self;
        let len = (first.len() + rest.iter().map(ReadSlice::len).sum::<usize>()) as u64;
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
            Err(reason) => counters.drops.add(reason, 1),
        }
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
