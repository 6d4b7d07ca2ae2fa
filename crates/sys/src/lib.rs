#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! Linux calls for user-space network data paths, each wrapped once, safely.
//!
//! Each type owns its descriptor from its constructor until it is dropped, and may move between threads; what
//! belongs to a thread (namespaces, affinity, signal masks) says so at its function.
//!
//! | module | contents | owner of |
//! |---|---|---|
//! | [`tap`] | a tap device with virtio headers and offloads | the descriptor, and a tap it created |
//! | [`bpf`] | the XDP program that gives packets to AF_XDP sockets | the attachment and the table of sockets |
//! | [`netif`] | settings of a network interface: up, MTU, addresses | nothing |
//! | [`closer`] | closing what a peer passed, where waiting harms nobody | what it was handed |
//! | [`eventfd`] | a doorbell that never blocks, even if a peer made it | the descriptor |
//! | [`epoll`] | waiting for descriptors | the epoll instance, not the registered descriptors |
//! | [`socket`] | Unix stream sockets that pass descriptors | the descriptor; a listener also its file |
//! | [`lent`] | a Unix stream socket that a peer has made, for sending | the descriptor |
//! | [`lifeline`] | telling that a process does not run any more before its files are closed | a thread that waits |
//! | [`signal`] | signals as events | the descriptor; the signals stay blocked |
//! | [`namespace`] | user and network namespaces | the namespace descriptors it returns |
//! | [`process`] | starting children in namespaces, CPU time, privileges | nothing |
//! | [`program`] | where programs are: beside the running one, or in `PATH` | nothing |
//! | [`inherited`] | descriptors passed by a parent | nothing; hands each out once |
//! | [`ready`] | telling the process that started this one that it is ready (`--ready-fd`) | the descriptor |
//! | [`systemd`] | readiness and socket activation | inherited sockets, handed out once |
//! | [`interrupt`] | interrupting a thread that a peer blocks in a system call | nothing |
//! | [`watchdog`] | bounds the time for which a peer can block a thread so | its thread |
//! | [`spin`] | adaptive busy polling before sleep | nothing |
//! | [`copy`] | copies from and to memory of another process | nothing |
//! | [`cpu`] | CPU affinity of threads | nothing |
//! | [`usage`] | CPU time of threads, idle time of processors | nothing |
//! | [`xen`] | Xen's devices: grants and event channels | the descriptor |
//! | [`rlimit`] | the limit of open files | nothing |
//! | [`sandbox`] | giving up privileges: capabilities, Landlock, seccomp | nothing; there is no way back |
//!
//! The feature `testing` adds the module `testing`, for the tests of other crates.
//!
//! Only this crate and `ringferry-memory` contain `unsafe`. Linux 5.11 or newer is expected; functions that work
//! with less on older kernels document it.

pub mod accounts;
pub mod bpf;
pub mod closer;
pub mod copy;
pub mod cpu;
pub mod epoll;
pub mod eventfd;
mod ifreq;
pub mod inherited;
pub mod interrupt;
pub mod lent;
pub mod lifeline;
pub mod namespace;
pub mod netif;
mod netlink;
pub mod process;
pub mod program;
pub mod ready;
pub mod rlimit;
pub mod sandbox;
pub mod signal;
pub mod socket;
pub mod spin;
pub mod systemd;
pub mod tap;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod usage;
pub mod watchdog;
pub mod xen;
