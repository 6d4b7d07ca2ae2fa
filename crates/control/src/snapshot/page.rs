//! One port in full, and the table of ports with the columns that somebody asks for.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use super::{FdbEntry, PairSnapshot, PortSnapshot, Rates, Snapshot, WINDOWS};
use crate::drops::DropReason;
use crate::rules::settings;
use crate::text::{Table, short_count, short_rate};

/// The window of columns that are rates, in seconds, unless another is asked for.
const WINDOW: u64 = 10;

/// Most addresses behind a port that its page names.
const FEW: usize = 4;

/// One row of the table: a port, or one of its queue pairs.
struct Row<'s> {
    port: &'s PortSnapshot,
    pair: Option<&'s PairSnapshot>,
    window: u64,
}

impl Row<'_> {
    /// A counter, of the pair if the row is one and counts it.
    fn counter(&self, name: &str) -> String {
        let counters = self.pair.map_or(&self.port.counters, |pair| &pair.counters);
        counters.get(name).map_or_else(|| "-".to_owned(), |count| short_count(*count))
    }

    fn rates(&self) -> Option<&Rates> {
        let rates = self.pair.map_or(&self.port.rates, |pair| &pair.rates);
        rates.iter().find(|rates| rates.window == self.window)
    }

    fn rate(&self, of: impl Fn(&Rates) -> f64) -> String {
        self.rates().map_or_else(|| "-".to_owned(), |rates| short_rate(of(rates)))
    }

    /// Returns the text for a whole port, and a dash for a queue pair.
    fn of_port(&self, text: impl FnOnce(&PortSnapshot) -> String) -> String {
        if self.pair.is_none() { text(self.port) } else { "-".to_owned() }
    }

    fn percent(&self, counter: &str) -> String {
        self.of_port(|_| {
            let percent = |rates: &Rates| format!("{:.1} %", rates.percent_of_time(counter));
            self.rates().map_or_else(|| "-".to_owned(), percent)
        })
    }

    /// Entries available in the queues of one role.
    fn available(&self, role: super::QueueRole) -> String {
        let fill = self.port.ring_fill(role, self.pair.map(|pair| pair.pair));
        fill.map_or_else(|| "-".to_owned(), |(available, size)| format!("{available}/{size}"))
    }
}

/// A column of the table of ports.
#[derive(Clone, Copy)]
pub struct Column {
    /// Its name on the command line.
    pub name: &'static str,
    /// The column's meaning, for people.
    pub meaning: &'static str,
    /// Its heading, with the alignment of [`Table::new`].
    heading: &'static str,
    cell: fn(&Row<'_>) -> String,
}

impl fmt::Debug for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Column({})", self.name)
    }
}

/// Makes [`COLUMNS`] from one table: name, heading, meaning, cell.
macro_rules! columns {
    ($($name:literal, $heading:literal, $meaning:literal, $cell:expr;)+) => {
        /// Every column that can be asked for.
        pub const COLUMNS: &[Column] =
            &[$(Column { name: $name, heading: $heading, meaning: $meaning, cell: $cell }),+];
    };
}

