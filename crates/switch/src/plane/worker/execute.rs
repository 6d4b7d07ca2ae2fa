//! Commands of the control plane, carried out between two bursts.
//!
//! The control plane puts a [`Command`] into the worker's channel and rings its bell ([`handles`](super::handles)). The worker sees the bell when it
//! looks at its events, takes up to [`COMMANDS`](super::COMMANDS) commands and calls [`Worker::execute`] for each, in the order in which they were
//! sent, on its own thread and when no burst is on loan. A command with a reply channel is answered when it is done: the control plane may wait for
//! that, or have given up waiting. The answer is then lost and the command done all the same, except that a queue which was detached for nobody is
//! taken back. After [`Command::End`] the thread ends before another round.

use std::sync::Arc;
use std::sync::mpsc::SendError;

use ringferry_packet::vnet::Header;

use super::Worker;
use super::command::{Command, NewPort};
use super::holes::Touch;
use crate::counters::DropReason;
use crate::fdb::PortId;
use crate::plane::capture::{Offered, PortCapture};
use crate::plane::forward::{self, Forwarder, Origin, Tables};
use crate::plane::handoff::selector::TxQueueSelector;
use crate::plane::now::Now;
use crate::plane::policy::PortPolicy;
use crate::plane::policy::shaper::Delayed;
use crate::plane::port::{Peers, Port};
use crate::plane::queues::{Queues, Source, Watch};

/// The debt up to which a port's queues are emptied when they are disabled or stopped, in the unit of [`cost`](crate::plane::cost): how long everybody else
/// waits for that. A ring of 256 small frames costs a fifteenth of it, one of 256 large ones five times as much; as a front end that lowers the
/// number of pairs stops the guest's queues before, there is little in them.
const DRAIN_COST: u64 = 500_000;

