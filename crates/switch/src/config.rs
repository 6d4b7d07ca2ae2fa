//! The configuration of the switch: a typed [`Config`] made from a TOML file, from `--port` flags, or from
//! both.
//!
//! The file is the source of truth and flags add to it. [`Config::builder`] gathers everything, checks each
//! key where it was written and then all ports against each other, and either returns a configuration that
//! can be started as it stands or **every** problem it found, each with its place, such as
//! `ringferry.toml:12: port.mtu: 70000 is outside 68 to 65535`. Nothing is opened, created or bound here.
//!
//! A port of any kind may have rules ([`Rules`]), which `ringferry ctl set` changes while the switch runs;
//! interfaces of a xen-vif port have those of their entry.
//!
//! Every key is a row of one table (`Keys`), from which it is parsed and written, and from which the help of
//! the program and docs/configuration.md, which has all keys with their ranges and defaults, are made. A kind
//! of port keeps its rows in its own folder (`PortSettings`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display, Write as _};
use std::ops::RangeInclusive;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use ringferry_packet::ether::Mac;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::impairments::Wire;
use crate::plane::Owners;
use crate::rules::{Rules, Vid};

mod changes;
mod edit;
mod file;
mod help;
mod host;
pub(crate) mod oddities;
mod parse;
pub(crate) mod policies;
mod reference;
mod rules;
mod table;
mod values;
pub(crate) mod wires;
use parse::{Document, Place, PortKeys, Value, parse_flag, parse_port};
use rules::RulesKeys;
use values::{Described, Shape};
use wires::{ImpairmentKeys, WireKeys};

#[cfg(feature = "testing")]
pub use changes::follow;

pub use crate::ports::tap::config::{LinkConfig, MAX_TAP_NAME, TapConfig, TapSource};
pub use crate::ports::vhost::config::{AccessConfig, FeatureToggles, VhostUserConfig, VhostUserEndpoint};
pub use crate::ports::xdp::config::{Checksums, XdpConfig};
pub use crate::ports::xen::config::{Transfer, VifName, XenProvider, XenVifConfig};
pub(crate) use edit::Edit;
use file::drop_in_directory;
pub use file::drop_ins;
pub(crate) use file::wires::{forget_wire, keep_wire};
pub(crate) use file::{KeepError, Kept, forget_port, keep, keep_port};
pub use help::{port_keys_help, setting_keys, settings_help, wire_help};
pub(crate) use parse::Fields;
pub use reference::{EXAMPLE, ReferenceKey, ReferenceSection, reference};
pub(crate) use rules::entries as rules_by_key;
pub(crate) use table::{Effect, Key, Keys, Unset, keys};
pub(crate) use values::{
    Boolean, Choice, Codec, Each, List, MAC, SOCKET, Text, digits, number, number_of, power_of_two,
};

/// Bytes a Unix socket path may have: `sun_path` holds 108 with the closing NUL (unix(7)).
pub const MAX_SOCKET_PATH: usize = 107;
/// Bytes the name of a port may have. It appears in tables, JSON and logs, hence short.
pub const MAX_PORT_NAME: usize = 63;
/// MTU of a vhost-user port that names none, in bytes without the Ethernet header.
pub const DEFAULT_MTU: u16 = 1500;
/// MTUs a port may have: the range VIRTIO 1.4, 5.1.4.1 allows in the configuration space.
pub const MTU_RANGE: RangeInclusive<u64> = 68..=65535;

/// The configuration of one `ringferry run`. Made by [`Config::builder`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Path of the control socket; absent: the program's default.
    pub control: Option<PathBuf>,
    /// Further directories in which ports that are added to a running switch in its sandbox may have their sockets.
    pub socket_directories: Vec<PathBuf>,
    /// The directory of the policies of firewalls; absent: `policies` beside the file.
    pub policies: Option<PathBuf>,
    /// Settings of the switch as a whole.
    pub switch: SwitchConfig,
    /// The ports, in the order they were written (file before flags). Names, sockets, taps, descriptors and static addresses are
    /// unique. Only a file may have none.
    pub ports: Vec<PortConfig>,
    /// The wires, in the order they were written. Their names are unique, they join ports that there are, and no port is in two.
    pub wires: Vec<Wire>,
    /// The file that the configuration was read from, if there was one.
    pub file: Option<ConfigFile>,
}

/// A file that a configuration was read from, with the [drop-in files](drop_ins) beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFile {
    /// Absolute path of the file.
    pub path: PathBuf,
    /// Names of the ports in it, and in its drop-in files.
    pub ports: Vec<String>,
    /// Names of the wires in it, and in its drop-in files.
    pub(crate) wires: Vec<String>,
    /// The drop-in files of the ports that are in one.
    pub(crate) drop_ins: BTreeMap<String, PathBuf>,
    /// Files that may be half of one: those that are there and have no port, and the directory of drop-in files if that is not there.
    pub(crate) blank: BTreeSet<PathBuf>,
    /// What it says that is not about a port, as TOML.
    settings: String,
}

impl ConfigFile {
    /// The file that another process has read: its path, the names of its ports and wires, and what it says that is not about a port.
    pub(crate) fn read_before(
        path: PathBuf,
        ports: Vec<String>,
        wires: Vec<String>,
        settings: String,
        drop_ins: BTreeMap<String, PathBuf>,
    ) -> ConfigFile {
        ConfigFile { path, ports, wires, drop_ins, blank: BTreeSet::new(), settings }
    }

    /// What it says that is not about a port, as TOML.
    pub(crate) fn settings(&self) -> &str {
        &self.settings
    }

