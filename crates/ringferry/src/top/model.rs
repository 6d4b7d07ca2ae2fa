//! The state of `top`: the last snapshot, which view of it, in what order, and where the reader is in it.
//!
//! It knows neither terminal nor clock nor socket: snapshots and keys come in ([`Model::update`], [`Model::press`]), and a view is drawn from it (view.rs).

use std::cmp::Ordering;

use ringferry_control::snapshot::{
    PairSnapshot, PortSnapshot, PortState, QueueRole, Rates, Snapshot, WINDOWS,
};
use ringferry_control::why::Diagnosis;

use super::history::History;
use super::keys::Key;

/// A table that the screen is filled with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum View {
    /// A row for each port: rates, drops, rings.
    #[default]
    Ports,
    /// A row for each queue pair.
    Queues,
    /// The workers, each with the ports it works for.
    Workers,
    /// Drops by port and reason.
    Drops,
    /// The forwarding database.
    Fdb,
}

/// What ports and queue pairs are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Sort {
    /// Bits in both directions, most first.
    #[default]
    Traffic,
    /// Bits that the switch receives from the port, most first.
    Rx,
    /// Bits that it sends to the port, most first.
    Tx,
    /// Packets in both directions, most first.
    Packets,
    /// Drops, most first.
    Drops,
    /// Receive buffers that the guest has posted, fewest first.
    Posted,
    /// Packets that wait in the guest's rings, most first.
    Waiting,
    /// State, ports that are not up first.
    State,
    /// Name.
    Name,
    /// The order of the configuration.
    Config,
}

impl Sort {
    const ALL: [Sort; 10] = [
        Sort::Traffic,
        Sort::Rx,
        Sort::Tx,
        Sort::Packets,
        Sort::Drops,
        Sort::Posted,
        Sort::Waiting,
        Sort::State,
        Sort::Name,
        Sort::Config,
    ];

    /// The name that it has on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Sort::Traffic => "traffic",
            Sort::Rx => "rx",
            Sort::Tx => "tx",
            Sort::Packets => "packets",
            Sort::Drops => "drops",
            Sort::Posted => "posted",
            Sort::Waiting => "waiting",
            Sort::State => "state",
            Sort::Name => "name",
            Sort::Config => "config",
        }
    }

    fn step(self, by: usize) -> Sort {
        let at = Self::ALL.iter().position(|sort| *sort == self).unwrap_or_default();
        Self::ALL[(at + by) % Self::ALL.len()]
    }
}

/// The way in which a snapshot is looked at: the command line says it, and keys change it.
#[derive(Clone, Debug)]
pub struct Settings {
    pub view: View,
    pub sort: Sort,
    pub reversed: bool,
    /// Only rows of ports whose name or state has this in it, in whatever case; of the forwarding database also addresses. Empty for all.
    pub filter: String,
    /// Seconds over which rates are.
    pub window: u64,
    /// The port whose page is open.
    pub page: Option<String>,
}

/// A row of the view: indexes into the snapshot.
#[derive(Clone, Debug, PartialEq)]
pub enum Row {
    Port(usize),
    Pair {
        port: usize,
        pair: usize,
    },
    Worker(usize),
    /// What of a worker's work is for a port, in percent.
    Share {
        worker: usize,
        port: String,
        percent: f64,
    },
    Drop {
        port: usize,
        reason: String,
    },
    Address(usize),
}

/// The action that follows a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    /// Ask the switch now: something is shown that was not asked for yet.
    Ask,
    /// Write the whole screen anew.
    Redraw,
    Suspend,
    Quit,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Model {
    pub settings: Settings,
    pub help: bool,
    /// Snapshots that come are not looked at.
    pub paused: bool,
    /// The filter before somebody began to type another.
    typing: Option<String>,
    /// The row that keys apply to, and the first row that is seen.
    cursor: usize,
    top: usize,
    /// How many rows of the view there are, and are seen, as far as it was drawn.
    seen: (usize, usize),
    /// The port at the cursor, which it stays with when the order changes.
    selected: Option<String>,
    snapshot: Snapshot,
    /// The reason for which there is no newer snapshot.
    trouble: Option<String>,
    /// Why the port whose page is open is slow, or why that is not known.
    why: Option<Result<Diagnosis, String>>,
    pub history: History,
    rows: Vec<Row>,
}

