//! `ringferry keep`: runs a switch, keeps what the next one needs if that is killed, and starts the next one at once.
//!
//! The program that it starts is the one that lies where its own lay, so that the next switch after an upgrade is the newer program. One that cannot serve
//! is followed by this process's own, with the same, until yet another one lies there.
//!
//! It is what systemd is to a service with `FileDescriptorStoreMax=`, for where there is no systemd, and speaks the same protocol (sd_notify(3),
//! `FDSTORE=1`). It parses nothing that a guest has written, holds descriptors by name, and has nothing else to do.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Display;
use std::fs::{Metadata, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use ringferry_control as control;
use ringferry_sys::closer::{Closer, LeftBehind};
use ringferry_sys::process::{Spawn, spawn_inheriting};
use ringferry_sys::signal::{Signal, Signals};
use ringferry_sys::systemd::{LISTEN_FDNUMBERS, Manager, Notifier, Said};
use ringferry_sys::{lifeline, rlimit};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, kill_process, pidfd_open};

use crate::run::{OPEN_FILES, ORPHANED};
use ringferry_sys::ready::{Ready, ReadyError};

/// Most descriptors that are kept.
const MOST: usize = 8192;

/// Files that a process can usually have open, where the limit cannot be changed.
const USUAL: u64 = 1024;

/// Descriptors that this process has for itself, and for messages that it has not read yet.
const OWN: usize = 64;

/// Time within which a switch is ready, which takes milliseconds, and a second with hundreds of ports.
const START: Duration = Duration::from_secs(10);

/// Threads that may each wait for good for a descriptor that cannot be closed. What is to be closed then waits for the last of them.
const MOST_LEFT_BEHIND: usize = 64;

/// The file of this process's program, also when it lies nowhere any more.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// The number of the first descriptor that may be one's own to pass.
const FIRST: i32 = 3;

/// For how long a switch whose lifeline is cut is waited for, so that the log can say how it has ended. It takes well below a millisecond as a rule.
const DYING: Duration = Duration::from_millis(20);

/// Descriptors that are kept have numbers from here on, here and in the switch that inherits them: above all that either has for itself when it starts another process,
/// which need not close them so.
pub(crate) const KEPT: RawFd = 1024;

/// Starts within [`WINDOW`] after which it gives up: the next switch would be killed, too.
const STARTS: usize = 10;
const WINDOW: Duration = Duration::from_secs(10);

/// Shown below the options by `ringferry keep --help`.
const EXAMPLES: &str = "\
Examples:
  ringferry keep -- --port vhost-user:/run/ringferry/vm0.sock --port tap:rf0
  ringferry keep /etc/ringferry/ringferry.toml
  ringferry keep -- --replace                        take over from a switch that runs, and keep it from now on

With systemd it is not needed: contrib/systemd/ringferry.service has systemd keep the same.";

/// Runs a switch that survives being killed: what its guests and taps need is kept outside of it, and the next one goes on at once.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct KeepArgs {
    /// What follows `ringferry run`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "RUN-ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// A reason why nothing is kept any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A descriptor is given by its number.
    #[error(
        "{0}: descriptors of the parent process, and what they are for, do not outlive a switch: give a path, or the name of a tap"
    )]
    Numbered(String),
    /// The switch has ended by itself.
    #[error("what this has started has ended: {0}")]
    Ended(ExitStatus),
    /// It was killed again and again.
    #[error("the switch was killed {STARTS} times in {} s, the last time by {killed}: it is not started again", WINDOW.as_secs())]
    Often {
        /// How it has ended the last time.
        killed: String,
    },
    /// The system has no descriptors or processes left.
    #[error(transparent)]
    Os(#[from] io::Error),
}

