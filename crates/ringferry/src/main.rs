//! ringferry carries packets between virtual machines, and between them and the host, in user space.
#![forbid(unsafe_code)]

mod capture;
mod completion;
mod ctl;
mod demo;
mod error_report;
mod http;
mod keep;
mod lab;
mod log;
mod manuals;
mod metrics;
mod ovs;
mod page;
mod run;
mod run_args;
mod sandbox;
#[cfg(test)]
mod schemas;
mod top;
mod traffic;

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use clap::{ArgAction, Parser, Subcommand};
use ringferry_guest::{guest, netfront};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

/// Carries packets between virtual machines, and between them and the host, in user space.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, after_help = EXAMPLES)]
struct Cli {
    /// Log more: -v for what each message of a front end does, -vv for everything. RUST_LOG overrides it.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,

    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  ringferry demo                                     see it work: two guests, one switch, real TCP and UDP
  ringferry run --port vhost-user:/run/ringferry/vm0.sock --port tap:rf0
  ringferry ctl show
  ringferry guest --socket /run/ringferry/vm0.sock --tap eth0 --address 10.0.0.2/24";

#[derive(Debug, Subcommand)]
enum Command {
    /// Shows the whole thing at work on this machine: needs no VM, leaves nothing behind.
    Demo(demo::Args),
    /// The switch that virtual machines plug into.
    Run(run_args::RunArgs),
    /// Runs a switch that survives being killed.
    Keep(keep::KeepArgs),
    /// Asks a running switch.
    Ctl(ctl::CtlArgs),
    /// Captures packets of a running switch, for Wireshark and tcpdump.
    Capture(capture::CaptureArgs),
    /// Shows what a running switch does now: a screen each second.
    Top(top::TopArgs),
    /// Serves a page with what a running switch does now, for a browser.
    Page(page::PageArgs),
    /// Serves what a running switch counts, for Prometheus.
    Metrics(metrics::MetricsArgs),
    /// Plugs a tap into a vhost-user back end, as a virtual machine would be.
    Guest(guest::GuestArgs),
    /// Plugs a tap into a Xen network back end, as a guest would be.
    Netfront(netfront::NetfrontArgs),
    /// Measures data paths, compares the results, and draws them (the program ringferry-lab).
    #[command(disable_help_flag = true)]
    Lab(lab::LabArgs),
    /// Generates traffic and verifies every byte of it.
    Traffic(traffic::Args),
    /// Writes the manual pages and the completions of the shells.
    Manuals(manuals::ManualsArgs),
    /// Answers what libvirt asks of Open vSwitch's program of this name, for ports of a running switch.
    #[command(hide = true, disable_help_flag = true)]
    OvsVsctl(ovs::OvsArgs),
    /// Becomes `run`, for `keep`.
    #[command(hide = true, disable_help_flag = true)]
    Kept {
        /// What follows `run`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<std::ffi::OsString>,
    },
    /// The process that `run` starts beside itself, to do what its sandbox forbids.
    #[command(hide = true)]
    PrivilegedHelper,
}

fn main() -> ExitCode {
    completion::answer_shell();
    let cli = Cli::parse();
    // A process that this program has started from `/proc/self/exe` would be shown as `exe`.
    let _ = rustix::thread::set_name(c"ringferry");
    let level = match cli.verbose {
        0 => LevelFilter::INFO,
        1 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let said = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty());
    let asked = said.as_ref().and_then(|text| text.parse::<Targets>().ok());
    // Whoever asks for more wants all of it.
    let limited = cli.verbose == 0 && asked.is_none();
    let filter = asked.clone().unwrap_or_else(|| Targets::new().with_default(level));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(log::Lines)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .log_internal_errors(false);
    let lines = if log::is_journal() { lines.without_time().boxed() } else { lines.boxed() };
    let lines = lines.with_filter(log::Limit);
    tracing_subscriber::registry().with(filter).with(lines).init();
    if let (None, Some(text)) = (&asked, &said) {
        tracing::warn!(
            "RUST_LOG={text:?} is not understood: it takes levels, and levels of modules, as in info,ringferry_switch=debug"
        );
    }
    let code = match &cli.command {
        Command::Demo(args) => demo::run(args).map_or_else(|error| failed(&error, error.exit_code()), ok),
        Command::Run(args) => {
            run::run(args, limited).map_or_else(|error| failed(&error, error.exit_code()), ok)
        }
        Command::Keep(args) => keep::run(args).map_or_else(|error| failed(&error, 1), ok),
        Command::Kept { arguments } => failed(&keep::become_run(arguments), 1),
        Command::Capture(args) => told(capture::run(args), capture::CaptureError::is_told),
        Command::Ctl(args) => told(ctl::run(args, &mut io::stdout(), ctl::width()), ctl::CtlError::is_told),
        Command::Top(args) => told(top::run(args, &mut io::stdout()), top::TopError::is_told),
        Command::Guest(args) => guest::run(args).map_or_else(|error| failed(&error, 1), ok),
        Command::Netfront(args) => netfront::run(args).map_or_else(|error| failed(&error, 1), ok),
        Command::Lab(args) => failed(&lab::run(args, cli.verbose), 2),
        Command::Manuals(args) => manuals::run(args).map_or_else(|error| failed(&error, 1), ok),
        Command::Metrics(args) => metrics::run(args).map_or_else(|error| failed(&error, 1), ok),
        Command::Page(args) => page::run(args).map_or_else(|error| failed(&error, 1), ok),
        Command::OvsVsctl(args) => ovs::run(args).map_or_else(|error| failed(&error, 1), ok),
        Command::PrivilegedHelper => sandbox::run_helper().map_or_else(|error| failed(&error, 1), ok),
        Command::Traffic(args) => traffic::run(args).map_or_else(|error| failed(&error, 1), ok),
    };
    log::flush();
    code
}

/// Says why the program ends, and with which code.
fn failed(error: &dyn std::error::Error, code: u8) -> ExitCode {
    log::say_end(error);
    ExitCode::from(code)
}

/// Ends a command whose output may have said all that is to be said of an error.
fn told<E: std::error::Error>(result: Result<(), E>, is_told: fn(&E) -> bool) -> ExitCode {
    match result {
        Err(error) if is_told(&error) => ExitCode::from(1),
        result => result.map_or_else(|error| failed(&error, 1), ok),
    }
}

fn ok(_: ()) -> ExitCode {
    ExitCode::SUCCESS
}