    /// The file at `path` with all of this configuration in it, but for ports that are in drop-in files.
    pub(crate) fn of(
        path: &Path,
        config: &Config,
        drop_ins: BTreeMap<String, PathBuf>,
        blank: BTreeSet<PathBuf>,
    ) -> ConfigFile {
        ConfigFile {
            path: path.to_owned(),
            drop_ins,
            blank,
            ports: config.ports.iter().map(|port| port.name.clone()).collect(),
            wires: config.wires.iter().map(|wire| wire.name.clone()).collect(),
            settings: config.settings(),
        }
    }
}

impl ConfigFile {
    /// Returns the file that has the port of this name, if one has.
    pub(crate) fn with_port(&self, name: &str) -> Option<&Path> {
        let has = self.ports.iter().any(|port| port == name);
        has.then(|| self.drop_ins.get(name).unwrap_or(&self.path).as_path())
    }

    /// Forgets a port that is in the file no more.
    pub(crate) fn forget(&mut self, name: &str) {
        self.ports.retain(|port| port != name);
        self.drop_ins.remove(name);
    }
}

/// Settings of the switch as a whole: the `[switch]` table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchConfig {
    /// Seconds after which a MAC address that sent nothing is forgotten. 300 as in IEEE 802.1Q, 8.8.3 and the
    /// Linux bridge.
    pub mac_age_seconds: u32,
    /// Most MAC addresses remembered. A port can fill at most half of it (see [`crate::fdb`]), so size it for
    /// twice the busiest port.
    pub mac_table_size: u32,
    /// Microseconds that a worker polls at most without work before it sleeps; 0: never. It polls only while
    /// polling finds work, nobody else wants its processor, and it is idle for most of the time
    /// ([`ringferry_sys::spin`]). With 50, it goes on while work comes some 20 000 times a second: at a tenth
    /// of what can be carried the median latency more than halved.
    pub poll_microseconds: u32,
    /// Threads that move packets, 1 to [`MAX_WORKERS`]; absent: one for each two processors, at most 4. Queue pair `p` of
    /// every port belongs to worker `p` modulo their number, so that more of them serve machines with several queues.
    pub workers: Option<u16>,
    /// GiB of guest memory that all vhost-user ports together may have mapped: half of the address space, whatever front ends ask for.
    pub guest_memory_gib: u32,
    /// GiB of guest memory that one vhost-user port may have mapped. A change of a memory map has the old and the new one for a moment, so
    /// that twice the largest machine is needed.
    pub port_memory_gib: u32,
}

/// Upper bound on the workers: more would have no queue pair of any port.
pub const MAX_WORKERS: u16 = crate::plane::PAIRS;

/// The address space of a process on x86-64, in GiB.
const MAX_MEMORY_GIB: u32 = 128 << 10;

impl SwitchConfig {
    /// Returns the number of workers, with the default if none is configured.
    pub fn workers(&self) -> usize {
        let processors = || std::thread::available_parallelism().map_or(1, usize::from);
        self.workers.map_or_else(|| (processors() / 2).clamp(1, 4), usize::from)
    }
}

impl SwitchConfig {
    /// Takes over the settings that the keys give; the others stay as they are.
    fn apply(&mut self, keys: SwitchKeys) {
        let SwitchKeys {
            mac_age_seconds,
            mac_table_size,
            poll_microseconds,
            workers,
            guest_memory_gib,
            port_memory_gib,
        } = keys;
        *self = SwitchConfig {
            mac_age_seconds: mac_age_seconds.unwrap_or(self.mac_age_seconds),
            mac_table_size: mac_table_size.unwrap_or(self.mac_table_size),
            poll_microseconds: poll_microseconds.unwrap_or(self.poll_microseconds),
            workers: workers.or(self.workers),
            guest_memory_gib: guest_memory_gib.unwrap_or(self.guest_memory_gib),
            port_memory_gib: port_memory_gib.unwrap_or(self.port_memory_gib),
        };
    }

    fn to_keys(self) -> SwitchKeys {
        let SwitchConfig {
            mac_age_seconds,
            mac_table_size,
            poll_microseconds,
            workers,
            guest_memory_gib,
            port_memory_gib,
        } = self;
        SwitchKeys {
            mac_age_seconds: Some(mac_age_seconds),
            mac_table_size: Some(mac_table_size),
            poll_microseconds: Some(poll_microseconds),
            workers,
            guest_memory_gib: Some(guest_memory_gib),
            port_memory_gib: Some(port_memory_gib),
        }
    }
}

impl Default for SwitchConfig {
    fn default() -> Self {
        SwitchConfig {
            mac_age_seconds: 300,
            mac_table_size: 16384,
            poll_microseconds: 50,
            workers: None,
            guest_memory_gib: 65536,
            port_memory_gib: 8192,
        }
    }
}

/// One port: a `[[port]]` table or a `--port` flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// Unique name, 1 to [`MAX_PORT_NAME`] ASCII letters, digits and `-_.:@`.
    pub name: String,
    /// MTU in bytes ([`MTU_RANGE`]): set on a tap, told to a front end that asks, and the most that one may
    /// set. Frames are not measured against it. Absent: a tap keeps the MTU it has; a vhost-user port starts
    /// with [`DEFAULT_MTU`], and its front end may set any.
    pub mtu: Option<u16>,
    /// The workers that serve the first queue pairs, each another; the workers after the last of them serve the further pairs in turn. For a
    /// tap with one queue, the worker that reads it. Empty: worker 0.
    pub workers: Vec<u16>,
    /// The kind of port, with the settings that only this kind has.
    pub kind: PortKind,
    /// VLANs, source guard, limits and weight of the port.
    pub rules: Rules,
}

/// The configuration of one kind of port, as its folder defines it.
pub(crate) trait PortSettings: Sized {
    /// This kind's value of the key `kind`.
    const KIND: &'static str;
    /// The `--port` flags that make a port of this kind.
    const FLAGS: &'static [Flag];
    /// The keys that only this kind has.
    type Keys: Keys;

