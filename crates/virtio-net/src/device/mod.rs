//! The device half: it carries packets to and from one guest's driver.
//!
//! The owner creates a [`Transmitq`] and a [`Receiveq`] for each started pair of rings, uses each
//! from one thread, and drops them when the rings stop. For each burst, [`Transmitq::poll`] takes
//! chains, checks each header and yields frames that still lie in the guest's memory; the owner
//! decides where they go and passes each to a [`Receiveq::deliver`], which copies it into that
//! guest's buffers; [`Receiveq::flush`] publishes the burst to the receiver;
//! [`Transmitq::complete`] returns the sender its buffers.
//!
//! With several queue pairs [`Steering`] selects the receiveq of a frame, and learns from the
//! frames that the guest sends. [`Coalescer`] delays notifications. Both are configured from
//! [`Settings`], which the driver changes through the control queue.

mod coalesce;
mod controlq;
mod flows;
mod receiveq;
mod settings;
mod steering;
mod transmitq;

pub use coalesce::{Coalescer, Notify};
pub use controlq::Controlq;
pub use flows::FlowTable;
pub use receiveq::{Receiveq, Refused, Run, RunEnd};
pub use settings::{Filter, Settings};
pub use steering::{Indirection, Steering};
pub use transmitq::{Rejected, Transmitq};