columns! {
    "port", "<PORT", "name of the port", |row| row.port.name.clone();
    "queue", ">QUEUE", "queue pair: with this column there is a row for each", |row| row.pair.map_or_else(|| "-".to_owned(), |pair| pair.pair.to_string());
    "worker", ">WORKER", "the worker that serves the pair, or each of the port's", |row| workers(row);
    "kind", "<KIND", "kind of the port", |row| row.port.negotiated.kind().to_owned();
    "state", "<STATE", "whether it carries packets", |row| row.port.condition().to_owned();
    "mtu", ">MTU", "largest packet", |row| row.port.mtu.to_string();
    "mac", "<MAC", "address that the port advertises", |row| row.port.mac.map_or_else(|| "-".to_owned(), |mac| mac.to_string());
    "peer", "<PEER", "where it leads", |row| row.port.peer.clone();
    "rules", "<RULES", "rules of the port", |row| settings(&row.port.rules).collect::<Vec<_>>().join(" ");
    "rx-packets", ">RX PACKETS", "frames received from the port", |row| row.counter("rx_packets");
    "rx-bytes", ">RX BYTES", "bytes of them", |row| row.counter("rx_bytes");
    "tx-packets", ">TX PACKETS", "frames sent to the port", |row| row.counter("tx_packets");
    "tx-bytes", ">TX BYTES", "bytes of them", |row| row.counter("tx_bytes");
    "drops", ">DROPS", "drops for whatever reason", |row| row.of_port(|port| short_count(port.drops.values().sum()));
    "rx-pps", ">RX PACKETS/S", "rate of frames received", |row| row.rate(|rates| rates.counter("rx_packets"));
    "rx-bps", ">RX BIT/S", "rate of bits received", |row| row.rate(|rates| rates.bits("rx_bytes"));
    "tx-pps", ">TX PACKETS/S", "rate of frames sent", |row| row.rate(|rates| rates.counter("tx_packets"));
    "tx-bps", ">TX BIT/S", "rate of bits sent", |row| row.rate(|rates| rates.bits("tx_bytes"));
    "drop-rate", ">DROPS/S", "rate of drops", |row| row.of_port(|_| row.rate(Rates::dropped));
    "batch", ">BATCH", "frames received in a burst", |row| row.of_port(|_| batch(row.rates(), ["rx_packets", "rx_bursts"]));
    "kicks", ">KICKS/S", "rate of notifications from the guest", |row| row.rate(|rates| rates.counter("kicks"));
    "calls", ">CALLS/S", "rate of notifications to the guest", |row| row.rate(|rates| rates.counter("calls"));
    "suppressed", ">SUPPRESSED/S", "rate of bursts that the guest wanted no notification for", |row| row.rate(|rates| rates.counter("calls_suppressed"));
    "segmented", ">SEGMENTED BIT/S", "rate of bits that were cut into segments here", |row| row.of_port(|_| row.rate(|rates| rates.bits("tx_segmented_bytes")));
    "checksummed", ">CHECKSUMMED BIT/S", "rate of bits whose checksums were computed here", |row| row.of_port(|_| row.rate(|rates| rates.bits("tx_checksummed_bytes")));
    "paused", ">PAUSED", "share of the time that the port waits for its rate_in", |row| row.percent("rx_paused_microseconds");
    "starved", ">STARVED", "share of the time that the port is known to have had no buffers", |row| row.percent("tx_starved_microseconds");
    "posted", ">POSTED", "buffers that the guest has posted, of its ring's size", |row| row.available(super::QueueRole::Receiveq);
    "waiting", ">WAITING", "what the guest has sent and the switch has not taken, of its ring's size", |row| row.available(super::QueueRole::Transmitq);
}

fn workers(row: &Row<'_>) -> String {
    let mut workers: Vec<u16> = match row.pair {
        Some(pair) => vec![pair.worker],
        None => row.port.pairs.iter().map(|pair| pair.worker).collect(),
    };
    workers.sort_unstable();
    workers.dedup();
    if workers.is_empty() { "-".to_owned() } else { list(workers) }
}

fn list(numbers: impl IntoIterator<Item = u16>) -> String {
    numbers.into_iter().map(|number| number.to_string()).collect::<Vec<_>>().join(",")
}

/// Frames in a burst.
fn batch(rates: Option<&Rates>, [packets, bursts]: [&str; 2]) -> String {
    let mean = rates.filter(|rates| rates.counter(bursts) > 0.0);
    mean.map_or_else(
        || "-".to_owned(),
        |rates| format!("{:.1}", rates.counter(packets) / rates.counter(bursts)),
    )
}

/// A column that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no column {name:?}; the columns are: {}", all_names())]
pub struct ColumnError {
    name: String,
}

fn all_names() -> String {
    COLUMNS.iter().map(|column| column.name).collect::<Vec<_>>().join(", ")
}

impl Column {
    /// Finds the column of this name, in which underscores are taken for hyphens: counters have them in the same answer.
    ///
    /// # Errors
    /// There is none; the message lists the columns.
    pub fn of(name: &str) -> Result<Column, ColumnError> {
        // JSON calls it so.
        let hyphened = if name == "name" { "port".to_owned() } else { name.replace('_', "-") };
        let found = COLUMNS.iter().find(|column| column.name == hyphened);
        found.copied().ok_or_else(|| ColumnError { name: name.to_owned() })
    }
}

