//! Processes under test: started, listened to, asked, and gone when the test ends in whatever way.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringferry_control::snapshot::{PortSnapshot, PortState, Snapshot};
use ringferry_control::{self as control, Answer, Request};
use ringferry_sys::namespace;
use ringferry_sys::process::{Spawn, spawn};
use ringferry_sys::socket::Stream;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::guest::{Guest, Options};

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

/// Whether a test that needs root may run. Where it may not, says so; with `CI=true` nothing is
/// left out.
pub fn may(what: &str, possible: bool) -> bool {
    let ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
    assert!(possible || !ci, "{what}, and CI=true allows no test to be skipped");
    if !possible {
        eprintln!("skipped: {what}");
    }
    possible
}

/// Whether this process may make network namespaces and taps.
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

/// The program under test.
pub fn ringferry() -> Command {
    Command::new(env!("CARGO_BIN_EXE_ringferry"))
}

/// A running child whose error output is collected.
pub struct Process {
    child: Child,
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
        let mut child = spawn(command, Spawn { die_with_parent: true, ..options }).unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let lines = Arc::clone(&log);
        let listener = std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).for_each(|line| lines.lock().unwrap().push(line));
        });
        Process { child, log, listener: Some(listener) }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has said so far.
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

    /// Waits for its end; returns its status and its standard output. The log is complete then.
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

    /// Whether all of its threads sleep at this moment.
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

/// A directory for the sockets of one switch, which may be started in it again.
pub struct Place(TempDir);

impl Place {
    pub fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn control(&self) -> PathBuf {
        self.0.path().join("control")
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.0.path().join(format!("{name}.sock"))
    }

    /// Names of the files in it.
    pub fn files(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// What `ringferry ctl` answers to `words`.
    #[track_caller]
    pub fn ctl(&self, words: &[&str]) -> String {
        let output =
            ringferry().arg("ctl").arg("--control").arg(self.control()).args(words).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The command `ringferry run` with a vhost-user port for each of `ports`: a name, and keys
    /// after commas.
    pub fn run(&self, ports: &[&str]) -> Command {
        let mut command = ringferry();
        command.arg("run").arg("--control").arg(self.control());
        for port in ports {
            let (name, keys) = port.split_once(',').unwrap_or((port, ""));
            let comma = if keys.is_empty() { "" } else { "," };
            command.arg("--port").arg(format!("vhost-user:{}{comma}{keys}", self.socket(name).display()));
        }
        command
    }

    /// Starts a switch with these ports and waits until it is ready.
    pub fn switch(&self, ports: &[&str]) -> Switch<'_> {
        self.start(&mut self.run(ports), Vec::new())
    }

    /// Starts `command`, which runs a switch here and keeps `fds`, and waits until it is ready.
    pub fn start(&self, command: &mut Command, fds: Vec<(OwnedFd, i32)>) -> Switch<'_> {
        const READY: i32 = 9;
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        command.args(["--ready-fd", &READY.to_string()]);
        let keep_fds = fds.into_iter().chain([(write, READY)]).collect();
        let process = Process::start(command, Spawn { keep_fds, ..Spawn::default() });
        assert!(readable(&read, PATIENCE), "not ready: {:#?}", process.log());
        let mut line = String::new();
        std::fs::File::from(read).read_to_string(&mut line).unwrap();
        assert_eq!(line, "READY\n", "{:#?}", process.log());
        Switch { process, place: self }
    }
}

/// A running switch.
pub struct Switch<'a> {
    pub process: Process,
    place: &'a Place,
}

impl Switch<'_> {
    /// A connection to the port's socket, as a front end makes it.
    pub fn connect(&self, port: &str) -> Stream {
        eventually("the port takes a connection", || Stream::connect(self.place.socket(port)).ok())
    }

    /// Plugs guest number `number` into `port`; when this returns, packets flow.
    #[track_caller]
    pub fn plug(&self, port: &str, number: u8, options: Options) -> Guest {
        let guest = Guest::plug(self.connect(port), number, options);
        self.until_state(port, PortState::Up);
        guest
    }

    /// What the switch says about itself. It has carried out everything it was told before.
    #[track_caller]
    pub fn show(&self) -> Snapshot {
        match control::call(&self.place.control(), &Request::Show).unwrap() {
            Answer::Show(snapshot) => *snapshot,
            _ => panic!("an answer to another question"),
        }
    }

    /// The same, from `ringferry ctl show --json`.
    pub fn ctl_show(&self) -> Snapshot {
        let mut ctl = ringferry();
        ctl.arg("ctl").arg("--control").arg(self.place.control()).args(["show", "--json"]);
        let output = ctl.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// What the switch says about one port.
    #[track_caller]
    pub fn port(&self, name: &str) -> PortSnapshot {
        self.show().ports.into_iter().find(|port| port.name == name).unwrap()
    }

    /// Every frame so far has arrived.
    #[track_caller]
    pub fn assert_no_drops(&self) {
        for port in self.show().ports {
            let drops = port.drops.iter().filter(|(_, count)| **count > 0);
            assert_eq!(drops.count(), 0, "{}: {:?}", port.name, port.drops);
        }
    }

    /// Waits until `port` is as `wanted`, and returns what it is then.
    #[track_caller]
    pub fn until(&self, port: &str, what: &str, wanted: impl Fn(&PortSnapshot) -> bool) -> PortSnapshot {
        eventually(&format!("port {port}: {what}"), || Some(self.port(port)).filter(&wanted))
    }

    #[track_caller]
    pub fn until_state(&self, port: &str, state: PortState) -> PortSnapshot {
        self.until(port, state.name(), |port| port.state == state)
    }

    /// Ends it with SIGTERM, as a service manager does.
    #[track_caller]
    pub fn stop(mut self) {
        self.process.signal(Signal::TERM);
        let (status, output) = self.process.wait();
        assert!(status.success(), "{status}: {:#?}", self.process.log());
        assert_eq!(output, "");
    }
}