/// Runs a switch until it ends by itself.
///
/// # Errors
/// See [`enum@Error`].
pub fn run(args: &KeepArgs) -> Result<(), Error> {
    let (mut arguments, ready) = sort_out(&args.arguments)?;
    // Whoever may write to the socket says which process is the switch: nobody else may, whatever the umask.
    let place = tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir()?;
    let socket = place.path().join("notify");
    let mut keeper = Keeper {
        manager: Manager::bind(&socket)?,
        above: Notifier::connect().unwrap_or_else(|_| Notifier::nobody()),
        kept: Kept::new(),
        most: most(rlimit::raise_open_files(OPEN_FILES).unwrap_or(USUAL)),
        ready,
        was_ready: false,
        stopping: false,
        successor: None,
        lifeline: None,
        dead: Vec::new(),
        is_early: false,
    };
    let signals = Signals::new(&[Signal::TERM, Signal::INT, Signal::HUP, Signal::USR1, Signal::USR2])?;
    let mut starts = Vec::new();
    let mut program = Program::own();
    loop {
        let (path, newer) = program.path();
        let mut command = Command::new(path);
        command.arg0("ringferry").arg("kept").args(&arguments);
        command.env("NOTIFY_SOCKET", &socket).env("FDSTORE", keeper.most.to_string());
        let (child, lifeline) = match (keeper.start(command), newer) {
            (Err(error), Some(file)) => {
                program.give_up(file, &error);
                continue;
            }
            (started, _) => started?,
        };
        let ended = keeper.serve(child, lifeline, &signals, newer)?;
        let killed = match (ended, newer) {
            (End::Orderly, _) => return Ok(()),
            // A port of which nothing is kept has a socket or a tap that is in use until the kernel has closed it.
            (End::Failed(status), _) if !keeper.was_ready && keeper.is_early => {
                tracing::warn!(
                    "the switch that was to go on has ended ({status}), and is started again once the kernel has closed what the one that was killed had"
                );
                keeper.bury();
                continue;
            }
            (End::Failed(status), Some(file)) if !keeper.was_ready => {
                program.give_up(file, &status);
                continue;
            }
            (End::Late(file), _) => {
                program.give_up(file, &format!("it was not ready after {} s", START.as_secs()));
                continue;
            }
            // What could not go on with what is kept may be able to begin afresh.
            (End::Failed(status), _) if !keeper.was_ready && !keeper.kept.is_empty() => {
                keeper.kept.clear();
                tracing::error!(
                    "the switch that was to go on has ended ({status}): one is started without anything of the one that was killed"
                );
                continue;
            }
            // Only who is killed is followed: a configuration that is refused now will be refused then.
            (End::Failed(status), _) => return Err(Error::Ended(status)),
            (End::Killed(how), _) => how,
        };
        let now = Instant::now();
        starts.retain(|start: &Instant| now - *start < WINDOW);
        starts.push(now);
        if starts.len() >= STARTS {
            return Err(Error::Often { killed });
        }
        // Whoever goes on with what is kept replaces nobody.
        if !keeper.kept.is_empty() {
            arguments.retain(|argument| argument != "--replace");
        }
        tracing::warn!(
            descriptors = keeper.kept.len(),
            "the switch was killed ({killed}), and is started again"
        );
    }
}

/// The program that is started.
struct Program {
    /// Where that of this process lay at its start.
    path: Option<PathBuf>,
    /// It is this very file, by device and inode.
    own: Option<(u64, u64)>,
    /// The file that lay there last and could not serve.
    given_up: Option<FileId>,
}

/// Tells a file from any other that lies in its place before or after it: device, inode, and when it was last changed.
type FileId = (u64, u64, (i64, i64));

fn id(file: &Metadata) -> FileId {
    (file.dev(), file.ino(), (file.ctime(), file.ctime_nsec()))
}

impl Program {
    fn own() -> Program {
        let path = std::env::current_exe().ok();
        // By its own name, as another one may lie in its place already.
        let own = std::fs::metadata(OWN_PROGRAM).ok();
        Program { own: own.map(|file| (file.dev(), file.ino())), path, given_up: None }
    }