impl Snapshot {
    /// Leaves only one port, and the addresses behind it.
    ///
    /// # Errors
    /// There is no such port; the message lists the ports.
    pub fn of_port(mut self, name: &str) -> Result<Snapshot, String> {
        if !self.ports.iter().any(|port| port.name == name) {
            let names: Vec<_> = self.ports.iter().map(|port| port.name.as_str()).collect();
            return Err(format!("there is no port {name:?}; the ports are: {}", names.join(", ")));
        }
        self.ports.retain(|port| port.name == name);
        self.fdb.entries.retain(|entry| entry.port == name);
        self.fdb.behind.retain(|port, _| port == name);
        self.fdb.restless.retain(|address| address.ports.iter().any(|port| port == name));
        self.fdb.lost.retain(|address| address.from == name || address.to == name);
        self.captures.retain(|capture| capture.ports.iter().any(|port| port == name));
        self.mirrors.retain(|mirror| mirror.from == name || mirror.to == name);
        self.wires.retain(|wire| wire.ports.iter().any(|port| port == name));
        Ok(self)
    }

    /// The ports as a table with these columns; rates are over this window.
    pub fn columns_to_text(&self, columns: &[Column], window: Option<u64>) -> String {
        let mut table = Table::new(&columns.iter().map(|column| column.heading).collect::<Vec<_>>());
        let window = window.unwrap_or(WINDOW);
        let by_pair = columns.iter().any(|column| column.name == "queue");
        for port in &self.ports {
            let mut row = |pair| {
                let row = Row { port, pair, window };
                table.row(columns.iter().map(|column| (column.cell)(&row)).collect::<Vec<_>>());
            };
            if by_pair {
                port.pairs.iter().for_each(|pair| row(Some(pair)));
            } else {
                row(None);
            }
        }
        table.to_string()
    }

    /// Each port in full: its state, every counter that is not zero with its rates, each drop reason with what to do, its queues, and the load of its
    /// workers.
    pub fn page_to_text(&self) -> String {
        self.ports.iter().map(|port| self.page(port)).collect::<Vec<_>>().join("\n")
    }

    fn page(&self, port: &PortSnapshot) -> String {
        let mut text = format!("{}, {}, MTU {}\n", port.negotiated.kind(), port.condition(), port.mtu);
        // The first line of the details has the name; counters and drops have tables of their own below.
        let brief = PortSnapshot { counters: BTreeMap::new(), drops: BTreeMap::new(), ..port.clone() };
        text.insert_str(0, &brief.details());
        let tables = [self.workers_of(port), queues(port), counters(port), shares(port), drops(port)];
        for table in tables.into_iter().filter(|table| !table.is_empty()) {
            text.push('\n');
            text.push_str(&table);
        }
        if self.fdb.addresses() > 0 {
            let behind: Vec<_> = self.fdb.entries.iter().filter(|entry| entry.port == port.name).collect();
            let count = self.fdb.behind.get(&port.name).map_or(behind.len() as u64, |count| *count);
            let noun = if count == 1 { "address" } else { "addresses" };
            let which = if count <= behind.len().min(FEW) as u64 {
                let name = |entry: &&FdbEntry| match entry.vlan {
                    0 => entry.mac.to_string(),
                    vlan => format!("{} (VLAN {vlan})", entry.mac),
                };
                behind.iter().map(name).collect::<Vec<_>>().join(", ")
            } else {
                "`ringferry ctl fdb`".to_owned()
            };
            let colon = if which.is_empty() { "" } else { ": " };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "\n{count} MAC {noun} behind it{colon}{which}");
        }
        text += &self.copies_to_text();
        text += &self.restless_to_text();
        text
    }

    /// The workers that serve a port, and which part of their work is for it.
    fn workers_of(&self, port: &PortSnapshot) -> String {
        let mut table = Table::new(&[">WORKER", "<PAIRS", ">BUSY 1 S", ">10 S", ">60 S", ">FOR THIS PORT"]);
        for (number, worker) in (0u16..).zip(&self.workers) {
            let pairs: Vec<u16> =
                port.pairs.iter().filter(|pair| pair.worker == number).map(|pair| pair.pair).collect();
            let share = worker.load_over(WINDOW).and_then(|load| load.ports.get(&port.name));
            if pairs.is_empty() && share.is_none() {
                continue;
            }
            let mut cells = vec![number.to_string(), list(pairs)];
            cells.extend(WINDOWS.map(|window| {
                let percent = |load: &super::WorkerLoad| format!("{:.1} %", load.busy_percent);
                worker.load_over(window).map_or_else(|| "-".to_owned(), percent)
            }));
            cells.push(share.map_or_else(|| "0 %".to_owned(), |share| format!("{share:.0} %")));
            table.row(cells);
        }
        if table.is_empty() { String::new() } else { table.to_string() }
    }
}

