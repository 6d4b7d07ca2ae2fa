//! The kernel's TCP: two guests on a switch, all of them this program, in network namespaces of their own.
//!
//! A process of the lab's own starts them (see [`Setup::child`]), so that it can enter a user namespace where the lab
//! has no right to make network namespaces. Whatever ends it ends them.
//!
//! ```text
//! lab -- lab child txmap run -- ringferry run                         the switch
//!                            |- ringferry guest --pieces --max-segs   namespace a, sends
//!                            |- ringferry guest                       namespace b
//!                            |- ringferry traffic server              namespace b
//!                            `- ringferry traffic client              namespace a
//! ```

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use ringferry_sys::namespace;
use ringferry_sys::process::{Spawn, has_net_admin, is_root, spawn, terminate};
use serde::{Deserialize, Serialize};

use super::case::Kernel;
use crate::experiment::{RowError, Run, Sample, Setup};

/// How much longer than another's a run of this is: TCP takes a moment to find its window.
pub(super) const TIMES: u32 = 5;

/// Beyond the time that is measured: starting everything, and the end. Half a second on an idle machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often to look whether a process has ended.
const LOOK: Duration = Duration::from_millis(5);
/// How long a process may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(2);
/// The descriptor on which a process says that it is ready.
const READY_FD: i32 = 3;

/// Guest b's address.
const SERVER: &str = "10.77.0.2";
/// Guest a's address.
const CLIENT: &str = "10.77.0.1";
/// The tap in each namespace.
const TAP: &str = "rf0";

/// What the process of its own prints.
#[derive(Debug, Serialize, Deserialize)]
struct Outcome {
    bits_per_second: f64,
    /// What the sending guest counted.
    guest: BTreeMap<String, f64>,
}

/// Why kernel TCP cannot be measured here, if so.
pub(super) fn impossible(setup: &Setup) -> Option<String> {
    let mut command = setup.child("txmap");
    command.arg("probe").stdin(Stdio::null());
    match command.output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(last_line(&String::from_utf8_lossy(&output.stderr), output.status)),
        Err(error) => Some(format!("cannot start {}: {error}", setup.program.display())),
    }
}

/// The last line of what a program said, or how it ended.
fn last_line(text: &str, status: ExitStatus) -> String {
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.map_or_else(
        || format!("it ended with {status}"),
        |line| line.trim_start_matches("ringferry: ").to_owned(),
    )
}

/// Measures one run, in Gbit/s of payload that arrived and was right.
pub(super) fn measure(case: &Kernel, setup: &Setup, run: &Run<'_>) -> Result<Sample, RowError> {
    let folder = tempfile::Builder::new().prefix("ringferry-lab-").tempdir()?;
    let seconds = run.seconds * TIMES;
    let mut command = setup.child("txmap");
    command.arg("run").arg(folder.path());
    command.args([case.send.to_string(), case.piece.to_string(), case.limit.to_string()]);
    command.arg(seconds.as_secs_f64().max(0.2).to_string());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = Process::spawn("the network", &mut command, Spawn::default())?;
    let deadline = Instant::now() + seconds + PATIENCE;
    let status = loop {
        if let Some(status) = process.child.try_wait()? {
            break status;
        }
        if run.stopped() {
            return Err(RowError::Stopped);
        }
        if Instant::now() >= deadline {
            return Err(RowError::failed(format!("the network had not finished {PATIENCE:?} late")));
        }
        std::thread::sleep(LOOK);
    };
    // Both fit into their pipes.
    let (mut output, mut errors) = (String::new(), String::new());
    process.child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut output)).transpose()?;
    process.child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut errors)).transpose()?;
    if !status.success() {
        return Err(RowError::failed(last_line(&errors, status)));
    }
    let outcome: Outcome = serde_json::from_str(&output).map_err(RowError::failed)?;
    let mut sample = Sample::new(outcome.bits_per_second / 1e9);
    if let (Some(bytes), Some(packets)) = (outcome.guest.get("tx_bytes"), outcome.guest.get("tx_packets")) {
        sample = sample.with("bytes/packet", bytes / packets.max(1.0));
    }
    let counted = outcome.guest.into_iter().filter(|(name, _)| name.starts_with("tx_"));
    Ok(counted.fold(sample, |sample, (name, value)| sample.with(&format!("guest {name}"), value)))
}

/// The process of its own.
pub(super) fn child(args: &[String]) -> Result<(), RowError> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["probe"] => probe(),
        ["run", folder, send, piece, limit, seconds] => {
            contain()?;
            let network = Network::start(Path::new(folder), piece, limit)?;
            let outcome = network.measure(send, seconds)?;
            println!("{}", serde_json::to_string(&outcome).map_err(RowError::failed)?);
            Ok(())
        }
        _ => Err(RowError::failed("usage: lab child txmap probe | run FOLDER SEND PIECE LIMIT SECONDS")),
    }
}

/// Gets the right to make network namespaces, where it is not there already.
fn contain() -> Result<(), RowError> {
    if is_root() && has_net_admin() {
        return Ok(());
    }
    namespace::enter_user_namespace().map_err(RowError::failed)
}

