//! A learning switch for virtual machines: ports, forwarding, workers.
#![forbid(unsafe_code)]

pub mod channels;
pub mod config;
pub mod control;
pub mod counters;
pub mod explain;
pub mod fdb;
pub mod plane;
mod ports;
mod quiet;
pub mod rules;
pub mod snapshot;
mod switch;
mod vhost_port;
mod xen;

pub use switch::{RunError, StartError, Switch};
pub use xen::XenError;
