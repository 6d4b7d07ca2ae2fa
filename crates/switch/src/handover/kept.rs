//! What outlives a switch that is killed: its state and descriptors, kept by the service manager (its "file descriptor store") or by `ringferry keep`.
//!
//! The switch says what has changed, a moment after it has: [`Keeper`]. The next process finds it among its inherited descriptors
//! ([`Kept::take`]), starts with the configuration that was in force ([`Kept::config`]), whatever the file says by now, and makes ports as a
//! [successor](super) does. It was not told where rings stood, and finds that out from the rings themselves
//! ([`PortControl::recover`](crate::ports::PortControl)).
//!
//! **What is not kept.** Of a front end that is in the middle of a message with descriptors nothing is: these may be anything, and a mere look at one
//! may wait for a file system of its sender's. Where there are too many descriptors, the ports that have most of them go without. Both connect again after a crash.
//! So does a front end that has said anything since the state was stored: its message is lost, and it might wait for the answer for ever. [`Marks`] in the
//! state's own memory tell of it.
//!
//! **Names.** A descriptor is `rf-N`, with a number that is never used again; the state, a memfd with JSON that refers to these numbers, is
//! `rf-state-N`, the highest of which counts. A new state is stored before the old one is removed, and the descriptors that it needs before it, so a
//! complete state is kept at any moment, also while one process replaces another, which goes on with the names that there are ([`Inventory`]). A manager keeps each open file once, under its first name: so each is [known](Identity) here by
//! what tells open files apart, and keeps its number.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringferry_control::mirror::Mirror;
use ringferry_memory::{Counters, Region, RegionSpec, SharedMem};
use ringferry_sys::systemd::{Notifier, store_limit};
use serde::{Deserialize, Serialize};

use super::identity::Identity;
use super::state::InForce;
use crate::config::{Config, PortConfig, PortKind, TapConfig, VhostUserConfig};
use crate::links::Links;
use crate::mirrors::Mirrors;
use crate::ports::handed::{Descriptors, HandedPort};
use crate::ports::marks::Marks;
use crate::ports::table::{Generation, PortTable};

/// Time for which the state must not change before it is stored: a front end that starts its rings says some sixty things in 4 ms.
const SETTLED: Duration = Duration::from_millis(5);

/// Time after which storing is tried again that has failed.
const BEHIND: Duration = Duration::from_millis(50);

/// Time after which a manager that was told nothing is told something, to see whether it is still there.
const ASKED: Duration = Duration::from_secs(5);

/// How long a manager is waited for that is to forget something. It takes well below a millisecond.
const FORGOTTEN: Duration = Duration::from_millis(500);

/// A name that no descriptor has: that such a one is forgotten changes nothing.
const NOTHING: &str = "rf-nothing";

/// Storing rests for so many times as long as it took: a front end that never stops talking takes a twentieth of the control plane's time with it.
const REST: u32 = 19;

/// Most descriptors that are stored, below what contrib's unit allows (`FileDescriptorStoreMax=`).
const MOST: usize = 8000;

/// What a manager has to have room for besides: the control socket, two states, and descriptors of a newer one while the older one is there.
const SPARE: usize = 192;

/// The form of what is kept.
const FORMAT: u32 = 2;

/// Begin of the names of descriptors.
const PREFIX: &str = "rf-";
/// Begin of the names of states.
const STATE: &str = "rf-state-";

/// Upper bound on a state in bytes.
const MAX_STATE: u64 = 64 << 20;

/// Where the text of a state begins, behind its length.
const TEXT: usize = size_of::<u64>();

/// The state as it is kept.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    format: u32,
    /// Path of the control socket.
    control: PathBuf,
    /// Number of the socket on which clients connect.
    listener: u64,
    setup: Setup,
    entries: Vec<Entry>,
}

/// Returns the place of the first [mark](Marks) in the memory of a state with a text of this length, in words: behind the text, one for each of its entries.
fn first_mark(length: usize) -> usize {
    (TEXT + length).div_ceil(size_of::<u32>())
}

