//! The table of ports: every entry of the configuration with its control side, whatever its kind.
//!
//! The switch makes one table. Entries are [added](PortTable::add) and [removed](PortTable::remove) at any time; each gets an
//! [`EntryId`] that is never used again, and epoll tokens that are made of it, so that an event that was already reported for an entry that has gone
//! finds nobody. Ports of entries have a [`PortId`] each, allocated for all kinds alike.
//!
//! All methods are called on the control plane's thread, and return without waiting for a peer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use ringferry_control::snapshot::PortSnapshot;
use ringferry_sys::epoll::Epoll;

use super::ids::PortIds;
use super::queues::{QueueState, Workers};
use super::xen::MappingBudget;
use super::{Context, Interface, OpenError, Plug, PortControl};
use crate::config::PortConfig;
use crate::fdb::PortId;
use crate::rules::Rules;

/// The number of an entry of the table, in the order in which they were added; the first is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EntryId(u32);

/// States of workers' queues, by port and index.
pub(crate) type QueueStates = BTreeMap<(PortId, u16), QueueState>;

/// The epoll token of a descriptor of an entry. Tokens below [`FIRST_TOKEN`] are not the table's.
pub(super) fn token(entry: EntryId, sub: u32) -> u64 {
    u64::from(entry.0) << 32 | u64::from(sub)
}

/// The least token that an entry has.
pub(crate) const FIRST_TOKEN: u64 = 1 << 32;

/// See the head of this file.
pub(crate) struct PortTable {
    entries: BTreeMap<EntryId, Entry>,
    last: EntryId,
    ids: PortIds,
    budget: MappingBudget,
    workers: Arc<Workers>,
}

/// An entry of the configuration.
struct Entry {
    config: PortConfig,
    control: Box<dyn PortControl>,
}

impl PortTable {
    /// A table without ports.
    pub(crate) fn new(workers: Arc<Workers>) -> Self {
        Self {
            entries: BTreeMap::new(),
            last: EntryId(0),
            ids: PortIds::default(),
            budget: MappingBudget::of_system(),
            workers,
        }
    }

    /// Plugs a port in that was [opened](super::open).
    ///
    /// # Errors
    /// The system's descriptors, or the numbers of ports, are used up; nothing is left of the port.
    pub(crate) fn add(
        &mut self,
        config: PortConfig,
        plug: Plug,
        epoll: &Epoll,
    ) -> Result<EntryId, OpenError> {
        let entry = EntryId(self.last.0 + 1);
        let Self { ids, budget, workers, .. } = self;
        let control = plug(&config, &mut Context { workers, epoll, ids, budget, entry })?;
        self.last = entry;
        self.entries.insert(entry, Entry { config, control });
        Ok(entry)
    }

    /// Unplugs the port of this name, and says whether there was one. When this returns no worker knows of it.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "the command that removes ports comes with live configuration")
    )]
    pub(crate) fn remove(&mut self, name: &str, epoll: &Epoll) -> bool {
        let found = self.entries.iter().find(|(_, entry)| entry.config.name == name).map(|(id, _)| *id);
        let Some(id) = found else { return false };
        self.with(id, epoll, |control, cx| control.remove(cx));
        self.entries.remove(&id);
        true
    }

    /// Calls an entry's control side.
    fn with<T>(
        &mut self,
        id: EntryId,
        epoll: &Epoll,
        task: impl FnOnce(&mut dyn PortControl, &mut Context<'_>) -> T,
    ) -> Option<T> {
        let Self { entries, ids, budget, workers, .. } = self;
        let entry = entries.get_mut(&id)?;
        Some(task(&mut *entry.control, &mut Context { workers, epoll, ids, budget, entry: id }))
    }

    /// Does the same with every entry until `task` returns true.
    fn any(&mut self, epoll: &Epoll, mut task: impl FnMut(&mut dyn PortControl, &mut Context<'_>) -> bool) {
        let Self { entries, ids, budget, workers, .. } = self;
        for (id, entry) in entries {
            if task(&mut *entry.control, &mut Context { workers, epoll, ids, budget, entry: *id }) {
                return;
            }
        }
    }

    /// Lets all entries begin.
    pub(crate) fn begin(&mut self, epoll: &Epoll) {
        self.any(epoll, |control, cx| {
            control.serve(0, cx);
            false
        });
    }

    /// Serves an event, by its token. One of an entry that has gone is left alone.
    pub(crate) fn serve(&mut self, token: u64, epoll: &Epoll) {
        let entry = EntryId((token >> 32) as u32);
        self.with(entry, epoll, |control, cx| control.serve(token as u32, cx));
    }

    /// The time at which [`serve_due`](PortTable::serve_due) has something to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.entries.values().filter_map(|entry| entry.control.deadline()).min()
    }

    /// Serves the entries whose deadline is over.
    pub(crate) fn serve_due(&mut self, now: Instant, epoll: &Epoll) {
        self.any(epoll, |control, cx| {
            if control.deadline().is_some_and(|due| due <= now) {
                control.serve(0, cx);
            }
            false
        });
    }

    /// Lets every entry look at what nobody announces.
    pub(crate) fn tick(&mut self, epoll: &Epoll) {
        self.any(epoll, |control, cx| {
            control.tick(cx);
            false
        });
    }

    /// Disconnects the peers that workers cannot serve any more.
    pub(crate) fn serve_faults(&mut self, epoll: &Epoll) {
        let workers = Arc::clone(&self.workers);
        for fault in workers.faults() {
            self.any(epoll, |control, cx| control.fault(&fault, cx));
        }
    }

    /// Changes the rules of an entry.
    pub(crate) fn set_rules(&mut self, name: &str, rules: &Rules) {
        if let Some(entry) = self.entries.values_mut().find(|entry| entry.config.name == name) {
            entry.control.set_rules(rules, &self.workers);
            entry.config.rules.clone_from(rules);
        }
    }

    /// The configurations of all entries, in their order.
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

    /// The port of this name, if it exists now.
    pub(crate) fn interface(&self, name: &str) -> Option<Interface<'_>> {
        self.interfaces().find(|port| port.name == name)
    }

    /// Every port that exists now.
    pub(crate) fn interfaces(&self) -> impl Iterator<Item = Interface<'_>> {
        self.entries.values().flat_map(|entry| entry.control.interfaces())
    }

    /// The state of all ports.
    pub(crate) fn snapshots(&self) -> Vec<PortSnapshot> {
        let states = self.workers.inspect();
        let mut states: QueueStates =
            states.into_iter().map(|(port, state)| ((port, state.index), state)).collect();
        let entries = self.entries.values();
        entries.flat_map(|entry| entry.control.snapshots(&entry.config, &self.budget, &mut states)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::config::{Config, SwitchConfig};
    use crate::ports::passed::Passed;

    /// The ports of a configuration, by their flags.
    fn configs(flags: &[String]) -> Vec<PortConfig> {
        let mut builder = Config::builder();
        for flag in flags {
            builder = builder.port_flag(flag);
        }
        builder.build().unwrap().ports
    }

    fn table() -> (PortTable, Epoll) {
        let config = SwitchConfig { workers: Some(2), ..SwitchConfig::default() };
        (PortTable::new(Arc::new(Workers::start(&config).unwrap())), Epoll::new().unwrap())
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
            // What was already reported for it finds nobody.
            table.serve(token(entry, 0), &epoll);
            drop(peer);
        }
        assert!(descriptors() < before + NOISE, "descriptors are leaked");
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