impl Model {
    pub fn new(settings: Settings) -> Model {
        Model {
            settings,
            help: false,
            paused: false,
            typing: None,
            cursor: 0,
            top: 0,
            seen: (0, 1),
            selected: None,
            snapshot: Snapshot::default(),
            trouble: None,
            why: None,
            history: History::default(),
            rows: Vec::new(),
        }
    }

    /// Takes a newer snapshot, and what was found out about the port whose page is open.
    pub fn update(&mut self, snapshot: Snapshot, why: Option<Result<Diagnosis, String>>) {
        self.trouble = None;
        self.history.add(&snapshot);
        if self.paused {
            return;
        }
        self.why = why;
        self.snapshot = snapshot;
        self.arrange();
    }

    /// The switch could not be asked. What was known of it stays.
    pub fn fail(&mut self, why: String) {
        self.trouble = Some(why);
    }

    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// The port whose page is open.
    pub fn page(&self) -> Option<&str> {
        self.settings.page.as_deref()
    }

    /// What was found out about the port whose page is open; not that about another one, which an answer may still be about.
    pub fn why(&self) -> Option<&Result<Diagnosis, String>> {
        let is_of_page = |why: &&Result<Diagnosis, String>| {
            why.as_ref().map_or(true, |why| Some(why.port.as_str()) == self.page())
        };
        self.why.as_ref().filter(is_of_page)
    }

    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The first row that is seen, and the one that keys apply to.
    pub fn place(&self) -> (usize, usize) {
        (self.top, self.cursor)
    }

    /// Whether somebody types a filter.
    pub fn is_typing(&self) -> bool {
        self.typing.is_some()
    }

    /// The snapshot with only the ports that the view has, in its order, and what belongs to them.
    pub fn shown(&self) -> Snapshot {
        let ports: Vec<PortSnapshot> =
            self.ports().into_iter().map(|index| self.snapshot.ports[index].clone()).collect();
        let mut shown = Snapshot { ports, ..self.snapshot.clone() };
        if shown.ports.len() < self.snapshot.ports.len() {
            let names: Vec<&str> = shown.ports.iter().map(|port| port.name.as_str()).collect();
            shown.fdb.entries.retain(|entry| names.contains(&entry.port.as_str()));
        }
        shown
    }

    /// Says how many lines of the view there are and how many of them can be seen. Returns the first one that is.
    pub fn fit(&mut self, lines: usize, height: usize) -> usize {
        self.seen = (lines, height.max(1));
        self.cursor = self.cursor.min(lines.saturating_sub(1));
        self.scroll();
        self.top
    }

    /// Moves what is seen so that the cursor is within it. A page has no cursor: its first line is where the reader is.
    fn scroll(&mut self) {
        let (lines, height) = self.seen;
        if self.is_text() {
            self.cursor = self.cursor.min(lines.saturating_sub(height));
            self.top = self.cursor;
            return;
        }
        self.top = self.top.min(self.cursor).max((self.cursor + 1).saturating_sub(height));
        self.top = self.top.min(lines.saturating_sub(height));
    }

    /// Whether the view is text to be scrolled, without a row that is selected.
    pub fn is_text(&self) -> bool {
        self.help || self.settings.page.is_some()
    }

    /// Makes the rows anew, after the snapshot or the settings have changed.
    fn arrange(&mut self) {
        self.rows = match self.settings.view {
            View::Ports => self.ports().into_iter().map(Row::Port).collect(),
            View::Queues => self.pairs(),
            View::Workers => self.workers(),
            View::Drops => self.drops(),
            View::Fdb => self.addresses(),
        };
        if self.is_text() {
            return;
        }
        self.seen.0 = self.rows.len();
        let selected = self.selected.as_deref().filter(|_| self.settings.view == View::Ports);
        let found = selected.and_then(|name| {
            self.rows
                .iter()
                .position(|row| matches!(row, Row::Port(at) if self.snapshot.ports[*at].name == name))
        });
        self.cursor = found.unwrap_or(self.cursor).min(self.rows.len().saturating_sub(1));
        self.select();
    }

    /// Remembers the port at the cursor.
    fn select(&mut self) {
        self.selected = self.rows.get(self.cursor).and_then(|row| self.port_of(row)).map(str::to_owned);
    }