    /// Checks the keys together and turns them into the configuration of a port. Reports what is wrong;
    /// returns `None` if too little makes sense.
    fn from_keys(keys: Self::Keys, fields: &mut Fields<'_>) -> Option<Self>;

    /// Returns the keys that [`from_keys`](Self::from_keys) turns into this configuration.
    fn to_keys(&self) -> Self::Keys;

    /// Returns what the port claims for itself, so that no other port can have it.
    fn claim(&self) -> Claim<'_>;

    /// Returns the name of a port of this kind that is given none.
    fn default_name(&self) -> String;

    /// Returns true if several ports are made of one entry of the configuration.
    fn is_shared(&self) -> bool {
        false
    }

    /// Returns true if the port is made of a descriptor that is passed to the program at its start.
    fn is_passed(&self) -> bool {
        false
    }

    /// Returns the name of the interface that the port leaves behind when it is removed.
    fn lasting_interface(&self) -> Option<&str> {
        None
    }

    /// Returns true if no guest is behind the port.
    fn is_of_the_host(&self) -> bool {
        false
    }

    /// Returns true if front ends connect to the port and agree with it on settings that hold until they disconnect.
    fn has_sessions(&self) -> bool {
        true
    }
}

/// One way to begin a `--port` flag: `WORD:PLACE` is short for `kind` and one more key.
#[derive(Debug)]
pub(crate) struct Flag {
    /// The word before the colon, such as `tap`.
    pub(crate) word: &'static str,
    /// The key that takes the text after the colon.
    pub(crate) key: &'static str,
    /// Placeholder for the value of `key` in messages.
    pub(crate) place: &'static str,
    /// One sentence about such a port, for the help of the program.
    pub(crate) help: &'static str,
}

/// The place in a file where keys may stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// Before the first table of the file.
    Top,
    /// Keys of the table `[switch]`.
    Switch,
    /// Keys of every `[[port]]` table, whatever its kind.
    Port,
    /// In a `[[port]]` of this kind.
    Kind(&'static str),
    /// In every `[[port]]`: what its frames must obey.
    Rules,
    /// Keys of the table `[[wire]]` alone.
    Wire,
    /// In a `[[wire]]`, or in the table of one of its directions: what becomes of frames.
    Impairments,
}

impl Scope {
    /// Returns true for a place in a `[[port]]` table.
    fn is_of_port(self) -> bool {
        matches!(self, Scope::Port | Scope::Kind(_) | Scope::Rules)
    }
}

impl Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::Top => f.write_str("the keys before all tables"),
            Scope::Switch => f.write_str("the keys of [switch]"),
            Scope::Port => f.write_str("the keys of every port"),
            Scope::Kind(kind) => write!(f, "the keys of a {kind} port"),
            Scope::Rules => f.write_str("the rules of a port"),
            Scope::Wire | Scope::Impairments => f.write_str("the keys of a wire"),
        }
    }
}

/// The whole table: the rows that may stand in each place.
fn sections() -> impl Iterator<Item = (Scope, &'static [Key])> {
    let first =
        [(Scope::Top, TopKeys::KEYS), (Scope::Switch, SwitchKeys::KEYS), (Scope::Port, PortKeys::KEYS)];
    let kinds = PortKind::keys().map(|(kind, keys)| (Scope::Kind(kind), keys));
    let wires = [(Scope::Wire, WireKeys::KEYS), (Scope::Impairments, ImpairmentKeys::KEYS)];
    first.into_iter().chain(kinds).chain([(Scope::Rules, RulesKeys::KEYS)]).chain(wires)
}

keys! {
    /// The keys before all tables.
    pub(crate) struct TopKeys: Restart {
        /// Sets the path of the control socket, to which `ringferry ctl` connects. `--control` overrides it.
        control: PathBuf {
            is: SOCKET,
            default: Unset::Means(
                "`/run/ringferry/control.sock` for root, `$XDG_RUNTIME_DIR/ringferry.sock` for others, \
                 `/tmp/ringferry-UID/control.sock` without that variable",
            ),
            example: "/run/ringferry/control.sock",
        }
        /// Lists directories in which ports that are added while the switch runs (`ringferry ctl add`) may have their
        /// sockets. The directories of sockets on which the switch listens from its start need not be listed, except
        /// for ports with `mode = "connect"`.
        socket_directories: Vec<PathBuf> {
            is: List(DIRECTORY),
            default: Unset::Means("none but those in which the switch listens"),
            example: "/run/machines",
        }
        /// Sets the directory of the policies that ports name as their `firewall`. `--policies` overrides it.
        policies: PathBuf {
            is: DIRECTORY,
            default: Unset::Means("`policies` beside the file"),
            example: "/etc/ringferry/policies",
        }
    }
}

/// The absolute path of a directory.
const DIRECTORY: Text<PathBuf> = Text {
    placeholder: "PATH",
    what: "the absolute path of a directory",
    read: |text| match text.strip_prefix('/') {
        Some(_) if !text.contains('\0') => Ok(text.into()),
        _ => Err(format!("{text:?} is not the absolute path of a directory")),
    },
    write: |path| path.to_string_lossy().into_owned(),
};

