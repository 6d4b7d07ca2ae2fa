//! What a running switch tells about itself: the answer to `ringferry ctl show`, as JSON with a stable schema
//! and as text for people.
//!
//! Within one [`VERSION`] fields are only added, and readers ignore fields they do not know. Counters have
//! the names and the point of view of [`crate::counters`]: `rx` is what the switch received from the port.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use ringferry_xen_net::netback::PageCounters;
use serde::{Deserialize, Serialize};

use crate::config;
use crate::counters::WorkerCounters;
use crate::fdb::{FdbPage, FdbStats, PortId};
use crate::rules::Rules;

/// Version of the schema. Raised when a field changes its meaning or goes away.
pub const VERSION: u32 = 1;

/// The state of a switch at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`VERSION`] of the schema.
    pub version: u32,
    /// Process id of the switch.
    pub pid: u32,
    /// Seconds since the switch started.
    pub uptime_seconds: u64,
    /// The ports in the order of the configuration.
    pub ports: Vec<PortSnapshot>,
    /// The forwarding database.
    pub fdb: FdbSnapshot,
    /// The worker threads.
    pub workers: Vec<WorkerSnapshot>,
}

/// One port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortSnapshot {
    /// Its unique name.
    pub name: String,
    /// `vhost-user`, `tap` or `xen-vif`.
    pub kind: String,
    /// Whether it carries packets, and if not, why.
    pub state: PortState,
    /// What is plugged in: socket path, tap name or inherited descriptor.
    pub peer: String,
    /// Largest frame payload in bytes.
    pub mtu: u16,
    /// MAC address the port advertises, if any.
    pub mac: Option<String>,
    /// Names of the negotiated features; for a tap, of its offloads.
    pub features: Vec<String>,
    /// The virtqueues; a tap has none.
    pub queues: Vec<QueueSnapshot>,
    /// Counters by name.
    pub counters: BTreeMap<String, u64>,
    /// Dropped packets by reason.
    pub drops: BTreeMap<String, u64>,
    /// What its frames must obey.
    #[serde(default)]
    pub rules: RulesByKey,
}

/// Rules of a port that are not as they are by default: keys and values are those of the configuration file.
pub type RulesByKey = BTreeMap<String, serde_json::Value>;

/// The rules of a port: the answer to `ringferry ctl rules`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PortRules {
    /// The port.
    pub port: String,
    /// Its rules.
    pub rules: RulesByKey,
}

/// What became of a change of rules: the answer to `ringferry ctl set` and `unset`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RulesChange {
    /// The port.
    pub port: String,
    /// Its rules now.
    pub rules: RulesByKey,
    /// Whether the configuration file says the same, so that the next start has them, too.
    pub persistent: bool,
    /// Where they are kept, or why they are not, for people.
    pub note: String,
}

/// Rules as they are shown and reported.
pub(crate) fn rules_by_key(rules: &Rules) -> RulesByKey {
    let value = |value| serde_json::to_value(value).unwrap_or_default();
    config::rules_by_key(rules).into_iter().map(|(key, toml)| (key.to_owned(), value(toml))).collect()
}

/// Rules in the words of `ringferry ctl set`.
fn settings(rules: &RulesByKey) -> impl Iterator<Item = String> {
    fn flag(value: &serde_json::Value) -> String {
        match value {
            serde_json::Value::String(text) => text.clone(),
            serde_json::Value::Array(items) if items.is_empty() => "none".to_owned(),
            serde_json::Value::Array(items) => items.iter().map(flag).collect::<Vec<_>>().join(","),
            other => other.to_string(),
        }
    }
    rules.iter().map(|(key, value)| format!("{key}={}", flag(value)))
}

impl PortRules {
    /// A rule a line, in the words of `ringferry ctl set`.
    pub fn to_text(&self) -> String {
        rules_to_text(&self.port, &self.rules)
    }
}

impl RulesChange {
    /// The rules now, and whether they are kept.
    pub fn to_text(&self) -> String {
        let kept = if self.persistent { "kept" } else { "not kept when the switch ends" };
        format!("{}{kept}: {}\n", rules_to_text(&self.port, &self.rules), self.note)
    }
}

