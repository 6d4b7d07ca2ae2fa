//! `ringferry ctl`: asks a running switch, or a running `ringferry guest`, through its control socket and prints the
//! answer.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use ringferry_control::channels::{Channels, Stats, Steering};
use ringferry_control::explain::Explanation;
use ringferry_control::firewall::{DenialCursor, FirewallReport, Firewalls};
use ringferry_control::mirror::{FdbFlush, LinkChange, Mirrors};
use ringferry_control::snapshot::Column;
use ringferry_control::text::wrap;
use ringferry_control::trace::Trace;
use ringferry_control::why::{self, Diagnosis};
use ringferry_control::wire::{WireChange, Wires};
use ringferry_control::{self as control, Answer, ControlError, Patience, Request};
use ringferry_control::{PortChange, PortRules, Reload, SettingsChange};

use crate::error_report::{ErrorKind, ErrorReport};

mod args;
mod denials;
mod wire;

pub use args::CtlArgs;
use args::*;
use wire::WireCommand;

/// The key of the rule that `ctl quarantine` sets.
const QUARANTINE: &str = "quarantine";

/// The switch that is asked.
struct Switch {
    control: PathBuf,
    timeout: Duration,
}

impl Switch {
    fn call(&self, request: &Request) -> Result<Answer, ControlError> {
        let waits = |who: &str| {
            eprintln!("ringferry: still waiting for an answer on {}: {who}", self.control.display());
        };
        control::call_with(&self.control, request, Patience { pause: self.timeout, waits: &waits })
    }
}

/// A reason why nothing was printed.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// The switch did not answer.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The answer belongs to another question.
    #[error("ringferry answered another question: is it the same version as this program?")]
    Mismatch,
    /// A port cannot be left with itself alone.
    #[error("{0} is the port that is to be cut off: name the other one that it is left with")]
    WithItself(String),
    /// A guest was asked for what only a switch has.
    #[error("this is a ringferry guest, which has no forwarding database: ask the switch it is plugged into")]
    NoFdb,
    /// A guest was asked for what only a switch has.
    #[error(
        "this is a ringferry guest, which does not count drops by reason: see its counters with `ringferry ctl show`, or ask the switch it is plugged into"
    )]
    NoReasons,
    /// A guest was asked for what only a switch has.
    #[error(
        "this is a ringferry guest, which has one tap and no table of ports: leave PORT and --columns out, or ask the switch it is plugged into"
    )]
    OnePort,
    /// Parts of a reload failed; what was printed says which.
    #[error("not all of the configuration file could be carried out")]
    Incomplete,
    /// The output says it all.
    #[error("the output says what is wrong")]
    Told,
    /// The answer could not be written.
    #[error("cannot write the answer: {0}")]
    Output(#[from] io::Error),
}

impl CtlError {
    /// Returns true if the output says all that is to be said of the error.
    pub fn is_told(&self) -> bool {
        matches!(self, CtlError::Told)
    }

    /// The word for the error in JSON; `None` if the output is not the place for it.
    fn kind(&self) -> Option<ErrorKind> {
        Some(match self {
            CtlError::Control(error) => ErrorKind::of(error),
            CtlError::WithItself(_) => ErrorKind::Refused,
            CtlError::Mismatch | CtlError::NoFdb | CtlError::NoReasons | CtlError::OnePort => {
                ErrorKind::NotSupported
            }
            CtlError::Incomplete | CtlError::Told | CtlError::Output(_) => return None,
        })
    }

    /// The error as JSON.
    fn to_json(&self, kind: ErrorKind) -> io::Result<String> {
        let error = match self {
            CtlError::Control(error) => ErrorKind::text(error),
            error => error.to_string(),
        };
        pretty(&ErrorReport { error, kind })
    }
}

