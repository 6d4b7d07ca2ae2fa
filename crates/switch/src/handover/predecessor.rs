//! The side of a hand-over that gives: a running switch, asked by its successor.
//!
//! The switch makes a [`Predecessor`] of the connection on which `Replace` was asked for, and calls [`Predecessor::serve`] whenever it is readable.
//! Between the questions packets and messages of front ends are served as ever. The last question is answered with workers that stand
//! still; when that call returns, either the successor has everything ([`Outcome::Replaced`]) or all goes on here.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use serde::Serialize;

use super::bulk::Writer;
use super::channel::{Channel, Kind, Message};
use super::kept::Keeper;
use super::state::{
    Draft, EntryState, FORMAT, FileId, Final, Hello, InForce, PortNumbers, Running, UNDERSTOOD, Values,
    WorkerState,
};
use super::{PATIENCE, QUIET, SILENCE};
use crate::config::Config;
use crate::fdb::FdbPage;
use crate::links::Links;
use crate::manager::Manager;
use crate::mirrors::Mirrors;
use crate::plane::{Address, Held};
use crate::ports::handed::Descriptors;
use crate::ports::queues::Workers;
use crate::ports::table::{Generation, PortTable};
use crate::ports::{InterfaceQueues, Positions};

/// What has become of the hand-over after a question was answered.
pub(crate) enum Outcome {
    /// It goes on.
    Pending,
    /// The successor has asked who runs, and leaves it at that.
    Declined,
    /// The successor has everything. This process must touch nothing any more.
    Replaced {
        /// Packets have waited for so long.
        stood: Duration,
        /// What the successor has said; `None` if it is of an earlier version, or says nothing.
        said: Option<Running>,
    },
    /// The successor has ended after it had taken the baton, so nobody knows where the rings stand: this is as if the switch had been killed.
    Orphaned,
}

/// The parts of the switch that are handed over.
pub(crate) struct Parts<'s> {
    pub(crate) config: &'s Config,
    pub(crate) ports: &'s mut PortTable,
    pub(crate) workers: &'s Workers,
    /// The socket on which clients connect.
    pub(crate) control: BorrowedFd<'s>,
    pub(crate) started: Instant,
    /// Whether the process is in a sandbox.
    pub(crate) sandboxed: bool,
    pub(crate) manager: &'s mut Manager,
    /// Has the service manager keep the state.
    pub(crate) keeper: Option<&'s Keeper>,
    pub(crate) links: &'s Links,
    pub(crate) mirrors: &'s Mirrors,
}

/// What was sent while packets flowed.
struct Drafted {
    baton: EventFd,
    config: String,
    generations: BTreeMap<String, Generation>,
    /// The second of the switch's clock at which it began.
    second: u32,
    /// The successor goes on with what the manager keeps.
    keeps: bool,
}

/// A hand-over that goes on.
pub(crate) struct Predecessor {
    channel: Channel,
    drafted: Option<Drafted>,
    /// Number of the successor's process.
    pub(crate) pid: Option<u32>,
    /// When it has asked something.
    asked: Instant,
}

impl Predecessor {
    /// Begins a hand-over to the process at the other end, which must be of the same user, or of root.
    ///
    /// # Errors
    /// It is of another user.
    pub(crate) fn begin(stream: Stream) -> io::Result<Predecessor> {
        let peer = stream.peer_credentials()?;
        let own = rustix::process::geteuid().as_raw();
        if peer.uid != own && peer.uid != 0 {
            return Err(io::Error::other(format!("user {} may not take over from user {own}", peer.uid)));
        }
        let channel = Channel::new(stream)?;
        channel.set_timeout(QUIET)?;
        Ok(Predecessor { channel, drafted: None, pid: peer.pid, asked: Instant::now() })
    }

