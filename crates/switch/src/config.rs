//! What the switch is to be: a typed [`Config`] made from a TOML file, from `--port` flags, or from both.
//!
//! The file is the source of truth and flags add to it. [`Config::builder`] gathers everything, checks each
//! key where it was written and then all ports against each other, and either returns a configuration that
//! can be started as it stands or **every** problem it found, each with its place, such as
//! `ringferry.toml:12: port.mtu: 70000 is outside 68..=65535`. Nothing is opened, created or bound here.
//!
//! A port of any kind may have rules ([`Rules`]), which `ringferry ctl set` changes while the switch runs; interfaces of a
//! xen-vif port have those of their entry.
//!
//! ```toml
//! control = "/run/ringferry/control.sock"  # optional: where `ringferry ctl` connects
//!
//! [switch]                            # optional, these are the defaults
//! mac_age_seconds = 300               # 1..=1000000: a silent MAC address is forgotten after this
//! mac_table_size = 16384              # 64..=1048576: most MAC addresses, rounded up to a power of two
//! poll_microseconds = 50              # 0..=1000000: a worker with little to do polls so long, at most, before it sleeps
//! # workers = 2                       # 1..=16: threads that move packets; default: one for each two processors, at most 4
//!
//! [[port]]
//! name = "vm0"                        # default: stem of the socket, `activation`, or "fd" and a number
//! kind = "vhost-user"
//! socket = "/run/ringferry/vm0.sock"  # or fd (inherited), or activation (systemd FileDescriptorName=)
//! mode = "listen"                     # with socket: "listen" (default) or "connect" (retried for ever)
//! mtu = 1500                          # 68..=65535, default 1500
//! # worker = 1                        # serves the first pair; those after it the next pairs in turn; default: 0
//! # queue_size = 1024                 # largest ring accepted, a power of two up to 32768; default: any
//! # mac = "52:54:00:00:00:01"         # told to front ends that ask; default: the front end chooses
//! mergeable = true                    # features offered, all true by default; tso and uso need csum
//! csum = true
//! tso = true
//! uso = true
//! event_idx = true
//! indirect = true
//! packed = true                       # packed rings, for front ends that want them
//! in_order = true
//!
//! vlan = 10                           # rules, from here on; 0..=4094: an access port; its frames carry no tag. Default: a trunk of all VLANs
//! isolated = true                     # no frames to and from other isolated ports
//! max_macs = 8                        # 0..=1048576: most addresses learned behind it; others are dropped
//! static_macs = ["52:54:00:00:00:01"] # behind it and nowhere else; MAC@VLAN: in another VLAN than that without a tag
//! allowed_macs = ["52:54:00:00:00:01"] # it may send from these alone, in Ethernet, ARP and neighbour discovery
//! allowed_ips = ["10.0.0.2", "fd00::/64"] # needs allowed_macs: and from these; "none": from no IP address
//! storm = "1kpps"                     # most broadcast, multicast and unknown-destination frames taken from it: pps, kpps, mpps
//! storm_burst = 1000                  # packets at once after a pause; default: those of a second
//! rate_in = "1gbit"                   # most taken from it, 1kbit..=1tbit: bit, kbit, mbit, gbit, tbit (per second, decimal)
//! rate_in_burst = "1mib"              # at once, 72kib..=4gib: b, kb, mb, gb, kib, mib, gib; default: 0.1 s, at least 128kib
//! rate_in_packets = "100kpps"         # most packets taken from it, counted as they are after segmentation
//! rate_in_packets_burst = 1000        # at once, from 128; default: 0.1 s, at least 128
//! # rate_out = "1gbit"                # most sent to it; rate_out_burst, rate_out_packets and rate_out_packets_burst likewise
//!
//! [[port]]
//! name = "up"                         # default: name of the tap, or "fd" and a number
//! kind = "tap"
//! tap = "rf0"                         # or fd (inherited)
//! # existing = true                   # with tap: true must exist, false must not; default: either
//! # mtu = 1500                        # default: left as the tap has it
//! offloads = true                     # checksum and segmentation offloads to and from the kernel
//! trunk = [10, "20-29"]               # in place of vlan: frames carry tags of these VLANs, or of "all" (1 to 4094)
//! native = 5                          # with trunk: VLAN of frames without a tag; default: "none", and 0 with trunk = "all"
//! # queues = 2                        # with tap: 1..=16; default: one per worker, one if it exists and has one; with 1, worker reads it
//!
//! [[port]]
//! name = "xen"                        # default: "xen"; each interface of a guest gets a port of its own, such as xen5.0
//! kind = "xen-vif"
//! provider = "xen"                    # or "process", with broker and store (sockets) and domain (our number, default 0)
//! # class = "vif"                     # class of the devices in the store; default: "vif"
//! # vif = "5.0"                       # this interface alone (domain and device), on a port of this very name
//! # queues = 2                        # 1..=16, offered (multi-queue-max-queues); default: one per worker
//! persistent = true                   # keep pages mapped of front ends that allow it (feature-persistent)
//! static_grants = true                # and those that they hand over on the control ring (feature-ctrl-ring)
//! transfer = "copy"                   # all other pages: copied by the hypervisor, or "map": mapped for a burst
//! pages = 1024                        # 1..=65534: most pages kept mapped for a queue; all are held below vm.max_map_count
//! sg = true                           # what front ends may send us, all true by default: packets of several pages,
//! csum = true                         # blank checksums,
//! gso = true                          # and what is to be segmented; needs sg and csum
//! ```

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

