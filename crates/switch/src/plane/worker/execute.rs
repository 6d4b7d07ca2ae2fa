//! Commands of the control plane, carried out between two bursts.

use std::sync::Arc;

use ringferry_packet::vnet::Header;

use super::command::{Command, NewPort};
use super::{BURST, Worker};
use crate::fdb::PortId;
use crate::plane::forward::{self, Origin};
use crate::plane::handoff::selector::TxQueueSelector;
use crate::plane::now::Now;
use crate::plane::policy::PortPolicy;
use crate::plane::port::{Port, TxContext};
use crate::plane::queues::{Queues, Source, Watch};

impl<P: Queues> Worker<P> {
    pub(crate) fn execute(&mut self, command: Command<P>) {
        match command {
            Command::AddPort(port) => self.add_port(*port),
            Command::RemovePort(id, reply) => {
                self.remove_port(id);
                let _ = reply.send(());
            }
            Command::Start(id, start) => {
                let started = self.with_port(id, |port, watch| port.queues.start(*start, watch));
                if let Some(queue) = started.flatten() {
                    self.activate(Source { port: id, queue });
                }
            }
            Command::Drain(id, queue) => self.drain(id, queue),
            Command::Stop(id, index, reply) => {
                let stopped = self.with_port(id, |port, watch| port.queues.stop(index, watch));
                if let Some((stopped, queue)) = stopped.flatten() {
                    if let Some(queue) = queue {
                        self.deactivate(Source { port: id, queue });
                    }
                    let _ = reply.send(stopped);
                }
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
                let detached = self.with_port(id, |port, watch| port.queues.detach(queue, watch)).flatten();
                self.deactivate(Source { port: id, queue });
                if let Some(detached) = detached {
                    let _ = reply.send(detached);
                }
            }
            Command::Attach(id, queue, detached) => self.attach(id, queue, *detached),
            Command::Forget(id) => self.fdb.forget_port(id),
            Command::SetRules(id, rules, policy) => {
                self.fdb.set_limit(id, rules.max_macs);
                if self.fdb.set_static(id, &rules.static_macs) > 0 {
                    tracing::warn!(port = id.0, "no place for all static addresses: raise mac_table_size");
                }
                self.set_policy(id, policy);
            }
            Command::Inject(id, frame) => {
                let now = Now::new(self.clock, self.seconds);
                let frame = [(Header::default(), frame)];
                self.forward(Origin { port: id, private: true }, &forward::burst_of(&frame), &now);
            }
            Command::Inspect(reply) => {
                let _ = reply.send(self.inspect());
            }
            Command::Addresses(from, reply) => {
                let _ = reply.send(self.fdb.page(from, self.seconds));
            }
            Command::End => self.stop = true,
        }
    }

    /// Does something with a port, if there is one of this number.
    fn with_port<T>(&mut self, id: PortId, task: impl FnOnce(&mut Port<P>, Watch<'_>) -> T) -> Option<T> {
        let Worker { ports, epoll, .. } = self;
        let port = ports.get_mut(usize::from(id.0))?.as_mut()?;
        Some(task(port, Watch::new(epoll, id)))
    }

    fn add_port(&mut self, NewPort { handle, queues, steering }: NewPort<P>) {
        let at = usize::from(handle.id.0);
        if self.ports.len() <= at {
            self.ports.resize_with(at + 1, || None);
        }
        let policy = self.policies.get(at).cloned().flatten();
        self.ports[at] = Some(Port::new(handle, queues, steering, policy));
    }

    fn remove_port(&mut self, id: PortId) {
        self.with_port(id, |port, watch| port.queues.close(watch));
        if let Some(port) = self.ports.get_mut(usize::from(id.0)) {
            *port = None;
        }
        self.active.retain(|active| active.source.port != id);
        self.fdb.remove_port(id);
        self.set_policy(id, None);
    }

    fn set_policy(&mut self, id: PortId, policy: Option<Arc<PortPolicy>>) {
        let at = usize::from(id.0);
        if let Some(Some(port)) = self.ports.get_mut(at) {
            port.policy.clone_from(&policy);
        }
        if self.policies.len() <= at {
            self.policies.resize_with(at + 1, || None);
        }
        self.policies[at] = policy;
    }

    /// Forwards what a port had sent on a queue before it is disabled or stopped: it counts as accepted.
    fn drain(&mut self, id: PortId, queue: u16) {
        let backlog = self.port(id).map_or(0, |port| port.queues.backlog(queue));
        for _ in 0..backlog.div_ceil(BURST) {
            if !self.poll(Source { port: id, queue }).moved {
                break;
            }
        }
    }

    /// Delivers all that other workers have had for this one.
    fn settle(&mut self) {
        for _ in 0..self.handoff.most().div_ceil(BURST) {
            if !self.poll_handoff() {
                break;
            }
        }
    }

    /// Serves a queue that another worker had, beginning with the frames that were parked for it meanwhile.
    fn attach(&mut self, id: PortId, queue: u16, detached: P::Detached) {
        let active = self.with_port(id, |port, watch| port.queues.attach(queue, detached, watch));
        if active == Some(true) {
            self.activate(Source { port: id, queue });
        }
        let now = Now::new(self.clock, self.seconds);
        let Worker { ports, handoff, forwarder, .. } = self;
        let Some(Some(port)) = ports.get_mut(usize::from(id.0)) else { return };
        let parked = port.selector().map(TxQueueSelector::unpark).unwrap_or_default();
        port.expect(parked.len(), handoff);
        for (header, frame) in parked {
            let scratch = forwarder.scratch();
            port.put(header, &frame, &[], &mut TxContext { handoff, now: &now, scratch });
        }
        self.flush(id);
        self.handoff.flush();
    }

    fn inspect(&mut self) -> Vec<(PortId, P::State)> {
        let mut all = Vec::new();
        let mut states = Vec::new();
        for (id, port) in (0u16..).zip(&mut self.ports) {
            if let Some(port) = port {
                port.queues.inspect(&mut states);
                all.extend(states.drain(..).map(|state| (PortId(id), state)));
            }
        }
        all
    }
}
