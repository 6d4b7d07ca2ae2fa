//! `ringferry run`: the switch.

use std::io::{self, Write};
use std::path::Path;

use ringferry_control as control;
use ringferry_switch::config::{Config, ConfigError};
use ringferry_switch::privileged::Privileges;
use ringferry_switch::{Ended, Manager, OpenSwitch, Passed, RunError, StartError, SuccessionError, Switch};
use ringferry_sys::signal::{Signal, Signals};
use ringferry_sys::socket::MAX_PATH;
use ringferry_sys::systemd::{self, Notifier};
use ringferry_sys::{lifeline, rlimit};

use crate::run_args::{OnOff, RunArgs};
use crate::{log, sandbox};
use ringferry_sys::ready::{Ready, ReadyError};

pub(crate) mod check;
mod replace;

/// Open files wanted: 256 ports, each with a socket, some memory files in flight and two or three
/// eventfds for each of up to 32 rings.
pub(crate) const OPEN_FILES: u64 = 65536;

/// The exit status of a switch that is to be started anew, as nobody has its ports: EX_TEMPFAIL of sysexits(3).
pub const ORPHANED: u8 = 75;

/// A reason why the switch ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration; nothing was started.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Something the configuration names cannot be had; nothing was left running.
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Run(#[from] RunError),
    /// Another switch was to be replaced, and goes on.
    #[error(transparent)]
    Succession(#[from] SuccessionError),
    /// A flag that says how another switch is replaced, and none is.
    #[error("--background and --if-changed say how a running switch is replaced: give --replace as well")]
    NothingToReplace,
    /// It was replaced by a process that was killed at once. The program ends with [`ORPHANED`].
    #[error(
        "the process that has taken over was killed before it ran, so nobody serves the ports: start the switch anew, unless whoever keeps it (`ringferry keep`, systemd) does"
    )]
    Orphaned,
    /// The process in the background has ended, and has said why.
    #[error("no switch was replaced; the reason is above")]
    Background,
    /// Another switch was to be replaced, and goes on, as this one could have no sandbox.
    #[error(
        "there would be no sandbox, as its helper cannot be started ({0}), so the running switch, which may be in one, goes on: \
         mend that (the helper is this program once more, and finds it at /proc/self/exe), or give --sandbox off to go on without a sandbox"
    )]
    NoSandbox(io::Error),
    #[error(transparent)]
    Ready(#[from] ReadyError),
    /// The configuration is valid, and names what this host has not.
    #[error("the configuration is valid, and no switch would start with it here:\n{0}")]
    Missing(String),
    /// The system has no descriptors left.
    #[error("cannot start: {0}")]
    Os(#[from] io::Error),
}

impl Error {
    /// Returns the exit status of the program.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, Error::Orphaned) { ORPHANED } else { 1 }
    }
}

/// Runs the switch until SIGTERM or SIGINT. `limited` bounds the rate of its log lines.
///
/// # Errors
/// See [`enum@Error`].
pub fn run(args: &RunArgs, limited: bool) -> Result<(), Error> {
    if args.print_capabilities {
        // The schema is QEMU's docs/interop/vhost-user.json; a network back end has no features in it.
        let _ = writeln!(io::stdout(), "{}", serde_json::json!({ "type": "net" }));
        return Ok(());
    }
    if args.check {
        return check::check(args);
    }
    if args.replace {
        return replace::run(args, limited);
    }
    // clap asks for --replace only where no port is given, which conflicts with it.
    if args.background || args.if_changed {
        return Err(Error::NothingToReplace);
    }
    let mut passed = Passed::new(systemd::listen_fds());
    let ready = args.ready_fd.map(Ready::take).transpose()?;
    // Whoever follows a process that was killed does as that did, whatever has become of the file.
    let config = match passed.config() {
        Some(config) => config,
        None => args.config()?,
    };
    for oddity in config.oddities() {
        tracing::warn!("{oddity}");
    }
    passed.inherit(&config)?;
    lifeline::hold();
    let path = config.control.clone().unwrap_or_else(control::default_path);
    // Whoever looks for a socket whose file is gone knows it by its whole path, if the kernel takes one of that length.
    let path =
        std::path::absolute(&path).ok().filter(|path| path.as_os_str().len() <= MAX_PATH).unwrap_or(path);
    let process = Process::begin(args, &config, &path, NoHelper::Serve)?;
    if let Some(privileges) = &process.privileges.0 {
        passed.set_privileges(privileges.clone());
    }
    let ports = config.ports.len();
    let sandboxed = process.privileges.0.is_some().then(|| config.clone());
    let switch = process.keep(Switch::open(config, path.clone(), passed)?);
    if let Some(config) = sandboxed {
        sandbox::enter(&config);
    }
    let switch = switch.start()?;
    // From here on peers are served, and none of their doings may make us wait for whoever reads the log.
    log::in_background(limited)?;
    tracing::info!(ports, control = %path.display(), "the switch is up");
    process.serve(switch, ready)
}

