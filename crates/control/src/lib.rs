//! What `ringferry ctl` speaks: requests, answers, and both ends of the socket that they pass through.
#![forbid(unsafe_code)]

pub mod channels;
mod client;
mod drops;
pub mod explain;
mod guest;
mod path;
mod protocol;
mod rules;
mod server;
pub mod snapshot;
pub mod text;

pub use client::{ControlError, call};
pub use drops::DropReason;
pub use guest::GuestSnapshot;
pub use path::{SYSTEM_DIRECTORY, default_path};
pub use protocol::{Answer, Request, Response};
pub use rules::{PortRules, RulesByKey, RulesChange};
pub use server::{ControlServer, MAX_CLIENTS, MAX_REQUEST, MAX_SILENCE};
