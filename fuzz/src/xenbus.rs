//! The hand-shakes of Xen's network interface, both sides, against a peer and a toolstack that write anything to their
//! nodes, at any time, and over grants and events that fail.
//!
//! Neither side ever fails for what a guest can write, goes round in circles, or says that it is closed while something of
//! the peer's is mapped; no queue is handed out twice; a well-behaved interface is served afterwards; nothing stays granted,
//! mapped or open.

use std::os::fd::AsFd;
use std::sync::Arc;

use ringferry_xen::domain::{DomId, Domain};
use ringferry_xen::event::EventChannel;
use ringferry_xen::grant::{Access, Granted};
use ringferry_xen::store::{Client, NodeAccess, Nodes, Permission, StoreError, path};
use ringferry_xen_net::netfront::PairConfig;
use ringferry_xen_net::xenbus::Polled as Turn;
use ringferry_xen_net::xenbus::{
    BackConfig, BackEvent, BackendDriver, Connection, FrontConfig, FrontEvent, FrontendDriver, Session,
    State, VifId,
};
use ringferry_xen_sim::fake::{Fake, FakeDomain, Op};
use ringferry_xen_sim::store::{Limits, Running, Server};

use crate::ring::Reached;
use crate::script::{Bytes, Field, operations};

const TOOLS: DomId = DomId(0);
const BACK: DomId = DomId(2);
const FRONT: DomId = DomId(5);
const CLASS: &str = "vif";
const ID: VifId = VifId { front: FRONT, device: 0 };

/// Number of pages that the hostile front end grants, and of event channels that it makes, which values can
/// name.
const GRANTS: usize = 6;

/// Upper bound on the turns of a side without any write of another, and on the rounds of both.
const TURNS: usize = 400;

/// Keys that a script writes.
pub const KEYS: [&str; 32] = [
    "state",
    "online",
    "frontend",
    "backend",
    "backend-id",
    "mac",
    "tx-ring-ref",
    "rx-ring-ref",
    "event-channel",
    "event-channel-tx",
    "event-channel-rx",
    "multi-queue-num-queues",
    "multi-queue-max-queues",
    "ctrl-ring-ref",
    "event-channel-ctrl",
    "request-rx-copy",
    "feature-rx-copy",
    "feature-ctrl-ring",
    "feature-persistent",
    "feature-split-event-channels",
    "feature-sg",
    "feature-gso-tcpv4",
    "queue-0",
    "queue-0/tx-ring-ref",
    "queue-0/rx-ring-ref",
    "queue-0/event-channel",
    "queue-1/tx-ring-ref",
    "queue-1/rx-ring-ref",
    "queue-1/event-channel-tx",
    "queue-1/event-channel-rx",
    "hotplug-status",
    "",
];

/// Values that a script writes; behind them come the numbers of grants and of event channels.
pub const VALUES: [&str; 20] = [
    "0",
    "1",
    "2",
    "3",
    "4",
    "5",
    "6",
    "7",
    "65536",
    "4294967295",
    "-1",
    "",
    "one",
    "00:16:3e:00:00:09",
    "/local/domain/5/device/vif/0",
    "/local/domain/2/backend/vif/5/0",
    "/local/domain/7/device/vif/0",
    "/local/domain/5/../2",
    "\u{1}\u{2}",
    "1 ",
];

operations! {
    /// One step of a script.
    Step {
        /// The front end's domain writes a key of its device.
        Front { key: u8, value: u8 },
        /// Another back end in the same domain, or a toolstack, writes a key of the back end's.
        Back { key: u8, value: u8 },
        /// Removes a key, of the back end if bit 7 is set, else of the front end.
        Remove { key: u8 },
        /// The front end denies read access to its device, or allows it again.
        Hide { hidden: u8 },
        /// The front end writes all keys of so many queues, and that it is connected.
        Announce { queues: u8, flags: u8 },
        /// The toolstack makes the interface anew.
        Plug {},
        /// The toolstack asks the interface to end.
        Unplug {},
        /// The toolstack removes all nodes.
        Remote {},
        /// The half under test serves the store's events until there are none.
        Look {},
        /// The half under test closes, if it is a front end.
        Close {},
        /// The half under test is killed, and started again.
        Restart {},
        /// A grant, a mapping or an event channel of the half's domain will fail.
        Fail { op: u8, after: u8 },
        /// The caller rejects a connection that it cannot serve.
        Reject {},
    }
}

