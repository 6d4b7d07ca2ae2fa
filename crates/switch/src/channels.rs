//! Queue pairs as a control socket tells of them, in ethtool's words: how many are in use (`ethtool -l`), what
//! spreads packets over them, and what each has counted (`ethtool -S`).
//!
//! `ringferry guest` answers for its own tap and can change the number. A switch tells what the guests behind its
//! ports did: [`channels`], [`steering`] and [`stats`] make the answers from a [`PortSnapshot`], and [`refuse`] says
//! why a switch changes nothing.
//!
//! Names of counters keep the point of view of who answers: `rx` is what a guest received, and what a switch received
//! from the port.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::counters::PairCounters;
use crate::snapshot::{PortSnapshot, Snapshot, Table};

/// How many queue pairs there are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channels {
    /// The port.
    pub port: String,
    /// Most pairs that can be in use.
    pub max_combined: u16,
    /// Pairs in use: of a switch's port what `SET_VRING_ENABLE` enabled; of a guest what was asked for, of which
    /// [`Steering`] shows those that there is enough to do for.
    pub combined: u16,
    /// Pairs that are set up, in use or not.
    pub started: u16,
}

/// What decides which queue a packet takes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Steering {
    /// The port.
    pub port: String,
    /// What steers, for people.
    pub by: String,
    /// What is hashed of a packet where a hash decides, in the words of VIRTIO 1.4, 5.1.6.4.3.
    pub hash_types: Vec<String>,
    /// Each queue pair that there is.
    pub queues: Vec<QueueSteering>,
}

/// Where a queue pair is served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueSteering {
    /// Number of the pair.
    pub queue: u16,
    /// Whether it is in use.
    pub enabled: bool,
    /// The processor that serves it, and handles its calls; `None`: any.
    pub cpu: Option<usize>,
    /// The worker that serves it, in a switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u16>,
}

/// What was counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// The port.
    pub port: String,
    /// Counters by name, such as `rx_packets`, and of queues such as `rx_queue_0_packets`.
    pub counters: BTreeMap<String, u64>,
}

/// What `ringferry guest` tells about itself: the answer to `show` on its control socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestSnapshot {
    /// [`VERSION`](crate::snapshot::VERSION) of the schema.
    pub version: u32,
    /// Process id.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// The tap.
    pub port: String,
    /// Path of the back end's socket.
    pub peer: String,
    /// Whether a back end serves it.
    pub up: bool,
    /// Names of the features agreed on.
    pub features: Vec<String>,
    /// Queue pairs.
    pub channels: Channels,
    /// Where they are served.
    pub steering: Steering,
    /// What was counted; of each queue, too.
    pub stats: Stats,
}

/// Whether a ring is set up, and whether it is in use; for each pair, the receiveq and the transmitq.
fn pairs(port: &PortSnapshot) -> BTreeMap<u16, (bool, bool)> {
    let mut pairs = BTreeMap::new();
    for queue in &port.queues {
        let (rings, started, enabled) = pairs.entry(queue.index / 2).or_insert((0, true, true));
        *rings += 1;
        *started &= queue.started;
        *enabled &= queue.started && queue.enabled;
    }
    let whole = |(pair, (rings, started, enabled))| (pair, (rings == 2 && started, rings == 2 && enabled));
    pairs.into_iter().map(whole).collect()
}

/// What a guest did with the `max` queue pairs that a port offers it.
pub fn channels(port: &PortSnapshot, max: u16) -> Channels {
    let pairs = pairs(port);
    let count = |wanted: fn(&(bool, bool)) -> bool| pairs.values().filter(|pair| wanted(pair)).count() as u16;
    Channels {
        port: port.name.clone(),
        max_combined: max,
        combined: count(|&(_, enabled)| enabled),
        started: count(|&(started, _)| started),
    }
}

/// Where a port's queue pairs are served; `worker` says by whom each is, `by` what spreads packets.
pub fn steering(port: &PortSnapshot, by: &str, worker: impl Fn(u16) -> u16) -> Steering {
    let queues = pairs(port).into_iter().map(|(queue, (_, enabled))| QueueSteering {
        queue,
        enabled,
        cpu: None,
        worker: Some(worker(queue)),
    });
    Steering { port: port.name.clone(), by: by.to_owned(), hash_types: Vec::new(), queues: queues.collect() }
}

