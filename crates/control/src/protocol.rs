//! What is said on the control socket: a line of JSON each way.
//!
//! A [`Request`] is one line, `{"command":"show"}`; the [`Response`] is one line, `{"ok":{"show":…}}` or `{"error":"…"}`. Any
//! number of requests may follow on one connection, each answered before the next is read.

use serde::{Deserialize, Serialize};

use crate::capture::{CaptureRequest, CaptureStarted, Direction};
use crate::channels::{Channels, Stats, Steering};
use crate::explain::Explanation;
use crate::firewall::{DenialCursor, Denials, FirewallReport, Firewalls};
use crate::guest::GuestSnapshot;
use crate::mirror::{FdbFlush, LinkChange, Mirrors};
use crate::ports::{PortChange, Reload};
use crate::rules::{PortRules, SettingsChange};
use crate::snapshot::Snapshot;
use crate::trace::{Trace, TraceRequest};
use crate::why::Diagnosis;
use crate::wire::{WireChange, Wires};

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// The state of everything.
    Show {
        /// List at most so many addresses of the forwarding database, any of them if it has more; all of them without a number. How many are behind each
        /// port is said in any case.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        addresses: Option<usize>,
    },
    /// The configuration in force, as TOML. Only a switch has one.
    Dump,
    /// How many queue pairs a port has.
    Channels {
        /// The port; of a guest, its tap.
        port: String,
        /// Change the number in use to so many. Only a guest can.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        combined: Option<u16>,
    },
    /// What decides which queue pair a packet takes, and who serves each.
    Steering {
        /// The port; of a guest, its tap.
        port: String,
    },
    /// Have a worker serve a queue pair of a port, or the queue of a tap, from now on. Only a switch has workers.
    Assign {
        /// The port.
        port: String,
        /// Number of the pair.
        queue: u16,
        /// Number of the worker.
        worker: u16,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
    /// Counters.
    Stats {
        /// The port; of a guest, its tap.
        port: String,
        /// Those of each queue, too.
        #[serde(default)]
        queues: bool,
    },
    /// What becomes of packets to and from a port. Only a switch knows.
    Explain {
        /// The port.
        port: String,
    },
    /// Why a port carries nothing, loses packets or is slow. Only a switch knows.
    Why {
        /// The port.
        port: String,
        /// The other end, if only what is between the two is asked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        peer: Option<String>,
    },
    /// The same about all ports. Only a switch knows.
    Diagnose,
    /// Asks for the way of an imaginary frame through the switch. Only a switch knows.
    Trace(TraceRequest),
    /// Capture packets. Only a switch can; descriptors come with the answer.
    Capture(CaptureRequest),
    /// Take the link of a port up or down.
    Link {
        /// The port.
        port: String,
        /// Whether packets pass.
        up: bool,
    },
    /// All mirrors. Only a switch has any.
    Mirrors,
    /// Mirror what passes a port to another one.
    AddMirror {
        /// The port that is mirrored.
        from: String,
        /// The port that gets the copies.
        to: String,
        /// One direction only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        direction: Option<Direction>,
        /// One VLAN only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vlan: Option<u16>,
    },
    /// Mirror no more.
    RemoveMirror {
        /// The port that is mirrored.
        from: String,
        /// The port that gets the copies.
        to: String,
    },
    /// All wires, or one. Only a switch has any.
    Wires {
        /// The wire, or a port that is an end of it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        wire: Option<String>,
    },
    /// Change impairments of a wire, all or none.
    SetWire {
        /// The wire, or a port that is an end of it.
        wire: String,
        /// Each `KEY=VALUE`, as in the configuration file.
        settings: Vec<String>,
        /// One direction only: the one from this port.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<String>,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
    /// Take all impairments of a wire away.
    ResetWire {
        /// The wire, or a port that is an end of it.
        wire: String,
        /// One direction only: the one from this port.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<String>,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
    /// Join two ports by a wire.
    AddWire {
        /// The two ports.
        ports: [String; 2],
        /// Its name; without one those of its ports.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// Each `KEY=VALUE`, as in the configuration file.
        #[serde(default)]
        settings: Vec<String>,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
    /// Take a wire out: its ports are as others are.
    RemoveWire {
        /// The wire, or a port that is an end of it.
        wire: String,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
    /// Forget learned addresses. Static ones stay.
    FlushFdb {
        /// Those behind this port only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        port: Option<String>,
        /// Those of this VLAN only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vlan: Option<u16>,
        /// This address only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mac: Option<String>,
    },
    /// Put an address behind a port for ever.
    AddFdb {
        /// The address.
        mac: String,
        /// The port.
        port: String,
        /// The VLAN; that of frames without a tag, if none is said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vlan: Option<u16>,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
    /// Take a static address away.
    RemoveFdb {
        /// The address.
        mac: String,
        /// The VLAN; that in which it is static, if none is said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vlan: Option<u16>,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
    /// Add a port.
    Add {
        /// The port, as in a `--port` flag.
        port: String,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
    /// Remove a port.
    Remove {
        /// The port.
        port: String,
        /// It is no error if there is no such port.
        #[serde(default)]
        if_exists: bool,
        /// First let go out what is queued, for so many seconds at most.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        drain: Option<u16>,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
    /// Read the configuration file again and carry out what has changed in it.
    Reload {
        /// Only say what would be done.
        #[serde(default)]
        dry_run: bool,
    },
    /// Hand the switch over to this client, a process of the same program: what follows on the connection is theirs. Only a switch can.
    Replace {
        /// The newest form of the state that the client reads.
        format: u32,
    },
    /// The rules of a port.
    Rules {
        /// The port.
        port: String,
    },
    /// The firewall of a port. Only a switch has any.
    Firewall {
        /// The port.
        port: String,
        /// Tell of so many conversations at most.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        conversations: Option<usize>,
    },
    /// The firewalls of all ports. Only a switch has any.
    Firewalls,
    /// What firewalls have denied since a reader has asked last.
    Denials {
        /// That of this port only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        port: Option<String>,
        /// Where the reader is: what the answer before had as `next`.
        #[serde(default, skip_serializing_if = "DenialCursor::is_empty")]
        since: DenialCursor,
    },
    /// Change rules of a port, all or none.
    Set {
        /// The port.
        port: String,
        /// Each `KEY=VALUE`, as in a `--port` flag.
        settings: Vec<String>,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
    /// Take rules of a port away, all or none.
    Unset {
        /// The port.
        port: String,
        /// Which.
        keys: Vec<String>,
        /// Leave the configuration file as it is.
        #[serde(default)]
        runtime: bool,
    },
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Response {
    /// The answer.
    Ok(Answer),
    /// Why there is none, for people.
    Error(String),
}

/// The answer to each [`Request`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// To [`Request::Show`], from a switch.
    Show(Box<Snapshot>),
    /// To [`Request::Show`], from `ringferry guest`.
    Guest(Box<GuestSnapshot>),
    /// To [`Request::Dump`].
    Dump(String),
    /// To [`Request::Channels`].
    Channels(Channels),
    /// To [`Request::Steering`] and [`Request::Assign`].
    Steering(Steering),
    /// To [`Request::Stats`].
    Stats(Stats),
    /// To [`Request::Explain`].
    Explain(Explanation),
    /// To [`Request::Why`].
    Why(Diagnosis),
    /// To [`Request::Diagnose`]: one for each port, in the order of the configuration.
    Diagnoses(Vec<Diagnosis>),
    /// To [`Request::Trace`].
    Trace(Box<Trace>),
    /// To [`Request::Capture`].
    Capture(CaptureStarted),
    /// To [`Request::Mirrors`], [`Request::AddMirror`] and [`Request::RemoveMirror`].
    Mirrors(Mirrors),
    /// To [`Request::Wires`].
    Wires(Wires),
    /// To [`Request::SetWire`], [`Request::ResetWire`], [`Request::AddWire`] and [`Request::RemoveWire`].
    WireChanged(Box<WireChange>),
    /// To [`Request::Link`].
    LinkChanged(LinkChange),
    /// To [`Request::FlushFdb`].
    FdbFlushed(FdbFlush),
    /// To [`Request::Rules`].
    Rules(PortRules),
    /// To [`Request::Firewall`].
    Firewall(Box<FirewallReport>),
    /// To [`Request::Firewalls`].
    Firewalls(Firewalls),
    /// To [`Request::Denials`].
    Denials(Denials),
    /// To [`Request::Set`], [`Request::Unset`], [`Request::AddFdb`] and [`Request::RemoveFdb`].
    #[serde(rename = "rules-changed")]
    SettingsChanged(SettingsChange),
    /// To [`Request::Add`] and [`Request::Remove`].
    PortChanged(PortChange),
    /// To [`Request::Reload`].
    Reloaded(Reload),
    /// To [`Request::Replace`]: the form in which the state is handed over.
    Replacing {
        /// Number of the form, at most the one asked for.
        format: u32,
        /// Number of the process.
        pid: u32,
    },
}
