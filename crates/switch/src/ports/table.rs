//! The table of ports: every entry of the configuration with its control side, whatever its kind.
//!
//! The switch makes one table. Entries are [added](PortTable::add) and [removed](PortTable::remove) at any
//! time; each gets an [`EntryId`] that is never used again, and epoll tokens that are made of it, so that an
//! event that was already reported for an entry that has gone is ignored. Ports of entries have a [`PortId`]
//! each, allocated for all kinds alike.
//!
//! All methods are called on the control plane's thread, and return without waiting for a peer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use ringferry_control::snapshot::PortSnapshot;
use ringferry_sys::epoll::Epoll;

use super::ids::PortIds;
use super::marks::Marks;
use super::queues::{QueueState, Workers};
use super::xen::MappingBudget;
use super::{
    Context, GuestMemoryBudget, Interface, InterfaceQueues, OpenError, Passed, Plug, PortControl, Positions,
    Task,
};
use crate::config::{PortConfig, SwitchConfig};
use crate::fdb::PortId;
use crate::impairments::Wire;
use crate::plane::PAIRS;
use crate::rules::Rules;
use crate::wires::Wires;

/// The number of an entry of the table, in the order in which they were added; the first is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EntryId(u32);

impl EntryId {
    #[cfg(test)]
    pub(crate) fn nth(number: u32) -> EntryId {
        EntryId(number)
    }
}

/// States of workers' queues, by port and index.
pub(crate) type QueueStates = BTreeMap<(PortId, u16), QueueState>;

/// The epoll token of a descriptor of an entry. Tokens below [`FIRST_TOKEN`] are not the table's.
pub(super) fn token(entry: EntryId, sub: u32) -> u64 {
    u64::from(entry.0) << 32 | u64::from(sub)
}

/// The least token that an entry has.
pub(crate) const FIRST_TOKEN: u64 = 1 << 32;

/// Numbers that change whenever the state that an entry hands over does.
pub(crate) type Generation = (EntryId, (u64, u64));

/// The table of ports. Owned by the switch and used on the control plane's thread.
pub(crate) struct PortTable {
    entries: BTreeMap<EntryId, Entry>,
    last: EntryId,
    ids: PortIds,
    budget: MappingBudget,
    memory: GuestMemoryBudget,
    workers: Arc<Workers>,
    tracks: bool,
    marks: Arc<Marks>,
    wires: Wires,
}

/// One entry of the configuration, with its control side.
struct Entry {
    config: PortConfig,
    /// True if it is to be removed when it is drained.
    retired: bool,
    /// When it was opened anew, if what it stands for had been deleted.
    renewed: Option<Instant>,
    control: Box<dyn PortControl>,
}

/// Serves an entry, which is marked meanwhile.
fn serve(marks: &Marks, control: &mut dyn PortControl, sub: u32, cx: &mut Context<'_>) {
    marks.begin(cx.entry);
    control.serve(sub, cx);
    marks.end(cx.entry, control.generation());
}

impl PortTable {
    /// A table without ports, whose guests' memory `config` limits.
    pub(crate) fn new(workers: Arc<Workers>, config: &SwitchConfig) -> Self {
        Self {
            entries: BTreeMap::new(),
            last: EntryId(0),
            ids: PortIds::default(),
            budget: MappingBudget::of_system(),
            memory: GuestMemoryBudget::new(config),
            workers,
            tracks: false,
            marks: Arc::default(),
            wires: Wires::default(),
        }
    }

    /// From now on each port is sure of a part of the memory that all may have mapped: those that another process has served have theirs again.
    pub(crate) fn keep_shares_of_memory(&self) {
        self.memory.keep_shares();
    }

    /// Has what is served marked here.
    pub(crate) fn set_marks(&mut self, marks: Marks) {
        self.marks = Arc::new(marks);
    }

    /// Plugs a port in that was [opened](super::open).
    ///
    /// # Errors
    /// The system's descriptors, or the numbers of ports, are used up; nothing is left of the port.
    pub(crate) fn add(
        &mut self,
        mut config: PortConfig,
        plug: Plug,
        epoll: &Epoll,
    ) -> Result<EntryId, OpenError> {
        config.rules.wire = self.wires.end(&config.name);
        let entry = EntryId(self.last.0 + 1);
        let Self { ids, budget, memory, workers, tracks, .. } = self;
        let control =
            plug(&config, &mut Context { workers, epoll, ids, budget, memory, tracks: *tracks, entry })?;
        self.last = entry;
        self.entries.insert(entry, Entry { config, retired: false, renewed: None, control });
        Ok(entry)
    }

