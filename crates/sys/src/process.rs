//! Starting children in namespaces and with inherited descriptors, CPU time of processes, and privileges.
//!
//! [`spawn`] starts a child from a [`Command`]; the caller waits for it as usual. All functions may be called from
//! any thread, but see [`Spawn::die_with_parent`].

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use rustix::thread::{CapabilitySet, UnshareFlags};

use crate::namespace;
use crate::usage::read_clock;

/// Options of a child that [`Command`] does not have.
#[derive(Debug, Default)]
pub struct Spawn {
    /// Starts the child in a new network namespace, with a loopback interface that is down.
    pub new_net: bool,
    /// Starts the child in this network namespace; excludes `new_net`.
    pub join_net: Option<OwnedFd>,
    /// Kills the child (SIGKILL) when the *thread* that started it ends, and therefore also when the process ends in
    /// any way. Such children should be started from the main thread.
    pub die_with_parent: bool,
    /// Starts the child in a session of its own: signals of the terminal do not reach it, and nobody waits for it.
    pub new_session: bool,
    /// Descriptors that the child inherits, each under the number given with it. The parent's copies are closed.
    pub keep_fds: Vec<(OwnedFd, RawFd)>,
}

/// Starts `command` with the options `spawn`. The child starts with no signal blocked. The command can be used again;
/// the options apply to this child only.
///
/// # Errors
/// The errors of [`Command::spawn`]; `InvalidInput` for two namespaces, or for a descriptor number that is negative or
/// used twice; a missing permission to make or enter the namespace (see [`namespace`]).
pub fn spawn(command: &mut Command, spawn: Spawn) -> io::Result<Child> {
    spawn_inheriting(command, spawn, &[])
}

