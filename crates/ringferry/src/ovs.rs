//! `ringferry ovs-vsctl`: answers what libvirt asks of Open vSwitch's program of that name, for ports of a running switch.
//!
//! libvirt knows statistics of a vhost-user interface from Open vSwitch alone, and asks for them by running `ovs-vsctl` (virnetdevopenvswitch.c). The script
//! in `contrib/libvirt/` has that name, and leads here. Three questions are answered, each as ovs-vsctl(8) prints it:
//!
//! ```text
//!   get Interface vm0.sock name                                which interface is behind this socket
//!   --columns=name find Interface options:vhost-server-path=…  the same, where QEMU listens
//!   --columns=statistics list Interface vm0                    what it has counted
//! ```
//!
//! Whatever else is asked, and what is asked of an interface that is no port here, goes on to the real program, if there is one.
//!
//! As there, `rx` is what the switch has received from the port.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringferry_control::snapshot::PortSnapshot;
use ringferry_control::{self as control, Answer, ControlError, CountedAt, DropReason, Patience, Request};

/// Where the real program is, if it is installed: the script has its place.
const REAL: &str = "/usr/bin/ovs-vsctl.real";

/// Drops that Open vSwitch counts as errors of the sender.
const ERRORS: [DropReason; 5] = [
    DropReason::RxBadHeader,
    DropReason::RxTooShort,
    DropReason::RxTooBig,
    DropReason::RxBadMemory,
    DropReason::RxBadSlots,
];

/// Answers what libvirt asks of Open vSwitch, for ports of a running switch.
#[derive(Clone, Debug, clap::Args)]
pub struct OvsArgs {
    /// The arguments of `ovs-vsctl`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// A reason why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no switch to ask.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// No port here, and no Open vSwitch.
    #[error("ovs-vsctl: no row {0:?} in table Interface")]
    NoRow(String),
    /// This is none of the questions that are answered.
    #[error(
        "ovs-vsctl: only what libvirt asks about interfaces is answered here, and Open vSwitch is not installed at {REAL}"
    )]
    Unknown,
    /// The answer cannot be written, or the real program not be started.
    #[error(transparent)]
    Os(#[from] io::Error),
}

/// A question that is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Question {
    /// The name of the interface with this name, or behind a socket whose file is called so.
    Name(String),
    /// The name of the interface behind this socket, if there is one.
    NameOf(PathBuf),
    /// What an interface has counted; nothing if there is none and that is no error.
    Statistics { name: String, if_exists: bool },
}

impl Question {
    fn of(arguments: &[OsString]) -> Option<Question> {
        let words: Option<Vec<&str>> = arguments.iter().map(|word| word.to_str()).collect();
        let words = words?;
        let has = |option: &str| words.contains(&option);
        let command: Vec<&str> = words.iter().copied().filter(|word| !word.starts_with("--")).collect();
        match command[..] {
            ["get", "Interface", name, "name"] => Some(Question::Name(name.to_owned())),
            ["find", "Interface", condition] if has("--columns=name") => {
                Some(Question::NameOf(condition.strip_prefix("options:vhost-server-path=")?.into()))
            }
            ["list", "Interface", name] if has("--columns=statistics") => {
                Some(Question::Statistics { name: name.to_owned(), if_exists: has("--if-exists") })
            }
            _ => None,
        }
    }

    /// The answer, or none if no port is meant.
    fn answer(&self, ports: &[PortSnapshot]) -> Option<String> {
        match self {
            Question::Name(asked) => {
                let has_socket = |port: &&PortSnapshot| {
                    Path::new(&port.peer).file_name().is_some_and(|file| file == asked.as_str())
                };
                // A socket that systemd has made has no path here; ports are named after their sockets, if nobody says otherwise.
                let stem = asked.strip_suffix(".sock").unwrap_or(asked);
                let has_name = |port: &&PortSnapshot| port.name == *asked || port.name == stem;
                let mut with_socket = ports.iter().filter(has_socket);
                let found = match (with_socket.next(), with_socket.next()) {
                    (Some(only), None) => Some(only),
                    // Nobody is told of another one's port.
                    (Some(_), Some(_)) => None,
                    (None, _) => ports.iter().find(has_name),
                };
                found.map(|port| format!("{}\n", port.name))
            }
            Question::NameOf(path) => {
                ports.iter().find(|port| Path::new(&port.peer) == path).map(|port| format!("{}\n", port.name))
            }
            Question::Statistics { name, .. } => {
                ports.iter().find(|port| port.name == *name).map(|port| statistics(port) + "\n")
            }
        }
    }
}