impl<P: Queues> Worker<P> {
    pub(crate) fn execute(&mut self, command: Command<P>) {
        match command {
            Command::AddPort(port) => self.add_port(*port),
            Command::RemovePort(id, reply) => {
                self.remove_port(id);
                let _ = reply.send(());
            }
            Command::Start(id, start) => self.start(id, *start),
            Command::StartAll(id, starts) => starts.into_iter().for_each(|start| self.start(id, start)),
            Command::Drain(id, queue) => self.drain(id, queue),
            Command::Stop(id, index, reply) => {
                if let Some(stopped) = self.stop_queue(id, index) {
                    let _ = reply.send(stopped);
                }
            }
            Command::StopAll(id, indices, reply) => {
                let stopped =
                    indices.into_iter().filter_map(|index| Some((index, self.stop_queue(id, index)?)));
                let _ = reply.send(stopped.collect());
            }
            Command::Request(id, request) => {
                self.with_port(id, |port, watch| port.queues.request(request, watch));
            }
            Command::Settle(reply) => {
                self.settle();
                let _ = reply.send(());
            }
            Command::Park(id, queue, reply) => {
                if let Some(selector) = self.port(id).and_then(Port::selector) {
                    selector.park(queue);
                }
                let _ = reply.send(());
            }
            Command::Detach(id, queue, reply) => {
                self.settle();
                self.settle_slow(id);
                // What follows on that queue comes from another worker, and must not overtake what waits here.
                (0..self.ports.len()).for_each(|port| self.release_all(PortId(port as u16)));
                let detached = self.with_port(id, |port, watch| port.queues.detach(queue, watch)).flatten();
                self.deactivate(Source { port: id, queue });
                if let Some(Err(SendError(detached))) = detached.map(|detached| reply.send(detached)) {
                    self.attach(id, queue, detached);
                }
            }
            Command::Unpark(id) => self.unpark(id),
            Command::Attach(id, queue, detached) => self.attach(id, queue, *detached),
            Command::Forget(id) => self.fdb.forget_port(id, self.seconds),
            Command::SetRules(id, rules, policy) => {
                self.accounts.set_weight(id, rules.weight);
                self.fdb.set_limit(id, rules.max_macs);
                if self.fdb.set_static(id, &rules.static_macs) > 0 {
                    tracing::warn!(port = id.0, "no place for all static addresses: raise mac_table_size");
                }
                self.set_policy(id, policy);
            }
            Command::Capture(id, tap) => {
                let share = Arc::clone(&self.captures);
                let mirrors = tap.is_mirror();
                if let Some(port) = self.port(id) {
                    let native = port.native();
                    let capture = port.capture.get_or_insert_with(|| Box::new(PortCapture::new(share)));
                    capture.set_native(native);
                    capture.add(*tap);
                    if mirrors && !self.mirrored.contains(&id) {
                        self.mirrored.push(id);
                    }
                }
            }
            Command::EndCapture(capture) => {
                for port in self.ports.iter_mut().flatten() {
                    if port.capture.as_mut().is_some_and(|captures| !captures.end(capture)) {
                        port.capture = None;
                    }
                }
                let Self { ports, mirrored, .. } = self;
                mirrored.retain(|id| {
                    let port = ports.get(usize::from(id.0)).and_then(Option::as_ref);
                    port.and_then(|port| port.capture.as_ref()).is_some_and(|capture| capture.mirrors())
                });
            }
            Command::SetLink(id, up) => {
                if let Some(port) = self.port(id) {
                    port.link_down = !up;
                }
                // It may be the port that others are read directly for.
                for port in self.ports.iter_mut().flatten() {
                    port.direct = None;
                }
            }
            Command::Inject(id, frame) => {
                let now = Now::new(self.clock, self.seconds);
                let frame = [(Header::default(), frame)];
                self.forward(
                    Origin { port: id, private: true, queue: None },
                    &forward::burst_of(&frame),
                    &now,
                );
            }
            Command::WalkIn(frame, reply) => {
                let now = Now::new(self.clock, self.seconds);
                let Worker { ports, fdb, handoff, .. } = self;
                let _ = reply.send(Forwarder::walk_in(&frame, &mut Tables { ports, fdb, handoff }, &now));
            }
            Command::WalkOut(leaving, reply) => {
                let now = Now::new(self.clock, self.seconds);
                let Worker { forwarder, ports, fdb, handoff, .. } = self;
                forwarder.holes.touch(Touch::of(leaving.to));
                let exit = Forwarder::walk_out(&leaving, &mut Tables { ports, fdb, handoff }, &now);
                forwarder.holes.touch_nothing();
                let _ = reply.send(exit);
            }
            Command::Inspect(ports, reply) => {
                let _ = reply.send(self.inspect(ports.as_deref()));
            }
            Command::Addresses(from, reply) => {
                let _ = reply.send(self.fdb.page(from, self.seconds));
            }
            Command::Flush(from, flush, reply) => {
                let _ = reply.send(self.fdb.flush(from, &flush));
            }
            Command::Wires(reply) => {
                let _ = reply.send(self.wire_states());
            }
            Command::IsQuiet(id, reply) => {
                let _ = reply.send(self.is_quiet(id));
            }
            Command::Probe(reply) => {
                let _ = reply.send(());
            }
            Command::Pause(reply) => {
                self.pause_all();
                let _ = reply.send(());
            }
            Command::Unpause => self.set_paused(false),
            Command::HandOver(age, reply) => {
                let _ = reply.send(self.held(age));
            }
            Command::Carry(carried) => self.carry(*carried),
            #[cfg(test)]
            Command::Hold(until) => {
                let _ = until.recv_timeout(std::time::Duration::from_secs(600));
            }
            Command::End => self.stop = true,
        }
    }

    fn start(&mut self, id: PortId, start: P::Start) {
        let started = self.with_port(id, |port, watch| port.queues.start(start, watch));
        if let Some(queue) = started.flatten() {
            self.activate(Source { port: id, queue });
        }
    }

    fn stop_queue(&mut self, id: PortId, index: u16) -> Option<P::Stopped> {
        let (stopped, queue) = self.with_port(id, |port, watch| port.queues.stop(index, watch)).flatten()?;
        if let Some(queue) = queue {
            self.deactivate(Source { port: id, queue });
        }
        Some(stopped)
    }

