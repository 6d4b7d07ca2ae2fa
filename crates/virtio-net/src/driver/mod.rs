//! The driver half: what a guest is.
//!
//! All rings and buffers of a driver lie in one [`Arena`], memory of our own that the device maps.
//! The way of a packet out: take a [`Slot`] from the [`Transmitq`], fill it, [`Transmitq::send`], and
//! once per burst [`Transmitq::publish`]; the slot comes back with [`Transmitq::reclaim`]. The way in:
//! [`Receiveq::receive`] lends each packet to its caller and posts the buffers again with
//! [`Receiveq::refill`].
//!
//! What the device writes (used lengths, headers, packet bytes) is hostile, as everywhere.

mod arena;
mod controlq;
mod receiveq;
mod transmitq;

pub use arena::{Arena, ArenaError, Queue};
pub use controlq::Controlq;
pub use receiveq::{Loan, Packet, ReceiveErrors, Receiveq, RxMode};
pub use transmitq::{Sent, Slot, Transmitq};
