//! The driver half: the queues of a guest's driver.
//!
//! An owner creates an [`Arena`] for rings and buffers, one [`Pair`] per queue pair in it, tells
//! the device where they lie, and uses each pair from one thread until it drops it. This module
//! holds the rings ([`TxRing`], [`RxRing`]) and their memory; the framework ([`ringferry_nic`])
//! drives them: a [`Transmitq`] is its transmit queue over such a ring, a [`Receiveq`] its receive
//! queue. [`Channels`] tracks how many pairs are in use.
//!
//! Everything that the device writes (used lengths, headers, packet bytes) is untrusted and
//! checked.

mod arena;
mod channels;
mod controlq;
mod pair;
mod rings;

pub use arena::{Arena, ArenaError, Queue};
pub use channels::{ChannelError, Channels};
pub use controlq::Controlq;
pub use pair::{CHUNK, Pair, PairConfig, PairError, Receiveq, Transmitq};
pub use rings::{MAX_SEGS, RxRing, TxRing};