    fn port_of<'a>(&'a self, row: &'a Row) -> Option<&'a str> {
        match row {
            Row::Port(port) | Row::Pair { port, .. } | Row::Drop { port, .. } => {
                Some(&self.snapshot.ports[*port].name)
            }
            Row::Share { port, .. } => Some(port),
            Row::Address(at) => Some(&self.snapshot.fdb.entries[*at].port),
            Row::Worker(_) => None,
        }
    }

    fn has(&self, text: &str) -> bool {
        text.to_lowercase().contains(&self.settings.filter.to_lowercase())
    }

    fn passes(&self, port: &PortSnapshot) -> bool {
        self.settings.filter.is_empty() || self.has(&port.name) || self.has(port.condition())
    }

    /// The ports that pass the filter, in order.
    fn ports(&self) -> Vec<usize> {
        let all = self.snapshot.ports.iter().enumerate();
        let mut ports: Vec<_> = all.filter(|(_, port)| self.passes(port)).map(|(index, _)| index).collect();
        self.sort(&mut ports, |index| (&self.snapshot.ports[*index], None));
        ports
    }

    fn pairs(&self) -> Vec<Row> {
        let ports = self.snapshot.ports.iter().enumerate().filter(|(_, port)| self.passes(port));
        let mut pairs: Vec<(usize, usize)> =
            ports.flat_map(|(at, port)| (0..port.pairs.len()).map(move |pair| (at, pair))).collect();
        self.sort(&mut pairs, |(port, pair)| {
            let port = &self.snapshot.ports[*port];
            (port, Some(&port.pairs[*pair]))
        });
        pairs.into_iter().map(|(port, pair)| Row::Pair { port, pair }).collect()
    }

