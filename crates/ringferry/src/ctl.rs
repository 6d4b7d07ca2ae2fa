//! `ringferry ctl`: asks a running switch, or a running `ringferry guest`, through its control socket and prints the
//! answer.

use std::io::{self, IsTerminal, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use ringferry_control::channels::{Channels, Stats, Steering};
use ringferry_control::explain::Explanation;
use ringferry_control::mirror::{FdbFlush, LinkChange, Mirrors};
use ringferry_control::snapshot::{self, Column, ColumnError};
use ringferry_control::text::wrap;
use ringferry_control::trace::{Trace, TraceProtocol, TraceRequest};
use ringferry_control::why::Diagnosis;
use ringferry_control::{self as control, Answer, ControlError, Patience, Request};
use ringferry_control::{PortChange, PortRules, Reload, SettingsChange};

use ringferry_packet::ether::Mac;

use crate::capture::DirectionArg;
use crate::error_report::{ErrorKind, ErrorReport};

/// Shown below the options by `ringferry ctl --help`.
const EXAMPLES: &str = "\
Examples:
  ringferry ctl show                                             everything, for people
  ringferry ctl show vm0                                         one port in full: rates, rings, drops and what to do about them
  ringferry ctl show --watch 2                                   again every two seconds
  ringferry ctl why vm0                                          why is it slow, or silent, and what to do
  ringferry ctl trace vm0 vm1 tcp4                               where would a frame go, and what would drop it?
  ringferry ctl set vm0 vlan=10 isolated=on                      rules of a port, now and in the configuration file
  ringferry ctl set vm0 rate_in=1gbit rate_out=1gbit --runtime   now, and not in the file
  ringferry ctl set vm0 mtu=9000 packed=off                      offered to the next front end that connects
  ringferry ctl rules vm0
  ringferry ctl unset vm0 rate_in rate_out
  ringferry ctl add vhost-user:/run/ringferry/vm2.sock,vlan=10   a port, now and in the configuration file
  ringferry ctl remove vm2 --drain                               after what is queued has gone out
  ringferry ctl reload --dry-run                                 what would change if the file were read again
  ringferry ctl mirror add vm0 probe                             copies of what vm0 sends and receives, for the port probe
  ringferry ctl link vm0 down                                    no packet passes vm0
  ringferry ctl fdb flush --port vm0                             forget the addresses learned behind vm0
  ringferry ctl assign vm1 0 1                                   pair 0 of vm1 is served by worker 1 from now on
  ringferry ctl dump > ringferry.toml                            what is in force, as a file";

/// Shown below the options by `ringferry ctl set -h` and `--help`.
const RULES: &str = "\
`in` is what the switch takes from the port, what its guest sends. What is above `rate_in` waits
in the guest's ring; what is above `rate_out` waits in the switch for a moment, and is marked or dropped; what is above `storm` is dropped.

Rules hold at once. So do the other settings where they can; those on which a front end has agreed hold with the next connection, and the
answer says so. What can change only when the port is opened anew is refused: write it into the configuration file and use `ringferry ctl reload`.
Either all settings are carried out or none. They are kept in the configuration file that the switch was started from, where only
these keys are touched; if they cannot be kept, the answer says why.

Examples:
  ringferry ctl set vm0 vlan=10
  ringferry ctl set uplink trunk=10,20-29 native=5
  ringferry ctl set vm0 allowed_macs=52:54:00:00:00:01 allowed_ips=10.0.0.2,fd00::/64
  ringferry ctl set vm0 storm=1kpps rate_in=1gbit rate_in_burst=1mib --runtime
  ringferry ctl set vm0 mtu=9000 worker=1

All keys: `ringferry ctl set --help`, docs/configuration.md.";

/// Shown below the options by `ringferry ctl set --help`: every key that can change.
fn keys_and_rules() -> String {
    let keys = ringferry_switch::config::settings_help();
    format!(
        "As in a [[port]] table and in --port flags; a list has commas between its entries.\n\n{keys}\n{RULES}"
    )
}

/// Shown below the options by `ringferry ctl add --help`.
const ADD: &str = "\
To add a port that is there with these very settings changes nothing and is no error; if there is another one of that name, the answer
says in what it differs.

A switch in its sandbox opens sockets in the directories in which it had some at its start, and in those that the configuration file
names with socket_directories; and it makes taps, but attaches to existing ones only if the configuration file has them: write such a port
into the file and use `ringferry ctl reload`.

Examples:
  ringferry ctl add vhost-user:/run/ringferry/vm2.sock
  ringferry ctl add vhost-user:/run/ringferry/vm3.sock,vlan=10,rate_in=1gbit
  ringferry ctl add tap:rf1,mtu=9000 --runtime

All keys: `ringferry run --help`, docs/configuration.md.";

/// Shown below the options by `ringferry ctl reload --help`.
const RELOAD: &str = "\
The file is read with its drop-in files, those in the directory of its name with .d in place of .toml. If anything in it is wrong nothing
is done. Of the differences each port has all or none: ports that are not in the file any more are removed, new ones are added, and what
`ringferry ctl set` can change is changed in the same way, without a packet lost. A port with other settings than that is opened anew, so that
its guest has to connect again. Ports that were given by flags, or added with --runtime, stay. The exit status is 1 if something could not be done.

Examples:
  ringferry ctl reload --dry-run
  ringferry ctl reload";

/// Shown below the options by `ringferry ctl fdb --help`.
const FDB: &str = "\
Examples:
  ringferry ctl fdb                                    all addresses
  ringferry ctl fdb flush                              forget what was learned
  ringferry ctl fdb flush --port uplink --vlan 10
  ringferry ctl fdb flush --mac 52:54:00:00:00:01
  ringferry ctl fdb add 52:54:00:00:00:01 vm0 --vlan 10
  ringferry ctl fdb del 52:54:00:00:00:01";

/// Shown below the options by `ringferry ctl why --help`.
const WHY: &str = "\
Rates are those of the last ten seconds, and drops those of the last minute; what was earlier is said to be so. The most important comes first: what keeps packets
from passing, what loses them, what makes them slower than need be, and what else one should know.

Examples:
  ringferry ctl why vm0                                          everything about vm0
  ringferry ctl why vm0 vm1                                      and what is between the two
  ringferry ctl why vm0 --json | jq -r '.findings[].situation'";

/// Shown below the options by `ringferry ctl mirror --help`.
const MIRROR: &str = "\
The port that gets the copies goes on as any other; no rules apply to the copies, and nothing is learned from them. What would hold up the mirrored
port is not copied and counted as lost. Mirrors outlive a replacement, and a kill
where the state is kept; they end when the switch is stopped, and are not in its configuration.

Examples:
  ringferry ctl mirror add vm0 probe
  ringferry ctl mirror add uplink probe --direction in --vlan 10
  ringferry ctl mirror list
  ringferry ctl mirror remove vm0 probe";

/// Shown below the options by `ringferry ctl show --help`.
fn show_help() -> String {
    let columns =
        snapshot::COLUMNS.iter().map(|column| format!("  {:<12} {}\n", column.name, column.meaning));
    let columns: String = columns.collect();
    format!(
        "Rates are over the last 1, 10 and 60 seconds by the clock of the switch, whenever and however seldom it is asked. `rx` is what the switch received
from a port, so what its guest has sent.

Columns:
{columns}
Examples:
  ringferry ctl show
  ringferry ctl show vm0                                         one port in full
  ringferry ctl show --reasons                                   why packets were dropped, and what to do about it
  ringferry ctl show --columns port,worker,rx-bps,tx-bps,rules
  ringferry ctl show --columns port,queue,worker,rx-pps,posted --window 60
  ringferry ctl show --columns port,rx-pps,drop-rate --watch 5
  ringferry ctl show vm0 --json | jq '.ports[0].rates[] | select(.window == 10).drops // {{}}'
  ringferry ctl show --json --watch                              a line of JSON each second"
    )
}

/// Returns the name of a column, or says which there are.
fn column(name: &str) -> Result<String, ColumnError> {
    Column::of(name).map(|column| column.name.to_owned())
}

/// Asks a running switch or guest.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct CtlArgs {
    /// Control socket of the switch, or of a `ringferry guest` that was given one [default: $RINGFERRY_CONTROL, else /run/ringferry/control.sock for root,
    /// $XDG_RUNTIME_DIR/ringferry.sock for others, without that variable /tmp/ringferry-UID/control.sock].
    #[arg(long, value_name = "PATH", global = true)]
    pub control: Option<PathBuf>,

    /// How long a switch that does not answer is waited for.
    #[arg(long, value_name = "SECONDS", global = true, default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..))]
    pub timeout: u16,

    /// The request.
    #[command(subcommand)]
    pub command: CtlCommand,
}

