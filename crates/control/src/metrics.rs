//! A snapshot as metrics: the exposition formats of Prometheus (text 0.0.4) and of OpenMetrics (1.0.0).
//!
//! One walk over a [`Snapshot`] makes families, each with its help, type and samples; the two formats differ in how a counter's family is called,
//! and in the last line. Series are bounded by what the operator has configured: ports, reasons to drop, workers, and queue pairs where they are
//! asked for. Addresses are in one family alone, `ringferry_port_info`. Zeros are exported, so that a rate can be taken of the first drop.
//!
//! `rx` and `tx` are the switch's view, as everywhere: each help says so.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::channels::Stats;
use crate::drops::DropReason;
use crate::snapshot::{Negotiated, PortSnapshot, PortState, QueueRole, Snapshot, WorkerSnapshot};

/// A format of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Format {
    /// Text 0.0.4, which every scraper reads.
    Text,
    /// The later one, which is sent to whoever asks for it.
    OpenMetrics,
}

impl Format {
    /// The value of `Content-Type`.
    pub const fn content_type(self) -> &'static str {
        match self {
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// The format that the value of an `Accept` header asks for: OpenMetrics where it is named with a weight that is not below that of text.
    pub fn accepted(accept: &str) -> Format {
        let weight = |entry: &str| {
            let quality = entry.split(';').find_map(|part| part.trim().strip_prefix("q="));
            quality.map_or(Some(1.0), |weight| weight.trim().parse::<f32>().ok())
        };
        let best = |name: &str| {
            let named = accept.split(',').filter(|entry| {
                entry.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case(name))
            });
            named.filter_map(weight).fold(0.0, f32::max)
        };
        let open = best("application/openmetrics-text");
        if open > 0.0 && open >= best("text/plain") { Format::OpenMetrics } else { Format::Text }
    }
}

/// The kind of a family: what it counts or shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// Counters of a port that have a name and a help here; what a later switch counts besides has its name and a plain help.
const PORT_COUNTERS: [(&str, &str); 31] = [
    (
        "rx_packets",
        "Frames that the switch has received from the port, which its guest has sent, with those dropped afterwards.",
    ),
    ("rx_bytes", "Bytes of the frames that the switch has received from the port, which its guest has sent."),
    ("tx_packets", "Frames that the switch has delivered to the port, which its guest has received."),
    (
        "tx_bytes",
        "Bytes of the frames that the switch has delivered to the port, which its guest has received.",
    ),
    (
        "rx_in_place",
        "Frames that the kernel has written from a tap straight into the buffers of their receiver.",
    ),
    (
        "rx_flooded",
        "Frames from the port that went to every port of their VLAN that may have them: broadcast, groups, and addresses that are not known.",
    ),
    ("rx_bursts", "Bursts in which the switch has taken frames from the guest of the port."),
    ("tx_bursts", "Bursts with frames for the guest of the port, delivered or not."),
    ("tx_starved", "Bursts of which at least one frame found no receive buffer of the guest of the port."),
    (
        "tx_starved_microseconds",
        "Time that has passed between such bursts that follow each other: for so long, at least, the guest had no buffers.",
    ),
    ("tx_segmented", "Frames for the guest of the port that the switch has cut into segments."),
    (
        "tx_segmented_bytes",
        "Bytes of the frames for the port that the switch has cut, and its guest has received in segments.",
    ),
    (
        "tx_checksummed_bytes",
        "Bytes of the frames for the port whose checksum the switch has finished, and that its guest has received whole.",
    ),
    (
        "calls_suppressed",
        "Notifications that the guest of the port did not want: it was awake, or looked by itself.",
    ),
    (
        "rx_paused_microseconds",
        "Time for which queues of the port have waited as its guest had sent as much as rate_in allows.",
    ),
    (
        "rx_held_microseconds",
        "Time for which queues of the port have waited for a worker that it sends to and that was behind.",
    ),
    ("rx_paused", "Times a queue of the port has waited as its guest had sent as much as rate_in allows."),
    ("tx_software", "Frames for the port whose checksum was finished, or that were cut, by the switch."),
    ("tx_coalesced", "Packets for the port that have left merged into larger frames."),
    ("tx_marked", "Packets for the port that were marked (ECN) as they had waited too long for rate_out."),
    ("tx_waited", "Frames for the port that have waited for its Xen guest to post buffers."),
    ("kicks", "Notifications that the switch has received from the guest of the port."),
    ("calls", "Notifications that the switch has sent to the guest of the port."),
    ("ring_errors", "Times a queue of the port has broken, as its guest has broken the rules."),
    ("connections", "Times a front end has connected to the port."),
    ("messages", "Messages of set-up that the switch has received from the front end of the port."),
    ("messages_rejected", "Messages of set-up that were malformed, unknown or too early."),
    ("failed_ring_starts", "Rings of the port that could not start."),
    ("unexpected_fds_closed", "Descriptors that came with a message that has none."),
    (
        "work_nanoseconds",
        "Estimated time of the workers that frames from the port have cost, wherever they went.",
    ),
    ("tx_lost", "Frames that were lost on their way."),
];