/// What holds for the whole switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Setup {
    #[serde(flatten)]
    in_force: InForce,
    /// Ports whose links were taken down.
    links_down: Vec<String>,
    mirrors: Vec<Mirror>,
}

impl Setup {
    fn of(parts: &Parts<'_>) -> Setup {
        let mut mirrors = parts.mirrors.list().mirrors;
        for mirror in &mut mirrors {
            (mirror.copied, mirror.lost) = (0, 0);
        }
        Setup { in_force: InForce::of(parts.config, parts.workers), links_down: parts.links.down(), mirrors }
    }
}

/// An entry of the configuration.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    name: String,
    /// [What it is made of](made_of), for a look at whether the configuration is still the same.
    made_of: String,
    state: HandedPort,
    /// The number of each of its descriptors, and what tells each from all others: so the next process need not ask, which would take as long as whoever has them likes.
    descriptors: Vec<u64>,
    identities: Vec<Identity>,
}

/// The parts of a switch whose state is kept.
pub(crate) struct Parts<'s> {
    pub(crate) config: &'s Config,
    /// Number of workers.
    pub(crate) workers: usize,
    pub(crate) ports: &'s mut PortTable,
    /// The control socket.
    pub(crate) listener: BorrowedFd<'s>,
    pub(crate) links: &'s Links,
    pub(crate) mirrors: &'s Mirrors,
}

/// Keeps the manager's copy of the state up to date.
pub struct Keeper {
    manager: Notifier,
    control: PathBuf,
    /// Most descriptors that are stored.
    most: usize,
    /// What is kept of the whole switch.
    setup: Option<Setup>,
    /// That may be another one by now.
    doubt: bool,
    /// What is kept of each entry of the configuration, with the generation of its state. Of some nothing is.
    entries: BTreeMap<String, (Generation, Option<Entry>)>,
    numbers: BTreeMap<Identity, u64>,
    next: u64,
    /// The name of the state that is kept.
    state: Option<String>,
    /// That state is an earlier process's.
    stale: bool,
    /// Where its marks are.
    places: Option<Places>,
    /// When to look again, as something has changed.
    due: Option<Instant>,
    /// Nothing is stored before.
    rested: Instant,
    /// The ports of which it was logged that there is no room for them.
    left_out: Vec<String>,
    /// Why nothing is kept, for people; it was logged then.
    trouble: Option<String>,
    /// When the manager was last told something.
    told: Instant,
}

impl Keeper {
    /// Keeps the state of a switch whose control socket is `control` with the manager at the other end of `manager`, which has `known` of an earlier process.
    pub fn new(manager: Notifier, control: &Path, known: Known) -> Keeper {
        let Known { numbers, state, superfluous, highest, places } = known;
        // Nobody is to wait for the manager.
        let _ = manager.set_nonblocking();
        for name in superfluous {
            let _ = manager.forget(&name);
        }
        Keeper {
            manager,
            control: control.to_owned(),
            // Who takes over was not told by the manager itself.
            most: match store_limit() {
                0 => MOST,
                limit => limit.saturating_sub(SPARE).min(MOST),
            },
            setup: None,
            doubt: true,
            entries: BTreeMap::new(),
            numbers,
            next: highest,
            state,
            stale: true,
            places,
            due: None,
            rested: Instant::now(),
            left_out: Vec::new(),
            trouble: None,
            told: Instant::now(),
        }
    }

    /// Returns the marks in the state that another process has stored, which counts until this one has stored its own. Those that are set stay.
    ///
    /// # Errors
    /// The system has no memory left.
    pub(crate) fn marks(&self, ports: &PortTable) -> io::Result<Marks> {
        let Some((file, places)) = &self.places else { return Ok(Marks::default()) };
        let spec = RegionSpec { guest_addr: 0, size: file.metadata()?.len(), user_addr: 0, mmap_offset: 0 };
        let words = Counters::new(Region::map(file.as_fd(), spec).map_err(io::Error::other)?);
        let generations: BTreeMap<_, _> =
            ports.handed().map(|(name, generation, _)| (name, generation)).collect();
        let unmarked = places.iter().filter(|(_, place)| *place < words.len() && words.load(*place) == 0);
        let stored: Vec<_> =
            unmarked.filter_map(|(name, place)| Some((*generations.get(name)?, *place))).collect();
        Ok(Marks::new(words, stored))
    }