    /// Returns the path of the program, and which file that is if it is not the one of this process. Only its owner can have put another one there: whoever may change what
    /// root, or this process's user, starts.
    fn path(&self) -> (&Path, Option<FileId>) {
        let found = self.path.as_deref().and_then(|path| Some((path, std::fs::metadata(path).ok()?)));
        let newer = found.filter(|(_, file)| {
            // A file changes when a link to it is made, and is this process's own still.
            let is_own = Some((file.dev(), file.ino())) == self.own;
            file.is_file() && file.mode() & 0o111 != 0 && !is_own && Some(id(file)) != self.given_up
        });
        match newer {
            Some((path, file)) => (path, Some(id(&file))),
            None => (Path::new(OWN_PROGRAM), None),
        }
    }

    /// The file there is not started again; one that takes its place is.
    fn give_up(&mut self, file: FileId, why: &dyn Display) {
        self.given_up = Some(file);
        if let Some(path) = &self.path {
            tracing::error!(
                "the program that is at {} by now cannot serve ({why}): the one that keeps the switch is started, until another one is there",
                path.display()
            );
        }
    }
}

/// Most descriptors that can be kept where so many files can be open: each is open twice for a moment.
fn most(open_files: u64) -> usize {
    usize::try_from(open_files / 2).unwrap_or(MOST).saturating_sub(OWN).min(MOST)
}

/// How a switch has ended.
enum End {
    /// As it was told to.
    Orderly,
    /// By itself.
    Failed(ExitStatus),
    /// By somebody else, as far as is known.
    Killed(String),
    /// By this process, as it was not ready in time, and was of this file, in whose place there is another one.
    Late(FileId),
}

/// Takes `--ready-fd` out of the arguments of a switch, which is for the first one only and is answered here. Its number is one of those under which the next
/// one inherits what was kept, and so are those of ports that are given as descriptors.
fn sort_out(arguments: &[OsString]) -> Result<(Vec<OsString>, Option<Ready>), Error> {
    let (mut rest, mut ready) = (Vec::new(), None);
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let text = argument.to_string_lossy();
        if ["vhost-user-fd:", "tap-fd:", "--fd"].iter().any(|port| text.starts_with(port)) {
            return Err(Error::Numbered(text.into_owned()));
        }
        let number = match text.strip_prefix("--ready-fd") {
            Some("") => arguments.next().map(|number| number.to_string_lossy().into_owned()),
            Some(number) => number.strip_prefix('=').map(str::to_owned),
            None => {
                rest.push(argument.clone());
                continue;
            }
        };
        let number = number.and_then(|number| number.parse().ok()).filter(|number| *number >= FIRST);
        let number = number.ok_or_else(|| Error::Numbered("--ready-fd".to_owned()))?;
        ready = Some(Ready::take(number).map_err(|ReadyError(_, error)| error)?);
    }
    Ok((rest, ready))
}

/// `ringferry kept`: becomes `ringferry run` with the descriptors that its parent has passed, which are for this very process.
pub fn become_run(arguments: &[OsString]) -> io::Error {
    let mut command = Command::new(OWN_PROGRAM);
    command
        .arg0("ringferry")
        .arg("run")
        .args(arguments)
        .env("LISTEN_PID", std::process::id().to_string())
        .exec()
}

/// A switch that was killed, whose end the kernel has not told yet.
struct Dying {
    process: OwnedFd,
    /// It is a child of this process.
    child: Option<Child>,
}

impl Dying {
    fn has_ended(&mut self) -> bool {
        let mut fds = [PollFd::new(&self.process, PollFlags::IN)];
        let has_ended =
            rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ended| ended > 0);
        // It does not wait any more.
        has_ended && self.child.take().is_none_or(|mut child| child.wait().is_ok())
    }
}

/// The descriptors that are kept, by name.
///
/// A front end chooses some of these files, or what lies unread in them, and the last copy may be the one here: to close a socket that lingers takes as long as its
/// owner likes. The thread that starts the next switch does not wait for that.
struct Kept {
    files: BTreeMap<String, OwnedFd>,
    closer: Closer,
    left_behind: LeftBehind,
}

