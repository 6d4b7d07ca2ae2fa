//! The log: lines on their way to standard error.
//!
//! Whoever reads our standard error may stop reading, and then a write to it waits. So a running switch must not write to it from a
//! thread that others depend on: once [`in_background`] was called, a line is put into a bounded ring and a thread of its own writes it. Lines for
//! which there is no place are left out and counted, and the next line says how many; so are, at the default verbosity, those that [`Limit`] does not admit. Until
//! then, and in programs that never call it, lines are written at once.
//!
//! `main` calls [`flush`] before it says why the program ends, and last of all.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io::{self, Write};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Context, Filter};

/// Most lines that wait to be written: a few hundred kilobytes.
const WAITING: usize = 1024;

/// Lines a second in the long run, with the line that says how many were left out: a program whose peers do their worst fills no disk. With what fifty ports have
/// to themselves it is ten.
const RATE: u32 = 5;

/// Lines that may come at once, as when many guests start together.
const BURST: u32 = 200;

/// Lines about one port, or of one place in the program about none, that may come at once beside these, and the time after which there may be another one: what others
/// have to say, however much, silences none.
const SHARE_BURST: u32 = 10;
const SHARE_INTERVAL: Duration = Duration::from_secs(10);

/// Most shares that are counted.
const SHARES: usize = 4096;

/// How long [`flush`] waits for whoever reads the log.
const PATIENCE: Duration = Duration::from_secs(2);

/// Time between two lines that say how many were left out.
const REPORT: Duration = Duration::from_secs(1);

/// Lines between those who write them and standard error.
struct Log {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// True if a thread writes the lines.
    background: bool,
    waiting: VecDeque<Vec<u8>>,
    /// The thread has taken lines that it has not written yet.
    writing: bool,
    /// Lines that were left out and of which nothing was said.
    left_out: u64,
    /// When that was last said.
    reported: Option<Instant>,
    /// `None`: no limit but the place.
    limit: Option<LineLimit>,
}

/// A limit on the rate of lines, of which each port has a share to itself, and so has each place in the program that says something of no port.
struct LineLimit {
    /// [`BURST`] deep, filled at [`RATE`] less the one for [`REPORT`].
    all: Bucket,
    shares: HashMap<String, Bucket>,
}

/// A token bucket.
struct Bucket {
    depth: u32,
    interval: Duration,
    tokens: u32,
    filled: Instant,
}

static LOG: Log = Log::new();

/// Writes log lines for `tracing_subscriber`.
pub(crate) struct Lines;

/// A line of this level.
pub(crate) struct Line(Level);

impl MakeWriter<'_> for Lines {
    type Writer = Line;

    fn make_writer(&self) -> Line {
        Line(Level::INFO)
    }

    fn make_writer_for(&self, meta: &Metadata<'_>) -> Line {
        Line(*meta.level())
    }
}

/// Admits lines at a limited rate, where there is one: see [`in_background`].
pub(crate) struct Limit;

impl<S: Subscriber> Filter<S> for Limit {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let mut port = Port(None);
        event.record(&mut port);
        // Its name is file and line.
        let about = port.0.as_deref().unwrap_or_else(|| event.metadata().name());
        LOG.admits(about, Instant::now())
    }
}

/// The port that a line is about.
struct Port(Option<String>);

impl Visit for Port {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "port" {
            self.0 = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}

/// Returns true if standard error is the journal's: systemd says which stream that is (systemd.exec(5), `JOURNAL_STREAM`), which may have been redirected since. The journal has the time and the
/// priority of each line beside it.
pub(crate) fn is_journal() -> bool {
    static IS: OnceLock<bool> = OnceLock::new();
    *IS.get_or_init(|| {
        let Ok(said) = std::env::var("JOURNAL_STREAM") else { return false };
        rustix::fs::fstat(io::stderr()).is_ok_and(|stat| said == format!("{}:{}", stat.st_dev, stat.st_ino))
    })
}

/// The prefix by which the journal knows the priority of a line (sd-daemon(3)).
fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        _ => "<7>",
    }
}