/// The half under test, back end or front end.
enum Half {
    Back { plugs: Box<BackendDriver>, connection: Option<Box<Connection>> },
    Front { front: Box<FrontendDriver>, session: Option<Session>, closed: bool },
}

/// The simulated machine around the half under test.
struct Machine {
    fake: Fake,
    store: Running,
    tools: Client,
    guest: Client,
    /// Pages that the hostile side has granted.
    granted: Option<Box<dyn Granted>>,
    channels: Vec<(u32, Box<dyn EventChannel>)>,
    faults: usize,
    /// True if the front end was told to close, with or without a device to close.
    closing: bool,
    reached: Reached,
}

fn device() -> String {
    path::frontend(FRONT, CLASS, 0)
}

fn back() -> String {
    path::backend(BACK, CLASS, FRONT, 0)
}

/// Checks that a write of a domain was either done or refused by the store, with no other failure.
fn tolerate(result: Result<(), StoreError>) {
    if let Err(error) = result {
        assert!(!error.is_fatal(), "{error}");
    }
}

impl Machine {
    fn new() -> Self {
        let store = Server::new(Limits::DEFAULT).and_then(Server::start).expect("a store");
        let tools = store.client(TOOLS).expect("a connection");
        let guest = store.client(FRONT).expect("a connection");
        let fake = Fake::new();
        let (hostile, peer) = (fake.domain(FRONT), BACK);
        let granted = hostile
            .grants()
            .and_then(|mut table| table.grant(peer, GRANTS, Access::Write).map_err(std::io::Error::other));
        let channels = (0..GRANTS).map(|_| {
            let (port, channel) = hostile.alloc_unbound(peer).expect("a port");
            (port.0, channel)
        });
        let channels = channels.collect();
        store.introduce(BACK);
        store.introduce(FRONT);
        let granted = Some(granted.expect("pages"));
        let mut machine = Self {
            fake,
            store,
            tools,
            guest,
            granted,
            channels,
            faults: 0,
            closing: false,
            reached: Reached::default(),
        };
        machine.plug();
        machine
    }

    fn domain(&self, id: DomId) -> Arc<FakeDomain> {
        Arc::new(self.fake.domain(id))
    }

    /// Makes the interface, as a toolstack does.
    fn plug(&mut self) {
        let own = |owner, other| {
            vec![Permission::new(owner, NodeAccess::None), Permission::new(other, NodeAccess::Read)]
        };
        let (back, device) = (back(), device());
        self.tools
            .transaction(|t| {
                for (node, permissions) in [(&back, own(BACK, FRONT)), (&device, own(FRONT, BACK))] {
                    t.remove(node)?;
                    t.mkdir(node)?;
                    t.set_permissions(node, &permissions)?;
                }
                for (node, key, value) in [
                    (&back, "frontend", device.as_str()),
                    (&back, "frontend-id", &FRONT.to_string()),
                    (&back, "online", "1"),
                    (&back, "state", "1"),
                    (&device, "backend", &back),
                    (&device, "backend-id", &BACK.to_string()),
                    (&device, "state", "1"),
                ] {
                    t.write(&path::join(node, key), value)?;
                }
                Ok(())
            })
            .expect("domain 0 may do that");
    }

    fn value(&self, number: u8) -> String {
        let number = usize::from(number);
        if let Some(text) = VALUES.get(number) {
            return (*text).to_owned();
        }
        let at = number - VALUES.len();
        let grants = self.granted.as_ref().map_or(&[][..], |granted| granted.refs());
        match (grants.get(at % 16), self.channels.get(at % 16)) {
            (Some(gref), _) if at < 16 => gref.to_string(),
            (_, Some((port, _))) => port.to_string(),
            _ => "x".repeat(at * 16),
        }
    }