/// Whether everything can be had that a network takes.
fn probe() -> Result<(), RowError> {
    contain()?;
    namespace::unshare_net().map_err(RowError::failed)?;
    let tun = File::options().read(true).write(true).open("/dev/net/tun");
    tun.map_err(|error| {
        RowError::failed(format!("/dev/net/tun cannot be opened: {error}; load the module tun"))
    })?;
    Ok(())
}

/// A process that ends with this.
struct Process {
    name: &'static str,
    child: Child,
}

impl Process {
    /// It dies with this thread, which is the only one that starts processes.
    fn spawn(name: &'static str, command: &mut Command, options: Spawn) -> Result<Self, RowError> {
        let child = spawn(command, Spawn { die_with_parent: true, ..options });
        let child = child.map_err(|error| RowError::failed(format!("cannot start {name}: {error}")))?;
        Ok(Self { name, child })
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

/// Two guests on a switch. Fields end in this order.
struct Network {
    folder: PathBuf,
    program: PathBuf,
    server: Process,
    sender: Process,
    receiver: Process,
    _switch: Process,
}

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

impl Network {
    fn start(folder: &Path, piece: &str, limit: &str) -> Result<Self, RowError> {
        let program = std::env::current_exe()?;
        let socket = |name: &str| folder.join(format!("{name}.sock"));
        let port = |name: &str| {
            let mut port = OsString::from("vhost-user:");
            port.push(socket(name));
            [OsString::from("--port"), port]
        };
        let mut arguments = words(&["run"]);
        arguments.extend(port("a").into_iter().chain(port("b")));
        arguments.extend([OsString::from("--control"), socket("control").into()]);
        let switch = ready(&program, folder, "switch", arguments, Spawn::default())?;
        let guest = |name, socket: PathBuf, address: &str, more: &[&str]| {
            let mut arguments =
                words(&["guest", "--tap", TAP, "--json", "--address", &format!("{address}/24")]);
            arguments.extend(words(more));
            arguments.extend([OsString::from("--socket"), socket.into()]);
            ready(&program, folder, name, arguments, Spawn { new_net: true, ..Spawn::default() })
        };
        let receiver = guest("receiver", socket("b"), SERVER, &[])?;
        let sender = guest("sender", socket("a"), CLIENT, &["--pieces", piece, "--max-segs", limit])?;
        let server = words(&["traffic", "server", "--bind", SERVER, "--once"]);
        let mut command = logged(&program, folder, "server", server)?;
        let server = Process::spawn(
            "server",
            &mut command,
            Spawn { join_net: Some(net(&receiver)?), ..Spawn::default() },
        )?;
        Ok(Self { folder: folder.to_owned(), program, server, sender, receiver, _switch: switch })
    }

    /// One stream from a to b.
    fn measure(mut self, send: &str, seconds: &str) -> Result<Outcome, RowError> {
        let client = words(&["traffic", "client", "--to", SERVER, "--mode", "tcp", "--json", "--wait", "10"]);
        let mut command = logged(&self.program, &self.folder, "client", client)?;
        command.args(["--size", send, "--seconds", seconds]);
        let options = Spawn { join_net: Some(net(&self.sender)?), ..Spawn::default() };
        let mut client = Process::spawn("client", &mut command, options)?;
        let status = client.child.wait()?;
        if !status.success() {
            return Err(complaint(&self.folder, client.name, status));
        }
        #[derive(Deserialize)]
        struct Report {
            bits_per_second: f64,
        }
        let report: Report = self.output("client")?;
        self.server.end();
        self.sender.end();
        self.receiver.end();
        let counted: BTreeMap<String, serde_json::Value> = self.output("sender")?;
        let numbers = counted.into_iter().filter_map(|(name, value)| Some((name, value.as_f64()?)));
        Ok(Outcome { bits_per_second: report.bits_per_second, guest: numbers.collect() })
    }

    /// What a process printed, as JSON.
    fn output<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<T, RowError> {
        let text = std::fs::read_to_string(self.folder.join(format!("{name}.out")))?;
        serde_json::from_str(&text)
            .map_err(|error| RowError::failed(format!("{name} printed no JSON: {error}: {text}")))
    }
}

/// The network namespace of a process.
fn net(process: &Process) -> Result<OwnedFd, RowError> {
    namespace::open_net(process.child.id()).map_err(RowError::failed)
}

/// This program with these arguments; what it says goes to files in `folder`.
fn logged(program: &Path, folder: &Path, name: &str, arguments: Vec<OsString>) -> Result<Command, RowError> {
    let file = |end: &str| File::create(folder.join(format!("{name}.{end}")));
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(file("out")?).stderr(file("log")?);
    Ok(command)
}

/// Starts a process that says when it is ready, and waits until then.
fn ready(
    program: &Path,
    folder: &Path,
    name: &'static str,
    arguments: Vec<OsString>,
    mut options: Spawn,
) -> Result<Process, RowError> {
    let (reader, writer) = std::io::pipe()?;
    let mut command = logged(program, folder, name, arguments)?;
    command.arg("--ready-fd").arg(READY_FD.to_string());
    options.keep_fds.push((writer.into(), READY_FD));
    let mut process = Process::spawn(name, &mut command, options)?;
    let mut line = String::new();
    BufReader::new(reader).read_line(&mut line)?;
    if line != "READY\n" {
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