/// Everything that is exported of a switch. `queues` has the counters of each port whose queue pairs are asked for, and may be empty.
pub fn of_switch(snapshot: &Snapshot, queues: &[Stats], format: Format) -> String {
    let mut out = Exposition { format, text: String::with_capacity(4096 + snapshot.ports.len() * 8192) };
    let version = snapshot.version.to_string();
    out.family(
        "ringferry_snapshot_info",
        Kind::Gauge,
        "Version of the schema of what the switch says, as a label.",
        |family| {
            family.sample(&[("version", &version)], 1.0);
        },
    );
    out.family(
        "ringferry_uptime_seconds",
        Kind::Gauge,
        "Time since the switch was started; replacing its program does not begin anew.",
        |family| {
            family.sample(&[], snapshot.uptime_seconds as f64);
        },
    );
    if !snapshot.program.is_empty() {
        let help = "Version of the program that runs the switch, as a label.";
        out.family("ringferry_build_info", Kind::Gauge, help, |family| {
            family.sample(&[("version", &snapshot.program)], 1.0);
        });
    }
    if let Some(seconds) = snapshot.process_seconds {
        let help = "Time for which this process has been the switch: less than ringferry_uptime_seconds if it has taken over from another one.";
        out.family("ringferry_process_seconds", Kind::Gauge, help, |family| {
            family.sample(&[], seconds as f64);
        });
    }
    let help = "What is wrong with the switch itself, of which ctl show says more: nobody starts another one if it is killed, say.";
    out.family("ringferry_troubles", Kind::Gauge, help, |family| {
        family.sample(&[], snapshot.troubles.len() as f64);
    });
    let help = "Captures that run.";
    out.family("ringferry_captures", Kind::Gauge, help, |family| {
        family.sample(&[], snapshot.captures.len() as f64);
    });
    out.ports(&snapshot.ports);
    out.queues(&snapshot.ports, queues);
    out.workers(snapshot);
    out.addresses(snapshot);
    out.end()
}

struct Exposition {
    format: Format,
    text: String,
}

/// The samples of one family.
struct Family<'e> {
    text: &'e mut String,
    name: String,
}

impl Family<'_> {
    fn sample(&mut self, labels: &[(&str, &str)], value: f64) {
        self.sample_of("", labels, value);
    }

    /// Writes the series of a histogram: so many values in each bucket, of which each has an upper bound but the last.
    fn histogram(&mut self, label: (&str, &str), bounds: &[f64], buckets: &[u64], sum: Option<f64>) {
        let mut count = 0;
        let bounds = bounds.iter().map(|bound| format!("{bound:?}")).chain(["+Inf".to_owned()]);
        for (bound, values) in bounds.zip(buckets) {
            count += values;
            self.sample_of("_bucket", &[label, ("le", &bound)], count as f64);
        }
        self.sample_of("_count", &[label], count as f64);
        if let Some(sum) = sum {
            self.sample_of("_sum", &[label], sum);
        }
    }

    fn sample_of(&mut self, suffix: &str, labels: &[(&str, &str)], value: f64) {
        self.text.push_str(&self.name);
        self.text.push_str(suffix);
        for (at, (label, value)) in labels.iter().enumerate() {
            self.text.push(if at == 0 { '{' } else { ',' });
            self.text.push_str(label);
            self.text.push_str("=\"");
            escape(value, self.text);
            self.text.push('"');
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, " {value}");
    }
}

/// Port names come from users, and peers' paths may have anything in them.
fn escape(value: &str, out: &mut String) {
    for character in value.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            other => out.push(other),
        }
    }
}

