//! A snapshot as tables and lines for a terminal.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{
    FdbEntry, FdbLost, FdbRestless, PortSnapshot, PortState, QueueSnapshot, Rates, SessionEnd, Snapshot,
    StallSnapshot, WINDOWS, WorkerSnapshot,
};
use ringferry_memory::budget::Gib;

use crate::drops::DropReason;
use crate::rules::settings;
use crate::text::{Table, duration, short_count, short_rate};

/// Most ports of which everything is shown. Of more, nobody reads it, and those that are not well would not be found.
const FEW: usize = 16;

impl Snapshot {
    /// A few aligned tables for a terminal: the switch, its ports, their queues, and whatever was dropped.
    pub fn to_text(&self) -> String {
        let space = if self.program.is_empty() { "" } else { " " };
        // A process that has just taken over is where to look first.
        let since = match self.process_seconds {
            Some(seconds) if seconds + 1 < self.uptime_seconds => {
                format!(" (this process took over {} ago)", duration(seconds))
            }
            _ => String::new(),
        };
        let mut text = format!(
            "ringferry{space}{}, process {}, up {}{since}, {} of {} MAC addresses\n",
            self.program,
            self.pid,
            duration(self.uptime_seconds),
            self.fdb.addresses(),
            self.fdb.capacity
        );
        for trouble in &self.troubles {
            let _ = writeln!(text, "{trouble}");
        }
        if self.ports.len() > FEW {
            let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
            self.ports.iter().for_each(|port| *counts.entry(port.condition()).or_default() += 1);
            let counts: Vec<_> =
                counts.iter().map(|(condition, count)| format!("{count} {condition}")).collect();
            let _ = writeln!(text, "{} ports: {}", self.ports.len(), counts.join(", "));
        }
        for (index, worker) in self.workers.iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "worker {index}: awake {:.1} % of its life, {} polls, {} of them with packets, {} sleeps, {} wakeups",
                worker.busy_percent,
                short_count(worker.polls),
                short_count(worker.busy_polls),
                short_count(worker.sleeps),
                short_count(worker.wakeups)
            );
        }
        text += &self.copies_to_text();
        text += &self.restless_to_text();
        for table in [self.load_table(), self.ports_table(), self.rates_table()] {
            if !table.is_empty() {
                text.push('\n');
                text.push_str(&table);
            }
        }
        // Of many ports those that only wait for their guests need no more than their row.
        let is_told = |port: &&PortSnapshot| {
            self.ports.len() <= FEW
                || !port.is_well() && (port.state != PortState::Listening || port.fault.is_some())
        };
        let shown: Vec<_> = self.ports.iter().filter(is_told).collect();
        let queues = queues_table(&shown);
        if !queues.is_empty() {
            text.push('\n');
            text.push_str(&queues);
        }
        for port in &shown {
            text.push('\n');
            text.push_str(&port.details());
        }
        let well = self.ports.len() - shown.len();
        if well > 0 {
            let _ = writeln!(
                text,
                "\nThe queues, rules, features and counters of the {well} ports that are well, or wait for their guests, are not shown: `ringferry ctl show PORT` has them."
            );
        }
        text
    }

    /// The forwarding database as a table for a terminal.
    pub fn fdb_to_text(&self) -> String {
        self.addresses_to_text() + &self.restless_to_text()
    }

    /// A line for each capture, each mirror and each wire.
    pub(super) fn copies_to_text(&self) -> String {
        let captures = self.captures.iter().map(|capture| {
            let (ports, by, end) = (capture.ports.join(", "), capture.by_text(), capture.end_text());
            format!("capture {}: {ports}, {by}; {end} ends it\n", capture.number)
        });
        let mirrors = self.mirrors.iter().map(|mirror| {
            let (from, to) = (&mirror.from, &mirror.to);
            format!("mirror: {from} to {to}, {} copied, {} lost\n", mirror.copied, mirror.lost)
        });
        let wires = self.wires.iter().map(|wire| {
            let [a, b] = &wire.ports;
            format!("wire {}: {a} and {b} (ringferry ctl wire)\n", wire.wire)
        });
        captures.chain(mirrors).chain(wires).collect()
    }

    /// A line for each address that moves again and again, and for each that a port has lost.
    pub(super) fn restless_to_text(&self) -> String {
        let restless = |address: &FdbRestless| {
            format!("{}: two machines have it, or there is a loop\n", address.to_text())
        };
        let lost = |address: &FdbLost| format!("{}\n", address.to_text());
        self.fdb.restless.iter().map(restless).chain(self.fdb.lost.iter().map(lost)).collect()
    }

    fn addresses_to_text(&self) -> String {
        let age = |entry: &FdbEntry| {
            if entry.fixed { "static".to_owned() } else { format!("{} s", entry.age_seconds) }
        };
        if self.fdb.entries.iter().all(|entry| entry.vlan == 0) {
            let mut table = Table::new(&["<MAC", "<PORT", ">AGE"]);
            for entry in &self.fdb.entries {
                table.row([entry.mac.to_string(), entry.port.clone(), age(entry)]);
            }
            return table.to_string();
        }
        let mut table = Table::new(&[">VLAN", "<MAC", "<PORT", ">AGE"]);
        for entry in &self.fdb.entries {
            table.row([entry.vlan.to_string(), entry.mac.to_string(), entry.port.clone(), age(entry)]);
        }
        table.to_string()
    }

    /// The reasons for which packets were dropped: at which ports, what happened and what to do.
    pub fn reasons_to_text(&self) -> String {
        let mut counts: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for port in &self.ports {
            for (reason, count) in port.drops.iter().filter(|(_, count)| **count > 0) {
                counts.entry(reason).or_default().push(format!("{} {}", port.name, short_count(*count)));
            }
        }
        if counts.is_empty() {
            return "no packet was dropped\n".to_owned();
        }
        let paragraphs = counts.into_iter().map(|(name, ports)| {
            let ports = ports.join(", ");
            match DropReason::from_name(name) {
                Some(reason) => {
                    let (at, meaning, remedy) =
                        (reason.counted_at().name(), reason.meaning(), reason.remedy());
                    format!("{name} (counted at the {at}): {ports}\n  {meaning}\n  What to do: {remedy}\n")
                }
                None => format!("{name}: {ports}\n  A reason that this version of ctl does not know.\n"),
            }
        });
        paragraphs.collect::<Vec<_>>().join("\n")
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
            let counter = |name: &str| short_count(port.counters.get(name).copied().unwrap_or_default());
            table.row([
                port.name.clone(),
                port.negotiated.kind().to_owned(),
                port.condition().to_owned(),
                port.mtu.to_string(),
                counter("rx_packets"),
                counter("rx_bytes"),
                counter("tx_packets"),
                counter("tx_bytes"),
                short_count(port.drops.values().sum()),
            ]);
        }
        table.to_string()
    }

    /// Load of the workers now, if it is known.
    fn load_table(&self) -> String {
        let percent = |worker: &WorkerSnapshot, window| {
            worker
                .load_over(window)
                .map_or_else(|| "-".to_owned(), |load| format!("{:.1} %", load.busy_percent))
        };
        let mut table = Table::new(&[
            ">WORKER",
            ">BUSY 1 S",
            ">10 S",
            ">60 S",
            ">POLLING",
            ">ASLEEP",
            ">RUN DELAY",
            ">WAKEUPS/S",
            "<WORKS FOR",
        ]);
        for (number, worker) in self.workers.iter().enumerate() {
            let Some(load) = worker.load_over(10) else { continue };
            let ports =
                load.by_share().into_iter().take(4).map(|(port, share)| format!("{port} {share:.0} %"));
            table.row([
                number.to_string(),
                percent(worker, 1),
                percent(worker, 10),
                percent(worker, 60),
                format!("{:.1} %", load.polling_percent),
                format!("{:.1} %", load.sleeping_percent),
                format!("{:.1} %", load.run_delay_percent),
                short_rate(load.wakeups),
                ports.collect::<Vec<_>>().join(", "),
            ]);
        }
        if table.is_empty() { String::new() } else { table.to_string() }
    }

    /// Rates of the ports that have carried or dropped anything in the last minute.
    fn rates_table(&self) -> String {
        let mut table = Table::new(&[
            "<BIT/S OF",
            ">RX 1 S",
            ">10 S",
            ">60 S",
            ">TX 1 S",
            ">10 S",
            ">60 S",
            ">RX PACKETS/S",
            ">TX PACKETS/S",
            ">DROPS/S",
        ]);
        let moves =
            |rates: &Rates| rates.counter("rx_packets") + rates.counter("tx_packets") + rates.dropped() > 0.0;
        for port in self.ports.iter().filter(|port| port.rates.iter().any(moves)) {
            let bits = |counter: &str| WINDOWS.map(|window| port.rate(window, |rates| rates.bits(counter)));
            let [rx, tx] = ["rx_bytes", "tx_bytes"].map(bits);
            let mut cells = vec![port.name.clone()];
            cells.extend(rx.into_iter().chain(tx));
            for counter in ["rx_packets", "tx_packets"] {
                cells.push(port.rate(10, |rates| rates.counter(counter)));
            }
            cells.push(port.rate(10, Rates::dropped));
            table.row(cells);
        }
        if table.is_empty() { String::new() } else { table.to_string() }
    }
}

