//! `Vif`: the back end's side of one interface. It publishes features, maps what the front end
//! shares, and publishes that it is closed only after all of that is unmapped.
//!
//! [`BackendDriver`](super::BackendDriver) adopts one per interface that the toolstack created,
//! advances it by one phase at most when one of its nodes may have changed, and drops it when the
//! interface is removed. All calls come on the driver's thread.
//!
//! ```text
//!                         front end Connected              front end leaves, or unplug
//!   Offered ------------------------------------> Serving ------------------> Stopping
//!    ^   \                                          |                            |
//!    |    \ refused, or unplug                      | disconnected()             | disconnected()
//!    |     v                                        v                            |
//!    |    Parting <---------------------------------+----------------------------+
//!    |       |  front end Closed
//!    |       v
//!    +---- Closed                      Offered again: either side is Initialising anew
//! ```

use std::io;
use std::sync::Arc;

use ringferry_memory::Region;
use ringferry_packet::ether::Mac;
use ringferry_xen::domain::Domain;
use ringferry_xen::event::EventChannel;
use ringferry_xen::grant::{Foreign, GrantError, GrantRef};
use ringferry_xen::store::{Client, Nodes, StoreError, path};

use super::backend_driver::{BackConfig, VifId};
use super::features::FrontFeatures;
use super::rings::{ControlNodes, Ports, QueueNodes, RingNodes, RingsError};
use super::state::State;
use crate::events::Events;

/// A front end's queue whose rings are mapped and events bound. Its owner serves it; dropping it
/// unmaps the rings.
#[derive(Debug)]
pub struct MappedQueue {
    /// The page of the ring on which the front end transmits.
    pub tx_ring: Arc<Region>,
    /// The page of the ring on which the front end receives.
    pub rx_ring: Arc<Region>,
    /// The event channels of the queue.
    pub events: Events,
    /// Access to the front end's pages, by mapping and copying grants.
    pub foreign: Box<dyn Foreign>,
}

/// A front end's control ring, mapped and with its event bound.
#[derive(Debug)]
pub struct MappedControl {
    /// The page of the control ring.
    pub ring: Arc<Region>,
    /// The event channel of the control ring.
    pub channel: Box<dyn EventChannel>,
    /// Access to the pages that control messages name.
    pub foreign: Box<dyn Foreign>,
}

/// A connected front end. It owns everything that was mapped for the front end, so dropping it
/// unmaps all.
#[derive(Debug)]
pub struct Connection {
    /// The interface that is connected.
    pub id: VifId,
    /// The queues of the interface, one or more.
    pub queues: Vec<MappedQueue>,
    /// The control ring, if the front end has one.
    pub control: Option<MappedControl>,
    /// The features that the front end published.
    pub front: FrontFeatures,
    /// The front end's MAC address, if the toolstack assigned a valid one.
    pub mac: Option<Mac>,
}