keys! {
    /// The keys of `[switch]`.
    pub(crate) struct SwitchKeys: Restart {
        /// Sets the ageing time of the forwarding database: a MAC address that has sent nothing for so long is
        /// forgotten.
        mac_age_seconds: u32 {
            is: number_of("seconds", 1..=1_000_000),
            default: Unset::Value("300"),
            example: "60",
        }
        /// Limits the MAC addresses in the forwarding database, rounded up to a power of two. One port can fill at most
        /// half of it.
        mac_table_size: u32 {
            is: number_of("addresses", 64..=1 << 20),
            default: Unset::Value("16384"),
            example: "65536",
        }
        /// Limits the time that a worker without work polls before it sleeps. With 0 it sleeps at once.
        poll_microseconds: u32 {
            is: number_of("microseconds", 0..=1_000_000),
            default: Unset::Value("50"),
            example: "0",
        }
        /// Sets the number of threads that move packets. Queue pair P of every port belongs to worker P modulo this
        /// number. `--workers` overrides it.
        workers: u16 {
            is: number_of("threads", 1..=MAX_WORKERS as u64),
            default: Unset::Means("one for each two processors, at most 4"),
            example: "2",
        }
        /// Limits the guest memory that all vhost-user ports together may have mapped. A front end whose memory would
        /// exceed it is refused. Half of it is kept for all ports in equal parts, whatever others take.
        guest_memory_gib: u32 {
            is: number_of("GiB", 1..=MAX_MEMORY_GIB as u64),
            default: Unset::Value("65536"),
            example: "16384",
        }
        /// Limits the guest memory that one vhost-user port may have mapped. It should be at least twice the memory of
        /// the guest, since both the old and the new memory map count while it changes.
        port_memory_gib: u32 {
            is: number_of("GiB", 1..=MAX_MEMORY_GIB as u64),
            default: Unset::Value("8192"),
            example: "1024",
        }
    }
}

/// Makes [`PortKind`] from one line for each kind of port.
macro_rules! port_kinds {
    ($($(#[$doc:meta])+ $kind:ident($config:ty),)+) => {
        /// The kind of a port: what is behind it, with the settings that only that kind has.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum PortKind {
            $($(#[$doc])+ $kind($config),)+
        }

        impl PortKind {
            /// The value of the key `kind`: `vhost-user`, `tap`, `xen-vif` or `xdp`.
            pub fn name(&self) -> &'static str {
                match self { $(PortKind::$kind(_) => <$config>::KIND,)+ }
            }

            /// Every kind, as in [`name`](Self::name).
            fn names() -> &'static [&'static str] {
                &[$(<$config>::KIND),+]
            }

            /// The words that may begin a `--port` flag, with the kind that each stands for.
            fn flags() -> impl Iterator<Item = (&'static str, &'static Flag)> {
                [].into_iter()$(.chain(<$config>::FLAGS.iter().map(|flag| (<$config>::KIND, flag))))+
            }

            /// The keys that only one kind has, for each kind.
            fn keys() -> impl Iterator<Item = (&'static str, &'static [Key])> {
                [$((<$config>::KIND, <$config as PortSettings>::Keys::KEYS)),+].into_iter()
            }

            /// The keys that only this kind has.
            fn own_keys(&self) -> &'static [Key] {
                match self { $(PortKind::$kind(_) => <$config as PortSettings>::Keys::KEYS,)+ }
            }

            /// Returns true if front ends connect to the port and agree with it on settings.
            fn has_sessions(&self) -> bool {
                match self { $(PortKind::$kind(config) => config.has_sessions(),)+ }
            }

            /// Reads the keys of the kind of this name, which must be one of [`names`](Self::names).
            fn read(name: &str, fields: &mut Fields<'_>) -> Option<PortKind> {
                $(if name == <$config>::KIND {
                    let keys = <$config as PortSettings>::Keys::read(fields);
                    return <$config>::from_keys(keys, fields).map(PortKind::$kind);
                })+
                None
            }

            /// Returns the keys that only this kind has, with their values.
            fn write(&self) -> Vec<(&'static str, toml::Value)> {
                match self { $(PortKind::$kind(config) => config.to_keys().write(),)+ }
            }

            fn claim(&self) -> Claim<'_> {
                match self { $(PortKind::$kind(config) => config.claim(),)+ }
            }

            fn default_name(&self) -> String {
                match self { $(PortKind::$kind(config) => config.default_name(),)+ }
            }

            fn is_shared(&self) -> bool {
                match self { $(PortKind::$kind(config) => config.is_shared(),)+ }
            }

            /// Returns true if the port is made of a descriptor that is passed to the program at its start.
            pub(crate) fn is_passed(&self) -> bool {
                match self { $(PortKind::$kind(config) => config.is_passed(),)+ }
            }

            /// Returns the name of the interface that the port leaves behind when it is removed.
            pub(crate) fn lasting_interface(&self) -> Option<&str> {
                match self { $(PortKind::$kind(config) => config.lasting_interface(),)+ }
            }

            /// Returns true if no guest is behind the port.
            pub(crate) fn is_of_the_host(&self) -> bool {
                match self { $(PortKind::$kind(config) => config.is_of_the_host(),)+ }
            }
        }
    };
}

port_kinds! {
    /// A virtual machine: a vhost-user front end such as QEMU.
    VhostUser(VhostUserConfig),
    /// The host's network stack: a tap device.
    Tap(TapConfig),
    /// Xen guests: one interface that a toolstack makes, or all of a class.
    XenVif(XenVifConfig),
    /// An interface of the host, by AF_XDP.
    Xdp(XdpConfig),
}

/// The error of a refused configuration: every problem found, one per line when displayed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ConfigError {
    /// At least one problem, in the order they were written.
    pub problems: Vec<Problem>,
}

impl ConfigError {
    /// Gives the places of problems in policies the directory that they are in.
    pub(crate) fn in_directory(mut self, directory: &Path) -> ConfigError {
        for problem in &mut self.problems {
            problem.place = format!("{}/{}", directory.display(), problem.place);
        }
        self
    }

    /// Puts problems that were found one kind after the other into the order in which they were written: file by file, and line by line.
    fn of(mut problems: Vec<Problem>) -> ConfigError {
        let place = |problem: &Problem| match problem.place.rsplit_once(':') {
            Some((file, line)) => match line.parse::<usize>() {
                Ok(line) => (file.to_owned(), line),
                Err(_) => (problem.place.clone(), 0),
            },
            None => (problem.place.clone(), 0),
        };
        let files: Vec<_> = problems.iter().map(|problem| place(problem).0).collect();
        problems.sort_by_key(|problem| {
            let (file, line) = place(problem);
            (files.iter().position(|first| *first == file), line)
        });
        ConfigError { problems }
    }
}

