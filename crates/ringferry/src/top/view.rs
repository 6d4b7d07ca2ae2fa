//! Draws a [`Model`]: as the screen of a terminal of any size ([`screen`]), or as text of any length ([`text`]), from the same lines.

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::Modifier;
use ratatui_core::text::Line;
use ringferry_control::snapshot::{PairSnapshot, PortSnapshot, PortState, QueueRole, Rates, WorkerLoad};
use ringferry_control::text::{bit_rate, duration, short_count, short_rate};
use ringferry_control::{DropReason, settings};

use super::draw::{self, Look, Tone, wrap};
use super::model::{Model, Row, View, rates, share};

/// Workers that are shown above every view.
const WORKERS: usize = 3;

/// Draws a screen. The model learns how much of it is seen.
pub fn screen(model: &mut Model, look: Look, area: Rect, buffer: &mut Buffer) {
    let (width, height) = (usize::from(area.width), usize::from(area.height));
    let painter = Painter { model: &*model, look, width };
    let (head, foot) = (painter.head(), painter.foot());
    let body = painter.body();
    // A screen that is too low has no foot; the last lines of the head go as well, so that something of the body is seen.
    let foot = (height > 4).then_some(foot);
    let fixed = usize::from(foot.is_some()) + body.heading.iter().len();
    let head = &head[..head.len().min(height.saturating_sub(fixed + 1))];
    let room = height.saturating_sub(head.len() + fixed);
    let top = model.fit(body.total, room);
    let painter = Painter { model: &*model, look, width };
    let lines = head.iter().cloned().chain(body.heading).chain(painter.lines(top, room));
    for (y, line) in (area.y..area.bottom()).zip(lines) {
        buffer.set_line(area.x, y, &line, area.width);
        // What is said of a whole line, as that it is selected, goes on to its end.
        buffer.set_style(Rect { y, height: 1, ..area }, line.style);
    }
    if let Some(foot) = foot {
        buffer.set_line(area.x, area.bottom() - 1, &foot, area.width);
    }
}

/// Draws everything that there is, as text without colours.
pub fn text(model: &Model, look: Look, width: usize) -> String {
    let painter = Painter { model, look, width };
    let body = painter.body();
    let lines = painter.head().into_iter().chain(body.heading).chain(painter.all_lines(body.total));
    lines.map(|line| draw::text(&line) + "\n").collect()
}

struct Painter<'m> {
    model: &'m Model,
    look: Look,
    width: usize,
}

/// What is below the head: a heading, if it is a table, and so many lines.
struct Body {
    heading: Option<Line<'static>>,
    total: usize,
}

/// A line in the making.
struct Cells {
    look: Look,
    line: Line<'static>,
}

impl Cells {
    fn add(&mut self, text: String, tone: Tone) -> &mut Cells {
        self.line.push_span(self.look.span(text, tone));
        self
    }

    fn left(&mut self, text: &str, width: usize, tone: Tone) -> &mut Cells {
        self.add(self.look.left(text, width) + " ", tone)
    }

    fn right(&mut self, text: &str, width: usize, tone: Tone) -> &mut Cells {
        self.add(self.look.right(text, width) + " ", tone)
    }

    fn bar(&mut self, part: Option<f64>, width: usize) -> &mut Cells {
        let bar = part.map_or_else(|| " ".repeat(width), |part| self.look.bar(part, width));
        self.add(bar + " ", Tone::Bar)
    }
}

/// Widths of the columns that take what room there is: of names, and of each bar.
struct Widths {
    name: usize,
    bar: usize,
}

impl Widths {
    /// What is left of a line beside columns of `fixed` characters, with `bars` bars. At 80 columns a name has about 13, and a bar 5.
    fn of(width: usize, fixed: usize, bars: usize) -> Widths {
        let room = width.saturating_sub(fixed);
        let name = room.saturating_sub(5 * bars).clamp(8, 24);
        let bar = room.saturating_sub(name).checked_div(bars).unwrap_or_default().clamp(5, 24);
        Widths { name, bar }
    }
}

