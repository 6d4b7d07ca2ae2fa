//! A machine whose domains are processes, and guests in it with our own front end.

use std::collections::VecDeque;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_memory::Area;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;
use ringferry_xen::domain::{DomId, Domain, PAGE};
use ringferry_xen::event::EventChannel;
use ringferry_xen::grant::{Access, GrantRef, Granted};
use ringferry_xen::netif::FrontRing;
use ringferry_xen::netif::wire::{TxFlags, TxRequest, TxSlot};
use ringferry_xen::process::ProcessDomain;
use ringferry_xen::store::{Client, NodeAccess, Nodes, Permission, path};
use ringferry_xen_net::netfront::{Pair, PairConfig};
use ringferry_xen_net::xenbus::{FrontConfig, FrontEvent, FrontendDriver, Session};
use ringferry_xen_sim::Broker;
use ringferry_xen_sim::store::{Limits, Running, Server};

use crate::frames::{frame, mac};
use crate::guest::Received;
use crate::process::{PATIENCE, eventually};
use crate::switch::{Place, Switch, program};

/// The domain of the switch.
pub const BACK: DomId = DomId(0);

/// How often what nobody announces is looked at.
const LOOK: Duration = Duration::from_micros(200);

/// A machine: hypervisor, store and toolstack.
pub struct Machine {
    pub broker: Broker,
    pub store: Running,
    pub tools: Client,
    broker_socket: String,
    store_socket: String,
}

impl Machine {
    /// A machine with its sockets in `place`.
    pub fn new(place: &Place) -> Machine {
        let socket = |name: &str| place.path().join(name).display().to_string();
        let (broker_socket, store_socket) = (socket("broker"), socket("store"));
        let store = Server::new(Limits::DEFAULT).unwrap().start().unwrap();
        store.listen(&store_socket, BACK).unwrap();
        let tools = store.client(DomId(0)).unwrap();
        Machine { broker: Broker::bind(&broker_socket).unwrap(), store, tools, broker_socket, store_socket }
    }

    /// The flag for a port of the switch, with more keys.
    pub fn port(&self, keys: &str) -> String {
        let Machine { broker_socket, store_socket, .. } = self;
        let comma = if keys.is_empty() { "" } else { "," };
        format!("xen-vif:process,broker={broker_socket},store={store_socket}{comma}{keys}")
    }

    /// The command for our front end program, in a network namespace of its own, as domain `number`.
    pub fn netfront(&self, number: u16, words: &[&str]) -> Command {
        let mut command = Command::new("unshare");
        command.arg("--net").arg(program()).args(["netfront", "--tap", "xn0"]);
        command.args(["--provider", "process", "--broker", &self.broker_socket, "--store"]);
        self.store.introduce(DomId(number));
        let socket = format!("{}-{number}", self.store_socket);
        self.store.listen(&socket, DomId(number)).unwrap();
        command.args([&socket, "--domain", &number.to_string()]).args(words);
        command
    }

    /// The command for a switch with vhost-user ports `guests` and a port for Xen guests.
    pub fn run(&self, place: &Place, guests: &[&str], keys: &str, workers: u16) -> Command {
        let mut command = place.run(guests);
        command.args(["--port", &self.port(keys), "--workers", &workers.to_string()]);
        command
    }

    /// Makes an interface, as a toolstack does.
    pub fn create(&mut self, domain: DomId, device: u32) {
        self.store.introduce(domain);
        let (back, front) = nodes(domain, device);
        let own = |owner, other| {
            [Permission::new(owner, NodeAccess::None), Permission::new(other, NodeAccess::Read)]
        };
        let (device, front_id) = (device.to_string(), domain.to_string());
        self.tools
            .transaction(|t| {
                for (node, permissions) in [(&back, own(BACK, domain)), (&front, own(domain, BACK))] {
                    t.remove(node)?;
                    t.mkdir(node)?;
                    t.set_permissions(node, &permissions)?;
                }
                for (node, key, value) in [
                    (&back, "frontend", front.as_str()),
                    (&back, "frontend-id", &front_id),
                    (&back, "online", "1"),
                    (&back, "handle", &device),
                    (&back, "mac", "00:16:3e:00:00:09"),
                    (&back, "state", "1"),
                    (&front, "backend", &back),
                    (&front, "backend-id", "0"),
                    (&front, "handle", &device),
                    (&front, "mac", "00:16:3e:00:00:09"),
                    (&front, "state", "1"),
                ] {
                    t.write(&path::join(node, key), value)?;
                }
                Ok(())
            })
            .unwrap();
    }

    /// Asks the back end to let go, as a toolstack does.
    pub fn unplug(&mut self, domain: DomId, device: u32) {
        let (back, _) = nodes(domain, device);
        self.tools
            .transaction(|t| {
                t.write(&path::join(&back, "online"), "0")?;
                t.write(&path::join(&back, "state"), "5")
            })
            .unwrap();
    }

    /// Removes an interface from the store.
    pub fn destroy(&mut self, domain: DomId, device: u32) {
        let (back, front) = nodes(domain, device);
        self.tools.remove(&back).unwrap();
        self.tools.remove(&front).unwrap();
    }

