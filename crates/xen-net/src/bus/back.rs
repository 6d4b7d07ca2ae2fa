//! The back end's side of one interface: says what it takes, maps what the front end shares, and lets go of all of it before it
//! says that it is closed.

use std::io;
use std::sync::Arc;

use ringferry_memory::Region;
use ringferry_packet::ether::Mac;
use ringferry_xen::domain::Domain;
use ringferry_xen::event::EventChannel;
use ringferry_xen::grant::{Foreign, GrantError, GrantRef};
use ringferry_xen::store::{Client, Nodes, StoreError, path};

use super::features::FrontFeatures;
use super::plugs::{BackConfig, VifId};
use super::rings::{ControlNodes, Ports, QueueNodes, RingNodes, RingsError};
use super::state::State;
use crate::events::Events;

/// A front end's queue, ready to be served.
#[derive(Debug)]
pub struct MappedQueue {
    /// The ring for packets that the front end sends.
    pub tx_ring: Arc<Region>,
    /// The ring for packets that it receives.
    pub rx_ring: Arc<Region>,
    /// Its events.
    pub events: Events,
    /// The way to its pages.
    pub foreign: Box<dyn Foreign>,
}

/// A front end's control ring, ready to be served.
#[derive(Debug)]
pub struct MappedControl {
    /// The ring.
    pub ring: Arc<Region>,
    /// Its events.
    pub channel: Box<dyn EventChannel>,
    /// The way to pages that messages name.
    pub foreign: Box<dyn Foreign>,
}

/// A front end that has connected. All that was mapped for it goes with this.
#[derive(Debug)]
pub struct Connection {
    /// Which interface it is.
    pub id: VifId,
    /// One or more queues.
    pub queues: Vec<MappedQueue>,
    /// The control ring, if there is one.
    pub control: Option<MappedControl>,
    /// What the front end asks for.
    pub front: FrontFeatures,
    /// The front end's address, as the toolstack has chosen it.
    pub mac: Option<Mac>,
}

/// Why a front end is not connected.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// Its rings make no sense.
    #[error(transparent)]
    Rings(#[from] RingsError),
    /// A ring could not be mapped.
    #[error("a ring cannot be mapped: {0}")]
    Map(#[from] GrantError),
    /// An event channel could not be bound, or the domain is gone.
    #[error("cannot bind an event channel or reach the domain: {0}")]
    Domain(#[from] io::Error),
    /// It wants pages exchanged instead of filled, which nobody does any more.
    #[error("it does not ask for its pages to be written (request-rx-copy); it is too old")]
    NoCopy,
}

/// What is to be done about an interface, or was.
#[derive(Debug)]
pub enum BackEvent {
    /// A front end has connected. Serve it, then call [`Plugs::connected`](super::Plugs::connected), or
    /// [`Plugs::disconnected`](super::Plugs::disconnected) if that cannot be.
    Connect(Box<Connection>),
    /// Stop serving it, let go of all that was mapped, then call [`Plugs::disconnected`](super::Plugs::disconnected).
    Disconnect,
    /// A front end has asked for something that is not possible, and is told to close.
    Refused(Refusal),
    /// The interface is no more.
    Removed,
}

/// Where we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// For the front end to say where its rings are.
    Offered,
    /// The caller has the queues.
    Serving,
    /// The caller was asked to let go.
    Stopping,
    /// Nothing is mapped; for the front end to close, too.
    Parting,
    /// Both have closed; for the front end to begin again.
    Closed,
}

/// One interface.
#[derive(Debug)]
pub(super) struct Vif {
    id: VifId,
    /// Our nodes, relative to our domain's.
    back: String,
    /// The front end's.
    front: String,
    phase: Phase,
}

/// What the store says of an interface.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Ours, unless the toolstack has written another.
    own: Option<State>,
    front: Option<State>,
    /// The toolstack wants the interface to go.
    unplug: bool,
    /// The interface is to stay if the front end closes.
    online: bool,
}