/// A port's counters, drops among them as `drop_REASON`, and those of its queue pairs, if they are given: what a
/// guest transmits is `rx_queue_N_…` here, as it is `rx` of the port.
pub fn stats<'a>(port: &PortSnapshot, pairs: impl IntoIterator<Item = (u16, &'a PairCounters)>) -> Stats {
    let mut counters = port.counters.clone();
    let drops =
        port.drops.iter().map(|(reason, count)| (format!("drop_{}", reason.replace('-', "_")), *count));
    counters.extend(drops);
    for (pair, counted) in pairs {
        let named = [
            ("rx", "packets", &counted.rx_packets),
            ("rx", "bytes", &counted.rx_bytes),
            ("rx", "kicks", &counted.kicks),
            ("tx", "packets", &counted.tx_packets),
            ("tx", "bytes", &counted.tx_bytes),
            ("tx", "drops", &counted.tx_dropped),
            ("tx", "calls", &counted.calls),
        ];
        counters.extend(named.map(|(way, name, count)| (format!("{way}_queue_{pair}_{name}"), count.get())));
    }
    for queue in &port.queues {
        let Some(grants) = &queue.grants else { continue };
        let (pair, named) = (queue.index / 2, grants.by_name().into_iter().chain(grants.gauges_by_name()));
        counters.extend(named.map(|(name, count)| (format!("queue_{pair}_grant_{name}"), count)));
    }
    Stats { port: port.name.clone(), counters }
}

/// The port that a request names.
///
/// # Errors
/// There is none; the message lists those that there are.
pub fn find<'a>(snapshot: &'a Snapshot, name: &str) -> Result<&'a PortSnapshot, String> {
    let names = || snapshot.ports.iter().map(|port| port.name.as_str()).collect::<Vec<_>>().join(", ");
    let found = snapshot.ports.iter().find(|port| port.name == name);
    found.ok_or_else(|| format!("there is no port {name:?}; the ports are: {}", names()))
}

/// Why a switch does not change a port's number of pairs.
pub fn refuse(port: &str) -> String {
    format!(
        "the guest on port {port:?} decides how many queue pairs it uses: change it there (ethtool -L DEVICE combined \
         N; of `ringferry guest`, ringferry ctl channels on its own control socket)"
    )
}

/// The queues of a tap, which are all in use.
pub fn of_tap(port: &str, queues: u16) -> Channels {
    Channels { port: port.to_owned(), max_combined: queues, combined: queues, started: queues }
}

/// The queues of a tap; `worker` says who reads each.
pub fn steering_of_tap(port: &str, by: &str, queues: u16, worker: impl Fn(u16) -> u16) -> Steering {
    let queue = |queue| QueueSteering { queue, enabled: true, cpu: None, worker: Some(worker(queue)) };
    Steering {
        port: port.to_owned(),
        by: by.to_owned(),
        hash_types: Vec::new(),
        queues: (0..queues).map(queue).collect(),
    }
}

/// Why the number of a tap's queues is not changed.
pub fn refuse_tap(port: &str) -> String {
    format!(
        "port {port:?} is a tap, which has a queue for each worker: set queues in its configuration, or workers, and \
         start the switch again"
    )
}

impl Channels {
    /// As `ethtool -l` has it.
    pub fn to_text(&self) -> String {
        let Channels { port, max_combined, combined, started } = self;
        format!(
            "Channel parameters for {port}:\nPre-set maximums:\nCombined: {max_combined}\n\
             Current hardware settings:\nCombined: {combined}\nSet up:   {started}\n"
        )
    }
}

impl Steering {
    /// For a terminal.
    pub fn to_text(&self) -> String {
        let mut text = format!("Steering of {}: {}\n", self.port, self.by);
        if !self.hash_types.is_empty() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "Hash types: {}", self.hash_types.join(" "));
        }
        let mut table = Table::new(&[">QUEUE", "<STATE", ">CPU", ">WORKER"]);
        for queue in &self.queues {
            let or = |number: Option<String>, none: &str| number.unwrap_or_else(|| none.to_owned());
            table.row([
                queue.queue.to_string(),
                if queue.enabled { "enabled" } else { "disabled" }.to_owned(),
                or(queue.cpu.map(|cpu| cpu.to_string()), "any"),
                or(queue.worker.map(|worker| worker.to_string()), "-"),
            ]);
        }
        let _ = write!(text, "{table}");
        text
    }
}

impl Stats {
    /// As `ethtool -S` has it: one counter a line, queues in the order of their numbers.
    pub fn to_text(&self) -> String {
        let mut text = format!("Statistics for {}:\n", self.port);
        let mut counters: Vec<_> = self.counters.iter().collect();
        counters.sort_by(|(one, _), (other, _)| natural(one, other));
        for (name, count) in counters {
            let _ = writeln!(text, "     {name}: {count}");
        }
        text
    }
}

