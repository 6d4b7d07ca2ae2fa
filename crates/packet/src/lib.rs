//! Ethernet frames as a virtual NIC sees them: the virtio-net header that travels with a frame, and
//! what software has to do when the receiver of a frame lacks an offload its sender used.
//!
//! The way through the crate follows the way of a frame through a switch port:
//!
//! 1. [`vnet::Header`] is copied out of shared memory once, [`sanitised`](vnet::Header::sanitised) and
//!    [`checked`](vnet::Header::check) against the length of the frame.
//! 2. [`ether`] reads addresses from the first bytes for the look-up; [`flow`] tells frames of a flow by
//!    their hash, to choose a queue or worker.
//! 3. [`vnet::Offloads::accepts`] tells whether the receiver can take the frame as it is. If not,
//!    [`segment::Segmenter`] cuts an oversized frame and [`checksum::complete`] finishes a checksum.
//!
//! Packets that are kept (by a driver, until the device is done with them) lie in [`buffer`]s from pools
//! over shared memory, one packet in a [`buffer::Chain`] of them.
//! [`segment::segment_chain`] cuts those without copying their payload, and [`gro::Gro`] is the way back: received
//! segments of a flow become one packet again.
//!
//! In between, [`frame::Burst`] holds what a port has read, its storage reused from burst to burst.
//! Every function that is not about [`buffer`]s works on slices the caller owns and allocates nothing. Every byte of a frame
//! and of its header may come from a hostile peer; no input makes a function of this crate panic.
#![forbid(unsafe_code)]

pub mod buffer;
pub mod checksum;
pub mod ether;
pub mod extension;
pub mod flow;
pub mod frame;
pub mod gro;
pub mod parse;
pub mod segment;
pub mod vnet;

#[cfg(test)]
mod testing;
