//! The receive half of a driver: posts buffers, delivers packets, posts buffers again.
//!
//! A worker attaches an [`RxQueue`] to a ring at set-up, calls [`RxQueue::receive`] and [`RxQueue::top_up`] in
//! its polling loop and [`RxQueue::refill`] before it sleeps, and detaches the queue at the end.
//!
//! # The life of a received packet
//!
//! 1. [`RxQueue::refill`] asks the [policy] for the length of buffers, takes as many as the ring has room
//!    for, up to [`queue::POSTED`] bytes (recycled ones first, then new ones carved from 32 KiB chunks), and
//!    posts each under a token. The queue records a buffer only once the ring has accepted it.
//! 2. The device fills one or more buffers and reports how many bytes it wrote.
//! 3. [`RxQueue::receive`] collects a burst of completions and prefetches their headers before it reads any of
//!    them. Each completion is checked against the buffer that was posted. An invalid packet is counted
//!    (`rx_length_errors`) and dropped, and its buffers are posted again.
//! 4. A packet of up to `copy_break` bytes is copied into a small buffer, and its receive buffer is posted
//!    again. For a longer one, the driver's header is removed from the front, adjacent buffers are joined, and
//!    the policy gets its length as a sample.
//! 5. The packet is delivered as a [`Chain`](ringferry_packet::buffer::Chain), which owns its buffers.
//! 6. Buffers that come back by [`RxQueue::recycle`] are posted again without an atomic operation, if their
//!    length is close to the one that the policy asks for. Buffers that are dropped elsewhere return to their
//!    chunk, which can be carved again when all of it has returned.
//!
//! | file | contents |
//! |---|---|
//! | [`queue`] | the receive queue: posted buffers, completions, assembly of packets |
//! | `supply` | the supply of empty buffers: recycled, trimmed and newly carved ones |
//! | [`policy`] | the length of the next buffer |
//! | [`stats`] | counters |

pub mod policy;
pub mod queue;
pub mod stats;
mod supply;

pub use policy::PolicyKind;
pub use queue::{AttachError, RxConfig, RxQueue};
pub use stats::RxStats;