impl Painter<'_> {
    fn cells(&self) -> Cells {
        Cells { look: self.look, line: Line::default() }
    }

    fn plain(&self, text: &str) -> Line<'static> {
        Line::from(self.look.span(self.look.cut(text, self.width), Tone::Plain))
    }

    fn heading(&self, text: &str) -> Line<'static> {
        Line::from(self.look.left(text, self.width)).style(self.look.style(Tone::Heading))
    }

    /// The switch, what is wrong with asking it, its workers, and what it drops.
    fn head(&self) -> Vec<Line<'static>> {
        let (snapshot, settings) = (self.model.snapshot(), &self.model.settings);
        let mut lines = Vec::new();
        let up = snapshot.ports.iter().filter(|port| port.state == PortState::Up).count();
        let mut title = format!(
            "{}ringferry {}, up {}: {} ports, {up} up; over {} s, by {}{}",
            if self.model.paused { "PAUSED " } else { "" },
            snapshot.pid,
            duration(snapshot.uptime_seconds),
            snapshot.ports.len(),
            settings.window,
            settings.sort.name(),
            if settings.reversed { " reversed" } else { "" },
        );
        if !settings.filter.is_empty() {
            title += &format!("; only {:?}", settings.filter);
        }
        lines.push(Line::from(self.look.span(self.look.cut(&title, self.width), Tone::Title)));
        if let Some(trouble) = self.model.trouble() {
            let said = format!("! {trouble}. It is asked again; what is below is old.");
            let wrapped = wrap(&said, self.width, 2);
            lines.extend(wrapped.into_iter().map(|line| Line::from(self.look.span(line, Tone::Bad))));
        }
        if self.model.is_text() {
            return lines;
        }
        if settings.view != View::Workers {
            lines.extend(self.workers());
        }
        if settings.view != View::Drops {
            lines.push(self.dropped());
        }
        lines
    }

    /// The busiest workers.
    fn workers(&self) -> Vec<Line<'static>> {
        let workers = self.model.snapshot().workers.iter().enumerate();
        let mut loads: Vec<_> = workers
            .filter_map(|(n, worker)| Some((n, worker.load_over(self.model.settings.window)?)))
            .collect();
        if loads.len() > WORKERS {
            loads.sort_by(|(_, one), (_, other)| other.busy_percent.total_cmp(&one.busy_percent));
        }
        let more = loads.len().saturating_sub(WORKERS);
        let mut lines: Vec<_> =
            loads.into_iter().take(WORKERS).map(|(number, load)| self.worker(number, load)).collect();
        if more > 0 {
            lines.push(self.plain(&format!("{more} more workers are less busy")));
        }
        lines
    }

    fn worker(&self, number: usize, load: &WorkerLoad) -> Line<'static> {
        let mut cells = self.cells();
        cells.left(&format!("worker {number}"), 9, Tone::Plain);
        cells.bar(Some(load.busy_percent / 100.0), 16);
        cells.add(
            format!("{:>3.0} % busy {:>3.0} % polling  ", load.busy_percent, load.polling_percent),
            Tone::Plain,
        );
        // What it waits for a processor is neither.
        if load.run_delay_percent >= 1.0 {
            cells.add(format!("{:.0} % delayed  ", load.run_delay_percent), Tone::Bad);
        }
        let ports = load.by_share().into_iter().map(|(port, share)| format!("{port} {share:.0} %"));
        let room = self.width.saturating_sub(cells.line.width());
        let ports = self.look.cut(&ports.collect::<Vec<_>>().join(", "), room);
        cells.add(ports, Tone::Plain);
        cells.line
    }

    /// Drops of all ports, the most frequent first.
    fn dropped(&self) -> Line<'static> {
        let mut drops: Vec<(f64, &str, &str)> = Vec::new();
        for port in &self.model.snapshot().ports {
            let rates = port.rates_over(self.model.settings.window);
            let all = rates.into_iter().flat_map(|rates| &rates.drops).filter(|(_, rate)| **rate > 0.0);
            drops.extend(all.map(|(reason, rate)| (*rate, port.name.as_str(), reason.as_str())));
        }
        drops.sort_by(|one, other| other.0.total_cmp(&one.0));
        if drops.is_empty() {
            return self.plain("drops     none");
        }
        let sum: f64 = drops.iter().map(|(rate, ..)| rate).sum();
        let each =
            drops.iter().take(8).map(|(rate, port, reason)| format!("{port} {reason} {}", short_rate(*rate)));
        let text = format!("drops     {}/s: {}", short_rate(sum), each.collect::<Vec<_>>().join(", "));
        Line::from(self.look.span(self.look.cut(&text, self.width), Tone::Bad))
    }

    fn body(&self) -> Body {
        if self.model.help {
            return Body { heading: None, total: HELP.lines().count() };
        }
        if self.model.page().is_some() {
            return Body { heading: None, total: self.page().len() };
        }
        let heading = match self.model.settings.view {
            View::Ports => self.ports_heading(),
            View::Queues => self.queues_heading(),
            View::Workers => self.workers_heading(),
            View::Drops => self.drops_heading(),
            View::Fdb => {
                let fdb = &self.model.snapshot().fdb;
                let left_out = fdb.addresses().saturating_sub(fdb.entries.len() as u64);
                let note = if left_out > 0 { format!("   and {left_out} more") } else { String::new() };
                format!(" {:17} VLAN {}    AGE{note}", "ADDRESS", self.look.left("PORT", self.fdb_name()))
            }
        };
        Body { heading: Some(self.heading(&heading)), total: self.model.rows().len() }
    }

    /// The lines of the body from `top` on.
    fn lines(&self, top: usize, room: usize) -> Vec<Line<'static>> {
        if self.model.help || self.model.page().is_some() {
            return self.all_lines(usize::MAX).into_iter().skip(top).take(room).collect();
        }
        let rows = self.model.rows().iter().enumerate().skip(top).take(room);
        rows.map(|(number, row)| {
            if number != self.model.place().1 {
                return self.row(row, ' ');
            }
            // The mark is for whoever has no attributes.
            let line = self.row(row, '>');
            line.style(ratatui_core::style::Style::new().add_modifier(Modifier::BOLD))
        })
        .collect()
    }

    fn all_lines(&self, most: usize) -> Vec<Line<'static>> {
        if self.model.help {
            return HELP.lines().map(|line| self.plain(line)).collect();
        }
        if self.model.page().is_some() {
            return self.page();
        }
        self.model.rows().iter().take(most).map(|row| self.row(row, ' ')).collect()
    }

    fn row(&self, row: &Row, mark: char) -> Line<'static> {
        let mut cells = self.cells();
        cells.add(mark.to_string(), Tone::Plain);
        let snapshot = self.model.snapshot();
        match row {
            Row::Port(port) => self.port(&snapshot.ports[*port], &mut cells),
            Row::Pair { port, pair } => {
                let port = &snapshot.ports[*port];
                self.pair(port, &port.pairs[*pair], &mut cells);
            }
            Row::Worker(worker) => self.worker_row(*worker, &mut cells),
            Row::Share { port, percent, .. } => {
                let name = self.width.saturating_sub(70).clamp(8, 24);
                cells.add(" ".repeat(55), Tone::Plain);
                cells.left(port, name, Tone::Plain).add(format!("{percent:>3.0} % "), Tone::Plain);
                cells.bar(Some(percent / 100.0), 6);
            }
            Row::Drop { port, reason } => self.drop_row(&snapshot.ports[*port], reason, &mut cells),
            Row::Address(at) => {
                let entry = &snapshot.fdb.entries[*at];
                let age = if entry.fixed { "static".to_owned() } else { format!("{} s", entry.age_seconds) };
                cells.left(&entry.mac.to_string(), 17, Tone::Plain);
                cells.right(&entry.vlan.to_string(), 4, Tone::Plain);
                cells.left(&entry.port, self.fdb_name(), Tone::Plain);
                cells.right(&age, 6, Tone::Plain);
            }
        }
        cells.line
    }

    fn ports_widths(&self) -> Widths {
        Widths::of(self.width, 57, 2)
    }

    fn ports_heading(&self) -> String {
        let Widths { name, bar } = self.ports_widths();
        let look = self.look;
        format!(
            " {} STATE      {} {} RX p/s TX p/s DROP/s POST WAIT",
            look.left("PORT", name),
            look.left("RX bit/s", bar + 6),
            look.left("TX bit/s", bar + 6)
        )
    }

    /// The largest rate of a bar: that of the port with the most bits in one direction.
    fn most_bits(&self) -> f64 {
        let ports = self.model.snapshot().ports.iter();
        let rates = ports.filter_map(|port| port.rates_over(self.model.settings.window));
        rates.flat_map(|rates| [rates.bits("rx_bytes"), rates.bits("tx_bytes")]).fold(0.0, f64::max)
    }

    fn port(&self, port: &PortSnapshot, cells: &mut Cells) {
        let Widths { name, bar } = self.ports_widths();
        let rates = port.rates_over(self.model.settings.window);
        let state = port.condition();
        let tone = if state == PortState::Up.name() { Tone::Good } else { Tone::Bad };
        cells.left(&port.name, name, Tone::Plain).left(state, 10, tone);
        let most = self.most_bits();
        for counter in ["rx_bytes", "tx_bytes"] {
            let bits = rates.map(|rates| rates.bits(counter));
            cells.right(&rate(bits), 5, Tone::Plain).bar(bits.map(|bits| bits / most), bar);
        }
        for counter in ["rx_packets", "tx_packets"] {
            cells.right(&rate(rates.map(|rates| rates.counter(counter))), 6, Tone::Plain);
        }
        let dropped = rates.map(Rates::dropped);
        let tone = if dropped.is_some_and(|rate| rate > 0.0) { Tone::Bad } else { Tone::Plain };
        cells.right(&rate(dropped), 6, tone);
        for role in [QueueRole::Receiveq, QueueRole::Transmitq] {
            let full = port.ring_fill(role, None).map(share);
            cells.right(&full.map_or_else(|| "-".to_owned(), percent), 4, Tone::Plain);
        }
    }

    /// Widths of the table of queue pairs, and whether it has notifications.
    fn queues_widths(&self) -> (Widths, bool) {
        let wide = self.width >= 96;
        (Widths::of(self.width, if wide { 67 } else { 53 }, 2), wide)
    }

    fn queues_heading(&self) -> String {
        let (Widths { name, bar }, wide) = self.queues_widths();
        format!(
            " {} PAIR WORKER RX b/s TX b/s RX p/s TX p/s {}{} {}",
            self.look.left("PORT", name),
            if wide { "KICK/s CALL/s " } else { "" },
            self.look.left("POSTED", bar + 5),
            self.look.left("WAITING", bar + 5)
        )
    }

    fn pair(&self, port: &PortSnapshot, pair: &PairSnapshot, cells: &mut Cells) {
        let (Widths { name, bar }, wide) = self.queues_widths();
        let rates = rates(port, Some(pair), self.model.settings.window);
        cells.left(&port.name, name, Tone::Plain);
        cells.right(&pair.pair.to_string(), 4, Tone::Plain);
        cells.right(&pair.worker.to_string(), 6, Tone::Plain);
        for counter in ["rx_bytes", "tx_bytes"] {
            cells.right(&rate(rates.map(|rates| rates.bits(counter))), 6, Tone::Plain);
        }
        let counters = ["rx_packets", "tx_packets", "kicks", "calls"];
        for counter in counters.into_iter().take(if wide { 4 } else { 2 }) {
            cells.right(&rate(rates.map(|rates| rates.counter(counter))), 6, Tone::Plain);
        }
        for role in [QueueRole::Receiveq, QueueRole::Transmitq] {
            let full = port.ring_fill(role, Some(pair.pair)).map(share);
            cells.right(&full.map_or_else(|| "-".to_owned(), percent), 4, Tone::Plain).bar(full, bar);
        }
    }

    fn workers_heading(&self) -> String {
        format!(
            "{:>6} {:>8} {:11} {:>5} {:>6} {:>6} {:>7} WORKS FOR",
            "WORKER", "BUSY", "", "POLL", "SLEEP", "WAKE/s", "BURST/s"
        )
    }

    fn worker_row(&self, number: usize, cells: &mut Cells) {
        let worker = &self.model.snapshot().workers[number];
        cells.right(&number.to_string(), 5, Tone::Plain);
        let Some(load) = worker.load_over(self.model.settings.window) else {
            cells.add(" not measured yet".to_owned(), Tone::Plain);
            return;
        };
        cells.right(&format!("{:.1} %", load.busy_percent), 8, Tone::Plain);
        cells.bar(Some(load.busy_percent / 100.0), 11);
        cells.right(&format!("{:.0} %", load.polling_percent), 5, Tone::Plain);
        cells.right(&format!("{:.0} %", load.sleeping_percent), 6, Tone::Plain);
        cells.right(&short_rate(load.wakeups), 6, Tone::Plain);
        cells.right(&short_rate(load.bursts), 7, Tone::Plain);
    }

    fn drops_heading(&self) -> String {
        let name = self.drops_name();
        format!(" {} {:20} DROP/s   IN ALL WHAT HAPPENS", self.look.left("PORT", name), "REASON")
    }

    fn drops_name(&self) -> usize {
        (self.width / 6).clamp(8, 24)
    }

    fn drop_row(&self, port: &PortSnapshot, reason: &str, cells: &mut Cells) {
        let rates = port.rates_over(self.model.settings.window);
        let now = rates.map(|rates| rates.drops.get(reason).copied().unwrap_or_default());
        cells.left(&port.name, self.drops_name(), Tone::Plain);
        cells.left(reason, 20, Tone::Plain);
        cells.right(&rate(now), 6, if now > Some(0.0) { Tone::Bad } else { Tone::Plain });
        cells.right(&short_count(port.drops.get(reason).copied().unwrap_or_default()), 8, Tone::Plain);
        let meaning = DropReason::from_name(reason).map_or("", DropReason::meaning);
        let room = self.width.saturating_sub(cells.line.width());
        cells.add(self.look.cut(meaning, room), Tone::Plain);
    }

    fn fdb_name(&self) -> usize {
        self.width.saturating_sub(34).clamp(8, 32)
    }

    /// Everything about one port.
    fn page(&self) -> Vec<Line<'static>> {
        let name = self.model.page().unwrap_or_default();
        let Some(port) = self.model.snapshot().ports.iter().find(|port| port.name == name) else {
            return self.wrapped(
                &format!("There is no port {name:?}. Escape leads back to all ports."),
                0,
                Tone::Bad,
            );
        };
        let mut lines = self.about(port);
        lines.push(Line::default());
        lines.extend(self.sparklines(port));
        lines.push(Line::default());
        lines.extend(self.rings(port));
        lines.extend(self.workers_of(port));
        lines.extend(self.drops_of(port));
        lines.extend(self.why());
        lines
    }

    /// A text on as many lines as it needs. Spaces at its beginning are before each of them.
    fn wrapped(&self, text: &str, indent: usize, tone: Tone) -> Vec<Line<'static>> {
        let trimmed = text.trim_start_matches(' ');
        let lead = (text.len() - trimmed.len()).min(self.width / 2);
        let lines = wrap(trimmed, self.width - lead, indent.saturating_sub(lead)).into_iter();
        lines.map(|line| Line::from(self.look.span(" ".repeat(lead) + &line, tone))).collect()
    }

    fn about(&self, port: &PortSnapshot) -> Vec<Line<'static>> {
        let mac = port.mac.map_or_else(String::new, |mac| format!(", {mac}"));
        let (kind, state) = (port.negotiated.kind(), port.condition());
        let mut lines = self.wrapped(
            &format!("{}: {kind}, {state}, MTU {}{mac}, {}", port.name, port.mtu, port.peer),
            2,
            Tone::Title,
        );
        if let Some(fault) = &port.fault {
            lines.extend(self.wrapped(&format!("fault: {fault}"), 2, Tone::Bad));
        }
        if !port.rules.is_empty() {
            let rules = settings(&port.rules).collect::<Vec<_>>().join(" ");
            lines.extend(self.wrapped(&format!("rules: {rules}"), 2, Tone::Plain));
        }
        lines
    }

    fn sparklines(&self, port: &PortSnapshot) -> Vec<Line<'static>> {
        let room = self.width.saturating_sub(48);
        let samples = self.model.history.last(&port.name, room);
        let rates = port.rates_over(self.model.settings.window);
        let line = |name: &str, now: [String; 2], values: Vec<f64>, most: String| {
            let mut cells = self.cells();
            cells.left(name, 6, Tone::Plain).right(&now[0], 12, Tone::Plain).right(&now[1], 10, Tone::Plain);
            cells.add(self.look.sparkline(&values), Tone::Bar);
            cells.add(format!(" {most}"), Tone::Plain);
            cells.line
        };
        let most = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let mut lines = Vec::new();
        let [rx, tx]: [Vec<f64>; 2] = [
            samples.iter().map(|sample| sample.rx).collect(),
            samples.iter().map(|sample| sample.tx).collect(),
        ];
        for (name, [bytes, packets], values) in
            [("rx", ["rx_bytes", "rx_packets"], rx), ("tx", ["tx_bytes", "tx_packets"], tx)]
        {
            let most = format!("at most {}", bit_rate(most(&values)));
            let bits = or_none(rates.map(|rates| bit_rate(rates.bits(bytes))));
            let packets = or_none(rates.map(|rates| format!("{} p/s", short_rate(rates.counter(packets)))));
            lines.push(line(name, [bits, packets], values, most));
        }
        let values: Vec<f64> = samples.iter().map(|sample| sample.drops).collect();
        let most = format!("at most {}/s", short_rate(most(&values)));
        let dropped = or_none(rates.map(|rates| format!("{} p/s", short_rate(rates.dropped()))));
        lines.push(line("drops", [String::new(), dropped], values, most));
        lines
    }

    fn rings(&self, port: &PortSnapshot) -> Vec<Line<'static>> {
        let lines = port.queues.iter().map(|queue| {
            let mut cells = self.cells();
            cells.left(&format!("{} {}", queue.role.name(), queue.index), 13, Tone::Plain);
            let full = queue.available.map(|available| share((available.into(), queue.size.into())));
            cells.bar(full, 16);
            let available = queue.available.map_or_else(|| "?".to_owned(), |available| available.to_string());
            let text = match queue.role {
                QueueRole::Receiveq => format!("{available} of {} buffers posted", queue.size),
                QueueRole::Transmitq => format!("{available} of {} waiting", queue.size),
            };
            cells.add(text, Tone::Plain);
            let fault = match &queue.broken {
                Some(why) => Some(format!(", broken: {}", self.look.cut(why, self.width))),
                None if !queue.started => Some(", stopped".to_owned()),
                None if !queue.enabled => Some(", disabled".to_owned()),
                None => None,
            };
            if let Some(fault) = fault {
                cells.add(fault, Tone::Bad);
            }
            cells.line
        });
        lines.collect()
    }

    fn workers_of(&self, port: &PortSnapshot) -> Vec<Line<'static>> {
        let mut lines = Vec::new();
        for (number, worker) in self.model.snapshot().workers.iter().enumerate() {
            let pairs = port.pairs.iter().filter(|pair| usize::from(pair.worker) == number).count();
            let Some(load) = worker.load_over(self.model.settings.window) else { continue };
            let for_port = load.ports.get(&port.name).copied();
            if pairs == 0 && for_port.is_none() {
                continue;
            }
            let text = format!(
                "worker {number} is {:.0} % busy, {:.0} % of that for this port, and serves {pairs} of its pairs",
                load.busy_percent,
                for_port.unwrap_or_default()
            );
            lines.extend(self.wrapped(&text, 2, Tone::Plain));
        }
        lines
    }

    fn drops_of(&self, port: &PortSnapshot) -> Vec<Line<'static>> {
        let rates = port.rates_over(self.model.settings.window);
        let mut lines = Vec::new();
        for (reason, count) in port.drops.iter().filter(|(_, count)| **count > 0) {
            let now = rates.and_then(|rates| rates.drops.get(reason)).copied().unwrap_or_default();
            lines.push(Line::default());
            let text = format!("dropped as {reason}: {}/s, {} in all", short_rate(now), short_count(*count));
            lines.extend(self.wrapped(&text, 2, if now > 0.0 { Tone::Bad } else { Tone::Plain }));
            if let Some(reason) = DropReason::from_name(reason) {
                let text = format!("  {} What to do: {}", reason.meaning(), reason.remedy());
                lines.extend(self.wrapped(&text, 2, Tone::Plain));
            }
        }
        lines
    }

    /// What `ctl why` says of the port.
    fn why(&self) -> Vec<Line<'static>> {
        let text = match self.model.why() {
            None => "\nwhy: the switch is being asked\n".to_owned(),
            Some(Err(error)) => format!("\nwhy: {error}\n"),
            Some(Ok(diagnosis)) => format!("\nwhy {}", diagnosis.to_text()),
        };
        text.lines()
            .flat_map(|line| {
                if line.is_empty() { vec![Line::default()] } else { self.wrapped(line, 3, Tone::Plain) }
            })
            .collect()
    }

    fn foot(&self) -> Line<'static> {
        let settings = &self.model.settings;
        let text = if self.model.is_typing() {
            format!("only with: {}_   Enter keeps it, Escape takes it back", settings.filter)
        } else if self.model.is_text() {
            "Escape back  arrows scroll  w window  q quit".to_owned()
        } else {
            "1:ports 2:queues 3:workers 4:drops 5:fdb  Enter:port s:sort /:find ?:help q:quit".to_owned()
        };
        self.heading(&text)
    }
}

