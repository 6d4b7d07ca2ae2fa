//! Ports for Xen guests, as the control plane sees them: the store in which a toolstack makes interfaces, the hand-shake
//! with their front ends, and queues handed to workers and taken back.
//!
//! | file | idea | owns |
//! |---|---|---|
//! | `entry` | one `[[port]]` of kind `xen-vif`: all interfaces of a class, or one | the store's connection |
//! | `vif` | one interface: a port of the switch | its control ring |
//! | `numbers` | numbers of ports that come and go | |
//! | `maps` | how many pages may be mapped | |
//!
//! Before a front end is told that we have let go, its queues were taken from their workers, and everything of it is
//! unmapped. A switch that ends says nothing to the store: the next one takes the rings over as they are.

mod entry;
mod maps;
mod numbers;
mod vif;

use ringferry_sys::epoll::Epoll;

pub(crate) use entry::XenEntry;
pub use entry::XenError;
pub(crate) use maps::Maps;
pub(crate) use numbers::Numbers;

use crate::plane::Plane;

/// What all entries share.
pub(crate) struct Desk<'a> {
    pub(crate) plane: &'a Plane,
    pub(crate) epoll: &'a Epoll,
    pub(crate) numbers: &'a mut Numbers,
    pub(crate) maps: &'a mut Maps,
}

/// Epoll tokens of control rings: this, and the number of the port.
pub(crate) const CONTROL_RINGS: u64 = 1 << 32;