/// One thing wrong with a configuration. Displayed as `place: key: message`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where the problem is: `ringferry.toml:12`, or the flag as typed. Empty when something is missing
    /// everywhere.
    pub place: String,
    /// The key, such as `port.mtu`; empty when the problem is not about one key.
    pub key: String,
    /// A sentence for people: what is wrong and what to do.
    pub message: String,
}

impl Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in [&self.place, &self.key] {
            if !part.is_empty() {
                write!(f, "{part}: ")?;
            }
        }
        f.write_str(&self.message)
    }
}

impl Config {
    /// Starts an empty configuration, with defaults for everything.
    pub fn builder() -> ConfigBuilder {
        ConfigBuilder::default()
    }

    /// The configuration in `file` alone.
    ///
    /// # Errors
    /// The file cannot be read or holds a mistake.
    pub fn from_file(file: &Path) -> Result<Config, ConfigError> {
        Config::builder().file(file).build()
    }

    /// Returns what is not about a port, as TOML.
    fn settings(&self) -> String {
        let Config { control, socket_directories, policies, switch, .. } = self;
        settings(control.as_deref(), socket_directories, policies.as_deref(), *switch)
    }

    /// Returns the directory of the policies of firewalls; `None` if neither a file nor a flag names one.
    pub fn policy_directory(&self) -> Option<PathBuf> {
        let beside = || self.file.as_ref().map(|file| policies::policies_beside(&file.path));
        self.policies.clone().or_else(beside)
    }

    /// Says so if a port names a policy, and there is no directory of policies.
    fn without_policies(&self) -> Option<Problem> {
        let names = self.policy_directory().is_none();
        let port = self.ports.iter().find(|port| names && port.rules.firewall.is_some())?;
        let message = "names a policy, and no directory of policies is known: give --policies DIRECTORY, or a configuration file, beside which they are in policies/";
        Some(Place::new(&format!("port {}", port.name), None).problem("firewall", message))
    }

    /// The configuration as a TOML file that yields the same configuration when read. Ports given by flags
    /// are in it too.
    pub fn dump(&self) -> String {
        let mut out = self.settings();
        for port in &self.ports {
            out.push_str("\n[[port]]\n");
            append(&mut out, port.entries());
        }
        wires::dump(&self.wires, &mut out);
        out
    }
}

/// Says why a file cannot be read.
pub(super) fn unreadable(path: &Path, error: &std::io::Error) -> String {
    let is_link = || path.symlink_metadata().is_ok_and(|file| file.is_symlink());
    let hint = if error.kind() == std::io::ErrorKind::PermissionDenied && is_link() {
        ": it is a link, and the sandbox of a running switch leaves out where it leads: put the file itself in its place"
    } else {
        ""
    };
    format!("cannot be read: {error}{hint}")
}

/// Returns what a file says that is not about a port.
fn settings(
    control: Option<&Path>,
    socket_directories: &[PathBuf],
    policies: Option<&Path>,
    switch: SwitchConfig,
) -> String {
    let directories = Some(socket_directories.to_owned()).filter(|list| !list.is_empty());
    let top = TopKeys {
        control: control.map(Path::to_owned),
        socket_directories: directories,
        policies: policies.map(Path::to_owned),
    };
    let mut out = String::new();
    append(&mut out, top.write());
    if !out.is_empty() {
        out.push('\n');
    }
    out.push_str("[switch]\n");
    append(&mut out, switch.to_keys().write());
    out
}

/// Appends `key = value` lines, the values written by the TOML library.
/// The line of `text` at `offset`, to be said of a mistake in TOML, whose parser does not name keys: with what most mistakes are about, if it looks so.
fn line_of(text: &str, offset: usize) -> String {
    let before = text.get(..offset).unwrap_or_default();
    let begin = before.rfind('\n').map_or(0, |end| end + 1);
    let line = text[begin..].lines().next().unwrap_or_default().trim();
    if line.is_empty() {
        return String::new();
    }
    let value = line.split_once('=').map_or("", |(_, value)| value.trim());
    let is_bare = value.starts_with(|first: char| first.is_ascii_alphanumeric()) || value.starts_with('[');
    let hint = if is_bare && !value.contains(['"', '\'']) {
        "; texts are in quotes, numbers have no zero in front, and what is on or off is true or false"
    } else {
        ""
    };
    // A line of a file that is none may be long.
    let shown: String = line.chars().take(80).collect();
    format!(", in {shown:?}{hint}")
}

