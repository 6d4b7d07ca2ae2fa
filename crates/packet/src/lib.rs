#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! Ethernet frames of a virtual NIC: the virtio-net header, parsing, and software fallbacks (GSO, checksum, GRO) for
//! offloads that the receiver of a frame lacks.
//!
//! The modules in the order in which a frame passes them in a switch port:
//!
//! 1. [`vnet::Header`] is copied out of shared memory once, [`sanitised`](vnet::Header::sanitised),
//!    [`checked`](vnet::Header::check) against the length of the frame and [`validated`](vnet::Header::validated) against
//!    its first bytes.
//! 2. [`ether`] reads addresses from the first bytes for the look-up; [`flow`] computes the hash of the flow, which
//!    selects a queue or worker.
//! 3. [`vnet::Offloads::accepts`] returns true if the receiver accepts the frame unchanged. If not,
//!    [`segment::Segmenter`] segments an oversized frame and [`checksum::complete`] completes a checksum.
//!
//! A [`filter::Filter`] tells which frames a capture is about: a cBPF program, verified once and run on each frame where it lies.
//!
//! A [`frame::Burst`] holds the frames that a port has read; its storage is reused from burst to burst. Packets that a
//! driver keeps until the device has completed them are in [`buffer`]s from pools over shared memory, each packet in
//! a [`buffer::Chain`]. [`segment::segment_chain`] segments those without copying their payload, and [`gro::Gro`] does
//! the reverse: it merges received segments of a flow.
//!
//! All types belong to one thread at a time. Functions that do not deal with [`buffer`]s work on slices of the
//! caller and allocate nothing. Every byte of a frame and of its header may come from a hostile peer; no input makes a
//! function of this crate panic.
#![forbid(unsafe_code)]

pub mod buffer;
pub mod checksum;
pub mod ether;
pub mod extension;
pub mod filter;
pub mod flow;
pub mod frame;
pub mod gro;
pub mod parse;
pub mod segment;
pub mod vnet;

#[cfg(any(test, feature = "testing"))]
pub mod testing;
