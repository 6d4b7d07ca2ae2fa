//! Wires of a worker: a port becomes an end of one, or of another, or of none.

use std::time::Duration;

use ringferry_sys::spin::Idle;

use crate::counters::DropReason;
use crate::fdb::PortId;
use crate::plane::capture::Offered;
use crate::plane::now::Now;
use crate::plane::queues::Queues;
use crate::plane::wire::{CompiledEnd, WireState};
use crate::plane::worker::Worker;
use crate::plane::worker::handover::OnWires;
use crate::plane::worker::timers::Timer;

/// Memory of the frames on wires that a worker hands over at most, in bytes. Everybody waits while they are copied, some milliseconds for each 10 MB, and a hand-over that
/// takes too long does not happen.
const MOST_HANDED: usize = 32 << 20;

/// The earliest that a worker is awake before a frame on a wire is due, in microseconds. It polls for that time, so this bounds what a frame costs that comes alone.
const MAX_MARGIN: u64 = 200;

/// By which part of itself the margin shrinks with each sleep that was shorter: slowly, as one wake-up in a hundred decides how late the latest frames are.
const SHRINK: u64 = 64;

/// How much later than it asks for the kernel wakes a worker, learned from its sleeps. A worker gets up by so much before a frame on a wire is due.
#[derive(Debug, Default)]
pub(super) struct WakeMargin(u64);

impl WakeMargin {
    /// Takes note of how late the worker was woken by its timeout.
    pub(super) fn note(&mut self, late: Duration) {
        let late = u64::try_from(late.as_micros()).unwrap_or(u64::MAX).min(MAX_MARGIN);
        self.0 = late.max(self.0 - self.0.div_ceil(SHRINK));
    }
}

impl<P: Queues> Worker<P> {
    /// Returns how much earlier than the next timer the worker has to be awake, in microseconds, if frames on a wire are what it is for.
    pub(super) fn margin_of_next(&self) -> Option<u64> {
        let port = self.timers.next_release().and_then(|id| self.ports.get(usize::from(id.0))?.as_ref());
        port?.wire.as_ref().map(|_| self.margin.0)
    }

    /// Returns what a worker without work does if frames on a wire are what it waits for; `None` if they are not. It sleeps, as whoever yields the processor on a busy machine in place of that may
    /// get it back milliseconds later, until the frames are due so soon that it would sleep too long.
    #[inline]
    pub(super) fn idle_for_wire(&mut self) -> Option<Idle> {
        if self.timers.is_empty() {
            return None;
        }
        match self.margin_of_next() {
            None => None,
            Some(margin) if margin > 0 && self.until_timer() == Some(0) => Some(Idle::Around),
            Some(_) => Some(Idle::Sleep),
        }
    }

    /// Makes a port an end of a wire, or of none. What waits on the same wire goes on waiting, until it is due; what waits on one that is no more is due at
    /// once, but no more of it in one turn than of any other work.
    pub(super) fn set_wire(&mut self, id: PortId, end: Option<&CompiledEnd>) {
        let Some(Some(port)) = self.ports.get_mut(usize::from(id.0)) else { return };
        match (&mut port.wire, end) {
            (None, None) => return,
            (Some(wire), Some(end)) if wire.is_of(end) => return wire.become_another(end.clone()),
            _ => {}
        }
        port.replace_wire(end);
        self.timers.cancel(Timer::Release(id));
        self.set_release(id, self.clock.micros());
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
            all.models.extend(port.wire.iter().map(|wire| (id, wire.model())));
            for queued in port.stranded.iter().chain(&port.wire).flat_map(|wire| wire.queued()) {
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
            match self.port(id).and_then(|port| port.wire.as_mut()) {
                Some(wire) => wire.requeue(queued),
                None => self.deliver_late(id, &[queued.delayed]),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_margin_follows_the_latest_wake_ups_and_is_bounded() {
        let mut margin = WakeMargin::default();
        margin.note(Duration::from_micros(80));
        assert_eq!(margin.0, 80);
        (0..10).for_each(|_| margin.note(Duration::from_micros(20)));
        assert!((40..80).contains(&margin.0), "{}", margin.0);
        (0..1000).for_each(|_| margin.note(Duration::from_micros(20)));
        assert_eq!(margin.0, 20);
        margin.note(Duration::from_secs(1));
        assert_eq!(margin.0, MAX_MARGIN);
    }
}
