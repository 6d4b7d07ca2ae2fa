//! [`FrontendDriver`]: the xenbus driver of one front end. It finds its back end, shares its
//! memory, publishes where, and takes everything back in the end.
//!
//! A control thread creates it, polls [`FrontendDriver::fds`], and calls [`FrontendDriver::poll`]
//! until it returns `None`. [`FrontEvent::Connected`] hands over the queues; on
//! [`FrontEvent::Stop`] the control thread gives them back to [`FrontendDriver::stopped`]. After
//! [`FrontendDriver::close`] the last event is [`FrontEvent::Closed`], and the driver can be
//! dropped, or told to [begin anew](FrontendDriver::reopen).
//!
//! ```text
//!             back end InitWait             back end Connected
//!   Waiting ------------------> Announced --------------------> Running
//!      ^                           |                               | back end leaves, or close()
//!      | back end anew             | back end leaves, or close()   v
//!      |                           |                            Stopping
//!      |                           v                               | stopped()
//!   Closed <---------------------- Parting <-----------------------+
//!             back end no longer Connected
//! ```

use std::collections::VecDeque;
use std::io;
use std::iter;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ringferry_packet::ether::Mac;
use ringferry_xen::domain::{DomId, Domain, PAGE};
use ringferry_xen::grant::{Access, GrantRef};
use ringferry_xen::netif::LayoutError;
use ringferry_xen::store::{Client, Event, Nodes, StoreError, path};

use super::features::{BackFeatures, FrontFeatures, MAX_QUEUES};
use super::rings::{ControlNodes, Ports, QueueNodes, RingNodes};
use super::state::State;
use crate::events::Events;
use crate::netfront::arena::Pages;
use crate::netfront::pair::Places;
use crate::netfront::static_grants::StaticGrants;
use crate::netfront::{Arena, ArenaError, Pair, PairConfig, PairError};
use crate::offload::Accepts;

/// Most events of the store that one poll takes before it returns to the caller.
const EVENTS: usize = 256;

/// The settings of a front end.
#[derive(Clone, Debug)]
pub struct FrontConfig {
    /// Class of the device in the store, usually `vif`.
    pub class: String,
    /// Number of the device in its class.
    pub device: u32,
    /// Most queues to use; the back end may support fewer.
    pub queues: u16,
    /// Settings of each queue pair.
    pub pair: PairConfig,
    /// The frames that this front end accepts.
    pub accepts: Accepts,
    /// Use one event channel per direction if the back end supports it.
    pub split_events: bool,
    /// Publish `feature-persistent`, so that the back end may keep grants mapped after their first
    /// use.
    pub persistent: bool,
    /// Register all grants on the control ring if the back end has one.
    pub static_grants: bool,
}

impl Default for FrontConfig {
    fn default() -> Self {
        Self {
            class: "vif".into(),
            device: 0,
            queues: 1,
            pair: PairConfig::default(),
            accepts: Accepts::ALL,
            split_events: true,
            persistent: true,
            static_grants: true,
        }
    }
}

/// The reason why a front end cannot proceed. If it happens while connecting, nothing is shared,
/// and the driver may be polled again.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// The store failed or refused a request.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The pages could not be granted.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The queues could not be created.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// The control ring could not be created.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Event channels could not be created or used.
    #[error("event channel: {0}")]
    Event(#[from] io::Error),
    /// The toolstack's nodes do not name a valid back end.
    #[error("{0} does not name a back end below the domain in backend-id")]
    Backend(String),
    /// The back end supports only page flipping.
    #[error("the back end cannot copy to the pages of a guest (feature-rx-copy); it is too old")]
    NoCopy,
}

/// A connected interface, for the threads that carry packets.
#[derive(Debug)]
pub struct Session {
    /// The queue pairs, with no page posted yet.
    pub pairs: Vec<Pair>,
    /// The frames that the back end accepts.
    pub accepts: Accepts,
    /// Our MAC address, if the toolstack assigned a valid one.
    pub mac: Option<Mac>,
    /// The features that the back end published.
    pub back: BackFeatures,
}

