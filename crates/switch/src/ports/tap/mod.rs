//! A tap port: the network stack of the host.

pub(crate) mod config;
