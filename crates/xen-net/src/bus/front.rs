//! The front end's side of one interface: finds its back end, shares its memory, says where, and takes all back in the end.

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
use crate::netfront::statics::Statics;
use crate::netfront::{Arena, ArenaError, Pair, PairConfig, PairError};
use crate::offload::Accepts;

/// Events of the store that are taken before the caller gets a word in.
const EVENTS: usize = 256;

/// How a front end is made.
#[derive(Clone, Debug)]
pub struct FrontConfig {
    /// Class of the device, usually `vif`.
    pub class: String,
    /// Its number among those of this class.
    pub device: u32,
    /// Most queues; the back end may have fewer.
    pub queues: u16,
    /// How each is made.
    pub pair: PairConfig,
    /// What may be sent to us.
    pub accepts: Accepts,
    /// One event channel for each direction, if the back end can.
    pub split_events: bool,
    /// Say that grants stay (`feature-persistent`): the back end may keep them mapped as it meets them.
    pub persistent: bool,
    /// Hand all grants over on the control ring, if the back end has one.
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

/// Why a front end cannot go on. Nothing is shared when it happens while connecting, and it may be stepped again.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Pages could not be shared.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// Queues could not be made.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// The control ring could not be made.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Event channels could not be made or used.
    #[error("event channel: {0}")]
    Event(#[from] io::Error),
    /// The toolstack's nodes make no sense.
    #[error("{0} does not name a back end below the domain in backend-id")]
    Backend(String),
    /// The back end is older than this interface.
    #[error("the back end cannot copy to the pages of a guest (feature-rx-copy); it is too old")]
    NoCopy,
}

/// What is connected: for the threads that carry packets.
#[derive(Debug)]
pub struct Session {
    /// The queues, with nothing posted yet.
    pub pairs: Vec<Pair>,
    /// What may be sent.
    pub accepts: Accepts,
    /// Our address, as the toolstack has chosen it.
    pub mac: Option<Mac>,
    /// What the back end offers.
    pub back: BackFeatures,
}

/// What is to be done, or was.
#[derive(Debug)]
pub enum FrontEvent {
    /// Packets may flow.
    Connected(Session),
    /// Packets must stop: take the queues from their threads and give them to [`Frontend::stopped`].
    Stop,
    /// Nothing is shared any more. If the back end comes again, so does [`FrontEvent::Connected`], unless it was us who
    /// [closed](Frontend::close).
    Closed {
        /// Pages that the back end still has mapped, as far as that can be known.
        mapped: usize,
    },
    /// There is more to look at: step again before waiting.
    Busy,
}

/// Where we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// For a back end to offer something.
    Waiting,
    /// For it to take up what we have announced.
    Announced,
    /// The caller has the queues.
    Running,
    /// The caller was asked to give them back.
    Stopping,
    /// For the back end to let go.
    Parting,
    /// Nothing is shared.
    Closed,
}

/// The back end, as the toolstack has named it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Back {
    id: DomId,
    device: String,
}

/// What we share while connected.
#[derive(Debug)]
struct Shared {
    arena: Arena,
    statics: Option<Statics>,
}

/// A front end.
#[derive(Debug)]
pub struct Frontend {
    store: Client,
    domain: Arc<dyn Domain>,
    config: FrontConfig,
    /// Our nodes, relative to our domain's.
    device: String,
    back: Option<Back>,
    /// Number of the watch of the back end's state: each has another.
    watch: u64,
    phase: Phase,
    shared: Option<Shared>,
    session: Option<Session>,
    /// The caller wants to close.
    closing: bool,
    /// Something may have changed.
    dirty: bool,
    /// The back end has written its state, maybe the same as before.
    written: bool,
    events: VecDeque<FrontEvent>,
}

/// Token of the watch of where the back end is.
const BACKEND: u64 = 0;

impl Frontend {
    /// A front end for the device that the toolstack has made in this domain's nodes.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub fn new(mut store: Client, domain: Arc<dyn Domain>, config: FrontConfig) -> Result<Self, FrontError> {
        let device = format!("device/{}/{}", config.class, config.device);
        store.watch(&path::join(&device, "backend"), BACKEND)?;
        // Whoever was here before is gone, and its rings with it.
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