impl Kept {
    fn new() -> Kept {
        Kept {
            files: BTreeMap::new(),
            closer: Closer::new(),
            left_behind: LeftBehind::at_most(MOST_LEFT_BEHIND),
        }
    }

    fn len(&self) -> usize {
        self.files.len()
    }

    fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Descriptors that are open, kept or not.
    fn open(&self) -> usize {
        self.files.len() + self.closer.waiting() + self.left_behind.waiting()
    }

    fn insert(&mut self, name: String, fd: OwnedFd) {
        // It stays where it is if there may be no such number.
        let fd = match rustix::io::fcntl_dupfd_cloexec(&fd, KEPT) {
            Ok(moved) => {
                self.let_go(fd);
                moved
            }
            Err(_) => fd,
        };
        if let Some(before) = self.files.insert(name, fd) {
            self.let_go(before);
        }
    }

    fn remove(&mut self, name: &str) {
        if let Some(fd) = self.files.remove(name) {
            self.let_go(fd);
        }
    }

    fn clear(&mut self) {
        for fd in std::mem::take(&mut self.files).into_values() {
            self.let_go(fd);
        }
    }

    /// Closes a descriptor: at once that of a tap, which is the switch's own, and cannot be opened anew before. Of others only what lies unread in a socket may wait, and
    /// files of a file system: an eventfd is not to wait behind those.
    fn let_go(&self, fd: OwnedFd) {
        let tun = rustix::fs::makedev(TUN.0, TUN.1);
        let file = rustix::fs::fstat(&fd);
        match file.map(|file| (FileType::from_raw_mode(file.st_mode), file.st_rdev)) {
            Ok((FileType::CharacterDevice, device)) if device == tun => drop(fd),
            Ok((FileType::Unknown, _)) => drop(self.closer.defer_soon(fd)),
            _ => drop(self.closer.defer_passed(fd)),
        }
    }

    /// Returns for how long to wait before the next call of [`relieve`](Self::relieve); `None` if nothing is being closed.
    fn patience(&self) -> Option<Duration> {
        (self.closer.waiting() > 0).then_some(Duration::from_secs(1))
    }

    /// Has another thread go on where one cannot close what it has to.
    fn relieve(&mut self) {
        let Self { closer, left_behind, .. } = self;
        left_behind.relieve(closer);
    }
}

/// The device that files of taps are of, `/dev/net/tun` (Documentation/admin-guide/devices.txt of Linux).
const TUN: (u32, u32) = (10, 200);

struct Keeper {
    manager: Manager,
    /// The manager of this process.
    above: Notifier,
    kept: Kept,
    /// So many at most.
    most: usize,
    /// Where it is said, once, that the switch is ready.
    ready: Option<Ready>,
    /// The switch that was started last has said that it is ready.
    was_ready: bool,
    stopping: bool,
    /// The process that has taken over from the switch.
    successor: Option<Pid>,
    /// The lifeline of that process, if it has passed one.
    lifeline: Option<OwnedFd>,
    /// Switches that were killed, and have not ended yet.
    dead: Vec<Dying>,
    /// The one that was started last was so before the one before had ended.
    is_early: bool,
}

/// Returns true if a process is this program's, by its name, which anybody may read. Whoever has taken over the switch could otherwise have any other process ended
/// in the name of this one.
fn is_switch(pid: Pid) -> bool {
    control::is_ringferry(&Path::new("/proc").join(pid.as_raw_nonzero().to_string()))
}

impl Keeper {
    /// Waits for the end of switches that were killed, for so long at most as a start may take.
    fn bury(&mut self) {
        let until = Instant::now() + START;
        while !self.dead.is_empty() && Instant::now() < until {
            self.dead.retain_mut(|dying| !dying.has_ended());
            std::thread::sleep(Duration::from_millis(1));
        }
        self.is_early = false;
    }

