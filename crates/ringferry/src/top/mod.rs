//! `ringferry top`: what a running switch does now, a screen each second; for scripts as text or as JSON.
//!
//! There is one source, the snapshot and the diagnosis of the control socket (ask.rs). The [`Model`] holds the last of them and how it is looked at (model.rs, history.rs), and is
//! drawn by view.rs with the pieces of draw.rs. On a terminal one thread waits for keys (keys.rs), signals and answers, and draws (terminal.rs); a second one asks, so that a switch
//! that does not answer holds up no key. `--batch`, `--once` and `--json` need no terminal and print the same, one screen after another.

mod ask;
mod draw;
mod history;
mod keys;
mod model;
mod terminal;
mod view;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ringferry_control::snapshot::Snapshot;
use ringferry_control::why::Diagnosis;
use ringferry_control::{self as control, ControlError};
use ringferry_sys::signal::{Signal, Signals};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

use crate::error_report::{ErrorKind, ErrorReport};
use ask::{AskError, Asker};
use draw::Look;
use keys::Decoder;
use model::{Action, Model, Settings, Sort, View};
use terminal::Terminal;

/// Shown below the options by `ringferry top --help`.
const EXAMPLES: &str = "\
Keys: ? shows them all. RX is what the switch received from a port, so what its guest has sent. Nothing is said by colours alone, and NO_COLOR turns them off. Without a terminal
that can be drawn on (TERM=dumb) screens are printed one after another, as with --batch. Wider text than 80 columns: COLUMNS=120.

Examples:
  ringferry top
  ringferry top vm0                                       the page of one port: rates, rings, drops, and why it is slow
  ringferry top --sort drops --window 10
  ringferry top --once                                    one screen as text
  ringferry top --batch --delay 5 --view queues > log     a screen every five seconds, until it is stopped
  ringferry top --json --count 60 | jq '.ports[0].rates[0].counters.rx_bytes // 0'";

/// How long the rest of a key's sequence may take to come: terminals send it at once, and over a slow line it is torn apart.
const SEQUENCE: Duration = Duration::from_millis(50);
/// For so long a switch may take to answer before the screen says so.
const SILENCE: Duration = Duration::from_secs(3);

/// Shows what a running switch does now.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct TopArgs {
    /// Begin with the page of this port.
    port: Option<String>,
    /// Seconds between two screens.
    #[arg(long, short, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3600))]
    delay: u32,
    /// Print screens as text, one after another, and read no keys: for files and pipes.
    #[arg(long, short)]
    batch: bool,
    /// Print one screen as text, or as JSON with --json, and end.
    #[arg(long, conflicts_with_all = ["count", "delay"])]
    once: bool,
    /// End after so many screens.
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// A line of JSON for each screen: what `ringferry ctl show --json` says, in the order and with the filter of the screen; for one port also `why`.
    #[arg(long)]
    json: bool,
    /// The table to begin with.
    #[arg(long, value_enum, default_value_t, hide_possible_values = false)]
    view: View,
    /// What ports and queue pairs are sorted by.
    #[arg(long, short, value_enum, default_value_t)]
    sort: Sort,
    /// The other way round.
    #[arg(long, short)]
    reverse: bool,
    /// Only ports whose name or state has this in it; of addresses and drops also those that have it in them.
    #[arg(long, short, value_name = "TEXT", default_value = "", hide_default_value = true)]
    filter: String,
    /// Seconds over which rates are.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = ["1", "10", "60"])]
    window: String,
    /// Draw with ASCII only, also where the locale has UTF-8.
    #[arg(long)]
    ascii: bool,
    /// Control socket of the switch [default: as for `ringferry ctl`].
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

/// Why there is nothing to be seen.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error(
        "there is no terminal to draw on: print screens as text with --batch, one of them with --once, or JSON with --json"
    )]
    NoTerminal,
    /// It was printed as JSON.
    #[error("the output says what is wrong")]
    Told,
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl TopError {
    /// Returns true if the output says all that is to be said of the error.
    pub fn is_told(&self) -> bool {
        matches!(self, TopError::Told)
    }
}

impl AskError {
    /// The word for the error in JSON.
    fn kind(&self) -> ErrorKind {
        match self {
            AskError::Control(error) => ErrorKind::of(error),
            AskError::Guest | AskError::Mismatch => ErrorKind::NotSupported,
        }
    }

