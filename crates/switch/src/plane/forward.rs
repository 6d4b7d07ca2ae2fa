//! Where each frame of a burst goes: learn, look up, group by output port, deliver.

use ringferry_packet::ether;
use ringferry_packet::frame::Burst;

use super::crossing::Crossing;
use super::moment::Moment;
use super::port::Port;
use crate::counters::DropReason;
use crate::fdb::{Fdb, PortId};

/// Where one frame goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum To {
    /// Out of this port.
    Port(PortId),
    /// Out of every port but the one it came from.
    Flood,
    /// Nowhere.
    Nowhere,
}

/// Storage for one burst's decisions, reused.
#[derive(Default)]
pub(super) struct Forwarder {
    to: Vec<To>,
    /// Output ports of the burst, each once.
    outputs: Vec<PortId>,
    scratch: Vec<u8>,
}

impl Forwarder {
    /// Forwards the frames of `burst`, which came from port `from`.
    ///
    /// All frames of a burst are decided on before any is copied; then each output port gets all its
    /// frames in the order they were sent, one publish and at most one call.
    pub(super) fn forward(
        &mut self,
        from: PortId,
        burst: &Burst<'_>,
        ports: &mut [Option<Port>],
        fdb: &mut Fdb,
        crossing: &mut Crossing,
        now: &Moment,
    ) {
        self.to.clear();
        self.outputs.clear();
        let mut flooding = false;
        for frame in burst.frames() {
            let prefix = frame.prefix();
            // A frame has at least an Ethernet header: its queue made sure.
            let (Some(dst), Some(src)) = (ether::destination(prefix), ether::source(prefix)) else {
                self.to.push(To::Nowhere);
                continue;
            };
            if fdb.learn(src, from, now.seconds) {
                crossing.tell(src, from);
            }
            let to = match fdb.lookup(dst, now.seconds) {
                Some(port) if !dst.is_multicast() => {
                    if port == from {
                        To::Nowhere
                    } else {
                        if !self.outputs.contains(&port) {
                            self.outputs.push(port);
                        }
                        To::Port(port)
                    }
                }
                _ => {
                    flooding = true;
                    To::Flood
                }
            };
            self.to.push(to);
        }
        let nowhere = self.to.iter().filter(|to| **to == To::Nowhere).count();
        if nowhere > 0 {
            count(ports, from, DropReason::SamePort, nowhere);
        }
        if flooding {
            self.outputs.clear();
            let others = (0u16..).zip(ports.iter()).filter(|(_, port)| port.is_some());
            self.outputs.extend(others.map(|(id, _)| PortId(id)).filter(|id| *id != from));
            if self.outputs.is_empty() {
                let floods = self.to.iter().filter(|to| **to == To::Flood).count();
                count(ports, from, DropReason::NoDestination, floods);
            }
        }
        for &output in &self.outputs {
            let Some(port) = ports.get_mut(usize::from(output.0)).and_then(Option::as_mut) else { continue };
            let mine = |to: &To| *to == To::Flood || *to == To::Port(output);
            let frames = self.to.iter().filter(|to| mine(to)).count();
            if frames == 0 {
                continue;
            }
            port.expect(frames, crossing);
            for (frame, to) in burst.frames().iter().zip(&self.to) {
                if mine(to) {
                    port.deliver(burst, frame, &mut self.scratch, crossing, now);
                }
            }
            port.flush();
        }
        crossing.flush();
    }
}

#[cold]
fn count(ports: &[Option<Port>], port: PortId, reason: DropReason, packets: usize) {
    if let Some(Some(port)) = ports.get(usize::from(port.0)) {
        port.counters.drops.add(reason, packets as u64);
    }
}
