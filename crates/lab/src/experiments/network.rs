//! Two guests on a switch, all of them the program `ringferry`, in network namespaces of their own, and the kernel's TCP and UDP
//! between them.
//!
//! A process of the lab's own starts them (see [`Setup::child`]), so that it can enter a user namespace where the lab has
//! no right to make network namespaces. Whatever ends it ends them.
//!
//! ```text
//! ringferry-lab -- ringferry-lab child EXPERIMENT ... -- ringferry run              the switch
//!                                                     |- ringferry guest            namespace a
//!                                                     |- ringferry guest            namespace b
//!                                                     |- ringferry traffic server   namespace b
//!                                                     `- ringferry traffic client   namespace a
//! ```

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use ringferry_rig::ready::Ready;
use ringferry_sys::namespace;
use ringferry_sys::process::{Spawn, cpu_time, has_net_admin, is_root, spawn, terminate};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::experiment::{RowError, Run, Setup};

/// The shortest test that the traffic generator makes sense of.
pub(in crate::experiments) const SHORTEST: Duration = Duration::from_millis(200);
/// Beyond the time that is measured: starting everything, and the end. Half a second on an idle machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often to look whether a process has ended.
const LOOK: Duration = Duration::from_millis(5);
/// How long a process may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(2);

/// The guests, their addresses, and the tap that each has.
const GUESTS: [&str; 2] = ["a", "b"];
const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];
pub(in crate::experiments) const TAP: &str = "rf0";

/// Why there can be no such network here, if so.
pub(in crate::experiments) fn impossible(setup: &Setup, experiment: &str) -> Option<String> {
    forbidden(setup, experiment).or_else(|| setup.without_program())
}

/// Why there can be no network namespace of our own here, with taps in it, if so. `probe` of the experiment's child process
/// is [`probe`].
pub(in crate::experiments) fn forbidden(setup: &Setup, experiment: &str) -> Option<String> {
    let mut command = setup.child(experiment);
    command.arg("probe").stdin(Stdio::null());
    match command.output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(last_line(&String::from_utf8_lossy(&output.stderr), output.status)),
        Err(error) => Some(format!("cannot start {}: {error}", setup.lab.display())),
    }
}

/// Runs an experiment's child process for about `seconds`; returns what it [told](tell).
pub(in crate::experiments) fn run_child<T: DeserializeOwned>(
    command: &mut Command,
    seconds: Duration,
    run: &Run<'_>,
) -> Result<T, RowError> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = Process::spawn("the network", command, Spawn::default())?;
    let deadline = Instant::now() + seconds + PATIENCE;
    let status = loop {
        if let Some(status) = process.child.try_wait()? {
            break status;
        }
        if run.stopped() {
            return Err(RowError::Stopped);
        }
        if Instant::now() >= deadline {
            return Err(RowError::failed(format!("the network was not done {PATIENCE:?} after its time")));
        }
        std::thread::sleep(LOOK);
    };
    // Both are short enough to fit their pipes.
    let (mut output, mut errors) = (String::new(), String::new());
    process.child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut output)).transpose()?;
    process.child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut errors)).transpose()?;
    if !status.success() {
        return Err(RowError::failed(last_line(&errors, status)));
    }
    serde_json::from_str(&output).map_err(RowError::failed)
}

/// Tells the process that [runs this one](run_child) what was measured.
pub(in crate::experiments) fn tell(outcome: &impl Serialize) -> Result<(), RowError> {
    println!("{}", serde_json::to_string(outcome).map_err(RowError::failed)?);
    Ok(())
}

/// The last line of what a program said, or how it ended.
fn last_line(text: &str, status: ExitStatus) -> String {
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.map_or_else(
        || format!("it ended with {status}"),
        |line| line.trim_start_matches("ringferry-lab: ").trim_start_matches("ringferry: ").into(),
    )
}

/// Gets the right to make network namespaces, where it is not there already. Before any thread.
pub(in crate::experiments) fn contain() -> Result<(), RowError> {
    if is_root() && has_net_admin() {
        return Ok(());
    }
    namespace::enter_user_namespace().map_err(RowError::failed)
}

