//! The command line of `ringferry ctl`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use ringferry_control::Request;
use ringferry_control::snapshot::{self, Column, ColumnError};
use ringferry_control::trace::{TraceProtocol, TraceRequest};
use ringferry_packet::ether::Mac;

use super::wire::{WIRE, WireCommand};
use crate::capture::DirectionArg;

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
  ringferry ctl quarantine vm0 probe                             vm0 reaches probe alone, which gets all that it sends
  ringferry ctl release vm0                                      and that is over
  ringferry ctl wire set r1-eth1 delay=20ms loss=0.1%            what a wire does to frames
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
these keys are touched; if they cannot be kept, the answer says why, and the exit code is 0 all the same: `persistent` of `--json` tells it.

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
says in what it differs. A port that is open and cannot be written into the file is no error either: the answer says so (`persistent` of `--json`).

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
its guest has to connect again. Ports that are in no file (given by flags, added with --runtime, or while the file could not be written) stay. The exit status is 1 if something could not be done.

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
  ringferry ctl why                                              which ports have a problem
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
  ringferry ctl show vm0 --json | jq '.ports[0].rates[] | select(.window == 10) | .drops // {{}}'
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
    /// Wires between two ports, with their impairments: shows, changes, adds and removes them.
    #[command(after_help = WIRE, args_conflicts_with_subcommands = true)]
    Wire {
        /// The change; without one all wires are listed.
        #[command(subcommand)]
        change: Option<WireCommand>,
        /// As JSON.
        #[arg(long)]
        json: bool,
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
    /// Finds out why a port carries nothing, loses packets or is slow, from what was measured lately, and says what to do; the most important first. Without a port, which ports these are.
    #[command(after_help = WHY)]
    Why {
        /// The port; the worst of all without one.
        port: Option<String>,
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
    /// The firewall of a port: what each rule of its policy has let pass or denied, and what was denied of late; without a port, all firewalls.
    Firewall {
        /// The port.
        port: Option<String>,
        /// Also show the conversations that it knows, the N with the most bytes.
        #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "20", requires = "port")]
        conversations: Option<usize>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// What firewalls have denied, or would have, as lines of JSON: an audit log.
    #[command(after_help = DENIALS)]
    Denials {
        /// That of this port only.
        port: Option<String>,
        /// Go on with what is denied from now on, through restarts of the switch, until this command is ended.
        #[arg(long)]
        follow: bool,
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
    /// Cuts a port off from all others but one, which gets all that it sends, whatever that is for, and alone reaches it. Its link stays up, and its guest notices
    /// nothing but that nobody answers. The same as `set PORT quarantine=PEER`, but for a peer that does not exist, which is refused here: it is kept in the configuration file.
    Quarantine {
        /// The port.
        port: String,
        /// The port that it is left with, such as a tap where somebody looks at what it sends.
        #[arg(value_name = "PEER")]
        with: String,
        /// Leave the configuration file as it is: the next start does not know of it.
        #[arg(long)]
        runtime: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Ends the quarantine of a port, now and in the configuration file.
    Release {
        /// The port.
        port: String,
        /// Leave the configuration file as it is: the next start does not know of it.
        #[arg(long)]
        runtime: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Takes settings of a port back, now and in the configuration file. Keys that say more of another go with it, such as native with
    /// trunk or a burst with its rate; one that needs another (allowed_ips needs allowed_macs) is to be named, too. `ringferry ctl set --help` lists the keys.
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
    /// What it would carry [default: raw, or UDP with --from-ip or --to-ip].
    #[arg(value_name = "PROTOCOL", value_parser = TraceProtocol::from_str)]
    pub protocol: Option<TraceProtocol>,
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
    /// Its source port in TCP or UDP [default: 49152].
    #[arg(long, value_name = "N")]
    pub from_port: Option<u16>,
    /// Its destination port in TCP or UDP [default: 4242].
    #[arg(long, value_name = "N")]
    pub to_port: Option<u16>,
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
    pub(super) fn request(self) -> Request {
        Request::Trace(TraceRequest {
            from: self.from.port,
            source: self.from.mac,
            to: self.to,
            vlan: self.vlan,
            protocol: self.protocol.unwrap_or_else(|| match self.from_ip.or(self.to_ip) {
                None => TraceProtocol::Raw,
                Some(IpAddr::V4(_)) => TraceProtocol::Udp4,
                Some(IpAddr::V6(_)) => TraceProtocol::Udp6,
            }),
            size: self.size,
            gso: self.gso,
            csum: self.csum,
            source_ip: self.from_ip,
            destination_ip: self.to_ip,
            source_port: self.from_port,
            destination_port: self.to_port,
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
  ringferry ctl trace vm1 uplink tcp4 --to-ip 10.0.0.9 --to-port 443   does its firewall let that out?
  ringferry ctl trace uplink vm2 udp6 --vlan 10                  with a tag, as the uplink sends it
  ringferry ctl trace vm1 vm2 tcp4 --gso 1448 --size 65000       who cuts a large packet?
  ringferry ctl trace vm1 01:80:c2:00:00:0e --json | jq -r '.dropped[].reason'",
        names.join(", ")
    )
}

/// Shown below the options by `ringferry ctl denials --help`.
const DENIALS: &str = "\
A worker tells a hundred denials of each port in a second, and keeps the last 256. What was too many is counted, and said on standard error.

Examples:
  ringferry ctl denials vm0                                      what was denied of late
  ringferry ctl denials --follow >> /var/log/ringferry.denials   all from now on
  ringferry ctl denials | jq -r '[.port,.remote,.remote_port]|@tsv' | sort | uniq -c";

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
    pub(super) fn is_json(&self) -> bool {
        match self {
            CtlCommand::Dump | CtlCommand::Denials { .. } => false,
            CtlCommand::Fdb { json, change } => *json || change.as_ref().is_some_and(FdbCommand::is_json),
            CtlCommand::Wire { json, change } => *json || change.as_ref().is_some_and(WireCommand::is_json),
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
            | CtlCommand::Firewall { json, .. }
            | CtlCommand::Set { json, .. }
            | CtlCommand::Quarantine { json, .. }
            | CtlCommand::Release { json, .. }
            | CtlCommand::Unset { json, .. } => *json,
        }
    }
}

impl FdbCommand {
    pub(super) fn is_json(&self) -> bool {
        match self {
            FdbCommand::Flush { json, .. } | FdbCommand::Add { json, .. } | FdbCommand::Del { json, .. } => {
                *json
            }
        }
    }
}

impl MirrorCommand {
    pub(super) fn is_json(&self) -> bool {
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
