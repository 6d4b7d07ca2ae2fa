//! Linux calls for user-space network data paths, each wrapped once, safely.
//!
//! | module | idea | owner of |
//! |---|---|---|
//! | [`tap`] | a tap device with virtio headers and offloads | the descriptor, and a tap it created |
//! | [`netif`] | settings of a network interface: up, MTU, addresses | nothing |
//! | [`eventfd`] | a doorbell that never blocks, also when a peer made it | the descriptor |
//! | [`epoll`] | waiting for descriptors | the epoll instance, not what is registered |
//! | [`socket`] | Unix stream sockets that pass descriptors | the descriptor; a listener also its file |
//! | [`signal`] | signals as events | the descriptor; the signals stay blocked |
//! | [`namespace`] | user and network namespaces | the namespace descriptors it returns |
//! | [`process`] | starting children in namespaces, CPU time, privileges | nothing |
//! | [`inherited`] | descriptors passed by a parent | nothing; hands each out once |
//! | [`systemd`] | readiness and socket activation | inherited sockets, handed out once |
//! | [`interrupt`] | getting a thread out of a call a peer holds it in | nothing |
//! | [`spin`] | how long to look for work before sleeping | nothing |
//! | [`copy`] | copies from and to memory of another process | nothing |
//! | [`cpu`] | which processors a thread may use | nothing |
//! | [`usage`] | how much of the processors a thread uses, and nobody | nothing |
//! | [`xen`] | Xen's devices: grants and event channels | the descriptor and its bookings |
//! | [`rlimit`] | how many descriptors the process may open | nothing |
//!
//! This crate and `ringferry-memory` are where the project's `unsafe` lives. Linux 5.11 or newer is
//! expected; what older kernels lack and still can be done without is said at each function.

pub mod copy;
pub mod cpu;
pub mod epoll;
pub mod eventfd;
mod ifreq;
pub mod inherited;
pub mod interrupt;
pub mod namespace;
pub mod netif;
mod netlink;
pub mod process;
pub mod rlimit;
pub mod signal;
pub mod socket;
pub mod spin;
pub mod systemd;
pub mod tap;
#[cfg(test)]
mod testing;
pub mod usage;
pub mod xen;