/// What a port has counted, as a map of Open vSwitch's database in JSON (RFC 7047, 5.1).
fn statistics(port: &PortSnapshot) -> String {
    let counter = |name: &str| port.counters.get(name).copied().unwrap_or(0);
    let dropped = |is_it: &dyn Fn(DropReason) -> bool| -> u64 {
        let reasons = DropReason::ALL.into_iter().filter(|reason| is_it(*reason));
        reasons.filter_map(|reason| port.drops.get(reason.name())).sum()
    };
    let is_of_sender = |reason: DropReason| reason.counted_at() == CountedAt::Sender;
    let pairs = [
        ("rx_bytes", counter("rx_bytes")),
        ("rx_dropped", dropped(&|reason| is_of_sender(reason) && !ERRORS.contains(&reason))),
        ("rx_errors", dropped(&|reason| ERRORS.contains(&reason))),
        ("rx_packets", counter("rx_packets")),
        ("tx_bytes", counter("tx_bytes")),
        ("tx_dropped", dropped(&|reason| !is_of_sender(reason))),
        ("tx_errors", 0),
        ("tx_packets", counter("tx_packets")),
    ];
    serde_json::json!(["map", pairs]).to_string()
}

/// Answers, or has the real program answer.
///
/// # Errors
/// See [`enum@Error`].
pub fn run(args: &OvsArgs) -> Result<(), Error> {
    let question = Question::of(&args.arguments);
    let found = match &question {
        Some(question) => ask(question),
        None => Ok(None),
    };
    match (found, &question) {
        (Ok(Some(answer)), _) => Ok(io::stdout().write_all(answer.as_bytes())?),
        _ if Path::new(REAL).exists() => Err(Command::new(REAL).args(&args.arguments).exec().into()),
        (Err(error), _) => Err(error.into()),
        // Neither is an error there: nothing is found.
        (Ok(None), Some(Question::NameOf(_) | Question::Statistics { if_exists: true, .. })) => Ok(()),
        (Ok(None), Some(Question::Name(name) | Question::Statistics { name, .. })) => {
            Err(Error::NoRow(name.clone()))
        }
        (Ok(None), None) => Err(Error::Unknown),
    }
}

fn ask(question: &Question) -> Result<Option<String>, ControlError> {
    match control::call_with(
        &control::default_path(),
        &Request::Show { addresses: Some(0) },
        Patience::SHORT,
    )? {
        Answer::Show(snapshot) => Ok(question.answer(&snapshot.ports)),
        // A guest has no ports.
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(words: &str) -> Option<Question> {
        let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
        Question::of(&words)
    }

    #[test]
    fn what_libvirt_asks_is_understood_and_nothing_else() {
        let found = question("--timeout=5 get Interface vm0.sock name");
        assert_eq!(found, Some(Question::Name("vm0.sock".to_owned())));
        let found = question(
            "--timeout=5 --no-headings --columns=name find Interface options:vhost-server-path=/run/a/vm0.sock",
        );
        assert_eq!(found, Some(Question::NameOf("/run/a/vm0.sock".into())));
        let found = question(
            "--timeout=5 --if-exists --format=list --data=json --no-headings --columns=statistics list Interface vm0",
        );
        assert_eq!(found, Some(Question::Statistics { name: "vm0".to_owned(), if_exists: true }));
        for other in [
            "--timeout=5 list Interface vm0",
            "--columns=name find Interface name=vm0",
            "--timeout=5 --may-exist add-port br0 vm0",
            "get Interface vm0 mtu",
            "",
        ] {
            assert_eq!(question(other), None, "{other}");
        }
    }

    #[test]
    fn answers_are_those_of_open_vswitch() {
        let one: PortSnapshot = serde_json::from_value(serde_json::json!({
            "name": "vm0", "kind": "vhost-user", "state": "up", "peer": "/run/ringferry/guest-7.sock", "mtu": 1500, "features": [], "queues": [],
            "counters": {"rx_packets": 7, "rx_bytes": 700, "tx_packets": 9, "tx_bytes": 900, "kicks": 1},
            "drops": {"no-receive-buffers": 3, "spoofed": 2, "rx-bad-header": 1, "link-down": 4},
        }))
        .unwrap();
        let answer = |question: Question| question.answer(std::slice::from_ref(&one));
        for name in ["vm0", "guest-7.sock", "vm0.sock"] {
            assert_eq!(answer(Question::Name(name.to_owned())).as_deref(), Some("vm0\n"));
        }
        assert_eq!(answer(Question::Name("guest-7".to_owned())), None);
        let twin =
            PortSnapshot { name: "vm1".to_owned(), peer: "/run/b/guest-7.sock".to_owned(), ..one.clone() };
        let of_two = Question::Name("guest-7.sock".to_owned()).answer(&[one.clone(), twin]);
        assert_eq!(of_two, None, "two ports have sockets of this name");
        assert_eq!(answer(Question::NameOf(one.peer.clone().into())).as_deref(), Some("vm0\n"));
        assert_eq!(answer(Question::NameOf("guest-7.sock".into())), None);
        let statistics = |name: &str| Question::Statistics { name: name.to_owned(), if_exists: true };
        let expected = "[\"map\",[[\"rx_bytes\",700],[\"rx_dropped\",2],[\"rx_errors\",1],[\"rx_packets\",7],[\"tx_bytes\",900],[\"tx_dropped\",7],[\"tx_errors\",0],[\"tx_packets\",9]]]\n";
        assert_eq!(answer(statistics("vm0")).as_deref(), Some(expected));
        assert_eq!(answer(statistics("vm1")), None);
    }
}
