//! The driver half: what a guest is.
//!
//! The rings are here ([`TxRing`], [`RxRing`]), and the [`Arena`] they and all buffers lie in, memory of our own
//! that the device maps. What drives them is the framework ([`ringferry_nic`]): a [`Transmitq`] is its
//! transmit queue over such a ring, a [`Receiveq`] its receive queue. [`Pair`] puts them together, and [`Channels`]
//! keeps how many of them are in use.
//!
//! What the device writes (used lengths, headers, packet bytes) is hostile, as everywhere.

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
