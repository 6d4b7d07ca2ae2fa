//! Selects the transmit queue of a frame among a port's queue pairs: the same for all workers, as each looks
//! at the same [`PortShared`].
//!
//! Each worker has one selector of every port with pairs. A burst begins with
//! [`refresh`](TxQueueSelector::refresh), which updates the selector after a change; then
//! [`select`](TxQueueSelector::select) returns the pair of each frame: the one that the guest last sent the
//! flow on (automatic receive steering, VIRTIO 1.4, 5.1.6.5.7), or one of this worker's by the flow's hash.
//! If another worker owns the pair the frame is [handed off](TxQueueSelector::hand_off); if the pair is
//! migrating to this worker the frame is parked until it is there.

use std::sync::Arc;

use ringferry_memory::ReadSlice;
use ringferry_packet::flow::flow_hash;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::{Header, Offloads};
use ringferry_virtio_net::device::Steering;

use crate::counters::DropReason;
use crate::fdb::PortId;
use crate::plane::handoff::primitives::{Primitives, Std};
use crate::plane::handoff::ring::{DEPTH, Handoff, gather};
use crate::plane::handoff::shared::{PortShared, Ready};
use crate::plane::now::Now;
use crate::plane::queues::Delivery;

/// Frames for a pair that is migrating to this worker.
#[derive(Debug)]
struct Parked {
    pair: u16,
    /// Frames in order, with the ports that have sent them.
    frames: Vec<(PortId, Header, Vec<u8>)>,
}

/// The worker that a frame for a pair goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The one that asks.
    This,
    /// The one that asks, once the pair has migrated to it; until then frames are parked.
    Soon,
    /// Another one, to which frames are handed off.
    Other(usize),
}

/// One worker's view of a port's pairs.
pub(crate) struct TxQueueSelector<M: Primitives = Std> {
    id: PortId,
    shared: Arc<PortShared<M::Word>>,
    parked: Option<Parked>,
    /// The state that `steering` and `offloads` were computed from.
    ready: Ready,
    steering: Steering,
    /// The offloads that the driver takes.
    offloads: Offloads,
}

impl<M: Primitives> TxQueueSelector<M> {
    /// Makes the selector of a port none of whose pairs runs.
    pub(crate) fn new(id: PortId, shared: Arc<PortShared<M::Word>>) -> Self {
        let mut steering = Steering::automatic(Arc::clone(&shared.flows));
        steering.set_ready([]);
        Self { id, shared, parked: None, ready: Ready::default(), steering, offloads: Offloads::all() }
    }

    /// Updates the pairs and offloads if they have changed; costs one load if they have not. Called before
    /// each burst.
    #[inline]
    pub(crate) fn refresh(&mut self, handoff: &Handoff<M>) {
        let ready = self.shared.ready();
        if ready != self.ready {
            self.changed(ready, handoff);
        }
    }

    #[cold]
    fn changed(&mut self, ready: Ready, handoff: &Handoff<M>) {
        self.ready = ready;
        self.steering.set_ready(ready.pairs());
        self.steering.prefer(|pair| self.shared.owner(pair) == handoff.me());
        let none = self.steering.ready().is_empty();
        // Without a driver all offloads are taken, as no work should go into frames that are dropped.
        self.offloads = if none { Offloads::all() } else { self.shared.offloads() };
    }

    /// Returns the offloads that the driver takes, as of the last [`refresh`](Self::refresh).
    #[inline]
    pub(crate) fn offloads(&self) -> Offloads {
        self.offloads
    }

    /// Records that the guest sends the flows of a burst from `pair`, if there is more than one pair to
    /// choose from.
    #[inline]
    pub(crate) fn learn(&mut self, pair: u16, burst: &Burst<'_>, handoff: &Handoff<M>, now: &Now) {
        self.refresh(handoff);
        if self.steering.learns() {
            for frame in burst.frames() {
                self.steering.learn(flow_hash(frame.prefix()), pair, now.micros());
            }
        }
    }

    /// Returns the pair of every frame, if there is only one.
    #[inline]
    pub(crate) fn sole_pair(&self) -> Option<u16> {
        match self.steering.ready() {
            [only] => Some(*only),
            _ => None,
        }
    }