/// Checks that everything can be had that a network takes.
pub(in crate::experiments) fn probe() -> Result<(), RowError> {
    contain()?;
    namespace::unshare_net().map_err(RowError::failed)?;
    let tun = File::options().read(true).write(true).open("/dev/net/tun");
    match tun {
        Ok(_) => Ok(()),
        Err(error) => {
            Err(RowError::failed(format!("/dev/net/tun cannot be opened: {error}; load the module tun")))
        }
    }
}

/// A process that ends with this.
pub(in crate::experiments) struct Process {
    name: &'static str,
    child: Child,
}

impl Process {
    /// It dies with this thread, which is the only one that starts processes.
    pub(in crate::experiments) fn spawn(
        name: &'static str,
        command: &mut Command,
        options: Spawn,
    ) -> Result<Self, RowError> {
        let child = spawn(command, Spawn { die_with_parent: true, ..options });
        let child = child.map_err(|error| RowError::failed(format!("cannot start {name}: {error}")))?;
        Ok(Self { name, child })
    }

    /// The process id.
    pub(in crate::experiments) fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it has.
    pub(in crate::experiments) fn ended(&mut self) -> Result<Option<ExitStatus>, RowError> {
        Ok(self.child.try_wait()?)
    }

    /// Asks it to end, and sees to it that it does.
    fn end(&mut self) {
        let asked = terminate(&mut self.child).is_ok();
        let deadline = Instant::now() + GRACE;
        while asked && Instant::now() < deadline {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(LOOK);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// Arguments for the parts of a network, beyond those that all have.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::experiments) struct Options<'a> {
    pub switch: &'a [&'a str],
    /// Keys of the guests' ports, each behind a comma.
    pub ports: [&'a str; 2],
    pub guests: [&'a [&'a str]; 2],
}

/// The network. Fields end in this order.
pub(in crate::experiments) struct Network {
    folder: PathBuf,
    program: PathBuf,
    _server: Process,
    guests: [Process; 2],
    switch: Process,
}

impl Network {
    /// Starts all of it. The output of programs goes to files in `folder`. The guests answer `ringferry ctl`, if they were
    /// told to, at [`Network::control`].
    pub(in crate::experiments) fn start(
        program: &Path,
        folder: &Path,
        options: Options<'_>,
    ) -> Result<Self, RowError> {
        let socket = |name: &str| folder.join(format!("{name}.sock"));
        let mut arguments = words(&["run"]);
        for (guest, keys) in std::iter::zip(GUESTS, options.ports) {
            let mut port = OsString::from("vhost-user:");
            port.push(socket(guest));
            port.push(keys);
            arguments.extend([OsString::from("--port"), port]);
        }
        arguments.extend([OsString::from("--control"), socket("control").into()]);
        arguments.extend(words(options.switch));
        let switch = ready(program, folder, "switch", arguments, Spawn::default())?;
        let guest = |at: usize| {
            let address = format!("{}/24", ADDRESSES[at]);
            let mut arguments = words(&["guest", "--tap", TAP, "--json", "--address", &address]);
            arguments.extend(words(options.guests[at]));
            arguments.extend([OsString::from("--socket"), socket(GUESTS[at]).into()]);
            ready(program, folder, GUESTS[at], arguments, Spawn { new_net: true, ..Spawn::default() })
        };
        let guests = [guest(0)?, guest(1)?];
        let server = words(&["traffic", "server", "--bind", ADDRESSES[1]]);
        let mut command = logged(program, folder, "server", server)?;
        let server = Process::spawn("server", &mut command, inside(&guests[1])?)?;
        Ok(Self { folder: folder.to_owned(), program: program.to_owned(), _server: server, guests, switch })
    }

    /// Runs the traffic client in guest a against the server in guest b; returns its report. Every byte that arrived
    /// was checked, or it is an error.
    pub(in crate::experiments) fn traffic(&mut self, options: &[&str]) -> Result<Value, RowError> {
        let client = words(&["traffic", "client", "--to", ADDRESSES[1], "--json", "--wait", "10"]);
        let mut command = logged(&self.program, &self.folder, "client", client)?;
        let mut client = Process::spawn("client", command.args(options), inside(&self.guests[0])?)?;
        let status = client.child.wait()?;
        if !status.success() {
            return Err(complaint(&self.folder, client.name, status));
        }
        self.output("client")
    }