    /// Says that something else than a port's state may have changed: the configuration, a link, a mirror.
    pub(crate) fn doubt(&mut self) {
        self.doubt = true;
    }

    /// Says that clients connect on another socket.
    pub(crate) fn listens_anew(&mut self) {
        self.stale = true;
    }

    /// Looks whether anything has changed; what has is stored when it has settled. To be called after all events were served.
    pub(crate) fn look(&mut self, parts: &mut Parts<'_>, now: Instant) {
        if !self.doubt && !self.are_others(parts.ports) {
            self.due = None;
            return;
        }
        match self.due {
            None => self.due = Some((now + SETTLED).max(self.rested)),
            Some(due) if due <= now => {
                self.due = None;
                let stored = self.store_what_is_new(parts);
                self.rested = now + now.elapsed() * REST;
                if stored.is_err() {
                    self.due = Some((now + BEHIND).max(self.rested));
                }
                // Of what has not changed the manager hears nothing.
                if stored.as_ref().is_ok_and(|any| !any) {
                    return;
                }
                self.note(stored.map(drop), now);
            }
            Some(_) => {}
        }
    }

    /// Has the manager forget what it keeps of an entry that is closed, and waits until it has: a tap that somebody has open cannot be opened anew. If this process is killed
    /// before its state is stored without the entry, that begins afresh.
    pub(crate) fn release(&mut self, name: &str) {
        let Some((_, Some(Entry { descriptors, .. }))) = self.entries.remove(name) else { return };
        self.stale = true;
        let others = self.entries.values().flat_map(|(_, entry)| entry);
        let used: BTreeSet<u64> = others.flat_map(|entry| &entry.descriptors).copied().collect();
        self.forget(|number| descriptors.contains(&number) && !used.contains(&number));
        if let Err(error) = self.manager.settle(FORGOTTEN) {
            tracing::warn!(
                port = name,
                "whoever keeps the descriptors of this port has not let go of them yet: {error}"
            );
        }
    }

    /// Finds out whether the manager is still there, if nothing has been said to it for long. Called about once a second.
    pub(crate) fn tick(&mut self, now: Instant) {
        if now.saturating_duration_since(self.told) >= ASKED {
            let told = self.manager.forget(NOTHING).map(drop);
            self.note(told, now);
        }
    }

