//! A port as the worker sees it.

use std::sync::Arc;

use ringferry_memory::ReadSlice;
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::vnet::{Header, Offloads};

use super::guest::Guest;
use super::software;
use super::tap::TapPort;
use crate::counters::{DropReason, PortCounters};

/// What is plugged in.
pub(super) enum Kind {
    Guest(Guest),
    Tap(TapPort),
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
        }
    }

    /// Announces about how many frames follow until [`Port::flush`].
    #[inline]
    pub(super) fn expect(&mut self, frames: usize) {
        if let Kind::Guest(guest) = &mut self.kind {
            guest.expect(frames);
        }
    }

    /// Sends a frame out of this port, doing in software what its receiver cannot. Counts what
    /// becomes of it.
    #[inline]
    pub(super) fn deliver(&mut self, burst: &Burst<'_>, frame: &Frame, scratch: &mut Vec<u8>) {
        let accepts = self.offloads();
        let Port { kind, counters, .. } = self;
        if accepts.accepts(&frame.header) {
            match put(kind, frame.header, frame.prefix(), burst.rest(frame)) {
                Ok(()) => {
                    counters.tx_packets.add(1);
                    counters.tx_bytes.add(u64::from(frame.len));
                }
                Err(reason) => counters.drops.add(reason, 1),
            }
            return;
        }
        let (packets, bytes) = software::deliver(
            burst,
            frame,
            accepts,
            scratch,
            |header, first, rest| put(kind, header, first, rest),
            |reason| counters.drops.add(reason, 1),
        );
        counters.tx_packets.add(packets);
        counters.tx_bytes.add(bytes);
    }

    /// Shows the receiver what was delivered.
    #[inline]
    pub(super) fn flush(&mut self) {
        if let Kind::Guest(guest) = &mut self.kind {
            guest.flush(&self.name, &self.counters);
        }
    }
}

#[inline]
fn put(kind: &mut Kind, header: Header, first: &[u8], rest: &[ReadSlice<'_>]) -> Result<(), DropReason> {
    match kind {
        Kind::Guest(guest) => guest.deliver(header, first, rest),
        Kind::Tap(tap) => tap.deliver(header, first, rest),
    }
}