    /// Writes all keys of so many queues, as a front end does.
    fn announce(&mut self, queues: u8, flags: u8) {
        let queues = usize::from(queues % 4);
        let (device, split) = (device(), flags & 1 != 0);
        let mut keys = vec![("request-rx-copy".to_owned(), u32::from(flags & 2 == 0).to_string())];
        if queues != 1 {
            keys.push(("multi-queue-num-queues".to_owned(), queues.to_string()));
        }
        let refs = self.granted.as_ref().map_or(Vec::new(), |granted| granted.refs().to_vec());
        for queue in 0..queues {
            let node = if queues == 1 { String::new() } else { format!("queue-{queue}/") };
            let gref = |at: usize| refs.get(at % GRANTS).map_or(0, |gref| gref.0).to_string();
            let port = |at: usize| self.channels[at % GRANTS].0.to_string();
            keys.push((format!("{node}tx-ring-ref"), gref(2 * queue)));
            keys.push((format!("{node}rx-ring-ref"), gref(2 * queue + 1)));
            if split {
                keys.push((format!("{node}event-channel-tx"), port(2 * queue)));
                keys.push((format!("{node}event-channel-rx"), port(2 * queue + 1)));
            } else {
                keys.push((format!("{node}event-channel"), port(2 * queue)));
            }
        }
        if flags & 4 != 0 {
            keys.push(("ctrl-ring-ref".to_owned(), refs.get(4).map_or(0, |gref| gref.0).to_string()));
            keys.push(("event-channel-ctrl".to_owned(), self.channels[4].0.to_string()));
        }
        let state = if flags & 8 != 0 { State::Initialised } else { State::Connected };
        keys.push(("state".to_owned(), state.number().to_string()));
        tolerate(self.guest.transaction(|t| {
            keys.iter().try_for_each(|(key, value)| t.write(&path::join(&device, key), value))
        }));
    }

    /// Returns when the store has delivered all events.
    fn settle(&self) {
        // The store holds its lock until then.
        self.store.release(DomId(999));
    }

    fn state(&mut self, node: &str) -> Option<State> {
        State::read(&mut self.tools, node).expect("domain 0 may read it")
    }
}

impl Half {
    fn new(machine: &Machine, side: u8) -> Self {
        let flag = |bit: u8| side >> bit & 1 != 0;
        if flag(0) {
            let pair = PairConfig { receive: 32, small: 16, frames: 8, large: 2, ..PairConfig::default() };
            let config = FrontConfig {
                queues: if flag(1) { 3 } else { 1 },
                pair,
                split_events: flag(2),
                persistent: flag(3),
                static_grants: flag(4),
                ..FrontConfig::default()
            };
            let client = machine.store.client(FRONT).expect("a connection");
            let front = match FrontendDriver::new(client, machine.domain(FRONT), config) {
                Ok(front) => front,
                Err(error) => panic!("no front end: {error}"),
            };
            return Self::Front { front: Box::new(front), session: None, closed: false };
        }
        let config = BackConfig {
            max_queues: if flag(1) { 3 } else { 1 },
            split_events: flag(2),
            persistent: flag(3),
            static_grants: flag(4),
            only: flag(5).then_some(ID),
            ..BackConfig::default()
        };
        let client = machine.store.client(BACK).expect("a connection");
        let plugs = BackendDriver::new(client, machine.domain(BACK), config).expect("a back end");
        Self::Back { plugs: Box::new(plugs), connection: None }
    }

    /// Serves the store's events until there are none.
    fn look(&mut self, machine: &mut Machine) {
        for _ in 0..TURNS {
            machine.settle();
            if !self.round(machine) {
                return;
            }
        }
        panic!("there is always something to do, and nobody writes anything");
    }