    /// Notes what has become of something that was said to the manager.
    fn note(&mut self, told: io::Result<()>, now: Instant) {
        self.told = now;
        let trouble = match told {
            Ok(()) => None,
            // A manager that is behind catches up.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) if has_gone(&error) => Some(
                "nobody starts another one if this process is killed, as `ringferry keep`, or the service manager, has ended; `ringferry keep -- --replace` does from then on"
                    .to_owned(),
            ),
            Err(error) => {
                Some(format!("the state is not kept for the case that this process is killed: {error}"))
            }
        };
        if let (Some(trouble), None) = (&trouble, &self.trouble) {
            tracing::warn!("{trouble}");
        }
        self.trouble = trouble;
    }

    /// Returns true if there is no manager any more.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.manager.forget(NOTHING).is_err_and(|error| has_gone(&error))
    }

    /// Returns why nothing is kept for the case that this process is killed, for people, if that is so.
    pub(crate) fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Returns the ports for which there is no room.
    pub(crate) fn left_out(&self) -> Vec<&str> {
        self.left_out.iter().map(String::as_str).collect()
    }

    /// Returns true if the state of the entries is not the one that is kept.
    fn are_others(&self, ports: &PortTable) -> bool {
        let mut count = 0;
        let is_other = |(name, generation, _): (String, Generation, _)| {
            count += 1;
            self.entries.get(&name).is_none_or(|(kept, _)| *kept != generation)
        };
        self.stale || ports.handed().any(is_other) || count != self.entries.len()
    }

    /// Returns the time at which [`look`](Self::look) has work to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.due
    }

    /// Returns whether there was anything new.
    fn store_what_is_new(&mut self, parts: &mut Parts<'_>) -> io::Result<bool> {
        let setup = match &self.setup {
            Some(setup) if !self.doubt => setup.clone(),
            _ => Setup::of(parts),
        };
        let is_new = self.setup.as_ref() != Some(&setup) || self.are_others(parts.ports);
        if is_new {
            self.store(&setup, parts)?;
            self.setup = Some(setup);
        }
        self.doubt = false;
        Ok(is_new)
    }

    fn store(&mut self, setup: &Setup, parts: &mut Parts<'_>) -> io::Result<()> {
        let with_room = self.with_room(parts.ports)?;
        let mut used = BTreeSet::new();
        let listener = Identity::of_file(parts.listener)?.ok_or(io::ErrorKind::InvalidInput)?;
        let listener = self.number(parts.listener, listener, &mut used)?;
        let mut entries = BTreeMap::new();
        for (name, generation, control) in parts.ports.handed() {
            let entry = match self.known(&name, generation) {
                _ if !with_room.contains(&name) => None,
                Some(entry) => {
                    used.extend(&entry.descriptors);
                    Some(entry.clone())
                }
                None => {
                    let (mut descriptors, mut identities) = (Vec::new(), Vec::new());
                    let state = control.hand_over(&mut |fd, event| {
                        let identity = Identity::of(fd, event, &name, descriptors.len())?;
                        descriptors.push(self.number(fd, identity.clone(), &mut used)?);
                        identities.push(identity);
                        Ok(descriptors.len() as u32 - 1)
                    })?;
                    let made_of = parts.ports.entry_of(&name).map(made_of).unwrap_or_default();
                    Some(Entry { name: name.clone(), made_of, state, descriptors, identities })
                }
            };
            entries.insert(name, (generation, entry));
        }
        let state = State {
            format: FORMAT,
            control: self.control.clone(),
            listener,
            setup: setup.clone(),
            entries: entries.values().filter_map(|(_, entry)| entry.clone()).collect(),
        };
        let text = serde_json::to_vec(&state)?;
        let first = first_mark(text.len());
        let memory = SharedMem::new("ringferry-state", (first + entries.len()) * size_of::<u32>())?;
        let file = File::from(memory.fd().try_clone_to_owned()?);
        file.write_all_at(&(text.len() as u64).to_le_bytes(), 0)?;
        file.write_all_at(&text, TEXT as u64)?;
        let words = Counters::new(memory.map_at(0).map_err(io::Error::other)?);
        let stored = entries.iter().filter(|(_, (_, entry))| entry.is_some()).zip(first..);
        let marks =
            Marks::new(words, stored.clone().map(|((_, (generation, _)), place)| (*generation, place)));
        let places = stored.map(|((name, _), place)| (name.clone(), place)).collect();
        let name = format!("{STATE}{}", self.take_number());
        self.manager.store(&name, memory.fd())?;
        parts.ports.set_marks(marks);
        self.places = Some((file, places));
        self.stale = false;
        if let Some(old) = self.state.replace(name) {
            self.manager.forget(&old)?;
        }
        self.entries = entries;
        self.forget(|number| !used.contains(&number));
        Ok(())
    }

    /// Has the manager close the descriptors of these numbers.
    fn forget(&mut self, is_gone: impl Fn(u64) -> bool) {
        let manager = &self.manager;
        self.numbers.retain(|_, number| {
            let is_gone = is_gone(*number);
            if is_gone {
                let _ = manager.forget(&format!("{PREFIX}{number}"));
            }
            !is_gone
        });
    }

    /// Returns what is kept of an entry, if that is its state.
    fn known(&self, name: &str, generation: Generation) -> Option<&Entry> {
        self.entries.get(name).filter(|(kept, _)| *kept == generation)?.1.as_ref()
    }

    /// Returns the entries that can be kept, and for whose descriptors there is room. The ports that have few come first: nobody has another one left out
    /// by having many.
    fn with_room(&mut self, ports: &PortTable) -> io::Result<BTreeSet<String>> {
        let mut counts = Vec::new();
        for (name, generation, control) in ports.handed().filter(|(_, _, control)| control.can_be_kept()) {
            let count = match self.known(&name, generation) {
                Some(entry) => entry.descriptors.len(),
                None => {
                    let mut count = 0;
                    control.hand_over(&mut |_, _| {
                        count += 1;
                        Ok(count as u32 - 1)
                    })?;
                    count
                }
            };
            counts.push((count, name));
        }
        counts.sort_unstable();
        let mut room = self.most;
        let (kept, left_out): (Vec<_>, Vec<_>) = counts.into_iter().partition(|(count, _)| {
            room = room.saturating_sub(*count);
            room > 0
        });
        let left_out: Vec<_> = left_out.into_iter().map(|(_, name)| name).collect();
        if left_out.iter().any(|name| !self.left_out.contains(name)) {
            tracing::warn!(
                "{} descriptors are kept for the case that this process is killed; the ports with most of them have to go without, and their \
                 front ends to connect again then: {}",
                self.most,
                left_out.join(", ")
            );
        }
        self.left_out = left_out;
        Ok(kept.into_iter().map(|(_, name)| name).collect())
    }

    fn take_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Returns the number of a descriptor, which is stored if it is new.
    fn number(
        &mut self,
        fd: BorrowedFd<'_>,
        identity: Identity,
        used: &mut BTreeSet<u64>,
    ) -> io::Result<u64> {
        let number = match self.numbers.get(&identity) {
            Some(number) => *number,
            None => {
                let number = self.take_number();
                self.manager.store(&format!("{PREFIX}{number}"), fd)?;
                self.numbers.insert(identity, number);
                number
            }
        };
        used.insert(number);
        Ok(number)
    }

    /// Has the manager forget everything: this process ends as it should, or one of an earlier version follows, which keeps its own.
    pub(crate) fn clear(&mut self) {
        let names = self.numbers.values().map(|number| format!("{PREFIX}{number}"));
        for name in names.chain(self.state.take()).collect::<Vec<_>>() {
            let _ = self.manager.forget(&name);
        }
        self.numbers.clear();
        self.entries.clear();
        (self.setup, self.stale) = (None, true);
    }
}