/// What becomes of a switch whose helper cannot be started, so that it can have no sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoHelper {
    /// It serves without one: no switch at all would be worse.
    Serve,
    /// It does not start, as one that may be in a sandbox goes on instead.
    GiveUp,
}

/// What the process of a switch has, before it has ports.
struct Process {
    signals: Signals,
    manager: Notifier,
    /// Dropped after the switch, however that ends.
    privileges: Tidy,
}

impl Process {
    fn begin(args: &RunArgs, config: &Config, control: &Path, no_helper: NoHelper) -> Result<Process, Error> {
        // Best effort: a switch with few ports does not need it.
        let limit = rlimit::raise_open_files(OPEN_FILES).unwrap_or(0);
        let _ = rlimit::make_room(io::stderr(), limit.min(OPEN_FILES));
        // The last three would end us if nobody took them: terminals that close and tools that rotate logs send them.
        let signals = Signals::new(&[Signal::TERM, Signal::INT, Signal::HUP, Signal::USR1, Signal::USR2])?;
        // It is connected to now, as the sandbox allows no connections.
        let manager = Notifier::connect().unwrap_or_else(|_| Notifier::nobody());
        let privileges = match args.sandbox {
            // Without a helper there is no sandbox either, as the switch could then not do all of its work.
            OnOff::On => match (sandbox::begin(config, control), no_helper) {
                (Ok(privileges), _) => Some(privileges),
                (Err(error), NoHelper::GiveUp) => return Err(Error::NoSandbox(error)),
                (Err(error), NoHelper::Serve) => {
                    tracing::warn!("no sandbox: its helper cannot be started: {error}");
                    None
                }
            },
            OnOff::Off => {
                tracing::warn!("no sandbox, as was asked for");
                None
            }
        };
        Ok(Process { signals, manager, privileges: Tidy(privileges) })
    }

    /// Has the service manager keep the state of the switch, if it keeps anything.
    fn keep(&self, switch: OpenSwitch) -> OpenSwitch {
        match Notifier::connect() {
            Ok(manager) if systemd::store_limit() > 0 => switch.keep_with(manager),
            _ => switch,
        }
    }

    /// Returns true if the manager of this process would keep the switch, and is another one than `manager`.
    fn is_kept_beside(&self, manager: &Notifier) -> bool {
        systemd::store_limit() > 0
            && self.manager.connection().is_some()
            && !self.manager.has_manager_of(manager)
    }

    /// Says that the switch is ready, and runs it.
    fn serve(mut self, mut switch: Switch, ready: Option<Ready>) -> Result<(), Error> {
        let _ = self.manager.ready();
        if let Some(ready) = ready {
            ready.say();
        }
        switch.set_manager(Manager::new(self.manager, systemd::watchdog_interval()));
        let ended = switch.run(&self.signals)?;
        if let Ended::Replaced(_) | Ended::Orphaned = ended {
            // The files of its sockets are the other process's now, or the next one's.
            self.privileges.0 = None;
        }
        match ended {
            Ended::Orphaned => Err(Error::Orphaned),
            Ended::Replaced(_) | Ended::Stopped => Ok(()),
        }
    }
}

/// Has the files of the sockets removed when it is dropped. In its sandbox the switch cannot do so itself.
struct Tidy(Option<Privileges>);

impl Drop for Tidy {
    fn drop(&mut self) {
        if let Some(privileges) = &self.0 {
            privileges.tidy();
        }
    }
}
