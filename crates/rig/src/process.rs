//! Processes under test: started, listened to, and gone when the test ends in whatever way.
//!
//! [`Process::start`] starts a child that dies with the thread that started it; a thread of its own collects what it says. It is asked for its
//! log and its descriptors, told to end by a signal and waited for; dropping it kills it, and a test that panics prints its log.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringferry_sys::namespace;
use ringferry_sys::process::{Spawn, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};

/// Bound on everything a test waits for: only there so that a failure is not a hang.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Bound on the life of a process that ends by itself, such as a short demo.
const LIFE: Duration = Duration::from_secs(180);

/// How often something is looked at that nothing announces.
const LOOK: Duration = Duration::from_millis(5);

/// Waits until `probe` finds what it looks for.
#[track_caller]
pub fn eventually<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(LOOK);
    }
}

/// Waits until `fd` is readable; false when `patience` ran out first.
pub fn readable(fd: &impl std::os::fd::AsFd, patience: Duration) -> bool {
    let time = Timespec { tv_sec: patience.as_secs() as _, tv_nsec: patience.subsec_nanos() as _ };
    matches!(poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&time)), Ok(1..))
}

/// Returns true if a test may run that needs something special. Where it may not, says so; with `CI=true` nothing is
/// left out.
pub fn may(what: &str, possible: bool) -> bool {
    let ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
    assert!(possible || !ci, "{what}, and CI=true allows no test to be skipped");
    if !possible {
        eprintln!("skipped: {what}");
    }
    possible
}

/// Returns true if this process may make network namespaces and taps.
pub fn may_network() -> bool {
    let possible = ringferry_sys::process::is_root()
        && ringferry_sys::process::has_net_admin()
        && Path::new("/dev/net/tun").exists();
    may("needs root and /dev/net/tun", possible)
}

/// Carries out `test` in a network namespace where the kernel says nothing of its own accord.
pub fn in_a_namespace(test: fn()) {
    if !may_network() {
        return;
    }
    // What the switch opens there is in this thread's namespace.
    let thread = std::thread::spawn(move || {
        namespace::unshare_net().unwrap();
        std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        test();
    });
    thread.join().unwrap();
}

/// The arguments of `ringferry` in a command, if it is to print JSON.
#[cfg(feature = "schema")]
fn prints_json(command: &Command) -> Option<Vec<String>> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words = words.map(|word| word.to_string_lossy().into_owned());
    let arguments = words.skip_while(|word| !word.ends_with("/ringferry")).skip(1);
    // Progress goes to the error output.
    let arguments: Vec<String> = arguments.filter(|word| word != "--progress-json").collect();
    arguments.iter().any(|word| word == "--json").then_some(arguments)
}

/// A running child whose error output is collected.
pub struct Process {
    child: Child,
    /// The arguments of `ringferry`, if it is one that prints JSON.
    #[cfg(feature = "schema")]
    prints_json: Option<Vec<String>>,
    log: Arc<Mutex<Vec<String>>>,
    listener: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts `command`. Its standard output is piped and its error output collected.
    pub fn start(command: &mut Command, options: Spawn) -> Process {
        // Without colours, and without what the environment of the test run may ask for.
        command.env("NO_COLOR", "1").env_remove("RUST_LOG").env_remove("NOTIFY_SOCKET");
        Process::start_as_is(command, options)
    }

    /// As [`Process::start`], in an environment that was set up with care.
    pub fn start_as_is(command: &mut Command, options: Spawn) -> Process {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        #[cfg(feature = "schema")]
        let prints_json = prints_json(command);
        let mut child = spawn(command, Spawn { die_with_parent: true, ..options }).unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let lines = Arc::clone(&log);
        let listener = std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).for_each(|line| lines.lock().unwrap().push(line));
        });
        Process {
            child,
            #[cfg(feature = "schema")]
            prints_json,
            log,
            listener: Some(listener),
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The lines that it has logged so far.
    pub fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    /// How many lines of its log contain `text`.
    pub fn logged(&self, text: &str) -> usize {
        self.log.lock().unwrap().iter().filter(|line| line.contains(text)).count()
    }

    #[track_caller]
    pub fn until_logged(&self, text: &str) {
        eventually(&format!("{text:?} is logged"), || (self.logged(text) > 0).then_some(()));
    }

    /// Waits until it has said `text` `count` times; it must not say it more often.
    #[track_caller]
    pub fn until_logged_times(&self, text: &str, count: usize) {
        eventually(&format!("{text:?} is logged {count} times"), || {
            let logged = self.logged(text);
            assert!(logged <= count, "{logged} times instead of {count}: {:#?}", self.log());
            (logged == count).then_some(())
        });
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub fn signal(&mut self, signal: Signal) {
        assert!(self.is_running(), "it has ended: {:#?}", self.log());
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end; returns its status and its standard output. The log is complete then. JSON of ringferry must be as its schema says.
    #[track_caller]
    pub fn wait(&mut self) -> (ExitStatus, String) {
        // Read beside, so that a process that hangs is a test that fails and not one that hangs, too.
        let reader = self.child.stdout.take().map(|mut stdout| {
            std::thread::spawn(move || {
                let mut output = String::new();
                stdout.read_to_string(&mut output).map(|_| output)
            })
        });
        let deadline = Instant::now() + LIFE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "it does not end: {:#?}", self.log());
            std::thread::sleep(LOOK);
        };
        let output = reader.map_or_else(String::new, |reader| reader.join().unwrap().unwrap());
        if let Some(listener) = self.listener.take() {
            listener.join().unwrap();
        }
        #[cfg(feature = "schema")]
        if let Some(command) = self.prints_json.take_if(|_| output.starts_with(['{', '['])) {
            let words: Vec<&str> = command.iter().map(String::as_str).collect();
            crate::schema::assert_described(&words, &output);
        }
        (status, output)
    }

    /// Its open descriptors, by what they lead to.
    pub fn descriptors(&self) -> Vec<String> {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let mut fds: Vec<String> = fds
            .filter_map(|fd| Some(std::fs::read_link(fd.ok()?.path()).ok()?.display().to_string()))
            // Sockets and pipes have numbers, which change.
            .map(|fd| fd.split(':').next().unwrap_or_default().to_owned())
            .collect();
        fds.sort();
        fds
    }

    /// Waits until it holds no more descriptors of any kind than `before`. It may hold fewer: among those
    /// may have been a client of its control socket that had just got its answer.
    #[track_caller]
    pub fn until_no_more_than(&self, before: &[String]) {
        let count = |fds: &[String], kind: &String| fds.iter().filter(|fd| *fd == kind).count();
        eventually("no descriptor is left over", || {
            let now = self.descriptors();
            now.iter().all(|kind| count(&now, kind) <= count(before, kind)).then_some(())
        });
    }

    /// Its mappings of files whose name contains `name`.
    pub fn mappings(&self, name: &str) -> usize {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid())).unwrap();
        maps.lines().filter(|line| line.contains(name)).count()
    }

    /// Returns true if all of its threads sleep at this moment.
    pub fn is_asleep(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let state = |thread: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap();
            // The name, in parentheses, may hold anything.
            stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
        };
        threads.map(Result::unwrap).all(|thread| state(thread) == 'S')
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("what the process said: {:#?}", self.log());
        }
    }
}
