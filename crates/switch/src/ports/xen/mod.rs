//! Ports for Xen guests: the store in which a toolstack makes interfaces, the handshake
//! with their front ends, and queues handed to workers and taken back.
//!
//! | file | idea | owns |
//! |---|---|---|
//! | `config` | the configuration of an entry | |
//! | `bus` | the thread that waits for the store, so that the control plane does not | the store's connection, and all interfaces there |
//! | `entry` | one `[[port]]` of kind `xen-vif`: all interfaces of a class, or one | the ports of its interfaces |
//! | `vif` | one interface: a port of the switch | its control ring |
//! | `mapping_budget` | budget of the pages that may be mapped | |
//! | `queues` | the queue side | the rings, and the pages that are mapped |
//!
//! Before a front end is told that we have let go, its queues were taken from their workers, and everything of it is
//! unmapped. A switch that ends says nothing to the store: the next one takes the rings over as they are.

mod bus;
pub(crate) mod config;
mod entry;
mod mapping_budget;
pub(crate) mod queues;
mod vif;

pub use bus::XenError;
pub(super) use entry::open;
pub(crate) use mapping_budget::MappingBudget;
