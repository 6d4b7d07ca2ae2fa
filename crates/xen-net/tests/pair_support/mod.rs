//! The test bed of both halves: fake domains, a store, a toolstack that creates interfaces, and
//! both halves of one.

#![allow(dead_code, reason = "each test program uses a part of it")]

pub mod wire;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ringferry_xen::domain::{DomId, Domain};
use ringferry_xen::process::ProcessDomain;
use ringferry_xen::store::{Client, NodeAccess, Nodes, Permission, path};
use ringferry_xen_net::netfront::PairConfig;
use ringferry_xen_net::xenbus::{
    BackConfig, BackEvent, BackendDriver, Connection, FrontConfig, FrontEvent, FrontendDriver, Polled,
    Refusal, Session, State, VifId,
};
use ringferry_xen_sim::Broker;
use ringferry_xen_sim::fake::Fake;
use ringferry_xen_sim::store::{Limits, Running, Server};

/// Longest wait of a test for an event that must come.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The domain of all back ends, and the first of those with front ends.
pub const BACK: DomId = DomId(2);
pub const FRONT: DomId = DomId(5);

pub const ID: VifId = VifId { front: FRONT, device: 0 };

/// Few and small buffers: tests are about many interfaces, not large ones.
pub fn small_pair() -> PairConfig {
    PairConfig { receive: 300, small: 64, frames: 32, large: 4, ..PairConfig::default() }
}

/// The provider of grants and event channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    Fake,
    Process,
}

/// A simulated host with hypervisor, store and toolstack.
pub struct Machine {
    pub fake: Fake,
    domains: Mutex<BTreeMap<DomId, ProcessDomain>>,
    broker: Option<(Broker, tempfile::TempDir)>,
    pub store: Running,
    /// The toolstack's connection to the store, as domain 0.
    pub tools: Client,
}

impl Machine {
    pub fn new() -> Self {
        Self::of(Provider::Fake)
    }

    pub fn of(provider: Provider) -> Self {
        let store = Server::new(Limits::DEFAULT).unwrap().start().unwrap();
        let tools = store.client(DomId(0)).unwrap();
        let broker = (provider == Provider::Process).then(|| {
            let dir = tempfile::tempdir().unwrap();
            (Broker::bind(dir.path().join("broker")).unwrap(), dir)
        });
        let machine = Self { fake: Fake::new(), domains: Mutex::default(), broker, store, tools };
        machine.store.introduce(BACK);
        machine
    }

    pub fn domain(&self, id: DomId) -> Arc<dyn Domain> {
        let Some((_, dir)) = &self.broker else { return Arc::new(self.fake.domain(id)) };
        let connect = || ProcessDomain::connect(dir.path().join("broker"), Some(id)).unwrap();
        Arc::new(self.domains.lock().unwrap().entry(id).or_insert_with(connect).clone())
    }

    /// A check for the end of a test: nothing is granted, mapped or open.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        let Some((broker, _)) = &self.broker else { return self.fake.assert_nothing_left() };
        // The broker hears of it a little later.
        let left = || (broker.granted_pages(), broker.mapped_pages(), broker.open_ports());
        let deadline = Instant::now() + PATIENCE;
        while left() != (0, 0, 0) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(left(), (0, 0, 0), "granted pages, mapped pages, open ports");
    }

    pub fn client(&self, id: DomId) -> Client {
        self.store.client(id).unwrap()
    }

    /// Makes an interface, as a toolstack does.
    pub fn plug(&mut self, id: VifId) {
        self.store.introduce(id.front);
        let (back, front) = nodes(id);
        let (back_id, front_id) = (BACK.to_string(), id.front.to_string());
        let own = |owner, other| {
            [Permission::new(owner, NodeAccess::None), Permission::new(other, NodeAccess::Read)]
        };
        self.tools
            .transaction(|t| {
                for (device, permissions) in [(&back, own(BACK, id.front)), (&front, own(id.front, BACK))] {
                    t.remove(device)?;
                    t.mkdir(device)?;
                    t.set_permissions(device, &permissions)?;
                }
                let handle = id.device.to_string();
                for (device, key, value) in [
                    (&back, "frontend", front.as_str()),
                    (&back, "frontend-id", &front_id),
                    (&back, "online", "1"),
                    (&back, "handle", &handle),
                    (&back, "mac", "00:16:3e:00:00:09"),
                    (&back, "state", "1"),
                    (&front, "backend", &back),
                    (&front, "backend-id", &back_id),
                    (&front, "handle", &handle),
                    (&front, "mac", "00:16:3e:00:00:09"),
                    (&front, "state", "1"),
                ] {
                    t.write(&path::join(device, key), value)?;
                }
                Ok(())
            })
            .unwrap();
    }

    /// Asks the back end to let go, as a toolstack does.
    pub fn unplug(&mut self, id: VifId) {
        let (back, _) = nodes(id);
        self.tools
            .transaction(|t| {
                t.write(&path::join(&back, "online"), "0")?;
                t.write(&path::join(&back, "state"), "5")
            })
            .unwrap();
    }

    pub fn remove(&mut self, node: &str) {
        self.tools.remove(node).unwrap();
    }

    pub fn write(&mut self, node: &str, value: impl AsRef<[u8]>) {
        self.tools.write(node, value).unwrap();
    }

    /// States of back end and front end.
    pub fn states(&mut self, id: VifId) -> (Option<State>, Option<State>) {
        let (back, front) = nodes(id);
        (State::read(&mut self.tools, &back).unwrap(), State::read(&mut self.tools, &front).unwrap())
    }

    pub fn front(&self, id: VifId, config: FrontConfig) -> FrontendDriver {
        let config = FrontConfig { device: id.device, ..config };
        FrontendDriver::new(self.client(id.front), self.domain(id.front), config).unwrap()
    }

    pub fn plugs(&self, config: BackConfig) -> BackendDriver {
        BackendDriver::new(self.client(BACK), self.domain(BACK), config).unwrap()
    }
}