impl GuestSnapshot {
    /// For a terminal.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "ringferry guest, process {}, up {} s\n{}: {}, {}\n",
            self.pid,
            self.uptime_seconds,
            self.port,
            self.peer,
            if self.up { "link up" } else { "no back end" }
        );
        if !self.features.is_empty() {
            let _ = writeln!(text, "  features: {}", self.features.join(" "));
        }
        for part in [self.channels.to_text(), self.steering.to_text(), self.stats.to_text()] {
            let _ = write!(text, "\n{part}");
        }
        text
    }
}

/// Names with the numbers in them by their value: `queue_2` before `queue_10`.
fn natural(one: &str, other: &str) -> Ordering {
    let parts = |name: &str| -> Vec<(u64, String)> {
        name.split('_').map(|part| (part.parse().unwrap_or(0), part.to_owned())).collect()
    };
    parts(one).cmp(&parts(other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{PortState, QueueRole, QueueSnapshot};

    /// A port whose guest has set up three pairs and uses two; of a fourth it has one ring.
    fn port() -> PortSnapshot {
        let queues = (0..7).map(|index| QueueSnapshot {
            index,
            role: if index % 2 == 0 { QueueRole::Receiveq } else { QueueRole::Transmitq },
            size: 256,
            enabled: index < 4 || index == 6,
            started: true,
            broken: None,
            last_avail: 0,
            last_used: 0,
            grants: None,
        });
        PortSnapshot {
            name: "vm0".into(),
            kind: "vhost-user".into(),
            state: PortState::Up,
            peer: "/run/vm0.sock".into(),
            mtu: 1500,
            mac: None,
            features: Vec::new(),
            queues: queues.collect(),
            counters: [("rx_packets".to_owned(), 7)].into(),
            drops: [("no-receive-buffers".to_owned(), 3)].into(),
            rules: [].into(),
        }
    }

    #[test]
    fn a_pair_is_in_use_when_both_of_its_rings_are() {
        let wanted = Channels { port: "vm0".into(), max_combined: 16, combined: 2, started: 3 };
        assert_eq!(channels(&port(), 16), wanted);
        assert_eq!(
            wanted.to_text(),
            "Channel parameters for vm0:\nPre-set maximums:\nCombined: 16\nCurrent hardware settings:\nCombined: 2\n\
             Set up:   3\n"
        );
    }

    #[test]
    fn steering_names_each_pair_with_who_serves_it() {
        let steering = steering(&port(), "the flow of a packet", |pair| pair % 2);
        assert_eq!(
            steering.to_text(),
            "\
Steering of vm0: the flow of a packet
QUEUE  STATE     CPU  WORKER
    0  enabled   any       0
    1  enabled   any       1
    2  disabled  any       0
    3  disabled  any       1
"
        );
    }

    #[test]
    fn counters_of_a_pair_take_the_point_of_view_of_its_port() {
        let [first, second] = [PairCounters::default(), PairCounters::default()];
        first.tx_packets.add(1);
        second.rx_packets.add(2);
        let stats = stats(&port(), [(0, &first), (1, &second)]);
        let text = stats.to_text();
        assert!(
            text.starts_with("Statistics for vm0:\n     drop_no_receive_buffers: 3\n     rx_packets: 7\n"),
            "{text}"
        );
        assert!(
            text.contains("\n     tx_queue_0_packets: 1\n")
                && text.contains("\n     rx_queue_1_packets: 2\n")
        );
        assert!(
            text.contains("\n     tx_queue_0_packets: 1\n")
                && text.contains("\n     rx_queue_0_packets: 0\n")
        );
        assert_eq!(super::stats(&port(), []).counters.len(), 2);
    }

    #[test]
    fn a_port_that_is_not_there_is_answered_with_those_that_are() {
        let snapshot = Snapshot { ports: vec![port()], ..Snapshot::default() };
        assert_eq!(find(&snapshot, "vm0").unwrap().name, "vm0");
        assert_eq!(find(&snapshot, "vm1").unwrap_err(), "there is no port \"vm1\"; the ports are: vm0");
    }

    #[test]
    fn queues_are_listed_by_number() {
        let mut names = ["rx_queue_10_bytes", "rx_queue_2_packets", "rx_packets", "rx_queue_2_bytes"];
        names.sort_by(|one, other| natural(one, other));
        assert_eq!(names, ["rx_packets", "rx_queue_2_bytes", "rx_queue_2_packets", "rx_queue_10_bytes"]);
    }
}