    /// Selects the pair of a frame that begins with `first`.
    ///
    /// # Errors
    /// [`DropReason::LinkDown`] if no pair can be delivered to.
    #[inline]
    pub(crate) fn select(&mut self, first: &[u8], now: &Now) -> Result<u16, DropReason> {
        match self.steering.ready() {
            [] => Err(DropReason::LinkDown),
            [only] => Ok(*only),
            _ => self.steering.choose(first, now.micros()).0.ok_or(DropReason::LinkDown),
        }
    }

    /// Returns the pair that [`select`](Self::select) would return, and takes note of nothing.
    ///
    /// # Errors
    /// As for [`select`](Self::select).
    pub(crate) fn peek(&self, first: &[u8], now: &Now) -> Result<u16, DropReason> {
        self.steering.peek(first, now.micros()).ok_or(DropReason::LinkDown)
    }

    /// Returns the worker that a frame for a pair goes to.
    #[inline]
    pub(crate) fn owner(&self, pair: u16, handoff: &Handoff<M>) -> Owner {
        match self.shared.owner(pair) {
            owner if owner != handoff.me() => Owner::Other(owner),
            _ if self.parked.as_ref().is_some_and(|parked| parked.pair == pair) => Owner::Soon,
            _ => Owner::This,
        }
    }

    /// Hands a frame, which port `from` has sent, to the worker that owns its pair, which this worker does
    /// not have; or parks it, if the pair is migrating here.
    ///
    /// # Errors
    /// [`DropReason::WorkerBusy`] if that worker is too far behind, or too many frames are parked;
    /// [`DropReason::LinkDown`] if no worker serves the pair.
    pub(crate) fn hand_off(
        &mut self,
        from: PortId,
        pair: u16,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        handoff: &mut Handoff<M>,
    ) -> Result<Delivery, DropReason> {
        if let Owner::Other(owner) = self.owner(pair, handoff) {
            handoff.send(owner, from, self.id, header, first, rest)?;
            return Ok(Delivery::Queued);
        }
        let parked = self.parked.as_mut().filter(|parked| parked.pair == pair);
        let Parked { frames, .. } = parked.ok_or(DropReason::LinkDown)?;
        if frames.len() == DEPTH {
            return Err(DropReason::WorkerBusy);
        }
        let mut frame = Vec::new();
        gather(first, rest, &mut frame);
        frames.push((from, header, frame));
        Ok(Delivery::Queued)
    }

    /// Parks frames for `pair`, which is migrating to this worker, from now on until
    /// [`unpark`](Self::unpark).
    pub(crate) fn park(&mut self, pair: u16) {
        self.parked = Some(Parked { pair, frames: Vec::new() });
    }

    /// Ends parking, as the pair is here: returns the frames that were parked for it, in order.
    pub(crate) fn unpark(&mut self) -> Vec<(PortId, Header, Vec<u8>)> {
        self.parked.take().map_or_else(Vec::new, |parked| parked.frames)
    }
}

#[cfg(test)]
mod tests {
    use ringferry_sys::eventfd::EventFd;

    use super::*;
    use crate::plane::handoff::ring::Doorbell;

    /// Only frames for the pair that migrates to this worker are parked; frames for a pair that no worker
    /// serves are dropped.
    #[test]
    fn frames_are_parked_for_the_pair_that_migrates_and_for_no_other() {
        let doorbell = || Arc::new(Doorbell::new(EventFd::new().unwrap()));
        let mut handoff: Handoff = Handoff::mesh(&[doorbell(), doorbell()]).remove(0);
        let shared = Arc::new(PortShared::default());
        let mut selector = TxQueueSelector::<Std>::new(PortId(0), Arc::clone(&shared));
        let mut put = |selector: &mut TxQueueSelector, pair| {
            selector.hand_off(PortId(1), pair, Header::NONE, &[7], &[], &mut handoff)
        };
        assert_eq!(put(&mut selector, 3), Err(DropReason::LinkDown));
        selector.park(3);
        assert_eq!(put(&mut selector, 3), Ok(Delivery::Queued));
        assert_eq!(put(&mut selector, 2), Err(DropReason::LinkDown));
        assert_eq!(selector.unpark(), [(PortId(1), Header::NONE, vec![7])]);
        assert_eq!(put(&mut selector, 3), Err(DropReason::LinkDown));
        shared.set_owner(3, 1);
        assert_eq!(put(&mut selector, 3), Ok(Delivery::Queued));
    }
}
