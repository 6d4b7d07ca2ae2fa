#![forbid(unsafe_code)]
//! A simulated Xen, for tests and measurements on machines that have none. No program that is shipped contains it.
//!
//! A test makes a hypervisor and a store, plugs both halves of the network interface into them, and asks them at the end
//! whether anything is still granted, mapped or open.
//!
//! | module | idea |
//! |---|---|
//! | [`fake`] | a hypervisor in one address space, with faults on command and an exact account of what is left |
//! | [`broker`] | a hypervisor whose domains are Linux processes: the server of [`ringferry_xen::process`] |
//! | [`store`] | a server of the store, with permissions, quotas and transactions as xenstored has them |
//! | [`conformance`] | the properties that every provider and every store must have, real Xen's included |
//!
//! The other end of the broker, [`ProcessDomain`](ringferry_xen::process::ProcessDomain), is in `ringferry-xen` behind
//! its feature `process`, so that `ringferry run` and `ringferry netfront` can be tested with it; this crate turns the feature on.

pub mod broker;
pub mod conformance;
pub mod fake;
mod segments;
pub mod store;

pub use broker::Broker;
pub use fake::Fake;
