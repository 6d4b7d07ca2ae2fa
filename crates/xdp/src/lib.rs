#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! A socket has four rings (Documentation/networking/af_xdp.rst of Linux). Two belong to its memory, the *UMEM*, which is divided into frames of [`FRAME`] bytes: on the
//! *fill* ring frames go to the kernel to be filled, on the *completion* ring those come back that were sent. Descriptors of packets come on the *receive* ring and go on
//! the *transmit* ring. A packet lies in one frame, or in several if the interface's MTU is larger.
//!
//! | file | idea |
//! |---|---|
//! | `ring` | one ring, from the side that produces or the side that consumes |
//! | `queue` | the rings and the memory of one socket: packets out of it and into it |
//! | `open` | making sockets and attaching the program that gives them packets, with privileges |

#![forbid(unsafe_code)]

mod open;
mod queue;
mod ring;

pub use open::{Mode, Opened, XdpError, is_zero_copy, open, several_frames};
pub use queue::{Lent, Queue, Refused, Statistics};

/// Bytes of a frame of the UMEM: a page, the largest that the kernel allows without huge pages.
pub const FRAME: usize = 4096;

/// Frames that the kernel fills, and entries of each ring: as many as DPDK's driver has by default, 3 ms of a million packets a second.
const ENTRIES: u32 = 2048;

/// Frames of a UMEM: the first half is received into, the other is sent from, so that neither direction can take all from the other.
const FRAMES: u32 = 2 * ENTRIES;