    /// The error as a line of JSON.
    fn to_json(&self) -> io::Result<String> {
        Ok(serde_json::to_string(&ErrorReport { error: self.to_string(), kind: self.kind() })? + "\n")
    }
}

/// A screen as JSON: a snapshot, in which readers of `ctl show --json` find what they know.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Screen<'a> {
    #[serde(flatten)]
    snapshot: &'a Snapshot,
    /// What `ringferry ctl why` finds at the port, if the screens are of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'a Diagnosis>,
}

/// Shows screens until the reader has seen enough. Text and JSON go to `out`, usually standard output.
///
/// # Errors
/// See [`TopError`].
pub fn run(args: &TopArgs, out: &mut dyn Write) -> Result<(), TopError> {
    let control = args.control.clone().unwrap_or_else(control::default_path);
    let term = std::env::var("TERM").unwrap_or_default();
    let is_dumb = term.is_empty() || term == "dumb";
    let look = look(&|name| std::env::var(name).unwrap_or_default(), args.ascii);
    let has_terminal = terminal::is_there();
    if args.batch || args.once || args.json || (has_terminal && is_dumb) {
        return batch(args, &control, look, out);
    }
    if !has_terminal {
        return Err(TopError::NoTerminal);
    }
    interact(args, control, look)
}

/// What the terminal can show, by the environment: <https://no-color.org>, and the locale as setlocale(3) finds it.
fn look(environment: &dyn Fn(&str) -> String, ascii: bool) -> Look {
    let term = environment("TERM");
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].map(environment).into_iter().find(|value| !value.is_empty());
    let is_utf8 = locale.is_some_and(|locale| {
        let locale = locale.to_ascii_lowercase();
        locale.contains("utf-8") || locale.contains("utf8")
    });
    // The kernel's console has no fractions of blocks in its font.
    let has_blocks = !matches!(term.as_str(), "" | "dumb" | "linux");
    Look {
        colour: environment("NO_COLOR").is_empty() && !matches!(term.as_str(), "" | "dumb"),
        unicode: is_utf8 && has_blocks && !ascii,
    }
}

impl TopArgs {
    fn settings(&self) -> Settings {
        Settings {
            view: self.view,
            sort: self.sort,
            reversed: self.reverse,
            filter: self.filter.clone(),
            window: self.window.parse().unwrap_or(1),
            page: self.port.clone(),
        }
    }

    fn screens(&self) -> u64 {
        if self.once { 1 } else { self.count.unwrap_or(u64::MAX) }
    }

    fn delay(&self) -> Duration {
        Duration::from_secs(self.delay.into())
    }
}

/// Asks for the first screen: what is wrong now is wrong with the question.
fn first(args: &TopArgs, control: &Path, model: &mut Model) -> Result<(), AskError> {
    let answered = ask::ask(control, args.port.as_deref())?;
    if let Some(port) = &args.port
        && !answered.snapshot.ports.iter().any(|one| one.name == *port)
    {
        // It says which there are.
        let none = answered.snapshot.of_port(port).map(drop);
        return none.map_err(|why| ControlError::Refused(why).into());
    }
    model.update(answered.snapshot, answered.why);
    Ok(())
}

/// Prints screens one after another.
fn batch(args: &TopArgs, control: &Path, look: Look, out: &mut dyn Write) -> Result<(), TopError> {
    let mut model = Model::new(args.settings());
    let asked = first(args, control, &mut model);
    if let (Err(error), true) = (&asked, args.json) {
        print(&error.to_json()?, out)?;
        return Err(TopError::Told);
    }
    asked?;
    let mut left = args.screens();
    let mut asked = Ok(());
    loop {
        let text = match asked {
            Ok(()) if args.json => line(&model)?,
            // It may come back; another process may be taking over.
            Err(error) if args.json => AskError::to_json(&error)?,
            Ok(()) => view::text(&model, look, width()),
            Err(error) => {
                model.fail(error.to_string());
                view::text(&model, look, width())
            }
        };
        let end = if args.json || left == 1 { "" } else { "\n" };
        if !print(&format!("{text}{end}"), out)? {
            return Ok(());
        }
        left -= 1;
        if left == 0 {
            return Ok(());
        }
        thread::sleep(args.delay());
        asked = ask::ask(control, model.page()).map(|answered| model.update(answered.snapshot, answered.why));
    }
}

