//! `ringferry run`: the switch.

use std::io::{self, Write};
use std::os::fd::RawFd;

use ringferry_control as control;
use ringferry_switch::config::ConfigError;
use ringferry_switch::{Passed, RunError, StartError, Switch};
use ringferry_sys::signal::{Signal, Signals};
use ringferry_sys::{inherited, rlimit, systemd};

use crate::run_args::RunArgs;

/// Open files wanted: 256 ports, each with a socket, some memory files in flight and two or three
/// eventfds for each of up to 32 rings.
const OPEN_FILES: u64 = 65536;

/// Why the switch ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration; nothing was started.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Something the configuration names cannot be had; nothing was left running.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The running switch failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The ready descriptor.
    #[error("--ready-fd {0}: {1}: pass the number of an open pipe or socket")]
    ReadyFd(RawFd, io::Error),
    /// The system has no descriptors left.
    #[error("cannot start: {0}")]
    Os(#[from] io::Error),
}

/// Runs the switch until SIGTERM or SIGINT.
///
/// # Errors
/// See [`enum@Error`].
pub fn run(args: &RunArgs) -> Result<(), Error> {
    let mut passed = Passed::new(systemd::listen_fds());
    let ready = match args.ready_fd {
        Some(fd) => Some(inherited::take(fd).map_err(|error| Error::ReadyFd(fd, error))?),
        None => None,
    };
    let config = args.config()?;
    passed.inherit(&config)?;
    let path = config.control.clone().unwrap_or_else(control::default_path);
    // Best effort: a switch with few ports does not need it.
    let _ = rlimit::raise_open_files(OPEN_FILES);
    let signals = Signals::new(&[Signal::TERM, Signal::INT])?;
    let ports = config.ports.len();
    let switch = Switch::start(config, path.clone(), passed)?;
    tracing::info!(ports, control = %path.display(), "the switch is up");
    let _ = systemd::ready();
    if let Some(ready) = ready {
        // Whoever asked may have gone; that is their business.
        let _ = std::fs::File::from(ready).write_all(b"READY\n");
    }
    let result = switch.run(&signals);
    let _ = systemd::stopping();
    Ok(result?)
}
