//! The network of the demo: one switch, two guests in network namespaces of their own, and a traffic server
//! in the second.
//!
//! ```text
//!  namespace a                                        namespace b
//!   traffic client                                     traffic server
//!   kernel TCP/IP                                      kernel TCP/IP
//!   tap rf0  10.77.0.1                                 tap rf0  10.77.0.2
//!   ringferry guest (driver half)                      ringferry guest (driver half)
//!        |    vm-a.sock                     vm-b.sock      |
//!        +-- shared memory --- ringferry run --- shared memory
//! ```

use super::Error;
use super::measure::{Kernel, Port, Snapshot};
use super::supervisor::{Id, Place, Start, Supervisor};
use crate::traffic::{DEFAULT_PORT, Progress, Report};
use ringferry_control::{self as control, Answer, Request};
use ringferry_sys::{namespace, process};
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long the switch and the guests may take to start, and `ctl` to answer.
const STARTUP: Duration = Duration::from_secs(10);
/// How long a switch whose socket fails may take to end, and to say why.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// How long a test may take beyond the time it sends: the client's own limits are shorter.
const SLACK: Duration = Duration::from_secs(60);
/// How long the client waits for the server and for the path to it, in seconds.
const WAIT: &str = "10";
/// The tap in each guest's namespace.
const TAP: &str = "rf0";
/// A socket's path must fit in 108 bytes (unix(7)); this leaves room for the names below.
const MAX_BASE: usize = 60;
/// Names tried for the sockets' directory.
const MAX_ATTEMPTS: u32 = 100;
/// The guests: name, namespace for messages, and address.
const GUESTS: [(&str, &str, &str); 2] = [("guest a", "vm-a", "10.77.0.1"), ("guest b", "vm-b", "10.77.0.2")];

/// A directory that only this user can enter; removed with everything in it when dropped.
struct PrivateDir(PathBuf);

