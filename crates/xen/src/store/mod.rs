//! The store: a small tree of names and values that all domains of a machine see, through which they find each
//! other and agree before any page is shared.
//!
//! | module | idea |
//! |---|---|
//! | [`wire`] | messages as they go over the wire |
//! | [`path`] | names of nodes, and the paths of devices |
//! | [`client`] | a connection to a store: Xen's own, through the kernel, or any at a socket |
//! | [`transaction`] | several requests as one |
//!
//! What others wrote into the store is hostile like anything else they can write: any bytes, any size up to
//! [`wire::MAX_PAYLOAD`], gone between two reads.

pub mod client;
mod events;
pub mod path;
pub mod transaction;
pub mod wire;

pub use client::{Client, StoreError};
pub use events::Event;
pub use path::PathError;
pub use transaction::{Nodes, Transaction};
pub use wire::{Code, NodeAccess, Permission};
