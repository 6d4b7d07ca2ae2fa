#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! What `ringferry ctl` speaks: requests, answers, and both ends of the socket that they pass through.
//!
//! A program that can be asked (`ringferry run`, `ringferry guest`) binds a [`ControlServer`] when it starts, serves it from its event
//! loop, and answers each [`Request`] with a [`Response`]. A program that asks opens a connection for one question with [`call`]. What is
//! said is a line of JSON each way ([`Request`] has the words), so that scripts and `socat` can take part. The schema of answers, as `ringferry ctl --json`
//! prints them, is stable within one [`snapshot::VERSION`], that is, fields are only added; requests may change with any release. With the feature `schema`
//! the types of answers have a JSON schema, for the tests that keep docs/schema/ true.
//!
//! Every answer has a text for people (`to_text`), made of the same data. [`text`] has the one table and the one way to shorten numbers
//! that all commands of the program use.
//!
//! **Types.** What is said in names is a type in memory: the kind of a port together with the features that were negotiated
//! ([`snapshot::Negotiated`]), states, roles, offloads, addresses. The types are those of the crates that give them their meaning
//! (`ringferry-virtio-net`'s features, `ringferry-packet`'s offloads, `ringferry-sys`'s of a tap), because a second set of the same bits would
//! have to be kept equal by hand; both programs that answer have these crates anyhow. Only the features of a Xen guest have a type of
//! their own here ([`snapshot::VifFeatures`]): in `ringferry-xen-net` they are spread over several types, and asking needs no Xen. Maps of
//! counters and of drops stay maps by name, as a reader has to show the ones that only a later version counts, too.
//!
//! ```no_run
//! use ringferry_control::{Answer, Request, call, default_path};
//!
//! # fn main() -> Result<(), ringferry_control::ControlError> {
//! if let Answer::Show(snapshot) = call(&default_path(), &Request::Show { addresses: None })? {
//!     for port in &snapshot.ports {
//!         println!("{}: {} drops", port.name, port.drops.values().sum::<u64>());
//!     }
//! }
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod capture;
pub mod channels;
mod client;
mod drops;
pub mod explain;
pub mod firewall;
mod guest;
pub mod metrics;
pub mod mirror;
mod names;
mod path;
mod ports;
mod protocol;
mod rules;
mod server;
pub mod snapshot;
pub mod text;
pub mod trace;
pub mod why;
pub mod wire;

pub use client::{ControlError, Patience, call, call_and_keep, call_with, call_with_fds, is_ringferry};
pub use drops::{CountedAt, DropReason};
pub use guest::GuestSnapshot;
pub use path::{SYSTEM_DIRECTORY, default_path, make_directory, makes_directory};
pub use ports::{PortAction, PortChange, Reload, ReloadStep, WireStep};
pub use protocol::{Answer, Request, Response};
pub use rules::{Holds, Kept, PortRules, RulesByKey, SettingChange, SettingsChange, kept, settings};
pub use server::{ControlServer, MAX_CLIENTS, MAX_REQUEST, MAX_SILENCE, Reply, Ticket};