impl PrivateDir {
    fn new() -> Result<Self, Error> {
        let mut base = std::env::temp_dir();
        if base.as_os_str().len() > MAX_BASE {
            base = "/tmp".into();
        }
        // A demo that was killed leaves its directory, and containers with process numbers of their own may
        // share a temporary one.
        let mut attempt = 0;
        loop {
            let path = base.join(format!("ringferry-demo-{}-{attempt}", std::process::id()));
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists && attempt < MAX_ATTEMPTS => {
                    attempt += 1;
                }
                Err(source) => return Err(Error::Directory { path, source }),
            }
        }
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        // What cannot be removed is an empty directory of this user's in the temporary one.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The running network. Dropping it ends it: first the processes, then the sockets' directory.
pub struct Network {
    supervisor: Supervisor,
    switch: Id,
    guests: [Id; 2],
    dir: PrivateDir,
}

fn arguments(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

/// `prefix` and a path, as one word.
fn word(prefix: &str, path: &Path) -> OsString {
    let mut word = OsString::from(prefix);
    word.push(path);
    word
}

impl Network {
    /// Starts everything and waits until it is ready.
    pub fn start() -> Result<Self, Error> {
        let dir = PrivateDir::new()?;
        let mut supervisor = Supervisor::new()?;
        let socket = |vm: &str| dir.0.join(format!("{vm}.sock"));
        let mut command = arguments(&["run", "--port"]);
        command.push(word("vhost-user:", &socket("vm-a")));
        command.push("--port".into());
        command.push(word("vhost-user:", &socket("vm-b")));
        command.push("--control".into());
        command.push(dir.0.join("ctl.sock").into());
        let switch = supervisor.start(Start {
            name: "the switch",
            place: Place::Here,
            arguments: command,
            essential: true,
            tells_ready: true,
        })?;
        supervisor.until_ready(switch, STARTUP)?;
        let mut start_guest = |(name, vm, address): (&'static str, &str, &str)| {
            let mut command =
                arguments(&["guest", "--tap", TAP, "--address", &format!("{address}/24"), "--socket"]);
            command.push(socket(vm).into());
            supervisor.start(Start {
                name,
                place: Place::New,
                arguments: command,
                essential: true,
                tells_ready: true,
            })
        };
        let guests = [start_guest(GUESTS[0])?, start_guest(GUESTS[1])?];
        for guest in guests {
            supervisor.until_ready(guest, STARTUP)?;
        }
        let mut network = Self { supervisor, switch, guests, dir };
        let place = network.place(1)?;
        network.supervisor.start(Start {
            name: "the traffic server",
            place,
            arguments: arguments(&["traffic", "server", "--bind", GUESTS[1].2]),
            essential: true,
            tells_ready: false,
        })?;
        Ok(network)
    }

    /// The network namespace of guest `index`.
    fn place(&self, index: usize) -> Result<Place, Error> {
        Ok(Place::Join(namespace::open_net(self.supervisor.pid(self.guests[index]))?))
    }

    /// Runs the traffic client in guest a against the server in guest b. The inner error is the test's,
    /// with the client's own words.
    pub fn traffic(
        &mut self,
        mode: &str,
        size: usize,
        seconds: f64,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Result<Report, String>, Error> {
        let place = self.place(0)?;
        let (size, duration, port) = (size.to_string(), seconds.to_string(), DEFAULT_PORT.to_string());
        let words = [
            "traffic",
            "client",
            "--to",
            GUESTS[1].2,
            "--port",
            &port,
            "--mode",
            mode,
            "--size",
            &size,
            "--seconds",
            &duration,
        ];
        let mut command = arguments(&words);
        command.extend(arguments(&["--wait", WAIT, "--json", "--progress-json"]));
        let client = self.supervisor.start(Start {
            name: "the traffic client",
            place,
            arguments: command,
            essential: false,
            tells_ready: false,
        })?;
        let mut failure = String::new();
        let ended =
            self.supervisor.finish(client, Duration::from_secs_f64(seconds) + SLACK, &mut |line| {
                match serde_json::from_str(line) {
                    Ok(step) => progress(step),
                    Err(_) => line.trim_start_matches("ringferry: ").clone_into(&mut failure),
                }
            })?;
        Ok(match serde_json::from_str(&ended.output) {
            Ok(report) if ended.status.success() => Ok(report),
            _ if failure.is_empty() => Err(format!("the traffic client ended with {}", ended.status)),
            _ => Err(failure),
        })
    }

    /// CPU time, counters and drops up to now.
    pub fn snapshot(&mut self) -> Result<Snapshot, Error> {
        let ports = self.ports()?;
        let cpu = |id: Id| {
            process::cpu_time(self.supervisor.pid(id)).map_err(Error::setup("reading a child's CPU time"))
        };
        let kernel = |index: usize| {
            Kernel::read(self.supervisor.pid(self.guests[index]), TAP)
                .map_err(Error::setup("reading a guest's network counters"))
        };
        let [a, b] = self.guests;
        Ok(Snapshot::new([cpu(self.switch)?, cpu(a)?, cpu(b)?], ports, [kernel(0)?, kernel(1)?]))
    }

    fn ports(&mut self) -> Result<Vec<Port>, Error> {
        match control::call(&self.dir.0.join("ctl.sock"), &Request::Show { addresses: Some(0) }) {
            Ok(Answer::Show(snapshot)) => Ok(snapshot.ports.into_iter().map(Port::from).collect()),
            Ok(_) => Err(Error::NoSwitch),
            Err(error) => {
                // A switch that has ended says more than its socket.
                self.supervisor.watch(LAST_WORDS)?;
                Err(error.into())
            }
        }
    }

    /// Lets `time` pass while all processes are watched.
    pub fn watch(&mut self, time: Duration) -> Result<(), Error> {
        self.supervisor.watch(time)
    }

    /// Waits until something ends the network, and says what.
    pub fn watch_for_ever(&mut self) -> Error {
        loop {
            if let Err(error) = self.watch(STARTUP) {
                return error;
            }
        }
    }

    /// How to look at the running network from another terminal. `contained`: it is in a user namespace.
    pub fn directions(&self, contained: bool) -> String {
        let options = if contained { "--user --preserve-credentials --net" } else { "--net" };
        let mut text = String::new();
        for (id, (name, _, address)) in self.guests.iter().zip(GUESTS) {
            text +=
                &format!("  {name} ({address}):  nsenter --target {} {options}\n", self.supervisor.pid(*id));
        }
        text + &format!(
            "  the switch:           ringferry ctl --control {} show\n",
            self.dir.0.join("ctl.sock").display()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn socket_directories_are_private_distinct_and_removed_with_their_contents() {
        let (one, two) = (PrivateDir::new().unwrap(), PrivateDir::new().unwrap());
        assert_ne!(one.0, two.0);
        assert_eq!(std::fs::metadata(&one.0).unwrap().mode() & 0o777, 0o700);
        std::fs::write(one.0.join("vm-a.sock"), "").unwrap();
        let path = one.0.clone();
        drop(one);
        assert!(!path.exists() && two.0.exists());
    }
}