    /// Runs one round; returns true if there was an event.
    fn round(&mut self, machine: &mut Machine) -> bool {
        let mut found = false;
        for _ in 0..TURNS {
            match self {
                Self::Back { plugs, connection } => {
                    // The store is reachable, so nothing that a guest does may be an error.
                    match plugs.poll().expect("a back end does not fail for what it reads") {
                        Turn::Idle => return found,
                        Turn::Busy => {}
                        Turn::Vif(id, BackEvent::Connect(new)) => {
                            assert_eq!((id, new.id), (ID, ID));
                            assert!(connection.is_none(), "connected twice");
                            assert!(!new.queues.is_empty() && new.queues.len() <= 3);
                            *connection = Some(new);
                            machine.reached.chains += 1;
                            plugs.connected(id).expect("connected");
                        }
                        Turn::Vif(id, BackEvent::Disconnect) => {
                            assert!(connection.take().is_some(), "disconnected without a connection");
                            plugs.disconnected(id);
                            machine.reached.frames += 1;
                        }
                        Turn::Vif(_, BackEvent::Refused(_)) => machine.reached.longest += 1,
                        Turn::Vif(_, BackEvent::Removed) => {
                            assert!(connection.is_none(), "removed while it is served");
                            machine.reached.broken = true;
                        }
                    }
                }
                Self::Front { front, session, closed } => match front.poll() {
                    Ok(None) => return found,
                    Ok(Some(FrontEvent::Busy)) => {}
                    Ok(Some(FrontEvent::Connected(new))) => {
                        assert!(session.is_none(), "connected twice");
                        assert!(!new.pairs.is_empty() && new.pairs.len() <= 3);
                        machine.reached.chains += 1;
                        *session = Some(new);
                    }
                    Ok(Some(FrontEvent::Stop)) => {
                        let pairs = session.take().expect("stopped without a session").pairs;
                        tolerate_front(front.stopped(pairs));
                        machine.reached.frames += 1;
                    }
                    Ok(Some(FrontEvent::Closed { .. })) => {
                        assert!(session.is_none(), "closed while it is used");
                        *closed = true;
                    }
                    Err(error) => {
                        tolerate_front(Err(error));
                        machine.reached.longest += 1;
                        // A caller that meets an error waits before the next attempt.
                        return false;
                    }
                },
            }
            found = true;
            self.check(machine);
        }
        panic!("there is always something to do, and nobody writes anything");
    }

    /// Checks the invariants that hold at any time.
    fn check(&self, machine: &Machine) {
        match self {
            Self::Back { connection: None, .. } => {
                assert_eq!(machine.fake.mapped_pages(), 0, "pages are mapped, and nobody is connected");
            }
            Self::Back { connection: Some(connection), .. } => {
                let rings = 2 * connection.queues.len() + usize::from(connection.control.is_some());
                assert_eq!(machine.fake.mapped_pages(), rings);
            }
            Self::Front { front, session, .. } => {
                assert!(session.is_none() || front.granted() > 0);
                // Every descriptor to be watched is open.
                assert!(front.fds().all(|fd| fd.as_fd().try_clone_to_owned().is_ok()));
            }
        }
    }

    /// Rejects a connection, as a caller does that cannot serve it.
    fn reject(&mut self) {
        if let Self::Back { plugs, connection } = self
            && connection.take().is_some()
        {
            plugs.disconnected(ID);
        }
    }
}

/// Checks that a front end does not fail for senseless keys of a back end.
fn tolerate_front(result: Result<(), ringferry_xen_net::xenbus::frontend_driver::FrontError>) {
    use ringferry_xen_net::xenbus::frontend_driver::FrontError;
    if let Err(FrontError::Store(error)) = result {
        assert!(!error.is_fatal(), "{error}");
    }
}

/// Runs a script. The first byte chooses the side and what it offers.
pub fn xenbus(input: &[u8]) -> Reached {
    let Some((&side, script)) = input.split_first() else { return Reached::default() };
    let mut machine = Machine::new();
    let mut half = Half::new(&machine, side);
    let mut script = Bytes(script);
    while let Some(step) = Step::get(&mut script) {
        half = run(step, half, &mut machine, side);
    }
    half.look(&mut machine);
    let reached = machine.reached;
    afterwards(half, &mut machine, side);
    let granted = machine.granted.take().expect("they were never taken before");
    assert_eq!(granted.end(), 0, "pages are still mapped");
    machine.channels.clear();
    machine.fake.assert_nothing_left();
    reached
}

