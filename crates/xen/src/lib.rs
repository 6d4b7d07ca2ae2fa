#![forbid(unsafe_code)]
//! What a Xen domain shares with other domains, in user space: pages by *grant*, events by *event channel*, set-up
//! by *store*, packets by the rings of the *network interface*.
//!
//! | module | idea |
//! |---|---|
//! | [`domain`] | what a domain can do, as a trait |
//! | [`provider`] | which hypervisor a program speaks to |
//! | [`grant`] | pages granted, mapped, copied |
//! | [`event`] | event channels |
//! | [`store`] | the store: its wire protocol and a client |
//! | [`netif`] | the slots and rings of the network interface |
//! | [`real`] | a domain under Xen (`/dev/xen/*`) |
//!
//! With the feature `process` there are two more: `process`, where Linux processes play domains, with real kernel crossings on any
//! machine, and `segment`, grants in memfds, on which that stands. The crate `ringferry-xen-sim`, which is for tests, turns the feature on; it has the
//! broker of those processes, a hypervisor in one address space, a server of the store, and what every provider must do.

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