/// A text as it goes to standard error: in the journal with its priority before each line, as what has several is several entries there.
fn marked(level: Level, text: &[u8], is_journal: bool) -> Cow<'_, [u8]> {
    if !is_journal {
        return Cow::Borrowed(text);
    }
    let lines = text.split_inclusive(|byte| *byte == b'\n');
    Cow::Owned(lines.flat_map(|line| [priority(level).as_bytes(), line].concat()).collect())
}

/// Says why the program ends.
pub(crate) fn say_end(error: &dyn std::error::Error) {
    flush();
    let text = format!("ringferry: {}\n", visible(&error.to_string()));
    // A macro would panic if that cannot be written, as on a full disk, and hide the exit code.
    let _ = io::stderr().write_all(&marked(Level::ERROR, text.as_bytes(), is_journal()));
}

/// Returns a text that a terminal shows and does not obey, whoever has written it, as in the name of a file.
fn visible(text: &str) -> String {
    let shown =
        |c: char| if c.is_control() && c != '\n' { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}

impl Write for Line {
    /// The subscriber writes each line by one call.
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let line = marked(self.0, text, is_journal());
        if !LOG.put(&line) {
            // Nobody could be told of an error, such as a full disk; the subscriber would panic over it.
            let _ = io::stderr().write_all(&line);
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// From now on no thread waits for whoever reads the log. `limited` bounds the rate of lines, too.
///
/// # Errors
/// The system has no thread left.
pub(crate) fn in_background(limited: bool) -> io::Result<()> {
    std::thread::Builder::new().name("ringferry-log".to_owned()).spawn(|| LOG.write_to(io::stderr()))?;
    LOG.begin(limited.then(|| LineLimit::new(Instant::now())));
    Ok(())
}

/// Waits until all lines are written, or nobody has read them for [`PATIENCE`].
pub(crate) fn flush() {
    LOG.flush(PATIENCE);
}

impl Log {
    const fn new() -> Log {
        let state = State {
            background: false,
            waiting: VecDeque::new(),
            writing: false,
            left_out: 0,
            reported: None,
            limit: None,
        };
        Log { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, limit: Option<LineLimit>) {
        let mut state = self.state();
        state.background = true;
        state.limit = limit;
    }

    /// Returns false for a line that is to be left out, and counts it.
    fn admits(&self, about: &str, now: Instant) -> bool {
        let mut state = self.state();
        let admitted = state.limit.as_mut().is_none_or(|limit| limit.admits(about, now));
        if !admitted {
            state.left_out += 1;
            drop(state);
            self.changed.notify_all();
        }
        admitted
    }

    /// Leaves a line to the thread, which may leave it out; false if there is no thread.
    fn put(&self, line: &[u8]) -> bool {
        let mut state = self.state();
        if !state.background {
            return false;
        }
        if state.waiting.len() < WAITING {
            state.waiting.push_back(line.to_vec());
        } else {
            state.left_out += 1;
        }
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Writes lines as they come, for ever.
    fn write_to(&self, mut sink: impl Write) {
        let mut state = self.state();
        loop {
            let now = Instant::now();
            let due = state.left_out > 0 && state.reported.is_none_or(|said| now - said >= REPORT);
            if state.waiting.is_empty() && !due {
                // Wakes up by itself only while there is something left to say.
                let woken = if state.left_out > 0 {
                    self.changed
                        .wait_timeout(state, REPORT)
                        .map(|(state, _)| state)
                        .map_err(|e| e.into_inner().0)
                } else {
                    self.changed.wait(state).map_err(PoisonError::into_inner)
                };
                state = woken.unwrap_or_else(|state| state);
                continue;
            }
            let lines = std::mem::take(&mut state.waiting);
            let left_out = if due { std::mem::take(&mut state.left_out) } else { 0 };
            if due {
                state.reported = Some(now);
            }
            state.writing = true;
            drop(state);
            // Nobody could be told of an error, such as a full disk, before there is room again.
            let mut lost = 0;
            for line in lines {
                lost += u64::from(sink.write_all(&line).is_err());
            }
            if left_out > 0 {
                let line = format!(
                    "{left_out} log lines were left out, as there were too many or no room for them\n"
                );
                lost += left_out
                    * u64::from(sink.write_all(&marked(Level::WARN, line.as_bytes(), is_journal())).is_err());
            }
            state = self.state();
            state.left_out += lost;
            state.writing = false;
            self.changed.notify_all();
        }
    }

    fn flush(&self, patience: Duration) {
        let since = Instant::now();
        let mut state = self.state();
        while state.background && (state.writing || !state.waiting.is_empty()) {
            let Some(left) = patience.checked_sub(since.elapsed()) else { return };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl LineLimit {
    fn new(now: Instant) -> LineLimit {
        let interval = Duration::from_nanos(1_000_000_000 / u64::from(RATE - 1));
        LineLimit { all: Bucket::new(BURST, interval, now), shares: HashMap::new() }
    }

    /// Takes the line out of its own share first: that of the port, or place in the program, that it is about.
    fn admits(&mut self, about: &str, now: Instant) -> bool {
        if !self.shares.contains_key(about) {
            if self.shares.len() >= SHARES {
                self.shares.retain(|_, bucket| !bucket.is_full(now));
            }
            if self.shares.len() < SHARES {
                self.shares.insert(about.to_owned(), Bucket::new(SHARE_BURST, SHARE_INTERVAL, now));
            }
        }
        self.shares.get_mut(about).is_some_and(|own| own.takes(now)) || self.all.takes(now)
    }
}

impl Bucket {
    fn new(depth: u32, interval: Duration, now: Instant) -> Bucket {
        Bucket { depth, interval, tokens: depth, filled: now }
    }

    fn fill(&mut self, now: Instant) {
        let new = now.saturating_duration_since(self.filled).as_nanos() / self.interval.as_nanos();
        let new = u32::try_from(new).unwrap_or(u32::MAX);
        if new >= self.depth {
            (self.tokens, self.filled) = (self.depth, now);
        } else {
            self.tokens = (self.tokens + new).min(self.depth);
            self.filled += self.interval * new;
        }
    }

    fn takes(&mut self, now: Instant) -> bool {
        self.fill(now);
        let taken = self.tokens > 0;
        self.tokens = self.tokens.saturating_sub(1);
        taken
    }

    fn is_full(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.tokens == self.depth
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    #[test]
    fn each_line_has_the_priority_that_the_journal_reads() {
        assert_eq!(*marked(Level::WARN, b"one\ntwo\n", true), *b"<4>one\n<4>two\n");
        assert_eq!(*marked(Level::ERROR, b"one", true), *b"<3>one");
        assert_eq!(*marked(Level::ERROR, b"one", false), *b"one");
        assert!(!is_journal());
    }

    #[test]
    fn no_text_moves_the_cursor_of_a_terminal() {
        assert_eq!(visible("a\nb \x1b[2J\u{9b}c\tä"), "a\nb \\u{1b}[2J\\u{9b}c\\tä");
    }

    /// A reader that takes nothing before it is told to.
    struct Paused {
        go: Receiver<()>,
        lines: Sender<String>,
    }

    impl Write for Paused {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            // Goes on for ever once the other end is gone.
            let _ = self.go.recv();
            let _ = self.lines.send(String::from_utf8_lossy(line).into_owned());
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A log in the background, and the reader's ends.
    fn log(limit: Option<LineLimit>) -> (Arc<Log>, Sender<()>, Receiver<String>) {
        let (resume, go) = channel();
        let (lines, read) = channel();
        let log = Arc::new(Log::new());
        log.begin(limit);
        let writer = Arc::clone(&log);
        std::thread::spawn(move || writer.write_to(Paused { go, lines }));
        (log, resume, read)
    }

    /// How many lines a reader gets that resumes, and how many it is told were left out, until that is `all`.
    fn read_all(read: &Receiver<String>, all: u64) -> (u64, u64) {
        let (mut lines, mut left_out) = (0, 0);
        while lines + left_out < all {
            let line = read.recv_timeout(Duration::from_secs(30)).expect("every line is written or counted");
            match line.split_once(" log lines were left out") {
                Some((count, _)) => left_out += count.parse::<u64>().unwrap(),
                None => lines += 1,
            }
        }
        (lines, left_out)
    }

    #[test]
    fn m3_nobody_waits_for_a_reader_that_pauses_and_what_is_left_out_is_said() {
        let (log, resume, read) = log(None);
        // If a line waited for the reader, the first would do so for ever.
        let all = 5 * WAITING as u64;
        for _ in 0..all {
            assert!(log.put(b"a line\n"));
        }
        drop(resume);
        let (lines, left_out) = read_all(&read, all);
        assert!(lines >= WAITING as u64, "{lines}");
        assert!(left_out >= all - 2 * WAITING as u64, "{left_out}");
    }

    #[test]
    fn m3_no_more_than_ten_lines_a_second_from_fifty_ports_whoever_causes_them() {
        let start = Instant::now();
        let mut limit = LineLimit::new(start);
        let mut allowed = |from: u64, to: u64| {
            let times = (from * 1000..to * 1000).map(|millis| start + Duration::from_millis(millis));
            times.filter(|now| limit.admits("one place", *now)).count() as u32
        };
        // A thousand a second.
        let first = allowed(0, 10);
        let least = 10 * (RATE - 1);
        assert!((BURST + least..=BURST + SHARE_BURST + 10 * RATE).contains(&first), "{first}");
        let next = allowed(10, 20);
        assert!((least..=10 * RATE).contains(&next), "{next}");
        // All that fifty ports have to say in a minute, in the worst order.
        let mut limit = LineLimit::new(start);
        let mut lines = |from: u64, to: u64| {
            let times = (from * 100..to * 100).map(|tenths| start + Duration::from_millis(10 * tenths));
            times
                .flat_map(|now| (0..50).map(move |port| (now, port.to_string())))
                .filter(|(now, port)| limit.admits(port, *now))
                .count() as u32
        };
        lines(0, 120);
        let minute = lines(120, 180);
        assert!(minute <= 60 * 10, "{minute}");
        // After a quiet time all may come at once again.
        assert!(allowed(1000, 1001) >= BURST);
    }

    #[test]
    fn what_is_left_out_by_the_limit_is_said_too() {
        let now = Instant::now();
        let mut limit = LineLimit::new(now);
        limit.all.tokens = 3;
        let own = u64::from(SHARE_BURST);
        let (log, resume, read) = log(Some(limit));
        drop(resume);
        (0..own + 10).filter(|_| log.admits("a", now)).for_each(|_| assert!(log.put(b"a line\n")));
        assert_eq!(read_all(&read, own + 10), (own + 3, 7));
    }

    #[test]
    fn what_is_said_of_some_ports_silences_no_other() {
        let start = Instant::now();
        let mut limit = LineLimit::new(start);
        // Eight of them have as much said of them as they can, for a minute.
        for now in (0..60_000).map(|millis| start + Duration::from_millis(millis)) {
            for hostile in 0..8 {
                limit.admits(&format!("hostile{hostile}"), now);
            }
        }
        let later = start + Duration::from_secs(60);
        let of_victim = (0..100).filter(|_| limit.admits("victim", later)).count();
        assert!((SHARE_BURST as usize..=SHARE_BURST as usize + 2).contains(&of_victim), "{of_victim}");
        let next = later + SHARE_INTERVAL;
        for _ in 0..1000 {
            limit.admits("hostile0", next);
        }
        assert!(limit.admits("victim", next));
        // Names without end take no memory without end.
        for port in 0..2 * SHARES {
            limit.admits(&port.to_string(), next);
        }
        assert_eq!(limit.shares.len(), SHARES);
    }

    #[test]
    fn a_flush_waits_for_the_last_line_but_not_for_a_reader_that_is_gone() {
        let (log, resume, read) = log(None);
        log.put(b"the last line\n");
        log.flush(Duration::from_millis(1));
        assert!(read.try_recv().is_err());
        drop(resume);
        log.flush(Duration::from_secs(30));
        assert_eq!(read.try_recv().unwrap(), "the last line\n");
    }

    #[test]
    fn without_a_thread_lines_are_left_to_whoever_has_them() {
        assert!(!Log::new().put(b"a line\n"));
    }
}
