#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! Access to what a Xen domain shares with other domains, in user space: pages by *grant*, events
//! by *event channel*, set-up by *store*, packets by the rings of the *network interface*.
//!
//! A program opens a [`Provider`](provider::Provider) once, which yields its
//! [`Domain`](domain::Domain) and a connection to the store; from the domain it obtains handles for
//! grants and event channels, each of which is used by one thread and released when it is dropped.
//!
//! | module | idea |
//! |---|---|
//! | [`domain`] | what a domain can do, as a trait |
//! | [`provider`] | the choice of the hypervisor |
//! | [`grant`] | pages granted, mapped, copied |
//! | [`event`] | event channels |
//! | [`store`] | the store: its wire protocol and a client |
//! | [`netif`] | the slots and rings of the network interface |
//! | [`real`] | a domain under Xen (`/dev/xen/*`) |
//!
//! With the feature `process` there are two more modules: `process`, where Linux processes act as
//! domains, with real kernel crossings on any machine, and `segment`, grants in memfds, on which
//! that is built. The crate `ringferry-xen-sim`, which is for tests, turns the feature on; it
//! contains the broker of those processes, a hypervisor in one address space, a server of the
//! store, and the properties that every provider must have.
#![forbid(unsafe_code)]

pub mod domain;
pub mod event;
pub mod grant;
pub mod netif;
#[cfg(feature = "process")]
pub mod process;
pub mod provider;
pub mod real;
#[cfg(feature = "process")]
pub mod segment;
pub mod store;
