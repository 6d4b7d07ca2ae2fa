#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! A learning switch for virtual machines: ports, forwarding, workers.
#![forbid(unsafe_code)]

mod captures;
mod channels;
pub mod config;
pub mod counters;
mod drains;
mod explain;
pub mod fdb;
mod handover;
pub mod impairments;
mod links;
mod log_limit;
mod manager;
mod mirrors;
pub mod plane;
mod ports;
pub mod privileged;
mod requests;
pub mod rules;
mod series;
pub mod snapshot;
mod stalls;
mod switch;
mod trace;
mod turns;
mod why;
mod wires;

pub use handover::kept::{Keeper, Kept, Known};
#[cfg(feature = "testing")]
pub use handover::testing as handed;
pub use handover::{SuccessionError, Successor};
pub use manager::Manager;
pub use ports::passed::Passed;
pub use ports::{OpenError, XenError};
pub use switch::{Ended, OpenSwitch, RunError, StartError, Switch};
