//! The state of a switch on its way to another process, as text (JSON) and [bulk](super::bulk) data.
//!
//! **Form.** The number of the form changes when a successor of an earlier form could not go on with what is sent. Fields may be added without that: a
//! reader passes over fields that it does not know, and has a default for those that it misses. What a successor must understand, or not take over, is named in
//! [`Hello::needs`].
//!
//! Everything is checked by the successor as a peer's words are, though it comes from a process of the same user.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ringferry_control::mirror::Mirror;
use ringferry_firewall::Source;
use ringferry_sys::eventfd::EventId;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::bulk::Section;
use super::kept::Inventory;
use crate::config::policies;
use crate::config::{Config, ConfigError, ConfigFile};
use crate::counters::{PAIR_COUNTERS, WORKER_COUNTERS};
use crate::plane::ModelState;
use crate::ports::Positions;
use crate::ports::handed::{Descriptors, HandedPort};
use crate::rules::FirewallRule;

/// The form of the state that this program writes, and the newest that it reads.
pub(crate) const FORMAT: u32 = 1;

/// Names in [`Hello::needs`] that this program understands.
pub(crate) const UNDERSTOOD: &[&str] = &["vhost-user", "tap", "xen-vif", "xdp"];

/// What a successor is told first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The form of this state.
    pub(crate) format: u32,
    /// What a successor must understand.
    pub(crate) needs: Vec<String>,
    /// Version of the program.
    pub(crate) program: String,
    /// The file that the process executes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) executable: Option<FileId>,
    /// The network namespace of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) network: Option<FileId>,
    /// The configuration.
    #[serde(flatten)]
    pub(crate) in_force: InForce,
    /// When the switch's clock began, in nanoseconds of the system's monotonic clock.
    pub(crate) began: u64,
    /// When the switch was started, likewise.
    pub(crate) started: u64,
    /// The service manager wants to hear within so many microseconds that the switch is alive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) watchdog: Option<u64>,
    /// Whether the process is in a sandbox. One of an earlier version does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sandboxed: Option<bool>,
}

/// The configuration in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InForce {
    /// As a file.
    pub(crate) config: String,
    /// The file that it was read from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<FileState>,
    /// The policies of firewalls that ports name, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) policies: BTreeMap<String, PolicyState>,
    /// Number of workers.
    pub(crate) workers: usize,
}

/// A policy: the texts that it was read from, whatever has become of the files since.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PolicyState {
    /// The policy.
    pub(crate) text: String,
    /// The files of its sets, by name.
    pub(crate) files: BTreeMap<String, String>,
}

impl InForce {
    /// Says what is in force in this process, which has so many workers.
    pub(crate) fn of(config: &Config, workers: usize) -> InForce {
        let path = |path: &Path| path.display().to_string();
        let file = config.file.as_ref().map(|file| FileState {
            path: path(&file.path),
            ports: file.ports.clone(),
            wires: file.wires.clone(),
            settings: file.settings().to_owned(),
            drop_ins: file.drop_ins.iter().map(|(port, file)| (port.clone(), path(file))).collect(),
        });
        let firewalls = config.ports.iter().filter_map(|port| port.rules.firewall.as_ref());
        let policies = firewalls.filter_map(|FirewallRule { name, policy }| {
            let Source { text, files } = policy.as_ref()?.source().clone();
            Some((name.clone(), PolicyState { text, files }))
        });
        InForce { config: config.dump(), file, policies: policies.collect(), workers }
    }