fn run(step: Step, mut half: Half, machine: &mut Machine, side: u8) -> Half {
    let place = |base: String, key: u8| path::join(&base, KEYS[usize::from(key) % KEYS.len()]);
    match step {
        Step::Front { key, value } => {
            let value = machine.value(value);
            tolerate(machine.guest.write(place(device(), key).trim_end_matches('/'), value));
        }
        Step::Back { key, value } => {
            let value = machine.value(value);
            tolerate(machine.tools.write(place(back(), key).trim_end_matches('/'), value));
        }
        Step::Remove { key } if key & 0x80 != 0 => {
            tolerate(machine.tools.remove(place(back(), key & 0x7f).trim_end_matches('/')));
        }
        Step::Remove { key } => {
            tolerate(machine.guest.remove(place(device(), key).trim_end_matches('/')));
        }
        Step::Hide { hidden } => {
            let access = if hidden & 1 != 0 { NodeAccess::None } else { NodeAccess::Read };
            let permissions = [Permission::new(FRONT, NodeAccess::None), Permission::new(BACK, access)];
            for node in [device(), path::join(&device(), "state")] {
                tolerate(machine.guest.set_permissions(&node, &permissions));
            }
        }
        Step::Announce { queues, flags } => machine.announce(queues, flags),
        Step::Plug {} => machine.plug(),
        Step::Unplug {} => {
            let node = back();
            tolerate(machine.tools.transaction(|t| {
                t.write(&path::join(&node, "online"), "0")?;
                t.write(&path::join(&node, "state"), "5")
            }));
        }
        Step::Remote {} => {
            tolerate(machine.tools.remove(&back()));
            tolerate(machine.tools.remove(&device()));
        }
        Step::Look {} => half.look(machine),
        Step::Close {} => {
            if let Half::Front { front, .. } = &mut half {
                front.close();
                machine.closing = true;
            }
        }
        Step::Restart {} => {
            drop(half);
            machine.closing = false;
            assert_eq!(machine.fake.mapped_pages(), 0, "pages outlive the process");
            half = Half::new(machine, side);
        }
        Step::Fail { op, after } => {
            let domain = if side & 1 != 0 { FRONT } else { BACK };
            let op = [Op::Map, Op::Channel, Op::Grant][usize::from(op) % 3];
            machine.fake.fail(domain, op, usize::from(after % 8));
            machine.faults += 1;
        }
        Step::Reject {} => half.reject(),
    }
    half.check(machine);
    half
}

/// Checks that a well-behaved peer is served, whatever was before, and that both end in order.
fn afterwards(half: Half, machine: &mut Machine, side: u8) {
    let closing = machine.closing || matches!(&half, Half::Front { closed: true, .. });
    // A front end that was told to close stays closed, as its user wants it.
    let mut first = if closing {
        drop(half);
        Half::new(machine, side)
    } else {
        half
    };
    // Both sides take turns. Each fault that is still due spoils one attempt.
    let mut connected = false;
    for _ in 0..=2 * machine.faults + 1 {
        tolerate(machine.tools.remove(&back()));
        tolerate(machine.tools.remove(&device()));
        first.look(machine);
        machine.plug();
        first.look(machine);
        let mut second = Half::new(machine, side ^ 1);
        for _ in 0..8 {
            first.look(machine);
            second.look(machine);
        }
        let both = |half: &Half| match half {
            Half::Back { connection, .. } => connection.is_some(),
            Half::Front { session, .. } => session.is_some(),
        };
        connected = both(&first) && both(&second);
        if connected {
            let (ours, theirs) = (back(), device());
            let states = (machine.state(&ours), machine.state(&theirs));
            assert_eq!(states, (Some(State::Connected), Some(State::Connected)));
            for half in [&mut first, &mut second] {
                if let Half::Front { front, .. } = half {
                    front.close();
                }
            }
            for _ in 0..8 {
                first.look(machine);
                second.look(machine);
            }
            assert_eq!(machine.fake.mapped_pages(), 0, "closed, and still mapped");
            let states = (machine.state(&ours), machine.state(&theirs));
            assert_eq!(states, (Some(State::Closed), Some(State::Closed)));
            break;
        }
        drop(second);
    }
    assert!(connected, "a well-behaved peer is not served");
}