    /// A guest in domain `number`, whose interface is not connected yet.
    pub fn guest(&self, number: u16, config: FrontConfig) -> DomU {
        let domain = eventually("the domain's number is free", || {
            ProcessDomain::connect(&self.broker_socket, Some(DomId(number))).ok()
        });
        self.guest_in(Arc::new(domain), config)
    }

    fn guest_in(&self, domain: Arc<ProcessDomain>, config: FrontConfig) -> DomU {
        let number = domain.id().0;
        let client = self.store.client(DomId(number)).unwrap();
        DomU {
            mac: mac(number as u8),
            front: FrontendDriver::new(client, domain, config).unwrap(),
            session: None,
            inbox: VecDeque::new(),
            closed: Vec::new(),
            connected: 0,
        }
    }

    /// A check for the end of a test: nothing is granted, mapped or open.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        let broker = &self.broker;
        let left = || (broker.granted_pages(), broker.mapped_pages(), broker.open_ports());
        let deadline = Instant::now() + PATIENCE;
        while left() != (0, 0, 0) && Instant::now() < deadline {
            std::thread::sleep(LOOK);
        }
        assert_eq!(left(), (0, 0, 0), "granted pages, mapped pages, open ports");
    }
}

/// Nodes of the back end and of the front end.
pub fn nodes(domain: DomId, device: u32) -> (String, String) {
    (path::backend(BACK, "vif", domain, device), path::frontend(domain, "vif", device))
}

/// A configuration with few and small buffers.
pub fn small(queues: u16) -> FrontConfig {
    let pair = PairConfig { receive: 300, small: 64, frames: 64, large: 8, ..PairConfig::default() };
    FrontConfig { queues, pair, ..FrontConfig::default() }
}

/// A guest that keeps the rules. It polls.
pub struct DomU {
    pub mac: Mac,
    pub front: FrontendDriver,
    pub session: Option<Session>,
    /// Received frames with the queues they came on.
    inbox: VecDeque<(usize, Received)>,
    /// The pages that were still mapped each time that the interface was closed.
    pub closed: Vec<usize>,
    pub connected: usize,
}

impl DomU {
    /// Polls the xenbus driver and acts on its events.
    pub fn step(&mut self) {
        while let Some(event) = self.front.poll().unwrap() {
            match event {
                FrontEvent::Connected(mut session) => {
                    for pair in &mut session.pairs {
                        if pair.refill() {
                            pair.events().notify_receive().unwrap();
                        }
                    }
                    self.session = Some(session);
                    self.connected += 1;
                }
                FrontEvent::Stop => {
                    let pairs = self.session.take().map_or(Vec::new(), |session| session.pairs);
                    self.front.stopped(pairs).unwrap();
                }
                FrontEvent::Closed { mapped } => self.closed.push(mapped),
                FrontEvent::Busy => {}
            }
        }
    }

