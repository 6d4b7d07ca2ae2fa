//! A learning switch for virtual machines: ports, forwarding, workers.
#![forbid(unsafe_code)]

mod channels;
pub mod config;
pub mod counters;
mod explain;
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