impl Vif {
    /// Takes up an interface that the toolstack has made, or that another back end has left; `None` if it is not to be, or not
    /// yet.
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
        // A path in another domain would let its guest play this one.
        let own = path::check(&front).is_ok() && path::is_within(&front, &path::domain(id.front));
        if finished || !own {
            return Ok(None);
        }
        let vif = Self { id, back, front, phase: Phase::Offered };
        let unplugged = matches!(state, Some(State::Closing | State::Closed)) && !online;
        if !unplugged {
            vif.offer(store, config)?;
        }
        Ok(Some(vif))
    }

    /// The node to watch: the front end's state.
    pub fn watched(&self) -> String {
        path::join(&self.front, "state")
    }

    /// Says what we take.
    fn offer(&self, store: &mut Client, config: &BackConfig) -> Result<(), StoreError> {
        let state = path::join(&self.back, "state");
        store.transaction(|nodes| {
            if nodes.read(&state)?.is_some() {
                config.features().write(nodes, &self.back)?;
                // Scripts of the toolstack have nothing to do for us; some wait for this.
                nodes.write(&path::join(&self.back, "hotplug-status"), "connected")?;
                nodes.write(&state, State::InitWait.number().to_string())?;
            }
            Ok(())
        })
    }

    fn see(&self, store: &mut Client) -> Result<Seen, StoreError> {
        let own = State::read(store, &self.back)?;
        let online = match store.flag(&path::join(&self.back, "online")) {
            // Nobody may ask below what is gone.
            Err(error) if !error.is_fatal() => false,
            flag => flag?,
        };
        let unplug = own.is_none() || matches!(own, Some(State::Closing | State::Closed)) && !online;
        Ok(Seen { own, front: State::read(store, &self.front)?, unplug, online })
    }

    /// Looks at the store and goes on, by one phase at most.
    pub fn look(
        &mut self,
        store: &mut Client,
        domain: &dyn Domain,
        config: &BackConfig,
    ) -> Result<Option<BackEvent>, StoreError> {
        let seen = self.see(store)?;
        match self.phase {
            Phase::Offered | Phase::Parting | Phase::Closed if seen.own.is_none() => {
                Ok(Some(BackEvent::Removed))
            }
            Phase::Offered if seen.unplug => {
                self.phase = Phase::Parting;
                self.part(store, seen, config)
            }
            Phase::Offered => match seen.front {
                Some(State::Initialised | State::Connected) => self.connect(store, domain, config),
                // Made anew by the toolstack.
                _ if seen.own == Some(State::Initialising) => self.offer(store, config).map(|()| None),
                // Not there yet, or of an earlier time.
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
            Phase::Parting | Phase::Closed => self.part(store, seen, config),
        }
    }

    /// Goes the way down, or begins again, with nothing mapped.
    fn part(
        &mut self,
        store: &mut Client,
        seen: Seen,
        config: &BackConfig,
    ) -> Result<Option<BackEvent>, StoreError> {
        let anew = seen.own == Some(State::Initialising) || seen.front == Some(State::Initialising);
        if anew && !seen.unplug {
            self.phase = Phase::Offered;
            return self.offer(store, config).map(|()| None);
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
                // What one front end has left the next does not answer for.
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

    /// Maps the rings of the front end and binds its events.
    fn map(
        &self,
        store: &mut Client,
        domain: &dyn Domain,
        config: &BackConfig,
    ) -> Result<Connection, Refusal> {
        let offered = config.features();
        // What belongs together is read together.
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

    /// The store refuses something about this interface, which others do not suffer from: a guest may do that to its own
    /// nodes.
    pub fn failed(&mut self) -> Option<BackEvent> {
        (self.phase == Phase::Serving).then(|| {
            self.phase = Phase::Stopping;
            BackEvent::Disconnect
        })
    }

    /// The front end is served.
    pub fn connected(&self, store: &mut Client) -> Result<(), StoreError> {
        if self.phase == Phase::Serving && !self.see(store)?.unplug {
            State::Connected.write(store, &self.back)?;
        }
        Ok(())
    }

    /// Nothing of the front end's is mapped any more.
    pub fn disconnected(&mut self) {
        if matches!(self.phase, Phase::Serving | Phase::Stopping) {
            self.phase = Phase::Parting;
        }
    }
}
