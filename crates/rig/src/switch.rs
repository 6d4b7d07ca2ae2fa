//! A switch under test: the program `ringferry`, in a folder of its own, with the guests that are plugged into it.
//!
//! [`Place`] is the folder, which outlives the switch, so that one may be started again where another was killed. [`Place::start`] returns
//! when the switch says that it is ready; [`Switch::plug`] when packets flow; [`Switch::stop`] ends it as a service manager does.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringferry_control::snapshot::{PortSnapshot, PortState, Snapshot};
use ringferry_control::{self as control, Answer, Request};
use ringferry_sys::process::{Spawn, is_root};
use ringferry_sys::socket::Stream;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::guest::{Guest, Options};
use crate::process::{PATIENCE, Process, eventually};
use crate::ready::Ready;

/// The program under test, which cargo builds for the tests of its package and puts beside them.
pub fn program() -> PathBuf {
    // Told by newer versions of cargo.
    if let Some(told) = std::env::var_os("CARGO_BIN_EXE_ringferry") {
        return told.into();
    }
    // target/debug/deps/TEST, and target/debug/ringferry.
    let test = std::env::current_exe().unwrap();
    let found =
        test.ancestors().skip(1).take(2).map(|folder| folder.join("ringferry")).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("no program ringferry beside {}: run cargo build", test.display()))
}

/// A command for the [`program`].
pub fn ringferry() -> Command {
    Command::new(program())
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

    /// Returns what `ringferry ctl` answers to `words`.
    #[track_caller]
    pub fn ctl(&self, words: &[&str]) -> String {
        let output =
            ringferry().arg("ctl").arg("--control").arg(self.control()).args(words).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let answer = String::from_utf8(output.stdout).unwrap();
        #[cfg(feature = "schema")]
        if words.contains(&"--json") {
            crate::schema::assert_described(&[&["ctl"], words].concat(), &answer);
        }
        answer
    }

    /// Returns what `ringferry ctl` says of `words`, which it refuses.
    #[track_caller]
    pub fn refused(&self, words: &[&str]) -> String {
        let output =
            ringferry().arg("ctl").arg("--control").arg(self.control()).args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat()
    }

    /// Does the same with what is refused in one line.
    #[track_caller]
    pub fn refused_in_a_line(&self, words: &[&str]) -> String {
        let text = self.refused(words);
        assert_eq!(text.lines().count(), 1, "{text}");
        text
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

    /// Starts `command`, which runs a switch here and keeps `fds`, and waits until it is ready. For root it is in its sandbox, for others only
    /// where the command says so.
    pub fn start(&self, command: &mut Command, fds: Vec<(OwnedFd, i32)>) -> Switch<'_> {
        let mut options = Spawn { keep_fds: fds, ..Spawn::default() };
        let ready = Ready::of(command, &mut options).unwrap();
        // In its sandbox a switch is not dumpable, and then only root may look at its descriptors and mappings, as tests do.
        if !is_root() && !command.get_args().any(|word| word == "--sandbox") {
            command.args(["--sandbox", "off"]);
        }
        let process = Process::start(command, options);
        assert!(ready.wait(PATIENCE).unwrap(), "not ready: {:#?}", process.log());
        Switch { process, place: self }
    }
}

pub struct Switch<'a> {
    pub process: Process,
    place: &'a Place,
}

impl Switch<'_> {
    /// A connection to the port's socket, as a front end makes it. A switch that does not answer on it fails the test.
    pub fn connect(&self, port: &str) -> Stream {
        let stream =
            eventually("the port takes a connection", || Stream::connect(self.place.socket(port)).ok());
        stream.set_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Plugs guest number `number` into `port`; when this returns, packets flow.
    #[track_caller]
    pub fn plug(&self, port: &str, number: u8, options: Options) -> Guest {
        let guest = Guest::plug(self.connect(port), number, options);
        self.until_state(port, PortState::Up);
        guest
    }

    /// Asks the switch for its snapshot. It has carried out everything it was told before.
    #[track_caller]
    pub fn show(&self) -> Snapshot {
        match control::call(&self.place.control(), &Request::Show { addresses: None }).unwrap() {
            Answer::Show(snapshot) => *snapshot,
            _ => panic!("an answer to another question"),
        }
    }

    /// Asks for the snapshot with `ringferry ctl show --json`.
    pub fn ctl_show(&self) -> Snapshot {
        serde_json::from_str(&self.place.ctl(&["show", "--json"])).unwrap()
    }

    /// Asks the switch for its snapshot of one port.
    #[track_caller]
    pub fn port(&self, name: &str) -> PortSnapshot {
        self.show().ports.into_iter().find(|port| port.name == name).unwrap()
    }

    /// Changes rules of a port with `ringferry ctl set`. When this returns, every worker knows of it.
    #[track_caller]
    pub fn set(&self, port: &str, settings: &[&str]) {
        self.place.ctl(&[&["set", port], settings].concat());
        self.show();
    }

    /// The frames from or for `port` that were dropped for `reason`.
    #[track_caller]
    pub fn drops(&self, port: &str, reason: &str) -> u64 {
        self.port(port).drops[reason]
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
