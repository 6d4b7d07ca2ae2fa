//! Linux processes that play domains, with real crossings into the kernel and on any machine.
//!
//! A program becomes a domain with [`ProcessDomain::connect`]; it is one until the last handle of that is dropped.
//! A broker (`Broker` in the crate `ringferry-xen-sim`) plays the hypervisor: it numbers the domains, makes the memory they grant and the doorbells of their
//! event channels, and passes both on to whom they are meant for. It is asked at set-up only; what is done per
//! packet goes to the kernel directly:
//!
//! | of Xen | here |
//! |---|---|
//! | granted pages | a memfd per call of `grant`, made and sealed by the broker, so nobody can truncate it |
//! | entry of the grant table | a word in a second memfd that both sides count in |
//! | map, unmap | `mmap` of the page, and of nothing in its place, with the flush of the TLB |
//! | copy | the kernel copies from or to the memfd, which the caller need not have mapped |
//! | event channel | two eventfds |
//!
//! A process that keeps to this crate is held to its grants. One that does not can keep pages mapped for longer than it
//! was granted them, which nobody else ever uses again, and can write none that were granted for reading. It
//! cannot harm the broker or other domains otherwise; whatever it asks for is bounded.

mod connection;
mod domain;
pub mod wire;

pub use domain::{ConnectError, ProcessDomain};
