//! A xen-vif port: network interfaces of Xen guests.

pub(crate) mod config;
