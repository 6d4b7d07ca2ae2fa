//! The process provider: Linux processes act as domains, with real crossings into the kernel and on
//! any machine.
//!
//! A program becomes a domain with [`ProcessDomain::connect`]; it is one until the last handle of
//! that is dropped. A broker (`Broker` in the crate `ringferry-xen-sim`) acts as the hypervisor: it
//! numbers the domains, creates the memory they grant and the eventfds of their event channels, and
//! passes both to the domains they are meant for. It is only involved in set-up; per-packet
//! operations go to the kernel directly:
//!
//! | of Xen | here |
//! |---|---|
//! | granted pages | a memfd per call of `grant`, made and sealed by the broker, so nobody can truncate it |
//! | entry of the grant table | a word in a second memfd that both sides count in |
//! | map, unmap | `mmap` of the page, and of nothing in its place, with the flush of the TLB |
//! | copy | the kernel copies from or to the memfd, which the caller need not have mapped |
//! | event channel | two eventfds |
//!
//! A process that uses this crate is held to its grants. One that does not can keep pages mapped
//! after their grants ended, which are never reused, and cannot write pages that were granted for
//! reading. It cannot harm the broker or other domains otherwise; all its requests are bounded.

mod connection;
mod domain;
pub mod wire;

pub use domain::{ConnectError, ProcessDomain};