/// Returns true if this is what whoever says something to a manager that has ended is told: the first time, and from then on.
fn has_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotConnected)
}

/// What a manager keeps, for the process that takes over: it keeps the same files under the same names, so that a complete state is kept meanwhile.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Inventory {
    numbers: Vec<(Identity, u64)>,
    state: Option<String>,
    highest: u64,
    /// Places of the [marks](Marks) in the memory of the state, which goes along.
    #[serde(default)]
    places: Vec<(String, usize)>,
}

impl Keeper {
    /// Says what is kept, and returns the memory of the state.
    pub(crate) fn inventory(&self) -> (Inventory, Option<&File>) {
        let numbers = self.numbers.iter().map(|(identity, number)| (identity.clone(), *number)).collect();
        let (memory, places) = self.places.as_ref().map(|(file, places)| (file, places.clone())).unzip();
        let places = places.unwrap_or_default();
        (Inventory { numbers, state: self.state.clone(), highest: self.next, places }, memory)
    }

    /// Goes on where the process has stopped whose ports these were.
    pub(crate) fn adopt(&mut self, inventory: Inventory, memory: Option<OwnedFd>) {
        let Inventory { numbers, state, highest, places } = inventory;
        self.numbers = numbers.into_iter().collect();
        (self.state, self.next, self.stale) = (state, highest, true);
        self.places = memory.map(|memory| (File::from(memory), places));
    }
}

/// Returns what a port is made of: a socket, a tap, a place in the store. All else of its configuration can be another one when it is opened again.
fn made_of(port: &PortConfig) -> String {
    match &port.kind {
        PortKind::VhostUser(VhostUserConfig { endpoint, .. }) => format!("{endpoint:?}"),
        PortKind::Tap(TapConfig { source, .. }) => format!("{source:?}"),
        PortKind::XenVif(vif) => format!("{vif:?}"),
        PortKind::Xdp(xdp) => format!("{xdp:?}"),
    }
}