    /// Makes the same configuration of it.
    ///
    /// # Errors
    /// This program does not understand it.
    pub(crate) fn read(&self) -> Result<Config, ConfigError> {
        let builder = Config::builder().may_be_empty().toml("the configuration in force", &self.config);
        let mut config = builder.build()?;
        config.file = self.file.as_ref().map(|FileState { path, ports, wires, settings, drop_ins }| {
            let drop_ins = drop_ins.iter().map(|(port, path)| (port.clone(), PathBuf::from(path))).collect();
            ConfigFile::read_before(
                PathBuf::from(path),
                ports.clone(),
                wires.clone(),
                settings.clone(),
                drop_ins,
            )
        });
        let source = |PolicyState { text, files }: PolicyState| Source { text, files };
        let sources = self.policies.iter().map(|(name, policy)| (name.clone(), source(policy.clone())));
        policies::load_from(&mut config.ports, &sources.collect())?;
        Ok(config)
    }
}

/// What tells a file from all others for as long as it is in use: another one cannot have its number meanwhile, under whatever name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// Returns that of the file that this process executes; `None` where there is no `/proc`. A process in the sandbox can be looked at by nobody but itself.
    pub(crate) fn of_executable() -> Option<FileId> {
        Self::at("/proc/self/exe")
    }

    /// Returns that of the network namespace of this process; `None` where there is no `/proc`.
    pub(crate) fn of_network() -> Option<FileId> {
        Self::at("/proc/self/ns/net")
    }

    fn at(path: &str) -> Option<FileId> {
        let file = std::fs::metadata(path).ok()?;
        Some(FileId { device: file.dev(), inode: file.ino() })
    }
}

/// A configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileState {
    /// Its path.
    pub(crate) path: String,
    /// The ports in it.
    pub(crate) ports: Vec<String>,
    /// The wires in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) wires: Vec<String>,
    /// What it says that is not about a port.
    pub(crate) settings: String,
    /// The drop-in file of each port that is in one.
    #[serde(default)]
    pub(crate) drop_ins: BTreeMap<String, String>,
}

/// The state of a switch whose packets still flow.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Draft {
    /// The entries of the configuration, in their order.
    pub(crate) entries: Vec<EntryState>,
    /// The ports that there are, by name, with the number that each has in the process.
    pub(crate) numbers: BTreeMap<String, u16>,
    /// The forwarding database.
    pub(crate) addresses: Section,
    /// The third descriptor is the connection to the service manager.
    #[serde(default)]
    pub(crate) manager: bool,
    /// The service manager keeps what the next process needs if this one is killed.
    #[serde(default)]
    pub(crate) keeps: bool,
}

/// An entry of the configuration.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct EntryState {
    /// Its name.
    pub(crate) name: String,
    /// Its state, whose descriptors are the next [`descriptors`](Self::descriptors) of the message; absent: as in the draft.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) state: Option<HandedPort>,
    /// How many descriptors its state has.
    #[serde(default)]
    pub(crate) descriptors: usize,
    /// The mark of each of them that is an event. One of an earlier version does not say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) events: Vec<Option<u64>>,
    /// Where its rings go on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) positions: Positions,
}

/// The state of a switch that stands still.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Final {
    /// The entries of the configuration, in the order of the draft.
    pub(crate) entries: Vec<EntryState>,
    /// The ports that there are, by name.
    pub(crate) ports: BTreeMap<String, PortNumbers>,
    /// Addresses that were seen since the draft.
    pub(crate) addresses: Section,
    /// What each worker has.
    pub(crate) workers: Vec<WorkerState>,
    /// Ports whose links were taken down.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) links_down: Vec<String>,
    /// Mirrors of ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) mirrors: Vec<Mirror>,
    /// Seeds that were drawn for wires, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) seeds: BTreeMap<String, u64>,
    /// What the service manager keeps. A successor that goes on with that [says so](Running::keeps); what another one keeps has other names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kept: Option<Inventory>,
}

/// What a successor says when it has taken over. One of an earlier version says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Running {
    /// It goes on with what the service manager keeps, which is not to be removed.
    pub(crate) keeps: bool,
}

/// Counters in an order that stays as it is. Further ones can be added at the end: a reader passes over those that it does not know, and takes those
/// that it misses for 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Values<const N: usize>(pub(crate) [u64; N]);