fn rules_to_text(port: &str, rules: &RulesByKey) -> String {
    if rules.is_empty() {
        return format!("{port} has no rules\n");
    }
    let lines = settings(rules).map(|setting| format!("  {setting}\n"));
    format!("rules of {port}:\n{}", lines.collect::<String>())
}

/// Whether a port carries packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortState {
    /// It carries packets.
    Up,
    /// It waits for a front end to connect.
    Listening,
    /// It tries to connect to a front end.
    Connecting,
    /// Its peer is there, but has not started the device or has taken the link down.
    Down,
    /// A queue is broken until the guest resets it.
    Broken,
}

impl PortState {
    /// The name it has in JSON.
    pub fn name(self) -> &'static str {
        match self {
            PortState::Up => "up",
            PortState::Listening => "listening",
            PortState::Connecting => "connecting",
            PortState::Down => "down",
            PortState::Broken => "broken",
        }
    }
}

/// What a virtqueue is for, by its name in VIRTIO 1.4, 5.1.2, which takes the guest's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QueueRole {
    /// The guest receives from it; what the switch sends (`tx`).
    Receiveq,
    /// The guest transmits on it; what the switch receives (`rx`).
    Transmitq,
}

/// One virtqueue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueSnapshot {
    /// Its index in the device.
    pub index: u16,
    /// What it is for.
    pub role: QueueRole,
    /// Number of descriptors; 0 before set-up.
    pub size: u16,
    /// Whether the front end enabled it.
    pub enabled: bool,
    /// Whether it is set up and running.
    pub started: bool,
    /// Why it broke, if it did.
    pub broken: Option<String>,
    /// Available-ring index up to which the device has looked.
    pub last_avail: u16,
    /// Used-ring index up to which the device has published.
    pub last_used: u16,
    /// What was done with the pages of a Xen guest's pair of rings; shown with its transmitq.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grants: Option<GrantSnapshot>,
}

/// What was done with granted pages since the queue was connected, and how many are mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantSnapshot {
    /// Uses of pages that were mapped already.
    pub hits: u64,
    /// Uses of pages that were not.
    pub misses: u64,
    /// Pages mapped.
    pub mapped: u64,
    /// Mappings replaced by others.
    pub evicted: u64,
    /// Pages that could not be mapped.
    pub failed: u64,
    /// Pieces that the hypervisor copied.
    pub copies: u64,
    /// Bytes in them.
    pub copied_bytes: u64,
    /// Pages that are mapped now because they were used.
    pub learned_pages: u64,
    /// Pages that are mapped now because the front end asked for it.
    pub static_pages: u64,
    /// Most pages that may be mapped.
    pub max_pages: u64,
}

impl GrantSnapshot {
    /// What a queue tells, of which `max` pages may be mapped, and are: learned ones and static grants.
    pub(crate) fn of(counters: &PageCounters, (learned, fixed): (usize, usize), max: usize) -> GrantSnapshot {
        let PageCounters { hits, misses, mapped, evicted, failed, copies, copied_bytes } = *counters;
        let [learned_pages, static_pages, max_pages] = [learned, fixed, max].map(|pages| pages as u64);
        GrantSnapshot {
            hits,
            misses,
            mapped,
            evicted,
            failed,
            copies,
            copied_bytes,
            learned_pages,
            static_pages,
            max_pages,
        }
    }

    /// What is counted, by name.
    pub fn by_name(&self) -> [(&'static str, u64); 7] {
        [
            ("hits", self.hits),
            ("misses", self.misses),
            ("mapped", self.mapped),
            ("evicted", self.evicted),
            ("failed", self.failed),
            ("copies", self.copies),
            ("copied_bytes", self.copied_bytes),
        ]
    }

    /// What there is now, by name.
    pub fn gauges_by_name(&self) -> [(&'static str, u64); 3] {
        [
            ("learned_pages", self.learned_pages),
            ("static_pages", self.static_pages),
            ("max_pages", self.max_pages),
        ]
    }
}

/// The forwarding database.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FdbSnapshot {
    /// Most addresses it can hold.
    pub capacity: usize,
    /// Addresses seen lately, ordered by port, VLAN and address.
    pub entries: Vec<FdbEntry>,
    /// `learned`, `moved`, `replaced`, `refused`, `aged`, `limited`: see [`crate::fdb::FdbStats`].
    pub counters: BTreeMap<String, u64>,
}

/// One address in the forwarding database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FdbEntry {
    /// The VLAN in which it was seen; 0 is that of frames that nobody has put into another.
    #[serde(default)]
    pub vlan: u16,
    /// The address.
    pub mac: String,
    /// Name of the port it was last seen on.
    pub port: String,
    /// Seconds since it last sent a frame.
    pub age_seconds: u32,
    /// Whether it was put there by the configuration, for ever.
    #[serde(default, rename = "static", skip_serializing_if = "std::ops::Not::not")]
    pub fixed: bool,
}