    /// What to poll: readable when there may be something to [step](Frontend::step) for.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let control = self.shared.as_ref().and_then(|shared| shared.statics.as_ref());
        iter::once(self.store.as_fd()).chain(control.map(|statics| statics.as_fd()))
    }

    /// Grants that the back end keeps, handed over on the control ring.
    pub fn static_grants(&self) -> usize {
        let statics = self.shared.as_ref().and_then(|shared| shared.statics.as_ref());
        statics.map_or(0, Statics::kept)
    }

    /// Pages that are granted.
    pub fn granted(&self) -> usize {
        self.shared.as_ref().map_or(0, |shared| shared.arena.pages())
    }

    /// Begins to close the interface; [`Frontend::step`] says how it goes on.
    pub fn close(&mut self) {
        (self.closing, self.dirty) = (true, true);
    }

    /// Takes the queues back that [`FrontEvent::Stop`] asked for, and frees them. Packets in them are lost.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub fn stopped(&mut self, pairs: Vec<Pair>) -> Result<(), FrontError> {
        drop(pairs);
        self.dirty = true;
        if self.phase == Phase::Stopping {
            State::Closing.write(&mut self.store, &self.device)?;
            self.phase = Phase::Parting;
        }
        Ok(())
    }

    /// Looks at the store and the control ring. Call it until it returns `None`, then wait for one of
    /// [`fds`](Frontend::fds). Never waits, but for answers of the store.
    ///
    /// # Errors
    /// See [`FrontError`].
    pub fn step(&mut self) -> Result<Option<FrontEvent>, FrontError> {
        // What comes while the store is asked waits with us, and the descriptor says nothing of it.
        let mut told = !self.take_events()?;
        if let Some(statics) = self.shared.as_mut().and_then(|shared| shared.statics.as_mut()) {
            statics.step()?;
        }
        // Each turn goes one phase on; a back end that changes its mind all the time does not keep us.
        for _ in 0..8 {
            if !std::mem::take(&mut self.dirty) {
                break;
            }
            self.look()?;
            told = true;
        }
        if let Some(event) = self.events.pop_front() {
            return Ok(Some(event));
        }
        Ok((told || self.dirty).then_some(FrontEvent::Busy))
    }

    /// Notes what the store has told; whether that was all.
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

    /// Reads where the back end is, and watches its state.
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

    /// Goes on from where we are, by one phase at most.
    fn look(&mut self) -> Result<(), FrontError> {
        let back = match &self.back {
            Some(back) => State::read(&mut self.store, &back.device)?,
            None => None,
        };
        let written = std::mem::take(&mut self.written);
        let leaving = matches!(back, None | Some(State::Closing | State::Closed));
        match self.phase {
            Phase::Waiting if self.closing => self.finish()?,
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
            // It may be another that was started in its place, and knows of no grants.
            Phase::Running if written && back == Some(State::Connected) => self.announce()?,
            // It has seen that we close, or it is another and has nothing of ours.
            Phase::Parting if back != Some(State::Connected) => self.finish()?,
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
        Ok(statics.map_or(Ok(()), Statics::announce)?)
    }

    /// Takes back all that was shared.
    fn finish(&mut self) -> Result<(), FrontError> {
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

    /// Shares our memory with the back end, and says where.
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
            // All that the switch floods is wanted: filters are for guests with many neighbours and little time.
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

    /// Memory for so many queues: rings of all in one piece, then the pages of each.
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

    /// The control ring, for handing over the grants of so many queues.
    fn control(
        &self,
        back: DomId,
        arena: &Arena,
        queues: u16,
    ) -> Result<(ControlNodes, Statics), FrontError> {
        let first = arena.start(0) + (usize::from(queues) * PairConfig::RINGS.count * PAGE) as u64;
        let (ring, ring_ref) = arena.page(first).ok_or(LayoutError::Page)?;
        let list = arena.page(first + PAGE as u64).ok_or(LayoutError::Page)?;
        let (port, channel) = self.domain.alloc_unbound(back)?;
        let grants = (0..queues.into()).map(|index| self.grants(arena, index)).collect();
        let statics = Statics::new(ring, channel, list, grants)?;
        Ok((ControlNodes { ring: ring_ref, port }, statics))
    }

    /// The grants of a queue: of both directions in turn, so that any number of them serves both; those first that are used
    /// first.
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

/// Where a queue lies in an arena that was made by [`Frontend::arena`].
fn places(arena: &Arena, index: usize) -> Places {
    let rings = arena.start(0) + (index * PairConfig::RINGS.count * PAGE) as u64;
    Places { rings, transmit: arena.start(1 + 2 * index), receive: arena.start(2 + 2 * index) }
}
