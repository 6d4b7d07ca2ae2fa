//! The device half: carries packets for a guest.
//!
//! The way of a packet through it: [`Transmitq::poll`] takes a burst of chains, checks each header and
//! yields frames that still lie in the guest's memory; the owner decides where they go and hands each
//! to a [`Receiveq::deliver`], which copies it into that guest's buffers; [`Receiveq::flush`] shows the
//! burst to the receiver; [`Transmitq::complete`] gives the sender its buffers back.

mod controlq;
mod receiveq;
mod transmitq;

pub use controlq::{Controlq, Filter, Settings};
pub use receiveq::{Receiveq, Refused};
pub use transmitq::{Rejected, Transmitq};