/// What an earlier process has left behind.
#[derive(Debug, Default)]
pub struct Kept {
    control: Option<(PathBuf, OwnedFd)>,
    setup: Option<Setup>,
    entries: BTreeMap<String, (Entry, Descriptors)>,
    known: Known,
}

/// What a manager keeps of an earlier process.
#[derive(Debug, Default)]
pub struct Known {
    /// Descriptors that are in the state.
    numbers: BTreeMap<Identity, u64>,
    /// The state.
    state: Option<String>,
    /// Names of what is in no state that counts.
    superfluous: Vec<String>,
    /// The highest number.
    highest: u64,
    places: Option<Places>,
}

/// The memory of a state, and the place of the mark of each of its entries.
type Places = (File, Vec<(String, usize)>);

impl Kept {
    /// Takes what is kept out of the descriptors that this process has inherited. A state that is incomplete, or of another form, counts for nothing.
    pub fn take(inherited: &mut Vec<(String, OwnedFd)>) -> Kept {
        let (ours, others) =
            std::mem::take(inherited).into_iter().partition(|(name, _)| name.starts_with(PREFIX));
        *inherited = others;
        let ours: Vec<(String, OwnedFd)> = ours;
        let mut kept = Kept::default();
        let (mut states, mut files) = (BTreeMap::new(), BTreeMap::new());
        for (name, fd) in ours {
            let number =
                |prefix: &str| name.strip_prefix(prefix).and_then(|number| number.parse::<u64>().ok());
            if let Some(number) = number(STATE) {
                kept.known.highest = kept.known.highest.max(number);
                states.insert(number, fd);
            } else if let Some(number) = number(PREFIX) {
                kept.known.highest = kept.known.highest.max(number);
                files.insert(number, fd);
            }
        }
        let numbers: BTreeSet<u64> = files.keys().copied().collect();
        if let Some((number, state)) = states.pop_last() {
            kept.known.state = Some(format!("{STATE}{number}"));
            match read(File::from(state)) {
                Ok((state, memory, first)) => kept.sort_out(state, memory, first, &mut files),
                Err(error) => tracing::warn!("what the process before has left is of no use: {error}"),
            }
        }
        let used: BTreeSet<u64> = kept.known.numbers.values().copied().collect();
        let states = states.keys().map(|number| format!("{STATE}{number}"));
        let unused = numbers.difference(&used).map(|number| format!("{PREFIX}{number}"));
        kept.known.superfluous = states.chain(unused).collect();
        files.into_values().for_each(shut);
        kept
    }

    fn sort_out(&mut self, state: State, memory: File, marks: usize, files: &mut BTreeMap<u64, OwnedFd>) {
        let mut uses = BTreeMap::<u64, usize>::new();
        for number in state.entries.iter().flat_map(|entry| &entry.descriptors).chain([&state.listener]) {
            *uses.entry(*number).or_default() += 1;
        }
        // Copies are made of those alone that come twice: each is one more to close, which may take a while (see `EventId`), and everybody waits for this process.
        let mut take = |number: &u64| {
            let left = uses.get_mut(number)?;
            *left -= 1;
            if *left == 0 { files.remove(number) } else { files.get(number)?.try_clone().ok() }
        };
        let names = state.entries.iter().map(|entry| entry.name.clone());
        let places: Vec<_> = names.zip(marks..).collect();
        for (mut entry, (_, place)) in state.entries.into_iter().zip(&places) {
            if is_marked(&memory, *place) && entry.state.forget_session() {
                tracing::warn!(
                    port = entry.name,
                    "its front end was saying something when the process was killed, and has to connect again"
                );
            }
            let descriptors: Vec<Option<OwnedFd>> = entry.descriptors.iter().map(&mut take).collect();
            if descriptors.iter().any(Option::is_none) {
                descriptors.into_iter().flatten().for_each(shut);
                tracing::warn!(
                    port = entry.name,
                    "of what the process before has left of it a part is missing"
                );
                continue;
            }
            let numbers = entry.descriptors.iter().copied();
            self.known.numbers.extend(entry.identities.iter().cloned().zip(numbers));
            let events = entry.identities.iter().map(Identity::event);
            let descriptors = Descriptors::new(descriptors.into_iter().flatten().zip(events));
            self.entries.insert(entry.name.clone(), (entry, descriptors));
        }
        self.known.places = Some((memory, places));
        self.control = take(&state.listener).map(|fd| (state.control, fd));
        let listener = self.control.as_ref().and_then(|(_, fd)| Identity::of_file(fd).ok().flatten());
        self.known.numbers.extend(listener.map(|identity| (identity, state.listener)));
        self.setup = Some(state.setup);
    }

