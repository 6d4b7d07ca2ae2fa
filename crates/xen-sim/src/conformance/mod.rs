//! Conformance tests: the properties of every provider of domains and every store, as functions
//! that panic when a property does not hold. The tests of this crate run them against the
//! simulations; the example `xen-check` runs them in a domain of real Xen.

pub mod provider;
pub mod store;
