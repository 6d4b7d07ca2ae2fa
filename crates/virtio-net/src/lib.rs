#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! The virtio network device (VIRTIO 1.4, 5.1), both halves: the device that a back end provides,
//! and the driver that a guest runs.
//!
//! Both halves are sets of queues. An owner creates each queue on a ring once features are
//! negotiated, and drives it from one thread: it polls, delivers or sends, flushes, and signals the
//! other side when a call returns true. Queues share nothing with each other, start no threads and
//! never block; they end by being dropped.
//!
//! | module | idea |
//! |---|---|
//! | [`features`] | feature bits, their dependencies, and the offloads that follow from them |
//! | [`config`] | the configuration space |
//! | [`control`] | the commands of the control queue, encoded and decoded |
//! | [`device`] | the half that carries packets for a guest: [`device::Transmitq`], [`device::Receiveq`], [`device::Controlq`], receive steering and notification coalescing |
//! | [`queue_index`] | the indexes of the receiveq and the transmitq of each queue pair |
//! | [`driver`] | the half of a guest's driver: [`driver::Transmitq`], [`driver::Receiveq`], [`driver::Controlq`] |
//!
//! Queues are named from the driver's side, as in the specification: a *transmitq* carries packets
//! from the driver to the device, a *receiveq* from the device to the driver.
//!
//! Over vhost-user the front end (the VMM, or the owner of [`driver`]) serves the control queue and
//! the configuration space itself; a back end only ever sees packet queues. [`device::Controlq`]
//! and [`config`] are for programs that embed the device half.
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
pub mod device;
pub mod driver;
pub mod features;
mod header;
pub mod queue_index;

pub use features::Features;

/// Largest frame that either half carries, in bytes without the virtual header: an IPv6 packet of
/// 65535 bytes of payload, its header, an Ethernet header and two VLAN tags, rounded up.
pub const MAX_FRAME: usize = 65_600;

/// Smallest frame that either half carries, in bytes: an Ethernet header.
pub const MIN_FRAME: usize = 14;