/// Runs `ringferry ctl` with output to `out`, usually standard output. With `--json` an error is JSON as well.
///
/// # Errors
/// No switch answers, or `out` cannot be written. A reader that has seen enough (`| head`) is not an error.
pub fn run(args: &CtlArgs, out: &mut dyn Write, width: Option<usize>) -> Result<(), CtlError> {
    let result = answer(args, out, width);
    match result {
        Err(error) if args.command.is_json() => {
            match error.kind() {
                Some(kind) => print(&error.to_json(kind)?, out)?,
                // What was printed says what has failed.
                None if matches!(error, CtlError::Incomplete) => {}
                None => return Err(error),
            }
            Err(CtlError::Told)
        }
        result => result,
    }
}

fn answer(args: &CtlArgs, out: &mut dyn Write, width: Option<usize>) -> Result<(), CtlError> {
    let control = args.control.clone().unwrap_or_else(control::default_path);
    let switch = Switch { control, timeout: Duration::from_secs(args.timeout.into()) };
    if let CtlCommand::Reload { dry_run, json } = args.command {
        return reload(&switch, dry_run, json, out);
    }
    if let CtlCommand::Show(show) = &args.command {
        return show_state(&switch, show, out);
    }
    if let CtlCommand::Denials { port, follow } = &args.command {
        return denials::print(&switch, port.as_deref(), *follow, out);
    }
    let text = ask(&switch, &args.command)?;
    // Tables are read as they are.
    let has_sentences =
        matches!(args.command, CtlCommand::Why { .. } | CtlCommand::Trace(_) | CtlCommand::Explain { .. });
    match width {
        Some(width) if has_sentences && !args.command.is_json() => print(&wrap(&text, width), out),
        _ => print(&text, out),
    }
}

/// The columns of the terminal that standard output is, if it is one.
pub fn width() -> Option<usize> {
    let size =
        io::stdout().is_terminal().then(|| rustix::termios::tcgetwinsize(io::stdout()).ok()).flatten()?;
    Some(size.ws_col.into()).filter(|columns| *columns > 0)
}

/// Answers `ringferry ctl show`, once or again and again.
fn show_state(switch: &Switch, args: &ShowArgs, out: &mut dyn Write) -> Result<(), CtlError> {
    let Some(seconds) = args.watch else { return print(&state(switch, args)?, out) };
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 {
        let text = match state(switch, args) {
            Ok(text) => text,
            // It may come back; another process may be taking over.
            Err(CtlError::Control(error @ (ControlError::NotRunning(_) | ControlError::Os { .. }))) => {
                if args.json {
                    compact(&ErrorReport { error: error.to_string(), kind: ErrorKind::of(&error) })?
                } else {
                    format!("{error}\n")
                }
            }
            Err(error) => return Err(error),
        };
        let end = if args.json { "" } else { "\n" };
        if write!(out, "{text}{end}")
            .and_then(|()| out.flush())
            .is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
        {
            return Ok(());
        }
        left -= 1;
        if left > 0 {
            std::thread::sleep(Duration::from_secs(seconds.into()));
        }
    }
    Ok(())
}

/// Returns one answer of `ringferry ctl show`.
fn state(switch: &Switch, args: &ShowArgs) -> Result<String, CtlError> {
    // What is printed for people has numbers of addresses only, but for the page of a port.
    let addresses = (!args.json && args.port.is_none()).then_some(0);
    let snapshot = match switch.call(&Request::Show { addresses })? {
        Answer::Show(snapshot) => *snapshot,
        Answer::Guest(_) if args.reasons => return Err(CtlError::NoReasons),
        Answer::Guest(_) if args.port.is_some() || !args.columns.is_empty() => return Err(CtlError::OnePort),
        Answer::Guest(guest) if args.json => return json_of(&*guest, args),
        Answer::Guest(guest) => return Ok(guest.to_text()),
        _ => return Err(CtlError::Mismatch),
    };
    let snapshot = match &args.port {
        Some(port) => snapshot.of_port(port).map_err(ControlError::Refused)?,
        None => snapshot,
    };
    if args.json {
        return json_of(&snapshot, args);
    }
    if args.reasons {
        return Ok(snapshot.reasons_to_text());
    }
    if args.columns.is_empty() {
        return Ok(if args.port.is_some() { snapshot.page_to_text() } else { snapshot.to_text() });
    }
    let columns: Vec<Column> = args.columns.iter().filter_map(|name| Column::of(name).ok()).collect();
    Ok(snapshot.columns_to_text(&columns, args.window.as_deref().and_then(|window| window.parse().ok())))
}

