#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! Both halves of the Xen network interface (Xen's `io/netif.h`): [`netfront`], a driver of the
//! framework in `ringferry-nic`, and [`netback`].
//!
//! The drivers of [`xenbus`] set both up: a control thread creates one, polls it, and gets a
//! connected interface whose queues it hands to the threads that carry packets. When the driver
//! asks for it, the control thread takes the queues back and drops them, which unmaps or revokes
//! everything that was shared. [`offload`] translates between the interface's offloads and the
//! virtual header of the other crates.
#![forbid(unsafe_code)]

pub mod events;
pub mod netback;
pub mod netfront;
pub mod offload;
pub mod xenbus;