    /// Sorts ports, or queue pairs of them.
    fn sort<'a, T>(&self, rows: &mut [T], of: impl Fn(&T) -> (&'a PortSnapshot, Option<&'a PairSnapshot>)) {
        let rate = |row: &T, counters: &[&str]| {
            let (port, pair) = of(row);
            let rates = rates(port, pair, self.settings.window);
            rates.map_or(0.0, |rates| counters.iter().map(|counter| rates.counter(counter)).sum())
        };
        let most =
            |one: &T, other: &T, counters: &[&str]| rate(other, counters).total_cmp(&rate(one, counters));
        let dropped = |row: &T| of(row).0.rates_over(self.settings.window).map_or(0.0, Rates::dropped);
        let fill = |row: &T, role| {
            let (port, pair) = of(row);
            port.ring_fill(role, pair.map(|pair| pair.pair)).map(share)
        };
        rows.sort_by(|one, other| {
            let order = match self.settings.sort {
                Sort::Traffic => most(one, other, &["rx_bytes", "tx_bytes"]),
                Sort::Rx => most(one, other, &["rx_bytes"]),
                Sort::Tx => most(one, other, &["tx_bytes"]),
                Sort::Packets => most(one, other, &["rx_packets", "tx_packets"]),
                Sort::Drops => dropped(other).total_cmp(&dropped(one)),
                // One that is not known comes last.
                Sort::Posted => {
                    let posted = |row| fill(row, QueueRole::Receiveq).unwrap_or(f64::INFINITY);
                    posted(one).total_cmp(&posted(other))
                }
                Sort::Waiting => {
                    let waiting = |row| fill(row, QueueRole::Transmitq).unwrap_or(-1.0);
                    waiting(other).total_cmp(&waiting(one))
                }
                Sort::State => {
                    let is_up = |row| of(row).0.condition() == PortState::Up.name();
                    is_up(one)
                        .cmp(&is_up(other))
                        .then_with(|| of(one).0.condition().cmp(of(other).0.condition()))
                }
                Sort::Name => of(one).0.name.cmp(&of(other).0.name),
                Sort::Config => Ordering::Equal,
            };
            if self.settings.reversed { order.reverse() } else { order }
        });
    }

    fn workers(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for (worker, snapshot) in self.snapshot.workers.iter().enumerate() {
            rows.push(Row::Worker(worker));
            let shares =
                snapshot.load_over(self.settings.window).map(|load| load.by_share()).unwrap_or_default();
            let shown =
                shares.into_iter().filter(|(port, _)| self.settings.filter.is_empty() || self.has(port));
            rows.extend(shown.map(|(port, percent)| Row::Share { worker, port: port.to_owned(), percent }));
        }
        rows
    }

    fn drops(&self) -> Vec<Row> {
        let mut drops: Vec<(f64, u64, usize, &String)> = Vec::new();
        for (index, port) in self.snapshot.ports.iter().enumerate() {
            let rates = port.rates_over(self.settings.window);
            let counted = port.drops.iter().filter(|(reason, count)| {
                let named = self.has(&port.name) || self.has(reason);
                **count > 0 && (self.settings.filter.is_empty() || named)
            });
            drops.extend(counted.map(|(reason, count)| {
                let rate = rates.and_then(|rates| rates.drops.get(reason)).copied().unwrap_or_default();
                (rate, *count, index, reason)
            }));
        }
        drops.sort_unstable_by(|one, other| other.0.total_cmp(&one.0).then(other.1.cmp(&one.1)));
        let rows = drops.into_iter().map(|(_, _, port, reason)| Row::Drop { port, reason: reason.clone() });
        rows.collect()
    }

    fn addresses(&self) -> Vec<Row> {
        let all = self.snapshot.fdb.entries.iter().enumerate();
        let passing = all.filter(|(_, entry)| {
            self.settings.filter.is_empty() || self.has(&entry.port) || self.has(&entry.mac.to_string())
        });
        passing.map(|(index, _)| Row::Address(index)).collect()
    }

    /// Carries out what a key is for.
    pub fn press(&mut self, key: Key) -> Action {
        if let Some(before) = self.typing.take() {
            return self.type_filter(before, key);
        }
        let (lines, height) = self.seen;
        let last = lines.saturating_sub(1);
        match key {
            Key::Ctrl('c') | Key::Char('q') => return Action::Quit,
            Key::Ctrl('z') => return Action::Suspend,
            Key::Ctrl('l') => return Action::Redraw,
            Key::Escape | Key::Left | Key::Backspace if self.is_text() => self.close(),
            Key::Char('?' | 'h') => {
                self.help = !self.help;
                (self.cursor, self.top) = (0, 0);
            }
            Key::Char(digit @ '1'..='5') => {
                let views = [View::Ports, View::Queues, View::Workers, View::Drops, View::Fdb];
                self.show(views[digit as usize - '1' as usize]);
            }
            Key::Up | Key::Char('k') => self.go(self.cursor.saturating_sub(1)),
            Key::Down | Key::Char('j') => self.go((self.cursor + 1).min(last)),
            Key::PageUp => self.go(self.cursor.saturating_sub(height)),
            Key::PageDown => self.go((self.cursor + height).min(last)),
            Key::Home => self.go(0),
            Key::End => self.go(last),
            Key::Enter | Key::Right if !self.is_text() => {
                let port = self.rows.get(self.cursor).and_then(|row| self.port_of(row)).map(str::to_owned);
                if port.is_some() {
                    self.settings.page = port;
                    (self.cursor, self.top) = (0, 0);
                    return Action::Ask;
                }
            }
            Key::Char('s') => self.sort_by(self.settings.sort.step(1)),
            Key::Char('S') => self.sort_by(self.settings.sort.step(Sort::ALL.len() - 1)),
            Key::Char('r') => {
                self.settings.reversed = !self.settings.reversed;
                self.arrange();
            }
            Key::Char('w') => {
                let at = WINDOWS.iter().position(|window| *window == self.settings.window);
                self.settings.window = WINDOWS[at.map_or(0, |at| at + 1) % WINDOWS.len()];
                self.arrange();
            }
            Key::Char('/') if !self.is_text() => self.typing = Some(self.settings.filter.clone()),
            Key::Char(' ') => {
                self.paused = !self.paused;
                return Action::Ask;
            }
            _ => {}
        }
        Action::Nothing
    }

    fn sort_by(&mut self, sort: Sort) {
        self.settings.sort = sort;
        self.settings.reversed = false;
        self.arrange();
    }

    fn type_filter(&mut self, before: String, key: Key) -> Action {
        match key {
            Key::Ctrl('c') => return Action::Quit,
            Key::Enter => return Action::Nothing,
            Key::Escape => {
                self.settings.filter = before;
                self.arrange();
                return Action::Nothing;
            }
            Key::Backspace => drop(self.settings.filter.pop()),
            Key::Ctrl('u') => self.settings.filter.clear(),
            Key::Char(c) => self.settings.filter.push(c),
            _ => {}
        }
        self.typing = Some(before);
        self.arrange();
        Action::Nothing
    }

    /// Back from the help or a port's page to the table.
    fn close(&mut self) {
        if self.help {
            self.help = false;
        } else {
            self.settings.page = None;
        }
        (self.cursor, self.top) = (0, 0);
        self.arrange();
    }

    fn show(&mut self, view: View) {
        self.help = false;
        self.settings.page = None;
        if self.settings.view != view {
            self.selected = None;
            (self.cursor, self.top) = (0, 0);
        }
        self.settings.view = view;
        self.arrange();
    }

    fn go(&mut self, row: usize) {
        self.cursor = row;
        self.scroll();
        if !self.is_text() {
            self.select();
        }
    }
}

