//! The side effects of deciding on frames: counting, learning, taking tokens, capturing.
//!
//! [`Forwarder::decide`](super::Forwarder) is compiled for two sets of [`Effects`]: [`Acting`], for frames, and
//! [`Asking`](super::walk::Asking), for an imaginary one, of which nothing may remain. So both come to the same decision by the same code.

use ringferry_packet::frame::{Burst, Frame};

use crate::counters::DropReason;
use crate::fdb::{Fdb, Hashed, Learned, PortId};
use crate::plane::capture::{Event, Offered};
use crate::plane::handoff::ring::Handoff;
use crate::plane::now::Now;
use crate::plane::policy::vlan::Tagged;
use crate::plane::policy::{PortPolicy, Refusal};
use crate::plane::port::Port;
use crate::plane::queues::Queues;

/// See the head of this file. `port` is the one that the frames come from.
pub(super) trait Effects<P: Queues> {
    /// Admits a frame, as [`PortPolicy::admit`] does.
    fn admit(
        &mut self,
        policy: &PortPolicy,
        burst: &Burst<'_>,
        frame: &Frame,
        private: bool,
        now: &Now,
        worker: usize,
    ) -> Result<Tagged, Refusal>;

    /// Learns a frame's source, and announces it to other workers if it is news.
    fn learn(
        &mut self,
        port: &Port<P>,
        fdb: &mut Fdb,
        handoff: &mut Handoff,
        source: Hashed,
        now: &Now,
    ) -> Learned;

    /// Returns where an address is, now that the frame's source was learned.
    fn lookup(&self, fdb: &Fdb, address: Hashed, now: &Now) -> Option<PortId>;

    /// Asks storm control whether a frame may be flooded.
    fn may_flood(&mut self, policy: &PortPolicy, frame: &Frame, now: &Now) -> bool;

    /// Counts frames that are flooded.
    fn flooded(&mut self, port: &Port<P>, number: u64);

    /// Returns what the sender of a frame is told that its firewall has denied, if it is told anything.
    fn refusal(&mut self, policy: &PortPolicy, burst: &Burst<'_>, frame: &Frame) -> Option<Vec<u8>>;

    /// Counts a frame that is dropped, and takes note of it for captures.
    fn refuse(
        &mut self,
        port: &Port<P>,
        reason: DropReason,
        frame: (&Burst<'_>, &Frame),
        queue: Option<u16>,
        now: &Now,
    );
}

/// Announces to the other workers where an address is.
///
/// One that cannot be announced, as its port has announced too many or a worker is behind, is forgotten again if it was new or had moved: whatever is for it is
/// flooded until a later frame announces it. Else a guest that has used up its announcements could take an address that somebody uses behind another worker, which would
/// hear nothing of it.
#[cold]
fn tell<P: Queues>(
    (port, fdb, handoff): (&Port<P>, &mut Fdb, &mut Handoff),
    (source, id): (Hashed, PortId),
    learned: Learned,
    now: &Now,
) {
    let (vid, mac) = (source.vid(), source.mac());
    if port.news.take(1, now.micros()) && handoff.announce(vid, mac, id) {
        return;
    }
    if learned == Learned::Due {
        fdb.tell_again(vid, mac, now.seconds);
    } else {
        fdb.take_back(vid, mac);
    }
}

/// Does all of it.
pub(super) struct Acting;

impl<P: Queues> Effects<P> for Acting {
    #[inline(always)]
    fn admit(
        &mut self,
        policy: &PortPolicy,
        burst: &Burst<'_>,
        frame: &Frame,
        private: bool,
        now: &Now,
        worker: usize,
    ) -> Result<Tagged, Refusal> {
        policy.admit(burst, frame, private, now, worker)
    }

    #[inline(always)]
    fn learn(
        &mut self,
        port: &Port<P>,
        fdb: &mut Fdb,
        handoff: &mut Handoff,
        source: Hashed,
        now: &Now,
    ) -> Learned {
        let id = port.handle.id;
        let learned = fdb.learn_hashed(source, id, now.seconds);
        if matches!(learned, Learned::News | Learned::Due) && !handoff.is_alone() {
            tell((port, fdb, handoff), (source, id), learned, now);
        }
        learned
    }

    #[inline(always)]
    fn lookup(&self, fdb: &Fdb, address: Hashed, now: &Now) -> Option<PortId> {
        fdb.lookup_hashed(address, now.seconds)
    }

    #[inline(always)]
    fn may_flood(&mut self, policy: &PortPolicy, frame: &Frame, now: &Now) -> bool {
        policy.may_flood(frame, now)
    }

    fn refusal(&mut self, policy: &PortPolicy, burst: &Burst<'_>, frame: &Frame) -> Option<Vec<u8>> {
        policy.firewall()?.refusal(burst, frame)
    }

    #[inline(always)]
    fn flooded(&mut self, port: &Port<P>, number: u64) {
        port.handle.counters.rx_flooded.add(number);
    }

    #[inline(always)]
    fn refuse(
        &mut self,
        port: &Port<P>,
        reason: DropReason,
        (burst, frame): (&Burst<'_>, &Frame),
        queue: Option<u16>,
        now: &Now,
    ) {
        port.handle.counters.drops.add(reason, 1);
        if let Some(capture) = &port.capture {
            capture.offer_one(Event::refused(reason, queue), now, Offered::of(burst, frame));
        }
    }
}