impl<const N: usize> Default for Values<N> {
    fn default() -> Self {
        Self([0; N])
    }
}

impl<const N: usize> Serialize for Values<N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.as_slice().serialize(serializer)
    }
}

impl<'de, const N: usize> Deserialize<'de> for Values<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let values = Vec::<u64>::deserialize(deserializer)?;
        Ok(Self(std::array::from_fn(|at| values.get(at).copied().unwrap_or(0))))
    }
}

/// What there is to say of one port, besides its entry.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PortNumbers {
    /// Its number in the process.
    pub(crate) number: u16,
    /// The worker of each of its queues.
    pub(crate) owners: Vec<usize>,
    /// Its counters.
    pub(crate) counters: BTreeMap<String, u64>,
    /// Its drops by reason.
    pub(crate) drops: BTreeMap<String, u64>,
    /// Counters of its queue pairs.
    pub(crate) pairs: Vec<Values<PAIR_COUNTERS>>,
    /// How much of its token buckets is used, by key of the rule.
    pub(crate) buckets: BTreeMap<String, u64>,
    /// The flows that its guest sends.
    pub(crate) flows: Section,
    /// The flows that its firewall knows.
    pub(crate) firewall: Section,
}

/// What one worker has.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct WorkerState {
    /// Its counters.
    pub(crate) counters: Values<WORKER_COUNTERS>,
    /// Counters of its forwarding database: learned, moved, replaced, refused, aged, limited.
    pub(crate) fdb: Values<6>,
    /// Frames that wait in its shapers.
    pub(crate) waiting: Section,
    /// Frames that wait on wires, each with the time at which it is due.
    #[serde(skip_serializing_if = "Section::is_empty")]
    pub(crate) on_wires: Section,
    /// Where the chance of wires stands, by the number of the port.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) chance: BTreeMap<u16, ModelState>,
}

impl EntryState {
    /// Notes the marks of its descriptors, and returns these.
    pub(crate) fn note(&mut self, descriptors: Descriptors) -> Vec<OwnedFd> {
        let (fds, events): (Vec<_>, Vec<_>) = descriptors.into_inner().unzip();
        self.descriptors = fds.len();
        self.events = events.into_iter().map(|event| event.map(|event| event.0)).collect();
        fds
    }

