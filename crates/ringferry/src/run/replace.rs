//! `ringferry run --replace`: takes over from the switch that runs.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use ringferry_switch::{SuccessionError, Successor};
use ringferry_sys::lifeline;
use ringferry_sys::process::{Spawn, spawn};
use ringferry_sys::signal::Signal;

use super::{Error, NoHelper, Process};
use crate::run_args::RunArgs;
use crate::{log, sandbox};
use ringferry_sys::ready::Ready;

/// Number of the descriptor at which the process in the background says that it is ready.
const READY: i32 = 3;

/// Takes over, and runs the switch.
///
/// # Errors
/// See [`enum@Error`]: the switch that runs goes on.
pub(super) fn run(args: &RunArgs, limited: bool) -> Result<(), Error> {
    let control = args.control_of_running()?;
    if args.background {
        return in_background();
    }
    let ready = args.ready_fd.map(Ready::take).transpose()?;
    lifeline::hold();
    let successor = Successor::connect(&control)?;
    if args.if_changed && successor.is_of_this_program() {
        successor.decline();
        tracing::info!("the switch that runs is of this very program, and goes on");
        if let Some(ready) = ready {
            ready.say();
        }
        return Ok(());
    }
    if let Some(file) = &args.file {
        tracing::info!(
            file = %file.display(),
            "the configuration in force goes along, and this file is not read: ctl reload does that"
        );
    }
    let (config, ports) = (successor.config().clone(), successor.config().ports.len());
    let no_helper = if successor.may_be_in_sandbox() { NoHelper::GiveUp } else { NoHelper::Serve };
    let mut process = Process::begin(args, &config, &control, no_helper)?;
    let privileges = process.privileges.0.clone();
    let taken = successor.open(privileges.clone().unwrap_or_default()).and_then(|switch| {
        let switch = match switch.manager() {
            Some(manager) if process.is_kept_beside(manager) => return Err(SuccessionError::Kept),
            Some(_) => switch,
            None => process.keep(switch),
        };
        if privileges.is_some() {
            sandbox::enter(&config);
        }
        let mut switch = switch.start()?;
        log::in_background(limited)?;
        // Until it is too late; from then on such a signal ends the switch, which is this process.
        switch.take_over(|| std::iter::from_fn(|| process.signals.next().ok().flatten()).any(ends))?;
        Ok(switch)
    });
    let switch = match taken {
        Ok(switch) => switch,
        Err(error) => {
            // The files of its sockets are still the other process's.
            process.privileges.0 = None;
            return Err(error.into());
        }
    };
    tracing::info!(ports, control = %control.display(), "the switch is up");
    process.serve(switch, ready)
}

/// Whether a signal tells a process to end.
fn ends(signal: Signal) -> bool {
    matches!(signal, Signal::TERM | Signal::INT)
}

/// Starts this program once more, with the same arguments but one, and waits until it has taken over or given up.
fn in_background() -> Result<(), Error> {
    let (ours, theirs) = std::io::pipe()?;
    let theirs = OwnedFd::from(theirs);
    let arguments = std::env::args_os().skip(1).filter(|argument| argument != "--background");
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ringferry").args(arguments).arg(format!("--ready-fd={READY}"));
    // Its log goes where this one's does. Whoever reads what this process prints is not to wait for its end.
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let spawn_with = Spawn { new_session: true, keep_fds: vec![(theirs, READY)], ..Spawn::default() };
    let mut child = spawn(&mut command, spawn_with)?;
    drop(command);
    let mut said = String::new();
    let _ = File::from(OwnedFd::from(ours)).read_to_string(&mut said);
    if said.starts_with("READY") {
        return Ok(());
    }
    let _ = child.wait();
    Err(Error::Background)
}