    /// Returns true if the successor has asked nothing for so long that it is not waited for: as long as it is, nobody else can take over.
    pub(crate) fn is_silent(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.asked) > SILENCE
    }

    /// Answers what the successor has asked.
    ///
    /// # Errors
    /// The hand-over is over, and everything goes on in this process.
    pub(crate) fn serve(&mut self, parts: &mut Parts<'_>) -> io::Result<Outcome> {
        self.asked = Instant::now();
        match self.channel.receive()?.kind {
            Kind::Hello => self.answer(Kind::Hello, &hello(parts), &[], &[])?,
            Kind::Draft => self.draft(parts)?,
            Kind::Final => return self.hand_over(parts),
            Kind::Refused => return Ok(Outcome::Declined),
            Kind::Running | Kind::End => return Err(ErrorKind::InvalidData.into()),
        }
        Ok(Outcome::Pending)
    }

    fn answer(
        &self,
        kind: Kind,
        text: &impl Serialize,
        bulk: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        self.channel.send(kind, &serde_json::to_vec(text)?, bulk, fds)
    }

    /// Tells a successor that has everything to end, as this process was told to when it had nothing left. One of an earlier version takes it for the end of this process.
    pub(crate) fn tell_to_end(&self) {
        let _ = self.channel.send(Kind::End, &[], &[], &[]);
    }

    /// Refuses to go on, and tells the successor why.
    fn refuse(&self, why: impl Into<String>) -> io::Error {
        let why = why.into();
        let _ = self.channel.send(Kind::Refused, why.as_bytes(), &[], &[]);
        io::Error::other(why)
    }

    /// Sends the state of all ports.
    fn draft(&mut self, parts: &mut Parts<'_>) -> io::Result<()> {
        let baton = EventFd::new()?;
        baton.signal()?;
        let second = parts.workers.seconds();
        let mut descriptors: Vec<OwnedFd> =
            vec![baton.as_fd().try_clone_to_owned()?, parts.control.try_clone_to_owned()?];
        // Who follows may have a manager of its own.
        let is_abandoned = parts.keeper.is_some_and(Keeper::is_abandoned);
        let manager = parts.manager.connection().filter(|_| !is_abandoned);
        let keeps = parts.keeper.is_some() && !is_abandoned;
        if let Some(manager) = manager {
            descriptors.push(manager.try_clone_to_owned()?);
        }
        let (mut entries, mut generations) = (Vec::new(), BTreeMap::new());
        for (name, generation, control) in parts.ports.handed() {
            let mut fds = Descriptors::default();
            let state = Some(control.hand_over(&mut |fd, id| fds.put(fd, id))?);
            let mut entry = EntryState { name: name.clone(), state, ..EntryState::default() };
            descriptors.extend(entry.note(fds));
            entries.push(entry);
            generations.insert(name, generation);
        }
        let mut bulk = Writer::default();
        let addresses = bulk.addresses(latest(all_addresses(parts.workers)));
        let numbers = parts.ports.interfaces().map(|port| (port.name.to_owned(), port.id.0)).collect();
        let manager = manager.is_some();
        let fds: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        self.answer(
            Kind::Draft,
            &Draft { entries, numbers, addresses, manager, keeps },
            &bulk.into_inner(),
            &fds,
        )?;
        close_aside(descriptors);
        self.drafted = Some(Drafted { baton, config: parts.config.dump(), generations, second, keeps });
        Ok(())
    }

    /// Stands still, sends what is left to say, and waits until the successor runs.
    fn hand_over(&mut self, parts: &mut Parts<'_>) -> io::Result<Outcome> {
        let Some(drafted) = self.drafted.take() else { return Err(ErrorKind::InvalidData.into()) };
        if drafted.config != parts.config.dump() {
            return Err(self.refuse("the configuration has changed meanwhile: try again"));
        }
        let since = Instant::now();
        // Everybody waits from here on.
        let _ = self.channel.set_timeout(PATIENCE);
        if let Err(late) = parts.workers.pause() {
            return Err(self.refuse(format!("{late}: try again")));
        }
        let sent = parts
            .ports
            .suspend()
            .map_err(|why| self.refuse(format!("{why}: try again")))
            .and_then(|positions| self.send_final(parts, &drafted, positions));
        let taken = if sent.is_ok() { self.is_taken(&drafted.baton, since) } else { None };
        if let Some(outcome) = taken {
            parts.ports.let_go();
            return Ok(outcome);
        }
        parts.ports.resume();
        parts.workers.unpause();
        let stood = since.elapsed().as_micros();
        // The successor may have said that it is.
        parts.manager.main_again();
        sent?;
        Err(io::Error::other(format!(
            "the successor did not take over in time; packets have waited for {stood} microseconds"
        )))
    }

    /// Waits until the successor runs, or takes the baton back: then there is no outcome.
    fn is_taken(&self, baton: &EventFd, since: Instant) -> Option<Outcome> {
        let _ = self.channel.set_timeout(PATIENCE.saturating_sub(since.elapsed()));
        let replaced = |message: Message| Outcome::Replaced {
            stood: since.elapsed(),
            said: serde_json::from_slice(&message.text).ok(),
        };
        let is_running = |message: &Message| message.kind == Kind::Running;
        if let Some(message) = self.channel.receive().ok().filter(is_running) {
            return Some(replaced(message));
        }
        // It has ended, says nothing or something else. If it does not have the baton by now, it never will.
        if baton.drain().unwrap_or(false) {
            return None;
        }
        let _ = self.channel.set_timeout(QUIET);
        match self.channel.receive() {
            Ok(message) => Some(replaced(message)),
            Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => {
                Some(Outcome::Orphaned)
            }
            // It lives, and has everything.
            Err(_) => Some(Outcome::Replaced { stood: since.elapsed(), said: None }),
        }
    }

    fn send_final(
        &self,
        parts: &mut Parts<'_>,
        drafted: &Drafted,
        positions: BTreeMap<String, Positions>,
    ) -> io::Result<()> {
        let (mut entries, mut descriptors) = (Vec::new(), Vec::<OwnedFd>::new());
        for (name, generation, control) in parts.ports.handed() {
            let positions = positions.get(&name).cloned().unwrap_or_default();
            let mut entry = EntryState { name, positions, ..EntryState::default() };
            if drafted.generations.get(&entry.name) != Some(&generation) {
                let mut fds = Descriptors::default();
                entry.state = Some(control.hand_over(&mut |fd, id| fds.put(fd, id))?);
                descriptors.extend(entry.note(fds));
            }
            entries.push(entry);
        }
        let mut bulk = Writer::default();
        // Of the second in which the draft was made it may have missed some.
        let age = parts.workers.seconds().saturating_sub(drafted.second) + 1;
        let held = parts.workers.held(age).map_err(|late| self.refuse(format!("{late}: try again")))?;
        let addresses = bulk.addresses(latest(held.iter().flat_map(|held| held.addresses.iter().copied())));
        let ports = ports(parts, &mut bulk);
        let workers = workers(parts.workers, &held, &mut bulk);
        let mut fds: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let (links_down, mirrors) = (parts.links.down(), parts.mirrors.list().mirrors);
        let (kept, memory) = parts.keeper.filter(|_| drafted.keeps).map(Keeper::inventory).unzip();
        fds.extend(memory.flatten().map(AsFd::as_fd));
        let seeds = parts.ports.drawn_seeds();
        let state = Final { entries, ports, addresses, workers, links_down, mirrors, seeds, kept };
        let answered = self.answer(Kind::Final, &state, &bulk.into_inner(), &fds);
        close_aside(descriptors);
        answered
    }
}

