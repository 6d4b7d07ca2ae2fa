#![forbid(unsafe_code)]
//! What a Xen domain shares with other domains, in user space: pages by *grant*, events by *event channel*, set-up
//! by *store*, packets by the rings of the *network interface*.
//!
//! | module | idea |
//! |---|---|
//! | [`domain`] | what a domain can do, as a trait; who provides it |
//! | [`grant`] | pages granted, mapped, copied |
//! | [`event`] | event channels |
//! | [`store`] | the store: its wire protocol, a client, a server |
//! | [`netif`] | the slots and rings of the network interface |
//! | [`testing`] | what every provider must do, as functions for tests |
//!
//! Three providers of [`Domain`](domain::Domain): [`real`] for a domain under Xen (`/dev/xen/*`), [`process`] where Linux
//! processes play domains, with real kernel crossings on any machine, and [`fake`] in one address space, for tests and fault injection.

pub mod domain;
pub mod event;
pub mod fake;
pub mod grant;
pub mod netif;
pub mod process;
pub mod real;
mod segment;
pub mod store;
pub mod testing;