impl FdbSnapshot {
    /// Adds a part of what a worker knows, with ports named by `name`; to be [settled](Self::settle) when all has been added.
    pub fn add(&mut self, page: FdbPage, name: impl Fn(PortId) -> String) {
        self.capacity = self.capacity.max(page.capacity);
        self.entries.extend(page.items.into_iter().map(|item| FdbEntry {
            vlan: item.vid,
            mac: item.mac.to_string(),
            port: name(item.port),
            age_seconds: item.age,
            fixed: item.fixed,
        }));
        if page.next.is_some() {
            return;
        }
        // The worker's last part.
        let FdbStats { learned, moved, replaced, refused, aged, limited } = page.stats;
        for (name, count) in [
            ("learned", learned),
            ("moved", moved),
            ("replaced", replaced),
            ("refused", refused),
            ("aged", aged),
            ("limited", limited),
        ] {
            *self.counters.entry(name.to_owned()).or_insert(0) += count;
        }
    }

    /// Puts the addresses in order. Of one that several workers know, the one that was seen last stays.
    pub fn settle(&mut self) {
        self.entries.sort_by(|a, b| (a.vlan, &a.mac, a.age_seconds).cmp(&(b.vlan, &b.mac, b.age_seconds)));
        self.entries.dedup_by(|later, first| (later.vlan, &later.mac) == (first.vlan, &first.mac));
        self.entries.sort_by(|a, b| (&a.port, a.vlan, &a.mac).cmp(&(&b.port, b.vlan, &b.mac)));
    }
}

/// One worker thread, counted since it started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerSnapshot {
    /// Rounds over all ports.
    pub polls: u64,
    /// Rounds that moved at least one packet.
    pub busy_polls: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Times it was woken by an event, not by a timer.
    pub wakeups: u64,
    /// Share of its life it was awake, 0 to 100.
    pub busy_percent: f64,
}

impl WorkerSnapshot {
    /// What a worker counted in its life of `age`.
    pub fn of(counters: &WorkerCounters, age: Duration) -> WorkerSnapshot {
        let asleep = Duration::from_nanos(counters.sleep_nanoseconds.get()).as_secs_f64();
        let share = if age.is_zero() { 0.0 } else { 100.0 * (1.0 - asleep / age.as_secs_f64()) };
        WorkerSnapshot {
            polls: counters.polls.get(),
            busy_polls: counters.busy_polls.get(),
            sleeps: counters.sleeps.get(),
            wakeups: counters.wakeups.get(),
            busy_percent: share.clamp(0.0, 100.0),
        }
    }
}

