//! The store (xenstore): a small tree of names and values that all domains of a host see, through
//! which they find each other and negotiate before any page is shared.
//!
//! A control thread opens a [`Client`], reads and writes nodes, alone or in a [`Transaction`],
//! watches nodes, and drops the client to end all of that.
//!
//! | module | idea |
//! |---|---|
//! | [`wire`] | messages as they go over the wire |
//! | [`path`] | names of nodes, and the paths of devices |
//! | [`client`] | a connection to a store: Xen's own, through the kernel, or any at a socket |
//! | [`Cancel`] | an end to its requests, from another thread |
//! | [`transaction`] | several requests as one |
//!
//! Content that others wrote into the store is as hostile as anything else that they can write: any
//! bytes, any size up to [`wire::MAX_PAYLOAD`], gone between two reads.

mod cancel;
pub mod client;
mod events;
pub mod path;
pub mod transaction;
pub mod wire;

pub use cancel::Cancel;
pub use client::{Client, StoreError};
pub use events::Event;
pub use path::PathError;
pub use transaction::{Nodes, Transaction};
pub use wire::{Code, NodeAccess, Permission};