/// [Starts](spawn) a child that inherits more descriptors, which the parent keeps, under the numbers that they have here. So there is no copy of them to be closed on
/// either side: closing an eventfd may take a while, see [`EventId`](crate::eventfd::EventId).
///
/// # Errors
/// Those of [`spawn`].
pub fn spawn_inheriting(
    command: &mut Command,
    spawn: Spawn,
    inherited: &[BorrowedFd<'_>],
) -> io::Result<Child> {
    let Spawn { new_net, join_net, die_with_parent, new_session, keep_fds } = spawn;
    let inherited: Vec<RawFd> = inherited.iter().map(AsRawFd::as_raw_fd).collect();
    let mut targets: Vec<RawFd> = keep_fds.iter().map(|&(_, target)| target).collect();
    targets.sort_unstable();
    let twice = targets.windows(2).any(|pair| pair[0] == pair[1]);
    if (new_net && join_net.is_some()) || twice || targets.first().is_some_and(|&lowest| lowest < 0) {
        let text = "one network namespace at most, and each descriptor under a number of its own";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }

    // Sources move above all targets, so that filling one target never overwrites another's source. Free targets are
    // reserved until the child runs, as `Command` might otherwise use one for the pipe on which the child reports
    // errors.
    let floor = targets.last().map_or(0, |&highest| highest.saturating_add(1));
    let mut sources = Vec::with_capacity(keep_fds.len());
    let mut reserved = Vec::with_capacity(keep_fds.len());
    for (fd, target) in keep_fds {
        let source = rustix::io::fcntl_dupfd_cloexec(&fd, floor)?;
        let place = rustix::io::fcntl_dupfd_cloexec(&source, target)?;
        if place.as_raw_fd() == target {
            reserved.push(place);
        }
        sources.push((source, target));
    }
    let moves: Vec<(RawFd, RawFd)> = sources.iter().map(|(fd, target)| (fd.as_raw_fd(), *target)).collect();
    let net = join_net.as_ref().map(AsRawFd::as_raw_fd);
    let parent = rustix::process::getpid();
    // The hook cannot be removed from the command, so it is disarmed: its descriptors are closed after this call.
    let armed = Arc::new(AtomicBool::new(true));
    let hook_armed = Arc::clone(&armed);
    let in_child = move || -> io::Result<()> {
        if !hook_armed.load(Ordering::Relaxed) {
            return Ok(());
        }
        if die_with_parent {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // If the parent ended before that call, no signal is sent.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
        }
        if new_session {
            rustix::process::setsid()?;
        }
        if new_net {
            // SAFETY: the child's own new network namespace touches no open descriptor and no memory.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
        }
        if let Some(net) = net {
            // SAFETY: `join_net` lives in the parent until `spawn` returns, and the child has a
            // copy of it until exec.
            namespace::join(unsafe { BorrowedFd::borrow_raw(net) })?;
        }
        for &(source, target) in &moves {
            // SAFETY: plain numbers; the target is a number the caller asked for, and what may be
            // open there in this child is replaced on purpose. The copy is not closed on exec.
            if unsafe { libc::dup2(source, target) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        for &number in &inherited {
            // SAFETY: a flag of a descriptor, given by its number, in this child alone.
            if unsafe { libc::fcntl(number, libc::F_SETFD, 0) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        clear_signal_mask();
        Ok(())
    };
    // SAFETY: between fork and exec the hook makes only plain system calls: it takes no lock and
    // neither allocates nor frees (io::Error from a number is no allocation).
    unsafe { command.pre_exec(in_child) };
    let child = command.spawn();
    armed.store(false, Ordering::Relaxed);
    drop(reserved);
    child
}

/// [Starts](spawn) a child by a thread that has none of the descriptors whose numbers are `from` or higher, so that the child does not have to close them: of what cannot be
/// closed at once there may be thousands. `options` is called by that thread: what it opens, or copies, is the thread's, and so would be a pipe to the child: none is returned.
///
/// Where the kernel cannot do that (before Linux 5.9) the child is started as any other.
///
/// # Errors
/// Those of [`spawn`] and of `options`.
///
/// # Panics
/// `options` has panicked.
pub fn spawn_without(
    command: &mut Command,
    from: u32,
    options: impl FnOnce() -> io::Result<Spawn> + Send,
) -> io::Result<Child> {
    let start = move || {
        // SAFETY: the thread gets a table of descriptors of its own, with those below `from`; nothing in it refers to one of the others, and all other threads have theirs.
        unsafe { libc::syscall(libc::SYS_close_range, from, u32::MAX, CLOSE_RANGE_UNSHARE) };
        let mut child = spawn(command, options()?)?;
        (child.stdin, child.stdout, child.stderr) = (None, None, None);
        Ok(child)
    };
    std::thread::scope(|scope| scope.spawn(start).join().expect("it starts a child"))
}

/// `CLOSE_RANGE_UNSHARE` of close_range(2).
const CLOSE_RANGE_UNSHARE: libc::c_uint = 1 << 1;

fn clear_signal_mask() {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set, and pthread_sigmask only reads it; both are allowed between
    // fork and exec.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, set.as_ptr(), std::ptr::null_mut());
    }
}

/// Sends SIGTERM to a child. Does nothing if it has ended already.
///
/// # Errors
/// `EPERM`, if the child runs as another user now.
pub fn terminate(child: &mut Child) -> io::Result<()> {
    if child.try_wait()?.is_none() {
        // The child has not been waited for, so its number cannot belong to another process.
        rustix::process::kill_process(rustix::process::Pid::from_child(child), Signal::TERM)?;
    }
    Ok(())
}

/// Returns the CPU time that all threads of process `pid` have used, in user and kernel mode, in nanosecond resolution.
/// It works for any process, and for a child that has ended until it is waited for.
///
/// # Errors
/// `ESRCH`, if there is no such process.
pub fn cpu_time(pid: u32) -> io::Result<Duration> {
    let no_process = || io::Error::from_raw_os_error(libc::ESRCH);
    let pid = libc::pid_t::try_from(pid).map_err(|_| no_process())?;
    let mut clock: libc::clockid_t = 0;
    // SAFETY: it writes one clockid_t, to ours.
    if unsafe { libc::clock_getcpuclockid(pid, &mut clock) } != 0 {
        return Err(no_process());
    }
    read_clock(clock).ok_or_else(no_process)
}

/// Returns the number of the user as whom this process makes files.
pub fn user_id() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns true if the process runs as root in its user namespace.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns true if the calling thread may configure networks in its user namespace (CAP_NET_ADMIN).
pub fn has_net_admin() -> bool {
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::NET_ADMIN))
}

/// Has the calling thread, and those that it starts from now on, leave the processor to others (setpriority(2)): they get a tenth of what one of them gets.
/// There is no way back without a privilege.
pub(crate) fn give_way() {
    // Whoever has given way further stays there.
    let _ = rustix::process::getpriority_process(None)
        .and_then(|now| rustix::process::setpriority_process(None, now.max(LEAVING)));
}

/// What a process that is about to end has its threads run at.
const LEAVING: i32 = 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::current_net;
    use crate::signal::Signals;
    use crate::testing::in_new_net;
    use std::io::Read;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Stdio;

    use std::os::fd::AsFd;

    use rustix::io::FdFlags;
    use rustix::pipe::PipeFlags;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdout(Stdio::piped());
        command
    }

    fn output(child: Child) -> String {
        String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap().trim().to_owned()
    }

    fn read_all(fd: OwnedFd) -> String {
        let mut text = String::new();
        std::fs::File::from(fd).read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn who_gives_way_never_gets_more_than_before() {
        // Linux has a priority for each thread.
        let after = |before: i32| {
            let run = move || {
                rustix::process::setpriority_process(None, before).unwrap();
                give_way();
                rustix::process::getpriority_process(None).unwrap()
            };
            std::thread::spawn(run).join().unwrap()
        };
        let own = rustix::process::getpriority_process(None).unwrap();
        assert_eq!([own.max(3), own.max(15)].map(after), [LEAVING.max(own), own.max(15)]);
    }

    #[test]
    fn kept_descriptors_arrive_under_their_numbers() {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        let mut command = shell("echo ready >&7");
        let options = Spawn { keep_fds: vec![(write, 7)], ..Spawn::default() };
        let mut child = spawn(&mut command, options).unwrap();
        assert_eq!(read_all(read), "ready\n"); // ends only when no writing end is left here
        assert!(child.wait().unwrap().success());
        // The command is as it was: number 7 is not open in the next child.
        let child = spawn(&mut shell("test -e /proc/self/fd/7 || echo closed"), Spawn::default()).unwrap();
        assert_eq!(output(child), "closed");
        let mut again = command.stderr(Stdio::null()).spawn().unwrap();
        assert!(!again.wait().unwrap().success());
    }

    #[test]
    fn kept_descriptors_can_swap_places() {
        let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        let ((read_a, a), (read_b, b)) = (pipe(), pipe());
        let (number_a, number_b) = (a.as_raw_fd(), b.as_raw_fd());
        let script = format!("echo a >/proc/self/fd/{number_b}; echo b >/proc/self/fd/{number_a}");
        let options = Spawn { keep_fds: vec![(a, number_b), (b, number_a)], ..Spawn::default() };
        let mut child = spawn(&mut shell(&script), options).unwrap();
        assert_eq!((read_all(read_a), read_all(read_b)), ("a\n".into(), "b\n".into()));
        child.wait().unwrap();
    }

    #[test]
    fn inherited_descriptors_arrive_where_they_are_and_stay() {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        let high = rustix::io::fcntl_dupfd_cloexec(&write, 500).unwrap();
        let script = format!("echo low >/proc/self/fd/{}; echo high >/proc/self/fd/500", write.as_raw_fd());
        let inherited = [write.as_fd(), high.as_fd()];
        let mut child = spawn_inheriting(&mut shell(&script), Spawn::default(), &inherited).unwrap();
        assert!(child.wait().unwrap().success());
        // The parent has both still, and the next child neither.
        assert!(
            [&write, &high].iter().all(|fd| rustix::io::fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC))
        );
        let child = spawn(&mut shell("test -e /proc/self/fd/500 || echo closed"), Spawn::default()).unwrap();
        assert_eq!(output(child), "closed");
        drop((write, high));
        assert_eq!(read_all(read), "low\nhigh\n");
    }

    #[test]
    fn a_child_is_started_without_descriptors_that_its_parent_keeps() {
        let file = tempfile::tempfile().unwrap();
        // One that every child would have.
        let high = rustix::io::fcntl_dupfd_cloexec(&file, 600).unwrap();
        rustix::io::fcntl_setfd(&high, FdFlags::empty()).unwrap();
        let has = "test -e /proc/self/fd/600 && echo open || echo closed";
        assert_eq!(output(spawn(&mut shell(has), Spawn::default()).unwrap()), "open");
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        let options = || {
            let keep_fds = vec![(write.try_clone()?, 7)];
            Ok(Spawn { keep_fds, ..Spawn::default() })
        };
        let mut command = shell(&format!("echo ready >&7; {has} >&7"));
        let mut child = spawn_without(&mut command, 600, options).unwrap();
        assert!(child.wait().unwrap().success());
        drop(write);
        assert_eq!(read_all(read), "ready\nclosed\n");
        rustix::io::fcntl_getfd(&high).expect("the parent has it still");
    }

    #[test]
    fn errors_of_the_child_reach_the_parent() {
        // Many targets, so that one would meet the pipe on which `Command` reports.
        let file = tempfile::tempfile().unwrap();
        let keep_fds = (3..100).map(|target| (OwnedFd::from(file.try_clone().unwrap()), target)).collect();
        let error =
            spawn(&mut Command::new("/nonexistent"), Spawn { keep_fds, ..Spawn::default() }).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);

        let keep_fds = vec![(file.try_clone().unwrap().into(), 5), (file.into(), 5)];
        let error = spawn(&mut shell("true"), Spawn { keep_fds, ..Spawn::default() }).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn children_live_in_the_namespace_they_were_given() {
        in_new_net(|| {
            let link = || std::fs::read_link("/proc/thread-self/ns/net").unwrap().display().to_string();
            let ours = link();
            let print = || shell("readlink /proc/self/ns/net");
            let child = spawn(&mut print(), Spawn { new_net: true, ..Spawn::default() }).unwrap();
            let other = output(child);
            assert!(other.starts_with("net:[") && other != ours);

            let net = current_net().unwrap();
            namespace::unshare_net().unwrap();
            assert_ne!(link(), ours);
            let options = Spawn { join_net: Some(net), ..Spawn::default() };
            assert_eq!(output(spawn(&mut print(), options).unwrap()), ours);
        });
        let net = current_net().unwrap();
        let both = Spawn { new_net: true, join_net: Some(net), ..Spawn::default() };
        assert_eq!(spawn(&mut shell("true"), both).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_child_can_be_terminated_though_we_block_the_signal() {
        std::thread::spawn(|| {
            let _signals = Signals::new(&[Signal::TERM]).unwrap();
            let mut child = spawn(&mut shell("exec sleep 20"), Spawn::default()).unwrap();
            terminate(&mut child).unwrap();
            assert_eq!(child.wait().unwrap().signal(), Some(Signal::TERM.as_raw()));
            terminate(&mut child).unwrap();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn cpu_time_counts_what_a_child_used_until_it_is_waited_for() {
        let mut child = Command::new("sh")
            .args(["-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"])
            .spawn()
            .unwrap();
        let pid = child.id();
        let exited = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        let id = rustix::process::WaitId::Pid(rustix::process::Pid::from_child(&child));
        rustix::process::waitid(id, exited).unwrap();
        assert!(cpu_time(pid).unwrap() > Duration::ZERO);
        child.wait().unwrap();
        assert_eq!(cpu_time(pid).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        assert!(cpu_time(u32::MAX).is_err());
    }

    #[test]
    fn privileges_agree_with_the_kernels_own_account() {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).unwrap();
        let effective = u64::from_str_radix(field("CapEff:").trim(), 16).unwrap();
        assert_eq!(has_net_admin(), effective >> 12 & 1 == 1);
        assert_eq!(is_root(), field("Uid:").split_whitespace().nth(1) == Some("0"));
    }
}