impl Snapshot {
    /// A few aligned tables for a terminal: the switch, its ports, their queues, and whatever was dropped.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "ringferry, process {}, up {}, {} of {} MAC addresses\n",
            self.pid,
            duration(self.uptime_seconds),
            self.fdb.entries.len(),
            self.fdb.capacity
        );
        for (index, worker) in self.workers.iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "worker {index}: busy {:.1} %, {} polls, {} of them with packets, {} sleeps, {} wakeups",
                worker.busy_percent,
                humane(worker.polls),
                humane(worker.busy_polls),
                humane(worker.sleeps),
                humane(worker.wakeups)
            );
        }
        text.push('\n');
        text.push_str(&self.ports_table());
        let queues = self.queues_table();
        if !queues.is_empty() {
            text.push('\n');
            text.push_str(&queues);
        }
        for port in &self.ports {
            text.push('\n');
            text.push_str(&port.details());
        }
        text
    }

    /// The forwarding database as a table for a terminal.
    pub fn fdb_to_text(&self) -> String {
        let age = |entry: &FdbEntry| {
            if entry.fixed { "static".to_owned() } else { format!("{} s", entry.age_seconds) }
        };
        if self.fdb.entries.iter().all(|entry| entry.vlan == 0) {
            let mut table = Table::new(&["<MAC", "<PORT", ">AGE"]);
            for entry in &self.fdb.entries {
                table.row([entry.mac.clone(), entry.port.clone(), age(entry)]);
            }
            return table.to_string();
        }
        let mut table = Table::new(&[">VLAN", "<MAC", "<PORT", ">AGE"]);
        for entry in &self.fdb.entries {
            table.row([entry.vlan.to_string(), entry.mac.clone(), entry.port.clone(), age(entry)]);
        }
        table.to_string()
    }

    fn ports_table(&self) -> String {
        let mut table = Table::new(&[
            "<PORT",
            "<KIND",
            "<STATE",
            ">MTU",
            ">RX PACKETS",
            ">RX BYTES",
            ">TX PACKETS",
            ">TX BYTES",
            ">DROPS",
        ]);
        for port in &self.ports {
            let counter = |name: &str| humane(port.counters.get(name).copied().unwrap_or_default());
            table.row([
                port.name.clone(),
                port.kind.clone(),
                port.state.name().to_owned(),
                port.mtu.to_string(),
                counter("rx_packets"),
                counter("rx_bytes"),
                counter("tx_packets"),
                counter("tx_bytes"),
                humane(port.drops.values().sum()),
            ]);
        }
        table.to_string()
    }

    fn queues_table(&self) -> String {
        let mut table = Table::new(&["<PORT", ">QUEUE", "<ROLE", ">SIZE", "<STATE"]);
        for port in &self.ports {
            for queue in &port.queues {
                let state = match (&queue.broken, queue.started, queue.enabled) {
                    (Some(reason), _, _) => format!("broken: {reason}"),
                    (None, true, true) => "running".to_owned(),
                    (None, true, false) => "disabled".to_owned(),
                    (None, false, _) => "stopped".to_owned(),
                };
                let role = match queue.role {
                    QueueRole::Receiveq => "receiveq",
                    QueueRole::Transmitq => "transmitq",
                };
                table.row([
                    port.name.clone(),
                    queue.index.to_string(),
                    role.to_owned(),
                    queue.size.to_string(),
                    state,
                ]);
            }
        }
        if table.rows.len() > 1 { table.to_string() } else { String::new() }
    }
}

impl PortSnapshot {
    /// What does not fit into a table: where it leads, features, and counters that are not zero.
    fn details(&self) -> String {
        let mut text = format!("{}: {}", self.name, self.peer);
        if let Some(mac) = &self.mac {
            let _ = write!(text, ", {mac}");
        }
        text.push('\n');
        let nonzero = |counts: &BTreeMap<String, u64>, shown: &[&str]| {
            let counts = counts.iter().filter(|(name, count)| **count > 0 && !shown.contains(&name.as_str()));
            counts.map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
        };
        let lines = [
            ("rules", settings(&self.rules).collect::<Vec<_>>().join(" ")),
            ("features", self.features.join(" ")),
            ("counters", nonzero(&self.counters, &["rx_packets", "rx_bytes", "tx_packets", "tx_bytes"])),
            ("drops", nonzero(&self.drops, &[])),
        ];
        for (label, line) in lines.into_iter().filter(|(_, line)| !line.is_empty()) {
            let _ = writeln!(text, "  {label}: {line}");
        }
        text
    }
}

