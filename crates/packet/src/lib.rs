//! Ethernet frames as a virtual NIC sees them: the virtio-net header that travels with a frame, and
//! what software has to do when the receiver of a frame lacks an offload its sender used.
//!
//! The way through the crate follows the way of a frame through a switch port:
//!
//! 1. [`vnet::Header`] is copied out of shared memory once, [`sanitised`](vnet::Header::sanitised) and
//!    [`checked`](vnet::Header::check) against the length of the frame.
//! 2. [`ether`] reads addresses from the first bytes for the look-up; [`parse::flow_hash`] picks a
//!    queue.
//! 3. [`vnet::Offloads::accepts`] tells whether the receiver can take the frame as it is. If not,
//!    [`segment::Segmenter`] cuts an oversized frame and [`checksum::complete`] finishes a checksum.
//!
//! In between, [`frame::Burst`] holds what a port has read, its storage reused from burst to burst.
//! Every other function works on slices the caller owns and allocates nothing. Every byte of a frame
//! and of its header may come from a hostile peer; no input makes a function of this crate panic.
#![forbid(unsafe_code)]

pub mod checksum;
pub mod ether;
pub mod frame;
pub mod parse;
pub mod segment;
pub mod vnet;

#[cfg(test)]
mod testing;