use crate::rules::{Rules, Vid};

mod file;
mod parse;
mod rules;
use parse::{Document, Place, parse_flag, parse_port};

pub use crate::ports::tap::config::{MAX_TAP_NAME, TapConfig, TapSource};
pub use crate::ports::vhost::config::{FeatureToggles, VhostUserConfig, VhostUserEndpoint};
pub use crate::ports::xen::config::{Transfer, VifName, XenProvider, XenVifConfig};
pub(crate) use file::{KeepError, keep};
pub(crate) use parse::{Fields, check_socket_path, parse_mac};
pub(crate) use rules::{Edit, entries as rules_by_key};

/// Bytes a Unix socket path may have: `sun_path` holds 108 with the closing NUL (unix(7)).
pub const MAX_SOCKET_PATH: usize = 107;
/// Bytes the name of a port may have. It appears in tables, metrics labels and logs, hence short.
pub const MAX_PORT_NAME: usize = 63;
/// MTU of a vhost-user port that names none, in bytes without the Ethernet header.
pub const DEFAULT_MTU: u16 = 1500;
/// MTUs a port may have: the range VIRTIO 1.4, 5.1.4.1 allows in the configuration space.
pub const MTU_RANGE: RangeInclusive<u64> = 68..=65535;

/// Everything `ringferry run` needs to know. Made by [`Config::builder`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Path of the control socket; absent: the program's default.
    pub control: Option<PathBuf>,
    /// Settings of the switch as a whole.
    pub switch: SwitchConfig,
    /// The ports, in the order they were written (file before flags). Never empty; names, sockets, taps,
    /// descriptors and static addresses are unique.
    pub ports: Vec<PortConfig>,
    /// The file it was read from.
    pub file: Option<ConfigFile>,
}

/// A file that a configuration was read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFile {
    /// Where it is, from the root.
    pub path: PathBuf,
    /// Names of the ports in it.
    pub ports: Vec<String>,
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
    /// Microseconds that a worker polls at most without work before it sleeps; 0: never. It does so only while that finds work,
    /// nobody else wants its processor, and it is idle for most of the time ([`ringferry_sys::spin`]). With 50, it goes on while work comes
    /// some 20 000 times a second: at a tenth of what can be carried the median latency more than halved.
    pub poll_microseconds: u32,
    /// Threads that move packets, 1 to [`MAX_WORKERS`]; absent: one for each two processors, at most 4. Queue pair `p` of
    /// every port belongs to worker `p` modulo their number, so that more of them serve machines with several queues.
    pub workers: Option<u16>,
}

/// Most workers: no port has more queue pairs.
pub const MAX_WORKERS: u16 = crate::plane::PAIRS;

impl SwitchConfig {
    /// How many workers there are to be.
    pub fn workers(&self) -> usize {
        let processors = || std::thread::available_parallelism().map_or(1, usize::from);
        self.workers.map_or_else(|| (processors() / 2).clamp(1, 4), usize::from)
    }
}