    /// Takes its descriptors out of those of the message, which begin with them.
    pub(crate) fn descriptors(&self, message: &mut impl Iterator<Item = OwnedFd>) -> Descriptors {
        let events = self.events.iter().map(|event| event.map(EventId)).chain(std::iter::repeat(None));
        Descriptors::new(message.take(self.descriptors).zip(events))
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    /// The state of a switch with a connected front end, a port without one and a tap, as the first program wrote it.
    const HELLO: &str = include_str!("recorded/form-1-hello.json");
    const DRAFT: &str = include_str!("recorded/form-1-draft.json");
    const FINAL: &str = include_str!("recorded/form-1-final.json");

    fn read<T: DeserializeOwned>(text: &str) -> T {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn what_the_first_program_has_written_is_read() {
        let hello: Hello = read(HELLO);
        assert_eq!((hello.format, hello.in_force.workers, hello.began), (1, 2, 30_607_174_003_550));
        assert_eq!(hello.needs, ["tap", "vhost-user"]);
        assert_eq!(hello.in_force.file.unwrap().ports, ["vm0", "b", "rfe0"]);
        let draft: Draft = read(DRAFT);
        let entries: Vec<_> =
            draft.entries.iter().map(|entry| (entry.name.as_str(), entry.descriptors)).collect();
        assert_eq!(entries, [("vm0", 9), ("b", 0), ("rfe0", 2)]);
        let is_tap = |state: &Option<HandedPort>| matches!(state, Some(HandedPort::Tap(_)));
        assert_eq!(
            draft.entries.iter().map(|entry| is_tap(&entry.state)).collect::<Vec<_>>(),
            [false, false, true]
        );
        assert_eq!(draft.numbers["rfe0"], 2);
        let last: Final = read(FINAL);
        assert_eq!(last.entries[0].positions[..3], [Some(0), Some(0), None]);
        let port = &last.ports["vm0"];
        assert_eq!((port.pairs[0].0[6], port.owners.len(), port.counters["calls"]), (2, 16, 2));
        assert_eq!(last.ports["b"].drops["link-down"], 6);
        assert_eq!(last.workers[0].counters.0[..2], [203, 5]);
        // What is written now, a reader of the first form still finds all of it.
        for (written, recorded) in [
            (serde_json::to_value(read::<Hello>(HELLO)), HELLO),
            (serde_json::to_value(draft), DRAFT),
            (serde_json::to_value(last), FINAL),
        ] {
            assert_contains(&written.unwrap(), &read(recorded));
        }
    }

    /// All of `old` is in `new`, with its values.
    #[track_caller]
    fn assert_contains(new: &Value, old: &Value) {
        match (new, old) {
            (Value::Object(new), Value::Object(old)) => {
                for (key, old) in old {
                    assert_contains(new.get(key).unwrap_or_else(|| panic!("{key} is missing")), old);
                }
            }
            (Value::Array(new), Value::Array(old)) => {
                assert!(new.len() >= old.len(), "{new:?} {old:?}");
                new.iter().zip(old).for_each(|(new, old)| assert_contains(new, old));
            }
            _ => assert_eq!(new, old),
        }
    }

    /// Reads a text whose objects at `places` have a field more.
    fn with_more<T: DeserializeOwned>(text: &str, places: &[&str]) -> T {
        let mut value: Value = read(text);
        for place in places {
            let object = value.pointer_mut(place).and_then(Value::as_object_mut);
            object.expect("an object").insert("novelty".to_owned(), json!({ "of": ["a", 1] }));
        }
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn what_a_later_program_adds_is_passed_over() {
        let hello: Hello = with_more(HELLO, &["", "/file"]);
        assert_eq!(hello, read(HELLO));
        let port = "/entries/0/state/vhost-user";
        let places = ["/session", "/session/memory/0", "/session/rings/0", "/session/counters", "/past", ""];
        let places = places.map(|place| format!("{port}{place}"));
        let places: Vec<_> = places.iter().map(String::as_str).collect();
        let more = ["", "/entries/0", "/entries/2/state/tap"];
        let draft: Draft = with_more(DRAFT, &[&more[..], &places].concat());
        assert_eq!(format!("{draft:?}"), format!("{:?}", read::<Draft>(DRAFT)));
        let last: Final = with_more(FINAL, &["", "/entries/0", "/ports/vm0", "/workers/1"]);
        assert_eq!(format!("{last:?}"), format!("{:?}", read::<Final>(FINAL)));
        let port: PortNumbers =
            read(r#"{ "pairs": [[1, 2, 3, 4, 5, 6, 7, 8, 9]], "counters": { "fears": 3 } }"#);
        assert_eq!(port.pairs, [Values([1, 2, 3, 4, 5, 6, 7, 8])]);
    }

    #[test]
    fn what_an_earlier_program_did_not_say_has_a_default() {
        let last: Final = read(
            r#"{ "entries": [{ "name": "a" }], "ports": { "a": {} }, "addresses": { "at": 0, "bytes": 0 }, "workers": [{}, { "fdb": [4] }] }"#,
        );
        assert!(last.entries[0].state.is_none() && last.entries[0].positions.is_empty());
        assert!(last.ports["a"].owners.is_empty());
        assert_eq!(
            (last.workers[0].counters, last.workers[1].fdb),
            (Values([0; WORKER_COUNTERS]), Values([4, 0, 0, 0, 0, 0]))
        );
    }
}