/// The reason why a front end is not connected.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The nodes of its rings are invalid.
    #[error(transparent)]
    Rings(#[from] RingsError),
    /// The grant of a ring could not be mapped.
    #[error("a ring cannot be mapped: {0}")]
    Map(#[from] GrantError),
    /// An event channel could not be bound, or the domain is gone.
    #[error("cannot bind an event channel or reach the domain: {0}")]
    Domain(#[from] io::Error),
    /// The front end wants pages to be flipped instead of copied to, which no back end supports any
    /// more.
    #[error("it does not ask for its pages to be written (request-rx-copy); it is too old")]
    NoCopy,
}

/// A change of one interface, with the caller's duty.
#[derive(Debug)]
pub enum BackEvent {
    /// A front end connects. Serve it, then call
    /// [`BackendDriver::connected`](super::BackendDriver::connected), or
    /// [`BackendDriver::disconnected`](super::BackendDriver::disconnected) if that is impossible.
    Connect(Box<Connection>),
    /// The interface must stop: drop everything that was mapped for it, then call
    /// [`BackendDriver::disconnected`](super::BackendDriver::disconnected).
    Disconnect,
    /// A front end asked for something that is not possible. It was refused by writing the state
    /// Closing.
    Refused(Refusal),
    /// The interface was removed and is forgotten.
    Removed,
}

/// The phase of the back end's state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Features are published; the front end has not connected.
    Offered,
    /// The caller owns the front end's queues.
    Serving,
    /// The caller was asked to drop the queues.
    Stopping,
    /// Nothing is mapped; the front end has not closed.
    Parting,
    /// Both sides have closed; the front end may begin again.
    Closed,
}

/// The back end of one interface.
#[derive(Debug)]
pub(super) struct Vif {
    id: VifId,
    /// Path of the back end's nodes, relative to our domain's.
    back: String,
    /// Path of the front end's nodes.
    front: String,
    phase: Phase,
}

/// The content of an interface's nodes, as read for one decision.
#[derive(Clone, Copy, Debug)]
struct StoreView {
    /// The back end's state: the one that we wrote, unless the toolstack wrote another.
    own: Option<State>,
    front: Option<State>,
    /// True if the toolstack removes the interface.
    unplug: bool,
    /// True if the interface remains after the front end closed.
    online: bool,
}

impl Vif {
    /// Adopts an interface that the toolstack created, or that another back end left behind; `None`
    /// if it is not, or not yet, to be served.
    pub fn adopt(
        store: &mut Client,
        id: VifId,
        back: String,
        config: &BackConfig,
    ) -> Result<Option<Self>, StoreError> {
        let Some(front) = store.text(&path::join(&back, "frontend"))? else { return Ok(None) };
        let state = State::read(store, &back)?;
        let online = store.flag(&path::join(&back, "online"))?;
        let finished = matches!(state, None | Some(State::Closed)) && !online;
        // A path outside the front end's domain would let another guest impersonate this one.
        let own = path::check(&front).is_ok() && path::is_within(&front, &path::domain(id.front));
        if finished || !own {
            return Ok(None);
        }
        let vif = Self { id, back, front, phase: Phase::Offered };
        let unplugged = matches!(state, Some(State::Closing | State::Closed)) && !online;
        if !unplugged {
            vif.publish(store, config)?;
        }
        Ok(Some(vif))
    }

    /// Returns the node to watch, which is the front end's state.
    pub fn watch_path(&self) -> String {
        path::join(&self.front, "state")
    }

    /// Publishes our features and the state InitWait.
    fn publish(&self, store: &mut Client, config: &BackConfig) -> Result<(), StoreError> {
        let state = path::join(&self.back, "state");
        store.transaction(|nodes| {
            if nodes.read(&state)?.is_some() {
                config.features().write(nodes, &self.back)?;
                // There is nothing for the toolstack's hotplug scripts to do, but some wait for
                // this node.
                nodes.write(&path::join(&self.back, "hotplug-status"), "connected")?;
                nodes.write(&state, State::InitWait.number().to_string())?;
            }
            Ok(())
        })
    }

    fn read_store(&self, store: &mut Client) -> Result<StoreView, StoreError> {
        let own = State::read(store, &self.back)?;
        let online = match store.flag(&path::join(&self.back, "online")) {
            // The node's parent is gone, so the node cannot be read.
            Err(error) if !error.is_fatal() => false,
            flag => flag?,
        };
        let unplug = own.is_none() || matches!(own, Some(State::Closing | State::Closed)) && !online;
        Ok(StoreView { own, front: State::read(store, &self.front)?, unplug, online })
    }

    /// Reads the store and advances by one phase at most.
    pub fn advance(
        &mut self,
        store: &mut Client,
        domain: &dyn Domain,
        config: &BackConfig,
    ) -> Result<Option<BackEvent>, StoreError> {
        let seen = self.read_store(store)?;
        match self.phase {
            Phase::Offered | Phase::Parting | Phase::Closed if seen.own.is_none() => {
                Ok(Some(BackEvent::Removed))
            }
            Phase::Offered if seen.unplug => {
                self.phase = Phase::Parting;
                self.close(store, seen, config)
            }
            Phase::Offered => match seen.front {
                Some(State::Initialised | State::Connected) => self.connect(store, domain, config),
                // The toolstack created the device anew.
                _ if seen.own == Some(State::Initialising) => self.publish(store, config).map(|()| None),
                // The front end is not there yet, or its state is from an earlier time.
                _ => Ok(None),
            },
            Phase::Serving => {
                let there = matches!(seen.front, Some(State::Connected | State::Initialised));
                if there && !seen.unplug {
                    return Ok(None);
                }
                self.phase = Phase::Stopping;
                Ok(Some(BackEvent::Disconnect))
            }
            Phase::Stopping => Ok(None),
            Phase::Parting | Phase::Closed => self.close(store, seen, config),
        }
    }

    /// Closes, or begins again, with nothing mapped.
    fn close(
        &mut self,
        store: &mut Client,
        seen: StoreView,
        config: &BackConfig,
    ) -> Result<Option<BackEvent>, StoreError> {
        let anew = seen.own == Some(State::Initialising) || seen.front == Some(State::Initialising);
        if anew && !seen.unplug {
            self.phase = Phase::Offered;
            return self.publish(store, config).map(|()| None);
        }
        let closed = matches!(seen.front, None | Some(State::Closed | State::Initialising));
        let state = if closed || self.phase == Phase::Closed { State::Closed } else { State::Closing };
        if seen.own != Some(state) {
            state.write(store, &self.back)?;
        }
        if state == State::Closed {
            self.phase = Phase::Closed;
        }
        Ok((state == State::Closed && !seen.online).then_some(BackEvent::Removed))
    }

    fn connect(
        &mut self,
        store: &mut Client,
        domain: &dyn Domain,
        config: &BackConfig,
    ) -> Result<Option<BackEvent>, StoreError> {
        match self.map(store, domain, config) {
            Ok(connection) => {
                self.phase = Phase::Serving;
                Ok(Some(BackEvent::Connect(Box::new(connection))))
            }
            Err(Refusal::Rings(RingsError::Store(error))) if error.is_fatal() => Err(error),
            Err(refusal) => {
                // A front end is not refused for nodes that an earlier one left behind.
                let still =
                    matches!(State::read(store, &self.front)?, Some(State::Initialised | State::Connected));
                if !still {
                    return Ok(None);
                }
                self.phase = Phase::Parting;
                State::Closing.write(store, &self.back)?;
                Ok(Some(BackEvent::Refused(refusal)))
            }
        }
    }

    /// Maps the front end's rings and binds its event channels.
    fn map(
        &self,
        store: &mut Client,
        domain: &dyn Domain,
        config: &BackConfig,
    ) -> Result<Connection, Refusal> {
        let offered = config.features();
        // All nodes are read in one transaction, so they are consistent.
        let (rings, front, mac) = store
            .transaction(|nodes| {
                let front = FrontFeatures::read(nodes, &self.front)?;
                let mac = match nodes.text(&path::join(&self.back, "mac")) {
                    Err(StoreError::Malformed { .. }) => None,
                    text => text?,
                };
                match RingNodes::read(nodes, &self.front, offered.max_queues) {
                    Err(RingsError::Store(error)) => Err(error),
                    rings => Ok((rings, front, mac)),
                }
            })
            .map_err(RingsError::from)?;
        let rings = rings?;
        if !front.rx_copy {
            return Err(Refusal::NoCopy);
        }
        let queues =
            rings.queues.iter().map(|queue| self.map_queue(domain, queue)).collect::<Result<_, _>>()?;
        let control = match rings.control.filter(|_| offered.ctrl_ring) {
            Some(nodes) => Some(self.map_control(domain, nodes)?),
            None => None,
        };
        let mac = mac.and_then(|text| text.parse().ok());
        Ok(Connection { id: self.id, queues, control, front, mac })
    }

    fn map_queue(&self, domain: &dyn Domain, nodes: &QueueNodes) -> Result<MappedQueue, Refusal> {
        let mut foreign = domain.foreign(self.id.front)?;
        let mut map = |gref: GrantRef| foreign.map_region(&[gref]);
        let (tx_ring, rx_ring) = (map(nodes.tx_ring)?, map(nodes.rx_ring)?);
        let bind = |port| domain.bind_interdomain(self.id.front, port);
        let events = match nodes.ports {
            Ports::Shared(port) => Events::Shared(bind(port)?),
            Ports::Split { tx, rx } => Events::Split { tx: bind(tx)?, rx: bind(rx)? },
        };
        Ok(MappedQueue { tx_ring, rx_ring, events, foreign })
    }

    fn map_control(&self, domain: &dyn Domain, nodes: ControlNodes) -> Result<MappedControl, Refusal> {
        let mut foreign = domain.foreign(self.id.front)?;
        let ring = foreign.map_region(&[nodes.ring])?;
        let channel = domain.bind_interdomain(self.id.front, nodes.port)?;
        Ok(MappedControl { ring, channel, foreign })
    }

    /// Handles a request about this interface that the store refused, which a guest can cause with
    /// its own nodes and other interfaces must not suffer from: a served interface is stopped.
    pub fn failed(&mut self) -> Option<BackEvent> {
        (self.phase == Phase::Serving).then(|| {
            self.phase = Phase::Stopping;
            BackEvent::Disconnect
        })
    }

    /// Publishes the state Connected once the caller serves the front end.
    pub fn connected(&self, store: &mut Client) -> Result<(), StoreError> {
        if self.phase == Phase::Serving && !self.read_store(store)?.unplug {
            State::Connected.write(store, &self.back)?;
        }
        Ok(())
    }

    /// Records that nothing of the front end's is mapped any more.
    pub fn disconnected(&mut self) {
        if matches!(self.phase, Phase::Serving | Phase::Stopping) {
            self.phase = Phase::Parting;
        }
    }
}