fn append(out: &mut String, entries: Vec<(&'static str, toml::Value)>) {
    for (key, value) in entries {
        // `fmt::Write` for `String` cannot fail.
        let _ = writeln!(out, "{key} = {value}");
    }
}

impl PortConfig {
    /// Says so if the port is to begin with a worker that a switch with so many of them has not.
    pub(crate) fn without_worker(&self, workers: usize) -> Option<String> {
        let worker = self.workers.iter().find(|worker| usize::from(**worker) >= workers)?;
        Some(format!(
            "there is no worker {worker}: the switch has {workers}, from 0 on; set [switch] workers, or --workers"
        ))
    }

    /// Returns the workers of the port's queue pairs.
    pub(crate) fn owners(&self) -> Owners {
        Owners(self.workers.iter().map(|worker| usize::from(*worker)).collect())
    }

    /// Returns the port with the queue pair `queue` on another of `count` workers, and the others where they are.
    pub(crate) fn assigned(&self, queue: u16, worker: u16, count: usize) -> PortConfig {
        let owners = self.owners();
        // The one after it is said as well, as it would else be with the worker after this one.
        let pairs = u16::try_from(self.workers.len()).unwrap_or(u16::MAX).max(queue + 2).min(MAX_WORKERS);
        let mut workers: Vec<u16> = (0..pairs).map(|queue| owners.of(queue, count) as u16).collect();
        if let Some(owner) = workers.get_mut(usize::from(queue)) {
            *owner = worker;
        }
        // What the ones before it imply need not be said.
        while let Some((last, before)) = workers.split_last()
            && usize::from(*last) == before.last().map_or(0, |before| (usize::from(*before) + 1) % count)
        {
            workers.pop();
        }
        PortConfig { workers, ..self.clone() }
    }

    /// Returns the keys that make the same port, without those that say what holds without them.
    fn written(&self) -> Vec<(&'static str, toml::Value)> {
        let mut entries = self.entries();
        let mut at = 0;
        while at < entries.len() {
            let (key, value) = entries.remove(at);
            if key == "name" || PortConfig::of_entries(&entries).as_ref() != Some(self) {
                entries.insert(at, (key, value));
                at += 1;
            }
        }
        entries
    }

    /// Returns the port that these keys make, or `None` if they make none.
    fn of_entries(entries: &[(&'static str, toml::Value)]) -> Option<PortConfig> {
        let mut problems = Vec::new();
        let values =
            entries.iter().map(|(key, value)| ((*key).to_owned(), Value::from_written(value.clone())));
        let port = parse_port(Fields::of_values(values, &mut problems));
        port.filter(|_| problems.is_empty())
    }

    /// Returns the keys that make the same port.
    fn entries(&self) -> Vec<(&'static str, toml::Value)> {
        let PortConfig { name, mtu, workers, kind, rules } = self;
        let (kind_name, name) = (Some(kind.name().to_owned()), Some(name.clone()));
        let worker = Some(workers.clone()).filter(|workers| !workers.is_empty());
        let common = PortKeys { kind: kind_name, name, mtu: *mtu, worker };
        [common.write(), kind.write(), rules_by_key(rules)].concat()
    }
}

/// A port as written in a `--port` flag: `KIND:WHERE[,key=value...]`.
///
/// `KIND:WHERE` is one of `vhost-user:PATH`, `vhost-user-fd:N`, `vhost-user-activation:NAME`, `tap:NAME`, `tap-fd:N` and
/// `xen-vif:PROVIDER`; the keys are those of the file. A path with a comma in it can only be given in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSpec {
    /// The flag's value as typed.
    pub text: String,
    /// The port that the text describes.
    pub port: PortConfig,
}

impl FromStr for PortSpec {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut problems = Vec::new();
        match parse_flag(text, &Place::flag(text), &mut problems) {
            Some(port) if problems.is_empty() => Ok(PortSpec { text: text.to_owned(), port }),
            _ => Err(ConfigError { problems }),
        }
    }
}

/// Gathers a file, flags and single settings; [`build`](ConfigBuilder::build) checks them together.
#[derive(Debug, Default)]
pub struct ConfigBuilder {
    control: Option<(Place, PathBuf)>,
    socket_directories: Vec<PathBuf>,
    policies: Option<PathBuf>,
    /// No policy is read.
    leaves_policies: bool,
    switch: SwitchConfig,
    ports: Vec<(Place, PortConfig)>,
    wires: Vec<(Place, Wire)>,
    /// What wires join may be somewhere else.
    is_part: bool,
    file: Option<ConfigFile>,
    reserved: Vec<(Place, RawFd)>,
    /// True if there need not be a port.
    may_be_empty: bool,
    /// Names of the ports that flags have added.
    flags: Vec<String>,
    problems: Vec<Problem>,
}

impl ConfigBuilder {
    /// Reads a TOML file and the [drop-in files](drop_ins) beside it, in the order of their names. Their ports come after those already
    /// added; there may be none.
    #[must_use]
    pub fn file(mut self, path: &Path) -> Self {
        let (before, wires_before) = (self.ports.len(), self.wires.len());
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let mut blank = BTreeSet::new();
        self = self.read(path, Self::document);
        if self.ports.len() == before {
            blank.insert(absolute(path));
        }
        let files = drop_ins(path);
        let directory = drop_in_directory(path);
        if !directory.exists() {
            blank.insert(absolute(&directory));
        }
        let mut drop_ins = BTreeMap::new();
        for file in files.iter().flatten() {
            let before = self.ports.len();
            // Whoever opens a pipe might wait for ever.
            if std::fs::metadata(file).is_ok_and(|metadata| !metadata.is_file()) {
                let place = Place::new(&file.display().to_string(), None);
                let message =
                    "is no file, as a drop-in file has to be: give it a name that does not end in .toml";
                self.problems.push(place.problem("", message));
                continue;
            }
            self = self.read(file, Self::drop_in);
            let (file, ports) = (absolute(file), &self.ports[before..]);
            if ports.is_empty() {
                blank.insert(file.clone());
            }
            drop_ins.extend(ports.iter().map(|(_, port)| (port.name.clone(), file.clone())));
        }
        if let Err(error) = files {
            let place = Place::new(&path.display().to_string(), None);
            self.problems.push(place.problem("", format!("its drop-in files cannot be listed: {error}")));
        }
        let ports = self.ports[before..].iter().map(|(_, port)| port.name.clone()).collect();
        let path = absolute(path);
        let control = self.control.as_ref().map(|(_, path)| path.as_path());
        let settings = settings(control, &self.socket_directories, self.policies.as_deref(), self.switch);
        let wires = self.wires[wires_before..].iter().map(|(_, wire)| wire.name.clone()).collect();
        self.file = Some(ConfigFile { path, ports, wires, drop_ins, blank, settings });
        self.may_be_empty()
    }

    /// Does the same as [`file`](Self::file) in a running switch, which must not wait for ever: a pipe, or a device, is refused.
    #[must_use]
    pub(crate) fn regular_file(mut self, path: &Path) -> Self {
        match std::fs::metadata(path) {
            Ok(metadata) if !metadata.is_file() => {
                let place = Place::new(&path.display().to_string(), None);
                self.problems.push(place.problem("", "is not a file that could be read again"));
                self
            }
            _ => self.file(path),
        }
    }

    fn read(mut self, path: &Path, parse: impl FnOnce(&mut Self, &Document, DeTable<'_>)) -> Self {
        let name = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => self.parse(&name, &text, parse),
            Err(error) => {
                self.problems.push(Place::new(&name, None).problem("", unreadable(path, &error)));
                self
            }
        }
    }

    /// Lets a configuration without ports be valid.
    #[must_use]
    pub fn may_be_empty(mut self) -> Self {
        self.may_be_empty = true;
        self
    }

    /// Lets the configuration be a part of one, such as a file beside others: it need not have a port, nor those that its wires join.
    #[must_use]
    pub(crate) fn part_of_a_configuration(self) -> Self {
        ConfigBuilder { is_part: true, ..self.may_be_empty() }
    }

    /// Reads TOML from memory; `name` stands for the file name in errors.
    #[must_use]
    pub fn toml(self, name: &str, text: &str) -> Self {
        self.parse(name, text, Self::document)
    }

    fn parse(
        mut self,
        name: &str,
        text: &str,
        parse: impl FnOnce(&mut Self, &Document, DeTable<'_>),
    ) -> Self {
        let document = Document::new(name, text);
        match DeTable::parse(text) {
            Ok(table) => parse(&mut self, &document, table.into_inner()),
            Err(error) => {
                let at = error.span().map_or(0, |span| span.start);
                let message = error.message().replace('\n', ", ");
                self.problems.push(document.place(at).problem("", format!("{message}{}", line_of(text, at))));
            }
        }
        self
    }

    /// Adds the port written in a `--port` flag (see [`PortSpec`]).
    #[must_use]
    pub fn port_flag(self, text: &str) -> Self {
        let place = Place::flag(text);
        self.port_text(text, place)
    }

    fn port_text(mut self, text: &str, place: Place) -> Self {
        if let Some(port) = parse_flag(text, &place, &mut self.problems) {
            self.flags.push(port.name.clone());
            self.ports.push((place, port));
        }
        self
    }

    /// Sets the number of workers, 1 to [`MAX_WORKERS`], over what a file says that was read before.
    #[must_use]
    pub fn workers(mut self, workers: u16) -> Self {
        self.switch.workers = Some(workers.clamp(1, MAX_WORKERS));
        self
    }

    /// Sets the directory of the policies of firewalls, over what a file says that was read before.
    #[must_use]
    pub fn policies(mut self, directory: &Path) -> Self {
        self.policies = Some(std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned()));
        self
    }

    /// Reads no policy, as who asks wants to know other settings.
    #[must_use]
    pub fn policies_unread(mut self) -> Self {
        self.leaves_policies = true;
        self
    }

    /// Sets the control socket, over what a file says.
    #[must_use]
    pub fn control(mut self, path: &Path) -> Self {
        let place = Place::new(&format!("--control {}", path.display()), None);
        let checked = path
            .to_str()
            .ok_or_else(|| "the path is not UTF-8".to_owned())
            .and_then(parse::check_socket_path);
        match checked {
            Ok(()) => self.control = Some((place, path.to_owned())),
            Err(message) => self.problems.push(place.problem("", message)),
        }
        self
    }

    /// Says that the program itself uses descriptor `fd`, because of the flag `flag`; no port may have it.
    #[must_use]
    pub fn reserve_fd(mut self, flag: &str, fd: RawFd) -> Self {
        self.reserved.push((Place::new(&format!("{flag} {fd}"), None), fd));
        self
    }

    /// Checks the ports against each other and returns the configuration.
    ///
    /// # Errors
    /// Every problem found since the builder was made.
    pub fn build(mut self) -> Result<Config, ConfigError> {
        if self.ports.is_empty() && self.problems.is_empty() && !self.may_be_empty {
            let message = "no port is configured: add a [[port]] table to the file, \
 or a flag such as --port vhost-user:/run/ringferry/vm0.sock";
            self.problems.push(Place::default().problem("", message));
        }
        self.check_unique();
        self.check_workers();
        // A mistake in a port would make one of each wire that has it.
        if !self.is_part && self.problems.is_empty() {
            self.check_wires();
        }
        if !self.problems.is_empty() {
            return Err(ConfigError::of(self.problems));
        }
        let mut config = Config {
            control: self.control.map(|(_, path)| path),
            socket_directories: self.socket_directories,
            policies: self.policies,
            switch: self.switch,
            ports: self.ports.into_iter().map(|(_, port)| port).collect(),
            wires: self.wires.into_iter().map(|(_, wire)| wire).collect(),
            file: self.file,
        };
        if let Some(directory) = config.policy_directory().filter(|_| !self.leaves_policies) {
            let mut open = |file: &str| policies::read_policy_file(&directory, file);
            policies::load(&mut config.ports, &mut open).map_err(|error| error.in_directory(&directory))?;
        }
        Ok(config)
    }

    /// As [`build`](Self::build), for a switch that starts: every policy that a port names was read.
    ///
    /// # Errors
    /// As for [`build`](Self::build), and there is no directory of policies.
    pub fn build_to_start(self) -> Result<Config, ConfigError> {
        let config = self.build()?;
        match config.without_policies() {
            Some(problem) => Err(ConfigError { problems: vec![problem] }),
            None => Ok(config),
        }
    }

    /// Two ports cannot share a name, a socket, a tap, a descriptor or a static address, nor use the control socket.
    fn check_unique(&mut self) {
        let mut owners: BTreeMap<Claim<'_>, &Place> = BTreeMap::new();
        if let Some((place, path)) = &self.control {
            owners.insert(Claim::Socket(path), place);
        }
        for (place, fd) in &self.reserved {
            owners.insert(Claim::Fd(*fd), place);
        }
        for (place, port) in &self.ports {
            let stations = port.rules.static_macs.iter().map(|(mac, vid)| Claim::Station(*mac, *vid));
            for claim in [Claim::Name(&port.name), port.kind.claim()].into_iter().chain(stations) {
                let mut owner = owners.get(&claim);
                if let (None, Claim::Thing { .. }) = (owner, &claim) {
                    owner = owners.iter().find_map(|(owned, owner)| owned.overlaps(&claim).then_some(owner));
                }
                if let Some(owner) = owner {
                    self.problems.push(place.problem("port", format!("{claim} is already used by {owner}")));
                } else {
                    owners.insert(claim, place);
                }
            }
        }
    }

    /// Ports that are asked for by a flag begin with workers that there are. A file may have a worker from when there were more: that keeps no switch from
    /// starting (see [`Owners::of`] and [`Config::oddities`]).
    fn check_workers(&mut self) {
        let workers = self.switch.workers();
        for (place, port) in self.ports.iter().filter(|(_, port)| self.flags.contains(&port.name)) {
            if let Some(message) = port.without_worker(workers) {
                self.problems.push(place.problem("port.worker", message));
            }
        }
    }

    fn document(&mut self, document: &Document, table: DeTable<'_>) {
        let mut switch = None;
        let mut ports = None;
        let mut wires = None;
        let mut rest = Vec::new();
        for (key, value) in table {
            match key.get_ref().as_ref() {
                "switch" => switch = Some(value),
                "port" => ports = Some(value),
                "wire" => wires = Some(value),
                _ => rest.push((key, value)),
            }
        }
        let mut fields = Fields::of_document(document, "", 0, rest, &mut self.problems);
        let TopKeys { control, socket_directories, policies } = TopKeys::read(&mut fields);
        self.policies = policies.or_else(|| self.policies.take());
        if let Some(path) = control {
            self.control = fields.place_of("control").map(|place| (place, path));
        }
        self.socket_directories.extend(socket_directories.into_iter().flatten());
        fields.knows(&["switch", "port", "wire"]);
        fields.finish("");
        if let Some(value) = switch {
            self.switch_table(document, value);
        }
        if let Some(value) = ports {
            self.port_tables(document, value);
        }
        if let Some(value) = wires {
            self.wire_tables(document, value);
        }
    }

    /// A drop-in file has ports and wires, and nothing else.
    fn drop_in(&mut self, document: &Document, table: DeTable<'_>) {
        for (key, value) in table {
            if key.get_ref() == "port" {
                self.port_tables(document, value);
            } else if key.get_ref() == "wire" {
                self.wire_tables(document, value);
            } else {
                let place = document.place(key.span().start);
                let message = "belongs in the main configuration file: a drop-in file has [[port]] and [[wire]] tables only";
                self.problems.push(place.problem(key.into_inner(), message));
            }
        }
    }

    fn switch_table(&mut self, document: &Document, value: Spanned<DeValue<'_>>) {
        let start = value.span().start;
        let DeValue::Table(table) = value.into_inner() else {
            self.problems.push(document.place(start).problem("switch", "must be a table: [switch]"));
            return;
        };
        let mut fields = Fields::of_document(document, "switch.", start, table, &mut self.problems);
        let keys = SwitchKeys::read(&mut fields);
        self.switch.apply(keys);
        fields.finish(" of [switch]");
    }

    fn port_tables(&mut self, document: &Document, value: Spanned<DeValue<'_>>) {
        let start = value.span().start;
        let DeValue::Array(tables) = value.into_inner() else {
            self.problems
                .push(document.place(start).problem("port", "must be an array of tables: write [[port]]"));
            return;
        };
        for table in tables {
            let start = table.span().start;
            let place = document.place(start);
            let DeValue::Table(table) = table.into_inner() else {
                self.problems.push(place.problem("port", "must be a table: write [[port]]"));
                continue;
            };
            let fields = Fields::of_document(document, "port.", start, table, &mut self.problems);
            if let Some(port) = parse_port(fields) {
                self.ports.push((place, port));
            }
        }
    }
}

/// Something only one port can have.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Claim<'a> {
    /// The name of a port, which no other port may have.
    Name(&'a str),
    /// A socket. Compared by component, so that `/run/a` and `/run//a` are the same.
    Socket(&'a Path),
    /// A file descriptor that the port is given.
    Fd(RawFd),
    /// A static address in its VLAN.
    Station(Mac, Vid),
    /// A thing, or a part of it, that only one kind of port knows: a tap, a class of Xen interfaces.
    Thing {
        /// Identity of the thing: equal for two claims on the same one.
        whole: String,
        /// The part claimed; absent: all of the thing.
        part: Option<String>,
        /// Description of the thing for messages.
        shown: String,
    },
}

impl Claim<'_> {
    /// Claims an undivided thing, which its description identifies.
    pub(crate) fn thing(shown: String) -> Self {
        Claim::Thing { whole: shown.clone(), part: None, shown }
    }

    /// Returns true if two claims that are not equal still exclude each other: one of the whole thing, one of
    /// a part of it.
    fn overlaps(&self, other: &Claim<'_>) -> bool {
        match (self, other) {
            (Claim::Thing { whole, part, .. }, Claim::Thing { whole: other, part: another, .. }) => {
                whole == other && (part.is_none() || another.is_none())
            }
            _ => false,
        }
    }
}

impl Display for Claim<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Claim::Name(name) => write!(f, "the name {name:?}"),
            Claim::Socket(path) => write!(f, "the socket {}", path.display()),
            Claim::Fd(fd) => write!(f, "file descriptor {fd}"),
            Claim::Station(mac, vid) => write!(f, "the static address {mac} in VLAN {vid}"),
            Claim::Thing { shown, .. } => f.write_str(shown),
        }
    }
}

#[cfg(test)]
mod page;
#[cfg(test)]
mod tests;