    /// Asks the switch for its snapshot.
    pub(in crate::experiments) fn switch(&self) -> Result<Value, RowError> {
        self.ctl(&self.folder.join("control.sock"), &["show", "--json"])
    }

    /// Where guest 0 or 1 is to have its control socket, if it is to have one.
    pub(in crate::experiments) fn control(folder: &Path, guest: usize) -> PathBuf {
        folder.join(format!("{}-control.sock", GUESTS[guest]))
    }

    /// Asks a switch or a guest through `ringferry ctl`.
    pub(in crate::experiments) fn ctl(&self, socket: &Path, request: &[&str]) -> Result<Value, RowError> {
        let mut command = Command::new(&self.program);
        command.arg("ctl").arg("--control").arg(socket).args(request);
        let output = command.stdin(Stdio::null()).output()?;
        if !output.status.success() {
            return Err(RowError::failed(last_line(&String::from_utf8_lossy(&output.stderr), output.status)));
        }
        serde_json::from_slice(&output.stdout).map_err(RowError::failed)
    }

    /// Processor time that the switch and both guests have used so far.
    pub(in crate::experiments) fn cpu_time(&self) -> Result<[Duration; 2], RowError> {
        let time = |process: &Process| cpu_time(process.child.id());
        let [a, b] = &self.guests;
        Ok([time(&self.switch)?, time(a)? + time(b)?])
    }

    /// Ends the guests; returns what they counted.
    pub(in crate::experiments) fn finish(mut self) -> Result<[Value; 2], RowError> {
        self.guests.iter_mut().for_each(Process::end);
        Ok([self.output(GUESTS[0])?, self.output(GUESTS[1])?])
    }

    /// Reads the JSON that a process printed.
    fn output(&self, name: &str) -> Result<Value, RowError> {
        let text = std::fs::read_to_string(self.folder.join(format!("{name}.out")))?;
        let json = serde_json::from_str(&text);
        json.map_err(|error| RowError::failed(format!("{name} printed no JSON: {error}: {text}")))
    }
}

/// A number in what a process printed.
pub(in crate::experiments) fn number(value: &Value, path: &str) -> Result<f64, RowError> {
    let found = value.pointer(path).and_then(Value::as_f64);
    found.ok_or_else(|| RowError::failed(format!("no {path} among what was counted: {value}")))
}

pub(in crate::experiments) fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

/// In the network namespace of a process.
fn inside(process: &Process) -> Result<Spawn, RowError> {
    let net: OwnedFd = namespace::open_net(process.child.id()).map_err(RowError::failed)?;
    Ok(Spawn { join_net: Some(net), ..Spawn::default() })
}

/// A program with these arguments; what it says goes to files.
pub(in crate::experiments) fn logged(
    program: &Path,
    folder: &Path,
    name: &str,
    arguments: Vec<OsString>,
) -> Result<Command, RowError> {
    let file = |end: &str| File::create(folder.join(format!("{name}.{end}")));
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(file("out")?).stderr(file("log")?);
    Ok(command)
}

/// Starts a process that says when it is ready, and waits until then.
pub(in crate::experiments) fn ready(
    program: &Path,
    folder: &Path,
    name: &'static str,
    arguments: Vec<OsString>,
    mut options: Spawn,
) -> Result<Process, RowError> {
    let mut command = logged(program, folder, name, arguments)?;
    let ready = Ready::of(&mut command, &mut options)?;
    let mut process = Process::spawn(name, &mut command, options)?;
    if !ready.wait(PATIENCE)? {
        let _ = process.child.kill();
        return Err(complaint(folder, name, process.child.wait()?));
    }
    Ok(process)
}

/// Why a process ended, in its own words.
fn complaint(folder: &Path, name: &str, status: ExitStatus) -> RowError {
    let text = std::fs::read_to_string(folder.join(format!("{name}.log"))).unwrap_or_default();
    RowError::failed(format!("{name} failed: {}", last_line(&text, status)))
}
