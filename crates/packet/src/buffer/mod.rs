//! Packet buffers in shared memory: where a driver keeps what it sends and receives.
//!
//! ```text
//! Pool       chunks of one size, counted by reference; owned by one worker, its buffers go anywhere
//! Pools      the pools of a worker: small, frame, large
//! Fragments  buffers of any size carved from the chunks of a pool, one behind the other
//! Buf        a range of a chunk: head room, data, tail room
//! Chain      a packet: one buffer or more, its virtual header, its flow
//! ```
//!
//! Who owns what: a [`Buf`] owns its range. Ranges are disjoint unless [shared](Buf::share), so what
//! may be written is known from the buffer alone. A chunk goes back to its pool when the last range in it is
//! dropped, from whichever thread; [`Pool::recycle`] does the same without an atomic operation where
//! the pool is at hand, as it is on every worker's hot path.
//!
//! The memory is shared with a device, which may write any of it at any time. What is read from it is
//! copied first, as everywhere.

mod buf;
mod chain;
mod faults;
mod fragments;
mod pool;
mod pools;

pub use buf::{Buf, Extent};
pub use chain::{Bufs, Chain, Info};
pub use faults::Faults;
pub use fragments::Fragments;
pub use pool::{Pool, PoolError, PoolLayout};
pub use pools::{Pools, PoolsLayout};