/// A change of the interface, with the caller's duty.
#[derive(Debug)]
pub enum FrontEvent {
    /// The interface is connected, and packets may flow.
    Connected(Session),
    /// Packets must stop: take the queues from their threads and give them to
    /// [`FrontendDriver::stopped`].
    Stop,
    /// Nothing is shared any more. If the back end comes back, [`FrontEvent::Connected`] follows,
    /// unless the caller [closed](FrontendDriver::close) the interface.
    Closed {
        /// Number of pages that the back end still has mapped, as far as that can be known.
        mapped: usize,
    },
    /// More events may wait: poll again before sleeping.
    Busy,
}

/// The phase of the front end's state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No back end has published its features.
    Waiting,
    /// Rings are published; the back end has not connected.
    Announced,
    /// The caller owns the queues.
    Running,
    /// The caller was asked to give the queues back.
    Stopping,
    /// The queues are gone; the back end has not closed.
    Parting,
    /// Nothing is shared with a back end.
    Closed,
}

/// The back end that the toolstack assigned.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Back {
    id: DomId,
    device: String,
}

/// The memory that is shared while connected.
#[derive(Debug)]
struct Shared {
    arena: Arena,
    statics: Option<StaticGrants>,
}

/// The xenbus driver of one front end.
#[derive(Debug)]
pub struct FrontendDriver {
    store: Client,
    domain: Arc<dyn Domain>,
    config: FrontConfig,
    /// Path of our nodes, relative to our domain's.
    device: String,
    back: Option<Back>,
    /// Token of the watch on the back end's state; each back end gets another.
    watch: u64,
    phase: Phase,
    shared: Option<Shared>,
    session: Option<Session>,
    /// True once the caller asked to close.
    closing: bool,
    /// True if something may have changed since the last advance.
    dirty: bool,
    /// True if the back end has written its state since the last advance, maybe the same as before.
    written: bool,
    events: VecDeque<FrontEvent>,
}

/// Token of the watch on the node that names the back end.
const BACKEND: u64 = 0;

impl FrontendDriver {
    /// Creates the driver of a device that the toolstack created in this domain's nodes.
    ///
    /// # Errors
    /// The connection to the store failed.
    pub fn new(mut store: Client, domain: Arc<dyn Domain>, config: FrontConfig) -> Result<Self, FrontError> {
        let device = format!("device/{}/{}", config.class, config.device);
        store.watch(&path::join(&device, "backend"), BACKEND)?;
        // An earlier driver of the device is gone, and its rings with it.
        State::Initialising.write(&mut store, &device)?;
        Ok(Self {
            store,
            domain,
            config,
            device,
            back: None,
            watch: BACKEND,
            phase: Phase::Waiting,
            shared: None,
            session: None,
            closing: false,
            dirty: true,
            written: false,
            events: VecDeque::new(),
        })
    }

