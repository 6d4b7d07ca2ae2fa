//! The device half: carries packets for a guest.
//!
//! The way of a packet through it: [`Transmitq::poll`] takes a burst of chains, checks each header and
//! yields frames that still lie in the guest's memory; the owner decides where they go and hands each
//! to a [`Receiveq::deliver`], which copies it into that guest's buffers; [`Receiveq::flush`] shows the
//! burst to the receiver; [`Transmitq::complete`] gives the sender its buffers back.
//!
//! With several queue pairs [`Steering`] says which one a frame goes to, and learns from what the guest sends.
//! [`Coalescer`] says when the guest is told. Both do what the driver has asked for through the control
//! queue, which [`Settings`] keeps.

mod coalesce;
mod controlq;
mod flows;
mod receiveq;
mod settings;
mod steering;
mod transmitq;

pub use coalesce::{Call, Coalescer};
pub use controlq::Controlq;
pub use flows::FlowTable;
pub use receiveq::{Receiveq, Refused};
pub use settings::{Filter, Settings};
pub use steering::{Indirection, Steering};
pub use transmitq::{Rejected, Transmitq};