impl Exposition {
    /// Writes a family. The name of a counter is given without `_total`.
    fn family(&mut self, name: &str, kind: Kind, help: &str, samples: impl FnOnce(&mut Family<'_>)) {
        let series = if kind == Kind::Counter { format!("{name}_total") } else { name.to_owned() };
        // OpenMetrics names the family, the older format each series.
        let family = if self.format == Format::OpenMetrics { name } else { series.as_str() };
        let kind = kind.name();
        let mut escaped = String::new();
        escape(help, &mut escaped);
        // In the older format quotes stand in a help as they are.
        let help = if self.format == Format::Text { escaped.replace("\\\"", "\"") } else { escaped };
        let _ = writeln!(self.text, "# HELP {family} {help}\n# TYPE {family} {kind}");
        samples(&mut Family { text: &mut self.text, name: series });
    }

    fn ports(&mut self, ports: &[PortSnapshot]) {
        self.family(
            "ringferry_port_info",
            Kind::Gauge,
            "Kind, peer and Ethernet address of the port, as labels.",
            |family| {
                for port in ports {
                    let mac = port.mac.map(|mac| mac.to_string()).unwrap_or_default();
                    let labels = [
                        ("port", port.name.as_str()),
                        ("kind", port.negotiated.kind()),
                        ("peer", &port.peer),
                        ("mac", &mac),
                    ];
                    family.sample(&labels, 1.0);
                }
            },
        );
        self.family("ringferry_port_up", Kind::Gauge, "1 if the port carries packets.", |family| {
            for port in ports {
                family.sample(&[("port", &port.name)], f64::from(u8::from(port.state == PortState::Up)));
            }
        });
        self.family(
            "ringferry_port_state",
            Kind::Gauge,
            "1 for the state that the port is in, as ctl show names it.",
            |family| {
                for port in ports {
                    for state in PortState::ALL {
                        let labels = [("port", port.name.as_str()), ("state", state.name())];
                        family.sample(&labels, f64::from(u8::from(port.state == state)));
                    }
                }
            },
        );
        let help = "1 if the port serves nobody, or nobody else, for a reason that ctl show names (fault).";
        self.family("ringferry_port_fault", Kind::Gauge, help, |family| {
            for port in ports {
                family.sample(&[("port", &port.name)], f64::from(u8::from(port.fault.is_some())));
            }
        });
        self.family(
            "ringferry_port_mtu_bytes",
            Kind::Gauge,
            "Largest frame payload of the port.",
            |family| {
                for port in ports {
                    family.sample(&[("port", &port.name)], f64::from(port.mtu));
                }
            },
        );
        let help = "Time for which the guest of the port has taken no packets out of a receiveq that the switch has filled: it hangs, is paused, or gets no processor. 0 while it takes them.";
        self.family("ringferry_port_stalled_seconds", Kind::Gauge, help, |family| {
            for port in ports {
                let stalls = port.queues.iter().filter_map(|queue| Some(queue.stalled?.seconds));
                family.sample(&[("port", &port.name)], stalls.max().unwrap_or(0) as f64);
            }
        });
        for (name, role, help) in [
            (
                "ringferry_port_posted_entries",
                QueueRole::Receiveq,
                "Entries that the guest has posted in its receiveqs and the switch has not used: room for what is sent to it.",
            ),
            (
                "ringferry_port_waiting_entries",
                QueueRole::Transmitq,
                "Entries in the transmitqs of the guest that the switch has not taken: what waits to be sent.",
            ),
        ] {
            self.family(name, Kind::Gauge, help, |family| {
                for port in ports.iter().filter(|port| !matches!(port.negotiated, Negotiated::Tap(_))) {
                    let available = port.running(role).filter_map(|queue| queue.available);
                    let entries: u32 = available.map(u32::from).sum();
                    family.sample(&[("port", &port.name)], f64::from(entries));
                }
            });
        }
        let mut counted: BTreeMap<&str, &str> = BTreeMap::new();
        for name in ports.iter().flat_map(|port| port.counters.keys()) {
            let help = PORT_COUNTERS.iter().find(|(known, _)| known == name).map(|(_, help)| *help);
            counted.insert(name, help.unwrap_or("A counter of the port, of which ctl stats shows the same."));
        }
        for (name, help) in counted {
            // Base units only.
            let units = [("_nanoseconds", 1e9), ("_microseconds", 1e6)];
            let of = units.iter().find_map(|(unit, parts)| Some((name.strip_suffix(unit)?, *parts)));
            let (name_there, parts) = match of {
                Some((of, parts)) => (format!("{of}_seconds"), parts),
                None => (name.to_owned(), 1.0),
            };
            if !is_name(&name_there) {
                continue;
            }
            self.family(&format!("ringferry_port_{name_there}"), Kind::Counter, help, |family| {
                for (port, value) in ports.iter().filter_map(|port| Some((port, port.counters.get(name)?))) {
                    family.sample(&[("port", &port.name)], *value as f64 / parts);
                }
            });
        }
        let help = "Frames dropped at the port, by reason: the port that the frame would have left by, or came from if it never got that far.";
        self.family("ringferry_port_dropped_packets", Kind::Counter, help, |family| {
            for port in ports {
                let known = DropReason::ALL.iter().map(|reason| reason.name());
                let later = port
                    .drops
                    .keys()
                    .map(String::as_str)
                    .filter(|name| DropReason::ALL.iter().all(|reason| reason.name() != *name));
                for reason in known.chain(later) {
                    let count = port.drops.get(reason).copied().unwrap_or(0);
                    family.sample(&[("port", &port.name), ("reason", reason)], count as f64);
                }
            }
        });
    }

    fn queues(&mut self, ports: &[PortSnapshot], queues: &[Stats]) {
        if queues.is_empty() {
            return;
        }
        let help = "1 if the virtqueue is set up, enabled and not broken. A receiveq is what the guest receives from.";
        self.family("ringferry_queue_running", Kind::Gauge, help, |family| {
            for port in ports {
                for queue in &port.queues {
                    let runs = queue.started && queue.enabled && queue.broken.is_none();
                    let labels = [
                        ("port", port.name.as_str()),
                        ("queue", &queue.index.to_string()),
                        ("role", queue.role.name()),
                    ];
                    family.sample(&labels, f64::from(u8::from(runs)));
                }
            }
        });
        let mut families: BTreeMap<(&str, &str), Vec<QueueSample<'_>>> = BTreeMap::new();
        for stats in queues {
            for (name, value) in &stats.counters {
                if let Some((side, pair, counter)) = of_queue(name) {
                    families.entry((side, counter)).or_default().push((&stats.port, pair, *value));
                }
            }
        }
        for ((side, counter), samples) in families {
            let role = if side == "rx" { QueueRole::Transmitq } else { QueueRole::Receiveq };
            let view = if side == "rx" {
                "what the switch has received, and the guest sent"
            } else {
                "what the switch has delivered, and the guest received"
            };
            let help = format!("Counted at the {} of the queue pair: {view}.", role.name());
            self.family(&format!("ringferry_queue_{side}_{counter}"), Kind::Counter, &help, |family| {
                for (port, pair, value) in samples {
                    family.sample(&[("port", port), ("pair", pair)], value as f64);
                }
            });
        }
    }

    fn workers(&mut self, snapshot: &Snapshot) {
        for (name, help, value) in WORKER_COUNTERS {
            self.family(name, Kind::Counter, help, |family| {
                for (number, worker) in snapshot.workers.iter().enumerate() {
                    family.sample(&[("worker", &number.to_string())], value(worker) as f64);
                }
            });
        }
        type Time = fn(&WorkerSnapshot) -> Option<u64>;
        let times: [(&str, &str, Time); 4] = [
            (
                "ringferry_worker_sleep_seconds",
                "Time that the worker has slept; the rest it has worked or polled.",
                |worker| worker.sleep_nanoseconds,
            ),
            (
                "ringferry_worker_busy_seconds",
                "Time of the worker's rounds that have moved a packet: its load.",
                |worker| Some(worker.busy_nanoseconds),
            ),
            (
                "ringferry_worker_polling_seconds",
                "Time in which the worker was awake and has found nothing.",
                |worker| Some(worker.polling_nanoseconds),
            ),
            (
                "ringferry_worker_run_delay_seconds",
                "Time for which the worker could have run and had no processor: others used them, or a limit on CPU time held it back.",
                |worker| Some(worker.run_delay_nanoseconds),
            ),
        ];
        for (name, help, time) in times {
            self.family(name, Kind::Counter, help, |family| {
                for (number, worker) in snapshot.workers.iter().enumerate() {
                    if let Some(nanoseconds) = time(worker) {
                        family.sample(&[("worker", &number.to_string())], nanoseconds as f64 * 1e-9);
                    }
                }
            });
        }
        let help = "Packets in each burst that the worker has taken from a queue. How many there were in all, the ports count.";
        self.family("ringferry_worker_burst_packets", Kind::Histogram, help, |family| {
            for (number, worker) in snapshot.workers.iter().enumerate() {
                let label = ("worker", &*number.to_string());
                family.histogram(label, &BURST_BOUNDS, &whole(&worker.bursts, BURST_BOUNDS.len() + 1), None);
            }
        });
        let help = "Time of each of the worker's rounds that have moved a packet: for so long a frame waits at most until its port is looked at.";
        self.family("ringferry_worker_round_seconds", Kind::Histogram, help, |family| {
            for (number, worker) in snapshot.workers.iter().enumerate() {
                let (label, sum) = (("worker", &*number.to_string()), worker.busy_nanoseconds as f64 * 1e-9);
                let rounds = whole(&worker.rounds, ROUND_BOUNDS.len() + 1);
                family.histogram(label, &ROUND_BOUNDS, &rounds, Some(sum));
            }
        });
    }

    fn addresses(&mut self, snapshot: &Snapshot) {
        let fdb = &snapshot.fdb;
        self.family(
            "ringferry_fdb_addresses",
            Kind::Gauge,
            "Addresses in the forwarding database, by the port that they are behind.",
            |family| {
                let count = |name| fdb.behind.get(name).copied().unwrap_or_default();
                let counts: BTreeMap<&str, u64> =
                    snapshot.ports.iter().map(|port| (port.name.as_str(), count(&port.name))).collect();
                counts.iter().for_each(|(port, count)| family.sample(&[("port", port)], *count as f64));
            },
        );
        self.family(
            "ringferry_fdb_capacity_addresses",
            Kind::Gauge,
            "Most addresses that the forwarding database holds.",
            |family| {
                family.sample(&[], fdb.capacity as f64);
            },
        );
        self.family(
            "ringferry_fdb_changes",
            Kind::Counter,
            "What has happened to addresses in the forwarding database.",
            |family| {
                fdb.counters
                    .iter()
                    .for_each(|(change, count)| family.sample(&[("change", change)], *count as f64));
            },
        );
    }

    fn end(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }
}

/// Upper bounds of the buckets of [`WorkerSnapshot::bursts`] but the last, which has no packets beyond 32.
const BURST_BOUNDS: [f64; 5] = [1.0, 2.0, 4.0, 8.0, 16.0];

/// Upper bounds of the buckets of [`WorkerSnapshot::rounds`] but the last, in seconds: a microsecond counts as 1024 nanoseconds there.
const ROUND_BOUNDS: [f64; 7] =
    [4.096e-6, 16.384e-6, 65.536e-6, 262.144e-6, 1.048576e-3, 4.194304e-3, 16.777216e-3];

/// The buckets of a histogram, all of them also where a switch from before there was one says none.
fn whole(buckets: &[u64], count: usize) -> Vec<u64> {
    buckets.iter().copied().chain(std::iter::repeat(0)).take(count).collect()
}

/// The port, the pair, and what was counted.
type QueueSample<'s> = (&'s str, &'s str, u64);

/// A counter of a worker: its name, its help, and where it is.
type WorkerCounter = (&'static str, &'static str, fn(&WorkerSnapshot) -> u64);

const WORKER_COUNTERS: [WorkerCounter; 4] = [
    ("ringferry_worker_polls", "Rounds of the worker over its ports.", |worker| worker.polls),
    ("ringferry_worker_busy_polls", "Rounds of the worker that have moved a packet.", |worker| {
        worker.busy_polls
    }),
    ("ringferry_worker_sleeps", "Times the worker has gone to sleep.", |worker| worker.sleeps),
    ("ringferry_worker_wakeups", "Times the worker was woken by an event, not by a timer.", |worker| {
        worker.wakeups
    }),
];

/// Takes the name of a queue's counter apart: `rx_queue_0_packets` is the side `rx`, the pair 0 and `packets`.
fn of_queue(name: &str) -> Option<(&str, &str, &str)> {
    let (side, rest) = name.split_once("_queue_")?;
    let (pair, counter) = rest.split_once('_')?;
    let known =
        matches!(side, "rx" | "tx") && pair.bytes().all(|byte| byte.is_ascii_digit()) && is_name(counter);
    known.then_some((side, pair, counter))
}

/// Returns true if this may be part of the name of a metric: what a later switch calls a counter is its word, not ours.
fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

#[cfg(test)]
mod tests;
