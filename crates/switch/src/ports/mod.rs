//! The kinds of port, one folder each.

pub(crate) mod tap;
pub(crate) mod vhost;
pub(crate) mod xen;
