//! Frames that are too much work for one turn: copied to private memory, and delivered a step at a time.
//!
//! The [`Forwarder`] puts off what comes after [`BURST_COST`](super::BURST_COST) in a burst, decided but not delivered. The worker keeps it with the port that
//! sent it, takes nothing more from that port meanwhile, so that nothing overtakes it, and calls [`Forwarder::step`] in the port's turns. A step is
//! one receiver, and at most [`PACKETS`] packets of a frame that has to be cut for it.

use ringferry_packet::vnet::Header;

use super::{Decision, Forwarder, Tables, To, answer, burst_of, leave};
use crate::counters::DropReason;
use crate::fdb::PortId;
use crate::plane::capture::{Event, Offered};
use crate::plane::cost;
use crate::plane::now::Now;
use crate::plane::offload::gso::Sitting;
use crate::plane::policy::vlan::Retag;
use crate::plane::port::TxContext;
use crate::plane::queues::Queues;
use crate::plane::worker::holes::Touch;

/// Packets that one step delivers at most.
const PACKETS: usize = 32;

/// A frame that was decided on, and is delivered in later turns.
pub(crate) struct SlowFrame {
    frame: [(Header, Vec<u8>); 1],
    decision: Decision,
    /// Ports that it still goes to, the next one last.
    outputs: Vec<PortId>,
    /// The next one has had so many of its packets, with this change of its tag.
    part: Option<(usize, Retag)>,
}

impl SlowFrame {
    pub(super) fn new(frame: (Header, Vec<u8>), decision: Decision, mut outputs: Vec<PortId>) -> Self {
        outputs.reverse();
        Self { frame: [frame], decision, outputs, part: None }
    }

    /// The frame, for a capture.
    pub(crate) fn offered(&self) -> Offered<'_, '_> {
        let [(header, frame)] = &self.frame;
        Offered::private(*header, frame)
    }
}

impl Forwarder {
    /// Delivers the next part of a frame that `from` has sent. What that cost, or `None` if nothing of the frame is left.
    pub(crate) fn step<P: Queues>(
        &mut self,
        from: PortId,
        slow: &mut SlowFrame,
        tables: &mut Tables<'_, P>,
        now: &Now,
    ) -> Option<u64> {
        let Some(&output) = slow.outputs.last() else {
            self.conclude(from, slow, tables, now);
            return None;
        };
        let Self { picks, retags, waiting, scratch, holes, dear, .. } = self;
        holes.touch(Touch::of(output));
        let sender = tables.sender(from, true);
        let burst = burst_of(&slow.frame);
        let frame = &burst.frames()[0];
        let Tables { ports, fdb, handoff } = tables;
        let tx = &mut TxContext { from, handoff, now, scratch };
        let Some(Some(port)) = ports.get_mut(usize::from(output.0)) else {
            slow.outputs.pop();
            return Some(0);
        };
        port.refresh(tx.handoff);
        port.expect(1);
        let (done, retag) = match slow.part.take() {
            Some(part) => part,
            None => {
                picks.clear();
                picks.push(0);
                let before = port.waiting();
                leave(port, sender, &burst, std::slice::from_mut(&mut slow.decision), picks, retags, now);
                if port.has_waiting() {
                    waiting.push(output);
                }
                match retags.first() {
                    Some(retag) => (0, *retag),
                    None => {
                        slow.outputs.pop();
                        // What waits in the shaper is delivered when its time has come, whoever's turn it is then: it is paid for now.
                        let waits = port.waiting() > before;
                        let price =
                            || cost::of_delivery(&burst, frame, port.offloads(), port.queues.frame_cost());
                        return Some(if waits { price() } else { cost::FRAME_OUT });
                    }
                }
            }
        };
        slow.decision.reached = true;
        let kind = port.queues.frame_cost();
        let whole = cost::of_delivery(&burst, frame, port.offloads(), kind);
        let sitting = Sitting { from: done, most: PACKETS };
        let left = port.deliver_part(&burst, frame, retag, sitting, tx);
        port.flush();
        if port.dear > 0 {
            dear.push(output);
        }
        if left > 0 {
            slow.part = Some((done + PACKETS, retag));
        } else {
            slow.outputs.pop();
        }
        if port.has_answers() {
            answer(output, ports, fdb, tx, holes);
        }
        let packets = cost::packets(frame).max(1);
        let part = packets.saturating_sub(done as u64).min(PACKETS as u64).max(1);
        Some(cost::of_output() + whole * part / packets)
    }

    /// Counts a frame that was for everybody and that nobody got.
    fn conclude<P: Queues>(&self, from: PortId, slow: &SlowFrame, tables: &Tables<'_, P>, now: &Now) {
        if slow.decision.to == To::Flood
            && !slow.decision.reached
            && let Some(Some(port)) = tables.ports.get(usize::from(from.0))
        {
            port.handle.counters.drops.add(DropReason::NoDestination, 1);
            if let Some(capture) = &port.capture {
                capture.offer_one(Event::refused(DropReason::NoDestination, None), now, slow.offered());
            }
        }
    }
}