/// Columns of text, aligned. A heading starts with `<` for a column aligned left and `>` for one aligned
/// right.
pub(crate) struct Table {
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(headings: &[&str]) -> Table {
        Table {
            right: headings.iter().map(|heading| heading.starts_with('>')).collect(),
            rows: vec![headings.iter().map(|heading| heading[1..].to_owned()).collect()],
        }
    }

    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width =
            |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
        let widths: Vec<_> = (0..self.right.len()).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, &width), &right) in row.iter().zip(&widths).zip(&self.right) {
                if right {
                    write!(line, "{cell:>width$}  ")?;
                } else {
                    write!(line, "{cell:<width$}  ")?;
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A count with at most four digits, exact below 10 000 and with three significant digits and a decimal unit
/// above.
pub fn humane(count: u64) -> String {
    if count < 10_000 {
        return count.to_string();
    }
    let mut value = count as f64;
    let mut units = ["k", "M", "G", "T", "P", "E"].into_iter();
    let mut unit = "";
    // 999.5 would be rounded to 1000.
    while value >= 999.5 {
        value /= 1000.0;
        unit = units.next().unwrap_or("?");
    }
    let decimals = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.decimals$}{unit}")
}

/// Seconds in the two largest units that matter.
fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use ringferry_packet::ether::Mac;

    use super::*;
    use crate::counters::{DropReason, PortCounters};
    use crate::fdb::Fdb;
    use crate::rules::Vlans;

    /// What the workers with these tables know at tick 10.
    fn known<const N: usize>(tables: [&Fdb; N]) -> FdbSnapshot {
        let mut all = FdbSnapshot::default();
        for table in tables {
            all.add(table.page(0, 10), |port| ["vm0", "uplink"][usize::from(port.0)].to_owned());
        }
        all.settle();
        all
    }

    fn example() -> Snapshot {
        let counters = PortCounters::default();
        counters.rx_packets.add(1_234_567);
        counters.rx_bytes.add(1_850_000_000);
        counters.kicks.add(77);
        counters.drops.add(DropReason::NoReceiveBuffers, 12);
        let queue = QueueSnapshot {
            index: 0,
            role: QueueRole::Receiveq,
            size: 256,
            enabled: true,
            started: true,
            broken: None,
            last_avail: 300,
            last_used: 44,
            grants: None,
        };
        let broken = QueueSnapshot {
            index: 1,
            role: QueueRole::Transmitq,
            broken: Some("descriptor loop".into()),
            ..queue.clone()
        };
        let vm0 = PortSnapshot {
            name: "vm0".into(),
            kind: "vhost-user".into(),
            state: PortState::Broken,
            peer: "/run/ringferry/vm0.sock".into(),
            mtu: 1500,
            mac: Some("52:54:00:00:00:01".into()),
            features: vec!["csum".into(), "mrg-rxbuf".into()],
            queues: vec![queue, broken],
            counters: counters.by_name(),
            drops: counters.drops.by_name(),
            rules: RulesByKey::new(),
        };
        let tap = PortSnapshot {
            name: "uplink".into(),
            kind: "tap".into(),
            state: PortState::Up,
            peer: "rf0".into(),
            mtu: 9000,
            mac: None,
            features: vec![],
            queues: vec![],
            counters: PortCounters::default().by_name(),
            drops: BTreeMap::new(),
            rules: rules_by_key(&Rules { isolated: true, vlans: Vlans::Access(10), ..Rules::default() }),
        };
        let mut fdb = Fdb::new(64, 300, [1, 2]);
        let _ = fdb.learn(0, Mac([0x52, 0x54, 0, 0, 0, 2]), PortId(1), 0);
        let _ = fdb.learn(0, Mac([0x52, 0x54, 0, 0, 0, 1]), PortId(0), 5);
        Snapshot {
            version: VERSION,
            pid: 42,
            uptime_seconds: 3725,
            ports: vec![vm0, tap],
            fdb: known([&fdb]),
            workers: vec![WorkerSnapshot {
                polls: 10,
                busy_polls: 5,
                sleeps: 3,
                wakeups: 2,
                busy_percent: 12.34,
            }],
        }
    }

    /// Programs parse this: a change here is a change of the interface.
    #[test]
    fn json_schema_is_stable() {
        let json = serde_json::to_value(example()).unwrap();
        assert_eq!(json["version"], 1);
        assert_eq!(json["ports"][0]["state"], "broken");
        assert_eq!(json["ports"][0]["counters"]["rx_packets"], 1_234_567);
        assert_eq!(json["ports"][0]["drops"]["no-receive-buffers"], 12);
        assert_eq!(json["ports"][0]["queues"][1]["role"], "transmitq");
        assert_eq!(json["ports"][0]["queues"][1]["broken"], "descriptor loop");
        assert_eq!(
            json["fdb"]["entries"][1],
            serde_json::json!({"vlan": 0, "mac": "52:54:00:00:00:01", "port": "vm0", "age_seconds": 5})
        );
        assert_eq!(json["fdb"]["counters"]["learned"], 2);
        assert_eq!(json["workers"][0]["busy_percent"], 12.34);
        let keys = |value: &serde_json::Value| {
            value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(keys(&json), "fdb pid ports uptime_seconds version workers");
        assert_eq!(
            keys(&json["ports"][0]),
            "counters drops features kind mac mtu name peer queues rules state"
        );
        assert_eq!(json["ports"][0]["rules"], serde_json::json!({}));
        assert_eq!(json["ports"][1]["rules"], serde_json::json!({"isolated": true, "vlan": 10}));
    }

    #[test]
    fn json_reads_back_and_later_fields_are_ignored() {
        let mut json = serde_json::to_value(example()).unwrap();
        json["ports"][0]["added_later"] = 1.into();
        assert_eq!(serde_json::from_value::<Snapshot>(json).unwrap(), example());
    }

    #[test]
    fn state_names_are_those_of_json() {
        for state in
            [PortState::Up, PortState::Listening, PortState::Connecting, PortState::Down, PortState::Broken]
        {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
    }

    #[test]
    fn text_is_aligned_and_complete() {
        let expected = "\
ringferry, process 42, up 1 h 2 min, 2 of 64 MAC addresses
worker 0: busy 12.3 %, 10 polls, 5 of them with packets, 3 sleeps, 2 wakeups

PORT    KIND        STATE    MTU  RX PACKETS  RX BYTES  TX PACKETS  TX BYTES  DROPS
vm0     vhost-user  broken  1500       1.23M     1.85G           0         0     12
uplink  tap         up      9000           0         0           0         0      0

PORT  QUEUE  ROLE       SIZE  STATE
vm0       0  receiveq    256  running
vm0       1  transmitq   256  broken: descriptor loop

vm0: /run/ringferry/vm0.sock, 52:54:00:00:00:01
  features: csum mrg-rxbuf
  counters: kicks 77
  drops: no-receive-buffers 12

uplink: rf0
  rules: isolated=true vlan=10
";
        assert_eq!(example().to_text(), expected);
        assert_eq!(
            example().fdb_to_text(),
            "MAC                PORT     AGE\n52:54:00:00:00:02  uplink  10 s\n52:54:00:00:00:01  vm0      5 s\n"
        );
    }

    #[test]
    fn vlans_are_shown_where_there_are_any() {
        let mut fdb = Fdb::new(64, 300, [1, 2]);
        let mac = Mac([0x52, 0x54, 0, 0, 0, 1]);
        let _ = fdb.learn(7, mac, PortId(0), 5);
        fdb.set_static(PortId(1), &[(mac, 0)]);
        // Both workers know both.
        let text = Snapshot { fdb: known([&fdb, &fdb]), ..example() }.fdb_to_text();
        let expected = "\
VLAN  MAC                PORT       AGE
   0  52:54:00:00:00:01  uplink  static
   7  52:54:00:00:00:01  vm0        5 s
";
        assert_eq!(text, expected);
        let json = serde_json::to_value(known([&fdb])).unwrap();
        let static_one = serde_json::json!(
            {"vlan": 0, "mac": "52:54:00:00:00:01", "port": "uplink", "age_seconds": 0, "static": true});
        assert_eq!(json["entries"][0], static_one);
    }

    #[test]
    fn numbers_are_short() {
        let cases = [
            (0, "0"),
            (9999, "9999"),
            (10_000, "10.0k"),
            (99_949, "99.9k"),
            (99_950, "100k"),
            (999_499, "999k"),
            (999_500, "1.00M"),
            (1_234_567, "1.23M"),
            (u64::MAX, "18.4E"),
        ];
        for (count, expected) in cases {
            assert_eq!(humane(count), expected, "{count}");
        }
        for (seconds, expected) in [(59, "59 s"), (60, "1 min 0 s"), (3600, "1 h 0 min"), (90_000, "1 d 1 h")]
        {
            assert_eq!(duration(seconds), expected);
        }
    }

    #[test]
    fn busy_share_is_the_time_not_asleep() {
        let counters = WorkerCounters::default();
        counters.sleep_nanoseconds.add(7_500_000_000);
        assert_eq!(WorkerSnapshot::of(&counters, Duration::from_secs(10)).busy_percent, 25.0);
        assert_eq!(WorkerSnapshot::of(&counters, Duration::ZERO).busy_percent, 0.0);
        assert_eq!(WorkerSnapshot::of(&counters, Duration::from_secs(5)).busy_percent, 0.0);
    }
}
