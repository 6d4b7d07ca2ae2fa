//! Wires of a worker: a port becomes an end of one, or of another, or of none.

use crate::counters::DropReason;
use crate::fdb::PortId;
use crate::plane::capture::Offered;
use crate::plane::now::Now;
use crate::plane::queues::Queues;
use crate::plane::wire::{CompiledEnd, WireQueue, WireState};
use crate::plane::worker::Worker;
use crate::plane::worker::handover::OnWires;

/// Memory of the frames on wires that a worker hands over at most, in bytes. Everybody waits while they are copied, some milliseconds for each 10 MB, and a hand-over that
/// takes too long does not happen.
const MOST_HANDED: usize = 32 << 20;

impl<P: Queues> Worker<P> {
    /// Makes a port an end of a wire, or of none. What waits on the same wire goes on waiting, until it is due; what waits on one that is no more is delivered
    /// at once.
    pub(super) fn set_wire(&mut self, id: PortId, end: Option<&CompiledEnd>) {
        let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { return };
        match (&mut port.wire, end) {
            (None, None) => return,
            (Some(wire), Some(end)) if wire.is_of(end) => return wire.become_another(end.clone()),
            _ => {}
        }
        port.refresh(&self.handoff);
        let waiting = port.drain_wire();
        self.deliver_waiting(id, &waiting);
        if let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) {
            port.wire = end.map(|end| Box::new(WireQueue::new(end.clone())));
        }
        // What was learned on the other side of the change is no longer where it was.
        self.fdb.forget_port(id, self.seconds);
    }

    /// Returns what is under way on wires, which stays here. Of what is more than [`MOST_HANDED`], the frames that are due last are left out, and counted as
    /// dropped.
    pub(super) fn on_wires(&self) -> OnWires {
        let now = Now::new(self.clock, self.seconds);
        let (mut all, mut bytes) = (OnWires::default(), 0);
        let ports = (0u16..).zip(&self.ports).filter_map(|(id, port)| Some((PortId(id), port.as_ref()?)));
        for (id, port) in ports {
            let Some(wire) = &port.wire else { continue };
            all.models.push((id, wire.model()));
            for queued in wire.queued() {
                bytes += queued.delayed.frame.len();
                if bytes <= MOST_HANDED {
                    all.frames.push((id, queued));
                } else {
                    let frame = Offered::private(queued.delayed.header, &queued.delayed.frame);
                    port.drop_frame(DropReason::WireLimit, &now, frame);
                }
            }
        }
        all
    }

    /// Goes on with what was under way on wires in another process.
    pub(super) fn carry_wires(&mut self, wires: OnWires) {
        let now = self.clock.micros();
        for (id, model) in &wires.models {
            if let Some(wire) = self.port(*id).and_then(|port| port.wire.as_mut()) {
                wire.set_model(model);
            }
        }
        for (id, queued) in wires.frames {
            if let Some(wire) = self.port(id).and_then(|port| port.wire.as_mut()) {
                wire.requeue(queued);
            }
            self.set_release(id, now);
        }
    }

    /// Returns what waits at the ends of wires, for people.
    pub(super) fn wire_states(&self) -> Vec<(PortId, WireState)> {
        let ports = (0u16..).zip(&self.ports).filter_map(|(id, port)| Some((PortId(id), port.as_ref()?)));
        ports.filter_map(|(id, port)| Some((id, port.wire.as_ref()?.state()))).collect()
    }
}