    /// Unplugs the port of this name, and says whether there was one. When this returns no worker knows of it.
    pub(crate) fn remove(&mut self, name: &str, epoll: &Epoll) -> bool {
        let found = self.entries.iter().find(|(_, entry)| entry.config.name == name).map(|(id, _)| *id);
        let Some(id) = found else { return false };
        self.with(id, epoll, |control, cx| control.remove(cx));
        self.entries.remove(&id);
        true
    }

    /// Calls `task` with the control side of an entry and a context.
    fn with<T>(
        &mut self,
        id: EntryId,
        epoll: &Epoll,
        task: impl FnOnce(&mut dyn PortControl, &mut Context<'_>) -> T,
    ) -> Option<T> {
        let Self { entries, ids, budget, memory, workers, tracks, .. } = self;
        let entry = entries.get_mut(&id)?;
        Some(task(
            &mut *entry.control,
            &mut Context { workers, epoll, ids, budget, memory, tracks: *tracks, entry: id },
        ))
    }

    /// Calls `task` with each entry until one returns true.
    fn any(&mut self, epoll: &Epoll, mut task: impl FnMut(&mut dyn PortControl, &mut Context<'_>) -> bool) {
        let Self { entries, ids, budget, memory, workers, tracks, .. } = self;
        for (id, entry) in entries {
            if task(
                &mut *entry.control,
                &mut Context { workers, epoll, ids, budget, memory, tracks: *tracks, entry: *id },
            ) {
                return;
            }
        }
    }

    /// Starts all entries, once, when the event loop begins.
    pub(crate) fn begin(&mut self, epoll: &Epoll) {
        let marks = Arc::clone(&self.marks);
        self.any(epoll, |control, cx| {
            serve(&marks, control, 0, cx);
            false
        });
    }

    /// Starts an entry that was added while the event loop runs.
    pub(crate) fn begin_entry(&mut self, entry: EntryId, epoll: &Epoll) {
        let marks = Arc::clone(&self.marks);
        self.with(entry, epoll, |control, cx| serve(&marks, control, 0, cx));
    }

    /// Serves an event, by its token. An event of an entry that has gone is ignored.
    pub(crate) fn serve(&mut self, token: u64, epoll: &Epoll) {
        let entry = EntryId((token >> 32) as u32);
        let marks = Arc::clone(&self.marks);
        self.with(entry, epoll, |control, cx| serve(&marks, control, token as u32, cx));
    }

    /// Returns the time at which [`serve_due`](PortTable::serve_due) has work to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.entries.values().filter_map(|entry| entry.control.deadline()).min()
    }

    /// Serves the entries whose deadline is over.
    pub(crate) fn serve_due(&mut self, now: Instant, epoll: &Epoll) {
        let marks = Arc::clone(&self.marks);
        self.any(epoll, |control, cx| {
            if control.deadline().is_some_and(|due| due <= now) {
                serve(&marks, control, 0, cx);
            }
            false
        });
    }

    /// Lets every entry check for changes that cause no event.
    pub(crate) fn tick(&mut self, epoll: &Epoll) {
        let Self { entries, ids, budget, memory, workers, tracks, .. } = self;
        for (id, Entry { config, control, .. }) in entries {
            control.tick(
                config,
                &mut Context { workers, epoll, ids, budget, memory, tracks: *tracks, entry: *id },
            );
        }
    }

    /// Returns the ports that have to be opened anew.
    pub(crate) fn gone(&self) -> Vec<PortConfig> {
        let anew = |entry: &&Entry| !entry.config.kind.is_passed() && entry.control.is_gone();
        let gone = self.entries.values().filter(anew);
        gone.map(|entry| entry.config.clone()).collect()
    }

    /// Returns the names of the ports whose sockets have lost their files.
    pub(crate) fn without_sockets(&self) -> Vec<String> {
        let lost = self.entries.values().filter(|entry| entry.control.has_lost_socket());
        lost.map(|entry| entry.config.name.clone()).collect()
    }

    /// Has a port listen on a socket that was opened anew, with what the helper has opened.
    ///
    /// # Errors
    /// See [`PortControl::listen_again`].
    pub(crate) fn listen_again(
        &mut self,
        port: &PortConfig,
        passed: &mut Passed,
        epoll: &Epoll,
    ) -> Result<(), OpenError> {
        let entry = self.entries.iter().find(|(_, entry)| entry.config.name == port.name).map(|(id, _)| *id);
        let done =
            entry.and_then(|id| self.with(id, epoll, |control, cx| control.listen_again(port, passed, cx)));
        done.unwrap_or(Ok(()))
    }

    /// Disconnects the peers that workers cannot serve any more, and those whose memory is lost.
    pub(crate) fn serve_faults(&mut self, epoll: &Epoll) {
        let workers = Arc::clone(&self.workers);
        for fault in workers.faults() {
            self.any(epoll, |control, cx| control.fault(&fault, cx));
        }
        self.any(epoll, |control, cx| {
            control.look_at_memory(cx);
            false
        });
    }

    /// Begins to drain the entry of this name, which is to be removed: no frames are sent to its ports any more, and no further front end is served.
    /// Returns the entry, if there is one.
    pub(crate) fn retire(&mut self, name: &str, epoll: &Epoll) -> Option<EntryId> {
        let (id, entry) = self.entries.iter_mut().find(|(_, entry)| entry.config.name == name)?;
        let id = *id;
        entry.retired = true;
        let rules = entry.config.rules.clone();
        entry.control.interfaces().iter().for_each(|port| self.workers.retire(port.id, &rules));
        self.with(id, epoll, |control, cx| control.retire(cx));
        Some(id)
    }

    /// Returns true if an entry has not been removed.
    pub(crate) fn has(&self, entry: EntryId) -> bool {
        self.entries.contains_key(&entry)
    }

    /// Asks the workers whether nothing of an entry waits with them.
    pub(crate) fn ask_quiet(&self, entry: EntryId) -> Vec<Receiver<bool>> {
        let interfaces = self.entries.get(&entry).map(|entry| entry.control.interfaces()).unwrap_or_default();
        interfaces.iter().flat_map(|port| self.workers.ask_quiet(port.id)).collect()
    }

    /// Changes settings of an entry, but for its rules, to those of `port`, which it [can become](PortConfig::can_become).
    ///
    /// # Errors
    /// A setting cannot be had; the entry is as it was.
    pub(crate) fn change(&mut self, port: &PortConfig) -> Result<(), String> {
        let Some(entry) = self.entries.values_mut().find(|entry| entry.config.name == port.name) else {
            return Ok(());
        };
        let place = |entry: &Entry, port: &PortConfig| place(entry, port, &self.workers);
        if entry.config.workers != port.workers {
            place(entry, port)?;
        }
        let before = entry.config.clone();
        if let Err(error) = entry.control.change(&before, port) {
            if before.workers != port.workers {
                place(entry, &before)?;
            }
            return Err(error.to_string());
        }
        entry.config = PortConfig { rules: before.rules, ..port.clone() };
        Ok(())
    }

    /// Sets the wires between ports, of those that there are and those that come.
    pub(crate) fn set_wires(&mut self, wires: &[Wire]) {
        self.wires.set(wires);
        self.rewire();
    }

    /// Goes on with the seeds of wires of another process.
    pub(crate) fn take_over_seeds(&mut self, drawn: &BTreeMap<String, u64>) {
        self.wires.take_over(drawn);
        self.rewire();
    }

    /// Returns the seeds that were drawn for wires, for another process.
    pub(crate) fn drawn_seeds(&self) -> BTreeMap<String, u64> {
        self.wires.drawn()
    }

    /// Makes ports the ends of wires that they are not yet.
    fn rewire(&mut self) {
        let differs = |entry: &&Entry| entry.config.rules.wire != self.wires.end(&entry.config.name);
        let changed = self.entries.values().filter(differs);
        let changed: Vec<_> =
            changed.map(|entry| (entry.config.name.clone(), entry.config.rules.clone())).collect();
        for (name, rules) in changed {
            self.set_rules(&name, &rules);
        }
    }

    /// Changes the rules of an entry. Of which wire it is an end is not among them.
    pub(crate) fn set_rules(&mut self, name: &str, rules: &Rules) {
        let rules = &Rules { wire: self.wires.end(name), ..rules.clone() };
        if let Some(entry) = self.entries.values_mut().find(|entry| entry.config.name == name) {
            entry.control.set_rules(rules, &self.workers);
            entry.config.rules.clone_from(rules);
            if entry.retired {
                entry.control.interfaces().iter().for_each(|port| self.workers.retire(port.id, rules));
            }
        }
    }

    /// Returns all entries for another process: their names, the generation of their state, and their control sides.
    pub(crate) fn handed(&self) -> impl Iterator<Item = (String, Generation, &dyn PortControl)> {
        self.entries.iter().map(|(id, Entry { config, control, .. })| {
            (config.name.clone(), (*id, control.generation()), &**control)
        })
    }

    /// Takes from the paused workers what another process is to have, and returns where each entry goes on there, by name.
    ///
    /// # Errors
    /// A worker does not answer, for people; [`resume`](Self::resume) has the entries go on.
    pub(crate) fn suspend(&mut self) -> Result<BTreeMap<String, Positions>, String> {
        // All that wait for the workers wait at once.
        let workers = Arc::clone(&self.workers);
        workers.at_once(|| self.entries.values_mut().for_each(|entry| entry.control.begin_to_suspend()));
        let entries = self.entries.values_mut();
        let suspended =
            entries.map(|Entry { config, control, .. }| Ok((config.name.clone(), control.suspend()?)));
        // All of them were asked to, so all are waited for, whichever fails.
        suspended.collect::<Vec<_>>().into_iter().collect()
    }

    /// Has all entries go on in this process.
    pub(crate) fn resume(&mut self) {
        self.entries.values_mut().for_each(|entry| entry.control.resume());
    }

    /// What is to be done before entries go on where another process has stopped.
    pub(crate) fn ahead(&self) -> Vec<Task> {
        self.entries.values().filter_map(|entry| entry.control.ahead()).collect()
    }

    /// Has an entry go on where another process has stopped.
    pub(crate) fn take_over(&mut self, name: &str, positions: &Positions) {
        if let Some(entry) = self.entries.values_mut().find(|entry| entry.config.name == name) {
            entry.control.take_over(positions, &self.workers);
        }
    }

    /// Has ports that are added from now on keep track of what is needed if this process is killed.
    pub(crate) fn track(&mut self) {
        self.tracks = true;
    }

    /// Has an entry go on where another process was killed.
    pub(crate) fn recover(&mut self, name: &str) {
        if let Some(entry) = self.entries.values_mut().find(|entry| entry.config.name == name) {
            entry.control.recover(&self.workers);
        }
    }

    /// Leaves all entries to another process.
    pub(crate) fn let_go(&mut self) {
        self.entries.values_mut().for_each(|entry| entry.control.let_go());
    }

    /// Tells the peer of a port whether its link is up; whether that took note.
    pub(crate) fn set_link(&mut self, port: PortId, up: bool) -> bool {
        let has =
            |entry: &&mut Entry| entry.control.interfaces().iter().any(|interface| interface.id == port);
        self.entries.values_mut().find(has).is_some_and(|entry| entry.control.set_link(port, up))
    }

    /// Returns true if a front end is connected to a port of the entry of this name.
    pub(crate) fn has_session(&self, name: &str) -> bool {
        let entry = self.entries.values().find(|entry| entry.config.name == name);
        entry.is_some_and(|entry| entry.control.has_session())
    }

    /// Returns the number of ports whose packets flow, and that of all, as the control plane knows without asking anybody.
    pub(crate) fn count_up(&self) -> (usize, usize) {
        let entries = self.entries.values();
        entries.fold((0, 0), |(up, all), entry| {
            let count = entry.control.interfaces().len().max(1);
            (up + entry.control.count_up(), all + count)
        })
    }

    /// Returns the configurations of all entries, in their order.
    pub(crate) fn configs(&self) -> impl Iterator<Item = &PortConfig> {
        self.entries.values().map(|entry| &entry.config)
    }

    /// The entry of this name, or the one that has a port of this name.
    pub(crate) fn entry_of(&self, name: &str) -> Option<&PortConfig> {
        let has = |entry: &&Entry| {
            entry.config.name == name || entry.control.interfaces().iter().any(|port| port.name == name)
        };
        self.entries.values().find(has).map(|entry| &entry.config)
    }

    /// Returns true for a port whose entry is to be removed, and is drained.
    pub(crate) fn is_retired(&self, name: &str) -> bool {
        let has = |entry: &&Entry| entry.control.interfaces().iter().any(|port| port.name == name);
        self.entries.values().find(has).is_some_and(|entry| entry.retired)
    }

    /// Notes that a port was opened anew, as what it stands for had been deleted.
    pub(crate) fn set_renewed(&mut self, name: &str) {
        let entry = self.entries.values_mut().find(|entry| entry.config.name == name);
        entry.into_iter().for_each(|entry| entry.renewed = Some(Instant::now()));
    }

    /// Returns the time since a port was opened anew, if it was.
    pub(crate) fn renewed(&self, name: &str) -> Option<Duration> {
        let entry = self.entries.values().find(|entry| entry.config.name == name)?;
        entry.renewed.map(|renewed| renewed.elapsed())
    }

    /// The port of this name, if it exists now.
    pub(crate) fn interface(&self, name: &str) -> Option<Interface<'_>> {
        self.interfaces().find(|port| port.name == name)
    }