/// Nodes of the back end and of the front end.
pub fn nodes(id: VifId) -> (String, String) {
    (path::backend(BACK, "vif", id.front, id.device), path::frontend(id.front, "vif", id.device))
}

pub fn front_config() -> FrontConfig {
    FrontConfig { pair: small_pair(), ..FrontConfig::default() }
}

/// Both halves of one interface, which do what they are asked to, and what has happened.
#[derive(Debug)]
pub struct Both {
    pub front: Option<FrontendDriver>,
    pub plugs: Option<BackendDriver>,
    pub session: Option<Session>,
    pub connection: Option<Box<Connection>>,
    pub connected: usize,
    pub closed: Vec<usize>,
    pub refused: Vec<Refusal>,
    pub removed: usize,
    /// Mapped pages of the front end's at each time that the back end had let go.
    pub parted: usize,
}

impl Both {
    pub fn new(front: Option<FrontendDriver>, plugs: Option<BackendDriver>) -> Self {
        Self {
            front,
            plugs,
            session: None,
            connection: None,
            connected: 0,
            closed: Vec::new(),
            refused: Vec::new(),
            removed: 0,
            parted: 0,
        }
    }

    /// Closes the front end, whose queues are `session`, and ends both; nothing may be left.
    #[track_caller]
    pub fn end(mut self, session: Session, machine: Machine) {
        self.session = Some(session);
        self.front.as_mut().unwrap().close();
        self.until("the end", |both| both.closed.len() == 1);
        assert_eq!(self.closed, [0]);
        drop(self);
        machine.assert_nothing_left();
    }

    /// Both, until there is nothing more to be done for now.
    pub fn step(&mut self) {
        if let Some(front) = &mut self.front {
            while let Some(event) = front.poll().unwrap() {
                match event {
                    FrontEvent::Connected(session) => {
                        self.session = Some(session);
                        self.connected += 1;
                    }
                    FrontEvent::Stop => {
                        let pairs = self.session.take().map_or(Vec::new(), |session| session.pairs);
                        front.stopped(pairs).unwrap();
                    }
                    FrontEvent::Closed { mapped } => self.closed.push(mapped),
                    FrontEvent::Busy => {}
                }
            }
        }
        let Some(plugs) = &mut self.plugs else { return };
        loop {
            match plugs.poll().unwrap() {
                Polled::Vif(id, BackEvent::Connect(connection)) => {
                    self.connection = Some(connection);
                    plugs.connected(id).unwrap();
                }
                Polled::Vif(id, BackEvent::Disconnect) => {
                    self.connection = None;
                    self.parted += 1;
                    plugs.disconnected(id);
                }
                Polled::Vif(_, BackEvent::Refused(refusal)) => self.refused.push(refusal),
                Polled::Vif(_, BackEvent::Removed) => self.removed += 1,
                Polled::Busy => {}
                Polled::Idle => return,
            }
        }
    }

    /// Steps until something is so.
    #[track_caller]
    pub fn until(&mut self, what: &str, mut so: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.step();
            if so(self) {
                return;
            }
            assert!(Instant::now() < deadline, "{what} never came: {self:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Steps until both are connected.
    #[track_caller]
    pub fn connect(&mut self) {
        self.until("a connection", |both| both.session.is_some() && both.connection.is_some());
    }
}