    /// Returns the descriptors to poll, which are readable when [`poll`](FrontendDriver::poll) may
    /// have something to do.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let control = self.shared.as_ref().and_then(|shared| shared.statics.as_ref());
        iter::once(self.store.as_fd()).chain(control.map(|statics| statics.as_fd()))
    }

    /// Returns the number of grants that the back end keeps mapped because they were registered on
    /// the control ring.
    pub fn static_grants(&self) -> usize {
        let statics = self.shared.as_ref().and_then(|shared| shared.statics.as_ref());
        statics.map_or(0, StaticGrants::kept)
    }

    /// Returns the number of pages that are granted.
    pub fn granted(&self) -> usize {
        self.shared.as_ref().map_or(0, |shared| shared.arena.pages())
    }

    /// Begins to close the interface; later calls of [`FrontendDriver::poll`] carry it out.
    pub fn close(&mut self) {
        (self.closing, self.dirty) = (true, true);
    }

    /// Begins anew after [`close`](FrontendDriver::close) and [`FrontEvent::Closed`], as a driver does that was started again:
    /// [`FrontEvent::Connected`] follows once the back end has offered its features again.
    ///
    /// # Errors
    /// The connection to the store failed.
    pub fn reopen(&mut self) -> Result<(), FrontError> {
        (self.closing, self.dirty) = (false, true);
        if self.phase == Phase::Closed {
            State::Initialising.write(&mut self.store, &self.device)?;
            self.phase = Phase::Waiting;
        }
        Ok(())
    }

    /// Takes back the queues that [`FrontEvent::Stop`] asked for, and frees them. Packets in them
    /// are lost.
    ///
    /// # Errors
    /// The connection to the store failed.
    pub fn stopped(&mut self, pairs: Vec<Pair>) -> Result<(), FrontError> {
        drop(pairs);
        self.dirty = true;
        if self.phase == Phase::Stopping {
            State::Closing.write(&mut self.store, &self.device)?;
            self.phase = Phase::Parting;
        }
        Ok(())
    }

    /// Processes events of the store and the control ring. Call it until it returns `None`, then
    /// wait for one of [`fds`](FrontendDriver::fds). It blocks only for answers of the store.
    ///
    /// # Errors
    /// Any [`FrontError`].
    pub fn poll(&mut self) -> Result<Option<FrontEvent>, FrontError> {
        // Events that arrive while we wait for an answer of the store are buffered here, and the
        // descriptor does not show them.
        let mut told = !self.take_events()?;
        if let Some(statics) = self.shared.as_mut().and_then(|shared| shared.statics.as_mut()) {
            statics.poll()?;
        }
        // Each iteration advances one phase; a back end that changes its state all the time cannot
        // keep us here.
        for _ in 0..8 {
            if !std::mem::take(&mut self.dirty) {
                break;
            }
            if let Err(error) = self.advance() {
                // It is tried again at the next poll.
                self.dirty = true;
                return Err(error);
            }
            told = true;
        }
        if let Some(event) = self.events.pop_front() {
            return Ok(Some(event));
        }
        Ok((told || self.dirty).then_some(FrontEvent::Busy))
    }

    /// Takes events of the store; returns true if none is left.
    fn take_events(&mut self) -> Result<bool, FrontError> {
        for _ in 0..EVENTS {
            let Some(event) = self.store.event()? else { return Ok(true) };
            self.dirty = true;
            match event {
                Event::Changed { token: BACKEND, .. } => self.find_back()?,
                Event::Changed { token, .. } => self.written |= token == self.watch,
                Event::Flood => {
                    self.find_back()?;
                    self.written = true;
                }
            }
        }
        Ok(false)
    }

    /// Reads which back end is assigned, and watches its state.
    fn find_back(&mut self) -> Result<(), FrontError> {
        let node = path::join(&self.device, "backend");
        let back =
            match (self.store.text(&node)?, self.store.number(&path::join(&self.device, "backend-id"))?) {
                (Some(device), Some(id)) => {
                    let back = Back { id: DomId(id), device };
                    if path::check(&back.device).is_err()
                        || !path::is_within(&back.device, &path::domain(back.id))
                    {
                        return Err(FrontError::Backend(back.device));
                    }
                    Some(back)
                }
                _ => None,
            };
        if back == self.back {
            return Ok(());
        }
        if let Some(old) = std::mem::replace(&mut self.back, back) {
            self.store.unwatch(&path::join(&old.device, "state"), self.watch)?;
        }
        if let Some(new) = &self.back {
            self.watch += 1;
            self.store.watch(&path::join(&new.device, "state"), self.watch)?;
        }
        Ok(())
    }

    /// Reads the back end's state and advances by one phase at most.
    fn advance(&mut self) -> Result<(), FrontError> {
        let back = match &self.back {
            Some(back) => State::read(&mut self.store, &back.device)?,
            None => None,
        };
        let written = std::mem::take(&mut self.written);
        let leaving = matches!(back, None | Some(State::Closing | State::Closed));
        match self.phase {
            Phase::Waiting if self.closing => self.revoke_all()?,
            Phase::Waiting if back == Some(State::InitWait) => self.connect()?,
            Phase::Announced if back == Some(State::Connected) && !self.closing => {
                self.phase = Phase::Running;
                self.events.extend(self.session.take().map(FrontEvent::Connected));
                self.announce()?;
            }
            Phase::Announced if leaving || self.closing => {
                self.session = None;
                State::Closing.write(&mut self.store, &self.device)?;
                self.phase = Phase::Parting;
                self.dirty = true;
            }
            Phase::Running if leaving || self.closing => {
                self.phase = Phase::Stopping;
                self.events.push_back(FrontEvent::Stop);
            }
            // The back end may be another that was started in its place and does not know our
            // grants.
            Phase::Running if written && back == Some(State::Connected) => self.announce()?,
            // The back end has seen that we close, or it is another and has nothing of ours.
            Phase::Parting if back != Some(State::Connected) => self.revoke_all()?,
            Phase::Closed if !self.closing && matches!(back, Some(State::Initialising | State::InitWait)) => {
                State::Initialising.write(&mut self.store, &self.device)?;
                self.phase = Phase::Waiting;
                self.dirty = true;
            }
            _ => {}
        }
        Ok(())
    }

    fn announce(&mut self) -> Result<(), FrontError> {
        let statics = self.shared.as_mut().and_then(|shared| shared.statics.as_mut());
        Ok(statics.map_or(Ok(()), StaticGrants::announce)?)
    }

    /// Revokes everything that was shared, and publishes that we are closed.
    fn revoke_all(&mut self) -> Result<(), FrontError> {
        let mapped = self.shared.take().map_or(0, |shared| {
            drop(shared.statics);
            shared.arena.end()
        });
        let device = &self.device;
        self.store.transaction(|nodes| {
            let state = path::join(device, "state");
            if nodes.read(&state)?.is_some() {
                RingNodes::clear(nodes, device)?;
                nodes.write(&state, State::Closed.number().to_string())?;
            }
            Ok(())
        })?;
        self.phase = Phase::Closed;
        self.dirty = true;
        self.events.push_back(FrontEvent::Closed { mapped });
        Ok(())
    }

    /// Shares our memory with the back end, and publishes where it is.
    fn connect(&mut self) -> Result<(), FrontError> {
        let Some(Back { id, device: back_device }) = self.back.clone() else { return Ok(()) };
        let back = BackFeatures::read(&mut self.store, &back_device)?;
        if !back.rx_copy {
            return Err(FrontError::NoCopy);
        }
        let count = self.config.queues.min(back.max_queues).clamp(1, MAX_QUEUES);
        let control = self.config.static_grants && back.ctrl_ring;
        let arena = self.arena(id, count, control)?;
        let mut pairs = Vec::new();
        let mut queues = Vec::new();
        for index in 0..usize::from(count) {
            let places = places(&arena, index);
            let (ports, events) = self.events(id, self.config.split_events && back.split_events)?;
            let ring = |addr| arena.page(addr).map(|(_, gref)| gref).ok_or(LayoutError::Page);
            let (tx_ring, rx_ring) = (ring(places.rings)?, ring(places.rings + PAGE as u64)?);
            pairs.push(Pair::new(&arena, places, back.accepts, events, &self.config.pair)?);
            queues.push(QueueNodes { tx_ring, rx_ring, ports });
        }
        let mut rings = RingNodes { queues, control: None };
        let mut statics = None;
        if control {
            let (nodes, made) = self.control(id, &arena, count)?;
            (rings.control, statics) = (Some(nodes), Some(made));
        }
        let features = FrontFeatures {
            accepts: self.config.accepts,
            rx_copy: true,
            rx_notify: true,
            persistent: self.config.persistent,
            // The guest wants every flooded frame: filters are for guests with many neighbours and
            // little time.
            multicast_filter: false,
        };
        let device = &self.device;
        self.store.transaction(|nodes| {
            rings.write(nodes, device, back.max_queues > 1)?;
            features.write(nodes, device)?;
            nodes.write(&path::join(device, "state"), State::Connected.number().to_string())
        })?;
        let mac = match self.store.text(&path::join(&self.device, "mac")) {
            Err(StoreError::Malformed { .. }) => None,
            text => text?.and_then(|text| text.parse().ok()),
        };
        self.session = Some(Session { pairs, accepts: back.accepts, mac, back });
        self.shared = Some(Shared { arena, statics });
        self.phase = Phase::Announced;
        self.dirty = true;
        Ok(())
    }

    /// Allocates the memory of `queues` queues: the rings of all in one run, then the pages of each
    /// queue.
    fn arena(&self, back: DomId, queues: u16, control: bool) -> Result<Arena, FrontError> {
        let pair = &self.config.pair;
        let control = if control { 2 } else { 0 };
        let rings = usize::from(queues) * PairConfig::RINGS.count + control;
        let mut pages = vec![Pages { count: rings, access: Access::Write }];
        for _ in 0..queues {
            pages.extend([pair.transmit_pages(), pair.receive_pages()]);
        }
        let mut table = self.domain.grants().map_err(FrontError::Event)?;
        Ok(Arena::new(&mut *table, back, &pages)?)
    }

    fn events(&self, back: DomId, split: bool) -> Result<(Ports, Events), FrontError> {
        let (port, channel) = self.domain.alloc_unbound(back)?;
        if !split {
            return Ok((Ports::Shared(port), Events::Shared(channel)));
        }
        let (rx, rx_channel) = self.domain.alloc_unbound(back)?;
        Ok((Ports::Split { tx: port, rx }, Events::Split { tx: channel, rx: rx_channel }))
    }

    /// Creates the control ring that registers the grants of `queues` queues.
    fn control(
        &self,
        back: DomId,
        arena: &Arena,
        queues: u16,
    ) -> Result<(ControlNodes, StaticGrants), FrontError> {
        let first = arena.start(0) + (usize::from(queues) * PairConfig::RINGS.count * PAGE) as u64;
        let (ring, ring_ref) = arena.page(first).ok_or(LayoutError::Page)?;
        let list = arena.page(first + PAGE as u64).ok_or(LayoutError::Page)?;
        let (port, channel) = self.domain.alloc_unbound(back)?;
        let grants = (0..queues.into()).map(|index| self.grants(arena, index)).collect();
        let statics = StaticGrants::new(ring, channel, list, grants)?;
        Ok((ControlNodes { ring: ring_ref, port }, statics))
    }

    /// Lists the grants of a queue, alternating between both directions so that any number of them
    /// serves both, and in the order in which they are first used.
    fn grants(&self, arena: &Arena, index: usize) -> Vec<(GrantRef, Access)> {
        let Places { transmit, receive, .. } = places(arena, index);
        let pair = &self.config.pair;
        let mut sent = arena.map().grants(transmit, pair.transmit_pages().count);
        let mut received = arena.map().grants(receive, pair.receive_pages().count);
        let mut grants = Vec::new();
        loop {
            let before = grants.len();
            grants.extend(sent.next().into_iter().chain(received.next()));
            if grants.len() == before {
                return grants;
            }
        }
    }
}

/// Returns the places of a queue in an arena from [`FrontendDriver::arena`].
fn places(arena: &Arena, index: usize) -> Places {
    let rings = arena.start(0) + (index * PairConfig::RINGS.count * PAGE) as u64;
    Places { rings, transmit: arena.start(1 + 2 * index), receive: arena.start(2 + 2 * index) }
}