impl QueueSnapshot {
    /// Whether it is served, for people.
    pub(super) fn state(&self) -> String {
        match (&self.broken, self.started, self.enabled) {
            (Some(reason), _, _) => format!("broken: {reason}"),
            (None, true, true) => match self.stalled {
                Some(StallSnapshot { entries, seconds }) => {
                    format!("stalled: its guest has taken nothing back for {seconds} s, {entries} entries")
                }
                None => "running".to_owned(),
            },
            (None, true, false) => "disabled".to_owned(),
            (None, false, _) => "stopped".to_owned(),
        }
    }
}

/// The queues of these ports.
fn queues_table(ports: &[&PortSnapshot]) -> String {
    let all = || ports.iter().flat_map(|port| port.queues.iter().map(move |queue| (port, queue)));
    let is_known = all().any(|(_, queue)| queue.available.is_some());
    let mut headings = vec!["<PORT", ">QUEUE", "<ROLE", ">SIZE"];
    headings.extend(is_known.then_some(">AVAILABLE"));
    headings.push("<STATE");
    let mut table = Table::new(&headings);
    for (port, queue) in all() {
        let mut cells = vec![
            port.name.clone(),
            queue.index.to_string(),
            queue.role.name().to_owned(),
            queue.size.to_string(),
        ];
        if is_known {
            cells.push(queue.available.map_or_else(|| "-".to_owned(), |available| available.to_string()));
        }
        cells.push(queue.state());
        table.row(cells);
    }
    if table.is_empty() { String::new() } else { table.to_string() }
}

