//! Packet buffers in shared memory, for drivers (comparable to mbufs and their pools).
//!
//! ```text
//! Pool       reference-counted chunks of one size; owned by one worker, its buffers may go to any thread
//! Pools      the three pools of a worker: small, frame, large
//! Fragments  buffers of any size, carved one after the other from the chunks of a pool
//! Buf        a range of a chunk: head room, data, tail room
//! Chain      a packet: one or more buffers, its virtual header, its flow hash
//! ```
//!
//! A worker makes its pools over shared memory when it starts, allocates buffers from them without a lock, and keeps the
//! pools as long as it runs; buffers may outlive them. A [`Buf`] owns its range. Ranges are disjoint unless they are
//! [shared](Buf::share), so the buffer alone determines which bytes may be written. A chunk returns to its pool when the
//! last range in it is dropped, on any thread; [`Pool::recycle`] does the same without an atomic operation, for the
//! worker that has the pool.
//!
//! The memory is shared with a device, which may write any of it at any time. Bytes are copied to private memory before
//! they are interpreted.

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