impl Default for SwitchConfig {
    fn default() -> Self {
        SwitchConfig { mac_age_seconds: 300, mac_table_size: 16384, poll_microseconds: 50, workers: None }
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
    /// The worker that serves the first pair, those after it the next pairs in turn; who reads a tap with one queue. Absent: worker 0.
    pub worker: Option<u16>,
    /// What is plugged in, with the settings only that kind has.
    pub kind: PortKind,
    /// What its frames must obey.
    pub rules: Rules,
}

/// The configuration of one kind of port, as its folder defines it.
pub(crate) trait PortSettings: Sized {
    /// The value of the key `kind`.
    const KIND: &'static str;
    /// How a `--port` flag may begin for this kind.
    const FLAGS: &'static [Flag];

    /// Reads the keys that only this kind has. Reports what is wrong; `None` if too little makes sense.
    fn parse(fields: &mut Fields<'_>) -> Option<Self>;

    /// Writes them, one on each line.
    fn dump(&self, out: &mut String);

    /// What the port takes that no other port can have then.
    fn claim(&self) -> Claim<'_>;

    /// The name of a port of this kind that gives none.
    fn default_name(&self) -> String;

    /// Whether several ports are made of one entry of the configuration.
    fn is_shared(&self) -> bool {
        false
    }
}

/// One way to begin a `--port` flag: `WORD:PLACE` is short for `kind` and one more key.
#[derive(Debug)]
pub(crate) struct Flag {
    /// The word before the colon.
    pub(crate) word: &'static str,
    /// The key that gets what is behind the colon.
    pub(crate) key: &'static str,
    /// What to write there, for messages.
    pub(crate) place: &'static str,
}

/// Makes [`PortKind`] from one line for each kind of port.
macro_rules! port_kinds {
    ($($(#[$doc:meta])+ $kind:ident($config:ty),)+) => {
        /// What is plugged into a port.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum PortKind {
            $($(#[$doc])+ $kind($config),)+
        }

        impl PortKind {
            /// The value of the key `kind`: `vhost-user`, `tap` or `xen-vif`.
            pub fn name(&self) -> &'static str {
                match self { $(PortKind::$kind(_) => <$config>::KIND,)+ }
            }

            /// The words that may begin a `--port` flag, with the kind that each stands for.
            fn flags() -> impl Iterator<Item = (&'static str, &'static Flag)> {
                [].into_iter()$(.chain(<$config>::FLAGS.iter().map(|flag| (<$config>::KIND, flag))))+
            }

            /// Every kind, as in [`name`](Self::name).
            fn names() -> &'static [&'static str] {
                &[$(<$config>::KIND),+]
            }

            /// Reads the keys of the kind of this name, which must be one of [`names`](Self::names).
            fn parse(name: &str, fields: &mut Fields<'_>) -> Option<PortKind> {
                $(if name == <$config>::KIND {
                    return <$config>::parse(fields).map(PortKind::$kind);
                })+
                None
            }

            fn dump(&self, out: &mut String) {
                match self { $(PortKind::$kind(config) => config.dump(out),)+ }
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
}

/// Why a configuration is refused: every problem found, one per line when displayed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ConfigError {
    /// At least one problem, in the order they were written.
    pub problems: Vec<Problem>,
}

/// One thing wrong with a configuration. Displayed as `place: key: message`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where: `ringferry.toml:12`, or the flag as typed. Empty when the problem is something missing
    /// everywhere.
    pub place: String,
    /// Which key, such as `port.mtu`; empty when the problem is not about one key.
    pub key: String,
    /// What is wrong and what to do.
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
    /// Starts an empty configuration.
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

    /// Whether the port of this number could have these rules beside the others.
    ///
    /// # Errors
    /// Another port has one of its static addresses.
    pub(crate) fn check_rules(&self, at: usize, rules: &Rules) -> Result<(), ConfigError> {
        let wanted: BTreeSet<_> = rules.static_macs.iter().collect();
        let mut problems = Vec::new();
        for (_, other) in self.ports.iter().enumerate().filter(|(other, _)| *other != at) {
            for (mac, vid) in other.rules.static_macs.iter().filter(|station| wanted.contains(station)) {
                let message =
                    format!("{} is already used by port {:?}", Claim::Station(*mac, *vid), other.name);
                problems.push(Place::default().problem("static_macs", message));
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }

    /// The configuration as a TOML file that yields the same configuration when read. Ports given by flags
    /// are in it too.
    pub fn dump(&self) -> String {
        let mut out = String::new();
        if let Some(control) = &self.control {
            entry(&mut out, "control", control.to_string_lossy().as_ref());
            out.push('\n');
        }
        out.push_str("[switch]\n");
        entry(&mut out, "mac_age_seconds", i64::from(self.switch.mac_age_seconds));
        entry(&mut out, "mac_table_size", i64::from(self.switch.mac_table_size));
        entry(&mut out, "poll_microseconds", i64::from(self.switch.poll_microseconds));
        if let Some(workers) = self.switch.workers {
            entry(&mut out, "workers", i64::from(workers));
        }
        for port in &self.ports {
            out.push_str("\n[[port]]\n");
            port.dump(&mut out);
        }
        out
    }
}

/// Appends `key = value`, the value written by the TOML library.
pub(crate) fn entry(out: &mut String, key: &str, value: impl Into<toml::Value>) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{key} = {}", value.into());
}

impl PortConfig {
    /// The worker that its pairs begin with.
    pub(crate) fn first_worker(&self) -> usize {
        self.worker.unwrap_or(0).into()
    }

    fn dump(&self, out: &mut String) {
        entry(out, "name", self.name.as_str());
        entry(out, "kind", self.kind.name());
        self.kind.dump(out);
        for (key, number) in [("mtu", self.mtu), ("worker", self.worker)] {
            if let Some(number) = number {
                entry(out, key, i64::from(number));
            }
        }
        for (key, value) in rules_by_key(&self.rules) {
            entry(out, key, value);
        }
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
    /// What it means.
    pub port: PortConfig,
}

impl FromStr for PortSpec {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut problems = Vec::new();
        match parse_flag(text, &mut problems) {
            Some(port) if problems.is_empty() => Ok(PortSpec { text: text.to_owned(), port }),
            _ => Err(ConfigError { problems }),
        }
    }
}

/// Gathers a file, flags and single settings; [`build`](ConfigBuilder::build) checks them together.
#[derive(Debug, Default)]
pub struct ConfigBuilder {
    control: Option<(Place, PathBuf)>,
    switch: SwitchConfig,
    ports: Vec<(Place, PortConfig)>,
    file: Option<ConfigFile>,
    reserved: Vec<(Place, RawFd)>,
    problems: Vec<Problem>,
}

impl ConfigBuilder {
    /// Reads a TOML file. Its ports come after those already added.
    #[must_use]
    pub fn file(mut self, path: &Path) -> Self {
        let name = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => {
                let before = self.ports.len();
                let mut read = self.toml(&name, &text);
                let ports = read.ports[before..].iter().map(|(_, port)| port.name.clone()).collect();
                let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
                read.file = Some(ConfigFile { path, ports });
                read
            }
            Err(error) => {
                self.problems.push(Place::new(&name, None).problem("", format!("cannot be read: {error}")));
                self
            }
        }
    }

    /// Reads TOML from memory; `name` stands for the file name in errors.
    #[must_use]
    pub fn toml(mut self, name: &str, text: &str) -> Self {
        let document = Document { name: name.into(), text };
        match DeTable::parse(text) {
            Ok(table) => self.document(&document, table.into_inner()),
            Err(error) => {
                let place = document.place(error.span().map_or(0, |span| span.start));
                self.problems.push(place.problem("", error.message().replace('\n', ", ")));
            }
        }
        self
    }

    /// Adds the port written in a `--port` flag (see [`PortSpec`]).
    #[must_use]
    pub fn port_flag(mut self, text: &str) -> Self {
        if let Some(port) = parse_flag(text, &mut self.problems) {
            self.ports.push((Place::flag(text), port));
        }
        self
    }

    /// Sets the number of workers, 1 to [`MAX_WORKERS`], over what a file says that was read before.
    #[must_use]
    pub fn workers(mut self, workers: u16) -> Self {
        self.switch.workers = Some(workers.clamp(1, MAX_WORKERS));
        self
    }

    /// Sets the control socket, over what a file says.
    #[must_use]
    pub fn control(mut self, path: &Path) -> Self {
        let place = Place::new(&format!("--control {}", path.display()), None);
        let checked =
            path.to_str().ok_or_else(|| "the path is not UTF-8".to_owned()).and_then(check_socket_path);
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
        if self.ports.is_empty() && self.problems.is_empty() {
            let message = "no port is configured: add a [[port]] table to the file, \
 or a flag such as --port vhost-user:/run/ringferry/vm0.sock";
            self.problems.push(Place::default().problem("", message));
        }
        self.check_unique();
        self.check_workers();
        if !self.problems.is_empty() {
            return Err(ConfigError { problems: self.problems });
        }
        Ok(Config {
            control: self.control.map(|(_, path)| path),
            switch: self.switch,
            ports: self.ports.into_iter().map(|(_, port)| port).collect(),
            file: self.file,
        })
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

    /// Ports begin with workers that there are.
    fn check_workers(&mut self) {
        let workers = self.switch.workers();
        for (place, port) in &self.ports {
            if let Some(worker) = port.worker.filter(|worker| usize::from(*worker) >= workers) {
                let message = format!(
                    "there is no worker {worker}: the switch has {workers}, from 0 on; set [switch] workers, or --workers"
                );
                self.problems.push(place.problem("port.worker", message));
            }
        }
    }

    fn document(&mut self, document: &Document<'_>, table: DeTable<'_>) {
        let mut switch = None;
        let mut ports = None;
        let mut rest = Vec::new();
        for (key, value) in table {
            match key.get_ref().as_ref() {
                "switch" => switch = Some(value),
                "port" => ports = Some(value),
                _ => rest.push((key, value)),
            }
        }
        let mut fields = Fields::of_document(document, "", 0, rest, &mut self.problems);
        if let Some((place, path)) = fields.checked("control", check_socket_path) {
            self.control = Some((place, path.into()));
        }
        fields.knows(&["switch", "port"]);
        fields.finish("");
        if let Some(value) = switch {
            self.switch_table(document, value);
        }
        if let Some(value) = ports {
            self.port_tables(document, value);
        }
    }

    fn switch_table(&mut self, document: &Document<'_>, value: Spanned<DeValue<'_>>) {
        let start = value.span().start;
        let DeValue::Table(table) = value.into_inner() else {
            self.problems.push(document.place(start).problem("switch", "must be a table: [switch]"));
            return;
        };
        let mut fields = Fields::of_document(document, "switch.", start, table, &mut self.problems);
        if let Some((_, age)) = fields.number("mac_age_seconds", 1..=1_000_000) {
            self.switch.mac_age_seconds = age;
        }
        if let Some((_, size)) = fields.number("mac_table_size", 64..=1 << 20) {
            self.switch.mac_table_size = size;
        }
        if let Some((_, microseconds)) = fields.number("poll_microseconds", 0..=1_000_000) {
            self.switch.poll_microseconds = microseconds;
        }
        if let Some((_, workers)) = fields.number("workers", 1..=MAX_WORKERS.into()) {
            self.switch.workers = Some(workers);
        }
        fields.finish(" of [switch]");
    }

    fn port_tables(&mut self, document: &Document<'_>, value: Spanned<DeValue<'_>>) {
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
    /// The name of a port.
    Name(&'a str),
    /// A socket. Compared by component, so that `/run/a` and `/run//a` are the same.
    Socket(&'a Path),
    /// A file descriptor.
    Fd(RawFd),
    /// A static address.
    Station(Mac, Vid),
    /// Something that only one kind of port knows, or a part of it.
    Thing {
        /// Tells it from all others.
        whole: String,
        /// Which part; absent: all of it.
        part: Option<String>,
        /// What it is, for messages.
        shown: String,
    },
}

impl Claim<'_> {
    /// Something undivided, told from others by its description.
    pub(crate) fn thing(shown: String) -> Self {
        Claim::Thing { whole: shown.clone(), part: None, shown }
    }

    /// Whether two claims that are not equal still exclude each other: the whole of a thing, and a part of it.
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
mod tests;