impl PortSnapshot {
    /// Returns true if it carries packets, and nothing needs somebody's attention.
    fn is_well(&self) -> bool {
        let is_whole = |queue: &QueueSnapshot| queue.broken.is_none();
        !self.another_waits && self.condition() == PortState::Up.name() && self.queues.iter().all(is_whole)
    }

    /// The state of the port in a word for people, who are to see that something is wrong with one that is up: `faulty` or `stalled` then.
    pub fn condition(&self) -> &'static str {
        match self.state {
            PortState::Up if self.fault.is_some() => "faulty",
            PortState::Up if self.queues.iter().any(|queue| queue.stalled.is_some()) => "stalled",
            state => state.name(),
        }
    }

    /// Its rates over this window, if they are known.
    pub fn rates_over(&self, window: u64) -> Option<&Rates> {
        self.rates.iter().find(|rates| rates.window == window)
    }

    /// A rate over a window for a table.
    fn rate(&self, window: u64, of: impl Fn(&Rates) -> f64) -> String {
        self.rates_over(window).map_or_else(|| "-".to_owned(), |rates| short_rate(of(rates)))
    }

    /// What does not fit into a table: where it leads, features, and counters that are not zero.
    pub(super) fn details(&self) -> String {
        let mut text = format!("{}: {}", self.name, self.peer);
        if let Some(mac) = &self.mac {
            let _ = write!(text, ", {mac}");
        }
        text.push('\n');
        if let Some(fault) = &self.fault {
            let _ = writeln!(text, "  fault: {fault}");
        }
        if let Some(front_end) = &self.front_end {
            let _ = write!(text, "  front end: {}", front_end.to_text());
            let _ = match (front_end.heard, front_end.mapped_bytes) {
                (false, _) => writeln!(text, ", which has sent nothing yet"),
                (true, 0) => writeln!(text),
                (true, bytes) => writeln!(text, ", {} mapped", Gib(bytes)),
            };
        }
        if self.another_waits {
            text += "  another front end has connected, and waits until this one has disconnected\n";
        }
        if let Some(SessionEnd { why, seconds }) = &self.ended {
            let _ = writeln!(text, "  the switch ended the last connection {seconds} s ago: {why}");
        }
        if let Some(seconds) = self.stopped_seconds {
            let _ = writeln!(text, "  its rings were stopped {seconds} s ago, and ran before");
        }
        let nonzero = |counts: &BTreeMap<String, u64>, shown: &[&str]| {
            let counts = counts.iter().filter(|(name, count)| **count > 0 && !shown.contains(&name.as_str()));
            counts.map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
        };
        let lines = [
            ("rules", settings(&self.rules).collect::<Vec<_>>().join(" ")),
            ("features", self.negotiated.features().join(" ")),
            ("counters", nonzero(&self.counters, &["rx_packets", "rx_bytes", "tx_packets", "tx_bytes"])),
            ("drops", nonzero(&self.drops, &[])),
        ];
        for (label, line) in lines.into_iter().filter(|(_, line)| !line.is_empty()) {
            let _ = writeln!(text, "  {label}: {line}");
        }
        text
    }
}