fn queues(port: &PortSnapshot) -> String {
    let mut table = Table::new(&[">QUEUE", "<ROLE", ">SIZE", ">AVAILABLE", ">FULL", ">WORKER", "<STATE"]);
    for queue in &port.queues {
        let number = ringferry_virtio_net::queue_index::pair(queue.index);
        let worker = port.pairs.iter().find(|pair| pair.pair == number).map(|pair| pair.worker);
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let full = |available: u16| {
            let percent = u32::from(available) * 100;
            percent.checked_div(queue.size.into()).map(|percent| format!("{percent} %"))
        };
        table.row([
            queue.index.to_string(),
            queue.role.name().to_owned(),
            queue.size.to_string(),
            or_none(queue.available.map(|available| available.to_string())),
            or_none(queue.available.and_then(full)),
            or_none(worker.map(|worker| worker.to_string())),
            queue.state(),
        ]);
    }
    if table.is_empty() { String::new() } else { table.to_string() }
}

fn counters(port: &PortSnapshot) -> String {
    let mut table = Table::new(&["<COUNTER", ">TOTAL", ">PER SECOND 1 S", ">10 S", ">60 S"]);
    for (name, count) in port.counters.iter().filter(|(_, count)| **count > 0) {
        let mut cells = vec![name.clone(), short_count(*count)];
        cells.extend(rates(port, |rates| rates.counter(name)));
        table.row(cells);
    }
    if table.is_empty() { String::new() } else { table.to_string() }
}

fn rates(port: &PortSnapshot, of: impl Fn(&Rates) -> f64) -> [String; WINDOWS.len()] {
    let cell = |window| port.rates_over(window).map_or_else(|| "-".to_owned(), |rates| short_rate(of(rates)));
    WINDOWS.map(cell)
}

/// Returns a table of what follows from the rates: sizes of bursts, and shares of the time.
fn shares(port: &PortSnapshot) -> String {
    if port.rates.iter().all(|rates| rates.counters.is_empty()) {
        return String::new();
    }
    let mut table = Table::new(&["<OVER", ">1 S", ">10 S", ">60 S"]);
    let mut row = |what: &str, cell: &dyn Fn(&Rates) -> String| {
        let cell = |window| port.rates_over(window).map_or_else(|| "-".to_owned(), cell);
        table.row([&[what.to_owned()][..], &WINDOWS.map(cell)].concat());
    };
    let percent = |name: &'static str| move |rates: &Rates| format!("{:.1} %", rates.percent_of_time(name));
    row("packets received in a burst", &|rates| batch(Some(rates), ["rx_packets", "rx_bursts"]));
    row("packets sent in a burst", &|rates| batch(Some(rates), ["tx_packets", "tx_bursts"]));
    row("time paused by rate_in", &percent("rx_paused_microseconds"));
    row("time held up by a worker", &percent("rx_held_microseconds"));
    row("time without receive buffers", &percent("tx_starved_microseconds"));
    row("bursts for which buffers ran out", &|rates| {
        let bursts = rates.counter("tx_bursts");
        if bursts > 0.0 {
            format!("{:.1} %", 100.0 * rates.counter("tx_starved") / bursts)
        } else {
            "-".to_owned()
        }
    });
    table.to_string()
}

fn drops(port: &PortSnapshot) -> String {
    let mut text = String::new();
    for (name, count) in port.drops.iter().filter(|(_, count)| **count > 0) {
        let [one, ten, sixty] = rates(port, |rates| rates.drops.get(name).copied().unwrap_or(0.0));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{name}: {} dropped, per second {one} in the last 1 s, {ten} in 10 s, {sixty} in 60 s",
            short_count(*count)
        );
        match DropReason::from_name(name) {
            Some(reason) => {
                let _ = writeln!(text, "  {}\n  What to do: {}", reason.meaning(), reason.remedy());
            }
            None => text.push_str("  A reason that this version of ctl does not know.\n"),
        }
    }
    text
}
