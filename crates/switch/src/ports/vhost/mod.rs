//! A vhost-user port: a virtual machine behind a socket.

pub(crate) mod config;
