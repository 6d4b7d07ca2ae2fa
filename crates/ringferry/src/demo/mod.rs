//! `ringferry demo`: the main job on real traffic, on any Linux machine, with nothing installed.
//!
//! [`network`] starts this program several times: the switch, two guests in namespaces, traffic between
//! them. [`measure`] looks before and after each test, [`report`] is what is printed. [`supervisor`] owns
//! the processes and ends them on success, error and signal alike.

mod measure;
mod network;
mod progress;
pub mod report;
mod supervisor;

use measure::Drops;
use network::Network;
use progress::Display;
use report::{Document, Idle, Machine, Outcome};
use ringferry_control::ControlError;
use ringferry_sys::namespace::{self, NamespaceError};
use ringferry_sys::signal::Signal;
use rustix::thread::CapabilitySet;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

/// How long idle CPU use is looked at.
const IDLE: Duration = Duration::from_secs(1);

/// The tests: name, mode of the traffic generator, block size in bytes. 1472 bytes of UDP payload fill an
/// MTU of 1500.
const TESTS: [(&str, &str, usize); 5] = [
    ("TCP a to b", "tcp", 128 << 10),
    ("TCP b to a", "tcp-reverse", 128 << 10),
    ("TCP both at once", "tcp-both", 128 << 10),
    ("UDP MTU 1500, no offload", "udp", 1472),
    ("request/response 1 B", "rr", 1),
];

const EXAMPLES: &str = "\
Examples:
  ringferry demo
  ringferry demo --seconds 10 --json > result.json
  ringferry demo --keep

Needs no VM, no huge pages, and no root where user namespaces are allowed. Exits with 0 when every test passed,
1 when one failed, 128 + N after signal N (130 for Ctrl-C); everything it started is ended and removed in each case.";

/// Two guests exchange real traffic through the switch, measured
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// How long each of the five tests sends, in seconds
    #[arg(long, default_value_t = 3.0, value_name = "SECONDS", value_parser = seconds)]
    seconds: f64,
    /// Print one JSON document in place of progress and table
    #[arg(long)]
    json: bool,
    /// Afterwards leave the network up until Ctrl-C, and print how to look at it
    #[arg(long)]
    keep: bool,
}

/// A reason why the demo failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the demo needs network namespaces: {0}")]
    Namespace(#[from] NamespaceError),
    /// No directory for the sockets.
    #[error(
        "cannot make the directory {path} for sockets: {source}; set TMPDIR to a writable directory with a short path"
    )]
    Directory { path: PathBuf, source: io::Error },
    /// Something that works on any Linux machine did not.
    #[error("{doing} failed: {source}")]
    Setup {
        /// The action that failed, for the message.
        doing: &'static str,
        source: io::Error,
    },
    /// A child did not start.
    #[error("cannot start {name}: {source}")]
    Start { name: &'static str, source: io::Error },
    /// A child ended that should not.
    #[error("{name} ended early ({status}); {tail}")]
    Died {
        name: &'static str,
        status: ExitStatus,
        /// The last lines that it printed.
        tail: String,
    },
    /// A child took too long.
    #[error("{name} {what} after {seconds} s; {tail}")]
    Late {
        name: &'static str,
        /// The event that did not happen, for the message.
        what: &'static str,
        seconds: u64,
        /// The last lines that it printed.
        tail: String,
    },
    /// The switch does not tell its state.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// Somebody else has the socket that the switch was given.
    #[error("the demo's control socket is answered by a program that is no switch")]
    NoSwitch,
    /// Tests failed; the report says which and why.
    #[error("{0} of {total} tests failed", total = TESTS.len())]
    Tests(usize),
    /// Ctrl-C or a request to end.
    #[error("interrupted; everything the demo started has been ended and removed")]
    Interrupted(Signal),
}

impl Error {
    /// The exit code of the program.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Interrupted(signal) => u8::try_from(128 + signal.as_raw()).unwrap_or(1),
            _ => 1,
        }
    }

    fn setup(doing: &'static str) -> impl Fn(io::Error) -> Error {
        move |source| Error::Setup { doing, source }
    }
}

/// Runs `ringferry demo`. Must be called before the process has started a thread. An error is for the
/// caller to print, with [`Error::exit_code`].
pub fn run(args: &Args) -> Result<(), Error> {
    let contained = !may_make_namespaces();
    if contained {
        namespace::enter_user_namespace()?;
    }
    let mut display = Display::new(args.json);
    display.begin("starting the switch and two guests".into());
    let mut network = Network::start()?;
    let document = measure_all(&mut network, &mut display, args.seconds, contained)?;
    drop(display);
    let text = if args.json { format!("{:#}\n", serde_json::json!(document)) } else { document.render() };
    // A reader that went away is no reason to skip the clean-up below.
    let _ = io::stdout().write_all(text.as_bytes());
    if args.keep {
        eprint!("\nThe network stays up until Ctrl-C.\n{}", network.directions(contained));
        match network.watch_for_ever() {
            Error::Interrupted(_) => {}
            error => return Err(error),
        }
    }
    match document.tests.iter().filter(|test| test.error.is_some()).count() {
        0 => Ok(()),
        failed => Err(Error::Tests(failed)),
    }
}

fn measure_all(
    network: &mut Network,
    display: &mut Display,
    seconds: f64,
    user_namespace: bool,
) -> Result<Document, Error> {
    let mut tests = Vec::new();
    let mut drops = Drops::new();
    let mut before = network.snapshot()?;
    for (index, (name, mode, size)) in TESTS.into_iter().enumerate() {
        display.begin(format!("[{}/{}] {name}", index + 1, TESTS.len()));
        let traffic = network.traffic(mode, size, seconds, &mut |progress| display.update(progress))?;
        let after = network.snapshot()?;
        let cost = after.since(&before);
        for (reason, count) in &cost.drops {
            *drops.entry(reason.clone()).or_default() += count;
        }
        tests.push(Outcome::new(name, traffic, cost));
        before = after;
    }
    display.begin("idle".into());
    before = network.snapshot()?;
    network.watch(IDLE)?;
    let after = network.snapshot()?;
    let idle = after.since(&before);
    Ok(Document {
        ringferry: env!("CARGO_PKG_VERSION"),
        command: std::env::args().collect::<Vec<_>>().join(" "),
        machine: Machine::here(),
        user_namespace,
        tests,
        idle: Idle { seconds: idle.seconds, cpu_seconds: idle.cpu_seconds },
        ports: after.ports().to_vec(),
        drops,
    })
}

/// Returns true if this process may make network namespaces and configure what is in them.
fn may_make_namespaces() -> bool {
    let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN;
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(needed))
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.2..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("give a number of seconds between 0.2 and 3600".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_follow_the_shells_convention_for_signals() {
        assert_eq!(Error::Interrupted(Signal::INT).exit_code(), 130);
        assert_eq!(Error::Interrupted(Signal::TERM).exit_code(), 143);
        assert_eq!(Error::Tests(1).exit_code(), 1);
    }

    #[test]
    fn a_test_lasts_a_sensible_time() {
        assert_eq!(seconds("0.5"), Ok(0.5));
        assert!(["0", "0.1", "nan", "-3", "1e9", "x"].into_iter().all(|text| seconds(text).is_err()));
    }
}