/// The switch that is asked.
struct Switch {
    control: PathBuf,
    timeout: Duration,
}

impl Switch {
    fn call(&self, request: &Request) -> Result<Answer, ControlError> {
        let waits = |who: &str| {
            eprintln!("ringferry: still waiting for an answer on {}: {who}", self.control.display());
        };
        control::call_with(&self.control, request, Patience { pause: self.timeout, waits: &waits })
    }
}

/// The requests of the command line.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum CtlCommand {
    /// Load and rates, ports, their state, features, queues and counters.
    #[command(after_help = show_help())]
    Show(ShowArgs),
    /// The forwarding database: which MAC address is behind which port. Addresses are forgotten, or made static, with flush, add and del.
    #[command(args_conflicts_with_subcommands = true, after_help = FDB)]
    Fdb {
        /// As JSON.
        #[arg(long)]
        json: bool,
        /// A change.
        #[command(subcommand)]
        change: Option<FdbCommand>,
    },
    /// Takes the link of a port down, so that no packet passes it, or up again. It stays so until the switch ends, and is not kept in its
    /// configuration. A guest is told if its front end takes the message: its port has a mac (then the configuration space is the switch's), and
    /// the front end asks for changes of it. QEMU's virtio-net does not; use set_link in its monitor.
    Link {
        /// The port.
        port: String,
        /// What it is to be.
        state: LinkState,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Copies what passes a port to another one, for a probe or an intrusion detection system. Without a subcommand: all mirrors.
    #[command(args_conflicts_with_subcommands = true, after_help = MIRROR)]
    Mirror {
        /// As JSON.
        #[arg(long)]
        json: bool,
        /// A change.
        #[command(subcommand)]
        change: Option<MirrorCommand>,
    },
    /// The configuration in force as a TOML file, ports given by flags included.
    Dump,
    /// How many queue pairs a port uses, as `ethtool -l`; of a guest with a number, changes it, as `ethtool -L`.
    Channels {
        /// The port; of a guest, its tap.
        port: String,
        /// The setting to change.
        #[arg(requires = "count")]
        parameter: Option<Parameter>,
        /// How many queue pairs to use from now on.
        #[arg(value_name = "N")]
        count: Option<u16>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// The settings that decide which queue pair a packet takes, and which processor serves each.
    Steering {
        /// The port; of a guest, its tap.
        port: String,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Has a worker of the switch serve a queue pair of a port, or the queue of a tap, from now on; no packet is lost or overtaken. It is kept in the configuration file, as the key worker of the port.
    Assign {
        /// The port.
        port: String,
        /// Number of the pair, as `ctl steering` shows it.
        queue: u16,
        /// Number of the worker, as `ctl show` has it.
        worker: u16,
        /// Leave the configuration file as it is: the next start does not know of it.
        #[arg(long)]
        runtime: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Counters, as `ethtool -S`.
    Stats {
        /// The port; of a guest, its tap.
        port: String,
        /// Those of each queue, too.
        #[arg(long)]
        queues: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Finds out why a port carries nothing, loses packets or is slow, from what was measured lately, and says what to do; the most important first.
    #[command(after_help = WHY)]
    Why {
        /// The port.
        port: String,
        /// The port at the other end, for what is between the two as well: rules, MTU, offloads, workers.
        peer: Option<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Tells in words what becomes of packets to and from a port: offloads, what the switch does in their place and what that costs. It is that part of `ctl why PORT PEER` for all peers.
    Explain {
        /// The port.
        port: String,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Walks an imaginary frame through the switch and says of each step what it would do: VLANs, rules, addresses, offloads, queues, buffers. Nothing is
    /// sent, learned or counted.
    #[command(after_help = trace_help())]
    Trace(TraceArgs),
    /// Adds a port to a running switch, and to the configuration file that it was started from. The answer comes when the port is open.
    #[command(after_help = ADD)]
    Add {
        /// The port, as in a --port flag of `ringferry run`.
        #[arg(value_name = "KIND:WHERE[,KEY=VALUE...]")]
        port: String,
        /// Leave the configuration file as it is: the next start does not know of the port.
        #[arg(long)]
        runtime: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Removes a port from a running switch, and from the configuration file. Its peer is disconnected; no packet passes it when the answer
    /// comes.
    Remove {
        /// The port.
        port: String,
        /// Do nothing if there is no such port.
        #[arg(long)]
        if_exists: bool,
        /// First forward what its guest has sent and deliver what is queued for it, while nothing more is sent to it and no other front end is
        /// served; for so many seconds at most, 25 at the most [default: 10].
        #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "10",
            value_parser = clap::value_parser!(u16).range(1..=25))]
        drain: Option<u16>,
        /// Leave the configuration file as it is: the next start has the port again.
        #[arg(long)]
        runtime: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Has the configuration file read again and carries out what has changed in it, as SIGHUP does. Ports that have not changed are not
    /// touched.
    #[command(after_help = RELOAD)]
    Reload {
        /// Only say what would be done.
        #[arg(long)]
        dry_run: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// The rules of a port: VLANs, isolation, allowed addresses, limits.
    Rules {
        /// The port.
        port: String,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Changes settings of a port that is open, now and in the configuration file: its rules, its worker, its MTU, what it offers.
    #[command(after_help = RULES, after_long_help = keys_and_rules())]
    Set {
        /// The port.
        port: String,
        /// The setting to change.
        #[arg(value_name = "KEY=VALUE", required = true)]
        settings: Vec<String>,
        /// Leave the configuration file as it is: the next start does not know of it.
        #[arg(long)]
        runtime: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Takes settings of a port back, now and in the configuration file. Keys that depend on another go with it, such as native with
    /// trunk; `ringferry ctl set --help` lists the keys.
    Unset {
        /// The port.
        port: String,
        /// The settings to take back.
        #[arg(value_name = "KEY", required = true)]
        keys: Vec<String>,
        /// Leave the configuration file as it is: the next start does not know of it.
        #[arg(long)]
        runtime: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
}

/// What `ringferry ctl show` is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct ShowArgs {
    /// One port in full. Only a switch has several.
    pub port: Option<String>,
    /// The same as JSON; with --watch a line for each answer.
    #[arg(long)]
    pub json: bool,
    /// In place of that: why packets were dropped, at which ports, and what to do about it. Only a switch knows.
    #[arg(long, conflicts_with = "json")]
    pub reasons: bool,
    /// In place of that: a table with these columns only, a row for each port, or with the column queue for each queue pair.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = column, conflicts_with_all = ["json", "reasons"])]
    pub columns: Vec<String>,
    /// The seconds over which the rates in such a table are [default: 10].
    #[arg(long, value_name = "SECONDS", requires = "columns", value_parser = ["1", "10", "60"])]
    pub window: Option<String>,
    /// Ask again every so many seconds, until the reader has seen enough. A switch that ends, or is replaced, is waited for.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub watch: Option<u32>,
    /// End after so many answers.
    #[arg(long, value_name = "N", requires = "watch")]
    pub count: Option<u64>,
}

/// What `ringferry ctl trace` is asked for.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct TraceArgs {
    /// The port that the frame would come from, and its source address if it is not to be one that is known there.
    #[arg(value_name = "PORT[/MAC]", value_parser = Sender::from_str)]
    pub from: Sender,
    /// Where it would go.
    #[arg(value_name = "PORT|MAC|broadcast")]
    pub to: String,
    /// What it would carry.
    #[arg(value_name = "PROTOCOL", default_value = "raw", value_parser = TraceProtocol::from_str)]
    pub protocol: TraceProtocol,
    /// It has a tag of this VLAN as the port sends it; 0 is a tag for its priority alone. Without this it has none.
    #[arg(long, value_name = "N")]
    pub vlan: Option<u16>,
    /// Its length in bytes, from the Ethernet header on [default: 60, or ten segments with --gso].
    #[arg(long, value_name = "BYTES")]
    pub size: Option<u32>,
    /// It is one large frame, to be cut into segments with so many bytes of payload (TSO, USO).
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(1..))]
    pub gso: Option<u16>,
    /// Its checksum is left to whoever receives it.
    #[arg(long)]
    pub csum: bool,
    /// Its IP source address [default: the first that the port may use, or one for documentation].
    #[arg(long, value_name = "IP")]
    pub from_ip: Option<IpAddr>,
    /// Its IP destination address.
    #[arg(long, value_name = "IP")]
    pub to_ip: Option<IpAddr>,
    /// The queue pair of the port that it comes from.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(..i64::from(MOST_QUEUES)))]
    pub queue: u16,
    /// As JSON.
    #[arg(long)]
    pub json: bool,
}

/// Queue pairs that a port has at most.
const MOST_QUEUES: u16 = 256;

/// Where an imaginary frame comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sender {
    /// The port.
    pub port: String,
    /// The source address, if it is said.
    pub mac: Option<String>,
}

impl FromStr for Sender {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.rsplit_once('/') {
            Some((port, mac)) if !port.is_empty() && mac.contains(':') => {
                mac.parse::<Mac>().map_err(|error| error.to_string())?;
                Ok(Sender { port: port.to_owned(), mac: Some(mac.to_owned()) })
            }
            _ => Ok(Sender { port: text.to_owned(), mac: None }),
        }
    }
}

impl TraceArgs {
    fn request(self) -> Request {
        Request::Trace(TraceRequest {
            from: self.from.port,
            source: self.from.mac,
            to: self.to,
            vlan: self.vlan,
            protocol: self.protocol,
            size: self.size,
            gso: self.gso,
            csum: self.csum,
            source_ip: self.from_ip,
            destination_ip: self.to_ip,
            queue: self.queue,
        })
    }
}

/// Shown below the options by `ringferry ctl trace --help`.
fn trace_help() -> String {
    let names: Vec<_> = TraceProtocol::ALL.iter().map(|protocol| protocol.name()).collect();
    format!(
        "Protocols: {}.

Addresses that are not said are those by which the ports are known, or that their rules allow. The last line says where the frame would end, by the
reasons that `ringferry ctl show --reasons` has. What it says holds for one frame at this moment: a limit that has tokens now may have none later.

Examples:
  ringferry ctl trace vm1 vm2                                    does a frame from vm1 get to vm2?
  ringferry ctl trace vm1 broadcast arp                          who would see a question of vm1?
  ringferry ctl trace vm1/52:54:00:00:00:99 vm2 tcp4             may vm1 send from that address?
  ringferry ctl trace uplink vm2 udp6 --vlan 10                  with a tag, as the uplink sends it
  ringferry ctl trace vm1 vm2 tcp4 --gso 1448 --size 65000       who cuts a large packet?
  ringferry ctl trace vm1 01:80:c2:00:00:0e --json | jq -r '.dropped[].reason'",
        names.join(", ")
    )
}

/// The state of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LinkState {
    /// Packets pass.
    Up,
    /// None does.
    Down,
}

/// Changes of the forwarding database.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum FdbCommand {
    /// Forgets learned addresses: all, or those for which all that is said is true. Static ones stay.
    Flush {
        /// Those behind this port.
        #[arg(long)]
        port: Option<String>,
        /// Those of this VLAN; 0 is that of frames without a tag.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=4094))]
        vlan: Option<u16>,
        /// This address.
        #[arg(long, value_name = "MAC")]
        mac: Option<String>,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Puts an address behind a port for ever: adds it to the port's rule static_macs.
    Add {
        /// The address.
        mac: String,
        /// The port.
        port: String,
        /// The VLAN; that of frames without a tag, if none is said.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=4094))]
        vlan: Option<u16>,
        /// Leave the configuration file as it is: the next start does not know of it.
        #[arg(long)]
        runtime: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Takes a static address away from the port that has it.
    Del {
        /// The address.
        mac: String,
        /// The VLAN, if the address is static in several.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=4094))]
        vlan: Option<u16>,
        /// Leave the configuration file as it is: the next start has it again.
        #[arg(long)]
        runtime: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Changes of mirrors.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum MirrorCommand {
    /// Copies what passes a port to another one from now on.
    Add {
        /// The port that is mirrored.
        from: String,
        /// The port that gets the copies.
        to: String,
        /// One direction only, as the switch sees it: `in` is what the guest sends, `out` what it receives.
        #[arg(long, value_enum)]
        direction: Option<DirectionArg>,
        /// Frames of one VLAN only; 0 is that of frames without a tag.
        #[arg(long, value_name = "N")]
        vlan: Option<u16>,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Copies no more.
    Remove {
        /// The port that is mirrored.
        from: String,
        /// The port that gets the copies.
        to: String,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// All mirrors, and what they have copied.
    List {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

impl CtlCommand {
    /// Returns true if the answer is to be JSON.
    fn is_json(&self) -> bool {
        match self {
            CtlCommand::Dump => false,
            CtlCommand::Fdb { json, change } => *json || change.as_ref().is_some_and(FdbCommand::is_json),
            CtlCommand::Mirror { json, change } => {
                *json || change.as_ref().is_some_and(MirrorCommand::is_json)
            }
            CtlCommand::Show(ShowArgs { json, .. })
            | CtlCommand::Trace(TraceArgs { json, .. })
            | CtlCommand::Link { json, .. }
            | CtlCommand::Channels { json, .. }
            | CtlCommand::Steering { json, .. }
            | CtlCommand::Assign { json, .. }
            | CtlCommand::Stats { json, .. }
            | CtlCommand::Explain { json, .. }
            | CtlCommand::Why { json, .. }
            | CtlCommand::Add { json, .. }
            | CtlCommand::Remove { json, .. }
            | CtlCommand::Reload { json, .. }
            | CtlCommand::Rules { json, .. }
            | CtlCommand::Set { json, .. }
            | CtlCommand::Unset { json, .. } => *json,
        }
    }
}

impl FdbCommand {
    fn is_json(&self) -> bool {
        match self {
            FdbCommand::Flush { json, .. } | FdbCommand::Add { json, .. } | FdbCommand::Del { json, .. } => {
                *json
            }
        }
    }
}

impl MirrorCommand {
    fn is_json(&self) -> bool {
        match self {
            MirrorCommand::Add { json, .. }
            | MirrorCommand::Remove { json, .. }
            | MirrorCommand::List { json } => *json,
        }
    }
}

/// The parameters of a port's queues that can be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Parameter {
    /// Queue pairs, each a receive and a transmit queue.
    Combined,
}

/// A reason why nothing was printed.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// The switch did not answer.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The answer belongs to another question.
    #[error("ringferry answered another question: is it the same version as this program?")]
    Mismatch,
    /// A guest was asked for what only a switch has.
    #[error("this is a ringferry guest, which has no forwarding database: ask the switch it is plugged into")]
    NoFdb,
    /// A guest was asked for what only a switch has.
    #[error(
        "this is a ringferry guest, which does not count drops by reason: see its counters with `ringferry ctl show`, or ask the switch it is plugged into"
    )]
    NoReasons,
    /// A guest was asked for what only a switch has.
    #[error(
        "this is a ringferry guest, which has one tap and no table of ports: leave PORT and --columns out, or ask the switch it is plugged into"
    )]
    OnePort,
    /// Parts of a reload failed; what was printed says which.
    #[error("not all of the configuration file could be carried out")]
    Incomplete,
    /// The output says it all.
    #[error("the output says what is wrong")]
    Told,
    /// The answer could not be written.
    #[error("cannot write the answer: {0}")]
    Output(#[from] io::Error),
}

impl CtlError {
    /// Returns true if the output says all that is to be said of the error.
    pub fn is_told(&self) -> bool {
        matches!(self, CtlError::Told)
    }

    /// The word for the error in JSON; `None` if the output is not the place for it.
    fn kind(&self) -> Option<ErrorKind> {
        Some(match self {
            CtlError::Control(error) => ErrorKind::of(error),
            CtlError::Mismatch | CtlError::NoFdb | CtlError::NoReasons | CtlError::OnePort => {
                ErrorKind::NotSupported
            }
            CtlError::Incomplete | CtlError::Told | CtlError::Output(_) => return None,
        })
    }

    /// The error as JSON.
    fn to_json(&self, kind: ErrorKind) -> io::Result<String> {
        let error = match self {
            CtlError::Control(error) => ErrorKind::text(error),
            error => error.to_string(),
        };
        pretty(&ErrorReport { error, kind })
    }
}

/// Runs `ringferry ctl` with output to `out`, usually standard output. With `--json` an error is JSON as well.
///
/// # Errors
/// No switch answers, or `out` cannot be written. A reader that has seen enough (`| head`) is not an error.
pub fn run(args: &CtlArgs, out: &mut dyn Write, width: Option<usize>) -> Result<(), CtlError> {
    let result = answer(args, out, width);
    match result {
        Err(error) if args.command.is_json() => {
            match error.kind() {
                Some(kind) => print(&error.to_json(kind)?, out)?,
                // What was printed says what has failed.
                None if matches!(error, CtlError::Incomplete) => {}
                None => return Err(error),
            }
            Err(CtlError::Told)
        }
        result => result,
    }
}

fn answer(args: &CtlArgs, out: &mut dyn Write, width: Option<usize>) -> Result<(), CtlError> {
    let control = args.control.clone().unwrap_or_else(control::default_path);
    let switch = Switch { control, timeout: Duration::from_secs(args.timeout.into()) };
    if let CtlCommand::Reload { dry_run, json } = args.command {
        return reload(&switch, dry_run, json, out);
    }
    if let CtlCommand::Show(show) = &args.command {
        return show_state(&switch, show, out);
    }
    let text = ask(&switch, &args.command)?;
    // Tables are read as they are.
    let has_sentences =
        matches!(args.command, CtlCommand::Why { .. } | CtlCommand::Trace(_) | CtlCommand::Explain { .. });
    match width {
        Some(width) if has_sentences && !args.command.is_json() => print(&wrap(&text, width), out),
        _ => print(&text, out),
    }
}

/// The columns of the terminal that standard output is, if it is one.
pub fn width() -> Option<usize> {
    let size =
        io::stdout().is_terminal().then(|| rustix::termios::tcgetwinsize(io::stdout()).ok()).flatten()?;
    Some(size.ws_col.into()).filter(|columns| *columns > 0)
}

/// Answers `ringferry ctl show`, once or again and again.
fn show_state(switch: &Switch, args: &ShowArgs, out: &mut dyn Write) -> Result<(), CtlError> {
    let Some(seconds) = args.watch else { return print(&state(switch, args)?, out) };
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 {
        let text = match state(switch, args) {
            Ok(text) => text,
            // It may come back; another process may be taking over.
            Err(CtlError::Control(error @ (ControlError::NotRunning(_) | ControlError::Os { .. }))) => {
                if args.json {
                    compact(&ErrorReport { error: error.to_string(), kind: ErrorKind::of(&error) })?
                } else {
                    format!("{error}\n")
                }
            }
            Err(error) => return Err(error),
        };
        let end = if args.json { "" } else { "\n" };
        if write!(out, "{text}{end}")
            .and_then(|()| out.flush())
            .is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
        {
            return Ok(());
        }
        left -= 1;
        if left > 0 {
            std::thread::sleep(Duration::from_secs(seconds.into()));
        }
    }
    Ok(())
}

/// Returns one answer of `ringferry ctl show`.
fn state(switch: &Switch, args: &ShowArgs) -> Result<String, CtlError> {
    // What is printed for people has numbers of addresses only, but for the page of a port.
    let addresses = (!args.json && args.port.is_none()).then_some(0);
    let snapshot = match switch.call(&Request::Show { addresses })? {
        Answer::Show(snapshot) => *snapshot,
        Answer::Guest(_) if args.reasons => return Err(CtlError::NoReasons),
        Answer::Guest(_) if args.port.is_some() || !args.columns.is_empty() => return Err(CtlError::OnePort),
        Answer::Guest(guest) if args.json => return json_of(&*guest, args),
        Answer::Guest(guest) => return Ok(guest.to_text()),
        _ => return Err(CtlError::Mismatch),
    };
    let snapshot = match &args.port {
        Some(port) => snapshot.of_port(port).map_err(ControlError::Refused)?,
        None => snapshot,
    };
    if args.json {
        return json_of(&snapshot, args);
    }
    if args.reasons {
        return Ok(snapshot.reasons_to_text());
    }
    if args.columns.is_empty() {
        return Ok(if args.port.is_some() { snapshot.page_to_text() } else { snapshot.to_text() });
    }
    let columns: Vec<Column> = args.columns.iter().filter_map(|name| Column::of(name).ok()).collect();
    Ok(snapshot.columns_to_text(&columns, args.window.as_deref().and_then(|window| window.parse().ok())))
}

fn json_of(value: &impl serde::Serialize, args: &ShowArgs) -> Result<String, CtlError> {
    Ok(if args.watch.is_some() { compact(value)? } else { pretty(value)? })
}

fn compact(value: &impl serde::Serialize) -> io::Result<String> {
    Ok(serde_json::to_string(value)? + "\n")
}

fn reload(switch: &Switch, dry_run: bool, json: bool, out: &mut dyn Write) -> Result<(), CtlError> {
    let Answer::Reloaded(reload) = switch.call(&Request::Reload { dry_run })? else {
        return Err(CtlError::Mismatch);
    };
    print(&show(&reload, Reload::to_text, json)?, out)?;
    if reload.has_failed() { Err(CtlError::Incomplete) } else { Ok(()) }
}

fn print(text: &str, out: &mut dyn Write) -> Result<(), CtlError> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn ask(switch: &Switch, command: &CtlCommand) -> Result<String, CtlError> {
    let (request, json) = match command.clone() {
        CtlCommand::Show(args) => return state(switch, &args),
        CtlCommand::Fdb { change: None, json } => {
            let Answer::Show(snapshot) = switch.call(&Request::Show { addresses: None })? else {
                return Err(CtlError::NoFdb);
            };
            return Ok(if json { pretty(&snapshot.fdb)? } else { snapshot.fdb_to_text() });
        }
        CtlCommand::Fdb { change: Some(change), .. } => match change {
            FdbCommand::Flush { port, vlan, mac, json } => (Request::FlushFdb { port, vlan, mac }, json),
            FdbCommand::Add { mac, port, vlan, runtime, json } => {
                (Request::AddFdb { mac, port, vlan, runtime }, json)
            }
            FdbCommand::Del { mac, vlan, runtime, json } => (Request::RemoveFdb { mac, vlan, runtime }, json),
        },
        CtlCommand::Link { port, state, json } => (Request::Link { port, up: state == LinkState::Up }, json),
        CtlCommand::Mirror { change: None, json }
        | CtlCommand::Mirror { change: Some(MirrorCommand::List { json }), .. } => (Request::Mirrors, json),
        CtlCommand::Mirror { change: Some(change), .. } => match change {
            MirrorCommand::Add { from, to, direction, vlan, json } => {
                let direction = direction.map(Into::into);
                (Request::AddMirror { from, to, direction, vlan }, json)
            }
            MirrorCommand::Remove { from, to, json } => (Request::RemoveMirror { from, to }, json),
            MirrorCommand::List { json } => (Request::Mirrors, json),
        },
        CtlCommand::Dump => (Request::Dump, false),
        CtlCommand::Channels { port, count, json, .. } => (Request::Channels { port, combined: count }, json),
        CtlCommand::Steering { port, json } => (Request::Steering { port }, json),
        CtlCommand::Assign { port, queue, worker, runtime, json } => {
            (Request::Assign { port, queue, worker, runtime }, json)
        }
        CtlCommand::Stats { port, queues, json } => (Request::Stats { port, queues }, json),
        CtlCommand::Explain { port, json } => (Request::Explain { port }, json),
        CtlCommand::Why { port, peer, json } => (Request::Why { port, peer }, json),
        CtlCommand::Trace(args) => {
            let json = args.json;
            (args.request(), json)
        }
        CtlCommand::Add { port, runtime, json } => (Request::Add { port, runtime }, json),
        CtlCommand::Remove { port, if_exists, drain, runtime, json } => {
            (Request::Remove { port, if_exists, drain, runtime }, json)
        }
        CtlCommand::Reload { dry_run, json } => (Request::Reload { dry_run }, json),
        CtlCommand::Rules { port, json } => (Request::Rules { port }, json),
        CtlCommand::Set { port, settings, runtime, json } => (Request::Set { port, settings, runtime }, json),
        CtlCommand::Unset { port, keys, runtime, json } => (Request::Unset { port, keys, runtime }, json),
    };
    let answer = switch.call(&request)?;
    Ok(match (&request, &answer) {
        (Request::Dump, Answer::Dump(text)) => text.clone(),
        (Request::Channels { .. }, Answer::Channels(channels)) => show(channels, Channels::to_text, json)?,
        (Request::Steering { .. } | Request::Assign { .. }, Answer::Steering(steering)) => {
            show(steering, Steering::to_text, json)?
        }
        (Request::Stats { .. }, Answer::Stats(stats)) => show(stats, Stats::to_text, json)?,
        (Request::Explain { .. }, Answer::Explain(answer)) => show(answer, Explanation::to_text, json)?,
        (Request::Why { .. }, Answer::Why(diagnosis)) => show(diagnosis, Diagnosis::to_text, json)?,
        (Request::Trace(_), Answer::Trace(trace)) => show(&**trace, Trace::to_text, json)?,
        (Request::Add { .. } | Request::Remove { .. }, Answer::PortChanged(change)) => {
            show(change, PortChange::to_text, json)?
        }
        (Request::Rules { .. }, Answer::Rules(rules)) => show(rules, PortRules::to_text, json)?,
        (Request::Link { .. }, Answer::LinkChanged(change)) => show(change, LinkChange::to_text, json)?,
        (_, Answer::Mirrors(mirrors)) => show(mirrors, Mirrors::to_text, json)?,
        (Request::FlushFdb { .. }, Answer::FdbFlushed(flush)) => show(flush, FdbFlush::to_text, json)?,
        (
            Request::Set { .. } | Request::Unset { .. } | Request::AddFdb { .. } | Request::RemoveFdb { .. },
            Answer::SettingsChanged(change),
        ) => show(change, SettingsChange::to_text, json)?,
        _ => return Err(CtlError::Mismatch),
    })
}

fn show<T: serde::Serialize>(answer: &T, to_text: impl Fn(&T) -> String, json: bool) -> io::Result<String> {
    if json { pretty(answer) } else { Ok(to_text(answer)) }
}

fn pretty(value: &impl serde::Serialize) -> io::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use clap::Parser;
    use ringferry_control::channels::QueueSteering;
    use ringferry_control::mirror::Mirror;
    use ringferry_control::snapshot::{Negotiated, PortSnapshot, PortState, Rates, Snapshot};
    use ringferry_control::trace::TracedFrame;
    use ringferry_control::{ControlServer, PortAction, ReloadStep, Response};
    use ringferry_rig::schema;

    use super::*;

    #[derive(clap::Parser)]
    struct Program {
        #[command(flatten)]
        ctl: CtlArgs,
    }

    /// A port that has received something.
    fn port(name: &str) -> PortSnapshot {
        PortSnapshot {
            name: name.to_owned(),
            negotiated: Negotiated::Tap(ringferry_sys::tap::Offloads::empty()),
            state: PortState::Up,
            fault: None,
            peer: "rf0".to_owned(),
            mtu: 1500,
            mac: None,
            queues: Vec::new(),
            counters: [("rx_packets".to_owned(), 7)].into(),
            drops: Default::default(),
            rules: Default::default(),
            pairs: Vec::new(),
            another_waits: false,
            ended: None,
            stopped_seconds: None,
            rates: vec![Rates {
                window: 10,
                seconds: 10.0,
                counters: [("rx_packets".to_owned(), 0.5)].into(),
                drops: Default::default(),
            }],
        }
    }

    /// Runs `ringferry ctl` with these arguments against a switch that answers with a known state. JSON must be as its schema says.
    fn ctl(arguments: &[&str]) -> Result<String, CtlError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let mut server = ControlServer::bind(&path, 0o600).unwrap();
        let mut arguments = arguments.to_vec();
        arguments.extend(["--control", path.to_str().unwrap()]);
        let args = Program::try_parse_from([&["ctl"], arguments.as_slice()].concat()).unwrap().ctl;
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    server.serve(&mut |request| {
                        Response::Ok(match request {
                            Request::Show { .. } => Answer::Show(Box::new(Snapshot {
                                pid: 42,
                                ports: vec![port("vm0"), port("vm1")],
                                ..Snapshot::default()
                            })),
                            Request::Dump => Answer::Dump("[switch]\n".into()),
                            Request::Channels { combined: Some(0), .. } => {
                                return Response::Error("0 is too few".into());
                            }
                            Request::Channels { port, combined } => {
                                let combined = combined.unwrap_or(1);
                                Answer::Channels(Channels { port, max_combined: 4, combined, started: 4 })
                            }
                            Request::Steering { port } => Answer::Steering(Steering {
                                port,
                                by: "chance".into(),
                                ..Steering::default()
                            }),
                            Request::Assign { worker: 9, .. } => {
                                return Response::Error("there is no worker 9".into());
                            }
                            Request::Assign { port, queue, worker, .. } => {
                                let worker = Some(worker);
                                let queue = QueueSteering { queue, worker, ..QueueSteering::default() };
                                Answer::Steering(Steering {
                                    port,
                                    queues: vec![queue],
                                    ..Steering::default()
                                })
                            }
                            Request::Stats { port, queues } => {
                                let counters = [("queues".to_owned(), queues.into())].into();
                                Answer::Stats(Stats { port, counters })
                            }
                            Request::Explain { port } => {
                                Answer::Explain(Explanation { port, mtu: 1500, ..Explanation::default() })
                            }
                            Request::Replace { .. } => return Response::Error("nobody asks".into()),
                            Request::Rules { port } => {
                                let rules = [(
                                    "allowed_ips".to_owned(),
                                    serde_json::json!(["10.0.0.2", "fd00::/64"]),
                                )];
                                Answer::Rules(PortRules { port, rules: rules.into() })
                            }
                            Request::Capture(_) => return Response::Error("no capture".into()),
                            Request::Link { port, up } => {
                                Answer::LinkChanged(LinkChange { port, up, told: up })
                            }
                            Request::Mirrors => Answer::Mirrors(Mirrors::default()),
                            Request::Trace(asked) => {
                                let frame = TracedFrame {
                                    from: asked.from,
                                    queue: asked.queue,
                                    source: asked.source.unwrap_or_default(),
                                    destination: asked.to,
                                    vlan: asked.vlan,
                                    protocol: asked.protocol,
                                    size: asked.size.unwrap_or(60),
                                    gso: asked.gso,
                                    csum: asked.csum,
                                };
                                let (steps, delivered, dropped) = (Vec::new(), Vec::new(), Vec::new());
                                let (verdict, remedy) = ("Delivered to nobody.".to_owned(), String::new());
                                Answer::Trace(Box::new(Trace {
                                    frame,
                                    steps,
                                    delivered,
                                    dropped,
                                    verdict,
                                    remedy,
                                }))
                            }
                            Request::Why { port, peer } => {
                                Answer::Why(Diagnosis { port, peer, seconds: 10.0, ..Diagnosis::default() })
                            }
                            Request::AddMirror { from, to, direction, vlan } => {
                                let (copied, lost) = (0, 0);
                                let mirror =
                                    Mirror { from, to, direction, vlan, copied, lost, to_state: None };
                                Answer::Mirrors(Mirrors { mirrors: vec![mirror] })
                            }
                            Request::RemoveMirror { from, to } => {
                                return Response::Error(format!("{from:?} is not mirrored to {to:?}"));
                            }
                            Request::FlushFdb { port, vlan, mac } => {
                                let said = [port.is_some(), vlan.is_some(), mac.is_some()];
                                let forgotten = said.iter().filter(|said| **said).count() as u64;
                                Answer::FdbFlushed(FdbFlush { forgotten })
                            }
                            Request::AddFdb { mac, port, vlan, runtime } => {
                                let rules = [(mac, vlan.unwrap_or(0).into())].into();
                                Answer::SettingsChanged(SettingsChange {
                                    port,
                                    rules,
                                    persistent: !runtime,
                                    note: "so".to_owned(),
                                    ..SettingsChange::default()
                                })
                            }
                            Request::RemoveFdb { mac, .. } => {
                                return Response::Error(format!("{mac} is no static address"));
                            }
                            Request::Add { runtime, .. } => Answer::PortChanged(PortChange {
                                port: "vm2".to_owned(),
                                done: PortAction::Added,
                                persistent: !runtime,
                                note: "in rf.toml".to_owned(),
                            }),
                            Request::Remove { if_exists: false, port, .. } => {
                                return Response::Error(format!("there is no port {port:?}"));
                            }
                            Request::Remove { port, runtime, .. } => Answer::PortChanged(PortChange {
                                port,
                                done: PortAction::Nothing,
                                persistent: runtime,
                                note: "there is no such port".to_owned(),
                            }),
                            Request::Reload { dry_run } => Answer::Reloaded(Reload {
                                dry_run,
                                steps: vec![ReloadStep {
                                    port: "vm0".to_owned(),
                                    action: PortAction::Added,
                                    what: "a tap port".to_owned(),
                                    error: (!dry_run).then(|| "no room".to_owned()),
                                }],
                                ..Reload::default()
                            }),
                            Request::Set { port, settings, runtime } => {
                                let rules = settings.into_iter().map(|setting| (setting, runtime.into()));
                                let (rules, note) = (rules.collect(), "in rf.toml".to_owned());
                                Answer::SettingsChanged(SettingsChange {
                                    port,
                                    rules,
                                    persistent: !runtime,
                                    note,
                                    ..SettingsChange::default()
                                })
                            }
                            Request::Unset { port, runtime, .. } => {
                                let (rules, note) = (Default::default(), "there is no file".to_owned());
                                Answer::SettingsChanged(SettingsChange {
                                    port,
                                    rules,
                                    persistent: runtime,
                                    note,
                                    ..SettingsChange::default()
                                })
                            }
                        })
                    });
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let mut out = Vec::new();
            let result = run(&args, &mut out, None);
            done.store(true, Ordering::Relaxed);
            let text = String::from_utf8(out).unwrap();
            if args.command.is_json() {
                schema::assert_described(&[&["ctl"], arguments.as_slice()].concat(), &text);
            }
            result.map(|()| text)
        })
    }

    #[test]
    fn show_prints_text_or_json() {
        assert!(ctl(&["show"]).unwrap().starts_with("ringferry, process 42, up 0 s"));
        let json: serde_json::Value = serde_json::from_str(&ctl(&["show", "--json"]).unwrap()).unwrap();
        assert_eq!(json["pid"], 42);
    }

    #[test]
    fn show_has_one_port_columns_and_repeats() {
        let text = ctl(&["show", "vm1"]).unwrap();
        assert!(text.starts_with("vm1: rf0\n") && text.contains("rx_packets      7"), "{text}");
        let error = ctl(&["show", "vm9"]).unwrap_err().to_string();
        assert_eq!(error, "the switch refuses: there is no port \"vm9\"; the ports are: vm0, vm1");
        let json: serde_json::Value =
            serde_json::from_str(&ctl(&["show", "vm1", "--json"]).unwrap()).unwrap();
        assert_eq!((json["ports"].as_array().unwrap().len(), &json["ports"][0]["name"]), (1, &"vm1".into()));
        let text = ctl(&["show", "--columns", "port,rx-pps,worker", "--window", "10"]).unwrap();
        assert_eq!(
            text,
            "PORT  RX PACKETS/S  WORKER\nvm0           0.50       -\nvm1           0.50       -\n"
        );
        let underscored = ctl(&["show", "--columns", "port,rx_pps,worker", "--window", "10"]).unwrap();
        assert_eq!(underscored, text);
        let text = ctl(&["show", "--columns", "port", "--watch", "1", "--count", "2"]).unwrap();
        assert_eq!(text, "PORT\nvm0\nvm1\n\nPORT\nvm0\nvm1\n\n");
        let text = ctl(&["show", "--json", "--watch", "--count", "1"]).unwrap();
        assert_eq!(text.lines().count(), 1);
        serde_json::from_str::<Snapshot>(&text).unwrap();
        let error = match Program::try_parse_from(["ctl", "show", "--columns", "port,moon"]) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("there is no such column"),
        };
        assert!(
            error.contains("there is no column \"moon\"; the columns are: port, queue, worker"),
            "{error}"
        );
        for wrong in
            [&["--columns", "port", "--json"][..], &["--window", "10"], &["--count", "3"], &["--watch", "0"]]
        {
            assert!(Program::try_parse_from([&["ctl", "show"], wrong].concat()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_switch_that_is_not_there_is_waited_for() {
        let show = ShowArgs { watch: Some(1), count: Some(1), ..ShowArgs::default() };
        let text = |show| {
            let args = CtlArgs {
                control: Some("/nonexistent/c.sock".into()),
                timeout: 1,
                command: CtlCommand::Show(show),
            };
            let mut out = Vec::new();
            run(&args, &mut out, None).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert!(text(show.clone()).contains("start one with `ringferry run`"));
        let json: serde_json::Value = serde_json::from_str(&text(ShowArgs { json: true, ..show })).unwrap();
        assert_eq!(json["kind"], "not-running");
    }

    #[test]
    fn reasons_are_text_alone() {
        assert_eq!(ctl(&["show", "--reasons"]).unwrap(), "no packet was dropped\n");
        assert!(Program::try_parse_from(["ctl", "show", "--reasons", "--json"]).is_err());
    }

    #[test]
    fn fdb_and_dump_print_their_part() {
        assert_eq!(ctl(&["fdb"]).unwrap(), "MAC  PORT  AGE\n");
        let json: serde_json::Value = serde_json::from_str(&ctl(&["fdb", "--json"]).unwrap()).unwrap();
        assert_eq!(json["entries"], serde_json::json!([]));
        assert_eq!(ctl(&["dump"]).unwrap(), "[switch]\n");
    }

    #[test]
    fn channels_are_shown_and_changed() {
        let text = ctl(&["channels", "eth0"]).unwrap();
        assert!(
            text.starts_with("Channel parameters for eth0:\n") && text.contains("Combined: 1\n"),
            "{text}"
        );
        let json: serde_json::Value =
            serde_json::from_str(&ctl(&["channels", "eth0", "combined", "3", "--json"]).unwrap()).unwrap();
        assert_eq!(json["combined"], 3);
        let error = ctl(&["channels", "eth0", "combined", "0"]).unwrap_err();
        assert_eq!(error.to_string(), "the switch refuses: 0 is too few");
        for wrong in [&["channels"][..], &["channels", "eth0", "combined"], &["channels", "eth0", "rx", "2"]]
        {
            assert!(Program::try_parse_from([&["ctl"], wrong].concat()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_pair_is_assigned_to_a_worker() {
        let json: serde_json::Value =
            serde_json::from_str(&ctl(&["assign", "eth0", "1", "3", "--json"]).unwrap()).unwrap();
        assert_eq!((&json["queues"][0]["queue"], &json["queues"][0]["worker"]), (&1.into(), &3.into()));
        assert!(
            ctl(&["assign", "eth0", "1", "2"]).unwrap().contains("WORKER\n    1  disabled  any       2\n")
        );
        let error = ctl(&["assign", "eth0", "1", "9"]).unwrap_err();
        assert_eq!(error.to_string(), "the switch refuses: there is no worker 9");
        assert!(Program::try_parse_from(["ctl", "assign", "eth0", "1"]).is_err());
    }

    #[test]
    fn why_prints_text_or_json() {
        assert!(ctl(&["why", "vm0"]).unwrap().starts_with("vm0, measured over the last 10 s\n"));
        assert!(ctl(&["why", "vm0", "vm1"]).unwrap().starts_with("vm0 and vm1, measured"));
        let json: serde_json::Value = serde_json::from_str(&ctl(&["why", "vm0", "--json"]).unwrap()).unwrap();
        assert_eq!((&json["port"], &json["findings"]), (&"vm0".into(), &serde_json::json!([])));
        assert!(Program::try_parse_from(["ctl", "why"]).is_err());
    }

    #[test]
    fn trace_asks_for_what_was_said_and_prints_text_or_json() {
        let text = ctl(&["trace", "vm0/52:54:00:00:00:01", "vm1", "tcp4", "--vlan", "10", "--gso", "1448"]);
        let first = "an imaginary frame from vm0 (queue 0): 52:54:00:00:00:01 to vm1, with a tag of VLAN 10, tcp4, 60 bytes, to be cut every 1448 bytes\n";
        assert_eq!(text.unwrap(), format!("{first}\nDelivered to nobody.\n"));
        let json = ctl(&["trace", "vm0", "broadcast", "--json", "--size", "99"]).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&json["frame"]["protocol"], &json["frame"]["size"]), (&"raw".into(), &99.into()));
        for wrong in [
            &["vm0"][..],
            &["vm0/52:54:00:00:00:zz", "vm1"],
            &["vm0", "vm1", "tcp"],
            &["vm0", "vm1", "tcp4", "--gso", "0"],
        ] {
            assert!(Program::try_parse_from([&["ctl", "trace"], wrong].concat()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn explain_prints_text_or_json() {
        assert!(ctl(&["explain", "eth0"]).unwrap().starts_with("eth0: takes nothing; "));
        let json: serde_json::Value =
            serde_json::from_str(&ctl(&["explain", "eth0", "--json"]).unwrap()).unwrap();
        assert_eq!((json["mtu"].as_u64(), json["ways"].as_array().unwrap().len()), (Some(1500), 0));
    }

    #[test]
    fn steering_and_stats_print_text_or_json() {
        assert!(ctl(&["steering", "eth0"]).unwrap().starts_with("Steering of eth0: chance\n"));
        assert_eq!(ctl(&["stats", "eth0", "--queues"]).unwrap(), "Statistics for eth0:\n     queues: 1\n");
        let json: serde_json::Value =
            serde_json::from_str(&ctl(&["stats", "eth0", "--json"]).unwrap()).unwrap();
        assert_eq!(json["counters"]["queues"], 0);
    }

    #[test]
    fn rules_are_shown_and_changed() {
        assert_eq!(ctl(&["rules", "vm0"]).unwrap(), "rules of vm0:\n  allowed_ips=10.0.0.2,fd00::/64\n");
        let json: serde_json::Value =
            serde_json::from_str(&ctl(&["rules", "vm0", "--json"]).unwrap()).unwrap();
        assert_eq!(json["rules"]["allowed_ips"][1], "fd00::/64");
        assert_eq!(
            ctl(&["set", "vm0", "vlan=10", "isolated=on"]).unwrap(),
            "rules of vm0:\n  isolated=on=false\n  vlan=10=false\nkept: in rf.toml\n"
        );
        assert_eq!(
            ctl(&["unset", "vm0", "vlan"]).unwrap(),
            "vm0 has no rules\nnot kept when the switch ends: there is no file\n"
        );
        let json = ctl(&["set", "vm0", "vlan=10", "--runtime", "--json"]).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&json["persistent"], &json["rules"]["vlan=10"]), (&false.into(), &true.into()));
        for wrong in [&["set", "vm0"][..], &["unset", "vm0"], &["rules"]] {
            assert!(Program::try_parse_from([&["ctl"], wrong].concat()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn ports_are_added_and_removed() {
        assert_eq!(ctl(&["add", "vhost-user:/vm2.sock"]).unwrap(), "vm2 added\nkept: in rf.toml\n");
        let text = ctl(&["add", "tap:vm2", "--runtime"]).unwrap();
        assert_eq!(text, "vm2 added\nnot kept when the switch ends: in rf.toml\n");
        assert_eq!(ctl(&["remove", "vm9", "--if-exists"]).unwrap(), "vm9: there is no such port\n");
        let error = ctl(&["remove", "vm9"]).unwrap_err();
        assert_eq!(error.to_string(), "the switch refuses: there is no port \"vm9\"");
        let json: serde_json::Value =
            serde_json::from_str(&ctl(&["add", "tap:vm2", "--json"]).unwrap()).unwrap();
        assert_eq!((&json["port"], &json["done"]), (&"vm2".into(), &"added".into()));
    }

    #[test]
    fn a_reload_that_is_incomplete_is_an_error_after_its_plan() {
        let text = ctl(&["reload", "--dry-run"]).unwrap();
        assert_eq!(text, "+ vm0: a tap port\n1 of the ports would change; nothing was done\n");
        assert!(matches!(ctl(&["reload"]), Err(CtlError::Incomplete)));
        // As JSON the plan has said it.
        assert!(matches!(ctl(&["reload", "--json"]), Err(CtlError::Told)));
    }

    /// Runs `ringferry ctl`, which must fail and say why as JSON.
    fn refused(arguments: &[&str]) -> serde_json::Value {
        let args = Program::try_parse_from([&["ctl"], arguments].concat()).unwrap().ctl;
        let mut out = Vec::new();
        assert!(run(&args, &mut out, None).unwrap_err().is_told());
        let text = String::from_utf8(out).unwrap();
        schema::assert_described(&[&["ctl"], arguments].concat(), &text);
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn with_json_errors_are_json_and_nothing_else() {
        let error = refused(&["show", "--json", "--control", "/nonexistent/c.sock"]);
        assert_eq!(error["kind"], "not-running");
        assert!(error["error"].as_str().unwrap().contains("start one with `ringferry run`"));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let mut server = ControlServer::bind(&path, 0o600).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    server.serve(&mut |_| Response::Error("there is no port \"x\"".into()));
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let error = refused(&["rules", "x", "--json", "--control", path.to_str().unwrap()]);
            done.store(true, Ordering::Relaxed);
            assert_eq!(error, serde_json::json!({ "error": "there is no port \"x\"", "kind": "refused" }));
        });
    }

    #[test]
    fn addresses_and_mirrors_are_changed() {
        assert_eq!(ctl(&["fdb", "flush"]).unwrap(), "0 addresses forgotten\n");
        let text =
            ctl(&["fdb", "flush", "--port", "vm0", "--vlan", "3", "--mac", "52:54:00:00:00:01"]).unwrap();
        assert_eq!(text, "3 addresses forgotten\n");
        assert_eq!(ctl(&["fdb", "flush", "--json", "--vlan", "0"]).unwrap(), "{\n  \"forgotten\": 1\n}\n");
        let text = ctl(&["fdb", "add", "52:54:00:00:00:01", "vm0", "--vlan", "10", "--runtime"]).unwrap();
        assert_eq!(text, "rules of vm0:\n  52:54:00:00:00:01=10\nnot kept when the switch ends: so\n");
        let error = ctl(&["fdb", "del", "52:54:00:00:00:01"]).unwrap_err();
        assert_eq!(error.to_string(), "the switch refuses: 52:54:00:00:00:01 is no static address");
        assert_eq!(ctl(&["link", "vm0", "up"]).unwrap(), "vm0 is up; its guest was told\n");
        let text = ctl(&["link", "vm0", "down"]).unwrap();
        assert!(
            text.starts_with("vm0 is down: no packet passes it; whoever is behind it was not told"),
            "{text}"
        );
        assert_eq!(ctl(&["mirror"]).unwrap(), "no port is mirrored\n");
        assert_eq!(ctl(&["mirror", "list"]).unwrap(), "no port is mirrored\n");
        let text = ctl(&["mirror", "add", "vm0", "probe", "--direction", "in", "--vlan", "7"]).unwrap();
        let words: Vec<_> = text.split_whitespace().skip(6).collect();
        assert_eq!(words, ["vm0", "probe", "in", "7", "0", "0"]);
        let json: serde_json::Value =
            serde_json::from_str(&ctl(&["mirror", "add", "vm0", "probe", "--json"]).unwrap()).unwrap();
        assert_eq!(json["mirrors"][0]["to"], "probe");
        assert!(ctl(&["mirror", "remove", "vm0", "probe"]).unwrap_err().to_string().contains("not mirrored"));
        for wrong in
            [&["fdb", "add", "52:54:00:00:00:01"][..], &["mirror", "add", "vm0"], &["fdb", "--json", "flush"]]
        {
            assert!(Program::try_parse_from([&["ctl"], wrong].concat()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn absent_switch_is_an_error_with_a_remedy() {
        let args =
            CtlArgs { control: Some("/nonexistent/c.sock".into()), timeout: 1, command: CtlCommand::Dump };
        let error = run(&args, &mut Vec::new(), None).unwrap_err().to_string();
        assert!(error.contains("start one with `ringferry run`, or say which one with --control"), "{error}");
    }

    #[test]
    fn reader_that_leaves_is_no_error() {
        struct Full(io::ErrorKind);
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(self.0.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert!(print("x", &mut Full(io::ErrorKind::BrokenPipe)).is_ok());
        assert!(matches!(print("x", &mut Full(io::ErrorKind::StorageFull)), Err(CtlError::Output(_))));
    }
}
