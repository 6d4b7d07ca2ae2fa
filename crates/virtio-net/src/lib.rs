//! The virtio network device (VIRTIO 1.4, 5.1), both halves.
//!
//! | module | what it holds |
//! |---|---|
//! | [`features`] | feature bits, what depends on what, what they mean for offloads |
//! | [`config`] | the configuration space |
//! | [`control`] | the commands of the control queue, as bytes and as values |
//! | [`device`] | the half that carries packets for a guest: [`device::Transmitq`], [`device::Receiveq`], [`device::Controlq`], where frames go and when the guest hears of them |
//! | [`driver`] | the half that a guest is: [`driver::Transmitq`], [`driver::Receiveq`], [`driver::Controlq`] |
//!
//! Queues are named from the driver's side, as the specification does: a *transmitq* carries packets
//! from the driver to the device, a *receiveq* the other way. A queue belongs to one thread, and
//! nothing in it is shared with another queue.
//!
//! Over vhost-user the front end (the VMM, or [`driver`]'s owner) keeps the control queue and the
//! configuration space to itself; a back end only ever sees packet queues. [`device::Controlq`] and
//! [`config`] serve programs that embed the device half.
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
pub mod device;
pub mod driver;
pub mod features;
mod header;

pub use features::Features;

/// Largest frame either half carries, virtual header excluded: an IPv6 packet of 65535 bytes of
/// payload, its header, an Ethernet header and two VLAN tags, rounded up.
pub const MAX_FRAME: usize = 65_600;

/// Smallest frame: an Ethernet header.
pub const MIN_FRAME: usize = 14;
