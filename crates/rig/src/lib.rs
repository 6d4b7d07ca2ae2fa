//! Test beds: what tests stand on that start whole programs, and what they share with the lab. Not shipped.
//!
//! | module | idea |
//! |---|---|
//! | [`process`] | processes under test, waiting, and network namespaces |
//! | [`ready`] | the pipe on which a program says that it is ready, for tests and for the lab |
//! | [`switch`] | a switch under test: the program `ringferry` in a folder of its own |
//! | [`guest`] | a guest that keeps the rules: our driver half behind a vhost-user socket |
//! | [`front`] | our driver half as a front end that polls, for tests and for the lab |
//! | [`handmade`] | an attacker's front end: any number of queue pairs, with rings that are written by hand, for tests and for the lab |
//! | [`raw`] | a guest that breaks them: it writes its rings word by word |
//! | [`domu`] | a machine whose domains are processes, and Xen guests on it |
//! | [`terminal`] | a terminal for a program under test, whose screen is read and whose keys are pressed |
//! | [`testpmd`] | DPDK's testpmd as a peer, for tests and for the lab |
//! | `schema` | the JSON schemas of what programs print: written, and held against it (feature `schema`) |
//! | [`frames`] | frames whose every byte tells where it belongs |
//!
//! Modules for tests alone panic when a test has failed, and say why; those that the lab uses as well return errors. Test support that needs no
//! program lies nearer to it: `ringferry_memory::testing` has words for rings, `ringferry_packet::testing` has packets with every field, and the
//! crate `ringferry-xen-sim` a simulated Xen.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::new_without_default)]

pub mod domu;
pub mod frames;
pub mod front;
pub mod guest;
pub mod handmade;
pub mod process;
pub mod raw;
pub mod ready;
#[cfg(feature = "schema")]
pub mod schema;
pub mod switch;
pub mod terminal;
pub mod testpmd;