/// A rate, or a dash where none was measured.
fn rate(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), short_rate)
}

/// A part from 0 to 1 in percent; one that is not nothing is not said to be 0.
fn percent(part: f64) -> String {
    let percent = (100.0 * part).round();
    format!("{:.0}%", if part > 0.0 { percent.max(1.0) } else { 0.0 })
}

/// What keys there are, and what columns say.
pub const HELP: &str = "\
1 ports   2 queue pairs   3 workers   4 drops by reason   5 addresses (fdb)
Enter     the page of the port at the >: rings, workers, drops, why it is slow
Escape    back
arrows, PageUp, PageDown, Home, End     move
s, S      sort by the next or the last thing     r     the other way round
/         only ports whose name or state has this in it
w         rates over 1, 10 or 60 seconds
space     stop and go on     Ctrl-L     draw anew     q     quit

RX        what the switch received from the port: what its guest has sent
TX        what the switch sent to the port; bars are in proportion to the most
DROP/s    packets dropped, for whatever reason (4)
POST      receive buffers that the guest has posted, of its ring: at 0 it loses
WAIT      what the guest has sent and the switch has not taken, of its ring
PAIR      queue pair; WORKER serves it; KICK, CALL: notifications from and to it
POLL      time in which a worker is awake and finds nothing; SLEEP: it sleeps";

#[cfg(test)]
mod tests;