    /// Returns true if there is nothing.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.control.is_none()
    }

    /// Returns the configuration that was in force. `None`: no process was killed, or this program does not understand it.
    pub(crate) fn config(&mut self) -> Option<Config> {
        match self.setup.as_ref()?.in_force.read() {
            Ok(config) => Some(config),
            Err(error) => {
                self.setup = None;
                tracing::warn!(
                    "the configuration of the process that was killed is not understood, so the file is read: {error}"
                );
                None
            }
        }
    }

    /// Returns the number of workers that there were.
    pub(crate) fn workers(&self) -> Option<usize> {
        self.setup.as_ref().map(|setup| setup.in_force.workers)
    }

    /// Returns the links that were down and the mirrors that there were.
    pub(crate) fn links_and_mirrors(&self) -> (Vec<String>, Vec<Mirror>) {
        self.setup.clone().map(|setup| (setup.links_down, setup.mirrors)).unwrap_or_default()
    }

    /// Takes the control socket, if it is the one at this path.
    pub(crate) fn control(&mut self, path: &Path) -> Option<OwnedFd> {
        let (_, fd) = self.control.take_if(|(kept, _)| kept == path)?;
        Some(fd)
    }

    /// Takes what was left of a port, if it is made of the same as before.
    pub(crate) fn port(&mut self, port: &PortConfig) -> Option<(HandedPort, Descriptors)> {
        let (entry, mut descriptors) = self.entries.remove(&port.name)?;
        if entry.made_of == made_of(port) {
            return Some((entry.state, descriptors));
        }
        // The manager has copies, and a socket on which anybody listens is in use.
        descriptors.rest().for_each(shut);
        None
    }

    /// Closes what nobody has taken, and returns what the manager keeps.
    pub fn into_known(self) -> Known {
        for (_, mut descriptors) in self.entries.into_values() {
            descriptors.rest().for_each(shut);
        }
        if let Some((_, listener)) = self.control {
            shut(listener);
        }
        self.known
    }
}

/// Closes a descriptor of which the manager has a copy. Nobody is to connect to a socket on which nobody listens.
fn shut(fd: OwnedFd) {
    if rustix::net::sockopt::socket_acceptconn(&fd) == Ok(true) {
        let _ = rustix::net::shutdown(&fd, rustix::net::Shutdown::Both);
    }
}

/// Reads a state, and returns the place of the first mark behind its text.
fn read(file: File) -> io::Result<(State, File, usize)> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut length = [0; TEXT];
    file.read_exact_at(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_STATE {
        return Err(bad("it is too long"));
    }
    let mut text = vec![0; length as usize];
    file.read_exact_at(&mut text, TEXT as u64)?;
    let state: State = serde_json::from_slice(&text)?;
    if state.format != FORMAT {
        return Err(bad("it is of another version of this program"));
    }
    Ok((state, file, first_mark(text.len())))
}

/// Whether a mark is set. A program that makes none leaves no room for them, or zeros.
fn is_marked(memory: &File, place: usize) -> bool {
    let mut word = [0; size_of::<u32>()];
    memory.read_exact_at(&mut word, (place * size_of::<u32>()) as u64).is_ok() && word != [0; 4]
}