/// Prints a text; false if nobody reads it any more.
fn print(text: &str, out: &mut dyn Write) -> io::Result<bool> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

/// Columns of a screen that is printed.
fn width() -> usize {
    let told = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    told.filter(|columns| (1..=1000).contains(columns)).unwrap_or_else(|| terminal::size().width.into())
}

/// A screen as a line of JSON.
fn line(model: &Model) -> io::Result<String> {
    let mut snapshot = model.shown();
    if let Some(page) = model.page() {
        snapshot.ports.retain(|port| port.name == page);
        snapshot.fdb.entries.retain(|entry| entry.port == page);
    }
    let why = model.why().and_then(|why| why.as_ref().ok());
    Ok(serde_json::to_string(&Screen { snapshot: &snapshot, why })? + "\n")
}

/// Draws screens and follows keys, until one of them, a signal or the number of screens is the end.
fn interact(args: &TopArgs, control: PathBuf, look: Look) -> Result<(), TopError> {
    let mut model = Model::new(args.settings());
    first(args, &control, &mut model)?;
    // Before other threads start, so that all of them leave signals to it.
    let signals = Signals::new(&[Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::WINCH])?;
    let mut asker = Asker::start(control)?;
    let mut terminal = Terminal::enter()?;
    let mut decoder = Decoder::default();
    let mut left = args.screens();
    let mut next = Instant::now() + args.delay();
    loop {
        terminal.draw(|frame| view::screen(&mut model, look, frame.area(), frame.buffer_mut()))?;
        if left == 0 {
            return Ok(());
        }
        let wait = next.saturating_duration_since(Instant::now());
        let wait = if decoder.is_partial() { wait.min(SEQUENCE) } else { wait };
        let ready = ready(&signals, &asker, wait)?;
        if ready.signal {
            match signals.next()? {
                // The next screen is as large as the terminal is now.
                None | Some(Signal::WINCH) => {}
                Some(_) => return Ok(()),
            }
        }
        let keys = if ready.key {
            let mut bytes = [0; 256];
            match rustix::io::read(io::stdin(), &mut bytes) {
                // The terminal has gone.
                Ok(0) | Err(rustix::io::Errno::IO) => return Ok(()),
                Ok(count) => decoder.feed(&bytes[..count]),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Vec::new(),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        } else if ready.nothing && decoder.is_partial() {
            decoder.flush().into_iter().collect()
        } else {
            Vec::new()
        };
        for key in keys {
            match model.press(key) {
                Action::Nothing => {}
                Action::Ask => next = Instant::now(),
                Action::Redraw => terminal.clear()?,
                Action::Suspend => terminal.suspend()?,
                Action::Quit => return Ok(()),
            }
        }
        match asker.answer()? {
            Some(Ok(answered)) => {
                model.update(answered.snapshot, answered.why);
                left -= 1;
            }
            Some(Err(error)) => model.fail(error.to_string()),
            None => {}
        }
        if let Some(silent) = asker.since.map(|since| since.elapsed()).filter(|silent| *silent >= SILENCE) {
            model.fail(format!("the switch has not answered for {} s", silent.as_secs()));
        }
        if Instant::now() >= next {
            asker.ask(model.page());
            next = Instant::now() + args.delay();
        }
    }
}

/// What has happened.
struct Ready {
    key: bool,
    signal: bool,
    nothing: bool,
}

/// Waits for a key, a signal, an answer, or the end of the time.
fn ready(signals: &Signals, asker: &Asker, time: Duration) -> io::Result<Ready> {
    let stdin = io::stdin();
    let mut fds = [
        PollFd::new(&stdin, PollFlags::IN),
        PollFd::new(signals, PollFlags::IN),
        PollFd::new(&*asker.answered, PollFlags::IN),
    ];
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    match poll(&mut fds, Some(&time)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
    Ok(Ready { key: is_ready(&fds[0]), signal: is_ready(&fds[1]), nothing: !fds.iter().any(is_ready) })
}

#[cfg(test)]
mod tests;