    /// Does something with a port, if there is one of this number.
    pub(super) fn with_port<T>(
        &mut self,
        id: PortId,
        task: impl FnOnce(&mut Port<P>, Watch<'_>) -> T,
    ) -> Option<T> {
        let Worker { ports, epoll, forwarder, .. } = self;
        let port = ports.get_mut(usize::from(id.0))?.as_mut()?;
        forwarder.holes.touch(Touch::of(id));
        let done = task(port, Watch::new(epoll, id));
        forwarder.holes.touch_nothing();
        Some(done)
    }

    fn add_port(&mut self, NewPort { handle, queues, steering }: NewPort<P>) {
        let at = usize::from(handle.id.0);
        if self.ports.len() <= at {
            self.ports.resize_with(at + 1, || None);
        }
        let policy = self.policies.get(at).cloned().flatten();
        let (id, wire) = (handle.id, policy.as_deref().and_then(PortPolicy::wire).cloned());
        self.departed.remove(id);
        self.ports[at] = Some(Port::new(handle, queues, steering, policy));
        self.set_wire(id, wire.as_ref());
        self.find_peers();
    }

    /// Looks for the ports that those in quarantine are left with, and for the other ends of wires: rules have their names, and ports come and go.
    fn find_peers(&mut self) {
        for at in 0..self.ports.len() {
            let peers = self.ports[at].as_ref().map(|port| self.peers_of(port));
            if let (Some(port), Some(peers)) = (&mut self.ports[at], peers) {
                port.peers = peers;
            }
        }
    }

    fn peers_of(&self, port: &Port<P>) -> Peers {
        let policy = port.policy.as_deref();
        let name = policy.and_then(|policy| match policy.wire() {
            Some(wire) => Some(wire.end.peer.as_str()),
            None => policy.quarantine(),
        });
        let Some(name) = name else { return Peers::All };
        let is_it = |other: &&Port<P>| &*other.handle.name == name && other.handle.id != port.handle.id;
        self.ports.iter().flatten().find(is_it).map_or(Peers::None, |only| Peers::Only(only.handle.id))
    }

    fn remove_port(&mut self, id: PortId) {
        let now = Now::new(self.clock, self.seconds);
        self.with_port(id, |port, watch| {
            port.queues.close(watch);
            let waiting = port.shaper.drain().map(|(delayed, _)| delayed);
            for Delayed { header, frame, .. } in waiting {
                port.drop_frame(DropReason::LinkDown, &now, Offered::private(header, &frame));
            }
            port.replace_wire(None);
            while let Some(Delayed { header, frame, .. }) = port.pop_stranded() {
                port.drop_frame(DropReason::LinkDown, &now, Offered::private(header, &frame));
            }
        });
        self.timers.cancel_port(id);
        if let Some(port) = self.ports.get_mut(usize::from(id.0)) {
            for (worker, handed) in port.take().into_iter().flat_map(|port| port.handed) {
                self.handoff.give_back(worker, id, handed.frame);
            }
        }
        self.mirrored.retain(|mirrored| *mirrored != id);
        self.accounts.forget(id);
        self.debts.forget(id);
        self.forwarder.holes.forget(id);
        self.active.retain(|active| active.source.port != id);
        self.fdb.remove_port(id, self.seconds);
        self.departed.add(id, self.clock);
        self.set_policy(id, None);
    }

    fn set_policy(&mut self, id: PortId, policy: Option<Arc<PortPolicy>>) {
        let at = usize::from(id.0);
        if policy.as_deref().and_then(PortPolicy::rate_out).is_none() {
            self.release_all(id);
        }
        self.set_wire(id, policy.as_deref().and_then(PortPolicy::wire));
        if let Some(Some(port)) = self.ports.get_mut(at) {
            port.policy.clone_from(&policy);
            let native = port.native();
            if let Some(capture) = &port.capture {
                capture.set_native(native);
            }
        }
        self.rules_changed(id);
        self.find_peers();
        if self.policies.len() <= at {
            self.policies.resize_with(at + 1, || None);
        }
        self.policies[at] = policy;
    }

    /// Forwards what a port had sent on a queue before it is disabled or stopped: it counts as accepted. All its queues together may thereby come into
    /// a debt of [`DRAIN_COST`]; what is left then is treated as if it had been sent later, but for what was taken already.
    fn drain(&mut self, id: PortId, queue: u16) {
        let backlog = self.port(id).map_or(0, |port| port.queues.backlog(queue));
        for _ in 0..backlog {
            if self.accounts.debt(id) >= DRAIN_COST {
                break;
            }
            let queue = if self.slow_frames(id) > 0 { Source::SLOW } else { queue };
            if !self.poll(Source { port: id, queue }).moved {
                break;
            }
        }
    }

    /// Returns true if nothing of a port waits here: no frame in its shaper or on its wire, none that was put off or handed off, and no source that had packets when
    /// it was last polled, or that has to wait for its rate.
    fn is_quiet(&mut self, id: PortId) -> bool {
        let has_packets = self.active.iter().any(|active| active.source.port == id && active.empty == 0);
        let is_paused = self.timers.has_paused(id);
        let waits =
            |port: &mut Port<P>| port.has_waiting() || !port.slow.is_empty() || !port.handed.is_empty();
        !has_packets && !is_paused && !self.port(id).is_some_and(waits)
    }

    /// Delivers all that other workers have had for this one.
    pub(super) fn settle(&mut self) {
        self.poll_handoff();
        while let Some(id) = self.active.iter().find(|active| active.source.queue == Source::HANDED) {
            let source = id.source;
            if !self.poll(source).moved {
                self.deactivate(source);
            }
        }
    }

    /// Delivers the frames of a port that were put off, as its queue goes to another worker, which is not to overtake them. What costs more than a drain may is
    /// dropped.
    fn settle_slow(&mut self, id: PortId) {
        while self.slow_frames(id) > 0 && self.accounts.debt(id) < DRAIN_COST {
            self.poll_slow(id);
        }
        let now = Now::new(self.clock, self.seconds);
        if let Some(port) = self.port(id) {
            for slow in std::mem::take(&mut port.slow) {
                port.drop_frame(DropReason::WorkerBusy, &now, slow.offered());
            }
        }
    }

    /// Serves a queue that another worker had, beginning with the frames that were parked for it meanwhile.
    fn attach(&mut self, id: PortId, queue: u16, detached: P::Detached) {
        let active = self.with_port(id, |port, watch| port.queues.attach(queue, detached, watch));
        if active == Some(true) {
            self.activate(Source { port: id, queue });
        }
        self.unpark(id);
    }

    /// Delivers the frames that were parked for a port to whoever has the queue now.
    fn unpark(&mut self, id: PortId) {
        let Some(port) = self.port(id) else { return };
        let parked = port.selector().map(TxQueueSelector::unpark).unwrap_or_default();
        for (from, header, frame) in parked {
            self.deliver_one(from, id, header, &frame);
        }
        while let Some(id) = self.handed.pop() {
            self.flush(id);
        }
        self.handoff.flush();
    }

    fn inspect(&mut self, ports: Option<&[PortId]>) -> Vec<(PortId, P::State)> {
        let mut all = Vec::new();
        let mut states = Vec::new();
        let mut inspect = |id: PortId, port: &mut Option<Port<P>>| {
            if let Some(port) = port {
                port.queues.inspect(&mut states);
                all.extend(states.drain(..).map(|state| (id, state)));
            }
        };
        match ports {
            None => (0u16..).zip(&mut self.ports).for_each(|(id, port)| inspect(PortId(id), port)),
            Some(ids) => {
                for id in ids {
                    if let Some(port) = self.ports.get_mut(usize::from(id.0)) {
                        inspect(*id, port);
                    }
                }
            }
        }
        all
    }
}