/// Closes copies of what front ends have passed, where nobody waits for it: of each eventfd that may take a while ([`EventId`](ringferry_sys::eventfd::EventId)).
fn close_aside(descriptors: Vec<OwnedFd>) {
    // Without a thread they are closed here.
    let _ = std::thread::Builder::new().name("ringferry-close".to_owned()).spawn(move || drop(descriptors));
}

impl AsFd for Predecessor {
    /// Readable when the successor asks, or is gone.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

fn hello(parts: &Parts<'_>) -> Hello {
    let kinds = parts.config.ports.iter().map(|port| port.kind.name().to_owned());
    let mut needs: Vec<_> = kinds.collect();
    needs.sort_unstable();
    needs.dedup();
    debug_assert!(needs.iter().all(|need| UNDERSTOOD.contains(&need.as_str())));
    Hello {
        format: FORMAT,
        needs,
        program: env!("CARGO_PKG_VERSION").to_owned(),
        executable: FileId::of_executable(),
        network: FileId::of_network(),
        in_force: InForce::of(parts.config, parts.workers.count()),
        began: parts.workers.began(),
        started: Workers::nanoseconds(parts.started),
        watchdog: parts.manager.watchdog().map(|allowed| allowed.as_micros() as u64),
        sandboxed: Some(parts.sandboxed),
    }
}

/// Returns the learned addresses of all workers, while packets flow.
fn all_addresses(workers: &Workers) -> Vec<Address> {
    let (mut all, now) = (Vec::new(), workers.seconds());
    workers.addresses(None, |FdbPage { items, .. }| {
        all.extend(items.iter().filter(|item| !item.fixed).map(|item| Address::of(item, now)));
    });
    all
}

/// Returns each address once, as the worker has it that saw it last.
fn latest(addresses: impl IntoIterator<Item = Address>) -> impl Iterator<Item = Address> {
    let mut all = HashMap::new();
    for address in addresses {
        let known: &mut Address = all.entry((address.vid, address.mac)).or_insert(address);
        if known.seen < address.seen {
            *known = address;
        }
    }
    all.into_values()
}

fn ports(parts: &Parts<'_>, bulk: &mut Writer) -> BTreeMap<String, PortNumbers> {
    let numbers = parts.ports.interfaces().map(|port| {
        let mut numbers = PortNumbers {
            number: port.id.0,
            counters: port.counters.by_name(),
            drops: port.counters.drops_by_name(),
            buckets: parts.workers.buckets(port.id),
            ..PortNumbers::default()
        };
        if let Some(firewall) = parts.workers.firewall(port.id) {
            numbers.firewall = bulk.firewall(firewall.records(parts.workers.seconds()));
        }
        let owner = |queue| parts.workers.owner(port.id, queue);
        match port.queues {
            InterfaceQueues::Pairs(shared) => {
                numbers.owners = (0..crate::plane::PAIRS).map(owner).collect();
                numbers.pairs = shared.pairs.iter().map(|pair| Values(pair.values())).collect();
                numbers.flows = bulk.flows(shared.flows.words());
            }
            InterfaceQueues::Kernel(queues) => numbers.owners = (0..queues).map(owner).collect(),
        }
        (port.name.to_owned(), numbers)
    });
    numbers.collect()
}

fn workers(workers: &Workers, held: &[Held], bulk: &mut Writer) -> Vec<WorkerState> {
    workers.count_run_delays();
    let states = workers.counters().zip(held).map(|(counters, held)| WorkerState {
        counters: Values(counters.values()),
        fdb: Values(held.stats.values()),
        waiting: bulk.waiting(&held.waiting),
        on_wires: bulk.waiting(&held.wires.frames),
        chance: held.wires.models.iter().map(|(port, model)| (port.0, model.clone())).collect(),
    });
    states.collect()
}