fn json_of(value: &impl serde::Serialize, args: &ShowArgs) -> Result<String, CtlError> {
    Ok(if args.watch.is_some() { compact(value)? } else { pretty(value)? })
}

fn compact(value: &impl serde::Serialize) -> io::Result<String> {
    Ok(serde_json::to_string(value)? + "\n")
}

fn reload(switch: &Switch, dry_run: bool, json: bool, out: &mut dyn Write) -> Result<(), CtlError> {
    let Answer::Reloaded(reload) = switch.call(&Request::Reload { dry_run })? else {
        return Err(CtlError::Mismatch);
    };
    print(&show(&reload, Reload::to_text, json)?, out)?;
    if reload.has_failed() { Err(CtlError::Incomplete) } else { Ok(()) }
}

fn print(text: &str, out: &mut dyn Write) -> Result<(), CtlError> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn ask(switch: &Switch, command: &CtlCommand) -> Result<String, CtlError> {
    let (request, json) = match command.clone() {
        CtlCommand::Show(args) => return state(switch, &args),
        CtlCommand::Fdb { change: None, json } => {
            let Answer::Show(snapshot) = switch.call(&Request::Show { addresses: None })? else {
                return Err(CtlError::NoFdb);
            };
            return Ok(if json { pretty(&snapshot.fdb)? } else { snapshot.fdb_to_text() });
        }
        CtlCommand::Fdb { change: Some(change), .. } => match change {
            FdbCommand::Flush { port, vlan, mac, json } => (Request::FlushFdb { port, vlan, mac }, json),
            FdbCommand::Add { mac, port, vlan, runtime, json } => {
                (Request::AddFdb { mac, port, vlan, runtime }, json)
            }
            FdbCommand::Del { mac, vlan, runtime, json } => (Request::RemoveFdb { mac, vlan, runtime }, json),
        },
        CtlCommand::Link { port, state, json } => (Request::Link { port, up: state == LinkState::Up }, json),
        CtlCommand::Mirror { change: None, json }
        | CtlCommand::Mirror { change: Some(MirrorCommand::List { json }), .. } => (Request::Mirrors, json),
        CtlCommand::Mirror { change: Some(change), .. } => match change {
            MirrorCommand::Add { from, to, direction, vlan, json } => {
                let direction = direction.map(Into::into);
                (Request::AddMirror { from, to, direction, vlan }, json)
            }
            MirrorCommand::Remove { from, to, json } => (Request::RemoveMirror { from, to }, json),
            MirrorCommand::List { json } => (Request::Mirrors, json),
        },
        CtlCommand::Denials { port, .. } => (Request::Denials { port, since: DenialCursor::new() }, true),
        CtlCommand::Wire { change, json } => {
            let json = json || change.as_ref().is_some_and(WireCommand::is_json);
            (change.map_or(Request::Wires { wire: None }, WireCommand::request), json)
        }
        CtlCommand::Dump => (Request::Dump, false),
        CtlCommand::Channels { port, count, json, .. } => (Request::Channels { port, combined: count }, json),
        CtlCommand::Steering { port, json } => (Request::Steering { port }, json),
        CtlCommand::Assign { port, queue, worker, runtime, json } => {
            (Request::Assign { port, queue, worker, runtime }, json)
        }
        CtlCommand::Stats { port, queues, json } => (Request::Stats { port, queues }, json),
        CtlCommand::Explain { port, json } => (Request::Explain { port }, json),
        CtlCommand::Why { port: Some(port), peer, json } => (Request::Why { port, peer }, json),
        CtlCommand::Why { json, .. } => (Request::Diagnose, json),
        CtlCommand::Trace(args) => {
            let json = args.json;
            (args.request(), json)
        }
        CtlCommand::Add { port, runtime, json } => (Request::Add { port, runtime }, json),
        CtlCommand::Remove { port, if_exists, drain, runtime, json } => {
            (Request::Remove { port, if_exists, drain, runtime }, json)
        }
        CtlCommand::Reload { dry_run, json } => (Request::Reload { dry_run }, json),
        CtlCommand::Rules { port, json } => (Request::Rules { port }, json),
        CtlCommand::Firewall { port: Some(port), conversations, json } => {
            (Request::Firewall { port, conversations }, json)
        }
        CtlCommand::Firewall { json, .. } => (Request::Firewalls, json),
        CtlCommand::Set { port, settings, runtime, json } => (Request::Set { port, settings, runtime }, json),
        CtlCommand::Quarantine { port, with, runtime, json } => {
            if port == with {
                return Err(CtlError::WithItself(port));
            }
            // A name that no port has would cut the port off from everybody: a question about it is refused.
            switch.call(&Request::Rules { port: with.clone() })?;
            (Request::Set { port, settings: vec![format!("{QUARANTINE}={with}")], runtime }, json)
        }
        CtlCommand::Release { port, runtime, json } => {
            (Request::Unset { port, keys: vec![QUARANTINE.to_owned()], runtime }, json)
        }
        CtlCommand::Unset { port, keys, runtime, json } => (Request::Unset { port, keys, runtime }, json),
    };
    let answer = switch.call(&request)?;
    Ok(match (&request, &answer) {
        (Request::Dump, Answer::Dump(text)) => text.clone(),
        (Request::Channels { .. }, Answer::Channels(channels)) => show(channels, Channels::to_text, json)?,
        (Request::Steering { .. } | Request::Assign { .. }, Answer::Steering(steering)) => {
            show(steering, Steering::to_text, json)?
        }
        (Request::Stats { .. }, Answer::Stats(stats)) => show(stats, Stats::to_text, json)?,
        (Request::Explain { .. }, Answer::Explain(answer)) => show(answer, Explanation::to_text, json)?,
        (Request::Why { .. }, Answer::Why(diagnosis)) => show(diagnosis, Diagnosis::to_text, json)?,
        (Request::Diagnose, Answer::Diagnoses(all)) => show(all, |all| why::all_to_text(all), json)?,
        (Request::Trace(_), Answer::Trace(trace)) => show(&**trace, Trace::to_text, json)?,
        (Request::Add { .. } | Request::Remove { .. }, Answer::PortChanged(change)) => {
            show(change, PortChange::to_text, json)?
        }
        (Request::Firewall { .. }, Answer::Firewall(report)) => {
            show(&**report, FirewallReport::to_text, json)?
        }
        (Request::Firewalls, Answer::Firewalls(all)) => show(all, Firewalls::to_text, json)?,
        (Request::Rules { .. }, Answer::Rules(rules)) => show(rules, PortRules::to_text, json)?,
        (Request::Link { .. }, Answer::LinkChanged(change)) => show(change, LinkChange::to_text, json)?,
        (_, Answer::Mirrors(mirrors)) => show(mirrors, Mirrors::to_text, json)?,
        (_, Answer::Wires(wires)) => show(wires, Wires::to_text, json)?,
        (_, Answer::WireChanged(change)) => show(&**change, WireChange::to_text, json)?,
        (Request::FlushFdb { .. }, Answer::FdbFlushed(flush)) => show(flush, FdbFlush::to_text, json)?,
        (
            Request::Set { .. } | Request::Unset { .. } | Request::AddFdb { .. } | Request::RemoveFdb { .. },
            Answer::SettingsChanged(change),
        ) => show(change, SettingsChange::to_text, json)?,
        _ => return Err(CtlError::Mismatch),
    })
}

fn show<T: serde::Serialize>(answer: &T, to_text: impl Fn(&T) -> String, json: bool) -> io::Result<String> {
    if json { pretty(answer) } else { Ok(to_text(answer)) }
}

fn pretty(value: &impl serde::Serialize) -> io::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

#[cfg(test)]
mod tests;