    /// Starts a switch, and returns its lifeline.
    fn start(&mut self, mut command: Command) -> io::Result<(Child, OwnedFd)> {
        self.was_ready = false;
        let kept = &self.kept.files;
        // Whatever was passed to this process is not for the switch.
        for name in ["LISTEN_FDS", "LISTEN_FDNAMES", LISTEN_FDNUMBERS] {
            command.env_remove(name);
        }
        if !kept.is_empty() {
            let names: Vec<_> = kept.keys().map(String::as_str).collect();
            let numbers: Vec<_> = kept.values().map(|fd| fd.as_raw_fd().to_string()).collect();
            command.env("LISTEN_FDNAMES", names.join(":")).env(LISTEN_FDNUMBERS, numbers.join(","));
        }
        let inherited: Vec<_> = kept.values().map(AsFd::as_fd).collect();
        let lifeline = lifeline::make()?;
        command.env(lifeline::VARIABLE, lifeline::NUMBER.to_string());
        let keep_fds = vec![(lifeline.try_clone()?, lifeline::NUMBER)];
        let child = spawn_inheriting(&mut command, Spawn { keep_fds, ..Spawn::default() }, &inherited)?;
        Ok((child, lifeline))
    }

    /// Does what the switch and whoever sends signals say until the switch has ended, or the process that has taken over from it. One that is not ready in time is logged, and
    /// killed if it is of a `newer` file than this process, whose own program can be started.
    ///
    /// Of a process that is killed the kernel closes all that it had before it says that it has ended. That takes seconds where somebody holds many locks on eventfds
    /// (`EventId`), and longer where a front end has passed what cannot be closed. So the end of its lifeline counts as its end if that does not come soon.
    fn serve(
        &mut self,
        child: Child,
        lifeline: OwnedFd,
        signals: &Signals,
        newer: Option<FileId>,
    ) -> io::Result<End> {
        let (mut cut, mut dying) = (None, None);
        let mut held = Some(lifeline);
        let mut pid = Pid::from_child(&child);
        let mut process = pidfd_open(pid, PidfdFlags::empty())?;
        // One that has taken over need not be a child of this process.
        let mut child = Some(child);
        let mut late = Some(Instant::now() + START);
        loop {
            late = late.filter(|_| !self.was_ready && !self.stopping);
            if late.is_some_and(|late| late <= Instant::now()) {
                late = None;
                if let (Some(file), Some(child)) = (newer, &mut child) {
                    child.kill()?;
                    child.wait()?;
                    return Ok(End::Late(file));
                }
                tracing::error!(
                    pid = pid.as_raw_nonzero(),
                    "the switch is not ready after {} s: see what holds that process up",
                    START.as_secs()
                );
            }
            let patience = late.map(|late| late.saturating_duration_since(Instant::now()));
            let dies = dying
                .filter(|_| !self.stopping)
                .map(|until: Instant| until.saturating_duration_since(Instant::now()));
            let waited_for = (!self.dead.is_empty()).then_some(Duration::from_secs(1));
            let patience = [patience, self.kept.patience(), dies, waited_for].into_iter().flatten().min();
            let patience = patience.map(|patience| Timespec {
                tv_sec: patience.as_secs() as i64,
                tv_nsec: patience.subsec_nanos().into(),
            });
            let mut fds = [
                PollFd::new(&self.manager, PollFlags::IN),
                PollFd::new(signals, PollFlags::IN),
                PollFd::new(&process, PollFlags::IN),
                match &cut {
                    Some(cut) => PollFd::new(cut, PollFlags::IN),
                    None => PollFd::new(signals, PollFlags::empty()),
                },
            ];
            match rustix::event::poll(&mut fds, patience.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            self.kept.relieve();
            self.dead.retain_mut(|dying| !dying.has_ended());
            let ended = !fds[2].revents().is_empty();
            let is_cut = cut.is_some() && !fds[3].revents().is_empty();
            // What it has said before its end counts.
            while let Some(said) = self.manager.receive()? {
                self.hear(said);
            }
            // No thread of it runs any more, and the kernel still closes what it had.
            let is_dead = !self.stopping && dying.is_some_and(|until| until <= Instant::now());
            if ended || is_dead {
                // One that has named itself has gone on after all.
                if let Some(successor) = self.successor.take().filter(|successor| *successor != pid) {
                    let found = pidfd_open(successor, PidfdFlags::empty());
                    if !ended {
                        self.dead.push(Dying { process, child: child.take() });
                    } else if let Some(mut child) = child.take() {
                        child.wait()?;
                    }
                    (pid, held, cut, dying) = (successor, self.lifeline.take(), None, None);
                    match found {
                        Ok(found) => process = found,
                        Err(_) if self.stopping => return Ok(End::Orderly),
                        Err(_) => return Ok(End::Killed("before it could be watched".to_owned())),
                    }
                    // The one before has ended without having heard it.
                    if self.stopping {
                        let _ = kill_process(pid, Signal::TERM);
                    }
                    continue;
                }
                if !ended {
                    self.dead.push(Dying { process, child });
                    self.is_early = true;
                    return Ok(End::Killed(
                        "how is not known yet, as the kernel still closes what it had".to_owned(),
                    ));
                }
                let status = child.as_mut().map(Child::wait).transpose()?;
                self.is_early &= !self.was_ready;
                return Ok(match status {
                    _ if self.stopping => End::Orderly,
                    Some(status) if status.success() => End::Orderly,
                    Some(status)
                        if status.signal().is_none() && status.code() != Some(i32::from(ORPHANED)) =>
                    {
                        End::Failed(status)
                    }
                    Some(status) => End::Killed(status.to_string()),
                    None => End::Killed("how is not known, as another process had started it".to_owned()),
                });
            }
            if self.was_ready
                && let Some(lifeline) = held.take()
            {
                cut = lifeline::watch(lifeline, pid);
            }
            if is_cut {
                cut = None;
                // One that ends by itself says so.
                let is_killed = self.was_ready && !self.stopping;
                dying = is_killed.then(|| Instant::now() + DYING);
            }
            while let Some(signal) = signals.next()? {
                self.stopping |= matches!(signal, Signal::TERM | Signal::INT);
                let _ = kill_process(pid, signal);
            }
        }
    }

    fn hear(&mut self, said: Said) {
        let value = |key: &str| said.lines.iter().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let name = value("FDNAME").unwrap_or_default().to_owned();
        if said.descriptors_lost {
            tracing::warn!(
                name,
                "there is no room for a descriptor of the switch: if that is killed, what needs it begins anew; raise the limit of open files (ulimit -n)"
            );
        } else if value("FDSTORE") == Some("1") {
            // What is being closed counts for itself: each that comes is moved, and the number that it had is let go of.
            let is_full = self.kept.len() >= self.most || self.kept.open() >= 2 * self.most;
            let has_room = self.kept.files.contains_key(&name) || !is_full;
            let mut descriptors = said.descriptors.into_iter();
            if has_room && let Some(fd) = descriptors.next() {
                self.kept.insert(name, fd);
            }
            descriptors.for_each(|fd| self.kept.let_go(fd));
        } else if value("FDSTOREREMOVE") == Some("1") {
            self.kept.remove(&name);
        } else if let Some(pid) = value("MAINPID") {
            let named = pid.parse().ok().and_then(Pid::from_raw);
            self.successor = named.filter(|pid| is_switch(*pid));
            // The one before names it without.
            self.lifeline = said.descriptors.into_iter().next().or_else(|| self.lifeline.take());
            if self.successor.is_none() {
                tracing::warn!("the switch has named process {pid:?} as its successor, which is none");
            }
        } else {
            self.stopping |= value("STOPPING") == Some("1");
            let is_ready = value("READY") == Some("1");
            self.was_ready |= is_ready;
            if is_ready && let Some(ready) = self.ready.take() {
                ready.say();
            }
            let _ = self.above.say(&said.lines.join("\n"));
        }
    }
}