    /// Returns the names of the ports of an entry.
    pub(crate) fn names_of(&self, entry: &str) -> Vec<String> {
        let of_entry = self.entries.values().filter(|there| there.config.name == entry);
        of_entry.flat_map(|there| there.control.interfaces()).map(|port| port.name.to_owned()).collect()
    }

    /// Every port that exists now.
    pub(crate) fn interfaces(&self) -> impl Iterator<Item = Interface<'_>> {
        self.entries.values().flat_map(|entry| entry.control.interfaces())
    }

    /// Returns the state of all ports.
    pub(crate) fn snapshots(&self) -> Vec<PortSnapshot> {
        let states = self.workers.inspect();
        let mut states: QueueStates =
            states.into_iter().map(|(port, state)| ((port, state.index), state)).collect();
        let entries = self.entries.values();
        entries.flat_map(|entry| entry.control.snapshots(&entry.config, &self.budget, &mut states)).collect()
    }
}

/// Has the queues of an entry served by the workers that `port` says.
///
/// # Errors
/// A worker is too busy to take over a queue, or to give it up; all queues are where they were.
fn place(entry: &Entry, port: &PortConfig, workers: &Workers) -> Result<(), String> {
    let (owners, mut moved) = (port.owners(), Vec::new());
    for Interface { id, queues, .. } in entry.control.interfaces() {
        let queues = match queues {
            InterfaceQueues::Pairs(_) => PAIRS,
            // Each of several queues of a tap belongs to one worker for good.
            InterfaceQueues::Kernel(queues) => u16::from(queues == 1),
        };
        for queue in 0..queues {
            match workers.assign(id, queue, owners.of(queue, workers.count())) {
                Ok(before) => moved.push((id, queue, before)),
                Err(error) => {
                    for (id, queue, before) in moved {
                        // Whoever is late now stays where it is; nothing is lost.
                        let _ = workers.assign(id, queue, before);
                    }
                    return Err(format!("queue {queue} stays where it is: {error}"));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use ringferry_control::snapshot::PortState;
    use ringferry_memory::SharedMem;
    use ringferry_sys::eventfd::EventFd;
    use ringferry_sys::socket::Stream;
    use ringferry_sys::testing::lingering;
    use ringferry_vhost_user::message::{
        F_VERSION_1, Header, MemoryRegion, MemoryTable, Request, VERSION, VringAddr, VringState,
    };
    use zerocopy::IntoBytes;

    use super::*;
    use crate::config::Config;
    use crate::ports::passed::Passed;

    /// Parses the `--port` flags of several ports.
    fn configs(flags: &[String]) -> Vec<PortConfig> {
        let mut builder = Config::builder();
        for flag in flags {
            builder = builder.port_flag(flag);
        }
        builder.build().unwrap().ports
    }

    fn table() -> (PortTable, Epoll) {
        let config = SwitchConfig { workers: Some(2), ..SwitchConfig::default() };
        (PortTable::new(Arc::new(Workers::start(&config).unwrap()), &config), Epoll::new().unwrap())
    }

    fn add(table: &mut PortTable, epoll: &Epoll, config: &PortConfig) -> EntryId {
        let plug = super::super::open(config, 2, &mut Passed::default()).unwrap();
        table.add(config.clone(), plug, epoll).unwrap()
    }

    #[test]
    fn ports_come_and_go_and_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let socket = |name: &str| dir.path().join(name);
        let flags = ["a", "b"].map(|name| format!("vhost-user:{}", socket(name).display()));
        let (mut table, epoll) = table();
        let configs = configs(&flags);
        add(&mut table, &epoll, &configs[0]);
        // Other tests of this process open descriptors, too, but none so many.
        const NOISE: usize = 150;
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = descriptors();
        let mut last = EntryId(0);
        for _ in 0..2 * NOISE {
            let entry = add(&mut table, &epoll, &configs[1]);
            assert!(entry > last, "a number is never used again");
            last = entry;
            table.begin(&epoll);
            let peer = UnixStream::connect(socket("b")).unwrap();
            table.serve(token(entry, 0), &epoll);
            assert_eq!(table.snapshots().len(), 2);
            assert!(table.remove("b", &epoll) && !table.remove("b", &epoll));
            assert!(table.interface("b").is_none() && table.interface("a").is_some());
            assert_eq!(table.snapshots().len(), 1);
            // An event that was already reported for the removed entry is ignored.
            table.serve(token(entry, 0), &epoll);
            drop(peer);
        }
        assert!(descriptors() < before + NOISE, "descriptors are leaked");
    }

    /// Sends a message that asks for no reply.
    fn tell(peer: &Stream, request: Request, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let header = Header { request: request as u32, flags: VERSION, size: payload.len() as u32 };
        peer.send(&[header.as_bytes(), payload].concat(), fds).unwrap();
    }

    /// Shares all of `memory`, which stops and starts the rings that run.
    fn share(peer: &Stream, memory: &SharedMem) {
        let table = MemoryTable { count: 1, padding: 0 };
        let region = MemoryRegion { guest_addr: 0, size: memory.size() as u64, user_addr: 0, mmap_offset: 0 };
        let payload = [table.as_bytes(), region.as_bytes()].concat();
        tell(peer, Request::SetMemTable, &payload, &[memory.fd()]);
    }

    /// Starts both rings of the first pair, as a front end does.
    fn start_rings(peer: &Stream, memory: &SharedMem) {
        tell(peer, Request::SetFeatures, F_VERSION_1.as_bytes(), &[]);
        share(peer, memory);
        let event = EventFd::new().unwrap();
        for index in 0..2 {
            let start = u64::from(index) * 0x8000;
            let addr = VringAddr {
                index,
                flags: 0,
                desc: start,
                avail: start + 0x1000,
                used: start + 0x2000,
                log: 0,
            };
            tell(peer, Request::SetVringNum, VringState { index, num: 256 }.as_bytes(), &[]);
            tell(peer, Request::SetVringAddr, addr.as_bytes(), &[]);
            tell(peer, Request::SetVringKick, u64::from(index).as_bytes(), &[event.as_fd()]);
        }
    }

    #[test]
    fn h5_a_busy_worker_costs_its_port_and_nobody_else() {
        let dir = tempfile::tempdir().unwrap();
        let socket = |name: &str| dir.path().join(name);
        let flags = ["a", "b"].map(|name| format!("vhost-user:{}", socket(name).display()));
        let (mut table, epoll) = table();
        let entries: Vec<_> = configs(&flags).iter().map(|config| add(&mut table, &epoll, config)).collect();
        let [a, b] = entries[..] else { unreachable!() };
        table.begin(&epoll);
        let connect = |table: &mut PortTable, name: &str, entry| {
            let peer = Stream::connect(socket(name)).unwrap();
            table.serve(token(entry, 0), &epoll);
            peer
        };
        let memory = SharedMem::new("guest", 0x10000).unwrap();
        let peer = connect(&mut table, "a", a);
        let honest = connect(&mut table, "b", b);
        start_rings(&peer, &memory);
        // One turn may not be enough on a slow machine.
        let up = |table: &mut PortTable, entry| {
            table.serve(token(entry, 0), &epoll);
            table.snapshots()[0].state == PortState::Up
        };
        until("starting", || up(&mut table, a));

        let held = table.workers.hold(0);
        share(&peer, &memory);
        table.serve(token(a, 0), &epoll);
        let port = &table.snapshots()[0];
        assert_eq!(port.state, PortState::Down);
        assert!(port.fault.as_ref().is_some_and(|fault| fault.contains("worker 0 is too busy")));
        assert_eq!(peer.recv(&mut [0; 8], &mut Vec::new()).unwrap().bytes, 0, "the session is over");
        others_are_served(&mut table, &epoll, b, &honest);
        // No front end is served until the worker has caught up.
        let next = Stream::connect(socket("a")).unwrap();
        table.serve(token(a, 0), &epoll);
        assert_eq!(table.snapshots()[0].state, PortState::Down);
        // A queue cannot migrate while its worker is late; it stays there.
        let id = table.interfaces().next().unwrap().id;
        assert!(table.workers.assign(id, 0, 1).is_err());
        assert_eq!(table.workers.owner(id, 0), 0);

        drop(held);
        until("resuming", || {
            table.serve_due(Instant::now(), &epoll);
            let port = &table.snapshots()[0];
            port.fault.is_none()
        });
        start_rings(&next, &memory);
        until("starting", || up(&mut table, a));
        assert_eq!(table.workers.assign(id, 0, 1), Ok(0));
        // A port whose queues cannot be stopped is removed all the same.
        let _held = table.workers.hold(1);
        assert!(table.remove("a", &epoll));
        others_are_served(&mut table, &epoll, b, &honest);
    }

    #[track_caller]
    fn until(what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(120);
        while !done() {
            assert!(Instant::now() < deadline, "{what} takes for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// While another port is in trouble, the control plane answers a front end, and shows the state of all.
    #[track_caller]
    fn others_are_served(table: &mut PortTable, epoll: &Epoll, entry: EntryId, peer: &Stream) {
        let header = Header { request: Request::GetFeatures as u32, flags: VERSION, size: 0 };
        peer.send(header.as_bytes(), &[]).unwrap();
        table.serve(token(entry, 0), epoll);
        peer.set_nonblocking(true).unwrap();
        assert_eq!(peer.recv(&mut [0; 64], &mut Vec::new()).unwrap().bytes, Header::LEN + 8);
        table.tick(epoll);
        table.snapshots();
    }

    #[test]
    fn d1_a_descriptor_whose_close_waits_keeps_no_other_port() {
        let dir = tempfile::tempdir().unwrap();
        let socket = |name: &str| dir.path().join(name);
        let flags = ["a", "b"].map(|name| format!("vhost-user:{}", socket(name).display()));
        let (mut table, epoll) = table();
        let entries: Vec<_> = configs(&flags).iter().map(|config| add(&mut table, &epoll, config)).collect();
        table.begin(&epoll);
        let mut serve = |entry| table.serve(token(entry, 0), &epoll);
        let honest = Stream::connect(socket("b")).unwrap();
        serve(entries[1]);
        // Closing this socket would wait for ten minutes.
        let (lingering, _reader) = lingering();
        let hostile = Stream::connect(socket("a")).unwrap();
        let waits = Stream::connect(socket("a")).unwrap();
        serve(entries[0]);
        hostile.send(&[1; 5], &[lingering.as_fd()]).unwrap();
        waits.send(&[1; 5], &[lingering.as_fd()]).unwrap();
        drop(lingering);
        serve(entries[0]);
        drop(hostile);
        serve(entries[0]);
        others_are_served(&mut table, &epoll, entries[1], &honest);
        // Removal ends the connection that was not accepted yet.
        assert!(table.remove("a", &epoll));
        others_are_served(&mut table, &epoll, entries[1], &honest);
        drop(waits);
    }

    #[test]
    fn ports_of_one_table_have_different_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let flags: Vec<_> = (0..5)
            .map(|name| format!("vhost-user:{}", dir.path().join(name.to_string()).display()))
            .collect();
        let (mut table, epoll) = table();
        for config in configs(&flags) {
            add(&mut table, &epoll, &config);
        }
        let mut ids: Vec<_> = table.interfaces().map(|port| port.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 5);
    }
}
