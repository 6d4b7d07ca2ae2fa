//! `ringferry ctl wire`: its part of the command line, and the request that each command is.

use ringferry_control::Request;

/// Shown below the options by `ringferry ctl wire -h`.
pub(super) const WIRE: &str = "\
A wire joins two ports: each gets what the other one sends, whatever it is, and nobody else does. `set` changes the impairments that are named and leaves the others; what
is under way then arrives when it would have. A wire is named by its name, or by either of its ports.

Examples:
  ringferry ctl wire                                             all wires
  ringferry ctl wire add r1-eth1 r2-eth1 delay=10ms              joins two ports that there are
  ringferry ctl wire set r1-eth1 delay=20ms loss=0.1%            both directions
  ringferry ctl wire set r1-eth1 rate=10mbit --from r1-eth1      what r1 sends
  ringferry ctl wire reset r1-eth1                               no impairments any more
  ringferry ctl wire remove r1-eth1

All keys: `ringferry ctl wire set --help`, docs/configuration.md.";

/// Shown below the options by `ringferry ctl wire set --help` and `add --help`: every key.
fn keys() -> String {
    let keys = ringferry_switch::config::wire_help();
    format!("As in a [[wire]] table; seed may be set as well.\n\n{keys}")
}

/// Commands about wires.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum WireCommand {
    /// Wires, what each does to frames, and what has become of them.
    Show {
        /// One wire.
        #[arg(value_name = "WIRE")]
        wire: Option<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Changes impairments of a wire, now and in the configuration file. Those that are not named stay as they are.
    #[command(after_long_help = keys())]
    Set {
        /// The wire, or a port that is an end of it.
        wire: String,
        /// The impairment to change.
        #[arg(value_name = "KEY=VALUE", required = true)]
        settings: Vec<String>,
        /// Change the direction from this port only.
        #[arg(long, value_name = "PORT")]
        from: Option<String>,
        /// Leave the configuration file as it is: the next start does not know of it.
        #[arg(long)]
        runtime: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Takes all impairments of a wire away, now and in the configuration file.
    Reset {
        /// The wire, or a port that is an end of it.
        wire: String,
        /// Reset the direction from this port only.
        #[arg(long, value_name = "PORT")]
        from: Option<String>,
        /// Leave the configuration file as it is: the next start does not know of it.
        #[arg(long)]
        runtime: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Joins two ports by a wire, now and in the configuration file.
    #[command(after_long_help = keys())]
    Add {
        /// The port at end A.
        a: String,
        /// The port at end B.
        b: String,
        /// An impairment of both directions.
        #[arg(value_name = "KEY=VALUE")]
        settings: Vec<String>,
        /// The name of the wire; without one those of its ports.
        #[arg(long)]
        name: Option<String>,
        /// Leave the configuration file as it is: the next start does not know of the wire.
        #[arg(long)]
        runtime: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Takes a wire out, now and in the configuration file: its ports are as others are.
    Remove {
        /// The wire, or a port that is an end of it.
        wire: String,
        /// Leave the configuration file as it is: the next start has the wire again.
        #[arg(long)]
        runtime: bool,
        /// The answer as JSON.
        #[arg(long)]
        json: bool,
    },
}

impl WireCommand {
    /// Returns true if the answer is to be JSON.
    pub(super) fn is_json(&self) -> bool {
        match self {
            WireCommand::Show { json, .. }
            | WireCommand::Set { json, .. }
            | WireCommand::Reset { json, .. }
            | WireCommand::Add { json, .. }
            | WireCommand::Remove { json, .. } => *json,
        }
    }

    /// Returns the request that the command is.
    pub(super) fn request(self) -> Request {
        match self {
            WireCommand::Show { wire, json: _ } => Request::Wires { wire },
            WireCommand::Set { wire, settings, from, runtime, json: _ } => {
                Request::SetWire { wire, settings, from, runtime }
            }
            WireCommand::Reset { wire, from, runtime, json: _ } => Request::ResetWire { wire, from, runtime },
            WireCommand::Add { a, b, settings, name, runtime, json: _ } => {
                Request::AddWire { ports: [a, b], name, settings, runtime }
            }
            WireCommand::Remove { wire, runtime, json: _ } => Request::RemoveWire { wire, runtime },
        }
    }
}