    /// Steps until something is so.
    #[track_caller]
    pub fn until(&mut self, what: &str, mut so: impl FnMut(&mut DomU) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.step();
            if so(self) {
                return;
            }
            assert!(Instant::now() < deadline, "guest {}: {what} never came", self.mac);
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until packets flow.
    #[track_caller]
    pub fn connect(&mut self) {
        self.until("a connection", |guest| guest.session.is_some());
    }

    /// Connects, and waits until the switch serves `port` and, where grants are handed over, has taken all.
    #[track_caller]
    pub fn plug(&mut self, switch: &Switch<'_>, port: &str) {
        self.connect();
        eventually("the queues run", || {
            self.step();
            let queues = switch.show().ports.into_iter().find(|shown| shown.name == port)?.queues;
            (!queues.is_empty() && queues.iter().all(|queue| queue.started)).then_some(())
        });
    }

    pub fn pair(&mut self, queue: usize) -> &mut Pair {
        &mut self.session.as_mut().unwrap().pairs[queue]
    }

    /// Puts a frame into a queue, waiting for room, and shows it.
    #[track_caller]
    pub fn send_on(&mut self, queue: usize, header: &Header, frame: &[u8]) {
        let deadline = Instant::now() + PATIENCE;
        let pair = self.pair(queue);
        pair.reclaim();
        while !pair.send_frame(header, frame) {
            assert!(Instant::now() < deadline, "the back end takes nothing");
            assert_eq!(pair.fault(), None);
            std::thread::sleep(LOOK);
            pair.reclaim();
        }
        if pair.transmit.flush() {
            pair.events().notify_transmit().unwrap();
        }
    }

    /// Sends a frame without offloads.
    #[track_caller]
    pub fn send(&mut self, frame: &[u8]) {
        self.send_on(0, &Header::default(), frame);
    }

    /// Takes what has arrived into the inbox.
    pub fn pump(&mut self) {
        let DomU { session: Some(session), inbox, .. } = self else { return };
        for (queue, pair) in session.pairs.iter_mut().enumerate() {
            pair.events().drain().unwrap();
            let Pair { pools, receive, .. } = pair;
            while receive.lend(32, pools, |packet, _| {
                inbox.push_back((queue, Received { header: packet.header, frame: packet.to_vec() }));
                Some(packet)
            }) > 0
            {}
            if pair.refill() {
                pair.events().notify_receive().unwrap();
            }
            assert_eq!(pair.fault(), None);
        }
    }

    /// The next frame, if one has come.
    pub fn take(&mut self) -> Option<(usize, Received)> {
        self.pump();
        self.inbox.pop_front()
    }

    /// Waits for the next frame.
    #[track_caller]
    pub fn receive_on(&mut self) -> (usize, Received) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(received) = self.take() {
                return received;
            }
            assert!(Instant::now() < deadline, "guest {} received nothing", self.mac);
            self.step();
            std::thread::sleep(LOOK);
        }
    }

    #[track_caller]
    pub fn receive(&mut self) -> Received {
        self.receive_on().1
    }

    /// The next frame, which came without offloads.
    #[track_caller]
    pub fn receive_plain(&mut self) -> Vec<u8> {
        let Received { header, frame } = self.receive();
        assert_eq!(header.gso_type, 0);
        assert!(!header.needs_csum());
        frame
    }

    /// Sends `count` frames of 100 bytes to `to`, numbered from `first`.
    #[track_caller]
    pub fn send_numbered(&mut self, to: Mac, first: u32, count: u32) {
        for number in first..first + count {
            let frame = frame(to, self.mac, 100, number);
            self.send(&frame);
        }
    }

    /// Receives what another has sent so, in order and unharmed, and nothing else before.
    #[track_caller]
    pub fn expect_numbered(&mut self, from: Mac, first: u32, count: u32) {
        for number in first..first + count {
            assert_eq!(self.receive_plain(), frame(self.mac, from, 100, number));
        }
    }

    /// Closes the interface as a guest does that shuts down; nothing may stay mapped.
    #[track_caller]
    pub fn close(mut self) {
        self.front.close();
        self.until("the end", |guest| !guest.closed.is_empty());
        assert_eq!(self.closed, [0], "pages that the back end has not let go of");
    }
}

/// A guest that breaks the rules: it writes its rings slot by slot.
pub struct Raw {
    pub tx: FrontRing<Area, TxSlot>,
    /// The page of the ring that it sends on.
    pub page: Area,
    /// Pages to send from and receive into.
    pub data: Vec<GrantRef>,
    pub channel: Box<dyn EventChannel>,
    client: Client,
    device: String,
    _domain: ProcessDomain,
    _granted: Box<dyn Granted>,
}

impl Raw {
    /// Connects to the back end, with interface 0 of domain `number`.
    #[track_caller]
    pub fn plug(machine: &Machine, number: u16) -> Raw {
        const PAGES: usize = 64;
        let domain = eventually("the domain's number is free", || {
            ProcessDomain::connect(&machine.broker_socket, Some(DomId(number))).ok()
        });
        let granted = domain.grants().unwrap().grant(BACK, 2 + PAGES, Access::Write).unwrap();
        let page = |index: usize| granted.region().area(index * PAGE, PAGE).unwrap();
        let refs: Vec<GrantRef> = granted.refs().to_vec();
        let (port, channel) = domain.alloc_unbound(BACK).unwrap();
        let mut client = machine.store.client(DomId(number)).unwrap();
        let (_, device) = nodes(DomId(number), 0);
        let (back, _) = nodes(DomId(number), 0);
        eventually("the back end offers something", || {
            (client.text(&path::join(&back, "state")).unwrap().as_deref() == Some("2")).then_some(())
        });
        for (key, value) in [
            ("tx-ring-ref", refs[0].to_string()),
            ("rx-ring-ref", refs[1].to_string()),
            ("event-channel", port.0.to_string()),
            ("request-rx-copy", "1".to_owned()),
            ("feature-sg", "1".to_owned()),
            ("state", "4".to_owned()),
        ] {
            client.write(&path::join(&device, key), value).unwrap();
        }
        eventually("the back end connects", || {
            (client.text(&path::join(&back, "state")).unwrap().as_deref() == Some("4")).then_some(())
        });
        // The receive ring is a page of zeros, which is an empty ring.
        let (tx, data, page) = (FrontRing::new(page(0)).unwrap(), refs[2..].to_vec(), page(0));
        Raw { tx, page, data, channel, client, device, _domain: domain, _granted: granted }
    }

    /// Pushes a slot that refers to the first page.
    pub fn send(&mut self, id: u16, offset: u16, size: u16, flags: TxFlags) {
        self.tx.push(TxRequest { gref: self.data[0], offset, flags, id, size }.to_slot());
    }

    /// Shows what was pushed, and tells.
    pub fn publish(&mut self) {
        let _ = self.tx.publish();
        self.channel.notify().unwrap();
    }

    /// Writes a node of its own.
    pub fn say(&mut self, key: &str, value: &str) {
        self.client.write(&path::join(&self.device, key), value).unwrap();
    }
}