/// The rates of a port, or of one of its pairs, over a window.
pub fn rates<'a>(port: &'a PortSnapshot, pair: Option<&'a PairSnapshot>, window: u64) -> Option<&'a Rates> {
    let all = pair.map_or(&port.rates, |pair| &pair.rates);
    all.iter().find(|rates| rates.window == window)
}

/// The part of a ring that is full, 0 to 1. A ring that was not set up is empty.
pub fn share((available, size): (u64, u64)) -> f64 {
    if size == 0 { 0.0 } else { (available as f64 / size as f64).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{model, port, switch};
    use super::*;

    fn names(model: &Model) -> Vec<&str> {
        model.rows().iter().filter_map(|row| model.port_of(row)).collect()
    }

    fn three() -> Model {
        let mut model = model();
        model.update(switch(vec![port("a", 1.0, 9.0), port("b", 7.0, 0.0), port("c", 3.0, 1.0)]), None);
        model.fit(3, 10);
        model
    }

    fn press(model: &mut Model, keys: &str) {
        for key in keys.chars() {
            let key = match key {
                '↓' => Key::Down,
                '↵' => Key::Enter,
                '⎋' => Key::Escape,
                '⌫' => Key::Backspace,
                key => Key::Char(key),
            };
            model.press(key);
        }
    }

    #[test]
    fn ports_are_sorted_and_the_cursor_stays_with_its_port() {
        let mut model = three();
        assert_eq!(names(&model), ["a", "b", "c"], "by traffic");
        press(&mut model, "↓");
        assert_eq!(model.place().1, 1);
        press(&mut model, "s");
        assert_eq!((model.settings.sort, names(&model)), (Sort::Rx, vec!["b", "c", "a"]));
        assert_eq!(model.place().1, 0, "it is still b's");
        press(&mut model, "r");
        assert_eq!((names(&model), model.place().1), (vec!["a", "c", "b"], 2));
        press(&mut model, "S");
        assert_eq!((model.settings.sort, names(&model)), (Sort::Traffic, vec!["a", "b", "c"]));
        model.update(switch(vec![port("c", 3.0, 1.0), port("b", 1.0, 1.0)]), None);
        assert_eq!((names(&model), model.place().1), (vec!["c", "b"], 1));
        model.update(switch(vec![port("c", 3.0, 1.0)]), None);
        assert_eq!((names(&model), model.place().1), (vec!["c"], 0), "b has gone");
        model.update(switch(vec![]), None);
        press(&mut model, "↓↵");
        assert_eq!((model.place(), model.page()), ((0, 0), None));
    }

    #[test]
    fn every_order_is_that_of_its_column() {
        let mut model = three();
        let ring =
            |name: &str, posted, waiting| super::super::tests::rings(port(name, 0.0, 0.0), posted, waiting);
        let mut down = ring("z", 10, 4);
        down.state = PortState::Down;
        down.rates[0].drops = [("vlan".to_owned(), 2.0)].into();
        down.rates[0].counters.insert("rx_packets".to_owned(), 5.0);
        model.update(switch(vec![ring("m", 200, 9), down, port("tap", 0.0, 0.0)]), None);
        for (sort, expected) in [
            (Sort::Packets, ["z", "m", "tap"]),
            (Sort::Drops, ["z", "m", "tap"]),
            (Sort::Posted, ["z", "m", "tap"]),
            (Sort::Waiting, ["m", "z", "tap"]),
            (Sort::State, ["z", "m", "tap"]),
            (Sort::Name, ["m", "tap", "z"]),
            (Sort::Config, ["m", "z", "tap"]),
        ] {
            model.sort_by(sort);
            assert_eq!(names(&model), expected, "{sort:?}");
        }
        assert!(Sort::ALL.iter().all(|sort| {
            clap::ValueEnum::to_possible_value(sort).is_some_and(|value| value.get_name() == sort.name())
        }));
    }

    #[test]
    fn a_filter_is_typed_and_taken_back() {
        let mut model = three();
        press(&mut model, "/Bq⌫");
        assert_eq!((names(&model), model.is_typing()), (vec!["b"], true));
        press(&mut model, "↵");
        assert!(!model.is_typing());
        assert_eq!(model.shown().ports.len(), 1);
        press(&mut model, "/xyz⎋");
        assert_eq!((names(&model), model.settings.filter.as_str()), (vec!["b"], "B"));
        press(&mut model, "/⌫↵");
        assert_eq!(names(&model).len(), 3);
        press(&mut model, "/UP↵");
        assert_eq!(names(&model).len(), 3, "a state is found, too");
        assert_eq!(model.press(Key::Char('q')), Action::Quit);
    }

    #[test]
    fn a_page_is_opened_scrolled_and_closed() {
        let mut model = three();
        press(&mut model, "↓");
        assert_eq!(model.press(Key::Enter), Action::Ask);
        assert_eq!(model.page(), Some("b"));
        let about = |port: &str| Some(Ok(Diagnosis { port: port.to_owned(), ..Diagnosis::default() }));
        model.update(switch(vec![port("b", 1.0, 1.0)]), about("a"));
        assert!(model.why().is_none(), "the answer is about another port");
        model.update(switch(vec![port("b", 1.0, 1.0)]), about("b"));
        assert!(model.why().is_some());
        assert_eq!(model.fit(30, 10), 0);
        press(&mut model, "↓↓");
        assert_eq!(model.fit(30, 10), 2);
        model.press(Key::End);
        assert_eq!(model.fit(30, 10), 20, "its last line is the last one seen");
        assert_eq!(model.fit(5, 10), 0);
        press(&mut model, "?");
        assert!(model.help);
        press(&mut model, "⎋");
        assert_eq!((model.help, model.page()), (false, Some("b")));
        press(&mut model, "⎋");
        assert_eq!((model.page(), names(&model)), (None, vec!["b"]));
    }

    #[test]
    fn the_cursor_is_always_seen() {
        let mut model = model();
        model.update(switch((0..500).map(|n| port(&format!("p{n:03}"), 0.0, 0.0)).collect()), None);
        assert_eq!(model.fit(500, 17), 0);
        model.press(Key::PageDown);
        assert_eq!(model.place(), (1, 17));
        model.press(Key::End);
        assert_eq!(model.place(), (483, 499));
        assert_eq!(model.fit(500, 0), 499, "there is always room for one");
        assert_eq!(model.fit(500, 1000), 0);
        model.press(Key::Home);
        model.press(Key::Up);
        assert_eq!(model.place(), (0, 0));
    }

    #[test]
    fn what_fails_leaves_what_is_known() {
        let mut model = three();
        model.fail("no answer".to_owned());
        assert_eq!((model.trouble(), names(&model).len()), (Some("no answer"), 3));
        press(&mut model, " ");
        model.update(switch(vec![]), None);
        assert_eq!((model.trouble(), names(&model).len()), (None, 3), "paused");
        press(&mut model, " ");
        model.update(switch(vec![]), None);
        assert!(names(&model).is_empty());
    }

    #[test]
    fn each_view_has_its_rows() {
        let mut model = three();
        let mut switch = super::super::tests::busy();
        switch.ports[1].drops = [("vlan".to_owned(), 3), ("isolated".to_owned(), 0)].into();
        model.update(switch, None);
        press(&mut model, "2");
        assert_eq!(model.rows()[0], Row::Pair { port: 0, pair: 0 });
        press(&mut model, "3");
        assert_eq!(model.rows()[0], Row::Worker(0));
        let share = Row::Share { worker: 0, port: "vm0".to_owned(), percent: 61.0 };
        assert_eq!(model.rows()[1], share);
        press(&mut model, "4");
        let drops: Vec<_> = model.rows().to_vec();
        let drop = |port, reason: &str| Row::Drop { port, reason: reason.to_owned() };
        assert_eq!(drops, [drop(0, "no-receive-buffers"), drop(1, "vlan")]);
        press(&mut model, "5/:02↵");
        assert_eq!(model.rows(), [Row::Address(1)]);
        assert_eq!(model.press(Key::Enter), Action::Ask);
        assert_eq!(model.page(), Some("vm1"));
    }
}
